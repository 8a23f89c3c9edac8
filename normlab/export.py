"""Figures as image files, where a Chrome or Chromium is at hand.

save_images   many figures as images, with one start of the browser
image_bytes   one figure as the content of an image file
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_BROWSER = "no image was made: that needs kaleido (pip install kaleido) and a Chrome or Chromium on the PATH"
# What fails when kaleido or its browser is missing or does not start: several kinds of error, none of them of ours.
_FAILURES = (ValueError, RuntimeError, OSError)


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
