"""Gather and scatter of pieces: a chunk's part of one route, between the pages of a request and contiguous bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from node_runtime.request_tables import DeviceTable, RequestTables
from transfer.chunk import Chunk
from transfer.kernels import CopyPlan, Digest, HeadSliceCopier, WireMemory, add_digest, head_slice_copier
from transfer.kv_pool import KVPool
from transfer.layer_groups import GroupKind
from transfer.layout import DType, KVLayout, LayerKind, Route, Span, WireBuffer, wire_buffers

Scales = frozenset[tuple[tuple[int, bool], float]]

_CACHED_PIECES = 1024  # a few per route, head slice and layer group; each some 20 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCopy:
    """The part of a piece that lies in one group's pages.

    Args:
        plan: What to move; tokens are counted from offset 0 of the page that entry `first_page` names.
        table: The request's page table or a part of it: int64 [n] in host memory, or kept on the pool's device.
        first_page: The entry of the table to begin with.
    """

    plan: CopyPlan
    table: Tensor | DeviceTable
    first_page: int

    @property
    def pages(self) -> Tensor:
        """int64 [n] on the pool's device, for the current stream."""
        return self.table if isinstance(self.table, Tensor) else self.table.use()


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCopy:
    """One piece, ready to be copied on any thread; to be kept until the copy has run.

    Args:
        parts: One for each group that the piece has layers of.
        num_wire_bytes: Bytes of the piece.
        can_digest: Whether the parts together digest it; otherwise that is one more pass over the wire.
    """

    parts: Sequence[GroupCopy]
    num_wire_bytes: int
    can_digest: bool

    def gather(self, out: WireMemory, digest: Digest | None = None) -> None:
        """From the pages into the first bytes of `out`, see `CopyPlan.gather`; the digest is of all bytes of the piece."""
        inside = digest if self.can_digest else None
        for part in self.parts:
            part.plan.gather(part.pages, out, first_page=part.first_page, digest=inside)
        if digest is not None and inside is None:
            add_digest(digest, out, self.num_wire_bytes)

    def scatter(self, source: WireMemory, digest: Digest | None = None) -> None:
        """From the first bytes of `source` into the pages, see `CopyPlan.scatter`; the digest is of all bytes of the piece."""
        inside = digest if self.can_digest else None
        if digest is not None and inside is None:
            add_digest(digest, source, self.num_wire_bytes)
        for part in self.parts:
            part.plan.scatter(part.pages, source, first_page=part.first_page, digest=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupPiece:
    """What a piece has in one group, for any request: tokens counted from `first_page`'s start, pages relative to the chunk's."""

    group: int
    first_page: int
    plan: CopyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A piece for any request; see `PieceCopy`."""

    groups: Sequence[_GroupPiece]
    num_wire_bytes: int
    can_digest: bool


class PieceCopier:
    """Prepares the copies of one pool.

    Keeps a copier for each group, head slice and wire dtype it has met, and the plans of pieces it has met: with tokens counted
    from the piece's first page, the chunks of all requests look alike, and laying out 32 layers took 0.6 ms of the owner's loop.

    Args:
        pool: Where the pages are.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._copiers: dict[tuple[int, Span, DType, Scales], HeadSliceCopier] = {}
        self._device_tables: Sequence[RequestTables] = ()
        if pool.device.type == "cuda":
            self._device_tables = [RequestTables(pool.device, num_pages) for num_pages in pool.num_pages]
        self._planned = lru_cache(maxsize=_CACHED_PIECES)(self._plan)
        self._adopt(pool.layout)

    def prepare(
        self,
        layout: KVLayout,
        route: Route,
        chunk: Chunk,
        *,
        request_id: str,
        heads: Span,
        num_tokens: int,
        dtype: DType,
        tables: Sequence[Sequence[int]],
        scales: Mapping[tuple[int, bool], float] | None = None,
    ) -> PieceCopy:
        """A copy of the piece.

        With a pool on a GPU the request's page tables are kept there, and what is new in them is queued, not waited for.

        Args:
            request_id: The request; the entries that its tables have had stay what they are, until `forget`.
            heads: The route's heads as this rank counts them.
            num_tokens: Tokens of the whole prompt.
            dtype: Element type on the wire.
            tables: The request's page table of each group, from token 0 on, up to the chunk's end at least.
            scales: By (layer, is_v), see `HeadSliceCopier`.
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
        piece = self._planned(route, tokens, chunk.layers, end_token, dtype, heads, frozenset((scales or {}).items()))
        parts: list[GroupCopy] = []
        for part in piece.groups:
            first = 0 if self._pool.groups[part.group].kind is GroupKind.STATE else chunk_page + part.first_page
            end, table = first + part.plan.num_pages, tables[part.group]
            if self._device_tables:
                kept = self._device_tables[part.group].cover(request_id, table, first, end)
                parts.append(GroupCopy(plan=part.plan, table=kept, first_page=first))
            else:
                parts.append(GroupCopy(plan=part.plan, table=torch.tensor(table[first:end], dtype=torch.int64), first_page=0))
        return PieceCopy(parts=parts, num_wire_bytes=piece.num_wire_bytes, can_digest=piece.can_digest)

    def forget(self, request_id: str) -> None:
        """The request's pages are given back, or it is over: drop what is kept of its tables. Does nothing twice."""
        for kept in self._device_tables:
            kept.forget(request_id)

    def _copier(self, layer: int, heads: Span, dtype: DType, scales: Scales) -> HeadSliceCopier:
        key = (self._pool.group_of(layer), heads, dtype, scales)
        if key not in self._copiers:
            wire = self._layout.layers[layer].dtype or dtype
            pool = self._pool.part_of(layer)
            self._copiers[key] = head_slice_copier(pool, heads=heads, wire_dtype=wire, scales=dict(scales))
        return self._copiers[key]

    def _adopt(self, layout: KVLayout) -> None:
        self._layout = layout
        self._reach_tokens = max(1 if spec.kind is LayerKind.RECURRENT_STATE else spec.window_tokens for spec in layout.layers)
        self._planned.cache_clear()

    def _plan(
        self, route: Route, tokens: Span, layers: Span, num_tokens: int, dtype: DType, heads: Span, scales: Scales
    ) -> _Piece:
        by_group: dict[int, list[WireBuffer]] = {}
        for buffer in wire_buffers(self._layout, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=dtype):
            by_group.setdefault(self._pool.group_of(buffer.layer), []).append(buffer)
        groups = tuple(
            self._group_piece(group, buffers, lambda layer: self._copier(layer, heads, dtype, scales))
            for group, buffers in by_group.items()
        )
        num_wire_bytes = max((part.plan.num_wire_bytes for part in groups), default=0)
        is_gapless = sum(part.plan.num_moved_bytes for part in groups) == num_wire_bytes
        can_digest = is_gapless and all(part.plan.can_digest for part in groups)
        return _Piece(groups=groups, num_wire_bytes=num_wire_bytes, can_digest=can_digest)

    def _group_piece(self, group: int, buffers: Sequence[WireBuffer], copier_of: Callable[[int], HeadSliceCopier]) -> _GroupPiece:
        """A window may begin pages behind the chunk's first one, whose entries are no pages; all its layers begin alike."""
        page_size = self._pool.groups[group].page_size(self._pool.page_size)
        tokens = buffers[0].tokens
        first = tokens.begin // page_size
        moved = [
            replace(buffer, tokens=Span(begin=tokens.begin - first * page_size, end=tokens.end - first * page_size))
            for buffer in buffers
        ]
        plan = copier_of(moved[0].layer).plan(moved)
        return _GroupPiece(group=group, first_page=first, plan=plan)
