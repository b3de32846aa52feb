"""Gather and scatter of pieces: a chunk's part of one route, between the pages of a request and contiguous bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from transfer.chunk import Chunk, ChunkPlan, Pieces, split_into_chunks
from transfer.copy import (
    CopyPlan,
    Digest,
    HeadSliceCopier,
    WireMemory,
    add_digest,
    compile_add_digest,
    head_slice_copier,
    is_add_digest_compiled,
)
from transfer.copy.request_tables import DeviceTable, RequestTables
from transfer.layer_groups import GroupKind
from transfer.layout import DType, KVLayout, LayerKind, Range, Route, WireBuffer, wire_buffers
from transfer.pool.kv_pool import KVPool

OnGathered = Callable[[int, float], None]
"""Called with the digest of the wire bytes, and the seconds that the copy took; on a GPU from when its stream was free for it."""

OnScattered = Callable[[bool, float], None]
"""Called with whether the wire bytes had the digest that was announced, and the seconds that the copy took."""

Scales = frozenset[tuple[tuple[int, bool], float]]

_CACHED_PIECES = 1024  # a few per route, head slice and layer group; each some 20 KB
_CACHED_ENDS = 1024  # of routes, one or two for each session
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
    is_state: bool
    first_page: int
    plan: CopyPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RouteEnd:
    """This rank's end of a route: what its pieces have in common. There is one of each, so that it is found by identity."""

    route: Route
    heads: Range
    dtype: DType
    scales: Scales


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
        """Whether a copy from or to this wire would only be queued.

        On a GPU the first of its kind compiles kernels, for seconds; the first of each plan uploads tables, and waits.

        Args:
            is_gather: Whether the wire would be what `gather` fills, or what `scatter` reads.
        """
        return self.plan.is_ready(wire, is_gather=is_gather, has_digest=has_digest)

    def make_ready(self, wire: WireMemory, *, is_gather: bool, has_digest: bool = True) -> None:
        """Do what is missing for `is_ready`, without a copy: on any thread, while other pieces are copied; nothing twice."""
        self.plan.make_ready(wire, is_gather=is_gather, has_digest=has_digest)

    def upload(self) -> None:
        """Queue, on the current stream, what is new in the page tables; copies on that stream then need not do it."""
        for part in self.parts:
            _ = part.pages

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
    What was met before is found without a look into scales or layers.

    Args:
        pool: Where the pages are.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._copiers: dict[tuple[int, Range, DType, Scales], HeadSliceCopier] = {}
        self._device_tables: Sequence[RequestTables] = ()
        if pool.device.type == "cuda":
            self._device_tables = [RequestTables(pool.device, num_pages) for num_pages in pool.num_pages]
        self._planned = lru_cache(maxsize=_CACHED_PIECES)(self._plan)
        self._ends: dict[tuple[Route, Range, DType, Scales], _RouteEnd] = {}
        # By identity of route and scales, which are kept with what was found, so that no other object gets theirs.
        self._known_ends: dict[tuple[int, ...], tuple[_RouteEnd, Route, Mapping[tuple[int, bool], float] | None]] = {}
        self._adopt(pool.layout)

    def prepare(
        self,
        layout: KVLayout,
        route: Route,
        chunk: Chunk,
        *,
        request_id: str,
        heads: Range,
        num_tokens: int,
        dtype: DType,
        tables: Sequence[Sequence[int]],
        scales: Mapping[tuple[int, bool], float] | None = None,
    ) -> PieceCopy:
        """A copy of the piece.

        With a pool on a GPU the request's page tables are kept there, and what is new in them is queued, not waited for.

        Args:
            route: As all pieces of a session have it: the same object is found sooner than an equal one.
            request_id: The request; the entries that its tables have had stay what they are, until `forget`.
            heads: The route's heads as this rank counts them.
            num_tokens: Tokens of the whole prompt.
            dtype: Element type on the wire.
            tables: The request's page table of each group, from token 0 on, up to the chunk's end at least.
            scales: By (layer, is_v), see `HeadSliceCopier`; never changed, and the same object for all pieces of a session.
        """
        if layout is not self._layout:
            self._adopt(layout)
        chunk_page = chunk.tokens.begin // self._pool.page_size
        piece = self._piece(route, chunk, heads=heads, num_tokens=num_tokens, dtype=dtype, scales=scales)
        parts: list[GroupCopy] = []
        for part in piece.groups:
            first = 0 if part.is_state else chunk_page + part.first_page
            end, table = first + part.plan.num_pages, tables[part.group]
            if self._device_tables:
                kept = self._device_tables[part.group].cover(request_id, table, first, end)
                parts.append(GroupCopy(plan=part.plan, table=kept, first_page=first))
            else:
                pages = torch.from_numpy(np.array(table[first:end], dtype=np.int64))  # a third of what torch.tensor takes
                parts.append(GroupCopy(plan=part.plan, table=pages, first_page=0))
        return PieceCopy(parts=parts, plan=piece)

    def warm(
        self,
        layout: KVLayout,
        route: Route,
        plan: ChunkPlan,
        *,
        heads: Range,
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
            for chunk, _ in Pieces(chunks, layout, route, num_tokens=num_tokens, dtype=dtype):
                piece = copier._piece(route, chunk, heads=heads, num_tokens=num_tokens, dtype=dtype, scales=scales)
                piece.make_ready(_AnyWire(wire_alignment, piece.num_wire_bytes), is_gather=is_gather, has_digest=True)

    def forget(self, request_id: str) -> None:
        """The request's pages are given back, or it is over: use what is kept of its tables for others. Does nothing twice.

        To be called when no copy that was prepared for it is queued, or will be (`SourceReleased`, `IncomingComplete` and
        `IncomingDrained` say so): its tables are overwritten by the next request's.
        """
        for kept in self._device_tables:
            kept.forget(request_id)

    def _piece(
        self,
        route: Route,
        chunk: Chunk,
        *,
        heads: Range,
        num_tokens: int,
        dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None,
    ) -> PiecePlan:
        tokens, layers = chunk.tokens, chunk.layers
        first_token = tokens.begin - tokens.begin % self._pool.page_size
        begin, end = tokens.begin - first_token, tokens.end - first_token
        end_token = self._end_that_matters(begin, end, num_tokens - first_token)
        return self._planned(self._end_of(route, heads, dtype, scales), begin, end, layers.begin, layers.end, end_token)

    def _end_of(self, route: Route, heads: Range, dtype: DType, scales: Mapping[tuple[int, bool], float] | None) -> _RouteEnd:
        key = (id(route), id(scales), heads.begin, heads.end, id(dtype))
        known = self._known_ends.get(key)
        if known is not None:
            return known[0]
        frozen = frozenset((scales or {}).items())
        found = self._ends.get((route, heads, dtype, frozen))
        if found is None:
            found = _RouteEnd(route=route, heads=heads, dtype=dtype, scales=frozen)
            self._ends[route, heads, dtype, frozen] = found
        if len(self._known_ends) >= _CACHED_ENDS:
            self._known_ends.clear()
        self._known_ends[key] = (found, route, scales)
        return found

    def _end_that_matters(self, begin: int, end: int, num_tokens: int) -> int:
        """The shortest prompt in which tokens [begin, end) move as in one of `num_tokens`: what keeps equal chunks together.

        A prompt's end decides what its windows leave out of a chunk: all of it, nothing, or up to a token inside. And whether
        states travel with it.
        """
        found = end + 1 if self._has_states and end < num_tokens else end
        for window in self._windows:
            if begin + window < num_tokens:
                found = max(found, min(num_tokens, end + window))
        return found

    def _copier(self, layer: int, of: _RouteEnd) -> HeadSliceCopier:
        key = (self._pool.group_of(layer), of.heads, of.dtype, of.scales)
        if key not in self._copiers:
            wire = self._layout.layers[layer].dtype or of.dtype
            pool = self._pool.part_of(layer)
            self._copiers[key] = head_slice_copier(pool, heads=of.heads, wire_dtype=wire, scales=dict(of.scales))
        return self._copiers[key]

    def _adopt(self, layout: KVLayout) -> None:
        self._layout = layout
        self._has_states = any(spec.kind is LayerKind.RECURRENT_STATE for spec in layout.layers)
        self._windows = {spec.window_tokens for spec in layout.layers if spec.kind is LayerKind.SLIDING_WINDOW}
        self._planned.cache_clear()

    def _plan(self, of: _RouteEnd, begin: int, end: int, first_layer: int, end_layer: int, num_tokens: int) -> PiecePlan:
        tokens, layers = Range(begin=begin, end=end), Range(begin=first_layer, end=end_layer)
        by_group: dict[int, list[WireBuffer]] = {}
        for buffer in wire_buffers(self._layout, of.route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=of.dtype):
            by_group.setdefault(self._pool.group_of(buffer.layer), []).append(buffer)
        groups = tuple(self._group_piece(group, buffers, of) for group, buffers in by_group.items())
        num_wire_bytes = max((part.plan.num_wire_bytes for part in groups), default=0)
        is_gapless = sum(part.plan.num_moved_bytes for part in groups) == num_wire_bytes
        can_digest = is_gapless and all(part.plan.can_digest for part in groups)
        return PiecePlan(groups=groups, num_wire_bytes=num_wire_bytes, can_digest=can_digest, device=self._pool.device)

    def _group_piece(self, group: int, buffers: Sequence[WireBuffer], of: _RouteEnd) -> _GroupPiece:
        """A window may begin pages behind the chunk's first one, whose entries are no pages; all its layers begin alike."""
        kind, page_size = self._pool.groups[group].kind, self._pool.groups[group].page_size(self._pool.page_size)
        tokens = buffers[0].tokens
        first = tokens.begin // page_size
        if first:
            counted = Range(begin=tokens.begin - first * page_size, end=tokens.end - first * page_size)
            buffers = [replace(buffer, tokens=counted) for buffer in buffers]
        plan = self._copier(buffers[0].layer, of).plan(buffers)
        return _GroupPiece(group=group, is_state=kind is GroupKind.STATE, first_page=first, plan=plan)
