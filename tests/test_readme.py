"""The README can be followed: its commands exist, its links lead somewhere, its example runs and shows what it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import normlab
from normlab import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), ROOT / "data" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_every_make_command_in_the_readme_is_a_target():
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`[^`]+`", prose) + blocks("bash"))))
    assert {"reproduce", "test", "lab", "bench"} <= named <= TARGETS


def test_every_target_can_be_planned_and_is_listed_by_help():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  make ([a-z-]+)", shown, flags=re.MULTILINE)
    assert {"reproduce", "lab", "test", "lint", "bench"} <= set(listed)
    for target in listed:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)


def test_the_commands_of_continuous_integration_are_the_readmes():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in blocks("bash")[0] and re.search(r"^make test$", script, flags=re.MULTILINE)
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"^normlab .*", "\n".join(blocks("bash")), flags=re.MULTILINE))
def test_every_normlab_command_in_the_readme_is_understood(line: str):
    arguments = line.split("#")[0].split()[1:]
    cli.parse(arguments)


def test_the_links_of_the_readme_lead_somewhere():
    paths = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("http")]
    assert len(paths) > 5 and all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:normlab|kernels|benchmarks|notebooks|docs|data|tests|\.github|\.ci)/[\w/.-]*)`", text)
    named += re.findall(r"\bpython ([\w/]+\.py)\b", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_short():
    assert len(re.sub(r"<!--.*?-->", "", README).split()) <= 1000


def test_the_example_runs_and_measures_every_layer(capsys: pytest.CaptureFixture[str]):
    example, model_example = blocks("python")
    assert len(example.strip().splitlines()) <= 15
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out.split()
    assert printed[:2] == ["layer", "value"]
    assert printed[2::2] == [str(layer) for layer in range(7)]
    assert all(float(value) > 0 for value in printed[3::2])

    exec(compile(model_example, "README.md", "exec"), names)
    assert names["model"].config.num_hidden_layers == 16  # type: ignore[attr-defined]


def test_every_name_in_the_examples_is_public():
    for dotted in set(re.findall(r"\bnormlab((?:\.\w+)+)", "\n".join(blocks("python")))):
        value: object = normlab
        for name in dotted.split(".")[1:]:
            value = getattr(value, name)
