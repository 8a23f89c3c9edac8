"""`probe_report`: measure saved or hub models on texts or images, and write tables and an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from normlab.errors import NormlabError
from normlab.report.inputs import Batches, Loaded, batches, check_input, load
from normlab.report.measure import Measured, experiment, measure

if TYPE_CHECKING:
    import pandas

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Case:
    """The name of a recording in a comparison, its model's loader and its text or images."""

    name: str
    load: Callable[[], Loaded]
    path: Path


def probe_report(
    model: str | nn.Module,
    text: Paths,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    length: int = 256,
    rows: int = 16,
    against: str | nn.Module | None = None,
    revisions: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    progress: bool = True,
) -> str:
    """Measure a model layer by layer: a language model on a text file, a model of images on a folder of them.

    Writes into `out`:

        table.parquet, table.csv    site, layer, metric, mask, value
        skip_sensitivity.csv, angular_distance.csv, logit_lens.csv
        massive_activations.csv     values of the stream far above all others, in the first batch
        attention_sinks.csv         tokens that take most attention, in the first batch
        spans.csv                   the cheapest blocks to drop
        mergekit-drop-N.yaml        the same for mergekit, for N blocks
        report.html                 the page; it reads plotly.min.js next to it

    A model of several stacks (an encoder and a decoder) has a column `stack` in the table. Names of the other files
    then begin with a stack's name. Several texts, another model `against`, or `revisions` give one page and one table
    instead. Its first column is `text`, `model` or `revision`.

    Args:
        model: directory or hub name, or a model (then give `tokenizer`).
        text: UTF-8 text files, or folders of images; one or several.
        tokenizer: or image processor; default: the one saved with the model.
        out: directory; default `probe-<model name>`.
        length, rows: the first `rows` pieces of `length` tokens are used, or the first `rows` images. Both are less if
            the text or the model's context is shorter.
        against: another model, measured on the same text: before and after fine-tuning, released and swapped.
        revisions: of a hub model (`step1000` ...), or folders in the directory `model`: its layers over training.
        device, dtype: as `normlab.report.inputs.load` takes them; "auto" spreads the model over devices.
        progress: show progress bars.

    Returns:
        A short summary that names the files.

    Raises:
        NormlabError: the text is missing, empty, binary or too short; a model or its tokenizer cannot be loaded. Also
            if more than one thing is compared, or plotly is missing.
    """
    _require_plotly()
    if length < 2 or rows < 1:
        raise NormlabError(f"length is {length}, rows {rows}: give at least 2 tokens a row, and at least 1 row")
    if not all(revision.strip() for revision in revisions):
        raise NormlabError(f"revisions are {', '.join(map(repr, revisions))}: give each a name")
    paths = [Path(text)] if isinstance(text, str | Path) else [Path(path) for path in text]
    if not paths:
        raise NormlabError("there is nothing to measure on: give a text file")
    for path in paths:
        check_input(path)

    def loader(model: str | nn.Module, revision: str | None = None) -> Callable[[], Loaded]:
        return lambda: load(model, tokenizer, revision=revision, device=device, dtype=dtype)

    compared = {"several texts": len(paths) > 1, "--against": against is not None, "--revisions": bool(revisions)}
    if sum(compared.values()) > 1:
        names = " and ".join(name for name, is_given in compared.items() if is_given)
        raise NormlabError(f"{names} cannot be compared at once: choose one")
    if revisions and not isinstance(model, str):
        raise NormlabError("revisions are of a model with a name: give a hub name or a directory")
    name = _name(model)
    folder = Path(out) if out is not None else Path(f"probe-{Path(name).name}")
    if revisions:
        by, cases = "revision", [Case(revision, loader(model, revision), paths[0]) for revision in revisions]
    elif against is not None:
        by, cases = "model", [Case(_name(one), loader(one), paths[0]) for one in (model, against)]
    elif len(paths) > 1:
        loaded = loader(model)()
        by, cases = "text", [Case(path.name, lambda: loaded, path) for path in paths]
    else:
        return _single(loader(model)(), paths[0], folder, length, rows, progress)
    return _series(by, cases, folder, name, length, rows, progress)


def _name(model: str | nn.Module) -> str:
    return model if isinstance(model, str) else type(model).__name__


def _require_plotly() -> None:
    try:
        import plotly  # noqa: F401
    except ImportError as error:  # pragma: no cover - needs an environment without plotly
        raise NormlabError("the report needs plotly: pip install 'normlab[figures]'") from error


def _single(loaded: Loaded, path: Path, folder: Path, length: int, rows: int, progress: bool) -> str:
    """Record one case with its experiments. Returns the summary."""
    from normlab.report.page import model_parts, span_line, write_page

    data = batches(loaded, path, length, rows)
    stacks = measure(loaded, data)
    for stack in stacks:
        experiment(stack, data, progress)
    loss = stacks[0].loss
    parts = model_parts(stacks, _about(data, path, loss))
    _write_table(_table(stacks, keep_stack=len(stacks) > 1), folder)
    lines: list[str] = []
    for stack in stacks:
        stem = f"{stack.name}-" if stack.name else ""
        lines += str(stack.where).splitlines()
        for key, frame in stack.tables.items():
            frame.to_csv(folder / f"{stem}{key}.csv", index=key == "angular_distance")
        for row, config in stack.cuts(loaded):
            (folder / f"{stem}mergekit-drop-{row.length}.yaml").write_text(config, encoding="utf-8")
            lines.append(span_line(row))
    page = write_page(folder, f"{_short(loaded.name)}, layer by layer", parts)
    lines += [] if loss is None else [f"loss {loss:.4f} nats a label"]
    return _summary(lines, folder, page)


def _series(by: str, cases: list[Case], folder: Path, name: str, length: int, rows: int, progress: bool) -> str:
    """Record every case in turn, with one model in memory at a time. Returns the summary."""
    import pandas
    from tqdm.auto import tqdm

    from normlab.report.page import left_out, series_parts, write_page

    tables: list[pandas.DataFrame] = []
    losses: dict[str, float | None] = {}
    missing: list[str] = []
    about = f"{len(cases)} texts."
    for case in tqdm(cases, desc="models", disable=not progress, delay=1):
        loaded = case.load()
        data = batches(loaded, case.path, length, rows)
        stacks = measure(loaded, data)
        label = case.name if case.name not in losses else f"{case.name} ({len(losses) + 1})"  # two of one name
        missing += [f"{label}, {words}" for stack in stacks for words in left_out(stack)]
        losses[label] = stacks[0].loss
        table = _table(stacks, keep_stack=True)
        table.insert(0, by, label)
        tables.append(table)
        about = about if by == "text" else _about(data, case.path, None)
    table = pandas.concat(tables, ignore_index=True)
    parts = series_parts(table, by, losses, missing, about)
    _write_table(table if table["stack"].nunique() > 1 else table.drop(columns="stack"), folder)
    page = write_page(folder, " and ".join(map(_short, losses)) if by == "model" else f"{_short(name)}, by {by}", parts)
    lines = [f"{label}: " + ("no labels" if loss is None else f"loss {loss:.4f}") for label, loss in losses.items()]
    return _summary(lines, folder, page)


def _summary(lines: list[str], folder: Path, page: Path) -> str:
    return "\n".join([*lines, f"table:  {folder / 'table.parquet'}", f"report: {page}"])


def _table(stacks: list[Measured], keep_stack: bool) -> pandas.DataFrame:
    import pandas

    tables = [stack.stats.to_pandas() for stack in stacks]
    if keep_stack:
        for stack, table in zip(stacks, tables, strict=True):
            table.insert(0, "stack", stack.name)
    return pandas.concat(tables, ignore_index=True)


def _write_table(table: pandas.DataFrame, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / "table.parquet", index=False)
    table.to_csv(folder / "table.csv", index=False)


def _about(data: Batches, path: Path, loss: float | None) -> str:
    """The data and the loss in a sentence."""
    count, first = sum(len(next(iter(batch.values()))) for batch in data), data[0]
    if "pixel_values" in first:
        what = f"{count} images"
    else:
        source = first["labels"].shape[1] if "decoder_input_ids" in first else 0
        what = f"{count} pieces of {first['input_ids'].shape[1] + source} tokens"
    return f"{what} of {path}" + ("." if loss is None else f"; loss {loss:.4f} nats a label.")


def _short(name: str) -> str:
    """A directory's last part; a hub name as it is."""
    return Path(name).name if Path(name).is_dir() else name
