"""The requests of a prefill node in its leader: queue, pages and steps of transfers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from node_runtime.engine_watch import StepWatch
from node_runtime.rank_messages import StepDone, StepFailed
from prefill_node.prefix_loads import PrefixLoads
from prefill_node.rank_messages import PrefillStepPart, PrefixLoaded, RunPrefillStep, StartRequest
from prefill_node.scheduler import STEPS_AHEAD, PrefillScheduler
from transfer.chunk import ChunkPlan
from transfer.config import PrefillLimitsConfig
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.outgoing import OutgoingTransfers, Transfer
from transfer.errors import ConfigError, EngineError, OutOfMemory, ResourceExhausted, TransferError

OnLoaded = Callable[[str, int], None]
OnTaskOver = Callable[[asyncio.Task[None]], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """A step under way, and the ranks that still run it."""

    message: RunPrefillStep
    running: set[int]


class PrefillRequests(OutgoingTransfers):
    """Transfers whose prompts this node schedules and computes. Owned by the leader's loop.

    The scheduler takes pages only once the decode side has room, so a waiting request holds nothing on this node.

    Args:
        scheduler: Counts pages and divides prompts into steps.
        limits: Limits of queue and steps.
        on_broken: Called with the reason when nothing can be scheduled any more. The life cannot continue.
        on_short: Called with the number of requests that wait for pages of this node, even if it did not change.
        loads: Makes the loader of stored prefixes, given its callbacks. None means that there is no store.
        num_ranks, broadcast, reserve, on_outcome, on_given_up: See `OutgoingTransfers`.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        *,
        num_ranks: int,
        limits: PrefillLimitsConfig,
        broadcast: Callable[[object], None],
        reserve: Callable[[Join, str, ChunkPlan], Awaitable[Reservation]],
        on_broken: Callable[[str], None],
        on_outcome: Callable[[str], None],
        on_given_up: Callable[[TransferError], None] = lambda error: None,
        on_short: Callable[[int], None] = lambda num_waiting: None,
        loads: Callable[[OnLoaded, OnTaskOver], PrefixLoads] | None = None,
    ) -> None:
        super().__init__(
            num_ranks=num_ranks, broadcast=broadcast, reserve=reserve, on_outcome=on_outcome, on_given_up=on_given_up
        )
        self._scheduler = scheduler
        self._limits = limits
        self._watch = StepWatch(limits.step_timeout_s, on_broken)
        self._on_broken = on_broken
        self._on_short = on_short
        self._steps: dict[int, _Step] = {}
        self._step = 0
        self._asking: dict[Transfer, asyncio.Task[None]] = {}  # including those that pause after "not yet"
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loads = loads(self._on_loaded, self._on_task_over) if loads is not None else None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_task_over)

    async def close(self, error: TransferError) -> None:
        """End every request with `error`. The ranks are gone, or about to be."""
        tasks = [*self._asking.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._loads is not None:
            await self._loads.close()
        self._end_all(error)
        self._steps.clear()
        self._watch.close()

    def _accept(self, transfer: Transfer) -> None:
        if transfer.engine_request:
            raise ConfigError(
                f"engine_request is {transfer.engine_request!r}; this node has prompts computed itself, so it must be empty"
            )
        num_tokens = len(transfer.token_ids)
        if not self._scheduler.can_ever_hold(num_tokens):
            pages = self._scheduler.pages_for(num_tokens)
            raise ResourceExhausted(
                f"prompt of {num_tokens} tokens needs {pages} pages; this prefill node has {self._scheduler.all_pages}"
            )
        if self._scheduler.num_waiting >= (most := self._limits.max_queued_requests):
            raise ResourceExhausted(f"prefill queue is full ({most} requests wait; limits.max_queued_requests)")
        self._scheduler.submit(transfer.transfer_id, num_tokens, destination=transfer.join.number)
        self._wake.set()

    # Messages of the ranks

    def on_step_done(self, rank: int, message: StepDone) -> None:
        """Record that a rank has ended its step. On GPUs rank 0 does not wait for the others, so the last rank ends the step."""
        step = self._steps.get(message.step)
        if step is None:
            return  # the step failed on another rank
        step.running.discard(rank)
        if not step.running:
            del self._steps[message.step]
            self._watch.step_over(num_left=len(self._steps))
        for part in step.message.parts:
            request = self._transfers.get(part.request_id)
            if request is None or request.is_over:
                continue
            if part.is_last and part.request_id in message.tokens:
                begun_s = request.started_s if request.started_s is not None else request.queued_s
                token_id = message.tokens[part.request_id]
                self._on_computed(request, begun_s=begun_s, ended_s=time.monotonic(), token_id=token_id)
        for request_id, reason in message.faults.items():
            self.abort(request_id, EngineError(reason))
        self._send_steps()
        self._wake.set()

    def on_prefix_loaded(self, rank: int, message: PrefixLoaded) -> None:
        if self._loads is not None:
            self._loads.on_prefix_loaded(rank, message)

    def on_step_failed(self, message: StepFailed) -> None:
        self._steps.pop(message.step, None)
        self._watch.step_over(num_left=len(self._steps))
        for request_id in message.request_ids:
            is_memory = message.is_out_of_memory
            self.abort(request_id, OutOfMemory(message.reason) if is_memory else EngineError(message.reason, spares_kv=True))
        self._send_steps()
        self._wake.set()

    def on_pages_released(self, rank: int, request_id: str) -> None:
        request = self._transfers[request_id]
        request.holding.discard(rank)
        if not request.holding:
            self._scheduler.release(request_id)
            self._wake.set()
        self._forget_if_done(request)

    # Inside

    def _num_computed(self, transfer: Transfer) -> int:
        return self._scheduler.num_computed(transfer.transfer_id)

    def _on_end(self, transfer: Transfer, error: TransferError | None) -> None:
        if error is None:
            return
        if self._loads is not None:
            self._loads.forget(transfer.transfer_id)
        if self._scheduler.withdraw(transfer.transfer_id):
            self._wake.set()  # if it was accepted, others may have waited behind it

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._expire()
            self._start_accepted()
            self._on_short(self._scheduler.num_short_of_pages)
            self._ask_for_room()
            self._send_steps()
            try:
                async with asyncio.timeout(self._next_deadline_in_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass  # a request has waited for too long

    def _on_task_over(self, task: asyncio.Task[None]) -> None:
        """End the life on an unexpected error, such as a step that no message can carry: scheduling has stopped."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("scheduling_crashed", error=str(error), exc_info=error)
            self._on_broken(f"requests cannot be scheduled any more: {error!r}")

    def _expire(self) -> None:
        timeout_s = self._limits.queue_timeout_s
        while (left_s := self._next_deadline_in_s()) is not None and left_s <= 0:
            reason = f"no room within {timeout_s:g} s (limits.queue_timeout_s)"
            self.fail(next(iter(self._unstarted.values())), ResourceExhausted(reason))

    def _next_deadline_in_s(self) -> float | None:
        """Return the seconds until the next deadline of `_expire`; None if no request waits."""
        oldest = next(iter(self._unstarted.values()), None)
        return None if oldest is None else oldest.queued_s + self._limits.queue_timeout_s - time.monotonic()

    def _ask_for_room(self) -> None:
        """Ask for each request on its own, so that a silent decode node does not delay the others."""
        for request_id in self._scheduler.next_to_ask():
            request = self._transfers[request_id]
            task = self._asking[request] = asyncio.get_running_loop().create_task(self._ask(request))
            task.add_done_callback(self._on_task_over)

    async def _ask(self, request: Transfer) -> None:
        """Ask the decode node once; the request stays in `_asking` until the next question is allowed."""
        try:
            has_room = await self._reserve_room(request)
        except TransferError as error:
            self.fail(request, error)
            return
        finally:
            del self._asking[request]
        # If the request was given up meanwhile, the decode node knows it from its own call, and another one can have its id.
        if request.is_over:
            return
        if not has_room:
            self._scheduler.not_yet(request.transfer_id)
        else:
            self._scheduler.accept(request.transfer_id)
            self._start_accepted()
            self._send_steps()
        self._wake.set()

    def _start_accepted(self) -> None:
        for request_id in self._scheduler.start_accepted():
            self._start_computing(self._transfers[request_id])

    def _start_computing(self, request: Transfer) -> None:
        request.holding = set(range(self._num_ranks))
        is_in_host = self._scheduler.is_in_host(request.transfer_id)
        self._start(request, StartRequest, sampling=request.sampling, is_in_host=is_in_host)
        # Stored prefixes can be loaded into device pages only.
        if (
            self._loads is not None
            and not is_in_host
            and self._loads.begin(request.transfer_id, request.token_ids, request.join.instance, cache_salt=request.cache_salt)
        ):
            self._scheduler.hold(request.transfer_id)

    def _on_loaded(self, request_id: str, num_tokens: int) -> None:
        """Compute a request whose first `num_tokens` tokens every rank has loaded."""
        self._scheduler.begin_at(request_id, num_tokens)
        self._send_steps()
        self._wake.set()

    def _send_steps(self) -> None:
        while len(self._steps) < STEPS_AHEAD and (items := self._scheduler.next_step()):
            self._step += 1
            parts = tuple(
                PrefillStepPart(
                    request_id=item.request_id,
                    token_ids=self._transfers[item.request_id].token_ids[item.begin : item.end],
                    first_token=item.begin,
                    is_last=item.is_last,
                )
                for item in items
            )
            step = RunPrefillStep(step=self._step, parts=parts)
            self._steps[self._step] = _Step(message=step, running=set(range(self._num_ranks)))
            self._broadcast(step)
            self._watch.step_sent()
