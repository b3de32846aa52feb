"""Decode steps on a GPU of which some requests have pages in host memory: see `device_decode`, whose steps these are otherwise.

Attention of full layers is computed over what is on the device, as in any step, and over one host block after the other, each by
the same kernel as over a small pool; results are merged by their log-sum-exp in float32. A sink takes part once, on the device's
side.

How many blocks there are changes with a step's requests, and with it what is launched. A CUDA graph holds a step of as many
blocks as there are buffers, each of all rows: `HostReader.load` puts a step's pages there, where they fit. So a batch does not
fall back to launching, which takes milliseconds a layer, for one request that has begun to leave the device; where there is more
to read than that, and the buffers are of the default size, the link takes longer than the launches.
"""

from __future__ import annotations

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
from embedded_engine.paged_attention import on_device
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_table import PageTable

MAX_BLOCK_SPLITS: Final = 32
"""Splits of a row's tokens in a block, at most: its attention only has to be over long before the next block is there. The same
for any number of rows, for each number is a variant of the kernel to compile, in the middle of serving."""

MIN_LOADED_SPLITS: Final = 4
MAX_LOADED_ROW_SPLITS: Final = 1024
"""Splits of a row, at least, and of all rows of a step that is captured, at most: it has all rows in each block, though most have
no tokens there, and partial results of each take memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBlocks:
    """`StepBlocks` on the device.

    Args:
        tables: What they were made of.
        blocks: Pages and parts of each.
        pages: int64 [n].
        first_tokens, num_tokens: int32 [parts].
        num_splits: Splits of a row's tokens in a block.
        counts: int64 [blocks], how many pages of a block are there; None: all.
    """

    tables: tuple[Sequence[int], ...]
    blocks: tuple[HostBlock, ...]
    pages: Tensor
    first_tokens: Tensor
    num_tokens: Tensor
    num_splits: int
    counts: Tensor | None = None


class HostReader:
    """What tiered steps share: the fetcher, the blocks of the last step, and memory for the blocks of captured steps.

    Args:
        pool: The engine's pool.
        tier: Its host tier.
        max_rows: Most rows of a captured step.
    """

    def __init__(self, pool: KVPool, tier: HostBlocks, *, max_rows: int) -> None:
        self.tier = tier
        self.fetcher = HostFetcher(pool, tier)
        self._device = pool.device
        self._known: DeviceBlocks | None = None
        tokens = tier.pages_per_block * tier.page_size
        self._num_splits = max(1, min(MAX_BLOCK_SPLITS, tokens // MIN_SPLIT_TOKENS))
        self._loaded = LoadedBlocks(tier, max_rows=max_rows, device=pool.device)
        # A row of a block lies in its pages without gaps: its slots are those from its first token on. So every row's table is
        # a part of one: row r, column t is slot r + t.
        self.slots = torch.arange(2 * tokens, dtype=torch.int32, device=pool.device).as_strided((tokens, tokens), (1, 1))

    def begin(self, tables: Sequence[Sequence[int]]) -> DeviceBlocks:
        """Begin a step whose rows have these host pages, at least one of them.

        Tables that are the same objects as in the last step are neither cut nor uploaded again.
        """
        known = self._known
        is_known = known is not None and len(known.tables) == len(tables) and all(map(_is_same, known.tables, tables))
        if known is None or not is_known:
            cut = cut_into_blocks(tables, pages_per_block=self.tier.pages_per_block, page_size=self.tier.page_size)
            known = self._known = DeviceBlocks(
                tables=tuple(tables),
                blocks=cut.blocks,
                pages=on_device(cut.pages, self._device),
                first_tokens=on_device(cut.first_tokens, self._device),
                num_tokens=on_device(cut.num_tokens, self._device),
                num_splits=self._num_splits,
            )
        self.fetcher.begin(known.blocks, known.pages)
        return known

    def load(self, tables: Sequence[Sequence[int]]) -> bool:
        """Queue the host pages of a step into the memory that captured steps read; False: they are too many for it.

        Args:
            tables: Of its first rows, at least one page; further rows have none.
        """
        return self._loaded.load(tables)

    def begin_loaded(self, num_rows: int) -> DeviceBlocks:
        """Begin a step of so many rows over whatever is loaded when it runs."""
        splits = max(MIN_LOADED_SPLITS, 1 << (MAX_LOADED_ROW_SPLITS // num_rows).bit_length() - 1)  # few variants to compile
        blocks = self._loaded.blocks_of(num_rows, num_splits=min(self._num_splits, splits))
        self.fetcher.begin(blocks.blocks, blocks.pages, blocks.counts)
        return blocks


class LoadedBlocks:
    """A block for each buffer of the fetcher, in memory that stays where it is: what captured steps read.

    A block has room for a full block's pages, a number that says how many are there, and a part of every row, mostly without
    tokens.

    Args:
        tier: The engine's host tier.
        max_rows: Most rows of a step.
        device: The GPU.
    """

    def __init__(self, tier: HostBlocks, *, max_rows: int, device: torch.device) -> None:
        self._tier = tier
        self._pitch = -(-max_rows // PARTS_ALIGNMENT) * PARTS_ALIGNMENT
        self._num_pages = NUM_BUFFERS * tier.pages_per_block
        size = NUM_BUFFERS + self._num_pages + NUM_BUFFERS * self._pitch
        self._memory = torch.zeros(size, dtype=torch.int64, device=device)
        self._tables: tuple[Sequence[int], ...] = ()

    def load(self, tables: Sequence[Sequence[int]]) -> bool:
        """See `HostReader.load`. Tables that are the same objects as in the last call are not uploaded again."""
        if len(tables) == len(self._tables) and all(map(_is_same, tables, self._tables)):
            return True
        # Evenly, so that one buffer is filled while the other is read, however little there is.
        pages_per_block = -(-sum(map(len, tables)) // NUM_BUFFERS)
        if pages_per_block > self._tier.pages_per_block:
            return False
        cut = cut_into_blocks(tables, pages_per_block=pages_per_block, page_size=self._tier.page_size)
        is_gpu = self._memory.device.type == "cuda"
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
        self._tables = tuple(tables)
        return True

    def blocks_of(self, num_rows: int, *, num_splits: int) -> DeviceBlocks:
        """What is loaded, for a step of so many rows."""
        counts, pages, first_tokens, num_tokens = self._parts(self._memory)
        size = self._tier.pages_per_block
        return DeviceBlocks(
            tables=(),
            blocks=tuple(
                HostBlock(
                    begin=index * size, end=(index + 1) * size, first_row=0, end_row=num_rows, first_part=index * self._pitch
                )
                for index in range(NUM_BUFFERS)
            ),
            pages=pages.view(-1),
            first_tokens=first_tokens.reshape(-1),
            num_tokens=num_tokens.reshape(-1),
            num_splits=num_splits,
            counts=counts,
        )

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views: int64 counts of pages [blocks], pages [blocks, pages]; int32 first tokens, counts of tokens [blocks, rows]."""
        counts, pages, parts = memory.split([NUM_BUFFERS, self._num_pages, NUM_BUFFERS * self._pitch])
        first_tokens, num_tokens = parts.view(torch.int32).view(2, NUM_BUFFERS, self._pitch)
        return counts, pages.view(NUM_BUFFERS, -1), first_tokens, num_tokens


class TieredDecodePlan(KernelDecodePlan):
    """See `StepPlan`.

    Args:
        pool, tables, inputs: See `KernelDecodePlan`.
        reader: Of the engine.
        blocks: What its `begin` gave for this step.
    """

    def __init__(
        self, pool: KVPool, tables: Mapping[int, PageTable], inputs: Tensor, reader: HostReader, blocks: DeviceBlocks
    ) -> None:
        super().__init__(pool, tables, inputs)
        self._reader = reader
        self._blocks = blocks

    def _merged(self, layer: int, query: Tensor, out: Tensor, lse: Tensor, scores: Scores, v_dim: int | None) -> Tensor:
        """The attention over the device's tokens and those of the host blocks, where the layer has any."""
        tier = self._reader.tier
        if self._pool.group_of(layer) != tier.group:
            return out
        total = out.float()
        for block, buffer in self._reader.fetcher.blocks_of(layer):
            rows, parts = slice(block.first_row, block.end_row), slice(block.first_part, block.end_part)
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


def _is_same(one: Sequence[int], other: Sequence[int]) -> bool:
    return one is other
