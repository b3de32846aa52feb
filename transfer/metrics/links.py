"""Count the bytes written over a rank's links, and the busy time of the links."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from transfer.metrics.series import Counter

LINK_WINDOW_S: Final = 120.0
"""Time over which a link's speed is compared with its probe."""
LINK_MARK_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Use of a session's link so far.

    Args:
        num_bytes: Payload bytes, including those sent again.
        busy_s: Seconds with at least one write in flight.
        probe_s: Seconds that those writes would have taken one after another at the speed of the probe.
    """

    num_bytes: int = 0
    busy_s: float = 0.0
    probe_s: float = 0.0


@dataclass(slots=True)
class BusyTime:
    """Seconds with at least one write in flight. Each second counts once, whatever the number of writes."""

    seconds: float = 0.0
    num_writing: int = 0
    _counted_until_s: float = -math.inf  # time before that is counted, or was idle

    def began(self, now_s: float) -> None:
        """Record the start of a write."""
        self.count_until(now_s)
        self._counted_until_s = max(now_s, self._counted_until_s)
        self.num_writing += 1

    def ended(self, now_s: float, *, num_writes: int = 1) -> None:
        """Record the end of writes."""
        self.count_until(now_s)
        self.num_writing -= num_writes

    def was_busy(self, begun_s: float, ended_s: float) -> None:
        """Record a write after its end. Its start was not recorded."""
        self.count_until(ended_s)
        self.seconds += max(0.0, ended_s - max(begun_s, self._counted_until_s))
        self._counted_until_s = max(ended_s, self._counted_until_s)

    def count_until(self, now_s: float) -> None:
        """Count the writes in flight until now."""
        if self.num_writing:
            self.seconds += max(0.0, now_s - self._counted_until_s)
            self._counted_until_s = max(now_s, self._counted_until_s)


@dataclass(slots=True, kw_only=True)
class LinkSeries:
    """Counters of links with the same labels, which are sessions of the same ranks with several instances of the other tier.

    Their bytes add up, but not their time: while two of them write, a second is one busy second.
    """

    written_bytes: Counter
    busy_seconds: Counter
    probe_seconds: Counter
    busy: BusyTime = field(default_factory=BusyTime)

    def show(self, now_s: float) -> None:
        """Update the counter to the busy time of the links until now."""
        self.busy.count_until(now_s)
        self.busy_seconds.reach(self.busy.seconds)


@dataclass(slots=True, kw_only=True)
class SessionLink:
    """Use of one session's link."""

    latency_s: float
    seconds_per_byte: float
    series: LinkSeries
    num_bytes: int = 0  # of this session alone; other sessions may share the series
    busy: BusyTime = field(default_factory=BusyTime)
    probe_s: float = 0.0
    peer: str = ""
    is_slow: bool = False
    marks: deque[tuple[float, float, float]] = field(default_factory=deque)  # time, busy and probe seconds until then

    def lately(self, now_s: float) -> tuple[float, float] | None:
        """Return its busy share of the last `LINK_WINDOW_S`, and its share of the probe's speed then; None if idle or new."""
        self.busy.count_until(now_s)
        marks = self.marks
        if not marks or now_s - marks[-1][0] >= LINK_MARK_S:
            marks.append((now_s, self.busy.seconds, self.probe_s))
        while len(marks) > 1 and now_s - marks[1][0] >= LINK_WINDOW_S:
            marks.popleft()
        since_s, busy_s, probe_s = marks[0]
        window_s, busy_s = now_s - since_s, self.busy.seconds - busy_s
        if window_s < LINK_WINDOW_S or not busy_s:
            return None
        return busy_s / window_s, (self.probe_s - probe_s) / busy_s

    def count(self, num_bytes: int) -> None:
        """Count a write that succeeded."""
        self.num_bytes += num_bytes
        self.series.written_bytes.inc(num_bytes)
        probe_s = self.latency_s + num_bytes * self.seconds_per_byte
        self.probe_s += probe_s
        self.series.probe_seconds.inc(probe_s)

    def forget_writes(self, now_s: float) -> None:
        """End the writes in flight of a session that is over."""
        self.series.busy.ended(now_s, num_writes=self.busy.num_writing)
