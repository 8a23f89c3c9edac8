"""The papers' claims on depth, asked of runs: one function per question, one verdict per row.

learned       which runs are below the n-gram baselines
losses        held-out losses, a row per scheme and a column per depth, to look at
extremes      the schemes with the largest and the smallest value after the last block; `apart`: in a sentence
growth        how many times larger the stream is after the last block than after the first
depth_gain    how much more blocks lower the loss
depth_use     how much skipping a deep block costs, by part of the block
tested        claims on schemes, each a quantity and a direction, and what the runs say of it; `sentence`: in words
shown         rows of these or of `normlab.compare` as a table to look at

Intervals and verdicts are those of `normlab.analysis.verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from normlab.analysis.compare import WHERE, chosen_pair, pair_rows
from normlab.analysis.quantities import (
    QUANTITIES,
    SIZE,
    is_deep,
    is_early,
    last_values,
    mean_of,
    quantity_row,
    values_of,
)
from normlab.analysis.selection import (
    DIVERGED,
    LEFT_OUT,
    NOT_LEARNED,
    choose,
    deepest,
    experiments_of,
    has_learned,
    in_order,
    named_rates,
    of_one_setting,
    recipes_in_words,
    require_one_length,
    seeds_in_words,
    title_of,
    width_of_most,
)
from normlab.analysis.verdicts import (
    DIFFERENT,
    EQUIVALENT,
    SEEDS,
    UNDECIDED,
    bracketed,
    differences,
    in_words,
    interval_in_words,
    judged,
    means,
    side_of,
)
from normlab.errors import NormlabError

MOMENTS = (("before training", 0), ("after training", None))
HOLDS, FAILS, NOT_RUN, LEFT = "holds", "does not hold", "not run", "left out"
AS_SAID, NOT_AS_SAID, LEVEL_SAID = "as claimed", "not as claimed", "level"  # by fewer seeds than a claim needs


def learned(runs: pd.DataFrame) -> pd.DataFrame:
    """Count the runs below the trigram and all other models that only count, one row per scheme and depth.

    Returns:
        Columns `scheme depth seeds below_trigram eval_loss trigram_loss`. The loss is the mean over the seeds, in nats
        per token; a diverged run's is infinite. `trigram_loss` is missing where runs do not store it. No run is below
        it then.
    """
    about = choose(runs, depth=None).runs
    about = about.assign(below=has_learned(about))
    table = about.groupby(["scheme", "depth"]).agg(
        seeds=("seed", "nunique"),
        below_trigram=("below", "sum"),
        eval_loss=("eval_loss", "mean"),
        trigram_loss=("trigram_loss", "mean"),
    )
    return table.loc[in_order(about["scheme"])].reset_index()


def losses(runs: pd.DataFrame) -> pd.DataFrame:
    """Held-out loss after training in nats per token, means over seeds, as text.

    One row per scheme, one column per depth. Brackets hold remarks on the runs (`Selection.remark`: not learned,
    diverged, without a held-out loss ...). The last row is the trigram model's loss, where runs store it. Runs of
    unequal length are not shown together.
    """
    chosen = choose(runs, depth=None)
    require_one_length(chosen.runs, across=True)
    about = chosen.runs[~chosen.runs["eval_loss"].isin([math.inf])]
    mean = about.groupby(["scheme", "depth"])["eval_loss"].mean()
    table = pd.DataFrame("", index=chosen.schemes, columns=chosen.depths)
    for scheme in chosen.schemes:
        for depth in chosen.depths:
            parts = [f"{mean[scheme, depth]:.3f}"] if np.isfinite(mean.get((scheme, depth), math.nan)) else []
            remark = chosen.remark(scheme, depth)
            table.loc[scheme, depth] = " ".join(parts + ([f"({remark})"] if remark else []))
    table = table.rename(index=title_of)
    counted = about.groupby("depth")["trigram_loss"].mean().dropna()
    if len(counted):
        table.loc["trigram model"] = [f"{counted[d]:.3f}" if d in counted.index else "" for d in chosen.depths]
    return table.rename_axis(index="scheme", columns="depth")


def extremes(runs: pd.DataFrame) -> pd.DataFrame:
    """The schemes with the largest and the smallest stream after the last block, per depth, before and after training.

    Values are L2 norms of a token: geometric means over seeds, at the learning rate that schemes of the depth share. A
    scheme of which a seed has not learned is left out.

    Returns:
        Columns `depth learning_rate when largest smallest factor`; factor is largest over smallest. Depths with fewer
        than two schemes are left out.
    """
    chosen = choose(runs, depth=None, same_rate=True)
    unlearned = set(map(tuple, _unlearned(chosen.runs)[["depth", "scheme"]].to_numpy()))
    found = []
    for when, step in MOMENTS:
        values = last_values(chosen, SIZE, step=step)
        values = values[[place not in unlearned for place in zip(values["depth"], values["scheme"], strict=True)]]
        sizes = values.groupby(["depth", "scheme"])["value"].agg(mean_of, metric=SIZE)
        for depth, own in sizes[sizes > 0].groupby(level="depth"):
            if len(own) < 2:
                continue
            high, low = own.idxmax()[1], own.drop(own.idxmax()).idxmin()[1]  # two schemes, also where all are alike
            rates = named_rates(chosen.runs[chosen.runs["depth"] == depth])
            found.append(
                {"depth": int(depth), "learning_rate": rates, "when": when}
                | {"largest": f"{title_of(high)} {own.max():.3g}", "smallest": f"{title_of(low)} {own.min():.3g}"}
                | {"factor": round(own.max() / own.min(), 2)}
            )
    table = pd.DataFrame(found, columns=["depth", "learning_rate", "when", "largest", "smallest", "factor"])
    return table.sort_values(["depth", "when"], ascending=[True, False], ignore_index=True)


def _unlearned(about: pd.DataFrame) -> pd.DataFrame:
    return about[about["status"] == NOT_LEARNED]


def apart(runs: pd.DataFrame) -> str:
    """`extremes` in a sentence, at the depth of `deepest` and the width of most runs.

    Empty where two schemes share none.
    """
    runs = runs[runs["width"] == width_of_most(runs)]
    depth = deepest(runs)
    runs = runs[runs["depth"] == depth]
    found = extremes(runs)
    if len(found) < 2:  # one of two schemes diverged
        return ""
    written = "{0.factor:.1f} times the smallest ({0.largest}, {0.smallest}".format
    before, after = map(written, found.itertuples())
    rates = found["learning_rate"].iloc[0]
    chosen = choose(runs, same_rate=True).runs
    differ = chosen["lr"].nunique() > 1
    own = ", so the ratio after training is not the effect of normalization alone" if differ else ""
    without = ", ".join(map(title_of, in_order(_unlearned(chosen)["scheme"])))
    return (
        f"Before training, the largest residual stream after {depth} blocks is {before}; L2 norm of a token). "
        f"After training it is {after}). Learning rate: {rates}{own}."
    ) + (f" Left out, as not every seed has learned: {without}." if without else "")


def growth(runs: pd.DataFrame) -> pd.DataFrame:
    """L2 norm of a token at layer L over that at layer 1 after training: geometric means, per scheme and depth.

    Returns:
        Columns `depth a metric kind seeds estimate low high sd df p p_holm margin verdict one_block first_half`.
        `one_block`: the largest increase from a layer to the next, embeddings (layer 0) included, over layer L's value.
        `first_half`: the share of the growth's logarithm in the first half of the way from layer 1 to layer L (0.5: a
        constant factor per block). Between two layers the logarithm is interpolated. Both are means over the seeds.
    """
    chosen = choose(runs, depth=None, same_rate=True)
    layers = [last_values(chosen, SIZE, layer=layer) for layer in range(max(chosen.depths) + 1)]
    values, grown_from_1 = [], values_of(chosen, "growth")["value"]
    for depth in chosen.depths:
        rows = layers[depth][layers[depth]["depth"] == depth]
        sizes = np.stack([layer["value"].loc[rows.index].to_numpy() for layer in layers[: depth + 1]], 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            grown = np.log(sizes) - np.log(sizes[:, 1:2])
            middle = grown[:, [(depth + 1) // 2, depth // 2 + 1]].mean(1)  # the same layer twice if depth is odd
            shares = {
                "one_block": np.fmax.reduce(np.diff(sizes), 1) / sizes[:, -1],
                "first_half": middle / grown[:, -1],
            }
        values.append(rows.assign(value=grown_from_1[rows.index], **shares))
    table = pd.concat(values)
    shares = table.groupby(["depth", "scheme"])[["one_block", "first_half"]].mean()
    shares = shares.rename_axis(["depth", "a"]).reset_index()
    return judged(means(table, "growth")).merge(shares, on=["depth", "a"])


def depth_gain(runs: pd.DataFrame, shallow: int | None = None, deep: int | None = None) -> pd.DataFrame:
    """Held-out loss at depth `shallow` minus that at depth `deep`, paired by seed: above zero, depth pays.

    Each scheme and depth is at its chosen learning rate. All rows are one family.

    Args:
        shallow: default the least depth at which a scheme has more than one seed, or the least of all.
        deep: default each scheme's own deepest with more than one seed, or its deepest.

    Returns:
        The columns of `growth` up to `verdict`, and `shallow`; one row per scheme that was run at both depths.

    Raises:
        NormlabError: no scheme was run at both of the given depths, or one for another number of steps or tokens at
            each.
    """
    chosen = choose(runs, depth=None)
    values = last_values(chosen, "loss")
    counts = values.groupby(["scheme", "depth"])["seed"].nunique().rename("seeds").reset_index()
    several = counts[counts["seeds"] > 1]
    if shallow is None:
        shallow = int((several if len(several) else counts)["depth"].min())
    deeper = counts[counts["depth"] > shallow] if deep is None else counts[counts["depth"] == deep]
    # Of a scheme's deeper depths those with several seeds sort last, and of these the deepest.
    ordered = deeper.assign(several=deeper["seeds"] > 1).sort_values(["several", "depth"])
    own = ordered.drop_duplicates("scheme", keep="last").set_index("scheme")["depth"]
    place = ["scheme", "seed"]
    values = values.join(chosen.runs[["steps", "tokens"]], on="run")
    last = values[values["depth"] == values["scheme"].map(own)].set_index(place)[["depth", "value", "steps", "tokens"]]
    first = values[values["depth"] == shallow].set_index(place)[["value", "steps", "tokens"]]
    gain = last.join(first.add_suffix("_before"), how="inner").reset_index()
    if gain.empty or shallow == deep:
        if deep is None:
            return pd.DataFrame()
        raise NormlabError(f"no scheme was run at depths {shallow} and {deep}; there is {chosen.depths}")
    whole = gain.dropna(subset=["value", "value_before"])  # a diverged run stopped early
    for length in ("steps", "tokens"):
        unequal = whole[[length, f"{length}_before"]].nunique(axis=1) > 1
        for _, row in whole[unequal].iterrows():
            raise NormlabError(
                f"{row['scheme']} was trained for {row[f'{length}_before']:,.0f} {length} at depth {shallow} and for "
                f"{row[length]:,.0f} {length} at depth {row['depth']}: keep the runs of one length"
            )
    gain["value"] = gain["value_before"] - gain["value"]
    return judged(means(gain, "loss")).assign(shallow=shallow)


def depth_use(
    experiments: pd.DataFrame,
    depth: int | None = None,
    part: str = "block",
    reference: str | None = None,
) -> pd.DataFrame:
    """Loss added by skipping one deep block, mean over these blocks, one row per scheme: `deep_cost` of any part.

    As there, the first and the last block are left out of everything.

    Args:
        experiments: the table of `normlab.load_experiments`.
        depth: default the deepest at which most schemes were measured.
        part: "block", "attention", "mlp", "deleted" (deleted and renumbered, as the papers prune).
        reference: a scheme; then each row is another scheme's cost minus this one's, paired by seed.

    Returns:
        With a reference the columns of `normlab.compare`. Without, those of `growth` up to `verdict`, `share` and
        `share_rest`. `share`: the deep blocks' part of the costs of all blocks but the first and the last.
        `share_rest`: the same without the costliest of these in each run, which can cost more than all others together.
        `attrs["about"]` says in what schemes were trained differently.

    Raises:
        NormlabError: no run of that depth has this measurement, or it is too shallow for a deep block. Or the runs have
            several widths, lengths or texts, or the seeds of a scheme several learning rates or recipes.
    """
    rows = experiments_of(experiments, "skip_delta_loss", part)
    if rows.empty:
        raise NormlabError(f"no run has skip_delta_loss of {part}")
    if depth is None:
        depth = deepest(rows)
    rows = of_one_setting(rows[rows["depth"] == depth])
    if rows.empty:
        raise NormlabError(f"no run of depth {depth} has skip_delta_loss of {part}")
    if depth < (least := QUANTITIES["deep_cost"].least):
        raise NormlabError(f"a deep block needs a model of {least} blocks or more: these have {depth}")
    layer = rows["layer"].astype(int)
    deep, early = is_deep(layer, depth), is_early(layer, depth)
    rows = rows.assign(deep=deep)[deep | early]
    place = ["depth", "scheme", "seed"]
    ordered = rows.sort_values("value")
    rest = ordered[ordered.duplicated(place, keep="last")]  # without the largest of each run
    table = pd.DataFrame({"value": rows[rows["deep"]].groupby(place, observed=True)["value"].mean()})
    for name, some in (("share", rows), ("share_rest", rest)):
        sums = some.assign(half=some["value"] * some["deep"]).groupby(place, observed=True)[["half", "value"]].sum()
        table[name] = sums["half"] / sums["value"]
    table = table.reset_index()
    if reference is not None:
        others = [name for name in in_order(table["scheme"]) if name != reference]
        pairs = [differences(table, name, reference, "skip_delta_loss") for name in others]
        found = judged(pd.concat(pairs, ignore_index=True)) if pairs else pd.DataFrame()
        found.attrs["about"] = recipes_in_words(rows)
        return found
    shares = table.groupby("scheme", observed=True)[["share", "share_rest"]].mean().rename_axis("a").reset_index()
    found = judged(means(table, "skip_delta_loss")).merge(shares, on="a")
    found.attrs["about"] = recipes_in_words(rows)
    return found


class Claim(NamedTuple):
    """What is claimed of scheme `a`, in words and as a test: its `quantity` is below or above that of `b`, or alike.

    Without `b` it is below or above no effect: 1 for ratios, 0 for differences.
    """

    says: str
    a: str
    b: str | None
    quantity: str
    direction: Literal["below", "above", "alike"]


def tested(runs: pd.DataFrame, asked: Sequence[Claim], depth: int | None = None) -> pd.DataFrame:
    """What the runs of one depth say of claims, judged as one family.

    Args:
        runs: the table of `normlab.load_runs`.
        depth: default that of `deepest`, at the width of most runs.

    Returns:
        One row per claim, which is the index, named "at 16 blocks": `rates ours seeds says`. `rates` are the learning
        rates of `a` and `b`. `ours` is the difference, or the ratio of sizes, from four seeds on with its 95% interval.
        `says` is "holds", "does not hold", "undecided", "not run", or why nothing can be said. Of fewer seeds it is "as
        claimed, one seed", "as claimed, 2 seeds (a claim needs 4)", or the opposite, outside the family; and "level,
        one seed" if a difference is claimed and the estimate is within the margin of `judged`. A scheme that has the
        depth at another width alone is "not run at width ...", that of most runs. One that `fully_tried` left out is
        "left out", with the reason.
        `attrs["about"]` says in what the compared schemes were trained differently.
    """
    width = width_of_most(runs)
    depth = deepest(runs[runs["width"] == width]) if depth is None else depth
    found = [_measured(runs, claim, depth, width) for claim in asked]
    rows = pd.concat([rows for rows, _ in found], ignore_index=True)
    of_few = rows["seeds"] < SEEDS  # they decide nothing: no intervals, and no part in Holm's family
    rows.loc[of_few, ["low", "high", "p"]] = math.nan
    table = judged(rows)
    compared = [about for _, about in found if len(about)]
    said = {
        claim.says: {
            "rates": row.rates,
            "ours": _with_interval(row),
            "seeds": row.seeds,
            "says": row.why or _outcome(row, claim.direction),
        }
        for claim, row in zip(asked, table.itertuples(), strict=True)
    }
    result = pd.DataFrame.from_dict(said, orient="index").rename_axis(f"at {depth} blocks")
    result.attrs["about"] = recipes_in_words(pd.concat(compared)) if compared else ""
    return result


def sentence(table: pd.DataFrame) -> str:
    """`tested` in words: its first row that was run, and how many claims hold, are as said by few seeds, or neither."""
    ran = table[~table["says"].str.startswith((NOT_RUN, LEFT))]
    first = (table if ran.empty else ran).iloc[0]
    at = table.index.name
    of = f" ({first['ours']} {at}, rate {first['rates']})" if first["ours"] else f", {at}"
    about = table.attrs.get("about", "")
    unlike = f" {about[0].upper()}{about[1:]}." if about else ""
    count = f"{len(table)} claim{'s' * (len(table) != 1)}"
    return f"“{first.name}”: {first['says']}{of}. Of {count} {_counted(table)}.{unlike}"


def _counted(table: pd.DataFrame) -> str:
    """How many rows of `tested` say what: "1 holds; 2 are as claimed and 1 is not, by one seed; 3 cannot be ..."."""
    holds, fails = (int(table["says"].eq(word).sum()) for word in (HOLDS, FAILS))
    so, not_so, level = (table["says"].str.startswith(word) for word in (AS_SAID, NOT_AS_SAID, LEVEL_SAID))
    few = so | not_so | level
    rest = len(table) - holds - fails - int(few.sum())
    decided = _listed(
        (holds, "holds", "hold"),
        (fails, "does not", "do not") if holds else (fails, "does not hold", "do not hold"),
    )
    by_few = _listed(
        (so.sum(), "is as claimed", "are as claimed"),
        (not_so.sum(), "is not", "are not") if so.any() else (not_so.sum(), "is not as claimed", "are not as claimed"),
        (level.sum(), "is level", "are level"),
    )
    if by_few:
        seeds = table.loc[few, "seeds"]
        by_few += ", by " + ("one seed" if seeds.max() == 1 else f"{seeds_in_words(seeds)} of the {SEEDS} it takes")
    if not decided and not by_few:
        return "none can be decided here"
    return "; ".join(filter(None, (decided, by_few, f"{rest} cannot be decided here" if rest else "")))


def _listed(*counts: tuple[int, str, str]) -> str:
    """"1 holds and 2 do not", of numbers with their words in the singular and in the plural; zeros are left out."""
    said = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
    return " and ".join(filter(None, (", ".join(said[:-1]), *said[-1:])))


def _measured(runs: pd.DataFrame, claim: Claim, depth: int, width: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row of `compare` or `means` for a claim, with `rates`, and `why` there are no numbers; and the runs."""
    nothing = {"metric": claim.quantity, "kind": quantity_row(claim.quantity).compared, "seeds": 0, "rates": ""}
    nothing |= dict.fromkeys(("estimate", "low", "high", "p"), math.nan)
    schemes, here = {claim.a, claim.b or claim.a}, runs.loc[runs["depth"] == depth, ["scheme", "width"]]
    if missing := schemes - set(here["scheme"].unique()):
        left = [runs.attrs.get(LEFT_OUT, {}).get(name, {}).get(depth) for name in in_order(missing)]
        return pd.DataFrame([nothing | {"why": next(filter(None, left), NOT_RUN)}]), pd.DataFrame()
    if not schemes <= set(here.loc[here["width"] == width, "scheme"].unique()):
        return pd.DataFrame([nothing | {"why": f"{NOT_RUN} at width {width}"}]), pd.DataFrame()
    try:
        if claim.b is None:
            own = choose(runs, depth, width, same_rate=True)
            values = values_of(own, claim.quantity)
            rows = means(values, claim.quantity).query("a == @claim.a")
            rates = values.loc[values["scheme"] == claim.a, "lr"].unique()
        else:
            own = chosen_pair(runs, claim.a, claim.b, claim.quantity, depth, width, WHERE)
            rows = pair_rows(values_of(own, claim.quantity), claim.a, claim.b, claim.quantity)
            rates = rows[["lr_a", "lr_b"]].to_numpy(float).ravel()
    except NormlabError as error:
        return pd.DataFrame([nothing | {"why": str(error)}]), pd.DataFrame()
    about = own.runs[own.runs["scheme"].isin([claim.a, claim.b])]
    said = " and ".join(f"{rate:g}" for rate in dict.fromkeys(rates) if math.isfinite(rate))
    why = "" if np.isfinite(rows["estimate"]).all() else _without_number(about, claim)
    return rows.assign(rates=said, why=why), about


def _without_number(about: pd.DataFrame, claim: Claim) -> str:
    """Why the runs that were compared have no number for a claim."""
    every, whole = (
        set.intersection(*(set(runs.loc[runs["scheme"] == name, "seed"]) for name in {claim.a, claim.b or claim.a}))
        for runs in (about, about[about["status"] != DIVERGED])
    )
    return "not measured" if whole else "a run diverged" if every else "no seed in common"


def _outcome(row: Any, direction: str) -> str:
    """What a row of `judged` says of a claim with this direction."""
    if row.seeds < SEEDS:
        return _of_few(row, direction)
    if row.verdict == UNDECIDED:
        return UNDECIDED
    if direction == "alike":
        return HOLDS if row.verdict == EQUIVALENT else FAILS
    none = 1 if row.kind == "ratio" else 0
    as_said = row.estimate < none if direction == "below" else row.estimate > none
    return HOLDS if row.verdict == DIFFERENT and as_said else FAILS


def _of_few(row: Any, direction: str) -> str:
    """The same by the estimate alone, where there are too few seeds for an interval."""
    seeds = "one seed" if row.seeds == 1 else f"{row.seeds} seeds (a claim needs {SEEDS})"
    if direction == "alike" and math.isnan(row.margin):
        return f"{seeds}: no margin"
    said, found = {"below": -1, "alike": 0, "above": 1}[direction], side_of(row.estimate, quantity_row(row.metric))
    return f"{AS_SAID if found == said else NOT_AS_SAID if found else LEVEL_SAID}, {seeds}"


def _with_interval(row: Any) -> str:
    """"×0.30 [0.29, 0.31]" for a ratio, "+0.10 [+0.06, +0.13]" for a difference; nothing without a number."""
    if not math.isfinite(row.estimate):
        return ""
    written = ("{:.2f}" if row.kind == "ratio" else "{:+.3f}").format
    return ("×" if row.kind == "ratio" else "") + written(row.estimate) + _ends(row, written)


def _ends(row: Any, written: Callable[[float], str]) -> str:
    """An interval that no line break divides."""
    return bracketed(row.low, row.high, written).replace(", ", ",\N{NO-BREAK SPACE}")


def shown(rows: pd.DataFrame, more: Sequence[str] = ()) -> pd.DataFrame:
    """A table of verdicts to look at: schemes by their titles, estimate and interval as text, verdicts in words.

    Args:
        rows: a result of `judged`, of this module or of `normlab.compare`.
        more: further columns to show, rounded.
    """
    if rows.empty:
        return pd.DataFrame({"verdict": ["these runs have nothing to compare"]})
    sign = "" if rows["kind"].eq("ratio").all() else "+"

    def number(value: float) -> str:
        return "" if math.isnan(value) else f"{value:{sign}.3f}"

    table = pd.DataFrame({"depth": rows["depth"], "scheme": [title_of(name) for name in rows["a"]]})
    if "b" in rows:
        table["against"] = [title_of(name) for name in rows["b"]]
    table["ratio" if not sign else "difference"] = [number(value) for value in rows["estimate"]]
    table[interval_in_words(rows)] = [_ends(row, number).strip() or "none" for row in rows.itertuples()]
    table["seeds"] = rows["seeds"]
    for name in more:
        table[name] = rows[name].round(3)
    table["verdict"] = [in_words(row) for row in rows.assign(a=table["scheme"].to_numpy()).itertuples()]
    return table.reset_index(drop=True)
