"""The state of a `Sender`: pieces of its requests, knowledge of each session, and pieces under way. The `Sender` decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from transfer.chunk import Chunk, ChunkPlan, Pieces, split_into_chunks
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.layout import Route
from transfer.piece import Piece, RankRequest
from transfer.ring import MAX_ATTEMPTS, Grant, RingView, Watermark, grant_key
from transfer.ring_index import PositionIndex, WaitingGrants
from transfer.send.staging_arena import StagingArena


class SenderStage(Enum):
    """Stages of a requested piece, see `transfer.send.sender`."""

    ASKED = auto()
    GRANTED = auto()
    GATHERING = auto()
    WRITING = auto()
    WRITTEN = auto()
    RELEASED = auto()
    DROPPED = auto()  # given up; no place, no write


UNDER_WAY = (SenderStage.GATHERING, SenderStage.WRITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentStats:
    """Statistics of one request on this rank.

    Args:
        num_bytes: Bytes written.
        writes: Writes, repeated ones included.
        writes_without_staging: Writes of the same KV if each token, layer, and K or V of a route were one write.
        transfer_s: Time from the first gather to the last release.
        exposed_s: Part of it after the last chunk was computed.
        resends: Pieces that were sent again because their digest was wrong.
    """

    num_bytes: int = 0
    writes: int = 0
    writes_without_staging: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    resends: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class SenderPiece(Piece):
    """A piece, from the request for its grant on."""

    sending: SenderRequest
    stage: SenderStage = SenderStage.ASKED
    grant: Grant | None = None
    place: int | None = None
    digest: int = 0
    attempt: int = 0
    since_s: float = 0.0  # when it entered its stage, or its message was last repeated
    written_s: float = 0.0  # when its last write was done
    ready_s: float | None = None  # when it was both granted and computed

    @property
    def granted(self) -> Grant:
        """Its grant. Raises LocalProtocolError if it has none."""
        if self.grant is None:
            raise LocalProtocolError(
                f"chunk {self.chunk.index} of request {self.request.request_id} has no grant at {self.stage.name}"
            )
        return self.grant


@dataclass(slots=True, kw_only=True, eq=False)
class SenderRoute:
    """A request's pieces of one route.

    A request can have tens of thousands of pieces, so no event walks over all of them. At most `grants_ahead` pieces of a route
    are outstanding.
    """

    route: Route
    session: int
    expected: Pieces
    unasked: Iterator[tuple[Chunk, int]]  # chunk and bytes, in the order of computation; empty for a failed request
    pieces: dict[int, SenderPiece] = field(default_factory=dict)  # by chunk index: all pieces whose grant was requested
    outstanding: dict[int, SenderPiece] = field(default_factory=dict)  # pieces neither released nor dropped

    @property
    def is_asking(self) -> bool:
        """Whether a piece of the route waits for its grant."""
        return any(piece.stage is SenderStage.ASKED for piece in self.outstanding.values())

    @property
    def is_drained(self) -> bool:
        """Whether no gather or write of the route is under way."""
        return not any(piece.stage in UNDER_WAY for piece in self.outstanding.values())


@dataclass(slots=True, kw_only=True, eq=False)
class SenderRequest:
    """One request's transfer out of this rank."""

    outgoing: RankRequest
    routes: dict[int, SenderRoute] = field(default_factory=dict)  # by route index
    computed: dict[int, DeviceEvent | None] = field(default_factory=dict)  # by chunk index
    num_chunks: int
    to_release: int = 0
    computed_s: float | None = None
    first_gather_s: float | None = None
    failure: str | None = None
    source_released: bool = False
    num_bytes: int = 0
    writes: int = 0
    resends: int = 0
    slices: int = 0

    @classmethod
    def of(cls, outgoing: RankRequest) -> SenderRequest:
        """Create a request without a requested piece. Pieces without bytes are omitted."""
        layout, num_tokens = outgoing.layout, outgoing.num_tokens
        chunks = split_into_chunks(
            outgoing.plan, num_tokens=num_tokens, num_layers=layout.num_layers, start_token=outgoing.start_token
        )
        request = cls(outgoing=outgoing, num_chunks=len(chunks))
        for one in outgoing.routes:
            expected = Pieces(chunks, layout, one.route, num_tokens=num_tokens, dtype=outgoing.wire_dtype)
            request.routes[one.route.index] = SenderRoute(
                route=one.route, session=one.session, expected=expected, unasked=iter(expected)
            )
        request.to_release = request.num_pieces
        return request

    @property
    def num_pieces(self) -> int:
        """Number of pieces of the request, requested or not."""
        return sum(len(route.expected) for route in self.routes.values())

    @property
    def request_id(self) -> str:
        return self.outgoing.request_id

    def next_pieces(self, route: SenderRoute, count: int) -> list[SenderPiece]:
        """Create the next `count` pieces of the route, or as many as are left. The caller requests their grants."""
        fresh = [
            SenderPiece(
                request=self.outgoing, route=route.route, session=route.session, chunk=chunk, num_bytes=num_bytes, sending=self
            )
            for chunk, num_bytes in itertools.islice(route.unasked, count)
        ]
        for piece in fresh:
            route.pieces[piece.chunk.index] = route.outstanding[piece.chunk.index] = piece
        return fresh

    def outstanding(self) -> list[SenderPiece]:
        """Return the requested pieces that are neither released nor dropped."""
        return [piece for route in self.routes.values() for piece in route.outstanding.values()]

    def route_of(self, session: int, route_index: int) -> SenderRoute | None:
        """Return the route of that index if it belongs to this session."""
        route = self.routes.get(route_index)
        return route if route is not None and route.session == session else None

    def stats(self, now_s: float) -> SentStats:
        """Return the statistics of the transfer. Call it when the last piece is released."""
        first_s = self.first_gather_s if self.first_gather_s is not None else now_s
        computed_s = self.computed_s if self.computed_s is not None else first_s
        return SentStats(
            num_bytes=self.num_bytes,
            writes=self.writes,
            writes_without_staging=self.slices,
            transfer_s=now_s - first_s,
            exposed_s=now_s - max(first_s, computed_s),
            resends=self.resends,
        )

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if the count or the outstanding pieces do not match the pieces."""
        every = [piece for route in self.routes.values() for piece in route.pieces.values()]
        releases = self.num_pieces - sum(piece.stage is SenderStage.RELEASED for piece in every)
        if self.failure is None and releases != self.to_release:
            raise LocalProtocolError(
                f"invariant broken: {self.to_release} of request {self.request_id} to release, not {releases}"
            )
        living = [piece for piece in every if piece.stage not in (SenderStage.RELEASED, SenderStage.DROPPED)]
        if living != self.outstanding():
            raise LocalProtocolError(f"invariant broken: outstanding pieces of request {self.request_id}")
        if any((piece.place is not None) != (piece.stage in UNDER_WAY) for piece in every):
            raise LocalProtocolError(f"invariant broken: places of request {self.request_id}")
        if self.failure is not None and any(piece.stage not in UNDER_WAY for piece in living):
            raise LocalProtocolError(f"invariant broken: failed request {self.request_id} has pieces that nothing is done with")


@dataclass(slots=True, kw_only=True, eq=False)
class SessionState:
    """Knowledge of one decode rank's ring, and which of its grants are in use here."""

    view: RingView
    is_direct: bool = False  # gathers store into the ring itself
    num_gathering: int = 0
    waiting: WaitingGrants[Grant, SenderPiece] = field(init=False)  # granted and computed, not begun
    # A set in the order of writing, so that the same events cause the same actions.
    written: dict[SenderPiece, None] = field(default_factory=dict)
    # The most bytes of a piece, by plan and route of the requests so far.
    piece_bytes: dict[tuple[ChunkPlan, int], int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # begins of the grants of living pieces; a peer must not issue one twice
    # Keys that were written or declined for failed requests, until their grants are released. Late and repeated messages about
    # them must not cause a second decline, which no receive would match.
    spent: dict[int, Grant] = field(default_factory=dict)
    # Written pieces and spent keys that wait for their release, by the last position of their grant.
    _watched: PositionIndex[SenderPiece | int] = field(default_factory=PositionIndex)

    def __post_init__(self) -> None:
        self.waiting = WaitingGrants(self.view.blocker_of, lambda: self.view.num_steps)

    def is_taken(self, begin: int) -> bool:
        """Return whether a living piece holds a grant at `begin`, or an unreleased grant there has a spent key."""
        return begin in self.held or self._is_spent(begin)

    def add_written(self, piece: SenderPiece) -> None:
        """Record a piece that was written and whose grant is not released yet."""
        self.written[piece] = None
        self._watched.add(piece.granted.end - 1, piece)

    def discard_written(self, piece: SenderPiece) -> None:
        """Remove a piece that is written again or was given up. No-op for a piece that was not written."""
        if piece in self.written:
            del self.written[piece]
            self._watched.remove(piece.granted.end - 1, piece)

    def spend(self, key: int, grant: Grant) -> bool:
        """Mark a key of a failed request as written or declined, until a watermark shows that its grant is released.

        Return False if the key is spent already or its grant is released: do not decline the key then.
        """
        if key in self.spent or self.view.is_released(grant):
            return False
        self.spent[key] = grant
        self._watched.add(grant.end - 1, key)
        return True

    def take_in(self, watermark: Watermark) -> list[SenderPiece]:
        """Take in a watermark. Remove and return the written pieces that the peer has taken over.

        Grants that have become writable are free in `waiting`, and released spent keys are forgotten. Raise RemoteProtocolError
        if a newer watermark moves back (R2).
        """
        position = self.view.watermark.position
        # Watermarks repeat a range until the position has passed it, and nothing waits for a known range.
        fresh = [(span.begin, span.end) for span in watermark.released if not self.view.is_released(span)]
        if not self.view.update(watermark):
            return []
        released: list[SenderPiece] = []
        for begin, end in ((position, watermark.position), *fresh):
            self.waiting.wake(begin, end)
            for one in self._watched.take(begin, end):
                if isinstance(one, SenderPiece):
                    del self.written[one]
                    released.append(one)
                else:
                    del self.spent[one]
        return released

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if an unreleased key is not watched exactly once, or the key of a held grant is spent."""
        if len(self._watched) != len(self.written) + len(self.spent):
            counts = f"{len(self._watched)} watched, {len(self.written)} pieces written and {len(self.spent)} keys spent"
            raise LocalProtocolError(f"invariant broken: {counts}")
        both = [begin for begin in self.held if self._is_spent(begin)]
        if both:
            raise LocalProtocolError(f"invariant broken: keys of the grants that begin at {both} are held and spent")

    def _is_spent(self, begin: int) -> bool:
        return bool(self.spent) and any(grant_key(begin, attempt) in self.spent for attempt in range(MAX_ATTEMPTS))


class PiecesUnderWay:
    """The pieces that are gathered or written, by their *place*.

    The place of a staged piece is its first byte in the staging memory. A piece of a direct session is gathered into the ring, so
    it needs no memory. Its place is a unique number behind the staging memory. So slots limit only staging memory, and the ring
    limits the rest.
    """

    def __init__(self, staging: StagingArena) -> None:
        self._staging = staging
        self._pieces: dict[int, SenderPiece] = {}
        self._direct_numbers = itertools.count(staging.num_bytes)

    def stage(self, piece: SenderPiece, *, may_open: bool, may_refill: bool) -> bool:
        """Give the piece a place in staging memory, see `StagingArena.take`. Return False if there is no room."""
        place = self._staging.take(piece.session, piece.num_bytes, may_open=may_open, may_refill=may_refill)
        if place is None:
            return False
        self._pieces[place] = piece
        piece.place = place
        return True

    def add_direct(self, piece: SenderPiece) -> None:
        """Give the piece a place without memory."""
        place = piece.place = next(self._direct_numbers)
        self._pieces[place] = piece

    def free(self, piece: SenderPiece) -> None:
        """Free the piece's place."""
        place, piece.place = piece.place, None
        assert place is not None, "a piece has a place from its gather to the end of its write"
        del self._pieces[place]
        if place < self._staging.num_bytes:
            self._staging.release(place)

    def piece_at(self, place: int, stage: SenderStage) -> SenderPiece | None:
        """Return the piece at the place if it is at that stage; None if its write ended with its session."""
        piece = self._pieces.get(place)
        return piece if piece is not None and piece.stage is stage else None

    def held(self) -> Mapping[int, SenderPiece]:
        """Return the pieces by place."""
        return self._pieces

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if a place is held by a piece that does not need it, or the memory is divided wrongly."""
        self._staging.check_invariants()
        staged = sorted(place for place in self._pieces if place < self._staging.num_bytes)
        if staged != self._staging.begins():
            raise LocalProtocolError(f"invariant broken: places held {staged} and taken {self._staging.begins()} differ")
        for place, piece in self._pieces.items():
            if piece.place != place or piece.stage not in UNDER_WAY:
                raise LocalProtocolError(f"invariant broken: place {place} is held by a piece that is {piece.stage.name}")
