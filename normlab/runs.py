"""A run on disk, and many runs as one table.

    <root>/<run id>/manifest.json       everything needed to repeat the run, and what it came to
                    stats.parquet       the measurements, one value a row
                    experiments.parquet what skipping, angles and Jacobians say of the trained model, when it was asked
                    config.json, model.safetensors   the trained model, when it was kept
    <root>/.partial/<run id>/           a run in progress: checkpoints only, none of them half-written
    <root>/search/<run id>/             a run of the search for learning rates, left out of what is reported
    <root>/finals/<run id>/             a longer one, of those that the search does not tell apart; left out too

`load_runs(path)`   one long table of every run below `path`
`load_experiments(path)`   what was measured once, after training, of every run that has it
`load_configs(path)`   what each of them was told to do, a row a run; `read_configs(path)`: the same as data, by run
`read_run(path)`    one run

They all take addresses too; how runs are written, and where, is in `normlab.storage`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from normlab.errors import NormlabError, first_line
from normlab.manifests import (
    COUNT_LOSSES,
    DIVERGED,
    FINISHED,
    NOT_LEARNED,
    SCHEMA_VERSION,
    STATUSES,
    read_manifest,
    unreadable,
)
from normlab.storage import (
    EXPERIMENTS,
    FINALS,
    MANIFEST,
    NOT_REPORTED,
    PARTIAL,
    SEARCH,
    STATS,
    Place,
    check_files,
    check_root,
    checkpoint_step,
    checkpoints,
    child,
    exclusive,
    full_disk_named,
    inside,
    is_address,
    is_run,
    list_files,
    publish,
    set_aside,
    write_json,
    write_stats,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COUNT_LOSSES",
    "DIVERGED",
    "EXPERIMENTS",
    "FINALS",
    "FINISHED",
    "MANIFEST",
    "NOT_LEARNED",
    "PARTIAL",
    "SCHEMA_VERSION",
    "SEARCH",
    "STATS",
    "STATUSES",
    "Place",
    "check_files",
    "check_root",
    "checkpoint_step",
    "checkpoints",
    "child",
    "exclusive",
    "find_runs",
    "full_disk_named",
    "inside",
    "is_address",
    "is_run",
    "list_files",
    "load_configs",
    "load_experiments",
    "load_runs",
    "publish",
    "read_configs",
    "read_run",
    "set_aside",
    "write_json",
    "write_stats",
]
WEIGHTS = "model.safetensors"


class Row(NamedTuple):
    """One value that a run measured, as stats.parquet has it."""

    step: int
    tokens: int
    split: str
    site: str
    layer: int | None
    metric: str
    mask: str
    value: float


RUN_COLUMNS = ["run", "scheme", "depth", "width", "seed", "lr", "status", "dtype"]
STATS_COLUMNS = list(Row._fields)
COLUMNS = RUN_COLUMNS + STATS_COLUMNS
EXPERIMENT_COLUMNS = ["metric", "part", "layer", "other", "value", "standard_error"]


@dataclass(frozen=True)
class Run:
    """One finished run: its directory and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return self.manifest["run"]

    @property
    def status(self) -> str:
        """ "finished"; "diverged": the loss became non-finite; "not_learned": the eval loss after the last step is not
        below `trigram_loss` (in runs that do not know it: not below the unigram entropy)."""
        return self.manifest["status"]

    @property
    def eval_loss(self) -> float:
        """Held-out loss after the last step, in nats a token; NaN for a diverged run."""
        return float("nan") if self.manifest["eval_loss"] is None else self.manifest["eval_loss"]

    @property
    def trigram_loss(self) -> float | None:
        """Loss of a trigram model of the training text on the blocks of `eval_loss`, in nats a token
        (`normlab.training.text.ngrams`); None for a run of schema version 1."""
        return self.manifest["trigram_loss"]

    def table(self) -> pd.DataFrame:
        """This run's rows of the long table (columns COLUMNS).

        Beside what stats.parquet holds, rows at the last step: the held-out unigram entropy and the bigram and trigram
        losses (split "eval"; the last two where the run knows them), and the training speed (split "train", median over
        steps of tokens_per_s); speed is kept out of the Parquet file so that it is the same file whenever the run is
        repeated.
        """
        import pandas as pd

        try:
            stats = pd.read_parquet(self.path / STATS)
        except Exception as error:  # pyarrow raises several kinds, OSError among them
            raise unreadable(self.path, STATS, first_line(error)) from error
        if list(stats.columns) != STATS_COLUMNS:
            raise NormlabError(
                f"run {self.path}: {STATS} has columns {list(stats.columns)}; delete the run and train it again"
            )
        last = stats[["step", "tokens"]].max()
        extra = {
            "unigram_entropy": ("eval", self.manifest["corpus"]["unigram_entropy"]),
            **{name: ("eval", self.manifest[name]) for name in COUNT_LOSSES},
            "tokens_per_s": ("train", self.manifest["measured"]["tokens_per_s"]),
        }
        rows = [
            (last["step"], last["tokens"], split, "model", None, metric, "all", value)
            for metric, (split, value) in extra.items()
            if value is not None
        ]
        stats = pd.concat([stats, stats_frame(rows)], ignore_index=True)
        return self._with_keys(stats)

    def experiments(self) -> pd.DataFrame | None:
        """This run's rows of `load_experiments`; None when it was not measured so."""
        import pandas as pd

        if not (self.path / EXPERIMENTS).is_file():
            return None
        try:
            return self._with_keys(pd.read_parquet(self.path / EXPERIMENTS))
        except Exception as error:
            raise unreadable(self.path, EXPERIMENTS, first_line(error)) from error

    def _with_keys(self, table: pd.DataFrame) -> pd.DataFrame:
        config = {"dtype": "float32"} | self.manifest["config"]  # manifests without the field are of float32 runs
        keys = {"run": self.name, "status": self.status, **{k: config[k] for k in RUN_COLUMNS if k in config}}
        for position, column in enumerate(RUN_COLUMNS):
            table.insert(position, column, keys[column])
        return table

    def load_model(self) -> Any:
        """The trained model (`NormlabForCausalLM`); NormlabError when the weights were not kept, or do not fit."""
        from normlab.models.kept import load_whole

        if not (self.path / WEIGHTS).is_file():
            raise NormlabError(f"run {self.path} kept no weights; train it with keep_weights")
        return load_whole(self.path)


def rows_of(frame: pd.DataFrame) -> Iterator[Row]:
    """The inverse of `stats_frame`; further columns are left out."""
    import pandas as pd

    columns = frame[STATS_COLUMNS].itertuples(index=False, name=None)
    for step, tokens, split, site, layer, metric, mask, value in columns:
        whole = None if layer is pd.NA else int(layer)
        yield Row(int(step), int(tokens), split, site, whole, metric, mask, float(value))


def stats_frame(rows: Iterable[tuple]) -> pd.DataFrame:
    """Rows (`Row`) as a typed table."""
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=STATS_COLUMNS)
    types = {"step": "int64", "tokens": "int64", "layer": "Int64", "value": "float64"}
    return frame.astype({**dict.fromkeys(("split", "site", "metric", "mask"), "str"), **types})


def read_run(path: str | Path) -> Run:
    """The run in directory `path`, or at an address, which is copied from there. NormlabError when it is no run, of
    another schema version, or damaged."""
    path = Place(path).fetch_run() if is_address(path) else Path(path)
    manifest = read_manifest(path)
    if (path / WEIGHTS).is_file():
        _check_weights(path)
    if (path / STATS).is_file():
        _check_footer(path)
    return Run(path, manifest)


def _check_weights(path: Path) -> None:
    """A safetensors file says its own length: a truncated one is found without reading the weights."""
    from safetensors import safe_open

    try:
        with safe_open(path / WEIGHTS, framework="numpy"):
            pass
    except Exception as error:
        raise unreadable(path, WEIGHTS, first_line(error)) from error


def _check_footer(path: Path) -> None:
    """A Parquet file ends with its footer: a truncated one is found without reading the table."""
    import pyarrow.parquet

    try:
        pyarrow.parquet.read_metadata(path / STATS)
    except Exception as error:  # pyarrow raises several kinds, OSError among them
        raise unreadable(path, STATS, first_line(error)) from error


def find_runs(root: str | Path) -> list[Path]:
    """Directories of finished runs at or below `root`, sorted; runs in progress are not among them, nor are those of a
    search for learning rates. Of an address: what was copied from there, without weights."""
    if is_address(root):
        return Place(root).fetch_tables()
    root = Path(root)
    if not root.exists():
        raise NormlabError(f"{root} does not exist")
    if (root / MANIFEST).exists():
        return [root]
    return sorted(p.parent for p in root.rglob(MANIFEST) if not NOT_REPORTED & set(p.relative_to(root).parts))


def _roots(path: str | Path | Iterable[str | Path]) -> list[str | Path]:
    return [path] if isinstance(path, (str, Path)) else list(path)


def load_runs(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """All runs at or below `path` (or several paths) as one table, a value a row.

    Columns: run scheme depth width seed lr status dtype | step tokens split site layer metric mask value. dtype: of
    matrix products in training steps. step: optimizer steps done (0: before training). tokens: trained so far. split:
    "train", "eval" or "probe". site "model": loss, grad_norm (before clipping), learning_rate, tokens_per_s,
    unigram_entropy, and bigram_loss and trigram_loss where the run knows them, of float16 steps loss_scale and
    skipped_step; other sites as `normlab.probes` names them. layer: 0 the embeddings, 1..L the blocks, missing where it
    means nothing. mask: "all", or "no_first": no row's first token.

    A run that cannot be read is named in a warning and left out; NormlabError when none is left.
    """
    import pandas as pd

    return pd.concat(_each(path, Run.table).values(), ignore_index=True)


def _each(path: str | Path | Iterable[str | Path], read: Callable[[Run], Any]) -> dict[Path, Any]:
    """`read` of each run at or below `path` (or several paths), by directory. A run that cannot be read is named
    in a warning and left out; NormlabError when none is left."""
    found = [run for root in _roots(path) for run in find_runs(root)]
    where = ", ".join(map(str, _roots(path)))
    if not found:
        raise NormlabError(f"no runs in {where}; make some with `normlab sweep --preset tiny --out DIR`")
    whole, errors = {}, []
    for directory in found:
        try:
            whole[directory] = read(read_run(directory))
        except NormlabError as error:
            errors.append(str(error))
    if not whole:
        raise NormlabError(
            errors[0]
            if len(errors) == 1
            else f"none of the {len(errors)} runs in {where} can be read; the first: {errors[0]}"
        )
    for message in errors:
        warnings.warn(f"left out: {message}", stacklevel=3)
    return whole


def load_experiments(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """What the runs at or below `path` (or several paths) measured once, on the trained model: a value a row.

    Columns: run scheme depth width seed lr status dtype | metric part layer other value standard_error, explained in
    `normlab.training.experiments`. A run that cannot be read is named in a warning and left out; NormlabError when no
    run has any.
    """
    import pandas as pd

    tables = [table for table in _each(path, Run.experiments).values() if table is not None]
    if not tables:
        raise NormlabError(
            f"no run in {', '.join(map(str, _roots(path)))} was measured so; train with experiment_blocks"
        )
    return pd.concat(tables, ignore_index=True)


def read_configs(path: str | Path | Iterable[str | Path]) -> dict[str, dict[str, Any]]:
    """What each run at or below `path` (or several paths) was configured with: the fields of its `TrainConfig`, by run.
    A run that cannot be read is named in a warning and left out; NormlabError when none is left."""
    return {directory.name: config for directory, config in _each(path, lambda run: run.manifest["config"]).items()}


def load_configs(path: str | Path) -> pd.DataFrame:
    """What `load_runs` leaves out: one row a run at or below `path`, indexed by run.

    Columns: status, eval_loss, every field of the run's `TrainConfig`, and every model field that one of the runs sets
    (lam_input, gamma0, carried, ...), missing where a run leaves it at its default. A run that cannot be read is
    named in a warning and left out; NormlabError when none is left.
    """
    import pandas as pd

    rows = {}
    for run in _each(path, lambda run: run).values():
        fields = dict(run.manifest["config"])
        model = fields.pop("model", {})
        rows[run.name] = {"status": run.status, "eval_loss": run.eval_loss, **fields, **model}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "run"
    return table
