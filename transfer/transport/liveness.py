"""Detect that a peer process of the same host has let go of this process's memory, or is gone.

Each end makes a pipe and keeps both of its ends. The other end opens the pipe for reading through ``/proc/PID/fd``. An end lets
go by writing into its pipe. When every write end is closed (the process ended, and every child that it forked without exec),
the reader sees the end of the pipe. No socket, file or port is needed. So it works between containers of one host that share a
pid namespace. It needs the same rights as CUDA IPC: the same user, or the right to trace.

An end can sign a message: it writes the digest of the message into its pipe. Then the other end knows that the message came from
this process, and not from a peer that has only learned the pipe's address.

The end of the pipe alone proves nothing, because a dying process closes its descriptors one after the other. The pipe can end a
moment before the device's descriptor does. The end of the process alone proves nothing either. A forked child keeps both open,
and with them work that the parent had queued on a device. Either proof alone could report a write as over that may still land.

The kernel reports the end of a process: without a time-out, and without confusion if its id was given to another process. A
frozen process has not ended. A zombie has: its memory, descriptors and device contexts are gone.
"""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from transfer.errors import ConfigError, PeerUnreachable, TransportClosed
from transfer.transport.peer import ProcessIdentity
from transfer.transport.peer_file import mount_of, open_place

# One byte for each reader, which takes it. There can be several: an offer that was accepted twice, a forked child.
_OVER = bytes(select.PIPE_BUF)
_SIGNATURE_BYTES = 16
_SessionT = TypeVar("_SessionT")
_MAX_PID = 2**22  # PID_MAX_LIMIT of Linux
_START_TIME_FIELD = 22  # field of /proc/PID/stat, counted from 1: proc_pid_stat(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeAddress:
    """Place of a liveness pipe: process `identity.pid`, which began at `start_time`, has pipe `inode` on descriptor `fd`."""

    identity: ProcessIdentity
    start_time: int
    fd: int
    inode: int

    def to_wire(self) -> list[Any]:
        return [self.identity.to_wire(), self.start_time, self.fd, self.inode]

    @classmethod
    def from_wire(cls, value: object) -> PipeAddress:
        """Read the result of `to_wire`.

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
        assert start_time is not None  # this process exists
        self.address = PipeAddress(
            identity=ProcessIdentity.own(), start_time=start_time, fd=read_fd, inode=os.fstat(read_fd).st_ino
        )

    def sign(self, message: bytes) -> None:
        """Prove to the one reader of the pipe that this process wrote the message. Call it at most once, before `end`."""
        os.write(self._fds[1], _signature_of(message))

    def end(self) -> None:
        """Report that nothing that this end began can touch the peer's memory any more. May be called twice.

        A forked child reports nothing, because it does not know its parent's work.
        """
        if self._fds:
            if os.getpid() == self.address.identity.pid:
                os.write(self._fds[1], _OVER)
            for fd in self._fds:
                os.close(fd)
            self._fds = ()


class PipeOffer(Generic[_SessionT]):
    """A writer's half-open session with its liveness pipe.

    Args:
        blob: Goes to the target.
        open_writer: Opens the session with the target's answer. From then on the session ends the pipe.
    """

    def __init__(self, line: LivenessPipe, blob: bytes, open_writer: Callable[[bytes, LivenessPipe], _SessionT]) -> None:
        self._line: LivenessPipe | None = line
        self.blob = blob
        self._open_writer = open_writer

    def complete(self, answer: bytes) -> _SessionT:
        if self._line is None:
            raise TransportClosed("this offer was completed or closed before")
        session = self._open_writer(answer, self._line)
        self._line = None
        return session

    def close(self) -> None:
        if self._line is not None:
            self._line.end()
            self._line = None


class PeerPipe:
    """The other end: its pipe, and the watch on its process.

    Args:
        address: From the peer's blob.

    Raises:
        PeerUnreachable: It runs elsewhere, is gone, or may not be watched; the message names the remedy.
    """

    def __init__(self, address: PipeAddress) -> None:
        self.pid = address.identity.pid
        self._fd: int | None = None
        self._has_ended = False
        self._is_cut = False
        here = ProcessIdentity.own()
        if not address.identity.shares_kernel_with(here):
            raise PeerUnreachable(
                f"peer runs as pid {self.pid} on host {address.identity.host}, this end on {here.host}, and they share no pid "
                "namespace: put both on one host and in one pid namespace (docker --pid=host, Kubernetes hostPID or "
                "shareProcessNamespace), or choose transport: ucx or nixl"
            )
        self._watch = PeerWatch(self.pid, address.start_time)
        if self._watch.is_gone:
            raise PeerUnreachable(f"peer process {self.pid} is gone")
        try:
            self._fd = _open_pipe(address)
        except BaseException:
            self._watch.close()
            raise

    def check_signed(self, message: bytes) -> None:
        """Take the peer's signature out of its pipe, and check that it is that of the message. Call it before all other methods.

        Raises:
            PeerUnreachable: The peer did not sign the message, or another reader took the signature.
        """
        assert self._fd is not None
        try:
            found = os.read(self._fd, _SIGNATURE_BYTES)
        except BlockingIOError:
            found = b""
        if found != _signature_of(message):
            raise PeerUnreachable(f"peer process {self.pid} is gone, or did not write the answer that names it")

    @property
    def has_left(self) -> bool:
        """Whether the peer has let go, is gone, or is going. Expect nothing more of it."""
        self._look()
        return self._has_ended or self._is_cut or self._watch.is_gone

    @property
    def is_over(self) -> bool:
        """Whether it is proven that nothing which the peer began can touch this end's memory any more. It stays True."""
        self._look()
        return self._has_ended or (self._is_cut and self._watch.is_gone)

    def close(self) -> None:
        """Stop looking; both properties keep their values. May be called twice."""
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


def _signature_of(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=_SIGNATURE_BYTES).digest()


def _open_pipe(address: PipeAddress) -> int:
    """Open the peer's pipe for reading.

    It is opened by place first and inspected, because the peer could name any file of the host.
    """
    pid = address.identity.pid
    mistaken = f"descriptor {address.fd} of peer process {pid} is not its liveness pipe: it was closed since"
    try:
        place = open_place(pid, address.fd, mount_id=_pipe_mount())
    except FileNotFoundError as error:
        raise PeerUnreachable(f"peer process {pid} has closed its liveness pipe, or is gone") from error
    except OSError as error:
        raise PeerUnreachable(
            f"descriptors of peer process {pid} cannot be opened ({error.strerror}): run both ends as the same user, or choose "
            "transport: ucx or nixl"
        ) from error
    if place is None:
        raise PeerUnreachable(mistaken)
    try:
        if os.fstat(place).st_ino != address.inode:
            raise PeerUnreachable(mistaken)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PeerUnreachable(f"liveness pipe of peer process {pid} cannot be opened for reading ({error.strerror})") from error
    finally:
        os.close(place)


@cache
def _pipe_mount() -> int:
    fds = os.pipe2(os.O_CLOEXEC)
    try:
        return mount_of(fds[0])
    finally:
        for fd in fds:
            os.close(fd)


def start_time_of(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. With the pid it names one process while the host is up.

    None means that there is no such process any more, or that it cannot be seen from here.
    """
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command, field 2, is in parentheses, and can hold any bytes, also spaces and parentheses.
    return int(stat_line.rpartition(b")")[2].split()[_START_TIME_FIELD - 3])


class PeerWatch:
    """Watches one process of this host until it is gone, or the watch is closed.

    Args:
        pid: As this process sees it: the peer must share its pid namespace (`ProcessIdentity.shares_kernel_with`).
        start_time: The peer's own `start_time_of(os.getpid())`, so that it differs from a later process with the same pid.

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
        # In this order: a pid cannot be given away while its process lives. So if the watched process is alive afterwards, the
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
        """Whether the process was seen to have ended before `close()`. It stays True. Takes a microsecond."""
        if self._fd is not None and self._poll.poll(0):
            self._is_gone = True
            self.close()
        return self._is_gone

    def close(self) -> None:
        """Stop watching. May be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
