"""`LayerStats`: what a recording found, as a tidy table that can be saved, loaded, merged and plotted."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from normlab.errors import NormlabError
from normlab.probes.arrays import FIXED_SHAPE, MERGE, READOUT
from normlab.probes.metrics import METRICS, Metric, site_order
from normlab.probes.reducers import merge_moments

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

    from normlab.probes.sites import Sites

COLUMNS = ("site", "layer", "metric", "mask", "value")
KEY_NAMES = ("site", "layer", "mask", "statistic")
NUMBER_NAMES = ("count", "mean", "m2", "peak")
FORMAT = 1
Key = tuple[str, int, str, str]  # site, layer, mask, statistic


@dataclass(frozen=True)
class Moments:
    """A statistic over counted tokens: how many, its mean, sum of squared deviations (M2), largest value; features a
    token."""

    count: float
    mean: float
    m2: float
    peak: float
    width: int

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of tokens together (Chan's rule)."""
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        if self.width != other.width:
            raise NormlabError(f"cannot merge statistics of width {self.width} and {other.width}: different models")
        count, mean, m2 = merge_moments(self.count, self.mean, self.m2, other.count, other.mean, other.m2)
        peak = other.peak if other.peak != other.peak else max(self.peak, other.peak)  # NaN, once seen, stays
        return Moments(count, mean, m2, self.peak if self.peak != self.peak else peak, self.width)


def manifest(where: Sites, metrics: Sequence[Metric], masks: Sequence[str], calls: int) -> dict[str, Any]:
    """What a reader of the numbers must know: definitions, masks, loss normaliser, versions, and what was measured."""
    words = {"all": "padding excluded", "no_first": "padding and the first real token of every row excluded"}
    return {
        "model": type(where.model).__name__,
        "depth": where.depth,
        "sites": str(where).splitlines(),
        "forward_passes": calls,
        "metrics": {metric.name: metric.definition for metric in metrics},
        "masks": {mask: words[mask] for mask in masks},
        "loss": "gradients are multiplied by the number of labels the loss averages over: they are of the summed loss",
        "versions": {"torch": str(torch.__version__)},
    }


@dataclass
class LayerStats:
    """The statistics of one recording (one training step, if `step` is given)."""

    moments: Mapping[Key, Moments]
    metrics: tuple[str, ...]
    manifest: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    arrays: Mapping[Key, Tensor] = field(default_factory=dict)

    @property
    def absent(self) -> tuple[str, ...]:
        """Metrics that were asked for and do not apply to this model, so have no row."""
        found = {statistic for *_, statistic in [*self.moments, *self.arrays]}
        return tuple(name for name in self.metrics if METRICS[name].statistic not in found)

    def to_pandas(self, errors: bool = False) -> pandas.DataFrame:
        """One row a site, layer, metric and mask: columns `site layer metric mask value`, with `step` first when it is
        known.

        `errors=True` adds `tokens`, how many were counted, and `standard_error` of means over tokens (tokens taken as
        independent).
        """
        import pandas

        rows = []
        for key, m in self.moments.items():
            for metric in self._readouts(key):
                error = (
                    (m.m2 / m.count / max(m.count - 1, 1)) ** 0.5
                    if metric.readout == "mean" and m.count
                    else float("nan")
                )
                rows.append((key, metric, metric.value(m.count, m.mean, m.m2, m.peak, m.width), m.count, error))
        for key, array in self.arrays.items():
            rows += [
                (key, metric, READOUT[key[3]](array), float("nan"), float("nan")) for metric in self._readouts(key)
            ]
        rows.sort(key=lambda row: (site_order(row[0][0]), row[0][1]))
        table = pandas.DataFrame(
            [(k[0], k[1], metric.name, k[2], value, count, error) for k, metric, value, count, error in rows],
            columns=[*COLUMNS, "tokens", "standard_error"],
        ).astype({"layer": "Int64", "value": "float64"})
        if not errors:
            table = table[list(COLUMNS)]
        if self.step is not None:
            table.insert(0, "step", self.step)
        return table

    def _readouts(self, key: Key) -> list[Metric]:
        chosen = [METRICS[name] for name in self.metrics]
        return [metric for metric in chosen if metric.statistic == key[3] and metric.applies_to(key[0])]

    def massive(self, top: int = 5) -> pandas.DataFrame:
        """The `top` features by largest |h| at each block output: columns `layer mask rank feature max_abs`.

        Needs the metric `massive_activation_ratio`. Compare masks: massive activations sit mostly at the first token.
        """
        import pandas

        rows = []
        for (_, layer, mask, statistic), peaks in self.arrays.items():
            if statistic == "coordinate_peak":
                values, features = peaks.topk(min(top, len(peaks)))
                ranked = enumerate(zip(features.tolist(), values.tolist(), strict=True), start=1)
                rows += [(layer, mask, rank, feature, value) for rank, (feature, value) in ranked]
        if not rows:
            raise NormlabError("no coordinates were recorded: ask for the metric massive_activation_ratio")
        return pandas.DataFrame(rows, columns=["layer", "mask", "rank", "feature", "max_abs"])

    def expert_load(self) -> pandas.DataFrame:
        """Each expert's share of the tokens' choices: columns `site layer mask expert share`.

        Needs the metric `expert_load_max` and a model that is a mixture of experts.
        """
        import pandas

        rows = []
        for (site, layer, mask, statistic), counts in self.arrays.items():
            if statistic == "expert_counts":
                shares = (counts / counts.sum().clamp(min=1)).tolist()
                rows += [(site, layer, mask, expert, share) for expert, share in enumerate(shares)]
        if not rows:
            raise NormlabError("no experts were recorded: ask for expert_load_max on a mixture of experts")
        return pandas.DataFrame(rows, columns=["site", "layer", "mask", "expert", "share"])

    def carried_by_position(self) -> pandas.DataFrame:
        """`carried_var_ratio` by position in a row (0 = first real token): `site layer position mask value tokens`.

        Raises `NormlabError` when the metric was not recorded or no norm was handed a statistic.
        """
        import pandas

        rows = []
        for (site, layer, mask, statistic), table in self.arrays.items():
            if statistic == "carried_position":
                counted = table[0] > 0
                values = (table[1] / table[0].clamp(min=1))[counted].tolist()
                positions, tokens = counted.nonzero()[:, 0].tolist(), table[0][counted].long().tolist()
                rows += [(site, layer, p, mask, v, n) for p, v, n in zip(positions, values, tokens, strict=True)]
        if not rows:
            raise NormlabError(
                "no carried statistic was recorded: ask for carried_var_ratio on a model that carries one"
            )
        return pandas.DataFrame(rows, columns=["site", "layer", "position", "mask", "value", "tokens"])

    def merge(self, other: LayerStats) -> LayerStats:
        """Both recordings as one: what a single recording over all their tokens would have found."""
        if self.metrics != other.metrics:
            raise NormlabError("cannot merge recordings of different metrics: record both with the same list")
        moments = dict(self.moments)
        for key, found in other.moments.items():
            moments[key] = moments[key].merge(found) if key in moments else found
        arrays = dict(self.arrays)
        for key, array in other.arrays.items():
            if key[3] in FIXED_SHAPE and key in arrays and arrays[key].shape != array.shape:
                raise NormlabError("cannot merge recordings of different widths: they are of different models")
            arrays[key] = MERGE[key[3]](arrays[key], array) if key in arrays else array
        about = dict(self.manifest)
        for total in ("forward_passes", "loss_tokens"):
            if total in about:
                about[total] += other.manifest.get(total, 0)
        if "absent" in about:
            about["absent"] = about["absent"] | other.manifest.get("absent", {})
        return LayerStats(moments, self.metrics, about, self.step, arrays)

    def across_ranks(self) -> LayerStats:
        """The merge over all ranks of the default torch.distributed group, on every rank; itself when there is none.

        A gloo group that outlives `destroy_process_group` may hang the rank's exit: delete what holds it first, a
        DistributedDataParallel model and its recorder, and import `torch.distributed.nn.functional` before the group
        is initialized (its default arguments hold the group that they find).
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return self
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self)
        merged = parts[0]
        for part in parts[1:]:
            merged = merged.merge(part)
        return merged

    def plot(
        self, metric: str | None = None, mask: str = "all", kind: Literal["line", "heatmap"] = "line"
    ) -> plotly.graph_objects.Figure:
        """The metric against layer, one line per site; or a heat map of it, or of all metrics, with one row per site.

        `normlab.figures.report` draws them.

        Figures stand above probes, so they are found by name, as pandas finds what draws its plots.
        """
        if kind not in ("line", "heatmap"):
            raise NormlabError(f"unknown kind {kind!r}: choose from line, heatmap")
        if metric not in self.metrics and not (metric is None and kind == "heatmap"):
            raise NormlabError(f"{metric!r} was not recorded: choose from {', '.join(self.metrics)}")
        try:
            module = importlib.import_module("normlab.figures.report")
        except ImportError as error:
            raise NormlabError("plots need plotly: pip install 'normlab[figures]'") from error
        draw = module.layer_figure if kind == "line" else module.layer_heatmap
        figure: plotly.graph_objects.Figure = draw(self.to_pandas(), metric, mask)
        return figure

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file: the mergeable statistics, and the manifest in its metadata. `LayerStats.load` reads
        it."""
        import pyarrow
        import pyarrow.parquet

        rows = [dict(zip(KEY_NAMES, key, strict=True)) | asdict(m) | {"array": None} for key, m in self.moments.items()]
        for key, array in self.arrays.items():
            blank = {"count": None, "mean": None, "m2": None, "peak": None, "width": array.shape[-1]}
            rows.append(dict(zip(KEY_NAMES, key, strict=True)) | blank | {"array": array.double().flatten().tolist()})
        head = {"format": FORMAT, "metrics": self.metrics, "manifest": self.manifest, "step": self.step}
        fields = [(name, pyarrow.string()) for name in KEY_NAMES] + [(n, pyarrow.float64()) for n in NUMBER_NAMES]
        types = dict(fields) | {
            "layer": pyarrow.int64(),
            "width": pyarrow.int64(),
            "array": pyarrow.list_(pyarrow.float64()),
        }
        table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(types))
        path = Path(path)
        pyarrow.parquet.write_table(table.replace_schema_metadata({"normlab.stats": json.dumps(head)}), path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LayerStats:
        """Read what `save` wrote. Raises `NormlabError` for a file that is something else."""
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
        moments: dict[Key, Moments] = {}
        arrays: dict[Key, Tensor] = {}
        for row in table.to_pylist():
            key = (row["site"], row["layer"], row["mask"], row["statistic"])
            if row["array"] is None:
                moments[key] = Moments(row["count"], row["mean"], row["m2"], row["peak"], row["width"])
            else:
                array = torch.tensor(row["array"], dtype=torch.float64)
                arrays[key] = array.reshape(-1, row["width"]) if len(array) != row["width"] else array
        return cls(moments, tuple(head["metrics"]), head["manifest"], head["step"], arrays)
