"""Toy models of residual blocks for the tests of the probes, and what their branches should be measured as."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from probe_zoo import values
from torch import Tensor, nn

from normlab.probes import record

WIDTH = 12
X = torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(3))


class Part(nn.Module):
    """A branch of one matrix; its class name says nothing."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.proj, self.scale = nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.proj(x)) * self.scale


class PreLN(nn.Module):
    """Attention and MLP, each added to the stream after a norm. Subclasses change `add` or `forward`."""

    part: Callable[[], nn.Module] = Part

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.RMSNorm(WIDTH), self.part(), nn.RMSNorm(WIDTH), self.part()

    def add(self, h: Tensor, norm: nn.Module, part: nn.Module) -> Tensor:
        return h + part(norm(h))

    def middle(self, h: Tensor) -> Tensor:
        """The stream between attention and the MLP."""
        return self.add(h, self.norm1, self.attn)

    def forward(self, h: Tensor) -> Tensor:
        return self.add(self.middle(h), self.norm2, self.mlp)


class Stack(nn.Module):
    """Blocks one after the other, the whole stack `times` times. `kind` makes a block; the weights are always alike."""

    def __init__(self, *kinds: Callable[[], nn.Module], times: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.times = nn.ModuleList(kind() for kind in kinds), times

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.layers] * self.times:
            x = block(x)
        return x


class Numbered(Stack):
    """Some of four blocks under their numbers, as a stage of a pipeline holds them."""

    def __init__(self, *numbers: int):
        super().__init__(*[PreLN] * 4)
        self.layers = nn.ModuleDict({str(number): self.layers[number] for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x


def measured(
    where: Any, metrics: Iterable[str], *args: Any, **kwargs: Any
) -> tuple[dict[tuple[str, int, str, str], float], dict[str, str]]:
    """The record of a call without gradients, and what is absent and why. A bare activation does not tell its rows."""
    masks = ["all"] if args and not kwargs else ["all", "no_first"]
    with record(where, list(metrics), masks=masks) as rec, torch.no_grad():
        rec.sites.model(*args, **kwargs)
    return values(rec.stats()), rec.stats().manifest["absent"]


def rms(rows: Tensor) -> Any:
    return pytest.approx(float(rows.detach().double().square().mean().sqrt()), rel=1e-5)


def size(rows: Tensor) -> Any:
    """The mean L2 norm of a token."""
    return pytest.approx(float(rows.detach().double().norm(dim=-1).mean()), rel=1e-5)


def contribution(adds: Tensor, stream: Tensor) -> Any:
    """The relative contribution of what is added to a stream."""
    ratio = adds.detach().double().norm(dim=-1) / stream.detach().double().norm(dim=-1)
    return pytest.approx(float(ratio.mean()), rel=1e-4)


def assert_contributions(found: Mapping, **pairs: tuple[Tensor, Tensor]) -> None:
    """The first block's branches: what each adds, and to which stream."""
    for site, (adds, stream) in pairs.items():
        assert found[site, 1, "relative_contribution", "all"] == contribution(adds, stream), site
