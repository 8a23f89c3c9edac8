"""Models in training: compilation, checkpointing, half precision, autocast, any depth."""

import pytest
import torch
from model_helpers import (
    assert_bits,
    assert_near,
    every_case,
    every_registered,
    every_scheme,
    fresh_model,
    gradients,
    lively,
    tiny_config,
    tiny_model,
    tokens,
)
from transformers import AutoModelForCausalLM

from normlab import SCHEMES, NormlabForCausalLM


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rounding_of(gradient: torch.Tensor) -> float:
    """A scalar's gradient (lambda, alpha) sums hundreds of terms of either sign, in the order the compiler chose."""
    return 1e-4 if gradient.numel() > 1 else 2e-3


# Tracing takes seconds: this always, the others when asked for.
TRACED = [("bhyt", {"carried": "causal"}, "aot_eager")]
SLOW = [(name, {}, "aot_eager") for name in SCHEMES] + [(name, {}, "inductor") for name in ("pre_rmsnorm", "bhyt")]


@pytest.mark.parametrize(
    ("scheme", "extra", "backend"), [*TRACED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_training_step_compiles_as_one_graph_to_the_same_gradients(scheme, extra, backend, fresh_compiler):
    depth = 2 if SCHEMES[scheme].first_layout else 1  # a block of each kind
    model, ids = tiny_model(scheme, num_hidden_layers=depth, **extra), tokens(1, 8)
    loss = model(ids, labels=ids, use_cache=False).loss
    expected = gradients(model, loss)
    result = torch.compile(model, fullgraph=True, backend=backend)(ids, labels=ids, use_cache=False)
    assert_near(result.loss, loss, 1e-5 if backend == "inductor" else 1e-6)
    for name, gradient in gradients(model, result.loss).items():
        assert_near(gradient, expected[name], rounding_of(gradient), name)


def test_a_compiled_model_sees_a_refreshed_c_and_a_changed_lambda(fresh_compiler):
    model, ids = tiny_model("bhyt", num_hidden_layers=1), tokens(1, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = compiled(ids, use_cache=False).logits
        model.refresh_carried()
        model.model.layers[0].input_layernorm.lam.mul_(1.5)
        after = compiled(ids, use_cache=False).logits
        assert_near(after, model(ids, use_cache=False).logits, 1e-6)
    assert (after - before).abs().max() > 1e-3


@every_registered
def test_gradient_checkpointing_gives_the_same_gradients(scheme, extra):
    model, ids = tiny_model(scheme, **extra).train(), tokens()
    plain = model(ids, labels=ids).loss
    plain.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    runs = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    for reentrant in (False, True) if scheme == "bhyt" else (False,):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        runs.clear()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert len(runs) == 2, "the block ran once: nothing was checkpointed"
        assert_bits(loss, plain)
        for name, parameter in model.named_parameters():
            assert_bits(parameter.grad, expected[name], name)


@every_case
def test_bf16_forward_and_backward_are_finite_and_close(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens()
    expected = model(ids, labels=ids)
    half = tiny_model(scheme, **extra).bfloat16()
    result = half(ids, labels=ids)
    assert result.logits.dtype == torch.bfloat16
    assert_near(result.logits, expected.logits, 0.1)
    theirs = gradients(model, expected.loss)
    for name, gradient in gradients(half, result.loss).items():
        assert gradient.dtype == torch.bfloat16 and torch.isfinite(gradient).all(), name
        likeness = torch.cosine_similarity(gradient.float().flatten(), theirs[name].flatten(), dim=0)
        assert likeness > 0.9, name


@every_case
def test_mixed_precision_is_finite_and_keeps_float32_gradients(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens()
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert_near(loss, expected, 0.02)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32 and torch.isfinite(gradient).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["nanochat", "residual_gate", "osp_rmsnorm"])
def test_fixed_gains_and_drawn_projections_have_half_precision(scheme, dtype):
    model, ids = tiny_model(scheme), tokens()
    with torch.no_grad():
        expected = model(ids).logits
        assert_near(model.to(dtype)(ids).logits, expected, 0.05)
        assert AutoModelForCausalLM.from_config(model.config, dtype=dtype)(ids).logits.dtype == dtype


@pytest.mark.parametrize("scheme", ["hyper_connections", "mhc", "attn_residuals", "deep_delta"])
def test_autocast_does_not_round_what_a_residual_rule_computes(scheme):
    block = tiny_model(scheme).model.layers[1]
    for rule in (block.attn_residual, block.mlp_residual):
        state = torch.randn(2, 32 * getattr(rule, "values", getattr(rule, "streams", 1)))
        branch, read = torch.randn(2, 32), torch.randn(2, 32)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = rule.enter(state), rule.join(state, branch, lambda x: x, read)
        with torch.no_grad():
            expected = rule.enter(state), rule.join(state, branch, lambda x: x, read)
        for result, exact in zip(found, expected, strict=True):
            assert_bits(result, exact)


@every_scheme
def test_evaluation_and_training_mode_compute_the_same(scheme):
    """A norm that behaved otherwise in training could not be measured in evaluation."""
    model, ids = tiny_model(scheme), tokens()
    assert_bits(model.train()(ids, use_cache=False).logits, model.eval()(ids, use_cache=False).logits)


NARROW = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 11,
}


@every_scheme
@pytest.mark.parametrize("depth", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_any_depth_runs_and_is_finite(scheme, depth):
    torch.manual_seed(0)
    model = NormlabForCausalLM(tiny_config(scheme, **{**NARROW, "num_hidden_layers": depth}))
    ids = tokens(1, 5, vocab=11)
    loss = model(ids, labels=ids).loss
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model, loss).values())


@every_case
def test_hidden_states_and_attentions_are_reported_for_every_block(scheme, extra):
    model, ids = tiny_model(scheme, attn_implementation="eager", **extra), tokens(1, 6)
    result = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(result.hidden_states) == 4 and len(result.attentions) == 3
    blocks = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda block, args, output: blocks.append(output))
    model(ids)
    for reported, returned in zip(result.hidden_states[1:3], blocks[:2], strict=True):
        assert_bits(reported, returned)
    assert all(isinstance(output, torch.Tensor) for output in blocks), "a block returns a tensor"


def test_an_untied_and_a_tied_head_differ_in_one_matrix():
    tied = lively(fresh_model("bhyt", tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = fresh_model("bhyt", tie_word_embeddings=False)
    assert set(dict(untied.named_parameters())) - set(dict(tied.named_parameters())) == {"lm_head.weight"}


@pytest.mark.parametrize("scheme", ["ngpt", "keel", "residual_dual"])
def test_padding_on_the_left_gives_finite_gradients(scheme):
    model, ids = fresh_model(scheme, num_hidden_layers=8).train(), tokens()
    ids[0, :3] = 0
    model(ids, attention_mask=(ids != 0).long(), labels=ids.masked_fill(ids == 0, -100)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or bool(parameter.grad.abs().lt(1e3).all()), name
