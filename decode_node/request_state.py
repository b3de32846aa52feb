"""The requests of a decode leader: their attempts, the progress of each attempt, and the results for the caller.

Data and the questions that it can answer of itself; every decision is that of `decode_node.requests`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from decode_node.offload.tiers import Prompt
from decode_node.text import TextStream
from transfer.breaker import Permit
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.request_view import RequestView
from transfer.engine_types import SamplingParams
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.tracing import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens that were generated, and the text that they add."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    finish_reason: str
    stats: pb.TransferStats
    ttft_s: float
    prefill_node: str
    retries: int
    cached_tokens: int


Progress = Tokens | Done | TransferError


class GenerationStage(Enum):
    WAITING = auto()  # for a prefill node to be joined, where none is, and for prefill to start: it pins nothing here
    RECEIVING = auto()
    RUNNING = auto()
    LEAVING = auto()  # no more tokens; some rank still holds its pages, or its caller waits for the statistics
    GONE = auto()


_SHOWN_STAGES: Final = {
    GenerationStage.WAITING: "queued",
    GenerationStage.RECEIVING: "receiving",
    GenerationStage.RUNNING: "generating",
    GenerationStage.LEAVING: "ending",
    GenerationStage.GONE: "ending",
}


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One generation. `progress` is what its caller reads; the last item is `Done` or an error."""

    request_id: str  # the client's
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    end_ids: frozenset[int]
    accepted_s: float
    queue_left_s: float  # how long it may still wait for room, over all of its attempts
    text: TextStream
    cache_salt: str = ""
    attempts: list[Attempt] = field(default_factory=list)  # the last one is under way; those before it have been given up
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    generated: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: str = ""  # empty until the last token
    is_told: bool = False  # `Done` or an error is in `progress`
    told_s: float = 0.0  # when, by the monotonic clock
    span: Span | None = None  # of its whole life, where it is traced

    @property
    def current(self) -> Attempt:
        return self.attempts[-1]

    @property
    def is_over(self) -> bool:
        return self.is_told or bool(self.finish_reason)

    @property
    def num_retries(self) -> int:
        """Times that it went to a prefill node beyond the first one."""
        return max(0, sum(one.peer is not None for one in self.attempts) - 1)

    @property
    def next_position(self) -> int:
        """Position of the newest token, which the next step takes in."""
        return len(self.token_ids) + len(self.generated) - 1

    def view(self, now_s: float, *, num_ranks: int) -> RequestView:
        """What operators see of it."""
        current = self.current
        has_room = current.stage is not GenerationStage.WAITING
        return RequestView(
            request_id=self.request_id,
            transfer_id=current.transfer_id,
            stage=_SHOWN_STAGES[current.stage],
            age_s=now_s - self.accepted_s,
            prompt_tokens=len(self.token_ids),
            ready_tokens=current.start_token,
            generated_tokens=len(self.generated),
            max_new_tokens=self.max_new_tokens,
            peer=current.peer.address if current.peer is not None else "",
            retries=self.num_retries,
            ranks_done=num_ranks - len(current.receiving) if has_room else 0,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One way of a request through one life of a prefill node."""

    transfer_id: str
    request: GenerationRequest
    begun_s: float
    after: TransferError | None  # what ended the attempt before it
    peer: PrefillPeer | None = None  # None: it waits for one to be joined, and is not sent yet
    incarnation: int = 0  # of the prefill instance, once it is sent
    permit: Permit | None = None  # from then until the peer's breaker has heard what came of it
    unsent: asyncio.TimerHandle | None = None  # ends its wait for a peer
    stage: GenerationStage = GenerationStage.WAITING
    prompt: Prompt | None = None  # once it has been looked for
    start_token: int = 0  # first token whose KV comes from prefill, once it has room
    first_token: int | None = None
    stats: pb.TransferStats | None = None
    expected: asyncio.Future[str] | None = None  # every rank has answered ExpectRequest
    answering: set[int] = field(default_factory=set)  # ranks that have not answered it
    receiving: set[int] = field(default_factory=set)  # ranks whose KV is not whole
    holding: set[int] = field(default_factory=set)  # ranks that have not given its pages back
    prefill: asyncio.Task[None] | None = None
    span: Span | None = None  # of the prefill node's call

    @property
    def is_current(self) -> bool:
        return self.request.current is self

    @property
    def is_sent(self) -> bool:
        """The prefill node has nothing more to give: every grant is released, so every rank has, or is about to say, the KV."""
        return self.first_token is not None and self.stats is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Where the leader's metrics hear of requests.

    Args:
        on_outcome: "done", "failed", "aborted" or "refused".
        on_queue_seconds: From an attempt's begin until room was reserved, which the prefill node asks for when it is about to
            compute; or until the attempt was given up without.
        on_first_token: Seconds from acceptance.
        on_token: Seconds since the token before.
        on_retry: A request is tried on another prefill node.
        on_given_up: A request that was queued has ended with this error.
        on_no_room: An attempt, given by its id, found too little room, and waits.
        on_wait_over: An attempt that waited has room, or has ended.
    """

    on_outcome: Callable[[str], None]
    on_queue_seconds: Callable[[float], None]
    on_first_token: Callable[[float], None]
    on_token: Callable[[float], None]
    on_retry: Callable[[], None]
    on_given_up: Callable[[TransferError], None] = lambda error: None
    on_no_room: Callable[[str], None] = lambda transfer_id: None
    on_wait_over: Callable[[str], None] = lambda transfer_id: None
