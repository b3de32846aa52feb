"""How long this machine stood still, measured beside a test: what a bound in seconds may be given on top, and no more."""

from __future__ import annotations

import threading
import time
from typing import Final

TICK_S: Final = 0.01
STALL_S: Final = 0.05
"""A tick that comes this much late was not run in between, and neither, then, was whoever had to notice a fault."""


class StallMeter:
    """A thread that wants to run every `TICK_S`, and notes when it was not let. Use as a context manager."""

    def __init__(self) -> None:
        self._stalls: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StallMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - last_s - TICK_S > STALL_S:
                self._stalls.append((last_s + TICK_S, now_s))
            last_s = now_s

    def between(self, begin_s: float, end_s: float) -> float:
        """Seconds of [begin_s, end_s), in monotonic time, in which it was not run."""
        return sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in list(self._stalls))
