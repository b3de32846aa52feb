"""How the requests for one decode instance are cut, once the links to it have been measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfer.chunk import ChunkPlan
from transfer.config import ChunkConfig
from transfer.instance import Instance, Link
from transfer.memory.node_plan import chunk_plan
from transfer.piece_size import largest_piece_bytes, piece_bytes_for, plan_with_pieces


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
