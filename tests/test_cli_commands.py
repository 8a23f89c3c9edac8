"""The command line: what it runs, and one line with exit code 2 for everything that cannot be done."""

import errno
import inspect
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from training_helpers import TINY, tiny, write_run, write_text

import normlab
from normlab import runs
from normlab.cli import COMMANDS, main
from normlab.models import costs
from normlab.schemes import SCHEMES
from normlab.training import sweep as sweep_module

TINY_FLAGS = [item for name, value in TINY.items() for item in ("--" + name.replace("_", "-"), str(value))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def _train(text: Path, *more: Any) -> list[str]:
    root = text.parent
    fixed = ["train", "--corpus", text, "--out", root / "out", "--cache-dir", root / "cache", "--quiet", *TINY_FLAGS]
    return [str(argument) for argument in [*fixed, *more]]


# --- bad input ---


def test_a_model_field_out_of_range_is_one_line(text, refused):
    assert "kappa -1.0 must be positive" in refused(*_train(text, "--model", "kappa=-1"))


def test_an_unreadable_place_is_one_line(text, refused, monkeypatch):
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/where")

    monkeypatch.setattr(Path, "mkdir", denied)
    assert "Permission denied: /some/where" in refused(*_train(text))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_may_be_left_out_has_a_type_for_that(name):
    """Newer Pythons do not read `= None` as `| None`: without a flag, the command would refuse its own default."""
    act = COMMANDS[name].act
    hints = get_type_hints(act)
    for parameter in inspect.signature(act).parameters.values():
        if parameter.default is None:
            assert type(None) in get_args(hints[parameter.name]), parameter.name


# --- what it does ---


def test_training_from_the_command_equals_training_from_python(text, capsys):
    assert main(_train(text, "--scheme", "lns", "--no-keep-weights")) == 0
    out, err = capsys.readouterr()
    config = tiny(text, scheme="lns", keep_weights=False)
    path = text.parent / "out" / config.run_id
    assert str(path) in out
    for words in ("eval loss ", "unigram entropy ", "bigram loss ", "trigram loss "):
        assert out.split(words)[1][0].isdigit()
    run = normlab.train(config, text.parent / "python", cache_dir=text.parent / "cache", progress=False)
    assert (run.path / runs.STATS).read_bytes() == (path / runs.STATS).read_bytes()
    assert json.loads((path / runs.MANIFEST).read_text())["config"] == config.to_dict()
    repeated = ["--out", str(text.parent / "again"), "--cache-dir", str(text.parent / "cache"), "--quiet"]
    assert main(["train", "--from-manifest", str(path), *repeated]) == 0
    again = text.parent / "again" / config.run_id / runs.STATS
    assert again.read_bytes() == (path / runs.STATS).read_bytes()


def test_the_bar_shows_loss_speed_and_time_left(text, capsys):
    flags = [flag for flag in _train(text, "--no-keep-weights") if flag != "--quiet"]
    assert main(flags) == 0
    last = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    for part in ("100%", "8/8", " steps/s", "loss ", "tokens/s"):
        assert part in last
    assert "Writing" not in last


def test_a_sweep_passes_on_what_was_asked_and_fails_when_a_run_does(text, capsys, monkeypatch):
    asked: dict[str, Any] = {}

    def fake(preset: Any, out: str, **options: Any) -> sweep_module.SweepResult:
        asked.update(options, preset=preset)
        run = runs.read_run(write_run(tiny(text), text.parent / "out"))
        return sweep_module.SweepResult(Path(out), [run], {"other-run": "it broke"}, {})

    monkeypatch.setattr(sweep_module, "sweep", fake)
    flags = ["--preset", "league", "--schemes", "lns,bhyt", "--depths", "8,7"]
    flags += ["--workers", "3", "--threads", "2"]
    assert main(["sweep", *flags, "--out", str(text.parent / "out"), "--quiet"]) == 1
    assert [(part.schemes, part.depths) for part in asked["preset"].parts] == [(("lns", "bhyt"), {8: 1, 7: 1})]
    assert (asked["workers"], asked["threads"], asked["progress"]) == (3, 2, False)
    out, err = capsys.readouterr()
    assert "1 runs, 1 finished" in out and "normlab: failed: other-run: it broke" in err


def test_the_schemes_are_listed_in_a_hundred_columns(capsys, monkeypatch):
    assert main(["schemes"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 100 and all(f"\n{name} " in narrow for name in SCHEMES)
    monkeypatch.setattr(costs, "table", partial(costs.table, depth=2))
    assert main(["schemes", "--wide"]) == 0
    assert "operations" in capsys.readouterr().out


def test_figures_are_written_and_an_unreadable_run_is_a_warning(text, capsys, monkeypatch):
    pytest.importorskip("plotly")
    from normlab import export
    from normlab.figures import FIGURES

    monkeypatch.setattr(export, "save_images", lambda *_: ([], export.NO_BROWSER))
    out = text.parent / "out"
    write_run(tiny(text), out)
    (write_run(tiny(text, seed=1), out) / runs.STATS).write_bytes(b"PAR1")
    assert main(["figures", str(out), "--out", str(text.parent / "figures"), "--quiet"]) == 0
    printed, err = capsys.readouterr()
    names = {f"{row.name}.html" for row in FIGURES.values() if row.reads == "runs"}
    assert {path.name for path in (text.parent / "figures").iterdir()} == names
    assert printed.count(".html") == len(names) and "train with experiment_blocks" in err
    for page in (text.parent / "figures").iterdir():  # plotly itself is inside: nothing is fetched
        assert "<script src=" not in page.read_text() and page.stat().st_size > 1_000_000
        assert '"showSendToCloud": false' in page.read_text()
    assert "normlab: warning: left out: run" in err and export.NO_BROWSER in err
    assert main(["figures", str(out), "--depth", "7", "--out", str(text.parent / "deep"), "--quiet"]) == 2
    assert "error: No run of depth 7 in the table, which has depth 2." in capsys.readouterr().err
    assert not (text.parent / "deep").exists()


def test_a_command_loads_only_what_it_needs_to_refuse(tmp_path):
    """One after the other in one process, what needs least first."""
    calls = [
        (["frain"], {"torch", "numpy"}, "no command 'frain'; choose from train, sweep"),
        (["train", "--frob"], {"transformers", "torch._dynamo"}, "Unknown option: --frob"),
        (["figures", "nowhere", "--out", "x"], {"transformers", "torch._dynamo"}, "nowhere does not exist"),
    ]
    code = (
        "import sys; from normlab.cli import main\n"
        f"for arguments, unneeded, line in {calls}:\n"
        "    assert main(arguments) == 2, arguments\n"
        "    assert not unneeded & set(sys.modules), (arguments, unneeded & set(sys.modules))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for said, (*_, line) in zip(process.stderr.splitlines(), calls, strict=True):
        assert said.startswith(f"normlab: error: {line}")
