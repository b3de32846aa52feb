"""The device's page table: rows as a cache over requests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.errors import LocalProtocolError, MemoryPlanError
from transfer.layer_groups import NO_PAGE
from transfer.pool.page_table import NO_SLOT, PageTable


def shown(table: PageTable, row: int, num_tokens: int) -> list[int]:
    slots: list[int] = table.slots[row, :num_tokens].tolist()
    return slots


def expected(pages: tuple[int, ...], num_tokens: int, page_size: int) -> list[int]:
    def slot(token: int) -> int:
        page = pages[token // page_size]
        return NO_SLOT if page == NO_PAGE else page * page_size + token % page_size

    return [slot(token) for token in range(num_tokens)]


def test_the_request_that_was_asked_for_longest_ago_loses_its_row() -> None:
    table = PageTable(num_rows=4, max_seq_len=40, page_size=4)
    rows = dict(zip("abc", table.rows_of([("a", (1,), 1), ("b", (2,), 1), ("c", (3,), 1)]), strict=True))
    table.rows_of([("a", (1,), 2)])
    assert table.rows_of([("d", (4,), 1)]) == [rows["b"]]
    # Two new ones beside one of the oldest: its own row is not taken from under it.
    assert table.rows_of([("e", (5,), 1), ("c", (3,), 2), ("f", (6,), 1)])[1] == rows["c"]
    assert table.slots[rows["c"], :4].tolist() == [12, 13, 14, 15]


def test_the_last_page_may_reach_beyond_the_longest_request() -> None:
    table = PageTable(num_rows=3, max_seq_len=60, page_size=48)
    first, second = table.rows_of([("a", (0, 1), 60), ("b", (2, 3), 60)])
    assert shown(table, first, 64) == list(range(64)) and shown(table, second, 64) == list(range(96, 160))
    assert table.slots[table.dummy_row].eq(NO_SLOT).all()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    table = PageTable(num_rows=3, max_seq_len=40, page_size=4)
    table.rows_of([("a", (1,), 4)])
    before = table.slots.clone()
    with pytest.raises(MemoryPlanError, match="3 requests; the page table has rows for 2"):
        table.rows_of([("x", (1,), 1), ("y", (2,), 1), ("z", (3,), 1)])
    with pytest.raises(MemoryPlanError, match="'x' has 41 tokens; max_seq_len is 40"):
        table.rows_of([("b", (5,), 1), ("x", tuple(range(11)), 41)])
    with pytest.raises(LocalProtocolError, match="'x' has 1 pages of 4 tokens for 5 tokens; needs 2"):
        table.rows_of([("b", (5,), 1), ("x", (1,), 5)])
    assert torch.equal(table.slots, before)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[list[tuple[str, tuple[int, ...], int]]]]:
    """Page size, and steps of requests that grow, pass windows, come back with other pages, or give way."""
    page_size = draw(st.sampled_from((1, 3, 16)))
    pages = st.integers(0, 60)
    known: dict[str, tuple[int, ...]] = {}
    found = []
    for _ in range(draw(st.integers(1, 12))):
        items = []
        for request_id in draw(st.lists(st.sampled_from("abcdefg"), max_size=4, unique=True)):
            table = known.get(request_id, ())
            how = draw(st.sampled_from(("same", "grown", "passed", "other", "shorter")))
            if how == "grown":
                table = (*table, *draw(st.lists(pages, max_size=3)))
            elif how == "passed" and table:
                passed = draw(st.integers(0, len(table) - 1))
                table = (*(NO_PAGE,) * passed, *table[passed:])
            elif how == "other":
                table = tuple(draw(st.lists(pages, max_size=6)))
            elif how == "shorter":
                table = table[: draw(st.integers(0, len(table)))]
            known[request_id] = table = table[: -(-64 // page_size)]
            items.append((request_id, table, min(64, len(table) * page_size)))
        found.append(items)
    return page_size, found


@settings(max_examples=50)
@given(case=steps())
def test_every_row_shows_what_a_dictionary_would(case: tuple[int, list[list[tuple[str, tuple[int, ...], int]]]]) -> None:
    page_size, all_steps = case
    table = PageTable(num_rows=5, max_seq_len=64, page_size=page_size)
    address = table.slots.data_ptr()
    for items in all_steps:
        rows = table.rows_of(items)
        assert len(set(rows)) == len(items) and table.dummy_row not in rows
        for row, (_, pages, num_tokens) in zip(rows, items, strict=True):
            assert shown(table, row, num_tokens) == expected(pages, num_tokens, page_size)
    assert table.slots[table.dummy_row].eq(NO_SLOT).all() and table.slots.data_ptr() == address
