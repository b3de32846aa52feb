"""Positions in order, and grants that wait for bytes: against plain sets and lists."""

from __future__ import annotations

import random

import pytest

from transfer.ring import ALIGNMENT_BYTES, Grant, StagingAllocator
from transfer.ring_index import CoveredOffsets, PositionIndex, SortedPositions, WaitingGrants

CELL = ALIGNMENT_BYTES


@pytest.mark.parametrize("seed", range(2))
def test_sorted_positions_agree_with_a_set(seed: int) -> None:
    chance = random.Random(seed)
    positions, plain = SortedPositions(block_positions=6), set[int]()
    for _ in range(3000):
        position = chance.randrange(400)
        step = chance.random()
        if position not in plain and step < 0.6:
            positions.add(position)
            plain.add(position)
        elif position in plain and step < 0.8:
            positions.remove(position)
            plain.remove(position)
        elif step > 0.95:
            end = position + chance.randrange(30)
            assert positions.take(position, end) == sorted(plain & set(range(position, end)))
            plain -= set(range(position, end))
        assert positions.below(position) == max((one for one in plain if one < position), default=None)
        assert list(positions) == sorted(plain)
        upper, lower = [n for n in sorted(plain) if n >= position], [n for n in sorted(plain) if n < position]
        assert positions.cycle_from(position, 7) == [*upper, *lower][:7]
        assert positions.cycle_from(position, 1000) == [*upper, *lower]
        assert len(positions) == len(plain)
        assert all(0 < size <= 6 for size in positions.block_sizes)  # what one step costs at most
    assert positions.take(0, 400) == sorted(plain)
    assert (list(positions), positions.below(400), positions.take(0, 400)) == ([], None, [])


def test_things_are_found_by_ranges_of_positions() -> None:
    index: PositionIndex[str] = PositionIndex()
    assert index.take(0, 100) == []
    for position, thing in ((7, "b"), (3, "a"), (7, "c"), (9, "d")):
        index.add(position, thing)
    index.remove(7, "b")
    assert len(index) == 3
    index.remove(9, "d")
    assert index.num_positions == 2, "what an empty position kept would grow with the ring's life"
    assert index.take(3, 9) == ["a", "c"] and index.take(0, 100) == []
    assert len(index) == index.num_positions == 0


def ring_of(num_cells: int) -> StagingAllocator:
    return StagingAllocator(num_cells * CELL)


def test_a_discarded_grant_is_removed_in_each_state() -> None:
    ring = ring_of(2)
    waiting: WaitingGrants[Grant, str] = WaitingGrants(ring.blocker_of)
    grants = [ring.assign(CELL) for _ in range(4)]
    for name, grant in zip("abcd", grants, strict=True):
        waiting.add(grant, name)
    for grant in (grants[0], grants[2], grants[2]):
        waiting.discard(grant)
    assert waiting.pop() == "b"
    for grant in grants[:2]:
        ring.release(grant)
        waiting.wake(grant.begin, grant.end)
    assert waiting.has_free
    waiting.discard(grants[3])  # it waited, and may go
    assert (len(waiting), waiting.has_free) == (0, False)
    with pytest.raises(IndexError, match="0 grants wait, and none may go"):
        waiting.pop()


def test_a_grant_that_waits_where_one_was_discarded_that_could_go_has_to_wait() -> None:
    """No honest ring gives out one position twice; a peer can say that it does."""
    blockers: dict[int, int | None] = {0: None, 1: None}
    waiting: WaitingGrants[Grant, str] = WaitingGrants(lambda grant: blockers[grant.begin])
    waiting.add(Grant(0, 1), "first")
    waiting.add(Grant(1, 2), "given up")
    waiting.discard(Grant(1, 2))
    blockers[1] = 7
    waiting.add(Grant(1, 3), "waits")
    assert waiting.pop() == "first" and not waiting.has_free
    blockers[1] = None
    waiting.wake(7, 8)
    assert waiting.pop() == "waits" and not waiting.has_free and len(waiting) == 0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_released_first_each_goes_as_soon_as_it_may(seed: int) -> None:
    """Random sizes, releases and losses, over many rounds; of those that wait none is free, and all that are free go."""
    chance = random.Random(seed)
    num_cells = chance.choice((1, 3, 16, 60))
    ring = ring_of(num_cells)
    waiting: WaitingGrants[Grant, Grant] = WaitingGrants(ring.blocker_of)
    waits: set[Grant] = set()
    live: list[Grant] = []
    num_gone = 0

    def release(grant: Grant) -> None:
        ring.release(grant)
        waiting.discard(grant)
        waits.discard(grant)
        waiting.wake(grant.begin, grant.end)

    for _ in range(1500):
        if len(live) < 3 * num_cells and chance.random() < 0.55:
            grant = ring.assign(chance.randint(1, max(num_cells // 3, 1)) * CELL)
            waiting.add(grant, grant)
            live.append(grant)
            waits.add(grant)
        elif live:
            release(live.pop(chance.randrange(len(live))))
        free = sorted((grant for grant in waits if ring.is_writable(grant)), key=lambda grant: grant.begin)
        for grant in free:
            assert waiting.pop() == grant
            waits.remove(grant)
            num_gone += 1
        assert not waiting.has_free
        assert len(waiting) == len(waits)
    assert num_gone > 50


def test_each_of_thousands_that_wait_is_looked_at_no_more_than_twice() -> None:
    ring = ring_of(64)
    looks = 0

    def counted(grant: Grant) -> int | None:
        nonlocal looks
        looks += 1
        return ring.blocker_of(grant)

    waiting: WaitingGrants[Grant, Grant] = WaitingGrants(counted)
    for _ in range(10_000):
        grant = ring.assign(CELL)
        waiting.add(grant, grant)
    for _ in range(10_000):
        grant = waiting.pop()
        ring.release(grant)
        waiting.wake(grant.begin, grant.end)
    assert looks <= 2 * 10_000
    ring.check_invariants()
    assert ring.position == ring.head


@pytest.mark.parametrize("seed", range(3))
def test_gaps_between_intervals_agree_with_counts_of_every_byte(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.randrange(1, 40)
    covered, counts, intervals = CoveredOffsets(capacity), [0] * capacity, list[tuple[int, int]]()
    for _ in range(500):
        if intervals and chance.random() < 0.5:
            begin, end = intervals.pop(chance.randrange(len(intervals)))
            covered.remove(begin, end)
            step = -1
        else:
            begin = chance.randrange(capacity)
            end = chance.randrange(begin, capacity) + 1
            covered.add(begin, end)
            intervals.append((begin, end))
            step = 1
        for offset in range(begin, end):
            counts[offset] += step
        edges = [offset for offset in range(capacity) if offset == 0 or counts[offset] != counts[offset - 1]]
        assert covered.runs() == [(offset, counts[offset]) for offset in edges]
        for _ in range(4):
            start, size = chance.randrange(capacity), chance.randrange(1, capacity + 1)
            order = [*range(start, capacity), *range(start)]
            free = (at for at in order if at + size <= capacity and not any(counts[at : at + size]))
            assert covered.first_gap(start, size) == next(free, None)


def test_a_turn_looks_at_no_more_than_it_has_steps_for_and_the_next_ones_look_at_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look takes three steps here, and a turn has five."""
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 5)
    steps = 0
    blockers: dict[int, int | None] = {begin: None for begin in range(0, 7 * CELL, CELL)}

    def blocker_of(grant: Grant) -> int | None:
        nonlocal steps
        steps += 3
        return blockers[grant.begin]

    waiting: WaitingGrants[Grant, int] = WaitingGrants(blocker_of, lambda: steps)
    grants = [Grant(begin, begin + CELL) for begin in blockers]
    for grant in grants:
        waiting.add(grant, grant.begin)
    assert (steps, len(waiting), waiting.has_later) == (6, 7, True)
    assert [waiting.pop(), waiting.pop()] == [0, CELL] and not waiting.has_free
    waiting.discard(grants[2])
    blockers[3 * CELL] = 9
    waiting.begin_turn()
    assert steps == 12 and waiting.pop() == 4 * CELL and not waiting.has_free and waiting.has_later
    waiting.begin_turn()
    assert not waiting.has_later and [waiting.pop(), waiting.pop()] == [5 * CELL, 6 * CELL]
    blockers[3 * CELL] = None
    waiting.wake(9, 10)
    assert not waiting.has_free and waiting.has_later, "the turn has no steps left"
    waiting.begin_turn()
    assert waiting.pop() == 3 * CELL and len(waiting) == 0


def test_a_grant_that_has_to_be_looked_at_is_not_taken_for_one_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    steps = 0

    def blocker_of(grant: Grant) -> int | None:
        nonlocal steps
        steps += 1
        return None if grant.end == CELL else 7

    waiting: WaitingGrants[Grant, str] = WaitingGrants(blocker_of, lambda: steps)
    waiting.add(Grant(0, CELL), "given up")
    waiting.discard(Grant(0, CELL))
    waiting.add(Grant(0, 2 * CELL), "blocked, and not looked at yet")
    assert waiting.has_later and not waiting.has_free
    waiting.begin_turn()
    assert not waiting.has_free and len(waiting) == 1


class CountedSize(int):
    """A size that counts with how many gaps it is compared."""

    num_compared = 0

    def __radd__(self, offset: int) -> int:
        CountedSize.num_compared += 1
        return offset + int(self)


def test_a_search_that_found_no_gap_is_not_repeated_until_an_interval_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedSize, "num_compared", 0)
    covered = CoveredOffsets(1000)
    for begin in range(0, 1000, 10):
        covered.add(begin, begin + 8)
    assert covered.first_gap(0, CountedSize(3)) is None
    searched = CountedSize.num_compared
    assert searched >= 100
    assert covered.first_gap(500, CountedSize(3)) is None
    assert covered.first_gap(0, CountedSize(4)) is None
    assert CountedSize.num_compared == searched
    assert covered.first_gap(0, CountedSize(2)) == 8
    covered.remove(500, 508)
    assert covered.first_gap(0, CountedSize(3)) == 498
