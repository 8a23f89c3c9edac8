"""Notebooks read like a paper, with what was found near the top, and are committed as plain images."""

import json
import sys
import tomllib
import types

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from notebook_helpers import NOTEBOOKS, PLOTLY

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
MOST_LINES, MOST_COLUMNS = 15, 120
FIRST_CELLS = 12  # what is found stands among them: about a screen


def cells_of(name: str) -> list[nbformat.NotebookNode]:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells


def code_of(name: str) -> list[str]:
    return [cell.source for cell in cells_of(name) if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_a_title_parameters_and_what_would_falsify_it(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    _, first, *_ = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.metadata.get("tags") == ["parameters"] and "FAST = True" in first.source
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "falsify" in prose and "**Claim" in prose and ("## Exercises" in prose) == (name != "00_start_here")


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_small_and_shows_images_only(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 1_500_000
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            assert PLOTLY not in output.get("data", {}) and "/root" not in str(output) and "/home" not in str(output)


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short_and_so_are_their_lines(name):
    for source in code_of(name):
        lines = source.splitlines()
        assert len(lines) <= MOST_LINES and max(map(len, lines)) <= MOST_COLUMNS, source


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_after_the_parameters_prepares(name):
    assert "prepare(" in code_of(name)[2] and sum("prepare(" in source for source in code_of(name)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_what_was_found_is_a_table_near_the_top(name):
    cells = cells_of(name)
    place = next(i for i, cell in enumerate(cells) if cell.source.startswith("## Found"))
    after = [cell for cell in cells[place:FIRST_CELLS] if cell.cell_type == "code"]
    shown = [output for cell in after for output in cell.outputs if "text/html" in output.get("data", {})]
    assert shown and any("<table" in output["data"]["text/html"] for output in shown)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_functions_of_the_library(name):
    assert not [source for source in code_of(name) if "plotly" in source]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_installs_normlab_in_colab_and_does_nothing_elsewhere(name, monkeypatch):
    """From the repository once the project names its address, else by name from the package index."""
    (cell,) = (cell for cell in cells_of(name) if "install" in cell.metadata.get("tags", ()))
    ran: list[tuple[str, str]] = []
    shell = types.SimpleNamespace(run_line_magic=lambda magic, line: ran.append((magic, line)))
    code = TransformerManager().transform_cell(cell.source)
    exec(code, {"get_ipython": lambda: shell})
    assert ran == [] and cell.source == code_of(name)[0]
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    exec(code, {"get_ipython": lambda: shell})
    project = tomllib.loads((NOTEBOOKS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    extras = "notebooks,lens" if "TransformerLens" in cells_of(name)[0].source else "notebooks"
    wanted = f"{project['name']}[{extras}]" + (f" @ git+{address}" if address else "")
    assert ran == [("pip", f'install --quiet "{wanted}"')]
