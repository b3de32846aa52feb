"""The command line that both daemons share: one settings file, the environment, and flags over them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transfer
from node_runtime import exit_codes
from node_runtime.rank_setup import check_before_start
from transfer.config import NodeConfig
from transfer.errors import TransferError
from transfer.load_config import AnyNodeConfig, load_config
from transfer.logs import configure_logging


def run_daemon(
    config_type: type[AnyNodeConfig],
    *,
    file: Path | None,
    flags: dict[str, object],
    overrides: list[str],
    is_check_only: bool,
    serve: Callable[[AnyNodeConfig], Any],
) -> None:
    """Load the settings and be a node with them; ends the process with one of `exit_codes`.

    Args:
        flags: Values of named flags by path of their setting; None where a flag was not given.
        is_check_only: Say whether the settings are right, and end.
        serve: Coroutine function: the node's life, which returns its exit code.
    """
    try:
        config = load_config(config_type, file=file, environment=os.environ, flags=flags, overrides=overrides)
        check_before_start(config)
        if is_check_only:
            print(f"{config.role}: the settings are right")
            sys.exit(exit_codes.OK)
        prepare_process(config)
        code = asyncio.run(serve(config))
    except TransferError as error:
        for line in str(error).splitlines():
            print(f"{config_type.role}-node: {line}", file=sys.stderr)
        sys.exit(exit_codes.exit_code_of(error))
    sys.exit(code)


def prepare_process(config: NodeConfig) -> None:
    """What only a daemon may do to its process: logging, and the environment of libraries that read nothing else."""
    configure_logging(config.log, role=config.role)
    # UCX writes its own log to standard output, and warns about peers that have died, which this node notices by itself.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def print_version(is_wanted: bool) -> None:
    """Callback of ``--version``."""
    if is_wanted:
        print(f"kvferry {transfer.__version__}")
        sys.exit(exit_codes.OK)
