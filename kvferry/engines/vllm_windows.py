"""Sliding windows and chunked local attention in vLLM's block tables, on the scheduler.

With its hybrid KV cache manager, vLLM gives layers with a window or chunks block tables of their own, and frees blocks that no
later token reads. The last window or chunk of a prompt is transferred. vLLM's blocks differ from it at both of its ends:

- vLLM keeps the tokens that the token after the prompt reads: of a window one token less, and nothing of a chunk that ends with
  the prompt. But a decode instance computes the prompt's last token again, which reads them. So prefill keeps the blocks until
  the KV is sent, and decode loads one token less where vLLM would have no blocks for them.
- Decode's first block of a window also has tokens before the window, which are not written. vLLM's prefix cache would give such a
  block to later prompts. So it is counted as cached already, which keeps it out of the cache.

This file imports nothing of vLLM. It calls `KVCacheManager` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transfer.errors import ConfigError
from transfer.layout import first_read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTable:
    """A block table of layers with a sliding window, or with chunked local attention.

    Args:
        group: Index of the table among those of a vLLM request.
        window_tokens: Tokens that attention can reach, including the newest, or tokens of a chunk.
        block_size: Tokens of a block.
        is_chunked: Whether attention is that of chunks.
    """

    group: int
    window_tokens: int
    block_size: int
    is_chunked: bool = False

    def first_token(self, num_tokens: int) -> int:
        """Return the first token of a prompt of `num_tokens` that travels."""
        return self._first_read(num_tokens - 1)

    def lost_blocks(self, num_tokens: int) -> range:
        """Return the entries of the table that are transferred and that vLLM frees after the prompt."""
        return range(self._first_read(num_tokens - 1) // self.block_size, self._first_read(num_tokens) // self.block_size)

    def _first_read(self, token: int) -> int:
        return first_read_token(token, self.window_tokens, is_chunked=self.is_chunked)


class WindowBlocks:
    """Blocks of windows and chunks, of the requests of one scheduler.

    Args:
        tables: Empty if vLLM keeps blocks for every token.
    """

    def __init__(self, tables: Sequence[WindowTable] = ()) -> None:
        self._tables = tuple(tables)
        self._manager: Any = None
        self._kept: dict[str, list[Any]] = {}  # blocks that vLLM has freed or is about to free, by request

    def __bool__(self) -> bool:
        return bool(self._tables)

    def use(self, manager: Any) -> None:
        """Use vLLM's `KVCacheManager`.

        Raises:
            ConfigError: It lacks an attribute, because this vLLM has another version.
        """
        try:
            caches = [manager.coordinator.single_type_managers[table.group].num_cached_block for table in self._tables]
            needed = (*caches, manager.block_pool.touch, manager.block_pool.free_blocks, manager.get_blocks)
        except AttributeError as error:
            raise ConfigError(f"this vLLM is not one that kvferry knows (0.32 and 0.33): {error}") from error
        assert all(one is not None for one in needed)
        self._manager = manager

    def loses_first_token(self, num_tokens: int) -> bool:
        """Return whether some layers of a fully loaded prompt have no block for their first transferred token."""
        return any(table.lost_blocks(num_tokens) for table in self._tables)

    def num_loaded(self, num_tokens: int) -> int:
        """Return the tokens of a prompt that vLLM loads; it computes the others."""
        return num_tokens - self.loses_first_token(num_tokens)

    def keep(self, request_id: str, num_tokens: int) -> None:
        """Keep blocks to transfer that vLLM is about to free, until `release`. The prompt's last step is scheduled."""
        if request_id in self._kept or not self.loses_first_token(num_tokens):
            return
        blocks = self._manager.get_blocks(request_id).blocks
        kept = [blocks[table.group][entry] for table in self._tables for entry in table.lost_blocks(num_tokens)]
        self._manager.block_pool.touch(kept)
        self._kept[request_id] = kept

    def release(self, request_id: str) -> None:
        """Release the blocks of `keep`. No-op if there are none."""
        if kept := self._kept.pop(request_id, None):
            self._manager.block_pool.free_blocks(kept)

    def leave_uncached(self, request_id: str, num_tokens: int, start_token: int) -> None:
        """Keep a loading request's blocks that are not written whole out of the prefix cache.

        Args:
            start_token: First token that is loaded. Blocks before it come from the cache.
        """
        for table in self._tables:
            cached = self._manager.coordinator.single_type_managers[table.group].num_cached_block
            first = max(start_token, table.first_token(num_tokens))
            cached[request_id] = max(cached.get(request_id, 0), -(-first // table.block_size))
