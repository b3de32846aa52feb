"""Record the steps of a server's calls with the turns of its loop."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from transfer.loop_turns import TimedSteps
from transfer.registry.handlers import method_of, with_method


class TimedCalls(grpc.aio.ServerInterceptor):
    """Record the steps of each call under its method's name, for the warning about a long turn."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not inspect.iscoroutinefunction(method := method_of(handler)):
            return handler  # type: ignore[no-any-return]
        name = handler_call_details.method.rpartition("/")[2]

        async def timed(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await TimedSteps(name, method(request, context))

        return with_method(handler, timed)
