"""A reader's moves in the explorer in a browser; the browser itself is `benchmarks.browser`."""

from pathlib import Path
from typing import Any

from benchmarks.browser import (
    browser_of,
    jupyter_lab,
    open_notebook,
    page_in,
    page_of,
    run_cells,
    serve,
    wait_until_idle,
)

__all__ = [
    "PLOT",
    "SCREENSHOTS",
    "browser_of",
    "jupyter_lab",
    "line",
    "page_in",
    "page_of",
    "run_all",
    "serve",
    "set_theme",
    "shoot",
    "slider",
]

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
PLOT = "document.querySelector('.widget-vbox .js-plotly-plot, .explorer .js-plotly-plot')"


def run_all(page: Any, address: str, notebook: str, timeout: float = 120) -> None:
    """Open the notebook and run all its cells; returns when they are done and a widget's plot is there."""
    open_notebook(page, address, notebook, timeout)
    run_cells(page, timeout)
    wait_until_idle(page, timeout)


def line(page: Any, scheme: str) -> list[float]:
    """The y values that the explorer's first plot shows for a scheme; none when it shows no such line."""
    read = f"name => Array.from({PLOT}.data.find(trace => trace.name === name)?.y || [])"
    return [float(value) for value in page.evaluate(read, scheme)]


def slider(page: Any, name: str) -> Any:
    """The explorer's first slider of that name."""
    return page.locator(f".explorer [name={name}]").first


def set_theme(page: Any, name: str) -> None:
    """Choose one of JupyterLab's themes from its menu."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator("#jp-mainmenu-settings").get_by_text("Theme", exact=True).click()
    page.get_by_text(name, exact=True).click()


def shoot(page: Any, name: str) -> None:
    """Keep a picture of the widget and what is around it."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.locator(".widget-vbox, .explorer, .live").first.evaluate("widget => widget.scrollIntoView({ block: 'start' })")
    page.wait_for_timeout(300)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
