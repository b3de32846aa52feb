from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from transfer.errors import ConfigError, LocalProtocolError
from transfer.page_allocator import PageAllocator


def test_a_reservation_is_all_or_nothing_and_by_count() -> None:
    allocator = PageAllocator(10)
    assert allocator.reserve("a", 7)
    assert not allocator.reserve("b", 4)
    assert allocator.owners() == ("a",)  # a refused owner leaves no trace
    assert allocator.reserve("b", 3)
    assert (allocator.num_free, allocator.num_reserved, allocator.num_bound) == (0, 10, 0)
    assert not allocator.reserve("b", 1)
    assert allocator.reserved("b") == 3


def test_bound_pages_come_out_of_the_reservation() -> None:
    allocator = PageAllocator(6)
    allocator.reserve("a", 4)
    first = allocator.bind("a", 3)
    assert first == [0, 1, 2]  # consecutive while the pool is fresh: the copies rely on runs
    assert (allocator.num_free, allocator.num_reserved, allocator.num_bound) == (2, 1, 3)
    second = allocator.bind("a", 1)
    assert allocator.pages("a") == (*first, *second)
    with pytest.raises(LocalProtocolError, match="'a' binds 1 pages; it has reserved 0"):
        allocator.bind("a", 1)
    assert allocator.reserve("a", 2) and len(allocator.bind("a", 2)) == 2


def test_a_fully_reserved_pool_still_binds() -> None:
    allocator = PageAllocator(4)
    assert allocator.reserve("a", 2) and allocator.reserve("b", 2)
    assert sorted(allocator.bind("b", 2) + allocator.bind("a", 2)) == [0, 1, 2, 3]


def test_release_takes_everything_once() -> None:
    allocator = PageAllocator(5)
    allocator.reserve("a", 4)
    allocator.bind("a", 2)
    assert allocator.release("a") == 4
    assert (allocator.num_free, allocator.num_reserved, allocator.num_bound) == (5, 0, 0)
    with pytest.raises(LocalProtocolError, match="'a' has no pages"):
        allocator.release("a")
    assert allocator.owners() == ()


def test_released_pages_rest_longest() -> None:
    allocator = PageAllocator(4)
    allocator.reserve("a", 2)
    allocator.bind("a", 2)
    allocator.release("a")
    allocator.reserve("b", 2)
    assert allocator.bind("b", 2) == [2, 3]


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ConfigError, match="num_pages is 0"):
        PageAllocator(0)
    allocator = PageAllocator(3)
    with pytest.raises(LocalProtocolError, match="count is -1"):
        allocator.reserve("a", -1)
    for call in (allocator.pages, allocator.reserved, lambda owner: allocator.bind(owner, 0)):
        with pytest.raises(LocalProtocolError, match="'a' has no pages and no reservation"):
            call("a")
    allocator.reserve("a", 1)
    with pytest.raises(LocalProtocolError, match="binds -1"):
        allocator.bind("a", -1)
    assert allocator.reserve("empty", 0) and allocator.release("empty") == 0


@pytest.mark.parametrize(
    "break_it",
    [
        lambda allocator: allocator._unbound.append(0),
        lambda allocator: allocator._unbound.pop(),
        lambda allocator: allocator._holdings["a"].pages.append(5),
        lambda allocator: setattr(allocator, "_num_reserved", 0),
        lambda allocator: setattr(allocator._holdings["a"], "reserved", 9) or setattr(allocator, "_num_reserved", 9),
        lambda allocator: setattr(allocator._holdings["a"], "reserved", -1) or setattr(allocator, "_num_reserved", -1),
    ],
)
def test_check_invariants_notices(break_it: object) -> None:
    allocator = PageAllocator(6)
    allocator.reserve("a", 3)
    allocator.bind("a", 1)
    allocator.check_invariants()
    break_it(allocator)  # type: ignore[operator]
    with pytest.raises(LocalProtocolError):
        allocator.check_invariants()


class Model(RuleBasedStateMachine):
    """The allocator beside a dictionary of owner -> [reserved, bound]."""

    owners: Bundle[str] = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(20)
        self.model: dict[str, list[int]] = {}

    @rule(target=owners, name=st.text("abcdefgh", min_size=1, max_size=2), count=st.integers(0, 12))
    def reserve(self, name: str, count: int) -> object:
        free = 20 - sum(reserved + bound for reserved, bound in self.model.values())
        assert self.allocator.reserve(name, count) is (count <= free)
        if count > free:
            return multiple()
        self.model.setdefault(name, [0, 0])[0] += count
        return name

    @rule(name=owners, count=st.integers(0, 6))
    def bind(self, name: str, count: int) -> None:
        reserved = self.model.get(name, [-1, 0])[0]
        if count > reserved:
            with pytest.raises(LocalProtocolError):
                self.allocator.bind(name, count)
            return
        assert len(self.allocator.bind(name, count)) == count
        self.model[name][0] -= count
        self.model[name][1] += count

    @rule(name=owners)
    def release(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(LocalProtocolError):
                self.allocator.release(name)
            return
        assert self.allocator.release(name) == sum(self.model.pop(name))

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_invariants()
        assert set(self.allocator.owners()) == set(self.model)
        assert self.allocator.num_reserved == sum(reserved for reserved, _ in self.model.values())
        assert self.allocator.num_bound == sum(bound for _, bound in self.model.values())
        for name, (_, bound) in self.model.items():
            assert len(self.allocator.pages(name)) == bound


TestModel = Model.TestCase
