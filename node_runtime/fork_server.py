"""The process that a node's ranks are forked from.

It imports the modules that every rank needs, which takes seconds, and nothing else. It has no threads of ours, no sockets of its
own and no CUDA context. The leader starts it before it knows its settings, and imports its own modules meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Sequence
from typing import Final

from node_runtime.streaming_copies import streaming_copies

MODULES_AT: Final = "KVFERRY_FORK_SERVER_MODULES"
"""In the fork server's environment: path at which `begin_fork_server` lets it read the names of modules, one per line."""
_FIRST: Final = "node_runtime.fork_server_first"
_NAMED: Final = "node_runtime.fork_server_named"
_LAST: Final = "node_runtime.fork_server_last"
_pipe: list[int] = []  # of a fork server that waits for names: where it reads, and where they are written


def begin_fork_server() -> None:
    """Start the fork server, as `start_fork_server` does, before it is known which modules the ranks need.

    It imports torch, and then waits until `start_fork_server` names the others or this process has ended.
    """
    atexit.register(end_fork_server)  # for a command line that is refused
    _pipe.extend(os.pipe())
    os.environ[MODULES_AT] = f"/proc/{os.getpid()}/fd/{_pipe[0]}"
    try:
        _start(("torch", _NAMED))
    finally:
        del os.environ[MODULES_AT]


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the fork server with SIGTERM blocked and with `streaming_copies`; both hold for every rank. No-op where it runs.

    Returns before the imports are done. A service manager sends SIGTERM to all processes of the node. It must end the leader's
    drain only: without the fork server, through which the leader learns of the ends of ranks, all ranks would seem dead.

    Args:
        preload: Modules to import, in order. A module that cannot be imported is left to the ranks, which report it.
    """
    if len(_pipe) > 1:  # not named yet
        os.write(_pipe[1], "\n".join(preload).encode())
        os.close(_pipe.pop())
    _start(preload)  # starts one that has ended again


def _start(preload: Sequence[str]) -> None:
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
    while _pipe:
        os.close(_pipe.pop())


def fork_server_pid() -> int | None:
    """Return the process id of the fork server; None means that none runs."""
    pid: int | None = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_forkserver_pid", None)
    return pid
