"""Errors that reach the exception handler of the running event loop, for tests with gRPC."""

from __future__ import annotations

import asyncio
from typing import Any


def record_loop_errors() -> list[dict[str, Any]]:
    """Set the exception handler of the running loop. Return a list that receives the context of each error.

    gRPC delivers the events of all loops of a process through the loop that runs. If the last call of an earlier test ends after
    the loop of this test was closed, gRPC reports "Event loop is closed" to the running loop. Such errors are left out: a loop
    that records errors is open.
    """
    errors: list[dict[str, Any]] = []

    def record(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if str(context.get("exception")) != "Event loop is closed":
            errors.append(context)

    asyncio.get_running_loop().set_exception_handler(record)
    return errors
