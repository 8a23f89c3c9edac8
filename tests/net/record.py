"""Record the net's snapshots anew.

    python tests/net/record.py                all parts
    python tests/net/record.py help schemes   these parts

Read the diff of tests/net/snapshots/ before you commit it: every line of it is a change that a user can see.
"""

import os
import sys
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / name) for name in ("", "kernels")]

from net import PARTS, WORDED  # noqa: E402
from net_compare import environment, write  # noqa: E402


def main(names: list[str]) -> None:
    if unknown := set(names) - {*PARTS}:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    for name in names or PARTS:
        path = write(name, environment() if name in WORDED else {}, PARTS[name]())
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
