"""A wanted prompt, its attempts, and the interface of a decode leader's scheduler.

The scheduler is the daemon's own (`decode_node.requests`), or that of an engine that binds pages itself
(`transfer.connector.bound_prompts`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Generic, Protocol, TypeVar

from transfer.breaker import Permit, Verdict
from transfer.chunk import ChunkPlan
from transfer.connector.messages import ExpectTransfer
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.side_service import RequestView
from transfer.engine_types import GREEDY, SamplingParams
from transfer.errors import EngineError, IntegrityError, TransferError, TransportError
from transfer.instance import Instance
from transfer.pb import kvferry_pb2 as pb
from transfer.tracing import Span


class AttemptStage(Enum):
    WAITING = auto()  # waits for a prefill node to join, and for prefill to start; nothing is reserved here
    RECEIVING = auto()
    WHOLE = auto()
    LEAVING = auto()  # over, but a rank still holds its pages, or its prompt is still needed
    GONE = auto()


_SHOWN_STAGES: Final = {
    AttemptStage.WAITING: "queued",
    AttemptStage.RECEIVING: "receiving",
    AttemptStage.WHOLE: "generating",
    AttemptStage.LEAVING: "ending",
    AttemptStage.GONE: "ending",
}


@dataclass(slots=True, kw_only=True, eq=False)
class WantedPrompt:
    """A prompt whose KV is fetched. Schedulers extend it.

    Args:
        request_id: Id for operators. The id of each attempt begins with it.
        engine_request: Name of the prompt in the prefill side's engine; empty means that the prefill side computes it.
        source: host:port of the prefill node that has the prompt; empty means any node.
        start_token: First token whose KV is needed, as known before the prompt has room.
        needs_first_token: The KV is of no use without the first token.
        needs_note: The KV is of no use without the note of the prefill side's engine.
        accepted_s: Time of acceptance, by the monotonic clock.
        queue_timeout_s: Limit of the wait for room, over all attempts.
        join_timeout_s: Limit of the wait of an attempt for a prefill node to join; 0 disables this wait.
        span: Span of the request. None means that this leader records none.
        traceparent: Parent of the prefill side's and the ranks' spans if `span` is None.
    """

    request_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    accepted_s: float
    join_timeout_s: float
    queue_timeout_s: float = math.inf
    engine_request: str = ""
    source: str = ""
    start_token: int = 0
    needs_first_token: bool = False
    needs_note: bool = False
    sampling: SamplingParams = GREEDY
    cache_salt: str = field(default="", repr=False)
    span: Span | None = None
    traceparent: str = ""
    attempts: list[Attempt[Any]] = field(default_factory=list)  # the last one is current; those before it have failed
    queue_left_s: float = field(init=False)  # rest of `queue_timeout_s` after the waits that have ended
    life: int = 0  # life of the prefill node that it was sent to last
    note: bytes | None = None
    failure: TransferError | None = None  # set when the prompt is given up
    outcome: str = ""  # outcome of a prompt that was given up; empty means that of its failure
    is_over: bool = False  # it cannot fail any more
    is_forgotten: bool = False  # its engine does not need it any more

    def __post_init__(self) -> None:
        self.queue_left_s = self.queue_timeout_s

    @property
    def current(self) -> Attempt[Any]:
        return self.attempts[-1]

    @property
    def num_retries(self) -> int:
        """Number of times that it was sent to a prefill node after the first time."""
        return max(0, sum(one.peer is not None for one in self.attempts) - 1)

    def view(self, now_s: float, *, num_ranks: int) -> RequestView:
        """Return the view of the prompt for operators."""
        current = self.current
        has_room = current.stage is not AttemptStage.WAITING
        return RequestView(
            request_id=self.request_id,
            transfer_id=current.transfer_id,
            stage=_SHOWN_STAGES[current.stage],
            age_s=now_s - self.accepted_s,
            prompt_tokens=len(self.token_ids),
            ready_tokens=current.start_token,
            peer=current.peer.address if current.peer is not None else "",
            retries=self.num_retries,
            ranks_done=num_ranks - len(current.receiving) if has_room else 0,
        )


PromptT = TypeVar("PromptT", bound=WantedPrompt)


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt(Generic[PromptT]):
    """One attempt to fetch a prompt from one life of a prefill node."""

    transfer_id: str
    prompt: PromptT
    begun_s: float
    after: TransferError | None  # error that ended the attempt before it
    peer: PrefillPeer | None = None  # None means that it waits for a node to join, and is not sent yet
    prefill: Instance | None = None  # set with `peer`
    permit: Permit | None = None  # until the outcome is reported to the peer's breaker
    unsent: asyncio.TimerHandle | asyncio.Task[None] | None = None  # ends its wait for a peer
    call: asyncio.Task[None] | None = None  # the call to the prefill node
    is_asked: bool = False  # the prefill node has the prompt, or is about to have it
    early_room_s: float | None = None  # when it got early room; None also once the prefill node has begun it
    has_asked: bool = False  # the prefill node has asked for room
    stage: AttemptStage = AttemptStage.WAITING
    failure: TransferError | None = None
    start_token: int = 0  # first token whose KV comes from prefill
    first_token: int | None = None
    stats: pb.TransferStats | None = None
    expected: asyncio.Future[str] | None = None  # done when every rank has answered, or one has rejected
    answering: set[int] = field(default_factory=set)  # ranks that have not answered
    receiving: set[int] = field(default_factory=set)  # ranks whose KV is not whole
    holding: set[int] = field(default_factory=set)  # ranks that may still use its pages
    span: Span | None = None  # span of the prefill node's call

    @property
    def is_current(self) -> bool:
        return bool(self.prompt.attempts) and self.prompt.current is self

    @property
    def incarnation(self) -> int:
        """Life of its prefill node; 0 means that it is not sent yet."""
        return 0 if self.prefill is None else self.prefill.incarnation

    @property
    def can_start_late(self) -> bool:
        """Whether the prefill node learns the start token only when it asks for room."""
        return self.peer is not None and self.peer.can_start_late

    @property
    def traceparent(self) -> str:
        return self.prompt.traceparent if self.span is None else self.span.traceparent

    @property
    def lacks(self) -> str:
        """Data besides KV that the prefill side still has to send; empty means none."""
        if self.prompt.needs_first_token and self.first_token is None:
            return "first token"
        return "note" if self.prompt.needs_note and self.prompt.note is None else ""

    @property
    def is_sent(self) -> bool:
        """Whether the prefill node is no longer needed: every rank has the KV, or is about to report it."""
        return self.stats is not None and not self.lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingRoom:
    """Room for an attempt.

    Args:
        start_token: First token whose KV has to come from prefill.
        message: Creates the message to the ranks from the fields of `ExpectTransfer`.
    """

    start_token: int
    message: Callable[..., ExpectTransfer]


@dataclass(frozen=True, slots=True)
class NotYet:
    """There is no room now; the scheduler is asked again."""


class IncomingScheduler(Protocol[PromptT]):
    """The part of an engine that decides at the leader when a prompt has room."""

    def gives_early_room(self, attempt: Attempt[PromptT]) -> bool:
        """Return whether an attempt may have room before its prefill node asks for it."""
        ...

    @property
    def reuses_pages(self) -> bool:
        """Whether all attempts of a prompt fill the same pages.

        If so, the next attempt and the end of the prompt wait until no rank writes for the previous attempt.
        """
        ...

    async def prepare(self, attempt: Attempt[PromptT]) -> None:
        """Prepare an attempt that is about to be sent to its prefill node."""
        ...

    async def room(self, attempt: Attempt[PromptT], plan: ChunkPlan) -> IncomingRoom | NotYet:
        """Take room for an attempt, on all ranks.

        Raises:
            TransferError: It can never have room.
        """
        ...

    def announced(self, attempt: Attempt[PromptT]) -> None:
        """Record that the message of an attempt that has room was sent to the ranks."""
        return

    def is_loading(self, attempt: Attempt[PromptT]) -> bool:
        """Return whether KV from another source than prefill is still missing; `IncomingTransfers.run_if_whole` follows."""
        return False

    def stopped(self, attempt: Attempt[PromptT], error: TransferError) -> None:
        """Record that an attempt is given up, before the ranks cancel it."""
        ...

    def drained(self, attempt: Attempt[PromptT]) -> None:
        """Record that no rank holds or writes the pages of an attempt any more."""
        return

    def settled(self, prompt: PromptT, failure: TransferError | None) -> None:
        """Record that a prompt is complete, or why it is given up. A complete prompt can be given up later."""
        ...

    def call_ended(self, attempt: Attempt[PromptT]) -> None:
        """Record that the call to the prefill node of an attempt has ended, for any reason."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingObserver:
    """Callbacks that report wanted prompts to the leader's metrics.

    Args:
        on_outcome: Called with "done", "failed", "aborted" or "refused".
        on_queue_seconds: Seconds from the start of an attempt until it has room, or is given up without room.
        on_retry: A prompt is sent to a prefill node again.
        on_given_up: A prompt has ended with this error.
        on_no_room: The attempt with this id found too little room, and waits.
        on_wait_over: An attempt that waited has room, or has ended.
    """

    on_outcome: Callable[[str], None]
    on_queue_seconds: Callable[[float], None]
    on_retry: Callable[[], None]
    on_given_up: Callable[[TransferError], None] = lambda error: None
    on_no_room: Callable[[str], None] = lambda transfer_id: None
    on_wait_over: Callable[[str], None] = lambda transfer_id: None


def is_retried(error: TransferError) -> bool:
    """Return whether another prefill node may succeed after this error: only if the node, or the way to it, is to blame.

    docs/protocol.md, "Another try", has the table of all errors.
    """
    return isinstance(error, TransportError)


def verdict_of(error: TransferError) -> Verdict:
    """Return whether the error counts against the prefill node, by the same table."""
    return Verdict.FAILURE if isinstance(error, TransportError | IntegrityError | EngineError) else Verdict.NOTHING
