"""The receiving end of the protocol as a state machine without I/O: `Receiver.handle(event, now_s) -> list[Action]`.

One `Receiver` per decode rank. Its owner (`transfer.receive.loop`) carries out the actions and reports the outcomes as events.
Numbered rules are those of docs/protocol.md. `transfer.send.sender` defines request, chunk, route, piece and session.

Theory of operation
===================

The `StagingAllocator` assigns the bytes of the ring in the order of the grant requests. A grant gets its bytes at once, although
older grants may still use them, so senders never wait for an answer that depends on others. Senders learn from watermarks when
the bytes are free.

The way of a piece::

    GrantRequest -> GRANTED -> bytes are free -> ChunkReady -> SCATTERING -> released
                       ^                                           |
                       +-------- rejected: bytes are broken -------+

- GRANTED. The grant never changes, and a repeated request gets the same grant (rules 1 and R3). `PrepareScatter` lets the owner
  bind pages and upload page tables ahead of the bytes.
- The bytes are free when no older grant on them is unreleased. The sender checks that in its `RingView` before it
  gathers (rule 2). On a two-sided transport the receive is posted only then, too, so no byte can land early.
- SCATTERING begins after `ChunkReady`, and on a two-sided transport after the receive has settled. The digest is computed by the
  copy itself. On a direct session with signals, it begins with `GatherSignalled`: the signal has queued the scatter behind the
  gather.
- Released. The bytes return to the ring after the scatter has finished (rule 5), and the next watermark shows it. If size or
  digest is wrong, `ChunkRejected` asks for the piece once more. A second failure fails the request as data loss.

If there are no pages for a part of a prompt yet, `ArrivalsHeld` holds its chunks back. They get no grant, so no bytes of the ring
wait for pages.

A request is complete when the *set* of its scattered pieces is the expected set and none is outstanding (rules 7 and 8). Messages
can be repeated, so pieces are never counted.

A watermark states all that is released, so a lost one does no harm. It goes only to the sessions that it concerns: those whose
grants were released, and those whose grants have become writable without their knowledge. It has room for `MAX_PUBLISHED_RANGES`
ranges. While there are more, they take turns, and every session in use gets a watermark at each tick.

A failed or cancelled request is given up in two steps:

1. Its pages are safe when no scatter is in flight: `IncomingDrained` (rule 6). The owner may then use the pages.
2. The bytes of its grants stay in quarantine, because a sender may still write them. `AbortTransfer` asks the senders to drain
   and is repeated after `repeat_after_s`. A grant is released when its sender has drained and, on a two-sided transport, its
   receive has settled, or when the session is over. Then the request is forgotten.

A lost session is *over* when its sender can no longer write into the ring. A two-sided transport proves that by its close, and so
do some one-sided ones. Otherwise `ReceiverSessionOver` follows later, and the grants stay in quarantine until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from transfer.chunk import Chunk
from transfer.errors import ChunkTooLarge, LocalProtocolError
from transfer.messages import (
    MAX_CHUNKS_PER_MESSAGE,
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    GrantRefused,
    GrantRequest,
    GrantsIssued,
    IssuedGrant,
    WriterDrained,
    clip_reason,
)
from transfer.piece import RankRequest
from transfer.receive.events import (
    Action,
    ArrivalsHeld,
    ChunkBroken,
    CloseSession,
    Event,
    GatherSignalled,
    IncomingArrived,
    IncomingCancelled,
    IncomingComplete,
    IncomingDrained,
    IncomingExpected,
    IncomingFailed,
    MessageArrived,
    MessageDropped,
    PostReceive,
    PrepareScatter,
    PublishWatermark,
    ReceiveFailed,
    ReceiverSessionLost,
    ReceiverSessionOpened,
    ReceiverSessionOver,
    ReceiverSettings,
    ReceiveSettled,
    ScatterFinished,
    Send,
    StartScatter,
    Tick,
)
from transfer.receive.state import ReceiverPiece, ReceiverRequest, ReceiverRoute, ReceiverStage
from transfer.ring import MAX_ATTEMPTS, MAX_PUBLISHED_RANGES, Grant, StagingAllocator, grant_key
from transfer.ring_index import WaitingGrants


class Receiver:
    """See the module's docstring.

    Invariants (`check_invariants`): those of the ring, and every live grant belongs to exactly one piece.
    """

    def __init__(self, settings: ReceiverSettings, ring: StagingAllocator) -> None:
        self._settings = settings
        self.ring = ring
        self._sessions: dict[int, ReceiverSessionOpened] = {}
        self._lost: set[int] = set()  # closed sessions whose writers may still write
        self._requests: dict[str, ReceiverRequest] = {}
        self._live: dict[int, ReceiverPiece] = {}  # by grant.begin
        # The pieces of `_live` whose grants are not writable yet.
        self._waiting: WaitingGrants[Grant, ReceiverPiece] = WaitingGrants(ring.blocker_of, lambda: ring.num_steps)
        self._actions: list[Action] = []
        self._now_s = 0.0
        self._may_publish = False  # bytes were released, padding included
        self._news_for: set[int] = set()  # sessions that the next watermark concerns
        self._told: dict[int, int] = {}  # session -> watermark position that its writer knows, or higher
        self._published = ring.position
        self._is_truncated = False  # the last watermark had no room for every released range
        self._is_tick = False  # a tick is being handled
        self.ring_peak_bytes = 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Mapping[str, ReceiverRequest]:
        """Requests that have any state left, by id. Read only."""
        return self._requests

    @property
    def sessions_in_use(self) -> set[int]:
        """Open sessions of the requests that have any state left."""
        return {
            route.session
            for request in self._requests.values()
            for route in request.incoming.routes
            if route.session in self._sessions
        }

    @property
    def num_lost_sessions(self) -> int:
        """Closed sessions whose writers may still write into the ring."""
        return len(self._lost)

    def is_known(self, request_id: str) -> bool:
        """Return whether the request has any state left: it can last after its pages are safe, until every writer has drained."""
        return request_id in self._requests

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._live

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take in one event; return the actions, in order. Raise LocalProtocolError if the owner broke a rule."""
        self._now_s = now_s
        self._waiting.begin_turn()
        match event:
            case ScatterFinished():  # first: a request waits for it
                self._on_scatter_finished(event)
            case GatherSignalled():
                self._on_gather_signalled(event)
            case ReceiverSessionOpened():
                if event.session in self._sessions or event.session in self._lost:
                    raise LocalProtocolError(f"session {event.session:#x} opened twice")
                self._sessions[event.session] = event
                self._told[event.session] = self._published
            case ReceiverSessionLost():
                self._on_session_lost(event)
            case ReceiverSessionOver():
                self._on_session_over(event.session)
            case IncomingExpected():
                self._on_expected(event.request)
            case ArrivalsHeld():
                self._on_held(event)
            case IncomingCancelled():
                if (request := self._requests.get(event.request_id)) is not None and request.failure is None:
                    self._give_up(request, event.reason)
            case MessageArrived(session=session) if session not in self._sessions:
                self._drop(session, "unknown_session")
            case MessageArrived(session=session, message=message) if self._sessions[session].incarnation != message.incarnation:
                self._drop(session, "other_incarnation")
            case MessageArrived(session=session, message=GrantRequest() as message):
                self._on_grant_request(session, message)
            case MessageArrived(session=session, message=ChunkReady() as message):
                self._on_chunk_ready(session, message)
            case MessageArrived(session=session, message=WriterDrained() as message):
                self._on_writer_drained(session, message)
            case MessageArrived():
                self._drop(event.session, "unexpected_type")
            case ReceiveSettled():
                self._on_receive_settled(event)
            case ReceiveFailed():
                self._on_receive_failed(event)
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        if self._waiting.has_free:
            self._free_writable()
        if self._may_publish or self._news_for:
            self._publish()
        self._is_tick = False
        actions, self._actions = self._actions, []
        return actions

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if the state contradicts itself."""
        self.ring.check_invariants()
        if self.ring.num_live_grants != len(self._live):
            raise LocalProtocolError(
                f"invariant broken: {self.ring.num_live_grants} live grants, {len(self._live)} pieces hold one"
            )
        for request in self._requests.values():
            request.check_invariants()
        of_requests = {piece.grant.begin for request in self._requests.values() for piece in request.pieces()}
        if of_requests != self._live.keys():
            raise LocalProtocolError("invariant broken: live pieces and the pieces of the requests differ")

    # Requests

    def _on_expected(self, incoming: RankRequest) -> None:
        if incoming.request_id in self._requests:
            raise LocalProtocolError(f"request {incoming.request_id} expected twice")
        request = ReceiverRequest.of(incoming)
        self._requests[incoming.request_id] = request
        lost = [route.session for route in incoming.routes if route.session not in self._sessions]
        if lost:
            for route in request.routes.values():
                route.is_drained = route.session not in self._sessions
            self._fail(request, f"session {lost[0]:#x} with a prefill rank is lost")
        elif request.is_whole:
            self._complete(request)

    def _complete(self, request: ReceiverRequest) -> None:
        """End a whole request without outstanding pieces (rules 7 and 8)."""
        del self._requests[request.request_id]
        self._actions.append(IncomingComplete(request_id=request.request_id))

    def _fail(self, request: ReceiverRequest, reason: str, *, is_data_loss: bool = False) -> None:
        self._actions.append(IncomingFailed(request_id=request.request_id, reason=reason, is_data_loss=is_data_loss))
        self._give_up(request, reason)

    def _give_up(self, request: ReceiverRequest, reason: str) -> None:
        """Stop the request, quarantine the grants that its writers may still write, and ask the writers to drain."""
        request.failure = reason
        for piece in request.pieces():
            if piece.stage is ReceiverStage.GRANTED:
                self.ring.quarantine(piece.grant)
        for route in request.routes.values():
            self._ask_to_drain(request, route)
        self._settle(request, request.pieces())

    def _ask_to_drain(self, request: ReceiverRequest, route: ReceiverRoute) -> None:
        if route.is_drained or route.session not in self._sessions:
            return  # no writer is left to ask
        route.asked_s = self._now_s
        message = AbortTransfer(
            incarnation=self.ring.incarnation,
            request_id=request.request_id,
            route=route.route.index,
            reason=clip_reason(request.failure or ""),
        )
        self._actions.append(Send(session=route.session, message=message))

    def _settle(self, request: ReceiverRequest, pieces: Iterable[ReceiverPiece]) -> None:
        """Continue to end a failed request: release dead pieces, report when its pages are safe, and forget it.

        Args:
            pieces: The pieces that the step can have proven dead. A writer can have tens of thousands, so not all are checked.
        """
        for piece in pieces:
            route = request.routes[piece.route.index]
            # On a live two-sided session every key is received once and written or declined once, even if the receive is posted
            # later. Otherwise a decline without a receive would stay in the transport forever.
            is_over = piece.is_settled or piece.is_one_sided or piece.session not in self._sessions
            if piece.stage is ReceiverStage.GRANTED and route.is_drained and is_over:
                self._release(piece)
        if not request.has_drained and not request.num_scattering:
            request.has_drained = True
            self._actions.append(IncomingDrained(request_id=request.request_id))
        if all(route.is_drained and not route.pieces for route in request.routes.values()):
            del self._requests[request.request_id]

    def _release(self, piece: ReceiverPiece) -> None:
        self.ring.release(piece.grant)
        route = piece.receiving.routes[piece.route.index]
        del route.pieces[piece.chunk.index]
        route.released[piece.chunk.index] = piece.grant
        del self._live[piece.grant.begin]
        self._waiting.discard(piece.grant)
        self._waiting.wake(piece.grant.begin, piece.grant.end)
        self._may_publish = True
        if piece.session in self._sessions:
            self._news_for.add(piece.session)

    # Sessions

    def _on_session_lost(self, event: ReceiverSessionLost) -> None:
        if event.session not in self._sessions:
            return
        if not event.is_over and not self._sessions[event.session].is_one_sided:
            raise LocalProtocolError(
                f"session {event.session:#x} is lost with is_over False; the close of a two-sided session is its end"
            )
        del self._sessions[event.session]
        del self._told[event.session]
        if not event.is_over:
            self._lost.add(event.session)
        for request in list(self._requests.values()):
            mine = [route for route in request.routes.values() if route.session == event.session]
            for route in mine:
                route.is_drained = route.is_drained or event.is_over
            if mine and request.failure is None:
                self._fail(request, event.reason)
            elif mine:
                self._settle(request, [piece for route in mine for piece in route.pieces.values()])

    def _on_session_over(self, session: int) -> None:
        """Release the bytes that the writer of a lost session could still write. It writes no more."""
        if session not in self._lost:
            raise LocalProtocolError(f"session {session:#x} is over, but it was not lost, or was over before")
        self._lost.remove(session)
        for request in list(self._requests.values()):
            mine = [route for route in request.routes.values() if route.session == session]
            for route in mine:
                route.is_drained = True
            if mine:
                self._settle(request, [piece for route in mine for piece in route.pieces.values()])

    # Messages

    def _drop(self, session: int, reason: str) -> None:
        self._actions.append(MessageDropped(session=session, reason=reason))

    def _route_of(self, session: int, request_id: str, route_index: int) -> tuple[ReceiverRequest, ReceiverRoute] | None:
        """Return the request and its route, if the route belongs to this session."""
        request = self._requests.get(request_id)
        route = request.routes.get(route_index) if request is not None else None
        if request is None or route is None or route.session != session:
            return None
        return request, route

    def _on_grant_request(self, session: int, message: GrantRequest) -> None:
        found = self._route_of(session, message.request_id, message.route)
        if found is None:
            self._refuse(session, message, f"request {message.request_id} is not expected here on route {message.route}")
            return
        request, route = found
        if request.failure is not None and not route.is_drained:
            self._ask_to_drain(request, route)
            return
        problem = request.failure or self._problem_of(request, route, message)
        if problem is not None:
            self._refuse(session, message, problem)
            return
        # A held chunk is answered later. Its writer repeats the question meanwhile.
        held = [wanted.chunk for wanted in message.chunks if request.is_held(wanted.chunk)]
        route.held.update(dict.fromkeys(held))
        try:
            grants = {
                wanted.chunk: self._grant_for(request, route, wanted.chunk)
                for wanted in message.chunks
                if wanted.chunk not in route.held
            }
        except ChunkTooLarge as error:
            self._refuse(session, message, str(error))
            self._fail(request, str(error))
            return
        if grants:
            self._issue(route, request.request_id, grants)

    def _on_held(self, event: ArrivalsHeld) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.failure is not None:
            return
        request.held, request.is_followed = event.tokens, True
        for route in request.routes.values():
            free = [chunk for chunk in route.held if not request.is_held(chunk)]
            route.held = {chunk: None for chunk in route.held if request.is_held(chunk)}
            try:
                grants = {chunk: self._grant_for(request, route, chunk) for chunk in free}
            except ChunkTooLarge as error:
                self._fail(request, str(error))
                return
            if grants:
                self._issue(route, request.request_id, grants)

    def _problem_of(self, request: ReceiverRequest, route: ReceiverRoute, message: GrantRequest) -> str | None:
        """Return why the grant request cannot be served as a whole, or None."""
        count = len(route.pieces) + sum(route.grant_of(wanted.chunk) is None for wanted in message.chunks)
        if count > MAX_CHUNKS_PER_MESSAGE:  # the upper bound of grants_ahead of any writer
            return (
                f"request {message.request_id} would have {count} unreleased grants on route {message.route}; "
                f"there can be {MAX_CHUNKS_PER_MESSAGE}"
            )
        for wanted in message.chunks:
            size = route.expected.size_of(wanted.chunk)
            if not size:
                return f"chunk {wanted.chunk} is not part of request {message.request_id} on route {message.route}"
            if size != wanted.num_bytes:
                return f"chunk {wanted.chunk} is {size} bytes here and {wanted.num_bytes} at the writer"
        return None

    def _grant_for(self, request: ReceiverRequest, route: ReceiverRoute, chunk: int) -> Grant:
        """Return the earlier grant, or a new one. The answer to a repeated request is the same grant (R3)."""
        granted = route.grant_of(chunk)
        if granted is not None:
            return granted
        return self._grant(request, route, request.chunks[chunk], route.expected.size_of(chunk))

    def _issue(self, route: ReceiverRoute, request_id: str, grants: Mapping[int, Grant]) -> None:
        """Send `GrantsIssued`; `grants` is by chunk index."""
        issued = tuple(IssuedGrant(chunk=chunk, begin=grant.begin, end=grant.end) for chunk, grant in grants.items())
        message = GrantsIssued(incarnation=self.ring.incarnation, request_id=request_id, route=route.route.index, grants=issued)
        self._actions.append(Send(session=route.session, message=message))

    def _refuse(self, session: int, message: GrantRequest, reason: str) -> None:
        answer = GrantRefused(
            incarnation=self.ring.incarnation, request_id=message.request_id, route=message.route, reason=clip_reason(reason)
        )
        self._actions.append(Send(session=session, message=answer))

    def _grant(self, request: ReceiverRequest, route: ReceiverRoute, chunk: Chunk, num_bytes: int) -> Grant:
        head, grant = self.ring.head, self.ring.assign(num_bytes)
        piece = ReceiverPiece(
            request=request.incoming,
            route=route.route,
            session=route.session,
            chunk=chunk,
            num_bytes=num_bytes,
            receiving=request,
            grant=grant,
            is_one_sided=self._sessions[route.session].is_one_sided,
        )
        route.pieces[chunk.index] = piece
        self._live[piece.grant.begin] = piece
        # A grant alone is no news for writers, and its ack would only delay the next one. But a writer may wait for padding.
        self._may_publish = self._may_publish or grant.begin != head
        self.ring_peak_bytes = max(self.ring_peak_bytes, min(self.ring.live_bytes, self.ring.capacity_bytes))
        self._waiting.add(piece.grant, piece)
        self._actions.append(PrepareScatter(piece=piece))
        return grant

    def _free_writable(self) -> None:
        """Post the receives of all grants whose bytes are free now, and note the writers that cannot know.

        Not earlier, so that no byte can land early (rule 2). Grants of a failed request are posted too: a write under way must
        settle.
        """
        while self._waiting.has_free:
            piece = self._waiting.pop()
            if not piece.is_one_sided:
                self._post(piece)
            told = self._told.get(piece.session)
            if told is not None and piece.grant.end - told > self.ring.capacity_bytes:
                self._news_for.add(piece.session)
                if self.ring.num_ranges > MAX_PUBLISHED_RANGES:
                    self.ring.name_next(piece.grant)

    def _publish(self) -> None:
        """Publish the watermark to the sessions that it concerns.

        While a watermark has no room for every released range, all sessions in use get one at each tick, because a session may
        wait for a range that was left out. For the same reason, they get the first watermark that has room for all ranges again.
        """
        was_truncated, self._is_truncated = self._is_truncated, self.ring.num_ranges > MAX_PUBLISHED_RANGES
        is_for_all = (was_truncated and not self._is_truncated) or (self._is_truncated and self._is_tick)
        self._actions.append(PublishWatermark(sessions=None if is_for_all else frozenset(self._news_for)))
        self._published = self.ring.position
        for session in self._news_for | self.sessions_in_use if is_for_all else self._news_for:
            self._told[session] = self._published
        self._news_for.clear()
        self._may_publish = False

    def _post(self, piece: ReceiverPiece) -> None:
        self._actions.append(PostReceive(piece=piece, key=grant_key(piece.grant.begin, piece.attempt)))

    def _on_chunk_ready(self, session: int, message: ChunkReady) -> None:
        found = self._route_of(session, message.request_id, message.route)
        route = found[1] if found is not None else None
        granted = route.grant_of(message.chunk) if route is not None else None
        if route is None or granted is None:
            self._drop(session, "unknown_chunk")
        elif (message.begin, message.num_bytes) != (granted.begin, route.expected.size_of(message.chunk)):
            self._drop(session, "wrong_grant")
        elif (piece := route.pieces.get(message.chunk)) is None:
            self._drop(session, "repeated")  # the grant was released meanwhile
        elif piece.stage is ReceiverStage.GRANTED and message.attempt < piece.attempt and piece.receiving.failure is None:
            self._reject(piece, "repeated, because the rejection was lost")
        elif piece.ready is not None or message.attempt != piece.attempt:
            self._drop(session, "repeated")  # rule 7: a set, not a count
        elif piece.receiving.failure is None:
            piece.ready = message  # of a scatter that waits for its signal: in case that is given up
            if piece.stage is ReceiverStage.GRANTED:
                self._scatter_if_here(piece)

    def _scatter_if_here(self, piece: ReceiverPiece) -> None:
        """Scatter once the writer has reported its write and, in a two-sided session, the receive has ended."""
        if piece.ready is None or not (piece.is_one_sided or piece.is_settled):
            return
        if not piece.is_one_sided and piece.received_bytes != piece.num_bytes:
            self._on_broken(piece, f"received {piece.received_bytes} bytes of {piece.num_bytes}")
            return
        self._start_scatter(piece, piece.ready.digest)

    def _start_scatter(self, piece: ReceiverPiece, digest: int | None) -> None:
        piece.stage = ReceiverStage.SCATTERING
        piece.receiving.num_scattering += 1
        self._actions.append(StartScatter(piece=piece, digest=digest))

    def awaits_signal(self, session: int, begin: int) -> bool:
        """Return whether a signal may start the scatter of the grant at `begin`. Otherwise, a signal is ignored."""
        piece = self._live.get(begin)
        return (
            piece is not None
            and piece.stage is ReceiverStage.GRANTED
            and piece.session == session
            and piece.ready is None
            and piece.attempt == 0
            and piece.is_one_sided
            and piece.receiving.failure is None
        )

    def _on_gather_signalled(self, event: GatherSignalled) -> None:
        if self.awaits_signal(event.session, event.begin):
            self._start_scatter(self._live[event.begin], event.digest)
        elif event.digest is None:
            raise LocalProtocolError(f"a signal has queued the scatter of grant {event.begin}, which awaits no signal")

    def _on_writer_drained(self, session: int, message: WriterDrained) -> None:
        found = self._route_of(session, message.request_id, message.route)
        if found is None:
            return  # answers a repeated abort
        request, route = found
        if route.is_drained:
            return  # a repeated message
        route.is_drained = True
        if request.failure is not None:
            self._settle(request, list(route.pieces.values()))
        elif not route.is_whole:
            self._fail(request, "the prefill rank gave the request up")
        # Otherwise the writer has sent its part and has forgotten the request, which others are still sending.

    # Outcomes

    def _piece_at(self, grant: Grant) -> ReceiverPiece:
        piece = self._live.get(grant.begin)
        if piece is None:
            raise LocalProtocolError(f"outcome for grant [{grant.begin}, {grant.end}), which is not live")
        return piece

    def _on_receive_settled(self, event: ReceiveSettled) -> None:
        piece = self._live.get(event.grant.begin)
        if piece is None:
            return  # its session was lost before, and the grant was released
        piece.is_settled, piece.received_bytes = True, event.num_bytes
        if piece.receiving.failure is not None:
            self._settle(piece.receiving, [piece])
        else:
            self._scatter_if_here(piece)

    def _on_receive_failed(self, event: ReceiveFailed) -> None:
        piece = self._live.get(event.grant.begin)
        if piece is not None and piece.session in self._sessions:
            # The state of a failed receive is unknown. Only the end of the session proves that it is over.
            self._actions.append(CloseSession(session=piece.session, reason=event.reason))

    def _on_scatter_finished(self, event: ScatterFinished) -> None:
        piece = self._piece_at(event.grant)
        if piece.stage is not ReceiverStage.SCATTERING:
            raise LocalProtocolError(
                f"scatter of grant [{event.grant.begin}, {event.grant.end}) finished, but none was under way"
            )
        request = piece.receiving
        request.num_scattering -= 1
        if event.is_intact is None:
            piece.stage = ReceiverStage.GRANTED
            if request.failure is not None:
                self.ring.quarantine(piece.grant)
                self._settle(request, [piece])
            else:
                self._scatter_if_here(piece)
            return
        if not event.is_intact:
            piece.stage = ReceiverStage.GRANTED
            self._on_broken(piece, "digest mismatch")
            return
        self._release(piece)  # rule 5: only now
        request.routes[piece.route.index].scattered.add(piece.chunk.index)
        if request.failure is not None:
            self._settle(request, ())
            return
        if request.is_followed and (num_tokens := request.take_arrived()) is not None:
            self._actions.append(IncomingArrived(request_id=request.request_id, num_tokens=num_tokens))
        if request.is_whole:
            self._complete(request)

    def _on_broken(self, piece: ReceiverPiece, reason: str) -> None:
        """Ask for a piece once more whose bytes arrived broken, or fail the request after the last attempt."""
        request = piece.receiving
        if piece.session in self._sessions:  # else the bytes may be incomplete or unchecked
            self._actions.append(ChunkBroken(session=piece.session, request_id=request.request_id))
        piece.ready = None
        if request.failure is not None:
            self.ring.quarantine(piece.grant)
            self._settle(request, [piece])
        elif piece.attempt + 1 >= MAX_ATTEMPTS:
            where = f"chunk {piece.chunk.index} of request {request.request_id} from prefill rank {piece.route.prefill_rank}"
            self._fail(request, f"{where} arrived broken {MAX_ATTEMPTS} times: {reason}", is_data_loss=True)
        else:
            piece.attempt += 1
            piece.is_settled, piece.received_bytes = False, 0
            self._reject(piece, reason)
            if not piece.is_one_sided:
                self._post(piece)

    def _reject(self, piece: ReceiverPiece, reason: str) -> None:
        message = ChunkRejected(
            incarnation=self.ring.incarnation,
            request_id=piece.request_id,
            route=piece.route.index,
            chunk=piece.chunk.index,
            begin=piece.grant.begin,
            attempt=piece.attempt - 1,
            reason=reason,
        )
        self._actions.append(Send(session=piece.session, message=message))

    # Time

    def _on_tick(self) -> None:
        # Ranges that the last watermark had no room for follow in the next ones, also when nothing changes any more.
        self._may_publish = self._may_publish or self._is_truncated
        self._is_tick = True
        due_s = self._now_s - self._settings.repeat_after_s
        for request in self._requests.values():
            if request.failure is None:
                continue
            for route in request.routes.values():
                if route.asked_s > due_s:
                    continue
                if route.is_drained:
                    self._remind(request, route)
                else:
                    self._ask_to_drain(request, route)

    def _remind(self, request: ReceiverRequest, route: ReceiverRoute) -> None:
        """Repeat messages that a drained writer may have lost, so that it declines the grants that it has not written."""
        waiting = [piece for piece in route.pieces.values() if piece.stage is ReceiverStage.GRANTED]
        route.asked_s = self._now_s
        for piece in waiting:
            if piece.attempt:
                self._reject(piece, "repeated, because no bytes arrived")
        fresh = [piece for piece in waiting if not piece.attempt]
        if fresh:
            self._issue(route, request.request_id, {piece.chunk.index: piece.grant for piece in fresh})
