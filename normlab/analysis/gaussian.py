"""Kernels of the residual stream before training, and what a model's parts make of them.

At initialisation weights are independent Gaussians, so at large width the residual stream is, feature by feature, a
Gaussian process over positions: all there is to know is its kernel K[t, s], the covariance of one feature between
positions t and s. Each part of a block maps K to K:

    norm        K[t, s] / sqrt((K[t, t] + eps)(K[s, s] + eps)) times the squared gain (a tanh norm: E[tanh u tanh v] of
                Gaussians)
    attention   V and O multiply by d var_w each; attention at initialisation is uniform over the past, so K -> P K P^T,
                P averaging
    MLP         gate and up multiply by d var_w; E[silu(u) silu(v)] E[u' v']; down multiplies by f var_w
    residual    kernels add; where a scheme joins its branches by a rule of its own, the rule's own code says how
                (`Written`)

which is exact in the limit of width (the recursion of Lee et al., 1711.00165, for this block), and within a few per
cent at width 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

ORDER = 16  # Hermite terms, one by one: the tanh and SiLU of arguments up to unit scale converge long before
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(128)
Kernel = np.ndarray


def gaussian_kernel(kernel: Kernel, function: Callable[[np.ndarray], np.ndarray]) -> Kernel:
    """E[f(u_t) f(u_s)] for jointly Gaussian u with covariance `kernel`, by its expansion in Hermite polynomials.

    What the terms left out hold together, E[f^2] minus the squares of those taken, counts as one more term: a steep
    tanh has some per cent there, and the variance must have all of it.
    """
    scale = np.sqrt(np.diag(kernel))
    values = function(scale[:, None] * NODES) * WEIGHTS / math.sqrt(2 * math.pi)
    correlation = kernel / np.maximum(np.outer(scale, scale), 1e-300)
    power, before, polynomial = np.ones_like(kernel), np.zeros_like(NODES), np.ones_like(NODES)
    total = np.zeros_like(kernel)
    for k in range(ORDER):
        coefficient = values @ polynomial
        total = total + np.outer(coefficient, coefficient) * power
        power = power * correlation
        # normalised: He_{k+1}/sqrt((k+1)!) from the two before
        polynomial, before = (NODES * polynomial - math.sqrt(k) * before) / math.sqrt(k + 1), polynomial
    square = function(scale[:, None] * NODES) ** 2 @ WEIGHTS / math.sqrt(2 * math.pi)
    rest = np.sqrt(np.maximum(square - np.diag(total), 0.0))
    return total + np.outer(rest, rest) * power


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normalized(norm: Any, kernel: Kernel, mean_square: np.ndarray | None = None) -> Kernel:
    """The kernel after a norm at its starting constants; `mean_square` per position when it is given one."""
    start = norm.starting_map()
    if start.eps is not None:
        used = (np.diag(kernel) if mean_square is None else mean_square) + start.eps
        kernel = kernel / np.sqrt(np.outer(used, used))
    kernel = start.slope**2 * kernel
    if start.function is not None:
        kernel = gaussian_kernel(kernel, lambda u: start.function(torch.from_numpy(u)).numpy())
    return start.gain**2 * kernel


class Written:
    """A state of one or several streams before training, as weights of what was written into it: the embeddings, then
    each branch's output. Weights of branches are drawn independently, so what they write is uncorrelated, and a
    stream's kernel is the sum of theirs, each times its weights at both positions.

    A state is (positions, streams times n), n the most that can be written: as if a stream had n features, of which
    each is one branch's. Scaled so that their mean square is the stream's variance, they are what a residual rule of
    width n can be given as it is.
    """

    def __init__(self, most: int, kernel: Kernel):
        self.most = most
        self.correlations: list[Kernel] = []
        self.first = self.add(kernel)

    def add(self, kernel: Kernel) -> torch.Tensor:
        """Something new with this kernel: the stream that holds it and nothing else."""
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
