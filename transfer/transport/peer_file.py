"""Open a file of another process of this machine without a wait for the file system that it lies on.

A peer can name any file of the host. If a process serves its file system (FUSE), or a remote host does, the kernel asks them for
the attributes of the file (fstat, fstatfs), and the caller waits until they answer. /proc reports the mount of an open file
without asking.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

_MOUNT_ID: Final = re.compile(rb"^mnt_id:\s*(\d+)$", re.MULTILINE)  # proc_pid_fdinfo(5), since Linux 3.15


def open_place(pid: int, fd: int, *, mount_id: int) -> int | None:
    """Open a descriptor of a process by place (O_PATH).

    Args:
        mount_id: From `mount_of`, of a mount that the kernel itself serves: those of pipes and of memfds.

    Returns:
        A new descriptor; None if the file lies on another mount.

    Raises:
        OSError: The process has no such descriptor, or this process may not open it.
    """
    if _mount_id(pid, fd) != mount_id:
        return None
    place = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        is_there = mount_of(place) == mount_id  # meanwhile, the process could have replaced its descriptor
    except BaseException:
        os.close(place)
        raise
    if is_there:
        return place
    os.close(place)
    return None


def mount_of(fd: int) -> int:
    """Return the id of the mount that a file of this process lies on.

    Raises:
        OSError: There is no such descriptor, or /proc does not report mounts.
    """
    return _mount_id("self", fd)


def _mount_id(process: int | str, fd: int) -> int:
    found = _MOUNT_ID.search(Path(f"/proc/{process}/fdinfo/{fd}").read_bytes())
    if found is None:
        raise OSError(errno.ENOTSUP, "/proc does not report the mounts of open files")
    return int(found[1])
