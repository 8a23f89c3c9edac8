"""The league: the grid's schemes in one table, and what papers and marin say of them.

load         the runs that one table can hold
by_rate      each scheme at each learning rate; `contenders`: one row per scheme, at its best rate
standings    the contenders with step times and claims: the league's table
printed      that table for a terminal; `shown`: its columns as text; `remarks`: what must be said of it
against_papers   losses that papers report, next to ours; `moved`, `found`: what the rate moves, and what the scheme
"""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from normlab.analysis.quantities import values_of
from normlab.analysis.selection import (
    Selection,
    depths_of_most,
    has_learned,
    in_order,
    one_precision,
    recipes_in_words,
    seeds_in_words,
    summarize,
    title_of,
    unlike,
    unlike_in_words,
)
from normlab.analysis.verdicts import LEVEL, SEEDS, bracketed, differences, judged
from normlab.errors import NormlabError
from normlab.probes.metrics import NGRAM_LOSSES
from normlab.release import shipped
from normlab.runs import DIVERGED, load_runs
from normlab.schemes import BASELINE
from normlab.store import is_address

RATE = 4e-3  # at which sizes are compared, where runs have it
SIZES = ["growth", "deep_cost"]  # compared at one rate, and of one seed
ALIKE = ["width", "steps", "tokens", *NGRAM_LOSSES]  # runs that differ in these cannot be of one table
OWN = "warmup"  # a scheme may have its own
LOSS_AT, LEARNED_AT, TOLD_AT = "loss_at_", "learned_at_", "told_at_"  # begin the names of columns: of one rate
MARIN, CHANGE = "marin", "loss_change"  # a source of `load_published`, and its metric: loss minus its baseline's
WORDS = ("deepest_trained", "claim")  # metrics of `load_published` whose note is what a paper says
FEWEST = 3  # schemes that a rank agreement needs
WIDTH = 100  # letters of a terminal's line


def grid() -> Path:
    """The folder of the grid's runs, which come with normlab."""
    return shipped("grid")


def load(folders: Iterable[str | Path]) -> pd.DataFrame:
    """The table of `normlab.load_runs` of the league's runs: those that change no field of their scheme's model.

    Of a run's twins in another precision those of most runs are kept.

    Raises:
        NormlabError: a folder is missing or has no run; or runs of one depth differ in width, length, text or recipe,
            where a scheme may have a warm-up of its own; or several of one scheme, rate and seed differ in something
            else.
    """
    runs = load_runs(require_folders(folders), variants=False)
    about = summarize(runs)
    lengths = about[["steps", "tokens"]]
    about[["steps", "tokens"]] = lengths.mask(about["status"] == DIVERGED)  # a diverged run stopped early
    for depth, own in about.groupby("depth"):
        differ = [name for name, values in own[ALIKE].round(6).items() if values.nunique() > 1]
        differ = differ or [name for name in unlike(own["recipe"]) if name != OWN]
        if differ:
            is_text = not set(differ).isdisjoint(NGRAM_LOSSES)
            remedy = "; the text is the same where normlab[packages] is installed" if is_text else ""
            raise NormlabError(
                f"runs of {depth} blocks differ in {' and '.join(differ)}, so their losses do not compare{remedy}"
            )
        for scheme, recipes in own.groupby("scheme")["recipe"]:
            if OWN in unlike(recipes):
                words = unlike_in_words(recipes)
                raise NormlabError(f"runs of {scheme} at depth {depth} differ in {words}: keep those of one recipe")
    about = one_precision(about)
    twice = about[about.duplicated(["scheme", "depth", "lr", "seed"])]
    if len(twice):
        run = twice.iloc[0]
        raise NormlabError(
            f"runs of {run['scheme']} at depth {run['depth']}, rate {run['lr']:g} and seed {run['seed']} differ in "
            "something else: keep those of one setting"
        )
    return runs[runs["run"].isin(about.index)]


def require_folders(folders: Iterable[str | Path]) -> list[str | Path]:
    """The folders as paths, and the addresses among them. NormlabError: one of the folders is missing."""
    places = [folder if is_address(folder) else Path(folder) for folder in folders]
    if missing := [place for place in places if isinstance(place, Path) and not place.is_dir()]:
        raise NormlabError(f"{missing[0]} is no folder of runs")
    return places


def step_times() -> pd.DataFrame:
    """The time of a training step over Pre-LN's, `scheme step step_low step_high`: measured once, on one processor.

    The table comes with normlab's data (benchmarks/scheme_steps.py). It is empty where that cannot be had.
    """
    columns = ["scheme", "step", "step_low", "step_high"]
    with contextlib.suppress(NormlabError):
        return pd.read_csv(shipped("bench") / "scheme_steps.csv")[columns]
    return pd.DataFrame(columns=columns).astype({"scheme": str})


def by_rate(runs: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Each scheme at each learning rate, of one depth.

    Returns:
        Columns `scheme lr seeds loss validation_loss learned told growth deep_cost of_seed`. Losses are means over the
        seeds. `loss` is of the test half, infinite where a run diverged, and missing where one logged none. `learned`:
        all of them end below the trigram model; `told`: they know its loss and their own, without which none has
        learned. `growth` and `deep_cost` are of one seed, `of_seed`: the first, which every scheme has. `deep_cost` is
        missing where no block was left out.
    """
    about = summarize(runs)
    about = about[about["depth"] == depth]
    if about.empty:
        raise NormlabError(f"no run of {depth} blocks in the table")
    about = about.assign(learned=has_learned(about), told=about[["trigram_loss", "eval_loss"]].notna().all(axis=1))
    chosen = Selection(runs[runs["run"].isin(about.index)], about)
    for name in SIZES:
        about[name] = np.nan
        with contextlib.suppress(NormlabError):  # no experiments
            about[name] = values_of(chosen, name).set_index("run")["value"]
    first = int(about["seed"].min())
    about.loc[about["seed"] != first, SIZES] = np.nan
    rates = about.groupby(["scheme", "lr"])
    table = rates[["eval_loss", "validation_loss", *SIZES]].mean().rename(columns={"eval_loss": "loss"})
    table["loss"] = table["loss"].where(rates["eval_loss"].count() == rates.size())
    table.insert(0, "seeds", rates["seed"].nunique())
    table.insert(3, "learned", rates["learned"].all())
    table.insert(4, "told", rates["told"].all())
    return table.loc[in_order(about["scheme"])].reset_index().assign(of_seed=first)


def contenders(runs: pd.DataFrame, depth: int | None = None, at: float | None = None) -> pd.DataFrame:
    """One row per scheme, the lowest loss first.

    Args:
        runs: the table of `normlab.load_runs` of the grid.
        depth: number of blocks; default: the deepest at which most schemes were trained.
        at: the rate at which growth and the cost of deep blocks are compared; default: `RATE`, or if no run has it
            the one of most schemes.

    Returns:
        Columns `scheme depth best at_edge seeds loss learned told minus low high p_holm verdict`, columns
        `loss_at_<rate> learned_at_<rate> told_at_<rate>` for each rate, `at of_seed growth deep_cost`. `best` is the
        rate of the lowest validation loss, of those with most seeds; `at_edge` whether it is the least or the largest
        that was tried. `minus` is the scheme's loss at its best rate minus Pre-LN's at its own, paired by seed. `low`
        and `high` are the pair's own 95% interval (t over the seeds), and `verdict` is corrected by Holm over the
        schemes with four seeds; of fewer there is neither. Growth and deep cost are at rate `at`, of seed `of_seed`.
    """
    depth = _depth(runs) if depth is None else depth
    rates = by_rate(runs, depth)
    at = _shared_rate(rates) if at is None else at
    rows = []
    for scheme, own in rates.groupby("scheme", sort=False):
        best = own.loc[_best(own)]
        ends = own["lr"].min(), own["lr"].max()
        row = {"scheme": scheme, "depth": depth, "best": best["lr"], "at_edge": best["lr"] in ends and len(own) > 1}
        row |= {name: best[name] for name in ("seeds", "loss", "learned", "told")}
        row |= {f"{LOSS_AT}{rate:g}": loss for rate, loss in zip(own["lr"], own["loss"], strict=True)}
        row |= {f"{LEARNED_AT}{rate:g}": learned for rate, learned in zip(own["lr"], own["learned"], strict=True)}
        row |= {f"{TOLD_AT}{rate:g}": told for rate, told in zip(own["lr"], own["told"], strict=True)}
        there = own[np.isclose(own["lr"], at)]
        row |= {"at": at, "of_seed": rates["of_seed"].iloc[0]}
        rows.append(row | {name: there[name].iloc[0] if len(there) else np.nan for name in SIZES})
    table = pd.DataFrame(rows).merge(_against_baseline(runs, depth, rates), on="scheme", how="left")
    order = ["scheme", "depth", "best", "at_edge", "seeds", "loss", "learned", "told"]
    order += ["minus", "low", "high", "p_holm", "verdict"]
    order += [f"{name}{rate:g}" for name in (LOSS_AT, LEARNED_AT, TOLD_AT) for rate in _rates(table)]
    return table.sort_values("loss", ignore_index=True)[[*order, "at", "of_seed", *SIZES]]


def _depth(runs: pd.DataFrame) -> int:
    return max(depths_of_most(runs), default=0)


def _shared_rate(rates: pd.DataFrame) -> float:
    counts = rates.groupby("lr")["scheme"].nunique()
    return RATE if RATE in counts.index else float(counts.idxmax())


def _rates(table: pd.DataFrame) -> list[float]:
    """The rates of a table's columns `loss_at_<rate>`."""
    return sorted(float(name.removeprefix(LOSS_AT)) for name in table if name.startswith(LOSS_AT))


def _best(own: pd.DataFrame) -> int:
    """The row of a scheme's best rate: seeds were added where the first one's validation loss was lowest."""
    return int(own.sort_values(["seeds", "validation_loss"], ascending=[False, True]).index[0])


def _against_baseline(runs: pd.DataFrame, depth: int, rates: pd.DataFrame) -> pd.DataFrame:
    """Losses minus Pre-LN's at the best rates, for the schemes with enough seeds there."""
    best = rates.loc[[_best(own) for _, own in rates.groupby("scheme")]].set_index("scheme")
    about = summarize(runs)
    about = about[(about["depth"] == depth) & np.isclose(about["lr"], about["scheme"].map(best["lr"]))]
    values = about.rename(columns={"eval_loss": "value"}).reset_index()
    others = [name for name in best.index[best["seeds"] >= SEEDS] if name != BASELINE]
    columns = ["scheme", "minus", "low", "high", "p_holm", "verdict"]
    if BASELINE not in best.index or best.loc[BASELINE, "seeds"] < SEEDS or not others:
        return pd.DataFrame(columns=columns).astype({"scheme": str})
    pairs = []
    for name in others:
        both = values[values["scheme"].isin([name, BASELINE])]
        pairs.append(differences(both, name, BASELINE, "loss"))
    enough = pd.concat(pairs, ignore_index=True).query("seeds >= @SEEDS")  # a diverged run leaves fewer
    if enough.empty:
        return pd.DataFrame(columns=columns).astype({"scheme": str})
    table = judged(enough.reset_index(drop=True))
    return table.rename(columns={"a": "scheme", "estimate": "minus"})[columns]


def standings(
    runs: pd.DataFrame,
    published: pd.DataFrame,
    steps: pd.DataFrame,
    depth: int | None = None,
    at: float | None = None,
) -> pd.DataFrame:
    """The league's table: `contenders`, the time of a step, and what others say.

    Args:
        runs: of `load`.
        published: of `normlab.load_published`.
        steps: of `step_times`.
        depth, at: as for `contenders`.

    Returns:
        `contenders` with columns `title dtype unlike step step_low step_high claim marin marin_change`. `dtype`: of the
        scheme's training steps. `unlike`: in words, what differs in the training of the table's runs; empty if nothing
        does. `claim`: what papers say, with source. `marin`: what marin found; `marin_change`: its loss minus that of
        its own baseline in its smallest model.
    """
    table = contenders(runs, depth, at).merge(steps, on="scheme", how="left")
    table.insert(1, "title", [title_of(name) for name in table["scheme"]])
    table.loc[table["scheme"] == BASELINE, ["step", "step_low", "step_high"]] = 1.0
    about = summarize(runs)
    about = about[about["depth"] == table["depth"].iloc[0]]
    dtypes = about.groupby("scheme")["dtype"].unique()
    table["unlike"] = recipes_in_words(about)
    table["dtype"] = [" and ".join(sorted(dtypes[name])) for name in table["scheme"]]
    said = claims(published)
    table["claim"] = [said.get(name, "") for name in table["scheme"]]
    words, changes = _of_marin(published)
    table["marin"] = [words.get(name, "") for name in table["scheme"]]
    table["marin_change"] = table["scheme"].map(changes).astype(float)
    return table


def claims(published: pd.DataFrame) -> dict[str, str]:
    """The words and numbers of papers on each scheme, with source."""
    found: dict[str, list[str]] = {}
    for row in reported(published).itertuples():
        found.setdefault(row.scheme, []).append(row.says)
    rows = published[published["metric"].isin(WORDS) & published["paper"].ne(MARIN)]
    for row in rows.dropna(subset="scheme").itertuples():
        source = ", ".join(part for part in (row.paper, row.arxiv) if pd.notna(part))
        found.setdefault(str(row.scheme), []).append(f"{row.note} ({source})")
    return {scheme: "; ".join(words) for scheme, words in found.items()}


def reported(published: pd.DataFrame) -> pd.DataFrame:
    """The losses that papers report, one row per table and scheme: `scheme base says`.

    Losses are differences from Pre-LN in the table's largest model; without Pre-LN, from its first method. `base` is
    that scheme. A perplexity's logarithm is a loss.
    """
    found = []
    rows = published[published["metric"].isin(["eval_loss", "perplexity"])].reset_index(drop=True)
    loss = rows["value"].where(rows["metric"] == "eval_loss", np.log(rows["value"]))
    for (paper, where), own in rows.assign(loss=loss).groupby(["paper", "where"], sort=False):
        own = own[own["model"] == own["model"].iloc[-1]]
        own = own[own["metric"] == own["metric"].iloc[0]].drop_duplicates("method")
        is_base = own["scheme"].eq(BASELINE)
        base = own[is_base].iloc[0] if is_base.any() else own.iloc[0]
        for row in own[own["method"] != base["method"]].dropna(subset="scheme").itertuples():
            gap = _number(row.loss - base["loss"] + 0.0, "+", 3)
            says = f"{gap} from {base['method']} ({paper} {where}, {row.model})"
            found.append({"scheme": str(row.scheme), "base": base["scheme"], "says": says})
    return pd.DataFrame(found, columns=["scheme", "base", "says"])


def _of_marin(published: pd.DataFrame) -> tuple[dict[str, str], dict[str, float]]:
    """What marin found, in words, and the loss minus its baseline's in its smallest model; both by scheme."""
    words, changes = {}, {}
    for scheme, own in published[published["paper"] == MARIN].groupby("scheme"):
        measured, where = own[own["metric"] == CHANGE], own["where"].iloc[0]
        if len(measured):
            changes[str(scheme)] = float(measured["value"].iloc[0])
            parts = (f"{_number(row.value, '+', 3)} ({row.model.rpartition(', ')[2]})" for row in measured.itertuples())
            unknown = measured["note"].iloc[0].partition("; ")[2]
            words[str(scheme)] = f"{', '.join(parts)}, {where}" + (f"; {unknown}" if unknown else "")
        else:
            words[str(scheme)] = f"{own['note'].iloc[0]}, {where}"
    return words, changes


def agreement(table: pd.DataFrame) -> str:
    """How the order by loss agrees with marin's, in a sentence; a number from three schemes on.

    Kendall's tau-b of our loss at the best rate and marin's change, of schemes that have learned. The baseline is one
    of them, with a change of 0: Pre-LN here, a model with GatedNorm there. The chance is that of a random order to
    agree as well or better.
    """
    from scipy.stats import kendalltau

    theirs = table["marin_change"].mask(table["scheme"] == BASELINE, 0.0)
    both = theirs.notna() & table["learned"].astype(bool)
    count = int(both.sum())
    if count < FEWEST:
        return f"Rank agreement with marin: none yet, as both have {count} of these schemes (it takes {FEWEST})."
    tau, chance = kendalltau(table.loc[both, "loss"], theirs[both], alternative="greater")
    few = ": too few schemes to mean anything" if 1 / math.factorial(count) > 1 - LEVEL else ""
    return (
        f"Rank agreement with marin over the {count} schemes that both have, {title_of(BASELINE)} with a change of 0: "
        f"Kendall's tau {_number(tau)}. A random order agrees as well with a chance of {chance:.2f}{few}."
    )


def moved(runs: pd.DataFrame, depth: int | None = None) -> pd.DataFrame:
    """How far a factor of two in the learning rate moves a scheme's loss, and how far its best is from Pre-LN's.

    All losses are of the first seed, which every rate has, and of runs that have learned.

    Args:
        runs: of `load`.
        depth: as for `contenders`.

    Returns:
        Columns `scheme by_rate from_baseline`, nats. `by_rate`: the larger distance of the loss at the best rate to
        that at half and at twice this rate. `from_baseline`: its distance to Pre-LN's loss at Pre-LN's best rate. A row
        per scheme that has learned; `by_rate` is missing where it has at neither of the two. Empty without a Pre-LN
        that has learned.
    """
    about = summarize(runs)
    about = about[about["depth"] == (_depth(runs) if depth is None else depth)]
    about = about[(about["seed"] == about["seed"].min()) & has_learned(about)]
    best = about.loc[about.groupby("scheme")["validation_loss"].idxmin()].set_index("scheme")
    if BASELINE not in best.index:
        return pd.DataFrame(columns=["scheme", "by_rate", "from_baseline"])
    ratio = about["lr"] / about["scheme"].map(best["lr"])
    move = (about["eval_loss"] - about["scheme"].map(best["eval_loss"])).abs()
    table = pd.DataFrame({
        "by_rate": move[np.isclose(np.log2(ratio).abs(), 1)].groupby(about["scheme"]).max(),
        "from_baseline": (best["eval_loss"] - best.loc[BASELINE, "eval_loss"]).abs(),
    })  # fmt: skip
    return table.loc[[name for name in in_order(best.index) if name != BASELINE]].rename_axis("scheme").reset_index()


def found(runs: pd.DataFrame, depth: int | None = None) -> str:
    """`moved` in words: of how many schemes the rate moves the loss further than the scheme's choice does."""
    rows = moved(runs, depth)
    compared = rows.dropna()
    if rows.empty:
        return f"Nothing is compared: it takes runs of {title_of(BASELINE)} and another scheme that have learned."
    if compared.empty:
        return "Nothing is compared: no scheme has learned at its best learning rate and at half or twice this."
    further = compared["by_rate"] > compared["from_baseline"]
    most = "most" if 2 * further.sum() > len(compared) else "not most"
    left = {
        "Not so": compared["scheme"][~further],
        "Not compared, as learned at neither half nor twice the best rate": rows["scheme"][rows["by_rate"].isna()],
    }
    return (
        f"A factor of two in the learning rate moves the loss of {further.sum()} of {len(compared)} schemes, {most} of "
        f"them, further than the best loss of each is from {title_of(BASELINE)}'s; by rate "
        f"{_nats(compared['by_rate'])}, from {title_of(BASELINE)} {_nats(compared['from_baseline'])} nats, of one seed."
    ) + "".join(f" {words}: {'; '.join(map(title_of, names))}." for words, names in left.items() if len(names))


def _nats(values: pd.Series) -> str:
    return f"{values.min():.3f} to {values.max():.3f}" if len(values) > 1 else f"{values.iloc[0]:.3f}"


def against_papers(table: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Losses that papers report of these schemes, next to ours, minus that of the same other scheme.

    Ours are at each scheme's best rate. An interval takes four seeds of both, and Pre-LN as the other.
    """
    of, said = table.set_index("scheme"), reported(published)
    said = said[said["base"].isin(of.index)]
    rows = [
        (of.loc[scheme, "title"], row.says, _ours(of.loc[scheme], of.loc[row.base]))
        for scheme in of.index
        for row in said[said["scheme"] == scheme].itertuples()
    ]
    return pd.DataFrame(rows, columns=["scheme", "what a paper says", "ours, from the same scheme"])


def _ours(scheme: pd.Series, base: pd.Series) -> str:
    """A scheme's loss minus another's, from rows of the table; words where one of them has not learned."""
    if not (scheme["learned"] and base["learned"]):
        return "not learned" if scheme["told"] and base["told"] else "not known to have learned"
    if base.name == BASELINE and pd.notna(scheme["minus"]):
        return _difference(scheme)
    return _number(scheme["loss"] - base["loss"], "+")


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table's numbers as text, one row per scheme. Columns without a value are left out.

    A star is at each scheme's best rate, a + where that is an edge of those that were tried. A loss in parentheses is
    of a rate at which not every seed has learned.
    """
    columns = {"scheme": table["title"]}
    for rate in _rates(table):
        columns[f"{rate:g}".removeprefix("0")] = [_loss(row, rate) for _, row in table.iterrows()]
    columns["from Pre-LN"] = [_difference(row) for _, row in table.iterrows()]
    for name, words in (("growth", "growth"), ("deep_cost", "deep cost"), ("step", "step")):
        columns[words] = table[name].map(_number)
    return pd.DataFrame(columns).loc[:, lambda text: (text != "").any()]


def _loss(row: pd.Series, rate: float) -> str:
    loss = row[f"{LOSS_AT}{rate:g}"]
    if pd.isna(loss):
        return ""
    is_plain = row[f"{LEARNED_AT}{rate:g}"] or np.isinf(loss) or not row[f"{TOLD_AT}{rate:g}"]
    text = f"{loss:.2f}" if is_plain else f"({loss:.2f})"
    return text + ("" if rate != row["best"] else "+" if row["at_edge"] else "*")


def _difference(row: pd.Series) -> str:
    return _number(row["minus"], "+") + bracketed(row["low"], row["high"], _number)


def _number(value: float, sign: str = "", digits: int = 2) -> str:
    return f"{value:{sign}.{digits}f}".replace("-", "−") if math.isfinite(value) else ""


def remarks(table: pd.DataFrame) -> list[str]:
    """What must be said of the table, in sentences: seeds, rates at an edge, what has not learned, precision, recipes,
    marin."""
    seeds = "one seed each" if table["seeds"].max() == 1 else seeds_in_words(table["seeds"])
    rates = table.filter(regex=f"^{LOSS_AT}").notna().sum(axis=1)
    best = [f" ({rate:g})" for rate in table["best"]]
    counts = table["dtype"].value_counts()
    learned, told = table["learned"].astype(bool), table["told"].astype(bool)
    unknown = table["loss"].isna()
    found = [
        f"{table['depth'].iloc[0]} blocks; losses are held-out, in nats per token, of {seeds}; growth and deep cost at "
        f"rate {table['at'].iloc[0]:g}, of seed {table['of_seed'].iloc[0]} alone."
    ]
    for words, which, more in (
        ("No interval, and so no rank", table["low"].isna() & (table["scheme"] != BASELINE), ""),
        ("The best rate is at the edge of those tried", table["at_edge"], best),
        ("Tried at one rate alone", rates == 1, ""),
        ("Not learned with every seed at the best rate, so above a trigram model", ~learned & told, ""),
        ("Step not timed", table["step"].isna(), ""),
        ("Not known to have learned, as the runs know no trigram model's loss", ~told & ~unknown, ""),
        ("Not known to have learned, as not every seed logged a held-out loss at the best rate", unknown, ""),
        (
            "In another precision than most, which moves a loss by up to 0.04",
            table["dtype"].map(counts) < counts.max(),
            " (" + table["dtype"] + ")",
        ),
    ):
        titles = (table["title"] + more)[which]  # some have a comma
        found += [f"{words}: {'; '.join(titles)}."] if len(titles) else []
    found += [f"{words[0].upper()}{words[1:]}." for words in table["unlike"].unique() if words]
    return [*found, agreement(table)]


def printed(table: pd.DataFrame) -> str:
    """The table, what must be said of it, and what others say, in lines of a terminal."""
    lines = [shown(table).to_string(index=False), "* best rate; + best, at an edge; (not learned); inf: diverged"]
    said = [
        f"{row.title}: {'; '.join(filter(None, (row.claim, f'marin: {row.marin}' if row.marin else '')))}"
        for row in table.itertuples()
        if row.claim or row.marin
    ]
    return "\n".join([*lines, "", *map(_wrapped, remarks(table)), *(["", *map(_wrapped, said)] if said else [])])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")
