"""The control plane over ZeroMQ: one ROUTER at a decode rank, one DEALER per session at a prefill rank.

- Both ends have keys. CURVE authenticates the ends and encrypts messages; see `zmq_authenticator`.
- A client's routing id is its session id after one byte that is not 0 (ids that begin with 0 are ZeroMQ's own). Session ids are
  random and secret between the two ends. Each message carries the key of its connection, and is accepted only if that is the
  session's key.
- ROUTER_HANDOVER stays off: a second connection that claims a live id is ignored instead of taking it over. So a client that
  reconnects must wait until the server has detected the end of the old connection. `RECONNECT_MS` is longer than the server
  needs, also if only the client is notified of the break. A restarted process has another session id, and so is another peer.
- ROUTER_MANDATORY is on: a send to a missing peer returns an error.
- Both ends send heartbeats, so both detect a frozen or unreachable other end. This only allows the same client's next connection.
  Only the gRPC stream ends a session (see docs/protocol.md). A rank has a connection for each session, so heartbeats are rare.
- A client's heartbeats also carry a time limit for the server (ZMQ_HEARTBEAT_TTL), for servers of release 0.1.0, which send
  none. It cannot replace the server's heartbeats: each later message cancels the limit until the client's next heartbeat. If the
  client vanished after a message, the server would keep the connection, and ignore the next one for ever.
- The send queue is bounded, and the receive queue is not. libzmq stops reading a connection whose receive queue is full. If that
  connection then breaks, the next heartbeat, or a PING among the bytes read before, fails an assertion that aborts this process
  (libzmq 4.3.5, stream_engine_base.cpp:310). An honest peer cannot fill the queue, because the protocol bounds its messages in
  flight. A peer whose key is allowed can make the queue grow. It can also send one message of endless parts, which ZeroMQ keeps
  until the last part has come. A peer whose key is not allowed has no queue. SECURITY.md describes the consequences.
- libzmq reconnects by itself after a connection broke. It never does so after an invalid message of the protocol, for example one
  byte that changed on the way. The socket then accepts nothing more. So a client disconnects when a send is refused, or when its
  socket has not been writable for `RECONNECT_MS`. It connects again `RECONNECT_MS` later, even without a send. A timer of the
  watching loop starts that connection. Without a watching loop, the next send starts it.
- Each dropped message is one step of a batch, so a flood of the port slows the owner's loop but never blocks it.

ADR 89 explains the intervals and the timeout of the heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils import z85

from transfer.control.base import (
    MAX_PAYLOAD_BYTES,
    QUEUE_PAYLOADS,
    KeyPair,
    Received,
    Waker,
    checked_key,
    checked_payload,
    checked_peer,
)
from transfer.control.zmq_authenticator import FRAME_OVERHEAD_BYTES, ZapAuthenticator, user_id_of
from transfer.errors import ConfigError, PeerUnreachable, TransportClosed, TransportError

CLIENT_HEARTBEAT_MS: Final = 2000
SERVER_HEARTBEAT_MS: Final = 800
HEARTBEAT_TIMEOUT_MS: Final = 600
"""Maximum silence after a heartbeat, at both ends. A server detects a break within `SERVER_HEARTBEAT_MS` and this."""

RECONNECT_MS: Final = 1500
"""Pause before the next connection. libzmq waits up to twice as long."""

HANDSHAKE_MS: Final = 5000
REFUSED_AFTER_S: Final = HANDSHAKE_MS / 1000 + 1.0
"""Age at which a connection without an allowed key counts as refused: one second more than a handshake may take."""

MAX_CLIENTS: Final = 4096
"""Clients of one process, sessions that are being replaced included."""

_ID_PREFIX: Final = b"\x01"
_ACCEPT_BACKLOG: Final = 1024
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)


class _Messages:
    """Take messages of exactly `num_parts` parts off a socket. Drop others, one part a step, of any length.

    Args:
        are_signed: Whether to keep the key of the last message's connection in `user_id`.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, num_parts: int, are_signed: bool = False) -> None:
        self._socket = socket
        self._num_parts = num_parts
        self._are_signed = are_signed
        self._is_skipping = False
        self.num_dropped = 0
        self.user_id = ""

    def step(self) -> list[bytes] | None:
        """Return the parts of the next message, `[]` if a part or a message was dropped, or None if nothing is there."""
        frame = self._receive(copy=not self._are_signed)
        if frame is None:
            return None
        if self._are_signed:
            self.user_id = str(frame.get("User-Id"))  # set by the authenticator for every connection that came in
            frame = frame.bytes
        if self._is_skipping:
            self._is_skipping = self._has_more()
            return []
        parts = [frame]
        while len(parts) < self._num_parts and self._has_more():
            parts.append(self._receive(copy=True))  # a message's parts arrive together
        self._is_skipping = self._has_more()
        if self._is_skipping or len(parts) < self._num_parts:
            self.num_dropped += 1
            return []
        return parts

    def _receive(self, *, copy: bool) -> Any:
        """Return a part as bytes, or without `copy` as a frame, which has properties; None if nothing is there."""
        try:
            return self._socket.recv(zmq.DONTWAIT, copy=copy)
        except zmq.Again:
            return None

    def _has_more(self) -> bool:
        return bool(self._socket.getsockopt(zmq.RCVMORE))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """A session that is served, and the key of its writer."""

    number: int
    key: bytes
    user_id: str


class ZmqControlServer:
    """A `ControlServer` on a ROUTER socket.

    Args:
        bind: ``tcp://HOST:PORT``; port 0 takes a free one.
        keys: Keys of this end.
        advertise_host: Host that `address` names; needed if HOST is a wildcard.
        max_payload_bytes: Largest payload, either way; checked before a payload is read.

    Raises:
        ConfigError: The address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: KeyPair,
        advertise_host: str | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        is_wildcard = bind.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"))
        if is_wildcard and advertise_host is None:
            raise ConfigError(f"control address is {bind}, to which no peer can connect; set the host to advertise")
        self._max_payload_bytes = max_payload_bytes
        self._authenticator = ZapAuthenticator(keys=keys, grace_s=REFUSED_AFTER_S)
        self._socket = _socket(self._authenticator.context, zmq.ROUTER, bind, max_payload_bytes=max_payload_bytes)
        try:
            self._authenticator.guard(self._socket)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close(linger=0)
            raise TransportError(f"no authenticator can be had for a control channel: {error.strerror}") from error
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.BACKLOG, _ACCEPT_BACKLOG)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, SERVER_HEARTBEAT_MS)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._authenticator.close()
            raise ConfigError(f"control address is {bind}; it cannot be bound: {error.strerror}") from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if advertise_host is not None:
            host = f"[{advertise_host}]" if ":" in advertise_host else advertise_host
            bound = f"tcp://{host}:{bound.rpartition(':')[2]}"
        self.address = bound
        self.public_key = keys.public
        self._fileno = int(self._socket.getsockopt(zmq.FD))
        self._messages = _Messages(self._socket, num_parts=2, are_signed=True)  # routing id, payload
        self._peers: dict[bytes, _Peer] = {}
        self._num_strange = 0
        self._waker: Waker | None = None

    @property
    def num_dropped(self) -> int:
        return self._num_strange + self._messages.num_dropped

    @property
    def num_refused(self) -> int:
        return self._authenticator.num_refused

    def allow(self, peer: int, key: bytes = b"") -> None:
        routing_id = _routing_id(peer)
        checked_key(key)
        self._peers[routing_id] = _Peer(number=peer, key=key, user_id=user_id_of(key))
        self._tell_authenticator()

    def forget(self, peer: int) -> None:
        if self._peers.pop(_routing_id(peer), None) is not None:
            self._tell_authenticator()

    def _tell_authenticator(self) -> None:
        self._authenticator.allow_only(frozenset(peer.key for peer in self._peers.values()))

    def send(self, peer: int, payload: bytes) -> bool:
        routing_id = _routing_id(peer)
        checked_payload(payload, self._max_payload_bytes)
        is_sent = routing_id in self._peers and _send(self._socket, [routing_id, payload])
        if self._waker is not None:
            self._waker.after_send()
        return is_sent

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        def take() -> bool:
            parts = self._messages.step()
            if parts:
                peer = self._peers.get(parts[0])
                if peer is None or peer.user_id != self._messages.user_id:
                    self._num_strange += 1
                else:
                    on_received(Received(peer=peer.number, payload=parts[1]))
            return parts is not None

        if self._waker is not None:
            self._waker.stop()
        self._waker = Waker(loop, self._fileno, take=take, has_pending=lambda: bool(_events(self._socket) & _POLLIN))

    def close(self) -> None:
        if self._waker is not None:
            self._waker.stop()
        self._socket.close(linger=0)
        self._authenticator.close()


class _ClientContext:
    """The context of all clients of this process, while there are any: two threads and five descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[Any] | None = None
        self._num_users = 0

    def acquire(self) -> zmq.Context[Any]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
                self._context.set(zmq.MAX_SOCKETS, MAX_CLIENTS)  # 1,023 by default
            self._num_users += 1
            return self._context

    def release(self) -> None:
        """Give back what `acquire` returned. The sockets of this user must be closed."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                context, self._context = self._context, None
                assert context is not None
                context.term()


_client_context = _ClientContext()


class ZmqControlClient:
    """A `ControlClient` on a DEALER socket.

    Args:
        address: `ControlServer.address` of the peer, from the answer to the attach.
        session_id: Names this client; the server must have allowed it.
        keys: Keys of this end.
        server_key: Public key of the server: no other server is accepted.
        max_payload_bytes: As at the server.

    Raises:
        PeerUnreachable: The address cannot be connected to.
        LocalProtocolError: The server's key has a wrong length.
        TransportError: This process has no descriptors left.
    """

    def __init__(
        self,
        address: str,
        *,
        session_id: int,
        keys: KeyPair,
        server_key: bytes,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        routing_id = _routing_id(session_id)
        checked_key(server_key)
        self._max_payload_bytes = max_payload_bytes
        self._is_closed = False
        try:
            self._socket = _socket(_client_context.acquire(), zmq.DEALER, address, max_payload_bytes=max_payload_bytes)
        except TransportError:
            _client_context.release()
            raise
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.public))
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.secret))
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(server_key))
        self._socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, CLIENT_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, CLIENT_HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            _client_context.release()
            raise PeerUnreachable(f"control address is {address[:200]!r}; it cannot be connected to: {error.strerror}") from error
        self._address = address
        self._is_parted = False  # disconnected until the wait ends
        self._stuck_s: float | None = None  # time since which it cannot send
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that watches the socket
        self._timer: asyncio.TimerHandle | None = None
        self._fileno = int(self._socket.getsockopt(zmq.FD))
        self._messages = _Messages(self._socket, num_parts=1)
        self._waker: Waker | None = None

    def send(self, payload: bytes) -> bool:
        self._go_on_if_due()
        is_sent = _send(self._socket, [checked_payload(payload, self._max_payload_bytes)])
        if not is_sent:
            self._part()
        if self._waker is not None:
            self._waker.after_send()
        return is_sent

    def _look(self) -> int:
        """Return the events that the socket is ready for. If it cannot send, its queue is full or libzmq gave up the server.

        A queue that is still full when the wait ends means a broken connection.
        """
        events = _events(self._socket)
        if events & _POLLOUT:
            self._end_wait()
        elif self._stuck_s is None:
            self._wait()
        return events

    def _part(self) -> None:
        """Disconnect, and connect again after the server had time to detect it."""
        if self._is_parted:
            return
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given up the address already
            self._socket.disconnect(self._address)
        self._is_parted = True
        self._end_wait()
        self._wait()

    def _wait(self) -> None:
        """Start the wait of `RECONNECT_MS`, with a timer if a loop watches the socket."""
        self._stuck_s = time.monotonic()
        if self._loop is not None:
            self._timer = self._loop.call_later(RECONNECT_MS / 1000, self._go_on)

    def _end_wait(self) -> None:
        self._stuck_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on_if_due(self) -> None:
        if self._stuck_s is not None and time.monotonic() - self._stuck_s >= RECONNECT_MS / 1000:
            self._go_on()

    def _go_on(self) -> None:
        """End the wait: connect again, or disconnect if the socket still cannot send."""
        self._end_wait()
        if self._is_parted:
            try:
                self._socket.connect(self._address)
            except zmq.ZMQError:  # such as for want of a file descriptor
                self._wait()
                return
            self._is_parted = False
        elif not _events(self._socket) & _POLLOUT:
            self._part()
        if self._waker is not None:
            self._waker.after_send()  # each of these calls can consume the edge of a new message

    def watch(self, loop: asyncio.AbstractEventLoop, on_payload: Callable[[bytes], None]) -> None:
        def has_pending() -> bool:
            return bool(self._look() & _POLLIN)

        def take() -> bool:
            parts = self._messages.step()
            if parts:
                on_payload(parts[0])
            return parts is not None or has_pending()  # a look can take the edge of a payload that arrived just now

        if self._waker is not None:
            self._waker.stop()
        self._loop = loop
        if self._stuck_s is not None:
            self._end_wait()
            self._wait()
        self._waker = Waker(loop, self._fileno, take=take, has_pending=has_pending)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.stop()
        self._loop = None
        self._end_wait()
        self._socket.close(linger=0)
        if not self._is_closed:
            self._is_closed = True
            _client_context.release()


def _socket(context: zmq.Context[Any], kind: int, address: str, *, max_payload_bytes: int) -> zmq.Socket[bytes]:
    try:
        socket: zmq.Socket[bytes] = context.socket(kind)
    except zmq.ZMQError as error:  # no descriptors left, or no sockets
        raise TransportError(f"no socket can be had for a control channel: {error.strerror}") from error
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.SNDHWM, QUEUE_PAYLOADS)
    socket.setsockopt(zmq.RCVHWM, 0)  # no bound: see the module's docstring
    socket.setsockopt(zmq.MAXMSGSIZE, max_payload_bytes + FRAME_OVERHEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int("[" in address))  # off otherwise: it would turn 127.0.0.1 into ::ffff:127.0.0.1
    return socket


def _routing_id(peer: int) -> bytes:
    return _ID_PREFIX + checked_peer(peer).to_bytes(8, "big")


def _send(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.DONTWAIT)
    except (zmq.Again, zmq.ZMQError) as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        if socket.closed:
            raise TransportClosed("the control channel is closed; nothing can be sent") from error
        raise
    return True


def _events(socket: zmq.Socket[bytes]) -> int:
    """`_POLLIN` if something can be received, and `_POLLOUT` if something can be sent; 0 once the socket is closed.

    Called after every send. Without the enumeration's operators and a context, the call takes half the time.
    """
    try:
        return 0 if socket.closed else int(socket.getsockopt(zmq.EVENTS))
    except zmq.ZMQError:
        return 0
