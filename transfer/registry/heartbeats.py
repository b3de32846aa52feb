"""The rule by which each end of a session, or of a join, declares the other dead: three missed heartbeats. Pure."""

from __future__ import annotations

from typing import Final

from transfer.errors import ConfigError

MISSED_HEARTBEATS: Final = 3
TICKS_PER_HEARTBEAT: Final = 4


class HeartbeatWatch:
    """Count the owner's ticks since the last heartbeat.

    Ticks, not seconds: an owner that was stopped or busy has ticked only once when it goes on. So it reads the heartbeats that
    arrived meanwhile before it declares the peer dead. With `TICKS_PER_HEARTBEAT` ticks in a heartbeat, a dead peer is detected
    after 3 to 3.5 heartbeats.

    Args:
        heartbeat_s: Seconds between heartbeats, above 0.
    """

    def __init__(self, heartbeat_s: float) -> None:
        if not 0 < heartbeat_s < float("inf"):
            raise ConfigError(f"heartbeat_s is {heartbeat_s}; it must be finite and above 0")
        self.heartbeat_s = heartbeat_s
        self._silent_ticks = 0

    @property
    def tick_s(self) -> float:
        """Seconds between the owner's ticks."""
        return self.heartbeat_s / TICKS_PER_HEARTBEAT

    def on_heartbeat(self) -> None:
        self._silent_ticks = 0

    def tick(self) -> bool:
        """Count a tick. Return whether the peer has missed its heartbeats."""
        self._silent_ticks += 1
        return self._silent_ticks > MISSED_HEARTBEATS * TICKS_PER_HEARTBEAT

    def describe(self) -> str:
        """Return why the peer is declared dead, for people."""
        return f"{MISSED_HEARTBEATS} heartbeats of {self.heartbeat_s:g} s missed"
