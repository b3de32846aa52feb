"""A prefill node's requests, as its leader sees them: queue, reservation, steps, and what each caller is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from node_runtime.rank_messages import StepFailed
from node_runtime.step_watch import StepWatch
from prefill_node.prefix_loads import PrefixLoads
from prefill_node.rank_messages import PrefillStepDone, PrefillStepPart, PrefixLoaded, RunPrefillStep, StartRequest
from prefill_node.scheduler import STEPS_AHEAD, PrefillScheduler
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import CancelOutgoing, TransferNotSent, TransferSent
from transfer.connector.prefill_calls import Progress, PromptFirstToken, PromptSent, PromptStarted
from transfer.connector.request_view import RequestView
from transfer.engine_types import SamplingParams
from transfer.errors import (
    EngineError,
    OutOfMemory,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    TransferAborted,
    TransferError,
)
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.send.events import SentStats
from transfer.tracing import Span
from transfer.transfer_ids import client_id_of

RETRY_RESERVE_S = 0.05
"""Shortest pause after "not yet", before the next question about the same request."""

PAUSES_END_EVERY_S = 0.01
"""Pauses end together, on multiples of this: after each pause, the leader checks all waiting requests, which can be thousands."""

OnLoaded = Callable[[str, int], None]
OnTaskOver = Callable[[asyncio.Task[None]], None]

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class PromptRequest:
    """One prompt. `progress` is what its caller reads; the last item is `PromptSent` or an error."""

    request_id: str
    token_ids: tuple[int, ...]
    start_token: int
    sampling: SamplingParams
    join: Join
    cache_salt: str
    queued_s: float
    deadline_s: float
    started_s: float | None = None
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    has_first_token: bool = False
    is_over: bool = False
    is_aborted: bool = False  # the ranks have been told to give it up
    unsent: set[int] = field(default_factory=set)  # ranks that have not sent their part
    holding: set[int] = field(default_factory=set)  # ranks that have not given its pages back
    stats: list[SentStats] = field(default_factory=list)
    span: Span | None = None  # of its call, where it is traced

    @property
    def is_started(self) -> bool:
        """Whether the decode side has reserved room and the ranks were sent the request."""
        return self.started_s is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """A step under way, and the ranks that have not ended it."""

    message: RunPrefillStep
    running: set[int]


class PrefillRequests:
    """Owned by the leader's loop.

    Args:
        scheduler: Counts pages and cuts steps.
        num_ranks: Ranks of this instance.
        max_queued: Requests that may wait.
        queue_timeout_s: How long one may.
        step_timeout_s: How long no step may end while one is under way.
        broadcast: Sends a message to every rank.
        reserve: Asks the decode leader for room.
        on_broken: Called with why when nothing can be scheduled any more; the life is of no more use.
        on_outcome: Called with "sent", "failed", "aborted" or "refused" for each request that was queued and ends.
        on_given_up: Called with the error of each that was not "sent".
        on_short: Called with the requests that wait for pages of this node, also when they did not change.
        loads: Makes what looks for stored beginnings, given whom to tell of them; None: there is no store.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        *,
        num_ranks: int,
        max_queued: int,
        queue_timeout_s: float,
        step_timeout_s: float,
        broadcast: Callable[[object], None],
        reserve: Callable[[Join, str], Awaitable[Reservation]],
        on_broken: Callable[[str], None],
        on_outcome: Callable[[str], None],
        on_given_up: Callable[[TransferError], None] = lambda error: None,
        on_short: Callable[[list[str]], None] = lambda request_ids: None,
        loads: Callable[[OnLoaded, OnTaskOver], PrefixLoads] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._num_ranks = num_ranks
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._watch = StepWatch(step_timeout_s, on_broken)
        self._broadcast = broadcast
        self._reserve = reserve
        self._on_broken = on_broken
        self._on_outcome = on_outcome
        self._on_given_up = on_given_up
        self._on_short = on_short
        self._requests: dict[str, PromptRequest] = {}
        self._steps: dict[int, _Step] = {}
        self._step = 0
        self._asking: dict[PromptRequest, asyncio.Task[None]] = {}  # also those that pause after "not yet"
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loads = loads(self._on_loaded, self._on_task_over) if loads is not None else None

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Started and not yet over everywhere; pages can be back while bytes are still on their way."""
        return len(self._requests) - self._scheduler.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Requests of which anything is left, also those that hold no pages any more and whose last bytes still travel."""
        return len(self._requests)

    def views(self) -> list[RequestView]:
        """Of all requests of which anything is left."""
        now_s = time.monotonic()
        return [self._view(request, now_s) for request in self._requests.values()]

    def _view(self, request: PromptRequest, now_s: float) -> RequestView:
        if request.is_over:
            stage = "ending"
        elif request.started_s is None:
            stage = "queued"
        else:
            stage = "sending" if request.has_first_token else "computing"
        return RequestView(
            request_id=client_id_of(request.request_id),
            transfer_id=request.request_id,
            stage=stage,
            age_s=now_s - request.queued_s,
            prompt_tokens=len(request.token_ids),
            ready_tokens=len(request.token_ids) if request.has_first_token else self._scheduler.num_computed(request.request_id),
            peer=request.join.address,
            ranks_done=self._num_ranks - len(request.unsent) if request.started_s is not None else 0,
        )

    def is_idle(self, join: Join) -> bool:
        """Whether nothing of that decode instance is in flight."""
        return all(request.join is not join for request in self._requests.values())

    def others_tokens(self, join: Join) -> int:
        """Prompt tokens of requests of other decode instances, of which not all is sent: what that one does not know of."""
        return sum(
            len(request.token_ids)
            for request in self._requests.values()
            if not request.is_over and request.join.incarnation != join.incarnation
        )

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_task_over)

    async def close(self, error: TransferError) -> None:
        """End every request with `error`, without the ranks: they are gone, or about to be."""
        tasks = [*self._asking.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._loads is not None:
            await self._loads.close()
        for request in list(self._requests.values()):
            self._end(request, error)
        self._requests.clear()
        self._steps.clear()
        self._watch.close()

    def submit(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        start_token: int,
        sampling: SamplingParams,
        join: Join,
        *,
        cache_salt: str = "",
        span: Span | None = None,
    ) -> PromptRequest:
        """Queue a prompt; `span` is that of its call, where it is traced, and ended by whoever began it.

        Raises:
            ResourceExhausted: The queue is full, or the pool can never hold the prompt.
            TransferAborted: A request of that id is in flight.
        """
        if request_id in self._requests:
            raise TransferAborted(f"request_id {request_id} is in flight already; ids must be unique")
        if not self._scheduler.can_ever_hold(len(token_ids)):
            pages = self._scheduler.pages_for(len(token_ids))
            raise ResourceExhausted(f"prompt of {len(token_ids)} tokens needs {pages} pages; this prefill node's pool has fewer")
        if self._scheduler.num_waiting >= self._max_queued:
            raise ResourceExhausted(f"prefill queue is full ({self._max_queued} requests wait; limits.max_queued_requests)")
        now_s = time.monotonic()
        request = PromptRequest(
            request_id=request_id,
            token_ids=token_ids,
            start_token=start_token,
            sampling=sampling,
            join=join,
            cache_salt=cache_salt,
            queued_s=now_s,
            deadline_s=now_s + self._queue_timeout_s,
            span=span,
        )
        if span is not None:
            span.set(prompt_tokens=len(token_ids))
        self._requests[request_id] = request
        self._scheduler.submit(request_id, len(token_ids), destination=join.number)
        self._wake.set()
        return request

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give a request up; False when nothing of it is in flight for its caller any more."""
        request = self._requests.get(request_id)
        if request is None or request.is_over:
            return False
        self._fail(request, error)
        return True

    def give_up(self, request: PromptRequest, error: TransferError) -> None:
        """As `abort`, for one that `submit` returned: its id can be another request's by now. No-op once it is over."""
        if not request.is_over:
            self._fail(request, error)

    def abort_join(self, join: Join, error: TransferError) -> None:
        """The decode instance is gone, and so is every request for it."""
        for request in list(self._requests.values()):
            if request.join is join:
                self._fail(request, error)

    # What the ranks say

    def on_step_done(self, rank: int, message: PrefillStepDone) -> None:
        """A rank's step is over; it is over for good with the last of them: on GPUs rank 0 does not wait for the others."""
        step = self._steps.get(message.step)
        if step is None:
            return  # it failed on another rank
        step.running.discard(rank)
        if not step.running:
            del self._steps[message.step]
            self._watch.step_over(num_left=len(self._steps))
        for part in step.message.parts:
            request = self._requests.get(part.request_id)
            if request is None or request.is_over:
                continue
            if part.is_last and part.request_id in message.first_tokens:
                started_s = request.started_s if request.started_s is not None else request.queued_s
                token = PromptFirstToken(token_id=message.first_tokens[part.request_id], compute_s=time.monotonic() - started_s)
                request.progress.put_nowait(token)
                request.has_first_token = True
                if request.span is not None:
                    request.span.record("kvferry.compute", begun_s=started_s, ended_s=time.monotonic())
                self._end_if_sent(request)
        for request_id, reason in message.faults.items():
            request = self._requests.get(request_id)
            if request is not None:
                self._fail(request, EngineError(reason))
        self._send_steps()
        self._wake.set()

    def on_prefix_loaded(self, rank: int, message: PrefixLoaded) -> None:
        if self._loads is not None:
            self._loads.on_prefix_loaded(rank, message)

    def on_step_failed(self, message: StepFailed) -> None:
        self._steps.pop(message.step, None)
        self._watch.step_over(num_left=len(self._steps))
        for request_id in message.request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                is_memory = message.is_out_of_memory
                self._fail(request, OutOfMemory(message.reason) if is_memory else EngineError(message.reason, spares_kv=True))
        self._send_steps()
        self._wake.set()

    def on_sent(self, rank: int, message: TransferSent) -> None:
        request = self._requests.get(message.transfer_id)
        if request is None:
            return
        request.unsent.discard(rank)
        request.stats.append(message.stats)
        self._end_if_sent(request)

    def on_failed(self, rank: int, message: TransferNotSent) -> None:
        request = self._requests.get(message.transfer_id)
        if request is not None:
            request.unsent.discard(rank)
            self._fail(request, PeerUnreachable(message.reason))
            self._forget_if_done(request)

    def on_pages_released(self, rank: int, request_id: str) -> None:
        request = self._requests[request_id]
        request.holding.discard(rank)
        if not request.holding:
            self._scheduler.release(request_id)
            self._wake.set()
        self._forget_if_done(request)

    # Inside

    def _end_if_sent(self, request: PromptRequest) -> None:
        """Over once every rank has sent its part and the first token is known; either can be the last to come."""
        if not request.unsent and request.has_first_token and not request.is_over:
            request.is_over = True
            request.progress.put_nowait(PromptSent(stats=tuple(request.stats)))
            self._on_outcome("sent")
        self._forget_if_done(request)

    def _fail(self, request: PromptRequest, error: TransferError) -> None:
        """Tell the caller, and have the ranks give the request up where they have not yet."""
        if self._requests.get(request.request_id) is not request:
            return  # it is over everywhere; its id may be another request's by now
        self._end(request, error)
        if self._loads is not None:
            self._loads.forget(request.request_id)
        if self._scheduler.withdraw(request.request_id):
            del self._requests[request.request_id]  # it was still waiting: no rank knows of it
            self._wake.set()  # if it was accepted, others may have waited behind it
        elif not request.is_aborted:
            request.is_aborted = True
            self._broadcast(CancelOutgoing(transfer_id=request.request_id, reason=clip_reason(str(error))))
        self._forget_if_done(request)  # its pages may be back already, and then nobody speaks of it again

    def _end(self, request: PromptRequest, error: TransferError) -> None:
        if not request.is_over:
            request.is_over = True
            request.progress.put_nowait(error)
            self._on_outcome(outcome_of(error))
            self._on_given_up(error)
            if request.span is not None:
                if not request.has_first_token:  # what it was at
                    what, begun_s = "kvferry.compute", request.started_s
                    if begun_s is None:
                        what, begun_s = "kvferry.queue", request.queued_s
                    request.span.record(what, begun_s=begun_s, ended_s=time.monotonic(), error=str(error))
                request.span.end(str(error))

    def _forget_if_done(self, request: PromptRequest) -> None:
        """Its id may be used again once no rank knows it any more: each has sent or failed its part and given its pages back."""
        if request.is_over and not request.holding and not request.unsent:
            self._requests.pop(request.request_id, None)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._expire()
            self._start_accepted()
            self._on_short(self._scheduler.short_of_pages())
            self._ask_for_room()
            self._send_steps()
            try:
                async with asyncio.timeout(self._next_deadline_in_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass  # a request has waited for too long

    def _on_task_over(self, task: asyncio.Task[None]) -> None:
        """What nobody expected, such as a step that no message can carry, may not end the scheduling and nothing else."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("scheduling_broke", error=str(error), exc_info=error)
            self._on_broken(f"requests cannot be scheduled any more: {error!r}")

    def _expire(self) -> None:
        now_s = time.monotonic()
        for request in [r for r in self._requests.values() if r.started_s is None and r.deadline_s <= now_s]:
            self._fail(request, ResourceExhausted(f"no room within {self._queue_timeout_s:g} s (limits.queue_timeout_s)"))

    def _next_deadline_in_s(self) -> float | None:
        """Return the seconds until the next deadline of `_expire`; None if no request waits."""
        deadlines = [request.deadline_s for request in self._requests.values() if request.started_s is None]
        return min(deadlines) - time.monotonic() if deadlines else None

    def _ask_for_room(self) -> None:
        """Ask for every request that this node has room for; each by itself, so that one silent decode node delays no other."""
        for request_id in self._scheduler.startable():
            request = self._requests[request_id]
            if request not in self._asking:
                task = self._asking[request] = asyncio.get_running_loop().create_task(self._ask(request))
                task.add_done_callback(self._on_task_over)

    async def _ask(self, request: PromptRequest) -> None:
        """Ask the decode node once, and keep the request in `_asking` until the next question is allowed."""
        try:
            answer = await self._reserve(request.join, request.request_id)
            if answer.is_reserved and answer.start_token is not None:
                request.start_token = _checked_start_token(request, answer.start_token)
            if not answer.is_reserved:
                await asyncio.sleep(_pause_s())
        except TransferError as error:
            self._fail(request, error)
            return
        finally:
            del self._asking[request]
        # If the request was given up meanwhile, the decode node has heard of that from its own call.
        if answer.is_reserved and not request.is_over:
            self._scheduler.accept(request.request_id)
            self._start_accepted()
            self._send_steps()
        self._wake.set()

    def _start_accepted(self) -> None:
        for request_id in self._scheduler.start_accepted():
            self._start(self._requests[request_id])

    def _start(self, request: PromptRequest) -> None:
        request.started_s = time.monotonic()
        request.unsent = set(range(self._num_ranks))
        request.holding = set(range(self._num_ranks))
        self._broadcast(
            StartRequest(
                request_id=request.request_id,
                decode_incarnation=request.join.incarnation,
                num_tokens=len(request.token_ids),
                start_token=request.start_token,
                plan=request.join.plan,
                sampling=request.sampling,
                traceparent="" if request.span is None else request.span.traceparent,
            )
        )
        if request.span is not None:
            request.span.record("kvferry.queue", begun_s=request.queued_s, ended_s=request.started_s)
        request.progress.put_nowait(PromptStarted(queue_s=request.started_s - request.queued_s))
        if self._loads is not None and self._loads.begin(
            request.request_id, request.token_ids, request.join.instance, cache_salt=request.cache_salt
        ):
            self._scheduler.hold(request.request_id)

    def _on_loaded(self, request_id: str, num_tokens: int) -> None:
        """Every rank has the first `num_tokens` tokens of a request, which is not over."""
        self._scheduler.begin_at(request_id, num_tokens)
        self._send_steps()
        self._wake.set()

    def _send_steps(self) -> None:
        while len(self._steps) < STEPS_AHEAD and (items := self._scheduler.next_step()):
            self._step += 1
            parts = tuple(
                PrefillStepPart(
                    request_id=item.request_id,
                    token_ids=self._requests[item.request_id].token_ids[item.begin : item.end],
                    first_token=item.begin,
                    is_last=item.is_last,
                )
                for item in items
            )
            step = RunPrefillStep(step=self._step, parts=parts)
            self._steps[self._step] = _Step(message=step, running=set(range(self._num_ranks)))
            self._broadcast(step)
            self._watch.step_sent()


def _pause_s() -> float:
    """Return the seconds until the next multiple of `PAUSES_END_EVERY_S` that is at least `RETRY_RESERVE_S` away."""
    earliest_s = time.monotonic() + RETRY_RESERVE_S
    return RETRY_RESERVE_S + -earliest_s % PAUSES_END_EVERY_S


def _checked_start_token(request: PromptRequest, start_token: int) -> int:
    """Raises RemoteProtocolError for one that the decode side must not tell."""
    if not request.start_token <= start_token < len(request.token_ids):
        raise RemoteProtocolError(
            f"{request.join.address} told start_token {start_token} in Reserve; it must be at least the request's "
            f"{request.start_token} and below the prompt's {len(request.token_ids)} tokens"
        )
    return start_token
