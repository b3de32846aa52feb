"""The rank processes of a node: started, watched and ended together.

A tensor-parallel group cannot run without one of its ranks, so the first exit ends the group's life. Ranks are forked from
`node_runtime.fork_server`. The first start waits for its imports in a thread, while the leader answers calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

from node_runtime.fork_server import leave_shared_fork_server, start_fork_server
from node_runtime.rank_worker import RankSpec


class RankGroup:
    """One life of a node's ranks.

    Args:
        name: Name of the processes, before the rank's number.
        entry: Entry point of a rank process, importable by name.
        specs: Argument of each rank's entry point, in rank order.
        preload: Modules that the fork server imports before the first rank, unless it runs already.
    """

    def __init__(
        self, name: str, entry: Callable[[RankSpec], None], specs: Sequence[RankSpec], *, preload: Sequence[str]
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._preload = preload
        self._starting: asyncio.Future[None] | None = None
        self._is_stopping = False
        self._watched: set[int] = set()
        self._processes: list[BaseProcess] = [
            context.Process(target=_run, args=(_Output(), entry, spec), name=f"{name}-{rank}", daemon=True)
            for rank, spec in enumerate(specs)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    async def start(self, on_exit: Callable[[int, int], None]) -> None:
        """Start all ranks. Until `stop()`, call `on_exit(rank, exit code)` on this loop for each rank that ends.

        If this call is cancelled, ranks may be left, which `stop()` ends.
        """
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start_all))
        await asyncio.shield(self._starting)
        if self._is_stopping:
            return
        # Not earlier: `Process.start` also polls the processes before it, and only one reader may collect an exit code.
        for rank, process in enumerate(self._processes):
            self._watched.add(process.sentinel)
            asyncio.get_running_loop().add_reader(process.sentinel, self._exited, rank, on_exit)

    def _start_all(self) -> None:
        start_fork_server(self._preload)
        for process in self._processes:
            if self._is_stopping:
                return
            try:
                process.start()
            except OSError:  # a shared fork server has ended
                if not leave_shared_fork_server():
                    raise
                start_fork_server(self._preload)
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

        This first waits for a start that is under way: a rank that is being forked has no process id yet.
        """
        self._is_stopping = True
        if self._starting is not None:
            await asyncio.gather(asyncio.shield(self._starting), return_exceptions=True)  # start() raises its error
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            self._unwatch(process)
        deadline = asyncio.get_running_loop().time() + grace_s
        while any(process.is_alive() for process in started) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for process in started:
            if process.is_alive() and process.pid is not None:
                # SIGKILL also ends a process that is stopped, or stuck in a collective.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in started:
            while process.is_alive():
                await asyncio.sleep(0.005)
            process.join(timeout=0)


class _Output:
    """Standard output and standard error of the leader. A rank receives them when it unpickles this object.

    A fork server that several nodes share has other ones.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _use_output, (DupFd(1), DupFd(2))


def _use_output(*ends: Any) -> None:
    for number, end in enumerate(ends, start=1):
        descriptor = end.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(output: None, entry: Callable[[RankSpec], None], spec: RankSpec) -> None:
    entry(spec)


def watch_leader(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
    """Call `on_death` on the loop of a rank process when its leader's process has ended for any reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        loop.add_reader(parent.sentinel, on_death)
