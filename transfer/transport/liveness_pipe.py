"""How two processes of one host tell each other that one has let go of the other's memory, or that it is gone.

Each end makes a pipe and keeps both of its ends; the other end opens the pipe for reading through ``/proc/PID/fd``. To let go
is to write into it. When every write end is closed (the process ended, and every child that it forked without exec), the
reader sees the end of the pipe. No socket, file or port is needed, so it works between containers of one host that share a pid
namespace, and it asks for what CUDA IPC wants anyway: the same user, or the right to trace.

Why the end of the pipe and the end of the process are both asked for: a dying process closes its descriptors one after the
other, so the pipe may end a moment before the device's descriptor does; and a forked child keeps both open after its parent is
gone, and with them work that the parent had queued on a device. Either alone would call a write over that may still land.
"""

from __future__ import annotations

import os
import select
import stat
from dataclasses import dataclass
from typing import Any

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.peer import ProcessIdentity
from transfer.transport.peer_watch import PeerWatch, start_time_of

# One byte for each that looks, and each takes one: there may be several (an offer that was accepted twice, a forked child).
_OVER = bytes(select.PIPE_BUF)
_MAX_PID = 2**22  # PID_MAX_LIMIT of Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeAddress:
    """Where a process's liveness pipe is found: in process `identity.pid`, begun at `start_time`, pipe `inode` on descriptor
    `fd`."""

    identity: ProcessIdentity
    start_time: int
    fd: int
    inode: int

    def to_wire(self) -> list[Any]:
        return [self.identity.to_wire(), self.start_time, self.fd, self.inode]

    @classmethod
    def from_wire(cls, value: object) -> PipeAddress:
        """Read what `to_wire` wrote.

        Raises:
            ConfigError: The value has another shape, or a number is out of range.
        """
        if not isinstance(value, list) or len(value) != 4:
            raise ConfigError("the peer's liveness pipe is not a list of identity, start time, descriptor and inode")
        identity = ProcessIdentity.from_wire(value[0])
        for name, number, end in (
            ("pid", identity.pid, _MAX_PID + 1),
            ("start time", value[1], 2**63),
            ("descriptor", value[2], 2**31),
            ("inode", value[3], 2**64),
        ):
            if type(number) is not int or not 0 <= number < end:
                raise ConfigError(f"{name} {number!r:.40} of the peer's liveness pipe is not a whole number in [0, {end})")
        return cls(identity=identity, start_time=value[1], fd=value[2], inode=value[3])


class LivenessPipe:
    """This end's pipe."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._fds: tuple[int, ...] = (read_fd, write_fd)
        start_time = start_time_of(os.getpid())
        assert start_time is not None  # of this very process
        self._address = PipeAddress(
            identity=ProcessIdentity.own(), start_time=start_time, fd=read_fd, inode=os.fstat(read_fd).st_ino
        )

    @property
    def address(self) -> PipeAddress:
        return self._address

    def end(self) -> None:
        """Say that this end has let go: nothing that it began can touch the peer's memory any more. May be called twice.

        In a forked child nothing is said: it knows nothing of what its parent is at.
        """
        if self._fds:
            if os.getpid() == self._address.identity.pid:
                os.write(self._fds[1], _OVER)
            for fd in self._fds:
                os.close(fd)
            self._fds = ()


class PeerPipe:
    """The other end: its pipe, and the watch on its process.

    Args:
        address: Out of the peer's blob.

    Raises:
        PeerUnreachable: It runs elsewhere, is gone, or may not be looked at; the message says what to do.
    """

    def __init__(self, address: PipeAddress) -> None:
        self._pid = address.identity.pid
        self._fd: int | None = None
        self._has_ended = False
        self._is_cut = False
        here = ProcessIdentity.own()
        if not address.identity.shares_kernel_with(here):
            raise PeerUnreachable(
                f"peer runs as pid {self._pid} on host {address.identity.host}, this end on {here.host}, and they share no pid "
                "namespace: put both on one host and in one pid namespace (docker --pid=host, Kubernetes hostPID or "
                "shareProcessNamespace), or choose transport: ucx or nixl"
            )
        self._watch = PeerWatch(self._pid, address.start_time)
        if self._watch.is_gone:
            raise PeerUnreachable(f"peer process {self._pid} is gone")
        try:
            self._fd = _open_pipe(address)
        except BaseException:
            self._watch.close()
            raise

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def has_left(self) -> bool:
        """Whether the peer let go, or is gone, or is going: nothing is to be expected of it any more."""
        self._look()
        return self._has_ended or self._is_cut or self._watch.is_gone

    @property
    def is_over(self) -> bool:
        """Whether it is proven that nothing which the peer began can touch this end's memory any more; stays True once it was."""
        self._look()
        return self._has_ended or (self._is_cut and self._watch.is_gone)

    def close(self) -> None:
        """Look no more; both properties keep what they knew. May be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._watch.close()

    def _look(self) -> None:
        if self._fd is None or self._has_ended or self._is_cut:
            return
        try:
            said = os.read(self._fd, 1)
        except BlockingIOError:
            return
        if said:
            self._has_ended = True
        else:
            self._is_cut = True


def _open_pipe(address: PipeAddress) -> int:
    """The peer's pipe, for reading.

    Opened by place first and looked at before anything is done with it: what the peer names could be any file of the host.
    """
    pid = address.identity.pid
    try:
        place = os.open(f"/proc/{pid}/fd/{address.fd}", os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PeerUnreachable(f"peer process {pid} has closed its liveness pipe, or is gone") from error
    except OSError as error:
        raise PeerUnreachable(
            f"descriptors of peer process {pid} cannot be opened ({error.strerror}): run both ends as the same user, or choose "
            "transport: ucx or nixl"
        ) from error
    try:
        found = os.fstat(place)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != address.inode:
            raise PeerUnreachable(f"descriptor {address.fd} of peer process {pid} is not its liveness pipe: it was closed since")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PeerUnreachable(f"liveness pipe of peer process {pid} cannot be opened for reading ({error.strerror})") from error
    finally:
        os.close(place)
