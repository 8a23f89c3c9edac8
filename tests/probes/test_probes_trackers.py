"""Layer statistics where people log, read back from the files of the real TensorBoard, W&B and Trackio."""

import io
import sys

import numpy as np
import pandas
import pytest
from probe_runs import train
from probe_zoo import tiny_llama

from normlab.errors import NormlabError
from normlab.probes.callback import CELL, LABEL, WIDE, LayerStatsCallback, Trackers, curves, heatmap_image

METRICS = ["token_l2_mean", "rms"]


def history():
    rows = [
        (step, site, layer, "rms", "all", 10.0**layer * (1 + step))
        for step in (0, 5)
        for site in ("block_out", "attn_norm_in")
        for layer in (1, 2, 3)
    ]
    return pandas.DataFrame(rows, columns=["step", "site", "layer", "metric", "mask", "value"])


def test_the_heat_map_is_one_image_with_a_panel_a_metric_and_site_and_its_first_layer_at_the_bottom():
    image = heatmap_image(history())
    assert image.shape[:2] == (2 * (LABEL + 3 * CELL + 6), WIDE) and image.dtype == np.uint8
    top, bottom = image[LABEL + 2, -2], image[LABEL + 3 * CELL - 2, 2]
    assert tuple(top) == (253, 231, 37) and tuple(bottom) == (68, 1, 84)  # the largest value light, the smallest dark
    with pytest.raises(NormlabError, match="no layers"):
        heatmap_image(history().assign(mask="no_first"))


def test_curves_are_of_the_first_and_the_last_layer_only():
    assert list(curves(history())) == [f"layers/rms/{s}/{i}" for s in ("block_out", "attn_norm_in") for i in (1, 3)]


def test_tensorboard_holds_one_heat_map_a_measured_step(tmp_path):
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_llama(), tmp_path, [LayerStatsCallback(every=1, metrics=METRICS)], report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "layers"), size_guidance={"images": 0})
    events.Reload()
    assert len(events.Images("layers/heatmap")) == 3
    image = Image.open(io.BytesIO(events.Images("layers/heatmap")[-1].encoded_image_string))
    assert image.size[0] == WIDE
    assert len(events.Scalars("layers/token_l2_mean/block_out/3")) == 3
    assert "layers/token_l2_mean/block_out/2" not in events.Tags()["scalars"]


@pytest.mark.slow
def test_wandb_holds_the_heat_map_offline(tmp_path, monkeypatch):
    import wandb

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    train(tiny_llama(), tmp_path, [LayerStatsCallback(every=1, metrics=METRICS)], report_to=["wandb"])
    wandb.finish()
    images = list(tmp_path.glob("wandb/offline-run-*/files/media/images/layers/heatmap_*.png"))
    assert len(images) == 3


def test_trackio_holds_the_heat_map(tmp_path, monkeypatch):
    """Imported anew: trackio fixes its folder when it is imported."""
    from PIL import Image

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    import trackio

    trackio.init(project="p", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    Trackers().send(["trackio"], tmp_path, history(), 5)
    trackio.finish()
    (image,) = tmp_path.glob("media/p/*/5/*.png")
    assert np.array_equal(np.asarray(Image.open(image).convert("RGB")), heatmap_image(history()))
    assert (tmp_path / "p.db").is_file()
