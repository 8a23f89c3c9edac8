"""Every scheme of the registry in training, probes, figures and TransformerLens, with no special cases.

One scheme a family always, all under the slow marker. Formulas, decoding, saving and compilation are in tests/models.
"""

import copy
import re

import numpy as np
import pytest
import torch
from figures_helpers import one_run
from model_helpers import (
    ONE_A_FAMILY,
    assert_bits,
    assert_near,
    assert_state,
    fresh_model,
    optimizer_of,
    tiny_model,
    tokens,
)

from normlab import SCHEMES, NormlabError
from normlab.figures import depth_scaling, loss_curves
from normlab.figures.theme import style_of
from normlab.models import fold_norms, without_blocks
from normlab.probes import angular_distance, jacobian_identity, record, skip_future_effect
from normlab.training.experiments import experiments

matrix = pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name in ONE_A_FAMILY else pytest.mark.slow) for name in SCHEMES]
)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_zero_centred_gain_is_the_same_function_and_decays(scheme):
    plain, centred = (
        fresh_model(scheme, num_hidden_layers=2, qk_norm="rms_head"),
        fresh_model(scheme, num_hidden_layers=2, qk_norm="rms_head", zero_centred=True),
    )
    ids = tokens(1, 6)
    with torch.no_grad():
        assert_near(centred(ids).logits, plain(ids).logits, 1e-5)
    decayed = set(centred.decay_parameter_names())
    for (name, parameter), own in zip(centred.named_parameters(), plain.parameters(), strict=True):
        if not torch.equal(parameter, own):
            assert_near(parameter + 1, own, 1e-6, name)
            assert name in decayed
        else:  # every gain is one that the configuration centres
            assert not re.search(r"(norm\w*\.weight|\.gain\w*)$", name), name


@matrix
def test_it_learns_a_batch_in_twenty_steps(scheme):
    model, ids = fresh_model(scheme, residual_warmup=2, tie_word_embeddings=True).train(), tokens(4, 16)
    optimizer, losses = optimizer_of(model, 3e-3), []
    model.set_schedules(0, 20)
    for step in range(1, 21):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.after_step(step, 20)
    assert losses[-1] < 0.985 * losses[0] and max(losses) < losses[0] + 1, losses


@matrix
def test_probes_measure_every_layer_and_change_nothing(scheme):
    model, ids = tiny_model(scheme), tokens()
    expected = model(ids).logits
    with record(model, ["token_l2_mean", "relative_contribution", "grad_l2_mean"], loss_tokens=1) as rec:
        out = model(ids, labels=ids)
        rec.backward(out.loss)
    assert_bits(out.logits, expected)
    table = rec.stats().to_pandas()
    table = table[table["mask"] == "all"]
    assert table["value"].notna().all() and (table["value"] >= 0).all()
    for site, metric, layers in (
        ("block_out", "token_l2_mean", [0, 1, 2, 3]),
        ("final_norm_in", "token_l2_mean", [3]),
        ("attn", "relative_contribution", [1, 2, 3]),
        ("mlp", "relative_contribution", [1, 2, 3]),
        ("block_in_grad", "grad_l2_mean", [1, 2, 3]),
    ):
        found = table[(table["site"] == site) & (table["metric"] == metric)]
        missing = [layer for layer in layers if layer not in set(found["layer"])]
        if site in ("attn", "mlp"):  # where the block's output is not its input and what the branches add
            assert all(f"{site} {layer}" in rec.absent for layer in missing), rec.absent
            assert not any("name them" in why for why in rec.absent.values()), "nothing is to be named in our blocks"
        else:
            assert not missing, (site, metric)
    for site, kind in (("norm_in", "token_l2_mean"), ("norm_in_grad", "grad_l2_mean")):
        expected_at = {
            (f"{place.rpartition('_')[0]}_{site}", layer)
            for layer, block in enumerate(model.model.layers, 1)
            for place, _ in block.layout.places()
            if place.endswith(("_in", "_sum"))
        }
        found = table[(table["metric"] == kind) & table["site"].isin([f"{part}_{site}" for part in ("attn", "mlp")])]
        there = set(zip(found["site"], found["layer"], strict=True))
        missing = {f"{at} {layer}" for at, layer in expected_at - there}
        assert there <= expected_at and all("reads a copy of the stream" in rec.absent.get(at, "") for at in missing)
        assert kind == "grad_l2_mean" or not missing


@matrix
def test_what_a_run_measures_of_its_depth_is_measured_or_refused_in_one_line(scheme):
    model, ids = tiny_model(scheme), tokens(2, 8)
    found = experiments(model, ids.numpy())
    assert np.isfinite(found["value"]).all()
    measured = {(row.metric, row.part) for row in found.itertuples()}
    assert measured >= {("skip_delta_loss", "block"), ("logit_lens_kl", "block")}
    batches = [{"input_ids": ids}]
    for name, probe in (
        ("skip_future_effect", skip_future_effect),
        ("angular_distance", angular_distance),
        ("jacobian_identity", jacobian_identity),
    ):
        if (name, "block") not in measured:
            with pytest.raises(NormlabError, match="several residual streams") as caught:
                probe(model, batches, progress=False)
            assert one_line(caught.value)
    if ("skip_delta_loss", "deleted") not in measured:
        with pytest.raises(NormlabError, match="a block cannot be moved"), without_blocks(model, [1]):
            pass


@matrix
def test_figures_of_runs_draw_it_with_its_own_look(scheme):
    runs, style = one_run(scheme), style_of(scheme)
    for draw in (loss_curves, depth_scaling):
        own = [trace for trace in draw(runs).data if trace.meta and trace.meta.get("scheme") == scheme]
        assert (style.color, style.dash) in {(trace.line.color, trace.line.dash) for trace in own}, draw.__name__


@matrix
def test_the_final_norms_site_is_what_the_final_norm_reads(scheme):
    model, ids, seen = tiny_model(scheme), tokens(), []
    final = getattr(model.model.norm, "norm", model.model.norm)
    final.register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    with record(model, ["rms"]) as rec, torch.no_grad():
        model(ids)
    table = rec.stats().to_pandas().query("site == 'final_norm_in' and mask == 'all'")
    assert table["value"].item() == pytest.approx(float(seen[0].square().mean().sqrt()), rel=1e-5)


def one_line(error: Exception) -> bool:
    return "\n" not in str(error) and len(str(error)) < 250


@matrix
def test_it_bridges_to_transformerlens_or_says_in_one_line_why_not(scheme):
    pytest.importorskip("transformer_lens")
    from normlab.models.lens import to_bridge

    model, ids = tiny_model(scheme), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
        try:
            bridge = to_bridge(model)
        except NormlabError as error:
            assert one_line(error) and scheme in str(error)
            return
        assert_bits(bridge(ids), expected)


@matrix
def test_it_folds_or_says_in_one_line_why_not(scheme):
    model, ids = tiny_model(scheme), tokens()
    with torch.no_grad():
        expected, before = model(ids).logits, copy.deepcopy(model.state_dict())
        try:
            whole = fold_norms(model)
        except NormlabError as error:
            assert one_line(error)
            whole = fold_norms(model, partial=True)
            assert whole.left
        assert_near(model(ids).logits, expected, 2e-5)
        whole.unfold()
    assert_state(model, before)
