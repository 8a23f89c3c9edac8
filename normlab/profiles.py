"""Layer profiles: one metric by layer at one training step, over seeds or against a reference scheme.

Profiles   an index over the long table, made once, from which a profile is read in well under a millisecond
View       what is looked at: metric, site, mask, depth, step, and how it is put (absolute, relative, against a
reference) Profile    one scheme's line: layers, values, lower and upper bound
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from normlab.compare import t_quantile
from normlab.errors import NormlabError
from normlab.labels import METRICS, metric_row
from normlab.selection import Selection, choose, title_of


@dataclass(frozen=True)
class View:
    """One look at the table.

    Args:
        metric, site, mask: what was measured, where, over which tokens.
        depth: number of blocks.
        step: optimizer steps done.
        schemes: which to show.
        relative: divide each profile by its own value at layer 1.
        reference: show every scheme against this one, paired by seed: the ratio of metrics that span decades, else the
            difference.
        level: confidence level of the interval against a reference.
    """

    metric: str
    site: str
    mask: str
    depth: int
    step: int
    schemes: tuple[str, ...]
    relative: bool = False
    reference: str | None = None
    level: float = 0.95


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


@dataclass
class Profiles:
    """The index. Make it from the table of `normlab.load_runs`; it is read-only afterwards, so threads may share it.

    Raises:
        NormlabError: something that is not such a table.
    """

    runs: pd.DataFrame
    chosen: Selection | None = field(init=False)
    missing: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._spans: dict[View, list[float]] = {}
        found = choose(self.runs, depth=None, same_rate=True)
        self.chosen = found if isinstance(found, Selection) else None
        if self.chosen is None:
            self.missing = str(found)
            self._parts: dict[tuple[str, str, str], pd.DataFrame] = {}
            return
        layered = self.chosen.table[self.chosen.table["layer"].notna()]
        if layered.empty:
            self.missing = "No layer was measured in these runs."
        columns = ["scheme", "depth", "seed", "step", "layer", "value"]
        self._parts = {
            (str(key[0]), str(key[1]), str(key[2])): rows[columns]
            for key, rows in layered.groupby(["site", "metric", "mask"], observed=True)
        }
        self._cubes: dict[tuple[str, str, str], dict[tuple[str, int], Cube]] = {}

    @property
    def schemes(self) -> list[str]:
        return self.chosen.schemes if self.chosen else []

    @property
    def depths(self) -> list[int]:
        return self.chosen.depths if self.chosen else []

    def metrics(self) -> list[str]:
        """Measured metrics, in the order of the metrics table."""
        names = {metric for _, metric, _ in self._parts}
        return [name for name in METRICS if name in names] + sorted(names - set(METRICS))

    def sites(self, metric: str) -> list[str]:
        """Sites at which a metric was measured: block outputs first."""
        names = sorted({site for site, name, _ in self._parts if name == metric})
        return sorted(names, key=lambda site: not site.startswith("block"))

    def masks(self, metric: str, site: str) -> list[str]:
        return sorted({mask for where, name, mask in self._parts if (where, name) == (site, metric)})

    def steps(self, metric: str, site: str, mask: str, depth: int) -> list[int]:
        """Training steps at which any scheme of that depth was measured."""
        cubes = self.cubes(site, metric, mask)
        return sorted({step for (_, at), cube in cubes.items() if at == depth for step in cube.steps})

    def cubes(self, site: str, metric: str, mask: str) -> dict[tuple[str, int], Cube]:
        """All values of one metric at one site, by scheme and depth; made at the first call."""
        key = (site, metric, mask)
        if key not in self._cubes:
            rows = self._parts.get(key)
            self._cubes[key] = {} if rows is None else _cubes(rows)
        return self._cubes[key]

    def lines(self, view: View) -> list[Profile]:
        """The profiles of a view in the order of its schemes, without schemes that have none there."""
        cubes = self.cubes(view.site, view.metric, view.mask)
        reference = cubes.get((view.reference, view.depth)) if view.reference is not None else None
        if view.reference is not None and reference is None:
            return []
        found = []
        for scheme in view.schemes:
            cube = cubes.get((scheme, view.depth))
            line = None if cube is None else _line(scheme, cube, view, reference)
            if line is not None:
                found.append(line)
        return found

    def span(self, view: View) -> list[float]:
        """Smallest and largest value over all training steps, so that an axis stays still while steps go by."""
        key = _at(view, 0)
        if key not in self._spans:
            self._spans[key] = self._span(view)
        return self._spans[key]

    def _span(self, view: View) -> list[float]:
        ends: list[float] = []
        for step in self.steps(view.metric, view.site, view.mask, view.depth):
            for line in self.lines(_at(view, step)):
                numbers = np.concatenate([line.values, line.low, line.high])
                numbers = numbers[np.isfinite(numbers)]
                if metric_row(view.metric).log:
                    numbers = numbers[numbers > 0]
                if numbers.size:
                    ends += [float(numbers.min()), float(numbers.max())]
        return [min(ends), max(ends)] if ends else []

    def remarks(self, view: View) -> list[str]:
        """What a reader must know of what is and is not shown: one short sentence each."""
        if self.chosen is None:
            return [self.missing]
        said = []
        shown = {line.scheme for line in self.lines(view)}
        for scheme in view.schemes:
            remark = self.chosen.remark(scheme, view.depth)
            known = ((self.chosen.runs["scheme"] == scheme) & (self.chosen.runs["depth"] == view.depth)).any()
            if not known:
                remark = f"not trained at depth {view.depth}"
            elif scheme not in shown:
                remark = (remark + ", " if remark else "") + f"nothing measured at step {view.step}"
            if remark:
                said.append(f"{title_of(scheme)}: {remark}")
        return said


def _at(view: View, step: int) -> View:
    return View(**{**view.__dict__, "step": step})


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


def _line(scheme: str, cube: Cube, view: View, reference: Cube | None) -> Profile | None:
    own = _seeds_at(cube, view)
    if reference is not None:
        base = _seeds_at(reference, view)
        both = [seed for seed in own if seed in base]
        if not both or len(cube.layers) != len(reference.layers):
            return None
        gaps, log = [], metric_row(view.metric).log
        for seed in both:
            with np.errstate(divide="ignore", invalid="ignore"):
                gaps.append(np.log(own[seed] / base[seed]) if log else own[seed] - base[seed])
        middle, low, high = _intervals(np.stack(gaps), view.level)
        if log:
            middle, low, high = np.exp(middle), np.exp(low), np.exp(high)
        return Profile(scheme, cube.layers, middle, low, high, len(both))
    if not own:
        return None
    values = np.stack(list(own.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a layer at which all seeds are NaN stays NaN
        mean, low, high = np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    if len(own) == 1:
        low = high = np.full_like(mean, np.nan)
    return Profile(scheme, cube.layers, mean, low, high, len(own))


def _seeds_at(cube: Cube, view: View) -> dict[int, np.ndarray]:
    """Each seed's profile at the view's step; a seed with no finite value there is left out."""
    if view.step not in cube.steps:
        return {}
    found = {}
    for seed, values in zip(cube.seeds, cube.values[:, cube.steps.index(view.step)], strict=True):
        values = np.where(np.isfinite(values), values, np.nan)
        if view.relative:
            first = values[cube.layers == 1]
            values = values / first if first.size and first[0] else np.full_like(values, np.nan)
        if np.isfinite(values).any():
            found[seed] = values
    return found


def _intervals(gaps: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Student's t interval of every column."""
    count = len(gaps)
    mean = gaps.mean(axis=0)
    if count == 1:
        return mean, np.full_like(mean, math.nan), np.full_like(mean, math.nan)
    half = t_quantile(level, count - 1) * gaps.std(axis=0, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def default_view(profiles: Profiles, schemes: Sequence[str] | None = None) -> View | None:
    """Block outputs of the deepest trained depth after the last step; None when nothing was measured.

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
    depth = with_steps[-1]
    step = profiles.steps(metric, site, mask, depth)[-1]
    return View(metric, site, mask, depth, step, tuple(schemes or profiles.schemes))
