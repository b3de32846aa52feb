"""The rank processes of a node: started together, watched, and ended together.

A tensor-parallel group is of no use without one of its ranks, so the first exit ends the group's life. Ranks are forked from
`node_runtime.fork_server`. The first start waits for its imports, in a thread: the leader answers meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from node_runtime.fork_server import start_fork_server


class RankGroup:
    """One life of a node's ranks.

    Args:
        name: For process titles.
        target: Entry point of a rank process; importable by name.
        arguments: Arguments of each rank's entry point, in rank order.
        preload: Modules that the fork server imports before the first rank. Without effect where it runs already.
    """

    def __init__(
        self, name: str, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, preload: Sequence[str] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._preload = tuple(preload)
        self._starting: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._watched: set[int] = set()
        self._processes: list[BaseProcess] = [
            context.Process(target=target, args=args, name=f"{name}-{rank}", daemon=True) for rank, args in enumerate(arguments)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    async def start(self, on_exit: Callable[[int, int], None]) -> None:
        """Start all ranks; `on_exit(rank, exit code)` is called on this loop for each that ends, until `stop()`.

        Cancelled, or not waited for, it may leave ranks, which `stop()` ends.
        """
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start_all))
        await asyncio.shield(self._starting)
        if self._is_stopping:
            return
        # Not before: a process that starts looks after those before it as well, and only one may read how a process ended.
        for rank, process in enumerate(self._processes):
            self._watched.add(process.sentinel)
            asyncio.get_running_loop().add_reader(process.sentinel, self._exited, rank, on_exit)

    def _start_all(self) -> None:
        start_fork_server(self._preload)
        for process in self._processes:
            if self._is_stopping:
                return
            process.start()

    def _exited(self, rank: int, on_exit: Callable[[int, int], None]) -> None:
        process = self._processes[rank]
        self._unwatch(process)
        process.join(timeout=0)
        on_exit(rank, process.exitcode if process.exitcode is not None else -1)

    def _unwatch(self, process: BaseProcess) -> None:
        if process.sentinel in self._watched:
            self._watched.discard(process.sentinel)
            asyncio.get_running_loop().remove_reader(process.sentinel)

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the ranks to end by themselves, then kill them. Afterwards none is left.

        A start that is under way comes first to its end: a rank that is being forked has no number yet by which to kill it.
        """
        self._is_stopping = True
        if self._starting is not None:
            await asyncio.gather(asyncio.shield(self._starting), return_exceptions=True)  # what it raised is start()'s to raise
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            self._unwatch(process)
        deadline = asyncio.get_running_loop().time() + grace_s
        while any(process.is_alive() for process in started) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for process in started:
            if process.is_alive() and process.pid is not None:
                # SIGKILL also ends a stopped process, and one that is stuck in a collective.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in started:
            while process.is_alive():
                await asyncio.sleep(0.005)
            process.join(timeout=0)


def watch_leader(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
    """In a rank process: call `on_death` on `loop` when the leader's process has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        loop.add_reader(parent.sentinel, on_death)
