"""The command `normlab`: each command is a typed function, whose parameters are its flags.

Bad input ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

from cyclopts import App, CycloptsError, Parameter

from normlab.errors import STOPPED, NormlabError, ended_by, ends_at_once, fail, is_first_rank, show_warning
from normlab.loading import without_bars


class Command(NamedTuple):
    """A command. imports: what takes long to import, before the command begins."""

    act: Callable[..., int]
    imports: str


COMMANDS: dict[str, Command] = {}


def command(name: str, imports: str = "normlab") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a command. Its docstring is its help."""

    def register(act: Callable[..., int]) -> Callable[..., int]:
        COMMANDS[name] = Command(act, imports)
        return act

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 (some runs of a sweep failed, `check` found a fault) or 2 (bad input, full disk)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if strange := [argument for argument in arguments if argument.encode(errors="replace").decode() != argument]:
            raise NormlabError(f"{strange[0]!r} is not UTF-8; give it another name")
        with warnings.catch_warnings():
            warnings.showwarning = show_warning  # type: ignore[assignment]
            with ends_at_once():
                act, options = parse(arguments)
                importlib.import_module(next((row.imports for row in COMMANDS.values() if row.act is act), "normlab"))
            with without_bars() if options.arguments.get("quiet") else contextlib.nullcontext():
                code = act(*options.args, **options.kwargs) or 0
                sys.stdout.flush()
                return code
    except (Exception, KeyboardInterrupt) as error:
        return ended_by(error)


def parse(arguments: Sequence[str]) -> tuple[Callable[..., Any], Any]:
    """The function that a command line asks for, and its bound arguments (`inspect.BoundArguments`).

    A command's parameters are looked at only if it is named: those of `train` take torch to know.
    """
    import normlab

    app = App(
        name="normlab",
        help="What normalization does to a deep transformer, layer by layer.",
        version=normlab.__version__,
        default_parameter=Parameter(negative=(), allow_repeating=True),
        help_format="plaintext",
    )
    for name, row in COMMANDS.items():
        app.command(
            f"{__name__}:{row.act.__name__}", name=name, help=row.act.__doc__, sort_key=list(COMMANDS).index(name)
        )
    first = arguments[0] if arguments else ""
    if not first.startswith("-") and first not in COMMANDS:
        raise NormlabError(f"no command {first!r}; choose from {', '.join(COMMANDS)} (see `normlab --help`)")
    try:
        act, options, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        page = f"normlab {first}" if first in COMMANDS else "normlab"
        raise NormlabError(f"{str(error).rstrip('.')} (see `{page} --help`)") from None
    return act, options


def whole(text: str, flag: str = "") -> int:
    """A whole number. NormlabError for anything else. flag: for the error, where cyclopts does not name it."""
    try:
        return int(text)
    except ValueError:
        raise NormlabError(f"{flag} {text!r} is no whole number".strip()) from None


def field_values(texts: Iterable[str], flag: str = "--model") -> dict[str, Any]:
    """The mapping that FIELD=VALUE, given more than once, says; a value is JSON or a word."""
    fields = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise NormlabError(f"{flag} takes FIELD=VALUE, not {text!r}")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def given(config: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a configuration whose flags were given."""
    return {name: field_values(value) if isinstance(value, list) else value for name, value in (config or {}).items()}


# cyclopts rounds 2.5 to a whole number.
WHOLE = Parameter(converter=lambda kind, tokens: whole(tokens[-1].value))
REPEATED = Parameter(allow_repeating=None)
SEVERAL = Parameter(consume_multiple=True, allow_repeating=None, show_default=False)
SWITCH = Parameter(show_default=False)


def flag(text: str) -> Parameter:
    """The help of a flag."""
    return Parameter(help=text)


# Called in annotations, which are strings until the command that has them is parsed.
def _known(path: str) -> Any:
    """The object NAME of a module of the library, for `MODULE:NAME`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"normlab.{module}"), name)


def _names(path: str) -> str:
    return ", ".join(_known(path))


@functools.cache
def _fields_of(path: str) -> Any:
    """Flags for the fields of a configuration: a `TypedDict`, which holds those that are given."""
    from normlab.training.config import flag_of

    cls = _known(path)
    types, flags = get_type_hints(cls), {}
    for spec in dataclasses.fields(cls):
        text, kind, rules = spec.metadata["help"], types[spec.name], []
        if spec.default_factory is not dataclasses.MISSING:
            kind, rules = list[str], [REPEATED]
        else:
            text += "" if spec.default is None else f" (default: {spec.default})"
        if kind is bool:
            rules = [Parameter(negative=flag_of(f"no_{spec.name}"))]
        elif int in (kind, *getattr(kind, "__args__", ())):
            rules = [WHOLE]
        flags[spec.name] = Annotated[kind, Parameter(help=text), *rules]
    return TypedDict(cls.__name__, flags, total=False)  # type: ignore[operator]


RUNS = "directory of runs, or an address that fsspec knows, such as s3://..."
Quiet = Annotated[bool, flag("no progress bar"), SWITCH]
AnySize = Annotated[bool, flag("build a model that its config.json makes far larger than its files"), SWITCH]
Cache = Annotated[str | None, flag("directory for prepared corpora; default: the user's cache directory")]
Whole = Annotated[int, WHOLE]


@command("train", "normlab.training.run")
def _train(
    *,
    config: Annotated[_fields_of("training.config:TrainConfig") | None, Parameter(name="*")] = None,  # type: ignore
    from_manifest: Annotated[str | None, flag("repeat the run of this manifest.json or run directory")] = None,
    ranks: Annotated[Whole, flag("processes here that train it together, each on a GPU if there is one")] = 1,
    out: Annotated[str, flag(RUNS)] = "runs",
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> int:
    """Train one model and measure its layers.

    On several machines: torchrun ... -m normlab train ...; --batch-size is of all processes together.
    """
    from normlab.runs import COUNT_LOSSES
    from normlab.store import child
    from normlab.training.config import TrainConfig, argument, flag_of
    from normlab.training.distributed import start_ranks
    from normlab.training.run import RunStopped, train, train_from_manifest

    fields = given(config)
    if from_manifest and fields:
        raise NormlabError(f"--from-manifest sets the whole configuration; leave out {', '.join(map(flag_of, fields))}")
    if ranks != 1:
        run_of = argument("--from-manifest", from_manifest) if from_manifest else TrainConfig(**fields).to_arguments()
        places = [*argument("--out", out), *(argument("--cache-dir", cache_dir) if cache_dir else [])]
        return start_ranks(ranks, ["train", *run_of, *places, *["--quiet"] * quiet])
    try:
        with stopped_by_signal() as watch:
            options: dict[str, Any] = {"cache_dir": cache_dir, "progress": not quiet, "watch": watch}
            if from_manifest:
                run = train_from_manifest(from_manifest, out, **options)
            else:
                run = train(TrainConfig(**fields), out, **options)
    except RunStopped:
        return fail(STOPPED, 128 + signal.SIGTERM)
    if not is_first_rank():
        return 0
    losses = {"unigram_entropy": run.manifest["corpus"]["unigram_entropy"]}
    losses |= {name: run.manifest[name] for name in COUNT_LOSSES}
    others = ", ".join(f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in losses.items() if loss is not None)
    print(f"{child(out, run.name)}: {run.outcome} ({others}), nats a token")
    return 0


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[Callable[..., bool] | None]:
    """What `train` asks after each step: False once this process got SIGTERM."""
    # Of several ranks, one could go on to a step that the other has been told to leave.
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or threading.current_thread() is not threading.main_thread():
        yield None
        return
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda *_: not asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


@command("sweep", "normlab.training.estimate")
def _sweep(
    *,
    preset: Annotated[
        str, flag(f"{_names('study.presets:PRESETS')}, or FILE.py:NAME; --dry-run lists their runs")
    ] = "tiny",
    schemes: Annotated[str | None, flag("only these, comma-separated")] = None,
    depths: Annotated[str | None, flag("only these, comma-separated")] = None,
    workers: Annotated[
        str | None,
        flag("runs at once; ray or slurm: on the machines of a cluster; default 2, with --threads cores/threads"),
    ] = None,
    address: Annotated[
        str | None, flag("of the Ray cluster (auto, HOST:PORT); for slurm, local tries the sweep here")
    ] = None,
    gpus: Annotated[float, flag("GPUs a run on a cluster, for ray shares of one too")] = 0.0,
    slurm: Annotated[
        list[str] | None, flag("NAME=VALUE, such as timeout_min=600 or slurm_partition=NAME"), REPEATED
    ] = None,
    threads: Annotated[Whole | None, flag("CPU threads a run; default cores/workers, on a cluster 1")] = None,
    dry_run: Annotated[bool, flag("print the runs in order, with hours where finished runs tell"), SWITCH] = False,
    time: Annotated[bool, flag("train a few steps for the other hours, with --dry-run"), SWITCH] = False,
    out: Annotated[str, flag(RUNS)],
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> int:
    """Train many models: scheme x depth x seed x learning rate; finished runs are skipped."""
    from normlab.study.presets import get_preset
    from normlab.training.estimate import plan
    from normlab.training.sweep import sweep

    if time and not dry_run:
        raise NormlabError("--time would change nothing without --dry-run")
    numbers = [whole(text, "--depths") for text in depths.split(",")] if depths else None
    chosen = get_preset(preset).only(schemes.split(",") if schemes else None, numbers)
    shared = {
        "workers": workers_of(
            workers, {"address": address, "gpus": gpus, "options": field_values(slurm or (), "--slurm")}
        ),
        "threads": threads,
        "cache_dir": cache_dir,
        "progress": not quiet,
    }
    if dry_run:
        print(plan(chosen, out, time=time, **shared).in_words())
        return 0
    result = sweep(chosen, out, **shared)
    counts = Counter(run.status for run in result.runs)
    print(f"{result.out}: {len(result.runs)} runs" + "".join(f", {n} {status}" for status, n in counts.items()))
    for name, reason in result.failures.items():
        print(f"normlab: failed: {name}: {reason}", file=sys.stderr)
    return 1 if result.failures else 0


def _write_csv(table: Any, path: str) -> None:
    from normlab.files import whole_file

    with whole_file(Path(path)) as staged:
        table.to_csv(staged, index=False)
    print(path)


def workers_of(workers: str | None, options: dict[str, Any]) -> Any:
    """A number of processes, or a `Cluster`. NormlabError for options that have no effect on it."""
    from normlab.training.workers import CLUSTERS, cluster

    flags = {"address": "--address", "gpus": "--gpus", "options": "--slurm"}
    taken = {spec.name for spec in dataclasses.fields(CLUSTERS[workers])} if workers in CLUSTERS else set()
    if idle := [flags[name] for name, value in options.items() if value and name not in taken]:
        raise NormlabError(f"{', '.join(idle)} would change nothing: leave out, or choose another --workers")
    if workers in CLUSTERS:
        return cluster(workers, **{name: value for name, value in options.items() if name in taken})
    return None if workers is None else whole(workers, "--workers")


@command("league", "normlab.study.league")
def _league(
    *runs: Annotated[str, flag("directories of runs of one recipe (default: the grid that comes with normlab)")],
    add: Annotated[
        list[str] | None,
        flag("train this scheme first, under the same recipe: a name, or FILE.py:NAME, a norm of your own"),
        REPEATED,
    ] = None,
    tiny: Annotated[
        bool, flag("with --add: in a minute, to see that it trains; its numbers mean nothing"), SWITCH
    ] = False,
    dtype: Annotated[str | None, flag("with --add: float32, where the processor has no bfloat16")] = None,
    out: Annotated[
        str | None, flag("directory for the runs of --add, shown with those of the table (default: league)")
    ] = None,
    csv: Annotated[str | None, flag("write the whole table to this CSV file")] = None,
    workers: Annotated[Whole | None, flag("runs of --add at once; default 2, with --threads cores/threads")] = None,
    threads: Annotated[Whole | None, flag("CPU threads a run of --add; default cores/workers")] = None,
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> int:
    """Show schemes that were trained under one recipe; --add trains one more and shows where it stands."""
    from normlab.analysis.published import load_published
    from normlab.study import league

    of_add = {"--tiny": tiny or None, "--dtype": dtype, "--out": out, "--workers": workers, "--threads": threads}
    of_add["--cache-dir"] = cache_dir
    if not add and (idle := [name for name, value in of_add.items() if value is not None]):
        raise NormlabError(f"{', '.join(idle)} would change nothing without --add")
    out = "league" if out is None else out
    folders = league.require_folders(runs) or ([] if tiny else [league.grid()])
    failures: dict[str, str] = {}
    if add:
        from normlab.study import entry

        preset = entry.preset_of(add, tiny, dtype)
        options: dict[str, Any] = {"workers": workers, "threads": threads, "cache_dir": cache_dir}
        entry.require_comparable(preset, [*folders, out], cache_dir, progress=not quiet)
        if not tiny:
            entry.require_precision(preset, out, **options, progress=not quiet)
            time = entry.hours(preset, out, **options, progress=not quiet)
            print(f"training {', '.join(add)} in {out}: about {time:.1f} hours here; a stopped command resumes")
        failures = entry.enter(add, out, preset, **options, progress=not quiet).failures
    table = league.standings(league.load([*folders, *[out] * bool(add)]), load_published(), league.step_times())
    print(league.printed(table))
    if csv:
        _write_csv(table, csv)
    for name, reason in failures.items():
        print(f"normlab: failed: {name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


@command("compare")
def _compare(
    a: Annotated[str, flag("scheme, or the name or directory of a run")],
    b: Annotated[str, flag("what it is compared with")],
    /,
    *,
    runs: Annotated[
        list[str] | None, flag("runs, or directories of runs (default: runs, else those of normlab)"), SEVERAL
    ] = None,
    metric: Annotated[str, flag("a name of normlab.figures.METRICS, or growth, deep_cost, early_cost, ...")] = "loss",
    depth: Annotated[Whole | None, flag("only this depth")] = None,
    width: Annotated[Whole | None, flag("default: the one with most runs")] = None,
    site: Annotated[str | None, flag("where it was measured; default: the metric's own site")] = None,
    layer: Annotated[Whole | None, flag("default: the last block")] = None,
    mask: Annotated[str, flag("all, or no_first: without each row's first token")] = "all",
    split: Annotated[str | None, flag("train, eval or probe; default for the loss: eval")] = None,
    step: Annotated[Whole | None, flag("optimizer steps done; default: the last")] = None,
    level: Annotated[float, flag("of confidence")] = 0.95,
) -> int:
    """Compare two schemes: their difference, paired by seed, with its interval."""
    from normlab import packed
    from normlab.analysis.compare import compare, report
    from normlab.runs import MANIFEST, load_runs, load_schemes, read_run
    from normlab.study.league import grid

    load = load_schemes
    if all((Path(name) / MANIFEST).is_file() or packed.holds(Path(name)) for name in (a, b)):
        if runs is not None:
            raise NormlabError(f"--runs would change nothing: {a} and {b} are directories of runs, leave it out")
        runs = [a, b]
        a, b = (read_run(name).name for name in runs)
        load = load_runs
        if a == b:
            raise NormlabError(f"{runs[0]} and {runs[1]} are runs of one configuration: name two that differ")
    if runs is None and not Path("runs").exists():
        runs = [str(grid())]
        print(f"normlab: there is no folder runs here: these are the runs of {runs[0]}", file=sys.stderr)
    place: dict[str, Any] = {"site": site, "layer": layer, "mask": mask, "split": split, "step": step}
    table = compare(load(runs or "runs"), a, b, metric, depth=depth, width=width, level=level, **place)
    print(report(table))
    return 0


@command("figures")
def _figures(
    runs: Annotated[list[str], flag("runs, or directories of runs"), SEVERAL],
    /,
    *,
    out: Annotated[str, flag("directory for the figures: HTML, and PNG where a Chrome is found")],
    depth: Annotated[Whole | None, flag("only runs of this depth; default: each figure chooses")] = None,
    quiet: Quiet = False,
) -> int:
    """Draw every figure of some runs."""
    from tqdm import tqdm

    from normlab.analysis import published, selection
    from normlab.export import save_images
    from normlab.files import whole_files
    from normlab.runs import load_experiments, load_schemes

    try:
        from normlab.figures import draw_all
        from normlab.figures.theme import CONFIG
    except ImportError as error:
        raise NormlabError(str(error)) from error
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise NormlabError(f"output {out} is a file; name a directory")
    every = load_schemes(runs)
    tables, drawn = {"runs": selection.of_depth(every, depth)}, {}
    try:
        measured = load_experiments(runs)
        tables["experiments"] = selection.of_depth(measured[measured["run"].isin(every["run"])], depth)
    except NormlabError as error:
        print(f"normlab: without the figures of what was measured after training: {error}", file=sys.stderr)
    figures = draw_all(tables, published.load_published())
    with whole_files(folder) as staged:
        for name, figure in tqdm(figures, "figures", disable=quiet, leave=False):
            drawn[name] = figure
            figure.write_html(staged / f"{name}.html", include_plotlyjs=True, config=CONFIG)
        images, missing = save_images(drawn, staged)
    written = [*(f"{name}.html" for name in drawn), *(path.name for path in images)]
    print("\n".join(str(folder / name) for name in written))
    if missing:
        print(f"normlab: {missing}", file=sys.stderr)
    return 0


@command("probe", "normlab.report")
def _probe(
    model: Annotated[str, flag("directory or hub name: language model, encoder of text, or of images")],
    /,
    *,
    text: Annotated[list[str], flag("text files, or folders of images, to run it on"), SEVERAL],
    against: Annotated[str | None, flag("another model, shown on the same page")] = None,
    revisions: Annotated[
        str | None, flag("its layers over training: hub revisions or folders in it, comma-separated")
    ] = None,
    device: Annotated[
        str | None, flag("cpu, cuda:1 ..., or auto to spread it; default: a GPU when there is one")
    ] = None,
    dtype: Annotated[str | None, flag("float32, bfloat16 or float16; default: as saved")] = None,
    out: Annotated[str | None, flag("directory for tables and report; default: named for the model")] = None,
    length: Annotated[Whole, flag("tokens per row")] = 256,
    rows: Annotated[Whole, flag("rows at most")] = 16,
    any_size: AnySize = False,
    quiet: Quiet = False,
) -> int:
    """Measure the layers of any model on texts or images."""
    from normlab.report import probe_report

    models = [model] if against is None else [model, against]
    names = revisions.split(",") if revisions else ()
    options: dict[str, Any] = {"out": out, "length": length, "rows": rows, "device": device, "dtype": dtype}
    options["any_size"] = any_size
    print(probe_report(models, text, revisions=names, progress=not quiet, **options))
    return 0


@command("diff", "normlab.report.difference")
def _diff(
    a: Annotated[str, flag("directory or hub name of a causal language model")],
    b: Annotated[str, flag("another, or a file of arrays (.npz, .safetensors) written on the same tokens")],
    /,
    *,
    text: Annotated[str, flag("text file to run both on")],
    gradients: Annotated[bool, flag("compare the gradients at the blocks' inputs too"), SWITCH] = False,
    dtype: Annotated[str | None, flag("in which the arrays of a file were computed; default: theirs")] = None,
    device: Annotated[str | None, flag("cpu, cuda:1 ...; default: a GPU when there is one")] = None,
    out: Annotated[str | None, flag("directory for the page and the table; default: none")] = None,
    length: Annotated[Whole, flag("tokens per row")] = 64,
    rows: Annotated[Whole, flag("rows at most")] = 4,
    any_size: AnySize = False,
    quiet: Quiet = False,
) -> int:
    """Name the first block and site at which two models part, and why."""
    from normlab.report.difference import difference_report

    options: dict[str, Any] = {"length": length, "rows": rows, "gradients": gradients, "dtype": dtype, "device": device}
    options["any_size"] = any_size
    print(difference_report(a, b, text, out=out, **options))
    return 0


@command("check", "normlab.models.check")
def _check(
    checkpoint: Annotated[str, flag("a .safetensors file, a folder of one or of shards, or a model of normlab")], /
) -> int:
    """Find faults in a checkpoint's files without running it: gains, rows, values, ties, dtypes. Exit code 1 if any."""
    from normlab.models.check import check

    found = check(checkpoint)
    print("\n".join(found) or f"{checkpoint}: no fault found")
    return 1 if found else 0


@command("export", "normlab.models.pretrained")
def _export(
    run: Annotated[str, flag("directory of a run that kept its weights, or a model that comes with normlab")],
    out: Annotated[str, flag("new folder; loading it needs normlab and trust_remote_code")],
    /,
) -> int:
    """Write a trained model as a folder that lm-eval and transformers load."""
    from normlab.models.pretrained import export_model

    print(export_model(run, out))
    return 0


@command("page", "normlab.models.pretrained")
def _page(
    *models: Annotated[str, flag("models that come with normlab, or directories of runs that kept their weights")],
    out: Annotated[str, flag("folder of the page")],
) -> int:
    """Write a page in which trained models run, and a reader changes their normalization."""
    from normlab.widgets.live import live_page

    print(live_page(models, out))
    return 0


@command("remove-norms", "normlab.experimental.norm_removal")
def _remove_norms(
    model: Annotated[str, flag("a Llama, a run that kept its weights, or a model that comes with normlab")],
    /,
    *,
    config: Annotated[_fields_of("experimental.norm_removal:RemovalConfig") | None, Parameter(name="*")] = None,  # type: ignore
    out: Annotated[str, flag("folder for the model and its losses; the same command resumes in it")],
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> int:
    """Make a trained model's norms fixed gains one by one, and fine-tune after each."""
    from normlab.experimental.norm_removal import MODEL, RemovalConfig, remove_norms

    table = remove_norms(model, out, RemovalConfig(**given(config)), cache_dir=cache_dir, progress=not quiet)
    print(table.round(4).to_string(index=False))
    print(Path(out) / MODEL)
    return 0


@command("bench", "normlab.training.loop")
def _bench(
    *,
    pairs: Annotated[Whole, flag("interleaved pairs; at least 9 for a result to quote")] = 9,
    schemes: Annotated[str | None, flag("schemes to compare with Pre-LN, comma-separated")] = None,
    threads: Annotated[Whole, flag("CPU threads")] = 1,
    out: Annotated[str, flag("CSV file for the ratios")] = "bench.csv",
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> int:
    """Time whole training steps against each other. It needs a checkout of normlab."""
    try:
        from benchmarks.timing import machine
        from benchmarks.training import bench
    except ImportError as error:
        raise NormlabError("the benchmarks are not installed: run normlab bench in a checkout of normlab") from error
    chosen: dict[str, Any] = {"schemes": schemes.split(",")} if schemes else {}
    table = bench(pairs, **chosen, threads=threads, cache_dir=cache_dir, progress=not quiet)
    print(table.round(4).to_string(index=False))
    if out:
        _write_csv(table.assign(**machine()), out)
    return 0


@command("schemes")
def _schemes(
    *, wide: Annotated[bool, flag("one line each, with family, whole sources, parameters and cost"), SWITCH] = False
) -> int:
    """List every scheme with formula and paper."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from normlab.schemes import SCHEMES

    if wide:
        from normlab.models.costs import table

        print(table().to_string(index=False))
        return 0
    listed = Table("name", "formula", "paper", box=None, pad_edge=False)
    for row in SCHEMES.values():
        listed.add_row(*map(Text, (row.name, row.formula, row.paper)))
    console = Console(width=100, highlight=False)
    with console.capture() as text:
        console.print(listed)
    print(text.get(), end="")
    return 0
