"""Serve PrefillControl in the leader of a connector's prefill side, for prompts that the engine schedules itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import grpc

from transfer.config import ConnectorConfig
from transfer.connector.draining import Draining
from transfer.connector.join_service import JoinService, largest_piece_bytes, peer_status
from transfer.connector.messages import PromptIdle
from transfer.connector.offered_prompts import OfferedPrompts
from transfer.connector.outgoing import Transfer
from transfer.connector.prefill_calls import MAX_ID_CHARS, PrefillCalls
from transfer.connector.rank_report import RankReady, RankReport
from transfer.connector.reserve_client import ReserveClient
from transfer.errors import LocalProtocolError, NodeDraining, PeerUnreachable, TransferAborted
from transfer.instance import Instance
from transfer.loop_turns import turns_of
from transfer.messages import clip_reason
from transfer.metrics import MetricFamily, NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import instance_to_proto, link_to_proto
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.tracing import Tracer
from transfer.transfer_ids import is_attempt_of


class PrefillService(pb_grpc.PrefillControlServicer):
    """See the module's docstring. Owned by its process's loop.

    Args:
        config: Settings.
        hellos: What the ranks said of themselves.
        security: How decode sides are spoken to.
        broadcast: Sends a message to every rank.
        reports: What the ranks said last.
        compute: See `OfferedPrompts`.
        tracer: Records spans of calls; None disables tracing.
    """

    def __init__(
        self,
        *,
        config: ConnectorConfig,
        hellos: tuple[RankReady, ...],
        security: Security,
        broadcast: Callable[[object], None],
        reports: Callable[[], Iterable[RankReport]],
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        first = hellos[0]
        self._instance: Instance = first.instance
        self._reports = reports
        self._started_s = time.monotonic()
        self._draining = Draining()
        self._join_service = JoinService(security=security, draining=self._draining)
        self._reserve_client = ReserveClient(security)
        self.metrics = NodeMetrics(role="prefill")
        self.metrics.watch_loop(turns_of(asyncio.get_running_loop()))
        self.requests = OfferedPrompts(
            num_ranks=len(hellos),
            limits=config.limits,
            broadcast=broadcast,
            reserve=partial(self._reserve_client.reserve, prefill_incarnation=first.instance.incarnation),
            compute=compute,
            on_outcome=self.metrics.request_ended,
            on_given_up=self.metrics.request_given_up,
        )
        self._calls = PrefillCalls(
            hello=first,
            num_ranks=len(hellos),
            config=config,
            broadcast=broadcast,
            requests=self.requests,
            reserve_client=self._reserve_client,
            metrics=self.metrics,
            tracer=tracer,
        )
        self._joins = self._calls.joins

    async def close(self) -> None:
        error = PeerUnreachable("the prefill side's engine shuts down")
        self._joins.forget_all(error)
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
        return sum(join.is_joined for join in self._joins)

    @property
    def is_idle(self) -> bool:
        """Whether the engine's pages are all its own."""
        return not self.requests.num_prompts and not self.requests.num_transfers

    def collect_metrics(self) -> Iterable[MetricFamily]:
        joined = [join for join in self._joins if join.is_joined]
        self.metrics.largest_piece(max(map(largest_piece_bytes, joined), default=0))
        self.metrics.node_state(
            state="draining" if self._draining.is_on else "ready",
            queued=self.requests.num_prompts,
            running=self.requests.num_transfers,
            peers={"joined": len(joined)},
            restarts=0,
        )
        return self.metrics.collect([report.metrics for report in self._reports()])

    # PrefillControl

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        if self._draining.is_on:
            await end_with(context, NodeDraining("the prefill side is draining"))
        async with contextlib.aclosing(self._calls.join(request, context, self._join_service)) as events:
            async for event in events:
                yield event

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        async with contextlib.aclosing(self._calls.prefill(request, context)) as events:
            async for event in events:
                yield event

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        reason = clip_reason(request.reason) or "aborted by an operator"
        attempts = [name for name in self.requests.request_ids if is_attempt_of(name, request.request_id)]
        found = [self.requests.abort(name, TransferAborted(reason, is_by_operator=True)) for name in attempts]
        if 1 <= len(request.request_id) <= MAX_ID_CHARS:
            # Also the prompt itself, as its engine and a decode side know it: nobody need keep it any more.
            found.append(self.requests.decline(request.request_id, reason))
        return pb.AbortResponse(found=any(found))

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        joins = list(self._joins)
        return pb.NodeStatus(
            role="prefill",
            state="draining" if self._draining.is_on else "ready",
            instance=instance_to_proto(self._instance),
            uptime_s=time.monotonic() - self._started_s,
            queued_requests=self.requests.num_prompts,
            running_requests=self.requests.num_transfers,
            ranks=[pb.RankStatus(**report.status) for report in self._reports()],
            peers=map(peer_status, joins),
            links=[link_to_proto(link, peer_incarnation=join.incarnation) for join in joins for link in join.links],
            ready=not self._draining.is_on,
            not_ready_reason="the prefill side is draining" if self._draining.is_on else "",
        )

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        """Until no page of the engine is lent: prompts that are computed are fetched by those that asked for them, or expire.

        No decode side joins meanwhile; the engine's own front has to be drained by whoever runs it.
        """
        self._draining.begin()
        budget_s = context.time_remaining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if budget_s is None else max(0.0, budget_s - 0.1)):
                while not self.is_idle:
                    await asyncio.sleep(0.02)
        return pb.DrainResponse(remaining=max(self.requests.num_prompts, self.requests.num_transfers))
