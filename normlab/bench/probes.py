"""What recording costs: time and memory beside a bare pass, and beside TransformerLens and torchlens on the same model.

    python -m normlab.bench.probes --out data/bench

Times are medians over interleaved rounds, every second one in the opposite order, in CPU seconds of this process (all
its threads) and in wall seconds; CPU seconds are the ones to read on a machine that does other work. A ratio is the
median of the rounds' own: a case over the bare pass of the same round. The case "the same again" is a second bare pass:
how far two equal things are apart here. Extra memory is the growth of peak resident memory over
a bare pass, one process a case; `kept_mib` is what a case must hold by its own account: for angles between all pairs of
layers, one batch of every layer's output.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from normlab.errors import NormlabError
from normlab.probes import FORWARD_METRICS, angular_distance, record
from normlab.probes.metrics import DEFAULT_METRICS

TWO_REDUCTIONS = ("token_l2_mean", "feature_var_mean")
ALL_BUT_RANK = tuple(name for name in FORWARD_METRICS if name != "update_effective_rank")
ANGLES, ANGLE_DEPTH, ANGLE_WIDTH = "normlab, angular_distance, all pairs of 64 layers", 64, 128
Case = Callable[[], Any]


def llama(options: argparse.Namespace, queries_a_key: int = 2) -> tuple[Any, torch.Tensor]:
    """A stock Llama of random weights in evaluation mode, heads of 64, and a batch of random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=int(options.width * 8 / 3) // 32 * 32,
        num_hidden_layers=options.depth,
        num_attention_heads=max(1, options.width // 64),
        num_key_value_heads=max(1, options.width // (64 * queries_a_key)),
        max_position_embeddings=options.length,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval(), torch.randint(3, options.vocabulary, (options.rows, options.length))


def _recorded(run: Case, model: Any, metrics: Sequence[str]) -> None:
    with record(model, metrics) as recorder:
        run()
    recorder.stats()


def forward_cases(options: argparse.Namespace, only: str | None = None) -> dict[str, Case]:
    """Forward passes without gradients: bare, recorded, and by the other tools that are installed."""
    model, ids = llama(options)

    def bare() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    cases: dict[str, Case] = {
        "bare": bare,
        "normlab, two reductions": lambda: _recorded(bare, model, TWO_REDUCTIONS),
        "normlab, default metrics": lambda: _recorded(bare, model, DEFAULT_METRICS),
        "normlab, all forward metrics but effective rank": lambda: _recorded(bare, model, ALL_BUT_RANK),
    }
    if only is None or only.startswith("TransformerLens"):
        with contextlib.suppress(ImportError):
            cases |= _lens_cases(options)
    if only is None or only.startswith("torchlens"):
        with contextlib.suppress(ImportError):
            import torchlens

            plain, _ = llama(options)
            unlimited = torchlens.options.CaptureOptions(save_budget=None)  # else it refuses at half the free memory

            def torchlens_pass() -> None:
                with torch.no_grad():
                    torchlens.trace(plain, ids, capture=unlimited)

            cases["torchlens trace"] = torchlens_pass
    return cases


def _lens_cases(options: argparse.Namespace) -> dict[str, Case]:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model, ids = llama(options)
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)

    def cached(names_filter: Callable[[str], bool] | None) -> None:
        with torch.no_grad():
            bridge.run_with_cache(ids, names_filter=names_filter)

    return {
        "TransformerLens bridge, bare": torch.no_grad()(lambda: bridge(ids)),
        "TransformerLens run_with_cache, block outputs": lambda: cached(
            lambda name: name.endswith("hook_out") and name.count(".") == 2
        ),
        "TransformerLens run_with_cache": lambda: cached(None),
    }


def training_cases(options: argparse.Namespace) -> dict[str, Case]:
    """Forward and backward passes: bare, and recorded with ever more metrics."""
    model, ids = llama(options)

    def bare() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    recorded = {
        "normlab, default metrics and gradients": (*DEFAULT_METRICS, "grad_l2_mean", "grad_l2_total"),
        "normlab, all forward metrics but effective rank": ALL_BUT_RANK,
        "normlab, effective rank": ("update_effective_rank",),
    }
    cases: dict[str, Case] = {"bare": bare, "the same again": bare}
    return cases | {name: partial(_recorded, bare, model, metrics) for name, metrics in recorded.items()}


def interleaved(cases: dict[str, Case], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, wall seconds) of each case in every round; a first round warms up and drops what fails."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = []
        except Exception as error:
            print(f"{name} left out: {type(error).__name__}", file=sys.stderr)
    for number in range(rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            gc.collect()  # what the others leave in cycles is theirs
            cpu, wall = time.process_time(), time.perf_counter()
            cases[name]()
            found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return found


def extra_memory(options: argparse.Namespace, case: str) -> float | None:
    """MiB that a case adds to the peak resident memory of a bare pass, measured in a process of its own."""
    command = [sys.executable, "-m", "normlab.bench.probes", "--memory", case]
    for name in ("width", "depth", "rows", "length", "vocabulary", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    run = subprocess.run(command, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else None


def _peak() -> float:
    """Peak resident memory of this process in MiB. On Linux `ru_maxrss` begins at the size of the process that started
    this one, so its own account is read; elsewhere the system counts in KiB, macOS in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _angle_cases(options: argparse.Namespace) -> dict[str, Case]:
    model, ids = llama(argparse.Namespace(**{**vars(options), "depth": ANGLE_DEPTH, "width": ANGLE_WIDTH}))

    def bare() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    return {"bare": bare, ANGLES: lambda: angular_distance(model, [{"input_ids": ids}], progress=False)}


def _measure_memory(options: argparse.Namespace) -> float:
    if options.memory == ANGLES:
        cases = _angle_cases(options)
        baseline = "bare"
    else:
        cases = forward_cases(options, only=options.memory)
        baseline = "TransformerLens bridge, bare" if options.memory.startswith("TransformerLens") else "bare"
    import pandas  # noqa: F401  loaded by the first table: its code is no part of what a pass holds

    for _ in range(2):  # the second settles where the first one's freed memory is used again
        cases[baseline]()
    before = _peak()
    cases[options.memory]()
    return _peak() - before


def _table(options: argparse.Namespace) -> Any:
    import pandas

    rows = []
    for kind, cases in (("forward", forward_cases(options)), ("forward and backward", training_cases(options))):
        times = interleaved(cases, options.rounds)
        for name, own in times.items():
            row: dict[str, Any] = {"pass": kind, "case": name}
            for place, clock in enumerate(("cpu", "wall")):
                row[f"{clock}_s"] = statistics.median(each[place] for each in own)
                pairs = zip(own, times["bare"], strict=True)
                row[f"{clock}_ratio"] = statistics.median(a[place] / b[place] for a, b in pairs)
            row["extra_peak_mib"] = extra_memory(options, name) if kind == "forward" else float("nan")
            rows.append(row)
    kept = (ANGLE_DEPTH + 1) * options.rows * options.length * ANGLE_WIDTH * 4 / 2**20
    rows.append({"pass": "forward", "case": ANGLES, "extra_peak_mib": extra_memory(options, ANGLES), "kept_mib": kept})
    table = pandas.DataFrame(rows)
    about = {
        "width": options.width,
        "depth": options.depth,
        "tokens": options.rows * options.length,
        "threads": options.threads,
    }
    about |= {
        "rounds": options.rounds,
        "torch": torch.__version__,
        "processor": platform.machine(),
        "load_1min": round(os.getloadavg()[0], 1),
    }
    return table.assign(**about)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write `probes.csv` into --out."""
    parser = argparse.ArgumentParser(prog="python -m normlab.bench.probes", description="what recording costs")
    defaults = {"width": 512, "depth": 16, "rows": 8, "length": 512, "vocabulary": 4096, "threads": 2, "rounds": 5}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", help="directory for probes.csv")
    parser.add_argument("--memory", metavar="CASE", help="only measure the extra memory of this case, in MiB")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.memory:
        print(_measure_memory(options))
        return 0
    table = _table(options)
    print(table.iloc[:, :8].round(3).to_string(index=False))
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        table.to_csv(Path(options.out) / "probes.csv", index=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NormlabError as error:
        sys.exit(f"normlab: error: {error}")
