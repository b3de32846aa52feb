"""The state of a `Receiver`: the expected pieces of each request, and the progress of each. The `Receiver` decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from transfer.chunk import Chunks, Pieces, split_into_chunks
from transfer.errors import LocalProtocolError
from transfer.layout import Range, Route
from transfer.messages import ChunkReady
from transfer.piece import Piece, RankRequest
from transfer.ring import Grant


class ReceiverStage(Enum):
    """Stages of a piece, from its grant to its release."""

    GRANTED = auto()
    SCATTERING = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiverPiece(Piece):
    """A piece, from its grant to its release."""

    receiving: ReceiverRequest
    grant: Grant
    is_one_sided: bool  # the write needs no receive
    stage: ReceiverStage = ReceiverStage.GRANTED
    is_settled: bool = False  # the posted receive has ended
    received_bytes: int = 0
    attempt: int = 0
    ready: ChunkReady | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiverRoute:
    """A request's pieces of one route, and whether its writer has drained."""

    route: Route
    session: int
    expected: Pieces
    pieces: dict[int, ReceiverPiece] = field(default_factory=dict)  # by chunk index, as below: granted and not released
    # Grants of released pieces, for repeated messages. Nothing else of them is kept. A long prompt has thousands, and the garbage
    # collector and each step of a failed request would visit them all.
    released: dict[int, Grant] = field(default_factory=dict)
    scattered: set[int] = field(default_factory=set)  # released pieces whose KV is in the pool
    held: dict[int, None] = field(default_factory=dict)  # chunks whose grant was asked for while their arrival was held
    is_drained: bool = False  # the writer reported, or its session's end proves, that no more bytes will arrive
    asked_s: float = 0.0  # when the abort was last sent

    def grant_of(self, chunk: int) -> Grant | None:
        """Return the present or released grant of a chunk; None if it was not granted."""
        piece = self.pieces.get(chunk)
        return self.released.get(chunk) if piece is None else piece.grant

    @property
    def is_whole(self) -> bool:
        """Whether every expected piece was scattered. Only expected pieces are scattered."""
        return len(self.scattered) == len(self.expected)


@dataclass(slots=True, kw_only=True, eq=False)
class ReceiverRequest:
    """One request's transfer into this rank."""

    incoming: RankRequest
    chunks: Chunks
    routes: dict[int, ReceiverRoute]
    num_scattering: int = 0
    failure: str | None = None
    has_drained: bool = False  # IncomingDrained was reported
    held: Range | None = None  # tokens that have no pages yet
    is_followed: bool = False  # its progress is reported
    num_arrived: int = 0  # leading chunks whose pieces are all in the pool

    @classmethod
    def of(cls, incoming: RankRequest) -> ReceiverRequest:
        """Create a request without grants. Pieces without bytes are omitted."""
        layout, num_tokens = incoming.layout, incoming.num_tokens
        chunks = split_into_chunks(
            incoming.plan, num_tokens=num_tokens, num_layers=layout.num_layers, start_token=incoming.start_token
        )
        routes = {
            one.route.index: ReceiverRoute(
                route=one.route,
                session=one.session,
                expected=Pieces(chunks, layout, one.route, num_tokens=num_tokens, dtype=incoming.wire_dtype),
            )
            for one in incoming.routes
        }
        return cls(incoming=incoming, chunks=chunks, routes=routes)

    @property
    def is_whole(self) -> bool:
        """Whether the set of its pieces has been scattered (rule 7)."""
        for route in self.routes.values():  # noqa: SIM110  # a generator takes longer, at the end of every request
            if not route.is_whole:
                return False
        return True

    @property
    def request_id(self) -> str:
        return self.incoming.request_id

    def is_held(self, chunk: int) -> bool:
        """Return whether a chunk has tokens without pages."""
        tokens = self.chunks[chunk].tokens
        return self.held is not None and tokens.begin < self.held.end and self.held.begin < tokens.end

    def take_arrived(self) -> int | None:
        """Return the token before which all pieces are in the pool, if it has grown since the last call."""
        known = self.num_arrived
        while self.num_arrived < len(self.chunks) and all(
            self.num_arrived in route.scattered or not route.expected.size_of(self.num_arrived) for route in self.routes.values()
        ):
            self.num_arrived += 1
        if self.num_arrived == known:
            return None
        is_all = self.num_arrived == len(self.chunks)
        return self.incoming.num_tokens if is_all else self.chunks[self.num_arrived].tokens.begin

    def pieces(self) -> list[ReceiverPiece]:
        """Return the pieces that were granted and are not released."""
        return [piece for route in self.routes.values() for piece in route.pieces.values()]

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if the counts do not match the pieces."""
        if sum(piece.stage is ReceiverStage.SCATTERING for piece in self.pieces()) != self.num_scattering:
            raise LocalProtocolError(f"invariant broken: scatters of request {self.request_id}")
        for route in self.routes.values():
            if route.pieces.keys() & route.released.keys() or not route.scattered <= route.released.keys():
                raise LocalProtocolError(f"invariant broken: released pieces of request {self.request_id}")
