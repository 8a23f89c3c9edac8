"""Cost of recording beside plain hooks, nnsight, TransformerLens and torchlens: time and memory over a bare pass.

    python -m benchmarks.probes --out data/bench/probes_cpu.csv

CPU seconds are the ones to read on a machine that does other work. A ratio is a case over the bare pass of the same
round. The case "the same again" is a second bare pass: the noise floor. Extra memory is the growth of peak resident
memory over a bare pass, one process per case. `kept_mib` is what a case must hold by its own account: for angles
between all pairs of layers, one batch of every layer's output.

Plain hooks compute what `record` computes by default, at the same sites and with the same masks, and no more. The other
tools keep tensors: the outputs of all blocks, and with a backward pass their gradients; the case "everything" keeps all
that the tool has. Only installed tools are measured (nnsight, torchlens).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
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
GRADIENTS = ("grad_l2_mean", "grad_l2_total")
PLAIN, LENS = "plain hooks, default metrics", "TransformerLens bridge, bare"
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


def plain_hooks(run: Case, model: Any, backward: bool) -> dict[str, list[float]]:
    """The default metrics by hooks written for this one model: sums over tokens, with and without the first."""
    sums: dict[str, Any] = {}

    def add(site: str, values: torch.Tensor) -> None:
        both = torch.stack([values.sum((1, 2)), values[:, :, 1:].sum((1, 2))])
        sums[site] = sums.get(site, 0) + both

    def note(site: str, x: torch.Tensor) -> None:
        h = x.detach().float()
        square, centred = h.square().sum(-1), h - h.mean(-1, keepdim=True)
        second = centred.square()
        variance = second.mean(-1)
        kurtosis = second.square().mean(-1) / variance.square()
        add(site, torch.stack([square.sqrt(), variance, square, h.abs().amax(-1), kurtosis]))
        if backward:
            x.register_hook(lambda gradient: add(f"{site}_grad", gradient.detach().float().norm(dim=-1)[None]))

    handles = []
    layers = model.model.layers
    for number, layer in enumerate(layers):
        norms = {"attn_norm_in": layer.input_layernorm, "mlp_norm_in": layer.post_attention_layernorm}
        for site, norm in norms.items():
            handles.append(norm.register_forward_pre_hook(lambda _, args, name=f"{site} {number}": note(name, args[0])))
        handles.append(layer.register_forward_hook(lambda *call, name=f"block_out {number}": note(name, call[2])))
    handles.append(layers[0].register_forward_pre_hook(lambda _, args: note("block_in", args[0])))
    handles.append(model.model.norm.register_forward_pre_hook(lambda _, args: note("final_norm_in", args[0])))
    run()
    for handle in handles:
        handle.remove()
    return {site: each.tolist() for site, each in sums.items()}


def all_cases(options: argparse.Namespace, backward: bool) -> dict[str, Case]:
    """A bare pass, without gradients or with a backward pass, and the same under one tool; no case if it is missing."""
    model, ids = llama(options)

    def bare() -> None:
        with torch.set_grad_enabled(backward):
            out = model(input_ids=ids, use_cache=False, **({"labels": ids} if backward else {}))
            if backward:
                out.loss.backward()
                model.zero_grad()

    cases: dict[str, Case] = {"bare": bare}
    if options.tool in OTHERS:
        try:
            return cases | OTHERS[options.tool](options, backward)
        except ImportError:
            return {}
    recorded = {
        "normlab, two reductions": TWO_REDUCTIONS,
        "normlab, default metrics": DEFAULT_METRICS,
        "normlab, all forward metrics but effective rank": ALL_BUT_RANK,
    }
    if backward:
        recorded = {
            "normlab, default metrics and gradients": (*DEFAULT_METRICS, *GRADIENTS),
            "normlab, all forward metrics but effective rank": ALL_BUT_RANK,
            "normlab, effective rank": ("update_effective_rank",),
        }
    cases["the same again"] = bare
    cases |= {name: partial(_recorded, bare, model, metrics) for name, metrics in recorded.items()}
    cases[PLAIN] = lambda: plain_hooks(bare, model, backward)
    return cases


def _nnsight_cases(options: argparse.Namespace, backward: bool) -> dict[str, Case]:
    import nnsight

    model, ids = llama(options)
    traced = nnsight.NNsight(model)

    def forward() -> None:
        with torch.no_grad():  # noqa: SIM117  nnsight reads the source of the statement below it
            with traced.trace(input_ids=ids, use_cache=False):
                nnsight.save([layer.output for layer in traced.model.layers])

    def both() -> None:
        with traced.trace(input_ids=ids, labels=ids, use_cache=False):
            outputs = [layer.output for layer in traced.model.layers]
            nnsight.save(outputs)
            with traced.output.loss.backward():
                nnsight.save([each.grad for each in reversed(outputs)])
        model.zero_grad()

    return {"nnsight, block outputs": both if backward else forward}


def _lens_cases(options: argparse.Namespace, backward: bool) -> dict[str, Case]:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model, ids = llama(options)
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)

    def cached(names_filter: Callable[[str], bool] | None) -> None:
        with torch.set_grad_enabled(backward):
            kind = {"return_type": "loss", "incl_bwd": True} if backward else {}
            bridge.run_with_cache(ids, names_filter=names_filter, **kind)
        model.zero_grad()

    def bare() -> None:
        with torch.set_grad_enabled(backward):
            out = bridge(ids, return_type="loss" if backward else "logits")
            if backward:
                out.backward()
        model.zero_grad()

    return {
        LENS: bare,
        "TransformerLens run_with_cache, block outputs": lambda: cached(
            lambda name: name.endswith("hook_out") and name.count(".") == 2
        ),
        "TransformerLens run_with_cache, everything": lambda: cached(None),
    }


def _torchlens_cases(options: argparse.Namespace, backward: bool) -> dict[str, Case]:
    import torchlens

    model, ids = llama(options)
    unlimited = torchlens.options.CaptureOptions(save_budget=None)  # else it refuses at half the free memory

    def everything() -> None:
        with torch.set_grad_enabled(backward):
            inputs = {"input_ids": ids, "use_cache": False, **({"labels": ids} if backward else {})}
            trace = torchlens.trace(model, input_kwargs=inputs, capture=unlimited)
            if backward:
                trace.log_backward(trace[trace.output_layers[0]].out)
        model.zero_grad()

    return {"torchlens trace, everything": everything}


OTHERS: dict[str, Callable[[argparse.Namespace, bool], dict[str, Case]]] = {
    "nnsight": _nnsight_cases,
    "TransformerLens": _lens_cases,
    "torchlens": _torchlens_cases,
}
TOOLS = ("normlab", *OTHERS)  # each in a process of its own: the others change torch's functions


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


def in_fresh_process(options: argparse.Namespace, backward: bool, *flags: str) -> Any:
    """What this script prints last when it is run for one depth, pass and tool; None if it fails."""
    command = [sys.executable, "-m", "benchmarks.probes", "--depths", str(options.depth), "--tool", options.tool]
    command += flags
    for name in ("width", "rows", "length", "vocabulary", "threads", "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    command.append("--backward" if backward else "--forward")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
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
        cases, baseline = _angle_cases(options), "bare"
    else:
        cases = all_cases(options, options.backward)
        baseline = LENS if options.memory.startswith("TransformerLens") else "bare"
    import pandas  # noqa: F401  loaded by the first table: its code is no part of what a pass holds

    for _ in range(2):  # the second settles where the first one's freed memory is used again
        cases[baseline]()
    before = _peak()
    cases[options.memory]()
    return _peak() - before


def bench(options: argparse.Namespace, backward: bool) -> list[dict[str, Any]]:
    """Time the cases of one tool and depth."""
    times = interleaved(working(all_cases(options, backward)), options.rounds)
    rows = []
    for name, rounds in times.items():
        if name == "bare" and options.tool != TOOLS[0]:
            continue
        row: dict[str, Any] = {"pass": "forward and backward" if backward else "forward", "case": name}
        row["depth"] = options.depth
        for index, clock in enumerate(("cpu", "wall")):
            mine, bare = ([each[index] for each in side] for side in (rounds, times["bare"]))
            row |= {f"{clock}_s": statistics.median(mine), f"{clock}_ratio": ratio(mine, bare)[0]}
        rows.append(row | {"extra_peak_mib": in_fresh_process(options, backward, "--memory", name)})
    return rows


def table(options: argparse.Namespace) -> pandas.DataFrame:
    """All depths, forward and with a backward pass.

    Returns:
        Columns `pass case depth cpu_s cpu_ratio wall_s wall_ratio extra_peak_mib kept_mib`, the shape and the machine.
    """
    import pandas

    rows: list[dict[str, Any]] = []
    for depth, backward, tool in product(options.depths, (False, True), TOOLS):
        asked = argparse.Namespace(**{**vars(options), "depth": depth, "tool": tool})
        rows += in_fresh_process(asked, backward) or []
    kept = (ANGLE_DEPTH + 1) * options.rows * options.length * ANGLE_WIDTH * 4 / 2**20
    asked = argparse.Namespace(**vars(options), depth=ANGLE_DEPTH)
    memory = in_fresh_process(asked, False, "--memory", ANGLES)
    rows.append({"pass": "forward", "case": ANGLES, "depth": ANGLE_DEPTH, "extra_peak_mib": memory, "kept_mib": kept})
    shape = {"width": options.width, "tokens": options.rows * options.length}
    shape |= {"threads": options.threads, "rounds": options.rounds}
    return pandas.DataFrame(rows).assign(**shape, **machine())


def main() -> None:
    """Measure, print the table, and write it to --out."""
    numbers = {"width": 768, "rows": 4, "length": 256, "vocabulary": 4096, "threads": 2, "rounds": 5}
    parser = arguments(__doc__, numbers)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48], help="default: 6 12 24 48")
    parser.add_argument("--memory", metavar="CASE", help="only measure the extra memory of this case, in MiB")
    parser.add_argument("--tool", choices=TOOLS, default=TOOLS[0], help="which, where one pass is measured")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--forward", action="store_true", help="only the forward pass of the first depth")
    one.add_argument("--backward", action="store_true", help="only that with a backward pass")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory or options.forward or options.backward:
        options.depth = options.depths[0]
        print(json.dumps(_measure_memory(options) if options.memory else bench(options, options.backward)))
    else:
        report(table(options), options.out, columns=9)


if __name__ == "__main__":
    run(main)
