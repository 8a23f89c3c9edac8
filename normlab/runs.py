"""Runs on disk, and many runs as one table.

    <root>/<run id>/manifest.json       the configuration, the environment and the results
                    stats.parquet       the measurements, one value per row
                    experiments.parquet results of experiments on the trained model, if there were any
                    config.json, model.safetensors   the trained model, if it was kept
    <root>/.partial/<run id>/           a run in progress: its checkpoints

load_runs                    one long table of every run below a path
load_experiments             the same of what was measured once, after training
load_configs, read_configs   each run's configuration: one row per run; as data
read_runs                    every run below a path
read_run, read_manifest      one run, its manifest

All but the last take addresses too. The table leaves out runs of `.partial`.
How runs are written: `normlab.store`. Many of them in one file: `normlab.packed`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from normlab import packed
from normlab.errors import NormlabError, first_fault, first_line
from normlab.store import EXPERIMENTS, MANIFEST, PARTIAL, STATS, Remote, is_address

if TYPE_CHECKING:
    import pandas as pd

WEIGHTS = "model.safetensors"
SCHEMA_VERSION = 2
COUNT_LOSSES = ("bigram_loss", "trigram_loss")  # since schema version 2
STATUSES = FINISHED, DIVERGED, NOT_LEARNED = "finished", "diverged", "not_learned"
Paths = str | Path | Iterable[str | Path]
Loss = Annotated[float, Field(ge=0)]


class Row(NamedTuple):
    """One measured value, a row of stats.parquet."""

    step: int
    tokens: int
    split: str
    site: str
    layer: int | None
    metric: str
    mask: str
    value: float


RUN_COLUMNS = ["run", "scheme", "depth", "width", "seed", "lr", "status", "dtype", "recipe"]
# Fields of a configuration that decide how a model is trained, beside those that are columns and those of the model.
# Texts are told apart by their n-gram losses.
RECIPE = (
    "steps", "batch_size", "block_length", "heads", "kv_heads", "intermediate", "init_std", "weight_decay", "warmup",
    "min_lr_ratio", "gain_lr_ratio", "clip", "beta1", "beta2", "outlier_channels", "outlier_size", "stream",
)  # fmt: skip
# How many held-out blocks a model was measured on, each with the field without which it was not. Gradients of a batch
# and largest magnitudes are of all of them together.
MEASURED_ON = {"probe_blocks": "probe_every", "experiment_blocks": "experiment_blocks"}
# Fields of a configuration that manifests of earlier versions lack, and what those runs had.
LATER_FIELDS: dict[str, Any] = {
    "init_std": None, "gain_lr_ratio": 1.0, "stop_at": None, "stream": False, "held_out": "all", "experiment_blocks": 0,
    "store_all": False, "log_every": 1, "dtype": "float32", "compile": False, "accumulate": 1,
    "gradient_checkpointing": False, "fsdp": False, "device": "auto",
}  # fmt: skip
MODEL = "model."  # begins the name of a model field in a recipe; one that is not named is at its default
STATS_COLUMNS = list(Row._fields)
COLUMNS = RUN_COLUMNS + STATS_COLUMNS
SOURCE = "normlab.source"  # in the attrs of `load_runs`' table: where its runs are
EXPERIMENT_COLUMNS = list(packed.TABLES["experiments"])


class _Part(BaseModel):
    """Part of a manifest. Types are strict and floats finite; fields that are not named here pass."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Config(_Part):
    scheme: str
    depth: PositiveInt
    width: PositiveInt
    seed: NonNegativeInt
    lr: PositiveFloat
    dtype: str = LATER_FIELDS["dtype"]
    model: dict[str, Any] = {}


class _Corpus(_Part):
    unigram_entropy: Loss


class _Measured(_Part):
    tokens_per_s: Loss | None
    wall_s: Loss = 0.0
    resumed_from_step: NonNegativeInt = 0


class _Manifest(_Part):
    """The fields of manifest.json that this library reads."""

    version: Literal[2] = Field(alias="schema")
    run: Annotated[str, Field(min_length=1)]
    status: Literal["finished", "diverged", "not_learned"]
    eval_loss: Loss | None
    bigram_loss: Loss | None
    trigram_loss: Loss | None
    validation_loss: Loss | None = None
    steps: int | None = None
    tokens: int | None = None
    config: _Config
    corpus: _Corpus
    measured: _Measured


@dataclass(frozen=True)
class Run:
    """One finished run: its directory and its manifest.

    pack: what its tables are read from, if it is packed and the file is open.
    """

    path: Path
    manifest: dict[str, Any]
    pack: packed.Pack | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.manifest["run"]

    @property
    def config(self) -> dict[str, Any]:
        """The fields of the run's `TrainConfig`, also those that came after the run, with what they were in it."""
        own = self.manifest["config"]
        return own | LATER_FIELDS | own

    @property
    def status(self) -> str:
        """One of "finished", "diverged", "not_learned".

        diverged: the loss, or a weight after the last step, is not finite. not_learned: the last eval loss is not below
        every model that only counts (unigram entropy, `bigram_loss`, `trigram_loss`).
        """
        return self.manifest["status"]

    @property
    def eval_loss(self) -> float:
        """Held-out loss after the last step, in nats per token; NaN for a diverged run, or if none was measured."""
        return float("nan") if self.manifest["eval_loss"] is None else self.manifest["eval_loss"]

    @property
    def outcome(self) -> str:
        """Status and held-out loss in words: "finished, eval loss 3.0571"."""
        loss = self.manifest["eval_loss"]
        return f"{self.status}, " + ("no eval loss" if loss is None else f"eval loss {loss:.4f}")

    @property
    def choice_loss(self) -> float:
        """The loss that learning rates are chosen by: on the half "validation" where the run reports "test", if it was
        measured; else `eval_loss`."""
        loss = self.manifest.get("validation_loss")
        return self.eval_loss if loss is None else loss

    def table(self) -> pd.DataFrame:
        """The rows of this run in the long table (columns COLUMNS).

        Rows at the last step are added from the manifest. Split "eval" has the held-out unigram entropy, and bigram and
        trigram losses where the run knows them. Split "train" has tokens_per_s, the median over steps. The Parquet file
        leaves speed out, so that a repeated run writes the same file.
        """
        return _long([(self, *self._rows())])

    def _rows(self) -> tuple[pd.DataFrame, list[Row]]:
        """The rows of stats.parquet, and those that `table` adds."""
        stats = self._read(STATS)
        if stats is None:
            raise _unreadable(self.path, STATS, "it is missing")
        if stats.empty:
            raise _unreadable(self.path, STATS, "it has no row")
        step, tokens = int(stats["step"].max()), int(stats["tokens"].max())
        extra = {
            "unigram_entropy": ("eval", self.manifest["corpus"]["unigram_entropy"]),
            **{name: ("eval", self.manifest[name]) for name in COUNT_LOSSES},
            "tokens_per_s": ("train", self.manifest["measured"]["tokens_per_s"]),
        }
        return stats, [
            Row(step, tokens, split, "model", None, metric, "all", value)
            for metric, (split, value) in extra.items()
            if value is not None
        ]

    def experiments(self) -> pd.DataFrame | None:
        """The rows of this run in `load_experiments`; None if there were no experiments."""
        table = self._read(EXPERIMENTS)
        return None if table is None else _with_keys([self], [table]).assign(**self._training())

    def _training(self) -> dict[str, float]:
        """How long the model was trained, and what counting achieves on its text; NaN for what the run does not know.

        A run that was stopped early has fewer steps than its recipe.
        """
        known = {name: self.manifest.get(name) for name in ("steps", "tokens")}
        known["unigram_entropy"] = self.manifest["corpus"]["unigram_entropy"]
        known |= {name: self.manifest[name] for name in COUNT_LOSSES}
        return {name: float("nan") if value is None else float(value) for name, value in known.items()}

    def _read(self, file: str) -> pd.DataFrame | None:
        """A table of the run; None if it has none of that name."""
        name, pack = file.removesuffix(".parquet"), self.pack
        try:
            if pack is None:
                return packed.read_table(self.path / file, name)
        except FileNotFoundError:
            if (self.path / MANIFEST).exists():
                return None
            pack = packed.opened(self.path.parent)  # perhaps since the manifest was read
        except MemoryError:
            raise
        except Exception as error:  # pyarrow raises several kinds, OSError among them
            raise _unreadable(self.path, file, first_line(error)) from error
        return pack.table(self.path.name, name) if pack is not None and self.path.name in pack.names else None

    def _keys(self) -> dict[str, Any]:
        """Of each of RUN_COLUMNS, its value."""
        config = self.config
        keys = config | {"run": self.name, "status": self.status, "lr": rounded_rate(config["lr"])}
        keys["recipe"] = _recipe(config)
        return {name: keys[name] for name in RUN_COLUMNS}

    def load_model(self) -> Any:
        """The trained model (`NormlabForCausalLM`). NormlabError: the weights were not kept, or do not fit."""
        from normlab.models.pretrained import load_whole

        if not (self.path / WEIGHTS).is_file():
            raise NormlabError(
                f"run {self.path} kept no weights; train it again with keep_weights, in another directory"
            )
        return load_whole(self.path)


def _long(parts: Sequence[tuple[Run, pd.DataFrame, list[Row]]]) -> pd.DataFrame:
    """Runs, with their rows as `Run._rows` gives them, as one table."""
    added = stats_frame(row for *_, rows in parts for row in rows)
    runs, tables, end = [], [], 0
    for run, stats, rows in parts:
        begin, end = end, end + len(rows)
        runs += [run, run]
        tables += [stats, added.iloc[begin:end]]
    return _with_keys(runs, tables)


def _recipe(config: Mapping[str, Any]) -> str:
    """How a model was trained and measured, as text that `recipe_fields` reads: "steps=100 clip=1 model.kappa=2"."""
    recipe = {name: _short(config[name]) for name in RECIPE if name in config}
    measured = (name for name, needed in MEASURED_ON.items() if config.get(name) and config.get(needed))
    recipe |= {name: _short(config[name]) for name in measured}
    recipe |= {MODEL + name: _short(value, none="null") for name, value in sorted(config.get("model", {}).items())}
    return " ".join(f"{name}={text}" for name, text in recipe.items())


def recipe_fields(recipes: pd.Series) -> pd.DataFrame:
    """The fields of recipes as text, one column each; a model field that a recipe lacks is "default" there."""
    import pandas as pd

    rows = [dict(item.partition("=")[::2] for item in str(recipe).split()) for recipe in recipes]
    fields = pd.DataFrame(rows, index=recipes.index)
    return fields.fillna({name: "default" for name in fields if name.startswith(MODEL)})


def _short(value: Any, none: str = "default") -> str:
    """A setting as text without blanks: 5 and 5.0 are one."""
    if value is None:
        return none
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), sort_keys=True)
    return "_".join(text.split())


def rounded_rate(rate: float) -> float:
    """A learning rate to six digits, as it is shown: 0.1 * 0.003 and 0.0003 are one."""
    return float(f"{rate:.6g}")


def _with_keys(runs: Sequence[Run], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One table after the other, each with the columns RUN_COLUMNS of its run."""
    import pandas as pd

    keys = pd.DataFrame([run._keys() for run in runs], columns=RUN_COLUMNS)
    places = [place for place, table in enumerate(tables) for _ in range(len(table))]
    whole = pd.concat(tables, ignore_index=True)
    return pd.concat([keys.take(places).reset_index(drop=True), whole], axis="columns")


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

    types = dict.fromkeys(("split", "site", "metric", "mask"), "str")
    types |= {"step": "int64", "tokens": "int64", "layer": "Int64", "value": "float64"}
    columns = zip(*rows, strict=True)
    values = {name: next(columns, ()) for name in STATS_COLUMNS}
    return pd.DataFrame({name: pd.Series(column, dtype=types[name]) for name, column in values.items()})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a run's directory, as data.

    Raises:
        NormlabError: no manifest, another schema version, or a damaged one. The line names file and field.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        pack = packed.opened(folder.parent)
        if pack is None or folder.name not in pack.names:
            raise NormlabError(f"{folder} holds no run: {MANIFEST} is missing") from None
        text = pack.manifest(folder.name)
    except (OSError, ValueError) as error:
        raise _unreadable(folder, MANIFEST, first_line(error)) from error
    return _manifest(folder, text)


def _manifest(folder: Path, text: str) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
        version = manifest["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(folder, MANIFEST, first_line(error)) from error
    if version != SCHEMA_VERSION:
        raise NormlabError(
            f"run {folder} has schema version {version!r}, this normlab reads {SCHEMA_VERSION}; "
            "train it again or use the version that made it"
        )
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        raise _unreadable(folder, MANIFEST, first_fault(error)) from None
    return manifest


def read_run(path: str | Path) -> Run:
    """The run in a directory, or at an address, from where it is copied.

    NormlabError: no run, one of another schema version, or a damaged one.
    """
    path = Remote(path).fetch_run() if is_address(path) else Path(path)
    manifest = read_manifest(path)
    for file, check in ((WEIGHTS, _check_length), (STATS, _check_footer)):
        if (path / file).is_file():
            try:
                check(path / file)
            except MemoryError:
                raise
            except Exception as error:  # safetensors and pyarrow raise several kinds
                raise _unreadable(path, file, first_line(error)) from error
    return Run(path, manifest)


def _run(path: Path, pack: packed.Pack | None) -> Run:
    """`read_run` of a run in an open file, or in a directory."""
    return read_run(path) if pack is None else Run(path, _manifest(path, pack.manifest(path.name)), pack)


def _check_length(path: Path) -> None:
    """Find a truncated safetensors file, which says its own length, without reading the weights."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy"):
        pass


def _check_footer(path: Path) -> None:
    """Find a truncated Parquet file, which ends with its footer, without reading the table."""
    import pyarrow.parquet

    pyarrow.parquet.read_metadata(path)


def _unreadable(folder: Path, file: str, reason: str) -> NormlabError:
    return NormlabError(f"run {folder}: {file} cannot be read ({reason}); delete the run and train it again")


def find_runs(root: str | Path) -> list[Path]:
    """Directories of finished runs at or below `root`, sorted, without those of `.partial`.

    Runs at an address are copied from there, without weights. A file of packed runs that cannot be read is named in a
    warning and left out. NormlabError: it is the only one.
    """
    found, errors = _found(root)
    if errors and not found:
        raise NormlabError(errors[0])
    for line in errors:
        warnings.warn(f"left out: {line}", stacklevel=2)
    return sorted(found)


def _found(root: str | Path) -> tuple[dict[Path, packed.Pack | None], list[str]]:
    """The runs that `find_runs` finds, with the file that they are packed in, and a line for what cannot be read."""
    if is_address(root):
        files = Remote(root).fetch_tables()
    else:
        root = Path(root)
        there = os.path.exists(root)  # False for a name that no file can have
        files = list(_files_below(root)) if there else []
        if root / MANIFEST in files:
            files = [root / MANIFEST]
        if not files and packed.holds(root):
            return {root: None}, []
        if not there:
            raise NormlabError(f"{str(root):.200} does not exist")
    found: dict[Path, packed.Pack | None] = {}
    errors: list[str] = []
    for file in files:
        folder = file.parent
        if file.name == MANIFEST:
            found[folder] = None
            continue
        try:
            if (pack := packed.opened(folder)) is not None:
                found |= {folder / name: pack for name in pack.names if found.get(folder / name, pack) is pack}
                errors += pack.unreadable
        except NormlabError as error:
            errors.append(str(error))
    return found, errors


def _files_below(root: Path) -> Iterator[Path]:
    """Manifests and files of packed runs. A folder that another process deletes meanwhile holds none."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {PARTIAL})
        yield from (Path(folder) / name for name in (packed.FILE, MANIFEST) if name in files)


def _each(path: Paths, read: Callable[[Run], Any] = lambda run: run) -> dict[Path, Any]:
    """`read` of each run at or below `path` (or several paths), by directory.

    A run that cannot be read, is in a second directory too, or has the name of another on another text, is named in a
    warning and left out. NormlabError: none is left.
    """
    roots = [path] if isinstance(path, str | Path) else list(path)
    directories: dict[Path, packed.Pack | None] = {}
    errors: list[str] = []
    for root in roots:
        found, unreadable = _found(root)
        directories |= {directory: found[directory] for directory in sorted(found)}
        errors += unreadable
    places = ", ".join(map(str, roots))
    if not directories and not errors:
        raise NormlabError(f"no runs in {places}; make some with `normlab sweep --preset tiny --out DIR`")
    whole: dict[Path, Any] = {}
    where: dict[str, tuple[Path, dict[str, Any]]] = {}  # directory and text of each name
    for directory, pack in directories.items():
        try:
            run = _run(directory, pack)
            text = run.manifest["corpus"]
            if run.name in where:
                first, other = where[run.name]
                if packed.differ_in_text(text, other):
                    raise NormlabError(
                        f"{directory}, as {first} has its name but another text; read one of them at a time, or give "
                        "each text a path of its own"
                    )
                raise NormlabError(f"{directory}, as {first} is the same run")
            whole[directory] = read(run)
            where[run.name] = directory, text
        except NormlabError as error:
            errors.append(str(error))
    if not whole and len(errors) == 1:
        raise NormlabError(errors[0])
    if not whole:
        raise NormlabError(f"none of the {len(errors)} runs in {places} can be read; the first: {errors[0]}")
    for message in errors:
        warnings.warn(f"left out: {message}", stacklevel=3)
    return whole


def load_runs(path: str | Path | Iterable[str | Path], *, variants: bool = True) -> pd.DataFrame:
    """All runs at or below `path` (or several paths) as one table, one value per row.

    Args:
        variants: False leaves out runs that change their scheme's model (`model` of their `TrainConfig`, such as
            another kappa): figures and comparisons by scheme show no two models of one name.

    Columns: run scheme depth width seed lr status dtype recipe | step tokens split site layer metric mask value.

    - lr: to six digits, so that rates that differ by a rounding are one.
    - dtype: of matrix products in training steps.
    - recipe: how a model of that shape was trained, "steps=6000 batch_size=8 ...". Then on how many held-out blocks it
      was measured, "probe_blocks=16 experiment_blocks=32". Fields that change the model come last, as
      "model.lam_input=10". The corpus is not part of it.
    - step: optimizer steps done; 0 is before training.
    - tokens: trained so far.
    - split: "train", "eval" or "probe".
    - site: "model", a site of layers as `normlab.probes` names it, a parameter's name or a held-out file's path. Of
      "model" are loss, grad_norm (before clipping), learning_rate, tokens_per_s, unigram_entropy, bigram_loss,
      trigram_loss, and at the end validation_loss, seen_loss, copy_loss and uniform_attention. Runs in float16 add
      loss_scale and skipped_step.
    - layer: 0 the embeddings, 1..L the blocks; missing where it means nothing.
    - mask: "all", or "no_first": without each row's first token.

    A run that cannot be read is named in a warning and left out. NormlabError: none is left.
    """
    places = [path] if isinstance(path, str | Path) else list(path)

    def read(run: Run) -> tuple[Run, pd.DataFrame, list[Row]] | None:
        return (run, *run._rows()) if variants or not run.manifest["config"].get("model") else None

    parts = [part for part in _each(places, read).values() if part is not None]
    if not parts:
        raise NormlabError(f"every run in {', '.join(map(str, places))} changes its scheme's model: read variants")
    table = _long(parts)
    table.attrs[SOURCE] = [str(place) for place in places]
    return table


def load_schemes(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """`load_runs` of one model per scheme.

    Where some runs of a scheme change its model and others do not, the latter are kept, with a warning.

    Raises:
        NormlabError: all runs of a scheme change its model, in several ways.
    """
    changes: dict[str, dict[str, dict[str, Any]]] = {}
    for run, config in read_configs(path).items():
        changes.setdefault(config["scheme"], {})[run] = config.get("model") or {}
    left: list[str] = []
    for scheme, models in changes.items():
        fields = ", ".join(sorted({field for model in models.values() for field in model}))
        if {} in models.values() and fields:
            left += [run for run, model in models.items() if model]
            share = f"{sum(map(bool, models.values()))} of {len(models)}"
            warnings.warn(f"left out: runs of {scheme} that change its model ({fields}), {share}", stacklevel=2)
        elif any(model != next(iter(models.values())) for model in models.values()):
            raise NormlabError(f"runs of {scheme} are of several models, which differ in {fields}: give those of one")
    table = load_runs(path)
    kept = table[~table["run"].isin(left)] if left else table
    return kept.reset_index(drop=True)


def load_experiments(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Experiments on the trained models of all runs at or below `path` (or several paths), one value per row.

    Columns: run scheme depth width seed lr status dtype recipe | metric part layer other value standard_error,
    explained in `normlab.training.experiments` | steps tokens unigram_entropy bigram_loss trigram_loss: how long the
    model was trained, and the losses of models that count on its text. A run that cannot be read is named in a warning
    and left out. NormlabError: no run has experiments.
    """
    by_run = _each(path, lambda run: (run, run._read(EXPERIMENTS), run._training()))
    measured = [(run, table.assign(**training)) for run, table, training in by_run.values() if table is not None]
    if not measured:
        places = ", ".join(sorted({str(directory.parent) for directory in by_run}))
        raise NormlabError(f"no run in {places} was measured so; train with experiment_blocks")
    return _with_keys(*zip(*measured, strict=True))


def read_runs(path: Paths) -> list[Run]:
    """All runs at or below `path` (or several paths).

    A run that cannot be read is named in a warning and left out. NormlabError: none is left.
    """
    return list(_each(path).values())


def read_configs(path: str | Path | Iterable[str | Path]) -> dict[str, dict[str, Any]]:
    """The configuration of each run at or below `path` (or several paths): the fields of its `TrainConfig`, by run.

    A field that came after a run has the value that it had in that run. A run that cannot be read is named in a warning
    and left out. NormlabError: none is left.
    """
    return {run.name: run.config for run in _each(path).values()}


def load_configs(path: str | Path) -> pd.DataFrame:
    """The configuration of each run at or below `path`: one row per run, indexed by run.

    Columns: status, eval_loss, every field of `TrainConfig`, and every model field that one of the runs sets
    (lam_input, gamma0, carried, ...). A field of `TrainConfig` that came after a run has the value that it had in that
    run. A model field is missing where a run leaves it at its default. Rates are rounded as in `load_runs`. A run that
    cannot be read is named in a warning and left out. NormlabError: none is left.
    """
    import pandas as pd

    rows = {}
    for run in _each(path).values():
        fields = run.config | {"lr": rounded_rate(run.config["lr"])}
        model = fields.pop("model", {})
        rows[run.name] = {"status": run.status, "eval_loss": run.eval_loss, **fields, **model}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "run"
    return table
