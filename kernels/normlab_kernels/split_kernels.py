"""Reductions over rows that no program holds whole; the kernels of `row_kernels.py` then work on column tiles.

Conventions as in `row_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normlab_kernels.device_math import activate, compressed_mean_square, gain, slope, tanh


@triton.jit
def row_statistics_kernel(
    p_x, p_residual, p_direction, p_sum, p_mean, p_ms, rows, width, stride_x, stride_residual,
    STAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean (or x . direction) and ms of one row per program, and the sum residual + x.

    LayerNorm's two moments are merged block by block (Chan), so that a large mean does not swallow the variance.
    """
    row = tl.program_id(0).to(tl.int64)
    seen = tl.zeros([], tl.float32)
    mean = tl.zeros([], tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, width, BLOCK):
        o_col = start + tl.arange(0, BLOCK)
        m_col = o_col < width
        b_x = tl.load(p_x + row * stride_x + o_col, mask=m_col, other=0.0).to(tl.float32)
        if p_residual is not None:
            b_x += tl.load(p_residual + row * stride_residual + o_col, mask=m_col, other=0.0).to(tl.float32)
            b_sum = b_x.to(p_sum.dtype.element_ty)
            tl.store(p_sum + row * width + o_col, b_sum, mask=m_col)
            b_x = b_sum.to(tl.float32)
        if STAT == 2:
            here = tl.minimum(width - start, BLOCK).to(tl.float32)
            mean_here = tl.sum(b_x, 0) / here
            b_x = tl.where(m_col, b_x - mean_here, 0.0)
            apart = mean_here - mean
            total += tl.sum(b_x * b_x, 0) + apart * apart * seen * here / (seen + here)
            mean += apart * here / (seen + here)
            seen += here
        else:
            total += tl.sum(b_x * b_x, 0)
            if STAT == 4:
                mean += tl.sum(b_x, 0)
            if p_direction is not None:
                mean += tl.sum(b_x * tl.load(p_direction + o_col, mask=m_col, other=0.0).to(tl.float32), 0)
    count = tl.cast(width, tl.float32)
    ms = total / count
    if STAT == 4:
        mean = mean / count
        ms = compressed_mean_square(ms, mean, count)
    tl.store(p_ms + row, ms)
    if p_mean is not None:
        tl.store(p_mean + row, mean)


@triton.jit
def row_pull_kernel(
    p_grad, p_x, p_weight, p_scale, p_shift, p_gated, p_mean, p_ms, p_along, p_second,
    width, stride_grad, stride_x, eps, inv_kappa,
    STAT: tl.constexpr, ACT: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The two numbers that dx needs from a whole row, one row per program (see `norm_backward_kernel`).

    The first is sum(q (x - mean)). The second is mean(q) for LayerNorm, and turn with a direction.
    """
    row = tl.program_id(0).to(tl.int64)
    b_factor = gain(p_scale, inv_kappa) * tl.rsqrt(tl.load(p_ms + row) + tl.cast(eps, tl.float32))
    b_mean = tl.zeros([], tl.float32)
    if STAT == 2:
        b_mean = tl.load(p_mean + row)
    b_gate = tl.zeros([], tl.float32)
    if p_gated is not None:
        b_gate = tanh(tl.load(p_mean + row), 0)
    along = tl.zeros([], tl.float32)
    second = tl.zeros([], tl.float32)
    for start in range(0, width, BLOCK):
        o_col = start + tl.arange(0, BLOCK)
        m_col = o_col < width
        b_x = tl.load(p_x + row * stride_x + o_col, mask=m_col, other=0.0).to(tl.float32) - b_mean
        b_g = tl.load(p_grad + row * stride_grad + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_w = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_z = b_x * b_factor
        if p_shift is not None:
            b_z += tl.load(p_shift).to(tl.float32)
        b_t = activate(b_z, ACT, FORM)
        if p_gated is not None:
            b_gated = tl.load(p_gated + o_col, mask=m_col, other=0.0).to(tl.float32)
            b_w += b_gate * b_gated
            second += tl.sum(b_g * b_t * b_gated, 0)
        b_q = b_g * b_w * slope(b_z, b_t, ACT)
        along += tl.sum(b_q * b_x, 0)
        if STAT == 2:
            second += tl.sum(b_q, 0)
    tl.store(p_along + row, along)
    if STAT == 2:
        tl.store(p_second + row, second / tl.cast(width, tl.float32))
    if p_gated is not None:
        tl.store(p_second + row, second * (1.0 - b_gate * b_gate))
