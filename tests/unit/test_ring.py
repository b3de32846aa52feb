"""The ring: golden examples that people can follow, and a stateful machine against an oracle that keeps every byte's owner."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transfer.errors import ChunkTooLarge, ConfigError, LocalProtocolError, RemoteProtocolError
from transfer.ring import (
    ALIGNMENT_BYTES,
    MAX_ATTEMPTS,
    MAX_KEPT_RANGES,
    MAX_PUBLISHED_RANGES,
    Grant,
    RingView,
    StagingAllocator,
    Watermark,
    grant_key,
)

CELL = ALIGNMENT_BYTES


def cells(begin: int, end: int) -> Grant:
    return Grant(begin * CELL, end * CELL)


def ring_of(num_cells: int) -> StagingAllocator:
    return StagingAllocator(num_cells * CELL, incarnation=7)


def view_of(num_cells: int) -> RingView:
    return RingView(num_cells * CELL, incarnation=7)


def test_grants_follow_each_other_and_are_rounded_up() -> None:
    ring = ring_of(4)
    assert ring.assign(1) == cells(0, 1)
    assert ring.assign(CELL + 1) == cells(1, 3)
    assert (ring.head, ring.position, ring.live_bytes, ring.num_live_grants) == (3 * CELL, 0, 3 * CELL, 2)


def test_the_oldest_open_grant_is_none_in_quarantine() -> None:
    ring = ring_of(8)
    assert ring.oldest_open is None
    first, second, third = (ring.assign(CELL) for _ in range(3))
    assert ring.oldest_open == first.begin
    ring.quarantine(first)
    assert ring.oldest_open == second.begin
    ring.release(second)
    assert ring.oldest_open == third.begin
    ring.release(third)
    assert ring.oldest_open is None and ring.num_live_grants == 1


def test_a_grant_does_not_wrap_and_the_padding_is_free_at_once() -> None:
    ring = ring_of(4)
    first = ring.assign(3 * CELL)
    second = ring.assign(2 * CELL)
    assert second == cells(4, 6)  # cell 3 is padding
    assert ring.live_bytes == 5 * CELL
    ring.release(first)
    assert ring.position == 4 * CELL


def test_the_ring_overcommits_and_the_second_round_waits_for_the_first() -> None:
    ring = ring_of(4)
    first, second = ring.assign(2 * CELL), ring.assign(2 * CELL)
    third = ring.assign(2 * CELL)
    assert third == cells(4, 6)
    assert [ring.is_writable(grant) for grant in (first, second, third)] == [True, True, False]
    ring.release(second)
    assert not ring.is_writable(third)
    ring.release(first)
    assert ring.is_writable(third)


def test_one_stuck_grant_delays_only_those_that_reuse_its_bytes() -> None:
    ring, view = ring_of(4), view_of(4)
    stuck, other = ring.assign(CELL), ring.assign(3 * CELL)
    on_stuck, on_other = ring.assign(CELL), ring.assign(CELL)
    ring.release(other)
    view.update(ring.watermark())
    assert ring.position == 0
    assert [view.is_writable(grant) for grant in (stuck, on_stuck, on_other)] == [True, False, True]
    assert view.is_released(other)
    assert not view.is_released(stuck)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ring_of(4).assign(1025), ChunkTooLarge, r"1025 bytes .* ring of 1024 bytes"),
        (lambda: ring_of(4).assign(0), LocalProtocolError, "grant of 0 bytes"),
        (lambda: StagingAllocator(0), ConfigError, "ring.capacity_bytes is 0; it must be a positive multiple of 256"),
        (lambda: StagingAllocator(CELL + 1), ConfigError, "ring.capacity_bytes is 257"),
        (lambda: RingView(0), RemoteProtocolError, "ring of 0 bytes"),
        (lambda: Grant(0, 0), LocalProtocolError, "empty or negative"),
    ],
)
def test_invalid_arguments_of_a_ring_are_rejected(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("stride", [1, 2], ids=["full", "every second grant"])
def test_thousands_of_quarantined_grants_do_not_slow_new_ones_down(stride: int) -> None:
    """A storm of cancels leaves such a ring; each new grant once compared itself with every quarantined one, for two rounds."""
    num_grants = 4096 * stride
    ring = ring_of(num_grants)
    grants = [ring.assign(CELL) for _ in range(num_grants)]
    for grant in grants[::stride]:
        ring.quarantine(grant)
    for grant in grants[1::stride] if stride > 1 else ():
        ring.release(grant)
    began_s = time.process_time()
    for grant in grants[: 100 * stride : stride]:
        ring.release(grant)
        assert ring.assign(2 * CELL).begin >= num_grants * CELL
    assert time.process_time() - began_s < 2  # of CPU time: it takes a thousandth of that; before, more than a minute


def test_only_a_live_grant_can_be_quarantined() -> None:
    ring = ring_of(4)
    grant = ring.assign(CELL)
    ring.release(grant)
    with pytest.raises(LocalProtocolError, match="quarantine of grant"):
        ring.quarantine(grant)


def test_a_view_keeps_the_lowest_ranges_only() -> None:
    """A peer that publishes from high to low, so that nothing it said before is ever covered, grows no writer's memory."""
    num_watermarks = 2 * MAX_KEPT_RANGES // MAX_PUBLISHED_RANGES
    view = view_of(4)
    spans = [cells(2 * number + 1, 2 * number + 2) for number in range(num_watermarks * MAX_PUBLISHED_RANGES)]
    for sequence in range(1, num_watermarks + 1):
        begin = len(spans) - sequence * MAX_PUBLISHED_RANGES
        published = tuple(spans[begin : begin + MAX_PUBLISHED_RANGES])
        assert view.update(Watermark(incarnation=7, sequence=sequence, position=0, released=published))
        assert all(view.is_released(span) for span in published)
    assert [view.is_released(span) for span in spans] == [True] * MAX_KEPT_RANGES + [False] * MAX_KEPT_RANGES
    assert not view.is_writable(cells(2 * len(spans), 2 * len(spans) + 1))


@pytest.mark.parametrize(("num_kept", "num_published", "num_cells"), [(3, 2, 24), (MAX_KEPT_RANGES, MAX_PUBLISHED_RANGES, 200)])
def test_a_view_that_hears_little_delays_and_never_misleads(
    num_kept: int, num_published: int, num_cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More released ranges than a watermark can carry, and then more than a view keeps."""
    monkeypatch.setattr("transfer.ring.MAX_KEPT_RANGES", num_kept)
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", num_published)
    chance = random.Random(num_cells)
    ring, view, oracle = ring_of(num_cells), view_of(num_cells), Oracle(num_cells)
    live: list[Grant] = []
    num_delayed = 0
    for _ in range(2000):
        if len(live) < 2 * num_cells and chance.random() < 0.6:
            live.append(ring.assign(chance.randint(1, 3 * CELL)))
            oracle.add(live[-1])
        elif live:
            grant = live.pop(chance.randrange(len(live)))
            ring.release(grant)
            oracle.release(grant)
        if chance.random() < 0.02:
            heard = [grant for grant in oracle.released if view.is_released(grant)] if num_kept == MAX_KEPT_RANGES else []
            view.update(ring.watermark())
            assert all(view.is_released(grant) for grant in heard)
            for grant in live:
                assert ring.is_writable(grant) is oracle.is_writable(grant)
                assert not view.is_released(grant)
                assert not view.is_writable(grant) or oracle.is_writable(grant)
                num_delayed += oracle.is_writable(grant) and not view.is_writable(grant)
            ring.check_invariants()
    assert num_delayed
    for grant in live:
        ring.release(grant)
    view.update(ring.watermark())
    assert all(view.is_released(grant) for grant in live)


def test_the_newest_ranges_are_named_at_once_however_many_there_are() -> None:
    num_ranges = 5 * MAX_PUBLISHED_RANGES
    ring, view = ring_of(2 * num_ranges), view_of(2 * num_ranges)
    grants = [ring.assign(CELL) for _ in range(2 * num_ranges)]
    for number, grant in enumerate(grants[1::2]):
        ring.release(grant)
        newest = ring.watermark()
        if number % 8 == 0:  # a stream that skips seven of eight
            view.update(newest)
            assert view.is_released(grant)
    assert all(view.is_released(grant) for grant in grants[1 : 2 * num_ranges - 14 : 2])


def test_ranges_that_a_grant_needs_are_named_next() -> None:
    """Grants in quarantine make gaps, and new grants use the bytes of gaps that were released long ago."""
    num_gaps = 3 * MAX_PUBLISHED_RANGES
    ring, view = ring_of(2 * num_gaps), view_of(2 * num_gaps)
    grants = [ring.assign(CELL) for _ in range(2 * num_gaps)]
    for held, released in zip(grants[::2], grants[1::2], strict=True):
        ring.quarantine(held)
        ring.release(released)
    view.update(ring.watermark())
    for _ in range(num_gaps):
        grant = ring.assign(CELL)
        assert ring.is_writable(grant)
        ring.name_next(grant)
        view.update(ring.watermark())
        assert view.is_writable(grant)


def test_half_of_a_watermark_is_left_for_the_turns_of_other_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant that needs a range in each of many laps of the ring learns of the newest first."""
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", 2)
    ring = ring_of(2)
    grants = [ring.assign(CELL) for _ in range(8)]
    for grant in grants[5:0:-2]:
        ring.release(grant)
    ring.name_next(grants[7])
    heard = [ring.watermark().released for _ in range(9)]
    assert all(len(released) in (1, 2) and grants[5] in released for released in heard)
    assert {grants[1], grants[3]} <= {grant for released in heard for grant in released}


def test_a_grant_needs_the_range_of_each_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", 4)
    ring = ring_of(2)
    grants = [ring.assign(CELL) for _ in range(12)]
    for grant in grants[9:0:-2]:
        ring.release(grant)
    ring.name_next(grants[11])
    assert all({grants[9], grants[7]} <= set(ring.watermark().released) for _ in range(9))


def test_a_range_that_is_named_again_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", 4)
    ring = ring_of(4)
    grants = [ring.assign(CELL) for _ in range(16)]
    for number in (11, 9, 1, 3):
        ring.release(grants[number])
    ring.name_next(grants[5])  # on the bytes of grant 1
    ring.release(grants[7])
    assert all({grants[1], grants[7]} <= set(ring.watermark().released) for _ in range(9))


@pytest.mark.parametrize("num_ranges", [MAX_PUBLISHED_RANGES + 1, 5 * MAX_PUBLISHED_RANGES])
@pytest.mark.parametrize("stride", [2, 5])
def test_a_stream_that_skips_watermarks_hears_of_every_range(num_ranges: int, stride: int) -> None:
    """A slow stream delivers the newest state only, for example every second one when each ack takes as long as two ticks."""
    ring, slow = ring_of(2 * num_ranges), view_of(2 * num_ranges)
    grants = [ring.assign(CELL) for _ in range(2 * num_ranges)]
    for grant in grants[1::2]:
        ring.release(grant)
    for _ in range(60):
        for _ in range(stride):
            newest = ring.watermark()
        slow.update(newest)
    assert all(slow.is_released(grant) for grant in grants[1::2])


@pytest.mark.parametrize("seed", range(2))
def test_a_lap_of_watermarks_names_every_range_that_is_there_throughout(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while ranges come, join and go: the oldest grant stands still, and all others are released in any order."""
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", 3)
    chance, ring, view = random.Random(seed), ring_of(64), view_of(64)
    ring.assign(CELL)
    live: list[Grant] = []
    num_unheard: dict[Grant, int] = {}  # watermarks since the grant was released, until it is heard of
    for _ in range(600):
        live += [ring.assign(CELL) for _ in range(chance.randrange(3))]
        while live and chance.random() < 0.5:
            grant = live.pop(chance.randrange(len(live)))
            ring.release(grant)
            num_unheard[grant] = 0
        view.update(ring.watermark())
        num_unheard = {grant: count + 1 for grant, count in num_unheard.items() if not view.is_released(grant)}
        assert max(num_unheard.values(), default=0) <= 2 * (ring.num_ranges // 3 + 2)


def test_older_and_repeated_watermarks_and_those_of_another_life_are_ignored() -> None:
    ring, view = ring_of(4), view_of(4)
    grant = ring.assign(CELL)
    early = ring.watermark()
    ring.release(grant)
    late = ring.watermark()
    assert view.update(late)
    assert not view.update(early)
    assert not view.update(late)
    assert not view.update(Watermark(incarnation=8, sequence=99, position=0))
    assert view.watermark == late


@pytest.mark.parametrize(
    ("position", "sequence", "released"),
    [
        (-1, 0, ()),
        (0, -1, ()),
        (256, 1, (Grant(256, 512),)),
        (0, 1, (Grant(256, 512), Grant(512, 768))),
    ],
)
def test_a_watermark_that_contradicts_itself_cannot_be_made(position: int, sequence: int, released: tuple[Grant, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        Watermark(incarnation=1, sequence=sequence, position=position, released=released)


@pytest.mark.parametrize(
    ("grant", "num_bytes", "can_hold"),
    [
        (cells(0, 1), CELL, True),
        (cells(4, 8), 4 * CELL, True),
        (cells(0, 1), CELL + 1, False),  # too small
        (cells(3, 5), CELL, False),  # across the end
        (cells(0, 5), CELL, False),  # larger than the ring
        (Grant(1, 257), CELL, False),  # not aligned
    ],
)
def test_which_grants_a_ring_can_give(grant: Grant, num_bytes: int, can_hold: bool) -> None:
    assert view_of(4).can_hold(grant, num_bytes) is can_hold


def test_no_two_writes_of_a_rings_life_share_a_key() -> None:
    keys = [grant_key(begin * CELL, attempt) for begin in range(50) for attempt in range(MAX_ATTEMPTS)]
    assert sorted(keys) == keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"live": {}}, f"R5: no live grant, watermark 0, head {4 * CELL}"),
        ({"range_begins": (0, CELL)}, "ascending and apart"),
        ({"head": 2 * CELL}, "ascending and apart"),
        (
            {"range_begins": (CELL, 2 * CELL), "end_of": {CELL: 3 * CELL, 2 * CELL: 4 * CELL}},
            rf"ascending and apart: \[{2 * CELL}, ",
        ),
        ({"begin_of": {}}, "found by either end"),
        ({"end_of": {CELL: 3 * CELL, 7: 8}}, "found by either end"),
        ({"live_bytes": 0}, "R4"),
        ({"live": {3 * CELL: 4 * CELL}}, "live bytes are counted"),
        ({"quarantined": (Grant(99, 100),)}, "a quarantined grant is live"),
        ({"quarantined_bytes": 3}, "quarantined bytes"),
        ({"suspect_runs": ((0, 1), (CELL, 0))}, "step around"),
        (
            {"range_begins": (), "end_of": {}, "begin_of": {}, "live": {0: 2 * CELL, CELL: 3 * CELL}, "live_bytes": 4 * CELL},
            "R1: writable grants",
        ),
    ],
)
def test_wrong_accounts_are_noticed(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ring_of(8)
    grants = [ring.assign(CELL) for _ in range(4)]
    for grant in grants[1:3]:
        ring.release(grant)
    ring.check_invariants()
    wrong = replace(ring.accounts(), **changes)
    monkeypatch.setattr(ring, "accounts", lambda: wrong)
    with pytest.raises(LocalProtocolError, match=message):
        ring.check_invariants()


class Oracle:
    """Who has been given each byte, in the order of grants; no positions, no ranges, no arithmetic of rounds."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.owners: list[list[Grant]] = [[] for _ in range(num_cells)]  # per cell, unreleased, oldest first
        self.released: set[Grant] = set()

    def _cells_of(self, grant: Grant) -> list[int]:
        return [position // CELL % self.num_cells for position in range(grant.begin, grant.end, CELL)]

    def add(self, grant: Grant) -> None:
        for cell in self._cells_of(grant):
            self.owners[cell].append(grant)

    def release(self, grant: Grant) -> None:
        self.released.add(grant)
        for cell in self._cells_of(grant):
            self.owners[cell].remove(grant)

    def is_writable(self, grant: Grant) -> bool:
        return all(self.owners[cell][0] == grant for cell in self._cells_of(grant))


def test_a_grant_waits_for_the_newest_grant_in_its_way() -> None:
    ring, view = ring_of(4), view_of(4)
    grants = [ring.assign(CELL) for _ in range(12)]
    assert [ring.blocker_of(grant) for grant in grants] == [None] * 4 + [grant.end - 1 for grant in grants[:8]]
    for released in (grants[0], grants[6]):
        ring.release(released)
    view.update(ring.watermark())
    for knows in (ring, view):
        assert knows.blocker_of(grants[4]) is None
        assert knows.blocker_of(grants[10]) == grants[2].end - 1  # given up unwritten, and what it waited for is still there
        assert knows.blocker_of(grants[11]) == grants[7].end - 1
        assert knows.num_steps > 0, "each look is counted"


def test_rounds_that_are_released_are_skipped() -> None:
    """A grant that has been stuck for thousands of rounds is found in one step, and its neighbours are free in one."""
    ring = ring_of(4)
    ring.assign(CELL)
    for _ in range(3 * 5000):
        ring.release(ring.assign(CELL)) if ring.head // CELL % 4 else ring.release(ring.assign(2 * CELL))
    before = ring.num_steps
    grants = [ring.assign(CELL) for _ in range(4)]
    assert [ring.blocker_of(grant) for grant in grants].count(CELL - 1) == 1
    assert 0 < ring.num_steps - before <= 2 * len(grants)


class RingMachine(RuleBasedStateMachine):
    """An allocator and a writer's view, between them watermarks that are delayed, lost, repeated and reordered."""

    @initialize(num_cells=st.integers(1, 9))
    def start(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.ring, self.view, self.oracle = ring_of(num_cells), view_of(num_cells), Oracle(num_cells)
        self.live: list[Grant] = []
        self.quarantined: list[Grant] = []
        self.under_way: list[Watermark] = []
        self.highest = 0

    @rule(num_bytes=st.integers(1, 9 * CELL))
    def assign(self, num_bytes: int) -> None:
        assume(num_bytes <= self.num_cells * CELL)
        expected = self.expected_begin(-(-num_bytes // CELL))
        grant = self.ring.assign(num_bytes)
        assert grant.begin == expected
        assert 0 <= grant.end - grant.begin - num_bytes < CELL
        assert self.view.can_hold(grant, num_bytes)
        self.live.append(grant)
        self.oracle.add(grant)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        grant = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        if grant in self.quarantined:
            self.quarantined.remove(grant)
        self.ring.release(grant)
        self.oracle.release(grant)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.live))
        self.ring.quarantine(grant)
        if grant not in self.quarantined:
            self.quarantined.append(grant)

    @rule()
    def publish(self) -> None:
        self.under_way.append(self.ring.watermark())

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_kept=st.booleans())
    def deliver(self, data: st.DataObject, is_kept: bool) -> None:
        watermark = data.draw(st.sampled_from(self.under_way))
        is_newer = watermark.sequence > self.view.watermark.sequence
        assert self.view.update(watermark) is is_newer
        if not is_kept:
            self.under_way.remove(watermark)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.under_way.remove(data.draw(st.sampled_from(self.under_way)))

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.check_invariants()
        for grant in self.live:
            assert self.ring.is_writable(grant) is self.oracle.is_writable(grant), grant
            assert not self.view.is_released(grant), grant
            assert not self.view.is_writable(grant) or self.oracle.is_writable(grant), grant
            self.check_blocker(grant)
        assert all(grant in self.oracle.released for grant in self.oracle.released if self.view.is_released(grant))
        assert self.ring.position >= self.highest
        self.highest = self.ring.position
        assert self.ring.live_bytes == sum(grant.end - grant.begin for grant in self.live)
        assert self.ring.quarantined_bytes == sum(grant.end - grant.begin for grant in self.quarantined)

    def expected_begin(self, count: int) -> int:
        """The first place from the head on that holds `count` cells, none of them quarantined; else the first that holds them."""
        suspect = {cell // CELL % self.num_cells for one in self.quarantined for cell in range(one.begin, one.end, CELL)}
        head = self.ring.head // CELL
        places = [cell for cell in range(head, head + 2 * self.num_cells) if cell % self.num_cells + count <= self.num_cells]
        clean = (cell for cell in places if not suspect & {one % self.num_cells for one in range(cell, cell + count)})
        return next(clean, places[0]) * CELL

    def check_blocker(self, grant: Grant) -> None:
        """It is the last byte of the newest cell that an older live grant has on the grant's bytes."""
        held = {cell for one in self.live for cell in range(one.begin, one.end, CELL)}
        capacity = self.num_cells * CELL
        in_the_way = {
            cell for last in range(grant.begin, grant.end, CELL) for cell in range(last - capacity, -1, -capacity) if cell in held
        }
        expected = max(in_the_way) + CELL - 1 if in_the_way else None
        assert self.ring.blocker_of(grant) == expected, grant

    def teardown(self) -> None:
        if not hasattr(self, "ring"):
            return
        for grant in self.live:
            self.ring.release(grant)
        self.ring.check_invariants()
        assert self.ring.position == self.ring.head
        assert self.ring.live_bytes == 0
        self.view.update(self.ring.watermark())
        assert all(self.view.is_released(grant) for grant in self.oracle.released)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(stateful_step_count=50)
