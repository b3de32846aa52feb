"""A gRPC method's handler, made anew around another method: what interceptors do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def method_of(handler: Any) -> Any:
    """The servicer's method: a coroutine function, or an async generator function."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def with_method(handler: Any, method: Any, *, read: Callable[[bytes], Any] | None = None) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind.

    Args:
        method: What serves; of the same kind as `method_of(handler)`.
        read: Takes the place of what deserialises requests; None: as it was.
    """
    return _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)](
        method, request_deserializer=read or handler.request_deserializer, response_serializer=handler.response_serializer
    )
