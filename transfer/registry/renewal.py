"""When a server makes the TLS context of its handshakes anew. Pure but for the wait.

gRPC asks before each handshake for what the certificate files hold now. An answer replaces the context of the handshakes to come,
and frees the one before once nothing uses it. Both ends of that are dangerous:

- Never replaced, a context is shared, and its session tickets are good: whoever comes back with one is not asked for a
  certificate again, and the one that it had may have expired since.
- gRPC 1.85 asks under a lock, and takes a reference to the context after it has let the lock go
  (`grpc_ssl_server_security_connector::add_handshakers`). Replaced in between by the next handshake, on another thread, the
  context is freed and then used: hundreds of connections at once, which need no certificate to be opened, ended the process
  (SIGSEGV or SIGABRT in four runs of six on two cores).

So a context is replaced only when no handshake has asked for `SETTLE_S`: whoever asked before has taken its reference, and nobody
can ask meanwhile, for the lock is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SETTLE_S: Final = 0.25
"""From asking until a handshake has surely taken its reference, which is its thread's very next step."""

MAX_AGE_S: Final = 10.0
"""For so long handshakes that follow each other without a pause may share a context, and for so long a ticket is good at most."""


class Renewal:
    """Whether the context is to be made anew for a handshake. One call at a time, as gRPC's lock has it.

    Args:
        clock: Seconds that never go back.
        sleep: Waits so many seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._asked_s = float("-inf")
        self._renewed_s = float("-inf")
        self._content: object = None

    def is_due(self, content: object) -> bool:
        """Asked before each handshake, which waits for the answer; yes comes when the old context can be replaced.

        Args:
            content: What the certificate files hold now: something new makes it due.
        """
        now_s = self._clock()
        settled_s = self._asked_s + SETTLE_S
        if now_s < settled_s:
            if content == self._content and now_s - self._renewed_s < MAX_AGE_S:
                self._asked_s = now_s
                return False
            self._sleep(settled_s - now_s)
        self._asked_s = self._renewed_s = self._clock()
        self._content = content
        return True
