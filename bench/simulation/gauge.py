"""How much of something is in use: its most, and its mean over time."""

from __future__ import annotations

from bench.simulation.clock import Clock


class Gauge:
    """A number that goes up and down.

    Args:
        capacity: What it must never pass; 0: it has no bound.
    """

    def __init__(self, clock: Clock, *, capacity: int = 0, what: str = "") -> None:
        self._clock = clock
        self._capacity = capacity
        self._what = what
        self._changed_s = 0.0
        self._area = 0.0
        self.value = 0
        self.most = 0

    def add(self, change: int) -> None:
        """Raises AssertionError when the bound is passed: the simulation would be wrong."""
        now_s = self._clock.now_s
        self._area += self.value * (now_s - self._changed_s)
        self._changed_s = now_s
        self.value += change
        if self.value > self.most:
            self.most = self.value
        assert self.value >= 0, f"{self._what} holds {self.value}"
        assert not self._capacity or self.value <= self._capacity, f"{self._what} holds {self.value} of {self._capacity}"

    def mean(self) -> float:
        """Over the time since 0."""
        now_s = self._clock.now_s
        return (self._area + self.value * (now_s - self._changed_s)) / now_s if now_s > 0 else 0.0
