"""Choose the rows of the long table that one figure shows.

A table may hold several depths, widths, seeds and learning rates. A figure shows one width and usually one depth.

- Losses are shown at each scheme's own learning rate. That is the rate with most seeds, or of several the one with the
  lowest validation loss.
- Magnitudes are shown at one rate for all schemes of a depth, if they share one. The rate moves magnitudes far more
  than the scheme does.

Choices follow rules, and `Selection.describe` states them in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from normlab.errors import NormlabError
from normlab.probes.metrics import NGRAM_LOSSES
from normlab.runs import (  # noqa: F401  (for figures)
    COLUMNS,
    DIVERGED,
    FINISHED,
    MEASURED_ON,
    NOT_LEARNED,
    recipe_fields,
    rounded_rate,
)
from normlab.schemes import SCHEMES

NEEDED = tuple(name for name in COLUMNS if name not in ("tokens", "dtype", "recipe"))
TWINS_SHARE = ["scheme", "depth", "seed", "lr", "steps"]  # runs that differ in precision alone
MANY = 8  # schemes that a reader can tell apart
_EMPTY = "The table is empty: no run has been trained yet."
LEFT_OUT = "normlab.left_out"  # in the attrs of the table of `fully_tried`: why a scheme is not there, by depth
NEEDED_OF_EXPERIMENTS = ("scheme", "depth", "seed", "metric", "part", "layer", "value")


class NothingToShow(NormlabError):
    """No runs for a figure, which then shows this sentence."""


def in_order(schemes: Iterable[str]) -> list[str]:
    """Schemes in the registry's order, unknown ones (a table from elsewhere) last by name."""
    rank = {name: place for place, name in enumerate(SCHEMES)}
    names = schemes.unique() if isinstance(schemes, pd.Series) else schemes  # a column may have a million rows
    return sorted(set(names), key=lambda name: (rank.get(name, len(rank)), name))


def title_of(scheme: str) -> str:
    """A scheme's title in figures, with its name where others have that title; an unregistered one's name."""
    if scheme not in SCHEMES:
        return scheme
    title = SCHEMES[scheme].title
    of_that_title = {row.name for row in SCHEMES.values() if row.title == title}
    return f"{title} ({scheme})" if len(of_that_title) > 1 else title


def separator(titles: Iterable[str]) -> str:
    """What stands between titles: a semicolon where one of them has a comma."""
    return "; " if any("," in title for title in titles) else ", "


def checked(table: pd.DataFrame, needed: Sequence[str] = NEEDED, source: str = "load_runs") -> pd.DataFrame:
    """The table, if it has the columns of `normlab.load_runs` or `normlab.load_experiments`."""
    if not isinstance(table, pd.DataFrame):
        raise NormlabError(f"{table!r:.80} is not a table: pass what normlab.{source} returns")
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise NormlabError(f"the table lacks the columns {', '.join(missing)}: pass what normlab.{source} returns")
    return table


def experiments_of(experiments: pd.DataFrame, metric: str, part: str) -> pd.DataFrame:
    """The rows of one metric and part in the table of `normlab.load_experiments`."""
    table = checked(experiments, NEEDED_OF_EXPERIMENTS, "load_experiments")
    return table[(table["metric"] == metric) & (table["part"] == part)]


def of_one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of an experiment, if each scheme and seed has one value per layer, or per pair of layers.

    Raises:
        NothingToShow: runs differ in learning rate or something else, so that a mean over them is not one over seeds.
            Or runs of one depth have several widths, lengths or texts, where the rows say these.
    """
    twice = rows[rows.duplicated(["scheme", "depth", "seed", *rows.columns.intersection(["layer", "other"])])]
    if len(twice):
        first = twice.iloc[0]
        raise NothingToShow(
            f"Several runs of {first['scheme']} at depth {first['depth']}, seed {first['seed']} were measured: "
            "keep the rows of one learning rate and setting."
        )
    if "width" in rows and rows.groupby("depth")["width"].nunique().gt(1).any():
        raise NothingToShow(f"The runs have widths {_listed(sorted(rows['width'].unique()))}: keep those of one.")
    runs = rows.drop_duplicates(["scheme", "depth", "seed"])
    if "lr" in rows:
        _require_one_rate(runs)
    if "recipe" in rows:
        _require_one_recipe(runs)
    if set(NGRAM_LOSSES) <= set(rows):
        require_one_text(runs)
    return rows


def _require_one_rate(runs: pd.DataFrame) -> None:
    """Refuse seeds of one scheme that were trained at several learning rates."""
    for (scheme, depth), rates in runs.groupby(["scheme", "depth"], observed=True)["lr"]:
        if rates.nunique() > 1:
            raise NothingToShow(
                f"Seeds of {scheme} at depth {depth} were trained at learning rates "
                f"{' and '.join(f'{rate:g}' for rate in sorted(rates.unique()))}: keep those of one."
            )


def _require_one_recipe(runs: pd.DataFrame) -> None:
    """Refuse seeds of a scheme trained differently, and runs of one depth that were not trained equally long."""
    for (scheme, depth), recipes in runs.groupby(["scheme", "depth"], observed=True)["recipe"]:
        if words := unlike_in_words(recipes):
            raise NothingToShow(
                f"Seeds of {scheme} at depth {depth} were trained differently ({words}): keep the runs of one recipe."
            )
    planned = recipe_fields(runs["recipe"]).reindex(columns=["steps", "batch_size", "block_length"]).astype(float)
    lengths = planned[["steps"]].assign(tokens=planned.prod(axis=1, skipna=False))
    known = runs.reindex(columns=["steps", "tokens"]).astype(float)  # fewer where a run was stopped early
    require_one_length(runs.assign(**known.fillna(lengths), status=runs.get("status", FINISHED)))


def depths_of_most(table: pd.DataFrame) -> list[int]:
    """The depths at which the most schemes of a table were run, shallow first."""
    counts = table.groupby("depth")["scheme"].nunique()
    return sorted(int(depth) for depth in counts.index[counts == counts.max()])


def whole_depths(table: pd.DataFrame) -> list[int]:
    """The depths that are not just begun, shallow first.

    They have three schemes or more, half as many as the depth with most, and half as many seeds as any of these. A
    depth's seeds are the median over its schemes. Of fewer schemes they are the depths with most.
    """
    by_depth = table.groupby(["depth", "scheme"], observed=True)["seed"].nunique().groupby("depth")
    schemes, seeds = by_depth.size(), by_depth.median()
    seeds = seeds[schemes >= max(min(3, schemes.max()), schemes.max() / 2)]
    return sorted(int(depth) for depth in seeds.index[seeds >= seeds.max() / 2])


def deepest(table: pd.DataFrame) -> int:
    """The deepest of `whole_depths`, of a table of one width."""
    return max(whole_depths(table))


def width_of_most(about: pd.DataFrame) -> int:
    """The width of most runs, of several the least.

    Args:
        about: the table of `normlab.load_runs`, or `summarize` of it.
    """
    by_run = about.drop_duplicates("run") if "run" in about else about
    if by_run.empty:
        raise NothingToShow(_EMPTY)
    return int(by_run["width"].mode().iloc[0])


def of_depth(table: pd.DataFrame, depth: int | None, schemes: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows of one depth; None: of all.

    schemes: those that the table is of, where others are left out.

    Raises:
        NothingToShow: there are none.
    """
    found = table if depth is None else table[table["depth"] == depth]
    if table.empty:
        raise NothingToShow("The table has no run.")
    if found.empty:
        had = sorted(int(other) for other in table["depth"].unique())
        of, has = (f"{', '.join(schemes)} at ", "it at ") if schemes else ("", "")
        raise NothingToShow(f"No run of {of}depth {depth} in the table, which has {has}depth {_listed(had)}.")
    return found


def seeds_in_words(counts: pd.Series) -> str:
    """Counts of seeds in words: "3 seeds", "1 to 3 seeds"."""
    low, high = int(counts.min()), int(counts.max())
    if low < high:
        return f"{low} to {high} seeds"
    return "1 seed" if high == 1 else f"{high} seeds"


def rates_in_words(runs: pd.DataFrame) -> str:
    """`named_rates`, with what they are: "learning rate 0.001", or "each scheme's learning rate: 0.001 (LNS), ..."."""
    differ = runs.groupby("depth")["lr"].nunique().gt(1).any()
    return ("each scheme's learning rate: " if differ else "learning rate ") + named_rates(runs)


def named_rates(runs: pd.DataFrame) -> str:
    """The learning rate: one for all, one per depth, or each scheme's own; of many schemes the ends.

    Titles are separated by semicolons where one has a comma.

    Args:
        runs: columns `scheme depth lr`.
    """
    rates = runs.groupby("depth")["lr"].unique()
    if any(len(own) > 1 for own in rates):
        if runs["scheme"].nunique() > MANY:
            return f"{runs['lr'].min():g} to {runs['lr'].max():g}"
        by_rate = {lr: [*map(title_of, in_order(own))] for lr, own in runs.groupby("lr")["scheme"]}
        between = separator(title for own in by_rate.values() for title in own)
        return ", ".join(f"{lr:g} ({between.join(own)})" for lr, own in by_rate.items())
    if runs["lr"].nunique() == 1:
        return f"{runs['lr'].iloc[0]:g}"
    return ", ".join(f"{own[0]:g} at depth {at}" for at, own in rates.items())


def at_rate(runs: pd.DataFrame, rate: float | None) -> pd.DataFrame:
    """The runs of one learning rate; None: all runs, of which every figure chooses its own and says how.

    Raises:
        NormlabError: no run has that rate.
    """
    if rate is None:
        return runs
    found = runs[np.isclose(runs["lr"], rate)]
    if found.empty:
        raise NormlabError(f"no run at learning rate {rate:g}; there are {_listed(sorted(runs['lr'].unique()))}")
    return found


def fully_tried(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of schemes that were tried at as many learning rates as the first scheme of their depth, or at more.

    In a sweep that is not done, the others' best rate may be still to come, and they narrow the rates that all share.
    The table's `attrs` say which are left out, and why.
    """
    about = runs[["run", "depth", "scheme", "lr"]].drop_duplicates().set_index(["depth", "scheme"])
    rates = about.groupby(level=["depth", "scheme"])["lr"].nunique().unstack("scheme")
    ordered = rates[in_order(rates.columns)]
    asked = ordered.bfill(axis=1).iloc[:, 0]
    enough = rates.ge(asked, axis=0).stack()
    kept = runs[runs["run"].isin(about.loc[about.index.isin(enough.index[enough]), "run"])]
    fewer = ordered.lt(asked, axis=0).stack()
    left: dict[str, dict[int, str]] = {}
    for depth, scheme in fewer.index[fewer]:
        count, first = int(rates.loc[depth, scheme]), title_of(ordered.loc[depth].first_valid_index())
        left.setdefault(str(scheme), {})[int(depth)] = (
            f"left out: {title_of(scheme)} was tried at {count} learning rate{'s' if count > 1 else ''}, {first} at "
            f"{asked[depth]:.0f}"
        )
    if left:
        kept.attrs = runs.attrs | {LEFT_OUT: left}
    return kept


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per run, indexed by its id.

    Columns `scheme depth width seed lr status dtype recipe steps tokens train_loss eval_loss validation_loss
    unigram_entropy bigram_loss trigram_loss`. dtype and recipe are empty for a table without them. Losses are those of
    the last step at which they were logged. A diverged run has an infinite eval loss. `validation_loss`, of the half of
    the held-out text that rates are chosen on, is the eval loss where not all runs of the scheme and depth have it.
    Bigram and trigram losses are missing for runs that do not store them.
    """
    checked(runs)
    by_run = runs.groupby("run", observed=True)
    about = by_run[["scheme", "depth", "width", "seed", "lr", "status"]].first()
    about = about.astype({"scheme": str, "status": str})
    about["lr"] = about["lr"].astype(float).map(rounded_rate)
    for name in ("dtype", "recipe"):
        about[name] = by_run[name].first().astype(str) if name in runs.columns else ""
    about["steps"] = by_run["step"].max()
    about["tokens"] = by_run["tokens"].max() if "tokens" in runs.columns else np.nan
    is_loss = runs["site"].eq("model") & runs["metric"].isin(["loss", "validation_loss", *NGRAM_LOSSES])
    losses = runs.loc[is_loss, ["run", "step", "split", "metric", "value"]].sort_values("step", kind="stable")
    losses = losses[losses["metric"].ne("validation_loss") | losses["split"].eq("eval")]
    by_split = losses["split"].map({"train": "train_loss", "eval": "eval_loss"})
    column = by_split.where(losses["metric"] == "loss", losses["metric"]).rename("column")
    ends = losses.assign(column=column).drop_duplicates(["run", "column"], keep="last")
    last = ends.pivot(index="run", columns="column", values="value")
    about = about.join(last.reindex(columns=["train_loss", "eval_loss", "validation_loss", *NGRAM_LOSSES]))
    validation, diverged = about["validation_loss"].astype(float), about["status"] == DIVERGED
    about["eval_loss"] = about["eval_loss"].astype(float).mask(diverged, np.inf)
    whole = (validation.notna() | diverged).groupby([about["scheme"], about["depth"]]).transform("all")
    about["validation_loss"] = validation.where(whole, about["eval_loss"]).mask(diverged, np.inf)
    return about


def unlike(recipes: pd.Series) -> pd.DataFrame:
    """The fields in which models of these recipes of `normlab.load_runs` were trained differently, one column each.

    What one lacks is not compared, but for a model field, which is at its default there.
    """
    return _differing(recipes).drop(columns=list(MEASURED_ON), errors="ignore")


def _differing(recipes: pd.Series) -> pd.DataFrame:
    """`unlike`, with the fields that say on how many held-out blocks models were measured."""
    fields = recipe_fields(recipes)
    return fields.loc[:, fields.nunique() > 1]


def unlike_in_words(recipes: pd.Series) -> str:
    """The same as text: "warmup 0.1 and 0.3, clip 1 and 5"; empty if they are alike."""
    return _values_in_words(unlike(recipes))


def _values_in_words(fields: pd.DataFrame) -> str:
    return ", ".join(f"{name} {' and '.join(sorted(own.dropna().unique()))}" for name, own in fields.items())


def recipes_in_words(runs: pd.DataFrame) -> str:
    """What runs differ in beside their rate: the schemes of a depth whose value fewer runs have, or each depth's value.

    Numbers of held-out blocks come last, "measured differently: probe_blocks 16 and 8 (LNS)".

    Args:
        runs: columns `scheme depth seed recipe`, one row per run or several. Nothing is said without recipes.
    """
    if "recipe" not in runs:
        return ""
    runs = runs.drop_duplicates(["scheme", "depth", "seed", "recipe"])
    said: dict[str, str] = {}
    for _, own in runs.groupby("depth"):
        for name, values in _differing(own["recipe"]).items():
            counts = values.value_counts().sort_index().sort_values(ascending=False, kind="stable")
            most, *others = counts.index
            titles = [list(map(title_of, in_order(own["scheme"][values == other]))) for other in others]
            between = separator(title for own_titles in titles for title in own_titles)
            named = [f"{other} ({between.join(own_titles)})" for other, own_titles in zip(others, titles, strict=True)]
            said[f"{name} {' and '.join([most, *named])}"] = name
    for name, values in _differing(runs["recipe"]).items():
        usual = values.groupby(runs["depth"]).agg(lambda own: own.mode().get(0)).dropna()
        if usual.nunique() > 1:
            said[f"{name} {' and '.join(f'{value} at depth {depth}' for depth, value in usual.items())}"] = name
    trained = [words for words, name in said.items() if name not in MEASURED_ON]
    measured = [words for words, name in said.items() if name in MEASURED_ON]
    parts = (("trained", trained), ("measured", measured))
    return "; ".join(f"{what} differently: {', '.join(words)}" for what, words in parts if words)


def has_learned(about: pd.DataFrame) -> pd.Series:
    """True for runs of `summarize` that end below every model that only counts; False without a trigram's loss."""
    return about["trigram_loss"].notna() & (about["eval_loss"] < about[list(NGRAM_LOSSES)].min(axis=1))


@dataclass(frozen=True)
class Selection:
    """The rows that a figure shows, and the summary of the runs they come from."""

    table: pd.DataFrame
    runs: pd.DataFrame
    twins: pd.DataFrame | None = field(default=None, repr=False)  # runs left out for the same in another precision
    source: pd.DataFrame | None = field(default=None, repr=False)  # the table that `choose` was given
    summary: pd.DataFrame | None = field(default=None, repr=False)  # `summarize` of it

    def at_one_rate(self) -> Selection:
        """The same schemes, depths and width; at each depth all schemes at one learning rate, if they share one."""
        if self.source is not None and self.runs.groupby("depth")["lr"].nunique().eq(1).all():
            return _of_one_text(self)
        depth = self.depths[0] if len(self.depths) == 1 else None
        source = self.table if self.source is None else self.source
        width = int(self.runs["width"].iloc[0])
        return _of_one_text(chosen(source, depth, width, self.schemes, True, self.summary))

    @property
    def schemes(self) -> list[str]:
        return in_order(self.runs["scheme"])

    @property
    def depths(self) -> list[int]:
        return sorted(int(depth) for depth in self.runs["depth"].unique())

    def rows(self, site: str, metric: str, mask: str | None = None, split: str | None = None) -> pd.DataFrame:
        """Rows of one metric at one site."""
        keep = (self.table["site"] == site) & (self.table["metric"] == metric)
        if mask is not None:
            keep &= self.table["mask"] == mask
        if split is not None:
            keep &= self.table["split"] == split
        return self.table[keep]

    def remark(self, scheme: str, depth: int | None = None) -> str:
        """Remarks on a scheme's runs: "diverged", "2 of 3 seeds not learned", "without a held-out loss", its learning
        rate if rates differ.

        Empty for a scheme that was not run there.
        """
        here = self.runs if depth is None else self.runs[self.runs["depth"] == depth]
        own = here[here["scheme"] == scheme]
        words = []
        for which, word in (
            (own["status"] == DIVERGED, "diverged"),
            (own["status"] == NOT_LEARNED, "not learned"),
            (own["eval_loss"].isna() & own["status"].eq(FINISHED), "without a held-out loss"),
        ):
            if count := int(which.sum()):
                words.append(word if count == len(own) else f"{count} of {len(own)} seeds {word}")
        if len(own) and here["lr"].nunique() > 1:
            words.append("learning rate " + " and ".join(f"{rate:g}" for rate in sorted(own["lr"].unique())))
        return ", ".join(words)

    def describe(self) -> str:
        """Width, depth, steps and seeds in words, for a figure's subtitle."""
        widths = sorted(int(width) for width in self.runs["width"].unique())
        seeds = seeds_in_words(self.runs.groupby(["scheme", "depth"])["seed"].nunique())
        parts = [f"depth {_listed(self.depths)}", f"width {_listed(widths)}"]
        parts += [f"{_ends(self.runs)} training steps", seeds, self.rate(), self.precision(), self.recipes()]
        return " · ".join(filter(None, parts))

    def of(self, depth: int, schemes: Sequence[str]) -> Selection:
        """The same with the runs of one depth and of these schemes."""
        here = self.runs["depth"].eq(depth) & self.runs["scheme"].isin(schemes)
        return replace(self, runs=self.runs[here])

    def recipes(self) -> str:
        """`recipes_in_words` of the runs."""
        return recipes_in_words(self.runs)

    def precision(self) -> str:
        """Counts of runs by precision, in words; empty if there is only one."""
        counts = self.runs["dtype"].value_counts()
        words = [f"{count} run{'s' if count > 1 else ''} in {dtype}" for dtype, count in counts.items()]
        said = " and ".join(words) if len(words) > 1 else ""
        if self.twins is not None and not self.runs[TWINS_SHARE].merge(self.twins[TWINS_SHARE]).empty:
            said += f"{', ' if said else ''}without the same runs in another precision"
        return said

    def rate(self, depth: int | None = None) -> str:
        """`rates_in_words` of the runs, or of those of one depth."""
        return rates_in_words(self.runs if depth is None else self.runs[self.runs["depth"] == depth])


def choose(
    runs: pd.DataFrame,
    depth: int | str | None = "deepest",
    width: int | None = None,
    schemes: Sequence[str] | None = None,
    same_rate: bool = False,
) -> Selection:
    """Pick the runs that a figure shows.

    Two runs of one scheme, depth, seed and learning rate are not averaged, nor are seeds of unequal length. Of runs
    that differ in precision alone, the one in the precision of most runs is taken: a seed moves the loss further.

    Args:
        depth: a number of blocks, None for all, or "deepest": the deepest with half as many schemes as the depth with
            most, and half as many seeds. With `same_rate` a depth at which they share a rate is preferred.
        width: default: the one with most runs, at that depth where it has no run of another.
        schemes: default all. Control schemes in the table are always added, where they have the depth and width that
            these choose.
        same_rate: at each depth show all schemes at one learning rate, if all were run with it.

    Returns:
        A `Selection`: the chosen rows of `runs`, a table with a row per run, and sentences on how they were chosen.

    Raises:
        NothingToShow: one sentence with the reason, and what there is instead. Runs that were measured on several texts
            are not shown together, at whatever depths.
        NormlabError: a table without the columns of `normlab.load_runs`.
    """
    return _of_one_text(chosen(runs, depth, width, schemes, same_rate))


def _of_one_text(selection: Selection) -> Selection:
    """The selection. NothingToShow where its runs were measured on several texts."""
    require_one_text(selection.runs)
    return selection


def require_one_text(about: pd.DataFrame) -> None:
    """Refuse runs that were measured on several texts, at one depth or at several: their n-gram losses differ."""
    for of, here in _by_depth(about, across=True):
        for column in NGRAM_LOSSES[:2]:
            if len(texts := here[column].dropna().round(6).unique()) > 1:
                raise NothingToShow(
                    f"The runs of {of} were measured on {len(texts)} texts or in other tokens ({column} "
                    f"{', '.join(f'{value:.3f}' for value in sorted(texts))}): keep those of one."
                )


def _by_depth(runs: pd.DataFrame, across: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    """The runs of each depth with its name, "depth 4"; with `across` those of all depths too, "depths 4, 8"."""
    for depth, here in runs.groupby("depth"):
        yield f"depth {depth}", here
    if across:
        yield f"depths {_listed(sorted(runs['depth'].unique()))}", runs


def chosen(
    runs: pd.DataFrame,
    depth: int | str | None,
    width: int | None,
    schemes: Sequence[str] | None,
    same_rate: bool,
    summary: pd.DataFrame | None = None,
) -> Selection:
    """`choose`, of any texts. `summary` is `summarize` of the runs where it is at hand."""
    summary = summarize(runs) if summary is None else summary
    there = placed(summary, depth, width, schemes, same_rate)
    own = there[_chosen_rate(there)]
    if same_rate:
        own = pd.concat([_at_one_rate(there, own, at) for at in own["depth"].unique()])
    about = one_precision(own)
    if several := _variants(about):
        raise NothingToShow(several)
    twins = own[~own.index.isin(about.index)]
    return Selection(runs[runs["run"].isin(about.index)], about, twins, runs, summary)


def placed(
    about: pd.DataFrame,
    depth: int | str | None,
    width: int | None = None,
    schemes: Sequence[str] | None = None,
    same_rate: bool = False,
) -> pd.DataFrame:
    """The rows of `summarize` at the width and depth that `choose` takes, or of all depths, at all learning rates."""
    if about.empty:
        raise NothingToShow(_EMPTY)
    if schemes is not None:
        known = set(about["scheme"])
        unknown = [name for name in schemes if name not in known]
        if unknown:
            raise NothingToShow(f"No run of {', '.join(unknown)} in the table, which has {', '.join(in_order(known))}.")
        wanted = set(schemes) | {name for name in known if name in SCHEMES and SCHEMES[name].is_control}
        about = about[about["scheme"].isin(wanted)]
    asked = about[about["scheme"].isin(schemes)] if schemes else about  # controls choose neither width nor depth
    if width is None:
        width, here = width_of_most(asked), asked[asked["depth"] == depth]
        width = width if here.empty or width in set(here["width"]) else width_of_most(here)
    about, of_widths, asked = about[about["width"] == width], asked, asked[asked["width"] == width]
    if asked.empty:
        of = f"{', '.join(schemes)} at " if schemes else ""
        raise NothingToShow(f"No run of {of}width {width} in the table.")
    if isinstance(depth, str) and depth != "deepest":
        raise NormlabError(f"depth is {depth!r}: give a number of blocks, 'deepest', or None for all")
    if depth == "deepest":
        full = whole_depths(asked)
        shared = [d for d in full if same_rate and len(_common_rates(about[about["depth"] == d]))]
        depth = max(shared or full)
    depth = None if depth is None else int(depth)
    if depth not in {None, *asked["depth"]} and len(widths := of_widths.loc[of_widths["depth"] == depth, "width"]):
        raise NothingToShow(
            f"No run of depth {depth} at width {width} in the table, which has that depth at width "
            f"{_listed(sorted(widths.unique()))}."
        )
    return about[about["depth"].isin(of_depth(asked, depth, schemes)["depth"])]


def one_precision(about: pd.DataFrame) -> pd.DataFrame:
    """Drop a run's twins in other precisions from the rows of `summarize`.

    Twins share `TWINS_SHARE`. If one precision has several of them, they differ in something else, and all stay.
    """
    if about["dtype"].nunique() < 2 or about.duplicated([*TWINS_SHARE, "dtype"]).any():
        return about
    counts = about["dtype"].value_counts().sort_index().sort_values(ascending=False, kind="stable")
    rank = about["dtype"].map({dtype: position for position, dtype in enumerate(counts.index)})
    taken = about.loc[rank.sort_values(kind="stable").index].drop_duplicates(TWINS_SHARE).index
    return about[about.index.isin(taken)]


def _variants(about: pd.DataFrame) -> str:
    """A sentence on runs that are not averaged: two of a scheme, depth, seed and rate, or seeds trained differently."""
    place = ["scheme", "depth", "seed", "lr"]
    if not about.duplicated(place).any():
        at = ["scheme", "depth", "lr"]
        whole = about[about["status"] != DIVERGED]  # a diverged run stopped early
        ones = about.drop_duplicates([*at, "recipe"]), whole.drop_duplicates([*at, "steps", "tokens"])
        if not any(found.duplicated(at).any() for found in ones):
            return ""
        of_seeds = whole.groupby(at)
        least, most = (getattr(of_seeds[["steps", "tokens"]], end)() for end in ("min", "max"))
        for length in ("steps", "tokens"):
            for scheme, depth, rate in least.index[least[length] < most[length]]:
                own = (scheme, depth, rate)
                return (
                    f"Seeds of {scheme} at depth {depth} and learning rate {rate:g} were trained for "
                    f"{least.loc[own, length]:,} to {most.loc[own, length]:,} {length}: keep the runs of one length."
                )
        for (scheme, depth, rate), recipes in about.groupby(at)["recipe"]:  # with those that diverged
            if words := unlike_in_words(recipes):
                return (
                    f"Seeds of {scheme} at depth {depth} and learning rate {rate:g} were trained differently "
                    f"({words}): "
                    "keep the runs of one recipe."
                )
        return ""
    places = about.groupby(place, dropna=False)["recipe"]
    scheme, depth, seed, rate = most = places.size().idxmax()
    recipes = places.get_group(most)
    words = _values_in_words(_differing(recipes)) or "something else"
    return (
        f"{len(recipes)} runs of {scheme} at depth {depth}, seed {seed} and learning rate {rate:g} differ in {words}: "
        "keep those of one setting (normlab.load_configs says which), or use normlab.compare_variants."
    )


def _chosen_rate(about: pd.DataFrame) -> np.ndarray:
    """True for runs at the rate chosen for their scheme and depth: most seeds, then lowest mean validation loss."""
    own = about.assign(loss=about["validation_loss"].fillna(np.inf))
    by_rate = own.groupby(["scheme", "depth", "lr"])
    rates = own.assign(seeds=by_rate["seed"].transform("nunique"), loss=by_rate["loss"].transform("mean"))
    ordered = rates.sort_values(["seeds", "loss", "lr"], ascending=[False, True, True])
    best = ordered.groupby(["scheme", "depth"])["lr"].transform("first")
    return about["lr"].eq(best.reindex(about.index)).to_numpy()


def _at_one_rate(about: pd.DataFrame, own: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Runs of a depth at a rate that all schemes share, or at each scheme's own if they share none.

    Of several it is the reference's own (the first scheme's, with which figures compare), else the best for most.
    """
    here, own = about[about["depth"] == depth], own[own["depth"] == depth]
    common = _common_rates(here)
    if common.empty:
        return own
    rates = own.drop_duplicates("scheme").set_index("scheme")["lr"]
    votes, reference = rates.value_counts(), rates[in_order(rates.index)[0]]
    return here[here["lr"] == max(common, key=lambda rate: (rate == reference, votes.get(rate, 0), -rate))]


def _common_rates(here: pd.DataFrame) -> pd.Index:
    """Learning rates that all schemes of these runs were run with."""
    schemes = here.groupby("lr")["scheme"].nunique()
    return schemes.index[schemes == here["scheme"].nunique()]


def require_one_length(about: pd.DataFrame, *, across: bool = False) -> None:
    """Refuse what compares runs after training if finished ones of a depth were not trained equally long.

    Args:
        across: depths are compared too, so that all runs have one length.
    """
    for of, here in _by_depth(about[about["status"] != DIVERGED], across):
        for length in ("steps", "tokens"):
            if here[length].nunique() > 1:
                raise NothingToShow(
                    f"The runs of {of} were trained for {here[length].min():,.0f} to "
                    f"{here[length].max():,.0f} {length}: keep those of one length."
                )


def _ends(about: pd.DataFrame) -> str:
    """Steps of finished runs in words: "6,000", or "1,000 to 6,000"."""
    whole = about[about["status"] != DIVERGED]
    steps = (about if whole.empty else whole)["steps"]
    return f"{steps.max():,.0f}" if steps.nunique() == 1 else f"{steps.min():,.0f} to {steps.max():,.0f}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
