"""A thread that does one piece of work after another beside the owner, and reports on the owner's loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


class WorkerThread:
    """Work in the order of its submission, on one thread.

    Used for the engine's steps and for copies: both spend their time in torch, which releases the interpreter lock, so the
    owner's loop continues beside them. `on_crash` is called on the loop with an unexpected exception of the work; the rank cannot
    continue then.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_crash = on_crash
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _T], on_done: Callable[[_T], None]) -> None:
        """Run `work()` on the thread, then `on_done(result)` on the loop."""
        self._work.put((work, on_done))

    async def call(self, work: Callable[[], _T]) -> _T:
        """Run `work()` on the thread, wait for it, and raise its exception here."""
        future: asyncio.Future[_T] = self._loop.create_future()

        def guarded() -> tuple[_T | None, Exception | None]:
            try:
                return work(), None
            except Exception as error:
                return None, error

        def done(outcome: tuple[_T | None, Exception | None]) -> None:
            result, error = outcome
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(_T, result))

        self.submit(guarded, done)
        return await future

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Call back on the owner's loop, from inside a piece of work."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def finish(self) -> None:
        """End after the queued work, without waiting."""
        self._work.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether its thread has not ended yet."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> bool:
        """End after the queued work. Return False if it did not end in time."""
        self.finish()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do the next work. Return False if there is none any more.

        A function, so that the thread keeps nothing of a work while it waits: the memory of a copy can be a mapping of a peer's
        ring, which ends with its last reference (`transfer.transport.shm`).
        """
        item = self._work.get()
        if item is None:
            return False
        work, on_done = item
        try:
            result = work()
        except Exception as error:
            self.post(self._on_crash, error)
        else:
            self.post(on_done, result)
        return True
