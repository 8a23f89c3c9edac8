"""The rules that keep the parts apart: floors and imports (contracts in pyproject.toml), and scheme names."""

import ast
import re
import sys
from pathlib import Path

import grimp
import pytest
from importlinter import cli as import_linter

from normlab import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "normlab"
KERNELS = ROOT / "kernels" / "normlab_kernels"
has_kernels = pytest.mark.skipif(not KERNELS.is_dir(), reason="the kernels are not in this checkout")


def scheme_names(source: str, names: set[str]) -> list[tuple[int, str]]:
    """(line, name) of each name that a string of the source holds as a whole word; docstrings are left out."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, word)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        for word in re.findall(r"\w+", node.value)
        if word in names
    ]


def names_in(folder: Path, names: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(folder.rglob("*.py"))
        if PACKAGE / "schemes" not in path.parents
        for line, name in scheme_names(path.read_text(encoding="utf-8"), names)
    ]


@has_kernels
def test_the_contracts_of_imports_hold(capsys):
    result = import_linter.lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert result == import_linter.EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_library_does_not_import_its_own_face():
    """`from normlab import NAME` would hide from the contracts which room NAME lives in."""
    graph = grimp.build_graph("normlab")
    allowed = {"cli", "notebook"}  # above all other rooms
    importers = {
        module for module in graph.find_modules_that_directly_import("normlab") if module.split(".")[1] not in allowed
    }
    lines = [
        f"{module}:{detail['line_number']} {detail['line_contents']}"
        for module in sorted(importers)
        for detail in graph.get_import_details(importer=module, imported="normlab")
        if not re.search(r"import __version__", detail["line_contents"])
    ]
    assert not lines


def test_no_scheme_is_named_outside_the_registry():
    assert not names_in(PACKAGE, set(SCHEMES) - {"none"})  # "none" is also an option


@has_kernels
def test_the_kernels_know_functions_not_schemes():
    functions = {"bhyt", "dyt", "derf"}  # schemes that are named for their function
    assert not names_in(KERNELS, set(SCHEMES) - functions)


def test_a_scheme_in_code_is_found_and_one_in_a_docstring_is_not():
    source = 'def f(scheme):\n    """As lns does."""\n    return scheme == "lns" or f"{scheme}, like bhyt"\n'
    assert scheme_names(source, set(SCHEMES)) == [(3, "lns"), (3, "bhyt")]


@has_kernels
def test_the_kernels_import_torch_and_triton_only():
    graph = grimp.build_graph("normlab_kernels", include_external_packages=True)
    known = {*sys.stdlib_module_names, "torch", "triton", "normlab_kernels"}
    optional = {"numpy"}  # behind a try: the kernels run without it
    assert {module.split(".")[0] for module in graph.modules} <= known | optional
