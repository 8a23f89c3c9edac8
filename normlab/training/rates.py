"""How a sweep chooses learning rates: each scheme at several of them, and the one with the lowest loss.

`Rates`    which rates are tried, at which depths, and which of them is best
`Choice`   the best rate of a scheme at a depth
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Choice(NamedTuple):
    """A scheme's best learning rate at a depth, and the loss that decided. NaN: none did yet."""

    lr: float
    loss: float = math.nan


Pair = tuple[str, int]  # a scheme and a depth at which rates are tried
Trial = tuple[Pair, float]  # at one rate
Choices = Mapping[Pair, Choice]
# Trains trials and returns their losses: infinite for a diverged run, NaN for one not trained yet, none for one that
# failed.
Losses = Callable[[Sequence[Trial]], Mapping[Trial, float]]


@dataclass(frozen=True)
class Rates:
    """Every scheme at each of the rates, and at one more beyond the best where that is an edge.

    The trials are seed 0 of the preset's runs, at full length, and are reported like all others. A scheme's rate is the
    one with the lowest loss (`normlab.runs.Run.choice_loss`), and its other seeds take it. A depth takes the rate of
    the deepest of `depths` not above it.
    """

    rates: tuple[float, ...]
    depths: tuple[int, ...]

    def depth_for(self, depth: int) -> int:
        return max((d for d in self.depths if d <= depth), default=min(self.depths))

    def choose(self, pairs: Sequence[Pair], losses: Losses) -> dict[Pair, Choice]:
        """The best rate of each pair. All are tried at once, so that workers have something to do.

        A pair of which a trial is missing gets no choice: with it another rate might be chosen. Of those that all
        diverged the lowest is taken. The middle rate stands for a pair with rates that are not tried yet.
        """
        tried: dict[Pair, dict[float, float]] = {pair: {} for pair in pairs}
        trials = [(pair, lr) for pair in pairs for lr in self.rates]
        while trials:
            known = losses(trials)
            for pair, lr in trials:
                if (pair, lr) not in known:
                    tried.pop(pair, None)
                elif pair in tried:
                    tried[pair][lr] = known[pair, lr]
            further = {pair: self.beyond(of_pair) for pair, of_pair in tried.items()}
            trials = [(pair, lr) for pair, lr in further.items() if lr is not None]
        return {pair: self.best(of_pair) for pair, of_pair in tried.items()}

    def best(self, losses: Mapping[float, float]) -> Choice:
        """The rate with the lowest loss, or the middle one before each of the plain rates has one."""
        if any(math.isnan(losses[rate]) for rate in self.rates):
            return Choice(sorted(self.rates)[len(self.rates) // 2])
        known = {rate: loss for rate, loss in losses.items() if not math.isnan(loss)}
        best = min(known, key=lambda rate: (known[rate], rate))
        return Choice(best, known[best])

    def beyond(self, losses: Mapping[float, float]) -> float | None:
        """The rate to try beyond the best one, from the loss at each rate tried.

        None if the best lies inside, diverged or is not known yet, or if other rates were tried than the plain ones.
        """
        tried = sorted(losses)
        if tried != sorted(self.rates) or len(tried) < 2:
            return None
        best, loss = self.best(losses)
        ends = {tried[0]: tried[0] ** 2 / tried[1], tried[-1]: tried[-1] ** 2 / tried[-2]}
        return float(f"{ends[best]:.3g}") if best in ends and math.isfinite(loss) else None
