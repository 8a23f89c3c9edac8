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
        (folder / MANIFEST).write_text(json.dumps(manifest))
        stats = rows[rows["metric"] != "unigram_entropy"][STATS_COLUMNS]
        stats.to_parquet(folder / STATS, index=False)
    return root


def execute(name: str, folder: Path, **parameters: Any) -> nbformat.NotebookNode:
    """Run the notebook in a copy of the repository's layout, so that what it writes lands in `folder`."""
    here = folder / "notebooks"
    here.mkdir(parents=True, exist_ok=True)
    out = folder / f"{name}.ipynb"
    papermill.execute_notebook(
        NOTEBOOKS / f"{name}.ipynb", out, parameters=parameters, cwd=here, progress_bar=False, log_output=False
    )
    return nbformat.read(out, as_version=4)


def figures_in(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Every plotly figure that the notebook shows, in order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"][PLOTLY] for output in outputs if PLOTLY in output.get("data", {})]


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")
