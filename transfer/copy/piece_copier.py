"""Gather and scatter of pieces: a chunk's part of one route, between the pages of a request and contiguous bytes.

From a piece to the kernel: `PieceCopier.prepare` finds the plans of the piece and the request's page tables, and returns a
`PieceCopy`. Its `gather` or `scatter` calls one `CopyPlan` for each group of layers; on a GPU a plan launches kernels by their
`Launcher`. A `HeadSliceCopier` makes the plans.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import overload

import numpy as np
import torch
from torch import Tensor

from transfer.chunk import ChunkPlan, Pieces, split_into_chunks
from transfer.copy import (
    CopyPlan,
    Digest,
    HeadSliceCopier,
    KernelLaunch,
    Kernels,
    WireMemory,
    add_digest,
    compile_add_digest,
    head_slice_copier,
    is_add_digest_compiled,
)
from transfer.copy.request_tables import DeviceTable, RequestTables
from transfer.errors import LayoutError
from transfer.layer_groups import GroupKind
from transfer.layout import LOCAL_KINDS, DType, KVLayout, LayerKind, Range, Route, TokenShard, WireBuffer, wire_buffers
from transfer.piece import Piece, RankRequest
from transfer.pool.kv_pool import KVPool

OnGathered = Callable[[int, float, float], None]
"""Called with the digest of the wire bytes, and when the copy began and ended on the monotonic clock, in seconds. On a GPU,
the copy begins when its stream is free. The callback can run some time after the end."""

OnScattered = Callable[[bool, float], None]
"""Called with whether the wire bytes had the announced digest, and the seconds of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterLaunch:
    """A prepared scatter, see `transfer.receive._signals.Watch.arm`.

    Args:
        num_first: Number of kernels that only need the first half of the gather; 0 if each needs all of it.
        keeps: Objects that must not be freed before `give_back`.
        give_back: Call it once, when the scatter has ended or will not be queued.
    """

    stream: int
    sum_address: int
    cell_address: int
    kernels: tuple[KernelLaunch, ...]
    num_first: int
    keeps: object
    give_back: Callable[[], None]


Scales = Mapping[tuple[int, bool], float]
FrozenScales = frozenset[tuple[tuple[int, bool], float]]

_CACHED_PIECES = 1024  # a few per route, head slice and layer group; each some 20 KB
_CACHED_ENDS = 1024  # of routes, one or two for each session
# Tokens of a last chunk: kernels differ by the powers of two, to 16 bytes, that wire offsets are multiples of.
_TAILS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceCopy:
    """One piece, to be copied on any thread. Keep it until the copy has run.

    Args:
        plans: One for each group that the piece has layers of, by index of the group.
        device: Device of the pool.
        kernels: Implementation of the plans.
        num_wire_bytes: Size of the payload in bytes.
        can_digest: Whether the plans together digest the piece. Otherwise the digest is one more pass over the wire.
        tables: For each plan the request's page table: int64 [n] in host memory, or kept on the pool's device.
        first_pages: For each plan the entry of its table with the plan's token 0.
    """

    plans: Mapping[int, CopyPlan]
    device: torch.device
    kernels: Kernels
    num_wire_bytes: int
    can_digest: bool
    tables: Sequence[Tensor | DeviceTable] = ()
    first_pages: Sequence[int] = ()

    @classmethod
    def of(cls, plans: Mapping[int, CopyPlan], device: torch.device, kernels: Kernels) -> PieceCopy:
        """Create the copy of all pieces with these plans, without page tables: it can be compiled."""
        num_wire_bytes = max((plan.num_wire_bytes for plan in plans.values()), default=0)
        is_gapless = sum(plan.num_moved_bytes for plan in plans.values()) == num_wire_bytes
        can_digest = is_gapless and all(plan.can_digest for plan in plans.values())
        return cls(plans=plans, device=device, kernels=kernels, num_wire_bytes=num_wire_bytes, can_digest=can_digest)

    def is_compiled(self, wire_address: int, *, is_gather: bool, is_direct: bool = False) -> bool:
        """Return whether a copy with a digest, from or to a wire at that address, would only be queued.

        `is_direct` means that the wire is memory with an address only.
        On a GPU the first copy of its kind compiles kernels, for seconds. The first of each plan uploads tables, and waits.
        """
        if not self.can_digest and not is_add_digest_compiled(self.device, wire_address, self.num_wire_bytes, self.kernels):
            return False
        return all(
            plan.is_compiled(wire_address, has_digest=self.can_digest, is_gather=is_gather, is_direct=is_direct)
            for plan in self.plans.values()
        )

    def compile(self, wire_address: int, *, is_gather: bool, is_direct: bool = False) -> None:
        """Compile and upload what `is_compiled` requires, without a copy. Safe on any thread during other copies; idempotent."""
        if not self.can_digest:
            compile_add_digest(self.device, wire_address, self.num_wire_bytes, self.kernels)
        for plan in self.plans.values():
            plan.compile(wire_address, has_digest=self.can_digest, is_gather=is_gather, is_direct=is_direct)

    def upload(self) -> None:
        """Queue, on the current stream, what is new in the page tables. Copies on that stream then need not do it."""
        for table in self.tables:
            _pages_of(table)

    def gather(self, out: WireMemory, digest: Digest | None = None) -> None:
        """Copy from the pages into the first bytes of `out`, see `CopyPlan.gather`. The digest is of all bytes of the piece."""
        inside = digest if self.can_digest else None
        for plan, table, first_page in zip(self.plans.values(), self.tables, self.first_pages, strict=True):
            plan.gather(_pages_of(table), out, first_page=first_page, digest=inside)
        if digest is not None and inside is None:
            add_digest(digest, out, self.num_wire_bytes, self.kernels)

    @property
    def can_halve(self) -> bool:
        """Whether `gather_half` copies the piece's buffers in two halves: the first half of their number, and the others."""
        return self.can_digest and len(self.plans) == 1 and all(plan.can_halve for plan in self.plans.values())

    def gather_half(self, half: int, out: WireMemory, digest: Digest) -> None:
        """Copy half 0 or 1 of a piece that `can_halve`, as `gather` does."""
        for plan, table, first_page in zip(self.plans.values(), self.tables, self.first_pages, strict=True):
            plan.gather_half(half, _pages_of(table), out, first_page=first_page, digest=digest)

    def scatter_kernels(self, source: WireMemory, digest: Tensor) -> tuple[KernelLaunch, ...] | None:
        """Return the launches of `scatter` on the current stream, without queuing them: one per half if the piece `can_halve`.

        None means that the scatter needs other work, too.
        """
        launches: list[KernelLaunch] = []
        for plan, table, first_page in zip(self.plans.values(), self.tables, self.first_pages, strict=True):
            found = None
            if self.can_digest:
                found = plan.scatter_kernels(_pages_of(table), source, first_page=first_page, digest=digest)
            if found is None:
                return None
            launches += found
        return tuple(launches)

    def scatter(self, source: WireMemory, digest: Digest | None = None) -> None:
        """Copy from the first bytes of `source` into the pages: the reverse of `gather`.

        In host memory, the pages get the bytes that the digest is of, also if a peer changes `source` meanwhile.
        """
        inside = digest if self.can_digest else None
        reads_once = inside is not None and all(plan.reads_wire_once for plan in self.plans.values())
        if digest is not None and not reads_once and isinstance(source, Tensor) and source.device.type == "cpu":
            source = source[: self.num_wire_bytes].clone()
        if digest is not None and inside is None:
            add_digest(digest, source, self.num_wire_bytes, self.kernels)
        for plan, table, first_page in zip(self.plans.values(), self.tables, self.first_pages, strict=True):
            plan.scatter(_pages_of(table), source, first_page=first_page, digest=inside)


def _pages_of(table: Tensor | DeviceTable) -> Tensor:
    """int64 [n] on the pool's device, for the current stream."""
    return table if isinstance(table, Tensor) else table.use()


class PagesOfPart(Sequence[int]):
    """The entries of a page table that one part of its tokens is in, read when they are needed."""

    def __init__(self, table: Sequence[int], part: TokenShard) -> None:
        self._table, self._part = table, part

    def __len__(self) -> int:
        return self._part.count(len(self._table))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._table[self._part.token(number)] for number in range(*index.indices(len(self)))]
        return self._table[self._part.token(index)]


class PieceCopier:
    """Prepares the copies of one pool.

    Keeps a copier for each known group, head slice and wire dtype, and the plans of known pieces. With tokens counted from the
    piece's first page, the chunks of all requests look alike. Laying out 32 layers took 0.6 ms of the owner's loop. Known plans
    are found without a look into scales or layers.

    Args:
        is_source: Whether the pool is that of the sending rank. Selects the source or target heads of a route.
        kernels: Implementation of the copies. None means the fastest for the pool's device.
    """

    def __init__(self, pool: KVPool, *, is_source: bool, kernels: Kernels | None = None) -> None:
        self._pool = pool
        self._is_source = is_source
        self._kernels = kernels or Kernels.fastest(pool.device)
        self._is_on_gpu = pool.device.type == "cuda"
        self._device_tables: dict[tuple[int, TokenShard | None], RequestTables] = {}
        self._planned = lru_cache(maxsize=_CACHED_PIECES)(self._plan)
        self._adopt(pool.layout)

    def prepare(self, piece: Piece, tables: Sequence[Sequence[int]]) -> PieceCopy:
        """Return a copy of the piece.

        For a pool on a GPU the request's page tables are kept there. New entries are queued, and nothing waits for them.

        Args:
            piece: Pieces of one session should share the route and scales objects, because the lookup by identity is faster.
            tables: Page table of each group, from token 0 up to at least the chunk's end. Entries must not change until `forget`,
                except for those that a window has passed.

        Raises:
            LayoutError: The piece does not fit the pool, or an entry of a table that it needs is no page of the pool.
        """
        if piece.request.layout is not self._layout:
            self._adopt(piece.request.layout)
        first_token = self._aligned(piece.route.own_tokens(piece.chunk.tokens).begin)
        found = self._copy_of(piece)
        kept: list[Tensor | DeviceTable] = []
        first_pages: list[int] = []
        for group, plan in found.plans.items():
            page_size = self._page_sizes[group]
            start = first_token // page_size if page_size else 0
            first, end, part = start + plan.used_pages.begin, start + plan.used_pages.end, self._part_of(piece.route, page_size)
            table = tables[group] if part is None else PagesOfPart(tables[group], part)
            if self._is_on_gpu:
                kept.append(self._device_tables_of(group, part).cover(piece.request_id, table, first, end))
                first_pages.append(start)
            else:
                kept.append(torch.from_numpy(np.array(table[start:end], dtype=np.int64)))  # a third of what torch.tensor takes
                first_pages.append(0)
        return PieceCopy(
            plans=found.plans,
            device=found.device,
            kernels=found.kernels,
            num_wire_bytes=found.num_wire_bytes,
            can_digest=found.can_digest,
            tables=kept,
            first_pages=first_pages,
        )

    async def warm_up(
        self,
        routes: Sequence[Route],
        plan: ChunkPlan,
        *,
        layout: KVLayout,
        dtype: DType,
        scales: Scales | None,
        direct_ranks: Collection[int] = (),
    ) -> None:
        """Compile and load the kernels of all pieces of the routes, so that no first request waits for them.

        Runs on a thread beside the caller's loop and launches no kernel. Only Triton needs it. `plan` says how requests are
        divided. Gathers for `direct_ranks`, which are decode ranks, store into the peer's memory. For the other arguments see
        `RankRequest`.
        """
        if self._kernels is not Kernels.TRITON:
            return
        for route in routes:
            is_direct = route.decode_rank in direct_ranks
            await asyncio.to_thread(self.compile, route, plan, layout=layout, dtype=dtype, scales=scales, is_direct=is_direct)

    def compile(
        self,
        route: Route,
        plan: ChunkPlan,
        *,
        layout: KVLayout,
        dtype: DType,
        scales: Scales | None = None,
        is_direct: bool = False,
    ) -> None:
        """Compile the kernels of one route, on any thread. It shares only the kernels with `prepare`."""
        copier = PieceCopier(self._pool, is_source=self._is_source, kernels=self._kernels)
        copier._adopt(layout)
        for tail in _TAILS:
            num_tokens = plan.chunk_tokens + tail
            request = RankRequest(
                request_id="",
                layout=layout,
                plan=plan,
                wire_dtype=dtype,
                num_tokens=num_tokens,
                start_token=0,
                routes=(),
                digest="",
                scales=scales,
            )
            chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=layout.num_layers)
            for chunk, num_bytes in Pieces(chunks, layout, route, num_tokens=num_tokens, dtype=dtype):
                piece = Piece(request=request, route=route, session=0, chunk=chunk, num_bytes=num_bytes)
                # Wires begin on multiples of 16 bytes.
                copier._copy_of(piece).compile(16, is_gather=self._is_source, is_direct=is_direct)

    def forget(self, request_id: str) -> None:
        """Use the memory of the request's page tables for others. Idempotent.

        Call it when no copy that was prepared for the request is queued, or will be (`SourceReleased`, `IncomingComplete` and
        `IncomingDrained` report that): the next request overwrites the tables.
        """
        for kept in self._device_tables.values():
            kept.forget(request_id)

    def _device_tables_of(self, group: int, part: TokenShard | None) -> RequestTables:
        if (group, part) not in self._device_tables:
            self._device_tables[group, part] = RequestTables(self._pool.device, self._pool.num_pages[group])
        return self._device_tables[group, part]

    def _part_of(self, route: Route, page_size: int) -> TokenShard | None:
        """Return the entries of a page table that the route's tokens are in, as a shard of entries; None for all of them.

        The rank has more tokens than the route if the other side's DCP size is larger.
        """
        tokens, own = route.token_shard, self._pool.shard
        if tokens is None or tokens.size == own.dcp_size:
            return None
        if tokens.interleave_tokens % page_size:
            raise LayoutError(
                f"pages have {page_size} tokens; with DCP size {own.dcp_size} here and {tokens.size} there, an interleave of "
                f"{tokens.interleave_tokens} tokens must be whole pages"
            )
        size, index = tokens.size // own.dcp_size, tokens.index // own.dcp_size
        return TokenShard(size=size, index=index, interleave_tokens=tokens.interleave_tokens // page_size)

    def _copy_of(self, piece: Piece) -> PieceCopy:
        """Return the copy of the piece, without page tables.

        Tokens count from the first page of the chunk that begins in all groups, or from the state in a group of states. With
        chunked local attention they count from where a chunk of each layer begins, too, so that its rule holds for the count.
        """
        tokens, layers, request = piece.route.own_tokens(piece.chunk.tokens), piece.chunk.layers, piece.request
        first_token = self._aligned(tokens.begin)
        begin, end = tokens.begin - first_token, tokens.end - first_token
        end_token = self._end_that_matters(begin, end, piece.route.own_count(request.num_tokens) - first_token)
        number = self._number_of(piece.route, request.wire_dtype, request.scales)
        return self._planned(number, begin, end, layers.begin, layers.end, end_token)

    def _aligned(self, token: int) -> int:
        """Return the last token up to `token` with which a page of every group begins, and a chunk of every local layer."""
        return token - token % self._alignment

    def _number_of(self, route: Route, dtype: DType, scales: Scales | None) -> int:
        """Return the number of this route's end in `_ends`, by identity: hashing the route takes longer than all of `prepare`."""
        key = (id(route), id(scales), id(dtype))
        known = self._known_ends.get(key)
        if known is not None:
            return known[0]
        if len(self._known_ends) >= _CACHED_ENDS:  # most are of sessions that were opened again
            self._known_ends.clear()
        if len(self._ends) >= _CACHED_ENDS:
            self._adopt(self._layout)
        number = self._ends.setdefault((route, dtype, frozenset((scales or {}).items())), len(self._ends))
        self._known_ends[key] = (number, route, scales)
        return number

    def _end_that_matters(self, begin: int, end: int, num_tokens: int) -> int:
        """Return the shortest prompt in which tokens [begin, end) move as in one of `num_tokens`, so that equal chunks share a
        plan.

        The end of a prompt decides which part of a chunk its local layers leave out, and whether states travel with it.
        """
        found = end + 1 if self._has_states and end < num_tokens else end
        for spec in self._local_layers:
            first = spec.first_travelling_token(num_tokens)
            if first > begin:
                found = max(found, spec.shortest_prompt(min(first, end)))
        return found

    def _adopt(self, layout: KVLayout) -> None:
        """Switch to a layout and clear all caches."""
        self._layout = layout
        # Tokens per page by group; 0 for states.
        self._page_sizes = {
            group: 0 if self._pool.groups[group].kind is GroupKind.STATE else part.page_size
            for part in self._pool.parts
            for group in (self._pool.group_of(part.layers[0]),)
        }
        self._local_layers = {spec for spec in layout.layers if spec.kind in LOCAL_KINDS}
        chunk_sizes = {spec.window_tokens for spec in self._local_layers if spec.is_chunked}
        self._alignment = math.lcm(*filter(None, self._page_sizes.values()), *chunk_sizes)
        self._has_states = any(spec.kind is LayerKind.RECURRENT_STATE for spec in layout.layers)
        self._copiers: dict[tuple[int, Range, DType, FrozenScales], HeadSliceCopier] = {}
        self._ends: dict[tuple[Route, DType, FrozenScales], int] = {}
        # By identity of route and scales. The values keep both, so that no other object gets their identity.
        self._known_ends: dict[tuple[int, int, int], tuple[int, Route, Scales | None]] = {}
        self._planned.cache_clear()

    def _plan(self, number: int, begin: int, end: int, first_layer: int, end_layer: int, num_tokens: int) -> PieceCopy:
        route, dtype, scales = next(itertools.islice(self._ends, number, None))
        tokens, layers = Range(begin=begin, end=end), Range(begin=first_layer, end=end_layer)
        by_group: dict[int, list[WireBuffer]] = {}
        for buffer in wire_buffers(self._layout, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=dtype):
            group = self._pool.group_of(buffer.layer)
            if not self._page_sizes[group]:
                buffer = replace(buffer, tokens=Range(begin=0, end=len(buffer.tokens)))
            by_group.setdefault(group, []).append(buffer)
        heads = route.heads.source if self._is_source else route.heads.target
        plans = {
            group: self._copier(group, buffers[0].layer, heads, dtype, scales).plan(buffers)
            for group, buffers in by_group.items()
        }
        return PieceCopy.of(plans, self._pool.device, self._kernels)

    def _copier(self, group: int, layer: int, heads: Range, dtype: DType, scales: FrozenScales) -> HeadSliceCopier:
        """Return the copier of a group's pages; `layer` is one of its layers."""
        key = (group, heads, dtype, scales)
        if key not in self._copiers:
            wire = self._layout.layers[layer].dtype or dtype
            self._copiers[key] = head_slice_copier(
                self._pool.part_of(layer), heads=heads, wire_dtype=wire, scales=dict(scales), kernels=self._kernels
            )
        return self._copiers[key]
