"""Common part of both daemons' leaders: own the ranks, serve gRPC, and change the role of their node."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
import structlog

from node_runtime.daemon import Daemon
from node_runtime.exit_codes import DOES_NOT_FIT
from node_runtime.node_role import ROLE_NAMES, preloaded_modules
from node_runtime.node_service import ANSWER_S, NodeService
from node_runtime.rank_link import RankCodec
from node_runtime.rank_process import run_rank
from node_runtime.rank_setup import open_tracer
from node_runtime.role_service import RoleServices, service_of
from node_runtime.supervisor import RankSide, RankStartError, RankSupervisor
from transfer.config import NodeConfig
from transfer.connector.rank_report import RankMemory, RankReport
from transfer.connector.side_service import DrainReason, Requests, Side
from transfer.errors import NodeDraining, PeerUnreachable, TransferError
from transfer.instance import Instance
from transfer.loop_turns import turns_of
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.refusals import say_request_refused
from transfer.registry.guard import Refusal
from transfer.registry.security import security_of
from transfer.registry.status import end_call, end_with

log = structlog.get_logger(__name__)


class Life(Protocol):
    """State of a leader that exists only while the ranks live."""

    @property
    def instance(self) -> Instance: ...

    @property
    def memory(self) -> Sequence[RankMemory]: ...

    @property
    def requests(self) -> Requests: ...


ConfigT = TypeVar("ConfigT", bound=NodeConfig)
LifeT = TypeVar("LifeT", bound=Life)


class Leader(NodeService, Side, Generic[ConfigT, LifeT]):
    """The leader of a node, without the methods of its role: a `node_runtime.daemon.RoleServer`, and the one side of its node.

    Args:
        daemon: The daemon that runs this leader.
        config: Settings of the node.
        codec: Messages between leader and ranks.
        on_rank_message: Called with the rank and each message of the running life.
    """

    def __init__(
        self,
        daemon: Daemon,
        config: ConfigT,
        *,
        codec: RankCodec,
        on_rank_message: Callable[[int, Any], None],
    ) -> None:
        super().__init__(
            host=daemon,
            set_rank_log_level=self._set_log_level_of_ranks,
            security=security_of(config),
            server=config.server,
            page=config.status_page,
        )
        self.role = config.role
        self.metrics = NodeMetrics(role=config.role)
        self.sides = (self,)
        self.config = config
        self.metrics.limits(max_queued=config.limits.max_queued_requests, max_running=config.limits.max_running_requests)
        self.tracer = open_tracer(config.tracing, role=config.role)
        self._is_switching = False
        self._switching: asyncio.Future[None] | None = None
        self._daemon = daemon
        self.ranks = RankSide(config=config, codec=codec, on_message=on_rank_message)
        self._life: LifeT | None = None
        self._services: RoleServices | None = None
        self._supervisor: RankSupervisor | None = None

    # Role

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        self._supervisor = RankSupervisor(
            self.ranks,
            run_rank,
            preload=preloaded_modules(self.config),
            on_lost=on_lost,
            other_config=self._daemon.other_config,
        )
        return self._supervisor

    @property
    def life(self) -> LifeT | None:
        """The present life of the ranks; None means that there are no ranks."""
        return self._life

    def take_over(self, before: Leader[Any, Any]) -> None:
        """Take the ports, the ranks and an operator's drain from the leader of the other role."""
        self._server, self._services = before._server, before._services
        self._supervisor, self._looking = before._supervisor, before._looking
        before._server = before._services = before._supervisor = before._looking = None
        if before._draining.is_for(DrainReason.OPERATOR):
            self._draining.begin(DrainReason.OPERATOR)
        before._draining.end()
        assert self._services is not None, "a node of two roles has these"
        self._services.leader = self
        self._use_address(before._address)

    def start_discovery(self, address: str) -> None:
        """Begin discovery under the node's address; called once, before the first life of the role."""

    def _use_address(self, address: str) -> None:
        self.metrics.histogram("loop_turn_seconds").follow(turns_of(asyncio.get_running_loop()))
        is_first, self._address = not self._address, address
        if is_first:
            self.start_discovery(address)

    def _set_log_level_of_ranks(self, level: str) -> None:
        if self._supervisor is not None:
            self._supervisor.set_log_level(level)

    async def close(self) -> None:
        await super().close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    # Implementation of `Side`

    @property
    def in_flight(self) -> Requests | None:
        return None if self._life is None else self._life.requests

    @property
    def instance(self) -> Instance | None:
        return None if self._life is None else self._life.instance

    @property
    def reports(self) -> Sequence[RankReport]:
        reports = self._supervisor.reports if self._supervisor is not None else {}
        return [reports[rank] for rank in sorted(reports)]

    @property
    def memory(self) -> Sequence[RankMemory]:
        return () if self._life is None else self._life.memory

    # For the role

    async def _listen(
        self,
        *,
        prefill_control: pb_grpc.PrefillControlServicer | None = None,
        decode_control: pb_grpc.DecodeControlServicer | None = None,
    ) -> str:
        """Serve the API of the role and return the address for peers.

        A node of two roles has both roles' services from the start, so that its port and its connections stay.
        """
        node_control: pb_grpc.NodeControlServicer = self
        on_refused = self._on_refused
        if self._daemon.other_config is not None:
            services = self._services = RoleServices(self)
            on_refused = partial(_refused_by_leader_of, services)
            prefill_control, decode_control = self._services.prefill_control, self._services.decode_control
            node_control = self._services.node_control
        address = await self._serve(
            prefill_control=prefill_control,
            decode_control=decode_control,
            node_control=node_control,
            on_refused=on_refused,
        )
        self._use_address(address)
        return self._address

    async def _set_serving(self, is_serving: bool, *, absent: str | None = None) -> None:
        if self._services is not None:
            absent = service_of(*(set(ROLE_NAMES) - {self.config.role}))
        await super()._set_serving(is_serving, absent=absent)
        self.readiness_changed()

    def readiness_changed(self) -> None:
        """Call this after an event that can change `readiness()`."""
        self._daemon.readiness_changed()

    def broadcast(self, message: object) -> None:
        if self._supervisor is not None:
            self._supervisor.broadcast(message)

    def lose(self, reason: str) -> None:
        """End this life of the ranks. If a rank has died, its death becomes the reason."""
        if self._supervisor is not None:
            self._supervisor.lose_soon(reason)

    async def _life_or_end(self, context: grpc.aio.ServicerContext[Any, Any], *, is_new_work: bool) -> LifeT:
        """Return the life of the ranks; end the call if there is none, or if it brings new work to a draining node."""
        try:
            return self._checked_life(is_new_work=is_new_work)
        except TransferError as error:
            await end_with(context, error)

    async def _life_for_request(self, context: grpc.aio.ServicerContext[Any, Any]) -> LifeT:
        """Do as `_life_or_end` for new work, and count a refused request."""
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
        """Count and log a request that is refused before it is queued."""
        self.metrics.request_ended("refused")
        say_request_refused(error, self._refused)

    # NodeControl

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
            self.undone_by_operator = tuple(DrainReason)

    async def _switch_when_drained(self, context: grpc.aio.ServicerContext[Any, Any], asked_s: float) -> None:
        """Drain the node and change its role, or end the call and leave the node as it was.

        Args:
            asked_s: Longest time of the drain; 0 means that only the settings and the call's deadline limit it.
        """
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
                is_handed_over = True
                self.undone_by_operator = (DrainReason.OPERATOR,)  # a change of role that has begun cannot be undone
                self._switching = asyncio.ensure_future(self._switch_now())
                await asyncio.shield(self._switching)  # continues after the caller has disconnected
        except PeerUnreachable as error:
            refused, code = str(error), grpc.StatusCode.UNAVAILABLE
        except TransferError as error:
            is_memory = isinstance(error, RankStartError) and error.exit_code == DOES_NOT_FIT
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_memory else grpc.StatusCode.INTERNAL
            refused = f"the node could not change its role, and keeps the one that it had: {error}"
        finally:
            if not is_handed_over and not self._daemon.is_stopping:
                await self._end_drain(DrainReason.SWITCH)
        if refused:
            await end_call(context, code, refused)


def _refused_by_leader_of(services: RoleServices, refusal: Refusal) -> None:
    cast("Leader[Any, Any]", services.leader)._on_refused(refusal)
