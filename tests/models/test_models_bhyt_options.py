"""BHyT's options: blocks that reduce again, bounded blocks, kappa by depth, corrections of the carried statistic."""

import pytest
import torch
from model_helpers import LLAMA, assert_bits, assert_near, fresh_model, tiny_config, tiny_model, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from normlab import NormlabConfig, NormlabError, NormlabForCausalLM, swap_norms
from normlab.analysis import theory
from normlab.norms import BHyT, RMSNorm


def test_blocks_that_reduce_again_are_those_of_the_exact_statistic():
    mixed, carried, ids = tiny_model("bhyt", exact_layers=[2]), tiny_model("bhyt"), tokens()
    exact = tiny_model("bhyt_exact")
    exact.load_state_dict(carried.state_dict(), strict=False)
    mixed.load_state_dict(carried.state_dict(), strict=False)
    assert [hasattr(layer, "c_attn") for layer in mixed.model.layers] == [True, False, True]
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    positions = mixed.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad():
        for layer, same, other in ((0, carried, exact), (1, exact, carried), (2, carried, exact)):
            got = mixed.model.layers[layer](x, position_embeddings=positions)
            assert_bits(got, same.model.layers[layer](x, position_embeddings=positions))
            assert (got - other.model.layers[layer](x, position_embeddings=positions)).abs().max() > 1e-4
        all_exact = tiny_model("bhyt", exact_layers=[1, 2, 3])
        all_exact.load_state_dict(exact.state_dict())
        assert_bits(all_exact(ids).logits, exact(ids).logits)


def test_blocks_outside_the_range_have_rmsnorm():
    model = fresh_model("bhyt", num_hidden_layers=5, bounded_layers=[2, 3])
    found = [(type(layer.input_layernorm), type(layer.post_attention_layernorm)) for layer in model.model.layers]
    assert found == [(kind, kind) for kind in (RMSNorm, BHyT, BHyT, RMSNorm, RMSNorm)]
    assert [hasattr(layer, "c_attn") for layer in model.model.layers] == [False, True, True, False, False]
    model.refresh_carried()
    assert torch.isfinite(model(tokens()).logits).all()


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1]),
        ("inverse_sqrt", [1, 2**-0.5, 3**-0.5]),
        ("sqrt", [1, 2**0.5, 3**0.5]),
        ("fourth_root", [1, 2**0.25, 3**0.25]),
    ],
)
def test_kappa_follows_its_schedule_in_the_map_and_in_the_correction(schedule, factors):
    model = fresh_model("bhyt", kappa=4.0, lam_input=2.0, lam_last=1.4, kappa_schedule=schedule)
    x, ms = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)), torch.full((1, 1, 1), 0.3)
    for layer, factor in zip(model.model.layers, factors, strict=True):
        norm = layer.input_layernorm
        expected = torch.tanh(2.0 / (4.0 * factor) * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
        with torch.no_grad():
            assert_near(norm(x), expected, 1e-5)
            carried = 0.3 + layer.c_attn * (2.0 / (4.0 * factor)) ** 2
            assert_near(layer.carried_mean_square(ms, None), carried.expand(1, 1, 1), 1e-6)
    assert model.model.norm.kappa == 4.0


def test_theory_takes_the_options():
    base, options = {"num_hidden_layers": 4}, {"exact_layers": [1], "kappa_schedule": "sqrt", "bounded_layers": [1, 3]}
    sites = theory.predict(tiny_config("bhyt", **base, **options)).query("metric == 'carried_var_ratio'")["layer"]
    assert set(sites) == {2, 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"exact_layers": [4]},
        {"bounded_layers": [0, 2]},
        {"bounded_layers": [2]},
        {"kappa_schedule": "cube"},
        {"correction": "gamma"},
        {"calibration": [1.0, 2.0]},
        {"calibration": [1.0, 0.0, 1.0]},
        {"calibration": 2.0},
        {"calibration": ["a", 1.0, 1.0]},
        {"exact_layers": 1},
        {"exact_layers": [1.5]},
        {"exact_layers": ["1"]},
        {"bounded_layers": [3, 1]},
        {"bounded_layers": "12"},
    ],
)
def test_options_out_of_range_are_refused_in_one_line(fields):
    with pytest.raises(NormlabError) as caught:
        tiny_config("bhyt", **fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


STARTS = {
    "beta": {"var_beta": 1.0},
    "eta": {"var_eta": 0.0},
    "residual_aware": {"var_alpha": 1.0, "var_cross_beta": 0.0},
}


@pytest.mark.parametrize("carried", ["uniform", "causal"])
@pytest.mark.parametrize("kind", STARTS)
def test_a_learned_correction_starts_as_plain_bhyt_bit_for_bit(kind, carried):
    """eta replaces the correction: it starts as the statistic carried over as it is."""
    plain, ids = tiny_model("bhyt", carried=carried), tokens()
    learned = fresh_model("bhyt", carried=carried, correction=kind)
    added = learned.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert sorted(added) == sorted(f"model.layers.{i}.{name}" for i in range(3) for name in STARTS[kind])
    for name, start in STARTS[kind].items():
        assert all(getattr(layer, name).item() == start for layer in learned.model.layers)
    assert not set(added) & set(learned.decay_parameter_names())
    with torch.no_grad():
        if kind == "eta":
            assert (learned(ids).logits - plain(ids).logits).abs().max() > 1e-3
            for layer in plain.model.layers:
                layer.c_attn.zero_()
        assert_bits(learned(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("kind", STARTS)
def test_a_learned_correction_is_saved_and_starts_anew_where_weights_lack_it(kind, tmp_path):
    model, plain, ids = tiny_model("bhyt", correction=kind), tiny_model("bhyt"), tokens()
    model.save_pretrained(tmp_path / "learned")
    assert_bits(NormlabForCausalLM.from_pretrained(tmp_path / "learned").eval()(ids).logits, model(ids).logits)
    plain.save_pretrained(tmp_path / "plain")
    config = tiny_config("bhyt", correction=kind)
    loaded = NormlabForCausalLM.from_pretrained(tmp_path / "plain", config=config)
    for name, start in STARTS[kind].items():
        assert all(getattr(layer, name).item() == start for layer in loaded.model.layers)


def test_factors_of_one_change_no_bit_and_others_multiply_the_statistic():
    plain, ones, ids = tiny_model("bhyt"), tiny_model("bhyt", calibration=[1.0, 1.0, 1.0]), tokens()
    assert_bits(ones(ids).logits, plain(ids).logits)
    doubled, ms = tiny_model("bhyt", calibration=[1.0, 2.0, 1.0]), torch.full((1, 1, 1), 0.3)
    for layer, own, factor in zip(plain.model.layers, doubled.model.layers, (1, 2, 1), strict=True):
        assert_bits(own.carried_mean_square(ms, None), factor * layer.carried_mean_square(ms, None))


def test_theory_takes_corrections_and_calibration():
    def ratio(**fields):
        table = theory.predict(tiny_config("bhyt", num_hidden_layers=1, **fields))
        return table[table["metric"] == "carried_var_ratio"]["value"].to_numpy()

    plain = ratio()
    assert (ratio(correction="beta") == plain).all() and (ratio(calibration=[2.0]) == plain / 2).all()
    assert (ratio(correction="eta") > plain).all()


def test_a_release_with_options_is_read_as_ours_and_what_is_not_ours_is_refused():
    released = {**LlamaConfig(num_hidden_layers=4).to_dict(), "norm_type": "bhytline", "seq_len": 32}
    theirs = {"bhyt_kappa_schedule": "mild_grow", "var_approx_method": "residual_aware", "bhyt_layer_range": [0, 2]}
    theirs |= {"var_approx_calibration": [0.5, 2.0], "var_approx_exact_layers": 1, "var_approx_exact_layer_list": "2"}
    config = NormlabConfig.from_released(released | theirs)
    ours = {"kappa_schedule": "fourth_root", "correction": "residual_aware", "bounded_layers": [1, 3]}
    ours |= {"calibration": [0.5, 2.0, 1.0, 1.0], "exact_layers": [1, 3]}
    assert {name: getattr(config, name) for name in ours} == ours
    for field, words in (({"use_gamma_var": True}, "gamma"), ({"fallback_norm_type": "dyt"}, "outside its range")):
        with pytest.raises(NormlabError, match=words):
            NormlabConfig.from_released(released | theirs | field)


def test_an_existing_model_is_given_a_learned_correction_in_its_own_precision():
    fields = {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"}
    model = swap_norms(LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16), "bhyt", correction="beta")
    for layer in model.model.layers:
        assert layer.var_beta.dtype == torch.bfloat16 and layer.c_attn.dtype == torch.float32
    model(tokens(), labels=tokens()).loss.backward()
    assert all(layer.var_beta.grad is not None for layer in model.model.layers)


def test_a_pass_in_inference_mode_leaves_nothing_that_a_backward_pass_cannot_use():
    model, ids = tiny_model("bhyt", correction="beta"), tokens()
    with torch.inference_mode():
        expected = model(ids).logits.clone()
    model(ids, labels=ids).loss.backward()
    assert_bits(model(ids).logits, expected)


@pytest.mark.parametrize("fields", [{"kappa_schedule": "inverse_sqrt", "gamma0": 0.5}, {"bounded_layers": (2, 2)}])
def test_the_gain_control_starts_as_bhyt_does_for_small_inputs(fields):
    """In every block, by the schedule of kappa and where there is no tanh."""
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))  # lambda is small, so z is
    bounded, control = (
        fresh_model(scheme, lam_input=0.01, lam_post=0.01, **fields) for scheme in ("bhyt_exact", "rmsnorm_gain")
    )
    for ours, theirs in zip(control.model.layers, bounded.model.layers, strict=True):
        with torch.no_grad():
            assert torch.allclose(ours.input_layernorm(x), theirs.input_layernorm(x), rtol=1e-3, atol=0)
