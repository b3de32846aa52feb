"""Calls a node as its users do: generate, status, abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, cast

import grpc

from transfer.errors import ConfigError, PeerUnreachable, RemoteProtocolError, TransferError, TransportTimeout
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.malformed import readable
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText, Security
from transfer.registry.status import error_of

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import DecodeControlAsyncStub, PrefillControlAsyncStub

ANSWER_TIMEOUT_S: Final = 10.0
"""Longest wait for a node's first answer; one that lives answers in milliseconds, also when it has no room."""


class NodeClient:
    """A connection to one node of either role. Use it as an async context manager, on one loop.

    Args:
        address: host:port of the node's gRPC API.
        security: How it is spoken to; None: in plain text on a loopback address.

    Raises:
        ConfigError: `address` is no host:port, or must not be spoken to in plain text.
    """

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
            raise ConfigError(f"target is {address!r}; it must be host:port with a port from 1 to 65535")
        self.address = address
        security = PlainText() if security is None else security
        self._is_plain = isinstance(security, PlainText)
        self._channel = PeerChannel(address, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        await self._channel.close()

    async def _decode(self, timeout_s: float) -> DecodeControlAsyncStub:
        return cast("DecodeControlAsyncStub", pb_grpc.DecodeControlStub(await self._channel.ready(timeout_s=timeout_s)))

    async def _prefill(self, timeout_s: float) -> PrefillControlAsyncStub:
        return cast("PrefillControlAsyncStub", pb_grpc.PrefillControlStub(await self._channel.ready(timeout_s=timeout_s)))

    async def status(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> pb.NodeStatus:
        """The node's status, whichever role it has.

        Raises:
            TransferError: The call failed, see `transfer.registry.status.error_of`.
        """
        try:
            try:
                answer = await (await self._decode(timeout_s)).Status(pb.StatusRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                answer = await (await self._prefill(timeout_s)).Status(pb.StatusRequest(), timeout=timeout_s)
            return readable(answer, peer=self.address, method="Status")
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error, timeout_s) from error

    async def abort(self, request_id: str, *, reason: str = "", timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Abort a request at the decode node; whether it was in flight.

        Raises:
            TransferError: The call failed.
        """
        question = pb.AbortRequest(request_id=request_id, reason=reason)
        try:
            answer = await (await self._decode(timeout_s)).Abort(question, timeout=timeout_s)
            return readable(answer, peer=self.address, method="Abort").found
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error, timeout_s) from error

    async def generate(
        self, request: pb.GenerateRequest, *, accept_timeout_s: float = ANSWER_TIMEOUT_S, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Generate at the decode node; the request is cancelled when the iteration is given up (close the generator).

        Args:
            accept_timeout_s: Longest wait for the first event.
            timeout_s: Deadline of the whole request.

        Raises:
            TransferError: The call failed, or ended without a last event.
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
            while isinstance(event, pb.GenerateEvent):  # else it is grpc.aio.EOF
                is_done = event.HasField("done")
                yield event
                event = await call.read()
            if not is_done:
                raise RemoteProtocolError(f"{self.address}: the stream ended without its last event")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise RemoteProtocolError(f"{self.address} is no decode node; give the address of one") from error
            raise self._error_of(error, timeout_s, what="no answer" if event is None else "not finished") from error
        finally:
            call.cancel()

    def _error_of(self, error: grpc.aio.AioRpcError, timeout_s: float | None, *, what: str = "no answer") -> TransferError:
        """What a failed call is for the caller; our own deadline in words, for gRPC calls it a removed stream."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            return TransportTimeout(f"{self.address}: {what} within {timeout_s:g} s")
        details = error.details() or ""
        # Accepted, and closed before gRPC's first frame was answered: a port that waits for a TLS handshake does that.
        if self._is_plain and "failed to connect" in details and "Socket closed" in details:
            return PeerUnreachable(
                f"{self.address}: it closes connections that do not speak TLS; give a certificate (--tls-cert, --tls-key, "
                "--tls-ca) instead of --insecure, or look at what listens there"
            )
        return error_of(error, peer=self.address)


def is_refusal_of_caller(error: TransferError) -> bool:
    """Whether a call failed because of who made it, not of what was asked for."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    )
