"""What the leaders of both roles do alike: hold the ranks, serve gRPC, drain, and answer an operator (`NodeControl`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
import structlog

import transfer
from node_runtime.daemon import Daemon, NodeState
from node_runtime.exit_codes import NO_MEMORY
from node_runtime.node_role import ROLE_NAMES
from node_runtime.open_tracer import open_tracer
from node_runtime.peer_look_client import PeerLook
from node_runtime.preloading import preloaded_modules
from node_runtime.rank_link import RankCodec
from node_runtime.rank_worker import RankSpec
from node_runtime.role_service import RoleServices, service_of
from node_runtime.status_page import MAX_REQUESTS, Picture, StatusPage
from node_runtime.supervisor import RankSide, RankStartError, RankSupervisor
from transfer.config import NodeConfig
from transfer.connector.draining import Draining, DrainReason
from transfer.connector.rank_report import RankMemory
from transfer.connector.request_view import RequestView
from transfer.errors import ConfigError, NodeDraining, PeerUnreachable, TransferAborted, TransferError
from transfer.instance import Instance
from transfer.log_rate_limiter import LogRateLimiter
from transfer.logs import log_level, set_log_level
from transfer.loop_turns import turns_of
from transfer.messages import clip_reason
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.refusals import log_refusal, say_request_refused
from transfer.registry.convert import instance_to_proto
from transfer.registry.discovery import DiscoveryView
from transfer.registry.guard import Refusal
from transfer.registry.security import MutualTls, security_of
from transfer.registry.server import RegistryServer, host_port, serve
from transfer.registry.status import end_call, end_with
from transfer.transfer_ids import is_attempt_of

CLOSE_GRACE_S = 0.2
ANSWER_S = 0.1  # before a call's deadline its answer must be on its way
DRAIN_LOOK_S = 0.02
MAX_LISTED = 1000  # requests in an answer; 300 bytes each
CERTIFICATE_LOOK_S = 10.0
"""Seconds between looks at the certificate files, for their news to be told also while nobody connects."""

log = structlog.get_logger(__name__)


class Requests(Protocol):
    """A role's requests, as far as both roles' leaders know them."""

    @property
    def request_ids(self) -> tuple[str, ...]: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def views(self) -> Sequence[RequestView]:
        """Of all requests in flight."""
        ...

    def abort(self, request_id: str, error: TransferError) -> bool: ...


class Life(Protocol):
    """What exists only while the ranks live."""

    @property
    def instance(self) -> Instance: ...

    @property
    def memory(self) -> Sequence[RankMemory]: ...

    @property
    def requests(self) -> Requests: ...


ConfigT = TypeVar("ConfigT", bound=NodeConfig)
LifeT = TypeVar("LifeT", bound=Life)


class Leader(Generic[ConfigT, LifeT], pb_grpc.NodeControlServicer):
    """The leader of a node, without the methods of its role: a `node_runtime.daemon.RoleServer` and a gRPC servicer.

    Args:
        daemon: Runs this leader.
        config: The node's settings.
        entry: Entry point of a rank process.
        codec: Messages between leader and ranks.
        on_rank_message: (rank, message) of the running life.
    """

    def __init__(
        self,
        daemon: Daemon,
        config: ConfigT,
        *,
        entry: Callable[[RankSpec], None],
        codec: RankCodec,
        on_rank_message: Callable[[int, Any], None],
    ) -> None:
        self.config = config
        self.metrics = NodeMetrics(role=config.role)
        self.metrics.limits(max_queued=config.limits.max_queued_requests, max_running=config.limits.max_running_requests)
        self.security = security_of(config)
        self.tracer = open_tracer(config)
        self._is_switching = False
        self._is_handed_over = False  # the change of role is the daemon's now, and cannot be called off
        self._switching: asyncio.Future[None] | None = None
        self._refused = LogRateLimiter()
        self._looking: asyncio.Task[None] | None = None
        self._daemon = daemon
        self._ranks = RankSide(config=config, entry=entry, codec=codec, on_message=on_rank_message)
        self._life: LifeT | None = None
        self._address = ""
        self._server: RegistryServer | None = None
        self._services: RoleServices | None = None
        self._supervisor: RankSupervisor | None = None
        self._draining = Draining()
        self._peer_look = PeerLook(self.security)
        page = config.status_page
        self.status_page = StatusPage(self._picture, shows_request_ids=page.request_ids) if page.enabled else None

    # Role

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        self._supervisor = RankSupervisor(
            self.config,
            self._ranks.entry,
            self._ranks.codec,
            preload=preloaded_modules(self.config),
            on_message=self._ranks.on_message,
            on_lost=on_lost,
            other_config=self._daemon.other_config,
        )
        return self._supervisor

    @property
    def ranks(self) -> RankSide:
        return self._ranks

    @property
    def life(self) -> LifeT | None:
        """The present life of the ranks; None means that there are no ranks."""
        return self._life

    def take_over(self, before: Leader[Any, Any]) -> None:
        """The ports and the ranks of the node are this role's from now on, and so is an operator's drain: it is the node's."""
        self._server, self._services = before._server, before._services
        self._supervisor, self._looking = before._supervisor, before._looking
        before._server = before._services = before._supervisor = before._looking = None
        if before._draining.is_for(DrainReason.OPERATOR):
            self._draining.begin(DrainReason.OPERATOR)
        before._draining.end()
        assert self._services is not None, "a leader of one of two roles has these"
        self._services.leader = self
        self._open_outside(before._address)

    def go_outside(self, address: str) -> None:
        """Begin what else the role does under the node's address; called once, before its first life."""

    def _open_outside(self, address: str) -> None:
        self.metrics.watch_loop(turns_of(asyncio.get_running_loop()))
        is_first, self._address = not self._address, address
        if is_first:
            self.go_outside(address)

    async def drain(self, reason: DrainReason = DrainReason.OPERATOR) -> int:
        """Until nothing is in flight any more, or the reason is withdrawn; what is left."""
        self._draining.begin(reason)
        await self._set_serving(False)
        while (remaining := self.num_in_flight) and self._draining.is_for(reason):
            await asyncio.sleep(DRAIN_LOOK_S)
        return remaining

    @property
    def num_in_flight(self) -> int:
        life = self._life
        return 0 if life is None else life.requests.num_queued + life.requests.num_running

    async def close(self) -> None:
        await self._peer_look.close()
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.close(grace_s=CLOSE_GRACE_S)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    # For the role

    async def _listen(
        self,
        *,
        prefill_control: pb_grpc.PrefillControlServicer | None = None,
        decode_control: pb_grpc.DecodeControlServicer | None = None,
    ) -> str:
        """Serve the role's API; returns the address that peers are told. A node of two roles has both roles' services from the
        start, so that neither the port nor a connection to it has to change."""
        server = self.config.server
        node_control: pb_grpc.NodeControlServicer = self
        on_refused = self._on_refused
        if self._daemon.other_config is not None:
            services = self._services = RoleServices(self)
            on_refused = partial(_refused_by_leader_of, services)
            prefill_control, decode_control = self._services.prefill_control, self._services.decode_control
            node_control = self._services.node_control
        self._server = await serve(
            server.host,
            server.port,
            prefill_control=prefill_control,
            decode_control=decode_control,
            node_control=node_control,
            security=self.security,
            on_refused=on_refused,
        )
        if isinstance(self.security, MutualTls):
            self._looking = asyncio.ensure_future(self._look_at_certificates(self.security))
        self._open_outside(host_port(server.advertised_host, self._server.port))
        return self._address

    async def _look_at_certificates(self, tls: MutualTls) -> None:
        """Says what is wrong with new files, and once a minute that the certificate in use has expired."""
        while True:
            await asyncio.sleep(CERTIFICATE_LOOK_S)
            certificate = await asyncio.to_thread(tls.files.current)
            if certificate.not_after_s < time.time() and self._refused.is_due(certificate.not_after_s):
                log.error("certificate_expired", names=str(certificate.names), problem=tls.files.problem)

    def _on_refused(self, refusal: Refusal) -> None:
        self.metrics.call_refused(refusal.method)
        log_refusal(refusal, self._refused)

    async def _set_serving(self, is_serving: bool) -> None:
        if self._server is not None:
            absent = None if self._services is None else service_of(*(set(ROLE_NAMES) - {self.config.role}))
            await self._server.set_serving(is_serving and not self._draining.is_on, absent=absent)

    def broadcast(self, message: object) -> None:
        if self._supervisor is not None:
            self._supervisor.broadcast(message)

    def lose(self, reason: str) -> None:
        """Give this life of the ranks up. Where a rank has died, whose end another one heard of first, that is the reason."""
        if self._supervisor is not None:
            self._supervisor.lose_soon(reason)

    async def _life_or_end(self, context: grpc.aio.ServicerContext[Any, Any], *, is_new_work: bool) -> LifeT:
        """The life that a call is for; without one, or where a draining node is asked for new work, the call ends."""
        try:
            return self._checked_life(is_new_work=is_new_work)
        except TransferError as error:
            await end_with(context, error)

    async def _life_for_request(self, context: grpc.aio.ServicerContext[Any, Any]) -> LifeT:
        """As `_life_or_end` for new work; what is turned away is a request, and counted as one."""
        try:
            return self._checked_life(is_new_work=True)
        except TransferError as error:
            self._count_refused(error)
            await end_with(context, error)

    def _checked_life(self, *, is_new_work: bool) -> LifeT:
        if self._life is None:
            raise PeerUnreachable(f"the {self.config.role} node is {self._daemon.state}")
        if is_new_work and self._draining.is_on:
            raise NodeDraining(f"the {self.config.role} node is draining")
        return self._life

    def _count_refused(self, error: TransferError) -> None:
        """A request is turned away before it was queued."""
        self.metrics.request_ended("refused")
        say_request_refused(error, self._refused)

    def _render_metrics(self, peers: Mapping[str, int]) -> bytes:
        """The exposition text of leader and ranks; `peers`: their number by state."""
        life = self._life
        self.metrics.node_state(
            state=self._state,
            queued=life.requests.num_queued if life is not None else 0,
            running=life.requests.num_running if life is not None else 0,
            peers=peers,
            restarts=self._daemon.num_restarts,
        )
        if isinstance(self.security, MutualTls):
            files = self.security.files
            self.metrics.certificate(not_after_s=files.current().not_after_s, is_stale=bool(files.problem))
        reports = self._supervisor.reports if self._supervisor is not None else {}
        return self.metrics.render([report.metrics for report in reports.values()])

    @property
    def _state(self) -> str:
        drains = self._draining.is_on and self._daemon.state is NodeState.READY
        return str(NodeState.DRAINING if drains else self._daemon.state)

    def _show_discovery(self, view: DiscoveryView, *, interval_s: float) -> None:
        self.metrics.discovery(
            addresses=len(view.addresses), age_s=view.age_s, interval_s=interval_s, failures=view.failures, refused=view.refused
        )

    def _status(
        self, *, peers: Iterable[pb.PeerStatus], links: Iterable[pb.LinkStatus], discovery: DiscoveryView | None = None
    ) -> pb.NodeStatus:
        """What the node says of itself; what a rank said last, at most `rank_process.REPORT_S` old where its worker's status has
        changed, and `rank_process.SIGN_OF_LIFE_S` in figures and metrics."""
        life = self._life
        reports = self._supervisor.reports if self._supervisor is not None else {}
        readiness = self._daemon.readiness()
        return pb.NodeStatus(
            role=self.config.role,
            state=self._state,
            instance=instance_to_proto(life.instance) if life is not None else None,
            uptime_s=time.monotonic() - self._daemon.started_s,
            queued_requests=life.requests.num_queued if life is not None else 0,
            running_requests=life.requests.num_running if life is not None else 0,
            ranks=[pb.RankStatus(**reports[rank].status) for rank in sorted(reports)],
            peers=peers,
            links=links,
            restarts=self._daemon.num_restarts,
            ready=readiness.is_ready,
            not_ready_reason="" if readiness.is_ready else readiness.reason,
            memory_plan=memory_to_proto(life.memory) if life is not None else None,
            version=transfer.__version__,
            draining=self._draining.is_on,
            log_level=log_level(),
            http_port=self._daemon.http_port,
            time_s=time.time(),
            discovery=_discovery_to_proto(discovery) if discovery is not None else None,
        )

    def status(self) -> pb.NodeStatus:
        """What the node says of itself; the role adds its peers and links to `_status`."""
        raise NotImplementedError

    async def _picture(self) -> Picture:
        """What the page shows: both tiers, as far as this node knows the other one."""
        status = self.status()
        others = await self._peer_look.look([peer.address for peer in status.peers if peer.state in ("joined", "draining")])
        return Picture(address=self._daemon.address, status=status, requests=self.requests_in_flight(MAX_REQUESTS), others=others)

    # Both roles' API

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        return self.status()

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        if self._life is None:
            return pb.AbortResponse(found=False)
        requests = self._life.requests
        reason = clip_reason(request.reason) or "aborted by an operator"
        attempts = [name for name in requests.request_ids if is_attempt_of(name, request.request_id)]
        found = [requests.abort(name, TransferAborted(reason, is_by_operator=True)) for name in attempts]
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
        if self._daemon.is_stopping:
            await end_call(context, grpc.StatusCode.FAILED_PRECONDITION, "the node is being stopped")
        was_draining = self._draining.is_on
        if was_draining:
            log.info("undrained")
            # A change of role that waits is called off; one that has begun ends soon, and until then no request can be served.
            await self._end_drain(*({DrainReason.OPERATOR} if self._is_handed_over else DrainReason))
        return pb.UndrainResponse(was_draining=was_draining)

    async def _end_drain(self, *reasons: DrainReason) -> None:
        self._draining.end(*reasons)
        await self._set_serving(self._life is not None)

    async def SwitchRole(
        self, request: pb.SwitchRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SwitchRoleResponse:
        refused, code = "", grpc.StatusCode.FAILED_PRECONDITION
        if request.role not in ROLE_NAMES:
            refused = f"role is {request.role!r:.40}; it must be one of {', '.join(ROLE_NAMES)}"
            code = grpc.StatusCode.INVALID_ARGUMENT
        elif not 0.0 <= request.drain_budget_s < math.inf:
            refused = f"drain_budget_s is {request.drain_budget_s:g}; it must be a number of seconds, at least 0"
            code = grpc.StatusCode.INVALID_ARGUMENT
        elif request.role != self.config.role and self._daemon.other_config is None:
            refused = f"the {self.config.role} node has no settings for the other role: other_role must name a file of them"
        elif self._daemon.is_stopping:
            refused = "the node is being stopped"
        elif self._is_switching or self._life is None:
            refused = "a change of role is under way" if self._is_switching else f"the node is {self._daemon.state}"
            code = grpc.StatusCode.UNAVAILABLE
        elif request.role != self.config.role and not self._daemon.can_switch:
            refused = f"engine is {self.config.engine}, which cannot change its role (it has no switch_role)"
        if refused:
            await end_call(context, code, refused)
        role_before = self.config.role
        if request.role != role_before:
            self._is_switching = True
            try:
                await self._switch_when_drained(context, request.drain_budget_s)
            finally:
                self._is_switching = False
        return pb.SwitchRoleResponse(role=request.role, role_before=role_before, incarnation=self._daemon.incarnation)

    async def _switch_now(self) -> None:
        try:
            await self._daemon.switch_role()
        except TransferError:
            if not self._daemon.is_stopping:
                await self._end_drain(DrainReason.SWITCH)
            raise
        finally:
            self._is_handed_over = False

    async def _switch_when_drained(self, context: grpc.aio.ServicerContext[Any, Any], asked_s: float) -> None:
        """End the call where it cannot be done; the node is then as it was. `asked_s`: for the drain; 0: as others allow."""
        budget_s = min(self.config.drain_timeout_s, asked_s or math.inf)
        if (remaining_s := context.time_remaining()) is not None:
            budget_s = min(budget_s, max(0.0, remaining_s - ANSWER_S))
        refused = ""
        log.info("role_switch_requested", in_flight=self.num_in_flight)
        is_handed_over = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(budget_s):
                    await self.drain(DrainReason.SWITCH)
            if not self._draining.is_for(DrainReason.SWITCH):
                refused, code = "the drain was undone meanwhile; the node stays what it is", grpc.StatusCode.FAILED_PRECONDITION
            elif self.num_in_flight:
                refused = f"{self.num_in_flight} requests are still in flight after {budget_s:.3g} s; the node stays what it is"
                code = grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                is_handed_over = self._is_handed_over = True
                self._switching = asyncio.ensure_future(self._switch_now())
                await asyncio.shield(self._switching)  # goes on when the caller has gone away
        except PeerUnreachable as error:
            refused, code = str(error), grpc.StatusCode.UNAVAILABLE
        except TransferError as error:
            is_memory = isinstance(error, RankStartError) and error.exit_code == NO_MEMORY
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_memory else grpc.StatusCode.INTERNAL
            refused = f"the node could not change its role, and keeps the one that it had: {error}"
        finally:
            if not is_handed_over and not self._daemon.is_stopping:
                await self._end_drain(DrainReason.SWITCH)
        if refused:
            await end_call(context, code, refused)

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetLogLevelResponse:
        before = log_level()
        try:
            set_log_level(request.level)
        except ConfigError as error:
            await end_with(context, error)
        if self._supervisor is not None:
            self._supervisor.set_log_level(request.level)
        if request.level != before:
            log.warning("log_level_changed", level=request.level, before=before)
        return pb.SetLogLevelResponse(level_before=before)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListRequestsResponse:
        try:
            return self.requests_in_flight(request.limit)
        except ConfigError as error:
            await end_with(context, error)

    def requests_in_flight(self, limit: int) -> pb.ListRequestsResponse:
        """The oldest `limit` requests; 0: `MAX_LISTED`.

        Raises:
            ConfigError: `limit` is above that.
        """
        if limit > MAX_LISTED:
            raise ConfigError(f"limit is {limit}; it must be at most {MAX_LISTED}")
        views = sorted(self._life.requests.views() if self._life is not None else (), key=lambda view: -view.age_s)
        return pb.ListRequestsResponse(
            requests=[pb.RequestStatus(**asdict(view)) for view in views[: limit or MAX_LISTED]], total=len(views)
        )


def _discovery_to_proto(view: DiscoveryView) -> pb.DiscoveryStatus:
    return pb.DiscoveryStatus(
        where=view.where,
        addresses=view.addresses,
        waiting=[f"{address}: {reason}" for address, reason in view.waiting.items()],
        problem=view.problem,
        age_s=view.age_s,
        failures=view.failures,
        refused_entries=sum(view.refused.values()),
    )


def _refused_by_leader_of(services: RoleServices, refusal: Refusal) -> None:
    cast("Leader[Any, Any]", services.leader)._on_refused(refusal)


def memory_to_proto(ranks: Sequence[RankMemory]) -> pb.MemoryPlan | None:
    """What the node says of its memory: rank 0's plan, and every rank's warnings; None where the engine makes no plan."""
    first = ranks[0]
    if not first.plan:
        return None
    plan = first.plan
    names = (
        "policy", "static_fraction", "device_bytes", "reserved_bytes", "cell_bytes", "max_total_tokens", "free_bytes", "advice",
    )  # fmt: skip
    lines = [
        pb.MemoryLine(
            name=line["name"],
            planned_bytes=line["bytes"],
            formula=line["formula"],
            inside=line["inside"],
            real_bytes=first.real.get(line["name"]),
        )
        for line in plan["lines"]
    ]
    warnings = [f"rank {rank}: {warning}" for rank, memory in enumerate(ranks) for warning in memory.warnings]
    return pb.MemoryPlan(**{name: plan[name] for name in names}, lines=lines, warnings=warnings)
