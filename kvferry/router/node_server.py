"""One of kvferry's nodes behind the router, called over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Final

from kvferry.cli.node_client import NodeClient, is_refusal_of_caller
from kvferry.router.api import SSE_TYPE, Answer, ApiError, Call
from kvferry.router.node_body import NodeBody, Shapes
from kvferry.router.node_model import NodeModel
from kvferry.router.servers import Server, ServerFailed
from kvferry.router.settings import node_address
from transfer.errors import (
    ConfigError,
    LayoutError,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportTimeout,
)
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

CHECK_TIMEOUT_S: Final = 3.0

ACCEPT_TIMEOUT_S: Final = 10.0
"""Longest wait until a node accepts a request, which it normally does at once."""


class NodeServer(Server):
    """See the module's docstring. Opened on the loop that uses it.

    Args:
        tier: "prefill" or "decode"; nodes with another role are unhealthy here.
        model: The model of decode nodes; None for prefill nodes.
    """

    flow_alone = "node"

    def __init__(
        self,
        url: str,
        tier: str,
        security: Security,
        model: NodeModel | None,
        *,
        lost_after_s: float,
        on_opened: Callable[[], None],
    ) -> None:
        super().__init__(url, tier, lost_after_s=lost_after_s, on_opened=on_opened)
        self._client = NodeClient(node_address(url), security=security)
        self._model = model

    async def close(self) -> None:
        await self._client.close()

    async def check(self) -> None:
        try:
            status = await self._client.status(timeout_s=CHECK_TIMEOUT_S)
        except TransferError as error:
            raise ServerFailed(self, "unreachable", self._without_address(error)) from error
        if status.role != self.tier:
            raise ServerFailed(self, "status", f"it is a {status.role or 'nameless'} node; --{self.tier} takes {self.tier} nodes")
        if not status.ready:
            raise ServerFailed(self, "status", status.not_ready_reason or f"it is {status.state}")

    async def models(self, headers: Mapping[str, str]) -> Answer:
        assert self._model is not None
        return self._model.listed()

    def params(self) -> dict[str, Any]:
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_address": self._client.address}

    @contextlib.asynccontextmanager
    async def open(self, call: Call, params: Mapping[str, Any] | None) -> AsyncIterator[Answer]:
        assert isinstance(call.body, NodeBody)  # `params` is None: a decode node finds its prefill node by itself
        async with (
            contextlib.aclosing(self._generated(call.body.request)) as events,
            contextlib.aclosing(self._parts(call, call.body, events)) as parts,
        ):
            first = await anext(parts)
            yield Answer(content=first, rest=parts, content_type=SSE_TYPE) if call.body.is_stream else Answer(content=first)

    async def _parts(
        self, call: Call, body: NodeBody, events: AsyncGenerator[pb.GenerateEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        assert self._model is not None
        shapes = Shapes(call.path, self._model.name, call.request_id)
        if not body.is_stream:
            received = [event async for event in events]  # to the end, because the node gives up a request whose call ends early
            yield shapes.whole("".join(event.tokens.text for event in received), received[-1].done)
            return
        unsent = shapes.beginning()
        async for event in events:
            if event.tokens.text:
                unsent += shapes.some(event.tokens.text)
            elif event.HasField("done"):
                unsent += shapes.end(event.done, with_usage=body.with_usage)
            else:  # the token completes no character
                continue
            yield unsent
            unsent = b""

    async def _generated(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateEvent, None]:
        """Yield the events of a request, from its first token to the last event."""
        try:
            async with contextlib.aclosing(self._client.generate(request, accept_timeout_s=ACCEPT_TIMEOUT_S)) as events:
                while True:
                    async with self.unless_lost():
                        event = await anext(events, None)
                    if event is None:
                        return
                    if not event.HasField("accepted"):
                        yield event
        except TransferError as error:
            raise self._failure_of(error) from error

    def _failure_of(self, error: TransferError) -> Exception:
        """Return the error of a failed call: of the client, the operator, or the node."""
        reason = self._without_address(error)
        if isinstance(error, ConfigError) and not is_refusal_of_caller(error):
            return ApiError(400, reason)
        if isinstance(error, ResourceExhausted):
            if "larger than max" in reason:  # gRPC's error for a message, which also fails later
                return ApiError(413, f"the prompt is too large for a call to the decode node: {reason}")
            return ServerFailed(self, "status", reason, status=503, is_counted=False)  # no room now; the node is healthy
        if isinstance(error, TransferAborted | LayoutError):  # aborted on purpose, or every attempt would fail
            return ApiError(500, reason)
        if isinstance(error, PeerUnreachable):
            return ServerFailed(self, "unreachable", reason)
        if isinstance(error, TransportTimeout):
            return ServerFailed(self, "lost", reason)
        return ServerFailed(self, "broken" if isinstance(error, RemoteProtocolError) else "status", reason)

    def _without_address(self, error: TransferError) -> str:
        """Return the error's text without the address, which is already shown before it."""
        return str(error).removeprefix(f"{self._client.address}: ")
