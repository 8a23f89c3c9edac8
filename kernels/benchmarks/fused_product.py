"""The section of the fused product, and the table of shapes that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from unittest.mock import patch

import normlab_kernels as nk
import torch
from measure import Call, Device, Missing, Row
from normlab_kernels import choices
from normlab_kernels.experimental import linear, linear_choices
from plan import FUSED, UNFUSED, Planned
from sections import largest_error, seeded
from tables import is_good

Tensor = torch.Tensor


def addmm(a: Tensor, proj: Tensor, residual: Tensor) -> Tensor:
    return torch.addmm(residual, a, proj.t())


def _addmm_rms_norm(a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, *_: Tensor) -> object:
    h = addmm(a, proj, residual)
    return h, nk.rms_norm(h, weight)


def _addmm_torch_rms_norm(a: Tensor, proj: Tensor, residual: Tensor, weight: Tensor, *_: Tensor) -> object:
    h = addmm(a, proj, residual)
    return h, torch.nn.functional.rms_norm(h, weight.shape, weight, 1e-6)


# Of a, the projection, the residual, the gain, lambda and the carried mean square.
PRODUCTS: dict[str, Callable[..., object]] = {
    UNFUSED: lambda *operands: nk.linear_add_bhyt(*operands, fused=False),
    FUSED: lambda *operands: nk.linear_add_bhyt(*operands, fused=True),
    "linear_add_dyt": lambda *operands: nk.linear_add_dyt(*operands[:4], None, operands[4], fused=True),
    "addmm + rms_norm": _addmm_rms_norm,
    "addmm + F.rms_norm": _addmm_torch_rms_norm,
    "addmm": lambda *operands: addmm(*operands[:3]),
}


def linear_row(planned: Planned, device: Device) -> Row:
    """h = residual + a W^T and a norm of h, in one kernel, or in two, or without the norm."""
    rows, width = device.sizes(planned.rows, planned.width)

    def operands() -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device.torch, dtype=device.dtype)

        weight, lam = torch.ones(width, device=device.torch, dtype=device.dtype), normal(1).fill_(1.0)
        ms = torch.ones(rows, 1, device=device.torch)
        return normal(rows, width), normal(width, width) / width**0.5, normal(rows, width), weight, lam, ms

    def make(name: str = planned.function) -> Call:
        mine = operands()
        return torch.no_grad()(lambda: PRODUCTS[name](*mine))

    columns: Row = {}
    if planned.function.startswith("linear_add") and (reason := linear.cannot_fuse(*operands()[:4])):
        raise Missing(reason)
    launch = choices.changed(linear_choices.linear(width), planned.launch)
    with patch.object(linear_choices, "product", lambda *where: launch):
        if planned.function == FUSED:
            columns["error"] = largest_error(seeded(make), seeded(lambda: make(UNFUSED)))
        # The output side: the product's operands are read more than once, from the cache.
        columns |= device.time(make, 4 * planned.rows * planned.width * device.dtype.itemsize)
    if "microseconds" in columns:
        columns["teraflops"] = 2 * planned.rows * planned.width**2 / columns["microseconds"] / 1e6
    return columns


def fusion_line(device: Device, rows: Iterable[Row]) -> str:
    """The entries of `linear_choices.FUSION_WINS` that the table of the fused product asks for.

    There is one for each width, whose K is the same: the launch that gains most on average. It counts from the fewest
    rows from which it always gained enough.
    """
    times = {
        (row["function"], row["launch"], int(row["width"]), int(row["rows"])): float(row["microseconds"])
        for row in rows
        if is_good(row)
    }
    best: dict[int, tuple[float, linear_choices.FusionWin]] = {}
    for width, launch in sorted({(key[2], key[1]) for key in times if key[0] == FUSED}):
        gains: dict[int, float] = {}
        for tokens in sorted((key[3] for key in times if key[:3] == (FUSED, launch, width)), reverse=True):
            gain = times.get((UNFUSED, "", width, tokens), 0.0) / times[FUSED, launch, width, tokens]
            if gain <= linear_choices.LEAST_GAIN:
                break
            gains[tokens] = gain
        mean = sum(gains.values()) / max(1, len(gains))
        if gains and mean > best.get(width, (0.0,))[0]:
            chosen = choices.changed(linear_choices.linear(width), launch)
            best[width] = mean, linear_choices.FusionWin(device.name, width, width, min(gains), chosen)
    return f"for linear_choices.FUSION_WINS: {tuple(win for _, win in best.values())}"
