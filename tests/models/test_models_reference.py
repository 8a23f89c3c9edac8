"""Every scheme against an independent float64 model, no parameter at its default: logits, hidden states, gradients."""

import pytest
import torch
from model_helpers import CASES, FIELD, assert_near, gradients, tiny_model, tokens
from reference_model import as_float64, next_token_loss
from reference_schemes import reference

from normlab.schemes import STUDIED

OPTIONS = [
    *(("gpas", {"qk_norm": kind}) for kind in ("l2", "rms_head", "rms_width")),
    ("gpas", {"affine_attention": True}),
    pytest.param("deepnorm", {"affine_attention": True}, marks=pytest.mark.slow),
    ("block_attn_residuals", {"num_hidden_layers": 10}),
]


@pytest.mark.parametrize(("scheme", "extra"), [*CASES, *((name, {}) for name in FIELD), *OPTIONS])
def test_logits_hidden_states_and_gradients_follow_the_formula(scheme, extra):
    of_values, of_gradients = (2e-5, 1e-4) if scheme in STUDIED else (5e-5, 1e-3)
    model, ids = tiny_model(scheme, **extra), tokens()
    state = as_float64(model.state_dict(), grad=True)
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    wanted = reference(model.config, state, ids)
    got = model(ids, labels=ids, output_hidden_states=True)
    assert_near(got.logits, wanted.logits, of_values, "logits")
    assert wanted.hidden or scheme in FIELD
    for layer, theirs in enumerate(wanted.hidden):
        assert_near(got.hidden_states[layer], theirs, of_values, f"input of block {layer + 1}")
    ours = gradients(model, got.loss)
    targets = torch.autograd.grad(next_token_loss(wanted.logits, ids), [state[name] for name in ours])
    for (name, gradient), target in zip(ours.items(), targets, strict=True):
        assert target.abs().max() > 1e-8, f"{name} has no gradient to compare"
        cancels = scheme in FIELD and (gradient.numel() == 1 or "affine_attention" in extra)
        assert_near(gradient, target, 5 * of_gradients if cancels else of_gradients, name)


@pytest.mark.parametrize("layers", [1, 2, 6, 7, 10, 15])
def test_mix_ln_puts_post_ln_in_a_quarter_of_the_blocks_and_in_at_least_one(layers):
    model, ids = tiny_model("mix_ln", num_hidden_layers=layers, num_attention_heads=2), tokens(1, 6)
    post = [hasattr(layer, "post_feedforward_layernorm") for layer in model.model.layers]
    assert post == [index < {1: 1, 2: 1, 6: 1, 7: 1, 10: 2, 15: 3}[layers] for index in range(layers)]
    expected = reference(model.config, as_float64(model.state_dict()), ids).logits
    assert_near(model(ids).logits, expected, 2e-5)
