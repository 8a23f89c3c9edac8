"""What a sweep is made of.

`Preset`    a sweep: its parts, its learning rates, and fields that all its runs share
`Part`      schemes x depths x seeds x variants
`Variant`   a change to runs
`Search`    how learning rates are found; `LeagueSearch`: a short one, alike for all schemes
`Choice`    what a search settled on
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from normlab.schemes import STUDIED, get_scheme
from normlab.training.config import TrainConfig

MOST_GROWTH = 4
MOST_FINALISTS = 3
CLEARLY = 0.05  # nats: another seed moves a held-out loss by as much, so two rates nearer than that are not told apart


@dataclass(frozen=True)
class Variant:
    """A change to every run of a preset. fields: of TrainConfig, in place of the preset's, `model` entry by entry.
    schemes: default the preset's."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    schemes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Some of a preset's runs: schemes x depths x seeds x variants. depths: depth -> number of seeds (0, 1, ...).
    variants: of every run; without them each is run once, as it is. kept: depths whose seed 0 keeps its weights. best:
    only so many of the schemes, those that the search found best, and `always`, wherever they come in."""

    depths: Mapping[int, int]
    schemes: tuple[str, ...] = STUDIED
    variants: tuple[Variant, ...] = (Variant(),)
    kept: tuple[int, ...] = ()
    best: int | None = None
    always: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for scheme in self.schemes:
            get_scheme(scheme)


@dataclass(frozen=True)
class Choice:
    """What a search settled on: the learning rate, and fields of TrainConfig where the scheme has settings to try.
    loss: the held-out one there."""

    lr: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    loss: float = field(default=math.inf, compare=False)


Choices = Mapping[tuple[str, int], Choice]  # by scheme and searched depth
Tried = tuple[int, float]  # place of the setting among the scheme's, learning rate


@dataclass(frozen=True)
class Search:
    """How a scheme's learning rate is found: every rate of the grid at every one of `depths`, under each of the
    scheme's ``settings``; where the lowest final held-out loss is at an edge of the grid, or less than `CLEARLY` below
    an edge's, the grid grows on that side, by the same ratio, until it lies inside (by `MOST_GROWTH` rates at most).

    fields: of TrainConfig: shorter runs, on a seed and held-out blocks that nothing else uses. finals: in what the
    finals differ from them, runs as long as those that are reported: where several rates or settings lie within
    `CLEARLY` of the best (`MOST_FINALISTS` of them at most), the best of their finals is taken. Without, the best.

    A depth takes the rate of the deepest searched depth not above it.
    """

    rates: tuple[float, ...]
    depths: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    finals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def foreseen(self) -> tuple[float, ...]:
        """Rates to count on before anything is known."""
        return self.rates

    def settings(self, scheme: str) -> tuple[Mapping[str, Any], ...]:
        return get_scheme(scheme).settings

    def depth_for(self, depth: int) -> int:
        return max((d for d in self.depths if d <= depth), default=min(self.depths))

    def next_rate(self, losses: Mapping[float, float]) -> float | None:
        """The rate to try next, from the loss at each rate tried; None when the best lies clearly inside, or enough was
        tried, or nothing learned at any rate, or fewer than two were tried."""
        tried = sorted(losses)
        if len(tried) < 2:
            return None
        best = min(tried, key=lambda rate: (losses[rate], rate))
        if not math.isfinite(losses[best]) or len(tried) >= len(self.rates) + MOST_GROWTH:
            return None
        for edge, neighbour in ((tried[0], tried[1]), (tried[-1], tried[-2])):
            if losses[edge] - losses[best] < CLEARLY:
                return float(f"{edge**2 / neighbour:.3g}")
        return None

    def finalists(self, losses: Mapping[Tried, float]) -> list[Tried]:
        """Of what was tried the best first, and what is not clearly worse; of equal ones the lesser."""
        order = sorted(losses, key=lambda one: (losses[one], one))
        near = [one for one in order[:MOST_FINALISTS] if losses[one] - losses[order[0]] < CLEARLY]
        return near if near and self.finals else order[:1]


@dataclass(frozen=True)
class LeagueSearch(Search):
    """Two rates for every scheme, under no settings of its own, and a third: between them where their losses are less
    than `CLEARLY` apart, else as far beyond the better one."""

    @property
    def foreseen(self) -> tuple[float, ...]:
        return *self.rates, self._between

    @property
    def _between(self) -> float:
        return float(f"{math.prod(self.rates) ** 0.5:.3g}")

    def settings(self, scheme: str) -> tuple[Mapping[str, Any], ...]:
        return ({},)

    def next_rate(self, losses: Mapping[float, float]) -> float | None:
        """The third rate, from the losses at two; None when it was tried, or nothing learned at the two."""
        best = min(losses, key=lambda rate: (losses[rate], rate))
        if len(losses) != 2 or not math.isfinite(losses[best]):
            return None
        if max(losses.values()) - losses[best] < CLEARLY:
            return self._between
        return float(f"{best**2 / self._between:.3g}")


@dataclass(frozen=True)
class Preset:
    """A sweep: its parts one after another, each after the search for the learning rates that it needs.

    rate: one learning rate for all runs, or how each scheme's is found. fields: of TrainConfig, the same for all runs,
    where they differ from its defaults.
    """

    name: str
    parts: tuple[Part, ...]
    rate: float | Search
    fields: Mapping[str, Any] = field(default_factory=dict)

    def only(self, schemes: Sequence[str] | None, depths: Sequence[int] | None) -> Preset:
        """The same for some schemes and depths; those that it lacks are added to its first part, with one seed."""
        parts = self.parts
        if schemes is not None:
            new = set(schemes).difference(*(part.schemes for part in parts))
            chosen = [[s for s in schemes if s in part.schemes or (part is parts[0] and s in new)] for part in parts]
            parts = tuple(replace(part, schemes=tuple(own)) for part, own in zip(parts, chosen, strict=True) if own)
        if depths is not None:
            missing = set(depths).difference(*(part.depths for part in parts))
            counts = [
                {d: part.depths.get(d, 1) for d in depths if d in part.depths or (part is parts[0] and d in missing)}
                for part in parts
            ]
            parts = tuple(replace(part, depths=own) for part, own in zip(parts, counts, strict=True) if own)
        return replace(self, parts=parts)

    def config(self, scheme: str, depth: int, seed: int, lr: float, more: Mapping[str, Any]) -> TrainConfig:
        """A run; fields that the preset gives, then those of `more`, replace the rest."""
        own: dict[str, Any] = {"scheme": scheme, "depth": depth, "seed": seed, "lr": lr}
        return TrainConfig(**(own | merged(self.fields, more)))

    def searched(self, part: Part) -> list[tuple[str, int]]:
        """(scheme, depth) of every choice that a part needs."""
        if not isinstance(self.rate, Search):
            return []
        depths = sorted({self.rate.depth_for(depth) for depth in part.depths})
        return [(scheme, depth) for depth in depths for scheme in part.schemes]

    def trial(
        self, part: Part, scheme: str, depth: int, choice: Choice, *, final: bool = False, **more: Any
    ) -> TrainConfig:
        """A run of a part's search or its finals, of the scheme's first variant."""
        assert isinstance(self.rate, Search)
        variant = next(v for v in part.variants if scheme in (v.schemes or part.schemes))
        fields = {**more, "keep_weights": False}
        for above in (variant.fields, choice.fields, self.rate.fields, self.rate.finals if final else {}):
            fields = merged(fields, above)
        return self.config(scheme, depth, 0, choice.lr, fields)

    def grid(self, part: Part, choices: Choices, **more: Any) -> list[TrainConfig]:
        """A part's runs, in the order in which partial results say most: seed 0 at every depth first, shallow before
        deep. A scheme for which nothing was chosen is left out."""
        order = [(seed, depth) for depth, seeds in part.depths.items() for seed in range(seeds)]
        runs = []
        for seed, depth in sorted(order):
            entered = self.entered(part, depth, choices)
            for variant in part.variants:
                for scheme in variant.schemes or part.schemes:
                    choice = self.choice_for(scheme, depth, choices)
                    if scheme in entered and choice is not None:
                        keep = {"keep_weights": seed == 0 and depth in part.kept}
                        fields = merged(merged({**more, **keep}, choice.fields), variant.fields)
                        runs.append(self.config(scheme, depth, seed, choice.lr, fields))
        return runs

    def entered(self, part: Part, depth: int, choices: Choices) -> Sequence[str]:
        """The schemes of a part that are run at a depth, by what was chosen."""
        if part.best is None:
            return part.schemes
        found = {scheme: self.choice_for(scheme, depth, choices) for scheme in part.schemes}
        losses = {s: choice.loss for s, choice in found.items() if choice is not None and s not in part.always}
        best = sorted(losses, key=losses.__getitem__)[: part.best]
        return [s for s in part.schemes if s in part.always or s in best]

    def choice_for(self, scheme: str, depth: int, choices: Choices) -> Choice | None:
        if isinstance(self.rate, Search):
            return choices.get((scheme, self.rate.depth_for(depth)))
        return Choice(self.rate)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainConfig, `above` where both have one; of `model`, so for each of its entries."""
    return {**below, **above, "model": {**below.get("model", {}), **above.get("model", {})}}
