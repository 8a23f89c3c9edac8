"""Explicit attention whatever is done to the scores before the softmax: the scores of the keys are what counts."""

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM

from normlab.probes import attention_sinks, record, statistics

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
    with statistics.AttentionWatch() as watch:
        torch.softmax(WAYS[way](QUERY, KEY), dim=-1)
    assert watch.scores is not None and watch.knows_size == (way not in UNKNOWN)
    largest, entropy = watch.scores.double().unflatten(-1, (2, 9))
    assert torch.allclose(entropy, torch.special.entr(expected.softmax(-1)).sum(-1).mean(1), atol=1e-4)
    if watch.knows_size:
        assert torch.allclose(largest, expected.amax((1, 3)), rtol=1e-5)


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
