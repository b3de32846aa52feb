"""The control plane over a Unix socket, between processes of one user on one machine.

There are no keys, because only the user can enter the folder of the socket file. A frame is the length of the payload in 4 bytes,
followed by the payload. The first frame of a connection is the client's session id in 8 bytes. A second connection with the id of
an open one is closed. A client connects again `RECONNECT_S` after its connection ended, and then sends the frames that were not
completely sent. There are no heartbeats: the kernel reports the end of a process, and the queue to a frozen process fills up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import select
import socket
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from transfer.control.base import (
    MAX_PAYLOAD_BYTES,
    QUEUE_PAYLOADS,
    Received,
    Waker,
    checked_payload,
    checked_peer,
)
from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportClosed, TransportError

SCHEME: Final = "unix://"
RECONNECT_S: Final = 0.1
STUCK_S: Final = 10.0
"""Time without progress after which a peer counts as frozen. On a machine with more ranks than cores, a healthy rank may read
nothing for a second."""

DEAD_AFTER_S: Final = 60.0
"""Age of a socket file from which on it must have a server. A server listens directly after it created the file."""

_BACKLOG: Final = 1024
_LENGTH_BYTES: Final = 4
_ID_BYTES: Final = 8
_READ_BYTES: Final = 256 << 10
_FRAMES_PER_CALL: Final = 64
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN})  # EAGAIN: its backlog is full


class _Connection:
    """One connected socket with its queue.

    Attributes:
        peer: Session id of the other end; 0 until it is known.
        is_over: Whether the other end has closed it, or has sent an invalid frame.
        unsent: Frames that were not completely sent.
        is_ready: Whether it is queued for delivery of its payloads.
    """

    def __init__(self, end: socket.socket, max_payload_bytes: int) -> None:
        self.socket = end
        self.peer = 0
        self.is_over = False
        self.unsent: deque[bytes] = deque()
        self.is_ready = False
        self._max_payload_bytes = max_payload_bytes
        self._num_sent = 0  # bytes of the first unsent frame
        self._progress_s = 0.0
        self._received = bytearray()

    def send(self, frame: bytes) -> bool:
        """Queue a frame, and send as much as the socket accepts.

        Return False if the other end is gone, or if the frame was not queued because the queue is full or the other end counts as
        frozen.
        """
        if self.unsent:
            self.flush()
        if not self.unsent:
            self._progress_s = time.monotonic()
        elif not self.is_over and (is_full(self.unsent) or time.monotonic() - self._progress_s > STUCK_S):
            return False
        self.unsent.append(frame)
        self.flush()
        return not self.is_over

    def flush(self) -> None:
        """Send queued frames until the socket accepts no more."""
        while self.unsent and not self.is_over:
            frames = [memoryview(frame) for frame in itertools.islice(self.unsent, _FRAMES_PER_CALL)]
            frames[0] = frames[0][self._num_sent :]
            try:
                num_sent = self.socket.sendmsg(frames)
            except BlockingIOError:
                return
            except OSError:
                self.is_over = True
                return
            self._progress_s = time.monotonic()
            for frame in frames:
                if num_sent < len(frame):
                    self._num_sent += num_sent
                    return
                num_sent -= len(frame)
                self.unsent.popleft()
                self._num_sent = 0

    def read(self) -> None:
        try:
            found = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        self.is_over = self.is_over or not found
        self._received += found

    def next_payload(self) -> bytes | None:
        """Return the payload of the next frame, or None if it has not arrived."""
        received = self._received
        if len(received) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "little")
        if end > _LENGTH_BYTES + self._max_payload_bytes:
            self.reject()
            return None
        if len(received) < end:
            return None
        payload = bytes(memoryview(received)[_LENGTH_BYTES:end])
        del received[:end]
        return payload

    def reject(self) -> None:
        """End the connection, and discard the bytes that were read from it."""
        self.is_over = True
        self._received.clear()

    def is_closed_by_peer(self) -> bool:
        """Return whether the other end has closed the connection and nothing is left to read."""
        try:
            return self.is_over or not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class _End(ABC):
    """The connections of one end. The loop watches one epoll descriptor, which contains all of them."""

    def __init__(self, address: str, max_payload_bytes: int) -> None:
        self.address = address
        self._path = address.removeprefix(SCHEME)
        self._max_payload_bytes = max_payload_bytes
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._ready: deque[_Connection] = deque()
        self._waker: Waker | None = None
        self._is_closed = False
        try:
            self._epoll = select.epoll()
        except OSError as error:
            raise _no_socket(error) from error

    def _socket(self) -> socket.socket:
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise _no_socket(error) from error
        made.setblocking(False)
        return made

    def _add(self, end: socket.socket) -> _Connection:
        connection = self._connections[end.fileno()] = _Connection(end, self._max_payload_bytes)
        self._epoll.register(end, select.EPOLLIN)
        return connection

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._epoll.unregister(connection.socket)
            connection.socket.close()

    def _send(self, connection: _Connection, payload: bytes) -> bool:
        is_sent = connection.send(_frame(payload))
        self._follow(connection)
        return is_sent

    def _follow(self, connection: _Connection) -> None:
        """Wake the loop when the socket is writable, if frames are left to send."""
        if connection.socket.fileno() in self._connections:
            self._epoll.modify(connection.socket, select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0))

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waker is not None:
            self._waker.stop()
        self._waker = Waker(loop, self._epoll.fileno(), take=self._take, has_pending=lambda: bool(self._ready))

    def _take(self) -> bool:
        """Deliver one payload, or read from sockets that have data. Return False if there was nothing to do."""
        return self._take_ready() or (not self._is_closed and self._look() and (self._take_ready() or True))

    def _take_ready(self) -> bool:
        """Deliver one payload that was read; the connections take turns. Return False if there is none."""
        while self._ready:
            connection = self._ready[0]
            payload = connection.next_payload()
            if payload is not None:
                self._ready.rotate(-1)
                self._on_payload(connection, payload)
                return True
            self._ready.popleft()
            connection.is_ready = False
            if connection.is_over:
                self._drop(connection)
                self._on_end(connection)
        return False

    def _look(self) -> bool:
        events = self._epoll.poll(0)
        for fileno, mask in events:
            connection = self._connections.get(fileno)
            if connection is None:
                self._accept()
                continue
            if mask & select.EPOLLOUT:
                connection.flush()
                self._follow(connection)
            if mask & ~select.EPOLLOUT:
                connection.read()
            if not connection.is_ready:
                connection.is_ready = True
                self._ready.append(connection)
        return bool(events)

    @abstractmethod
    def _accept(self) -> None: ...

    @abstractmethod
    def _on_payload(self, connection: _Connection, payload: bytes) -> None: ...

    @abstractmethod
    def _on_end(self, connection: _Connection) -> None: ...

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosed("the control channel is closed; nothing can be sent")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._waker is not None:
            self._waker.stop()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._ready.clear()
        self._epoll.close()


class UnixControlServer(_End):
    """A `ControlServer` on a socket file.

    Args:
        address: ``unix://PATH``. A socket file of an earlier server is replaced.
        max_payload_bytes: Largest payload, in both directions; checked before a payload is read.

    Raises:
        ConfigError: The address cannot be bound.
        TransportError: This process has no descriptors left.
    """

    public_key = b""
    num_refused = 0

    def __init__(self, address: str, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        super().__init__(address, max_payload_bytes)
        self.num_dropped = 0
        self._allowed: set[int] = set()
        self._by_peer: dict[int, _Connection] = {}
        self._on_received: Callable[[Received], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pause: asyncio.TimerHandle | None = None  # without descriptors, connections wait for its end
        self._listener = self._socket()
        try:
            path = Path(self._path)
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()
            self._listener.bind(self._path)
            self._listener.listen(_BACKLOG)
            self._file = os.stat(self._path)
        except OSError as error:
            self._listener.close()
            self._epoll.close()
            raise ConfigError(f"control address is {address}; it cannot be bound: {error.strerror or error}") from error
        self._epoll.register(self._listener, select.EPOLLIN)

    def allow(self, peer: int, key: bytes = b"") -> None:
        if key:
            raise LocalProtocolError(f"session {peer:#x} has a key, but this server has none")
        self._allowed.add(checked_peer(peer))

    def forget(self, peer: int) -> None:
        self._allowed.discard(peer)

    def is_connected(self, peer: int) -> bool:
        """Return whether a client with this session id is connected."""
        return peer in self._by_peer

    def send(self, peer: int, payload: bytes) -> bool:
        self._check_open()
        checked_payload(payload, self._max_payload_bytes)
        connection = self._by_peer.get(checked_peer(peer)) if peer in self._allowed else None
        return connection is not None and self._send(connection, payload)

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        self._on_received, self._loop = on_received, loop
        self._end_pause()
        self._start(loop)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has gone
            return
        except OSError:  # no descriptors are left, and a connection that waits would wake the loop in each turn
            assert self._loop is not None, "only a watched server looks"
            self._epoll.unregister(self._listener)
            self._pause = self._loop.call_later(RECONNECT_S, self._end_pause)
            return
        end.setblocking(False)
        self._add(end)

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._epoll.register(self._listener, select.EPOLLIN)

    def _on_payload(self, connection: _Connection, payload: bytes) -> None:
        if not connection.peer:
            self._name(connection, payload)
        elif connection.peer not in self._allowed:
            self.num_dropped += 1
        elif self._on_received is not None:
            self._on_received(Received(peer=connection.peer, payload=payload))

    def _name(self, connection: _Connection, payload: bytes) -> None:
        """Set the peer of a connection from its first frame. Close it if the id is invalid or has another open connection."""
        peer = int.from_bytes(payload, "little") if len(payload) == _ID_BYTES else 0
        before = self._by_peer.get(peer)
        if not peer or (before is not None and not before.is_closed_by_peer()):
            connection.reject()
            return
        connection.peer = peer
        self._by_peer[peer] = connection

    def _on_end(self, connection: _Connection) -> None:
        if self._by_peer.get(connection.peer) is connection:
            del self._by_peer[connection.peer]

    def close(self) -> None:
        if self._is_closed:
            return
        if self._pause is not None:
            self._pause.cancel()
        super().close()
        self._listener.close()
        path = Path(self._path)
        try:
            if os.path.samestat(path.stat(), self._file):  # not that of a later server
                path.unlink()
        except FileNotFoundError:
            pass


class UnixControlClient(_End):
    """A `ControlClient` on a socket file. The server may bind it later.

    Args:
        address: `ControlServer.address` of the other end.
        session_id: Identifies this client; the server must have allowed it.
        max_payload_bytes: As at the server.

    Raises:
        PeerUnreachable: The address cannot be connected to.
        TransportError: This process has no descriptors left.
    """

    def __init__(self, address: str, *, session_id: int, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._hello = _frame(checked_peer(session_id).to_bytes(_ID_BYTES, "little"))
        if not address.startswith(SCHEME):
            raise PeerUnreachable(f"control address is {address[:200]!r}; it must be {SCHEME}PATH")
        super().__init__(address, max_payload_bytes)
        self._on_received: Callable[[bytes], None] | None = None
        self._connection: _Connection | None = None
        self._unsent: deque[bytes] = deque()  # while there is no connection
        self._tried_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._connect()
        except OSError as error:
            self._epoll.close()
            reason = error.strerror or error
            raise PeerUnreachable(f"control address is {address[:200]!r}; it cannot be connected to: {reason}") from error

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, payload: bytes) -> bool:
        self._check_open()
        checked_payload(payload, self._max_payload_bytes)
        if time.monotonic() - self._tried_s >= RECONNECT_S:
            self._connect_again()
        if self._connection is not None:
            if self._send(self._connection, payload):
                return True
            if not self._connection.is_over:
                return False
            self._part(self._connection)  # keeps its unsent frames, this payload included
            return True
        if is_full(self._unsent):
            return False
        self._unsent.append(_frame(payload))
        return True

    def watch(self, loop: asyncio.AbstractEventLoop, on_payload: Callable[[bytes], None]) -> None:
        self._on_received, self._loop = on_payload, loop
        self._start(loop)
        if self._connection is None:
            self._connect_later()

    def _connect(self) -> None:
        self._tried_s = time.monotonic()
        end = self._socket()
        try:
            end.connect(self._path)
        except OSError as error:
            end.close()
            if error.errno not in _NOT_THERE:
                raise
            self._connect_later()
            return
        self._connection = self._add(end)
        self._connection.unsent.extend([self._hello, *self._unsent])
        self._unsent.clear()
        self._connection.flush()
        self._follow(self._connection)

    def _connect_later(self) -> None:
        if self._loop is not None and self._timer is None:
            self._timer = self._loop.call_later(RECONNECT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._connect_again()

    def _accept(self) -> None:
        """Do nothing: a client does not listen."""

    def _connect_again(self) -> None:
        if self._connection is None:
            try:
                self._connect()
            except (OSError, TransportError):  # for example, no descriptors are left at this moment
                self._connect_later()

    def _on_payload(self, connection: _Connection, payload: bytes) -> None:
        if self._on_received is not None:
            self._on_received(payload)

    def _on_end(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._part(connection)

    def _part(self, connection: _Connection) -> None:
        """Keep the unsent frames of an ended connection, and connect again later."""
        self._connection = None
        self._unsent = connection.unsent
        if self._unsent and self._unsent[0] is self._hello:
            self._unsent.popleft()
        self._connect_later()

    def close(self) -> None:
        super().close()
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def is_full(queue: deque[bytes]) -> bool:
    return len(queue) >= QUEUE_PAYLOADS


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def _no_socket(error: OSError) -> TransportError:
    return TransportError(f"no socket can be opened for a control channel: {error.strerror}")


def private_folder() -> Path:
    """Return the folder for socket files that only this user can enter.

    Raises:
        ConfigError: There is no such folder, and it cannot be created.
    """
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = parent / f"kvferry-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"folder {folder} for sockets cannot be made: {error.strerror}; set XDG_RUNTIME_DIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"folder {folder} for sockets is not this user's alone (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}); it must be a folder of mode 700: remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def remove_dead_sockets(folder: Path) -> None:
    """Remove old socket files on which nobody listens. Their servers were killed."""
    for path in folder.iterdir():
        _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or time.time() - found.st_mtime < DEAD_AFTER_S:
            return
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
