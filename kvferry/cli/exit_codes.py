"""Exit codes of the `kvferry` command; those of the daemons are in `node_runtime.exit_codes`."""

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
FAILED: Final = 1  # the demo's tokens differ, a resource leaked, a check failed, or no other code fits
BAD_INPUT: Final = 2  # INVALID_ARGUMENT, or an invalid argument
NO_ROOM: Final = 3  # RESOURCE_EXHAUSTED
UNAVAILABLE: Final = 4  # UNAVAILABLE: no process listens, no prefill node is joined, a rank died
ABORTED: Final = 5  # ABORTED or CANCELLED, by another caller
TOO_LATE: Final = 6  # DEADLINE_EXCEEDED
DATA_LOSS: Final = 7  # DATA_LOSS: bytes arrived broken twice
DOES_NOT_FIT: Final = 8  # FAILED_PRECONDITION, or a plan that does not fit its device
ENGINE_FAILED: Final = 9  # INTERNAL
INTERRUPTED: Final = 130  # Ctrl-C
TERMINATED: Final = 143  # SIGTERM, SIGHUP

_BY_ERROR: Final[tuple[tuple[type[TransferError], int], ...]] = (
    (ConfigError, BAD_INPUT),
    (LayoutError, DOES_NOT_FIT),
    (OutOfMemory, NO_ROOM),
    (MemoryPlanError, DOES_NOT_FIT),
    (ResourceExhausted, NO_ROOM),
    (TransportTimeout, TOO_LATE),
    (PeerUnreachable, UNAVAILABLE),
    (TransportError, UNAVAILABLE),
    (TransferAborted, ABORTED),
    (IntegrityError, DATA_LOSS),
    (EngineError, ENGINE_FAILED),
)


def exit_code_of(error: TransferError) -> int:
    """Return the exit code of a command that ends with `error`; for a failed call it follows from the gRPC status (see above)."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), FAILED)
