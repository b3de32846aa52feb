"""The writer's protocol machine against a decode rank that says anything, at any time; this side's own events are lawful.

After every step the machine's invariants hold, and what is asked of this side's memory is possible: a gather into a place that is
free, of pages that were not given back; a write that lies in the ring that the peer has told. In the end the peer goes away, and
nothing may be left.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from fuzz.histories import (
    CROWDED,
    DECODE_LIFE,
    IDS,
    LAYOUT,
    MAX_BYTES,
    MAX_SESSIONS,
    PLAN,
    PREFILL_LIFE,
    TOKENS,
    Step,
    check_with,
    history,
    listed,
    mutator,
    numbers,
    routes_of,
)
from fuzz.target import Target, require
from transfer.chunk import split_into_chunks
from transfer.errors import LocalProtocolError, RemoteProtocolError
from transfer.messages import (
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    ChunkSize,
    GrantRefused,
    GrantRequest,
    GrantsIssued,
    IssuedGrant,
    Message,
    WriterDrained,
    decode,
    encode,
)
from transfer.piece import RankRequest, SessionRoute
from transfer.ring import ALIGNMENT_BYTES, MAX_KEPT_RANGES, Grant, Watermark
from transfer.send import events as tx
from transfer.send.sender import MAX_DIRECT_GATHERS, MAX_SPENT_KEYS, Sender
from transfer.transport.base import REGION_ALIGNMENT_BYTES


class World:
    """This side of a `Sender`: what it gathers and writes, and what it owes an outcome."""

    def __init__(self, setting: Step) -> None:
        self.num_slots = 1 + setting.below(4)
        self.staging_bytes = self.num_slots * REGION_ALIGNMENT_BYTES
        settings = tx.SenderSettings(
            num_slots=self.num_slots, slot_bytes=REGION_ALIGNMENT_BYTES, grants_ahead=1 + setting.below(8), write_timeout_s=30.0
        )
        self.machine = Sender(settings, incarnation=PREFILL_LIFE)
        every = routes_of(setting.number())
        self.routes = tuple(route for route in every if route.prefill_rank == 0)
        self.cells = 1 + setting.below(64)
        self.direct = setting.number()
        self.now_s = 0.0
        self.num_opened = 0
        self.session_of: dict[int, int] = {}  # decode rank -> open session
        self.open: dict[int, bool] = {}  # session -> whether it is direct
        self.gathering: dict[int, tx.StartGather] = {}
        self.writing: dict[int, tx.StartWrite] = {}
        self.uncomputed: dict[str, int] = {}
        self.num_chunks: dict[str, int] = {}
        self.started: set[str] = set()  # and without an outcome
        self.kept: set[str] = set()  # whose pages have not been given back
        self.sequence = 0
        for route in self.routes:
            self.open_session(route.decode_rank)

    # This side

    def open_session(self, decode_rank: int) -> None:
        if decode_rank in self.session_of or self.num_opened >= MAX_SESSIONS:
            return
        self.num_opened += 1
        number = self.num_opened
        is_direct = bool(self.direct >> number & 1)
        self.session_of[decode_rank], self.open[number] = number, is_direct
        capacity = self.cells * ALIGNMENT_BYTES
        self.tell(
            tx.SenderSessionOpened(session=number, incarnation=DECODE_LIFE, ring_capacity_bytes=capacity, is_direct=is_direct)
        )

    def lose(self, session: int, reason: str = "lost") -> None:
        if self.open.pop(session, None) is None:
            return
        self.session_of = {rank: number for rank, number in self.session_of.items() if number != session}
        self.writing = {place: write for place, write in self.writing.items() if write.piece.session != session}
        self.tell(tx.SenderSessionLost(session=session, reason=reason))

    def start(self, request_id: str, num_tokens: int, start_token: int) -> None:
        if (
            request_id in self.started
            or request_id in self.kept
            or any(r.decode_rank not in self.session_of for r in self.routes)
        ):
            return
        mine = tuple(SessionRoute(route=route, session=self.session_of[route.decode_rank]) for route in self.routes)
        request = RankRequest(
            request_id=request_id,
            layout=LAYOUT,
            plan=PLAN,
            wire_dtype=LAYOUT.dtype,
            digest="xxh3-64",
            num_tokens=num_tokens,
            start_token=start_token,
            routes=mine,
        )
        chunks = split_into_chunks(PLAN, num_tokens=num_tokens, num_layers=LAYOUT.num_layers, start_token=start_token)
        self.uncomputed[request_id], self.num_chunks[request_id] = 0, len(chunks)
        self.started.add(request_id)
        self.kept.add(request_id)
        self.tell(tx.OutgoingStarted(request=request))

    def compute(self, request_id: str) -> None:
        chunk = self.uncomputed.get(request_id, 0)
        if request_id in self.started and chunk < self.num_chunks[request_id]:
            self.uncomputed[request_id] += 1
            self.tell(tx.ChunkComputed(request_id=request_id, chunk=chunk))

    def end_gather(self, place: int) -> None:
        del self.gathering[place]
        self.tell(tx.GatherFinished(place=place, digest=place))

    def end_write(self, place: int, *, is_failed: bool) -> None:
        del self.writing[place]
        self.tell(tx.StagedWriteFailed(place=place, reason="broke") if is_failed else tx.WriteFinished(place=place))

    # The machine

    def tell(self, event: tx.Event) -> None:
        actions = self.machine.handle(event, self.now_s)
        self.machine.check_invariants()
        closing = [action for action in actions if isinstance(action, tx.CloseSession)]
        for action in actions:
            self._take(action)
        self._check_bounds(len(actions))
        for action in closing:
            require(len(action.reason.splitlines()) == 1, f"a reason of several lines: {action.reason!r}")
            self.lose(action.session, action.reason)

    def _take(self, action: tx.Action) -> None:
        match action:
            case tx.StartGather():
                require(action.place not in self.gathering and action.place not in self.writing, "a place that is in use")
                self._check_place(action)
                require(action.piece.request_id in self.kept, "a gather from pages that were given back")
                require(
                    action.piece.chunk.index < self.uncomputed[action.piece.request_id],
                    "a gather before its chunk is computed",
                )
                self._check_target(action.piece.granted, action.piece.num_bytes)
                self._check_writable(action.piece.session, action.piece.granted)
                self.gathering[action.place] = action
            case tx.StartWrite():
                require(action.piece.session in self.open, "a write on a session that is closed")
                require(action.place not in self.gathering and action.place not in self.writing, "a place that is in use")
                require(not self.open[action.piece.session], "a write on a direct session")
                self._check_target(action.piece.granted, action.piece.num_bytes)
                self.writing[action.place] = action
            case tx.Decline():
                require(action.session in self.open and 0 <= action.key < 2**61, f"{action!r} cannot be declined")
            case tx.Send():
                require(action.session in self.open, "a message to a session that is closed")
                require(decode(encode(action.message)) == action.message, "a message that no peer can read")
            case tx.SourceReleased():
                require(action.request_id in self.kept, "pages that are given back twice")
                busy = any(gather.piece.request_id == action.request_id for gather in self.gathering.values())
                require(not busy, "pages that are given back under a gather")
                self.kept.discard(action.request_id)
            case tx.OutgoingSent() | tx.OutgoingFailed():
                require(action.request_id in self.started, "a second outcome")
                require(action.request_id not in self.kept, "an outcome before the pages are given back")
                self.started.discard(action.request_id)

    def _check_place(self, action: tx.StartGather) -> None:
        begin, end = action.place, action.place + action.piece.num_bytes
        under_way: dict[int, tx.StartGather | tx.StartWrite] = {**self.gathering, **self.writing}
        others = [(place, place + other.piece.num_bytes) for place, other in under_way.items()]
        is_alone = all(begin >= other_end or end <= other for other, other_end in others)
        is_staged = is_alone and end <= self.staging_bytes
        require(is_staged or begin >= self.staging_bytes, f"a piece in [{begin}, {end}) of {self.staging_bytes} bytes")

    def _check_target(self, grant: Grant, num_bytes: int) -> None:
        capacity = self.cells * ALIGNMENT_BYTES
        offset = grant.begin % capacity
        require(offset % ALIGNMENT_BYTES == 0 and 0 < num_bytes <= grant.end - grant.begin, f"{grant} is no grant of {num_bytes}")
        require(offset + num_bytes <= capacity, f"{grant} reaches over the end of a ring of {capacity} bytes")

    def _check_writable(self, session: int, grant: Grant) -> None:
        """Rule 2: the peer reported these bytes as released; a view that dropped ranges may not know it."""
        view = self.machine._sessions[session].view
        require(view.is_writable(grant) or len(view._begins) == MAX_KEPT_RANGES, f"{grant} begins before its bytes are released")

    def _check_bounds(self, num_actions: int) -> None:
        """What a peer says cannot make this side keep, or do, more than the requests ask for."""
        pieces = sum(len(self.routes) * self.num_chunks[name] for name in self.started)
        require(num_actions <= 200 + 8 * sum(len(self.routes) * count for count in self.num_chunks.values()), "endless actions")
        require(self.machine.num_slots_used <= self.num_slots, "more slots than there are")
        for number, session in self.machine._sessions.items():
            gathers = sum(gather.piece.session == number for gather in self.gathering.values())
            require(not session.is_direct or gathers <= MAX_DIRECT_GATHERS, "endless gathers of a direct session")
            require(len(session.held) <= pieces, "more grants than pieces")
            require(len(session.spent) <= MAX_SPENT_KEYS + 2 * pieces + 2, "endless keys")
            require(len(session.view._begins) <= MAX_KEPT_RANGES, "endless ranges")
            require(len(session.waiting) <= pieces, "endless waiting")
        require(len(self.machine._requests) <= len(IDS), "requests that nobody started")

    def _peers(self) -> list[int]:
        return [self.session_of.get(route.decode_rank, 0) for route in self.routes]

    def _edge_of(self, session: int) -> int:
        """Return the position up to which the session's ring is known to be released."""
        state = self.machine._sessions.get(session)
        return state.view.watermark.position if state is not None else 0

    def play(self, name: str, step: Step) -> None:
        """One step."""
        match name:
            case "start":
                tokens = TOKENS[step.below(len(TOKENS))]
                self.start(step.request(), tokens, step.below(tokens))
            case "compute":
                self.compute(step.request())
            case "gathered":
                if self.gathering:
                    self.end_gather(sorted(self.gathering)[step.below(len(self.gathering))])
            case "written":
                if self.writing:
                    self.end_write(sorted(self.writing)[step.below(len(self.writing))], is_failed=step.number() == 5)
            case "tick":
                self.now_s += step.seconds()
                self.tell(tx.Tick())
            case "give_up":
                self.tell(tx.OutgoingAborted(request_id=IDS[step.below(5)], reason="the engine failed"))
            case "lose":
                self.lose(1 + step.below(MAX_SESSIONS))
            case "open":
                self.open_session(self.routes[step.below(len(self.routes))].decode_rank)
            case "watermark":
                session = step.session(self._peers(), self._edge_of)
                self.sequence += step.below(3)
                life = DECODE_LIFE if step.below(8) else PREFILL_LIFE
                try:
                    position = step.position()
                    ranges = tuple(Grant(item.position(), item.position()) for item in step.list())
                    mark = Watermark(incarnation=life, sequence=self.sequence, position=position, released=ranges)
                except (LocalProtocolError, RemoteProtocolError):
                    return  # refused where it is read
                self.tell(tx.WatermarkArrived(session=session, watermark=mark))
            case _:
                session = step.session(self._peers(), self._edge_of)
                try:
                    message = _message(name, step)
                except ValidationError:
                    return  # refused where it is read
                self.tell(tx.MessageArrived(session=session, message=message))

    def end(self) -> None:
        """Release everything, end the peer, settle all work under way, and require that nothing is left."""
        for session in list(self.open):
            mark = Watermark(incarnation=DECODE_LIFE, sequence=self.sequence + 1, position=2**64)
            self.tell(tx.WatermarkArrived(session=session, watermark=mark))
        for session in list(self.open):
            state = self.machine._sessions[session]
            require(not state.spent and not state.written, "a key or a piece waits for bytes that were released")
            self.lose(session)
        for place in list(self.gathering):
            self.end_gather(place)
        require(self.machine.is_idle and self.machine.num_slots_used == 0, "something is left of requests that are over")
        require(not self.started and not self.kept, f"no outcome for {self.started}, pages of {self.kept} never given back")
        require(not self.machine._sessions and not self.machine._eager, "something is left of sessions that are over")


def _message(name: str, step: Step) -> Message:
    """What the peer says; raises ValidationError for what cannot be said."""
    head = step.head(peer=DECODE_LIFE, own=PREFILL_LIFE)
    match name:
        case "grants":
            grants = {}
            for item in step.list():
                chunk, begin, end = item.chunk(), item.position(), item.position()
                if begin < end:
                    grants[chunk] = IssuedGrant(chunk=chunk, begin=begin, end=end)
            return GrantsIssued(**head, grants=tuple(grants.values()))
        case "refused":
            return GrantRefused(**head, reason="no")
        case "rejected":
            chunk, begin, attempt = step.chunk(), step.position(), step.attempt()
            return ChunkRejected(**head, chunk=chunk, begin=begin, attempt=attempt, reason="digest")
        case "aborted":
            return AbortTransfer(**head, reason="given up")
        case "drained":
            return WriterDrained(**head)
        case "ready":
            chunk, begin = step.chunk(), step.position()
            return ChunkReady(**head, chunk=chunk, begin=begin, num_bytes=256, digest=0, attempt=0)
        case _:
            return GrantRequest(**head, chunks=(ChunkSize(chunk=step.chunk(), num_bytes=256),))


KINDS = {
    "start": numbers(3),
    "compute": numbers(1),
    "gathered": numbers(1),
    "written": numbers(2),
    "tick": numbers(1),
    "give_up": numbers(1),
    "lose": numbers(1),
    "open": numbers(1),
    "watermark": listed(4, 2),
    "grants": listed(4, 3),
    "refused": numbers(4),
    "rejected": numbers(7),
    "aborted": numbers(4),
    "drained": numbers(4),
    "ready": numbers(6),
    "request": numbers(5),
}


def seeds() -> list[bytes]:
    """Whole transfers of two chunks, of two groups of layers each: written, and gathered into the ring."""
    whole = [
        ["start", 2, 0, 0],
        ["grants", 0, 0, 0, 0, [[0, 0, 4], [2, 4, 8]]],
        ["grants", 0, 0, 0, 0, [[1, 8, 10], [3, 10, 14]]],
        *([["compute", 0]] * 4),
        *([["gathered", 0], ["written", 0, 0]] * 2),
        ["watermark", 0, 1, 1, 4, [[5, 8]]],
        *([["gathered", 0], ["written", 0, 0]] * 2),
        ["watermark", 0, 1, 1, 8, []],
        *([["gathered", 0], ["written", 0, 0]] * 2),
        ["rejected", 0, 0, 0, 0, 3, 10, 0],
        *([["gathered", 0], ["written", 0, 0]] * 2),
        ["tick", 1],
        ["watermark", 0, 1, 1, 14, []],
    ]
    moved = [["gathered", 0], ["written", 0, 0]]
    one = [
        ["start", 1, 0],
        ["compute", 0],
        ["compute", 0],
        ["grants", 0, 0, 0, 0, [[0, 0, 2], [1, 2, 4]]],
        *moved,
        *moved,
        ["rejected", 0, 0, 0, 0, 0, 0, 0],
        *moved,
    ]
    sent = [["watermark", 0, 1, 1, 4, []]]
    cancelled = [["aborted", 0, 0, 0, 0], *sent]
    two: list[list[Any]] = [
        ["start", 1, 0],
        ["compute", 0],
        ["compute", 0],
        *(["grants", session, 0, 0, 0, [[0, 0, 1], [1, 1, 2]]] for session in (0, 1)),
        *(moved * 4),
        ["rejected", 1, 0, 0, 0, 1, 1, 0],
        *moved,
        *(["watermark", session, 1, 1, 2, []] for session in (0, 1)),
    ]
    full: list[list[Any]] = [  # two requests, one slot, and a ring of which each cell is granted more than once
        *(["start", 1, request, 0] for request in (0, 1)),
        *(["compute", request] for request in (0, 1, 0, 1)),
        ["grants", 0, 0, 0, 0, [[0, 0, 1], [1, 1, 2]]],
        ["grants", 0, 0, 1, 0, [[0, 2, 3], [1, 3, 5]]],
        *moved,
        ["watermark", 0, 1, 1, 0, [[1, 2]]],
        *moved,
        ["aborted", 0, 0, 1, 0],
        ["watermark", 0, 1, 1, 0, [[1, 3]]],
        ["watermark", 0, 1, 1, 3, []],
        *moved,
    ]
    return [
        history([1, 3, 0, 15, 0], *whole),
        history([1, 3, 0, 15, 255], *whole),
        history([3, 7, 1, 31, 2], *whole, ["aborted", 0, 0, 0, 0], ["lose", 0], ["open", 0]),
        *(history([1, 3, 0, 15, direct, CROWDED], *one, *end) for direct in (0, 255) for end in (sent, cancelled)),
        *(history([3, 3, 1, 7, direct, CROWDED], *two) for direct in (0, 2, 255)),
        *(history([0, 7, 1, cells - 1, 0, CROWDED], *full) for cells in (3, 4, 5)),
    ]


TARGET = Target(
    name="sender",
    about="the writer's protocol machine",
    modules=("transfer.send.sender", "transfer.send.state", "transfer.ring", "transfer.ring_index"),
    check=check_with(World),
    mutate=mutator(KINDS),
    seeds=seeds,
    max_bytes=MAX_BYTES,
)
