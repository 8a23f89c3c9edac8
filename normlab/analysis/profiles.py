"""Layer profiles: one metric by layer at one training step, over seeds or against a reference scheme.

Profiles   an index over the long table, made once, from which a profile is read in well under a millisecond
View       what is looked at: metric, site, mask, depth, step, and whether absolute, relative or against a reference
Profile    one scheme's line, with its bounds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from normlab.analysis.selection import NothingToShow, Selection, choose, title_of
from normlab.analysis.theory import predict_runs
from normlab.analysis.verdicts import residual_variance, t_quantile
from normlab.errors import NormlabError
from normlab.probes.metrics import ALL_METRICS, metric_row, site_order

NOT_TRAINED = "not trained"
Predictions = dict[tuple[str, str, str], dict[str, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class View:
    """One look at the table.

    Args:
        metric, site, mask: what was measured, where, over which tokens.
        depth: number of blocks.
        step: optimizer steps done.
        schemes: which to show.
        relative: divide each profile by its own value at layer 1.
        reference: show every scheme against this one, paired by seed: the ratio or the difference, as the metric's row
            says.
    """

    metric: str
    site: str
    mask: str
    depth: int
    step: int
    schemes: tuple[str, ...]
    relative: bool = False
    reference: str | None = None


@dataclass(frozen=True)
class Profile:
    """One scheme's line; `low` and `high` are the extreme seeds, or the paired interval; NaN for one seed."""

    scheme: str
    layers: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


@dataclass
class Cube:
    """Values of one scheme and depth: seeds x steps x layers, NaN where nothing was measured."""

    seeds: list[int]
    steps: list[int]
    layers: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Spread:
    """t sd sqrt(2) by step and layer, sd pooled over all schemes of a depth: over sqrt(n), the half-width of the
    interval of a difference over n seeds, of logarithms for a ratio."""

    steps: list[int]
    layers: list[int]
    values: np.ndarray

    def at(self, steps: Sequence[int], layers: np.ndarray) -> np.ndarray:
        places = [self.steps.index(step) for step in steps], [self.layers.index(int(layer)) for layer in layers]
        return self.values[np.ix_(*places)]


@dataclass(frozen=True)
class Trajectory:
    """One scheme's profiles at all steps: arrays of steps x layers, the row of each step that has one, seeds a step."""

    layers: np.ndarray
    rows: dict[int, int]
    seeds: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, scheme: str, step: int) -> Profile | None:
        row = self.rows.get(step)
        if row is None:
            return None
        return Profile(scheme, self.layers, self.values[row], self.low[row], self.high[row], int(self.seeds[row]))


@dataclass
class Profiles:
    """The index. Make it from the table of `normlab.load_runs`; what it computes later it only adds, so threads may
    share it.

    Args:
        runs: the table.
        theory: rows of `normlab.analysis.theory.predict`, or None for those of the models in the table.

    Raises:
        NormlabError: something that is not such a table.
    """

    runs: pd.DataFrame
    theory: pd.DataFrame | None = None
    chosen: Selection | None = field(init=False)
    missing: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._parts: dict[Any, np.ndarray] = {}  # by (site, metric, mask)
        self._spans: dict[View, list[float]] = {}
        self._trajectories: dict[tuple[object, ...], Trajectory] = {}
        self._spreads: dict[View, Spread] = {}
        self._remarks: dict[tuple[str, int], str] = {}
        self._rates: dict[int, str] = {}
        self._theory: dict[int, Predictions] = {}
        self._cubes: dict[tuple[str, str, str], dict[tuple[str, int], Cube]] = {}
        self.chosen = None
        try:
            self.chosen = choose(self.runs, depth=None, same_rate=True)
        except NothingToShow as why:
            self.missing = str(why)
            return
        columns = ["scheme", "depth", "seed", "step", "layer", "value"]
        table = self.chosen.table[["site", "metric", "mask", *columns]]
        layered = table[table["layer"].notna()]
        if layered.empty:
            self.missing = "No layer was measured in these runs."
        self._rows = layered[columns]
        # Places of rows, not rows: a reader looks at few of some hundred combinations, and copying takes the time.
        self._parts = layered.groupby(["site", "metric", "mask"], observed=True).indices

    @property
    def schemes(self) -> list[str]:
        return self.chosen.schemes if self.chosen else []

    @property
    def depths(self) -> list[int]:
        return self.chosen.depths if self.chosen else []

    def metrics(self) -> list[str]:
        """Measured metrics, in the order of the metrics table."""
        names = {metric for _, metric, _ in self._parts}
        return [name for name in ALL_METRICS if name in names] + sorted(names - set(ALL_METRICS))

    def sites(self, metric: str) -> list[str]:
        """Sites at which a metric was measured: its default site first, then in the order of the sites table."""
        names = {site for site, name, _ in self._parts if name == metric}
        return sorted(names, key=lambda site: (site != metric_row(metric).default_site, site_order(site)))

    def masks(self, metric: str, site: str) -> list[str]:
        return sorted(mask for where, name, mask in self._parts if (where, name) == (site, metric))

    def steps(self, metric: str, site: str, mask: str, depth: int) -> list[int]:
        """Training steps at which any scheme of that depth was measured."""
        cubes = self.cubes(site, metric, mask)
        return sorted({step for (_, at), cube in cubes.items() if at == depth for step in cube.steps})

    def cubes(self, site: str, metric: str, mask: str) -> dict[tuple[str, int], Cube]:
        """All values of one metric at one site, by scheme and depth; made at the first call."""
        key = (site, metric, mask)
        if key not in self._cubes:
            places = self._parts.get(key)
            self._cubes[key] = {} if places is None else _cubes(self._rows.take(places))
        return self._cubes[key]

    def lines(self, view: View) -> list[Profile]:
        """The profiles of a view in the order of its schemes, without schemes that have none there."""
        trajectorys = ((scheme, self._trajectory(scheme, view)) for scheme in view.schemes)
        lines = (trajectory.at(scheme, view.step) for scheme, trajectory in trajectorys if trajectory is not None)
        return [line for line in lines if line is not None]

    def _trajectory(self, scheme: str, view: View) -> Trajectory | None:
        key = (scheme, view.site, view.metric, view.mask, view.depth, view.relative, view.reference)
        if key not in self._trajectories:
            cubes = self.cubes(view.site, view.metric, view.mask)
            cube, reference = cubes.get((scheme, view.depth)), None
            if view.reference is not None:
                reference = cubes.get((view.reference, view.depth))
            if cube is None or (view.reference is not None and reference is None):
                return None
            made = _paired(cube, reference, self.spread(view), view) if reference else _over_seeds(cube, view)
            self._trajectories[key] = made
        return self._trajectories[key]

    def spread(self, view: View) -> Spread:
        """What seeds move schemes by, beside what they move all schemes by, at the view's depth."""
        key = replace(view, step=0, schemes=(), reference=None)
        if key not in self._spreads:
            self._spreads[key] = _pooled(self.cubes(view.site, view.metric, view.mask), view)
        return self._spreads[key]

    def predicted(self, view: View) -> list[Profile]:
        """What theory says of a view before training: a line a scheme that it says something of, without bounds.

        Metrics of activations and of the variance recursion's depth only (`normlab.analysis.theory.predict`); against a
        reference, the ratio or difference of the two predictions.
        """
        predictions = self._predictions(view.depth).get((view.site, view.metric, view.mask), {})
        base = predictions.get(view.reference) if view.reference is not None else None
        found = []
        for scheme in view.schemes:
            if scheme not in predictions or (view.reference is not None and base is None):
                continue
            layers, values = predictions[scheme]
            if view.relative:
                first = values[layers == 1]
                values = values / first if first.size else np.full_like(values, np.nan)
            if base is not None:
                values = values / base[1] if metric_row(view.metric).is_ratio else values - base[1]
            nothing = np.full_like(values, np.nan)
            found.append(Profile(scheme, layers, values, nothing, nothing, 0))
        return found

    def _predictions(self, depth: int) -> Predictions:
        """Theory's profiles for a depth: by (site, metric, mask) and scheme, (layers, values)."""
        if depth not in self._theory:
            rows = self.theory
            if rows is None and self.chosen:
                rows = predict_runs(self.chosen.runs, depth, self.runs.attrs.get("configs", {}))
            found: Predictions = {}
            if rows is not None and len(rows):
                for key, part in rows[rows["depth"] == depth].groupby(["site", "metric", "mask", "scheme"]):
                    line = part["layer"].to_numpy(dtype=np.int64), part["value"].to_numpy(dtype=float)
                    found.setdefault((key[0], key[1], key[2]), {})[key[3]] = line
            self._theory[depth] = found
        return self._theory[depth]

    def span(self, view: View) -> list[float]:
        """Smallest and largest value over all training steps, so that an axis stays still while steps go by."""
        key = replace(view, step=0)
        if key not in self._spans:
            drawn = [found for scheme in view.schemes if (found := self._trajectory(scheme, view))]
            parts = (part.ravel() for one in drawn for part in (one.values, one.low, one.high))
            numbers = np.concatenate([np.empty(0), *parts])
            numbers = numbers[np.isfinite(numbers)]
            if metric_row(view.metric).log:
                numbers = numbers[numbers > 0]
            self._spans[key] = [float(numbers.min()), float(numbers.max())] if numbers.size else []
        return self._spans[key]

    def rate(self, depth: int) -> str:
        """The learning rate at a depth, in words: sizes of schemes at different rates are not to be compared."""
        if depth not in self._rates and self.chosen is not None:
            self._rates[depth] = self.chosen.rate(depth)
        return self._rates.get(depth, "")

    def remarks(self, view: View) -> list[str]:
        """What a reader must know of what is and is not shown: one short sentence each."""
        if self.chosen is None:
            return [self.missing]
        found = []
        shown = {line.scheme for line in self.lines(view)}
        for scheme in view.schemes:
            remark = self._remark(scheme, view.depth)
            if scheme not in shown and not remark.startswith(NOT_TRAINED):
                remark = (remark + ", " if remark else "") + f"nothing measured at step {view.step}"
            if remark:
                found.append(f"{title_of(scheme)}: {remark}")
        return found

    def _remark(self, scheme: str, depth: int) -> str:
        """What is to be said of a scheme's runs of a depth at any step."""
        assert self.chosen is not None
        key = (scheme, depth)
        if key not in self._remarks:
            runs = self.chosen.runs
            known = ((runs["scheme"] == scheme) & (runs["depth"] == depth)).any()
            self._remarks[key] = self.chosen.remark(scheme, depth) if known else f"{NOT_TRAINED} at depth {depth}"
        return self._remarks[key]


def _cubes(rows: pd.DataFrame) -> dict[tuple[str, int], Cube]:
    cubes = {}
    for key, part in rows.groupby(["scheme", "depth"], observed=True):
        seeds, steps, layers = (sorted(int(v) for v in part[name].unique()) for name in ("seed", "step", "layer"))
        values = np.full((len(seeds), len(steps), len(layers)), np.nan)
        places = [
            np.searchsorted(known, part[name].to_numpy(dtype=np.int64))
            for name, known in (("seed", seeds), ("step", steps), ("layer", layers))
        ]
        values[tuple(places)] = part["value"].to_numpy(dtype=float)
        cubes[str(key[0]), int(key[1])] = Cube(seeds, steps, np.array(layers), values)
    return cubes


def _over_seeds(cube: Cube, view: View) -> Trajectory:
    """Mean (geometric for sizes) and extreme seeds at every step; no bounds where there is one seed."""
    values = _by_seed(cube, view.relative)
    finite = np.isfinite(values)
    seeds, filled = finite.any(axis=2).sum(axis=0), finite.sum(axis=0)
    there, undo = _on_scale(values, view.metric)
    with np.errstate(invalid="ignore"):
        mean = undo(np.where(finite, there, 0.0).sum(axis=0) / np.where(filled, filled, np.nan))
    several = (filled > 0) & (seeds > 1)[:, None]
    low = np.where(several, np.where(finite, values, np.inf).min(axis=0), np.nan)
    high = np.where(several, np.where(finite, values, -np.inf).max(axis=0), np.nan)
    return Trajectory(
        cube.layers, {step: row for row, step in enumerate(cube.steps) if seeds[row]}, seeds, mean, low, high
    )


def _paired(cube: Cube, reference: Cube, spread: Spread, view: View) -> Trajectory:
    """Ratio or difference (as the metric's row says) to the reference, over the seeds that both have, at every step,
    with the interval of the spread that is pooled over all schemes."""
    steps = [step for step in cube.steps if step in reference.steps]
    seeds = [seed for seed in cube.seeds if seed in reference.seeds]
    if len(cube.layers) != len(reference.layers):
        steps = []
    if not steps:
        nothing = np.empty((0, len(cube.layers)))
        return Trajectory(cube.layers, {}, np.empty(0, dtype=int), nothing, nothing, nothing)
    left, right = (
        _by_seed(one, view.relative)[np.ix_([one.seeds.index(s) for s in seeds], [one.steps.index(s) for s in steps])]
        for one in (cube, reference)
    )
    both = np.isfinite(left).any(axis=2) & np.isfinite(right).any(axis=2)
    (left, undo), (right, _) = (_on_scale(side, view.metric) for side in (left, right))
    with np.errstate(invalid="ignore"):
        gaps = left - right
    counts = both.sum(axis=0)
    mean = np.full(gaps.shape[1:], np.nan)
    for place in np.flatnonzero(counts):
        mean[place] = gaps[both[:, place], place].mean(axis=0)
    half = spread.at(steps, cube.layers) / np.sqrt(np.where(counts, counts, np.nan))[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        lines = undo(mean), undo(mean - half), undo(mean + half)
    return Trajectory(cube.layers, {step: row for row, step in enumerate(steps) if counts[row]}, counts, *lines)


def _pooled(cubes: Mapping[tuple[str, int], Cube], view: View, level: float = 0.95) -> Spread:
    """From all schemes of the view's depth."""
    own = [cube for (_, depth), cube in cubes.items() if depth == view.depth]
    steps, seeds, layers = (
        sorted({int(value) for cube in own for value in getattr(cube, name)}) for name in ("steps", "seeds", "layers")
    )
    if not own:
        return Spread([], [], np.empty((0, 0)))
    values = np.full((len(own), len(seeds), len(steps), len(layers)), np.nan)
    for place, cube in enumerate(own):
        where = [
            [known.index(value) for value in part]
            for known, part in ((seeds, cube.seeds), (steps, cube.steps), (layers, cube.layers.tolist()))
        ]
        values[np.ix_([place], *where)] = _on_scale(_by_seed(cube, view.relative), view.metric)[0]
    variance, freedom = residual_variance(values)
    return Spread(steps, layers, t_quantile(level, freedom) * np.sqrt(2 * variance))


def _on_scale(values: np.ndarray, metric: str) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Values as they are averaged and compared, and the way back: logarithms of sizes, others as they are."""
    if not metric_row(metric).is_ratio:
        return values, np.asarray
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values), np.exp


def _by_seed(cube: Cube, relative: bool) -> np.ndarray:
    """Values (seeds, steps, layers), NaN where they are not finite; `relative`: divided by the value at layer 1."""
    values = np.where(np.isfinite(cube.values), cube.values, np.nan)
    if not relative:
        return values
    first = values[:, :, cube.layers == 1]
    return values / np.where(first == 0, np.nan, first) if first.shape[2] else np.full_like(values, np.nan)


def default_view(profiles: Profiles, schemes: Sequence[str] | None = None) -> View | None:
    """Block outputs after the last step, at the deepest depth at which schemes share a learning rate (the deepest of
    all if they share none); None when nothing was measured.

    Raises:
        NormlabError: a scheme that the table does not have.
    """
    if profiles.chosen is None or profiles.missing:
        return None
    unknown = [name for name in schemes or () if name not in profiles.schemes]
    if unknown:
        raise NormlabError(f"no run of {unknown[0]!r} in the table, which has: {', '.join(profiles.schemes)}")
    metric = profiles.metrics()[0]
    site = profiles.sites(metric)[0]
    mask = profiles.masks(metric, site)[0]
    with_steps = [depth for depth in profiles.depths if profiles.steps(metric, site, mask, depth)]
    rates = profiles.chosen.runs.groupby("depth")["lr"].nunique()
    depth = ([depth for depth in with_steps if rates[depth] == 1] or with_steps)[-1]
    step = profiles.steps(metric, site, mask, depth)[-1]
    return View(metric, site, mask, depth, step, tuple(profiles.schemes if schemes is None else schemes))
