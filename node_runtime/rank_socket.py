"""Locate the socket file where an engine's ranks meet the leader; both derive its name from the instance.

The engine starts its processes itself, in any order, so neither end hands the other an address. The name comes from something
that only this instance of the engine has, such as the id that vLLM gives it. The file lies in a folder that only this user can
enter.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from node_runtime.rank_link import RankAddress
from transfer.errors import ConfigError

_NAME_CHARS = 16  # of the digest: paths of sockets have 107 characters at most


def rank_socket_address(instance: str, rank: int) -> RankAddress:
    """Where a rank of the named instance meets its leader.

    Raises:
        ConfigError: There is no folder for it that only this user can enter.
    """
    name = hashlib.sha256(instance.encode()).hexdigest()[:_NAME_CHARS]
    return RankAddress(endpoint=f"ipc://{_private_folder() / name}", token=rank + 1)


def _private_folder() -> Path:
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = parent / f"kvferry-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"folder {folder} for the sockets of ranks cannot be made: {error.strerror}; set XDG_RUNTIME_DIR"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"folder {folder} for the sockets of ranks is not this user's alone (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); it must be a folder of mode 700: remove it, or set XDG_RUNTIME_DIR"
        )
    return folder
