"""Two models that part: seeded faults are found at their block and site, and equal pairs raise no alarm.

`benchmarks/first_layer.py` does the same over all architectures; its tables are in `data/bench`.
"""

import contextlib
import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import normlab
from benchmarks import ports
from normlab.differences import diff, read_arrays, write_arrays
from normlab.differences.capture import Capture, Site, counted, roles_of
from normlab.differences.causes import Side
from normlab.differences.compare import _code_of
from normlab.differences.forms import aligned, merged
from normlab.errors import NormlabError

SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def _off_start(model: nn.Module) -> nn.Module:
    """Weights large enough for branches to count, gains and biases off 1 and 0."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, **SIZES
    )
    return _off_start(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def small_llama() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, **SIZES)).eval()


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return _off_start(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, **SIZES)))


def _output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)


def _eps(model: Any) -> None:
    norm = model.model.layers[2].input_layernorm
    norm.variance_epsilon = 1e-3


def _gain(model: Any) -> None:
    model.model.layers[2].post_attention_layernorm.weight.data += 1


def _base(model: Any) -> None:
    model.model.rotary_emb.inv_freq = 500_000.0 ** (-torch.arange(0, 8, 2) / 8)


def _layout(model: Any) -> None:
    order = (torch.arange(8).reshape(-1, 2).T.flatten()[None] + 8 * torch.arange(4)[:, None]).flatten()
    for block in model.model.layers:
        _output(block.self_attn.q_proj, lambda y: y[..., order])
        _output(block.self_attn.k_proj, lambda y: y[..., order[:16]])


def _transposed(model: Any) -> None:
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.T.clone()


def _heads(model: Any) -> None:
    weight = model.model.layers[3].self_attn.q_proj.weight
    weight.data = weight.data.roll(8, 0)


def _repeat(model: Any) -> None:
    order = torch.arange(4).reshape(2, 2).T.flatten()
    columns = (order[:, None] * 8 + torch.arange(8)).flatten()
    for block in model.model.layers:
        _output(block.self_attn.q_proj, lambda y: y[..., columns])
        block.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0][..., columns.argsort()],))


def _cast(model: Any) -> None:
    _output(model.model.layers[1].mlp, lambda y: y.bfloat16().float())


def _half_branch(model: Any) -> None:
    _output(model.model.layers[2].mlp, lambda y: y / 2)


def _no_final_norm(model: Any) -> None:
    model.model.norm.forward = lambda x: x


def _tied(model: Any) -> None:
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()


def _uncausal(model: Any) -> None:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": torch.zeros(2, 1, 12, 12), "is_causal": False}

    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


LLAMA = [
    (_eps, 3, "attn_norm_out", "eps"),
    (_gain, 3, "mlp_norm_out", r"gain of 1 \+ w"),
    (_base, 1, "attn_out", "rotary base"),
    (_layout, 1, "attn_out", "layout of the rotary"),
    (_transposed, 2, "attn_out", "transposed"),
    (_heads, 4, "attn_out", "heads permuted"),
    (_repeat, 1, "attn_out", "repeated in another order"),
    (_cast, 2, "mlp_out", "cast"),
    (_half_branch, 3, "mlp_out", "ratio 0.5"),
    (_no_final_norm, 5, "final_norm_out", "no norm|wrong hidden state"),
    (_tied, 5, "logits", "tied"),
    (_uncausal, 1, "attn_out", "mask"),
]


@pytest.mark.parametrize(("spoil", "layer", "site", "cause"), LLAMA, ids=[row[0].__name__[1:] for row in LLAMA])
def test_a_fault_is_found_at_its_block_and_site_and_named(llama, batch, spoil, layer, site, cause):
    spoiled = copy.deepcopy(llama)
    spoil(spoiled)
    result = diff(llama, spoiled, batch)
    assert (result.first.layer, result.first.name) == (layer, site), result
    assert any(re.search(cause, sentence) for sentence in result.causes), result
    assert result.verdict.startswith(f"parts at block {layer}, " if layer < 5 else "parts at the end, ")


def test_scaled_tokens_and_shifted_positions_are_told_apart(gpt2, batch):
    scaled, shifted = copy.deepcopy(gpt2), copy.deepcopy(gpt2)
    _output(scaled.transformer.wte, lambda y: y * math.sqrt(32))
    shifted.transformer.wpe.weight.data = shifted.transformer.wpe.weight.data.roll(-1, 0)
    assert diff(gpt2, scaled, batch).causes == ["token embeddings are scaled by sqrt(width)"]
    assert "permuted" in diff(gpt2, shifted, batch).causes[0]
    assert diff(gpt2, shifted, batch).first.name == "embeddings"


def test_equal_pairs_are_equal(llama, batch, tmp_path):
    llama.save_pretrained(tmp_path)
    pairs = {
        "copy": copy.deepcopy(llama),
        "bfloat16": copy.deepcopy(llama).bfloat16(),
        "loaded": LlamaForCausalLM.from_pretrained(tmp_path),
        "eager": LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"),
    }
    for name, other in pairs.items():
        result = normlab.diff(llama, other, batch, gradients=name == "eager")
        assert result.equal and result.verdict.startswith("equal"), (name, str(result))


def test_rounding_is_no_difference_but_a_bfloat16_part_of_a_bfloat16_model_is_none_either(llama, batch):
    half = copy.deepcopy(llama).bfloat16()
    cast = copy.deepcopy(half)
    _cast_to_half = cast.model.layers[1].mlp
    _output(_cast_to_half, lambda y: y.float().bfloat16())
    assert diff(half, cast, batch).equal


class NamedForFrequencies(nn.Module):
    """An MLP with one more matrix, whose name is like that of a table of frequencies."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner, self.freq_mlp = mlp, nn.Parameter(torch.eye(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.freq_mlp


def test_a_cast_beside_a_weight_that_is_named_for_frequencies_is_told_as_any_other(llama, batch):
    half = copy.deepcopy(llama)
    half.model.layers[0].mlp = NamedForFrequencies(half.model.layers[0].mlp)
    cast = copy.deepcopy(half.bfloat16())
    _output(cast.model.layers[0].mlp, lambda y: y.to(torch.bfloat16).to(y.dtype))
    with torch.no_grad():
        cast.model.layers[0].mlp.freq_mlp.mul_(1.0625)
    result = diff(half, cast, batch)
    assert result.first == ("mlp_out", 1) and "freq_mlp is A's times 1.0625: scaled" in result.causes
    assert any("block 1, in model.layers.0.mlp" in note and "is in bfloat16" in note for note in result.notes), result
    assert "between the first one in bfloat16 and" in result.compared


def test_a_fault_after_a_bfloat16_part_is_named_with_its_own_cause_and_code(llama, batch):
    half = copy.deepcopy(llama).bfloat16()
    cast = copy.deepcopy(half)
    _output(cast.model.layers[0].mlp, lambda y: y.float().bfloat16())
    _gain(cast)
    result = diff(half, cast, batch)
    assert (result.first.layer, result.first.name) == (3, "mlp_norm_out")
    assert result.causes and not any("cast" in cause for cause in result.causes), result
    assert any("block 1, in model.layers.0.mlp" in note and "is in bfloat16" in note for note in result.notes)
    assert any("B computes it in model.layers.2.post_attention_layernorm" in note for note in result.notes)


def test_a_backward_that_differs_is_found_from_the_end(llama, batch):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 1.01

    spoiled = copy.deepcopy(llama)
    _output(spoiled.model.layers[1].mlp, Scaled.apply)
    assert diff(llama, spoiled, batch).equal
    result = diff(llama, spoiled, batch, gradients=True)
    assert result.first == ("block_in_grad", 2)


def test_a_port_with_names_of_its_own_is_equal_and_its_fault_is_named_with_the_line_of_its_code():
    equal, spoiled = ports.cases(r"Qwen3: (theta of one layer)?$")
    assert equal["right"] and spoiled["right"] and spoiled["site_right"] and spoiled["cause_right"], spoiled
    a = ports.reference("GPT2")
    result = diff(a, ports.Port(a, "norm without the mean").eval(), {"input_ids": torch.arange(24).view(1, -1)})
    assert result.causes == ["8 of 9 norms: B does not subtract the mean: LayerNorm or RMSNorm"], result
    assert re.search(r"blocks.0.before.0, Norm, .*ports.py:\d+", str(result))


@pytest.mark.parametrize("name", ["mlp_in", "mlp_norm_in", "block_out"])
def test_a_sum_and_what_a_part_reads_are_computed_by_the_block(llama, batch, name):
    site = Site(name, 2)
    side = Side(Capture(modules={site: "model.layers.1.mlp"}), llama, batch, roles_of(llama, batch))
    words = _code_of(side, site)
    assert words.startswith("model.layers.1, LlamaDecoderLayer, ")


def test_tokens_are_told_behind_prompts_and_in_streams_one_after_another():
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    x = torch.arange(10.0).view(2, 5, 1)  # two positions of the model's own come first
    assert counted(x, mask).flatten().tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    x = torch.arange(12.0).view(2, 6, 1)  # two streams
    assert counted(x, mask).flatten().tolist() == [0, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert counted(torch.zeros(5, 1), mask) is None


def test_arrays_of_another_framework_are_compared(llama, batch, tmp_path):
    spoiled = copy.deepcopy(llama)
    _gain(spoiled)
    write_arrays(llama, batch, tmp_path / "same.safetensors")
    write_arrays(spoiled, batch, tmp_path / "other.safetensors")
    assert diff(llama, tmp_path / "same.safetensors", batch).equal
    result = diff(llama, tmp_path / "other.safetensors", batch)
    assert result.first == ("mlp_norm_out", 3) and "1 + w" in result.causes[0]
    with torch.no_grad():
        spoiled.model.layers[2].post_attention_layernorm.weight.fill_(1)
    write_arrays(spoiled, batch, tmp_path / "plain.safetensors")
    assert "B applies no gain" in diff(llama, tmp_path / "plain.safetensors", batch).causes[0]
    few = {f"{site.name}.{site.layer}": x.numpy() for site, x in read_arrays(tmp_path / "other.safetensors").items()}
    np.savez(tmp_path / "few.npz", **{"block_out.2": few["block_out.2"], "block_out.4": few["block_out.4"]})
    assert diff(llama, tmp_path / "few.npz", batch).first == ("block_out", 4)


def test_another_shape_is_a_difference_and_named(llama, batch, tmp_path):
    longer = copy.deepcopy(llama)
    longer.resize_token_embeddings(80)
    result = diff(llama, longer, batch)
    assert result.first == ("logits", 5) and result.causes == ["its shape is (2, 12, 64) in A and (2, 12, 80) in B"]
    assert result.verdict == f"parts at the end, logits (differs): {result.causes[0]}; nothing else adds error"
    write_arrays(llama, batch, tmp_path / "all.safetensors")
    arrays = {f"{site.name}.{site.layer}": x.numpy() for site, x in read_arrays(tmp_path / "all.safetensors").items()}
    arrays["block_out.2"] = arrays["block_out.2"][:, :-1]
    np.savez(tmp_path / "short.npz", **arrays)
    assert diff(llama, tmp_path / "short.npz", batch).first == ("block_out", 2)


def test_a_boolean_mask_is_as_good_as_one_of_numbers(llama, batch):
    spoiled = copy.deepcopy(llama)
    _gain(spoiled)
    masked = batch | {"attention_mask": batch["attention_mask"].bool()}
    assert str(diff(llama, spoiled, masked)) == str(diff(llama, spoiled, batch))


class _Masked(nn.Module):
    """Makes the model's mask of one that it is given by the name `mask`."""

    def __init__(self, model: nn.Module, mask: str, tokens: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.model, self.mask, self.tokens = model, mask, tokens

    def forward(self, input_ids: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, attention_mask=self.tokens(masks[self.mask]).long(), use_cache=False).logits


def _with_padding(model: nn.Module, name: str, tokens: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    """Two models that read a mask, and differ in the vectors of real tokens alone, and in those of padding alone."""
    a = _Masked(model, name, tokens)
    of_tokens, of_padding = copy.deepcopy(a), copy.deepcopy(a)
    of_tokens.model.model.embed_tokens.weight.data[1:] *= 1.01
    of_padding.model.model.embed_tokens.weight.data[0] += 1
    return a, (of_tokens, of_padding)


@pytest.mark.parametrize(
    ("name", "tokens", "made"),
    [
        ("src_key_padding_mask", lambda mask: ~mask, lambda padding: padding),
        ("attention_mask", lambda mask: mask == 0, lambda padding: torch.zeros(2, 12).masked_fill(padding, -1e4)),
    ],
)
def test_masks_of_padding_are_read_as_record_reads_them(small_llama, batch, name, tokens, made):
    padding = batch["attention_mask"] == 0
    a, (of_tokens, of_padding) = _with_padding(small_llama, name, tokens)
    given = {"input_ids": batch["input_ids"], name: made(padding)}
    result = diff(a, of_tokens, given)
    assert result.first == ("embeddings", 0) and math.isclose(result.table.difference[0], 0.01, rel_tol=1e-5)
    assert not result.notes[:-1]  # the last one names the code
    assert diff(a, of_padding, given).equal


def test_a_mask_that_diff_does_not_know_is_noted_and_can_be_given(small_llama, batch):
    a, (_, of_padding) = _with_padding(small_llama, "pad", lambda mask: mask == 1)
    given = {"input_ids": batch["input_ids"], "pad": batch["attention_mask"]}
    unknown = diff(a, of_padding, given)
    assert not unknown.equal and unknown.notes[0].startswith("padding by pad: all tokens count")
    assert "give mask='pad'" in unknown.notes[0]
    for mask in ("pad", lambda call: call.arguments["pad"]):
        result = diff(a, of_padding, given, mask=mask)
        assert result.equal and not result.notes


class _TokensAlone(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits


def test_a_mask_counts_that_one_of_the_models_takes(small_llama, batch):
    a = _TokensAlone(small_llama)
    b = copy.deepcopy(small_llama)
    b.model.embed_tokens.weight.data[0] += 1
    padding = batch["attention_mask"] == 0
    last = {"input_ids": batch["input_ids"].flip(1), "attention_mask": batch["attention_mask"].flip(1)}
    assert diff(a, b, last).equal
    assert diff(small_llama, _TokensAlone(b), last, mask=lambda call: call.arguments["attention_mask"]).equal
    given = {"input_ids": last["input_ids"], "src_key_padding_mask": padding.flip(1)}
    assert diff(a, _TokensAlone(b), given).equal
    unknown = diff(a, _TokensAlone(b), {"input_ids": last["input_ids"], "pad": last["attention_mask"]})
    assert not unknown.equal and "give mask='pad'" in unknown.notes[0]


class _OfTwo(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, second_ids, second_mask):
        first, second = (
            self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state * mask[..., None]
            for ids, mask in ((input_ids, attention_mask), (second_ids, second_mask))
        )
        return first.sum(1) + second.sum(1)


@pytest.mark.parametrize(("length", "mask"), [(12, None), (8, lambda call: call.arguments["attention_mask"])])
def test_of_several_texts_the_first_ones_mask_counts_and_a_note_says_so(small_llama, batch, length, mask):
    a = _OfTwo(small_llama.model)
    b = copy.deepcopy(a)
    b.model.embed_tokens.weight.data[0] += 1
    second = torch.randint(1, 64, (2, length))
    given = {k: batch[k] for k in ("input_ids", "attention_mask")}
    result = diff(a, b, given | {"second_ids": second, "second_mask": torch.ones_like(second)}, mask=mask)
    assert result.equal and result.notes[0].startswith("the blocks run on several texts")


def test_masks_of_four_dimensions_are_read_and_those_that_tell_nothing_are_noted(small_llama, batch):
    b = copy.deepcopy(small_llama)
    b.model.embed_tokens.weight.data[0] += 1
    sees = torch.ones(12, 12).tril().bool() & (batch["attention_mask"] != 0)[:, None, None]
    given = {"input_ids": batch["input_ids"], "attention_mask": torch.zeros(sees.shape).masked_fill(~sees, -1e9)}
    result = diff(small_llama, b, given)
    assert result.equal and not result.notes
    result = diff(small_llama, b, batch, mask=lambda call: torch.ones(2, 3, 4, 5))
    assert not result.equal and result.notes[0].startswith("all tokens are compared")


class _LengthFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids, src_key_padding_mask=None):
        return self.encoder(self.embed(input_ids), src_key_padding_mask=src_key_padding_mask)


def test_one_text_without_a_batch_is_compared():
    a = _LengthFirst().eval()
    b = copy.deepcopy(a)
    _output(b.encoder.layers[1].self_attn, torch.tanh)
    given = {"input_ids": torch.arange(6), "src_key_padding_mask": torch.arange(6) > 4}
    assert diff(a, b, given).verdict.startswith("parts at block 2")


@pytest.mark.parametrize("rows", [3, 6])
def test_padding_beside_tokens_of_length_and_batch_is_left_out_or_a_note_says_that_it_counts(rows):
    a = _LengthFirst().eval()
    of_padding, of_tokens = copy.deepcopy(a), copy.deepcopy(a)
    of_padding.embed.weight.data[0] += 1
    of_tokens.embed.weight.data[1:] *= 1.01
    padding = torch.zeros(rows, 6, dtype=torch.bool)
    padding[0, 2:] = padding[1, 3:] = True
    ids = torch.randint(1, 64, (rows, 6)).masked_fill(padding, 0).T.contiguous()
    given = {"input_ids": ids, "src_key_padding_mask": padding}
    result = diff(a, of_tokens, given)
    assert result.first == ("embeddings", 0)
    result = diff(a, of_padding, given)
    if rows == 6:
        assert not result.equal and result.notes[0].startswith("all tokens are compared: src_key_padding_mask")
    else:
        assert result.equal and not result.notes


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ("typo", "mask='typo' names nothing that is given: choose from input_ids"),
        (lambda call: call.arguments["pad"], "the function given as mask fails: KeyError: 'pad'"),
        (lambda call: [[1]], r"mask gives \[\[1\]\]: it must give a tensor"),
    ],
)
def test_a_mask_that_nothing_answers_to_is_refused(small_llama, batch, mask, why):
    with pytest.raises(NormlabError, match=why):
        diff(small_llama, small_llama, batch, mask=mask)


class _OwnName(_TokensAlone):
    def forward(self, input_ids: torch.Tensor, pad: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(input_ids, attention_mask=pad, use_cache=False).logits


@pytest.mark.parametrize("mask", ["pad", lambda call: call.arguments["pad"] != 0])
def test_a_mask_that_b_ignores_is_named_however_it_is_given(small_llama, batch, mask):
    a, b = _OwnName(small_llama), _TokensAlone(copy.deepcopy(small_llama))
    given = {"input_ids": batch["input_ids"], "pad": batch["attention_mask"]}
    assert "B ignores the padding mask" in str(diff(a, b, given, mask=mask))


def test_rows_of_one_token_show_no_later_one(small_llama):
    b = copy.deepcopy(small_llama)
    _output(b.model.layers[1].self_attn, torch.tanh)
    assert diff(small_llama, b, {"input_ids": torch.tensor([[7], [8]])}).verdict.startswith("parts at block 2")


def test_bad_input_is_one_line(llama, gpt2, batch, tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "named.npz", layer_3=np.zeros(3))
    np.savez(tmp_path / "small.npz", **{"block_out.1": np.zeros((1, 2, 3), np.float32)})
    shallow = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **SIZES))
    for other, words in (
        (tmp_path / "missing.npz", "cannot be read"),
        (tmp_path / "text.npz", "cannot be read"),
        (tmp_path / "named.npz", "name arrays SITE.BLOCK"),
        (tmp_path / "small.npz", "no site of this model"),
        (shallow, "4 and 2 blocks"),
    ):
        with pytest.raises(NormlabError, match=words) as caught:
            diff(llama, other, batch)
        assert "\n" not in str(caught.value)


def test_models_keep_their_mode_hooks_and_gradients(llama, batch):
    other = copy.deepcopy(llama).train()
    before = {name: p.clone() for name, p in other.named_parameters()}
    diff(llama, other, batch, gradients=True)
    assert other.training and not llama.training
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in other.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())


def test_an_encoders_padding_is_not_the_decoders(batch):
    torch.manual_seed(0)
    a = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, d_kv=8)
    ).eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.decoder.block[1].layer[2].DenseReluDense.wo.weight.mul_(1.3)
    found = diff(a, b, batch | {"decoder_input_ids": batch["input_ids"][:, :7]})
    assert found.first.layer == 2 and found.table["difference"].notna().all()
    assert any(note.startswith("encoder.block is not compared") for note in found.notes)
    b.decoder.block[1].layer[2].DenseReluDense.wo.weight.data /= 1.3
    _output(b.decoder.block[1].layer[0].SelfAttention, torch.tanh)
    decoded = {f"decoder_{name}": x[:, :7] for name, x in batch.items()}
    assert diff(a, b, batch | decoded).verdict.startswith("parts at block 2, attention")


def test_gradients_of_what_has_none_are_one_line(llama, batch):
    frozen = copy.deepcopy(llama).requires_grad_(False)
    with pytest.raises(NormlabError, match="gradients=True needs input_ids, and parameters that are not frozen"):
        diff(frozen, frozen, batch, gradients=True)


def test_what_surrounds_the_call_does_not_decide(llama, batch):
    """Autocast would round the copies. A mask of four dimensions says which tokens see which, not which count."""
    with torch.autocast("cpu", torch.bfloat16):
        assert diff(llama, copy.deepcopy(llama), batch).verdict.startswith("equal")
    ids = batch["input_ids"]
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril().expand(len(ids), 1, -1, -1)
    given = {"input_ids": ids, "attention_mask": seen}
    assert diff(llama, copy.deepcopy(llama), given).verdict.startswith("equal")


def test_a_model_that_does_not_run_on_the_batch_is_one_line(llama):
    with pytest.raises(NormlabError, match=r"does not run on input_ids \(2, 4\): IndexError"):
        diff(llama, copy.deepcopy(llama), {"input_ids": torch.full((2, 4), 10**6)})


def test_scores_of_a_classifier_are_one_row_per_sequence():
    scores, mask = torch.randn(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert counted(scores, mask).shape == (2, 3)


def test_another_blocks_norm_is_named(llama, batch):
    b = copy.deepcopy(llama)
    with torch.no_grad():
        b.model.layers[1].input_layernorm.weight.copy_(llama.model.layers[2].input_layernorm.weight)
    assert "B has the weights of A's block 3 here" in str(diff(llama, b, batch))


def test_an_overflow_in_float16_is_named(llama, batch):
    large = copy.deepcopy(llama)
    with torch.no_grad():
        for weight in large.model.layers[1].mlp.parameters():
            weight.mul_(1500)
    result = diff(large, copy.deepcopy(large).half(), batch)
    assert result.first.layer == 2 and "B is not finite in float16, which ends at 65504" in result.verdict
    weight = copy.deepcopy(llama)
    with torch.no_grad():
        weight.model.layers[1].mlp.down_proj.weight[0, 0] = 1e5
    result = diff(weight, copy.deepcopy(weight).half(), batch)
    assert result.first.layer == 2 and "down_proj.weight overflows in B: it is 1e+05 in A" in result.verdict
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    assert "down_proj.weight is not finite in B" in diff(llama, broken, batch).verdict
    half = copy.deepcopy(weight).half()
    assert diff(half, copy.deepcopy(half), batch).equal


def test_a_backbone_called_module_is_not_all_of_the_model(llama, batch):
    class Headed(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.module, self.lm_head = copy.deepcopy(llama.model), copy.deepcopy(llama.lm_head)
            self.lm_head.weight.data.mul_(factor)

        def forward(self, input_ids, attention_mask):
            return {"logits": self.lm_head(self.module(input_ids, attention_mask)[0])}

    result = diff(Headed(1.0).eval(), Headed(2.0).eval(), batch)
    assert not result.equal and "the end, logits" in result.verdict
    wrapper = nn.DataParallel(llama, device_ids=[]) if torch.cuda.is_available() else nn.DataParallel(llama)
    assert diff(wrapper, llama, batch).equal


def test_a_models_own_arrays_are_equal_though_it_is_in_training_mode(batch, tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, **SIZES)).train()
    write_arrays(model, batch, tmp_path / "own.safetensors")
    assert model.training and diff(model, tmp_path / "own.safetensors", batch).equal


# -- causes that look alike --------------------------------------------------------------------------------------------


def rotary(**rope) -> nn.Module:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **SIZES,
        max_position_embeddings=64, rope_parameters={"rope_theta": 10_000.0, **rope},
    )  # fmt: skip
    torch.manual_seed(0)
    return _off_start(LlamaForCausalLM(config))


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("a", "b", "cause"),
    [
        (LINEAR, {}, "A's times 4: rotary positions are scaled"),
        ({}, LINEAR, "A's times 1/4: rotary positions are scaled"),
        (YARN, {}, "is scaled in A, by another factor at each frequency as in YaRN, and not in B"),
        ({}, YARN, "is scaled in B, by another factor at each frequency as in YaRN, and not in A"),
        ({}, {"rope_theta": 500_000.0}, "has another base: a rotary base of about 5e.05 in B, 1e.04 in A"),
    ],
    ids=["linear in A", "linear in B", "YaRN in A", "YaRN in B", "base"],
)
def test_a_scaled_rotary_embedding_is_no_other_base(a, b, cause):
    result = diff(rotary(**a), rotary(**b), {"input_ids": torch.arange(48).view(2, 24)})
    assert re.search(cause, result.causes[0]), result
    assert any("base" in one for one in result.causes) == ("base" in cause), result


def test_a_missing_attention_factor_of_yarn_is_named():
    a, b = rotary(**YARN), rotary(**YARN)
    b.model.rotary_emb.attention_scaling = 1.0
    for one, other in ((a, b), (b, a)):
        causes = diff(one, other, {"input_ids": torch.arange(48).view(2, 24)}).causes
        assert causes and "another attention factor, as of YaRN" in causes[0]


class OtherEps(nn.Module):
    """An RMS norm with the same eps at another place."""

    def __init__(self, norm: Any, size: Callable[[torch.Tensor, float], torch.Tensor]):
        super().__init__()
        self.weight, self.eps, self.size = norm.weight, norm.variance_epsilon, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / self.size(x.square().mean(-1, keepdim=True), self.eps)


@pytest.mark.parametrize("alike", [True, False], ids=["rows of one size", "rows of many sizes"])
@pytest.mark.parametrize(
    ("size", "cause"),
    [
        (lambda ms, eps: ms.sqrt() + eps, "eps is added outside the root"),
        (lambda ms, eps: ms.clamp_min(eps).sqrt(), "B adds no eps"),
        (lambda ms, eps: ms.sqrt(), "B adds no eps"),
        (lambda ms, eps: (ms + eps / 2).sqrt(), "another eps: B's is smaller by"),
    ],
    ids=["outside", "least", "none", "smaller"],
)
def test_the_place_of_eps_is_told_from_its_size(batch, size, cause, alike):
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **SIZES)
    config.rms_norm_eps = 1e-5
    torch.manual_seed(0)
    a = LlamaForCausalLM(config).eval()
    if not alike:
        with torch.no_grad():
            a.model.embed_tokens.weight *= torch.rand(64, 1) + 0.1
    b = copy.deepcopy(a)
    for block in b.model.layers:
        block.input_layernorm = OtherEps(block.input_layernorm, size)
    assert cause in diff(a, b, batch).causes[0]


def test_an_rms_norm_without_eps_is_the_same_in_every_dtype(batch):
    class Blocks(nn.Module):
        def __init__(self, functional: bool):
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
            self.layers = nn.ModuleList(Residual(functional) for _ in range(2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for block in self.layers:
                x = block(x)
            return self.head(x)

    class Residual(nn.Module):
        def __init__(self, functional: bool):
            super().__init__()
            self.norm, self.mlp, self.functional = nn.RMSNorm(16), nn.Linear(16, 16), functional

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(nn.functional.rms_norm(x, (16,)) if self.functional else self.norm(x))

    for functional in (False, True):
        torch.manual_seed(0)
        a = Blocks(functional).eval()
        with torch.no_grad():
            a.embed.weight.mul_(0.002)
        result = diff(a, copy.deepcopy(a).bfloat16(), {"input_ids": batch["input_ids"]})
        assert result.equal, result


def test_frequencies_are_never_rounded_and_other_dtypes_of_buffers_are_noted(llama, batch):
    half, cast = copy.deepcopy(llama), copy.deepcopy(llama).bfloat16()
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    assert half.model.rotary_emb.inv_freq.dtype is torch.float32
    result = diff(half, cast, batch)
    assert result.first == ("attn_out", 1) and "inv_freq is rounded to bfloat16: a cast" in result.verdict
    assert "model.rotary_emb.inv_freq is in float32 in A and in bfloat16 in B" in result.notes
    rounding = diff(llama, cast, batch)  # as all of B is
    assert rounding.equal and "model.rotary_emb.inv_freq is in float32 in A and in bfloat16 in B" in rounding.notes
    assert "difference is 0.0" not in rounding.verdict
    rounded = copy.deepcopy(llama)
    rounded.model.rotary_emb.inv_freq = rounded.model.rotary_emb.inv_freq.bfloat16().float()
    assert "inv_freq is rounded to bfloat16: a cast" in diff(llama, rounded, batch).verdict


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x: np.full_like(x, np.nan), "B is not finite here"),
        (np.zeros_like, "B is zero here"),
        (lambda x: x + 1, ""),
    ],
    ids=["nan", "zeros", "other"],
)
def test_arrays_of_nan_or_zeros_are_named(llama, batch, tmp_path, change, cause):
    write_arrays(llama, batch, tmp_path / "all.safetensors")
    x = next(x.numpy() for site, x in read_arrays(tmp_path / "all.safetensors").items() if site == ("block_out", 2))
    np.savez(tmp_path / "one.npz", **{"block_out.2": change(x)})
    result = diff(llama, tmp_path / "one.npz", batch)
    assert result.first == ("block_out", 2) and not any("cast" in one for one in result.causes)
    assert not cause or result.causes[0] == cause


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("block_out.1", np.int64, "holds block_out.1 in torch.int64: write activations in a floating dtype"),
        ("block_out.1", bool, "in torch.bool"),
        ("block_out.1", np.complex64, "in torch.complex64"),
        ("block_out.²", np.float32, "name arrays SITE.BLOCK"),
        ("block_out.1.2", np.float32, "name arrays SITE.BLOCK"),
        ("block_out.-1", np.float32, "name arrays SITE.BLOCK"),
    ],
)
def test_arrays_of_other_kinds_or_names_are_one_line(llama, batch, tmp_path, name, dtype, words):
    np.savez(tmp_path / "odd.npz", **{name: np.ones((2, 12, 32), dtype)})
    with pytest.raises(NormlabError, match=words) as caught:
        diff(llama, tmp_path / "odd.npz", batch)
    assert "\n" not in str(caught.value)


def test_blocks_that_structure_does_not_show_are_named(batch):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
            self.first, self.second = Plain(), Plain()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(self.embed(input_ids))))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    a = Named().eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.second.mlp.weight.mul_(1.5)
    inputs = {"input_ids": batch["input_ids"]}
    with pytest.raises(NormlabError, match="no stack of blocks"):
        diff(a, b, inputs)
    assert diff(a, b, inputs, blocks="[fs]*").first == ("mlp_out", 2)


def test_the_models_themselves_run_where_no_copy_is_needed(llama, batch, monkeypatch):
    copied, plain = [], copy.deepcopy

    def counting(x: Any, memo: Any = None) -> Any:
        copied.append(type(x))
        return plain(x, memo)

    monkeypatch.setattr(copy, "deepcopy", counting)
    assert diff(llama, llama, batch).equal
    assert copied.count(LlamaForCausalLM) == 2  # in float64


def test_blocks_that_run_again_are_further_blocks():
    from transformers import HrmTextConfig, HrmTextForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    torch.manual_seed(0)
    a = HrmTextForCausalLM(HrmTextConfig(num_layers_per_stack=2, H_cycles=2, L_cycles=2, **sizes)).eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.model.H_module.layers[0].mlp.down_proj.weight.mul_(1.5)
    result = diff(a, b, {"input_ids": torch.arange(5, 17)[None]})
    assert result.verdict.startswith("parts at block 5, ")  # the low level's second cycle, after two passes of 2
    assert any(note.startswith("model.H_module.layers is not compared") for note in result.notes)
    assert result.table["layer"].max() == 9 and result.table.iloc[-1].tolist()[:2] == ["logits", 9]


@pytest.mark.parametrize("words, scale", [("1/d_head", 1 / 8), ("none", 1.0)])
def test_the_scale_that_a_softmax_has_instead_is_named(words, scale, llama, batch):
    port = copy.deepcopy(llama)
    for layer in port.model.layers:
        layer.self_attn.scaling = scale
    cause = f"all 4 blocks: another scale of the softmax: {words} in place of 1/sqrt(d_head)"
    assert diff(llama, port, batch).causes == [cause]


# --- beyond the first place ------------------------------------------------------------------------------------------


def _scale_two_blocks(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data *= 1.01
    model.model.layers[2].self_attn.o_proj.weight.data *= 1.5


def test_what_a_block_adds_is_what_it_adds_to_the_first_model_with_this_block_alone(llama, batch):
    b = copy.deepcopy(llama)
    _scale_two_blocks(b)
    result = diff(llama, b, batch)
    assert result.verdict.startswith("parts at block 2, MLP (")
    assert result.verdict.endswith(": down_proj.weight is A's times 1.01: scaled; block 3 adds most")
    assert result.notes[-1] == "block 3, attention: o_proj.weight is A's times 1.5: scaled"
    added = result.added.set_index("layer")
    assert added.index.tolist() == [0, 1, 2, 3, 4, 5] and added.index[added["parts"]].tolist() == [2, 3]
    for layer in (2, 3):
        outputs = {}
        for name, block in (("a", llama.model.layers[layer - 1]), ("b", b.model.layers[layer - 1])):
            model = copy.deepcopy(llama).double()
            model.model.layers[layer - 1] = copy.deepcopy(block).double()
            kept: list[torch.Tensor] = []
            _output(model.model.layers[layer - 1], lambda y, kept=kept: kept.append(y) or y)
            with torch.no_grad():
                kept.append(model(**batch, use_cache=False).logits)
            outputs[name] = [x[batch["attention_mask"].bool()] for x in kept]
        for column, x, y in zip(("difference", "logits"), outputs["a"], outputs["b"], strict=True):
            size = ((x - y).norm(dim=-1) / x.norm(dim=-1)).square().mean().sqrt()
            assert math.isclose(added.loc[layer, column], float(size), rel_tol=1e-6), (layer, column)


@pytest.mark.parametrize(("spared", "words"), [("none", "all 9 norms"), ("layers.2.input", "8 of 9 norms")])
def test_one_fault_of_all_norms_is_said_once(llama, batch, spared, words):
    b = copy.deepcopy(llama)
    for name, gain in b.named_parameters():
        gain.data += float("norm" in name and spared not in name)
    result = diff(llama, b, batch)
    assert f"): {words}: weight is A's + 1: a gain of 1 + w?; " in result.verdict
    most, ruins = (int(result.added[name].idxmax()) for name in ("difference", "logits"))
    assert most != ruins == 5 and result.verdict.endswith(f"; block {most} adds most, the end moves the logits most")
    assert not any("norm" in note and "gain" in note for note in result.notes)


def test_final_norm_and_head_add_what_they_add_on_the_first_models_last_block(llama, batch):
    b = copy.deepcopy(llama)
    b.model.layers[0].mlp.down_proj.weight.data *= 1.2
    b.model.norm.weight.data *= 1.15
    b.lm_head.weight.data *= 1.1
    added = diff(llama, b, batch).added.set_index("layer")
    assert math.isclose(added.loc[5, "difference"], 1.15 * 1.1 - 1, rel_tol=1e-5)  # norm and head, on A's last block
    assert added.loc[5, "logits"] == added.loc[5, "difference"] and not added.loc[[0, 2, 3, 4], "parts"].any()


def test_what_blocks_add_is_left_out_where_they_hand_on_several_tensors(batch):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            residual = residual + x
            return self.mlp(self.norm(residual)), residual

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
            self.layers = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            residual = torch.zeros_like(x)
            for layer in self.layers:
                x, residual = layer(x, residual)
            return self.head(x + residual)

    torch.manual_seed(0)
    a = Model()
    b = copy.deepcopy(a)
    b.layers[1].mlp.weight.data *= 1.1
    result = diff(a, b, batch)
    assert result.first is not None and result.first.layer == 2 and result.added.empty and "adds" not in result.verdict
    assert result.notes[-1].startswith("what each block adds is not known: blocks hand on several tensors")


# --- other forms of the same weights ---------------------------------------------------------------------------------


def test_fused_projections_are_compared_with_split_ones(llama, batch):
    """Phi-3 holds q, k and v in one matrix, and gate and up in another."""
    config = llama.config.to_dict() | {"pad_token_id": 0}
    b = Phi3ForCausalLM(Phi3Config(**{n: v for n, v in config.items() if n not in ("model_type", "architectures")}))
    weights = llama.state_dict()
    for i in range(4):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        for owner, fused, names in ((attention, "qkv", "qkv"), (mlp, "gate_up", ("gate", "up"))):
            parts = [weights.pop(f"{owner}{name}_proj.weight") for name in names]
            weights[f"{owner}{fused}_proj.weight"] = torch.cat(parts)
    b.load_state_dict(weights)
    assert diff(llama, b.eval(), batch).equal
    b.model.layers[1].self_attn.qkv_proj.weight.data[32:48] *= 1.3  # the keys, after 32 rows of queries
    b.model.layers[2].mlp.gate_up_proj.weight.data[48:] *= 2
    result = diff(llama, b, batch)
    assert result.causes[0] == "k_proj.weight is A's times 1.3: scaled"
    assert result.notes[-1] == "block 3, MLP: up_proj.weight is A's times 2: scaled"


@pytest.mark.parametrize(
    ("heads", "groups"), [(4, 4), (4, 2), (4, 1)], ids=["q k v of a head", "a group's queries, k, v", "one key"]
)
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_fused_projection_is_split_as_its_rows_are_ordered(heads, groups, kind):
    sizes = [8 * heads, 8 * groups, 8 * groups]
    parts = [torch.randn((n, 5) if kind == "weight" else n) for n in sizes]
    fused = torch.cat([x.unflatten(0, (groups, -1)) for x in parts], 1).flatten(0, 1)
    split = {f"{name}.{kind}": x for name, x in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True)}
    spoiled = split | {f"v_proj.{kind}": 2 * parts[2]}
    for other in (split, spoiled):
        found, same = aligned({f"query_key_value.{kind}": fused}, other, 8)
        assert same == other and all(torch.equal(found[name], x) for name, x in split.items())


def test_a_lora_is_compared_as_the_weight_that_it_acts_as(llama, batch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    wrapped = peft.get_peft_model(copy.deepcopy(llama), config)
    assert diff(llama, wrapped, batch).equal  # B is zero at the start
    layer = wrapped.base_model.model.model.layers[2].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B.default.weight)
    assert "q_proj.weight has a change of rank 2: a LoRA?" in diff(llama, wrapped, batch).causes[0]
    weight = llama.model.layers[2].self_attn.q_proj.weight
    weight = weight + 3 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    by_hand = copy.deepcopy(llama)
    by_hand.model.layers[2].self_attn.q_proj.weight.data = 1.5 * weight.detach()
    assert diff(wrapped, by_hand, batch).causes[0] == "q_proj.weight is A's times 1.5: scaled"


def test_a_lora_layer_is_known_by_the_names_of_its_parts():
    class Lora(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.scaling = linear, 0.5
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(8, 2))

    module = nn.ModuleDict({"q_proj": Lora(nn.Linear(6, 8)), "o_proj": nn.Linear(8, 6)})
    found = merged(module, dict(module.named_parameters()))
    layer: Any = module["q_proj"]
    assert found.keys() == {"q_proj.weight", "q_proj.bias", "o_proj.weight", "o_proj.bias"}
    assert torch.equal(found["q_proj.weight"], layer.base_layer.weight + 0.5 * layer.lora_B @ layer.lora_A)



# -- blocks that the batch does not reach ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    """Its block 2 runs only with an image, as Mllama's for images; or it is called aside, so that no hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: torch.Tensor, image: bool = False, aside: bool = False) -> torch.Tensor:
        x = self.embed(input_ids)
        for number, block in enumerate(self.layers):
            if number != 1 or image:
                x = block(x)
            elif aside:
                x = block.forward(x)
        return self.head(x)


def test_blocks_that_neither_model_runs_are_left_out_and_what_no_hook_sees_is_refused() -> None:
    torch.manual_seed(0)
    model = Reader().eval()
    other = copy.deepcopy(model)
    other.layers[2].mlp[0].weight.data *= 1.5
    ids = torch.randint(3, 64, (2, 9))
    assert roles_of(model, {"input_ids": ids}).blocks == ("layers.0", "layers.2", "layers.3")
    found = diff(model, other, {"input_ids": ids})
    assert found.first == Site("mlp_out", 2) and found.table["layer"].max() == 4  # three blocks ran, then the logits
    assert diff(model, copy.deepcopy(model), {"input_ids": ids}).equal and "forward" not in vars(model.layers[0])
    with_image = diff(model, other, {"input_ids": ids, "image": True})
    assert with_image.table["layer"].max() == 5
    with pytest.raises(NormlabError, match="did not run in the model's pass, or was not called as a module"):
        diff(model, other, {"input_ids": ids, "aside": True})


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.attn(self.norm(x))
        x += self.mlp(self.norm2(x))
        return x


class Uncounted(Block):
    """Writes in place as a kernel does that PyTorch does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data += self.attn(self.norm(x))
        x.data += self.mlp(self.norm2(x))
        return x


@pytest.mark.parametrize("surrounding", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("kind", [InPlace, Uncounted])
def test_what_blocks_write_in_place_is_kept_as_it_was(kind, surrounding, tmp_path) -> None:
    torch.manual_seed(0)
    model, batch, found = Reader().eval(), {"input_ids": torch.randint(3, 64, (2, 9))}, []
    for name in ("plain", "in place"):
        with surrounding():
            write_arrays(model, batch, tmp_path / f"{name}.safetensors")
        found.append(read_arrays(tmp_path / f"{name}.safetensors"))
        for block in model.layers:
            block.__class__ = kind
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    assert all(torch.equal(x, found[1][site]) for site, x in found[0].items())
    other = copy.deepcopy(model)
    other.layers[2].mlp[0].weight.data *= 1.5
    with surrounding():
        assert diff(model, other, batch).first == Site("mlp_out", 2)
