"""Tokens unlike all others: where massive activations are, and where attention goes whatever the query."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normlab.errors import NormlabError
from normlab.probes.attention_watch import AttentionWatch
from normlab.probes.layout import hidden_state
from normlab.probes.passes import evaluating, on_blocks
from normlab.probes.runner import Batch, Runner, require_counted, see_layers
from normlab.probes.sites import Sites
from normlab.probes.statistics import at_least_float32

if TYPE_CHECKING:
    import pandas

HIDDEN = 8000.0  # a score so far below its row's largest is masked: Megatron's and BERT's masks are -10000


@dataclass(frozen=True)
class FoundTokens:
    """Tokens found in one batch.

        found = normlab.massive_activations(model, batch)
        labels = labels.masked_fill(found.mask, -100)       # a loss without these tokens

    `mask` is (batch, length) bool: True at a token that is in `table`. `table` has columns `layer row position`, what
    was measured, and `first_layer last_layer`: the layers without a gap over which the same is found again.

    `rule` says in words what was looked for. `nearest` is what comes nearest to it, found or not, or exceeds it most;
    None if no token could be judged.

    `learned`, of `attention_sinks`: what a learned sink takes, which is no token. None in a model without one.
    """

    table: pandas.DataFrame
    mask: Tensor
    rule: str
    nearest: dict[str, Any] | None
    learned: pandas.DataFrame | None = None


@torch.no_grad()
def massive_activations(
    model: nn.Module | Sites, batch: Batch, *, least: float = 100.0, ratio: float = 1000.0
) -> FoundTokens:
    """Find massive activations (Sun et al., 2024, 2402.17762).

    A value h of the residual stream is massive where |h| > `least` and |h| > `ratio` times the layer's median of |h|.
    The median is over tokens and features, without padding and what is not finite. 100 and 1000 are the paper's.

    Returns:
        Columns `layer row position feature value ratio first_layer last_layer`. Layer 0 is what enters the first block.
        `nearest` is the value with the largest |h| / max(`least`, `ratio` times the median).

    Raises:
        NormlabError: as for `angular_distance`.
    """
    runner = Runner(model, [batch], False, "massive activations")
    rows: list[tuple] = []
    kept: list[Tensor] = []
    nearest = _Nearest(["layer", "row", "position", "feature", "value", "ratio"])

    def look(layer: int, h: Tensor, read: Tensor) -> None:
        kept.append(runner.counted(batch, h))
        require_counted(bool(kept[-1].any()))
        size = at_least_float32(h).abs()
        counted = size[kept[-1]]
        median = counted[counted.isfinite()].median()

        def row(place: Sequence[int]) -> tuple:
            return layer, *place, float(h[tuple(place)]), float(size[tuple(place)] / median)

        limit = torch.clamp(ratio * median, min=least)
        rows.extend(map(row, ((size > limit) & kept[-1][..., None]).nonzero().tolist()))
        nearest.see(size / limit, kept[-1][..., None], row)

    with evaluating(runner.model):
        (batch,) = runner
        see_layers(runner, batch, look)
    rule = f"|h| above {least:,.12g} and above {ratio:,.12g} times the layer's median of |h|"
    return _found(rows, nearest.columns, 4, kept[0], rule, nearest)


@torch.no_grad()
def attention_sinks(
    model: nn.Module | Sites, batch: Batch, *, threshold: float = 0.3, queries: int = 16
) -> FoundTokens:
    """Find attention sinks (Xiao et al., 2023, 2309.17453), by the measure of Gu et al. (2024, 2410.10781).

    A token is a sink of a head if its mean attention over the queries that may see it exceeds `threshold` (the paper's
    is 0.3). Tokens that fewer than `queries` may see are not judged. Padding is not counted. What a query may not
    see is told by the scores: those 8000 below the largest of their row are masked, as by -inf or by -10000. What a
    learned sink takes is in no token's attention. `learned` has it, by the same measure.

    Returns:
        Columns `layer row position heads weight first_layer last_layer`: the share of heads whose sink the token is,
        and its attention averaged over all heads. The paper's measure of a token is `heads` averaged over all layers.
        `nearest` has the columns `layer row position head weight`: the most that one head gives to a token. `learned`
        has the columns `layer heads weight`, a row for each layer with a learned sink (GPT-OSS).

    Raises:
        NormlabError: no attention was seen, as in code that is neither `scaled_dot_product_attention` nor a softmax; or
            none over the tokens alone, as with a prefix; a block's scores cannot be computed; tensor parallelism splits
            its heads; blocks that hold (length, batch, width).
    """
    import pandas

    runner = Runner(model, [batch], False, "attention sinks")
    rows: list[tuple] = []
    kept: list[Tensor] = []
    layers: list[int] = []
    others: list[str] = []  # shapes of attention that is not over the tokens
    learned: list[tuple[int, float, float]] = []
    watch, blocks = _KeyWatch(), {block.layer: block for block in runner.sites.blocks}
    nearest = _Nearest(["layer", "row", "position", "head", "weight"])

    def hook(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        tokens = runner.counted(batch, hidden_state(args, kwargs, module))
        kept.append(tokens)
        require_counted(bool(tokens.any()))
        length = tokens.shape[1]
        found = watch.found([(len(tokens), length)], length)
        if found is None and watch.why:
            raise NormlabError(f"the attention of block {layer} is not known: {watch.why}")
        if found is None:
            for call in watch.calls:
                whose = "cross-attention's " if call.kind == "cross" else ""
                others.append(f"{whose}{call.shape[1]} queries x {call.keys} keys for {length} tokens")
            watch.forget()
            return
        layers.append(layer)
        scores, share = found.scores, torch.ones(())
        tokens = tokens.to(scores.device)  # what a block is given may be on that of the block before
        if found.beside is not None:
            share = (1 - found.beside)[..., None]
            if not found.no_sink and tokens.sum() >= queries:
                mean = torch.where(tokens[:, None], found.beside, 0).sum((0, 2)) / tokens.sum()  # by head
                learned.append((layer, float((mean > threshold).float().mean()), float(mean.mean())))
        seen = _visible(scores) & tokens[:, None, :, None]  # (batch, heads, queries, keys)
        weight = torch.where(seen, scores.softmax(-1) * share, 0).sum(-2) / seen.sum(-2).clamp(min=1)
        judged = (seen.sum(-2) >= queries) & tokens[:, None]  # (batch, heads, keys)
        sink = (weight > threshold) & judged
        for row, position in sink.any(1).nonzero().tolist():
            heads, mean = sink[row, :, position].float().mean(), weight[row, :, position].mean()
            rows.append((layer, row, position, float(heads), float(mean)))
        nearest.see(weight, judged, lambda at: (layer, at[0], at[2], at[1], float(weight[tuple(at)])))
        watch.forget()  # last, as the softmax above is seen too

    def start(layer: int, *_: Any) -> None:
        watch.forget(blocks[layer])  # an encoder's attention came before, or something else

    with evaluating(runner.model):
        (batch,) = runner
        with watch, on_blocks(runner.stream, hook, before=start):
            runner.run(batch)
    if not layers and others:
        raise NormlabError(f"attention was seen over {others[0]}: give a model that attends to its tokens alone")
    if not layers:
        raise NormlabError(watch.reason())
    rule = f"a head's mean attention above {threshold:.12g}, over at least {queries} queries"
    found = _found(rows, ["layer", "row", "position", "heads", "weight"], 3, kept[0], rule, nearest)
    return replace(found, learned=pandas.DataFrame(learned, columns=["layer", "heads", "weight"]) if learned else None)


def _visible(scores: Tensor) -> Tensor:
    """True where a query may see a key, of scores (..., queries, keys). Nowhere in a row whose keys are all masked."""
    largest = scores.amax(-1, keepdim=True)
    return (scores > largest - HIDDEN) & (largest > -HIDDEN)


class _KeyWatch(AttentionWatch):
    """Keeps the scores themselves, (batch, heads, queries, keys)."""

    def reduce(self, chunks: Iterable[Tensor]) -> Tensor:
        parts = list(chunks)
        keys = max(part.shape[-1] for part in parts)
        return torch.cat([functional.pad(x, (0, keys - x.shape[-1]), value=-torch.inf) for x in parts], dim=-2)


class _Nearest:
    """The row that comes nearest to a rule, over layers."""

    def __init__(self, columns: list[str]):
        self.columns = columns
        self.row: dict[str, Any] | None = None
        self._share = 0.0

    def see(self, share: Tensor, judged: Tensor, row: Callable[[Sequence[int]], tuple]) -> None:
        """Of a layer: shares of the limit, or what one limit holds for; where they are judged; the row of a place."""
        share = torch.where(judged, share, -1).nan_to_num(-1)
        most = share.max()
        if most > self._share:
            place = [int(index) for index in torch.unravel_index(share.argmax(), share.shape)]
            self._share, self.row = float(most), dict(zip(self.columns, row(place), strict=True))


def _found(
    rows: list[tuple], columns: list[str], place: int, counted: Tensor, rule: str, nearest: _Nearest
) -> FoundTokens:
    """Rows in order of layer; columns 1 to `place` say what is the same over layers."""
    import pandas

    mask = torch.zeros_like(counted)
    found = {row[:place] for row in rows}
    spanned = []
    for row in rows:
        first = last = row[0]
        while (first - 1, *row[1:place]) in found:
            first -= 1
        while (last + 1, *row[1:place]) in found:
            last += 1
        spanned.append((*row, first, last))
        mask[row[1], row[2]] = True
    table = pandas.DataFrame(spanned, columns=[*columns, "first_layer", "last_layer"])
    return FoundTokens(table, mask, rule, nearest.row)
