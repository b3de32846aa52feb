"""Start and end the fork server, the process that forks the ranks of a node.

The fork server only imports the modules that every rank needs, which takes seconds. It has no threads of ours, no sockets of its
own and no CUDA context. The leader starts it before the settings are known. Both processes import at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from typing import Final

from node_runtime.streaming_copies import streaming_copies

MODULES_AT: Final = "KVFERRY_FORK_SERVER_MODULES"
"""Environment variable of the fork server: path of the pipe from which it reads module names, one per line."""
_FIRST: Final = "node_runtime.fork_server_first"
_NAMED: Final = "node_runtime.fork_server_named"
_LAST: Final = "node_runtime.fork_server_last"
_pipe: list[int] = []  # read end and write end of the pipe for module names; empty unless `begin_fork_server` was called


def begin_fork_server() -> None:
    """Start the fork server before the modules of the ranks are known.

    The fork server imports torch. Then it waits until `start_fork_server` names the other modules, or until this process ends.
    """
    atexit.register(end_fork_server)  # an invalid command line exits without `run_daemon`
    _pipe.extend(os.pipe())
    os.environ[MODULES_AT] = f"/proc/{os.getpid()}/fd/{_pipe[0]}"
    try:
        _start(("torch", _NAMED))
    finally:
        del os.environ[MODULES_AT]


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the fork server with SIGTERM blocked and with `streaming_copies`; every rank inherits both.

    If `begin_fork_server` has started it, send it the names of the modules. If it already runs with them, do nothing. Return
    before the imports are done.

    A service manager sends SIGTERM to all processes of the node, and only the leader may react to it. The leader learns of the
    end of a rank from the fork server. If the fork server ended, all ranks would seem dead.

    Args:
        preload: Modules to import, in order. The fork server ignores import errors, because the ranks report them.

    Raises:
        ConfigError: The folder for temporary files has a path that is too long for a socket, or cannot be written.
    """
    if len(_pipe) > 1:  # the fork server waits for the names
        os.write(_pipe[1], "\n".join(preload).encode())
        os.close(_pipe.pop())
    try:
        _start(preload)  # starts a new fork server if the previous one has ended
    except OSError as error:
        from transfer.errors import ConfigError  # imported late: 27 ms before the fork server begins with torch

        raise ConfigError(
            f"the fork server cannot listen in {tempfile.gettempdir()}: {error}; set TMPDIR to a shorter path"
        ) from error


def _start(preload: Sequence[str]) -> None:
    multiprocessing.resource_tracker.ensure_running()  # a later start would unblock SIGTERM
    # SIGINT, too: its handler needs the process id of a fork server that was started. `fork_server_first` unblocks it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        with streaming_copies():
            multiprocessing.get_context("forkserver").set_forkserver_preload([_FIRST, *preload, _LAST])
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_fork_server() -> None:
    """Kill the fork server and wait for its end. Do nothing if it does not run. Call this only when no rank is left.

    SIGKILL is safe, because the fork server has no data to write. A normal exit takes a second or more, because it unloads torch.
    The standard library has no public function for either way.
    """
    stop = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_stop", None)
    pid = fork_server_pid()
    if pid is not None and stop is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        stop()
    while _pipe:
        os.close(_pipe.pop())


def end_fork_server_at_once() -> None:
    """Do as `end_fork_server`, in a signal handler and before `os._exit`: take no lock, and remove the folder of the socket."""
    pid = fork_server_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)


def fork_server_pid() -> int | None:
    """Return the process id of the fork server; None means that no fork server runs."""
    pid: int | None = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_forkserver_pid", None)
    return pid
