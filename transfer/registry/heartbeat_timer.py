"""One timer for the heartbeats of all sessions of a process. Every method is called on its asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from transfer.registry.heartbeats import HeartbeatWatch, idle_heartbeat_s


@dataclass(slots=True, kw_only=True, eq=False)
class SessionHeartbeats:
    """The heartbeats of one session at one of its ends.

    Args:
        on_due: Sends a heartbeat soon, without blocking.
        on_silent: Called with the reason when the peer has missed its heartbeats.
        is_probing: Whether its link is about to be measured. Like a request, this keeps the short interval.
    """

    session_id: int
    watch: HeartbeatWatch
    on_due: Callable[[], None]
    on_silent: Callable[[str], None]
    is_probing: bool = False


class HeartbeatTimer:
    """See the module's docstring.

    Args:
        sessions_in_use: Returns the sessions that have a request in flight at this end.
    """

    def __init__(self, sessions_in_use: Callable[[], Collection[int]] = frozenset) -> None:
        self.sessions_in_use = sessions_in_use
        self._in_use: Collection[int] = frozenset()  # at the last tick
        self._sessions: dict[SessionHeartbeats, None] = {}
        self._timers: dict[float, asyncio.TimerHandle] = {}  # by seconds between ticks, which the decode ranks choose

    def add(self, session: SessionHeartbeats) -> None:
        self._sessions[session] = None
        if session.watch.tick_s not in self._timers:
            self._tick_later(session.watch.tick_s)

    def remove(self, session: SessionHeartbeats) -> None:
        """Stop counting for a session. May be called twice."""
        self._sessions.pop(session, None)
        if not self._sessions:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def stated_idle_s(self, session: SessionHeartbeats) -> float:
        """Return the interval that the next heartbeat of the session states; see `HeartbeatWatch`."""
        return 0.0 if session.is_probing or session.session_id in self._in_use else idle_heartbeat_s(len(self._sessions))

    def is_late(self, watch: HeartbeatWatch) -> bool:
        """Return whether this process was stopped or busy, so that a peer may have ended a session and nobody has read why."""
        timer = self._timers.get(watch.tick_s)
        return timer is not None and asyncio.get_running_loop().time() > timer.when() + watch.tick_s

    def _tick_later(self, tick_s: float) -> None:
        self._timers[tick_s] = asyncio.get_running_loop().call_later(tick_s, self._tick, tick_s)

    def _tick(self, tick_s: float) -> None:
        is_late = asyncio.get_running_loop().time() > self._timers.pop(tick_s).when() + tick_s
        self._in_use = frozenset(self.sessions_in_use())
        group = [session for session in self._sessions if session.watch.tick_s == tick_s]
        if group:
            self._tick_later(tick_s)
        for session in group:
            watch = session.watch
            if watch.tick():
                session.on_silent(watch.describe())
            elif not is_late and (watch.is_due or (watch.own_idle_s and session.session_id in self._in_use)):
                session.on_due()
