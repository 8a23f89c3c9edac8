"""Sweeps as data: which runs a preset name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normlab.errors import NormlabError
from normlab.schemes import BOUND_AND_CONTROL, GAIN_CONTROL, SCHEMES, SHORT_LIST, get_scheme
from normlab.training.config import TrainConfig


@dataclass(frozen=True)
class Variant:
    """A change to every run of a preset. fields: of TrainConfig, laid over the preset's, `model` entry by entry.
    schemes: default the preset's."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    schemes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """A sweep over scheme x depth x seed x variant, after a search for each scheme's learning rate.

    depths: depth -> number of seeds (0, 1, ...). learning_rates: tried at `search_depth`, seed 0; the one with the
    lowest final held-out loss is the scheme's at every depth. One learning rate: no search. fields: of TrainConfig, the
    same for all runs. variants: of every run; without them each is run once, as it is.
    """

    name: str
    depths: Mapping[int, int]
    learning_rates: tuple[float, ...]
    search_depth: int = 16
    schemes: tuple[str, ...] = tuple(SCHEMES)
    fields: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = (Variant(),)

    def __post_init__(self) -> None:
        for scheme in self.schemes:
            get_scheme(scheme)

    def config(self, scheme: str, depth: int, seed: int, lr: float, **more: Any) -> TrainConfig:
        fields = _laid_over(self.fields, more)
        return TrainConfig(**{**fields, "scheme": scheme, "depth": depth, "seed": seed, "lr": lr})

    def search(self, **more: Any) -> list[TrainConfig]:
        """The runs that choose each scheme's learning rate; none when there is nothing to choose."""
        if len(self.learning_rates) == 1:
            return []
        return [
            self.config(scheme, self.search_depth, 0, lr, **more)
            for scheme in self.schemes
            for lr in self.learning_rates
        ]

    def grid(self, lr: Mapping[str, float], **more: Any) -> list[TrainConfig]:
        """The sweep itself, in the order in which partial results say most: seed 0 at every depth first, shallow before
        deep."""
        order = [(seed, depth) for depth, seeds in self.depths.items() for seed in range(seeds)]
        return [
            self.config(scheme, depth, seed, lr[scheme], **_laid_over(more, variant.fields))
            for seed, depth in sorted(order)
            for variant in self.variants
            for scheme in variant.schemes or self.schemes
            if scheme in self.schemes
        ]


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainConfig, `above` where both have one; of `model`, so for each of its entries."""
    return {**below, **above, "model": {**below.get("model", {}), **above.get("model", {})}}


def _bent(strength: float, gamma0: float | None = None, schemes: tuple[str, ...] = (), **more: Any) -> Variant:
    """lambda `strength` times BHyT's; gamma0 by default its inverse, so that small inputs see the same map and the tanh
    alone differs. The statistic is exact: the carried one takes gamma for 1."""
    start = 1 / strength if gamma0 is None else gamma0
    model = {"lam_input": 2.0 * strength, "lam_post": 1.0 * strength, "gamma0": start, "carried": "exact"}
    return Variant({"model": model, **more}, schemes)


# Two coordinates of the embeddings start 50 times as large as the others: |x|/rms there is 8, as large as it can be.
_OUTLIERS: dict[str, Any] = {"outlier_channels": 2, "outlier_size": 1.0}


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "tiny",
            depths={2: 1, 4: 1, 8: 1},
            # Small batches of a small vocabulary learn most in the few minutes that the preset has. At 3e-3 and above
            # the residual stream of every scheme blows up in so short a run, and says nothing about normalization.
            learning_rates=(1e-3,),
            schemes=SHORT_LIST,
            fields={
                "width": 128,
                "vocab_size": 1024,
                "batch_size": 4,
                "block_length": 64,
                "steps": 300,
                "probe_every": 50,
                "eval_every": 100,
                "eval_blocks": 96,
            },
        ),
        Preset(
            "gain_or_bound",
            depths={8: 3},
            learning_rates=(3e-3,),
            schemes=(*BOUND_AND_CONTROL, GAIN_CONTROL),
            fields={
                "width": 128,
                "vocab_size": 4096,
                "steps": 300,
                "probe_every": 50,
                "probe_also": "saturation,saturation_95,tanh_input_max",
                "eval_every": 100,
                "eval_blocks": 128,
            },
            variants=(
                _bent(1.0),
                *(_bent(strength, schemes=BOUND_AND_CONTROL) for strength in (5.0, 10.0, 25.0)),
                _bent(5.0, 1.0, BOUND_AND_CONTROL),
                _bent(1.0, **_OUTLIERS),
                _bent(5.0, schemes=BOUND_AND_CONTROL, **_OUTLIERS),
                _bent(1.0, schemes=BOUND_AND_CONTROL, width=256),
                _bent(5.0, schemes=BOUND_AND_CONTROL, width=256),
            ),
        ),
        Preset(
            "small",
            depths={4: 3, 8: 3, 16: 3, 32: 1, 64: 1},
            learning_rates=(1e-3, 3e-3, 1e-2),
            fields={
                "width": 128,
                "vocab_size": 4096,
                "steps": 300,
                "probe_every": 50,
                "eval_every": 100,
                "eval_blocks": 128,
            },
        ),
    )
}


def get_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise NormlabError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]
