"""Layer statistics in any training loop, and which layer left its past first."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.files import whole_file
from normlab.probes.block_trace import KnownBlock
from normlab.probes.call_inputs import CallInputs, LossTokens, TokenMask
from normlab.probes.call_tokens import NO_FIRST, PADDING_BY, PART_OF_ROW, TOKENS_OF
from normlab.probes.layer_stats import COLUMNS as LAYER_COLUMNS
from normlab.probes.metrics import SITES, metric_row, resolve_metrics, site_label
from normlab.probes.record import GRADIENTS, IDLE, STREAM_AFTER, Recorder, record
from normlab.probes.returned_loss import unsettled
from normlab.probes.sites import Sites, sites
from normlab.probes.statistics import real_numbers, whole
from normlab.probes.updates import METRICS as UPDATES
from normlab.probes.updates import Updates

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

Row = tuple[Any, ...]  # step, site, layer, metric, mask, value
DEFAULT = ("token_l2_mean", "feature_var_mean", "rms", "max_abs", "grad_l2_mean")
COLUMNS = ["step", *LAYER_COLUMNS]
KEEP = 64  # readings
RECENT = 32  # readings before a spike in which its origin is sought
PAST = 6  # readings whose median a reading is compared with
LEAST = 8  # such comparisons before one can be judged
SCARCE = 24  # n comparisons widen the noise by 1 + SCARCE / n
FLOOR = 0.025  # of the logarithm of a ratio: a change of 2.5% is none, however calm the past
DEPARTS, JUMPS = 6.0, 12.0  # |z| of two readings in a row, and of one
# A block's sites in the order of computation.
PLACES = (
    "block_in", "attn_norm_in", "attn", "mixer_norm_in", "mixer", "cross_norm_in", "cross", "mlp_norm_in", "mlp",
    "block", "block_out", "final_norm_in",
)  # fmt: skip
# What is told of `absent`: what is left out of all blocks, and what makes numbers others than their names say.
LEFT_OUT = {
    GRADIENTS: "gradients of a forward pass", "weights": "weights", "updates": "updates",
    "update_ratio": "update ratios",
}  # fmt: skip
OTHER_WEIGHTS = "the model runs on others than its own (torch.func.functional_call)"
MISLEADING = (PADDING_BY, TOKENS_OF, NO_FIRST, PART_OF_ROW, STREAM_AFTER, IDLE)


class LossSpikes:
    """Scores a loss in standard deviations above the mean of the last `window` ones; `threshold` is a spike."""

    def __init__(self, window: int = 100, threshold: float = 4.0, least: int = 20):
        self.threshold, self._least = threshold, least
        self._recent: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float:
        """Score a loss, then remember it: inf if not finite, 0 while fewer than `least` losses are known."""
        if not math.isfinite(loss):
            return math.inf
        known, score = list(self._recent), 0.0
        if len(known) >= self._least:
            mean = sum(known) / len(known)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known))
            score = (loss - mean) / max(deviation, 1e-8 * abs(mean) + 1e-12)
        self._recent.append(loss)
        return score


@dataclass
class Explanation:
    """The sites that left their own past. `table` has one row per site, layer and metric, the first to leave in front.

    Columns: step, site, layer, metric, value, z, of the step at which it leaves. Adam's updates and moments, where they
    are read, follow the others: the verdict names them after the layer that left first, which they do not decide.
    """

    verdict: str
    table: pandas.DataFrame
    history: pandas.DataFrame

    def __str__(self) -> str:
        return self.verdict

    def plot(self, metric: str | None = None) -> plotly.graph_objects.Figure:
        """Draw layers x steps of the readings kept, of `metric` or of the one that left first."""
        if not len(self.history):
            raise NormlabError("nothing was read yet: there is nothing to draw")
        if metric is None:
            metric = self.table["metric"].iloc[0] if len(self.table) else self.history["metric"].iloc[0]
        rows = self.history[(self.history["metric"] == metric) & self.history["layer"].notna()]
        if rows.empty:
            raise NormlabError(
                f"{metric!r} was not read: choose from {', '.join(dict.fromkeys(self.history['metric']))}"
            )
        site = rows["site"].iloc[0]
        first = self.table[self.table["metric"] == metric]
        if len(first):
            site = first["site"].iloc[0]
        try:  # figures are a floor above probes, so they are found by name
            draw = importlib.import_module("normlab.figures.report").recorded_map
        except ImportError as error:
            raise NormlabError("plots need plotly: pip install 'normlab[figures]'") from error
        figure: plotly.graph_objects.Figure = draw(rows[rows["site"] == site], "step", metric, site)
        return figure


class Readings:
    """Everything measured so far, and the last `keep` readings to explain from.

    path: a CSV file of the last readings, written anew after each. It is there when the process dies.
    """

    def __init__(self, keep: int = KEEP, path: Path | None = None) -> None:
        self._tables: list[pandas.DataFrame] = []
        self._last: deque[pandas.DataFrame] = deque(maxlen=keep)
        self._path = path
        self._absent: dict[str, tuple[int, str]] = {}

    @property
    def absent(self) -> dict[str, str]:
        """What could not be measured at some step, and why."""
        return {place: why for place, (_, why) in self._absent.items()}

    def add_absent(self, step: int, absent: Mapping[str, str]) -> None:
        """Add what could not be measured at a step."""
        for place, why in absent.items():
            self._absent.setdefault(place, (step, why))

    def add(self, table: pandas.DataFrame) -> None:
        """Add the table of one measured step."""
        self._tables.append(table)
        self._last.append(table.loc[table["mask"] == "all", COLUMNS])
        if self._path is not None:
            with whole_file(self._path) as staged:  # every rank writes it
                _joined(self._last).to_csv(staged, index=False)

    def forget(self, since: int) -> None:
        """Drop what was read at step `since` and later."""
        for tables in (self._tables, self._last):
            kept = [rows for table in tables if len(rows := table[table["step"] < since])]
            tables.clear()
            tables.extend(kept)
        self._absent = {place: (step, why) for place, (step, why) in self._absent.items() if step < since}

    def resume(self, path: Path, step: int) -> None:
        """Take the steps before `step` from a table that an earlier process wrote (Parquet), if there is one.

        Raises:
            NormlabError: the file is no such table.
        """
        import pandas
        import pyarrow

        if not path.exists():
            return
        try:
            table = pandas.read_parquet(path)[COLUMNS]
            table = table[table["step"] < step]
        except (OSError, KeyError, TypeError, pyarrow.ArrowException) as error:
            raise NormlabError(
                f"path is {path}, which is no table of the training that resumes: move it away, or give another path "
                f"({type(error).__name__})"
            ) from error
        if len(table):
            self._tables.append(table)
            layers = table[(table["mask"] == "all") & table["layer"].notna()]
            self._last.extend(rows for _, rows in layers.groupby("step"))

    def add_rows(self, step: int, site: Sequence[str], metric: str, value: Sequence[float]) -> None:
        """Add values that have no layer, to the table alone."""
        import pandas

        row = {"step": step, "site": list(site), "layer": pandas.NA, "metric": metric, "mask": "all"}
        self._tables.append(pandas.DataFrame({**row, "value": list(value)}).astype({"layer": "Int64"}))

    def to_pandas(self) -> pandas.DataFrame:
        """Everything measured so far: step, site, layer, metric, mask, value."""
        return _joined(self._tables)

    def explain(self, since: int = 0) -> Explanation:
        """Rank the sites by when, and how far, they left their own past at step `since` or later.

        The stream's sizes are taken relative to what enters the block, gradients to what enters it from above. So a
        block that only passes a change on is not named. Sizes of weights are taken relative to the median block. Of the
        logarithm x of that ratio

            d = x - median of the 6 readings before
            s = 1.4826 median |d| (1 + 24 / n), over the n readings before
            z = d / (s + 0.025)

        A series leaves where |z| is above 6 in two readings in a row, with one sign, or above 12 in one. At least 8
        values of d must be known. A value that is not finite leaves at once, unless the series begins so and is finite
        later. Of the sites that leave at one step the largest |z| is named, of equal ones the first in forward order.
        Metrics of branches are compared as they are. Adam's updates and moments are judged by the same rule and named
        besides: they do not decide which layer left first.

        How often it is right: "How often it names the right layer" in docs/spikes.md.
        """
        import pandas

        history = _joined(self._last)
        is_update = history["metric"].isin(UPDATES)
        table, moved = (_departures(rows, since) for rows in (history[~is_update], history[is_update]))
        if not len(history):
            return Explanation("nothing was read yet", table, history)
        if len(table):
            first = table.iloc[0]
            words = f"layer {first['layer']}, {site_label(first['site'])} left its past first, {_departure(first)}"
        else:
            steps = history["step"].unique()
            words = f"no site left its past in {len(steps)} readings, steps {steps.min()} to {steps.max()}"
        if not len(moved):
            return Explanation(words, table, history)
        words += f"; of Adam's updates those of layer {moved.iloc[0]['layer']} did first, {_departure(moved.iloc[0])}"
        return Explanation(words, pandas.concat([table, moved] if len(table) else [moved], ignore_index=True), history)


def _departure(row: pandas.Series) -> str:
    """When and how far a site left its past."""
    size = "is not finite" if not math.isfinite(row["value"]) else f"{row['z']:+.0f} robust deviations"
    return f"at step {row['step']} ({row['metric']}: {size})"


def _joined(tables: Iterable[pandas.DataFrame]) -> pandas.DataFrame:
    import pandas

    kept = list(tables)
    return pandas.concat(kept, ignore_index=True) if kept else pandas.DataFrame(columns=COLUMNS)


def _departures(history: pandas.DataFrame, since: int) -> pandas.DataFrame:
    """The first departure of each series from a step on, in order of step and size."""
    import pandas

    columns = ["step", "site", "layer", "metric", "value", "z"]
    if history.empty:
        return pandas.DataFrame(columns=columns)
    finite = history["value"].where(np.isfinite(history["value"].astype(float)), math.inf)
    values = history.assign(value=finite).pivot_table(
        index="step", columns=["metric", "site", "layer"], values="value", aggfunc="last"
    )
    series = _series(values)
    values = values[series.columns]
    undefined = np.isinf(values)
    is_finite = ~undefined & values.notna()
    # What is finite later, and was not before, is not defined yet: the cosine of a matrix of zeros.
    begins = undefined & (is_finite.cumsum() == 0) & is_finite.any()
    z = _scores(series).mask(undefined & ~begins, math.inf)
    in_a_row = (z.abs() > DEPARTS) & (z.shift().abs() > DEPARTS) & (z * z.shift() > 0)
    leaves = (in_a_row | (z.abs() > JUMPS))[z.index >= since]
    rows = [
        (step, site, layer, metric, *(table.loc[step, (metric, site, layer)] for table in (values, z)))
        for (metric, site, layer), step in leaves.loc[:, leaves.any()].idxmax().items()
    ]
    table = pandas.DataFrame(rows, columns=columns)
    return table.sort_values(["step", "z"], key=lambda x: -x.abs() if x.name == "z" else x, ignore_index=True)


def _series(values: pandas.DataFrame) -> pandas.DataFrame:
    """Columns to compare with their past: those of the stream in the order of computation, gradients, weights."""
    import pandas

    def order(column: tuple[str, str, int]) -> tuple[int, int, int]:
        _, site, layer = column
        if site not in SITES:
            return 2, layer, 0
        backward = SITES[site].takes == "gradient"
        return backward, -layer if backward else layer, PLACES.index(SITES[site].of or site) * (-1) ** backward

    sizes = values.where(np.isfinite(values))[sorted(values, key=order)]
    is_ratio = [metric_row(name).is_ratio for name in sizes.columns.get_level_values("metric")]
    sizes[:] = np.where(is_ratio, np.log(sizes.abs().where(sizes != 0)), sizes)
    blocks = sizes.T.groupby(level=["metric", "site"])
    median = blocks.transform("median").where(blocks.transform("count") > 2).T
    series = {}
    for column in sizes:
        metric, site, layer = column
        kind, given = metric_row(metric).kind, []
        if kind == "activation":
            given = [(metric, "block_out", layer - (site != "final_norm_in"))]
        elif kind == "gradient" and site != "final_norm_in_grad":
            given = [(metric, "block_in_grad", layer + 1), (metric, "final_norm_in_grad", layer)]
        relative_to = [sizes[place] for place in given if place in sizes] or [0.0]
        series[column] = sizes[column] - (relative_to[0] if site in SITES else median[column])
    return pandas.concat(series, axis=1, names=values.columns.names)


def _scores(series: pandas.DataFrame) -> pandas.DataFrame:
    """z of each reading against those before it; NaN while too few are known."""
    off = series - series.rolling(PAST, min_periods=4).median().shift()
    before = off.abs().rolling(KEEP, min_periods=LEAST)
    noise = 1.4826 * before.median().shift() * (1 + SCARCE / before.count().shift())
    return off / (noise + FLOOR)


def _weights(where: Sites, step: int) -> tuple[list[Row], str | None]:
    """`parameter_rms` in each block, and why weights are left out if some are.

    Of modules that are alike, as experts, it is their mean, and their number in the name is a star.
    """
    found, without = defaultdict[tuple[str, int], list[float]](list), None
    for block in where.blocks:
        starred = _starred(block.module)
        # By their paths: some wrappers' own `named_parameters` gives other names.
        for name, parameter in nn.Module.named_parameters(block.module):
            path, _, own = name.rpartition(".")
            weight = _stored(block.module.get_submodule(path), own, parameter)
            if weight.is_meta:
                without = f"{block.name}.{name} is on the meta device, where tensors have no values"
            elif (weight.is_floating_point() or weight.is_complex()) and weight.numel():
                site = f"{starred[path]}.{own}".removeprefix(".")
                try:
                    rms = _rms(weight.detach())
                except Exception as error:  # training goes on
                    without = f"{block.name}.{name} has no norm ({type(error).__name__})"
                    continue
                found[site, block.layer].append(rms)
    rows = [(step, site, layer, "parameter_rms", "all", sum(x) / len(x)) for (site, layer), x in found.items()]
    return rows, without


def _rms(weight: Tensor) -> float:
    """The root mean square of a weight's numbers, of which a complex one is two."""
    numbers = real_numbers(weight)
    numbers = numbers.float() if numbers.itemsize == 1 else numbers  # of float8 PyTorch has no norm
    dtype = torch.float64 if numbers.dtype == torch.float64 else torch.float32  # PyTorch does not narrow
    norm = torch.linalg.vector_norm(numbers, dtype=dtype)
    return whole(norm).item() / numbers.numel() ** 0.5


def _starred(block: nn.Module) -> dict[str, str]:
    """The names of a block's modules, by those names without a star: one for each number of a list of modules alike.

    Alike are modules of one class whose parameters have the same names and shapes. Those of an `nn.Sequential` run one
    after the other, and are none.
    """
    names = {"": ""}
    for path, module in block.named_modules(remove_duplicate=False):
        children = dict(module.named_children())
        kinds = {(type(m), tuple((name, p.shape) for name, p in m.named_parameters())) for m in children.values()}
        is_list = not isinstance(module, nn.Sequential) and all(name.isdecimal() for name in children)
        are_alike = is_list and len(children) > 1 and len(kinds) == 1
        hidden = _hidden(module)
        for name in module._modules:
            place, own = f"{path}.{name}", "*" if are_alike else name
            names[place.removeprefix(".")] = ".".join(filter(None, [names[path], "" if name in hidden else own]))
    return names


def _hidden(module: nn.Module) -> set[str]:
    """The children that a module leaves out of its parameters' names, as PyTorch's activation checkpoint wrapper."""
    if type(module).named_parameters is nn.Module.named_parameters:
        return set()
    return module._modules.keys() - {name.partition(".")[0] for name, _ in module.named_parameters()}


def _stored(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """A parameter, or what accelerate keeps of it where it is offloaded."""
    stored = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    return stored[name] if parameter.is_meta and stored is not None else parameter


def observe(
    model: nn.Module,
    every: int = 50,
    metrics: Sequence[str] = DEFAULT,
    *,
    start: int = 0,
    blocks: str | None = None,
    loss_tokens: LossTokens = None,
    accumulate: int = 1,
    scaler: Any = None,
    group: Any = None,
    path: str | Path | None = None,
    mask: TokenMask = None,
    optimizer: Any = None,
) -> Observer:
    """Measure the layers of `model` in a training loop: two calls.

        observer = normlab.observe(model, every=50)
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            observer.step(loss, step)
        observer.to_pandas()        # step, site, layer, metric, mask, value
        print(observer.explain())   # layer 3, block output left its past first, at step 150 (...)
        observer.close()            # removes the hooks; `with normlab.observe(model) as observer:` does it too

    All micro-batches of a measured step are merged, over ranks too. Gradients are of the summed token loss. A measured
    step runs uncompiled. Gradients of a loss that does not tell over how many labels it averages are left out, with a
    warning. Once a step was measured, a later one that cannot be is left out with a warning, such as one without a
    backward pass.

    `observer.absent` says what could not be measured at some step and why, as `manifest["absent"]` of a recording does.
    What makes a number another than its name says is a warning too, one for all blocks and steps: padding that counts,
    tokens that are not told, another stream than the block's output.

    Args:
        model: any model that `record` measures; wrappers are looked through.
        every: optimizer steps between measurements: those whose number it divides are measured.
        metrics: names from `METRICS`. `parameter_rms` of the blocks' parameters, after the step, is read besides.
        start: number of the first step.
        blocks: which modules are the blocks, if structure does not show them (see `sites`).
        loss_tokens: how many labels the loss averages over; default: counted, where the model returns a loss and
            logits. A loop that computes the loss itself gives it, or leaves out gradient metrics.
        accumulate: with `loss_tokens`, by how many the loss is divided before `backward`. What a loss that the model
            returns is multiplied or divided by is seen.
        scaler: with `loss_tokens`, a `torch.amp.GradScaler`, whose scale is undone.
        group: process group of the ranks that see different tokens; default: all ranks. With tensor parallelism give
            the data-parallel group, since its ranks see the same tokens; not where sequence parallelism splits rows.
        path: a CSV file of the last readings, written anew after each. It is there when the process dies.
        mask: what masks padding, as for `record`.
        optimizer: Adam or AdamW, whose updates and moments are read too, by block: `update_ratio`, `first_moment`,
            `second_moment` (`normlab.probes.updates`). Adam's weight decay is in them, as part of its gradient;
            decoupled decay, as AdamW's, is not. They are of the step as it was taken, whether a scheduler steps before
            `observer.step` or after it. Of another optimizer they are left out, with a warning, and of blocks of which
            another one trains a part, as Muon the matrices.

    Raises:
        NormlabError: `every` or `accumulate` is not a whole number from 1; an unknown metric; no folder for `path`.
    """
    given: Any = loss_tokens

    def summed(inputs: CallInputs) -> Any:
        """Factor from the gradient that arrives to the summed loss's, of a loss whose labels the caller knows."""
        tokens = given(inputs) if callable(given) else given
        scale = 1.0 if scaler is None else scaler.get_scale()
        return None if tokens is None else tokens * accumulate / scale

    if not isinstance(accumulate, int) or accumulate < 1:
        raise NormlabError(f"accumulate is {accumulate!r}: give a whole number from 1")
    require_folder(path)
    readings = Readings(path=None if path is None else Path(path))
    factor = None if given is None else summed
    observer = Observer(sites(model, blocks, mask=mask), every, metrics, factor, readings, group, optimizer)
    observer.begin(start)
    return observer


class Observer:
    """Layer statistics of a training loop; made by `observe`. `spike` explains the last spike of the loss."""

    spike: Explanation | None = None

    @property
    def absent(self) -> dict[str, str]:
        """What could not be measured at some step, and why: as `manifest["absent"]` of a recording."""
        return self.readings.absent

    def __init__(
        self,
        where: Sites,
        every: int,
        metrics: Sequence[str],
        loss_tokens: LossTokens,
        readings: Readings,
        group: Any = None,
        optimizer: Any = None,
    ) -> None:
        require_every(every)
        self.sites, self.readings = where, readings
        self._metrics = [metric.name for metric in resolve_metrics(metrics)]
        self._every, self._loss_tokens, self._group, self._optimizer = every, loss_tokens, group, optimizer
        self._recorder: Recorder | None = None
        self._trains = any(metric.kind == "gradient" for metric in resolve_metrics(metrics))
        self._forgives = False
        self._told: set[str] = set()
        self._ended = -1  # the step that ended last
        self._known: dict[nn.Module, KnownBlock] = {}  # what norms are, of blocks that have added up
        self._settled = unsettled()  # how the loss averages
        self._updates: Updates | None = None  # of the step that is measured
        self._spikes = LossSpikes()

    def begin(self, step: int) -> None:
        """Begin optimizer step number `step`: record it if it is one of every so many."""
        self.close()
        if step % self._every == 0:
            self._recorder = record(self.sites, self._metrics, loss_tokens=self._loss_tokens)
            self._recorder.training_only = True if self._trains else None
            self._recorder.forgives = True  # training goes first
            self._recorder.known |= self._known
            self._recorder.settled = self._settled
            self._recorder.__enter__()
            self._updates = None if self._optimizer is None else Updates(self._optimizer, self.sites)

    def pause(self) -> bool:
        """Stop recording, all micro-batches being in. True if the step is measured."""
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
        return self._recorder is not None

    def end(self, step: int) -> bool:
        """Keep what a measured step holds, merged over ranks. True if it was measured.

        A step before the one that ended last begins another branch: what was read from it on is dropped.
        """
        import pandas

        is_measured = self.pause()
        if step < self._ended or (is_measured and step == self._ended):
            words = f"step {step} follows step {self._ended}: readings from step {step} on are dropped"
            warnings.warn(words, stacklevel=3)
            self.readings.forget(step)
        self._ended = step
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            self._known = {module: known for module, known in recorder.known.items() if known.sites is not None}
            self._trains |= recorder.training_only is True
            try:
                stats = recorder.stats(step=step)
            except NormlabError as error:
                if not self._forgives:
                    raise
                warnings.warn(f"step {step} was not measured: {error}", stacklevel=3)
                return False
            try:
                stats = stats.across_ranks(self._group)
                layers = stats.to_pandas()
            except NormlabError as error:  # on all ranks alike
                warnings.warn(f"step {step} is left out: {error}", stacklevel=3)
                return False
            weights, without = _weights(self.sites, step) if recorder.has_own_weights else ([], OTHER_WEIGHTS)
            absent = {} if without is None else {"weights": without}
            if self._updates is not None:
                updates, without = self._updates.measure(step)
                weights += updates
                absent |= {} if without is None else {"updates": without}
            if len(stats.manifest["blocks"]) > self.sites.depth:  # on all ranks: they hold stages of a pipeline
                weights, absent = self._of_all_stages(weights, absent)
            absent = stats.manifest["absent"] | absent
            self.readings.add(_joined([layers, *[pandas.DataFrame(weights, columns=COLUMNS)] * bool(weights)]))
            self.leave_out(step, absent)
            # Of several ranks none may leave out a step alone: the others would wait for it.
            self._forgives = not torch.distributed.is_available() or not torch.distributed.is_initialized()
        return is_measured

    def _of_all_stages(self, rows: list[Row], absent: dict[str, str]) -> tuple[list[Row], dict[str, str]]:
        """Rows of weights and updates of all stages, and why some are left out."""
        parts: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(parts, (rows, absent), self._group)
        without = {place: why for _, told in parts for place, why in told.items()}
        return [row for rows, _ in parts for row in rows], without

    def leave_out(self, step: int, absent: Mapping[str, str]) -> None:
        """Note what could not be measured at a step, and why.

        Warn once of what is left out for all blocks, and of what makes a number another than its name says.
        """
        self.readings.add_absent(step, absent)
        for place, why in absent.items():
            if place not in LEFT_OUT and not place.startswith(MISLEADING):
                continue
            words = f"{LEFT_OUT[place]} are left out: {why}" if place in LEFT_OUT else f"{place}: {why}"
            told = re.sub(r"\d+", "*", words)  # of one block and of another, of tokens of any number
            if told not in self._told:
                warnings.warn(f"step {step}: {words}", stacklevel=4)
                self._told.add(told)

    def step(self, loss: float | Tensor, step: int) -> None:
        """End optimizer step number `step` and begin the next.

        A spike of `loss`, or one that is not finite, is explained at once (`spike`). A training that goes back to an
        earlier step drops what was read from that step on, with a warning. So the number counts on over epochs.
        """
        self.end(step)
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if self._spikes.score(value) > self._spikes.threshold:
            self.spike = self.explain(step - RECENT * self._every)
        self.begin(step + 1)

    def explain(self, since: int = 0) -> Explanation:
        """Rank the sites by when they left their own past, over the last readings (`Readings.explain`)."""
        return self.readings.explain(since)

    def to_pandas(self) -> pandas.DataFrame:
        """Everything measured so far: step, site, layer, metric, mask, value."""
        return self.readings.to_pandas()

    def close(self) -> None:
        """Remove the hooks. A measurement that has begun is dropped."""
        self.pause()
        self._recorder = None
        if self._updates is not None:
            self._updates.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def require_folder(path: str | Path | None) -> None:
    """Raise NormlabError unless a file of this path can be made: before training, not after it."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise NormlabError(f"path is {path}: make the folder {Path(path).parent} first")


def require_every(every: Any) -> None:
    """Raise NormlabError unless `every` is a whole number from 1."""
    if not isinstance(every, int) or every < 1:
        raise NormlabError(f"every is {every!r}: measure every 1 step or more")
