"""Serve PrefillControl in the leader of a connector's prefill side, for prompts that the engine schedules itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import structlog

from transfer.config import ConnectorConfig
from transfer.connector.decode_instances import DecodeInstances, Join
from transfer.connector.draining import Draining
from transfer.connector.join_service import JoinService, links_of, peer_status, show_joins
from transfer.connector.messages import DecodeAttached, DecodeLost, PromptIdle, TransferNotSent, TransferSent
from transfer.connector.outgoing import OutgoingTransfers, Transfer
from transfer.connector.prefill_calls import MAX_ID_CHARS, PromptChecks, begin_prefill_span, prefill_events
from transfer.connector.rank_report import RankReady, RankReport
from transfer.connector.reserve_client import ReserveClient
from transfer.connector.side_service import SideNode, SideService
from transfer.errors import (
    ConfigError,
    LocalProtocolError,
    NodeDraining,
    PeerUnreachable,
    RemoteProtocolError,
    TransferError,
)
from transfer.instance import Instance
from transfer.log_rate_limiter import LogRateLimiter
from transfer.loop_turns import turns_of
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.refusals import say_request_refused, without_request
from transfer.registry.convert import sampling_from_proto
from transfer.registry.discovery import DiscoveryView, open_registration
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.sizes import choose_cut
from transfer.tracing import Span, Tracer

log = structlog.get_logger(__name__)


class PrefillService(SideService, pb_grpc.PrefillControlServicer):
    """See the module's docstring. Owned by its process's loop.

    Args:
        node: The instance.
        config: Settings.
        hellos: What the ranks said of themselves.
        security: How decode sides are spoken to.
        draining: Whether the instance takes new work.
        broadcast: Sends a message to every rank.
        reports: What the ranks said last.
        compute: See `OutgoingTransfers`.
        tracer: Records spans of calls; None disables tracing.
    """

    def __init__(
        self,
        *,
        node: SideNode,
        config: ConnectorConfig,
        hellos: tuple[RankReady, ...],
        security: Security,
        draining: Draining,
        broadcast: Callable[[object], None],
        reports: Callable[[], Sequence[RankReport]],
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(node=node, role="prefill", metrics=NodeMetrics(role="prefill"))
        first = hellos[0]
        self._instance: Instance = first.instance
        self._checks = PromptChecks(own=first.instance, max_context_tokens=first.max_context_tokens, vocab_size=first.vocab_size)
        self._reports = reports
        self._draining = draining
        self._tracer = tracer
        self._refused = LogRateLimiter()
        self._join_service = JoinService(security=security, draining=draining)
        self._reserve_client = ReserveClient(security)
        self._registration = open_registration(config.discovery)
        self.metrics.histogram("loop_turn_seconds").follow(turns_of(asyncio.get_running_loop()))
        self.requests = OutgoingTransfers(
            num_ranks=len(hellos),
            limits=config.limits,
            broadcast=broadcast,
            reserve=self._reserve,
            compute=compute,
            on_outcome=self.metrics.request_ended,
            on_given_up=self.metrics.request_given_up,
        )
        self._joins = DecodeInstances(
            len(hellos),
            broadcast,
            self._on_join_lost,
            lambda join: choose_cut(
                config.chunk, self._instance, join.instance, join.links, join.ring_bytes, device=config.device
            ),
        )

    def start(self, address: str) -> None:
        """Register that address, if the settings say so; nothing is registered before `announce`."""
        if self._registration is not None:
            self._registration.start(address)

    def announce(self, is_serving: bool) -> None:
        """Keep the entry in discovery exactly while new work is taken."""
        if self._registration is not None:
            self._registration.want(is_serving)

    async def close(self) -> None:
        if self._registration is not None:
            await self._registration.close()
        error = PeerUnreachable("the prefill side's engine shuts down")
        self._joins.forget_all(error)
        await self.requests.close(error)
        await self._reserve_client.close()

    def on_rank_message(self, rank: int, message: Any) -> None:
        match message:
            case TransferSent():
                self.requests.on_sent(rank, message)
            case TransferNotSent():
                self.requests.on_not_sent(rank, message)
            case PromptIdle():
                self.requests.on_idle(rank, message)
            case DecodeAttached():
                self._joins.on_attached(rank, message)
            case DecodeLost():
                self._joins.on_rank_lost(rank, message)
            case _:
                raise LocalProtocolError(f"a connector's prefill leader cannot serve {type(message).__name__}")

    @property
    def num_joined(self) -> int:
        """Decode instances that are joined."""
        return sum(join.is_joined for join in self._joins)

    @property
    def is_idle(self) -> bool:
        """Whether the engine's pages are all its own."""
        return not self.requests.num_prompts and not self.requests.num_transfers

    # As operators see it

    @property
    def in_flight(self) -> OutgoingTransfers:
        return self.requests

    @property
    def instance(self) -> Instance:
        return self._instance

    @property
    def reports(self) -> Sequence[RankReport]:
        return self._reports()

    def peer_statuses(self) -> Iterable[pb.PeerStatus]:
        return map(peer_status, self._joins)

    def link_statuses(self) -> Iterable[pb.LinkStatus]:
        return links_of(self._joins)

    @property
    def discovery_view(self) -> DiscoveryView | None:
        return None if self._registration is None else self._registration.view

    def show(self) -> Mapping[str, int]:
        return show_joins(self._joins, self.metrics)

    def abort(self, request_id: str, reason: str) -> bool:
        """Also the prompt itself, as its engine and a decode side know it: nobody need keep it any more."""
        found = super().abort(request_id, reason)
        return (1 <= len(request_id) <= MAX_ID_CHARS and self.requests.decline(request_id, reason)) or found

    def _on_join_lost(self, join: Join, error: TransferError) -> None:
        log.warning("decode_instance_lost", address=join.address, reason=str(error))
        self.requests.abort_join(join, error)
        if all(other.address != join.address for other in self._joins):
            self._reserve_client.forget_address(join.address)

    async def _reserve(self, join: Join, transfer_id: str) -> bool:
        """Raises RemoteProtocolError for a start token, which only a peer with another list of capabilities may be told."""
        answer = await self._reserve_client.reserve(join, transfer_id, prefill_incarnation=self._instance.incarnation)
        if answer.start_token is not None:
            raise RemoteProtocolError(f"{join.address} told a start_token in Reserve to a side without late_start_token")
        return answer.is_reserved

    # PrefillControl

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        if self._draining.is_on:
            await end_with(context, NodeDraining("the prefill side is draining"))
        events = self._join_service.events(
            request,
            context,
            own=self._instance,
            joins=self._joins,
            is_idle=lambda join: not self.requests.num_transfers,
            others_tokens=self.requests.others_tokens,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        span = begin_prefill_span(self._tracer, request, context)
        try:
            transfer = self._submit(request, span)
        except TransferError as error:
            self.metrics.request_ended("refused")
            say_request_refused(error, self._refused)
            if span is not None:
                span.end(without_request(error))
            await end_with(context, error)
        self.metrics.counter("prompt_tokens").inc(len(request.token_ids))
        give_up = partial(self.requests.give_up, transfer)
        try:
            serving = prefill_events(transfer, context, give_up=give_up, metrics=self.metrics)
            async with contextlib.aclosing(serving) as events:
                async for event in events:
                    yield event
        finally:
            if span is not None:
                span.end()  # unless what failed it has ended it

    def _submit(self, request: pb.PrefillRequest, span: Span | None) -> Transfer:
        if self._draining.is_on and not request.engine_request:
            raise NodeDraining("the prefill side is draining")  # others finish a prompt that the engine has
        if len(request.engine_request) > MAX_ID_CHARS:
            raise ConfigError(f"engine_request has {len(request.engine_request)} characters; it can have {MAX_ID_CHARS}")
        token_ids, join = self._checks.check(request, self._joins)
        sampling = sampling_from_proto(request.sampling)
        return self.requests.submit(
            request.request_id,
            request.engine_request,
            token_ids,
            request.start_token,
            sampling,
            join,
            cache_salt=request.cache_salt,
            span=span,
        )
