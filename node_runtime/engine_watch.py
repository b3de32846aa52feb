"""Watch the engines of the ranks from the leader: hung steps, steps without memory, and a full KV pool.

The last two are logged once for as long as the condition lasts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

QUIET_S: Final = 60.0
"""Time without a step that finds no memory, after which the next such step is logged again."""

MOST_IN_A_ROW: Final = 8
"""Steps in a row that find no memory before the ranks are started again. The new ranks measure the device again."""

LINGER_S: Final = 5.0
"""Time without a request that waits for pages, after which the pool counts as having room. A busy pool is full again at once."""

NUM_TICKS: Final = 20
"""Ticks of a `StepWatch` in its timeout."""

log = structlog.get_logger(__name__)


class StepWatch:
    """A deadline for the oldest step under way: an engine can hang while its rank still answers. Owned by the leader's loop.

    It counts its own ticks, not seconds: while this process is stopped or starved, it does not read the end of a step.

    Args:
        timeout_s: Longest time without the end of a step while one is under way.
        on_overdue: Called once with the reason when it has passed. The life cannot continue.
    """

    def __init__(self, timeout_s: float, on_overdue: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_overdue = on_overdue
        self._timer: asyncio.TimerHandle | None = None
        self._num_ticks = 0

    def step_sent(self) -> None:
        """Record that a step was sent to the ranks. Earlier steps count first."""
        if self._timer is None:
            self._num_ticks = 0
            self._tick_later()

    def step_over(self, *, num_left: int) -> None:
        """Record that a step ended or failed, and that `num_left` are still under way."""
        self.close()
        if num_left:
            self.step_sent()

    def close(self) -> None:
        """Stop the watch."""
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


class OutOfMemoryWatch:
    """Watch for steps of the engine that find no memory. Owned by the leader's loop, for one life of the ranks.

    Args:
        on_step: Called for each step that found no memory.
        on_hopeless: Called with the reason when `MOST_IN_A_ROW` steps in a row found no memory.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, *, on_step: Callable[[], None], on_hopeless: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_step = on_step
        self._on_hopeless = on_hopeless
        self._clock = clock
        self._num_in_a_row = 0
        self._num_steps = 0  # since the warning
        self._first_s = self._last_s = 0.0

    def step_done(self) -> None:
        """Record a step that succeeded."""
        self._num_in_a_row = 0
        if self._num_steps and self._clock() - self._last_s >= QUIET_S:
            log.info("out_of_memory_ended", steps=self._num_steps, lasted_s=round(self._last_s - self._first_s, 3))
            self._num_steps = 0

    def step_failed(self, reason: str) -> None:
        """Record a step that found no memory."""
        self._on_step()
        self._last_s = self._clock()
        if not self._num_steps:
            self._first_s = self._last_s
            log.error("out_of_memory", reason=reason)
        self._num_steps += 1
        self._num_in_a_row += 1
        if self._num_in_a_row == MOST_IN_A_ROW:
            self._on_hopeless(f"{MOST_IN_A_ROW} steps in a row found no memory, the last one: {reason}")


class FullPool:
    """Track the requests that wait for pages of the node's own KV pool. Owned by the leader's loop, for one life of the ranks.

    Args:
        advice: The settings to change, as an imperative.
        on_change: Called with the number of requests that wait.
    """

    def __init__(self, *, advice: str, on_change: Callable[[int], None]) -> None:
        self._advice = advice
        self._on_change = on_change
        self._names: set[str] = set()  # of `waits`
        self._num_waiting = self._most_waiting = 0
        self._first_s = self._last_s = 0.0
        self._ending: asyncio.TimerHandle | None = None

    def waits(self, request_id: str) -> None:
        """Record that a request found too few pages and asks again."""
        self._names.add(request_id)
        self.changed(len(self._names))

    def waits_no_more(self, request_id: str) -> None:
        """Record that a request has room or has ended. Ignore a request that did not wait."""
        self._names.discard(request_id)
        self.changed(len(self._names))

    def changed(self, num_waiting: int) -> None:
        """Record how many requests wait for pages."""
        if num_waiting == self._num_waiting:
            return
        loop = asyncio.get_running_loop()
        self._stop_ending()
        if not self._most_waiting:
            self._first_s = loop.time()
            log.warning("kv_pool_full", requests=num_waiting, advice=self._advice)
        self._num_waiting, self._most_waiting = num_waiting, max(self._most_waiting, num_waiting)
        self._on_change(num_waiting)
        if not num_waiting:
            self._last_s = loop.time()
            self._ending = loop.call_later(LINGER_S, self._end)

    def close(self) -> None:
        """End all waits at the end of the ranks' life."""
        if self._most_waiting:
            self._names.clear()
            self.changed(0)
            self._stop_ending()
            self._end()

    def _stop_ending(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def _end(self) -> None:
        log.info("kv_pool_has_room", lasted_s=round(self._last_s - self._first_s, 3), most_requests=self._most_waiting)
        self._most_waiting = 0
