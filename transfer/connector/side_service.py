"""The operators' interface of one side of a node: prefill or decode, of a daemon or of an engine that loads kvferry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import grpc

from transfer.connector.rank_report import RankMemory, RankReady, RankReport
from transfer.errors import TransferAborted, TransferError
from transfer.instance import Instance
from transfer.loop_turns import turns_of
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import instance_to_proto
from transfer.registry.discovery import DiscoveryView
from transfer.transfer_ids import is_attempt_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A request in flight, as operators see it: the fields of the wire contract's RequestStatus, without those of its prompt."""

    request_id: str
    transfer_id: str
    stage: str
    age_s: float
    prompt_tokens: int
    ready_tokens: int = 0
    generated_tokens: int = 0
    max_new_tokens: int = 0
    peer: str = ""
    retries: int = 0
    ranks_done: int = 0


class Requests(Protocol):
    """The operators' interface to the requests of a side."""

    @property
    def request_ids(self) -> tuple[str, ...]: ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def views(self) -> Sequence[RequestView]:
        """Return all requests in flight."""
        ...

    def abort(self, request_id: str, error: TransferError) -> bool: ...


class DrainReason(StrEnum):
    """Reason of a drain. Each is withdrawn separately: the drain of an operator continues after a change of role."""

    OPERATOR = "operator"  # also the signal that ends the node
    SWITCH = "switch"  # a change of role


class Draining:
    """Whether a node takes new work. A drain is on as long as it has a reason. Owned by the leader's loop."""

    def __init__(self) -> None:
        self._reasons: set[DrainReason] = set()
        self._on, self._off = asyncio.Event(), asyncio.Event()
        self._off.set()

    @property
    def is_on(self) -> bool:
        return self._on.is_set()

    def is_for(self, reason: DrainReason) -> bool:
        return reason in self._reasons

    def begin(self, reason: DrainReason = DrainReason.OPERATOR) -> None:
        self._reasons.add(reason)
        self._on.set()
        self._off.clear()

    def end(self, *reasons: DrainReason) -> None:
        """Withdraw these reasons; without arguments, all reasons."""
        self._reasons.difference_update(reasons or DrainReason)
        if not self._reasons:
            self._off.set()
            self._on.clear()

    async def until(self, is_on: bool) -> None:
        """Wait until the node drains, or until it does not."""
        await (self._on if is_on else self._off).wait()


class Peer(Protocol):
    """An instance of the other tier, as operators see it."""

    def status(self) -> pb.PeerStatus: ...

    def link_statuses(self) -> list[pb.LinkStatus]:
        """Return the measured links to it."""
        ...


class Side(Protocol):
    """See the module's docstring. Owned by the leader's loop.

    Attributes:
        role: "prefill" or "decode".
        metrics: Counts and gauges of this side's leader.
    """

    role: str
    metrics: NodeMetrics

    @property
    def in_flight(self) -> Requests | None:
        """The requests; None while there are no ranks."""
        ...

    @property
    def instance(self) -> Instance | None:
        """This life of the ranks; None while there are none."""
        ...

    @property
    def reports(self) -> Sequence[RankReport]:
        """The newest report of each rank, in rank order."""
        ...

    @property
    def memory(self) -> Sequence[RankMemory]:
        """The memory of each rank; empty if its engine makes no plan."""
        return ()

    @property
    def peers(self) -> Iterable[Peer]:
        """The instances of the other tier."""
        ...

    @property
    def discovery_view(self) -> DiscoveryView | None:
        """Nodes that discovery found, or the side's own entry there. None means that the side does not use discovery."""
        return None

    def show(self) -> Mapping[str, int]:
        """Set the gauges of this side alone; return the number of peers by state."""
        ...

    def announce(self, is_serving: bool) -> None:
        """Record whether new requests are accepted."""
        return

    # Views

    def describe(self) -> pb.NodeStatus:
        """Return the fields of the status that belong to this side."""
        requests, instance, discovery = self.in_flight, self.instance, self.discovery_view
        return pb.NodeStatus(
            role=self.role,
            instance=instance_to_proto(instance) if instance is not None else None,
            queued_requests=requests.num_queued if requests is not None else 0,
            running_requests=requests.num_running if requests is not None else 0,
            ranks=[pb.RankStatus(**report.status) for report in self.reports],
            peers=[peer.status() for peer in self.peers],
            links=[link for peer in self.peers for link in peer.link_statuses()],
            memory_plan=memory_to_proto(self.memory),
            discovery=_discovery_to_proto(discovery) if discovery is not None else None,
        )

    def abort(self, request_id: str, reason: str) -> bool:
        """Give up every attempt of a request, by its client's id or an attempt's id. Return False if there is none."""
        requests = self.in_flight
        if requests is None:
            return False
        attempts = [name for name in requests.request_ids if is_attempt_of(name, request_id)]
        found = [requests.abort(name, TransferAborted(reason, is_by_operator=True)) for name in attempts]
        return any(found)


class SideNode(Protocol):
    """The node that a side belongs to."""

    def status_of(self, side: Side) -> pb.NodeStatus:
        """Return the status of the node with that side only."""
        ...

    def abort_in(self, sides: Iterable[Side], request: pb.AbortRequest) -> pb.AbortResponse:
        """Abort a request in those sides only."""
        ...

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse: ...


class SideService(Side):
    """A side of an engine's instance, with the methods of its own service that `NodeControl` has for the whole instance."""

    def __init__(
        self, *, node: SideNode, role: str, hellos: tuple[RankReady, ...], reports: Callable[[], Sequence[RankReport]]
    ) -> None:
        self.role = role
        self.metrics = NodeMetrics(role=role)
        self._node = node
        self._instance = hellos[0].instance
        self._reports = reports
        self.metrics.histogram("loop_turn_seconds").follow(turns_of(asyncio.get_running_loop()))

    @property
    def instance(self) -> Instance:
        return self._instance

    @property
    def reports(self) -> Sequence[RankReport]:
        return self._reports()

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        return self._node.status_of(self)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        return self._node.abort_in([self], request)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        return await self._node.Drain(request, context)


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


def memory_to_proto(ranks: Sequence[RankMemory]) -> pb.MemoryPlan | None:
    """Return the memory plan of rank 0 with the warnings of all ranks; None if the engine makes no plan."""
    if not ranks or not ranks[0].plan:
        return None
    first = ranks[0]
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
