"""LNS against Pre-LN at equal rates: the models of data/depth_and_rate.

texts          every text by the name that marks it in the page
compared       LNS over or minus Pre-LN after 16 blocks: each quantity at each rate, and each scheme at its best
deepened       the gain in loss from 4 to 16 blocks, where both depths have runs
trained_gain   LNS with a trained gain against LNS at one rate
deep           the quantities of one run, for any folder of runs of 16 blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pandas as pd
from findings import LNS, PRE_LN, UNIFORM, cell, entropy, experiments, interval, manifests, plain, runs, turned
from tables import table

from normlab.analysis.quantities import last_values
from normlab.analysis.selection import Selection, mean_of, one_precision, summarize, title_of
from normlab.analysis.verdicts import DIFFERENT, differences, judged, means
from normlab.schemes import tagged
from normlab.study.questions import ENOUGH

FOLDER, SHALLOW, DEEP = "depth_and_rate", 4, 16
EARLY = 1000  # of 6,000 steps
MINUS = "LNS minus Pre-LN"
(TRAINED_GAIN,) = tagged("trained_gain")
MATRICES = ("gate", "up", "down")
LOWEST, LOW, HIGH, BEST = 0.001, 0.004, 0.008, "best"
NAMED = {"lowest": LOWEST, "low": LOW, "high": HIGH}  # in the names of texts; LOWEST has 16 blocks only
RATES = tuple(NAMED.values())
PLACES = {**{rate: f"both at rate {rate:g}" for rate in RATES}, BEST: "each at its best"}
# Quantity -> its name on the page, and the metric that says whether it is compared as a ratio.
QUANTITIES = {
    "loss": ("held-out loss, nats", "loss"),
    "first": ("L2 norm of a token after block 1", "token_l2_mean"),
    "size": ("L2 norm of a token after block 16", "token_l2_mean"),
    "variance": ("variance of the stream after block 16", "feature_var_mean"),
    "growth": ("that variance over the one after block 1", "feature_var_mean"),
    "early": ("cost of leaving out one of blocks 2 to 8, their sum, nats", "skip_delta_loss"),
    "skip": ("cost of leaving out one of blocks 9 to 15, their mean, nats", "skip_delta_loss"),
    "spread": ("spread of the costs of blocks 2 to 15, standard deviation over mean", "token_l2_mean"),
    "jacobian": ("distance of the Jacobians of blocks 9 to 15 from the identity", "jacobian_identity"),
    "angle": ("angle by which these turn the stream, as a share of π", "angular_distance"),
}
DIGITS = {"angle": 3}
FIRST_SCREEN = {
    "loss": "loss minus Pre-LN's",
    "size": "stream over Pre-LN's",
    "skip": "cost of a deep block minus Pre-LN's",
}


def texts() -> dict[str, str]:
    made = {}
    for name, rate in NAMED.items():
        made |= {
            f"lns_loss_{name}": in_words("loss", rate),
            f"lns_first_{name}": interval(compared().loc[("first", rate)]),
            f"lns_size_{name}": interval(compared().loc[("size", rate)]),
            f"lns_skip_{name}_less": interval(turned(compared().loc[("skip", rate)])),
            f"unseen_gap_{name}": interval(unseen_gap().loc[rate], 3, sign=True),
            f"first_mlp_in_{name}": interval(over_pre_ln("mlp_norm_in", "token_l2_mean", rate)),
            f"first_early_{name}": interval(over_pre_ln("block_out", "token_l2_mean", rate, EARLY)),
        }
    dtypes = summarize(runs(FOLDER))["dtype"]
    size = {manifest["config"]["depth"]: manifest["parameters"] for manifest in manifests(FOLDER)}
    best = {name: f"{rate:g}" for name, rate in best_rates(deep(FOLDER)).items()}
    return made | {
        "lns_best_rate": best[LNS],
        "pre_ln_best_rate": best[PRE_LN],
        "lns_loss_best": in_words("loss", BEST),
        "lns_size_best": interval(compared().loc[("size", BEST)]),
        "lns_lead_high": interval(turned(compared().loc[("loss", HIGH)])),
        "equal_bfloat16": f"{(dtypes == 'bfloat16').sum()} of {len(dtypes)}",
        "table_of_rates_and_streams": _streams(),
        "table_of_equal": _table({name: words for name, (words, _) in QUANTITIES.items()}),
        "table_of_first_screen": _table(FIRST_SCREEN),
        "equal_gain_pre_ln": interval(deepened().loc[(LOW, PRE_LN)]),
        "equal_minus_low": interval(deepened().loc[(LOW, MINUS)], sign=True),
        "equal_minus_best": interval(deepened().loc[(BEST, MINUS)], sign=True),
        "equal_shallow_low": interval(shallow_gap(), sign=True),
        "equal_parameters": f"{size[DEEP] / size[SHALLOW]:.1f}",
        "table_of_equal_gains": _gains(),
        "unseen_gap_best": interval(unseen_gap().loc[BEST], 3, sign=True),
        "first_matrices_low": _matrices(LOW),
        "trained_gain_loss": interval(trained_gain().loc["loss"], sign=True),
        "trained_gain_size": interval(trained_gain().loc["size"]),
        "trained_gain_skip": interval(trained_gain().loc["skip"], sign=True),
        "trained_gain_dead": _uniform_attentions(TRAINED_GAIN),
        "fixed_gain_dead": _uniform_attentions(LNS),
    }


def _table(names: Mapping[str, str]) -> str:
    """A row per quantity, a column per rate: bold where the verdict is *different*."""
    rows = []
    for quantity, words in names.items():
        cells = [(in_words(quantity, place), compared().loc[(quantity, place), "verdict"]) for place in PLACES]
        rows.append((words, *(f"**{text}**" if verdict == DIFFERENT else text for text, verdict in cells)))
    return table(("LNS against Pre-LN", *PLACES.values()), rows)


def _streams() -> str:
    """The stream of 16 blocks early and late, and the loss, at each rate: geometric means, of the loss the mean."""
    about = one_precision(summarize(runs(FOLDER))).query("depth == @DEEP")
    sizes = runs(FOLDER).query("site == 'block_out' and mask == 'all' and metric == 'token_l2_mean'")
    by_layer = sizes.pivot_table(index=["run", "step"], columns="layer", values="value", observed=True)
    rows = []
    for scheme in (PRE_LN, LNS):
        for rate in RATES:
            own = about.query("scheme == @scheme and lr == @rate")
            cells = []
            for step in (EARLY, sizes["step"].max()):
                here = by_layer.loc[[(run, step) for run in own.index]]
                first, last = (mean_of(here[layer], "token_l2_mean") for layer in (1, DEEP))
                cells += [plain(first, 1), plain(last / first, 1)]
            rows.append((title_of(scheme), f"{rate:g}", *cells, plain(own["eval_loss"].mean())))
    head = (
        "scheme",
        "rate",
        f"block 1 after {EARLY:,} steps",
        "block 16 over it",
        "block 1 at the end",
        "block 16 over it",
    )
    return table((*head, "loss"), rows)


def in_words(quantity: str, place: float | str) -> str:
    """LNS minus Pre-LN with its interval; of a size "x" and LNS over Pre-LN."""
    row = compared().loc[(quantity, place)]
    is_ratio = row["kind"] == "ratio"
    return ("x " if is_ratio else "") + interval(row, DIGITS.get(quantity, 2), sign=not is_ratio)


@cache
def compared() -> pd.DataFrame:
    """LNS against Pre-LN; the quantities of a place are one family, a column of the page's table."""
    values = deep(FOLDER)
    rows = [
        judged(pd.concat([_difference(here, quantity) for quantity in QUANTITIES], ignore_index=True)).assign(
            quantity=list(QUANTITIES), place=place
        )
        for place, here in _at_places(values).items()
    ]
    return pd.concat(rows).set_index(["quantity", "place"])


def _at_places(values: pd.DataFrame) -> dict[float | str, pd.DataFrame]:
    """The rows of runs of 16 blocks at each equal rate, and those of each scheme at its best one."""
    best = values["scheme"].map(best_rates(deep(FOLDER)))
    return {**{rate: values[values["lr"] == rate] for rate in RATES}, BEST: values[values["lr"] == best]}


def best_rates(values: pd.DataFrame) -> pd.Series:
    """The rate of each scheme with the lowest mean loss, of those with enough seeds."""
    losses = values.groupby(["scheme", "lr"])["loss"].agg(["mean", "size"])
    losses = losses.loc[losses["size"] >= ENOUGH, "mean"].unstack()
    return losses.idxmin(axis=1)


@cache
def deepened() -> pd.DataFrame:
    """Held-out loss of 4 blocks minus that of 16: each scheme's, and LNS's minus Pre-LN's.

    The rows of a place are one family. At the best rate each depth of a scheme has its own.
    """
    about = one_precision(summarize(runs(FOLDER))).rename(columns={"eval_loss": "loss"})
    best = pd.concat({depth: best_rates(own) for depth, own in about.groupby("depth")})
    own = {rate: about[about["lr"] == rate] for rate in (LOW, HIGH)}
    own[BEST] = about[about["lr"] == [best.get(place) for place in zip(about["depth"], about["scheme"], strict=True)]]
    rows = []
    for place, here in own.items():
        losses = here.pivot(index=["scheme", "seed"], columns="depth", values="loss")
        gain = (losses[SHALLOW] - losses[DEEP]).dropna().rename("value").reset_index().assign(depth=DEEP)
        found = pd.concat([means(gain, "loss"), differences(gain, LNS, PRE_LN, "loss")], ignore_index=True)
        kind = [MINUS if b == PRE_LN else a for a, b in found.reindex(columns=["a", "b"]).itertuples(index=False)]
        rows.append(judged(found).assign(place=place, what=kind))
    return pd.concat(rows).set_index(["place", "what"])


def _matrices(rate: float) -> str:
    """The smallest and the largest of LNS's matrices of the MLP of block 1, over Pre-LN's."""
    sizes = [over_pre_ln(f"mlp.{name}_proj.weight", "parameter_rms", rate)["estimate"] for name in MATRICES]
    return f"{plain(min(sizes))} to {plain(max(sizes))}"


@cache
def over_pre_ln(site: str, metric: str, rate: float, step: int | None = None) -> pd.Series:
    """A size at block 1 of 16, LNS's over Pre-LN's at one rate: after a step, by default the last."""
    about = one_precision(summarize(runs(FOLDER))).query("depth == @DEEP and lr == @rate")
    rows = runs(FOLDER).query(
        "run in @about.index and site == @site and metric == @metric and layer == 1 and mask == 'all'"
    )
    here = rows[rows["step"] == (rows["step"].max() if step is None else step)].set_index("run")["value"]
    return differences(about.assign(value=here), LNS, PRE_LN, "token_l2_mean").iloc[0]


@cache
def unseen_gap() -> pd.DataFrame:
    """LNS minus Pre-LN of held-out minus seen loss, 16 blocks; one row per place, the equal rates one family."""
    about = one_precision(summarize(runs(FOLDER))).query("depth == @DEEP")
    seen = last_values(Selection(runs(FOLDER), about), "seen_loss").set_index("run")["value"]
    places = _at_places(about.assign(value=about["eval_loss"] - seen))
    *equal, own = (differences(here, LNS, PRE_LN, "loss") for here in places.values())
    return pd.concat([judged(pd.concat(equal)), judged(own)]).assign(place=list(places)).set_index("place")


def shallow_gap() -> pd.Series:
    """LNS's loss minus Pre-LN's, of 4 blocks at the lower rate; a comparison alone."""
    about = one_precision(summarize(runs(FOLDER))).query("depth == @SHALLOW and lr == @LOW")
    return differences(about.assign(value=about["eval_loss"]), LNS, PRE_LN, "loss").iloc[0]


def _gains() -> str:
    places = (LOW, HIGH, BEST)
    rows = [
        (what if what == MINUS else title_of(what), *(cell(deepened().loc[(place, what)]) for place in places))
        for what in (PRE_LN, LNS, MINUS)
    ]
    return table(("gain in loss from 4 to 16 blocks", *(PLACES[place] for place in places)), rows)


def _difference(values: pd.DataFrame, quantity: str, a: str = LNS, b: str = PRE_LN) -> pd.DataFrame:
    return differences(values.assign(value=values[quantity]), a, b, QUANTITIES[quantity][1])


@cache
def trained_gain() -> pd.DataFrame:
    """LNS with a trained gain against LNS, 16 blocks at the higher rate: the quantities are one family."""
    here = deep(FOLDER).query("lr == @HIGH")
    rows = pd.concat([_difference(here, quantity, TRAINED_GAIN, LNS) for quantity in FIRST_SCREEN])
    return judged(rows).assign(quantity=list(FIRST_SCREEN)).set_index("quantity")


def _uniform_attentions(scheme: str) -> str:
    """In how many models of 16 blocks at the higher rate a block after the first has a uniform attention."""
    about = one_precision(summarize(runs(FOLDER))).query("scheme == @scheme and depth == @DEEP and lr == @HIGH")
    dead = entropy(runs(FOLDER)).loc[about.index].drop(columns=1).gt(UNIFORM).any(axis=1)
    return f"{dead.sum()} of {len(dead)}"


@cache
def deep(folder: str) -> pd.DataFrame:
    """Quantities of the runs of 16 blocks after training: `scheme depth seed lr`, then a column for each.

    `QUANTITIES` names them. Those of blocks 9 to 15 are means, that of blocks 2 to 8 is a sum.
    """
    about = one_precision(summarize(runs(folder))).query("depth == 16")
    stats = runs(folder).query("run in @about.index and site == 'block_out' and mask == 'all'")
    stats = stats[stats["step"] == stats["step"].max()]
    size, variance = (
        stats[stats["metric"] == metric].pivot_table(index="run", columns="layer", values="value", observed=True)
        for metric in ("token_l2_mean", "feature_var_mean")
    )
    tried = experiments(folder).query("run in @about.index")
    angles = tried.query("metric == 'angular_distance' and other == layer + 1 and 9 <= other <= 15")
    costs = tried.query("part == 'block' and 2 <= layer <= 15 and metric == 'skip_delta_loss'")
    by_run = costs.groupby("run", observed=True)["value"]
    by_block = tried.query("part == 'block' and 9 <= layer <= 15")
    means = by_block.pivot_table(index="run", columns="metric", values="value", observed=True)
    return about[["scheme", "depth", "seed", "lr"]].assign(
        loss=about["eval_loss"],
        first=size[1],
        size=size[16],
        variance=variance[16],
        growth=variance[16] / variance[1],
        early=costs[costs["layer"] <= 8].groupby("run", observed=True)["value"].sum(),
        spread=by_run.std(ddof=0) / by_run.mean(),
        angle=angles.groupby("run", observed=True)["value"].mean(),
        jacobian=means["jacobian_identity"],
        skip=means["skip_delta_loss"],
    )
