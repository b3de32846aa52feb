"""The dashboard of links: what each makes of its probe, which way its bytes take, and what goes wrong on it."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import lowest, mean, number, over, per_second, quantile, summed

_LINK: Final = ("instance", "prefill_rank", "decode_rank", "lane")
_LEGEND: Final = "{{instance}} {{prefill_rank}} to {{decode_rank}}, {{lane}}"
_OF_PREFILL: Final = 'role="prefill"'

_SPEED: Final = Row(
    title="Speed",
    charts=(
        Chart(
            title="Speed while busy / probe",
            description=(
                "For each link: time that its writes should take at its probe's speed, divided by its busy time. N links that "
                "fill a card show 1/N each. Single links below 20 %: their path. All of a node, below the card's rate: its "
                "card. All: the network. Above 100 %: writes overlap, also those to several decode nodes, while their "
                "expected times, each with the probe's latency, are added. Or copies use cuda_ipc: their busy time excludes the "
                "launch, which the probe includes. Or other processes slowed the probe at attach."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(
                        per_second("kvferry_link_probe_seconds_total", *_LINK),
                        per_second("kvferry_link_busy_seconds_total", *_LINK),
                    ),
                    legend=_LEGEND,
                ),
            ),
            columns=12,
            fine=0.5,
            bad=0.2,
        ),
        Chart(
            title="Bandwidth while busy",
            description=(
                "Bytes written, divided by the seconds in which the link was busy. Short writes stay below the probe because "
                "of their latency."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(
                Line(
                    expr=over(
                        per_second("kvferry_link_written_bytes_total", *_LINK),
                        per_second("kvferry_link_busy_seconds_total", *_LINK),
                    ),
                    legend=_LEGEND,
                ),
            ),
            columns=12,
        ),
        Chart(
            title="Probe bandwidth",
            description=(
                "One large write at attach, alone on the link; the lowest of links with the same ranks. Similar links should "
                "be equal. A slower one has another lane, card or cable; transport.min_bandwidth_bytes_per_s rejects it."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=summed("kvferry_link_bandwidth_bytes_per_second", *_LINK, where=_OF_PREFILL), legend=_LEGEND),),
            columns=12,
        ),
        Chart(
            title="Probe latency",
            description=(
                "A small write at attach; the highest of links with the same ranks. Microseconds over NVLink, shared memory "
                "and RDMA, tens to hundreds over TCP. A link far above similar ones takes another path than expected."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=summed("kvferry_link_latency_seconds", *_LINK, where=_OF_PREFILL), legend=_LEGEND),),
            columns=12,
        ),
    ),
)

_USE: Final = Row(
    title="Use",
    charts=(
        Chart(
            title="Link utilisation",
            description=(
                "Time with at least one write in progress, for all links with the same ranks. Near 100 %: the link is the "
                "limit. Near zero: its speed does not matter."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=per_second("kvferry_link_busy_seconds_total", *_LINK), legend=_LEGEND),),
            most=1.0,
        ),
        Chart(
            title="Bytes written, by lane",
            description=(
                "A network lane (net) beside a faster one (shm, ipc, direct) on one machine: some links fell back, see below."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_link_written_bytes_total", "lane"), legend="{{lane}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Pairs of ranks, by lane",
            description=(
                "Pairs of prefill rank and decode rank number, by lane. Links to several decode nodes with the same ranks "
                "count once. Check the bandwidth of a lane that is new."
            ),
            unit=Unit.LINKS,
            lines=(
                Line(
                    expr=number("kvferry_link_bandwidth_bytes_per_second", "lane", where=_OF_PREFILL),
                    legend="{{lane}}",
                ),
            ),
            is_stacked=True,
        ),
        Chart(
            title="Write size",
            description=(
                "Mean size of a bulk write. Far below chunk.piece_bytes: prompts are short, or many ranks share a chunk, and "
                "latency matters more."
            ),
            unit=Unit.BYTES,
            lines=(
                Line(
                    expr=over(
                        per_second("kvferry_transferred_bytes_total", "instance", where=_OF_PREFILL),
                        per_second("kvferry_writes_total", "instance"),
                    ),
                    legend="{{instance}}",
                ),
            ),
        ),
        Chart(
            title="Writes, and writes avoided",
            description=(
                "Bulk writes, and further descriptors that the same KV would need token by token and layer by layer. Ratios "
                "of hundreds are normal. Near 0, staging brings nothing."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_writes_total"), legend="writes"),
                Line(expr=per_second("kvferry_writes_avoided_total"), legend="avoided"),
            ),
        ),
        Chart(
            title="Write duration",
            description=(
                "Median and 99th percentile of bulk writes by prefill node. One node far above the others: its card or path. "
                "Larger writes take longer."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(
                    expr=quantile(0.5, "kvferry_stage_seconds", "instance", where='stage="write"'),
                    legend="{{instance}}: p50",
                ),
                Line(
                    expr=quantile(0.99, "kvferry_stage_seconds", "instance", where='stage="write"'),
                    legend="{{instance}}: p99",
                ),
            ),
        ),
    ),
)

_WAITS: Final = Row(
    title="Waits and errors",
    charts=(
        Chart(
            title="Wait for credit",
            description=(
                "Wait of ready pieces for bytes of the ring, by prefill node. Far above a write: the ring or the decode side "
                "is the limit. Raise ring.capacity_bytes, or check scatter."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=mean("kvferry_stage_seconds", "instance", where='stage="credit_wait"'), legend="{{instance}}: mean"),
                Line(
                    expr=quantile(0.99, "kvferry_stage_seconds", "instance", where='stage="credit_wait"'),
                    legend="{{instance}}: p99",
                ),
            ),
        ),
        Chart(
            title="Write to release",
            description=(
                "Time until a grant is released, including scatter, by prefill node. Far above scatter: acks are late, "
                "because the decode rank or the registry plane is busy."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=mean("kvferry_stage_seconds", "instance", where='stage="ack"'), legend="{{instance}}: ack"),
                Line(expr=mean("kvferry_stage_seconds", "instance", where='stage="scatter"'), legend="{{instance}}: scatter"),
            ),
        ),
        Chart(
            title="Slowest and fastest link / probe",
            description=(
                "Each prefill rank's slowest and fastest link in use over two minutes, relative to their probes. Slowest "
                "below 20 % and far below fastest: one link, see link_slow in the log. -1: none is in use."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(expr=lowest("kvferry_slowest_link_ratio", "instance", "rank"), legend="{{instance}} rank {{rank}}: slowest"),
                Line(expr=lowest("kvferry_fastest_link_ratio", "instance", "rank"), legend="{{instance}} rank {{rank}}: fastest"),
            ),
        ),
        Chart(
            title="Links on a slower transport",
            description=(
                "Links on a slower transport than expected, by decode node. Should be zero: see transport_fell_back in the "
                "rank's log and the runbook of KvferryTransportFellBack."
            ),
            unit=Unit.LINKS,
            lines=(Line(expr=summed("kvferry_links_fallen_back", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Digest errors and resends",
            description=(
                "Pieces with a wrong digest, by decode node, and pieces that prefill nodes sent again. Should be zero: "
                "memory, a network card or a cable of the common node is failing."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_broken_chunks_total", "instance"), legend="{{instance}}: wrong digest"),
                Line(expr=per_second("kvferry_resends_total", "instance"), legend="{{instance}}: resent"),
            ),
        ),
        Chart(
            title="Control messages dropped, by reason",
            description=(
                "Messages that broke a rule. A few at restarts and lost peers are normal. A steady rate: a peer of another "
                "build, or an attack."
            ),
            unit=Unit.MESSAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_dropped_messages_total", "role", "reason"), legend="{{role}}: {{reason}}"),),
        ),
        Chart(
            title="Watermark acks",
            description=(
                "Acks that decode nodes send and prefill nodes receive, including heartbeats. Received far below sent: the "
                "registry plane loses or delays them, and writers wait for free bytes."
            ),
            unit=Unit.MESSAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_watermark_acks_total", "role"), legend="{{role}}"),),
        ),
    ),
)

LINK: Final = Dashboard(
    name="link",
    title="kvferry: links",
    description=(
        "Links between prefill and decode ranks. Use it when transfers are slow, when requests wait for credit, or after "
        "changes of the network."
    ),
    rows=(_SPEED, _USE, _WAITS),
)
