"""The loss that a model returns: over how many labels it averages, by the logits returned with it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100
CHUNK = 1 << 22  # 16 MiB of float32 logits at a time
HALF = (torch.float16, torch.bfloat16)
CLOSE = 1e-3  # largest relative distance of a loss from its reading, in half precision
ROUNDINGS = 32  # the largest of a loss in float32, in roundings of its terms
APART = 4.0  # how much nearer it must be than readings of another divisor


def loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scalar loss and the logits of what a model returned: a ModelOutput, a dict, a tuple or the loss alone.

    A tuple begins with the loss and the logits, or is the logits and their loss, which may be None. Of another one it
    is not known what is what.
    """
    if isinstance(output, Tensor):
        loss, logits = output if output.ndim == 0 else None, None
    elif isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif isinstance(output, tuple | list) and not hasattr(output, "logits"):
        first, second = (*output[:2], None, None)[:2]
        is_pair = len(output) == 2 and (second is None or _is_loss(second))
        loss, logits = (second, first) if is_pair else (first, second)
        logits = logits if is_pair or _is_loss(loss) else None
    else:
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    scores = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim >= 2
    return loss if _is_loss(loss) else None, logits if scores else None


def _is_loss(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()


def is_same_loss(one: Tensor, other: Tensor) -> bool:
    """True if two losses have one value, in the precision of either, or none."""
    a, b = one.detach().view(()), other.view(()).to(one.device)
    return bool((a == b.to(a.dtype)) | (a.to(b.dtype) == b) | (a.isnan() & b.isnan()))


def _normalizers(logits: Tensor) -> Tensor:
    """log sum exp of each position's logits, in float32, flat."""
    rows = logits.reshape(-1, logits.shape[-1])
    return torch.cat([part.float().logsumexp(-1) for part in rows.split(max(1, CHUNK // rows.shape[-1]))])


def _summed(logits: Tensor, normalizers: Tensor, labels: Tensor) -> tuple[float, float, int] | None:
    """Summed cross-entropy, the size of its terms, and how many labels; None without one, or with one out of range."""
    kept = labels != IGNORED_LABEL
    wanted = labels[kept]
    if wanted.numel() == 0 or int(wanted.max()) >= logits.shape[-1] or int(wanted.min()) < 0:
        return None
    chosen, above = logits[(*kept.nonzero(as_tuple=True), wanted)].double(), normalizers[kept].double()
    return float((above - chosen).sum()), float((above.abs() + chosen.abs()).sum()), wanted.numel()


class Averaging(NamedTuple):
    """A way in which a loss may average the cross-entropy of labels."""

    shifted: bool  # labels are of the next token
    skips_padding: bool
    divisor: str  # "labels", "items" or "nothing"


AVERAGINGS = frozenset(map(Averaging._make, product((False, True), (False, True), ("labels", "items", "nothing"))))
# By the argument of labels, whether items are given, and how many other losses were returned further in.
Settled = defaultdict[tuple[str, bool, int], set[Averaging]]


def unsettled() -> Settled:
    """How a loss averages, before any call."""
    return defaultdict(lambda: set(AVERAGINGS))


def _compared(
    logits: Tensor, labels: Tensor, mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, bool, tuple[bool, ...]]]:
    """(logits, their normalizers, labels, shifted, skips padding) of every way to compare labels with logits."""
    if labels.ndim == 1 and logits.ndim == 2:
        yield logits, _normalizers(logits), labels, False, (False, True)
    if labels.ndim != 2 or logits.ndim != 3 or logits.shape[0] != labels.shape[0]:
        return
    length = labels.shape[1]
    if logits.shape[1] < length:
        return
    logits = logits[:, logits.shape[1] - length :]  # positions before the text have no labels
    normalizers = _normalizers(logits).view(labels.shape)
    choices: list[tuple[Tensor, tuple[bool, ...]]] = [(labels, (False, True))]
    if isinstance(mask, Tensor) and mask.shape == labels.shape and bool((mask == 0).any()):
        choices = [(labels, (False,)), (labels.masked_fill(mask == 0, IGNORED_LABEL), (True,))]
    for chosen, skips in choices:
        if length > 1:
            yield logits[:, :-1], normalizers[:, :-1], chosen[:, 1:], True, skips
        yield logits, normalizers, chosen, False, skips


def is_half(loss: Tensor) -> bool:
    """True if a loss has half precision, whatever its type."""
    return any(bool(loss == loss.to(kind)) for kind in HALF)


@torch.no_grad()
def labels_averaged(
    loss: Tensor,
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    items: Tensor | float | None = None,
    settled: set[Averaging] | None = None,
) -> tuple[float, bool] | None:
    """Find N such that `loss` = summed token loss / N, and whether labels are shifted.

    Every reading of the labels (next or same token; with or without those at padding) has a sum S and a count n. The
    loss is compared with S / N for N in {n, `items`, 1}. No model's name is involved. A loss in float32 fits within the
    roundings of its terms: that of smoothed labels, or with another term, is near a wrong reading now and then.

    Args:
        loss: the loss that the model returned.
        logits: (batch, length, vocabulary), or (batch, classes).
        labels: (batch, length) or (batch,), -100 = none.
        mask: the attention mask, for losses that leave out padding.
        items: `num_items_in_batch`, when the caller gave it.
        settled: the ways that fitted all calls before (at first `AVERAGINGS`). Others do not count, and those that do
            not fit this call are removed.

    Returns:
        (N, shifted). None when no way fits, or two of different N fit alike. N is NaN if the loss is not finite.
        Without a label and with a loss of 0, N is `items` or 1: the gradients are 0.
    """
    value = float(loss)
    if not math.isfinite(value):
        return math.nan, False  # nothing fits, and the gradients are no numbers either
    if value == 0 and not bool((labels != IGNORED_LABEL).any()):
        return (1.0 if items is None else float(items)), True
    half = is_half(loss)
    fits: dict[Averaging, tuple[float, float]] = {}
    for scores, normalizers, wanted, shifted, skips in _compared(logits, labels.to(logits.device), mask):
        result = _summed(scores, normalizers, wanted)
        if result is None:
            continue
        total, size, count = result
        close = CLOSE * max(abs(total), 1e-30)
        if not half:
            close = min(close, ROUNDINGS * torch.finfo(torch.float32).eps * size)
        divisors = {"labels": float(count), "nothing": 1.0} | ({} if items is None else {"items": float(items)})
        for name, divisor in divisors.items():
            distance = abs(value * divisor - total)
            if distance <= close:
                fit = distance / max(abs(total), 1e-30), divisor
                fits |= {Averaging(shifted, skip, name): fit for skip in skips}
    if settled is not None and (fits or not half):  # half precision may miss its own way
        settled.intersection_update(fits)
        fits = {way: fits[way] for way in settled}
    if not fits:
        return None
    best, way = min((fit, way) for way, fit in fits.items())
    others = [distance for distance, divisor in fits.values() if abs(divisor / best[1] - 1) > 1e-9]
    if others and min(others) <= APART * max(best[0], 1e-7):
        return None
    return best[1], way.shifted
