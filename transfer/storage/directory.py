"""A local directory, or a mounted one, as a store: a file for each page, shared by any number of processes.

A page is written into a file with a name of its own, which is then renamed: whatever happens to a writer, a key has a whole page
or none. Nothing is flushed to the disk, for after a power cut the envelope tells what got there. A file is locked for as long as
it is written, so what a killed writer leaves is known by nobody's holding it (see `transfer.storage.directory_room`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from transfer.errors import ConfigError
from transfer.storage.base import Outcome, used_times
from transfer.storage.directory_room import FILE_MODE, LEFTOVER_AGE_S, WRITING, DirectoryRoom
from transfer.storage.envelope import HEADER_BYTES, check, header_of
from transfer.storage.keys import fingerprint_of

FOLDER_MODE: Final = 0o700
"""Of a folder that is made here. A prompt can be computed back from its KV: pages are for the node's user alone."""

_FAN_OUT_CHARS: Final = 2  # of the page's hash: 256 folders for each fingerprint

log = structlog.get_logger(__name__)


class DirectoryStore:
    """See the module's docstring, and `transfer.storage.base.Store`.

    Making one touches no disk: what has become of a directory since the node's start (`check_directory`) fails its pages, and
    not the node.

    Args:
        directory: Made at the first put, where it is not there; not made again when it goes away later.
        max_bytes: Of all files together; None: as many as the disk takes.
        leftover_age_s: See `LEFTOVER_AGE_S`.
    """

    def __init__(self, directory: Path, *, max_bytes: int | None = None, leftover_age_s: float = LEFTOVER_AGE_S) -> None:
        self._root = directory
        self._was_there = False
        self._room = DirectoryRoom(directory, max_bytes=max_bytes, leftover_age_s=leftover_age_s)

    @property
    def name(self) -> str:
        return str(self._root)

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        return [self._guarded(self._put, *page) for page in _with_times(pages, used_ns)]

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        return [self._guarded(self._get, *page) for page in _with_times(pages, used_ns)]

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._guarded(self._exists, key) for key in keys]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._guarded(self._delete, key) for key in keys]

    def _guarded(self, action: Callable[..., Outcome], key: str, *arguments: memoryview | int) -> Outcome:
        """What the disk cannot do for one page is that page's affair."""
        try:
            return action(key, *arguments)
        except OSError as error:
            log.warning("stored_page_failed", action=action.__name__.strip("_"), key=key, error=str(error))
            return Outcome.FAILED

    def _path(self, key: str) -> Path:
        """Raises ConfigError when it is no key, and so perhaps a path to somewhere else."""
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
        """Make the directory, unless it has been there: in the place of one that goes away, an unmounted one, are others' disks.

        Raises:
            OSError: It cannot be made, or is gone.
        """
        if not self._was_there:
            _make(self._root)
            self._was_there = True
        elif not self._root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "the store's directory is gone", str(self._root))

    def _is_there(self, path: Path, num_bytes: int, used_ns: int) -> bool:
        """Whether a page of that size is stored, which is then as new as one that is stored now."""
        try:
            if path.stat().st_size != num_bytes:
                return False
        except FileNotFoundError:
            return False
        _mark_used(path, used_ns)
        return True

    def _get(self, key: str, page: memoryview, used_ns: int) -> Outcome:
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Outcome.MISSING
        try:
            header = bytearray(HEADER_BYTES)
            num_read = _read(file, header, page, bytearray(1))  # a byte too many, where there is one
            outcome = check(key, header[:num_read], page, num_bytes=num_read)
            if outcome is Outcome.OK:
                _mark_used(file, used_ns)
        finally:
            os.close(file)
        if outcome is Outcome.CORRUPT:
            self._delete(key)  # else a put would take it for the page; a foreign one may be somebody else's page, and whole
        return outcome

    def _exists(self, key: str) -> Outcome:
        try:
            return Outcome.OK if stat.S_ISREG(self._path(key).stat().st_mode) else Outcome.MISSING
        except FileNotFoundError:
            return Outcome.MISSING

    def _delete(self, key: str) -> Outcome:
        path = self._path(key)
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return Outcome.MISSING
        self._room.give_back(num_bytes)
        return Outcome.OK


def _with_times(pages: Sequence[tuple[str, memoryview]], used_ns: int | None) -> Iterator[tuple[str, memoryview, int]]:
    """Each page with the time that it counts as used at."""
    times = used_times(time.time_ns() if used_ns is None else used_ns)
    return ((key, page, at_ns) for (key, page), at_ns in zip(pages, times, strict=False))


def check_directory(directory: Path) -> None:
    """Make a store's directory where it is not there, and try it. One that others can write to is used, and named in the log.

    Raises:
        ConfigError: It cannot be made, or this process may not write there. That the disk is full is no reason: what is stored
            can be read, and there may be room again.
    """
    try:
        _make(directory)
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):  # whoever can put other pages there can have other tokens generated
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
    """Unless somebody has used it later: what a request of long ago brings now counts as used when that was asked for."""
    with contextlib.suppress(OSError):  # mounted to be read only: its age is then all the same
        if os.stat(file).st_mtime_ns < used_ns:
            os.utime(file, ns=(used_ns, used_ns))


def _new_file_in(folder: Path) -> Path:
    """A name that no other process has, on whatever host."""
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
    """Raises OSError, also when less than all was written without one."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            written = os.write(file, rest)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest = rest[written:]


def _read(file: int, *parts: bytearray | memoryview) -> int:
    """Fill the parts one after the other; returns the bytes that there were."""
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
