"""Whether a process of this host is gone, told by the kernel: no time-out, and a process id that was given away is noticed.

A frozen process is not gone. A zombie is: its memory, its descriptors and its device contexts were taken from it before.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from transfer.errors import PeerUnreachable

_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1: proc_pid_stat(5)


def start_time_of(pid: int) -> int | None:
    """When process `pid` began, in clock ticks since boot; with the pid it names one process for as long as the host is up.

    None: there is no such process (any more), or it cannot be seen from here.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command, field 2, is in parentheses and may hold any bytes: spaces, parentheses, and what is no text.
    return int(stat.rpartition(b")")[2].split()[_START_TIME_FIELD - 3])


class PeerWatch:
    """Watches one process of this host until it is gone, or the watch is closed.

    Args:
        pid: As this process sees it: the peer must share its pid namespace (`ProcessIdentity.shares_kernel_with`).
        start_time: The peer's own `start_time_of(os.getpid())`, so that a later process of the same pid is not taken for it.

    Raises:
        PeerUnreachable: The process exists and cannot be watched: Linux before 5.3, a seccomp filter, or a /proc that hides it.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self._fd: int | None = None
        self._is_gone = False
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone = True
            return
        except OSError as error:
            raise PeerUnreachable(
                f"process {pid} cannot be watched: pidfd_open failed ({error.strerror}); it needs Linux 5.3 and a seccomp "
                "profile that allows it"
            ) from error
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        # In this order: a pid cannot be given away while its process lives, so if the watched process is alive afterwards, the
        # start time was its own.
        found = start_time_of(pid)
        if self.is_gone:
            return
        if found is None:
            self.close()
            raise PeerUnreachable(
                f"process {pid} cannot be watched: it runs, and /proc/{pid}/stat cannot be read (hidepid, user)"
            )
        if found != start_time:
            self._is_gone = True
            self.close()

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, as far as this was seen before `close()`; once True it stays so. Takes a microsecond."""
        if self._fd is not None and self._poll.poll(0):
            self._is_gone = True
            self.close()
        return self._is_gone

    def close(self) -> None:
        """Stop watching. May be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
