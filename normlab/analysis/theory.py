"""Closed-form predictions of layer statistics before training, in the rows of the long table.

Weights are independent Gaussians at initialisation. So at large width each feature of the residual stream is a Gaussian
process over positions. Its kernel K[t, s] is the covariance of a feature between positions t and s. Each part of a
block maps K to K:

    norm        K[t, s] / sqrt((K[t, t] + eps)(K[s, s] + eps)) times the squared gain; a tanh norm: E[tanh u tanh v]
    attention   V and O multiply by d var_w each; attention is uniform over the past: K -> P K P^T, P averaging
    MLP         gate and up multiply by d var_w; E[silu(u) silu(v)] E[u' v']; down multiplies by f var_w
    residual    kernels add; a scheme's own residual rule is run on the branches' weights (`Written`)

The recursion (Lee et al., 1711.00165, for this block) is exact in the limit of width. At width 128, in the grid's
models of 8 blocks before training, norms of the stream are within 8%, variances within 15%, and relative
contributions within 17%; most norms are within 3%.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import torch

from normlab.errors import NormlabError
from normlab.runs import FINISHED
from normlab.schemes import CORRECTIONS, SCHEMES, NormSite, Sublayer, correction_factors, get_scheme

COLLISION = 0.01  # probability that two positions of a row of text hold the same token, about
ORDER = 16  # Hermite terms; the tanh and SiLU of arguments up to unit scale converge long before
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(128)
Kernel = np.ndarray


def chebyshev_bound(kappa: float, variance_ratio: float = 1.0) -> float:
    """Largest possible share of a token's |z| above lambda, z = (lambda/kappa) x / sqrt(ms'): (ms/ms') / kappa^2
    (2601.09719).

    `variance_ratio` = ms/ms', 1 for the exact statistic. Never more than 1.
    """
    if kappa <= 0 or variance_ratio < 0:
        raise NormlabError(
            f"kappa is {kappa} and variance_ratio {variance_ratio}: give a positive and a non-negative number"
        )
    return min(1.0, variance_ratio / kappa**2)


def carried_correction(c: float, lam: float, kappa: float, tokens: float = 1.0, position: int | None = None) -> float:
    """The term that estimates the MLP site's mean square from the attention site's: c (lambda/kappa)^2 (2601.09719).

    c = ||W_V W_O||_F^2 / (T d) assumes an average over T independent tokens. At `position` t of a causal model the
    average is over t + 1 tokens: times T / (t + 1), T = `tokens`.
    """
    uniform = c * (lam / kappa) ** 2
    return uniform if position is None else uniform * tokens / (position + 1)


def gaussian_kernel(kernel: Kernel, function: Callable[[np.ndarray], np.ndarray]) -> Kernel:
    """E[f(u_t) f(u_s)] for jointly Gaussian u with covariance `kernel`, by its expansion in Hermite polynomials.

    The remaining terms together, E[f^2] minus the squares of those taken, count as one more term. A steep tanh has a
    few per cent there, and the variance must include it.
    """
    scale = np.sqrt(np.diag(kernel))
    values = function(scale[:, None] * NODES) * WEIGHTS / math.sqrt(2 * math.pi)
    correlation = kernel / np.maximum(np.outer(scale, scale), 1e-300)
    power, before, polynomial = np.ones_like(kernel), np.zeros_like(NODES), np.ones_like(NODES)
    total = np.zeros_like(kernel)
    for k in range(ORDER):
        coefficient = values @ polynomial
        total += np.outer(coefficient, coefficient) * power
        power *= correlation
        # normalised: He_{k+1}/sqrt((k+1)!) from the two before
        polynomial, before = (NODES * polynomial - math.sqrt(k) * before) / math.sqrt(k + 1), polynomial
    square = function(scale[:, None] * NODES) ** 2 @ WEIGHTS / math.sqrt(2 * math.pi)
    rest = np.sqrt(np.maximum(square - np.diag(total), 0.0))
    return total + np.outer(rest, rest) * power


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normalized(norm: Any, kernel: Kernel, mean_square: np.ndarray | None = None) -> Kernel:
    """The kernel after a norm at its starting constants. `mean_square`: per position, for a carried statistic."""
    start = norm.starting_map()
    if start.eps is not None:
        used = (np.diag(kernel) if mean_square is None else mean_square) + start.eps
        kernel = kernel / np.sqrt(np.outer(used, used))
    kernel = start.slope**2 * kernel
    if start.function is not None:
        kernel = gaussian_kernel(kernel, lambda u: start.function(torch.from_numpy(u)).numpy())
    return start.gain**2 * kernel


class Written:
    """The state of one or several streams before training, as weights of the branches written into it.

    The embeddings and each branch's output are uncorrelated, because their weights are drawn independently. So a
    stream's kernel is the sum of theirs, each times its weights at both positions.

    A state is (positions, streams times n), n the largest number of branches: one feature per branch.
    Features are scaled so that their mean square is the stream's variance. A residual rule of width n takes such a
    state as it is.
    """

    def __init__(self, most: int, kernel: Kernel):
        self.most = most
        self.correlations: list[Kernel] = []
        self.first = self.add(kernel)

    def add(self, kernel: Kernel) -> torch.Tensor:
        """Register a new branch with this kernel; returns the stream that holds it alone."""
        deviation = np.sqrt(np.diag(kernel))
        stream = torch.zeros(len(kernel), self.most, dtype=torch.float64)
        stream[:, len(self.correlations)] = torch.from_numpy(deviation * math.sqrt(self.most))
        self.correlations.append(kernel / np.maximum(np.outer(deviation, deviation), 1e-300))
        return stream

    def kernel(self, stream: torch.Tensor) -> Kernel:
        weights = stream.numpy() / math.sqrt(self.most)
        total = np.zeros_like(self.correlations[0])
        for i in np.flatnonzero(weights.any(0)):
            total += np.outer(weights[:, i], weights[:, i]) * self.correlations[i]
        return total


class _Recursion:
    """Follows the kernel through one model."""

    def __init__(self, config: Any, length: int, collision: float):
        self.config, self.scheme = config, get_scheme(config.scheme)
        self.depth, self.width, self.length = config.num_hidden_layers, config.hidden_size, length
        self.weight_var = config.initializer_range**2
        heads = config.num_attention_heads
        self.attention_width = heads * (config.head_dim or self.width // heads)
        names = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        self.variance = {name: self.scheme.matrix_std(name, config) ** 2 for name in names}
        past = np.arange(1.0, length + 1)
        self.pairs = np.outer(past, past)
        ends = self.scheme.ends
        scale = ends.embedding_scale(self.width) ** 2 if ends.embedding_scale else 1.0
        self.kernel = (1.0 if ends.unit_embeddings or ends.normalized_embeddings else self.weight_var * scale) * (
            (1 - collision) * np.eye(length) + collision
        )
        self.rows: list[tuple[str, int, str, str, float]] = []

    def run(self) -> None:
        self._stream("block_out", 0)
        for layer in range(1, self.depth + 1):
            layout = self.scheme.layout_at(layer, self.config)
            self._block(layer, {place: self._norm(place, layer) for place, _ in layout.places()})
            self._stream("block_out", layer)
        self._leave()
        self._stream("final_norm_in", self.depth)
        self._tanh("final_norm_in", self.depth, self._norm("final", self.depth + 1), None)

    def _norm(self, place: str, layer: int) -> Any:
        return self.scheme.norm_at(NormSite(place, layer, self.config))

    def _leave(self) -> None:
        """Turn the last block's output into the final norm's input."""

    def _block(self, layer: int, norms: dict[str, Any]) -> None:
        entered = np.diag(self.kernel).copy()
        carried = None
        if self.config.carries_at(layer):
            stays, adds = correction_factors(self.config.correction, CORRECTIONS[self.config.correction])
            carried = stays * entered + adds * self._correction(norms["attn_in"])
            carried = carried * (self.config.calibration[layer - 1] if self.config.calibration else 1.0)
        self._add_branch("attn", layer, norms, None, self._attention)
        self._add_branch("mlp", layer, norms, carried, self._mlp)

    def _branch(
        self, part: str, layer: int, norms: dict[str, Any], carried: np.ndarray | None, act: Callable[[Kernel], Kernel]
    ) -> Kernel:
        """The kernel of a branch's output, from the stream that it reads."""
        kernel, site = self.kernel, f"{part}_norm_in"
        if f"{part}_in" in norms:
            self._stream(site, layer)
            self._tanh(site, layer, norms[f"{part}_in"], carried)
            kernel = normalized(norms[f"{part}_in"], kernel, carried)
        update = act(kernel)
        return normalized(norms[f"{part}_out"], update) if f"{part}_out" in norms else update

    def _add_branch(
        self, part: str, layer: int, norms: dict[str, Any], carried: np.ndarray | None, act: Callable[[Kernel], Kernel]
    ) -> None:
        update = self._branch(part, layer, norms, carried, act)
        # For plain addition only: probes take a branch before a residual rule weighs it.
        self._add(part, layer, "relative_contribution", np.sqrt(np.diag(update) / np.diag(self.kernel)))
        self.kernel = self.kernel + update
        if f"{part}_sum" in norms:
            if f"{part}_in" not in norms:
                self._stream(f"{part}_norm_in", layer)
            self.kernel = normalized(norms[f"{part}_sum"], self.kernel)

    def _attention(self, kernel: Kernel) -> Kernel:
        gain = self.width * self.variance["v_proj"] * self.attention_width * self.variance["o_proj"]
        return gain * kernel.cumsum(0).cumsum(1) / self.pairs

    def _mlp(self, kernel: Kernel) -> Kernel:
        gate, up = (self.width * self.variance[name] * kernel for name in ("gate_proj", "up_proj"))
        return self.config.intermediate_size * self.variance["down_proj"] * gaussian_kernel(gate, silu) * up

    def _correction(self, norm: Any) -> np.ndarray:
        tokens = self.config.train_seq_len or self.config.max_position_embeddings
        c = self.width * self.attention_width * self.variance["v_proj"] * self.variance["o_proj"] / tokens
        causal = self.config.carried == "causal"
        slope = norm.starting_map().slope
        return np.array([carried_correction(c, slope, 1.0, tokens, t if causal else None) for t in range(self.length)])

    def _stream(self, site: str, layer: int) -> None:
        variance = np.diag(self.kernel)
        self._add(site, layer, "token_l2_mean", np.sqrt(variance * self.width) * (1 - 0.25 / self.width))
        self._add(site, layer, "feature_var_mean", variance * (1 - 1 / self.width))
        for mask, kept in self._masks():
            self.rows.append((site, layer, "rms", mask, float(np.sqrt(variance[kept].mean()))))

    def _tanh(self, site: str, layer: int, norm: Any, carried: np.ndarray | None) -> None:
        """Shares of a tanh norm's inputs, for Gaussian features."""
        variance = np.diag(self.kernel)
        if carried is not None:
            self._add(site, layer, "carried_var_ratio", variance / carried)
        reach = norm.starting_map().reach
        if reach is None:
            return
        ratio = np.ones(self.length) if carried is None else variance / carried
        tail = [2 * NormalDist().cdf(-reach / math.sqrt(r)) for r in ratio]
        self._add(site, layer, "saturation", np.array(tail))
        self._add(site, layer, "saturation_bound", np.array([chebyshev_bound(reach, r) for r in ratio]))

    def _masks(self) -> list[tuple[str, slice]]:
        return [("all", slice(None)), ("no_first", slice(1, None))] if self.length > 1 else [("all", slice(None))]

    def _add(self, site: str, layer: int, metric: str, per_position: np.ndarray) -> None:
        for mask, kept in self._masks():
            self.rows.append((site, layer, metric, mask, float(per_position[kept].mean())))


class _JoinedRecursion(_Recursion):
    """For a scheme with its own residual rule: the rule's code runs on the branches written so far."""

    def __init__(self, config: Any, length: int, collision: float):
        super().__init__(config, length, collision)
        self.written = Written(2 * self.depth + 1, self.kernel)
        self.state = self.written.first
        self.narrow = copy.copy(config)
        self.narrow.hidden_size = self.written.most

    @torch.no_grad()
    def run(self) -> None:
        self._enter(1)
        super().run()

    def _enter(self, layer: int) -> None:
        rule = self._rule("attn", layer)
        self.kernel = self.written.kernel(rule.enter(rule.open(self.state)))

    def _block(self, layer: int, norms: dict[str, Any]) -> None:
        self._join("attn", layer, norms, self._attention)
        self._join("mlp", layer, norms, self._mlp)
        if self.state.shape[-1] == self.written.most:  # later blocks see only the sum of a single stream
            self.written = Written(self.written.most, self.written.kernel(self.state))
            self.state = self.written.first
        self._enter(min(layer + 1, self.depth))  # a block's output is what the next one reads of it

    def _leave(self) -> None:
        leave = self.scheme.leave
        self.kernel = self.written.kernel(self.state if leave is None else leave(self.narrow)(self.state))

    def _join(self, part: str, layer: int, norms: dict[str, Any], act: Callable[[Kernel], Kernel]) -> None:
        """Run a sublayer and join its branch by the scheme's residual rule."""
        rule, outer = self._rule(part, layer), norms.get(f"{part}_sum")
        state = rule.open(self.state)
        read, own = rule.enter(state), norms.get(f"{part}_in")
        self.kernel = self.written.kernel(read)
        update = self.written.add(self._branch(part, layer, norms, None, act))

        def norm(total: torch.Tensor) -> torch.Tensor:
            if outer is None:
                return total
            if own is None:
                self.kernel = self.written.kernel(total)
                self._stream(f"{part}_norm_in", layer)
            return self._linear(outer, total)

        self.state = rule.join(state, update, norm, read if own is None else self._linear(own, read))

    def _linear(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        start = norm.starting_map()
        if start.function is not None or start.eps is None:
            raise NormlabError(f"scheme {self.scheme.name} is not predicted: its stream's norm is not linear in x")
        y: torch.Tensor = start.gain * start.slope * x * (x.square().mean(-1, keepdim=True) + start.eps).rsqrt()
        return y

    def _rule(self, part: str, layer: int) -> Any:
        return self.scheme.residual(Sublayer(part, layer, self.narrow))  # type: ignore[misc]


def predict(config: Any, *, length: int | None = None, collision: float = 0.0) -> pd.DataFrame:
    """Predict what the probes measure in a freshly initialised model.

    Args:
        config: a NormlabConfig; its scheme, widths, initial scales and depth are the constants.
        length: tokens per row; default: that of the carried statistic (`train_seq_len` or `max_position_embeddings`).
            For schemes with several streams a kernel (length x length) is kept for every branch: use fewer tokens if
            memory is short.
        collision: probability that two positions of a row hold the same token (the sum of p^2 over the vocabulary).
            About 0.01 for text, 1/V for random tokens.

    Returns:
        Rows of the long table (run = "theory", split = "theory", step 0): `token_l2_mean`, `feature_var_mean`, `rms` at
        `block_out`, `attn_norm_in`, `mlp_norm_in`, `final_norm_in`; `relative_contribution` at `attn`, `mlp`; and at
        tanh norms `saturation`, `saturation_bound`, `carried_var_ratio`.

    Raises:
        NormlabError: an activation other than SiLU, a length or collision out of range, a scheme without a recursion
            (``Scheme.unpredicted`` says why).
    """
    length = length or config.train_seq_len or config.max_position_embeddings
    if length < 1 or not 0 <= collision <= 1:
        raise NormlabError(f"length is {length} and collision {collision}: give at least 1, and a probability")
    if config.hidden_act != "silu":
        raise NormlabError(f"hidden_act is {config.hidden_act!r}: the prediction is for SwiGLU, hidden_act 'silu'")
    why = get_scheme(config.scheme).unpredicted
    if not why and config.affine_attention:
        why = "attention is not uniform at the start where its weights are scaled and shifted"
    if not why and config.qk_norm != "none":
        why = "attention is not uniform at the start where queries and keys are normalized"
    if why:
        raise NormlabError(f"scheme {config.scheme} is not predicted: {why}")
    joined = get_scheme(config.scheme).residual is not None
    recursion = (_JoinedRecursion if joined else _Recursion)(config, length, collision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # mHC's matrices start at random
        recursion.run()
    about = {"run": "theory", "scheme": config.scheme, "depth": recursion.depth, "width": recursion.width}
    about |= {"seed": pd.NA, "lr": math.nan, "status": FINISHED, "step": 0, "tokens": 0, "split": "theory"}
    columns = zip(("site", "layer", "metric", "mask", "value"), zip(*recursion.rows, strict=True), strict=True)
    return pd.DataFrame(about | dict(columns)).astype({"layer": "Int64", "seed": "Int64"})


def predict_runs(about: pd.DataFrame, depth: int, configs: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame | None:
    """Predictions for a depth's schemes, each for the model of its runs; None where there are none.

    A scheme is left out if its recursion is not known, or if one of its runs has no configuration, planted outliers or
    another model than the others. So is a scheme whose runs another version of normlab made. All are left out where
    transformers is too old for our models.

    Args:
        about: one row per run, of `normlab.analysis.selection.summarize`.
        configs: each run's configuration, by run (`normlab.read_configs`).
    """
    from normlab.training.config import TrainConfig

    runs = about[(about["depth"] == depth) & about["scheme"].isin(list(SCHEMES))]
    found = []
    for _, own in runs.groupby("scheme", sort=False):
        if not set(own.index) <= set(configs):
            continue
        try:
            made = [TrainConfig.from_dict(dict(configs[run])) for run in own.index]
            unlike = {repr(replace(config, seed=0)): config for config in made}.values()  # seeds share a model
            models = {m.to_json_string(): m for m in (config.model_config(config.vocab_size, 0) for config in unlike)}
        except NormlabError:  # made by another version of normlab, or transformers is too old
            continue
        predicted = not get_scheme(made[0].scheme).unpredicted
        if predicted and len(models) == 1 and not any(config.outlier_channels for config in made):
            found.append(predict(*models.values(), collision=COLLISION))
    return pd.concat(found, ignore_index=True) if found else None
