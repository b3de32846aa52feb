"""Errors to gRPC statuses and back: the only place where either becomes the other.

What a servicer raises, and the status its caller gets (`status_of`; the first line that matches):

=========================  ====================  ==============================================================
error                      status                because
=========================  ====================  ==============================================================
`ConfigError`              INVALID_ARGUMENT      what was asked for can never be done
`LayoutError`              FAILED_PRECONDITION   the two sides do not fit
`RemoteProtocolError`      INVALID_ARGUMENT      the caller broke a rule
`ChunkTooLarge`            FAILED_PRECONDITION   ring or slot is too small until somebody configures it otherwise
`StagingError`             RESOURCE_EXHAUSTED    no room now
`MemoryPlanError`          RESOURCE_EXHAUSTED    no room
`TransportError`           UNAVAILABLE           try another node, or later
`IntegrityError`           DATA_LOSS             bytes arrived broken
`TransferAborted`          ABORTED               given up on purpose
anything else              INTERNAL              a bug, or the engine failed
=========================  ====================  ==============================================================

What a call ends in, and what the caller's code gets (`error_of`):

======================================  =======================  ==============================================
status                                  error                    because
======================================  =======================  ==============================================
INVALID_ARGUMENT, OUT_OF_RANGE,         `ConfigError`            what we asked for, or who we are, is refused
PERMISSION_DENIED, UNAUTHENTICATED
FAILED_PRECONDITION                     `LayoutError`            the two sides do not fit
RESOURCE_EXHAUSTED                      `StagingError`           no room there now
DEADLINE_EXCEEDED                       `TransportTimeout`       our deadline passed
UNAVAILABLE, ALREADY_EXISTS             `PeerUnreachable`        try later (an older session is not yet dead)
NOT_FOUND                               `TransportClosed`        the session or request is over there
CANCELLED, ABORTED                      `TransferAborted`        given up on purpose
DATA_LOSS                               `IntegrityError`         bytes arrived broken
UNIMPLEMENTED                           `RemoteProtocolError`    the peer does not know the method
INTERNAL                                `EngineError`            the peer's engine or code failed
UNKNOWN, anything else                  `TransportError`         nobody can say
======================================  =======================  ==============================================

INTERNAL has `SPARES_KV` among its trailing metadata where nothing is said against the KV of the one request: a step failed for
all of its requests, or there is a bug. Without, as an older peer always sends it, that KV may be damaged.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NoReturn

import grpc

from transfer.errors import (
    ChunkTooLarge,
    ConfigError,
    EngineError,
    IntegrityError,
    LayoutError,
    MemoryPlanError,
    PeerUnreachable,
    RemoteProtocolError,
    StagingError,
    TransferAborted,
    TransferError,
    TransportClosed,
    TransportError,
    TransportTimeout,
)

MAX_DETAILS_CHARS: Final = 2000
"""Longest status text: it travels as one HTTP/2 header, of which peers accept 8 KB in all."""

SPARES_KV: Final = ("kvferry-spares-kv", "1")
"""Key and value; see the module's docstring."""

_CODES: Final[tuple[tuple[type[TransferError], grpc.StatusCode], ...]] = (
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (LayoutError, grpc.StatusCode.FAILED_PRECONDITION),
    (RemoteProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (ChunkTooLarge, grpc.StatusCode.FAILED_PRECONDITION),
    (StagingError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (MemoryPlanError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TransportError, grpc.StatusCode.UNAVAILABLE),
    (IntegrityError, grpc.StatusCode.DATA_LOSS),
    (TransferAborted, grpc.StatusCode.ABORTED),
)

_ERRORS: Final[dict[grpc.StatusCode, type[TransferError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.OUT_OF_RANGE: ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: ConfigError,
    grpc.StatusCode.UNAUTHENTICATED: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: LayoutError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: StagingError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TransportTimeout,
    grpc.StatusCode.UNAVAILABLE: PeerUnreachable,
    grpc.StatusCode.ALREADY_EXISTS: PeerUnreachable,
    grpc.StatusCode.NOT_FOUND: TransportClosed,
    grpc.StatusCode.CANCELLED: TransferAborted,
    grpc.StatusCode.ABORTED: TransferAborted,
    grpc.StatusCode.DATA_LOSS: IntegrityError,
    grpc.StatusCode.UNIMPLEMENTED: RemoteProtocolError,
}


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status that a servicer ends a call with for `error`."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            return code
    return grpc.StatusCode.INTERNAL


def details_of(error: BaseException) -> str:
    """One line for the caller; of an unexpected exception only its type, for its text may hold what is none of the caller's."""
    if not isinstance(error, TransferError):
        return f"unexpected {type(error).__name__}; see the log of the node"
    return clip_details(str(error))


def clip_details(text: str) -> str:
    """`text` as one line that fits a status."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    return line if len(line) <= MAX_DETAILS_CHARS else line[: MAX_DETAILS_CHARS - 1] + "…"


async def end_with(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call of `context` with the status of `error`; never returns."""
    code = status_of(error)
    is_spared = error.spares_kv if isinstance(error, EngineError) else code is grpc.StatusCode.INTERNAL
    await end_call(context, code, details_of(error), (SPARES_KV,) if is_spared else ())


async def end_call(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """End the call of `context`; never returns. That nobody is there any more to hear it is no error, and so none in the log."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError as error:
        # The caller went away first, perhaps long after the abort: a status waits behind messages that the caller does not read.
        # gRPC may not have noticed yet, and would log a failure; this it takes for the caller's own cancellation, which it is.
        raise asyncio.CancelledError from error
    raise AssertionError("abort() returned")


def error_of(error: grpc.aio.AioRpcError, *, peer: str) -> TransferError:
    """The error that a failed call to `peer` is for the caller's code; raise it ``from error``."""
    code = error.code()
    text = f"{peer}: {clip_details(error.details() or code.name)}"
    if code is grpc.StatusCode.INTERNAL:
        return EngineError(text, spares_kv=SPARES_KV in tuple(error.trailing_metadata() or ()))
    return _ERRORS.get(code, TransportError)(text)


def tier_error_of(error: grpc.aio.AioRpcError, *, peer: str) -> TransferError:
    """As `error_of`, for what one tier asks of the other on a client's behalf.

    That the other tier does not let this node call it is no fault of the client's request, which another node may serve.
    """
    if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return PeerUnreachable(f"{peer}: {clip_details(error.details() or error.code().name)}")
    return error_of(error, peer=peer)
