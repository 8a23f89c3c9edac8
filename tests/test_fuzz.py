"""Damaged runs, checkpoints, models and command lines: refused in one line, or read. Nothing else is raised.

Each property has 15 fixed cases in the default run, and 150 under the slow marker.
"""

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_helpers import tiny, write_run, write_text

import normlab
from normlab import NormlabError, cli, runs
from normlab.training.checkpoint import LISTED, check_files, list_files
from normlab.training.config import TrainConfig

TINY = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)


# A test draws so many cases, the same every time.
counts = pytest.mark.parametrize("count", [15, pytest.param(150, marks=pytest.mark.slow)])


def each(count: int, **drawn: st.SearchStrategy) -> Callable:
    """Run the decorated check at once, on so many cases."""
    return lambda check: settings(max_examples=count)(given(**drawn)(check))()


# --- damage ---

Damage = tuple[str, float, int]  # the kind, the share of the file before the damage, a byte
DAMAGE = st.tuples(
    st.sampled_from(["flip", "cut", "empty", "garbage", "remove", "swap", "repeat"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)


def damage(path: Path, how: Damage, other: bytes) -> None:
    """Damage a file. other: for "swap"."""
    kind, share, byte = how
    data = path.read_bytes()
    place = int(share * len(data))
    changed = {
        "flip": data[:place] + bytes([data[place] ^ byte]) + data[place + 1 :] if data else b"\0",
        "cut": data[:place],
        "empty": b"",
        "garbage": bytes((byte * k) % 256 for k in range(200)),
        "remove": b"",
        "swap": other,
        "repeat": data[:place] + data,
    }[kind]
    path.unlink() if kind == "remove" else path.write_bytes(changed)


# --- manifests and tables ---

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=8),
    st.just("../../x"),
    st.lists(st.none(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which stays whole."""
    folder = tmp_path_factory.mktemp("fuzz")
    text = write_text(folder / "text.txt")
    for seed in (0, 1):
        write_run(tiny(text, seed=seed), folder / "out", corpus={"unigram_entropy": 6.5})
    return folder / "out"


@pytest.fixture
def victim(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "out")
    return runs.find_runs(tmp_path / "out")[0]


def reads_the_whole_run(victim: Path) -> None:
    """Every reader returns the whole run, and names the other in a warning if it leaves it out."""
    whole = max(path.name for path in victim.parent.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert whole in set(normlab.load_runs(victim.parent)["run"])
        assert whole in normlab.load_configs(victim.parent).index
        config = normlab.read_configs(victim.parent).get(victim.name)
    if config is not None:
        with contextlib.suppress(NormlabError):
            TrainConfig.from_dict(config)


def paths_of(value: Any, path: tuple = ()) -> list[tuple]:
    """The keys that lead to each part of a manifest."""
    inner = [] if not isinstance(value, dict) else [p for key in value for p in paths_of(value[key], (*path, key))]
    return ([path] if path else []) + inner


@counts
def test_a_changed_manifest_is_refused_or_read(count, victim):
    original = (victim / runs.MANIFEST).read_text()

    @each(count, which=st.integers(0, 10**4), value=ODD, is_removed=st.booleans())
    def check(which: int, value: Any, is_removed: bool) -> None:
        manifest = json.loads(original)
        *keys, last = (paths := paths_of(manifest))[which % len(paths)]
        part = manifest
        for key in keys:
            part = part[key]
        part[last] = value
        if is_removed:
            del part[last]
        (victim / runs.MANIFEST).write_text(json.dumps(manifest))
        reads_the_whole_run(victim)


@counts
def test_a_damaged_file_of_a_run_is_refused_or_read(count, victim):
    originals = {file: (victim / file).read_bytes() for file in (runs.STATS, runs.MANIFEST)}

    @each(count, file=st.sampled_from(sorted(originals)), how=DAMAGE)
    def check(file: str, how: Damage) -> None:
        damage(victim / file, how, b"PAR1PAR1")
        reads_the_whole_run(victim)
        (victim / file).write_bytes(originals[file])


# --- checkpoints ---


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as a checkpoint is: files of any content, one in a subfolder, and their list."""
    folder = tmp_path / "checkpoint-5"
    (folder / "shards").mkdir(parents=True)
    for number, name in enumerate(("state.pt", "stats.parquet", "begun.json", "shards/0.distcp")):
        (folder / name).write_bytes(bytes((number + k * 7) % 256 for k in range(300)))
    list_files(folder)
    return folder


@counts
def test_a_damaged_checkpoint_is_found(count, checkpoint):
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    originals = [path.read_bytes() for path in paths]

    @each(count, which=st.integers(0, len(paths) - 1), how=DAMAGE)
    def check(which: int, how: Damage) -> None:
        path, original = paths[which], originals[which]
        damage(path, how, originals[which - 1])
        same = path.exists() and path.read_bytes() == original
        if path.name == LISTED and path.exists():  # damage to a space changes no list
            with contextlib.suppress(ValueError):
                same = json.loads(path.read_bytes()) == json.loads(original)
        with contextlib.nullcontext() if same else pytest.raises(NormlabError):
            check_files(checkpoint)
        path.write_bytes(original)


# --- trained models ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    normlab.NormlabForCausalLM(normlab.NormlabConfig(scheme="bhyt", **TINY)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_damaged_model_is_refused_or_read(saved, tmp_path):
    folder = tmp_path / "model"

    @each(150, file=st.sampled_from(["config.json", "model.safetensors"]), how=DAMAGE)
    def check(file: str, how: Damage) -> None:
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        damage(folder / file, how, b"{}")
        with contextlib.suppress(NormlabError):
            normlab.load_model(folder)


# --- command lines ---

WORDS = st.one_of(
    st.sampled_from(
        "--depth --width --lr --seed --model --out --quiet --no-compile --from-manifest --dry-run --time "
        "--preset --workers --gpus --slurm --depths --metric --level --runs --text --length --rows --revisions "
        "--device --pairs --threads --vocab-size --help --version -h -x -- --= --out= --depth= = a=b -1 0 1 2.5 nan "
        "inf 99999999999999999999 None true x , ,, ../.. nowhere:// memory://nothing train sweep".split()
    ),
    st.text(max_size=5),
)
# What each command gets last, so that it cannot begin to work.
LAST = {
    "train": ["--corpus", "nowhere.txt"],
    "sweep": ["--schemes", "nope"],
    "compare": ["--runs", "nowhere"],
    "figures": ["--out", "figures"],
    "probe": ["--text", "nowhere.txt"],
    "export": ["nowhere"],
    "remove-norms": ["--corpus", "nowhere.txt"],
    "bench": ["--schemes", "nope"],
    "": [],
}


@counts
def test_a_bad_command_line_is_one_line(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    @each(count, name=st.sampled_from(sorted(LAST)), words=st.lists(WORDS, max_size=6))
    def check(name: str, words: list[str]) -> None:
        arguments = [*([name] if name else []), *(word for word in words if "\0" not in word), *LAST[name]]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(arguments)
        if code == 0:
            assert {"--help", "-h", "--version"} & set(arguments)
        else:
            lines = [line for line in err.getvalue().splitlines() if not line.startswith("normlab: warning: ")]
            assert code == 2 and not out.getvalue() and len(lines) == 1
            assert lines[0].startswith("normlab: error: ")
        assert not list(tmp_path.iterdir()), "something was written"
