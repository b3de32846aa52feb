"""The attempts of a decode leader: one table for daemons and for engines that schedule by themselves.

**Prompt and attempt.** A prompt is sent to one prefill node at a time. Each attempt has its own id, which the node and the ranks
use (docs/adr/0012-a-transfer-id-for-each-try.md). So a late message finds its own attempt, or nothing. If an attempt fails,
another one can follow. It uses the node that the prompt names, or a node that the prompt was not sent to.

**Stages.** An attempt is WAITING for a prefill node to join, then for that node to ask for room, then for the scheduler's room.
With room it is RECEIVING: every rank expects the KV. It is WHOLE when all ranks have the complete KV and the first token or note
that the engine needs has come. Then the prompt is settled. It is LEAVING when it is over but a rank still holds its pages. Then
it is GONE.

**Room.** A prefill node asks for room in the stream of the prompt, or by `Reserve` if it is older, and the scheduler answers. It
is asked again for a waiting attempt when room has changed, and every `ASK_AGAIN_S`. If no attempt waits for room, and the prefill
node has little else to compute, room is taken before the call (docs/adr/0066-early-room.md).

**End.** `give_up` ends a prompt, `fail` ends an attempt. With `reuses_pages`, all attempts fill the same pages. Then the next
attempt and the end of the prompt wait until no rank writes for the failed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, Final, Generic

import structlog

from transfer.breaker import Verdict
from transfer.chunk import ChunkPlan, check_num_pieces
from transfer.connector.attempt import (
    Attempt,
    AttemptStage,
    IncomingObserver,
    IncomingScheduler,
    NotYet,
    PromptT,
    is_retried,
    verdict_of,
)
from transfer.connector.messages import (
    CancelIncoming,
    LinkProbed,
    PagesReleased,
    PrefillRankLost,
    TransferBroken,
    TransferExpected,
    TransferWhole,
)
from transfer.connector.named_node import named_node
from transfer.connector.prefill_nodes import REASON_GRACE_S, PrefillNodes
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.room_waits import RoomWaits
from transfer.connector.side_service import RequestView
from transfer.errors import (
    EngineError,
    IntegrityError,
    PeerUnreachable,
    Preempted,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportClosed,
    TransportError,
)
from transfer.instance import Instance
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.pb import kvferry_pb2 as pb
from transfer.transfer_ids import new_transfer_id

RETRY_PAUSE_S: Final = 0.05
"""Pause before a prompt is sent to the same prefill node again."""

PLACE_AFTER_S: Final = 0.1
"""Time from the first change of prefill nodes until waiting prompts are placed. Several nodes often come within milliseconds."""

PLACED_AT_ONCE: Final = 32
"""Waiting prompts that are placed at once, so that the first node that joins does not get all of them."""

PLACED_TOKENS_AT_ONCE: Final = 1 << 18
"""Tokens of prompts that are placed at once. Choosing a node for 131,072 tokens takes the loop some 5 ms."""

EARLY_ROOM_S: Final = 1.0
"""Time after which early room of a prompt that its prefill node has not begun is released, if others lack room. It is as long as
room is set aside for a waiting request (`decode_node.admission.WAITS_S`)."""

EARLY_ROOM_TOKENS: Final = 8192
"""No early room on a prefill node that has more tokens of other prompts to compute: a few steps, after which it would begin."""

MAX_NOTE_BYTES: Final = 1 << 20
"""Largest note of the other side's engine; an honest one sends no more."""

log = structlog.get_logger(__name__)


class IncomingTransfers(Generic[PromptT]):
    """See the module's docstring. Owned by the leader's loop.

    Args:
        scheduler: Decides when a prompt has room, and receives reports of its end.
        retries: Number of times that a prompt may be sent to a prefill node again.
        may_join: Whether a prompt may name a prefill node that is not known yet.
        name_attempt: Creates the id of an attempt from that of the prompt.
    """

    def __init__(
        self,
        *,
        scheduler: IncomingScheduler[PromptT],
        peers: PrefillNodes,
        own: Instance,
        retries: int,
        may_join: bool = False,
        broadcast: Callable[[object], None],
        observer: IncomingObserver,
        name_attempt: Callable[[str], str] = new_transfer_id,
    ) -> None:
        self._scheduler = scheduler
        self._peers = peers
        self._own = own
        self._retries = retries
        self._may_join = may_join
        self._broadcast = broadcast
        self._observer = observer
        self._name_attempt = name_attempt
        self._attempts: dict[str, Attempt[PromptT]] = {}  # current ones, and earlier ones that a rank still holds
        self.newest_partial: Attempt[PromptT] | None = None
        """Newest attempt that was seen to lack only its KV or only its first token. It can be over."""
        self.newest_partial_s = 0.0
        """Time of the last part of `newest_partial`, by the monotonic clock."""
        self._num_waiting = 0  # of them, those that wait for a prefill node or for room
        self._unsent: list[Attempt[PromptT]] = []  # attempts that wait for any prefill node to join, the oldest prompt's first
        self._placing: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # calls to prefill nodes, and waits for a node or for room
        self._no_room_s = -math.inf  # when the scheduler last had no room
        self._room_waits = RoomWaits[PromptT]()

    @property
    def _prompts(self) -> tuple[PromptT, ...]:
        return tuple(dict.fromkeys(attempt.prompt for attempt in self._attempts.values()))

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of all attempts of all prompts in flight."""
        return tuple(attempt.transfer_id for prompt in self._prompts for attempt in prompt.attempts)

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_queued(self) -> int:
        return self._num_waiting

    @property
    def num_running(self) -> int:
        return self.num_prompts - self.num_queued

    def views(self) -> list[RequestView]:
        """Return a view of each prompt in flight."""
        now_s = time.monotonic()
        return [prompt.view(now_s, num_ranks=self._own.shard.num_ranks) for prompt in self._prompts]

    def find(self, transfer_id: str) -> Attempt[PromptT] | None:
        """Return the attempt with that id, if it is in flight."""
        return self._attempts.get(transfer_id)

    async def close(self, error: TransferError) -> None:
        """End every prompt with `error`, without messages to the ranks, which have ended or are about to end."""
        attempts = list(self._attempts.values())
        for attempt in attempts:
            if attempt.stage is AttemptStage.WAITING:
                self._record_queue(attempt, str(error))
        for prompt in self._prompts:
            if not prompt.is_over:
                self._settle(prompt, error)
        for attempt in attempts:
            attempt.stage = AttemptStage.GONE
            self._stop_waiting(attempt)
            self._judge(attempt, Verdict.NOTHING, str(error))
            self._answer_reserve(attempt, str(error))
        if self._placing is not None:
            self._placing.cancel()
        self._room_waits.close()
        self._attempts.clear()
        self._num_waiting = 0
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Prompts

    def fetch(self, prompt: PromptT, *, may_wait: bool = True) -> None:
        """Begin the first attempt of a prompt.

        Args:
            may_wait: Whether a prompt that names no prefill node may wait for one to join if none is joined.

        Raises:
            PeerUnreachable: No prefill node is joined, and the prompt may not wait or no node can join.
        """
        if prompt.source:
            self._begin(prompt, None, None)
            return
        peer = self._pick(prompt)
        if peer is None and not (may_wait and prompt.join_timeout_s and self._peers.can_wait_for_node()):
            raise PeerUnreachable(self._peers.unavailable_reason())
        if may_wait and self._placing is not None and any(one.after is None for one in self._unsent):
            peer = None  # it comes after those that wait already
        self._begin(prompt, peer, None)

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give up the prompt of the attempt with that id. Return False if none of its attempts is in flight any more."""
        for prompt in self._prompts:
            if any(attempt.transfer_id == request_id for attempt in prompt.attempts) and not prompt.is_over:
                self.give_up(prompt, error)
                return True
        return False

    def give_up(self, prompt: PromptT, error: TransferError, *, outcome: str = "") -> None:
        """End a prompt at any stage. No-op once it is over.

        Args:
            outcome: Outcome for the metrics; empty means the outcome of errors of this kind.
        """
        if prompt.is_over:
            return
        prompt.failure, prompt.outcome, prompt.is_over = error, outcome, True
        attempt = prompt.current
        self._judge(attempt, verdict_of(error), str(error))
        self._stop(attempt, error)
        self._go_on(attempt)

    def finish(self, prompt: PromptT) -> None:
        """Record that the engine has used the KV of a prompt. It cannot fail any more, and the ranks release its pages."""
        prompt.is_over = True
        prompt.current.stage = AttemptStage.LEAVING

    def forget(self, prompt: PromptT) -> None:
        """Forget a prompt that its engine does not need any more, as soon as no rank holds its pages."""
        prompt.is_over = prompt.is_forgotten = True
        if prompt.attempts:
            self._forget_if_done(prompt.current)

    def _forget_if_done(self, attempt: Attempt[PromptT]) -> None:
        is_needed = bool(attempt.holding) or (attempt.is_current and not attempt.prompt.is_forgotten)
        if not is_needed and self._attempts.get(attempt.transfer_id) is attempt:
            attempt.stage = AttemptStage.GONE
            del self._attempts[attempt.transfer_id]

    def _settle(self, prompt: PromptT, failure: TransferError) -> None:
        prompt.failure, prompt.is_over = failure, True
        self._observer.on_outcome(prompt.outcome or outcome_of(failure))
        self._observer.on_given_up(failure)
        self._scheduler.settled(prompt, failure)
        self.forget(prompt)

    # Choice of a prefill node

    def peers_changed(self) -> None:
        """Record that prefill nodes joined or left. Place waiting prompts a moment later, so that nodes that join together share
        them."""
        if self._unsent and self._placing is None:
            self._placing = asyncio.get_running_loop().call_later(PLACE_AFTER_S, self.place_waiting)

    def place_waiting(self) -> None:
        """Send prompts that wait for any prefill node to the best node, the oldest prompt first.

        At most `PLACED_AT_ONCE` prompts, or `PLACED_TOKENS_AT_ONCE` tokens, are sent at once. The others follow a moment later.
        """
        if self._placing is not None:
            self._placing.cancel()
            self._placing = None
        num_placed, num_tokens = 0, 0
        for attempt in list(self._unsent):
            if num_placed == PLACED_AT_ONCE or num_tokens >= PLACED_TOKENS_AT_ONCE:
                self.peers_changed()
                return
            peer = self._pick(attempt.prompt)
            if peer is not None:
                num_placed += 1
                num_tokens += len(attempt.prompt.token_ids)
                self._send(attempt, peer)
            elif not self._may_come(attempt.prompt):
                self._refuse(attempt)

    def on_peer_lost(self, peer: PrefillPeer, reason: str) -> None:
        """Fail the attempts that still need KV from the peer.

        The prompts of `PLACED_TOKENS_AT_ONCE` tokens are retried at once, the others in the next turns of the loop.
        """
        lost = deque(attempt for attempt in self._attempts.values() if attempt.peer is peer)
        self._lose(lost, f"prefill node {peer.address} is lost: {reason}")

    def _lose(self, lost: deque[Attempt[PromptT]], reason: str) -> None:
        num_tokens = 0
        while lost:
            if num_tokens >= PLACED_TOKENS_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._lose, lost, reason)
                return
            attempt = lost.popleft()
            if self._attempts.get(attempt.transfer_id) is not attempt:
                continue  # it has ended meanwhile
            num_tokens += len(attempt.prompt.token_ids)
            if not attempt.is_sent:
                self.fail(attempt, PeerUnreachable(reason))
            if attempt.call is not None:
                attempt.call.cancel()  # a frozen node would leave the call open, and a finished prompt would not end

    def _pick(self, prompt: PromptT) -> PrefillPeer | None:
        """Return the node to send the prompt to. None means that only nodes are joined that already had it."""
        tried = frozenset(one.incarnation for one in prompt.attempts if one.peer is not None)
        return self._peers.pick(tried=tried, token_ids=prompt.token_ids, cache_salt=prompt.cache_salt)

    def _may_come(self, prompt: PromptT) -> bool:
        """Return whether another prefill node can join. Nodes that were lost with the prompt do not count: it may have caused
        their failure."""
        return self._peers.can_wait_for_node(tried=frozenset(one.peer for one in prompt.attempts if one.peer is not None))

    # Attempts

    def _begin(self, prompt: PromptT, peer: PrefillPeer | None, after: TransferError | None) -> None:
        """Start an attempt on `peer`, which is joined; if None, wait for a prefill node to join.

        Args:
            after: Error that ended the previous attempt.
        """
        if isinstance(after, Preempted):
            prompt.attempts.pop()  # does not count: the same prefill node may get the prompt again
        attempt = Attempt(
            transfer_id=self._name_attempt(prompt.request_id),
            prompt=prompt,
            begun_s=time.monotonic(),
            after=after,
        )
        prompt.attempts.append(attempt)
        self._attempts[attempt.transfer_id] = attempt
        self._num_waiting += 1
        if peer is not None:
            self._send(attempt, peer)
            return
        if prompt.source:
            attempt.unsent = self._run(attempt, self._send_when_joined(attempt))
            return
        insort(self._unsent, attempt, key=lambda one: one.prompt.accepted_s)
        wait_s = min(prompt.join_timeout_s, self._queue_left_s(attempt))
        attempt.unsent = asyncio.get_running_loop().call_later(wait_s, self._end_waiting, attempt)
        if isinstance(after, Preempted):
            self.peers_changed()  # the node that preempted the prompt is joined, and may get it again in a moment
        reason = self._peers.unavailable_reason() if self._placing is None else "one is joined, and others wait for their turn"
        log.info("request_waits_for_prefill_node", request_id=attempt.transfer_id, reason=reason)

    async def _send_when_joined(self, attempt: Attempt[PromptT]) -> None:
        if attempt.after is not None:
            await asyncio.sleep(RETRY_PAUSE_S)
        try:
            peer = await named_node(attempt.prompt, self._peers, may_join=self._may_join)
        except TransferError as error:
            attempt.unsent = None
            self.give_up(attempt.prompt, error)
        else:
            attempt.unsent = None
            self._send(attempt, peer)

    def _send(self, attempt: Attempt[PromptT], peer: PrefillPeer) -> None:
        """Send the prompt to a joined prefill node."""
        assert peer.instance is not None
        self._stop_waiting(attempt)
        prompt = attempt.prompt
        attempt.peer, attempt.prefill = peer, peer.instance
        attempt.permit = self._peers.begin(peer, prompt.token_ids, prompt.cache_salt)
        attempt.start_token, prompt.life = prompt.start_token, peer.instance.incarnation
        if prompt.span is not None:
            attempt.span = prompt.span.begin("kvferry.try", transfer_id=attempt.transfer_id, prefill_node=peer.address)
        peer.outstanding_tokens += len(prompt.token_ids)
        attempt.call = self._run(attempt, self._follow(attempt, peer))
        attempt.call.add_done_callback(lambda task: self._on_call_over(attempt, peer))
        if attempt.after is not None and not isinstance(attempt.after, Preempted):
            self._observer.on_retry()
            log.warning(
                "request_retried",
                request_id=attempt.transfer_id,
                given_up=prompt.attempts[-2].transfer_id,
                prefill_node=peer.address,
                reason=str(attempt.after),
            )

    def _end_waiting(self, attempt: Attempt[PromptT]) -> None:
        """Limit the wait for any prefill node. If a node has joined meanwhile, the attempt's turn comes soon."""
        peer = self._pick(attempt.prompt)
        if peer is None:
            self._refuse(attempt)
        elif self._queue_left_s(attempt) > 0:
            self._send(attempt, peer)
        else:
            self._expire(attempt)

    def _refuse(self, attempt: Attempt[PromptT]) -> None:
        """Give up a prompt because no prefill node joined in time, or none can join any more."""
        after = attempt.after
        if after is None:  # it never had a node, as a prompt that may not wait
            self.give_up(attempt.prompt, PeerUnreachable(self._peers.unavailable_reason()), outcome="refused")
        else:
            self.give_up(attempt.prompt, PeerUnreachable(str(after)) if isinstance(after, Preempted) else after)

    def _stop_waiting(self, attempt: Attempt[PromptT]) -> None:
        """Stop the wait for a prefill node. No-op if the attempt does not wait."""
        if attempt.unsent is not None:
            attempt.unsent.cancel()
            attempt.unsent = None
            if not attempt.prompt.source:
                self._unsent.remove(attempt)

    def fail(self, attempt: Attempt[PromptT], error: TransferError) -> None:
        """End an incomplete attempt, and retry the prompt if the retry rules allow it."""
        if attempt.stage not in (AttemptStage.WAITING, AttemptStage.RECEIVING):
            return
        prompt = attempt.prompt
        # The caller's deadline needs no check: when it passes, the caller's call ends and gives the prompt up.
        is_counted = not isinstance(error, Preempted)  # no peer is at fault; the engine computes it again
        may_retry = (is_retried(error) and len(prompt.attempts) <= self._retries) or not is_counted
        if not may_retry or self._queue_left_s(attempt) <= 0:
            self.give_up(prompt, error if is_counted else PeerUnreachable(str(error)))  # callers know no preemption
            return
        self._judge(attempt, verdict_of(error), str(error))
        self._stop(attempt, error)
        self._go_on(attempt)
        self._forget_if_done(attempt)  # if only the note was missing, no rank reports on it any more

    def _go_on(self, attempt: Attempt[PromptT]) -> None:
        """Begin the attempt after a failed one, or end the prompt, once the pages may be used again."""
        if attempt.holding and self._scheduler.reuses_pages:
            return  # `on_drained` continues
        prompt, error = attempt.prompt, attempt.failure
        assert error is not None, "it has failed"
        if prompt.failure is None:
            if prompt.source or isinstance(error, Preempted):
                self._begin(prompt, None, error)
                return
            peer = self._pick(prompt)
            if peer is not None or (prompt.join_timeout_s and self._may_come(prompt)):
                self._begin(prompt, peer, error)
                return
        self._settle(prompt, prompt.failure or error)

    def _stop(self, attempt: Attempt[PromptT], error: TransferError) -> None:
        """Stop the prefill node's call, and have the ranks cancel the attempt if they know it."""
        if attempt.stage in (AttemptStage.LEAVING, AttemptStage.GONE):
            return
        attempt.failure = error
        self._scheduler.stopped(attempt, error)
        if attempt.span is not None:
            attempt.span.end(str(error))
        if attempt.call is not None and attempt.call is not asyncio.current_task():
            attempt.call.cancel()
        if attempt.stage is AttemptStage.WAITING:
            self._stop_waiting(attempt)
            self._end_wait(attempt, str(error))
            attempt.stage = AttemptStage.GONE
            del self._attempts[attempt.transfer_id]
        else:
            if attempt.early_room_s is not None:
                self._end_early_room(attempt)
            attempt.stage = AttemptStage.LEAVING
            self._answer_reserve(attempt, str(error))
            if attempt.holding:
                self._broadcast(CancelIncoming(transfer_id=attempt.transfer_id, reason=clip_reason(str(error))))

    def _end_wait(self, attempt: Attempt[PromptT], error: str = "") -> None:
        """Record that a waiting attempt gets room, or why it gets none."""
        self._num_waiting -= 1
        attempt.prompt.queue_left_s = self._queue_left_s(attempt)
        self._observer.on_queue_seconds(time.monotonic() - attempt.begun_s)
        self._observer.on_wait_over(attempt.transfer_id)
        self._record_queue(attempt, error)

    def _record_queue(self, attempt: Attempt[PromptT], error: str = "") -> None:
        if attempt.prompt.span is not None:
            attempt.prompt.span.record("kvferry.queue", begun_s=attempt.begun_s, ended_s=time.monotonic(), error=error)

    def _queue_left_s(self, attempt: Attempt[PromptT]) -> float:
        since_s = attempt.begun_s if attempt.stage is AttemptStage.WAITING else attempt.early_room_s
        waits_s = 0.0 if since_s is None else time.monotonic() - since_s
        return attempt.prompt.queue_left_s - waits_s

    def _end_early_room(self, attempt: Attempt[PromptT]) -> None:
        """Charge the wait with early room to the prompt's queue time, because the attempt has begun or ended."""
        attempt.prompt.queue_left_s = self._queue_left_s(attempt)
        attempt.early_room_s = None

    def _expire(self, attempt: Attempt[PromptT]) -> None:
        is_waiting = attempt.stage is AttemptStage.WAITING
        if is_waiting or attempt.early_room_s is not None:
            what = "no room" if is_waiting else "its prefill node has not begun it"
            reason = f"{what} within {attempt.prompt.queue_timeout_s:g} s (limits.queue_timeout_s)"
            self.give_up(attempt.prompt, ResourceExhausted(reason))

    def _judge(self, attempt: Attempt[PromptT], verdict: Verdict, reason: str = "") -> None:
        """Report the outcome of the attempt once to the peer's breaker."""
        permit, attempt.permit = attempt.permit, None
        if permit is not None and attempt.peer is not None:
            self._peers.end(attempt.peer, permit, verdict, reason)

    # The call to the prefill node

    async def _follow(self, attempt: Attempt[PromptT], peer: PrefillPeer) -> None:
        """Follow the prefill node's call to its end."""
        prompt, is_room_wanted = attempt.prompt, False
        left_s = self._queue_left_s(attempt)
        deadline = None if left_s == math.inf else asyncio.get_running_loop().call_later(left_s, self._expire, attempt)
        try:
            await self._scheduler.prepare(attempt)
            attempt.is_asked = True
            room = asyncio.get_running_loop().create_future() if peer.takes_room else None
            start_token = attempt.start_token  # early room can move it; the plan follows from this one
            early_room_plan = await self._early_room(attempt, peer)
            if early_room_plan is not None and room is not None:
                self._run(attempt, self._send_early_room(attempt, room))
            call = peer.prefill(
                attempt.transfer_id,
                prompt.token_ids,
                decode_incarnation=self._own.incarnation,
                sampling=prompt.sampling,
                start_token=start_token,
                engine_request=prompt.engine_request,
                cache_salt=prompt.cache_salt,
                traceparent=attempt.traceparent,
                room=room,
                early_room_plan=early_room_plan,
            )
            async with contextlib.aclosing(call):
                async for event in call:
                    match event.WhichOneof("event"):
                        case "room_wanted" if room is not None and early_room_plan is None and not is_room_wanted:
                            is_room_wanted = True
                            self._run(attempt, self._give_room(attempt, event.room_wanted, room))
                        case "room_wanted":
                            raise TransportError(
                                f"{peer.address} wants room twice, or in a call that has another way to ask for it"
                            )
                        case "started":
                            if attempt.early_room_s is not None:
                                self._end_early_room(attempt)
                        case "first_token":
                            attempt.first_token = event.first_token.token_id
                        case "note":
                            prompt.note = _checked_note(event.note.payload, peer)
                        case "preempted":
                            raise Preempted(f"the engine of {peer.address} has preempted the prompt, and computes it again")
                        case "sent":
                            attempt.stats = event.sent.stats
                    self.run_if_whole(attempt)
            if attempt.stats is not None and attempt.lacks == "note":
                raise EngineError(f"{peer.address} has sent the KV without the note that goes with it", spares_kv=True)
            if not attempt.is_sent or attempt.stage is AttemptStage.WAITING:
                raise PeerUnreachable(f"{peer.address} ended the call early")
        except TransferError as error:
            self.fail(attempt, error)
        finally:
            if deadline is not None:
                deadline.cancel()

    def _on_call_over(self, attempt: Attempt[PromptT], peer: PrefillPeer) -> None:
        """Clean up after the call, even if it ended before its first step."""
        peer.outstanding_tokens -= len(attempt.prompt.token_ids)
        if attempt.span is not None:
            attempt.span.end()  # unless it has failed before
        self._scheduler.call_ended(attempt)

    def _run(self, attempt: Attempt[PromptT], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task of an attempt. An unexpected exception fails the prompt, and is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_over(attempt, task))
        return task

    def _on_task_over(self, attempt: Attempt[PromptT], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("prefill_call_crashed", request_id=attempt.transfer_id, error=str(error), exc_info=error)
            self._judge(attempt, Verdict.NOTHING)  # a bug of this node
            if attempt.is_current:
                reason = f"unexpected {type(error).__name__}; see the log of the node"
                self.give_up(attempt.prompt, EngineError(reason, spares_kv=True))

    # Room

    def room_changed(self) -> None:
        """Ask the scheduler again for attempts that wait for room, see `RoomWaits.room_changed`."""
        self._room_waits.room_changed()

    def ask_again(self, attempt: Attempt[PromptT]) -> None:
        """Ask the scheduler again for one attempt, if it waits for room."""
        self._room_waits.ask_again(attempt)

    async def _give_room(
        self, attempt: Attempt[PromptT], wanted: pb.PrefillRoomWanted, room: asyncio.Future[pb.PrefillRoom]
    ) -> None:
        """Answer a prefill node that asks for room in its call, as soon as there is room."""
        try:
            plan, own = self._peers.plan_of(wanted, attempt.incarnation), self._own.incarnation
            while (start_token := await self.reserve(attempt.transfer_id, attempt.incarnation, own, plan)) is None:
                await self._room_waits.until_changed(attempt)
        except TransferError as error:
            self.fail(attempt, error)
            return
        if not room.done():  # otherwise the call has ended
            room.set_result(pb.PrefillRoom(start_token=self._late_start(attempt, start_token)))

    def _late_start(self, attempt: Attempt[PromptT], start_token: int) -> int | None:
        """Return the start token if it differs from that of the request."""
        return start_token if start_token > attempt.prompt.start_token else None

    async def _early_room(self, attempt: Attempt[PromptT], peer: PrefillPeer) -> ChunkPlan | None:
        """Take room for an attempt before its prefill node has it. Return the plan of the prompt; None means no early room.

        Raises:
            TransferError: See `reserve`.
        """
        prompt, cut = attempt.prompt, peer.cut
        if cut is None or not (peer.takes_early_room and self._scheduler.gives_early_room(attempt)) or attempt.after is not None:
            return None
        other_tokens = peer.outstanding_tokens - len(prompt.token_ids) + (peer.others_tokens or 0)
        if other_tokens > EARLY_ROOM_TOKENS or self._lacks_room():
            return None
        plan = cut.plan_of(len(prompt.token_ids), attempt.start_token)
        if not await self._take_room(attempt, plan):
            return None
        attempt.early_room_s = time.monotonic()
        return plan

    async def _send_early_room(self, attempt: Attempt[PromptT], room: asyncio.Future[pb.PrefillRoom]) -> None:
        """Send an attempt's room to its prefill node, which has not asked for it, once every rank expects the KV."""
        if not self._scheduler.reuses_pages:  # otherwise the pages are an engine's, and nobody else gets them
            asyncio.get_running_loop().call_later(EARLY_ROOM_S, self._release_early_room, attempt)
        try:
            await self._until_expected(attempt)
        except TransferError as error:
            self.fail(attempt, error)
            return
        if not room.done():  # otherwise the call has ended
            room.set_result(pb.PrefillRoom(start_token=self._late_start(attempt, attempt.start_token)))

    def _release_early_room(self, attempt: Attempt[PromptT]) -> None:
        """Begin another attempt without early room, if the prefill node has not begun this one, and others lack room.

        A prompt that only a draining node has keeps its room, because no node would take it again.
        """
        if attempt.early_room_s is None or attempt.stage is not AttemptStage.RECEIVING:
            return
        if self._lacks_room() and self._peers.pick() is not None:
            log.info("early_room_released", request_id=attempt.transfer_id)
            self.fail(attempt, Preempted("its prefill node has not begun it, and others need its room here"))
        else:
            asyncio.get_running_loop().call_later(EARLY_ROOM_S, self._release_early_room, attempt)

    def _lacks_room(self) -> bool:
        """Return whether an attempt waits for room, or did so lately."""
        return bool(self._room_waits) or time.monotonic() - self._no_room_s < EARLY_ROOM_S

    async def reserve(self, request_id: str, prefill_incarnation: int, decode_incarnation: int, plan: ChunkPlan) -> int | None:
        """Take room for the attempt of that id, on every rank. The prefill leader is about to start it.

        Returns:
            The first token whose KV has to be sent; None means "not yet".

        Raises:
            TransportClosed: The attempt does not wait here.
            PeerUnreachable: A rank cannot receive it.
            LayoutError: The plan divides the prompt into too many chunks, or it can never have room here.
        """
        attempt = self._attempts.get(request_id)
        if (
            attempt is None
            or not attempt.is_asked
            or attempt.prefill is None
            or attempt.stage is not AttemptStage.WAITING
            or decode_incarnation != self._own.incarnation
        ):
            raise TransportClosed(f"request {request_id} does not wait here for room")
        if prefill_incarnation != attempt.incarnation:
            raise TransportClosed(f"request {request_id} was given to an earlier process of the prefill node")
        attempt.has_asked = True
        if not await self._take_room(attempt, plan):
            return None
        await self._until_expected(attempt)
        return attempt.start_token

    async def _take_room(self, attempt: Attempt[PromptT], plan: ChunkPlan) -> bool:
        """Take room for a waiting attempt, and have every rank expect its KV. Return False for "not yet"."""
        assert attempt.prefill is not None, "it was sent, or is about to be"
        own, num_tokens = self._own, len(attempt.prompt.token_ids)
        check_num_pieces(
            plan, own.layout, attempt.prefill.shard, own.shard, num_tokens=num_tokens, start_token=attempt.start_token
        )
        room = await self._scheduler.room(attempt, plan)
        if attempt.stage is not AttemptStage.WAITING:  # the answer took a while; then no room is taken
            raise TransportClosed(f"request {attempt.transfer_id} is over")
        if isinstance(room, NotYet):
            self._no_room_s = time.monotonic()
            self._observer.on_no_room(attempt.transfer_id)
            return False
        self._end_wait(attempt)
        attempt.start_token, attempt.stage = room.start_token, AttemptStage.RECEIVING
        ranks = range(own.shard.num_ranks)
        attempt.holding, attempt.answering, attempt.receiving = set(ranks), set(ranks), set(ranks)
        attempt.expected = asyncio.get_running_loop().create_future()
        self._broadcast(
            room.message(
                transfer_id=attempt.transfer_id,
                prefill_incarnation=attempt.incarnation,
                num_tokens=num_tokens,
                start_token=room.start_token,
                plan=plan,
                traceparent=attempt.traceparent,
            )
        )
        self._scheduler.announced(attempt)
        return True

    async def _until_expected(self, attempt: Attempt[PromptT]) -> None:
        """Wait until every rank expects the KV of an attempt that has room. Raise PeerUnreachable if a rank cannot."""
        assert attempt.expected is not None
        if reason := await asyncio.shield(attempt.expected):
            raise PeerUnreachable(reason)

    async def answer(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        """Serve `Reserve`; see `reserve`.

        Raises:
            TransferError: See `reserve`; or the plan cannot be used.
        """
        plan = self._peers.plan_of(request, request.prefill_incarnation)
        attempt = self._attempts.get(request.request_id)
        start_token = await self.reserve(request.request_id, request.prefill_incarnation, request.decode_incarnation, plan)
        if attempt is None or start_token is None:
            return pb.ReserveResponse(reserved=False)
        return pb.ReserveResponse(reserved=True, start_token=self._late_start(attempt, start_token))

    def _answer_reserve(self, attempt: Attempt[PromptT], reason: str) -> None:
        if attempt.expected is not None and not attempt.expected.done():
            attempt.expected.set_result(reason or "the request is over")

    # Messages from the ranks

    def on_message(self, rank: int, message: Any) -> bool:
        """Handle a message of a rank. Return False if the message is about something else."""
        match message:
            case TransferExpected():
                self.on_expected(rank, message)
            case TransferWhole():
                self.on_whole(rank, message.transfer_id)
            case TransferBroken():
                self.on_broken(rank, message)
            case PagesReleased():
                self.on_drained(rank, message.transfer_id)
            case PrefillRankLost():
                self._peers.break_join(
                    message.incarnation, prefill_rank=message.prefill_rank, decode_rank=rank, reason=message.reason
                )
            case LinkProbed():
                log.info("link_probed", **asdict(message.link))
            case _:
                return False
        return True

    def on_expected(self, rank: int, message: TransferExpected) -> None:
        attempt = self._attempts.get(message.transfer_id)
        if attempt is None or attempt.expected is None:
            return
        attempt.answering.discard(rank)
        if message.reason:
            self.fail(attempt, PeerUnreachable(f"decode rank {rank}: {message.reason}"))
        elif not attempt.answering and not attempt.expected.done():
            attempt.expected.set_result("")

    def on_whole(self, rank: int, transfer_id: str) -> None:
        attempt = self._attempts.get(transfer_id)
        if attempt is None:
            return
        attempt.receiving.discard(rank)
        if attempt.stage is AttemptStage.RECEIVING and not attempt.receiving and self._scheduler.reuses_pages:
            attempt.holding.clear()  # no rank writes for it any more
        self.run_if_whole(attempt)

    def run_if_whole(self, attempt: Attempt[PromptT]) -> None:
        """Settle the prompt only when every rank has the complete KV, and all data that belongs to it has arrived."""
        if attempt.stage is not AttemptStage.RECEIVING:
            return
        if attempt.prompt.needs_first_token and bool(attempt.receiving) != bool(attempt.lacks):
            self.newest_partial, self.newest_partial_s = attempt, time.monotonic()
        if not attempt.receiving and not attempt.lacks and not self._scheduler.is_loading(attempt):
            attempt.stage = AttemptStage.WHOLE
            self.newest_partial = None
            self._judge(attempt, Verdict.SUCCESS)
            self._scheduler.settled(attempt.prompt, None)

    def on_broken(self, rank: int, message: TransferBroken) -> None:
        attempt = self._attempts.get(message.transfer_id)
        if attempt is None or attempt.stage is not AttemptStage.RECEIVING:
            return
        if message.is_data_loss:
            self.fail(attempt, IntegrityError(f"decode rank {rank}: {message.reason}"))
            return
        # A rank only sees that its writer gave up or is gone. The prefill node's call is about to report the reason.
        assert attempt.peer is not None, "the attempt was sent"
        error = PeerUnreachable(f"decode rank {rank} gets no more KV from prefill node {attempt.peer.address}: {message.reason}")
        asyncio.get_running_loop().call_later(REASON_GRACE_S, self.fail, attempt, error)

    def on_drained(self, rank: int, transfer_id: str) -> None:
        """Record that the attempt does not use its pages on the rank any more."""
        attempt = self._attempts.get(transfer_id)
        if attempt is None or rank not in attempt.holding:
            return
        attempt.holding.discard(rank)
        if attempt.holding:
            return
        self._scheduler.drained(attempt)
        if self._scheduler.reuses_pages and attempt.failure is not None:
            self._go_on(attempt)
        self._forget_if_done(attempt)


def _checked_note(payload: bytes, peer: PrefillPeer) -> bytes:
    """Return the note. Raise TransferAborted if it is too long."""
    if len(payload) > MAX_NOTE_BYTES:
        raise TransferAborted(f"the note of {peer.address} has {len(payload)} bytes; it can have {MAX_NOTE_BYTES}")
    return payload
