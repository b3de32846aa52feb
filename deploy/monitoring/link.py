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
            title="Speed while busy, of the probe",
            description=(
                "Of each link of a prefill node: seconds that its writes should have taken by its probe, over those in which it "
                "was busy. N links that fill a card together show 1/N each. Single links below 20 %: that path, card or machine. "
                "All of one node, and fewer bytes than its card carries: its card. All at once: the network."
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
                "Bytes written on a link over the seconds in which it was busy. Compare with the probe beside it; short writes "
                "stay below it because each has a latency."
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
            title="Bandwidth of the probe",
            description=(
                "Of one large write when the link was attached, alone on it; of links to several decode nodes with the same "
                "ranks, the lowest. Links of one kind should be alike: one that is several times slower has another lane, "
                "another card or an older cable. transport.min_bandwidth_bytes_per_s refuses it."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=summed("kvferry_link_bandwidth_bytes_per_second", *_LINK, where=_OF_PREFILL), legend=_LEGEND),),
            columns=12,
        ),
        Chart(
            title="Latency of the probe",
            description=(
                "Of a small write when the link was attached; of links to several decode nodes with the same ranks, the highest. "
                "Microseconds over NVLink, shared memory and RDMA, tens to hundreds over TCP. A link that is far above its like "
                "is not on the way that you think."
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
            title="Share of time in use",
            description=(
                "Time in which at least one write was under way; links to several decode nodes with the same ranks are one. Near "
                "100 %: the link is the limit of what is asked of it; near zero: nothing waits for it, whatever its speed is."
            ),
            unit=Unit.SHARE,
            lines=(Line(expr=per_second("kvferry_link_busy_seconds_total", *_LINK), legend=_LEGEND),),
            most=1.0,
        ),
        Chart(
            title="Bytes written, by lane",
            description=(
                "Which ways the bytes take. A network lane (net) beside a faster one (shm, ipc, direct) on one machine says that "
                "some links have fallen back; see below."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=per_second("kvferry_link_written_bytes_total", "lane"), legend="{{lane}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Pairs of ranks, by lane",
            description=(
                "Prefill ranks and the numbers of the decode ranks that they write to, by what carries their bytes. Links to "
                "several decode nodes with the same ranks are one, so it need not change when a node joins or leaves. A lane "
                "that was not there before is worth a look at its bandwidth."
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
            title="Bytes of a write",
            description=(
                "Mean size of a bulk write. Far below chunk.piece_bytes: prompts are short, or many ranks share each chunk, and "
                "the latency of a write weighs more."
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
            title="Writes, and what they stand for",
            description=(
                "Bulk writes, and the descriptors beyond them that the same KV would have taken token by token, layer by layer. "
                "Avoided over writes is what staging is for: hundreds are ordinary; near 0 it costs and gives nothing."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_writes_total"), legend="writes"),
                Line(expr=per_second("kvferry_writes_avoided_total"), legend="avoided"),
            ),
        ),
        Chart(
            title="Seconds of a write",
            description=(
                "Median and 99th percentile of bulk writes, by prefill node. One node far above the others: its card or its way. "
                "They grow with the size of a write."
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
    title="What waits, and what goes wrong",
    charts=(
        Chart(
            title="Seconds until there was credit",
            description=(
                "What chunks that were ready waited until they could be gathered for bytes of the ring, by prefill node. Far "
                "above a write: the link is not the limit, the ring or the decode side is; raise ring.capacity_bytes, or look at "
                "scatter."
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
            title="Seconds from a write to its release",
            description=(
                "Until a grant came back released, scatter included, by prefill node. Far above scatter: acks are late, because "
                "the decode rank is busy or the registry plane is."
            ),
            unit=Unit.SECONDS,
            lines=(
                Line(expr=mean("kvferry_stage_seconds", "instance", where='stage="ack"'), legend="{{instance}}: ack"),
                Line(expr=mean("kvferry_stage_seconds", "instance", where='stage="scatter"'), legend="{{instance}}: scatter"),
            ),
        ),
        Chart(
            title="Slowest and fastest link, of the probe",
            description=(
                "Of each prefill rank, every link by itself, over two minutes of use: what the slowest and the fastest make of "
                "their probes. Slowest below 20 % and far below fastest: one link, which link_slow in the rank's log names. -1: "
                "none is in use."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(expr=lowest("kvferry_slowest_link_ratio", "instance", "rank"), legend="{{instance}} rank {{rank}}: slowest"),
                Line(expr=lowest("kvferry_fastest_link_ratio", "instance", "rank"), legend="{{instance}} rank {{rank}}: fastest"),
            ),
        ),
        Chart(
            title="Links that fell back",
            description=(
                "Links between processes of one machine that go over the network because a faster way is not possible, by decode "
                "node. Should be zero: transport_fell_back in the rank's log names the obstacle, the runbook of "
                "KvferryTransportFellBack what to do."
            ),
            unit=Unit.LINKS,
            lines=(Line(expr=summed("kvferry_links_fallen_back", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Chunks that arrived broken, and were sent again",
            description=(
                "Chunks whose digest did not fit, by decode node, and those that prefill nodes sent once more. Should be zero: "
                "memory, a network card or a cable is failing; the node that all of them have in common is the one."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_broken_chunks_total", "instance"), legend="{{instance}}: broken"),
                Line(expr=per_second("kvferry_resends_total", "instance"), legend="{{instance}}: sent again"),
            ),
        ),
        Chart(
            title="Control messages dropped, by reason",
            description=(
                "Messages between ranks that broke a rule. A few beside restarts and lost peers are ordinary; a steady rate is a "
                "peer of another build, or a stranger."
            ),
            unit=Unit.MESSAGES_PER_S,
            lines=(Line(expr=per_second("kvferry_dropped_messages_total", "role", "reason"), legend="{{role}}: {{reason}}"),),
        ),
        Chart(
            title="Watermark acks",
            description=(
                "Acks that decode nodes send and prefill nodes receive, heartbeats among them. Received well below sent: the "
                "registry plane loses or delays them, and writers wait for bytes that are free."
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
        "Links between prefill and decode ranks. To be looked at when KV moves slower than it should, when requests wait for "
        "credit, or when a network was changed."
    ),
    rows=(_SPEED, _USE, _WAITS),
)
