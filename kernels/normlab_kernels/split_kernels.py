"""Reductions over rows that no program holds whole; the kernels of `row_kernels.py` then work on column tiles.

Conventions as in `row_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normlab_kernels.device_math import activate, gain, slope


@triton.jit
def row_statistics_kernel(
    p_x, p_residual, p_sum, p_mean, p_ms, rows, width, stride_x, stride_residual,
    STAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean and ms of one row a program, and the sum residual + x. LayerNorm's two moments are merged block by block
    (Chan), so that a large mean does not swallow the variance."""
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
    tl.store(p_ms + row, total / tl.cast(width, tl.float32))
    if STAT == 2:
        tl.store(p_mean + row, mean)


@triton.jit
def row_pull_kernel(
    p_grad, p_x, p_weight, p_scale, p_shift, p_mean, p_ms, p_along, p_mean_q,
    width, stride_grad, stride_x, eps, inv_kappa,
    STAT: tl.constexpr, ACT: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum(q (x - mean)) and, for LayerNorm, mean(q) of one row a program: the two numbers dx needs from the whole
    row."""
    row = tl.program_id(0).to(tl.int64)
    b_factor = gain(p_scale, inv_kappa) * tl.rsqrt(tl.load(p_ms + row) + tl.cast(eps, tl.float32))
    b_mean = tl.zeros([], tl.float32)
    if STAT == 2:
        b_mean = tl.load(p_mean + row)
    along = tl.zeros([], tl.float32)
    total_q = tl.zeros([], tl.float32)
    for start in range(0, width, BLOCK):
        o_col = start + tl.arange(0, BLOCK)
        m_col = o_col < width
        b_x = tl.load(p_x + row * stride_x + o_col, mask=m_col, other=0.0).to(tl.float32) - b_mean
        b_g = tl.load(p_grad + row * stride_grad + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_w = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_z = b_x * b_factor
        if p_shift is not None:
            b_z += tl.load(p_shift).to(tl.float32)
        b_q = b_g * b_w * slope(b_z, activate(b_z, ACT, FORM), ACT)
        along += tl.sum(b_q * b_x, 0)
        total_q += tl.sum(b_q, 0)
    tl.store(p_along + row, along)
    if STAT == 2:
        tl.store(p_mean_q + row, total_q / tl.cast(width, tl.float32))
