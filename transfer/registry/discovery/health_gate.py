"""Whether a node serves, by its own word: asked before an address is used that nothing but a name stands for."""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from transfer.errors import TransferError
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import Security
from transfer.registry.status import error_of

ASK_TIMEOUT_S: Final = 3.0
SERVICE: Final = "kvferry.v1.PrefillControl"


class HealthGate:
    """Asks nodes by gRPC's health protocol whether they serve as prefill nodes.

    Args:
        security: How they are spoken to.
    """

    def __init__(self, security: Security) -> None:
        self._security = security

    async def why_not(self, address: str) -> str:
        """One line on why the node is not to be used; empty: it serves."""
        try:
            return await self._ask(address)
        except TransferError as error:
            return str(error)

    async def _ask(self, address: str) -> str:
        channel = PeerChannel(address, self._security)
        try:
            stub = health_pb2_grpc.HealthStub(await channel.ready(timeout_s=ASK_TIMEOUT_S))
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"it is no prefill node: it does not know {SERVICE}"
            raise error_of(error, peer=address) from error
        finally:
            await channel.close()
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        return "it does not serve: it is starting, or draining"
