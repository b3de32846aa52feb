"""Join prefill nodes and serve their calls, in the leader of a connector's decode side."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import structlog

from transfer.config import ConnectorConfig
from transfer.connector.attempt import IncomingObserver
from transfer.connector.bound_prompts import BoundPrompt, BoundPrompts
from transfer.connector.incoming import IncomingTransfers
from transfer.connector.prefill_nodes import PrefillNodes, show_peers
from transfer.connector.prefill_peer import links_of, peer_status
from transfer.connector.rank_report import RankReady, RankReport
from transfer.errors import LocalProtocolError, PeerUnreachable, TransferAborted, TransferError
from transfer.loop_turns import turns_of
from transfer.messages import clip_reason
from transfer.metrics import MetricFamily, NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import instance_to_proto
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.transfer_ids import is_attempt_of

log = structlog.get_logger(__name__)


class DecodeService(pb_grpc.DecodeControlServicer):
    """See the module's docstring. Owned by its process's loop. Its `Generate` is none: requests come by the engine's own front.

    Args:
        config: Settings.
        hellos: What the ranks said of themselves.
        security: How prefill nodes are spoken to.
        broadcast: Sends a message to every rank.
        reports: What the ranks said last.
    """

    def __init__(
        self,
        *,
        config: ConnectorConfig,
        hellos: tuple[RankReady, ...],
        security: Security,
        broadcast: Callable[[object], None],
        reports: Callable[[], Iterable[RankReport]],
    ) -> None:
        first = hellos[0]
        self._instance = first.instance
        self._config = config
        self._hellos = hellos
        self._security = security
        self._broadcast = broadcast
        self._reports = reports
        self._started_s = time.monotonic()
        self.metrics = NodeMetrics(role="decode")
        self.metrics.watch_loop(turns_of(asyncio.get_running_loop()))
        self.peers: PrefillNodes
        self.prompts: BoundPrompts
        self.requests: IncomingTransfers[BoundPrompt]
        self._is_started = False

    def start(self, address: str) -> None:
        """Join the prefill nodes that are set.

        Args:
            address: Where their leaders reach this servicer.
        """
        config, hellos = self._config, self._hellos
        self.peers = PrefillNodes.of(
            config,
            hellos,
            list(config.peers.prefill_nodes),
            security=self._security,
            decode_address=address,
            metrics=self.metrics,
            broadcast=self._broadcast,
            on_lost=lambda peer, reason: self.requests.on_peer_lost(peer, reason),
            on_change=lambda: self.requests.peers_changed(),
            prefix_tokens=config.placement.prefix_tokens or 0,
        )
        self.prompts = BoundPrompts(
            peers=self.peers,
            limits=config.limits,
            own=self._instance,
            may_join=config.join_on_request,
            broadcast=self._broadcast,
            observer=IncomingObserver(
                on_outcome=self.metrics.request_ended,
                on_queue_seconds=self.metrics.queue_seconds,
                on_retry=self.metrics.request_retried,
                on_given_up=self.metrics.request_given_up,
            ),
        )
        self.requests = self.prompts.transfers
        self._is_started = True
        self.peers.start()

    async def close(self) -> None:
        if self._is_started:
            await self.prompts.close()
            await self.peers.close()

    def on_rank_message(self, rank: int, message: Any) -> None:
        if not self._is_started:
            return  # of strangers that have attached to a rank: nobody has joined before
        if not self.requests.on_message(rank, message):
            raise LocalProtocolError(f"a connector's decode leader cannot serve {type(message).__name__}")

    @property
    def num_joined(self) -> int:
        """Prefill nodes that are joined."""
        return sum(peer.state == "joined" for peer in self.peers.peers) if self._is_started else 0

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is wanted."""
        return not self._num_prompts

    def collect_metrics(self) -> Iterable[MetricFamily]:
        peers = self.peers.peers if self._is_started else []
        show_peers(peers, self.metrics)
        self.metrics.node_state(
            state="ready", queued=0, running=self._num_prompts, peers=Counter(peer.state for peer in peers), restarts=0
        )
        return self.metrics.collect([report.metrics for report in self._reports()])

    # DecodeControl

    async def Reserve(self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ReserveResponse:
        try:
            if not self._is_started:
                raise PeerUnreachable("the decode side is starting")
            return await self.requests.answer(request)
        except TransferError as error:
            await end_with(context, error)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this decode side is inside an engine: ask the engine's own API to generate"
        )
        yield pb.GenerateEvent()  # never: it makes this a stream

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        """Waits; whoever runs the engine's front sends it no more requests."""
        budget_s = context.time_remaining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if budget_s is None else max(0.0, budget_s - 0.1)):
                while self._num_prompts:
                    await asyncio.sleep(0.02)
        return pb.DrainResponse(remaining=self._num_prompts)

    @property
    def _num_prompts(self) -> int:
        return self.prompts.num_prompts if self._is_started else 0

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        reason = clip_reason(request.reason) or "aborted by an operator"
        known = self.requests.request_ids if self._is_started else ()
        attempts = [name for name in known if is_attempt_of(name, request.request_id)]
        found = [self.requests.abort(name, TransferAborted(reason, is_by_operator=True)) for name in attempts]
        return pb.AbortResponse(found=any(found))

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        peers = self.peers.peers if self._is_started else []
        return pb.NodeStatus(
            role="decode",
            state="ready",
            instance=instance_to_proto(self._instance),
            uptime_s=time.monotonic() - self._started_s,
            running_requests=self._num_prompts,
            ranks=[pb.RankStatus(**report.status) for report in self._reports()],
            peers=[peer_status(peer) for peer in peers],
            links=links_of(peers),
            ready=self._is_started,
            not_ready_reason="" if self._is_started else "it is starting",
        )
