"""Serve the calls of decode instances in the leader of a prefill side, for daemons and engines alike."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final, NoReturn, TypeVar

import grpc
import structlog

from transfer.chunk import check_num_pieces
from transfer.config import ConnectorConfig, PrefillNodeConfig
from transfer.connector.decode_instances import DecodeInstances, Join, Reservation
from transfer.connector.messages import DecodeAttached, DecodeLost, TransferNotSent, TransferSent
from transfer.connector.outgoing import OutgoingTransfers, Transfer
from transfer.connector.prompt import check_cache_salt, checked_prompt
from transfer.connector.rank_report import RankReady
from transfer.connector.reserve_client import ReserveClient
from transfer.connector.side_service import Draining
from transfer.errors import (
    ConfigError,
    NodeDraining,
    PeerUnreachable,
    Preempted,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportError,
)
from transfer.log_rate_limiter import LogRateLimiter
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.refusals import say_request_refused, without_request
from transfer.registry.convert import chunk_plan_to_proto, sampling_from_proto
from transfer.registry.prompt_stream import serve_prompts
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.sizes import Cut, choose_cut
from transfer.tracing import Tracer, traceparent_in

MAX_ID_CHARS = 128
FIRST_MESSAGE_S: Final = 10.0
"""Limit for the first message of `PrefillIntoRoom` and `StreamPrompts`. An honest caller sends it with the call."""

MAX_STREAMS: Final = 4
"""Streams of a decode instance. It has one for each of its connections."""

GIVEN_UP: Final = "the decode side gave the request up"

MessageT = TypeVar("MessageT")

log = structlog.get_logger(__name__)


class PrefillCalls:
    """Serve the calls and the joins of decode instances in one life of a prefill instance's ranks.

    Args:
        config: Settings that divide prompts into chunks.
        security: TLS or plain text of calls to the decode side.
        draining: While it is on, prompts that would be computed only for the call are rejected.
        reserve_client: Keeps a channel to the leader of each joined instance.
        tracer: Records the spans of calls whose caller traces them. None disables tracing.
    """

    def __init__(
        self,
        *,
        hello: RankReady,
        num_ranks: int,
        config: PrefillNodeConfig | ConnectorConfig,
        security: Security,
        draining: Draining,
        broadcast: Callable[[object], None],
        requests: OutgoingTransfers,
        reserve_client: ReserveClient,
        metrics: NodeMetrics,
        tracer: Tracer | None,
    ) -> None:
        self._hello = hello
        self._config = config
        self._draining = draining
        self._requests = requests
        self._reserve_client = reserve_client
        self._metrics = metrics
        self._tracer = tracer
        self._refused = LogRateLimiter()
        self.joins = DecodeInstances(
            own=hello.instance,
            num_ranks=num_ranks,
            security=security,
            draining=draining,
            traffic=requests,
            broadcast=broadcast,
            on_lost=self._on_join_lost,
            choose_cut=self._choose_cut,
        )
        """The decode instances that may call."""

    def _choose_cut(self, join: Join) -> Cut:
        hello, config = self._hello, self._config
        chunk = config.chunk
        if hello.chunk_tokens:
            chunk = chunk.model_copy(update={"chunk_tokens": hello.chunk_tokens})
        return choose_cut(
            chunk,
            hello.instance,
            join.instance,
            join.links,
            ring_bytes=join.ring_bytes,
            slot_bytes=join.slot_bytes,
            device=config.device,
            min_layer_groups=hello.min_layer_groups,
        )

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

    async def prefill_into_room(
        self, messages: AsyncIterator[pb.PrefillMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Yield the events of a `PrefillControl.PrefillIntoRoom` call; as `prefill`, but the caller gives room in `messages`."""
        first = await self._first_of(messages, "PrefillIntoRoom", context)
        if first is None or not first.HasField("request"):
            await self._refuse(ConfigError("the first message of PrefillIntoRoom must have request"), context)
        async with contextlib.aclosing(self.prefill(first.request, context, messages)) as events:
            async for event in events:
                yield event

    async def stream_prompts(
        self, messages: AsyncIterator[pb.PromptMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.PromptEvent, None]:
        """Yield the events of a `PrefillControl.StreamPrompts` call. It ends with the join of its first prompt."""
        first = await self._first_of(messages, "StreamPrompts", context)
        if first is None or not first.message.HasField("request"):
            await self._refuse(ConfigError("the first message of StreamPrompts must have request"), context)
        try:
            join = self._joined(first.message.request.decode_incarnation)
            if join.num_streams >= MAX_STREAMS:
                raise ResourceExhausted(f"a decode instance can have {MAX_STREAMS} streams of prompts")
        except TransferError as error:
            await self._refuse(error, context)
        join.num_streams += 1
        try:
            serving = serve_prompts(_with_first(first, messages), self.prefill_into_room, over=join.lost)
            async with contextlib.aclosing(serving) as events:
                async for event in events:
                    yield event
        finally:
            join.num_streams -= 1

    async def _first_of(
        self, messages: AsyncIterator[MessageT], method: str, context: grpc.aio.ServicerContext[Any, Any]
    ) -> MessageT | None:
        """Return the first message of a call; None if it has none. End the call if none comes in time."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                return await anext(messages, None)
        except TimeoutError:
            await self._refuse(ConfigError(f"{method} must send request within {FIRST_MESSAGE_S:g} s"), context)

    async def prefill(
        self,
        request: pb.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        messages: AsyncIterator[pb.PrefillMessage] | None = None,
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Yield the events of a `PrefillControl.Prefill` call, or end the call if the prompt is refused.

        The caller must close the iterator (`contextlib.aclosing`), which gives an unfinished prompt up.

        Args:
            messages: Further messages of the caller. None means that it is asked for room with `Reserve`.
        """
        span = None
        if self._tracer is not None and (told := traceparent_in(context.invocation_metadata())):
            # Only if the decode node traces the request: a trace of its own would show half of it.
            span = self._tracer.begin("kvferry.prefill", parent=told, attributes={"transfer_id": request.request_id})
        try:
            if self._draining.is_on and not request.engine_request:
                raise NodeDraining("the prefill side is draining")
            transfer = self._checked(request)
            transfer.span = span
            if messages is not None:
                transfer.room = asyncio.get_running_loop().create_future()
            self._requests.submit(transfer)
        except TransferError as error:
            if span is not None:
                span.end(without_request(error))
            await self._refuse(error, context)
        self._metrics.counter("prompt_tokens").inc(len(transfer.token_ids))
        queue_seconds = self._metrics.histogram("queue_seconds")
        reading = None if messages is None else asyncio.ensure_future(self._read_room(transfer, messages))
        try:
            while True:
                match await transfer.progress.get():
                    case Preempted():
                        yield pb.PrefillEvent(preempted=pb.PrefillPreempted())
                        return
                    case TransferError() as failure:
                        await end_with(context, failure)
                    case event:
                        if event.HasField("started"):
                            queue_seconds.observe(event.started.queue_s)
                        yield event
                        if event.HasField("sent"):
                            return
        finally:
            self._requests.fail(transfer, TransferAborted(GIVEN_UP))  # no-op if the transfer is over
            if not transfer.is_started:
                queue_seconds.observe(time.monotonic() - transfer.queued_s)
            if reading is not None:
                reading.cancel()
                # It must have stopped reading the messages before they are closed.
                await asyncio.gather(reading, return_exceptions=True)
            if span is not None:
                span.end()  # no-op if an error has ended it

    def _checked(self, request: pb.PrefillRequest) -> Transfer:
        """Return the transfer that a call asks for.

        Raises:
            ConfigError: A field is missing, too long or out of range.
            PeerUnreachable: The decode instance is not joined, or its join was just lost. A lost instance joins again by itself.
            LayoutError: The prompt would be divided into too many pieces.
        """
        hello, own = self._hello, self._hello.instance
        if not 1 <= len(request.request_id) <= MAX_ID_CHARS:
            raise ConfigError(f"request_id has {len(request.request_id)} characters; it must have 1 to {MAX_ID_CHARS}")
        if len(request.engine_request) > MAX_ID_CHARS:
            raise ConfigError(f"engine_request has {len(request.engine_request)} characters; it can have {MAX_ID_CHARS}")
        check_cache_salt(request.cache_salt)
        token_ids = checked_prompt(request.token_ids, max_context_tokens=hello.max_context_tokens, vocab_size=hello.vocab_size)
        if request.start_token >= len(token_ids):
            raise ConfigError(f"start_token is {request.start_token}; it must be below the prompt's {len(token_ids)} tokens")
        join = self._joined(request.decode_incarnation)
        plan = join.plan_of(len(token_ids), request.start_token)
        if request.HasField("early_room_plan") and request.early_room_plan != chunk_plan_to_proto(plan):
            told = request.early_room_plan
            # An error that the decode side retries, because its next attempt asks for room.
            raise TransportError(
                f"early_room_plan has chunk_tokens {told.chunk_tokens}, layers_per_group {told.layers_per_group} and "
                f"token_layers {told.token_layers}; this prompt has {plan.chunk_tokens}, {plan.layers_per_group} and "
                f"{plan.token_layers}"
            )
        check_num_pieces(
            plan,
            own.layout,
            own.shard,
            join.instance.shard,
            num_tokens=len(token_ids),
            start_token=request.start_token,
        )
        return Transfer(
            transfer_id=request.request_id,
            token_ids=token_ids,
            join=join,
            plan=plan,
            start_token=request.start_token,
            sampling=sampling_from_proto(request.sampling),
            cache_salt=request.cache_salt,
            engine_request=request.engine_request,
            has_early_room=request.HasField("early_room_plan"),
        )

    def _joined(self, decode_incarnation: int) -> Join:
        """Return the join of that life. Raise PeerUnreachable if it is not joined."""
        join = self.joins.find(decode_incarnation)
        if join is None:
            raise PeerUnreachable(f"decode instance {decode_incarnation:#018x} has not joined this prefill instance")
        return join

    async def _read_room(self, transfer: Transfer, messages: AsyncIterator[pb.PrefillMessage]) -> None:
        """Take the room that the caller gives. A message that is out of order fails the transfer."""
        assert transfer.room is not None
        try:
            async for message in messages:
                may_come = transfer.is_room_wanted or transfer.has_early_room
                if not (message.HasField("room") and may_come) or transfer.room.done():
                    raise ConfigError("PrefillIntoRoom takes one message after the first: room, once room_wanted was sent")
                start_token = message.room.start_token if message.room.HasField("start_token") else None
                transfer.room.set_result(Reservation(is_reserved=True, start_token=start_token))
            if not transfer.room.done():
                raise TransferAborted(GIVEN_UP)  # a cancelled call also looks like this for a moment
        except TransferError as error:
            self._requests.fail(transfer, error)

    async def _refuse(self, error: TransferError, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call of a prompt that is not accepted, and count it."""
        self._metrics.request_ended("refused")
        say_request_refused(error, self._refused)
        await end_with(context, error)


async def _with_first(first: MessageT, messages: AsyncIterator[MessageT]) -> AsyncIterator[MessageT]:
    yield first
    async for message in messages:
        yield message
