"""Which parts of which stored pages a prefill rank needs: the decode ranks' cut, read with this rank's. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.layer_groups import LayerGroup, layer_groups
from transfer.layout import HeadSlice, KVLayout, Shard, routes
from transfer.storage.pages import PagePart, page_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    """One decode rank's pages of one group, and what this rank takes of each.

    Args:
        group: Of layers.
        shard: The decode rank's.
        page_bytes: Of each page.
        parts: What of a page is taken: heads `source_start` on, to this rank's heads `target_start` on.
    """

    group: LayerGroup
    shard: Shard
    page_bytes: int
    parts: tuple[tuple[PagePart, HeadSlice], ...]


def page_sources(layout: KVLayout, own: Shard, decode: Shard) -> tuple[PageSource, ...]:
    """Where each (layer, head) of a prefill rank is stored: in the pages of exactly one decode rank.

    Args:
        own: The prefill rank's cut.
        decode: That of the decode instance; its rank does not matter.
    """
    # Routes the other way round: from who stores to who computes.
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
