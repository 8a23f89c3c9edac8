"""Name what makes two outputs of a norm differ that read the same rows: another gain, eps, statistic or bias."""

from __future__ import annotations

import torch
from torch import Tensor

from normlab.differences.cause import Cause
from normlab.differences.forms import BETTER, CLOSE, relative

LEAST = 1e-3  # of a row's mean size: below it an output holds no information, as where the gain is zero
ERRORS = 4.0  # standard errors within which B's eps is zero
ROUNDING = 2.0**-22  # of the mean square: what rounding of a norm in float32 does to an eps that is read off


def norm_causes(reads: Tensor, x: Tensor, y: Tensor, bias: Tensor, eps: float | None) -> list[Cause]:
    """How B's outputs y differ from A's, x; `bias` and `eps` are A's.

    Shapes: (tokens, features); bias (features,). Tokens and channels in which x is about zero tell nothing.
    """
    x, y = x - bias, y - bias
    closeness = min(CLOSE, relative(x, y) / BETTER)
    kept = x.abs() > LEAST * x.abs().mean(1, keepdim=True)
    tokens, alive = kept.any(1), kept.any(0)
    if not bool(alive.any()):
        return []
    reads, all_x, all_y, kept = reads[tokens], x[tokens], y[tokens], kept[tokens][:, alive]
    x, y = all_x[:, alive], all_y[:, alive]

    def fits(z: Tensor) -> bool:
        return relative(y, z) < closeness

    if fits(x):
        silent = int((~alive).sum())
        words = f"another gain, or a bias, in the {silent} channels alone where A's gain is about 0"
        return [Cause(words)] if silent else []
    ratio = (y / x).where(kept, torch.nan)
    by_channel, by_row = ratio.nanmedian(0).values, ratio.nanmedian(1).values
    of_eps = _eps_causes(reads, x, y, by_row, eps, closeness)
    scale = float(by_channel.median())
    if fits(x * scale) and not (of_eps and of_eps[0] < relative(y, x * scale) / 3):
        is_gain = float((_gain_of(reads, all_x)[alive] * (scale - 1) - 1).abs().nan_to_num().median()) < 1e-3
        return [Cause(f"ratio {scale:.6g} in every channel: {'a gain of 1 + w?' if is_gain else 'scaled'}")]
    if fits(x * by_channel):
        gain = _gain_of(reads, all_x)[alive]
        other = gain * by_channel
        for shift in (1.0, -1.0):
            if float((other - gain - shift).abs().nan_to_num().median()) < 1e-3:
                return [Cause(f"the gain is A's {'+' if shift > 0 else '-'} 1: a gain of 1 + w?")]
        if float((other - 1).abs().nan_to_num().median()) < 1e-3:
            return [Cause("B applies no gain")]
        return [Cause("ratio differs by channel: another gain")]
    if of_eps:
        return [of_eps[1]]
    if fits(x * by_row[:, None]):
        size, centred = _mean_squares(reads)
        if fits(x * (size / centred).sqrt()[:, None]) or fits(x * (centred / size).sqrt()[:, None]):
            return [Cause("another statistic: variance in place of the mean square, or the reverse")]
        return [Cause("the ratio differs by row: another statistic, or another order of norm and scale")]
    x, y = all_x, all_y
    offset = (y - x).median(0).values
    if fits(x + offset):
        return [Cause("an offset by channel: a missing or additional bias")]
    mean = reads.mean(1, keepdim=True)
    for sign, words in ((1, "does not subtract the mean"), (-1, "subtracts the mean")):
        moved = x + sign * mean * (x / (reads - (mean if sign > 0 else 0))).nan_to_num()
        direction = torch.nn.functional.cosine_similarity(moved, y, dim=-1)
        if float(direction.min()) > 1 - 1e-6:
            return [Cause(f"B {words}: LayerNorm or RMSNorm")]
    if fits(reads - bias):
        return [Cause("B applies no norm here")]
    return []


def _eps_causes(
    reads: Tensor, x: Tensor, y: Tensor, by_row: Tensor, eps: float | None, closeness: float
) -> tuple[float, Cause] | None:
    """The change of eps that explains y best, and before it how far that is off.

    y / x is sqrt((ms + eps_a) / (ms + eps_b)) in each row, so that eps_b = (ms + eps_a) (x / y)^2 - ms. Its mean weighs
    rows by what they tell: those with a small mean square most.
    """
    own = eps or 0.0
    found: list[tuple[float, Cause]] = []
    fitted: list[tuple[float, Cause]] = []
    for ms in _mean_squares(reads):
        inside = ms + own
        weight = inside**-2
        by_rows = inside * by_row**-2 - ms
        of_b = float((weight * by_rows).sum() / weight.sum())
        spread = float((weight * (by_rows - of_b).square()).sum() / weight.sum()) / max(len(ms) - 1, 1)
        noise = max(ERRORS * spread**0.5, ROUNDING * float(weight.mean()) ** -0.5)

        def off(size: Tensor, inside: Tensor = inside) -> float:
            return relative(y, x * (inside.sqrt() / size)[:, None])

        by, is_none = of_b - own, False
        size = f"by {abs(by):.2g}"
        if eps is not None:
            size += f" ({of_b:.2g} in B)"
            known = f"it is {eps:g} in A"
            hidden = f"(one below {noise:.1g} would not show)" if noise > LEAST * eps else ""
            if is_none := of_b <= noise:
                found.append((off(ms.sqrt()), Cause(f"B adds no eps: {known}", hidden)))
            outside = Cause(f"eps is added outside the root, to the root mean square: {known}")
            found.append((off(ms.sqrt() + eps), outside))
            if bool((ms < eps).any()):
                least = Cause(f"B adds no eps, but takes it for the least mean square: {known}")
                found.append((off(ms.clamp_min(eps).sqrt()), least))
        if not is_none:
            other = Cause(f"another eps: B's is {'larger' if by > 0 else 'smaller'}", size)
            fitted.append((off((ms + of_b).clamp_min(1e-300).sqrt()), other))
    close = [one for one in (*found, *fitted) if one[0] < closeness]
    if not close:
        return None
    best = min(close)
    return next((one for one in found if one[0] <= 1.5 * best[0]), best)  # those that have nothing to fit come first


def _mean_squares(reads: Tensor) -> tuple[Tensor, Tensor]:
    """The mean square of each row, and its variance."""
    return reads.square().mean(1), (reads - reads.mean(1, keepdim=True)).square().mean(1)


def _gain_of(reads: Tensor, x: Tensor) -> Tensor:
    """The gain by channel of an RMS norm or a LayerNorm without bias, whichever explains the output better."""
    gains = []
    for rows in (reads, reads - reads.mean(1, keepdim=True)):
        unit = rows * rows.square().mean(1, keepdim=True).rsqrt()
        gain = (x / unit).where(unit.abs() > 0.1, torch.nan).nanmedian(0).values
        gains.append((relative(x, unit * gain.nan_to_num()), gain))
    return min(gains, key=lambda pair: pair[0])[1]
