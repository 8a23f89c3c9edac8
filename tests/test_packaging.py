"""Declarations about the package agree (dependencies, extras, citation), and importing it is quiet."""

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normlab
from normlab import training
from normlab.models.config import TRANSFORMERS

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KERNELS = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]

# Imported name -> distribution, where they differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "upath": "universal_pathlib",
    "transformer_lens": "transformer-lens",
}

# Used where they are there, as in a checkout; normlab neither needs nor brings them.
IF_PRESENT = {"torchlens", "wandb", "benchmarks"}


def python(code: str) -> str:
    """Run code in a fresh Python and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def distribution(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert name, requirement
    return name[0].lower()


def test_what_the_library_imports_is_declared_and_what_is_declared_is_used():
    imported: dict[str, str] = {}
    for path in sorted((ROOT / "normlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            imported.update({DISTRIBUTIONS.get(top, top): str(path) for top in (name.split(".")[0] for name in names)})
    known = {*sys.stdlib_module_names, "normlab", "normlab_kernels"}
    third_party = {name: path for name, path in imported.items() if name not in known}
    core = {distribution(entry) for entry in PYPROJECT["project"]["dependencies"]}
    declared = core | {distribution(entry) for entries in EXTRAS.values() for entry in entries}
    assert {name: path for name, path in third_party.items() if name not in declared | IF_PRESENT} == {}
    assert core <= set(third_party), "declared as needed by the library, imported nowhere in it"


def test_training_asks_for_what_its_extra_brings_and_a_model_for_no_more():
    assert EXTRAS["train"] == list(training.PACKAGES)
    assert TRANSFORMERS in training.PACKAGES


@pytest.mark.parametrize("lacking", ["no-such-package>=1.0", "torch>=99"])
def test_what_a_command_lacks_is_one_line_that_names_the_extra(lacking, monkeypatch, refused, tmp_path):
    monkeypatch.setattr(training, "PACKAGES", ("numpy>=1.0", lacking))
    for command in (["train", "--steps", "1"], ["sweep", "--preset", "tiny"]):
        line = refused(*command, "--out", tmp_path / "runs", "--quiet")
        assert line.endswith(f"training needs {lacking}: pip install --upgrade 'normlab[train]'\n")
    assert not (tmp_path / "runs").exists()


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == KERNELS["version"] == normlab.__version__
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "normlab/__init__.py"
    assert citation["license"] == PYPROJECT["project"]["license"] == KERNELS["license"]


@pytest.mark.slow
def test_importing_our_models_registers_them_with_transformers_and_nothing_else_does():
    code = (
        "import sys\n"
        "import normlab\n"
        "normlab.load_runs, normlab.figures.layer_growth, normlab.widgets.NormExplorer\n"
        "print('transformers' in sys.modules)\n"
        "from transformers import AutoConfig\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "print('normlab' in CONFIG_MAPPING)\n"
        "import normlab.models\n"
        "print(type(AutoConfig.for_model('normlab')).__name__)"
    )
    assert python(code).split() == ["False", "False", "NormlabConfig"]


@pytest.mark.slow
def test_the_core_works_with_its_core_dependencies_alone_and_asks_for_nothing_else():
    """Models, probes, runs and comparisons need nothing that an extra brings, nor try to import it."""
    absent = "IPython PIL accelerate anywidget datasets ipywidgets plotly ray transformer_lens triton".split()
    code = (
        "import builtins, sys\n"
        f"absent = {absent!r}\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "asked, real = set(), builtins.__import__\n"
        "def watched(name, globals=None, *rest, **more):\n"
        "    if name.split('.')[0] in absent and str((globals or {}).get('__name__')).startswith('normlab'):\n"
        "        asked.add(name)\n"
        "    return real(name, globals, *rest, **more)\n"
        "builtins.__import__ = watched\n"
        "import torch, normlab\n"
        "normlab.NormlabForCausalLM, normlab.record, normlab.load_runs, normlab.SCHEMES\n"
        "print('importing asks for', *asked)\n"
        "config = normlab.NormlabConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)\n"
        "model = normlab.NormlabForCausalLM(config)\n"
        "with normlab.record(model, metrics=['token_l2_mean']) as rec:\n"
        "    model(input_ids=torch.arange(8).view(1, 8))\n"
        "normlab.LayerStatsCallback(every=2)\n"
        "runs = normlab.load_runs('data/gpu')\n"
        "print(len(rec.stats().to_pandas()), len(normlab.compare(runs, 'pre_rmsnorm', 'lns')))\n"
        "try: normlab.figures\n"
        "except ImportError as error: print(error)"
    )
    asked, rows, message = python(code).strip().splitlines()
    assert all(int(count) > 0 for count in rows.split())
    assert asked == "importing asks for triton", "which the kernels look for"
    assert message == "figures need plotly: pip install 'normlab[figures]'"


STATE = """
import json, logging, os, random, signal, threading, warnings
import numpy, pandas, torch, transformers
def state():
    return [torch.get_rng_state().sum().item(), str(numpy.random.get_state()[1][:4]), str(random.getstate()[1][:4]),
        str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(), threading.active_count(),
        torch.are_deterministic_algorithms_enabled(), dict(os.environ), os.getcwd(), len(warnings.filters),
        [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)], logging.getLogger().level,
        len(logging.getLogger().handlers), pandas.get_option("display.max_rows"), str(torch._tensor_str.PRINT_OPTS)]
"""


@pytest.mark.slow
def test_importing_any_module_changes_no_setting_and_prints_nothing():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "normlab").rglob("*.py"))
        if path.name != "__main__.py"
    ]
    third_party = (
        "datasets, accelerate, plotly.tools, ipywidgets, tokenizers, nbconvert.exporters, papermill.iorw, "
        "transformer_lens.model_bridge.sources"
    )
    code = (
        f"{STATE}\nimport importlib, {third_party}\nbefore = state()\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        "after = state()\n"
        "print(json.dumps([pair for pair in zip(before, after) if pair[0] != pair[1]]))"
    )
    assert json.loads(python(code)) == []


def test_the_versions_that_are_tested_lie_in_the_ranges_that_the_package_takes():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines if not line.startswith("#"))
    wanted = [*PYPROJECT["project"]["dependencies"], *itertools.chain(*EXTRAS.values()), *KERNELS["dependencies"]]
    for requirement in map(Requirement, wanted):
        if requirement.name != "normlab":
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert "-c constraints.txt" in (ROOT / "Makefile").read_text() and "-c constraints.txt" in str(
        yaml.safe_load((ROOT / "environment.yml").read_text())
    )
