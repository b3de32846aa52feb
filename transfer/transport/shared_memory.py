"""Host memory that other processes of this machine can map.

The memory is a file without a name (memfd), which a process with the same user opens through ``/proc/PID/fd``. Its seals prevent
that any process changes its size: an access beyond the end of a file kills the process that makes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.peer_file import mount_of, open_place

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of a region. The last one prevents that a peer adds others."""

_NOEXEC_SEAL: Final = 8  # MFD_NOEXEC_SEAL of Linux 6.3; a system can demand it (vm.memfd_noexec)
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegion:
    """A mapping of this process that others can map as well: all of file `fd`, which is `inode`."""

    fd: int
    inode: int
    address: int
    num_bytes: int


_regions: dict[int, SharedRegion] = {}  # by address


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Return new memory, zero and page-aligned. It is freed with the last view of it here and the last mapping elsewhere.

    Raises:
        OSError: The system refused it.
    """
    fd = _open_memfd()
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        memory = mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _regions[address] = SharedRegion(fd=fd, inode=os.fstat(fd).st_ino, address=address, num_bytes=num_bytes)
    weakref.finalize(memory, _forget, address).atexit = False
    return memory


def region_of(address: int, num_bytes: int) -> SharedRegion | None:
    """Return the region that these bytes lie in; None if other processes cannot map them."""
    for region in list(_regions.values()):  # meanwhile, the end of other memory removes its region
        if region.address <= address and address + num_bytes <= region.address + region.num_bytes:
            return region
    return None


def map_shared(fd: int, num_bytes: int, on_unmapped: Callable[[], None]) -> Any:
    """Map the first bytes of a file. They are unmapped when nothing views the result any more.

    Children that are forked after this call do not inherit the mapping.

    Args:
        on_unmapped: Called after that, on any thread. It must not refer to the result.

    Returns:
        A ctypes array of bytes. Arrays and tensors over its buffer keep it.

    Raises:
        OSError: The system refused it.
    """
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address in (None, _FAILED):
        raise _last_error()
    if _libc.madvise(address, num_bytes, mmap.MADV_DONTFORK) != 0:
        error = _last_error()
        _libc.munmap(address, num_bytes)
        raise error
    _libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)  # advice only
    mapped = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(mapped, _unmap, address, num_bytes, on_unmapped).atexit = False
    return mapped


def populate(mapped: Any) -> None:
    """Enter the pages of a mapping into this process's page table, so that no first store pays for it. Without the GIL."""
    _libc.madvise(ctypes.addressof(mapped), ctypes.sizeof(mapped), _POPULATE_WRITE)


def open_memfd_place(pid: int, fd: int) -> int | None:
    """Open a descriptor of a process by place, if its file lies where the kernel keeps memfds other than those in huge pages.

    There, a store into a page that was freed gets a new page. In a file in huge pages, or on a file system with a limited size,
    a peer can free pages and use up the rest. Then the store kills the process that makes it.

    Returns and raises as `transfer.transport.peer_file.open_place` does.
    """
    return open_place(pid, fd, mount_id=_memfd_mount())


def open_region(pid: int, fd: int, *, inode: int, num_bytes: int) -> int:
    """Open the memory of a peer process for reading and writing. Return a descriptor.

    It is opened by place first and inspected, because the peer could name any file of the host. No call waits for the peer.

    Args:
        fd: Descriptor of the file in the peer process.
        inode: The file itself, in case the descriptor was closed and used again.
        num_bytes: Size that the peer stated.

    Raises:
        PeerUnreachable: The file is not there any more, or this process may not open it.
        ConfigError: It is no memory, its size can change, or it has another size.
    """
    what = f"descriptor {fd} of peer process {pid}"
    try:
        place = open_memfd_place(pid, fd)
    except OSError as error:
        raise PeerUnreachable(f"{what} cannot be opened ({error.strerror}): run both ends as the same user") from error
    if place is None:
        raise ConfigError(f"{what} is not memory, or is in huge pages")
    try:
        if os.fstat(place).st_ino != inode:
            raise ConfigError(f"{what} is not the memory in its answer")
        opened = os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # no wait for a lease
    except OSError as error:
        raise PeerUnreachable(f"{what} cannot be opened for writing ({error.strerror})") from error
    finally:
        os.close(place)
    try:
        _check_file(opened, what, num_bytes)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _check_file(fd: int, what: str, wanted_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no file in memory
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:  # a store beyond the end of a file kills the process
        raise ConfigError(f"{what} is not memory of a fixed size")
    found = os.fstat(fd)
    if found.st_size != wanted_bytes:  # `st_blocks` counts the pages of the whole file
        raise ConfigError(f"{what} has {found.st_size} bytes; its answer offers bytes up to {wanted_bytes}")
    if found.st_blocks * 512 < wanted_bytes:  # this process would allocate the missing ones, as those freed later
        raise ConfigError(f"{what} has {found.st_blocks * 512} allocated bytes; its answer offers bytes up to {wanted_bytes}")


@cache
def _memfd_mount() -> int:
    fd = _open_memfd()
    try:
        return mount_of(fd)
    finally:
        os.close(fd)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _open_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("kvferry", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that does not know the flag
            raise
        return os.memfd_create("kvferry", flags)


def _forget(address: int) -> None:
    with contextlib.suppress(OSError):
        os.close(_regions.pop(address).fd)


def _unmap(address: int, num_bytes: int, on_unmapped: Callable[[], None]) -> None:
    if _libc.munmap(address, num_bytes) == 0:
        on_unmapped()
