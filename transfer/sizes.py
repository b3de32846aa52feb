"""Sizes that follow from the configuration: chunk plans, staging slots, rings, and the chunk plan for one decode instance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from transfer.chunk import ChunkPlan, largest_wire_bytes
from transfer.config import ChunkConfig, RingConfig, StagingConfig
from transfer.errors import MemoryPlanError
from transfer.instance import Instance, Link
from transfer.layout import KVLayout, LayerKind, Shard, routes
from transfer.piece_size import MIN_PIECE_BYTES, largest_piece_bytes, piece_bytes_for, plan_with_pieces, token_layers_for
from transfer.transport.base import REGION_ALIGNMENT_BYTES

HOST_RING_BYTES: Final = 64 << 20
GPU_STAGING_BYTES: Final = 1536 << 20
GPU_STAGING_PART: Final = 64
"""By default the staging slots of a rank together take at most this fraction of a GPU: one in 64."""
SHORT_CHUNK_TOKENS: Final = 128
"""Tokens per chunk in the plan for the shortest prompts."""
GPU_RING_BYTES: Final = 2 << 30
GPU_RING_PART: Final = 32
"""By default a ring takes at most this fraction of a GPU: one in 32."""


def chunk_plan(chunk: ChunkConfig) -> ChunkPlan:
    """Return the coarsest way in which the node divides prompts. Memory is sized by it."""
    return ChunkPlan(chunk_tokens=chunk.chunk_tokens, layers_per_group=chunk.layers_per_group or 0)


def finest_chunk_plan(chunk: ChunkConfig) -> ChunkPlan:
    """Return the finest way in which the node divides prompts. A decode node without room for its chunks has room for none."""
    layers = chunk.layers_per_group
    return ChunkPlan(chunk_tokens=chunk.chunk_tokens, layers_per_group=1 if layers is None else layers)


def staging_slot_bytes(
    chunk: ChunkConfig, staging: StagingConfig, layout: KVLayout, shard: Shard, device_bytes: int, *, device: str
) -> int:
    """Return the size of a staging slot: as configured, or room for this rank's whole share of a chunk.

    On a GPU, a slot can be smaller than that share: pieces then have fewer layers, and never less than one.

    Args:
        device_bytes, device: As in `ring_capacity_bytes`.

    Raises:
        MemoryPlanError: `staging.slot_bytes` is smaller than the smallest pieces.
    """
    mine = [route for route in routes(layout, shard, shard) if route.prefill_rank == shard.rank]
    dtype = shard.pool_dtype(layout)
    least, most = (largest_wire_bytes(plan, layout, mine, dtype) for plan in (finest_chunk_plan(chunk), chunk_plan(chunk)))
    size = most if staging.slot_bytes is None else staging.slot_bytes
    if size < least:
        what = "one layer" if chunk.layers_per_group is None else f"{chunk.layers_per_group or 'all'} layers"
        raise MemoryPlanError(
            f"staging.slot_bytes is {size}; the smallest piece ({chunk.chunk_tokens} tokens, {what}) has up to {least} bytes on "
            "this rank: raise staging.slot_bytes, or lower chunk.chunk_tokens"
        )
    if staging.slot_bytes is None and device == "cuda" and device_bytes:
        size = min(most, max(least, min(GPU_STAGING_BYTES, device_bytes // GPU_STAGING_PART) // staging.num_slots))
    return -(-size // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


def ring_capacity_bytes(ring: RingConfig, device_bytes: int, *, device: str) -> int:
    """Return the size of a rank's ring: as configured, or the size that the device has room for.

    A piece stays in the ring from its grant until its release is known: 2 to 3 ms between two GPUs, in which an NVLink carries 1
    GiB. So 2 GiB keep it busy (docs/adr/0019).

    Args:
        device_bytes: Usable size of the rank's device; 0, or ignored, in host memory.
        device: Device of the rank's computation, as the setting `device`.
    """
    if ring.capacity_bytes is not None:
        return ring.capacity_bytes
    if device == "cpu" or not device_bytes:  # an engine may keep its pool on the host, whatever it computes on
        return HOST_RING_BYTES
    return min(GPU_RING_BYTES, device_bytes // GPU_RING_PART // REGION_ALIGNMENT_BYTES * REGION_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The division of requests for one decode instance.

    Args:
        plan: How requests are divided.
        largest_piece_bytes: Maximum bytes of a piece that one rank sends to another, over all plans.
        short_plans: Plans with smaller chunks, in ascending order, for prompts whose tokens to send lie within one such chunk.
            Their layer groups have more layers. Empty if `plan` itself gives shorter chunks more layers.
    """

    plan: ChunkPlan
    largest_piece_bytes: int
    short_plans: tuple[ChunkPlan, ...] = ()

    def plan_of(self, num_tokens: int, start_token: int = 0) -> ChunkPlan:
        """Return the plan for tokens [start_token, num_tokens) of a prompt."""
        last = num_tokens - 1
        return next(
            (plan for plan in self.short_plans if start_token // plan.chunk_tokens == last // plan.chunk_tokens), self.plan
        )


def choose_cut(
    chunk: ChunkConfig,
    own: Instance,
    decode: Instance,
    links: Sequence[Link],
    *,
    ring_bytes: int,
    slot_bytes: int,
    device: str,
    min_layer_groups: int = 1,
) -> Cut:
    """Choose the plan by `chunk.layers_per_group`, or as coarse as `chunk.piece_bytes` allows, or as is good for the links.

    Args:
        own: The prefill instance.
        links: All links to the decode instance.
        ring_bytes: Size of its smallest ring.
        slot_bytes: Size of the smallest staging slot for its pieces; 0 if none goes through staging memory.
        device: Device of the prefill ranks' computation, as the setting `device`.
        min_layer_groups: Minimum number of layer groups of a full chunk, if the size of pieces follows from the links.
    """
    plan = chunk_plan(chunk)
    short_plans: tuple[ChunkPlan, ...] = ()
    if chunk.layers_per_group is None:
        wanted = chunk.piece_bytes
        if wanted is None:
            wanted = piece_bytes_for(links, device_type=device, ring_bytes=ring_bytes)
            wanted = min(wanted, max(MIN_PIECE_BYTES, largest_piece_bytes(own, decode, plan) // min_layer_groups))
        piece_bytes = min(wanted, ring_bytes, slot_bytes or ring_bytes)
        plan = plan_with_pieces(plan, own, decode, piece_bytes=piece_bytes)
        if plan.layers_per_group and "token_layers" in decode.capabilities and not _has_states(own.layout):
            plan = replace(plan, token_layers=token_layers_for(own, decode, piece_bytes=piece_bytes))
        elif plan.layers_per_group:
            short_plans = tuple(
                plan_with_pieces(ChunkPlan(chunk_tokens=tokens), own, decode, piece_bytes=piece_bytes)
                for tokens in _powers_of_two(SHORT_CHUNK_TOKENS, plan.chunk_tokens)
            )
    largest = max(largest_piece_bytes(own, decode, one) for one in (plan, *short_plans))
    return Cut(plan=plan, largest_piece_bytes=largest, short_plans=short_plans)


def _has_states(layout: KVLayout) -> bool:
    """Return whether some layers have states, whose bytes do not depend on the number of tokens."""
    return any(spec.kind is LayerKind.RECURRENT_STATE for spec in layout.layers)


def _powers_of_two(begin: int, end: int) -> Iterator[int]:
    while begin < end:
        yield begin
        begin *= 2
