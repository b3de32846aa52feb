"""End the access of a writer on the same host: its one-sided write is a copy by its own process, and no deregistration stops it.

Host memory. Each session offers a second mapping of the ring (`SharedAlias`). Closing replaces it by an inaccessible one. So a
late write fails with a bad address, and the ring's bytes stay. A copy that the kernel had begun before can still run for its few
pages; `CopyWatch` detects when it cannot any more. The address range stays reserved until the writer has let go or is gone
(`liveness`). So nothing new can be mapped where a late write would land.

Device memory. A mapping in another process cannot be revoked. Only the writer's liveness pipe reports when it can write no more.

Sources: mremap(2) on a length of 0; process_vm_writev(2); mm/process_vm_access.c of Linux. There, a copy pins at most two pages
full of page pointers at a time, copies, and looks the addresses up again. That is 4 MiB, and 1 GiB where pages have 64 KiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path

from transfer.transport.base import LocalMemory
from transfer.transport.liveness import PeerPipe
from transfer.transport.registered_memory import DeviceBuffer, HostMemory

_PAGE = mmap.PAGESIZE
_PROC = Path("/proc")
_MREMAP_MAYMOVE = 1
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_FAILED = ctypes.c_void_p(-1).value
_WRITE_CALLS = {"x86_64": 310, "aarch64": 271}  # process_vm_writev
_BATCH_BYTES = 2 * _PAGE // ctypes.sizeof(ctypes.c_void_p) * _PAGE
# Kernel time for a batch at 0.4 GB/s. A thread that ran for longer since the revocation has looked its addresses up again.
_COPY_NS = int(_BATCH_BYTES / 0.4)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = _libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SharedAlias:
    """A second mapping of shared host memory. Until it is revoked, writes to it change that memory."""

    def __init__(self, base: int, num_bytes: int, offset: int) -> None:
        self._base: int | None = base
        self._num_bytes = num_bytes
        self._offset = offset

    @classmethod
    def of(cls, memory: HostMemory) -> SharedAlias | None:
        """Map `memory`; None if it is not one shared mapping (see `transfer.pool.staging.StagingBuffer`, `is_shared`)."""
        address = memory.view.ctypes.data
        begin = address - address % _PAGE
        num_bytes = -(-(address + memory.num_bytes - begin) // _PAGE) * _PAGE
        if not _is_one_shared_mapping(begin, begin + num_bytes):
            return None
        base = _libc.mremap(begin, 0, num_bytes, _MREMAP_MAYMOVE)
        return None if base in (None, _FAILED) else cls(base, num_bytes, address - begin)

    @property
    def address(self) -> int:
        """Address of the memory's first byte in this mapping."""
        assert self._base is not None
        return self._base + self._offset

    def revoke(self) -> None:
        """Make every access to these addresses fail. They stay reserved until `release()`.

        Raises:
            OSError: The addresses could not be made inaccessible.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        if _libc.mmap(self._base, self._num_bytes, _PROT_NONE, flags, -1, 0) != _FAILED:
            return
        # Out of memory or mappings. `mprotect` needs neither, and fails accesses as well; it only keeps the ring's pages until
        # `release()`. Unmapping would let something else be mapped there, where a late write would land.
        if _libc.mprotect(self._base, self._num_bytes, _PROT_NONE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{self._num_bytes} bytes of shared memory cannot be taken away: {os.strerror(number)}")

    def release(self) -> None:
        """Free the addresses."""
        if self._base is not None:
            _libc.munmap(self._base, self._num_bytes)
            self._base = None


def _is_one_shared_mapping(begin: int, end: int) -> bool:
    """Return whether [begin, end) lies in adjacent, writable, shared mappings of one object."""
    at, found = begin, None
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, last = (int(part, 16) for part in fields[0].split("-"))
        if last <= at:
            continue
        if first > at or fields[1][:2] != "rw" or fields[1][3] != "s":
            return False
        origin = (int(fields[2], 16) - first, fields[3], fields[4])
        if found not in (None, origin):
            return False
        found, at = origin, last
        if at >= end:
            return True
    return False


@dataclass(slots=True)
class _Runtime:
    """CPU time of one thread in ns.

    The kernel updates the count of a running thread only with its tick. So the first count dates from before the revocation, and
    only a count that differs from it dates from after it.
    """

    seen: int
    since: int | None = None


class CopyWatch:
    """After a revocation: watches whether a copy that began before it can still run in a thread of the writer.

    Args:
        pid: Process of the writer.
        proc: Where the kernel shows its threads.
        copy_ns: Longest time that a thread can run in one copy.
    """

    def __init__(self, pid: int, *, proc: Path = _PROC, copy_ns: int = _COPY_NS) -> None:
        self._copy_ns = copy_ns
        self._tasks = proc / f"{pid}/task"
        self._own = threading.get_native_id()  # both ends in one process
        self._suspects: dict[int, _Runtime] = {}
        with contextlib.suppress(FileNotFoundError):
            for tid in {int(task.name) for task in self._tasks.iterdir()} - {self._own}:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended copies nothing
                    self._suspects[tid] = _Runtime(self._cpu_ns(tid))

    @staticmethod
    def is_possible(pid: int, *, proc: Path = _PROC) -> bool:
        """Return whether this process may watch the threads of process `pid`."""
        try:
            for name in ("syscall", "schedstat"):
                (proc / f"{pid}/task/{pid}/{name}").read_text()
        except OSError:
            return False
        return platform.machine() in _WRITE_CALLS

    @property
    def is_over(self) -> bool:
        self._suspects = {tid: runtime for tid, runtime in self._suspects.items() if self._may_copy(tid, runtime)}
        return not self._suspects

    def _may_copy(self, tid: int, runtime: _Runtime) -> bool:
        try:
            call = (self._tasks / str(tid) / "syscall").read_text().split(maxsplit=1)[0]
            if call == "running":
                now = self._cpu_ns(tid)
                if runtime.since is None and now != runtime.seen:
                    runtime.since = now
                return runtime.since is None or now - runtime.since < self._copy_ns
        except OSError:
            return (self._tasks / str(tid)).exists()
        return call == str(_WRITE_CALLS[platform.machine()])  # asleep in the call: it waits for a page of its source

    def _cpu_ns(self, tid: int) -> int:
        return int((self._tasks / str(tid) / "schedstat").read_text().split()[0])


class HostEnding:
    """Ends the access of a same-host writer to host memory: revokes the mapping, and detects the end of the last copy."""

    def __init__(self, alias: SharedAlias, line: PeerPipe) -> None:
        self._alias = alias
        self._line = line
        self._copies: CopyWatch | None = None

    @property
    def address(self) -> int:
        """Address of the memory for the writer."""
        return self._alias.address

    def revoke(self) -> None:
        self._alias.revoke()
        self._copies = CopyWatch(self._line.pid)

    @property
    def is_over(self) -> bool:
        return self._copies is not None and (self._copies.is_over or self._line.is_over)

    def release(self) -> bool:
        """Free the addresses if the writer can write no more. Return whether that is so."""
        if not self._line.is_over:
            return False
        self._line.close()
        self._alias.release()
        return True

    def holds(self, memory: LocalMemory) -> bool:
        """Return whether the writer may still reach `memory`: not since the revocation."""
        return False


class DeviceEnding:
    """The access of a same-host writer to device memory: it cannot be revoked, and ends when the writer reports it or is gone.

    The memory stays allocated until then.
    """

    def __init__(self, line: PeerPipe, memory: DeviceBuffer) -> None:
        self._line = line
        self._memory: DeviceBuffer | None = memory

    def revoke(self) -> None:
        pass

    @property
    def is_over(self) -> bool:
        return self._line.is_over

    def release(self) -> bool:
        """Drop the memory if the writer can write no more. Return whether that is so."""
        if not self._line.is_over:
            return False
        self._line.close()
        self._memory = None
        return True

    def holds(self, memory: LocalMemory) -> bool:
        """Return whether the writer may still reach `memory`."""
        return memory is self._memory


Ending = HostEnding | DeviceEnding
