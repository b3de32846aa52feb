"""Gather and scatter for pools in host memory: few large copies, no Python per token, the GIL released in all of them.

What is copied at once is a *piece*: the longest run of bytes that is contiguous on both sides. With all heads of an NHD pool
that is a whole page, with some of them a token, in an HND pool a head of a token. Whole pages go by one indexed copy per
buffer, or, where the page table is mostly consecutive, by one strided copy per run of pages; the part pages at both ends by
one copy each.

Measured on one core (64 MB, rows of 1.5 KB, pages of 16): an indexed gather is fastest with `torch.index_select` on 8-byte words
(NumPy's `take` needs contiguous arrays, its fancy indexing a temporary), an indexed scatter with a NumPy assignment of opaque
elements of a piece's size (torch's `index_copy_` and `index_put_` reach half to two thirds of it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.kernels.copier import CopyJob, HeadSliceCopier
from transfer.kv_pool import PagedKVPool, convert
from transfer.layout import DType, Span, WireBuffer

Array = npt.NDArray[Any]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# A run costs one call of about a microsecond, an indexed page about 50 ns plus the loss of hardware prefetch at its end.
MIN_PAGES_PER_RUN = 4

# Below, NumPy's smaller cost per call outweighs the temporary that its indexing makes.
MIN_BYTES_FOR_TORCH = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """Tokens that lie evenly spaced: offsets [begin, end) of `num_pages` consecutive pages, at wire token `wire_token`."""

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
    """Where a token range lies: runs, and perhaps whole pages in no order (int64 [n], from wire token `wire_token`)."""

    runs: tuple[PageRun, ...]
    scattered: Tensor | None
    wire_token: int


def plan_tokens(pages: Tensor, slots: Span, page_size: int) -> TokenPlan:
    """Cut a token range into part pages and whole pages.

    Args:
        pages: int64 [n] on CPU, the page table.
        slots: The tokens, counted from the start of the page table; not empty.
        page_size: Tokens per page.
    """
    whole_begin, whole_end = -(-slots.begin // page_size), slots.end // page_size
    runs: list[PageRun] = []
    if slots.begin % page_size:
        first = slots.begin // page_size
        end = min(page_size, slots.end - first * page_size)
        runs.append(PageRun(page=int(pages[first]), num_pages=1, begin=slots.begin % page_size, end=end, wire_token=0))
    if slots.end % page_size and whole_begin <= whole_end:  # otherwise the first part page is also the last
        token, end = whole_end * page_size - slots.begin, slots.end % page_size
        runs.append(PageRun(page=int(pages[whole_end]), num_pages=1, begin=0, end=end, wire_token=token))
    if whole_begin >= whole_end:
        return TokenPlan(runs=tuple(runs), scattered=None, wire_token=0)
    whole, token = pages[whole_begin:whole_end], whole_begin * page_size - slots.begin
    starts = _run_starts(whole)
    if len(starts) * MIN_PAGES_PER_RUN > len(whole) and len(starts) > 1:
        return TokenPlan(runs=tuple(runs), scattered=whole, wire_token=token)
    for begin, end in zip(starts, [*starts[1:], len(whole)], strict=True):
        run = PageRun(page=int(whole[begin]), num_pages=end - begin, begin=0, end=page_size, wire_token=token + begin * page_size)
        runs.append(run)
    return TokenPlan(runs=tuple(runs), scattered=None, wire_token=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolPieces:
    """The travelling heads of one pool buffer, shared, as pieces; made once, because making a view costs as much as a small copy.

    Args:
        tokens: [num_pages, page_size, pieces], opaque elements of one piece; heads that lie together are one piece.
        pages: [num_pages, ...], the same, but with a whole page as one piece where its tokens lie together.
        words: `pages` with the words of a piece as last dimension, for torch; the widest words that every size and stride allows.
        row_bytes: Bytes of a token.
    """

    tokens: Array
    pages: Array
    words: Tensor
    row_bytes: int


class HostCopier(HeadSliceCopier):
    """Gather and scatter of a pool in host memory; uses as many threads as torch is set to, for gathers of scattered pages."""

    def __init__(self, pool: PagedKVPool, *, heads: Span, wire_dtype: DType) -> None:
        super().__init__(pool, heads=heads, wire_dtype=wire_dtype)
        self._pieces = {key: _pieces(view) for key, view in self._views.items()}

    def _gather(self, job: CopyJob) -> None:
        wire = job.wire.numpy()
        for buffer, plan in self._planned(job):
            pieces = self._pieces[buffer.layer, buffer.is_v]
            if self.wire_dtype is self.pool.element:
                _gather_bytes(pieces, plan, wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes])
                continue
            found = torch.empty((len(buffer.tokens), *self._view(buffer).shape[2:]), dtype=self.pool.dtype)
            _gather_bytes(pieces, plan, found.view(torch.uint8).view(-1).numpy())
            self._wire(job, buffer).copy_(convert(found, self.wire_dtype))

    def _scatter(self, job: CopyJob) -> None:
        wire = job.wire.numpy()
        for buffer, plan in self._planned(job):
            pieces = self._pieces[buffer.layer, buffer.is_v]
            if self.wire_dtype is self.pool.element:
                _scatter_bytes(pieces, plan, wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes])
                continue
            values = convert(self._wire(job, buffer), self.pool.element)
            _scatter_bytes(pieces, plan, values.view(torch.uint8).view(-1).numpy())

    def _planned(self, job: CopyJob) -> Iterator[tuple[WireBuffer, TokenPlan]]:
        tokens, plan = Span(begin=0, end=0), None
        for buffer in job.buffers:
            if not len(buffer.tokens):
                continue
            if plan is None or buffer.tokens != tokens:  # nearly always the same for all buffers of a chunk
                tokens, plan = buffer.tokens, plan_tokens(job.pages, job.slots(buffer), self.pool.page_size)
            yield buffer, plan


def _run_starts(pages: Tensor) -> list[int]:
    """Indices at which a run of consecutive pages begins."""
    breaks = torch.nonzero(torch.diff(pages) != 1).view(-1) + 1
    return [0, *breaks.tolist()]


def _pieces(view: Tensor) -> PoolPieces:
    num_pages, page_size, heads, dim = view.shape
    element = view.element_size()
    page_stride, token_stride, head_stride, _ = (stride * element for stride in view.stride())
    as_bytes = view[0, 0, 0].view(torch.uint8)
    is_joined = heads == 1 or head_stride == dim * element
    pieces, piece_bytes = (1, heads * dim * element) if is_joined else (heads, dim * element)
    tokens = as_bytes.as_strided((num_pages, page_size, pieces, piece_bytes), (page_stride, token_stride, head_stride, 1))
    pages, page_bytes = tokens, page_size * piece_bytes
    if pieces == 1 and (page_size == 1 or token_stride == piece_bytes):
        pages = as_bytes.as_strided((num_pages, 1, 1, page_bytes), (page_stride, page_bytes, page_bytes, 1))
    word = WORDS[math.gcd(8, pages.shape[-1], pages.storage_offset(), *pages.stride()[:-1])]
    return PoolPieces(tokens=_opaque(tokens), pages=_opaque(pages), words=pages.view(word), row_bytes=pieces * piece_bytes)


def _opaque(pieces: Tensor) -> Array:
    """[..., piece_bytes] bytes as an array of opaque elements of that size, which NumPy moves by one memmove each."""
    joined: Array = pieces.numpy().view(np.dtype((np.void, pieces.shape[-1])))[..., 0]
    return joined


def _gather_bytes(pieces: PoolPieces, plan: TokenPlan, wire: Array) -> None:
    for run in plan.runs:
        source = _run_part(pieces, run)
        np.copyto(_wire_part(pieces, wire, source, run.wire_token, run.num_tokens), source)
    if plan.scattered is not None:
        begin, count = plan.wire_token * pieces.row_bytes, len(plan.scattered)
        target = wire[begin : begin + count * pieces.tokens.shape[1] * pieces.row_bytes]
        if len(target) < MIN_BYTES_FOR_TORCH:
            shape = pieces.pages.shape[1:]
            target.view(pieces.pages.dtype).reshape(count, *shape)[...] = pieces.pages[plan.scattered.numpy()]
            return
        words = torch.from_numpy(target).view(pieces.words.dtype).view(count, *pieces.words.shape[1:])
        torch.index_select(pieces.words, 0, plan.scattered, out=words)


def _scatter_bytes(pieces: PoolPieces, plan: TokenPlan, wire: Array) -> None:
    for run in plan.runs:
        target = _run_part(pieces, run)
        np.copyto(target, _wire_part(pieces, wire, target, run.wire_token, run.num_tokens))
    if plan.scattered is not None:
        begin, count = plan.wire_token * pieces.row_bytes, len(plan.scattered)
        source = wire[begin : begin + count * pieces.tokens.shape[1] * pieces.row_bytes].view(pieces.pages.dtype)
        pieces.pages[plan.scattered.numpy()] = source.reshape(count, *pieces.pages.shape[1:])


def _run_part(pieces: PoolPieces, run: PageRun) -> Array:
    """Pool side of a run, with pieces as large as they can be."""
    if run.end - run.begin == pieces.tokens.shape[1]:
        return pieces.pages[run.page : run.page + run.num_pages]
    return pieces.tokens[run.page : run.page + run.num_pages, run.begin : run.end]


def _wire_part(pieces: PoolPieces, wire: Array, pool_side: Array, wire_token: int, num_tokens: int) -> Array:
    """Wire side of a run, in the shape and the opaque elements of its pool side."""
    begin = wire_token * pieces.row_bytes
    part = wire[begin : begin + num_tokens * pieces.row_bytes].view(pool_side.dtype)
    return part.reshape(pool_side.shape)
