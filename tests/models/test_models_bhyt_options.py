"""BHyT's own options: which blocks reduce again, which are bounded at all, and kappa by depth."""

from __future__ import annotations

import pytest
import torch
from model_helpers import assert_bits, assert_near, fresh_model, tiny_config, tiny_model, tokens

from normlab import NormlabError
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
    "fields", [{"exact_layers": [4]}, {"bounded_layers": [0, 2]}, {"bounded_layers": [2]}, {"kappa_schedule": "cube"}]
)
def test_options_out_of_range_are_refused_in_one_line(fields):
    with pytest.raises(NormlabError) as caught:
        tiny_config("bhyt", **fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
