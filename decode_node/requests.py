"""A decode node's requests, as its leader sees them: queue, room, transfer, generation, and what each caller is told.

A request is tried on one prefill node, and where that one is lost before the first token has reached the caller, on another one.
Each attempt has an id of its own (docs/adr/0012-a-transfer-id-for-each-try.md), under which prefill node and ranks know it; so
what comes late of one attempt finds that attempt, or nothing.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from decode_node.offload.tiers import Tiers
from decode_node.rank_messages import DecodeStepDone, DecodeStepPart, ExpectRequest, FinishRequest, RunDecodeStep
from decode_node.request_state import Attempt, Done, GenerationRequest, GenerationStage, Observer, Tokens
from decode_node.text import TextCodec
from node_runtime.rank_messages import StepFailed
from node_runtime.step_watch import StepWatch
from transfer.breaker import Verdict
from transfer.chunk import ChunkPlan, check_num_pieces
from transfer.connector.messages import CancelIncoming, TransferBroken, TransferExpected
from transfer.connector.prefill_nodes import REASON_GRACE_S, PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.request_view import RequestView
from transfer.connector.retry_rules import is_retried, verdict_of
from transfer.engine_types import SamplingParams
from transfer.errors import (
    EngineError,
    IntegrityError,
    LocalProtocolError,
    OutOfMemory,
    PeerUnreachable,
    ResourceExhausted,
    TransferError,
    TransportClosed,
)
from transfer.instance import Instance
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.pb import kvferry_pb2 as pb
from transfer.tracing import Span
from transfer.transfer_ids import new_transfer_id

log = structlog.get_logger(__name__)

PLACE_AFTER_S: Final = 0.1
"""From the first change of prefill nodes until requests that wait for one are placed: several often come within milliseconds."""

PLACED_AT_ONCE: Final = 32
"""Requests that waited, of one such moment: the first node that comes is not to have all, if others are on their way."""

PLACED_TOKENS_AT_ONCE: Final = 1 << 18
"""Tokens of the prompts that are placed at one such moment. Choosing a node for 131,072 tokens takes the loop some 5 ms."""


class DecodeRequests:
    """Owned by the leader's loop.

    Args:
        tiers: Decide what of each request lies where.
        peers: Prefill nodes.
        text: Between text and tokens.
        own: This instance.
        max_queued: Requests that may wait.
        queue_timeout_s: How long one may.
        join_timeout_s: How long of that it may for a prefill node to be joined; 0: not at all.
        step_timeout_s: How long a step may take.
        prefill_retries: How often a request may be tried again on another prefill node.
        broadcast: Sends a message to every rank.
        on_broken: Called with why when the engine hangs; the life is of no more use.
        observer: Hears of what happens.
        name_attempt: Makes the id of an attempt from the client's.
    """

    def __init__(
        self,
        *,
        tiers: Tiers,
        peers: PrefillNodes,
        text: TextCodec,
        own: Instance,
        max_queued: int,
        queue_timeout_s: float,
        join_timeout_s: float,
        step_timeout_s: float,
        prefill_retries: int,
        broadcast: Callable[[object], None],
        on_broken: Callable[[str], None],
        observer: Observer,
        name_attempt: Callable[[str], str] = new_transfer_id,
    ) -> None:
        self._tiers = tiers
        self._peers = peers
        self._text = text
        self._own = own
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._join_timeout_s = join_timeout_s
        self._prefill_retries = prefill_retries
        self._watch = StepWatch(step_timeout_s, on_broken)
        self._broadcast = broadcast
        self._observer = observer
        self._name_attempt = name_attempt
        tiers.listen(on_loaded=self._on_loaded, on_room=self._send_step)
        self._attempts: dict[str, Attempt] = {}  # under way, or given up while a rank still holds its pages
        self._unsent: list[
            Attempt
        ] = []  # of those the ones that wait for a prefill node to be joined, the oldest request's first
        self._placing: asyncio.TimerHandle | None = None
        self._running: dict[str, Attempt] = {}
        self._step: RunDecodeStep | None = None
        self._num_steps = 0

    @property
    def _requests(self) -> tuple[GenerationRequest, ...]:
        return tuple(dict.fromkeys(attempt.request for attempt in self._attempts.values()))

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of every attempt of every request that is in flight."""
        return tuple(attempt.transfer_id for request in self._requests for attempt in request.attempts)

    @property
    def num_queued(self) -> int:
        return sum(attempt.stage is GenerationStage.WAITING for attempt in self._attempts.values())

    @property
    def num_running(self) -> int:
        return len(self._requests) - self.num_queued

    @property
    def num_without_node(self) -> int:
        """Attempts that wait for a prefill node to join."""
        return len(self._unsent)

    def views(self) -> list[RequestView]:
        """Of all requests in flight."""
        now_s = time.monotonic()
        return [request.view(now_s, num_ranks=self._own.shard.num_ranks) for request in self._requests]

    async def close(self, error: TransferError) -> None:
        """End every request with `error`, without the ranks: they are gone, or about to be."""
        attempts = list(self._attempts.values())
        for request in self._requests:
            if not request.is_over:
                self._end(request, error)
        for attempt in attempts:
            attempt.stage = GenerationStage.GONE
            self._stop_waiting(attempt)
            self._judge(attempt, Verdict.NOTHING, str(error))
            self._answer_reserve(attempt, str(error))
        if self._placing is not None:
            self._placing.cancel()
        self._attempts.clear()
        self._running.clear()
        self._step = None
        self._watch.close()
        tasks = [attempt.prefill for attempt in attempts if attempt.prefill is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        max_new_tokens: int,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        cache_salt: str = "",
        span: Span | None = None,
        may_wait: bool = True,
    ) -> GenerationRequest:
        """Queue a generation.

        Args:
            request_id: The client's; each attempt gets an id of its own that begins with it.
            cache_salt: It shares kept KV with requests of the same one only.
            span: Of the request, where it is traced; ended by whoever began it.
            may_wait: For a prefill node to be joined, where none is.

        Raises:
            ResourceExhausted: The queue is full, or the pool can never hold prompt and new tokens.
            PeerUnreachable: No prefill node is joined, and it may not wait, or none can be waited for.
        """
        needed = len(token_ids) + max_new_tokens
        if (refusal := self._tiers.refusal(needed)) is not None:
            raise ResourceExhausted(f"prompt and new tokens ({needed}) {refusal}")
        if self.num_queued >= self._max_queued:
            raise ResourceExhausted(f"decode queue is full ({self._max_queued} requests wait; limits.max_queued_requests)")
        peer = self._peers.pick(token_ids=token_ids, cache_salt=cache_salt)
        if peer is None and not (may_wait and self._join_timeout_s and self._peers.can_wait_for_node()):
            raise PeerUnreachable(self._peers.unavailable_reason())
        if may_wait and self._placing is not None and any(one.after is None for one in self._unsent):
            peer = None  # it comes after those that wait already
        request = GenerationRequest(
            request_id=request_id,
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            end_ids=end_ids,
            accepted_s=time.monotonic(),
            queue_left_s=self._queue_timeout_s,
            text=self._text.stream(),
            cache_salt=cache_salt,
            span=span,
        )
        if span is not None:
            span.set(request_id=request_id, prompt_tokens=len(token_ids))
        self._begin(request, peer, None)
        return request

    def peers_changed(self) -> None:
        """Prefill nodes have come or gone. What waits for one is placed a moment later: nodes that come together share it."""
        if self._unsent and self._placing is None:
            self._placing = asyncio.get_running_loop().call_later(PLACE_AFTER_S, self.place_waiting)

    def place_waiting(self) -> None:
        """Send requests that wait for a prefill node to the best node, the oldest request first.

        At most `PLACED_AT_ONCE` requests, or `PLACED_TOKENS_AT_ONCE` tokens, are sent at once. The others follow a moment later.
        """
        if self._placing is not None:
            self._placing.cancel()
            self._placing = None
        num_placed, num_tokens = 0, 0
        for attempt in list(self._unsent):
            if num_placed == PLACED_AT_ONCE or num_tokens >= PLACED_TOKENS_AT_ONCE:
                self.peers_changed()
                return
            peer = self._pick(attempt.request)
            if peer is not None:
                num_placed += 1
                num_tokens += len(attempt.request.token_ids)
                self._send(attempt, peer)
            elif not self._may_come(attempt.request):
                self._refuse(attempt)

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give up the request that has the attempt of that id; False when nothing of it is in flight for its caller any more."""
        for request in self._requests:
            if any(attempt.transfer_id == request_id for attempt in request.attempts) and not request.is_over:
                self._fail(request, error)
                return True
        return False

    def give_up(self, request: GenerationRequest, error: TransferError) -> None:
        """As `abort`, for one that `submit` returned. No-op once it is over."""
        self._fail(request, error)

    def on_peer_lost(self, peer: PrefillPeer, reason: str) -> None:
        """Attempts whose KV has not all arrived from the peer cannot go on; the others need it no more.

        The requests of `PLACED_TOKENS_AT_ONCE` tokens are tried again at once, the others in the next turns of the loop.
        """
        lost = deque(attempt for attempt in self._attempts.values() if attempt.peer is peer)
        self._lose(lost, f"prefill node {peer.address} is lost: {reason}")

    def _lose(self, lost: deque[Attempt], reason: str) -> None:
        num_tokens = 0
        while lost:
            if num_tokens >= PLACED_TOKENS_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._lose, lost, reason)
                return
            attempt = lost.popleft()
            if self._attempts.get(attempt.transfer_id) is not attempt:
                continue  # it has ended meanwhile
            num_tokens += len(attempt.request.token_ids)
            if not attempt.is_sent:
                self._fail_transfer(attempt, PeerUnreachable(reason))
            if attempt.prefill is not None:
                attempt.prefill.cancel()  # a frozen node would leave the call open, and a finished request without its end

    # Attempts

    def _begin(self, request: GenerationRequest, peer: PrefillPeer | None, after: TransferError | None) -> None:
        """Try the request on that peer, which is joined, or as soon as there is one.

        Args:
            after: What ended the attempt before this one.
        """
        attempt = Attempt(
            transfer_id=self._name_attempt(request.request_id), request=request, begun_s=time.monotonic(), after=after
        )
        request.attempts.append(attempt)
        self._attempts[attempt.transfer_id] = attempt
        if peer is not None:
            self._send(attempt, peer)
            return
        insort(self._unsent, attempt, key=lambda one: one.request.accepted_s)
        wait_s = min(self._join_timeout_s, self._queue_left_s(attempt))
        attempt.unsent = asyncio.get_running_loop().call_later(wait_s, self._end_waiting, attempt)
        reason = self._peers.unavailable_reason() if self._placing is None else "one is joined, and others wait for their turn"
        log.info("request_waits_for_prefill_node", request_id=attempt.transfer_id, reason=reason)

    def _send(self, attempt: Attempt, peer: PrefillPeer) -> None:
        """Have that peer compute its prompt."""
        assert peer.instance is not None
        self._stop_waiting(attempt)
        request = attempt.request
        attempt.peer, attempt.incarnation, attempt.permit = peer, peer.instance.incarnation, self._peers.begin(peer)
        if request.span is not None:
            attempt.span = request.span.begin("kvferry.try", transfer_id=attempt.transfer_id, prefill_node=peer.address)
        peer.outstanding_tokens += len(request.token_ids)
        self._peers.sent(peer, request.token_ids, request.cache_salt)
        attempt.prefill = asyncio.get_running_loop().create_task(self._prefill(attempt, peer, peer.instance))
        attempt.prefill.add_done_callback(lambda task: self._on_prefill_over(attempt, peer, task))
        if attempt.after is not None:
            self._observer.on_retry()
            log.warning(
                "request_retried",
                request_id=attempt.transfer_id,
                given_up=request.attempts[-2].transfer_id,
                prefill_node=peer.address,
                reason=str(attempt.after),
            )

    def _end_waiting(self, attempt: Attempt) -> None:
        """It has waited for as long as it may. Where a node has come meanwhile it was its turn soon."""
        peer = self._pick(attempt.request)
        if peer is None:
            self._refuse(attempt)
        elif self._queue_left_s(attempt) > 0:
            self._send(attempt, peer)
        else:
            self._expire(attempt)

    def _refuse(self, attempt: Attempt) -> None:
        """No prefill node that could take it was joined in time, or none can be any more."""
        if attempt.after is None:  # turned away, as one that may not wait
            self._fail(attempt.request, PeerUnreachable(self._peers.unavailable_reason()), outcome="refused")
        else:
            self._fail(attempt.request, attempt.after)

    def _stop_waiting(self, attempt: Attempt) -> None:
        """For a prefill node; no-op where it does not."""
        if attempt.unsent is not None:
            attempt.unsent.cancel()
            attempt.unsent = None
            self._unsent.remove(attempt)

    def _fail_transfer(self, attempt: Attempt, error: TransferError) -> None:
        """The prefill side gave it up or is gone: of no interest once the KV is whole, and until then the end of this attempt."""
        if attempt.stage not in (GenerationStage.WAITING, GenerationStage.RECEIVING):
            return
        request = attempt.request
        if isinstance(error, EngineError) and not error.spares_kv:
            self._suspect(attempt)  # prefill's engine may have met what it had loaded of the prompt
        self._judge(attempt, verdict_of(error), str(error))
        # The caller's deadline needs no look: when it passes the caller's call ends, and gives up whatever attempt is under way.
        may_retry = is_retried(error) and len(request.attempts) <= self._prefill_retries and self._queue_left_s(attempt) > 0
        peer = self._pick(request) if may_retry else None
        if peer is None and not (may_retry and self._join_timeout_s and self._may_come(request)):
            self._fail(request, error)
            return
        self._record_given_up(attempt, error)
        self._give_up(attempt, error)
        self._begin(request, peer, error)

    def _pick(self, request: GenerationRequest) -> PrefillPeer | None:
        """Where to try the request now; None where only those are joined that had it."""
        tried = frozenset(one.incarnation for one in request.attempts if one.peer is not None)
        return self._peers.pick(tried=tried, token_ids=request.token_ids, cache_salt=request.cache_salt)

    def _may_come(self, request: GenerationRequest) -> bool:
        """Whether another prefill node can be waited for. One that was lost with the request is not: it may be what kills it."""
        return self._peers.can_wait_for_node(tried=frozenset(one.peer for one in request.attempts if one.peer is not None))

    def _queue_left_s(self, attempt: Attempt) -> float:
        waits_s = time.monotonic() - attempt.begun_s if attempt.stage is GenerationStage.WAITING else 0.0
        return attempt.request.queue_left_s - waits_s

    def _give_up(self, attempt: Attempt, error: TransferError) -> None:
        """Stop the prefill node's call, and have the ranks give the attempt up where they know of it."""
        self._running.pop(attempt.transfer_id, None)
        self._tiers.give_up(attempt.transfer_id)
        if attempt.span is not None:
            attempt.span.end(str(error))
        if attempt.prefill is not None and attempt.prefill is not asyncio.current_task():
            attempt.prefill.cancel()
        if attempt.stage is GenerationStage.WAITING:
            self._stop_waiting(attempt)
            attempt.request.queue_left_s = self._queue_left_s(attempt)
            self._observer.on_queue_seconds(time.monotonic() - attempt.begun_s)
            self._observer.on_wait_over(attempt.transfer_id)
            attempt.stage = GenerationStage.GONE
            del self._attempts[attempt.transfer_id]
        else:
            attempt.stage = GenerationStage.LEAVING
            self._answer_reserve(attempt, str(error))
            self._broadcast(CancelIncoming(transfer_id=attempt.transfer_id, reason=clip_reason(str(error))))

    def _record_given_up(self, attempt: Attempt, error: TransferError) -> None:
        """What the request was at when it was given up has a span, too; of its transfer, that of the attempt tells."""
        request = attempt.request
        if request.span is None:
            return
        if attempt.stage is GenerationStage.WAITING:
            request.span.record("kvferry.queue", begun_s=attempt.begun_s, ended_s=time.monotonic(), error=str(error))
        elif attempt.stage is GenerationStage.RUNNING:
            begun_s = request.accepted_s + request.ttft_s
            request.span.record("kvferry.decode", begun_s=begun_s, ended_s=time.monotonic(), error=str(error))

    def _judge(self, attempt: Attempt, verdict: Verdict, reason: str = "") -> None:
        """Tell the peer's breaker, once, what came of the attempt."""
        permit, attempt.permit = attempt.permit, None
        if permit is not None and attempt.peer is not None:
            self._peers.end(attempt.peer, permit, verdict, reason)

    # Prefill's side

    async def _prefill(self, attempt: Attempt, peer: PrefillPeer, instance: Instance) -> None:
        """Follow the prefill node's call to its end."""
        request = attempt.request
        deadline = asyncio.get_running_loop().call_later(self._queue_left_s(attempt), self._expire, attempt)
        try:
            may_skip = peer.can_start_late
            # Each attempt looks up again, because KV from a node of another precision has other hashes.
            attempt.prompt = await self._tiers.look_up(request.token_ids, request.cache_salt, prefill=instance, may_skip=may_skip)
            call = peer.prefill(
                attempt.transfer_id,
                request.token_ids,
                decode_incarnation=self._own.incarnation,
                sampling=request.sampling,
                cache_salt=request.cache_salt,
                traceparent="" if attempt.span is None else attempt.span.traceparent,
            )
            async for event in call:
                match event.WhichOneof("event"):
                    case "first_token":
                        attempt.first_token = event.first_token.token_id
                    case "sent":
                        attempt.stats = event.sent.stats
                self._run_if_whole(attempt)
            if not attempt.is_sent or attempt.stage is GenerationStage.WAITING:
                self._fail_transfer(attempt, PeerUnreachable(f"{peer.address} ended the call early"))
        except TransferError as error:
            self._fail_transfer(attempt, error)
        finally:
            deadline.cancel()

    def _on_prefill_over(self, attempt: Attempt, peer: PrefillPeer, task: asyncio.Task[None]) -> None:
        """However it ended, also before its first step."""
        request = attempt.request
        peer.outstanding_tokens -= len(request.token_ids)
        if attempt.span is not None:
            attempt.span.end()  # unless it has failed before
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("prefill_call_broke", request_id=attempt.transfer_id, error=str(error), exc_info=error)
            if attempt.is_current:
                self._judge(attempt, Verdict.NOTHING)  # a bug of this node
                self._fail(request, EngineError(f"unexpected {type(error).__name__}; see the log of the node"))
        if request.finish_reason and attempt.is_current:
            self._say_done(request)

    def _expire(self, attempt: Attempt) -> None:
        if attempt.stage is GenerationStage.WAITING:
            self._fail(attempt.request, ResourceExhausted(f"no room within {self._queue_timeout_s:g} s (limits.queue_timeout_s)"))

    async def reserve(self, request_id: str, prefill_incarnation: int, decode_incarnation: int, plan: ChunkPlan) -> int | None:
        """A prefill leader is about to start an attempt: take room for all of its request, on every rank.

        Args:
            request_id: The attempt's.
            plan: How the request is cut.

        Returns:
            The first token whose KV has to be sent; None: "not yet".

        Raises:
            TransportClosed: The attempt does not wait here.
            PeerUnreachable: A rank cannot receive it.
            LayoutError: The plan cuts it into too many chunks, or into such that it can never have room here.
        """
        attempt = self._attempts.get(request_id)
        if (
            attempt is None
            or attempt.prompt is None
            or attempt.stage is not GenerationStage.WAITING
            or decode_incarnation != self._own.incarnation
        ):
            raise TransportClosed(f"request {request_id} does not wait here for room")
        peer = attempt.peer
        if peer is None or peer.instance is None or prefill_incarnation != attempt.incarnation:
            raise TransportClosed(f"request {request_id} was given to another life of the prefill node")
        request = attempt.request
        check_num_pieces(plan, self._own.layout, peer.instance.shard, self._own.shard, num_tokens=len(request.token_ids))
        place = self._tiers.place(
            request_id,
            attempt.prompt,
            max_new_tokens=request.max_new_tokens,
            chunk_tokens=plan.chunk_tokens,
            may_skip=peer.can_start_late,
            accepted_s=request.accepted_s,
        )
        if place is None:
            self._observer.on_no_room(request_id)
            return None
        self._observer.on_wait_over(request_id)
        attempt.start_token = place.start_token
        self._observer.on_queue_seconds(time.monotonic() - attempt.begun_s)
        if request.span is not None:
            request.span.record("kvferry.queue", begun_s=attempt.begun_s, ended_s=time.monotonic())
        request.queue_left_s = self._queue_left_s(attempt)
        attempt.stage = GenerationStage.RECEIVING
        attempt.holding = set(range(self._own.shard.num_ranks))
        attempt.answering = set(range(self._own.shard.num_ranks))
        attempt.receiving = set(range(self._own.shard.num_ranks))
        attempt.expected = asyncio.get_running_loop().create_future()
        self._broadcast(
            ExpectRequest(
                transfer_id=request_id,
                prefill_incarnation=prefill_incarnation,
                num_tokens=len(request.token_ids),
                start_token=place.start_token,
                pages=place.pages.by_group,
                host_pages=place.host_pages,
                plan=plan,
                sampling=request.sampling,
                traceparent="" if attempt.span is None else attempt.span.traceparent,
            )
        )
        self._tiers.begin_loading(request_id)
        reason = await asyncio.shield(attempt.expected)
        if reason:
            error = PeerUnreachable(reason)
            self._fail_transfer(attempt, error)
            raise error
        return place.start_token

    def _on_loaded(self, request_id: str) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            self._run_if_whole(attempt)

    # What the ranks say

    def on_expected(self, rank: int, message: TransferExpected) -> None:
        attempt = self._attempts.get(message.transfer_id)
        if attempt is None or attempt.expected is None:
            return
        attempt.answering.discard(rank)
        if not attempt.expected.done() and (message.reason or not attempt.answering):
            attempt.expected.set_result(f"decode rank {rank}: {message.reason}" if message.reason else "")

    def on_transfer_complete(self, rank: int, request_id: str) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            attempt.receiving.discard(rank)
            self._run_if_whole(attempt)

    def on_transfer_failed(self, rank: int, message: TransferBroken) -> None:
        attempt = self._attempts.get(message.transfer_id)
        if attempt is None or attempt.stage is not GenerationStage.RECEIVING:
            return
        if message.is_data_loss:
            self._fail(attempt.request, IntegrityError(f"decode rank {rank}: {message.reason}"))
            return
        # A rank only sees that its writer gave up or went away. Why, the prefill node's call is about to say.
        error = PeerUnreachable(f"decode rank {rank}: {message.reason}")
        asyncio.get_running_loop().call_later(REASON_GRACE_S, self._fail_transfer, attempt, error)

    def on_pages_released(self, rank: int, request_id: str) -> None:
        attempt = self._attempts[request_id]
        attempt.holding.discard(rank)
        if not attempt.holding:
            self._tiers.gone(request_id)
            self._forget_if_done(attempt)

    def on_step_done(self, message: DecodeStepDone) -> None:
        if self._step is None or message.step != self._step.step:
            raise LocalProtocolError(f"step {message.step} is done, but it is not the one under way")
        for part in self._step.parts:
            self._tiers.computed(part.request_id, part.token_id)
        self._step = None
        self._watch.step_over(num_left=0)
        for request_id, token in message.tokens.items():
            attempt = self._running.get(request_id)
            if attempt is not None:
                self._take_token(attempt, token)
        for request_id, reason in message.faults.items():
            attempt = self._running.get(request_id)
            if attempt is not None:
                self._suspect(attempt)
                self._fail(attempt.request, EngineError(reason))
        self._tiers.step_over()
        self._send_step()

    def on_step_failed(self, message: StepFailed) -> None:
        if self._step is not None and message.step == self._step.step:
            self._step = None
            self._watch.step_over(num_left=0)
        for request_id in message.request_ids:
            attempt = self._running.get(request_id)
            if attempt is not None:
                kind = OutOfMemory if message.is_out_of_memory else EngineError
                self._fail(attempt.request, kind(message.reason))
        self._send_step()

    # Generation

    def _run_if_whole(self, attempt: Attempt) -> None:
        """Start to generate once every rank has the whole KV and the first token is known; nothing less will do."""
        is_there = not attempt.receiving and not self._tiers.is_loading(attempt.transfer_id)
        whole = attempt.stage is GenerationStage.RECEIVING and is_there
        if whole and attempt.first_token is not None:
            request = attempt.request
            attempt.stage = GenerationStage.RUNNING
            self._tiers.begin(attempt.transfer_id)
            self._running[attempt.transfer_id] = attempt
            self._judge(attempt, Verdict.SUCCESS)
            request.ttft_s = time.monotonic() - request.accepted_s
            self._observer.on_first_token(request.ttft_s)
            request.last_token_s = time.monotonic()
            self._take_token(attempt, attempt.first_token)
            self._send_step()

    def _take_token(self, attempt: Attempt, token: int) -> None:
        request = attempt.request
        request.generated.append(token)
        if len(request.generated) > 1:
            now_s = time.monotonic()
            self._observer.on_token(now_s - request.last_token_s)
            request.last_token_s = now_s
        request.progress.put_nowait(Tokens(token_ids=(token,), text=request.text.add(token)))
        if token in request.end_ids:
            self._finish(attempt, "stop")
        elif len(request.generated) >= request.max_new_tokens:
            self._finish(attempt, "length")

    def _finish(self, attempt: Attempt, reason: str) -> None:
        del self._running[attempt.transfer_id]
        attempt.stage = GenerationStage.LEAVING
        self._observer.on_outcome("done")
        self._tiers.finish(attempt.transfer_id)
        self._broadcast(FinishRequest(request_id=attempt.transfer_id))
        request = attempt.request
        request.finish_reason = reason
        if request.span is not None:
            request.span.record("kvferry.decode", begun_s=request.accepted_s + request.ttft_s, ended_s=time.monotonic())
            request.span.set(finish_reason=reason, cached_tokens=attempt.start_token, retries=request.num_retries)
            request.span.set(generated_tokens=len(request.generated))
        # The tokens can be quicker than the last acks; the caller's statistics come with those.
        if attempt.prefill is None or attempt.prefill.done():
            self._say_done(attempt.request)

    def _say_done(self, request: GenerationRequest) -> None:
        if request.is_told:
            return
        request.is_told, request.told_s = True, time.monotonic()
        attempt = request.current
        request.progress.put_nowait(
            Done(
                finish_reason=request.finish_reason,
                stats=attempt.stats if attempt.stats is not None else pb.TransferStats(),
                ttft_s=request.ttft_s,
                prefill_node=attempt.peer.address if attempt.peer is not None else "",
                retries=request.num_retries,
                cached_tokens=attempt.start_token,
            )
        )
        self._forget_if_done(attempt)

    def _forget_if_done(self, attempt: Attempt) -> None:
        """Once no rank holds its pages; the current attempt stays until its caller has been told, too."""
        is_needed = bool(attempt.holding) or (attempt.is_current and not attempt.request.is_told)
        if not is_needed and self._attempts.get(attempt.transfer_id) is attempt:
            attempt.stage = GenerationStage.GONE
            del self._attempts[attempt.transfer_id]

    def _send_step(self) -> None:
        """One step at a time: the next one's input is this one's output."""
        if self._step is not None:
            return
        parts = tuple(
            DecodeStepPart(
                request_id=attempt.transfer_id, token_id=attempt.request.generated[-1], position=attempt.request.next_position
            )
            for attempt in self._running.values()
            if self._tiers.may_step(attempt.transfer_id, attempt.request.next_position)
        )
        if not parts:
            return
        self._num_steps += 1
        self._step = RunDecodeStep(step=self._num_steps, parts=parts)
        self._broadcast(self._step)
        self._watch.step_sent()

    # Failure

    def _suspect(self, attempt: Attempt) -> None:
        """Have nobody else meet the KV that may have been at fault."""
        if attempt.prompt is not None:
            self._tiers.damaged(attempt.prompt)

    def _fail(self, request: GenerationRequest, error: TransferError, *, outcome: str = "") -> None:
        """Tell the caller, and give up the attempt that is under way."""
        if request.is_over:
            return
        self._judge(request.current, verdict_of(error), str(error))
        self._end(request, error, outcome=outcome)
        self._give_up(request.current, error)

    def _answer_reserve(self, attempt: Attempt, reason: str) -> None:
        if attempt.expected is not None and not attempt.expected.done():
            attempt.expected.set_result(reason or "the request is over")

    def _end(self, request: GenerationRequest, error: TransferError, *, outcome: str = "") -> None:
        request.is_told, request.told_s = True, time.monotonic()
        request.progress.put_nowait(error)
        self._observer.on_outcome(outcome or outcome_of(error))
        self._observer.on_given_up(error)
        if request.span is not None:
            self._record_given_up(request.current, error)
            request.span.set(generated_tokens=len(request.generated), retries=request.num_retries)
            request.span.end(str(error))
        log.info("request_failed", request_id=request.current.transfer_id, reason=str(error))
