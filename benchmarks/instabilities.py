"""Seed instabilities into short trainings and see whether `observe` names the layer, and how long before the loss.

    python benchmarks/instabilities.py --out data/bench/instabilities.csv

A model of four blocks reads bytes of the Python standard library. Every 5 steps are measured. Cases of one block have a
right layer: its weights drift, its rate is raised, or its queries grow. A quiet run has none. One row per run:

    first_step, first_layer   the first departure that `Observer.explain` gives after the instability began
    loss_step                 the first step at which the loss is a spike, or not finite
"""

from __future__ import annotations

import argparse
import csv
import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import normlab
from normlab.probes.observe import LossSpikes

DEPTH, WIDTH, ROWS, LENGTH, RATE = 4, 32, 8, 64, 2e-3
STEPS, BEGINS, EVERY = 400, 200, 5


def text() -> torch.Tensor:
    """Bytes of modules of the standard library, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.tensor(list(data[:2_000_000]))


def drift(model: Any, optimizer: Any, block: int, seed: int) -> None:
    """The block's MLP output grows by 4% a step."""
    with torch.no_grad():
        model.model.layers[block - 1].mlp.down_proj.weight.mul_(1.04)


def query_growth(model: Any, optimizer: Any, block: int, seed: int) -> None:
    """The block's queries and keys grow by 4% a step."""
    with torch.no_grad():
        model.model.layers[block - 1].self_attn.q_proj.weight.mul_(1.04)
        model.model.layers[block - 1].self_attn.k_proj.weight.mul_(1.04)


def gain_growth(model: Any, optimizer: Any, block: int, seed: int) -> None:
    """The gain of the block's attention norm grows by 4% a step."""
    with torch.no_grad():
        model.model.layers[block - 1].input_layernorm.weight.mul_(1.04)


def raised_rate(model: Any, optimizer: Any, block: int, seed: int) -> None:
    """The block learns at thirty times the rate."""
    optimizer.param_groups[block]["lr"] = 30 * RATE


def quiet(model: Any, optimizer: Any, block: int, seed: int) -> None:
    """Nothing happens."""


KINDS: dict[str, Callable[[Any, Any, int, int], None]] = {
    f.__name__: f for f in (drift, query_growth, gain_growth, raised_rate, quiet)
}


def run(kind: str, block: int, seed: int, data: torch.Tensor, steps: int) -> dict[str, Any]:
    """Train once; the row of the table."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=DEPTH, num_attention_heads=4, vocab_size=256
    )
    model: nn.Module = LlamaForCausalLM(config)
    blocks = [list(layer.parameters()) for layer in model.model.layers]
    inside = {p for group in blocks for p in group}
    rest = [p for p in model.parameters() if p not in inside]
    optimizer = torch.optim.AdamW([{"params": group} for group in (rest, *blocks)], lr=RATE)
    places = torch.randint(len(data) - LENGTH, (steps, ROWS), generator=torch.Generator().manual_seed(seed))
    spikes, loss_step, first = LossSpikes(), None, None
    alarms = 0
    with normlab.observe(model, every=EVERY) as observer:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 50)
            if step >= BEGINS:
                KINDS[kind](model, optimizer, block, seed)
            ids = torch.stack([data[place : place + LENGTH] for place in places[step].tolist()])
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            observer.step(loss.item(), step)
            if step % EVERY == 0:
                left = observer.explain(step).table  # what leaves now
                alarms += len(left) > 0 and step < BEGINS
                if first is None and step >= BEGINS and len(left):
                    first = left.iloc[0]
            if spikes.score(loss.item()) > spikes.threshold and step >= BEGINS and loss_step is None:
                loss_step = step
            if not math.isfinite(loss.item()):
                break
    return {
        "kind": kind,
        "block": block if kind != "quiet" else "",
        "seed": seed,
        "steps": steps,
        "first_step": "" if first is None else int(first["step"]),
        "first_layer": "" if first is None else first["layer"],
        "first_site": "" if first is None else first["site"],
        "first_metric": "" if first is None else first["metric"],
        "loss_step": "" if loss_step is None else loss_step,
        "alarms_before": int(alarms),
    }


def rows(seeds: int, quiet_runs: int) -> Iterator[dict[str, Any]]:
    """Every kind at every block and seed, then quiet runs."""
    data = text()
    for seed in range(seeds):
        for kind in KINDS:
            for block in range(1, DEPTH + 1) if kind != "quiet" else ():
                yield run(kind, block, seed, data, STEPS)
    for seed in range(quiet_runs):
        yield run("quiet", 0, 100 + seed, data, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--quiet-runs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = None
        for row in rows(options.seeds, options.quiet_runs):
            writer = writer or csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
