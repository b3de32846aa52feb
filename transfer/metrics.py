"""Every metric, declared once: name, kind, labels, unit and meaning.

Ranks are processes of their own. Each keeps a `RankMetrics` and reports `snapshot()`s, which are plain values, to its leader; the
leader's `NodeMetrics.render()` shows its own series and the ranks' newest ones together, each with the label ``rank``.

Labels have bounded sets of values; no request, session or peer ever is one.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

import transfer
from transfer.errors import ConfigError
from transfer.instance import Link

MetricFamily = Metric
"""What `exposition` renders: a metric with its samples."""

_US: Final = 1e-6
STAGE_BUCKETS_S: Final = (
    *(value * _US for value in (20, 50, 100, 200, 500)),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""From a gather of one small chunk to a request that waited a minute."""

TOKEN_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

RANK_STAGES: Final = {
    "prefill": ("credit_wait", "gather", "write", "ack", "total"),
    "decode": ("scatter",),
}
OUTCOMES: Final = {
    "prefill": ("sent", "failed", "aborted", "refused"),
    "decode": ("done", "failed", "aborted", "refused"),
}
NODE_STATES: Final = ("starting", "ready", "draining", "failed")
PEER_STATES: Final = ("joining", "joined", "draining", "lost")
BREAKER_STATES: Final = ("closed", "open", "half-open")

MAX_REASONS: Final = 32
"""Reasons of dropped messages that have series of their own; more are counted as "other"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A metric.

    Args:
        name: As Prometheus shows it, but for a counter's ``_total``.
        kind: "counter", "gauge" or "histogram".
        help: Unit and meaning.
        labels: Besides ``role``, and ``rank`` where it is a rank's.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _spec(kind: str, name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = ()) -> MetricSpec:
    return MetricSpec(name=f"kvferry_{name}", kind=kind, help=help_text, labels=labels, buckets=buckets)


STORE_METRICS: Final = (
    _spec("counter", "store_operations", "Pages that the store was asked about, by what became of them.", "op", "outcome"),
    _spec("counter", "store_bytes", "Bytes of pages that were put into the store, or got from it.", "op"),
    _spec("histogram", "store_seconds", "Seconds until a call of the store was answered.", "op", buckets=STAGE_BUCKETS_S),
    _spec("gauge", "store_queue_depth", "Pages that wait for the store, or for its answer."),
    _spec("gauge", "store_circuit", "1 for the state of the circuit breaker of reads or writes.", "direction", "state"),
)
"""Of every process with a store: ranks, and the leader, whose series have no label ``rank``."""

RANK_METRICS: Final = (
    _spec("counter", "transferred_bytes", "Payload bytes written, resent ones included (prefill), or scattered (decode)."),
    _spec("counter", "chunks", "Parts of chunks gathered (prefill) or scattered (decode); one per chunk and route."),
    _spec("counter", "writes", "Bulk writes that ended well."),
    _spec("counter", "writes_avoided", "Writes that sending each token, layer, K and V by itself would have taken on top."),
    _spec("counter", "resends", "Chunk sends that were repeated because the bytes arrived broken."),
    _spec("counter", "broken_chunks", "Chunks that arrived with another digest than they were sent with."),
    _spec("counter", "dropped_messages", "Control messages that broke a rule and were dropped.", "reason"),
    _spec("counter", "refused_connections", "Connections to the control port that showed no key of an attached writer."),
    _spec("counter", "watermark_acks", "Watermark acks sent (decode) or received (prefill)."),
    _spec("histogram", "stage_seconds", "Seconds that a stage of a transfer took.", "stage", buckets=STAGE_BUCKETS_S),
    _spec("gauge", "ring_capacity_bytes", "Size of the ring."),
    _spec("gauge", "ring_live_bytes", "Bytes of unreleased grants, those that wait for room too; may be above the capacity."),
    _spec("gauge", "ring_peak_bytes", "Most of the ring that was granted at once since the rank started; at most the capacity."),
    _spec("gauge", "ring_quarantined_bytes", "Bytes that the writer of an ended transfer may still write; alarm if it stays."),
    _spec("gauge", "ring_live_grants", "Unreleased grants."),
    _spec("gauge", "ring_watermark_position_bytes", "Position in the ring below which everything is released; only grows."),
    _spec("gauge", "staging_slots", "Staging slots by state: used or free.", "state"),
    _spec("gauge", "pool_pages", "Pages of the KV pool by group of layers and state: free, reserved or bound.", "group", "state"),
    _spec("gauge", "memory_planned_bytes", "Bytes of the device that the memory plan gives to a line.", "line"),
    _spec("gauge", "memory_real_bytes", "Bytes that a line of the memory plan came to, where it was measured.", "line"),
    _spec("counter", "rank_refused_calls", "Calls to a decode rank that the caller's certificate does not allow.", "method"),
    _spec("gauge", "rank_requests", "Requests that the rank keeps any state of."),
    _spec("gauge", "sessions", "Open sessions with ranks of the other tier."),
    _spec("gauge", "ending_sessions", "Closed sessions whose writer may still write; see kvferry_ring_quarantined_bytes."),
    _spec("gauge", "pending_transfers", "Writes, receives and declines that the data plane has not settled."),
    _spec("gauge", "rank_open_files", "Open file descriptors of the rank's process."),
    _spec("gauge", "rank_threads", "Threads of the rank's process."),
    _spec("gauge", "rank_resident_bytes", "Bytes of the rank's process that are in memory, shared ones included."),
    _spec(
        "counter",
        "offload_copied_bytes",
        "Bytes copied to host memory (save), from it (load), or on the device (copy).",
        "direction",
    ),
    _spec("histogram", "offload_copy_seconds", "Seconds of such a copy.", "direction", buckets=STAGE_BUCKETS_S),
    _spec("gauge", "rank_idle_checks", "Times that the rank, with no request in flight, has proven its invariants."),
    _spec(
        "gauge", "link_latency_seconds", "Latency of a small write, measured at attach.", "prefill_rank", "decode_rank", "lane"
    ),
    _spec(
        "gauge",
        "link_bandwidth_bytes_per_second",
        "Bandwidth of a large write in bytes per second, measured at attach.",
        "prefill_rank",
        "decode_rank",
        "lane",
    ),
    *STORE_METRICS,
)

NODE_METRICS: Final = (
    _spec("counter", "requests", "Requests that ended, by outcome.", "outcome"),
    _spec("counter", "retries", "Tries of requests on another prefill node, after their own was lost before the first token."),
    _spec("counter", "loaded_prompt_tokens", "Tokens of prompts that were taken from the store, and not computed."),
    _spec("histogram", "queue_seconds", "Seconds that a request waited for room, each try by itself.", buckets=STAGE_BUCKETS_S),
    _spec("histogram", "time_to_first_token_seconds", "Seconds from acceptance to the first token.", buckets=TOKEN_BUCKETS_S),
    _spec("histogram", "time_per_output_token_seconds", "Seconds between two tokens of a request.", buckets=TOKEN_BUCKETS_S),
    _spec("gauge", "queued_requests", "Requests that wait for room."),
    _spec("gauge", "running_requests", "Requests computed, transferred or generated."),
    _spec("gauge", "peers", "Nodes of the other tier by state.", "state"),
    _spec("gauge", "breakers", "Prefill nodes by the state of their circuit breakers.", "state"),
    _spec(
        "counter",
        "join_faults",
        "Joins that a bug of this node ended; its log has it, and they are tried again.",
    ),
    _spec("counter", "breaker_openings", "Times that a circuit breaker opened: a prefill node was lost, or failed requests."),
    _spec("gauge", "largest_piece_bytes", "Most bytes of a chunk between two ranks, over all joined nodes of the other tier."),
    _spec("gauge", "node_state", "1 for the node's state, 0 for the others.", "state"),
    _spec("gauge", "rank_restarts", "Times that the rank group was started again."),
    _spec("counter", "refused_calls", "Calls to the node that the caller's certificate does not allow.", "method"),
    _spec("gauge", "certificate_expiry_timestamp_seconds", "When the node's certificate expires, in seconds since 1970."),
    _spec("gauge", "certificate_stale", "1 while the node's certificate files have changed and cannot be used; 0 otherwise."),
    _spec("counter", "offload_hit_tokens", "Tokens of prompts found in a tier, which did not come from prefill.", "tier"),
    _spec("counter", "offload_saved_pages", "Pages saved into host memory, of the prompt or generated.", "source"),
    _spec("counter", "offload_released_pages", "Device pages given back before their request ended."),
    _spec("counter", "offload_restored_pages", "Pages of running requests brought back onto the device."),
    _spec(
        "counter",
        "offload_host_full",
        "Times that host memory had no room: a page stays on the device alone, or a request waits.",
    ),
    _spec("counter", "offload_stalls", "Steps that a request missed because its copies had not come far enough."),
    _spec("counter", "offload_backups", "Pages put into the store on every rank, by outcome: stored or failed.", "outcome"),
    _spec("gauge", "offload_backup_queue", "Pages that wait to be put into the store."),
    _spec("gauge", "host_pages", "Pages of the host pools by group of layers and state: free, cached or held.", "group", "state"),
    _spec("gauge", "build_info", "Always 1; the labels say what runs.", "version", "python"),
    *STORE_METRICS,
)

LINK_METRICS: Final = ("link_latency_seconds", "link_bandwidth_bytes_per_second")

_KINDS: Final = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
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


CREATED = "_created"  # series of the Prometheus client that double a page and that no dashboard reads


class _Series:
    """The declared metrics of one process, in a registry of their own."""

    def __init__(self, specs: Sequence[MetricSpec], *, role: str) -> None:
        if role not in OUTCOMES:
            raise ConfigError(f"role is {role}; it must be one of {', '.join(OUTCOMES)}")
        self._role = role
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}  # by name and values; the client's own look-up takes several times longer
        self._labels = {spec.name.removeprefix("kvferry_"): spec.labels for spec in specs}
        for spec in specs:
            options: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
            self._by_name[spec.name.removeprefix("kvferry_")] = _KINDS[spec.kind](
                spec.name, spec.help, ("role", *spec.labels), registry=self.registry, **options
            )

    def __call__(self, name: str, **labels: str) -> Any:
        key = (name, *[labels[label] for label in self._labels[name]]) if labels else (name,)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._by_name[name].labels(role=self._role, **labels)
        return child

    def remove(self, name: str, **labels: str) -> None:
        """Show one series no more."""
        values = [labels[label] for label in self._labels[name]]
        self._children.pop((name, *values), None)
        self._by_name[name].remove(self._role, *values)


class StoreMetrics:
    """What one process sees of its store; a `transfer.storage.base.StoreObserver`. Shows nothing before it is told anything.

    Args:
        series: Of the process.
    """

    def __init__(self, series: _Series) -> None:
        self._series = series

    def operation_finished(self, op: str, outcomes: Sequence[str], *, num_bytes: int, seconds: float) -> None:
        """A call of the store is answered, each of its pages with an outcome."""
        for outcome in outcomes:
            self._series("store_operations", op=op, outcome=str(outcome)).inc()
        self._series("store_bytes", op=op).inc(num_bytes)
        self._series("store_seconds", op=op).observe(seconds)

    def queue_changed(self, num_pages: int) -> None:
        """So many pages wait for the store, or for its answer."""
        self._series("store_queue_depth").set(num_pages)

    def circuits_changed(self, *, read: str, write: str) -> None:
        """States of the circuit breakers of reads and of writes."""
        for direction, state in (("read", read), ("write", write)):
            for name in BREAKER_STATES:
                self._series("store_circuit", direction=direction, state=name).set(name == state)


class RankMetrics:
    """What one rank counts. Owned by the rank's loop.

    Args:
        role: "prefill" or "decode".
        rank: Index in the instance.
    """

    def __init__(self, *, role: str, rank: int) -> None:
        self._series = _Series(RANK_METRICS, role=role)
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


class TierMetrics:
    """What a decode leader counts of pages outside of the device. Pages count once, and not for every rank.

    Args:
        series: The leader's.
        is_shown: Whether zeros are shown from the start.
    """

    def __init__(self, series: _Series, *, is_shown: bool) -> None:
        self._series = series
        if is_shown:
            self._show_zeros()

    def _show_zeros(self) -> None:
        series = self._series
        for name, label, values in (
            ("offload_hit_tokens", "tier", ("device", "host", "storage")),
            ("offload_saved_pages", "source", ("prompt", "generated")),
            ("offload_backups", "outcome", ("stored", "failed")),
        ):
            for value in values:
                series(name, **{label: value})
        for name in ("offload_released_pages", "offload_restored_pages", "offload_host_full", "offload_stalls"):
            series(name)

    def hit(self, tier: str, num_tokens: int) -> None:
        """Tokens of a prompt were found in "device", "host" or "storage"."""
        self._series("offload_hit_tokens", tier=tier).inc(num_tokens)

    def saved(self, source: str, num_pages: int) -> None:
        """Pages of a "prompt", or "generated" ones, are in host memory on every rank."""
        self._series("offload_saved_pages", source=source).inc(num_pages)

    def released_early(self, num_pages: int) -> None:
        """Device pages were given back before their request ended."""
        self._series("offload_released_pages").inc(num_pages)

    def brought_back(self, num_pages: int) -> None:
        """Pages are on the device again."""
        self._series("offload_restored_pages").inc(num_pages)

    def host_full(self) -> None:
        """Host memory had no room."""
        self._series("offload_host_full").inc()

    def stalled(self) -> None:
        """A request missed a step."""
        self._series("offload_stalls").inc()

    def backed_up(self, num_pages: int, num_failed: int) -> None:
        """So many pages are in the store on every rank, and so many could not be put there."""
        self._series("offload_backups", outcome="stored").inc(num_pages)
        self._series("offload_backups", outcome="failed").inc(num_failed)

    def host_pages(self, group: str, *, free: int, cached: int, held: int) -> None:
        """Host pages of a group of layers now."""
        for state, pages in (("free", free), ("cached", cached), ("held", held)):
            self._series("host_pages", group=group, state=state).set(pages)

    def backup_queue(self, num_pages: int) -> None:
        """So many pages wait to be put into the store now."""
        self._series("offload_backup_queue").set(num_pages)


class NodeMetrics:
    """What a node's leader counts, and the page that it serves. Owned by the leader's loop.

    Args:
        role: "prefill" or "decode".
    """

    def __init__(self, *, role: str) -> None:
        self._series = _Series(NODE_METRICS, role=role)
        self.store = StoreMetrics(self._series)
        self._outcomes = OUTCOMES[role]
        for outcome in self._outcomes:
            self._series("requests", outcome=outcome)
        self._series("queue_seconds")
        self.tiers = TierMetrics(self._series, is_shown=role == "decode")
        if role == "decode":
            self._series("time_to_first_token_seconds")
            self._series("time_per_output_token_seconds")
            self._series("retries")
            self._series("breaker_openings")
            self._series("join_faults")
            self.breakers({})
        self._series("build_info", version=transfer.__version__, python=platform.python_version()).set(1)
        self.node_state(state="starting", queued=0, running=0, peers={}, restarts=0)

    def request_ended(self, outcome: str) -> None:
        """A request is over.

        Raises:
            ConfigError: `outcome` is none of this role's.
        """
        if outcome not in self._outcomes:
            raise ConfigError(f"outcome is {outcome}; it must be one of {', '.join(self._outcomes)}")
        self._series("requests", outcome=outcome).inc()

    def request_retried(self) -> None:
        """A request is tried on another prefill node."""
        self._series("retries").inc()

    def tokens_loaded(self, num_tokens: int) -> None:
        """So many tokens of a prompt were taken from the store; 0 when it was looked for there and not found."""
        self._series("loaded_prompt_tokens").inc(num_tokens)

    def breaker_opened(self) -> None:
        """A prefill node is left out for a while."""
        self._series("breaker_openings").inc()

    def join_broke(self) -> None:
        """An error that nobody expected has ended a join."""
        self._series("join_faults").inc()

    def breakers(self, states: Mapping[str, int]) -> None:
        """How many prefill nodes have a circuit breaker in which state now."""
        for name in BREAKER_STATES:
            self._series("breakers", state=name).set(states.get(name, 0))

    def call_refused(self, method: str) -> None:
        """Somebody called whose certificate does not allow it; `method` is one that the server has."""
        self._series("refused_calls", method=method).inc()

    def certificate(self, *, not_after_s: float, is_stale: bool) -> None:
        """This node's certificate: when it expires, in seconds since 1970, and whether newer files cannot be used."""
        self._series("certificate_expiry_timestamp_seconds").set(not_after_s)
        self._series("certificate_stale").set(is_stale)

    def queue_seconds(self, seconds: float) -> None:
        """A request got room after it had waited this long."""
        self._series("queue_seconds").observe(seconds)

    def time_to_first_token(self, seconds: float) -> None:
        """A request's first token came this long after its acceptance."""
        self._series("time_to_first_token_seconds").observe(seconds)

    def time_per_output_token(self, seconds: float) -> None:
        """A token came this long after the one before."""
        self._series("time_per_output_token_seconds").observe(seconds)

    def largest_piece(self, num_bytes: int) -> None:
        """As requests are cut now, no part of a chunk that one rank sends to another is larger; 0: nothing is joined."""
        self._series("largest_piece_bytes").set(num_bytes)

    def node_state(self, *, state: str, queued: int, running: int, peers: Mapping[str, int], restarts: int) -> None:
        """The node's state now; peers by their state."""
        for name in NODE_STATES:
            self._series("node_state", state=name).set(name == state)
        for name in PEER_STATES:
            self._series("peers", state=name).set(peers.get(name, 0))
        self._series("queued_requests").set(queued)
        self._series("running_requests").set(running)
        self._series("rank_restarts").set(restarts)

    def collect(self, snapshots: Iterable[Mapping[str, Any] | None]) -> list[Metric]:
        """This node's series and those of the ranks, for `exposition`.

        Args:
            snapshots: The newest `RankMetrics.snapshot()` of each rank; None where a rank has not reported.
        """
        return [*self._series.registry.collect(), *merge(snapshots)]

    def render(self, snapshots: Iterable[Mapping[str, Any] | None]) -> bytes:
        """The exposition text of `collect`."""
        return exposition(self.collect(snapshots))


def merge(snapshots: Iterable[Mapping[str, Any] | None]) -> list[Metric]:
    """The ranks' metrics as declared, each sample with its ``rank``; what is not declared, or not finite, is left out."""
    known = [snapshot for snapshot in snapshots if snapshot is not None]
    merged: list[Metric] = []
    for spec in RANK_METRICS:
        metric = Metric(spec.name, spec.help, spec.kind)
        for snapshot in sorted(known, key=lambda one: int(one["rank"])):
            for name, labels, value in snapshot["families"].get(spec.name, ()):
                if not math.isnan(value):
                    metric.add_sample(name, {**labels, "rank": str(snapshot["rank"])}, value)
        if metric.samples:
            merged.append(metric)
    return merged


def exposition(families: Iterable[Metric]) -> bytes:
    """Metrics as text, those of one name together, without the client's own series of when each began."""
    shown: dict[str, Metric] = {}
    for family in families:
        samples = [sample for sample in family.samples if not sample.name.endswith(CREATED)]
        before = shown.setdefault(family.name, family)
        before.samples = samples if before is family else [*before.samples, *samples]
    page: bytes = generate_latest(_Snapshots(list(shown.values())))
    return page


class _Snapshots(CollectorRegistry):
    """Metrics that lie ready, as something that can be rendered."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
