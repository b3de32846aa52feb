"""Run overlapping decode steps of a rank: each step is queued while the previous one runs on the device.

The engine's thread queues a step, and another thread reads its tokens. So the engine's thread does not wait for the device.
Outcomes are reported in the order of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from node_runtime.rank_messages import StepDone, StepFailed
from transfer.engine_types import DecodeItem
from transfer.errors import EngineError
from transfer.out_of_memory import allocating
from transfer.pool.page_allocator import with_tuples
from transfer.worker_thread import WorkerThread

Read = Callable[[], Mapping[str, int]]
"""Waits for a step, and returns request -> token."""


class StepsAhead:
    """See the module's docstring.

    Args:
        engine: A `DecodeEngine` with `begin_decode`.
        engine_thread: Queues the steps.
        reader: Reads their tokens.
        advice: See `transfer.out_of_memory.allocating`.
    """

    def __init__(self, engine: Any, *, engine_thread: WorkerThread, reader: WorkerThread, advice: str) -> None:
        self._engine = engine
        self._engine_thread = engine_thread
        self._reader = reader
        self._advice = advice
        self._has_failed = False  # whether the last step could not be queued; used on the engine's thread only
        self._last_over_s = 0.0  # end of the last step that was read; used on the reader's thread only

    def submit(
        self,
        items: Sequence[DecodeItem],
        doing: str,
        run: Callable[[Read, float], StepDone | StepFailed],
        on_over: Callable[[StepDone | StepFailed], None],
    ) -> None:
        """Queue a step, and report its outcome on the owner's loop.

        Args:
            doing: See `transfer.out_of_memory.allocating`.
            run: Makes the outcome from a function that waits for the step, and from the time when it began.
        """

        def read(launched: tuple[Read, float]) -> StepDone | StepFailed:
            wait, begun_s = launched
            outcome = run(wait, max(begun_s, self._last_over_s))
            self._last_over_s = time.monotonic()
            return outcome

        self._engine_thread.submit(
            lambda: self._begin(items, doing), lambda launched: self._reader.submit(lambda: read(launched), on_over)
        )

    def _begin(self, items: Sequence[DecodeItem], doing: str) -> tuple[Read, float]:
        """Queue a step. Return the function that waits for it, and the time when it began."""
        begun_s = time.monotonic()
        # If the previous step could not be queued, its requests have failed, and this step has no tokens for them.
        sound = [with_tuples(item) for item in items if not (self._has_failed and item.is_unread)]
        self._has_failed = False
        if not sound:
            return dict, begun_s
        try:
            with allocating(doing, device=self._engine.pool.device, advice=self._advice):
                return self._engine.begin_decode(sound), begun_s
        except EngineError as error:
            self._has_failed = True
            return _raising(error), begun_s

    async def close(self) -> None:
        """Wait for the steps that were queued. Call it after the engine's thread has done all its work."""
        await self._reader.call(lambda: None)
        self._reader.close(timeout_s=5.0)


def _raising(error: EngineError) -> Read:
    def read() -> NoReturn:
        raise error

    return read
