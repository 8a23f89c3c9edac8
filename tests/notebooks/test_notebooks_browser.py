"""Notebooks in JupyterLab in a real browser: a reader moves each control, and the plot's data change as it says."""

import json
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from browser_helpers import PLOT, jupyter_lab, page_of, run_all, set_theme, shoot, slider
from figures_helpers import SCHEMES, profile
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
    for name in ("00_start_here", "06_your_own_model"):
        notebook = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
        (folder / f"{name}.ipynb").write_text(notebook.replace("../data/grid", json.dumps(str(runs))[1:-1]))
    notebook = nbformat.read(folder / "00_start_here.ipynb", as_version=4)
    place = next(i for i, cell in enumerate(notebook.cells) if "NormExplorer(" in cell.source)
    notebook.cells[place + 1 :] = [nbformat.v4.new_code_cell(BUSY)]
    nbformat.write(notebook, folder / "busy.ipynb")
    with jupyter_lab(folder) as address:
        yield address


def wait_for(page: Any, scheme: str, values: list[float], plot: str = PLOT) -> None:
    """Until the plot shows these values for the scheme."""
    agrees = f"""([name, values]) => {{
        const trace = {plot}.data.find(trace => trace.name === name);
        const y = trace ? Array.from(trace.y) : [];
        return y.length === values.length && y.every((v, i) => Math.abs(v - values[i]) <= 1e-3 * Math.abs(values[i]));
    }}"""
    page.wait_for_function(agrees, arg=[scheme, values], timeout=20_000)


@pytest.mark.timeout(300)
@pytest.mark.slow  # the explorer's controls are tested in tests/widgets, without JupyterLab
def test_start_here_moves_with_the_keyboard(address, chromium):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "00_start_here.ipynb")
        wait_for(page, "bhyt", profile("bhyt", 4, 0))
        shoot(page, "00_start_here-1280")
        slider(page, "step").focus()
        page.keyboard.press("ArrowRight")
        wait_for(page, "bhyt", profile("bhyt", 4, 10))
        page.keyboard.press("ArrowRight")
        wait_for(page, "bhyt", profile("bhyt", 4, 20))
        page.locator(".explorer [name=more]").click()
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
        assert reached - {-1} == set(range(count)) and count == 4 + 2 + 3 + 4 + len(SCHEMES) + 4
        page.locator(".scheme input[value=lns]").focus()
        page.keyboard.press("Space")
        wait_for(page, "lns", [])
        # The plots follow JupyterLab's theme.
        set_theme(page, "JupyterLab Dark")
        dark = f"{PLOT}?._fullLayout?.paper_bgcolor === '#14171b'"
        page.wait_for_function(f"() => {dark} && document.body.dataset.jpThemeLight === 'false'", timeout=20_000)
        assert errors == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_moves_while_a_cell_runs_leave_the_figure_that_the_controls_say(address, chromium):
    with page_of(chromium) as (page, errors):
        run_all(page, address, "busy.ipynb")
        wait_for(page, "bhyt", profile("bhyt", 4, 0))
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
            wait_for(page, scheme, profile(scheme, 2, 0))
        assert "before training" in page.evaluate(f"() => {PLOT}.layout.title.text")
        assert not page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count()
        assert errors == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_model_answers_while_its_gain_is_moved(address, chromium):
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
