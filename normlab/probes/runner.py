"""Run a model over batches, look at its layers, and average over rows with standard errors: what experiments share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from normlab.errors import NormlabError
from normlab.probes.block_trace import KnownBlock
from normlab.probes.call_inputs import CallInputs, TokenMask, call_arguments, given_mask, mask_by_row, signature_of
from normlab.probes.call_tokens import NO_FIRST, TOKENS_OF, UNTOLD, CallTokens
from normlab.probes.layout import require_by_token, takes_length_first
from normlab.probes.metrics import MASKS
from normlab.probes.passes import Stream, called, device_of, evaluating, hooked, see_blocks, without_head
from normlab.probes.record import record
from normlab.probes.returned_loss import CHUNK, IGNORED_LABEL, labels_averaged, loss_and_logits
from normlab.probes.sites import Sites, sites

if TYPE_CHECKING:
    import pandas

Z95 = NormalDist().inv_cdf(0.975)
CACHED = 1 << 19  # 2 MiB of float32 logits at a time on a CPU: they stay in cache between passes
_MAKES_TOKENS = "prepare_decoder_input_ids_from_labels"  # a method of transformers' encoder-decoders, not of all
_OF_TEXT = {"input_ids", "input", "attention_mask", "labels", "shift_labels", "position_ids", "token_type_ids"}
Batch = dict[str, Any]


# -- means over rows -------------------------------------------------------------------------------------------------


def mean_and_error(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(estimates,) ratio estimates sum(values)/sum(counts) over rows, and their standard errors.

    A row is a sequence. Its tokens are correlated, so it is one observation. The error is that of a ratio estimator:
    sqrt(R/(R-1) sum_r (v_r - mean n_r)^2) / sum n_r. NaN below two rows.

    Args:
        values: (estimates, rows), sums over a row's tokens.
        counts: (rows,), how many tokens.
    """
    total, rows = counts.sum(), len(counts)
    mean = values.sum(1) / total
    spread = (values - mean[:, None] * counts).square().sum(1)
    error = (spread * rows / (rows - 1)).sqrt() / total if rows > 1 else torch.full_like(mean, torch.nan)
    return mean, error


def interval(mean: float, error: float) -> dict[str, float]:
    """Columns `standard_error`, `low`, `high`: the normal 95% interval."""
    return {"standard_error": error, "low": mean - Z95 * error, "high": mean + Z95 * error}


def with_errors(table: pandas.DataFrame, errors: pandas.DataFrame) -> pandas.DataFrame:
    """The table, with `errors` and the half-widths of the normal 95% intervals in its `.attrs`."""
    table.attrs.update(standard_error=errors, half_width_95=Z95 * errors)
    return table


def table_of(rows: Iterable[dict[str, Any]], mean: Tensor, error: Tensor) -> pandas.DataFrame:
    """`rows` with the columns `value standard_error low high`."""
    import pandas

    numbers = zip(rows, mean.tolist(), error.tolist(), strict=True)
    return pandas.DataFrame([row | {"value": m} | interval(m, e) for row, m, e in numbers])


# -- running a model -------------------------------------------------------------------------------------------------


class _Made(Exception):
    """The decoder has been handed what the model made of labels."""


class Runner:
    """A model and the batches to run it on: on its device, without cache, behind a progress bar."""

    def __init__(self, model: nn.Module | Sites, batches: Iterable[Batch], progress: bool, title: str):
        if not isinstance(batches, Iterable):
            raise NormlabError(f"batches is {batches!r:.80}: give dicts of the model's arguments")
        self.sites = model if isinstance(model, Sites) else sites(model)
        self.model = self.sites.model
        self.stream = Stream(self.sites)
        self._batches, self._progress, self._title = batches, progress, title
        self.device = device_of(self.model)
        accepted = self._accepted = _arguments(self.sites)
        self._coder = next((m for m in self.sites.ancestors if _is_encoder_decoder(m)), None)
        self._options = {"use_cache": False} if "use_cache" in accepted else {}
        own = signature_of(self.model).parameters.items()
        self._withheld = {"labels", "shift_labels"} - {name for name, p in own if p.default is inspect.Parameter.empty}
        self._renamed = {"input_ids": "input"} if "input" in accepted and "input_ids" not in accepted else {}
        self._shifted: bool | None = None  # None until it has been found out
        self._tokens = CallTokens(CallInputs())  # of the first batch, where it had to be recorded
        self._counting: tuple[Batch, CallTokens] = ({}, self._tokens)  # the latest batch whose tokens were counted
        self._first_block = KnownBlock(False, takes_length_first(self.sites.blocks[0].module))
        self._own_names: dict[str, str] = {}  # the batch's, of what inner modules are handed under known ones

    def __iter__(self) -> Iterator[Batch]:
        """The batches on the model's device. Raises `NormlabError` without one."""
        seen = 0
        for batch in tqdm(self._batches, self._title, unit="batch", delay=1, disable=not self._progress):
            if not hasattr(batch, "items"):
                raise NormlabError("a batch must be a dict of the model's arguments, such as {'input_ids': ...}")
            moved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            labels = moved.get("labels")
            if isinstance(labels, Tensor) and not labels.is_floating_point():
                moved["labels"] = labels.long()  # as cross-entropy takes them
            moved |= self._made_of_labels(moved)
            has_attention = self._first_block.takes_length_first is not None  # which tells how rows are held
            if seen == 0 and (moved.keys() - _OF_TEXT or self._coder is not None or has_attention):
                self._find_names(moved)
            seen += 1
            yield moved
        if seen == 0:
            raise NormlabError("there is no batch to run: give at least one dict of the model's arguments")

    def _made_of_labels(self, batch: Batch) -> Batch:
        """The decoder's tokens, and their mask, that a model makes of labels; none if it need not.

        Most have a method for it. Whisper and M2M100 make tokens as they run, Pix2Struct a mask too: that pass ends
        where they are seen.

        Raises `NormlabError` where no module inside is handed them.
        """
        labels: Any = batch.get("labels")
        given = {name for name, value in batch.items() if value is not None}
        needs = "decoder_input_ids" in self._accepted
        needs = needs and not given & {"decoder_input_ids", "decoder_inputs_embeds"}
        is_text = isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()
        if self._coder is None or not needs or not is_text:
            return {}
        if (make := getattr(self._coder, _MAKES_TOKENS, None)) is not None:
            return {"decoder_input_ids": make(labels=labels)}
        if "labels" not in self._accepted:
            return {}
        made: Batch = {}

        def see(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            handed = call_arguments(module, args, kwargs)[0]
            for prefix in ("decoder_", ""):
                ids, mask = (handed.get(f"{prefix}{name}") for name in ("input_ids", "attention_mask"))
                if isinstance(ids, Tensor) and ids.shape == labels.shape:
                    follow = (ids[:, 1:] == labels[:, :-1]) | (labels[:, :-1] < 0)
                    if bool(follow.all()):
                        made.update(decoder_input_ids=ids, decoder_attention_mask=mask)
                        raise _Made

        inside = [(module, see) for module in self._coder.modules() if module is not self._coder]
        with suppress(_Made), torch.no_grad(), hooked(before=inside, must_run=False):
            self._called(batch)
        if not made:
            raise NormlabError("the tokens that the model makes of labels are not seen: give decoder_input_ids")
        if made["decoder_attention_mask"] is None or not self._accepted - given >= {"decoder_attention_mask"}:
            del made["decoder_attention_mask"]
        return made

    def _find_names(self, batch: Batch) -> None:
        """Find out which of a batch's tensors are the tokens and their mask, by the names that inner modules have, and
        whether they are (length, batch), by PyTorch's attention.

        Names that no inner module has: tokens are what vectors are looked up of, labels what the returned loss is of.
        """
        with torch.no_grad(), record(self.sites, ["rms"], masks=["all"]) as recorder:
            output = self.run(batch)
        call = recorder.latest
        if call is None:
            return
        with suppress(NormlabError):  # what cannot be recorded is said where it is needed
            recorder.stats()  # which counts the tokens
        self._tokens = call.tokens
        self._first_block = recorder.known.get(self.sites.blocks[0].module, self._first_block)
        self._find_unnamed(call.inputs, output)
        arguments = call.inputs.arguments
        for known, x in arguments.items():
            own = next((name for name, value in batch.items() if value is x and isinstance(x, Tensor)), known)
            if known not in batch and own != known:
                self._own_names[known] = own
        self._require_known_padding(call.tokens)

    def _require_known_padding(self, tokens: CallTokens) -> None:
        if tokens.unknown_masks and self.sites.mask is None:
            raise NormlabError(f"{next(iter(tokens.unknown_masks.values()))}, to sites(model, ...)")

    def _find_unnamed(self, inputs: CallInputs, output: Any) -> None:
        """Find the tokens and labels that no module has under a known name.

        Raises `NormlabError` where there may be labels, and the loss does not show which they are.
        """
        inputs.compare(output)
        known = [inputs.arguments.get(name) for name in ("labels", "shift_labels")]
        own = {name: x for name, x in inputs.unnamed().items() if all(x is not labels for labels in known)}
        asked = [name for name, x in own.items() if any(x is ids for ids in inputs.looked_up)]
        loss, logits = loss_and_logits(output)
        if loss is not None and logits is not None and known == [None, None]:
            others = [n for n, x in own.items() if n not in asked and x.numel() == logits[..., 0].numel()]
            if others:
                raise NormlabError(
                    f"whether {others[0]} are labels the returned loss does not tell, as it is not the mean cross-"
                    "entropy of the returned logits: give a model that takes them as `labels`, and returns logits"
                )
        if len(asked) == 1 and sum(x.shape == own[asked[0]].shape for x in own.values()) == 1:
            self._own_names.setdefault("input_ids", asked[0])

    def _known_names(self, batch: Batch) -> Batch:
        """A batch under the names that are known, where inner modules have told them."""
        return batch | {known: batch[own] for known, own in self._own_names.items() if own in batch}

    def run(self, batch: Batch, *, needs_logits: bool = True) -> Any:
        """The model's output. Labels are withheld where they may be: the loss is computed here, alike for every model.

        needs_logits: False where the head need not be computed.
        """
        with nullcontext() if needs_logits else without_head(self.sites):
            return self._called({k: v for k, v in batch.items() if k not in self._withheld})

    def _called(self, batch: Batch) -> Any:
        """The model's output, with labels where the batch has them."""
        return called(self.model, {self._renamed.get(k, k): v for k, v in batch.items()} | self._options)

    def logits(self, batch: Batch) -> Tensor:
        """The model's logits, (batch, length, vocabulary).

        Raises:
            NormlabError: it returned none.
        """
        out = self.run(batch)
        logits = self._by_row(out if isinstance(out, Tensor) else loss_and_logits(out)[1])
        if logits is None:
            raise NormlabError(
                f"the model returned {type(out).__name__} without logits: give a model with a language-model head"
            )
        return logits

    def _by_row(self, x: Any) -> Any:
        """What the model is given or returns, (batch, length, ...)."""
        return x.transpose(0, 1) if self._tokens.is_given_turned and isinstance(x, Tensor) and x.ndim > 1 else x

    def _mask(self, name: TokenMask, batch: Batch, rows: Sequence[int]) -> Any:
        """The mask of a batch's tokens, (batch, length) `rows`."""
        mask = given_mask(name, batch)
        turns = self._tokens.is_given_turned is not False and isinstance(mask, Tensor) and mask.ndim == 2
        return mask_by_row(mask, rows, name) if turns else mask

    def labels(self, batch: Batch) -> Tensor:
        """(batch, length): the label of each position's prediction, -100 = none. Without `labels`, each token's
        successor.

        Neither padding nor what it predicts counts then.

        Raises:
            NormlabError: there is none, whether they are (length, batch) cannot be told, or the mask is not by token.
        """
        if self._tokens.is_untold:
            raise NormlabError(UNTOLD)
        if self._tokens.length_first and self._tokens.is_given_turned is None:
            raise NormlabError(
                "there are as many rows as tokens in a row, and whether the batches are (batch, length) or (length, "
                "batch) cannot be told: give first a batch of another size"
            )
        known = self._known_names(batch)
        labels, ids = self._by_row(known.get("labels")), self._ids(known)
        if labels is not None:
            if "labels" in self._own_names:
                labels = labels.long().masked_fill(labels < 0, IGNORED_LABEL)  # as its loss leaves them out
                labels = labels.view_as(ids) if ids is not None and ids.numel() == labels.numel() else labels
            wrong = labels[(labels < 0) & (labels != IGNORED_LABEL)]
            if len(wrong) and not labels.is_floating_point():
                raise NormlabError(f"labels hold {wrong[0]}: give {IGNORED_LABEL} where nothing is predicted")
            shifted = self._labels_are_shifted(batch, labels)
            return _successors(labels) if shifted and labels.ndim == 2 else labels
        if ids is None:
            raise NormlabError("a batch has neither labels nor input_ids: the loss needs one of them")
        prefix = "decoder_" if "decoder_input_ids" in known else ""
        mask = self._mask(self._mask_of_labels or f"{prefix}attention_mask", known, ids.shape)
        labels = ids.long()
        if mask is not None:
            require_by_token(mask)
            labels = labels.masked_fill(mask == 0, IGNORED_LABEL)
        labels = _successors(labels)
        return labels if mask is None else labels.masked_fill(mask == 0, IGNORED_LABEL)

    def _ids(self, batch: Batch) -> Tensor | None:
        """(batch, length): the tokens that are predicted, of a batch under known names."""
        prefix = "decoder_" if "decoder_input_ids" in batch else ""
        return self._by_row(batch.get(f"{prefix}input_ids", batch.get("input")))

    @property
    def _mask_of_labels(self) -> TokenMask:
        """What masks the tokens that are predicted, if that is known: an encoder's stack reads others."""
        reads = self._coder is None or any(branch.kind == "cross" for branch in self.sites.blocks[0].branches)
        return (self.sites.mask or self._tokens.mask_name) if reads else None

    def _labels_are_shifted(self, batch: Batch, labels: Tensor) -> bool:
        """True if the model's loss on these labels is of the next token, or it returns none and they are its tokens.

        Found once, by comparing its loss with its logits, on the first batch of which both tell. Labels at the first
        position alone tell of a loss of the same token: to the other it is nothing, or no number.
        """
        if self._shifted is not None or not bool((labels != IGNORED_LABEL).any()):
            return self._shifted is not False
        try:
            loss, logits = loss_and_logits(self._with_labels(batch))
        except TypeError:  # it takes no labels
            loss = logits = None
        if loss is None or logits is None:
            self._shifted = self._are_tokens(labels, self._ids(self._known_names(batch)))
            return self._shifted
        is_empty = labels.ndim == 2 and not bool((labels[:, 1:] != IGNORED_LABEL).any())  # if labels are shifted
        if not bool(loss.isfinite()) or (is_empty and float(loss) == 0):
            return True
        mask = self._mask(self._mask_of_labels or "attention_mask", self._known_names(batch), labels.shape)
        averaged = labels_averaged(loss, self._by_row(logits), labels, mask)
        if averaged is None:
            raise NormlabError(
                "the returned loss and logits do not tell whether labels are shifted: leave out `labels` to "
                "measure on the next token"
            )
        self._shifted = averaged[1]
        return self._shifted

    def _are_tokens(self, labels: Tensor, ids: Tensor | None) -> bool:
        """True if labels are the tokens at their place, False if they are the next ones; True without tokens."""
        if ids is None or labels.ndim != 2 or ids.shape != labels.shape:
            return True
        counted = labels != IGNORED_LABEL
        if bool((labels == ids)[counted].all()):
            return True
        if not bool((labels[:, :-1] == ids[:, 1:])[counted[:, :-1]].all()) or not bool(counted[:, :-1].any()):
            raise NormlabError(
                "labels are neither the tokens nor the next ones, and the model returns no loss that tells which they "
                "predict: leave out `labels` to measure on the next token"
            )
        return False

    def _with_labels(self, batch: Batch) -> Any:
        """What the model returns with labels, or the module in it that takes them where it does not."""
        takes = (m for m in self.sites.ancestors if "labels" in signature_of(m).parameters)
        module = next(takes, None)
        if module is None or "labels" in self._accepted:
            return self._called(batch)
        given: list[tuple[tuple, dict[str, Any]]] = []
        with hooked(before=[(module, lambda _, *call: given.append(call))]):
            self.run(batch, needs_logits=False)
        args, kwargs = given[0]
        return called(module, kwargs | {"labels": self._known_names(batch)["labels"]}, *args)

    def counted(self, batch: Batch, x: Tensor, mask: str = "all") -> Tensor:
        """(batch, length) bool: the tokens of a stream x that count, by the mask of this stack and, without first
        tokens, by the positions.

        Of a batch it is asked first with what the first block reads, whose values may tell how it holds rows.

        Raises:
            NormlabError: the stream is (length, batch, width), or may be; padding or the first tokens are not known;
                the model puts positions before a row's tokens, or after them.
        """
        if self._counting[0] is not batch:
            self._counting = batch, self._tokens_of(batch, x)
        tokens, held = self._counting[1], tuple(x.shape[:-1])
        if tokens.is_untold:
            raise NormlabError(UNTOLD)
        layout = tokens.layout(held)
        if layout.row > layout.column:
            raise NormlabError(
                "the blocks hold (length, batch, width): this compares tokens by row, and needs (batch, length, width)"
            )
        masks = tokens.masks(x.device, held)
        self._require_known_padding(tokens)
        if masks is None:
            raise NormlabError(next(why for place, why in tokens.absent.items() if place.startswith(TOKENS_OF)))
        if mask == "no_first" and (why := tokens.absent.get(NO_FIRST)):
            raise NormlabError(why)
        return masks[list(MASKS).index(mask)].view(held)

    def _tokens_of(self, batch: Batch, x: Tensor) -> CallTokens:
        """The tokens of this stack in a call on a batch, of which the first block reads `x`."""
        first, block, inputs = self._tokens, self._first_block, CallInputs()
        inputs.take({name: value for name, value in self._known_names(batch).items() if value is not None})
        inputs.is_text, inputs.has_decoder = first.inputs.is_text, first.inputs.has_decoder
        inputs.mask = self.sites.mask
        tokens = CallTokens(inputs, tuple(MASKS))
        tokens.crosses = first.crosses
        tokens.find_rows(x, block.takes_length_first, block.length_first, block.rearranges)
        tokens.take_for_told(block.takes_length_first)
        if first.is_given_turned is not None:  # all batches are given alike, and this one may not tell it
            tokens.is_given_turned = first.is_given_turned
        return tokens


def listed(batches: Iterable[Batch]) -> list[Batch]:
    """The batches, to go through several times. NormlabError if they are none."""
    if not isinstance(batches, Iterable):
        raise NormlabError(f"batches is {batches!r:.80}: give dicts of the model's arguments")
    return list(batches)


def _is_encoder_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _arguments(where: Sites) -> set[str]:
    """The arguments that a model takes by name. One that takes any, such as a wrapper, hands them on to its content."""
    names: set[str] = set()
    for module in where.ancestors:
        parameters = signature_of(module).parameters
        names |= parameters.keys()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


def _successors(tokens: Tensor) -> Tensor:
    """The token after each, -100 after the last."""
    return functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)


def require_counted(any_counts: bool) -> None:
    """Refuse batches without a label or token to measure on."""
    if not any_counts:
        raise NormlabError("there is nothing to measure on: no batch has a label or a token that counts")


def row_means(runner: Runner, sums: Callable[[Batch], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, int]:
    """(means, standard errors, tokens) over all batches, in evaluation mode.

    `sums` gives the values and counts of one batch's rows, as `mean_and_error` takes them.
    """
    values, counts = [], []
    with evaluating(runner.model):
        for batch in runner:
            summed, count = sums(batch)
            values.append(summed[:, count > 0].detach().double().cpu())
            counts.append(count[count > 0].detach().double().cpu())
    total = torch.cat(counts)
    require_counted(bool(len(total)))
    return *mean_and_error(torch.cat(values, dim=1), total), int(total.sum())


def see_layers(runner: Runner, batch: Batch, look: Callable[[int, Tensor, Tensor], None]) -> None:
    """Run the model; `look(layer, h, read)` sees h_0 .. h_L, and what each block has read of the stream.

    All are on the runner's device, whichever that of the block is.
    That is h_{l-1}, unless the model changes the stream between blocks. Of h_0 it is h_0. Of some of a model's blocks,
    h_0 is what enters the first: the layer before it.

    Raises:
        NormlabError: several residual streams, or blocks that run on some of the tokens.
    """
    layers = runner.sites.layers
    entered: list[torch.Size] = []
    first: list[Tensor] = []  # h_0 and h_1, of a pass that may be begun again; block 1 has read h_0

    def hook(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        before, after = runner.stream.through(args, kwargs, output)
        if layer == layers[0]:
            entered[:] = [before.shape]
        require_same_tokens(entered[0], after)
        if layer == layers[0]:
            first[:] = before, after.clone() if runner.stream.settles else after
            if runner.stream.settles:
                return
        tell()
        if layer > layers[0]:
            see(layer, after, before)

    def tell() -> None:
        for layer, h in zip(runner.sites.stream_layers, first, strict=False):
            see(layer, h, first[0])
        first.clear()

    def see(layer: int, *streams: Tensor) -> None:
        look(layer, *(x.to(runner.device) for x in streams))

    see_blocks(runner.stream, partial(runner.run, batch, needs_logits=False), hook)
    tell()


def require_same_tokens(shape: torch.Size, h: Tensor) -> None:
    """Refuse a stream `h` of other tokens than one of this shape."""
    if h.shape[:-1] != shape[:-1]:
        one, other = (" x ".join(map(str, of[:-1])) for of in (shape, h.shape))
        raise NormlabError(
            f"a block passes on {other} tokens and another one reads {one}: this compares the same tokens at all layers"
        )


def require_predictions(logits: Tensor, tokens: Tensor, what: str) -> None:
    """Refuse logits that are not one row for each of these tokens (batch, length)."""
    if tokens.ndim == 2 and logits.shape[:-1] == tokens.shape:
        return
    remedy = "this needs one prediction per token, as of a language model"
    if logits.ndim == 3 and logits.shape[1] == 1:
        remedy += "; one that predicts only the last token without labels needs them in the batch"
    raise NormlabError(f"the model returned logits {tuple(logits.shape)} for {what} {tuple(tokens.shape)}: {remedy}")


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(batch, length) cross-entropy of each position in float32, 0 where there is no label.

    Raises:
        NormlabError: the logits are not one row per label.
    """
    require_predictions(logits, labels, "labels")
    flat = functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return flat.view(labels.shape)


def token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(softmax p || softmax q) of each position, in float32; shape of the logits without their last.

    A token of probability 0 in p adds 0, whatever q says of it.
    """
    chunk = CACHED if p_logits.device.type == "cpu" else CHUNK
    step = max(1, chunk // p_logits.shape[-1])
    pieces = []
    for p, q in zip(p_logits.flatten(0, -2).split(step), q_logits.flatten(0, -2).split(step), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        probability = log_p.exp()
        pieces.append(log_p.sub_(log_q).mul_(probability).masked_fill_(probability == 0, 0).sum(-1))
    return torch.cat(pieces).view(p_logits.shape[:-1])
