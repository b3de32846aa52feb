"""Where a rank's gathers and scatters run: beside the owner's loop, with the digest made on the way.

One queue per direction. On the host it is a thread that copies; on a GPU the kernels are queued by the owner itself, on a stream
per peer, and a thread only waits for their events. Either way the owner's loop never waits, and hears of the end by a callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from transfer.copy.piece_copier import OnGathered, OnScattered, PieceCopy
from transfer.engine_types import DeviceEvent
from transfer.transport.base import DirectMemory


class CopyQueue(Protocol):
    """Owned by one loop: every method is called on it, and every callback."""

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
        """Fill `out` with the piece's wire bytes, once `after` has fired.

        Args:
            out: uint8 [bytes] of staging memory, or a peer's ring.
            algorithm: Of the digest.
            peer: Number of the session; copies of one peer do not wait for another's.
        """
        ...

    def expect(self, piece: PieceCopy, *, peer: int) -> None:
        """A copy of the piece is going to be asked for: bring ahead of it what it needs besides the wire's bytes."""
        ...

    def scatter(self, piece: PieceCopy, source: Tensor, *, algorithm: str, digest: int, peer: int, on_done: OnScattered) -> None:
        """Bring wire bytes into the piece's pages. Bytes without the announced digest may have been copied: only into the pages
        of their own request, which is not told to go on until they have come again and agreed."""
        ...

    def forget(self, peer: int) -> None:
        """The session is closed; what is under way still ends."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End after what is under way; False when that did not end in time."""
        ...


OpenCopyQueue = Callable[[str, torch.device, asyncio.AbstractEventLoop, Callable[[BaseException], None]], CopyQueue]
"""As `open_copy_queue`."""


def open_copy_queue(
    name: str, device: torch.device, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]
) -> CopyQueue:
    """The queue for pools on `device`.

    Args:
        name: Of its threads.
        on_crash: Called on the loop with an exception that ends the rank.
    """
    if device.type == "cpu":
        from transfer.copy.host_copy_queue import HostCopyQueue

        return HostCopyQueue(name, loop, on_crash)
    from transfer.copy.device_copy_queue import DeviceCopyQueue

    return DeviceCopyQueue(name, device, loop, on_crash)
