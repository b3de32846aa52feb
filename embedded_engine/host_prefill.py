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

from embedded_engine.host_tier import Fetch, HostBlock, HostBlocks, StepBlocks, cut_into_blocks
from embedded_engine.kernels.block_sparse_arguments import KeySpan
from embedded_engine.sparse_prefill import SparsePrefill, UnitPages, token_major
from embedded_engine.step_arrays import on_device, token_slots
from transfer.layout import TokenOrder
from transfer.pool.kv_pool import KVPool

if TYPE_CHECKING:
    from embedded_engine.host_fetcher import BlockBuffer, HostFetcher


class HostPages:
    """Hold the host pages, the device buffers for them, and the stream that writes them. All steps of an engine share these.

    Args:
        pool: The engine's pool.
        tier: Its host pages.
        has_fetcher: Whether a Triton kernel fetches them on a GPU. Otherwise torch reads them where they lie, over the host link.
    """

    def __init__(self, pool: KVPool, tier: HostBlocks, *, has_fetcher: bool = True) -> None:
        self.tier = tier
        self.device = pool.device
        self.fetcher: HostFetcher | None = None
        self.write_stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            if has_fetcher:
                from embedded_engine.host_fetcher import HostFetcher  # imports Triton

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
        sparse: The policy of block-sparse prefill; None for full attention.
    """

    def __init__(self, host: HostPages, chunks: Sequence[HostChunk], sparse: SparsePrefill | None = None) -> None:
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
        if host.write_stream is not None:
            torch.cuda.current_stream(host.device).wait_stream(host.write_stream)  # this step reads KV of the last one
        if sparse is not None:
            self._contexts = [on_device(pages, host.device) for pages in contexts]
            self._begin_sparse(sparse)
            return
        ends = np.cumsum([len(pages) for pages in contexts]) * tier.page_size
        self._first_context_tokens = [int(end) - len(pages) * tier.page_size for end, pages in zip(ends, contexts, strict=True)]
        if any(map(len, contexts)):
            self._blocks = cut_into_blocks(
                [pages.tolist() for pages in contexts], pages_per_block=tier.pages_per_block, page_size=tier.page_size
            )
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
            assert buffer is not None  # prefill has no stored blocks
            no_v = buffer.k[..., :0] if buffer.v is None else buffer.v
            for chunk, first, count in self._parts(block):
                k, v = (_tokens(one, self._part.order, first, count) for one in (buffer.k, no_v))
                yield chunk, k, v

    def _begin_sparse(self, sparse: SparsePrefill) -> None:
        """Begin a step that estimates first: per layer and chunk, all K is fetched, and then K and V of selected blocks."""
        tier, fetcher = self._host.tier, self._host.fetcher
        self._sparse = sparse
        pages_per_unit = sparse.unit_tokens // tier.page_size
        units_per_fetch = tier.pages_per_block // pages_per_unit
        self._pages_per_fetch = units_per_fetch * pages_per_unit
        self._first_block_of_fetch = self._pages_per_fetch * tier.page_size // sparse.policy.block_size
        self._units = [
            UnitPages(sparse, pages, page_size=tier.page_size, units_per_fetch=units_per_fetch) if len(pages) else None
            for pages in self._contexts
        ]
        if fetcher is None:
            return
        self._turns = iter(
            [(layer, index) for layer in fetcher.layers for index, units in enumerate(self._units) if units is not None]
        )
        fetcher.begin_empty()
        fetcher.add(self._next_keys())

    def _next_keys(self) -> list[Fetch]:
        """Return the fetches of K of the next chunk and layer; empty after the last."""
        layer, index = next(self._turns, (0, None))
        if index is None:
            return []
        pages, size = self._contexts[index], self._pages_per_fetch
        return [
            Fetch(layer=layer, pages=pages[begin:], num_pages=min(size, len(pages) - begin), has_v=False)
            for begin in range(0, len(pages), size)
        ]

    def spans(self, layer: int, index: int) -> Iterator[KeySpan]:
        """Yield the earlier tokens of a chunk in spans, of which only K is valid, each until the next one.

        Ask for each layer in ascending order, and for each chunk of it in order. Then ask for `selected_spans`.
        """
        first_token, tier = self.chunks[index].first_token, self._host.tier
        if not first_token:
            return
        if self._host.fetcher is None:
            yield self._whole_span(layer, index)
            return
        tokens = self._pages_per_fetch * tier.page_size
        buffers = self._host.fetcher.buffers(layer, -(-first_token // tokens))
        for number, buffer in enumerate(buffers):
            assert buffer is not None  # no block of a prefill step is in the store
            yield KeySpan(
                **self._k_and_v(buffer.k, buffer.v),
                pages=None,
                num_tokens=min(tokens, first_token - number * tokens),
                first_block=number * self._first_block_of_fetch,
                is_own=False,
            )

    def selected_spans(self, layer: int, index: int, is_used: Tensor) -> Iterator[tuple[KeySpan, Tensor | None]]:
        """Queue the fetches of the selected blocks of a chunk. Return their spans, with the bounds of `SparseChunk.attend`.

        Args:
            is_used: See `SparseChunk.select`.
        """
        fetcher, units = self._host.fetcher, self._units[index]
        if units is None:
            return iter(())
        pages, counts, places, bounds = units.needed(is_used)
        k_bytes, page_bytes = self._page_bytes(layer)
        self._sparse.counts[2] += counts.sum() * page_bytes + len(self._contexts[index]) * k_bytes
        if fetcher is None:
            return iter([(self._whole_span(layer, index), None)])
        size = self._pages_per_fetch
        needed = [
            Fetch(layer=layer, pages=pages[number * size :], num_pages=size, count=counts[number:])
            for number in range(units.num_fetches)
        ]
        fetcher.add([*needed, *self._next_keys()])
        return self._fetched_spans(fetcher.buffers(layer, len(needed)), index, places, bounds)

    def _fetched_spans(
        self, buffers: Iterator[BlockBuffer | None], index: int, places: Tensor, bounds: Tensor
    ) -> Iterator[tuple[KeySpan, Tensor | None]]:
        for number, buffer in enumerate(buffers):
            assert buffer is not None  # no block of a prefill step is in the store
            span = KeySpan(
                **self._k_and_v(buffer.k, buffer.v),
                pages=places,
                num_tokens=self.chunks[index].first_token,
                first_block=0,
                is_own=False,
            )
            yield span, bounds[number : number + 2]

    def _page_bytes(self, layer: int) -> tuple[int, int]:
        """Return the bytes of a page's K, and of its K and V."""
        k = self._part.buffer(layer, is_v=False)
        return k[0].nbytes, self._host.tier.slice_bytes[layer]

    def _whole_span(self, layer: int, index: int) -> KeySpan:
        buffers = (self._part.buffer(layer, is_v=is_v) for is_v in (False, True))
        first_token, pages = self.chunks[index].first_token, self._contexts[index]
        return KeySpan(**self._k_and_v(*buffers), pages=pages, num_tokens=first_token, first_block=0, is_own=False)

    def _k_and_v(self, k: Tensor, v: Tensor | None) -> dict[str, Tensor]:
        assert v is not None  # the policy refuses models without V
        return {"k": token_major(k, self._part.order), "v": token_major(v, self._part.order)}

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
