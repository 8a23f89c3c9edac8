"""Runs on disk made from a formula, and notebooks executed on them."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from figures_helpers import GROWTH, UNIGRAM, table
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from normlab.notebook.pages import Kernel
from normlab.runs import EXPERIMENT_COLUMNS, EXPERIMENTS, MANIFEST, SCHEMA_VERSION, STATS, STATS_COLUMNS

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def skip_cost(scheme: str, layer: int, seed: int = 0, part: str = "block") -> float:
    """Loss added by leaving out a block: a scheme that grows less uses its deep blocks more."""
    share = {"block": 1.0, "deleted": 1.5, "attention": 0.4, "mlp": 0.6}[part]
    return share * (1 + 0.01 * seed) / layer ** GROWTH.get(scheme, 0.7)


def write_experiments(folder: Path, scheme: str, depth: int, seed: int) -> None:
    """The experiments of a run after its last step, from formulas."""
    blocks, layers = range(1, depth + 1), range(depth + 1)
    rows = [
        ("skip_delta_loss", part, layer, None, skip_cost(scheme, layer, seed, part))
        for part in ("block", "deleted", "attention", "mlp")
        for layer in blocks
    ]
    rows += [("jacobian_identity", "block", layer, None, 1.0 / layer) for layer in blocks]
    rows += [("logit_lens_kl", "block", layer, None, float(depth - layer)) for layer in layers]
    rows += [("angular_distance", "block", a, b, 0.1 * (b - a)) for a in layers for b in layers if b > a]
    table = pd.DataFrame([(*row, 0.01) for row in rows], columns=list(EXPERIMENT_COLUMNS))
    table.astype({"layer": "Int64", "other": "Int64"}).to_parquet(folder / EXPERIMENTS, index=False)


def write_runs(root: Path, **options: Any) -> Path:
    """The runs of `figures_helpers.table`, in the format of `normlab.runs`, with their experiments."""
    for name, rows in table(**options).groupby("run"):
        folder = root / str(name)
        folder.mkdir(parents=True)
        first = rows.iloc[0]
        config = {"scheme": str(first["scheme"]), "lr": float(first["lr"])}
        config |= {key: int(first[key]) for key in ("depth", "width", "seed")} | {"heads": 1}
        manifest = {"schema": SCHEMA_VERSION, "run": str(name), "status": str(first["status"]), "config": config}
        manifest |= {"corpus": {"unigram_entropy": UNIGRAM}, "measured": {"tokens_per_s": 100.0}, "eval_loss": None}
        manifest |= {"bigram_loss": None, "trigram_loss": None}
        (folder / MANIFEST).write_text(json.dumps(manifest))
        stats = rows[rows["metric"] != "unigram_entropy"][STATS_COLUMNS]
        stats.to_parquet(folder / STATS, index=False)
        write_experiments(folder, str(first["scheme"]), int(first["depth"]), int(first["seed"]))
    return root


@cache
def _kernel() -> Kernel:
    """One kernel for all notebooks of a test process."""
    return Kernel()


def execute(
    name: str, folder: Path, *, twice: bool = False, then: str = "", **parameters: Any
) -> nbformat.NotebookNode:
    """Run a notebook in a copy of the repository's layout in `folder`, with no names left of the notebook before.

    It reads the shipped data where no parameter says otherwise.

    Args:
        twice: run every cell twice in a row; AssertionError where the second time gives something else.
        then: code for one more cell at the end, such as a reader's move of a control.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source = cell.source.replace('"../data/', f'"{NOTEBOOKS.parent}/data/')
        elif twice and cell.cell_type == "code":
            cells.append(nbformat.v4.new_code_cell(cell.source, metadata={"tags": ["again"]}))
    notebook.cells = cells + ([nbformat.v4.new_code_cell(then)] if then else [])
    here = folder / "notebooks"
    here.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, here / "asked.ipynb")
    done = parameterize_notebook(load_notebook_node(str(here / "asked.ipynb")), parameters)
    _kernel().execute(done, here)
    for first, second in zip(done.cells, done.cells[1:], strict=False):
        if second.metadata.get("tags") == ["again"]:
            assert _shown(first) == _shown(second), f"{name}, run twice: {first.source}"
    done.cells = [cell for cell in done.cells if cell.metadata.get("tags") != ["again"]]
    return done


# Executed as it stands, and every cell twice, which takes twice as long.
once_and_twice = pytest.mark.parametrize(
    "executed", [execute, pytest.param(partial(execute, twice=True), marks=pytest.mark.slow)], ids=["once", "twice"]
)


def _shown(cell: nbformat.NotebookNode) -> list[Any]:
    """The output of a cell. Of a widget only that it is one, because each is another object."""
    kept = [output for output in cell.outputs if output.get("name") != "stderr"]
    found = [(output.get("data", {}), output.get("text")) for output in kept]
    return ["widget" if WIDGET in data else data or text for data, text in found]


def _outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def figures_in(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Every plotly figure that the notebook shows, in order, without the pictures of widgets."""
    shown = [output.get("data", {}) for output in _outputs(notebook)]
    return [data[PLOTLY] for data in shown if PLOTLY in data and WIDGET not in data]


def schemes_of(figure: dict[str, Any]) -> set[str]:
    return {trace["meta"]["scheme"] for trace in figure["data"] if "scheme" in trace.get("meta", {})}


def widgets_in(notebook: nbformat.NotebookNode) -> list[str]:
    """The sources of the cells that show a widget."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell.source for cell in cells if any(WIDGET in output.get("data", {}) for output in cell.outputs)]


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output["text"] for output in _outputs(notebook) if output.get("name") == "stdout")


def _pages(notebook: nbformat.NotebookNode) -> list[BeautifulSoup]:
    pages = [output.get("data", {}).get("text/html") for output in _outputs(notebook)]
    return [BeautifulSoup(page, "html.parser") for page in pages if page is not None]


def tables_in(notebook: nbformat.NotebookNode) -> list[pd.DataFrame]:
    """Every table that the notebook shows, in order: cells as text, the index as its first columns."""
    found = []
    for shown in (part for page in _pages(notebook) for part in page.find_all("table")):
        rows = [[cell.text for cell in row.find_all(["th", "td"])] for row in shown.find_all("tr")]
        heads = len(shown.thead.find_all("tr"))  # the second of two names the index
        names = [max(column, key=len) if not column[-1] else column[-1] for column in zip(*rows[:heads], strict=True)]
        found.append(pd.DataFrame(rows[heads:], columns=names))
    return found


def rows_in(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """The text of every row of every table that the notebook shows, headings included, in order."""
    rows = [row for page in _pages(notebook) for row in page.find_all("tr")]
    return [[cell.get_text(strip=True) for cell in row.find_all(["th", "td"])] for row in rows]
