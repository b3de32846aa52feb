"""What of a prompt can lie in the store, under which keys, and which pages it takes to go on behind it. Pure.

Pages are those of the decode instance that the prompt is for: its ranks have stored them, cut as their pools are. At least one
token of a prompt is always computed, for the next one is sampled from it. A sliding window needs its pages right before the place
where computing begins; a recurrent state is stored nowhere, so a model that has one skips nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from transfer.instance import Instance
from transfer.layer_groups import GroupKind, LayerGroup, layer_groups
from transfer.storage.keys import PageHashes, chain_seed, rounding, store_fingerprint, store_key
from transfer.storage.pages import can_be_stored

MAX_PAGES: Final = 1 << 17
"""Most pages of a prompt that are looked up: 2,097,152 tokens in pages of 16. Ordering them takes the leader's loop 28 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """Pages that a decode instance stores of a prompt, from the first on.

    Args:
        decode: The instance.
        hashes: Of its pages, see `transfer.storage.keys`.

    Attributes:
        fingerprint: Of the instance's pages, see `transfer.storage.keys.store_fingerprint`.
    """

    decode: Instance
    hashes: tuple[bytes, ...]
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", store_fingerprint(self.decode))

    @property
    def num_pages(self) -> int:
        return len(self.hashes)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.decode.shard.page_size

    def keys(self, groups: Sequence[LayerGroup], pages: Collection[int]) -> list[str]:
        """Under which the decode ranks store these pages of these groups; each key once."""
        layout = self.decode.layout
        found: dict[str, None] = {}
        for group in groups:
            for rank in range(self.decode.shard.num_ranks):
                shard = self.decode.shard.at(rank)
                if group.layers_of(layout, shard):
                    for page in pages:
                        found[store_key(self.fingerprint, self.hashes[page], group=group, layout=layout, shard=shard)] = None
        return list(found)


def num_storable_tokens(num_tokens: int, decode: Instance) -> int:
    """Return the number of tokens of a prompt's beginning that can be stored and used; 0 if none can.

    Args:
        num_tokens: Tokens of the prompt, at least 1.
        decode: The instance that it is for.
    """
    if not all(map(can_be_stored, layer_groups(decode.layout))):
        return 0
    page_size = decode.shard.page_size
    return min((num_tokens - 1) // page_size, MAX_PAGES) * page_size


def prefix_chain(prefill: Instance, decode: Instance, *, store_salt: str, request_salt: str) -> PageHashes:
    """Return an empty chain for the hashes of a prompt's pages, as the decode instance stores them.

    Args:
        prefill: The instance that computes the prompt.
        decode: The instance that it is for.
        store_salt, request_salt: See `transfer.storage.keys.chain_seed`.
    """
    seed = chain_seed(store_fingerprint(decode), store_salt, request_salt, rounding(prefill, decode))
    return PageHashes(page_size=decode.shard.page_size, seed=seed)


def needed_pages(group: LayerGroup, num_pages: int, page_size: int) -> range:
    """The pages of a group that have to be there to go on behind the first `num_pages` pages."""
    return range(group.first_needed_token(num_pages * page_size) // page_size, num_pages)


def groups_of(decode: Instance, kind: GroupKind) -> tuple[LayerGroup, ...]:
    """The instance's groups of that kind."""
    return tuple(group for group in layer_groups(decode.layout) if group.kind is kind)
