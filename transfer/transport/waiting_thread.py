"""A thread that waits for devices when sessions are closed. A device can hang, and the owner's loop must continue."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class WaitingThread:
    """Run functions one after the other, on a thread that lives while there are functions to run.

    Each transport has one, so that sessions that are closed while a device hangs add no threads. The thread is a daemon: an
    endless wait does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waits: deque[Callable[[], None]] = deque()
        self._is_running = False

    def submit(self, wait: Callable[[], None]) -> None:
        """Run `wait` after the functions that were submitted before. Its exceptions are logged."""
        with self._changed:
            self._waits.append(wait)
            if not self._is_running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._is_running = True

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds. Return whether everything has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waits:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                wait = self._waits.popleft()
            try:
                wait()
            except Exception:
                _log.exception("thread %s: a wait failed", self._name)
            del wait  # also releases the objects that it holds
