"""A node of kvferry's own behind the router, spoken to over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvferry.cli.node_client import NodeClient
from kvferry.router.servers import Server, ServerFailed
from transfer.errors import TransferError
from transfer.registry.security import Security

CHECK_TIMEOUT_S: Final = 3.0


class NodeServer(Server):
    """See the module's docstring. Opened on the loop that uses it.

    Args:
        address: host:port of its gRPC API.
        tier: "prefill" or "decode"; a node of the other one is not healthy here.
    """

    def __init__(
        self, address: str, tier: str, security: Security, *, lost_after_s: float, on_opened: Callable[[str], None]
    ) -> None:
        super().__init__(f"grpc://{address}", tier, lost_after_s=lost_after_s, on_opened=on_opened)
        self.client = NodeClient(address, security=security)

    async def check(self) -> None:
        """Raises:
        ServerFailed: It cannot serve requests, or does not answer.
        """
        try:
            status = await self.client.status(timeout_s=CHECK_TIMEOUT_S)
        except TransferError as error:
            raise ServerFailed(self, "unreachable", self.without_address(error)) from error
        if status.role != self.tier:
            raise ServerFailed(self, "status", f"it is a {status.role or 'nameless'} node; --{self.tier} takes {self.tier} nodes")
        if not status.ready:
            raise ServerFailed(self, "status", status.not_ready_reason or f"it is {status.state}")

    def without_address(self, error: TransferError) -> str:
        """The error's text, which is shown behind the address anyway."""
        return str(error).removeprefix(f"{self.client.address}: ")

    def params(self) -> dict[str, Any]:
        """`kv_transfer_params` by which a vLLM decode server has this prefill node compute a prompt."""
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_address": self.client.address}

    async def close(self) -> None:
        await self.client.close()
