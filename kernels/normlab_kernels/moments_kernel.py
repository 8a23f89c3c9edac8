"""The kernel of `row_moments`: one read, moments of column blocks merged as they come. Conventions as in
`row_kernels.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normlab_kernels import ladder
from normlab_kernels.launch import on_device


@triton.jit
def row_moments_kernel(p_x, p_out, rows, width, stride_x, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """p_out (6, rows): mean, M2, M3, M4, max |x|, L2. A block's moments, taken about its own mean, are merged into
    the row's."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    seen = tl.zeros([], tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    m2 = tl.zeros([ROWS], tl.float32)
    m3 = tl.zeros([ROWS], tl.float32)
    m4 = tl.zeros([ROWS], tl.float32)
    largest = tl.zeros([ROWS], tl.float32)
    energy = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        o_col = start + tl.arange(0, BLOCK)
        m_x = m_row[:, None] & (o_col < width)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * stride_x + o_col[None, :], mask=m_x, other=0.0).to(tl.float32)
        here = tl.minimum(width - start, BLOCK).to(tl.float32)
        total = seen + here
        largest = tl.maximum(largest, tl.max(tl.abs(b_x), 1))
        energy += tl.sum(b_x * b_x, 1)
        b_mean = tl.sum(b_x, 1) / here
        b_c = tl.where(m_x, b_x - b_mean[:, None], 0.0)
        b_square = b_c * b_c
        b_2 = tl.sum(b_square, 1)
        b_3 = tl.sum(b_square * b_c, 1)
        b_4 = tl.sum(b_square * b_square, 1)
        apart = b_mean - mean
        step = apart / total
        cross = apart * step * seen * here  # what the two means' distance adds to M2
        m4 += b_4 + cross * step * step * (seen * seen - seen * here + here * here)
        m4 += 6.0 * step * step * (seen * seen * b_2 + here * here * m2) + 4.0 * step * (seen * b_3 - here * m3)
        m3 += b_3 + cross * step * (seen - here) + 3.0 * step * (seen * b_2 - here * m2)
        m2 += b_2 + cross
        mean += step * here
        seen = total
    largest = tl.where(energy != energy, energy, largest)  # a maximum may drop a NaN
    tl.store(p_out + o_row, mean, mask=m_row)
    tl.store(p_out + rows + o_row, m2, mask=m_row)
    tl.store(p_out + 2 * rows + o_row, m3, mask=m_row)
    tl.store(p_out + 3 * rows + o_row, m4, mask=m_row)
    tl.store(p_out + 4 * rows + o_row, largest, mask=m_row)
    tl.store(p_out + 5 * rows + o_row, tl.sqrt(energy), mask=m_row)


def launch(x: torch.Tensor) -> torch.Tensor:
    """(6, rows) in fp32 of 2-D x with last stride 1."""
    rows, width = x.shape
    out = torch.empty(6, rows, dtype=torch.float32, device=x.device)
    chosen = ladder.moments(width)
    on_device(row_moments_kernel, (triton.cdiv(rows, chosen.rows),), x.device)(
        x, out, rows, width, x.stride(0), BLOCK=chosen.block, ROWS=chosen.rows, num_warps=chosen.warps
    )
    return out
