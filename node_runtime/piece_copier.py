"""Gather and scatter of pieces: a chunk's part of one route, between the pages of a request and contiguous bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from node_runtime.request_tables import DeviceTable, RequestTables
from transfer.chunk import Chunk, ChunkPlan, pieces_of, split_into_chunks
from transfer.kernels import (
    CopyPlan,
    Digest,
    HeadSliceCopier,
    WireMemory,
    add_digest,
    compile_add_digest,
    head_slice_copier,
    is_add_digest_compiled,
)
from transfer.kv_pool import KVPool
from transfer.layer_groups import GroupKind
from transfer.layout import DType, KVLayout, LayerKind, Route, Span, WireBuffer, wire_buffers

Scales = frozenset[tuple[tuple[int, bool], float]]

_CACHED_PIECES = 1024  # a few per route, head slice and layer group; each some 20 KB
_TAILS = (
    0,
    1,
    2,
    4,
    8,
)  # tokens of a last chunk: kernels differ by the powers of two, to 16 bytes, that wire offsets are multiples of


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
class _GroupPiece:
    """What a piece has in one group, for any request: tokens counted from `first_page`'s start, pages relative to the chunk's."""

    group: int
    first_page: int
    plan: CopyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecePlan:
    """A piece for any request.

    Args:
        groups: One for each group that the piece has layers of.
        num_wire_bytes: Bytes of the piece.
        can_digest: Whether the groups' plans together digest it; otherwise that is one more pass over the wire.
        device: Of the pool.
    """

    groups: Sequence[_GroupPiece]
    num_wire_bytes: int
    can_digest: bool
    device: torch.device

    def is_ready(self, wire: WireMemory, *, is_gather: bool, has_digest: bool) -> bool:
        inside = has_digest and self.can_digest
        if has_digest and not inside and not is_add_digest_compiled(self.device, wire, self.num_wire_bytes):
            return False
        return all(part.plan.is_compiled(wire, has_digest=inside, is_gather=is_gather) for part in self.groups)

    def make_ready(self, wire: WireMemory, *, is_gather: bool, has_digest: bool) -> None:
        inside = has_digest and self.can_digest
        if has_digest and not inside:
            compile_add_digest(self.device, wire, self.num_wire_bytes)
        for part in self.groups:
            part.plan.compile(wire, has_digest=inside, is_gather=is_gather)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCopy:
    """One piece, to be copied on any thread; to be kept until the copy has run.

    Args:
        parts: One for each group that the piece has layers of.
        plan: The piece for any request.
    """

    parts: Sequence[GroupCopy]
    plan: PiecePlan

    @property
    def num_wire_bytes(self) -> int:
        return self.plan.num_wire_bytes

    def is_ready(self, wire: WireMemory, *, is_gather: bool, has_digest: bool = True) -> bool:
        """Whether a copy from or to this wire would only be queued. On a GPU the first of its kind compiles kernels, for seconds.

        Args:
            is_gather: Whether the wire would be what `gather` fills, or what `scatter` reads.
        """
        return self.plan.is_ready(wire, is_gather=is_gather, has_digest=has_digest)

    def make_ready(self, wire: WireMemory, *, is_gather: bool, has_digest: bool = True) -> None:
        """Do what is missing for `is_ready`, without a copy: on any thread, while other pieces are copied; nothing twice."""
        self.plan.make_ready(wire, is_gather=is_gather, has_digest=has_digest)

    def gather(self, out: WireMemory, digest: Digest | None = None) -> None:
        """From the pages into the first bytes of `out`, see `CopyPlan.gather`; the digest is of all bytes of the piece."""
        inside = digest if self.plan.can_digest else None
        for part in self.parts:
            part.plan.gather(part.pages, out, first_page=part.first_page, digest=inside)
        if digest is not None and inside is None:
            add_digest(digest, out, self.plan.num_wire_bytes)

    def scatter(self, source: WireMemory, digest: Digest | None = None) -> None:
        """From the first bytes of `source` into the pages, see `CopyPlan.scatter`; the digest is of all bytes of the piece."""
        inside = digest if self.plan.can_digest else None
        if digest is not None and inside is None:
            add_digest(digest, source, self.plan.num_wire_bytes)
        for part in self.parts:
            part.plan.scatter(part.pages, source, first_page=part.first_page, digest=inside)


@dataclass(frozen=True, slots=True)
class _AnyWire:
    """Stands for the wires with an alignment, in bytes."""

    alignment: int
    num_bytes: int

    def data_ptr(self) -> int:
        return self.alignment

    def numel(self) -> int:
        return self.num_bytes


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
        chunk_page = chunk.tokens.begin // self._pool.page_size
        piece = self._piece(route, chunk, heads=heads, num_tokens=num_tokens, dtype=dtype, scales=scales)
        parts: list[GroupCopy] = []
        for part in piece.groups:
            first = 0 if self._pool.groups[part.group].kind is GroupKind.STATE else chunk_page + part.first_page
            end, table = first + part.plan.num_pages, tables[part.group]
            if self._device_tables:
                kept = self._device_tables[part.group].cover(request_id, table, first, end)
                parts.append(GroupCopy(plan=part.plan, table=kept, first_page=first))
            else:
                parts.append(GroupCopy(plan=part.plan, table=torch.tensor(table[first:end], dtype=torch.int64), first_page=0))
        return PieceCopy(parts=parts, plan=piece)

    def warm(
        self,
        layout: KVLayout,
        route: Route,
        plan: ChunkPlan,
        *,
        heads: Span,
        dtype: DType,
        is_gather: bool,
        scales: Mapping[tuple[int, bool], float] | None = None,
        wire_alignment: int = 16,
    ) -> None:
        """Compile and load the kernels of every piece that the route can have, so that no first request waits for them.

        On any thread: it shares nothing with `prepare` but the kernels, and launches nothing. Does little where
        the kernels are known, or the pool is in host memory.

        Args:
            plan: How requests are cut.
            is_gather: Whether this end gathers.
            wire_alignment: What the wires' addresses are multiples of, in bytes; those on less may still have to be compiled.

        See `prepare` for the others.
        """
        copier = PieceCopier(self._pool)
        copier._adopt(layout)
        for tail in _TAILS:
            num_tokens = plan.chunk_tokens + tail
            chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=layout.num_layers)
            for chunk, _ in pieces_of(chunks, layout, route, num_tokens=num_tokens, dtype=dtype):
                piece = copier._piece(route, chunk, heads=heads, num_tokens=num_tokens, dtype=dtype, scales=scales)
                piece.make_ready(_AnyWire(wire_alignment, piece.num_wire_bytes), is_gather=is_gather, has_digest=True)

    def forget(self, request_id: str) -> None:
        """The request's pages are given back, or it is over: drop what is kept of its tables. Does nothing twice."""
        for kept in self._device_tables:
            kept.forget(request_id)

    def _piece(
        self,
        route: Route,
        chunk: Chunk,
        *,
        heads: Span,
        num_tokens: int,
        dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None,
    ) -> PiecePlan:
        first_token = chunk.tokens.begin // self._pool.page_size * self._pool.page_size
        tokens = Span(begin=chunk.tokens.begin - first_token, end=chunk.tokens.end - first_token)
        # The prompt's end decides what a window leaves out and when a state travels; farther away it would only keep equal chunks
        # apart.
        end_token = min(num_tokens - first_token, tokens.end + self._reach_tokens)
        return self._planned(route, tokens, chunk.layers, end_token, dtype, heads, frozenset((scales or {}).items()))

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
    ) -> PiecePlan:
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
        return PiecePlan(groups=groups, num_wire_bytes=num_wire_bytes, can_digest=can_digest, device=self._pool.device)

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
