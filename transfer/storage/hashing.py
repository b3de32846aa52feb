"""Hash long prompts without blocking a leader's loop.

A prompt of 131,072 tokens in pages of one token takes 60 ms to hash, and all sessions of a leader wait for its loop meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from transfer.storage.keys import PageHashes

SLICE_TOKENS: Final = 8192
"""Tokens that one turn of a loop hashes: 4 ms with pages of one token, below 1 ms with pages of 16."""


class HashingTurns:
    """Hash one slice of one prompt in each turn of a loop. Owned by one loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # prompts that wait take turns, a slice each

    async def extend(self, chain: PageHashes, token_ids: Sequence[int]) -> None:
        """Extend the hashes as `PageHashes.extend` does, over several turns of the loop."""
        for begin in range(0, len(token_ids), SLICE_TOKENS):
            async with self._turn:
                chain.extend(token_ids[begin : begin + SLICE_TOKENS])
                await asyncio.sleep(0)
