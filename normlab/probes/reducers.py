"""Streaming reductions: one pass over a hidden state gives every per-token statistic, and running moments keep them.

`token_statistics`  per-token numbers of one activation, in float32: on a GPU one kernel that reads it once, elsewhere
                    chunk by chunk, so that temporaries stay small
`RunningMoments`    stacked (rows x masks x statistics) count, mean, M2, max on one device, merged by Chan's rule
`with_batch`        the same as a function of the stacked moments
`merge_moments`     Chan's rule itself, for tensors or floats
"""

from __future__ import annotations

from collections.abc import Sequence

import normlab_kernels as nk
import torch
from torch import Tensor

# 2 MiB of float32: small beside any activation worth measuring, large beside a call's overhead.
CHUNK_ELEMENTS = 1 << 19


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is when already wider: squares of fp16 overflow at |x| >= 256."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def token_statistics(x: Tensor, names: Sequence[str]) -> Tensor:
    """Per-token statistics of an activation.

    Args:
        x: (..., d), any float dtype.
        names: some of l2, var, kurtosis, max_abs.

    Returns:
        (len(names), tokens) in float32 (float64 for a float64 input). `var` is the biased variance over d; `kurtosis`
        is m4 / var^2, NaN for a token whose features are all equal. Where a kernel takes it from fourth powers in
        float32 (on a GPU), it is NaN as well for a token whose fourth powers leave float32's range.
    """
    rows = x.reshape(-1, x.shape[-1])
    if nk.chooses_kernels(rows, "auto"):
        return _kernel_statistics(rows, names)
    step = max(1, CHUNK_ELEMENTS // max(1, rows.shape[-1]))
    return torch.cat([row_statistics(rows[i : i + step], names) for i in range(0, max(1, len(rows)), step)], dim=1)


def row_statistics(rows: Tensor, names: Sequence[str]) -> Tensor:
    """`token_statistics` of (tokens, d) at once and by PyTorch alone, as compiled code takes them."""
    rows = at_least_float32(rows)
    found: dict[str, Tensor] = {}
    if "l2" in names:
        found["l2"] = torch.linalg.vector_norm(rows, dim=-1)
    if "max_abs" in names:
        found["max_abs"] = max_abs(rows)
    if "var" in names or "kurtosis" in names:
        squares = (rows - rows.mean(dim=-1, keepdim=True)).square_()
        variance = found["var"] = squares.mean(dim=-1)
        if "kurtosis" in names:
            # Dividing before squaring: var^2 underflows in float32 from var = 1e-23 on.
            found["kurtosis"] = squares.div_(variance[:, None]).square_().mean(dim=-1)
    return torch.stack([found[name] for name in names])


def _kernel_statistics(rows: Tensor, names: Sequence[str]) -> Tensor:
    """From the row moments that one read of the activation gives."""
    moments, width = nk.row_moments(rows), rows.shape[-1]
    found = {"l2": moments.l2, "max_abs": moments.max_abs, "var": moments.m2 / width}
    if "kurtosis" in names:
        in_range = (moments.m4 > 1e-30) & (moments.m4 < torch.inf)
        kurtosis = width * moments.m4.double() / moments.m2.double().square()
        found["kurtosis"] = torch.where(in_range, kurtosis, torch.nan).float()
    return torch.stack([found[name] for name in names])


def max_abs(rows: Tensor) -> Tensor:
    """Largest |x| along the last dimension. (On a CPU 25 times as fast as the infinity norm.)"""
    return torch.maximum(rows.amax(dim=-1), -rows.amin(dim=-1))


def merge_moments(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Chan, Golub and LeVeque's merge: (count, mean, M2) of two sets from those of each; tensors or floats."""
    total = count_a + count_b
    safe = total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
    share, delta = count_b / safe, mean_b - mean_a
    return total, mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share


def with_batch(state: Tensor, values: Tensor, masks: Tensor) -> Tensor:
    """Running moments `state`, (4, rows, masks, statistics), with a batch of values, (rows, statistics, tokens), of the
    tokens that each of `masks`, (masks, tokens), counts."""
    keep = masks[None, :, None, :]
    wide = values.to(state.dtype)[:, None]
    count = keep.sum(-1).to(state.dtype).expand(len(values), -1, values.shape[1])
    mean = torch.where(keep, wide, 0).sum(-1) / count.clamp(min=1)
    m2 = torch.where(keep, wide - mean[..., None], 0).square().sum(-1)
    peak = torch.where(keep, wide, -torch.inf).amax(-1)
    merged = merge_moments(state[0], state[1], state[2], count, mean, m2)
    return torch.stack([*merged, torch.maximum(state[3], peak)])


def empty_moments(rows: int, masks: int, statistics: int, device: torch.device) -> Tensor:
    """Moments of no token: (4, rows, masks, statistics), float64 where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    state = torch.zeros(4, rows, masks, statistics, dtype=dtype, device=device)
    state[3] = -torch.inf
    return state


class RunningMoments:
    """Count, mean, M2 and maximum of per-token statistics: `state`, (4, rows, masks, statistics), on one device.

    The running sums are float64 where the device has it (a few hundred numbers, so free): thousands of merged batches
    then lose nothing. Created outside inference mode, because tensors made inside it cannot be updated outside.
    """

    def __init__(self, masks: int, statistics: int, device: torch.device):
        self._about = (masks, statistics, device)
        self.state = empty_moments(0, *self._about)

    def reserve(self, rows: int) -> None:
        """Make room for rows 0 .. rows-1."""
        missing = rows - self.state.shape[1]
        if missing > 0:
            with torch.inference_mode(False), torch.no_grad():
                self.state = torch.cat([self.state, empty_moments(missing, *self._about)], dim=1)

    def update(self, rows: Sequence[int], values: Tensor, masks: Tensor) -> None:
        """Add one batch. `values`: (rows, statistics, tokens); `masks`: (masks, tokens) bool. A masked-out token may
        hold NaN."""
        with torch.inference_mode(False), torch.no_grad():
            index = torch.as_tensor(list(rows), device=values.device)
            self.state[:, index] = with_batch(self.state[:, index], values, masks)
