"""README and documentation can be followed: examples run, commands exist, links lead somewhere, the site builds."""

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from training_helpers import write_text

import normlab
from normlab import cli
from normlab.figures import FIGURES
from normlab.models import costs
from normlab.probes.metrics import ALL_METRICS, METRICS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def site_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that Sphinx's configuration is made of."""
    monkeypatch.syspath_prepend(DOCS)
    names = ("tables", "reference", "docstrings")
    for name in names:  # the benchmarks have a module `tables` too
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of one's own with a text and some shipped runs; what an example adds to a registry goes again."""
    write_text(tmp_path / "notes.txt")
    shutil.copytree(ROOT / "data" / "grid", tmp_path / "data" / "grid")
    monkeypatch.chdir(tmp_path)
    registries: tuple[dict, ...] = (normlab.SCHEMES, METRICS, ALL_METRICS, FIGURES)
    before = [dict(registry) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name_of)
def test_the_examples_of_a_page_run_one_after_the_other(path, elsewhere):
    names: dict[str, object] = {}
    for example in blocks(path, "python"):
        exec(compile(example, path.name, "exec"), names)


def test_the_example_of_the_kernels_runs():
    (example,) = blocks(ROOT / "kernels" / "README.md", "python")
    width, lam = 8, torch.tensor([2.0])
    x, residual, a = (torch.randn(3, width, requires_grad=True) for _ in range(3))
    weight, bias, alpha, shift = torch.ones(width), torch.zeros(width), torch.ones(1), torch.zeros(1)
    names: dict[str, object] = dict(
        x=x, residual=residual, a=a, weight=weight, bias=bias, alpha=alpha, shift=shift, lam=lam
    )
    names |= dict(alphas=torch.ones(width), betas=torch.zeros(width), square=torch.ones(1))
    names |= dict(proj_weight=torch.eye(width), mean_square=x.detach().square().mean(-1, keepdim=True))
    exec(compile(example, "README.md", "exec"), names)
    assert torch.equal(names["l2"], torch.linalg.vector_norm(x.detach(), dim=-1))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_command_of_a_page_exists(path):
    lines = [line.split("#")[0].strip() for block in blocks(path, "bash") for line in block.splitlines()]
    for line in lines:
        if line.startswith("normlab "):
            cli.parse(line.split()[1:])
    made = re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8"))
    made += [line.split()[1] for line in lines if line.startswith("make ")]
    assert set(made) <= TARGETS


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md"], ids=name_of)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:normlab|kernels|benchmarks|notebooks|docs|data|tests|\.github|\.ci)/[\w/.-]*)`", text)
    named += re.findall(r"\bpython ([\w/]+\.py)\b", text)
    if page == README:
        named += [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith(("http", "#"))]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_shows_a_missing_number(page):
    assert not re.search(r"\bnan\b", page.read_text(encoding="utf-8"))


def test_every_target_can_be_planned():
    for target in TARGETS:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)


def test_the_readme_is_short_and_its_example_draws_every_layer(monkeypatch):
    assert len(re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8")).split()) <= 1000
    example, _ = blocks(README, "python")
    assert len(example.strip().splitlines()) <= 7
    drawn: list[Any] = []
    monkeypatch.setattr(go.Figure, "show", lambda figure: drawn.append(figure))
    exec(compile(example, "README.md", "exec"), {})
    (stream,) = (line for line in drawn[0].data if line.name == "block_out")
    assert list(stream.x) == list(range(9)) and list(stream.y) == sorted(stream.y)


def test_the_table_of_schemes_is_what_the_command_prints(site_code, monkeypatch):
    small = cache(partial(costs.table, depth=2))
    monkeypatch.setattr(site_code["tables"], "costs_of_schemes", small)
    lines = site_code["tables"].schemes().splitlines()
    head, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "---" not in line)
    printed = small()
    assert [row[0].strip("`") for row in rows] == list(printed["name"])
    for column in ("parameters", "bytes", "operations"):
        assert [int(row[head.index(column)].replace(",", "")) for row in rows] == list(printed[column])
    assert [row[head.index("formula")].strip("`") for row in rows] == list(printed["formula"])
    sources = [re.sub(r"\[([\d.]+)\]\([^)]*\)", r"\1", row[head.index("source")]) for row in rows]
    assert sources == list(printed["paper"])


def test_a_docstring_is_text_with_code_in_it(site_code):
    lines = ["|x| of `h_l`, **not** x_; see `normlab.record`.", "", "    with code: |x|", "", "Args:", "    a_: `b`."]
    site_code["docstrings"].to_rst(None, "function", "f", None, None, lines)
    text = "\n".join(lines)
    assert text.startswith("\\|x\\| of ``h_l``, \\*\\*not\\*\\* x\\_; see :py:obj:`normlab.record`.")
    assert "::\n\n    with code: |x|\n" in text and text.endswith("Args:\n    a\\_: ``b``.")


def test_parameters_described_in_one_line_come_apart(site_code):
    lines = ["y. x: no.", "", "Args:", "    x: (..., d). weight: (d,). bias, eps: constants; see: this."]
    site_code["docstrings"].to_rst(None, "function", "f", lambda x, weight, bias, eps: None, None, lines)
    assert lines == [
        "y. x: no.",
        "",
        "Args:",
        "    x: (..., d).",
        "    weight: (d,).",
        "    bias, eps: constants; see: this.",
    ]


def test_links_to_a_heading_name_one_of_its_page():
    """Spelled as GitHub and MyST do."""
    places = {}
    for path in (*ROOT.glob("*.md"), *ROOT.glob("kernels/*.md"), *ROOT.glob("data/*.md"), *DOCS.rglob("*.md")):
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        places[path] = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    links = [
        (page, (page.parent / target).resolve() if target else page, place)
        for page in places
        for target, place in re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 10
    assert [(page.name, place) for page, target, place in links if place not in places[target]] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """All but the notebooks' pages, which `make site` executes."""
    site = tmp_path / "site"
    options = ["--fail-on-warning", "--keep-going", "-q", "-d", tmp_path / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, DOCS, site]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (site / "reference" / "api" / "normlab.html").read_text(encoding="utf-8")
    names = set(normlab.__all__) - {"analysis", "figures", "widgets"}
    assert all(f'id="normlab.{name}"' in reference for name in names)
