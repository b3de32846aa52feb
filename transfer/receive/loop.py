"""Drive a `Receiver`: carry out its actions with a ring, a pool and open sessions, and report the outcomes.

To receive KV, an engine needs a pool and a `ReceiverLoop`. It expects a request, and gets a report when the request is whole or
has failed. The loop belongs to one asyncio loop. Scatters run on a copy queue beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from torch import Tensor

from transfer.control.base import ControlServer, Received
from transfer.copy.copy_queue import open_copy_queue
from transfer.copy.piece_copier import PieceCopier, PieceCopy
from transfer.errors import LocalProtocolError, RemoteProtocolError, TransferError
from transfer.event_pump import EventPump
from transfer.layout import Range
from transfer.logs import is_debug
from transfer.messages import decode, encode
from transfer.piece import RankRequest
from transfer.pool.kv_pool import KVPool
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive import events as protocol
from transfer.receive.events import ReceiverSettings
from transfer.receive.receiver import Receiver
from transfer.receive.signal_watch import Gathered, Scattered, SignalWatch
from transfer.receive.state import ReceiverPiece
from transfer.ring import StagingAllocator, Watermark
from transfer.tracing import Span, record_piece
from transfer.transport.base import ByteRange, Session
from transfer.transport.driver import SessionDriver
from transfer.transport.signals import SIGNAL_LIMIT_S, SIGNAL_PAUSE_S

log = structlog.get_logger(__name__)

ENDING_LOOK_S = 0.1

MAX_ARMED = 16
"""Maximum number of scatters that are armed at a time, because each event looks at all of them."""

Publish = Callable[[Watermark, frozenset[int] | None], None]
"""See `ReceiverLoop.watch_sessions`."""


class ReceiverOwner(Protocol):
    """The part that runs the engine. A `ReceiverLoop` asks it for page tables, and reports to it."""

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        """Bind missing pages, and return the request's page table in each group of layers for tokens [0, num_tokens)."""
        ...

    def on_complete(self, request_id: str) -> None:
        """Handle a complete request: the KV of the whole prompt is in the pool."""
        ...

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        """Handle the failure of a request; `on_drained` follows. `is_data_loss`: a chunk had the wrong digest twice."""
        ...

    def on_drained(self, request_id: str) -> None:
        """Handle the end of a failed or cancelled request: nothing writes into its pages any more."""
        ...


class HostArrivals(Protocol):
    """Decides which part of a prompt goes to host memory, because the device has no room for all of it."""

    @property
    def copier(self) -> PieceCopier:
        """Prepares the pieces that go to host memory."""
        ...

    def arrives_in_host(self, request_id: str, tokens: Range) -> bool:
        """Return whether these tokens of the request, which are a chunk's, go to host memory."""
        ...

    def host_tables(self, request_id: str, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the request's page tables for that copier, made of those on the device."""
        ...

    def held_tokens(self, request_id: str) -> Range | None:
        """Return the tokens of a new request that have no pages yet, see `ReceiverLoop.hold`; None if all have."""
        ...

    def arrived(self, request_id: str, num_tokens: int) -> None:
        """Record that all tokens before `num_tokens` of a request that was held have arrived."""
        ...


class ReceiverLoop:
    """See the module's docstring.

    Args:
        pool: Where KV goes.
        ring_memory: The ring's bytes, and `probe_bytes` more behind them.
        control: Channel of all writers. It must not be watched yet.
        probe_bytes: Bytes that are offered to writers and never granted, so that a one-sided link probe may write while the ring
            is in use.
        host_arrivals: Where part of a prompt can go to host memory. None means that everything goes into the pool.
    """

    def __init__(
        self,
        *,
        context: RankContext,
        owner: ReceiverOwner,
        pool: KVPool,
        ring_memory: StagingBuffer,
        control: ControlServer,
        probe_bytes: int = 0,
        host_arrivals: HostArrivals | None = None,
    ) -> None:
        self._loop = loop = context.loop
        self._host_arrivals = host_arrivals
        self._owner = owner
        self._transport = transport = context.transport
        self._ring_memory = ring_memory
        self.memory = transport.register(ring_memory.tensor)
        """The ring's memory, which sessions offer to writers."""
        self._control = control
        self._metrics = metrics = context.metrics
        self._tracer = context.tracer
        self._spans: dict[str, Span] = {}  # spans of traced requests
        self.ring = StagingAllocator(ring_memory.num_bytes - probe_bytes, incarnation=context.instance.incarnation)
        self._receiver = Receiver(ReceiverSettings(), self.ring)
        metrics.watch_ring(self.ring)
        self.driver = SessionDriver(loop)
        self._queue = open_copy_queue("scatter", pool.device, loop, context.on_crash)
        self._sessions: dict[int, Session] = {}
        self._ending: dict[int, Session] = {}  # closed, and not proven to be over
        self._ending_timer: asyncio.TimerHandle | None = None
        self.copier = PieceCopier(pool, is_source=False, kernels=context.kernels)
        """Prepares the pieces; to be warmed up when a session is attached."""
        self._watch = SignalWatch(loop, self._on_reports)
        self._awaited: dict[str, dict[int, int]] = {}  # by request: where a grant begins -> its session with signals
        self._to_arm: dict[int, ReceiverPiece] = {}  # by where the grant begins: prepared pieces of sessions with signals
        self._signalled: dict[int, ReceiverPiece] = {}  # by where the grant begins: scatters that their signals have queued
        self._on_crash = context.on_crash
        self._requests: dict[str, RankRequest] = {}
        self._prepared: dict[str, dict[int, PieceCopy]] = {}  # by request and where the grant begins
        self._to_prepare: dict[int, ReceiverPiece] = {}  # by where the grant begins
        self._pump: EventPump[protocol.Event] = EventPump(
            loop,
            handle=self._handle,
            carry_out={
                protocol.Send: self._send,
                protocol.PostReceive: self._post,
                protocol.PrepareScatter: self._prepare_later,
                protocol.StartScatter: self._scatter,
                protocol.PublishWatermark: self._publish_watermark,
                protocol.IncomingComplete: self._on_complete,
                protocol.IncomingArrived: self._on_arrived,
                protocol.IncomingFailed: self._on_failed,
                protocol.IncomingDrained: self._on_drained,
                protocol.CloseSession: lambda action: self.close_session(action.session, action.reason),
                protocol.MessageDropped: lambda action: self._drop(action.reason),
                protocol.ChunkBroken: lambda action: metrics.counter("broken_chunks").inc(),
            },
            is_idle=lambda: self._receiver.is_idle,
            tick=protocol.Tick(),
        )
        self._on_session_closed: Callable[[int, str], None] = lambda session, reason: None
        self._publish: Publish | None = None
        self.num_dropped = 0
        control.watch(loop, self._on_received)

    @property
    def ring_peak_bytes(self) -> int:
        return self._receiver.ring_peak_bytes

    @property
    def num_requests(self) -> int:
        return self._receiver.num_requests

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def sessions_in_use(self) -> set[int]:
        """Return the open sessions of the requests that have any state left."""
        return self._receiver.sessions_in_use

    @property
    def num_ending(self) -> int:
        """Closed sessions that are not proven to be over."""
        return len(self._ending)

    @property
    def num_prepared(self) -> int:
        """Requests that have prepared pieces."""
        return len(self._prepared)

    @property
    def is_idle(self) -> bool:
        """Whether no request is known and no grant is live."""
        return self._receiver.is_idle

    def check_idle(self) -> None:
        """Check the invariants of ring and protocol. Raise LocalProtocolError if one is broken."""
        self._receiver.check_invariants()

    # What the owner calls

    def watch_sessions(self, on_closed: Callable[[int, str], None], publish: Publish) -> None:
        """Set the callbacks for closed sessions and new watermarks.

        Args:
            on_closed: Called after a session's transport was closed and the loop stopped reading its writer's messages.
            publish: Called with the new watermark and the sessions that need it now. None means all sessions that have a request
                in flight at either end. Send it to the other sessions from time to time.
        """
        self._on_session_closed, self._publish = on_closed, publish

    def open_session(self, number: int, session: Session, *, incarnation: int, control_key: bytes = b"") -> None:
        """Take over an attached session.

        Args:
            incarnation: Life of the prefill instance.
            control_key: The writer's public key on the control plane, if that has keys.

        Raises:
            LocalProtocolError: `watch_sessions` was not called, so writers would never learn of free bytes.
        """
        if self._publish is None:
            raise LocalProtocolError("a session is opened before watch_sessions() was called")
        self._sessions[number] = session
        reader = session.signal_reader
        if reader is not None and not self._watch.open(reader):
            reader.stop()
        self._control.allow(number, control_key)
        opened = protocol.ReceiverSessionOpened(session=number, incarnation=incarnation, is_one_sided=session.is_one_sided)
        self._pump.feed(opened)

    def close_session(self, number: int, reason: str) -> None:
        """End a session: its transport first, which proves that none of its bytes can land any more."""
        session = self._sessions.pop(number, None)
        if session is None:
            return
        self._watch.remove(number)  # no scatter is queued on its stream any more, nor into pages that the end of a request frees
        self.driver.remove(session)
        session.close()
        self._queue.forget(number)
        self._control.forget(number)
        if not session.is_over:
            self._ending[number] = session
            if self._ending_timer is None:
                self._ending_timer = self._loop.call_later(ENDING_LOOK_S, self._look_at_ending)
        self._pump.feed(protocol.ReceiverSessionLost(session=number, reason=reason, is_over=number not in self._ending))
        self._on_session_closed(number, reason)

    def _look_at_ending(self) -> None:
        """Check regularly whether the writers of closed sessions are gone. Until then, their bytes are in quarantine."""
        self._ending_timer = None
        for number in [number for number, session in self._ending.items() if session.is_over]:
            del self._ending[number]
            self._pump.feed(protocol.ReceiverSessionOver(session=number))
        if self._ending:
            self._ending_timer = self._loop.call_later(ENDING_LOOK_S, self._look_at_ending)

    def is_known(self, request_id: str) -> bool:
        """Return whether the id is in use. A request that was given up keeps its id until all its writers have drained."""
        return self._receiver.is_known(request_id)

    def expect_request(self, request: RankRequest) -> None:
        """Start to receive a request's KV.

        Call it when pages for the whole prompt are reserved, and before any sender starts the request. `on_complete` follows, or
        `on_failed` and `on_drained`.
        """
        self._requests[request.request_id] = request
        if self._tracer is not None and request.traceparent:
            attributes = {"prompt_tokens": request.num_tokens}
            span = self._tracer.begin("kvferry.receive", parent=request.traceparent, attributes=attributes)
            if span is not None:
                self._spans[request.request_id] = span
        self._pump.feed(protocol.IncomingExpected(request=request))
        if self._host_arrivals is not None:
            held = self._host_arrivals.held_tokens(request.request_id)
            if held is not None:
                self.hold(request.request_id, held)

    def hold(self, request_id: str, tokens: Range | None) -> None:
        """Give no grants for chunks with any of these tokens, because there are no pages for them yet. None ends the hold.

        Ignore a request that is over.
        """
        self._pump.feed(protocol.ArrivalsHeld(request_id=request_id, tokens=tokens))

    def cancel_request(self, request_id: str, reason: str) -> bool:
        """Give up a request that is not whole yet; `on_drained` follows. Return False if nothing of it is here."""
        if request_id not in self._requests:
            return False
        self._pump.feed(protocol.IncomingCancelled(request_id=request_id, reason=reason))
        return True

    def close(self) -> None:
        """End every session and the copy queue."""
        for number in list(self._sessions):
            self.close_session(number, "this decode rank shuts down")
        if self._ending_timer is not None:
            self._ending_timer.cancel()
        self._pump.close()
        self._control.close()
        self._watch.close(is_idle=self._queue.close(timeout_s=5.0))
        self._transport.close()

    # The machine and the signals

    def _handle(self, event: protocol.Event, now_s: float) -> list[protocol.Action]:
        """Let the machine handle an event. Meanwhile, signals queue no scatter. Afterwards, they can queue only scatters that the
        machine still awaits. So the machine knows of every scatter.
        """
        if not self._watch.armed:
            return self._receiver.handle(event, now_s)
        actions: list[protocol.Action] = []
        with self._watch.gate:
            for session, grant in self._watch.take_queued():
                actions += self._receiver.handle(protocol.GatherSignalled(session=session, begin=grant, digest=None), now_s)
            actions += self._receiver.handle(event, now_s)
            self._watch.disarm_unless(self._receiver.awaits_signal)
        return actions

    def _on_reports(self) -> None:
        """Handle the scatters and gathers that have ended since the last call."""
        scattered, gathered = list[Scattered](), list[Gathered]()
        with self._watch.gate:
            queued = self._watch.take_queued()
            try:
                scattered, gathered = self._watch.take_ended()
            except RuntimeError as error:
                self._on_crash(error)  # the pages of the queued scatters stay in use: the device can still write them
        for session, grant in queued:
            self._pump.feed(protocol.GatherSignalled(session=session, begin=grant, digest=None))
        for ended in scattered:
            self._scattered(self._signalled.pop(ended.grant), ended.is_intact, ended.seconds)
        for begun in gathered:
            self._pump.feed(protocol.GatherSignalled(session=begun.session, begin=begun.grant, digest=begun.digest))
        self._arm_next()

    def _arm_next(self) -> None:
        """Arm the scatters of prepared pieces, in the order of their preparation."""
        while self._to_arm and len(self._watch.armed) < MAX_ARMED:
            grant = next(iter(self._to_arm))
            piece = self._to_arm.pop(grant)
            copy = self._prepared.get(piece.request_id, {}).get(grant)
            if copy is None or piece.session not in self._sessions or not self._receiver.awaits_signal(piece.session, grant):
                continue
            launch = self._queue.launch_of(copy, self._source_of(piece), algorithm=piece.request.digest, peer=piece.session)
            if launch is not None:
                self._watch.arm(piece.session, grant, launch)

    # Carrying out

    def _send(self, action: protocol.Send) -> None:
        # A message that cannot be queued counts as lost on the way: messages that need an answer are repeated.
        if not self._control.send(action.session, encode(action.message)):
            self._drop("queue_full")

    def _publish_watermark(self, action: protocol.PublishWatermark) -> None:
        if self._publish is not None:  # else no session was opened yet
            self._publish(self.ring.watermark(), action.sessions)

    def _on_arrived(self, action: protocol.IncomingArrived) -> None:
        if self._host_arrivals is not None:
            self._host_arrivals.arrived(action.request_id, action.num_tokens)

    def _on_complete(self, action: protocol.IncomingComplete) -> None:
        self._forget(action.request_id)
        self._owner.on_complete(action.request_id)

    def _on_failed(self, action: protocol.IncomingFailed) -> None:
        if self._spans and (span := self._spans.get(action.request_id)) is not None:
            span.end(action.reason)
        self._owner.on_failed(action.request_id, action.reason, is_data_loss=action.is_data_loss)

    def _on_drained(self, action: protocol.IncomingDrained) -> None:
        self._forget(action.request_id)
        self._owner.on_drained(action.request_id)

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        self._metrics.message_dropped(reason)

    def _on_received(self, received: Received) -> None:
        try:
            message = decode(received.payload)
        except RemoteProtocolError:
            self._drop("malformed")
            return
        self._pump.feed(protocol.MessageArrived(session=received.peer, message=message))

    def _post(self, action: protocol.PostReceive) -> None:
        piece, grant = action.piece, action.piece.grant
        session = self._sessions.get(piece.session)
        if session is None:
            return  # the protocol is about to learn of the lost session
        offset = grant.begin % self.ring.capacity_bytes
        handle = session.expect(self.memory, ByteRange(begin=offset, end=offset + piece.num_bytes), action.key)

        def done(_: object, error: TransferError | None) -> None:
            if error is not None:
                self._pump.feed(protocol.ReceiveFailed(grant=grant, reason=str(error)))
            else:
                self._pump.feed(protocol.ReceiveSettled(grant=grant, num_bytes=handle.num_bytes))

        self.driver.watch(session, handle, done)

    def _forget(self, request_id: str) -> None:
        """Forget a request. No copy of it is queued, and none will be."""
        if self._spans and (span := self._spans.pop(request_id, None)) is not None:
            span.end()  # no-op if the failure has ended it
        del self._requests[request_id]
        self._prepared.pop(request_id, None)
        for grant, session in self._awaited.pop(request_id, {}).items():
            self._watch.end(session)
            self._to_arm.pop(grant, None)
        self.copier.forget(request_id)
        if self._host_arrivals is not None:
            self._host_arrivals.copier.forget(request_id)

    def _prepare_later(self, action: protocol.PrepareScatter) -> None:
        """Prepare after the grant's message is sent, one piece in a turn of the loop: a message can ask for a thousand grants."""
        if not self._to_prepare:
            self._loop.call_soon(self._prepare_next)
        piece = action.piece
        self._to_prepare[piece.grant.begin] = piece
        session = self._sessions.get(piece.session)
        if self._watch.is_open and session is not None and session.signal_reader is not None:  # even if they are stopped
            self._awaited.setdefault(piece.request_id, {})[piece.grant.begin] = piece.session
            self._watch.begin(piece.session, session.signal_reader)

    def _prepare_next(self) -> None:
        """Bind pages and check tables before the bytes arrive. For the first piece of a lone request that took 0.25 ms of its
        time.
        """
        if not self._to_prepare:
            return
        piece = self._to_prepare.pop(next(iter(self._to_prepare)))
        if self._to_prepare:
            self._loop.call_soon(self._prepare_next)
        request_id = piece.request_id
        if self._requests.get(request_id) is not piece.request or piece.session not in self._sessions:
            return  # it is over, or its writer's session is
        copy = self._copy_of(piece)
        self._prepared.setdefault(request_id, {})[piece.grant.begin] = copy
        self._queue.expect(copy, peer=piece.session)
        if piece.grant.begin in self._awaited.get(request_id, {}):
            self._to_arm[piece.grant.begin] = piece
            self._arm_next()

    def _copy_of(self, piece: ReceiverPiece) -> PieceCopy:
        request_id, tokens = piece.request_id, piece.chunk.tokens
        copier, tables = self.copier, self._owner.tables_up_to(request_id, tokens.end)
        host = self._host_arrivals
        if host is not None and host.arrives_in_host(request_id, tokens):
            copier, tables = host.copier, host.host_tables(request_id, tables)
        return copier.prepare(piece, tables)

    def _source_of(self, piece: ReceiverPiece) -> Tensor:
        """Return the bytes of the piece's grant in the ring."""
        offset = piece.grant.begin % self.ring.capacity_bytes
        return self._ring_memory.tensor[offset : offset + piece.num_bytes]

    def _scatter(self, action: protocol.StartScatter) -> None:
        piece, grant, request_id = action.piece, action.piece.grant, action.piece.request_id
        self._to_prepare.pop(grant.begin, None)
        self._to_arm.pop(grant.begin, None)
        if self._awaited and self._awaited.get(request_id, {}).pop(grant.begin, None) is not None:
            self._watch.end(piece.session)
        copy = self._prepared.get(request_id, {}).pop(grant.begin, None)
        if action.digest is None:
            self._signalled[grant.begin] = piece
        else:
            self._queue.scatter(
                copy or self._copy_of(piece),
                self._source_of(piece),
                algorithm=piece.request.digest,
                digest=action.digest,
                peer=piece.session,
                on_done=lambda is_intact, seconds: self._scattered(piece, is_intact, seconds),
            )

    def _scattered(self, piece: ReceiverPiece, is_intact: bool | None, seconds: float) -> None:
        grant, request_id, session = piece.grant, piece.request_id, piece.session
        if self._spans and (span := self._spans.get(request_id)) is not None:
            record_piece(span, piece, "kvferry.scatter", seconds, bytes=piece.num_bytes)
        if is_intact is None and session in self._sessions:  # if it is closed, the device may be fast enough
            if self._watch.stop(session):
                self._loop.call_later(SIGNAL_PAUSE_S, self._watch.resume, session)
            self._metrics.counter("signals_given_up").inc()
            log.warning("signal_given_up", request_id=request_id, session=session, limit_s=SIGNAL_LIMIT_S)
        self._pump.feed(protocol.ScatterFinished(grant=grant, is_intact=is_intact))
        if is_intact:  # after the request's end, which should not wait for it
            self._metrics.scatter_finished(seconds, piece.num_bytes)
            if is_debug():
                log.debug(
                    "scattered",
                    request_id=request_id,
                    chunk=piece.chunk.index,
                    grant=grant.begin,
                    bytes=piece.num_bytes,
                    seconds=seconds,
                )
