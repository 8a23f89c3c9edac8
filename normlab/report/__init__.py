"""`probe_report`: measure saved or hub models on texts or images, and write tables and an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from tqdm.auto import tqdm

from normlab.errors import NormlabError
from normlab.files import whole_files
from normlab.probes.passes import evaluating
from normlab.report.inputs import Batches, Loaded, batches, check_input, check_size, load
from normlab.report.measure import Measured, Recorded, count_rows, experiment, layers_mapped, measure, text_states

if TYPE_CHECKING:
    import pandas

Paths = str | Path | Sequence[str | Path]


def probe_report(
    model: str | Path | nn.Module | Sequence[str | Path | nn.Module],
    text: Paths,
    *,
    revisions: Sequence[str] = (),
    tokenizer: Any = None,
    out: str | Path | None = None,
    length: int = 256,
    rows: int = 16,
    device: str | None = None,
    dtype: str | None = None,
    any_size: bool = False,
    progress: bool = True,
) -> str:
    """Measure a model layer by layer: a model of text on a text file, a model of images on a folder of them.

    Writes into `out`:

        table.parquet, table.csv    site, layer, metric, mask, value
        skip_sensitivity.csv, angular_distance.csv, logit_lens.csv
        massive_activations.csv     values of the stream far above all others, with their tokens, in the first batch
        attention_sinks.csv         tokens that take most attention, in the first batch
        void_tokens.csv             tokens that a block hardly changes
        spans.csv, branches.csv     the cheapest blocks to drop; the cheapest attention and MLP branches
        mergekit-drop-N.yaml        N blocks to drop, for mergekit; the path of a model without files is to be filled in
        llm-drop-N.json             N branches to drop, as LLM-Drop's config.json names them
        report.html                 the page; it reads plotly.min.js next to it

    `table` and the loss are of all pieces of the text. Experiments take many passes, so they read about the first
    quarter of the pieces, in batches of 4: at least one batch, and of spans and branches two. The page says how many
    pieces each of them read.

    A model without a language-model head (an encoder, a classifier, a reranker), or whose files lack it, is measured
    without a loss; what needs one is left out.

    A model of several stacks (an encoder and a decoder) has a column `stack` in the table. Names of the other files
    then begin with a stack's name. Several models, texts or revisions give one page and one table instead, whose first
    column is `model`, `text` or `revision`. Two models of one tokenizer also give layer_maps.csv: how well the layers
    of the shallower one predict those of the other.

    Args:
        model: directory or hub name, or a model (then give `tokenizer`); one or several.
        text: UTF-8 text files, or folders of images; one or several.
        revisions: of a hub model (`step1000` ...), or folders in the directory `model`: its layers over training.
        tokenizer: or image processor; default: the one saved with the model.
        out: directory; default `probe-<model name>`.
        length, rows: the first `rows` pieces of `length` tokens are used, or the first `rows` images. Both are less if
            the text or the model's context is shorter.
        device, dtype, any_size: as `normlab.report.inputs.load` takes them; "auto" spreads the model over devices.
        progress: show progress bars.

    Returns:
        A short summary that names the files.

    Raises:
        NormlabError: the text is missing, empty, binary or too short; a model or its tokenizer cannot be loaded. Also
            if more than one thing is compared, or plotly is missing.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:  # pragma: no cover - needs an environment without plotly
        raise NormlabError("the report needs plotly: pip install 'normlab[figures]'") from error
    check_size(length, rows)
    if not all(revision.strip() for revision in revisions):
        raise NormlabError(f"revisions are {', '.join(map(repr, revisions))}: give each a name")
    given = [model] if isinstance(model, str | Path | nn.Module) else list(model)
    models = [str(one) if isinstance(one, Path) else one for one in given]
    paths = [Path(text)] if isinstance(text, str | Path) else [Path(path) for path in text]
    if not paths:
        raise NormlabError("there is nothing to measure on: give a text file")
    for path in paths:
        check_input(path)
    several = {"model": len(models) > 1, "revision": bool(revisions), "text": len(paths) > 1}
    compared = [name for name, is_several in several.items() if is_several]
    if len(compared) > 1:
        raise NormlabError(f"several {'s and '.join(compared)}s cannot be compared at once: choose one")
    if revisions and not isinstance(models[0], str):
        raise NormlabError("revisions are of a model with a name: give a hub name or a directory")
    named: list[str | None] = [*revisions] or [None]
    name = _name(models[0])
    folder = Path(out) if out is not None else Path(f"probe-{Path(name).name}")
    if folder.exists() and not folder.is_dir():
        raise NormlabError(f"{folder} is a file: name a folder for the tables and the page")

    def cases() -> Iterator[tuple[dict[str, Any], list[Loaded], Path]]:
        """Each loaded model with each text. A list holds it, and lets it go before the next one is loaded."""
        held: list[Loaded] = []
        for one in models:
            for revision in named:
                held.clear()
                held.append(load(one, tokenizer, revision=revision, device=device, dtype=dtype, any_size=any_size))
                for path in paths:
                    yield {"model": _name(one), "revision": revision, "text": path.name}, held, path

    with ExitStack() as modes:
        for one in models:
            if isinstance(one, nn.Module):
                modes.enter_context(evaluating(one))
        if not compared:
            ((_, held, path),) = cases()
            return _single(held[0], path, folder, length, rows, progress)
        (by,) = compared
        labelled = ((label[by], held, path) for label, held, path in cases())
        bar = tqdm(labelled, f"{by}s", max(len(models), len(revisions), len(paths)), disable=not progress, delay=1)
        return _series(by, bar, folder, name, length, rows, maps=by == "model" and len(models) == 2)


def _name(model: str | nn.Module) -> str:
    return model if isinstance(model, str) else type(model).__name__


def _single(loaded: Loaded, path: Path, folder: Path, length: int, rows: int, progress: bool) -> str:
    """Record one case with its experiments. Returns the summary."""
    from normlab.report.page import cut_lines, model_page, write_page

    data = batches(loaded, path, length, rows)
    stacks = measure(loaded, data)
    for stack in stacks:
        experiment(stack, loaded, data, progress)
    remarks = _remarks(loaded, stacks)
    opening, sections = model_page(stacks, f"{'; '.join([_about(data, path), *remarks])}.", loaded.scheme)
    lines: list[str] = []
    with whole_files(folder) as staged:
        _write_table(_table(stacks), staged)
        for stack in stacks:
            stem = f"{stack.name}-" if stack.name else ""
            for key, frame in stack.tables.items():
                frame.to_csv(staged / f"{stem}{key}.csv", index=key == "angular_distance")
            for file, content in stack.configurations(loaded).items():
                (staged / f"{stem}{file}").write_text(content, encoding="utf-8")
            said = [*str(stack.where).splitlines(), *cut_lines(stack)]
            lines += [line if line.startswith(" ") or not stack.name else f"{stack.name}: {line}" for line in said]
        page = write_page(staged, f"{short_names([loaded.name])[loaded.name]}, layer by layer", opening, sections)
    return _summary(lines + remarks, folder, folder / page.name)


def _series(
    by: str,
    cases: Iterable[tuple[str, list[Loaded], Path]],
    folder: Path,
    name: str,
    length: int,
    rows: int,
    maps: bool,
) -> str:
    """Record every case in turn, with one model in memory at a time. Returns the summary.

    maps: there are two models, whose layers are mapped to each other.
    """
    import pandas

    from normlab.report.facts import left_out_of_all
    from normlab.report.page import map_section, series_page, write_page

    recorded: list[Recorded] = []
    for case, held, path in cases:
        data = batches(held[0], path, length, rows)
        stacks = measure(held[0], data)
        is_new = all(case != one.label for one in recorded)
        one = Recorded(
            label=case if is_new else f"{case} ({len(recorded) + 1})",
            case=case,
            table=_table(stacks),
            loss="; ".join(_remarks(held[0], stacks)),
            missing=left_out_of_all(stacks),
            scheme=held[0].scheme if by == "model" else None,
            read=_about(data, path),
            states=text_states(stacks, data) if maps else "",
        )
        recorded.append(one)
        del stacks, data  # which know the model
    mapped = layers_mapped({one.label: one.states for one in recorded}) if maps else None
    if isinstance(mapped, str):
        for one in recorded:
            one.missing.append(("layer_maps", mapped))
        mapped = None
    about = recorded[-1].read
    if by == "text" or len({one.read for one in recorded}) > 1:  # each says what it read
        count = f"{len(recorded)} {by}s"
        words = {"text": f"One model on {count}", "revision": f"One model at {count} on {path.name}"}
        about = words.get(by, f"{count} on {path.name}")
        recorded = [one._replace(loss=f"{one.read}; {one.loss}") for one in recorded]
    shorter = short_names(one.case for one in recorded)
    short = {one.label: one.label.replace(one.case, shorter[one.case], 1) for one in recorded}
    opening, sections = series_page([one._replace(label=short[one.label]) for one in recorded], by, f"{about}.")
    title = " and ".join(short.values()) if by == "model" else f"{short_names([name])[name]}, by {by}"
    tables = [one.table.assign(**{by: one.label})[[by, *one.table]] for one in recorded]
    table = pandas.concat(tables, ignore_index=True)
    with whole_files(folder) as staged:
        _write_table(table, staged)
        if mapped is not None:
            sections.append(map_section(mapped.rename_axis(index=short.get, columns=short.get)))
            mapped.to_csv(staged / "layer_maps.csv")
        page = write_page(staged, title, opening, sections)
    lines = [f"{one.label}: {one.loss}" for one in recorded]
    return _summary(lines, folder, folder / page.name)


def _summary(lines: list[str], folder: Path, page: Path) -> str:
    return "\n".join([*lines, f"table:  {folder / 'table.parquet'}", f"report: {page}"])


def _table(stacks: list[Measured]) -> pandas.DataFrame:
    import pandas

    columns = ["stack", *stacks[0].values.columns]
    tables = [stack.values.assign(stack=stack.name)[columns] for stack in stacks]
    return pandas.concat(tables, ignore_index=True)


def _write_table(table: pandas.DataFrame, folder: Path) -> None:
    if table["stack"].nunique() == 1:
        table = table.drop(columns="stack")
    table.to_parquet(folder / "table.parquet", index=False)
    table.to_csv(folder / "table.csv", index=False)


def _about(data: Batches, path: Path) -> str:
    """The data in words."""
    count, first = count_rows(data), data[0]
    if "pixel_values" in first:
        what = f"{count} image{'s' * (count > 1)}"
    else:
        target = first["decoder_input_ids"].shape[1] if "decoder_input_ids" in first else 0
        what = f"{count} piece{'s' * (count > 1)} of {first['input_ids'].shape[1] + target} tokens"
    return f"{what} of {path.name}"


def _remarks(loaded: Loaded, stacks: list[Measured]) -> list[str]:
    """The loss, or why there is none, and what is random in the model."""
    return [words for words in (stacks[0].loss_line(loaded), loaded.remark) if words]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names without the folders that lead to them: as much of each directory as tells it from the others."""
    parts = {name: Path(name).parts if Path(name).is_dir() else (name,) for name in names}
    for count in range(1, max(map(len, parts.values())) + 1):
        short = {name: "/".join(of[-count:]) for name, of in parts.items()}
        if len(set(short.values())) == len(short):
            break
    return short
