"""The launch of the fused product, and the table of the shapes at which it was measured to win."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LinearLaunch:
    """Launch of the matrix product.

    Args:
        block_m, block_n, block_k: its tile.
        slices: column slices of the epilogue.
        stages: of the pipeline.
        group: rows of tiles in a group.
        programs: per multiprocessor.
        flatten: one loop over tiles and the inner dimension, so that an epilogue overlaps the next tile's fetches.
        from_residual: the accumulator starts as the residual's tile.
    """

    block_m: int
    block_n: int
    block_k: int
    slices: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 1
    flatten: bool = False
    from_residual: bool = False


# sm_90 and later: 178 registers and no spill in bf16 with 4 stages (data/bench/aot.csv), 208 KiB of shared memory.
HOPPER_LINEAR = LinearLaunch(128, 256, 64, slices=4, warps=8, stages=4)
HOPPER_LINEAR_NARROW = LinearLaunch(128, 128, 64, slices=2, warps=8, stages=4)
INTERPRETER_LINEAR = LinearLaunch(32, 64, 32, slices=4, warps=4, stages=1, group=2)

LEAST_GAIN = 1.02  # over addmm + norm, for the fused product to be taken


@dataclass(frozen=True)
class FusionWin:
    """A measured win of the fused product: from `rows` rows on, by this launch.

    It won at all of the timed numbers of rows from there on.
    """

    device: str
    width: int
    inner: int
    rows: int
    launch: LinearLaunch


# What `kernels/benchmarks/run.py` prints of `data/bench/linear_nvidia_h200.csv`.
FUSION_WINS = (
    FusionWin(
        "NVIDIA H200", 2048, 2048, 4096,
        LinearLaunch(128, 128, 64, slices=2, warps=4, stages=3, programs=2, from_residual=True),
    ),
    FusionWin("NVIDIA H200", 4096, 4096, 16_384, replace(HOPPER_LINEAR, stages=3, from_residual=True)),
)  # fmt: skip


def fusion_win(device: str, rows: int, width: int, inner: int) -> FusionWin | None:
    """The measured win that covers a product of that shape."""
    shape = (device, width, inner)
    wins = [win for win in FUSION_WINS if (win.device, win.width, win.inner) == shape and rows >= win.rows]
    return max(wins, key=lambda win: win.rows, default=None)


def linear(width: int) -> LinearLaunch:
    """The product's tile on Hopper and later where nothing was timed: 256 columns where the output has them."""
    return HOPPER_LINEAR if width >= 1024 else HOPPER_LINEAR_NARROW


def product(device: str, rows: int, width: int, inner: int) -> LinearLaunch:
    """The product's launch on a device of that name: the one that was measured to win, or else `linear`'s."""
    if device == "cpu":
        return INTERPRETER_LINEAR
    win = fusion_win(device, rows, width, inner)
    return linear(width) if win is None else win.launch
