"""Seed instabilities into short trainings: does `explain` name the layer, and how long before the loss shows it?

    python -m benchmarks.instabilities --readings build/instabilities --out data/bench/instabilities.csv

A model of six blocks reads bytes of the Python standard library at rate 2e-3 after 50 steps of warm-up. Every 5 steps
are measured. At step 150 one of `FAULTS` begins. Those of one block have a right layer, that block. Those of the whole
model have none: there only the step counts. Quiet runs, of several schemes and rates, have a warm-up and a decay.

The rule of `normlab.probes.observe` was chosen on the half "development". It was not changed for "test", whose seeds no
rule had seen. Earlier rules were judged on seeds 2, 3 and 204 to 207, which are now of "development".
Readings are kept in a folder, a file per run; runs that are there are not trained again. One row per run:

    named_step, layer, site, metric, z   what left its past first, at the fault's first step or later
    loss_step    the first step at which the loss shows the fault: it is not finite, or the mean of the last 10 losses
                 is 4 standard errors above the mean of the 50 before them
    spike_step   the first step that `LossSpikes`, the observer's own rule, calls a spike
    alarms       of a quiet run: steps at which something leaves
"""

from __future__ import annotations

import copy
import math
import statistics
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import normlab
from benchmarks.timing import arguments, report
from normlab.models import NormlabForCausalLM
from normlab.models.config import NormlabConfig
from normlab.probes.observe import LossSpikes, Readings

DEPTH, WIDTH, ROWS, LENGTH, RATE = 6, 32, 8, 64, 2e-3
WARM_UP, BEGINS, STEPS, EVERY = 50, 150, 500, 5
QUIET, DECAY = 1000, 300  # steps of a quiet run, and the last of them, in which the rate falls to 0
AFTER = 10  # steps trained on once the loss shows the fault
SCHEMES = ("pre_rmsnorm", "pre_layernorm")  # of the runs with faults, in turn by seed
SEEDS = {"development": range(4), "test": range(4, 8)}
QUIET_SEEDS = {"development": (*range(100, 104), *range(204, 208)), "test": range(300, 310)}
QUIET_RATES = (1e-3, 2e-3, 4e-3)
QUIET_SCHEMES = ("pre_rmsnorm", "pre_layernorm", "peri_ln", "post_rmsnorm", "lns", "bhyt", "sub_ln", "mix_ln")


@dataclass
class Run:
    """A training that can be copied in the middle."""

    seed: int
    scheme: str
    data: Tensor
    peak: float = 0.0  # of `massive_activation`
    row: Tensor | None = None  # of `duplicated_text`
    losses: list[float] = field(default_factory=list)
    tables: list[pd.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": DEPTH}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
        self.model = NormlabForCausalLM(NormlabConfig(scheme=self.scheme, vocab_size=256, **shape, **heads)).train()
        self.places = torch.Generator().manual_seed(self.seed)
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        blocks = [list(block.parameters()) for block in self.model.model.layers]
        inside = {p for block in blocks for p in block}
        rest = [p for p in self.model.parameters() if p not in inside]
        groups: list[Any] = [{"params": group} for group in (rest, *blocks)]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)

    def copy(self) -> Run:
        """The same run, to be trained on alone."""
        twin = copy.copy(self)
        twin.losses, twin.tables = list(self.losses), list(self.tables)
        twin.model = copy.deepcopy(self.model)
        twin.places = torch.Generator()
        twin.places.set_state(self.places.get_state())
        twin._make_optimizer()
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return twin

    def batch(self) -> Tensor:
        places = torch.randint(len(self.data) - LENGTH, (ROWS,), generator=self.places)
        return torch.stack([self.data[place : place + LENGTH] for place in places.tolist()])

    def train(self, until: int, rate: Callable[[int], float], fault: Fault | None = None) -> None:
        """Train to step `until`, or to `AFTER` steps after the loss shows the fault."""
        start = len(self.losses)
        shown = None
        with normlab.observe(self.model, every=EVERY, start=start) as observer:
            for step in range(start, until):
                for group in self.optimizer.param_groups:
                    group["lr"] = rate(step)
                ids = self.batch()
                if fault is not None:
                    ids = fault.before(self, ids, step)
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                observer.step(self.losses[-1], step)
                if fault is not None and shown is None and loss_shows(self.losses, step):
                    shown = step
                if not math.isfinite(self.losses[-1]) or (shown is not None and step >= shown + AFTER):
                    break
            self.tables.append(observer.to_pandas())

    def save(self, path: Path) -> None:
        """Keep the readings and the losses."""
        table = pd.concat(self.tables)
        losses = {"step": range(len(self.losses)), "site": "model", "metric": "loss", "mask": "all"}
        table = pd.concat([table[table["mask"] == "all"], pd.DataFrame({**losses, "value": self.losses})])
        table.assign(scheme=self.scheme).to_parquet(path, index=False)


def loss_shows(losses: list[float], step: int) -> bool:
    """True if the loss shows the fault at a step: see the module."""
    if not math.isfinite(losses[step]):
        return True
    before, last = losses[max(0, step - 59) : step - 9], losses[step - 9 : step + 1]
    if len(before) < 50:
        return False
    rise = statistics.fmean(last) - statistics.fmean(before)
    return rise > 4 * statistics.stdev(before) / math.sqrt(len(last))


# -- faults ----------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A thing that goes wrong from step `BEGINS` on, in one block or (`block` None) in the whole model."""

    act: Callable[[Run, Any, Tensor, int], Tensor | None]  # (run, block, ids, steps since it began) -> other ids
    block: int | None

    def before(self, run: Run, ids: Tensor, step: int) -> Tensor:
        """Act before a step; the batch to train on."""
        block = None if self.block is None else run.model.model.layers[self.block - 1]
        with torch.no_grad():
            other = self.act(run, block, ids, step - BEGINS)
        return ids if other is None else other


def output_growth(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The MLP's output matrix grows until its output overflows in float16."""
    _in_float16(block.mlp, since)
    block.mlp.down_proj.weight.mul_(_growth(run))


def query_growth(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """Queries and keys grow until a query overflows in float16."""
    _in_float16(block.self_attn.q_proj, since)
    block.self_attn.q_proj.weight.mul_(_growth(run))
    block.self_attn.k_proj.weight.mul_(_growth(run))


def gain_drift(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The gain of the MLP norm grows until the norm's output overflows in float16."""
    _in_float16(block.post_attention_layernorm, since)
    block.post_attention_layernorm.weight.mul_(_growth(run))


def decay_of_wrong_sign(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """Weight decay of the wrong sign: all weights of the block grow until its output overflows in float16."""
    _in_float16(block.mlp, since)
    for p in block.parameters():
        p.mul_(_growth(run) ** 0.4)


def massive_activation(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """A feature of the first token grows until the block's output overflows in float16."""
    _in_float16(block, since)
    if since == 0:
        run.peak = 0.5

        def add(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            peak = torch.zeros_like(out)
            peak[:, 0, 3] = run.peak
            return out + peak

        block.mlp.register_forward_hook(add)
    run.peak *= _growth(run) ** 1.5


def block_rate(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The block's rate is 30 times too high."""
    _group_of(run, block)["lr"] *= 30


def block_rate_ramp(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The block's rate grows."""
    _group_of(run, block)["lr"] *= _growth(run) ** (0.7 * since)


def bad_start(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The block starts anew, with weights 15 times too large."""
    if since == 0:
        torch.manual_seed(run.seed)
        for p in block.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.3)


def ascent(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The block's updates have the wrong sign."""
    _group_of(run, block)["maximize"] = True


def corruption(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """Each step adds noise to the block's matrices, 30% of their size."""
    noise = torch.Generator().manual_seed(since)
    for p in block.parameters():
        if p.ndim == 2:
            p.add_(torch.randn(p.shape, generator=noise) * p.std() * 0.3)


def rate(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The rate is 16 times too high. At this size 4 times does no harm."""
    for group in run.optimizer.param_groups:
        group["lr"] *= 16


def rate_ramp(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """The rate grows."""
    for group in run.optimizer.param_groups:
        group["lr"] *= _growth(run) ** (0.7 * since)


def no_warm_up(run: Run, block: Any, ids: Tensor, since: int) -> None:
    """Training resumes without the optimizer's state and without a warm-up, at 4 times the rate."""
    if since == 0:
        run.optimizer.state.clear()
    for group in run.optimizer.param_groups:
        group["lr"] *= 4


def poisoned_batch(run: Run, block: Any, ids: Tensor, since: int) -> Tensor | None:
    """One batch is random bytes."""
    return torch.randint(256, ids.shape, generator=torch.Generator().manual_seed(run.seed)) if since == 0 else None


def duplicated_text(run: Run, block: Any, ids: Tensor, since: int) -> Tensor | None:
    """For 60 steps every row is the same."""
    if since == 0:
        run.row = ids[:1]
    return run.row.expand_as(ids) if since < 60 else None


def _growth(run: Run) -> float:
    """The factor per step of what grows: 1.05 to 1.08, by seed."""
    return 1.05 + 0.01 * (run.seed % 4)


def _in_float16(module: nn.Module, since: int) -> None:
    """Have the module return what float16 holds, from the fault's first step on."""

    def cast(module: nn.Module, args: Any, out: Any) -> Any:
        return out.half().float() if isinstance(out, Tensor) else (out[0].half().float(), *out[1:])

    if since == 0:
        module.register_forward_hook(cast)


def _group_of(run: Run, block: Any) -> dict[str, Any]:
    return run.optimizer.param_groups[1 + list(run.model.model.layers).index(block)]


OF_A_BLOCK = (
    output_growth, query_growth, gain_drift, decay_of_wrong_sign, massive_activation, block_rate, block_rate_ramp,
    bad_start, ascent, corruption,
)  # fmt: skip
OF_THE_MODEL = (rate, rate_ramp, no_warm_up, poisoned_batch, duplicated_text)
FAULTS: dict[str, Callable[..., Tensor | None]] = {fault.__name__: fault for fault in (*OF_A_BLOCK, *OF_THE_MODEL)}


# -- runs ------------------------------------------------------------------------------------------------------------


def text() -> Tensor:
    """Bytes of modules of the standard library, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.tensor(list(data[:2_000_000]))


def block_of(kind: str, seed: int) -> int | None:
    """The block in which a fault is put; None for one of the whole model."""
    if FAULTS[kind] not in OF_A_BLOCK:
        return None
    return (5 * seed + 2 * list(FAULTS).index(kind) + 2) % DEPTH + 1


def warmed_up(step: int) -> float:
    return RATE * min(1, (step + 1) / WARM_UP)


def quiet_rate(seed: int) -> Callable[[int], float]:
    """Warm-up, a constant rate, and a decay by a cosine."""
    top = QUIET_RATES[seed % 100 % len(QUIET_RATES)]

    def rate(step: int) -> float:
        done = max(0, step - (QUIET - DECAY)) / DECAY
        return top * min(1, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))

    return rate


def train_all(folder: Path) -> None:
    """Train every run whose readings are not in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = text()
    for seed in (seed for half in SEEDS.values() for seed in half):
        missing = [kind for kind in FAULTS if not (folder / f"{kind}-{seed}.parquet").exists()]
        before = Run(seed, SCHEMES[seed % len(SCHEMES)], data)
        if missing:
            before.train(BEGINS, warmed_up)
        for kind in missing:
            run = before.copy()
            run.train(STEPS, warmed_up, Fault(FAULTS[kind], block_of(kind, seed)))
            run.save(folder / f"{kind}-{seed}.parquet")
    for seed in (seed for half in QUIET_SEEDS.values() for seed in half):
        if not (folder / f"quiet-{seed}.parquet").exists():
            run = Run(seed, QUIET_SCHEMES[seed % 100 % len(QUIET_SCHEMES)], data)
            run.train(QUIET, quiet_rate(seed))
            run.save(folder / f"quiet-{seed}.parquet")


# -- what `explain` says ---------------------------------------------------------------------------------------------


def judged(folder: Path, half: str, kind: str, seed: int) -> dict[str, Any]:
    """The row of a run."""
    table = pd.read_parquet(folder / f"{kind}-{seed}.parquet")
    losses = table.loc[table["metric"] == "loss", "value"].tolist()
    readings = Readings(keep=len(losses))
    readings.add(table[table["metric"] != "loss"])
    row = {"half": half, "kind": kind, "seed": seed, "scheme": table["scheme"].iloc[0], "steps": len(losses)}
    if kind == "quiet":
        since, alarms = 0, 0
        while len(left := readings.explain(since).table):
            since, alarms = int(left["step"].iloc[0]) + 1, alarms + 1
        return row | {"alarms": alarms}
    spikes = LossSpikes()
    spiked = [step for step, loss in enumerate(losses) if spikes.score(loss) > spikes.threshold and step >= BEGINS]
    shown = [step for step in range(BEGINS, len(losses)) if loss_shows(losses, step)]
    row |= {"block": block_of(kind, seed), "begins": BEGINS}
    row |= {"loss_step": next(iter(shown), None), "spike_step": next(iter(spiked), None)}
    left = readings.explain(BEGINS).table
    if len(left):
        row |= left.iloc[0].rename({"step": "named_step"})[["named_step", "layer", "site", "metric", "z"]].to_dict()
    return row


def main() -> None:
    """Train what is missing, and write the table."""
    parser = arguments(__doc__, {"threads": 1})
    parser.add_argument("--readings", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train_all(options.readings)
    faults = [(half, kind, seed) for half, seeds in SEEDS.items() for kind in FAULTS for seed in seeds]
    quiet = [(half, "quiet", seed) for half, seeds in QUIET_SEEDS.items() for seed in seeds]
    table = pd.DataFrame([judged(options.readings, *run) for run in (*faults, *quiet)])
    whole = ["block", "begins", "loss_step", "spike_step", "named_step", "layer", "alarms"]
    report(table.astype(dict.fromkeys(whole, "Int64")).round({"z": 1}), options.out)


if __name__ == "__main__":
    main()
