"""Check a `Prefill` call and return its events to the caller; used by every prefill leader."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from transfer.chunk import check_num_pieces
from transfer.connector.decode_instances import DecodeInstances
from transfer.connector.outgoing import EngineNote, OutgoingTransfers, PromptFirstToken, PromptSent, PromptStarted, Transfer
from transfer.connector.prompt import check_cache_salt, checked_prompt
from transfer.errors import ConfigError, PeerUnreachable, Preempted, TransferAborted, TransferError
from transfer.instance import Instance
from transfer.log_rate_limiter import LogRateLimiter
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.refusals import say_request_refused, without_request
from transfer.registry.convert import sampling_from_proto
from transfer.registry.status import end_with
from transfer.send.events import SentStats
from transfer.tracing import Tracer, traceparent_in

MAX_ID_CHARS = 128


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCalls:
    """Serve `PrefillControl.Prefill` in one life of an instance.

    Args:
        checks: Check each prompt.
        joins: The decode instances that may call.
        requests: Accepts the transfers.
        metrics: Count them.
        tracer: Records the spans of calls whose caller traces them; None if this instance does not trace.
    """

    checks: PromptChecks
    joins: DecodeInstances
    requests: OutgoingTransfers
    metrics: NodeMetrics
    tracer: Tracer | None = None
    refused: LogRateLimiter = field(default_factory=LogRateLimiter)

    async def events(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Yield the events of the call; end it if the prompt is refused. The caller must close the iterator."""
        span = None
        if self.tracer is not None and (told := traceparent_in(context.invocation_metadata())):
            # Only what a decode node traces; a trace of its own would tell half of a request.
            span = self.tracer.begin("kvferry.prefill", parent=told, attributes={"transfer_id": request.request_id})
        try:
            transfer = self.checks.check(request, self.joins)
            transfer.span = span
            self.requests.submit(transfer)
        except TransferError as error:
            self._refuse(error)
            if span is not None:
                span.end(without_request(error))
            await end_with(context, error)
        self.metrics.prompt_accepted(len(transfer.token_ids))
        give_up = partial(self.requests.fail, transfer)
        try:
            async with contextlib.aclosing(prefill_events(transfer, context, give_up=give_up, metrics=self.metrics)) as events:
                async for event in events:
                    yield event
        finally:
            if span is not None:
                span.end()  # unless what failed it has ended it

    def _refuse(self, error: TransferError) -> None:
        """A request is turned away before it was accepted."""
        self.metrics.request_ended("refused")
        say_request_refused(error, self.refused)


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
                case PromptStarted(queue_s=queue_s):
                    metrics.queue_seconds(queue_s)
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
        give_up(TransferAborted("the decode side gave the request up"))
        if not prompt.is_started:
            metrics.queue_seconds(time.monotonic() - prompt.queued_s)


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
