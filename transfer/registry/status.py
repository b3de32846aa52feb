"""Convert errors to gRPC statuses and back.

`_STATUSES` has the status of each error that a servicer raises, `_ERRORS` the error that the caller's code gets for each status.

Every status has a google.rpc.Status in its trailing metadata, for programs: the word for the error, and the time after which
another attempt can succeed; google.rpc.ErrorInfo and RetryInfo carry them.

INTERNAL has `SPARES_KV` among its trailing metadata if the KV of the request is not suspect: a step failed for all of its
requests, or there is a bug. Without it, as from an older peer, the KV may be damaged.

RESOURCE_EXHAUSTED with `SPARES_KV` is `OutOfMemory`: an engine found no memory for a step, which counts against its node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from transfer.errors import (
    ChunkTooLarge,
    ConfigError,
    EngineError,
    IntegrityError,
    LayoutError,
    MemoryPlanError,
    NodeDraining,
    OutOfMemory,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    StoreFailed,
    TransferAborted,
    TransferError,
    TransportClosed,
    TransportError,
    TransportTimeout,
)

_Answer = TypeVar("_Answer")

MAX_DETAILS_CHARS: Final = 2000
"""Longest status text: it is one HTTP/2 header, and peers accept 8 KB of headers in all."""

SPARES_KV: Final = ("kvferry-spares-kv", "1")
"""Key and value; see the module's docstring."""

ERROR_DOMAIN: Final = "kvferry"

DETAILS_KEY: Final = "grpc-status-details-bin"

DETAILS_ROOM_BYTES: Final = 2500
"""Longest text, in bytes, that a status repeats in its google.rpc.Status, so that both stay below 8 KB of headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason of an error, for programs.

    Args:
        word: A constant, in capitals.
        retry_s: Seconds after which another attempt can succeed, on this node or another one; None means that it cannot.
    """

    word: str
    retry_s: float | None = None


OTHER_REASON: Final = Reason(word="INTERNAL")

_STATUSES: Final[tuple[tuple[type[TransferError], grpc.StatusCode, Reason], ...]] = (
    # The request can never succeed.
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT, Reason(word="INVALID_REQUEST")),
    (LayoutError, grpc.StatusCode.FAILED_PRECONDITION, Reason(word="TIERS_DO_NOT_FIT")),
    (RemoteProtocolError, grpc.StatusCode.INVALID_ARGUMENT, Reason(word="PROTOCOL_BROKEN")),
    # Ring or slot is too small until its configuration changes.
    (ChunkTooLarge, grpc.StatusCode.FAILED_PRECONDITION, Reason(word="CHUNK_TOO_LARGE")),
    (ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED, Reason(word="NO_ROOM", retry_s=1.0)),
    (MemoryPlanError, grpc.StatusCode.RESOURCE_EXHAUSTED, Reason(word="NO_MEMORY")),
    # At once, on another node.
    (NodeDraining, grpc.StatusCode.UNAVAILABLE, Reason(word="NODE_DRAINING", retry_s=0.0)),
    (PeerUnreachable, grpc.StatusCode.UNAVAILABLE, Reason(word="PEER_UNREACHABLE", retry_s=0.5)),
    (TransportTimeout, grpc.StatusCode.UNAVAILABLE, Reason(word="TIMED_OUT", retry_s=0.5)),
    (TransportError, grpc.StatusCode.UNAVAILABLE, Reason(word="TRANSFER_FAILED", retry_s=0.5)),
    (StoreFailed, grpc.StatusCode.UNAVAILABLE, Reason(word="STORE_FAILED", retry_s=1.0)),
    (IntegrityError, grpc.StatusCode.DATA_LOSS, Reason(word="BYTES_DAMAGED", retry_s=0.0)),
    (TransferAborted, grpc.StatusCode.ABORTED, Reason(word="ABORTED")),
    (EngineError, grpc.StatusCode.INTERNAL, Reason(word="ENGINE_FAILED")),
)
"""The first line that matches. Anything else is INTERNAL with `OTHER_REASON`: a bug."""

_ERRORS: Final[dict[grpc.StatusCode, type[TransferError]]] = {
    # The request or its caller is rejected.
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.OUT_OF_RANGE: ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: ConfigError,
    grpc.StatusCode.UNAUTHENTICATED: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: LayoutError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,  # `OutOfMemory` with `SPARES_KV`
    grpc.StatusCode.DEADLINE_EXCEEDED: TransportTimeout,
    # Try later: ALREADY_EXISTS says that an older session is not yet dead.
    grpc.StatusCode.UNAVAILABLE: PeerUnreachable,
    grpc.StatusCode.ALREADY_EXISTS: PeerUnreachable,
    grpc.StatusCode.NOT_FOUND: TransportClosed,  # the session or request is over there
    grpc.StatusCode.CANCELLED: TransferAborted,
    grpc.StatusCode.ABORTED: TransferAborted,
    grpc.StatusCode.DATA_LOSS: IntegrityError,
    grpc.StatusCode.INTERNAL: EngineError,
    grpc.StatusCode.UNIMPLEMENTED: RemoteProtocolError,  # the peer does not know the method
}
"""`TransportError` for UNKNOWN and anything else."""


_CALL_BROKEN: Final = "Internal error from Core"
"""Details with which gRPC for Python (grpcio 1.85, aio) ends a call as INTERNAL if it could not send a message of a stream: the
connection broke, or the server ended the call first. The server's own status is lost."""


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the status with which a servicer ends a call for `error`."""
    return next((code for kind, code, _ in _STATUSES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: BaseException) -> str:
    """Return one line for the caller. An unexpected exception gives only its type, because its text can have secrets."""
    if not isinstance(error, TransferError):
        return f"unexpected {type(error).__name__}; see the log of the node"
    return clip_details(str(error))


def clip_details(text: str) -> str:
    """Return `text` as one line that fits a status."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_DETAILS_CHARS else line[: MAX_DETAILS_CHARS - 1] + "…"


def reason_of(error: BaseException) -> Reason:
    """Return the reason of `error`, for programs."""
    return next((reason for kind, _, reason in _STATUSES if isinstance(error, kind)), OTHER_REASON)


def status_details(code: grpc.StatusCode, details: str, reason: Reason) -> bytes | None:
    """Return the google.rpc.Status of an error; None if its text leaves no room for it."""
    if len(details.encode()) > DETAILS_ROOM_BYTES:
        return None
    info, retry = any_pb2.Any(), any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason.word, domain=ERROR_DOMAIN))
    parts = [info]
    if reason.retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(reason.retry_s * 1e9))
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        parts.append(retry)
    status = status_pb2.Status(code=code.value[0], message=details, details=parts)
    packed: bytes = status.SerializeToString()
    return packed


async def end_with(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call of `context` with the status of `error`; never returns."""
    code = status_of(error)
    is_spared = error.spares_kv if isinstance(error, EngineError) else code is grpc.StatusCode.INTERNAL
    await end_call(context, code, details_of(error), (SPARES_KV,) if is_spared else (), reason=reason_of(error))


async def end_call(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    details: str,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
    *,
    reason: Reason | None = None,
) -> NoReturn:
    """End the call of `context`; never returns. If the caller has left, nothing is logged.

    Args:
        reason: For programs; by default the name of the code.
    """
    packed = status_details(code, details, reason or Reason(word=code.name))
    if packed is not None:
        metadata = (*metadata, (DETAILS_KEY, packed))
    with cancelled_if_gone():
        # A status waits behind messages that the caller does not read, so the caller can leave long after the abort.
        await context.abort(code, details, metadata)
    raise AssertionError("abort() returned")


@contextlib.contextmanager
def cancelled_if_gone() -> Iterator[None]:
    """Convert gRPC's error about a caller that left to a cancellation; gRPC would log a failure."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def is_http1(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a call failed because its port answers in HTTP/1, as `server.http_port` does."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and ("Failed parsing HTTP/2" in details or "http1.x" in details)


def _connection_details(error: grpc.aio.AioRpcError) -> str:
    """Return a plain line for the most frequent reasons of failed connections, or an empty text."""
    if is_http1(error):
        return "this port speaks HTTP/1, not gRPC; it may be the node's server.http_port"
    details = error.details() or ""
    is_refused = (
        error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details and "Connection refused" in details
    )
    return "nothing listens on this port (Connection refused)" if is_refused else ""


def error_of(error: grpc.aio.AioRpcError, *, peer: str) -> TransferError:
    """Return the error for the caller's code after a failed call to `peer`; raise it ``from error``."""
    code = error.code()
    text = f"{peer}: {clip_details(_connection_details(error) or error.details() or code.name)}"
    spares_kv = SPARES_KV in tuple(error.trailing_metadata() or ())
    if code is grpc.StatusCode.INTERNAL and error.details() == _CALL_BROKEN:
        return PeerUnreachable(text)
    if code is grpc.StatusCode.INTERNAL:
        return EngineError(text, spares_kv=spares_kv)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and spares_kv:
        return OutOfMemory(text)
    return _ERRORS.get(code, TransportError)(text)


def tier_error_of(error: grpc.aio.AioRpcError, *, peer: str) -> TransferError:
    """As `error_of`, for a call from one tier to the other on a client's behalf.

    If the other tier does not allow this node to call it, the client's request is not at fault, and another node may serve it.
    """
    if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return PeerUnreachable(f"{peer}: {clip_details(error.details() or error.code().name)}")
    return error_of(error, peer=peer)


def readable(answer: _Answer | None, *, method: str, peer: str = "") -> _Answer:
    """Return an answer of `peer` to a call of `method`. A client's gRPC gives None for bytes that are no message.

    Raises:
        RemoteProtocolError: Its bytes did not parse.
    """
    if answer is None:
        prefix = f"{peer}: " if peer else ""
        raise RemoteProtocolError(f"{prefix}an answer of {method} cannot be read")
    return answer
