"""Cost of recording: time and memory over a bare pass, also of TransformerLens and torchlens on the same model.

    python -m benchmarks.probes --out data/bench/probes_cpu.csv

CPU seconds are the ones to read on a machine that does other work. A ratio is a case over the bare pass of the same
round. The case "the same again" is a second bare pass: the noise floor. Extra memory is the growth of peak resident
memory over a bare pass, one process per case. `kept_mib` is what a case must hold by its own account: for angles
between all pairs of layers, one batch of every layer's output.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.timing import arguments, clocks, interleaved, machine, ratio, report, run
from normlab.probes import FORWARD_METRICS, angular_distance, record
from normlab.probes.metrics import DEFAULT_METRICS

if TYPE_CHECKING:
    import pandas

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


def working(cases: dict[str, Case]) -> dict[str, Callable[[], tuple[float, float]]]:
    """The clocks of the cases that run here; a line for each that fails."""
    sides = {}
    for name, case in cases.items():
        try:
            case()
            sides[name] = partial(_timed, case)
        except Exception as error:
            print(f"{name} left out: {type(error).__name__}", file=sys.stderr)
    return sides


def _timed(case: Case) -> tuple[float, float]:
    gc.collect()  # cycles that other cases leave are not this one's
    return clocks(case)


def extra_memory(options: argparse.Namespace, case: str) -> float | None:
    """MiB that a case adds to the peak resident memory of a bare pass, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.probes", "--memory", case]
    for name in ("width", "depth", "rows", "length", "vocabulary", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _peak() -> float:
    """Peak resident memory of this process in MiB.

    On Linux `ru_maxrss` begins at the size of the parent, so /proc is read. Elsewhere the unit is KiB, on macOS bytes.
    """
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


def bench(options: argparse.Namespace) -> pandas.DataFrame:
    """Time all cases.

    Returns:
        Columns `pass case cpu_s cpu_ratio wall_s wall_ratio extra_peak_mib kept_mib`, the shape and the machine.
    """
    import pandas

    rows = []
    for kind, cases in (("forward", forward_cases(options)), ("forward and backward", training_cases(options))):
        times = interleaved(working(cases), options.rounds)
        for name, rounds in times.items():
            row: dict[str, Any] = {"pass": kind, "case": name}
            for index, clock in enumerate(("cpu", "wall")):
                mine, bare = ([each[index] for each in side] for side in (rounds, times["bare"]))
                row |= {f"{clock}_s": statistics.median(mine), f"{clock}_ratio": ratio(mine, bare)[0]}
            row["extra_peak_mib"] = extra_memory(options, name) if kind == "forward" else float("nan")
            rows.append(row)
    kept = (ANGLE_DEPTH + 1) * options.rows * options.length * ANGLE_WIDTH * 4 / 2**20
    rows.append({"pass": "forward", "case": ANGLES, "extra_peak_mib": extra_memory(options, ANGLES), "kept_mib": kept})
    shape = {"width": options.width, "depth": options.depth, "tokens": options.rows * options.length}
    shape |= {"threads": options.threads, "rounds": options.rounds}
    return pandas.DataFrame(rows).assign(**shape, **machine())


def main() -> None:
    """Measure, print the table, and write it to --out."""
    numbers = {"width": 512, "depth": 16, "rows": 8, "length": 512, "vocabulary": 4096, "threads": 2, "rounds": 5}
    parser = arguments(__doc__, numbers)
    parser.add_argument("--memory", metavar="CASE", help="only measure the extra memory of this case, in MiB")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print(_measure_memory(options))
    else:
        report(bench(options), options.out, columns=8)


if __name__ == "__main__":
    run(main)
