"""What a notebook does first: renderers, the folder it reads, and a failed sweep that stops it."""

from __future__ import annotations

from pathlib import Path

import plotly.io as pio
import pytest
from training_helpers import tiny, write_text

from normlab import NormlabError, load_runs
from normlab.notebook import prepare
from normlab.training.presets import PRESETS, Part, Preset
from normlab.training.sweep import SweepResult


@pytest.fixture(autouse=True)
def plotly_as_it_was():
    default, width = pio.renderers.default, pio.renderers["png"].width
    yield
    pio.renderers.default, pio.renderers["png"].width = default, width


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preset of one short run on a text that the test may spoil."""
    text = write_text(tmp_path / "text.txt")
    fields = tiny(text, checkpoint_every=0).to_dict()
    kept = {name: value for name, value in fields.items() if name not in ("scheme", "depth", "seed", "lr")}
    monkeypatch.setitem(PRESETS, "tiny", Preset("tiny", parts=(Part({2: 1}, ("bhyt",)),), rate=1e-3, fields=kept))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normlab.notebook.RECOMPUTED", tmp_path / "build")
    return text


def test_shipped_runs_are_read_where_they_lie():
    assert prepare("somewhere") == Path("somewhere") and pio.renderers.default == "plotly_mimetype"
    prepare("somewhere", images=True)
    assert pio.renderers.default == "plotly_mimetype+png"


def test_the_switch_trains_and_a_second_call_finds_it_done(preset: Path):
    folder = prepare("somewhere", fast=False)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.parquet")}
    assert load_runs(folder)["scheme"].eq("bhyt").all() and before
    assert prepare("somewhere", fast=False) == folder
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*.parquet")}


def test_bad_input_and_a_failed_run_stop_the_notebook(preset: Path, monkeypatch: pytest.MonkeyPatch):
    preset.write_text("too short")
    with pytest.raises(NormlabError, match="too small to hold out"):
        prepare("somewhere", fast=False)
    failed = SweepResult(preset.parent, [], {"bhyt-d2": "no space left"}, {})
    monkeypatch.setattr("normlab.training.sweep.sweep", lambda *args: failed)
    with pytest.raises(NormlabError, match="1 of the runs of tiny failed; bhyt-d2: no space left"):
        prepare("somewhere", fast=False)
