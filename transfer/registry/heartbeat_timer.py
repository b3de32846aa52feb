"""One timer for the heartbeats of all sessions of a process. Every method is called on its asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class _Group:
    """Sessions of one interval, which the decode ranks choose."""

    timer: asyncio.TimerHandle
    sessions: dict[SessionHeartbeats, None] = field(default_factory=dict)
    has_deferred: bool = False  # the last tick was late, so its heartbeats are sent at the next


class HeartbeatTimer:
    """See the module's docstring.

    After a late tick, this process was stopped or busy, and a peer may have ended its session. A heartbeat that gRPC cannot send
    would stand in for the reason of the end ("Internal error from Core"). So heartbeats that are due then wait for the next
    tick, late or not, and the reader hears of the end first.

    Args:
        sessions_in_use: Returns the sessions that have a request in flight at this end.
    """

    def __init__(self, sessions_in_use: Callable[[], Collection[int]] = frozenset) -> None:
        self.sessions_in_use = sessions_in_use
        self._in_use: Collection[int] = frozenset()  # at the last tick
        self._groups: dict[float, _Group] = {}  # by seconds between ticks
        self._num_sessions = 0

    def add(self, session: SessionHeartbeats) -> None:
        tick_s = session.watch.tick_s
        group = self._groups.get(tick_s)
        if group is None:
            group = self._groups[tick_s] = _Group(self._tick_later(tick_s))
        group.sessions[session] = None
        self._num_sessions += 1

    def remove(self, session: SessionHeartbeats) -> None:
        """Stop counting for a session. May be called twice."""
        tick_s = session.watch.tick_s
        group = self._groups.get(tick_s)
        if group is None or session not in group.sessions:
            return
        del group.sessions[session]
        self._num_sessions -= 1
        if not group.sessions:
            group.timer.cancel()
            del self._groups[tick_s]

    def send_soon(self, session: SessionHeartbeats) -> None:
        """Send a heartbeat that cannot wait until it is due: at once, or in a tick's time if a tick is late."""
        group = self._groups.get(session.watch.tick_s)
        loop = asyncio.get_running_loop()
        if group is not None and (group.has_deferred or _is_late(group.timer, session.watch.tick_s)):
            loop.call_later(session.watch.tick_s, session.on_due)
        else:
            session.on_due()

    def stated_idle_s(self, session: SessionHeartbeats) -> float:
        """Return the interval that the next heartbeat of the session states; see `HeartbeatWatch`."""
        return 0.0 if session.is_probing or session.session_id in self._in_use else idle_heartbeat_s(self._num_sessions)

    def _tick_later(self, tick_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(tick_s, self._tick, tick_s)

    def _tick(self, tick_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        group = self._groups[tick_s]
        group.has_deferred = _is_late(group.timer, tick_s) and not group.has_deferred
        group.timer = self._tick_later(tick_s)
        self._in_use = frozenset(self.sessions_in_use())
        for session in list(group.sessions):
            if session not in group.sessions:
                continue  # the end of another session has ended it
            try:
                self._tick_session(session, now_s, may_send=not group.has_deferred)
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a session's heartbeats failed", "exception": error}
                )

    def _tick_session(self, session: SessionHeartbeats, now_s: float, *, may_send: bool) -> None:
        watch = session.watch
        if watch.tick():
            session.on_silent(watch.describe())
        elif may_send and (watch.is_due(now_s) or (watch.own_idle_s and session.session_id in self._in_use)):
            session.on_due()


def _is_late(timer: asyncio.TimerHandle, tick_s: float) -> bool:
    return asyncio.get_running_loop().time() > timer.when() + tick_s
