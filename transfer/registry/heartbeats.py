"""The rule by which each end of a session, or of a join, declares the other dead: three missed heartbeats. Pure."""

from __future__ import annotations

import math
from typing import Final

from transfer.errors import ConfigError, RemoteProtocolError

MISSED_HEARTBEATS: Final = 3
TICKS_PER_HEARTBEAT: Final = 4

IDLE_HEARTBEATS_PER_S: Final = 32
"""Heartbeats that an end with many idle sessions exchanges in a second, in each direction. See docs/adr/0065."""

MAX_IDLE_HEARTBEAT_S: Final = 10.0


def idle_heartbeat_s(num_sessions: int) -> float:
    """Return the interval that an end with this number of sessions states for those without requests."""
    return min(MAX_IDLE_HEARTBEAT_S, num_sessions / IDLE_HEARTBEATS_PER_S)


def checked_idle_heartbeat_s(stated_s: float) -> float:
    """Return the interval that a peer states.

    Raises:
        RemoteProtocolError: It is not in [0, `MAX_IDLE_HEARTBEAT_S`].
    """
    if not 0 <= stated_s <= MAX_IDLE_HEARTBEAT_S:
        raise RemoteProtocolError(f"heartbeat: idle_heartbeat_s is {stated_s:g}; it must be in [0, {MAX_IDLE_HEARTBEAT_S:g}]")
    return stated_s


class HeartbeatWatch:
    """Count the owner's ticks since the last heartbeat of the peer, and the seconds since the last one that the owner sent.

    An owner that was stopped or busy has ticked only once when it goes on. So it reads the heartbeats that arrived meanwhile
    before it declares the peer dead. With `TICKS_PER_HEARTBEAT` ticks in a heartbeat, a dead peer is detected after 3 to 3.5
    heartbeats. The peer counts ticks of its own, so what the owner must send depends on seconds.

    Each end of a session states an interval in each heartbeat: 0 while a request is in flight, otherwise the interval that
    suffices. Both ends apply the same rule to the last value of each end: `heartbeat_s` if either is 0, otherwise the largest.
    An end that has shortened the interval allows its peer three of the new ones to hear of it. Because that can happen again and
    again, a silence of three of the longest intervals and three of `heartbeat_s` is never excused.

    Args:
        heartbeat_s: Seconds between heartbeats of a session in use, and of a join; above 0.
    """

    def __init__(self, heartbeat_s: float) -> None:
        if not 0 < heartbeat_s < float("inf"):
            raise ConfigError(f"heartbeat_s is {heartbeat_s}; it must be finite and above 0")
        self.heartbeat_s = heartbeat_s
        self.tick_s = heartbeat_s / TICKS_PER_HEARTBEAT
        """Seconds between the owner's ticks."""
        self.own_idle_s = 0.0
        """The interval that this end stated last."""
        self.peer_idle_s = 0.0
        """The interval that the peer stated last."""
        self.interval_s = heartbeat_s
        """Seconds between heartbeats, in both directions."""
        self._silent_ticks = 0
        self._excused_ticks = 0  # of them, those before the interval was shortened
        self._longest_s = heartbeat_s  # interval since the last heartbeat
        self._sent_s = -math.inf
        self._update_limits()

    @property
    def is_in_use(self) -> bool:
        """Whether one of the ends has stated that a request is in flight."""
        return not (self.own_idle_s and self.peer_idle_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether the owner must send a heartbeat at this tick: the interval ends nearer to it than to the next."""
        return now_s >= self._due_s

    def on_heartbeat(self, idle_s: float = 0.0) -> None:
        """Record a heartbeat of the peer, and the interval that it states."""
        self.peer_idle_s = idle_s
        self._silent_ticks = self._excused_ticks = 0
        self._longest_s = 0.0
        self._update_limits()

    def on_sent(self, idle_s: float, now_s: float) -> None:
        """Record a heartbeat of this end, the interval that it states, and the time at which it was written."""
        before_s = self.interval_s
        self.own_idle_s = idle_s
        self._sent_s = now_s
        self._update_limits()
        if self.interval_s < before_s:
            self._excused_ticks = self._silent_ticks
            self._update_limits()

    def _update_limits(self) -> None:
        """Derive the limits of `is_due` and `tick`. Ticks are much more frequent than heartbeats, so they only compare."""
        self.interval_s = self.heartbeat_s if self.is_in_use else max(self.heartbeat_s, self.own_idle_s, self.peer_idle_s)
        self._longest_s = max(self._longest_s, self.interval_s)
        self._due_s = self._sent_s + self.interval_s - self.tick_s / 2
        allowed = MISSED_HEARTBEATS / self.tick_s
        self._most_ticks = min(self._excused_ticks + allowed * self.interval_s, allowed * (self._longest_s + self.heartbeat_s))

    def tick(self) -> bool:
        """Count a tick. Return whether the peer has missed its heartbeats."""
        self._silent_ticks += 1
        return self._silent_ticks > self._most_ticks

    def describe(self) -> str:
        """Return why the peer is declared dead, for people."""
        return f"{MISSED_HEARTBEATS} heartbeats of {self.interval_s:g} s missed"
