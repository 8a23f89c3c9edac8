"""Schemes that start as another scheme, or at a formula that is known."""

import copy
import re

import pytest
import torch
from model_helpers import assert_bits, assert_near, fresh_model, optimizer_of, tokens


def same_function(scheme: str, other: str, change, relative: float = 1e-5, **fields) -> None:
    """`scheme`, after change(name, tensor) to its tensors, has the logits of `other` with the same shared tensors."""
    model, plain, ids = fresh_model(scheme, **fields), fresh_model(other, **fields), tokens()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            change(name, tensor)
        own = plain.state_dict()
        shared = {n: t for n, t in model.state_dict().items() if n in own and t.shape == own[n].shape}
        plain.load_state_dict(shared, strict=False)
        assert_near(model(ids).logits, plain(ids).logits, relative)


def keep(name, tensor):
    """Everything as it starts."""


def setting(ending: str, value: float):
    return lambda name, tensor: tensor.fill_(value) if name.endswith(ending) else None


@pytest.mark.parametrize("scheme", ["prores", "skip_init", "fixup"])
def test_a_scheme_whose_branches_start_at_zero_leaves_the_embeddings(scheme):
    hidden = fresh_model(scheme)(tokens(), output_hidden_states=True).hidden_states
    assert_bits(hidden[2], hidden[0])


def test_streams_start_as_pre_ln_whose_sublayers_read_one_stream_and_write_all():
    model = fresh_model("mhc")
    x = torch.randn(1, 2, 32 * 4, generator=torch.Generator().manual_seed(0))
    rules = [getattr(layer, f"{part}_residual") for layer in model.model.layers for part in ("attn", "mlp")]
    for index, rule in enumerate(rules):
        read, (write, mix) = rule.read_weights(x), rule(x)
        assert (read - torch.eye(4)[index % 4]).abs().max() < 0.03
        assert (write - 1).abs().max() < 0.03
        assert (mix - torch.eye(4)).abs().max() < 0.06
        assert_near(mix.sum(-1), torch.ones(1, 2, 4), 1e-6)  # the last of Sinkhorn's steps
        assert_near(mix.sum(-2), torch.ones(1, 2, 4), 1e-3)
    same_function("mhc", "pre_rmsnorm", keep, 0.02, rms_norm_eps=1e-12)
    same_function("mhc", "pre_rmsnorm", setting("residual.factor", 0.0), 1e-5, rms_norm_eps=1e-12)


def test_deep_deltas_step_moves_the_streams_share_of_a_direction_to_a_value():
    rule, draw = fresh_model("deep_delta").model.layers[0].mlp_residual, torch.Generator().manual_seed(0)
    x, f = torch.randn(2, 3, 32, generator=draw), torch.randn(2, 3, 32, generator=draw)
    k = f / f.norm(dim=-1, keepdim=True)
    with torch.no_grad():  # beta = 1, v = 2 at the start
        moved = rule.join(x, f, lambda total: total, x)
        assert_near((moved * k).sum(-1), torch.full((2, 3), 2.0), 1e-5)
        across = x - (x * k).sum(-1, keepdim=True) * k
        assert_near(moved - 2 * k, across, 1e-5)
        rule.step_bias.fill_(-100.0)
        assert_bits(rule.join(x, f, lambda total: total, x), x)


def test_what_streams_are_read_and_mixed_by_can_move_from_its_start():
    """Logits of 8 start so near to 0 and 1 that their slopes are below 0.001."""
    rule = fresh_model("mhc").model.layers[0].mlp_residual
    x = torch.randn(1, 1, 32 * 4, generator=torch.Generator().manual_seed(0))
    for value in (rule.read_weights(x)[..., 0].sum(), rule(x)[1][..., 0, 1].sum()):
        assert torch.autograd.grad(value, rule.bias)[0].abs().max() > 0.01


@pytest.mark.parametrize("scheme", ["gpas", "hyper_connections", "scalenorm", "seednorm", "tapernorm"])
def test_a_scheme_that_starts_as_pre_ln(scheme):
    same_function(scheme, "pre_rmsnorm", keep, rms_norm_eps=1e-12 if scheme == "hyper_connections" else 3e-5)


def test_pre_ln_without_gains_is_pre_ln_at_the_start_and_trains_none():
    same_function("pre_rmsnorm_fixed", "pre_rmsnorm", keep)
    assert all(tensor.dim() == 2 for tensor in fresh_model("pre_rmsnorm_fixed").parameters())


def test_a_layer_scalar_starts_as_peri_ln_and_scales_what_a_block_gives():
    same_function("layer_scalar", "peri_ln", keep, 1e-6)
    model, ids = fresh_model("layer_scalar"), tokens()
    before = model(ids, output_hidden_states=True).hidden_states[1]
    with torch.no_grad():
        model.model.layers[0].mlp_residual.scale.fill_(0.5)
    assert_bits(model(ids, output_hidden_states=True).hidden_states[1], 0.5 * before)


def test_a_looped_model_is_pre_ln_whose_blocks_share_their_matrices(tmp_path):
    same_function("looped", "pre_rmsnorm", keep)
    model, ids = fresh_model("looped"), tokens()
    plain = fresh_model("pre_rmsnorm").state_dict()
    for name, tensor in model.state_dict().items():  # the first block's, as drawn in any scheme
        first = re.sub(r"layers\.\d+", "layers.0", name)
        assert_bits(tensor, plain[first if tensor.dim() == 2 else name], name)
    model.train()(ids, labels=ids).loss.backward()
    optimizer_of(model, 1e-2).step()
    model.save_pretrained(tmp_path)
    for trained in (model, copy.deepcopy(model), type(model).from_pretrained(tmp_path)):
        first, *later = (layer.state_dict() for layer in trained.model.layers)
        for block in later:
            for name, tensor in block.items():
                assert torch.equal(tensor, first[name]) == ("norm" not in name), name
        assert len(list(trained.parameters())) == 1 + 7 + 2 * 3 + 2  # embeddings, a block, norms, final norm and head
        assert_bits(trained.eval()(ids).logits, model.eval()(ids).logits)


def test_a_gatednorm_starts_as_half_of_rmsnorm():
    model, plain, ids = fresh_model("gatednorm"), fresh_model("pre_rmsnorm"), tokens()
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            if name.endswith("norm.weight"):
                tensor.fill_(0.5)
        assert_near(model(ids).logits, plain(ids).logits, 1e-5)


def test_depth_attention_starts_as_the_mean_of_all_that_was_written():
    model, ids, read = fresh_model("attn_residuals"), tokens(), []
    model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(lambda norm, args: read.append(args[0]))
    state = model(ids, output_hidden_states=True).hidden_states[1]
    assert_near(read[0], state.unflatten(-1, (3, 32))[..., :2, :].mean(-2), 1e-6)
