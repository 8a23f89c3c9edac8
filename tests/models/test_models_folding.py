"""Folding norms into the matrices that read them: the same logits, every bit back, and refusals that change nothing."""

import copy

import pytest
import torch
from model_helpers import (
    LLAMA,
    assert_bits,
    assert_near,
    assert_state,
    every_case,
    lively,
    tiny_config,
    tiny_model,
    tokens,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    LagunaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from normlab import NormlabError, NormlabForCausalLM, record, swap_norms
from normlab.models import fold_norms
from normlab.models.model import is_folded
from normlab.norms import ScaleNorm
from normlab.norms.gain import is_plain_gain

STOCK = {**LLAMA, "head_dim": 8, "tie_word_embeddings": False}
UNFOLDABLE = {"post_rmsnorm": 6, "mix_ln": 2, "peri_ln": 6}  # norms that write into the stream, of 3 blocks


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(tokens(), use_cache=False).logits


@every_case
def test_logits_stay_gains_become_one_and_unfolding_gives_every_bit_back(scheme, extra):
    model = tiny_model(scheme, **extra)
    before, expected = state(model), logits(model)
    tied = bool(extra.get("tie_word_embeddings"))
    stays = (2 if "post_fraction" in extra else 1) * 2 if scheme == "mix_ln" else UNFOLDABLE.get(scheme, 0)
    folded = fold_norms(model, partial=True)
    assert len(folded.left) == stays + tied
    assert_near(logits(model), expected, 1e-5)
    norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    assert set(folded.names) | set(folded.left) == set(norms)
    for name, norm in norms.items():
        assert bool((norm.weight == 1).all()) == (name in folded.names), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state(model).items())
    folded.unfold()
    assert_state(model, before)
    assert_bits(logits(model), expected)


def test_the_gate_of_affine_attention_reads_the_norm_too():
    model = tiny_model("pre_rmsnorm", affine_attention=True)
    expected = logits(model)
    with fold_norms(model) as folded:
        assert not folded.left
        assert_near(logits(model), expected, 1e-5)


def test_one_gain_for_all_channels_is_tried_on_vectors_of_the_norms_width():
    class Strict(ScaleNorm):
        def forward(self, x):
            assert x.shape[-1] == self.hidden_size  # as a kernel does
            return super().forward(x)

    assert is_plain_gain(Strict(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_fold_with_one_rounding_and_come_back(dtype):
    model = tiny_model("bhyt").to(dtype)
    before, expected = state(model), logits(model)
    with fold_norms(model) as folded:
        assert not folded.left
        assert_near(logits(model), expected, {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-12}[dtype])
    assert_state(model, before)


def test_biases_of_readers_take_up_the_norms_bias_and_otherwise_it_stays_divided():
    model = tiny_model("pre_layernorm", attention_bias=True, mlp_bias=True)
    before, expected = state(model), logits(model)
    with fold_norms(model):
        assert_near(logits(model), expected, 1e-5)
        layer = model.model.layers[0]
        assert not layer.input_layernorm.bias.any() and not layer.post_attention_layernorm.bias.any()
        assert_near(model.model.norm.bias, before["model.norm.bias"] / before["model.norm.weight"], 1e-6)
    assert_state(model, before)


def test_a_bias_that_a_zero_gain_cannot_divide_is_refused():
    model = tiny_model("pre_layernorm")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[4] = 0.0
    before = state(model)
    with pytest.raises(NormlabError, match="layers.1.input_layernorm.*gain of 0"):
        fold_norms(model)
    assert_state(model, before)


SWAPPED = "a Llama with BHyT's norms"


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GraniteConfig, SWAPPED])
def test_stock_models_fold_too(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((LlamaConfig if family == SWAPPED else family)(**STOCK))
    model = lively(swap_norms(model, scheme="bhyt", kappa=3.0) if family == SWAPPED else model).eval()
    before, expected = state(model), logits(model)
    with fold_norms(model) as folded:
        assert len(folded.names) == 2 * 3 + 1
        assert_near(logits(model), expected, 1e-5)
    assert_state(model, before)


# What cannot be folded, and what the one line says of it.


def refused(model: nn.Module, match: str) -> None:
    before = state(model)
    with pytest.raises(NormlabError, match=match) as caught:
        fold_norms(model)
    assert "\n" not in str(caught.value)
    assert_state(model, before)
    assert not hasattr(model.config, "norms_folded")


def slightly_gated() -> nn.Module:
    """Nearly a plain gain: the gate hardly depends on it."""
    model = tiny_model("gatednorm")
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            parameter.data.mul_(1e-3)
    return model


def laguna() -> nn.Module:
    kinds = dict(mlp_layer_types=["dense"] * 3, layer_types=["full_attention"] * 3)
    return AutoModelForCausalLM.from_config(LagunaConfig(**STOCK, **kinds, num_attention_heads_per_layer=[4] * 3))


def minimax() -> nn.Module:
    experts = dict(layer_types=["full_attention"] * 3, num_local_experts=2, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(MiniMaxConfig(**STOCK, **experts))


REFUSED = {
    **{scheme: (lambda scheme=scheme: tiny_model(scheme), "residual stream.*partial=True") for scheme in UNFOLDABLE},
    "a tied head": (lambda: tiny_model("bhyt", tie_word_embeddings=True), "cannot fold model.norm: .*tied embeddings"),
    "a gain that is no factor": (lambda: GemmaForCausalLM(GemmaConfig(**STOCK)), "GemmaRMSNorm is not a factor"),
    "a gate of small weights": (lambda: slightly_gated(), "GatedNorm is not a factor"),
    "another architecture": (
        lambda: AutoModelForCausalLM.from_config(Gemma2Config(**STOCK)),
        "Gemma2DecoderLayer, not a block of",
    ),
    "a gate that reads the norm": (laguna, "cannot fold .*input_layernorm: .*self_attn.g_proj may read it too"),
    "a gate that reads a swapped norm": (lambda: swap_norms(laguna(), "lns"), "self_attn.g_proj may read it too"),
    "a stream of norms": (minimax, "cannot fold .*input_layernorm: its output is kept in the residual stream"),
    "no head": (lambda: NormlabForCausalLM(tiny_config("bhyt")).model, "no head that reads it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_folded_is_refused(case):
    build, message = REFUSED[case]
    refused(build().eval(), message)


def test_adapters_are_refused_and_nothing_is_half_folded():
    from peft import LoraConfig, get_peft_model

    inner = tiny_model("bhyt")
    adapted = get_peft_model(inner, LoraConfig(target_modules=["v_proj"], r=2))
    refused(inner, r"layers.0.input_layernorm: .*v_proj is Linear.*and so for 2 more")
    refused(adapted, "no Llama-shaped blocks")


def test_quantized_and_parametrized_matrices_are_refused():
    class EightBit(nn.Linear):
        pass

    model = tiny_model("bhyt")
    model.model.layers[2].mlp.up_proj.__class__ = EightBit
    refused(model, "layers.2.post_attention_layernorm: model.layers.2.mlp.up_proj is EightBit, not a plain nn.Linear")
    model = tiny_model("bhyt")
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    refused(model, "q_proj is ParametrizedLinear")


def test_shared_blocks_are_refused():
    model = tiny_model("pre_rmsnorm")
    model.model.layers[2] = model.model.layers[1]
    refused(model, "layers.1.input_layernorm: .*used elsewhere")


# While it is folded.


def test_training_refreshing_and_folding_again_are_refused_until_it_is_unfolded():
    model = tiny_model("bhyt")
    folded = fold_norms(model)
    with pytest.raises(NormlabError, match="folded already"):
        fold_norms(model)
    with pytest.raises(NormlabError, match="unfold"):
        model.refresh_carried()
    with pytest.raises(NormlabError, match="before training"):
        model.train()(tokens())
    model.eval()
    folded.unfold()
    folded.unfold()
    model.train()(tokens())
    model.refresh_carried()


@pytest.mark.parametrize("config", [tiny_config("bhyt"), LlamaConfig(**LLAMA, tie_word_embeddings=False)])
def test_a_model_made_from_the_same_configuration_is_not_taken_for_folded(config):
    make = NormlabForCausalLM if hasattr(config, "scheme") else LlamaForCausalLM
    model, other = make(config).eval(), make(config)
    readers = [module for module in model.modules() if getattr(module, "config", None) is config]
    assert len(readers) > 3
    with fold_norms(model):
        assert is_folded(model) and not is_folded(other) and not hasattr(config, "norms_folded")
        assert all(module.config is model.config for module in readers)
        other.train()(tokens())
    assert all(module.config is config for module in readers)


def test_the_statistic_carried_keeps_its_constant():
    model = tiny_model("bhyt")
    model.refresh_carried()
    before = [layer.c_attn.clone() for layer in model.model.layers]
    with fold_norms(model):
        for layer, c in zip(model.model.layers, before, strict=True):
            assert_bits(layer.c_attn, c)
            assert (layer.attention_variance_constant() - c).abs() > 1e-3 * c  # it would change, and is left alone


@pytest.mark.parametrize("change", ["step", "cast"])
def test_unfolding_weights_that_changed_meanwhile_is_refused_and_leaves_them(change):
    model = tiny_model("bhyt")
    folded = fold_norms(model)
    if change == "cast":
        model.bfloat16()
    else:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    present = state(model)
    with pytest.raises(NormlabError, match="unfold: "):
        folded.unfold()
    assert_state(model, present)


def test_a_copy_of_a_folded_model_computes_the_same():
    model = tiny_model("bhyt")
    with fold_norms(model):
        assert_bits(logits(copy.deepcopy(model)), logits(model))


@pytest.mark.parametrize("scheme", ["bhyt", "lns", "pre_layernorm"])
def test_saved_while_folded_it_loads_as_it_computes_and_says_so(scheme, tmp_path):
    model = tiny_model(scheme)
    before, expected = state(model), logits(model)
    with fold_norms(model):
        model.save_pretrained(tmp_path)
    loaded, report = NormlabForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_near(logits(loaded.eval()), expected, 1e-5)
    with pytest.raises(NormlabError, match="folded already"):
        fold_norms(loaded)
    with pytest.raises(NormlabError, match="before training"):
        loaded.train()(tokens())
    model.save_pretrained(tmp_path)  # unfolded again: the mark is gone from what is saved
    assert_state(NormlabForCausalLM.from_pretrained(tmp_path), before)
    assert "norms_folded" not in (tmp_path / "config.json").read_text()


def test_nothing_but_a_causal_language_model_is_taken():
    with pytest.raises(NormlabError, match="no Llama-shaped blocks"):
        fold_norms(nn.Linear(2, 2))


def test_nobodys_hooks_see_the_check_of_a_gain():
    model, seen = tiny_model("bhyt"), []
    model.model.norm.register_forward_hook(lambda *call: seen.append(call))
    with record(model, metrics=["token_l2_mean"]), fold_norms(model):
        pass
    assert not seen
