"""A decode peer that says anything: it costs its own session at most, never another peer's transfers and never the rank."""

from __future__ import annotations

import pytest

from tests.protocol.machines import CELL, WHOLE_CHUNK, SenderHand, cells, declined, drops, messages, of_type
from transfer.messages import ChunkReady
from transfer.ring import grant_key
from transfer.send import events as tx
from transfer.send.sender import MAX_SPENT_KEYS


def test_one_grant_for_two_chunks_is_taken_once() -> None:
    sender = SenderHand()
    sender.start(num_tokens=8)
    sender.compute(0)
    sender.compute(1)
    actions = sender.grant({0: cells(0, 2), 1: cells(0, 2)})
    assert drops(actions) == ["granted_twice"]
    assert [gather.piece.chunk.index for gather in of_type(actions, tx.StartGather)] == [0]
    assert not of_type(sender.grant({1: cells(2, 4)}), tx.MessageDropped)  # the right one is still welcome


def test_a_grant_that_is_being_written_is_never_declined_for_another_name() -> None:
    sender = SenderHand()
    sender.to_writing()
    for actions in (sender.grant({0: cells(0, 2)}, request_id="nobody"), sender.reject(0, request_id="nobody")):
        assert not of_type(actions, tx.Decline)
        assert drops(actions) == ["impossible_grant"]
    assert messages(sender.written(0), ChunkReady)


def test_a_grant_that_no_ring_can_give_is_not_declined() -> None:
    sender = SenderHand(ring_cells=4)
    sender.start(num_tokens=4)
    assert not of_type(sender.grant({0: cells(3, 6)}, request_id="nobody"), tx.Decline)  # across the ring's end


def test_endless_grants_for_nobody_end_the_session() -> None:
    sender = SenderHand(ring_cells=MAX_SPENT_KEYS + 8)
    sender.start(num_tokens=4)
    for number in range(MAX_SPENT_KEYS):
        assert of_type(sender.grant({0: cells(number, number + 1)}, request_id="nobody"), tx.Decline)
    assert of_type(sender.grant({0: cells(MAX_SPENT_KEYS, MAX_SPENT_KEYS + 1)}, request_id="nobody"), tx.CloseSession)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_grant_whose_key_was_declined_is_not_taken(attempt: int) -> None:
    sender = SenderHand()
    actions = sender.reject(0, request_id="nobody") if attempt else sender.grant({0: cells(0, 2)}, request_id="nobody")
    assert declined(actions) == [grant_key(0, attempt)]
    sender.start(num_tokens=4)
    assert drops(sender.grant({0: cells(0, 2)})) == ["granted_twice"]


def test_a_write_that_is_never_taken_over_ends_its_session() -> None:
    sender = SenderHand(write_timeout_s=5.0)
    sender.to_written()
    assert sender.machine.num_slots_used == 0
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):  # repeating the message does not start the time again
        assert not of_type(sender.tell(tx.Tick(), now_s=now_s), tx.CloseSession)
    (close,) = of_type(sender.tell(tx.Tick(), now_s=5.5), tx.CloseSession)
    assert "was not taken over for more than 5 s" in close.reason
    assert of_type(sender.tell(tx.SenderSessionLost(session=1, reason=close.reason)), tx.SourceReleased)
    assert sender.machine.is_idle


def test_a_ring_full_of_direct_pieces_that_are_never_taken_over_ends_its_session_once() -> None:
    """And anyone who still stores into it is waited for: its pages are not given to others before."""
    sender = SenderHand(write_timeout_s=5.0, direct=frozenset({1}), num_slots=1, grants_ahead=8)
    sender.start(num_tokens=16)
    sender.grant({chunk: cells(2 * chunk, 2 * chunk + 2) for chunk in range(4)})
    gathers = [of_type(sender.compute(chunk), tx.StartGather)[0] for chunk in range(4)]
    for gather in gathers[:3]:
        sender.gathered(gather.place)
    assert not of_type(sender.tell(tx.Tick(), now_s=5.0), tx.CloseSession)
    (close,) = of_type(sender.tell(tx.Tick(), now_s=5.5), tx.CloseSession)
    assert close.reason == "a write of 512 bytes was not taken over for more than 5 s"
    assert sender.tell(tx.SenderSessionLost(session=1, reason=close.reason)) == []
    assert not sender.machine.is_idle and sender.machine.num_slots_used == 0
    over = sender.gathered(gathers[3].place)
    assert [type(action) for action in over] == [tx.SourceReleased, tx.OutgoingFailed]
    assert sender.machine.is_idle


def settle(sender: SenderHand, actions: list[tx.Action]) -> list[tx.Action]:
    """Carry out every gather and write that the actions start; return the actions and all that followed."""
    every = list(actions)
    for action in every:
        if isinstance(action, tx.StartGather):
            every += sender.gathered(action.place)
        elif isinstance(action, tx.StartWrite):
            every += sender.written(action.place)
    return every


def test_seven_legal_messages_about_one_key_never_end_the_rank() -> None:
    sender = SenderHand()
    actions = sender.reject(0, request_id="nobody")
    actions += sender.start(num_tokens=4)
    actions += sender.compute(0)
    actions += settle(sender, sender.grant({0: cells(0, 2)}))
    actions += settle(sender, sender.reject(0))
    actions += settle(sender, sender.abort())
    actions += settle(sender, sender.reject(0))
    actions += settle(sender, sender.grant({0: cells(0, 2)}, request_id="nobody"))
    actions += settle(sender, sender.watermark(2 * WHOLE_CHUNK))
    keys = declined(actions) + [write.key for write in of_type(actions, tx.StartWrite)]
    assert len(keys) == len(set(keys)), "a key is written or declined once"
    assert sender.machine.is_idle
    assert declined(sender.grant({0: cells(4, 6)}, request_id="nobody")) == [grant_key(4 * CELL, 0)]  # it still serves its peer


def test_a_rejection_that_is_repeated_is_declined_once() -> None:
    sender = SenderHand()
    assert declined(sender.reject(0, request_id="nobody")) == [grant_key(0, 1)]
    assert sender.reject(0, request_id="nobody") == []
    assert sender.reject(0, request_id="another") == []
    sender.watermark(CELL)
    assert sender.reject(0, request_id="nobody") == []  # its bytes were released


def test_a_position_that_is_granted_again_is_not_taken_for_the_grant_that_was_given_up() -> None:
    """The first grant could be written and waited for a slot; the second is larger, and an older one is on its bytes."""
    sender = SenderHand(num_slots=1)
    sender.watermark(4 * CELL)
    for request_id, grant in (("a", cells(6, 8)), ("b", cells(8, 10)), ("c", cells(10, 12))):
        sender.start(request_id, num_tokens=4)
        sender.compute(0, request_id)
        sender.grant({0: grant}, request_id)
    sender.abort("c")
    sender.watermark(4 * CELL, cells(10, 12))
    sender.start("d", num_tokens=4)
    sender.compute(0, "d")
    sender.grant({0: cells(10, 14)}, "d")
    actions: list[tx.Action] = []
    for released in ((cells(6, 8), cells(10, 12)), (cells(6, 12),)):  # of "a", then of "b" too
        sender.finish(0)
        actions = sender.watermark(4 * CELL, *released)
    assert not of_type(actions, tx.StartGather), "cells 4 to 6 are not released"
    (gather,) = of_type(sender.watermark(10 * CELL), tx.StartGather)
    assert (gather.piece.request_id, gather.piece.grant) == ("d", cells(10, 14))
