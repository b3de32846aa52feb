"""Gather and scatter of pieces: a chunk's part of one route, between the pages of a request and contiguous bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.chunk import Chunk
from transfer.kernels import head_slice_copier
from transfer.kernels.copier import HeadSliceCopier
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, KVLayout, Route, Span, WireBuffer, wire_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCopy:
    """One piece, ready to be copied on any thread.

    Args:
        pages: int64 [n], the pages that hold the chunk's tokens.
        first_token: The request's token at offset 0 of the first of them.
    """

    copier: HeadSliceCopier
    buffers: Sequence[WireBuffer]
    pages: Tensor
    first_token: int

    def gather(self, out: Tensor) -> None:
        self.copier.gather(self.pages, self.buffers, out, first_token=self.first_token)

    def scatter(self, source: Tensor) -> None:
        self.copier.scatter(self.pages, self.buffers, source, first_token=self.first_token)


class PieceCopier:
    """Prepares the copies of one pool; keeps a copier for each head slice and wire dtype it has met."""

    def __init__(self, pool: PagedKVPool) -> None:
        self._pool = pool
        self._copiers: dict[tuple[int, int, DType], HeadSliceCopier] = {}

    def prepare(
        self, layout: KVLayout, route: Route, chunk: Chunk, *, heads: Span, num_tokens: int, dtype: DType, pages: Sequence[int]
    ) -> PieceCopy:
        """A copy of the piece.

        Args:
            heads: The route's heads as this rank counts them.
            num_tokens: Tokens of the whole prompt.
            dtype: Element type on the wire.
            pages: The request's pages from token 0 on, up to the chunk's end at least.
        """
        key = (heads.begin, heads.end, dtype)
        if key not in self._copiers:
            self._copiers[key] = head_slice_copier(self._pool, heads=heads, wire_dtype=dtype)
        first = chunk.tokens.begin // self._pool.page_size
        end = -(-chunk.tokens.end // self._pool.page_size)
        return PieceCopy(
            copier=self._copiers[key],
            buffers=wire_buffers(layout, route, tokens=chunk.tokens, layers=chunk.layers, num_tokens=num_tokens, dtype=dtype),
            pages=torch.tensor(pages[first:end], dtype=torch.int64),
            first_token=first * self._pool.page_size,
        )
