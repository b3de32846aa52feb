"""The control plane between ranks that share an event loop. Each payload is delivered in a later turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer.control.base import Received


class InprocControlServer:
    """A `ControlServer` whose clients are on the same loop. It needs no keys."""

    address = "inproc"
    public_key = b""
    num_refused = 0

    def __init__(self) -> None:
        self.num_dropped = 0
        self._allowed: set[int] = set()
        self._clients: dict[int, InprocControlClient] = {}

    def connect(self, session_id: int) -> InprocControlClient:
        """Return the client of a session."""
        client = self._clients[session_id] = InprocControlClient(self, session_id)
        return client

    def allow(self, peer: int, key: bytes = b"") -> None:
        self._allowed.add(peer)

    def forget(self, peer: int) -> None:
        self._allowed.discard(peer)

    def send(self, peer: int, payload: bytes) -> bool:
        client = self._clients.get(peer) if peer in self._allowed else None
        if client is not None:
            client.deliver(payload)
        return client is not None

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        self._loop, self._on_received = loop, on_received

    def deliver(self, received: Received) -> None:
        """Take a client's payload."""
        self._loop.call_soon(self._hand_over, received)

    def close(self) -> None:
        self._allowed.clear()

    def _hand_over(self, received: Received) -> None:
        if received.peer in self._allowed:
            self._on_received(received)
        else:
            self.num_dropped += 1


class InprocControlClient:
    """A `ControlClient` of an `InprocControlServer`."""

    def __init__(self, server: InprocControlServer, session_id: int) -> None:
        self._server = server
        self._session_id = session_id
        self._is_closed = False

    def send(self, payload: bytes) -> bool:
        self._server.deliver(Received(peer=self._session_id, payload=payload))
        return True

    def watch(self, loop: asyncio.AbstractEventLoop, on_payload: Callable[[bytes], None]) -> None:
        self._loop, self._on_payload = loop, on_payload

    def deliver(self, payload: bytes) -> None:
        """Take a payload of the server."""
        self._loop.call_soon(self._hand_over, payload)

    def close(self) -> None:
        self._is_closed = True

    def _hand_over(self, payload: bytes) -> None:
        if not self._is_closed:
            self._on_payload(payload)
