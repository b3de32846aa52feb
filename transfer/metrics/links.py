"""Count the bytes written over a rank's links, and the busy time of the links."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from transfer.metrics.series import Counter

LINK_WINDOW_S: Final = 120.0
"""What a link makes of its probe is looked at over so long, when it has been open for as long."""
LINK_MARK_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What was written over a session's link so far.

    Args:
        num_bytes: Of payload, resent ones included.
        busy_s: Seconds in which at least one write was under way, until now.
        probe_s: Seconds that those writes would have taken one after the other, had each gone as its probe did.
    """

    num_bytes: int = 0
    busy_s: float = 0.0
    probe_s: float = 0.0


@dataclass(slots=True)
class BusyTime:
    """Seconds in which at least one write was under way: each is counted once, however many writes there are in it."""

    seconds: float = 0.0
    num_writing: int = 0
    _counted_until_s: float = -math.inf  # what came before is counted, or was idle

    def began(self, now_s: float) -> None:
        """A write is under way from now on."""
        self.count_until(now_s)
        self._counted_until_s = now_s
        self.num_writing += 1

    def ended(self, now_s: float, *, num_writes: int = 1) -> None:
        """So many of those that are under way are over."""
        self.count_until(now_s)
        self.num_writing -= num_writes

    def was_busy(self, seconds: float, now_s: float) -> None:
        """A write has taken so long, until now, of which nothing was heard before."""
        self.count_until(now_s)
        self.seconds += max(0.0, min(seconds, now_s - self._counted_until_s))
        self._counted_until_s = now_s

    def count_until(self, now_s: float) -> None:
        """Count what is under way now; it goes on."""
        if self.num_writing:
            self.seconds += max(0.0, now_s - self._counted_until_s)
            self._counted_until_s = now_s


@dataclass(slots=True, kw_only=True)
class LinkSeries:
    """The counters of links with the same labels: of the same ranks' sessions, one for each instance of the other tier.

    What is written adds up. Time does not: while two of them write, that is one second in a second.
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
    """What is written over one session's link."""

    latency_s: float
    seconds_per_byte: float
    series: LinkSeries
    num_bytes: int = 0  # of this session alone; the series may be those of others, too
    busy: BusyTime = field(default_factory=BusyTime)
    probe_s: float = 0.0
    peer: str = ""
    is_slow: bool = False
    marks: deque[tuple[float, float, float]] = field(default_factory=deque)  # when, busy and probe seconds until then

    def lately(self, now_s: float) -> tuple[float, float] | None:
        """Shares of the last `LINK_WINDOW_S`, in which it was busy, and of its probe's speed meanwhile; None: idle, or new."""
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
        """A write of so many bytes ended well."""
        self.num_bytes += num_bytes
        self.series.written_bytes.inc(num_bytes)
        probe_s = self.latency_s + num_bytes * self.seconds_per_byte
        self.probe_s += probe_s
        self.series.probe_seconds.inc(probe_s)

    def forget_writes(self, now_s: float) -> None:
        """The session is over; of writes that are under way nothing more is heard."""
        self.series.busy.ended(now_s, num_writes=self.busy.num_writing)
