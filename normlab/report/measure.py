"""Measurements of a report: every stack of a model recorded on batches, and experiments on its layers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from normlab.errors import NormlabError, in_one_line
from normlab.probes import (
    FORWARD_METRICS,
    METRICS,
    CallInputs,
    LayerStats,
    Sites,
    angular_distance,
    attention_sinks,
    cheapest_branches,
    cheapest_spans,
    logit_lens_kl,
    massive_activations,
    mergekit_config,
    record,
    sites,
    skip_sensitivity,
    stacks,
    void_tokens,
)
from normlab.probes.depth_use import LayerStates, layer_states, maps_between
from normlab.probes.outliers import FoundTokens
from normlab.probes.returned_loss import IGNORED_LABEL
from normlab.report.inputs import Batches, Loaded, token_text

if TYPE_CHECKING:
    import pandas

Pairs = list[tuple[str, str]]  # what was not measured, and why


@dataclass
class Measured:
    """One stack: its sites, statistics and experiments, and why others were left out."""

    name: str  # empty for a model of one stack
    where: Sites
    stats: LayerStats
    loss: float | None  # the mean of the model's own loss of its labels, nats per label
    choices: int  # what a label is one of; 0 without a loss
    tables: dict[str, pandas.DataFrame] = field(default_factory=dict)
    found: dict[str, FoundTokens] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # experiment -> the reason
    pieces: dict[str, int] = field(default_factory=dict)  # experiment -> how many it read, where not all

    @cached_property
    def values(self) -> pandas.DataFrame:
        """The table of the statistics."""
        return self.stats.to_pandas()

    def said_of_pieces(self, name: str) -> str:
        """The end of a sentence on an experiment: how much of the text it read; empty where that is all."""
        return f", on the first {self.pieces[name]} pieces" if name in self.pieces else ""

    def configurations(self, loaded: Loaded) -> dict[str, str]:
        """Files by name: what other tools need to leave out the cheapest spans of blocks and sets of branches."""
        dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        files = {}
        if "spans" in self.tables:
            path = loaded.path or f"PATH OF THE SAVED {loaded.name}"
            note = "" if loaded.path else f"# The model was given without its files: fill in their path for {path!r}.\n"
            for row in self.tables["spans"].itertuples():
                files[f"mergekit-drop-{row.length}.yaml"] = note + mergekit_config(path, row.keep, dtype)
        if "branches" in self.tables:
            for row in self.tables["branches"].itertuples():
                lists = {name: getattr(row, name) for name in ("drop_attn_list", "drop_mlp_list")}
                files[f"llm-drop-{row.dropped}.json"] = json.dumps(lists) + "\n"
        return files

    def loss_line(self, loaded: Loaded) -> str:
        """The loss, and whether it is worse than all tokens alike; or why there is none."""
        if self.loss is None:
            return f"measured without a loss: {loaded.no_loss}"
        line, guess = f"loss {self.loss:.4f} nats a label", math.log(self.choices) if self.choices else math.inf
        if not self.loss > guess:  # a loss that is no number is not
            return line
        return (
            f"{line}, above a guess (ln {self.choices} = {guess:.4f}): a random head, or a model that does not know "
            "such text"
        )


@torch.inference_mode(False)
def measure(loaded: Loaded, batches: Batches) -> list[Measured]:
    """Record every stack that runs with all metrics, without gradients if there are no labels.

    Raises:
        NormlabError: no stack can be measured; weights that were made in inference mode have no gradients.
    """
    if "labels" in batches[0] and any(parameter.is_inference() for parameter in loaded.model.parameters()):
        raise NormlabError("the model was built in torch.inference_mode, where weights have no gradients: leave it")
    try:
        chosen = {"": sites(loaded.model)}
    except NormlabError:
        chosen = stacks(loaded.model)
    metrics = list(METRICS if "labels" in batches[0] else FORWARD_METRICS)
    measured, reasons = [], []
    with _of_labels_alone(loaded.model):
        for name, where in chosen.items():
            try:
                measured.append(Measured(name, where, *_recorded(where, loaded, batches, metrics)))
            except NormlabError as error:
                reasons.append(str(error))
    if not measured:
        raise NormlabError(reasons[0])
    return measured


@contextlib.contextmanager
def _of_labels_alone(model: nn.Module) -> Iterator[None]:
    """Without the auxiliary loss that a mixture of experts adds to that of the labels; after, as it was."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    adding = [config for config in configs if getattr(config, "output_router_logits", False) is True]
    try:
        for config in adding:
            config.output_router_logits = False
        yield
    finally:
        for config in adding:
            config.output_router_logits = True


def _recorded(
    where: Sites, loaded: Loaded, batches: Batches, metrics: list[str]
) -> tuple[LayerStats, float | None, int]:
    dtype, total, count, choices = next(loaded.model.parameters()).dtype, 0.0, 0.0, 0
    # A loss in 8 or 11 bits is too coarse to be compared with its logits, so the count of its labels is given.
    coarse = partial(_labels_averaged, loaded.task) if torch.finfo(dtype).bits < 32 else None
    with record(where, metrics, loss_tokens=coarse) as recorder, torch.set_grad_enabled("labels" in batches[0]):
        for batch in batches:
            output = _called(loaded, batch, dtype)
            if "labels" in batch:
                recorder.backward(output.loss)
                labels = _label_count(batch["labels"], loaded.task)
                total, count = total + float(output.loss.detach()) * labels, count + labels
                logits = getattr(output, "logits", None)
                choices = 0 if logits is None else logits.shape[-1]
    return recorder.stats(), total / count if count else None, choices


def _called(loaded: Loaded, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    pixels = {name: x.to(dtype) for name, x in batch.items() if x.is_floating_point()}
    try:
        return loaded.model(**{**batch, **pixels})
    except NormlabError:
        raise
    except Exception as error:  # the model's own code: what it raises cannot be known
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
        raise NormlabError(f"{type(loaded.model).__name__} does not run on {shapes}: {in_one_line(error)}") from error


def _labels_averaged(task: str, inputs: CallInputs) -> float | None:
    labels = inputs.arguments.get("labels")
    return None if labels is None else _label_count(labels, task)


def _label_count(labels: torch.Tensor, task: str) -> float:
    """The number of labels that a batch's loss averages over."""
    return float(((labels[:, 1:] if task == "causal" else labels) != IGNORED_LABEL).sum())


def experiment(measured: Measured, loaded: Loaded, batches: Batches, progress: bool) -> None:
    """Run the experiments that apply, most on a quarter of the batches; `left_out` names the others."""
    few, where = batches[: max(1, len(batches) // 4)], measured.where
    more, total = batches[: max(2, len(few))], count_rows(batches)
    read = {"spans": more, "branches": more, "massive_activations": batches[:1], "attention_sinks": batches[:1]}
    not_at_all = "" if "input_ids" in batches[0] else "not for images"
    if any("changes the stream" in why for why in measured.stats.manifest["absent"].values()):
        not_at_all = "blocks change the stream's shape"
    of_loss: dict[str, Callable[[], pandas.DataFrame]] = {
        "skip_sensitivity": lambda: skip_sensitivity(
            where, few, parts=["block", "attention", "mlp"], progress=progress
        ),
        "logit_lens": lambda: logit_lens_kl(where, few, progress=progress),
        "spans": lambda: cheapest_spans(where, more, progress=progress),
        "branches": lambda: cheapest_branches(where, more, progress=progress),
    }
    if where.depth < 2:
        del of_loss["spans"]
    of_stream: dict[str, Callable[[], pandas.DataFrame]] = {
        "angular_distance": lambda: angular_distance(where, few, progress=progress),
        "void_tokens": lambda: void_tokens(where, few, progress=progress),
        "massive_activations": lambda: _tokens(measured, loaded, batches[0], massive_activations),
        "attention_sinks": lambda: _tokens(measured, loaded, batches[0], attention_sinks),
    }
    for name, test in (of_loss | of_stream).items():
        if not_at_all:
            measured.left_out[name] = not_at_all
        elif name in of_loss and loaded.no_loss:
            measured.left_out[name] = "these need a loss"
        else:
            try:
                with _of_labels_alone(loaded.model):
                    measured.tables[name] = test()
                if (count := count_rows(read.get(name, few))) < total:
                    measured.pieces[name] = count
            except Exception as error:  # the model's own code: what it raises cannot be known
                measured.left_out[name] = in_one_line(error)


def count_rows(batches: Batches) -> int:
    """Pieces of text, or images, in all batches."""
    return sum(len(next(iter(batch.values()))) for batch in batches)


class TextStates(NamedTuple):
    """A text as a model reads it, and the states of all its layers there."""

    ids: list[torch.Tensor]
    states: LayerStates


class Recorded(NamedTuple):
    """One of several recordings that a page compares.

    label: what it is called; no other is called so. case: the model, revision or text.
    table: of all its stacks. loss, read: in words, and so why there is no loss, and what was read.
    missing: what was not measured, and why.
    scheme: of a model of ours, where models are compared.
    states: where the layers of two models are mapped.
    """

    label: str
    case: str
    table: pandas.DataFrame
    loss: str
    missing: Pairs
    scheme: str | None = None
    read: str = ""
    states: TextStates | str = ""


def text_states(stacks: list[Measured], batches: Batches) -> TextStates | str:
    """The states of a model of one stack on a text; or why there are none."""
    if len(stacks) > 1 or "input_ids" not in batches[0]:
        return "this needs models of text, of one stack each"
    try:
        states = layer_states(stacks[0].where, batches, progress=False)
    except Exception as error:  # the model's own code: what it raises cannot be known
        return in_one_line(error)
    return TextStates([batch["input_ids"].cpu() for batch in batches], states)


def layers_mapped(of: dict[str, TextStates | str]) -> pandas.DataFrame | str:
    """`layer_maps` of two models, from the shallower one, with its axes named by them; or why there is none."""
    found = [(name, one) for name, one in of.items() if isinstance(one, TextStates)]
    if len(found) < len(of):
        return next(why for why in of.values() if isinstance(why, str))
    (shallow, first), (deep, second) = sorted(found, key=lambda item: len(item[1].states.states))
    if len(first.ids) != len(second.ids) or not all(map(torch.equal, first.ids, second.ids)):
        return "the two models read other tokens"
    try:
        return maps_between(first.states, second.states).rename_axis(index=shallow, columns=deep)
    except NormlabError as error:
        return in_one_line(error)


def _tokens(
    measured: Measured, loaded: Loaded, batch: dict[str, torch.Tensor], find: Callable[..., FoundTokens]
) -> pandas.DataFrame:
    """Find tokens in a batch, and keep them in `measured.found`. The table and `nearest` have the tokens' text."""
    found = find(measured.where, batch)
    is_decoder = "decoder" in measured.name and "decoder_input_ids" in batch
    ids = batch["decoder_input_ids" if is_decoder else "input_ids"]
    rows = zip(found.table["row"], found.table["position"], strict=True)
    texts = [_text(loaded.reader, ids[row, position]) for row, position in rows]
    found.table.insert(found.table.columns.get_loc("position") + 1, "token", texts)
    if found.nearest is not None:
        token = _text(loaded.reader, ids[found.nearest["row"], found.nearest["position"]])
        place = {name: found.nearest[name] for name in ("layer", "row", "position")}
        found = replace(found, nearest=place | {"token": token} | found.nearest)
    measured.found[find.__name__] = found
    return found.table


def _text(reader: Any, token: torch.Tensor) -> str:
    """A token's text, with what does not print escaped. A space is the token's own, not one between all tokens."""
    text, named = reader.decode([int(token)]), getattr(reader, "convert_ids_to_tokens", None)
    is_whole = named is not None and named(int(token)) == text
    return repr(text if is_whole else token_text(reader, int(token)))[1:-1]
