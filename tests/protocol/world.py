"""A simulated cluster around the real `Sender` and `Receiver`: everything that could go wrong, checked after every event.

One seed is one history. The world plays engines, kernels, data plane, control network, watermark streams and the two
leaders, which start requests on all ranks and spread the news of a failure. Faults are injected until `healed_at`; after
that everything works and goes on ticking, and the world must become empty: that is what `run()` asserts, besides all that
memory.py and links.py assert on the way.

Time is an integer; think of milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from tests.protocol.links import Faults, Link, Post, Shipment
from tests.protocol.machines import SLOT, incoming, outgoing
from tests.protocol.memory import RingMemory, Tag, WorldError, require
from transfer.chunk import Chunk, ChunkPlan, split_into_chunks
from transfer.layout import DType, KVLayout, Range, Route, Shard, routes, wire_bytes
from transfer.messages import GrantsIssued, Message, decode, encode
from transfer.piece import RankRequest, SessionRoute
from transfer.receive import events as rx
from transfer.receive.receiver import Receiver
from transfer.ring import ALIGNMENT_BYTES, Grant, StagingAllocator, Watermark, grant_key
from transfer.send import events as tx
from transfer.send.sender import Sender

TICK = 25
HEARTBEAT = 50
REPEAT_AFTER = 60
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=12, head_dim=4, dtype=DType.FLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """One world; `spare_cells` is what each ring has beyond its largest chunk, `direct` the percentage of direct sessions.

    `signals` is the percentage of a direct session's gathers that send a signal.
    """

    prefill_tp: int = 4
    decode_tp: int = 2
    is_one_sided: bool = False
    is_revocable: bool = True
    direct: int = 0
    signals: int = 0
    spare_cells: int = 2
    num_slots: int = 2
    grants_ahead: int = 4
    chunk_tokens: int = 4
    layers_per_group: int = 0
    token_layers: int = 0
    num_requests: int = 4
    max_tokens: int = 20
    arriving_tokens: int = 0  # tokens of a request for which there are pages at a time; 0 means all
    has_heartbeats: bool = True  # watermarks for every writer, again and again
    faults: Faults = field(default_factory=Faults)
    healed_at: int = 600
    deadline: int = 20_000


@dataclass(slots=True, kw_only=True, eq=False)
class SenderRank:
    rank: int
    incarnation: int
    machine: Sender
    commands_until: int = 0
    slots: dict[int, Tag | None] = field(default_factory=dict)
    readers: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    gathering: dict[int, tx.StartGather] = field(default_factory=dict)
    computed: dict[tuple[str, int], object] = field(default_factory=dict)
    source_released: set[str] = field(default_factory=set)
    outcome: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiverRank:
    rank: int
    incarnation: int
    machine: Receiver
    ring: RingMemory
    commands_until: int = 0
    scattering: dict[int, rx.StartScatter] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)  # nobody waits for their bytes
    freed: set[str] = field(default_factory=set)  # their pages belong to others
    num_with_pages: dict[str, int] = field(default_factory=dict)  # leading tokens of a request that have pages
    issued: dict[int, tuple[Tag, int]] = field(default_factory=dict)  # begin -> whose, end
    outcome: dict[str, str] = field(default_factory=dict)
    num_failures_said: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestPlan:
    request: RankRequest  # without routes: each rank has its own
    chunks: tuple[Chunk, ...]
    links: dict[tuple[int, int], Link]
    excuses: set[str] = field(default_factory=set)
    is_over: bool = False  # the leaders know that it failed

    @property
    def request_id(self) -> str:
        return self.request.request_id


class World:
    """See the module's docstring.

    Args:
        config: Sizes, and what goes wrong.
        seed: Fixes the history.
    """

    def __init__(self, config: WorldConfig, seed: int) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.now = 0
        self.faults = config.faults
        self.num_events = 0
        self._busy_until = config.healed_at + 4 * HEARTBEAT
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._routes = routes(LAYOUT, Shard(tp_size=config.prefill_tp), Shard(tp_size=config.decode_tp))
        self._plan = ChunkPlan(
            chunk_tokens=config.chunk_tokens, layers_per_group=config.layers_per_group, token_layers=config.token_layers
        )
        self._capacity_bytes = (self._largest_cells() + config.spare_cells) * ALIGNMENT_BYTES
        self.corruptions: dict[Tag, int] = {}
        self.happened: Counter[str] = Counter()  # faults, by their names in `Faults`
        self.signals_seen: Counter[str] = Counter()  # used or given up
        self.senders = [self._new_sender(rank) for rank in range(config.prefill_tp)]
        self.receivers = [self._new_receiver(rank) for rank in range(config.decode_tp)]
        self.links: dict[int, Link] = {}
        self.current: dict[tuple[int, int], Link] = {}
        self.requests: dict[str, RequestPlan] = {}
        for route in self._routes:
            if (route.prefill_rank, route.decode_rank) not in self.current:
                self._open(route.prefill_rank, route.decode_rank)
        self._schedule_history()

    def _largest_cells(self) -> int:
        chunk = split_into_chunks(self._plan, num_tokens=self.config.chunk_tokens, num_layers=LAYOUT.num_layers)[0]
        sizes = [self._size(route, chunk, self.config.chunk_tokens) for route in self._routes]
        return -(-max(sizes) // ALIGNMENT_BYTES)

    def _size(self, route: Route, chunk: Chunk, num_tokens: int) -> int:
        return wire_bytes(LAYOUT, route, tokens=chunk.tokens, layers=chunk.layers, num_tokens=num_tokens, dtype=LAYOUT.dtype)

    # Running

    def run(self) -> None:
        """Play the history to its end.

        Raises:
            WorldError, LocalProtocolError: A rule was broken, or something never ended.
        """
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            act()
            self.num_events += 1
            if self.now > self._busy_until and self._is_quiet():
                break
            if self.now >= self.config.deadline:
                raise WorldError(f"wedged: {self._leftovers()}")
        self._check_end()

    def at(self, when: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), act))

    def after(self, longest: int, act: Callable[[], None]) -> None:
        """Do it after a random while, now at the earliest."""
        self.at(self.now + self.random.randint(0, longest), act)

    def chance(self, percent: int) -> bool:
        return percent > 0 and self.random.randrange(100) < percent

    def _schedule_history(self) -> None:
        config, faults = self.config, self.config.faults
        for number in range(config.num_requests):
            self.after(config.healed_at * 2 // 3, lambda number=number: self._start_request(f"r{number}"))  # type: ignore[misc]
        pairs = sorted(self.current)
        for _ in range(faults.link_deaths):
            pair = self.random.choice(pairs)
            self.after(config.healed_at, lambda pair=pair: self._break(self.current[pair]))  # type: ignore[misc]
        for _ in range(faults.sender_restarts):
            self.after(config.healed_at, lambda: self._restart_sender(self.random.randrange(config.prefill_tp)))
        for _ in range(faults.receiver_restarts):
            self.after(config.healed_at, lambda: self._restart_receiver(self.random.randrange(config.decode_tp)))
        self.at(config.healed_at, self._heal)
        self.after(TICK, self._tick)
        if config.has_heartbeats:
            self.after(HEARTBEAT, self._heartbeat)

    def _heal(self) -> None:
        self.faults = Faults()

    def _tick(self) -> None:
        self.at(self.now + TICK, self._tick)
        for sender in self.senders:
            self.tell_sender(sender, tx.Tick())
        for receiver in self.receivers:
            self.tell_receiver(receiver, rx.Tick())

    def _heartbeat(self) -> None:
        self.at(self.now + HEARTBEAT, self._heartbeat)
        for receiver in self.receivers:
            self._publish(receiver)

    def _is_quiet(self) -> bool:
        are_idle = all(s.machine.is_idle for s in self.senders) and all(r.machine.is_idle for r in self.receivers)
        unended = any(receiver.machine.num_lost_sessions for receiver in self.receivers)
        spent = any(sender.machine.num_spent_keys for sender in self.senders)
        work = any(link.posts or link.shipments for link in self.links.values() if link.is_live)
        is_started = len(self.requests) == self.config.num_requests  # some wait until every session is open again
        return is_started and not spent and not work and not unended and are_idle and self._are_all_attached()

    def _are_all_attached(self) -> bool:
        return all(link.is_live for link in self.current.values())

    # Processes and sessions

    def _new_sender(self, rank: int) -> SenderRank:
        config, incarnation = self.config, self.random.getrandbits(63) + 1
        settings = tx.SenderSettings(
            num_slots=config.num_slots,
            slot_bytes=SLOT,
            grants_ahead=config.grants_ahead,
            repeat_after_s=float(REPEAT_AFTER),
            write_timeout_s=3000.0,
        )
        machine = Sender(settings, incarnation=incarnation)
        return SenderRank(rank=rank, incarnation=incarnation, machine=machine)

    def _new_receiver(self, rank: int) -> ReceiverRank:
        incarnation = self.random.getrandbits(63) + 1
        settings = rx.ReceiverSettings(repeat_after_s=float(REPEAT_AFTER))
        machine = Receiver(settings, StagingAllocator(self._capacity_bytes, incarnation=incarnation))
        memory = RingMemory(self._capacity_bytes)
        return ReceiverRank(rank=rank, incarnation=incarnation, machine=machine, ring=memory)

    def _open(self, prefill_rank: int, decode_rank: int) -> None:
        sender, receiver = self.senders[prefill_rank], self.receivers[decode_rank]
        is_direct = self.chance(self.config.direct)
        link = Link(
            world=self,
            number=next(self._numbers),
            prefill_rank=prefill_rank,
            decode_rank=decode_rank,
            sender_incarnation=sender.incarnation,
            receiver_incarnation=receiver.incarnation,
            ring=receiver.ring,
            is_direct=is_direct,
            is_revocable=self.config.is_revocable and not is_direct,
        )
        self.links[link.number] = self.current[prefill_rank, decode_rank] = link
        attached = rx.ReceiverSessionOpened(
            session=link.number, incarnation=sender.incarnation, is_one_sided=self.config.is_one_sided
        )
        self.tell_receiver(receiver, attached)
        opened = tx.SenderSessionOpened(
            session=link.number,
            incarnation=receiver.incarnation,
            ring_capacity_bytes=self._capacity_bytes,
            is_direct=is_direct,
        )
        self.tell_sender(sender, opened)
        self._publish(receiver, sessions=[link.number])  # rule 4

    def _break(self, link: Link) -> None:
        """Each end notices by itself, in either order; a frozen writer late, which matters where it can still write."""
        self.happened["link_deaths"] += link.is_live
        self.after(60 if link.is_revocable else 400, lambda: self._close_at_sender(link, "link lost"))
        self.after(60, lambda: self._close_at_receiver(link, "link lost"))

    def _close_at_sender(self, link: Link, reason: str) -> None:
        if not link.is_open_at_sender:
            return
        self._excuse(link)
        sender = self.senders[link.prefill_rank]
        link.close_at_sender(is_dead=sender.incarnation != link.sender_incarnation)
        for readers in sender.readers.values():
            readers.difference_update(s.number for s in link.shipments.values())
        if sender.incarnation == link.sender_incarnation:
            for slot, readers in sender.readers.items():
                sender.readers[slot] = {number for number in readers if number // 1_000_000 != link.number}
            self.tell_sender(sender, tx.SenderSessionLost(session=link.number, reason=reason))
        self._closed(link, lambda: self._close_at_receiver(link, "peer closed"))

    def _close_at_receiver(self, link: Link, reason: str) -> None:
        if not link.is_open_at_receiver:
            return
        self._excuse(link)
        link.close_at_receiver()
        receiver = self.receivers[link.decode_rank]
        if receiver.incarnation == link.receiver_incarnation:
            is_over = link.is_revocable or (not link.can_land and self.chance(50))
            self.tell_receiver(receiver, rx.ReceiverSessionLost(session=link.number, reason=reason, is_over=is_over))
            if not is_over and not link.can_land:
                self.after(60, lambda: self._say_over(link))
        self._closed(link, lambda: self._close_at_sender(link, "peer closed"))

    def access_ended(self, link: Link) -> None:
        """Nothing of an unrevocable link can land any more; its receiver, if it has closed, finds out."""
        if not link.is_open_at_receiver:
            self.after(60, lambda: self._say_over(link))

    def _say_over(self, link: Link) -> None:
        receiver = self.receivers[link.decode_rank]
        if receiver.incarnation == link.receiver_incarnation:
            self.tell_receiver(receiver, rx.ReceiverSessionOver(session=link.number))

    def _closed(self, link: Link, close_other: Callable[[], None]) -> None:
        if link.is_open_at_receiver or (link.is_open_at_sender and link.is_revocable):
            self.after(60, close_other)
            return
        if link.is_open_at_sender:
            self.after(400, close_other)
            if self.chance(50):
                return
        self.after(60, lambda: self._reopen(link))  # perhaps while the old writer has not noticed, and still writes

    def _reopen(self, link: Link) -> None:
        if self.current[link.prefill_rank, link.decode_rank] is link:
            self._open(link.prefill_rank, link.decode_rank)

    def _excuse(self, link: Link) -> None:
        for plan in self.requests.values():
            if link in plan.links.values():
                plan.excuses.add("session lost")

    def _restart_sender(self, rank: int) -> None:
        self.happened["sender_restarts"] += 1
        self.senders[rank] = self._new_sender(rank)
        self._bury([link for link in self.current.values() if link.prefill_rank == rank])

    def _restart_receiver(self, rank: int) -> None:
        self.happened["receiver_restarts"] += 1
        self.receivers[rank] = self._new_receiver(rank)
        self._bury([link for link in self.current.values() if link.decode_rank == rank])

    def _bury(self, links: list[Link]) -> None:
        """End the sessions of a process that died, and fail its requests, as the leaders do."""
        for link in links:
            self._break(link)
        for plan in self.requests.values():
            plan.excuses.add("restart")
            self._spread_failure(plan.request_id)

    # Leaders

    def _start_request(self, request_id: str) -> None:
        if not self._are_all_attached():
            self.after(40, lambda: self._start_request(request_id))
            return
        config = self.config
        num_tokens = self.random.randint(1, config.max_tokens)
        start_token = self.random.choice([0, self.random.randrange(num_tokens)])
        chunks = split_into_chunks(self._plan, num_tokens=num_tokens, num_layers=LAYOUT.num_layers, start_token=start_token)
        request = incoming(request_id, (), num_tokens=num_tokens, start_token=start_token, layout=LAYOUT, plan=self._plan)
        plan = RequestPlan(request=request, chunks=chunks, links=dict(self.current))
        self.requests[request_id] = plan
        self._busy_until = max(self._busy_until, self.now + 4 * HEARTBEAT)
        latest = max(self._command_receiver(rank, lambda rank=rank: self._expect(plan, rank)) for rank in range(config.decode_tp))  # type: ignore[misc]
        for rank in range(config.prefill_tp):
            self._command_sender(rank, lambda rank=rank: self._start(plan, rank), not_before=latest)  # type: ignore[misc]
        if self.chance(self.faults.cancel):
            plan.excuses.add("cancelled")
            self.happened["cancel"] += 1
            self.after(250, lambda: self._spread_failure(request_id, at_decode_only=self.chance(50)))
        if self.chance(self.faults.abort):
            plan.excuses.add("aborted")
            self.happened["abort"] += 1
            self.after(250, lambda: self._abort_one_sender(request_id))

    def _command_receiver(self, rank: int, act: Callable[[], None]) -> int:
        receiver = self.receivers[rank]
        receiver.commands_until = max(receiver.commands_until, self.now + self.random.randint(0, 10))
        self.at(receiver.commands_until, lambda: act() if self.receivers[rank] is receiver else None)
        return receiver.commands_until

    def _command_sender(self, rank: int, act: Callable[[], None], *, not_before: int = 0) -> None:
        sender = self.senders[rank]
        sender.commands_until = max(sender.commands_until, not_before, self.now + self.random.randint(0, 10))
        self.at(sender.commands_until, lambda: act() if self.senders[rank] is sender else None)

    def _expect(self, plan: RequestPlan, rank: int) -> None:
        mine = tuple(
            SessionRoute(route=route, session=plan.links[route.prefill_rank, rank].number)
            for route in self._routes
            if route.decode_rank == rank
        )
        self.receivers[rank].expected.add(plan.request_id)
        self.tell_receiver(self.receivers[rank], rx.IncomingExpected(request=replace(plan.request, routes=mine)))
        if self.config.arriving_tokens:
            self._free_arrived(self.receivers[rank], plan, plan.request.start_token)

    def _free_arrived(self, receiver: ReceiverRank, plan: RequestPlan, num_arrived: int) -> None:
        """Tell the receiver that the pages of arrived tokens are free, so that later tokens have pages."""
        end = max(receiver.num_with_pages.get(plan.request_id, 0), num_arrived + self.config.arriving_tokens)
        num_tokens = plan.request.num_tokens
        receiver.num_with_pages[plan.request_id] = end
        held = Range(begin=end, end=num_tokens) if end < num_tokens else None
        self.tell_receiver(receiver, rx.ArrivalsHeld(request_id=plan.request_id, tokens=held))

    def _start(self, plan: RequestPlan, rank: int) -> None:
        mine = tuple(
            SessionRoute(route=route, session=plan.links[rank, route.decode_rank].number)
            for route in self._routes
            if route.prefill_rank == rank
        )
        sender = self.senders[rank]
        self.tell_sender(sender, tx.OutgoingStarted(request=outgoing(plan.request, mine)))
        self.after(40, lambda: self._compute(sender, plan, 0))

    def _compute(self, sender: SenderRank, plan: RequestPlan, chunk: int) -> None:
        if self.senders[sender.rank] is not sender or sender.outcome.get(plan.request_id) == "failed":
            return  # the engine stops with its process, and after a failure
        event = object()
        sender.computed[plan.request_id, chunk] = event
        self.tell_sender(sender, tx.ChunkComputed(request_id=plan.request_id, chunk=chunk, event=event))
        if chunk + 1 < len(plan.chunks):
            self.after(40, lambda: self._compute(sender, plan, chunk + 1))

    def _abort_one_sender(self, request_id: str) -> None:
        rank = self.random.randrange(self.config.prefill_tp)
        abort = tx.OutgoingAborted(request_id=request_id, reason="engine failed")
        self._command_sender(rank, lambda: self.tell_sender(self.senders[rank], abort))
        self.after(100, lambda: self._spread_failure(request_id))

    def _spread_failure(self, request_id: str, *, at_decode_only: bool = False) -> None:
        plan = self.requests[request_id]
        if plan.is_over:
            return
        plan.is_over = not at_decode_only
        for rank in range(self.config.decode_tp):
            cancel = rx.IncomingCancelled(request_id=request_id, reason="failed elsewhere")
            self._command_receiver(rank, lambda rank=rank, cancel=cancel: self._cancel(rank, cancel))  # type: ignore[misc]
        if not at_decode_only:
            for rank in range(self.config.prefill_tp):
                abort = tx.OutgoingAborted(request_id=request_id, reason="failed elsewhere")
                self._command_sender(rank, lambda rank=rank, abort=abort: self.tell_sender(self.senders[rank], abort))  # type: ignore[misc]

    def _cancel(self, rank: int, cancel: rx.IncomingCancelled) -> None:
        self.receivers[rank].given_up.add(cancel.request_id)
        self.tell_receiver(self.receivers[rank], cancel)

    # Messages

    def _send(self, link: Link, direction: str, message: Message) -> None:
        payload = encode(message)
        for when in link.delivery_times(direction):
            self.at(when, lambda: self._deliver(link, direction, decode(payload)))

    def _deliver(self, link: Link, direction: str, message: Message) -> None:
        if direction == "to_receiver":
            self.tell_receiver(self.receivers[link.decode_rank], rx.MessageArrived(session=link.number, message=message))
        else:
            self.tell_sender(self.senders[link.prefill_rank], tx.MessageArrived(session=link.number, message=message))

    def _publish(self, receiver: ReceiverRank, *, sessions: Collection[int] | None = None) -> None:
        watermark = receiver.machine.ring.watermark()
        for link in list(self.current.values()):
            if sessions is not None and link.number not in sessions:
                continue
            if link.is_open_at_receiver and link.receiver_incarnation == receiver.incarnation:
                for when in link.delivery_times("watermark"):
                    self.at(when, lambda link=link: self._hear(link, watermark))  # type: ignore[misc]

    def _hear(self, link: Link, watermark: Watermark) -> None:
        if link.is_open_at_sender and self.senders[link.prefill_rank].incarnation == link.sender_incarnation:
            event = tx.WatermarkArrived(session=link.number, watermark=watermark)
            self.tell_sender(self.senders[link.prefill_rank], event)

    # The sender's owner

    def tell_sender(self, sender: SenderRank, event: tx.Event) -> None:
        if self.senders[sender.rank] is not sender:
            return
        actions = sender.machine.handle(event, float(self.now))
        sender.machine.check_invariants()
        for action in actions:
            match action:
                case tx.Send():
                    self._send(self._own_link(sender, action.session), "to_receiver", action.message)
                case tx.StartGather():
                    self._start_gather(sender, action)
                case tx.StartWrite():
                    self._start_write(sender, action)
                case tx.Decline():
                    link = self._own_link(sender, action.session)
                    link.write(Shipment(number=self._shipment_number(link), key=action.key, grant=None))
                case tx.SourceReleased():
                    self._release_source(sender, action.request_id)
                case tx.OutgoingSent():
                    self._end_at_sender(sender, action.request_id, "sent")
                case tx.OutgoingFailed():
                    self._end_at_sender(sender, action.request_id, "failed")
                case tx.CloseSession():
                    self._close_at_sender(self.links[action.session], action.reason)
                case tx.MessageDropped():
                    pass

    def _own_link(self, sender: SenderRank, number: int) -> Link:
        link = self.links[number]
        require(
            link.is_open_at_sender and link.prefill_rank == sender.rank,
            f"sender {sender.rank} uses session {number}, which it lost",
        )
        return link

    def _shipment_number(self, link: Link) -> int:
        return link.number * 1_000_000 + next(self._numbers)

    def _start_gather(self, sender: SenderRank, action: tx.StartGather) -> None:
        is_staged = action.place < self.config.num_slots * SLOT
        require(is_staged != self.links[action.piece.session].is_direct, f"slot {action.place} is for another kind of session")
        require(action.place not in sender.gathering, f"two gathers into slot {action.place}")
        require(not sender.readers[action.place], f"slot {action.place} is overwritten while a write reads it")
        require(
            action.piece.request_id not in sender.source_released,
            f"gather of {action.piece.request_id} after its source was released",
        )
        is_computed = (
            sender.computed.get((action.piece.request_id, action.piece.chunk.index)) is action.event and action.event is not None
        )
        require(is_computed, f"rule 13: gather of chunk {action.piece.chunk.index} is not behind its event")
        sender.gathering[action.place] = action
        sender.slots[action.place] = None
        link = self.links[action.piece.session]
        tag = Tag(request_id=action.piece.request_id, route=action.piece.route.index, chunk=action.piece.chunk.index)
        if not link.is_direct:
            self.after(25, lambda: self._gathered(sender, action, tag))
        elif not link.is_open_at_sender:
            self.after(25, lambda: self._gathered(sender, action, None))  # closed since: nothing is gathered
        else:
            self._require_own_grant(link, action.piece.granted, tag)
            shipment = link.begin_store(self._shipment_number(link), action.piece.granted, action.piece.num_bytes, tag)
            is_signalled = action.piece.attempt == 0 and self.chance(self.config.signals)
            if is_signalled:
                self.after(10, lambda: self._signal(link, action.piece.granted, tag))
            self.after(60, lambda: self._stored(sender, action, link, shipment, is_signalled=is_signalled))

    def _signal(self, link: Link, grant: Grant, tag: Tag) -> None:
        """Report the start of a gather whose scatter is armed, or the end of another one."""
        receiver = self.receivers[link.decode_rank]
        if not link.is_open_at_receiver or receiver.incarnation != link.receiver_incarnation or self.chance(10):
            return
        if self.chance(70):
            if receiver.machine.awaits_signal(link.number, grant.begin):
                self.tell_receiver(receiver, rx.GatherSignalled(session=link.number, begin=grant.begin, digest=None))
        elif grant.begin in link.ended_stores:
            self.tell_receiver(receiver, rx.GatherSignalled(session=link.number, begin=grant.begin, digest=digest_of(tag)))
        else:
            self.after(1, lambda: self._signal(link, grant, tag))

    def _stored(self, sender: SenderRank, action: tx.StartGather, link: Link, shipment: Shipment, *, is_signalled: bool) -> None:
        link.end_store(shipment)
        # Its host hears of it later than the peer's stream.
        longest = 40 if is_signalled else 0
        self.after(longest, lambda: self._gathered(sender, action, None, is_signalled=is_signalled))

    def _gathered(self, sender: SenderRank, action: tx.StartGather, in_slot: Tag | None, *, is_signalled: bool = False) -> None:
        del sender.gathering[action.place]
        sender.slots[action.place] = in_slot
        tag = Tag(request_id=action.piece.request_id, route=action.piece.route.index, chunk=action.piece.chunk.index)
        finished = tx.GatherFinished(place=action.place, digest=digest_of(tag), is_signalled=is_signalled)
        self.tell_sender(sender, finished)

    def _start_write(self, sender: SenderRank, action: tx.StartWrite) -> None:
        link = self._own_link(sender, action.piece.session)
        tag = sender.slots.get(action.place)
        require(tag is not None and action.place not in sender.gathering, f"write from slot {action.place}, which holds nothing")
        assert tag is not None
        self._require_own_grant(link, action.piece.granted, tag)
        require(
            action.key in (grant_key(action.piece.granted.begin, 0), grant_key(action.piece.granted.begin, 1)),
            f"key {action.key} is another grant's",
        )
        shipment = Shipment(
            number=self._shipment_number(link),
            key=action.key,
            grant=action.piece.granted,
            num_bytes=action.piece.num_bytes,
            tag=tag,
            slot=action.place,
        )
        sender.readers[action.place].add(shipment.number)
        link.write(shipment)

    def _require_own_grant(self, link: Link, grant: Grant, tag: Tag) -> None:
        receiver = self.receivers[link.decode_rank]
        if receiver.incarnation == link.receiver_incarnation:
            require(receiver.issued.get(grant.begin) == (tag, grant.end), f"R3: {grant} is not the grant of {tag}")

    def write_ended(self, link: Link, shipment: Shipment, failure: str | None = None) -> None:
        sender = self.senders[link.prefill_rank]
        if shipment.is_over or not link.is_open_at_sender or sender.incarnation != link.sender_incarnation:
            return
        assert shipment.slot is not None
        shipment.is_over = True
        sender.readers[shipment.slot].discard(shipment.number)
        if failure is None:
            self.tell_sender(sender, tx.WriteFinished(place=shipment.slot))
        else:
            self.tell_sender(sender, tx.StagedWriteFailed(place=shipment.slot, reason=failure))

    def _release_source(self, sender: SenderRank, request_id: str) -> None:
        require(request_id not in sender.source_released, f"source of {request_id} released twice")
        is_read = any(action.piece.request_id == request_id for action in sender.gathering.values())
        require(not is_read, f"source of {request_id} released while a gather reads it")
        sender.source_released.add(request_id)

    def _end_at_sender(self, sender: SenderRank, request_id: str, outcome: str) -> None:
        require(request_id not in sender.outcome, f"sender {sender.rank} ends {request_id} twice")
        require(request_id in sender.source_released, f"{request_id} ended, and its source is not released")
        sender.outcome[request_id] = outcome
        if outcome == "failed":
            mine = [shipment for link in self.links.values() if link.is_open_at_sender for shipment in link.shipments.values()]
            is_writing = any(
                s.tag is not None and s.tag.request_id == request_id and not s.is_over and s.number in sender.readers[s.slot or 0]
                for s in mine
            )
            require(not is_writing, f"rule 9: {request_id} reported failed while a write of it is under way")
            self.after(30, lambda: self._spread_failure(request_id))

    # The receiver's owner

    def tell_receiver(self, receiver: ReceiverRank, event: rx.Event) -> None:
        if self.receivers[receiver.rank] is not receiver:
            return
        actions = receiver.machine.handle(event, float(self.now))
        receiver.machine.check_invariants()
        for action in actions:
            match action:
                case rx.Send():
                    link = self._target_link(receiver, action.session)
                    if isinstance(action.message, GrantsIssued):
                        self._note_grants(receiver, action.message)
                    self._send(link, "to_sender", action.message)
                case rx.PostReceive():
                    link = self._target_link(receiver, action.piece.session)
                    link.expect(action.key, Post(grant=action.piece.grant, num_bytes=action.piece.num_bytes))
                case rx.StartScatter():
                    self._start_scatter(receiver, action)
                case rx.PublishWatermark():
                    self._publish(receiver, sessions=action.sessions)
                case rx.IncomingArrived():
                    plan = self.requests[action.request_id]
                    self.after(30, partial(self._free_arrived, receiver, plan, action.num_tokens))
                case rx.IncomingComplete():
                    self._free_pages(receiver, action.request_id)
                    self._end_at_receiver(receiver, action.request_id, "complete")
                case rx.IncomingFailed():
                    self._fail_at_receiver(receiver, action)
                case rx.IncomingDrained():
                    self._free_pages(receiver, action.request_id)
                    self._end_at_receiver(receiver, action.request_id, "drained")
                case rx.CloseSession():
                    self._close_at_receiver(self.links[action.session], action.reason)
                case rx.MessageDropped() | rx.ChunkBroken():
                    pass

    def _target_link(self, receiver: ReceiverRank, number: int) -> Link:
        link = self.links[number]
        is_own = link.is_open_at_receiver and link.decode_rank == receiver.rank
        require(is_own, f"receiver {receiver.rank} uses session {number}, which it lost")
        return link

    def _note_grants(self, receiver: ReceiverRank, message: GrantsIssued) -> None:
        for issued in message.grants:
            tag = Tag(request_id=message.request_id, route=message.route, chunk=issued.chunk)
            known = receiver.issued.setdefault(issued.begin, (tag, issued.end))
            require(known == (tag, issued.end), f"R3: grant at {issued.begin} was {known}, and is now for {tag}")

    def receive_settled(self, link: Link, grant: Grant, num_bytes: int) -> None:
        receiver = self.receivers[link.decode_rank]
        if receiver.incarnation == link.receiver_incarnation:
            self.tell_receiver(receiver, rx.ReceiveSettled(grant=grant, num_bytes=num_bytes))

    def _start_scatter(self, receiver: ReceiverRank, action: rx.StartScatter) -> None:
        tag = Tag(request_id=action.piece.request_id, route=action.piece.route.index, chunk=action.piece.chunk.index)
        require(action.piece.request_id not in receiver.freed, f"{tag} is scattered into pages that were freed")
        num_with_pages = receiver.num_with_pages.get(tag.request_id, action.piece.chunk.tokens.end)
        require(action.piece.chunk.tokens.end <= num_with_pages, f"{tag} has no pages yet")
        require(action.digest in (None, digest_of(tag)), f"{tag} is checked against the digest of other bytes")
        require(action.piece.grant.begin not in receiver.scattering, f"two scatters of {action.piece.grant}")
        receiver.scattering[action.piece.grant.begin] = action
        if action.digest is None:
            self._wait_for_end(receiver, action, self.now + self.random.choice([20, 100]))
        else:
            self._scatter_now(receiver, action, tag)

    def _wait_for_end(self, receiver: ReceiverRank, action: rx.StartScatter, gives_up_at: int) -> None:
        """Scatter when the signal's gather has ended, or give it up."""
        link, begin = self.links[action.piece.session], action.piece.grant.begin
        if begin in link.ended_stores:
            self.signals_seen["used"] += 1
            tag = Tag(request_id=action.piece.request_id, route=action.piece.route.index, chunk=action.piece.chunk.index)
            self._scatter_now(receiver, action, tag)
        elif self.now < gives_up_at:
            self.at(self.now + 1, lambda: self._wait_for_end(receiver, action, gives_up_at))
        else:
            self.signals_seen["given up"] += 1
            del receiver.scattering[begin]
            self.tell_receiver(receiver, rx.ScatterFinished(grant=action.piece.grant, is_intact=None))

    def _scatter_now(self, receiver: ReceiverRank, action: rx.StartScatter, tag: Tag) -> None:
        is_intact = receiver.ring.begin_scatter(action.piece.grant, action.piece.num_bytes, tag)
        self.after(25, lambda: self._scattered(receiver, action, is_intact))

    def _scattered(self, receiver: ReceiverRank, action: rx.StartScatter, is_intact: bool) -> None:
        del receiver.scattering[action.piece.grant.begin]
        receiver.ring.end_scatter(action.piece.grant, action.piece.num_bytes)
        self.tell_receiver(receiver, rx.ScatterFinished(grant=action.piece.grant, is_intact=is_intact))

    def _free_pages(self, receiver: ReceiverRank, request_id: str) -> None:
        is_written = any(action.piece.request_id == request_id for action in receiver.scattering.values())
        require(not is_written, f"rule 6: pages of {request_id} are freed while a scatter writes them")
        receiver.freed.add(request_id)
        receiver.given_up.add(request_id)

    def _fail_at_receiver(self, receiver: ReceiverRank, action: rx.IncomingFailed) -> None:
        request_id = action.request_id
        require(request_id not in receiver.outcome, f"{request_id} failed at receiver {receiver.rank} after its end")
        said = receiver.num_failures_said[request_id] = receiver.num_failures_said.get(request_id, 0) + 1
        require(said == 1, f"{request_id} failed twice at receiver {receiver.rank}")
        receiver.given_up.add(request_id)
        self.after(30, lambda: self._spread_failure(request_id))

    def _end_at_receiver(self, receiver: ReceiverRank, request_id: str, outcome: str) -> None:
        require(request_id not in receiver.outcome, f"receiver {receiver.rank} ends {request_id} twice")
        receiver.outcome[request_id] = outcome

    def dead_at(self, link: Link) -> set[str]:
        """Requests whose bytes nobody waits for at the link's target."""
        receiver = self.receivers[link.decode_rank]
        return receiver.given_up if receiver.incarnation == link.receiver_incarnation else set(self.requests)

    def corrupts(self, tag: Tag) -> bool:
        if not self.chance(self.faults.corrupt):
            return False
        self.happened["corrupt"] += 1
        self.corruptions[tag] = self.corruptions.get(tag, 0) + 1
        if self.corruptions[tag] > 1:
            self.requests[tag.request_id].excuses.add("broken twice")
        return True

    # The end

    def _check_end(self) -> None:
        require(self._is_quiet(), f"never quiet: {self._leftovers()}")
        for plan in self.requests.values():
            self._check_request(plan)
        for sender in self.senders:
            require(not sender.gathering and not any(sender.readers.values()), f"sender {sender.rank} still gathers or writes")
            require(sender.machine.is_idle, f"sender {sender.rank} keeps something")
        for receiver in self.receivers:
            ring = receiver.machine.ring
            require(
                ring.live_bytes == 0 and ring.position == ring.head and ring.quarantined_bytes == 0, f"R5: ring {receiver.rank}"
            )
            require(receiver.machine.num_requests == 0, f"receiver {receiver.rank} keeps a request")
            receiver.ring.require_idle()

    def _check_request(self, plan: RequestPlan) -> None:
        request_id = plan.request_id
        sent = [sender.outcome.get(request_id) for sender in self.senders]
        received = [receiver.outcome.get(request_id) for receiver in self.receivers]
        if not plan.excuses:
            require(
                set(sent) == {"sent"} and set(received) == {"complete"},
                f"{request_id} failed without a cause: {sent}, {received}",
            )
            return
        if "restart" in plan.excuses:
            return  # a new life knows nothing of it; those that lived on are idle, which was checked
        require(None not in sent and None not in received, f"{request_id} has no outcome everywhere: {sent}, {received}")
        if "drained" not in received and plan.excuses == {"broken twice"}:
            require(False, f"{request_id} arrived broken twice and is complete")

    def _leftovers(self) -> str:
        parts = [f"now {self.now}, requests {sorted(self.requests)}"]
        for sender in self.senders:
            pieces = [piece for request in sender.machine.requests.values() for piece in request.outstanding()]
            stages = [(piece.request_id, piece.stage.name, piece.grant) for piece in pieces]
            parts.append(f"sender {sender.rank}: {stages}, {sender.machine.num_spent_keys} spent keys")
        for receiver in self.receivers:
            granted = [piece for request in receiver.machine.requests.values() for piece in request.pieces()]
            stages = [(piece.request_id, piece.stage.name, piece.grant) for piece in granted]
            parts.append(f"receiver {receiver.rank}: {stages}, {receiver.machine.num_lost_sessions} lost sessions")
        for link in self.links.values():
            if link.is_live and (link.posts or link.shipments):
                parts.append(f"session {link.number}: posts {link.posts}, shipments {list(link.shipments)}")
        return "; ".join(parts)


def digest_of(tag: Tag) -> int:
    """Stands for the digest of the bytes and their places."""
    return hash((tag.request_id, tag.route, tag.chunk)) & ((1 << 64) - 1)
