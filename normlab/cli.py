"""The command `normlab`: train, sweep, plan, compare, probe, figures, export, remove-norms, bench, schemes.

Bad input ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normlab.errors import NormlabError, ends_at_once, is_first_rank, show_warning, without_bars

PATIENCE = 5.0  # seconds
STOPPED = "stopped; the same command goes on from the last checkpoint"
# What takes long to import, before a command begins.
IMPORTED = {
    "train": "normlab.training.run",
    "sweep": "normlab.training.plan",
    "probe": "normlab.report",
    "export": "normlab.models.pretrained",
    "remove-norms": "normlab.training.removal",
    "bench": "normlab.bench.training",
}
RUNS = "directory of runs, or an address that fsspec knows, such as s3://..."


class _Parser(argparse.ArgumentParser):
    """argparse, with errors in our one-line form, and no flag that is guessed from its beginning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> Any:
        raise NormlabError(f"{message} (see `{self.prog} --help`)")


class Command(NamedTuple):
    """A row of the command's table."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 (some runs of a sweep failed) or 2 (bad input, full disk)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if strange := [argument for argument in arguments if argument.encode(errors="replace").decode() != argument]:
            raise NormlabError(f"{strange[0]!r} is not UTF-8; give it another name")
        with warnings.catch_warnings():
            warnings.showwarning = show_warning  # type: ignore[assignment]
            with ends_at_once(lambda: _fail(STOPPED, 130)):
                options = parse(arguments)
                importlib.import_module(IMPORTED.get(options.command, "normlab"))
            with without_bars() if getattr(options, "quiet", False) else contextlib.nullcontext():
                return int(COMMANDS[options.command].act(options))
    except NormlabError as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno is None:  # not the operating system's
            raise
        return _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        return _fail(STOPPED, 130)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line as a namespace. Only the flags of a command that is named are made:
    some are a training field each, which takes torch to know."""
    import normlab

    parser = _Parser(prog="normlab", description="What normalization does to a deep transformer, layer by layer.")
    parser.add_argument("--version", action="version", version=f"normlab {normlab.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        below = commands.add_parser(name, help=command.help)
        if name in arguments:
            command.add_flags(below)
    return parser.parse_args(arguments)


def _train_flags(parser: argparse.ArgumentParser) -> None:
    from normlab.training.config import TrainConfig
    from normlab.training.fields import add_flags

    parser.epilog = (
        "several processes or GPUs: torchrun --nproc-per-node N -m normlab train ... (--batch-size is of all together)"
    )
    add_flags(parser, TrainConfig)
    parser.add_argument("--from-manifest", metavar="PATH", help="repeat the run of this manifest.json or run directory")
    follow = "print what is measured as lines of JSON; take pause, train and stop from standard input, and end with it"
    parser.add_argument("--follow", action="store_true", help=follow)
    _add_output(parser, "runs")


def _add_output(parser: argparse.ArgumentParser, default: str | None, what: str = RUNS) -> None:
    parser.add_argument("--out", default=default, required=default is None, help=what)
    parser.add_argument("--cache-dir", help="directory for prepared corpora; default: the user's cache directory")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _sweep_flags(parser: argparse.ArgumentParser) -> None:
    from normlab.training.presets import PRESETS

    parser.add_argument("--preset", default="tiny", help=f"{', '.join(PRESETS)}; --dry-run tells how long it takes")
    parser.add_argument("--schemes", help="only these, comma-separated")
    parser.add_argument("--depths", help="only these, comma-separated")
    parser.add_argument("--workers", help="runs at once; ray or slurm: on the machines of a cluster; default 2")
    parser.add_argument("--address", help="of the Ray cluster (auto, HOST:PORT); for slurm, local tries the sweep here")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs a run on a cluster, for ray shares of one too")
    parser.add_argument(
        "--slurm", action="append", metavar="NAME=VALUE", help="such as timeout_min=600 or slurm_partition=NAME"
    )
    parser.add_argument("--threads", type=int, help="CPU threads a run; default cores/workers")
    parser.add_argument(
        "--dry-run", action="store_true", help="print runs, order and hours; train nothing but a few steps"
    )
    _add_output(parser, None)


def _plan_flags(parser: argparse.ArgumentParser) -> None:
    from normlab.training.config import TrainConfig
    from normlab.training.needs import MEMORY_GIB, MFU, PEAK_TFLOPS
    from normlab.training.sizes import SIZES

    parser.add_argument("size", help=", ".join(SIZES))
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of one machine (default: 1)")
    parser.add_argument("--scheme", help="default: the paper's own")
    (fsdp,) = (spec.metadata["help"] for spec in dataclasses.fields(TrainConfig) if spec.name == "fsdp")
    parser.add_argument("--fsdp", action="store_true", help=fsdp)
    parser.add_argument("--mfu", type=float, default=MFU, help=f"share of --tflops reached (default: {MFU})")
    parser.add_argument(
        "--tflops",
        type=float,
        default=PEAK_TFLOPS,
        help=f"a GPU's peak (default: {PEAK_TFLOPS:g}, an H100 in bfloat16)",
    )
    parser.add_argument(
        "--memory", type=float, default=MEMORY_GIB, help=f"GiB a GPU has for training (default: {MEMORY_GIB:g})"
    )


def _compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="scheme, or the name or directory of a run")
    parser.add_argument("b", help="what it is compared with")
    parser.add_argument("--runs", nargs="+", default=["runs"], help="runs, or directories of runs (default: runs)")
    parser.add_argument("--metric", default="loss", help="a name of normlab.figures.METRICS (default: held-out loss)")
    parser.add_argument("--depth", type=int, help="only this depth")
    parser.add_argument("--width", type=int, help="default: the one with most runs")
    parser.add_argument(
        "--site", help="where it was measured; default: the metric's own site, as normlab.figures has it"
    )
    parser.add_argument("--layer", type=int, help="default: the last block")
    parser.add_argument("--mask", default="all", help="all, or no_first: without each row's first token")
    parser.add_argument("--split", help="train, eval or probe; default for the loss: eval")
    parser.add_argument("--step", type=int, help="optimizer steps done; default: the last")
    parser.add_argument("--level", type=float, default=0.95, help="of confidence (default: 0.95)")


def _figures_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="runs, or directories of runs")
    parser.add_argument("--out", required=True, help="directory for the figures: HTML, and PNG where a Chrome is found")
    parser.add_argument("--depth", type=int, help="only runs of this depth; default: each figure chooses")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _probe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="directory or hub name: causal, masked, sequence-to-sequence, or of images")
    parser.add_argument("--text", required=True, nargs="+", help="text files, or folders of images, to run it on")
    parser.add_argument("--against", metavar="MODEL", help="another model, set beside it on one page")
    parser.add_argument("--revisions", help="its layers over training: hub revisions or folders in it, comma-separated")
    parser.add_argument("--device", help="cpu, cuda:1 ..., or auto to spread it; default: a GPU when there is one")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: as saved")
    parser.add_argument("--out", help="directory for the tables and the report; default: named for the model")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--rows", type=int, default=16, help="rows at most")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="directory of a run that kept its weights, or a model that comes with normlab")
    parser.add_argument("out", help="new folder; whoever loads it needs normlab and says trust_remote_code")


def _remove_norms_flags(parser: argparse.ArgumentParser) -> None:
    from normlab.training.fields import add_flags
    from normlab.training.removal import RemovalConfig

    parser.add_argument("model", help="a Llama, a run that kept its weights, or a model that comes with normlab")
    add_flags(parser, RemovalConfig)
    _add_output(parser, None, "folder for the model and the table of losses; the same command goes on in it")


def _bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs; at least 9 for a result to quote")
    parser.add_argument("--schemes", help="schemes to set against Pre-LN, comma-separated")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    _add_output(parser, "bench.csv", "CSV file for the ratios")


def _train(options: argparse.Namespace) -> int:
    from normlab.runs import COUNT_LOSSES, child
    from normlab.training.background import train_followed
    from normlab.training.config import TrainConfig
    from normlab.training.fields import flag_of, given
    from normlab.training.run import train, train_from_manifest

    shared = {"cache_dir": options.cache_dir, "progress": not options.quiet}
    fields = given(options, TrainConfig)
    if options.from_manifest and (fields or options.follow):
        flags = ", ".join([*map(flag_of, fields), *["--follow"] * options.follow])
        raise NormlabError(f"--from-manifest sets the whole configuration; leave out {flags}")
    if options.from_manifest:
        run = train_from_manifest(options.from_manifest, options.out, **shared)
    else:
        config = TrainConfig(**fields)
        if options.follow:
            train_followed(config, options.out, options.cache_dir)
            return 0
        run = train(config, options.out, **shared)
    if not is_first_rank():
        return 0
    losses = {"unigram_entropy": run.manifest["corpus"]["unigram_entropy"]}
    losses |= {name: run.manifest[name] for name in COUNT_LOSSES}
    beside = ", ".join(f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in losses.items() if loss is not None)
    print(f"{child(options.out, run.name)}: {run.status}, eval loss {run.eval_loss:.4f} ({beside}), nats a token")
    return 0


def _sweep(options: argparse.Namespace) -> int:
    from normlab.training.clusters import workers_of
    from normlab.training.fields import whole_number
    from normlab.training.plan import plan
    from normlab.training.presets import get_preset
    from normlab.training.sweep import sweep

    schemes = options.schemes.split(",") if options.schemes else None
    depths = [whole_number(text, "--depths") for text in options.depths.split(",")] if options.depths else None
    preset = get_preset(options.preset).only(schemes, depths)
    workers = workers_of(options.workers, options.address, options.gpus, options.slurm)
    shared = {"workers": workers, "threads": options.threads, "cache_dir": options.cache_dir}
    if options.dry_run:
        print(plan(preset, options.out, **shared, progress=not options.quiet).in_words())
        return 0
    result = sweep(preset, options.out, **shared, progress=not options.quiet)
    counts = Counter(run.status for run in result.runs)
    print(f"{result.out}: {len(result.runs)} runs" + "".join(f", {n} {status}" for status, n in counts.items()))
    for name, reason in result.failures.items():
        print(f"normlab: failed: {name}: {reason}", file=sys.stderr)
    return 1 if result.failures else 0


def _plan(options: argparse.Namespace) -> int:
    from normlab.training.needs import needs
    from normlab.training.sizes import get_size

    size = get_size(options.size)
    config = dataclasses.replace(size.config, scheme=options.scheme or size.config.scheme, fsdp=options.fsdp)
    given = {"mfu": options.mfu, "tflops": options.tflops, "memory_gib": options.memory}
    print(f"{options.size}   ({size.source})\n{needs(config, options.gpus, **given).in_words()}")
    if size.swept:
        print("\ntried by the paper: " + "; ".join(f"{name} {values}" for name, values in size.swept.items()))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from normlab.analysis.compare import compare, report
    from normlab.runs import MANIFEST, load_runs, read_run

    names, paths = [options.a, options.b], options.runs
    if all((Path(name) / MANIFEST).is_file() for name in names):
        paths, names = names, [read_run(name).name for name in names]
    table = load_runs(paths)
    where = {name: getattr(options, name) for name in ("site", "layer", "mask", "split", "step")}
    a, b = names
    found = compare(table, a, b, options.metric, depth=options.depth, width=options.width, level=options.level, **where)
    print(report(found, options.level))
    return 0


def _figures(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from normlab.analysis import published, selection
    from normlab.export import save_images
    from normlab.runs import load_experiments, load_runs

    try:
        from normlab.figures import draw_all
    except ImportError as error:
        raise NormlabError(str(error)) from error
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise NormlabError(f"output {out} is a file; name a directory")
    tables, drawn = {"runs": selection.of_depth(load_runs(options.runs), options.depth)}, {}
    try:
        tables["experiments"] = selection.of_depth(load_experiments(options.runs), options.depth)
    except NormlabError as error:
        print(f"normlab: without the figures of what was measured after training: {error}", file=sys.stderr)
    every = draw_all(tables, published.load_published())
    for name, figure in tqdm(every, "figures", disable=options.quiet, leave=False):
        drawn[name] = figure
        out.mkdir(parents=True, exist_ok=True)
        figure.write_html(out / f"{name}.html", include_plotlyjs=True)
    images, missing = save_images(drawn, out)
    print("\n".join(str(path) for path in [*(out / f"{name}.html" for name in drawn), *images]))
    if missing:
        print(f"normlab: {missing}", file=sys.stderr)
    return 0


def _probe(options: argparse.Namespace) -> int:
    from normlab.report import probe_report

    shape = {name: getattr(options, name) for name in ("out", "length", "rows", "against", "device", "dtype")}
    revisions = options.revisions.split(",") if options.revisions else ()
    print(probe_report(options.model, options.text, revisions=revisions, progress=not options.quiet, **shape))
    return 0


def _export(options: argparse.Namespace) -> int:
    from normlab.models.pretrained import export_model

    print(export_model(options.run, options.out))
    return 0


def _remove_norms(options: argparse.Namespace) -> int:
    from normlab.training.fields import given
    from normlab.training.removal import MODEL, RemovalConfig, remove_norms

    config = RemovalConfig(**given(options, RemovalConfig))
    shared = {"cache_dir": options.cache_dir, "progress": not options.quiet}
    print(remove_norms(options.model, options.out, config, **shared).round(4).to_string(index=False))
    print(Path(options.out) / MODEL)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from normlab.bench.training import bench

    chosen = {"schemes": options.schemes.split(",")} if options.schemes else {}
    shared = {"threads": options.threads, "cache_dir": options.cache_dir, "progress": not options.quiet}
    table = bench(options.pairs, **chosen, **shared)
    print(table.round(4).to_string(index=False))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.out, index=False)
        print(options.out)
    return 0


def _schemes(options: argparse.Namespace) -> int:
    from normlab.models.costs import table

    print(table().to_string(index=False))
    return 0


COMMANDS = {
    "train": Command("train one model and measure its layers", _train_flags, _train),
    "sweep": Command(
        "train many models: scheme x depth x seed x learning rate; finished runs are skipped", _sweep_flags, _sweep
    ),
    "plan": Command("what a model of a paper's size needs, and the commands that train it", _plan_flags, _plan),
    "compare": Command("difference between two schemes, paired by seed, with its interval", _compare_flags, _compare),
    "figures": Command("draw every figure of some runs", _figures_flags, _figures),
    "probe": Command("measure the layers of any model on texts or images", _probe_flags, _probe),
    "export": Command("a trained model as a folder that lm-eval and transformers load", _export_flags, _export),
    "remove-norms": Command(
        "a trained model's norms made fixed gains one by one, fine-tuned after each", _remove_norms_flags, _remove_norms
    ),
    "bench": Command("time whole training steps against each other", _bench_flags, _bench),
    "schemes": Command("every scheme with formula, paper, parameters and cost", lambda parser: None, _schemes),
}


def _fail(message: str, code: int = 2) -> int:
    if code == 2 and not is_first_rank():  # torchrun ends all ranks with the first that ends: the first one speaks
        time.sleep(PATIENCE)
    if code == 2 or is_first_rank():
        print(f"normlab: error: {' '.join(message.split())}", file=sys.stderr)
    return code
