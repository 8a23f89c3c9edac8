"""Tokens that count: masks by other names, PyTorch's, wrappers, rows and tokens that change places, positions that
do not begin with 0. What cannot be told is not counted as if it could."""

import contextlib
from itertools import accumulate

import pytest
import torch
from probe_toys import WIDTH, PreLN, Stack, X, size
from probe_zoo import near, tiny_llama, values
from torch import nn
from transformers import DynamicCache

from normlab import (
    NormlabConfig,
    NormlabForCausalLM,
    angular_distance,
    attention_sinks,
    logit_lens_kl,
    massive_activations,
    observe,
    skip_future_effect,
    skip_sensitivity,
)
from normlab.errors import NormlabError
from normlab.probes import record, sites
from normlab.probes.call_tokens import CallTokens
from normlab.probes.sites import stacks

ROWS, LENGTH = 3, 6
SIZE = ["token_l2_mean", "massive_activation_ratio"]
IDS = torch.randint(1, 20, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
PADDING = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
PADDING[0, 3:] = PADDING[1, :2] = True
FIRST = (~PADDING).long().cumsum(1) == 1


class Text(nn.Module):
    """Tokens in; a huge vector for each token that is padding or the first of its row, so that a mistake shows."""

    def __init__(self, turned=False, unembed=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.turned, self.unembed = nn.Embedding(24, WIDTH), Stack(PreLN, PreLN), turned, unembed
        with torch.no_grad():
            self.embed.weight[0] *= 900
            self.embed.weight[20] *= 40

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        h = self.body(h.transpose(0, 1).contiguous()).transpose(0, 1) if self.turned else self.body(h)
        return h.mean(1) if self.unembed else h


def padded(ids=IDS, padding=PADDING):
    first = (~padding).long().cumsum(1) == 1
    return ids.masked_fill(padding, 0).masked_fill(first & ~padding, 20)


def sizes(where, *args, mask=None, **kwargs):
    """(block_out 0 over all tokens, without the first), and what is absent."""
    with record(where, SIZE, mask=mask) as rec, torch.no_grad():
        rec.sites.model(*args, **kwargs)
    found = values(rec.stats())
    return [found.get(("block_out", 0, "token_l2_mean", name)) for name in ("all", "no_first")], rec.absent


def expected(vectors, real=~PADDING, first=FIRST):
    """The same from (batch, length, width)."""
    return [size(vectors[real]), size(vectors[real & ~first])]


# -- masks by other names ----------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Unknown names; what it hands to the model is given by name or by position, or made here."""

    def __init__(self, how):
        super().__init__()
        self.how, self.inner = how, Text()

    def forward(self, tokens, pad, batch=None):
        if self.how == "by position":
            return self.inner(tokens, pad)
        if self.how == "nested":
            return self.inner(input_ids=batch["t"], attention_mask=batch["m"][0])
        if self.how == "made":
            return self.inner(input_ids=tokens, attention_mask=(tokens != 0).long())
        if self.how == "unused":
            return self.inner(input_ids=tokens)
        return self.inner(input_ids=tokens, attention_mask=pad)


@pytest.mark.parametrize("how", ["by name", "by position", "nested"])
def test_what_a_wrapper_hands_on_under_a_known_name_is_that(how):
    model, ids = Wrapper(how), padded()
    given = {"batch": {"t": ids, "m": [(~PADDING).long()]}, "tokens": ids[:1], "pad": None} if how == "nested" else {}
    found, absent = sizes(model, **(given or {"tokens": ids, "pad": (~PADDING).long()}))
    assert found == expected(model.inner.embed(ids)) and not absent


@pytest.mark.parametrize(("how", "name"), [("made", "attention_mask"), ("unused", "pad")])
def test_a_mask_that_is_not_known_is_named_and_can_be_given(how, name):
    model, ids, real = Wrapper(how), padded(), (~PADDING).long()
    _, absent = sizes(model, ids, real)
    assert f"give mask='{name}'" in absent[f"padding by {name}"]
    for mask in ("pad", lambda call: call.arguments["pad"], lambda call: call.arguments["tokens"] != 0):
        found, absent = sizes(model, ids, real, mask=mask)
        assert found == expected(model.inner.embed(ids)) and not absent
    where = sites(model, mask="pad")
    assert sizes(where, ids, real)[0] == expected(model.inner.embed(ids))
    batches = [{"tokens": ids, "pad": real}]
    angle = angular_distance(where, batches, progress=False).loc[0, 1]
    everything = angular_distance(sites(model, mask=lambda call: None), batches, progress=False).loc[0, 1]
    assert angle != everything
    with pytest.raises(NormlabError, match=r"no mask was given by a known name: .*sites\(model"):
        angular_distance(model, batches, progress=False)


def test_an_observed_loop_takes_the_mask_too():
    model, ids, real = Wrapper("unused"), padded(), (~PADDING).long()
    with observe(model, every=1, metrics=["token_l2_mean"], mask="pad") as observer, torch.no_grad():
        model(ids, real)
        observer.step(0.0, 0)
    table = observer.to_pandas().query("site == 'block_out' and layer == 0 and mask == 'all'")["value"]
    assert table.iloc[0] == size(model.inner.embed(ids)[~PADDING])


@pytest.mark.parametrize("value", ["no padding", "types", "weights"])
def test_what_is_no_mask_is_not_named(value):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Text()

        def forward(self, input_ids, other=None, token_type_ids=None):
            return self.inner(input_ids)

    other = {"no padding": torch.ones_like(IDS), "types": None, "weights": torch.rand(ROWS, LENGTH)}[value]
    types = (IDS > 9).long() if value == "types" else None
    assert not sizes(Other(), IDS, other=other, token_type_ids=types)[1]


class Pair(nn.Module):
    """Two texts, one after the other, as in a bi-encoder or a reward model."""

    def __init__(self):
        super().__init__()
        self.encoder = Text(unembed=True)

    def forward(self, query, query_mask, passage, passage_mask):
        return self.encoder(query, query_mask) @ self.encoder(input_ids=passage, attention_mask=passage_mask).T


def test_the_second_text_of_a_bi_encoder_is_a_call_of_its_own():
    model, ids = Pair(), padded()
    longer = torch.cat([ids, ids[:, :2]], 1)
    mask = torch.ones_like(longer)
    mask[:, 5:] = 0
    with record(model, ["token_l2_mean", "grad_l2_total"], loss_tokens=1) as rec:
        model(ids, (~PADDING).long(), longer, mask).sum().backward()
    stats, embed = rec.stats(), model.encoder.embed
    assert stats.manifest["layers"] == 2 and stats.manifest["forward_passes"] == 2
    both = torch.cat([embed(ids)[~PADDING], embed(longer)[mask.bool()]])
    assert values(stats)["block_out", 0, "token_l2_mean", "all"] == size(both)


class Several(nn.Module):
    """Runs its stack more than once in a call. The loss is of all tokens."""

    def __init__(self, how):
        super().__init__()
        self.how, self.encoder = how, Text()
        self.head = nn.Linear(WIDTH, 24)

    def hidden(self, ids, mask):
        embed, body = self.encoder.embed, self.encoder.body
        if self.how == "whole":
            return self.encoder(ids, mask)
        if self.how == "halves":
            return torch.cat([body(embed(part)) for part in ids.chunk(2)])
        if self.how == "modules":
            return torch.cat([self.encoder(*part) for part in zip(ids.chunk(2), mask.chunk(2), strict=True)])
        if self.how == "retry":
            with contextlib.suppress(TypeError):
                body.layers[1](body.layers[0](embed(ids)), None)
            return body(embed(ids))
        if self.how == "same":
            return (self.encoder(ids, mask) + self.encoder(ids, mask)) / 2
        return body(body(embed(ids)) + embed.weight[1])  # recurrent

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.hidden(input_ids, attention_mask))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


FOUR = torch.randint(1, 20, (4, LENGTH), generator=torch.Generator().manual_seed(5))
FOUR_PADDED = torch.cat([PADDING, PADDING[:1].flip(1)])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["halves", "modules", "retry"])
def test_parts_of_a_batch_in_one_call_are_passes_and_no_further_layers(how, frozen):
    tables, padding = [], torch.zeros_like(FOUR_PADDED) if how == "halves" else FOUR_PADDED
    mask = None if how == "halves" else (~padding).long()
    for one in ("whole", how):
        model = Several(one).requires_grad_(not frozen)
        with record(model, ["rms", "grad_l2_total"], masks=["all"]) as rec:
            rec.backward(model(padded(FOUR, padding), mask, FOUR)["loss"])
        tables.append(values(rec.stats()))
    assert tables[1] == near(tables[0]) and rec.stats().manifest["layers"] == 2
    assert rec.stats().manifest["forward_passes"] == (1 if how == "retry" else 2)


@pytest.mark.parametrize("grad", [False, True])
def test_one_text_twice_in_a_call_has_its_mask_in_both_passes(grad):
    model, ids = Several("same"), padded()
    with torch.set_grad_enabled(grad), record(model, SIZE) as rec:
        model(ids, (~PADDING).long())
    found = [values(rec.stats())["block_out", 0, "token_l2_mean", name] for name in ("all", "no_first")]
    assert found == expected(model.encoder.embed(ids)) and rec.stats().manifest["layers"] == 2


@pytest.mark.parametrize("grad", [False, True])
def test_what_descends_from_the_last_output_is_a_further_layer_and_what_may_is_one_with_a_note(grad):
    model = Several("recurrent")
    with torch.set_grad_enabled(grad), record(model, SIZE) as rec:
        model(IDS)
    assert rec.stats().manifest["layers"] == 4
    assert ("layers from 3 on" in rec.absent) != grad


def test_parts_of_a_batch_with_padding_that_nothing_names_are_refused():
    with pytest.raises(NormlabError, match="attention_mask is|call it once for each"):
        sizes(Several("halves"), padded(FOUR, FOUR_PADDED), (~FOUR_PADDED).long())


# -- PyTorch's own stacks ----------------------------------------------------------------------------------------------


def encoder(batch_first, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=True, **options)
    return nn.TransformerEncoder(layer, 2).train()


VECTORS = Text().embed(padded()).detach()


@pytest.mark.parametrize("float_mask", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_pytorchs_padding_mask_is_true_or_minus_infinity_at_padding(batch_first, float_mask):
    x = VECTORS if batch_first else VECTORS.transpose(0, 1)
    mask = torch.zeros(ROWS, LENGTH).masked_fill(PADDING, -torch.inf) if float_mask else PADDING
    found, absent = sizes(encoder(batch_first), x, src_key_padding_mask=mask)
    assert found == expected(VECTORS) and not absent
    batch = [{"src": x, "src_key_padding_mask": mask}]
    real = ~PADDING if batch_first else ~PADDING.T
    kept = [x, *(encoder(batch_first).layers[0](x, src_key_padding_mask=mask) for _ in range(1))]
    cosine = torch.cosine_similarity(*(h[real].double() for h in kept), -1).arccos().mean() / torch.pi
    if batch_first:
        found = angular_distance(encoder(True), batch, progress=False).loc[0, 1]
        assert found == pytest.approx(float(cosine), rel=1e-3)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_rows_of_pytorchs_stacks_are_told_by_their_attention(batch_first, square):
    x = torch.randn(LENGTH, LENGTH if square else ROWS, WIDTH)
    x[0] *= 40  # a massive first token
    found, absent = sizes(encoder(batch_first), x.transpose(0, 1) if batch_first else x)
    assert found == [size(x), size(x[1:])] and not absent


def test_an_encoder_and_a_decoder_of_pytorch_have_each_its_own_mask():
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True).train()
    source, target = VECTORS, torch.cat([VECTORS, VECTORS], 1)
    late = torch.zeros(ROWS, 2 * LENGTH, dtype=torch.bool)
    late[:, 7:] = True
    masks = {"src_key_padding_mask": PADDING, "tgt_key_padding_mask": late, "memory_key_padding_mask": PADDING}
    found = stacks(model)
    assert sizes(found["encoder.layers"], source, target, **masks)[0][0] == size(source[~PADDING])
    assert sizes(found["decoder.layers"], source, target, **masks)[0][0] == size(target[~late])


# -- tokens that are (length, batch) -----------------------------------------------------------------------------------


class Sequences(nn.Module):
    """Tokens are (length, batch), as in PyTorch's tutorials; blocks take that, or (batch, length)."""

    def __init__(self, batch_first=False, hides=False):
        super().__init__()
        self.embed, self.encoder = Text().embed, encoder(batch_first).eval()
        self.batch_first, self.head = batch_first, nn.Linear(WIDTH, 24)
        if hides:
            for layer in self.encoder.layers:
                layer._sa_block = lambda x, *_, **__: x

    def forward(self, src, attention_mask=None, src_key_padding_mask=None):
        h = self.embed(src)
        h = h.transpose(0, 1) if self.batch_first else h
        return self.head(self.encoder(h, src_key_padding_mask=src_key_padding_mask))


class Named(Sequences):
    def forward(self, input_ids, attention_mask=None, src_key_padding_mask=None):
        return super().forward(input_ids, attention_mask, src_key_padding_mask)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [Sequences, Named])
@pytest.mark.parametrize("rows", [ROWS, LENGTH])
def test_tokens_that_are_length_first_are_told_by_what_attention_reads(kind, batch_first, rows):
    model = kind(batch_first).requires_grad_(False)
    ids = torch.randint(1, 9, (LENGTH, rows), generator=torch.Generator().manual_seed(5))
    ids[0], ids[2, 1] = 20, 20
    with record(model, [*SIZE, "attention_entropy"]) as rec:
        model(ids)
        model(ids)  # the first call has told
    found, vectors = values(rec.stats()), model.embed(ids)
    assert rec.absent.keys() <= {"attention 1", "attention 2"}  # the fast path's
    for name, kept in (("all", vectors.flatten(0, 1)), ("no_first", vectors[1:].flatten(0, 1))):
        peaks = kept.abs().amax(0).double()
        ratio = found["block_out", 0, "massive_activation_ratio", name]
        assert found["block_out", 0, "token_l2_mean", name] == size(kept)
        assert ratio == pytest.approx(float(peaks.max() / peaks.median()), rel=1e-5)
    if not batch_first:
        layer = model.encoder.layers[0]
        h = layer.norm1(vectors)
        weights = layer.self_attn(h, h, h, average_attn_weights=False)[1].double()  # (batch, heads, queries, keys)
        entropy = torch.special.entr(weights).sum(-1)[:, :, 1:].mean()
        assert found["attn", 1, "attention_entropy", "no_first"] == pytest.approx(float(entropy), rel=1e-5)


@pytest.mark.parametrize("name", ["attention_mask", "src_key_padding_mask"])
def test_padding_of_length_first_tokens_is_that_or_by_row_as_pytorchs(name):
    model, ids = Named(), padded()
    mask = (~PADDING).long().T if name == "attention_mask" else PADDING
    found, absent = sizes(model, ids.T, **{name: mask})
    assert found == expected(model.embed(ids)) and not absent
    square, late = torch.cat([ids, ids.flip(0)]), torch.cat([PADDING, PADDING.flip(0)])
    if name == "src_key_padding_mask":
        firsts = (~late).long().cumsum(1) == 1
        assert sizes(model, square.T, src_key_padding_mask=late)[0] == expected(model.embed(square), ~late, firsts)
    else:
        with pytest.raises(NormlabError, match="whether the mask is"):
            sizes(model, square.T, attention_mask=(~late).long().T)


def test_tokens_are_not_told_where_attention_that_takes_length_first_does_not_run():
    model = Named(hides=True)
    found, absent = sizes(model, IDS)
    assert found == [size(model.embed(IDS)), None] and "batch_first=True" in absent["mask no_first"]
    for experiment in (angular_distance, skip_sensitivity):
        with pytest.raises(NormlabError, match="batch_first=True"):
            experiment(model, [{"input_ids": IDS}], progress=False)


@pytest.mark.parametrize("rows", [ROWS, LENGTH])
def test_experiments_on_length_first_tokens_predict_along_the_length_or_refuse(rows):
    model, ids = Named(), torch.randint(1, 9, (LENGTH, rows), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[4:, 0] = 0
    with torch.no_grad():
        logits = model(ids)
    for given, counted in (({}, torch.ones_like(mask)), ({"attention_mask": mask}, mask)):
        if rows == LENGTH and given:
            continue
        losses = nn.functional.cross_entropy(logits[:-1].flatten(0, 1), ids[1:].flatten(), reduction="none")
        right = losses[counted[1:].flatten() > 0].mean()
        for labels in ({}, {"labels": ids.masked_fill(counted == 0, -100)}):
            table = skip_sensitivity(model, [{"input_ids": ids} | labels | given], progress=False)
            assert table["loss"].iloc[0] == pytest.approx(float(right), rel=1e-5)
            assert table["tokens"].iloc[0] == counted[1:].sum()
    for experiment in (angular_distance, logit_lens_kl, skip_future_effect):
        with pytest.raises(NormlabError, match=r"the blocks hold \(length, batch, width\)"):
            experiment(model, [{"input_ids": ids}], progress=False)
    for search in (massive_activations, attention_sinks):
        with pytest.raises(NormlabError, match=r"the blocks hold \(length, batch, width\)"):
            search(model, {"input_ids": ids})


# -- rows that change places -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [ROWS, LENGTH])
def test_rows_are_told_by_the_tokens_where_there_are_as_many_as_tokens(turned, rows):
    model, ids = Text(turned), torch.randint(1, 9, (rows, LENGTH), generator=torch.Generator().manual_seed(5))
    ids[:, 0] = 20
    real, first = torch.ones_like(ids).bool(), torch.zeros_like(ids).bool()
    first[:, 0] = True
    found, absent = sizes(model, ids)
    assert found == expected(model.embed(ids), real, first) and not absent
    mask = real.clone()
    mask[1, 3:] = False
    found, absent = sizes(model, ids, mask.long())
    assert found == expected(model.embed(ids), mask, first) and not absent


def test_experiments_refuse_tokens_under_a_name_of_their_own_that_the_model_turns():
    class Turning(Text):
        def forward(self, src):
            h = nn.functional.embedding(src, self.embed.weight)
            return self.body(h.transpose(0, 1)).transpose(0, 1) if self.turned else self.body(h)

    batches = [{"src": IDS}]
    assert angular_distance(Turning(), batches, tokens="last", progress=False).notna().all(axis=None)
    with pytest.raises(NormlabError, match=r"the blocks hold \(length, batch, width\)"):
        angular_distance(Turning(True), batches, tokens="last", progress=False)


def test_experiments_take_rows_that_nothing_tells_for_batch_and_length():
    features, square = torch.randn(3, 5, WIDTH), {"input_ids": torch.arange(1, 10).view(3, 3)}
    for model, batch in ((Stack(PreLN, PreLN), {"x": features}), (Text(), square)):
        rest = {name: x[:, 1:] for name, x in batch.items()}  # its blocks compute token by token
        found = angular_distance(model, [batch], tokens="no_first", progress=False)
        assert (found - angular_distance(model, [rest], progress=False)).abs().max(axis=None) < 1e-6
    masked = square | {"attention_mask": torch.ones(3, 3)}
    masked["attention_mask"][1, 2] = 0
    assert angular_distance(Text(), [masked], progress=False).notna().all(axis=None)


def test_experiments_refuse_padding_under_an_unknown_name_of_a_later_batch():
    late = [{"tokens": torch.arange(1, 7).view(2, 3), "pad": pad} for pad in torch.ones(2, 2, 3)]
    late[1]["pad"][0, 2] = 0

    class Padded(Text):
        def forward(self, tokens, pad):
            return super().forward(tokens)

    with pytest.raises(NormlabError, match="give mask='pad'"):
        angular_distance(Padded(), late, progress=False)


def test_rows_that_nothing_tells_keep_what_does_not_depend_on_them():
    model, ids = Text(), torch.arange(1, 10).view(3, 3)
    found, absent = sizes(model, ids)
    assert found == [size(model.embed(ids)), None] and "cannot be told" in absent["mask no_first"]
    mask = torch.ones(3, 3)
    mask[0, 2] = 0
    with pytest.raises(NormlabError, match="as many rows as tokens in a row, 3"):
        sizes(model, ids, mask)
    found, absent = sizes(Stack(PreLN, PreLN), X)
    assert found == [size(X), None] and "cannot be told" in absent["mask no_first"]


def test_tokens_under_a_name_of_their_own_tell_the_rows():
    class Named(Text):
        def forward(self, tokens):
            return super().forward(tokens)

    for turned in (False, True):
        model, ids = Named(turned), padded(padding=torch.zeros_like(PADDING))
        assert sizes(model, ids)[0] == [size(model.embed(ids)), size(model.embed(ids)[:, 1:])]


@pytest.mark.parametrize("form", ["float", "additive", "finite", "by query", "by key", "boolean by query"])
def test_a_mask_may_be_added_to_scores_and_have_queries(form):
    ids, real = padded(), (~PADDING).float()
    additive = torch.zeros_like(real).masked_fill(PADDING, -torch.inf)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = {
        "float": real,
        "additive": additive,
        "finite": additive.clamp_min(-1e9),
        "by query": additive[:, None, None] + torch.zeros(LENGTH, LENGTH).masked_fill(~causal, -torch.inf),
        "by key": additive[:, None, None],
        "boolean by query": (~PADDING)[:, None, None] & causal,
    }[form]
    model = Text()
    assert sizes(model, ids, mask)[0] == expected(model.embed(ids))


class Remembering(Text):
    def forward(self, input_ids, cache=None, position_ids=None):
        return super().forward(input_ids)


@pytest.mark.parametrize("cache", [False, [], object()])
def test_first_tokens_are_left_out_where_a_cache_may_hold_them(cache):
    model, ids = Remembering(), padded(padding=torch.zeros_like(PADDING))
    found, absent = sizes(model, ids, cache=cache)
    every, others = size(model.embed(ids)), size(model.embed(ids)[:, 1:])
    is_known = cache in (False, [])
    assert found == [every, others if is_known else None]
    assert is_known or "the cache does not say" in absent["mask no_first"]
    assert sizes(model, ids, cache=cache, position_ids=torch.arange(LENGTH))[0] == [every, others]


def test_padding_is_read_where_a_static_cache_has_the_mask_of_its_queries():
    model, ids = tiny_llama().eval(), padded()
    tables = []
    for kind in ("dynamic", "static"):
        with record(model, ["rms"]) as rec, torch.no_grad():
            model.generate(ids, attention_mask=(~PADDING).long(), max_new_tokens=2, do_sample=False, pad_token_id=0,
                           cache_implementation=kind)  # fmt: skip
        tables.append(rec.stats().to_pandas(errors=True).query("site == 'block_out'")["tokens"].tolist())
    assert tables[0] == tables[1]


# -- positions ---------------------------------------------------------------------------------------------------------


class Placed(Text):
    def forward(self, input_ids, position_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize("way", ["halves", "zigzag", "packed", "three axes"])
def test_a_first_token_is_one_at_position_0_where_the_caller_gives_positions(way):
    model, ids = Placed(), torch.randint(1, 20, (2, 12))
    order = torch.arange(12)
    if way == "packed":
        chunks, positions = [ids], [torch.cat([torch.arange(5), torch.arange(7)])]
    else:
        parts = {"halves": [order[:6], order[6:]], "zigzag": [order[[0, 1, 2, 9, 10, 11]], order[3:9]]}
        positions = parts.get(way, [order[:6], order[6:]])
        chunks = [ids[:, at] for at in positions]
    with record(model, SIZE) as rec, torch.no_grad():
        for chunk, at in zip(chunks, positions, strict=True):
            given = at.expand(3, *chunk.shape) if way == "three axes" else at.expand(*chunk.shape)
            model(input_ids=chunk, position_ids=given)
    pairs = zip(chunks, positions, strict=True)
    kept = torch.cat([model.embed(chunk)[:, at != 0].flatten(0, 1) for chunk, at in pairs])
    assert values(rec.stats())["block_out", 0, "token_l2_mean", "no_first"] == size(kept)
    peaks = kept.abs().amax(0)
    found = values(rec.stats())["block_out", 0, "massive_activation_ratio", "no_first"]
    assert found == pytest.approx(float(peaks.max() / peaks.double().median()), rel=1e-5)


class Keeping(Text):
    """A model that keeps its cache itself, and is told where a call goes on."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **where):
        return super().forward(input_ids, attention_mask)


PLACES = {
    "a number": lambda at, ids: at,
    "a tensor's number": lambda at, ids: torch.tensor(at),
    "a list of one": lambda at, ids: torch.tensor([at]),
    "of one row": lambda at, ids: at + torch.arange(ids.shape[1]),
    "of all rows": lambda at, ids: (at + torch.arange(ids.shape[1])).expand(ids.shape),
}


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize("name", ["input_pos", "start_pos", "cache_position", "positions"])
def test_a_call_that_goes_on_has_no_first_token(name, way):
    if (name, way) == ("positions", "a list of one"):
        return
    model, ids, lengths = Keeping(), torch.randint(1, 20, (ROWS, 12)), [5, 5, 1, 1]
    with record(model, SIZE) as rec, torch.no_grad():
        for at, chunk in zip(accumulate([0, *lengths]), ids.split(lengths, 1), strict=False):
            model(chunk, **{name: PLACES[way](at, chunk)})
    found, vectors = values(rec.stats()), model.embed(ids)
    assert found["block_out", 0, "token_l2_mean", "no_first"] == size(vectors[:, 1:])
    assert found["block_out", 0, "token_l2_mean", "all"] == size(vectors) and not rec.absent


def test_the_first_token_of_a_padded_row_is_not_its_first_place_in_a_cache():
    model, ids, mask = Keeping(), padded(), (~PADDING).long()
    places = torch.arange(LENGTH)
    assert sizes(model, ids, mask, cache_position=places)[0] == expected(model.embed(ids))
    later = torch.cat([mask, torch.ones(ROWS, 1, dtype=torch.long)], 1)
    with record(model, SIZE) as rec, torch.no_grad():
        model(ids, mask, input_pos=places)
        model(IDS[:, :1], later, input_pos=torch.tensor([LENGTH]))
    kept = torch.cat([model.embed(ids)[~PADDING & ~FIRST], model.embed(IDS[:, 0])])
    assert values(rec.stats())["block_out", 0, "token_l2_mean", "no_first"] == size(kept)


@pytest.mark.parametrize("begin", [1, 2])
def test_positions_that_begin_beside_0_do_not_tell_the_first_token(begin):
    model, ids = Keeping(), padded(padding=torch.zeros_like(PADDING))
    for positions in (begin + torch.arange(LENGTH), (begin + torch.arange(LENGTH)).expand(ROWS, -1)):
        found, absent = sizes(model, ids, position_ids=positions)
        assert found == [size(model.embed(ids)), None] and "do not begin at 0" in absent["mask no_first"]
    roberta = ((~PADDING).long().cumsum(1) + 1).masked_fill(PADDING, 1)
    found, absent = sizes(model, padded(), (~PADDING).long(), position_ids=roberta)
    assert found == [size(model.embed(padded())[~PADDING]), None] and "do not begin at 0" in absent["mask no_first"]
    left = ((~PADDING).long().cumsum(1) - 1).masked_fill(PADDING, 1)
    assert sizes(model, padded(), (~PADDING).long(), position_ids=left)[0] == expected(model.embed(padded()))


@pytest.mark.parametrize("way", ["all rows", "one row", "three axes", "padding at 0"])
def test_positions_that_count_the_padding_before_a_row_tell_its_first_token(way):
    model, mask, order = Keeping(), (~PADDING).long(), torch.arange(LENGTH)
    shapes = {"one row": order[None], "three axes": order.expand(3, ROWS, -1), "padding at 0": order * mask}
    positions = shapes.get(way, order.expand(ROWS, -1))
    assert sizes(model, padded(), mask, position_ids=positions) == (expected(model.embed(padded())), {})
    late = torch.zeros_like(PADDING)
    late[:, :1] = True  # so that all real tokens begin at 1
    found = sizes(model, padded(padding=late), (~late).long(), position_ids=order)
    first = (~late).long().cumsum(1) == 1
    assert found == (expected(model.embed(padded(padding=late)), ~late, first), {})


def test_an_empty_cache_is_as_none():
    order, caches = torch.arange(LENGTH).expand(ROWS, -1), [DynamicCache(), DynamicCache()]
    caches[1].update(*torch.zeros(2, ROWS, 1, 4, 2), 0)  # holds what is before
    empty, full = (
        sizes(Keeping(), padded(), (~PADDING).long(), position_ids=order, past_key_values=cache)[0] for cache in caches
    )
    vectors = Keeping().embed(padded())
    assert empty == expected(vectors) and full == expected(vectors, first=order == 0)


def test_where_a_row_begins_is_looked_for_once_a_call(monkeypatch):
    looks, own = [], CallTokens._without_padding
    monkeypatch.setattr(CallTokens, "_without_padding", lambda *args: looks.append(1) or own(*args))
    given = {"attention_mask": (~PADDING).long(), "position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
    sizes(tiny_llama(), input_ids=padded(), **given)
    assert len(looks) == 1


def test_texts_in_a_row_that_begins_with_padding_have_their_own_first_tokens():
    model, mask, ids = Keeping(), torch.ones(1, 8, dtype=torch.long), IDS[:2, :4].reshape(1, 8)
    mask[:, :2] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    first = torch.tensor([[False, False, True, False, True, False, False, False]])
    found = sizes(model, ids, mask, position_ids=positions)
    assert found == (expected(model.embed(ids), mask.bool(), first), {})


def test_what_is_listed_by_position_counts_from_the_first_real_token():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = NormlabForCausalLM(NormlabConfig(scheme="bhyt", vocab_size=20, **shape)).eval()
    tables = []
    for given in ({}, {"position_ids": torch.arange(LENGTH).expand(ROWS, -1)}):
        with record(model, ["carried_var_ratio"]) as rec, torch.no_grad():
            model(input_ids=IDS, attention_mask=(~PADDING).long(), **given)
        tables.append(rec.stats().carried_by_position().query("tokens > 0").reset_index(drop=True))
    columns = ["layer", "mask", "position", "tokens"]
    assert tables[0][columns].equals(tables[1][columns])


@pytest.mark.parametrize("way", ["packed", "padded", "goes on"])
def test_an_experiment_leaves_out_the_first_tokens_that_a_recording_leaves_out(way):
    model = Keeping()
    batch = {"input_ids": IDS, "position_ids": (torch.arange(LENGTH) % 4).expand(ROWS, -1)}
    if way == "padded":
        positions = torch.arange(LENGTH).expand(ROWS, -1)
        batch = {"input_ids": padded(), "attention_mask": (~PADDING).long(), "position_ids": positions}
    elif way == "goes on":
        batch = {"input_ids": IDS, "input_pos": LENGTH + torch.arange(LENGTH)}
    with record(model, ["block_influence"]) as rec, torch.no_grad():
        model(**batch)
    angle = angular_distance(model, [batch], tokens="no_first", progress=False).loc[0, 1]
    counted = rec.stats().to_pandas(errors=True).query("layer == 1").set_index("mask")["tokens"]
    real = batch.get("attention_mask", torch.ones_like(IDS)) != 0
    firsts = {"packed": batch.get("position_ids") == 0, "padded": FIRST, "goes on": torch.zeros_like(real)}[way]
    kept = real & ~firsts
    before = model.embed(batch["input_ids"])
    after = model.body.layers[0](before)
    angles = (torch.nn.functional.cosine_similarity(before, after, -1).arccos() / torch.pi).detach()
    assert counted["no_first"] == kept.sum() and angle == pytest.approx(float(angles[kept].mean()), rel=1e-4)


def test_an_experiment_refuses_first_tokens_that_are_not_known():
    batch = {"input_ids": IDS, "position_ids": (2 + torch.arange(LENGTH)).expand(ROWS, -1)}
    with pytest.raises(NormlabError, match="do not begin at 0"):
        angular_distance(Keeping(), [batch], tokens="no_first", progress=False)
    assert angular_distance(Keeping(), [batch], progress=False).shape == (3, 3)


class Crossing(PreLN):
    """A decoder's block: it is handed what the encoder returned."""

    def forward(self, h, encoder_hidden_states):
        return super().forward(h)


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.embed = Text(), nn.Embedding(24, WIDTH)
        self.decoder = nn.ModuleList([Crossing(), Crossing()])

    def forward(self, input_ids, decoder_input_ids, decoder_position_ids, position_ids):
        states, h = self.encoder(input_ids), self.embed(decoder_input_ids)
        for block in self.decoder:
            h = block(h, states)
        return h


class SourceAndTarget(Translator):
    """PyTorch's names: each text has a mask of its own."""

    def forward(self, src, tgt, src_key_padding_mask, tgt_key_padding_mask, position_ids):
        return super().forward(src, tgt, None, None)


def test_an_experiment_on_a_decoder_leaves_out_its_own_padding_and_first_tokens():
    where = stacks(SourceAndTarget())["decoder"]
    batch = {"src": IDS, "tgt": padded(), "src_key_padding_mask": PADDING & False, "tgt_key_padding_mask": PADDING}
    batch["position_ids"] = torch.arange(LENGTH).expand(ROWS, -1)
    angle = angular_distance(where, [batch], tokens="no_first", progress=False).loc[0, 1]
    before = where.model.embed(padded())
    after = where.model.decoder[0](before, None)
    angles = (torch.nn.functional.cosine_similarity(before, after, -1).arccos() / torch.pi).detach()
    assert angle == pytest.approx(float(angles[~PADDING & ~FIRST].mean()), rel=1e-4)


class TurnedInside(nn.Module):
    """Attention over (length, batch, width) in a block of (batch, length, width)."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


class TurnedInsideBlock(PreLN):
    part = TurnedInside


def test_a_block_that_turns_what_its_attention_reads_is_not_turned():
    model, square = Text(), IDS.repeat(2, 1)
    model.body = Stack(TurnedInsideBlock, TurnedInsideBlock)
    with record(model, SIZE) as rec, torch.no_grad():
        model(square)
    right = model.body.layers[0](model.embed(square))[:, 1:]
    assert values(rec.stats())["block_out", 1, "token_l2_mean", "no_first"] == size(right)
    for ids in (IDS, square):
        assert angular_distance(model, [{"input_ids": ids}], progress=False).shape == (3, 3)


class Selecting(Text):
    """Mixture of depths: block 2 runs on the later tokens."""

    def forward(self, input_ids):
        first, second, third = self.body.layers
        h = first(self.embed(input_ids))
        self.selected = second(h[:, 2:])
        return third(torch.cat([h[:, :2], self.selected], 1))


def test_a_block_that_selects_tokens_does_not_tell_which_are_first():
    model = Selecting()
    model.body = Stack(PreLN, PreLN, PreLN)
    with record(model, SIZE) as rec, torch.no_grad():
        model(IDS)
    found = values(rec.stats())
    assert found["block_out", 2, "token_l2_mean", "all"] == size(model.selected)
    assert {place[1] for place in found if place[0] == "block_out" and place[3] == "no_first"} == {0, 1, 3}
    assert rec.stats().manifest["absent"].keys() == {"mask no_first"}
    for experiment in (angular_distance, logit_lens_kl, skip_future_effect):
        with pytest.raises(NormlabError, match="passes on 3 x 4 tokens and another one reads 3 x 6"):
            experiment(model, [{"input_ids": IDS}], progress=False)


def test_positions_of_a_decoder_are_of_its_own_tokens():
    model, at = Translator(), torch.cat([torch.arange(4), torch.arange(2)]).expand(ROWS, -1)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS.flip(0), "decoder_position_ids": at, "position_ids": at}
    decoded, encoded = model.embed(inputs["decoder_input_ids"])[at != 0], model.encoder.embed(IDS)[:, 1:]
    for name, counted in (("decoder", decoded), ("encoder.body.layers", encoded)):
        with record(stacks(model)[name], SIZE) as rec, torch.no_grad():
            model(**inputs)
        assert values(rec.stats())["block_out", 0, "token_l2_mean", "no_first"] == size(counted), name


# -- no token ----------------------------------------------------------------------------------------------------------


def test_sites_without_a_token_have_no_rows_and_a_reason():
    model = tiny_llama()
    metrics = ["rms", "relative_contribution", "massive_activation_ratio", "attention_entropy"]
    for inputs, left in (
        ({"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}, set()),
        ({"input_ids": IDS[:, :1]}, {"all"}),
    ):
        with record(model, metrics) as rec, torch.no_grad():
            model(**inputs)
        table = rec.stats().to_pandas()
        assert set(table["mask"]) == left and not table["value"].isna().any()
        assert "no token counted" in rec.absent["block_out 1, no_first"]
