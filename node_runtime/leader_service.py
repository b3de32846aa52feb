"""What the leaders of both roles do alike: hold the ranks, serve gRPC, drain, and answer an operator."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog

from node_runtime.daemon import Daemon
from node_runtime.rank_link import RankCodec
from node_runtime.rank_process import RankSpec
from node_runtime.rank_report import RankMemory
from node_runtime.rank_setup import preloaded_modules
from node_runtime.refusals import say_refused
from node_runtime.reminders import Reminders
from node_runtime.supervisor import RankSupervisor
from node_runtime.transfer_ids import is_try_of
from transfer.config import NodeConfig
from transfer.errors import PeerUnreachable, TransferAborted, TransferError
from transfer.instance import Instance, Link
from transfer.messages import clip_reason
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import instance_to_proto, link_to_proto
from transfer.registry.guard import Refusal
from transfer.registry.security import MutualTls, security_of
from transfer.registry.server import RegistryServer, host_port, serve
from transfer.registry.status import end_with

CLOSE_GRACE_S = 0.2
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


class Leader(Generic[ConfigT, LifeT]):
    """A node's leader but for what its role adds: a `node_runtime.daemon.Role` and half of the servicer of its API.

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
        self.security = security_of(config)
        self._refused = Reminders()
        self._looking: asyncio.Task[None] | None = None
        self._daemon = daemon
        self._entry = entry
        self._codec = codec
        self._on_rank_message = on_rank_message
        self._life: LifeT | None = None
        self._server: RegistryServer | None = None
        self._supervisor: RankSupervisor | None = None
        self._draining = asyncio.Event()

    # Role

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        self._supervisor = RankSupervisor(
            self.config,
            self._entry,
            self._codec,
            preload=preloaded_modules(self.config),
            on_message=self._on_rank_message,
            on_lost=on_lost,
        )
        return self._supervisor

    async def drain(self) -> int:
        self._draining.set()
        await self._set_serving(False)
        while self.num_in_flight:
            await asyncio.sleep(0.02)
        return 0

    @property
    def num_in_flight(self) -> int:
        life = self._life
        return 0 if life is None else life.requests.num_queued + life.requests.num_running

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            await self._server.close(grace_s=CLOSE_GRACE_S)

    # For the role

    async def _listen(
        self,
        *,
        prefill_control: pb_grpc.PrefillControlServicer | None = None,
        decode_control: pb_grpc.DecodeControlServicer | None = None,
    ) -> str:
        """Serve the role's API; returns the address that peers are told."""
        server = self.config.server
        self._server = await serve(
            server.host,
            server.port,
            prefill_control=prefill_control,
            decode_control=decode_control,
            security=self.security,
            on_refused=self._on_refused,
        )
        if isinstance(self.security, MutualTls):
            self._looking = asyncio.ensure_future(self._look_at_certificates(self.security))
        return host_port(server.advertised_host, self._server.port)

    async def _look_at_certificates(self, tls: MutualTls) -> None:
        """Says what is wrong with new files, and once a minute that the certificate in use has expired."""
        while True:
            await asyncio.sleep(CERTIFICATE_LOOK_S)
            certificate = await asyncio.to_thread(tls.files.current)
            if certificate.not_after_s < time.time() and self._refused.is_due(certificate.not_after_s):
                log.error("certificate_expired", names=str(certificate.names), problem=tls.files.problem)

    def _on_refused(self, refusal: Refusal) -> None:
        self.metrics.call_refused(refusal.method)
        say_refused(refusal, self._refused)

    async def _set_serving(self, is_serving: bool) -> None:
        if self._server is not None:
            await self._server.set_serving(is_serving and not self._draining.is_set())

    def broadcast(self, message: object) -> None:
        if self._supervisor is not None:
            self._supervisor.broadcast(message)

    def lose(self, reason: str) -> None:
        """Give this life of the ranks up. Where a rank has died, whose end another one heard of first, that is the reason."""
        if self._supervisor is not None:
            self._supervisor.lose_soon(reason)

    async def _life_or_end(self, context: grpc.aio.ServicerContext[Any, Any], *, is_new_work: bool) -> LifeT:
        """The life that a call is for; without one, or where a draining node is asked for new work, the call ends."""
        if self._life is None:
            await end_with(context, PeerUnreachable(f"the {self.config.role} node is {self._daemon.state}"))
        if is_new_work and self._draining.is_set():
            await end_with(context, PeerUnreachable(f"the {self.config.role} node is draining"))
        return self._life

    def _render_metrics(self, peers: Mapping[str, int]) -> bytes:
        """The exposition text of leader and ranks; `peers`: their number by state."""
        life = self._life
        self.metrics.node_state(
            state=str(self._daemon.state),
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

    def _status(self, *, peers: Iterable[pb.PeerStatus], links: Iterable[Link]) -> pb.NodeStatus:
        """What the node says of itself; what a rank said last, at most `rank_process.REPORT_S` old where its worker's status has
        changed, and `rank_process.SIGN_OF_LIFE_S` in figures and metrics."""
        life = self._life
        reports = self._supervisor.reports if self._supervisor is not None else {}
        readiness = self._daemon.readiness()
        return pb.NodeStatus(
            role=self.config.role,
            state=str(self._daemon.state),
            instance=instance_to_proto(life.instance) if life is not None else None,
            uptime_s=time.monotonic() - self._daemon.started_s,
            queued_requests=life.requests.num_queued if life is not None else 0,
            running_requests=life.requests.num_running if life is not None else 0,
            ranks=[pb.RankStatus(**reports[rank].status) for rank in sorted(reports)],
            peers=peers,
            links=[link_to_proto(link) for link in links],
            restarts=self._daemon.num_restarts,
            ready=readiness.is_ready,
            not_ready_reason="" if readiness.is_ready else readiness.reason,
            memory_plan=_memory_to_proto(life.memory) if life is not None else None,
        )

    # Both roles' API

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        if self._life is None:
            return pb.AbortResponse(found=False)
        requests = self._life.requests
        reason = clip_reason(request.reason) or "aborted by an operator"
        tries = [name for name in requests.request_ids if is_try_of(name, request.request_id)]
        found = [requests.abort(name, TransferAborted(reason)) for name in tries]
        return pb.AbortResponse(found=any(found))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        log.info("drain_requested")
        budget_s = context.time_remaining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if budget_s is None else max(0.0, budget_s - 0.1)):
                await self.drain()
        return pb.DrainResponse(remaining=self.num_in_flight)


def _memory_to_proto(ranks: Sequence[RankMemory]) -> pb.MemoryPlan | None:
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
