"""The stored beginning of a prompt: its keys, the pages that are needed, and the parts of each page that a rank needs. Pure.

The pages are those of the decode instance that the prompt is for: its ranks have stored them, sharded as their pools are. At
least one token of a prompt is always computed, because the next one is sampled from it. A sliding window needs its pages right
before the first computed token. Recurrent states are not stored, so a model that has one skips nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from transfer.instance import Instance
from transfer.layer_groups import GroupKind, LayerGroup, layer_groups
from transfer.layout import HeadSlice, KVLayout, Shard, routes
from transfer.storage.keys import PageHashes, chain_seed, rounding, store_fingerprint, store_key
from transfer.storage.pages import PagePart, can_be_stored, page_parts

MAX_PAGES: Final = 1 << 17
"""Maximum pages of a prompt that are looked up: 2,097,152 tokens in pages of 16. Ordering them takes the leader's loop 28 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """The first pages of a prompt, as a decode instance stores them.

    Args:
        decode: The instance.
        hashes: Hashes of the pages, see `transfer.storage.keys`.

    Attributes:
        fingerprint: See `transfer.storage.keys.store_fingerprint`.
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
        """Return the keys under which the decode ranks store these pages of these groups, each key once."""
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
    """Return the pages of a group that are needed to compute the tokens after the first `num_pages` pages."""
    return range(group.first_needed_token(num_pages * page_size) // page_size, num_pages)


def groups_of(decode: Instance, kind: GroupKind) -> tuple[LayerGroup, ...]:
    """Return the layer groups of one kind."""
    return tuple(group for group in layer_groups(decode.layout) if group.kind is kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """The pages of one layer group on one decode rank, and the parts of each page that this prefill rank needs.

    Args:
        shard: The decode rank's shard.
        page_bytes: Bytes of each page.
        parts: Needed parts with their heads: from `source_start` on in the page, to `target_start` on in this rank.
    """

    group: LayerGroup
    shard: Shard
    page_bytes: int
    parts: tuple[tuple[PagePart, HeadSlice], ...]


def page_sources(layout: KVLayout, own: Shard, decode: Shard) -> tuple[PageSource, ...]:
    """Return the pages that hold each (layer, head) of a prefill rank, which are those of exactly one decode rank.

    Args:
        own: Shard of the prefill rank.
        decode: Shard of the decode instance; its rank does not matter.
    """
    # The direction is opposite to a transfer: from the ranks that store to the rank that computes.
    incoming = [route for route in routes(layout, decode, own) if route.decode_rank == own.rank]
    found: list[PageSource] = []
    for group in layer_groups(layout):
        for rank in dict.fromkeys(route.prefill_rank for route in incoming):
            shard = decode.at(rank)
            heads_of = {
                layer: route.heads
                for route in incoming
                if route.prefill_rank == rank
                for layer in route.layers_in(layout, own.layers(layout))
            }
            parts = page_parts(group, layout=layout, shard=shard)
            taken = tuple((part, heads_of[part.layer]) for part in parts if part.layer in heads_of)
            if taken:
                page_bytes = sum(part.num_bytes for part in parts)
                found.append(PageSource(group=group, shard=shard, page_bytes=page_bytes, parts=taken))
    return tuple(found)
