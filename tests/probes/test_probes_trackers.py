"""Layer statistics where people log, read back from the files of the real TensorBoard, W&B and Trackio."""

import json
import sqlite3
import sys
from contextlib import closing

import pandas
import pytest
from probe_runs import train
from probe_zoo import tiny_llama

from normlab.probes.callback import LayerStatsCallback, Trackers, curves

METRICS = ["token_l2_mean", "rms"]
CURVE = "layers/token_l2_mean/block_out"


def readings():
    rows = [(site, layer, 10.0**layer) for site in ("block_out", "attn_norm_in") for layer in (2, 3, 1)]
    table = pandas.DataFrame(rows, columns=["site", "layer", "value"])
    return table.assign(step=5, metric="rms", mask="all")


def test_curves_are_of_the_first_and_the_last_layer_only():
    expected = {f"layers/rms/{s}/{i}": 10.0**i for s in ("block_out", "attn_norm_in") for i in (1, 3)}
    assert curves(readings()) == expected
    assert curves(readings().assign(mask="no_first")) == {}


def test_tensorboard_holds_the_curves_of_every_measured_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = LayerStatsCallback(every=1, metrics=METRICS)
    train(tiny_llama(), tmp_path, [callback], report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "layers"))
    events.Reload()
    table = callback.to_pandas().query("metric == 'token_l2_mean' and site == 'block_out' and mask == 'all'")
    for layer in (0, 3):
        given = [(event.step, event.value) for event in events.Scalars(f"{CURVE}/{layer}")]
        own = table[table["layer"] == layer]
        assert given == list(zip(own["step"], own["value"].astype("float32"), strict=True))
    assert f"{CURVE}/2" not in events.Tags()["scalars"]


@pytest.mark.slow
def test_wandb_holds_the_curves_offline(tmp_path, monkeypatch):
    import wandb

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    callback = LayerStatsCallback(every=1, metrics=METRICS)
    train(tiny_llama(), tmp_path, [callback], report_to=["wandb"])
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary[f"{CURVE}/3"] == curves(callback.to_pandas().query("step == 2"))[f"{CURVE}/3"]
    assert f"{CURVE}/2" not in summary


def test_trackio_holds_the_curves(tmp_path, monkeypatch):
    """Imported anew: trackio fixes its folder when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    import trackio

    trackio.init(project="p", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    Trackers().send(["trackio"], tmp_path, readings(), 5)
    trackio.finish()
    with closing(sqlite3.connect(tmp_path / "p.db")) as base:
        rows = base.execute("select step, metrics from metrics").fetchall()
    assert [(step, json.loads(values)) for step, values in rows] == [(5, curves(readings()))]
