"""Audit every function of the probes on every form of a model: compiled, wrapped, padded, offloaded, checkpointed.

    python -m benchmarks.forms_audit data/bench/forms.csv [class ...]

A class is built tiny and random, by `architecture_zoo`. `forms_oracle` gives the right values from its plain form, by
hooks and formulas of its own. Each form is a row of `FORMS`, each function a row of `FUNCTIONS`. A cell of the table is

    right        all values agree: within 1e-4 relative and 1e-6 of the quantity's scale, both several float32 roundings
    refused: ... a `NormlabError`, whose line follows
    absent: ...  no value, with the reason that normlab gives
    unchecked    values without a second reading of them
    no such      the class has no such form, or the form itself computes something else
    WRONG: ...   a value differs, or what the model returns does
    failed: ...  a traceback
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
import transformers
from torch import Tensor, nn

from benchmarks.architecture_audit import equal, run, tensors
from benchmarks.architecture_zoo import config_class_of, prepare
from benchmarks.forms_oracle import IGNORED, JUDGED, LARGE, PROBES, Oracle, Right, Unchecked
from benchmarks.timing import written
from normlab.errors import NormlabError
from normlab.probes import (
    METRICS,
    angular_distance,
    attention_sinks,
    cheapest_branches,
    cheapest_spans,
    jacobian_identity,
    logit_lens_kl,
    massive_activations,
    record,
    skip_future_effect,
    skip_sensitivity,
    stacks,
    void_tokens,
)

RELATIVE, ROUNDING = 1e-4, 1e-6
PADDED = 3  # tokens of the first row
Batch = dict[str, Any]
CAUSAL = (
    "Llama Qwen3 Gemma2 Gemma3 Phi GPTNeoX GPTNeo GPTJ OPT Bloom Falcon Mpt StableLm Olmo2 Cohere Granite Glm4 BioGpt "
    "DiffLlama Mixtral Qwen2Moe Olmoe GptOss DeepseekV3 Jamba Mamba GraniteMoe Phimoe Lfm2 Gemma4"
)
MASKED = "Bert Roberta Albert ModernBert Esm DebertaV2 DistilBert RobertaPreLayerNorm"
SEQ2SEQ = "Bart T5 SwitchTransformers"
CLASSES: tuple[tuple[str, str], ...] = (
    ("causal", "GPT2LMHeadModel"),
    ("causal", "XLNetLMHeadModel"),
    *(("causal", f"{name}ForCausalLM") for name in CAUSAL.split()),
    *(("masked", f"{name}ForMaskedLM") for name in MASKED.split()),
    *(("seq2seq", f"{name}ForConditionalGeneration") for name in SEQ2SEQ.split()),
)


# -- forms -----------------------------------------------------------------------------------------------------------


class OwnNames(nn.Module):
    """Holds a model under argument names of its own."""

    names = {"input_ids": "tokens", "attention_mask": "keep", "decoder_input_ids": "written", "labels": "targets"}

    def __init__(self, content: nn.Module):
        super().__init__()
        self.content = content

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        written: Tensor | None = None,
        targets: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        given = {"attention_mask": keep, "decoder_input_ids": written, "labels": targets, "use_cache": use_cache}
        takes = inspect.signature(self.content.forward).parameters
        return self.content(input_ids=tokens, **{k: v for k, v in given.items() if v is not None and k in takes})


class SameNames(nn.Module):
    """Hands on what it is given, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class NoSuchForm(Exception):
    """The class has no such form."""


def _as_is(model: nn.Module) -> nn.Module:
    return model


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _forward_compiled(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _blocks_compiled(model: nn.Module) -> nn.Module:
    for block in stack_of(model).blocks:
        block.module.compile(backend="eager")
    return model


def _blocks_wrapped(model: nn.Module) -> nn.Module:
    for block in stack_of(model).blocks:
        above, _, name = block.name.rpartition(".")
        setattr(model.get_submodule(above), name, torch.compile(block.module, backend="eager"))
    return model


def _offloaded(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def _checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NoSuchForm("it has no checkpoints")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    for module in model.modules():  # checkpoints are of training, in which nothing may be random here
        for name, value in vars(module).items():
            if re.search("drop|jitter", name) and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class Form(NamedTuple):
    """A way to hold and call a model."""

    name: str
    dress: Callable[[nn.Module], nn.Module] = _as_is
    padding: str = "right"
    is_used: bool = False  # it has run before, so that compiled code is there


FORMS = (
    Form("plain", padding="none"),
    Form("padded on the right"),
    Form("padded on the left", padding="left"),
    Form("torch.compile(model)", _compiled, is_used=True),
    Form("model.compile()", _compiled_in_place),
    Form("model.forward compiled", _forward_compiled),
    Form("block.compile()", _blocks_compiled, is_used=True),
    Form("torch.compile(block)", _blocks_wrapped),
    Form("in a module, same names", SameNames),
    Form("in a module, own names", OwnNames),
    Form("cpu_offload", _offloaded),
    Form("checkpoints, reentrant", lambda model: _checkpointed(model, True)),
    Form("checkpoints, not reentrant", lambda model: _checkpointed(model, False)),
)


def stack_of(model: nn.Module) -> Any:
    """The stack that is audited: a decoder where there is one."""
    found = stacks(model)
    return next((where for name, where in found.items() if "decoder" in name), list(found.values())[-1])


def padded(batch: Batch, padding: str) -> Batch:
    """The zoo's batch, padded on the other side or not at all."""
    if padding == "right" or "attention_mask" not in batch:
        return batch
    batch, mask = dict(batch), torch.ones_like(batch["attention_mask"])
    ids, labels = batch["input_ids"].clone(), batch["labels"].clone()
    ids[0, -PADDED:] = torch.arange(7, 7 + PADDED)
    if labels.shape == ids.shape:
        labels[0, -PADDED:] = ids[0, -PADDED:]
    if padding == "left":
        mask[0, :PADDED] = ids[0, :PADDED] = 0
        if labels.shape == ids.shape:
            labels[0, :PADDED] = IGNORED
    return batch | {"attention_mask": mask, "input_ids": ids, "labels": labels}


def other(batch: Batch) -> Batch:
    """A batch of other tokens."""
    names = [name for name in ("input_ids", "decoder_input_ids", "labels") if name in batch]
    changed = {name: torch.where(batch[name] > 4, (batch[name] + 12) % 55 + 5, batch[name]) for name in names}
    return batch | changed


def renamed(form: nn.Module, batch: Batch) -> Batch:
    """The batch under the names that this form takes."""
    if not isinstance(form, OwnNames):
        return batch
    return {form.names.get(name, name): value for name, value in batch.items()}


# -- functions -------------------------------------------------------------------------------------------------------


class Subject:
    """One form of a class, as normlab sees it, and the oracle of the plain form."""

    def __init__(self, form: Form, model: nn.Module, batch: Batch, oracle: Oracle, second: Oracle):
        twin = copy.deepcopy(model)
        self.plain = dict(zip(twin.modules(), model.modules(), strict=True))  # module -> the oracle's
        self.oracle, self.second = oracle, second
        self.model = form.dress(twin)
        self.batch = renamed(self.model, batch)
        # For experiments: labels keep their name, by which the loss is computed.
        self.inputs = [self._own(b) for b in (oracle.batch, second.batch)]
        if form.is_used:
            with torch.no_grad():
                self.model(**self.batch)
        self._tables: dict[bool, Any] = {}

    def _own(self, batch: Batch) -> Batch:
        labels = {"labels": batch["labels"]}
        return renamed(self.model, {k: v for k, v in batch.items() if k != "labels"}) | labels

    @cached_property
    def where(self) -> Any:
        """The model itself where it has one stack; else the stack."""
        return self.model if len(stacks(self.model)) == 1 else stack_of(self.model)

    def step(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """A pass and its backward pass: what the model returned, and the gradients of its parameters."""
        output = run(self.model, self.batch)
        output.loss.backward()
        grads = [p.grad for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return [t.detach() for t in tensors(output)], grads

    @cached_property
    def own_step(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The step without a recording: uncompiled too, as a recording is."""
        with torch.compiler.set_stance("force_eager"):
            return self.step()

    def recorded(self, is_gradient: bool) -> Any:
        """What a recording of one step holds. Raises `AssertionError` if it changes the step."""
        if is_gradient not in self._tables:
            try:
                self._tables[is_gradient] = self._record(is_gradient)
            except Exception as error:
                self._tables[is_gradient] = error
        if isinstance(self._tables[is_gradient], Exception):
            raise self._tables[is_gradient]
        return self._tables[is_gradient]

    def _record(self, is_gradient: bool) -> Any:
        wanted = [name for name, metric in METRICS.items() if (metric.kind == "gradient") == is_gradient]
        output, grads = self.own_step
        with record(self.where, wanted) as rec:
            recorded_output, recorded_grads = self.step()
        assert equal(output, recorded_output), "the model returns something else while it is recorded"
        for a, b in zip(grads, recorded_grads, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), "a parameter's gradient differs"
        stats = rec.stats()
        table = {(r.site, int(r.layer), r.metric, r.mask): r.value for r in stats.to_pandas().itertuples()}
        return table, stats.manifest["absent"], rec


class Function(NamedTuple):
    """Something that normlab measures."""

    name: str
    right: Callable[[Subject], Right]  # by the oracle
    given: Callable[[Subject], dict[tuple, float]]  # by normlab


def _metrics(name: str, right: Callable[[Subject], Right], is_gradient: bool = False) -> Function:
    return Function(name, right, lambda subject: subject.recorded(is_gradient)[0])


def _norms(subject: Subject) -> Right:
    found = subject.recorded(False)[2].norm_sites
    return subject.oracle.norm_inputs({subject.plain[norm]: place for norm, place in found.items()})


def _branches(subject: Subject) -> Right:
    found = subject.recorded(False)[2].branches
    return subject.oracle.branches({place: subject.plain[[*forms][-1]] for place, forms in found.items()})


def _skip(part: str, span: int = 1) -> Function:
    def given(subject: Subject) -> dict[tuple, float]:
        table = skip_sensitivity(subject.where, subject.inputs[:1], parts=[part], span=span, progress=False)
        columns = ("skip_delta_loss", "output_kl", "loss")
        return {(part, r.layer, c): getattr(r, c) for r in table.itertuples() for c in columns}

    name = f"skip {part}" if span == 1 else f"skip {span} blocks"
    return Function(name, lambda subject: subject.oracle.skip(part, span), given)


def _spans(subject: Subject) -> dict[tuple, float]:
    table = cheapest_spans(subject.where, subject.inputs, longest=2, progress=False)
    return {(r.length, r.first): r.skip_delta_loss for r in table.itertuples()}


def _right_spans(subject: Subject) -> Right:
    right: Right = {}
    chosen, measured = subject.oracle, subject.second
    for length in (1, 2):
        starts = range(1, len(chosen.blocks) - length + 2)
        spans = {first: [("block", first + i) for i in range(length)] for first in starts}
        best = min(starts, key=lambda first: chosen.delta(*spans[first]))
        right[length, best] = (measured.delta(*spans[best]), 5.0)
    return right


def _drops(subject: Subject) -> dict[tuple, float]:
    table = cheapest_branches(subject.where, subject.inputs, most=2, candidates=99, progress=False)
    return {(r.dropped, r.part, r.layer): r.skip_delta_loss for r in table.itertuples()}


def _right_drops(subject: Subject) -> Right:
    right: Right = {}
    left_out: list[tuple[str, int]] = []
    for count in (1, 2):
        others = [one for one in subject.oracle.branches_named if one not in left_out]
        if len(others) < 2:
            raise Unchecked("no two branches have names that are known here")
        left_out.append(min(others, key=lambda one: subject.oracle.delta(*left_out, one)))
        right[count, *left_out[-1]] = (subject.second.delta(*left_out), 5.0)
    return right


def _values(function: Callable, *columns: str, **options: Any) -> Callable[[Subject], dict[tuple, float]]:
    """The values of a table by these columns."""

    def given(subject: Subject) -> dict[tuple, float]:
        table = function(subject.where, subject.inputs[:1], progress=False, **options)
        return {tuple(int(getattr(r, c)) for c in columns): r.value for r in table.itertuples()}

    return given


def _angles(subject: Subject) -> dict[tuple, float]:
    table = angular_distance(subject.where, subject.inputs[:1], progress=False)
    return {(i, j): float(table.loc[i, j]) for i in table.index for j in table.columns if i <= j}


def _void(subject: Subject) -> dict[tuple, float]:
    table = void_tokens(subject.where, subject.inputs[:1], progress=False)
    return {(r.rule, r.layer): r.value for r in table.itertuples()}


def _massive(subject: Subject) -> dict[tuple, float]:
    table = massive_activations(subject.where, subject.inputs[0], least=0.0, ratio=LARGE).table
    places = ((r, (r.layer, r.row, r.position, r.feature)) for r in table.itertuples())
    return {(*place, name): getattr(r, name) for r, place in places for name in ("value", "ratio")}


def _sinks(subject: Subject) -> dict[tuple, float]:
    threshold = 0.1
    with contextlib.suppress(Unchecked):
        threshold = subject.oracle.threshold
    table = attention_sinks(subject.where, subject.inputs[0], threshold=threshold, queries=JUDGED).table
    places = ((r, (r.layer, r.row, r.position)) for r in table.itertuples())
    return {(*place, name): getattr(r, name) for r, place in places for name in ("heads", "weight")}


FUNCTIONS = (
    _metrics("activations", lambda s: s.oracle.activations()),
    _metrics("norm inputs", _norms),
    _metrics("branches", _branches),
    _metrics("changes", lambda s: s.oracle.changes()),
    _metrics("gradients", lambda s: s.oracle.gradients(), is_gradient=True),
    _metrics("attention entropy", lambda s: s.oracle.attention_entropy()),
    _metrics("largest score", lambda s: s.oracle.attention_logit_max()),
    _metrics("router entropy", lambda s: s.oracle.router_entropy()),
    _metrics("expert load", lambda s: s.oracle.expert_load()),
    _skip("block"),
    _skip("attention"),
    _skip("mlp"),
    _skip("block", span=2),
    Function("cheapest spans", _right_spans, _spans),
    Function("cheapest branches", _right_drops, _drops),
    Function("void tokens", lambda s: s.oracle.void(), _void),
    Function("future effect", lambda s: s.oracle.future_effect(), _values(skip_future_effect, "skipped", "layer")),
    Function("angles", lambda s: s.oracle.angles(), _angles),
    Function("Jacobian", lambda s: s.oracle.jacobian(), _values(jacobian_identity, "layer", probes=PROBES)),
    Function("logit lens", lambda s: s.oracle.lens(), _values(logit_lens_kl, "layer")),
    Function("massive", lambda s: s.oracle.massive(), _massive),
    Function("sinks", lambda s: s.oracle.sinks(), _sinks),
)
EXACT_PLACES = ("massive", "sinks", "cheapest spans", "cheapest branches")  # whose rows are what is found
COLUMNS = ["class", "task", "form", *(function.name for function in FUNCTIONS), "error", "transformers"]


# -- cells -----------------------------------------------------------------------------------------------------------


def cell(function: Function, subject: Subject) -> tuple[str, float]:
    """The verdict on a function on a form, and the largest error in units of what is allowed."""
    try:
        given = function.given(subject)
    except NormlabError as error:
        return f"refused: {error}", 0.0
    except AssertionError as error:
        return f"WRONG: {error}", 0.0
    except Exception as error:
        return f"failed: {_traced(error)}", 0.0
    try:
        right = function.right(subject)
    except Unchecked as error:
        return f"unchecked: {error}", 0.0
    except Exception as error:
        return f"unchecked: the audit's own reading fails ({type(error).__name__})", 0.0
    if function.name in EXACT_PLACES and given.keys() != right.keys():
        differing = sorted(given.keys() ^ right.keys())
        return f"WRONG: {len(differing)} of {len(right)} places, such as {differing[0]}", 0.0
    missing = [place for place in right if place not in given or math.isnan(given[place])]
    errors = {
        place: abs(given[place] - value) / (RELATIVE * abs(value) + ROUNDING * scale)
        for place, (value, scale) in right.items()
        if place not in missing
    }
    worst = max(errors, key=lambda place: errors[place], default=None)
    if worst is not None and not errors[worst] <= 1:
        return f"WRONG: {' '.join(map(str, worst))} is {given[worst]:.6g}, not {right[worst][0]:.6g}", 0.0
    if missing:
        return f"absent: {_why(missing[0], subject)}", errors.get(worst, 0.0)  # type: ignore[arg-type]
    return "right", errors.get(worst, 0.0)  # type: ignore[arg-type]


def _why(place: tuple, subject: Subject) -> str:
    """The reason that normlab gives for a place that its table does not have."""
    table = subject._tables.get("grad" in str(place))
    if not isinstance(table, tuple):
        return "no row, and no reason"
    site, layer, *_ = place
    reasons = table[1]
    near = [why for key, why in reasons.items() if str(key).startswith(f"{site}") or str(key).split()[-1] == str(layer)]
    return re.sub(r"\b\d+\b", "N", next(iter([*near, *reasons.values()]), "no row, and no reason"))


def _traced(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "normlab" in f.filename]
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{at}"


def audited(task: str, name: str, forms: tuple[Form, ...] = FORMS) -> Iterator[dict[str, Any]]:
    """The rows of a class, one per form."""
    model, first = prepare(name, config_class_of(task, name), task)
    for module in model.modules():  # a block that fills a cache cannot run twice
        if isinstance(config := getattr(module, "config", None), transformers.PretrainedConfig):
            config.use_cache = False
    blocks = [block.module for block in stack_of(model).blocks]
    oracles: dict[str, tuple[Oracle, Oracle]] = {}
    for form in forms:
        row: dict[str, Any] = {"class": name, "task": task, "form": form.name, "transformers": transformers.__version__}
        batch = padded(first, form.padding)
        if form.padding not in oracles:
            first_oracle, *others = (Oracle(model, blocks, b, _counted(b)) for b in (batch, other(batch)))
            oracles[form.padding] = (first_oracle, others[0])
        oracle, second = oracles[form.padding]
        torch._dynamo.reset()
        try:
            if form.padding == "left" and "attention_mask" not in first:
                raise NoSuchForm("it takes no mask")
            subject = Subject(form, model, batch, oracle, second)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                returned = subject.model(**subject.batch).logits.double()
            if (returned - oracle.logits).abs().max() > 1e-5 * oracle.logits.abs().max():
                raise NoSuchForm("it computes something else in this form")
            subject.own_step  # noqa: B018  it may fail
        except NoSuchForm as error:
            yield row | {function.name: f"no such: {error}" for function in FUNCTIONS}
            continue
        except Exception as error:
            yield row | {f.name: f"no such: {type(error).__name__}: {str(error)[:100]}" for f in FUNCTIONS}
            continue
        cells = {function.name: cell(function, subject) for function in FUNCTIONS}
        row |= {name: verdict for name, (verdict, _) in cells.items()}
        yield row | {"error": f"{max(error for _, error in cells.values()):.2f}"}


def _counted(batch: Batch) -> Tensor:
    if "decoder_input_ids" in batch:
        return torch.ones_like(batch["decoder_input_ids"]).bool()
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def rows_of(only: set[str]) -> Iterator[dict[str, Any]]:
    """The rows of all classes, or of those named."""
    for task, name in CLASSES:
        if only and name not in only:
            continue
        for row in audited(task, name):
            faults = [f"{f.name}: {row[f.name]}" for f in FUNCTIONS if re.match("WRONG|failed", row[f.name])]
            print(f"{time.process_time():.0f} s", name, row["form"], row.get("error"), *faults, sep=" | ", flush=True)
            yield row


def _kept(path: Path, only: set[str]) -> list[dict[str, Any]]:
    """The rows that a table has of classes that are not audited now."""
    if not only or not path.is_file():
        return []
    table = pandas.read_csv(path, keep_default_na=False, dtype=str)
    return [row for row in table.to_dict("records") if row["class"] not in only]


def main(out: str, only: set[str]) -> None:
    """Audit, print, and write the table to `out`."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = written(chain(_kept(Path(out), only), rows_of(only)), Path(out), COLUMNS)
    counts: dict[str, int] = {}
    for row in rows:
        for function in FUNCTIONS:
            verdict = row[function.name].split(":")[0]
            counts[verdict] = counts.get(verdict, 0) + 1
    print(counts)


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
