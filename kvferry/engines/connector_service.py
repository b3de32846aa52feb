"""Serve the sides of an engine's instance, and the calls of operators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from kvferry.engines.connector import DECODE, PREFILL, Sides
from node_runtime.health import HealthServer, Readiness
from node_runtime.node_service import NodeService
from node_runtime.rank_messages import RankLogLevel
from node_runtime.rank_setup import open_tracer
from transfer.config import ConnectorConfig
from transfer.connector.decode_service import DecodeService
from transfer.connector.outgoing import Transfer
from transfer.connector.prefill_service import PrefillService
from transfer.connector.rank_report import RankReady, RankReport
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security
from transfer.registry.status import end_call
from transfer.tracing import Tracer


class ConnectorNode(NodeService):
    """See the module's docstring. Owned by the leader's loop.

    Args:
        hellos: Self-descriptions of all ranks.
        broadcast: Sends a message to every rank.
        reports: Returns the newest report of each rank about one side.
        why_broken: Returns why the engine must stop; empty if it need not.
        compute: See `transfer.connector.outgoing.OutgoingTransfers`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        sides: Sides,
        hellos: tuple[RankReady, ...],
        security: Security,
        broadcast: Callable[[object], None],
        reports: Callable[[Sides], Sequence[RankReport]],
        why_broken: Callable[[], str],
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None,
    ) -> None:
        super().__init__(
            host=self,
            set_rank_log_level=lambda level: broadcast(RankLogLevel(level=level)),
            security=security,
            server=config.server,
            page=config.status_page,
        )
        self._config = config
        self._why_broken = why_broken
        self.http_port = 0
        self._tracers: list[Tracer] = []
        self.prefill: PrefillService | None = None
        self.decode: DecodeService | None = None
        if PREFILL in sides:
            self.prefill = PrefillService(
                node=self,
                config=config,
                hellos=hellos,
                security=security,
                draining=self._draining,
                broadcast=broadcast,
                reports=lambda: reports(PREFILL),
                compute=compute,
                tracer=self._open_tracer("prefill"),
            )
        if DECODE in sides:
            self.decode = DecodeService(
                node=self,
                config=config,
                hellos=hellos,
                security=security,
                broadcast=broadcast,
                reports=lambda: reports(DECODE),
                tracer=self._open_tracer("decode"),
            )
        self.sides = [side for side in (self.decode, self.prefill) if side is not None]
        self._health = HealthServer(
            self.readiness,
            self.collect_metrics,
            page=self.status_page,
            host_names=(config.server.advertised_host, *config.status_page.host_names),
        )

    def _open_tracer(self, role: str) -> Tracer | None:
        tracer = open_tracer(self._config.tracing, role=role)
        if tracer is not None:
            self._tracers.append(tracer)
        return tracer

    async def open(self) -> str:
        """Serve; return host:port of the gRPC API.

        Raises:
            ConfigError: A port cannot be opened.
        """
        server = self._config.server
        self._address = await self._serve(
            prefill_control=self.prefill, decode_control=self.decode, node_control=self, on_refused=self._on_refused
        )
        self.http_port = await self._health.start(server.host, server.http_port)
        for side in (self.prefill, self.decode):
            if side is not None:
                side.start(self._address)
        await self._set_serving(True)
        return self._address

    async def close(self) -> None:
        await self._set_serving(False)  # before the port is closed, so that decode sides do not find this instance
        async with contextlib.AsyncExitStack() as stack:  # in reverse; an error of one does not keep the others from closing
            for tracer in self._tracers:
                stack.push_async_callback(asyncio.to_thread, tracer.close)
            for side in (self.decode, self.prefill):
                if side is not None:
                    stack.push_async_callback(side.close)
            stack.push_async_callback(self._health.stop)
            stack.push_async_callback(super().close)

    @property
    def num_joined(self) -> int:
        """Number of joined instances of the other tier."""
        return sum(side.num_joined for side in (self.prefill, self.decode) if side is not None)

    @property
    def is_idle(self) -> bool:
        """Whether no prompt and no transfer is known."""
        return all(side.is_idle for side in (self.prefill, self.decode) if side is not None)

    # Implementation of `NodeHost`

    state = "ready"
    num_restarts = 0
    is_stopping = False

    def readiness(self) -> Readiness:
        reason = self._why_broken() or ("the node is draining" if self._draining.is_on else "")
        return Readiness(is_ready=not reason, reason=reason)

    # NodeControl

    async def SwitchRole(
        self, request: pb.SwitchRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SwitchRoleResponse:
        await end_call(
            context,
            grpc.StatusCode.FAILED_PRECONDITION,
            "this kvferry is inside an engine, which has its role from its own settings: start the engine with another one",
        )
