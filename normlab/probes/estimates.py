"""Shared by the experiments on a model: running it over batches, per-token losses, and means with honest intervals.

`RowMeans`   means over tokens whose error treats a row of a batch (a sequence) as one independent observation
`Runner`     feeds batches to a model on its device, in evaluation mode, without cache, behind a progress bar
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normlab.errors import NormlabError
from normlab.probes.calls import IGNORED_LABEL, token_masks
from normlab.probes.losses import labels_averaged, loss_and_logits
from normlab.probes.sites import Sites, sites

Z95 = NormalDist().inv_cdf(0.975)
LOGIT_CHUNK = 1 << 22  # 16 MiB of float32 logits at a time


class RowMeans:
    """Ratio estimates sum(values)/sum(counts) over rows, any number of them at once, with their standard errors.

    A row is a sequence: its tokens are correlated, so it is one observation. The error is that of a ratio estimator:
    sqrt(R/(R-1) sum_r (v_r - mean n_r)^2) / sum n_r. NaN below two rows.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._counts: list[Tensor] = []

    def add(self, values: Tensor, counts: Tensor) -> None:
        """`values`: (estimates, rows) sums over a row's tokens; `counts`: (rows,) how many tokens that was."""
        kept = counts > 0
        self._rows.append(values[:, kept].detach().double().cpu())
        self._counts.append(counts[kept].detach().double().cpu())

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return int(sum(float(count.sum()) for count in self._counts))

    def mean_and_error(self) -> tuple[Tensor, Tensor]:
        """(estimates,) means and standard errors."""
        values, counts = torch.cat(self._rows, dim=1), torch.cat(self._counts)
        total, rows = counts.sum(), len(counts)
        mean = values.sum(1) / total
        spread = (values - mean[:, None] * counts).square().sum(1)
        error = (spread * rows / (rows - 1)).sqrt() / total if rows > 1 else torch.full_like(mean, torch.nan)
        return mean, error


def interval(mean: float, error: float) -> dict[str, float]:
    """Columns `standard_error`, `low`, `high`: the normal 95% interval."""
    return {"standard_error": error, "low": mean - Z95 * error, "high": mean + Z95 * error}


class Runner:
    """A model and the batches to run it on."""

    def __init__(self, model: nn.Module | Sites, batches: Iterable[dict[str, Any]], progress: bool, title: str):
        self.sites = model if isinstance(model, Sites) else sites(model)
        self.model = self.sites.model
        self._batches, self._progress, self._title = batches, progress, title
        parameter = next(self.model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        accepted = inspect.signature(self.model.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in accepted else {}
        self._shifted: bool | str | None = "unknown"
        self._renamed = {"input_ids": "input"} if "input" in accepted and "input_ids" not in accepted else {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches on the model's device. Raises `NormlabError` when there is none."""
        seen = 0
        for batch in _with_progress(self._batches, self._progress, self._title):
            if not hasattr(batch, "items"):
                raise NormlabError("a batch must be a dict of the model's arguments, such as {'input_ids': ...}")
            seen += 1
            yield {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        if seen == 0:
            raise NormlabError("there is no batch to run: give at least one dict of the model's arguments")

    def logits(self, batch: dict[str, Any]) -> Tensor:
        """The model's logits. Labels are withheld: the loss is computed here, token by token, alike for every model."""
        inputs = {self._renamed.get(k, k): v for k, v in batch.items() if k not in ("labels", "shift_labels")}
        out = self.model(**inputs, **self._options)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, Tensor):
            raise NormlabError(
                f"the model returned {type(out).__name__} without logits: give a model with a language-model head"
            )
        return logits

    def labels(self, batch: dict[str, Any]) -> Tensor:
        """The label of each position's prediction, -100 = none. Without `labels`, each token's successor."""
        labels = batch.get("labels")
        shifted = None if labels is None else self._labels_are_shifted(batch)
        if labels is None:
            labels = batch.get("input_ids", batch.get("input"))
            if labels is None:
                raise NormlabError("a batch has neither labels nor input_ids: the loss needs one of them")
            if batch.get("attention_mask") is not None:
                labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
            shifted = True
        if shifted is not False and labels.ndim == 2:
            labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        return labels

    def _labels_are_shifted(self, batch: dict[str, Any]) -> bool | None:
        """Whether the model's own loss on these labels is of the next token; None when it returns none. Found once, by
        comparing its loss with its logits."""
        if self._shifted == "unknown":
            inputs = {self._renamed.get(k, k): v for k, v in batch.items()}
            try:
                loss, logits = loss_and_logits(self.model(**inputs, **self._options))
            except TypeError:  # it takes no labels
                loss = logits = None
            averaged = None
            if loss is not None and logits is not None:
                averaged = labels_averaged(loss, logits, batch["labels"], batch.get("attention_mask"))
                if averaged is None:
                    raise NormlabError(
                        "the returned loss is no mean cross-entropy of the returned logits, shifted or not: leave out "
                        "`labels` to measure on the next token"
                    )
            self._shifted = None if averaged is None else averaged[1]
        return self._shifted  # type: ignore[return-value]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside, every module's own mode back after."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def counted(self, batch: dict[str, Any], tokens: tuple[int, ...], mask: str = "all") -> Tensor:
        """(batch, length) bool: the tokens that count."""
        return token_masks(batch.get("attention_mask"), tokens, self.device, [mask], cached=False)[0].reshape(tokens)


def _with_progress(items: Iterable, progress: bool, title: str) -> Iterable:
    if not progress:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=title, unit="batch", delay=1)


def settled(error: Tensor, target: float | None) -> bool:
    """Whether every standard error is known and at most `target` (never, without a target)."""
    return target is not None and bool((error <= target).all())


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(batch, length) cross-entropy of each position in float32, 0 where there is no label."""
    flat = functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return flat.view(labels.shape)


def token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(softmax p || softmax q) of each position, in float32, in chunks of positions; shape of the logits without
    their last."""
    step = max(1, LOGIT_CHUNK // p_logits.shape[-1])

    def kl(p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    pairs = zip(p_logits.flatten(0, -2).split(step), q_logits.flatten(0, -2).split(step), strict=True)
    return torch.cat([kl(p, q) for p, q in pairs]).view(p_logits.shape[:-1])


Hook = Callable[..., Any]


@contextmanager
def hooked(*hooks: tuple[nn.Module, Hook]) -> Iterator[None]:
    """Forward hooks (module, args, kwargs, output) that are gone when the context ends."""
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
