"""Notebooks read like a paper, with what was found near the top, and are committed as plain images."""

import json
import re
import sys
import tomllib
import types

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from notebook_helpers import NOTEBOOKS, PLOTLY

import normlab.widgets
from normlab.widgets.plot import static_text

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
MOST_CELLS, MOST_LINES, MOST_COLUMNS = 20, 15, 120
FIRST_CELLS = 8  # what is found stands among them


def cells_of(name: str) -> list[nbformat.NotebookNode]:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells


def code_of(name: str) -> list[str]:
    return [cell.source for cell in cells_of(name) if cell.cell_type == "code"]


def exercises(cell: nbformat.NotebookNode) -> list[str]:
    return [line[:2] for line in cell.source.splitlines() if line[:1].isdigit()]


def is_short(cell: nbformat.NotebookNode) -> bool:
    lines = cell.source.splitlines()
    return cell.cell_type != "code" or (len(lines) <= MOST_LINES and max(map(len, lines)) <= MOST_COLUMNS)


# What is wrong -> whether it is, of a notebook's cells.
FORM = {
    "no title": lambda cells: not cells[0].source.startswith("# "),
    "no claim": lambda cells: "**Claim" not in cells[0].source,
    "too many cells": lambda cells: len(cells) > MOST_CELLS,
    "a long cell": lambda cells: not all(map(is_short, cells)),
    "does not install first": lambda cells: cells[1].metadata["tags"] != ["install"],
    "no parameters": lambda cells: cells[2].metadata["tags"] != ["parameters"] or "FAST = True" not in cells[2].source,
    "does not prepare": lambda cells: [i for i, cell in enumerate(cells) if "prepare(" in cell.source] != [3],
    "nothing found near the top": lambda cells: not any("## Found" in cell.source for cell in cells[:FIRST_CELLS]),
    "nothing would falsify it": lambda cells: not any("## What would" in cell.source for cell in cells),
    "not three exercises": lambda cells: (
        exercises(cells[-1]) != ["1.", "2.", "3."] and "## Where to go" not in cells[-1].source
    ),
    "draws by itself": lambda cells: any("plotly" in cell.source for cell in cells),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_form_of_all(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert [rule for rule, is_broken in FORM.items() if is_broken(notebook.cells)] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_was_found_is_said_or_shown(name):
    cells = cells_of(name)
    place = next(i for i, cell in enumerate(cells) if cell.source.startswith("## Found"))
    said = [output for cell in cells[place : place + 3] for output in cell.get("outputs", ())]
    assert any(output.get("name") == "stdout" or "<table" in str(output.get("data")) for output in said)


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_small_and_shows_images_only(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 1_500_000
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            assert PLOTLY not in output.get("data", {}) and "/root" not in str(output) and "/home" not in str(output)


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
    wanted = f"{project['name']}[notebooks]" + (f" @ git+{address}" if address else "")
    assert ran == [("pip", f'install --quiet "{wanted}"')]


@pytest.mark.parametrize("name", ["00_start_here", "03_norm_explorer"])
def test_an_explorer_has_all_runs_that_its_code_and_its_page_have(name, monkeypatch):
    given: list[tuple[object, str]] = []

    def opened(runs: object, *, source: str, **_: object) -> types.SimpleNamespace:
        given.append((runs, source))
        return types.SimpleNamespace()

    monkeypatch.setattr(normlab.widgets, "NormExplorer", opened)
    monkeypatch.setattr(normlab, "load_runs", lambda path, variants=True: (path, variants), raising=False)
    monkeypatch.setattr(normlab, "read_configs", lambda path: {}, raising=False)
    (source,) = (source for source in code_of(name) if "explorer = NormExplorer(" in source)
    exec(source, dict(normlab=normlab, NormExplorer=opened, RUNS="folder", runs="those that are compared", papers=None))
    assert given == [(("folder", False), "folder")]


def test_words_on_a_widget_name_what_it_has():
    exercise = cells_of("02_bhyt_stability")[-1].source
    (chart,) = re.findall(r"the dotted bound under \*(.+?)\*", exercise)
    assert f'"{chart}"' in static_text("live.js")
    about = cells_of("03_norm_explorer")[0].source
    named = re.findall(r"\*(\w+)\*", about[about.index("Under *more*") :])
    assert named == ["more", "PNG", "SVG", "CSV", "code"] and "Each view has its own" in about
