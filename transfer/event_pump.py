"""Feed a state machine without I/O, and carry out its actions, one event after the other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from transfer.loop_turns import turns_of

TICK_S = 0.25

_E = TypeVar("_E")


class EventPump(Generic[_E]):
    """Own the order of events. Events that an action causes are handled after that action's event, never inside it.

    Args:
        handle: The machine: takes an event and the time, returns actions.
        carry_out: For each type of action, the function that carries it out.
        is_idle: Return whether the machine needs no ticks.
        tick: The event that reports that time has passed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        handle: Callable[[_E, float], Iterable[object]],
        carry_out: Mapping[type, Callable[[Any], object]],
        is_idle: Callable[[], bool],
        tick: _E,
    ) -> None:
        self._loop = loop
        self._turns = turns_of(loop)
        self._machine = handle
        self.carry_out = carry_out
        self._is_idle = is_idle
        self._tick = tick
        self._events: deque[_E] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def feed(self, event: _E) -> None:
        """Handle the event, and all events that its actions cause at once."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        carry_out = self.carry_out
        try:
            while self._events:
                event, begun_s = self._events.popleft(), time.monotonic()
                for action in self._machine(event, begun_s):
                    carry_out[type(action)](action)
                self._turns.took(event, begun_s)
        finally:
            self._is_handling = False
        if self._timer is None and not self._is_closed and not self._is_idle():
            self._timer = self._loop.call_later(TICK_S, self._on_timer)

    def close(self) -> None:
        """Stop the ticks."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.feed(self._tick)
