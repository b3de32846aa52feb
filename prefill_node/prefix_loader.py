"""Load the stored beginning of a prompt into a prefill rank's pool, from pages of the decode ranks into pages of its own.

The decode instance may have another number of ranks, page size, order of dimensions and element type. The store is read beside
the loop. The engine's thread writes the pages into the pool between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prefill_node.stored_prefix import PageSource, StoredPrefix, needed_pages, page_sources
from transfer.instance import Instance
from transfer.layer_groups import GroupKind, LayerGroup
from transfer.layout import DType, HeadSlice, TokenOrder
from transfer.pool.kv_pool import TORCH_DTYPES, KVPool, as_words, convert
from transfer.storage.base import USED_STEP_NS
from transfer.storage.client import StoreClient
from transfer.storage.keys import store_key
from transfer.storage.pages import PagePart
from transfer.worker_thread import WorkerThread

BATCH_BYTES = 32 << 20
"""Bytes that are read and then written at once. The client needs the same amount in addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Consecutive pages of one group, as read: ``pages[i]`` is [num_pages, page_bytes] uint8 of the i-th source."""

    group: LayerGroup
    first_page: int
    num_pages: int
    sources: Sequence[PageSource]
    pages: Sequence[Tensor]
    used_ns: int  # for its first page, see `transfer.storage.base.Store`


class PrefixLoader:
    """Load one prompt at a time; others wait while their deadlines run. Owned by the rank's loop.

    Args:
        client: Client of the store.
        pool: Pool that is written on `thread` only.
        own: Instance with this rank's shard.
        thread: Thread of the engine.
        timeout_s: Longest time for one prompt, including its wait.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        pool: KVPool,
        own: Instance,
        thread: WorkerThread,
        timeout_s: float,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._client = client
        self._pool = pool
        self._own = own
        self._thread = thread
        self._timeout_s = timeout_s
        self._batch_bytes = batch_bytes
        self._turn = asyncio.Lock()

    async def load(self, prefix: StoredPrefix, tables: Sequence[Sequence[int]]) -> int:
        """Load as many pages of a prompt as the store has and time allows.

        Args:
            prefix: Pages to load.
            tables: Page table of the request in each group, with a page for every token that is needed after `prefix`.

        Returns:
            Number of the prompt's first tokens that are in the pool now. With sliding windows, all tokens of `prefix` or 0: the
            leader has looked up the windows' pages only right before the end of `prefix`.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        sources = page_sources(self._own.layout, self._own.shard, prefix.decode.shard)
        windows = [group for group in self._pool.groups if group.kind is GroupKind.WINDOW]
        rest = [group for group in self._pool.groups if group.kind is not GroupKind.WINDOW]
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._turn.acquire()
        except TimeoutError:
            return 0
        try:
            num_pages, used_ns = prefix.num_pages, time.time_ns()
            for group in (*windows, *rest):
                mine = [source for source in sources if source.group == group]
                num_pages = min(num_pages, await self._load_group(group, mine, prefix, tables, deadline_s, used_ns))
                if windows and num_pages < prefix.num_pages:
                    return 0
            return num_pages * prefix.page_size
        finally:
            self._turn.release()

    async def _load_group(
        self,
        group: LayerGroup,
        sources: Sequence[PageSource],
        prefix: StoredPrefix,
        tables: Sequence[Sequence[int]],
        deadline_s: float,
        used_ns: int,
    ) -> int:
        """Load the needed pages of a group in order, up to the first one that is missing or late; return its number."""
        pages = needed_pages(group, prefix.num_pages, prefix.page_size)
        at_once = max(1, self._batch_bytes // max(1, sum(source.page_bytes for source in sources)))
        for first in pages[::at_once] if sources else ():
            batch = _new_batch(
                group, sources, first, min(at_once, pages.stop - first), used_ns - first * len(sources) * USED_STEP_NS
            )
            num_read = await self._read(batch, prefix, deadline_s)
            if num_read:  # without a deadline: pages are written between two steps, and must not be released before
                await self._thread.call(partial(self._write, batch, num_read, prefix, tables))
            if num_read < batch.num_pages:
                return first + num_read
        return prefix.num_pages

    async def _read(self, batch: _Batch, prefix: StoredPrefix, deadline_s: float) -> int:
        """Fill the batch; return the number of its first pages that have all their sources."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return 0
        wanted: list[tuple[str, memoryview]] = []
        for index in range(batch.num_pages):
            for source, pages in zip(batch.sources, batch.pages, strict=True):
                page_hash = prefix.hashes[batch.first_page + index]
                key = store_key(prefix.fingerprint, page_hash, group=batch.group, layout=prefix.decode.layout, shard=source.shard)
                wanted.append((key, pages[index].numpy().data))
        answers = await self._client.get(wanted, timeout_s=left_s, used_ns=batch.used_ns)
        missing = answers.index(False) if False in answers else len(answers)
        return missing // len(batch.sources)

    # On the thread

    def _write(self, batch: _Batch, num_read: int, prefix: StoredPrefix, tables: Sequence[Sequence[int]]) -> None:
        """Copy the first `num_read` pages of a batch into the pool, converted to its element type."""
        page_size = prefix.page_size
        first_needed = batch.group.first_needed_token(prefix.num_pages * page_size)
        begin = max(batch.first_page * page_size, first_needed)
        end = (batch.first_page + num_read) * page_size
        if begin >= end:
            return
        tokens = torch.arange(begin, end)
        table = torch.tensor(tables[self._pool.groups.index(batch.group)][: -(-end // self._pool.page_size)])
        slots = (table[tokens // self._pool.page_size] * self._pool.page_size + tokens % self._pool.page_size).to(
            self._pool.device
        )
        skipped = begin - batch.first_page * page_size
        for layer in batch.group.layers_of(self._own.layout, self._own.shard):
            k, v = (self._rows(batch, num_read, layer, is_v, prefix)[skipped:].to(self._pool.device) for is_v in (False, True))
            self._pool.write(layer, slots, k, v)
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()  # chunks of it are gathered without an event

    def _rows(self, batch: _Batch, num_read: int, layer: int, is_v: bool, prefix: StoredPrefix) -> Tensor:
        """Return K or V of all tokens of the pages: [tokens, heads, dim] in the pool's element type; dim is 0 without V."""
        part_of = self._pool.part_of(layer)
        shape = (num_read * prefix.page_size, part_of.num_heads(layer), part_of.head_dim(layer, is_v=is_v))
        rows = torch.empty(shape, dtype=part_of.dtype)
        for source, pages in zip(batch.sources, batch.pages, strict=True):
            for part, heads in source.parts:
                if (part.layer, part.is_v) == (layer, is_v):
                    stored = _heads_of(pages[:num_read], part, heads, prefix.decode.shard.order)
                    scale = self._scale(layer, is_v, prefix.decode)
                    target = as_words(rows)[:, heads.target_start : heads.target_start + heads.count]
                    target.copy_(as_words(convert(stored, part_of.element, scale=scale)))
        return rows

    def _scale(self, layer: int, is_v: bool, decode: Instance) -> float:
        """Return the scale of the pool that has 8-bit floats. If both have, the bits are copied without it."""
        side = decode if decode.pool_dtype is DType.FLOAT8_E4M3 else self._own
        return side.scales_of(layer)[is_v]


def _new_batch(group: LayerGroup, sources: Sequence[PageSource], first_page: int, num_pages: int, used_ns: int) -> _Batch:
    pages = [torch.empty((num_pages, source.page_bytes), dtype=torch.uint8) for source in sources]
    return _Batch(group=group, first_page=first_page, num_pages=num_pages, sources=sources, pages=pages, used_ns=used_ns)


def _heads_of(pages: Tensor, part: PagePart, heads: HeadSlice, order: TokenOrder) -> Tensor:
    """Return heads of one layer's K or V from stored pages ([num_pages, page_bytes] uint8): [tokens, heads, dim], contiguous."""
    stored = pages[:, part.offset_bytes : part.offset_bytes + part.num_bytes].contiguous()
    words = as_words(stored.view(-1).view(TORCH_DTYPES[part.dtype])).view(len(pages), *part.shape)
    by_token = words if order is TokenOrder.NHD else words.transpose(1, 2)  # [pages, page_size, heads, dim]
    chosen = by_token[:, :, heads.source_start : heads.source_start + heads.count]
    return chosen.flatten(0, 1).contiguous().view(TORCH_DTYPES[part.dtype])
