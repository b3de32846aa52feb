"""Exit codes of `kvferry`, `prefill-node`, `decode-node` and their processes; documented in docs/operations.md.

A code has one meaning in all of them: `kvferry demo` ends with the code of a node that could not start.
"""

from __future__ import annotations

from typing import Final

from transfer.errors import (
    ConfigError,
    EngineError,
    IntegrityError,
    LayoutError,
    MemoryPlanError,
    OutOfMemory,
    PeerUnreachable,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportError,
    TransportTimeout,
)

OK: Final = 0
FAILED: Final = 1  # tokens differ, a resource leaked, a check failed, a bug, or no other code fits
BAD_INPUT: Final = 2  # INVALID_ARGUMENT, or an invalid setting or argument
NO_ROOM: Final = 3  # RESOURCE_EXHAUSTED
UNAVAILABLE: Final = 4  # UNAVAILABLE: no process listens, no prefill node is joined, a rank died
ABORTED: Final = 5  # ABORTED or CANCELLED by another caller; a server that was stopped cut requests off
TOO_LATE: Final = 6  # DEADLINE_EXCEEDED
DATA_LOSS: Final = 7  # DATA_LOSS: bytes arrived broken twice
DOES_NOT_FIT: Final = 8  # FAILED_PRECONDITION, or what does not fit the memory of a device
ENGINE_FAILED: Final = 9  # INTERNAL, or an engine that could not start
LEADER_GONE: Final = 10  # a rank process: its leader has ended
INTERRUPTED: Final = 130  # Ctrl-C
TERMINATED: Final = 143  # SIGTERM, SIGHUP

_BY_ERROR: Final[tuple[tuple[type[TransferError], int], ...]] = (
    (ConfigError, BAD_INPUT),
    (LayoutError, DOES_NOT_FIT),
    (MemoryPlanError, DOES_NOT_FIT),
    (ResourceExhausted, NO_ROOM),
    (TransportTimeout, TOO_LATE),
    (PeerUnreachable, UNAVAILABLE),
    (TransportError, UNAVAILABLE),
    (TransferAborted, ABORTED),
    (IntegrityError, DATA_LOSS),
    (EngineError, ENGINE_FAILED),
)


def exit_code_of(error: BaseException, *, is_call: bool = False) -> int:
    """Return the exit code of a process that ends with `error`.

    Args:
        is_call: A node answered a call with the error. If memory ran out there, a later call may succeed.
    """
    if is_call and isinstance(error, OutOfMemory):
        return NO_ROOM
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), FAILED)
