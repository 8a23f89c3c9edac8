"""BHyT for one decoding step as the authors' released kernels compute it, restated from the formula.

    s = residual + x,  ms = mean(s^2),  r = bf16(rsqrt(bf16(ms) + eps)),  y = weight tanh((lam/kappa) s r)

The step reduces its row again, whatever statistic the prompt used. It rounds the statistic and its root to bf16 (here
to x's dtype). That is up to 0.4% off, so prompt and decoding disagree. Ours carries the fp32 statistic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from normlab_kernels.choices import power_of_two
from normlab_kernels.device_math import tanh
from normlab_kernels.ops import tanh_form

Tensor = torch.Tensor


@triton.jit
def released_decode_kernel(
    p_x, p_residual, p_weight, p_lam, p_y, p_sum, width, eps, inv_kappa,
    HAS_RESIDUAL: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    o_row = tl.program_id(0).to(tl.int64) * width
    o_col = tl.arange(0, BLOCK)
    m_col = o_col < width
    dtype = p_y.dtype.element_ty
    b_x = tl.load(p_x + o_row + o_col, mask=m_col, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_sum = (b_x + tl.load(p_residual + o_row + o_col, mask=m_col, other=0.0).to(tl.float32)).to(dtype)
        tl.store(p_sum + o_row + o_col, b_sum, mask=m_col)
        b_x = b_sum.to(tl.float32)
    ms = (tl.sum(b_x * b_x, 0) / tl.cast(width, tl.float32)).to(dtype).to(tl.float32)
    rstd = tl.rsqrt(ms + tl.cast(eps, tl.float32)).to(dtype).to(tl.float32)
    b_gain = tl.load(p_lam).to(tl.float32) * tl.cast(inv_kappa, tl.float32)
    b_w = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
    tl.store(p_y + o_row + o_col, (tanh(b_x * rstd * b_gain, FORM) * b_w).to(dtype), mask=m_col)


def released_bhyt(
    x: Tensor, residual: Tensor | None, weight: Tensor, lam: Tensor, kappa: float = 10.0, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(s, y) of contiguous x (rows, d) on a GPU or in the interpreter; s is x where there is no residual."""
    y = torch.empty_like(x)
    s = x if residual is None else torch.empty_like(x)
    width = x.shape[1]
    block = power_of_two(width)
    released_decode_kernel[(x.shape[0],)](
        x, x if residual is None else residual, weight, lam, y, s, width, eps, 1.0 / kappa,
        HAS_RESIDUAL=residual is not None, FORM=tanh_form(x.dtype), BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
    )  # fmt: skip
    return s, y


def released_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, lam: Tensor, kappa: float = 10.0, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    s = x if residual is None else residual + x
    ms = s.float().pow(2).mean(-1, keepdim=True).to(x.dtype).float()
    rstd = torch.rsqrt(ms + eps).to(x.dtype).float()
    return s, (torch.tanh(s.float() * rstd * (lam.float() / kappa)) * weight.float()).to(x.dtype)
