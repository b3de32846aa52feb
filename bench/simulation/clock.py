"""Simulated time, and what takes it: lanes that do one thing after another, on a processor of their own or on shared cores."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Protocol

Then = Callable[[], None]


class Clock:
    """Events in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Then]] = []
        self._num = 0

    def at(self, time_s: float, then: Then) -> None:
        self._num += 1
        heapq.heappush(self._events, (time_s, self._num, then))

    def after(self, seconds: float, then: Then) -> None:
        self._num += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._num, then))

    def run(self) -> None:
        """Until nothing is left to happen."""
        events = self._events
        while events:
            self.now_s, _, then = heapq.heappop(events)
            self.num_events += 1
            then()


class Cpu(Protocol):
    """What computing takes its time from."""

    @property
    def is_shared(self) -> bool:
        """Whether other work makes it slower, so that nothing can be said of an end beforehand."""
        ...

    def run(self, work_s: float, then: Then) -> None:
        """Call `then` when `work_s` seconds of a whole processor are done."""
        ...


class OwnCpu:
    """As many processors as are asked for: work takes as long as it is."""

    is_shared = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, work_s: float, then: Then) -> None:
        self._clock.after(work_s, then)


class SharedCpu:
    """Cores that all running work shares in equal parts, none above one core (processor sharing, as a fair scheduler does).

    Each piece of work makes the same progress, so one virtual time, which runs at the rate of each, says when which is done.

    Args:
        cores: May be a fraction, where something else takes the rest.
    """

    is_shared = True

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock = clock
        self._cores = cores
        self._virtual_s = 0.0
        self._looked_s = 0.0
        self._running: list[tuple[float, int, Then]] = []
        self._num = 0
        self._version = 0
        self.busy_core_s = 0.0

    def run(self, work_s: float, then: Then) -> None:
        self._advance()
        self._num += 1
        heapq.heappush(self._running, (self._virtual_s + work_s, self._num, then))
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._running)) if self._running else 0.0

    def _advance(self) -> None:
        passed_s = (self._clock.now_s - self._looked_s) * self._rate()
        self._virtual_s += passed_s
        self.busy_core_s += passed_s * len(self._running)
        self._looked_s = self._clock.now_s

    def _plan(self) -> None:
        self._version += 1
        if self._running:
            version = self._version
            left_s = max(0.0, self._running[0][0] - self._virtual_s)
            self._clock.after(left_s / self._rate(), lambda: self._on_done(version))

    def _on_done(self, version: int) -> None:
        if version != self._version:
            return  # something began or ended meanwhile
        self._advance()
        done_s, _, then = heapq.heappop(self._running)
        self._virtual_s = max(self._virtual_s, done_s)
        self._plan()
        then()


class Lane:
    """Does one thing after another, in the order in which they come."""

    def __init__(self, cpu: Cpu) -> None:
        self._cpu = cpu
        self._waiting: deque[tuple[float, Then]] = deque()
        self._is_busy = False
        self.work_s = 0.0

    def submit(self, work_s: float, then: Then) -> None:
        self.work_s += work_s
        if self._is_busy:
            self._waiting.append((work_s, then))
        else:
            self._begin(work_s, then)

    def _begin(self, work_s: float, then: Then) -> None:
        self._is_busy = True

        def done() -> None:
            if self._waiting:
                self._begin(*self._waiting.popleft())
            else:
                self._is_busy = False
            then()

        self._cpu.run(work_s, done)


class Link:
    """Bytes from one node to another: both ends' ports are busy while they pass, and pass one transfer after another.

    Between nodes that share cores a processor copies them, and is what is busy.

    Args:
        bytes_per_s: Of a port.
        latency_s: From the last byte's leaving until it is known to have arrived.
    """

    def __init__(self, clock: Clock, cpu: Cpu, *, bytes_per_s: float, latency_s: float) -> None:
        self._clock = clock
        self._cpu = cpu
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s

    def send(self, source: Port, target: Port, num_bytes: int, then: Then) -> None:
        took_s = num_bytes / self._bytes_per_s
        if self._cpu.is_shared:
            source.busy_s += took_s
            target.busy_s += took_s
            self._cpu.run(took_s + self._latency_s, then)
            return
        begin_s = max(self._clock.now_s, source.free_s, target.free_s)
        source.free_s = target.free_s = begin_s + took_s
        source.busy_s += took_s
        target.busy_s += took_s
        self._clock.at(begin_s + took_s + self._latency_s, then)


class Port:
    """One node's end of its links."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0
