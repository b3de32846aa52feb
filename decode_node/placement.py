"""Which of the prefill nodes that could take a prompt is to take it. Pure (docs/adr/0037-placement.md).

Of each node its *load* counts: the tokens of prompts that it was sent and has not sent all of yet, less what it may save of this
one. That is the part of the prompt that it computed lately, `prefix_tokens` at most: so a prompt never waits behind more than
`prefix_tokens` tokens for the sake of its prefix, nor behind more than the prefix is long. The least load wins; of equal ones the
node with less work, of equal work the one whose slowest link is fastest, then the one that is known for longest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

BLOCK_TOKENS: Final = 128
MAX_BLOCKS_OF_A_PROMPT: Final = 512
"""65,536 tokens; what two prompts share behind that moves neither."""

MAX_BLOCKS: Final = 1 << 16
"""That are remembered, over all nodes: some 16 MiB, and 8 million tokens of prompts that share nothing."""

MAX_HOLDERS: Final = 4
"""Nodes that a block is remembered of, the newest."""

_HASH_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that could take the prompt.

    Args:
        incarnation: Of the node's life.
        outstanding_tokens: Of prompts that it was sent, and has not sent all of.
        bandwidth_bytes_per_s: Of its slowest link, as measured when it was joined.
    """

    incarnation: int
    outstanding_tokens: int
    bandwidth_bytes_per_s: float


def place(candidates: Sequence[Candidate], *, held_tokens: Mapping[int, int], prefix_tokens: int) -> int:
    """The index of the candidate that is to take a prompt; there is at least one.

    Args:
        held_tokens: Tokens of the prompt's beginning that a life has computed lately.
        prefix_tokens: Most of them that count.
    """

    def rank(index: int) -> tuple[int, int, float]:
        one = candidates[index]
        saved = min(held_tokens.get(one.incarnation, 0), prefix_tokens)
        return one.outstanding_tokens - saved, one.outstanding_tokens, -one.bandwidth_bytes_per_s

    return min(range(len(candidates)), key=rank)


class PrefixMemory:
    """Which lives were sent which beginnings of prompts lately, in whole blocks of `BLOCK_TOKENS`.

    A block is known by a hash of all tokens from the prompt's first to its own last, and of the salt: whoever has another salt
    finds nothing, as in the store. At most `max_blocks` are kept; the least recently sent go first, of one prompt the last ones.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # the newest block last, the newest holder first

    def __len__(self) -> int:
        return len(self._holders)

    def held(self, blocks: Iterable[bytes]) -> dict[int, int]:
        """Tokens of a prompt's beginning that each life has, of those that have any.

        Args:
            blocks: See `block_hashes`.
        """
        found: dict[int, int] = {}
        holders: set[int] | None = None
        for number, block in enumerate(blocks, 1):
            known = self._holders.get(block, ())
            holders = set(known) if holders is None else holders.intersection(known)
            if not holders:
                break
            found.update(dict.fromkeys(holders, number * BLOCK_TOKENS))
        return found

    def sent(self, blocks: Sequence[bytes], incarnation: int) -> None:
        """A life was sent that prompt."""
        for block in reversed(blocks):
            known = self._holders.pop(block, ())
            self._holders[block] = (incarnation, *(one for one in known if one != incarnation))[:MAX_HOLDERS]
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)


def block_hashes(token_ids: Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    """One hash for each whole block of a prompt, `MAX_BLOCKS_OF_A_PROMPT` at most; ids in [0, 2**32)."""
    num_tokens = min(len(token_ids) // BLOCK_TOKENS, MAX_BLOCKS_OF_A_PROMPT) * BLOCK_TOKENS
    tokens = memoryview(array("I", islice(token_ids, num_tokens)).tobytes())
    chain = hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()
    found = []
    block_bytes = 4 * BLOCK_TOKENS
    for begin in range(0, len(tokens), block_bytes):
        chain = hashlib.blake2b(chain + tokens[begin : begin + block_bytes], digest_size=_HASH_BYTES).digest()
        found.append(chain)
    return tuple(found)
