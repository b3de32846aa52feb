"""Choose the prefill node for a prompt. Pure (docs/adr/0037-placement.md).

The *work* of a node is the number of tokens of prompts that it has and has not completely sent. This decode node knows its own
prompts at any time. Prefill nodes report the prompts of other decode nodes with their heartbeats, so nothing counts twice. If one
candidate does not report them, as older ones do not, no report counts: the silent node would look idle.

The *load* is the work minus the tokens that the node can save, because it computed the beginning of the prompt lately. At most
`prefix_tokens` are subtracted, so a prompt never waits behind more tokens than that for its prefix. The smallest load wins, then
the smallest work, then the fastest slowest link, then an order that differs for each decode node. Without that order, all decode
nodes would choose the same of several equal nodes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import Final

BLOCK_TOKENS: Final = 128
MAX_BLOCKS_OF_A_PROMPT: Final = 512
"""Equals 65,536 tokens. Tokens that two prompts share after them do not matter."""

MAX_BLOCKS: Final = 1 << 16
"""Blocks that are remembered over all nodes. They take some 16 MiB, and hold 8 million tokens of prompts that share nothing."""

MAX_HOLDERS: Final = 4
"""Newest nodes that are remembered for a block."""

MAX_TOLD_TOKENS: Final = (1 << 32) - 1
"""Maximum tokens that a node can report of others' prompts. A larger number counts as no report."""

_HASH_BYTES: Final = 16
_64_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node that could take the prompt.

    Args:
        outstanding_tokens: Tokens of prompts that this decode node has sent it and that it has not completely sent.
        others_tokens: Tokens of other decode nodes' prompts, as last reported. None means that it does not report them.
        bandwidth_bytes_per_s: Bandwidth of its slowest link, measured at the join.
    """

    incarnation: int
    outstanding_tokens: int
    others_tokens: int | None
    bandwidth_bytes_per_s: float


def place(candidates: Sequence[Candidate], *, chooser: int, held_tokens: Mapping[int, int], prefix_tokens: int) -> int:
    """Return the index of the candidate that gets a prompt. There is at least one candidate.

    Args:
        chooser: Incarnation of the decode node.
        held_tokens: Tokens of the prompt's beginning that each life has computed lately.
        prefix_tokens: Limit of the held tokens that count.
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


def group_of(addresses: Collection[str], *, chooser: str, size: int | None) -> list[str]:
    """Return the prefill nodes that a decode node joins, in their order: all, or `size` of them.

    Each decode node chooses others, so all prefill nodes get about the same number of joins. When the list changes, a group
    changes only by the nodes that left and by those that take their places (docs/adr/0078). Source: rendezvous hashing (Thaler
    and Ravishankar, 1996).

    Args:
        chooser: Address of the decode node.
    """
    if size is None or len(addresses) <= size:
        return list(addresses)

    def score(address: str) -> bytes:
        return hashlib.blake2b(f"{chooser} {address}".encode(), digest_size=_HASH_BYTES).digest()

    chosen = frozenset(nsmallest(size, addresses, key=score))
    return [address for address in addresses if address in chosen]


def told_tokens(told: int) -> int | None:
    """Return the tokens of others' prompts that a prefill node has reported. None means that the report is out of range."""
    return told if 0 <= told <= MAX_TOLD_TOKENS else None


def _place_in_order(chooser: int, incarnation: int) -> int:
    """Return the place of a node in the chooser's own order. Source: the last step of SplitMix64."""
    mixed = (chooser * 0x9E3779B97F4A7C15 + incarnation) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return mixed ^ (mixed >> 31)


class PrefixMemory:
    """Remember the beginnings of prompts that were sent to each life lately, in whole blocks of `BLOCK_TOKENS`.

    The key of a block is a hash of the salt and of all tokens up to its end. So prompts of another salt find nothing, as in the
    store. At most `max_blocks` are kept. The least recently sent blocks are removed first. Within one prompt, the last blocks are
    removed first.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # the newest block last, the newest holder first

    def __len__(self) -> int:
        return len(self._holders)

    def held(self, blocks: Iterable[bytes]) -> dict[int, int]:
        """Return the tokens of a prompt's beginning that each life has. `blocks` are its `block_hashes`."""
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
        """Record that a prompt was sent to a life."""
        for block in reversed(blocks):
            known = self._holders.pop(block, ())
            self._holders[block] = (incarnation, *(one for one in known if one != incarnation))[:MAX_HOLDERS]
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)


def block_hashes(token_ids: Sequence[int], salt: str = "") -> tuple[bytes, ...]:
    """Return one hash for each whole block of a prompt, at most `MAX_BLOCKS_OF_A_PROMPT`. Token ids are below 2**32."""
    num_tokens = min(len(token_ids) // BLOCK_TOKENS, MAX_BLOCKS_OF_A_PROMPT) * BLOCK_TOKENS
    tokens = memoryview(array("I", islice(token_ids, num_tokens)).tobytes())
    chain = hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()
    found = []
    block_bytes = 4 * BLOCK_TOKENS
    for begin in range(0, len(tokens), block_bytes):
        chain = hashlib.blake2b(chain + tokens[begin : begin + block_bytes], digest_size=_HASH_BYTES).digest()
        found.append(chain)
    return tuple(found)
