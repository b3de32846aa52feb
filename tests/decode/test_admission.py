"""Admission: all or nothing, by count, given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.admission import WAITS_S, Admission, Room, page_needs
from transfer.errors import LocalProtocolError
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec


def admission(pool_pages: int, *, page_size: int, max_running: int) -> Admission:
    groups = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))
    needs = page_needs(groups, page_size)
    return Admission(pool_pages=PageCounts((pool_pages,)), needs=needs, max_running=max_running)


def take(room: Admission, name: str, num_tokens: int) -> bool:
    return room.reserve(name, room.needs.peak(num_tokens), accepted_s=0.0)


def shown_peak(room: Admission, num_tokens: int) -> str:
    return room.needs.shown(room.needs.peak(num_tokens))


def free_pages(room: Admission) -> int:
    (count,) = room.free_pages.by_group
    return count


def test_reserved_or_released_twice_is_a_bug() -> None:
    room = admission(4, page_size=1, max_running=4)
    take(room, "a", 1)
    with pytest.raises(LocalProtocolError, match="a has room already"):
        take(room, "a", 1)
    room.release("a")
    with pytest.raises(KeyError):
        room.release("a")
    assert free_pages(room) == 4


@given(page_size=st.integers(1, 9), sizes=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_pages_are_never_overdrawn_or_lost(page_size: int, sizes: list[tuple[int, bool]]) -> None:
    room = admission(10, page_size=page_size, max_running=5)
    held: dict[str, int] = {}
    for index, (num_tokens, gives_back) in enumerate(sizes):
        pages = -(-num_tokens // page_size)
        assert room.needs.peak(num_tokens).fit(room.pool_pages) == (pages <= 10)
        fits = pages <= 10 - sum(held.values()) and len(held) < 5
        assert take(room, str(index), num_tokens) == fits
        if fits:
            held[str(index)] = pages
        if gives_back and held:
            name = next(iter(held))
            room.release(name)
            del held[name]
        assert free_pages(room) == 10 - sum(held.values()) >= 0
    for name in held:
        room.release(name)
    assert (free_pages(room), room.num_running) == (10, 0)


def test_the_pages_that_a_request_needs_are_shown_in_messages() -> None:
    assert shown_peak(admission(4, page_size=10, max_running=8), 25) == "3"


def test_a_request_holds_more_or_fewer_pages_later() -> None:
    room = admission(6, page_size=1, max_running=4)
    assert take(room, "a", 3) and take(room, "b", 2)
    assert not room.resize("a", 0, 2), "one page is free"
    assert room.resize("a", 0, 1) and free_pages(room) == 0
    assert room.resize("a", 0, -3) and free_pages(room) == 3
    room.release("a")
    assert free_pages(room) == 4


# Requests that wait


class Asking:
    """Requests of one token a page that ask for room as `Tiers` does; `now_s` is the clock."""

    def __init__(self, pool_pages: int, *, max_running: int = 8) -> None:
        self.now_s = 0.0
        groups = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))
        self.room = Admission(
            pool_pages=PageCounts((pool_pages,)),
            needs=page_needs(groups, 1),
            max_running=max_running,
            now_s=lambda: self.now_s,
        )

    def ask(self, name: str, num_pages: int, *, accepted_s: float) -> bool:
        pages = PageCounts((num_pages,))
        if self.room.reserve(name, pages, accepted_s=accepted_s):
            return True
        self.room.wait(name, Room(pages=pages), accepted_s=accepted_s)
        return False


def test_younger_requests_take_only_what_is_free_beyond_the_need_of_the_oldest_that_waits() -> None:
    one = Asking(10)
    assert one.ask("first", 5, accepted_s=0.0)
    assert not one.ask("long", 6, accepted_s=1.0) and one.room.wanted.pages == PageCounts((6,))
    assert not one.ask("short", 1, accepted_s=2.0), "five pages are free, and all of them are for the long request"
    one.room.release("first")
    assert not one.ask("middle", 5, accepted_s=2.0)
    assert one.ask("short", 4, accepted_s=2.0), "beyond the need of the long request"
    assert one.ask("long", 6, accepted_s=1.0)
    one.room.release("long")
    assert not one.ask("shorter", 2, accepted_s=3.0), "the second oldest has its turn now"
    assert one.ask("middle", 5, accepted_s=2.0)
    assert one.room.wanted.pages == PageCounts((2,))


def test_nothing_is_set_aside_for_a_request_that_is_given_up_or_asks_no_more() -> None:
    one = Asking(10)
    assert one.ask("first", 5, accepted_s=0.0)
    assert not one.ask("given up", 10, accepted_s=1.0) and not one.ask("silent", 10, accepted_s=1.5)
    one.room.stop_waiting("given up")
    one.room.stop_waiting("given up")
    assert one.room.num_waiting == 1
    one.now_s = WAITS_S
    assert not one.ask("short", 1, accepted_s=2.0), "the silent one may still ask"
    one.now_s += 0.01
    assert one.ask("short", 1, accepted_s=2.0)
    assert not one.ask("silent", 10, accepted_s=1.5) and not one.ask("other", 1, accepted_s=2.0), (
        "it asks again: its turn is back"
    )


def test_nothing_is_set_aside_for_a_request_that_the_pool_can_never_hold() -> None:
    one = Asking(10)
    assert not one.ask("too long", 11, accepted_s=0.0)
    assert one.room.num_waiting == 0 and one.ask("younger", 10, accepted_s=1.0)


def test_room_is_set_aside_in_each_group_of_layers() -> None:
    full, window = (
        LayerSpec(num_kv_heads=1, k_head_dim=1, v_head_dim=1),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=1, k_head_dim=1, v_head_dim=1, window_tokens=4),
    )
    groups = layer_groups(KVLayout(layers=(full, window), dtype=DType.FLOAT16))
    room = Admission(pool_pages=PageCounts((10, 6)), needs=page_needs(groups, 1), max_running=8)
    assert room.reserve("first", PageCounts((2, 4)), accepted_s=0.0)
    assert not room.reserve("long", PageCounts((5, 4)), accepted_s=1.0), "two pages of the window are free"
    room.wait("long", Room(pages=PageCounts((5, 4))), accepted_s=1.0)
    assert not room.reserve("short", PageCounts((1, 1)), accepted_s=2.0)
    room.release("first")
    assert room.reserve("short", PageCounts((5, 2)), accepted_s=2.0)
    assert room.reserve("long", PageCounts((5, 4)), accepted_s=1.0)


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "release", "give up", "later"]), st.integers(0, 7), st.integers(1, 12)),
        max_size=60,
    )
)
def test_the_oldest_that_waits_gets_all_that_comes_free(moves: list[tuple[str, int, int]]) -> None:
    """Whatever else happens, only its own start, its end or its silence takes from what is free for it."""
    one = Asking(10, max_running=3)
    asked_s: dict[int, tuple[float, int]] = {}
    for index, (move, number, num_pages) in enumerate(moves):
        name = str(number)
        live = {key: pages for key, (when_s, pages) in asked_s.items() if one.now_s - when_s <= WAITS_S}
        oldest = min(live, default=None)
        free_before = free_pages(one.room)
        if move == "later":
            one.now_s += WAITS_S / 3
        elif move == "release" and one.room.holds(name):
            one.room.release(name)
        elif move == "give up":
            one.room.stop_waiting(name)
            asked_s.pop(number, None)
        elif move == "ask" and not one.room.holds(name):
            pages = asked_s[number][1] if number in asked_s else num_pages
            has_room = one.ask(name, pages, accepted_s=float(number))
            asked_s.pop(number, None)
            if not has_room and pages <= 10:
                asked_s[number] = (one.now_s, pages)
            if has_room and oldest is not None and oldest < number:
                assert free_pages(one.room) >= live[oldest] and one.room.num_running < 3, (index, moves)
            if oldest is None or oldest >= number:
                assert has_room == (pages <= free_before and one.room.num_running - has_room < 3)
