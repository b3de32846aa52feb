"""Feeds a state machine without I/O, and carries out what it answers, one event after the other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from transfer.loop_turns import turns_of

TICK_S = 0.25

_E = TypeVar("_E")
_A = TypeVar("_A")


class EventPump(Generic[_E, _A]):
    """Owns the order of events: what carrying out an action brings about is handled after it, never inside it.

    Args:
        loop: The one owner's loop.
        handle: The machine: event and time in, actions out.
        carry_out: Does one action.
        is_idle: Whether the machine needs no ticks.
        tick: The event that says that time has passed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        handle: Callable[[_E, float], Iterable[_A]],
        carry_out: Callable[[_A], None],
        is_idle: Callable[[], bool],
        tick: _E,
    ) -> None:
        self._loop = loop
        self._turns = turns_of(loop)
        self._machine = handle
        self._carry_out = carry_out
        self._is_idle = is_idle
        self._tick = tick
        self._events: deque[_E] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def feed(self, event: _E) -> None:
        """Handle the event, and everything that its actions bring about at once."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                event, begun_s = self._events.popleft(), time.monotonic()
                for action in self._machine(event, begun_s):
                    self._carry_out(action)
                self._turns.took(event, begun_s)
        finally:
            self._is_handling = False
        if self._timer is None and not self._is_closed and not self._is_idle():
            self._timer = self._loop.call_later(TICK_S, self._on_timer)

    def close(self) -> None:
        """No more ticks."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.feed(self._tick)
