"""The league: every scheme under one budget, as a table.

A scheme has final runs, or a search only, or no run. `says` tells which. `league_figures` draws the table.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from normlab.analysis.quantities import last_values, values_of
from normlab.analysis.selection import Selection, experiments_of, in_order, one_precision, summarize, title_of
from normlab.analysis.verdicts import DIFFERENT, differences, judged, means
from normlab.errors import NormlabError
from normlab.runs import COLUMNS, DIVERGED, find_runs, load_experiments, load_runs
from normlab.schemes import BASELINE, SCHEMES
from normlab.store import SEARCH, child, is_address
from normlab.study.questions import PREDICTIONS, over_files, planned_finals
from normlab.study.questions import league as sets
from normlab.training.grids import CLEARLY

NOT_RUN = "not run"
TEXT = ("bigram_loss", "trigram_loss")  # tell texts apart
ALIKE = ["depth", "width", "steps", *TEXT]  # runs that differ in these are not of one league
_NO_ROWS = pd.DataFrame(columns=["estimate", "low", "high"], dtype=float)
STEPS = "steps.csv"  # of a folder of the league: `League.steps`
WORDS = ("deepest_trained", "claim")  # rows of `load_published` whose note is what a paper says


class League(NamedTuple):
    """Tables of `load_runs` and `load_experiments`: final runs, the search's, and what was measured after finals.

    steps: the time of a training step over Pre-LN's, `scheme step step_low step_high` (benchmarks/scheme_steps.py).
    """

    finals: pd.DataFrame
    search: pd.DataFrame
    experiments: pd.DataFrame | None
    steps: pd.DataFrame | None = None


def load(folders: Iterable[str | Path]) -> League:
    """The tables of all runs of the league at or below the folders. Of a run in two of them the first counts.

    Raises:
        NormlabError: a folder is missing, or none has a run; or runs differ in depth, width, length or text, and cannot
            be compared.
    """
    places = require_folders(folders)
    finals, search = (_runs_at(those) for those in (places, [child(place, SEARCH) for place in places]))
    if finals.empty and search.empty:
        names = ", ".join(map(str, places))
        raise NormlabError(f"no run of the league in {names}: train them with normlab sweep --preset league --out DIR")
    for table in (finals, search):
        about = summarize(table)
        about["steps"] = about["steps"].mask(about["status"] == DIVERGED)  # a diverged run stopped early
        unlike = [name for name, values in about[ALIKE].round(6).items() if values.nunique() > 1]
        if unlike:
            remedy = "; the text is the same where normlab[packages] is installed" if set(unlike) & {*TEXT} else ""
            raise NormlabError(
                f"runs of the league differ in {' and '.join(unlike)}, so their losses do not compare{remedy}"
            )
    finals = _without_twins(_at_one_rate(finals, search))
    files = [file for place in places if isinstance(place, Path) and (file := place / STEPS).is_file()]
    steps = pd.read_csv(files[0]) if files else None
    try:
        experiments = load_experiments([place for place in places if _is_there(place)])
    except NormlabError:  # none was measured so
        return League(finals, search, None, steps)
    return League(finals, search, experiments[experiments["run"].isin(finals["run"].unique())], steps)


def require_folders(folders: Iterable[str | Path]) -> list[str | Path]:
    """The folders as paths, and the addresses among them. NormlabError: one of the folders is missing."""
    places = [folder if is_address(folder) else Path(folder) for folder in folders]
    if missing := [place for place in places if isinstance(place, Path) and not place.is_dir()]:
        raise NormlabError(f"{missing[0]} is no folder of runs")
    return places


def _at_one_rate(finals: pd.DataFrame, search: pd.DataFrame) -> pd.DataFrame:
    """Final runs at each scheme's best rate of the search; if there is none, at the rate of most of its final runs."""
    about, tried = summarize(finals), summarize(search)
    for scheme, own in about.groupby("scheme"):
        losses = tried[tried["scheme"] == scheme].groupby("lr")["eval_loss"].min().dropna()
        best = losses.idxmin() if len(losses) else None
        rate = best if best in set(own["lr"]) else own["lr"].mode().iloc[0]
        others = own.index[own["lr"] != rate]
        if len(others):
            warnings.warn(f"left out: {len(others)} final runs of {scheme} at another rate than {rate:g}", stacklevel=3)
            finals = finals[~finals["run"].isin(others)]
    return finals


def _without_twins(finals: pd.DataFrame) -> pd.DataFrame:
    """One final run of each scheme and seed, where another one differs from it in precision alone."""
    about = summarize(finals)
    kept = one_precision(about).index
    if len(kept) < len(about):
        words = f"left out: {len(about) - len(kept)} final runs that others repeat in another precision"
        warnings.warn(words, stacklevel=3)
    return finals[finals["run"].isin(kept)]


def _is_there(place: str | Path) -> bool:
    return (is_address(place) or Path(place).is_dir()) and bool(find_runs(place))


def _runs_at(places: Iterable[str | Path]) -> pd.DataFrame:
    tables: list[pd.DataFrame] = []
    for place in filter(_is_there, places):
        here = load_runs(place)
        known = {run for table in tables for run in table["run"].unique()}
        tables.append(here[~here["run"].isin(known)])
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def standings(league: League, published: pd.DataFrame) -> pd.DataFrame:
    """The league as a table, one row per scheme of the registry and of the runs, best first.

    `says` is "may be the best", "not the best", "too few final runs", "a final run diverged",
    "below at 2M tokens", "only searched", "search unfinished", "diverged" or "not run".
    Intervals are 95% intervals over seeds. Values are of the final runs, except those of the search.

    Returns:
        Columns `scheme title says`, then `p in_set` of `normlab.study.questions.league`. Then:

        loss: held-out loss, with `loss_low loss_high seeds`.
        seen_loss: loss on blocks that the model was trained on.
        minus: held-out loss minus Pre-LN's, paired by seed, with `minus_low minus_high verdict`. The family
            is that of all final runs that are planned.
            `files_low files_high`: its interval over the held-out files.
        search_loss, rate: the best of the search. `inside`: rates on both sides of it were tried.
        valley: largest over smallest rate within 0.05 nats of the best, where several were tried. The whole valley is
            narrower than `valley_most`, the ratio of the nearest rates outside. `valley_open`: it reaches an edge, so
            nothing bounds it. None where the best ends above a bigram model.
        loss_at_R, growth_at_R: of the search's run at rate R, for each rate. One seed; an infinite loss diverged.
        tokens, trigram_loss: of the final runs, read in training and of the held-out blocks; `search_tokens
            search_trigram_loss`: of the search's.
        growth: L2 norm of a token after the last block, over that after the first, with `growth_low growth_high`.
        uniform: the number of uniform attentions, of `attentions`. The first block's are left out.
        deep_cost: sum of the skip costs of the deeper half of the blocks without the last, in nats, with `deep_cost_low
            deep_cost_high`.
        parameters, operations, bytes: beyond Llama's, the last two per token (`normlab.models.costs`).
        step_cost: measured time of a training step over Pre-LN's, with `step_low step_high`. From `League.steps`, the
            middle half of the rounds. Else of seeds for which both trained in one precision, from two on.
        equal_compute: Pre-LN's loss at the same compute, minus this scheme's. Positive is better. Pre-LN's loss falls
            with the logarithm of compute, at the slope from its search to its final runs. `equal_low equal_high`: of
            the difference in loss alone.
        claim, predicted: what papers say, with source, and what other leagues found.
    """
    from normlab.models.costs import table as costs_table  # needs transformers, and figures import this module

    finals, search = league.finals, league.search
    about = summarize(finals if len(finals) else search)
    depth, width = int(about["depth"].max()), int(about["width"].max())
    table = sets(finals, search).set_index("scheme")
    table = table.reindex(in_order({*SCHEMES, *table.index}))
    table["says"] = table["says"].fillna(NOT_RUN)
    table["in_set"] = table["in_set"].eq(True)
    table["title"] = [title_of(name) for name in table.index]
    chosen, searched = (Selection(runs, summarize(runs)) for runs in (finals, search))
    for column, values in (
        *_losses(chosen, league.steps).items(),
        *_valleys(searched.runs).items(),
        *_by_rate(searched, depth).items(),
        *_depth_use(chosen, league.experiments, depth).items(),
    ):
        table[column] = values.reindex(table.index)
    for runs, which in ((chosen, ""), (searched, "search_")):
        table[f"{which}tokens"] = runs.table["tokens"].max()
        table[f"{which}trigram_loss"] = runs.runs["trigram_loss"].max()
    table = table.join(costs_table(width, depth).set_index("name")[["parameters", "operations", "bytes"]])
    spent = _fall(table, finals, search) * np.log(table["step_cost"])
    for column, end in (("equal_compute", "minus"), ("equal_low", "minus_high"), ("equal_high", "minus_low")):
        table[column] = -table[end] - spent
    said = claims(published)
    table["claim"] = [said.get(name, "") for name in table.index]
    told = {title: f"{source}: {expected} than {other}" for source, title, other, expected in PREDICTIONS}
    table["predicted"] = table["title"].map(told).fillna("")
    order = table["says"].eq(NOT_RUN).rename("last")
    table = table.assign(last=order).sort_values(["last", "loss", "search_loss"], kind="stable")
    return table.drop(columns="last").rename_axis("scheme").reset_index()


def _losses(chosen: Selection, steps: pd.DataFrame | None) -> dict[str, pd.Series]:
    """Losses with intervals, differences from Pre-LN, and step costs; each indexed by scheme."""
    values = last_values(chosen, "loss")
    columns = _with_interval("loss", values, "loss")
    columns["seen_loss"] = last_values(chosen, "seen_loss").groupby("scheme")["value"].mean()
    others = [name for name in in_order(values["scheme"]) if name != BASELINE]
    rows = [differences(values, name, BASELINE, "loss") for name in others]
    gaps = judged(pd.concat(rows), family=planned_finals()).set_index("a") if rows else _NO_ROWS
    columns |= {"minus": gaps["estimate"], "minus_low": gaps["low"], "minus_high": gaps["high"]}
    columns["verdict"] = gaps.get("verdict", pd.Series(dtype=object))
    table = chosen.table[chosen.table["run"].isin(chosen.runs.index)]
    files = {name: over_files(table, name, BASELINE, int(values["depth"].max())) for name in others}
    for column, end in (("files_low", 0), ("files_high", 1)):
        columns[column] = pd.Series({name: ends[end] for name, ends in files.items()}, dtype=float)
    speeds = last_values(chosen, "tokens_per_s")
    speeds = speeds.assign(group=speeds["run"].map(chosen.runs["dtype"]))
    rows = []
    for name in others:
        own = speeds[speeds["scheme"].isin([name, BASELINE])]
        # Pairs in one precision: a machine that computes bfloat16 is another machine.
        paired = own[own.groupby(["seed", "group"])["scheme"].transform("nunique") == 2]
        if paired["seed"].nunique() > 1:  # what else the machine did during one run would pass for a cost
            rows.append(differences(paired, BASELINE, name, "tokens_per_s", pool=speeds))
    costs = (pd.concat(rows).set_index("b") if rows else _NO_ROWS)[["estimate", "low", "high"]]
    costs = costs.set_axis(["step", "step_low", "step_high"], axis="columns")
    if steps is not None:
        costs = steps.set_index("scheme")[[*costs]].combine_first(costs)
    return columns | {"step_cost": costs["step"], "step_low": costs["step_low"], "step_high": costs["step_high"]}


def _valleys(search: pd.DataFrame) -> dict[str, pd.Series]:
    """The width of each scheme's valley of learning rates, at least and at most, and whether an edge cuts it."""
    rows = {}
    for scheme, own in search.groupby("scheme"):
        losses = own.groupby("lr")["eval_loss"].min()
        good = losses.index[losses < losses.min() + CLEARLY]
        if not len(good) or len(losses) == 1 or losses.min() >= own["bigram_loss"].max():
            continue
        below, above = losses.index[losses.index < good.min()], losses.index[losses.index > good.max()]
        is_open = not (len(below) and len(above))
        rows[scheme] = (good.max() / good.min(), math.nan if is_open else above.min() / below.max(), is_open)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["valley", "valley_most", "valley_open"])
    return {name: table[name] for name in table}


def _depth_use(chosen: Selection, experiments: pd.DataFrame | None, depth: int) -> dict[str, pd.Series]:
    """Growth, uniform attentions and cost of deep blocks after training; each indexed by scheme."""
    rows = chosen.rows("model", "uniform_attention")
    rows = rows[rows["step"].eq(rows["step"].max()) & rows["layer"].gt(1)]
    uniform = rows.groupby("scheme", observed=True)["value"].agg(["sum", "size"])
    columns = {"uniform": uniform["sum"], "attentions": uniform["size"]}
    columns |= _with_interval("growth", values_of(chosen, "growth"), "growth")
    if experiments is not None:
        skips = experiments_of(experiments, "skip_delta_loss", "block")
        deep = skips[skips["layer"].between(depth // 2 + 1, depth - 1)]
        by_run = deep.groupby(["scheme", "depth", "seed", "run"], observed=True)
        columns |= _with_interval("deep_cost", by_run["value"].sum().reset_index(), "skip_delta_loss")
    return columns


def _with_interval(name: str, values: pd.DataFrame, metric: str) -> dict[str, pd.Series]:
    own = means(values, metric).set_index("a") if len(values) else _NO_ROWS
    return {name: own["estimate"], f"{name}_low": own["low"], f"{name}_high": own["high"]}


def _by_rate(searched: Selection, depth: int) -> dict[str, pd.Series]:
    """Loss and growth of the search's runs at each rate; each indexed by scheme."""
    losses = searched.runs.pivot_table(index="scheme", columns="lr", values="eval_loss", aggfunc="min")
    grown = values_of(searched, "growth").dropna(subset="value")
    grown = grown.pivot_table(index="scheme", columns="lr", values="value")
    tables = {"loss": losses, "growth": grown}
    return {f"{name}_at_{rate:g}": wide[rate] for name, wide in tables.items() for rate in sorted(wide)}


def _fall(table: pd.DataFrame, finals: pd.DataFrame, search: pd.DataFrame) -> float:
    """The fall of Pre-LN's loss per factor e of tokens, from its best run of the search to its final runs."""
    row = table.loc[BASELINE]
    tokens = [runs.loc[runs["scheme"] == BASELINE, "tokens"].max() for runs in (finals, search)]
    if not all(tokens) or any(map(pd.isna, tokens)) or tokens[0] <= tokens[1]:
        return math.nan
    return float((row["search_loss"] - row["loss"]) / math.log(tokens[0] / tokens[1]))


def claims(published: pd.DataFrame) -> dict[str, str]:
    """The words and numbers of papers on each scheme, with source."""
    found: dict[str, list[str]] = {}
    for row in reported(published).itertuples():
        found.setdefault(row.scheme, []).append(row.says)
    for row in published[published["metric"].isin(WORDS)].dropna(subset="scheme").itertuples():
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
            gap = _number(row.loss - base["loss"] + 0.0, "+", digits=3)
            says = f"{gap} from {base['method']} ({paper} {where}, {row.model})"
            found.append({"scheme": str(row.scheme), "base": base["scheme"], "says": says})
    return pd.DataFrame(found, columns=["scheme", "base", "says"])


def against_papers(table: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Losses that papers report of the schemes that were run, next to ours, minus that of the same other scheme.

    From Pre-LN ours are final runs. Where one of the two has none, or the other scheme is not Pre-LN, it is the
    difference of their best losses in the search, one seed each. A number from a scheme that was not run is left out.
    """
    of, said = table[table["says"] != NOT_RUN].set_index("scheme"), reported(published)
    said = said[said["base"].isin(of.index)]
    rows = [
        (of.loc[scheme, "title"], row.says, _ours(of.loc[scheme], of.loc[row.base]))
        for scheme in of.index
        for row in said[said["scheme"] == scheme].itertuples()
    ]
    return pd.DataFrame(rows, columns=["scheme", "what a paper says", "ours, from the same scheme"])


def _ours(scheme: pd.Series, base: pd.Series) -> str:
    """A scheme's loss minus another's, from rows of the table."""
    if base.name == BASELINE and pd.notna(scheme["minus"]):
        return _interval(scheme["minus"], scheme["minus_low"], scheme["minus_high"], "+")
    gap = _number(scheme["search_loss"] - base["search_loss"], "+")
    return f"{gap} (search)" if gap else ""


def found(table: pd.DataFrame) -> str:
    """In a sentence: how many schemes with final runs are better than Pre-LN, and whether Pre-LN may be the best."""
    compared = table[table["p"].notna()].set_index("scheme")
    below = compared["verdict"].eq(DIFFERENT) & (compared["minus"] < 0)
    if BASELINE not in compared.index:
        return f"Nothing is compared with {title_of(BASELINE)}, which has too few final runs."
    return (
        f"{below.sum()} of {len(compared) - 1} schemes with final runs are better than {title_of(BASELINE)}, which "
        f"itself {'is' if not compared.loc[BASELINE, 'in_set'] else 'may be'} "
        f"{compared.loc[BASELINE, 'says'].removeprefix('may be ')}."
    )


def printed(table: pd.DataFrame) -> str:
    """The schemes with final runs, then those with a search alone, then a line with those that were not run."""
    missing = table.loc[table["says"] == NOT_RUN, "title"]
    tables = (part.replace("\N{NO-BREAK SPACE}", " ", regex=True) for part in (shown(table), shown(table, final=False)))
    parts = [part.to_string(index=False) for part in tables if len(part)]
    return "\n\n".join([*parts, f"not run: {'; '.join(missing)}"] if len(missing) else parts)


def shown(table: pd.DataFrame, final: bool = True) -> pd.DataFrame:
    """The table's main columns as text, one row per scheme. Columns without a value are left out.

    Args:
        final: the schemes with final runs; otherwise those with a search alone.
    """
    run = table[(table["says"] != NOT_RUN) & table["loss"].notna().eq(final)]
    columns = {
        "scheme": run["title"],
        "set": run["says"],
        "loss": [_interval(row.loss, row.loss_low, row.loss_high) for row in run.itertuples()],
        "minus Pre-LN": [_interval(row.minus, row.minus_low, row.minus_high, "+") for row in run.itertuples()],
        "on seen text": run["seen_loss"].map(_number),
        "at 2M tokens": run["search_loss"].map(lambda loss: DIVERGED if loss == math.inf else _number(loss)),
        "rate": [_rate(row, run) for _, row in run.iterrows()],
        "valley": [_valley(row.valley, row.valley_most) for row in run.itertuples()],
        "growth": run["growth"].map(_number),
        "uniform": [
            "" if pd.isna(n) else f"{uniform:g} of {n:g}" for uniform, n in run[["uniform", "attentions"]].values
        ],
        "deep cost": run.get("deep_cost", pd.Series(math.nan, run.index)).map(_number),
        "step": run["step_cost"].map(_number),
        "gain at equal compute": [
            _interval(row.equal_compute, row.equal_low, row.equal_high, "+") for row in run.itertuples()
        ],
    }
    return pd.DataFrame(columns).loc[:, lambda text: (text != "").any()]


def _rate(row: pd.Series, run: pd.DataFrame) -> str:
    """The best rate, and whether it is the largest, the smallest or the only one that was tried."""
    tried = [
        float(name.removeprefix("loss_at_")) for name in run if name.startswith("loss_at_") and pd.notna(row[name])
    ]
    end = {max(tried, default=0): " (largest tried)", min(tried, default=0): " (smallest tried)"}.get(row["rate"], "")
    end = " (only one tried)" if len(tried) == 1 else end
    return "" if pd.isna(row["rate"]) else f"{row['rate']:g}{end}"


def _valley(width: float, most: float) -> str:
    if pd.isna(width):
        return ""
    return f">= x {width:g}" if pd.isna(most) else f"x {width:g} to {most:g}"


def _number(value: float, sign: str = "", digits: int = 2) -> str:
    return f"{value:{sign}.{digits}f}".replace("-", "−") if math.isfinite(value) else ""


def _interval(estimate: float, low: float, high: float, sign: str = "") -> str:
    ends = "" if pd.isna(low) else f" [{_number(low)},\N{NO-BREAK SPACE}{_number(high)}]"
    return _number(estimate, sign) + ends
