"""Staging memory: how it is divided, and which session's piece may take a place in it."""

from __future__ import annotations

from bisect import insort

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.protocol.machines import CELL, SLOT, SenderHand, cells, count_lines, messages, of_type
from transfer.chunk import ChunkPlan
from transfer.errors import LocalProtocolError
from transfer.messages import GrantRequest, WriterDrained
from transfer.send import events as tx
from transfer.send import staging_arena
from transfer.send.staging_arena import StagingArena, aligned

KIB = 1024
LONG = ChunkPlan(chunk_tokens=128)  # pieces of up to 16 KiB: four slots of the smallest size
LONG_BYTES = 128 * 128


def take(arena: StagingArena, session: int, num_bytes: int, *, may_open: bool = True, may_refill: bool = True) -> int | None:
    begin = arena.take(session, num_bytes, may_open=may_open, may_refill=may_refill)
    arena.check_invariants()
    return begin


def release(arena: StagingArena, *begins: int) -> None:
    for begin in begins:
        arena.release(begin)
        arena.check_invariants()


@pytest.mark.parametrize(("pieces", "num_slots"), [(1, 4), (2, 8), (3, 12)])
def test_there_are_as_many_slots_as_pieces_of_the_plan_fit(pieces: int, num_slots: int) -> None:
    """Three pieces instead of one, and four slots for all of them: 4 slots of 3.8 ms made 950 us for each piece."""
    arena = StagingArena(4 * 96 * KIB, 96 * KIB)
    arena.divide(96 * KIB // pieces)
    assert arena.num_slots == arena.num_free == num_slots
    begins = [take(arena, 1, 96 * KIB // pieces) for _ in range(num_slots + 1)]
    assert begins == [*range(0, arena.num_bytes, 96 * KIB // pieces), None]


def test_small_pieces_of_a_session_share_a_slot() -> None:
    """A request of 64 tokens held a slot that was made for 4,096: with four slots, four of them were under way."""
    arena = StagingArena(64 * KIB, 32 * KIB)
    assert [take(arena, 1, 5 * KIB) for _ in range(4)] == [0, 8 * KIB, 16 * KIB, 24 * KIB]
    assert arena.num_free == 1
    assert take(arena, 1, 5 * KIB, may_open=False) is None
    assert take(arena, 2, 5 * KIB, may_open=False) is None
    assert take(arena, 2, 5 * KIB) == 32 * KIB


def test_a_gap_between_two_places_is_used_again() -> None:
    arena = StagingArena(32 * KIB, 32 * KIB)
    first, second, third = (take(arena, 1, size * KIB) for size in (4, 8, 4))
    assert (first, second, third) == (0, 4 * KIB, 12 * KIB)
    release(arena, 4 * KIB)
    assert [take(arena, 1, 4 * KIB) for _ in range(3)] == [4 * KIB, 8 * KIB, 16 * KIB]


def test_a_slot_that_released_a_piece_can_be_left_to_drain() -> None:
    """Otherwise a session that always has a piece keeps its slot for ever, and a session without one waits for ever."""
    arena = StagingArena(32 * KIB, 32 * KIB)
    take(arena, 1, 4 * KIB)
    assert take(arena, 1, 4 * KIB, may_refill=False) == 4 * KIB
    release(arena, 0)
    assert take(arena, 1, 4 * KIB, may_refill=False) is None
    arena.divide(32 * KIB)  # the size is the same: nothing changes
    assert take(arena, 1, 4 * KIB, may_refill=False) is None
    release(arena, 4 * KIB)
    assert take(arena, 1, 4 * KIB, may_open=False) is None  # the slot is free, and of no session
    assert take(arena, 2, 32 * KIB, may_refill=False) == 0


def test_places_stay_where_they_are_when_slots_become_larger() -> None:
    arena = StagingArena(96 * KIB, 16 * KIB)
    assert [take(arena, session, 16 * KIB) for session in (1, 2, 2, 3, 1, 4)] == [16 * KIB * slot for slot in range(6)]
    arena.divide(40 * KIB)  # two slots, and 16 KiB behind them in none
    assert (arena.num_slots, arena.num_free) == (2, 0)
    release(arena, 0)
    assert take(arena, 2, 4 * KIB, may_open=False) == 0  # session 2 alone reaches into the first slot
    assert take(arena, 3, 4 * KIB, may_open=False) is None  # sessions 1, 2 and 3 reach into the second one
    release(arena, 48 * KIB, 64 * KIB, 80 * KIB)
    assert not arena.has_one(4) and arena.num_free == 0
    release(arena, 32 * KIB)
    assert take(arena, 5, 40 * KIB) == 40 * KIB
    assert arena.num_free == 0 and arena.has_one(2)


def test_a_slot_is_no_larger_than_the_memory() -> None:
    arena = StagingArena(5000, 5000)
    assert (arena.num_slots, arena.slot_bytes, take(arena, 1, 5000)) == (1, 5000, 0)


def test_a_slot_drains_across_a_change_of_the_size_of_slots() -> None:
    """Each join changed the size, and the draining slot took pieces again: the session that waits for it waited on."""
    arena = StagingArena(96 * KIB, 32 * KIB)
    assert [take(arena, 1, 4 * KIB) for _ in range(10)] == [4 * KIB * number for number in range(10)]
    release(arena, 0)
    for size in (16 * KIB, 8 * KIB, 32 * KIB):
        arena.divide(size)
        arena.check_invariants()
    assert take(arena, 1, 4 * KIB, may_open=False, may_refill=False) == 40 * KIB, "nothing was released from the second slot"
    release(arena, *(4 * KIB * number for number in range(1, 8)))
    assert take(arena, 1, 24 * KIB) == 0, "the first slot is free, so it can be filled again"
    assert take(arena, 1, 4 * KIB, may_refill=False) == 24 * KIB
    arena.divide(16 * KIB)
    arena.divide(32 * KIB)
    assert take(arena, 1, 4 * KIB, may_open=False, may_refill=False) == 28 * KIB


def test_a_slot_drains_whose_place_was_behind_the_last_slot_for_a_time() -> None:
    arena = StagingArena(96 * KIB, 32 * KIB)
    assert [take(arena, session, size * KIB) for session, size in ((1, 32), (2, 32), (3, 4), (3, 4))] == [0, 32768, 65536, 69632]
    release(arena, 64 * KIB)
    arena.divide(64 * KIB)
    arena.divide(32 * KIB)
    assert take(arena, 3, 4 * KIB, may_refill=False) is None
    assert take(arena, 3, 4 * KIB) == 64 * KIB


def test_a_piece_larger_than_a_slot_is_an_error() -> None:
    """It got a place over the next slot, and overwrote the piece of another session."""
    arena = StagingArena(12288, 4096)
    with pytest.raises(LocalProtocolError, match="a piece has 4097 bytes; a staging slot has 4096"):
        take(arena, 1, 4097)
    assert not arena.has_one(1) and arena.num_free == 3


def test_places_that_overlap_or_leave_the_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = StagingArena(8192, 8192)
    take(arena, 1, 4096)
    with monkeypatch.context() as broken:
        broken.setattr(staging_arena, "aligned", lambda end: end - 1)
        with pytest.raises(LocalProtocolError, match="overlaps another"):
            take(arena, 1, 4096)
    arena = StagingArena(8192, 4096)
    take(arena, 1, 4096)
    arena.num_bytes = 4095
    with pytest.raises(LocalProtocolError, match="leaves 4095 bytes"):
        arena.check_invariants()


def test_slots_that_do_not_know_their_places_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = StagingArena(8192, 4096)
    with monkeypatch.context() as broken:
        broken.setattr(staging_arena, "insort", lambda places, place: None)
        with pytest.raises(LocalProtocolError, match="staging slots and the places that reach into them differ"):
            take(arena, 1, 4096)
    arena = StagingArena(8192, 4096)
    take(arena, 1, 4096)
    with monkeypatch.context() as broken:
        broken.setattr(staging_arena, "heappush", lambda free, number: None)
        with pytest.raises(LocalProtocolError, match=r"staging slots \[1\] are not those without a place"):
            release(arena, 0)
    arena = StagingArena(8192, 8192)
    with monkeypatch.context() as broken:
        broken.setattr(staging_arena, "insort", lambda entries, entry: isinstance(entry, tuple) or insort(entries, entry))
        with pytest.raises(LocalProtocolError, match=r"staging slots with room are \[\(4096, 0\)\]"):
            take(arena, 1, 4096)


class Arena(RuleBasedStateMachine):
    """Sessions that take and release places in any order, while the size of slots changes."""

    @initialize(num_slots=st.integers(1, 6), slot=st.integers(1, 64 * KIB))
    def begin(self, num_slots: int, slot: int) -> None:
        self.most = slot
        self.arena = StagingArena(num_slots * aligned(slot), slot)
        self.num_slots = num_slots
        self.places: dict[int, tuple[int, int]] = {}  # begin -> (bytes, session)

    @rule(session=st.integers(1, 4), part=st.floats(0, 1), may_open=st.booleans(), may_refill=st.booleans())
    def take(self, session: int, part: float, may_open: bool, may_refill: bool) -> None:
        num_bytes = max(1, int(part * min(self.most, self.arena.slot_bytes)))
        num_free, largest = self.arena.num_free, num_bytes <= self.arena.slot_bytes
        begin = self.arena.take(session, num_bytes, may_open=may_open, may_refill=may_refill)
        # Memory is not fragmented: every free slot has room for any piece.
        assert begin is not None or not (may_open and num_free and largest)
        if begin is None:
            return
        assert begin % SLOT == 0 and begin + num_bytes <= self.arena.num_bytes
        assert all(begin + num_bytes <= other or other + size <= begin for other, (size, _) in self.places.items())
        self.places[begin] = num_bytes, session

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        begin = data.draw(st.sampled_from(sorted(self.places)))
        del self.places[begin]
        self.arena.release(begin)

    @rule(part=st.floats(0.01, 1))
    def divide(self, part: float) -> None:
        self.arena.divide(max(1, int(part * self.most)))
        assert self.arena.num_slots >= self.num_slots

    @invariant()
    def holds(self) -> None:
        self.arena.check_invariants()
        assert self.arena.begins() == sorted(self.places)
        assert all(self.arena.has_one(session) == any(s == session for _, s in self.places.values()) for session in range(1, 5))
        if not self.places:
            assert self.arena.num_free == self.arena.num_slots

    def teardown(self) -> None:
        for begin in list(getattr(self, "places", ())):
            self.arena.release(begin)
            self.arena.check_invariants()


TestArena = Arena.TestCase
TestArena.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# The sender's rules


def gathers(actions: list[tx.Action]) -> list[tx.StartGather]:
    return of_type(actions, tx.StartGather)


def test_the_plan_of_requests_decides_how_many_pieces_are_staged() -> None:
    """Memory for one piece of 128 tokens holds those of four chunks of 4 tokens, each in a slot of the smallest size."""
    sender = SenderHand(num_slots=1, slot_bytes=LONG_BYTES)
    assert sender.machine.num_slots == 1
    sender.start(num_tokens=16)
    assert sender.machine.num_slots == 4
    sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(4)})
    assert [gather.place for chunk in range(4) for gather in gathers(sender.compute(chunk))] == [n * SLOT for n in range(4)]
    assert sender.machine.num_slots_used == 4


@pytest.mark.parametrize("plan", [ChunkPlan(chunk_tokens=4), ChunkPlan(chunk_tokens=36)], ids=["full", "with a gap"])
def test_the_work_of_an_event_does_not_grow_with_the_slots_of_its_session(plan: ChunkPlan) -> None:
    """Each piece searched all slots of its session, full ones too: 1.5 ms for an event of a session with 4,096."""
    assert lines_with_held_slots(plan, 128) == lines_with_held_slots(plan, 8)


def lines_with_held_slots(plan: ChunkPlan, num_slots: int) -> int:
    """Return the lines of the arena that the last piece runs, of a session that holds `num_slots` slots."""
    size = 128 * plan.chunk_tokens
    sender = SenderHand(
        num_slots=num_slots + 2, slot_bytes=aligned(size), ring_cells=size // CELL * (num_slots + 1), grants_ahead=1024
    )
    sender.start(num_tokens=plan.chunk_tokens * (num_slots + 1), plan=plan)
    num_cells = size // CELL
    sender.grant({chunk: cells(num_cells * chunk, num_cells * (chunk + 1)) for chunk in range(num_slots + 1)})
    for chunk in range(num_slots):
        assert gathers(sender.compute(chunk))
    counts = count_lines(sender.machine, "staging_arena.py")
    assert gathers(sender.compute(num_slots)) and sender.machine.num_slots_used == num_slots + 1
    return counts[0]


def test_short_requests_share_a_slot_of_a_long_plan() -> None:
    sender = SenderHand(num_slots=1, slot_bytes=LONG_BYTES)
    for number in range(4):
        sender.start(str(number), num_tokens=4, plan=LONG)
        sender.grant({0: cells(2 * number, 2 * number + 2)}, str(number))
    assert [gather.place for number in range(4) for gather in gathers(sender.compute(0, str(number)))] == [
        0,
        SLOT,
        2 * SLOT,
        3 * SLOT,
    ]
    assert (sender.machine.num_slots, sender.machine.num_slots_used) == (1, 1)


def test_the_invariants_of_a_sender_are_those_of_its_staging_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = SenderHand()
    sender.to_writing()
    monkeypatch.setattr(staging_arena, "heappush", lambda free, number: None)
    with pytest.raises(LocalProtocolError, match="are not those without a place"):
        sender.written(0)


def test_slots_become_larger_again_when_the_session_with_the_larger_pieces_is_lost() -> None:
    sender = SenderHand(decode_tp=2, num_slots=2, slot_bytes=LONG_BYTES)
    both = sender.routes
    sender.routes = both[:1]
    sender.start("short", num_tokens=4)
    assert sender.machine.num_slots == 8
    sender.routes = both[1:]
    sender.start("long", num_tokens=4, plan=LONG)
    assert sender.machine.num_slots == 4
    sender.tell(tx.SenderSessionLost(session=2, reason="lost"))
    assert sender.machine.num_slots == 8


def test_a_request_whose_pieces_fit_no_slot_fails_at_once() -> None:
    """It would wait for staging memory for ever."""
    sender = SenderHand(num_slots=2, slot_bytes=SLOT)
    actions = sender.start(num_tokens=4, plan=LONG)
    (failed,) = of_type(actions, tx.OutgoingFailed)
    assert failed.reason == "its pieces have up to 16384 bytes; a staging slot of this rank has room for 4096"
    assert messages(actions, WriterDrained) and not messages(actions, GrantRequest)
    assert sender.machine.is_idle


def test_no_piece_overtakes_a_larger_one_of_its_session() -> None:
    """The larger one could wait for ever, while smaller ones take each place that becomes free."""
    sender = SenderHand(num_slots=1, slot_bytes=LONG_BYTES, ring_cells=200)
    sender.start("a", num_tokens=8, plan=LONG)
    sender.grant({0: cells(0, 4)}, "a")
    (small,) = gathers(sender.compute(0, "a"))
    sender.start("whole", num_tokens=128, plan=LONG)
    sender.grant({0: cells(4, 68)}, "whole")
    assert not gathers(sender.compute(0, "whole"))
    sender.start("b", num_tokens=8, plan=LONG)
    sender.grant({0: cells(68, 72)}, "b")
    assert not gathers(sender.compute(0, "b"))
    (whole,) = gathers(sender.finish(small.place))
    assert whole.piece.request_id == "whole" and whole.place == 0
    assert [gather.piece.request_id for gather in gathers(sender.finish(whole.place))] == ["b"]


def test_a_session_that_always_has_a_piece_leaves_its_slot_to_one_that_waits() -> None:
    """Small pieces could keep a slot occupied for ever: each begins before the one before it is written."""
    sender = SenderHand(decode_tp=2, num_slots=1, slot_bytes=LONG_BYTES, ring_cells=64)
    both, plan = sender.routes, ChunkPlan(chunk_tokens=256)  # its pieces have as many bytes on one of two routes
    sender.routes = both[:1]
    for number in range(4):
        sender.start(str(number), num_tokens=4, plan=plan)
    sender.routes = both
    for number in range(2):
        sender.grant({0: cells(number, number + 1)}, str(number), route=both[0].index)
    begun = [gather for number in range(4) for gather in gathers(sender.compute(0, str(number)))]
    assert [gather.place for gather in begun] == [0, SLOT]
    sender.routes = both[1:]
    sender.start("other", num_tokens=4, plan=plan)
    sender.routes = both
    sender.compute(0, "other")
    sender.grant({0: cells(0, 1)}, "other", route=both[1].index)
    # No piece has left the slot: it may still be filled.
    (third,) = gathers(sender.grant({0: cells(2, 3)}, "2", route=both[0].index))
    assert not gathers(sender.finish(begun[0].place))
    assert not gathers(sender.grant({0: cells(3, 4)}, "3", route=both[0].index))
    assert not gathers(sender.finish(begun[1].place))
    (other,) = gathers(sender.finish(third.place))
    assert other.piece.request_id == "other"
    assert [gather.piece.request_id for gather in gathers(sender.finish(other.place))] == ["3"]


def test_sessions_that_found_no_slot_begin_all_that_waits_in_the_order_in_which_they_came() -> None:
    sender = SenderHand(decode_tp=4, num_slots=1, slot_bytes=LONG_BYTES // 2, ring_cells=64)
    every, plan = sender.routes, ChunkPlan(chunk_tokens=256)
    for name, route in (("first", 0), ("a", 2), ("b", 1), ("c", 2)):
        sender.routes = every[route : route + 1]
        sender.start(name, num_tokens=4, plan=plan)
    sender.routes = every
    (begun,) = gathers([*sender.grant({0: cells(0, 1)}, "first", route=every[0].index), *sender.compute(0, "first")])
    for name, route, place in (("a", 2, 0), ("b", 1, 0), ("c", 2, 1)):
        assert not gathers(sender.compute(0, name))
        assert not gathers(sender.grant({0: cells(place, place + 1)}, name, route=every[route].index))
    a, c = gathers(sender.finish(begun.place))
    assert (a.piece.request_id, c.piece.request_id) == ("a", "c")
    assert not gathers(sender.finish(a.place))
    (last,) = gathers(sender.finish(c.place))
    assert last.piece.request_id == "b"


def test_sessions_that_wait_for_a_slot_cost_an_event_nothing() -> None:
    assert lines_of_an_event(num_waiting=1) == lines_of_an_event(num_waiting=3)


def lines_of_an_event(num_waiting: int) -> int:
    """Return the lines of the sender that an event runs which concerns no session, while sessions wait for the only slot."""
    sender = SenderHand(decode_tp=4, num_slots=1, slot_bytes=LONG_BYTES // 2, ring_cells=64)
    every = sender.routes
    for route in every[: 1 + num_waiting]:
        sender.routes, name = [route], str(route.index)
        sender.start(name, num_tokens=4, plan=ChunkPlan(chunk_tokens=256))
        sender.compute(0, name)
        begun = gathers(sender.grant({0: cells(0, 1)}, name, route=route.index))
        assert bool(begun) == (route is every[0])
    counts = count_lines(sender.machine, "send/sender.py")
    assert not gathers(sender.abort("unknown"))
    return counts[0]


def test_sessions_that_have_places_take_turns_for_a_free_slot() -> None:
    sender = SenderHand(decode_tp=2, num_slots=3, ring_cells=64)
    both = sender.routes
    begun: dict[str, int] = {}

    def ready(name: str, route: int, place: int) -> None:
        sender.routes = both[route : route + 1]
        sender.start(name, num_tokens=4)
        sender.routes = both
        sender.compute(0, name)
        actions = sender.grant({0: cells(place, place + 1)}, name, route=both[route].index)
        begun.update({gather.piece.request_id: gather.place for gather in gathers(actions)})

    for name, route, place in (("a0", 0, 0), ("a1", 0, 1), ("b0", 1, 0), ("a2", 0, 2), ("a3", 0, 3), ("b1", 1, 1)):
        ready(name, route, place)
    assert list(begun) == ["a0", "a1", "b0"]
    for over, then in (("a0", "a2"), ("a1", "b1")):
        (gather,) = gathers(sender.finish(begun[over]))
        assert gather.piece.request_id == then
