"""By how much a returned loss divides the summed token loss: told by comparing it with the cross-entropy of the logits
that were returned beside it, never by a model's name.

For labels y and logits z of one call, every reading (next token or same token; labels at padding counted or not) has a
sum S and a number of labels n; the loss is S / N for N among n, the caller's `num_items_in_batch`, and 1. The reading
that gives the loss that was returned tells N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100
CHUNK = 1 << 22  # 16 MiB of float32 logits at a time
CLOSE = 1e-3  # largest relative distance of a loss from its reading
APART = 4.0  # how much nearer than readings of another N it must be


def loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scalar loss and the logits of what a model returned: a ModelOutput, a dict or a tuple."""
    if isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif isinstance(output, tuple | list) and len(output) > 1:
        loss, logits = output[0], output[1]
    else:
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    scalar = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    scores = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim >= 2
    return loss if scalar else None, logits if scores else None


def _normalisers(logits: Tensor) -> Tensor:
    """log sum exp of each position's logits, in float32, flat: what every reading of the labels shares."""
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, CHUNK // rows.shape[-1])
    return torch.cat([rows[start : start + step].float().logsumexp(-1) for start in range(0, len(rows), step)])


def _summed(logits: Tensor, normalisers: Tensor, labels: Tensor) -> tuple[float, int] | None:
    """Summed cross-entropy and the number of labels; None when there is none, or one is out of range."""
    kept = labels != IGNORED_LABEL
    wanted = labels[kept]
    if wanted.numel() == 0 or int(wanted.max()) >= logits.shape[-1] or int(wanted.min()) < 0:
        return None
    chosen = logits[(*kept.nonzero(as_tuple=True), wanted)]
    return float((normalisers[kept] - chosen.float()).double().sum()), wanted.numel()


def _readings(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """(logits, their normalisers, labels, shifted) of every way to set labels against logits."""
    if labels.ndim == 1 and logits.ndim == 2:
        yield logits, _normalisers(logits), labels, False
    if labels.ndim != 2 or logits.ndim != 3 or logits.shape[0] != labels.shape[0]:
        return
    length = labels.shape[1]
    if logits.shape[1] < length:
        return
    logits = logits[:, logits.shape[1] - length :]  # what stands before the text has no labels
    normalisers = _normalisers(logits).view(labels.shape)
    choices = [labels]
    if isinstance(mask, Tensor) and mask.shape == labels.shape and bool((mask == 0).any()):
        choices.append(labels.masked_fill(mask == 0, IGNORED_LABEL))
    for chosen in choices:
        if length > 1:
            yield logits[:, :-1], normalisers[:, :-1], chosen[:, 1:], True
        yield logits, normalisers, chosen, False


@torch.no_grad()
def labels_averaged(
    loss: Tensor, logits: Tensor, labels: Tensor, mask: Tensor | None = None, items: Tensor | float | None = None
) -> tuple[float, bool] | None:
    """(N, whether labels are shifted) such that `loss` = summed token loss / N; None when no reading fits, or two with
    different N fit alike.

    Args:
        loss: what the model returned. logits: (batch, length, vocabulary), or (batch, classes).
        labels: (batch, length) or (batch,), -100 = none. mask: the attention mask, for losses that leave out padding.
        items: `num_items_in_batch`, when the caller gave it.
    """
    value = float(loss)
    fits: list[tuple[float, float, bool]] = []
    for scores, normalisers, wanted, shifted in _readings(logits, labels.to(logits.device), mask):
        found = _summed(scores, normalisers, wanted)
        if found is None:
            continue
        total, count = found
        for divisor in dict.fromkeys([float(count), *([float(items)] if items is not None else []), 1.0]):
            distance = abs(value * divisor - total) / max(abs(total), 1e-30)
            if distance <= CLOSE:
                fits.append((distance, divisor, shifted))
    if not fits:
        return None
    best = min(fits)
    others = [distance for distance, divisor, _ in fits if abs(divisor / best[1] - 1) > 1e-9]
    if others and min(others) <= APART * max(best[0], 1e-7):
        return None
    return best[1], best[2]
