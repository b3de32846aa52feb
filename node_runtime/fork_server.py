"""Start and end the fork server, the process that forks the ranks of a node, or use that of a local cluster.

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
from types import FrameType
from typing import Any, Final, NoReturn

from node_runtime.process_setup import prepare_process, streaming_copies

MODULES_AT: Final = "KVFERRY_FORK_SERVER_MODULES"
"""Environment variable of the fork server: path of the pipe from which it reads module names, one per line."""
SHARED_AT: Final = "FORK_SERVER_OF_KVFERRY"  # not KVFERRY_...: the daemons reject unknown names with that prefix
"""Environment variable of a node: path of the socket of a fork server that several nodes share. See docs/adr/0064."""
_MAIN: Final = "node_runtime.fork_server_main"
_WITHOUT_RANKS: Final = frozenset(("--check-config", "--help"))
_STOPPED: Final = 0  # `exit_codes.OK`; importing that module would delay the fork server by 20 ms
_pipe: list[int] = []  # read end of the pipe for module names, and its write end until the last name is written


def start_early(arguments: Sequence[str]) -> None:
    """Start the fork server if the command line starts a node. The first steps of a daemon, before it imports its settings.

    Args:
        arguments: Arguments of the command line. They are not validated yet. If they are invalid, the import was in vain.
    """
    if arguments[:1] == ["serve"] and not _WITHOUT_RANKS.intersection(arguments):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        prepare_process()
        atexit.register(end_fork_server)  # an invalid command line exits without `run_daemon`
        if SHARED_AT not in os.environ:
            with contextlib.suppress(OSError):  # `start_fork_server` reports it
                _begin(("torch",))  # its import takes longest


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End a node that does not serve yet, which nothing else would end with its fork server. `Daemon.run` replaces this handler.

    It takes no lock. SystemExit would be lost now and then (2 of 400 signals): Python ignores exceptions in the callbacks of its
    import locks.
    """
    pid = fork_server_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)  # the folder of its socket
    os._exit(_STOPPED)


def start_fork_server(preload: Sequence[str] = ()) -> None:
    """Start the fork server with SIGTERM blocked and with `streaming_copies`; every rank inherits both.

    If it waits for module names, send it the names. If it already runs with them, or if `SHARED_AT` names one, start none. Return
    before the imports are done.

    A service manager sends SIGTERM to all processes of the node, and only the leader may react to it. The leader learns of the
    end of a rank from the fork server. If the fork server ended, all ranks would seem dead.

    Args:
        preload: Modules to import, in order. The fork server ignores import errors, because the ranks report them.

    Raises:
        ConfigError: The folder for temporary files has a path that is too long for a socket, or cannot be written.
    """
    if SHARED_AT in os.environ:
        _share(os.environ[SHARED_AT])
        return
    try:
        _begin(preload)
    except OSError as error:
        from transfer.errors import ConfigError  # imported late: 27 ms before the fork server begins with torch

        raise ConfigError(
            f"the fork server cannot listen in {tempfile.gettempdir()}: {error}; set TMPDIR to a shorter path"
        ) from error
    if len(_pipe) > 1:
        os.close(_pipe.pop())


def _begin(modules: Sequence[str]) -> None:
    """Start the fork server unless it runs, and name modules to it. It waits for more until the pipe's write end is closed."""
    before = fork_server_pid()
    pipe = os.pipe()
    multiprocessing.resource_tracker.ensure_running()  # a later start would unblock SIGTERM
    # SIGINT, too: its handler needs the process id of a fork server that was started. `fork_server_main` unblocks it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.environ[MODULES_AT] = f"/proc/{os.getpid()}/fd/{pipe[0]}"
    try:
        with streaming_copies():
            multiprocessing.get_context("forkserver").set_forkserver_preload([_MAIN])
            multiprocessing.forkserver.ensure_running()  # starts a new one if the former one has ended
    finally:
        del os.environ[MODULES_AT]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        is_new = fork_server_pid() != before
        for end in _pipe if is_new else pipe:
            os.close(end)
        if is_new:
            _pipe[:] = pipe
    if len(_pipe) > 1:
        os.write(_pipe[1], "".join(f"{name}\n" for name in modules).encode())


def _share(address: str) -> None:
    """Let the standard library fork from the fork server at this address, which another process has started.

    The standard library shares a fork server with descendants of its starter only, and has no public function for others.
    """
    client = _client()
    if client._forkserver_address != address:
        client._forkserver_address = address
        # Each process that forks keeps its fork server alive with such a descriptor. The owner of the cluster ends this one.
        client._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        client.ensure_running = multiprocessing.resource_tracker.ensure_running


def leave_shared_fork_server() -> bool:
    """Use a fork server of this process from now on. Return False if no other was used."""
    client = _client()
    if os.environ.pop(SHARED_AT, None) is None or "ensure_running" not in vars(client):
        return False
    del client.ensure_running
    os.close(client._forkserver_alive_fd)
    client._forkserver_address = client._forkserver_alive_fd = None
    return True


def can_share() -> bool:
    """Return whether the standard library can use another process's fork server. Python 3.14 authenticates its clients."""
    return not hasattr(_client(), "_forkserver_authkey")


def _client() -> Any:
    return multiprocessing.forkserver._forkserver


def end_fork_server() -> None:
    """Kill the fork server of this process and wait for its end. Do nothing if there is none. Call this when no rank is left.

    SIGKILL is safe, because the fork server has no data to write. A normal exit takes a second or more, because it unloads torch.
    The standard library has no public function for either way.
    """
    pid = fork_server_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _client()._stop()
    while _pipe:
        os.close(_pipe.pop())


def fork_server_pid() -> int | None:
    """Return the process id of the fork server of this process; None means that it has started none."""
    pid: int | None = _client()._forkserver_pid
    return pid
