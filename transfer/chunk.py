"""Cutting a request into chunks: both sides call the same function, so boundaries are never sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, Route, Span, wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A token range x layer range of one request that moves as a unit; knows nothing of pages."""

    index: int
    tokens: Span
    layers: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How requests are cut: agreed at attach, the same on both sides.

    Args:
        chunk_tokens: Tokens per chunk. Boundaries lie on multiples of it, counted from token 0 of the prompt.
        layers_per_group: Layers per chunk; 0 for all layers in one chunk.
    """

    chunk_tokens: int
    layers_per_group: int = 0

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise LayoutError(f"chunk_tokens is {self.chunk_tokens}; it must be at least 1")
        if self.layers_per_group < 0:
            raise LayoutError(f"layers_per_group is {self.layers_per_group}; it must be 0 (all layers) or more")


MAX_CHUNKS: Final = 1 << 15
"""Chunks of one request. To prepare one costs each rank some 30 us on its loop, and the plan of a decode rank is its peer's."""


def check_num_chunks(plan: ChunkPlan, *, num_tokens: int, num_layers: int, start_token: int = 0) -> None:
    """Refuse a plan that cuts tokens [start_token, num_tokens) into more chunks than a rank can prepare at once.

    Raises:
        LayoutError: There are more than `MAX_CHUNKS`; the numbers are named.
    """
    num_ranges = -(-num_tokens // plan.chunk_tokens) - start_token // plan.chunk_tokens
    num_groups = -(-num_layers // (plan.layers_per_group or num_layers))
    if num_ranges * num_groups > MAX_CHUNKS:
        raise LayoutError(
            f"{num_tokens - start_token} tokens in chunks of {plan.chunk_tokens} tokens and {plan.layers_per_group or 'all'} "
            f"layers are {num_ranges * num_groups} chunks; a request can have {MAX_CHUNKS}: raise chunk.chunk_tokens, "
            "chunk.piece_bytes or chunk.layers_per_group of the prefill node"
        )


def split_into_chunks(plan: ChunkPlan, *, num_tokens: int, num_layers: int, start_token: int = 0) -> tuple[Chunk, ...]:
    """Cut tokens [start_token, num_tokens) x all layers into chunks, in the order in which prefill computes them.

    Every (token, layer) lies in exactly one chunk; `Chunk.index` counts from 0.

    Raises:
        LayoutError: The token range is empty or negative, or there are no layers.
    """
    return _split(plan, num_tokens, num_layers, start_token)


@lru_cache(maxsize=32)  # of one request every part of a rank asks, and many requests are equally long
def _split(plan: ChunkPlan, num_tokens: int, num_layers: int, start_token: int) -> tuple[Chunk, ...]:
    if not 0 <= start_token < num_tokens:
        raise LayoutError(f"start_token is {start_token}, num_tokens is {num_tokens}; need 0 <= start_token < num_tokens")
    if num_layers < 1:
        raise LayoutError(f"num_layers is {num_layers}; it must be at least 1")
    group = plan.layers_per_group or num_layers
    chunks: list[Chunk] = []
    begin = start_token
    while begin < num_tokens:
        end = min(num_tokens, (begin // plan.chunk_tokens + 1) * plan.chunk_tokens)
        for first in range(0, num_layers, group):
            layers = Span(begin=first, end=min(num_layers, first + group))
            chunks.append(Chunk(index=len(chunks), tokens=Span(begin=begin, end=end), layers=layers))
        begin = end
    return tuple(chunks)


def pieces_of(
    chunks: Iterable[Chunk], layout: KVLayout, route: Route, *, num_tokens: int, dtype: DType
) -> Iterator[tuple[Chunk, int]]:
    """The chunks of which something travels on `route`, each with that payload in bytes. Both sides count with this.

    Args:
        num_tokens: Tokens of the whole prompt.
        dtype: Element type on the wire.
    """
    for chunk in chunks:
        size = wire_bytes(layout, route, tokens=chunk.tokens, layers=chunk.layers, num_tokens=num_tokens, dtype=dtype)
        if size:
            yield chunk, size


def pieces_of_request(
    plan: ChunkPlan, layout: KVLayout, route: Route, *, num_tokens: int, start_token: int, dtype: DType
) -> tuple[tuple[Chunk, int], ...]:
    """`pieces_of` the chunks of tokens [start_token, num_tokens)."""
    return _pieces(plan, layout, route, num_tokens, start_token, dtype)


@lru_cache(maxsize=64)
def _pieces(
    plan: ChunkPlan, layout: KVLayout, route: Route, num_tokens: int, start_token: int, dtype: DType
) -> tuple[tuple[Chunk, int], ...]:
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=layout.num_layers, start_token=start_token)
    return tuple(pieces_of(chunks, layout, route, num_tokens=num_tokens, dtype=dtype))


def largest_wire_bytes(plan: ChunkPlan, layout: KVLayout, routes: Iterable[Route], dtype: DType) -> int:
    """Payload of the largest piece that any request can have on one of `routes`, in bytes; 0 without routes.

    Ring and staging slots must hold it.

    Args:
        dtype: Element type on the wire.
    """
    # A prompt of one full chunk: every later chunk of a longer prompt has the same pieces, or smaller ones behind a window.
    chunks = split_into_chunks(plan, num_tokens=plan.chunk_tokens, num_layers=layout.num_layers)
    sizes = (size for route in routes for _, size in pieces_of(chunks, layout, route, num_tokens=plan.chunk_tokens, dtype=dtype))
    return max(sizes, default=0)
