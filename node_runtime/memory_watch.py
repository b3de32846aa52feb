"""What a leader tells of memory: steps that found none, and a KV pool that is full. Each once for as long as it lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

QUIET_S: Final = 60.0
"""Without a step that finds no memory, after which the next one is told of again."""

MOST_IN_A_ROW: Final = 8
"""Steps in a row that find no memory before the ranks are given up. Their next life measures the device again."""

LINGER_S: Final = 5.0
"""For so long no request may have to wait for pages before the pool counts as having room: a busy pool is full again at once."""

log = structlog.get_logger(__name__)


class OutOfMemoryWatch:
    """Hears of each step of the engine. Owned by the leader's loop, for one life of the ranks.

    Args:
        on_step: Called for each step that found no memory.
        on_hopeless: Called with the reason when `MOST_IN_A_ROW` steps found none, with no other step between.
        clock: Seconds.
    """

    def __init__(
        self, *, on_step: Callable[[], None], on_hopeless: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_step = on_step
        self._on_hopeless = on_hopeless
        self._clock = clock
        self._num_in_a_row = 0
        self._num_steps = 0  # since it was told of
        self._first_s = self._last_s = 0.0

    def step_done(self) -> None:
        """A step ended well."""
        self._num_in_a_row = 0
        if self._num_steps and self._clock() - self._last_s >= QUIET_S:
            log.info("out_of_memory_over", steps=self._num_steps, lasted_s=round(self._last_s - self._first_s, 3))
            self._num_steps = 0

    def step_failed(self, reason: str) -> None:
        """A step found no memory."""
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
    """Knows which requests wait for pages of the node's own KV pool. Owned by the leader's loop, for one life of the ranks.

    Args:
        advice: The settings to change, as an imperative.
        on_change: Called with the number of requests that wait.
    """

    def __init__(self, *, advice: str, on_change: Callable[[int], None]) -> None:
        self._advice = advice
        self._on_change = on_change
        self._waiting: frozenset[str] = frozenset()
        self._have_waited: set[str] = set()  # since it was told of
        self._first_s = self._last_s = 0.0
        self._ending: asyncio.TimerHandle | None = None

    def waits(self, request_id: str) -> None:
        """The request has found too few pages, and asks again."""
        if request_id not in self._waiting:
            self.only(self._waiting | {request_id})

    def waits_no_more(self, request_id: str) -> None:
        """The request has room, or has ended. Does nothing for one that did not wait."""
        if request_id in self._waiting:
            self.only(self._waiting - {request_id})

    def only(self, request_ids: Iterable[str]) -> None:
        """These requests wait for pages, and no others."""
        waiting = frozenset(request_ids)
        if waiting == self._waiting:
            return
        loop = asyncio.get_running_loop()
        self._stop_ending()
        if waiting and not self._have_waited:
            self._first_s = loop.time()
            log.warning("kv_pool_full", requests=len(waiting), advice=self._advice)
        self._have_waited |= waiting
        self._waiting = waiting
        self._on_change(len(waiting))
        if not waiting:
            self._last_s = loop.time()
            self._ending = loop.call_later(LINGER_S, self._end)

    def close(self) -> None:
        """The ranks' life is over, and with it every wait."""
        if self._have_waited:
            self.only(())
            self._stop_ending()
            self._end()

    def _stop_ending(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def _end(self) -> None:
        log.info("kv_pool_has_room", lasted_s=round(self._last_s - self._first_s, 3), requests=len(self._have_waited))
        self._have_waited = set()
