"""Which of the prefill nodes that could take a prompt is to take it. Pure (docs/adr/0037-placement.md).

Of each node its *work* counts: the tokens of prompts that it has and has not sent all of yet. This decode node's own ones it
knows at every moment. Of those of other decode nodes a prefill node tells with its heartbeats, without those of whom it tells: so
nothing counts twice, and what this node sends counts at once. Where one of the nodes to choose among does not tell, as an older
one does not, what the others tell does not count either: the silent one would look idle.

The *load* is the work less what the node may save of this prompt. That is the part of it that the node computed lately,
`prefix_tokens` at most: so a prompt never waits behind more than `prefix_tokens` tokens for the sake of its prefix, nor behind
more than the prefix is long. The least load wins; of equal ones the node with less work, of equal work the one whose slowest
link is fastest, then the first in an order that each decode node has of its own: of links that are alike all would else take
the same.
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

MAX_TOLD_TOKENS: Final = (1 << 32) - 1
"""Of others' prompts; whoever tells of more is taken not to tell."""

_HASH_BYTES: Final = 16
_64_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that could take the prompt.

    Args:
        incarnation: Of the node's life.
        outstanding_tokens: Of prompts that this decode node has sent it, and of which it has not sent all.
        others_tokens: Of other decode nodes' prompts, as it told last; None: it has not told.
        bandwidth_bytes_per_s: Of its slowest link, as measured when it was joined.
    """

    incarnation: int
    outstanding_tokens: int
    others_tokens: int | None
    bandwidth_bytes_per_s: float


def place(candidates: Sequence[Candidate], *, chooser: int, held_tokens: Mapping[int, int], prefix_tokens: int) -> int:
    """The index of the candidate that is to take a prompt; there is at least one.

    Args:
        chooser: Incarnation of the decode node.
        held_tokens: Tokens of the prompt's beginning that a life has computed lately.
        prefix_tokens: Most of them that count.
    """
    have_told = all(one.others_tokens is not None for one in candidates)

    def rank(one: Candidate) -> tuple[int, int, float]:
        work = one.outstanding_tokens + ((one.others_tokens or 0) if have_told else 0)
        saved = min(held_tokens.get(one.incarnation, 0), prefix_tokens)
        return work - saved, work, -one.bandwidth_bytes_per_s

    ranks = [rank(one) for one in candidates]
    least = min(ranks)
    equal = [index for index, its_rank in enumerate(ranks) if its_rank == least]
    return min(equal, key=lambda index: _place_in_order(chooser, candidates[index].incarnation)) if len(equal) > 1 else equal[0]


def told_tokens(told: int) -> int | None:
    """What a prefill node has told of others' prompts, as far as it can be; None: as if it had not told."""
    return told if 0 <= told <= MAX_TOLD_TOKENS else None


def _place_in_order(chooser: int, incarnation: int) -> int:
    """Of a node in the chooser's own order, which is another one for each chooser. Source: the last step of SplitMix64."""
    mixed = (chooser * 0x9E3779B97F4A7C15 + incarnation) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return mixed ^ (mixed >> 31)


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
