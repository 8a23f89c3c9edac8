"""The parts of a sweep, and the order in which they are trained.

`Preset`    a sweep: its parts, its learning rates, and fields that all its runs share
`Part`      schemes x depths x seeds x variants
`Variant`   a change to runs
`Search`    how learning rates are found; `LeagueSearch`: a short one for all; `Reported`: by the runs themselves
`Choice`    what a search settled on
`walk`      hands a preset's runs to whoever trains them, stage by stage; `planned` lists them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from normlab.errors import NormlabError
from normlab.schemes import STUDIED, get_scheme
from normlab.training.config import TrainConfig

MOST_GROWTH = 4
MOST_FINALISTS = 3
CLEARLY = 0.05  # nats: another seed moves a held-out loss by as much, so nearer rates are not told apart


@dataclass(frozen=True)
class Variant:
    """A change to runs of a preset.

    fields: of TrainConfig, instead of the preset's; `model` entry by entry. schemes: by default those of the part.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    schemes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Some of a preset's runs: schemes x depths x seeds x variants.

    Args:
        depths: depth -> number of seeds (0, 1, ...).
        variants: of every run. By default each is trained once, unchanged.
        kept: depths whose seed 0 keeps its weights.
        best: train only that many schemes, the best of the search, and `always`.
        rate_of: the scheme whose learning rate all of the part take; by default each its own.
    """

    depths: Mapping[int, int]
    schemes: tuple[str, ...] = STUDIED
    variants: tuple[Variant, ...] = (Variant(),)
    kept: tuple[int, ...] = ()
    best: int | None = None
    always: tuple[str, ...] = ()
    rate_of: str | None = None

    def __post_init__(self) -> None:
        for scheme in self.schemes:
            get_scheme(scheme)


@dataclass(frozen=True)
class Choice:
    """The result of a search: learning rate, and fields of TrainConfig if the scheme has settings to try.

    loss: the search's held-out loss there.
    """

    lr: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    loss: float = field(default=math.inf, compare=False)


Pair = tuple[str, int]  # scheme and searched depth
Grid = tuple[str, int, int]  # a pair and one of the scheme's settings, by its place
Choices = Mapping[Pair, Choice]


class Trial(NamedTuple):
    """A scheme at a depth, under one of its settings, at a learning rate."""

    scheme: str
    depth: int
    setting: int
    lr: float

    @property
    def pair(self) -> Pair:
        return self.scheme, self.depth

    @property
    def grid(self) -> Grid:
        return self.scheme, self.depth, self.setting


class Result(NamedTuple):
    """A trial's held-out loss, infinite if it diverged. Of equal results the one with the lesser trial is better."""

    loss: float
    trial: Trial


class Stage(NamedTuple):
    """Runs that can be trained at the same time. what: "search", "finals" or "runs"."""

    what: str
    configs: list[TrainConfig]


@dataclass(frozen=True)
class Search:
    """A rule that finds each scheme's learning rate.

    Every rate is tried at every one of `depths`, under each of the scheme's `settings`. The grid grows where the lowest
    held-out loss is at an edge, or less than `CLEARLY` below an edge's. It grows by the same ratio until the best lies
    inside, by `MOST_GROWTH` rates at most.

    Several trials may lie within `CLEARLY` of the best. Then finals are held, of `MOST_FINALISTS` trials at most, and
    their best is taken. A depth takes the rate of the deepest searched depth not above it.

    Args:
        fields: of TrainConfig. Trials are shorter, on a seed and held-out blocks that nothing else uses.
        finals: in which finals differ from trials. They are as long as reported runs.
    """

    rates: tuple[float, ...]
    depths: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    finals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """What its trials are: "search", or "runs" where they are reported themselves."""
        return "search"

    @property
    def foreseen(self) -> tuple[float, ...]:
        """Rates to count on before anything is known."""
        return self.rates

    def settings(self, scheme: str) -> tuple[Mapping[str, Any], ...]:
        return get_scheme(scheme).settings

    def depth_for(self, depth: int) -> int:
        return max((d for d in self.depths if d <= depth), default=min(self.depths))

    def next_rate(self, losses: Mapping[float, float]) -> float | None:
        """The rate to try next, from the loss at each rate tried.

        None if the best lies clearly inside, enough was tried, nothing learned, or fewer than two were tried.
        """
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

    def is_whole(self, losses: Mapping[float, float]) -> bool:
        """Return whether the rates of these losses are all that a scheme is tried at."""
        return set(self.rates) <= set(losses) and self.next_rate(losses) is None

    def finalists(self, results: Sequence[Result]) -> list[Result]:
        """The best first, and those that are not clearly worse."""
        order = sorted(results)
        near = [result for result in order[:MOST_FINALISTS] if result.loss - order[0].loss < CLEARLY]
        return near if near and self.finals else order[:1]


@dataclass(frozen=True)
class LeagueSearch(Search):
    """Two rates for every scheme, under no settings, and a third.

    The third is between them if their losses are less than `CLEARLY` apart, else as far beyond the better one.
    """

    @property
    def foreseen(self) -> tuple[float, ...]:
        return *self.rates, self._between

    @property
    def _between(self) -> float:
        return float(f"{math.prod(self.rates) ** 0.5:.3g}")

    def settings(self, scheme: str) -> tuple[Mapping[str, Any], ...]:
        return ({},)

    def next_rate(self, losses: Mapping[float, float]) -> float | None:
        """The third rate, from the losses at two; None if it was tried, nothing learned at the two, or one failed."""
        if len(losses) != 2:
            return None
        best = min(losses, key=lambda rate: (losses[rate], rate))
        if not math.isfinite(losses[best]):
            return None
        if max(losses.values()) - losses[best] < CLEARLY:
            return self._between
        return float(f"{best**2 / self._between:.3g}")


@dataclass(frozen=True)
class Reported(Search):
    """Every scheme at each of three rates, by runs that are reported themselves, and at a fourth beyond a best edge.

    Trials are seed 0 of the preset's runs. The rate is chosen by `Run.choice_loss`.
    """

    @property
    def stage(self) -> str:
        return "runs"

    def settings(self, scheme: str) -> tuple[Mapping[str, Any], ...]:
        return ({},)

    def next_rate(self, losses: Mapping[float, float]) -> float | None:
        tried = sorted(losses)
        if tried != sorted(self.rates):
            return None
        best = min(tried, key=lambda rate: (losses[rate], rate))
        beyond = {tried[0]: tried[0] ** 2 / tried[1], tried[-1]: tried[-1] ** 2 / tried[-2]}
        return float(f"{beyond[best]:.3g}") if best in beyond and math.isfinite(losses[best]) else None


@dataclass(frozen=True)
class Preset:
    """A sweep: its parts one after another, each after the search for the learning rates that it needs.

    rate: one learning rate for all runs, or how each scheme's is found. fields: of TrainConfig, equal for all runs,
    where they differ from its defaults.
    """

    name: str
    parts: tuple[Part, ...]
    rate: float | Search
    fields: Mapping[str, Any] = field(default_factory=dict)

    def only(self, schemes: Sequence[str] | None, depths: Sequence[int] | None) -> Preset:
        """The same for some schemes and depths. New ones join the first part; new depths have one seed.

        NormlabError: a new scheme, where the first part says for which schemes each of its variants is.
        """
        parts = self.parts
        if schemes is not None:
            schemes = list(dict.fromkeys(schemes))
            new = set(schemes).difference(*(part.schemes for part in parts))
            if new and all(variant.schemes for variant in parts[0].variants):
                names = ", ".join(scheme for scheme in schemes if scheme in new)
                known = ", ".join(dict.fromkeys(scheme for part in parts for scheme in part.schemes))
                raise NormlabError(f"preset {self.name} has no runs of {names}; it has {known}")
            chosen = []
            for part in parts:
                joining = new if part is parts[0] else set()
                if kept := tuple(s for s in schemes if s in part.schemes or s in joining):
                    chosen.append(replace(part, schemes=kept))
            parts = tuple(chosen)
        if depths is not None:
            added = set(depths).difference(*(part.depths for part in parts))
            chosen = []
            for part in parts:
                joining_depths = added if part is parts[0] else set()
                if seeds := {d: part.depths.get(d, 1) for d in depths if d in part.depths or d in joining_depths}:
                    chosen.append(replace(part, depths=seeds))
            parts = tuple(chosen)
        return replace(self, parts=parts)

    def config(self, scheme: str, depth: int, seed: int, lr: float, more: Mapping[str, Any]) -> TrainConfig:
        """A run: the preset's fields, then those of `more`, replace the rest."""
        fields: dict[str, Any] = {"scheme": scheme, "depth": depth, "seed": seed, "lr": lr}
        return TrainConfig(**(fields | merged(self.fields, more)))

    def searched(self, part: Part) -> list[Pair]:
        """Scheme and depth of every choice that a part needs."""
        if not isinstance(self.rate, Search):
            return []
        depths = sorted({self.rate.depth_for(depth) for depth in part.depths})
        return [(scheme, depth) for depth in depths for scheme in part.schemes]

    def trial(self, part: Part, trial: Trial, *, final: bool = False, **more: Any) -> TrainConfig:
        """A run of a part's search or its finals, of the scheme's first variant."""
        assert isinstance(self.rate, Search)
        variant = next(v for v in part.variants if trial.scheme in (v.schemes or part.schemes))
        setting = self.rate.settings(trial.scheme)[trial.setting]
        fields = {**more, "keep_weights": self.rate.stage == "runs" and trial.depth in part.kept}
        for above in (variant.fields, setting, self.rate.fields, self.rate.finals if final else {}):
            fields = merged(fields, above)
        return self.config(trial.scheme, trial.depth, 0, trial.lr, fields)

    def grid(self, part: Part, choices: Choices, **more: Any) -> list[TrainConfig]:
        """A part's runs, in the order in which partial results say most: seed 0 at every depth first, shallow before
        deep. A scheme without a choice is left out."""
        order = sorted((seed, depth) for depth, seeds in part.depths.items() for seed in range(seeds))
        configs = []
        for seed, depth in order:
            entered = self.entered(part, depth, choices)
            for variant in part.variants:
                for scheme in variant.schemes or part.schemes:
                    choice = self.choice_for(part.rate_of or scheme, depth, choices)
                    if scheme in entered and choice is not None:
                        keep = {"keep_weights": seed == 0 and depth in part.kept}
                        fields = merged(merged({**more, **keep}, choice.fields), variant.fields)
                        configs.append(self.config(scheme, depth, seed, choice.lr, fields))
        return configs

    def entered(self, part: Part, depth: int, choices: Choices) -> Sequence[str]:
        """The schemes of a part that are trained at a depth, given the choices.

        The best are known once all have a choice.
        """
        if part.best is None:
            return part.schemes
        chosen = {scheme: self.choice_for(scheme, depth, choices) for scheme in part.schemes}
        losses = {s: choice.loss for s, choice in chosen.items() if choice is not None and s not in part.always}
        if None in chosen.values():
            return part.always
        best = sorted(losses, key=losses.__getitem__)[: part.best]
        return [s for s in part.schemes if s in part.always or s in best]

    def choice_for(self, scheme: str, depth: int, choices: Choices) -> Choice | None:
        if isinstance(self.rate, Search):
            return choices.get((scheme, self.rate.depth_for(depth)))
        return Choice(self.rate)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainConfig, `above` where both have one; likewise for each entry of `model`."""
    return {**below, **above, "model": {**below.get("model", {}), **above.get("model", {})}}


# Trains a stage and returns the losses of its runs by run id: infinite for a diverged one, none for one that failed.
# None: nothing is known yet.
Train = Callable[[Stage], Mapping[str, float] | None]


def walk(preset: Preset, train: Train, **more: Any) -> dict[Pair, Choice]:
    """Hand a preset's stages to `train`, one after another, and return the choices of its search.

    more: fields of TrainConfig for all runs, below the preset's own.
    """
    choices: dict[Pair, Choice] = {}
    if not isinstance(preset.rate, Search):  # all parts share one pool of workers
        train(Stage("runs", [config for part in preset.parts for config in preset.grid(part, {}, **more)]))
        return choices
    for part in preset.parts:
        pairs = [pair for pair in preset.searched(part) if pair not in choices]
        if pairs:
            choices |= _searched(preset, preset.rate, part, pairs, train, more)
        train(Stage("runs", preset.grid(part, choices, **more)))
    return choices


def _searched(
    preset: Preset, search: Search, part: Part, pairs: Sequence[Pair], train: Train, more: Mapping[str, Any]
) -> dict[Pair, Choice]:
    """Search for all pairs at once, so that workers have something to do.

    A pair of which a trial or a final is missing gets no choice: without it another rate might be chosen.
    """
    grids = [(*pair, setting) for pair in pairs for setting in range(len(search.settings(pair[0])))]
    tried: dict[Grid, set[float]] = {grid: set() for grid in grids}
    results: list[Result] = []
    undecided: set[Pair] = set()
    wanted = [Trial(*grid, lr) for grid in grids for lr in search.rates]
    while wanted:
        configs = [preset.trial(part, trial, **more) for trial in wanted]
        losses = train(Stage(search.stage, configs))
        if losses is None:
            return _foreseen(preset, search, part, grids, train, more)
        for trial, config in zip(wanted, configs, strict=True):
            tried[trial.grid].add(trial.lr)
            if config.run_id in losses:
                results.append(Result(losses[config.run_id], trial))
            else:
                undecided.add(trial.pair)
        wanted = []
        for grid in grids:
            if grid[:2] in undecided:
                continue
            lr = search.next_rate({trial.lr: loss for loss, trial in results if trial.grid == grid})
            if lr is not None and lr not in tried[grid]:
                wanted.append(Trial(*grid, lr))
    finalists = {
        pair: search.finalists([one for one in results if one.trial.pair == pair])
        for pair in pairs
        if pair not in undecided
    }
    finals = {
        result.trial: preset.trial(part, result.trial, final=True, **more)
        for near in finalists.values()
        if len(near) > 1
        for result in near
    }
    final_losses = train(Stage("finals", list(finals.values()))) or {}
    undecided |= {trial.pair for trial, config in finals.items() if config.run_id not in final_losses}

    def final_loss(result: Result) -> float:
        config = finals.get(result.trial)
        return math.inf if config is None else final_losses[config.run_id]

    best = [min(near, key=final_loss) for pair, near in finalists.items() if pair not in undecided]
    return {trial.pair: Choice(trial.lr, search.settings(trial.scheme)[trial.setting], loss) for loss, trial in best}


def _foreseen(
    preset: Preset, search: Search, part: Part, grids: Sequence[Grid], train: Train, more: Mapping[str, Any]
) -> dict[Pair, Choice]:
    """Before anything is known: the other rates to count on, and the middle one for every pair."""
    rates = sorted(search.foreseen)
    others = [Trial(*grid, lr) for grid in grids for lr in rates if lr not in search.rates]
    train(Stage(search.stage, [preset.trial(part, trial, **more) for trial in others]))
    return {(scheme, depth): Choice(rates[len(rates) // 2]) for scheme, depth, _ in grids}


def planned(preset: Preset, **more: Any) -> list[tuple[str, TrainConfig]]:
    """("search" or "runs", configuration) of every run of a preset, in order, before anything is known.

    Rates to be found are taken in the middle of the grid. A search may grow its grid and hold finals.
    """
    plan: dict[tuple[str, str], TrainConfig] = {}

    def note(stage: Stage) -> None:
        for config in stage.configs:
            plan.setdefault((stage.what, config.run_id), config)

    walk(preset, note, **more)
    return [(what, config) for (what, _), config in plan.items()]
