"""Events that a `Receiver` takes in, and actions that it asks its owner to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import ConfigError
from transfer.layout import Range
from transfer.piece import RankRequest
from transfer.receive.state import ReceiverPiece
from transfer.ring import Grant
from transfer.session_events import CloseSession as CloseSession
from transfer.session_events import MessageArrived as MessageArrived
from transfer.session_events import MessageDropped as MessageDropped
from transfer.session_events import Send as Send
from transfer.session_events import Tick as Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings:
    """Settings of a receiver.

    Args:
        repeat_after_s: Seconds after which an abort without an answer is repeated.
    """

    repeat_after_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.repeat_after_s > 0:
            raise ConfigError(f"repeat_after_s is {self.repeat_after_s:g} s; it must be above 0")


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSessionOpened:
    """A session is open.

    Args:
        is_one_sided: Writes need no posted receive.
    """

    session: int
    incarnation: int
    is_one_sided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSessionLost:
    """The session's transport is closed.

    Args:
        is_over: No byte of the sender can land any more, which ends the quarantine. Otherwise `ReceiverSessionOver` follows.
            False only for a one-sided session: where a write needs a receive, the close removes it.
    """

    session: int
    reason: str
    is_over: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSessionOver:
    """It is proven that no byte of a lost session's writer can land any more."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingExpected:
    """Room for the whole request is reserved in the KV pool, so all granted bytes can be scattered."""

    request: RankRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalsHeld:
    """Chunks with any of these tokens get no grant, because there are no pages for them yet. None ends the hold.

    From the first of these events on, `IncomingArrived` reports the progress of the request.
    """

    request_id: str
    tokens: Range | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingCancelled:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveSettled:
    """A posted receive has ended: filled, or declined (0 bytes)."""

    grant: Grant
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveFailed:
    grant: Grant
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSignalled:
    """A signal has reported a gather into the grant at `begin`: of a first attempt, on a direct session.

    Args:
        digest: Digest of the gathered bytes. None means that the scatter is queued already, behind a gather that may still run.
            Such an event is allowed only if the piece awaits a signal (`Receiver.awaits_signal`).
    """

    session: int
    begin: int
    digest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterFinished:
    """The scatter's device event fired.

    Args:
        is_intact: False if the digest differs: the request's pages are invalid. None if the scatter waited for the end of the
            gather, and this was given up: `ChunkReady` is still to come.
    """

    grant: Grant
    is_intact: bool | None


Event = (
    ReceiverSessionOpened
    | ReceiverSessionLost
    | ReceiverSessionOver
    | IncomingExpected
    | ArrivalsHeld
    | IncomingCancelled
    | MessageArrived
    | ReceiveSettled
    | ReceiveFailed
    | GatherSignalled
    | ScatterFinished
    | Tick
)


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class PostReceive:
    """Post the receive for the piece's bytes, and answer with `ReceiveSettled` or `ReceiveFailed`."""

    piece: ReceiverPiece
    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareScatter:
    """A piece was granted: its scatter can be prepared while its bytes are on their way. Discard it when the request is over."""

    piece: ReceiverPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class StartScatter:
    """Check the digest of the piece's bytes and scatter them, and answer with `ScatterFinished`.

    Args:
        digest: None means that the scatter is queued already, and is compared with the digest of its signal.
    """

    piece: ReceiverPiece
    digest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWatermark:
    """The ring's state has changed.

    Args:
        sessions: Sessions that the change concerns: a grant of theirs was released, or may be written now. Others can get it with
            their next heartbeat. None means all sessions that have a request in flight at either end.
    """

    sessions: frozenset[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingArrived:
    """Every piece with tokens before `num_tokens` is in the pool. Only for a request of which arrivals were held."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingComplete:
    """Every piece is in the pool and every digest agreed. The request is forgotten."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingFailed:
    """The request cannot become whole. Scatters may still write its pages until `IncomingDrained`."""

    request_id: str
    reason: str
    is_data_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingDrained:
    """After a failure or a cancel: no scatter will touch the request's pages any more (rule 6)."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBroken:
    """The digest of a chunk's bytes differs. Counted."""

    session: int
    request_id: str


Action = (
    Send
    | PostReceive
    | PrepareScatter
    | StartScatter
    | PublishWatermark
    | IncomingArrived
    | IncomingComplete
    | IncomingFailed
    | IncomingDrained
    | CloseSession
    | MessageDropped
    | ChunkBroken
)
