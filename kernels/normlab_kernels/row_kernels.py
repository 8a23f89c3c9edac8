"""The two kernels of every row norm: forward and backward.

WHOLE: a program's tile holds whole rows, and the kernel reduces them itself, with one read and one write. Otherwise a
tile is some columns of some rows. What belongs to a whole row then comes from outside (`split_kernels.py`). DyT, Derf,
ISRU and forward BHyT with a carried statistic need nothing of a whole row.

p_mean holds the number of a row that goes with its mean square: its mean or, where there is a direction, x . direction.

Prefixes: p_ pointer, o_ offset, m_ mask, b_ block of values. Tensors are row-major with last stride 1. Row offsets are
int64. A pointer is None for what a function lacks or nobody wants. All is upcast to fp32 right after its load and
rounded once, at its store. STAT and ACT are the integers of `spec.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normlab_kernels.device_math import activate, compressed_mean_square, gain, own_rstd, slope, tanh


@triton.jit
def statistics(b_x, m_x, width, STAT: tl.constexpr):
    """(mean, ms) of each row of a tile that holds whole rows; columns past the width hold 0."""
    count = tl.cast(width, tl.float32)
    mean = tl.zeros([b_x.shape[0]], tl.float32)
    if STAT == 2 or STAT == 4:
        mean = tl.sum(b_x, 1) / count
    if STAT == 2:
        b_x = tl.where(m_x, b_x - mean[:, None], 0.0)
    ms = tl.sum(b_x * b_x, 1) / count
    if STAT == 4:
        ms = compressed_mean_square(ms, mean, count)
    return mean, ms


@triton.jit
def norm_forward_kernel(
    p_x, p_residual, p_weight, p_bias, p_scale, p_shift, p_direction, p_mean, p_ms, p_correction, p_y, p_sum,
    rows, width, stride_x, stride_residual, stride_correction, eps, inv_kappa,
    STAT: tl.constexpr, ACT: tl.constexpr, FORM: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = weight act(gain (x - mean) rstd + shift) + bias h of a tile.

    With a residual, x is first replaced by residual + x. If the kernel reduces the rows, it writes p_mean and p_ms.
    Otherwise it reads them, and a correction is added to the mean square.
    """
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    m_col = (o_col < width) | EVEN
    m_x = m_row[:, None] & m_col[None, :]
    b_x = tl.load(p_x + o_row[:, None] * stride_x + o_col[None, :], mask=m_x, other=0.0).to(tl.float32)
    if p_residual is not None:
        o_residual = o_row[:, None] * stride_residual + o_col[None, :]
        b_x += tl.load(p_residual + o_residual, mask=m_x, other=0.0).to(tl.float32)
        b_sum = b_x.to(p_sum.dtype.element_ty)
        tl.store(p_sum + o_row[:, None] * width + o_col[None, :], b_sum, mask=m_x)
        b_x = b_sum.to(tl.float32)  # the norm sees what the next layer will read
    b_factor = tl.full([ROWS], 1.0, tl.float32) * gain(p_scale, inv_kappa)
    if p_ms is not None:
        if WHOLE and STAT != 3:
            b_mean, b_ms = statistics(b_x, m_x, width, STAT)
            if p_direction is not None:
                b_direction = tl.load(p_direction + o_col, mask=m_col, other=0.0).to(tl.float32)
                b_mean = tl.sum(b_x * b_direction[None, :], 1)
            tl.store(p_ms + o_row, b_ms, mask=m_row)
            if p_mean is not None:
                tl.store(p_mean + o_row, b_mean, mask=m_row)
        else:
            b_ms = tl.load(p_ms + o_row, mask=m_row, other=1.0)
            if p_correction is not None:
                b_ms += tl.load(p_correction + o_row * stride_correction, mask=m_row, other=0.0).to(tl.float32)
            b_mean = tl.zeros([ROWS], tl.float32)
            if p_mean is not None:
                b_mean = tl.load(p_mean + o_row, mask=m_row, other=0.0)
        if STAT == 2:
            b_x = b_x - b_mean[:, None]
        b_factor *= tl.rsqrt(b_ms + tl.cast(eps, tl.float32))
    b_z = b_x * b_factor[:, None]
    if STAT == 5:
        b_z = b_x * own_rstd(b_x, p_scale, tl.cast(width, tl.float32))
    if p_shift is not None:
        b_z += tl.load(p_shift).to(tl.float32)
    b_w = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_t = activate(b_z, ACT, FORM)
    b_y = b_t * b_w[None, :]
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_col, mask=m_col, other=0.0).to(tl.float32)[None, :]
        if p_direction is not None:
            b_bias = b_bias * tanh(b_mean, 0)[:, None] * b_t
        b_y += b_bias
    tl.store(p_y + o_row[:, None] * width + o_col[None, :], b_y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit
def norm_backward_kernel(
    p_grad, p_grad_sum, p_grad_ms, p_x, p_weight, p_scale, p_shift, p_gated, p_direction, p_mean, p_ms,
    p_along, p_second, p_dx, p_dms, p_parts,
    rows, width, stride_grad, stride_grad_sum, stride_x, eps, inv_kappa,
    STAT: tl.constexpr, ACT: tl.constexpr, FORM: tl.constexpr,
    WANT_WEIGHT: tl.constexpr, WANT_BIAS: tl.constexpr, WANT_SCALE: tl.constexpr, WANT_SHIFT: tl.constexpr,
    WANT_DIRECTION: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every row, d(ms) of a given statistic, and parts of the wanted parameters' gradients.

    The parts are one fp32 row per program and parameter, in p_parts as `parameter_gradients_kernel` reads them.

    With q = d loss / d z = grad weight act'(z), factor = gain rstd and pull = d loss / d ms,

        RMS    dx = factor q + (2/d) x pull,             pull = grad_ms - 1/2 factor rstd^2 sum(q x)
        LAYER  dx = factor (q - mean(q) - xhat mean(q xhat)),  xhat = (x - mean) rstd
        GIVEN  dx = factor q,                            d ms = -1/2 factor rstd^2 sum(q x)
        NONE   dx = gain q
        COMPRESSED  dx = factor q + (2/(d + 1)) (x + sum(x)) pull,  pull as for RMS
        OWN    dx = q rstd^3 |scale|/d

    and d scale = (1/kappa) sum over rows of rstd sum(q x); OWN's -1/2 sign(scale)/d sum over rows of sum(q rstd^3 x).
    With a direction, gate = tanh(x . direction), and the weight is weight + gate p_gated. Then

        turn = d loss / d (x . direction) = (1 - gate^2) sum(grad p_gated act(z))

    is added to dx, times direction. d direction = sum over rows of turn x. Program p takes the tiles p, p + programs
    and so on. Where the tile is not WHOLE, p_along = sum(q x) and p_second (mean(q) or turn) are read.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.program_id(1)
    o_col = column * BLOCK + tl.arange(0, BLOCK)
    m_col = (o_col < width) | EVEN
    b_w = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_gain = gain(p_scale, inv_kappa)
    b_by_scale = tl.cast(inv_kappa, tl.float32)  # d gain / d scale
    count = tl.cast(width, tl.float32)
    if STAT == 5:  # the constants of dx and of d scale
        b_scale = tl.load(p_scale).to(tl.float32)
        b_gain = tl.abs(b_scale) / count
        b_by_scale = ((b_scale < 0).to(tl.float32) - (b_scale > 0).to(tl.float32)) * 0.5 / count
    if p_direction is not None:
        b_gated = tl.load(p_gated + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_direction = tl.load(p_direction + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    b_dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    b_ddirection = tl.zeros([ROWS, BLOCK], tl.float32)
    b_dscale = tl.zeros([ROWS], tl.float32)
    b_dshift = tl.zeros([ROWS], tl.float32)
    other: tl.constexpr = 1.0 if STAT == 5 else 0.0  # past the width: no 0/0 where OWN's scale is 0
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        o_row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        m_row = o_row < rows
        m_x = m_row[:, None] & m_col[None, :]
        b_x = tl.load(p_x + o_row[:, None] * stride_x + o_col[None, :], mask=m_x, other=other).to(tl.float32)
        b_g = tl.load(p_grad + o_row[:, None] * stride_grad + o_col[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_rstd = tl.full([ROWS], 1.0, tl.float32)
        if p_ms is not None:
            b_rstd = tl.rsqrt(tl.load(p_ms + o_row, mask=m_row, other=1.0) + tl.cast(eps, tl.float32))
        if STAT == 2:
            b_x = tl.where(m_x, b_x - tl.load(p_mean + o_row, mask=m_row, other=0.0)[:, None], 0.0)
        b_factor = b_rstd * b_gain
        b_z = b_x * b_factor[:, None]
        if STAT == 5:
            b_own = own_rstd(b_x, p_scale, count)
            b_z = b_x * b_own
        if p_shift is not None:
            b_z += tl.load(p_shift).to(tl.float32)
        b_t = activate(b_z, ACT, FORM)
        b_v = b_w[None, :]
        if p_direction is not None:
            b_gate = tanh(tl.load(p_mean + o_row, mask=m_row, other=0.0), 0)
            b_v = b_v + b_gate[:, None] * b_gated[None, :]
        if WANT_WEIGHT:
            b_dweight += b_g * b_t
        if WANT_BIAS:
            if p_direction is not None:
                b_dbias += b_g * b_t * b_gate[:, None]
            else:
                b_dbias += b_g
        b_q = b_g * b_v * slope(b_z, b_t, ACT)
        if STAT == 5:
            if WANT_SHIFT:
                b_dshift += tl.sum(b_q, 1)
            b_q *= b_own * b_own * b_own  # d loss / d x but for a constant
        b_along = tl.sum(b_q * b_x, 1)  # of this tile: of the row, if the tile holds it
        if WANT_SCALE:
            b_dscale += b_along * b_rstd
        if WANT_SHIFT and STAT != 5:
            b_dshift += tl.sum(b_q, 1)
        b_dx = b_q * b_factor[:, None]
        if p_ms is not None and (STAT != 3 or p_dms is not None):
            if not WHOLE:
                b_along = tl.load(p_along + o_row, mask=m_row, other=0.0)
            b_pull = -0.5 * b_along * b_factor * b_rstd * b_rstd
            if STAT == 3:
                if column == 0:
                    tl.store(p_dms + o_row, b_pull, mask=m_row)
            else:
                if p_grad_ms is not None:
                    b_pull += tl.load(p_grad_ms + o_row, mask=m_row, other=0.0).to(tl.float32)
                if STAT == 4:
                    b_sum = tl.load(p_mean + o_row, mask=m_row, other=0.0) * count
                    b_dx += (b_x + b_sum[:, None]) * (b_pull * (2.0 / (count + 1.0)))[:, None]
                else:
                    b_dx += b_x * (b_pull * (2.0 / count))[:, None]
        if STAT == 2:
            if WHOLE:
                b_mean_q = tl.sum(b_q, 1) / count
            else:
                b_mean_q = tl.load(p_second + o_row, mask=m_row, other=0.0)
            b_dx -= (b_factor * b_mean_q)[:, None]
        if p_direction is not None:
            if WHOLE:
                b_turn = tl.sum(b_g * b_t * b_gated[None, :], 1) * (1.0 - b_gate * b_gate)
            else:
                b_turn = tl.load(p_second + o_row, mask=m_row, other=0.0)
            b_dx += b_turn[:, None] * b_direction[None, :]
            if WANT_DIRECTION:
                b_ddirection += b_turn[:, None] * b_x
        if p_grad_sum is not None:
            o_gs = o_row[:, None] * stride_grad_sum + o_col[None, :]
            b_dx += tl.load(p_grad_sum + o_gs, mask=m_x, other=0.0).to(tl.float32)
        tl.store(p_dx + o_row[:, None] * width + o_col[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m_x)
    programs_width = programs * width  # numbers of one vector's partial rows
    if WANT_WEIGHT:
        tl.store(p_parts + program * width + o_col, tl.sum(b_dweight, 0), mask=m_col)
        p_parts += programs_width
    if WANT_BIAS:
        tl.store(p_parts + program * width + o_col, tl.sum(b_dbias, 0), mask=m_col)
        p_parts += programs_width
    if WANT_DIRECTION:
        tl.store(p_parts + program * width + o_col, tl.sum(b_ddirection, 0), mask=m_col)
        p_parts += programs_width
    o_one = program * tl.num_programs(1) + column
    if WANT_SCALE:
        tl.store(p_parts + o_one, tl.sum(b_dscale, 0) * b_by_scale)
        p_parts += programs * tl.num_programs(1)
    if WANT_SHIFT:
        tl.store(p_parts + o_one, tl.sum(b_dshift, 0))


@triton.jit
def _column_sums(p_part, o_col, m_col, count, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Sums over `count` rows of a matrix, of some columns."""
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, count, ROWS):
        o_row = start + tl.arange(0, ROWS)
        m_part = (o_row < count)[:, None] & m_col[None, :]
        b_sum += tl.load(p_part + o_row[:, None] * width + o_col[None, :], mask=m_part, other=0.0)
    return tl.sum(b_sum, 0)


@triton.jit
def _sum_of_all(p_part, count, BLOCK: tl.constexpr):
    """The sum of `count` numbers."""
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        o_part = start + tl.arange(0, BLOCK)
        b_sum += tl.load(p_part + o_part, mask=o_part < count, other=0.0)
    return tl.sum(b_sum, 0)


@triton.jit
def parameter_gradients_kernel(
    p_parts, p_dweight, p_dbias, p_dscale, p_dshift, p_ddirection, count, width, columns,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The wanted parameters' gradients from their parts, which follow each other in p_parts.

    A vector has `count` partial rows, width wide. A scalar has `columns` partial sums for each of these. They are
    summed in a fixed order and rounded once.
    """
    o_col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_col = o_col < width
    if p_dweight is not None:
        b_sum = _column_sums(p_parts, o_col, m_col, count, width, BLOCK, ROWS)
        tl.store(p_dweight + o_col, b_sum.to(p_dweight.dtype.element_ty), mask=m_col)
        p_parts += count * width
    if p_dbias is not None:
        b_sum = _column_sums(p_parts, o_col, m_col, count, width, BLOCK, ROWS)
        tl.store(p_dbias + o_col, b_sum.to(p_dbias.dtype.element_ty), mask=m_col)
        p_parts += count * width
    if p_ddirection is not None:
        b_sum = _column_sums(p_parts, o_col, m_col, count, width, BLOCK, ROWS)
        tl.store(p_ddirection + o_col, b_sum.to(p_ddirection.dtype.element_ty), mask=m_col)
        p_parts += count * width
    if tl.program_id(0) == 0:
        ones = count * columns
        if p_dscale is not None:
            tl.store(p_dscale, _sum_of_all(p_parts, ones, BLOCK).to(p_dscale.dtype.element_ty))
            p_parts += ones
        if p_dshift is not None:
            tl.store(p_dshift, _sum_of_all(p_parts, ones, BLOCK).to(p_dshift.dtype.element_ty))
