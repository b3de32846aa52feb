"""Prefill of prompts whose KV of full attention lies in host memory.

Such a prompt has no device pages for full attention. Each step writes its K and V into host pages. It attends over its own
tokens and then over the earlier ones. These come from host memory block by block, through two device buffers. Partial results
are merged by their log-sum-exp (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedded_engine.host_tier import HostBlock, HostBlocks, StepBlocks, cut_into_blocks
from embedded_engine.step_arrays import on_device, token_slots
from transfer.layout import TokenOrder
from transfer.pool.kv_pool import KVPool

if TYPE_CHECKING:
    from embedded_engine.host_fetcher import HostFetcher


class HostPages:
    """Hold the host pages, the device buffers for them, and the stream that writes them. All steps of an engine share these.

    Args:
        pool: The engine's pool.
        tier: Its host pages.
    """

    def __init__(self, pool: KVPool, tier: HostBlocks) -> None:
        self.tier = tier
        self.device = pool.device
        self.fetcher: HostFetcher | None = None
        self.write_stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            from embedded_engine.host_fetcher import HostFetcher  # imports Triton, which a CPU does not need

            self.fetcher = HostFetcher(pool, tier)
            self.write_stream = torch.cuda.Stream(pool.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device buffers."""
        return 0 if self.fetcher is None else self.fetcher.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChunk:
    """The rows [begin, end) of a step that belong to one request, and the request's host pages.

    Args:
        first_token: Position of the first row.
        pages: Host pages of the tokens from 0 up to the last row's.
    """

    begin: int
    end: int
    first_token: int
    pages: NDArray[np.int64]

    @property
    def end_token(self) -> int:
        return self.first_token + self.end - self.begin


class HostStep:
    """The chunks of a step whose KV of full attention lies in host memory.

    Args:
        chunks: At least one.
    """

    def __init__(self, host: HostPages, chunks: Sequence[HostChunk]) -> None:
        self._host = host
        self.chunks = tuple(chunks)
        tier = host.tier
        self._part = tier.host.device_part(tier.group)
        self._new_slots = [
            on_device(token_slots(chunk.pages, chunk.first_token, chunk.end_token, tier.page_size), host.device)
            for chunk in chunks
        ]
        contexts = [chunk.pages[: -(-chunk.first_token // tier.page_size)] for chunk in chunks]
        self._blocks: StepBlocks | None = None
        ends = np.cumsum([len(pages) for pages in contexts]) * tier.page_size
        self._first_context_tokens = [int(end) - len(pages) * tier.page_size for end, pages in zip(ends, contexts, strict=True)]
        if any(map(len, contexts)):
            self._blocks = cut_into_blocks(
                [pages.tolist() for pages in contexts], pages_per_block=tier.pages_per_block, page_size=tier.page_size
            )
        if host.write_stream is not None:
            torch.cuda.current_stream(host.device).wait_stream(host.write_stream)  # this step reads KV of the last one
        if host.fetcher is not None and self._blocks is not None:
            host.fetcher.begin(self._blocks.blocks, on_device(self._blocks.pages, host.device))

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write K and V [rows, heads, dim] of a layer into host pages. On a GPU, a separate stream does it after queued work."""
        with self.on_write_stream():
            for chunk, slots in zip(self.chunks, self._new_slots, strict=True):
                self._part.write(layer, slots, k[chunk.begin : chunk.end], v[chunk.begin : chunk.end])
        if self._host.write_stream is not None:
            for tensor in (k, v, *self._new_slots):
                tensor.record_stream(self._host.write_stream)

    @contextmanager
    def on_write_stream(self) -> Iterator[None]:
        """Queue the work of the block after all writes to host pages, and after the work before the block."""
        stream = self._host.write_stream
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._host.device))
        with torch.cuda.stream(stream):
            yield

    def contexts(self, layer: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the earlier tokens of the chunks in blocks: the chunk's index, K and V [tokens, heads, dim] as stored.

        A block is valid until the next one. Call this once for each layer, in ascending order.
        """
        if self._blocks is None:
            return
        fetcher = self._host.fetcher
        if fetcher is None:
            for block in self._blocks.blocks:
                for chunk, first, count in self._parts(block):
                    pages = self._blocks.pages[block.begin : block.end]
                    slots = on_device(token_slots(pages, first, first + count, self._host.tier.page_size), self._host.device)
                    yield chunk, *self._part.read(layer, slots)
            return
        for block, buffer in fetcher.blocks_of(layer):
            no_v = buffer.k[..., :0] if buffer.v is None else buffer.v
            for chunk, first, count in self._parts(block):
                k, v = (_tokens(one, self._part.order, first, count) for one in (buffer.k, no_v))
                yield chunk, k, v

    def _parts(self, block: HostBlock) -> Iterator[tuple[int, int, int]]:
        """Yield the chunks that have tokens in a block, with the first of these tokens in the block and their number."""
        assert self._blocks is not None
        page_size = self._host.tier.page_size
        for chunk in range(block.first_row, block.end_row):
            part = block.first_part + chunk - block.first_row
            first = int(self._blocks.first_tokens[part])
            begin = (block.begin * page_size + first) - self._first_context_tokens[chunk]
            # The last page of a context can contain tokens of the chunk itself.
            count = min(int(self._blocks.num_tokens[part]), self.chunks[chunk].first_token - begin)
            if count > 0:
                yield chunk, first, count


def _tokens(buffer: Tensor, order: TokenOrder, first: int, count: int) -> Tensor:
    """Return some tokens of pages [pages, tokens, heads, dim] (HND: [pages, heads, tokens, dim]) as [tokens, heads, dim]."""
    by_token = buffer if order is TokenOrder.NHD else buffer.transpose(1, 2)
    page_size = by_token.shape[1]
    begin = first // page_size
    pages = by_token[begin : -(-(first + count) // page_size)]  # only these are copied
    return pages.flatten(0, 1)[first - begin * page_size :][:count]
