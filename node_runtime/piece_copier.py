"""Gather and scatter of pieces: a chunk's part of one route, between the pages of a request and contiguous bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from transfer.chunk import Chunk
from transfer.kernels import head_slice_copier
from transfer.kernels.copier import HeadSliceCopier
from transfer.kv_pool import KVPool
from transfer.layer_groups import GroupKind
from transfer.layout import DType, KVLayout, LayerKind, Route, Span, WireBuffer, wire_buffers

_CACHED_LAYOUTS = 256  # a few per route and layer group; each some 10 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCopy:
    """The part of a piece that lies in one group's pages.

    Args:
        pages: int64 [n], the pages that hold the tokens.
        buffers: What to move; tokens are counted from offset 0 of the first of these pages.
    """

    copier: HeadSliceCopier
    buffers: Sequence[WireBuffer]
    pages: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCopy:
    """One piece, ready to be copied on any thread."""

    parts: Sequence[GroupCopy]

    def gather(self, out: Tensor) -> None:
        for part in self.parts:
            part.copier.gather(part.pages, part.buffers, out)

    def scatter(self, source: Tensor) -> None:
        for part in self.parts:
            part.copier.scatter(part.pages, part.buffers, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupPiece:
    """What a piece has in one group, for any request: tokens counted from `first_page`'s start, pages relative to the chunk's."""

    group: int
    first_page: int
    num_pages: int
    buffers: Sequence[WireBuffer]


class PieceCopier:
    """Prepares the copies of one pool.

    Keeps a copier for each group, head slice and wire dtype it has met, and the buffers of pieces it has met: with tokens counted
    from the piece's first page, the chunks of all requests look alike, and laying out 32 layers took 0.6 ms of the owner's loop.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._copiers: dict[tuple[int, int, int, DType], HeadSliceCopier] = {}
        self._laid_out = lru_cache(maxsize=_CACHED_LAYOUTS)(self._lay_out)
        self._adopt(pool.layout)

    def prepare(
        self,
        layout: KVLayout,
        route: Route,
        chunk: Chunk,
        *,
        heads: Span,
        num_tokens: int,
        dtype: DType,
        tables: Sequence[Sequence[int]],
    ) -> PieceCopy:
        """A copy of the piece.

        Args:
            heads: The route's heads as this rank counts them.
            num_tokens: Tokens of the whole prompt.
            dtype: Element type on the wire.
            tables: The request's page table of each group, from token 0 on, up to the chunk's end at least.
        """
        if layout is not self._layout:
            self._adopt(layout)
        page_size = self._pool.page_size
        chunk_page = chunk.tokens.begin // page_size
        first_token = chunk_page * page_size
        tokens = Span(begin=chunk.tokens.begin - first_token, end=chunk.tokens.end - first_token)
        # The prompt's end decides what a window leaves out and when a state travels; farther away it would only keep equal chunks
        # apart.
        end_token = min(num_tokens - first_token, tokens.end + self._reach_tokens)
        parts: list[GroupCopy] = []
        for piece in self._laid_out(route, tokens, chunk.layers, end_token, dtype):
            group = self._pool.groups[piece.group]
            first = 0 if group.kind is GroupKind.STATE else chunk_page + piece.first_page
            pages = torch.tensor(tables[piece.group][first : first + piece.num_pages], dtype=torch.int64)
            copier = self._copier(piece.buffers[0].layer, heads, dtype)
            parts.append(GroupCopy(copier=copier, buffers=piece.buffers, pages=pages))
        return PieceCopy(parts=parts)

    def _copier(self, layer: int, heads: Span, dtype: DType) -> HeadSliceCopier:
        key = (self._pool.group_of(layer), heads.begin, heads.end, dtype)
        if key not in self._copiers:
            wire = self._layout.layers[layer].dtype or dtype
            self._copiers[key] = head_slice_copier(self._pool.part_of(layer), heads=heads, wire_dtype=wire)
        return self._copiers[key]

    def _adopt(self, layout: KVLayout) -> None:
        self._layout = layout
        self._reach_tokens = max(1 if spec.kind is LayerKind.RECURRENT_STATE else spec.window_tokens for spec in layout.layers)
        self._laid_out.cache_clear()

    def _lay_out(self, route: Route, tokens: Span, layers: Span, num_tokens: int, dtype: DType) -> Sequence[_GroupPiece]:
        by_group: dict[int, list[WireBuffer]] = {}
        for buffer in wire_buffers(self._layout, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=dtype):
            by_group.setdefault(self._pool.group_of(buffer.layer), []).append(buffer)
        return tuple(self._group_piece(group, buffers) for group, buffers in by_group.items())

    def _group_piece(self, group: int, buffers: Sequence[WireBuffer]) -> _GroupPiece:
        """A window may begin pages behind the chunk's first one, whose entries are no pages; all its layers begin alike."""
        page_size = self._pool.groups[group].page_size(self._pool.page_size)
        tokens = buffers[0].tokens
        first = tokens.begin // page_size
        moved = [
            replace(buffer, tokens=Span(begin=tokens.begin - first * page_size, end=tokens.end - first * page_size))
            for buffer in buffers
        ]
        return _GroupPiece(group=group, first_page=first, num_pages=-(-tokens.end // page_size) - first, buffers=moved)
