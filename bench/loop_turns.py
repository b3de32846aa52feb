"""Measure turns for `bench.loop`: their CPU time, and the share of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from transfer.loop_turns import LoopTurns, MeasuredLoop

BOUND_MS: Final = 50.0
"""Longest turn that passes, in milliseconds of CPU time. Heartbeats come every 500 ms, and three missed ones end a session."""

COST_BOUND_US: Final = 1.0
TURN: Final = "longest turn"
COST: Final = "measuring a turn"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a loop: its CPU time without the garbage collector, and its longest event."""

    seconds: float = 0.0
    name: str = ""


@dataclass(slots=True)
class Watch:
    """Record the longest turn of a case, and the longest pause of the garbage collector."""

    worst: Turn = Turn()
    num_turns: int = 0
    longest_gc_s: float = 0.0
    _gc_s: float = 0.0
    _gc_begun_s: float = field(default=0.0)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Count the time of the garbage collector meanwhile."""
        gc.callbacks.append(self._on_gc)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_begun_s = time.thread_time()
        else:
            pause_s = time.thread_time() - self._gc_begun_s
            self._gc_s += pause_s
            self.longest_gc_s = max(self.longest_gc_s, pause_s)

    def turn(self, name: str, work: Callable[[], _T], *, with_gc: bool = False) -> _T:
        """Do what a loop does in one turn; `with_gc` counts the collector, too."""
        begun_s = self.begin()
        done = work()
        self.end(begun_s, name, with_gc=with_gc)
        return done

    def begin(self) -> float:
        """Begin a turn; returns its beginning for `end`."""
        self._gc_s = 0.0
        return time.thread_time()

    def end(self, begun_s: float, name: str, *, with_gc: bool = False) -> None:
        seconds = time.thread_time() - begun_s
        turn = Turn(seconds if with_gc else max(0.0, seconds - self._gc_s), name)
        self.num_turns += 1
        if turn.seconds > self.worst.seconds:
            self.worst = turn

    def run(self, main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run `main` on a loop of its own, each of whose turns counts once `main` has called `start()`."""
        turns = _CpuTurns(self)
        with asyncio.Runner(loop_factory=lambda: MeasuredLoop(turns)) as runner:
            return runner.run(main())

    def start(self) -> None:
        """Count the turns of the running loop from now on."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        loop.turns.start_counting()


class _CpuTurns(LoopTurns):
    """Turns by the thread's CPU clock."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._since_s: float | None = None

    def start_counting(self) -> None:
        self._since_s = self._watch.begin()

    def begin(self) -> None:
        super().begin()
        if self._since_s is not None:
            self.start_counting()

    def end(self) -> None:
        if self._since_s is not None:
            self._watch.end(self._since_s, self.longest_event)
        super().end()
