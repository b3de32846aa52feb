"""Measure beside a test for how long this machine did not run processes that could run. Time limits are extended by that."""

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
"""If a tick of the meter is this late, the meter did not run in between, and other processes probably did not either."""


class StallMeter:
    """A thread that checks every `TICK_S` whether it ran itself, and for how long other processes waited for a core.

    The kernel counts the waiting of every thread: the second number of /proc/PID/schedstat, in nanoseconds. Of each node, the
    process counts whose main thread waited longest, because the owner's loop detects and reports faults there. Use as a context
    manager.

    Args:
        nodes: Returns the present process ids of each node.
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
        """Return the seconds of [begin_s, end_s), in monotonic time, in which the machine stalled; 0 on a quiet one."""
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
    """Return the seconds for which a process's main thread has waited for a core; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
