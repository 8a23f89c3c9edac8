"""`LayerStats`: the result of a recording, as a tidy table that can be saved, loaded, merged and plotted."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from normlab.errors import NormlabError
from normlab.files import whole_file
from normlab.probes.accumulate import merge_moments
from normlab.probes.metrics import MASKS, METRICS, Metric, site_order
from normlab.probes.statistics import FIXED_SHAPE, MERGE, READOUT

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

    from normlab.probes.sites import Sites

COLUMNS = ["site", "layer", "metric", "mask", "value"]
KEY_NAMES = ["site", "layer", "mask", "statistic"]
NUMBER_NAMES = ["count", "mean", "m2", "peak"]
FORMAT = 1
Key = tuple[str, int, str, str]  # site, layer, mask, statistic


def manifest(where: Sites, metrics: Sequence[Metric], masks: Sequence[str], calls: int) -> dict[str, Any]:
    """Definitions, masks, loss normalizer, versions, and what was measured: all that a reader of the numbers needs."""
    return {
        "model": type(where.model).__name__,
        "depth": where.depth,
        "blocks": {str(block.layer): block.name for block in where.blocks},
        "sites": str(where).splitlines(),
        "forward_passes": calls,
        "metrics": {metric.name: metric.definition for metric in metrics},
        "masks": {mask: MASKS[mask].definition for mask in masks},
        "loss": "gradients are multiplied by the number of labels the loss averages over: they are of the summed loss",
        "versions": {"torch": str(torch.__version__)},
    }


def _merged(a: pandas.DataFrame, b: pandas.DataFrame) -> pandas.DataFrame:
    """The moments of both sets of tokens together."""
    import pandas

    keys = [pandas.MultiIndex.from_frame(table[KEY_NAMES]) for table in (a, b)]
    both = keys[0].append(keys[1][~keys[1].isin(keys[0])])
    nothing = [0.0, 0.0, 0.0, -np.inf, 0.0]
    sides = []
    for key, table in zip(keys, (a, b), strict=True):  # a key that the side lacks takes the last row: no token
        rows = np.vstack([table[[*NUMBER_NAMES, "width"]].to_numpy(dtype=float), nothing])
        sides.append(rows[key.get_indexer(both)].T)
    (*moments_a, peak_a, width_a), (*moments_b, peak_b, width_b) = sides
    if ((width_a != width_b) & (width_a > 0) & (width_b > 0)).any():
        raise NormlabError("cannot merge statistics of different widths: they are of different models")
    with np.errstate(invalid="ignore", over="ignore"):
        merged = merge_moments(*moments_a, *moments_b)
    numbers = dict(zip(NUMBER_NAMES, (*merged, np.maximum(peak_a, peak_b)), strict=True))  # NaN, once seen, stays
    return both.to_frame(index=False).assign(**numbers, width=np.maximum(width_a, width_b).astype(int))


def _of_stages(a: LayerStats, b: LayerStats) -> LayerStats:
    """Both stages of a pipeline. What enters one and is an output of the other's blocks counts once."""
    import pandas

    moments: list[pandas.DataFrame] = []
    arrays: dict[Key, Tensor] = {}
    for part, rest in ((a, b), (b, a)):
        known = {("block_out", int(layer)) for layer in rest.manifest["blocks"].keys() - part.manifest["blocks"].keys()}
        places = list(zip(part.moments["site"], part.moments["layer"], strict=True))
        moments.append(part.moments[[place not in known for place in places]])
        arrays |= {key: array for key, array in part.arrays.items() if key[:2] not in known}
    details = dict(a.manifest)
    for what in ("blocks", "absent"):
        details[what] = a.manifest.get(what, {}) | b.manifest.get(what, {})
    details["sites"] = [*a.manifest["sites"], *b.manifest["sites"]]
    details["depth"] = a.manifest["depth"] + b.manifest["depth"]
    for most in ("layers", "forward_passes", "loss_tokens"):
        if most in details:
            details[most] = max(details[most], b.manifest.get(most, 0))
    return LayerStats(pandas.concat(moments, ignore_index=True), a.metrics, details, a.step, arrays)


@dataclass
class LayerStats:
    """The statistics of one recording (of one training step, if `step` is given).

    Args:
        moments: the streamed statistics: columns `site layer mask statistic count mean m2 peak width`. M2 is the sum of
            squared deviations, `width` the number of features per token.
        metrics: names of the metrics that were asked for.
        manifest: what a reader of the numbers must know.
        step: of training.
        arrays: statistics that are not one number per token, by (site, layer, mask, statistic).
    """

    moments: pandas.DataFrame
    metrics: tuple[str, ...]
    manifest: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    arrays: Mapping[Key, Tensor] = field(default_factory=dict)

    @property
    def absent(self) -> tuple[str, ...]:
        """Metrics that were asked for and do not apply to this model, so have no row."""
        measured = {*self.moments["statistic"], *(statistic for *_, statistic in self.arrays)}
        return tuple(name for name in self.metrics if METRICS[name].statistic not in measured)

    def to_pandas(self, errors: bool = False) -> pandas.DataFrame:
        """The table: one row per site, layer, metric and mask.

        Columns: `site layer metric mask value`, with `step` first when it is known. `errors=True` adds `tokens`, how
        many were counted, and `standard_error` of means over tokens (tokens taken as independent; missing for one).
        """
        import pandas

        statistic = self.moments["statistic"].to_numpy()
        numbers = [self.moments[name].to_numpy() for name in (*NUMBER_NAMES, "width")]
        keys: list[Key] = [*zip(*(self.moments[name].tolist() for name in KEY_NAMES), strict=True), *self.arrays]
        rows: list[tuple] = []  # a key's place, a metric's name, its value, tokens, standard error
        for metric in (METRICS[name] for name in self.metrics):
            (places,) = np.nonzero(statistic == metric.statistic)
            count, mean, m2, peak, width = (column[places] for column in numbers)
            error = np.full(len(places), np.nan)
            if metric.readout == "mean":
                np.sqrt(m2 / np.maximum(count, 1) / np.maximum(count - 1, 1), out=error, where=count > 1)
            value = metric.value(count, mean, m2, peak, width)
            rows += zip(places, repeat(metric.name), value, count, error, strict=False)
            rows += [
                (place, metric.name, READOUT[key[3]](array), np.nan, np.nan)
                for place, (key, array) in enumerate(self.arrays.items(), start=len(self.moments))
                if key[3] == metric.statistic and key[3] in READOUT
            ]
        ranks = {site: rank for rank, site in enumerate(sorted({site for site, *_ in keys}, key=site_order))}
        rows.sort(key=lambda row: (ranks[keys[row[0]][0]], keys[row[0]][1], row[0]))
        names = [*KEY_NAMES[:3], "metric", "value", "tokens", "standard_error"]
        types = dict.fromkeys(names, "str") | {"layer": "Int64"} | dict.fromkeys(names[-3:], "float64")
        columns = zip(*((*keys[place][:3], *rest) for place, *rest in rows), strict=True)
        values = {name: next(columns, ()) for name in names}
        wanted = [*COLUMNS, *names[-2:]] if errors else COLUMNS
        table = pandas.DataFrame({name: pandas.Series(values[name], dtype=types[name]) for name in wanted})
        if self.step is not None:
            table.insert(0, "step", self.step)
        return table

    # -- arrays ------------------------------------------------------------------------------------------------------

    def _array_table(
        self, statistic: str, columns: Sequence[str], rows_of: Callable[[Tensor], Iterable[tuple]], hint: str
    ) -> pandas.DataFrame:
        """One table of all arrays of a statistic: columns `site layer mask`, then `columns` of each of their rows."""
        import pandas

        rows = [
            (*place, *row)
            for (*place, name), array in self.arrays.items()
            if name == statistic
            for row in rows_of(array)
        ]
        if not rows:
            raise NormlabError(hint)
        return pandas.DataFrame(rows, columns=["site", "layer", "mask", *columns])

    def massive(self, top: int = 5) -> pandas.DataFrame:
        """The `top` features by largest |h| at each block output: columns `layer mask rank feature max_abs`.

        Needs the metric `massive_activation_ratio`. Compare masks: massive activations are mostly at the first token.
        `normlab.massive_activations` finds each one's token, and the blocks over which it stays.

        Raises:
            NormlabError: the metric was not recorded.
        """

        def rows_of(peaks: Tensor) -> Iterable[tuple]:
            values, features = peaks.topk(min(top, len(peaks)))
            return zip(range(1, len(values) + 1), features.tolist(), values.tolist(), strict=True)

        hint = "no coordinates were recorded: ask for the metric massive_activation_ratio"
        table = self._array_table("coordinate_peak", ["rank", "feature", "max_abs"], rows_of, hint)
        return table.drop(columns="site")

    def expert_load(self) -> pandas.DataFrame:
        """Each expert's share of the tokens' choices: columns `site layer mask expert share`.

        Needs the metric `expert_load_max` and a model that is a mixture of experts.

        Raises:
            NormlabError: the metric was not recorded, or the model has no experts.
        """

        def rows_of(counts: Tensor) -> Iterable[tuple]:
            return enumerate((counts / counts.sum().clamp(min=1)).tolist())

        hint = "no experts were recorded: ask for expert_load_max on a mixture of experts"
        return self._array_table("expert_counts", ["expert", "share"], rows_of, hint)

    def carried_by_position(self) -> pandas.DataFrame:
        """`carried_var_ratio` by position in a row (0 = first real token): `site layer position mask value tokens`.

        Raises:
            NormlabError: the metric was not recorded, or no norm was handed a statistic.
        """

        def rows_of(table: Tensor) -> Iterable[tuple]:
            counted = table[0] > 0
            values = (table[1] / table[0].clamp(min=1))[counted].tolist()
            positions, tokens = counted.nonzero()[:, 0].tolist(), table[0][counted].long().tolist()
            return zip(positions, values, tokens, strict=True)

        hint = "no carried statistic was recorded: ask for carried_var_ratio on a model that carries one"
        table = self._array_table("carried_position", ["position", "value", "tokens"], rows_of, hint)
        return table[["site", "layer", "position", "mask", "value", "tokens"]]

    # -- merging -----------------------------------------------------------------------------------------------------

    def merge(self, other: LayerStats) -> LayerStats:
        """Both recordings as one: the result of a single recording over all their tokens.

        Recordings of a pipeline's stages, which hold other layers, become one of all layers.

        Raises:
            NormlabError: other metrics, masks, blocks or widths.
        """
        if self.metrics != other.metrics:
            raise NormlabError("cannot merge recordings of different metrics: record both with the same list")
        mine, theirs = (part.manifest.get("blocks", {}) for part in (self, other))
        are_stages = bool(mine) and bool(theirs) and not mine.keys() & theirs.keys()
        for what in ("masks", *(() if are_stages else ("depth", "blocks"))):
            if self.manifest.get(what) != other.manifest.get(what):
                raise NormlabError(
                    f"cannot merge recordings of different {what}: they are not of one kind of recording"
                )
        if are_stages:
            return _of_stages(self, other)
        arrays = dict(self.arrays)
        for key, array in other.arrays.items():
            if key[3] in FIXED_SHAPE and key in arrays and arrays[key].shape != array.shape:
                raise NormlabError("cannot merge recordings of different widths: they are of different models")
            arrays[key] = MERGE[key[3]](arrays[key], array) if key in arrays else array
        details = dict(self.manifest)
        for total in ("forward_passes", "loss_tokens"):
            if total in details:
                details[total] += other.manifest.get(total, 0)
        if "absent" in details:
            details["absent"] = details["absent"] | other.manifest.get("absent", {})
        return LayerStats(_merged(self.moments, other.moments), self.metrics, details, self.step, arrays)

    def across_ranks(self, group: Any = None) -> LayerStats:
        """The merge over all ranks of a torch.distributed group, on every rank; itself when there is none.

        group: of the ranks that see different tokens; default: all.

        A gloo group that outlives `destroy_process_group` may hang the rank's exit. Delete what holds it first, a
        DistributedDataParallel model and its recorder. Import `torch.distributed.nn.functional` before the group is
        initialized: its default arguments hold the group that they find.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return self
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, self, group)
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        return merged

    # -- plots and files ---------------------------------------------------------------------------------------------

    def plot(
        self, metric: str | None = None, mask: str = "all", kind: Literal["line", "heatmap"] = "line"
    ) -> plotly.graph_objects.Figure:
        """Draw the metric against layer, one line per site (`normlab.figures.report`).

        `kind="heatmap"` draws a heat map of it, or of all metrics, with one row per site.
        """
        if kind not in ("line", "heatmap"):
            raise NormlabError(f"unknown kind {kind!r}: choose from line, heatmap")
        if metric not in self.metrics and not (metric is None and kind == "heatmap"):
            raise NormlabError(f"{metric!r} was not recorded: choose from {', '.join(self.metrics)}")
        try:  # figures are a floor above probes, so they are found by name
            module = importlib.import_module("normlab.figures.report")
        except ImportError as error:
            raise NormlabError("plots need plotly: pip install 'normlab[figures]'") from error
        draw = module.layer_figure if kind == "line" else module.layer_heatmap
        figure: plotly.graph_objects.Figure = draw(self.to_pandas(), metric, mask)
        return figure

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file: the mergeable statistics, and the manifest in its metadata."""
        import pyarrow
        import pyarrow.parquet

        rows = self.moments.assign(array=None).to_dict("records")
        for key, array in self.arrays.items():
            numbers: dict[str, Any] = dict.fromkeys(NUMBER_NAMES) | {"width": array.shape[-1]}
            rows.append(dict(zip(KEY_NAMES, key, strict=True)) | numbers | {"array": array.double().flatten().tolist()})
        head = {"format": FORMAT, "metrics": self.metrics, "manifest": self.manifest, "step": self.step}
        types = dict.fromkeys(KEY_NAMES, pyarrow.string()) | dict.fromkeys(NUMBER_NAMES, pyarrow.float64())
        types |= dict.fromkeys(("layer", "width"), pyarrow.int64()) | {"array": pyarrow.list_(pyarrow.float64())}
        table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(types))
        path, table = Path(path), table.replace_schema_metadata({"normlab.stats": json.dumps(head)})
        with whole_file(path) as staged:
            pyarrow.parquet.write_table(table, staged)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LayerStats:
        """Read what `save` wrote. Raises `NormlabError` for any other file."""
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(path)
            head = json.loads((table.schema.metadata or {})[b"normlab.stats"])
        except (OSError, KeyError, pyarrow.ArrowInvalid) as error:
            raise NormlabError(
                f"{path} holds no layer statistics ({type(error).__name__}): save them with stats.save"
            ) from error
        if head["format"] != FORMAT:
            raise NormlabError(
                f"{path} has statistics of format {head['format']}, this version reads {FORMAT}: record again"
            )
        rows = table.to_pandas()
        is_array = rows["array"].notna()
        arrays: dict[Key, Tensor] = {}
        for row in rows[is_array].itertuples():
            array = torch.tensor(row.array, dtype=torch.float64)
            shaped = array.reshape(-1, row.width) if len(array) != row.width else array
            arrays[row.site, row.layer, row.mask, row.statistic] = shaped
        moments = rows[~is_array].drop(columns="array").reset_index(drop=True)
        return cls(moments, tuple(head["metrics"]), head["manifest"], head["step"], arrays)
