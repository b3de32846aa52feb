"""Asks every caller of a server with TLS who they are, before anything of the call is acted on."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from transfer.peer_names import SubjectNames, first_match
from transfer.registry.handlers import method_of, with_method
from transfer.registry.roles import METHOD_ROLES, CallerRole
from transfer.registry.status import end_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that was not let in.

    Args:
        method: ``Service/Method``, one that the server has.
        caller: The names in the caller's certificate.
        reason: One line, which the caller is told too.
    """

    method: str
    caller: str
    reason: str


class Guard(grpc.aio.ServerInterceptor):
    """Ends calls with PERMISSION_DENIED that the caller's certificate does not allow; the first interceptor of a server.

    Args:
        names: Allow-list of each role.
        on_refused: Hears of each such call.
    """

    def __init__(self, names: dict[CallerRole, tuple[str, ...]], on_refused: Callable[[Refusal], None]) -> None:
        self._names = names
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # UNIMPLEMENTED, whoever asks
        return with_method(handler, self._guarded(handler_call_details.method, method_of(handler)))

    def _guarded(self, method: str, serve: Any) -> Any:
        if inspect.isasyncgenfunction(serve):

            async def guarded_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
                await self._check(method, context)
                async for answer in serve(request, context):
                    yield answer

            return guarded_stream

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._check(method, context)
            return await serve(request, context)

        return guarded

    async def _check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        names = caller_names(context)
        roles = METHOD_ROLES.get(method, frozenset())
        if any(first_match(self._names[role], names) is not None for role in roles):
            return
        shown = method.removeprefix("/").removeprefix("kvferry.v1.")
        lists = " or ".join(role.setting for role in CallerRole if role in roles) or "any list"
        refusal = Refusal(
            method=shown, caller=str(names), reason=f"{names} may not call {shown}: it is not in {lists} of this node"
        )
        self._on_refused(refusal)
        await end_call(context, grpc.StatusCode.PERMISSION_DENIED, refusal.reason)


def caller_names(context: grpc.aio.ServicerContext[Any, Any]) -> SubjectNames:
    """The names in the certificate that the caller has shown to be theirs; none without TLS."""
    found = context.auth_context()
    return SubjectNames(dns=_texts(found.get("peer_dns", ())), uris=_texts(found.get("peer_uri", ())))


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(bytes(value).decode("utf-8", "backslashreplace") for value in values)
