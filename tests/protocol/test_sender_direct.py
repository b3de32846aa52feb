"""The sender's rules of direct sessions: gathers store into the peer's ring."""

from __future__ import annotations

import pytest

from tests.protocol.machines import CELL, SLOT, SenderHand, cells, declined, drops, messages, of_type
from transfer.messages import ChunkReady, WriterDrained
from transfer.send import events as tx
from transfer.send import sender as sender_module

DIRECT = frozenset({1})
DIRECT_0 = 2 * SLOT  # place of the first direct piece: behind the staging memory


def test_a_direct_gather_is_the_write() -> None:
    sender = SenderHand(direct=DIRECT)
    sender.start(num_tokens=4)
    sender.now_s = 2.0
    sender.grant({0: cells(3, 5)})
    (gather,) = of_type(sender.compute(0), tx.StartGather)
    assert (gather.piece.session, gather.piece.grant, gather.piece.num_bytes) == (1, cells(3, 5), 512)
    sender.now_s = 5.0
    actions = sender.gathered(gather.place)
    assert not of_type(actions, tx.StartWrite)
    (ready,) = messages(actions, ChunkReady)
    assert (ready.begin, ready.num_bytes, ready.digest, ready.attempt) == (3 * CELL, 512, 100 + gather.place, 0)
    assert not of_type(actions, tx.SourceReleased)
    sender.now_s = 6.0
    actions = sender.watermark(5 * CELL)
    assert [type(action) for action in actions] == [tx.PieceReleased, tx.SourceReleased, tx.OutgoingSent]
    (released,), (sent,) = of_type(actions, tx.PieceReleased), of_type(actions, tx.OutgoingSent)
    assert released.ack_s == 1.0
    assert (sent.stats.num_bytes, sent.stats.writes, sent.stats.resends, sent.stats.transfer_s) == (512, 1, 0, 4.0)
    assert sender.machine.is_idle


def test_the_pages_are_kept_until_every_session_of_a_request_has_released() -> None:
    sender = SenderHand(decode_tp=2, direct=frozenset({2}))
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 1)}, route=0)
    sender.grant({0: cells(0, 1)}, route=1)
    gathers = of_type(sender.compute(0), tx.StartGather)
    slot_of = {gather.piece.session: gather.place for gather in gathers}
    assert messages(sender.gathered(slot_of[2]), ChunkReady)
    actions = sender.gathered(slot_of[1])
    assert [write.piece.session for write in of_type(actions, tx.StartWrite)] == [1]
    assert not of_type(actions, tx.SourceReleased)
    sender.written(slot_of[1])
    assert not of_type(sender.watermark(CELL, session=2), tx.SourceReleased)
    actions = sender.watermark(CELL, session=1)
    assert of_type(actions, tx.SourceReleased)
    assert of_type(actions, tx.OutgoingSent)


def test_a_rejected_direct_chunk_is_gathered_again() -> None:
    sender = SenderHand(direct=DIRECT)
    event = object()
    sender.start(num_tokens=4)
    sender.compute(0, event=event)
    (first,) = of_type(sender.grant({0: cells(0, 2)}), tx.StartGather)
    sender.gathered(first.place)
    sender.now_s = 4.0
    actions = sender.reject(0)
    (again,) = of_type(actions, tx.StartGather)
    assert (again.piece.grant, again.event, again.credit_wait_s) == (first.piece.grant, event, 0.0)
    assert not of_type(actions, tx.StartWrite)
    assert sender.reject(0) == []  # said twice
    assert sender.tell(tx.Tick()) == []  # it is not said to be ready while its bytes change
    (ready,) = messages(sender.tell(tx.GatherFinished(place=again.place, digest=7)), ChunkReady)
    assert (ready.attempt, ready.digest) == (1, 7)
    assert drops(sender.reject(0, attempt=1)) == ["too_many_attempts"]
    actions = sender.watermark(2 * CELL)
    assert of_type(actions, tx.SourceReleased)
    (sent,) = of_type(actions, tx.OutgoingSent)
    assert (sent.stats.resends, sent.stats.writes, sent.stats.num_bytes) == (1, 2, 1024)
    assert sender.machine.is_idle


def test_the_ring_alone_bounds_what_a_direct_session_has_under_way() -> None:
    """With a slot each, four pieces at a time took longer to come back than the link took to carry them."""
    sender = SenderHand(direct=DIRECT, num_slots=1, grants_ahead=8, ring_cells=8)
    sender.start(num_tokens=20)
    sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(5)})
    begun = [of_type(sender.compute(chunk), tx.StartGather) for chunk in range(5)]
    assert [len(gathers) for gathers in begun] == [1, 1, 1, 1, 0]
    assert len({gathers[0].place for gathers in begun[:4]}) == 4 and sender.machine.num_slots_used == 0
    sender.machine.check_invariants()
    sender.gathered(begun[0][0].place)
    assert [gather.piece.chunk.index for gather in of_type(sender.watermark(2 * CELL), tx.StartGather)] == [4]


def test_no_more_gathers_of_a_direct_session_are_queued_than_a_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch into a full queue would wait, and the rank with it."""
    monkeypatch.setattr(sender_module, "MAX_DIRECT_GATHERS", 2)
    sender = SenderHand(direct=DIRECT, grants_ahead=8, ring_cells=16)
    sender.start(num_tokens=16)
    sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(4)})
    begun = [gather for chunk in range(4) for gather in of_type(sender.compute(chunk), tx.StartGather)]
    assert [gather.piece.chunk.index for gather in begun] == [0, 1]
    actions = sender.gathered(begun[0].place)
    assert [gather.piece.chunk.index for gather in of_type(actions, tx.StartGather)] == [2]
    assert not of_type(sender.reject(0), tx.StartGather)  # a second attempt waits, too, and goes first: its bytes are the oldest
    again = of_type(sender.gathered(begun[1].place), tx.StartGather)
    assert [gather.piece.chunk.index for gather in again] == [0]
    assert [gather.piece.chunk.index for gather in of_type(sender.gathered(again[0].place), tx.StartGather)] == [3]


def test_a_failed_request_waits_for_its_direct_gather_and_declines_nothing_of_it() -> None:
    """The bytes lie in the grant: its key is spent, and a decline beside it would be a second answer to one question."""
    sender = SenderHand(direct=DIRECT)
    sender.to_gathering()
    actions = sender.abort()
    assert not messages(actions, WriterDrained)
    assert not of_type(actions, tx.SourceReleased)
    actions = sender.gathered(DIRECT_0)
    assert declined(actions) == [] and not messages(actions, ChunkReady)
    assert len(of_type(actions, tx.SourceReleased)) == 1
    assert messages(actions, WriterDrained)
    assert [failed.reason for failed in of_type(actions, tx.OutgoingFailed)] == ["cancelled"]
    assert sender.machine.is_idle
    assert declined(sender.grant({0: cells(0, 2)})) == []  # the grant, said again
    sender.watermark(2 * CELL)
    assert not sender.machine.num_spent_keys


@pytest.mark.parametrize("is_second", [False, True], ids=["first gather", "second gather"])
def test_a_direct_gather_in_flight_survives_its_session_and_keeps_the_pages(is_second: bool) -> None:
    sender, place = SenderHand(direct=DIRECT), DIRECT_0
    sender.to_gathering()
    if is_second:
        sender.gathered(DIRECT_0)
        (again,) = of_type(sender.reject(0), tx.StartGather)
        place = again.place
    actions = sender.tell(tx.SenderSessionLost(session=1, reason="peer died"))
    assert actions == [] and sender.machine.num_slots_used == 0 and not sender.machine.is_idle
    actions = sender.gathered(place)
    assert [type(action) for action in actions] == [tx.SourceReleased, tx.OutgoingFailed]
    assert sender.machine.is_idle


def test_a_signalled_gather_needs_no_message_unless_no_release_comes() -> None:
    sender = SenderHand(direct=DIRECT)
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 2)})
    sender.compute(0)
    assert not messages(sender.tell(tx.GatherFinished(place=DIRECT_0, digest=9, is_signalled=True)), ChunkReady)
    assert not messages(sender.tell(tx.Tick(), now_s=0.9), ChunkReady)
    (ready,) = messages(sender.tell(tx.Tick(), now_s=1.0), ChunkReady)
    assert (ready.begin, ready.digest, ready.attempt) == (0, 9, 0)
    assert of_type(sender.watermark(2 * CELL), tx.OutgoingSent)


def test_a_release_can_come_before_the_host_hears_of_its_gather() -> None:
    """The peer has scattered at the signal. The pages are kept, and the request goes on, until the gather is reported."""
    sender = SenderHand(direct=DIRECT)
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 2)})
    sender.compute(0)
    assert not sender.watermark(2 * CELL)
    actions = sender.tell(tx.GatherFinished(place=DIRECT_0, digest=9, is_signalled=True))
    assert [type(action) for action in actions] == [tx.PieceReleased, tx.SourceReleased, tx.OutgoingSent]
    assert sender.machine.is_idle
