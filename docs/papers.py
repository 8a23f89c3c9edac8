"""The numbers of docs/papers.md: figures and tables of two papers, theirs and ours side by side.

texts          every text by the name that marks it in the page
with_numbers   the rows that data/figures/papers.png shows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from equal_rates import BEST, LOW, LOWEST, MINUS, QUANTITIES, RATES, compared, deep, deepened, in_words
from findings import (
    LNS,
    PRE_LN,
    ROOT,
    against_pre_ln,
    at_one_rate,
    bhyt_of_four,
    chosen,
    interval,
    league,
    league_minus,
    league_table,
    plain,
    signed,
)
from questions import decided
from standings import elsewhere, scaled_lns, searched
from tables import table

import normlab
from normlab.analysis.selection import summarize, title_of
from normlab.analysis.verdicts import DIFFERENT, differences, judged
from normlab.study.questions import BELOW

AGREES, CONTRADICTS, UNDECIDED = "**agrees**", "**contradicts**", "undecided"
NOT_COMPARABLE, MISSING, NOT_PLANNED = "not comparable", "missing", "not planned"
IF_SO = "If the paper says so, our runs contradict it"
NOT_CHECKED = "no value at hand, and not checked that the paper says so"
CURSE, BHYT_PAPER, BHYT, PERI = "Curse of Depth", "BHyT", "bhyt", "peri_ln"
SCALED_LNS = "lns_scaled_init"
ANGLE, DISTANCE = "Mean angle over blocks 9 to 15 as a share of π", "Mean distance over blocks 9 to 15"
STALLED = ("post_rmsnorm", "minimax")  # at all rates of the search, and not at 0.001


@dataclass(frozen=True)
class Row:
    """A figure or table of a paper.

    ours: a row of `differences`, or words.
    lower: True if the paper's value is below its base's, None for no direction.
    verdict: by default what `ours` and `lower` say. scope: what limits it.
    published: the paper's numbers on the scale of `ours`.
    """

    where: str
    shows: str
    theirs: str
    ours: pd.Series | str
    why: str
    verdict: str = ""
    lower: bool | None = None
    scope: str = ""
    published: tuple[float, ...] = ()


def texts() -> dict[str, str]:
    return {"table_of_curse_of_depth": _table(curse_of_depth()), "table_of_bhyt": _table(bhyt())}


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for row, verdict in zip(rows, _verdicts(rows), strict=True):
        ours = row.ours if isinstance(row.ours, str) else _in_words(row.ours)
        scope = row.scope if verdict in (AGREES, CONTRADICTS) else ""
        lines.append((row.where, row.shows, row.theirs, ours, verdict + scope, row.why))
    return table(("in the paper", "shows", "theirs", "ours", "", "why, and what is planned"), lines)


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """The verdict of each row of a paper; those with an interval are one family."""
    family = judged(pd.DataFrame([row.ours for row in rows if isinstance(row.ours, pd.Series)]))
    found = iter(family.itertuples())
    return [row.verdict if isinstance(row.ours, str) else _verdict(next(found), row.lower) for row in rows]


def with_numbers() -> list[tuple[str, Row, str]]:
    """(label, row, verdict) of the rows with a number of the paper and an interval of ours."""
    return [
        (f"{row.where} ({paper}): {row.shows.partition(' minus')[0].partition(' over')[0]}", row, verdict)
        for paper, page in ((CURSE, curse_of_depth()), (BHYT_PAPER, bhyt()))
        for row, verdict in zip(page, _verdicts(page), strict=True)
        if row.published
    ]


def _in_words(row: pd.Series) -> str:
    ratio = row["kind"] == "ratio"
    return ("x " if ratio else "") + interval(row, sign=not ratio)


def _verdict(row: Any, lower: bool | None) -> str:
    if lower is None:
        return NOT_COMPARABLE
    if row.verdict != DIFFERENT:
        return UNDECIDED
    return AGREES if (row.estimate < (1.0 if row.kind == "ratio" else 0.0)) == lower else CONTRADICTS


def curse_of_depth() -> list[Row]:
    scaled = _of_table(CURSE, "Table 6", SCALED_LNS, LNS)
    ours, plan, verdict = _ours(SCALED_LNS, base=LNS)
    return [
        Row(
            "Fig. 1",
            "loss against a model's size, to 7B, with LNS and without",
            "no value at hand (the caption in the proceedings, as Fig. 4)",
            f"gain from 4 to 16 blocks, LNS minus Pre-LN: {interval(_gain(), sign=True)}",
            f"Here depth grows, at one width. {_gain_at_equal_rates()}",
            verdict=NOT_COMPARABLE,
        ),
        Row(
            "Fig. 3",
            "deep blocks turn the stream more under LNS",
            NOT_CHECKED,
            in_words("angle", LOW),
            f"{IF_SO}{_rates('angle')}. {_equal('angle', f'{ANGLE}, LNS minus Pre-LN')[1]}",
            verdict=MISSING,
        ),
        Row(
            "Fig. 5",
            "Jacobians of deep blocks are further from the identity under LNS",
            f"{NOT_CHECKED}: notes of others name only LLaMA2-7B, a Pre-LN model",
            in_words("jacobian", LOW),
            f"{IF_SO}{_rates('jacobian')}. {_equal('jacobian', f'{DISTANCE}, LNS minus Pre-LN')[1]}",
            verdict=MISSING,
        ),
        Row(
            "Fig. 7",
            "leaving out a deep block costs more under LNS",
            "no value at hand; by the caption in v1 (Fig. 4) deep layers contribute",
            *_equal("skip", "Mean cost over blocks 9 to 15, LNS minus Pre-LN"),
            lower=False,
            scope=_rates("skip"),
        ),
        Row(
            "Fig. 7",
            "the costs of leaving out a block are more alike under LNS",
            'no value at hand; "more balanced"',
            *_equal("spread", "Standard deviation over mean of the costs of blocks 2 to 15, LNS over Pre-LN"),
            lower=True,
            scope=_rates("spread"),
        ),
        Row(
            "Fig. 9",
            "the variance of the stream grows less over the blocks under LNS",
            "no value at hand; so says the caption of v1's Fig. 1",
            *_equal("growth", "Variance after block 16 over that after block 1, LNS over Pre-LN", LOWEST),
            lower=True,
            scope=_rates("growth", LOWEST),
        ),
        *(
            Row(
                "Table 1",
                f"loss of {title_of(scheme)} minus Pre-LN's",
                _printed(_of_table(CURSE, "Table 1", scheme)),
                *_ours(scheme),
                lower=scheme == LNS,
                published=tuple(gap for _, gap in _of_table(CURSE, "Table 1", scheme)) if scheme == LNS else (),
            )
            for scheme in (LNS, "mix_ln", "post_rmsnorm", "deepnorm")
        ),
        Row(
            "Table 6",
            "loss of LNS with scaled init, minus LNS's",
            _printed(scaled),
            ours,
            ". ".join(filter(None, (f"LNS was not searched at 0.004; at 0.004 both: {scaled_lns()}", plan))),
            verdict,
            lower=scaled[-1][1] < 0,
        ),
        *(
            Row(
                "Table 6",
                f"loss of {title_of(name)} minus Pre-LN's",
                _printed(gaps),
                *_ours(name),
                lower=gaps[-1][1] < 0,
            )
            for name in ("layer_scale", "skip_init")
            for gaps in (_of_table(CURSE, "Table 6", name),)
        ),
    ]


def bhyt() -> list[Row]:
    published = normlab.load_published()
    plots = published[published["where"].eq("Figure 3")]
    rows = []
    for metric, what in (("token_l2_mean", "L2 norm of a token"), ("feature_var_mean", "variance of the stream")):
        own = plots[plots["metric"] == metric].set_index("scheme")["value"]
        for scheme in (LNS, PERI, "dyt", BHYT):
            final = _league(scheme, metric)
            found = final is not None
            plan, verdict = ("", "") if found else _plan(scheme)
            quantity = "size" if metric == "token_l2_mean" else "variance"
            if scheme == LNS:
                value, *why = _equal(quantity, "Text read once")
                why.append(_league_says(scheme, metric))
            elif found:
                value = final
                why = [f"After the last block in the league: {_league_rates(scheme)}", _older(scheme, metric)]
            else:
                value, why = "none with several seeds", []
            why += [*_at_one_rate(scheme, metric), plan]
            rows.append(
                Row(
                    "Fig. 3",
                    f"{what} after block 16, {title_of(scheme)} over Pre-LN",
                    f"x {plain(own[scheme] / own[PRE_LN])} ± 20%",
                    value,
                    ". ".join(filter(None, why)),
                    verdict,
                    lower=True,
                    scope=_rates(quantity) if scheme == LNS else "",
                    published=(own[scheme] / own[PRE_LN],) if found else (),
                )
            )
    gains = published[published["metric"].str.endswith("speed_gain_percent")].set_index(["arxiv", "metric"])["value"]
    versions = [(name[-2:], gains[name]) for name in gains.index.unique(0)]
    for what, section, of in (
        ("training", "step", "A step of 8,192 tokens"),
        ("generation", "generate", "A token of 1, 8 and 64 sequences"),
    ):
        theirs = " and ".join(f"+{gain[f'{what}_speed_gain_percent']:g}% ({name})" for name, gain in versions)
        own = _faster(section, "normlab")
        over = {
            name: ", ".join(f"{signed(value, 1)}%" for value in _faster(section, peer)["ratio"])
            for peer, name in (("torch", "PyTorch's RMSNorm"), ("eager", "its formula in eager PyTorch"))
        }
        drift = _faster(section, "normlab", of=PRE_LN)
        why = f"{of}, 16 blocks, 2,048 wide, on one H200; both with our kernels, in turn; intervals over steps. "
        why += f"RMSNorm against itself: {_percent(drift)}; a difference as small is no verdict. "
        why += ". ".join(f"Over {name}: {value}" for name, value in over.items())
        beyond = max(0.0, *drift["high"]), min(0.0, *drift["low"])
        verdict = (
            AGREES if own["low"].min() > beyond[0] else CONTRADICTS if own["high"].max() < beyond[1] else UNDECIDED
        )
        rows.append(Row("Fig. 4", f"speed of {what} over RMSNorm", theirs, _percent(own), why, verdict=verdict))
    for scheme in (LNS, PERI, "dyt", BHYT):
        gaps = _of_table(BHYT_PAPER, "Table 1", scheme)
        rows.append(
            Row(
                "Table 1",
                f"loss of {title_of(scheme)} minus Pre-LN's",
                _printed(gaps),
                *_ours(scheme),
                lower=gaps[-1][1] < 0,
                published=tuple(gap for _, gap in gaps) if _league(scheme, "loss") is not None else (),
            )
        )
    gap = _of_table(BHYT_PAPER, "Table 3", BHYT, PERI)[-1][1]
    theirs = f"{signed(gap, 3)} (3B)"
    rows.append(Row("Table 3", "loss of BHyT minus Peri-LN's", theirs, *_ours(BHYT, base=PERI), lower=True))
    return rows


def _ours(scheme: str, base: str = PRE_LN) -> tuple[pd.Series | str, str, str]:
    """Our loss minus the base's, what it rests on, and the verdict where no interval gives it.

    LNS's against Pre-LN's rests on the runs at equal rates. Others rest on the league's final runs, else on single
    seeds. Older runs and what else there is stand in the words.
    """
    final = _league(scheme, "loss", base)
    if (scheme, base) == (LNS, PRE_LN):
        rates = ", ".join(f"{in_words('loss', rate)} at {rate:g}" for rate in RATES)
        why = f"16 blocks, 4 seeds, text read once, each at the best of three rates; both at one: {rates}"
        also = (_league_says(scheme, "loss"), _older(scheme, "loss"))
        return compared().loc[("loss", BEST)], ". ".join([why, *also]), ""
    if final is not None:
        why = f"The league: {_league_rates(scheme)}"
        return final, ". ".join(filter(None, (why, _older(scheme, "loss")))), ""
    first = _final_runs().query("seed == 0").set_index("scheme")["eval_loss"]
    is_final = {scheme, base} <= set(first.index)
    ends = (
        ("4 blocks", chosen().query("depth == 4 and seed == 0").set_index("scheme")["eval_loss"]),
        ("8 blocks, the league", first) if is_final else ("8 blocks, the league's search", searched()),
    )
    parts = [
        f"{signed(end[scheme] - end[base])} ({which}, one seed{_stalled(end[scheme])})"
        for which, end in ends
        if {scheme, base} <= set(end.index)
    ]
    plan, verdict = _plan(scheme, base)
    if scheme in STALLED:
        plan = f"At 0.001, which the search left out: {signed(elsewhere(scheme) - searched()[base])}"
    return "; ".join(parts) or "none", plan, verdict


def _plan(scheme: str, base: str = PRE_LN) -> tuple[str, str]:
    """The runs that are planned of a scheme and its base, if one of them has not several final ones; the verdict."""
    if league_table().set_index("scheme").loc[[scheme, base], "says"].eq(BELOW).any():
        return "", NOT_PLANNED
    return f"`league`: {_final_runs()['scheme'].eq(scheme).sum()} of 3 final runs so far", MISSING


def _final_runs() -> pd.DataFrame:
    return summarize(league().finals)


def _league(scheme: str, metric: str, base: str = PRE_LN) -> pd.Series | None:
    """A scheme against the base in the league's final runs; None without several seeds of both. BHyT has four."""
    if (scheme, base) == (BHYT, PRE_LN):
        return bhyt_of_four(metric)
    rows = league_minus(metric, base)
    return rows.loc[scheme] if scheme in rows.index and np.isfinite(rows.loc[scheme, "low"]) else None


def _league_says(scheme: str, metric: str) -> str:
    row = _league(scheme, metric)
    if row is None:
        return ""
    return f"The league, {_league_rates(scheme)}: {_in_words(row)}, *{row['verdict']}*"


def _league_rates(scheme: str) -> str:
    of = league_table().set_index("scheme")
    rates, seeds = of["rate"], 4 if scheme == BHYT else of.loc[scheme, "seeds"]
    return f"8 blocks, {seeds:g} seeds, text read once, at {rates[scheme]:g} and Pre-LN at {rates[PRE_LN]:g}"


def _older(scheme: str, metric: str) -> str:
    """A sentence on a scheme against Pre-LN in the older runs of 16 blocks; empty without one."""
    rows = against_pre_ln(metric, 16)
    if scheme not in rows.index:
        return ""
    row = rows.loc[scheme]
    return f"In older runs, 16 blocks, each at its own rate: {_in_words(row)}, *{row['verdict']}*"


def _at_one_rate(scheme: str, metric: str) -> Iterator[str]:
    """A sentence on a size at equal rates in the search, where a model has learned enough."""
    ratios = at_one_rate(metric).reindex([scheme]).iloc[0].dropna()
    if len(ratios):
        values = ", ".join(f"x {ratio:.2g} at {rate:g}" for rate, ratio in ratios.items())
        yield f"At equal rates, 8 blocks, 2M tokens, one seed, not learned: {values}"


def _stalled(loss: float) -> str:
    """Words for a model that ends above the bigram model of its text; those of 4 blocks all end below."""
    return ", above a bigram model" if loss > _bigram_loss() else ""


@cache
def _bigram_loss() -> float:
    return float(summarize(league().search)["bigram_loss"].max())


def _of_table(paper: str, where: str, scheme: str, base: str = PRE_LN) -> list[tuple[str, float]]:
    """The model and the loss minus the base's of a scheme in a paper's table, for its first and its last model."""
    rows = normlab.load_published().query("paper == @paper and `where` == @where")
    metric = "eval_loss" if (rows["metric"] == "eval_loss").any() else "perplexity"
    rows = rows[rows["metric"] == metric]
    value = rows["value"] if metric == "eval_loss" else np.log(rows["value"])
    losses = rows.assign(loss=value).pivot_table(index="model", columns="scheme", values="loss", sort=False)
    gaps = (losses[scheme] - losses[base]).dropna()
    return [(gaps.index[place], float(gaps.iloc[place])) for place in dict.fromkeys((0, len(gaps) - 1))]


def _printed(gaps: Iterable[tuple[str, float]]) -> str:
    return " and ".join(f"{signed(gap, 3)} ({model.removeprefix('Llama-')})" for model, gap in gaps)


def _gain() -> pd.Series:
    """LNS's gain from 4 to 16 blocks minus Pre-LN's."""
    loss = chosen().pivot_table(index=["scheme", "seed"], columns="depth", values="eval_loss")
    gains = (loss[4] - loss[16]).dropna().rename("value").reset_index().assign(depth=16)
    return differences(gains, LNS, PRE_LN, "loss").iloc[0]


def _gain_at_equal_rates() -> str:
    """A4's difference, and that at the lower rate."""
    row = decided("A4").iloc[0]
    where = f"At equal rates, text read once, mean of {row['lr']}"
    at_low = f"at 0.004 alone {interval(deepened().loc[(LOW, MINUS)], sign=True)}"
    return f"{where}: {interval(row, sign=True)}; {at_low}"


def _equal(quantity: str, what: str, at: float = LOW) -> tuple[pd.Series, str]:
    """LNS against Pre-LN at one of three equal rates; in words it, the others, and the older runs.

    The middle rate, but growth is judged at the lowest, as A3 was planned.
    """
    older = deep("runs").query("run in @chosen().index")
    rates = older.groupby("scheme")["lr"].first()
    gap = differences(older.assign(value=older[quantity]), LNS, PRE_LN, QUANTITIES[quantity][1]).iloc[0]
    others = "; ".join(f"at {rate:g}: {in_words(quantity, rate)}" for rate in RATES if rate != at)
    words = f"{what}, both at rate {at:g}; {others}; each at its best: {in_words(quantity, BEST)}"
    unequal = f"In older runs, LNS at {rates[LNS]:g} and Pre-LN at {rates[PRE_LN]:g}: {_in_words(gap)}"
    return compared().loc[(quantity, at)], f"{words}. {unequal}"


def _percent(gains: pd.DataFrame) -> str:
    return ", ".join(
        f"{signed(row['ratio'], 1)}% [{plain(row['low'], 1)}, {plain(row['high'], 1)}]" for _, row in gains.iterrows()
    )


def _faster(section: str, peer: str, of: str = BHYT) -> pd.DataFrame:
    """A scheme's speed with our kernel over a peer's RMSNorm on a GPU, `ratio low high` in percent by batch."""
    times = pd.read_csv(ROOT / "data" / "bench" / f"{section}_nvidia_h200.csv").set_index("rows").sort_index()
    own = times.query("function == @of and peer == 'normlab'")
    baseline = times.query("function == 'pre_rmsnorm' and peer == @peer")["ratio"] if peer != "normlab" else 1.0
    ends = {"ratio": "ratio", "low": "ratio_high", "high": "ratio_low"}  # a faster step takes less
    return pd.DataFrame({name: 100 * (baseline / own[column] - 1) for name, column in ends.items()})


def _rates(quantity: str, at: float = LOW) -> str:
    """The scope of a verdict: all equal rates if each is different to one side, else the rate it is of."""
    own = compared().loc[quantity].loc[list(RATES)]
    sides = own["estimate"].gt(1.0 if own["kind"].iloc[0] == "ratio" else 0.0)
    return " at equal rates" if own["verdict"].eq(DIFFERENT).all() and sides.nunique() == 1 else f" at rate {at:g}"
