"""Pieces for tests of the copies."""

from __future__ import annotations

from collections.abc import Mapping

from transfer.chunk import Chunk, ChunkPlan
from transfer.layout import DType, KVLayout, Route, wire_bytes
from transfer.piece import Piece, RankRequest


def piece_of(
    layout: KVLayout,
    route: Route,
    chunk: Chunk,
    *,
    num_tokens: int,
    dtype: DType,
    scales: Mapping[tuple[int, bool], float] | None = None,
) -> Piece:
    """The chunk's piece on that route, of request "a"."""
    request = RankRequest(
        request_id="a",
        layout=layout,
        plan=ChunkPlan(chunk_tokens=num_tokens),
        wire_dtype=dtype,
        num_tokens=num_tokens,
        start_token=0,
        routes=(),
        digest="",
        scales=scales,
    )
    own = route.own_tokens(chunk.tokens)
    num_bytes = wire_bytes(layout, route, tokens=own, layers=chunk.layers, num_tokens=route.own_count(num_tokens), dtype=dtype)
    return Piece(request=request, route=route, session=1, chunk=chunk, num_bytes=num_bytes)
