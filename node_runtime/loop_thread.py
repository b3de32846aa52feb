"""An asyncio loop on a thread of its own, for processes whose main thread is an engine's.

An engine calls from its own threads, and neither waits for the loop nor is waited for: calls are queued in order, and what the
loop has to tell is kept until the engine asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import structlog

from transfer.errors import LocalProtocolError
from transfer.loop_turns import MeasuredLoop

CLOSE_TIMEOUT_S = 5.0
SWITCH_INTERVAL_S = 0.0005
"""An engine's scheduler is Python for milliseconds at a time, and a transfer takes the loop a dozen turns: with the interpreter's
own 5 ms for each, waiting would be most of it. It costs the engine a switch where the loop has something to do, else nothing."""

_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class LoopThread:
    """The loop of one process; take it with `shared()`, give it back with `release()`.

    There is one: gRPC's asyncio objects of a process are best kept on one loop, and an engine may have its scheduler and a rank
    in the same process. An exception that nobody expected ends nothing by itself, for the process is the engine's: it is logged,
    and from then on `check()` raises it, so that the engine ends at its next call rather than go on with a kvferry that does not.
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
        self._thread = threading.Thread(target=self._run, name="kvferry", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> LoopThread:
        """The process's own, started where it is the first to be asked for.

        Raises:
            LocalProtocolError: It is another process's, from which this one was forked; threads do not come along.
        """
        before = cls._shared
        if before is not None and not before.is_own:  # looked at without the lock, which may be held for ever here
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
        """The caller is done with it; the last one ends it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            LoopThread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call it, behind what was given to it before; from any thread, at once."""
        with contextlib.suppress(RuntimeError):  # closed, perhaps this moment: nobody is left whom it could tell
            self.loop.call_soon_threadsafe(function, *args)

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Have the loop run it. Raises LocalProtocolError when the loop has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            work.close()
            raise LocalProtocolError("kvferry is closed in this process") from error

    @property
    def is_own(self) -> bool:
        """Whether it is this process's; False in one that was forked from its."""
        return self._pid == os.getpid()

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def check(self) -> None:
        """Raises LocalProtocolError when something broke that nobody expected."""
        if self._broken is not None:
            raise LocalProtocolError(f"kvferry cannot go on in this process: {self._broken!r}") from self._broken

    def crash(self, error: BaseException) -> None:
        """Something broke; `check()` says so from now on."""
        log.critical("kvferry_broke", error=str(error), exc_info=error)
        if self._broken is None:
            self._broken = error

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # gRPC handles the events of all loops of a process in any of them. Where it meets an event of a loop that the engine has
        # closed, it raises here. This loop runs, so such an error never concerns it.
        if error is None or (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            loop.default_exception_handler(context)
        else:
            self.crash(error)

    def _run(self) -> None:
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
