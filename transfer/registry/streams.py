"""What a server's streams say to callers that are not there any more."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc


class QuietStreams(grpc.aio.ServerInterceptor):
    """Ends a streaming call as cancelled when its caller left while an answer waited to be sent; gRPC would log a failure.

    The method, an async generator, is closed at once, and not when the collector finds it.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not inspect.isasyncgenfunction(handler.unary_stream):
            return handler  # type: ignore[no-any-return]
        method = handler.unary_stream

        async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with aclosing(method(request, context)) as answers:
                async for answer in answers:
                    try:
                        await context.write(answer)
                    except grpc.aio.InternalError as error:
                        # gRPC may not have noticed yet that the caller is gone; this it takes for the cancellation that it is.
                        raise asyncio.CancelledError from error

        return grpc.unary_stream_rpc_method_handler(
            serve, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
