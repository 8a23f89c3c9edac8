"""Decisions stated before the runs: one function per question, in the words fixed beforehand.

equal_rates    A1  is LNS better than Pre-LN at equal learning rates?
deep_blocks    A2  does LNS wake deep layers?
growth_curve   A3  does the stream of Pre-LN grow as in the papers, where LNS's does not?
depth_gain     A4  does LNS gain more from depth than Pre-LN?
dead_gains     B   what keeps attention from becoming uniform?
tanh           C   does BHyT's bound matter?
league         D   which schemes may be the best?
predictions    D   what others found, checked here

Runs are those of the presets `depth_and_rate` (A), `gains` (B), `tanh` (C) and `league` (D). Each function reads
only what these runs store. It returns one row per comparison: `quantity`, where it was compared (`lr`, `g` or
`change`), `seeds estimate low high p_holm verdict`, and `says`, the decision in words. `says` is empty in rows
that decide nothing. Intervals and verdicts are those of `normlab.analysis.verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from normlab.analysis.quantities import last_values, values_of
from normlab.analysis.selection import (
    Selection,
    experiments_of,
    has_learned,
    in_order,
    of_one_setting,
    one_precision,
    summarize,
    title_of,
)
from normlab.analysis.verdicts import DIFFERENT, EQUIVALENT, UNDECIDED, differences, fisher, judged, worse_than_some
from normlab.errors import NormlabError
from normlab.probes.metrics import metric_row
from normlab.schemes import SCHEMES, tagged
from normlab.study.presets import get_preset
from normlab.training.grids import Search

PRE_LN, LNS = tagged("rates")
BOUNDED, UNBOUNDED = tagged("exact_bound")
DEPTH, SHALLOW = 16, 4  # blocks, of A
BOTH_RATES = (0.004, 0.008)  # A1 and A4 take the mean over these
PAPERS_RATE = 0.001  # of A3: at larger rates the stream is made in block 1
RATES = (PAPERS_RATE, *BOTH_RATES)  # of A2 and A3
ENOUGH = 4  # seeds that a claim needs
PAPER_LIKE = 1.5  # A3: Pre-LN's growth over LNS's
MODELS, CURED = 6, 1  # B: of 6 models at most 1 may have a uniform attention left
ALIVE_STEP, ALIVE_BLOCKS = 3000, (2, 3, 4)  # B: when and where attention is looked at
GAINS = (0.2, 1.0, 5.0)  # C: g = lambda / kappa
RESAMPLES = 10_000
# What is said of a scheme in the league.
UNFINISHED, BELOW, LOST = "search unfinished", "below at 2M tokens", "a final run diverged"
COLUMNS = ["quantity", "seeds", "estimate", "low", "high", "p_holm", "verdict", "says"]


def equal_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """A1: LNS minus Pre-LN at 16 blocks, the mean over the rates 0.004 and 0.008, paired by seed and rate.

    The seeds are the independent units: each seed's differences are averaged over the two rates first. The decision is
    on the held-out loss. Below 0: better at equal rates. Inside +-0.02: equivalent, LNS's lead is rate tolerance. Else
    undecided. Where the held-out loss is lower and the loss on seen text is not, LNS generalizes better. It does not
    fit better.

    Returns:
        Rows for the held-out loss and the loss on seen text, each a family of its own. `files_low files_high`: the
        interval of the held-out difference over the held-out files (bootstrap).
    """
    rows = []
    for metric in ("loss", "seen_loss"):
        values = _mean_over(_values(runs, metric, DEPTH), BOTH_RATES)
        rows.append(judged(differences(values, LNS, PRE_LN, metric)).assign(quantity=metric_row(metric).label))
    held_out, seen = (row.iloc[0] for row in rows)
    words = {DIFFERENT: "not better at equal rates", EQUIVALENT: "equivalent: its lead is rate tolerance"}
    says = words.get(held_out["verdict"], UNDECIDED)
    if held_out["verdict"] == DIFFERENT and held_out["estimate"] < 0:
        fits = seen["verdict"] == DIFFERENT and seen["estimate"] < 0
        says = "better at equal rates" + ("" if fits else ": it generalizes better")
    low, high = over_files(runs[runs["lr"].isin(BOTH_RATES)], LNS, PRE_LN, DEPTH)
    table = _tidy(pd.concat(rows), [_if_enough(says, held_out["seeds"]), ""], ["lr"], lr="0.004 and 0.008")
    return table.assign(files_low=[low, math.nan], files_high=[high, math.nan])


def over_files(runs: pd.DataFrame, a: str, b: str, depth: int) -> tuple[float, float]:
    """95% bootstrap interval over held-out files of the loss of scheme a minus that of scheme b.

    Files are drawn with replacement. Each counts with its tokens. A file's difference is the mean over the seeds and
    rates that both schemes have; of schemes with one rate each, over seeds. NaN where runs do not store the losses of
    files.
    """
    rows = runs[runs["metric"].isin(["file_loss", "file_tokens"]) & runs["depth"].eq(depth)]
    rows = rows[rows["scheme"].isin([a, b])]
    own_rates = rows.groupby("scheme", observed=True)["lr"].nunique().eq(1).all()
    index = ["scheme", *(() if own_rates else ("lr",)), "seed", "site"]
    losses = rows[rows["metric"] == "file_loss"].set_index(index)["value"]
    if not {a, b} <= set(losses.index.get_level_values("scheme")):
        return math.nan, math.nan
    gaps = (losses[a] - losses[b]).dropna().groupby("site").mean()
    if gaps.empty:  # no seed that both have
        return math.nan, math.nan
    tokens = rows[rows["metric"] == "file_tokens"].groupby("site")["value"].first().reindex(gaps.index)
    drawn = np.random.default_rng(0).integers(0, len(gaps), (RESAMPLES, len(gaps)))
    weight, gap = tokens.to_numpy(float)[drawn], gaps.to_numpy(float)[drawn]
    low, high = np.quantile((weight * gap).sum(1) / weight.sum(1), [0.025, 0.975])
    return float(low), float(high)


def deep_blocks(runs: pd.DataFrame, experiments: pd.DataFrame) -> pd.DataFrame:
    """A2: LNS minus Pre-LN at 16 blocks and each rate, Holm over three quantities at three rates, run or not.

    Two quantities are costs of skipping a block: the mean over blocks 9-15 and the sum over blocks 2-8. The third is
    the mean distance of the Jacobians of blocks 9-15 from the identity. The first and the last block are left out.
    LNS wakes deep layers only if the first quantity is above 0.
    """
    about = one_precision(summarize(runs))[["lr"]]
    deep, early = range(DEPTH // 2 + 1, DEPTH), range(2, DEPTH // 2 + 1)
    rows = []
    for name, metric, layers, over in (
        ("skip cost, mean of blocks 9-15", "skip_delta_loss", deep, "mean"),
        ("skip cost, sum of blocks 2-8", "skip_delta_loss", early, "sum"),
        ("Jacobian, mean of blocks 9-15", "jacobian_identity", deep, "mean"),
    ):
        own = experiments_of(experiments, metric, "block")
        own = own[own["depth"].eq(DEPTH) & own["layer"].isin(layers)]
        values = own.groupby(["run", "scheme", "depth", "seed"], observed=True)["value"].agg(over).reset_index()
        values = values.join(about, on="run", how="inner")
        rows.append(_at_each(values, "lr", LNS, PRE_LN, metric).assign(quantity=name))
    table = judged(pd.concat(rows, ignore_index=True), family=3 * len(RATES))
    says = []
    for row in table.itertuples():
        unlearned = _unlearned(runs, (DEPTH,), (row.lr,))
        woken = row.verdict == DIFFERENT and row.estimate > 0
        words = "LNS wakes deep layers" if woken else "not shown that LNS wakes deep layers"
        says.append(_if_enough(unlearned or words, row.seeds) if row.quantity == table["quantity"].iloc[0] else "")
    return _tidy(table, says, ["lr"])


def growth_curve(runs: pd.DataFrame) -> pd.DataFrame:
    """A3: how far the stream grows from block 2 to block 16, Pre-LN over LNS, at each rate.

    Paper-like if Pre-LN's growth at rate 0.001 is at least 1.5 times LNS's.
    """
    table = judged(_at_each(_values(runs, "growth_2", DEPTH), "lr", PRE_LN, LNS, "growth_2"), family=len(RATES))
    unlearned = _unlearned(runs, (DEPTH,), (PAPERS_RATE,))
    says = []
    for row in table.itertuples():
        words = unlearned or ("paper-like" if row.estimate >= PAPER_LIKE else "not paper-like")
        says.append(_if_enough(words, row.seeds) if math.isclose(row.lr, PAPERS_RATE) else "")
    return _tidy(table.assign(quantity="growth of the stream, block 16 over block 2"), says, ["lr"])


def depth_gain(runs: pd.DataFrame) -> pd.DataFrame:
    """A4: held-out loss at 4 blocks minus that at 16, LNS minus Pre-LN, the mean over 0.004 and 0.008 by seed.

    Above 0: LNS gains more from depth.
    """
    place = ["scheme", "seed", "lr"]
    ends = [_values(runs, "loss", depth).set_index(place)["value"] for depth in (SHALLOW, DEPTH)]
    gain = (ends[0] - ends[1]).rename("value").reset_index().assign(depth=DEPTH)
    table = judged(differences(_mean_over(gain, BOTH_RATES), LNS, PRE_LN, "loss"))
    row = table.iloc[0]
    more = row["verdict"] == DIFFERENT and row["estimate"] > 0
    words = "LNS gains more from depth" if more else "not shown that LNS gains more"
    words = _unlearned(runs, (SHALLOW, DEPTH), BOTH_RATES) or words
    table = table.assign(quantity="gain in held-out loss from 4 to 16 blocks")
    return _tidy(table, [_if_enough(words, row["seeds"])], ["lr"], lr="0.004 and 0.008")


def dead_gains(runs: pd.DataFrame, configs: pd.DataFrame) -> pd.DataFrame:
    """B: models with a uniform attention in blocks 2-4 at step 3,000, by scheme and change.

    A change is a cure if in each scheme 6 of 6 models with such an attention become at most 1 of 6. Fisher's exact test
    gives p = 0.015 then. A cure of the loss is a claim apart. Second: the copying probe.

    Args:
        runs: of `normlab.load_runs`.
        configs: of `normlab.load_configs`, for the same runs.

    Returns:
        One row per scheme and change: `scheme change models uniform p says`, and of the loss and of the loss on copied
        tokens the difference from the unchanged models, paired by seed: `loss loss_low loss_high loss_verdict copy
        copy_low copy_high copy_verdict`. `says` of an incomplete arm is how many models there are.
    """
    changes = {run: _change(row) for run, row in configs.iterrows()}
    dead = runs[runs["metric"].eq("uniform_attention") & runs["step"].eq(ALIVE_STEP)]
    dead = dead[dead["layer"].isin(ALIVE_BLOCKS)].groupby("run", observed=True)["value"].max()
    about = summarize(runs)
    about = about.assign(change=about.index.map(changes), uniform=dead)
    about = about[about["uniform"].notna()]
    rows = []
    for scheme in in_order(about["scheme"]):
        own = about[about["scheme"] == scheme]
        counts = own.groupby("change")["uniform"].agg(["size", "sum"]).astype(int)
        for change in [name for name in CHANGES if name in counts.index]:
            models, uniform = counts.loc[change]
            row = {"scheme": scheme, "change": change, "models": models, "uniform": uniform, "p": math.nan}
            if change != UNCHANGED and UNCHANGED in counts.index:
                of_unchanged, before = counts.loc[UNCHANGED]
                row["p"] = fisher(before, of_unchanged, uniform, models)
            rows.append(row)
    table = pd.DataFrame(rows, columns=["scheme", "change", "models", "uniform", "p"])
    table["says"] = _cures(table)
    for metric, name in (("loss", "loss"), ("copy_loss", "copy")):
        gaps = _from_unchanged(runs, about, metric)
        named = gaps.rename(columns={"estimate": name} | {end: f"{name}_{end}" for end in ("low", "high", "verdict")})
        table = table.merge(named, on=["scheme", "change"], how="left")
    return table


UNCHANGED = "as it is"
CHANGES = (UNCHANGED, "gains at a tenth of the rate", "qk-norm by head")


def _change(config: pd.Series) -> str:
    """The change of the preset `gains` that a run has."""
    if config.get("gain_lr_ratio", 1.0) != 1.0:
        return CHANGES[1]
    qk_norm = config.get("qk_norm")
    return CHANGES[2] if pd.notna(qk_norm) and qk_norm != "none" else UNCHANGED


def _cures(table: pd.DataFrame) -> list[str]:
    """Decision B for each row: the same words for a change in all schemes."""
    words = {UNCHANGED: ""}
    for change in CHANGES[1:]:
        own, base = (table[table["change"] == name].set_index("scheme") for name in (change, UNCHANGED))
        counts = pd.concat([own["models"], base["models"]])
        if set(own.index) != set(base.index) or (counts < MODELS).any():
            words[change] = f"incomplete: {int(counts.sum())} of {2 * MODELS * table['scheme'].nunique()} models"
        elif (base["uniform"] < MODELS).any():
            words[change] = "undecided: not every unchanged model has a uniform attention"
        else:
            words[change] = "a cure" if (own["uniform"] <= CURED).all() else "no cure"
    return [words[change] for change in table["change"]]


def _from_unchanged(runs: pd.DataFrame, about: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Each change minus the unchanged models of its scheme, paired by seed; all rows are one family."""
    values = last_values(Selection(runs, summarize(runs)), metric).set_index("run").loc[about.index]
    rows = []
    for scheme, own in values.assign(scheme=about["change"], group=about["scheme"]).groupby("group"):
        for change in set(own["scheme"]) - {UNCHANGED}:
            gap = differences(own, change, UNCHANGED, metric)
            rows.append(gap.assign(scheme=scheme, change=change))
    columns = ["scheme", "change", "estimate", "low", "high", "verdict"]
    return judged(pd.concat(rows, ignore_index=True))[columns] if rows else pd.DataFrame(columns=columns)


def tanh(runs: pd.DataFrame, configs: pd.DataFrame, kappa: float = 10.0) -> pd.DataFrame:
    """C: BHyT* minus BHyT without tanh at each g = lambda/kappa, in loss and in the stream after the last block.

    Holm over both quantities and three gains, run or not. Different at g = 0.2: the bound matters as published.
    Different at g = 5 only: it matters where it acts. No words were fixed for other outcomes; they are named.

    Args:
        configs: of `normlab.load_configs`, for the same runs.
        kappa: of runs that do not set it.
    """
    gains = start_gains(configs, kappa)
    rows = []
    for metric in ("loss", "token_l2_mean"):
        values = last_values(Selection(runs, summarize(runs)), metric)
        values = values.assign(g=values["run"].map(gains)).dropna(subset="g")
        rows.append(_at_each(values, "g", BOUNDED, UNBOUNDED, metric).assign(quantity=metric_row(metric).label))
    table = judged(pd.concat(rows, ignore_index=True), family=2 * len(GAINS))
    says = []
    for row in table.itertuples():
        here = table[table["quantity"] == row.quantity]
        apart = {float(g) for g in here.loc[here["verdict"] == DIFFERENT, "g"]}
        words, seeds = UNDECIDED, here["seeds"].min()
        if GAINS[0] in apart:  # whatever the other gains, which count in the correction, will say
            words, seeds = "the bound matters as published", row.seeds
        elif set(here["g"]) != set(GAINS):
            words = f"incomplete: {len(here)} of {len(GAINS)} gains"
        elif apart == {GAINS[2]}:
            words = "the bound matters where it acts"
        elif apart:
            words = f"different at g = {' and '.join(f'{g:g}' for g in sorted(apart))}, for which no words were fixed"
        says.append(_if_enough(words, seeds) if row.g == GAINS[0] else "")
    return _tidy(table, says, ["g"])


def start_gains(configs: pd.DataFrame, kappa: float = 10.0) -> pd.Series:
    """g = lambda/kappa before attention at the start of each run, as in `tanh`."""
    if "lam_input" not in configs:
        raise NormlabError("no run sets lam_input that this question asks of: pass the runs of its preset")
    own = configs["kappa"].fillna(kappa) if "kappa" in configs else kappa
    return (configs["lam_input"] / own).round(6)


def league(finals: pd.DataFrame, search: pd.DataFrame) -> pd.DataFrame:
    """D: which schemes may be the best, as a set and not as ranks.

    A scheme is out of the set if some other one is better with p < 0.05
    (`normlab.analysis.verdicts.worse_than_some`). The set holds the best scheme with probability 0.95. It takes two
    schemes with two final runs each: others have too few to be in or out. Nor is one of which a final run diverged.
    A scheme without final runs is below at 2M tokens if it can no longer get them: as many others as get them by their
    rank have a lower loss in the search. Else it is only searched. Neither is said before all its rates were tried.

    Args:
        finals, search: of `normlab.load_runs`, at the sweep `league` and below its `search`.

    Returns:
        One row per scheme: `scheme loss seeds p in_set search_loss rate inside says`. `rate` is the best one of the
        search. `inside`: rates on both sides of it were tried. A scheme that diverged at every rate has neither, and an
        infinite search_loss.
    """
    values = of_one_setting(last_values(Selection(finals, one_precision(summarize(finals))), "loss"))
    means = values.groupby("scheme")["value"].agg(["mean", "count", "size"])
    names = [name for name in in_order(values["scheme"]) if means.loc[name, "count"] == means.loc[name, "size"] > 1]
    by_seed = values.pivot_table(index="scheme", columns="seed", values="value").reindex(names)
    by_seed = by_seed.dropna(axis="columns", how="all")  # seeds of other schemes alone
    p = dict(zip(names, worse_than_some(by_seed.to_numpy()), strict=True)) if len(names) > 1 else {}
    about = summarize(search)
    preset = get_preset("league")
    plan, rates = preset.parts[0], cast(Search, preset.rate)
    ranked = about[~about["scheme"].isin(plan.always)].groupby("scheme")["eval_loss"].min()
    rows = []
    for scheme in in_order({*means.index, *about["scheme"]}):
        tried = about[about["scheme"] == scheme].groupby("lr")["eval_loss"].min()
        row: dict[str, Any] = {"scheme": scheme, "in_set": p.get(scheme, 0.0) >= 0.05}
        if len(tried):
            row["search_loss"] = tried.min()
        if math.isfinite(tried.min()):  # some rate did not diverge
            rate = float(tried.idxmin())
            row |= {"rate": rate, "inside": bool(tried.index.min() < rate < tried.index.max())}
        if scheme in means.index:
            row |= {
                "loss": means.loc[scheme, "mean"],
                "seeds": means.loc[scheme, "count"],
                "p": p.get(scheme, math.nan),
            }
        if scheme in p:
            row["says"] = "may be the best" if row["in_set"] else "not the best"
        elif scheme in means.index:
            row["says"] = LOST if means.loc[scheme, "count"] < means.loc[scheme, "size"] else "too few final runs"
        elif not rates.is_whole(tried.to_dict()):
            row["says"] = UNFINISHED
        elif not math.isfinite(row["search_loss"]):
            row["says"] = "diverged"
        else:
            passed = (ranked < row["search_loss"]).sum() >= (plan.best or math.inf)
            row["says"] = BELOW if passed else "only searched"
        rows.append(row)
    columns = ["scheme", "loss", "seeds", "p", "in_set", "search_loss", "rate", "inside", "says"]
    return pd.DataFrame(rows, columns=columns).sort_values(["loss", "search_loss"], ignore_index=True)


def planned_finals() -> int:
    """The number of schemes that the league plans to compare with Pre-LN: the family of these comparisons."""
    (plan,) = get_preset("league").parts
    return (plan.best or 0) + len(plan.always) - 1


# Source, a scheme's title, another's, and which of the two losses should be lower.
PREDICTIONS = (
    ("marin", "GatedNorm", "Pre-LN", "lower"),
    ("marin", "Peri-LN", "Pre-LN", "higher"),
    ("MLS-Bench", "Post-LN", "Pre-LN", "higher"),
)


def predictions(finals: pd.DataFrame, search: pd.DataFrame) -> pd.DataFrame:
    """D: findings of others that were stated first, and what the league says of them.

    The predictions are one family, and those without final runs count in it.

    Returns:
        One row per prediction: `source prediction seeds estimate low high verdict says`. Final runs decide where both
        schemes have them. Else the best losses of the search do, one seed each, without an interval. "not run": one of
        the two is missing, or diverged. "ends above a bigram model": the search's loss says nothing of the scheme.
    """
    names = {scheme.title: name for name, scheme in SCHEMES.items()}
    values = last_values(Selection(finals, one_precision(summarize(finals))), "loss")
    about = summarize(search)
    best = about[np.isfinite(about["eval_loss"])].groupby("scheme")["eval_loss"].min()
    stalled = set(best.index[best > about["bigram_loss"].max()])
    rows = []
    for source, title, other, expected in PREDICTIONS:
        a, b = names[title], names[other]
        stuck = [name for name in (title, other) if names[name] in stalled]
        if {a, b} <= set(values["scheme"]):
            rows.append(differences(values, a, b, "loss"))
        else:
            gap = best.get(a, math.nan) - best.get(b, math.nan)
            nothing = dict.fromkeys(("low", "high", "p"), math.nan)
            own = {"metric": "loss", "kind": "difference", "seeds": int(np.isfinite(gap)), "estimate": gap}
            rows.append(pd.DataFrame([own | nothing]))
        about_it = {"source": source, "prediction": f"{title} {expected} than {other}", "expected": expected}
        rows[-1] = rows[-1].assign(**about_it, stuck=" and ".join(stuck))
    table = pd.concat(rows, ignore_index=True)
    table = judged(table.assign(p=table["p"].fillna(1.0)))
    says = []
    for row in table.itertuples():
        as_said = (row.estimate < 0) == (row.expected == "lower")
        words = ("holds" if as_said else "does not hold") if row.verdict == DIFFERENT else UNDECIDED
        if np.isnan(row.low):
            words = f"one seed each: {'as' if as_said else 'not as'} predicted"
            if row.stuck:
                words = f"{row.stuck} ends above a bigram model"
            elif np.isnan(row.estimate):
                words = "not run"
        says.append(words)
    columns = ["source", "prediction", "seeds", "estimate", "low", "high", "verdict"]
    return table[columns].assign(says=says)


def _values(runs: pd.DataFrame, metric: str, depth: int, **where: Any) -> pd.DataFrame:
    """`values_of` all runs of a depth, whatever their rates."""
    about = one_precision(summarize(runs))
    about = about[about["depth"] == depth]
    return values_of(Selection(runs[runs["run"].isin(about.index)], about), metric, **where)


def _mean_over(values: pd.DataFrame, rates: Sequence[float]) -> pd.DataFrame:
    """Each scheme's and seed's mean over the rates, of seeds that have all of them."""
    rows = values[values["lr"].isin(rates)].dropna(subset="value")
    for rate in rates:  # a second run at one rate does not stand for a run at the other
        of_one_setting(rows[rows["lr"] == rate])
    means = rows.groupby(["depth", "scheme", "seed"], observed=True)["value"].agg(["mean", "size"])
    means = means[means["size"] == len(rates)].rename(columns={"mean": "value"})
    _require(means.index.get_level_values("scheme"), PRE_LN, LNS)
    return means.reset_index()


def _at_each(values: pd.DataFrame, by: str, a: str, b: str, metric: str) -> pd.DataFrame:
    """Scheme a minus scheme b at each value of the column `by`. The floor is taken over these pairs alone, however many
    other schemes ran."""
    _require(values["scheme"], a, b)
    pool = values[values["scheme"].isin([a, b])].assign(group=values[by])
    rows = [
        differences(own, a, b, metric, pool=pool).assign(**{by: place})
        for place, own in pool.groupby("group")
        if {a, b} <= set(own["scheme"])
    ]
    if not rows:
        raise NormlabError(f"{title_of(a)} and {title_of(b)} share no {by}: pass the runs of the question's preset")
    return pd.concat(rows, ignore_index=True)


def _require(schemes: Iterable[str], *needed: str) -> None:
    if missing := set(needed) - set(schemes):
        names = ", ".join(map(title_of, in_order(missing)))
        raise NormlabError(f"no runs of {names} that this question asks of: pass the runs of its preset")


def _unlearned(runs: pd.DataFrame, depths: Sequence[int], rates: Sequence[float]) -> str:
    """A sentence where runs that a row compares have not learned: they say nothing of depth."""
    about = summarize(runs)
    about = about[about["scheme"].isin([PRE_LN, LNS]) & about["depth"].isin(depths) & about["lr"].isin(rates)]
    count = int((~has_learned(about)).sum())
    return f"nothing: {count} of {len(about)} runs have not learned" if count else ""


def _if_enough(words: str, seeds: int) -> str:
    return words if seeds >= ENOUGH else f"incomplete: {seeds} of {ENOUGH} seeds"


def _tidy(rows: pd.DataFrame, says: Sequence[str], at: Sequence[str], **more: str) -> pd.DataFrame:
    return rows.assign(says=list(says), **more)[[*COLUMNS[:1], *at, *COLUMNS[1:]]].reset_index(drop=True)
