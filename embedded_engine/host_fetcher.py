"""Fetch host pages to a GPU, layer after layer through two device buffers, while other layers compute.

A kernel on a separate stream reads pinned host memory over the link; a page's K and V of a layer are adjacent. Fetches are queued
in the order in which they are read. So the first blocks of a layer arrive while the previous layer still computes its MLP: the
stream waits only for a free buffer, and a reader only for its own fetch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embedded_engine.host_tier import Fetch, HostBlock, HostBlocks
from transfer.copy.page_kernel import LINK_PROGRAMS, Segment, SegmentCopier
from transfer.engine_types import StoredKV, StoredRead
from transfer.errors import LocalProtocolError
from transfer.pool.kv_pool import KVPool

NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockBuffer:
    """A layer's view of a device buffer, as a small pool, and the copier that fills it.

    Args:
        k, v: [pages, ...] in the shapes of the pool's buffers; `v` is None if the layer has none.
        copier: Copies K and V from the layer's part of host pages.
        k_copier: Copies K alone.
    """

    k: Tensor
    v: Tensor | None
    copier: SegmentCopier
    k_copier: SegmentCopier


class HostFetcher:
    """Fetch host pages for a step. Not thread-safe: it has one owner.

    With TRITON_INTERPRET=1 it also works on a CPU, where every fetch ends at once.
    """

    def __init__(self, pool: KVPool, tier: HostBlocks) -> None:
        self._device = device = pool.device
        is_gpu = device.type == "cuda"
        self._layers = tuple(tier.slice_bytes)
        self._slice_bytes = tier.slice_bytes
        num_bytes = tier.pages_per_block * max(tier.slice_bytes.values())
        self._memory = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._buffers = [{layer: _block_buffer(tier, layer, memory) for layer in self._layers} for memory in self._memory]
        # High priority: a fetch takes few multiprocessors, and the link must not wait.
        self._stream = torch.cuda.Stream(device, priority=-1) if is_gpu else None
        self._fetched = [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if is_gpu else []
        self._used = [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if is_gpu else []
        self._stored = stored = tier.stored
        self._stored_copiers = [{} if stored is None else _stored_copiers(tier, stored, memory) for memory in self._memory]
        self._is_lost = [False] * NUM_BUFFERS  # the store did not return the block
        self._blocks: Sequence[HostBlock] = ()
        self._queued: deque[Fetch] = deque()
        self._in_flight: deque[Fetch] = deque()
        self._num_fetched = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers on the device."""
        return sum(memory.numel() for memory in self._memory)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with host pages, ascending."""
        return self._layers

    def begin(self, blocks: Sequence[HostBlock], pages: Tensor, counts: Tensor | None = None) -> None:
        """Begin a step that reads the same blocks in each layer, and fetch the first of them.

        Args:
            blocks: At least one.
            pages: Their host pages, int64 on the device, written by work on the current stream.
            counts: int64 [blocks] on the device, like `pages`: pages in use of each block; None means all.
        """
        self.begin_empty()
        self._blocks = blocks
        if self._stored is not None:
            numbers = [block.stored for block in blocks if block.stored is not None]
            self._stored.begin([StoredRead(layer=layer, block=number) for layer in self._layers for number in numbers])
        self.add(
            [
                Fetch(
                    layer=layer,
                    pages=pages[block.begin :],
                    num_pages=block.num_pages,
                    count=None if counts is None or block.stored is not None else counts[index:],
                    is_stored=block.stored is not None,
                )
                for layer in self._layers
                for index, block in enumerate(blocks)
            ]
        )

    def begin_empty(self) -> None:
        """Begin a step without fetches; see `add`."""
        self._queued.clear()
        self._in_flight.clear()
        self._num_fetched = 0

    def add(self, fetches: Sequence[Fetch]) -> None:
        """Queue more fetches. They start after the work on the current stream, which may have written their pages."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for fetch in fetches:
                fetch.pages.record_stream(self._stream)
                if fetch.count is not None:
                    fetch.count.record_stream(self._stream)
        self._queued.extend(fetches)
        while self._queued and len(self._in_flight) < NUM_BUFFERS:
            self._fetch_next()

    def blocks_of(self, layer: int) -> Iterator[tuple[HostBlock, BlockBuffer | None]]:
        """Yield each block of a layer that `begin` was given; see `buffers`."""
        yield from zip(self._blocks, self.buffers(layer, len(self._blocks)), strict=True)

    def buffers(self, layer: int, count: int) -> Iterator[BlockBuffer | None]:
        """Yield the buffers of the next `count` fetches, each valid until the next iteration. None means that the store failed.

        Queue the work that reads it on the current stream.

        Raises:
            LocalProtocolError: The next fetch is one of another layer.
        """
        for _ in range(count):
            if not self._in_flight or self._in_flight[0].layer != layer:
                raise LocalProtocolError(f"host pages of layer {layer} were requested out of order")
            place = (self._num_fetched - len(self._in_flight)) % NUM_BUFFERS
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_event(self._fetched[place])
            yield None if self._is_lost[place] else self._buffers[place][layer]
            if self._stream is not None:
                self._used[place].record(torch.cuda.current_stream(self._device))
                self._stream.wait_event(self._used[place])
            self._in_flight.popleft()
            if self._queued:
                self._fetch_next()

    def end(self) -> None:
        """End the step: later work on the current stream runs after its fetches, also in a graph that is captured."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _fetch_next(self) -> None:
        """Start the next fetch; the stream already waits for its buffer."""
        fetch = self._queued.popleft()
        place = self._num_fetched % NUM_BUFFERS
        self._is_lost[place] = False
        if fetch.is_stored:
            self._fetch_stored(place, fetch)
        else:
            buffer = self._buffers[place][fetch.layer]
            copier = buffer.copier if fetch.has_v else buffer.k_copier
            count_at = 0 if fetch.count is None else fetch.count.data_ptr()
            with self._on_stream():
                copier(fetch.pages.data_ptr(), 0, fetch.num_pages, count_at)
        if self._stream is not None:
            self._fetched[place].record(self._stream)
        self._in_flight.append(fetch)
        self._num_fetched += 1

    def _fetch_stored(self, place: int, fetch: Fetch) -> None:
        """Wait until the store has returned the block, and queue its copy from the buffer in host memory."""
        assert self._stored is not None
        buffer = self._stored.next()
        if buffer is None:
            self._is_lost[place] = True
            return
        with self._on_stream():
            self._stored_copiers[place][self._slice_bytes[fetch.layer], buffer](0, 0, fetch.num_pages)
        self._stored.release(buffer, None if self._stream is None else self._stream.record_event())

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _stored_copiers(tier: HostBlocks, stored: StoredKV, memory: Tensor) -> dict[tuple[int, int], SegmentCopier]:
    """Return the copiers from each buffer of the stored blocks, by the bytes of a layer's part of a page and the buffer."""
    return {
        (size, index): _segment_copier(
            tier,
            layer,
            memory,
            source=buffer.data_ptr(),
            source_stride=size,
            num_source_pages=stored.pages_per_block,
            is_packed=True,
        )
        for layer, size in tier.slice_bytes.items()
        for index, buffer in enumerate(stored.buffers)
    }


def _segment_copier(
    tier: HostBlocks,
    layer: int,
    memory: Tensor,
    *,
    source: int,
    source_stride: int,
    num_source_pages: int,
    is_packed: bool,
    num_bytes: int | None = None,
) -> SegmentCopier:
    """Return a copier of a layer's part of pages into `memory`, from pages of a table or, if `is_packed`, from the first ones.

    Args:
        num_bytes: Bytes of the part that are copied, from its first; None means all.
    """
    size = tier.slice_bytes[layer]
    segment = Segment(
        source=source,
        target=memory.data_ptr(),
        source_stride=source_stride,
        target_stride=size,
        num_bytes=size if num_bytes is None else num_bytes,
    )
    return SegmentCopier(
        memory.device,
        [segment],
        num_source_pages=num_source_pages,
        num_target_pages=tier.pages_per_block,
        is_source_packed=is_packed,
        is_target_packed=True,
        max_programs=LINK_PROGRAMS,
    )


def _block_buffer(tier: HostBlocks, layer: int, memory: Tensor) -> BlockBuffer:
    part, views = tier.host.device_part(tier.group), tier.views_of(layer, memory, tier.pages_per_block)
    host_k = part.buffer(layer, is_v=False)

    def copier(num_bytes: int) -> SegmentCopier:
        return _segment_copier(
            tier,
            layer,
            memory,
            source=host_k.data_ptr(),
            source_stride=tier.host.page_bytes[tier.group],
            num_source_pages=part.num_pages,
            is_packed=False,
            num_bytes=num_bytes,
        )

    k_bytes = host_k.shape[1:].numel() * host_k.element_size()
    return BlockBuffer(k=views.k, v=views.v, copier=copier(tier.slice_bytes[layer]), k_copier=copier(k_bytes))
