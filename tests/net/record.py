"""Record the net's snapshots anew.

    python tests/net/record.py                 every cheap part: under two minutes
    python tests/net/record.py curves          the twelve training curves
    python tests/net/record.py norms schemes   these parts

Read the diff of tests/net/snapshots/ before you commit it: every line of it is a change that a user can see.
"""

import os
import sys
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / name) for name in ("", "kernels")]

import torch  # noqa: E402
from net import CURVES, PARTS  # noqa: E402
from net_compare import machine, write  # noqa: E402


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    if unknown := set(names) - {*PARTS, "curves"}:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}, curves")
    for name in names or PARTS:
        if name == "curves":
            path = write(name, machine(), {curve: part.record() for curve, part in CURVES.items()})
        else:
            path = write(name, PARTS[name].environment(), PARTS[name].record())
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
