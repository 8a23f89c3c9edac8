"""Every scheme of the registry under the same tests, with no special cases.

Every formula is always tested. The rest runs for one scheme per family (compilation for one), and for all under the
slow marker. Schemes of the shipped runs have their formula in `reference_model`, all others in `reference_schemes`.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from figures_helpers import one_run
from model_helpers import assert_bits, assert_near, fresh_model, gradients, optimizer_of, tiny_model, tokens
from reference_model import as_float64, next_token_loss, reference
from reference_schemes import logits as field_logits

from normlab import SCHEMES, NormlabError, NormlabForCausalLM
from normlab.figures import depth_scaling, loss_curves
from normlab.figures.theme import style_of
from normlab.models import fold_norms, without_blocks
from normlab.probes import angular_distance, jacobian_identity, record, skip_future_effect
from normlab.schemes import STUDIED
from normlab.training.experiments import experiments

FIELD = [name for name in SCHEMES if name not in STUDIED]
ONE_A_FAMILY = {row.family: name for name, row in reversed(SCHEMES.items()) if name not in STUDIED}.values()
matrix = pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=() if name in ONE_A_FAMILY else pytest.mark.slow) for name in SCHEMES]
)


def expected_logits(config, state, ids):
    if config.scheme in STUDIED:
        return reference(config, state, ids).logits
    return field_logits(config, state, ids)


def two_blocks(scheme: str) -> int:
    """Blocks that show each of a scheme's layouts."""
    return 2 if SCHEMES[scheme].first_layout else 1


@pytest.mark.parametrize("scheme", FIELD)
def test_logits_and_gradients_follow_the_formula(scheme):
    model, ids = tiny_model(scheme), tokens(2, 7)
    state = as_float64(model.state_dict(), grad=True)
    wanted = expected_logits(model.config, state, ids)
    assert_near(model(ids).logits, wanted, 5e-5, "logits")
    ours = gradients(model, model(ids, labels=ids).loss)
    targets = torch.autograd.grad(next_token_loss(wanted, ids), [state[name] for name in ours])
    for (name, gradient), target in zip(ours.items(), targets, strict=True):
        assert target.abs().max() > 1e-8, f"{name} has no gradient to compare"
        assert_near(gradient, target, 1e-3 if gradient.numel() > 1 else 5e-3, name)  # a scalar's terms cancel


@pytest.mark.parametrize("kind", ["l2", "rms_head", "rms_width"])
def test_normalized_queries_and_keys_are_an_option_of_any_scheme(kind):
    model, ids = tiny_model("gpas", qk_norm=kind), tokens(2, 7)
    state = as_float64(model.state_dict())
    assert_near(model(ids).logits, expected_logits(model.config, state, ids), 5e-5)


def test_depth_is_attended_to_in_blocks_of_several_layers():
    model, ids = tiny_model("block_attn_residuals", num_hidden_layers=10), tokens(1, 5)
    state = as_float64(model.state_dict())
    assert_near(model(ids).logits, expected_logits(model.config, state, ids), 5e-5)


@pytest.mark.parametrize("scheme", ["gpas", pytest.param("deepnorm", marks=pytest.mark.slow)])
def test_affine_attention_is_an_option_of_any_scheme(scheme):
    model, ids = tiny_model(scheme, affine_attention=True), tokens(2, 7)
    state = as_float64(model.state_dict(), grad=True)
    wanted = expected_logits(model.config, state, ids)
    assert_near(model(ids).logits, wanted, 5e-5)
    ours = gradients(model, model(ids, labels=ids).loss)
    targets = torch.autograd.grad(next_token_loss(wanted, ids), [state[name] for name in ours])
    for (name, gradient), target in zip(ours.items(), targets, strict=True):
        assert_near(gradient, target, 5e-3, name)


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
def test_decoding_with_a_cache_gives_the_full_forward(scheme):
    model, ids = tiny_model(scheme), tokens(2, 8)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :3], use_cache=True)
        pieces = [out.logits]
        for position in range(3, 8):
            out = model(ids[:, position : position + 1], past_key_values=out.past_key_values, use_cache=True)
            pieces.append(out.logits)
    assert_near(torch.cat(pieces, 1), whole, 2e-5)


@matrix
def test_saving_and_loading_keeps_every_bit(scheme, tmp_path):
    model, ids = tiny_model(scheme), tokens()
    model.save_pretrained(tmp_path)
    loaded = NormlabForCausalLM.from_pretrained(tmp_path).eval()
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_bits(after[name], tensor, name)
    with torch.no_grad():
        assert_bits(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(  # tracing takes seconds: one always, the others when asked for
    "scheme", [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(FIELD)]
)
def test_the_whole_compiles_as_one_graph(scheme):
    torch._dynamo.reset()
    model, ids = tiny_model(scheme, num_hidden_layers=two_blocks(scheme)), tokens(1, 8)
    loss = model(ids, labels=ids, use_cache=False).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_near(compiled(ids, labels=ids, use_cache=False).loss, loss, 1e-5)
    torch._dynamo.reset()


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
def test_gradient_checkpointing_gives_the_same_gradients(scheme):
    model, ids = tiny_model(scheme).train(), tokens(2, 6)
    plain = gradients(model, model(ids, labels=ids).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, gradient in gradients(model, model(ids, labels=ids).loss).items():
        assert_near(gradient, plain[name], 1e-5, name)


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
        else:
            assert not missing, (site, metric)


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
    for name, tensor in model.state_dict().items():
        assert_bits(tensor, before[name], name)
