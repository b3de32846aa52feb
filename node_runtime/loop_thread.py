"""Run an asyncio loop on a thread of its own, in a process whose main thread belongs to an engine.

An engine calls from its own threads. Neither waits for the other: calls are queued in order, and results are kept until the
engine asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import structlog

from transfer.errors import LocalProtocolError
from transfer.loop_turns import MeasuredLoop

THREAD: Final = "kvferry"
"""Name of the loop's thread in the operating system (`top -H`), and of the threads that it starts."""

CLOSE_TIMEOUT_S = 5.0
SWITCH_INTERVAL_S = 0.0005
"""An engine's scheduler runs Python code for milliseconds at a time, and a transfer takes a dozen turns of the loop. With the
default of 5 ms for each turn, most of that time would be waiting. The loop interrupts the engine only if it has work."""

_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class LoopThread:
    """The one loop of a process, between `shared()` and `release()`.

    gRPC's asyncio objects of a process are best kept on one loop. An engine may have its scheduler and a rank in the same
    process. An unexpected exception does not end the process, which belongs to the engine. It is logged, and `check()` raises it
    from then on, so that the engine ends at its next call.
    """

    _shared: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._num_users = 0
        self._broken: BaseException | None = None
        self.loop = MeasuredLoop()
        self.loop.set_exception_handler(self._on_exception)
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> LoopThread:
        """Return the loop of this process; the first call starts it.

        Raises:
            LocalProtocolError: This process was forked from one with a loop. Threads do not survive a fork.
        """
        before = cls._shared
        if before is not None and not before.is_own:  # read without the lock, which may be held forever here
            raise LocalProtocolError(
                f"process {os.getpid()} was forked from {before._pid} while a kvferry ran there; start the engine's processes "
                "before the first kvferry, or by spawn"
            )
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._num_users += 1
            return cls._shared

    def release(self) -> None:
        """Record that the caller does not need the loop any more; the last caller ends it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            LoopThread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Queue a call of a function on the loop, after earlier calls. Any thread may do this; it does not wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, perhaps at this moment
            self.loop.call_soon_threadsafe(function, *args)

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Have the loop run a coroutine. Raise LocalProtocolError if the loop has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            work.close()
            raise LocalProtocolError("kvferry is closed in this process") from error

    @property
    def is_own(self) -> bool:
        """Whether the loop belongs to this process, which may be a fork."""
        return self._pid == os.getpid()

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def check(self) -> None:
        """Raise LocalProtocolError if there was an unexpected error."""
        if self._broken is not None:
            raise LocalProtocolError(f"kvferry cannot continue in this process: {self._broken!r}") from self._broken

    def crash(self, error: BaseException) -> None:
        """Record an unexpected error, which `check()` raises from now on."""
        log.critical("kvferry_failed", error=str(error), exc_info=error)
        if self._broken is None:
            self._broken = error

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # gRPC handles the events of all loops of a process in any of them. So it raises here for an event of a loop that the
        # engine has closed. This loop runs, so such an error never concerns it.
        if error is None or (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            loop.default_exception_handler(context)
        else:
            self.crash(error)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/thread-self/comm").write_text(THREAD, encoding="ascii")  # Python does this from 3.14 on
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._end())
            self.loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
