"""The study's sweeps as data: the runs of each preset."""

from __future__ import annotations

from typing import Any

from normlab.errors import NormlabError
from normlab.schemes import BASELINE, DEFAULT, DYT, GAIN_CONTROL, LNS, SCHEMES, tagged
from normlab.study.own_file import executed
from normlab.training.grids import LeagueSearch, Part, Preset, Reported, Search, Variant
from normlab.training.presets import TINY, init_std


def _scaled_lambda(scale: float, gamma0: float | None = None, schemes: tuple[str, ...] = (), **more: Any) -> Variant:
    """lambda `scale` times BHyT's; gamma0 by default its inverse, so that small inputs see the same map and the tanh
    alone differs. The statistic is exact: the carried one takes gamma for 1."""
    start = 1 / scale if gamma0 is None else gamma0
    model = {"lam_input": 2.0 * scale, "lam_post": 1.0 * scale, "gamma0": start, "carried": "exact"}
    return Variant({"model": model, **more}, schemes)


# Two coordinates of the embeddings start 50 times as large as the others: |x|/rms there is 8, as large as it can be.
_OUTLIERS: dict[str, Any] = {"outlier_channels": 2, "outlier_size": 1.0}


# Runs that learn: 6.1M tokens, two and a half times the text. What is chosen is chosen on other blocks, another seed.
_TRAINED: dict[str, Any] = {
    "steps": 6000,
    "compile": True,
    "held_out": "test",
    "eval_every": 1000,
    "eval_blocks": 256,
    "probe_every": 1000,
    "probe_blocks": 16,
    "probe_also": "relative_contribution,update_cosine,block_influence,update_effective_rank,attention_entropy,"
    "attention_logit_max,massive_activation_ratio,carried_var_ratio,saturation,saturation_bound,saturation_95,"
    "tanh_input_max,tanh_input_max_bound",
    "experiment_blocks": 32,
    "log_every": 20,
    "checkpoint_every": 200,
}
_CHOOSING: dict[str, Any] = {
    "seed": 1000,
    "steps": 2000,
    "held_out": "validation",
    "probe_every": 0,
    "experiment_blocks": 0,
    "eval_every": 2000,
}
# One pass over a text that is split by file. Gains learn at a tenth of the rate; gradients are clipped where few are.
_GAINS_SLOWER: dict[str, Any] = {"gain_lr_ratio": 0.1}
_ONE_PASS: dict[str, Any] = {
    **_TRAINED,
    **_GAINS_SLOWER,
    "corpus": "packages",
    "clip": 5.0,
    "store_all": True,
}


# One recipe for all that is compared: one pass over a text that is split by file, gains at the whole rate, initial
# weights that fit the width. bfloat16, because runs in two precisions are up to 0.04 nats apart.
_RECIPE: dict[str, Any] = {
    **_TRAINED,
    "corpus": "packages",
    "init_std": init_std(128),
    "clip": 5.0,
    "dtype": "bfloat16",
    "store_all": True,
}
_MAIN = tagged("main")
_OTHERS = tuple(name for name in tagged("contender") if name not in _MAIN)
_WARMED_UP = tagged("warmed_up")
_WARM_UP = (
    Variant(schemes=tuple(name for name in (*_MAIN, *_OTHERS) if name not in _WARMED_UP)),
    Variant({"warmup": 0.3}, _WARMED_UP),
)


_FAR = tuple(name for name in SCHEMES if name not in tagged("quadratic"))


def _of(scheme: str, *rates: float, **fields: Any) -> tuple[Variant, ...]:
    return tuple(Variant({"lr": rate, **fields}, (scheme,)) for rate in rates)


def _at_rates(*rates: float) -> tuple[Variant, ...]:
    return tuple(Variant({"lr": rate}) for rate in rates)


PRESETS = {
    preset.name: preset
    for preset in (
        TINY,
        Preset(
            "gain_or_bound",
            parts=(
                Part(
                    {8: 3},
                    (*tagged("bound"), GAIN_CONTROL),
                    variants=(
                        _scaled_lambda(1.0),
                        *(_scaled_lambda(scale, schemes=tagged("bound")) for scale in (5.0, 10.0, 25.0)),
                        _scaled_lambda(5.0, 1.0, tagged("bound")),
                        _scaled_lambda(1.0, **_OUTLIERS),
                        _scaled_lambda(5.0, schemes=tagged("bound"), **_OUTLIERS),
                        _scaled_lambda(1.0, schemes=tagged("bound"), width=256),
                        _scaled_lambda(5.0, schemes=tagged("bound"), width=256),
                    ),
                ),
            ),
            rate=3e-3,
            fields={"probe_also": "saturation,saturation_95,tanh_input_max"},
        ),
        Preset(
            "depth",
            parts=(Part({16: 1, 256: 1}, _FAR), Part({1000: 1}, tagged("extreme"))),
            # So small that a core trains a thousand layers in minutes; nearly bytes, as in `tiny`. One rate for all: it
            # shows which schemes need no care of their own, not what each can reach. At 3e-3 so few steps are too few
            # for any at 256 layers; what a scheme reaches at 16 by the same steps says what depth took from it.
            rate=1e-2,
            fields={
                "width": 32,
                "vocab_size": 320,
                "batch_size": 4,
                "block_length": 64,
                "steps": 150,
                "probe_every": 150,
                "probe_blocks": 4,
                "eval_every": 75,
                "eval_blocks": 64,
                "checkpoint_every": 0,
                "keep_weights": False,
            },
        ),
        Preset(
            "trained",
            parts=(
                Part({4: 3, 8: 1}, tagged("core"), kept=(8,)),
                Part({16: 3}, tagged("core")),
                Part({4: 1, 16: 1}, tagged("further")),
                Part({32: 1}, tagged("deep")),
                Part({64: 1}, tagged("deepest")),
            ),
            # Where the best of most first searches lay. Rates that are alike after 2,000 steps need not be after 6,000.
            rate=Search((2e-3, 4e-3, 8e-3), (4, 16), _CHOOSING, finals={"steps": _TRAINED["steps"]}),
            fields=_TRAINED,
        ),
        Preset(
            "gains",
            parts=(
                Part(
                    {4: 6},
                    tagged("small_gain"),
                    variants=tuple(
                        Variant({"lr": rate, **change}, (scheme,))
                        for scheme, rate in zip(tagged("small_gain"), (4e-3, 1.6e-2), strict=True)
                        for change in ({}, _GAINS_SLOWER, {"model": {"qk_norm": "rms_head"}})
                    ),
                ),
            ),
            rate=4e-3,  # every variant has its own
            fields=_ONE_PASS | {"gain_lr_ratio": 1.0, "stop_at": 3000, "experiment_blocks": 0},
        ),
        Preset(
            "depth_and_rate",
            parts=(
                Part({16: 4}, tagged("rates"), variants=_at_rates(4e-3, 8e-3)),
                Part({16: 4}, tagged("trained_gain"), variants=_at_rates(8e-3)),
                Part({16: 4}, tagged("rates"), variants=_at_rates(1e-3)),
                Part({4: 4}, tagged("rates"), variants=_at_rates(4e-3, 8e-3)),
            ),
            rate=4e-3,  # every variant has its own
            fields=_ONE_PASS,
        ),
        Preset(
            # Which initial weights the recipe has: decided on the baseline alone, by the validation loss.
            "pilot",
            parts=(
                Part({8: 1}, (BASELINE,), variants=tuple(Variant({"init_std": std}) for std in (0.04, 0.057, 0.08))),
            ),
            rate=4e-3,
            fields=_RECIPE,
        ),
        Preset(
            "grid",
            parts=(
                Part({8: 1}, (*_MAIN, *_OTHERS), variants=_WARM_UP, kept=(8,)),
                Part({8: 1}, (DEFAULT,), variants=(Variant({"lr": 8e-3, "model": {"lam_last": 10.0}}),), kept=(8,)),
                Part({8: 4}, _MAIN),
                Part({16: 1}, _MAIN, kept=(16,)),
                Part({16: 4}, _MAIN),
                Part({4: 1}, _MAIN, kept=(4,)),
                Part({4: 4}, _MAIN),
                Part({8: 4}, tagged("exact_bound"), variants=(_scaled_lambda(5.0),), rate_of=tagged("exact_bound")[0]),
                Part({16: 4}, _MAIN, variants=_at_rates(4e-3)),
                Part({8: 4}, _OTHERS, variants=_WARM_UP, best=4),
            ),
            rate=Reported((2e-3, 4e-3, 8e-3), (4, 8, 16)),
            fields=_RECIPE,
        ),
        Preset(
            "league",
            parts=(Part({8: 3}, tuple(SCHEMES), kept=(8,), best=12, always=tagged("always_final")),),
            rate=LeagueSearch((2e-3, 8e-3), (8,), _CHOOSING | {"probe_every": 2000}),
            fields=_ONE_PASS,
        ),
        Preset(
            # For a quarter of an hour of one GPU, each part of use alone: benchmarks/gpu_runs.py.
            "gpu",
            parts=(
                Part(
                    {24: 1},
                    variants=(
                        *_of(BASELINE, 2e-3, 4e-3),
                        *_of(LNS, 2e-3),
                        *_of(DEFAULT, 4e-3),
                        *_of(GAIN_CONTROL, 4e-3),
                        *_of(DYT, 1e-3, warmup=0.3),
                    ),
                ),
                Part(
                    {24: 1},
                    variants=(
                        *_of(LNS, 4e-3, 1e-3),
                        *_of(BASELINE, 1e-3),
                        *_of(DEFAULT, 2e-3),
                        *_of(GAIN_CONTROL, 2e-3),
                        *_of(DYT, 5e-4, warmup=0.3),
                    ),
                ),
                Part(
                    {6: 1},
                    variants=(
                        *_of(BASELINE, 2e-3, 4e-3),
                        *_of(LNS, 2e-3, 4e-3),
                        *_of(DEFAULT, 4e-3),
                        *_of(DYT, 1e-3, warmup=0.3),
                    ),
                ),
                Part({24: 2}, variants=(*_of(BASELINE, 2e-3), *_of(LNS, 2e-3))),
            ),
            rate=2e-3,  # every variant has its own
            fields=_TRAINED
            | {
                "width": 512,
                "heads": 8,
                "kv_heads": 4,
                "intermediate": 1408,
                "init_std": 0.028,
                "corpus": "packages",
                "block_length": 256,
                "batch_size": 32,
                "steps": 1200,
                "clip": 5.0,
                "dtype": "bfloat16",
                "compile": False,  # it would take longer than it saves
                "store_all": True,
                "probe_every": 600,
                "eval_every": 600,
                "eval_blocks": 128,
                "experiment_blocks": 8,
                "checkpoint_every": 0,
            },
        ),
        Preset(
            "tanh",
            parts=(
                Part(
                    {8: 4},
                    (*tagged("exact_bound"), GAIN_CONTROL),
                    variants=(
                        _scaled_lambda(1.0, schemes=tagged("exact_bound")),
                        _scaled_lambda(25.0, schemes=tagged("exact_bound")),
                        Variant(schemes=(GAIN_CONTROL,)),
                    ),
                ),
                Part({8: 4}, tagged("exact_bound"), variants=(_scaled_lambda(5.0),)),
            ),
            rate=8e-3,
            fields=_ONE_PASS,
        ),
    )
}


def get_preset(what: str) -> Preset:
    """The preset of that name, or of `FILE.py:NAME`, a `Preset` of the reader's own.

    Raises:
        NormlabError: there is none, or the file does not run.
    """
    path, is_file, name = what.rpartition(".py:")
    if is_file:
        found = executed(f"{path}.py").names.get(name)
        if not isinstance(found, Preset):
            raise NormlabError(f"{path}.py has no preset {name!r}: name a normlab.training.grids.Preset")
        return found
    if what not in PRESETS:
        raise NormlabError(f"unknown preset {what!r}; known are {', '.join(PRESETS)}, or write FILE.py:NAME")
    return PRESETS[what]
