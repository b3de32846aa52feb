"""Drive a `Sender`: carry out its actions with a pool, staging memory and open sessions, and report the outcomes.

To send KV, an engine needs a pool and a `SenderLoop`. It starts a request and reports computed chunks. It gets reports when its
pages are free and when the request has arrived. The loop belongs to one asyncio loop. Gathers run on a copy queue beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from torch import Tensor

from transfer.control.base import ControlClient
from transfer.copy.copy_queue import open_copy_queue
from transfer.copy.piece_copier import PieceCopier
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError, RemoteProtocolError, TransferError
from transfer.event_pump import EventPump
from transfer.logs import is_debug
from transfer.messages import decode, encode
from transfer.piece import Piece, RankRequest
from transfer.pool.kv_pool import KVPool
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.ring import ALIGNMENT_BYTES, Watermark
from transfer.send import events as protocol
from transfer.send.events import SenderSettings, SentStats
from transfer.send.sender import Sender
from transfer.tracing import Span, record_piece
from transfer.transport.base import ByteRange, DirectMemory, Session
from transfer.transport.driver import SessionDriver

log = structlog.get_logger(__name__)


class SenderOwner(Protocol):
    """The part that runs the engine. A `SenderLoop` asks it for page tables, and reports to it."""

    def tables_of(self, request_id: str) -> Sequence[Sequence[int]]:
        """Return the request's page table in each group of layers so far, from token 0 on."""
        ...

    def on_source_released(self, request_id: str) -> None:
        """Handle the release of a request's pages: no gather will read them any more."""
        ...

    def on_sent(self, request_id: str, stats: SentStats) -> None:
        """Handle a request whose KV has arrived and is released on all of its routes. No other call follows for it."""
        ...

    def on_failed(self, request_id: str, reason: str) -> None:
        """Handle a request that ended early. No write of this rank is under way for it, and no other call follows."""
        ...


class HostSource(Protocol):
    """Requests whose KV lies partly in host memory. For these, `SenderOwner.tables_of` returns the tables that `copier` needs."""

    copier: PieceCopier

    def is_in_host(self, request_id: str) -> bool: ...


@dataclass(slots=True, kw_only=True)
class _Peer:
    session: Session
    control: ControlClient
    name: str
    ring_capacity_bytes: int
    is_direct: bool


class SenderLoop:
    """See the module's docstring.

    Args:
        pool: Where the engine writes KV.
        staging: Memory of `settings.num_slots` x `settings.slot_bytes` bytes.
        host: Requests with KV in host memory; None if all KV lies in `pool`.
    """

    def __init__(
        self,
        *,
        context: RankContext,
        owner: SenderOwner,
        pool: KVPool,
        staging: StagingBuffer,
        settings: SenderSettings,
        host: HostSource | None = None,
    ) -> None:
        self._loop = loop = context.loop
        self._host = host
        self._owner = owner
        self._transport = context.transport
        self._staging = staging
        self.slot_bytes = settings.slot_bytes
        """Most bytes of a staged piece."""
        self._memory = context.transport.register(staging.tensor)
        self._sender = Sender(settings, incarnation=context.instance.incarnation)
        self._metrics = context.metrics
        self._tracer = context.tracer
        self._spans: dict[str, Span] = {}  # spans of traced requests
        self.driver = SessionDriver(loop)
        self._queue = open_copy_queue("gather", pool.device, loop, context.on_crash)
        self._peers: dict[int, _Peer] = {}
        self.copiers = [PieceCopier(pool, is_source=True, kernels=context.kernels), *([] if host is None else [host.copier])]
        """Prepare the pieces, from `pool` and from host memory. Warm them up when a session is attached."""
        credit_wait = self._credit_wait = self._metrics.histogram("stage_seconds", stage="credit_wait")
        ack = self._metrics.histogram("stage_seconds", stage="ack")
        self._pump: EventPump[protocol.Event] = EventPump(
            loop,
            handle=self._sender.handle,
            carry_out={
                protocol.Send: self._send,
                protocol.StartGather: self._gather,
                protocol.StartWrite: self._write,
                protocol.Decline: self._decline,
                protocol.SourceReleased: self._on_source_released,
                protocol.WaitGivenUp: lambda action: credit_wait.observe(action.credit_wait_s),
                protocol.PieceReleased: lambda action: ack.observe(action.ack_s),
                protocol.OutgoingSent: self._on_sent,
                protocol.OutgoingFailed: self._on_failed,
                protocol.CloseSession: lambda action: self._lose_session(action.session, action.reason),
                protocol.MessageDropped: lambda action: self._drop(action.reason),
            },
            is_idle=lambda: self._sender.is_idle,
            tick=protocol.Tick(),
        )
        self._on_session_closed: Callable[[int, str], None] = lambda session, reason: None
        self.num_dropped = 0

    @property
    def num_requests(self) -> int:
        return self._sender.num_requests

    @property
    def num_slots_used(self) -> int:
        return self._sender.num_slots_used

    @property
    def num_slots(self) -> int:
        return self._sender.num_slots

    @property
    def num_sessions(self) -> int:
        return len(self._peers)

    def sessions_in_use(self) -> set[int]:
        """Return the sessions of the requests that are not over."""
        return self._sender.sessions_in_use

    def check_idle(self) -> None:
        """Check the protocol's invariants. Raise LocalProtocolError if one is broken."""
        self._sender.check_invariants()

    # What the owner calls

    def watch_sessions(self, on_closed: Callable[[int, str], None]) -> None:
        """Set the callback that is called after a session's transport and control channel are closed."""
        self._on_session_closed = on_closed

    def open_session(
        self, number: int, session: Session, control: ControlClient, *, name: str, incarnation: int, ring_capacity_bytes: int
    ) -> None:
        """Take over an attached session. On an error, the session is not taken over.

        Args:
            name: The other end, as reasons name it: "decode rank 1".
            incarnation: Life of the decode instance.

        Raises:
            LocalProtocolError: The ring is larger than the memory that the peer's transport offered.
            RemoteProtocolError: Kernels cannot gather into the ring where it begins.
        """
        ring = session.direct(ByteRange(begin=0, end=ring_capacity_bytes))
        if ring is not None and ring.data_ptr() % ALIGNMENT_BYTES:
            raise RemoteProtocolError(
                f"the peer's ring begins at {ring.data_ptr():#x} here; it must begin on a multiple of {ALIGNMENT_BYTES} bytes"
            )
        is_direct = ring is not None
        self._peers[number] = _Peer(
            session=session, control=control, name=name, ring_capacity_bytes=ring_capacity_bytes, is_direct=is_direct
        )
        control.watch(self._loop, lambda payload: self._on_payload(number, payload))
        opened = protocol.SenderSessionOpened(
            session=number,
            incarnation=incarnation,
            ring_capacity_bytes=ring_capacity_bytes,
            is_direct=is_direct,
        )
        self._pump.feed(opened)

    def is_direct(self, number: int) -> bool:
        """Return whether the pieces of an open session go into the peer's ring without staging memory."""
        return self._peers[number].is_direct

    def close_session(self, number: int, reason: str) -> None:
        """End a session: its transport first, so that no further write begins when the protocol learns of the end."""
        peer = self._peers.pop(number, None)
        if peer is None:
            return
        self.driver.remove(peer.session)
        self._metrics.link_closed(number)
        self._queue.forget(number)
        peer.session.close()  # notifies the peer after the gathers under way into its ring; nothing here waits for them
        peer.control.close()
        self._pump.feed(protocol.SenderSessionLost(session=number, reason=reason))
        self._on_session_closed(number, reason)

    def _lose_session(self, number: int, reason: str) -> None:
        """End a session whose peer or link failed. Requests that fail because of it name the peer."""
        peer = self._peers.get(number)
        if peer is not None:
            self.close_session(number, f"{peer.name} is lost: {reason}")

    def on_watermark(self, number: int, watermark: Watermark) -> None:
        """Handle the newest watermark of a session's ring. Older ones have no effect."""
        self._pump.feed(protocol.WatermarkArrived(session=number, watermark=watermark))

    def start_request(self, request: RankRequest) -> None:
        """Start to send a request's KV, chunk by chunk as `chunk_computed` reports them.

        Call it when every decode rank expects the request (`ReceiverLoop.expect_request`). `on_sent` or `on_failed` follows.
        """
        if self._tracer is not None and request.traceparent:
            span = self._tracer.begin("kvferry.send", parent=request.traceparent)
            if span is not None:
                self._spans[request.request_id] = span
        self._pump.feed(protocol.OutgoingStarted(request=request))

    def chunk_computed(self, request_id: str, chunk: int, event: DeviceEvent | None) -> None:
        """Report a chunk whose KV is in the pool, or will be when `event` has fired. It is gathered after that."""
        self._pump.feed(protocol.ChunkComputed(request_id=request_id, chunk=chunk, event=event))

    def abort_request(self, request_id: str, reason: str) -> None:
        """Give up a request. `on_failed` follows when its writes have settled."""
        self._pump.feed(protocol.OutgoingAborted(request_id=request_id, reason=reason))

    def close(self) -> None:
        """End every session and the copy queue."""
        for number in list(self._peers):
            self.close_session(number, "this prefill rank shuts down")
        self._pump.close()
        self._queue.close(timeout_s=5.0)
        self._transport.close()

    # Carrying out

    def _on_source_released(self, action: protocol.SourceReleased) -> None:
        for copier in self.copiers:
            copier.forget(action.request_id)
        self._owner.on_source_released(action.request_id)

    def _on_sent(self, action: protocol.OutgoingSent) -> None:
        self._metrics.request_sent(action.stats)
        if self._spans:
            self._end_span(action.request_id, stats=action.stats)
        self._owner.on_sent(action.request_id, action.stats)

    def _on_failed(self, action: protocol.OutgoingFailed) -> None:
        if self._spans:
            self._end_span(action.request_id, error=action.reason)
        self._owner.on_failed(action.request_id, action.reason)

    def _record(self, piece: Piece, name: str, seconds: float, **attributes: Any) -> None:
        span = self._spans.get(piece.request_id)
        if span is not None:
            record_piece(span, piece, name, seconds, **attributes)

    def _end_span(self, request_id: str, *, stats: SentStats | None = None, error: str = "") -> None:
        span = self._spans.pop(request_id, None)
        if span is None:
            return
        if stats is not None:
            span.set(bytes=stats.num_bytes, writes=stats.writes, resends=stats.resends)
            span.set(transfer_seconds=stats.transfer_s, exposed_seconds=stats.exposed_s)
        span.end(error)

    def _send(self, action: protocol.Send) -> None:
        peer = self._peers.get(action.session)
        # A message that cannot be queued counts as lost on the way: messages that need an answer are repeated.
        if peer is not None and not peer.control.send(encode(action.message)):
            self._drop("queue_full")

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        self._metrics.message_dropped(reason)

    def _on_payload(self, number: int, payload: bytes) -> None:
        try:
            message = decode(payload)
        except RemoteProtocolError:
            self._drop("malformed")
            return
        self._pump.feed(protocol.MessageArrived(session=number, message=message))

    def _gather(self, action: protocol.StartGather) -> None:
        out = self._gather_target(action)
        if out is None:
            # The protocol is about to learn of the lost session. It waits for the end of each gather that it started.
            self._pump.feed(protocol.GatherFinished(place=action.place, digest=0))
            return
        piece, session = action.piece, action.piece.session
        copier = self.copiers[self._host is not None and self._host.is_in_host(piece.request_id)]
        copy = copier.prepare(piece, self._owner.tables_of(piece.request_id))
        self._credit_wait.observe(action.credit_wait_s)
        if self._spans:
            self._record(piece, "kvferry.grant_wait", action.credit_wait_s)
        is_direct = self._peers[session].is_direct
        writer = self._peers[session].session.signal_writer if is_direct and piece.attempt == 0 else None
        signal = None if writer is None else writer.of(piece.granted.begin)

        def done(digest: int, begun_s: float, ended_s: float) -> None:
            seconds = ended_s - begun_s
            self._metrics.gather_finished(seconds)
            if is_direct:
                self._metrics.write_finished(seconds, piece.num_bytes)
                self._metrics.link_written(session, begun_s, ended_s, piece.num_bytes)
            if self._spans:
                self._record(piece, "kvferry.gather", seconds, bytes=piece.num_bytes)
            is_signalled = signal is not None and signal.is_sent
            self._pump.feed(protocol.GatherFinished(place=action.place, digest=digest, is_signalled=is_signalled))

        self._queue.gather(
            copy, out, algorithm=piece.request.digest, peer=session, after=action.event, on_done=done, signal=signal
        )

    def _gather_target(self, action: protocol.StartGather) -> Tensor | DirectMemory | None:
        """Return the place, or the granted bytes of a direct session's ring; None if the session is closed."""
        piece = action.piece
        peer = self._peers.get(piece.session)
        if peer is None:
            return None
        if not peer.is_direct:
            return self._staging.tensor[action.place : action.place + piece.num_bytes]
        offset = piece.granted.begin % peer.ring_capacity_bytes
        try:
            ring, reason = peer.session.direct(ByteRange(begin=offset, end=offset + piece.num_bytes)), "the link failed"
        except LocalProtocolError as error:
            ring, reason = None, str(error)
        if ring is None:
            self._lose_session(piece.session, f"the gather cannot be made: {reason}")
        return ring

    def _decline(self, action: protocol.Decline) -> None:
        peer = self._peers.get(action.session)
        if peer is None:
            return
        try:
            handle = peer.session.decline(action.key)
        except LocalProtocolError as error:
            self._lose_session(action.session, f"the decline cannot be made: {error}")
            return
        self.driver.watch(peer.session, handle, lambda _, error: None)

    def _write(self, action: protocol.StartWrite) -> None:
        number, num_bytes, grant = action.piece.session, action.piece.num_bytes, action.piece.granted
        peer = self._peers.get(number)
        if peer is None:
            return  # the protocol is about to learn of the lost session
        offset = grant.begin % peer.ring_capacity_bytes
        started = time.monotonic()
        try:
            handle = peer.session.write(
                self._memory,
                ByteRange(begin=action.place, end=action.place + num_bytes),
                ByteRange(begin=offset, end=offset + num_bytes),
                action.key,
            )
        except LocalProtocolError as error:
            # The peer's ring does not fit the memory that its transport offered: only its session fails.
            self._lose_session(number, f"the write cannot be made: {error}")
            return

        self._metrics.link_write_began(number)

        def done(_: object, error: TransferError | None) -> None:
            self._metrics.link_write_ended(number, 0 if error is not None else num_bytes)
            if error is not None:
                self._pump.feed(protocol.StagedWriteFailed(place=action.place, reason=str(error)))
                return
            seconds = time.monotonic() - started
            self._metrics.write_finished(seconds, num_bytes)
            if self._spans:
                self._record(action.piece, "kvferry.write", seconds, bytes=num_bytes)
            if is_debug():
                log.debug("written", session=number, grant=grant.begin, bytes=num_bytes, seconds=seconds)
            self._pump.feed(protocol.WriteFinished(place=action.place))

        self.driver.watch(peer.session, handle, done)
