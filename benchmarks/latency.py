"""A reader's wait from a key on a slider to the redrawn plot, in JupyterLab and in the page without a kernel.

    python -m benchmarks.latency data/grid --out data/bench/latency.csv

A move begins with the browser's own time stamp of the key. It ends when the frame that shows the moved lines has been
painted. The whole table is loaded. Keys go to the step slider and, a quarter of them, to the depth slider. plotly's own
FigureWidget is given the same lines, for comparison. The time from *Run All Cells* to a notebook's first figure is
measured too.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd

from benchmarks.browser import find_browser, jupyter_lab, open_notebook, page_of, run_cells, wait_until_idle
from benchmarks.timing import arguments, machine, report, run
from normlab.errors import NormlabError
from normlab.runs import load_runs, read_configs
from normlab.widgets.explorer import explorer_page
from normlab.widgets.live import live_page

NO_BROWSER = "no move was timed: that needs playwright (pip install playwright) and a Chromium or Chrome on the PATH"
WAIT = 20_000  # milliseconds after which a move counts as lost
PAUSE = 30  # milliseconds between moves: a held key repeats as often
SETTLE = 1_000
DEPTH_EVERY = 4

# Times every move: a key begins it, and it ends in the task after the frame in which a line's path was changed.
WATCH = """plot => {
    window.moves = [];
    let began = null;
    document.addEventListener('keydown', event => { began = event.timeStamp; }, true);
    const isLine = node => node.nodeType === 1 && (node.matches('.js-line') || node.querySelector('path.line'));
    new MutationObserver(found => {
        const moved = found.some(one => [one.target, ...one.addedNodes].some(isLine));
        if (began === null || !moved) return;
        const start = began;
        began = null;
        requestAnimationFrame(() => {
            const channel = new MessageChannel();
            channel.port1.onmessage = () => window.moves.push(performance.now() - start);
            channel.port2.postMessage(null);
        });
    }).observe(plot, { subtree: true, childList: true, attributes: true, attributeFilter: ['d'] });
}"""


@dataclass(frozen=True)
class Surface:
    """Controls of a figure: selectors of its plot and two sliders, and the targets in milliseconds."""

    name: str
    plot: str
    step: str
    depth: str
    median: float | None
    p95: float | None


PAGE = Surface("explorer, page", ".plot", "[name=step]", "[name=depth]", 33.0, None)
LAB = replace(PAGE, name="explorer, JupyterLab")
# The first block's fader recomputes the whole model, the last one's its last block.
MODEL_PAGE = Surface("model, page", ".panel .profile", "[data-layer='1']", "[data-layer='8']", 50.0, None)
MODEL_LAB = replace(MODEL_PAGE, name="model, JupyterLab")
PLAIN = Surface(
    "FigureWidget",
    ".widget-vbox .js-plotly-plot",
    ".widget-hslider:has(label:text-is('step')) .noUi-handle",
    ".widget-hslider:has(label:text-is('depth')) .noUi-handle",
    None,
    None,
)
MODEL = "bhyt-d8"
MODEL_NOTEBOOK = """
import normlab
from normlab.widgets import Intervene

Intervene(normlab.load_model({model!r}), normlab.load_held_out({model!r})[:6, :64])
"""

# The explorer's lines in plotly's own widget, moved as its documentation says.
PLAIN_NOTEBOOK = """
from dataclasses import replace
import ipywidgets
import plotly.graph_objects as go
import normlab
from normlab.analysis.profiles import Profiles, default_view
from normlab.figures.profile import PlotOptions, drawing, plain

profiles = Profiles(normlab.load_runs({runs!r}))
view = default_view(profiles)
steps = profiles.steps(view.metric, view.site, view.mask, view.depth)
depth = ipywidgets.SelectionSlider(options=profiles.depths, value=view.depth, description="depth")
step = ipywidgets.SelectionSlider(options=steps, value=view.step, description="step")

def shown():
    return plain(drawing(profiles, replace(view, depth=depth.value, step=step.value), PlotOptions()))

def move(_):
    fresh = shown()
    lines = {{trace.name: trace for trace in fresh.data}}
    with figure.batch_update():
        for trace in figure.data:
            line = lines.get(trace.name, go.Scatter())
            trace.update(x=line.x, y=line.y, customdata=line.customdata)
        figure.layout.update(title=fresh.layout.title, xaxis=fresh.layout.xaxis, yaxis=fresh.layout.yaxis)

figure = go.FigureWidget(shown())
depth.observe(move, names="value")
step.observe(move, names="value")
ipywidgets.VBox([depth, step, figure])
"""


def time_moves(page: Any, surface: Surface, moves: int) -> pd.DataFrame:
    """Press keys on the sliders of an open explorer; columns `control`, `ms`, one row per move.

    Raises:
        NormlabError: a move did not change the plot.
    """
    for slider in (surface.depth, surface.step):  # walks begin at the end
        page.locator(slider).first.focus()
        page.keyboard.press("End")
        page.wait_for_timeout(SETTLE)
    page.locator(surface.plot).first.evaluate(WATCH)
    rows: list[tuple[str, float]] = []
    walks = {"step": _walk(page, surface.step), "depth": _walk(page, surface.depth)}
    for turn in range(moves):
        control = "depth" if turn % DEPTH_EVERY == DEPTH_EVERY - 1 else "step"
        page.locator(getattr(surface, control)).first.focus()
        page.keyboard.press(next(walks[control]))
        try:
            page.wait_for_function("count => window.moves.length > count", arg=turn, timeout=WAIT)
        except Exception as error:
            raise NormlabError(f"{surface.name}: move {turn + 1}, of the {control}, did not change the plot") from error
        rows.append((control, page.evaluate("window.moves.at(-1)")))
        page.wait_for_timeout(PAUSE)
    return pd.DataFrame(rows, columns=["control", "ms"])


def _walk(page: Any, slider: str) -> Iterator[str]:
    """Keys from the slider's end to its start and back, without end."""
    read = """handle => handle.max ? +handle.max + 1
        : +handle.getAttribute('aria-valuemax') - +handle.getAttribute('aria-valuemin') + 1"""
    places = int(page.locator(slider).first.evaluate(read))
    while True:
        for key in ("ArrowDown", "ArrowUp"):
            yield from [key] * max(places - 1, 1)


def summarize(moves: pd.DataFrame, surface: Surface) -> pd.DataFrame:
    """One row per control and one for all: number of moves, median, 95th percentile and target in milliseconds."""
    groups = [*moves.groupby("control")["ms"], ("all", moves["ms"])]
    rows = [(surface.name, name, len(ms), ms.median(), float(np.percentile(ms, 95))) for name, ms in groups]
    table = pd.DataFrame(rows, columns=["surface", "control", "moves", "median_ms", "p95_ms"])
    return table.assign(wanted_median_ms=surface.median, wanted_p95_ms=surface.p95)


def measure(
    runs: str | Path, notebook: str | Path, moves: int = 200, chromium: str | None = None
) -> tuple[pd.DataFrame, float]:
    """Times of all surfaces (columns of `summarize`); seconds from *Run All Cells* to the notebook's first figure."""
    chromium = chromium or find_browser()
    if chromium is None:
        raise NormlabError(NO_BROWSER)
    runs, notebook = Path(runs).resolve(), Path(notebook)
    opened: dict[str, float] = {}
    found: list[pd.DataFrame] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = explorer_page(load_runs(runs), folder / "explorer.html", configs=read_configs(runs))
        pages = {PAGE: path.as_uri(), MODEL_PAGE: f"{live_page([MODEL], folder / 'model').as_uri()}#step=none"}
        for surface, address in pages.items():
            with page_of(chromium) as (page, _):
                page.goto(address)
                page.wait_for_selector(f"{surface.plot} svg")
                found.append(summarize(time_moves(page, surface, moves), surface))
        text = notebook.read_text(encoding="utf-8").replace("../data/grid", json.dumps(str(runs))[1:-1])
        (folder / notebook.name).write_text(text, encoding="utf-8")
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        sources = {"plain": PLAIN_NOTEBOOK.format(runs=str(runs)), "model": MODEL_NOTEBOOK.format(model=MODEL)}
        for stem, source in sources.items():
            cells = [nbformat.v4.new_code_cell(source)]
            made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
            nbformat.write(made, folder / f"{stem}.ipynb")
        with jupyter_lab(folder) as address:
            for surface, name in ((LAB, notebook.name), (MODEL_LAB, "model.ipynb"), (PLAIN, "plain.ipynb")):
                with page_of(chromium) as (page, _):
                    open_notebook(page, address, name)
                    start = time.perf_counter()
                    run_cells(page)
                    opened[name] = time.perf_counter() - start
                    wait_until_idle(page)
                    found.append(summarize(time_moves(page, surface, moves), surface))
    return pd.concat(found, ignore_index=True), opened[notebook.name]


def main() -> None:
    """Measure, print, and write a CSV file when asked; one line where there is no browser."""
    parser = arguments(__doc__, {"moves": 200})
    parser.add_argument("runs", nargs="?", default="data/grid", help="directory of runs")
    parser.add_argument("--notebook", default="notebooks/00_start_here.ipynb", help="notebook to open")
    options = parser.parse_args()
    if find_browser() is None or importlib.util.find_spec("playwright") is None:
        print(NO_BROWSER)
        return
    table, opened = measure(options.runs, options.notebook, options.moves)
    report(table.assign(**machine()), options.out, columns=7)
    print(f"from Run All Cells to the first figure of {Path(options.notebook).name}: {opened:.1f} s (wanted: 10)")


if __name__ == "__main__":
    run(main)
