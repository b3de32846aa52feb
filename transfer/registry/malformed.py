"""Bytes that are no message, on either side of a call.

A server's gRPC answers them with UNKNOWN, and logs a stranger's garbage as a failure. A client's gives None for an answer that
does not parse, and goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from transfer.errors import RemoteProtocolError
from transfer.registry.handlers import method_of, with_method
from transfer.registry.status import end_with

_Answer = TypeVar("_Answer")


def readable(answer: _Answer | None, *, method: str, peer: str = "") -> _Answer:
    """An answer to a call of `method`, if it is one.

    Args:
        peer: Who answered, where the message is to name it.

    Raises:
        RemoteProtocolError: Its bytes did not parse.
    """
    if answer is None:
        raise RemoteProtocolError(
            f"{peer}: an answer of {method} cannot be read" if peer else f"an answer of {method} cannot be read"
        )
    return answer


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Ends a call whose request, or one of whose requests, does not parse with INVALID_ARGUMENT and one line."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # type: ignore[no-any-return]
        deserialise = handler.request_deserializer

        def read(payload: bytes) -> Any:
            """The message; of what is none the error, because raised here it would be gRPC's to answer."""
            try:
                return deserialise(payload)
            except DecodeError as error:
                return RemoteProtocolError(f"request of {len(payload)} bytes cannot be read: {error}")

        guarded = _guarded(method_of(handler), is_stream=bool(handler.request_streaming))
        return with_method(handler, guarded, read=read)


def _guarded(method: Any, *, is_stream: bool) -> Any:
    """The method, which never sees a message that could not be read; a generator stays one."""

    def given(request: Any) -> Any:
        if is_stream:
            return _readable(request)
        if isinstance(request, RemoteProtocolError):
            raise request
        return request

    if inspect.isasyncgenfunction(method):

        async def generate(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async with aclosing(method(given(request), context)) as answers:
                    async for answer in answers:
                        yield answer
            except RemoteProtocolError as error:
                await end_with(context, error)

        return generate

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(given(request), context)
        except RemoteProtocolError as error:
            await end_with(context, error)

    return answer


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream, up to the first that could not be read, which is raised."""
    async for request in requests:
        if isinstance(request, RemoteProtocolError):
            raise request
        yield request
