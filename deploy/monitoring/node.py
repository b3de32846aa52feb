"""The dashboard of single nodes: what each does, what its ranks hold, and how its processes are."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import highest, over, per_second, quantile, selector, share, summed

_RANK: Final = ("instance", "rank")
_LEGEND: Final = "{{instance}} rank {{rank}}"

_NODE: Final = Row(
    title="Node",
    charts=(
        Chart(
            title="State",
            description=(
                "1 for the state of a node. starting for longer than its weights need, or draining without an end: see "
                "/readyz and the log."
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
                "Nodes of the other tier as this node sees them. lost or joining for minutes on this node only: the network "
                "between the two. On all nodes: that peer is down."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=summed("kvferry_peers", "instance", "state"), legend="{{instance}}: {{state}}"),),
        ),
        Chart(
            title="Process uptime",
            description=(
                "It falls to zero with each start. A sawtooth is a node that restarts repeatedly: see the runbook of "
                "KvferryNodeCrashLooping."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=f"max by (instance) (time() - {selector('kvferry_start_time_seconds')})", legend="{{instance}}"),),
        ),
        Chart(
            title="Rank restarts",
            description=(
                "Restarts of the ranks since the node started. A step is a rank that died or hung: see the ranks' last log "
                "lines. After restart.max_restarts the node exits."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=highest("kvferry_rank_restarts", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Requests waiting and running",
            description=(
                "Requests without room, and requests that are computed, transferred or generated. One node far above the "
                "others: clients prefer it, or it is slower."
            ),
            unit=Unit.REQUESTS,
            lines=(
                Line(expr=summed("kvferry_queued_requests", "instance"), legend="{{instance}}: wait"),
                Line(expr=summed("kvferry_running_requests", "instance"), legend="{{instance}}: run"),
            ),
        ),
        Chart(
            title="Running requests / limit",
            description=(
                "Relative to limits.max_running_requests of each node. At 100 % other requests wait even if the pool has "
                "room: raise it if pool and time per token allow, or add nodes."
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
                "Requests that ended on this node. Failures on one prefill node only: its fault, and its breaker opens. On "
                "all: look for a common cause."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_requests_total", "instance", "outcome"), legend="{{instance}}: {{outcome}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Prefill nodes in discovery",
            description=(
                "Prefill nodes that each decode node finds; for a prefill node that registers itself, 1 while registered. "
                "Different values for minutes: a node cannot read the source."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=highest("kvferry_discovery_addresses", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Discovery errors",
            description=(
                "Failed reads of the file, the DNS name or etcd, and rejected entries. Known nodes stay; new nodes are not "
                "joined. The log has the reason (discovery_failed)."
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
            title="Open circuit breakers",
            description=(
                "Prefill nodes whose circuit breaker is open (no requests) or half-open (one request tests it). Above zero "
                "for minutes: see that prefill node."
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
    title="Ranks",
    charts=(
        Chart(
            title="Engine utilisation",
            description=(
                "For each rank. A rank below the others of its node waits for them; one at 100 % delays them. All near 100 %: "
                "the node is saturated."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=per_second("kvferry_step_seconds_sum", *_RANK), legend=_LEGEND),),
            most=1.0,
        ),
        Chart(
            title="Step duration",
            description=(
                "Median and 99th percentile by node. On decode nodes, a step is one token of every request and grows with the "
                "running requests; on prefill nodes, with chunk.chunk_tokens."
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
                "Bytes per second of each rank. Ranks of one node should be equal: one that lags has a slower link, or shares "
                "its card."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_transferred_bytes_total", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Requests with state on a rank",
            description=("Zero on an idle node. A remaining value is a leak: report it."),
            unit=Unit.REQUESTS,
            lines=(Line(expr=summed("kvferry_rank_requests", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Sessions",
            description=(
                "Open sessions with ranks of the other tier, and ended ones whose writer can still write. Ending ones that "
                "stay keep bytes in quarantine: see the runbook of KvferryQuarantineStuck."
            ),
            unit=Unit.NUMBER,
            lines=(
                Line(expr=summed("kvferry_sessions", *_RANK), legend=f"{_LEGEND}: open"),
                Line(expr=summed("kvferry_ending_sessions", *_RANK), legend=f"{_LEGEND}: ending"),
            ),
        ),
        Chart(
            title="Transfers in progress",
            description=(
                "Writes and receives that the data plane has not completed. Constant above zero on an idle node: the data "
                "plane hangs."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=summed("kvferry_pending_transfers", *_RANK), legend=_LEGEND),),
        ),
    ),
)

_HOLDS: Final = Row(
    title="Memory",
    charts=(
        Chart(
            title="Pages in use",
            description=(
                "Share of each rank's KV pool that is bound to tokens or reserved. Near 100 % while requests wait: the pool "
                "is the limit. By group of layers: memory dashboard."
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
                "Unreleased bytes of each decode rank's ring, divided by its size. Waiting grants count, so it can exceed 100 "
                "%. Above for long while credit_wait grows: raise ring.capacity_bytes."
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
                "Share of each prefill rank's staging slots. All in use for long: writes are slower than gathers. "
                "More slots (staging.num_slots) help with bursts only."
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
    title="Processes",
    charts=(
        Chart(
            title="Process memory",
            description=(
                "Resident memory of each rank's process, including shared memory. Continuous growth under a steady load is a "
                "leak: report it."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=summed("kvferry_rank_resident_bytes", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Open files and threads",
            description=(
                "Of each rank's process. They grow with sessions (some 20 files each) and fall at their end. Growth without "
                "new peers is a leak."
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
                "99.9th percentile of the turns of a node's event loops. Heartbeats and transfers of a process wait during a "
                "turn. Above 0.25 s: see the runbook of KvferryEventLoopStalls."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=quantile(0.999, "kvferry_loop_turn_seconds", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Idle self-checks",
            description=(
                "Invariant checks of a rank without requests, since its start. It grows by one a second on an idle rank. If "
                "it does not, the rank still holds something."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=summed("kvferry_rank_idle_checks", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Certificate: time left",
            description=(
                "Time until the node's certificate expires. After that no new connection is possible. Changed files are read "
                "again. No data: the node runs without TLS."
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
            title="Unusable certificate files",
            description=(
                "1 while a node's certificate files have changed and cannot be used; it keeps the old ones. See "
                "certificate_not_reloaded in its log."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=highest("kvferry_certificate_stale", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Calls and connections refused",
            description=(
                "Calls that the caller's certificate does not allow, and connections to control ports without a key. Should "
                "be zero: a name is missing in tls.peer_names or tls.client_names, or an unknown process connects."
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
        "Single nodes: choose them at the top. Use it when the overview or an alert shows a node that is slow, full or not ready."
    ),
    rows=(_NODE, _RANKS, _HOLDS, _PROCESSES),
)
