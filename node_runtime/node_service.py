"""Serve operators in every leader, of a daemon or an engine: `NodeControl`, the status page and the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import grpc
import structlog

import transfer
from node_runtime.health import Readiness
from node_runtime.peer_look_client import PeerLook
from node_runtime.status_page import MAX_REQUESTS, Picture, StatusPage
from transfer.config import ServerConfig
from transfer.config.operation import StatusPageConfig
from transfer.connector.side_service import Draining, DrainReason, Side
from transfer.errors import ConfigError
from transfer.log_rate_limiter import LogRateLimiter
from transfer.logs import log_level, set_log_level
from transfer.messages import clip_reason
from transfer.metrics import MetricFamily
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.refusals import log_refusal
from transfer.registry.guard import Refusal
from transfer.registry.security import MutualTls, Security
from transfer.registry.server import RegistryServer, host_port, serve
from transfer.registry.status import end_call, end_with

CLOSE_GRACE_S = 0.2
ANSWER_S = 0.1  # time before a call's deadline that its answer needs
DRAIN_LOOK_S = 0.02
MAX_LISTED = 1000  # requests in an answer; 300 bytes each
CERTIFICATE_LOOK_S = 10.0
"""Seconds between two checks of the certificate files, so that problems are reported even while no client connects."""

log = structlog.get_logger(__name__)


class NodeHost(Protocol):
    """The process of a leader."""

    @property
    def state(self) -> str:
        """The state apart from a drain: "starting" or "ready"."""
        ...

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the ranks."""
        ...

    @property
    def http_port(self) -> int:
        """Port of the HTTP server; 0 before it listens."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether the process has been asked to end."""
        ...

    def readiness(self) -> Readiness:
        """Return whether requests can be served, as `/readyz` reports."""
        ...


class NodeService(pb_grpc.NodeControlServicer):
    """The operators' interface of a leader with one or two sides. Owned by the leader's loop.

    Args:
        host: Process of the leader.
        set_rank_log_level: Sets the log level of the ranks.
        security: TLS or plain text of calls to the node.
        server: Addresses on which it listens.
        page: Settings of the status page.
    """

    def __init__(
        self,
        *,
        host: NodeHost,
        set_rank_log_level: Callable[[str], None],
        security: Security,
        server: ServerConfig,
        page: StatusPageConfig,
    ) -> None:
        self.sides: Sequence[Side] = ()
        """One or two, decode first; set by the subclass."""
        self.undone_by_operator: Collection[DrainReason] = tuple(DrainReason)
        """The reasons of a drain that `Undrain` withdraws."""
        self._host = host
        self._set_rank_log_level = set_rank_log_level
        self.security = security
        self._listens = server
        self._address = ""
        self._draining = Draining()
        self._refused = LogRateLimiter()
        self._looking: asyncio.Task[None] | None = None
        self._server: RegistryServer | None = None
        self._peer_look = PeerLook(security)
        self._started_s = time.monotonic()
        self.status_page = StatusPage(self._picture, shows_request_ids=page.request_ids) if page.enabled else None

    # Life

    async def _serve(
        self,
        *,
        prefill_control: pb_grpc.PrefillControlServicer | None,
        decode_control: pb_grpc.DecodeControlServicer | None,
        node_control: pb_grpc.NodeControlServicer,
        on_refused: Callable[[Refusal], None],
    ) -> str:
        """Open the gRPC port and return the address for peers."""
        self._server = await serve(
            self._listens.host,
            self._listens.port,
            prefill_control=prefill_control,
            decode_control=decode_control,
            node_control=node_control,
            security=self.security,
            on_refused=on_refused,
        )
        if isinstance(self.security, MutualTls):
            self._looking = asyncio.ensure_future(self._look_at_certificates(self.security))
        return host_port(self._listens.advertised_host, self._server.port)

    async def close(self) -> None:
        await self._peer_look.close()
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.close(grace_s=CLOSE_GRACE_S)

    async def _look_at_certificates(self, tls: MutualTls) -> None:
        """Log problems of new files, and once a minute that the certificate in use has expired."""
        while True:
            await asyncio.sleep(CERTIFICATE_LOOK_S)
            certificate = await asyncio.to_thread(tls.files.current)
            if certificate.not_after_s < time.time() and self._refused.is_due(certificate.not_after_s):
                log.error("certificate_expired", names=str(certificate.names), problem=tls.files.problem)

    def _on_refused(self, refusal: Refusal) -> None:
        self.sides[0].metrics.counter("refused_calls", method=refusal.method).inc()
        log_refusal(refusal, self._refused)

    async def _set_serving(self, is_serving: bool, *, absent: str | None = None) -> None:
        """Update gRPC's health service and discovery; see `RegistryServer.set_serving` for `absent`."""
        is_serving = is_serving and not self._draining.is_on
        if self._server is not None:
            await self._server.set_serving(is_serving, absent=absent)
        for side in self.sides:
            side.announce(is_serving)

    # Drain

    @property
    def draining(self) -> Draining:
        """Reason for which the node takes no new requests, if it takes none."""
        return self._draining

    @property
    def num_in_flight(self) -> int:
        every = [side.in_flight for side in self.sides]
        return sum(requests.num_queued + requests.num_running for requests in every if requests is not None)

    async def drain(self, reason: DrainReason = DrainReason.OPERATOR) -> int:
        """Wait until nothing is in flight, or the reason is withdrawn; return the number of requests left."""
        self._draining.begin(reason)
        await self._set_serving(False)
        while (remaining := self.num_in_flight) and self._draining.is_for(reason):
            await asyncio.sleep(DRAIN_LOOK_S)
        return remaining

    async def _end_drain(self, *reasons: DrainReason) -> None:
        self._draining.end(*reasons)
        await self._set_serving(any(side.in_flight is not None for side in self.sides))

    # Views

    def _state(self) -> str:
        return "draining" if self._draining.is_on and self._host.state == "ready" else self._host.state

    def status(self) -> pb.NodeStatus:
        """Return the node's own status. The report of a rank is at most as old as the pause between its reports."""
        first, *others = (self.status_of(side) for side in self.sides)
        for other in others:
            first.other_side.CopyFrom(other)
        return first

    def status_of(self, side: Side) -> pb.NodeStatus:
        """Return the status of the node with that side only."""
        status = side.describe()
        readiness = self._host.readiness()
        status.MergeFrom(
            pb.NodeStatus(
                state=self._state(),
                uptime_s=time.monotonic() - self._started_s,
                restarts=self._host.num_restarts,
                ready=readiness.is_ready,
                not_ready_reason="" if readiness.is_ready else readiness.reason,
                version=transfer.__version__,
                draining=self._draining.is_on,
                log_level=log_level(),
                http_port=self._host.http_port,
                time_s=time.time(),
            )
        )
        return status

    def requests_in_flight(self, limit: int) -> pb.ListRequestsResponse:
        """Return the oldest `limit` requests; 0 means `MAX_LISTED`.

        Raises:
            ConfigError: `limit` is larger.
        """
        if limit > MAX_LISTED:
            raise ConfigError(f"limit is {limit}; it must be at most {MAX_LISTED}")
        views = [(side.role, view) for side in self.sides if side.in_flight is not None for view in side.in_flight.views()]
        views.sort(key=lambda one: -one[1].age_s)
        return pb.ListRequestsResponse(
            requests=[pb.RequestStatus(role=role, **asdict(view)) for role, view in views[: limit or MAX_LISTED]],
            total=len(views),
        )

    async def _picture(self) -> Picture:
        """Return the content of the status page: this node, and the joined nodes of the other tier."""
        status = self.status()
        peers = (*status.peers, *status.other_side.peers)
        joined = dict.fromkeys(peer.address for peer in peers if peer.state in ("joined", "draining"))
        others = await self._peer_look.look(list(joined))
        return Picture(address=self._address, status=status, requests=self.requests_in_flight(MAX_REQUESTS), others=others)

    def collect_metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of leader and ranks."""
        return [family for side in self.sides for family in self._collect(side)]

    def _collect(self, side: Side) -> list[MetricFamily]:
        requests, metrics = side.in_flight, side.metrics
        metrics.node_state(
            state=self._state(),
            queued=requests.num_queued if requests is not None else 0,
            running=requests.num_running if requests is not None else 0,
            peers=side.show(),
            restarts=self._host.num_restarts,
        )
        if isinstance(self.security, MutualTls):
            files = self.security.files
            metrics.certificate(not_after_s=files.current().not_after_s, is_stale=bool(files.problem))
        if (found := side.discovery_view) is not None:
            metrics.discovery(
                addresses=len(found.addresses),
                age_s=found.age_s,
                interval_s=found.interval_s,
                failures=found.failures,
                refused=found.refused,
            )
        return metrics.collect([report.metrics for report in side.reports])

    # NodeControl

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        return self.status()

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListRequestsResponse:
        try:
            return self.requests_in_flight(request.limit)
        except ConfigError as error:
            await end_with(context, error)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        return self.abort_in(self.sides, request)

    def abort_in(self, sides: Iterable[Side], request: pb.AbortRequest) -> pb.AbortResponse:
        """Abort a request in those sides only."""
        reason = clip_reason(request.reason) or "aborted by an operator"
        found = [side.abort(request.request_id, reason) for side in sides]
        return pb.AbortResponse(found=any(found))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        log.info("drain_requested")
        budget_s, undone_with = context.time_remaining(), 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if budget_s is None else max(0.0, budget_s - ANSWER_S)):
                undone_with = await self.drain()
        if undone_with:
            await end_call(
                context, grpc.StatusCode.FAILED_PRECONDITION, f"the drain was undone with {undone_with} requests in flight"
            )
        return pb.DrainResponse(remaining=self.num_in_flight)

    async def Undrain(self, request: pb.UndrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.UndrainResponse:
        if self._host.is_stopping:
            await end_call(context, grpc.StatusCode.FAILED_PRECONDITION, "the node is being stopped")
        was_draining = self._draining.is_on
        if was_draining:
            log.info("undrained")
            await self._end_drain(*self.undone_by_operator)
        return pb.UndrainResponse(was_draining=was_draining)

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetLogLevelResponse:
        before = log_level()
        try:
            set_log_level(request.level)
        except ConfigError as error:
            await end_with(context, error)
        self._set_rank_log_level(request.level)
        if request.level != before:
            log.warning("log_level_changed", level=request.level, before=before)
        return pb.SetLogLevelResponse(level_before=before)
