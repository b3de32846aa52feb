"""Ring, sender and receiver as a hypothesis state machine: each step of the network and the data plane is hypothesis's choice.

test_world.py plays longer histories of whole clusters, each from a seed; what it finds is long. Here there are one writer and one
target, and what fails is shrunk to the few steps that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.protocol.machines import ReceiverHand, SenderHand, num_chunks
from tests.protocol.memory import RingMemory, Tag, require
from transfer.messages import decode, encode
from transfer.receive import events as rx
from transfer.ring import Grant, Watermark
from transfer.send import events as tx

SESSION = 1
PICK = st.integers(0, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A write on its way, or a decline: no grant."""

    number: int
    grant: Grant | None = None
    num_bytes: int = 0
    slot: int | None = None
    tag: Tag | None = None


class Network(RuleBasedStateMachine):
    """One session. Messages and acks wait in bags from which any is taken, again and again, or thrown away."""

    @initialize(
        is_one_sided=st.booleans(),
        ring_cells=st.integers(2, 4),
        num_slots=st.integers(1, 3),
        grants_ahead=st.integers(1, 4),
        first_tokens=st.lists(st.integers(1, 10), min_size=1, max_size=3),
    )
    def begin(self, is_one_sided: bool, ring_cells: int, num_slots: int, grants_ahead: int, first_tokens: list[int]) -> None:
        self.is_one_sided = is_one_sided
        self.sender = SenderHand(ring_cells=ring_cells, num_slots=num_slots, grants_ahead=grants_ahead, write_timeout_s=1e9)
        self.receiver = ReceiverHand(ring_cells=ring_cells, is_one_sided=is_one_sided)
        self.memory = RingMemory(self.receiver.ring.capacity_bytes)
        self.messages: list[tuple[bool, bytes]] = []  # whether to the receiver, and what
        self.acks: list[Watermark] = []
        self.to_compute: list[tuple[str, int]] = []
        self.gathering: list[tx.StartGather] = []
        self.scattering: list[tuple[rx.StartScatter, bool]] = []
        self.in_slot: dict[int, Tag] = {}
        self.posts: dict[int, rx.PostReceive] = {}
        self.shipments: dict[int, Shipment] = {}
        self.used_keys: set[int] = set()
        self.issued: dict[int, tuple[str, int, int]] = {}
        self.started: list[str] = []
        self.excused: set[str] = set()
        self.broken: dict[Tag, int] = {}
        self.given_up: set[str] = set()
        self.news: list[str] = []  # requests that failed, of which the leaders have not told everybody
        self.at_sender: dict[str, str] = {}
        self.at_receiver: dict[str, str] = {}
        for num_tokens in first_tokens:
            self.start(num_tokens, True)

    # What may happen

    @precondition(lambda self: len(self.started) < 5)
    @rule(num_tokens=st.integers(1, 14), is_computed=st.booleans())
    def start(self, num_tokens: int, is_computed: bool) -> None:
        name = f"r{len(self.started)}"
        self.started.append(name)
        self.to_compute += [(name, chunk) for chunk in range(num_chunks(num_tokens))]
        self._of_receiver(self.receiver.expect(name, num_tokens=num_tokens))
        self._of_sender(self.sender.start(name, num_tokens=num_tokens))
        while is_computed and self.to_compute:
            self.compute(0)

    @precondition(lambda self: self.to_compute)
    @rule(pick=PICK)
    def compute(self, pick: int) -> None:
        name, chunk = self.to_compute.pop(pick % len(self.to_compute))
        self._of_sender(self.sender.compute(chunk, name))

    @precondition(lambda self: self.messages)
    @rule(pick=PICK, comes_again=st.sampled_from([False, False, True]))
    def deliver(self, pick: int, comes_again: bool) -> None:
        at = pick % len(self.messages)
        is_to_receiver, payload = self.messages[at] if comes_again else self.messages.pop(at)
        if is_to_receiver:
            self._tell_receiver(rx.MessageArrived(session=SESSION, message=decode(payload)))
        else:
            self._tell_sender(tx.MessageArrived(session=SESSION, message=decode(payload)))

    @rule()
    def go_on(self) -> None:
        """As most of the time: messages in order, their answers too, the newest ack, and gathers; writes take longer."""
        for _ in range(50):
            if self.messages:
                self.deliver(0, False)
            elif self.gathering:
                self.finish_gather(0)
            elif self.acks:
                self.hear_an_ack(0, True)
                if not (self.messages or self.gathering):
                    break

    @precondition(lambda self: self.messages)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        self.messages.pop(pick % len(self.messages))

    @precondition(lambda self: self.acks)
    @rule(pick=PICK, is_newest=st.booleans())
    def hear_an_ack(self, pick: int, is_newest: bool) -> None:
        """The newest, or any that was ever published, so that acks are lost, repeated and reordered."""
        ack = self.acks[-1 if is_newest else pick % len(self.acks)]
        self._tell_sender(tx.WatermarkArrived(session=SESSION, watermark=ack))

    @precondition(lambda self: self.gathering)
    @rule(pick=PICK)
    def finish_gather(self, pick: int) -> None:
        gather = self.gathering.pop(pick % len(self.gathering))
        self.in_slot[gather.place] = Tag(request_id=gather.piece.request_id, route=0, chunk=gather.piece.chunk.index)
        self._tell_sender(tx.GatherFinished(place=gather.place, digest=7))

    @precondition(lambda self: self._landing_keys())
    @rule(pick=PICK, breaks=st.sampled_from([False, False, True]))
    def land(self, pick: int, breaks: bool) -> None:
        """A write ends in the ring; two-sided, it or a decline has met its receive."""
        keys = self._landing_keys()
        shipment = self.shipments.pop(keys[pick % len(keys)])
        post = self.posts.pop(keys[pick % len(keys)], None)
        num_bytes = 0
        if shipment.grant is not None and shipment.tag is not None:
            num_bytes = shipment.num_bytes
            if not self.is_one_sided:
                self.memory.begin_landing(shipment.number, shipment.grant, num_bytes, self.given_up)
            if breaks:
                self._break(shipment.tag)
            self.memory.end_landing(shipment.number, shipment.grant, num_bytes, shipment.tag, is_broken=breaks)
        if post is not None:
            require(shipment.grant in (None, post.piece.grant), f"{shipment} has met {post}")
            self.memory.settle(post.piece.grant, post.piece.num_bytes)
            self._tell_receiver(rx.ReceiveSettled(grant=post.piece.grant, num_bytes=num_bytes))
        if shipment.slot is not None:
            self._tell_sender(tx.WriteFinished(place=shipment.slot))

    @precondition(lambda self: self.scattering)
    @rule(pick=PICK)
    def finish_scatter(self, pick: int) -> None:
        scatter, is_intact = self.scattering.pop(pick % len(self.scattering))
        self.memory.end_scatter(scatter.piece.grant, scatter.piece.num_bytes)
        self._tell_receiver(rx.ScatterFinished(grant=scatter.piece.grant, is_intact=is_intact))

    @precondition(lambda self: self.started)
    @rule(pick=PICK, is_at_decode=st.booleans())
    def give_up(self, pick: int, is_at_decode: bool) -> None:
        name = self.started[pick % len(self.started)]
        self.excused.add(name)
        self.news.append(name)
        self._tell_of_failure(name, is_at_decode=is_at_decode)

    @precondition(lambda self: self.news)
    @rule(pick=PICK, is_at_decode=st.booleans())
    def leaders_tell(self, pick: int, is_at_decode: bool) -> None:
        self._tell_of_failure(self.news[pick % len(self.news)], is_at_decode=is_at_decode)

    @rule()
    def tick(self) -> None:
        self.sender.now_s += 2.0
        self.receiver.now_s += 2.0
        self._tell_sender(tx.Tick())
        self._tell_receiver(rx.Tick())

    def teardown(self) -> None:
        """From now on all works, and all must end."""
        if not hasattr(self, "sender"):
            return
        for _ in range(60):
            self.tick()
            for name in self.news:
                self._tell_of_failure(name, is_at_decode=True)
                self._tell_of_failure(name, is_at_decode=False)
            while self.to_compute:
                self.compute(0)
            while self._is_moving():
                pass
            self.acks.append(self.receiver.ring.watermark())
            self.hear_an_ack(0, True)
            if self._is_quiet():
                break
        assert self._is_quiet(), (self.posts, self.shipments, self.at_sender, self.at_receiver)
        ring = self.receiver.ring
        assert ring.live_bytes == ring.quarantined_bytes == 0 and ring.position == ring.head  # R5
        self.memory.require_idle()
        for name in self.started:
            if name not in self.excused:
                assert (self.at_sender.get(name), self.at_receiver.get(name)) == ("sent", "complete"), name

    def _is_moving(self) -> bool:
        for step, args in (
            (self.deliver, (0, False)) if self.messages else (None, ()),
            (self.finish_gather, (0,)) if self.gathering else (None, ()),
            (self.land, (0, False)) if self._landing_keys() else (None, ()),
            (self.finish_scatter, (0,)) if self.scattering else (None, ()),
        ):
            if step is not None:
                step(*args)  # type: ignore[operator]
                return True
        return False

    def _is_quiet(self) -> bool:
        are_idle = self.sender.machine.is_idle and self.receiver.machine.is_idle
        return are_idle and not (self.sender.machine.num_spent_keys or self.posts or self.shipments or self.messages)

    # The owners of the two machines

    def _tell_sender(self, event: tx.Event) -> None:
        self._of_sender(self.sender.tell(event))

    def _tell_receiver(self, event: rx.Event) -> None:
        self._of_receiver(self.receiver.tell(event))

    def _of_sender(self, actions: list[tx.Action]) -> None:
        for action in actions:
            match action:
                case tx.Send():
                    self.messages.append((True, encode(action.message)))
                case tx.StartGather():
                    self.in_slot.pop(action.place, None)
                    self.gathering.append(action)
                case tx.StartWrite():
                    tag = self.in_slot[action.place]
                    self._ship(
                        action.key,
                        Shipment(
                            number=action.key,
                            grant=action.piece.granted,
                            num_bytes=action.piece.num_bytes,
                            slot=action.place,
                            tag=tag,
                        ),
                    )
                    if self.is_one_sided:
                        self.memory.begin_landing(action.key, action.piece.granted, action.piece.num_bytes, self.given_up)
                case tx.Decline():
                    self._ship(action.key, Shipment(number=action.key))
                    if self.is_one_sided:
                        del self.shipments[action.key]  # nobody is there to be told
                case tx.OutgoingSent():
                    self._note(self.at_sender, action.request_id, "sent")
                case tx.OutgoingFailed():
                    self._note(self.at_sender, action.request_id, "failed")
                    self.news.append(action.request_id)
                case tx.CloseSession():
                    raise AssertionError(action)
                case _:
                    pass

    def _of_receiver(self, actions: list[rx.Action]) -> None:
        for action in actions:
            match action:
                case rx.Send():
                    self._note_grants(action)
                    self.messages.append((False, encode(action.message)))
                case rx.PostReceive():
                    require(action.key not in self.posts, f"key {action.key} is expected twice")
                    self.memory.post(action.piece.grant, action.piece.num_bytes, self.given_up)
                    self.posts[action.key] = action
                case rx.StartScatter():
                    tag = Tag(request_id=action.piece.request_id, route=0, chunk=action.piece.chunk.index)
                    is_intact = self.memory.begin_scatter(action.piece.grant, action.piece.num_bytes, tag)
                    self.scattering.append((action, is_intact))
                case rx.PublishWatermark():
                    self.acks.append(self.receiver.ring.watermark())
                case rx.IncomingComplete():
                    self.given_up.add(action.request_id)  # all of it is scattered: nobody waits for its bytes
                    self._note(self.at_receiver, action.request_id, "complete")
                case rx.IncomingFailed():
                    self.given_up.add(action.request_id)
                    self.news.append(action.request_id)
                case rx.IncomingDrained():
                    self._note(self.at_receiver, action.request_id, "drained")
                case rx.CloseSession():
                    raise AssertionError(action)
                case _:
                    pass

    def _ship(self, key: int, shipment: Shipment) -> None:
        require(key not in self.used_keys, f"key {key} is sent twice")
        self.used_keys.add(key)
        self.shipments[key] = shipment

    def _landing_keys(self) -> list[int]:
        return [key for key in self.shipments if self.is_one_sided or key in self.posts]

    def _note_grants(self, action: rx.Send) -> None:
        for issued in getattr(action.message, "grants", ()):
            grant: Any = (action.message.request_id, issued.chunk, issued.end)
            require(self.issued.setdefault(issued.begin, grant) == grant, f"R3: {issued} was {self.issued[issued.begin]}")

    def _note(self, outcomes: dict[str, str], name: str, outcome: str) -> None:
        require(name not in outcomes, f"{name} ends twice: {outcomes.get(name)}, {outcome}")
        outcomes[name] = outcome

    def _break(self, tag: Tag) -> None:
        self.broken[tag] = self.broken.get(tag, 0) + 1
        if self.broken[tag] > 1:
            self.excused.add(tag.request_id)

    def _tell_of_failure(self, name: str, *, is_at_decode: bool) -> None:
        if is_at_decode:
            self.given_up.add(name)
            self._of_receiver(self.receiver.cancel(name))
        else:
            self._tell_sender(tx.OutgoingAborted(request_id=name, reason="failed elsewhere"))


TestNetwork = Network.TestCase
TestNetwork.settings = settings(
    max_examples=settings().max_examples if settings().max_examples > 100 else 150, stateful_step_count=80, deadline=None
)
