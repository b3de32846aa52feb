"""Every metric of ranks and leaders, declared once. This table is the source of docs/metrics.md.

Leaders serve one series for a node. Ranks report theirs to their leader, which serves them with the label ``rank``.
"""

from __future__ import annotations

from typing import Final

from transfer.metrics.specs import (
    ABORT_REASONS,
    BREAKER_STATES,
    DECODE,
    NODE_STATES,
    OUTCOMES,
    PEER_STATES,
    PREFILL,
    RANK_STAGES,
    RATIO_BUCKETS,
    REFUSED_ENTRIES,
    STAGE_BUCKETS_S,
    STORE_OPS,
    STORE_OUTCOMES,
    TOKEN_BUCKETS_S,
    TURN_BUCKETS_S,
    Label,
    counter,
    gauge,
    histogram,
    served_by,
)

_OP: Final[Label] = ("op", STORE_OPS)

STORE_METRICS: Final = (
    counter(
        "store_operations",
        "Pages in calls of the store, by outcome.",
        _OP,
        ("outcome", STORE_OUTCOMES),
        advice="missing is normal. Other outcomes than ok: a fault of the store, its network or its settings (docs/offload.md).",
    ),
    counter(
        "store_bytes",
        "Bytes of pages written to the store or read from it.",
        _OP,
        advice="Its rate is the store's share of the network or disk.",
    ),
    histogram(
        "store_seconds",
        "Seconds of a call of the store.",
        _OP,
        buckets=STAGE_BUCKETS_S,
        advice="Compare get with the time that computing the same pages takes.",
    ),
    gauge(
        "store_queue_depth",
        "Pages that wait for the store or for its answer.",
        advice="Growing: the store is slower than its load.",
    ),
    gauge(
        "store_circuit",
        "1 for the state of the circuit breaker of reads or writes, 0 for the others.",
        ("direction", ("read", "write")),
        ("state", BREAKER_STATES),
        advice="Open: the store is not used for a while; requests continue without it.",
    ),
)

LOOP_METRICS: Final = (
    histogram(
        "loop_turn_seconds",
        "Seconds of a turn of the event loop since the process was first ready. Heartbeats wait during a turn. An engine "
        "that hosts both sides has one loop, which both roles report.",
        buckets=TURN_BUCKETS_S,
        advice="Above 0.25: loop_turn_long in the log names the longest event. See KvferryEventLoopStalls in docs/runbooks.md.",
    ),
)

REQUEST_METRICS: Final = (
    counter(
        "requests",
        "Requests that ended, by outcome. sent: success on a prefill node; done: success on a decode node. refused: a full "
        "queue, a node that drains or has no ranks or peers, no room in time, or an impossible request.",
        ("outcome", tuple(dict.fromkeys(outcome for outcomes in OUTCOMES.values() for outcome in outcomes))),
        advice="Error rate of the tier: failed / (all - aborted). Many refused: too few nodes, or none.",
    ),
    counter(
        "aborts",
        "Queued requests that ended early, by reason. caller: disconnected or cancelled; operator: aborted; no_room: no room "
        "in time; lost: a rank, peer or link was lost; engine: the engine failed; data_loss: a wrong digest twice; misfit: "
        "the two sides do not match.",
        ("reason", ABORT_REASONS),
        advice="caller is normal, lost follows restarts. For engine, data_loss and misfit, read the log.",
    ),
    counter(
        "retries",
        "Attempts on another prefill node, after the previous one was lost before the first token.",
        roles=DECODE,
        advice="Rising with breaker_openings: prefill nodes fail or restart.",
    ),
    counter(
        "prompt_tokens",
        "Tokens of accepted prompts; on a prefill node, counted for each attempt.",
        advice="Its rate is the demand on the tier.",
    ),
    counter(
        "generated_tokens",
        "Tokens that were generated and returned to callers.",
        roles=DECODE,
        advice="Its rate is the node's throughput.",
    ),
    counter(
        "spec_decode_draft_tokens",
        "Draft tokens that steps computed (speculative.method).",
        roles=DECODE,
        advice="Each adds one row to a step.",
    ),
    counter(
        "spec_decode_accepted_tokens",
        "Draft tokens that were accepted, because the model itself chose them.",
        roles=DECODE,
        advice="Acceptance rate: divide by spec_decode_draft_tokens. If it is low, lower speculative.num_speculative_tokens.",
    ),
    counter(
        "loaded_prompt_tokens",
        "Prompt tokens whose KV was loaded from the store.",
        roles=PREFILL,
        advice="Divide by prompt_tokens: the share that the engine does not compute.",
    ),
    histogram(
        "queue_seconds",
        "Seconds of an attempt's wait for room, also without success.",
        buckets=STAGE_BUCKETS_S,
        advice="Growing on both tiers: decode has no room. On prefill nodes only: add prefill nodes.",
    ),
    histogram(
        "time_to_first_token_seconds",
        "Seconds from acceptance to the first token.",
        roles=DECODE,
        buckets=TOKEN_BUCKETS_S,
        advice="The client's wait: queue, prefill and the exposed part of the transfer.",
    ),
    histogram(
        "time_per_output_token_seconds",
        "Seconds between two tokens of a request.",
        roles=DECODE,
        buckets=TOKEN_BUCKETS_S,
        advice="Growing with running_requests: the decode engine is saturated.",
    ),
    gauge(
        "queued_requests",
        "Requests that wait for room, or on a decode node for a prefill node to join.",
        advice="Alert if it grows, or is near max_queued_requests.",
    ),
    gauge(
        "max_queued_requests",
        "limits.max_queued_requests of the node. Missing in an engine that hosts kvferry, which has its own queue.",
        advice="Compare queued_requests with it: at this value, requests are rejected.",
    ),
    gauge(
        "running_requests",
        "Requests computed, transferred or generated.",
        advice="At max_running_requests, other requests wait even if the pool has free pages.",
    ),
    gauge(
        "max_running_requests",
        "limits.max_running_requests of the node. Missing in an engine that hosts kvferry, which has its own limit.",
        advice="running_requests / max_running_requests: load of a decode node. The autoscalers of deploy/ use it.",
    ),
    gauge(
        "requests_waiting_for_pages",
        "Requests that wait because the KV pool of this node has too few free pages for them.",
        advice="If above 0 for minutes, the pool is the limit. Raise memory.static_fraction or pool.num_pages, or add nodes.",
    ),
    counter(
        "out_of_memory_steps",
        "Steps that failed because memory ran out. All requests of such a step failed.",
        advice="Alert on any increase. The log names the work, the bytes and the settings to lower.",
    ),
)

NODE_STATE_METRICS: Final = (
    gauge(
        "peers",
        "Nodes of the other tier by state. A prefill node knows joined ones only.",
        ("state", PEER_STATES),
        advice="Alert if none is joined, or one is lost for long.",
    ),
    gauge(
        "discovery_addresses",
        "Prefill nodes that discovery lists. On a prefill node that registers itself: 1 while registered.",
        advice="0 on a decode node: no prefill node is known. kvferry status shows the source.",
    ),
    gauge(
        "discovery_age_seconds",
        "Seconds since the source of discovery last answered. -1: never; 0: the list is static.",
        advice="Above a few times discovery_interval_seconds: the file, DNS or etcd is unavailable. The known nodes stay in use.",
    ),
    gauge(
        "discovery_interval_seconds",
        "Seconds between two reads of discovery or two renewals of a registration. 0: a static list, or a node that loads or "
        "drains.",
        advice="Compare discovery_age_seconds with it.",
    ),
    counter(
        "discovery_failures",
        "Failed reads of discovery or renewals of a registration. etcd: no member answered.",
        advice="The log has the reason once per outage.",
    ),
    counter(
        "discovery_refused_entries",
        "Entries of discovery that were rejected, by reason; each counts once while it is listed.",
        ("reason", REFUSED_ENTRIES),
        roles=DECODE,
        advice="An unknown writer of the file or prefix, or plain text is not allowed. The log names the entry.",
    ),
    gauge(
        "breakers",
        "Prefill nodes by the state of their circuit breakers.",
        ("state", BREAKER_STATES),
        roles=DECODE,
        advice="Open ones are avoided for a while; kvferry status has the reason.",
    ),
    counter(
        "join_faults",
        "Joins that ended in a bug of this node. They are retried.",
        roles=DECODE,
        advice="Report any increase, with the traceback in the log.",
    ),
    counter(
        "breaker_openings",
        "Openings of circuit breakers, because a prefill node was lost or failed requests.",
        roles=DECODE,
        advice="Increases outside of roll-outs: the log names the node.",
    ),
    gauge(
        "largest_piece_bytes",
        "Largest piece of a chunk between two ranks, for all joined nodes of the other tier.",
        advice="The ring should hold two of them for each prefill rank that writes.",
    ),
    gauge(
        "node_state",
        "1 for the node's state, 0 for the others.",
        ("state", NODE_STATES),
        advice="Alert if a node stays in another state than ready.",
    ),
    gauge(
        "rank_restarts",
        "Number of restarts of the rank group.",
        advice="Any increase: read the ranks' last log lines.",
    ),
    counter(
        "refused_calls",
        "Calls to the node that the caller's certificate does not allow.",
        ("method", "methods of the node's gRPC services"),
        advice="See docs/tls.md.",
    ),
    gauge(
        "certificate_expiry_timestamp_seconds",
        "Expiry time of the node's certificate, in seconds since 1970.",
        advice="Alert a day before: kvferry_certificate_expiry_timestamp_seconds - time() < 86400.",
    ),
    gauge(
        "certificate_stale",
        "1 while the node's certificate files have changed and cannot be used, otherwise 0.",
        advice="Alert at 1: the log has the reason.",
    ),
    gauge(
        "start_time_seconds",
        "Start time of the node's process, in seconds since 1970; restarts of its ranks and role changes do not count.",
        advice="Alert on repeated changes: changes(kvferry_start_time_seconds[1h]).",
    ),
    gauge(
        "build_info",
        "Always 1; the labels have the versions.",
        ("version", "version of kvferry"),
        ("python", "version of Python"),
        advice="Two versions for long: an incomplete roll-out.",
    ),
)

OFFLOAD_METRICS: Final = served_by(
    DECODE,
    counter(
        "offload_prompt_tokens",
        "Prompt tokens that were looked up in the tiers, for each attempt.",
        advice="The base of offload_hit_tokens.",
    ),
    counter(
        "offload_hit_tokens",
        "Prompt tokens that were found in a tier, for each attempt.",
        ("tier", ("device", "host", "storage")),
        advice="Divide by offload_prompt_tokens: hit rate of the tier.",
    ),
    counter(
        "offload_saved_pages",
        "Pages saved to host memory, of prompts or generated.",
        ("source", ("prompt", "generated")),
        advice="The pages that are kept.",
    ),
    counter(
        "offload_released_pages",
        "Device pages released before their request ended.",
        advice="Room that offload makes for other requests.",
    ),
    counter(
        "offload_restored_pages",
        "Pages of running requests that were loaded back to the device.",
        advice="Growing together with released pages: the device pool is too small.",
    ),
    counter(
        "offload_stored_pages",
        "Pages of running requests that were moved to the store, because device and host memory cannot hold them.",
        advice="Growing: steps of these requests read the store and are slow. Add host memory.",
    ),
    counter(
        "offload_host_full",
        "Requests that found no room in host memory. They wait, or their pages are not kept.",
        advice="Growing: raise offload.host_memory or offload.host_ratio.",
    ),
    counter(
        "offload_stalls",
        "Steps that waited for copies of their request, each counted once.",
        advice="Growing: copies are slower than steps. See offload_copy_seconds.",
    ),
    counter(
        "offload_backups",
        "Pages written to the store on every rank, by outcome.",
        ("outcome", ("stored", "failed")),
        advice="failed: see store_operations of the ranks.",
    ),
    gauge(
        "offload_backup_queue",
        "Pages that wait to be written to the store.",
        advice="Growing: the store is slower than generation.",
    ),
    gauge(
        "host_pages",
        "Pages of the host pools by group of layers and state.",
        ("group", "groups of layers of the model: full, window_4096 and the like"),
        ("state", ("free", "cached", "held")),
        advice="No free or cached pages: running requests fill host memory.",
    ),
)

NODE_METRICS: Final = (*REQUEST_METRICS, *NODE_STATE_METRICS, *OFFLOAD_METRICS, *STORE_METRICS, *LOOP_METRICS)

_LINK: Final[tuple[Label, ...]] = (
    ("prefill_rank", "ranks of the prefill node"),
    ("decode_rank", "ranks of the decode node"),
    ("lane", "transport/way, such as shm, ucx/shm, ucx/net, nixl/shm, nixl/net, nixl/ipc, cuda_ipc/fused"),
)
_DIRECTION: Final[Label] = ("direction", ("save", "load", "copy"))
_BLOCK_STATE: Final[Label] = ("state", ("selected", "skipped"))
_GROUP: Final[Label] = ("group", "groups of layers of the model: full, window_4096, state and the like")
_LINE: Final[Label] = ("line", "lines of the memory plan, as kvferry plan prints them")

TRANSFER_METRICS: Final = (
    counter(
        "transferred_bytes",
        "Payload bytes written, including resends (prefill), or scattered (decode).",
        advice="Its rate over the ranks of a tier is the transfer speed. Compare it with the probes of the links.",
    ),
    counter(
        "chunks",
        "Pieces of chunks gathered (prefill) or scattered (decode); one per chunk and route.",
        advice="Fewer bytes per piece: shorter prompts, or smaller chunks (chunk.piece_bytes).",
    ),
    counter(
        "writes",
        "Bulk writes that succeeded.",
        roles=PREFILL,
        advice="Equal to chunks, except resends.",
    ),
    counter(
        "writes_avoided",
        "Additional writes that one write per token, layer, K and V would have needed.",
        roles=PREFILL,
        advice="writes + writes_avoided: descriptors of the same transfers without staging.",
    ),
    counter(
        "resends",
        "Pieces that were sent again after a wrong digest.",
        roles=PREFILL,
        advice="Like broken_chunks, counted by the sender.",
    ),
    counter(
        "broken_chunks",
        "Pieces that arrived with a wrong digest.",
        roles=DECODE,
        advice="Above 0: memory, a network card or a cable is failing. See DATA_LOSS in docs/troubleshooting.md.",
    ),
    counter(
        "signals_given_up",
        "Scatters on a GPU that waited more than 50 ms for a gather that had begun.",
        roles=DECODE,
        advice="Each ends a session's signals for a minute, which adds a millisecond to requests. Often: prefill's GPU is busy.",
    ),
    counter(
        "dropped_messages",
        "Control messages that were dropped because they broke a rule.",
        ("reason", "at most 32 constant words, and other"),
        advice="A few at restarts and lost peers are normal. A steady rate: a peer of another build, or an attack.",
    ),
    counter(
        "refused_connections",
        "Connections to the control port without the key of an attached writer.",
        roles=DECODE,
        advice="Other processes reach the control port: see Ports in docs/network.md.",
    ),
    counter(
        "watermark_acks",
        "Watermark acks sent (decode) or received (prefill).",
        advice="It grows while sessions are open, because heartbeats are acks, too.",
    ),
    histogram(
        "stage_seconds",
        "Seconds of a stage. credit_wait, gather, write, ack, scatter: of one piece. total: from a request's first gather to "
        "its last release. exposed: the part of total after the last computed chunk.",
        ("stage", tuple(stage for stages in RANK_STAGES.values() for stage in stages)),
        buckets=STAGE_BUCKETS_S,
        advice="The stage that grows under load is the bottleneck. credit_wait: the ring or a slow decode side; write: the link; "
        "scatter: the decode side's memory. Decode ranks serve scatter, prefill ranks all others.",
    ),
    histogram(
        "overlap_ratio",
        "Share of a request's transfer that its computation hides, from 0 to 1, for each rank that sent a part.",
        roles=PREFILL,
        buckets=RATIO_BUCKETS,
        advice="Near 0 with long prompts: the link is slower than prefill, or chunks are too large (chunk.chunk_tokens).",
    ),
    histogram(
        "step_seconds",
        "Seconds of a step of the rank's engine.",
        buckets=STAGE_BUCKETS_S,
        advice="The rate of its sum is the share of time that the engine computes. Near 1: the engine is the bottleneck.",
    ),
)

RING_METRICS: Final = served_by(
    DECODE,
    gauge(
        "ring_capacity_bytes",
        "Size of the ring.",
        advice="The setting ring.capacity_bytes.",
    ),
    gauge(
        "ring_live_bytes",
        "Bytes of unreleased grants, including those that wait for room. Can exceed the capacity.",
        advice="Divide by the capacity. Above 1 for long, with growing credit_wait: enlarge the ring.",
    ),
    gauge(
        "ring_peak_bytes",
        "Largest part of the ring that was granted at once since the rank started, at most the capacity.",
        advice="Far below the capacity after a day of load: the ring can be smaller.",
    ),
    gauge(
        "ring_quarantined_bytes",
        "Bytes that the writer of an ended transfer can still write.",
        advice="Alert if it stays above 0 or grows: see Quarantine grows in docs/troubleshooting.md.",
    ),
    gauge(
        "ring_live_grants",
        "Unreleased grants.",
        advice="0 when nothing is in transfer.",
    ),
    gauge(
        "ring_watermark_position_bytes",
        "Position in the ring below which everything is released. It only grows, and restarts at 0 with the rank.",
        advice="Its derivative is the throughput of the ring.",
    ),
    gauge(
        "ring_watermark_lag_bytes",
        "Distance from the watermark to the newest grant, including released ranges.",
        advice="Normally near ring_live_bytes. Far above it: one old grant is stuck.",
    ),
    gauge(
        "ring_watermark_stalled_seconds",
        "Age of the oldest live grant as the oldest, measured once a second; 0 without live grants. Grants in quarantine do "
        "not count.",
        advice="Alert above the longest computation of a chunk: a writer is stuck.",
    ),
)

LINK_METRICS: Final = (
    gauge(
        "link_latency_seconds",
        "Latency of a small write, measured at attach. The highest of all links with the same labels.",
        *_LINK,
        advice="Microseconds over shared memory and RDMA, tens of them over TCP.",
    ),
    gauge(
        "link_bandwidth_bytes_per_second",
        "Bandwidth of a large write, measured at attach (probe). The lowest of all links with the same labels.",
        *_LINK,
        advice="Compare with the hardware, and between links: see A link is slow in docs/troubleshooting.md.",
    ),
    counter(
        "link_written_bytes",
        "Bytes of successful writes. The sum of all links with the same labels.",
        *_LINK,
        roles=PREFILL,
        advice="Divide by link_busy_seconds: bandwidth of the link while it is used.",
    ),
    counter(
        "link_busy_seconds",
        "Seconds with at least one write in progress, on any link with the same labels.",
        *_LINK,
        roles=PREFILL,
        advice="Its rate is the utilisation of the link, at most 1.",
    ),
    counter(
        "link_probe_seconds",
        "Seconds that the writes of link_written_bytes would have taken at the speed of the probe, one after another.",
        *_LINK,
        roles=PREFILL,
        advice="Many times fewer than link_busy_seconds: the link is slower than at attach.",
    ),
    gauge(
        "slowest_link_ratio",
        "Lowest speed / probe of the links in use for more than a fifth of the last two minutes. -1: no such link.",
        roles=PREFILL,
        advice="Below 0.2 and a third of fastest_link_ratio: link_slow in the rank's log names the peer.",
    ),
    gauge(
        "fastest_link_ratio",
        "Highest speed / probe of the links in use for more than a hundredth of the last two minutes. -1: no such link.",
        roles=PREFILL,
        advice="Low as well: a shared resource is slow or full, not one link.",
    ),
    gauge(
        "links_fallen_back",
        "Open links on a slower transport than expected: the network within one machine, or not the best transport between GPUs.",
        roles=DECODE,
        advice="Above 0: see transport_fell_back in the rank's log, and A link is slow in docs/troubleshooting.md.",
    ),
)

RANK_STATE_METRICS: Final = (
    gauge(
        "staging_slots",
        "Staging slots by state. Their number depends on the largest piece for the joined decode nodes.",
        ("state", ("used", "free")),
        roles=PREFILL,
        advice="No free slots for long: writes are slower than gathers (staging.num_slots).",
    ),
    gauge(
        "pool_pages",
        "Pages of the KV pool by group of layers and state.",
        _GROUP,
        ("state", ("free", "reserved", "bound")),
        advice="No free pages and queued requests: this tier's pool is the limit.",
    ),
    gauge(
        "memory_planned_bytes",
        "Bytes of the device that the memory plan gives to a line.",
        _LINE,
        advice="See docs/memory.md.",
    ),
    gauge(
        "memory_real_bytes",
        "Measured bytes of a line of the memory plan.",
        _LINE,
        advice="More than 5 % off the plan is also logged.",
    ),
    counter(
        "rank_refused_calls",
        "Calls to a decode rank that the caller's certificate does not allow.",
        ("method", "methods of the rank's gRPC services"),
        roles=DECODE,
        advice="See docs/tls.md: a name is missing in tls.peer_names, or an unknown process calls.",
    ),
    gauge(
        "rank_requests",
        "Requests of which the rank keeps state.",
        advice="0 when the node is idle. A remaining value is a leak.",
    ),
    gauge(
        "sessions",
        "Open sessions with ranks of the other tier.",
        advice="One for each rank with a route to this one, of each joined node.",
    ),
    gauge(
        "ending_sessions",
        "Closed sessions whose writer can still write.",
        roles=DECODE,
        advice="Above 0 for long: see ring_quarantined_bytes.",
    ),
    gauge(
        "pending_transfers",
        "Writes and receives that the data plane has not completed.",
        advice="0 when the node is idle.",
    ),
    gauge(
        "rank_open_files",
        "Open file descriptors of the rank's process.",
        advice="Growth without new sessions is a leak.",
    ),
    gauge(
        "rank_threads",
        "Threads of the rank's process.",
        advice="Continuous growth is a leak.",
    ),
    gauge(
        "rank_resident_bytes",
        "Resident memory of the rank's process, including shared memory.",
        advice="Continuous growth is a leak.",
    ),
    gauge(
        "rank_idle_checks",
        "Invariant checks that the rank passed while no request was in flight.",
        advice="Grows by about one a second on an idle rank.",
    ),
)

RANK_PREFILL_METRICS: Final = served_by(
    PREFILL,
    counter(
        "prefill_blocks",
        "Pairs of a block of queries and a block of keys in block-sparse prefill, of all heads and layers.",
        _BLOCK_STATE,
        advice="selected / (selected + skipped) is the density. Near 1: a smaller prefill.sparse_threshold is faster.",
    ),
)

RANK_OFFLOAD_METRICS: Final = (
    counter(
        "offload_copied_bytes",
        "Bytes copied to host memory (save), from it (load), or on the device (copy). On prefill nodes: by steps.",
        _DIRECTION,
        advice="Its rate is the load of the host link by offload.",
    ),
    *served_by(
        DECODE,
        histogram(
            "offload_copy_seconds",
            "Seconds of a copy.",
            _DIRECTION,
            buckets=STAGE_BUCKETS_S,
            advice="Growing under load: the host link is saturated.",
        ),
    ),
)

RANK_METRICS: Final = (
    *TRANSFER_METRICS,
    *RING_METRICS,
    *LINK_METRICS,
    *RANK_STATE_METRICS,
    *RANK_PREFILL_METRICS,
    *RANK_OFFLOAD_METRICS,
    *STORE_METRICS,
    *LOOP_METRICS,
)
