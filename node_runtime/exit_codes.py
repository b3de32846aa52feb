"""Exit codes of the daemons; documented in docs/operations.md."""

from __future__ import annotations

from transfer.errors import ConfigError, EngineError, LayoutError, MemoryPlanError

OK = 0  # stopped on request, everything drained
FAILED = 1  # a bug, or something that no other code names
BAD_CONFIG = 2  # a setting, the model directory, or an address
NO_MEMORY = 3  # the plan does not fit, or memory ran out
ENGINE_FAILED = 4  # the engine could not start, or its ranks died too often
NOT_DRAINED = 5  # stopped on request, with requests in flight
LEADER_GONE = 6  # a rank process: its leader has ended


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error that ends a process."""
    match error:
        case MemoryPlanError():
            return NO_MEMORY
        case ConfigError() | LayoutError():
            return BAD_CONFIG
        case EngineError():
            return ENGINE_FAILED
        case _:
            return FAILED
