"""The process that a node's ranks are forked from.

It imports the modules that every rank needs, which takes seconds, and nothing else. It has no threads of ours, no sockets of its
own and no CUDA context. The leader starts it as soon as the settings are known, and imports its own modules meanwhile.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Sequence
from typing import Final

from node_runtime.streaming_copies import streaming_copies

_FIRST: Final = "node_runtime.fork_server_first"
_LAST: Final = "node_runtime.fork_server_last"


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the fork server with SIGTERM blocked and with `streaming_copies`; both hold for every rank. No-op where it runs.

    Returns before the imports are done. A service manager sends SIGTERM to all processes of the node. It must end the leader's
    drain only: without the fork server, through which the leader learns of the ends of ranks, all ranks would seem dead.

    Args:
        preload: Modules to import, in order. A module that cannot be imported is left to the ranks, which report it.
    """
    multiprocessing.resource_tracker.ensure_running()  # would take the block away, if it had to be started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with streaming_copies():
            multiprocessing.get_context("forkserver").set_forkserver_preload([_FIRST, *preload, _LAST])
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_fork_server() -> None:
    """End the fork server and wait for its end. Call it when no rank is left. No-op where it does not run.

    It is killed: it has nothing to write, and takes a second or more to unload torch when it ends by itself. The standard library
    has no public way to do either.
    """
    stop = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_stop", None)
    pid = fork_server_pid()
    if pid is not None and stop is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        stop()


def fork_server_pid() -> int | None:
    """Return the process id of the fork server; None means that none runs."""
    pid: int | None = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_forkserver_pid", None)
    return pid
