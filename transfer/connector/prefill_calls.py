"""Serve the calls of decode instances in the leader of a prefill side, for daemons and engines alike."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import structlog

from transfer.chunk import check_num_pieces
from transfer.config import ConnectorConfig, PrefillNodeConfig
from transfer.connector.decode_instances import DecodeInstances, Join, Reservation
from transfer.connector.join_service import JoinService
from transfer.connector.messages import DecodeAttached, DecodeLost, TransferNotSent, TransferSent
from transfer.connector.outgoing import (
    EngineNote,
    OutgoingTransfers,
    PromptFirstToken,
    PromptSent,
    PromptStarted,
    RoomWanted,
    Transfer,
)
from transfer.connector.prompt import check_cache_salt, checked_prompt
from transfer.connector.rank_report import RankReady
from transfer.connector.reserve_client import ReserveClient
from transfer.connector.side_service import Draining
from transfer.errors import ConfigError, NodeDraining, PeerUnreachable, Preempted, TransferAborted, TransferError
from transfer.instance import Instance
from transfer.log_rate_limiter import LogRateLimiter
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.refusals import say_request_refused, without_request
from transfer.registry.convert import chunk_plan_to_proto, sampling_from_proto
from transfer.registry.status import end_with
from transfer.send.events import SentStats
from transfer.sizes import Cut, choose_cut
from transfer.tracing import Tracer, traceparent_in

MAX_ID_CHARS = 128
FIRST_MESSAGE_S: Final = 10.0
"""Limit for the first message of `PrefillIntoRoom`. An honest caller sends it with the call."""

GIVEN_UP: Final = "the decode side gave the request up"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChecks:
    """Check the prompt of a `Prefill` call.

    Args:
        own: This instance.
        max_context_tokens: Longest prompt.
        vocab_size: Token ids are below it.
    """

    own: Instance
    max_context_tokens: int
    vocab_size: int

    def check(self, request: pb.PrefillRequest, joins: DecodeInstances) -> Transfer:
        """Return the transfer that the call asks for.

        Raises:
            ConfigError: A field is missing, too long or out of range.
            PeerUnreachable: The decode instance is not joined, or its join was just lost. A lost instance joins again by itself.
            LayoutError: The request would be divided into too many pieces.
        """
        if not 1 <= len(request.request_id) <= MAX_ID_CHARS:
            raise ConfigError(f"request_id has {len(request.request_id)} characters; it must have 1 to {MAX_ID_CHARS}")
        if len(request.engine_request) > MAX_ID_CHARS:
            raise ConfigError(f"engine_request has {len(request.engine_request)} characters; it can have {MAX_ID_CHARS}")
        check_cache_salt(request.cache_salt)
        token_ids = checked_prompt(request.token_ids, max_context_tokens=self.max_context_tokens, vocab_size=self.vocab_size)
        if request.start_token >= len(token_ids):
            raise ConfigError(f"start_token is {request.start_token}; it must be below the prompt's {len(token_ids)} tokens")
        join = joins.find(request.decode_incarnation)
        if join is None:
            raise PeerUnreachable(f"decode instance {request.decode_incarnation:#018x} has not joined this prefill instance")
        own, decode = self.own, join.instance
        check_num_pieces(
            join.plan, own.layout, own.shard, decode.shard, num_tokens=len(token_ids), start_token=request.start_token
        )
        return Transfer(
            transfer_id=request.request_id,
            token_ids=token_ids,
            join=join,
            start_token=request.start_token,
            sampling=sampling_from_proto(request.sampling),
            cache_salt=request.cache_salt,
            engine_request=request.engine_request,
        )


class PrefillCalls:
    """Serve the calls and the joins of decode instances in one life of a prefill instance's ranks.

    Args:
        hello: Self-description of rank 0.
        num_ranks: Ranks of this instance.
        config: Settings that divide prompts into chunks.
        broadcast: Sends a message to every rank.
        requests: Accepts the transfers.
        reserve_client: Keeps a channel to the leader of each joined instance.
        metrics: Count the calls.
        tracer: Records the spans of calls whose caller traces them. None disables tracing.
        draining: While it is on, prompts that would be computed only for the call are rejected. None means that none is rejected
            here.
    """

    def __init__(
        self,
        *,
        hello: RankReady,
        num_ranks: int,
        config: PrefillNodeConfig | ConnectorConfig,
        broadcast: Callable[[object], None],
        requests: OutgoingTransfers,
        reserve_client: ReserveClient,
        metrics: NodeMetrics,
        tracer: Tracer | None = None,
        draining: Draining | None = None,
    ) -> None:
        self._own = hello.instance
        self._checks = PromptChecks(own=hello.instance, max_context_tokens=hello.max_context_tokens, vocab_size=hello.vocab_size)
        self._config = config
        self._requests = requests
        self._reserve_client = reserve_client
        self._metrics = metrics
        self._tracer = tracer
        self._draining = draining
        self._refused = LogRateLimiter()
        self.joins = DecodeInstances(num_ranks, broadcast, self._on_join_lost, self._cut_of)
        """The decode instances that may call."""

    def _cut_of(self, join: Join) -> Cut:
        config = self._config
        return choose_cut(config.chunk, self._own, join.instance, join.links, join.ring_bytes, device=config.device)

    def _on_join_lost(self, join: Join, error: TransferError) -> None:
        log.warning("decode_instance_lost", address=join.address, reason=str(error))
        self._requests.abort_join(join, error)
        if all(other.address != join.address for other in self.joins):
            self._reserve_client.forget_address(join.address)

    def on_rank_message(self, rank: int, message: Any) -> bool:
        """Handle a message that ranks of daemons and connectors send. Return False if it is another one."""
        match message:
            case TransferSent():
                self._requests.on_sent(rank, message)
            case TransferNotSent():
                self._requests.on_not_sent(rank, message)
            case DecodeAttached():
                self.joins.on_attached(rank, message)
            case DecodeLost():
                self.joins.on_rank_lost(rank, message)
            case _:
                return False
        return True

    def join(
        self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any], service: JoinService
    ) -> AsyncGenerator[pb.JoinEvent, None]:
        """Return the events of a `PrefillControl.Join` call. The caller must close the iterator (`contextlib.aclosing`)."""
        return service.events(
            request,
            context,
            own=self._own,
            joins=self.joins,
            is_idle=self._requests.is_idle,
            others_tokens=self._requests.others_tokens,
        )

    async def prefill_into_room(
        self, messages: AsyncIterator[pb.PrefillMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Yield the events of a `PrefillControl.PrefillIntoRoom` call; as `prefill`, but the caller gives room in `messages`."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first = await anext(messages, None)
        except TimeoutError:
            await self.refuse(ConfigError(f"PrefillIntoRoom must send request within {FIRST_MESSAGE_S:g} s"), context)
        if first is None or not first.HasField("request"):
            await self.refuse(ConfigError("the first message of PrefillIntoRoom must have request"), context)
        async with contextlib.aclosing(self.prefill(first.request, context, messages)) as events:
            async for event in events:
                yield event

    async def prefill(
        self,
        request: pb.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        messages: AsyncIterator[pb.PrefillMessage] | None = None,
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Yield the events of a `PrefillControl.Prefill` call, or end it if the prompt is refused; close it as `join`.

        Args:
            messages: Further messages of the caller. None means that it is asked for room with `Reserve`.
        """
        span = None
        if self._tracer is not None and (told := traceparent_in(context.invocation_metadata())):
            # Only what a decode node traces; a trace of its own would tell half of a request.
            span = self._tracer.begin("kvferry.prefill", parent=told, attributes={"transfer_id": request.request_id})
        try:
            if self._draining is not None and self._draining.is_on and not request.engine_request:
                raise NodeDraining("the prefill side is draining")
            transfer = self._checks.check(request, self.joins)
            transfer.span = span
            if messages is not None:
                transfer.room = asyncio.get_running_loop().create_future()
            self._requests.submit(transfer)
        except TransferError as error:
            if span is not None:
                span.end(without_request(error))
            await self.refuse(error, context)
        self._metrics.counter("prompt_tokens").inc(len(transfer.token_ids))
        give_up = partial(self._requests.fail, transfer)
        reading = None if messages is None else asyncio.ensure_future(self._read_room(transfer, messages))
        try:
            async with contextlib.aclosing(prefill_events(transfer, context, give_up=give_up, metrics=self._metrics)) as events:
                async for event in events:
                    yield event
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(
                    reading, return_exceptions=True
                )  # it must have finished reading the messages before they are closed
            if span is not None:
                span.end()  # unless what failed it has ended it

    async def _read_room(self, transfer: Transfer, messages: AsyncIterator[pb.PrefillMessage]) -> None:
        """Take the room that the caller gives. A message that is out of order fails the transfer."""
        assert transfer.room is not None
        try:
            async for message in messages:
                if not (message.HasField("room") and transfer.is_room_wanted) or transfer.room.done():
                    raise ConfigError("PrefillIntoRoom takes one message after the first: room, once room_wanted was sent")
                start_token = message.room.start_token if message.room.HasField("start_token") else None
                transfer.room.set_result(Reservation(is_reserved=True, start_token=start_token))
            if not transfer.room.done():
                raise TransferAborted(GIVEN_UP)  # a cancelled call also looks like this for a moment
        except TransferError as error:
            self._requests.fail(transfer, error)

    async def refuse(self, error: TransferError, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call of a prompt that is not accepted, and count it."""
        self._metrics.request_ended("refused")
        say_request_refused(error, self._refused)
        await end_with(context, error)


async def prefill_events(
    prompt: Transfer,
    context: grpc.aio.ServicerContext[Any, Any],
    *,
    give_up: Callable[[TransferError], None],
    metrics: NodeMetrics,
) -> AsyncGenerator[pb.PrefillEvent, None]:
    """Yield the events of an accepted prompt until it ends. The caller must close the iterator (`contextlib.aclosing`).

    Args:
        give_up: Called at the end; no-op if the prompt is over.
    """
    try:
        while True:
            match await prompt.progress.get():
                case RoomWanted(plan=plan):
                    wanted = pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(plan))
                    yield pb.PrefillEvent(room_wanted=wanted)
                case PromptStarted(queue_s=queue_s):
                    metrics.histogram("queue_seconds").observe(queue_s)
                    yield pb.PrefillEvent(started=pb.PrefillStarted(queue_s=queue_s))
                case PromptFirstToken(token_id=token_id, compute_s=compute_s):
                    yield pb.PrefillEvent(first_token=pb.FirstToken(token_id=token_id, compute_s=compute_s))
                case EngineNote(payload=payload):
                    yield pb.PrefillEvent(note=pb.EngineNote(payload=payload))
                case PromptSent(stats=stats):
                    yield pb.PrefillEvent(sent=pb.PrefillSent(stats=_stats_to_proto(stats)))
                    return
                case Preempted():
                    yield pb.PrefillEvent(preempted=pb.PrefillPreempted())
                    return
                case TransferError() as failure:
                    await end_with(context, failure)
    finally:
        give_up(TransferAborted(GIVEN_UP))
        if not prompt.is_started:
            metrics.histogram("queue_seconds").observe(time.monotonic() - prompt.queued_s)


def _stats_to_proto(parts: tuple[SentStats, ...]) -> pb.TransferStats:
    """Over the ranks: bytes and writes add up, times are those of the slowest."""
    return pb.TransferStats(
        bytes=sum(part.num_bytes for part in parts),
        writes=sum(part.writes for part in parts),
        writes_without_staging=sum(part.writes_without_staging for part in parts),
        transfer_s=max((part.transfer_s for part in parts), default=0.0),
        exposed_s=max((part.exposed_s for part in parts), default=0.0),
        resends=sum(part.resends for part in parts),
    )
