"""Audit the probes on one architecture: what `record` gives against float64 hooks that share no rule with it.

    python -m benchmarks.architecture_audit data/bench/architectures.csv [class or task ...]

`audit` builds a class tiny and random. It records two batches with every metric: one padded and with a mask, one
without either. It compares them with tensors kept by plain hooks: block outputs, norm inputs, gradients of the summed
loss at block inputs, and the block's contribution. The model's outputs and parameter gradients must be the same with
and without recording.

What moves a tensor shows where its tokens are. Its shape, a mask or a module's name never do:

    features    the dimension that stays when the batch, the text and the image get larger
    rows        the positions that change when one row of the input changes
    text        the stack whose input changes with `input_ids` (or `decoder_input_ids`) reads that text, and its mask
    summed loss the factor in the gradient (p - onehot) / N at the logits

`forms_audit` goes over the other functions and over the forms of a model, with fewer classes.
"""

from __future__ import annotations

import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
import transformers
from torch import Tensor, nn

from benchmarks.architecture_zoo import LENGTH, TASKS, class_names, config_class_of, prepare
from benchmarks.timing import written
from normlab.errors import NormlabError
from normlab.probes import METRICS, Sites, record, sites, stacks

COLUMNS = ["class", "task", "status", "reason", "stacks", "value_error", "gradient_error", "identical", "transformers"]
SECONDS = 120  # of processor time per class
# Reasons that tell what a model does not have.
NOTHING_THERE = re.compile("changes the stream|stream is zero|goes into another branch|no residual connection|^_")
TOLERANCE = 2e-4  # largest relative error of a value; of a gradient, five times that
MOVED = 1e-4  # change, relative to a tensor's size, above which a position has moved
Batch = dict[str, Any]


class Timeout(BaseException):
    """A class took too long."""


# -- tensors of a run ------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def run(model: nn.Module, batch: Batch) -> Any:
    """The model's output, with the same random numbers every time."""
    torch.manual_seed(7)
    return model(**batch)


class Kept:
    """Everything that passes the blocks and norms of a stack in one forward and backward pass."""

    def __init__(self, where: Sites):
        self.runs: list[dict[str, Any]] = []
        self.norms: dict[nn.Module, list[Tensor]] = {}
        self.normed: list[tuple[nn.Module, Tensor, Tensor]] = []  # norms and activations, what they read and return
        self.handles: list[Any] = []
        for block in where.blocks:
            self.handles.append(block.module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(block.module.register_forward_hook(self._leave))
        for module in where.model.modules():
            self.handles.append(module.register_forward_pre_hook(self._read, with_kwargs=True))
            if re.search("norm|relu|silu|gelu|swish", type(module).__name__.lower()):
                self.handles.append(module.register_forward_hook(self._normed))

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def all(self) -> dict[Any, Tensor]:
        """Blocks' inputs and outputs, then what modules read."""
        blocks = {(i, name): entry[name] for i, entry in enumerate(self.runs) for name in ("h", "out")}
        return blocks | {(module, i): x for module, read in self.norms.items() for i, x in enumerate(read)}

    def _floats(self, value: Any) -> list[Tensor]:
        return [t for t in tensors(value) if t.is_floating_point() and t.ndim >= 2]

    def _float(self, value: Any) -> Tensor | None:
        return next(iter(self._floats(value)), None)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        read = self._floats([*args, *kwargs.values()])
        x = next(iter(read), None)
        if self.runs and type(self.runs[-1]["module"]) is type(module) and "out" in self.runs[-1]:
            before = self.runs[-1]["out"]  # a Reformer's block is given another stream first
            x = next((t for t in read if t.shape == before.shape and torch.equal(t.double(), before)), x)
        entry: dict[str, Any] = {"module": module, "h": None if x is None else x.detach().double()}
        if x is not None and x.requires_grad:
            x.register_hook(lambda g, e=entry: e.__setitem__("grad", g.detach().double()))
        self.runs.append(entry)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        entry = next(e for e in reversed(self.runs) if e["module"] is module and "out" not in e)
        entry["out"] = self._float(output).detach().double()  # type: ignore[union-attr]

    def _normed(self, module: nn.Module, args: tuple, output: Any) -> None:
        x = self._float(args)
        if x is not None:
            self.normed += [(module, x.detach().double(), t.detach().double()) for t in tensors(output)]

    def _read(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = self._float([*args, *kwargs.values()])
        if x is not None and not any(isinstance(m, nn.ModuleList) for m in module.modules()):
            self.norms.setdefault(module, []).append(x.detach().double())


# -- where the tokens of a tensor are --------------------------------------------------------------------------------


def _other_ids(ids: Tensor) -> Tensor:
    """Other token ids, each unlike its own."""
    return (ids + 12) % 55 + 5


def changed(batch: Batch, names: set[str], rows: list[int]) -> Batch:
    """The batch with other values in `rows` of the inputs called `names`."""
    result = dict(batch)
    for name in names & set(batch):
        x = batch[name]
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[rows] = True
        if x.is_floating_point():
            shape = (-1, *(1,) * (x.ndim - 1))
            result[name] = torch.where(mask.view(shape), x.flip(-1) * 0.7 + 0.3, x)
        elif x.ndim == 2:
            result[name] = torch.where(mask[:, None], _other_ids(x), x)
    return result


def larger(batch: Batch, longer: bool) -> Batch:
    """The batch with a third row, and, if `longer`, with longer text and larger (or, if large, smaller) images."""
    result = {}
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.ndim:
            x = torch.cat([x, x[:1]])
            if longer and name == "pixel_values":
                half = x[..., : x.shape[-2] // 2, : x.shape[-1] // 2]
                wide = torch.cat([x, x[..., : x.shape[-1] // 2]], -1)
                x = half if x.shape[-1] > 128 else torch.cat([wide, wide[..., : x.shape[-2] // 2, :]], -2)
            elif longer and x.ndim >= 2 and x.shape[1] == LENGTH:
                x = torch.cat([x, x[:, : LENGTH // 2]], 1)
            elif longer and x.ndim == 2 and x.shape[1] == LENGTH - 6:
                x = torch.cat([x, x[:, :8]], 1)
        result[name] = x
    return result


class Layout(NamedTuple):
    """The places of the tokens in one tensor."""

    features: int  # its dimension
    rows: Tensor  # (positions,): the row of the input; -1 where two rows or none move it


INPUTS = {"input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values", "flattened_patches", "bbox"}


class Layouts:
    """The layouts of all tensors of a stack, and the text that the stack reads."""

    def __init__(self, where: Sites, batch: Batch):
        self.where = where
        model, first = where.model, self._tensors(batch)
        entered = first[0, "h"]
        self.text = ""  # the argument that the stack's input changes with
        for name in ("input_ids", "decoder_input_ids"):
            if name in batch:
                other = self._tensors(changed(batch, {name}, [0, 1]))[0, "h"]
                self.text = name if self._moved(entered, other).any() else self.text
        self.is_token_major = self._streams_of_a_token_are_adjacent(batch, entered)
        grown: dict[Any, Tensor] = {}
        for longer in (True, False):
            try:
                grown = grown or self._tensors(larger(batch, longer))
            except Exception:
                continue
        by_row = [self._tensors(changed(batch, INPUTS, [row])) for row in (0, 1)]
        self.by_shape: dict[tuple[int, ...], list[Layout]] = {}
        for key, x in first.items():
            features, after = x.ndim - 1, grown.get(key)
            if after is not None and after.ndim == x.ndim:
                fixed = [d for d in range(x.ndim) if after.shape[d] == x.shape[d]]
                features = fixed[-1] if fixed else features
            if any(key not in other for other in by_row):
                continue
            one, two = (self._positions(self._moved(x, other[key]), features) for other in by_row)
            rows = torch.where(one & ~two, 0, torch.where(two & ~one, 1, -1))
            layouts = self.by_shape.setdefault(tuple(x.shape), [])
            if not any(known.features == features and torch.equal(known.rows, rows) for known in layouts):
                layouts.append(Layout(features, rows))
        model.zero_grad(set_to_none=True)

    def _tensors(self, batch: Batch) -> dict[Any, Tensor]:
        with Kept(self.where) as kept, torch.no_grad():
            run(self.where.model, batch)
        return kept.all()

    def _moved(self, x: Tensor, other: Tensor) -> Tensor:
        if x.shape != other.shape:
            return torch.ones_like(x, dtype=torch.bool)
        return (x - other).abs() > MOVED * x.square().mean().sqrt()

    def _positions(self, moved: Tensor, features: int) -> Tensor:
        return moved.any(features).reshape(-1)

    def _streams_of_a_token_are_adjacent(self, batch: Batch, h: Tensor) -> bool:
        """True if several streams per token lie as (tokens, streams), by what the first token of a text moves."""
        if not self.text or h.ndim < 4:
            return False
        ids = batch[self.text].clone()
        ids[:, 0] = _other_ids(ids[:, 0])
        moved = self._positions(self._moved(h, self._tensors(batch | {self.text: ids})[0, "h"]), h.ndim - 1)
        at = moved.nonzero()[:, 0]
        return len(at) > 1 and bool(at[1] - at[0] == 1)

    def of(self, x: Tensor) -> list[Layout]:
        """The layouts that tensors of this shape have; those with every row known first."""
        layouts = self.by_shape.get(tuple(x.shape), [])
        return sorted(layouts, key=lambda layout: int((layout.rows < 0).sum()))

    def masks(self, layout: Layout, batch: Batch) -> Tensor | None:
        """(2, positions) bool: the tokens that count, and those without each row's first; None if not known.

        Within a row, text keeps its order.
        """
        mask = batch.get("attention_mask") if self.text == "input_ids" else None
        length = batch[self.text].shape[1] if self.text else 0
        real = torch.zeros(2, len(layout.rows), dtype=torch.bool)
        for row in (0, 1):
            at = (layout.rows == row).nonzero()[:, 0]
            streams, rest = divmod(len(at), length) if length else (0, 1)
            if not len(at) or (mask is not None and (rest or not streams)):
                return None
            if rest or not streams:  # no text, or fewer positions than tokens: all count
                kept, begins = torch.ones(len(at), dtype=torch.bool), torch.arange(len(at)) == 0
            else:
                kept = torch.ones(length, dtype=torch.bool) if mask is None else mask[row].bool()
                begins = (kept.cumsum(0) == 1) & kept
                if self.is_token_major:
                    kept, begins = kept.repeat_interleave(streams), begins.repeat_interleave(streams)
                else:
                    kept, begins = kept.repeat(streams), begins.repeat(streams)
            real[0, at], real[1, at] = kept, kept & ~begins
        return real


# -- comparison ------------------------------------------------------------------------------------------------------


def expected(x: Tensor, layout: Layout, masks: Tensor) -> dict[tuple[str, str], float]:
    """The activation metrics of x in float64, by (metric, mask)."""
    rows = x.movedim(layout.features, -1).reshape(-1, x.shape[layout.features])
    right = {}
    for name, mask in zip(("all", "no_first"), masks, strict=True):
        kept = rows[mask]
        if len(kept):
            right["token_l2_mean", name] = float(kept.norm(dim=1).mean())
            right["feature_var_mean", name] = float(kept.var(1, unbiased=False).mean())
            right["rms", name] = float(kept.square().mean().sqrt())
            right["max_abs", name] = float(kept.abs().max())
    return right


def relative(value: float, right: float) -> float:
    """Relative error; 0 where the right value is NaN."""
    if value == right:
        return 0.0
    return abs(value - right) / max(abs(right), 1e-12) if right == right else 0.0


def summed_factor(loss: Tensor, logits: Tensor) -> float | None:
    """N of a loss that is summed cross-entropy / N, from its gradient (p - onehot) / N at any labelled position."""
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    if gradient is None:
        return None
    rows, p = gradient.double().reshape(-1, logits.shape[-1]), logits.detach().double().softmax(-1)
    kept = rows.abs().sum(1) > 0
    rows, p = rows[kept], p.reshape(-1, logits.shape[-1])[kept]
    if not len(rows):
        return None
    lowest, label = rows.min(1)
    factor = (1 - p.gather(1, label[:, None])[:, 0]) / -lowest
    onehot = torch.nn.functional.one_hot(label, rows.shape[1]).double()
    fits = (rows * factor[:, None] - (p - onehot)).norm() <= 1e-3 * (p - onehot).norm()
    spread = float(factor.std() if len(factor) > 1 else 0)
    return float(factor.mean()) if bool(fits) and spread < 1e-3 * float(factor.mean()) else None


class Audit:
    """One stack of one model on one batch."""

    def __init__(self, where: Sites, layouts: Layouts, batch: Batch):
        self.where, self.layouts, self.batch, self.model = where, layouts, batch, where.model
        self.reasons: dict[str, str] = {}
        self.wrong: list[str] = []
        self.error = self.gradient_error = 0.0
        self.identical = True
        self.tested_gradients = False

    def record(self) -> None:
        """Record the stack and compare. Raises `NormlabError` where the recording does."""
        model, batch = self.model, self.batch
        plain_output = run(model, batch)
        plain, loss = [t.detach() for t in tensors(plain_output)], None
        if isinstance(plain_output, dict):
            loss = plain_output.get("loss")
        grads: list[Tensor | None] | None = None
        if loss is not None and loss.requires_grad:
            loss.backward()
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        with record(self.where, [m for m in METRICS if METRICS[m].kind != "gradient"]) as rec, torch.no_grad():
            output = run(model, batch)
        self.identical = equal(tensors(output), plain)
        stats = rec.stats()
        self.values = self._table(stats)
        gradient_stats = None
        if grads is not None:
            try:
                with record(self.where, ["grad_l2_mean", "grad_l2_total"]) as gradient_rec:
                    run(model, batch)["loss"].backward()
                gradient_stats = gradient_rec.stats()
                mine = [p.grad for p in model.parameters()]
                self.identical &= all(
                    (a is None) == (b is None) and (a is None or torch.equal(a.nan_to_num(), b.nan_to_num()))
                    for a, b in zip(mine, grads, strict=True)
                )
            except NormlabError as error:
                self.reasons["gradients"] = str(error)
            model.zero_grad(set_to_none=True)
        self.reasons |= stats.manifest["absent"]
        factor = None
        with Kept(self.where) as kept:
            output = run(model, batch)
            if gradient_stats is not None:
                factor = summed_factor(output["loss"], output["logits"])
            if grads is not None:
                output["loss"].backward()
        if "no backward pass ran" in self.reasons.get("gradients", "") and not any("grad" in e for e in kept.runs):
            reason = self.reasons.pop("gradients")
            self.reasons["_gradients"] = "the loss does not depend on these blocks: " + reason
        model.zero_grad(set_to_none=True)
        if len(kept.runs) != stats.manifest["layers"]:
            self.wrong.append(f"{len(kept.runs)} runs of blocks, {stats.manifest['layers']} layers")
        scaled = {layer for (_, layer), forms in rec.branches.items() if "scaled" in forms.values()}
        for layer, entry in enumerate(kept.runs, start=1):
            h, out = entry["h"], entry["out"]
            read = [x.float() for _, x, _ in kept.normed if x.shape == h.shape == out.shape]
            is_added = any(torch.equal((h + out).float(), x) for x in read)  # by the model, to what the block read
            self._activation([out, h + out] if is_added else out, ("block_out", layer))
            self._contribution(layer, entry, kept, layer in scaled)
        for norm, (site, layer) in rec.norm_sites.items():
            if (site, layer, "rms", "all") in self.values and norm in kept.norms:
                self._activation(kept.norms[norm], (site, layer))
        self.tested_gradients = factor is not None
        if gradient_stats is not None and factor is not None:
            self._gradients(kept, self._table(gradient_stats), factor)
        elif gradient_stats is not None:
            self.reasons.setdefault("_gradients", "the audit has no factor")

    def _table(self, stats: Any) -> dict[tuple[str, int, str, str], float]:
        return {(r.site, int(r.layer), r.metric, r.mask): r.value for r in stats.to_pandas().itertuples()}

    def _known(self, x: Tensor, name: str) -> tuple[Layout, Tensor] | None:
        """The layout and masks of a tensor."""
        for layout in self.layouts.of(x):
            rows = x.movedim(layout.features, -1).reshape(-1, x.shape[layout.features])
            if torch.equal(rows.nan_to_num(), rows[:1].nan_to_num().expand_as(rows)):  # dead: all tokens are alike
                return layout, torch.ones(2, len(rows), dtype=torch.bool)
            masks = self.layouts.masks(layout, self.batch)
            if masks is not None:
                return layout, masks
        self.reasons.setdefault(f"unchecked {name}", "the audit cannot tell rows from what moves the tensor")
        return None

    def _activation(self, xs: Tensor | list[Tensor], place: tuple[str, int]) -> None:
        if (*place, "rms", "all") not in self.values:
            return
        errors = []
        for x in [xs] if isinstance(xs, Tensor) else xs:  # a norm that ran twice: one of its reads is at the site
            known = self._known(x, place[0])
            if known is not None:
                right = expected(x, *known)
                errors.append(
                    max(relative(self.values.get((*place, *key), float("nan")), v) for key, v in right.items())
                )
        if errors:
            error = min(errors)
            self.error = max(self.error, error)
            if not error <= TOLERANCE:
                self.wrong.append(f"{place[0]} {place[1]}: {error:.1e}")

    def _contribution(self, layer: int, entry: dict[str, Any], kept: Kept, is_scaled: bool) -> None:
        """Compare what the block adds. The stream may be a norm's output, one that another norm's replaces later."""
        h, out = entry["h"], entry["out"]
        ratio = self.values.get(("block", layer, "relative_contribution", "all"))
        is_norm = any(torch.equal(out, x) for _, _, x in kept.normed if x.shape == out.shape)
        # Of a Post-LN block the sum is not the output.
        if ratio is None or h.shape != out.shape or is_norm or is_scaled:
            return
        known = self._known(h, "block")
        if known is None:
            return
        layout, masks = known
        inside = [
            (a, b) for m, a, b in kept.normed if a.shape == b.shape == h.shape and m in entry["module"].children()
        ]
        errors, size = [], 0.0
        # A norm's output replaces the sum of the branches.
        later = [(b + d - c, b) for _, b in inside for c, d in inside]
        for base, stream in [(h, h), *((b, b) for _, b in inside), *later]:
            ratios = (out - base).norm(dim=layout.features) / stream.norm(dim=layout.features)
            size = float(ratios.reshape(-1)[masks[0]].mean())
            errors.append(relative(ratio, size))
        if min(errors) > 1e-3 and ratio > 1e-4:  # below, the difference itself is rounding
            self.wrong.append(f"block {layer}: {ratio:.4g} against {size:.4g}")

    def _gradients(self, kept: Kept, table: dict[tuple[str, int, str, str], float], factor: float) -> None:
        for layer, entry in enumerate(kept.runs, start=1):
            if "grad" not in entry or entry["grad"].abs().max() == 0:
                continue
            if ("block_in_grad", layer, "grad_l2_total", "all") not in table:
                self.reasons.setdefault("gradients", "absent at a block's input")
                continue
            g = entry["grad"]
            known = self._known(g, "block_in_grad")
            if known is None:
                continue
            layout, masks = known
            norms = g.movedim(layout.features, -1).reshape(-1, g.shape[layout.features])[masks[0]].norm(dim=1)
            for metric, right in (("grad_l2_total", norms.norm()), ("grad_l2_mean", norms.mean())):
                value = table["block_in_grad", layer, metric, "all"]
                self.gradient_error = max(self.gradient_error, relative(value, factor * float(right)))
        if not self.gradient_error <= 5 * TOLERANCE:
            self.wrong.append(f"gradients: {self.gradient_error:.1e}")


# -- one class -------------------------------------------------------------------------------------------------------


def without_padding(batch: Batch) -> Batch | None:
    """The batch without a mask and without padding; None if it has no mask."""
    if "attention_mask" not in batch:
        return None
    result = {name: value for name, value in batch.items() if name != "attention_mask"}
    for name in ("input_ids", "labels"):
        x = result.get(name)
        if isinstance(x, Tensor) and x.shape == batch["attention_mask"].shape:
            result[name] = torch.where(batch["attention_mask"] == 0, 7 + torch.arange(x.shape[1]), x)
    return result


def audit_model(model: nn.Module, batch: Batch) -> tuple[list[Audit], list[str]]:
    """The audits of all stacks on both batches, and why stacks were refused."""
    try:
        chosen = {"": sites(model)}
    except NormlabError as error:
        if "several stacks" not in str(error):
            raise
        chosen = stacks(model)
    audits, refused = _audit_stacks(chosen, batch)
    if not audits and "stacks(model)" in "".join(refused) and len(chosen) == 1:  # what the line says to do
        more, others = _audit_stacks(stacks(model), batch)
        audits, refused = more, others if more or others else refused
    return audits, refused


def _audit_stacks(chosen: dict[str, Sites], batch: Batch) -> tuple[list[Audit], list[str]]:
    audits: list[Audit] = []
    refused: list[str] = []
    plain = without_padding(batch)
    for where in chosen.values():
        try:
            layouts = Layouts(where, batch)
        except KeyError:  # no block ran
            layouts = None
        for one in (batch, plain):
            if one is None:
                continue
            if one is plain:
                try:
                    with torch.no_grad():
                        run(where.model, one)
                except Exception:
                    continue  # it needs a mask
            found = Audit(where, layouts, one)  # type: ignore[arg-type]
            try:
                found.record()
                audits.append(found)
            except NormlabError as error:
                if "the model ran, but no block" not in str(error) or len(chosen) == 1:
                    refused.append(str(error))
    return audits, list(dict.fromkeys(refused))


def audit(task: str, name: str) -> dict[str, Any]:
    """One class as a row of the table."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"class": name, "task": task, "stacks": 0}
    row["transformers"] = transformers.__version__
    try:
        model, batch = prepare(name, config_class_of(task, name), task)
    except Exception as error:
        return row | {"status": "not built", "reason": _line(error)}
    own_failure = _own_failure(model, batch)
    if own_failure:
        batch = {k: v for k, v in batch.items() if k != "labels"}
    try:
        audits, refused = audit_model(model, batch)
    except NormlabError as error:
        return row | {"status": "refused", "reason": str(error)}
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        at = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}" if trace else ""
        return row | {"status": "crash", "reason": f"{_line(error)} ({at})"}
    if not audits:
        return row | {"status": "refused", "reason": "; ".join(refused)}
    wrong = [w for one in audits for w in one.wrong]
    reasons = [f"{k}: {v}" for one in audits for k, v in one.reasons.items()] + refused
    identical = all(one.identical for one in audits)
    left_out = [r for r in reasons if not NOTHING_THERE.search(r)]
    status = "wrong" if wrong or not identical else "partly" if left_out or own_failure else "measured"
    tested = all(one.tested_gradients for one in audits)
    return row | {
        "status": status,
        "reason": "; ".join(filter(None, [own_failure, *_short(wrong or left_out or reasons)])),
        "stacks": len({one.where.blocks[0].name for one in audits}),
        "value_error": f"{max(one.error for one in audits):.1e}",
        "gradient_error": f"{max(one.gradient_error for one in audits):.1e}" if tested else "",
        "identical": identical,
    }


def _own_failure(model: nn.Module, batch: Batch) -> str:
    """The reason why the model's own backward pass fails, if it does."""
    output = run(model, batch)
    loss = output.get("loss") if isinstance(output, dict) else None
    reason = ""
    if loss is not None and loss.requires_grad:
        try:
            loss.backward()
        except Exception as error:
            reason = f"its own backward pass fails: {_line(error)}"
        model.zero_grad(set_to_none=True)
    return reason


def _short(reasons: list[str]) -> list[str]:
    """The reasons without their layers, each once."""
    return list(dict.fromkeys(re.sub(r"^_?(\w+) \d+: |(?<=from )\(.*", r"\1: ", r).strip() for r in reasons))[:3]


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


# -- all classes -----------------------------------------------------------------------------------------------------


def rows_of(only: set[str], seconds: int = SECONDS) -> Any:
    """The rows of all classes, or of those named (a class or a task), one after the other."""

    def stop(*_: Any) -> None:
        raise Timeout

    signal.signal(signal.SIGPROF, stop)
    for task in TASKS:
        for name in class_names(task):
            if only and not {name, task} & only:
                continue
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                row = audit(task, name)
            except Timeout:
                empty = dict.fromkeys(COLUMNS, "") | {"class": name, "task": task}
                empty["transformers"] = transformers.__version__
                row = empty | {"status": "not built", "reason": f"takes more than {seconds} seconds"}
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            print(task, name, row["status"], row["reason"][:160], flush=True)
            yield row


def main(out: str, only: set[str]) -> None:
    """Audit, print, and write the table to `out`."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = written(rows_of(only), Path(out), COLUMNS)
    print(pandas.DataFrame(rows).groupby(["task", "status"]).size().unstack(fill_value=0))


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
