"""Cached decoding, generation, padding and packing: one token's logits, whichever way they are computed."""

from functools import cache

import pytest
import torch
from model_helpers import (
    LLAMA,
    assert_bits,
    assert_near,
    cached,
    carrying_case,
    every_case,
    every_registered,
    every_scheme,
    lively,
    stepwise,
    tiny_model,
    tokens,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from normlab.schemes import STUDIED

# One of each kind of norm and of layout; the others when asked for.
SOME = ("pre_layernorm", "post_rmsnorm", "dyt", "bhyt")


@every_registered
def test_cached_decoding_equals_the_full_forward(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens(2, 16)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    assert full.abs().max() < 20 or scheme not in STUDIED
    limit = 1e-5 if scheme in STUDIED else 2e-5 * full.abs().max()
    for prompt, chunk in ((1, 1), (4, 4)):
        assert (stepwise(model, ids, prompt, chunk) - full).abs().max() < limit, (prompt, chunk)


@carrying_case
def test_cached_decoding_in_a_static_cache_equals_the_full_forward(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens(2, 12)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    assert (stepwise(model, ids, 5, cache=cache) - full).abs().max() < 1e-5


def decoding_gap(build) -> float:
    """Root mean square of cached minus full logits over that of the logits, in bf16, over eight weight draws."""
    gaps = []
    for seed in range(8):
        model, ids = build(seed).bfloat16().eval(), torch.cat([tokens(2, 16, seed=row) for row in range(4)])
        with torch.no_grad():
            stepped, full = stepwise(model, ids, 4).double(), model(ids, use_cache=False).logits.double()
        gaps.append((stepped - full).square().mean() / full.square().mean())
    return torch.stack(gaps).mean().sqrt().item()


def stock_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return lively(LlamaForCausalLM(LlamaConfig(**LLAMA)), seed)


@cache
def stock_gap() -> float:
    return decoding_gap(stock_llama)


@pytest.mark.parametrize(  # bfloat16 takes long where it is emulated
    "scheme", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in STUDIED]
)
def test_bf16_decoding_is_no_further_from_the_full_forward_than_stock_llama_is(scheme):
    """bf16 matrix products round differently for one token than for many, in stock Llama too; a norm adds nothing.

    Both gaps are near one rounding of bf16 (0.008) and vary by a tenth between weight draws. Averaged, every scheme is
    at or below stock Llama but Peri-LN. Peri-LN has twice the norms to round at, and 1.05 times the gap. The allowance
    is for it and for other processors' bf16 products.
    """
    stock, ours = stock_gap(), decoding_gap(lambda seed: tiny_model(scheme, seed=seed))
    assert 0 < ours <= 1.15 * stock, (ours, stock)


@every_scheme
def test_generate_writes_what_argmax_over_full_forwards_writes(scheme):
    model, prompt = tiny_model(scheme), tokens(2, 5)
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            last = model(expected, use_cache=False).logits[:, -1]
            expected = torch.cat([expected, last.argmax(-1, keepdim=True)], dim=1)
    mask = torch.ones_like(prompt)
    for fields in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        assert_bits(model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, **fields), expected)
    assert model.generate(prompt, attention_mask=mask, max_new_tokens=3, num_beams=2, do_sample=False).shape == (2, 8)


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths in one batch, padded on the left with id 0, and their mask."""
    longest = max(row.numel() for row in rows)
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, longest - row.numel() :] = row
        mask[index, longest - row.numel() :] = 1
    return ids, mask


@every_registered
def test_padding_changes_nothing_for_the_real_tokens(scheme, extra):
    model = tiny_model(scheme, **extra)
    rows = [tokens(1, 11, seed=1)[0], tokens(1, 4, seed=2)[0], tokens(1, 7, seed=3)[0]]
    ids, mask = left_padded(rows)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, use_cache=False).logits
        decoded = stepwise(model, ids, 8, mask=mask)
        for index, row in enumerate(rows):
            alone = model(row[None]).logits[0]
            assert_near(batch[index, -row.numel() :], alone, 1e-5, f"row {index}, at once")
            assert_near(decoded[index, -min(row.numel(), 3) :], alone[-3:], 1e-5, f"row {index}, through the cache")
        on_the_right = model(rows[1].repeat(1, 2), attention_mask=torch.tensor([[1] * 4 + [0] * 4])).logits
        assert_near(on_the_right[0, :4], model(rows[1][None]).logits[0], 1e-5)


@carrying_case
def test_generate_from_left_padded_prompts_writes_what_it_writes_without_padding(scheme, extra):
    model = tiny_model(scheme, **extra)
    rows = [tokens(1, 9, seed=4)[0], tokens(1, 3, seed=5)[0]]
    ids, mask = left_padded(rows)
    written = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for index, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones(1, row.numel()), max_new_tokens=5, do_sample=False)
        assert_bits(written[index, 9:], alone[0, row.numel() :])


@every_case
def test_packed_documents_with_their_own_positions_are_as_if_alone(scheme, extra):
    model, ids = tiny_model(scheme, **extra), tokens(2, 12)
    lengths = (5, 4, 3)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, 12)
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(piece).logits for piece in ids.split(lengths, dim=1)]
    assert_near(packed, torch.cat(alone, dim=1), 1e-5)


@carrying_case
def test_a_token_far_into_the_text_uses_its_own_position(scheme, extra):
    """Prefill from an offset: positions come from the cache or the caller, not from 0."""
    model, ids = tiny_model(scheme, **extra), tokens(1, 20)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        full = model(ids).logits
        cached(model, ids[:, :15], cache)
        explicit = torch.arange(15, 20)[None]
        assert_near(cached(model, ids[:, 15:], cache, position_ids=explicit), full[:, 15:], 1e-5)


def test_mask_positions_are_counted_for_the_causal_statistic_only():
    """Elsewhere stock Llama's positions stay, so that pre_rmsnorm keeps its bits whatever the unused fields say."""
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 5)[0]])
    plain = tiny_model("pre_rmsnorm")
    named = tiny_model("pre_rmsnorm", carried="causal")
    assert_bits(named(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)


@every_scheme
def test_given_embeddings_stand_for_the_tokens_they_come_from(scheme):
    model, ids = tiny_model(scheme), tokens()
    embeddings = model.get_input_embeddings()(ids)
    assert_bits(model(inputs_embeds=embeddings).logits, model(ids).logits)
    mask = torch.ones_like(ids)
    written = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert_bits(written, model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)[:, ids.shape[1] :])


def test_the_backbone_takes_a_cache_where_llama_takes_it():
    model, ids = tiny_model("bhyt").model, tokens()
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    found = model(ids, None, None, caches[0]).last_hidden_state
    assert_bits(found, model(ids, past_key_values=caches[1]).last_hidden_state)
    assert [cache.get_seq_length() for cache in caches] == [ids.shape[1]] * 2
