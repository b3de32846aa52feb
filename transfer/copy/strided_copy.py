"""Gather and scatter for pools in host memory whose heads' elements are not adjacent, as where an engine keeps K transposed.

One strided NumPy copy for each run of pages and buffer, straight between pool and wire: nothing is copied twice, and the GIL is
released. NumPy walks such a copy in the order of what it writes, so that its reads are a stride apart; they stay in one block,
and so in the cache. A view of the same pool whose elements are adjacent (mostly V) moves a head of a token at a time, as one
opaque element.

Measured on one core (16 MB of [page, head, dim, token], consecutive pages; a plain copy in the cache's reach: 24 GB/s). Blocks of
128 tokens x 32 float32: gather 4.6, scatter 4.7 GB/s, which is 1.2 elements per nanosecond; their V 13.8 and 11.2. Elements of
bfloat16 are half as many bytes: 2.0 and 2.0 GB/s with 4 heads of 128. Slower were torch's ``copy_`` of the same views (3.3 and
4.6, float32), one copy for each page and head (NumPy 2.7 and 4.0, torch 1.5 and 1.7: its blocked transposition wants both sides
contiguous), and tiles of 8 to 32 tokens (1.7 to 4.1). With one exception: where the rows of the wire are a multiple of 2 KiB
apart, a column of them has few places in the first cache. A scatter takes such rows 16 at a time: 8 heads of 128, in float32 from
1.4 to 3.4 GB/s, in bfloat16 from 0.9 to 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory, wire_tensor
from transfer.copy.digest import HostDigest
from transfer.copy.host_copy import TokenRun, plan_tokens
from transfer.layout import DType, Range, WireBuffer
from transfer.pool.kv_pool import PagedKVPool, as_words, convert

Array = npt.NDArray[Any]

ALIASING_BYTES = 2048  # rows that far apart, or a multiple of it, share two or fewer sets of a cache of 64 sets of 64-byte lines
TILE_TOKENS = 16  # what a scatter of such rows takes at a time: as many lines as two sets hold


class StridedCopier(HeadSliceCopier):
    """Gather and scatter of a pool in host memory with any strides. Uses one thread."""

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        heads: Range,
        wire_dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None = None,
    ) -> None:
        super().__init__(pool, heads=heads, wire_dtype=wire_dtype, scales=scales)
        self.arrays: dict[tuple[int, bool], Array] = {key: _elements(view) for key, view in self.views.items()}

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _StridedPlan(self, buffers)


class _StridedPlan(CopyPlan):
    def __init__(self, copier: StridedCopier, buffers: Sequence[WireBuffer]) -> None:
        super().__init__(copier, buffers)
        self._is_converting = copier.wire_dtype is not copier.pool.element
        self._arrays = [copier.arrays[buffer.layer, buffer.is_v] for buffer in self.buffers]

    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, out, "out", first_page, digest)
        wire = wire_tensor(out)
        for buffer, array, runs in self._with_runs(pages[first_page:]):
            if self._is_converting:
                self._gather_converted(buffer, runs, wire)
                continue
            target = _on_wire(wire, buffer, array)
            for run in runs:
                np.copyto(_tokens_on_wire(target, run), _tokens_in_pool(array, run))
        if isinstance(digest, HostDigest):
            digest.update(wire[: self.num_wire_bytes])

    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, source, "source", first_page, digest)
        wire = wire_tensor(source)
        for buffer, array, runs in self._with_runs(pages[first_page:]):
            if isinstance(digest, HostDigest):
                digest.update(wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes])
            if self._is_converting:
                self._scatter_converted(buffer, runs, wire)
                continue
            found = _on_wire(wire, buffer, array)
            is_aliasing = array.ndim == 4 and buffer.row_bytes % ALIASING_BYTES == 0
            for run in runs:
                onto, values = _tokens_in_pool(array, run), _tokens_on_wire(found, run)
                tile = TILE_TOKENS if is_aliasing else onto.shape[1]
                for begin in range(0, onto.shape[1], tile):
                    np.copyto(onto[:, begin : begin + tile], values[:, begin : begin + tile])

    def _with_runs(self, pages: Tensor) -> Iterator[tuple[WireBuffer, Array, Sequence[TokenRun]]]:
        """Yield each buffer, its pool side, and the places of its tokens."""
        known: dict[Range, tuple[TokenRun, ...]] = {}  # nearly always one, in a chunk
        for buffer, array in zip(self.buffers, self._arrays, strict=True):
            runs = known.get(buffer.tokens)
            if runs is None:
                plan = plan_tokens(pages, buffer.tokens, self._pool.page_size, min_pages_per_run=1)
                runs = known[buffer.tokens] = plan.runs
            yield buffer, array, runs

    def _gather_converted(self, buffer: WireBuffer, runs: Sequence[TokenRun], wire: Tensor) -> None:
        copier, view = self._copier, self._copier.view(buffer)
        target = as_words(copier.wire_part(wire, buffer)).numpy()
        for run in runs:
            found = view[run.page : run.page + run.num_pages, run.begin : run.end]
            converted = as_words(convert(found, copier.wire_dtype, scale=copier.scale(buffer)))
            np.copyto(_tokens_on_wire(target, run), converted.numpy())

    def _scatter_converted(self, buffer: WireBuffer, runs: Sequence[TokenRun], wire: Tensor) -> None:
        copier = self._copier
        values = convert(copier.wire_part(wire, buffer), self._pool.element, scale=copier.scale(buffer))
        source, target = as_words(values).numpy(), as_words(copier.view(buffer)).numpy()
        for run in runs:
            np.copyto(_tokens_in_pool(target, run), _tokens_on_wire(source, run))


def _elements(view: Tensor) -> Array:
    """Return [num_pages, page_size, heads, dim] as words of an element's size; without dim if elements are adjacent."""
    if view.stride(-1) != 1:
        words: Array = as_words(view).numpy()
        return words
    as_bytes: Array = view.view(torch.uint8).numpy()
    rows: Array = as_bytes.view(np.dtype((np.void, as_bytes.shape[-1])))[..., 0]
    return rows


def _on_wire(wire: Tensor, buffer: WireBuffer, array: Array) -> Array:
    """Return a buffer's part of the wire, [tokens, ...], in the elements of its pool side."""
    part: Array = wire[buffer.offset_bytes : buffer.offset_bytes + buffer.num_bytes].numpy()
    return part.view(array.dtype).reshape(len(buffer.tokens), *array.shape[2:])


def _tokens_on_wire(wire: Array, run: TokenRun) -> Array:
    """Return [tokens, ...] of a run as [pages, tokens of a page, ...]."""
    return wire[run.wire_token : run.wire_token + run.num_tokens].reshape(run.num_pages, -1, *wire.shape[1:])


def _tokens_in_pool(array: Array, run: TokenRun) -> Array:
    return array[run.page : run.page + run.num_pages, run.begin : run.end]
