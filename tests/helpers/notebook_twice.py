"""Notebooks executed with every cell run twice in a row, and the tables that they show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from notebook_helpers import NOTEBOOKS, WIDGET, execute, run

TIMED = ("generation_speed(",)  # calls whose results are times


def execute_twice(name: str, folder: Path, *, then: str = "", **parameters: Any) -> nbformat.NotebookNode:
    """`notebook_helpers.execute` with every cell twice; AssertionError where the second time gives something else
    (TIMED ones may)."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cells = []
    for cell in notebook.cells:
        again = cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", ())
        cells += [cell, nbformat.v4.new_code_cell(cell.source, metadata={"tags": ["again"]})] if again else [cell]
    notebook.cells = cells + ([nbformat.v4.new_code_cell(then)] if then else [])
    done = run(notebook, folder, parameters)
    for first, second in zip(done.cells, done.cells[1:], strict=False):
        timed = any(call in first.source for call in TIMED)
        if second.metadata.get("tags") == ["again"] and not timed:
            assert _shown(first) == _shown(second), f"{name}, run twice: {first.source}"
    done.cells = [cell for cell in done.cells if cell.metadata.get("tags") != ["again"]]
    return done


Executed = Callable[..., nbformat.NotebookNode]
# Executed as it stands, and every cell twice, which takes twice as long.
once_and_twice = pytest.mark.parametrize(
    "executed", [execute, pytest.param(execute_twice, marks=pytest.mark.slow)], ids=["once", "twice"]
)


def _shown(cell: nbformat.NotebookNode) -> list[Any]:
    """What a cell puts out; of a widget, only that it is one: each is an object of its own."""
    shown: list[Any] = []
    for output in cell.outputs:
        data = output.get("data", {})
        if output.get("name") == "stderr":
            continue
        shown.append("widget" if WIDGET in data else data or output.get("text"))
    return shown


def rows_in(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """The text of every row of every table that the notebook shows, headings included, in order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [BeautifulSoup(output.get("data", {}).get("text/html", ""), "html.parser") for output in outputs]
    return [
        [cell.get_text(strip=True) for cell in row.find_all(["th", "td"])]
        for page in pages
        for row in page.find_all("tr")
    ]


def row_of(notebook: nbformat.NotebookNode, *start: str) -> list[str]:
    """The one row whose first cells, the index left out, are these."""
    (row,) = [row[1:] for row in rows_in(notebook) if tuple(row[1 : 1 + len(start)]) == start]
    return row
