"""A request as one rank sends or receives it, and the pieces in which its KV travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transfer.chunk import Chunk, ChunkPlan
from transfer.layout import DType, KVLayout, Route


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRoute:
    """A route of this rank, and the session with the rank at its other end."""

    route: Route
    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """The part of one request that one rank sends or receives.

    The sender and the receiver use the same fields. `routes` and `traceparent` belong to one rank, all others to the request.

    Args:
        plan: How the request is divided into chunks.
        wire_dtype: Element type on the wire.
        num_tokens: Tokens of the whole prompt.
        start_token: The first token that travels.
        routes: The routes of this rank.
        digest: Digest algorithm of the payloads, as the two instances agreed.
        scales: (layer, whether it is V) -> factor between the wider and the narrower dtype: the sender divides by it before it
            narrows, the receiver multiplies by it after it has widened. None means no scaling.
        traceparent: Span in which this rank's part lies; empty if the request is not traced.
    """

    request_id: str
    layout: KVLayout
    plan: ChunkPlan
    wire_dtype: DType
    num_tokens: int
    start_token: int
    routes: tuple[SessionRoute, ...]
    digest: str
    scales: Mapping[tuple[int, bool], float] | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTerms:
    """What holds for every request between one rank and one attached instance; fields as in `RankRequest`."""

    layout: KVLayout
    wire_dtype: DType
    routes: tuple[SessionRoute, ...]
    digest: str
    scales: Mapping[tuple[int, bool], float] | None = None

    def request(
        self, request_id: str, *, plan: ChunkPlan, num_tokens: int, start_token: int, traceparent: str = ""
    ) -> RankRequest:
        """Return the part of a request that the rank sends or receives on these terms."""
        return RankRequest(
            request_id=request_id,
            layout=self.layout,
            plan=plan,
            wire_dtype=self.wire_dtype,
            num_tokens=num_tokens,
            start_token=start_token,
            routes=self.routes,
            digest=self.digest,
            scales=self.scales,
            traceparent=traceparent,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """The part of a chunk that travels on one route: one grant, one gather, one write, one scatter.

    Each state machine adds what it keeps of a piece. These fields never change.

    Args:
        session: The session of the route.
        num_bytes: Size of the payload.
    """

    request: RankRequest
    route: Route
    session: int
    chunk: Chunk
    num_bytes: int

    @property
    def request_id(self) -> str:
        return self.request.request_id
