"""The start of a notebook: images, the folder it reads, a failed sweep that stops it, models it trains itself."""

import json
from pathlib import Path

import pandas as pd
import plotly.io as pio
import pytest
from notebook_helpers import write_runs
from training_helpers import tiny, write_text

import normlab
from normlab import NormlabError, load_runs
from normlab.notebook import comparable, folded, folder, prepare, time_kernels, train_small
from normlab.runs import MANIFEST
from normlab.training.grids import Part, Preset
from normlab.training.sweep import SweepResult


@pytest.fixture(autouse=True)
def plotly_as_it_was():
    default, width, config = pio.renderers.default, pio.renderers["png"].width, pio.renderers["plotly_mimetype"].config
    yield
    pio.renderers.default, pio.renderers["png"].width = default, width
    pio.renderers["plotly_mimetype"].config = config


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preset of one short run on a text that the test may spoil."""
    text = write_text(tmp_path / "text.txt")
    fields = tiny(text, checkpoint_every=0).to_dict()
    kept = {name: value for name, value in fields.items() if name not in ("scheme", "depth", "seed", "lr")}
    short = Preset("tiny", parts=(Part({2: 1}, ("bhyt",)),), rate=1e-3, fields=kept)
    monkeypatch.setattr("normlab.training.presets.TINY", short)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("normlab.notebook.RECOMPUTED", tmp_path / "build")
    return text


@pytest.mark.parametrize("chosen", ["colab", "vscode", "plotly_mimetype"])
def test_figures_are_shown_as_plotly_chose_unless_images_are_asked_for(chosen):
    pio.renderers.default = chosen
    assert prepare("somewhere") == Path("somewhere") and pio.renderers.default == chosen
    prepare("somewhere", images=True)
    assert pio.renderers.default == "plotly_mimetype+png"


def test_no_figure_in_jupyterlab_offers_an_upload():
    prepare("somewhere")
    shown = pio.renderers["plotly_mimetype"].to_mimebundle({"data": [], "layout": {}})
    assert shown["application/vnd.plotly.v1+json"]["config"]["showSendToCloud"] is False


def test_away_from_a_checkout_what_comes_with_normlab_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepare("../data/grid") == normlab.shipped("grid") and folder("grid") == Path("grid")
    monkeypatch.setattr("normlab.release.DATA", tmp_path / "none")
    monkeypatch.setattr("normlab.release.release_url", lambda: "http://127.0.0.1:9/v1")
    with pytest.raises(NormlabError, match=r"v1/bench\.tar\.gz cannot be fetched .*pass the path of a checkout's data"):
        folder("../data/bench")


@pytest.mark.slow
def test_the_switch_trains_and_a_second_call_finds_it_done(preset):
    made = prepare("somewhere", fast=False)
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*.parquet")}
    assert load_runs(made)["scheme"].eq("bhyt").all() and before
    assert prepare("somewhere", fast=False) == made
    assert before == {file: file.stat().st_mtime_ns for file in made.rglob("*.parquet")}


def test_bad_input_and_a_failed_run_stop_the_notebook(preset, monkeypatch):
    preset.write_text("too short")
    with pytest.raises(NormlabError, match="too small to hold out"):
        prepare("somewhere", fast=False)
    failed = SweepResult(preset.parent, [], {"bhyt-d2": "no space left"}, {})
    monkeypatch.setattr("normlab.training.sweep.sweep", lambda *args: failed)
    with pytest.raises(NormlabError, match="1 of the runs of tiny failed; bhyt-d2: no space left"):
        prepare("somewhere", fast=False)


def test_another_way_to_recompute_takes_the_place_of_training(tmp_path):
    assert prepare("somewhere", fast=True, recompute=lambda: tmp_path) == Path("somewhere")
    assert prepare("somewhere", fast=False, recompute=lambda: tmp_path) == tmp_path


def test_folded_tables_stand_below_their_line_without_numbers_of_rows_and_missing_values():
    plain = pd.DataFrame({"a": [1.23456, float("nan")], "b": ["<x>", ""]})
    page = folded("What & why", plain, plain.set_index("b"))._repr_html_()
    assert page.startswith("<details><summary>What &amp; why</summary><table") and page.count("<table") == 2
    assert "1.235" in page and "nan" not in page.lower() and "&lt;x&gt;" in page and "<th>0</th>" not in page


def test_kernels_that_cannot_be_timed_stop_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.notebook.RECOMPUTED", tmp_path / "build")
    monkeypatch.setattr("normlab.notebook.BENCHMARKS", tmp_path / "run.py")
    with pytest.raises(NormlabError, match="from a checkout"):
        prepare("somewhere", fast=False, recompute=time_kernels)
    (tmp_path / "run.py").write_text("raise SystemExit(3)")
    with pytest.raises(NormlabError, match=r"run\.py .*--sections rows .* ended with status 3"):
        prepare("somewhere", fast=False, recompute=time_kernels)


def test_a_small_model_is_loaded_as_one_that_comes_with_normlab(tmp_path):
    text = write_text(tmp_path / "text.txt")
    fields = tiny(text).to_dict()
    names = ("depth", "steps", "width", "heads", "corpus", "vocab_size", "block_length")
    recipe = {name: fields[name] for name in names}
    kept = train_small("lns", **recipe, eval_blocks=2)
    model, blocks = normlab.load_model(kept), normlab.load_held_out(kept)
    assert model.config.scheme == "lns" and blocks.shape == (2, recipe["block_length"])
    assert not model.training and model.config.num_hidden_layers == recipe["depth"]


def test_a_model_that_comes_with_normlab_is_found_by_scheme_and_options(tmp_path, monkeypatch):
    monkeypatch.setattr("normlab.release.DATA", tmp_path)
    assert normlab.find_model("bhyt") is None
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=32)
    for name, depth, options in (("bhyt-d3", 3, {}), ("bhyt-d2", 2, {}), ("bhyt-tanh-d4", 4, {"lam_last": 10.0})):
        config = normlab.NormlabConfig(scheme="bhyt", num_hidden_layers=depth, **sizes, **options)
        normlab.NormlabForCausalLM(config).save_pretrained(tmp_path / "models" / name)
    assert normlab.find_model("bhyt") == tmp_path / "models" / "bhyt-d2"  # the shallowest
    assert normlab.find_model("bhyt", lam_last=10.0) == tmp_path / "models" / "bhyt-tanh-d4"
    assert normlab.find_model("lns") is None and normlab.find_model("bhyt", lam_last=3.0) is None


def test_what_figures_compare_are_plain_models_at_the_rates_of_most(tmp_path):
    runs = [write_runs(tmp_path / f"{lr:g}", schemes=["pre_rmsnorm", "lns"], depths=(2,), lr=lr) for lr in (1e-3, 4e-3)]
    write_runs(tmp_path / "begun", schemes=["dyt"], depths=(2,))
    changed = write_runs(tmp_path / "changed", schemes=["lns"], depths=(2,), seeds=[7])
    (path,) = changed.glob(f"*/{MANIFEST}")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"config": manifest["config"] | {"model": {"kappa": 4.0}}}))
    assert set(comparable(tmp_path)["run"]) == set(load_runs(runs)["run"])
    assert set(comparable(tmp_path, 4e-3)["lr"]) == {4e-3}
    assert set(comparable(tmp_path, 1e-3)["scheme"]) == {"pre_rmsnorm", "lns", "dyt"}, "at that rate all were tried"
