"""Admission to the port of a control channel: CURVE keys, and the thread that checks them.

With CURVE (RFC 26), both ends prove that they hold the secret half of a key. All later messages are encrypted. A client must know
the server's public key before it can show its own. libzmq then asks this thread by ZAP (RFC 27), over a socket inside the
process, whether that key is allowed. A separate thread answers, so that a handshake does not wait for a rank's loop. The loop can
stand still for a step of its engine.

Before a handshake is over, libzmq 4.3.5 reads one message of at most MAXMSGSIZE bytes at a time into memory. A wrong message ends
the connection, and so does `HANDSHAKE_IVL`. A connection has a queue at the ROUTER only after the handshake, so a stranger's
messages are never kept, however many parts they have.

Two rules for changes of this module, both because of `stream_engine_base.cpp` of 4.3.5:

- No monitor for ``HANDSHAKE_FAILED_PROTOCOL``. Sending that event overwrites `errno` with EAGAIN. It is also sent for a message
  that does not decrypt on an admitted connection. libzmq then treats the broken message as a full queue: the connection is
  neither read nor closed any more, and its routing id stays in use. So strangers are counted without it: a connection counts if
  it was not admitted in time.
- The monitor's reader takes all events at once, without a bound. libzmq's I/O thread sends events without a timeout, so a full
  queue would stop it and every heartbeat.

Each server has its own ZeroMQ context, because ZAP has one endpoint per context.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from transfer.control.base import KeyPair

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_DOMAIN: Final = b"kvferry"
_MONITOR_ENDPOINT: Final = "inproc://arrivals"
_MONITORED: Final = int(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
_CLOSE_TIMEOUT_S: Final = 5.0

FRAME_OVERHEAD_BYTES: Final = 33
"""Of CURVE around a payload: 7 of the command's name and 1 of its length, 8 of the nonce, 16 of the authenticator, 1 of flags."""


def new_key_pair() -> KeyPair:
    """Return keys for one life of a rank, from the operating system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=z85.decode(public), secret=z85.decode(secret))


def user_id_of(key: bytes) -> str:
    """Return the name of a key, as messages have it for their connection."""
    return key.hex()


class Arrivals:
    """Count connections that were accepted and not admitted. Used by two threads.

    Args:
        grace_s: Age after which a connection is admitted or never will be.
        clock: Seconds.
    """

    def __init__(self, *, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._lock = threading.Lock()
        self._young: deque[list[float]] = deque()  # [second, connections accepted in it]: no more entries than seconds of grace
        self._num_old = 0
        self._num_admitted = 0
        self._num_denied = 0
        self._num_refused = 0

    def accepted(self) -> None:
        second = float(int(self._clock()))
        with self._lock:
            if self._young and self._young[-1][0] == second:
                self._young[-1][1] += 1
            else:
                self._young.append([second, 1])
            self._settle()

    def admitted(self) -> None:
        with self._lock:
            self._num_admitted += 1

    def denied(self) -> None:
        """Count a connection whose key is not allowed, at once."""
        with self._lock:
            self._num_denied += 1

    @property
    def num_refused(self) -> int:
        """Number of rejected connections. It never falls, and is never too high."""
        with self._lock:
            self._settle()
            self._num_refused = max(self._num_refused, self._num_denied, self._num_old - self._num_admitted)
            return self._num_refused

    def _settle(self) -> None:
        oldest = self._clock() - self._grace_s - 1.0
        while self._young and self._young[0][0] < oldest:
            self._num_old += int(self._young.popleft()[1])


class ZapAuthenticator:
    """Admit only connections whose key is allowed.

    Args:
        keys: Keys of the server.
        grace_s: Age after which a connection is admitted or never will be.
    """

    def __init__(self, *, keys: KeyPair, grace_s: float) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        """Context of the guarded socket alone; `close()` ends it."""
        self._keys = keys
        self._allowed: frozenset[bytes] = frozenset()  # replaced as a whole: the thread reads it
        self._arrivals = Arrivals(grace_s=grace_s)
        self._wake = -1
        self._thread: threading.Thread | None = None

    @property
    def num_refused(self) -> int:
        return self._arrivals.num_refused

    def allow_only(self, keys: frozenset[bytes]) -> None:
        """Admit these keys from now on; open connections with other keys stay open."""
        self._allowed = keys

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Guard a ROUTER of `context`, which is not bound yet."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(self._keys.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._keys.secret))
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        # Without it, libzmq admits everyone who knows the server's key if no thread answers ZAP.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        questions = self.context.socket(zmq.REP)
        questions.setsockopt(zmq.LINGER, 0)
        questions.bind(_ZAP_ENDPOINT)
        socket.monitor(_MONITOR_ENDPOINT, _MONITORED)
        events = self.context.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        events.setsockopt(zmq.RCVHWM, 0)
        events.connect(_MONITOR_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, args=(questions, events), name="control-authenticator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and the context. The guarded socket must be closed before."""
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._thread = None
            os.close(self._wake)

    def _run(self, questions: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        for source in (questions, events, self._wake):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                break
            if questions in ready:
                self._answer(questions)
            if events in ready:
                self._count(events)
        questions.close()
        events.close()
        self.context.term()

    def _answer(self, questions: zmq.Socket[bytes]) -> None:
        version, request_id, _domain, _address, _identity, mechanism, *credentials = questions.recv_multipart()
        key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if key in self._allowed:
            answer = (b"200", b"", user_id_of(key).encode())
        else:
            self._arrivals.denied()
            answer = (b"400", b"", b"")
        questions.send_multipart([version, request_id, *answer, b""])

    def _count(self, events: zmq.Socket[bytes]) -> None:
        try:
            while True:
                event = parse_monitor_message(events.recv_multipart(zmq.DONTWAIT))["event"]
                if event == zmq.EVENT_ACCEPTED:
                    self._arrivals.accepted()
                else:
                    self._arrivals.admitted()
        except zmq.Again:
            return
