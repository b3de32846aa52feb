"""The control plane's interface: opaque small payloads between one server and its peers.

A peer has a session id, which the registry plane assigned, and a public key, which came with the attach. The server accepts a
session's payloads only from the holder of the key that its owner has allowed for the session. It drops and counts all others.
Nothing here blocks, and delivery is not guaranteed. A payload can be lost (the peer reconnects, a queue is full), but not
damaged. Payloads of one peer arrive in the order in which they were sent. The protocol above repeats important payloads until
they are answered.

Payloads are delivered on the asyncio loop that was passed to `watch()`. Before that call they wait. Payloads that could not be
sent at once may also be sent by this loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from transfer.errors import LocalProtocolError
from transfer.instance import CONTROL_KEY_BYTES

MAX_PAYLOAD_BYTES: Final = 1 << 20
"""Largest payload that a channel carries by default; a peer that sends more is disconnected."""

KEY_BYTES: Final = CONTROL_KEY_BYTES
"""Size of a public key, and of a secret one."""

QUEUE_PAYLOADS: Final = 4096
"""Payloads to one peer that may wait to be sent before `send()` says "not yet"."""

WATCH_BATCH: Final = 256
"""Payloads handed over or dropped before a watched loop gets its turn."""

WATCH_S: Final = 0.005
"""Time limit of a batch. A peer can repeat a request for 1,024 grants, which takes 4 ms, so a full batch would take a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """The keys of one end, for one life of its process. They are created when a rank starts, and stay in memory. Only the public
    key leaves the process, over the registry plane.

    Args:
        public: Key by which the other end identifies this one, `KEY_BYTES`.
        secret: Never shown in a representation, and so in no log line and no error text.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        checked_key(self.public)
        if len(self.secret) != KEY_BYTES:
            raise LocalProtocolError(f"secret key has {len(self.secret)} bytes; it must have {KEY_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One payload, and the session id of the peer that sent it."""

    peer: int
    payload: bytes


class ControlServer(Protocol):
    """The end with many peers. Owned by one thread."""

    @property
    def address(self) -> str:
        """Where clients connect, complete with the port that was bound."""
        ...

    @property
    def public_key(self) -> bytes:
        """Key by which clients identify this end; empty if both ends trust the path between them."""
        ...

    @property
    def num_dropped(self) -> int:
        """Payloads dropped because their sender is not allowed, or because they were not one whole payload."""
        ...

    @property
    def num_refused(self) -> int:
        """Number of connections without an allowed key. The count can lag by seconds."""
        ...

    def allow(self, peer: int, key: bytes = b"") -> None:
        """Serve this session id from now on, and accept its payloads only from the holder of that public key.

        Raises:
            LocalProtocolError: The id is invalid; or the key is missing, or given although this server uses no keys.
        """
        ...

    def forget(self, peer: int) -> None:
        """Stop serving this session id; its payloads are dropped and counted from now on. Unknown ids are ignored.

        A key without sessions cannot connect again, and payloads on its open connection are dropped.
        """
        ...

    def send(self, peer: int, payload: bytes) -> bool:
        """Queue a payload. Return False if the peer is not allowed, not connected, or its queue is full; the payload is lost."""
        ...

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        """Hand over every payload as it comes, on `loop`, until `close()`.

        An exception of the callback goes to the loop's handler, and the next payload is handed over all the same.
        """
        ...

    def close(self) -> None:
        """Stop. May be called twice."""
        ...


class ControlClient(Protocol):
    """The end with one peer, opened for one session. Owned by one thread."""

    def send(self, payload: bytes) -> bool:
        """Queue a payload. Return False if the queue is full; the payload is lost."""
        ...

    def watch(self, loop: asyncio.AbstractEventLoop, on_payload: Callable[[bytes], None]) -> None:
        """Hand over every payload as it comes, on `loop`, until `close()`."""
        ...

    def close(self) -> None:
        """Stop. May be called twice."""
        ...


class Waker:
    """Hand payloads over on an asyncio loop without losing an edge of the descriptor.

    ZeroMQ's descriptor is edge-triggered, and a send can consume the edge. So the descriptor's state is checked again after every
    batch, and after every send that the owner reports through `after_send()`. Payloads that are there are taken in a later turn.

    Args:
        fileno: Descriptor to watch.
        take: Hands over, or drops, the next payload; returns False if nothing is there.
        has_pending: Returns whether `take` would find a payload.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fileno: int, *, take: Callable[[], bool], has_pending: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._fileno = fileno
        self._take = take
        self._has_pending = has_pending
        self._scheduled: asyncio.Handle | None = None
        self._is_running = False
        self._stopped = False
        loop.add_reader(fileno, self._on_readable)
        self._schedule()  # payloads that arrived before have consumed their edge

    def after_send(self) -> None:
        # While a batch runs there is no need to look: it goes on until nothing is there, or schedules the next one.
        if self._scheduled is None and not self._is_running and not self._stopped and self._has_pending():
            self._schedule()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fileno)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _schedule(self) -> None:
        if self._scheduled is None and not self._stopped:
            self._scheduled = self._loop.call_soon(self.take_batch)

    def _on_readable(self) -> None:
        if self._scheduled is None:
            self.take_batch()  # in this turn of the loop; waiting for the next one would delay every message

    def take_batch(self) -> None:
        """Take payloads until the socket is empty or the batch is full. The next turn of the loop takes the rest."""
        self._scheduled = None
        self._is_running = True
        is_empty, ends_s = False, time.monotonic() + WATCH_S
        try:
            for _ in range(WATCH_BATCH):
                if self._stopped:
                    return
                if not self._take():
                    is_empty = True
                    break
                if time.monotonic() >= ends_s:
                    break
        finally:
            self._is_running = False
            # Also if the callback raised: the payloads after that one have no edge of their own.
            if not is_empty:
                self._schedule()


def checked_peer(peer: int) -> int:
    """Return `peer` if it can name a session.

    Raises:
        LocalProtocolError: It is not in [1, 2**64).
    """
    if not 0 < peer < 1 << 64:
        raise LocalProtocolError(f"session id is {peer}; it must be in [1, 2**64)")
    return peer


def checked_key(key: bytes) -> bytes:
    """Return `key` if it can be a public key.

    Raises:
        LocalProtocolError: It has another length than `KEY_BYTES`.
    """
    if len(key) != KEY_BYTES:
        raise LocalProtocolError(f"public key has {len(key)} bytes; it must have {KEY_BYTES}")
    return key


def checked_payload(payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """Return `payload` if it has at most `max_bytes`.

    Raises:
        LocalProtocolError: It is larger.
    """
    if len(payload) > max_bytes:
        raise LocalProtocolError(f"payload of {len(payload)} bytes; this control channel carries at most {max_bytes}")
    return payload
