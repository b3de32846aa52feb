"""Queues that run a rank's gathers and scatters beside the owner's loop, and compute the digest during the copy.

One queue per direction. In host memory it is a thread that copies. On a GPU the owner queues the kernels on a stream per peer,
and a thread waits for their events. The owner's loop never waits, and hears of the end by a callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from transfer.copy.piece_copier import OnGathered, OnScattered, PieceCopy, ScatterLaunch
from transfer.engine_types import DeviceEvent
from transfer.transport.base import DirectMemory
from transfer.transport.signals import GatherSignal


class CopyQueue(Protocol):
    """Owned by one loop, which calls every method and runs every callback."""

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
        """Fill `out` with the piece's wire bytes, after `after` has fired.

        Args:
            out: uint8 [bytes] of staging memory, or a peer's ring.
            algorithm: Digest algorithm.
            peer: Number of the session. Copies of one peer do not wait for another's.
            signal: Reports the begin and the end to the target; only on a GPU.
        """
        ...

    def expect(self, piece: PieceCopy, *, peer: int) -> None:
        """A copy of the piece will follow: prepare everything that it needs besides the wire's bytes."""
        ...

    def launch_of(self, piece: PieceCopy, source: Tensor, *, algorithm: str, peer: int) -> ScatterLaunch | None:
        """Prepare the scatter of an expected piece, to be queued without Python. Return None if that is impossible, as in host
        memory."""
        ...

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
        """Copy wire bytes into the piece's pages.

        Bytes without the announced digest may be copied too, but only into the pages of their own request, which does not
        continue until they have come again and agreed.
        """
        ...

    def forget(self, peer: int) -> None:
        """The session is closed. Copies under way still end."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End after the copies under way. Return False if they did not end in time."""
        ...


def open_copy_queue(
    name: str, device: torch.device, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]
) -> CopyQueue:
    """Return the queue for pools on `device`. `name` names its threads; `on_crash` gets exceptions that must end the rank."""
    if device.type == "cpu":
        from transfer.copy.host_copy_queue import HostCopyQueue

        return HostCopyQueue(name, loop, on_crash)
    from transfer.copy.device_copy_queue import DeviceCopyQueue

    return DeviceCopyQueue(name, device, loop, on_crash)
