"""What a daemon does before it imports its command line and the classes of its settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from node_runtime.fork_server import begin_fork_server
from node_runtime.open_files import raise_open_files

_WITHOUT_RANKS: Final = frozenset(("--check-config", "--help"))


def start_early(arguments: Sequence[str]) -> None:
    """Let the fork server begin with torch, which takes longest, where a command line asks for a node.

    Args:
        arguments: Of the command line. Settings that turn out to be wrong cost an import.
    """
    if arguments[:1] == ["serve"] and not _WITHOUT_RANKS.intersection(arguments):
        prepare_process()
        begin_fork_server()


def prepare_process() -> None:
    """Do what only a daemon may do to its process: raise its limits, and set the environment that libraries read when loaded.

    Called before those libraries are loaded, here or in the fork server.
    """
    raise_open_files()
    # UCX writes its own log to standard output, and warns about peers that have died, which this node notices by itself.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    # gRPC's core writes lines of its own form to standard error, of what its callers are told anyway; it reads this when loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
