"""Functions the kernels share: tanh in three forms, the activation and its slope.

Forms of tanh, chosen when a kernel is built:

* PORTABLE: an odd polynomial below 0.6, `1 - 2/(exp2(2 log2(e) |z|) + 1)` above; relative error <= 2e-7. Runs in the
  interpreter and on every target. (The second form alone loses digits near 0: 3.5e-7 at 0.25 already.)
* LIBRARY: CUDA's libdevice, for outputs in fp32.
* APPROX: one `tanh.approx.f32` instruction, relative error 2^-11, for 16-bit outputs on NVIDIA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

PORTABLE, LIBRARY, APPROX = 0, 1, 2


@triton.jit
def tanh(z, FORM: tl.constexpr):
    """tanh of an fp32 tensor."""
    if FORM == 2:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    elif FORM == 1:
        t = libdevice.tanh(z)
    else:
        size = tl.abs(z)
        u = z * z  # tanh(z) = z + z u p(u), p fitted by least squares on Chebyshev points of [0, 0.6]
        p = ((-0.006276390049606562 * u + 0.021116215735673904) * u - 0.053875137120485306) * u + 0.13332924246788025
        near = z + z * u * (p * u - 0.3333333134651184)
        e = tl.exp2(tl.minimum(size, 20.0) * 2.8853900817779268)
        far = 1.0 - 2.0 / (e + 1.0)
        far = tl.where(z < 0, -far, far)
        t = tl.where(size < 0.6, near, far)
        t = tl.where(z != z, z, t)  # minimum drops a NaN
    return t


@triton.jit
def erf_16_bit(z, FORM: tl.constexpr):
    """erf for 16-bit results: tanh of an odd polynomial fitted on |z| <= 3, beyond which erf is 1 - 2e-5. With an
    exact tanh the relative error is 3.1e-5."""
    z = tl.minimum(tl.maximum(z, -3.5, tl.PropagateNan.ALL), 3.5, tl.PropagateNan.ALL)
    u = z * z
    return tanh(z * (((-2.349e-4 * u - 7.395e-4) * u + 0.102987) * u + 1.128368), FORM)


@triton.jit
def activate(z, ACT: tl.constexpr, FORM: tl.constexpr):
    """act(z): identity, tanh or erf."""
    t = z
    if ACT == 1:
        t = tanh(z, FORM)
    elif ACT == 2:
        t = erf_16_bit(z, FORM) if FORM == 2 else tl.erf(z)
    return t


@triton.jit
def slope(z, t, ACT: tl.constexpr):
    """act'(z), given t = act(z)."""
    d = tl.full(z.shape, 1.0, tl.float32)
    if ACT == 1:
        d = 1.0 - t * t
    elif ACT == 2:
        d = 1.1283791670955126 * tl.exp2(-1.4426950408889634 * z * z)
    return d


@triton.jit
def gain(p_scale, inv_kappa):
    """scale / kappa as an fp32 scalar; inv_kappa, which is 1 then, without a scale."""
    a = tl.cast(inv_kappa, tl.float32)
    if p_scale is not None:
        a = a * tl.load(p_scale).to(tl.float32)
    return a


@triton.jit
def compressed_mean_square(ms, mean, count):
    """(sum(x^2) + sum(x)^2) / (count + 1) from the mean square and the mean of `count` numbers."""
    return (ms + mean * mean * count) * (count / (count + 1.0))


@triton.jit
def own_rstd(b_x, p_scale, count):
    """rsqrt((x^2 + |scale|) / count) of each number."""
    return tl.rsqrt((b_x * b_x + tl.abs(tl.load(p_scale).to(tl.float32))) / count)
