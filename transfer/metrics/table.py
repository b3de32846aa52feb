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
        advice="missing is ordinary; anything else that is not ok is the store, its network, or its settings (docs/offload.md).",
    ),
    counter(
        "store_bytes",
        "Bytes of pages written to the store or read from it.",
        _OP,
        advice="Its rate is the store's share of the network or disk.",
    ),
    histogram(
        "store_seconds",
        "Seconds until a call of the store was answered.",
        _OP,
        buckets=STAGE_BUCKETS_S,
        advice="Compare get with the time that computing the same pages takes.",
    ),
    gauge(
        "store_queue_depth",
        "Pages that wait for the store, or for its answer.",
        advice="Growing: the store is slower than the writes to it.",
    ),
    gauge(
        "store_circuit",
        "1 for the state of the circuit breaker of reads or writes.",
        ("direction", ("read", "write")),
        ("state", BREAKER_STATES),
        advice="Open: the store is not used for a while; requests continue without it.",
    ),
)

LOOP_METRICS: Final = (
    histogram(
        "loop_turn_seconds",
        "Wall-clock seconds of a turn of the event loop, counted since the process was first ready. The loop sends and notices no"
        " heartbeat during a turn. An engine that hosts both sides in one process has one loop, which both roles report.",
        buckets=TURN_BUCKETS_S,
        advice="Turns above 0.25: loop_turn_long in the process's log names the longest event. See KvferryEventLoopStalls in"
        " docs/runbooks.md.",
    ),
)

REQUEST_METRICS: Final = (
    counter(
        "requests",
        "Requests that ended, by outcome: sent is a prefill node's good end, done a decode node's. Refused: turned away, by a"
        " queue that is full, by a node that drains or has no ranks or peers, or for good; or without room for too long.",
        ("outcome", tuple(dict.fromkeys(outcome for outcomes in OUTCOMES.values() for outcome in outcomes))),
        advice="The share of failed in all but aborted is the error rate of the tier; many refused: too few nodes, or none.",
    ),
    counter(
        "aborts",
        "Requests that were queued and ended before they were whole, by why: their caller went away or gave them up, an operator"
        " aborted them, no room in time, a rank or peer or the way to it was lost, the engine failed, bytes arrived broken twice,"
        " the two sides do not fit.",
        ("reason", ABORT_REASONS),
        advice="caller is normal; lost comes with restarts; for engine, data_loss and misfit, check the log.",
    ),
    counter(
        "retries",
        "Attempts of requests on another prefill node, after their own was lost before the first token.",
        roles=DECODE,
        advice="Compare with breaker_openings: prefill nodes that come and go.",
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
        "Tokens of prompts that were taken from the store, and not computed.",
        roles=PREFILL,
        advice="Over prompt_tokens: the share of tokens that the engine need not compute.",
    ),
    histogram(
        "queue_seconds",
        "Seconds that a request waited for room, or until it was given up without room, for each attempt.",
        buckets=STAGE_BUCKETS_S,
        advice="Growing on both tiers: decode has no room. On prefill nodes alone: they are too few.",
    ),
    histogram(
        "time_to_first_token_seconds",
        "Seconds from acceptance to the first token.",
        roles=DECODE,
        buckets=TOKEN_BUCKETS_S,
        advice="The caller's wait: queue, prefill and the exposed part of the transfer.",
    ),
    histogram(
        "time_per_output_token_seconds",
        "Seconds between two tokens of a request.",
        roles=DECODE,
        buckets=TOKEN_BUCKETS_S,
        advice="Growing with running_requests: the decode engine is full.",
    ),
    gauge(
        "queued_requests",
        "Requests that wait for room, or on a decode node for a prefill node to join.",
        advice="Alarm when it grows, or nears max_queued_requests.",
    ),
    gauge(
        "max_queued_requests",
        "limits.max_queued_requests of the node. An engine that hosts its side has a queue of its own, and none of this.",
        advice="Compare queued_requests with it: at this value, requests are rejected.",
    ),
    gauge(
        "running_requests",
        "Requests computed, transferred or generated.",
        advice="At max_running_requests, other requests wait even if the pool has free pages.",
    ),
    gauge(
        "max_running_requests",
        "limits.max_running_requests of the node. An engine that hosts its side has a limit of its own, and none of this.",
        advice="running_requests over it: how full a decode node is, whatever it was given. The autoscalers of deploy/ go by it.",
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
        "Nodes of the other tier by state; a prefill node knows those that are joined.",
        ("state", PEER_STATES),
        advice="Alarm when none is joined, or one is lost for long.",
    ),
    gauge(
        "discovery_addresses",
        "Prefill nodes that discovery names now; of a prefill node that registers itself: 1 while it is registered, 0 otherwise.",
        advice="0 on a decode node: it can reach nobody; kvferry status says where it has looked.",
    ),
    gauge(
        "discovery_age_seconds",
        "Seconds since discovery's nodes were last confirmed; -1 means no result yet, 0 means that the list cannot become old.",
        advice="Above a few times discovery_interval_seconds: the file, DNS or etcd is away; the last known nodes stay in use.",
    ),
    gauge(
        "discovery_interval_seconds",
        "Seconds between two looks of discovery, or two renewals of a registration; "
        "0: a list that is not looked at again, or a node that is not to be found: it loads, or was drained.",
        advice="Compare discovery_age_seconds with it.",
    ),
    counter(
        "discovery_failures",
        "Looks of discovery, or renewals of a registration, that failed; of etcd, those where no member answered.",
        advice="The log has the reason once for each time that it is away.",
    ),
    counter(
        "discovery_refused_entries",
        "Entries of discovery that could not be used, by reason; each is counted once while it is there.",
        ("reason", REFUSED_ENTRIES),
        roles=DECODE,
        advice="Somebody else writes into the file or the prefix, or plain text is not allowed; the log names the entry.",
    ),
    gauge(
        "breakers",
        "Prefill nodes by the state of their circuit breakers.",
        ("state", BREAKER_STATES),
        roles=DECODE,
        advice="Open ones are left out for a while; kvferry status says why.",
    ),
    counter(
        "join_faults",
        "Joins that a bug of this node ended, with details in its log; they are repeated.",
        roles=DECODE,
        advice="Report any increase.",
    ),
    counter(
        "breaker_openings",
        "Number of openings of circuit breakers: a prefill node was lost, or failed requests.",
        roles=DECODE,
        advice="An increase outside of roll-outs: find out which node, in the log.",
    ),
    gauge(
        "largest_piece_bytes",
        "Most bytes of a chunk between two ranks, over all joined nodes of the other tier.",
        advice="The ring should hold two of them for each prefill rank that writes.",
    ),
    gauge(
        "node_state",
        "1 for the node's state, 0 for the others.",
        ("state", NODE_STATES),
        advice="Alarm when a node is long in another state than ready.",
    ),
    gauge(
        "rank_restarts",
        "Number of restarts of the rank group.",
        advice="An increase: the ranks' last log lines say why.",
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
        advice="Alarm a day ahead: kvferry_certificate_expiry_timestamp_seconds - time() < 86400.",
    ),
    gauge(
        "certificate_stale",
        "1 while the node's certificate files have changed and cannot be used; 0 otherwise.",
        advice="Alarm at 1: the log names the problem of the files.",
    ),
    gauge(
        "start_time_seconds",
        "Start time of the node's process, in seconds since 1970; restarts of its ranks and role changes do not count.",
        advice="Alarm when it changes again and again: changes(kvferry_start_time_seconds[1h]).",
    ),
    gauge(
        "build_info",
        "Always 1; the labels have the versions.",
        ("version", "version of kvferry"),
        ("python", "version of Python"),
        advice="Two versions for long: a roll-out that stands still.",
    ),
)

OFFLOAD_METRICS: Final = served_by(
    DECODE,
    counter(
        "offload_prompt_tokens",
        "Tokens of prompts that were looked up in the tiers, including hits, for each attempt.",
        advice="The total of which offload_hit_tokens are a part.",
    ),
    counter(
        "offload_hit_tokens",
        "Tokens of prompts found in a tier, which did not come from prefill, for each attempt.",
        ("tier", ("device", "host", "storage")),
        advice="Over offload_prompt_tokens: the hit rate of each tier.",
    ),
    counter(
        "offload_saved_pages",
        "Pages saved into host memory, of the prompt or generated.",
        ("source", ("prompt", "generated")),
        advice="The pages that are kept.",
    ),
    counter(
        "offload_released_pages",
        "Device pages given back before their request ended.",
        advice="Room that offload makes for others.",
    ),
    counter(
        "offload_restored_pages",
        "Pages of running requests brought back onto the device.",
        advice="Rising together with released pages: the device's share is too small.",
    ),
    counter(
        "offload_stored_pages",
        "Pages of running requests moved on from host memory to the store, because device and host memory cannot hold them.",
        advice="Rising: steps of these requests read the store and are slow; more host memory makes them faster.",
    ),
    counter(
        "offload_host_full",
        "Attempts of requests that host memory had no room for: they wait, or pages are not kept. Each once, and its fetch once.",
        advice="Rising: offload.host_memory or offload.host_ratio is too small.",
    ),
    counter(
        "offload_stalls",
        "Steps that had to wait for their request's copies, each once.",
        advice="Rising: copies are slower than steps; see offload_copy_seconds.",
    ),
    counter(
        "offload_backups",
        "Pages put into the store on every rank, by outcome.",
        ("outcome", ("stored", "failed")),
        advice="failed: see store_operations of the ranks.",
    ),
    gauge(
        "offload_backup_queue",
        "Pages that wait to be put into the store.",
        advice="Growing: the store is slower than generation.",
    ),
    gauge(
        "host_pages",
        "Pages of the host pools by group of layers and state.",
        ("group", "groups of layers of the model: full, window_4096 and the like"),
        ("state", ("free", "cached", "held")),
        advice="None free or cached: host memory is full of pages of running requests.",
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
        "Payload bytes written, resent ones included (prefill), or scattered (decode).",
        advice="Its rate over the ranks of a tier is how fast KV moves; compare with the links' probes.",
    ),
    counter(
        "chunks",
        "Parts of chunks gathered (prefill) or scattered (decode); one per chunk and route.",
        advice="Falling bytes per chunk: prompts are short, or chunks are small (chunk.piece_bytes).",
    ),
    counter(
        "writes",
        "Bulk writes that succeeded.",
        roles=PREFILL,
        advice="As many as chunks, resends aside.",
    ),
    counter(
        "writes_avoided",
        "Writes that sending each token, layer, K and V by itself would have taken on top.",
        roles=PREFILL,
        advice="With writes: the number of descriptors of the same transfers without staging.",
    ),
    counter(
        "resends",
        "Chunk sends that were repeated because the bytes arrived broken.",
        roles=PREFILL,
        advice="Like broken_chunks, counted by the writer.",
    ),
    counter(
        "broken_chunks",
        "Chunks that arrived with another digest than they were sent with.",
        roles=DECODE,
        advice="Any: memory, a network card or a cable is failing; see DATA_LOSS in docs/troubleshooting.md.",
    ),
    counter(
        "dropped_messages",
        "Control messages that broke a rule and were dropped.",
        ("reason", "at most 32 constant words, and other"),
        advice="A few beside restarts and lost peers are ordinary; a steady rate is a peer of another build, or an attack.",
    ),
    counter(
        "refused_connections",
        "Connections to the control port that showed no key of an attached writer.",
        roles=DECODE,
        advice="Other processes reach the control port of the rank: see Ports in docs/network.md.",
    ),
    counter(
        "watermark_acks",
        "Watermark acks sent (decode) or received (prefill).",
        advice="It never stands still while sessions are open, for heartbeats are acks too.",
    ),
    histogram(
        "stage_seconds",
        "Seconds that a stage of a transfer took: credit_wait, gather, write, ack and scatter of one part of a chunk; total, from"
        " the first gather of a request to its last release, and exposed, its part after the last computed chunk.",
        ("stage", tuple(stage for stages in RANK_STAGES.values() for stage in stages)),
        buckets=STAGE_BUCKETS_S,
        advice="The stage that grows under load is the bottleneck: credit_wait is the ring or a slow decode side, write the "
        "link, scatter the decode side's memory. scatter is served by decode ranks, all others by prefill ranks.",
    ),
    histogram(
        "overlap_ratio",
        "Share of a request's transfer that was hidden behind its computation, 0 to 1; of each rank that sent any of it.",
        roles=PREFILL,
        buckets=RATIO_BUCKETS,
        advice="Near 0 with long prompts: the link is slower than prefill, or chunks are too large (chunk.chunk_tokens).",
    ),
    histogram(
        "step_seconds",
        "Seconds of a step of the rank's engine.",
        buckets=STAGE_BUCKETS_S,
        advice="rate of its sum is the share of time that the engine computes: near 1, computing is the bottleneck.",
    ),
)

RING_METRICS: Final = served_by(
    DECODE,
    gauge(
        "ring_capacity_bytes",
        "Size of the ring.",
        advice="ring.capacity_bytes.",
    ),
    gauge(
        "ring_live_bytes",
        "Bytes of unreleased grants, those that wait for room too; may be above the capacity.",
        advice="Over the capacity: how full the ring is. Above 1 for long, with credit_wait growing: a larger ring.",
    ),
    gauge(
        "ring_peak_bytes",
        "Most of the ring that was granted at once since the rank started; at most the capacity.",
        advice="Well below the capacity after a day of load: the ring can be smaller.",
    ),
    gauge(
        "ring_quarantined_bytes",
        "Bytes that the writer of an ended transfer may still write.",
        advice="Alarm if it stays above 0, or grows: see Quarantine grows in docs/troubleshooting.md.",
    ),
    gauge(
        "ring_live_grants",
        "Unreleased grants.",
        advice="0 when nothing is under way.",
    ),
    gauge(
        "ring_watermark_position_bytes",
        "Position in the ring below which everything is released; only grows, and starts again with the rank.",
        advice="Its derivative is the throughput of the ring.",
    ),
    gauge(
        "ring_watermark_lag_bytes",
        "Positions that the watermark is behind the newest grant; released ranges in between count too.",
        advice="Near ring_live_bytes in ordinary traffic. Far above it: one old grant is stuck, and what came after it is done.",
    ),
    gauge(
        "ring_watermark_stalled_seconds",
        "Seconds for which the oldest live grant has been the oldest; 0 with no live grant. Grants in quarantine are left out:"
        " others go around them. Looked at once a second.",
        advice="Alarm above the longest time that one chunk takes to compute: a writer is stuck.",
    ),
)

LINK_METRICS: Final = (
    gauge(
        "link_latency_seconds",
        "Latency of a small write, measured at attach. Of links with the same labels, to several nodes, the highest.",
        *_LINK,
        advice="Microseconds on shared memory and RDMA, tens of them on TCP.",
    ),
    gauge(
        "link_bandwidth_bytes_per_second",
        "Bandwidth of a large write, measured at attach: the link's probe. Of links with the same labels, to several nodes, the "
        "lowest.",
        *_LINK,
        advice="Compare with what the machines should do, and between links: see A link is slow in docs/troubleshooting.md.",
    ),
    counter(
        "link_written_bytes",
        "Bytes of writes that succeeded on the link; of links with the same labels, to several nodes, their sum.",
        *_LINK,
        roles=PREFILL,
        advice="Over link_busy_seconds: the bandwidth that the link achieves while it is used.",
    ),
    counter(
        "link_busy_seconds",
        "Seconds in which at least one write was under way on the link, or on any of those with the same labels, to several "
        "nodes. Counted while writes are under way.",
        *_LINK,
        roles=PREFILL,
        advice="Its rate is the share of time that the link is in use, and at most 1.",
    ),
    counter(
        "link_probe_seconds",
        "Seconds that the writes of link_written_bytes would have taken by the probe of their link, one after another: a latency "
        "each, and their bytes.",
        *_LINK,
        roles=PREFILL,
        advice="Busy seconds of several times as many: the link is slower than it was when it was attached.",
    ),
    gauge(
        "slowest_link_ratio",
        "Of the links that were in use for more than a fifth of the last two minutes, each by itself: the lowest share of its"
        " probe's speed while busy; -1: there is none.",
        roles=PREFILL,
        advice="Below 0.2 and a third of fastest_link_ratio: link_slow in the rank's log names the peer.",
    ),
    gauge(
        "fastest_link_ratio",
        "Likewise the highest, of the links that were in use for more than a hundredth of the time.",
        roles=PREFILL,
        advice="Low too: not one link but a shared resource is slow or full.",
    ),
    gauge(
        "links_fallen_back",
        "Open links on a slower transport: between processes of one machine that use the network, or between GPUs without the "
        "best transport.",
        roles=DECODE,
        advice="Above 0: transport_fell_back in the rank's log has the reason; see A link is slow in docs/troubleshooting.md.",
    ),
)

RANK_STATE_METRICS: Final = (
    gauge(
        "staging_slots",
        "Staging slots by state. Their number depends on the largest piece for the joined decode nodes.",
        ("state", ("used", "free")),
        roles=PREFILL,
        advice="None free for long: writes, or their releases, are slower than gathers (staging.num_slots).",
    ),
    gauge(
        "pool_pages",
        "Pages of the KV pool by group of layers and state.",
        _GROUP,
        ("state", ("free", "reserved", "bound")),
        advice="None free, and requests queue: that tier's pool is the limit.",
    ),
    gauge(
        "memory_planned_bytes",
        "Bytes of the device that the memory plan gives to a line.",
        _LINE,
        advice="See docs/memory.md.",
    ),
    gauge(
        "memory_real_bytes",
        "Bytes that a line of the memory plan came to, where it was measured.",
        _LINE,
        advice="More than 5 % off the plan is in the log as well.",
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
        "Requests that the rank keeps any state of.",
        advice="0 when the node is idle: a remaining value is a leak.",
    ),
    gauge(
        "sessions",
        "Open sessions with ranks of the other tier.",
        advice="One for each rank of the other tier with a route to this one, of each joined node.",
    ),
    gauge(
        "ending_sessions",
        "Closed sessions whose writer may still write.",
        roles=DECODE,
        advice="Above 0 for long: see ring_quarantined_bytes.",
    ),
    gauge(
        "pending_transfers",
        "Writes, receives and declines that the data plane has not settled.",
        advice="0 when the node is idle.",
    ),
    gauge(
        "rank_open_files",
        "Open file descriptors of the rank's process.",
        advice="Growing without new sessions is a leak.",
    ),
    gauge(
        "rank_threads",
        "Threads of the rank's process.",
        advice="Growing without end is a leak.",
    ),
    gauge(
        "rank_resident_bytes",
        "Bytes of the rank's process that are in memory, shared ones included.",
        advice="Growing without end is a leak.",
    ),
    gauge(
        "rank_idle_checks",
        "Times that the rank, with no request in flight, has proven its invariants.",
        advice="It grows by about one a second on an idle rank.",
    ),
)

RANK_PREFILL_METRICS: Final = served_by(
    PREFILL,
    counter(
        "prefill_blocks",
        "Pairs of a block of queries and a block of keys in block-sparse prefill, of all heads and layers.",
        _BLOCK_STATE,
        advice="selected / (selected + skipped) is the density; near 1, a smaller prefill.sparse_threshold would be faster.",
    ),
)

RANK_OFFLOAD_METRICS: Final = (
    counter(
        "offload_copied_bytes",
        "Bytes copied to host memory (save), from it (load), or on the device (copy). On prefill nodes: by steps.",
        _DIRECTION,
        advice="Its rate is the share of the host link that offload takes.",
    ),
    *served_by(
        DECODE,
        histogram(
            "offload_copy_seconds",
            "Seconds of such a copy.",
            _DIRECTION,
            buckets=STAGE_BUCKETS_S,
            advice="Growing under load: the host link is full.",
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
