"""Hands for tests of one state machine alone: build a request, feed events, look at the actions."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, TypeVar

from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.messages import (
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    ChunkSize,
    GrantRefused,
    GrantRequest,
    GrantsIssued,
    IssuedGrant,
    WriterDrained,
)
from transfer.piece import RankRequest, SessionRoute, TransferTerms
from transfer.receive import events as rx
from transfer.receive.receiver import Receiver
from transfer.ring import ALIGNMENT_BYTES, Grant, StagingAllocator, Watermark
from transfer.send import events as tx
from transfer.send.sender import Sender
from transfer.transport.base import REGION_ALIGNMENT_BYTES

CELL = ALIGNMENT_BYTES
SLOT = REGION_ALIGNMENT_BYTES
"""Staging memory for one piece, however small."""
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=4, dtype=DType.FLOAT16)
PLAN = ChunkPlan(chunk_tokens=4)
WHOLE_CHUNK = 4 * 128  # bytes of a chunk of four tokens that travels on one route from one rank to one rank
PREFILL_LIFE = 11
DECODE_LIFE = 22

T = TypeVar("T")


def cells(begin: int, end: int) -> Grant:
    return Grant(begin * CELL, end * CELL)


def of_type(actions: Sequence[object], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def messages(actions: Sequence[object], kind: type[T]) -> list[T]:
    sent = [action.message for action in actions if isinstance(action, tx.Send)]
    return [message for message in sent if isinstance(message, kind)]


def count_lines(machine: Any, *files: str) -> list[int]:
    """Count the lines of `files` that each event runs from now on: what an event costs, the same on every machine."""
    counts: list[int] = []
    handle = machine.handle

    def counted(event: object, now_s: float) -> Any:
        num_lines = 0

        def trace(frame: FrameType, kind: str, argument: object) -> Any:
            nonlocal num_lines
            num_lines += frame.f_code.co_filename.endswith(files)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return handle(event, now_s)
        finally:
            sys.settrace(before)
            counts.append(num_lines)

    machine.handle = counted
    return counts


def incoming(
    request_id: str,
    routes: Sequence[SessionRoute],
    *,
    num_tokens: int,
    start_token: int = 0,
    layout: KVLayout = LAYOUT,
    plan: ChunkPlan = PLAN,
) -> RankRequest:
    terms = TransferTerms(layout=layout, wire_dtype=layout.dtype, routes=tuple(routes), digest="xxh3-64")
    return terms.request(request_id, plan=plan, num_tokens=num_tokens, start_token=start_token)


def outgoing(request: RankRequest, routes: Sequence[SessionRoute]) -> RankRequest:
    """The same request as its writer has it."""
    return dataclasses.replace(request, routes=tuple(routes))


class SenderHand:
    """Prefill rank 0 of `prefill_tp`, and its sessions: number 1 + decode rank."""

    def __init__(
        self,
        *,
        ring_cells: int = 8,
        num_slots: int = 2,
        slot_bytes: int = SLOT,
        grants_ahead: int = 4,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        write_timeout_s: float = 30.0,
        direct: frozenset[int] = frozenset(),
    ) -> None:
        settings = tx.SenderSettings(
            num_slots=num_slots, slot_bytes=slot_bytes, grants_ahead=grants_ahead, write_timeout_s=write_timeout_s
        )
        self.machine = Sender(settings, incarnation=PREFILL_LIFE)
        self.now_s = 0.0
        self.sequence = 0
        self.routes = [
            route for route in routes(LAYOUT, Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp)) if route.prefill_rank == 0
        ]
        for route in self.routes:
            number = 1 + route.decode_rank
            self.open(number, ring_cells=ring_cells, is_direct=number in direct)

    def tell(self, event: tx.Event, *, now_s: float | None = None) -> list[tx.Action]:
        self.now_s = self.now_s if now_s is None else now_s
        actions = self.machine.handle(event, self.now_s)
        self.machine.check_invariants()
        return actions

    def open(self, session: int, *, ring_cells: int = 8, is_direct: bool = False) -> None:
        self.tell(
            tx.SenderSessionOpened(
                session=session, incarnation=DECODE_LIFE, ring_capacity_bytes=ring_cells * CELL, is_direct=is_direct
            )
        )

    def start(self, request_id: str = "r", *, num_tokens: int = 8, plan: ChunkPlan = PLAN) -> list[tx.Action]:
        mine = [SessionRoute(route=route, session=1 + route.decode_rank) for route in self.routes]
        return self.tell(tx.OutgoingStarted(request=outgoing(incoming(request_id, (), num_tokens=num_tokens, plan=plan), mine)))

    def compute(self, chunk: int, request_id: str = "r", *, event: Any = None) -> list[tx.Action]:
        return self.tell(tx.ChunkComputed(request_id=request_id, chunk=chunk, event=event))

    def grant(self, grants: dict[int, Grant], request_id: str = "r", *, route: int = 0) -> list[tx.Action]:
        issued = tuple(IssuedGrant(chunk=chunk, begin=grant.begin, end=grant.end) for chunk, grant in grants.items())
        message = GrantsIssued(incarnation=DECODE_LIFE, request_id=request_id, route=route, grants=issued)
        return self.hear(message, session=1 + self._decode_rank(route))

    def _decode_rank(self, route: int) -> int:
        return next((each.decode_rank for each in self.routes if each.index == route), 0)

    def hear(
        self, message: GrantsIssued | GrantRefused | ChunkRejected | AbortTransfer | WriterDrained, *, session: int = 1
    ) -> list[tx.Action]:
        return self.tell(tx.MessageArrived(session=session, message=message))

    def refuse(self, request_id: str = "r", *, route: int = 0) -> list[tx.Action]:
        return self.hear(GrantRefused(incarnation=DECODE_LIFE, request_id=request_id, route=route, reason="no"))

    def abort(self, request_id: str = "r", *, route: int = 0, session: int = 1) -> list[tx.Action]:
        message = AbortTransfer(incarnation=DECODE_LIFE, request_id=request_id, route=route, reason="cancelled")
        return self.hear(message, session=session)

    def reject(self, begin: int, *, chunk: int = 0, attempt: int = 0, request_id: str = "r") -> list[tx.Action]:
        message = ChunkRejected(
            incarnation=DECODE_LIFE, request_id=request_id, route=0, chunk=chunk, begin=begin, attempt=attempt, reason="digest"
        )
        return self.hear(message)

    def watermark(self, position: int, *released: Grant, session: int = 1) -> list[tx.Action]:
        self.sequence += 1
        mark = Watermark(incarnation=DECODE_LIFE, sequence=self.sequence, position=position, released=released)
        return self.tell(tx.WatermarkArrived(session=session, watermark=mark))

    def gathered(self, place: int) -> list[tx.Action]:
        return self.tell(tx.GatherFinished(place=place, digest=place + 100))

    def written(self, place: int) -> list[tx.Action]:
        return self.tell(tx.WriteFinished(place=place))

    def finish(self, place: int) -> list[tx.Action]:
        """End the gather and the write at a place. Return the actions of the write's end."""
        self.gathered(place)
        return self.written(place)

    def to_gathering(self, grant: Grant | None = None, *, num_tokens: int = 4) -> None:
        """One request, its first chunk being gathered, at place 0."""
        self.start(num_tokens=num_tokens)
        self.grant({0: grant or cells(0, 2)})
        assert of_type(self.compute(0), tx.StartGather)

    def to_writing(self, grant: Grant | None = None, *, num_tokens: int = 4) -> None:
        """One request, its first chunk being written from place 0."""
        self.to_gathering(grant, num_tokens=num_tokens)
        assert of_type(self.gathered(0), tx.StartWrite)

    def to_written(self, grant: Grant | None = None, *, num_tokens: int = 4) -> None:
        """One request, its first chunk written from place 0 and not released."""
        self.to_writing(grant, num_tokens=num_tokens)
        self.written(0)


class ReceiverHand:
    """Decode rank 0 of `decode_tp`, and its sessions: number 1 + prefill rank."""

    def __init__(self, *, ring_cells: int = 8, is_one_sided: bool = False, prefill_tp: int = 1, decode_tp: int = 1) -> None:
        self.ring = StagingAllocator(ring_cells * CELL, incarnation=DECODE_LIFE)
        self.machine = Receiver(rx.ReceiverSettings(), self.ring)
        self.is_one_sided = is_one_sided
        self.now_s = 0.0
        self.routes = [
            route for route in routes(LAYOUT, Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp)) if route.decode_rank == 0
        ]
        for route in self.routes:
            self.open(1 + route.prefill_rank)

    def tell(self, event: rx.Event, *, now_s: float | None = None) -> list[rx.Action]:
        self.now_s = self.now_s if now_s is None else now_s
        actions = self.machine.handle(event, self.now_s)
        self.machine.check_invariants()
        return actions

    def open(self, session: int) -> None:
        self.tell(rx.ReceiverSessionOpened(session=session, incarnation=PREFILL_LIFE, is_one_sided=self.is_one_sided))

    def expect(self, request_id: str = "r", *, num_tokens: int = 8) -> list[rx.Action]:
        mine = [SessionRoute(route=route, session=1 + route.prefill_rank) for route in self.routes]
        return self.tell(rx.IncomingExpected(request=incoming(request_id, mine, num_tokens=num_tokens)))

    def hear(self, message: GrantRequest | ChunkReady | WriterDrained | GrantRefused, *, session: int = 1) -> list[rx.Action]:
        return self.tell(rx.MessageArrived(session=session, message=message))

    def ask(
        self, *chunks: int, request_id: str = "r", route: int = 0, num_bytes: int = WHOLE_CHUNK, session: int = 1
    ) -> list[rx.Action]:
        sizes = tuple(ChunkSize(chunk=chunk, num_bytes=num_bytes) for chunk in chunks)
        message = GrantRequest(incarnation=PREFILL_LIFE, request_id=request_id, route=route, chunks=sizes)
        return self.hear(message, session=session)

    def ready(
        self,
        chunk: int,
        grant: Grant,
        *,
        request_id: str = "r",
        route: int = 0,
        attempt: int = 0,
        num_bytes: int = WHOLE_CHUNK,
        session: int = 1,
    ) -> list[rx.Action]:
        message = ChunkReady(
            incarnation=PREFILL_LIFE,
            request_id=request_id,
            route=route,
            chunk=chunk,
            begin=grant.begin,
            num_bytes=num_bytes,
            digest=7,
            attempt=attempt,
        )
        return self.hear(message, session=session)

    def drained(self, request_id: str = "r", *, route: int = 0, session: int = 1) -> list[rx.Action]:
        return self.hear(WriterDrained(incarnation=PREFILL_LIFE, request_id=request_id, route=route), session=session)

    def settled(self, grant: Grant, num_bytes: int = WHOLE_CHUNK) -> list[rx.Action]:
        return self.tell(rx.ReceiveSettled(grant=grant, num_bytes=num_bytes))

    def scattered(self, grant: Grant, *, is_intact: bool = True) -> list[rx.Action]:
        return self.tell(rx.ScatterFinished(grant=grant, is_intact=is_intact))

    def lose(self, session: int = 1, *, is_over: bool = True) -> list[rx.Action]:
        return self.tell(rx.ReceiverSessionLost(session=session, reason="peer died", is_over=is_over))

    def over(self, session: int = 1) -> list[rx.Action]:
        return self.tell(rx.ReceiverSessionOver(session=session))

    def cancel(self, request_id: str = "r") -> list[rx.Action]:
        return self.tell(rx.IncomingCancelled(request_id=request_id, reason="client went away"))

    def grants_of(self, actions: Sequence[object]) -> dict[int, Grant]:
        (message,) = messages(actions, GrantsIssued)
        return {issued.chunk: Grant(issued.begin, issued.end) for issued in message.grants}

    def granted(self, *, num_tokens: int = 4) -> Grant:
        """One request, its first chunk granted."""
        self.expect(num_tokens=num_tokens)
        return self.grants_of(self.ask(0))[0]

    def arrive(self, chunk: int, grant: Grant) -> list[rx.Action]:
        """End the receive of a chunk, and report it as written. Return the actions of the report."""
        self.settled(grant)
        return self.ready(chunk, grant)

    def to_scattering(self, *, num_tokens: int = 4) -> Grant:
        """One request, its first chunk being scattered."""
        grant = self.granted(num_tokens=num_tokens)
        assert of_type(self.arrive(0, grant), rx.StartScatter)
        return grant


def num_chunks(num_tokens: int) -> int:
    return len(split_into_chunks(PLAN, num_tokens=num_tokens, num_layers=LAYOUT.num_layers))


def declined(actions: list[tx.Action]) -> list[int]:
    return [decline.key for decline in of_type(actions, tx.Decline)]


def drops(actions: Sequence[object]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, tx.MessageDropped)]
