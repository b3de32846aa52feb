"""What a rank counts, and its snapshots: plain values that its leader shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

from transfer.instance import Link
from transfer.metrics.series import CREATED, Series
from transfer.metrics.specs import RANK_METRICS, RANK_STAGES
from transfer.metrics.store import StoreMetrics

MAX_REASONS: Final = 32
"""Reasons of dropped messages that have series of their own; more are counted as "other"."""

LINK_METRICS: Final = ("link_latency_seconds", "link_bandwidth_bytes_per_second")

_REASON: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")


class TransferStats(Protocol):
    """What a finished request tells of its transfer on this rank."""

    @property
    def writes(self) -> int: ...
    @property
    def writes_without_staging(self) -> int: ...
    @property
    def resends(self) -> int: ...
    @property
    def transfer_s(self) -> float: ...


class RankMetrics:
    """What one rank counts. Owned by the rank's loop.

    Args:
        role: "prefill" or "decode".
        rank: Index in the instance.
    """

    def __init__(self, *, role: str, rank: int) -> None:
        self._series = Series(RANK_METRICS, role=role)
        self.store = StoreMetrics(self._series)
        self._rank = rank
        self._reasons: set[str] = set()
        self._links: dict[int, Link] = {}  # by session, the one that was measured last at the end
        self._num_acks = 0
        self._num_strange = 0
        self._num_refused = 0
        for stage in RANK_STAGES[role]:
            self._series("stage_seconds", stage=stage)
        counters = ("transferred_bytes", "chunks", "watermark_acks", "broken_chunks")
        of_role = {"prefill": ("writes", "writes_avoided", "resends"), "decode": ("refused_connections",)}
        for name in (*counters, *of_role[role]):
            self._series(name)

    def credit_wait_seconds(self, seconds: float) -> None:
        """A chunk was ready to be gathered, and waited this long for its grant."""
        self._series("stage_seconds", stage="credit_wait").observe(seconds)

    def gather_seconds(self, seconds: float) -> None:
        """Part of a chunk was gathered."""
        self._series("chunks").inc()
        self._series("stage_seconds", stage="gather").observe(seconds)

    def write_finished(self, seconds: float, num_bytes: int) -> None:
        """A bulk write ended well."""
        self._series("writes").inc()
        self._series("transferred_bytes").inc(num_bytes)
        self._series("stage_seconds", stage="write").observe(seconds)

    def ack_seconds(self, seconds: float) -> None:
        """A grant came back released, this long after its write had ended."""
        self._series("stage_seconds", stage="ack").observe(seconds)

    def request_sent(self, stats: TransferStats) -> None:
        """A request's transfer is complete on this rank."""
        self._series("writes_avoided").inc(max(0, stats.writes_without_staging - stats.writes))
        self._series("resends").inc(stats.resends)
        self._series("stage_seconds", stage="total").observe(stats.transfer_s)

    def scatter_finished(self, seconds: float, num_bytes: int) -> None:
        """Part of a chunk was found intact, and was scattered."""
        self._series("chunks").inc()
        self._series("transferred_bytes").inc(num_bytes)
        self._series("stage_seconds", stage="scatter").observe(seconds)

    def pages_copied(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Pages were copied between device and host memory; `direction` is "save", "load" or "copy"."""
        self._series("offload_copied_bytes", direction=direction).inc(num_bytes)
        self._series("offload_copy_seconds", direction=direction).observe(seconds)

    def chunk_broken(self) -> None:
        """Bytes arrived that are not those that were sent."""
        self._series("broken_chunks").inc()

    def call_refused(self, method: str) -> None:
        """Somebody called whose certificate does not allow it; `method` is one that the server has."""
        self._series("rank_refused_calls", method=method).inc()

    def message_dropped(self, reason: str) -> None:
        """A control message broke a rule; `reason` is one of a few constant words."""
        if _REASON.fullmatch(reason) is None or (reason not in self._reasons and len(self._reasons) >= MAX_REASONS):
            reason = "other"
        self._reasons.add(reason)
        self._series("dropped_messages", reason=reason).inc()

    def strangers_dropped(self, total: int) -> None:
        """The control channel has dropped that many messages since the rank started, before anybody had to look at them."""
        self._reasons.add("stranger")
        self._series("dropped_messages", reason="stranger").inc(max(0, total - self._num_strange))
        self._num_strange = max(total, self._num_strange)

    def link_measured(self, session: int, link: Link) -> None:
        """A session's link was measured, for the first time or again.

        Args:
            session: Any number that names it; it is no label.
            link: Ranks and lane become labels, so they must be what this side knows, not what a peer says.
        """
        self.link_closed(session)
        self._links[session] = link
        self._show_link(link)

    def memory(self, planned: Mapping[str, int], real: Mapping[str, int]) -> None:
        """What the memory plan gives to each of its lines, and what the measured ones came to; both in bytes."""
        for line, num_bytes in planned.items():
            self._series("memory_planned_bytes", line=line).set(num_bytes)
        for line, num_bytes in real.items():
            self._series("memory_real_bytes", line=line).set(num_bytes)

    def link_closed(self, session: int) -> None:
        """The session is over, and its link is shown no more; a session without a measured link is none."""
        link = self._links.pop(session, None)
        if link is None:
            return
        # Two instances of the other tier have ranks of the same number: the series is then still the other one's.
        others = [other for other in self._links.values() if _link_labels(other) == _link_labels(link)]
        if others:
            self._show_link(others[-1])
            return
        for name in LINK_METRICS:
            self._series.remove(name, **_link_labels(link))

    def _show_link(self, link: Link) -> None:
        for name, value in zip(LINK_METRICS, (link.latency_s, link.bandwidth_bytes_per_s), strict=True):
            self._series(name, **_link_labels(link)).set(value)

    def snapshot(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Everything now, as plain values that any codec carries.

        Args:
            status: Fields of the wire contract's RankStatus by name; those that are there become gauges.
        """
        self._take_status(status)
        families: dict[str, list[list[Any]]] = {}
        for family in self._series.registry.collect():
            samples = [
                [sample.name, dict(sample.labels), sample.value] for sample in family.samples if not sample.name.endswith(CREATED)
            ]
            if samples:
                families[family.name] = samples
        return {"rank": self._rank, "families": families}

    def _take_status(self, status: Mapping[str, Any]) -> None:
        for field, name in _GAUGES_OF_STATUS.items():
            if field in status:
                self._series(name).set(status[field])
        for pool in status.get("pools", ()):
            states = {"reserved": pool["reserved"], "bound": pool["bound"]}
            for state, pages in {"free": pool["pages"] - sum(states.values()), **states}.items():
                self._series("pool_pages", group=pool["group"], state=state).set(pages)
        if "staging_slots" in status:
            used = status.get("staging_slots_used", 0)
            for state, slots in (("used", used), ("free", status["staging_slots"] - used)):
                self._series("staging_slots", state=state).set(slots)
        num_acks = status.get("watermark_acks", self._num_acks)
        self._series("watermark_acks").inc(max(0, num_acks - self._num_acks))
        self._num_acks = max(num_acks, self._num_acks)
        if "refused_connections" in status:
            self._series("refused_connections").inc(max(0, status["refused_connections"] - self._num_refused))
            self._num_refused = max(status["refused_connections"], self._num_refused)


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
