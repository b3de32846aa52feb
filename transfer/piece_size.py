"""How large the pieces of a request should be, from what the probe said of its links. Pure; derived in docs/adr/0019.

A piece of s bytes keeps a link of bandwidth b busy for s / b, and costs c beside that: the link's latency and what the two ends
do for each piece. The link moves payload for (s / b) / (s / b + c) of the time, which is the model of Hockney ("The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994) with a processing cost added to the latency. For
a share of `EFFICIENCY` a piece needs c * b * EFFICIENCY / (1 - EFFICIENCY) bytes. More would only make the pipeline of gather,
write and scatter fill later.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final

from transfer.chunk import ChunkPlan, largest_wire_bytes
from transfer.instance import Instance, Link
from transfer.layout import DType, Route, routes, wire_dtype

CONTROL_COST_S: Final = {"cpu": 800e-6, "cuda": 400e-6}
"""What the busier end does for one piece beside its bytes, by the device of the pools: CPU time of its process less that of the
copies (benchmark `pool_to_pool`, on two cores and on two H200). The protocol alone takes 200 us (benchmark `control`)."""

EFFICIENCY: Final = 0.9

MIN_PIECE_BYTES: Final = 1 << 20
"""Smaller pieces only cost: copies and writes have fixed costs of their own that no probe sees."""

MAX_PIECE_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
"""By the device of the pools: beyond them a link gains nothing any more, and a lone request waits for its own copies."""

PIECES_PER_RING: Final = 4
"""So many pieces fit a ring at least, for one is granted while another is written and a third is scattered."""


def piece_bytes_for(links: Iterable[Link], *, device_type: str, ring_bytes: int) -> int:
    """How large the largest piece should be, so that every link is used well.

    Args:
        links: All links between the two instances, as measured; none: nothing is known of them.
        device_type: "cpu" or "cuda": where the pools lie.
        ring_bytes: Size of the smallest ring.

    Returns:
        Bytes, at least 1.
    """
    per_second = EFFICIENCY / (1 - EFFICIENCY)
    wanted = max(
        (per_second * (link.latency_s + CONTROL_COST_S[device_type]) * link.bandwidth_bytes_per_s for link in links),
        default=MIN_PIECE_BYTES,
    )
    bounded = min(max(wanted, MIN_PIECE_BYTES), MAX_PIECE_BYTES[device_type])
    return max(1, min(int(bounded), ring_bytes // PIECES_PER_RING))


def largest_piece_bytes(prefill: Instance, decode: Instance, plan: ChunkPlan) -> int:
    """Most bytes of a chunk that one rank sends to another, between two instances that fit."""
    return largest_wire_bytes(plan, prefill.layout, _unlike_routes(prefill, decode), _wire(prefill, decode))


def plan_with_pieces(coarsest: ChunkPlan, prefill: Instance, decode: Instance, *, piece_bytes: int) -> ChunkPlan:
    """The coarsest plan of which no piece is above `piece_bytes`, or of one layer a group where none is so fine.

    Chunks are cut between layers only, for their tokens follow the computation. Groups are made equally large.

    Args:
        coarsest: The plan that may be made finer.
    """
    layout, found, dtype = prefill.layout, _unlike_routes(prefill, decode), _wire(prefill, decode)
    most_layers = coarsest.layers_per_group or layout.num_layers

    def plan_of(num_groups: int) -> ChunkPlan:
        layers = -(-most_layers // num_groups)
        return ChunkPlan(chunk_tokens=coarsest.chunk_tokens, layers_per_group=0 if layers >= layout.num_layers else layers)

    counts = range(1, most_layers + 1)
    first = bisect.bisect_left(
        counts, True, key=lambda count: largest_wire_bytes(plan_of(count), layout, found, dtype) <= piece_bytes
    )
    return plan_of(counts[min(first, most_layers - 1)])


def _wire(prefill: Instance, decode: Instance) -> DType:
    return wire_dtype(prefill.layout, prefill.shard, decode.shard)


def _unlike_routes(prefill: Instance, decode: Instance) -> list[Route]:
    """One of all routes whose pieces are equally large: which layers it has, and how many heads of them, says it all."""
    every = routes(prefill.layout, prefill.shard, decode.shard)
    return list({(route.heads.count, route.layers, route.num_kv_heads): route for route in every}.values())
