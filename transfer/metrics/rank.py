"""What a rank counts, and its snapshots: plain values that its leader shows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import structlog

from transfer.errors import ConfigError
from transfer.instance import Link
from transfer.metrics.links import LinkSeries, LinkUse, SessionLink
from transfer.metrics.series import Series
from transfer.metrics.specs import RANK_STAGES
from transfer.metrics.store import StoreMetrics
from transfer.metrics.table import RANK_METRICS, TRANSFER_METRICS

log = structlog.get_logger(__name__)

MAX_REASONS: Final = 32
"""Reasons of dropped messages with a series of their own. Further reasons count as "other"."""

LINK_METRICS: Final = ("link_latency_seconds", "link_bandwidth_bytes_per_second")
LINK_USES: Final = ("link_written_bytes", "link_busy_seconds", "link_probe_seconds")

SLOW_SHARE: Final = 0.2
"""A link is slow if it is in use for more than this share of the time, at less than this share of its probe's speed ..."""
SLOW_OF_BEST: Final = 1 / 3
"""... and less than this share of the best link's. Links that fill one card together are all far below their probes."""
USED_SHARE: Final = 0.01
"""A link that is in use for less of the time does not count as the best."""

_REASON: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")


class TransferStats(Protocol):
    """Statistics of a finished request's transfer on this rank."""

    @property
    def writes(self) -> int: ...
    @property
    def writes_without_staging(self) -> int: ...
    @property
    def resends(self) -> int: ...
    @property
    def transfer_s(self) -> float: ...
    @property
    def exposed_s(self) -> float: ...


class Ring(Protocol):
    """Positions of a ring, see `transfer.ring.StagingAllocator`."""

    @property
    def head(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def oldest_open(self) -> int | None: ...


class RankMetrics(Series):
    """The series of one rank, and the values from which they are computed. Owned by the rank's loop."""

    def __init__(self, *, role: str, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        if role not in RANK_STAGES:
            raise ConfigError(f"role is {role}; it must be one of {', '.join(RANK_STAGES)}")
        super().__init__(RANK_METRICS, labels={"role": role, "rank": str(rank)})
        self.store = StoreMetrics(self)
        self._role = role
        self._clock = clock
        self._ring: Ring | None = None
        self._oldest_open: int | None = None  # grant at the last snapshot
        self._open_since_s = 0.0  # time of the first snapshot with that grant
        self._uses: dict[int, SessionLink] = {}  # by session
        self._link_series: dict[frozenset[tuple[str, str]], LinkSeries] = {}  # by labels
        self._fallen_back: set[int] = set()  # sessions
        self._reasons: set[str] = set()
        self._links: dict[int, Link] = {}  # by session
        self.show_zeros(TRANSFER_METRICS, role, stage_seconds=RANK_STAGES[role])
        if role == "decode":
            self.gauge("links_fallen_back")

    def gather_finished(self, seconds: float) -> None:
        """Count a part of a chunk that was gathered."""
        self.counter("chunks").inc()
        self.histogram("stage_seconds", stage="gather").observe(seconds)

    def write_finished(self, seconds: float, num_bytes: int) -> None:
        """Count a bulk write that succeeded."""
        self.counter("writes").inc()
        self.counter("transferred_bytes").inc(num_bytes)
        self.histogram("stage_seconds", stage="write").observe(seconds)

    def link_write_began(self, session: int) -> None:
        """Record the start of a write on the session's link. `link_write_ended` follows."""
        use = self._uses.get(session)
        if use is not None:
            now_s = self._clock()
            use.busy.began(now_s)
            use.series.busy.began(now_s)

    def link_write_ended(self, session: int, num_bytes: int) -> None:
        """Record the end of a write. `num_bytes` is 0 if it failed."""
        use = self._uses.get(session)
        if use is None or not use.busy.num_writing:  # it began before the link was measured
            return
        now_s = self._clock()
        use.busy.ended(now_s)
        use.series.busy.ended(now_s)
        if num_bytes:
            use.count(num_bytes)

    def link_written(self, session: int, begun_s: float, ended_s: float, num_bytes: int) -> None:
        """Record a write that succeeded, by its begin and end on the clock. Several can be recorded at once, after their ends."""
        use = self._uses.get(session)
        if use is not None:
            use.busy.was_busy(begun_s, ended_s)
            use.series.busy.was_busy(begun_s, ended_s)
            use.count(num_bytes)

    def link_use(self, session: int) -> LinkUse:
        """Return the use of the session's link; empty if the link was not measured."""
        use = self._uses.get(session)
        if use is None:
            return LinkUse()
        use.busy.count_until(self._clock())
        return LinkUse(num_bytes=use.num_bytes, busy_s=use.busy.seconds, probe_s=use.probe_s)

    def request_sent(self, stats: TransferStats) -> None:
        """Count a transfer that is complete on this rank."""
        self.counter("writes_avoided").inc(max(0, stats.writes_without_staging - stats.writes))
        self.counter("resends").inc(stats.resends)
        if not stats.transfer_s:
            return  # this rank had no part of it to send
        self.histogram("stage_seconds", stage="total").observe(stats.transfer_s)
        self.histogram("stage_seconds", stage="exposed").observe(stats.exposed_s)
        self.histogram("overlap_ratio").observe(1 - stats.exposed_s / stats.transfer_s)

    def scatter_finished(self, seconds: float, num_bytes: int) -> None:
        """Count an intact part of a chunk that was scattered."""
        self.counter("chunks").inc()
        self.counter("transferred_bytes").inc(num_bytes)
        self.histogram("stage_seconds", stage="scatter").observe(seconds)

    def pages_copied(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Count pages that were copied between device and host memory. `direction` is "save", "load" or "copy"."""
        self.counter("offload_copied_bytes", direction=direction).inc(num_bytes)
        self.histogram("offload_copy_seconds", direction=direction).observe(seconds)

    def message_dropped(self, reason: str) -> None:
        """Count a control message that broke a rule. `reason` is one of a few constant words."""
        if _REASON.fullmatch(reason) is None or (reason not in self._reasons and len(self._reasons) >= MAX_REASONS):
            reason = "other"
        self._reasons.add(reason)
        self.counter("dropped_messages", reason=reason).inc()

    def strangers_dropped(self, total: int) -> None:
        """Set the number of messages that the control channel has dropped unread since the rank started."""
        self._reasons.add("stranger")
        self.counter("dropped_messages", reason="stranger").reach(total)

    def link_measured(self, session: int, link: Link, peer: str = "") -> None:
        """Record the measurement of a session's link, the first one or another.

        Args:
            session: Any number that names it. It is no label.
            link: Its ranks and lane become labels, so they must be known to this side, not claimed by a peer.
            peer: Address of its other end, for the log.
        """
        self._forget_link(session)
        self._links[session] = link
        labels = _link_labels(link)
        self._show_slowest(labels)
        if self._role == "prefill":
            key = frozenset(labels.items())
            if key not in self._link_series:
                written, busy, probe = (self.counter(name, **labels) for name in LINK_USES)
                self._link_series[key] = LinkSeries(written_bytes=written, busy_seconds=busy, probe_seconds=probe)
            self._uses[session] = SessionLink(
                latency_s=link.latency_s,
                seconds_per_byte=1 / link.bandwidth_bytes_per_s if link.bandwidth_bytes_per_s else 0.0,
                series=self._link_series[key],
                peer=peer,
            )

    def link_fell_back(self, session: int) -> None:
        """Record that a session uses the network, although both ends are on one machine."""
        self._fallen_back.add(session)
        self.gauge("links_fallen_back").set(len(self._fallen_back))

    def memory(self, planned: Mapping[str, int], real: Mapping[str, int]) -> None:
        """Show the planned bytes of each line of the memory plan, and the real bytes of the measured lines."""
        for line, num_bytes in planned.items():
            self.gauge("memory_planned_bytes", line=line).set(num_bytes)
        for line, num_bytes in real.items():
            self.gauge("memory_real_bytes", line=line).set(num_bytes)

    def link_closed(self, session: int) -> None:
        """Stop showing the link of a session, if it was measured."""
        if session in self._fallen_back:
            self._fallen_back.remove(session)
            self.gauge("links_fallen_back").set(len(self._fallen_back))
        self._forget_link(session)

    def _forget_link(self, session: int) -> None:
        use = self._uses.pop(session, None)
        if use is not None:
            use.forget_writes(self._clock())
        link = self._links.pop(session, None)
        if link is None:
            return
        # Another instance of the other tier may have a link with the same labels, which keeps the series.
        labels = _link_labels(link)
        if self._show_slowest(labels):
            return
        for name in LINK_METRICS:
            self.remove(name, **labels)
        if self._link_series.pop(frozenset(labels.items()), None) is not None:
            for name in LINK_USES:
                self.remove(name, **labels)

    def _show_slowest(self, labels: Mapping[str, str]) -> bool:
        """Show the worst latency and bandwidth of the links with these labels. Return False if there are none."""
        links = [link for link in self._links.values() if _link_labels(link) == labels]
        if links:
            self.gauge("link_latency_seconds", **labels).set(max(link.latency_s for link in links))
            self.gauge("link_bandwidth_bytes_per_second", **labels).set(min(link.bandwidth_bytes_per_s for link in links))
        return bool(links)

    def snapshot(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return all series as plain values for any codec.

        Args:
            status: Fields of the wire contract's RankStatus by name, which become gauges.
        """
        self._take_status(status)
        now_s = self._clock()
        for series in self._link_series.values():  # includes writes in flight, because a link may be busy for ever
            series.show(now_s)
        if self._role == "prefill":
            self._look_at_links(now_s)
        if self._ring is not None:
            self._look_at_ring(self._ring)
        return {
            "labels": self.labels,
            "families": {family.spec.name: (family.keys, family.numbers) for family in self.families()},
        }

    def _look_at_links(self, now_s: float) -> None:
        """Judge each link by itself, because the series of many links hide a slow one. Log a link once while it is slow."""
        lately = {session: found for session, use in self._uses.items() if (found := use.lately(now_s)) is not None}
        best = max((share for used, share in lately.values() if used > USED_SHARE), default=None)
        worst = min((share for used, share in lately.values() if used > SLOW_SHARE), default=None)
        for name, share in (("fastest_link_ratio", best), ("slowest_link_ratio", worst)):
            self.gauge(name).set(-1.0 if share is None else share)
        for session, use in self._uses.items():
            used, share = lately.get(session, (0.0, 1.0))
            ease = 2.0 if use.is_slow else 1.0  # hysteresis, so that a link near a bound is logged once
            bound = min(SLOW_SHARE, SLOW_OF_BEST * (best or 0.0))
            is_slow = used > SLOW_SHARE / ease and share < bound * ease
            if is_slow and not use.is_slow:
                link = self._links[session]
                log.warning("link_slow", peer=use.peer, decode_rank=link.decode_rank, lane=link.lane, of_probe=round(share, 3))
            use.is_slow = is_slow

    def watch_ring(self, ring: Ring) -> None:
        """Show the positions of a ring with each snapshot."""
        self._ring = ring

    def _look_at_ring(self, ring: Ring) -> None:
        """Show how long the oldest grant is open. A grant in quarantine is no stall, because others go around it."""
        now_s, oldest = self._clock(), ring.oldest_open
        if oldest != self._oldest_open:
            self._oldest_open, self._open_since_s = oldest, now_s
        self.gauge("ring_watermark_lag_bytes").set(ring.head - ring.position)
        self.gauge("ring_watermark_stalled_seconds").set(0.0 if oldest is None else now_s - self._open_since_s)

    def _take_status(self, status: Mapping[str, Any]) -> None:
        for key, name in _GAUGES_OF_STATUS.items():
            if key in status:
                self.gauge(name).set(status[key])
        for pool in status.get("pools", ()):
            states = {"reserved": pool["reserved"], "bound": pool["bound"]}
            for state, pages in {"free": pool["pages"] - sum(states.values()), **states}.items():
                self.gauge("pool_pages", group=pool["group"], state=state).set(pages)
        if "staging_slots" in status:
            used = status.get("staging_slots_used", 0)
            for state, slots in (("used", used), ("free", status["staging_slots"] - used)):
                self.gauge("staging_slots", state=state).set(slots)
        for name in ("watermark_acks", "refused_connections"):
            if name in status:
                self.counter(name).reach(status[name])


def _link_labels(link: Link) -> dict[str, str]:
    return {"prefill_rank": str(link.prefill_rank), "decode_rank": str(link.decode_rank), "lane": link.lane}


_GAUGES_OF_STATUS: Final = {
    "ring_capacity": "ring_capacity_bytes",
    "ring_live_bytes": "ring_live_bytes",
    "ring_peak_bytes": "ring_peak_bytes",
    "ring_quarantined_bytes": "ring_quarantined_bytes",
    "ring_live_grants": "ring_live_grants",
    "watermark_position": "ring_watermark_position_bytes",
    "requests": "rank_requests",
    "sessions": "sessions",
    "ending_sessions": "ending_sessions",
    "pending_transfers": "pending_transfers",
    "open_files": "rank_open_files",
    "threads": "rank_threads",
    "resident_bytes": "rank_resident_bytes",
    "idle_checks": "rank_idle_checks",
}
