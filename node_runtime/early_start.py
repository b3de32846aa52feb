"""First steps of a daemon, before it imports its command line and the classes of its settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from node_runtime.fork_server import begin_fork_server
from node_runtime.open_files import raise_open_files

_WITHOUT_RANKS: Final = frozenset(("--check-config", "--help"))


def start_early(arguments: Sequence[str]) -> None:
    """Start the fork server if the command line starts a node. The import of torch takes longest, so it begins first.

    Args:
        arguments: Arguments of the command line. They are not validated yet. If they are invalid, the import was in vain.
    """
    if arguments[:1] == ["serve"] and not _WITHOUT_RANKS.intersection(arguments):
        prepare_process()
        begin_fork_server()


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
