"""Projection, residual add and a norm whose scale is known beforehand, in one matrix product.

    h = residual + a w^T,   y = weight act(factor_row h) + bias

leave the epilogue together: no second kernel reads h again. That needs the row's factor before the product is done.
A carried BHyT statistic and DyT's scalar give it. An exact statistic cannot.

A program takes one output tile after another (persistent). Operands come through tensor descriptors: the copy engine on
Hopper and later, plain loads elsewhere. The epilogue works on column slices of the accumulator. So residual, h and y of
a whole 128 x 256 tile are never in registers at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normlab_kernels.device_math import activate, gain


@triton.jit
def _halves(b_x):
    """The left and the right half of a tile's columns."""
    rows: tl.constexpr = b_x.shape[0]
    columns: tl.constexpr = b_x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(b_x, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def _slices(b_x, SLICES: tl.constexpr):
    """1, 2 or 4 equal column slices of a tile, from left to right."""
    slices = (b_x,)
    if SLICES == 2:
        slices = _halves(b_x)
    elif SLICES == 4:
        b_left, b_right = _halves(b_x)
        b_0, b_1 = _halves(b_left)
        b_2, b_3 = _halves(b_right)
        slices = (b_0, b_1, b_2, b_3)  # type: ignore[assignment]
    return slices


@triton.jit
def _finish_slice(
    b_acc, d_residual, d_h, d_y, p_weight, p_bias, b_factor, row, column, n_columns,
    ACT: tl.constexpr, FORM: tl.constexpr, FROM_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add the residual to a slice of the product, unless it is in there, and store h. Store the norm of h as y."""
    dtype = d_h.dtype
    if not FROM_RESIDUAL:
        b_acc += d_residual.load([row, column]).to(tl.float32)
    b_h = b_acc.to(dtype)
    d_h.store([row, column], b_h)
    o_col = column + tl.arange(0, b_acc.shape[1])
    m_col = o_col < n_columns
    b_w = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_y = activate(b_h.to(tl.float32) * b_factor[:, None], ACT, FORM) * b_w[None, :]
    if p_bias is not None:
        b_y += tl.load(p_bias + o_col, mask=m_col, other=0.0).to(tl.float32)[None, :]
    d_y.store([row, column], b_y.to(dtype))


@triton.jit
def linear_add_norm_kernel(
    d_a, d_proj, d_residual, d_h, d_y, p_weight, p_bias, p_scale, p_ms,
    n_rows, n_columns, n_inner, eps, inv_kappa,
    ACT: tl.constexpr, FORM: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, FROM_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute one (BLOCK_M, BLOCK_N) tile of h and y after another.

    d_ are descriptors: a (rows, inner) and proj (columns, inner). Those of residual, h and y (rows, columns) have
    blocks of BLOCK_N / SLICES columns. Tiles are taken GROUP rows at a time, so that neighbouring programs share
    operands in the cache. UPCAST: multiply in fp32, because the interpreter has no bf16 product. FLATTEN and
    FROM_RESIDUAL are those of `linear_choices.LinearLaunch`; with the latter the residual's block is a whole tile.
    """
    tiles_m = tl.cdiv(n_rows, BLOCK_M)
    tiles_n = tl.cdiv(n_columns, BLOCK_N)
    b_gain = gain(p_scale, inv_kappa)
    width: tl.constexpr = BLOCK_N // SLICES
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        group = tile // (GROUP * tiles_n)
        rows_here = tl.minimum(tiles_m - group * GROUP, GROUP)
        within = tile % (GROUP * tiles_n)
        row = (group * GROUP + within % rows_here) * BLOCK_M
        column = (within // rows_here) * BLOCK_N
        if FROM_RESIDUAL:
            b_acc = d_residual.load([row, column]).to(tl.float32)
        else:
            b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(tl.cdiv(n_inner, BLOCK_K)):
            b_a = d_a.load([row, k * BLOCK_K])
            b_p = d_proj.load([column, k * BLOCK_K])
            if UPCAST:
                b_a = b_a.to(tl.float32)
                b_p = b_p.to(tl.float32)
            b_acc = tl.dot(b_a, b_p.T, b_acc, input_precision="ieee")
        b_factor = tl.full((BLOCK_M,), 1.0, tl.float32) * b_gain
        if p_ms is not None:
            o_row = row + tl.arange(0, BLOCK_M)
            b_ms = tl.load(p_ms + o_row, mask=o_row < n_rows, other=1.0)
            b_factor *= tl.rsqrt(b_ms + tl.cast(eps, tl.float32))
        b_slices = _slices(b_acc, SLICES)
        for index in tl.static_range(SLICES):
            start = column + index * width
            _finish_slice(
                b_slices[index], d_residual, d_h, d_y, p_weight, p_bias, b_factor, row, start, n_columns,
                ACT, FORM, FROM_RESIDUAL,
            )  # fmt: skip
