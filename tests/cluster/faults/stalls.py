"""For how long this machine ran nobody who should have run, measured beside a test: what a bound in seconds is given on top."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

TICK_S: Final = 0.02
STALL_S: Final = 0.05
"""A tick of the meter that comes this much late was not run in between, and neither, then, was anybody else for sure."""


class StallMeter:
    """A thread that looks every `TICK_S`: was it run itself, and for how long have others stood in the queue for a core?

    The kernel counts the latter for every thread (the second number of /proc/PID/schedstat, nanoseconds in which it could have
    run and was not let). Of each node the one process counts whose owner's loop, its main thread, waited longest: what notices a
    fault, and what says so, runs there. Use as a context manager.

    Args:
        nodes: Name of a node -> ids of its processes, as of now.
    """

    def __init__(self, nodes: Callable[[], Mapping[str, Iterable[int]]]) -> None:
        self._nodes = nodes
        self._stalls: list[tuple[float, float]] = []
        self._times_s: list[float] = []
        self._waited: list[dict[str, dict[int, float]]] = []
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
            self._waited.append({name: {pid: waited_s(pid) for pid in pids} for name, pids in self._nodes().items()})
            self._times_s.append(now_s)
            last_s = time.monotonic()

    def between(self, begin_s: float, end_s: float) -> float:
        """Seconds of [begin_s, end_s), in monotonic time, that the machine took from who had to notice; 0 on a quiet one."""
        own_s = sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in list(self._stalls))
        first = min(bisect_left(self._times_s, begin_s), len(self._waited) - 1)
        last = bisect_right(self._times_s, end_s) - 1
        if last <= first:
            return own_s
        queued_s = 0.0
        for name, before in self._waited[first].items():
            after = self._waited[last].get(name, {})
            queued_s += max((after[pid] - before[pid] for pid in before if pid in after), default=0.0)
        return max(own_s, queued_s)


def waited_s(pid: int) -> float:
    """Seconds that the process's main thread was kept waiting for a core since it began; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
