"""The example's two tiers, with used pools: their free pages are in random order, so that no code can rely on runs."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.two_tiers import ReceivingRank, SendingRank, TwoTiers
from decode_node.admission import page_needs as decode_needs
from prefill_node.scheduler import STEPS_AHEAD
from prefill_node.scheduler import page_needs as prefill_needs
from tests.runtime.instances import until
from transfer.chunk import Chunk, ChunkPlan, largest_wire_bytes, split_into_chunks
from transfer.layer_groups import NO_PAGE, PageCounts, PageNeeds, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Range, Shard, routes, wire_dtype
from transfer.pool.kv_pool import KVPool, PagedKVPool, as_words, convert
from transfer.pool.page_allocator import GroupAllocator, PageAllocator
from transfer.ring import ALIGNMENT_BYTES
from transfer.transport.base import REGION_ALIGNMENT_BYTES
from transfer.transport.inproc import InprocHub, InprocTransport


class ScatteredTiers(TwoTiers):
    """`TwoTiers` whose allocators bind pages in shuffled order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pages = [*(sender.pages for sender in self.senders), *(receiver.pages for receiver in self.receivers)]
        for seed, each in enumerate(pages):
            scatter_pages(each.allocator, random.Random(seed))


def scatter_pages(allocator: PageAllocator, order: random.Random) -> None:
    """Bind every page once and release all of them in another order, which is the order that they are bound in from then on."""
    owners = [f"page {page}" for page in range(allocator.num_pages)]
    for owner in owners:
        assert allocator.reserve(owner, 1)
        allocator.bind(owner, 1)
    order.shuffle(owners)
    for owner in owners:
        allocator.release(owner)


# Models whose layers differ in what they keep

SHORT_WINDOW, LONG_WINDOW = 5, 20
HYBRID = KVLayout(
    layers=(
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=6, k_head_dim=7, v_head_dim=0, dtype=DType.FLOAT32),
        LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=6),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=LONG_WINDOW),
        LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=9, v_head_dim=0),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=6, k_head_dim=7, v_head_dim=0, dtype=DType.FLOAT32),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=4, v_head_dim=4, window_tokens=SHORT_WINDOW),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=LONG_WINDOW),
    ),
    dtype=DType.BFLOAT16,
)
MAX_TOKENS = 160
SERVED_WITHIN_S = 200.0  # ends a wait that would never end; each request computes for a second or so
POISON = 0x39  # bytes of what nobody may read: a number in every dtype, so that no comparison forgives it


def is_state(layer: int) -> bool:
    return HYBRID.layers[layer].kind is LayerKind.RECURRENT_STATE


@cache
def values_of(request_id: str, layer: int, *, is_v: bool) -> Tensor:
    """KV of the tokens of a request, [tokens, heads, dim], all heads; of a recurrent layer, the states after so many tokens."""
    spec = HYBRID.layers[layer]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{request_id}/{layer}/{is_v}".encode()))
    return torch.randn(MAX_TOKENS, spec.num_kv_heads, spec.v_head_dim if is_v else spec.k_head_dim, generator=generator) * 100


class GroupPages:
    """A rank's pool of all groups, and the owners of its pages.

    Whatever is not bound is at once given to another request, which writes all over it and leaves.

    Args:
        num_pages: Of each group; one more is there for that other request.
    """

    def __init__(self, shard: Shard, needs: PageNeeds, num_pages: Sequence[int], *, seed: int) -> None:
        self._needs = needs
        counts = [count + 1 for count in num_pages]
        self.pool = KVPool(layout=HYBRID, shard=shard, num_pages=counts)
        self.allocator = GroupAllocator(needs, counts)
        for _, pages in self.allocator.by_group:
            scatter_pages(pages, random.Random(seed))
        self._last_owners: dict[tuple[str, int], str] = {}
        self.handed_on: set[str] = set()
        """Groups in which a request got a page that another had passed, and was not through with."""
        self._reuse()

    def has_room(self, num_tokens: int) -> bool:
        """Return whether the pool has room for a request, besides the one that overwrites released pages."""
        free = PageCounts(tuple(pages.num_free - 1 for _, pages in self.allocator.by_group))
        return self._needs.peak(num_tokens).fit(free)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        return self.allocator.reserve(request_id, num_tokens)

    def cover(self, request_id: str, end_token: int) -> Sequence[Sequence[int]]:
        tables = self.allocator.cover(request_id, end_token)
        for (group, _), table in zip(self.allocator.by_group, tables, strict=True):
            self._last_owners |= {(group.name, page): request_id for page in table if page != NO_PAGE}
        return tables

    def advance(self, request_id: str, next_token: int, *, kept_from: int | None = None) -> None:
        self.allocator.advance(request_id, next_token, kept_from=kept_from)
        self._reuse()

    def release(self, request_id: str) -> None:
        self.allocator.release(request_id)
        self._reuse()

    def slots(self, request_id: str, layer: int, tokens: Iterable[int]) -> Tensor:
        """Where the tokens lie in a layer; of a recurrent layer, where the state lies."""
        table = self.allocator.tables(request_id)[self.pool.group_of(layer)]
        if is_state(layer):
            return torch.tensor([table[0]])
        size = self.pool.page_size
        assert all(table[token // size] != NO_PAGE for token in tokens)
        return torch.tensor([table[token // size] * size + token % size for token in tokens])

    def write(self, request_id: str, layer: int, tokens: Range) -> None:
        """Write the KV of a step over these tokens, for this rank's heads."""
        heads = self.pool.shard.heads(HYBRID.layers[layer].num_kv_heads)
        rows = slice(tokens.end, tokens.end + 1) if is_state(layer) else slice(tokens.begin, tokens.end)
        k, v = (values_of(request_id, layer, is_v=is_v)[rows, heads.begin : heads.end] for is_v in (False, True))
        self.pool.write(layer, self.slots(request_id, layer, range(tokens.begin, tokens.end)), k, v)

    def assert_readable(self, request_id: str, num_tokens: int, through: Sequence[DType], *, computed: int) -> None:
        """Check that every layer has the KV that a step up to `num_tokens` tokens reads, its last one included, bit for bit.

        Args:
            through: The pool dtypes and the wire's through which the prompt's values have gone.
            computed: Tokens of the prompt; those behind it were written here.
        """
        for part in self.pool.parts:
            for layer in part.layers:
                window = HYBRID.layers[layer].window_tokens
                first = num_tokens if is_state(layer) else max(0, num_tokens - window) if window else 0
                tokens = range(first, num_tokens + 1 if is_state(layer) else num_tokens)
                heads = self.pool.shard.heads(HYBRID.layers[layer].num_kv_heads)
                found = self.pool.read(layer, self.slots(request_id, layer, tokens))
                for is_v in (False, True)[: HYBRID.layers[layer].num_buffers]:
                    expected = values_of(request_id, layer, is_v=is_v)[first : tokens.stop, heads.begin : heads.end]
                    if not is_state(layer):
                        arrived, own = expected[: max(0, computed - first)], expected[max(0, computed - first) :]
                        for dtype in through:
                            arrived = convert(arrived, dtype)
                        expected = torch.cat((arrived, convert(own, through[-1])))
                    assert torch.equal(as_words(found[is_v]), as_words(expected.contiguous())), (request_id, layer, is_v, tokens)

    def _reuse(self) -> None:
        for (group, pages), part in zip(self.allocator.by_group, self._parts(), strict=True):
            found: list[int] = []
            for _ in range(pages.num_pages - pages.num_bound):
                assert pages.reserve("another", 1)
                found += pages.bind("another", 1)
                pages.release("another")
            assert len(set(found)) == len(found), "the oldest first"
            if any(self._last_owners.get((group.name, page)) in pages.owners() for page in found):
                self.handed_on.add(group.name)
            for layer in part.layers if part is not None else ():
                for is_v in (False, True)[: HYBRID.layers[layer].num_buffers]:
                    buffer = self.pool.buffer(layer, is_v=is_v)
                    as_words(buffer)[torch.tensor(found)] = int.from_bytes(bytes([POISON]) * buffer.element_size(), "little")

    def _parts(self) -> list[PagedKVPool | None]:
        """One for each group; None where this rank's stage has no layer of it."""
        by_group = {self.pool.group_of(part.layers[0]): part for part in self.pool.parts}
        return [by_group.get(group) for group in range(len(self.pool.groups))]


class HybridSendingRank(SendingRank):
    """A prefill rank that gives the pages that a window has passed back while it computes, as the nodes' worker does."""

    pages: GroupPages  # type: ignore[assignment]

    def __init__(self, pages: GroupPages, transport: InprocTransport, slot_bytes: int) -> None:
        super().__init__(pages, transport, slot_bytes)  # type: ignore[arg-type]
        self._released: set[str] = set()
        self._computed: set[str] = set()

    def tables_of(self, request_id: str) -> Sequence[Sequence[int]]:
        return self.pages.allocator.tables(request_id)

    def on_source_released(self, request_id: str) -> None:
        self._released.add(request_id)
        self._release_if_over(request_id)

    def on_computed(self, request_id: str) -> bool:
        """The last step is over; True when the pages went back with it."""
        self._computed.add(request_id)
        return self._release_if_over(request_id)

    def _release_if_over(self, request_id: str) -> bool:
        if request_id not in self._released & self._computed:
            return False
        self.pages.release(request_id)
        return True


class HybridReceivingRank(ReceivingRank):
    """A decode rank with a pool of several groups."""

    pages: GroupPages  # type: ignore[assignment]

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        return self.pages.cover(request_id, num_tokens)

    def on_drained(self, request_id: str) -> None:
        self.drained.add(request_id)
        self.pages.release(request_id)


class HybridTiers(TwoTiers):
    """Both tiers of `HYBRID`, with pools that have just the room for a few requests' peaks.

    Args:
        plan: How requests are cut; a step of the engine computes a chunk's tokens.
        room: Lengths of the requests that the pools of both tiers can hold at once.
        new_tokens: Tokens that decode generates for each.
    """

    senders: list[HybridSendingRank]  # type: ignore[assignment]
    receivers: list[HybridReceivingRank]  # type: ignore[assignment]

    def __init__(
        self, prefill: Shard, decode: Shard, *, plan: ChunkPlan, room: Sequence[int], new_tokens: int, is_one_sided: bool
    ) -> None:
        self.layout, self.prefill, self.decode, self.plan, self.new_tokens = HYBRID, prefill, decode, plan, new_tokens
        self.routes = routes(HYBRID, prefill, decode)
        self.dtype = wire_dtype(HYBRID, prefill, decode)
        hub, groups = InprocHub(), layer_groups(HYBRID)
        needs = prefill_needs(groups, prefill.page_size, chunk_tokens=plan.chunk_tokens)
        counts = _sum_of_peaks(needs, room)
        largest = largest_wire_bytes(plan, HYBRID, self.routes, self.dtype)
        slot_bytes = -(-largest // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
        ring_bytes = 3 * -(-largest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # fewer pieces than a prompt has
        self.senders = [
            HybridSendingRank(
                GroupPages(prefill.at(rank), needs, counts, seed=rank), InprocTransport(hub, one_sided=is_one_sided), slot_bytes
            )
            for rank in range(prefill.num_ranks)
        ]
        needs = decode_needs(groups, decode.page_size)
        counts = _sum_of_peaks(needs, [tokens + new_tokens for tokens in room])
        self.receivers = [
            HybridReceivingRank(
                GroupPages(decode.at(rank), needs, counts, seed=100 + rank),  # type: ignore[arg-type]
                InprocTransport(hub, one_sided=is_one_sided),
                ring_bytes,
            )
            for rank in range(decode.num_ranks)
        ]
        pairs = sorted({(route.prefill_rank, route.decode_rank) for route in self.routes})
        for number, (prefill_rank, decode_rank) in enumerate(pairs, 1):
            self.join(number, self.senders[prefill_rank], decode_rank)

    @property
    def through(self) -> list[DType]:
        return [self.prefill.pool_dtype(HYBRID), self.dtype, self.decode.pool_dtype(HYBRID)]

    async def serve(self, request_id: str, num_tokens: int) -> None:
        """One request from its start on both tiers to its last token on decode's."""
        await until(partial(self._has_started, request_id, num_tokens), SERVED_WITHIN_S)
        await self._prefill(request_id, num_tokens)
        await until(lambda: all(request_id in receiver.complete for receiver in self.receivers), SERVED_WITHIN_S)
        for receiver in self.receivers:
            pages = receiver.pages
            pages.assert_readable(request_id, num_tokens, self.through, computed=num_tokens)
        for position in range(num_tokens, num_tokens + self.new_tokens):
            for receiver in self.receivers:
                pages = receiver.pages
                pages.advance(request_id, position)
                pages.cover(request_id, position + 1)
                for part in pages.pool.parts:
                    for layer in part.layers:
                        pages.write(request_id, layer, Range(begin=position, end=position + 1))
                pages.assert_readable(request_id, position + 1, self.through, computed=num_tokens)
            await asyncio.sleep(0)
        for receiver in self.receivers:
            receiver.pages.release(request_id)

    def _has_started(self, request_id: str, num_tokens: int) -> bool:
        """Room on all ranks of both tiers, or on none."""
        ranks = [(sender.pages, num_tokens) for sender in self.senders]
        ranks += [(receiver.pages, num_tokens + self.new_tokens) for receiver in self.receivers]
        if not all(pages.has_room(tokens) for pages, tokens in ranks):
            return False
        for pages, tokens in ranks:
            assert pages.reserve(request_id, tokens)
        for receiver in self.receivers:
            receiver.pages.allocator.begin_at(request_id, num_tokens)
        self.begin(request_id, num_tokens)
        return True

    async def _prefill(self, request_id: str, num_tokens: int) -> None:
        """Step by step, with pages for as many of them as a leader sends ahead."""
        cells: dict[int, list[Chunk]] = {}
        for chunk in split_into_chunks(self.plan, num_tokens=num_tokens, num_layers=HYBRID.num_layers):
            cells.setdefault(chunk.tokens.end, []).append(chunk)
        ends = list(cells)
        for place, end in enumerate(ends):
            for sender in self.senders:
                pages = sender.pages
                pages.cover(request_id, ends[min(place + STEPS_AHEAD, len(ends) - 1)])
                for chunk in cells[end]:
                    layers = chunk.layers.intersect(pages.pool.shard.layers(HYBRID))
                    for layer in range(layers.begin, layers.end):
                        pages.write(request_id, layer, chunk.tokens)
                    sender.loop.chunk_computed(request_id, chunk.index, None)
            await asyncio.sleep(0)
            for sender in self.senders:
                if end == num_tokens and sender.on_computed(request_id):
                    continue
                sender.pages.advance(request_id, end, kept_from=num_tokens)

    def assert_nothing_is_left(self) -> None:
        ranks: list[HybridSendingRank | HybridReceivingRank] = [*self.senders, *self.receivers]
        for rank in ranks:
            rank.loop.check_idle()
            allocator = rank.pages.allocator
            allocator.check_invariants()
            assert all(pages.num_free == pages.num_pages for _, pages in allocator.by_group)


def _sum_of_peaks(needs: PageNeeds, lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(peaks) for peaks in zip(*(needs.peak(tokens).by_group for tokens in lengths), strict=True))
