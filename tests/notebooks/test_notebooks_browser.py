"""Notebooks in JupyterLab in a real browser: a reader moves each control, and the plot's data change as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from browser_helpers import PLOT, jupyter_lab, line, page_of, run_all, set_theme, shoot, slider
from figures_helpers import MEAN_OF_SEEDS, SCHEMES, activation
from notebook_helpers import NOTEBOOKS, write_runs

# Done at once when all cells are run, and busy when run again.
BUSY = """import time
seconds = 6 if "seconds" in globals() else 0
end = time.perf_counter() + seconds
while time.perf_counter() < end:
    sum(range(1000))
print("busy for", seconds)"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, chromium: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lab")
    runs = write_runs(folder / "data" / "runs")
    for name in ("00_start_here", "03_norm_explorer", "06_your_own_model"):
        notebook = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
        (folder / f"{name}.ipynb").write_text(notebook.replace("../data/runs", json.dumps(str(runs))[1:-1]))
    notebook = nbformat.read(folder / "00_start_here.ipynb", as_version=4)
    place = next(i for i, cell in enumerate(notebook.cells) if "NormExplorer(" in cell.source)
    notebook.cells[place + 1 :] = [nbformat.v4.new_code_cell(BUSY)]
    nbformat.write(notebook, folder / "busy.ipynb")
    with jupyter_lab(folder) as address:
        yield address


def expected(scheme: str, depth: int, step: int) -> list[float]:
    return [MEAN_OF_SEEDS * activation(scheme, layer, step) for layer in range(depth + 1)]


def wait_for(page: Any, scheme: str, values: list[float], plot: str = PLOT) -> None:
    """Until the plot shows these values for the scheme."""
    agrees = f"""([name, values]) => {{
        const trace = {plot}.data.find(trace => trace.name === name);
        const y = trace ? Array.from(trace.y) : [];
        return y.length === values.length && y.every((v, i) => Math.abs(v - values[i]) <= 1e-3 * Math.abs(values[i]));
    }}"""
    page.wait_for_function(agrees, arg=[scheme, values], timeout=20_000)


def drag(page: Any, handle: Any, distance: float) -> None:
    """Take a slider's handle with the mouse and move it sideways by some pixels."""
    box = handle.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + distance, middle[1], steps=8)
    page.mouse.up()


def button(page: Any, name: str) -> Any:
    return page.locator(".explorer button").filter(has_text=name).first


@pytest.mark.timeout(300)
@pytest.mark.slow  # the explorer's controls are tested in tests/widgets, without JupyterLab
def test_start_here_moves_with_the_keyboard(address: str, chromium: str):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "00_start_here.ipynb")
        wait_for(page, "bhyt", expected("bhyt", 4, 20))
        shoot(page, "00_start_here-1280")
        slider(page, "step").focus()
        page.keyboard.press("ArrowLeft")
        wait_for(page, "bhyt", expected("bhyt", 4, 10))
        page.keyboard.press("ArrowLeft")
        wait_for(page, "bhyt", expected("bhyt", 4, 0))
        # The Tab key alone reaches every control, and a box answers to the space bar.
        count = page.evaluate(
            """() => (window.controls = [...document.querySelectorAll(['select', 'button', 'input'].map(
                kind => `.explorer ${kind}`))].filter(
                    control => control.offsetParent !== null && !control.closest('.modebar'))).length"""
        )
        page.locator(".explorer select").first.focus()
        reached = set()
        for _ in range(2 * count):
            reached.add(page.evaluate("() => window.controls.indexOf(document.activeElement)"))
            page.keyboard.press("Tab")
        assert reached - {-1} == set(range(count)) and count == 4 + 2 + 1 + 4 + len(SCHEMES) + 5
        page.locator(".scheme input[value=lns]").focus()
        page.keyboard.press("Space")
        wait_for(page, "lns", [])
        assert errors == []


@pytest.mark.timeout(300)
@pytest.mark.slow  # what each control does is tested in test_widgets_explorer.py, without JupyterLab
def test_the_explorer_answers_every_control(address: str, chromium: str):
    with page_of(chromium, width=1920, height=1080) as (page, errors):
        run_all(page, address, "03_norm_explorer.ipynb")
        wait_for(page, "lns", expected("lns", 4, 20))
        shoot(page, "03_norm_explorer-1920")
        # Play begins anew from its end and shows every step.
        button(page, "play").click()
        wait_for(page, "bhyt", expected("bhyt", 4, 20))
        drag(page, slider(page, "step"), -600)
        wait_for(page, "lns", expected("lns", 4, 0))
        drag(page, slider(page, "depth"), -300)
        wait_for(page, "lns", expected("lns", 2, 0))
        page.locator("[name=way]").first.focus()
        page.keyboard.type("rel")
        wait_for(page, "lns", [value / expected("lns", 2, 0)[1] for value in expected("lns", 2, 0)])
        page.keyboard.press("ArrowDown")  # against Pre-LN
        page.keyboard.press("ArrowDown")  # against LNS
        ratio = [a / b for a, b in zip(expected("bhyt", 2, 0), expected("lns", 2, 0), strict=True)]
        wait_for(page, "bhyt", ratio)
        page.locator("[name=way]").first.select_option("absolute")
        wait_for(page, "bhyt", expected("bhyt", 2, 0))
        page.locator("[name=metric]").first.select_option(index=1)
        page.wait_for_function(f"() => {PLOT}.layout.title.text.startsWith('Variance')", timeout=20_000)
        for box, key, before, after in (
            ("log axis", "yaxis.type", "linear", "log"),
            ("published values", "published", False, True),
            ("seeds / interval", "bhyt band", True, False),
        ):
            shown = f"{PLOT}.layout.{key}" if "." in key else f"{PLOT}.data.some(trace => trace.name === '{key}')"
            assert page.evaluate(f"() => {shown}") == before
            page.get_by_text(box, exact=True).first.click()
            page.wait_for_function(f"after => {shown} === after", arg=after, timeout=20_000)
        page.get_by_text("theory", exact=True).first.click()
        page.get_by_text("with rings: theory, before training").wait_for(timeout=20_000)
        page.wait_for_function(f"() => {PLOT}.data.some(trace => trace.name === 'bhyt theory')", timeout=20_000)
        page.locator("[name=metric]").first.select_option(index=2)
        page.wait_for_function(f"() => {PLOT}.layout.title.text.startsWith('Gradient')", timeout=20_000)
        assert len(line(page, "bhyt")) == 2
        # A second view in half the width each, with controls of its own.
        button(page, "compare two views").click()
        second = "[...document.querySelectorAll('.explorer .js-plotly-plot')][1]"
        half = "plot => plot.querySelector('.main-svg')?.getBoundingClientRect().width < 800"
        page.wait_for_function(
            f"() => {{ const plots = [...document.querySelectorAll('.explorer .js-plotly-plot')];"
            f" return plots.length === 2 && plots.every({half}); }}"
        )
        first = line(page, "lns")
        page.locator("[name=step]").nth(1).focus()
        page.keyboard.press("End")
        wait_for(page, "lns", expected("lns", 2, 20)[1:], plot=second)
        assert line(page, "lns") == first == pytest.approx(expected("lns", 2, 0)[1:]), page.evaluate(
            f"() => {PLOT}.layout.title.text"
        )
        button(page, "code").click()
        page.get_by_text('normlab.figures.profile(runs, "grad_l2_mean"').wait_for(timeout=20_000)
        with page.expect_download() as download:
            button(page, "CSV").click()
        assert download.value.suggested_filename == "grad_l2_mean-block_in_grad-depth2-step0.csv"
        # The plots follow JupyterLab's theme.
        set_theme(page, "JupyterLab Dark")
        dark = f"{PLOT}.layout.template.layout.paper_bgcolor === '#14171b'"
        page.wait_for_function(f"() => {dark} && document.body.dataset.jpThemeLight === 'false'", timeout=20_000)
        shoot(page, "03_norm_explorer-1920-dark")
        assert errors == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_moves_while_a_cell_runs_leave_the_figure_that_the_controls_say(address: str, chromium: str):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "busy.ipynb")
        wait_for(page, "bhyt", expected("bhyt", 4, 20))
        done = page.locator(".jp-OutputArea-output").get_by_text("busy for 6")
        page.locator(".jp-CodeCell").last.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        page.locator("#jp-main-statusbar").get_by_text("| Busy").wait_for(timeout=20_000)
        for turn in range(48):  # faster than the plot can follow
            slider(page, "depth" if turn % 6 == 5 else "step").focus()
            page.keyboard.press(("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight")[turn % 4])
        slider(page, "depth").focus()
        page.keyboard.press("Home")
        slider(page, "step").focus()
        page.keyboard.press("Home")
        assert not done.count()
        done.wait_for(timeout=60_000)
        for scheme in SCHEMES:
            wait_for(page, scheme, expected(scheme, 2, 0))
        assert "before training" in page.evaluate(f"() => {PLOT}.layout.title.text")
        assert not page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count()
        assert errors == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_model_answers_while_its_gain_is_moved(address: str, chromium: str):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "06_your_own_model.ipynb")
        page.locator(".live").get_by_role("button", name="γ").click()
        page.get_by_role("slider", name="γ, all blocks").focus()
        loss = page.locator(".live .loss b").first
        before = loss.inner_text()
        for _ in range(8):
            page.keyboard.press("ArrowUp")
        page.wait_for_function("before => document.querySelector('.live .loss b').textContent !== before", arg=before)
        shoot(page, "06_your_own_model-1280")
        assert errors == []
