"""`Budget`: a share of training time that measuring may take, kept by putting measurements off."""

from __future__ import annotations


class Budget:
    """Says whether a step may be measured, from what steps and measurements have cost so far.

    A measurement's cost is its step's duration beyond the mean of steps that were not measured. With a `share`, the sum
    of all costs stays below `share` times the time that training has taken: a measurement that would go beyond is put
    off. The first step is not measured then, because nothing tells yet what a step takes.
    """

    def __init__(self, share: float | None):
        self.share = share
        self.spent = self.elapsed = 0.0
        self._plain_time, self._plain_steps = 0.0, 0
        self._cost: float | None = None

    @property
    def plain(self) -> float | None:
        """Mean seconds of a step that is not measured; None before the first."""
        return self._plain_time / self._plain_steps if self._plain_steps else None

    def allows(self) -> bool:
        """Whether the coming step may be measured."""
        if self.share is None:
            return True
        if self.plain is None:
            return False
        cost = self.plain if self._cost is None else self._cost
        return self.spent + cost <= self.share * (self.elapsed + self.plain)

    def add(self, seconds: float, measured: bool) -> None:
        """A step has taken so long, its measurement included."""
        self.elapsed += seconds
        if not measured:
            self._plain_time, self._plain_steps = self._plain_time + seconds, self._plain_steps + 1
        elif self.plain is not None:
            self._cost = max(0.0, seconds - self.plain)
            self.spent += self._cost
