"""The sender alone: what late, lost and repeated news may not do to it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.protocol.machines import (
    CELL,
    DECODE_LIFE,
    PREFILL_LIFE,
    SLOT,
    SenderHand,
    cells,
    count_lines,
    declined,
    drops,
    messages,
    of_type,
)
from transfer.errors import ConfigError, LocalProtocolError
from transfer.messages import AbortTransfer, ChunkReady, GrantRequest, WriterDrained
from transfer.ring import Grant, RingView, Watermark, grant_key
from transfer.send import events as tx
from transfer.send import sender as sender_module
from transfer.send.staging_arena import StagingArena
from transfer.send.state import SenderPiece, SenderStage, SessionState


def test_a_request_goes_from_start_to_sent() -> None:
    sender = SenderHand()
    assert sender.machine.sessions_in_use == set()
    (asked,) = messages(sender.start(num_tokens=4), GrantRequest)
    assert sender.machine.sessions_in_use == {1}
    assert (asked.incarnation, asked.request_id, asked.route) == (PREFILL_LIFE, "r", 0)
    sender.grant({0: cells(0, 2)})
    (gather,) = of_type(sender.compute(0), tx.StartGather)
    actions = sender.gathered(gather.place)
    (write,) = of_type(actions, tx.StartWrite)
    assert not of_type(actions, tx.SourceReleased)
    assert (write.place, write.piece.grant, write.piece.num_bytes, write.key) == (gather.place, cells(0, 2), 512, grant_key(0, 0))
    (ready,) = messages(sender.written(write.place), ChunkReady)
    assert (ready.begin, ready.num_bytes, ready.digest, ready.attempt) == (0, 512, 100, 0)
    actions = sender.watermark(2 * CELL)
    assert [type(action) for action in actions] == [tx.PieceReleased, tx.SourceReleased, tx.OutgoingSent]
    (sent,) = of_type(actions, tx.OutgoingSent)
    assert (sent.stats.num_bytes, sent.stats.writes, sent.stats.writes_without_staging, sent.stats.resends) == (512, 1, 16, 0)
    assert sender.machine.is_idle and sender.machine.sessions_in_use == set()


def test_the_times_of_a_transfer() -> None:
    sender = SenderHand()
    sender.start(num_tokens=4)
    sender.now_s = 1.0
    sender.compute(0)
    sender.now_s = 3.0
    (gather,) = of_type(sender.grant({0: cells(0, 2)}), tx.StartGather)
    assert gather.credit_wait_s == 0.0
    sender.finish(0)
    sender.now_s = 8.0
    (sent,) = of_type(sender.watermark(2 * CELL), tx.OutgoingSent)
    assert (sent.stats.transfer_s, sent.stats.exposed_s) == (5.0, 5.0)


def test_what_is_sent_while_the_rest_is_computed_is_not_exposed() -> None:
    sender = SenderHand()
    sender.start(num_tokens=8)
    sender.grant({0: cells(0, 2), 1: cells(2, 4)})
    for chunk, now_s in ((0, 1.0), (1, 6.0)):
        sender.now_s = now_s
        sender.compute(chunk)
        sender.finish(0)
    sender.now_s = 8.0
    (sent,) = of_type(sender.watermark(4 * CELL), tx.OutgoingSent)
    assert (sent.stats.transfer_s, sent.stats.exposed_s) == (7.0, 2.0)


def test_credit_wait_is_the_time_between_ready_and_writable() -> None:
    sender = SenderHand(ring_cells=2)
    sender.start(num_tokens=4)
    sender.grant({0: cells(2, 4)})
    sender.now_s = 2.0
    sender.compute(0)
    sender.now_s = 7.0
    (gather,) = of_type(sender.watermark(2 * CELL), tx.StartGather)
    assert gather.credit_wait_s == 5.0


def test_grants_are_asked_for_within_the_window() -> None:
    sender = SenderHand(grants_ahead=2, num_slots=4)
    (first,) = messages(sender.start(num_tokens=16), GrantRequest)
    assert [chunk.chunk for chunk in first.chunks] == [0, 1]
    assert not messages(sender.grant({0: cells(0, 2), 1: cells(2, 4)}), GrantRequest)
    for chunk in (0, 1):
        sender.compute(chunk)
        assert not messages(sender.finish(0), GrantRequest)
    (next_one,) = messages(sender.watermark(2 * CELL), GrantRequest)
    assert [chunk.chunk for chunk in next_one.chunks] == [2]


def test_unanswered_messages_are_repeated() -> None:
    sender = SenderHand()
    sender.start(num_tokens=8)
    assert not messages(sender.tell(tx.Tick(), now_s=0.9), GrantRequest)
    (again,) = messages(sender.tell(tx.Tick(), now_s=1.0), GrantRequest)
    assert [chunk.chunk for chunk in again.chunks] == [0, 1]
    assert not messages(sender.tell(tx.Tick(), now_s=1.9), GrantRequest)
    sender.grant({0: cells(0, 2)})
    sender.compute(0)
    sender.finish(0)
    assert not messages(sender.tell(tx.Tick(), now_s=2.8), ChunkReady)
    actions = sender.tell(tx.Tick(), now_s=2.9)
    assert [ready.chunk for ready in messages(actions, ChunkReady)] == [0]
    assert not messages(sender.tell(tx.Tick(), now_s=3.0), ChunkReady)
    sender.watermark(2 * CELL)
    assert not messages(sender.tell(tx.Tick(), now_s=9.0), ChunkReady)


def test_a_watermark_of_another_life_releases_nothing() -> None:
    sender = SenderHand()
    sender.to_written()
    other = Watermark(incarnation=DECODE_LIFE + 1, sequence=9, position=2 * CELL, released=(cells(4, 6),))
    assert sender.tell(tx.WatermarkArrived(session=1, watermark=other)) == []
    assert of_type(sender.watermark(2 * CELL), tx.OutgoingSent)


def test_a_release_heard_before_the_write_is_done_still_counts() -> None:
    sender = SenderHand()
    sender.to_writing()
    sender.watermark(2 * CELL)
    assert of_type(sender.written(0), tx.OutgoingSent)
    assert sender.tell(tx.Tick(), now_s=600.0) == []


def test_a_place_is_free_when_the_write_ends() -> None:
    """A place that was kept until the release spent half of its time on waiting for the peer."""
    sender = SenderHand(num_slots=1)
    sender.to_writing(num_tokens=8)
    sender.compute(1)
    assert not of_type(sender.grant({1: cells(2, 4)}), tx.StartGather)
    (gather,) = of_type(sender.written(0), tx.StartGather)
    assert (gather.piece.chunk.index, gather.place) == (1, 0)
    sender.finish(0)
    assert sender.machine.num_slots_used == 0
    assert of_type(sender.watermark(4 * CELL), tx.OutgoingSent)


def test_a_rejected_chunk_is_gathered_again() -> None:
    sender = SenderHand()
    event = object()
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 2)})
    sender.compute(0, event=event)
    sender.finish(0)
    sender.now_s = 4.0
    actions = sender.reject(0)
    (gather,) = of_type(actions, tx.StartGather)
    assert (gather.place, gather.event, gather.credit_wait_s) == (0, event, 0.0)
    assert not of_type(actions, tx.StartWrite)
    assert sender.reject(0) == []  # repeated
    assert sender.tell(tx.Tick()) == []
    (write,) = of_type(sender.gathered(0), tx.StartWrite)
    assert (write.place, write.key) == (0, grant_key(0, 1))
    assert sender.reject(0) == []
    (ready,) = messages(sender.written(0), ChunkReady)
    assert ready.attempt == 1
    actions = sender.watermark(2 * CELL)
    assert of_type(actions, tx.SourceReleased)
    (sent,) = of_type(actions, tx.OutgoingSent)
    assert (sent.stats.resends, sent.stats.writes) == (1, 2)


def rejected_piece_that_waits() -> SenderHand:
    """Return a sender whose piece "r" was rejected, and waits until "other" has left the only place."""
    sender = SenderHand(num_slots=1)
    sender.now_s = 1.0
    sender.to_writing()
    sender.start("other", num_tokens=4)
    sender.compute(0, "other")
    sender.grant({0: cells(2, 4)}, "other")
    (gather,) = of_type(sender.written(0), tx.StartGather)
    assert gather.piece.request_id == "other"
    sender.now_s = 2.0
    assert sender.reject(0) == []
    return sender


def test_a_rejected_chunk_waits_for_a_place_like_any_other() -> None:
    sender = rejected_piece_that_waits()
    assert sender.reject(0) == []
    assert sender.grant({0: cells(0, 2)}) == []
    assert not messages(sender.tell(tx.Tick(), now_s=4.0), ChunkReady)  # its bytes are not those of the next attempt
    sender.gathered(0)
    (gather,) = of_type(sender.written(0), tx.StartGather)
    assert (gather.piece.request_id, gather.piece.attempt, gather.credit_wait_s) == ("r", 1, 2.0)
    (write,) = of_type(sender.gathered(0), tx.StartWrite)
    assert write.key == grant_key(0, 1)
    (ready,) = messages(sender.written(0), ChunkReady)
    assert (ready.request_id, ready.attempt) == ("r", 1)


@pytest.mark.parametrize("stage", [SenderStage.GRANTED, SenderStage.GATHERING, SenderStage.WRITING, SenderStage.WRITTEN])
def test_the_keys_of_a_rejected_chunk_that_is_given_up_are_written_or_declined_once(stage: SenderStage) -> None:
    sender = rejected_piece_that_waits()
    if stage is not SenderStage.GRANTED:
        sender.finish(0)
    if stage in (SenderStage.WRITING, SenderStage.WRITTEN):
        sender.gathered(0)
    if stage is SenderStage.WRITTEN:
        sender.written(0)
    actions = sender.abort()
    assert of_type(actions, tx.WaitGivenUp) == [tx.WaitGivenUp(credit_wait_s=0.0)] * (stage is SenderStage.GRANTED)
    if stage is SenderStage.GATHERING:
        assert not declined(actions)
        actions = sender.gathered(0)
    elif stage is SenderStage.WRITING:
        actions += sender.written(0)
    is_sent = stage in (SenderStage.WRITING, SenderStage.WRITTEN)
    assert declined(actions) == ([] if is_sent else [grant_key(0, 1)])
    assert of_type(actions, tx.OutgoingFailed) and messages(actions, WriterDrained)
    assert sender.machine.num_spent_keys == 2
    late = [*sender.grant({0: cells(0, 2)}), *sender.reject(0), *sender.grant({0: cells(0, 2)}), *sender.reject(0)]
    assert declined(late) == [] and not of_type(late, tx.StartGather)
    sender.watermark(2 * CELL)
    assert not sender.machine.num_spent_keys


def test_a_rejected_chunk_that_waits_is_dropped_with_its_session() -> None:
    sender = rejected_piece_that_waits()
    actions = sender.tell(tx.SenderSessionLost(session=1, reason="peer died"))
    assert not declined(actions)
    assert of_type(actions, tx.WaitGivenUp) == [tx.WaitGivenUp(credit_wait_s=0.0)]
    assert [failed.request_id for failed in of_type(actions, tx.OutgoingFailed)] == ["r"]
    assert [failed.request_id for failed in of_type(sender.gathered(0), tx.OutgoingFailed)] == ["other"]
    assert sender.machine.is_idle and sender.machine.num_slots_used == 0


def test_a_third_attempt_is_refused_for_its_key_would_be_the_next_grants() -> None:
    sender = SenderHand()
    sender.to_written()
    sender.reject(0)
    sender.finish(0)
    (dropped,) = sender.reject(0, attempt=1)
    assert dropped == tx.MessageDropped(session=1, reason="too_many_attempts")
    assert declined(sender.reject(0, attempt=1, request_id="other")) == []


def test_a_failed_request_that_waits_only_for_a_write_ends_with_its_session() -> None:
    sender = SenderHand()
    sender.to_writing()
    assert not of_type(sender.abort(), tx.OutgoingFailed)
    actions = sender.tell(tx.SenderSessionLost(session=1, reason="peer died"))
    assert [failed.reason for failed in of_type(actions, tx.OutgoingFailed)] == ["cancelled"]
    assert sender.machine.is_idle
    assert sender.written(0) == []  # news of a write that ended with its session


def test_a_lost_session_fails_what_uses_it_and_nothing_else() -> None:
    sender = SenderHand(decode_tp=2)
    sender.start("both", num_tokens=4)
    actions = sender.tell(tx.SenderSessionLost(session=2, reason="peer died"))
    assert [failed.reason for failed in of_type(actions, tx.OutgoingFailed)] == ["peer died"]
    assert [send.session for send in of_type(actions, tx.Send)] == [1]  # its other target is told
    assert sender.tell(tx.SenderSessionLost(session=2, reason="again")) == []
    (failed,) = of_type(sender.start("later", num_tokens=4), tx.OutgoingFailed)
    assert failed.reason == "session 0x2 with the decode rank is lost"


def test_a_gather_in_flight_survives_its_session_and_then_frees_its_slot() -> None:
    sender = SenderHand(num_slots=1)
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 2)})
    sender.compute(0)
    actions = sender.tell(tx.SenderSessionLost(session=1, reason="peer died"))
    assert not of_type(actions, tx.OutgoingFailed)
    assert not of_type(actions, tx.SourceReleased)
    assert sender.machine.num_slots_used == 1
    actions = sender.gathered(0)
    assert of_type(actions, tx.SourceReleased)
    assert of_type(actions, tx.OutgoingFailed)
    assert not of_type(actions, tx.Send)
    assert not of_type(actions, tx.Decline)
    assert sender.machine.is_idle


def test_unused_grants_of_a_failed_request_are_declined_once() -> None:
    sender = SenderHand()
    sender.start(num_tokens=8)
    sender.grant({0: cells(0, 2)})
    actions = sender.tell(tx.OutgoingAborted(request_id="r", reason="engine failed"))
    assert declined(actions) == [grant_key(0, 0)]
    actions = sender.grant({0: cells(0, 2), 1: cells(2, 4)})  # the repeated answer, and one that was not heard before
    assert declined(actions) == [grant_key(2 * CELL, 0)]
    assert messages(actions, WriterDrained) and not drops(actions)
    assert declined(sender.grant({0: cells(0, 2), 1: cells(2, 4)})) == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_piece_that_waited_for_credit_until_it_was_given_up_tells_how_long(is_lost: bool) -> None:
    sender = SenderHand()
    sender.start(num_tokens=8)
    sender.grant({0: cells(8, 10)})  # the ring's second round: nothing of the first is released
    sender.tell(tx.ChunkComputed(request_id="r", chunk=0, event=None), now_s=10.0)
    sender.tell(tx.ChunkComputed(request_id="r", chunk=1, event=None), now_s=11.0)  # not granted: it does not wait for credit
    end = (
        tx.SenderSessionLost(session=1, reason="gone")
        if is_lost
        else tx.OutgoingAborted(request_id="r", reason="no room in time")
    )
    assert of_type(sender.tell(end, now_s=40.0), tx.WaitGivenUp) == [tx.WaitGivenUp(credit_wait_s=30.0)]


def test_grants_that_come_while_a_failed_request_drains_are_declined_once() -> None:
    sender = SenderHand()
    sender.to_writing(num_tokens=8)
    sender.abort()
    assert declined(sender.grant({0: cells(0, 2), 1: cells(2, 4)})) == [grant_key(2 * CELL, 0)]
    assert declined(sender.grant({0: cells(0, 2), 1: cells(2, 4)})) == []
    assert of_type(sender.written(0), tx.OutgoingFailed)
    assert declined(sender.grant({0: cells(0, 2), 1: cells(2, 4)})) == []


def test_a_written_grant_is_never_declined_and_its_rejection_is_once() -> None:
    sender = SenderHand()
    sender.to_written()
    sender.tell(tx.OutgoingAborted(request_id="r", reason="engine failed"))
    assert declined(sender.grant({0: cells(0, 2)})) == []
    assert declined(sender.reject(0)) == [grant_key(0, 1)]
    assert declined(sender.reject(0)) == []


def test_a_failed_request_repeats_and_releases_no_written_piece() -> None:
    sender = SenderHand()
    sender.to_written()
    sender.tell(tx.OutgoingAborted(request_id="r", reason="engine failed"))
    assert sender.tell(tx.Tick(), now_s=600.0) == []
    assert sender.watermark(2 * CELL) == []


def test_a_rejection_while_a_failed_request_still_writes_is_declined() -> None:
    sender = SenderHand(num_slots=3)
    sender.start(num_tokens=12)
    sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(3)})
    for chunk in range(3):
        sender.compute(chunk)
        sender.gathered(chunk * SLOT)
    sender.written(0)
    sender.abort()
    sender.written(SLOT)
    assert sender.machine.num_requests == 1  # chunk 2 is still being written
    assert declined(sender.reject(0, chunk=0)) == [grant_key(0, 1)]
    assert declined(sender.reject(2 * CELL, chunk=1)) == [grant_key(2 * CELL, 1)]
    assert of_type(sender.written(2 * SLOT), tx.OutgoingFailed)


def test_a_grant_that_was_not_asked_for_is_not_taken() -> None:
    sender = SenderHand(grants_ahead=1)
    sender.start(num_tokens=8)
    sender.compute(0)
    sender.compute(1)
    (dropped,) = sender.grant({1: cells(2, 4)})  # chunk 1 is beyond the window
    assert dropped == tx.MessageDropped(session=1, reason="unknown_chunk")
    sender.grant({0: cells(0, 2)})
    sender.finish(0)
    (asked,) = messages(sender.watermark(2 * CELL), GrantRequest)
    assert [chunk.chunk for chunk in asked.chunks] == [1]
    assert of_type(sender.grant({1: cells(2, 4)}), tx.StartGather)


def test_a_request_fails_for_the_first_reason() -> None:
    sender = SenderHand()
    sender.to_writing()
    sender.abort()
    assert sender.tell(tx.OutgoingAborted(request_id="r", reason="engine failed")) == []
    (failed,) = of_type(sender.written(0), tx.OutgoingFailed)
    assert failed.reason == "cancelled"


def test_what_was_declined_is_forgotten_when_the_ring_has_it_back() -> None:
    sender = SenderHand()
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 2)})
    sender.tell(tx.OutgoingAborted(request_id="r", reason="engine failed"))
    assert sender.machine.num_spent_keys == 1
    sender.watermark(0, cells(4, 6))
    assert sender.machine.num_spent_keys == 1
    sender.watermark(2 * CELL)
    assert not sender.machine.num_spent_keys


def test_a_late_refusal_does_not_fail_a_request_whose_grants_came() -> None:
    sender = SenderHand()
    sender.to_writing()
    actions = sender.refuse()
    assert drops(actions) == ["nothing_asked"]
    sender.written(0)
    assert of_type(sender.watermark(2 * CELL), tx.OutgoingSent)
    assert sender.refuse() == []


def test_a_grant_that_was_released_already_is_not_taken() -> None:
    sender = SenderHand()
    sender.watermark(4 * CELL)
    sender.start(num_tokens=4)
    assert drops(sender.grant({0: cells(0, 2)})) == ["released_grant"]
    assert not of_type(sender.compute(0), tx.StartGather)
    assert of_type(sender.grant({0: cells(4, 6)}), tx.StartGather)


def test_an_abort_is_answered_also_for_a_request_that_is_unknown() -> None:
    sender = SenderHand()
    (answer,) = messages(sender.abort("nobody"), WriterDrained)
    assert (answer.request_id, answer.route) == ("nobody", 0)
    sender.to_writing()
    assert not messages(sender.abort(), WriterDrained)  # a write is under way
    assert not messages(sender.abort(), WriterDrained)
    assert messages(sender.written(0), WriterDrained)


def test_an_abort_of_one_route_is_answered_when_that_route_is_drained() -> None:
    sender = SenderHand(decode_tp=2)
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 1)})
    sender.compute(0)
    sender.gathered(0)
    actions = sender.abort(route=1, session=2)  # route 0 is still being written
    assert [(send.session, send.message.route) for send in of_type(actions, tx.Send)] == [(2, 1)]
    assert not of_type(actions, tx.OutgoingFailed)
    assert len(messages(sender.written(0), WriterDrained)) == 2
    stranger = AbortTransfer(incarnation=DECODE_LIFE, request_id="r", route=0, reason="not its route")
    sender.start(num_tokens=4)
    assert sender.hear(stranger, session=2) == []
    assert sender.machine.num_requests == 1


def test_slots_are_taken_in_turn_by_the_sessions() -> None:
    sender = SenderHand(decode_tp=2, num_slots=1, ring_cells=8)
    sender.start(num_tokens=16)
    for route in (0, 1):
        sender.grant({chunk: cells(chunk, chunk + 1) for chunk in range(4)}, route=route)
    begun: list[int] = []
    for chunk in range(4):
        begun.extend(gather.piece.route.index for gather in of_type(sender.compute(chunk), tx.StartGather))
    for done in range(1, 8):
        begun.extend(gather.piece.route.index for gather in of_type(sender.finish(0), tx.StartGather))
        assert len(begun) == done + 1
    assert begun == [0, 1] * 4


def test_no_slot_is_kept_for_a_session_whose_grants_were_all_released() -> None:
    sender = SenderHand(decode_tp=2, num_slots=2)
    both = sender.routes
    for request_id, route in zip(("first", "second"), both, strict=True):
        sender.routes = [route]
        sender.start(request_id, num_tokens=8)
        for chunk in range(2):
            sender.compute(chunk, request_id)
    sender.routes = both
    (gather,) = of_type(sender.grant({0: cells(0, 1)}, "second", route=both[1].index), tx.StartGather)
    sender.finish(gather.place)
    sender.watermark(CELL, session=2)
    begun = of_type(sender.grant({0: cells(0, 1), 1: cells(1, 2)}, "first", route=both[0].index), tx.StartGather)
    assert [gather.piece.session for gather in begun] == [1, 1]


def test_the_last_slot_is_kept_also_for_a_session_that_had_one_before() -> None:
    sender = SenderHand(decode_tp=2, num_slots=2)
    sender.start(num_tokens=8)
    sender.compute(0)
    (gather,) = of_type(sender.grant({0: cells(0, 1)}, route=1), tx.StartGather)
    sender.finish(gather.place)
    sender.watermark(CELL, session=2)
    sender.grant({1: cells(1, 2)}, route=1)  # not computed yet
    sender.start("second", num_tokens=4)
    sender.compute(0, "second")
    assert of_type(sender.grant({0: cells(0, 1)}, route=0), tx.StartGather)
    assert not of_type(sender.grant({0: cells(1, 2)}, "second", route=0), tx.StartGather)


def test_a_failed_or_stuck_write_ends_its_session() -> None:
    sender = SenderHand(write_timeout_s=5.0)
    sender.to_writing()
    (close,) = of_type(sender.tell(tx.StagedWriteFailed(place=0, reason="reset")), tx.CloseSession)
    assert (close.session, close.reason) == (1, "reset")
    assert not of_type(sender.tell(tx.Tick(), now_s=5.0), tx.CloseSession)
    (close,) = of_type(sender.tell(tx.Tick(), now_s=5.1), tx.CloseSession)
    assert close.reason == "a write of 512 bytes has been pending for more than 5 s"


def test_a_rank_with_nothing_to_send_is_done_at_once() -> None:
    sender = SenderHand()
    sender.routes = []
    actions = sender.start()
    assert of_type(actions, tx.SourceReleased)
    assert of_type(actions, tx.OutgoingSent)
    assert sender.machine.is_idle


def test_chunks_of_a_failed_request_may_still_be_reported() -> None:
    sender = SenderHand()
    sender.to_writing(num_tokens=8)
    sender.abort()
    assert sender.compute(1) == []
    sender.written(0)
    assert sender.compute(1) == []


def test_the_owner_is_told_when_it_breaks_a_rule() -> None:
    sender = SenderHand()
    sender.to_writing(num_tokens=8)
    with pytest.raises(LocalProtocolError, match="opened twice"):
        sender.open(1)
    with pytest.raises(LocalProtocolError, match="started twice"):
        sender.start()
    with pytest.raises(LocalProtocolError, match="computed twice"):
        sender.compute(0)
    with pytest.raises(LocalProtocolError, match="chunk 2 of request r is unknown"):
        sender.compute(2)
    with pytest.raises(LocalProtocolError, match="gather into place 0 finished, but none was under way"):
        sender.gathered(0)
    with pytest.raises(AssertionError, match="unreachable"):
        sender.tell("no event")  # type: ignore[arg-type]
    assert sender.watermark(2 * CELL, session=99) == []
    assert sender.tell(tx.OutgoingAborted(request_id="nobody", reason="")) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 0}, "num_slots is 0; it must be at least 1"),
        ({"slot_bytes": 0}, "slot_bytes is 0; it must be at least 1"),
        ({"slot_bytes": 3 * 2**20 + 100}, "slot_bytes is 3145828; it must be a multiple of 4096"),  # four made three slots
        ({"grants_ahead": 0}, r"grants_ahead is 0; it must be in \[1, 1024\]"),
        ({"grants_ahead": 1025}, "grants_ahead is 1025"),
        ({"repeat_after_s": 0.0}, "repeat_after_s is 0 s; it must be above 0"),
        ({"write_timeout_s": float("nan")}, "write_timeout_s is nan s"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tx.SenderSettings(**{"slot_bytes": SLOT, **settings})  # type: ignore[arg-type]


def test_a_failed_request_has_nothing_left_to_ask_for() -> None:
    sender = SenderHand(grants_ahead=1)
    sender.to_writing(num_tokens=12)
    sender.abort()
    request = sender.machine.requests["r"]
    assert request.next_pieces(request.routes[0], 2) == []


# A sender whose state contradicts itself is noticed.


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda piece: setattr(piece.sending, "to_release", 2), "2 of request r to release, not 1"),
        (lambda piece: setattr(piece, "place", 1), "place 0 is held by a piece that is WRITING"),
        (lambda piece: setattr(piece, "grant", cells(4, 6)), "held grants and the grants of the requests differ"),
        (lambda piece: piece.sending.routes[0].outstanding.clear(), "outstanding pieces of request r"),
        (lambda piece: setattr(piece, "sending", copy.copy(piece.sending)), "place 0 is held for a request that is over"),
    ],
)
def test_a_spoilt_piece_is_noticed(spoil: Callable[[SenderPiece], object], message: str) -> None:
    sender = SenderHand()
    sender.to_writing()
    spoil(sender.machine.requests["r"].outstanding()[0])
    with pytest.raises(LocalProtocolError, match=message):
        sender.machine.check_invariants()


def test_a_failed_request_whose_piece_waits_is_noticed() -> None:
    sender = SenderHand()
    sender.to_writing()
    (piece,) = sender.machine.requests["r"].outstanding()
    sender.abort()
    piece.stage, piece.place = SenderStage.GRANTED, None
    with pytest.raises(LocalProtocolError, match="failed request r has pieces that nothing is done with"):
        piece.sending.check_invariants()


def test_a_place_of_a_written_piece_is_noticed() -> None:
    sender = SenderHand()
    sender.to_written()
    (piece,) = sender.machine.requests["r"].outstanding()
    piece.place = 0
    with pytest.raises(LocalProtocolError, match="places of request r"):
        sender.machine.check_invariants()


class KeptPlaces(StagingArena):
    """Releases no place."""

    def release(self, begin: int) -> None:
        pass


def test_a_place_that_nobody_holds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "StagingArena", KeptPlaces)
    sender = SenderHand()
    sender.to_writing()
    with pytest.raises(LocalProtocolError, match=r"places held \[\] and taken \[0\] differ"):
        sender.written(0)


def test_a_piece_that_is_watched_and_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionState, "discard_written", lambda self, piece: self.written.pop(piece, None))
    sender = SenderHand()
    sender.to_written()
    with pytest.raises(LocalProtocolError, match="1 watched, 0 pieces written and 0 keys spent"):
        sender.reject(0)


def test_a_key_that_is_held_and_spent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionState, "is_taken", lambda self, begin: False)
    sender = SenderHand()
    sender.grant({0: cells(0, 2)}, "nobody")
    sender.start(num_tokens=4)
    with pytest.raises(LocalProtocolError, match=r"keys of the grants that begin at \[0\] are held and spent"):
        sender.grant({0: cells(0, 2)})


def test_hundreds_that_wait_for_a_full_ring_cost_an_event_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at all of them for every event cost four fifths of the chunks a second with 256 requests in flight."""
    looks: list[Grant] = []
    honest = RingView.blocker_of
    monkeypatch.setattr(RingView, "blocker_of", lambda self, grant: looks.append(grant) or honest(self, grant))
    sender = SenderHand(ring_cells=4, num_slots=4)
    counts = count_lines(sender.machine, "sender.py")
    sender.abort("nobody")
    for number in range(100):
        sender.start(f"r{number}", num_tokens=4)
        sender.compute(0, f"r{number}")
        sender.grant({0: cells(2 * number, 2 * number + 2)}, f"r{number}")
    looks.clear()
    sender.tell(tx.Tick())
    assert looks == []
    for slot in (0, 1):  # the two that the ring holds
        sender.finish(slot * SLOT)
    started = of_type(sender.watermark(4 * CELL), tx.StartGather)
    assert [gather.piece.request_id for gather in started] == ["r2", "r3"]
    assert len(looks) <= 4
    sender.abort("nobody")
    assert counts[-1] == counts[0]  # nor is the session looked at before something of it is free


def test_a_grant_that_a_turn_has_no_steps_to_look_at_begins_in_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes a step here. A turn has one for what it adds, and one for what the turns before left."""
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    sender = SenderHand(num_slots=3)
    sender.start(num_tokens=12)
    for chunk in range(3):
        sender.compute(chunk)
    sender.watermark(0, cells(1, 8))
    begun = of_type(sender.grant({0: cells(9, 11), 1: cells(11, 13), 2: cells(13, 15)}), tx.StartGather)
    assert [gather.piece.chunk.index for gather in begun] == [0, 1]
    begun = of_type(sender.tell(tx.Tick()), tx.StartGather)
    assert [gather.piece.chunk.index for gather in begun] == [2]


def test_a_watermark_begins_a_turn_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    sender = SenderHand(num_slots=3)
    sender.start(num_tokens=12)
    for chunk in range(3):
        sender.compute(chunk)
    sender.grant({0: cells(9, 11), 1: cells(11, 13), 2: cells(13, 15)})
    for _ in range(3):
        sender.tell(tx.Tick())  # each of them has been looked at
    begun = of_type(sender.watermark(0, cells(1, 8)), tx.StartGather)
    assert [gather.piece.chunk.index for gather in begun] == [0, 1]


def test_a_session_whose_looks_find_nothing_does_not_keep_the_turns_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    sender = SenderHand(decode_tp=2, num_slots=4, grants_ahead=8)
    sender.start(num_tokens=24)
    for chunk in range(6):
        sender.compute(chunk)
    sender.watermark(0, cells(3, 8), session=2)
    sender.grant({chunk: cells(8 + chunk, 9 + chunk) for chunk in range(6)}, route=0)
    assert not of_type(sender.grant({0: cells(9, 10), 1: cells(12, 13)}, route=1), tx.StartGather)
    (gather,) = of_type(sender.tell(tx.Tick()), tx.StartGather)
    assert (gather.piece.session, gather.piece.chunk.index) == (2, 1)


def test_the_oldest_grant_begins_first_whatever_was_ready_first() -> None:
    sender = SenderHand(num_slots=1)
    sender.start("late", num_tokens=4)
    sender.start("early", num_tokens=4)
    sender.grant({0: cells(4, 6)}, "late")
    sender.grant({0: cells(2, 4)}, "early")
    sender.to_writing(cells(0, 2))
    sender.compute(0, "late")
    sender.compute(0, "early")
    started = of_type(sender.written(0), tx.StartGather)
    assert [gather.piece.request_id for gather in started] == ["early"]


def test_a_session_that_carries_nothing_of_a_request_is_lost_without_it() -> None:
    sender = SenderHand()
    sender.open(9)
    sender.to_writing()
    assert sender.tell(tx.SenderSessionLost(session=9, reason="gone")) == []
    assert messages(sender.written(0), ChunkReady)
    assert of_type(sender.watermark(2 * CELL), tx.OutgoingSent)


def test_a_session_that_is_lost_while_it_waits_for_a_slot_gets_none() -> None:
    sender = SenderHand(decode_tp=2, num_slots=1)
    sender.start(num_tokens=4)
    for route in (0, 1):
        sender.grant({0: cells(0, 1)}, route=route)
    (gather,) = of_type(sender.compute(0), tx.StartGather)  # the other session waits for the slot
    sender.gathered(gather.place)
    sender.tell(tx.SenderSessionLost(session=3 - gather.piece.session, reason="peer died"))
    actions = sender.written(gather.place)
    assert of_type(actions, tx.OutgoingFailed) and not of_type(actions, tx.StartGather)
    assert sender.machine.is_idle and sender.machine.num_slots_used == 0


def test_a_piece_that_was_given_up_while_it_waited_for_a_slot_is_passed_over() -> None:
    sender = SenderHand(num_slots=1, ring_cells=8)
    sender.to_writing(cells(0, 2))
    for name, grant in (("given up", cells(2, 4)), ("next", cells(4, 6))):
        sender.start(name, num_tokens=4)
        sender.compute(0, name)
        sender.grant({0: grant}, name)
    sender.abort("given up")
    started = of_type(sender.written(0), tx.StartGather)
    assert [gather.piece.request_id for gather in started] == ["next"]


def test_a_write_that_fails_after_its_session_was_lost_is_no_news() -> None:
    sender = SenderHand()
    sender.to_writing()
    sender.tell(tx.SenderSessionLost(session=1, reason="gone"))
    assert sender.tell(tx.StagedWriteFailed(place=0, reason="endpoint closed")) == []


def test_only_the_session_whose_write_hangs_is_closed() -> None:
    sender = SenderHand(decode_tp=2, num_slots=4, write_timeout_s=5.0)
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 1)}, route=0)
    sender.grant({0: cells(0, 1)}, route=1)
    first, _ = of_type(sender.compute(0), tx.StartGather)
    sender.gathered(first.place)  # it hangs in its write; the other session's is still being gathered
    (closed,) = of_type(sender.tell(tx.Tick(), now_s=6.0), tx.CloseSession)
    assert closed.session == first.piece.session


def test_a_piece_without_a_grant_says_so() -> None:
    sender = SenderHand()
    sender.start(num_tokens=4)
    (piece,) = sender.machine.requests["r"].outstanding()
    with pytest.raises(LocalProtocolError, match="chunk 0 of request r has no grant at ASKED"):
        _ = piece.granted


def test_ready_messages_are_repeated_in_the_order_of_writing() -> None:
    """The same events, the same actions: nothing depends on where objects lie in memory."""
    sender = SenderHand(ring_cells=16, num_slots=8, grants_ahead=8)
    sender.start(num_tokens=32)
    sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(8)})
    slots = {
        action.piece.chunk.index: action.place for chunk in range(8) for action in of_type(sender.compute(chunk), tx.StartGather)
    }
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    for chunk in order:
        sender.finish(slots[chunk])
    assert [ready.chunk for ready in messages(sender.tell(tx.Tick(), now_s=2.0), ChunkReady)] == order


def lines_of_a_failure(num_tokens: int) -> list[int]:
    """The lines of the sender that each event of a request's start and failure runs."""
    sender = SenderHand(prefill_tp=1, decode_tp=2, ring_cells=64, num_slots=8, grants_ahead=4)
    counts = count_lines(sender.machine, "send/sender.py", "send/state.py")
    sender.start(num_tokens=num_tokens)
    sender.compute(0)
    sender.compute(1)
    for route in (0, 1):
        sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(4)}, route=route)
    assert drops(sender.refuse()) == ["nothing_asked"]
    sender.tell(tx.Tick(), now_s=5.0)
    sender.gathered(0)
    sender.abort()
    sender.abort()
    sender.tell(tx.SenderSessionLost(session=2, reason="x"))
    sender.written(0)
    for slot in (1, 2, 3):
        sender.gathered(slot * SLOT)
    assert sender.machine.is_idle
    return counts


def test_no_event_of_a_long_request_costs_more_than_of_a_short_one() -> None:
    assert lines_of_a_failure(num_tokens=4 * 1024) == lines_of_a_failure(num_tokens=4 * 8)
