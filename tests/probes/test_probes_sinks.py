"""Explicit attention whatever is done to the scores before the softmax: the scores of the keys are what counts."""

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM

from normlab.errors import NormlabError
from normlab.probes import attention_sinks, record
from normlab.probes.attention_watch import AttentionWatch

# (batch, heads, tokens, d_head)
QUERY, KEY = 6 * torch.randn(2, 2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
SINK = torch.linspace(-1, 2, 3).view(1, 3, 1, 1).expand(2, 3, 9, 1)
HIDDEN = torch.full((9, 9), -1e30).triu(1)


def shifted(x: Tensor) -> Tensor:
    return x - x.max(dim=-1, keepdim=True).values


def shifted_in_place(x: Tensor) -> Tensor:
    x -= x.max(dim=-1, keepdim=True).values
    return x


def flat(query: Tensor, key: Tensor) -> Tensor:
    return torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).view(2, 3, 9, 9) / 8**0.5 + HIDDEN


def scored(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT) * 8**-0.5 + HIDDEN


def summed(query: Tensor, key: Tensor) -> Tensor:
    return (torch.einsum("bhqd,bhkd->bhqk", query, key) / 8**0.5).masked_fill(HIDDEN < 0, -torch.inf)


def late_mask(query: Tensor, key: Tensor) -> Tensor:
    scores = torch.cat([SINK, torch.matmul(query, key.mT) * 8**-0.5], -1)
    return scores + torch.cat([torch.zeros(9, 1), HIDDEN], -1)


def copied(query: Tensor, key: Tensor) -> Tensor:
    scores = scored(query, key)
    return torch.cat([scores, scores[..., :1]], -1)


WAYS = {
    "plain": scored,
    "einsum": summed,
    "flat": flat,
    "shifted": lambda q, k: shifted(scored(q, k)),
    "sink": lambda q, k: torch.cat([scored(q, k), SINK], -1),
    "sink, shifted": lambda q, k: shifted(torch.cat([scored(q, k), SINK], -1)).to(torch.float32),
    "sink in front, masked late": late_mask,
    "a key's copy": copied,
    "shifted in place": lambda q, k: shifted_in_place(scored(q, k)),
    "masked after the shift": lambda q, k: shifted((q @ k.mT) * 8**-0.5) + HIDDEN,
    "product unseen, shifted": lambda q, k: shifted((q[..., None, :] * k[..., None, :, :]).sum(-1) * 8**-0.5 + HIDDEN),
}
UNKNOWN = ("shifted in place", "masked after the shift", "product unseen, shifted")


@pytest.mark.parametrize("way", WAYS)
def test_a_watch_has_the_scores_of_the_keys_or_says_that_it_has_not(way):
    expected = scored(QUERY, KEY).double()
    with AttentionWatch() as watch:
        torch.softmax(WAYS[way](QUERY, KEY), dim=-1)
    found = watch.found([(2, 9)])
    assert found is not None and found.knows_size == (way not in UNKNOWN)
    largest, entropy = found.scores.double().unbind(-1)
    assert torch.allclose(entropy, torch.special.entr(expected.softmax(-1)).sum(-1), atol=1e-4)
    if found.knows_size:
        assert torch.allclose(largest, expected.amax(3), rtol=1e-5)


class Attention(nn.Module):
    """A block whose heads attend by `way`."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.attn, self.norm = way, nn.Linear(24, 24), nn.RMSNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(WAYS[self.way](QUERY, KEY), -1)
        keys = weights[..., 1:] if "front" in self.way else weights[..., :9]
        return x + self.attn(self.norm(x)) + (keys @ KEY).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", ["plain", "sink, shifted", "sink in front, masked late", "shifted in place"])
def test_a_learned_sink_takes_its_share_and_an_unknown_size_is_named(way):
    model, x = nn.Sequential(Attention(way), Attention(way)).eval(), torch.randn(2, 9, 24)
    sink = SINK if "sink" in way else torch.full_like(SINK, -torch.inf)
    weight = torch.cat([scored(QUERY, KEY), sink], -1).softmax(-1)[..., :9].sum(-2) / torch.arange(9, 0, -1)
    found = attention_sinks(model, {"input": x}, threshold=0.0, queries=1).table.query("layer == 1")
    assert found["weight"].tolist() == pytest.approx(weight.mean(1).flatten().tolist(), rel=1e-4)
    with record(model, ["attention_logit_max", "rms"]) as rec, torch.no_grad():
        model(x)
    assert ("attention_logit_max 1" in rec.stats().manifest["absent"]) == (way in UNKNOWN)


NONE = {
    "plain": None,
    "shifted in place": None,
    "a key's copy": "its softmax has columns that are neither keys nor a learned sink's",
    "product unseen, shifted": "no product of query and key was seen, so keys cannot be told from a learned sink",
}


@pytest.mark.parametrize("way", ["sink", "sink, shifted", "sink in front, masked late", *NONE])
def test_a_sinks_share_is_what_the_softmax_gives_its_column_or_absent_with_the_reason(way):
    model, x = nn.Sequential(Attention(way), Attention(way)).eval(), torch.randn(2, 9, 24)
    with record(model, ["sink_share", "attention_entropy"]) as rec, torch.no_grad():
        model(x)
    stats = rec.stats()
    if way in NONE:
        assert stats.absent == ("sink_share",) and stats.manifest["absent"].get("sink_share 2") == NONE[way]
        return
    share = torch.cat([scored(QUERY, KEY), SINK], -1).double().softmax(-1)[..., 9].mean()
    found = stats.to_pandas().query("metric == 'sink_share' and site == 'attn' and mask == 'all'")
    assert found["layer"].tolist() == [1, 2] and found["value"].tolist() == pytest.approx([float(share)] * 2, rel=1e-5)
    entropy = torch.special.entr(scored(QUERY, KEY).double().softmax(-1)).sum(-1).mean()  # as without the sink
    found = stats.to_pandas().query("metric == 'attention_entropy' and mask == 'all'")
    assert found["value"].tolist() == pytest.approx([float(entropy)] * 2, rel=1e-4)


class Part(nn.Module):
    """A module of a block that computes by itself."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, *given: Tensor) -> Tensor:
        return self.look(*given)


def fused(query: Tensor, key: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, key, is_causal=query.shape == key.shape)


def single(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax((query @ key.mT) * 8**-0.5 + HIDDEN, -1) @ key


def heads(look) -> list[Part]:
    return [Part(lambda q, k, i=i: look(q[:, i], k[:, i])) for i in range(3)]


def streams(rows: int, tokens: int) -> Part:
    return Part(lambda *_: (torch.ones(rows, tokens, 8) @ torch.ones(8, 16)).unflatten(-1, (4, 4)).softmax(-1))


# What a block calls: before its attention, the modules that make up its attention, after it.
FORMS = {
    "in two groups": ([], [Part(lambda q, k, i=i: fused(q[:, i], k[:, i])) for i in (slice(2), slice(2, 3))], []),
    "one by one": ([], heads(fused), []),
    "one by one, explicit": ([], heads(single), []),
    "in the batch": ([], [Part(lambda q, k: single(q.flatten(0, 1), k.flatten(0, 1)))], []),
    "behind a softmax over streams": ([streams(2, 9)], [Part(fused)], []),
    "behind cross-attention": ([Part(lambda q, k: fused(q, k[:, :, :5]))], [Part(fused)], []),
    "before another attention": ([], [Part(fused)], [Part(lambda q, k: fused(3 * q, k))]),
}


class Formed(Attention):
    """A block whose heads attend in one of `FORMS`."""

    def __init__(self, form: str):
        super().__init__(form)
        before, parts, after = FORMS[form]
        self.self_attn = nn.ModuleList(parts)
        self.order = nn.ModuleList([*before, Part(lambda *given: [part(*given) for part in self.self_attn]), *after])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order:
            part(QUERY, KEY)
        return x + self.attn(self.norm(x))


@pytest.mark.parametrize("form", FORMS)
def test_all_heads_of_a_blocks_attention_count_and_no_other_softmax(form):
    model, x = nn.Sequential(Formed(form), Formed(form)).eval(), torch.randn(2, 9, 24)
    with record(model, ["attention_logit_max", "attention_entropy"], masks=["all"]) as rec, torch.no_grad():
        model(x)
    found = rec.stats().to_pandas().query("layer == 1").set_index("metric")["value"]
    scores = scored(QUERY, KEY).double()
    assert found["attention_logit_max"] == pytest.approx(float(scores.max()), rel=1e-5)
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean()
    assert found["attention_entropy"] == pytest.approx(float(entropy), rel=1e-4)
    sinks = attention_sinks(model, {"input": x}, threshold=0.0, queries=1).table.query("layer == 1")
    weight = scores.softmax(-1).sum(-2) / torch.arange(9, 0, -1)
    assert sinks["weight"].tolist() == pytest.approx(weight.mean(1).flatten().tolist(), rel=1e-4)


class CrossFirst(nn.Module):
    """A block that attends to a memory before it attends to its tokens, in modules that tell by their names."""

    def __init__(self, *, has_self: bool = True):
        super().__init__()
        parts = {"cross_attn": nn.MultiheadAttention(24, 4, batch_first=True)}
        parts |= {"self_attn": nn.MultiheadAttention(24, 4, batch_first=True)} if has_self else {}
        for name, part in parts.items():
            self.add_module(name, part)
            self.add_module(f"{name}_norm", nn.LayerNorm(24))
        self.has_self, self.mlp = has_self, nn.Linear(24, 24)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.cross_attn(self.cross_attn_norm(x), memory, memory)[0]
        if self.has_self:
            read = self.self_attn_norm(x)
            added, self.weights = self.self_attn(read, read, read, average_attn_weights=False)
            x = x + added
        return x + self.mlp(x)


class Wrapped(nn.Module):
    """A block inside a wrapper, which is what calls the block's parts."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.inner = block

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x, memory)


class WithMemory(nn.Module):
    """A stack of blocks that are given a memory."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


@pytest.fixture
def slow_path():
    """PyTorch's attention in steps, as elsewhere than on its fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("wrap", [lambda block: block, Wrapped])
@pytest.mark.parametrize("length", [9, 5])
def test_attention_to_a_memory_before_that_to_the_tokens_does_not_count_whatever_the_lengths(length, wrap):
    torch.manual_seed(0)
    blocks = [CrossFirst(), CrossFirst()]
    model, x, memory = WithMemory(*map(wrap, blocks)).eval(), 3 * torch.randn(2, 9, 24), 3 * torch.randn(2, length, 24)
    with record(model, ["attention_entropy"], masks=["all"]) as rec, torch.no_grad():
        model(x, memory)
    weights = [block.weights.double() for block in blocks]
    expected = [float(torch.special.entr(weight).sum(-1).mean()) for weight in weights]
    assert rec.stats().to_pandas().sort_values("layer")["value"].tolist() == pytest.approx(expected, rel=1e-5)
    sinks = attention_sinks(model, {"x": x, "memory": memory}, threshold=0.0, queries=1).table
    mean = torch.stack([weight.mean((1, 2)) for weight in weights])
    assert sinks["weight"].tolist() == pytest.approx(mean.flatten().tolist(), rel=1e-4)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("length", [9, 5])
def test_a_block_that_attends_to_a_memory_alone_has_no_attention_over_its_tokens(length):
    model = WithMemory(CrossFirst(has_self=False), CrossFirst(has_self=False)).eval()
    x, memory = torch.randn(2, 9, 24), torch.randn(2, length, 24)
    with record(model, ["attention_entropy", "rms"]) as rec, torch.no_grad():
        model(x, memory)
    assert rec.stats().manifest["absent"]["attention 1"] == "attention was seen in cross-attention alone"
    with pytest.raises(NormlabError, match=f"over cross-attention's 9 queries x {length} keys for 9 tokens"):
        attention_sinks(model, {"x": x, "memory": memory})


def test_a_softmax_over_as_many_streams_as_rows_and_tokens_is_no_attention():
    with AttentionWatch() as watch:
        streams(4, 4)()
    assert watch.found([(4, 4)]) is None and "4 x 4 queries" in watch.reason()


class Torchs(nn.Module):
    """A block with PyTorch's attention."""

    def __init__(self, need_weights: bool):
        super().__init__()
        self.norm, self.need_weights = nn.LayerNorm(24), need_weights
        self.attn, self.mlp = nn.MultiheadAttention(24, 4, batch_first=True), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        self.read = self.norm(x)
        x = x + self.attn(self.read, self.read, self.read, need_weights=self.need_weights)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pytorchs_attention_is_measured_unless_that_would_change_how_it_computes(mode, need_weights):
    torch.manual_seed(0)
    model, x = nn.Sequential(Torchs(need_weights), Torchs(need_weights)).train(mode == "train"), torch.randn(2, 9, 24)
    with torch.no_grad():
        expected = model(x)
        with record(model, ["attention_entropy", "rms"], masks=["all"]) as rec:
            assert torch.equal(model(x), expected)
    stats = rec.stats()
    if mode == "eval":
        assert stats.absent == ("attention_entropy",) and "set_fastpath_enabled(False)" in rec.absent["attention 2"]
    read, weight = model[1].read.double(), model[1].attn.in_proj_weight[:48].detach().double()
    query, key = (y.unflatten(-1, (4, 6)).transpose(1, 2) for y in (read @ weight.mT).chunk(2, -1))
    attended = (query @ key.mT / 6**0.5).softmax(-1)
    if mode == "train":
        found = stats.to_pandas().query("metric == 'attention_entropy' and layer == 2")["value"].item()
        assert found == pytest.approx(float(torch.special.entr(attended).sum(-1).mean()), rel=1e-5)
    sinks = attention_sinks(model, {"input": x}, threshold=0.0, queries=1).table.query("layer == 2")
    assert sinks["weight"].tolist() == pytest.approx(attended.mean((1, 2)).flatten().tolist(), rel=1e-4)


def test_a_block_whose_attention_was_not_seen_says_so():
    model = nn.Sequential(Torchs(False), Torchs(False))
    for block in model:
        block.attn = nn.Linear(24, 24)
        block.forward = lambda x, block=block: x + block.attn(block.norm(x))
    with record(model, ["attention_entropy", "rms"]) as rec, torch.no_grad():
        model(torch.randn(2, 9, 24))
    assert "no attention was seen" in rec.stats().manifest["absent"]["attention 1"]


@pytest.fixture(scope="module")
def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=61, hidden_size=32, intermediate_size=16, head_dim=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.3, pad_token_id=0,
        layer_types=["full_attention"] * 2, attn_implementation="eager",
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.sinks += torch.linspace(0, 3, 4)
    return model


def test_gpt_oss_has_the_share_that_its_weights_leave_to_the_sink(gpt_oss):
    """Its attention weights are those of the keys: what is missing to 1 is the sink's."""
    ids = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        weights = gpt_oss(ids, attention_mask=mask, output_attentions=True).attentions
        with record(gpt_oss, ["sink_share"]) as rec:
            gpt_oss(ids, attention_mask=mask)
    table, real = rec.stats().to_pandas().query("mask == 'all'").set_index("layer")["value"], mask.bool()
    batch = {"input_ids": ids, "attention_mask": mask}
    found = attention_sinks(gpt_oss, batch, threshold=0.15, queries=4)
    assert found.learned["layer"].tolist() == [1, 2]
    for row, layer in zip(found.learned.itertuples(), weights, strict=True):
        left = (1 - layer.double().sum(-1)).transpose(1, 2)[real].mean(0)  # by head
        assert [table[row.layer], row.weight] == pytest.approx([float(left.mean())] * 2, rel=1e-5)
        assert row.heads == float((left > 0.15).double().mean())
    assert 0 == found.learned["heads"].min() < found.learned["heads"].max() < 1
    assert attention_sinks(nn.Sequential(Attention("plain")).eval(), {"input": torch.randn(2, 9, 24)}).learned is None


def test_a_model_without_a_sink_has_no_share_to_record():
    model = nn.Sequential(Attention("plain"), Attention("plain")).eval()
    with record(model, ["sink_share"]) as rec, torch.no_grad():
        model(torch.randn(2, 9, 24))
    assert rec.stats().absent == ("sink_share",) and rec.stats().to_pandas().empty
