"""Streaming: how batches are cut does not matter, memory stays, tables are saved, merged and drawn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_zoo import batch_for, near, ours, run, tiny_llama, token_batch, values

from normlab.errors import NormlabError
from normlab.probes import METRICS, LayerStats, record
from normlab.probes.metrics import FORWARD_METRICS

MODEL = {scheme: ours(scheme) for scheme in ("bhyt", "peri_ln", "post_rmsnorm")}
BATCHES = st.builds(
    lambda rows, length, seed: token_batch(rows, length, torch.Generator().manual_seed(seed)),
    st.integers(2, 5),
    st.integers(7, 12),
    st.integers(0, 1000),
)


def measured(model, batches) -> LayerStats:
    with record(model, list(METRICS)) as rec:
        for batch in batches:
            rec.backward(model(**batch).loss)
    return rec.stats()


def cut_and_merged(batch, scheme, data):
    model, rows = MODEL[scheme], len(batch["input_ids"])
    inner = data.draw(st.sets(st.integers(1, rows - 1)))
    cuts = [0, *sorted(inner), rows]
    pieces = [{name: value[a:b] for name, value in batch.items()} for a, b in zip(cuts, cuts[1:], strict=False)]
    whole = near(values(measured(model, [batch])))
    assert values(measured(model, pieces)) == whole
    parts = [measured(model, [piece]) for piece in pieces]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert values(merged) == whole


CUTS = given(batch=BATCHES, scheme=st.sampled_from(sorted(MODEL)), data=st.data())


@settings(max_examples=4, deadline=None)
@CUTS
def test_no_metric_depends_on_how_the_batches_are_cut_or_the_recordings_merged(batch, scheme, data):
    cut_and_merged(batch, scheme, data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@CUTS
def test_no_metric_depends_on_any_of_many_cuts(batch, scheme, data):
    cut_and_merged(batch, scheme, data)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision_models_are_measured_to_their_precision(dtype, tolerance):
    batch = batch_for("llama")
    full = run(tiny_llama(), batch, ["token_l2_mean", "rms", "feature_var_mean"])
    half = run(tiny_llama().to(dtype), batch, ["token_l2_mean", "rms", "feature_var_mean"])
    for key, value in full.items():
        assert half[key] == pytest.approx(value, rel=8 * tolerance), key  # the model itself rounds in every layer


def test_saved_statistics_load_merge_and_tabulate_as_before(tmp_path):
    model, batch = MODEL["bhyt"], token_batch()
    stats = measured(model, [batch])
    stats.step = 40
    loaded = LayerStats.load(stats.save(tmp_path / "stats.parquet"))
    assert loaded.to_pandas().equals(stats.to_pandas()) and loaded.manifest == stats.manifest
    assert values(loaded.merge(stats)) == near(values(measured(model, [batch, batch])))
    assert loaded.manifest["metrics"]["rms"] == METRICS["rms"].definition and loaded.manifest["versions"]["torch"]
    (tmp_path / "other.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(NormlabError, match="holds no layer statistics"):
        LayerStats.load(tmp_path / "other.parquet")


def test_recordings_of_different_metrics_or_widths_do_not_merge():
    batch = token_batch()

    def stats(metrics, **changes):
        model = tiny_llama(**changes)
        with record(model, metrics) as rec, torch.no_grad():
            model(**batch)
        return rec.stats()

    with pytest.raises(NormlabError, match="different metrics"):
        stats(["rms"]).merge(stats(["max_abs"]))
    with pytest.raises(NormlabError, match="different models"):
        stats(["rms"]).merge(stats(["rms"], hidden_size=16))
    with pytest.raises(NormlabError, match="different models"):
        stats(["massive_activation_ratio"]).merge(stats(["massive_activation_ratio"], hidden_size=16))


def test_plot_has_one_line_a_site_and_the_definition():
    pytest.importorskip("plotly")
    stats = measured(MODEL["bhyt"], [token_batch()])
    figure = stats.plot("token_l2_mean")
    assert [trace.name for trace in figure.data] == ["block_out", "attn_norm_in", "mlp_norm_in", "final_norm_in"]
    assert list(figure.data[0].x) == [0, 1, 2] and "‖h‖₂" in figure.layout.title.subtitle.text
    with pytest.raises(NormlabError, match="was not recorded"):
        measured(MODEL["bhyt"], [token_batch()]).plot("perplexity")


def test_standard_errors_shrink_with_tokens():
    model, batch = MODEL["bhyt"], token_batch()
    with record(model, FORWARD_METRICS) as rec, torch.no_grad():
        model(**batch)
    once = rec.stats().to_pandas(errors=True).set_index(["site", "layer", "metric", "mask"])
    row = once.loc["block_out", 1, "token_l2_mean", "all"]
    assert row["tokens"] == int(batch["attention_mask"].sum()) and 0 < row["standard_error"] < row["value"]


@pytest.mark.usefixtures("own_garbage")
def test_memory_does_not_grow_with_steps():
    import gc

    model, batch = ours("bhyt"), token_batch()

    def held() -> int:
        gc.collect()
        return sum(x.numel() * x.element_size() for x in gc.get_objects() if issubclass(type(x), torch.Tensor))

    sizes = []
    with record(model, list(METRICS)) as rec:
        for step in range(1, 13):
            rec.backward(model(**batch).loss)
            if step in (4, 12):
                sizes.append(held())
    assert sizes[1] <= sizes[0] + 1024
