"""First steps of a daemon, before it imports its command line and the classes of its settings."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

from node_runtime.fork_server import begin_fork_server, end_fork_server_at_once
from node_runtime.open_files import raise_open_files

_WITHOUT_RANKS: Final = frozenset(("--check-config", "--help"))
_STOPPED: Final = 0  # `exit_codes.OK`; importing that module would delay the fork server by 20 ms


def start_early(arguments: Sequence[str]) -> None:
    """Start the fork server if the command line starts a node. The import of torch takes longest, so it begins first.

    Args:
        arguments: Arguments of the command line. They are not validated yet. If they are invalid, the import was in vain.
    """
    if arguments[:1] == ["serve"] and not _WITHOUT_RANKS.intersection(arguments):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        prepare_process()
        with contextlib.suppress(OSError):  # `start_fork_server` reports it
            begin_fork_server()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End a node that does not serve yet, which nothing else would end with its fork server. `Daemon.run` replaces this handler.

    SystemExit would be lost now and then (2 of 400 signals): Python ignores an exception in the callbacks of its import locks.
    """
    end_fork_server_at_once()
    os._exit(_STOPPED)


def prepare_process() -> None:
    """Raise the limits of this process, and set environment variables that libraries read when they are loaded.

    Only a daemon may call this, and only before these libraries are loaded, here or in the fork server.
    """
    raise_open_files()
    # UCX logs to standard output, and warns about dead peers, which this node detects itself.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    # gRPC's core logs errors to standard error in another format. Its callers receive these errors anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
