"""Metrics of leaders: one series for a node."""

from __future__ import annotations

from typing import Final

from transfer.metrics.loop_specs import LOOP_METRICS
from transfer.metrics.specs import (
    ABORT_REASONS,
    BREAKER_STATES,
    DECODE,
    NODE_STATES,
    OUTCOMES,
    PEER_STATES,
    PREFILL,
    REFUSED_ENTRIES,
    STAGE_BUCKETS_S,
    TOKEN_BUCKETS_S,
    declare,
)
from transfer.metrics.store_specs import STORE_METRICS

REQUEST_METRICS: Final = (
    declare(
        "counter",
        "requests",
        "Requests that ended, by outcome: sent is a prefill node's good end, done a decode node's. Refused: turned away, by a"
        " queue that is full, by a node that drains or has no ranks or peers, or for good; or without room for too long.",
        ("outcome", tuple(dict.fromkeys(outcome for outcomes in OUTCOMES.values() for outcome in outcomes))),
        advice="The share of failed in all but aborted is the error rate of the tier; many refused: too few nodes, or none.",
    ),
    declare(
        "counter",
        "aborts",
        "Requests that were queued and ended before they were whole, by why: their caller went away or gave them up, an operator"
        " aborted them, no room in time, a rank or peer or the way to it was lost, the engine failed, bytes arrived broken twice,"
        " the two sides do not fit.",
        ("reason", ABORT_REASONS),
        advice="caller is ordinary; lost comes with restarts; engine, data_loss and misfit want a look into the log.",
    ),
    declare(
        "counter",
        "retries",
        "Attempts of requests on another prefill node, after their own was lost before the first token.",
        roles=DECODE,
        advice="With breaker_openings: which prefill nodes come and go.",
    ),
    declare(
        "counter",
        "prompt_tokens",
        "Tokens of prompts that were accepted, each try by itself on a prefill node.",
        advice="Its rate is what is asked of the tier.",
    ),
    declare(
        "counter",
        "generated_tokens",
        "Tokens that were generated and handed to callers.",
        roles=DECODE,
        advice="Its rate is the node's throughput.",
    ),
    declare(
        "counter",
        "loaded_prompt_tokens",
        "Tokens of prompts that were taken from the store, and not computed.",
        roles=PREFILL,
        advice="Over prompt_tokens: what the store spares the engine.",
    ),
    declare(
        "histogram",
        "queue_seconds",
        "Seconds that a request waited for room, or until it was given up without, each try by itself.",
        buckets=STAGE_BUCKETS_S,
        advice="Growing on both tiers: decode has no room. On prefill nodes alone: they are too few.",
    ),
    declare(
        "histogram",
        "time_to_first_token_seconds",
        "Seconds from acceptance to the first token.",
        roles=DECODE,
        buckets=TOKEN_BUCKETS_S,
        advice="What the caller waits for: queue, prefill and the exposed part of the transfer.",
    ),
    declare(
        "histogram",
        "time_per_output_token_seconds",
        "Seconds between two tokens of a request.",
        roles=DECODE,
        buckets=TOKEN_BUCKETS_S,
        advice="Growing with running_requests: the decode engine is full.",
    ),
    declare(
        "gauge",
        "queued_requests",
        "Requests that wait for room, on a decode node also for a prefill node to be joined.",
        advice="Alarm when it grows, or nears max_queued_requests.",
    ),
    declare(
        "gauge",
        "max_queued_requests",
        "limits.max_queued_requests of the node. An engine that hosts its side has a queue of its own, and none of this.",
        advice="What queued_requests is to be compared with: at it, requests are refused.",
    ),
    declare(
        "gauge",
        "running_requests",
        "Requests computed, transferred or generated.",
        advice="At max_running_requests others wait, whatever the pool has free.",
    ),
    declare(
        "gauge",
        "max_running_requests",
        "limits.max_running_requests of the node. An engine that hosts its side has a limit of its own, and none of this.",
        advice="running_requests over it: how full a decode node is, whatever it was given. The autoscalers of deploy/ go by it.",
    ),
    declare(
        "gauge",
        "requests_waiting_for_pages",
        "Requests that wait because the KV pool of this node has too few free pages for them.",
        advice="If above 0 for minutes, the pool is the limit. Raise memory.static_fraction or pool.num_pages, or add nodes.",
    ),
    declare(
        "counter",
        "out_of_memory_steps",
        "Steps that failed because memory ran out. All requests of such a step failed.",
        advice="Alert on any increase. The log names the work, the bytes and the settings to lower.",
    ),
)

NODE_STATE_METRICS: Final = (
    declare(
        "gauge",
        "peers",
        "Nodes of the other tier by state; a prefill node knows those that are joined.",
        ("state", PEER_STATES),
        advice="Alarm when none is joined, or one is lost for long.",
    ),
    declare(
        "gauge",
        "discovery_addresses",
        "Prefill nodes that discovery names now; of a prefill node that registers itself: 1 while it is registered, 0 otherwise.",
        advice="0 on a decode node: it can reach nobody; kvferry status says where it has looked.",
    ),
    declare(
        "gauge",
        "discovery_age_seconds",
        "Seconds since what discovery names was last known to hold; -1: nothing was heard yet, 0: nothing can grow old.",
        advice="Above a few times discovery_interval_seconds: the file, DNS or etcd is away; what was known goes on to be used.",
    ),
    declare(
        "gauge",
        "discovery_interval_seconds",
        "Seconds between two looks of discovery, or two renewals of a registration; "
        "0: a list that is not looked at again, or a node that is not to be found: it loads, or was drained.",
        advice="What discovery_age_seconds is to be compared with.",
    ),
    declare(
        "counter",
        "discovery_failures",
        "Looks of discovery, or renewals of a registration, that failed; of etcd, those where no member answered.",
        advice="The log has the reason once for each time that it is away.",
    ),
    declare(
        "counter",
        "discovery_refused_entries",
        "Entries of discovery that could not be used, by why; each is counted once for as long as it is there.",
        ("reason", REFUSED_ENTRIES),
        roles=DECODE,
        advice="Somebody else writes into the file or the prefix, or plain text is not allowed; the log names the entry.",
    ),
    declare(
        "gauge",
        "breakers",
        "Prefill nodes by the state of their circuit breakers.",
        ("state", BREAKER_STATES),
        roles=DECODE,
        advice="Open ones are left out for a while; kvferry status says why.",
    ),
    declare(
        "counter",
        "join_faults",
        "Joins that a bug of this node ended; its log has it, and they are tried again.",
        roles=DECODE,
        advice="Any is worth a report.",
    ),
    declare(
        "counter",
        "breaker_openings",
        "Times that a circuit breaker opened: a prefill node was lost, or failed requests.",
        roles=DECODE,
        advice="An increase outside of roll-outs: find out which node, in the log.",
    ),
    declare(
        "gauge",
        "largest_piece_bytes",
        "Most bytes of a chunk between two ranks, over all joined nodes of the other tier.",
        advice="The ring should hold two of them for each prefill rank that writes.",
    ),
    declare(
        "gauge",
        "node_state",
        "1 for the node's state, 0 for the others.",
        ("state", NODE_STATES),
        advice="Alarm when a node is long in another state than ready.",
    ),
    declare(
        "gauge",
        "rank_restarts",
        "Times that the rank group was started again.",
        advice="An increase: the ranks' last log lines say why.",
    ),
    declare(
        "counter",
        "refused_calls",
        "Calls to the node that the caller's certificate does not allow.",
        ("method", "methods of the node's gRPC services"),
        advice="See TLS in docs/operations.md.",
    ),
    declare(
        "gauge",
        "certificate_expiry_timestamp_seconds",
        "When the node's certificate expires, in seconds since 1970.",
        advice="Alarm a day ahead: kvferry_certificate_expiry_timestamp_seconds - time() < 86400.",
    ),
    declare(
        "gauge",
        "certificate_stale",
        "1 while the node's certificate files have changed and cannot be used; 0 otherwise.",
        advice="Alarm at 1: the log says what is wrong with the files.",
    ),
    declare(
        "gauge",
        "start_time_seconds",
        "When the node's process started, in seconds since 1970; a restart of its ranks or a change of its role is none.",
        advice="Alarm when it changes again and again: changes(kvferry_start_time_seconds[1h]).",
    ),
    declare(
        "gauge",
        "build_info",
        "Always 1; the labels say what runs.",
        ("version", "version of kvferry"),
        ("python", "version of Python"),
        advice="Two versions for long: a roll-out that stands still.",
    ),
)

OFFLOAD_METRICS: Final = (
    declare(
        "counter",
        "offload_prompt_tokens",
        "Tokens of prompts that were looked for in the tiers, hits among them; once for each try.",
        roles=DECODE,
        advice="The whole that offload_hit_tokens are a part of.",
    ),
    declare(
        "counter",
        "offload_hit_tokens",
        "Tokens of prompts found in a tier, which did not come from prefill; once for each try.",
        ("tier", ("device", "host", "storage")),
        roles=DECODE,
        advice="Over offload_prompt_tokens: the hit rate of each tier.",
    ),
    declare(
        "counter",
        "offload_saved_pages",
        "Pages saved into host memory, of the prompt or generated.",
        ("source", ("prompt", "generated")),
        roles=DECODE,
        advice="What is kept.",
    ),
    declare(
        "counter",
        "offload_released_pages",
        "Device pages given back before their request ended.",
        roles=DECODE,
        advice="Room that offload makes for others.",
    ),
    declare(
        "counter",
        "offload_restored_pages",
        "Pages of running requests brought back onto the device.",
        roles=DECODE,
        advice="Rising together with released pages: the device's share is too small.",
    ),
    declare(
        "counter",
        "offload_host_full",
        "Attempts of requests that host memory had no room for: they wait, or pages are not kept. Each once, and its fetch once.",
        roles=DECODE,
        advice="Rising: offload.host_memory or offload.host_ratio is too small.",
    ),
    declare(
        "counter",
        "offload_stalls",
        "Steps that had to wait for their request's copies, each once.",
        roles=DECODE,
        advice="Rising: copies are slower than steps; see offload_copy_seconds.",
    ),
    declare(
        "counter",
        "offload_backups",
        "Pages put into the store on every rank, by outcome.",
        ("outcome", ("stored", "failed")),
        roles=DECODE,
        advice="failed: see store_operations of the ranks.",
    ),
    declare(
        "gauge",
        "offload_backup_queue",
        "Pages that wait to be put into the store.",
        roles=DECODE,
        advice="Growing: the store is slower than what is generated.",
    ),
    declare(
        "gauge",
        "host_pages",
        "Pages of the host pools by group of layers and state.",
        ("group", "groups of layers of the model: full, window_4096 and the like"),
        ("state", ("free", "cached", "held")),
        roles=DECODE,
        advice="None free or cached: host memory is full of what running requests need.",
    ),
)

NODE_METRICS: Final = (*REQUEST_METRICS, *NODE_STATE_METRICS, *OFFLOAD_METRICS, *STORE_METRICS, *LOOP_METRICS)
