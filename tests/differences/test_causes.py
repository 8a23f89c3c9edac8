"""The first cause that is named is the one that explains what a site holds, in words that fit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from normlab.differences import Difference, causes, diff, write_arrays
from normlab.differences.capture import Site, capture, roles_of
from normlab.differences.causes import Evidence, Side, causes_of
from normlab.models import NormlabConfig, NormlabForCausalLM

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH: dict[str, Any] = {"input_ids": IDS, "use_cache": False}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **SIZES, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.ndim == 2 else 1 + 0.2 * noise)
    return model


def ours(scheme: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    return NormlabForCausalLM(NormlabConfig(scheme=scheme, num_hidden_layers=1, **SIZES, **fields)).eval()


def evidence(a: nn.Module, b: nn.Module, name: str, layer: int = 1) -> Evidence:
    models = [copy.deepcopy(model).double() for model in (a, b)]
    roles = [roles_of(models[0], BATCH)] * 2
    if [name for name, _ in a.named_modules()] != [name for name, _ in b.named_modules()]:
        roles[1] = roles_of(models[1], BATCH)
    sides = [Side(capture(model, BATCH, of), model, BATCH, of) for model, of in zip(models, roles, strict=True)]
    return Evidence(*sides, Site(name, layer), None)


def named(a: nn.Module, b: nn.Module, name: str, layer: int = 1) -> list[str]:
    return [str(cause) for cause in causes_of(evidence(a, b, name, layer))]


def merged_and_unmerged(model: nn.Module) -> None:
    """A LoRA that was merged into the weights and taken out again: they are off by rounding."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self_attn" in name:
                update = torch.randn_like(weight)
                weight.add_(update).sub_(update)


def unscaled(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.0


# --- weights that explain nothing ------------------------------------------------------------------------------------


def _noise(model: Any) -> None:
    merged_and_unmerged(model)
    unscaled(model)


def _zero_biases(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    unscaled(model)


def _tiny_biases(model: Any) -> None:
    _zero_biases(model)
    model.model.layers[0].self_attn.q_proj.bias.data += 1e-9


def _noise_and_base(model: Any) -> None:
    merged_and_unmerged(model)
    model.model.rotary_emb.inv_freq = 3e6 ** (-torch.arange(0, 8, 2) / 8)


def _eps_and_a_bit(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight.data[0] = torch.nextafter(norm.weight.data[0], torch.tensor(9.0))
    norm.variance_epsilon = 1e-3


@pytest.mark.parametrize(
    ("spoil", "site", "first", "rest"),
    [
        (_noise, "attn_out", "another scale of the softmax: none in place of 1/sqrt(d_head)", 4),
        (_zero_biases, "attn_out", "another scale of the softmax: none in place of 1/sqrt(d_head)", 0),
        (_tiny_biases, "attn_out", "another scale of the softmax: none in place of 1/sqrt(d_head)", 1),
        (_noise_and_base, "attn_out", "rotary.inv_freq has another base: a rotary base of about 3e+06 in B", 4),
        (_eps_and_a_bit, "attn_norm_out", "another eps: B's is larger by 0.001 (0.001 in B)", 1),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else None,
)
def test_weights_that_explain_nothing_come_after_the_cause(spoil, site, first, rest):
    a = llama()
    b = copy.deepcopy(a)
    spoil(b)
    found = named(a, b, site)
    assert found[0].startswith(first) and len(found) == 1 + rest, found


def test_weights_are_put_in_place_in_the_form_that_they_are_stored_in():
    """GPT-2's are transposed; those of PEFT are base and update; Llama's embeddings are under two names."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=32, vocab_size=64, **ENDS)).eval()
    pairs = [(gpt2, "transformer.h.0.attn.c_attn", "attn_out", 1, "c_attn.weight")]
    pairs += [(llama(tie_word_embeddings=True), "lm_head", "logits", 2, "weight")]
    pairs += [(llama(), "model.layers.0.self_attn.q_proj", "attn_out", 1, "q_proj.weight")]
    for a, changed, site, layer, name in pairs:
        b = copy.deepcopy(a)
        weight = b.get_submodule(changed).weight
        b.get_submodule(changed).weight = nn.Parameter(weight + 0.1 * torch.randn_like(weight))
        if name == "q_proj.weight":
            peft = pytest.importorskip("peft")
            a = peft.get_peft_model(a, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        e = evidence(a, b, site, layer)
        found = causes._compared(e)
        assert causes._fewest_that_explain(e, found, causes._changes_to_b(e, found)) == [name], name


# --- the words for a weight ------------------------------------------------------------------------------------------

GAIN = 1 + 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
MATRIX = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).double()


def _zeroed(x: torch.Tensor, *places: Any) -> torch.Tensor:
    x = x.clone()
    x[places] = 0
    return x


def _added(x: torch.Tensor, *places: Any) -> torch.Tensor:
    return x + (x - _zeroed(x, *places))


@pytest.mark.parametrize(
    ("name", "a", "b", "words"),
    [
        ("weight", GAIN, GAIN + 1, "is A's + 1: a gain of 1 + w?"),
        ("weight", torch.ones(32), torch.full((32,), 2.0), "is A's + 1: a gain of 1 + w?"),
        ("weight", torch.ones(32), torch.full((32,), 0.5), "is A's times 0.5: scaled"),
        ("weight", GAIN, GAIN + 0.3, "is A's + 0.3"),
        ("q_proj.bias", GAIN, GAIN + 1, "is A's + 1"),
        ("lam", torch.tensor([3.0]), torch.tensor([2.0]), "is A's times 0.666667: scaled"),
        ("lam", torch.tensor([2.06]), torch.tensor([2.0]), "is A's times 0.970874: scaled"),
        ("weight", 1 + 0.01 * (GAIN - 1), torch.ones(32).double(), "is all ones in B: not loaded?"),
        ("weight", GAIN, torch.full((32,), 0.25).double(), "is 0.25 everywhere in B: not loaded?"),
        ("q_proj.bias", 1e-4 * GAIN, torch.zeros(32).double(), "is zero in B: a missing bias"),
        ("weight", GAIN, torch.zeros(32).double(), "is zero in B: not loaded?"),
        ("weight", GAIN, GAIN.bfloat16().double(), "is rounded to bfloat16: a cast"),
        ("embed_tokens.weight", MATRIX, _zeroed(MATRIX, 5), "differs in row 5 alone, zero there in B ("),
        ("q_proj.weight", MATRIX, _added(MATRIX, slice(0, 16)), "differs in rows 0 to 15 alone, 2 heads ("),
        ("o_proj.weight", MATRIX, _zeroed(MATRIX, slice(None), slice(8, 16)),
         "differs in columns 8 to 15 alone, one head, zero there in B ("),
        ("up_proj.weight", MATRIX, _added(MATRIX, [1, 2, 9]), "differs in rows 1 to 2, 9 alone ("),
        ("weight", GAIN, _zeroed(GAIN, 3), "differs in entry 3 alone, zero there in B ("),
        ("up_proj.weight", MATRIX, MATRIX + MATRIX[:, :2] @ MATRIX[:2], "has a change of rank 2: a LoRA? ("),
    ],
)  # fmt: skip
def test_how_a_weight_differs(name, a, b, words):
    said = str(causes._how(a, b, name, {name: a}, 8))
    assert (said.startswith(words) if words.endswith("(") else said == words), said


# --- the scale of the softmax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_a", "of_b", "words"),
    [
        (1 / 8, 8**-0.5, "1/sqrt(d_head) in place of 1/d_head"),
        (1.0, 8**-0.5, "1/sqrt(d_head) in place of none"),
        (0.22, 8**-0.5, "1/sqrt(d_head) in place of 0.22"),
        (8**-0.5, 0.22, "0.22 in place of 1/sqrt(d_head)"),
        (0.22, None, "0.0777817 in place of 0.22"),
    ],
)
def test_the_scale_of_the_softmax_is_worded_by_the_first_models_own(of_a, of_b, words):
    a, b = llama(), llama()
    for model, scale in ((a, of_a), (b, of_b or of_a)):
        model.model.layers[0].self_attn.scaling = scale
    if of_b is None:  # of a port that scales by 1/sqrt(d_head) as well
        b.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: output * 8**-0.5)
    assert named(a, b, "attn_out") == [f"another scale of the softmax: {words}"]


# --- norms -----------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """An RMS norm whose root mean square is another function, times a number."""

    def __init__(self, norm: Any, size: Callable[[torch.Tensor], torch.Tensor], scale: float = 1.0):
        super().__init__()
        self.weight, self.size, self.scale = norm.weight, size, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.weight * x / self.size(x.square().mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ((lambda ms: (ms + 1e-3).sqrt(), 0.5), "ratio 0.5 in every channel: scaled"),
        ((lambda ms: (ms + 3e-3).sqrt(),), "another eps: B's is larger by 0.002 (0.003 in B)"),
        ((lambda ms: (ms + 1e-5).sqrt(),), "another eps: B's is smaller by 0.00099 (1e-05 in B)"),
        ((lambda ms: ms.sqrt(),), "B adds no eps: it is 0.001 in A"),
    ],
    ids=["scaled", "larger", "almost none", "none"],
)
@pytest.mark.parametrize(("dead", "size"), [(0.0, 0.02), (1e-7, 1.0), (0.9, 1.0)])
def test_eps_and_ratios_are_told_where_a_gain_is_about_zero(change, cause, dead, size):
    a = llama(rms_norm_eps=1e-3)
    with torch.no_grad():
        a.model.embed_tokens.weight.mul_(size / 0.15)
        a.model.layers[0].input_layernorm.weight[3] = dead
    b = copy.deepcopy(a)
    b.model.layers[0].input_layernorm = Norm(a.model.layers[0].input_layernorm, *change)
    found = named(a, b, "attn_norm_out")
    assert found == [cause] or found[0].startswith("B adds no eps: ") and "adds no eps" in cause, found


def test_one_ratio_of_rows_of_one_size_is_no_eps():
    a = llama()
    with torch.no_grad():
        embeddings = a.model.embed_tokens.weight
        embeddings.div_(embeddings.norm(dim=1, keepdim=True))
        a.model.layers[0].input_layernorm.weight[3] = 0
    b = copy.deepcopy(a)
    norm = a.model.layers[0].input_layernorm
    b.model.layers[0].input_layernorm = Norm(norm, lambda ms: (ms + norm.variance_epsilon).sqrt(), 0.5)
    assert named(a, b, "attn_norm_out") == ["ratio 0.5 in every channel: scaled"]


@pytest.mark.parametrize("size", [6.5, 7.0])
def test_an_eps_that_rounding_hides_is_none_or_small(size):
    a = llama(rms_norm_eps=1e-5)
    with torch.no_grad():
        a.model.embed_tokens.weight.mul_(size)
    b = copy.deepcopy(a)
    b.model.layers[0].input_layernorm.variance_epsilon = 1e-7
    known = "B adds no eps: it is 1e-05 in A"
    assert named(a, b, "attn_norm_out")[0] in [f"{known} (one below {x} would not show)" for x in ("2e-07", "3e-07")]


def test_a_norm_that_is_given_its_statistic_has_the_blocks_constant():
    for scheme in ("bhyt", "bhyt_linear"):
        a = ours(scheme)
        a.refresh_carried()
        b = copy.deepcopy(a)
        b.model.layers[0].c_attn.mul_(32)
        assert named(a, b, "mlp_norm_out")[0] == "c_attn is A's times 32: scaled"


# --- what a norm reads -----------------------------------------------------------------------------------------------


def test_a_sum_is_not_explained_by_the_norm_after_it():
    a = ours("layer_scale")
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.model.layers[0].attn_residual.scale.mul_(2)
        b.model.layers[0].post_attention_layernorm.weight.add_(0.1 * torch.randn(32))
    assert named(a, b, "mlp_norm_in") == [
        "attn_residual.scale is A's times 2: scaled",
        "attention enters the sum times 0.2, not 0.1",
    ]


def test_what_the_final_norm_reads_is_of_the_module_that_makes_it():
    a = ours("attn_residuals")
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.model.norm.leave.query.copy_(torch.randn(32))
        b.model.norm.norm.weight.add_(0.1 * torch.randn(32))
    result = diff(a, b, BATCH)
    assert result.first == ("final_norm_in", 2) and result.causes == ["leave.query is zero in A only"]
    assert any("B computes it in model.norm.leave, DepthAttention, " in note for note in result.notes)


# --- what was compared -----------------------------------------------------------------------------------------------


def test_it_is_said_between_what_the_differences_are(tmp_path):
    class Single(nn.Module):
        """Runs in float32 alone."""

        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) + nn.functional.linear(x, torch.zeros(32, 32))

    def said(a: nn.Module, b: Any) -> Difference:
        return diff(a, b, BATCH)

    a = llama()
    b = copy.deepcopy(a)
    unscaled(b)
    assert said(a, b).compared == (
        "The difference is between the two models in float64, "
        "the noise between the first one in float32 and in float64."
    )
    write_arrays(b, BATCH, tmp_path / "b.safetensors")
    assert said(a, tmp_path / "b.safetensors").compared == (
        "The difference is between the first model in float64 and the arrays, "
        "the noise between the first model in float32 and in float64."
    )
    for model in (a, b):
        model.model.layers[0].mlp = Single(model.model.layers[0].mlp)
    result = said(a, b)
    assert result.compared.startswith("The difference is between the two models in float32. Without float64 the noise ")
    page = pytest.importorskip("normlab.report.difference").write_difference(result, tmp_path / "page", "A and B")
    assert result.compared in page.read_text() and "in float64," not in page.read_text()
