"""Bad command lines: exit code 2 and one line on standard error that names what is wrong, before anything is loaded."""

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from training_helpers import tiny, write_run, write_text

from normlab import NormlabError, cli, errors, loading, runs, store
from normlab.study.presets import PRESETS
from normlab.training.text import source
from normlab.training.text.corpus import corpus_of
from normlab.training.workers import Ray

HERE = Path(__file__)
PROBE = ["probe", "no-such-model", "--text", HERE, "--quiet"]
SWEEP = ["sweep", "--quiet", "--out", "out"]
BAD: dict[str, tuple[list[Any], str]] = {
    "unknown scheme": (["train", "--scheme", "nonorm"], "pre_rmsnorm"),
    "depth 0": (["train", "--depth", 0], "depth is 0"),
    "no number": (["train", "--depth", "deep"], "'deep'"),
    "missing corpus": (["train", "--corpus", "nowhere.txt"], "'nowhere.txt' does not exist"),
    "model field that is none": (["train", "--model", "lambda=2"], "unknown model fields lambda"),
    "model field without a value": (["train", "--model", "kappa"], "FIELD=VALUE"),
    "manifest and flags": (["train", "--from-manifest", "a", "--lr", 0.1, "--keep-weights"], "--lr, --keep-weights"),
    "manifest that is not there": (["train", "--from-manifest", "nowhere"], "nowhere holds no run"),
    "sweep to nowhere": (["sweep", "--preset", "tiny"], "--out"),
    "unknown preset": ([*SWEEP, "--preset", "huge"], f"known are {', '.join(PRESETS)}"),
    "unknown scheme of a sweep": ([*SWEEP, "--schemes", "no"], "unknown scheme 'no'"),
    "workers in words": ([*SWEEP, "--workers", "many"], "--workers 'many' is no whole number"),
    "no workers": ([*SWEEP, "--workers", 0], "workers is 0"),
    "depths in words": ([*SWEEP, "--depths", "a"], "--depths 'a' is no whole number"),
    "depths of 0": ([*SWEEP, "--depths", 0], "depth is 0"),
    "rows below one": ([*PROBE, "--rows", -1], "rows -1"),
    "length below two": ([*PROBE, "--length", -3], "length is -3"),
    "length of one": ([*PROBE, "--length", 1], "length is 1"),
    "revisions without names": ([*PROBE, "--revisions", ",,"], "revisions are '', '', ''"),
    "text that is not there": (["probe", "no-such-model", "--text", "nowhere.txt"], "nowhere.txt is not a file"),
    "text that is binary": (["probe", "no-such-model", "--text", sys.executable], "is binary"),
    "threads beyond all machines": (
        ["train", "--threads", 100_000_000],
        "threads is 100000000; it must be at most 1024",
    ),
    "depth beyond all machines": (["train", "--depth", 10**30], "it must be at most 10000"),
    "vocabulary beyond all machines": (["train", "--vocab-size", 10**9], "it must be at most 1048576"),
    "threads of a sweep": ([*SWEEP, "--threads", 100_000_000], "at most 1024"),
    "threads of a benchmark": (["bench", "--threads", 100_000_000], "at most 1024"),
    "no ranks": (["train", "--ranks", 0], "ranks is 0"),
    "seed beyond its generators": (["train", "--seed", 99999999999999999999], "seed is 99999999999999999999; it must"),
    "rate that is no number": (["remove-norms", "model", "--lr", "nan", "--out", "out"], "lr is nan"),
    "GPUs that are no number": ([*SWEEP, "--workers", "ray", "--gpus", "nan"], "gpus is nan"),
    "GPUs below none": ([*SWEEP, "--workers", "slurm", "--address", "local", "--gpus", -1], "gpus is -1.0"),
    "unknown option of Slurm": ([*SWEEP, "--workers", "slurm", "--address", "local", "--slurm", "nope=1"], "'nope'"),
    "option of Slurm for Ray": (
        [*SWEEP, "--workers", "ray", "--slurm", "timeout_min=1"],
        "--slurm would change nothing",
    ),
    "flags of a cluster for processes": (
        [*SWEEP, "--workers", 2, "--address", "auto", "--gpus", 1, "--slurm", "timeout_min=1"],
        "--address, --gpus, --slurm would change nothing",
    ),
    "address without a cluster": ([*SWEEP, "--address", "auto"], "--address would change nothing"),
    "scheme of a benchmark": (["bench", "--schemes", "nope"], "unknown scheme 'nope'"),
    "file in the way of a model": (["remove-norms", "model", "--out", HERE], "is a file; name a directory"),
    "corpus that is not UTF-8": (["train", "--corpus", "notes-\udcff.txt"], "not UTF-8"),
    "output that is not UTF-8": (["train", "--out", "runs-\udcff"], "not UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_command_line_is_one_line(case, tmp_path, refused, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    arguments, words = BAD[case]
    assert words in refused(*arguments)
    assert not list(tmp_path.iterdir()), "something was written"


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no configuration": ({"config": None}, "config is None"),
    "depth between": ({"depth": 2.5}, "config.depth is 2.5"),
    "no steps": ({"steps": 0}, "steps is 0; it must be at least 1"),
    "a word for a truth": ({"compile": "no"}, "compile is 'no'"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_a_run_of_a_damaged_manifest_is_not_repeated(case, tmp_path, refused):
    change, words = WRONG_CONFIGS[case]
    path = write_run(tiny(write_text(tmp_path / "text.txt")), tmp_path / "out", corpus={"unigram_entropy": 6.5})
    manifest = json.loads((path / runs.MANIFEST).read_text())
    manifest |= change if "config" in change else {"config": {**manifest["config"], **change}}
    store.write_json(path / runs.MANIFEST, manifest)
    assert words in refused("train", "--from-manifest", path, "--out", tmp_path / "again", "--quiet")


def test_a_foreign_folder_keeps_no_lock(tmp_path, refused):
    (tmp_path / "thesis.tex").touch()
    assert "holds something else (thesis.tex)" in refused("remove-norms", "model", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_rank_that_is_not_the_first_lets_the_first_speak(refused, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    assert "--dept" in refused("train", "--dept", 4)
    assert waited == [errors.PATIENCE]


def test_a_table_that_cannot_be_parsed_is_one_line_and_not_the_readers_too(tmp_path, refused, monkeypatch):
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", heard.append)
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [handler])
    (tmp_path / "text.jsonl").write_text('{"text": ')
    where = ["--corpus", tmp_path / "text.jsonl", "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache"]
    assert "text.jsonl" in refused("train", *where, "--quiet")
    assert heard == []


def test_more_blocks_than_there_are_is_a_warning(tmp_path):
    config = tiny(write_text(tmp_path / "text.txt"), eval_blocks=10_000_000)
    corpus = corpus_of(config, tmp_path / "cache", False)
    with pytest.warns(UserWarning, match=f"eval_blocks is 10000000; all of the {len(corpus.held_out)} held-out"):
        corpus.measured_on(config)


def test_a_half_without_a_block_is_refused_before_training(tmp_path, refused):
    path = write_text(tmp_path / "text.txt")
    whole = corpus_of(tiny(path), tmp_path / "cache").held_out.size
    where = ["--corpus", path, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--vocab-size", 300]
    cut = ["--held-out", "test", "--block-length", whole * 2 // 3]
    line = refused("train", *where, *cut, "--depth", 1, "--width", 32, "--steps", 2, "--quiet")
    assert "held_out is 'test'" in line and "has a single held-out block" in line and "give" in line


def test_quiet_is_without_bars_and_ends_with_the_command(monkeypatch):
    from transformers.utils import logging

    shown: list[bool] = []
    monkeypatch.setattr(cli, "_export", lambda *, quiet=False: shown.append(logging.is_progress_bar_enabled()))
    before = logging.is_progress_bar_enabled()
    cli.main(["export", "--quiet"])
    cli.main(["export"])
    assert shown == [False, before] and logging.is_progress_bar_enabled() == before


def test_too_large_a_model_is_one_line(refused, monkeypatch):
    def too_large(*, quiet: bool = False) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(cli, "_export", too_large)
    assert "out of memory: " in refused("export")


class Silent(MemoryFileSystem):
    """A store that never answers one of the questions."""

    protocol = "silent"
    unanswered = ""

    def exists(self, path: str, **_: Any) -> bool:
        if self.unanswered == "looking for":
            threading.Event().wait()
        return True

    def find(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        if self.unanswered == "listing":
            threading.Event().wait()
        return {f"{path}/run/manifest.json": {"size": 2}}

    def get_file(self, *_: Any, **__: Any) -> None:
        threading.Event().wait()


@pytest.mark.parametrize(
    "unanswered, tried", [("looking for", "looking for it"), ("listing", "listing it"), ("", "reading manifest.json")]
)
def test_a_store_that_does_not_answer_is_one_line(unanswered, tried, refused, monkeypatch):
    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(Silent, "unanswered", unanswered)
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.1)
    line = refused("compare", "lns", "bhyt", "--runs", "silent://runs")
    assert f"silent://runs does not answer: {tried} took more than 0.1" in line


@pytest.mark.parametrize("address", ["data://x", "zip://runs", "zip://runs::x.zip", "github://x", "dir://x", "reference://x"])
def test_an_address_that_holds_no_runs_is_one_line(address, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    for arguments in (
        ["compare", "lns", "bhyt", "--runs", address],
        ["train", "--from-manifest", address, "--quiet"],
        ["train", "--corpus", "text.txt", "--out", address, "--quiet"],
    ):
        assert address in refused(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_an_address_of_text_that_does_not_answer_is_one_line(tmp_path, refused, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(source, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        address = f"http://127.0.0.1:{server.getsockname()[1]}/text.txt"
        where = ["--out", tmp_path / "out", "--cache-dir", tmp_path / "cache", "--quiet"]
        assert address in refused("train", "--corpus", address, *where)


@pytest.mark.parametrize(
    "arguments", [["probe", "no/where", "--text", HERE], ["train", "--corpus", "no/where"], ["diff", "no/where", "b"]]
)
def test_a_hub_that_does_not_answer_is_one_line(arguments, tmp_path, refused, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        where = ["--text", HERE] if "diff" in arguments else []
        assert "no/where" in refused(*arguments, *where, "--quiet")
    assert not constants.HF_HUB_OFFLINE


def test_a_cluster_that_does_not_answer_is_one_line(tmp_path):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(NormlabError, match=f"Ray does not start .{address}.: ConnectionRefusedError") as caught:
        next(Ray(address).finish(print, [], ()))
    assert "\n" not in str(caught.value)


def test_an_interrupted_import_is_one_line():
    """The process interrupts itself in the middle of an import, as a user does who changes his mind at once."""
    code = (
        "import importlib, os, signal, sys, time; from normlab.__main__ import main\n"
        "importlib.import_module = lambda name: (os.kill(os.getpid(), signal.SIGINT), time.sleep(30))\n"
        "sys.argv[1:] = ['schemes']; sys.exit(main())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, f"normlab: error: {errors.STOPPED}\n")


def test_a_reader_that_closes_the_output_ends_a_command_quietly():
    code = "import sys; from normlab import cli; sys.exit(cli.main(['schemes']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


MEMORY: dict[str, BaseException] = {
    "an allocation": MemoryError(),
    "a library's": ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    "the system's": OSError(12, "Cannot allocate memory"),
}


@pytest.mark.parametrize("case", MEMORY)
def test_too_little_memory_is_one_line_wherever_it_is_found(case, capsys):
    assert errors.ended_by(MEMORY[case]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("normlab: error: out of memory: ") and err.count("\n") == 1
    with pytest.raises(ImportError, match="no module"):
        errors.ended_by(ImportError("no module of that name"))
