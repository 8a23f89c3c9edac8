"""The launch of a row kernel: one documented choice from a row's width to a frozen configuration.

Nothing is tuned at run time.

The thresholds were counted first and then timed on an H200 (`data/bench/launch_nvidia_h200.csv`):

* A thread holds 8 to 32 elements of each operand. So a 16-bit row is read in 16-byte pieces with two to four in flight.
* Narrow rows share a program. It has at least 2,048 elements forward, 2,048 or 4,096 backward, to hide its latency.
* Forward, a row up to 32,768 wide stays in registers, at most 32 elements per thread.
* Backward keeps x, the gradient, the weight and the weight-gradient sum. At 8,192 columns the ahead-of-time builds for
  sm_80 and sm_90 do not spill; wider ones do.
* With a direction there are three vectors and three sums. A thread has half the elements, so that as many warps share a
  multiprocessor, and rows at most 4,096 columns (8,192 spill 80 bytes).
* Backward, a loop's next rows are fetched to shared memory, two tiles ahead (3 stages) where a row has at most 16 KB:
  three operands take 98 KB there. At 8,192 columns in 16 bits that is 1.3 to 1.6 times as fast as one tile ahead.
* Wider rows are split over programs: reductions first, then column tiles. The row is read twice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

MAX_FORWARD_WIDTH = 32_768
MAX_BACKWARD_WIDTH = 8_192
TILE_WIDTH = 1_024  # columns a program takes where no reduction ties a row together


@dataclass(frozen=True)
class Launch:
    """Launch of a row kernel.

    Args:
        block: columns in a program's tile (a power of two).
        rows: rows in the tile.
        warps: of 32 threads.
        whole: the tile holds whole rows.
        stages: of a loop over tiles; with 2 the next rows are fetched to shared memory during the present ones.
        resident_warps: of all programs that walk over rows on one multiprocessor.
    """

    block: int
    rows: int
    warps: int
    whole: bool = True
    stages: int = 2
    resident_warps: int = 16


def power_of_two(width: int) -> int:
    """The least power of two >= width.

    >>> power_of_two(1), power_of_two(127), power_of_two(4096)
    (1, 128, 4096)
    """
    return 1 << max(0, width - 1).bit_length()


def _warps(elements: int, most: int) -> int:
    """As many as leave 16 elements a thread, 4 at least."""
    return min(most, max(4, elements // 512))


@functools.cache
def forward(width: int, reduces: bool) -> Launch:
    """The forward kernel: whole rows where it reduces them itself and a program can hold them, at most TILE_WIDTH
    columns of some rows otherwise."""
    whole = reduces and width <= MAX_FORWARD_WIDTH
    block = power_of_two(width if whole else min(TILE_WIDTH, width))
    rows = max(1, min(16, 2048 // block))
    return Launch(block, rows, _warps(block * rows, 32), whole)


@functools.cache
def backward(width: int, has_statistic: bool, has_direction: bool = False, itemsize: int = 2) -> Launch:
    """The backward kernel, whose programs walk over many rows: whole ones where a statistic ties them together and a
    program can hold them. Rows of 2,048 columns without a statistic are halved, so that fewer programs share a column
    and fewer partial rows are summed.

    Args:
        itemsize: bytes of one of x's numbers.
    """
    registers = 2 if has_direction else 1  # of an element, against those of other functions
    whole = has_statistic and width <= MAX_BACKWARD_WIDTH // registers
    tile = TILE_WIDTH if has_statistic else min(2 * TILE_WIDTH, max(TILE_WIDTH, width // 2))
    block = power_of_two(width if whole else min(tile, width))
    elements = 1024 if has_direction else 4096 if has_statistic else 2048  # of a tile, at least
    rows = max(1, min(8, elements // block))
    stages = 3 if block * itemsize <= 16_384 else 2
    return Launch(block, rows, _warps(block * rows * registers, 16), whole, stages=stages)


@functools.cache
def reduction(width: int) -> Launch:
    """One program a row, walking over it: 4,096 columns at a time."""
    return Launch(min(4096, power_of_two(width)), 1, 8)


@functools.cache
def finish(width: int) -> Launch:
    """The sum of partial rows: some columns a program, so that 128 programs share the width; 16 KB of sums each."""
    block = min(512, max(32, power_of_two(width) // 128))
    return Launch(block, max(1, 2048 // block), 4)


@functools.cache
def moments(width: int) -> Launch:
    """Whole rows as `forward` takes them, and wider ones in blocks of 4,096 columns."""
    return forward(width if width <= MAX_FORWARD_WIDTH else 4096, True)


def changed(launch: Any, fields: str) -> Any:
    """A launch with some of its fields changed.

    >>> changed(Launch(1024, 1, 4), "whole=0 stages=3")
    Launch(block=1024, rows=1, warps=4, whole=False, stages=3, resident_warps=16)
    """
    values = dict(field.split("=") for field in fields.split())
    return replace(launch, **{name: type(getattr(launch, name))(int(value)) for name, value in values.items()})


def backward_programs(tiles: int, multiprocessors: int, launch: Launch) -> int:
    """Number of programs that walk over the rows: 16 warps per multiprocessor, at most one per tile.

    Each writes one fp32 partial row. At d = 4096 and 2 programs on each of 132 multiprocessors that is 4.3 MB; 16,384
    rows are 403 MB.
    The number fixes the order in which weight gradients are summed, so it depends on shape and device only.
    """
    return max(1, min(tiles, multiprocessors * max(1, launch.resident_warps // launch.warps)))
