"""The index of host pages: promises are kept whatever happens, equal pages are held once, nothing is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.offload.host_tier import HostPage, HostPageCounts, HostTier
from transfer.errors import LocalProtocolError


def name(number: int) -> bytes:
    return bytes([number]) * 32


def cached(tier: HostTier, number: int, group: int = 0) -> HostPage:
    """A ready page that nobody needs."""
    page = tier.take(group, name(number))
    assert page is not None
    tier.ready(page)
    tier.let_go(page)
    return page


def test_a_page_is_found_while_it_is_filled_and_after() -> None:
    tier = HostTier([2, 1])
    page = tier.take(0, name(1))
    assert page is not None and tier.find(0, name(1)) is page and not page.is_ready
    assert tier.find(1, name(1)) is None, "each group has pages of its own"
    tier.ready(page)
    tier.let_go(page)
    assert tier.find(0, name(1)) is page
    assert tier.counts(0) == HostPageCounts(free=1, cached=1, held=0, promised=0)
    assert [tier.num_pages(group) for group in (0, 1)] == [2, 1]


def test_the_longest_unused_page_makes_room() -> None:
    tier = HostTier([3])
    first, second, third = (cached(tier, number) for number in (1, 2, 3))
    tier.touch(first)
    assert tier.hold(second)
    tier.touch(second)
    taken = tier.take(0, name(4))
    assert taken is not None and taken.number == third.number
    assert tier.take(0, None) is not None and tier.find(0, name(1)) is None
    assert tier.take(0, name(5)) is None and tier.find(0, name(2)) is second, "who is held stays"
    tier.check_invariants()


def test_a_held_page_is_not_evicted_and_counts_as_used() -> None:
    tier = HostTier([4])
    first, second, third = (cached(tier, number) for number in (1, 2, 3))
    assert tier.hold(first) and tier.take(0, None) is not None
    assert tier.take(0, name(4)) is not None and tier.find(0, name(2)) is None, "the first one is held"
    tier.let_go(first, was_used=False)
    assert tier.take(0, name(5)) is not None and tier.find(0, name(3)) is None, "it was in use when another one went"
    assert tier.take(0, name(6)) is not None and tier.find(0, name(1)) is None
    assert (second.number, third.number) == (1, 2) and tier.take(0, name(7)) is None
    tier.check_invariants()


def test_a_discarded_page_that_nobody_uses_is_free_at_once() -> None:
    tier = HostTier([2])
    tier.discard(cached(tier, 1))
    assert tier.find(0, name(1)) is None
    assert tier.counts(0) == HostPageCounts(free=2, cached=0, held=0, promised=0)
    tier.check_invariants()


def test_a_promise_is_kept_against_everybody_else() -> None:
    tier = HostTier([3])
    page = cached(tier, 1)
    assert tier.promise("a", 0, 2) and tier.promise("a", 0, 0) and tier.promise("a", 0, 1)
    assert not tier.promise("b", 0, 1) and tier.take(0, name(2)) is None and not tier.hold(page)
    assert tier.counts(0).promised == 3 and tier.spare(0) == 0
    assert tier.hold(page, owner="a") and tier.hold(page), "who is held already can be held again"
    tier.let_go(page)
    assert tier.counts(0).held == 1 and tier.hold(page), "its other user keeps it"
    assert tier.take(0, name(2), owner="a") is not None and tier.counts(0).promised == 1
    tier.check_invariants()
    tier.forget("a")
    tier.forget("a")
    assert tier.spare(0) == 1 and tier.counts(0).promised == 0


def test_mistakes_are_named() -> None:
    tier = HostTier([2])
    with pytest.raises(LocalProtocolError, match="'a' is promised -1 host pages"):
        tier.promise("a", 0, -1)
    with pytest.raises(LocalProtocolError, match="'a' takes a host page of group 0; nothing is promised to it"):
        tier.take(0, None, owner="a")
    page = cached(tier, 1)
    with pytest.raises(LocalProtocolError, match=f"host page {page.number} of group 0 has no user"):
        tier.let_go(page)
    assert tier.promise("a", 0, 1)
    with pytest.raises(LocalProtocolError, match="0 are still held and 1 promised"):
        tier.check_idle()


class BrokenPromises(HostTier):
    """Promises more pages than there are."""

    def promise(self, owner: str, group: int, count: int) -> bool:
        self._groups[group].num_promised = self._groups[group].promised[owner] = count
        return True


def damaged(what: str) -> HostTier:
    tier = BrokenPromises([3])
    page = cached(tier, 1)
    held = tier.take(0, name(2))
    assert held is not None
    match what:
        case "known twice":
            held.number = page.number
        case "promise":
            tier.promise("a", 0, 3)
        case "cached and used":
            page.users = 1
        case "cached and not ready":
            page.is_ready = False
        case "held by nobody":
            held.users = 0
        case "hash":
            page.page_hash = name(9)
    return tier


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("known twice", "lost or known twice: 3 of 3"),
        ("promise", "3 host pages of group 0 are promised; 1 are free and 1 cached"),
        ("cached and used", "held without a user, or cached with one"),
        ("cached and not ready", "held without a user, or cached with one"),
        ("held by nobody", "held without a user, or cached with one"),
        ("hash", "found by a hash that it does not have"),
    ],
)
def test_the_check_finds_every_damage(what: str, says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        damaged(what).check_invariants()


class Model(RuleBasedStateMachine):
    """Anything in any order; beside it who holds what, and what was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier([6])
        self.users: list[HostPage] = []
        self.promised: Counter[str] = Counter()

    @rule(owner=st.sampled_from("ab"), count=st.integers(0, 4))
    def promise(self, owner: str, count: int) -> None:
        spare = 6 - len({page.number for page in self.users}) - self.promised.total()
        assert self.tier.promise(owner, 0, count) == (count <= spare)
        if count <= spare:
            self.promised[owner] += count

    @rule(number=st.integers(0, 7), owner=st.sampled_from([None, "a", "b"]))
    def take(self, number: int, owner: str | None) -> None:
        if owner is not None and not self.promised[owner]:
            return
        spare = self.tier.spare(0)
        known = self.tier.find(0, name(number))
        page = self.tier.take(0, name(number), owner=owner)
        assert (page is None) == (owner is None and spare < 1)
        if page is not None:
            assert all(page.number != other.number for other in self.users)
            self.users.append(page)
            self.promised[owner or ""] -= owner is not None
            if known is not None and known.users:
                assert self.tier.find(0, name(number)) is known

    @rule(number=st.integers(0, 7), owner=st.sampled_from([None, "a", "b"]))
    def hold(self, number: int, owner: str | None) -> None:
        page = self.tier.find(0, name(number))
        if page is None or (owner is not None and not self.promised[owner]):
            return
        had_users, spare = page.users, self.tier.spare(0)
        assert self.tier.hold(page, owner=owner) == (owner is not None or bool(had_users) or spare > 0)
        if page.users > had_users:
            self.users.append(page)
            self.promised[owner or ""] -= owner is not None

    @precondition(lambda self: self.users)
    @rule(data=st.data(), what=st.sampled_from(["ready", "discard", "let_go", "let_go"]))
    def use(self, data: st.DataObject, what: str) -> None:
        page = data.draw(st.sampled_from(self.users))
        getattr(self.tier, what)(page)
        if what == "let_go":
            self.users.remove(page)

    @rule(number=st.integers(0, 7))
    def spoil(self, number: int) -> None:
        page = self.tier.find(0, name(number))
        if page is not None:
            self.tier.discard(page)
            assert self.tier.find(0, name(number)) is None

    @rule(owner=st.sampled_from("ab"))
    def forget(self, owner: str) -> None:
        self.tier.forget(owner)
        self.promised[owner] = 0

    @invariant()
    def holds(self) -> None:
        self.tier.check_invariants()
        counts = self.tier.counts(0)
        assert counts.held == len({page.number for page in self.users})
        assert counts.promised == sum(self.promised[owner] for owner in "ab")

    def teardown(self) -> None:
        for page in self.users:
            self.tier.let_go(page)
        for owner in "ab":
            self.tier.forget(owner)
        self.tier.check_idle()


TestModel = Model.TestCase
