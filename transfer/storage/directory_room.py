"""Bound the bytes of a directory store that many processes write, and evict pages.

One file counts the bytes; all processes change it under a lock. A process that finds no room evicts the least recently used pages
down to `KEEP_FRACTION` of the limit, one process at a time. (Of a call's pages, the first counts as used last, see
`transfer.storage.base.USED_STEP_NS`.) An eviction looks at every file, and corrects the count. The count errs on the safe side: a
file has its whole size before its bytes are counted, and is renamed only after that, so an eviction meets it at least once.

Each process counts all files once, before its first page; opening a store looks at none. No process waits for a lock longer than
`LOCK_WAIT_S`, for example if a process of another host was stopped while it held one. A page is then not put, and a deleted page
stays in the count until the next eviction. Without a limit there are neither counts nor locks, and the leftovers of dead writers
are removed folder by folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

KEEP_FRACTION: Final = 0.875
LEFTOVER_AGE_S: Final = 60.0
"""Age of an unlocked unfinished file before it is removed: a new file is not locked yet."""

WRITING: Final = ".writing-"
"""Prefix of the names of unfinished files."""

FILE_MODE: Final = 0o600

LOCK_WAIT_S: Final = 5.0
"""Longest wait for a lock, which is held for microseconds, or while every file is looked at."""

_POLL_S: Final = 0.001
_TRIES: Final = 4  # others can take what an eviction has made room for
_COUNT: Final = struct.Struct("<q")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Page:
    used_ns: int
    num_bytes: int
    path: str


class DirectoryRoom:
    """See the module's docstring. May be used by several threads.

    Args:
        root: Folder of the store.
        max_bytes: Most bytes of all files; None means no limit, and nothing is counted.
        leftover_age_s: See `LEFTOVER_AGE_S`.
    """

    def __init__(self, root: Path, *, max_bytes: int | None, leftover_age_s: float) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._leftover_age_s = leftover_age_s
        self._counting = _Lock(root / ".bytes")
        self._evicting = _Lock(root / ".evicting")
        self._preparing = threading.Lock()
        self._is_counted = False
        self._swept: set[Path] = set()

    def prepare(self, folder: Path) -> None:
        """Count files or remove leftovers, before a file is made in `folder`.

        Raises:
            TimeoutError: Another thread still counts.
            OSError: The files cannot be counted.
        """
        if self._is_counted or folder in self._swept:
            return
        if self._max_bytes is None:
            self._swept.add(folder)
            self._sweep(folder)
            return
        if not self._preparing.acquire(timeout=LOCK_WAIT_S):
            raise TimeoutError(errno.ETIMEDOUT, "the files of the store are still being counted")
        try:
            if not self._is_counted and self._evicting.acquire(wait_s=0.0):  # else another process counts
                try:
                    self._count_all(keep_bytes=self._max_bytes)
                finally:
                    self._evicting.release()
            self._is_counted = True
        finally:
            self._preparing.release()

    def take(self, num_bytes: int) -> bool:
        """Count a file that has its whole size, before it is written. Return False if there can be no room for it.

        Raises:
            TimeoutError: Others hold a lock for too long.
            OSError: It cannot be counted.
        """
        if self._max_bytes is None:
            return True
        if num_bytes > self._max_bytes:
            return False
        for _ in range(_TRIES):
            with self._counting:
                counted = self._counted()
                if counted + num_bytes <= self._max_bytes:
                    self._count(counted + num_bytes)
                    return True
            if self._evict(num_bytes):
                return True
        return False

    def give_back(self, num_bytes: int) -> None:
        """Uncount deleted bytes. If that fails, the count stays too high until the next eviction."""
        if self._max_bytes is not None:
            with contextlib.suppress(OSError), self._counting:
                self._count(max(0, self._counted() - num_bytes))

    def _evict(self, num_bytes: int) -> bool:
        """Make room. True means that the file, which is there already, was counted with all others and fits."""
        assert self._max_bytes is not None
        with self._evicting:
            with self._counting:
                if self._counted() + num_bytes <= self._max_bytes:
                    return False  # another process has made room
            return self._count_all(keep_bytes=int(self._max_bytes * KEEP_FRACTION)) <= self._max_bytes

    def _count_all(self, *, keep_bytes: int) -> int:
        """Correct the count, and evict the oldest pages until at most `keep_bytes` are left. Return the count."""
        with self._counting:
            before = self._counted()
        pages = sorted(self._pages())
        total = sum(page.num_bytes for page in pages)
        num_evicted = 0
        for page in pages:
            if total <= keep_bytes:
                break
            if not os.path.basename(page.path).startswith(WRITING):
                with contextlib.suppress(OSError):  # gone, and uncounted by the process that deleted it, or another user's
                    os.unlink(page.path)
                    total -= page.num_bytes
                    num_evicted += 1
        with self._counting:
            # Bytes taken meanwhile count, too. Bytes given back may be missing above already.
            total += max(0, self._counted() - before)
            self._count(total)
        if num_evicted:
            log.info("stored_pages_evicted", directory=str(self._root), pages=num_evicted, bytes_left=total)
        return total

    def _pages(self) -> Iterator[_Page]:
        """Yield all files except leftovers, which are removed."""
        for folder, _, names in os.walk(self._root):
            if folder == str(self._root):
                continue  # counters and locks
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted or renamed meanwhile
                    status = os.stat(path)
                    if self._is_leftover(path, status):
                        os.unlink(path)
                    else:
                        yield _Page(used_ns=status.st_mtime_ns, num_bytes=status.st_size, path=path)

    def _sweep(self, folder: Path) -> None:
        """Remove the leftovers of one folder. Look at unfinished files only."""
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(WRITING):
                    with contextlib.suppress(OSError):  # renamed meanwhile, or another user's
                        if self._is_leftover(entry.path, entry.stat()):
                            os.unlink(entry.path)

    def _is_leftover(self, path: str, status: os.stat_result) -> bool:
        oldest_ns = time.time_ns() - int(self._leftover_age_s * 1e9)
        is_unfinished = os.path.basename(path).startswith(WRITING)
        return is_unfinished and status.st_mtime_ns < oldest_ns and _is_held_by_nobody(path)

    def _counted(self) -> int:
        stored = os.pread(self._counting.file, _COUNT.size, 0)
        return max(0, _COUNT.unpack(stored)[0]) if len(stored) == _COUNT.size else 0

    def _count(self, num_bytes: int) -> None:
        os.pwrite(self._counting.file, _COUNT.pack(num_bytes), 0)


class _Lock:
    """A lock between processes and threads: a locked file, created when it is first needed or was deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.Lock()
        self._file: int | None = None

    @property
    def file(self) -> int:
        """Its descriptor, while it is locked."""
        assert self._file is not None
        return self._file

    def acquire(self, *, wait_s: float) -> bool:
        """Return False if the lock was not free in that time. Raise OSError if the file cannot be locked."""
        deadline_s = time.monotonic() + wait_s
        if not self._threads.acquire(timeout=wait_s):
            return False
        is_mine = False
        try:
            self._open()
            while not (is_mine := _is_locked(self.file)) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        finally:
            if not is_mine:
                self._threads.release()
        return is_mine

    def _open(self) -> None:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            os.close(self._file)
            self._file = None
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def release(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self._threads.release()

    def __enter__(self) -> None:
        if not self.acquire(wait_s=LOCK_WAIT_S):
            raise TimeoutError(errno.ETIMEDOUT, f"others hold {self._path} for more than {LOCK_WAIT_S:g} s")

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_locked(file: int) -> bool:
    """Lock a file, unless it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held_by_nobody(path: str) -> bool:
    """Return whether the process that was writing the file is gone, on any host."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # another user's, or gone
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(file)
