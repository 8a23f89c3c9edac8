"""Notebooks in JupyterLab in a real browser: a reader moves each control, and the plot's data change as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import PLOT, jupyter_lab, line, page_of, run_all
from figures_helpers import activation
from notebook_helpers import NOTEBOOKS, write_runs

SCREENSHOTS = Path(__file__).resolve().parents[1] / "build" / "screenshots"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, chromium: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lab")
    runs = write_runs(folder / "data" / "runs")
    for name in ("00_start_here", "03_norm_explorer", "06_your_own_model"):
        notebook = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
        (folder / f"{name}.ipynb").write_text(notebook.replace("../data/runs", json.dumps(str(runs))[1:-1]))
    with jupyter_lab(folder) as address:
        yield address


def expected(scheme: str, depth: int, step: int) -> list[float]:
    return [1.01 * activation(scheme, layer, step) for layer in range(depth + 1)]


def wait_for(page: Any, scheme: str, values: list[float]) -> None:
    """Until the plot shows these values for the scheme."""
    agrees = f"""([name, values]) => {{
        const trace = {PLOT}.data.find(trace => trace.name === name);
        const y = trace.visible ? Array.from(trace.y) : [];
        return y.length === values.length && y.every((v, i) => Math.abs(v - values[i]) <= 1e-6 * Math.abs(values[i]));
    }}"""
    page.wait_for_function(agrees, arg=[scheme, values], timeout=20_000)


def slider(page: Any, name: str) -> Any:
    row = page.locator(".widget-hslider, .widget-inline-hbox").filter(has=page.get_by_text(name, exact=True))
    return row.first.locator(".noUi-handle")


@pytest.mark.timeout(300)
def test_start_here_moves_with_the_keyboard(address: str, chromium: str):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "00_start_here.ipynb")
        wait_for(page, "bhyt", expected("bhyt", 4, 20))
        slider(page, "step").focus()
        page.keyboard.press("ArrowLeft")
        wait_for(page, "bhyt", expected("bhyt", 4, 10))
        page.keyboard.press("ArrowLeft")
        wait_for(page, "bhyt", expected("bhyt", 4, 0))
        # The next control in order is reached by the Tab key alone, and the box answers to the space bar.
        page.locator(".normlab-lns input").focus()
        page.keyboard.press("Space")
        wait_for(page, "lns", [])
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "00_start_here.png")
        assert errors == []


@pytest.mark.timeout(300)
def test_the_explorer_answers_every_control(address: str, chromium: str):
    with page_of(chromium, width=1920, height=1080) as (page, errors):
        run_all(page, address, "03_norm_explorer.ipynb")
        wait_for(page, "lns", expected("lns", 4, 20))
        handle = slider(page, "depth").bounding_box()
        page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
        page.mouse.down()
        page.mouse.move(handle["x"] - 300, handle["y"] + handle["height"] / 2, steps=8)
        page.mouse.up()
        wait_for(page, "lns", expected("lns", 2, 20))
        page.locator(".widget-dropdown select").nth(3).select_option(label="relative to layer 1")
        first = expected("lns", 2, 20)[1]
        wait_for(page, "lns", [value / first for value in expected("lns", 2, 20)])
        page.locator(".widget-dropdown select").nth(3).select_option(label="absolute values")
        page.locator(".widget-dropdown select").nth(0).select_option(index=1)
        page.wait_for_function(f"() => {PLOT}.layout.title.text.startsWith('Variance')", timeout=20_000)
        assert page.evaluate(f"() => {PLOT}.layout.yaxis.type") == "log"
        page.get_by_text("log axis").click()
        page.wait_for_function(f"() => {PLOT}.layout.yaxis.type === 'linear'", timeout=20_000)
        page.locator(".jupyter-widget-play button, .widget-play button").first.click()
        wait_for(page, "bhyt", expected("bhyt", 2, 10))  # one step after the other
        wait_for(page, "bhyt", expected("bhyt", 2, 20))
        page.get_by_role("button", name="compare two views").click()
        page.wait_for_function("() => document.querySelectorAll('.widget-vbox .js-plotly-plot').length === 2")
        # Neither plot is wider than its half.
        width = "plot => plot.querySelector('.main-svg').getBoundingClientRect().width"
        page.wait_for_function(
            f"() => [...document.querySelectorAll('.widget-vbox .js-plotly-plot')].every(plot => ({width})(plot) < 760)"
        )
        page.get_by_role("button", name="code").click()
        page.get_by_text("normlab.figures.profile(runs, 'feature_var_mean'").wait_for(timeout=20_000)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "03_norm_explorer.png")
        assert len(line(page, "bhyt")) == 3
        assert errors == []


@pytest.mark.timeout(300)
def test_a_model_answers_while_its_gain_is_moved(address: str, chromium: str):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "06_your_own_model.ipynb")
        page.wait_for_function(f"() => {PLOT}.data[0].y.length > 0", timeout=20_000)
        page.locator(".widget-hslider").filter(has_text="γ").locator(".noUi-handle").focus()
        for _ in range(8):
            page.keyboard.press("ArrowRight")
        moved = f"() => {PLOT}.data.find(t => t.name === 'intervened size').y.at(-1) > 1.5 * {PLOT}.data[0].y.at(-1)"
        page.wait_for_function(moved, timeout=20_000)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.locator(".widget-vbox").first.scroll_into_view_if_needed()
        page.screenshot(path=SCREENSHOTS / "06_your_own_model.png")
        assert errors == []
