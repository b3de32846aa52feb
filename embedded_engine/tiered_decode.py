"""Decode steps on a GPU of which some requests have pages in host memory: see `device_decode`, whose steps these are otherwise.

Attention of full layers is computed over what is on the device, as in any step, and over one host block after the other, each by
the same kernel as over a small pool; results are merged by their log-sum-exp in float32. A sink takes part once, on the device's
side. No CUDA graph holds such a step: how many blocks there are changes with its requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.host_fetcher import HostFetcher
from embedded_engine.host_tier import HostBlock, HostTier, cut_into_blocks
from embedded_engine.kernel_plan import KernelDecodePlan
from embedded_engine.kernels.merge_partial import merge_partial
from embedded_engine.kernels.paged_decode import MIN_SPLIT_TOKENS, paged_decode_attention
from embedded_engine.paged_attention import on_device
from transfer.kv_pool import KVPool
from transfer.memory.page_table import PageTable

MAX_BLOCK_SPLITS: Final = 32
"""Splits of a row's tokens in a block, at most: its attention only has to be over long before the next block is there. The same
for any number of rows, for each number is a variant of the kernel to compile, in the middle of serving."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBlocks:
    """`StepBlocks` on the device.

    Args:
        tables: What they were made of.
        blocks: Pages and parts of each.
        pages: int64 [n].
        first_tokens, num_tokens: int32 [parts].
    """

    tables: tuple[Sequence[int], ...]
    blocks: tuple[HostBlock, ...]
    pages: Tensor
    first_tokens: Tensor
    num_tokens: Tensor


class HostReader:
    """What tiered steps share: the fetcher, and the blocks of the last step.

    Args:
        pool: The engine's pool.
        tier: Its host tier.
    """

    def __init__(self, pool: KVPool, tier: HostTier) -> None:
        self.tier = tier
        self.fetcher = HostFetcher(pool, tier)
        self._device = pool.device
        self._known: DeviceBlocks | None = None
        tokens = tier.pages_per_block * tier.page_size
        self.num_splits = max(1, min(MAX_BLOCK_SPLITS, tokens // MIN_SPLIT_TOKENS))
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
            )
        self.fetcher.begin(known.blocks, known.pages)
        return known


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
            part, part_lse = paged_decode_attention(
                query[rows],
                buffer.k,
                buffer.v,
                slots=self._reader.slots,
                rows=self._blocks.first_tokens[parts],
                lengths=self._blocks.num_tokens[parts],
                scale=scores.scale,
                v_dim=v_dim,
                order=self._pool.order,
                softcap=scores.softcap,
                num_splits=self._reader.num_splits,
            )
            merge_partial(total[rows], lse[rows], part, part_lse)
        return total.to(out.dtype)


def _is_same(one: Sequence[int], other: Sequence[int]) -> bool:
    return one is other
