"""What a `Sender` remembers: the pieces of its requests, what it knows of each session, and who holds which staging slot.

Data and the questions that it can answer of itself; every decision is the `Sender`'s.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from prefill_node.sender_events import OutgoingRequest, OutgoingRoute, SentStats
from transfer.chunk import Chunk, pieces_of, split_into_chunks
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.layout import LayerKind, wire_buffers
from transfer.ring import Grant, RingView, grant_key


class Stage(Enum):
    """Where a piece stands."""

    UNASKED = auto()
    ASKED = auto()
    GRANTED = auto()
    GATHERING = auto()
    WRITING = auto()
    WRITTEN = auto()
    RELEASED = auto()
    DROPPED = auto()  # given up; no slot, no write


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """The part of a chunk that travels on one route: one grant, one gather, one write."""

    request: Request
    route: OutgoingRoute
    chunk: Chunk
    num_bytes: int
    stage: Stage = Stage.UNASKED
    grant: Grant | None = None
    slot: int | None = None
    digest: int = 0
    attempt: int = 0
    gathered: bool = False
    since_s: float = 0.0  # when it entered its stage, or its message was last repeated
    written_s: float = 0.0  # when its last write was done
    ready_s: float | None = None  # when it was both granted and computed

    @property
    def granted(self) -> Grant:
        """Its grant. Raises LocalProtocolError when it has none."""
        if self.grant is None:
            raise LocalProtocolError(
                f"chunk {self.chunk.index} of request {self.request.request_id} has no grant at {self.stage.name}"
            )
        return self.grant

    @property
    def num_slices(self) -> int:
        """Writes that the piece would have taken as token x layer x K/V slices; what a window leaves out is none."""
        outgoing = self.request.outgoing
        if self.request.sends_every_token:  # cheaper, and asked after every write
            layers = self.route.route.layers_in(outgoing.layout, self.chunk.layers)
            return len(self.chunk.tokens) * sum(outgoing.layout.layers[layer].num_buffers for layer in layers)
        buffers = wire_buffers(
            outgoing.layout,
            self.route.route,
            tokens=self.chunk.tokens,
            layers=self.chunk.layers,
            num_tokens=outgoing.num_tokens,
            dtype=outgoing.wire_dtype,
        )
        return sum(len(buffer.tokens) for buffer in buffers)


@dataclass(slots=True, kw_only=True, eq=False)
class RouteState:
    """A request's pieces of one route."""

    outgoing: OutgoingRoute
    pieces: dict[int, Piece] = field(default_factory=dict)  # by chunk index, in the order of computation
    unasked: deque[Piece] = field(default_factory=deque)
    num_outstanding: int = 0  # asked for and not released

    @property
    def is_drained(self) -> bool:
        """Whether nothing of the route is under way."""
        return not any(piece.stage in (Stage.GATHERING, Stage.WRITING) for piece in self.pieces.values())


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request's transfer out of this rank."""

    outgoing: OutgoingRequest
    routes: dict[int, RouteState] = field(default_factory=dict)  # by route index
    computed: dict[int, DeviceEvent | None] = field(default_factory=dict)  # by chunk index
    num_chunks: int
    sends_every_token: bool  # no layer leaves out tokens: neither windows nor recurrent states
    is_source_kept: bool = False  # until all is released: what was gathered into a ring has no other copy to be sent again
    to_gather: int = 0
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
    def of(cls, outgoing: OutgoingRequest) -> Request:
        """Every piece of it, not asked for yet; pieces of no bytes are left out."""
        layout, num_tokens = outgoing.layout, outgoing.num_tokens
        chunks = split_into_chunks(
            outgoing.plan, num_tokens=num_tokens, num_layers=layout.num_layers, start_token=outgoing.start_token
        )
        sends_every_token = all(spec.kind in (LayerKind.ATTENTION, LayerKind.MLA) for spec in layout.layers)
        request = cls(outgoing=outgoing, num_chunks=len(chunks), sends_every_token=sends_every_token)
        for route in outgoing.routes:
            state = request.routes[route.route.index] = RouteState(outgoing=route)
            for chunk, size in pieces_of(chunks, layout, route.route, num_tokens=num_tokens, dtype=outgoing.wire_dtype):
                state.pieces[chunk.index] = Piece(request=request, route=route, chunk=chunk, num_bytes=size)
            state.unasked.extend(state.pieces.values())
        request.to_gather = request.to_release = sum(len(state.pieces) for state in request.routes.values())
        return request

    @property
    def request_id(self) -> str:
        return self.outgoing.request_id

    def pieces(self) -> Iterator[Piece]:
        return (piece for route in self.routes.values() for piece in route.pieces.values())

    def route_of(self, session: int, route_index: int) -> RouteState | None:
        """The route of that index, if it is this session's to speak of."""
        route = self.routes.get(route_index)
        return route if route is not None and route.outgoing.session == session else None

    def stats(self, now_s: float) -> SentStats:
        """What the transfer was, once its last piece is released."""
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


@dataclass(slots=True, kw_only=True, eq=False)
class SessionState:
    """What is known of one decode rank's ring, and which of its grants are spoken for here."""

    view: RingView
    is_direct: bool = False  # gathers store into the ring itself
    ready: list[Piece] = field(default_factory=list)  # granted and computed, not begun; in the order of positions
    written: set[Piece] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # where the grants of living pieces begin; a peer must not issue one twice
    # Keys that were written or declined for requests that failed, and their grants, until these are heard to be released: late
    # and repeated messages about them must not be answered with a second decline, which no receive would ever match.
    spent: dict[int, Grant] = field(default_factory=dict)

    def add_ready(self, piece: Piece) -> None:
        """The piece is granted and computed."""
        insort(self.ready, piece, key=lambda one: one.granted.begin)

    def is_taken(self, begin: int) -> bool:
        """Whether a grant that begins there is a living piece's, or was declined and is not released yet."""
        return begin in self.held or grant_key(begin, 0) in self.spent

    def take_released(self) -> list[Piece]:
        """Written pieces that the peer has taken over, taken out; spent keys that it has released are forgotten."""
        released = [piece for piece in self.written if self.view.is_released(piece.granted)]
        self.written.difference_update(released)
        for key in [key for key, grant in self.spent.items() if self.view.is_released(grant)]:
            del self.spent[key]
        return released


class StagingSlots:
    """Which piece holds which slot of the staging memory."""

    def __init__(self, num_slots: int) -> None:
        self._pieces: list[Piece | None] = [None] * num_slots
        self._free: deque[int] = deque(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._pieces) - len(self._free)

    def take(self, piece: Piece) -> int:
        """Give a free slot to the piece."""
        slot = piece.slot = self._free.popleft()
        self._pieces[slot] = piece
        return slot

    def free(self, piece: Piece) -> None:
        """Take the piece's slot back."""
        slot, piece.slot = piece.slot, None
        assert slot is not None, "a piece between its gather and its release holds a slot"
        self._pieces[slot] = None
        self._free.append(slot)

    def piece_in(self, slot: int, stage: Stage) -> Piece | None:
        """The piece in the slot, if it is at that stage; None when its write ended with its session."""
        piece = self._pieces[slot]
        return piece if piece is not None and piece.stage is stage else None

    def held(self) -> dict[int, Piece]:
        """Slot -> the piece that holds it."""
        return {slot: piece for slot, piece in enumerate(self._pieces) if piece is not None}

    def check_invariants(self) -> None:
        """Raises LocalProtocolError when a slot is neither free nor held by exactly one piece that needs it."""
        held = self.held()
        if sorted([*held, *self._free]) != list(range(len(self._pieces))):
            raise LocalProtocolError(f"invariant broken: slots held {sorted(held)} and free {sorted(self._free)} do not add up")
        for slot, piece in held.items():
            if piece.slot != slot or piece.stage not in (Stage.GATHERING, Stage.WRITING, Stage.WRITTEN):
                raise LocalProtocolError(f"invariant broken: slot {slot} is held by a piece that is {piece.stage.name}")
