"""Copies and a transport that take time and move nothing: what is left is what the hosts do.

A piece's gather lasts as long as its bytes would on a link, its scatter a fifth of that, one after another, as on a stream.
Threads wait for them and call back as those of a GPU's copy queue do. Attach, grants, messages and watermarks are real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from bench.engine_step import PretendedStep
from transfer.copy.piece_copier import OnGathered, OnScattered, PieceCopy
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.transport.base import ByteRange, DirectMemory, LocalMemory
from transfer.transport.registered_memory import memory_of
from transfer.worker_thread import WorkerThread

SCATTER_SPEED = 5
"""Of the link's: a GPU's own memory against NVLink."""

_DIGEST = 1


class PretendedLane:
    """A `CopyQueue` whose copies last `num_bytes / bytes_per_s`."""

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None], *, bytes_per_s: float
    ) -> None:
        self._name, self._loop, self._on_crash, self._bytes_per_s = name, loop, on_crash, bytes_per_s
        self._waiters: dict[int, WorkerThread] = {}
        self._free_s = 0.0  # when the last copy that was begun will be done

    def gather(
        self,
        piece: PieceCopy,
        out: Tensor | DirectMemory,
        *,
        algorithm: str,
        peer: int,
        after: DeviceEvent | None,
        on_done: OnGathered,
    ) -> None:
        computed_s = after.fires_s if isinstance(after, PretendedStep) else 0.0
        copy_s = piece.num_wire_bytes / self._bytes_per_s
        self._begin(copy_s, peer, lambda seconds: on_done(_DIGEST, seconds), not_before_s=computed_s)

    def expect(self, piece: PieceCopy, *, peer: int) -> None:
        return

    def scatter(self, piece: PieceCopy, source: Tensor, *, algorithm: str, digest: int, peer: int, on_done: OnScattered) -> None:
        copy_s = piece.num_wire_bytes / self._bytes_per_s / SCATTER_SPEED
        self._begin(copy_s, peer, lambda seconds: on_done(digest == _DIGEST, seconds))

    def forget(self, peer: int) -> None:
        if (waiter := self._waiters.pop(peer, None)) is not None:
            waiter.finish()

    def close(self, timeout_s: float) -> bool:
        waiters = list(self._waiters.values())
        return all([waiter.close(timeout_s) for waiter in waiters])

    def _begin(self, copy_s: float, peer: int, on_done: Callable[[float], None], *, not_before_s: float = 0.0) -> None:
        waiter = self._waiters.get(peer)
        if waiter is None:
            waiter = self._waiters[peer] = WorkerThread(f"{self._name}-{peer}", self._loop, self._on_crash)
        end_s = self._free_s = max(time.monotonic(), self._free_s, not_before_s) + copy_s

        def work() -> float:
            time.sleep(max(0.0, end_s - time.monotonic()))
            return copy_s

        waiter.submit(work, on_done)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handle:
    """A write or a decline; it is done at once."""

    num_bytes: int = 0

    def poll(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """A peer's ring that nobody stores into."""

    num_bytes: int
    device_index: int = 0

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return self.num_bytes


class PretendedSession:
    """A direct session of which every write is done at once."""

    lane = "pretended"
    obstacle = ""

    def __init__(self) -> None:
        self.is_over = False

    def write(self, source: LocalMemory, source_range: ByteRange, target_range: ByteRange, key: int) -> _Handle:
        return _Handle()

    def decline(self, key: int) -> _Handle:
        return _Handle()

    def expect(self, target: LocalMemory, target_range: ByteRange, key: int) -> NoReturn:
        raise LocalProtocolError(f"expect of key {key}: the pretended transport is one-sided and expects nothing")

    def direct(self, target_range: ByteRange) -> _Ring:
        return _Ring(num_bytes=target_range.num_bytes)

    def fileno(self) -> None:
        return None

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        self.is_over = True


class _Offer:
    blob = b"pretended"

    def complete(self, answer: bytes) -> PretendedSession:
        return PretendedSession()

    def close(self) -> None:
        return


class PretendedTransport:
    """Joins any two processes, and moves nothing between them."""

    name = "pretended"
    is_one_sided = True

    def register(self, buffer: Any) -> LocalMemory:
        return memory_of(buffer)

    def deregister(self, memory: LocalMemory) -> None:
        return

    def offer(self) -> _Offer:
        return _Offer()

    def accept(self, blob: bytes, memory: LocalMemory) -> tuple[PretendedSession, bytes]:
        return PretendedSession(), b"pretended"

    def close(self) -> None:
        return
