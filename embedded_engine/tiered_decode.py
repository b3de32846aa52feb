"""Decode steps on a GPU in which some requests have pages in host memory; otherwise they are the steps of `device_decode`.

Full layers attend over the tokens on the device, as in any step, and over one host block after the other. A block is attended by
the same kernel as a small pool; results are merged by their log-sum-exp in float32. A sink takes part once, on the device's side.

The number of blocks, and with it the launches, changes with a step's requests. A CUDA graph holds a step of as many blocks as
there are buffers, each of all rows: `HostReader.load` puts a step's pages there, if they fit. So one request that begins to leave
the device does not force the whole batch back to launches, which take milliseconds a layer. If there is more to read, and the
buffers have the default size, the link takes longer than the launches.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.host_fetcher import NUM_BUFFERS, HostFetcher
from embedded_engine.host_tier import PARTS_ALIGNMENT, HostBlock, HostBlocks, cut_into_blocks
from embedded_engine.kernel_plan import KernelDecodePlan
from embedded_engine.kernels.arguments import DecodeCall
from embedded_engine.kernels.merge_partial import merge_partial
from embedded_engine.kernels.paged_decode import MIN_SPLIT_TOKENS, paged_decode_attention
from embedded_engine.step_arrays import on_device
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_table import PageTable

MAX_BLOCK_SPLITS: Final = 32
"""Upper bound of the splits of a row's tokens in a block: its attention must only end long before the next block arrives. It does
not depend on the number of rows, because each number of splits is a variant of the kernel to compile while serving."""

MIN_LOADED_SPLITS: Final = 4
MAX_LOADED_ROW_SPLITS: Final = 1024
"""Bounds of the splits of a captured step: at least of one row, at most of all rows. A captured step has all rows in each block,
though most have no tokens there, and partial results of each take memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBlocks:
    """`StepBlocks` on the device.

    Args:
        tables, stored: Host tables and stored blocks of the rows.
        pages: int64 [n].
        first_tokens, num_tokens: int32 [parts].
        num_splits: Splits of a row's tokens in a block.
        counts: int64 [blocks], pages in use of each block; None means all.
    """

    tables: tuple[Sequence[int], ...]
    stored: tuple[Sequence[int], ...]
    blocks: tuple[HostBlock, ...]
    pages: Tensor
    first_tokens: Tensor
    num_tokens: Tensor
    num_splits: int
    counts: Tensor | None = None


class HostReader:
    """State that tiered steps share: the fetcher, the blocks of the last launched step, and memory for those of captured steps.

    The memory of captured steps does not move. It has one block for each buffer of the fetcher: the number of its pages, room for
    the pages of a full block, and a part of every row, mostly without tokens.

    Args:
        pool: The engine's pool.
        max_rows: Most rows of a captured step.
    """

    def __init__(self, pool: KVPool, tier: HostBlocks, *, max_rows: int) -> None:
        self.tier = tier
        self.fetcher = HostFetcher(pool, tier)
        self._device = pool.device
        self._known: DeviceBlocks | None = None
        tokens = tier.pages_per_block * tier.page_size
        self._num_splits = max(1, min(MAX_BLOCK_SPLITS, tokens // MIN_SPLIT_TOKENS))
        # A row of a block lies in its pages without gaps: its slots are those from its first token on. So every row's table is
        # a part of one: row r, column t is slot r + t.
        self.slots = torch.arange(2 * tokens, dtype=torch.int32, device=pool.device).as_strided((tokens, tokens), (1, 1))
        self._pitch = -(-max_rows // PARTS_ALIGNMENT) * PARTS_ALIGNMENT
        self._num_pages = NUM_BUFFERS * tier.pages_per_block
        size = NUM_BUFFERS + self._num_pages + NUM_BUFFERS * self._pitch
        self._memory = torch.zeros(size, dtype=torch.int64, device=pool.device)
        self._loaded_tables: tuple[Sequence[int], ...] = ()

    def begin(self, tables: Sequence[Sequence[int]], stored: Sequence[Sequence[int]] = ()) -> DeviceBlocks:
        """Begin a step whose rows have these host pages and stored blocks, at least one of them.

        Tables that are the same objects as in the last step are neither cut nor uploaded again.
        """
        known = self._known
        if known is None or not (_are_same(known.tables, tables) and _are_same(known.stored, stored)):
            cut = cut_into_blocks(
                tables,
                pages_per_block=self.tier.pages_per_block,
                page_size=self.tier.page_size,
                stored=stored,
                pages_per_stored_block=0 if self.tier.stored is None else self.tier.stored.pages_per_block,
            )
            known = self._known = DeviceBlocks(
                tables=tuple(tables),
                stored=tuple(stored),
                blocks=cut.blocks,
                pages=on_device(cut.pages, self._device),
                first_tokens=on_device(cut.first_tokens, self._device),
                num_tokens=on_device(cut.num_tokens, self._device),
                num_splits=self._num_splits,
            )
        self.fetcher.begin(known.blocks, known.pages)
        return known

    def load(self, tables: Sequence[Sequence[int]]) -> bool:
        """Queue the host pages of a step into the memory of captured steps. Return False if they do not fit.

        Tables that are the same objects as in the last call are not uploaded again.

        Args:
            tables: Of the step's first rows, with at least one page; further rows have none.
        """
        if _are_same(self._loaded_tables, tables):
            return True
        # Evenly, so that one buffer is filled while the other is read, however little there is.
        pages_per_block = -(-sum(map(len, tables)) // NUM_BUFFERS)
        if pages_per_block > self.tier.pages_per_block:
            return False
        cut = cut_into_blocks(tables, pages_per_block=pages_per_block, page_size=self.tier.page_size)
        is_gpu = self._device.type == "cuda"
        # New memory each time: see `DeviceDecoder`.
        host = torch.zeros_like(self._memory, device="cpu", pin_memory=is_gpu)
        counts, pages, first_tokens, num_tokens = self._parts(host)
        for index, block in enumerate(cut.blocks):
            parts, num_rows = slice(block.first_part, block.end_part), block.end_row - block.first_row
            counts[index] = block.num_pages
            pages[index, : block.num_pages] = torch.from_numpy(cut.pages[block.begin : block.end])
            for own, found in ((first_tokens, cut.first_tokens), (num_tokens, cut.num_tokens)):
                own[index, block.first_row : block.end_row] = torch.from_numpy(found[parts][:num_rows])
        self._memory.copy_(host, non_blocking=is_gpu)
        self._loaded_tables = tuple(tables)
        return True

    def begin_loaded(self, num_rows: int) -> DeviceBlocks:
        """Begin a step of `num_rows` rows over the pages that are loaded when it runs."""
        splits = max(MIN_LOADED_SPLITS, 1 << (MAX_LOADED_ROW_SPLITS // num_rows).bit_length() - 1)  # few variants to compile
        counts, pages, first_tokens, num_tokens = self._parts(self._memory)
        size = self.tier.pages_per_block
        blocks = DeviceBlocks(
            tables=(),
            stored=(),
            blocks=tuple(
                HostBlock(
                    begin=index * size, end=(index + 1) * size, first_row=0, end_row=num_rows, first_part=index * self._pitch
                )
                for index in range(NUM_BUFFERS)
            ),
            pages=pages.view(-1),
            first_tokens=first_tokens.reshape(-1),
            num_tokens=num_tokens.reshape(-1),
            num_splits=min(self._num_splits, splits),
            counts=counts,
        )
        self.fetcher.begin(blocks.blocks, blocks.pages, counts)
        return blocks

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views: int64 page counts [blocks], pages [blocks, pages]; int32 first tokens and token counts [blocks, rows]."""
        counts, pages, parts = memory.split([NUM_BUFFERS, self._num_pages, NUM_BUFFERS * self._pitch])
        first_tokens, num_tokens = parts.view(torch.int32).view(2, NUM_BUFFERS, self._pitch)
        return counts, pages.view(NUM_BUFFERS, -1), first_tokens, num_tokens


class TieredDecodePlan(KernelDecodePlan):
    """A decode step that also reads host pages, see `StepPlan`.

    Args:
        pool, tables, inputs: See `KernelDecodePlan`.
        blocks: Result of the reader's `begin` or `begin_loaded` for this step.
    """

    def __init__(
        self, pool: KVPool, tables: Mapping[int, PageTable], inputs: Tensor, reader: HostReader, blocks: DeviceBlocks
    ) -> None:
        super().__init__(pool, tables, inputs)
        self._reader = reader
        self._blocks = blocks

    def _merged(self, layer: int, query: Tensor, out: Tensor, lse: Tensor, scores: Scores, v_dim: int | None) -> Tensor:
        """Merge the attention over the host blocks into `out`, if the layer has any."""
        tier = self._reader.tier
        if self._pool.group_of(layer) != tier.group:
            return out
        total = out.float()
        for block, buffer in self._reader.fetcher.blocks_of(layer):
            rows, parts = slice(block.first_row, block.end_row), slice(block.first_part, block.end_part)
            if buffer is None:
                total[rows] = torch.nan  # see `StoredKV.next`
                continue
            call = DecodeCall(
                query=query[rows],
                k=buffer.k,
                v=buffer.v,
                slots=self._reader.slots,
                rows=self._blocks.first_tokens[parts],
                lengths=self._blocks.num_tokens[parts],
                scale=scores.scale,
                v_dim=v_dim,
                order=self._pool.order,
                softcap=scores.softcap,
            )
            part, part_lse = paged_decode_attention(call, num_splits=self._blocks.num_splits)
            merge_partial(total[rows], lse[rows], part, part_lse)
        return total.to(out.dtype)


def _are_same(known: Sequence[Sequence[int]], tables: Sequence[Sequence[int]]) -> bool:
    return len(known) == len(tables) and all(map(operator.is_, known, tables))
