"""`record`: a context manager that measures a model's layers while the caller runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normlab.errors import NormlabError
from normlab.probes.calls import LossTokens
from normlab.probes.metrics import MASKS, resolve_metrics
from normlab.probes.recorder import Recorder
from normlab.probes.sites import Sites, sites


def record(
    model: nn.Module | Sites,
    metrics: Sequence[str] | None = None,
    *,
    loss_tokens: LossTokens = None,
    masks: Sequence[str] = tuple(MASKS),
) -> Recorder:
    """Measure a model's layers while it runs.

        with record(model, metrics=["token_l2_mean", "grad_l2_mean"]) as rec:
            loss = model(**batch).loss
            rec.backward(loss)              # or loss.backward(), in training
        table = rec.stats().to_pandas()     # site, layer, metric, mask, value

    Sites (h_l = output of block l): `block_out` layer 0 = the tensor that enters block 1, 1..L = h_l; `attn_norm_in`,
    `mlp_norm_in` (see `normlab.probes.roles`); `final_norm_in` (layer L); `attn`, `mlp`, `block` for what the branches
    add. Gradients: `block_in_grad` layer l = dLoss/dh_{l-1}; `attn_norm_in_grad`, `mlp_norm_in_grad`,
    `final_norm_in_grad` with respect to the tensor that enters the norm (its whole gradient, the residual path
    included), for the loss *summed* over labels: the gradient that arrives is multiplied by `loss_tokens`.

    Args:
        model: a module, or `sites(model, ...)` when its parts had to be named. Of a compiled model the original modules
            are run, uncompiled, inside the context, because compiled code ignores new hooks.
        metrics: names from `METRICS`; default: the cheap activation metrics.
        loss_tokens: how many labels the loss averages over: a number, or a function of the call's `CallInputs`.
            Default: told by comparing the returned loss with its logits' cross-entropy. 1 for a loss that is a sum
            already; for a scaled loss (fp16 scaler, gradient accumulation) divide by the scale.
        masks: which token masks to report: "all" (padding excluded), "no_first" (and the first real token of each row).

    Of a block that passes on several streams (it has an ``enter``), `block_out` is what the next block reads of them.

    Only whole forward passes count: one that raises leaves no trace. The model's outputs are bit-identical, its own
    hooks untouched. Metrics that do not apply have no rows, nor has what does not add up: `manifest["absent"]` says
    why. A block that runs again in one call is a further layer.

    Raises:
        NormlabError: unknown metric or mask; gradient metrics under no_grad, without countable labels, or without a
        backward.
    """
    unknown = [mask for mask in masks if mask not in MASKS]
    if unknown or not masks:
        raise NormlabError(f"unknown masks {list(masks)!r}: choose from {', '.join(MASKS)}")
    where = model if isinstance(model, Sites) else sites(model)
    return Recorder(where, resolve_metrics(metrics), loss_tokens, masks)
