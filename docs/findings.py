"""The numbers of docs/findings.md, made from the shipped runs.

texts   every text by the name that marks it in the page
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from tables import table

import normlab
from normlab.analysis import claims
from normlab.analysis.compare import compare, compare_variants
from normlab.analysis.quantities import last_values, values_of
from normlab.analysis.selection import Selection, choose, in_order, summarize, title_of
from normlab.analysis.verdicts import DIFFERENT, differences, fisher, judged
from normlab.models import NormlabConfig
from normlab.study import questions, rates
from normlab.study.league import League, load, standings

ROOT = Path(__file__).resolve().parents[1]
PRE_LN, LNS, BHYT, GAIN_CONTROL = "pre_rmsnorm", "lns", "bhyt", "rmsnorm_gain"
SMALL_GAIN = ("bhyt", "bhyt_exact", "rmsnorm_gain")
PLAIN = ("pre_rmsnorm", "lns", "lns_gain")
MANY_STEPS = 500  # training loss is a mean over the last of them
UNIFORM = 0.98  # a uniform attention has more than this share of the largest entropy


def texts() -> dict[str, str]:
    parts = (depth, fit, blocks, stream, attention, slower_gains, tanh, search, warm_up, groups, deepest, on_a_gpu)
    return {name: text for part in parts for name, text in part().items()}


@cache
def runs(folder: str = "runs") -> pd.DataFrame:
    return normlab.load_runs(ROOT / "data" / folder)


@cache
def experiments(folder: str = "runs") -> pd.DataFrame:
    return normlab.load_experiments(ROOT / "data" / folder)


@cache
def chosen() -> pd.DataFrame:
    """One row per run of `data/runs`, each scheme at its chosen rate: `scheme depth seed lr eval_loss ...`."""
    return choose(runs(), depth=None).runs


@cache
def manifests(folder: str) -> list[dict]:
    return [normlab.runs.read_run(path).manifest for path in normlab.runs.find_runs(ROOT / "data" / folder)]


def learned(folder: str) -> str:
    """Count the runs of a folder that end below a trigram model of their text."""
    about = summarize(runs(folder))
    return f"{(about['eval_loss'] < about['trigram_loss']).sum()} of {len(about)}"


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def plain(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def interval(row: pd.Series, digits: int = 2, sign: bool = False) -> str:
    """An estimate and its interval: 0.10 [0.07, 0.12]."""
    estimate = signed(row["estimate"], digits) if sign else plain(row["estimate"], digits)
    if math.isnan(row["low"]):
        return estimate
    return f"{estimate} [{plain(row['low'], digits)}, {plain(row['high'], digits)}]"


def cell(row: pd.Series, sign: bool = True) -> str:
    """The interval, bold if the verdict is *different*; empty for one seed."""
    if not row["seeds"] > 1:
        return ""
    return f"**{interval(row, sign=sign)}**" if row["verdict"] == DIFFERENT else interval(row, sign=sign)


def several(depth: int) -> list[str]:
    """The schemes with several seeds at a depth."""
    seeds = chosen().query("depth == @depth").groupby("scheme")["seed"].nunique()
    return in_order(seeds.index[seeds > 1])


@cache
def against_pre_ln(metric: str, depth: int) -> pd.DataFrame:
    """Each scheme with several seeds against Pre-LN, judged as one family; indexed by scheme."""
    values = last_values(choose(runs(), depth=depth, same_rate=metric != "loss"), metric)
    rows = [differences(values, name, PRE_LN, metric) for name in several(depth) if name != PRE_LN]
    return judged(pd.concat(rows, ignore_index=True)).set_index("a")


@cache
def league() -> League:
    return load([ROOT / "data" / "league"])


@cache
def league_table() -> pd.DataFrame:
    return standings(league(), normlab.load_published())


@cache
def at_one_rate(metric: str) -> pd.DataFrame:
    """A size after the last block over Pre-LN's at the same rate, in runs as long as the league's search; one seed.

    A row per scheme, a column per rate. Models that end above a bigram model are left out.
    """
    table = pd.concat([league().search, runs("between")], ignore_index=True)
    about = summarize(table)
    values = last_values(Selection(table, about[about["eval_loss"] < about["bigram_loss"]]), metric)
    sizes = values.pivot_table(index="scheme", columns="lr", values="value")
    return (sizes / sizes.loc[PRE_LN]).dropna(axis="columns", how="all")


@cache
def league_minus(column: str, base: str = PRE_LN) -> pd.DataFrame:
    """Each scheme against `base` in the league's final runs; indexed by scheme. All that are planned are one family.

    column: a metric, `loss` on held-out text and `seen_loss` on a sample of the training text among them; or `gap`, the
    first of these two minus the second.
    """
    chosen = Selection(league().finals, summarize(league().finals))
    values = last_values(chosen, "loss" if column == "gap" else column)
    if column == "gap":
        seen = last_values(chosen, "seen_loss").set_index("run")["value"]
        values = values.assign(value=values["value"] - values["run"].map(seen))
    metric = "loss" if column in ("gap", "seen_loss") else column
    rows = [differences(values, name, base, metric) for name in in_order(values["scheme"]) if name != base]
    return judged(pd.concat(rows, ignore_index=True), family=questions.planned_finals()).set_index("a")


@cache
def bhyt_of_four(metric: str) -> pd.Series:
    """BHyT against Pre-LN in the league's final runs and one more seed of each, corrected as in the league."""
    table = pd.concat([league().finals, runs("fourth_seed")], ignore_index=True)
    values = last_values(Selection(table, summarize(table)), metric)
    return judged(differences(values, BHYT, PRE_LN, metric), family=questions.planned_finals()).iloc[0]


def pairs(values: pd.DataFrame, a: str, b: str, column: str = "value") -> pd.DataFrame:
    """Scheme a minus scheme b at each depth; `values` has one row per run, of all schemes that give the floor."""
    return judged(differences(values.assign(value=values[column]), a, b, "loss"))


def pair(values: pd.DataFrame, a: str, b: str, column: str = "value") -> pd.Series:
    """`pairs` of a single depth."""
    return pairs(values, a, b, column).iloc[0]


def listed(values: Iterable[float], digits: int = 2) -> str:
    """Numbers in a sentence: 0.1, 0.2 and 0.3."""
    *first, last = (plain(value, digits) for value in values)
    return f"{', '.join(first)} and {last}" if first else last


# Does depth pay?


def depth() -> dict[str, str]:
    gains = claims.depth_gain(runs(), 4, 16).query("seeds > 1").set_index("a")
    few = rates.by_tokens(rates.settled(runs("runs/search")), runs()).query("tokens == tokens.min()")
    loss = chosen().pivot_table(index=["scheme", "seed"], columns="depth", values="eval_loss")
    paired = (loss[4] - loss[16]).dropna().rename("value").reset_index().assign(depth=16)
    size = {
        depth: next(m["parameters"] for m in manifests("runs") if m["config"]["depth"] == depth) for depth in (4, 16)
    }
    return {
        "gain_lns_minus_pre_ln": interval(pair(paired, LNS, PRE_LN), sign=True),
        **{f"gain_few_{name}": signed(few.set_index("scheme")["gain"][title_of(name)]) for name in (PRE_LN, LNS)},
        "parameters_16_over_4": plain(size[16] / size[4], 1),
        "table_of_losses": _losses(gains),
    }


def _losses(gains: pd.DataFrame) -> str:
    mean = chosen().groupby(["scheme", "depth"])["eval_loss"].mean()
    rate = chosen().groupby("scheme")["lr"].first()
    pairs = {depth: against_pre_ln("loss", depth) for depth in (4, 16)}
    rows = []
    for scheme in in_order(chosen()["scheme"]):
        losses = [plain(mean[scheme, d]) if (scheme, d) in mean.index else "" for d in (4, 8, 16)]
        differ = [cell(pairs[d].loc[scheme]) if scheme in pairs[d].index else "" for d in (4, 16)]
        gain = cell(gains.loc[scheme], sign=False) if scheme in gains.index else ""
        rows.append((title_of(scheme), f"{rate[scheme]:g}", *losses, *differ, gain))
    rows.append(("trigram model", "", *[plain(chosen()["trigram_loss"].iloc[0])] * 3, "", "", ""))
    head = ("scheme", "rate", "4 blocks", "8", "16", "minus Pre-LN: 4 blocks", "16", "gain from 4 to 16")
    return table(head, rows)


# Does LNS fit better, or generalize better?


def fit() -> dict[str, str]:
    values = pd.concat([fit_values(depth) for depth in (4, 16)])
    columns = [pairs(values, LNS, PRE_LN, name).apply(cell, axis=1) for name in ("held_out", "training", "gap")]
    rows = zip((4, 16), *columns, strict=True)
    return {
        "lns_equal_rate": interval(pair(rate_of_pre_ln("loss"), LNS, PRE_LN), sign=True),
        "league_lns_loss": interval(league_minus("loss").loc[LNS], sign=True),
        "league_lns_seen": interval(league_minus("seen_loss").loc[LNS], sign=True),
        "league_lns_gap": interval(league_minus("gap").loc[LNS], 3, sign=True),
        "epochs": plain(manifests("runs")[0]["epochs"], 1),
        "table_of_fit": table(("blocks", "held-out loss", "training loss", "held-out minus training"), rows),
    }


def turned(row: pd.Series) -> pd.Series:
    """The difference the other way round."""
    return pd.Series({"estimate": -row["estimate"], "low": -row["high"], "high": -row["low"]})


def fit_values(depth: int) -> pd.DataFrame:
    """Held-out loss at the end, training loss of the last steps, and their gap: one row per run of a depth."""
    loss = runs().query("site == 'model' and metric == 'loss' and depth == @depth")
    last, by_run = loss["step"].max(), ["scheme", "depth", "seed"]
    training = loss[(loss["split"] == "train") & (loss["step"] > last - MANY_STEPS)]
    held_out = loss[(loss["split"] == "eval") & (loss["step"] == last)]
    values = pd.DataFrame(
        {
            "held_out": held_out.groupby(by_run, observed=True)["value"].mean(),
            "training": training.groupby(by_run, observed=True)["value"].mean(),
        }
    ).reset_index()
    values = values[values["scheme"].isin(several(depth))]
    return values.assign(gap=values["held_out"] - values["training"])


def rate_of_pre_ln(metric: str) -> pd.DataFrame:
    """Values of the schemes that were trained at Pre-LN's rate at depth 4, one row per run."""
    both = [last_values(choose(runs(folder), depth=4), metric) for folder in ("runs", "other_rates")]
    values = pd.concat(both)
    values = values[values["lr"] == values.loc[values["scheme"] == PRE_LN, "lr"].iloc[0]]
    return values[values.groupby("scheme")["seed"].transform("nunique") > 1]


# Which blocks do the work?

OF_BLOCKS = {
    "costliest": "costliest block",
    "early": "others of 2 to 8",
    "late": "sum of 9 to 16",
    "deep": "mean of 9 to 15",
    "last": "block 16",
    "change": "change",
}


def blocks() -> dict[str, str]:
    values = block_costs()
    mean = values.groupby("scheme")[list(OF_BLOCKS)].mean()
    rows = [(title_of(name), *map(plain, mean.loc[name])) for name in in_order(mean.index)]
    rows.append(("LNS minus Pre-LN", *lns_minus_pre_ln().apply(cell, axis=1)))
    return {"table_of_blocks": table(("scheme", *OF_BLOCKS.values()), rows)}


def lns_minus_pre_ln() -> pd.DataFrame:
    """LNS minus Pre-LN for each column of the table of blocks, judged as one family; indexed by column."""
    rows = [pairs(block_costs(), LNS, PRE_LN, name) for name in OF_BLOCKS]
    return judged(pd.concat(rows, ignore_index=True)).set_axis(list(OF_BLOCKS))


def block_costs() -> pd.DataFrame:
    """Costs of leaving out one of 16 blocks, and how far blocks 9 to 15 are from the identity: one row per run.

    The costliest block is in no sum.
    """
    cost, jacobian = by_layer("skip_delta_loss"), by_layer("jacobian_identity")
    others = cost.where(cost.lt(cost.max(axis=1), axis=0))
    values = {
        "costliest": cost.max(axis=1),
        "early": others.loc[:, 2:8].sum(axis=1),
        "late": cost.loc[:, 9:16].sum(axis=1),
        "deep": cost.loc[:, 9:15].mean(axis=1),
        "last": cost[16],
        "change": jacobian.loc[:, 9:15].mean(axis=1),
    }
    return pd.DataFrame(values).reset_index().assign(depth=16)


def by_layer(metric: str) -> pd.DataFrame:
    """An experiment on each block of the models of 16 blocks: a row per scheme and seed, a column per block."""
    rows = experiments().query("metric == @metric and part == 'block' and depth == 16")
    return rows.pivot_table(index=["scheme", "seed"], columns="layer", values="value", observed=True)


# Is the stream small?


def stream() -> dict[str, str]:
    sizes, losses = (against_pre_ln(metric, 16) for metric in ("token_l2_mean", "loss"))
    rows = [
        (title_of(name), cell(sizes.loc[name], sign=False), cell(losses.loc[name])) for name in in_order(sizes.index)
    ]
    by_rate = rates.by_rate(runs(), runs("other_rates"), depth=4)
    columns = zip(
        by_rate["scheme"],
        by_rate["lr"].map("{:g}".format),
        by_rate["loss"].map(plain),
        by_rate["spread"].map(plain),
        by_rate["token_l2"].map("{:.1f}".format),
        by_rate["against"].map(plain),
        strict=True,
    )
    low = differences(rate_of_pre_ln("token_l2_mean"), BHYT, PRE_LN, "token_l2_mean").iloc[0]
    growth = claims.growth(runs()).query("depth == 16").set_index("a")
    of_rate = by_rate.groupby("scheme")["token_l2"]
    sizes_league = league_minus("token_l2_mean")
    ends = {"growth": "estimate", "growth_low": "low", "growth_high": "high"}
    in_league = league_table().set_index("scheme")
    one_rate = at_one_rate("token_l2_mean")
    one_rate_rows = [
        (title_of(name), *("" if np.isnan(value) else plain(value) for value in one_rate.loc[name]))
        for name in in_order([LNS, "peri_ln", *SMALL_GAIN])
    ]
    return {
        "bhyt_loss": interval(losses.loc[BHYT]),
        "four_bhyt_stream": interval(bhyt_of_four("token_l2_mean")),
        "league_bhyt_growth": interval(in_league.loc[BHYT].rename(ends)),
        "league_pre_ln_growth": interval(in_league.loc[PRE_LN].rename(ends)),
        "league_lns_stream": interval(sizes_league.loc[LNS]),
        "four_bhyt_loss": interval(bhyt_of_four("loss"), sign=True),
        "peri_highest": plain(one_rate.loc["peri_ln"].max()),
        "peri_lowest": plain(one_rate.loc["peri_ln"].min()),
        "table_of_one_rate": table(("scheme", *(f"rate {rate:g}" for rate in one_rate)), one_rate_rows),
        "bhyt_stream_low_rate": interval(low),
        "bhyt_loss_low_rate": interval(pair(rate_of_pre_ln("loss"), BHYT, PRE_LN), sign=True),
        "one_block_low": plain(growth["one_block"].min()),
        "one_block_high": plain(growth["one_block"].max()),
        "growth_pre_ln": plain(growth.loc[PRE_LN, "estimate"], 1),
        "growth_lns": plain(growth.loc[LNS, "estimate"], 1),
        "growth_bhyt_seeds": listed(sorted(grown_of(BHYT, 16)), 1),
        "growth_control": f"{growth.loc[GAIN_CONTROL, 'estimate']:.0f}",
        "rate_moves": f"{(of_rate.max() / of_rate.min()).max():.0f}",
        "table_of_streams": table(("scheme", "L2 norm after block 16, over Pre-LN's", "loss minus Pre-LN's"), rows),
        "table_of_rates": table(("scheme", "rate", "loss", "apart", "L2 norm", "over Pre-LN's"), columns),
    }


def grown_of(scheme: str, depth: int) -> pd.Series:
    """L2 norm of a token after the last block over that after the first, of each seed."""
    grown = values_of(choose(runs(), depth=depth, same_rate=True), "growth")
    return grown.loc[grown["scheme"] == scheme, "value"]


# Where does attention die?


def attention() -> dict[str, str]:
    tables = [_uniform(runs(), 16), _uniform(runs(), 4), _uniform(runs("other_rates"), 4)]
    counts = pd.concat(tables, ignore_index=True).query("seeds > 1")
    rows = [
        (title_of(r.scheme), r.depth, f"{r.lr:g}", f"{r.models} of {r.seeds}", f"{r.dead} of {r.attentions}")
        for r in counts.sort_values(["depth", "lr"], ascending=[False, False], kind="stable").itertuples()
    ]
    deep = tables[0].set_index("scheme")
    found = {
        name: deep.loc[list(schemes), ["models", "seeds"]].sum().tolist()
        for name, schemes in (("models", SMALL_GAIN), ("models_other", (PRE_LN, LNS)), ("pre_ln", (PRE_LN,)))
    }
    gains = _gains_of_eight()
    trained_gain = choose(runs(), depth=16).runs.query("scheme == 'lns_gain'").index
    uniform = entropy(runs()).loc[trained_gain].drop(columns=1).gt(UNIFORM).any()
    return {
        **{f"dead_{name}": f"{models} of {seeds}" for name, (models, seeds) in found.items()},
        "dead_p": f"{fisher(*found['models'], *found['models_other']):.1g}",
        "dead_lns_gain_from": f"{uniform.idxmax()}",
        "dead_lns_gain_start": plain(1 / math.sqrt(uniform.idxmax())),
        "dead_lambda": listed(gains[gains["dead"]]["lambda"]),
        "live_lambda": plain(gains[~gains["dead"]]["lambda"].min()),
        "start_lambda": f"{NormlabConfig(scheme=BHYT).lam_input:g}",
        "table_of_attention": table(("scheme", "blocks", "rate", "models with one", "uniform layers"), rows),
    }


def entropy(table: pd.DataFrame) -> pd.DataFrame:
    """Entropy of attention at the end of training over the uniform one's: a row per run, a column per block."""
    rows = table.query("metric == 'attention_entropy' and mask == 'all' and step == step.max()")
    queries = np.arange(1, manifests("runs")[0]["config"]["block_length"] + 1)
    return rows.pivot_table(index="run", columns="layer", values="value", observed=True) / np.log(queries).mean()


def _uniform(table: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Uniform attentions of the blocks after the first: how many, and in how many models, per scheme."""
    about = choose(table, depth=depth).runs
    dead = entropy(table).loc[about.index, list(range(2, depth + 1))] > UNIFORM
    per_run = about.assign(dead=dead.sum(axis=1), models=dead.any(axis=1), attentions=depth - 1)
    counts = per_run.groupby("scheme").agg(
        depth=("depth", "first"),
        lr=("lr", "first"),
        seeds=("seed", "nunique"),
        models=("models", "sum"),
        dead=("dead", "sum"),
        attentions=("attentions", "sum"),
    )
    return counts.loc[in_order(counts.index)].reset_index()


def _gains_of_eight() -> pd.DataFrame:
    """lambda before attention in blocks 2 to 8 of the BHyT and BHyT* of 8 blocks, and whether it is uniform."""
    gains = pd.read_csv(ROOT / "data" / "runs" / "lambda.csv").query("layer > 1")
    share = entropy(runs()).stack()
    dead = share.loc[list(gains[["run", "layer"]].itertuples(index=False, name=None))].to_numpy() > UNIFORM
    return gains.assign(**{"lambda": gains["lambda"].abs(), "dead": dead}).sort_values("lambda")


@cache
def arm_of_gains() -> pd.DataFrame:
    return questions.dead_gains(runs("gains"), normlab.load_configs(ROOT / "data" / "gains"))


def slower_gains() -> dict[str, str]:
    """Arm B: the two changes against unchanged models."""
    arm = arm_of_gains()
    rows = [
        (
            title_of(r["scheme"]),
            r["change"],
            f"{r['uniform']} of {r['models']}",
            "" if math.isnan(r["p"]) else f"{r['p']:.2g}",
            _change(r, "loss"),
            _change(r, "copy"),
        )
        for _, r in arm.iterrows()
    ]
    before = arm[arm["change"] == questions.UNCHANGED].set_index("scheme")["uniform"]
    by_head = arm[arm["change"] == "qk-norm by head"].set_index("scheme")
    return {
        "gains_learned": learned("gains"),
        "gains_dead_bhyt_exact": f"{before['bhyt_exact']} of 6",
        "gains_dead_control": f"{before['rmsnorm_gain']} of 6",
        "gains_qk_bhyt_exact": _change(by_head.loc["bhyt_exact"], "loss").strip("*"),
        "gains_qk_control": _change(by_head.loc["rmsnorm_gain"], "loss").strip("*"),
        "table_of_gains": table(("scheme", "change", "models with one", "p", "loss", "loss on copied text"), rows),
    }


def _change(row: pd.Series, name: str) -> str:
    """The difference from unchanged models with its interval, bold if the verdict is *different*."""
    if math.isnan(row[name]):
        return ""
    ends = {"estimate": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
    text = interval(pd.Series(ends), sign=True)
    return f"**{text}**" if row[f"{name}_verdict"] == DIFFERENT else text


# What does the tanh add?


def tanh() -> dict[str, str]:
    loss, size = (compare(runs(), BHYT, "bhyt_linear", metric, depth=4).iloc[0] for metric in ("loss", "token_l2_mean"))
    grid, configs = runs("gain_or_bound"), normlab.load_configs(ROOT / "data" / "gain_or_bound")
    by = ["width", "outlier_channels", "lam_input", "gamma0"]
    found = compare_variants(grid, configs, BHYT, "bhyt_linear", by, "token_l2_mean").set_index(by)
    return {
        "tanh_learned": learned("tanh"),
        "tanh_loss": interval(loss, sign=True),
        "tanh_stream": interval(size),
        "tanh_small_gain": interval(found.loc[(128, 0, 2.0, 1.0)]),
        "tanh_large_gain": interval(found.loc[(128, 0, 50.0, 0.04)]),
    }


# Appendix


def search() -> dict[str, str]:
    """The best rate of each scheme in short runs, and the finals that were run again at full length."""
    best = choose(rates.settled(runs("runs/search")), depth=None).runs.set_index(["scheme", "depth"])
    rows = [
        (title_of(name), *(_best(best, name, depth) for depth in (4, 16))) for name in in_order(best.index.unique(0))
    ]
    finals = rates.finals(runs("runs/search"), runs("runs/finals"))
    again = [
        (row.scheme, row.depth, f"{row.lr:g}", plain(row.loss_short), plain(row.loss_full))
        for row in finals.itertuples()
    ]
    return {
        "short_tokens": f"{runs('runs/search')['tokens'].max() / 1e6:.1f}M",
        "table_of_search": table(("scheme", "4 blocks", "16 blocks"), rows),
        "table_of_finals": table(("scheme", "blocks", "rate", "loss, short run", "loss, full length"), again),
    }


def _best(best: pd.DataFrame, scheme: str, depth: int) -> str:
    if (scheme, depth) not in best.index:
        return ""
    row = best.loc[(scheme, depth)]
    return f"{plain(row['eval_loss'])} ({row['lr']:g})"


def warm_up() -> dict[str, str]:
    tried = {
        (c["scheme"], c["warmup"], c["lr"]): m["eval_loss"]
        for m in manifests("runs/search")
        if (c := m["config"])["depth"] == 4 and c["model"].get("alpha0", 1) == 1
    }
    ends = chosen().query("depth == 4 and seed == 0").set_index("scheme")["eval_loss"]
    shown = [("post_rmsnorm", 0.004), ("dyt", 0.002)]
    rows = [
        (title_of(name), f"{rate:g}", *(plain(tried[name, part, rate]) for part in (0.1, 0.3)), plain(ends[name]))
        for name, rate in shown
    ]
    head = ("scheme", "rate", "warm-up of a tenth", "of three tenths", "full length")
    unigram = manifests("runs/search")[0]["corpus"]["unigram_entropy"]
    return {"unigram_loss": plain(unigram), "table_of_warm_up": table(head, rows)}


def groups() -> dict[str, str]:
    """The losses at depth 4 of schemes whose seeds come out in two groups, and what attention 2 is worth to each."""
    rows = experiments().query("metric == 'skip_delta_loss' and part == 'attention' and layer == 2 and depth == 4")
    cost = rows.set_index("run")["value"]
    shown = []
    for scheme in (*SMALL_GAIN, "bhyt_linear", "pre_rmsnorm_scaled_init", PRE_LN, LNS):
        own = chosen().query("depth == 4 and scheme == @scheme").sort_values("eval_loss")
        columns = (own["eval_loss"], cost[own.index])
        shown.append((title_of(scheme), *(", ".join(map(plain, column)) for column in columns)))
    return {"table_of_groups": table(("scheme", "loss of each seed", "cost of leaving out attention 2"), shown)}


def deepest() -> dict[str, str]:
    """Count the schemes that train at 16, 256 and 1,000 blocks, in `data/depth`."""
    outcomes = pd.DataFrame([(m["config"]["depth"], outcome(m)) for m in manifests("depth")], columns=["depth", "end"])
    counts = outcomes.value_counts().unstack(fill_value=0)[["trains", "stalls", "diverges"]]
    rows = [(f"{depth:,}", *row) for depth, row in counts.iterrows()]
    return {"table_of_deepest": table(("blocks", *counts.columns), rows)}


@cache
def gpu_runs() -> pd.DataFrame:
    """A row per scheme and rate of `data/gpu`: loss, stream after blocks 1 and 24, mean cost of leaving out a block."""
    keys = ["scheme", "lr"]
    table = runs("gpu")
    last = table[table["step"] == table["step"].max()]
    streams = last.query("metric == 'token_l2_mean' and site == 'block_out' and mask == 'no_first'")
    streams = streams.pivot_table(index=keys, columns="layer", values="value")
    skips = experiments("gpu").query("metric == 'skip_delta_loss' and part == 'block'")
    found = pd.DataFrame(
        {
            "loss": last.query("metric == 'loss' and split == 'eval'").set_index(keys)["value"],
            "first": streams[1],
            "last": streams[24],
            "early": skips[skips["layer"].between(2, 12)].groupby(keys)["value"].mean(),
            "deep": skips[skips["layer"].between(13, 23)].groupby(keys)["value"].mean(),
        }
    )
    return found.loc[in_order(found.index.unique("scheme"))]


def on_a_gpu() -> dict[str, str]:
    found = gpu_runs()
    lns, pre_ln = (found.loc[name] for name in (LNS, PRE_LN))
    gap = lns["loss"] - pre_ln["loss"]
    rows = [
        (title_of(scheme), f"{lr:g}", plain(row["loss"]), f"{row['first']:,.0f}", f"{row['last']:,.0f}",
         *(plain(row[part], 3) for part in ("early", "deep")))
        for (scheme, lr), row in found.iterrows()
    ]  # fmt: skip
    head = ("scheme", "rate", "loss", "stream after block 1", "after 24", "cost of a block, 2 to 12", "13 to 23")
    return {
        "gpu_gap_low": plain(gap[1e-3]),
        "gpu_gap_middle": plain(-gap[2e-3]),
        "gpu_deep_most": plain((lns["deep"] / pre_ln["deep"]).max()),
        "gpu_stream_lns": plain(lns["last"][2e-3] / pre_ln["last"][2e-3]),
        "gpu_stream_bhyt": plain(found.loc[(BHYT, 4e-3), "last"] / found.loc[(GAIN_CONTROL, 4e-3), "last"]),
        "table_of_gpu": table(head, rows),
    }


def outcome(manifest: dict) -> str:
    """A run trains if its loss ends 0.05 nats below the entropy of token frequencies."""
    if manifest["status"] == "diverged":
        return "diverges"
    return "trains" if manifest["eval_loss"] < manifest["corpus"]["unigram_entropy"] - 0.05 else "stalls"
