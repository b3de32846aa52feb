"""The dashboard of single nodes: what each does, what its ranks hold, and how its processes are."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import highest, over, per_second, quantile, selector, share, summed

_RANK: Final = ("instance", "rank")
_LEGEND: Final = "{{instance}} rank {{rank}}"

_NODE: Final = Row(
    title="What it does",
    charts=(
        Chart(
            title="State",
            description=(
                "1 for the state that a node is in. Starting for longer than its weights take to load, or draining without an "
                "end: /readyz of the node and its log say why."
            ),
            unit=Unit.NUMBER,
            lines=(
                Line(
                    expr=f"{summed('kvferry_node_state', 'instance', 'state')} > 0",
                    legend="{{instance}}: {{state}}",
                ),
            ),
        ),
        Chart(
            title="Peers, by state",
            description=(
                "Nodes of the other tier as this one sees them. Lost or joining for minutes, on this node alone: the network "
                "between the two; on all: that peer is gone."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=summed("kvferry_peers", "instance", "state"), legend="{{instance}}: {{state}}"),),
        ),
        Chart(
            title="Time since the node started",
            description=(
                "Of its process. It falls to zero with each start; a saw is a node that ends again and again, and its last log "
                "line says why: the runbook of KvferryNodeCrashLooping."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=f"max by (instance) (time() - {selector('kvferry_start_time_seconds')})", legend="{{instance}}"),),
        ),
        Chart(
            title="Restarts of its ranks",
            description=(
                "How often the node has started its ranks again since it began. A step is a rank that died or hung: the ranks' "
                "last log lines say why. After restart.max_restarts the node gives up."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=highest("kvferry_rank_restarts", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Requests that wait and that run",
            description=(
                "Requests without room yet, and those that are computed, moved or generated. One node far above its like: "
                "clients prefer it, or it is slower than the others."
            ),
            unit=Unit.REQUESTS,
            lines=(
                Line(expr=summed("kvferry_queued_requests", "instance"), legend="{{instance}}: wait"),
                Line(expr=summed("kvferry_running_requests", "instance"), legend="{{instance}}: run"),
            ),
        ),
        Chart(
            title="Requests that run, of those that may",
            description=(
                "Of limits.max_running_requests, each node's own. At 100 % others wait, whatever the pool has free: raise it "
                "where pool and time per token allow, or add nodes of the tier."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(summed("kvferry_running_requests", "instance"), summed("kvferry_max_running_requests", "instance")),
                    legend="{{instance}}",
                ),
            ),
            most=1.0,
        ),
        Chart(
            title="Requests, by outcome",
            description=(
                "Requests that ended on this node. Failed on one prefill node alone: that one is at fault, and its breaker "
                "leaves it out; on all: what they have in common."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_requests_total", "instance", "outcome"), legend="{{instance}}: {{outcome}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Prefill nodes that discovery names",
            description=(
                "What the list, the file, the name or etcd gives each decode node; of a prefill node that registers itself, "
                "whether it is there. Nodes that differ for minutes: one of them cannot look, see the failures beside it."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=highest("kvferry_discovery_addresses", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Looks of discovery that failed",
            description=(
                "Looks at the file, the name or etcd without an answer, and entries that could not be used. What is known stays "
                "known; new nodes are not joined meanwhile. The log has the reason at discovery_failed."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_discovery_failures_total", "instance"), legend="{{instance}}: failed"),
                Line(
                    expr=per_second("kvferry_discovery_refused_entries_total", "instance", "reason"),
                    legend="{{instance}}: {{reason}}",
                ),
            ),
        ),
        Chart(
            title="Prefill nodes left out",
            description=(
                "Prefill nodes whose circuit breaker is not closed, as each decode node sees them. Open: new requests go "
                "elsewhere; half-open: one tries it. Above zero for minutes: see that prefill node."
            ),
            unit=Unit.CIRCUITS,
            lines=(
                Line(
                    expr=summed("kvferry_breakers", "instance", "state", where='state!="closed"'),
                    legend="{{instance}}: {{state}}",
                ),
            ),
        ),
    ),
)

_RANKS: Final = Row(
    title="What its ranks do",
    charts=(
        Chart(
            title="Share of time that the engine computes",
            description=(
                "Of each rank. Ranks of one node go together: one that is lower waits for the others, one at 100 % keeps them. "
                "All near 100 %: the node is full."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=per_second("kvferry_step_seconds_sum", *_RANK), legend=_LEGEND),),
            most=1.0,
        ),
        Chart(
            title="Seconds of a step",
            description=(
                "Median and 99th percentile of the engine's steps, by node. On decode nodes a step is a token of every request, "
                "so it grows with the requests that run; on prefill nodes with chunk.chunk_tokens."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_step_seconds", "instance"), legend="{{instance}}: p50"),
                Line(expr=quantile(0.99, "kvferry_step_seconds", "instance"), legend="{{instance}}: p99"),
            ),
        ),
        Chart(
            title="KV written or scattered",
            description=(
                "Bytes a second that a prefill rank writes or a decode rank scatters. Ranks of one node should be alike; one "
                "that lags has a slower link, or shares its card."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_transferred_bytes_total", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Requests that a rank keeps",
            description=(
                "Requests of which the rank holds any state. It goes to zero with the load; what stays on an idle node is a "
                "leak, and worth a report."
            ),
            unit=Unit.REQUESTS,
            lines=(Line(expr=summed("kvferry_rank_requests", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Sessions",
            description=(
                "Open sessions with ranks of the other tier, and those that have ended but whose writer may still write. Ending "
                "ones that stay keep bytes in quarantine: the runbook of KvferryQuarantineStuck."
            ),
            unit=Unit.NUMBER,
            lines=(
                Line(expr=summed("kvferry_sessions", *_RANK), legend=f"{_LEGEND}: open"),
                Line(expr=summed("kvferry_ending_sessions", *_RANK), legend=f"{_LEGEND}: ending"),
            ),
        ),
        Chart(
            title="Transfers not settled",
            description=(
                "Writes, receives and declines that the data plane has not ended. It follows the load; standing still above zero "
                "on an idle node: the data plane hangs."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=summed("kvferry_pending_transfers", *_RANK), legend=_LEGEND),),
        ),
    ),
)

_HOLDS: Final = Row(
    title="What they hold",
    charts=(
        Chart(
            title="Pages in use",
            description=(
                "Share of each rank's KV pool that is bound to tokens or reserved for what comes. Near 100 % while requests "
                "wait: the pool is the limit. The memory dashboard has it by group of layers."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=share(
                        summed("kvferry_pool_pages", *_RANK, "state", where='state!="free"'),
                        "state",
                        summed("kvferry_pool_pages", *_RANK),
                    ),
                    legend=f"{_LEGEND}: {{{{state}}}}",
                ),
            ),
            most=1.0,
        ),
        Chart(
            title="Ring in use",
            description=(
                "Unreleased bytes of each decode rank's ring, of its size; grants that wait for room count too, so it can be "
                "above 100 %. Above for long while credit wait grows: raise ring.capacity_bytes."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(summed("kvferry_ring_live_bytes", *_RANK), summed("kvferry_ring_capacity_bytes", *_RANK)),
                    legend=_LEGEND,
                ),
            ),
        ),
        Chart(
            title="Staging slots in use",
            description=(
                "Share of each prefill rank's staging slots. All in use for long: writes, or their releases, are slower than "
                "gathers; more of them (staging.num_slots) help only if bursts are the reason."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(
                        summed("kvferry_staging_slots", *_RANK, where='state="used"'),
                        summed("kvferry_staging_slots", *_RANK),
                    ),
                    legend=_LEGEND,
                ),
            ),
            most=1.0,
        ),
    ),
)

_PROCESSES: Final = Row(
    title="How its processes are",
    charts=(
        Chart(
            title="Memory of the processes",
            description=(
                "Resident bytes of each rank's process, shared ones included. Level under a steady load; one that climbs for "
                "hours is a leak, and worth a report."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=summed("kvferry_rank_resident_bytes", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Open files and threads",
            description=(
                "Of each rank's process. They grow with sessions, and fall when those end; climbing without new peers is a leak. "
                "Each session takes some 20 files of the limit."
            ),
            unit=Unit.NUMBER,
            lines=(
                Line(expr=summed("kvferry_rank_open_files", *_RANK), legend=f"{_LEGEND}: files"),
                Line(expr=summed("kvferry_rank_threads", *_RANK), legend=f"{_LEGEND}: threads"),
            ),
        ),
        Chart(
            title="Longest turns of the event loops",
            description=(
                "99.9th percentile of the turns of the event loops of a node's leader and ranks. Heartbeats and transfers of a "
                "process wait during a turn. If above 0.25 s, see the runbook of KvferryEventLoopStalls."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=quantile(0.999, "kvferry_loop_turn_seconds", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Proofs of being idle",
            description=(
                "Times since its start that a rank without requests has proven its invariants. It climbs by one a second on an "
                "idle rank, and stands still under load; an idle one that stands still holds something."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=summed("kvferry_rank_idle_checks", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Certificate: time left",
            description=(
                "Until the certificate that the node uses expires; after that no new connection is made. Files are read again "
                "when they change. No data: the node runs without TLS."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(
                    expr=f"min by (instance) ({selector('kvferry_certificate_expiry_timestamp_seconds')}) - time()",
                    legend="{{instance}}",
                ),
            ),
            fine=86400,
            bad=3600,
        ),
        Chart(
            title="Certificate files that cannot be used",
            description=(
                "1 while a node's certificate files have changed and cannot be used; it goes on with those before. Above zero "
                "for minutes: certificate_not_reloaded in its log says what is wrong."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=highest("kvferry_certificate_stale", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Calls and connections refused",
            description=(
                "Calls that the caller's certificate does not allow, and connections to control ports without a key. Should be "
                "zero: a name is missing in tls.peer_names or tls.client_names, or somebody tries doors."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_refused_calls_total", "instance", "method"), legend="{{instance}}: {{method}}"),
                Line(expr=per_second("kvferry_refused_connections_total", "instance"), legend="{{instance}}: connections"),
            ),
        ),
    ),
)

NODE: Final = Dashboard(
    name="node",
    title="kvferry: nodes",
    description=(
        "Single nodes: choose one or a few at the top. To be looked at when the overview shows that one of them is slow, full or "
        "not ready, or when an alert names it."
    ),
    rows=(_NODE, _RANKS, _HOLDS, _PROCESSES),
)
