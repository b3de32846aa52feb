"""Layer groups: layers of a model that keep their tokens for equally long, and so share a page table.

Full attention (MLA too) keeps every token. A sliding window keeps the last tokens, in separate pages that are released as the
window moves on. Chunked local attention (Llama 4, in vLLM only) keeps the tokens of one chunk. A recurrent layer keeps one state
per request, which is one page of one pseudo token.

Pure, like `transfer.layout`. Pools, allocators, schedulers and the memory plan all count with this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from transfer.layout import KVLayout, LayerKind, LayerSpec, Shard, first_read_token

NO_PAGE: Final = -1
"""Entry of a page table that a window has passed, or that lies before its begin. Nothing may be read or written there."""

PAGE_TABLE_COLUMNS: Final = 32
"""Columns of a page table are a multiple of this: 128 bytes, a cache line of the device."""

PREFILL_STEPS_IN_FLIGHT: Final = 3
"""Most steps of a prompt that a prefill rank has received and whose end it has not noticed.

The leader sends two ahead (`prefill_node.scheduler` counts a step until every rank has ended it). One more step may have ended
without the rank having noticed.
"""

DECODE_STEPS_IN_FLIGHT: Final = 2
"""Maximum number of decode steps that a rank has received and not finished: the leader sends the next step while one runs."""


class GroupKind(StrEnum):
    """How long a group keeps a token."""

    FULL = "full"  # to the end of the request
    WINDOW = "window"  # until `window_tokens` newer ones have come
    CHUNK = "chunk"  # until the next chunk of `window_tokens` begins
    STATE = "state"  # not at all: a state of fixed size per request


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a page table.

    Args:
        layers: Global layers, ascending.
        window_tokens: Tokens that attention can reach, including the newest, or tokens of a chunk; 0 for the other kinds.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    window_tokens: int = 0

    @property
    def name(self) -> str:
        """For people and labels: ``full``, ``window_1024``, ``chunk_8192``, ``state``; unique in a model."""
        return f"{self.kind}_{self.window_tokens}" if self.window_tokens else str(self.kind)

    def page_size(self, page_size: int) -> int:
        """Return the tokens per page of this group, in a pool of `page_size`."""
        return 1 if self.kind is GroupKind.STATE else page_size

    def layers_of(self, layout: KVLayout, shard: Shard) -> tuple[int, ...]:
        """Return the group's layers in the shard's pipeline stage."""
        stage = shard.layers(layout)
        return tuple(layer for layer in self.layers if layer in stage)

    def page_bytes(self, layout: KVLayout, shard: Shard) -> int:
        """Return the bytes of one page over the shard's layers and heads; 0 if it has none of them."""
        size = 0
        for layer in self.layers_of(layout, shard):
            spec = layout.layers[layer]
            heads = len(shard.heads(spec.num_kv_heads))
            size += heads * (spec.k_head_dim + spec.v_head_dim) * shard.layer_dtype(layout, layer).num_bytes
        return size * self.page_size(shard.page_size)

    def first_needed_token(self, next_token: int) -> int:
        """Return the first token that any later step reads, if `next_token` is the next one to be computed."""
        return first_read_token(next_token, self.window_tokens, is_chunked=self.kind is GroupKind.CHUNK)

    def first_travelling_token(self, num_tokens: int) -> int:
        """Return the first token of a prompt that is sent to decode, see `LayerSpec.first_travelling_token`."""
        return self.first_needed_token(num_tokens - 1)

    def num_pages(self, num_tokens: int, page_size: int) -> int:
        """Return the entries of the page table of a request of `num_tokens` tokens."""
        return 1 if self.kind is GroupKind.STATE else -(-num_tokens // page_size)

    def peak_pages(self, num_tokens: int, *, page_size: int, tokens_in_flight: int) -> int:
        """Return the most pages that a request of `num_tokens` tokens ever holds at once.

        Args:
            tokens_in_flight: Most tokens between the first one that a running step computes and the last one that any step
                already sent to the engine will compute.
        """
        entries = self.num_pages(num_tokens, page_size)
        if not self.window_tokens:
            return entries
        # The first of those tokens reaches window_tokens - 1 back at most; n tokens touch ceil((n - 1) / page_size) + 1.
        reach = self.window_tokens - 1 + tokens_in_flight
        return min(entries, -(-(reach - 1) // page_size) + 1)


def layer_groups(layout: KVLayout) -> tuple[LayerGroup, ...]:
    """Return the groups of a model, for all its stages: full attention, windows from short to long, chunks, states."""
    order = list(GroupKind)
    members: dict[tuple[GroupKind, int], list[int]] = {}
    for layer, spec in enumerate(layout.layers):
        members.setdefault((_kind(spec), spec.window_tokens), []).append(layer)
    return tuple(
        LayerGroup(kind=kind, window_tokens=window_tokens, layers=tuple(layers))
        for (kind, window_tokens), layers in sorted(members.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    )


def page_table_tokens(
    groups: tuple[LayerGroup, ...], *, num_pages: int, page_size: int, max_seq_len: int, has_host_pages: bool
) -> int:
    """Return the tokens of the longest request for which a page table on the device has columns.

    All tokens of a request lie in the pool of full attention, so a request cannot be longer than that pool. Two cases keep
    `max_seq_len`: pages of a running request can lie in host memory, or the model keeps no token to the end.

    Args:
        num_pages: Pages of the first group.
    """
    if has_host_pages or groups[0].kind is not GroupKind.FULL:
        return max_seq_len
    return min(max_seq_len, num_pages * page_size)


_LOCAL_GROUPS: Final = {
    LayerKind.SLIDING_WINDOW: GroupKind.WINDOW,
    LayerKind.CHUNKED_LOCAL: GroupKind.CHUNK,
    LayerKind.RECURRENT_STATE: GroupKind.STATE,
}


def _kind(spec: LayerSpec) -> GroupKind:
    return _LOCAL_GROUPS.get(spec.kind, GroupKind.FULL)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages of each group."""

    by_group: tuple[int, ...]

    def __add__(self, other: PageCounts) -> PageCounts:
        return PageCounts(tuple(a + b for a, b in zip(self.by_group, other.by_group, strict=True)))

    def __sub__(self, other: PageCounts) -> PageCounts:
        return PageCounts(tuple(a - b for a, b in zip(self.by_group, other.by_group, strict=True)))

    def fit(self, room: PageCounts) -> bool:
        """Return whether `room` has as many pages of every group."""
        return all(mine <= theirs for mine, theirs in zip(self.by_group, room.by_group, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNeeds:
    """Pages that requests need in the pools of a tier's ranks.

    Args:
        page_size: Tokens per page.
        tokens_in_flight: See `LayerGroup.peak_pages`.
    """

    groups: tuple[LayerGroup, ...]
    page_size: int
    tokens_in_flight: int

    def peak(self, num_tokens: int) -> PageCounts:
        """Return the most pages that a request of `num_tokens` tokens ever holds at once."""
        return PageCounts(
            tuple(
                group.peak_pages(num_tokens, page_size=self.page_size, tokens_in_flight=self.tokens_in_flight)
                for group in self.groups
            )
        )

    def shown(self, counts: PageCounts) -> str:
        """Return text for messages: ``7``, or ``7 full, 3 window_1024`` with several groups."""
        if len(self.groups) == 1:
            return str(counts.by_group[0])
        return ", ".join(f"{count} {group.name}" for group, count in zip(self.groups, counts.by_group, strict=True))
