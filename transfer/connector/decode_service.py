"""Join prefill nodes and serve their calls, in the leader of a connector's decode side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc

from transfer.config import ConnectorConfig
from transfer.connector.attempt import IncomingObserver
from transfer.connector.bound_prompts import BoundPrompt, BoundPrompts
from transfer.connector.incoming import IncomingTransfers
from transfer.connector.prefill_nodes import PrefillNodes, show_peers
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.rank_report import RankReady, RankReport
from transfer.connector.side_service import SideNode, SideService
from transfer.errors import LocalProtocolError, PeerUnreachable, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.discovery import DiscoveryView, open_discovery
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.tracing import Tracer


class DecodeService(SideService, pb_grpc.DecodeControlServicer):
    """See the module's docstring. Owned by its process's loop. It does not implement `Generate`: requests come through the
    engine's own API.

    Args:
        security: TLS or plain text of calls to prefill nodes.
        tracer: Records spans of fetches; None disables tracing.
    """

    def __init__(
        self,
        *,
        node: SideNode,
        config: ConnectorConfig,
        hellos: tuple[RankReady, ...],
        security: Security,
        broadcast: Callable[[object], None],
        reports: Callable[[], Sequence[RankReport]],
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(node=node, role="decode", hellos=hellos, reports=reports)
        self._config = config
        self._hellos = hellos
        self._security = security
        self._broadcast = broadcast
        self._tracer = tracer
        self._discovery = open_discovery(config.discovery, config.peers.prefill_nodes, security)
        self.nodes: PrefillNodes
        self.prompts: BoundPrompts
        self.requests: IncomingTransfers[BoundPrompt]
        self._is_started = False

    def start(self, address: str) -> None:
        """Join the prefill nodes in the settings or from discovery.

        Args:
            address: Address at which their leaders reach this servicer. An instance of both sides is never its own prefill node.
        """
        config = self._config
        self._discovery.start()
        self.nodes = PrefillNodes(
            (),
            config=config,
            hellos=self._hellos,
            security=self._security,
            decode_address=address,
            metrics=self.metrics,
            broadcast=self._broadcast,
            on_lost=lambda peer, reason: self.requests.on_peer_lost(peer, reason),
            on_change=lambda: self.requests.peers_changed(),
            view=(lambda: self._discovery.view) if config.discovery.finds_nodes else None,
            prefix_tokens=config.placement.prefix_tokens or 0,
        )
        self.prompts = BoundPrompts(
            peers=self.nodes,
            limits=config.limits,
            own=self.instance,
            may_join=config.join_on_request,
            broadcast=self._broadcast,
            observer=IncomingObserver(
                on_outcome=self.metrics.request_ended,
                on_queue_seconds=self.metrics.histogram("queue_seconds").observe,
                on_retry=self.metrics.counter("retries").inc,
                on_given_up=self.metrics.request_given_up,
            ),
            tracer=self._tracer,
        )
        self.requests = self.prompts.transfers
        self._is_started = True
        self.nodes.start()
        self._discovery.listen(lambda found: self.nodes.use([one for one in found if one != address]))

    async def close(self) -> None:
        await self._discovery.close()
        if self._is_started:
            await self.prompts.close()
            await self.nodes.close()

    def on_rank_message(self, rank: int, message: Any) -> None:
        if not self._is_started:
            return  # about unknown ranks that have attached: no prefill node was joined before
        if not self.requests.on_message(rank, message):
            raise LocalProtocolError(f"a connector's decode leader cannot serve {type(message).__name__}")

    @property
    def num_joined(self) -> int:
        """Prefill nodes that are joined."""
        return sum(peer.state == "joined" for peer in self.peers)

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is wanted."""
        return not self._is_started or not self.prompts.num_prompts

    # Implementation of `Side`

    @property
    def in_flight(self) -> IncomingTransfers[BoundPrompt] | None:
        return self.requests if self._is_started else None

    @property
    def peers(self) -> Sequence[PrefillPeer]:
        return self.nodes.peers if self._is_started else ()

    @property
    def discovery_view(self) -> DiscoveryView:
        return self._discovery.view

    def show(self) -> Mapping[str, int]:
        return show_peers(self.peers, self.metrics)

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
