"""Requests to kvferry's own decode nodes, which find their prefill nodes by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Final

from kvferry.cli.node_client import is_refusal_of_caller
from kvferry.router import node_body
from kvferry.router.api import CHAT, SSE_TYPE, ApiError, Call, Head
from kvferry.router.attempts import Attempts
from kvferry.router.body_reader import BodyReader, is_light
from kvferry.router.chat_template import ChatTemplate
from kvferry.router.metrics import RouterMetrics
from kvferry.router.node_answer import Shapes
from kvferry.router.node_body import NodeBody
from kvferry.router.node_server import NodeServer
from kvferry.router.servers import Lease, ServerFailed, Tier
from kvferry.router.settings import RouterSettings
from node_runtime.health import Readiness
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

ACCEPT_TIMEOUT_S: Final = 10.0
"""Longest wait for the word that a request has its place, which a node that lives gives at once."""

DEFAULT_MODEL_NAME: Final = "kvferry"


class NodeFlow:
    """A `kvferry.router.api.Backend`. Opened on the loop that uses it.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """

    def __init__(self, settings: RouterSettings, security: Security, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._template = ChatTemplate(settings.tokenizer) if settings.tokenizer is not None else None
        self._model = settings.model_name or _name_of(settings.tokenizer)
        self._created = int(time.time())
        self._reader = BodyReader()
        self.decode = Tier(
            [
                NodeServer(address, "decode", security, lost_after_s=settings.lost_after_s, on_opened=metrics.breaker_opened)
                for address in settings.decode
            ]
        )

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.decode.servers))

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for server in self.decode.servers:
                group.create_task(self._watch(server))

    async def _watch(self, server: NodeServer) -> None:
        while True:
            try:
                await server.check()
            except ServerFailed as failure:
                server.check_failed(failure.reason)
            else:
                server.check_succeeded()
            await asyncio.sleep(self._settings.health_interval_s)

    def readiness(self) -> Readiness:
        reason = self.decode.unavailable_reason()
        return Readiness(is_ready=not reason, reason=reason)

    def num_servers(self) -> Mapping[tuple[str, str], int]:
        return self.decode.states()

    async def models(self, headers: Mapping[str, str]) -> tuple[Head, bytes]:
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "kvferry"}
        return Head(), json.dumps({"object": "list", "data": [card]}).encode()

    async def read(self, path: str, content: bytes) -> NodeBody:
        if path != CHAT:
            return await self._reader.read(content, node_body.completion, self._model)
        check = node_body.check if is_light(content) else node_body.check_costly_chat
        body = await self._reader.read(content, check, path, self._model)
        if self._template is None:
            raise ApiError(
                400,
                "chats need a chat template, and this router was started without one (kvferry route --tokenizer DIR); "
                "send the whole prompt to /v1/completions",
            )
        return node_body.node_body(path, body, await self._template.token_ids(body))

    async def answer(self, call: Call[NodeBody]) -> AsyncGenerator[Head | bytes, None]:
        shapes = Shapes(call.path, self._model, call.request_id)
        attempts = Attempts(self._settings.retries, call, self._metrics)
        while True:
            lease = self.decode.lease(1, tried=attempts.failed)
            assert lease is not None  # decode nodes are never unfit
            has_begun = False
            try:
                async with contextlib.aclosing(self._try(call.body, lease, shapes)) as parts:
                    async for part in parts:
                        has_begun = True
                        yield part
                return
            except ServerFailed as failure:
                self._metrics.server_failed("decode", failure.kind)
                if has_begun:
                    raise ApiError(502, f"the answer was cut off: {failure}") from failure
                await attempts.next(failure)

    async def _try(self, body: NodeBody, lease: Lease[NodeServer], shapes: Shapes) -> AsyncGenerator[Head | bytes, None]:
        """One node's answer; closed early, it cancels the request there."""
        self._metrics.attempt_began("node")
        texts: list[str] = []
        unsent = shapes.beginning()
        has_head = False
        try:
            async with contextlib.aclosing(_generated(lease.server, body.request)) as events:
                async for event in events:
                    lease.succeeded()
                    done = event.done if event.HasField("done") else None
                    if not body.is_stream:
                        texts.append(event.tokens.text)
                        if done is not None:
                            yield Head()
                            yield shapes.whole("".join(texts), done)
                        continue
                    if event.tokens.text:
                        unsent += shapes.some(event.tokens.text)
                    elif done is not None:
                        unsent += shapes.end(done, with_usage=body.with_usage)
                    else:  # a character is incomplete, or the token spells none
                        continue
                    if not has_head:
                        has_head = True
                        yield Head(content_type=SSE_TYPE, is_stream=True)
                    yield unsent
                    unsent = b""
        except TransferError as error:
            raise _failure(lease.server, error, lease.failed) from error
        except ServerFailed as failure:
            lease.failed(failure.reason)
            raise
        finally:
            lease.end()


async def _generated(server: NodeServer, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateEvent, None]:
    """What a node generates, from its first token to the last event.

    Raises:
        TransferError: The call failed.
        ServerFailed: The node is lost.
    """
    async with contextlib.aclosing(server.client.generate(request, accept_timeout_s=ACCEPT_TIMEOUT_S)) as events:
        while True:
            async with server.unless_lost():
                event = await anext(events, None)
            if event is None:
                return
            if not event.HasField("accepted"):
                yield event


def _failure(server: NodeServer, error: TransferError, blame: Callable[[str], None]) -> Exception:
    """What a failed call is: the client's fault, or one of the node, which `blame` is then told."""
    reason = server.without_address(error)
    if isinstance(error, ConfigError) and not is_refusal_of_caller(error):
        return ApiError(400, reason)
    if isinstance(error, ResourceExhausted):
        if "larger than max" in reason:  # as gRPC says of a message, which is no more welcome later
            return ApiError(413, f"the prompt is too large for a call to the decode node: {reason}")
        return ServerFailed(server, "status", reason, status=503)  # no room now: nothing is wrong with it
    if isinstance(error, TransferAborted):
        return ApiError(500, reason)  # aborted on purpose, so no further attempt
    if isinstance(error, LayoutError):
        return ApiError(500, reason)  # every attempt would fail like this
    blame(reason)
    if isinstance(error, PeerUnreachable):
        return ServerFailed(server, "unreachable", reason)
    if isinstance(error, TransportTimeout):
        return ServerFailed(server, "lost", reason)
    return ServerFailed(server, "broken" if isinstance(error, RemoteProtocolError) else "status", reason)


def _name_of(tokenizer: Path | None) -> str:
    return (tokenizer.resolve().name if tokenizer is not None else "") or DEFAULT_MODEL_NAME
