"""Spans to cut: the cheapest is the cheapest, measured apart from its choice, in indices that mergekit understands.

Also the heat map of everything that was recorded.
"""

import numpy as np
import pytest
import torch
import yaml
from probe_zoo import batch_for, tiny_llama

from normlab.errors import NormlabError
from normlab.figures import theme
from normlab.probes import cheapest_branches, cheapest_spans, mergekit_config, record, skip_sensitivity


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(num_hidden_layers=5)
    with torch.no_grad():
        for layer in (1, 2):  # blocks 2 and 3 do nothing
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


def test_blocks_that_do_nothing_are_the_ones_to_drop_and_the_indices_say_so(model):
    batches = [batch_for("llama"), {name: value.flip(0) for name, value in batch_for("llama").items()}]
    table = cheapest_spans(model, batches, candidates=1, progress=False).set_index("length")
    assert list(table.index) == [1, 2] and table.loc[1, "first"] in (2, 3)
    row = table.loc[2]
    assert (row["first"], row["last"], row["start"], row["stop"]) == (2, 3, 1, 3) and row["keep"] == [[0, 1], [3, 5]]
    assert row["skip_delta_loss"] == pytest.approx(0, abs=1e-6) and row["low"] <= row["skip_delta_loss"] <= row["high"]
    kept = torch.nn.ModuleList(model.model.layers[begin:end] for begin, end in row["keep"])
    assert [block for part in kept for block in part] == [model.model.layers[i] for i in (0, 3, 4)]


def test_every_span_is_tried_where_there_are_few_and_the_choice_is_the_least_loss(model):
    batch = batch_for("llama")
    table = cheapest_spans(model, [batch], longest=3, candidates=9, progress=False).set_index("length")
    tried = skip_sensitivity(model, [batch], span=3, progress=False)
    assert table.loc[3, "skip_delta_loss"] == pytest.approx(tried["skip_delta_loss"].min())
    assert table.loc[3, "first"] == tried.loc[tried["skip_delta_loss"].idxmin(), "layer"]
    with pytest.raises(NormlabError, match="a span of 1 to 4 blocks can be dropped of 5, not of 5"):
        cheapest_spans(model, [batch], longest=5, progress=False)


def test_the_mergekit_file_is_yaml_that_keeps_the_other_blocks():
    found = yaml.safe_load(mergekit_config("a/b: c", [[0, 1], [3, 5]], "float32"))
    assert found["merge_method"] == "passthrough" and found["dtype"] == "float32"
    sources = [part["sources"][0] for part in found["slices"]]
    assert sources == [{"model": "a/b: c", "layer_range": [0, 1]}, {"model": "a/b: c", "layer_range": [3, 5]}]


def test_the_heat_map_has_a_row_a_metric_and_site_and_the_values_to_hover(model):
    pytest.importorskip("plotly")
    with record(model, ["rms", "update_cosine"]) as rec, torch.no_grad():
        model(**batch_for("llama"))
    stats = rec.stats()
    figure = stats.plot(kind="heatmap")
    (trace,) = figure.data
    assert figure.layout.template == theme.template() and figure.layout.title.text == "All metrics"
    table = stats.to_pandas().query("mask == 'all'")
    assert len(trace.y) == table[["metric", "site"]].drop_duplicates().shape[0] and list(trace.x) == list(range(6))
    value = table.query("metric == 'rms' and site == 'block_out' and layer == 4")["value"].item()
    assert trace.customdata[0][4] == value and np.nanmax(trace.z) == 1
    assert len(stats.plot("rms", kind="heatmap").data[0].y) < len(trace.y)
    with pytest.raises(NormlabError, match="unknown kind 'pie'"):
        stats.plot("rms", kind="pie")


def test_a_loss_that_is_no_number_has_no_cheapest_part():
    broken = tiny_llama(num_hidden_layers=3)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    for find in (cheapest_spans, cheapest_branches):
        with pytest.raises(NormlabError, match="the loss is not finite: nothing can be told to be the cheapest"):
            find(broken, [batch_for("llama")], progress=False)
