"""Fetch host blocks to a GPU, layer after layer through two device buffers, while other layers compute.

A kernel on a separate stream reads pinned host memory over the link; a page's K and V of a layer are adjacent. The fetches of a
step have a fixed order, the blocks of one layer and then those of the next. So the first blocks of a layer arrive while the
previous layer still computes its MLP: the stream waits only for a free buffer, and a reader only for its own block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embedded_engine.host_tier import HostBlock, HostBlocks
from transfer.copy.page_kernel import LINK_PROGRAMS, Segment, SegmentCopier
from transfer.errors import LocalProtocolError
from transfer.pool.kv_pool import KVPool

NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockBuffer:
    """A layer's view of a device buffer, as a small pool, and the copier that fills it.

    Args:
        k, v: [pages, ...] in the shapes of the pool's buffers; `v` is None if the layer has none.
        copier: Copies from the layer's part of host pages.
    """

    k: Tensor
    v: Tensor | None
    copier: SegmentCopier


class HostFetcher:
    """Fetch the host blocks of a step, once per layer. Not thread-safe: it has one owner.

    With TRITON_INTERPRET=1 it also works on a CPU, where every fetch ends at once.
    """

    def __init__(self, pool: KVPool, tier: HostBlocks) -> None:
        self._device = device = pool.device
        is_gpu = device.type == "cuda"
        self._layers = tuple(tier.slice_bytes)
        num_bytes = tier.pages_per_block * max(tier.slice_bytes.values())
        self._memory = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._buffers = [{layer: _block_buffer(tier, layer, memory) for layer in self._layers} for memory in self._memory]
        # High priority: a fetch takes few multiprocessors, and the link must not wait.
        self._stream = torch.cuda.Stream(device, priority=-1) if is_gpu else None
        self._fetched = [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if is_gpu else []
        self._used = [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if is_gpu else []
        self._blocks: Sequence[HostBlock] = ()
        self._pages = torch.empty(0, dtype=torch.int64)
        self._counts: Tensor | None = None
        self._num_fetched = 0
        self._num_used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers on the device."""
        return sum(memory.numel() for memory in self._memory)

    def begin(self, blocks: Sequence[HostBlock], pages: Tensor, counts: Tensor | None = None) -> None:
        """Begin a step, and fetch its first blocks.

        Args:
            blocks: At least one.
            pages: Their host pages, int64 on the device, written by work on the current stream.
            counts: int64 [blocks] on the device, like `pages`: pages in use of each block; None means all.
        """
        self._blocks, self._pages, self._counts = blocks, pages, counts
        self._num_fetched = self._num_used = 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            pages.record_stream(self._stream)
        for _ in range(NUM_BUFFERS):
            self._fetch_next()

    def blocks_of(self, layer: int) -> Iterator[tuple[HostBlock, BlockBuffer]]:
        """Yield each block of a layer, in a buffer that is valid until the next iteration.

        Queue the work that reads it on the current stream. Ask for each layer once, in ascending order.
        """
        for block in self._blocks:
            if self._layers[self._num_used // len(self._blocks)] != layer:
                raise LocalProtocolError(f"host blocks of layer {layer} are asked for out of turn")
            place = self._num_used % NUM_BUFFERS
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_event(self._fetched[place])
            yield block, self._buffers[place][layer]
            if self._stream is not None:
                self._used[place].record(torch.cuda.current_stream(self._device))
                self._stream.wait_event(self._used[place])
            self._num_used += 1
            self._fetch_next()

    def end(self) -> None:
        """End the step: later work on the current stream runs after its fetches, also in a graph that is captured."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _fetch_next(self) -> None:
        """Queue the next fetch of the step, if there is one; the stream already waits for its buffer."""
        if self._num_fetched == len(self._layers) * len(self._blocks):
            return
        index = self._num_fetched % len(self._blocks)
        layer, block = self._layers[self._num_fetched // len(self._blocks)], self._blocks[index]
        place = self._num_fetched % NUM_BUFFERS
        copier, pages = self._buffers[place][layer].copier, self._pages[block.begin :].data_ptr()
        count_at = 0 if self._counts is None else self._counts[index:].data_ptr()
        if self._stream is None:
            copier(pages, 0, block.num_pages, count_at)
        else:
            with torch.cuda.stream(self._stream):
                copier(pages, 0, block.num_pages, count_at)
            self._fetched[place].record(self._stream)
        self._num_fetched += 1


def _block_buffer(tier: HostBlocks, layer: int, memory: Tensor) -> BlockBuffer:
    part, size = tier.host.device_part(tier.group), tier.slice_bytes[layer]
    host_k = part.buffer(layer, is_v=False)
    pages = memory[: tier.pages_per_block * size].view(tier.pages_per_block, size)
    k_bytes = host_k.shape[1:].numel() * host_k.element_size()
    k = pages[:, :k_bytes].view(host_k.dtype).view(-1, *host_k.shape[1:])
    v: Tensor | None = None
    if part.layout.layers[layer].num_buffers == 2:
        host_v = part.buffer(layer, is_v=True)
        v = pages[:, k_bytes:].view(host_v.dtype).view(-1, *host_v.shape[1:])
    segment = Segment(
        source=host_k.data_ptr(),
        target=memory.data_ptr(),
        source_stride=tier.host.page_bytes[tier.group],
        target_stride=size,
        num_bytes=size,
    )
    copier = SegmentCopier(
        memory.device,
        [segment],
        num_source_pages=part.num_pages,
        num_target_pages=tier.pages_per_block,
        is_target_packed=True,
        max_programs=LINK_PROGRAMS,
    )
    return BlockBuffer(k=k, v=v, copier=copier)
