"""`probe_report`: measure a saved or hub model on texts or images, and write tables and an HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normlab.errors import NormlabError
from normlab.probes import mergekit_config
from normlab.report.inputs import Loaded, batches, check_input, load
from normlab.report.measure import Measured, experiment, measure, on_device

if TYPE_CHECKING:
    import pandas

Paths = str | Path | Sequence[str | Path]


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
    """Measure a model layer by layer: a language model (causal, masked, sequence-to-sequence) on a text file, a model
    of images on a folder of them.

    Writes `table.parquet` and `table.csv` (site, layer, metric, mask, value), `skip_sensitivity.csv`,
    `angular_distance.csv`, `logit_lens.csv`, `spans.csv` (what costs least to drop), `mergekit-drop-N.yaml` for N
    blocks, and `report.html` with `plotly.min.js`, which it reads, into `out`. A model of several stacks (an encoder
    and a decoder) has a column `stack` in the table, and a stack's name before the names of the other files.

    With several texts, with another model `against` which it is set, or with `revisions`, the recordings are set side
    by side instead: one page and one table, whose first column says `text`, `model` or `revision`.

    Args:
        model: directory or hub name, or a model (then give `tokenizer`).
        text: UTF-8 text files, or folders of images; one or several.
        tokenizer: or image processor; default: the one saved with the model.
        out: directory; default `probe-<model name>`.
        length, rows: the text's first `rows` pieces of `length` tokens are used (less when the text or the model's
            context is shorter); of images the first `rows`.
        against: another model, measured on the same text: before and after fine-choices, released and swapped.
        revisions: of a hub model (`step1000` ...), or folders in the directory `model`: its layers over training.
        device, dtype: as `normlab.report.inputs.load` takes them; "auto" spreads the model over devices.
        progress: show progress bars.

    Returns:
        A short summary that names the files.

    Raises:
        NormlabError: the text is missing, empty, binary or too short; a model or its tokenizer cannot be loaded; more
        than one thing is compared; plotly is missing.
    """
    _needs_plotly()
    if length < 2 or rows < 1:
        raise NormlabError(f"length is {length}, rows {rows}: give at least 2 tokens a row, and at least 1 row")
    if not all(revision.strip() for revision in revisions):
        raise NormlabError(f"revisions are {', '.join(map(repr, revisions))}: give each a name")
    paths = [Path(text)] if isinstance(text, str | Path) else [Path(one) for one in text]
    if not paths:
        raise NormlabError("there is nothing to measure on: give a text file")
    for path in paths:
        check_input(path)
    asked = {"several texts": len(paths) > 1, "--against": against is not None, "--revisions": bool(revisions)}
    many = [what for what, given in asked.items() if given]
    if len(many) > 1:
        raise NormlabError(f"{' and '.join(many)} cannot be compared at once: choose one")
    where = {"device": device, "dtype": dtype}
    name = model if isinstance(model, str) else type(model).__name__
    folder = Path(out) if out is not None else Path(f"probe-{Path(name).name}")
    if revisions:
        if not isinstance(model, str):
            raise NormlabError("revisions are of a model with a name: give a hub name or a directory")
        cases = ((revision, load(model, tokenizer, revision=revision, **where), paths[0]) for revision in revisions)
        return _series("revision", cases, folder, name, length, rows, progress)
    if against is not None:
        cases = ((one.name, one, paths[0]) for one in (load(m, tokenizer, **where) for m in (model, against)))
        return _series("model", cases, folder, name, length, rows, progress)
    loaded = load(model, tokenizer, **where)
    if len(paths) > 1:
        return _series("text", ((path.name, loaded, path) for path in paths), folder, name, length, rows, progress)
    return _single(loaded, paths[0], folder, length, rows, progress)


def _needs_plotly() -> None:
    try:
        import plotly  # noqa: F401
    except ImportError as error:  # pragma: no cover - needs an environment without plotly
        raise NormlabError("the report needs plotly: pip install 'normlab[figures]'") from error


def _single(loaded: Loaded, path: Path, folder: Path, length: int, rows: int, progress: bool) -> str:
    from normlab.report.page import model_parts, span_line, write_page

    given = on_device(loaded, batches(loaded, path, length, rows))
    found = measure(loaded, given)
    for one in found:
        experiment(one, given, progress)
    parts = model_parts(found, _about(given, path, found[0].loss))
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(_table(found, {}, keep_stack=len(found) > 1), folder)
    lines: list[str] = []
    for one in found:
        stem = f"{one.name}-" if one.name else ""
        lines += str(one.where).splitlines()
        for key, frame in one.tables.items():
            frame.to_csv(folder / f"{stem}{key}.csv", index=key == "angular_distance")
        dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        for row in one.tables["spans"].itertuples() if "spans" in one.tables else ():
            config = mergekit_config(loaded.name, row.keep, dtype)
            (folder / f"{stem}mergekit-drop-{row.length}.yaml").write_text(config, encoding="utf-8")
            lines.append(span_line(row))
    title = f"{_short(loaded.name)}, layer by layer"
    page = write_page(folder, title, [_heading(title), *parts])
    if found[0].loss is not None:
        lines.append(f"loss {found[0].loss:.4f} nats a label")
    return "\n".join([*lines, f"table:  {folder / 'table.parquet'}", f"report: {page}"])


def _series(by: str, cases: Any, folder: Path, name: str, length: int, rows: int, progress: bool) -> str:
    """Every case recorded, one after the other (only one model is held at a time), as one table and one page."""
    import pandas

    from normlab.report.page import left_out, series_parts, write_page

    tables: list[pandas.DataFrame] = []
    losses: dict[str, float | None] = {}
    missing: list[str] = []
    about = ""
    for case, loaded, path in _with_progress(cases, progress):
        given = on_device(loaded, batches(loaded, path, length, rows))
        found = measure(loaded, given)
        case = case if case not in losses else f"{case} ({len(losses) + 1})"  # two of one name
        missing += [f"{case}, {words}" for one in found for words in left_out(one)]
        losses[case] = found[0].loss
        tables.append(_table(found, {by: case}, keep_stack=True))
        about = _about(given, path, None) if by != "text" else f"{len(losses)} texts."
    table = pandas.concat(tables, ignore_index=True)
    title = f"{_short(name)}, by {by}" if by != "model" else " and ".join(map(_short, losses))
    parts = series_parts(table, by, losses, missing, about)
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(table if table["stack"].nunique() > 1 else table.drop(columns="stack"), folder)
    page = write_page(folder, title, [_heading(title), *parts])
    lines = [f"{case}: " + ("no labels" if loss is None else f"loss {loss:.4f}") for case, loss in losses.items()]
    return "\n".join([*lines, f"table:  {folder / 'table.parquet'}", f"report: {page}"])


def _with_progress(cases: Any, progress: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(cases, desc="models", disable=not progress, delay=1)


def _table(found: list[Measured], first: dict[str, str], keep_stack: bool) -> pandas.DataFrame:
    import pandas

    tables = []
    for one in found:
        table = one.stats.to_pandas()
        if keep_stack:
            table.insert(0, "stack", one.name)
        tables.append(table)
    whole = pandas.concat(tables, ignore_index=True)
    for column, value in first.items():
        whole.insert(0, column, value)
    return whole


def _write_table(table: pandas.DataFrame, folder: Path) -> None:
    table.to_parquet(folder / "table.parquet", index=False)
    table.to_csv(folder / "table.csv", index=False)


def _about(given: list[dict[str, torch.Tensor]], path: Path, loss: float | None) -> str:
    count = sum(len(next(iter(batch.values()))) for batch in given)
    what = f"{count} images" if "pixel_values" in given[0] else f"{count} pieces of {_length(given[0])} tokens"
    return f"{what} of {path}" + ("." if loss is None else f"; loss {loss:.4f} nats a label.")


def _length(batch: dict[str, torch.Tensor]) -> int:
    return int(batch["input_ids"].shape[1] + (batch["labels"].shape[1] if "decoder_input_ids" in batch else 0))


def _short(name: str) -> str:
    """A directory's last part; a hub name as it is."""
    return Path(name).name if Path(name).is_dir() else name


def _heading(title: str) -> str:
    return f"<h1>{html.escape(title)}</h1>"
