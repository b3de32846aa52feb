"""The receiver alone: what late, lost and repeated news may not do to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.protocol.machines import (
    CELL,
    PREFILL_LIFE,
    WHOLE_CHUNK,
    ReceiverHand,
    cells,
    count_lines,
    drops,
    incoming,
    messages,
    of_type,
)
from transfer.errors import ConfigError, LocalProtocolError
from transfer.layout import Range
from transfer.messages import (
    MAX_CHUNKS_PER_MESSAGE,
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    GrantRefused,
    GrantsIssued,
    WriterDrained,
)
from transfer.piece import SessionRoute
from transfer.receive import events as rx
from transfer.receive.state import ReceiverPiece
from transfer.ring import Grant, StagingAllocator, grant_key


def test_a_request_goes_from_expected_to_complete() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=4)
    actions = receiver.ask(0)
    (post,) = of_type(actions, rx.PostReceive)
    piece = post.piece
    assert (piece.session, piece.grant, piece.num_bytes, post.key) == (1, cells(0, 2), WHOLE_CHUNK, grant_key(0, 0))
    assert not of_type(actions, rx.PublishWatermark)
    assert receiver.machine.ring_peak_bytes == 2 * CELL
    (prepare,) = of_type(actions, rx.PrepareScatter)
    assert prepare.piece is piece
    assert (piece.request_id, piece.chunk.index, piece.route.index, piece.request.num_tokens) == ("r", 0, 0, 4)
    assert not of_type(receiver.ask(0), rx.PrepareScatter)  # the same grant, said again
    receiver.settled(post.piece.grant)
    (scatter,) = of_type(receiver.ready(0, post.piece.grant), rx.StartScatter)
    assert scatter.piece is piece
    (complete,) = of_type(receiver.scattered(post.piece.grant), rx.IncomingComplete)
    assert complete.request_id == "r"
    assert receiver.machine.is_idle and receiver.machine.ring is receiver.ring


def test_padding_is_published_for_a_grant_may_wait_for_nothing_else() -> None:
    receiver = ReceiverHand(ring_cells=3)
    receiver.expect(num_tokens=8)
    assert not of_type(receiver.ask(0), rx.PublishWatermark)
    actions = receiver.ask(1)  # cell 2 is padding
    assert receiver.grants_of(actions) == {1: cells(3, 5)}
    assert of_type(actions, rx.PublishWatermark)
    assert receiver.ring.watermark().released == (cells(2, 3),)


def two_writers(
    *, is_one_sided: bool, ring_cells: int = 2
) -> tuple[ReceiverHand, Callable[..., Grant], Callable[..., list[frozenset[int] | None]]]:
    """A ring of pieces and two writers; how a piece is asked for, and how it arrives: whom the watermark then concerns."""
    receiver = ReceiverHand(prefill_tp=2, ring_cells=ring_cells, is_one_sided=is_one_sided)
    receiver.expect(num_tokens=12)
    half = WHOLE_CHUNK // 2

    def ask(chunk: int, *, writer: int, news_for: Sequence[frozenset[int]] = ()) -> Grant:
        actions = receiver.ask(chunk, route=writer - 1, session=writer, num_bytes=half)
        assert [publish.sessions for publish in of_type(actions, rx.PublishWatermark)] == list(news_for)
        return receiver.grants_of(actions)[chunk]

    def arrive(chunk: int, grant: Grant, *, writer: int) -> list[frozenset[int] | None]:
        if not is_one_sided:
            receiver.settled(grant, half)
        receiver.ready(chunk, grant, route=writer - 1, session=writer, num_bytes=half)
        return [publish.sessions for publish in of_type(receiver.scattered(grant), rx.PublishWatermark)]

    return receiver, ask, arrive


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two_sided", "one_sided"])
def test_a_watermark_goes_to_those_whom_it_concerns(is_one_sided: bool) -> None:
    _, ask, arrive = two_writers(is_one_sided=is_one_sided)
    first, second = ask(0, writer=1), ask(0, writer=2)
    ask(1, writer=2)  # waits for the first one's bytes
    assert arrive(0, first, writer=1) == [frozenset({1, 2})]  # released, and may be written now
    assert arrive(0, second, writer=2) == [frozenset({2})]
    # Nobody has told the first writer yet that its next grant may be written at once.
    ask(1, writer=1, news_for=[frozenset({1})])


def test_a_watermark_goes_to_no_session_that_is_lost() -> None:
    receiver, ask, _ = two_writers(is_one_sided=True)
    ask(0, writer=1), ask(0, writer=2)
    ask(1, writer=2)  # waits for the first one's bytes, and its writer may still write
    receiver.lose(2, is_over=False)
    actions = receiver.drained(route=0, session=1)
    assert [publish.sessions for publish in of_type(actions, rx.PublishWatermark)] == [frozenset({1})]


def test_a_watermark_without_room_for_every_range_goes_to_all_sessions_at_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.receive.receiver.MAX_PUBLISHED_RANGES", 0)
    receiver, ask, arrive = two_writers(is_one_sided=True)
    first, second = ask(0, writer=1), ask(0, writer=2)
    assert arrive(0, second, writer=2) == [frozenset({2})]
    # Nothing changes, and yet the next one goes out: what the last one left out is still to be told.
    assert [publish.sessions for publish in of_type(receiver.tell(rx.Tick()), rx.PublishWatermark)] == [None]
    assert arrive(0, first, writer=1) == [None]  # the first one with room for all
    assert not of_type(receiver.tell(rx.Tick()), rx.PublishWatermark)
    assert arrive(1, ask(1, writer=1), writer=1) == [frozenset({1})]


def test_between_ticks_a_watermark_without_room_for_every_range_goes_to_those_whom_it_concerns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transfer.receive.receiver.MAX_PUBLISHED_RANGES", 0)
    receiver, ask, arrive = two_writers(is_one_sided=True, ring_cells=3)
    ask(0, writer=1)
    second, third = ask(0, writer=2), ask(1, writer=2)
    assert arrive(0, second, writer=2) == [frozenset({2})]
    assert [publish.sessions for publish in of_type(receiver.tell(rx.Tick()), rx.PublishWatermark)] == [None]
    assert arrive(1, third, writer=2) == [frozenset({2})]


def test_a_watermark_names_the_ranges_of_a_grant_that_may_be_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next watermark is sent to the writer at once, so it must name the bytes that the writer waits for."""
    for module in ("ring", "receive.receiver"):
        monkeypatch.setattr(f"transfer.{module}.MAX_PUBLISHED_RANGES", 2)
    num_gaps, of_half = 8, WHOLE_CHUNK // 2
    receiver = ReceiverHand(prefill_tp=2, ring_cells=2 * num_gaps, is_one_sided=True)
    for name, route in (("frozen", 0), ("alive", 1)):
        mine = [SessionRoute(route=receiver.routes[route], session=1 + route)]
        receiver.tell(rx.IncomingExpected(request=incoming(name, mine, num_tokens=4 * (num_gaps + 1))))

    def ask(name: str, chunk: int, *, route: int) -> Grant:
        actions = receiver.ask(chunk, request_id=name, route=route, session=1 + route, num_bytes=of_half)
        return receiver.grants_of(actions)[chunk]

    gaps = []
    for chunk in range(num_gaps):
        ask("frozen", chunk, route=0)
        gaps.append(ask("alive", chunk, route=1))
    for chunk, gap in enumerate(gaps):
        receiver.ready(chunk, gap, request_id="alive", route=1, session=2, num_bytes=of_half)
        receiver.scattered(gap)
    receiver.lose(1, is_over=False)
    fresh = ask("alive", num_gaps, route=1)
    assert fresh.begin - gaps[0].begin == receiver.ring.capacity_bytes
    assert all(gaps[0] in receiver.ring.watermark().released for _ in range(num_gaps))


def test_a_watermark_for_all_is_not_taken_to_be_known_where_no_request_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session gets it with its next heartbeat, and a request would wait for that."""
    receiver, ask, arrive = two_writers(is_one_sided=True)
    receiver.open(3)
    first, second = ask(0, writer=1), ask(0, writer=2)
    monkeypatch.setattr("transfer.receive.receiver.MAX_PUBLISHED_RANGES", 0)
    assert arrive(0, second, writer=2) == [frozenset({2})]
    assert arrive(0, first, writer=1) == [None]
    assert receiver.machine.sessions_in_use == {1, 2}
    receiver.tell(rx.IncomingExpected(request=incoming("s", [SessionRoute(route=receiver.routes[0], session=3)], num_tokens=8)))
    assert receiver.machine.sessions_in_use == {1, 2, 3}
    actions = receiver.ask(0, request_id="s", session=3, num_bytes=WHOLE_CHUNK // 2)
    assert [publish.sessions for publish in of_type(actions, rx.PublishWatermark)] == [frozenset({3})]


def test_a_writer_hears_at_once_that_it_may_use_bytes_that_no_watermark_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.receive.receiver.MAX_PUBLISHED_RANGES", 0)
    receiver, ask, arrive = two_writers(is_one_sided=True)
    ask(0, writer=1)
    second = ask(0, writer=2)
    assert arrive(0, second, writer=2) == [frozenset({2})]
    ask(1, writer=2)  # waits for the first one's bytes
    ask(1, writer=1, news_for=[frozenset({1})])
    assert receiver.ring.watermark().released == (second,)


def test_a_refusal_names_what_is_not_expected() -> None:
    receiver = ReceiverHand()
    (refused,) = messages(receiver.ask(0, request_id="nobody"), GrantRefused)
    assert refused.reason == "request nobody is not expected here on route 0"
    receiver.expect(num_tokens=4)
    assert messages(receiver.ask(0, route=5), GrantRefused)
    assert receiver.ring.num_live_grants == 0


def test_a_broken_chunk_is_asked_for_once_more() -> None:
    receiver = ReceiverHand()
    grant = receiver.to_scattering()
    actions = receiver.scattered(grant, is_intact=False)
    assert of_type(actions, rx.ChunkBroken)
    (rejected,) = messages(actions, ChunkRejected)
    assert (rejected.chunk, rejected.begin, rejected.attempt) == (0, grant.begin, 0)
    (post,) = of_type(actions, rx.PostReceive)
    assert post.key == grant_key(grant.begin, 1)
    assert receiver.ring.num_live_grants == 1
    (again,) = messages(receiver.ready(0, grant, attempt=0), ChunkRejected)  # the rejection was not heard
    assert again.attempt == 0
    receiver.settled(grant)
    assert of_type(receiver.ready(0, grant, attempt=1), rx.StartScatter)
    assert of_type(receiver.scattered(grant), rx.IncomingComplete)


def test_broken_bytes_of_a_session_that_was_lost_are_no_alarm() -> None:
    """A copy queue says the same of a scatter that it did not begin any more."""
    receiver = ReceiverHand()
    grant = receiver.to_scattering()
    receiver.tell(rx.ReceiverSessionLost(session=1, reason="peer died"))
    actions = receiver.scattered(grant, is_intact=False)
    assert not of_type(actions, rx.ChunkBroken) and not messages(actions, ChunkRejected)
    assert of_type(actions, rx.IncomingDrained)
    assert receiver.ring.num_live_grants == 0 and receiver.machine.is_idle


@pytest.mark.parametrize("is_one_sided", [False, True])
def test_a_chunk_broken_twice_fails_its_request_as_data_loss(is_one_sided: bool) -> None:
    receiver = ReceiverHand(is_one_sided=is_one_sided)
    grant = receiver.granted()
    for attempt in range(2):
        if not is_one_sided:
            receiver.settled(grant)
        receiver.ready(0, grant, attempt=attempt)
        actions = receiver.scattered(grant, is_intact=False)
    (failed,) = of_type(actions, rx.IncomingFailed)
    assert failed.is_data_loss
    assert failed.reason == "chunk 0 of request r from prefill rank 0 arrived broken 2 times: digest mismatch"
    assert not messages(actions, ChunkRejected)
    assert of_type(actions, rx.IncomingDrained)
    assert receiver.ring.quarantined_bytes == 2 * CELL
    receiver.drained()
    assert receiver.ring.live_bytes == 0 and receiver.machine.is_idle


def test_a_chunk_of_another_length_is_broken() -> None:
    receiver = ReceiverHand()
    grant = receiver.granted()
    receiver.settled(grant, 100)
    actions = receiver.ready(0, grant)
    (rejected,) = messages(actions, ChunkRejected)
    assert rejected.reason == "received 100 bytes of 512"
    assert not of_type(actions, rx.StartScatter)


def test_a_scatter_that_ends_broken_after_a_cancel_only_drains() -> None:
    receiver = ReceiverHand()
    grant = receiver.to_scattering()
    receiver.cancel()
    assert receiver.ring.quarantined_bytes == 0
    actions = receiver.scattered(grant, is_intact=False)
    assert of_type(actions, rx.IncomingDrained)
    assert not messages(actions, ChunkRejected)
    assert receiver.ring.quarantined_bytes == 2 * CELL
    receiver.drained()
    assert receiver.machine.is_idle


def test_a_receive_is_awaited_though_the_writer_said_that_it_drained() -> None:
    """The write, or its decline, still has to end in the posted receive; released before, the bytes could be hit later."""
    receiver = ReceiverHand()
    grant = receiver.granted()
    receiver.cancel()
    assert receiver.drained() == receiver.drained() == []  # said twice, it changes nothing
    assert receiver.ring.quarantined_bytes == 2 * CELL
    receiver.settled(grant, 0)
    assert receiver.ring.live_bytes == 0 and receiver.machine.is_idle


def test_a_grant_that_a_turn_has_no_steps_to_look_at_is_posted_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    receiver = ReceiverHand(ring_cells=2)
    receiver.expect(num_tokens=12)
    grants = receiver.grants_of(receiver.ask(0, 1, 2))
    receiver.arrive(0, grants[0])
    (post,) = of_type(receiver.scattered(grants[0]), rx.PostReceive)
    assert post.piece.grant == grants[1]


@pytest.mark.parametrize("is_posted", [False, True])
def test_a_lost_session_releases_its_grants_at_once(is_posted: bool) -> None:
    receiver = ReceiverHand(ring_cells=2)
    receiver.expect("first", num_tokens=4)
    receiver.expect("second", num_tokens=4)
    if not is_posted:
        receiver.ask(0, request_id="first")
    receiver.ask(0, request_id="second")
    actions = receiver.tell(rx.ReceiverSessionLost(session=1, reason="peer died"))
    assert {failed.request_id for failed in of_type(actions, rx.IncomingFailed)} == {"first", "second"}
    assert not messages(actions, AbortTransfer)
    assert not of_type(actions, rx.PostReceive)  # also of what waited for the bytes that are free now
    assert receiver.ring.live_bytes == 0 and receiver.machine.is_idle
    assert receiver.tell(rx.ReceiverSessionLost(session=1, reason="again")) == []


def test_a_lost_session_ends_the_wait_of_a_cancelled_request() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=4)
    receiver.ask(0)
    receiver.cancel()
    actions = receiver.tell(rx.ReceiverSessionLost(session=1, reason="peer died"))
    assert not of_type(actions, rx.IncomingFailed)
    assert receiver.machine.is_idle


def test_a_lost_session_of_one_writer_drains_the_others() -> None:
    receiver = ReceiverHand(prefill_tp=2)
    receiver.expect(num_tokens=4)
    actions = receiver.tell(rx.ReceiverSessionLost(session=1, reason="peer died"))
    assert [(send.session, type(send.message)) for send in of_type(actions, rx.Send)] == [(2, AbortTransfer)]
    assert receiver.machine.num_requests == 1
    receiver.drained(route=1, session=2)
    assert receiver.machine.is_idle


def test_a_request_over_a_session_that_is_gone_fails_at_once() -> None:
    receiver = ReceiverHand(prefill_tp=2)
    receiver.tell(rx.ReceiverSessionLost(session=2, reason="peer died"))
    actions = receiver.expect(num_tokens=4)
    (failed,) = of_type(actions, rx.IncomingFailed)
    assert failed.reason == "session 0x2 with a prefill rank is lost"
    assert [send.session for send in of_type(actions, rx.Send)] == [1]
    assert of_type(actions, rx.IncomingDrained)


def test_an_abort_is_repeated_until_it_is_answered() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=4)
    assert not receiver.tell(rx.Tick(), now_s=5.0)
    assert messages(receiver.cancel(), AbortTransfer)
    assert not receiver.tell(rx.Tick(), now_s=5.9)
    assert messages(receiver.tell(rx.Tick(), now_s=6.0), AbortTransfer)
    assert not receiver.tell(rx.Tick(), now_s=6.9)
    receiver.drained()
    assert receiver.machine.is_idle


def test_grants_that_a_drained_writer_never_heard_of_are_said_again() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=8)
    grants = receiver.grants_of(receiver.ask(0, 1))  # lost on the way
    receiver.cancel()
    receiver.drained()
    receiver.settled(grants[1], 0)
    actions = receiver.tell(rx.Tick(), now_s=1.0)
    assert receiver.grants_of(actions) == {0: grants[0]}
    assert not messages(actions, AbortTransfer)
    assert not receiver.tell(rx.Tick(), now_s=1.5)
    receiver.settled(grants[0], 0)
    assert receiver.machine.is_idle
    assert not receiver.tell(rx.Tick(), now_s=9.0)


def test_a_rejection_that_a_drained_writer_never_heard_of_is_said_again() -> None:
    receiver = ReceiverHand()
    grant = receiver.to_scattering()
    receiver.scattered(grant, is_intact=False)  # the rejection is lost
    receiver.drained()
    assert receiver.ring.quarantined_bytes == 2 * CELL
    actions = receiver.tell(rx.Tick(), now_s=1.0)
    (again,) = messages(actions, ChunkRejected)
    assert (again.begin, again.attempt) == (grant.begin, 0)
    assert not messages(actions, GrantsIssued)
    receiver.settled(grant, 0)
    assert receiver.machine.is_idle


def test_a_writer_that_gives_up_fails_the_request() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=4)
    (failed,) = of_type(receiver.drained(), rx.IncomingFailed)
    assert failed.reason == "the prefill rank gave the request up"
    assert not failed.is_data_loss


def test_a_writer_that_is_done_may_say_drained_while_others_still_send() -> None:
    receiver = ReceiverHand(prefill_tp=2)
    receiver.expect(num_tokens=4)
    half = WHOLE_CHUNK // 2
    grants = [receiver.grants_of(receiver.ask(0, route=r, num_bytes=half, session=1 + r))[0] for r in range(2)]
    receiver.settled(grants[0], half)
    receiver.ready(0, grants[0], num_bytes=half)
    receiver.scattered(grants[0])
    assert receiver.drained(route=0, session=1) == []
    receiver.settled(grants[1], half)
    receiver.ready(0, grants[1], route=1, num_bytes=half, session=2)
    assert of_type(receiver.scattered(grants[1]), rx.IncomingComplete)
    assert receiver.drained(route=1, session=2) == []


def test_a_stranger_cannot_drain_a_route() -> None:
    receiver = ReceiverHand(prefill_tp=2)
    receiver.expect(num_tokens=4)
    assert receiver.drained(route=1, session=1) == []
    assert receiver.machine.num_requests == 1


def test_a_writer_that_asks_for_a_failed_request_is_told_to_stop() -> None:
    receiver = ReceiverHand(prefill_tp=2)
    receiver.expect(num_tokens=4)
    receiver.cancel()
    actions = receiver.ask(0, num_bytes=WHOLE_CHUNK // 2)
    assert messages(actions, AbortTransfer) and not messages(actions, GrantRefused)
    receiver.drained(route=0, session=1)
    (refused,) = messages(receiver.ask(0, num_bytes=WHOLE_CHUNK // 2), GrantRefused)  # it started late; route 1 drains still
    assert refused.reason == "client went away"
    assert receiver.ring.num_live_grants == 0


def test_a_failed_receive_ends_its_session() -> None:
    receiver = ReceiverHand()
    grant = receiver.granted()
    (close,) = of_type(receiver.tell(rx.ReceiveFailed(grant=grant, reason="reset")), rx.CloseSession)
    assert (close.session, close.reason) == (1, "reset")
    receiver.tell(rx.ReceiverSessionLost(session=1, reason="reset"))
    assert receiver.tell(rx.ReceiveFailed(grant=grant, reason="reset")) == []
    assert receiver.settled(grant) == []


def test_nothing_to_receive_is_complete_at_once() -> None:
    receiver = ReceiverHand()
    receiver.routes = []
    assert of_type(receiver.expect(), rx.IncomingComplete)


def test_the_owner_is_told_when_it_breaks_a_rule() -> None:
    receiver = ReceiverHand()
    grant = receiver.granted()
    with pytest.raises(LocalProtocolError, match="opened twice"):
        receiver.open(1)
    with pytest.raises(LocalProtocolError, match="expected twice"):
        receiver.expect()
    with pytest.raises(LocalProtocolError, match="none was under way"):
        receiver.scattered(grant)
    with pytest.raises(LocalProtocolError, match="not live"):
        receiver.scattered(cells(6, 7))
    with pytest.raises(AssertionError, match="unreachable"):
        receiver.tell("no event")  # type: ignore[arg-type]
    assert receiver.cancel("nobody") == []


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeat_after_s is 0 s; it must be above 0"):
        rx.ReceiverSettings(repeat_after_s=0.0)


def test_a_spoilt_receiver_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=4)
    receiver.ask(0)
    pieces = receiver.machine.requests["r"].routes[0].pieces
    (piece,) = pieces.values()
    pieces.clear()
    with pytest.raises(LocalProtocolError, match="live pieces and the pieces of the requests differ"):
        receiver.machine.check_invariants()
    pieces[0] = piece
    receiver.ring.assign(CELL)
    with pytest.raises(LocalProtocolError, match="2 live grants, 1 pieces hold one"):
        receiver.machine.check_invariants()
    accounts = replace(receiver.ring.accounts(), live_bytes=0)
    monkeypatch.setattr(StagingAllocator, "accounts", lambda self: accounts)
    with pytest.raises(LocalProtocolError, match="R4"):
        receiver.machine.check_invariants()


def test_a_request_whose_pieces_are_counted_wrongly_is_noticed() -> None:
    receiver = ReceiverHand()
    receiver.to_scattering()
    request = receiver.machine.requests["r"]
    request.num_scattering = 0
    with pytest.raises(LocalProtocolError, match="scatters of request r"):
        receiver.machine.check_invariants()
    request.num_scattering = 1
    request.routes[0].scattered.add(0)
    with pytest.raises(LocalProtocolError, match="released pieces of request r"):
        receiver.machine.check_invariants()


def test_a_writer_has_no_more_unreleased_grants_than_a_message_can_ask_for() -> None:
    receiver = ReceiverHand(ring_cells=2)
    most = MAX_CHUNKS_PER_MESSAGE
    receiver.expect(num_tokens=4 * (most + 2))
    grants = receiver.grants_of(receiver.ask(*range(most)))
    assert len(receiver.grants_of(receiver.ask(*range(most)))) == most, "the answer to a repeated request is the same grants"
    (refusal,) = messages(receiver.ask(most), GrantRefused)
    assert refusal.reason == f"request r would have {most + 1} unreleased grants on route 0; there can be {most}"
    receiver.arrive(0, grants[0])
    receiver.scattered(grants[0])
    assert len(receiver.grants_of(receiver.ask(0, most))) == 2


def lines_of_a_cancel(num_grants: int) -> list[int]:
    """The lines of the receiver that each event after the cancel of a request runs, the first `WriterDrained` apart."""
    receiver = ReceiverHand(ring_cells=2 * num_grants)
    receiver.expect(num_tokens=4 * num_grants)
    grants = receiver.grants_of(receiver.ask(*range(num_grants)))
    receiver.arrive(0, grants[0])
    receiver.cancel()
    counts = count_lines(receiver.machine, "receive/receiver.py", "receive/state.py")
    receiver.scattered(grants[0], is_intact=False)
    receiver.settled(grants[1])
    receiver.drained()  # which looks at each unreleased grant of its route, once
    receiver.drained()
    receiver.settled(grants[2])
    del counts[2]
    return counts


def test_no_event_of_a_cancelled_request_costs_more_with_many_grants() -> None:
    assert lines_of_a_cancel(num_grants=512) == lines_of_a_cancel(num_grants=4)


def test_a_session_that_carries_nothing_of_a_request_is_lost_without_it() -> None:
    receiver = ReceiverHand()
    receiver.open(9)
    receiver.expect()
    assert receiver.tell(rx.ReceiverSessionLost(session=9, reason="gone")) == []
    assert receiver.machine.is_known("r") and not receiver.machine.is_known("other")


def test_a_drained_writer_is_not_reminded_of_what_is_being_scattered() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    receiver.expect(num_tokens=4)
    (issued,) = messages(receiver.ask(0), GrantsIssued)[0].grants
    assert of_type(receiver.ready(0, Grant(issued.begin, issued.end)), rx.StartScatter)
    receiver.tell(rx.IncomingCancelled(request_id="r", reason="the client went away"))
    receiver.hear(WriterDrained(incarnation=PREFILL_LIFE, request_id="r", route=0))
    assert receiver.tell(rx.Tick(), now_s=60.0) == []


# Sessions that their close does not end: the writer has a mapping of the ring in a process of its own.


def test_a_lost_writer_that_may_still_write_keeps_its_grants_in_quarantine() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    receiver.expect(num_tokens=8)
    receiver.ask(0, 1)
    actions = receiver.lose(is_over=False)
    assert [failed.reason for failed in of_type(actions, rx.IncomingFailed)] == ["peer died"]
    assert of_type(actions, rx.IncomingDrained)  # pages are safe: what still lands, lands in the ring
    assert not of_type(actions, rx.Send)
    assert not of_type(actions, rx.PublishWatermark)
    assert receiver.ring.quarantined_bytes == receiver.ring.live_bytes == 4 * CELL
    assert receiver.machine.is_known("r") and not receiver.machine.is_idle and receiver.machine.num_lost_sessions == 1
    assert receiver.tell(rx.Tick(), now_s=600.0) == []  # time frees nothing, and nobody is left to ask
    assert receiver.lose() == [] and receiver.ring.live_bytes == 4 * CELL  # lost twice is no proof
    assert [type(action) for action in receiver.over()] == [rx.PublishWatermark]
    assert receiver.ring.live_bytes == 0 and receiver.machine.is_idle and not receiver.machine.is_known("r")


def test_messages_of_a_lost_writer_are_no_proof_of_its_last_write() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    receiver.expect(num_tokens=4)
    receiver.ask(0)
    receiver.lose(is_over=False)
    assert drops(receiver.drained()) == ["unknown_session"]
    assert receiver.ring.quarantined_bytes == 2 * CELL


def test_only_the_requests_of_a_session_end_with_it() -> None:
    receiver = ReceiverHand(is_one_sided=True, prefill_tp=2)
    half = WHOLE_CHUNK // 2
    routes = receiver.routes
    for number, route in enumerate(routes):
        receiver.routes = [route]
        receiver.expect(f"r{number}", num_tokens=4)
        receiver.ask(0, request_id=f"r{number}", route=route.index, num_bytes=half, session=1 + number)
    receiver.lose(1, is_over=False)
    receiver.over(1)
    assert not receiver.machine.is_known("r0") and receiver.machine.is_known("r1")
    assert receiver.ring.live_bytes == CELL and receiver.ring.quarantined_bytes == 0


def test_a_scatter_of_a_lost_session_finishes_before_its_pages_are_safe() -> None:
    """What was said to be ready is not written again unless it is rejected: intact, it goes back without waiting for the end."""
    receiver = ReceiverHand(is_one_sided=True)
    grant = receiver.to_scattering()
    actions = receiver.lose(is_over=False)
    assert of_type(actions, rx.IncomingFailed)
    assert not of_type(actions, rx.IncomingDrained)
    actions = receiver.scattered(grant)
    assert of_type(actions, rx.IncomingDrained)
    assert receiver.ring.live_bytes == 0 and receiver.machine.is_known("r")
    assert receiver.over() == [] and receiver.machine.is_idle


def test_a_request_over_a_session_that_is_not_over_has_nothing_to_wait_for() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    receiver.lose(is_over=False)
    actions = receiver.expect(num_tokens=4)
    assert of_type(actions, rx.IncomingFailed)
    assert of_type(actions, rx.IncomingDrained)
    assert receiver.machine.is_idle
    assert receiver.over() == []


def test_the_owner_is_told_when_it_ends_a_session_wrongly() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    with pytest.raises(LocalProtocolError, match="session 0x1 is over, but it was not lost, or was over before"):
        receiver.over()
    receiver.lose(is_over=False)
    with pytest.raises(LocalProtocolError, match="session 0x1 opened twice"):
        receiver.open(1)
    receiver.over()
    with pytest.raises(LocalProtocolError, match="was over before"):
        receiver.over()
    two_sided = ReceiverHand()
    with pytest.raises(LocalProtocolError, match="the close of a two-sided session is its end"):
        two_sided.lose(is_over=False)


def test_repeated_messages_about_a_released_chunk() -> None:
    receiver = ReceiverHand()
    grant = receiver.granted(num_tokens=8)
    receiver.arrive(0, grant)
    receiver.scattered(grant)
    assert receiver.grants_of(receiver.ask(0, 1)) == {0: grant, 1: cells(2, 4)}
    assert drops(receiver.ready(0, grant)) == ["repeated"]
    assert drops(receiver.ready(0, cells(2, 4))) == ["wrong_grant"]
    assert drops(receiver.ready(1, grant)) == ["wrong_grant"]


def _transferred(num_chunks: int) -> ReceiverHand:
    """A request of which so many chunks are here, and two are under way; the second of them is being scattered."""
    receiver = ReceiverHand(is_one_sided=True)
    receiver.expect(num_tokens=4 * (num_chunks + 2))
    for chunk in range(num_chunks + 2):
        grant = receiver.grants_of(receiver.ask(chunk))[chunk]
        if chunk != num_chunks:
            receiver.ready(chunk, grant)
        if chunk < num_chunks:
            receiver.scattered(grant)
    return receiver


def test_what_a_long_prompt_has_received_costs_nothing_to_cancel() -> None:
    """Released chunks were walked four times at each step of a request that was given up."""
    few, many = _transferred(1), _transferred(40)
    costs = [count_lines(one.machine, "receive/receiver.py", "receive/state.py") for one in (few, many)]
    few.cancel(), many.cancel()
    assert costs[0] == costs[1]


def test_received_chunks_of_a_long_prompt_leave_few_objects() -> None:
    """Each full collection of the garbage collector walks over all kept objects."""
    gc.collect()
    before = _pieces_and_messages()
    receiver = _transferred(40)
    gc.collect()
    assert _pieces_and_messages() - before <= 3, "two that are under way, and what was said of one"
    assert receiver.machine.num_requests == 1


def _pieces_and_messages() -> int:
    return sum(type(one) in (ReceiverPiece, ChunkReady) for one in gc.get_objects())


def test_chunks_without_pages_get_no_grant_until_there_are_pages() -> None:
    receiver = ReceiverHand(ring_cells=16)
    receiver.expect(num_tokens=16)

    def hold(begin: int, end: int) -> list[rx.Action]:
        return receiver.tell(rx.ArrivalsHeld(request_id="r", tokens=Range(begin=begin, end=end) if begin < end else None))

    def arrived(chunk: int, grant: Grant) -> list[int]:
        receiver.arrive(chunk, grant)
        return [action.num_tokens for action in of_type(receiver.scattered(grant), rx.IncomingArrived)]

    assert not hold(6, 12), "chunk 1 has two of these tokens"
    first = receiver.grants_of(receiver.ask(0, 1, 2, 3))
    assert first.keys() == {0, 3}
    assert not messages(receiver.ask(1, 2), GrantsIssued), "asked again, and not granted"
    assert receiver.grants_of(receiver.ask(0)) == {0: first[0]}
    assert arrived(3, first[3]) == []
    assert arrived(0, first[0]) == [4]
    second = receiver.grants_of(hold(8, 12))
    assert second.keys() == {1}
    third = receiver.grants_of(hold(12, 12))
    assert third.keys() == {2}
    assert arrived(2, third[2]) == []
    receiver.arrive(1, second[1])
    actions = receiver.scattered(second[1])
    assert [action.num_tokens for action in of_type(actions, rx.IncomingArrived)] == [16]
    assert of_type(actions, rx.IncomingComplete) and receiver.machine.is_idle


def test_only_a_request_that_was_held_reports_its_progress() -> None:
    receiver = ReceiverHand()
    grant = receiver.to_scattering(num_tokens=8)
    assert not of_type(receiver.scattered(grant), rx.IncomingArrived)


def test_nothing_is_held_of_a_request_that_is_over() -> None:
    receiver = ReceiverHand()
    held = rx.ArrivalsHeld(request_id="r", tokens=Range(begin=4, end=8))
    assert not receiver.tell(held)
    receiver.expect(num_tokens=8)
    receiver.tell(held)
    receiver.ask(1)
    receiver.cancel()
    assert not receiver.tell(replace(held, tokens=None)), "it was given up, and its writer asks for nothing"


def test_a_held_chunk_that_can_never_fit_fails_its_request() -> None:
    receiver = ReceiverHand(ring_cells=1)
    receiver.expect(num_tokens=4)
    held = rx.ArrivalsHeld(request_id="r", tokens=Range(begin=0, end=4))
    receiver.tell(held)
    assert not receiver.ask(0)
    (failed,) = of_type(receiver.tell(replace(held, tokens=None)), rx.IncomingFailed)
    assert "512" in failed.reason


# Signals


def signalled(receiver: ReceiverHand, grant: Grant, *, session: int = 1, digest: int | None = None) -> list[rx.StartScatter]:
    return of_type(receiver.tell(rx.GatherSignalled(session=session, begin=grant.begin, digest=digest)), rx.StartScatter)


@pytest.mark.parametrize("digest", [None, 7])
def test_a_signal_starts_the_scatter_in_place_of_the_message(digest: int | None) -> None:
    receiver = ReceiverHand(is_one_sided=True)
    grant = receiver.granted()
    assert receiver.machine.awaits_signal(1, grant.begin)
    (scatter,) = signalled(receiver, grant, digest=digest)
    assert scatter.piece.grant == grant and scatter.digest == digest
    assert not receiver.machine.awaits_signal(1, grant.begin)
    assert not signalled(receiver, grant, digest=7)
    assert not receiver.ready(0, grant)  # the message says the same
    assert drops(receiver.ready(0, grant)) == ["repeated"]
    assert of_type(receiver.scattered(grant), rx.IncomingComplete)


def test_a_signal_that_does_not_fit_its_grant_changes_nothing() -> None:
    receiver = ReceiverHand(is_one_sided=True, prefill_tp=2)
    receiver.expect(num_tokens=4)
    half = WHOLE_CHUNK // 2
    grant = receiver.grants_of(receiver.ask(0, num_bytes=half))[0]
    assert not signalled(receiver, grant, session=2, digest=7)  # the grant of another session
    assert not signalled(receiver, cells(5, 6), digest=7)  # no grant
    assert of_type(receiver.ready(0, grant, num_bytes=half), rx.StartScatter)
    assert not signalled(receiver, grant, digest=7)  # later than the message
    with pytest.raises(LocalProtocolError, match="awaits no signal"):  # a scatter that the machine does not know of
        signalled(receiver, grant)
    two_sided = ReceiverHand()
    assert not signalled(two_sided, two_sided.granted(), digest=7)


def test_a_given_up_signal_leaves_the_piece_to_its_message() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    grant = receiver.granted()
    assert signalled(receiver, grant)
    actions = receiver.tell(rx.ScatterFinished(grant=grant, is_intact=None))
    assert not actions  # no rejection: the bytes may still be on their way
    (scatter,) = of_type(receiver.ready(0, grant), rx.StartScatter)
    assert scatter.digest == 7
    assert of_type(receiver.scattered(grant), rx.IncomingComplete)


def test_a_message_during_a_wait_that_is_given_up_then_is_not_lost() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    grant = receiver.granted()
    assert signalled(receiver, grant)
    receiver.ready(0, grant)
    (scatter,) = of_type(receiver.tell(rx.ScatterFinished(grant=grant, is_intact=None)), rx.StartScatter)
    assert scatter.digest == 7
    assert of_type(receiver.scattered(grant), rx.IncomingComplete)


def test_a_broken_signalled_chunk_is_asked_for_once_more_and_then_has_no_signal() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    grant = receiver.granted()
    assert signalled(receiver, grant)
    (rejected,) = messages(receiver.scattered(grant, is_intact=False), ChunkRejected)
    assert rejected.attempt == 0
    assert not signalled(receiver, grant, digest=7)
    assert of_type(receiver.ready(0, grant, attempt=1), rx.StartScatter)


def test_a_failed_request_waits_for_a_signalled_scatter_and_keeps_its_grant_until_the_writer_has_drained() -> None:
    """The scatter waits for a gather that is under way: no page is safe before, and no byte of the grant until it has ended."""
    receiver = ReceiverHand(is_one_sided=True)
    grant = receiver.granted()
    assert signalled(receiver, grant)
    assert not of_type(receiver.cancel(), rx.IncomingDrained)
    actions = receiver.tell(rx.ScatterFinished(grant=grant, is_intact=None))
    assert of_type(actions, rx.IncomingDrained)
    assert receiver.ring.num_live_grants == 1 and receiver.ring.quarantined_bytes > 0
    receiver.drained()
    assert receiver.ring.num_live_grants == 0 and not receiver.machine.num_requests
