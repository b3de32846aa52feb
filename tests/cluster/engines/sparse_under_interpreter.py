"""Block-sparse prefill as on a GPU, under Triton's interpreter; run by test_under_interpreter.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.host_fetcher import HostFetcher
from embedded_engine.host_prefill import HostChunk, HostPages, HostStep
from embedded_engine.host_tier import HostBlocks
from embedded_engine.kernels import block_sparse, block_sparse_reference
from embedded_engine.sparse_prefill import ChunkBlocks, SparseChunk, SparsePrefill
from planner.workspace import XAttention, sparse_prefill_workspaces
from tests.embedded_engine.sparse_cases import CASES, assert_attends_sparsely
from tests.embedded_engine.steps import Directory, make_engine
from tests.embedded_engine.tiers import full_group, host_pool_of, largest_slice
from transfer.layout import Shard

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name: str) -> None:
    assert_attends_sparsely(CASES[name], block_sparse)


@pytest.mark.parametrize(("page_size", "threshold"), [(4, 0.3), (4, 1), (128, 0.3)])
def test_blocks_of_host_memory_are_fetched_in_turn(family_dir: Directory, page_size: int, threshold: float) -> None:
    """Two chunks of several fetches and one without earlier tokens, in each layer, against a read of the host pages in place."""
    policy = XAttention(block_size=64, stride=8, threshold=threshold)
    engine = make_engine(family_dir("glm"), Shard(page_size=page_size), num_tokens=512)
    lengths = (430, 0, 300)
    host = host_pool_of(engine, sum(-(-length // page_size) for length in lengths) + 4)
    group = full_group(engine.pool.groups)
    part = host.part(group)
    num_heads = 2 * part.num_heads(0)
    generator = torch.Generator().manual_seed(1)
    free = torch.randperm(part.num_pages, generator=generator)
    chunks = []
    for index, length in enumerate(lengths):
        count = -(-max(length, 1) // page_size)
        pages, free = free[:count], free[count:]
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        for layer in part.layers:
            k, v = torch.randn(2, length, part.num_heads(layer), part.head_dim(layer, is_v=False), generator=generator)
            part.write(layer, slots, k, v)
        chunks.append(HostChunk(begin=70 * index, end=70 * (index + 1), first_token=length, pages=pages.numpy()))

    def attend(kernels: object, *, has_fetcher: bool) -> list[Tensor]:
        tier = HostBlocks(engine.pool, host, block_bytes=max(1, 128 // page_size) * largest_slice(host, group))
        pages = HostPages(engine.pool, tier)
        if has_fetcher:
            pages.fetcher = HostFetcher(engine.pool, tier)
        workspaces = sparse_prefill_workspaces(policy, num_heads=num_heads, chunk_tokens=70, max_seq_len=512)
        sparse = SparsePrefill(policy, workspaces, kernels, page_size=page_size, device=torch.device("cpu"))
        step = HostStep(pages, chunks, sparse)
        found = []
        inputs = torch.Generator().manual_seed(2)
        for layer in part.layers:
            heads, dim = part.num_heads(layer), part.head_dim(layer, is_v=False)
            for index, chunk in enumerate(chunks):
                query = torch.randn(1, num_heads, 70, dim, generator=inputs)
                k, v = torch.randn(2, 70, heads, dim, generator=inputs)
                cut = ChunkBlocks(sparse, num_earlier=chunk.first_token, rows=70)
                attention = SparseChunk(sparse, query, k, v, Scores(scale=dim**-0.5), cut)
                attention.estimate(attention.own)
                for span in step.spans(layer, index):
                    attention.estimate(span)
                is_used = attention.select()
                attention.attend(attention.own)
                for span, bounds in step.selected_spans(layer, index, is_used):
                    attention.attend(span, bounds)
                found.append(attention.result())
        sparse.end_step()
        assert (sparse.read_counts().density == 1) == (threshold == 1)
        return found

    wanted = attend(block_sparse_reference, has_fetcher=False)
    found = attend(block_sparse, has_fetcher=True)
    assert len(found) == len(wanted) == 3 * len(part.layers)
    assert np.isfinite(torch.cat(found).numpy()).all()
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted), atol=1e-5, rtol=0)
