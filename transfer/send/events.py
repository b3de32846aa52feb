"""Events that a `Sender` takes in, and actions that it asks its owner to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.engine_types import DeviceEvent
from transfer.errors import ConfigError
from transfer.messages import MAX_CHUNKS_PER_MESSAGE
from transfer.piece import RankRequest
from transfer.ring import Watermark
from transfer.send.state import SenderPiece
from transfer.send.state import SentStats as SentStats
from transfer.session_events import CloseSession as CloseSession
from transfer.session_events import MessageArrived as MessageArrived
from transfer.session_events import MessageDropped as MessageDropped
from transfer.session_events import Send as Send
from transfer.session_events import Tick as Tick
from transfer.transport.base import REGION_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSettings:
    """Settings of a sender.

    Args:
        num_slots: Fewest slots of the staging memory, which has `num_slots` x `slot_bytes` bytes. Smaller pieces make more slots
            of it. Pieces of direct sessions need none.
        slot_bytes: Most bytes of a staged piece, a multiple of `REGION_ALIGNMENT_BYTES`.
        grants_ahead: Grants of a route that may be requested and not yet released. It limits how far one request can push others
            back in a ring, and is large enough that no round trip lies between two chunks.
        repeat_after_s: Seconds after which a message without an answer is repeated.
        write_timeout_s: Seconds after which a pending write ends its session.
    """

    num_slots: int = 4
    slot_bytes: int
    grants_ahead: int = 8
    repeat_after_s: float = 1.0
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("num_slots", "slot_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.slot_bytes % REGION_ALIGNMENT_BYTES:
            raise ConfigError(f"slot_bytes is {self.slot_bytes}; it must be a multiple of {REGION_ALIGNMENT_BYTES}")
        if not 1 <= self.grants_ahead <= MAX_CHUNKS_PER_MESSAGE:
            raise ConfigError(f"grants_ahead is {self.grants_ahead}; it must be in [1, {MAX_CHUNKS_PER_MESSAGE}]")
        for name, seconds in (("repeat_after_s", self.repeat_after_s), ("write_timeout_s", self.write_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds:g} s; it must be above 0")


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSessionOpened:
    """A session was attached.

    Args:
        is_direct: Gathers store into the peer's ring. They need no write, and leave no copy that could be sent again. Only on a
            one-sided transport, because no receive meets them.
    """

    session: int
    incarnation: int
    ring_capacity_bytes: int
    is_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSessionLost:
    """The session's transport is closed: none of its writes is under way any more.

    Gathers still are, and each ends with `GatherFinished`. Until then, those of a direct session may store into the peer's ring.
    So the peer keeps that memory in quarantine until this process has released its access.
    """

    session: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkArrived:
    session: int
    watermark: Watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingStarted:
    request: RankRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComputed:
    """The chunk's KV is in the pool, or will be when `event` has fired."""

    request_id: str
    chunk: int
    event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherFinished:
    """A gather has ended.

    Args:
        is_signalled: The gather's stream has told the peer, so it needs no message.
    """

    place: int
    digest: int
    is_signalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFinished:
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWriteFailed:
    place: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingAborted:
    """This side gives the request up (engine failure, abort, drain)."""

    request_id: str
    reason: str


Event = (
    SenderSessionOpened
    | SenderSessionLost
    | WatermarkArrived
    | OutgoingStarted
    | ChunkComputed
    | MessageArrived
    | GatherFinished
    | WriteFinished
    | StagedWriteFailed
    | OutgoingAborted
    | Tick
)


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGather:
    """Gather the piece after `event`, and answer with `GatherFinished`. `credit_wait_s` is for the metrics.

    The piece goes into its place, which is its first byte in the staging memory. On a direct session it goes into the grant, all
    of it before the answer, and `place` only names the gather. If a direct session is closed, nothing is gathered, but the answer
    still follows.
    """

    piece: SenderPiece
    place: int
    event: DeviceEvent | None
    credit_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWrite:
    """Write the piece's place into its grant, and answer with `WriteFinished` or `StagedWriteFailed`."""

    piece: SenderPiece
    place: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """Notify the transport that no write will follow for the key."""

    session: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReleased:
    """No gather will read the request's pages again.

    Reported when every piece is released, because a rejected piece is gathered again. For a failed request, reported when none of
    its gathers is under way.
    """

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReleased:
    """The peer has taken a piece over, `ack_s` after its write was done. For the metrics."""

    ack_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGivenUp:
    """A computed and granted piece was dropped after it had waited `credit_wait_s` for its bytes in the ring. For the metrics."""

    credit_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingSent:
    """Every grant of the request is released. The request is forgotten."""

    request_id: str
    stats: SentStats


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingFailed:
    """The request is over and nothing of it is under way (rule 9). The request is forgotten."""

    request_id: str
    reason: str


Action = (
    Send
    | StartGather
    | StartWrite
    | Decline
    | SourceReleased
    | PieceReleased
    | WaitGivenUp
    | OutgoingSent
    | OutgoingFailed
    | CloseSession
    | MessageDropped
)
