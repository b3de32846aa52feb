"""The numbered rules of docs/protocol.md, each with a test that carries its number, on the state machines alone."""

from __future__ import annotations

import pytest

from tests.protocol.machines import (
    CELL,
    DECODE_LIFE,
    LAYOUT,
    PLAN,
    PREFILL_LIFE,
    SLOT,
    WHOLE_CHUNK,
    ReceiverHand,
    SenderHand,
    cells,
    messages,
    of_type,
)
from transfer.chunk import split_into_chunks
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.messages import AbortTransfer, ChunkReady, GrantRefused, GrantRequest, GrantsIssued, WriterDrained
from transfer.receive import events as rx
from transfer.send import events as tx


def test_rule_01_a_grant_is_published_whole_and_never_changes() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=12)
    grants = receiver.grants_of(receiver.ask(0, 1))
    assert grants == {0: cells(0, 2), 1: cells(2, 4)}
    again = receiver.grants_of(receiver.ask(1, 0, 2))
    assert again == {**grants, 2: cells(4, 6)}
    sender = SenderHand()
    sender.start(num_tokens=4)
    sender.grant({0: cells(0, 2)})
    sender.grant({0: cells(4, 6)})  # not ours to change
    sender.compute(0)
    (write,) = of_type(sender.gathered(0), tx.StartWrite)
    assert write.piece.grant == cells(0, 2)


def test_rule_01_a_grant_request_is_served_whole_or_not_at_all() -> None:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=8)
    (refusal,) = messages(receiver.ask(0, 1, 2), GrantRefused)
    assert "chunk 2 is not part of request r" in refusal.reason
    assert receiver.ring.num_live_grants == 0


def test_rule_02_a_writer_writes_only_when_the_bytes_are_released() -> None:
    sender = SenderHand(ring_cells=2)
    sender.start(num_tokens=8)
    sender.grant({0: cells(2, 4), 1: cells(4, 6)})
    assert not of_type(sender.compute(0), tx.StartGather)
    assert not of_type(sender.compute(1), tx.StartGather)
    (gather,) = of_type(sender.watermark(2 * CELL), tx.StartGather)
    assert gather.piece.chunk.index == 0
    assert of_type(sender.gathered(gather.place), tx.StartWrite)
    assert not of_type(sender.written(gather.place), tx.StartGather)  # its bytes are written, not released
    (gather,) = of_type(sender.watermark(4 * CELL), tx.StartGather)
    assert gather.piece.chunk.index == 1


def test_rule_02_a_receive_is_posted_only_when_the_bytes_are_released() -> None:
    receiver = ReceiverHand(ring_cells=2)
    receiver.expect("first", num_tokens=4)
    receiver.expect("second", num_tokens=4)
    actions = receiver.ask(0, request_id="first") + receiver.ask(0, request_id="second")
    assert [post.piece.grant for post in of_type(actions, rx.PostReceive)] == [cells(0, 2)]
    receiver.settled(cells(0, 2))
    receiver.ready(0, cells(0, 2), request_id="first")
    (post,) = of_type(receiver.scattered(cells(0, 2)), rx.PostReceive)
    assert post.piece.grant == cells(2, 4)


def test_rule_03_a_watermark_only_moves_forward() -> None:
    sender = SenderHand(ring_cells=2)
    sender.start(num_tokens=4)
    sender.grant({0: cells(4, 6)})
    sender.compute(0)
    sender.watermark(2 * CELL)
    sender.sequence = 0
    assert not of_type(sender.watermark(4 * CELL), tx.StartGather)  # an old sequence number: ignored
    sender.sequence = 5
    (close,) = of_type(sender.watermark(0), tx.CloseSession)
    assert (close.session, "R2" in close.reason) == (1, True)


def test_rule_04_a_new_peer_gets_the_current_watermark_at_attach() -> None:
    """Until it came, a new session writes only what no earlier grant can share; it alone brings the writer up to date."""
    sender = SenderHand(ring_cells=8)
    sender.start(num_tokens=8)
    sender.grant({0: cells(80, 82), 1: cells(82, 84)})
    assert not of_type(sender.compute(0) + sender.compute(1), tx.StartGather)
    assert len(of_type(sender.watermark(80 * CELL), tx.StartGather)) == 2
    receiver = ReceiverHand()
    receiver.to_scattering()
    receiver.scattered(cells(0, 2))
    assert receiver.ring.watermark().position == 2 * CELL  # absolute: complete without the ones before


@pytest.mark.parametrize("is_one_sided", [False, True])
def test_rule_05_a_region_is_released_only_after_its_scatter_fired(is_one_sided: bool) -> None:
    receiver = ReceiverHand(is_one_sided=is_one_sided)
    grant = receiver.granted(num_tokens=8)
    if not is_one_sided:
        assert not of_type(receiver.ready(0, grant), rx.StartScatter)  # written, they say, but not received
        (scatter,) = of_type(receiver.settled(grant), rx.StartScatter)
    else:
        (scatter,) = of_type(receiver.ready(0, grant), rx.StartScatter)
    assert (scatter.piece.grant, scatter.piece.num_bytes, scatter.digest) == (grant, WHOLE_CHUNK, 7)
    assert receiver.ring.num_live_grants == 1
    actions = receiver.scattered(grant)
    assert receiver.ring.num_live_grants == 0
    assert of_type(actions, rx.PublishWatermark)


def test_rule_06_abort_drains_scatters_in_flight_before_it_releases_anything() -> None:
    receiver = ReceiverHand()
    grant = receiver.to_scattering(num_tokens=8)
    actions = receiver.cancel()
    assert messages(actions, AbortTransfer)
    assert not of_type(actions, rx.IncomingDrained)
    assert not of_type(receiver.drained(), rx.IncomingDrained)
    assert receiver.ring.num_live_grants == 1
    actions = receiver.scattered(grant)
    assert of_type(actions, rx.IncomingDrained)
    assert not of_type(actions, rx.IncomingComplete)
    assert (receiver.ring.num_live_grants, receiver.machine.num_requests) == (0, 0)


def test_rule_06_after_an_abort_nothing_more_is_scattered() -> None:
    receiver = ReceiverHand()
    grant = receiver.granted()
    assert of_type(receiver.cancel(), rx.IncomingDrained)
    assert receiver.ring.quarantined_bytes == 2 * CELL
    assert not of_type(receiver.ready(0, grant) + receiver.settled(grant), rx.StartScatter)
    receiver.drained()
    assert receiver.ring.quarantined_bytes == receiver.ring.live_bytes == 0


def test_rule_07_complete_means_the_set_of_writers_equals_the_expected_set() -> None:
    receiver = ReceiverHand(prefill_tp=2, is_one_sided=True)
    receiver.expect(num_tokens=4)
    half = WHOLE_CHUNK // 2
    grants = [receiver.grants_of(receiver.ask(0, route=route, num_bytes=half, session=1 + route))[0] for route in range(2)]
    receiver.ready(0, grants[0], num_bytes=half)
    assert [drop.reason for drop in of_type(receiver.ready(0, grants[0], num_bytes=half), rx.MessageDropped)] == ["repeated"]
    assert not of_type(receiver.scattered(grants[0]), rx.IncomingComplete)
    assert [drop.reason for drop in of_type(receiver.ready(0, grants[0], num_bytes=half), rx.MessageDropped)] == ["repeated"]
    # Writer 0 cannot speak for writer 1.
    actions = receiver.ready(0, grants[1], route=1, num_bytes=half, session=1)
    assert [drop.reason for drop in of_type(actions, rx.MessageDropped)] == ["unknown_chunk"]
    receiver.ready(0, grants[1], route=1, num_bytes=half, session=2)
    assert of_type(receiver.scattered(grants[1]), rx.IncomingComplete)


def test_rule_08_and_no_region_is_outstanding() -> None:
    receiver = ReceiverHand(is_one_sided=True)
    receiver.expect(num_tokens=8)
    grants = receiver.grants_of(receiver.ask(0, 1))
    receiver.ready(1, grants[1])
    receiver.ready(0, grants[0])
    assert not of_type(receiver.scattered(grants[1]), rx.IncomingComplete)
    assert receiver.ring.live_bytes == 2 * CELL
    assert of_type(receiver.scattered(grants[0]), rx.IncomingComplete)
    assert (receiver.ring.live_bytes, receiver.machine.is_idle) == (0, True)


def test_rule_09_a_failure_is_reported_only_after_every_sibling_write_has_settled() -> None:
    sender = SenderHand(num_slots=3)
    sender.start(num_tokens=12)
    sender.grant({0: cells(0, 2), 1: cells(2, 4), 2: cells(4, 6)})
    for chunk in range(3):
        sender.compute(chunk)
    sender.finish(0)
    sender.gathered(SLOT)
    actions = sender.tell(tx.OutgoingAborted(request_id="r", reason="engine failed"))  # 0 written, 1 writing, 2 gathering
    assert not of_type(actions, tx.OutgoingFailed)
    assert not messages(actions, WriterDrained)
    actions = sender.gathered(2 * SLOT)
    assert of_type(actions, tx.Decline)
    assert of_type(actions, tx.SourceReleased)
    assert not of_type(actions, tx.StartWrite)
    assert not of_type(actions, tx.OutgoingFailed)
    actions = sender.written(SLOT)
    assert [failed.reason for failed in of_type(actions, tx.OutgoingFailed)] == ["engine failed"]
    assert len(messages(actions, WriterDrained)) == 1
    assert sender.machine.is_idle


def test_rule_10_a_chunk_larger_than_the_ring_fails_its_request_at_once() -> None:
    receiver = ReceiverHand(ring_cells=1)
    receiver.expect(num_tokens=4)
    actions = receiver.ask(0)
    (failed,) = of_type(actions, rx.IncomingFailed)
    (refused,) = messages(actions, GrantRefused)
    assert failed.reason == refused.reason == "chunk of 512 bytes does not fit the ring of 256 bytes"
    sender = SenderHand(ring_cells=1)
    sender.start(num_tokens=4)
    assert of_type(sender.refuse(), tx.OutgoingFailed)


def test_rule_11_both_sides_derive_chunk_boundaries_from_the_same_function() -> None:
    sender, receiver = SenderHand(grants_ahead=8), ReceiverHand(ring_cells=32)
    receiver.expect(num_tokens=10)
    (request,) = messages(sender.start(num_tokens=10), GrantRequest)
    assert [chunk.num_bytes for chunk in request.chunks] == [512, 512, 256]
    assert messages(receiver.hear(request), GrantsIssued)
    gathers = [sender.compute(0), sender.compute(1), sender.grant({0: cells(0, 2), 1: cells(2, 4)})]
    chunks = split_into_chunks(PLAN, num_tokens=10, num_layers=LAYOUT.num_layers)
    assert [gather.piece.chunk for actions in gathers for gather in of_type(actions, tx.StartGather)] == list(chunks[:2])
    # Where the two differ after all, the request is refused and both sizes are named.
    (refused,) = messages(receiver_with_request().ask(0, num_bytes=WHOLE_CHUNK + 1), GrantRefused)
    assert refused.reason == "chunk 0 is 512 bytes here and 513 at the writer"


def receiver_with_request() -> ReceiverHand:
    receiver = ReceiverHand()
    receiver.expect(num_tokens=4)
    return receiver


def test_rule_12_with_more_ranks_than_heads_consecutive_ranks_share_a_head() -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)
    shard = Shard(tp_size=4)
    assert [shard.at(rank).heads(2).begin for rank in range(4)] == [0, 0, 1, 1]  # modulo would say 0, 1, 0, 1
    found = routes(layout, Shard(tp_size=2), shard)
    assert [(route.prefill_rank, route.decode_rank) for route in found] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_rule_13_the_gather_is_ordered_after_the_forward_pass_by_an_event() -> None:
    sender = SenderHand()
    sender.start(num_tokens=8)
    assert not of_type(sender.grant({0: cells(0, 2), 1: cells(2, 4)}), tx.StartGather)  # granted, not computed
    event = object()
    (gather,) = of_type(sender.compute(1, event=event), tx.StartGather)
    assert (gather.piece.chunk.index, gather.event) == (1, event)
    assert gather.event is event


def test_rule_14_a_message_for_an_unknown_request_is_dropped_and_counted() -> None:
    receiver = ReceiverHand()
    assert [drop.reason for drop in of_type(receiver.ready(0, cells(0, 2)), rx.MessageDropped)] == ["unknown_chunk"]
    grant = receiver.granted()
    drops = [
        receiver.ready(0, cells(4, 6)),  # another grant
        receiver.ready(0, grant, num_bytes=WHOLE_CHUNK - 1),  # another size
        receiver.ready(9, grant),
        receiver.ready(0, grant, session=77),
        receiver.hear(ChunkReady(incarnation=5, request_id="r", route=0, chunk=0, begin=0, num_bytes=1, digest=1, attempt=0)),
        receiver.hear(GrantRefused(incarnation=PREFILL_LIFE, request_id="r", route=0, reason="")),
    ]
    assert [drop.reason for actions in drops for drop in of_type(actions, rx.MessageDropped)] == [
        "wrong_grant",
        "wrong_grant",
        "unknown_chunk",
        "unknown_session",
        "other_incarnation",
        "unexpected_type",
    ]
    sender = SenderHand()
    sender.start(num_tokens=4)
    other_life = GrantRefused(incarnation=5, request_id="r", route=0, reason="")
    sender_drops = [
        sender.hear(other_life),
        sender.hear(other_life, session=77),
        sender.hear(WriterDrained(incarnation=DECODE_LIFE, request_id="r", route=0)),
        sender.grant({9: cells(0, 2)}),
        sender.grant({0: cells(0, 1)}),  # too small for the chunk
    ]
    assert [drop.reason for actions in sender_drops for drop in of_type(actions, tx.MessageDropped)] == [
        "other_incarnation",
        "unknown_session",
        "unexpected_type",
        "unknown_chunk",
        "impossible_grant",
    ]
    assert sender.machine.num_requests == receiver.machine.num_requests == 1
