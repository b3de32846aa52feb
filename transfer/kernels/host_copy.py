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


class HostCopier(HeadSliceCopier):
    """Gather and scatter of a pool in host memory; uses as many threads as torch is set to, for gathers of scattered pages."""

    def __init__(self, pool: PagedKVPool, *, heads: Span, wire_dtype: DType) -> None:
        super().__init__(pool, heads=heads, wire_dtype=wire_dtype)
        self._pieces = {key: _pieces(view) for key, view in self._views.items()}

    def _gather(self, job: CopyJob) -> None:
        for buffer, plan in self._planned(job):
            pieces = self._pieces[buffer.layer, buffer.is_v]
            if self.wire_dtype is self.pool.element:
                _gather_bytes(pieces, plan, _part(job, buffer))
                continue
            view = self._view(buffer)
            found = torch.empty((len(buffer.tokens), *view.shape[2:]), dtype=self.pool.dtype)
            _gather_bytes(pieces, plan, found.view(torch.uint8).view(-1))
            self._wire(job, buffer).copy_(convert(found, self.wire_dtype))

    def _scatter(self, job: CopyJob) -> None:
        for buffer, plan in self._planned(job):
            pieces = self._pieces[buffer.layer, buffer.is_v]
            if self.wire_dtype is self.pool.element:
                _scatter_bytes(pieces, plan, _part(job, buffer))
                continue
            values = convert(self._wire(job, buffer), self.pool.element)
            _scatter_bytes(pieces, plan, values.view(torch.uint8).view(-1))

    def _planned(self, job: CopyJob) -> Iterator[tuple[WireBuffer, TokenPlan]]:
        plans: dict[Span, TokenPlan] = {}
        for buffer in job.buffers:
            if not len(buffer.tokens):
                continue
            plan = plans.get(buffer.tokens)
            if plan is None:
                plan = plans[buffer.tokens] = plan_tokens(job.pages, job.slots(buffer), self.pool.page_size)
            yield buffer, plan


def _part(job: CopyJob, buffer: WireBuffer) -> Tensor:
    return job.wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes]


def _run_starts(pages: Tensor) -> list[int]:
    """Indices at which a run of consecutive pages begins."""
    breaks = torch.nonzero(torch.diff(pages) != 1).view(-1) + 1
    return [0, *breaks.tolist()]


def _pieces(view: Tensor) -> Tensor:
    """Pool bytes as [num_pages, page_size, pieces, piece_bytes], shared: heads that lie together become one piece."""
    num_pages, page_size, heads, dim = view.shape
    element = view.element_size()
    page_stride, token_stride, head_stride, _ = (stride * element for stride in view.stride())
    as_bytes = view[0, 0, 0].view(torch.uint8)
    is_joined = heads == 1 or head_stride == dim * element
    pieces, piece_bytes = (1, heads * dim * element) if is_joined else (heads, dim * element)
    return as_bytes.as_strided((num_pages, page_size, pieces, piece_bytes), (page_stride, token_stride, head_stride, 1))


def _gather_bytes(pieces: Tensor, plan: TokenPlan, out: Tensor) -> None:
    _, page_size, num_pieces, piece_bytes = pieces.shape
    row_bytes = num_pieces * piece_bytes
    for run in plan.runs:
        begin = run.wire_token * row_bytes
        target = _opaque(out[begin : begin + run.num_tokens * row_bytes].view(run.num_pages, -1, num_pieces, piece_bytes))
        np.copyto(target, _opaque(_run_part(pieces, run)))
    if plan.scattered is not None:
        target_bytes = out[plan.wire_token * row_bytes :][: len(plan.scattered) * page_size * row_bytes]
        source, target_words = _same_words(_joined(pieces), target_bytes)
        torch.index_select(source, 0, plan.scattered, out=target_words.view(len(plan.scattered), *source.shape[1:]))


def _scatter_bytes(pieces: Tensor, plan: TokenPlan, wire: Tensor) -> None:
    _, page_size, num_pieces, piece_bytes = pieces.shape
    row_bytes = num_pieces * piece_bytes
    for run in plan.runs:
        begin = run.wire_token * row_bytes
        source = _opaque(wire[begin : begin + run.num_tokens * row_bytes].view(run.num_pages, -1, num_pieces, piece_bytes))
        np.copyto(_opaque(_run_part(pieces, run)), source)
    if plan.scattered is not None:
        part = wire[plan.wire_token * row_bytes :][: len(plan.scattered) * page_size * row_bytes]
        target = _joined(pieces)
        _opaque(target)[plan.scattered.numpy()] = _opaque(part.view(len(plan.scattered), *target.shape[1:]))


def _run_part(pieces: Tensor, run: PageRun) -> Tensor:
    return pieces[run.page : run.page + run.num_pages, run.begin : run.end]


def _joined(pieces: Tensor) -> Tensor:
    """The same bytes with a page as one piece, where its tokens lie together."""
    num_pages, page_size, num_pieces, piece_bytes = pieces.shape
    page_bytes = page_size * piece_bytes
    if num_pieces == 1 and (page_size == 1 or pieces.stride(1) == piece_bytes):
        return pieces.as_strided((num_pages, 1, 1, page_bytes), (pieces.stride(0), page_bytes, page_bytes, 1))
    return pieces


def _opaque(pieces: Tensor) -> Array:
    """[..., piece_bytes] bytes as an array of opaque elements of that size, which NumPy moves by one memmove each."""
    joined: Array = pieces.numpy().view(np.dtype((np.void, pieces.shape[-1])))[..., 0]
    return joined


def _same_words(pieces: Tensor, wire: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides as the widest words that divide every size, stride and offset."""
    sizes = (pieces.shape[-1], pieces.storage_offset(), wire.storage_offset(), *pieces.stride()[:-1])
    word = WORDS[math.gcd(8, *sizes)]
    return pieces.view(word), wire.view(word)
