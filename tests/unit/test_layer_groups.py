"""Layer groups: which layers share pages, how many pages a request takes of each, and that these are always enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.admission import page_needs as decode_needs
from prefill_node.scheduler import STEPS_AHEAD
from prefill_node.scheduler import page_needs as prefill_needs
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.errors import EngineError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup, PageCounts, PageNeeds, layer_groups
from transfer.layout import DType, HeadSlice, KVLayout, LayerKind, LayerSpec, Range, Route, Shard, wire_buffers
from transfer.pool.page_allocator import GroupAllocator

FULL = LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=6)
MLA = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=20, v_head_dim=0)
STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=4, k_head_dim=100, v_head_dim=0, dtype=DType.FLOAT32)


def window(num_tokens: int) -> LayerSpec:
    return LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=num_tokens)


def chunks(num_tokens: int) -> LayerSpec:
    return LayerSpec(kind=LayerKind.CHUNKED_LOCAL, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=num_tokens)


def layout_of(*layers: LayerSpec) -> KVLayout:
    return KVLayout(layers=layers, dtype=DType.BFLOAT16)


def group_of(spec: LayerSpec) -> LayerGroup:
    (group,) = layer_groups(layout_of(spec))
    return group


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((FULL, FULL), {"full": (0, 1)}),
        ((MLA, FULL), {"full": (0, 1)}),  # of whatever shape: what counts is that no token is ever forgotten
        ((window(9), FULL, window(9)), {"full": (1,), "window_9": (0, 2)}),
        ((window(100), window(9), FULL, window(100)), {"full": (2,), "window_9": (1,), "window_100": (0, 3)}),
        ((window(10), window(9)), {"window_9": (1,), "window_10": (0,)}),
        ((STATE, window(9), MLA, FULL), {"full": (2, 3), "window_9": (1,), "state": (0,)}),
        ((chunks(9), STATE, chunks(9), window(9)), {"window_9": (3,), "chunk_9": (0, 2), "state": (1,)}),
    ],
)
def test_the_groups_of_every_mix(layers: tuple[LayerSpec, ...], expected: dict[str, tuple[int, ...]]) -> None:
    found = layer_groups(layout_of(*layers))
    assert [(group.name, group.layers) for group in found] == list(expected.items())
    assert sorted(layer for group in found for layer in group.layers) == list(range(len(layers)))
    assert all((group.kind in (GroupKind.WINDOW, GroupKind.CHUNK)) is (group.window_tokens > 0) for group in found)


def test_bytes_of_a_page_are_those_of_the_ranks_own_layers_and_heads() -> None:
    layout = layout_of(FULL, window(9), MLA, STATE, FULL, window(9))
    full, windows, states = layer_groups(layout)
    shard = Shard(tp_size=2, page_size=16)
    assert full.page_bytes(layout, shard) == 16 * 2 * (2 * 2 * (8 + 6) + 20)  # tokens, bytes, two GQA layers, one latent
    assert windows.page_bytes(layout, shard) == 16 * 2 * (2 * 2 * (8 + 8))
    assert states.page_bytes(layout, shard) == 2 * 100 * 4  # one state, in float32 whatever the pool's dtype is
    narrow = Shard(tp_size=2, page_size=16, dtype=DType.FLOAT8_E4M3)
    assert full.page_bytes(layout, narrow) * 2 == full.page_bytes(layout, shard)
    assert states.page_bytes(layout, narrow) == states.page_bytes(layout, shard)
    last = Shard(pp_size=2, pp_rank=1, page_size=16, stage_layers=(4, 2))
    assert (full.layers_of(layout, last), windows.layers_of(layout, last), states.layers_of(layout, last)) == ((4,), (5,), ())
    assert states.page_bytes(layout, last) == 0
    assert (full.page_size(16), windows.page_size(16), states.page_size(16)) == (16, 16, 1)


def test_the_first_token_that_a_step_reads() -> None:
    reach = group_of(window(4))
    assert [reach.first_needed_token(token) for token in range(7)] == [0, 0, 0, 0, 1, 2, 3]  # token 6 sees 3, 4, 5 and itself
    assert [reach.first_travelling_token(tokens) for tokens in range(7)] == [0, 0, 0, 0, 0, 1, 2]
    chunk = group_of(chunks(4))
    assert [chunk.first_needed_token(token) for token in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert [chunk.first_travelling_token(tokens) for tokens in range(10)] == [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]
    for spec in (FULL, MLA, STATE):
        group = group_of(spec)
        assert group.first_needed_token(1000) == group.first_travelling_token(1000) == 0


@pytest.mark.parametrize("local", [window, chunks])
@given(num_tokens=st.integers(1, 60), window_tokens=st.integers(1, 70), cut=st.integers(1, 60))
def test_the_first_travelling_token_is_that_of_the_wire(
    local: Callable[[int], LayerSpec], num_tokens: int, window_tokens: int, cut: int
) -> None:
    """Pages that decode does not bind, and those that prefill keeps, must be told by what the wire carries."""
    layout, everything = layout_of(local(window_tokens)), Range(begin=0, end=1)
    heads = HeadSlice(source_start=0, target_start=0, count=4)
    route = Route(index=0, prefill_rank=0, decode_rank=0, layers=everything, heads=heads)
    edges = sorted({0, min(cut, num_tokens), num_tokens})
    sent = {
        token
        for begin, end in pairwise(edges)
        for buffer in wire_buffers(
            layout, route, tokens=Range(begin=begin, end=end), layers=everything, num_tokens=num_tokens, dtype=DType.INT8
        )
        for token in range(buffer.tokens.begin, buffer.tokens.end)
    }
    assert sent == set(range(group_of(local(window_tokens)).first_travelling_token(num_tokens), num_tokens))


@pytest.mark.parametrize(
    ("window_tokens", "num_tokens", "page_size", "in_flight", "pages"),
    [
        (1024, 100_000, 16, 1, 65),  # 1024 tokens in reach: 64 pages, or 65 where they begin inside one
        (1024, 100, 16, 1, 7),  # no more than the whole request
        (8, 1000, 1, 1, 8),  # pages of one token: exactly the window
        (1024, 100_000, 16, 1536, 161),  # 1023 before the first of 1536
    ],
)
def test_peaks_by_hand(window_tokens: int, num_tokens: int, page_size: int, in_flight: int, pages: int) -> None:
    assert group_of(window(window_tokens)).peak_pages(num_tokens, page_size=page_size, tokens_in_flight=in_flight) == pages


def test_counts() -> None:
    left, right = PageCounts((5, 3)), PageCounts((2, 3))
    assert (left + right, left - right) == (PageCounts((7, 6)), PageCounts((3, 0)))
    assert right.fit(left) and not left.fit(right) and left.fit(left)
    assert not PageCounts((0, 4)).fit(left), "room in one group is none in another"
    several = PageNeeds(groups=layer_groups(layout_of(FULL, window(9), STATE)), page_size=4, tokens_in_flight=1)
    assert several.peak(100) == PageCounts((25, 3, 1))
    assert several.shown(several.peak(100)) == "25 full, 3 window_9, 1 state"
    one = PageNeeds(groups=layer_groups(layout_of(FULL)), page_size=4, tokens_in_flight=1)
    assert one.shown(one.peak(100)) == "25"


def test_an_engine_for_models_of_one_group_asks_for_the_one_table() -> None:
    one = {"request_id": "a", "page_tables": ((4, 2),)}
    several = {"request_id": "a", "page_tables": ((4, 2), (NO_PAGE, 1))}
    for make in (
        lambda tables: PrefillItem(token_ids=(1,), first_token=0, is_last=True, **tables),
        lambda tables: DecodeItem(token_id=1, position=0, **tables),
    ):
        assert make(one).page_table == (4, 2)
        with pytest.raises(EngineError, match="request 'a' has 2 page tables"):
            _ = make(several).page_table


def held(allocator: GroupAllocator, owner: str) -> PageCounts:
    return PageCounts(tuple(sum(page != NO_PAGE for page in table) for table in allocator.tables(owner)))


def entries_of(group: LayerGroup, tokens: Iterable[int], page_size: int) -> set[int]:
    """Entries of the group's table that a step over these tokens reads or writes."""
    return {0} if group.kind is GroupKind.STATE else {token // page_size for token in tokens}


@dataclass(slots=True, kw_only=True)
class Driven:
    """One request in an allocator, and what may be asked of its tables."""

    owner: str
    num_tokens: int
    needs: PageNeeds
    allocator: GroupAllocator
    most_held: PageCounts = field(init=False)

    def __post_init__(self) -> None:
        assert self.allocator.reserve(self.owner, self.num_tokens)
        self.most_held = held(self.allocator, self.owner)

    def check(self) -> None:
        self.allocator.check_invariants()
        now, peak = held(self.allocator, self.owner), self.needs.peak(self.num_tokens)
        assert now.fit(peak)
        for (_, pages), bound, most in zip(self.allocator.by_group, now.by_group, peak.by_group, strict=True):
            assert pages.reserved(self.owner) == most - bound, "the share of a request never changes"
        both = zip(self.most_held.by_group, now.by_group, strict=True)
        self.most_held = PageCounts(tuple(max(pair) for pair in both))

    def assert_holds(self, tables: Sequence[Sequence[int]], first_needed: dict[str, int], end: int) -> None:
        """Every token from a group's first needed one to `end` has a page; what lies before has none."""
        page_size = self.needs.page_size
        for (group, _), table in zip(self.allocator.by_group, tables, strict=True):
            first = first_needed.get(group.name, 0)
            needed = entries_of(group, range(first, end), page_size)
            assert all(table[entry] != NO_PAGE for entry in needed), (group.name, first, end, table)
            assert all(page == NO_PAGE for page in table[: first // group.page_size(page_size)]), (group.name, first, end, table)
            bound = [page for page in table if page != NO_PAGE]
            assert len(set(bound)) == len(bound)


@dataclass(slots=True, kw_only=True)
class Prefilled(Driven):
    """A prompt on a prefill rank: steps of a chunk grid, up to STEPS_AHEAD + 1 of them sent and not over."""

    chunk_tokens: int
    sent: list[tuple[int, int, Sequence[Sequence[int]]]] = field(default_factory=list)
    num_sent_tokens: int = 0
    num_over_tokens: int = 0
    is_source_released: bool = False
    passed: dict[str, int] = field(default_factory=dict)  # by group: the first token that the last `advance` kept

    @property
    def can_send(self) -> bool:
        return self.num_sent_tokens < self.num_tokens and len(self.sent) <= STEPS_AHEAD

    def send(self) -> None:
        begin = self.num_sent_tokens
        end = min(self.num_tokens, (begin // self.chunk_tokens + 1) * self.chunk_tokens)
        self.sent.append((begin, end, self.allocator.cover(self.owner, end)))
        self.num_sent_tokens = end

    def end(self) -> None:
        _, end, _ = self.sent.pop(0)
        self.num_over_tokens = end
        kept_from = None if self.is_source_released else self.num_tokens
        self.allocator.advance(self.owner, end, kept_from=kept_from)
        for group, _ in self.allocator.by_group:
            first = group.first_needed_token(end)
            self.passed[group.name] = first if kept_from is None else min(first, group.first_travelling_token(kept_from))

    def check(self) -> None:
        Driven.check(self)
        now = self.allocator.tables(self.owner)
        for begin, end, tables in self.sent:  # the engine may be at any of them
            for (group, _), then, table in zip(self.allocator.by_group, tables, now, strict=True):
                for entry in entries_of(group, range(group.first_needed_token(begin), end), self.needs.page_size):
                    assert then[entry] == table[entry] != NO_PAGE
        if not self.is_source_released:
            for (group, _), table in zip(self.allocator.by_group, now, strict=True):
                travelling = range(group.first_travelling_token(self.num_tokens), self.num_over_tokens)
                if travelling or group.kind is not GroupKind.STATE:
                    assert all(table[entry] != NO_PAGE for entry in entries_of(group, travelling, self.needs.page_size))
        if self.num_sent_tokens:
            self.assert_holds(now, self.passed, self.num_sent_tokens)


@st.composite
def groups_of_models(draw: st.DrawFn) -> tuple[LayerGroup, ...]:
    specs = draw(st.lists(st.sampled_from((FULL, MLA, STATE)), max_size=3))
    specs += [local(tokens) for local in (window, chunks) for tokens in draw(st.sets(st.integers(1, 40), max_size=3))]
    return layer_groups(layout_of(*(specs or [FULL])))


@given(data=st.data(), groups=groups_of_models(), page_size=st.integers(1, 9), chunk_tokens=st.integers(1, 20))
def test_a_prefill_rank_always_has_its_pages_and_no_more_than_its_share(
    data: st.DataObject, groups: tuple[LayerGroup, ...], page_size: int, chunk_tokens: int
) -> None:
    needs = prefill_needs(groups, page_size, chunk_tokens=chunk_tokens)
    lengths = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=3))
    room = [sum(peaks) for peaks in zip(*(needs.peak(tokens).by_group for tokens in lengths), strict=True)]
    allocator = GroupAllocator(needs, room)
    running = [
        Prefilled(owner=f"r{number}", num_tokens=tokens, needs=needs, allocator=allocator, chunk_tokens=chunk_tokens)
        for number, tokens in enumerate(lengths)
    ]
    assert all(pages.num_free == 0 for _, pages in allocator.by_group), "room for just these"
    while running:
        one = data.draw(st.sampled_from(running))
        moves = [one.send] * one.can_send + [one.end] * bool(one.sent)
        if not moves or data.draw(st.integers(0, 60)) == 0:  # arrived, or given up in the middle
            allocator.release(one.owner)
            running.remove(one)
        else:
            data.draw(st.sampled_from(moves))()
            one.is_source_released = one.is_source_released or data.draw(st.integers(0, 20)) == 0
        for other in running:
            other.check()
    allocator.check_invariants()
    assert all(pages.num_free == pages.num_pages for _, pages in allocator.by_group)


@given(data=st.data(), groups=groups_of_models(), page_size=st.integers(1, 9), chunk_tokens=st.integers(1, 20))
def test_a_decode_rank_always_has_its_pages_and_no_more_than_its_share(
    data: st.DataObject, groups: tuple[LayerGroup, ...], page_size: int, chunk_tokens: int
) -> None:
    needs = decode_needs(groups, page_size)
    prompts = data.draw(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 30)), min_size=1, max_size=3))
    totals = [prompt + new for prompt, new in prompts]
    room = [sum(peaks) for peaks in zip(*(needs.peak(tokens).by_group for tokens in totals), strict=True)]
    allocator = GroupAllocator(needs, room)
    requests = [
        Driven(owner=f"r{number}", num_tokens=tokens, needs=needs, allocator=allocator) for number, tokens in enumerate(totals)
    ]
    work: list[tuple[Driven, list[int], int, int]] = []  # ends of chunks that have not arrived, prompt, next position
    for one, (prompt, _) in zip(requests, prompts, strict=True):
        allocator.begin_at(one.owner, prompt)
        ends = [min(prompt, begin + chunk_tokens) for begin in range(0, prompt, chunk_tokens)]
        work.append((one, data.draw(st.permutations(ends)), prompt, prompt))
    while work:
        place = data.draw(st.integers(0, len(work) - 1))
        one, ends, prompt, position = work.pop(place)
        if ends:
            end = ends.pop(0)
            first = {group.name: group.first_travelling_token(prompt) for group, _ in allocator.by_group}
            one.assert_holds(allocator.cover(one.owner, end), first, end)
        elif position < one.num_tokens:
            allocator.advance(one.owner, position)
            first = {group.name: group.first_needed_token(position) for group, _ in allocator.by_group}
            one.assert_holds(allocator.cover(one.owner, position + 1), first, position + 1)
            position += 1
        one.check()
        if (not ends and position == one.num_tokens) or data.draw(st.integers(0, 60)) == 0:
            allocator.release(one.owner)
        else:
            work.append((one, ends, prompt, position))
    allocator.check_invariants()
    assert all(pages.num_free == pages.num_pages for _, pages in allocator.by_group)


@pytest.mark.parametrize("window_tokens", [1, 5, 8, 33])
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_the_peak_of_a_decode_rank_is_reached(window_tokens: int, page_size: int) -> None:
    needs = decode_needs(layer_groups(layout_of(window(window_tokens), FULL)), page_size)
    for prompt in (1, window_tokens, 3 * window_tokens + 1):
        num_tokens = prompt + window_tokens + 3 * page_size
        one = Driven(
            owner="a", num_tokens=num_tokens, needs=needs, allocator=GroupAllocator(needs, needs.peak(num_tokens).by_group)
        )
        one.allocator.begin_at("a", prompt)
        one.allocator.cover("a", prompt)
        for position in range(prompt, num_tokens):
            one.check()
            one.allocator.advance("a", position)
            one.allocator.cover("a", position + 1)
        one.check()
        assert one.most_held == needs.peak(num_tokens)
