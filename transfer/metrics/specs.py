"""Every metric, declared once: name, kind, labels, unit and meaning. Data alone.

Labels have bounded sets of values; no request, session or peer ever is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    _spec(
        "counter",
        "offload_prompt_tokens",
        "Tokens of prompts that were looked for in the tiers, hits among them; once for each try.",
    ),
    _spec(
        "counter",
        "offload_hit_tokens",
        "Tokens of prompts found in a tier, which did not come from prefill; once for each try.",
        "tier",
    ),
    _spec("counter", "offload_saved_pages", "Pages saved into host memory, of the prompt or generated.", "source"),
    _spec("counter", "offload_released_pages", "Device pages given back before their request ended."),
    _spec("counter", "offload_restored_pages", "Pages of running requests brought back onto the device."),
    _spec(
        "counter",
        "offload_host_full",
        "Tries of requests that host memory had no room for: they wait, or pages are not kept. Each once, and its fetch once.",
    ),
    _spec("counter", "offload_stalls", "Steps that had to wait for their request's copies, each once."),
    _spec("counter", "offload_backups", "Pages put into the store on every rank, by outcome: stored or failed.", "outcome"),
    _spec("gauge", "offload_backup_queue", "Pages that wait to be put into the store."),
    _spec("gauge", "host_pages", "Pages of the host pools by group of layers and state: free, cached or held.", "group", "state"),
    _spec("gauge", "build_info", "Always 1; the labels say what runs.", "version", "python"),
    *STORE_METRICS,
)
