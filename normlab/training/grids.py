"""The parts of a sweep, and the order in which they are trained.

`Preset`    a sweep: its parts, its learning rates, and fields that all its runs share
`Part`      schemes x depths x seeds x variants
`Variant`   a change to runs
`walk`      hands a preset's runs to whoever trains them, stage by stage; `planned` lists them
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from normlab.errors import NormlabError
from normlab.runs import Run
from normlab.schemes import STUDIED, get_scheme
from normlab.training.config import TrainConfig
from normlab.training.rates import Choice, Choices, Pair, Rates, Trial


@dataclass(frozen=True)
class Variant:
    """A change to runs of a preset.

    fields: of TrainConfig, instead of the preset's; `model` entry by entry. Runs with an `lr` of their own need no
    choice of one. schemes: by default those of the part.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    schemes: tuple[str, ...] = ()

    @property
    def model(self) -> Mapping[str, Any]:
        """What it changes in the model."""
        return self.fields.get("model", {})


@dataclass(frozen=True)
class Part:
    """Some of a preset's runs: schemes x depths x seeds x variants.

    Args:
        depths: depth -> number of seeds (0, 1, ...).
        variants: of every run. By default each is trained once, unchanged.
        kept: depths whose seed 0 keeps its weights.
        best: train only that many schemes, those with the lowest loss at their best rate, and none whose runs diverged.
            Where the preset, or every variant of a scheme, has one rate, its seed 0 decides.
        rate_of: the scheme whose learning rate all of the part take; by default each its own. This part or one before
            has that scheme.
    """

    depths: Mapping[int, int]
    schemes: tuple[str, ...] = STUDIED
    variants: tuple[Variant, ...] = (Variant(),)
    kept: tuple[int, ...] = ()
    best: int | None = None
    rate_of: str | None = None

    def __post_init__(self) -> None:
        for scheme in self.schemes:
            get_scheme(scheme)

    @property
    def trained(self) -> tuple[str, ...]:
        """The schemes that some variant is of."""
        return tuple(s for s in self.schemes if any(s in (v.schemes or self.schemes) for v in self.variants))

    def tried_in(self, scheme: str) -> Variant:
        """The variant that tries a scheme's rates: the first of this scheme without one of its own, if there is one.

        Of these it is the first that leaves the model unchanged, if there is one.
        """
        own = [v for v in self.variants if scheme in (v.schemes or self.schemes)]
        return min(own, key=lambda variant: ("lr" in variant.fields, bool(variant.model)))


@dataclass(frozen=True)
class Preset:
    """A sweep: its parts one after another, each after the trials of the learning rates that it needs.

    rate: one learning rate for all runs, or the rates that each scheme is tried at. fields: of TrainConfig, equal for
    all runs, where they differ from its defaults.
    """

    name: str
    parts: tuple[Part, ...]
    rate: float | Rates
    fields: Mapping[str, Any] = field(default_factory=dict)

    def only(self, schemes: Sequence[str] | None, depths: Sequence[int] | None) -> Preset:
        """The same for some schemes and depths.

        A new scheme joins the first part. A depth that is new to the preset, or to a scheme that is named, has one
        seed, in the first part with that scheme.

        NormlabError: no part's variants are of a scheme.
        """
        parts = self.parts
        if schemes is not None:
            schemes = list(dict.fromkeys(schemes))
            new = set(schemes).difference(*(part.schemes for part in parts))
            chosen = []
            for part in parts:
                joining = new if part is parts[0] else set()
                if kept := tuple(s for s in schemes if s in part.schemes or s in joining):
                    chosen.append(replace(part, schemes=kept))
            parts = tuple(chosen)
            if lacking := [s for s in schemes if not any(s in part.trained for part in parts)]:
                known = ", ".join(dict.fromkeys(scheme for part in self.parts for scheme in part.trained))
                raise NormlabError(f"preset {self.name} has no runs of {', '.join(lacking)}; it has {known}")
        if depths is not None:
            there = {depth for part in parts for depth in part.depths} if schemes is None else set()
            parts = at_depths(parts, dict.fromkeys(depths), new=set(depths) - there)
        return replace(self, parts=parts)

    def config(self, scheme: str, depth: int, seed: int, lr: float, more: Mapping[str, Any]) -> TrainConfig:
        """A run: the preset's fields, then those of `more`, replace the rest."""
        fields: dict[str, Any] = {"scheme": scheme, "depth": depth, "seed": seed, "lr": lr}
        return TrainConfig(**(fields | merged(self.fields, more)))

    def tried(self, part: Part) -> list[Pair]:
        """Scheme and depth of every choice that a part needs."""
        if part.best is None and not isinstance(self.rate, Rates):
            return []
        depths = sorted({self.tried_at(depth) for depth in part.depths})
        schemes = [s for s in part.trained if part.best is not None or "lr" not in part.tried_in(s).fields]
        return [(scheme, depth) for depth in depths for scheme in schemes]

    def trial(self, part: Part, pair: Pair, lr: float, **more: Any) -> TrainConfig:
        """Seed 0 of a scheme at a rate, in the variant that tries them.

        NormlabError: it would have no held-out loss to choose by, or the preset's fields set its rate.
        """
        scheme, depth = pair
        fields = merged({**more, "keep_weights": depth in part.kept}, part.tried_in(scheme).fields)
        config = self.config(scheme, depth, 0, lr, fields)
        if isinstance(self.rate, Rates) and config.lr != lr:
            raise NormlabError(
                f"preset {self.name} tries rates of {scheme} at depth {depth}, and all its runs there are given lr "
                f"{config.lr:g}: leave that out"
            )
        if not config.has_choice_loss:
            raise NormlabError(
                f"preset {self.name} chooses by the held-out loss, and runs of {scheme} at depth {depth} have none: "
                "give eval_every"
            )
        return config

    def grid(self, part: Part, choices: Choices, **more: Any) -> list[TrainConfig]:
        """A part's runs, in the order in which partial results say most: seed 0 at every depth first, shallow before
        deep. A scheme without a choice is left out where it needs one."""
        order = sorted((seed, depth) for depth, seeds in part.depths.items() for seed in range(seeds))
        configs = []
        for seed, depth in order:
            entered = self.entered(part, depth, choices)
            for variant in part.variants:
                for scheme in variant.schemes or part.schemes:
                    choice = self.choice_for(part.rate_of or scheme, depth, choices)
                    rate = variant.fields.get("lr") if choice is None else choice.lr
                    if scheme in entered and rate is not None:
                        keep = {"keep_weights": seed == 0 and depth in part.kept}
                        fields = merged({**more, **keep}, variant.fields)
                        configs.append(self.config(scheme, depth, seed, rate, fields))
        return configs

    def require_rates(self, part: Part, tried: Mapping[Pair, Mapping[str, Any]]) -> None:
        """Refuse a part with runs at a rate that is not chosen, or that is chosen on another model.

        A rate that is chosen on an unchanged model is every variant's.

        Args:
            tried: the changes to the model on which the rates of each pair are tried, in this part or one before.
        """
        takers = [v for v in part.variants if "lr" not in v.fields] if isinstance(self.rate, Rates) else []
        for variant, depth in itertools.product(takers, part.depths):
            for scheme in (s for s in part.schemes if s in (variant.schemes or part.schemes)):
                pair = source, at = part.rate_of or scheme, self.tried_at(depth)
                if pair not in tried:
                    raise NormlabError(
                        f"preset {self.name} gives {scheme} the rate of {source}, which is not tried before at depth "
                        f"{at}: train {source} too"
                    )
                if tried[pair] not in ({}, variant.model):
                    raise NormlabError(
                        f"preset {self.name} chooses the rate of {source} at depth {at} on models with "
                        f"{dict(tried[pair])}, and gives it to models with {dict(variant.model)}: train unchanged "
                        "models before both, or give one of them an lr"
                    )

    def entered(self, part: Part, depth: int, choices: Choices) -> Sequence[str]:
        """The schemes of a part that are trained at a depth, given the choices.

        The best are known once all have a choice.
        """
        if part.best is None:
            return part.schemes
        losses = {}
        for scheme in part.trained:
            choice = choices.get((scheme, self.tried_at(depth)))
            if choice is None:
                return ()
            losses[scheme] = choice.loss
        # NaN, for one that is not known yet, comes last.
        ranked = sorted(losses, key=lambda scheme: (math.isnan(losses[scheme]), losses[scheme]))
        best = [scheme for scheme in ranked if losses[scheme] != math.inf][: part.best]
        return [scheme for scheme in part.schemes if scheme in best]

    def tried_at(self, depth: int) -> int:
        """The depth whose choices a depth takes."""
        return self.rate.depth_for(depth) if isinstance(self.rate, Rates) else depth

    def choice_for(self, scheme: str, depth: int, choices: Choices) -> Choice | None:
        given = None if isinstance(self.rate, Rates) else Choice(self.rate)
        return choices.get((scheme, self.tried_at(depth)), given)


def at_depths(parts: Sequence[Part], depths: Collection[int], new: Set[int]) -> tuple[Part, ...]:
    """The parts at some depths. A scheme that no part has at one of `new` has it in the first part that it is in."""
    there = {(scheme, depth) for part in parts for scheme in part.trained for depth in part.depths}
    chosen = []
    for part in parts:
        lacking = {depth: tuple(s for s in part.trained if (s, depth) not in there) for depth in new}
        there |= {(scheme, depth) for depth, schemes in lacking.items() for scheme in schemes}
        whole = {depth for depth, schemes in lacking.items() if schemes == part.trained}
        if seeds := {d: part.depths.get(d, 1) for d in depths if d in part.depths or d in whole}:
            chosen.append(replace(part, depths=seeds))
        for depth in depths:
            if depth in lacking.keys() - whole and lacking[depth]:
                chosen.append(replace(part, schemes=lacking[depth], depths={depth: 1}))
    return tuple(chosen)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainConfig, `above` where both have one; likewise for each entry of `model`."""
    return {**below, **above, "model": {**below.get("model", {}), **above.get("model", {})}}


# Trains runs and returns their losses by run id: infinite for a diverged one, NaN for one not trained yet, none for one
# that failed.
Train = Callable[[Sequence[TrainConfig]], Mapping[str, float]]


def walk(preset: Preset, train: Train, **more: Any) -> dict[Pair, Choice]:
    """Hand a preset's stages to `train`, one after another, and return the choices of rates.

    more: fields of TrainConfig for all runs, below the preset's own. NormlabError: a choice is to be made between runs
    without a held-out loss, or none of the rates that a part's runs need (`Preset.require_rates`).
    """
    choices: dict[Pair, Choice] = {}
    if not any(map(preset.tried, preset.parts)):  # all parts share one pool of workers
        train([config for part in preset.parts for config in preset.grid(part, {}, **more)])
        return choices
    rates = preset.rate if isinstance(preset.rate, Rates) else Rates((preset.rate,), ())
    at_own: dict[Pair, Choice] = {}  # of schemes that have one rate in a part, and that no other part takes
    tried: dict[Pair, Mapping[str, Any]] = {}
    for part in preset.parts:
        own = {pair: part.tried_in(pair[0]) for pair in preset.tried(part)}
        tried = {pair: variant.model for pair, variant in own.items() if "lr" not in variant.fields} | tried
        preset.require_rates(part, tried)

        def losses(trials: Sequence[Trial], part: Part = part) -> dict[Trial, float]:
            configs = [preset.trial(part, *trial, **more) for trial in trials]
            known = train(configs)
            return {t: known[c.run_id] for t, c in zip(trials, configs, strict=True) if c.run_id in known}

        new = {pair: variant for pair, variant in own.items() if pair not in choices}
        given = [(pair, variant.fields["lr"]) for pair, variant in new.items() if "lr" in variant.fields]
        here = {pair: Choice(lr, loss) for (pair, lr), loss in (losses(given) if given else {}).items()}
        if pairs := [p for p, variant in new.items() if "lr" not in variant.fields and variant.model == tried[p]]:
            choices |= rates.choose(pairs, losses)
        train(preset.grid(part, here | choices, **more))
        at_own |= here
    return at_own | choices


def loss_of(run: Run) -> float:
    """The loss that a run takes part in choices with: infinite for a diverged one."""
    return run.choice_loss if math.isfinite(run.choice_loss) else math.inf


def planned(
    preset: Preset, finished: Callable[[TrainConfig], Run | None] = lambda config: None, **more: Any
) -> list[TrainConfig]:
    """Every run of a preset, in order.

    Rates to be found are the best of those that `finished` knows. Where one is not tried yet they are the middle one,
    and none lies beyond.
    """
    plan: dict[str, TrainConfig] = {}
    losses: dict[str, float] = {}

    def note(configs: Sequence[TrainConfig]) -> dict[str, float]:
        for config in configs:
            if config.run_id not in plan:
                plan[config.run_id] = config
                losses[config.run_id] = math.nan if (run := finished(config)) is None else loss_of(run)
        return losses

    walk(preset, note, **more)
    return list(plan.values())
