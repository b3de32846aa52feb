"""The target's protocol machine against a prefill rank that says anything, at any time; this side's own events are lawful.

After every step the machine's and the ring's invariants hold, no two receives and scatters that are under way share a byte of the
ring, and nothing is scattered into pages that were given back. In the end the peer goes away, and the ring is empty.
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
from transfer.chunk import Pieces, split_into_chunks
from transfer.messages import (
    AbortTransfer,
    ChunkReady,
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
from transfer.receive import events as rx
from transfer.receive.receiver import Receiver
from transfer.ring import ALIGNMENT_BYTES, MAX_PUBLISHED_RANGES, Grant, StagingAllocator, Watermark


class World:
    """This side of a `Receiver`: its receives, its scatters, and what it owes an outcome."""

    def __init__(self, setting: Step) -> None:
        self.is_one_sided = bool(setting.below(2))
        self.routes = tuple(route for route in routes_of(setting.number()) if route.decode_rank == 0)
        self.ring = StagingAllocator((1 + setting.below(64)) * ALIGNMENT_BYTES, incarnation=DECODE_LIFE)
        self.machine = Receiver(rx.ReceiverSettings(), self.ring)
        self.now_s = 0.0
        self.num_opened = 0
        self.session_of: dict[int, int] = {}  # prefill rank -> open session
        self.open: set[int] = set()
        self.ending: set[int] = set()  # closed, and not over
        self.posted: dict[int, rx.PostReceive] = {}  # by begin
        self.scattering: dict[int, rx.StartScatter] = {}
        self.pieces: dict[str, int] = {}  # of requests without an outcome
        self.kept: set[str] = set()  # whose pages are not given back
        self.last: Watermark | None = None
        for route in self.routes:
            self.open_session(route.prefill_rank)

    # This side

    def open_session(self, prefill_rank: int) -> None:
        if prefill_rank in self.session_of or self.num_opened >= MAX_SESSIONS:
            return
        self.num_opened += 1
        self.session_of[prefill_rank] = self.num_opened
        self.open.add(self.num_opened)
        self.tell(rx.ReceiverSessionOpened(session=self.num_opened, incarnation=PREFILL_LIFE, is_one_sided=self.is_one_sided))

    def lose(self, session: int, *, is_over: bool, reason: str = "lost") -> None:
        if session not in self.open:
            return
        self.open.discard(session)
        self.session_of = {rank: number for rank, number in self.session_of.items() if number != session}
        self.posted = {begin: post for begin, post in self.posted.items() if post.piece.session != session}
        is_over = is_over or not self.is_one_sided
        if not is_over:
            self.ending.add(session)
        self.tell(rx.ReceiverSessionLost(session=session, reason=reason, is_over=is_over))

    def end_session(self, session: int) -> None:
        if session in self.ending:
            self.ending.discard(session)
            self.tell(rx.ReceiverSessionOver(session=session))

    def expect(self, request_id: str, num_tokens: int, start_token: int) -> None:
        if self.machine.is_known(request_id) or request_id in self.kept:
            return
        if any(route.prefill_rank not in self.session_of for route in self.routes):
            return
        mine = tuple(SessionRoute(route=route, session=self.session_of[route.prefill_rank]) for route in self.routes)
        request = RankRequest(
            request_id=request_id,
            layout=LAYOUT,
            plan=PLAN,
            wire_dtype=LAYOUT.dtype,
            num_tokens=num_tokens,
            start_token=start_token,
            routes=mine,
            digest="xxh3-64",
        )
        chunks = split_into_chunks(PLAN, num_tokens=num_tokens, num_layers=LAYOUT.num_layers, start_token=start_token)
        self.pieces[request_id] = sum(
            len(Pieces(chunks, LAYOUT, each, num_tokens=num_tokens, dtype=LAYOUT.dtype)) for each in self.routes
        )
        self.kept.add(request_id)
        self.tell(rx.IncomingExpected(request=request))

    def cancel(self, request_id: str) -> None:
        if request_id in self.pieces:
            self.tell(rx.IncomingCancelled(request_id=request_id, reason="the client went away"))

    def settle(self, begin: int, size: int) -> None:
        """A receive ends: declined, filled by some bytes, or whole."""
        post = self.posted.pop(begin)
        if size == 3:
            self.tell(rx.ReceiveFailed(grant=post.piece.grant, reason="broke"))
            return
        self.tell(
            rx.ReceiveSettled(grant=post.piece.grant, num_bytes=(post.piece.num_bytes, 0, post.piece.num_bytes // 2)[size % 3])
        )

    def end_scatter(self, begin: int, *, is_intact: bool) -> None:
        scatter = self.scattering.pop(begin)
        self.tell(rx.ScatterFinished(grant=scatter.piece.grant, is_intact=is_intact))

    # The machine

    def tell(self, event: rx.Event) -> None:
        actions = self.machine.handle(event, self.now_s)
        self.machine.check_invariants()
        closing = [action for action in actions if isinstance(action, rx.CloseSession)]
        for action in actions:
            self._take(action)
        self._check_bounds(len(actions))
        for action in closing:
            self.lose(action.session, is_over=True, reason=action.reason)

    def _take(self, action: rx.Action) -> None:
        match action:
            case rx.PostReceive():
                require(action.piece.session in self.open and not self.is_one_sided, "a receive on a session that is closed")
                self._check_free(action.piece.grant, action.piece.num_bytes)
                self.posted[action.piece.grant.begin] = action
            case rx.StartScatter():
                require(action.piece.request_id in self.kept, "a scatter into pages that were given back")
                require(action.piece.grant.begin not in self.scattering, "a grant that is scattered twice at once")
                if not self.is_one_sided:
                    self._check_free(action.piece.grant, action.piece.num_bytes)
                self.scattering[action.piece.grant.begin] = action
            case rx.Send():
                require(action.session in self.open, "a message to a session that is closed")
                require(decode(encode(action.message)) == action.message, "a message that no peer can read")
            case rx.PublishWatermark():
                mark = self.ring.watermark()
                require(len(mark.released) <= MAX_PUBLISHED_RANGES, "a watermark without a bound")
                require(self.last is None or mark.position >= self.last.position, "a watermark that moves back")
                self.last = mark
            case rx.IncomingComplete():
                require(self.pieces.pop(action.request_id, None) is not None, "a second outcome")
                self._give_back(action.request_id)
            case rx.IncomingFailed():
                require(len(action.reason.splitlines()) == 1, f"a reason of several lines: {action.reason!r}")
            case rx.IncomingDrained():
                require(self.pieces.pop(action.request_id, None) is not None, "a second outcome")
                self._give_back(action.request_id)

    def _give_back(self, request_id: str) -> None:
        busy = any(scatter.piece.request_id == request_id for scatter in self.scattering.values())
        require(not busy and request_id in self.kept, "pages that are given back under a scatter, or twice")
        self.kept.discard(request_id)

    def _check_free(self, grant: Grant, num_bytes: int) -> None:
        """The grant lies in the ring, and nothing else that is under way does there."""
        capacity = self.ring.capacity_bytes
        begin = grant.begin % capacity
        require(0 < num_bytes <= grant.end - grant.begin and begin + num_bytes <= capacity, f"{grant} does not lie in the ring")
        busy = [post.piece.grant for post in self.posted.values()] + [scatter.piece.grant for scatter in self.scattering.values()]
        for other in busy:
            if other.begin != grant.begin:
                first = other.begin % capacity
                apart = first + other.end - other.begin <= begin or begin + grant.end - grant.begin <= first
                require(apart, f"R1: {grant} and {other} share a byte, and both are under way")

    def _check_bounds(self, num_actions: int) -> None:
        """What a peer says cannot make this side keep, or do, more than the requests that are expected."""
        most = sum(len(route.expected) for request in self.machine._requests.values() for route in request.routes.values())
        require(num_actions <= 200 + 8 * most + 8 * sum(self.pieces.values()), "endless actions")
        require(self.ring.num_live_grants <= most, "more grants than pieces")
        require(self.ring.num_ranges <= most + 1, "endless ranges")
        require(self.machine.ring_peak_bytes <= self.ring.capacity_bytes, "more of a ring than there is")
        require(self.machine.num_requests <= len(IDS), "requests that nobody expects")

    def play(self, name: str, step: Step) -> None:
        """One step."""
        match name:
            case "expect":
                tokens = TOKENS[step.below(len(TOKENS))]
                self.expect(step.request(), tokens, step.below(tokens))
            case "cancel":
                self.cancel(step.request())
            case "settled":
                if self.posted:
                    self.settle(sorted(self.posted)[step.below(len(self.posted))], step.below(4))
            case "scattered":
                if self.scattering:
                    self.end_scatter(sorted(self.scattering)[step.below(len(self.scattering))], is_intact=step.below(4) != 3)
            case "tick":
                self.now_s += step.seconds()
                self.tell(rx.Tick())
            case "lose":
                self.lose(1 + step.below(MAX_SESSIONS), is_over=bool(step.below(2)))
            case "over":
                if self.ending:
                    self.end_session(sorted(self.ending)[step.below(len(self.ending))])
            case "open":
                self.open_session(self.routes[step.below(len(self.routes))].prefill_rank)
            case _:
                session = step.session([self.session_of.get(route.prefill_rank, 0) for route in self.routes])
                try:
                    message = _message(name, step, self)
                except ValidationError:
                    return  # refused where it is read
                self.tell(rx.MessageArrived(session=session, message=message))

    def end(self) -> None:
        """The peer is gone, what is under way settles: nothing may be left."""
        for session in list(self.open):
            self.lose(session, is_over=False)
        for begin in list(self.scattering):
            self.end_scatter(begin, is_intact=False)
        for session in list(self.ending):
            self.end_session(session)
        require(self.machine.is_idle, "something is left of requests that are over")
        require(not self.pieces and not self.kept, f"no outcome for {set(self.pieces)}, pages of {self.kept} never given back")
        require(self.ring.live_bytes == 0 and self.ring.quarantined_bytes == 0, "R5: something is left in the ring")
        require(not self.machine._sessions and not self.machine._lost, "something is left of sessions that are over")


def _message(name: str, step: Step, world: World) -> Message:
    """What the peer says; raises ValidationError for what cannot be said."""
    head = step.head(peer=PREFILL_LIFE, own=DECODE_LIFE)
    match name:
        case "request":
            chunks = {}
            for item in step.list():
                chunk = item.chunk()
                chunks[chunk] = ChunkSize(chunk=chunk, num_bytes=item.num_bytes(_size(world, head, chunk)))
            return GrantRequest(**head, chunks=tuple(chunks.values()))
        case "ready":
            chunk, begin = step.chunk(), step.position()
            num_bytes, attempt = step.num_bytes(_size(world, head, chunk)), step.attempt()
            if begin == 0:  # where the chunk's grant is, if it has one
                begin = _begin(world, head, chunk)
            return ChunkReady(**head, chunk=chunk, begin=begin, num_bytes=num_bytes, digest=7, attempt=attempt)
        case "drained":
            return WriterDrained(**head)
        case "refused":
            return GrantRefused(**head, reason="no")
        case "aborted":
            return AbortTransfer(**head, reason="no")
        case _:
            begin = step.position()
            return GrantsIssued(**head, grants=(IssuedGrant(chunk=0, begin=begin, end=begin + 256),))


def _size(world: World, head: dict[str, Any], chunk: int) -> int:
    """What the chunk really has, which an honest writer knows."""
    request = world.machine._requests.get(head["request_id"])
    route = request.routes.get(head["route"]) if request is not None else None
    return (route.expected.size_of(chunk) if route is not None else 0) or 256


def _begin(world: World, head: dict[str, Any], chunk: int) -> int:
    request = world.machine._requests.get(head["request_id"])
    route = request.routes.get(head["route"]) if request is not None else None
    piece = route.pieces.get(chunk) if route is not None else None
    return piece.grant.begin if piece is not None else 0


KINDS = {
    "expect": numbers(3),
    "cancel": numbers(1),
    "settled": numbers(2),
    "scattered": numbers(2),
    "tick": numbers(1),
    "lose": numbers(2),
    "over": numbers(1),
    "open": numbers(1),
    "request": listed(4, 2),
    "ready": numbers(8),
    "drained": numbers(4),
    "refused": numbers(4),
    "aborted": numbers(4),
    "issued": numbers(5),
}


def seeds() -> list[bytes]:
    """Whole transfers, a broken chunk, a cancel, and a writer that is lost."""
    ask = ["request", 0, 0, 0, 0, [[0, 0], [1, 0], [2, 0], [3, 0]]]
    ready = [["ready", 0, 0, 0, 0, chunk, 0, 0, 0] for chunk in range(4)]
    whole = [["expect", 2, 0, 0], ask, *([["settled", 0, 0]] * 4), *ready, *([["scattered", 0, 0]] * 4), ["tick", 1]]
    two = ["request", 0, 0, 0, 0, [[0, 0], [1, 0]]]
    broken = [["expect", 1, 0, 0], two, ["settled", 0, 0], ready[0], ["scattered", 0, 3], ["settled", 0, 0]]
    again = ["ready", 0, 0, 0, 0, 0, 0, 0, 1]
    crowded: list[list[Any]] = [
        ["expect", 1, 0],
        *(["request", writer, 0, 0, 0, [[0, 0], [1, 0]]] for writer in (0, 1)),
        *([["settled", 0, 0]] * 4),
        *(["ready", writer, 0, 0, 0, chunk, 0, 0, 0] for writer in (0, 1) for chunk in (0, 1)),
        ["scattered", 0, 3],
        ["settled", 0, 0],
        ["ready", 0, 0, 0, 0, 0, 0, 0, 1],
        *([["scattered", 0, 0]] * 4),
        ["cancel", 0],
        *(["drained", writer, 0, 0, 0] for writer in (0, 1)),
    ]
    return [
        *(history([sided, 0, cells], *whole) for sided in (0, 1) for cells in (3, 40)),
        history([0, 3, 7], *broken, again, ["scattered", 0, 0]),
        history([1, 3, 7], *broken, again, ["lose", 0, 0], ["scattered", 0, 3], ["over", 0], ["open", 0]),
        history([0, 1, 7], ["expect", 1, 0, 0], two, ["cancel", 0], ["settled", 0, 1], ["drained", 0, 0, 0, 0], ["tick", 1]),
        *(history([sided, cut, 7, CROWDED], *crowded) for sided in (0, 1) for cut in (0, 2)),
    ]


TARGET = Target(
    name="receiver",
    about="the target's protocol machine",
    modules=("transfer.receive.receiver", "transfer.receive.state", "transfer.ring", "transfer.ring_index"),
    check=check_with(World),
    mutate=mutator(KINDS),
    seeds=seeds,
    max_bytes=MAX_BYTES,
)
