"""Calls of block-sparse prefill attention: what kernels are compared with their references on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embedded_engine.kernels import block_sparse_reference
from embedded_engine.kernels.block_sparse_arguments import KeySpan, RunningState, Selection
from planner.workspace import XAttention
from transfer.layout import DType

POLICY = XAttention(block_size=64, stride=8, threshold=0.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCase:
    """The rows of one request, after `num_earlier` tokens in pages in random order; NaN wherever no token is."""

    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    num_earlier: int = 300
    rows: int = 150
    page_size: int = 16
    policy: XAttention = POLICY
    dtype: DType = DType.FLOAT32
    pool_dtype: DType | None = None

    def inputs(self, device: str) -> tuple[Tensor, list[KeySpan]]:
        """Return the query [heads, rows, dim], and the spans of the earlier tokens and of the rows' own."""
        generator = torch.Generator().manual_seed(3)
        query_heads, kv_heads = self.heads
        model, pool = (getattr(torch, dtype.value) for dtype in (self.dtype, self.pool_dtype or self.dtype))
        query = 2 * torch.randn(query_heads, self.rows, self.dim, generator=generator)
        num_pages = -(-self.num_earlier // self.page_size)
        pages = torch.randperm(num_pages + 2, generator=generator)[:num_pages]
        tokens = torch.arange(self.num_earlier)
        spans = []
        buffers = []
        for _ in range(2):
            buffer = torch.full((num_pages + 2, self.page_size, kv_heads, self.dim), float("nan"))
            values = torch.randn(self.num_earlier, kv_heads, self.dim, generator=generator)
            buffer[pages[tokens // self.page_size], tokens % self.page_size] = values
            buffers.append(buffer.to(pool).to(device))
        if self.num_earlier:
            k, v = buffers
            spans.append(KeySpan(k=k, v=v, pages=pages.to(device), num_tokens=self.num_earlier, first_block=0, is_own=False))
        k, v = (torch.randn(self.rows, 1, kv_heads, self.dim, generator=generator).to(pool).to(device) for _ in range(2))
        own_block = self.policy.num_blocks(self.num_earlier)
        spans.append(KeySpan(k=k, v=v, pages=None, num_tokens=self.rows, first_block=own_block, is_own=True))
        return query.to(model).to(device), spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What the functions found.

    Args:
        out: float32 [heads, rows, dim].
        lists: The selected blocks of each head and query block.
    """

    out: Tensor
    lists: list[list[list[int]]]
    is_used: list[int]


def attended(kernels: Any, query: Tensor, spans: Sequence[KeySpan], policy: XAttention) -> Attended:
    """Run estimate, selection and attention of a module over all spans; memory holds garbage before."""
    (heads, rows, dim), device = query.shape, query.device
    own = spans[-1].first_block
    num_blocks, query_blocks = own + policy.num_blocks(rows), policy.num_blocks(rows)
    lse = torch.full((heads, policy.num_groups(rows), num_blocks), float("nan"), device=device)
    sums = torch.full((heads, query_blocks, num_blocks), float("nan"), device=device)
    selection = Selection(
        blocks=torch.full((heads, query_blocks, num_blocks), -7, dtype=torch.int32, device=device),
        counts=torch.full((heads, query_blocks), -7, dtype=torch.int32, device=device),
        is_used=torch.zeros(num_blocks, dtype=torch.int32, device=device),
        own_block=own,
    )
    scale = dim**-0.5
    for span in spans:
        kernels.estimate(query, span, lse, policy, scale)
    kernels.select(lse, sums, selection, policy)
    state = RunningState(
        total=torch.zeros(heads, rows, dim, device=device),
        largest=torch.full((heads, rows), -math.inf, device=device),
        sum=torch.zeros(heads, rows, device=device),
    )
    for span in reversed(spans):
        end = span.first_block + policy.num_blocks(span.num_tokens)
        bounds = torch.tensor([span.first_block, end], dtype=torch.int32, device=device)
        kernels.attend(query, span, selection, bounds, state, policy.block_size, scale)
    counts = selection.counts.tolist()
    lists = [[selection.blocks[head, row, : counts[head][row]].tolist() for row in range(query_blocks)] for head in range(heads)]
    return Attended(out=state.total / state.sum[..., None], lists=lists, is_used=selection.is_used.tolist())


def assert_attends_sparsely(case: SparseCase, kernels: Any, device: str = "cpu") -> None:
    """Compare kernels with the reference: the same blocks, and the same attention."""
    query, spans = case.inputs(device)
    found = attended(kernels, query, spans, case.policy)
    wanted = attended(block_sparse_reference, query, spans, case.policy)
    assert found.lists == wanted.lists
    assert found.is_used == wanted.is_used
    tolerance = 1e-5 if case.dtype is DType.FLOAT32 else 2e-2
    torch.testing.assert_close(found.out, wanted.out, atol=tolerance, rtol=0)


CASES = {
    "all": SparseCase(policy=XAttention(block_size=64, stride=8, threshold=1)),
    "half": SparseCase(policy=XAttention(block_size=64, stride=8, threshold=0.5)),
    "aligned": SparseCase(num_earlier=256, rows=128, policy=XAttention(block_size=64, stride=16, threshold=0.8)),
    "no earlier tokens": SparseCase(num_earlier=0, rows=200),
    "one row": SparseCase(num_earlier=700, rows=1),
    "large pages": SparseCase(num_earlier=500, page_size=128),
    "blocks of 128": SparseCase(num_earlier=1000, rows=70, policy=XAttention(threshold=0.6)),
    "bfloat16": SparseCase(dtype=DType.BFLOAT16, heads=(4, 1), dim=24),
    "float8 pool": SparseCase(dtype=DType.BFLOAT16, pool_dtype=DType.FLOAT8_E4M3),
}
