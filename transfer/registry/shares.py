"""How many calls may be in progress on a server, of whom: those that anybody may make leave room for the other tier's."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from transfer.registry.handlers import method_of, with_method
from transfer.registry.roles import METHOD_ROLES, CallerRole
from transfer.registry.status import end_call

_PEERS_ALONE = frozenset({CallerRole.PEER})


class ClientShare(grpc.aio.ServerInterceptor):
    """Ends calls that a client could make with RESOURCE_EXHAUSTED where `most` of them are in progress.

    What only the other tier may call is not counted: a client that holds all it can get must not keep two tiers apart.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or METHOD_ROLES.get(handler_call_details.method) == _PEERS_ALONE:
            return handler
        return with_method(handler, self._counted(method_of(handler)))

    def _counted(self, serve: Any) -> Any:
        if inspect.isasyncgenfunction(serve):

            async def counted_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
                await self._check(context)
                with self._in_progress():
                    async with aclosing(serve(request, context)) as answers:
                        async for answer in answers:
                            yield answer

            return counted_stream

        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._check(context)
            with self._in_progress():
                return await serve(request, context)

        return counted

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._num_calls >= self._most:
            details = f"{self._num_calls} calls of clients are in progress here, as many as may be; try again later, or elsewhere"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, details)

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
