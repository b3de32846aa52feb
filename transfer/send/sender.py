"""The sending end of the protocol as a state machine without I/O: `Sender.handle(event, now_s) -> list[Action]`.

One `Sender` per prefill rank. Its owner (`transfer.send.loop`) carries out the actions and reports the outcomes as events.
Numbered rules are those of docs/protocol.md.

Theory of operation
===================

A *request* is the KV of one prompt on its way to one decode instance. Both ends split it into the same *chunks*, by tokens and by
layers. A *route* is a pair of ranks, one of each end, that have KV heads in common. A *piece* is the part of a chunk that travels
on one route: one grant, one gather, one write. A *session* connects this rank with the ring of one decode rank. All requests
share it.

The stages of a piece::

    not asked -> ASKED -> GRANTED -> GATHERING -> WRITING -> WRITTEN -> RELEASED
                   |         ^          |            |          |
                   |         +-------------- rejected ----------+
                   +---------+----------+------------+----------+--> DROPPED, when its request fails

- ASKED. `_ask` requests the next grants of a route. At most `grants_ahead` pieces of a route are between ASKED and RELEASED, so
  one request cannot fill a ring.
- GRANTED. The piece has bytes of the ring, but an older grant may still use them.
- GATHERING. A gather begins when three conditions hold: the chunk is computed, the `RingView` shows its bytes as released (rule
  2), and staging memory has a place. The place comes last. Otherwise a piece that waits for the ring could hold the memory that
  an older piece needs. The ring may wait for that older piece (docs/adr/0010). A direct session needs no place: its gathers store
  into the ring.
- WRITING, WRITTEN. One write carries the place. Then `ChunkReady` is sent. On a direct session the gather is the write, and at
  most `MAX_DIRECT_GATHERS` are under way. If its stream sends a signal, `ChunkReady` follows only when no release comes.
- RELEASED. A watermark shows that the decode rank has copied the bytes into its pool. A piece whose bytes arrived broken is
  rejected instead: it is GRANTED again, with the next attempt number. The pages are kept until the release for this case. The
  place is not, because it is free for another piece as soon as the write ends.

What a peer sends can be lost, repeated, late or hostile:

- `GrantRequest` and `ChunkReady` are repeated after `repeat_after_s` until they are answered. A repeated question has the same
  answer.
- Each attempt at a grant has a key. Each key is written or declined exactly once, because a two-sided transport has one receive
  posted for it. `SessionState.spent` holds the keys of failed and unknown requests until their grants are released.
- A message that contradicts the state is dropped and counted (rule 14). A watermark that cannot be true closes its session.

A request fails as a whole (`_fail`). No new work begins, unused grants are declined, and gathers and writes that are under way
settle. Then every route whose session is open reports `WriterDrained`, and the owner gets `OutgoingFailed` (rule 9). When a
session is lost, its transport is closed already, so only its gathers are waited for.

`SourceReleased` comes when the last grant is released. After a failure it comes when no gather is under way.

Staging memory has slots, which belong to one session at a time (`StagingArena`). Sessions take turns for slots
(`_begin_ready_pieces`). The last free slot is kept for a session that has grants and no place. While a session waits for a slot,
a slot that a piece has left takes no more pieces. So a peer that takes no bytes cannot stop the others, and no session keeps a
slot for ever.

No event visits all pieces of a request, which can be tens of thousands. Grants that wait for ring bytes are indexed by the
position that blocks them (`transfer.ring_index`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import assert_never

from transfer.chunk import largest_wire_bytes
from transfer.errors import LocalProtocolError, RemoteProtocolError
from transfer.messages import (
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    ChunkSize,
    GrantRefused,
    GrantRequest,
    GrantsIssued,
    Message,
    WriterDrained,
)
from transfer.piece import RankRequest
from transfer.ring import ALIGNMENT_BYTES, MAX_ATTEMPTS, Grant, RingView, grant_key
from transfer.send.events import (
    Action,
    ChunkComputed,
    CloseSession,
    Decline,
    Event,
    GatherFinished,
    MessageArrived,
    MessageDropped,
    OutgoingAborted,
    OutgoingFailed,
    OutgoingSent,
    OutgoingStarted,
    PieceReleased,
    Send,
    SenderSessionLost,
    SenderSessionOpened,
    SenderSettings,
    SentStats,
    SourceReleased,
    StagedWriteFailed,
    StartGather,
    StartWrite,
    Tick,
    WaitGivenUp,
    WatermarkArrived,
    WriteFinished,
)
from transfer.send.staging_arena import StagingArena
from transfer.send.state import PiecesUnderWay, SenderPiece, SenderRequest, SenderRoute, SenderStage, SessionState

MAX_DIRECT_GATHERS = 64
"""Per session. All may be queued behind one event, and a launch into a full queue (some 1000 entries) blocks the loop."""

MAX_SPENT_KEYS = 4096  # limit of one session; an honest ring has far fewer unreleased grants


class Sender:
    """See the module's docstring.

    Invariants (`check_invariants`): a place belongs to exactly one piece of a living request, which is GATHERING or WRITING. A
    piece takes a place only when its grant is writable, so the piece in a place can always go on. Pieces of direct sessions take
    no staging memory.
    """

    def __init__(self, settings: SenderSettings, *, incarnation: int) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._sessions: dict[int, SessionState] = {}
        self._requests: dict[str, SenderRequest] = {}
        self._staging = StagingArena(settings.num_slots * settings.slot_bytes, settings.slot_bytes)
        self._pieces = PiecesUnderWay(self._staging)
        self._actions: list[Action] = []
        self._now_s = 0.0
        # Sessions with a piece that needs only a place to begin. The session that had a place last comes last.
        self._eager: dict[int, SessionState] = {}
        # The same, but without a place when no slot was free. They come first when one is. A busy rank has a thousand of them.
        self._blocked: OrderedDict[int, SessionState] = OrderedDict()
        self._granted: dict[int, SessionState] = {}  # staged sessions with held grants

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Mapping[str, SenderRequest]:
        """Requests that are not over, by id. Read only."""
        return self._requests

    @property
    def sessions_in_use(self) -> set[int]:
        """Sessions of the requests that are not over."""
        return {route.session for request in self._requests.values() for route in request.outgoing.routes}

    @property
    def num_slots(self) -> int:
        """Slots of the staging memory: as many as it has room for the largest piece of any session's requests."""
        return self._staging.num_slots

    @property
    def num_slots_used(self) -> int:
        """Slots of staging memory in which a piece has a place."""
        return self._staging.num_slots - self._staging.num_free

    @property
    def num_spent_keys(self) -> int:
        """Spent keys of all sessions, see `SessionState.spent`."""
        return sum(len(session.spent) for session in self._sessions.values())

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take in one event; return the actions, in order. Raise LocalProtocolError if the owner broke a rule."""
        self._now_s = now_s
        match event:
            case SenderSessionOpened():
                self._on_session_opened(event)
            case SenderSessionLost():
                self._on_session_lost(event)
            case WatermarkArrived():
                self._on_watermark(event)
            case OutgoingStarted():
                self._on_request_started(event.request)
            case ChunkComputed():
                self._on_chunk_computed(event)
            case MessageArrived(session=session, message=message) if not self._is_of_session(session, message):
                self._drop(session, "other_incarnation" if session in self._sessions else "unknown_session")
            case MessageArrived(session=session, message=GrantsIssued() as message):
                self._on_grants(session, message)
            case MessageArrived(session=session, message=GrantRefused() as message):
                self._on_refused(session, message)
            case MessageArrived(session=session, message=ChunkRejected() as message):
                self._on_rejected(session, message)
            case MessageArrived(session=session, message=AbortTransfer() as message):
                self._on_abort(session, message)
            case MessageArrived():
                self._drop(event.session, "unexpected_type")
            case GatherFinished():
                self._on_gather_finished(event)
            case WriteFinished():
                # If its session was lost first, no piece is at the place.
                if (piece := self._pieces.piece_at(event.place, SenderStage.WRITING)) is not None:
                    self._on_written(piece)
            case StagedWriteFailed():
                self._on_write_failed(event)
            case OutgoingAborted():
                if (request := self._requests.get(event.request_id)) is not None:
                    self._fail(request, event.reason)
            case Tick():
                self._on_tick()
            case _:
                assert_never(event)
        if self._eager or (self._blocked and self._staging.num_free):
            self._begin_ready_pieces()
        actions, self._actions = self._actions, []
        return actions

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if the state contradicts itself."""
        self._pieces.check_invariants()
        for place, piece in self._pieces.held().items():
            if self._requests.get(piece.request_id) is not piece.sending:
                raise LocalProtocolError(f"invariant broken: place {place} is held for a request that is over")
        for session in self._sessions.values():
            session.check_invariants()
        held: set[tuple[int, int]] = set()
        for request in self._requests.values():
            request.check_invariants()
            granted = [piece for piece in request.outstanding() if piece.grant is not None]
            held.update((piece.session, piece.granted.begin) for piece in granted if piece.session in self._sessions)
        if held != {(number, begin) for number, session in self._sessions.items() for begin in session.held}:
            raise LocalProtocolError("invariant broken: held grants and the grants of the requests differ")

    # Sessions

    def _on_session_opened(self, event: SenderSessionOpened) -> None:
        if event.session in self._sessions:
            raise LocalProtocolError(f"session {event.session:#x} opened twice")
        view = RingView(event.ring_capacity_bytes, incarnation=event.incarnation)
        self._sessions[event.session] = SessionState(view=view, is_direct=event.is_direct)

    def _on_session_lost(self, event: SenderSessionLost) -> None:
        self._sessions.pop(event.session, None)
        for sessions in (self._eager, self._blocked, self._granted):
            sessions.pop(event.session, None)
        self._divide_staging()
        for request in list(self._requests.values()):
            lost = [route for route in request.routes.values() if route.session == event.session and route.pieces]
            if not lost:
                continue
            for piece in [piece for route in lost for piece in route.outstanding.values()]:
                if piece.stage is SenderStage.WRITING:
                    self._pieces.free(piece)
                if piece.stage is not SenderStage.GATHERING:
                    self._end_wait(piece)
                    piece.stage = SenderStage.DROPPED
                    self._let_go(piece)
            if request.failure is None:
                self._fail(request, event.reason)
            else:
                self._finish_failed(request)  # it may have waited only for this session's writes

    def _on_watermark(self, event: WatermarkArrived) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        session.waiting.begin_turn()
        try:
            released = session.take_in(event.watermark)
        except RemoteProtocolError as error:
            self._actions.append(CloseSession(session=event.session, reason=str(error)))
            return
        for piece in released:
            self._release(piece)
        self._note_free(event.session, session)

    def _release(self, piece: SenderPiece) -> None:
        """End a piece that the peer has taken over, and the request after its last piece."""
        request = piece.sending
        self._let_go(piece)
        piece.stage = SenderStage.RELEASED
        self._actions.append(PieceReleased(ack_s=self._now_s - piece.written_s))
        request.to_release -= 1
        if request.to_release == 0:
            self._release_source(request)
            del self._requests[request.request_id]
            self._actions.append(OutgoingSent(request_id=request.request_id, stats=request.stats(self._now_s)))
        else:
            self._ask(request, request.routes[piece.route.index])

    # Requests

    def _on_request_started(self, outgoing: RankRequest) -> None:
        if outgoing.request_id in self._requests:
            raise LocalProtocolError(f"request {outgoing.request_id} started twice")
        request = SenderRequest.of(outgoing)
        self._requests[outgoing.request_id] = request
        missing = [route.session for route in outgoing.routes if route.session not in self._sessions]
        if missing:
            self._fail(request, f"session {missing[0]:#x} with the decode rank is lost")
        elif not request.to_release:
            # The other side needs nothing of this rank (a replica, or another stage's layers).
            del self._requests[outgoing.request_id]
            self._actions.append(SourceReleased(request_id=request.request_id))
            self._actions.append(OutgoingSent(request_id=request.request_id, stats=SentStats()))
        elif (largest := self._note_plan(outgoing)) > (most := self._settings.slot_bytes):
            self._fail(request, f"its pieces have up to {largest} bytes; a staging slot of this rank has room for {most}")
        else:
            for state in request.routes.values():
                self._ask(request, state)

    def _note_plan(self, outgoing: RankRequest) -> int:
        """Note the most bytes that staged pieces of the request's plan can have, for the size of slots. Return them."""
        plan, largest = outgoing.plan, 0
        for one in outgoing.routes:
            session, key = self._sessions[one.session], (plan, one.route.index)
            if not session.is_direct and key not in session.piece_bytes:
                num_bytes = largest_wire_bytes(plan, outgoing.layout, [one.route], outgoing.wire_dtype)
                if num_bytes <= self._settings.slot_bytes:
                    session.piece_bytes[key] = num_bytes
                    self._divide_staging()
                largest = max(largest, num_bytes)
        return largest

    def _divide_staging(self) -> None:
        """Make slots that have room for the largest piece of every open session's requests, and not more."""
        largest = max((size for session in self._sessions.values() for size in session.piece_bytes.values()), default=0)
        self._staging.divide(largest or self._settings.slot_bytes)

    def _ask(self, request: SenderRequest, route: SenderRoute) -> None:
        """Ask for the route's next grants, up to `grants_ahead`."""
        fresh = request.next_pieces(route, max(0, self._settings.grants_ahead - len(route.outstanding)))
        self._send_grant_request(request, route, fresh)

    def _send_grant_request(self, request: SenderRequest, route: SenderRoute, pieces: list[SenderPiece]) -> None:
        if not pieces:
            return
        for piece in pieces:
            piece.since_s = self._now_s
        sizes = tuple(ChunkSize(chunk=piece.chunk.index, num_bytes=piece.num_bytes) for piece in pieces)
        message = GrantRequest(
            incarnation=self._incarnation, request_id=request.request_id, route=route.route.index, chunks=sizes
        )
        self._actions.append(Send(session=route.session, message=message))

    def _on_chunk_computed(self, event: ChunkComputed) -> None:
        request = self._requests.get(event.request_id)
        if request is None or request.failure is not None:
            return  # given up during its computation
        if event.chunk in request.computed or not 0 <= event.chunk < request.num_chunks:
            raise LocalProtocolError(f"chunk {event.chunk} of request {event.request_id} is unknown or was computed twice")
        request.computed[event.chunk] = event.event
        if len(request.computed) == request.num_chunks:
            request.computed_s = self._now_s
        for route in request.routes.values():
            piece = route.pieces.get(event.chunk)
            if piece is not None and piece.stage is SenderStage.GRANTED:
                self._mark_ready(piece)

    def _mark_ready(self, piece: SenderPiece) -> None:
        piece.ready_s = self._now_s
        session = self._sessions[piece.session]
        session.waiting.add(piece.granted, piece)
        self._note_free(piece.session, session)

    def _note_free(self, number: int, session: SessionState) -> None:
        """Queue the session for a look if waiting grants may have become writable, or must be looked at."""
        if number not in self._blocked and (session.waiting.has_free or session.waiting.has_later):
            self._eager[number] = session

    def _begin_ready_pieces(self) -> None:
        """Begin the pieces whose grants are writable: at once on direct sessions, otherwise as staging memory allows, in turn.

        A place goes only to a writable grant. If a waiting grant held it, the older grant that it waits for could lack it (rule
        2, docs/adr/0010). In a session, no piece overtakes one that is too large for the room that is left.
        """
        unlooked = next((number for number, session in self._eager.items() if session.waiting.has_later), None)
        if unlooked is not None:  # one session in each turn, however expensive peers make their looks
            self._eager[unlooked] = self._eager.pop(unlooked)
            self._eager[unlooked].waiting.begin_turn()
        starving = _Starving(self._granted, self._blocked, self._eager, self._staging)
        for number, session in self._in_turn():
            waiting = session.waiting
            while waiting.has_free:
                if session.is_direct:
                    if session.num_gathering >= MAX_DIRECT_GATHERS:
                        break
                    self._pieces.add_direct(waiting.first())
                elif not self._stage(waiting.first(), starving):
                    break
                self._begin_gather(waiting.pop(), session)
                self._eager[number] = self._eager.pop(number)  # after the others
            if not waiting.has_free and not waiting.has_later:
                del self._eager[number]

    def _in_turn(self) -> Iterator[tuple[int, SessionState]]:
        """Return the sessions of a turn: blocked ones while a slot is free, then eager ones. Block those that have no room."""
        eager, has_one = list(self._eager.items()), self._staging.has_one
        while self._blocked and self._staging.num_free:
            number, session = self._blocked.popitem(last=False)
            self._eager[number] = session
            yield number, session
        for number, session in eager:
            if self._staging.num_free or session.is_direct or has_one(number) or session.waiting.has_later:
                yield number, session
            else:
                self._blocked[number] = self._eager.pop(number)

    def _stage(self, piece: SenderPiece, starving: _Starving) -> bool:
        """Give the piece a place in staging memory, unless other sessions come first."""
        num_free, is_holder = self._staging.num_free, self._staging.has_one(piece.session)
        may_open = num_free > 1 or not is_holder or (num_free == 1 and not starving.keep_last_slot)
        may_refill = num_free > 0 or not starving.wait_for_slot
        return self._pieces.stage(piece, may_open=may_open, may_refill=may_refill)

    # Gather and write

    def _begin_gather(self, piece: SenderPiece, session: SessionState) -> None:
        """Start the gather of a piece that has its place, and record its wait for credit."""
        assert piece.ready_s is not None and piece.place is not None
        if piece.sending.first_gather_s is None:
            piece.sending.first_gather_s = self._now_s
        piece.stage = SenderStage.GATHERING
        session.num_gathering += 1
        event, waited_s = piece.sending.computed[piece.chunk.index], self._now_s - piece.ready_s
        self._actions.append(StartGather(piece=piece, place=piece.place, event=event, credit_wait_s=waited_s))

    def _on_gather_finished(self, event: GatherFinished) -> None:
        piece = self._pieces.piece_at(event.place, SenderStage.GATHERING)
        if piece is None:
            raise LocalProtocolError(f"gather into place {event.place} finished, but none was under way")
        request = piece.sending
        piece.digest = event.digest
        session = self._sessions.get(piece.session)
        if session is not None:
            session.num_gathering -= 1
        if session is not None and session.is_direct:
            # For a failed request too: the key is spent, and must not be declined as well.
            self._on_written(piece, is_signalled=event.is_signalled)
        elif session is None or request.failure is not None:
            self._pieces.free(piece)
            self._give_up(piece)
            self._finish_failed(request)
        else:
            piece.stage, piece.since_s = SenderStage.WRITING, self._now_s
            assert piece.place is not None
            self._actions.append(StartWrite(piece=piece, place=piece.place, key=grant_key(piece.granted.begin, piece.attempt)))

    def _on_written(self, piece: SenderPiece, *, is_signalled: bool = False) -> None:
        """Record that the piece's bytes lie in its grant: `WriteFinished`, or on a direct session `GatherFinished`.

        A signalled piece may be released already. Otherwise `ChunkReady` is sent at a tick, in case the signal was missed.
        """
        request, grant = piece.sending, piece.granted
        self._pieces.free(piece)
        request.writes += 1
        request.num_bytes += piece.num_bytes
        request.slices += request.routes[piece.route.index].expected.num_slices(piece.chunk)
        piece.stage, piece.since_s, piece.written_s = SenderStage.WRITTEN, self._now_s, self._now_s
        if request.failure is not None:
            # The peer will not take it over any more. The request waited only for the end of the write.
            self._drop_written(piece)
            self._finish_failed(request)
            return
        session = self._sessions[piece.session]
        if not is_signalled:
            self._send_ready(piece)
        if session.view.is_released(grant):
            self._release(piece)
        else:
            session.add_written(piece)

    def _send_ready(self, piece: SenderPiece) -> None:
        message = ChunkReady(
            incarnation=self._incarnation,
            request_id=piece.request_id,
            route=piece.route.index,
            chunk=piece.chunk.index,
            begin=piece.granted.begin,
            num_bytes=piece.num_bytes,
            digest=piece.digest,
            attempt=piece.attempt,
        )
        self._actions.append(Send(session=piece.session, message=message))

    def _on_write_failed(self, event: StagedWriteFailed) -> None:
        piece = self._pieces.piece_at(event.place, SenderStage.WRITING)
        if piece is not None:
            # A failed write leaves the session in an unknown state. Only its end proves that nothing lands any more.
            self._actions.append(CloseSession(session=piece.session, reason=event.reason))

    # Messages

    def _is_of_session(self, number: int, message: Message) -> bool:
        """Return whether the session is open, and the message is of its decode instance's life."""
        session = self._sessions.get(number)
        return session is not None and session.view.incarnation == message.incarnation

    def _drop(self, session: int, reason: str) -> None:
        self._actions.append(MessageDropped(session=session, reason=reason))

    def _piece_of(self, session: int, request_id: str, route_index: int, chunk: int) -> SenderPiece | None:
        request = self._requests.get(request_id)
        route = request.route_of(session, route_index) if request is not None else None
        return route.pieces.get(chunk) if route is not None else None

    def _on_refused(self, session: int, message: GrantRefused) -> None:
        request = self._requests.get(message.request_id)
        route = request.route_of(session, message.route) if request is not None else None
        if request is None or route is None:
            return
        if route.is_asking:
            self._fail(request, message.reason)
        else:
            # The answer to a repeated question: the target has everything and has forgotten the request.
            self._drop(session, "nothing_asked")

    def _on_grants(self, session: int, message: GrantsIssued) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            # The request was given up after it asked: the bytes must go back to the ring.
            for issued in message.grants:
                self._decline_unknown(session, Grant(issued.begin, issued.end), attempt=0)
            self._send_drained(session, message.request_id, message.route)
            return
        state = self._sessions[session]
        for issued in message.grants:
            piece = self._piece_of(session, message.request_id, message.route, issued.chunk)
            grant = Grant(issued.begin, issued.end)
            if piece is None:
                self._drop(session, "unknown_chunk")
            elif not state.view.can_hold(grant, piece.num_bytes):
                self._drop(session, "impossible_grant")
            elif piece.stage is SenderStage.ASKED and state.view.is_released(grant):
                self._drop(session, "released_grant")
            elif piece.grant is None and state.is_taken(issued.begin):
                self._drop(session, "granted_twice")
            elif piece.stage is SenderStage.ASKED:
                piece.grant = grant
                state.held.add(issued.begin)
                if not state.is_direct:
                    self._granted[session] = state
                piece.stage, piece.since_s = SenderStage.GRANTED, self._now_s
                if piece.chunk.index in request.computed:
                    self._mark_ready(piece)
            elif piece.stage is SenderStage.DROPPED and piece.grant is None:
                piece.grant = grant
                self._give_up(piece)

    def _on_rejected(self, session: int, message: ChunkRejected) -> None:
        if message.attempt + 1 >= MAX_ATTEMPTS:
            self._drop(session, "too_many_attempts")
            return
        piece = self._piece_of(session, message.request_id, message.route, message.chunk)
        if piece is None or piece.stage is SenderStage.DROPPED:
            # Given up meanwhile: the receive that is posted for the next attempt must settle all the same.
            first_bytes = Grant(message.begin, message.begin + ALIGNMENT_BYTES)
            self._decline_unknown(session, first_bytes, attempt=message.attempt + 1)
        elif piece.stage is SenderStage.WRITTEN and message.attempt == piece.attempt:
            # For this case, the pages are kept until the grant is released.
            self._sessions[session].discard_written(piece)
            piece.attempt += 1
            piece.sending.resends += 1
            piece.stage, piece.since_s = SenderStage.GRANTED, self._now_s
            self._mark_ready(piece)

    def _on_abort(self, session: int, message: AbortTransfer) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            self._send_drained(session, message.request_id, message.route)
        elif (route := request.route_of(session, message.route)) is not None:
            self._fail(request, message.reason)
            if message.request_id in self._requests and route.is_drained:
                self._send_drained(session, message.request_id, message.route)

    def _send_drained(self, session: int, request_id: str, route_index: int) -> None:
        message = WriterDrained(incarnation=self._incarnation, request_id=request_id, route=route_index)
        self._actions.append(Send(session=session, message=message))

    # Failure

    def _fail(self, request: SenderRequest, reason: str) -> None:
        """Give the request up: begin nothing more, let work under way settle, and decline unused grants."""
        if request.failure is not None:
            return
        request.failure = reason
        for route in request.routes.values():
            route.unasked = iter(())
        for piece in request.outstanding():
            if piece.stage in (SenderStage.ASKED, SenderStage.GRANTED):
                self._give_up(piece)
            elif piece.stage is SenderStage.WRITTEN:
                self._drop_written(piece)
        self._finish_failed(request)

    def _give_up(self, piece: SenderPiece) -> None:
        """Drop a piece whose attempt was not written, and decline its grant."""
        self._end_wait(piece)
        piece.stage = SenderStage.DROPPED
        self._let_go(piece)
        if piece.grant is not None:
            self._spend_written(piece, num_attempts=piece.attempt)
            self._decline(piece.session, piece.grant, attempt=piece.attempt)

    def _end_wait(self, piece: SenderPiece) -> None:
        """Report how long a piece that is about to be dropped has waited for credit."""
        if piece.stage is SenderStage.GRANTED and piece.ready_s is not None:
            self._actions.append(WaitGivenUp(credit_wait_s=self._now_s - piece.ready_s))

    def _drop_written(self, piece: SenderPiece) -> None:
        """Drop a piece whose bytes were sent: its keys are spent."""
        self._let_go(piece)
        piece.stage = SenderStage.DROPPED
        self._sessions[piece.session].discard_written(piece)
        self._spend_written(piece, num_attempts=piece.attempt + 1)

    def _spend_written(self, piece: SenderPiece, *, num_attempts: int) -> None:
        """Mark the keys of a dropped piece's written attempts as spent."""
        session = self._sessions.get(piece.session)
        if session is not None:
            for attempt in range(num_attempts):
                session.spend(grant_key(piece.granted.begin, attempt), piece.granted)

    def _let_go(self, piece: SenderPiece) -> None:
        """Remove a piece from the outstanding pieces, and its grant from the held grants."""
        piece.sending.routes[piece.route.index].outstanding.pop(piece.chunk.index, None)
        session = self._sessions.get(piece.session)
        if session is not None and piece.grant is not None:
            session.held.discard(piece.grant.begin)
            session.waiting.discard(piece.grant)
            if not session.held:
                self._granted.pop(piece.session, None)

    def _decline_unknown(self, number: int, grant: Grant, *, attempt: int) -> None:
        """Decline a grant that belongs to no request here, if it is possible: a peer may send anything."""
        session = self._sessions[number]
        if grant.begin in session.held or not session.view.can_hold(grant, 1):
            self._drop(number, "impossible_grant")
        elif len(session.spent) >= MAX_SPENT_KEYS:
            reason = f"the decode rank has {len(session.spent)} unreleased grants of requests that are over"
            self._actions.append(CloseSession(session=number, reason=reason))
        else:
            self._decline(number, grant, attempt=attempt)

    def _decline(self, number: int, grant: Grant, *, attempt: int) -> None:
        """Settle the receive of a key that will never be written; once, and never for a spent key."""
        session = self._sessions.get(number)
        key = grant_key(grant.begin, attempt)
        if session is not None and session.spend(key, grant):
            self._actions.append(Decline(session=number, key=key))

    def _finish_failed(self, request: SenderRequest) -> None:
        """Release the source after the last gather. If nothing is under way, report and forget the request (rule 9)."""
        under_way = request.outstanding()
        if not any(piece.stage is SenderStage.GATHERING for piece in under_way):
            self._release_source(request)
        if under_way:
            return
        del self._requests[request.request_id]
        for route in request.outgoing.routes:
            if route.session in self._sessions:
                self._send_drained(route.session, request.request_id, route.route.index)
        assert request.failure is not None
        self._actions.append(OutgoingFailed(request_id=request.request_id, reason=request.failure))

    def _release_source(self, request: SenderRequest) -> None:
        if not request.source_released:
            request.source_released = True
            self._actions.append(SourceReleased(request_id=request.request_id))

    # Time

    def _on_tick(self) -> None:
        due_s = self._now_s - self._settings.repeat_after_s
        for request in self._requests.values():
            for route in request.routes.values():
                overdue = [p for p in route.outstanding.values() if p.stage is SenderStage.ASKED and p.since_s <= due_s]
                self._send_grant_request(request, route, overdue)
        for session in self._sessions.values():
            for piece in session.written:
                if piece.since_s <= due_s:
                    piece.since_s = self._now_s
                    self._send_ready(piece)
        self._close_stuck()

    def _close_stuck(self) -> None:
        """Close sessions whose writes, or the release of written pieces, take too long."""
        limit_s = self._settings.write_timeout_s
        stuck: dict[int, str] = {}
        for piece in self._pieces.held().values():
            if piece.stage is SenderStage.WRITING and self._now_s - piece.since_s > limit_s:
                stuck.setdefault(
                    piece.session, f"a write of {piece.num_bytes} bytes has been pending for more than {limit_s:g} s"
                )
        for number, session in self._sessions.items():
            oldest = next(iter(session.written), None)
            if oldest is not None and self._now_s - oldest.written_s > limit_s:
                stuck.setdefault(number, f"a write of {oldest.num_bytes} bytes was not taken over for more than {limit_s:g} s")
        self._actions.extend(CloseSession(session=session, reason=reason) for session, reason in stuck.items())


class _Starving:
    """Staged sessions without a place, during one turn: sessions that have one may have to leave room for them."""

    def __init__(
        self,
        granted: Mapping[int, SessionState],
        blocked: Mapping[int, SessionState],
        eager: Mapping[int, SessionState],
        staging: StagingArena,
    ) -> None:
        self._granted = granted
        self._waiting = (blocked, eager)
        self._staging = staging

    @cached_property
    def keep_last_slot(self) -> bool:
        """Whether the last free slot is kept for a session that has grants and no place.

        Otherwise a peer that takes no bytes could hold every slot, and stop the transfers of all other peers.
        """
        return not self._granted.keys() <= self._staging.sessions

    @cached_property
    def wait_for_slot(self) -> bool:
        """Whether a session without a place has a piece that could begin. Read only if no slot is free, until the turn ends."""
        has_one = self._staging.has_one
        return any(
            session.waiting.has_free
            for sessions in self._waiting
            for number, session in sessions.items()
            if not session.is_direct and not has_one(number)
        )
