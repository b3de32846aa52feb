"""Choose the size of the pieces of a request from the probe's measurements. Pure; derived in docs/adr/0019.

A piece of s bytes keeps a link of bandwidth b busy for s / b, and costs c besides: the link's latency and the work of both ends
for each piece. The link moves payload for (s / b) / (s / b + c) of the time. This is the model of Hockney ("The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994) with a processing cost added to the latency. For a
share of `EFFICIENCY` a piece needs c * b * EFFICIENCY / (1 - EFFICIENCY) bytes. Larger pieces would only fill the pipeline of
gather, write and scatter later.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final

from transfer.chunk import ChunkPlan, largest_wire_bytes
from transfer.instance import Instance, Link
from transfer.layout import DType, Route, routes, wire_dtype

CONTROL_COST_S: Final = {"cpu": 800e-6, "cuda": 400e-6}
"""Work of the busier end for one piece besides its bytes, by the device of the pools: CPU time of its process less that of the
copies (benchmark `pool_to_pool`, on two cores and on two H200). The protocol alone takes 200 us (benchmark `control`)."""

EFFICIENCY: Final = 0.9

MIN_PIECE_BYTES: Final = 1 << 20
"""Smaller pieces only cost: copies and writes have fixed costs that no probe measures."""

MAX_PIECE_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
"""By the device of the pools. Larger pieces gain nothing on a link, and a lone request waits for its own copies."""

PIECES_PER_RING: Final = 4
"""At least this many pieces fit a ring, because one is granted while another is written and a third is scattered."""


def piece_bytes_for(links: Iterable[Link], *, device_type: str, ring_bytes: int) -> int:
    """Return the size of the largest piece that uses every link well, in bytes, at least 1.

    Args:
        links: All measured links between the two instances. Without links, nothing is known of them.
        device_type: "cpu" or "cuda": device of the pools.
        ring_bytes: Size of the smallest ring.
    """
    per_second = EFFICIENCY / (1 - EFFICIENCY)
    wanted = max(
        (per_second * (link.latency_s + CONTROL_COST_S[device_type]) * link.bandwidth_bytes_per_s for link in links),
        default=MIN_PIECE_BYTES,
    )
    bounded = min(max(wanted, MIN_PIECE_BYTES), MAX_PIECE_BYTES[device_type])
    return max(1, min(int(bounded), ring_bytes // PIECES_PER_RING))


def largest_piece_bytes(prefill: Instance, decode: Instance, plan: ChunkPlan) -> int:
    """Return the most bytes of a chunk that one rank sends to another, between two instances that fit."""
    return largest_wire_bytes(plan, prefill.layout, _unlike_routes(prefill, decode), _wire(prefill, decode))


def plan_with_pieces(coarsest: ChunkPlan, prefill: Instance, decode: Instance, *, piece_bytes: int) -> ChunkPlan:
    """Return the coarsest plan without a piece above `piece_bytes`; one layer per group if no plan is that fine.

    Chunks are divided between layers only, because their tokens follow the computation. Groups are equally large. `coarsest` is
    the plan that may be made finer.
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


def token_layers_for(prefill: Instance, decode: Instance, *, piece_bytes: int) -> int:
    """Return `ChunkPlan.token_layers` with which no piece becomes larger than `piece_bytes`, for a model without states."""
    return piece_bytes // largest_piece_bytes(prefill, decode, ChunkPlan(chunk_tokens=1, layers_per_group=1))


def _wire(prefill: Instance, decode: Instance) -> DType:
    return wire_dtype(prefill.layout, prefill.shard, decode.shard)


def _unlike_routes(prefill: Instance, decode: Instance) -> list[Route]:
    """Return one of all routes with equally large pieces: their layers and number of heads decide the size."""
    every = routes(prefill.layout, prefill.shard, decode.shard)
    return list({(route.heads.count, route.layers, route.num_kv_heads): route for route in every}.values())
