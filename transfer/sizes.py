"""Sizes that follow from the configuration: chunk plans, staging slots, rings, and the chunk plan for one decode instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transfer.chunk import ChunkPlan, largest_wire_bytes
from transfer.config import ChunkConfig, RingConfig, StagingConfig
from transfer.errors import MemoryPlanError
from transfer.instance import Instance, Link
from transfer.layout import KVLayout, Shard, routes
from transfer.piece_size import largest_piece_bytes, piece_bytes_for, plan_with_pieces
from transfer.transport.base import REGION_ALIGNMENT_BYTES

HOST_RING_BYTES: Final = 64 << 20
GPU_RING_BYTES: Final = 2 << 30
GPU_RING_PART: Final = 32
"""At most so many-th part of a GPU is its ring by default."""


def chunk_plan(chunk: ChunkConfig) -> ChunkPlan:
    """The coarsest way in which the node cuts prompts: what memory is sized by."""
    return ChunkPlan(chunk_tokens=chunk.chunk_tokens, layers_per_group=chunk.layers_per_group or 0)


def finest_chunk_plan(chunk: ChunkConfig) -> ChunkPlan:
    """The finest way in which the node cuts prompts: a decode node that has no room for its chunks has room for none."""
    layers = chunk.layers_per_group
    return ChunkPlan(chunk_tokens=chunk.chunk_tokens, layers_per_group=1 if layers is None else layers)


def staging_slot_bytes(chunk: ChunkConfig, staging: StagingConfig, layout: KVLayout, shard: Shard) -> int:
    """Size of a staging slot: room for the largest grant, which is this rank's whole share of a chunk.

    Raises:
        MemoryPlanError: `staging.slot_bytes` is smaller than that.
    """
    mine = [route for route in routes(layout, shard, shard) if route.prefill_rank == shard.rank]
    most = largest_wire_bytes(chunk_plan(chunk), layout, mine, shard.pool_dtype(layout))
    asked = staging.slot_bytes
    if asked is not None and asked < most:
        raise MemoryPlanError(
            f"staging.slot_bytes is {asked}; a chunk of {chunk.chunk_tokens} tokens has up to {most} bytes here: "
            "raise it, or lower chunk.chunk_tokens"
        )
    return -(-(most if asked is None else asked) // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


def ring_capacity_bytes(ring: RingConfig, device_bytes: int, *, device: str) -> int:
    """Size of a rank's ring: as set, or what the device has room for.

    A piece stays in the ring from its grant until its release is heard of, for 2 to 3 ms between two GPUs, in which an NVLink
    carries 1 GiB: 2 GiB keep it busy (docs/adr/0019).

    Args:
        device_bytes: Size of the rank's device, as far as it is counted on; 0, or of no matter, in host memory.
        device: What the rank computes on, as the setting `device`.
    """
    if ring.capacity_bytes is not None:
        return ring.capacity_bytes
    if device == "cpu" or not device_bytes:  # an engine may keep its pool on the host, whatever it computes on
        return HOST_RING_BYTES
    return min(GPU_RING_BYTES, device_bytes // GPU_RING_PART // REGION_ALIGNMENT_BYTES * REGION_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Args:
    plan: How requests are cut.
    largest_piece_bytes: Most bytes of a chunk that one rank sends to another.
    """

    plan: ChunkPlan
    largest_piece_bytes: int


def choose_cut(
    chunk: ChunkConfig, own: Instance, decode: Instance, links: Sequence[Link], ring_bytes: int, *, device: str
) -> Cut:
    """As `chunk.layers_per_group` says, or as coarse as `chunk.piece_bytes` allows, or as is good for the links.

    Args:
        own: The prefill instance.
        links: All links to the decode instance.
        ring_bytes: Size of its smallest ring.
        device: What the prefill ranks compute on, as the setting `device`.
    """
    plan = chunk_plan(chunk)
    if chunk.layers_per_group is None:
        wanted = chunk.piece_bytes
        if wanted is None:
            wanted = piece_bytes_for(links, device_type=device, ring_bytes=ring_bytes)
        plan = plan_with_pieces(plan, own, decode, piece_bytes=min(wanted, ring_bytes))
    return Cut(plan=plan, largest_piece_bytes=largest_piece_bytes(own, decode, plan))
