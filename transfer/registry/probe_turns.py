"""Turns of a decode rank's writers to measure their links, so that hundreds of them do not measure each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

MAX_PROBES: Final = 4
"""Turns at once. A probe uses its link for a part of its time only, and one slow writer must not stop the others."""

TURN_S: Final = 10.0
"""Seconds after which the next writer gets the turn of one that has not reported its link: the time limit of a probe."""


MAX_WAIT_S: Final = 3.0
"""Seconds after which a session gets its turn in any case. Turns only make measurements more accurate. A join must end within
30 s, and a writer can have links to eight ranks of a node, one after the other."""


class ProbeTurns:
    """Grant turns in the order in which sessions ask, each within `MAX_WAIT_S`. Every method is called on one asyncio loop.

    Args:
        on_granted: Called with each session that gets its turn.
    """

    def __init__(self, on_granted: Callable[[int], None]) -> None:
        self._on_granted = on_granted
        self._waiting: dict[int, asyncio.TimerHandle] = {}  # sessions, in order
        self._granted: dict[int, asyncio.TimerHandle] = {}

    def ask(self, session: int) -> None:
        """Grant the session a turn, now or later. Ask once for each session."""
        self._waiting[session] = asyncio.get_running_loop().call_later(MAX_WAIT_S, self._grant, session)
        self._grant_next()

    def end(self, session: int) -> None:
        """End the turn of a session, or its wait. No-op for any other session."""
        for timers in (self._waiting, self._granted):
            if session in timers:
                timers.pop(session).cancel()
        self._grant_next()

    def _grant_next(self) -> None:
        while self._waiting and len(self._granted) < MAX_PROBES:
            self._grant(next(iter(self._waiting)))

    def _grant(self, session: int) -> None:
        self._waiting.pop(session).cancel()
        self._granted[session] = asyncio.get_running_loop().call_later(TURN_S, self.end, session)
        self._on_granted(session)
