"""``pre_rmsnorm`` is stock Llama, bit for bit; released checkpoints' parameter names load as they are."""

import pytest
import torch
from model_helpers import (
    LLAMA,
    assert_bits,
    every_scheme,
    fresh_model,
    gradients,
    lively,
    tiny_model,
    tokens,
)
from transformers import LlamaConfig, LlamaForCausalLM

from normlab import SCHEMES, NormlabConfig, NormlabForCausalLM

SHAPES = {
    "grouped_query": {"num_key_value_heads": 2},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "eager": {"attn_implementation": "eager"},
    "own_head_dim": {"head_dim": 16},
}


def pair(dtype: torch.dtype = torch.float32, **fields) -> tuple[LlamaForCausalLM, NormlabForCausalLM]:
    """Stock Llama and ours with the same weights, no norm at 1 and no bias at 0."""
    torch.manual_seed(0)
    stock = lively(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **fields}))).to(dtype).eval()
    ours = NormlabForCausalLM(NormlabConfig(scheme="pre_rmsnorm", **{**LLAMA, **fields})).to(dtype).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_hidden_states_and_gradients_equal_stock_llama_bit_for_bit(shape, dtype):
    (stock, ours), ids = pair(dtype, **SHAPES[shape]), tokens()
    theirs, mine = (model(ids, labels=ids, output_hidden_states=True) for model in (stock, ours))
    assert_bits(mine.logits, theirs.logits, "logits")
    assert_bits(mine.loss, theirs.loss, "loss")
    for left, right in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        assert_bits(left, right, "hidden state")
    expected = gradients(stock, theirs.loss)
    got = gradients(ours, mine.loss)
    assert list(got) == list(expected)
    for name, gradient in got.items():
        assert_bits(gradient, expected[name], name)


def test_padding_cache_and_generation_equal_stock_llama_bit_for_bit():
    (stock, ours), ids = pair(), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert_bits(ours(ids, attention_mask=mask).logits, stock(ids, attention_mask=mask).logits)
    for fields in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 3}):
        written = []
        for model in (stock, ours):
            torch.manual_seed(3)
            written.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, **fields))
        assert_bits(written[1], written[0])


@every_scheme
@pytest.mark.parametrize("seed", [0, 7])
def test_one_seed_starts_every_shared_tensor_where_stock_llama_starts_it(scheme, seed):
    torch.manual_seed(seed)
    stock = LlamaForCausalLM(LlamaConfig(**LLAMA)).state_dict()
    for name, tensor in fresh_model(scheme, seed=seed).state_dict().items():
        scaled = SCHEMES[scheme].init and name.endswith(("o_proj.weight", "down_proj.weight"))
        if tensor.dim() == 2 and not scaled:
            if "embed_tokens" in name:  # Llama's padding row is 0; ours is what the draw gave
                assert not stock[name][0].any() and 0.01 < tensor[0].std() < 0.03
                stock[name][0] = tensor[0]
            assert_bits(tensor, stock[name], name)
            assert tensor.std() == pytest.approx(0.02, rel=0.15)


def test_one_seed_starts_a_model_with_biases_where_stock_llama_with_biases_starts():
    torch.manual_seed(0)
    stock = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **SHAPES["biases"]})).state_dict()
    for name, tensor in fresh_model("lns", **SHAPES["biases"]).state_dict().items():
        if "embed_tokens" not in name:  # see above
            assert_bits(tensor, stock[name], name)


# Parameters of released checkpoints, by block, beside Llama's matrices.
ATTN, MLP, FFN = "input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
RELEASED_BLOCK = {
    "pre_rmsnorm": [f"{ATTN}.weight", f"{MLP}.weight"],
    "lns": [f"{ATTN}.weight", f"{MLP}.weight"],
    "bhyt": [f"{ATTN}.lam", f"{ATTN}.weight", f"{MLP}.lam", f"{MLP}.weight"],
    "bhyt_exact": [f"{ATTN}.lam", f"{ATTN}.weight", f"{MLP}.lam", f"{MLP}.weight"],
    "dyt": [f"{ATTN}.alpha", f"{ATTN}.weight", f"{MLP}.alpha", f"{MLP}.weight"],
    "post_rmsnorm": [f"{MLP}.weight", f"{FFN}.weight"],
}
RELEASED_TOP = {"dyt": {"model.norm.alpha": (1,), "model.shared_scale": (1,)}}
MATRICES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}


def released_state(scheme: str, layers: int = 4) -> dict[str, torch.Tensor]:
    """A released checkpoint's tensors: names and shapes by hand, values random."""
    shapes = {"model.embed_tokens.weight": (61, 32), "lm_head.weight": (61, 32), "model.norm.weight": (32,)}
    shapes |= RELEASED_TOP.get(scheme, {})
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in MATRICES.items()}
        kind = scheme if scheme != "mix_ln" else "post_rmsnorm" if layer < 1 else "pre_rmsnorm"
        shapes |= {f"{prefix}.{name}": (32,) if name.endswith("weight") else (1,) for name in RELEASED_BLOCK[kind]}
    draw = torch.Generator().manual_seed(5)
    return {name: 0.2 + 0.3 * torch.rand(shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.parametrize("scheme", [*RELEASED_BLOCK, "mix_ln"])
def test_a_released_folder_loads_unrenamed_with_nothing_missing_or_unexpected(scheme, tmp_path):
    from safetensors.torch import save_file

    state, model = released_state(scheme), tiny_model(scheme, num_hidden_layers=4)
    model.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = NormlabForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert {name for name in loaded.state_dict() if not name.endswith("c_attn")} == set(state)
    for name, tensor in state.items():
        assert_bits(loaded.state_dict()[name], tensor, name)
    for layer in loaded.model.layers:
        if layer.carried:
            assert_bits(layer.c_attn, layer.attention_variance_constant())
    assert torch.isfinite(loaded(tokens()).logits).all()
