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
            title="KV moved",
            description=(
                "Bytes that prefill ranks write into rings of decode ranks. Zero while requests run: prompts come from the "
                "store, or nothing moves; see the row of bottlenecks."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_transferred_bytes_total", where='role="prefill"'), legend="written"),),
            columns=4,
            is_number=True,
        ),
        Chart(
            title="Speed of the links, of their probes",
            description=(
                "Seconds that the writes should have taken by the links' probes, over those in which the links were busy: 100 % "
                "is as fast as when each was probed, alone. N links that fill a card together show 1/N. Far below that: the link "
                "dashboard says which one."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(per_second("kvferry_link_probe_seconds_total"), per_second("kvferry_link_busy_seconds_total")),
                    legend="of the probe",
                ),
            ),
            columns=4,
            is_number=True,
            fine=0.5,
            bad=0.2,
        ),
        Chart(
            title="Requests done",
            description=(
                "Requests that decode nodes have finished. Compare with what clients send; the row of requests says what became "
                "of the others."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_requests_total", where=_DONE), legend="done"),),
            columns=4,
            is_number=True,
        ),
        Chart(
            title="Requests failed or refused",
            description=(
                "Share of the requests that decode nodes have ended, those that clients gave up left out. Above zero for "
                "minutes: the alerts KvferryRequestsFailing and KvferryRequestsRefused tell them apart."
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
            title="Nodes ready, and not",
            description=(
                "Nodes by whether they take requests: starting and draining ones do not. Not ready for longer than a "
                "start takes: the node dashboard, and the runbook of KvferryNodeNotServing."
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
            description=(
                "Alerts that fire now on what is looked at; the row at the end names them. Each has a runbook, which says what "
                "it means and what to do."
            ),
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
                "What prefill ranks write, and what of it decode ranks have put into their pools. Written well above scattered, "
                "all the time: bytes are sent again because they arrive broken."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_transferred_bytes_total", where='role="prefill"'), legend="written"),
                Line(expr=per_second("kvferry_transferred_bytes_total", where='role="decode"'), legend="scattered"),
            ),
        ),
        Chart(
            title="Speed while busy, of the probe",
            description=(
                "Of each prefill node: how fast its links were while they were in use, against their probes, which each had its "
                "card alone. N links that fill a card together show 1/N, which is link speed: compare the bytes with the card. "
                "Below that: something else uses the network, or the transport is not what it was at attach."
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
            title="Transfer hidden behind computing",
            description=(
                "Mean share of a request's transfer that took place while the rest of its prompt was still computed. High is "
                "good: users wait for what is not hidden. Near zero with long prompts: links are slower than prefill, or chunks "
                "too large (chunk.chunk_tokens)."
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
                "Requests that wait for room now, and how many chunks of KV were in a stage at a time, on average, counted when "
                "they leave it. Under growing load the bottleneck grows first. Queues: that tier's pool or limits. Credit wait: "
                "the ring is full, decode is behind. Gather: prefill's copies. Write: the link. Ack, which includes scatter: "
                "decode's copies, or acks that come late."
            ),
            unit=Unit.AT_A_TIME,
            lines=(
                Line(expr=summed("kvferry_queued_requests", "role"), legend="{{role}} queue"),
                Line(expr=per_second("kvferry_stage_seconds_sum", "stage", where='stage!~"total|exposed"'), legend="{{stage}}"),
            ),
            columns=12,
        ),
        Chart(
            title="Engines' share of time",
            description=(
                "Share of time that the ranks' engines compute. Near 100 % on prefill nodes: computing prompts is the "
                "bottleneck, and more prefill nodes help; on decode nodes: generating is. Both low while requests wait: look at "
                "queues, credit wait and pools."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=mean_per_second("kvferry_step_seconds_sum", "role", "instance"), legend="{{role}} {{instance}}"),),
            columns=12,
            most=1.0,
        ),
        Chart(
            title="Seconds of a stage, mean",
            description=(
                "Mean time of one part of a chunk in each stage, and of a request's whole transfer (total), of which exposed is "
                "what came after its last chunk was computed. A stage that grows and has no more to do got slower."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=mean("kvferry_stage_seconds", "stage"), legend="{{stage}}"),),
        ),
        Chart(
            title="Seconds of a stage, 99th percentile",
            description=(
                "The slowest hundredth, stage by stage. Far above the mean: single links or ranks are slow, which the link and "
                "node dashboards tell apart; or bursts of load."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=quantile(0.99, "kvferry_stage_seconds", "stage"), legend="{{stage}}"),),
        ),
        Chart(
            title="Seconds in a queue",
            description=(
                "What requests waited for room, or until they were given up without, by tier. Decode includes what prefill lets "
                "them wait, for room is asked for when prefill is about to begin. Growing on both: decode has no room. On "
                "prefill alone: too few prefill nodes."
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
    title="What users get",
    charts=(
        Chart(
            title="Time to first token",
            description=(
                "From acceptance to the first token: queue, prefill, and the transfer as far as it is not hidden. What you have "
                "promised is a line across this chart. Grows alone: see the row of bottlenecks."
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
                "Between two tokens of a request. Grows with the requests that run at once: the decode engine is full; more "
                "decode nodes, or fewer requests at once (limits.max_running_requests)."
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
                "Tokens of prompts that were accepted, on decode nodes, and tokens that were generated. Their proportion says "
                "how many nodes each tier needs."
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
                "Requests that ended: done is a decode node's good end, sent a prefill node's. Aborted: clients went away. "
                "Refused: no room in time, or they can never be served. Failed: their clients saw an error."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_requests_total", "role", "outcome"), legend="{{role}}: {{outcome}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Requests that wait and that run",
            description=(
                "Requests without room yet, and those that are computed, moved or generated. Waiting grows while running stays: "
                "a limit or a pool is full on that tier; see pools on the memory dashboard."
            ),
            unit=Unit.REQUESTS,
            lines=(
                Line(expr=summed("kvferry_queued_requests", "role"), legend="{{role}}: wait"),
                Line(expr=summed("kvferry_running_requests", "role"), legend="{{role}}: run"),
            ),
        ),
        Chart(
            title="Requests that were not finished, by reason",
            description=(
                "Why requests ended early. Caller is ordinary, lost comes with restarts of nodes. Engine, data_loss and misfit "
                "are in the log as request_failed, and want a look."
            ),
            unit=Unit.REQUESTS_PER_S,
            lines=(Line(expr=per_second("kvferry_aborts_total", "role", "reason"), legend="{{role}}: {{reason}}"),),
            is_stacked=True,
        ),
    ),
)

_CLUSTER: Final = Row(
    title="The nodes, and what is wrong with them",
    charts=(
        Chart(
            title="Nodes, by state",
            description=(
                "Each node counts once. During a roll-out nodes drain and start one after the other; a node that stays in "
                "another state than ready takes no requests."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=summed("kvferry_node_state", "role", "state"), legend="{{role}}: {{state}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Peers, by state",
            description=(
                "Pairs of nodes as each side sees them. Lost or joining for minutes: a node is gone, or the network between two "
                "is cut; the node dashboard shows who misses whom."
            ),
            unit=Unit.NUMBER,
            lines=(Line(expr=summed("kvferry_peers", "role", "state"), legend="{{role}}: {{state}}"),),
        ),
        Chart(
            title="Nodes, by version",
            description=(
                "What runs. Two versions are ordinary during a roll-out, which works with both at once; two for hours: the "
                "roll-out stands still."
            ),
            unit=Unit.NODES,
            lines=(Line(expr=summed("kvferry_build_info", "role", "version"), legend="{{role}}: {{version}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Other tries, breakers and restarts",
            description=(
                "Requests tried on another prefill node, circuit breakers that opened, and the most restarts of ranks of any "
                "node since it began. All flat is the normal state; together they tell that prefill nodes come and go."
            ),
            unit=Unit.NUMBER,
            lines=(
                Line(expr=per_second("kvferry_retries_total"), legend="other tries a second"),
                Line(expr=per_second("kvferry_breaker_openings_total"), legend="breakers opened a second"),
                Line(expr=highest("kvferry_rank_restarts"), legend="most restarts of a node's ranks"),
            ),
            columns=12,
        ),
        Chart(
            title="Alerts, by name",
            description=(
                "Alerts that are pending (wrong, but not for long enough) or firing. No data: nothing is wrong, or Prometheus "
                "does not load rules/kvferry.yaml. Their runbooks are in docs/runbooks.md."
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
        "Both tiers at a glance, for the person on call: does KV move at the speed of the links, which stage is the bottleneck, "
        "what do users get, and what is wrong. Then: node, link, memory or offload."
    ),
    rows=(_AT_A_GLANCE, _SPEED, _BOTTLENECK, _REQUESTS, _CLUSTER),
)
