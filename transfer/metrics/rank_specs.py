"""Metrics of ranks; their leader shows them with the label ``rank``."""

from __future__ import annotations

from typing import Final

from transfer.metrics.loop_specs import LOOP_METRICS
from transfer.metrics.specs import DECODE, PREFILL, RANK_STAGES, RATIO_BUCKETS, STAGE_BUCKETS_S, Label, declare
from transfer.metrics.store_specs import STORE_METRICS

_LINK: Final[tuple[Label, ...]] = (
    ("prefill_rank", "ranks of the prefill node"),
    ("decode_rank", "ranks of the decode node"),
    ("lane", "transport/way, such as ucx/shm, ucx/net, nixl/shm, nixl/net, nixl/ipc, cuda_ipc/direct"),
)
_DIRECTION: Final[Label] = ("direction", ("save", "load", "copy"))
_GROUP: Final[Label] = ("group", "groups of layers of the model: full, window_4096, state and the like")
_LINE: Final[Label] = ("line", "lines of the memory plan, as kvferry plan prints them")

TRANSFER_METRICS: Final = (
    declare(
        "counter",
        "transferred_bytes",
        "Payload bytes written, resent ones included (prefill), or scattered (decode).",
        advice="Its rate over the ranks of a tier is how fast KV moves; compare with the links' probes.",
    ),
    declare(
        "counter",
        "chunks",
        "Parts of chunks gathered (prefill) or scattered (decode); one per chunk and route.",
        advice="Bytes per chunk that fall say that prompts are short, or cut finely (chunk.piece_bytes).",
    ),
    declare(
        "counter",
        "writes",
        "Bulk writes that ended well.",
        roles=PREFILL,
        advice="As many as chunks, resends aside.",
    ),
    declare(
        "counter",
        "writes_avoided",
        "Writes that sending each token, layer, K and V by itself would have taken on top.",
        roles=PREFILL,
        advice="With writes: what the same transfers would have cost in descriptors without staging.",
    ),
    declare(
        "counter",
        "resends",
        "Chunk sends that were repeated because the bytes arrived broken.",
        roles=PREFILL,
        advice="As broken_chunks, as the writer sees it.",
    ),
    declare(
        "counter",
        "broken_chunks",
        "Chunks that arrived with another digest than they were sent with.",
        roles=DECODE,
        advice="Any: memory, a network card or a cable is failing; see DATA_LOSS in docs/operations.md.",
    ),
    declare(
        "counter",
        "dropped_messages",
        "Control messages that broke a rule and were dropped.",
        ("reason", "at most 32 constant words, and other"),
        advice="A few beside restarts and lost peers are ordinary; a steady rate is a peer of another build, or a stranger.",
    ),
    declare(
        "counter",
        "refused_connections",
        "Connections to the control port that showed no key of an attached writer.",
        roles=DECODE,
        advice="Strangers reach the rank's control port: see Ports in docs/operations.md.",
    ),
    declare(
        "counter",
        "watermark_acks",
        "Watermark acks sent (decode) or received (prefill).",
        advice="It never stands still while sessions are open, for heartbeats are acks too.",
    ),
    declare(
        "histogram",
        "stage_seconds",
        "Seconds that a stage of a transfer took: credit_wait, gather, write, ack and scatter of one part of a chunk; total, from"
        " the first gather of a request to its last release, and exposed, what of it came after the last computed chunk.",
        ("stage", tuple(stage for stages in RANK_STAGES.values() for stage in stages)),
        buckets=STAGE_BUCKETS_S,
        advice="The stage that grows under load is the bottleneck: credit_wait is the ring or a slow decode side, write the "
        "link, scatter the decode side's memory. scatter is served by decode ranks, all others by prefill ranks.",
    ),
    declare(
        "histogram",
        "overlap_ratio",
        "Share of a request's transfer that was hidden behind its computation, 0 to 1; of each rank that sent any of it.",
        roles=PREFILL,
        buckets=RATIO_BUCKETS,
        advice="Near 0 with long prompts: the link is slower than prefill, or chunks are too large (chunk.chunk_tokens).",
    ),
    declare(
        "histogram",
        "step_seconds",
        "Seconds of a step of the rank's engine.",
        buckets=STAGE_BUCKETS_S,
        advice="rate of its sum is the share of time that the engine computes: near 1, computing is the bottleneck.",
    ),
)

RING_METRICS: Final = (
    declare(
        "gauge",
        "ring_capacity_bytes",
        "Size of the ring.",
        roles=DECODE,
        advice="ring.capacity_bytes.",
    ),
    declare(
        "gauge",
        "ring_live_bytes",
        "Bytes of unreleased grants, those that wait for room too; may be above the capacity.",
        roles=DECODE,
        advice="Over the capacity: how full the ring is. Above 1 for long, with credit_wait growing: a larger ring.",
    ),
    declare(
        "gauge",
        "ring_peak_bytes",
        "Most of the ring that was granted at once since the rank started; at most the capacity.",
        roles=DECODE,
        advice="Well below the capacity after a day of load: the ring can be smaller.",
    ),
    declare(
        "gauge",
        "ring_quarantined_bytes",
        "Bytes that the writer of an ended transfer may still write.",
        roles=DECODE,
        advice="Alarm if it stays above 0, or grows: see Quarantine grows in docs/operations.md.",
    ),
    declare(
        "gauge",
        "ring_live_grants",
        "Unreleased grants.",
        roles=DECODE,
        advice="0 when nothing is under way.",
    ),
    declare(
        "gauge",
        "ring_watermark_position_bytes",
        "Position in the ring below which everything is released; only grows, and begins anew with the rank.",
        roles=DECODE,
        advice="Its derivative is what the ring turns over.",
    ),
    declare(
        "gauge",
        "ring_watermark_lag_bytes",
        "Positions that the watermark is behind the newest grant; released ranges in between count too.",
        roles=DECODE,
        advice="Near ring_live_bytes in ordinary traffic. Far above it: one old grant is stuck, and what came after it is done.",
    ),
    declare(
        "gauge",
        "ring_watermark_stalled_seconds",
        "Seconds for which the oldest live grant has been the oldest; 0 with no live grant. Grants in quarantine are left out:"
        " others go around them. Looked at once a second.",
        roles=DECODE,
        advice="Alarm above the longest time that one chunk takes to compute: a writer is stuck.",
    ),
)

LINK_METRICS: Final = (
    declare(
        "gauge",
        "link_latency_seconds",
        "Latency of a small write, measured at attach. Of links with the same labels, to several nodes, the highest.",
        *_LINK,
        advice="Microseconds on shared memory and RDMA, tens of them on TCP.",
    ),
    declare(
        "gauge",
        "link_bandwidth_bytes_per_second",
        "Bandwidth of a large write, measured at attach: the link's probe. Of links with the same labels, to several nodes, the "
        "lowest.",
        *_LINK,
        advice="Compare with what the machines should do, and between links: see A link is slow in docs/operations.md.",
    ),
    declare(
        "counter",
        "link_written_bytes",
        "Bytes of writes that ended well on the link; of links with the same labels, to several nodes, their sum.",
        *_LINK,
        roles=PREFILL,
        advice="Over link_busy_seconds: the bandwidth that the link achieves while it is used.",
    ),
    declare(
        "counter",
        "link_busy_seconds",
        "Seconds in which at least one write was under way on the link, or on any of those with the same labels, to several "
        "nodes. Counted while writes are under way.",
        *_LINK,
        roles=PREFILL,
        advice="Its rate is the share of time that the link is in use, and at most 1.",
    ),
    declare(
        "counter",
        "link_probe_seconds",
        "Seconds that the writes of link_written_bytes would have taken by the probe of their link, one after another: a latency "
        "each, and their bytes.",
        *_LINK,
        roles=PREFILL,
        advice="Busy seconds of several times as many: the link is slower than it was when it was attached.",
    ),
    declare(
        "gauge",
        "slowest_link_ratio",
        "Of the links that were in use for more than a fifth of the last two minutes, each by itself: the lowest share of its"
        " probe's speed while busy; -1: there is none.",
        roles=PREFILL,
        advice="Below 0.2 and a third of fastest_link_ratio: link_slow in the rank's log names the peer.",
    ),
    declare(
        "gauge",
        "fastest_link_ratio",
        "Likewise the highest, of the links that were in use for more than a hundredth of the time.",
        roles=PREFILL,
        advice="Low too: not one link is slow, but what all have in common is slow or full.",
    ),
    declare(
        "gauge",
        "links_fallen_back",
        "Open links between processes of one machine that go over the network because a faster way is not possible.",
        roles=DECODE,
        advice="Above 0: transport_fell_back in the rank's log names the obstacle; see A link is slow in docs/operations.md.",
    ),
)

RANK_STATE_METRICS: Final = (
    declare(
        "gauge",
        "staging_slots",
        "Staging slots by state.",
        ("state", ("used", "free")),
        roles=PREFILL,
        advice="None free for long: writes, or their releases, are slower than gathers (staging.num_slots).",
    ),
    declare(
        "gauge",
        "pool_pages",
        "Pages of the KV pool by group of layers and state.",
        _GROUP,
        ("state", ("free", "reserved", "bound")),
        advice="None free, and requests queue: that tier's pool is the limit.",
    ),
    declare(
        "gauge",
        "memory_planned_bytes",
        "Bytes of the device that the memory plan gives to a line.",
        _LINE,
        advice="See docs/memory.md.",
    ),
    declare(
        "gauge",
        "memory_real_bytes",
        "Bytes that a line of the memory plan came to, where it was measured.",
        _LINE,
        advice="More than 5 % off the plan is in the log as well.",
    ),
    declare(
        "counter",
        "rank_refused_calls",
        "Calls to a decode rank that the caller's certificate does not allow.",
        ("method", "methods of the rank's gRPC services"),
        roles=DECODE,
        advice="See TLS in docs/operations.md: a name is missing in tls.peer_names, or somebody tries doors.",
    ),
    declare(
        "gauge",
        "rank_requests",
        "Requests that the rank keeps any state of.",
        advice="0 when the node is idle: what stays is a leak.",
    ),
    declare(
        "gauge",
        "sessions",
        "Open sessions with ranks of the other tier.",
        advice="One for each rank of the other tier with a route to this one, of each joined node.",
    ),
    declare(
        "gauge",
        "ending_sessions",
        "Closed sessions whose writer may still write.",
        roles=DECODE,
        advice="Above 0 for long: see ring_quarantined_bytes.",
    ),
    declare(
        "gauge",
        "pending_transfers",
        "Writes, receives and declines that the data plane has not settled.",
        advice="0 when the node is idle.",
    ),
    declare(
        "gauge",
        "rank_open_files",
        "Open file descriptors of the rank's process.",
        advice="Growing without new sessions is a leak.",
    ),
    declare(
        "gauge",
        "rank_threads",
        "Threads of the rank's process.",
        advice="Growing without end is a leak.",
    ),
    declare(
        "gauge",
        "rank_resident_bytes",
        "Bytes of the rank's process that are in memory, shared ones included.",
        advice="Growing without end is a leak.",
    ),
    declare(
        "gauge",
        "rank_idle_checks",
        "Times that the rank, with no request in flight, has proven its invariants.",
        advice="It grows by about one a second on an idle rank.",
    ),
)

RANK_OFFLOAD_METRICS: Final = (
    declare(
        "counter",
        "offload_copied_bytes",
        "Bytes copied to host memory (save), from it (load), or on the device (copy).",
        _DIRECTION,
        roles=DECODE,
        advice="Its rate is the share of the host link that offload takes.",
    ),
    declare(
        "histogram",
        "offload_copy_seconds",
        "Seconds of such a copy.",
        _DIRECTION,
        roles=DECODE,
        buckets=STAGE_BUCKETS_S,
        advice="Growing under load: the host link is full.",
    ),
)

RANK_METRICS: Final = (
    *TRANSFER_METRICS,
    *RING_METRICS,
    *LINK_METRICS,
    *RANK_STATE_METRICS,
    *RANK_OFFLOAD_METRICS,
    *STORE_METRICS,
    *LOOP_METRICS,
)
