"""A control channel that loses no payload: payloads are numbered, acknowledged, and sent again.

Other channels lose the payloads of a broken connection (see `transfer.control.base`), and the protocol above them repeats what
matters. The messages between a leader and its ranks are sent once. So this wraps a channel for them:

    frame = number of the payload (8 bytes; 0 without a payload), number of payloads received so far (8 bytes), payload

The receiver takes a payload only if its number follows the last one. It drops repetitions, and payloads after a gap, which come
again. A sender whose payload is not acknowledged for `STUCK_S` refuses further ones: the peer is gone, or hangs.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from transfer.control.base import QUEUE_PAYLOADS, ControlClient, ControlServer, Received
from transfer.errors import LocalProtocolError

TICK_S: Final = 0.25
"""Pause between two looks at payloads to acknowledge, or to send again."""

REPEAT_S: Final = 2.0
"""Longer than an acknowledgement needs. While a connection is being replaced, which can take longer, payloads are sent more than
once, and the receiver drops repetitions."""

STUCK_S: Final = 30.0
"""Longer than TCP needs to connect again after a cut of 10 s, because it doubles the pause before each attempt."""

_HEADER: Final = struct.Struct("<QQ")
HEADER_BYTES: Final = _HEADER.size
"""Bytes of a frame besides its payload."""


class NumberedPayloads:
    """The payloads to and from one peer. No I/O; the caller gives the time."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_received = 0
        self._num_acknowledged = 0  # received payloads that the peer knows to have arrived
        self._open: deque[tuple[int, bytes]] = deque()  # sent payloads that may not have arrived
        self._open_since_s = 0.0  # since when the peer has acknowledged none of them
        self._sent_again_s = 0.0

    def is_stuck(self, now_s: float) -> bool:
        """Return whether the peer takes no more payloads."""
        is_full = len(self._open) >= QUEUE_PAYLOADS
        return is_full or (bool(self._open) and now_s - self._open_since_s >= STUCK_S)

    def frame(self, payload: bytes, now_s: float) -> bytes:
        """Return the frame of the next payload."""
        if not self._open:
            self._open_since_s = self._sent_again_s = now_s
        self._num_sent += 1
        self._open.append((self._num_sent, payload))
        return self._framed(self._num_sent, payload)

    def take(self, frame: bytes, now_s: float) -> bytes | None:
        """Return the payload of a received frame; None if there is none, or not the next one.

        Raises:
            LocalProtocolError: No peer sends such a frame; both ends are of one build.
        """
        if len(frame) < HEADER_BYTES:
            raise LocalProtocolError(f"a frame of {len(frame)} bytes; it must have at least {HEADER_BYTES}")
        number, num_arrived = _HEADER.unpack_from(frame)
        if num_arrived > self._num_sent:
            raise LocalProtocolError(f"the peer acknowledges payload {num_arrived}; {self._num_sent} were sent")
        while self._open and self._open[0][0] <= num_arrived:
            self._open.popleft()
            self._open_since_s = self._sent_again_s = now_s
        if number != self._num_received + 1:
            if number:
                self._num_acknowledged = -1  # the peer does not know what has arrived
            return None
        self._num_received = number
        return frame[HEADER_BYTES:]

    def due(self, now_s: float) -> list[bytes]:
        """Return the frames to send now besides new payloads."""
        if self._open and now_s - self._sent_again_s >= REPEAT_S:
            self._sent_again_s = now_s
            return [self._framed(number, payload) for number, payload in self._open]
        if self._num_acknowledged != self._num_received:
            return [self._framed(0, b"")]
        return []

    def _framed(self, number: int, payload: bytes) -> bytes:
        self._num_acknowledged = self._num_received
        return _HEADER.pack(number, self._num_received) + payload


class RepeatingServer:
    """A `ControlServer` that loses no payload between `allow` and `forget`.

    Args:
        server: Carries the frames. A payload has `HEADER_BYTES` less than its largest one. Closed with this.
        clock: Seconds that never go back.
    """

    def __init__(self, server: ControlServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._peers: dict[int, NumberedPayloads] = {}
        self._ticking = _Ticking(self._tick)

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def public_key(self) -> bytes:
        return self._server.public_key

    @property
    def num_dropped(self) -> int:
        return self._server.num_dropped

    @property
    def num_refused(self) -> int:
        return self._server.num_refused

    def allow(self, peer: int, key: bytes = b"") -> None:
        self._server.allow(peer, key)
        self._peers.setdefault(peer, NumberedPayloads())

    def forget(self, peer: int) -> None:
        self._server.forget(peer)
        self._peers.pop(peer, None)

    def send(self, peer: int, payload: bytes) -> bool:
        """Queue a payload. Return False if the peer is not allowed, or takes none: then it is gone, or hangs."""
        payloads, now_s = self._peers.get(peer), self._clock()
        if payloads is None or payloads.is_stuck(now_s):
            return False
        self._server.send(peer, payloads.frame(payload, now_s))  # sent again if it is lost
        return True

    def watch(self, loop: asyncio.AbstractEventLoop, on_received: Callable[[Received], None]) -> None:
        def take(received: Received) -> None:
            payloads = self._peers.get(received.peer)
            payload = None if payloads is None else payloads.take(received.payload, self._clock())
            if payload is not None:
                on_received(Received(peer=received.peer, payload=payload))

        self._server.watch(loop, take)
        self._ticking.start(loop)

    def _tick(self) -> None:
        for peer, payloads in self._peers.items():
            for frame in payloads.due(self._clock()):
                self._server.send(peer, frame)

    def close(self) -> None:
        self._ticking.stop()
        self._server.close()


class RepeatingClient:
    """A `ControlClient` of a `RepeatingServer`.

    Args:
        client: Carries the frames. Closed with this.
        clock: Seconds that never go back.
    """

    def __init__(self, client: ControlClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._payloads = NumberedPayloads()
        self._ticking = _Ticking(self._tick)

    def send(self, payload: bytes) -> bool:
        """Queue a payload. Return False if the server takes none: then it is gone, or hangs."""
        now_s = self._clock()
        if self._payloads.is_stuck(now_s):
            return False
        self._client.send(self._payloads.frame(payload, now_s))  # sent again if it is lost
        return True

    def watch(self, loop: asyncio.AbstractEventLoop, on_payload: Callable[[bytes], None]) -> None:
        def take(frame: bytes) -> None:
            payload = self._payloads.take(frame, self._clock())
            if payload is not None:
                on_payload(payload)

        self._client.watch(loop, take)
        self._ticking.start(loop)

    def _tick(self) -> None:
        for frame in self._payloads.due(self._clock()):
            self._client.send(frame)

    def close(self) -> None:
        self._ticking.stop()
        self._client.close()


class _Ticking:
    """Call a function each `TICK_S` on a loop."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop()
        self._loop = loop
        self._timer = loop.call_later(TICK_S, self._on_timer)

    def _on_timer(self) -> None:
        assert self._loop is not None, "the timer is of this loop"
        self._timer = self._loop.call_later(TICK_S, self._on_timer)
        self._tick()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
