"""Track the transfers of a prefill leader, for daemons and engines alike.

A *transfer* is one attempt to send the KV of a prompt to a decode instance. `OutgoingTransfers` asks the decode leader for room,
starts the ranks, joins their parts, and reports to the caller. A subclass decides the order of events:
`prefill_node.requests.PrefillRequests` schedules steps and pages itself, and `transfer.connector.offered_prompts.OfferedPrompts`
follows an engine that schedules by itself.

A transfer is *queued* until the decode side has room, then *started* on all ranks. It is *computed* when the whole prompt is, and
*sent* when every rank has sent its part, in either order. It is *over* when both hold or it has failed. Its id is free when, in
addition, no rank knows it any more.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transfer.chunk import ChunkPlan
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import CancelOutgoing, StartTransfer, TransferNotSent, TransferSent
from transfer.connector.side_service import RequestView
from transfer.engine_types import GREEDY, SamplingParams
from transfer.errors import PeerUnreachable, Preempted, RemoteProtocolError, TransferAborted, TransferError
from transfer.messages import clip_reason
from transfer.metrics import outcome_of
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto
from transfer.send.events import SentStats
from transfer.tracing import Span
from transfer.transfer_ids import client_id_of

RETRY_RESERVE_S: Final = 0.05
"""Shortest pause after "not yet", before the next question about the same transfer."""

PAUSES_END_EVERY_S: Final = 0.01
"""Pauses end together, on multiples of this time. After each pause, a daemon checks all waiting requests, often thousands."""


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """An attempt to send a prompt.

    Args:
        plan: How the prompt is divided.
        start_token: First token whose KV is sent; the decode side may choose a later one when it has room.
        sampling: How the first token is chosen, if the prompt is computed for this transfer.
        cache_salt: Stored KV is shared only with prompts of the same salt.
        engine_request: Name of the prompt in the engine that has it; empty if it is computed for this transfer.
        span: Span of the call, which its caller ends; None if it is not traced.
        room: Room on the decode side, which the caller sets. None means that the decode leader is asked with `Reserve`.
        has_early_room: The caller sets `room`, if it is not None, without being asked.
        queued_s: Time of acceptance, by the monotonic clock.
        progress: Events for the caller, in order. The last one is `sent` or an error.
    """

    transfer_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    join: Join
    plan: ChunkPlan
    start_token: int = 0
    sampling: SamplingParams = GREEDY
    cache_salt: str = field(default="", repr=False)
    engine_request: str = ""
    span: Span | None = None
    room: asyncio.Future[Reservation] | None = None
    has_early_room: bool = False
    queued_s: float = field(default_factory=lambda: time.monotonic())
    started_s: float | None = None
    progress: asyncio.Queue[pb.PrefillEvent | TransferError] = field(default_factory=asyncio.Queue)
    is_only_attempt: bool = True  # the prompt is computed for this transfer, and ends with it
    is_room_wanted: bool = False  # `room_wanted` was reported
    is_computed: bool = False
    is_over: bool = False  # its caller has the last event; ranks may still be busy with it
    unsent: set[int] = field(default_factory=set)  # ranks that have not sent their part
    holding: set[int] = field(default_factory=set)  # ranks that hold pages for this transfer alone
    stats: list[SentStats] = field(default_factory=list)

    @property
    def is_started(self) -> bool:
        """Whether the decode side has reserved room and the transfer was sent to the ranks."""
        return self.started_s is not None

    @property
    def is_sent(self) -> bool:
        """Whether every rank has sent its part."""
        return self.is_started and not self.unsent


class OutgoingTransfers(ABC):
    """See the module's docstring. Owned by the leader's loop.

    Args:
        reserve: Asks the decode leader for room.
        on_outcome: Called with "sent", "failed", "aborted" or "refused" for each accepted transfer that ends.
        on_given_up: Called with the error of each that was not "sent".
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        broadcast: Callable[[object], None],
        reserve: Callable[[Join, str, ChunkPlan], Awaitable[Reservation]],
        on_outcome: Callable[[str], None],
        on_given_up: Callable[[TransferError], None] = lambda error: None,
    ) -> None:
        self._num_ranks = num_ranks
        self._broadcast = broadcast
        self._reserve = reserve
        self._on_outcome = on_outcome
        self._on_given_up = on_given_up
        self._transfers: dict[str, Transfer] = {}  # by id, until no rank knows it
        # Each heartbeat of a join contains the tokens of the other joins, and each event reads the length of the queue. So both
        # are counted.
        self._unstarted: OrderedDict[str, Transfer] = OrderedDict()  # in the order of acceptance
        self._of: dict[Join, dict[str, Transfer]] = {}  # no join has none
        self._num_tokens = 0  # of transfers that are not over
        self._tokens_of: Counter[int] = Counter()  # the same by decode incarnation; none has 0

    @abstractmethod
    def _accept(self, transfer: Transfer) -> None:
        """Check a new transfer and begin with it. Raise TransferError if it cannot be accepted."""

    @abstractmethod
    def _num_computed(self, transfer: Transfer) -> int:
        """Return how many tokens of a prompt that is not `is_computed` are computed, as far as the leader knows."""

    @abstractmethod
    def _on_end(self, transfer: Transfer, error: TransferError | None) -> None:
        """Handle the end of a transfer. None means that all of its KV arrived; otherwise the ranks were asked to cancel it."""

    # Reports

    @property
    def num_transfers(self) -> int:
        """Number of transfers that are not finished, including those whose last bytes are still in flight."""
        return len(self._transfers)

    @property
    def num_queued(self) -> int:
        """Number of transfers that wait for the engine, or for room on the decode side."""
        return len(self._unstarted)

    @property
    def num_running(self) -> int:
        """Number of transfers that the ranks were asked to send. Pages can be released while bytes are still in flight."""
        return len(self._transfers) - len(self._unstarted)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._transfers)

    def is_idle(self, join: Join) -> bool:
        """Return whether nothing of that decode instance is in flight."""
        return join not in self._of

    def others_tokens(self, join: Join) -> int:
        """Return the prompt tokens of transfers to other decode instances, of which not all is sent."""
        return self._num_tokens - self._tokens_of[join.incarnation]

    def views(self) -> list[RequestView]:
        """Return a view of each transfer that is not finished."""
        now_s = time.monotonic()
        return [self._view(transfer, now_s) for transfer in self._transfers.values()]

    def _view(self, transfer: Transfer, now_s: float) -> RequestView:
        if transfer.is_over:
            stage = "ending"
        elif not transfer.is_started:
            stage = "queued"
        else:
            stage = "sending" if transfer.is_computed else "computing"
        return RequestView(
            request_id=client_id_of(transfer.transfer_id),
            transfer_id=transfer.transfer_id,
            stage=stage,
            age_s=now_s - transfer.queued_s,
            prompt_tokens=len(transfer.token_ids),
            ready_tokens=len(transfer.token_ids) if transfer.is_computed else self._num_computed(transfer),
            peer=transfer.join.address,
            ranks_done=self._num_ranks - len(transfer.unsent) if transfer.is_started else 0,
        )

    # Calls from decode sides

    def submit(self, transfer: Transfer) -> None:
        """Accept a transfer. `Transfer.progress` reports its events.

        Raises:
            TransferAborted: A transfer with that id is in flight.
            ResourceExhausted: There are too many, or the prompt is too large for this instance.
            ConfigError: The engine cannot have the prompt.
        """
        if transfer.transfer_id in self._transfers:
            raise TransferAborted(f"request_id {transfer.transfer_id} is in flight already; ids must be unique")
        self._accept(transfer)
        self._transfers[transfer.transfer_id] = self._unstarted[transfer.transfer_id] = transfer
        self._of.setdefault(transfer.join, {})[transfer.transfer_id] = transfer
        self._count_tokens(transfer, len(transfer.token_ids))
        if transfer.span is not None:
            transfer.span.set(prompt_tokens=len(transfer.token_ids))

    def abort(self, request_id: str, error: TransferError) -> bool:
        """Give a transfer up by its id. Return False if it is not in flight for its caller any more."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.is_over:
            return False
        self.fail(transfer, error)
        return True

    def abort_join(self, join: Join, error: TransferError) -> None:
        """Give up every transfer to a decode instance that is lost."""
        for transfer in list(self._of.get(join, {}).values()):
            self.fail(transfer, error)

    # Reports of the ranks

    def on_sent(self, rank: int, message: TransferSent) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is not None:
            transfer.unsent.discard(rank)
            transfer.stats.append(message.stats)
            self._end_if_sent(transfer)

    def on_not_sent(self, rank: int, message: TransferNotSent) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            return
        transfer.unsent.discard(rank)
        reason = f"prefill rank {rank}: {message.reason}"
        if message.is_preempted:
            self._preempt(transfer, reason)
        else:
            self.fail(transfer, PeerUnreachable(reason) if message.is_passing else TransferAborted(reason))
        self._forget_if_done(transfer)

    # Stages of a transfer

    async def _reserve_room(self, transfer: Transfer) -> bool:
        """Get room from the decode leader. False means "not yet", and comes after a pause.

        If the caller gives room itself, this waits without a limit and returns True.

        Raises:
            TransferError: It cannot be asked, or its answer fails the transfer.
        """
        if transfer.room is None:
            answer = await self._reserve(transfer.join, transfer.transfer_id, transfer.plan)
        else:
            if not transfer.has_early_room:
                transfer.is_room_wanted = True
                wanted = pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(transfer.plan))
                transfer.progress.put_nowait(pb.PrefillEvent(room_wanted=wanted))
            answer = await transfer.room
        if not answer.is_reserved:
            await asyncio.sleep(_pause_s())
        elif answer.start_token is not None:
            transfer.start_token = _checked_start_token(transfer, answer.start_token)
        return answer.is_reserved

    def _start(self, transfer: Transfer, kind: type[StartTransfer], **fields: Any) -> None:
        """Have the ranks send a transfer for which the decode side has room.

        Args:
            kind: Message to the ranks.
            fields: Fields of the message that `StartTransfer` does not have.
        """
        transfer.started_s = time.monotonic()
        del self._unstarted[transfer.transfer_id]
        transfer.unsent = set(range(self._num_ranks))
        self._broadcast(
            kind(
                transfer_id=transfer.transfer_id,
                decode_incarnation=transfer.join.incarnation,
                num_tokens=len(transfer.token_ids),
                start_token=transfer.start_token,
                plan=transfer.plan,
                traceparent="" if transfer.span is None else transfer.span.traceparent,
                **fields,
            )
        )
        if transfer.span is not None:
            transfer.span.record("kvferry.queue", begun_s=transfer.queued_s, ended_s=transfer.started_s)
        started = pb.PrefillStarted(queue_s=transfer.started_s - transfer.queued_s)
        transfer.progress.put_nowait(pb.PrefillEvent(started=started))

    def _on_computed(
        self, transfer: Transfer, *, begun_s: float, ended_s: float, token_id: int | None, note: bytes | None = None
    ) -> None:
        """Record that the prompt of a started transfer is computed. Report the first token, if known, and the engine's note."""
        if token_id is not None:
            first_token = pb.FirstToken(token_id=token_id, compute_s=ended_s - begun_s)
            transfer.progress.put_nowait(pb.PrefillEvent(first_token=first_token))
        if note is not None:
            transfer.progress.put_nowait(pb.PrefillEvent(note=pb.EngineNote(payload=note)))
        transfer.is_computed = True
        if transfer.span is not None:
            transfer.span.record("kvferry.compute", begun_s=begun_s, ended_s=ended_s)
        self._end_if_sent(transfer)

    def _end_if_sent(self, transfer: Transfer) -> None:
        """End the transfer once every rank has sent its part and the prompt is computed, in either order."""
        if transfer.is_sent and transfer.is_computed and not transfer.is_over:
            self._mark_over(transfer)
            transfer.progress.put_nowait(pb.PrefillEvent(sent=pb.PrefillSent(stats=_sum_of(transfer.stats))))
            self._on_outcome("sent")
            self._on_end(transfer, None)
        self._forget_if_done(transfer)

    def _preempt(self, transfer: Transfer, reason: str) -> None:
        """End a transfer whose pages the engine has taken back.

        A prompt that is computed for one transfer ends with it: its caller asks again, perhaps another node. Any other prompt
        waits until it is computed again.
        """
        self.fail(transfer, Preempted(reason))

    def fail(self, transfer: Transfer, error: TransferError) -> None:
        """Report the error to the caller, and have the ranks cancel the transfer. No-op once it is over."""
        if transfer.is_over:
            return
        self._end(transfer, error)
        if transfer.is_started:
            self._broadcast(CancelOutgoing(transfer_id=transfer.transfer_id, reason=clip_reason(str(error))))
        self._on_end(transfer, error)
        self._forget_if_done(transfer)  # its pages may be released already; then no rank reports it again

    def _end(self, transfer: Transfer, error: TransferError) -> None:
        self._mark_over(transfer)
        if transfer.room is not None:
            transfer.room.cancel()  # this also ends the task that waits for it
        transfer.progress.put_nowait(error)
        self._on_outcome(outcome_of(error))
        self._on_given_up(error)
        if transfer.span is not None:
            if not transfer.is_computed:  # record the stage that failed
                stage, begun_s = "kvferry.compute", transfer.started_s
                if begun_s is None:
                    stage, begun_s = "kvferry.queue", transfer.queued_s
                transfer.span.record(stage, begun_s=begun_s, ended_s=time.monotonic(), error=str(error))
            transfer.span.end(str(error))

    def _forget_if_done(self, transfer: Transfer) -> None:
        """Free the id once no rank knows it: each has sent or failed its part, and released its pages.

        The decode side chooses the ids, and the sender of a rank treats a known id as a bug of its own process.
        """
        is_done = transfer.is_over and not transfer.holding and not transfer.unsent
        if is_done and self._transfers.pop(transfer.transfer_id, None) is not None:
            self._unstarted.pop(transfer.transfer_id, None)
            del self._of[transfer.join][transfer.transfer_id]
            if not self._of[transfer.join]:
                del self._of[transfer.join]

    def _mark_over(self, transfer: Transfer) -> None:
        transfer.is_over = True
        self._count_tokens(transfer, -len(transfer.token_ids))

    def _count_tokens(self, transfer: Transfer, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._tokens_of[transfer.join.incarnation] += num_tokens
        if not self._tokens_of[transfer.join.incarnation]:
            del self._tokens_of[transfer.join.incarnation]

    def _end_all(self, error: TransferError) -> None:
        """End every transfer with `error`, without messages to the ranks, which have ended or are about to end."""
        for transfer in self._transfers.values():
            if not transfer.is_over:
                self._end(transfer, error)
        self._transfers.clear()
        self._unstarted.clear()
        self._of.clear()


def _pause_s() -> float:
    """Return the seconds until the next multiple of `PAUSES_END_EVERY_S` that is at least `RETRY_RESERVE_S` away."""
    earliest_s = time.monotonic() + RETRY_RESERVE_S
    return RETRY_RESERVE_S + -earliest_s % PAUSES_END_EVERY_S


def _checked_start_token(transfer: Transfer, start_token: int) -> int:
    """Return the start token that a decode side gave. Raise RemoteProtocolError if it breaks the protocol."""
    if not transfer.start_token <= start_token < len(transfer.token_ids):
        raise RemoteProtocolError(
            f"{transfer.join.address} gave room with start_token {start_token}; it must be at least the request's "
            f"{transfer.start_token} and below the prompt's {len(transfer.token_ids)} tokens"
        )
    return start_token


def _sum_of(parts: Sequence[SentStats]) -> pb.TransferStats:
    """Return the statistics of all ranks: bytes and writes add up, times are those of the slowest."""
    return pb.TransferStats(
        bytes=sum(part.num_bytes for part in parts),
        writes=sum(part.writes for part in parts),
        writes_without_staging=sum(part.writes_without_staging for part in parts),
        transfer_s=max((part.transfer_s for part in parts), default=0.0),
        exposed_s=max((part.exposed_s for part in parts), default=0.0),
        resends=sum(part.resends for part in parts),
    )
