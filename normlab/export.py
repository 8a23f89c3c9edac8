"""Figures as image files, where a Chrome or Chromium is at hand; notebooks as images.

save_images       many figures as images, with one start of the browser
image_bytes       one figure as the content of an image file
keep_images_only  a notebook whose figures are plain images, so that any page that shows notebooks shows them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_BROWSER = "no image was made: that needs kaleido (pip install kaleido) and a Chrome or Chromium on the PATH"
# What fails when kaleido or its browser is missing or does not start: several kinds of error, none of them of ours.
_FAILURES = (ValueError, RuntimeError, OSError)
_PLOTLY_MIME = "application/vnd.plotly.v1+json"


def save_images(
    figures: Mapping[str, Any], folder: str | Path, *, kind: str = "png", width: int = 1280, scale: float = 1.5
) -> tuple[list[Path], str]:
    """Write every figure to `folder`/`name`.`kind`; all of them, or none and a line that says what is missing."""
    import plotly.graph_objects as go
    import plotly.io as pio

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{kind}" for name in figures]
    heights = [figure.layout.height for figure in figures.values()]
    try:
        pio.write_images(
            [go.Figure(figure) for figure in figures.values()],
            files,
            width=width,
            height=heights,
            scale=scale,
            validate=False,
        )
    except _FAILURES:
        return [], NO_BROWSER
    return files, ""


def image_bytes(figure: Any, kind: str = "png", *, width: int = 1280, scale: float = 1.5) -> bytes | None:
    """The figure as an image file's content, or None where no browser is at hand."""
    import plotly.graph_objects as go

    try:
        image: bytes = go.Figure(figure).to_image(format=kind, width=width, height=figure.layout.height, scale=scale)
    except _FAILURES:
        return None
    return image


def keep_images_only(notebook: str | Path, out: str | Path) -> int:
    """Copy an executed notebook with the images of its figures, without run-time details; returns how many images.

    Text and tables stay. Widgets and interactive figures go: they are blank where no kernel runs, and large.
    """
    content = json.loads(Path(notebook).read_text(encoding="utf-8"))
    about = content["metadata"]
    content["metadata"] = {key: about[key] for key in ("kernelspec", "language_info") if key in about}
    content["cells"] = [
        cell for cell in content["cells"] if "injected-parameters" not in cell["metadata"].get("tags", ())
    ]
    images = 0
    for cell in content["cells"]:
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        if cell["cell_type"] != "code":
            continue
        cell["execution_count"] = None
        kept = [output for output in map(_plain_output, cell["outputs"]) if output is not None]
        images += sum("image/png" in output.get("data", {}) for output in kept)
        cell["outputs"] = kept
    Path(out).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return images


def _plain_output(output: dict[str, Any]) -> dict[str, Any] | None:
    if "data" not in output:
        return output if output.get("name") == "stdout" else None
    data = output["data"]
    if "image/png" in data:
        return {"output_type": "display_data", "data": {"image/png": data["image/png"]}, "metadata": {}}
    if _PLOTLY_MIME in data or any("widget-view" in kind for kind in data):
        return None
    if "text/html" in data:  # a table; what stands beside it as text may be an address in memory
        output = output | {"data": {"text/html": data["text/html"]}}
    return output | ({"execution_count": None} if "execution_count" in output else {})
