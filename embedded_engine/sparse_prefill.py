"""Block-sparse prefill: workspaces of an engine, and the attention of one chunk in one layer.

For each chunk, `SparseChunk` first estimates the attention to all blocks of keys, earlier ones and the chunk's own. Then it
selects blocks and attends to these. Earlier keys come in spans of adjacent tokens, from the pool or from host memory. Each span
is read for the estimate, and again if any of its blocks is selected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from embedded_engine.attention import RunningSoftmax, Scores
from embedded_engine.kernels.block_sparse_arguments import KeySpan, Selection
from embedded_engine.step_arrays import on_device
from planner.workspace import Workspace, XAttention
from transfer.engine_types import PrefillCounts
from transfer.errors import ConfigError, EngineError
from transfer.layout import TokenOrder

ALWAYS_SELECTED: Final = 2
"""The first block of a request, and a query's own."""

_DTYPES: Final = {
    "block_lse": torch.float32,
    "block_sums": torch.float32,
    "block_lists": torch.int32,
    "block_counts": torch.int32,
}


class SparsePrefill:
    """The policy of an engine and the memory for it. All layers and steps share these.

    Args:
        policy: How blocks are estimated and selected.
        workspaces: The buffers, as the memory plan declares them.
        kernels: Module of the functions `estimate`, `select` and `attend`.
        page_size: Page size of the pool.

    Attributes:
        counts: int64 [3] on the device, see `PrefillCounts`.
    """

    def __init__(
        self, policy: XAttention, workspaces: Sequence[Workspace], kernels: Any, *, page_size: int, device: torch.device
    ) -> None:
        if policy.block_size % page_size and page_size % policy.block_size:
            raise ConfigError(
                f"prefill.sparse_block_size is {policy.block_size} and the page size is {page_size}; "
                "one must be a multiple of the other"
            )
        self.policy = policy
        self.kernels = kernels
        self.page_size = page_size
        self.unit_tokens = max(policy.block_size, page_size)
        """Tokens that are fetched from host memory together if one of their blocks is selected."""
        self.device = device
        self._declared = {one.name: one for one in workspaces}
        self._buffers = {one.name: self._allocate(one) for one in workspaces if one.is_allocated}
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._counts_on_host = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")

    def _allocate(self, workspace: Workspace) -> Tensor:
        dtype = _DTYPES[workspace.name]
        return torch.empty(workspace.num_bytes // dtype.itemsize, dtype=dtype, device=self.device)

    @property
    def storage_bytes(self) -> dict[str, int]:
        """Bytes of each workspace that is allocated."""
        return {name: buffer.nbytes for name, buffer in self._buffers.items()}

    def end_step(self) -> None:
        """Queue a copy of the counts for `read_counts`."""
        self._counts_on_host.copy_(self.counts, non_blocking=True)

    def read_counts(self) -> PrefillCounts:
        """Return the counts after the newest step that the device has finished. Does not wait, so they can mix two steps."""
        selected, skipped, loaded = self._counts_on_host.tolist()
        return PrefillCounts(selected_blocks=selected, skipped_blocks=skipped, loaded_bytes=loaded)

    def compile_kernels(
        self, *, heads: tuple[int, int], dim: int, value_dim: int, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        """Compile the kernels for a rank's shapes, so that a missing compiler or too small a GPU is found at start.

        Args:
            heads: Query heads and KV heads.
            dtypes: That of the computation and that of the pool.

        Raises:
            ConfigError: The kernels do not fit the GPU.
        """
        num_earlier = ALWAYS_SELECTED * self.policy.block_size
        query = torch.zeros(1, heads[0], 1, dim, dtype=dtypes[0], device=self.device)
        k, v = (torch.zeros(1, heads[1], size, device=self.device).to(dtypes[1]) for size in (dim, value_dim))
        pages = torch.arange(-(-num_earlier // self.page_size), device=self.device)
        earlier_k, earlier_v = (
            torch.zeros(len(pages), self.page_size, *one.shape[1:], device=self.device).to(dtypes[1]) for one in (k, v)
        )
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        buffers = dict(self._buffers)
        try:
            for table in (None, pages, pages.int()):
                chunk = SparseChunk(self, query, k, v, Scores(scale=1.0), ChunkBlocks(self, num_earlier=num_earlier, rows=1))
                span = KeySpan(k=earlier_k, v=earlier_v, pages=table, num_tokens=num_earlier, first_block=0, is_own=False)
                for one in (chunk.own, span):
                    chunk.estimate(one)
                chunk.select()
                for one in (chunk.own, span):
                    chunk.attend(one)
        finally:
            self.counts, self._buffers = counts, buffers  # lazy workspaces are not kept

    def view(self, name: str, *shape: int) -> Tensor:
        """Return the beginning of a workspace; allocate the workspace if it is lazy.

        Raises:
            EngineError: The step or the sequence is longer than the workspace was declared for.
        """
        if name not in self._buffers:
            self._buffers[name] = self._allocate(self._declared[name])
        buffer, size = self._buffers[name], math.prod(shape)
        if size > buffer.numel():
            raise EngineError(
                f"{name} of a prompt has {shape} elements; the workspace has {buffer.numel()}: "
                "raise chunk.chunk_tokens or limits.max_seq_len"
            )
        return buffer[:size].view(shape)


class ChunkBlocks:
    """The blocks of a chunk, the same for all layers.

    Args:
        num_earlier: Tokens of the request before the chunk.
        rows: Tokens of the chunk.

    Attributes:
        own_block: Number of the chunk's first block.
        query_blocks, num_blocks: Numbers of the chunk's own blocks and of all blocks.
        bounds: int32 [3] on the device: 0, `own_block` and `num_blocks`.
    """

    def __init__(self, sparse: SparsePrefill, *, num_earlier: int, rows: int) -> None:
        self.own_block = sparse.policy.num_blocks(num_earlier)
        self.query_blocks = sparse.policy.num_blocks(rows)
        self.num_blocks = self.own_block + self.query_blocks
        self.bounds = on_device(np.array([0, self.own_block, self.num_blocks], dtype=np.int32), sparse.device)
        self._all: Selection | None = None

    @property
    def has_choice(self) -> bool:
        """Whether a block exists that is neither the first nor that of a query itself."""
        return self.num_blocks > ALWAYS_SELECTED

    def all_blocks(self, num_heads: int) -> Selection:
        """Return the selection of all blocks; the same for all layers."""
        if self._all is None:
            device = self.bounds.device
            blocks = torch.arange(self.num_blocks, dtype=torch.int32, device=device)
            counts = torch.arange(self.own_block + 1, self.num_blocks + 1, dtype=torch.int32, device=device)
            self._all = Selection(
                blocks=blocks.repeat(num_heads, self.query_blocks, 1),
                counts=counts.repeat(num_heads, 1),
                is_used=torch.ones_like(blocks),
                own_block=self.own_block,
            )
        return self._all


class SparseChunk:
    """The attention of the rows of one request in one layer of a step.

    First `estimate` each span of the earlier tokens and `own`, then `select`, then `attend` to each span again. Then `result`.

    Args:
        query: [1, query heads, rows, dim].
        k, v: [rows, KV heads, dim], K and V of the rows as the pool stores them.
        cut: The chunk's blocks.

    Attributes:
        own: The rows' own tokens.
    """

    def __init__(self, sparse: SparsePrefill, query: Tensor, k: Tensor, v: Tensor, scores: Scores, cut: ChunkBlocks) -> None:
        if scores.softcap is not None:
            raise EngineError(f"a layer has a soft cap of {scores.softcap:g}, which block-sparse prefill does not support")
        policy, rows = sparse.policy, query.shape[2]
        self._sparse = sparse
        self._query = query[0]
        self._scale = scores.scale
        self._running = RunningSoftmax(query, k.shape[1], v.shape[2], scores)
        self._cut = cut
        self.own = KeySpan(
            k=k.unsqueeze(1), v=v.unsqueeze(1), pages=None, num_tokens=rows, first_block=cut.own_block, is_own=True
        )
        heads, query_blocks, num_blocks = query.shape[1], cut.query_blocks, cut.num_blocks
        if not cut.has_choice:
            self.selection = cut.all_blocks(heads)
            return
        self._lse = sparse.view("block_lse", heads, policy.num_groups(rows), num_blocks)
        self._sums = sparse.view("block_sums", heads, query_blocks, num_blocks)
        counts = sparse.view("block_counts", heads * query_blocks + num_blocks)
        self.selection = Selection(
            blocks=sparse.view("block_lists", heads, query_blocks, num_blocks),
            counts=counts[: heads * query_blocks].view(heads, query_blocks),
            is_used=counts[heads * query_blocks :].zero_(),
            own_block=cut.own_block,
        )

    def estimate(self, span: KeySpan) -> None:
        """Estimate the attention to a span, unless all blocks are selected anyway."""
        if not self._cut.has_choice:
            return
        self._sparse.kernels.estimate(self._query, span, self._lse, self._sparse.policy, self._scale)

    def select(self) -> Tensor:
        """Select blocks. Return int32 [earlier blocks], 1 for the blocks that are selected."""
        selection, sparse, cut = self.selection, self._sparse, self._cut
        if cut.has_choice:
            sparse.kernels.select(self._lse, self._sums, selection, sparse.policy)
        selected = selection.counts.sum()
        sparse.counts[0] += selected
        sparse.counts[1] += len(selection.counts) * sum(range(cut.own_block + 1, cut.num_blocks + 1)) - selected
        return selection.is_used[: selection.own_block]

    def attend(self, span: KeySpan, bounds: Tensor | None = None) -> None:
        """Attend to the selected blocks of a span.

        Args:
            bounds: int32 [2] on the device, first and end number of the blocks that are in the span; None means all blocks of
                the earlier tokens, or of the chunk itself.
        """
        if bounds is None:
            bounds = self._cut.bounds[1:] if span.is_own else self._cut.bounds[:2]
        policy = self._sparse.policy
        self._sparse.kernels.attend(
            self._query, span, self.selection, bounds, self._running.state, policy.block_size, self._scale
        )

    def result(self) -> Tensor:
        """Return [1, query heads, rows, value dim]."""
        return self._running.result()


class UnitPages:
    """The host pages of a request's earlier tokens in units, and those that a selection needs.

    Args:
        pages: int64 [pages] on the device, of tokens from 0 on.
        page_size: Tokens of a page.
        units_per_fetch: Units that one device buffer holds.
    """

    def __init__(self, sparse: SparsePrefill, pages: Tensor, *, page_size: int, units_per_fetch: int) -> None:
        self._unit_blocks = sparse.unit_tokens // sparse.policy.block_size
        self._pages_per_unit = sparse.unit_tokens // page_size
        self._units_per_fetch = units_per_fetch
        self.num_units = -(-len(pages) // self._pages_per_unit)
        missing = self.num_units * self._pages_per_unit - len(pages)
        self._pages = torch.cat([pages, pages[-1:].expand(missing)]).view(self.num_units, -1)

    @property
    def num_fetches(self) -> int:
        """Number of fetches for all units."""
        return -(-self.num_units // self._units_per_fetch)

    def needed(self, is_used: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what to fetch for a selection, without waiting for the device.

        Args:
            is_used: int32 [earlier blocks].

        Returns:
            - int64 [units * pages per unit]: host pages of the needed units, one unit after the other; the rest is not valid.
            - int64 [fetches]: number of pages of each fetch.
            - int32 [pages]: of each page of the request its place in the buffer of its fetch, if its unit is needed.
            - int32 [fetches + 1]: block numbers; fetch i has the needed blocks in [bounds[i], bounds[i + 1]).
        """
        device = self._pages.device
        padded = torch.zeros(self.num_units * self._unit_blocks, dtype=torch.int32, device=device)
        padded[: len(is_used)] = is_used
        is_needed = padded.view(self.num_units, -1).amax(dim=1)
        ends = is_needed.cumsum(dim=0)
        ranks = ends - 1
        # Units that are not needed are written to a last row that nothing reads.
        places = torch.where(is_needed > 0, ranks, self.num_units)
        chosen = torch.empty((self.num_units + 1, self._pages_per_unit), dtype=torch.int64, device=device)
        chosen.index_copy_(0, places, self._pages)
        firsts = torch.arange(self.num_fetches + 1, device=device) * self._units_per_fetch
        counts = (ends[-1] - firsts[:-1]).clamp(0, self._units_per_fetch) * self._pages_per_unit
        bounds = (torch.searchsorted(ends, firsts + 1) * self._unit_blocks).clamp(max=len(is_used))
        in_unit = torch.arange(self._pages_per_unit, device=device)
        in_buffer = (ranks % self._units_per_fetch).unsqueeze(1) * self._pages_per_unit + in_unit
        return chosen.flatten(), counts, in_buffer.flatten().int(), bounds.int()


def token_major(buffer: Tensor, order: TokenOrder) -> Tensor:
    """Return a view of pages as [pages, page_size, KV heads, dim] in either order."""
    return buffer if order is TokenOrder.NHD else buffer.transpose(1, 2)


def sparse_kernels(*, has_triton: bool) -> Any:
    """Return the module of the policy's functions: Triton kernels or plain torch."""
    if has_triton:
        from embedded_engine.kernels import block_sparse  # imports Triton, which a CPU does not need

        return block_sparse
    from embedded_engine.kernels import block_sparse_reference

    return block_sparse_reference
