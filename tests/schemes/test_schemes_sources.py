"""Starts, decay and layers as in the papers' code, where the forward pass's formula does not show them."""

import math

import pytest
import torch
from model_helpers import assert_bits, fresh_model, tokens

from normlab.norms import NoNorm

WIDE = {"hidden_size": 64, "intermediate_size": 96}


def test_a_share_that_is_a_whole_number_of_blocks_is_that_number():
    model = fresh_model("mix_ln", num_hidden_layers=10, post_fraction=0.3)
    assert sum(bool(layer.layout.attn_sum) for layer in model.model.layers) == 3


def test_keel_spares_the_whole_first_layer_its_factor():
    """Section 3.1: neither the first attention nor the first MLP."""
    layers = fresh_model("keel").model.layers
    factors = [(layer.attn_residual.keep, layer.mlp_residual.keep) for layer in layers]
    assert factors == [(1, 1), (6, 6), (6, 6)]


def test_no_vector_of_derf_decays():
    names = fresh_model("derf").decay_parameter_names()
    assert names and all(name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")) for name in names)


def test_the_matrix_that_makes_mhcs_weights_decays_and_its_biases_do_not():
    names = [name for name in fresh_model("mhc").decay_parameter_names() if "residual" in name]
    assert len(names) == 6 and all(name.endswith(".matrix") for name in names)


def test_mhcs_matrix_makes_logits_of_size_one_from_a_normalized_state():
    for width in (32, 128):
        rule = fresh_model("mhc", hidden_size=width).model.layers[0].attn_residual
        std = rule.matrix.detach().std().item() * rule.matrix.shape[1] ** 0.5
        assert std == pytest.approx(1, abs=0.05)


def test_gpas_has_one_gate_per_block_used_after_both_sublayers():
    model, ids = fresh_model("gpas"), tokens()
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("gate")]
    assert len(gates) == len(model.model.layers)
    layer, x = model.model.layers[0], torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.residual.gate.fill_(0.7)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        positions = model.model.rotary_emb(x, torch.arange(3)[None])
        kept = 1 - 0.7 / (1 + math.exp(-0.7))
        assert torch.allclose(layer(x, position_embeddings=positions), kept**2 * x, rtol=1e-5)
    assert model(ids).logits.isfinite().all()


def test_b2ts_block_matrices_start_smaller_by_the_root_of_the_depth():
    b2t, plain = (fresh_model(name, num_hidden_layers=4).state_dict() for name in ("b2t", "post_rmsnorm"))
    for name, tensor in plain.items():
        if tensor.dim() == 2:
            assert torch.allclose(b2t[name], tensor / 2 if "layers" in name else tensor, rtol=1e-5), name


@pytest.mark.parametrize("scheme", ["hybridnorm", "hybridnorm_star"])
def test_hybridnorms_output_matrices_start_smaller_by_the_root_of_twice_the_depth(scheme):
    """`init_fn: full_megatron` of its code's configurations."""
    hybrid, plain = (fresh_model(name, num_hidden_layers=8).state_dict() for name in (scheme, "pre_rmsnorm"))
    for name, tensor in plain.items():
        if tensor.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert torch.allclose(hybrid[name], tensor / 4 if writes else tensor, rtol=1e-5), name


@pytest.mark.parametrize("streams", [1, 4])
def test_hyper_connections_output_matrices_start_smaller_by_the_root_of_the_number_of_streams(streams):
    """Section 4, "Implementation": so the sum of the streams is nearer to the size of Pre-LN's one."""
    hyper, plain = (fresh_model(name, streams=streams).state_dict() for name in ("hyper_connections", "pre_rmsnorm"))
    for name, tensor in plain.items():
        if tensor.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert torch.allclose(hyper[name], tensor / streams**0.5 if writes else tensor, rtol=1e-5), name


def test_minimax_starts_as_deepnorm_does():
    """The report, section 4.2: Xavier's rule for all matrices, times (8L)^(-1/4) in values, outputs and MLP."""
    minimax, deepnorm = (fresh_model(name, **WIDE) for name in ("minimax", "deepnorm"))
    v = minimax.model.layers[0].self_attn.v_proj.weight
    assert v.std().item() == pytest.approx((8 * 3) ** -0.25 * math.sqrt(2 / sum(v.shape)), rel=0.1)
    for layer, same in zip(minimax.model.layers, deepnorm.model.layers, strict=True):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            assert_bits(layer.get_submodule(name).weight, same.get_submodule(name).weight)


def test_nanochats_scalars_start_by_depth():
    """Its code: the stream's factor falls from 1.15 in the first layer to 1.05 in the last, the embedding's from 0.2 to
    0.05."""
    rules = [layer.attn_residual for layer in fresh_model("nanochat", num_hidden_layers=3).model.layers]
    assert [rule.keep.item() for rule in rules] == pytest.approx([1.15, 1.10, 1.05])
    assert [rule.embedding.item() for rule in rules] == pytest.approx([0.2, 0.125, 0.05])


def test_a_residual_gate_starts_half_open():
    """s = sigmoid(0) = 1/2 in every channel, so the stream keeps sqrt(3/4) of itself. Muse Spark draws around 0."""
    for layer in fresh_model("residual_gate").model.layers:
        for rule in (layer.attn_residual, layer.mlp_residual):
            one = torch.ones(rule.gate.numel())
            joined = (rule.join(x, f, lambda y: y, one) for x, f in ((one, 0 * one), (0 * one, one)))
            assert [y.mean().item() for y in joined] == pytest.approx([math.sqrt(3 / 4), 1 / 2])


def test_beams_weights_are_those_of_its_code():
    beam = pytest.importorskip("transformers.models.beam.modeling_beam", reason="transformers 5.24 and newer")
    x, f = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).unbind(0)
    for place, layer in enumerate(fresh_model("beam").model.layers):
        for rule, count in ((layer.attn_residual, 2 * (place + 1)), (layer.mlp_residual, 2 * (place + 1) + 1)):
            assert torch.allclose(rule.join(x, f, lambda y: y, x), beam.depth_scaled_residual_add(f, x, count))


def test_residual_mixing_keeps_the_squares_sum_and_stays_below_one():
    """marin#8860: b = softplus(0) = log 2 over the number of blocks, one for both sums of a block, capped below L."""
    for layer in fresh_model("residual_mix").model.layers:
        one = torch.ones(1)
        keep, add = (layer.residual.join(*pair, lambda y: y, one).item() for pair in ((one, 0 * one), (0 * one, one)))
        assert (keep**2, add**2) == pytest.approx((1 - math.log(2) / 3, math.log(2) / 3))
        with torch.no_grad():
            layer.residual.logit.fill_(50.0)
        joined = layer.residual.join(one, 0 * one, lambda y: y, one)
        assert joined.item() == pytest.approx(0.001**0.5, rel=1e-3)
        assert torch.autograd.grad(joined, layer.residual.logit)[0].isfinite()


def test_every_matrix_that_no_rule_sets_starts_at_the_configurations_spread():
    for scheme in ("pre_rmsnorm", "bhyt", "gatednorm"):
        narrow, wide = (fresh_model(scheme, initializer_range=std).state_dict() for std in (0.02, 0.06))
        for name, tensor in narrow.items():
            if tensor.dim() == 2 and tensor.any():
                assert torch.allclose(wide[name], 3 * tensor, rtol=1e-5), (scheme, name)


def test_completeps_scores_are_divided_by_the_heads_width():
    model = fresh_model("complete_p", num_hidden_layers=6)
    assert {layer.self_attn.scaling for layer in model.model.layers} == {1 / 8}
    assert {rule.add for layer in model.model.layers for rule in (layer.attn_residual, layer.mlp_residual)} == {2 / 6}
    assert fresh_model("pre_rmsnorm").model.layers[0].self_attn.scaling == pytest.approx(8**-0.5)


def test_fixups_head_starts_at_zero_and_its_branches_inputs_by_depth():
    """Starts of 1901.09321. The head and the last layer of each branch are 0.

    The m - 1 others are times n^(-1/(2m-2)): n^(-1/6) for q, k and v. A scalar bias of 0 comes before each matrix and
    each activation. There is no norm.
    """
    model = fresh_model("fixup", num_hidden_layers=5, **WIDE)
    assert not model.lm_head.weight.any() and model.model.embed_tokens.weight.any()
    assert not model(tokens()).logits.any()
    branches = 2 * 5
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert not attention.o_proj.weight.any() and not mlp.down_proj.weight.any()
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            assert linear.weight.std().item() == pytest.approx(64**-0.5 * branches ** (-1 / 6), rel=0.1)
        for linear in (mlp.gate_proj, mlp.up_proj):  # two of three: their product carries n^(-1/2)
            assert linear.weight.std().item() == pytest.approx(64**-0.5 * branches ** (-1 / 4), rel=0.1)
    shifts = [tensor for name, tensor in model.named_parameters() if name.endswith("shift")]
    # before q, k, v; before o; before gate and up; before the activation and before down; before the head
    assert sum(shift.numel() for shift in shifts) == 5 * (1 + 1 + 1 + 2) + 1 and not torch.cat(shifts).any()
    assert isinstance(model.model.norm, NoNorm)


def test_a_head_that_is_the_embeddings_starts_as_they_do():
    tied, plain = (fresh_model(name, tie_word_embeddings=True) for name in ("fixup", "pre_rmsnorm"))
    assert_bits(tied.lm_head.weight, plain.model.embed_tokens.weight)
