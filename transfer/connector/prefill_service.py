"""Serve PrefillControl in the leader of a connector's prefill side, for prompts that the engine schedules itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from transfer.config import ConnectorConfig
from transfer.connector.decode_instances import DecodeInstances, show_joins
from transfer.connector.messages import PromptIdle
from transfer.connector.offered_prompts import OfferedPrompts
from transfer.connector.outgoing import Transfer
from transfer.connector.prefill_calls import MAX_ID_CHARS, PrefillCalls
from transfer.connector.rank_report import RankReady, RankReport
from transfer.connector.reserve_client import ReserveClient
from transfer.connector.side_service import Draining, SideNode, SideService
from transfer.errors import LocalProtocolError, NodeDraining, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.discovery import DiscoveryView, open_registration
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.tracing import Tracer


class PrefillService(SideService, pb_grpc.PrefillControlServicer):
    """See the module's docstring. Owned by its process's loop.

    Args:
        security: TLS or plain text of calls to decode sides.
        draining: Whether the instance takes new work.
        compute: See `OfferedPrompts`.
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
        super().__init__(node=node, role="prefill", hellos=hellos, reports=reports)
        self._draining = draining
        self._reserve_client = ReserveClient(security)
        self._registration = open_registration(config.discovery)
        self.requests = OfferedPrompts(
            num_ranks=len(hellos),
            limits=config.limits,
            broadcast=broadcast,
            reserve=partial(self._reserve_client.reserve, prefill_incarnation=self.instance.incarnation),
            compute=compute,
            on_outcome=self.metrics.request_ended,
            on_given_up=self.metrics.request_given_up,
        )
        self._calls = PrefillCalls(
            hello=hellos[0],
            num_ranks=len(hellos),
            config=config,
            security=security,
            draining=draining,
            broadcast=broadcast,
            requests=self.requests,
            reserve_client=self._reserve_client,
            metrics=self.metrics,
            tracer=tracer,
        )

    def start(self, address: str) -> None:
        """Start to register that address, if the settings enable it. Nothing is registered before `announce`."""
        if self._registration is not None:
            self._registration.start(address)

    async def close(self) -> None:
        if self._registration is not None:
            await self._registration.close()
        error = PeerUnreachable("the prefill side's engine shuts down")
        self.peers.forget_all(error)
        await self.requests.close(error)
        await self._reserve_client.close()

    def on_rank_message(self, rank: int, message: Any) -> None:
        if isinstance(message, PromptIdle):
            self.requests.on_idle(rank, message)
        elif not self._calls.on_rank_message(rank, message):
            raise LocalProtocolError(f"a connector's prefill leader cannot serve {type(message).__name__}")

    @property
    def num_joined(self) -> int:
        """Decode instances that are joined."""
        return sum(join.is_joined for join in self.peers)

    @property
    def is_idle(self) -> bool:
        """Whether no page of the engine is kept for a transfer."""
        return not self.requests.num_prompts and not self.requests.num_transfers

    # Implementation of `Side`

    @property
    def in_flight(self) -> OfferedPrompts:
        return self.requests

    @property
    def peers(self) -> DecodeInstances:
        return self._calls.joins

    @property
    def discovery_view(self) -> DiscoveryView | None:
        return None if self._registration is None else self._registration.view

    def show(self) -> Mapping[str, int]:
        return show_joins(self.peers, self.metrics)

    def announce(self, is_serving: bool) -> None:
        """Keep the entry in discovery exactly while new work is accepted."""
        if self._registration is not None:
            self._registration.want(is_serving)

    def abort(self, request_id: str, reason: str) -> bool:
        """Give up the prompt itself, too, by the id that its engine and a decode side know. Then neither keeps it any more."""
        found = super().abort(request_id, reason)
        return (1 <= len(request_id) <= MAX_ID_CHARS and self.requests.decline(request_id, reason)) or found

    # PrefillControl

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        if self._draining.is_on:
            await end_with(context, NodeDraining("the prefill side is draining"))
        async with contextlib.aclosing(self.peers.serve(request, context)) as events:
            async for event in events:
                yield event

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with contextlib.aclosing(self._calls.prefill(request, context)) as events:
            async for event in events:
                yield event

    async def PrefillIntoRoom(
        self, request_iterator: AsyncIterator[pb.PrefillMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with contextlib.aclosing(self._calls.prefill_into_room(request_iterator, context)) as events:
            async for event in events:
                yield event

    async def StreamPrompts(
        self, request_iterator: AsyncIterator[pb.PromptMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PromptEvent]:
        async with contextlib.aclosing(self._calls.stream_prompts(request_iterator, context)) as events:
            async for event in events:
                yield event
