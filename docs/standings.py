"""The league as data/league.csv and as the tables of docs/league.md, made from data/league.

csv     the whole table
texts   every text by the name that marks it in the page
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from findings import interval, league, league_minus, league_table, manifests, plain, runs, signed, turned
from scipy import stats
from tables import table

import normlab
from normlab.analysis.quantities import last_values
from normlab.analysis.selection import Selection, in_order, summarize, title_of
from normlab.analysis.verdicts import DIFFERENT, differences, lower_quartile, pair_variances, variance_over_seeds
from normlab.schemes import BASELINE
from normlab.study.league import NOT_RUN, against_papers, shown
from normlab.study.questions import UNFINISHED, predictions
from normlab.training.grids import CLEARLY

SHARED = 0.002  # the rate that is tried first
BETWEEN = 0.004  # half way from 0.002 to 0.008, the two rates that every scheme is tried at


def searched() -> pd.Series:
    """The best loss of each scheme in the search, one seed; indexed by scheme."""
    losses = league_table().set_index("scheme")["search_loss"]
    return losses[np.isfinite(losses)]


def csv() -> str:
    return league_table().to_csv(index=False, float_format="%.6g", lineterminator="\n")


def texts() -> dict[str, str]:
    run = league_table()[league_table()["says"] != NOT_RUN]
    half = (run["minus_high"] - run["minus_low"]).dropna() / 2
    compared = run[run["p"].notna()]
    spent = [m["measured"]["wall_s"] for folder in ("league", "league/search", "between") for m in manifests(folder)]
    return {
        "league_learned": _learned(run),
        "league_schemes": f"{len(league_table())}",
        "league_searched": f"{run['search_loss'].notna().sum()}",
        "league_whole": f"{(run['says'] != UNFINISHED).sum()}",
        "league_finals": f"{run['loss'].notna().sum()}",
        "league_seeds": _seeds(run),
        "league_set": _listed(compared.loc[compared["in_set"], "title"]),
        "league_out": _listed(compared.loc[~compared["in_set"], "title"]),
        "league_out_originally": _out_originally(compared["scheme"]),
        "league_compared": f"{len(compared)}",
        "league_half_width": plain(half.median()),
        "league_files_half": plain(((run["files_high"] - run["files_low"]) / 2).median()),
        "league_seeds_apart": plain(seeds_apart().max()),
        "league_seeds_apart_of": title_of(seeds_apart().idxmax()),
        "league_at_shared": _at_shared(run.set_index("title")[f"loss_at_{SHARED:g}"]),
        "league_different": _listed(run.loc[run["verdict"].eq(DIFFERENT), "title"]),
        "ngpt_best": plain(searched()["ngpt"]),
        "league_edges": _edges(run),
        "league_lead": _lead(run.set_index("scheme")),
        "league_between": _between_won(run),
        "table_of_between": _between(run.set_index("scheme")),
        "table_of_checks": _checks(),
        "table_of_mixing": _mixing(),
        **_large_logits(),
        "league_scaled_lns": scaled_lns(),
        "league_post_ln": signed(elsewhere("post_rmsnorm") - searched()[BASELINE]),
        "league_runs": f"{len(spent)}",
        "league_hours": plain(sum(spent) / 3600, 1),
        "table_of_league": table(shown(league_table()), shown(league_table()).itertuples(index=False)),
        "table_of_league_rates": _rates(run),
        "table_of_league_costs": _costs(run),
        "table_of_league_claims": _claims(),
        "table_of_predictions": _predictions(),
    }


def seeds_apart() -> pd.Series:
    """The largest loss of a scheme's final runs minus the smallest; indexed by scheme."""
    return summarize(league().finals).groupby("scheme")["eval_loss"].agg(np.ptp)


def _out_originally(schemes: pd.Series) -> str:
    """The schemes that are out by the rule that was fixed beforehand: each pair's own variance, not below the floor."""
    finals = last_values(Selection(league().finals, summarize(league().finals)), "loss")
    values = finals.pivot_table(index="scheme", columns="seed", values="value").loc[schemes].to_numpy()
    count, seeds = values.shape
    gaps = (values[:, None] - values).reshape(-1, seeds)
    variance = np.maximum(variance_over_seeds(gaps)[0], lower_quartile(*pair_variances(values)))
    p = stats.t.sf(gaps.mean(axis=1) / np.sqrt(variance / seeds), seeds - 1).reshape(count, count)
    return _listed(map(title_of, schemes[p.min(axis=1) * (count - 1) < 0.05]))


def _seeds(run: pd.DataFrame) -> str:
    """Count the schemes with each number of final seeds."""
    counts = run["seeds"].dropna().astype(int).value_counts().sort_index(ascending=False)
    return ", ".join(f"{schemes} have {seeds}" for seeds, schemes in counts.items())


def _between_won(run: pd.DataFrame) -> str:
    """Count the schemes that did best at the rate between, of those tried there that beat a bigram model."""
    bigram = summarize(league().search)["bigram_loss"].max()
    tried = run[run[f"loss_at_{BETWEEN:g}"].notna() & (run["search_loss"] < bigram)]
    return f"{(tried['rate'] == BETWEEN).sum()} of {len(tried)}"


def _between(run: pd.DataFrame) -> str:
    """The schemes that were tried at another rate than their search afterwards, with what that gave."""
    tried = summarize(runs("between")).set_index("scheme")
    lines = []
    for name in in_order(tried.index):
        row, (rate, loss) = run.loc[name], tried.loc[name, ["lr", "eval_loss"]]
        before = (f"{row['rate']:g}", plain(row["search_loss"]))
        lines.append((row["title"], *before, f"{rate:g}", plain(loss), signed(loss - row["search_loss"])))
    return table(("scheme", "best rate of three", "its loss", "rate tried", "its loss", "difference"), lines)


def _mixing() -> str:
    """The mixing of hyper-connections before training and after: medians over sublayers, and ranges."""
    rows = runs("mixing")
    columns = {
        "M from the identity": "mixing_from_identity",
        "from uniform": "mixing_from_uniform",
        "likeness of streams": "stream_cosine",
    }
    lines = []
    for scheme in in_order(rows["scheme"].unique()):
        for step, when in ((0, "before training"), (rows["step"].max(), "after")):
            own = rows[(rows["scheme"] == scheme) & (rows["step"] == step) & (rows["mask"] == "all")]
            cells = []
            for metric in columns.values():
                values = own.loc[own["metric"] == metric, "value"]
                cells.append(f"{plain(values.median())} ({plain(values.min())} to {plain(values.max())})")
            lines.append((title_of(scheme), when, *cells))
    return table(("scheme", "", *columns), lines)


def scaled_lns() -> str:
    """LNS with scaled init minus LNS at the rate between, which LNS's search left out; one seed."""
    scaled = league_table().set_index("scheme").loc["lns_scaled_init", f"loss_at_{BETWEEN:g}"]
    return signed(scaled - elsewhere("lns"))


def elsewhere(scheme: str) -> float:
    """The loss of a scheme at the rate that its search left out."""
    return float(summarize(runs("between")).set_index("scheme").loc[scheme, "eval_loss"])


TWICE = "logits times 2"
EQUAL = {"equal_compute": "estimate", "equal_low": "low", "equal_high": "high"}
# A scheme of data/checks/*.py, without the file's hash -> the league's scheme, and what is changed.
CHANGED = {
    "pre_rmsnorm_large": (BASELINE, "embeddings times √d"),
    "residual_dual_normalized": ("residual_dual", "a final norm"),
    **{f"{scheme}_logits": (scheme, TWICE) for scheme in (BASELINE, "lns", "gatednorm", "bhyt")},
}


def _checks() -> str:
    """Runs that change one thing of a scheme of the league, next to the league's runs of the same rate and seeds."""
    lines = []
    for (scheme, what, tokens), losses in _pairs().items():
        before, after = losses.mean()
        cells = (plain(before), plain(after), interval(_difference(scheme, losses), sign=True))
        lines.append((title_of(scheme), what, f"{tokens / 1e6:.1f}M", len(losses), *cells))
    head = ("scheme", "change", "tokens", "seeds", "in the league", "with the change", "difference")
    return table(head, sorted(lines))


def _pairs() -> dict[tuple[str, str, int], pd.DataFrame]:
    """(scheme, change, tokens) -> losses in the league and with the change, `before after`, indexed by seed."""
    place = ("scheme", "lr", "steps", "seed")
    there = {
        tuple(manifest["config"][name] for name in place): manifest["eval_loss"]
        for folder in ("league", "league/search")
        for manifest in manifests(folder)
    }
    rows = []
    for manifest in manifests("checks"):
        config = manifest["config"]
        scheme, what = CHANGED.get(config["scheme"].rpartition("_")[0], (config["scheme"], "gains at the whole rate"))
        before = there[scheme, *(config[name] for name in place[1:])]
        rows.append((scheme, what, manifest["tokens"], config["seed"], before, manifest["eval_loss"]))
    by = ["scheme", "what", "tokens"]
    runs = pd.DataFrame(rows, columns=[*by, "seed", "before", "after"])
    return {key: own.set_index("seed")[["before", "after"]] for key, own in runs.groupby(by)}


def _difference(scheme: str, losses: pd.DataFrame) -> pd.Series:
    """The loss with the change minus the league's; of several seeds with its interval."""
    if len(losses) == 1:
        return pd.Series({"estimate": (losses["after"] - losses["before"]).iloc[0], "low": np.nan})
    finals = last_values(Selection(league().finals, summarize(league().finals)), "loss")
    after = losses["after"].rename("value").reset_index().assign(depth=finals["depth"].iloc[0], scheme="changed")
    return differences(pd.concat([finals, after]), "changed", scheme, "loss", pool=finals).iloc[0]


def _large_logits() -> dict[str, str]:
    """Pre-LN with larger logits: the schemes of the search that end lower, and its gain in final runs. And others."""
    large = {(scheme, tokens): losses for (scheme, what, tokens), losses in _pairs().items() if what == TWICE}
    short, long = (pick(tokens for _, tokens in large) for pick in (min, max))
    ends = {scheme: losses["after"].iloc[0] for (scheme, tokens), losses in large.items() if tokens == short}
    lower = searched()[lambda losses: losses < ends[BASELINE]].sort_values()
    final = large[BASELINE, long]
    end, finals = final["after"].mean(), league_table().set_index("scheme")["loss"].sort_values()
    several = league_table().query("seeds > 1").set_index("scheme")
    best = several["loss"].idxmin()
    return {
        "league_best": title_of(best),
        "league_best_equal": interval(several.loc[best].rename(EQUAL), sign=True),
        "league_best_step": plain(several.loc[best, "step_cost"]),
        "league_best_lead": interval(turned(league_minus("loss").loc[best])),
        "checks_final_below": _listed(map(title_of, finals.index[finals < end])),
        "checks_below": _listed(map(title_of, lower.index)),
        "checks_final": interval(turned(_difference(BASELINE, final))),
        "checks_final_loss": plain(end),
        "checks_logits": ", ".join(f"{title_of(name)} {plain(ends[name])}" for name in sorted(ends, key=ends.get)),
    }


def _at_shared(losses: pd.Series) -> str:
    """Compare the search's losses at one rate with Pre-LN's, and name the lowest."""
    losses = losses.dropna()
    base = losses[title_of(BASELINE)]
    first, second = losses.nsmallest(2).items()
    below, above = (losses < base - CLEARLY).sum(), (losses > base + CLEARLY).sum()
    return (
        f"{below} of {len(losses) - 1} schemes end more than {CLEARLY:g} nats below Pre-LN; {above} end as far above "
        f"it or diverge; {first[0]} is lowest at {plain(first[1])}, then {second[0]} at {plain(second[1])}"
    )


def _lead(run: pd.DataFrame) -> str:
    """The lead over Pre-LN of the schemes that lead in the search and have final runs: in the search, and in these."""
    search = run["search_loss"] - run.loc[BASELINE, "search_loss"]
    ahead = run["minus"].notna() & (search < -CLEARLY)
    early, late = (-losses[ahead].median() for losses in (search, run["minus"]))
    return f"{ahead.sum()} schemes lead by a median of {plain(early)} nats at 2M tokens, and by {plain(late)} at 6.1M"


def _rates_tried(run: pd.DataFrame) -> pd.Series:
    return run.filter(regex="^loss_at_").notna().sum(axis=1)


def _edges(run: pd.DataFrame) -> str:
    """The schemes whose best rate is at the edge of the three that were tried."""
    return _listed(run.loc[(_rates_tried(run) > 2) & ~run["inside"].eq(True), "title"])


def _listed(titles: Iterable[str]) -> str:
    """Titles in a sentence. Some have a comma."""
    return "; ".join(titles) or "none"


def _learned(run: pd.DataFrame) -> str:
    """Count the schemes that end below a trigram model, in the search and in final runs."""
    parts = []
    for which, words in (("search_", "in the search"), ("", "in final runs")):
        known = run.dropna(subset=f"{which}loss")
        trigram = known[f"{which}trigram_loss"]
        if len(known):
            count = (known[f"{which}loss"] < trigram).sum()
            parts.append(f"{count} of {len(known)} {words} (trigram {plain(trigram.max())})")
    return " and ".join(parts)


def _rates(run: pd.DataFrame) -> str:
    """The search's loss, and the growth of the stream, at each rate that was tried. The lowest loss first."""
    run = run.sort_values("search_loss", kind="stable")
    rates = sorted(float(name.removeprefix("loss_at_")) for name in run if name.startswith("loss_at_"))
    lines = [(row["title"], row["says"], *(_tried(row, rate) for rate in rates)) for _, row in run.iterrows()]
    return table(("scheme", "set", *(f"rate {rate:g}" for rate in rates)), lines)


def _costs(run: pd.DataFrame) -> str:
    """The cost that each scheme adds to Llama, and the time of a step; the cheapest first."""
    run = run.sort_values("step_cost", kind="stable", key=lambda steps: steps.fillna(1.0))
    columns = ("parameters", "operations", "bytes")
    lines = [
        (
            row["title"],
            *(f"{row[name]:,.0f}" for name in columns),
            "" if np.isnan(row["step_cost"]) else plain(row["step_cost"]),
        )
        for _, row in run.iterrows()
    ]
    return table(("scheme", *columns, "step"), lines)


def _tried(row: pd.Series, rate: float) -> str:
    loss, growth = (row.get(f"{name}_at_{rate:g}", np.nan) for name in ("loss", "growth"))
    if np.isnan(loss):
        return ""
    if not np.isfinite(loss):
        return "diverged"
    best = "**" if rate == row["rate"] else ""
    return f"{best}{plain(loss)}{best} (x {plain(growth, 1)})"


def _claims() -> str:
    found = against_papers(league_table(), normlab.load_published())
    return table(found, found.itertuples(index=False))


def _predictions() -> str:
    found = predictions(league().finals, league().search)
    lines = [
        (row.source, row.prediction, signed(row.estimate) if np.isfinite(row.estimate) else "", row.says)
        for row in found.itertuples()
    ]
    return table(("source", "predicted", "ours", "result"), lines)
