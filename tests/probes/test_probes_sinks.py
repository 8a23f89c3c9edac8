"""Explicit attention whatever is done to the scores before the softmax: the scores of the keys are what counts."""

import pytest
import torch
from torch import Tensor, nn

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


WAYS = {
    "plain": scored,
    "einsum": summed,
    "flat": flat,
    "shifted": lambda q, k: shifted(scored(q, k)),
    "sink": lambda q, k: torch.cat([scored(q, k), SINK], -1),
    "sink, shifted": lambda q, k: shifted(torch.cat([scored(q, k), SINK], -1)).to(torch.float32),
    "sink in front, masked late": late_mask,
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
