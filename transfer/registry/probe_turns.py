"""Turns of a decode rank's writers to measure their links, so that hundreds of them do not measure each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

MAX_PROBES: Final = 4
"""Turns at once. A probe uses its link for a part of its time only, and one slow writer must not stop the others."""

TURN_S: Final = 10.0
"""Seconds after which the next writer gets the turn of one that has not reported its link: the time limit of a probe."""


class ProbeTurns:
    """Grant turns in the order in which sessions ask. Every method is called on one asyncio loop.

    Args:
        on_granted: Called with each session that gets its turn.
    """

    def __init__(self, on_granted: Callable[[int], None]) -> None:
        self._on_granted = on_granted
        self._waiting: dict[int, None] = {}  # sessions, in order
        self._granted: dict[int, asyncio.TimerHandle] = {}

    def ask(self, session: int) -> None:
        """Grant the session a turn, now or later. Ask once for each session."""
        self._waiting[session] = None
        self._grant()

    def end(self, session: int) -> None:
        """End the turn of a session, or its wait. No-op for any other session."""
        self._waiting.pop(session, None)
        timer = self._granted.pop(session, None)
        if timer is not None:
            timer.cancel()
            self._grant()

    def _grant(self) -> None:
        while self._waiting and len(self._granted) < MAX_PROBES:
            session = next(iter(self._waiting))
            del self._waiting[session]
            self._granted[session] = asyncio.get_running_loop().call_later(TURN_S, self.end, session)
            self._on_granted(session)
