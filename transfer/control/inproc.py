"""The control plane inside one process: the twin of `zmq_channel` for tests and for embedding.

It behaves as the real one does, and with `Faults` it also misbehaves as the real one may, the same way for the same seed. Time
is counted in ticks, moved by `InprocControlServer.advance()`; without delays there is no need to. Both ends live on one thread.
Keys are compared and not used: nothing of it leaves the process.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from transfer.control.base import (
    QUEUE_PAYLOADS,
    WATCH_BATCH,
    KeyPair,
    Received,
    Waker,
    checked_key,
    checked_payload,
    checked_peer,
)
from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportClosed


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong on the way, for every payload by itself.

    Args:
        loss: Probability that it never arrives.
        duplication: Probability that it arrives twice.
        reordering: Probability that it overtakes those that are still waiting.
        max_delay_ticks: It waits for 0 to this many ticks (which also reorders).
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    max_delay_ticks: int = 0

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "reordering"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a probability lies in [0, 1]")
        if self.max_delay_ticks < 0:
            raise ConfigError(f"max_delay_ticks is {self.max_delay_ticks}; it must be 0 or more")


_Item = TypeVar("_Item")
_serials = itertools.count(1)
_servers: Final[weakref.WeakValueDictionary[str, InprocControlServer]] = weakref.WeakValueDictionary()


class _Inbox(Generic[_Item]):
    """One end's queue, with a descriptor that is readable while something is due."""

    def __init__(self) -> None:
        self._ready: deque[_Item] = deque()
        self._late: list[tuple[int, int, _Item]] = []
        self._order = itertools.count()
        self._tick = 0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_readable = False
        self.is_closed = False

    def put(self, item: _Item, faults: Faults, rng: random.Random) -> None:
        if self.is_closed or rng.random() < faults.loss:
            return
        for _ in range(2 if rng.random() < faults.duplication else 1):
            delay = rng.randint(0, faults.max_delay_ticks)
            if delay:
                heapq.heappush(self._late, (self._tick + delay, next(self._order), item))
            elif rng.random() < faults.reordering:
                self._ready.insert(rng.randint(0, len(self._ready)), item)
            else:
                self._ready.append(item)
        self._show()

    def take(self) -> _Item | None:
        if self.is_closed:
            raise TransportClosed("the control channel is closed; nothing can be received")
        item = self._ready.popleft() if self._ready else None
        self._show()
        return item

    def advance(self, num_ticks: int) -> None:
        self._tick += num_ticks
        while self._late and self._late[0][0] <= self._tick:
            self._ready.append(heapq.heappop(self._late)[2])
        self._show()

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._ready.clear()
            self._late.clear()
            os.close(self._event)

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def num_waiting(self) -> int:
        return len(self._ready) + len(self._late)

    def _show(self) -> None:
        if self.is_closed or bool(self._ready) == self._is_readable:
            return
        self._is_readable = bool(self._ready)
        if self._is_readable:
            os.eventfd_write(self._event, 1)
        else:
            os.eventfd_read(self._event)


class InprocControlServer:
    """A `ControlServer` that clients of the same process find by its address.

    Args:
        faults: What goes wrong on the way, in both directions.
        seed: Same seed, same calls: same faults.
        keys: This end's; without, clients have none either.
    """

    def __init__(self, *, faults: Faults | None = None, seed: int = 0, keys: KeyPair | None = None) -> None:
        self._keys = keys
        self._faults = faults or Faults()
        self._rng = random.Random(seed)
        self._inbox: _Inbox[Received] = _Inbox()
        self._clients: dict[int, InprocControlClient] = {}
        self._allowed: dict[int, bytes] = {}
        self._num_dropped = 0
        self._num_refused = 0
        self._num_unsent = 0
        self._waker: Waker | None = None
        self._address = f"inproc://kvferry-{next(_serials)}"
        _servers[self._address] = self

    @property
    def address(self) -> str:
        return self._address

    @property
    def public_key(self) -> bytes:
        return self._keys.public if self._keys else b""

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_refused(self) -> int:
        return self._num_refused

    @property
    def num_unsent(self) -> int:
        return self._num_unsent

    def allow(self, peer: int, key: bytes = b"") -> None:
        checked_peer(peer)
        if self._keys is not None:
            checked_key(key)
        elif key:
            raise LocalProtocolError(f"session {peer:#x} has a key; this server has none of its own")
        self._allowed[peer] = key

    def forget(self, peer: int) -> None:
        self._allowed.pop(peer, None)

    def advance(self, num_ticks: int = 1) -> None:
        """Let time pass: payloads whose delay is over arrive, at this end and at every client."""
        self._inbox.advance(num_ticks)
        for client in self._clients.values():
            client._inbox.advance(num_ticks)

    def send(self, peer: int, payload: bytes) -> bool:
        self._require_open()
        checked_payload(payload)
        client = self._clients.get(checked_peer(peer)) if peer in self._allowed else None
        is_sent = client is not None and not client._inbox.is_closed and client._inbox.num_waiting < QUEUE_PAYLOADS
        if client is not None and is_sent:
            client._inbox.put(payload, self._faults, self._rng)
        self._num_unsent += not is_sent
        return is_sent

    def receive(self) -> Received | None:
        for _ in range(WATCH_BATCH):
            received = self._inbox.take()
            if received is None or self._is_heard(received):
                return received
            self._num_dropped += 1
        return None

    def _is_heard(self, received: Received) -> bool:
        """Whether its sender, who has the place of that session id, holds the key of the session."""
        return received.peer in self._allowed and self._allowed[received.peer] == self._clients[received.peer].public_key

    def drain(self, on_received: Callable[[Received], None]) -> int:
        count = 0
        while (received := self.receive()) is not None:
            on_received(received)
            count += 1
        return count

    def has_pending(self) -> bool:
        return len(self._inbox) > 0

    def fileno(self) -> int:
        return self._inbox.fileno()

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        def take() -> bool:
            received = self._inbox.take()
            if received is None:
                return False
            if self._is_heard(received):
                on_received(received)
            else:
                self._num_dropped += 1
            return True

        if self._waker is not None:
            self._waker.stop()
        self._waker = Waker(loop, self.fileno(), take=take, has_pending=self.has_pending)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.stop()
        _servers.pop(self._address, None)
        self._inbox.close()

    def _require_open(self) -> None:
        if self._inbox.is_closed:
            raise TransportClosed("the control channel is closed; nothing can be sent")

    def _join(self, client: InprocControlClient) -> None:
        """Let a client in; one that claims a live session id is not, and what it sends is dropped. One without the right keys
        never comes in: all that it sends is lost on the way."""
        if self._keys is not None and (client.server_key != self._keys.public or client.public_key not in self._allowed.values()):
            self._num_refused += 1
            client.is_refused = True
            return
        live = self._clients.get(client.session_id)
        if live is None or live._inbox.is_closed:
            self._clients[client.session_id] = client

    def _take_from(self, client: InprocControlClient, payload: bytes) -> bool:
        if self._inbox.is_closed or client.is_refused:
            return True  # as over a socket: on its way, and never to arrive
        if self._clients.get(client.session_id) is not client:
            self._num_dropped += 1
            return True
        if self._inbox.num_waiting >= QUEUE_PAYLOADS * len(self._clients):
            return False
        self._inbox.put(Received(peer=client.session_id, payload=payload), self._faults, self._rng)
        return True


class InprocControlClient:
    """A `ControlClient` of an `InprocControlServer`.

    Args:
        address: The server's.
        session_id: Names this client; the server must have allowed it.
        keys: This end's, where the server has keys.
        server_key: The server's public one.

    Raises:
        PeerUnreachable: No server of this process has the address.
    """

    def __init__(self, address: str, *, session_id: int, keys: KeyPair | None = None, server_key: bytes = b"") -> None:
        self.public_key = keys.public if keys else b""
        self.server_key = server_key
        self.is_refused = False
        server = _servers.get(address)
        if server is None:
            raise PeerUnreachable(f"control address is {address[:200]!r}; no open server of this process has it")
        self.session_id = checked_peer(session_id)
        self._server = server
        self._inbox: _Inbox[bytes] = _Inbox()
        self._num_unsent = 0
        self._waker: Waker | None = None
        server._join(self)

    @property
    def num_unsent(self) -> int:
        return self._num_unsent

    def send(self, payload: bytes) -> bool:
        if self._inbox.is_closed:
            raise TransportClosed("the control channel is closed; nothing can be sent")
        is_sent = self._server._take_from(self, checked_payload(payload))
        self._num_unsent += not is_sent
        return is_sent

    def receive(self) -> bytes | None:
        return self._inbox.take()

    def drain(self, on_payload: Callable[[bytes], None]) -> int:
        count = 0
        while (payload := self.receive()) is not None:
            on_payload(payload)
            count += 1
        return count

    def has_pending(self) -> bool:
        return len(self._inbox) > 0

    def fileno(self) -> int:
        return self._inbox.fileno()

    def watch(self, loop: asyncio.AbstractEventLoop, on_payload: Callable[[bytes], None]) -> None:
        def take() -> bool:
            payload = self.receive()
            if payload is None:
                return False
            on_payload(payload)
            return True

        if self._waker is not None:
            self._waker.stop()
        self._waker = Waker(loop, self.fileno(), take=take, has_pending=self.has_pending)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.stop()
        self._inbox.close()
