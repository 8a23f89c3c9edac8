"""The kernel of `row_moments`: one read where a program holds the row. Conventions as in `row_kernels.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normlab_kernels import choices
from normlab_kernels.launch import launch as launch_kernel


@triton.jit
def _load(p_x, o_row, m_row, start, width, stride_x, BLOCK: tl.constexpr):
    """A tile in fp32, and its mask."""
    o_col = start + tl.arange(0, BLOCK)
    m_x = m_row[:, None] & (o_col < width)[None, :]
    return tl.load(p_x + o_row[:, None] * stride_x + o_col[None, :], mask=m_x, other=0.0).to(tl.float32), m_x


@triton.jit
def _scale(largest):
    """The power of two below a row's largest number, and its inverse, clamped so that both are normal numbers.

    Squares of what is divided by it neither overflow nor vanish.
    """
    bits = tl.cast(largest, tl.int32, bitcast=True) & 0x7F800000
    scale = tl.minimum(tl.maximum(tl.cast(bits, tl.float32, bitcast=True), 1.1754943508222875e-38), 8.5e37)
    return scale, 1.0 / scale


@triton.jit
def _sums(b_x, m_x, mean, inverse):
    """Sums over each row of a tile: squares of what is multiplied by `inverse`, and M2 and M4 about `mean`."""
    b_u = b_x * inverse[:, None]
    b_c = tl.where(m_x, b_x - mean[:, None], 0.0)
    b_square = b_c * b_c
    return tl.sum(b_u * b_u, 1), tl.sum(b_square, 1), tl.sum(b_square * b_square, 1)


@triton.jit
def row_moments_kernel(p_x, p_out, rows, width, stride_x, BLOCK: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """p_out (4, rows): M2, M4, max |x|, L2. A row that no program holds is read twice: first for its mean."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    count = tl.cast(width, tl.float32)
    if WHOLE:
        b_x, m_x = _load(p_x, o_row, m_row, 0, width, stride_x, BLOCK)
        mean = tl.sum(b_x, 1) / count
        largest = tl.max(tl.abs(b_x), 1)
        scale, inverse = _scale(largest)
        energy, m2, m4 = _sums(b_x, m_x, mean, inverse)
    else:
        mean = tl.zeros([ROWS], tl.float32)
        largest = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, BLOCK):
            b_x, m_x = _load(p_x, o_row, m_row, start, width, stride_x, BLOCK)
            mean += tl.sum(b_x, 1) / count
            largest = tl.maximum(largest, tl.max(tl.abs(b_x), 1))
        scale, inverse = _scale(largest)
        energy = tl.zeros([ROWS], tl.float32)
        m2 = tl.zeros([ROWS], tl.float32)
        m4 = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, BLOCK):
            b_x, m_x = _load(p_x, o_row, m_row, start, width, stride_x, BLOCK)
            b_energy, b_m2, b_m4 = _sums(b_x, m_x, mean, inverse)
            energy += b_energy
            m2 += b_m2
            m4 += b_m4
    largest = tl.where(energy != energy, energy, largest)  # a maximum may drop a NaN
    tl.store(p_out + o_row, m2, mask=m_row)
    tl.store(p_out + rows + o_row, m4, mask=m_row)
    tl.store(p_out + 2 * rows + o_row, largest, mask=m_row)
    tl.store(p_out + 3 * rows + o_row, tl.sqrt(energy) * scale, mask=m_row)


def launch(x: torch.Tensor) -> torch.Tensor:
    """(4, rows) in fp32 of 2-D x with last stride 1."""
    rows, width = x.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=x.device)
    chosen = choices.moments(width)
    launch_kernel(
        row_moments_kernel, (triton.cdiv(rows, chosen.rows),), x.device,
        x, out, rows, width, x.stride(0),
        BLOCK=chosen.block, ROWS=chosen.rows, WHOLE=chosen.block >= width, num_warps=chosen.warps,
    )  # fmt: skip
    return out


@torch.library.custom_op("normlab_kernels::row_moments", mutates_args=())
def row_moments(x: torch.Tensor) -> torch.Tensor:
    """`launch` for the compiler."""
    return launch(x)


@row_moments.register_fake
def _(x):
    return torch.empty(4, x.shape[0], dtype=torch.float32, device=x.device)
