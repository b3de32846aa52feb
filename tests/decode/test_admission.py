"""Admission: all or nothing, by count, given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.admission import Admission, page_needs
from transfer.errors import LocalProtocolError
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout


def admission(pool_pages: int, *, page_size: int, max_running: int) -> Admission:
    groups = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))
    needs = page_needs(groups, page_size)
    return Admission(pool_pages=PageCounts((pool_pages,)), needs=needs, max_running=max_running)


def take(room: Admission, name: str, num_tokens: int) -> bool:
    return room.reserve(name, room.peak(num_tokens))


def shown_peak(room: Admission, num_tokens: int) -> str:
    return room.shown(room.peak(num_tokens))


def free_pages(room: Admission) -> int:
    (count,) = room.free_pages.by_group
    return count


def test_room_is_taken_whole_or_not_at_all() -> None:
    room = admission(4, page_size=10, max_running=8)
    assert take(room, "a", 25)
    assert (free_pages(room), room.num_running) == (1, 1)
    assert not take(room, "b", 11), "two pages are not there"
    assert not room.holds("b")
    assert (free_pages(room), room.num_running) == (1, 1), "a refusal takes nothing"
    assert take(room, "b", 10)
    room.release("a")
    assert free_pages(room) == 3
    assert room.holds("b") and not room.holds("a")


def test_no_more_run_than_allowed_also_with_pages_left() -> None:
    room = admission(100, page_size=1, max_running=1)
    assert take(room, "a", 1)
    assert not take(room, "b", 1)


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
        assert room.peak(num_tokens).fit(room.pool_pages) == (pages <= 10)
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


def test_what_a_request_needs_is_told_for_messages() -> None:
    assert shown_peak(admission(4, page_size=10, max_running=8), 25) == "3"


def test_a_request_holds_more_or_fewer_pages_later() -> None:
    room = admission(6, page_size=1, max_running=4)
    assert take(room, "a", 3) and take(room, "b", 2)
    assert not room.resize("a", 0, 2), "one page is free"
    assert room.resize("a", 0, 1) and free_pages(room) == 0
    assert room.resize("a", 0, -3) and free_pages(room) == 3
    room.release("a")
    assert free_pages(room) == 4
