"""Figures as image files, where a Chrome or Chromium is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_BROWSER = "no image was made: that needs kaleido (pip install kaleido) and a Chrome or Chromium on the PATH"


def save_images(figures: Mapping[str, Any], folder: str | Path) -> tuple[list[Path], str]:
    """Write every figure to `folder`/`name`.png, with one start of the browser.

    Returns the files, or none of them and a line that says what is missing.
    """
    import plotly.graph_objects as go
    import plotly.io as pio

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.png" for name in figures]
    drawn = [go.Figure(figure) for figure in figures.values()]
    heights = [figure.layout.height for figure in drawn]
    try:
        pio.write_images(drawn, files, width=1280, height=heights, scale=1.5, validate=False)
    except (ValueError, RuntimeError, OSError):  # kaleido or its browser is missing or does not start
        return [], NO_BROWSER
    return files, ""
