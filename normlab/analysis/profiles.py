"""Layer profiles: one metric by layer at one training step, over seeds or against a reference scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from normlab.analysis.quantities import mean_over, on_scale
from normlab.analysis.selection import (
    MANY,
    NothingToShow,
    Selection,
    choose,
    depths_of_most,
    summarize,
    title_of,
    whole_depths,
)
from normlab.analysis.theory import predict_runs
from normlab.analysis.verdicts import LEVEL, t_quantile, variance_over_seeds
from normlab.errors import NormlabError
from normlab.probes.metrics import ALL_METRICS, metric_row, site_order
from normlab.schemes import SCHEMES, tagged

NOT_TRAINED = "not trained"
BEST = "best"  # in place of a rate: each scheme's best one
_KEY = ["site", "metric", "mask", "depth"]
_AXES = ["scheme", "seed", "step", "layer"]


@dataclass(frozen=True)
class View:
    """One look at the table.

    Args:
        metric, site, mask: the measurement, its place and its tokens.
        depth: number of blocks.
        step: optimizer steps done.
        schemes: which to show.
        relative: divide each profile by its own value at layer 1.
        reference: show every scheme against this one, paired by seed, by ratio or difference as the metric's row says.
        rate: the runs of this learning rate. None: of each scheme's best one.
    """

    metric: str
    site: str
    mask: str
    depth: int
    step: int
    schemes: tuple[str, ...]
    relative: bool = False
    reference: str | None = None
    rate: float | None = None


@dataclass(frozen=True)
class Profile:
    """One scheme's line; `low` and `high` are the extreme seeds, or the paired interval; NaN for one seed."""

    scheme: str
    layers: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


@dataclass(frozen=True)
class Measured:
    """One metric at one site and depth: `values` by scheme, seed, step and layer, NaN where there is none."""

    schemes: list[str]
    steps: list[int]
    layers: np.ndarray
    values: np.ndarray


class Profiles:
    """An index of the long table, which reads a profile in well under a millisecond.

    Results are kept and never changed, so threads may share it.

    Args:
        runs: the table of `normlab.load_runs`.
        configs: each run's configuration (`normlab.read_configs`), for theory's predictions.

    Attributes:
        chosen: the runs that are shown.
        missing: why nothing can be shown; empty otherwise.
        shared: by depth, the learning rate at which magnitudes are compared, where all schemes of the depth have one.

    Raises:
        NormlabError: `runs` is no such table.
    """

    def __init__(self, runs: pd.DataFrame, configs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.missing = ""
        self._configs = configs or {}
        self._measured, self._by_step = cache(self._read), cache(self._compute)
        self._predictions = cache(self._predict)
        try:
            self.chosen = choose(runs, depth=None)
            same_rate = self.chosen.at_one_rate()
        except NothingToShow as why:
            self.missing = str(why)
            same_rate = self.chosen = Selection(runs[:0], summarize(runs)[:0])
        one_rate = same_rate.runs.groupby("depth")["lr"].unique()
        self.shared = {int(depth): float(rates[0]) for depth, rates in one_rate.items() if len(rates) == 1}
        is_width = runs["width"].isin(self.chosen.runs["width"])
        self._at_rate = cache(lambda rate: Profiles(runs[is_width & (runs["lr"] == rate)], configs))
        rates = runs.loc[is_width & runs["layer"].notna(), ["depth", "lr"]].drop_duplicates()
        self._rates = {int(depth): sorted(here["lr"].tolist()) for depth, here in rates.groupby("depth")}
        table = self.chosen.table
        table = table[table["layer"].notna()]
        if table.empty:
            self.missing = self.missing or "No layer was measured in these runs."
        # Positions of rows, not rows: a reader looks at few of some hundred combinations, and copying is slow.
        self._places = table.groupby(_KEY, observed=True).indices
        self._columns = {name: table[name].to_numpy(dtype=np.int64) for name in _AXES[1:]}
        self._columns["scheme"] = pd.Categorical(table["scheme"], self.schemes).codes
        self._values = table["value"].to_numpy(dtype=float)
        self._trained = set(self.chosen.runs[["scheme", "depth"]].itertuples(index=False, name=None))
        self._said = cache(self.chosen.remark)
        self._unlike = cache(self._say_unlike)
        self._rates_in_words = {depth: self.chosen.rate(depth) for depth in self.depths}

    @property
    def schemes(self) -> list[str]:
        return self.chosen.schemes

    @property
    def depths(self) -> list[int]:
        return self.chosen.depths

    def rates(self, depth: int) -> list[float]:
        """The learning rates of the runs of a depth, small first."""
        return self._rates.get(depth, [])

    def opening_rate(self, depth: int) -> float | None:
        """The rate of a first look: the shared one, where the runs of the depth have several and share one."""
        return self.shared.get(depth) if len(self.rates(depth)) > 1 else None

    def at(self, rate: float | None) -> Profiles:
        """The index of the runs of one learning rate; None: this one."""
        return self if rate is None else self._at_rate(rate)

    def metrics(self) -> list[str]:
        """Measured metrics, in the order of the metrics table."""
        names = {metric for _, metric, _, _ in self._places}
        return [name for name in ALL_METRICS if name in names] + sorted(names - set(ALL_METRICS))

    def sites(self, metric: str) -> list[str]:
        """Sites at which a metric was measured: its default site first, then in the order of the sites table."""
        names = {site for site, name, _, _ in self._places if name == metric}
        return sorted(names, key=lambda site: (site != metric_row(metric).default_site, site_order(site)))

    def masks(self, metric: str, site: str) -> list[str]:
        return sorted({mask for where, name, mask, _ in self._places if (where, name) == (site, metric)})

    def steps(self, metric: str, site: str, mask: str, depth: int, rate: float | None = None) -> list[int]:
        """Training steps at which any scheme of that depth was measured."""
        return self.at(rate)._measured(site, metric, mask, depth).steps

    def _read(self, site: str, metric: str, mask: str, depth: int) -> Measured:
        places = self._places.get((site, metric, mask, depth), np.empty(0, dtype=np.int64))
        known, at = zip(*(np.unique(self._columns[name][places], return_inverse=True) for name in _AXES), strict=True)
        values = np.full([len(axis) for axis in known], np.nan)
        values[at] = self._values[places]
        schemes = [self.schemes[code] for code in known[0]]
        return Measured(schemes, known[2].tolist(), known[3], np.where(np.isfinite(values), values, np.nan))

    def lines(self, view: View) -> list[Profile]:
        """The profiles of a view in the order of its schemes; schemes without one are left out."""
        found = self.lines_by_step(view)
        return [found[name, view.step] for name in view.schemes if (name, view.step) in found]

    def lines_by_step(self, view: View) -> dict[tuple[str, int], Profile]:
        """The profiles of all schemes at all steps, by scheme and step; made at the first call."""
        here = self.at(view.rate)
        return here._by_step(view.site, view.metric, view.mask, view.depth, view.relative, view.reference)

    def _compute(
        self, site: str, metric: str, mask: str, depth: int, relative: bool, reference: str | None
    ) -> dict[tuple[str, int], Profile]:
        measured = self._measured(site, metric, mask, depth)
        values = _relative_to_layer_one(measured.layers, measured.values) if relative else measured.values
        if reference is None:
            middle, low, high, seeds = _over_seeds(values, metric)
        elif reference in measured.schemes:
            middle, low, high, seeds = _paired(values, measured.schemes.index(reference), metric)
        else:
            return {}
        return {
            (scheme, step): Profile(scheme, measured.layers, middle[i, j], low[i, j], high[i, j], int(seeds[i, j]))
            for i, scheme in enumerate(measured.schemes)
            for j, step in enumerate(measured.steps)
            if seeds[i, j]
        }

    def predicted(self, view: View) -> list[Profile]:
        """Theory's profiles of a view before training, without bounds, for the schemes that have a prediction.

        Only metrics of `normlab.analysis.theory.predict` have one. Against a reference, a profile is the ratio or
        difference of two predictions.
        """
        predictions = self.at(view.rate)._predictions(view.depth).get((view.site, view.metric, view.mask), {})
        base = predictions.get(view.reference) if view.reference is not None else None
        found = []
        for scheme in view.schemes:
            if scheme not in predictions or (view.reference is not None and base is None):
                continue
            layers, values = predictions[scheme]
            below = None if base is None else base[1]
            if view.relative:
                values = _relative_to_layer_one(layers, values)
                below = None if base is None else _relative_to_layer_one(*base)
            if below is not None:
                values = values / below if metric_row(view.metric).is_ratio else values - below
            nothing = np.full_like(values, np.nan)
            found.append(Profile(scheme, layers, values, nothing, nothing, 0))
        return found

    def _predict(self, depth: int) -> dict[tuple[str, str, str], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Theory's profiles for a depth: by (site, metric, mask) and scheme, (layers, values)."""
        rows = predict_runs(self.chosen.runs, depth, self._configs)
        found: dict[tuple[str, str, str], dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        if rows is not None:
            for key, part in rows.groupby(["site", "metric", "mask", "scheme"]):
                line = part["layer"].to_numpy(dtype=np.int64), part["value"].to_numpy(dtype=float)
                found.setdefault((key[0], key[1], key[2]), {})[key[3]] = line
        return found

    def span(self, view: View) -> list[float]:
        """The smallest, the smallest positive and the largest value over all training steps, where there are any.

        With them an axis stays still while the step moves.
        """
        shown = [line for (name, _), line in self.lines_by_step(view).items() if name in view.schemes]
        parts = [part for line in shown for part in (line.values, line.low, line.high)]
        numbers = np.concatenate([np.empty(0), *parts])
        numbers = numbers[np.isfinite(numbers)]
        positive = numbers[numbers > 0]
        ends = [numbers.min(initial=np.inf), positive.min(initial=np.inf), numbers.max(initial=-np.inf)]
        return [float(end) for end in ends if np.isfinite(end)]

    def rate(self, view: View) -> str:
        """The learning rate of a view, in words."""
        return self._rates_in_words[view.depth] if view.rate is None else f"learning rate {view.rate:g}"

    def unlike(self, view: View) -> list[str]:
        """What the runs of a view differ in beside their learning rate, in words: precision and recipe."""
        here = self.at(view.rate)
        return [] if here.missing else here._unlike(view.depth, view.schemes)

    def _say_unlike(self, depth: int, schemes: tuple[str, ...]) -> list[str]:
        own = self.chosen.of(depth, schemes)
        return [] if own.runs.empty else [*filter(None, (own.precision(), own.recipes()))]

    def remarks(self, view: View) -> list[str]:
        """Remarks on the schemes of a view, shown or missing: one short sentence each."""
        if missing := self.at(view.rate).missing:
            return [missing]
        remarks = {scheme: self._remark(view, scheme) for scheme in view.schemes}
        return [f"{title_of(scheme)}: {remark}" for scheme, remark in remarks.items() if remark]

    def left_out(self, view: View) -> list[str]:
        """The remarks on the schemes of a view that have no line in it: those of one reason together."""
        if self.at(view.rate).missing:
            return []
        shown, found = {line.scheme for line in self.lines(view)}, dict[str, list[str]]()
        for scheme in view.schemes:
            if scheme not in shown:
                found.setdefault(self._remark(view, scheme), []).append(title_of(scheme))
        return [f"{'; '.join(titles)}: {remark}" for remark, titles in found.items()]

    def _remark(self, view: View, scheme: str) -> str:
        place, here = (scheme, view.depth), self.at(view.rate)
        if place not in here._trained:
            where = f"depth {view.depth}" if place not in self._trained else f"learning rate {view.rate:g}"
            return f"{NOT_TRAINED} at {where}"
        remark = here._said(*place)
        if (scheme, view.step) in self.lines_by_step(view):
            return remark
        return (remark + ", " if remark else "") + self._why_missing(view, scheme)

    def _why_missing(self, view: View, scheme: str) -> str:
        """Why a scheme that was trained has no line in a view."""
        own = self.lines_by_step(replace(view, relative=False, reference=None)).get((scheme, view.step))
        if own is None:
            return f"nothing measured at step {view.step}"
        if view.reference is None:
            return f"nothing relative to layer 1 at step {view.step}"
        if metric_row(view.metric).is_ratio and not (own.values > 0).any():
            return f"0 at step {view.step}, of which there is no ratio"
        return f"nothing to compare with {title_of(view.reference)} at step {view.step}"


def _over_seeds(values: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`mean_over` seeds, smallest and largest one by scheme, step and layer, and the number of seeds.

    There are no bounds for a single seed. A size of 0, which the mean of others leaves out, is the smallest.
    """
    finite = np.isfinite(values)
    seeds = finite.any(axis=3).sum(axis=1)
    mean = mean_over(values, metric_row(metric).is_ratio, axis=1)
    several = finite.any(axis=1) & (seeds > 1)[:, :, None]
    low = np.where(several, np.where(finite, values, np.inf).min(axis=1, initial=np.inf), np.nan)
    high = np.where(several, np.where(finite, values, -np.inf).max(axis=1, initial=-np.inf), np.nan)
    return mean, low, high, seeds


def _paired(values: np.ndarray, reference: int, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ratio or difference to the reference by scheme, step and layer, its interval, and the number of seeds.

    The interval is that of `normlab.analysis.verdicts.differences`.
    """
    values, undo = on_scale(values, metric_row(metric).is_ratio)
    gaps = values - values[reference]
    known = np.isfinite(gaps)
    seeds, counts = known.any(axis=3).sum(axis=1), np.where(known.any(axis=1), known.sum(axis=1), np.nan)
    variance, freedom = variance_over_seeds(gaps)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.where(known, gaps, 0.0).sum(axis=1) / counts
        half = t_quantile(LEVEL, freedom) * np.sqrt(variance / counts)
        half[reference] *= 0.0
        return undo(mean), undo(mean - half), undo(mean + half), seeds


def _relative_to_layer_one(layers: np.ndarray, values: np.ndarray) -> np.ndarray:
    first = values[..., layers == 1]
    if not first.shape[-1]:
        return np.full_like(values, np.nan)
    return values / np.where(first == 0, np.nan, first)


def shown_first(schemes: Sequence[str]) -> list[str]:
    """The schemes that an explorer opens with.

    All of eight or fewer. Of more, those tagged "short" in the registry, if there are any.
    """
    short = [name for name in schemes if name in tagged("short")]
    return short if len(schemes) > MANY and short else list(schemes)


def by_family(schemes: Sequence[str]) -> dict[str, list[str]]:
    """Schemes by family; those that are not registered come last."""
    families: dict[str, list[str]] = {}
    for name in sorted(schemes, key=lambda name: name not in SCHEMES):
        families.setdefault(SCHEMES[name].family if name in SCHEMES else "not registered", []).append(name)
    return families


def default_view(profiles: Profiles, schemes: Sequence[str] | None = None) -> View | None:
    """Block outputs after the last step, at the deepest depth at which most of the schemes were run.

    A depth with less than half as many seeds as another is none, as one that a sweep has just begun.

    A depth at which they share a learning rate is preferred, and that rate is shown. None when nothing was measured.

    Raises:
        NormlabError: a scheme that the table does not have.
    """
    if profiles.missing:
        return None
    unknown = [name for name in schemes or () if name not in profiles.schemes]
    if unknown:
        raise NormlabError(f"no run of {unknown[0]!r} in the table, which has: {', '.join(profiles.schemes)}")
    metric = profiles.metrics()[0]
    site = profiles.sites(metric)[0]
    mask = profiles.masks(metric, site)[0]
    runs = profiles.chosen.runs if schemes is None else profiles.chosen.runs.query("scheme in @schemes")
    most = whole_depths(runs[runs["depth"].isin(depths_of_most(runs))])
    with_steps = [depth for depth in profiles.depths if profiles.steps(metric, site, mask, depth)]
    with_steps = [depth for depth in with_steps if depth in most] or with_steps
    depth = ([depth for depth in with_steps if depth in profiles.shared] or with_steps)[-1]
    rate = profiles.opening_rate(depth)
    step = profiles.steps(metric, site, mask, depth, rate)[-1]
    return View(metric, site, mask, depth, step, tuple(profiles.schemes if schemes is None else schemes), rate=rate)
