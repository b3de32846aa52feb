"""The host tier of an engine: the pages in host memory that it may attend to, and the blocks in which it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from transfer.engine_types import StoredKV
from transfer.errors import ConfigError
from transfer.layer_groups import GroupKind
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool, LayerBuffers, PagedKVPool

PARTS_ALIGNMENT = 4  # int32 numbers: a block's parts begin at 16 bytes, so Triton compiles one variant


class HostBlocks:
    """A host pool that an engine reads layer by layer, in blocks of whole pages.

    Args:
        pool: The engine's pool.
        host: Host pages of the same layout.
        block_bytes: Most bytes of one layer's part of a block.

    Attributes:
        group: Index of the only group whose pages may be there, full attention.
        slice_bytes: Layer of the group -> bytes of a page, K then V.
        pages_per_block: Most pages of a block.
        stored: Reads pages that lie in the store; None if there are none.
        stored_pools: A buffer of `stored` as a small pool: the pages of a stored block, in the shapes of the layer that it holds.

    Raises:
        ConfigError: The model has no full attention, the host pool has no pages of it or another layout, a block is smaller than
            a page, or a stored block is larger than a block.
    """

    def __init__(self, pool: KVPool, host: HostPool, *, block_bytes: int, stored: StoredKV | None = None) -> None:
        groups = [index for index, group in enumerate(pool.groups) if group.kind is GroupKind.FULL]
        if not groups:
            names = ", ".join(group.name for group in pool.groups)
            raise ConfigError(f"the model has no full attention ({names}); its KV cannot be read from host memory")
        (self.group,) = groups
        if len(host.num_pages) != len(pool.groups) or not host.num_pages[self.group]:
            raise ConfigError(f"host num_pages is {host.num_pages}; the group of full attention must have at least 1 host page")
        part = host.part(self.group)
        if (part.layout, part.shard) != (pool.layout, pool.shard):
            raise ConfigError("the host pool has another layout or shard than the engine's pool; make it of that pool")
        self.host = host
        self.page_size = pool.page_size
        self.slice_bytes: dict[int, int] = {
            layer: part.page_size
            * part.num_heads(layer)
            * sum(part.head_dim(layer, is_v=is_v) for is_v in (False, True))
            * part.element.num_bytes
            for layer in part.layers
        }
        largest = max(self.slice_bytes.values())
        self.pages_per_block: int = block_bytes // largest
        if self.pages_per_block < 1:
            raise ConfigError(f"block_bytes is {block_bytes}; must be at least {largest}, a layer's part of one page")
        self.stored = stored
        self.stored_pools: tuple[PagedKVPool, ...] = ()
        if stored is not None:
            if stored.pages_per_block > self.pages_per_block:
                raise ConfigError(
                    f"block_bytes is {block_bytes}; a block of {stored.pages_per_block} pages in the store needs at least "
                    f"{stored.pages_per_block * largest}"
                )
            self.stored_pools = tuple(
                PagedKVPool(
                    layout=part.layout,
                    shard=part.shard,
                    num_pages=stored.pages_per_block,
                    buffers=[self.views_of(layer, buffer, stored.pages_per_block) for layer in part.layers],
                    layers=part.layers,
                )
                for buffer in stored.buffers
            )

    def views_of(self, layer: int, memory: Tensor, num_pages: int) -> LayerBuffers:
        """Return the K and V of a layer in contiguous memory that holds its part of some pages, in the shapes of the pool."""
        part, size = self.host.part(self.group), self.slice_bytes[layer]
        pages = memory[: num_pages * size].view(num_pages, size)
        host_k = part.buffer(layer, is_v=False)
        k_bytes = host_k.shape[1:].numel() * host_k.element_size()
        k = pages[:, :k_bytes].view(host_k.dtype).view(-1, *host_k.shape[1:])
        if part.layout.layers[layer].num_buffers == 1:
            return LayerBuffers(k=k, v=None)
        host_v = part.buffer(layer, is_v=True)
        return LayerBuffers(k=k, v=pages[:, k_bytes:].view(host_v.dtype).view(-1, *host_v.shape[1:]))

    def check_holds(self, num_tokens: int) -> None:
        """Refuse blocks that are smaller than `num_tokens`.

        Raises:
            ConfigError: A block is smaller.
        """
        if self.pages_per_block * self.page_size < num_tokens:
            needed = num_tokens // self.page_size * max(self.slice_bytes.values())
            raise ConfigError(
                f"block_bytes holds {self.pages_per_block * self.page_size} tokens of a layer; with block-sparse prefill it must "
                f"hold {num_tokens}, at least {needed} bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetch:
    """Host pages of a layer that are fetched into one buffer.

    Args:
        pages: int64 [at least num_pages] on the device, the host pages.
        num_pages: Most pages.
        count: int64 [1] on the device, pages in use; None means all.
        has_v: Whether V is fetched, too.
        is_stored: Whether this is the next block in the store, which has its pages in order; `pages` does not matter then.
    """

    layer: int
    pages: Tensor
    num_pages: int
    count: Tensor | None = None
    has_v: bool = True
    is_stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlock:
    """Host pages of one or more rows, or a stored block of one row, that are read and attended to together.

    Args:
        begin, end: Its pages among those of the step; of a stored block, [0, its pages).
        first_row, end_row: The rows of the step that have pages in it, and any rows between them.
        first_part: Index of the first row's part in the step's arrays.
        stored: Number of the stored block; None for host pages.
    """

    begin: int
    end: int
    first_row: int
    end_row: int
    first_part: int
    stored: int | None = None

    @property
    def num_pages(self) -> int:
        return self.end - self.begin

    @property
    def end_part(self) -> int:
        return self.first_part + self.end_row - self.first_row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBlocks:
    """The host pages of a step, cut into blocks that are the same for all layers.

    Args:
        pages: int64 [n], host pages of all rows, one row after the other.
        first_tokens, num_tokens: int32 [parts]: for each row of each block, its first token in the block and its number of tokens
            there; 0 for a row that only lies between others.
        blocks: In the order of `pages`.
    """

    pages: NDArray[np.int64]
    first_tokens: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    blocks: tuple[HostBlock, ...]


def cut_into_blocks(
    tables: Sequence[Sequence[int]],
    *,
    pages_per_block: int,
    page_size: int,
    stored: Sequence[Sequence[int]] = (),
    pages_per_stored_block: int = 0,
) -> StepBlocks:
    """Cut the host pages of a step into blocks, all but the last of which are full. Stored blocks follow, each for itself.

    Args:
        tables: Host pages of each row of the step, in order.
        stored: Stored blocks of each row, at least one if there are no host pages; empty if no row has any.
    """
    ends = np.cumsum([len(table) for table in tables])
    begins = ends - np.array([len(table) for table in tables])
    firsts: list[int] = []
    counts: list[int] = []
    blocks: list[HostBlock] = []
    for begin in range(0, int(ends[-1]), pages_per_block):
        end = min(begin + pages_per_block, int(ends[-1]))
        first_row, end_row = int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(begins, end, side="left"))
        while len(tables[end_row - 1]) == 0:
            end_row -= 1
        blocks.append(HostBlock(begin=begin, end=end, first_row=first_row, end_row=end_row, first_part=len(firsts)))
        own_begins, own_ends = np.maximum(begins[first_row:end_row], begin), np.minimum(ends[first_row:end_row], end)
        padding = [0] * (-(end_row - first_row) % PARTS_ALIGNMENT)
        firsts += [*((own_begins - begin) * page_size).tolist(), *padding]
        counts += [*((own_ends - own_begins) * page_size).tolist(), *padding]
    for row, numbers in enumerate(stored):
        for number in numbers:
            block = HostBlock(
                begin=0, end=pages_per_stored_block, first_row=row, end_row=row + 1, first_part=len(firsts), stored=number
            )
            blocks.append(block)
            firsts += [0] * PARTS_ALIGNMENT
            counts += [pages_per_stored_block * page_size, *[0] * (PARTS_ALIGNMENT - 1)]
    return StepBlocks(
        pages=np.concatenate([np.array(table, dtype=np.int64) for table in tables]),
        first_tokens=np.array(firsts, dtype=np.int32),
        num_tokens=np.array(counts, dtype=np.int32),
        blocks=tuple(blocks),
    )
