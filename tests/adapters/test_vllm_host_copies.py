"""Copies between blocks in host memory and chunks, with mappings like those of vLLM. tests/vllm uses vLLM's own mappings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvferry.engines.vllm_host_copies import HostCopies, chunk_part_bytes

HEADS, HEAD_BYTES = 4, 24
NUM_BLOCKS, NUM_CHUNKS = 9, 5


@dataclass(frozen=True)
class Run:
    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class Mapping:
    canonical_page_size_bytes: int
    runs: tuple[Run, ...]
    num_writers: int = 1
    writer_index: int = 0


@dataclass(frozen=True)
class Layer:
    tensor_idx: int
    page_size_bytes: int
    mapping: Mapping | None


@dataclass(frozen=True)
class Ids:
    block_ids: np.ndarray[Any, Any]
    group_sizes: tuple[int, ...] = ()
    block_indices: tuple[int, ...] = ()


def blocks(*ids: int, sizes: tuple[int, ...] = (), indices: tuple[int, ...] = (0,)) -> Ids:
    return Ids(np.array(ids, dtype=np.int32), sizes or (len(ids),), indices)


def chunks(*ids: int) -> Ids:
    return Ids(np.array(ids, dtype=np.int32))


def rank_of(rank: int, tp: int, memory: Tensor, per_chunk: int = 1, *, head_bytes: int = HEAD_BYTES) -> tuple[HostCopies, Tensor]:
    """A rank that has a part of the heads of one layer. All ranks share `memory`."""
    heads = HEADS // tp
    cache = torch.randint(0, 127, (NUM_BLOCKS, heads * head_bytes), dtype=torch.int8)
    run = Run(0, rank * heads * head_bytes, head_bytes, heads, head_bytes, head_bytes)
    layers = [[Layer(0, cache.shape[1], Mapping(HEADS * head_bytes, (run,)))]]
    assert chunk_part_bytes([cache], layers, is_canonical=True) == [HEADS * head_bytes]
    return HostCopies([cache], layers, [memory], blocks_per_chunk=per_chunk), cache


@pytest.mark.parametrize("head_bytes", [24, 12, 6, 5])
def test_one_rank_loads_blocks_that_two_ranks_saved(head_bytes: int) -> None:
    memory = torch.zeros(NUM_CHUNKS, HEADS * head_bytes + 40, dtype=torch.int8)[:, : HEADS * head_bytes]
    one, whole = rank_of(0, 1, memory, head_bytes=head_bytes)
    pair = [rank_of(rank, 2, memory, head_bytes=head_bytes) for rank in range(2)]
    for copies, cache in pair:
        assert copies.save(blocks(7, 2), chunks(4, 0)) == 2 * cache.shape[1]
    assert one.load(chunks(4, 0), blocks(1, 3)) == 2 * whole.shape[1]
    for new, old in ((1, 7), (3, 2)):
        assert torch.equal(whole[new], torch.cat([cache[old] for _, cache in pair]))


def test_a_request_begins_and_ends_within_chunks() -> None:
    memory = torch.zeros(NUM_CHUNKS, 3 * HEADS * HEAD_BYTES, dtype=torch.int8)
    first, saved = rank_of(0, 1, memory, per_chunk=3)
    second, loaded = rank_of(0, 1, memory, per_chunk=3)
    before = loaded.clone()
    first.save(blocks(0, 1, 2, 3, 4, 5), chunks(2, 4))
    second.load(chunks(2, 4), blocks(8, 6, 7, indices=(2,)))
    assert torch.equal(loaded[[8, 6, 7]], saved[[2, 3, 4]])
    assert torch.equal(loaded[:6], before[:6])


def test_groups_have_tensors_and_chunks_of_their_own() -> None:
    size = HEAD_BYTES
    tensors = [torch.randint(0, 127, (NUM_BLOCKS, size), dtype=torch.int8) for _ in range(2)]
    memory = [torch.zeros(NUM_CHUNKS, size, dtype=torch.int8) for _ in range(2)]
    copies = HostCopies(tensors, [[Layer(0, size, None)], [], [Layer(1, size, None)]], memory, blocks_per_chunk=1)
    assert chunk_part_bytes(tensors, [], is_canonical=False) == [size, size]
    num_bytes = copies.save(blocks(1, 2, 3, sizes=(2, 0, 1), indices=(0, 0, 5)), chunks(0, 1, 2))
    assert num_bytes == 3 * size
    assert torch.equal(memory[0][:2], tensors[0][1:3])
    assert torch.equal(memory[1][2], tensors[1][3])
    assert not memory[0][2].any() and not memory[1][:2].any()


def test_ranks_that_hold_the_same_heads_take_turns() -> None:
    size = HEAD_BYTES
    memory = torch.zeros(NUM_CHUNKS, size, dtype=torch.int8)
    for rank in range(2):
        cache = torch.full((NUM_BLOCKS, size), rank + 1, dtype=torch.int8)
        mapping = Mapping(size, (Run(0, 0, size, 1, size, size),), num_writers=2, writer_index=rank)
        copies = HostCopies([cache], [[Layer(0, size, mapping)]], [memory], blocks_per_chunk=1)
        copies.save(blocks(0, 1, 2), chunks(0, 1, 2))
        copies.load(chunks(0), blocks(5))
        assert (cache[5] == 1).all()
    assert memory[:, 0].tolist() == [1, 2, 1, 0, 0]
