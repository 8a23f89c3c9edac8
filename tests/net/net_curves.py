"""Twelve training curves: six schemes, two precisions, accumulation, a kill and a resume, two ranks."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from net_parts import ROOT, TINY, Json, text_in
from safetensors.torch import load_file

import normlab
from normlab import runs

STEPS, KILLED_AT = 20, 7
FIELDS: Json = TINY | {"steps": STEPS, "probe_every": 5, "eval_every": 5, "checkpoint_every": 3, "device": "cpu"}
ALONE, KILLED, TWO_RANKS = "alone", f"killed at step {KILLED_AT} and resumed", "two ranks"
LAUNCHED = (KILLED, TWO_RANKS)  # in processes of their own


@dataclass(frozen=True)
class Curve:
    """One curve. way: ALONE, KILLED or TWO_RANKS."""

    scheme: str
    dtype: str = "float32"
    accumulate: int = 1
    way: str = ALONE

    @property
    def name(self) -> str:
        parts = [self.scheme, self.dtype, f"accumulate {self.accumulate}" if self.accumulate > 1 else "", self.way]
        return ", ".join(part for part in parts if part and part != ALONE)


CURVES = [
    Curve("pre_rmsnorm"),
    Curve("bhyt"),
    Curve("complete_p"),
    Curve("tapernorm"),
    Curve("lns", accumulate=2),
    Curve("bhyt", "bfloat16"),
    Curve("dyt", "bfloat16", accumulate=2),
    Curve("lns", "bfloat16"),
    Curve("bhyt", way=KILLED),
    Curve("dyt", "bfloat16", accumulate=2, way=KILLED),
    Curve("tapernorm", way=TWO_RANKS),
    Curve("complete_p", "bfloat16", way=TWO_RANKS),
]


def trained(curve: Curve) -> Json:
    """The curve and what else the run measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = FIELDS | {"scheme": curve.scheme, "dtype": curve.dtype, "accumulate": curve.accumulate}
        config = normlab.TrainConfig(corpus=str(text_in(folder)), **fields)
        out, cache = folder / "out", folder / "cache"
        arguments = ["train", *config.to_arguments(), "--out", str(out), "--cache-dir", str(cache), "--quiet"]
        if curve.way == KILLED:
            _launch([__file__, str(KILLED_AT), *arguments], -signal.SIGKILL)
        elif curve.way == TWO_RANKS:
            _launch(["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "normlab", *arguments], 0)
        run = normlab.train(config, out, cache_dir=cache, progress=False)
        assert run.manifest["measured"]["resumed_from_step"] == (6 if curve.way == KILLED else 0)
        return _content(run)


def _launch(arguments: list[str], expected: int) -> None:
    """Run Python with these arguments on this checkout; AssertionError for another exit code than the expected one."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == expected, done.stderr


def _content(run: runs.Run) -> Json:
    """Losses as they are; every other metric as its number of values, their mean, and a hash of their bits."""
    table = pd.read_parquet(run.path / runs.STATS)
    is_loss = table["metric"].eq("loss") & table["site"].eq("model")
    losses = {split: rows["value"].tolist() for split, rows in table[is_loss].groupby("split")}
    keys = ["split", "site", "step", "layer", "mask"]
    metrics = {
        f"{metric}, {split}": {
            "values": len(rows),
            "mean": [float(rows["value"].mean())],
            "bits": _hash(rows.sort_values(keys)["value"].to_numpy().tobytes()),
        }
        for (metric, split), rows in table[~is_loss].groupby(["metric", "split"])
    }
    weights = load_file(run.path / runs.WEIGHTS)
    return {
        "loss": losses,
        "metrics": metrics,
        "weights": {
            "norm": [sum(weight.double().square().sum().item() for weight in weights.values()) ** 0.5],
            "bits": _hash(b"".join(key.encode() + weights[key].numpy().tobytes() for key in sorted(weights))),
        },
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _main(kill_at: int, arguments: list[str]) -> int:
    """The command `normlab`, killed after that many steps of its optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = []

    def count(*_: Any) -> None:
        steps.append(1)
        if len(steps) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    from normlab.cli import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2:]))
