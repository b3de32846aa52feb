"""The first dashboard to look at: does KV move at the speed of the links, who is the bottleneck, and what do users get."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import highest, mean, mean_per_second, over, per_second, quantile, summed

_DONE: Final = 'outcome="done"'
_OURS: Final = 'alertname=~"Kvferry.+"'
_FIRING: Final = f'{_OURS}, alertstate="firing"'
_ENDED: Final = 'role="decode", outcome!="aborted"'

_AT_A_GLANCE: Final = Row(
    title="At a glance",
    charts=(
        Chart(
            title="KV transferred",
            description=(
                "Bytes that prefill ranks write into rings of decode ranks. Zero while requests run: prompts come from the "
                "store, or transfers stall; see the row of bottlenecks."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_transferred_bytes_total", where='role="prefill"'), legend="written"),),
            columns=4,
            is_number=True,
        ),
        Chart(
            title="Link speed / probe",
            description=(
                "Time that the writes should take at the probes' speed, divided by the time that links were busy. 100 %: as "
                "fast as each link alone at attach. N links that fill a card show 1/N. Far below: see the link dashboard."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(per_second("kvferry_link_probe_seconds_total"), per_second("kvferry_link_busy_seconds_total")),
                    legend="speed / probe",
                ),
            ),
            columns=4,
            is_number=True,
            fine=0.5,
            bad=0.2,
        ),
        Chart(
            title="Requests done",
            description=("Requests that decode nodes have finished. Compare with the requests that clients send."),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_requests_total", where=_DONE), legend="done"),),
            columns=4,
            is_number=True,
        ),
        Chart(
            title="Requests failed or refused",
            description=(
                "Share of ended requests on decode nodes, without aborts by clients. Above zero for minutes: see the alerts "
                "KvferryRequestsFailing and KvferryRequestsRefused."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(
                        per_second("kvferry_requests_total", where='role="decode", outcome=~"failed|refused"'),
                        per_second("kvferry_requests_total", where=_ENDED),
                    ),
                    legend="failed or refused",
                ),
            ),
            columns=4,
            is_number=True,
            fine=0.001,
            bad=0.05,
        ),
        Chart(
            title="Nodes ready, not ready",
            description=(
                "Nodes that start or drain accept no requests. Not ready for longer than a start: see the node dashboard and "
                "the runbook of KvferryNodeNotServing."
            ),
            unit=Unit.NODES,
            lines=(
                Line(expr=summed("kvferry_node_state", where='state="ready"'), legend="ready"),
                Line(expr=summed("kvferry_node_state", where='state!="ready"'), legend="not ready"),
            ),
            columns=4,
            is_number=True,
        ),
        Chart(
            title="Alerts",
            description=("Firing alerts for the selected nodes. The last row names them. Each has a runbook."),
            unit=Unit.ALERTS,
            lines=(
                Line(
                    expr=f"{summed('ALERTS', where=_FIRING)} or vector(0)",
                    legend="firing",
                ),
            ),
            columns=4,
            is_number=True,
            fine=1,
            bad=2,
        ),
    ),
)

_SPEED: Final = Row(
    title="Does KV move at the speed of the link?",
    charts=(
        Chart(
            title="Bytes written and scattered",
            description=(
                "Bytes that prefill ranks write, and bytes that decode ranks copy into their pools. Written far above "
                "scattered all the time: bytes are resent after wrong digests."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_transferred_bytes_total", where='role="prefill"'), legend="written"),
                Line(expr=per_second("kvferry_transferred_bytes_total", where='role="decode"'), legend="scattered"),
            ),
        ),
        Chart(
            title="Speed while busy / probe",
            description=(
                "For each prefill node: speed of its links in use, relative to their probes. N links that fill a card show "
                "1/N, which is full speed: compare the bytes with the card. Below: other users of the network, or another "
                "path than at attach. Above 100 %: writes overlap, or the probe was slow; see the link dashboard."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(
                        per_second("kvferry_link_probe_seconds_total", "instance"),
                        per_second("kvferry_link_busy_seconds_total", "instance"),
                    ),
                    legend="{{instance}}",
                ),
            ),
            fine=0.5,
            bad=0.2,
        ),
        Chart(
            title="Transfer hidden by computation",
            description=(
                "Mean share of a request's transfer during the computation of its prompt. High is good. Near zero with long "
                "prompts: links are slower than prefill, or chunks are too large (chunk.chunk_tokens)."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=mean("kvferry_overlap_ratio", "instance"), legend="{{instance}}"),),
            most=1.0,
        ),
    ),
)

_BOTTLENECK: Final = Row(
    title="Who is the bottleneck?",
    charts=(
        Chart(
            title="Requests and chunks in each stage",
            description=(
                "Requests that wait for room, and the average number of pieces in each stage, counted at its end. Under "
                "growing load, the bottleneck grows first. queue: pool or limits of that tier. credit_wait: the ring is full, "
                "decode is behind. gather: prefill's copies. write: the link. ack, including scatter: decode's copies, or "
                "late acks."
            ),
            unit=Unit.AT_A_TIME,
            lines=(
                Line(expr=summed("kvferry_queued_requests", "role"), legend="{{role}} queue"),
                Line(expr=per_second("kvferry_stage_seconds_sum", "stage", where='stage!~"total|exposed"'), legend="{{stage}}"),
            ),
            columns=12,
        ),
        Chart(
            title="Engine utilisation",
            description=(
                "Share of time that the ranks' engines compute. Near 100 % on prefill nodes: add prefill nodes; on decode "
                "nodes: add decode nodes. Low on both while requests wait: see queues, credit_wait and pools."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=mean_per_second("kvferry_step_seconds_sum", "role", "instance"), legend="{{role}} {{instance}}"),),
            columns=12,
            most=1.0,
        ),
        Chart(
            title="Stage duration, mean",
            description=(
                "Mean time of a piece in each stage, and of a request's transfer: total, and exposed after the last computed "
                "chunk. A stage that grows without more load became slower."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=mean("kvferry_stage_seconds", "stage"), legend="{{stage}}"),),
        ),
        Chart(
            title="Stage duration, p99",
            description=(
                "Slowest hundredth of each stage. Far above the mean: single links or ranks are slow (link and node "
                "dashboards), or load comes in bursts."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=quantile(0.99, "kvferry_stage_seconds", "stage"), legend="{{stage}}"),),
        ),
        Chart(
            title="Queue time",
            description=(
                "Wait for room, also without success. Decode includes the wait for prefill, because room is requested shortly "
                "before prefill begins. Growing on both: decode has no room. On prefill only: add prefill nodes."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_queue_seconds", "role"), legend="{{role}}: p50"),
                Line(expr=quantile(0.99, "kvferry_queue_seconds", "role"), legend="{{role}}: p99"),
            ),
        ),
    ),
)

_REQUESTS: Final = Row(
    title="User latency and requests",
    charts=(
        Chart(
            title="Time to first token",
            description=(
                "From acceptance to the first token: queue, prefill and exposed transfer. Compare with your objective. If it "
                "grows, see the row of bottlenecks."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_time_to_first_token_seconds"), legend="p50"),
                Line(expr=quantile(0.9, "kvferry_time_to_first_token_seconds"), legend="p90"),
                Line(expr=quantile(0.99, "kvferry_time_to_first_token_seconds"), legend="p99"),
            ),
        ),
        Chart(
            title="Time per output token",
            description=(
                "Between two tokens of a request. Growing with the running requests: the decode engine is saturated. Add "
                "decode nodes, or lower limits.max_running_requests."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=quantile(0.5, "kvferry_time_per_output_token_seconds"), legend="p50"),
                Line(expr=quantile(0.9, "kvferry_time_per_output_token_seconds"), legend="p90"),
                Line(expr=quantile(0.99, "kvferry_time_per_output_token_seconds"), legend="p99"),
            ),
        ),
        Chart(
            title="Tokens",
            description=(
                "Tokens of accepted prompts on decode nodes, and generated tokens. Their ratio determines the nodes of each tier."
            ),
            unit=Unit.TOKENS_PER_S,
            lines=(
                Line(expr=per_second("kvferry_prompt_tokens_total", where='role="decode"'), legend="prompts"),
                Line(expr=per_second("kvferry_generated_tokens_total"), legend="generated"),
            ),
        ),
        Chart(
            title="Requests, by outcome",
            description=(
                "Requests that ended. done: success on a decode node; sent: success on a prefill node; aborted: by clients or "
                "operators; refused: no room in time, or impossible; failed: clients got an error."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_requests_total", "role", "outcome"), legend="{{role}}: {{outcome}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Requests waiting and running",
            description=(
                "Requests without room, and requests that are computed, transferred or generated. Waiting grows while running "
                "stays: a limit or a pool of that tier is full (memory dashboard)."
            ),
            unit=Unit.REQUESTS,
            lines=(
                Line(expr=summed("kvferry_queued_requests", "role"), legend="{{role}}: wait"),
                Line(expr=summed("kvferry_running_requests", "role"), legend="{{role}}: run"),
            ),
        ),
        Chart(
            title="Requests ended early, by reason",
            description=(
                "caller is normal, lost follows restarts of nodes. engine, data_loss and misfit need attention: see "
                "request_failed in the log."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_aborts_total", "role", "reason"), legend="{{role}}: {{reason}}"),),
            is_stacked=True,
        ),
    ),
)

_CLUSTER: Final = Row(
    title="Nodes and problems",
    charts=(
        Chart(
            title="Nodes, by state",
            description=(
                "Each node counts once. During a roll-out, nodes drain and start one by one. A node that stays in another "
                "state than ready accepts no requests."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=summed("kvferry_node_state", "role", "state"), legend="{{role}}: {{state}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Peers, by state",
            description=(
                "Pairs of nodes as each side sees them. lost or joining for minutes: a node is down, or two nodes cannot "
                "reach each other (node dashboard)."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=summed("kvferry_peers", "role", "state"), legend="{{role}}: {{state}}"),),
        ),
        Chart(
            title="Nodes, by version",
            description=("Two versions are normal during a roll-out. For hours: the roll-out is incomplete."),
            unit=Unit.NODES,
            lines=(Line(expr=summed("kvferry_build_info", "role", "version"), legend="{{role}}: {{version}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Retries, breakers and restarts",
            description=(
                "Retries on another prefill node, circuit breakers that opened, and the highest number of rank restarts of a "
                "node. Flat lines are normal. All growing: prefill nodes fail or restart."
            ),
            unit=Unit.NUMBER,
            lines=(
                Line(expr=per_second("kvferry_retries_total"), legend="retries a second"),
                Line(expr=per_second("kvferry_breaker_openings_total"), legend="breakers opened a second"),
                Line(expr=highest("kvferry_rank_restarts"), legend="rank restarts, maximum"),
            ),
            columns=12,
        ),
        Chart(
            title="Alerts, by name",
            description=(
                "Pending and firing alerts. No data: no problem, or Prometheus does not load rules/kvferry.yaml. Runbooks: "
                "docs/runbooks.md."
            ),
            unit=Unit.ALERTS,
            lines=(
                Line(
                    expr=summed("ALERTS", "alertname", "alertstate", where=_OURS),
                    legend="{{alertname}}: {{alertstate}}",
                ),
            ),
            columns=12,
            is_stacked=True,
        ),
    ),
)

OVERVIEW: Final = Dashboard(
    name="overview",
    title="kvferry: overview",
    description=(
        "Both tiers at a glance: speed of transfers, bottleneck, latency of users, problems. Continue with node, link, memory "
        "or offload."
    ),
    rows=(_AT_A_GLANCE, _SPEED, _BOTTLENECK, _REQUESTS, _CLUSTER),
)
