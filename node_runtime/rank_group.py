"""The rank processes of a node: started together, watched, and ended together.

A tensor-parallel group is of no use without one of its ranks, so the first exit ends the group's life. Ranks are forked from a
server process that has imported torch and transformers once (seconds of work that every rank would repeat) and nothing else: no
threads, no sockets, no CUDA context.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any


class RankGroup:
    """One life of a node's ranks.

    Args:
        name: For process titles.
        target: Entry point of a rank process; importable by name.
        arguments: Arguments of each rank's entry point, in rank order.
        preload: Module that the fork server imports before the first rank.
    """

    def __init__(
        self, name: str, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, preload: Sequence[str] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: set[int] = set()
        self._processes: list[BaseProcess] = [
            context.Process(target=target, args=args, name=f"{name}-{rank}", daemon=True) for rank, args in enumerate(arguments)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def start(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int, int], None]) -> None:
        """Start all ranks; `on_exit(rank, exit code)` is called on `loop` for each that ends, until `stop()`."""
        self._loop = loop
        _start_fork_server()
        for rank, process in enumerate(self._processes):
            process.start()
            self._watched.add(process.sentinel)
            loop.add_reader(process.sentinel, self._exited, rank, on_exit)

    def _exited(self, rank: int, on_exit: Callable[[int, int], None]) -> None:
        process = self._processes[rank]
        self._unwatch(process)
        process.join(timeout=0)
        on_exit(rank, process.exitcode if process.exitcode is not None else -1)

    def _unwatch(self, process: BaseProcess) -> None:
        if self._loop is not None and process.sentinel in self._watched:
            self._watched.discard(process.sentinel)
            self._loop.remove_reader(process.sentinel)

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the ranks to end by themselves, then kill them. Afterwards none is left."""
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


def _start_fork_server() -> None:
    """Start the process that ranks are forked from, with SIGTERM blocked, there and so in every rank.

    A service manager sends SIGTERM to all processes of the node. What it ends must be the leader's drain: without the fork server
    the leader would take all ranks for dead, for it hears of their ends through it. No-op where it runs already.
    """
    multiprocessing.resource_tracker.ensure_running()  # would take the block away, if it had to be started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # one that came meanwhile comes now


def end_fork_server() -> None:
    """End the process that ranks are forked from, and wait for it; by itself it would outlive its leader by a moment.

    A no-op where there is none. The standard library has no public way to do it.
    """
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    stop = getattr(server, "_stop", None)
    if stop is not None:
        stop()


def watch_leader(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
    """In a rank process: call `on_death` on `loop` when the leader's process has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        loop.add_reader(parent.sentinel, on_death)
