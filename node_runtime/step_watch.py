"""Notices an engine that hangs while its rank lives: the loop answers and sends heartbeats, and no step ever ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

NUM_TICKS = 20


class StepWatch:
    """A deadline for the oldest step under way. Owned by the leader's loop.

    It counts its own ticks, not seconds: while this process is stopped or starved, the news that a step ended lies unread.

    Args:
        timeout_s: Longest time in which no step may end while one is under way.
        on_overdue: Called with why, once, when it has passed; the life is of no more use.
    """

    def __init__(self, timeout_s: float, on_overdue: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_overdue = on_overdue
        self._timer: asyncio.TimerHandle | None = None
        self._num_ticks = 0

    def step_sent(self) -> None:
        """The ranks were told to run a step; those before it count first."""
        if self._timer is None:
            self._num_ticks = 0
            self._tick_later()

    def step_over(self, *, num_left: int) -> None:
        """A step ended, well or not; so many are still under way."""
        self.close()
        if num_left:
            self.step_sent()

    def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s / NUM_TICKS, self._tick)

    def _tick(self) -> None:
        self._num_ticks += 1
        if self._num_ticks < NUM_TICKS:
            self._tick_later()
            return
        self._timer = None
        self._on_overdue(f"no step of the engine has ended for {self._timeout_s:g} s (limits.step_timeout_s)")
