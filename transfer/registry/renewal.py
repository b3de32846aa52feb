"""When a server renews the TLS context of its handshakes. Pure, except for the wait.

gRPC asks before each handshake for the content of the certificate files. An answer replaces the context of later handshakes, and
frees the previous context when nothing uses it. Both extremes are dangerous:

- A context that is never replaced is shared, and its session tickets are valid. A caller with a ticket is not asked for a
  certificate again, and its certificate can have expired since.
- gRPC 1.85 asks under a lock, and takes a reference to the context after it has let the lock go
  (`grpc_ssl_server_security_connector::add_handshakers`). Replaced in between by the next handshake, on another thread, the
  context is freed and then used: hundreds of connections at once, which need no certificate to be opened, ended the process
  (SIGSEGV or SIGABRT in four runs of six on two cores).

So a context is replaced only when no handshake has asked for `SETTLE_S`. Every handshake that asked before has its reference by
then, and none can ask meanwhile, because the lock is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SETTLE_S: Final = 0.25
"""Time after which a handshake that asked has its reference, which its thread takes in its next step."""

MAX_AGE_S: Final = 10.0
"""Longest time that handshakes without a pause share a context, and that a ticket is valid."""


class Renewal:
    """Decide whether a handshake needs a new context. One call at a time, because gRPC holds a lock.

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
        """Return whether to replace the context before this handshake, which waits for the answer; wait until that is safe.

        Args:
            content: Content of the certificate files; a change makes a renewal due.
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
