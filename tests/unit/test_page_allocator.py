from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from transfer.engine_types import DecodeItem
from transfer.errors import ConfigError, LocalProtocolError
from transfer.layer_groups import NO_PAGE, PageCounts, PageNeeds, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec
from transfer.pool.page_allocator import GroupAllocator, PageAllocator, PageEntries, with_tuples


def test_pages_behind_a_window_are_free_and_can_be_bound_again() -> None:
    allocator = PageAllocator(6)
    allocator.reserve("a", 3)
    assert allocator.bind("a", 3) == [0, 1, 2]
    assert allocator.pass_before("a", 2) == 2
    assert allocator.pages("a") == (NO_PAGE, NO_PAGE, 2)
    assert (allocator.num_free, allocator.num_reserved, allocator.num_bound) == (3, 2, 1)
    assert allocator.bind("a", 2) == [3, 4], "not those that were just passed: they rest"
    assert allocator.pages("a") == (NO_PAGE, NO_PAGE, 2, 3, 4)
    assert allocator.reserve("b", 3) and allocator.bind("b", 3) == [5, 0, 1], "another owner gets what was passed"
    assert allocator.release("a") == 3
    assert allocator.pages("b") == (5, 0, 1)
    allocator.check_invariants()


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ConfigError, match="num_pages is 0"):
        PageAllocator(0)
    allocator = PageAllocator(3)
    with pytest.raises(LocalProtocolError, match="count is -1"):
        allocator.reserve("a", -1)
    with pytest.raises(LocalProtocolError, match="'a' has no pages and no reservation"):
        allocator.pages("a")
    allocator.reserve("a", 1)
    with pytest.raises(LocalProtocolError, match="binds -1"):
        allocator.bind("a", -1)
    assert allocator.reserve("empty", 0) and allocator.release("empty") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unbound": (0, 1, 2, 3, 4, 5)}, "held twice"),
        ({"unbound": (1, 2, 3, 4)}, "are lost"),
        ({"bound": (5,)}, "held twice"),
        ({"num_reserved": 0}, "reserved count is 0"),
        ({"reserved": (-1, 3)}, "reserved count is 2"),
        ({"reserved": (9,), "num_reserved": 9}, "9 pages are reserved; only 5 are not bound"),
    ],
)
def test_wrong_accounts_are_noticed(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = PageAllocator(6)
    allocator.reserve("a", 3)
    allocator.bind("a", 1)
    allocator.check_invariants()
    wrong = replace(allocator.accounts(), **changes)
    monkeypatch.setattr(allocator, "accounts", lambda: wrong)
    with pytest.raises(LocalProtocolError, match=message):
        allocator.check_invariants()


class Model(RuleBasedStateMachine):
    """The allocator beside two dictionaries: what an owner may still bind, and its table."""

    owners: Bundle[str] = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(20)
        self.reserved: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.passed: dict[str, int] = {}

    def bound(self, name: str) -> list[int]:
        return [page for page in self.tables[name] if page != NO_PAGE]

    @property
    def num_bound(self) -> int:
        return sum(len(self.bound(name)) for name in self.tables)

    @rule(target=owners, name=st.text("abcdefgh", min_size=1, max_size=2), count=st.integers(0, 12))
    def reserve(self, name: str, count: int) -> object:
        free = 20 - sum(self.reserved.values()) - self.num_bound
        assert self.allocator.reserve(name, count) is (count <= free)
        if count > free:
            return multiple()
        self.reserved[name] = self.reserved.get(name, 0) + count
        self.tables.setdefault(name, [])
        self.passed.setdefault(name, 0)
        return name

    @rule(name=owners, count=st.integers(0, 6))
    def bind(self, name: str, count: int) -> None:
        if count > self.reserved.get(name, -1):
            with pytest.raises(LocalProtocolError):
                self.allocator.bind(name, count)
            return
        pages = self.allocator.bind(name, count)
        assert len(pages) == count
        self.reserved[name] -= count
        self.tables[name] += pages

    @rule(name=owners, entry=st.integers(0, 12))
    def pass_before(self, name: str, entry: int) -> None:
        if name not in self.tables:
            with pytest.raises(LocalProtocolError):
                self.allocator.pass_before(name, entry)
            return
        table = self.tables[name]
        gone = [page for page in table[:entry] if page != NO_PAGE]
        assert self.allocator.pass_before(name, entry) == len(gone)
        self.tables[name] = [NO_PAGE] * entry + table[entry:] if entry > self.passed[name] else table
        self.passed[name] = max(entry, self.passed[name])
        self.reserved[name] += len(gone)

    @rule(name=owners)
    def release(self, name: str) -> None:
        if name not in self.tables:
            with pytest.raises(LocalProtocolError):
                self.allocator.release(name)
            return
        bound = self.bound(name)
        del self.tables[name], self.passed[name]
        assert self.allocator.release(name) == self.reserved.pop(name) + len(bound)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_invariants()
        assert set(self.allocator.owners()) == set(self.tables)
        assert self.allocator.num_reserved == sum(self.reserved.values())
        assert self.allocator.num_bound == self.num_bound
        for name, table in self.tables.items():
            assert list(self.allocator.pages(name)) == table
            assert self.allocator.reserved(name) == self.reserved[name]


TestModel = Model.TestCase


FULL = LayerSpec(num_kv_heads=1, k_head_dim=1, v_head_dim=1)
STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=1, k_head_dim=9, v_head_dim=0)


def window(num_tokens: int) -> LayerSpec:
    return LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=1, k_head_dim=1, v_head_dim=1, window_tokens=num_tokens)


def needs_of(*layers: LayerSpec, page_size: int = 2, tokens_in_flight: int = 1) -> PageNeeds:
    groups = layer_groups(KVLayout(layers=layers, dtype=DType.FLOAT16))
    return PageNeeds(groups=groups, page_size=page_size, tokens_in_flight=tokens_in_flight)


NEEDS = needs_of(FULL, window(6), STATE, page_size=4)  # of 20 tokens: 5 pages, 3 pages, 1 state


def free_of(allocator: GroupAllocator) -> list[int]:
    return [pages.num_free for _, pages in allocator.by_group]


@pytest.mark.parametrize(("room", "name"), [((9, 6, 2), "full"), ((10, 5, 2), "window_6"), ((10, 6, 1), "state")])
def test_room_is_taken_in_all_groups_or_in_none(room: tuple[int, ...], name: str) -> None:
    allocator = GroupAllocator(NEEDS, room)
    assert [group.name for group, _ in allocator.by_group] == ["full", "window_6", "state"]
    assert allocator.reserve("a", 20)
    before = free_of(allocator)
    assert not allocator.reserve("b", 20), f"a page of {name} is missing"
    assert free_of(allocator) == before
    assert all(pages.owners() == ("a",) for _, pages in allocator.by_group)
    allocator.release("a")
    assert free_of(allocator) == list(room)
    assert allocator.reserve("b", 20)


def test_a_request_from_its_first_token_to_its_release() -> None:
    allocator = GroupAllocator(NEEDS, (10, 6, 2))
    allocator.reserve("a", 20)
    assert allocator.tables("a") == ((), (), ())
    assert allocator.cover("a", 9) == ((0, 1, 2), (0, 1, 2), (0,))
    assert allocator.cover("a", 9) == allocator.cover("a", 3) == allocator.tables("a"), "it has them already"
    allocator.advance("a", 13)  # token 13 reaches back to 8
    assert allocator.tables("a") == ((0, 1, 2), (NO_PAGE, NO_PAGE, 2), (0,))
    assert allocator.cover("a", 14) == ((0, 1, 2, 3), (NO_PAGE, NO_PAGE, 2, 3), (0,))
    allocator.check_invariants()
    allocator.release("a")
    assert free_of(allocator) == [10, 6, 2]
    with pytest.raises(LocalProtocolError, match="'a' has no pages"):
        allocator.cover("a", 4)


def test_every_group_has_a_number_of_pages() -> None:
    with pytest.raises(ConfigError, match=r"num_pages is \(4, 4\); there are 3 groups of layers: one number for each"):
        GroupAllocator(NEEDS, (4, 4))
    with pytest.raises(ConfigError, match="num_pages is 0"):
        GroupAllocator(NEEDS, (4, 4, 0))


def test_what_is_left_behind_when_nobody_is_left_is_named() -> None:
    allocator = GroupAllocator(needs_of(FULL, window(4)), (8, 8))
    allocator.check_idle()
    assert allocator.reserve("a", 10)
    allocator.cover("a", 3)
    with pytest.raises(LocalProtocolError, match="no request is left, and of the full pages 2 are still bound and 3 reserved"):
        allocator.check_idle()
    allocator.release("a")
    allocator.check_idle()
    allocator.by_group[1][1].reserve("b", 1)
    with pytest.raises(LocalProtocolError, match="of the window_4 pages 0 are still bound and 1 reserved"):
        allocator.check_idle()


def test_released_window_pages_can_be_bound_again_in_front() -> None:
    allocator = PageAllocator(8)
    allocator.reserve("a", 4)
    first = allocator.bind("a", 4)
    allocator.pass_before("a", 3)
    assert allocator.reserved("a") == 3
    again = allocator.bind_before("a", 2)
    assert allocator.pages("a") == (NO_PAGE, *again, first[3]) and allocator.reserved("a") == 1
    allocator.check_invariants()
    with pytest.raises(LocalProtocolError, match="'a' binds 2 pages in front; 1 entries were passed"):
        allocator.bind_before("a", 2)
    allocator.give_back("a", 1)
    with pytest.raises(LocalProtocolError, match="'a' binds 1 pages; it has reserved 0"):
        allocator.bind_before("a", 1)
    assert allocator.pages("a") == (NO_PAGE, *again, first[3]), "a refusal changes nothing"
    assert allocator.release("a") == 3
    allocator.check_invariants()


def test_pages_that_are_only_promised_can_be_given_back() -> None:
    allocator = PageAllocator(4)
    allocator.reserve("a", 3)
    allocator.bind("a", 1)
    allocator.give_back("a", 2)
    assert (allocator.reserved("a"), allocator.num_free) == (0, 3)
    for count in (1, -1):
        with pytest.raises(LocalProtocolError, match=f"'a' gives {count} pages back, but reserved 0"):
            allocator.give_back("a", count)
    allocator.check_invariants()


def test_pages_counted_by_others_and_the_group_that_keeps_every_token() -> None:
    allocator = GroupAllocator(needs_of(FULL, window(4)), (4, 8))
    assert not allocator.reserve_pages("a", PageCounts((5, 1))) and allocator.reserve_pages("a", PageCounts((2, 8)))
    assert allocator.full is allocator.by_group[0][1] and allocator.full.reserved("a") == 2
    with pytest.raises(LocalProtocolError, match="no layers that keep every token"):
        _ = GroupAllocator(needs_of(window(4)), (4,)).full


def test_a_window_does_not_pass_what_a_copy_still_reads() -> None:
    allocator = GroupAllocator(needs_of(window(4), window(6), tokens_in_flight=20), (12, 12))
    allocator.reserve("a", 24)
    allocator.cover("a", 20)
    allocator.advance("a", 16, copied_from={0: 3})  # the first window reaches back to 13, the other one to 11
    assert [table.count(NO_PAGE) for table in allocator.tables("a")] == [3, 5], "each keeps its own"
    allocator.advance("a", 16)
    assert [table.count(NO_PAGE) for table in allocator.tables("a")] == [6, 5]


def test_a_table_is_that_of_the_moment_and_reads_as_a_tuple() -> None:
    """An engine reads the table of a step while the owner already adds pages for the next step."""
    chance = random.Random(5)
    allocator = PageAllocator(64)
    assert allocator.reserve("a", 40)
    kept: list[tuple[PageEntries, tuple[int, ...]]] = []
    model: list[int] = []
    num_passed = 0
    for _ in range(300):
        match chance.randrange(3):
            case 0 if len(model) < 200 and (most := min(3, allocator.reserved("a"))):
                model += allocator.bind("a", chance.randint(0, most))
            case 1:
                entry = chance.randint(0, len(model) + 1)
                allocator.pass_before("a", entry)
                num_passed = max(num_passed, entry)
                model += [NO_PAGE] * (num_passed - len(model))
                model[:num_passed] = [NO_PAGE] * num_passed
            case 2 if count := min(2, num_passed, allocator.reserved("a")):
                model[num_passed - count : num_passed] = allocator.bind_before("a", count)
                num_passed -= count
        table = allocator.pages("a")
        kept.append((table, tuple(model)))
        allocator.check_invariants()
    for table, expected in kept:
        assert table == expected and len(table) == len(expected) and tuple(table) == expected
        hidden = table.without(3)
        assert hidden == (NO_PAGE,) * min(3, len(table)) + expected[3:] and hidden.without(0) == hidden
    table, expected = max(kept, key=lambda one: sum(page != NO_PAGE for page in one[1]))
    ends = [None, *range(-len(expected) - 2, len(expected) + 3, 3)]
    for part in (slice(begin, end, step) for begin in ends for end in ends for step in (None, 2, -1)):
        assert table[part] == expected[part], part
    assert [table[place] for place in range(-len(expected), len(expected))] == [*expected, *expected]
    with pytest.raises(IndexError):
        table[len(expected)]
    assert repr(PageEntries([1, 2], 1)) == "PageEntries(-1, 2)"
    assert PageEntries([1], 0) == [1] and PageEntries([1], 0) != 1


def test_an_engine_is_given_tuples_which_are_the_same_while_nothing_has_changed() -> None:
    """The engine can then skip tables that did not change."""
    allocator = PageAllocator(4)
    allocator.reserve("a", 4)
    allocator.bind("a", 1)
    items = [
        DecodeItem(request_id="a", token_id=1, position=2, page_tables=(allocator.pages("a"), (7,)), host_tables=((3,), ()))
        for _ in range(2)
    ]
    first, second = (with_tuples(item) for item in items)
    assert first == replace(items[0], page_tables=((0,), (7,)))
    assert isinstance(first.page_tables[0], tuple) and first.page_tables[0] is second.page_tables[0]
    allocator.bind("a", 1)
    assert with_tuples(replace(items[0], page_tables=(allocator.pages("a"),))).page_tables == ((0, 1),)


def test_a_steps_tables_cost_as_much_for_long_requests_as_for_short_ones() -> None:
    """With pages of one token every step adds one to every table. Tables that are copied would stop the loop of the rank."""
    needs = needs_of(FULL, window(64), page_size=1)
    cpu_s = {}
    for num_tokens in (200, 200_000):
        allocator = GroupAllocator(needs, [num_tokens + 100, num_tokens + 100])
        assert allocator.reserve("a", num_tokens + 50)
        allocator.begin_at("a", num_tokens)
        allocator.cover("a", num_tokens)
        steps: list[float] = []
        for position in range(num_tokens, num_tokens + 50):
            began_s = time.process_time()
            allocator.advance("a", position)
            allocator.cover("a", position + 1)
            steps.append(time.process_time() - began_s)
        cpu_s[num_tokens] = sorted(steps)[len(steps) // 2]
    assert cpu_s[200_000] < 10 * cpu_s[200], cpu_s
