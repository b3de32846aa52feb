"""The checks of every call on a server, in one interceptor. In order, up to the servicer's method:

1. With TLS, `METHOD_ROLES` and the allow-lists say whether the caller's certificate may call the method.
2. A method that clients may call needs a place among those of clients. A client that holds all of them must not keep two tiers
   apart, so methods of the other tier alone need none.
3. The steps of the call are recorded under the method's name, for the warning about a long turn of the loop.
4. Bytes that are no message end the call with one line. gRPC would answer UNKNOWN, and log a stranger's garbage as a failure.
5. A stream whose caller left while an answer waited to be sent ends as cancelled. gRPC would log a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from transfer.errors import RemoteProtocolError
from transfer.loop_turns import TimedSteps
from transfer.peer_names import SubjectNames, first_match
from transfer.registry.status import cancelled_if_gone, end_call, end_with


class CallerRole(StrEnum):
    """Role of a caller: the allow-list that has a name of its certificate. One name can be in both lists."""

    PEER = "peer"
    CLIENT = "client"

    @property
    def setting(self) -> str:
        return f"tls.{self.value}_names"


_PEER: Final = frozenset({CallerRole.PEER})
_CLIENT: Final = frozenset({CallerRole.CLIENT})
_BOTH: Final = _PEER | _CLIENT

METHOD_ROLES: Final[dict[str, frozenset[CallerRole]]] = {
    # For operators. Nodes of the other tier may call Status, for the page that shows both tiers.
    "/kvferry.v1.NodeControl/Status": _BOTH,
    "/kvferry.v1.NodeControl/ListRequests": _CLIENT,
    "/kvferry.v1.NodeControl/Abort": _CLIENT,
    "/kvferry.v1.NodeControl/Drain": _CLIENT,
    "/kvferry.v1.NodeControl/Undrain": _CLIENT,
    "/kvferry.v1.NodeControl/SetLogLevel": _CLIENT,
    "/kvferry.v1.NodeControl/SwitchRole": _CLIENT,
    # For decode nodes, which may also abort a transfer that they asked for.
    "/kvferry.v1.PrefillControl/Join": _PEER,
    "/kvferry.v1.PrefillControl/Prefill": _PEER,
    "/kvferry.v1.PrefillControl/PrefillIntoRoom": _PEER,
    "/kvferry.v1.PrefillControl/StreamPrompts": _PEER,
    "/kvferry.v1.PrefillControl/Abort": _BOTH,
    "/kvferry.v1.PrefillControl/Status": _CLIENT,
    "/kvferry.v1.PrefillControl/Drain": _CLIENT,
    # Reserve is for prefill nodes, the rest for clients and operators.
    "/kvferry.v1.DecodeControl/Generate": _CLIENT,
    "/kvferry.v1.DecodeControl/Reserve": _PEER,
    "/kvferry.v1.DecodeControl/Abort": _CLIENT,
    "/kvferry.v1.DecodeControl/Status": _CLIENT,
    "/kvferry.v1.DecodeControl/Drain": _CLIENT,
    # For prefill ranks only.
    "/kvferry.v1.TransferControl/Attach": _PEER,
    "/kvferry.v1.TransferControl/Watermarks": _PEER,
    # For ranks of the same engine, which are peers of this port alone.
    "/kvferry.v1.RankControl/Meet": _PEER,
    # All callers may ask whether a node serves. Reflection is for clients.
    "/grpc.health.v1.Health/Check": _BOTH,
    "/grpc.health.v1.Health/List": _BOTH,
    "/grpc.health.v1.Health/Watch": _BOTH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _CLIENT,
}
"""Method -> roles that may call it. Nobody may call a method that is not here."""

_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that was not let in.

    Args:
        method: ``Service/Method``, one that the server has.
        caller: The names in the caller's certificate.
        reason: One line, which the caller gets, too.
    """

    method: str
    caller: str
    reason: str


class Guard(grpc.aio.ServerInterceptor):
    """Check each call before its method runs, and end it in an orderly way; see the module's docstring.

    Args:
        names: Allow-list of each role; None allows every caller, as without TLS.
        on_refused: Called for each call that no allow-list accepts.
        max_client_calls: Calls in progress of methods that clients may call.
    """

    def __init__(
        self,
        names: Mapping[CallerRole, tuple[str, ...]] | None,
        on_refused: Callable[[Refusal], None],
        *,
        max_client_calls: int,
    ) -> None:
        self._names = names
        self._on_refused = on_refused
        self._max_client_calls = max_client_calls
        self._num_client_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # UNIMPLEMENTED
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        return _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)](
            self._guarded(handler_call_details.method, _tidy(serve, is_stream=bool(handler.request_streaming))),
            request_deserializer=_reader(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, method: str, serve: Any) -> Any:
        name = method.rpartition("/")[2]
        roles = METHOD_ROLES.get(method, frozenset())

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if self._names is not None:
                await self._check_caller(method, roles, self._names, context)
            if roles == _PEER:
                return await TimedSteps(name, serve(request, context))
            await self._check_room(context)
            self._num_client_calls += 1
            try:
                return await TimedSteps(name, serve(request, context))
            finally:
                self._num_client_calls -= 1

        return guarded

    async def _check_caller(
        self,
        method: str,
        roles: frozenset[CallerRole],
        allowed: Mapping[CallerRole, tuple[str, ...]],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        names = caller_names(context)
        if any(first_match(allowed[role], names) is not None for role in roles):
            return
        shown = method.removeprefix("/").removeprefix("kvferry.v1.")
        lists = " or ".join(role.setting for role in CallerRole if role in roles) or "any list"
        refusal = Refusal(
            method=shown, caller=str(names), reason=f"{names} may not call {shown}: it is not in {lists} of this node"
        )
        self._on_refused(refusal)
        await end_call(context, grpc.StatusCode.PERMISSION_DENIED, refusal.reason)

    async def _check_room(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if (num_calls := self._num_client_calls) >= self._max_client_calls:
            details = f"{num_calls} calls of clients are in progress here, as many as may be; try again later, or elsewhere"
            await end_call(context, grpc.StatusCode.RESOURCE_EXHAUSTED, details)


def caller_names(context: grpc.aio.ServicerContext[Any, Any]) -> SubjectNames:
    """Return the names in the certificate that the caller has shown to be theirs; none without TLS."""
    found = context.auth_context()
    return SubjectNames(dns=_texts(found.get("peer_dns", ())), uris=_texts(found.get("peer_uri", ())))


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(bytes(value).decode("utf-8", "backslashreplace") for value in values)


def _reader(deserialise: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserialiser that returns the error of bytes that are no message. If it were raised, gRPC would answer."""
    if deserialise is None:
        return None

    def read(payload: bytes) -> Any:
        try:
            return deserialise(payload)
        except DecodeError as error:
            return RemoteProtocolError(f"request of {len(payload)} bytes cannot be read: {error}")

    return read


def _tidy(serve: Any, *, is_stream: bool) -> Any:
    """Return a coroutine function that never passes an unreadable message to `serve`, and sends each message that a generator
    yields.

    A generator is closed at the end of the call, not when the collector finds it.
    """
    is_generator = inspect.isasyncgenfunction(serve)

    async def tidy(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            given = _readable_stream(request) if is_stream else _checked(request)
            if not is_generator:
                return await serve(given, context)
            async with aclosing(serve(given, context)) as answers:
                async for answer in answers:
                    with cancelled_if_gone():
                        await context.write(answer)
        except RemoteProtocolError as error:
            await end_with(context, error)

    return tidy


def _checked(request: Any) -> Any:
    if isinstance(request, RemoteProtocolError):
        raise request
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of a stream, up to the first that could not be read, which is raised."""
    async for request in requests:
        yield _checked(request)
