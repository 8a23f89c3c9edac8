"""How a model uses its depth: blocks that hardly change a token, layers that a shallower model's layers predict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import NormlabError
from normlab.probes.passes import evaluating
from normlab.probes.runner import Batch, Runner, listed, mean_and_error, row_means, see_layers, table_of, with_errors
from normlab.probes.sites import Sites
from normlab.probes.statistics import at_least_float32

if TYPE_CHECKING:
    import pandas

RIDGE = 1e-8  # of a feature's variance, which is 1: it decides only where features depend on each other
LEAST_GROWTH = 1e-3  # of its length; less is rounding, or the epsilon of a norm that holds the length
TOKENS_PER_FEATURE = 2  # that a map is fitted on, at least


@torch.no_grad()
def void_tokens(
    model: nn.Module | Sites,
    batches: Iterable[Batch],
    *,
    alpha: float = 0.8,
    small: float = 0.1,
    progress: bool = True,
) -> pandas.DataFrame:
    """Measure the share of tokens for which a block hardly changes the residual stream, by two rules.

    Rule "void" (*Void in Language Models*, 2505.14467, its L2 adaptive computation): the token's L2 norm grows by less
    than `alpha` times the range of its growth over the blocks before, ||h_l|| - ||h_{l-1}|| < alpha (max_k g_k -
    min_k g_k), g_k the growth in block k < l; below 0 in the first block. A growth below a thousandth counts as 0.
    Where norms hold the length (Post-LN) only the first block's growth speaks. A block that turns the stream without
    making it longer is void. Rule "small": ||h_l - h_{l-1}|| < `small` ||h_{l-1}||, which sees the turn. Where a model
    changes the stream between blocks, h_{l-1} is what block l reads.

    Returns:
        One row per rule and block: `rule limit layer value standard_error low high`. `limit` is alpha or small. Values
        are shares in [0, 1], NaN where a state is not finite. Other arguments as for `angular_distance`.

    Raises:
        NormlabError: alpha or small is negative, or as for `angular_distance`.
    """
    for name, value in (("alpha", alpha), ("small", small)):
        if not value >= 0:
            raise NormlabError(f"{name} is {value}: give a number from 0 on")
    runner = Runner(model, batches, progress, "void tokens")

    def sums(batch: Batch) -> tuple[Tensor, Tensor]:
        counts: list[Tensor] = []  # the tokens that do
        void: list[Tensor] = []
        unchanged: list[Tensor] = []
        growths: list[Tensor] = []

        def look(layer: int, h: Tensor, before: Tensor) -> None:
            h, before = at_least_float32(h), at_least_float32(before)
            if not counts:
                counts.append(runner.counted(batch, h))
            else:
                (counted,) = counts
                norm, norm_before = (torch.linalg.vector_norm(x, dim=-1) for x in (h, before))
                growth = norm - norm_before
                growth[growth.abs() < LEAST_GROWTH * norm] = 0
                past = torch.stack(growths) if growths else torch.zeros_like(growth)[None]
                change = torch.linalg.vector_norm(h - before, dim=-1)
                lost = (counted & ~(growth.isfinite() & change.isfinite())).any(1)  # rows that tell nothing
                for shares, is_so in (
                    (void, growth < alpha * (past.amax(0) - past.amin(0))),
                    (unchanged, change < small * norm_before),
                ):
                    shares.append((counted & is_so).sum(1).double().masked_fill(lost, torch.nan))
                growths.append(growth)

        see_layers(runner, batch, look)
        return torch.stack([*void, *unchanged]), counts[0].sum(1)

    mean, error, _ = row_means(runner, sums)
    rows: list[dict[str, Any]] = [
        {"rule": rule, "limit": limit, "layer": layer}
        for rule, limit in (("void", alpha), ("small", small))
        for layer in runner.sites.layers
    ]
    return table_of(rows, mean, error)


# -- linear maps between two models ----------------------------------------------------------------------------------


class LayerStates(NamedTuple):
    """The residual stream of tokens: `states` (layers + 1, tokens, width), and each token's sequence and position.

    `first` is the layer of the first state: of some of a model's blocks the one before them.
    """

    states: Tensor
    rows: Tensor
    positions: Tensor
    first: int = 0


@torch.no_grad()
def layer_states(model: nn.Module | Sites, batches: Iterable[Batch], *, progress: bool = True) -> LayerStates:
    """h_0 .. h_L of all tokens that count, on the CPU.

    Raises:
        NormlabError: as for `angular_distance`.
    """
    runner = Runner(model, batches, progress, "layer states")
    parts: list[Tensor] = []
    places: list[Tensor] = []
    sequences = 0
    with evaluating(runner.model):
        for batch in runner:
            counted, states = _counted_states(runner, batch)
            parts.append(states)
            places.append(counted.nonzero() + torch.tensor([sequences, 0]))
            sequences += len(counted)
    rows, positions = torch.cat(places).T
    return LayerStates(torch.cat(parts, dim=1), rows, positions, runner.sites.stream_layers[0])


def _counted_states(runner: Runner, batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens of a batch that count, (batch, length), and h_0 .. h_L of these; on the CPU."""
    counted: list[Tensor] = []
    states: list[Tensor] = []

    def keep(layer: int, h: Tensor, read: Tensor) -> None:
        if not counted:
            counted.append(runner.counted(batch, h).cpu())
        states.append(h.cpu()[counted[0]])

    see_layers(runner, batch, keep)
    return counted[0], torch.stack(states)


def layer_maps(
    shallow: nn.Module | Sites, deep: nn.Module | Sites, batches: Iterable[Batch], *, progress: bool = True
) -> pandas.DataFrame:
    """Measure how well linear maps predict each layer of a deep model from each layer of a shallow one (2505.13898).

    h_deep ~ W h_shallow + b is fitted by least squares on every second sequence. The value is the share of h_deep's
    variance that it leaves on the others: sum ||h - W x - b||^2 / sum ||h - m||^2, m the mean of the fitted half.
    0: the layer is a linear map of the other; 1: the map says no more than m. If the deep model spreads the shallow
    one's computation over its layers, the smallest values lie along the diagonal of equal relative depth. Holds all
    tokens' states of both models.

    Args:
        shallow, deep: two models that read the same tokens; of any widths.
        batches, progress: as for `angular_distance`.

    Returns:
        (L_shallow + 1) x (L_deep + 1) table, index = layer of `shallow`, columns = layer of `deep` (0 = embeddings).
        `.attrs["standard_error"]` and `.attrs["half_width_95"]` as of `angular_distance`.

    Raises:
        NormlabError: one sequence only, fewer tokens to fit on than twice the shallow width, other tokens in the two
            models, or as for `angular_distance`.
    """
    held = listed(batches)
    return maps_between(layer_states(shallow, held, progress=progress), layer_states(deep, held, progress=progress))


def maps_between(shallow: LayerStates, deep: LayerStates) -> pandas.DataFrame:
    """`layer_maps` of states that are at hand.

    Raises:
        NormlabError: as `layer_maps` does.
    """
    import pandas

    places = [(one.rows, one.positions) for one in (shallow, deep)]
    if not all(torch.equal(a, b) for a, b in zip(*places, strict=True)):
        raise NormlabError("the two models count other tokens: give models of one tokenizer, and batches of it")
    if not all(bool(one.states.isfinite().all()) for one in (shallow, deep)):
        raise NormlabError("a state is not finite: no map can be fitted")
    if not len(shallow.rows):
        raise NormlabError("there is nothing to measure on: no token counts")
    fitted, width = shallow.rows % 2 == 0, shallow.states.shape[-1]
    tested = ~fitted
    if not bool(tested.any()):
        raise NormlabError("there is one sequence: maps are fitted on one half and tested on the other")
    if int(fitted.sum()) < TOKENS_PER_FEATURE * width:
        raise NormlabError(
            f"maps from {width} features are fitted on {TOKENS_PER_FEATURE * width} tokens or more, and there are "
            f"{int(fitted.sum())}: give more batches"
        )
    rows = torch.unique(shallow.rows[tested], return_inverse=True)[1]  # of those that are tested
    shape = len(shallow.states), len(deep.states)
    value, error = torch.full((2, *shape), torch.nan, dtype=torch.float64)
    sequences = int(rows.max()) + 1
    for i, x in enumerate(shallow.states.double()):
        predict = _Regression(x[fitted])
        for j, y in enumerate(deep.states):
            y = y.double()
            mean = y[fitted].mean(0)
            left = y[tested] - predict(x[tested], y[fitted])
            sums = torch.zeros(2, sequences, dtype=torch.float64)
            for total, gap in zip(sums, (left, y[tested] - mean), strict=True):
                total.index_add_(0, rows, gap.square().sum(1))
            (value[i, j],), (error[i, j],) = mean_and_error(sums[:1], sums[1])
    index, columns = (range(one.first, one.first + len(one.states)) for one in (shallow, deep))
    table, errors = (pandas.DataFrame(x.numpy(), index=index, columns=columns) for x in (value, error))
    return with_errors(table, errors)


class _Regression:
    """Least squares with an intercept, on the tokens `x` (tokens, features)."""

    def __init__(self, x: Tensor):
        self._mean, spread = x.mean(0), x.std(0)
        self._scale = torch.where(spread > 0, spread, 1)
        self._x = self._standard(x)
        gram = self._x.T @ self._x
        gram.diagonal().add_(RIDGE * len(x))
        self._factor = torch.linalg.cholesky(gram)

    def _standard(self, x: Tensor) -> Tensor:
        return (x - self._mean) / self._scale

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """What the fit on `y` (of the tokens at the start) predicts for tokens `x`."""
        mean = y.mean(0)
        return self._standard(x) @ torch.cholesky_solve(self._x.T @ (y - mean), self._factor) + mean
