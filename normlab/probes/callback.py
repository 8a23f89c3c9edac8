"""Layer statistics in any `transformers.Trainer`; for another loop see `normlab.probes.observe`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from normlab.files import whole_file
from normlab.probes.call_inputs import TokenMask
from normlab.probes.metrics import resolve_metrics
from normlab.probes.observe import (
    DEFAULT,
    RECENT,
    Explanation,
    LossSpikes,
    Observer,
    Readings,
    require_every,
    require_folder,
)
from normlab.probes.sites import sites
from normlab.probes.statistics import real_numbers, whole

if TYPE_CHECKING:
    import pandas

try:
    from transformers import TrainerCallback
except ImportError:
    TrainerCallback = object  # type: ignore[assignment, misc]

_log = logging.getLogger(__name__)


class UpdateRatio:
    """||W_after - W_before||_F / ||W_before||_F of every matrix, around one optimizer step.

        ratio = UpdateRatio(model); optimizer.step(); rows = ratio.measure()

    Holds a copy of the matrices between the two.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim >= 2}

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The ratio by parameter name; NaN for a matrix that was zero."""
        now, ratios = dict(self._model.named_parameters()), []
        for name, before in self._before.items():
            old, new = (real_numbers(x.detach()).float() for x in (before, now[name]))
            step, size = (whole(torch.linalg.vector_norm(x)) for x in (new - old, old))
            ratios.append((step / size).masked_fill(size == 0, torch.nan))
        return dict(zip(self._before, torch.stack([r.cpu() for r in ratios]).tolist() if ratios else [], strict=True))


def _sums(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """The sum of each matrix that is trained, which is another after a step."""
    trained = {p: p.detach() for p in model.parameters() if p.requires_grad and p.ndim >= 2 and not p.is_meta}
    parts = {p: x.to_local() if isinstance(x, DTensor) else x for p, x in trained.items()}
    sums = {}
    for p, x in parts.items():
        with contextlib.suppress(NotImplementedError, RuntimeError):  # of what has 8 bits or fewer PyTorch has no sum
            if x.is_floating_point():
                sums[p] = x.sum(dtype=torch.float32)
    return sums


def _have_changed(before: dict[nn.Parameter, Tensor], model: nn.Module) -> bool:
    """True if matrices have another sum than before."""
    pairs = ((before[p].cpu(), now.cpu()) for p, now in _sums(model).items() if p in before)
    return any(not torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)


class LayerStatsCallback(TrainerCallback):
    """Layer statistics of the training batch every so many steps, in any `transformers.Trainer`.

        callback = LayerStatsCallback(every=100)
        Trainer(..., callbacks=[callback]).train()
        callback.to_pandas()        # step, site, layer, metric, mask, value

    All micro-batches of a measured step are merged, over all ranks too. A measured step runs uncompiled. A training
    that begins drops what the one before it left; one that resumes keeps the steps before. In another process those are
    the ones in the file `path`.

    Gradients are of the summed token loss: what the Trainer multiplies or divides the model's loss by is seen. They
    need labels that the Trainer passes to the model, and logits that the model returns, or `loss_tokens`. Else they are
    left out, with a warning.

    `absent` says what could not be measured at some step and why. What makes a number another than its name says is a
    warning too, as of `observe`.

    The table also holds `update_ratio`, |w' - w| / |w| of each matrix, w before the step and w' after it, weight decay
    included. Its site is the parameter's name. That of `observe` is of a block, and without decoupled
    weight decay. Where weights change before the optimizer's step it is left out, with a warning. So they do where the
    step is taken in the backward pass (DeepSpeed, LOMO, the layerwise optimizers).

    A logged loss that is a spike adds `loss_spike` at site "model", in standard deviations above the recent losses.

    Where the Trainer logs to TensorBoard, Weights & Biases or Trackio, each measured step sends the values of the first
    and last layer.

    Args:
        every: optimizer steps between measurements; the first one is measured.
        metrics: names from `METRICS`.
        blocks: which modules are the blocks, if structure does not show them (see `sites`).
        loss_tokens: as for `record`; by default counted.
        group: process group of the ranks that see different tokens, as for `observe`; default: all ranks.
        mask: what masks padding, as for `record`.
        update_ratio: also measure update ratios (keeps a copy of the matrices during a measured step).
        path: write the table here (Parquet) with each checkpoint, and when training ends. A training that resumes
            keeps the steps before in it.
        last: a CSV file of the last readings, written anew after each. It is there when the process dies.

    Raises:
        NormlabError: `every` not a whole number from 1, an unknown metric, no folder for `path` or `last`. Where a
            training resumes: `path` is a file, but no such table.
    """

    def __init__(
        self,
        every: int = 100,
        metrics: Sequence[str] = DEFAULT,
        *,
        blocks: str | None = None,
        loss_tokens: Any = None,
        group: Any = None,
        mask: TokenMask = None,
        update_ratio: bool = True,
        path: str | Path | None = None,
        last: str | Path | None = None,
    ):
        require_every(every)
        for file in (path, last):
            require_folder(file)
        self._metrics = [metric.name for metric in resolve_metrics(metrics)]
        self._every, self._loss_tokens, self._blocks, self._mask = every, loss_tokens, blocks, mask
        self._wants_ratio, self._path, self._group = update_ratio, path, group
        self._observer: Observer | None = None
        self._readings = Readings(path=None if last is None else Path(last))
        self._ratio: UpdateRatio | None = None
        self._sums: dict[nn.Parameter, Tensor] = {}  # of the matrices when the step began
        self._has_stepped = False  # they have changed before the optimizer's step
        self._trackers = Trackers()
        self._spikes = LossSpikes()

    def to_pandas(self) -> pandas.DataFrame:
        """Everything measured so far: columns `step site layer metric mask value`."""
        return self._readings.to_pandas()

    @property
    def absent(self) -> dict[str, str]:
        """What could not be measured at some step, and why: as `manifest["absent"]` of a recording."""
        return self._readings.absent

    def explain(self, since: int = 0) -> Explanation:
        """Rank the sites by when they left their own past, over the last readings (`Readings.explain`)."""
        return self._readings.explain(since)

    # -- the Trainer's events; it calls them with keywords -----------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        """Forget what was read of another training, or after the step from which this one resumes."""
        if self._observer is not None:  # of a training that was interrupted
            self._observer.close()
        self._readings.forget(state.global_step)
        if state.global_step and self._path is not None and self._readings.to_pandas().empty:
            self._readings.resume(Path(self._path), state.global_step)
        self._spikes, self._observer = LossSpikes(), None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Start recording if this step is to be measured."""
        if model is None:
            return
        if self._observer is None or self._observer.sites.model is not model:
            where = sites(model, self._blocks, mask=self._mask)
            self._observer = Observer(
                where, self._every, self._metrics, self._loss_tokens, self._readings, self._group
            )
        self._observer.begin(state.global_step)
        self._sums = _sums(model) if self._wants_ratio and state.global_step % self._every == 0 else {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Stop recording once all micro-batches are in, and remember the weights."""
        if self._observer is not None and self._observer.pause() and self._wants_ratio and model is not None:
            self._has_stepped, self._sums = _have_changed(self._sums, model), {}
            self._ratio = UpdateRatio(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Tabulate the step, with the update ratios if the weights were kept."""
        step = state.global_step - 1  # the step that has just ended began with this number done
        if self._observer is None or not self._observer.end(step):
            return
        if self._ratio is not None:
            measured = self._ratio.measure()  # on all ranks alike
            self._ratio = None
            if self._has_stepped:
                why = "the weights change before the optimizer's step, as where it is taken in the backward pass"
                self._observer.leave_out(step, {"update_ratio": why})
            else:
                self._readings.add_rows(step, list(measured), "update_ratio", list(measured.values()))
        if state.is_world_process_zero:
            report_to = args.report_to if isinstance(args.report_to, list) else [args.report_to]
            table = self.to_pandas()
            self._trackers.send(report_to, Path(args.output_dir) / "layers", table[table["step"] == step], step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Detect loss spikes, and say which layer left its past first."""
        if logs and "loss" in logs:
            score = self._spikes.score(float(logs["loss"]))
            if score > self._spikes.threshold:
                self._readings.add_rows(state.global_step, ["model"], "loss_spike", [score])
                recent = self.explain(state.global_step - RECENT * self._every)
                _log.warning("the loss spiked at step %d: %s", state.global_step, recent)

    def on_save(self, args, state, control, **kwargs):
        """Write the table beside a checkpoint: a training that resumes from it finds the steps before."""
        self._write(state)

    def on_train_end(self, args, state, control, **kwargs):
        """Write the table."""
        if self._observer is not None:
            self._observer.close()
        self._trackers.close()
        self._write(state)

    def _write(self, state):
        if self._path is not None and state.is_world_process_zero:
            with whole_file(Path(self._path)) as staged:
                self.to_pandas().to_parquet(staged, index=False)


# -- trackers --------------------------------------------------------------------------------------------------------

def curves(table: pandas.DataFrame) -> dict[str, float]:
    """`layers/<metric>/<site>/<layer>` of the first and the last layer at each site, all tokens counted."""
    rows = table[(table["mask"] == "all") & table["layer"].notna()].sort_values("layer")
    result = {}
    for (metric, site), part in rows.groupby(["metric", "site"], sort=False):
        for row in (part.iloc[0], part.iloc[-1]):
            result[f"layers/{metric}/{site}/{row['layer']}"] = float(row["value"])
    return result


class Trackers:
    """The trackers that a Trainer reports to. For TensorBoard there is a second writer next to the Trainer's.

    accelerate's trackers start runs themselves.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def send(self, report_to: Iterable[str], folder: Path, table: pandas.DataFrame, step: int) -> None:
        """Send the curves of the table of one step."""
        names = set(report_to) & {"tensorboard", "wandb", "trackio"}
        if not names or table.empty:
            return
        scalars = curves(table)
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            if self._writer is None:
                self._writer = SummaryWriter(str(folder))
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        if "wandb" in names:
            import wandb

            if wandb.run is not None:
                wandb.log(scalars | {"train/global_step": step})
        if "trackio" in names:
            import trackio
            from trackio.context_vars import current_run

            if current_run.get() is not None:
                trackio.log(scalars, step=step)

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
