"""The services of a node that can change its role: each call goes to the leader of the role that the node has now.

What only the other role does ends UNAVAILABLE: whoever calls tries again, at his usual pace, and succeeds when the node is that.

A gRPC server's services are fixed when it starts, and the server has to outlive a change of role: it is what the change is asked
of, and clients and peers keep their connections to it.
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
"""Methods that NodeControl has too, but that the other tier may call here: with them a peer ends no client's request."""


class RoleLeader(Protocol):
    """A role's leader: the servicer of its role's service and of NodeControl."""

    @property
    def config(self) -> NodeConfig: ...


def service_of(role: str) -> str:
    """Full name of the service that only nodes of that role have."""
    name: str = _SERVICES[_SERVICE_OF_ROLE[role]].full_name
    return name


class RoleServices:
    """What the server of such a node is given.

    Args:
        leader: Of the role that the node has.
    """

    def __init__(self, leader: RoleLeader) -> None:
        self.leader = leader
        self.prefill_control: pb_grpc.PrefillControlServicer = self._servicer(pb_grpc.PrefillControlServicer, "prefill")
        self.decode_control: pb_grpc.DecodeControlServicer = self._servicer(pb_grpc.DecodeControlServicer, "decode")
        self.node_control: pb_grpc.NodeControlServicer = self._servicer(pb_grpc.NodeControlServicer, None)

    def _servicer(self, interface: type[Any], role: str | None) -> Any:
        """One that passes every method on; `role`: the role that has it, None: both."""
        name = "NodeControl" if role is None else _SERVICE_OF_ROLE[role]
        methods = {method.name: self._method(method, role) for method in _SERVICES[name].methods}
        return type(f"Switchable{name}", (interface,), methods)()

    def _method(self, method: Any, role: str | None) -> Callable[..., Any]:
        name: str = method.name
        if name in _SERVICES["NodeControl"].methods_by_name and method.full_name not in _OF_PEERS:
            role = None  # an operator's: it does the same whatever the node is
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
