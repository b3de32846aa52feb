"""Measure each turn of an asyncio loop, and log long turns with their cause.

A turn is the time between two calls of the loop's selector. Nothing else runs on the loop meanwhile. No heartbeat is sent or
noticed, and no session makes progress. Processes whose loop carries sessions run it as a `MeasuredLoop`.

Handlers record each event with `LoopTurns.took`, and coroutines with `TimedSteps`. The longest event of a turn is its cause.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Protocol, TypeVar

import structlog

from transfer.metrics.specs import TURN_BUCKETS_S

LONG_TURN_S: Final = 0.25
"""Half a heartbeat interval. Six such turns in a row end every session of the process."""

SAID_AGAIN_S: Final = 10.0
"""Shortest time between two warnings with the same cause."""

_CPU_LOOK_S: Final = 0.01
"""Shortest time between two reads of the thread's CPU clock. A read is a system call, and costs more than all other work here."""

_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class LoopTurns:
    """Count the turns of one loop. Owned by the loop's thread.

    Attributes:
        counts: Turns in each bucket of `TURN_BUCKETS_S`, then longer turns.
        total_s: Seconds of all counted turns.

    Args:
        clock: Monotonic seconds.
        cpu_clock: CPU seconds of the calling thread.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.counts = [0] * (len(TURN_BUCKETS_S) + 1)
        self.total_s = 0.0
        self._is_counting = False
        self._begun_s = clock()
        self._cpu_looked_s = self._begun_s - _CPU_LOOK_S
        self._cpu_s = 0.0  # CPU time of the thread at that read
        self._longest: object = None  # event of the present turn
        self._longest_s = 0.0
        self._num_events = 0
        self._said_s: dict[str, float] = {}  # by cause

    def start_counting(self) -> None:
        """Start to count turns. Turns before a process serves are long and harmless."""
        if not self._is_counting:
            self._begun_s = self._clock()
            self._is_counting = True

    def begin(self) -> None:
        """Begin a turn: the selector has returned."""
        now_s = self._begun_s = self._clock()
        if now_s - self._cpu_looked_s >= _CPU_LOOK_S:
            self._cpu_looked_s, self._cpu_s = now_s, self._cpu_clock()

    def end(self) -> None:
        """End a turn: the selector is about to be called."""
        if self._is_counting:
            turn_s = self._clock() - self._begun_s
            self.counts[bisect_left(TURN_BUCKETS_S, turn_s)] += 1
            self.total_s += turn_s
            if turn_s > LONG_TURN_S:
                self._warn(turn_s)
        if self._longest is not None:
            self._longest, self._longest_s, self._num_events = None, 0.0, 0

    @property
    def longest_event(self) -> str:
        """Name of the event that has taken the longest part of the present turn so far."""
        return _name_of(self._longest)

    def took(self, event: object, begun_s: float) -> None:
        """Record that handling `event` took the time since `begun_s` of the present turn."""
        event_s = self._clock() - begun_s
        self._num_events += 1
        if event_s >= self._longest_s:
            self._longest, self._longest_s = event, event_s

    def _warn(self, turn_s: float) -> None:
        now_s, name = self._clock(), self.longest_event
        if now_s - self._said_s.get(name, -SAID_AGAIN_S) < SAID_AGAIN_S:
            return
        self._said_s[name] = now_s
        cpu_s = min(turn_s, self._cpu_clock() - self._cpu_s)  # includes at most `_CPU_LOOK_S` of earlier turns
        log.warning(
            "loop_turn_long",
            seconds=round(turn_s, 3),
            cpu_seconds=round(cpu_s, 3),
            longest_event=name,
            longest_event_seconds=round(self._longest_s, 3),
            events=self._num_events,
        )


class Poller(Protocol):
    """Waits in place of a loop, and polls memory meanwhile: a thread that sleeps wakes up late, with cold caches."""

    def wait(self, fd: int, timeout_s: float | None) -> bool:
        """Wait until a file descriptor is readable, something was found, or the time is over; it can return earlier.

        Return False at once if nothing is near.
        """
        ...

    def handle(self) -> None:
        """Handle what `wait` has found, if anything."""
        ...


class MeasuredLoop(asyncio.SelectorEventLoop):
    """A loop whose turns are measured.

    Args:
        turns: Counts the turns; None creates a new `LoopTurns`.

    Attributes:
        pollers: The first one that waits does so instead of the selector.
    """

    def __init__(self, turns: LoopTurns | None = None) -> None:
        self.turns = LoopTurns() if turns is None else turns
        self.pollers: list[Poller] = []
        super().__init__(_MeasuredSelector(self))


class _MeasuredSelector(selectors.EpollSelector):
    """Report the begin and end of turns: the time of a loop between calls of `select`."""

    def __init__(self, loop: MeasuredLoop) -> None:
        super().__init__()
        self._loop = loop
        self._turns = loop.turns
        self._pollers = loop.pollers

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns.end()
        for poller in self._pollers if timeout != 0 else ():
            if poller.wait(self.fileno(), timeout):
                self._turns.begin()
                self._handle(poller)
                return super().select(0)
        ready = super().select(timeout)
        self._turns.begin()
        return ready

    def _handle(self, poller: Poller) -> None:
        try:
            poller.handle()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # as in a callback of the loop
            self._loop.call_exception_handler({"message": f"exception in {poller.handle}", "exception": error})


def turns_of(loop: asyncio.AbstractEventLoop) -> LoopTurns:
    """Return the counter of the loop's turns; for a loop that is not measured, a counter that does not count."""
    return loop.turns if isinstance(loop, MeasuredLoop) else LoopTurns()


def run_measured(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` as `asyncio.run` does, on a `MeasuredLoop`."""
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        return runner.run(main)


class TimedSteps(Generator[Any, Any, _T]):
    """Await a coroutine, and record each of its steps under a name. A step is the part of it that runs within one turn."""

    def __init__(self, name: str, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._name = name
        self._coroutine = coroutine
        self._turns = turns_of(asyncio.get_running_loop())

    def __await__(self) -> Generator[Any, Any, _T]:
        return self

    def send(self, value: Any) -> Any:
        begun_s = time.monotonic()
        try:
            return self._coroutine.send(value)
        finally:
            self._turns.took(self._name, begun_s)

    def throw(self, *error: Any) -> Any:
        begun_s = time.monotonic()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._turns.took(self._name, begun_s)


def _name_of(event: object) -> str:
    """Return the class name of an event; for the arrival of a message, the class name of the message."""
    if event is None:
        return "none noted"
    return event if isinstance(event, str) else type(getattr(event, "message", event)).__name__
