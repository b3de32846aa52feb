"""A thread for the waits that closing a session takes: a device may take long, or for ever, and the owner's loop must go on."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class WaitingThread:
    """Runs what it is given one after the other; the thread lives for as long as there is something to run.

    One for each transport, so that sessions closed while a device hangs add no threads; they would wait for the same device. A
    daemon: what never ends does not keep the process.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waits: deque[Callable[[], None]] = deque()
        self._is_running = False

    def submit(self, wait: Callable[[], None]) -> None:
        """Run `wait` behind what was submitted before. What it raises is logged."""
        with self._changed:
            self._waits.append(wait)
            if not self._is_running:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._is_running = True

    def join(self, timeout_s: float) -> bool:
        """Whether everything has ended, after up to `timeout_s` seconds."""
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
            del wait  # and what it holds
