"""The dashboard of memory: the plan and what came of it, pools, rings, staging and the host tier."""

from __future__ import annotations

from typing import Final

from deploy.monitoring.charts import Chart, Dashboard, Line, Row, Unit
from deploy.monitoring.promql import change, highest, over, per_second, selector, share, summed

_RANK: Final = ("instance", "rank")
_LEGEND: Final = "{{instance}} rank {{rank}}"

# Rank by rank, before the highest is taken: nodes of a tier may differ, and so may their plans.
_REAL_OF_PLANNED: Final = over(
    selector("kvferry_memory_real_bytes"),
    f"({selector('kvferry_memory_planned_bytes')} > 0)",
)

_PLAN: Final = Row(
    title="Plan and reality",
    charts=(
        Chart(
            title="Planned, by line",
            description=(
                "Bytes of each line of the memory plan, on the fullest rank. With little left over, a longer prompt or larger "
                "batch can run out of memory."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=highest("kvferry_memory_planned_bytes", "role", "line"), legend="{{role}}: {{line}}"),),
            columns=12,
        ),
        Chart(
            title="Real / planned",
            description=(
                "Measured bytes of each line divided by its plan, on the rank furthest above it. Above 110 % and 256 MiB: "
                "alert KvferryMemoryAbovePlan, lower memory.static_fraction. Far below 100 %: room for a larger pool."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=f"max by (role, line) ({_REAL_OF_PLANNED})",
                    legend="{{role}}: {{line}}",
                ),
            ),
            columns=12,
            fine=1.05,
            bad=1.1,
        ),
    ),
)

_POOL: Final = Row(
    title="KV pools",
    charts=(
        Chart(
            title="Pages in use",
            description=(
                "Pages of each tier's pools by group of layers: bound to tokens, or reserved. Near 100 % on one tier while "
                "requests wait: add nodes, or enlarge the pool (pool.num_pages)."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=share(
                        summed("kvferry_pool_pages", "role", "group", "state", where='state!="free"'),
                        "state",
                        summed("kvferry_pool_pages", "role", "group"),
                    ),
                    legend="{{role}} {{group}}: {{state}}",
                ),
            ),
            columns=12,
            is_stacked=True,
        ),
        Chart(
            title="Free pages, by rank",
            description=(
                "Ranks of one node are equal. The lowest decides whether a request gets room. No free pages for long: "
                "requests queue."
            ),
            unit=Unit.PAGES,
            lines=(Line(expr=summed("kvferry_pool_pages", *_RANK, where='state="free"'), legend=_LEGEND),),
            columns=12,
        ),
        Chart(
            title="Requests waiting for pages",
            description=(
                "Requests that find too few free pages in their node's pool. Above zero for minutes, KvferryPoolFull fires: "
                "raise memory.static_fraction or pool.num_pages, or add nodes."
            ),
            unit=Unit.REQUESTS,
            lines=(Line(expr=summed("kvferry_requests_waiting_for_pages", "role", "instance"), legend="{{role}} {{instance}}"),),
            columns=12,
        ),
        Chart(
            title="Steps that ran out of memory",
            description=(
                "All requests of such a step failed, and KvferryOutOfMemory fires. The log names the settings to lower."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(
                Line(expr=per_second("kvferry_out_of_memory_steps_total", "role", "instance"), legend="{{role}} {{instance}}"),
            ),
            columns=12,
        ),
    ),
)

_RING: Final = Row(
    title="Rings and their watermarks",
    charts=(
        Chart(
            title="Ring in use",
            description=(
                "Unreleased bytes, including waiting grants, divided by the ring's size. Above 100 % for long while pieces "
                "wait for credit: raise ring.capacity_bytes, if scatter keeps up."
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
            title="Ring peak",
            description=(
                "Largest share of the ring granted at once since the rank started. 100 %: grants had to wait, or just filled "
                "it. Far below after a day of load: the ring can be smaller."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(summed("kvferry_ring_peak_bytes", *_RANK), summed("kvferry_ring_capacity_bytes", *_RANK)),
                    legend=_LEGEND,
                ),
            ),
            most=1.0,
        ),
        Chart(
            title="Open grants",
            description=(
                "Unreleased grants: requested ahead, written, or about to be scattered. Constant above zero without load: a "
                "stuck writer, see the watermark."
            ),
            unit=Unit.GRANTS,
            lines=(Line(expr=summed("kvferry_ring_live_grants", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Watermark lag",
            description=(
                "Distance from the watermark to the newest grant. Normally near the bytes in use. Far above: one old grant is "
                "stuck, and later ones are released around it."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=highest("kvferry_ring_watermark_lag_bytes", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Watermark stalled",
            description=(
                "Age of the oldest open grant, without quarantine. Up to the time of a chunk's computation is normal. Above a "
                "minute: see the runbook of KvferryWatermarkStalled."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=highest("kvferry_ring_watermark_stalled_seconds", *_RANK), legend=_LEGEND),),
            fine=30,
            bad=60,
        ),
        Chart(
            title="Watermark throughput",
            description=(
                "Bytes of the ring released per second. Zero with open grants: the watermark is stalled. It restarts at zero "
                "with the rank."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=change("kvferry_ring_watermark_position_bytes", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Quarantine",
            description=(
                "Bytes that the writer of an ended transfer can still write, divided by the ring's size. Short peaks follow "
                "aborts. If it stays, the writer is frozen or unreachable: see the runbook of KvferryQuarantineStuck."
            ),
            unit=Unit.SHARE,
            lines=(
                Line(
                    expr=over(summed("kvferry_ring_quarantined_bytes", *_RANK), summed("kvferry_ring_capacity_bytes", *_RANK)),
                    legend=_LEGEND,
                ),
            ),
            fine=0.01,
            bad=0.25,
        ),
        Chart(
            title="Staging slots in use",
            description=(
                "Share of each prefill rank's staging slots. All in use for long: writes are slower than gathers "
                "(link dashboard)."
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
        Chart(
            title="Largest piece of a chunk",
            description=(
                "Largest piece between two ranks, for all joined peers. The ring should hold two of them per writing prefill "
                "rank to overlap. A piece that exceeds the ring is refused at attach."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=highest("kvferry_largest_piece_bytes", "role", "instance"), legend="{{role}} {{instance}}"),),
        ),
    ),
)

_HOST: Final = Row(
    title="Host tier and processes",
    charts=(
        Chart(
            title="Host pages, by state",
            description=(
                "Pages of decode nodes' host pools. held: of running requests; cached: replaced if others need room. Only "
                "held pages: raise offload.host_ratio or offload.host_memory."
            ),
            unit=Unit.PAGES,
            lines=(Line(expr=summed("kvferry_host_pages", "group", "state"), legend="{{group}}: {{state}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Host memory full",
            description=(
                "Requests that found no room in host memory. They wait, or their pages are not kept. Should be near zero "
                "(offload dashboard)."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_host_full_total", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Process memory",
            description=(
                "Resident memory of the ranks, by node, including rings, staging memory and host pools in shared memory. "
                "Continuous growth is a leak."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=summed("kvferry_rank_resident_bytes", "role", "instance"), legend="{{role}} {{instance}}"),),
        ),
    ),
)

MEMORY: Final = Dashboard(
    name="memory",
    title="kvferry: memory",
    description=(
        "Memory of both tiers. Use it when requests wait for room, when a watermark stalls or quarantine grows, and before "
        "you change sizes."
    ),
    rows=(_PLAN, _POOL, _RING, _HOST),
)
