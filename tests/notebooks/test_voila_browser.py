"""The explorer's notebook as a Voila page: controls and plots without code, and a slider that moves the plot."""

import json
import sys
from collections.abc import Iterator

import pytest
from browser_helpers import page_of, serve, shoot
from figures_helpers import profile
from notebook_helpers import NOTEBOOKS, write_runs

pytest.importorskip("voila")
PLOT = "document.querySelector('.js-plotly-plot')"
# Voila's template takes an icon font from a public server, which is not there without a network; extensions of
# JupyterLab that happen to be installed may not know Voila; plotly's renderer draws, then wants to keep an image of the
# plot in a notebook that is not there.
NOT_OURS = ("net::ERR", "labextensions/", "setData is not a function")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, chromium: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("voila")
    runs = write_runs(folder / "runs")
    notebook = (NOTEBOOKS / "03_norm_explorer.ipynb").read_text(encoding="utf-8")
    (folder / "03_norm_explorer.ipynb").write_text(notebook.replace("../data/grid", json.dumps(str(runs))[1:-1]))
    command = [sys.executable, "-m", "voila", "03_norm_explorer.ipynb", "--no-browser"]
    with serve(command, folder, "/voila/api/kernels") as address:
        yield address


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_explorer_is_served_without_code_and_its_slider_moves_the_plot(address, chromium):
    def shows(step: int) -> str:
        return f"""() => {{
            const y = Array.from({PLOT}?.data.find(trace => trace.name === 'bhyt')?.y ?? []);
            return y.length === 5 && y.every((v, i) => Math.abs(v / {profile("bhyt", 4, step)}[i] - 1) < 1e-3);
        }}"""

    with page_of(chromium) as (page, errors):
        page.goto(address, timeout=120_000)
        page.wait_for_selector("[name=step]", timeout=120_000)
        page.wait_for_function(shows(20), timeout=60_000)
        assert page.get_by_text("import normlab").count() == 0
        page.locator("[name=step]").focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(shows(10), timeout=20_000)
        shoot(page, "voila")
        assert [error for error in errors if not any(part in error for part in NOT_OURS)] == []
