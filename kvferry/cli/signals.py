"""Runs a command's coroutine. Signals that end a command cancel it, so that its clean-up runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from node_runtime import exit_codes


def run_until_signalled(command: Coroutine[Any, Any, int]) -> int:
    """Run the command and return its exit code, also if Ctrl-C, SIGTERM or SIGHUP cancels it."""
    return asyncio.run(_run(command))


async def _run(command: Coroutine[Any, Any, int]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(command)
    ended_by: list[int] = []

    def end(code: int) -> None:
        ended_by.append(code)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, end, exit_codes.INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, end, exit_codes.TERMINATED)
    loop.add_signal_handler(signal.SIGHUP, end, exit_codes.TERMINATED)
    try:
        return await task
    except asyncio.CancelledError:
        if not ended_by:
            raise
        return ended_by[0]
