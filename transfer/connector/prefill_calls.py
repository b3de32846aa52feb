"""Check a `Prefill` call and return its events to the caller; used by every prefill leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from transfer.chunk import check_num_pieces
from transfer.connector.decode_instances import DecodeInstances, Join
from transfer.connector.prompt import check_cache_salt, checked_prompt
from transfer.errors import ConfigError, PeerUnreachable, Preempted, TransferAborted, TransferError
from transfer.instance import Instance
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.status import end_with
from transfer.send.events import SentStats
from transfer.tracing import Span, Tracer, traceparent_in

MAX_ID_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStarted:
    """Room is reserved on the decode side, and the ranks have been told."""

    queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNote:
    """What the engine has to tell the decode side's."""

    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFirstToken:
    token_id: int
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSent:
    """All KV has arrived. `stats` has the statistics of each rank."""

    stats: tuple[SentStats, ...]


Progress = PromptStarted | EngineNote | PromptFirstToken | PromptSent | TransferError
"""Progress events for the caller, in order. The last one is `PromptSent` or an error."""


class CalledPrompt(Protocol):
    """The prompt of a `Prefill` call."""

    @property
    def progress(self) -> asyncio.Queue[Progress]: ...

    @property
    def queued_s(self) -> float:
        """When it was accepted, by the monotonic clock."""
        ...

    @property
    def is_started(self) -> bool:
        """Whether the decode side has reserved room and the ranks were sent the request."""
        ...


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

    def check(self, request: pb.PrefillRequest, joins: DecodeInstances) -> tuple[tuple[int, ...], Join]:
        """Return the prompt's tokens and the decode instance that asks for it.

        Raises:
            ConfigError: A field is missing, too long or out of range.
            PeerUnreachable: The decode instance is not joined, or its join was just lost. A lost instance joins again by itself.
            LayoutError: The request would be divided into too many pieces.
        """
        if not 1 <= len(request.request_id) <= MAX_ID_CHARS:
            raise ConfigError(f"request_id has {len(request.request_id)} characters; it must have 1 to {MAX_ID_CHARS}")
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
        return token_ids, join


def begin_prefill_span(
    tracer: Tracer | None, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
) -> Span | None:
    """Begin the span of a call that the decode side traces; None for others: a trace of its own would tell half of a request."""
    if tracer is None or not (told := traceparent_in(context.invocation_metadata())):
        return None
    return tracer.begin("kvferry.prefill", parent=told, attributes={"transfer_id": request.request_id})


async def prefill_events(
    prompt: CalledPrompt,
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
        give_up(TransferAborted("the decode side gave the request up"))
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
