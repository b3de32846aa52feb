"""Copies of pools in host memory: one thread, in order, with the digest computed while the bytes are in the cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from torch import Tensor

from transfer.copy.digest import HostDigest
from transfer.copy.piece_copier import OnGathered, OnScattered, PieceCopy, ScatterLaunch
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.transport.base import DirectMemory
from transfer.transport.signals import GatherSignal
from transfer.worker_thread import WorkerThread


class HostCopyQueue:
    """A `CopyQueue`."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]) -> None:
        self._thread = WorkerThread(name, loop, on_crash)

    def gather(
        self,
        piece: PieceCopy,
        out: Tensor | DirectMemory,
        *,
        algorithm: str,
        peer: int,
        after: DeviceEvent | None,
        on_done: OnGathered,
        signal: GatherSignal | None = None,
    ) -> None:
        if not isinstance(out, Tensor):
            raise LocalProtocolError("a gather from host memory into a peer's device memory; its session offers none")

        def work() -> tuple[int, float, float]:
            if after is not None:
                after.synchronize()
            begun_s = time.monotonic()
            found = HostDigest(algorithm)
            piece.gather(out, found)
            return found.value(), begun_s, time.monotonic()

        self._thread.submit(work, lambda result: on_done(*result))

    def expect(self, piece: PieceCopy, *, peer: int) -> None:
        return

    def launch_of(self, piece: PieceCopy, source: Tensor, *, algorithm: str, peer: int) -> ScatterLaunch | None:
        return None

    def scatter(
        self,
        piece: PieceCopy,
        source: Tensor,
        *,
        algorithm: str,
        digest: int,
        peer: int,
        on_done: OnScattered,
    ) -> None:
        def work() -> tuple[bool, float]:
            started = time.monotonic()
            found = HostDigest(algorithm)
            piece.scatter(source, found)
            return found.value() == digest, time.monotonic() - started

        self._thread.submit(work, lambda result: on_done(*result))

    def forget(self, peer: int) -> None:
        return

    def close(self, timeout_s: float) -> bool:
        return self._thread.close(timeout_s)
