"""Runs on disk made from a formula, and notebooks executed on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import papermill
from figures_helpers import UNIGRAM, table

from normlab.runs import MANIFEST, SCHEMA_VERSION, STATS, STATS_COLUMNS

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def write_runs(root: Path, **options: Any) -> Path:
    """The runs of `figures_helpers.table`, in the format of `normlab.runs`."""
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
    return root


def execute(name: str, folder: Path, *, then: str = "", **parameters: Any) -> nbformat.NotebookNode:
    """Run the notebook in a copy of the repository's layout, so that what it writes lands in `folder`; `then` is code
    for a last cell of its own, such as a reader's move of a control."""
    here = folder / "notebooks"
    here.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(then)] if then else []
    source, out = here / f"{name}.ipynb", folder / f"{name}.ipynb"
    nbformat.write(notebook, source)
    papermill.execute_notebook(source, out, parameters=parameters, cwd=here, progress_bar=False, log_output=False)
    return nbformat.read(out, as_version=4)


def figures_in(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Every plotly figure that the notebook shows, in order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"][PLOTLY] for output in outputs if PLOTLY in output.get("data", {})]


def widgets_in(notebook: nbformat.NotebookNode) -> list[str]:
    """The sources of the cells that show a widget."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell.source for cell in cells if any(WIDGET in output.get("data", {}) for output in cell.outputs)]


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")
