"""What a `Sender` is told (events) and what it asks for (actions): the language between the writer's protocol and its owner."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSettings:
    """Args:
    num_slots: Staging slots of this rank; each holds one piece. Pieces of direct sessions need none.
    grants_ahead: Grants per route that may be asked for and not yet released. Bounds how far one request can push others
        back in a ring, and is large enough that no round trip sits between two chunks.
    repeat_after_s: A message without its answer is repeated after this long.
    write_timeout_s: A write still pending after this long ends its session.
    """

    num_slots: int = 4
    grants_ahead: int = 8
    repeat_after_s: float = 1.0
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ConfigError(f"num_slots is {self.num_slots}; it must be at least 1")
        if not 1 <= self.grants_ahead <= MAX_CHUNKS_PER_MESSAGE:
            raise ConfigError(f"grants_ahead is {self.grants_ahead}; it must be in [1, {MAX_CHUNKS_PER_MESSAGE}]")
        for name, seconds in (("repeat_after_s", self.repeat_after_s), ("write_timeout_s", self.write_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds:g} s; it must be above 0")


# Events: what the owner tells the sender.


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSessionOpened:
    """Args:
    is_direct: Gathers store straight into the peer's ring: they need no write, and leave no copy that could be sent again.
        Only on a one-sided transport, for no receive meets them.
    """

    session: int
    incarnation: int
    ring_capacity_bytes: int
    is_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSessionLost:
    """The session's transport is closed: none of its writes is under way any more.

    Gathers are: each ends with its `GatherFinished`. Those of a direct session may still store into the peer's ring until then,
    which is why the peer keeps what they could touch in quarantine until this process has given up its access.
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
    """The chunk's KV is in the pool, or will be once `event` has fired."""

    request_id: str
    chunk: int
    event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherFinished:
    slot: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFinished:
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWriteFailed:
    slot: int
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
    | SlotWriteFailed
    | OutgoingAborted
    | Tick
)


# Actions: what the owner has to do.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGather:
    """Gather the piece, behind `event`; answer with `GatherFinished`. `credit_wait_s` is for the metrics.

    It goes into the slot; on a direct session straight into the grant, all of it stored there before the answer, and `slot` is a
    number behind the slots that only names it. Where a direct session was closed meanwhile, nothing is gathered, and the answer
    comes all the same.
    """

    piece: SenderPiece
    slot: int
    event: DeviceEvent | None
    credit_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWrite:
    """Write the slot into the piece's grant; answer with `WriteFinished` or `SlotWriteFailed`."""

    piece: SenderPiece
    slot: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """Tell the transport that nothing will come for the key."""

    session: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReleased:
    """No gather will read the request's pages again.

    Said when the last gather is done; with a direct session among its own only once every piece is released, for a rejected one
    is gathered again.
    """

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReleased:
    """The peer has taken a piece over, `ack_s` after its write was done. For the metrics; there is nothing to do."""

    ack_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGivenUp:
    """A piece that was computed and granted is dropped; its bytes of the ring have not become free for `credit_wait_s`. For the
    metrics; there is nothing to do."""

    credit_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingSent:
    """Every grant of the request came back released. The request is forgotten."""

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
