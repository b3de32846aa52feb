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
                "What the memory plan gives to each of its lines, on the fullest rank. What is left over is what kvferry plan "
                "prints as free: little of it, and a longer prompt or larger batch can run out."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=highest("kvferry_memory_planned_bytes", "role", "line"), legend="{{role}}: {{line}}"),),
            columns=12,
        ),
        Chart(
            title="Real, of what was planned",
            description=(
                "What each line came to where it was measured, of its plan, on the rank that is furthest above it. Above 110 % "
                "and by more than 256 MiB: the alert KvferryMemoryAbovePlan; lower memory.static_fraction by that much. Well "
                "below 100 %: there is room for a larger pool."
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
                "Pages of each tier's pools by group of layers: bound to tokens that are there, reserved for those that will "
                "come, of all. Near 100 % on one tier while requests wait: more of its nodes, or a larger pool (pool.num_pages)."
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
                "The pool of each rank. Ranks of one node are alike. The lowest one decides whether a request gets room; none "
                "free for long, and requests queue."
            ),
            unit=Unit.PAGES,
            lines=(Line(expr=summed("kvferry_pool_pages", *_RANK, where='state="free"'), legend=_LEGEND),),
            columns=12,
        ),
        Chart(
            title="Requests that wait for pages",
            description=(
                "Requests that find too few free pages in their node's own pool. If above zero for minutes, KvferryPoolFull "
                "fires. Raise memory.static_fraction or pool.num_pages, or add nodes of the tier."
            ),
            unit=Unit.REQUESTS,
            lines=(Line(expr=summed("kvferry_requests_waiting_for_pages", "role", "instance"), legend="{{role}} {{instance}}"),),
            columns=12,
        ),
        Chart(
            title="Steps without memory",
            description=(
                "Steps that failed because memory ran out, with all of their requests. KvferryOutOfMemory fires on any such "
                "step. The log names the settings to lower."
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
                "Unreleased bytes, of the ring's size; grants that wait for room count too. Above 100 % for long while chunks "
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
            title="Most of the ring in use, ever",
            description=(
                "The most that was granted at once since the rank began, of the ring. At 100 % grants had to wait, or just "
                "filled it; well below after a day of load: the ring can be smaller."
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
                "Grants that are not released: asked for ahead, written, or about to be scattered. It follows the load; standing "
                "still above zero: a stuck writer, see the watermark."
            ),
            unit=Unit.GRANTS,
            lines=(Line(expr=summed("kvferry_ring_live_grants", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Watermark: bytes behind",
            description=(
                "Positions between the watermark and the newest grant. Near the bytes in use in ordinary traffic; far above them "
                "one old grant is stuck, and what came after it is done and reused around it."
            ),
            unit=Unit.BYTES,
            lines=(Line(expr=highest("kvferry_ring_watermark_lag_bytes", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Watermark: standing still for",
            description=(
                "Seconds for which the oldest open grant has been the oldest, those in quarantine left out. As long as a chunk "
                "takes to compute is ordinary. Beyond a minute a writer is stuck: the runbook of KvferryWatermarkStalled."
            ),
            unit=Unit.SECONDS,
            lines=(Line(expr=highest("kvferry_ring_watermark_stalled_seconds", *_RANK), legend=_LEGEND),),
            fine=30,
            bad=60,
        ),
        Chart(
            title="Watermark: moved on",
            description=(
                "Bytes of the ring that are released in a second: what it turns over. Zero while grants are open is a watermark "
                "that stands still; it falls back to zero when a rank begins again."
            ),
            unit=Unit.BYTES_PER_S,
            lines=(Line(expr=change("kvferry_ring_watermark_position_bytes", *_RANK), legend=_LEGEND),),
        ),
        Chart(
            title="Quarantine",
            description=(
                "Bytes that the writer of an ended transfer may still write, of the ring. Above zero for an instant after "
                "aborts. What stays is a writer that is frozen or cut off: end that prefill node (the runbook of "
                "KvferryQuarantineStuck)."
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
                "Share of each prefill rank's staging slots that hold bytes on their way. All in use for long: writes, or their "
                "releases, are slower than gathers; see the link dashboard."
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
                "Most bytes of a chunk between two ranks, over all joined peers. The ring should hold two of them for each "
                "prefill rank that writes, or nothing overlaps; a peer with another one is refused at attach if the ring cannot "
                "hold it."
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
                "Pages of decode nodes' host pools: held ones belong to running requests, cached ones make room when others need "
                "it. Held alone near all: give more (offload.host_ratio, offload.host_memory). The offload dashboard has the "
                "rest."
            ),
            unit=Unit.PAGES,
            lines=(Line(expr=summed("kvferry_host_pages", "group", "state"), legend="{{group}}: {{state}}"),),
            is_stacked=True,
        ),
        Chart(
            title="Host memory full",
            description=(
                "Times that host memory had no room for a request, which then waits, or whose pages are not kept. Should be zero "
                "nearly always; see the offload dashboard."
            ),
            unit=Unit.TIMES_PER_S,
            lines=(Line(expr=per_second("kvferry_offload_host_full_total", "instance"), legend="{{instance}}"),),
        ),
        Chart(
            title="Memory of the processes",
            description=(
                "Resident bytes of the ranks' processes, by node, shared ones included: rings, staging and host pools on "
                "machines without GPUs are among them. A climb for hours is a leak."
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
        "What the memory of both tiers holds. To be looked at when requests wait for room, when a watermark stands still or "
        "quarantine grows, and before sizes are changed."
    ),
    rows=(_PLAN, _POOL, _RING, _HOST),
)
