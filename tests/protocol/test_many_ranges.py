"""Sender and receiver of a ring with more released ranges than one watermark has room for.

Found while docs/models/ring.pml was written, which shows it as `ring.lowest_ranges_only`: if no watermark ever names a range,
its writer keeps the pages of a released piece, and closes the session at the time-out.
"""

from __future__ import annotations

from collections import deque

from tests.protocol.machines import CELL, DECODE_LIFE, ReceiverHand, SenderHand, of_type
from transfer.receive import events as rx
from transfer.ring import MAX_PUBLISHED_RANGES, Grant, RingView
from transfer.send import events as tx

NUM_REQUESTS = 2 * MAX_PUBLISHED_RANGES + 20


class Pair:
    """One writer and its target over a one-sided transport that works at once and loses nothing; only time is missing."""

    def __init__(self, *, num_slots: int) -> None:
        self.sender = SenderHand(ring_cells=2 * NUM_REQUESTS, num_slots=num_slots)
        self.receiver = ReceiverHand(ring_cells=2 * NUM_REQUESTS, is_one_sided=True)
        self.sent: list[str] = []
        self.is_deaf = False  # the stream skips all watermarks
        self._to_sender: deque[tx.Event] = deque()
        self._to_receiver: deque[rx.Event] = deque()

    def play(self, *events: tx.Event) -> None:
        """Handle these events of the sender, and all that follows from them."""
        self._to_sender.extend(events)
        while self._to_sender or self._to_receiver:
            if self._to_sender:
                self.follow(self.sender.tell(self._to_sender.popleft()))
            else:
                for answer in self.receiver.tell(self._to_receiver.popleft()):
                    self._of_receiver(answer)

    def tick(self) -> None:
        self.sender.now_s += 2.0
        self.receiver.now_s += 2.0
        self._to_receiver.append(rx.Tick())
        self.play(tx.Tick())

    def follow(self, actions: list[tx.Action]) -> None:
        """Carry out what the sender asks for."""
        for action in actions:
            match action:
                case tx.Send():
                    self._to_receiver.append(rx.MessageArrived(session=1, message=action.message))
                case tx.StartGather():
                    self._to_sender.append(tx.GatherFinished(place=action.place, digest=7))
                case tx.StartWrite():
                    self._to_sender.append(tx.WriteFinished(place=action.place))
                case tx.OutgoingSent():
                    self.sent.append(action.request_id)
                case tx.CloseSession() | tx.OutgoingFailed():
                    raise AssertionError(action)
                case _:
                    pass

    def _of_receiver(self, action: rx.Action) -> None:
        match action:
            case rx.Send():
                self._to_sender.append(tx.MessageArrived(session=1, message=action.message))
            case rx.StartScatter():
                self._to_receiver.append(rx.ScatterFinished(grant=action.piece.grant, is_intact=True))
            case rx.PublishWatermark() if not self.is_deaf:
                self._to_sender.append(tx.WatermarkArrived(session=1, watermark=self.receiver.ring.watermark()))
            case rx.IncomingFailed() | rx.CloseSession():
                raise AssertionError(action)
            case _:
                pass


def test_a_writer_learns_of_every_release_in_a_ring_full_of_gaps() -> None:
    pair = Pair(num_slots=2)
    names = [f"r{number}" for number in range(NUM_REQUESTS)]
    for name in names:
        pair.receiver.expect(name, num_tokens=4)
        pair.follow(pair.sender.start(name, num_tokens=4))
        pair.play()
    early, late = names[1::2], names[0::2]  # as where one engine has a long prompt between short ones
    pair.is_deaf = True
    for name in early:
        pair.play(tx.ChunkComputed(request_id=name, chunk=0))
    assert pair.receiver.ring.num_ranges == len(early) > MAX_PUBLISHED_RANGES and not pair.sent
    pair.is_deaf = False
    for _ in range(14):  # 28 s; the time-out is 30 s
        pair.tick()
    assert sorted(pair.sent) == sorted(early)
    for name in late:
        pair.play(tx.ChunkComputed(request_id=name, chunk=0))
    assert sorted(pair.sent) == sorted(names)


def test_a_writer_that_stands_still_does_not_take_the_ring_from_the_others() -> None:
    """Its session is lost and not over: its grants stay in quarantine for ever, each a gap, and the other writer goes on."""
    ring_cells = 4 * NUM_REQUESTS
    receiver = ReceiverHand(ring_cells=ring_cells, is_one_sided=True, prefill_tp=2)
    grants: dict[tuple[str, int], Grant] = {}
    for number in range(NUM_REQUESTS):
        name = f"r{number}"
        receiver.expect(name, num_tokens=4)
        for writer in (0, 1):
            answer = receiver.ask(0, request_id=name, route=writer, session=1 + writer, num_bytes=CELL)
            grants[name, writer] = receiver.grants_of(answer)[0]
    for number in range(NUM_REQUESTS):
        name = f"r{number}"
        receiver.ready(0, grants[name, 1], request_id=name, route=1, session=2, num_bytes=CELL)
        receiver.scattered(grants[name, 1])
    receiver.lose(1, is_over=False)
    assert receiver.ring.num_ranges > MAX_PUBLISHED_RANGES
    assert receiver.ring.quarantined_bytes == NUM_REQUESTS * CELL
    # The other writer hears of its own releases, and of the bytes that it may use again, by ticks alone.
    view = RingView(ring_cells * CELL, incarnation=DECODE_LIFE)
    for _ in range(-(-NUM_REQUESTS // (MAX_PUBLISHED_RANGES // 2))):  # half of a watermark names the newest ranges
        (publish,) = of_type(receiver.tell(rx.Tick()), rx.PublishWatermark)
        assert publish.sessions is None
        view.update(receiver.ring.watermark())
    assert all(view.is_released(grants[f"r{number}", 1]) for number in range(NUM_REQUESTS))
    assert not any(view.is_released(grants[f"r{number}", 0]) for number in range(NUM_REQUESTS))
