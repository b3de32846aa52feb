"""Prefill nodes that a file names, which somebody changes while the nodes run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import yaml

from transfer.registry.discovery.source import Looks

MAX_FILE_BYTES: Final = 1 << 16


class NodeFile:
    """A source that looks at a file again when it changes: a YAML list of host:port, which may be empty.

    Args:
        path: The file. It is replaced as a whole, or its folder is, as Kubernetes does with what it mounts.
        interval_s: Seconds between looks.
    """

    def __init__(self, path: Path, *, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s

    @property
    def where(self) -> str:
        return f"file {self._path} (discovery.file)"

    async def follow(self, looks: Looks) -> None:
        read: tuple[int, ...] | None = None
        while True:
            try:
                found = await asyncio.to_thread(self._changed, read)
            except ValueError as error:
                read = None
                looks.failed(str(error))
            else:
                if found is None:
                    looks.same()
                else:
                    read, entries = found
                    looks.saw(entries)
            await asyncio.sleep(self._interval_s)

    def _changed(self, read: tuple[int, ...] | None) -> tuple[tuple[int, ...], list[str]] | None:
        """What tells the file from the one before, and its entries; None where it is the one that was read last.

        Raises:
            ValueError: It cannot be read, or holds no list.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                found = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
                if found == read:
                    return None
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror or error}") from error
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        try:
            entries = yaml.load(content, Loader=yaml.SafeLoader)
        except RecursionError:
            raise ValueError("it is nested too deeply; it must hold a list of host:port") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"it is not YAML: {' '.join(str(error).split())[:300]}") from error
        if not isinstance(entries, list):
            kind = "nothing" if entries is None else f"a {type(entries).__name__}"
            raise ValueError(f"it holds {kind}; it must hold a list of host:port, [] for none")
        return found, entries
