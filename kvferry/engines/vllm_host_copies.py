"""Copy blocks of vLLM's KV cache in host memory to and from the chunks of vLLM's offloading.

vLLM's own copies need a GPU. This file copies blocks if attention runs on a CPU and its cache is in host memory. It imports
nothing of vLLM.

Offsets and strides are vLLM's: a `run` of a layer has fragments at ``local_offset + i * local_stride`` of a block and at
``canonical_offset + i * canonical_stride`` of the layer's part of a chunk.
Source: vLLM 0.32.0, ``v1/kv_offload/base.py`` (`CopyRun`, `CanonicalPageMapping`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Fragments of one run of a layer, in the largest words that fit.

    `blocks` is [blocks, fragments, words], `chunks` is [chunks, blocks_per_chunk, fragments, words]. If several workers hold the
    same heads, one of them writes each block of a chunk: the one whose `writer` equals the block's number modulo `num_writers`.
    """

    blocks: Tensor
    chunks: Tensor
    num_writers: int
    writer: int


class HostCopies:
    """Copy blocks of one worker. The copies are finished when a call returns.

    Args:
        tensors: vLLM's tensors, [blocks, block_bytes] int8.
        groups: Layers of each group, as vLLM's references: ``tensor_idx``, ``page_size_bytes`` and ``mapping``. A mapping of None
            means that chunks contain the bytes of the workers one after another.
        chunks: A view of host memory for each tensor, [chunks, blocks_per_chunk * part_bytes] int8.
        blocks_per_chunk: Blocks of each group in a chunk.
    """

    def __init__(
        self, tensors: Sequence[Tensor], groups: Sequence[Sequence[Any]], chunks: Sequence[Tensor], *, blocks_per_chunk: int
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = [
            [
                part
                for layer in group
                for part in _parts(tensors[layer.tensor_idx], chunks[layer.tensor_idx], layer, blocks_per_chunk)
            ]
            for group in groups
        ]

    def save(self, blocks: Any, chunks: Any) -> int:
        """Copy blocks into chunks, and return the number of bytes.

        Args:
            blocks: vLLM's ``GPULoadStoreSpec``: ``block_ids`` of all groups one after another, ``group_sizes``, and
                ``block_indices``, the position of each group's first block in the request.
            chunks: ``block_ids`` of the chunks; for each group, the first chunk contains the first block.
        """
        return self._copy(blocks, chunks, is_save=True)

    def load(self, chunks: Any, blocks: Any) -> int:
        """Copy chunks into blocks, and return the number of bytes. For the arguments, see `save`."""
        return self._copy(blocks, chunks, is_save=False)

    def _copy(self, blocks: Any, chunks: Any, *, is_save: bool) -> int:
        num_bytes = 0
        for parts, block_ids, chunk_ids, places in self._places(blocks, chunks):
            for part in parts:
                if is_save:
                    mine = (chunk_ids * self._blocks_per_chunk + places) % part.num_writers == part.writer
                    copied = part.blocks[block_ids[mine]]
                    part.chunks[chunk_ids[mine], places[mine]] = copied
                else:
                    copied = part.chunks[chunk_ids, places]
                    part.blocks[block_ids] = copied
                num_bytes += copied.nbytes
        return num_bytes

    def _places(self, blocks: Any, chunks: Any) -> Iterator[tuple[list[_Part], Tensor, Tensor, Tensor]]:
        """Yield the parts of each group, the ids of its blocks, and for each block its chunk and its index in the chunk."""
        first_block, first_chunk = 0, 0
        block_ids, chunk_ids = (torch.as_tensor(ids.block_ids, dtype=torch.int64) for ids in (blocks, chunks))
        for parts, size, index in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            if not size:
                continue
            skipped = index % self._blocks_per_chunk
            numbers = torch.arange(skipped, skipped + size)
            of_group = chunk_ids[first_chunk:][numbers // self._blocks_per_chunk]
            yield parts, block_ids[first_block : first_block + size], of_group, numbers % self._blocks_per_chunk
            first_block += size
            first_chunk += -(-(skipped + size) // self._blocks_per_chunk)


def chunk_part_bytes(tensors: Sequence[Tensor], groups: Sequence[Sequence[Any]], *, is_canonical: bool) -> list[int]:
    """Return the bytes of a block of each tensor in a chunk."""
    if not is_canonical:
        return [tensor.shape[1] for tensor in tensors]
    sizes = [0] * len(tensors)
    for layer in (layer for group in groups for layer in group):
        sizes[layer.tensor_idx] = max(sizes[layer.tensor_idx], layer.mapping.canonical_page_size_bytes)
    return sizes


def _parts(blocks: Tensor, chunks: Tensor, layer: Any, blocks_per_chunk: int) -> Iterator[_Part]:
    part_bytes = chunks.shape[1] // blocks_per_chunk
    if layer.mapping is None:
        runs = [(0, 0, layer.page_size_bytes, 1, layer.page_size_bytes, layer.page_size_bytes)]
        num_writers, writer = 1, 0
    else:
        runs = [
            (run.local_offset, run.canonical_offset, run.fragment_size, run.num_fragments, run.local_stride, run.canonical_stride)
            for run in layer.mapping.runs
        ]
        num_writers, writer = layer.mapping.num_writers, layer.mapping.writer_index
    for local, canonical, size, num_fragments, local_stride, canonical_stride in runs:
        local_shape = (blocks.shape[0], num_fragments, size)
        local_strides = (blocks.stride(0), local_stride, 1)
        chunk_shape = (chunks.shape[0], blocks_per_chunk, num_fragments, size)
        chunk_strides = (chunks.stride(0), part_bytes, canonical_stride, 1)
        local += int(blocks.storage_offset())
        canonical += int(chunks.storage_offset())
        word = math.gcd(8, size, local, canonical, *local_strides[:-1], *chunk_strides[:-1])
        yield _Part(
            blocks=_in_words(blocks, word, local, local_shape, local_strides),
            chunks=_in_words(chunks, word, canonical, chunk_shape, chunk_strides),
            num_writers=num_writers,
            writer=writer,
        )


def _in_words(memory: Tensor, word: int, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return a view of a tensor's memory in words of `word` bytes. All numbers are in bytes; the last dimension is dense."""
    view = torch.empty(0, dtype=_WORDS[word])
    view.set_(
        memory.untyped_storage(),
        offset // word,
        (*shape[:-1], shape[-1] // word),
        (*(stride // word for stride in strides[:-1]), 1),
    )
    return view
