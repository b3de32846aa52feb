"""Client of a node: requests, status, and the operations of an operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

import grpc

from kvferry.cli.client_settings import check_address
from transfer.errors import ConfigError, PeerUnreachable, RemoteProtocolError, TransferError, TransportTimeout
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText, Security
from transfer.registry.status import error_of, is_http1, readable, status_of

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import DecodeControlAsyncStub

ANSWER_TIMEOUT_S: Final = 10.0
"""Longest wait for a node's first answer. A node that lives answers in milliseconds, also without room."""

CHANGE_S: Final = 330.0
"""Longest wait for a change of role; the node itself waits 300 s for its ranks."""


class NodeClient:
    """A connection to one node of either role. Use it as an async context manager, on one loop.

    Args:
        address: host:port of the node's gRPC API.
        security: None means plain text on a loopback address.

    Raises:
        ConfigError: `address` is not host:port, or must not be called in plain text.
    """

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        check_address("target", address)
        self.address = address
        security = PlainText() if security is None else security
        self._is_plain = isinstance(security, PlainText)
        self._channel = PeerChannel(address, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel its calls."""
        await self._channel.close()

    async def _decode(self, timeout_s: float) -> DecodeControlAsyncStub:
        return cast("DecodeControlAsyncStub", pb_grpc.DecodeControlStub(await self._channel.ready(timeout_s=timeout_s)))

    async def status(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> pb.NodeStatus:
        """Return the status of a node of either role.

        Raises:
            TransferError: The call failed, see `transfer.registry.status.error_of`. So it is for the other calls.
        """
        answer: pb.NodeStatus = await self._ask("Status", pb.StatusRequest(), timeout_s)
        return answer

    async def list_requests(self, limit: int = 0, *, timeout_s: float = ANSWER_TIMEOUT_S) -> pb.ListRequestsResponse:
        """Return the oldest `limit` requests in flight; 0 means as many as an answer holds."""
        answer: pb.ListRequestsResponse = await self._ask("ListRequests", pb.ListRequestsRequest(limit=limit), timeout_s)
        return answer

    async def abort(self, request_id: str, *, reason: str = "", timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Abort the request with a client's or a transfer's id; return True if it was in flight."""
        answer: pb.AbortResponse = await self._ask("Abort", pb.AbortRequest(request_id=request_id, reason=reason), timeout_s)
        return answer.found

    async def drain(self, *, budget_s: float) -> int:
        """Drain the node: it takes no new requests. Wait up to `budget_s`, and return how many requests remain."""
        answer: pb.DrainResponse = await self._ask("Drain", pb.DrainRequest(), budget_s)
        return answer.remaining

    async def undrain(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Let the node take requests again; return True if it was draining. A node that stops rejects this."""
        answer: pb.UndrainResponse = await self._ask("Undrain", pb.UndrainRequest(), timeout_s)
        return answer.was_draining

    async def set_log_level(self, level: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
        """Set the log level of the node and its ranks; return the previous level."""
        answer: pb.SetLogLevelResponse = await self._ask("SetLogLevel", pb.SetLogLevelRequest(level=level), timeout_s)
        return answer.level_before

    async def switch_role(self, role: str, *, budget_s: float) -> pb.SwitchRoleResponse:
        """Change the role of the node, after a drain of up to `budget_s`. A node that cannot change rejects this."""
        asked = pb.SwitchRoleRequest(role=role, drain_budget_s=budget_s)
        answer: pb.SwitchRoleResponse = await self._ask("SwitchRole", asked, budget_s + CHANGE_S)
        return answer

    async def _ask(self, method: str, question: Any, timeout_s: float) -> Any:
        """Call a method of `NodeControl`. If a node of version 0.1 does not have it, call the method of its role."""
        deadline_s = time.monotonic() + timeout_s
        try:
            channel = await self._channel.ready(timeout_s=timeout_s)
            for stub_type in (pb_grpc.NodeControlStub, pb_grpc.DecodeControlStub, pb_grpc.PrefillControlStub):
                call = getattr(stub_type(channel), method, None)
                if call is None:
                    continue
                try:
                    answer = await call(question, timeout=max(0.0, deadline_s - time.monotonic()))
                    return readable(answer, peer=self.address, method=method)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                        raise
            raise RemoteProtocolError(f"{self.address} has no {method}: it is a node of version 0.1, or no node")
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error, timeout_s) from error

    async def generate(
        self, request: pb.GenerateRequest, *, accept_timeout_s: float = ANSWER_TIMEOUT_S, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Generate at the decode node. Closing the generator cancels the request.

        Args:
            accept_timeout_s: Longest wait for the first event.
            timeout_s: Deadline of the whole request.

        Raises:
            TransferError: The call failed, or ended without its last event.
        """
        call = (await self._decode(accept_timeout_s)).Generate(request, timeout=timeout_s)
        event = None
        is_done = False
        try:
            try:
                async with asyncio.timeout(accept_timeout_s):
                    event = await call.read()
            except TimeoutError:
                raise TransportTimeout(f"{self.address}: no answer within {accept_timeout_s:g} s") from None
            while isinstance(event, pb.GenerateEvent):  # otherwise it is grpc.aio.EOF
                is_done = event.HasField("done")
                yield event
                event = await call.read()
            if not is_done:
                raise RemoteProtocolError(f"{self.address}: the stream ended without its last event")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(await self._why_no_decode_node()) from error
            raise self._error_of(error, timeout_s, what="no answer" if event is None else "not finished") from error
        finally:
            call.cancel()

    async def _why_no_decode_node(self) -> str:
        """Return one line about a node that cannot generate, with the addresses of nodes that can."""
        try:
            status = await self.status()
        except TransferError:
            return f"{self.address} is no decode node; give the address of one"
        peers = ", ".join(peer.address for peer in status.peers) or "none is joined"
        return f"{self.address} is a {status.role or 'prefill'} node; give the address of a decode node (its peers: {peers})"

    def _error_of(self, error: grpc.aio.AioRpcError, timeout_s: float | None, *, what: str = "no answer") -> TransferError:
        """Return the error of a failed call. Our own deadline has its own words, because gRPC reports a removed stream."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            return TransportTimeout(f"{self.address}: {what} within {timeout_s:g} s")
        if is_http1(error):
            return ConfigError(
                f"{self.address} speaks HTTP/1, not gRPC; give the node's gRPC port (server.port), not its server.http_port"
            )
        details = error.details() or ""
        # A port that waits for a TLS handshake accepts the connection, and closes it before it answers gRPC's first frame.
        if self._is_plain and "failed to connect" in details and "Socket closed" in details:
            return PeerUnreachable(
                f"{self.address}: it closes connections that do not speak TLS; give a certificate (--tls-cert, --tls-key, "
                "--tls-ca) instead of --insecure, or look at what listens there"
            )
        return error_of(error, peer=self.address)


def code_name(error: TransferError) -> str:
    """Return the name of the gRPC status of a failed call; for another failure, of the status with the same meaning."""
    cause = error.__cause__
    return cause.code().name if isinstance(cause, grpc.aio.AioRpcError) else status_of(error).name


def is_refusal_of_caller(error: TransferError) -> bool:
    """Return True if a call failed because the node does not accept its caller."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    )
