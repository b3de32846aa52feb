"""Store pages in a local or mounted directory: a file for each page, shared by any number of processes.

A page is written into a file of its own, which is then renamed. So a key has a whole page or none, even if the writer dies.
Nothing is flushed to the disk, because the envelope shows after a power cut which pages are whole. A file is locked while it is
written, so an unlocked file with an unfinished page is the leftover of a dead writer (see `transfer.storage.directory_room`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Final

import structlog

from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.directory_room import FILE_MODE, LEFTOVER_AGE_S, WRITING, DirectoryRoom
from transfer.storage.envelope import HEADER_BYTES, check, header_of
from transfer.storage.keys import fingerprint_of
from transfer.storage.page_store import PageStore

FOLDER_MODE: Final = 0o700
"""Mode of a new folder. A prompt can be reconstructed from its KV, so pages are for the node's user alone."""

_FAN_OUT_CHARS: Final = 2  # of the page's hash, which makes 256 folders for each fingerprint

log = structlog.get_logger(__name__)


class DirectoryStore(PageStore):
    """See the module's docstring, and `transfer.storage.base.Store`.

    The constructor does not touch the disk. A directory that fails after the node's start (`check_directory`) fails its pages,
    not the node.

    Args:
        directory: Created at the first put if it is missing, but not created again if it goes away later.
        max_bytes: Most bytes of all files together; None means as many as the disk takes.
        leftover_age_s: See `LEFTOVER_AGE_S`.
    """

    def __init__(self, directory: Path, *, max_bytes: int | None = None, leftover_age_s: float = LEFTOVER_AGE_S) -> None:
        self._root = directory
        self._was_there = False
        self._room = DirectoryRoom(directory, max_bytes=max_bytes, leftover_age_s=leftover_age_s)

    @property
    def name(self) -> str:
        return str(self._root)

    def _path(self, key: str) -> Path:
        """Return the file of a key. Raise ConfigError for any other text, which may be a path to somewhere else."""
        fingerprint = fingerprint_of(key)
        name = key[len(fingerprint) + 1 :]
        return self._root / fingerprint / name[:_FAN_OUT_CHARS] / name

    def _put(self, key: str, page: memoryview, used_ns: int) -> Outcome:
        path, num_bytes = self._path(key), HEADER_BYTES + page.nbytes
        if self._is_there(path, num_bytes, used_ns):
            return Outcome.OK
        self._require_root()
        self._room.prepare(path.parent)
        temporary = _new_file_in(path.parent)
        with contextlib.ExitStack() as undo:
            file = _created(temporary)
            undo.callback(os.close, file)
            undo.callback(temporary.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, num_bytes)  # counted whole from now on, see DirectoryRoom
            if not self._room.take(num_bytes):
                raise OSError(errno.EDQUOT, f"{num_bytes} bytes do not fit storage.max_bytes, or others take them at once")
            undo.callback(self._room.give_back, num_bytes)
            _write(file, header_of(key, page), page)
            os.utime(file, ns=(used_ns, used_ns))
            temporary.rename(path)
            undo.pop_all()
            os.close(file)
        return Outcome.OK

    def _require_root(self) -> None:
        """Create the directory, unless it was there before: under an unmounted one is another disk.

        Raises:
            OSError: It cannot be created, or is gone.
        """
        if not self._was_there:
            _make(self._root)
            self._was_there = True
        elif not self._root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the store's directory is gone", str(self._root))

    def _is_there(self, path: Path, num_bytes: int, used_ns: int) -> bool:
        """Return whether a page of that size is stored, and mark it as used."""
        try:
            if path.stat().st_size != num_bytes:
                return False
        except FileNotFoundError:
            return False
        _mark_used(path, used_ns)
        return True

    def _get(self, key: str, page: memoryview, used_ns: int) -> Outcome:
        file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = bytearray(HEADER_BYTES)
            num_read = _read(file, header, page, bytearray(1))  # a byte too many, to notice a longer file
            outcome = check(key, header[:num_read], page, num_bytes=num_read)
            if outcome is Outcome.OK:
                _mark_used(file, used_ns)
        finally:
            os.close(file)
        return outcome

    def _exists(self, key: str) -> Outcome:
        return Outcome.OK if stat.S_ISREG(self._path(key).stat().st_mode) else Outcome.MISSING

    def _delete(self, key: str) -> Outcome:
        path = self._path(key)
        num_bytes = path.stat().st_size
        path.unlink()
        self._room.give_back(num_bytes)
        return Outcome.OK


def check_directory(directory: Path) -> None:
    """Create a store's directory if it is missing, and try it. Log a warning if other users can write there.

    Raises:
        ConfigError: It cannot be created, or this process may not write there. A full disk is no error: stored pages can be read,
            and there may be room again.
    """
    try:
        _make(directory)
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):  # another page there means other tokens
            log.warning("store_writable_by_others", directory=str(directory), mode=f"{mode:#o}", advice=f"chmod {FOLDER_MODE:o}")
        probe = _new_file_in(directory)
        try:
            os.close(_created(probe))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"storage.directory is {directory}; it must be a folder that this process can write: {error.strerror}"
        ) from error


def _make(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def _mark_used(file: int | Path, used_ns: int) -> None:
    """Set the time of use, unless it is later already: a request's pages count as used when it was asked for."""
    with contextlib.suppress(OSError):  # on a read-only mount, where the age does not matter
        if os.stat(file).st_mtime_ns < used_ns:
            os.utime(file, ns=(used_ns, used_ns))


def _new_file_in(folder: Path) -> Path:
    """Return a name that no other process on any host has."""
    return folder / f"{WRITING}{secrets.token_hex(8)}"


def _created(path: Path) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileNotFoundError:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        return os.open(path, flags, FILE_MODE)


def _write(file: int, *parts: bytes | memoryview) -> None:
    """Write all parts. Raise OSError if that fails, or if only some bytes were written."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            written = os.write(file, rest)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest = rest[written:]


def _read(file: int, *parts: bytearray | memoryview) -> int:
    """Fill the parts in turn, and return the number of bytes read."""
    total = 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            num_read = os.readv(file, [rest])
            if not num_read:
                return total
            total += num_read
            rest = rest[num_read:]
    return total
