"""Serve both roles' services on a node that can change its role: each call goes to the leader of the node's present role.

A call of the other role's service ends UNAVAILABLE, so that callers retry it. The services of a gRPC server are fixed when it
starts. The server must outlive a change of role, because the change is requested there, and clients and peers stay connected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol

import grpc

from transfer.config import NodeConfig
from transfer.errors import PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.status import end_with

_SERVICES: Final = pb.DESCRIPTOR.services_by_name
_SERVICE_OF_ROLE: Final = {"prefill": "PrefillControl", "decode": "DecodeControl"}
_OF_PEERS: Final = frozenset({"kvferry.v1.PrefillControl.Abort"})
"""Methods that NodeControl also has. Peers may call them here, so they must not end the request of a client."""


class RoleLeader(Protocol):
    """A role's leader: the servicer of its role's service and of NodeControl."""

    @property
    def config(self) -> NodeConfig: ...


def service_of(role: str) -> str:
    """Return the full name of the service that only nodes of that role have."""
    name: str = _SERVICES[_SERVICE_OF_ROLE[role]].full_name
    return name


class RoleServices:
    """The servicers of a node with two roles.

    Args:
        leader: Leader of the node's present role.
    """

    def __init__(self, leader: RoleLeader) -> None:
        self.leader = leader
        self.prefill_control: pb_grpc.PrefillControlServicer = self._servicer(pb_grpc.PrefillControlServicer, "prefill")
        self.decode_control: pb_grpc.DecodeControlServicer = self._servicer(pb_grpc.DecodeControlServicer, "decode")
        self.node_control: pb_grpc.NodeControlServicer = self._servicer(pb_grpc.NodeControlServicer, None)

    def _servicer(self, interface: type[Any], role: str | None) -> Any:
        """Return a servicer that passes every call on. `role` is the role that has the service; None means both."""
        name = "NodeControl" if role is None else _SERVICE_OF_ROLE[role]
        methods = {method.name: self._method(method, role) for method in _SERVICES[name].methods}
        return type(f"Switchable{name}", (interface,), methods)()

    def _method(self, method: Any, role: str | None) -> Callable[..., Any]:
        name: str = method.name
        if name in _SERVICES["NodeControl"].methods_by_name and method.full_name not in _OF_PEERS:
            role = None  # a method for operators, which both roles have
        assert method.server_streaming or not method.client_streaming, f"{name} has a stream of requests and one answer"

        async def target(context: grpc.aio.ServicerContext[Any, Any]) -> Callable[..., Any]:
            if role is not None and self.leader.config.role != role:
                own = self.leader.config.role
                await end_with(context, PeerUnreachable(f"this node is a {own} node now, and serves no {_SERVICE_OF_ROLE[role]}"))
            found: Callable[..., Any] = getattr(self.leader, name)
            return found

        async def stream(_: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            serve = await target(context)
            async with aclosing(serve(request, context)) as answers:
                async for answer in answers:
                    yield answer

        async def unary(_: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            serve = await target(context)
            return await serve(request, context)

        return stream if method.server_streaming else unary
