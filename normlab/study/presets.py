"""The study's sweeps as data: the runs of each preset."""

from __future__ import annotations

from typing import Any

from normlab.errors import NormlabError
from normlab.schemes import BASELINE, DEFAULT, DYT, GAIN_CONTROL, LNS, PERI_LN, tagged
from normlab.study.own_file import executed
from normlab.training.config import INIT_STD
from normlab.training.grids import Part, Preset, Variant
from normlab.training.presets import TINY, init_std
from normlab.training.rates import Rates

# lambda/kappa is 1 with g gamma0 = 0.2: small inputs see BHyT's map, and the tanh acts. The statistic is exact, as the
# carried one takes gamma for 1.
_ACTING_TANH = Variant({"model": {"lam_input": 10.0, "lam_post": 5.0, "gamma0": 0.2, "carried": "exact"}})

# One recipe for all that is compared, 6.1M tokens: one pass over a text that is split by file, gains at the whole rate,
# initial weights that fit the width. bfloat16, because runs in two precisions are up to 0.04 nats apart.
_RECIPE: dict[str, Any] = {
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
    "corpus": "packages",
    "init_std": init_std(128),
    "clip": 5.0,
    "dtype": "bfloat16",
    "store_all": True,
}
_RATES = 2e-3, 4e-3, 8e-3
_MAIN = tagged("main")
_OTHERS = tuple(name for name in tagged("contender") if name not in _MAIN)
_WARMED_UP = tagged("warmed_up")
_WARM_UP = (
    Variant(schemes=tuple(name for name in _OTHERS if name not in _WARMED_UP)),
    Variant({"warmup": 0.3}, _WARMED_UP),
)


def _of(scheme: str, *rates: float, **fields: Any) -> tuple[Variant, ...]:
    return tuple(Variant({"lr": rate, **fields}, (scheme,)) for rate in rates)


def _at_rates(*rates: float) -> tuple[Variant, ...]:
    return tuple(Variant({"lr": rate}) for rate in rates)


PRESETS = {
    preset.name: preset
    for preset in (
        TINY,
        Preset(
            "depth",
            # So small that a core trains 256 blocks in minutes; nearly bytes, as in `tiny`. It shows who still trains
            # there, not what each can reach.
            parts=(Part({16: 1, 256: 1}, (*_MAIN, *_OTHERS), variants=_at_rates(3e-3, 1e-2)),),
            rate=1e-2,  # every variant has its own
            fields={
                "width": 32,
                "init_std": init_std(32),
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
            # The recipe's initial weights were decided on the baseline alone, by the validation loss. Then, what those
            # of wide models do to four schemes at this width.
            "initial_weights",
            parts=(
                Part({8: 1}, (BASELINE,), variants=tuple(Variant({"init_std": std}) for std in (0.04, 0.057, 0.08))),
                Part(
                    {8: 1},
                    variants=tuple(
                        variant
                        for scheme, rate in ((BASELINE, 4e-3), (DYT, 4e-3), (DEFAULT, 8e-3), (PERI_LN, 4e-3))
                        for variant in _of(scheme, rate, init_std=INIT_STD)
                    ),
                ),
            ),
            rate=4e-3,  # every variant of the second part has its own
            fields=_RECIPE,
        ),
        Preset(
            "grid",
            parts=(
                Part({8: 1}, _MAIN, kept=(8,)),
                Part({8: 1}, (DEFAULT,), variants=(Variant({"lr": 8e-3, "model": {"lam_last": 10.0}}),), kept=(8,)),
                Part({8: 4}, _MAIN),
                Part({16: 1}, _MAIN, kept=(16,)),
                Part({8: 1}, _OTHERS, variants=_WARM_UP, kept=(8,)),
                Part({16: 4}, _MAIN),
                Part({4: 1}, _MAIN, kept=(4,)),
                Part({4: 4}, _MAIN),
                Part({8: 4}, tagged("exact_bound"), variants=(_ACTING_TANH,), rate_of=tagged("exact_bound")[0]),
                Part({16: 4}, _MAIN, variants=_at_rates(4e-3)),
                Part({8: 4}, _OTHERS, variants=_WARM_UP, best=4),
            ),
            rate=Rates(_RATES, (4, 8, 16)),
            fields=_RECIPE,
        ),
        Preset(
            # One more row for the table of the grid.
            "league",
            parts=(Part({8: 1}, _MAIN, variants=_at_rates(*_RATES)),),
            rate=4e-3,  # every variant has its own
            fields=_RECIPE,
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
            fields=_RECIPE
            | {
                "width": 512,
                "heads": 8,
                "kv_heads": 4,
                "intermediate": 1408,
                "init_std": 0.028,  # 0.02 sqrt(1024/width): trained before `initial_weights` chose the recipe's
                "block_length": 256,
                "batch_size": 32,
                "steps": 1200,
                "compile": False,  # it would take longer than it saves
                "probe_every": 600,
                "eval_every": 600,
                "eval_blocks": 128,
                "experiment_blocks": 8,
                "checkpoint_every": 0,
            },
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
