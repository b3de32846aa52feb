"""A decode node's requests, as its leader sees them: queue, room, transfer, generation, and what each caller is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import structlog

from decode_node.admission import Admission
from decode_node.peers import REASON_GRACE_S, PrefillPeer, PrefillPeers
from decode_node.rank_messages import (
    CancelRequest,
    ExpectRequest,
    FinishRequest,
    RequestExpected,
    RunStep,
    StepDone,
    StepFailed,
    StepPart,
    TransferFailed,
)
from decode_node.text import TextCodec, TextStream
from node_runtime.step_watch import StepWatch
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.errors import (
    EngineError,
    IntegrityError,
    LocalProtocolError,
    PeerUnreachable,
    StagingError,
    TransferAborted,
    TransferError,
    TransportClosed,
)
from transfer.messages import clip_reason
from transfer.pb import kvferry_pb2 as pb

log = structlog.get_logger(__name__)


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


Progress = Tokens | Done | TransferError


class _Stage(Enum):
    WAITING = auto()  # for prefill to start: it pins nothing here
    RECEIVING = auto()
    RUNNING = auto()
    LEAVING = auto()  # no more tokens; some rank still holds its pages, or its caller waits for the statistics
    GONE = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One generation. `progress` is what its caller reads; the last item is `Done` or an error."""

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    end_ids: frozenset[int]
    accepted_s: float
    peer: PrefillPeer
    text: TextStream
    stage: _Stage = _Stage.WAITING
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    generated: list[int] = field(default_factory=list)
    first_token: int | None = None
    stats: pb.TransferStats | None = None
    ttft_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: str = ""  # empty until the last token
    expected: asyncio.Future[str] | None = None  # every rank has answered ExpectRequest
    answering: set[int] = field(default_factory=set)  # ranks that have not answered it
    receiving: set[int] = field(default_factory=set)  # ranks whose KV is not whole
    holding: set[int] = field(default_factory=set)  # ranks that have not given its pages back
    is_told: bool = False  # `Done` or an error is in `progress`
    prefill: asyncio.Task[None] | None = None

    @property
    def reserved_tokens(self) -> int:
        return len(self.token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Where the leader's metrics hear of requests.

    Args:
        on_outcome: "done", "failed", "aborted" or "refused".
        on_queue_seconds: From acceptance until room was reserved, which the prefill node asks for when it is about to compute.
        on_first_token: Seconds from acceptance.
        on_token: Seconds since the token before.
    """

    on_outcome: Callable[[str], None]
    on_queue_seconds: Callable[[float], None]
    on_first_token: Callable[[float], None]
    on_token: Callable[[float], None]


class DecodeRequests:
    """Owned by the leader's loop.

    Args:
        admission: Counts pages.
        peers: Prefill nodes.
        text: Between text and tokens.
        num_ranks: Ranks of this instance.
        incarnation: This life of theirs.
        max_queued: Requests that may wait.
        queue_timeout_s: How long one may.
        step_timeout_s: How long a step may take.
        broadcast: Sends a message to every rank.
        on_broken: Called with why when the engine hangs; the life is of no more use.
        observer: Hears of what happens.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        peers: PrefillPeers,
        text: TextCodec,
        num_ranks: int,
        incarnation: int,
        max_queued: int,
        queue_timeout_s: float,
        step_timeout_s: float,
        broadcast: Callable[[object], None],
        on_broken: Callable[[str], None],
        observer: Observer,
    ) -> None:
        self._admission = admission
        self._peers = peers
        self._text = text
        self._num_ranks = num_ranks
        self._incarnation = incarnation
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._watch = StepWatch(step_timeout_s, on_broken)
        self._broadcast = broadcast
        self._observer = observer
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._step: RunStep | None = None
        self._num_steps = 0

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    @property
    def num_queued(self) -> int:
        return sum(request.stage is _Stage.WAITING for request in self._requests.values())

    @property
    def num_running(self) -> int:
        return len(self._requests) - self.num_queued

    async def close(self, error: TransferError) -> None:
        """End every request with `error`, without the ranks: they are gone, or about to be."""
        tasks = [request.prefill for request in self._requests.values() if request.prefill is not None]
        for request in list(self._requests.values()):
            self._end(request, error)
            request.stage = _Stage.GONE
            self._answer_reserve(request, str(error))
        self._requests.clear()
        self._running.clear()
        self._step = None
        self._watch.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(
        self, request_id: str, token_ids: tuple[int, ...], max_new_tokens: int, sampling: SamplingParams, end_ids: frozenset[int]
    ) -> Request:
        """Queue a generation.

        Raises:
            StagingError: The queue is full, or the pool can never hold prompt and new tokens.
            PeerUnreachable: No prefill node is joined.
            TransferAborted: A request of that id is in flight.
        """
        if request_id in self._requests:
            raise TransferAborted(f"request_id {request_id} is in flight already; ids must be unique")
        needed = len(token_ids) + max_new_tokens
        if not self._admission.can_ever_hold(needed):
            pages = self._admission.pages_for(needed)
            raise StagingError(f"prompt and new tokens ({needed}) need {pages} pages; this decode node's pool has fewer")
        if self.num_queued >= self._max_queued:
            raise StagingError(f"decode queue is full ({self._max_queued} requests wait; limits.max_queued_requests)")
        peer = self._peers.pick()
        if peer is None:
            raise PeerUnreachable(self._peers.why_none())
        request = Request(
            request_id=request_id,
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            end_ids=end_ids,
            accepted_s=time.monotonic(),
            peer=peer,
            text=self._text.stream(),
        )
        self._requests[request_id] = request
        peer.outstanding_tokens += len(token_ids)
        request.prefill = asyncio.get_running_loop().create_task(self._prefill(request))
        request.prefill.add_done_callback(lambda task: self._on_prefill_over(request, task))
        return request

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give a request up; False when nothing of it is in flight for its caller any more."""
        request = self._requests.get(request_id)
        if request is None or request.stage in (_Stage.LEAVING, _Stage.GONE):
            return False
        self._fail(request, error)
        return True

    def on_peer_lost(self, peer: PrefillPeer, reason: str) -> None:
        """Requests whose KV has not all arrived from the peer cannot go on; the others need it no more."""
        for request in list(self._requests.values()):
            if request.peer is peer:
                self._fail_transfer(request, PeerUnreachable(f"prefill node {peer.address} is lost: {reason}"))
                if request.prefill is not None:
                    request.prefill.cancel()  # a frozen node would leave the call open, and a finished request without its end

    def _fail_transfer(self, request: Request, error: TransferError) -> None:
        """The prefill side is gone: fatal until the KV is whole, and of no interest afterwards."""
        if request.stage in (_Stage.WAITING, _Stage.RECEIVING):
            self._fail(request, error)

    # Prefill's side

    async def _prefill(self, request: Request) -> None:
        """Follow the prefill node's call to its end."""
        deadline = asyncio.get_running_loop().call_later(self._queue_timeout_s, self._expire, request)
        try:
            call = request.peer.prefill(
                request.request_id, request.token_ids, decode_incarnation=self._incarnation, sampling=request.sampling
            )
            async for event in call:
                match event.WhichOneof("event"):
                    case "first_token":
                        request.first_token = event.first_token.token_id
                    case "sent":
                        request.stats = event.sent.stats
                self._run_if_whole(request)
            if request.stats is None or request.first_token is None or request.stage is _Stage.WAITING:
                self._fail_transfer(request, PeerUnreachable(f"{request.peer.address} ended the call early"))
        except TransferError as error:
            self._fail_transfer(request, error)
        finally:
            deadline.cancel()

    def _on_prefill_over(self, request: Request, task: asyncio.Task[None]) -> None:
        """However it ended, also before its first step."""
        request.peer.outstanding_tokens -= len(request.token_ids)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("prefill_call_broke", request_id=request.request_id, error=str(error), exc_info=error)
            self._fail(request, EngineError(f"unexpected {type(error).__name__}; see the log of the node"))
        if request.finish_reason:
            self._say_done(request)

    def _expire(self, request: Request) -> None:
        if request.stage is _Stage.WAITING:
            self._fail(request, StagingError(f"no room within {self._queue_timeout_s:g} s (limits.queue_timeout_s)"))

    async def reserve(self, request_id: str, prefill_incarnation: int, decode_incarnation: int, plan: ChunkPlan) -> bool:
        """A prefill leader is about to start the request: take room for all of it, on every rank; False is "not yet".

        Args:
            plan: How the request is cut.

        Raises:
            TransportClosed: The request does not wait here.
            PeerUnreachable: A rank cannot receive it.
        """
        request = self._requests.get(request_id)
        if request is None or request.stage is not _Stage.WAITING or decode_incarnation != self._incarnation:
            raise TransportClosed(f"request {request_id} does not wait here for room")
        if request.peer.instance is None or request.peer.instance.incarnation != prefill_incarnation:
            raise TransportClosed(f"request {request_id} was given to another life of the prefill node")
        if not self._admission.reserve(request_id, request.reserved_tokens):
            return False
        request.stage = _Stage.RECEIVING
        self._observer.on_queue_seconds(time.monotonic() - request.accepted_s)
        request.holding = set(range(self._num_ranks))
        request.answering = set(range(self._num_ranks))
        request.receiving = set(range(self._num_ranks))
        request.expected = asyncio.get_running_loop().create_future()
        self._broadcast(
            ExpectRequest(
                request_id=request_id,
                prefill_incarnation=prefill_incarnation,
                num_tokens=len(request.token_ids),
                start_token=0,
                reserved_tokens=request.reserved_tokens,
                plan=plan,
                sampling=request.sampling,
            )
        )
        reason = await asyncio.shield(request.expected)
        if reason:
            error = PeerUnreachable(reason)
            self._fail(request, error)
            raise error
        return True

    # What the ranks say

    def on_expected(self, rank: int, message: RequestExpected) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.expected is None:
            return
        request.answering.discard(rank)
        if not request.expected.done() and (message.reason or not request.answering):
            request.expected.set_result(f"decode rank {rank}: {message.reason}" if message.reason else "")

    def on_transfer_complete(self, rank: int, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.receiving.discard(rank)
            self._run_if_whole(request)

    def on_transfer_failed(self, rank: int, message: TransferFailed) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.stage is not _Stage.RECEIVING:
            return
        if message.is_data_loss:
            self._fail(request, IntegrityError(f"decode rank {rank}: {message.reason}"))
            return
        # A rank only sees that its writer gave up or went away. Why, the prefill node's call is about to say.
        error = PeerUnreachable(f"decode rank {rank}: {message.reason}")
        asyncio.get_running_loop().call_later(REASON_GRACE_S, self._fail_transfer, request, error)

    def on_pages_released(self, rank: int, request_id: str) -> None:
        request = self._requests[request_id]
        request.holding.discard(rank)
        if not request.holding:
            self._admission.release(request_id)
            self._forget_if_done(request)

    def on_step_done(self, message: StepDone) -> None:
        if self._step is None or message.step != self._step.step:
            raise LocalProtocolError(f"step {message.step} is done, but it is not the one under way")
        self._step = None
        self._watch.step_over(num_left=0)
        for request_id, token in message.tokens.items():
            request = self._running.get(request_id)
            if request is not None:
                self._take_token(request, token)
        for request_id, reason in message.faults.items():
            request = self._running.get(request_id)
            if request is not None:
                self._fail(request, EngineError(reason))
        self._send_step()

    def on_step_failed(self, message: StepFailed) -> None:
        if self._step is not None and message.step == self._step.step:
            self._step = None
            self._watch.step_over(num_left=0)
        for request_id in message.request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.stage is _Stage.RUNNING:
                self._fail(request, EngineError(message.reason))
        self._send_step()

    # Generation

    def _run_if_whole(self, request: Request) -> None:
        """Start to generate once every rank has the whole KV and the first token is known; nothing less will do."""
        whole = request.stage is _Stage.RECEIVING and not request.receiving
        if whole and request.first_token is not None:
            request.stage = _Stage.RUNNING
            self._running[request.request_id] = request
            request.ttft_s = time.monotonic() - request.accepted_s
            self._observer.on_first_token(request.ttft_s)
            request.last_token_s = time.monotonic()
            self._take_token(request, request.first_token)
            self._send_step()

    def _take_token(self, request: Request, token: int) -> None:
        request.generated.append(token)
        if len(request.generated) > 1:
            now_s = time.monotonic()
            self._observer.on_token(now_s - request.last_token_s)
            request.last_token_s = now_s
        request.progress.put_nowait(Tokens(token_ids=(token,), text=request.text.add(token)))
        if token in request.end_ids:
            self._finish(request, "stop")
        elif len(request.generated) >= request.max_new_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> None:
        del self._running[request.request_id]
        request.stage = _Stage.LEAVING
        self._observer.on_outcome("done")
        self._broadcast(FinishRequest(request_id=request.request_id))
        request.finish_reason = reason
        # The tokens can be quicker than the last acks; the caller's statistics come with those.
        if request.prefill is None or request.prefill.done():
            self._say_done(request)

    def _say_done(self, request: Request) -> None:
        if request.is_told:
            return
        request.is_told = True
        request.progress.put_nowait(
            Done(
                finish_reason=request.finish_reason,
                stats=request.stats if request.stats is not None else pb.TransferStats(),
                ttft_s=request.ttft_s,
                prefill_node=request.peer.address,
            )
        )
        self._forget_if_done(request)

    def _forget_if_done(self, request: Request) -> None:
        if request.is_told and not request.holding and self._requests.get(request.request_id) is request:
            request.stage = _Stage.GONE
            del self._requests[request.request_id]

    def _send_step(self) -> None:
        """One step at a time: the next one's input is this one's output."""
        if self._step is not None or not self._running:
            return
        self._num_steps += 1
        parts = tuple(
            StepPart(
                request_id=request.request_id,
                token_id=request.generated[-1],
                position=len(request.token_ids) + len(request.generated) - 1,
            )
            for request in self._running.values()
        )
        self._step = RunStep(step=self._num_steps, parts=parts)
        self._broadcast(self._step)
        self._watch.step_sent()

    # Failure

    def _fail(self, request: Request, error: TransferError) -> None:
        """Tell the caller, stop the prefill node's call, and have the ranks give the request up where they know of it."""
        if request.stage in (_Stage.LEAVING, _Stage.GONE) or self._requests.get(request.request_id) is not request:
            return
        self._end(request, error)
        self._running.pop(request.request_id, None)
        if request.prefill is not None and request.prefill is not asyncio.current_task():
            request.prefill.cancel()
        if request.stage is _Stage.WAITING:
            request.stage = _Stage.GONE
            del self._requests[request.request_id]
        else:
            request.stage = _Stage.LEAVING
            self._answer_reserve(request, str(error))
            self._broadcast(CancelRequest(request_id=request.request_id, reason=clip_reason(str(error))))

    def _answer_reserve(self, request: Request, reason: str) -> None:
        if request.expected is not None and not request.expected.done():
            request.expected.set_result(reason or "the request is over")

    def _end(self, request: Request, error: TransferError) -> None:
        if request.stage not in (_Stage.LEAVING, _Stage.GONE):
            request.is_told = True
            request.progress.put_nowait(error)
            self._observer.on_outcome("aborted" if isinstance(error, TransferAborted) else "failed")
            log.info("request_failed", request_id=request.request_id, reason=str(error))
