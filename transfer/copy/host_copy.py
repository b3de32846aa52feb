"""Gather and scatter for pools in host memory: few large copies, no Python per token, the GIL released in all of them.

What is copied at once is a *piece*: the longest run of bytes that is contiguous on both sides. With all heads of an NHD pool
that is a whole page, with some of them a token, in an HND pool a head of a token. Buffers (K and V of the layers) that lie evenly
spaced in one allocation and follow each other on the wire are a *stack*, and move together: whole pages by one indexed copy, or,
where the page table is mostly consecutive, by one strided copy per run of pages; the part pages at both ends by one copy each.
A copy per buffer instead took a gather of 64 buffers from 6.3 to 10.5 ms, and a scatter from 5.9 to 8.4 ms (64 MiB in 4 chunks):
cold Python between the copies.

Measured on one core (64 MB, rows of 1.5 KB, pages of 16): an indexed gather is fastest with `torch.index_select` on 8-byte words
(NumPy's `take` needs contiguous arrays, its fancy indexing a temporary), an indexed scatter with a NumPy assignment of opaque
elements of a piece's size (torch's `index_copy_` and `index_put_` reach half to two thirds of it). Along any but the first
dimension torch copies all of its source first where that is not contiguous, so stacks with gaps are gathered buffer by buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory, wire_tensor
from transfer.copy.digest import HostDigest
from transfer.layout import DType, Range, WireBuffer
from transfer.pool.kv_pool import PagedKVPool, convert

Array = npt.NDArray[Any]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# A run costs one call of about a microsecond, an indexed page about 50 ns plus the loss of hardware prefetch at its end.
MIN_PAGES_PER_RUN = 4

# Below, NumPy's smaller cost per call outweighs the temporary that its indexing makes.
MIN_BYTES_FOR_TORCH = 1 << 17

# What a scatter digests and then copies at a time: it is in the second-level cache for the second look. A scatter of 64 MiB
# took 13.5 ms in two passes, 12.2 in blocks (copies that bypass the cache: 9.6 and 6.9). A gather gains nothing by it: what it
# wrote is no longer, or not yet, in that cache.
BLOCK_BYTES = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Evenly spaced tokens: offsets [begin, end) of `num_pages` consecutive pages, at wire token `wire_token`."""

    page: int
    num_pages: int
    begin: int
    end: int
    wire_token: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * (self.end - self.begin)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenPlan:
    """Places of a token range: runs, and perhaps whole pages in no order (int64 [n], from wire token `wire_token`)."""

    runs: tuple[TokenRun, ...]
    scattered: Tensor | None
    wire_token: int


def plan_tokens(pages: Tensor, slots: Range, page_size: int, *, min_pages_per_run: int = MIN_PAGES_PER_RUN) -> TokenPlan:
    """Divide a token range into part pages and whole pages.

    Args:
        pages: int64 [n] on CPU, the page table.
        slots: The tokens, counted from the start of the page table; not empty.
        page_size: Tokens per page.
        min_pages_per_run: If runs are shorter on average, whole pages are left in no order. 1 puts all pages in runs.
    """
    whole_begin, whole_end = -(-slots.begin // page_size), slots.end // page_size
    runs: list[TokenRun] = []
    if slots.begin % page_size:
        first = slots.begin // page_size
        end = min(page_size, slots.end - first * page_size)
        runs.append(TokenRun(page=int(pages[first]), num_pages=1, begin=slots.begin % page_size, end=end, wire_token=0))
    if slots.end % page_size and whole_begin <= whole_end:  # otherwise the first part page is also the last
        token, end = whole_end * page_size - slots.begin, slots.end % page_size
        runs.append(TokenRun(page=int(pages[whole_end]), num_pages=1, begin=0, end=end, wire_token=token))
    if whole_begin >= whole_end:
        return TokenPlan(runs=tuple(runs), scattered=None, wire_token=0)
    whole, token = pages[whole_begin:whole_end], whole_begin * page_size - slots.begin
    starts = _run_starts(whole)
    if len(starts) * min_pages_per_run > len(whole) and len(starts) > 1:
        return TokenPlan(runs=tuple(runs), scattered=whole, wire_token=token)
    for begin, end in zip(starts, [*starts[1:], len(whole)], strict=True):
        run = TokenRun(
            page=int(whole[begin]), num_pages=end - begin, begin=0, end=page_size, wire_token=token + begin * page_size
        )
        runs.append(run)
    return TokenPlan(runs=tuple(runs), scattered=None, wire_token=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolPieces:
    """The moved heads of a stack, shared, as pieces. Created once, because making a view costs as much as a small copy.

    Args:
        tokens: [buffers, num_pages, page_size, pieces], opaque elements of one piece. Heads that lie together are one piece.
        pages: [buffers, num_pages, ...], the same, but a whole page is one piece if its tokens lie together.
        words: `pages` with the words of a piece as last dimension, for torch: the widest words that every size and stride allows.
        row_bytes: Bytes of a token.
    """

    tokens: Array
    pages: Array
    words: Tensor
    row_bytes: int

    def part(self, begin: int, end: int) -> PoolPieces:
        """Return buffers [begin, end) of the stack."""
        if (begin, end) == (0, len(self.pages)):
            return self
        return PoolPieces(
            tokens=self.tokens[begin:end], pages=self.pages[begin:end], words=self.words[begin:end], row_bytes=self.row_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackPlace:
    """Place of a pool buffer: its stack, and its index there."""

    stack: PoolPieces
    index: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferGroup:
    """Neighbours in a stack and on the wire, with the same tokens.

    Args:
        pieces: Pieces of these buffers.
        buffers: The buffers, as the plan was given them.
        tokens: Tokens of each buffer.
        wire: Bytes of the group in the wire tensor.
    """

    pieces: PoolPieces
    buffers: Sequence[WireBuffer]
    tokens: Range
    wire: slice

    @classmethod
    def of(cls, pieces: PoolPieces, buffers: Sequence[WireBuffer]) -> BufferGroup:
        wire = slice(buffers[0].offset_bytes, buffers[-1].offset_bytes + buffers[-1].num_bytes)
        return cls(pieces=pieces, buffers=buffers, tokens=buffers[0].tokens, wire=wire)

    def blocks(self) -> list[BufferGroup]:
        """Return the same buffers in groups of about `BLOCK_BYTES`."""
        step = max(1, BLOCK_BYTES // self.buffers[0].num_bytes)
        return [
            BufferGroup.of(self.pieces.part(begin, begin + step), self.buffers[begin : begin + step])
            for begin in range(0, len(self.buffers), step)
        ]


class HostCopier(HeadSliceCopier):
    """Gather and scatter of a pool in host memory. Gathers of scattered pages use as many threads as torch is set to."""

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        heads: Range,
        wire_dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None = None,
    ) -> None:
        super().__init__(pool, heads=heads, wire_dtype=wire_dtype, scales=scales)
        self.places = _stacked(self.views)

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _HostPlan(self, buffers)


class _HostPlan(CopyPlan):
    def __init__(self, copier: HostCopier, buffers: Sequence[WireBuffer]) -> None:
        super().__init__(copier, buffers)
        self._is_converting = copier.wire_dtype is not copier.pool.element
        self._groups = _grouped(self.buffers, copier.places, is_joining=not self._is_converting)
        self._blocks = [block for group in self._groups for block in group.blocks()]

    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, out, "out", first_page, digest)
        tensor = wire_tensor(out)
        wire = tensor.numpy()
        for group, plan in self._with_token_plans(self._groups, pages[first_page:]):
            if self._is_converting:
                self._gather_converted(group, plan, tensor)
            else:
                _gather_bytes(group.pieces, plan, wire[group.wire].reshape(len(group.buffers), -1))
        if isinstance(digest, HostDigest):
            digest.update(wire[: self.num_wire_bytes])

    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, source, "source", first_page, digest)
        tensor = wire_tensor(source)
        wire = tensor.numpy()
        groups = self._groups if digest is None else self._blocks
        for group, plan in self._with_token_plans(groups, pages[first_page:]):
            if isinstance(digest, HostDigest):
                digest.update(wire[group.wire])
            if self._is_converting:
                self._scatter_converted(group, plan, tensor)
            else:
                _scatter_bytes(group.pieces, plan, wire[group.wire].reshape(len(group.buffers), -1))

    def _with_token_plans(self, groups: Sequence[BufferGroup], pages: Tensor) -> Iterator[tuple[BufferGroup, TokenPlan]]:
        """Yield each group with the places of its tokens."""
        plans: dict[Range, TokenPlan] = {}  # nearly always one, in a chunk
        for group in groups:
            plan = plans.get(group.tokens)
            if plan is None:
                plan = plans[group.tokens] = plan_tokens(pages, group.tokens, self._pool.page_size)
            yield group, plan

    def _gather_converted(self, group: BufferGroup, plan: TokenPlan, wire: Tensor) -> None:
        copier, (buffer,) = self._copier, group.buffers
        found = torch.empty((len(buffer.tokens), *copier.view(buffer).shape[2:]), dtype=self._pool.dtype)
        _gather_bytes(group.pieces, plan, found.view(torch.uint8).view(1, -1).numpy())
        copier.wire_part(wire, buffer).copy_(convert(found, copier.wire_dtype, scale=copier.scale(buffer)))

    def _scatter_converted(self, group: BufferGroup, plan: TokenPlan, wire: Tensor) -> None:
        copier, (buffer,) = self._copier, group.buffers
        values = convert(copier.wire_part(wire, buffer), self._pool.element, scale=copier.scale(buffer))
        _scatter_bytes(group.pieces, plan, values.view(torch.uint8).view(1, -1).numpy())


def _grouped(
    buffers: Sequence[WireBuffer], places: Mapping[tuple[int, bool], StackPlace], *, is_joining: bool
) -> list[BufferGroup]:
    """Join neighbours. Converted buffers are not joined, so that the converted copy of each stays in the cache."""
    runs: list[list[WireBuffer]] = []
    for buffer in buffers:
        if is_joining and runs and _continues_on_wire(runs[-1], buffer, places):
            runs[-1].append(buffer)
        else:
            runs.append([buffer])
    groups: list[BufferGroup] = []
    for run in runs:
        place = places[run[0].layer, run[0].is_v]
        groups.append(BufferGroup.of(place.stack.part(place.index, place.index + len(run)), tuple(run)))
    return groups


def _continues_on_wire(run: Sequence[WireBuffer], buffer: WireBuffer, places: Mapping[tuple[int, bool], StackPlace]) -> bool:
    """Return whether a buffer is the next one of a run in its stack, on the wire, and with the same tokens."""
    last = run[-1]
    place, place_of_last = places[buffer.layer, buffer.is_v], places[last.layer, last.is_v]
    return (
        place.stack is place_of_last.stack
        and place.index == place_of_last.index + 1
        and buffer.offset_bytes == last.offset_bytes + last.num_bytes
        and buffer.tokens == last.tokens
    )


def _run_starts(pages: Tensor) -> list[int]:
    """Return the indices at which a run of consecutive pages begins."""
    breaks = torch.nonzero(torch.diff(pages) != 1).view(-1) + 1
    return [0, *breaks.tolist()]


def _stacked(views: Mapping[tuple[int, bool], Tensor]) -> dict[tuple[int, bool], StackPlace]:
    """Join buffers, in the order of the wire, to the longest evenly spaced stacks."""
    places: dict[tuple[int, bool], StackPlace] = {}
    run: list[tuple[int, bool]] = []
    for key, view in views.items():
        if run and not _continues([views[earlier] for earlier in run[-2:]], view):
            places |= _places_of(run, views)
            run = []
        run.append(key)
    return places | _places_of(run, views)


def _continues(last: Sequence[Tensor], view: Tensor) -> bool:
    """Return whether a buffer is like the last ones of a stack (one or two), at the same distance as between those."""
    end = last[-1]
    is_alike = (view.shape, view.stride(), view.dtype) == (end.shape, end.stride(), end.dtype)
    if not is_alike or view.untyped_storage().data_ptr() != end.untyped_storage().data_ptr():
        return False
    distance = view.storage_offset() - end.storage_offset()
    return distance > 0 and (len(last) == 1 or distance == end.storage_offset() - last[0].storage_offset())


def _places_of(run: Sequence[tuple[int, bool]], views: Mapping[tuple[int, bool], Tensor]) -> dict[tuple[int, bool], StackPlace]:
    first = views[run[0]]
    distance = views[run[1]].storage_offset() - first.storage_offset() if len(run) > 1 else first.shape[0] * first.stride(0)
    stack = _pieces(first.as_strided((len(run), *first.shape), (distance, *first.stride())))
    return {key: StackPlace(stack=stack, index=index) for index, key in enumerate(run)}


def _pieces(view: Tensor) -> PoolPieces:
    """Return the pieces of a stack [buffers, num_pages, page_size, heads, dim]."""
    num_buffers, num_pages, page_size, heads, dim = view.shape
    element = view.element_size()
    buffer_stride, page_stride, token_stride, head_stride, _ = (stride * element for stride in view.stride())
    as_bytes = view[0, 0, 0, 0].view(torch.uint8)
    is_joined = heads == 1 or head_stride == dim * element
    pieces, piece_bytes = (1, heads * dim * element) if is_joined else (heads, dim * element)
    outer, outer_strides = (num_buffers, num_pages), (buffer_stride, page_stride)
    tokens = as_bytes.as_strided((*outer, page_size, pieces, piece_bytes), (*outer_strides, token_stride, head_stride, 1))
    pages, page_bytes = tokens, page_size * piece_bytes
    if pieces == 1 and (page_size == 1 or token_stride == piece_bytes):
        pages = as_bytes.as_strided((*outer, 1, 1, page_bytes), (*outer_strides, page_bytes, page_bytes, 1))
    word = WORDS[math.gcd(8, pages.shape[-1], pages.storage_offset(), *pages.stride()[:-1])]
    return PoolPieces(tokens=_opaque(tokens), pages=_opaque(pages), words=pages.view(word), row_bytes=pieces * piece_bytes)


def _opaque(pieces: Tensor) -> Array:
    """Return [..., piece_bytes] bytes as an array of opaque elements of that size. NumPy moves each by one memmove."""
    joined: Array = pieces.numpy().view(np.dtype((np.void, pieces.shape[-1])))[..., 0]
    return joined


def _gather_bytes(pieces: PoolPieces, plan: TokenPlan, wire: Array) -> None:
    """Pages to `wire`, uint8 [buffers, bytes of a buffer]."""
    for run in plan.runs:
        source = _run_part(pieces, run)
        np.copyto(_wire_part(pieces, wire, source, run.wire_token, run.num_tokens), source)
    if plan.scattered is None:
        return
    num_buffers, _, page_size, _ = pieces.tokens.shape
    begin, count = plan.wire_token * pieces.row_bytes, len(plan.scattered)
    target = wire[:, begin : begin + count * page_size * pieces.row_bytes]
    if target.size < MIN_BYTES_FOR_TORCH:
        shape = (num_buffers, count, *pieces.pages.shape[2:])
        target.view(pieces.pages.dtype).reshape(shape)[...] = pieces.pages[:, plan.scattered.numpy()]
    elif target.flags.c_contiguous and pieces.words.is_contiguous():
        words = torch.from_numpy(target.reshape(-1)).view(pieces.words.dtype).view(num_buffers, count, *pieces.words.shape[2:])
        torch.index_select(pieces.words, 1, plan.scattered, out=words)
    else:
        for words_of_buffer, row in zip(pieces.words, target, strict=True):
            words = torch.from_numpy(row).view(pieces.words.dtype).view(count, *pieces.words.shape[2:])
            torch.index_select(words_of_buffer, 0, plan.scattered, out=words)


def _scatter_bytes(pieces: PoolPieces, plan: TokenPlan, wire: Array) -> None:
    """`wire`, uint8 [buffers, bytes of a buffer], to pages."""
    for run in plan.runs:
        target = _run_part(pieces, run)
        np.copyto(target, _wire_part(pieces, wire, target, run.wire_token, run.num_tokens))
    if plan.scattered is not None:
        num_buffers, _, page_size, _ = pieces.tokens.shape
        begin, count = plan.wire_token * pieces.row_bytes, len(plan.scattered)
        source = wire[:, begin : begin + count * page_size * pieces.row_bytes].view(pieces.pages.dtype)
        pieces.pages[:, plan.scattered.numpy()] = source.reshape(num_buffers, count, *pieces.pages.shape[2:])


def _run_part(pieces: PoolPieces, run: TokenRun) -> Array:
    """Pool side of a run, with pieces as large as they can be."""
    if run.end - run.begin == pieces.tokens.shape[2]:
        return pieces.pages[:, run.page : run.page + run.num_pages]
    return pieces.tokens[:, run.page : run.page + run.num_pages, run.begin : run.end]


def _wire_part(pieces: PoolPieces, wire: Array, pool_side: Array, wire_token: int, num_tokens: int) -> Array:
    """Wire side of a run, in the shape and the opaque elements of its pool side."""
    begin = wire_token * pieces.row_bytes
    part = wire[:, begin : begin + num_tokens * pieces.row_bytes].view(pool_side.dtype)
    return part.reshape(pool_side.shape)
