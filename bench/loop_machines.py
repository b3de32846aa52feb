"""Both protocol machines of one transfer without anything between them, for `bench.loop`: real `Sender`s and `Receiver`s.

Other work of their loops is left out: encoding messages, copying, writing. A turn is the machine's work in one wake-up of a
rank's loop: one event, or the messages that a control channel delivers at once (`WATCH_BATCH`, `WATCH_S`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import transfer.chunk
import transfer.layout
from bench.loop_turns import Watch
from transfer.chunk import ChunkPlan, largest_wire_bytes, split_into_chunks
from transfer.control.base import WATCH_BATCH, WATCH_S
from transfer.layout import KVLayout, Route, Shard, routes, wire_dtype
from transfer.piece import RankRequest, SessionRoute
from transfer.receive import events as target
from transfer.receive.receiver import Receiver
from transfer.ring import ALIGNMENT_BYTES, MAX_ATTEMPTS, Grant, StagingAllocator
from transfer.send import events as source
from transfer.send.sender import Sender
from transfer.send.staging_arena import aligned

RING_BYTES = 2 << 30  # the default on a GPU; nothing lies in it here
PLAN = ChunkPlan(chunk_tokens=128)
PREFILL_LIFE, DECODE_LIFE = 9, 5
TICK_EVERY = 200  # turns of a machine


def forget_plans() -> None:
    """Empty the caches of chunk plans: each rank is a process of its own, and a prompt of a new length is in no cache."""
    for module in (transfer.chunk, transfer.layout):
        for name in vars(module).values():
            if callable(clear := getattr(name, "cache_clear", None)):
                clear()


class _Rank:
    """A machine, and the events that wait for it."""

    def __init__(self, machine: Sender | Receiver, name: str) -> None:
        self.machine = machine
        self.name = name
        self.events: deque[Any] = deque()
        self.num_turns = 0


class Machines:
    """The ranks of two instances with their sessions, and what travels between them.

    Args:
        watch: Measures their turns.
        is_one_sided: Writes need no receive.
        plan: Staging memory has `num_slots` slots for its pieces.
    """

    def __init__(
        self,
        watch: Watch,
        layout: KVLayout,
        prefill: Shard,
        decode: Shard,
        *,
        is_one_sided: bool = True,
        ring_bytes: int = RING_BYTES,
        num_slots: int = 4,
        plan: ChunkPlan = PLAN,
        grants_ahead: int = 8,
    ) -> None:
        self.watch = watch
        self.layout, self.prefill, self.decode = layout, prefill, decode
        self.routes = routes(layout, prefill, decode)
        self.is_one_sided = is_one_sided
        self.is_frozen = False  # the writers hear nothing, and do nothing
        self.now_s = 0.0
        self.rings = [StagingAllocator(ring_bytes, incarnation=DECODE_LIFE) for _ in range(decode.num_ranks)]
        settings = target.ReceiverSettings()
        self.receivers = [_Rank(Receiver(settings, ring), "decode") for ring in self.rings]
        slot_bytes = aligned(largest_wire_bytes(plan, layout, self.routes, wire_dtype(layout, prefill, decode)))
        self._settings = source.SenderSettings(num_slots=num_slots, slot_bytes=slot_bytes, grants_ahead=grants_ahead)
        self.sessions: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count(1)
        self.replace_senders()

    def replace_senders(self) -> None:
        """Have another prefill node like that one join; the sessions of the one before stay as they are."""
        self.is_frozen = False
        ranks = range(self.prefill.num_ranks)
        self.senders = [_Rank(Sender(self._settings, incarnation=PREFILL_LIFE), "prefill") for _ in ranks]
        for pair in sorted({(route.prefill_rank, route.decode_rank) for route in self.routes}):
            self.open_session(*pair)

    def open_session(self, prefill_rank: int, decode_rank: int) -> int:
        number = next(self._numbers)
        self.sessions[number] = prefill_rank, decode_rank
        attached = target.ReceiverSessionOpened(session=number, incarnation=PREFILL_LIFE, is_one_sided=self.is_one_sided)
        self._turn(self.receivers[decode_rank], [attached])
        opened = source.SenderSessionOpened(
            session=number, incarnation=DECODE_LIFE, ring_capacity_bytes=self.rings[decode_rank].capacity_bytes, is_direct=False
        )
        self._turn(self.senders[prefill_rank], [opened])
        return number

    def session_of(self, route: Route) -> int:
        """The newest session of the two ranks."""
        return next(n for n, pair in reversed(self.sessions.items()) if pair == (route.prefill_rank, route.decode_rank))

    # What owners say

    def start(self, request_id: str, num_tokens: int, *, plan: ChunkPlan = PLAN, session: int | None = None) -> None:
        """Expect the request on every decode rank, then start it on every prefill rank.

        Args:
            session: Of all its routes; None takes the newest of each pair of ranks.
        """
        common: dict[str, Any] = {
            "request_id": request_id,
            "layout": self.layout,
            "plan": plan,
            "wire_dtype": wire_dtype(self.layout, self.prefill, self.decode),
            "digest": "xxh3-64",
            "num_tokens": num_tokens,
            "start_token": 0,
        }
        for number, rank in enumerate(self.receivers):
            mine = tuple(
                SessionRoute(route=route, session=session or self.session_of(route))
                for route in self.routes
                if route.decode_rank == number
            )
            forget_plans()
            self._turn(rank, [target.IncomingExpected(request=RankRequest(routes=mine, **common))])
        for number, rank in enumerate(self.senders):
            to = tuple(
                SessionRoute(route=route, session=session or self.session_of(route))
                for route in self.routes
                if route.prefill_rank == number
            )
            forget_plans()
            self._turn(rank, [source.OutgoingStarted(request=RankRequest(routes=to, **common))])

    def compute(self, request_id: str, chunks: Sequence[int]) -> None:
        for rank in self.senders:
            rank.events.extend(source.ChunkComputed(request_id=request_id, chunk=chunk, event=None) for chunk in chunks)

    def num_chunks(self, num_tokens: int, *, plan: ChunkPlan = PLAN) -> int:
        return len(split_into_chunks(plan, num_tokens=num_tokens, num_layers=self.layout.num_layers))

    def cancel(self, request_id: str) -> None:
        for rank in self.receivers:
            self._turn(rank, [target.IncomingCancelled(request_id=request_id, reason="its client went away")])

    def abort(self, request_id: str) -> None:
        for rank in self.senders:
            self._turn(rank, [source.OutgoingAborted(request_id=request_id, reason="its caller went away")])

    def lose(self, session: int, *, is_over: bool = True) -> None:
        """End a session, on both sides where its writer is not frozen."""
        prefill_rank, decode_rank = self.sessions.pop(session)
        lost = target.ReceiverSessionLost(session=session, reason="lost", is_over=is_over)
        self._turn(self.receivers[decode_rank], [lost])
        if not self.is_frozen:
            self._turn(self.senders[prefill_rank], [source.SenderSessionLost(session=session, reason="lost")])

    def end(self, session: int, decode_rank: int) -> None:
        """The writer of a lost session is gone."""
        self._turn(self.receivers[decode_rank], [target.ReceiverSessionOver(session=session)])

    def tick(self) -> None:
        self.now_s += 2.0
        for rank, event in (*((one, target.Tick()) for one in self.receivers), *((one, source.Tick()) for one in self.senders)):
            self._turn(rank, [event])

    def check_idle(self) -> None:
        """Raises LocalProtocolError, or AssertionError, when something is left of a request."""
        for rank in (*self.receivers, *self.senders):
            rank.machine.check_invariants()
            assert rank.machine.is_idle, f"{rank.name}: {rank.machine.num_requests} requests are left"

    # Turns

    def run(self, *, most: int = 1 << 62) -> None:
        """Let the ranks have their turns until nothing is left to do; about so many at most."""
        ranks = [*self.receivers, *self.senders]
        while most > 0 and (busy := [rank for rank in ranks if rank.events]):
            most -= len(busy)
            for rank in busy:
                self._turn(rank, self._next(rank))

    def run_sender(self) -> None:
        """Run the first prefill rank until it has no events left. Its messages are dropped."""
        while self.senders[0].events:
            self._turn(self.senders[0], self._next(self.senders[0]))

    def _next(self, rank: _Rank) -> list[Any]:
        """What one wake-up has the machine handle."""
        rank.num_turns += 1
        if rank.num_turns % TICK_EVERY == 0:
            self.now_s += 0.25
            return [target.Tick() if rank.name == "decode" else source.Tick()]
        events, kind = [rank.events.popleft()], (target.MessageArrived, source.MessageArrived)
        while isinstance(events[0], kind) and rank.events and len(events) < WATCH_BATCH and isinstance(rank.events[0], kind):
            events.append(rank.events.popleft())
        return events

    def _turn(self, rank: _Rank, events: list[Any]) -> None:
        first = events[0]
        name = f"{rank.name}: up to {len(events)} x {type(getattr(first, 'message', first)).__name__}"

        def work() -> list[Any]:
            found: list[Any] = []
            ends_s = time.thread_time() + WATCH_S
            for number, event in enumerate(events):
                if number and time.thread_time() >= ends_s:  # as a control channel does
                    rank.events.extendleft(reversed(events[number:]))
                    break
                for action in rank.machine.handle(event, self.now_s):
                    is_watermark = isinstance(action, target.PublishWatermark)
                    found.append((action, self.rings[self.receivers.index(rank)].watermark()) if is_watermark else action)
            return found

        for action in self.watch.turn(name, work):
            if rank.name == "decode":
                self._carry_out_decode(rank, action)
            else:
                self._carry_out_prefill(rank, action)

    def _carry_out_decode(self, rank: _Rank, action: Any) -> None:
        match action:
            case (target.PublishWatermark() as publish, watermark):
                number = self.receivers.index(rank)
                for session, (prefill_rank, decode_rank) in self.sessions.items():
                    if decode_rank == number and not self.is_frozen and (publish.sessions is None or session in publish.sessions):
                        event = source.WatermarkArrived(session=session, watermark=watermark)
                        self.senders[prefill_rank].events.append(event)
            case target.Send():
                if action.session in self.sessions and not self.is_frozen:
                    sender = self.senders[self.sessions[action.session][0]]
                    sender.events.append(source.MessageArrived(session=action.session, message=action.message))
            case target.StartScatter():
                rank.events.append(target.ScatterFinished(grant=action.piece.grant, is_intact=True))
            case _:
                pass

    def _carry_out_prefill(self, rank: _Rank, action: Any) -> None:
        match action:
            case source.Send():
                if action.session in self.sessions:
                    receiver = self.receivers[self.sessions[action.session][1]]
                    receiver.events.append(target.MessageArrived(session=action.session, message=action.message))
            case source.StartGather():
                rank.events.append(source.GatherFinished(place=action.place, digest=7))
            case source.StartWrite():
                rank.events.append(source.WriteFinished(place=action.place))
                if not self.is_one_sided and action.piece.session in self.sessions:
                    receiver = self.receivers[self.sessions[action.piece.session][1]]
                    receiver.events.append(target.ReceiveSettled(grant=action.piece.granted, num_bytes=action.piece.num_bytes))
            case source.Decline():
                if not self.is_one_sided and action.session in self.sessions:
                    begin = action.key // MAX_ATTEMPTS * ALIGNMENT_BYTES  # see `grant_key`
                    receiver = self.receivers[self.sessions[action.session][1]]
                    settled = target.ReceiveSettled(grant=Grant(begin, begin + ALIGNMENT_BYTES), num_bytes=0)
                    receiver.events.append(settled)
            case _:
                pass
