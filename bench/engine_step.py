"""What an engine's step leaves to the sender: an event that fires when the KV is computed, a while after the host said so.

An engine on a GPU queues a step's kernels and says at once that the chunk is computed, behind an event: gathers are queued while
the device is still at the step (`embedded_engine.engine` does so, layer by layer). On CPUs a step is over when it is said to be.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from transfer.engine_types import DeviceEvent

STEP_S = 0.01
"""How far the host is ahead of the device; a step of a thousand tokens of a large model takes longer."""

_CYCLES_PER_S = 1.98e9  # of an H200; only the length of the step depends on it, and that is measured


class EngineStep(Protocol):
    """A step that is under way."""

    @property
    def event(self) -> DeviceEvent: ...

    def computed_s(self) -> float:
        """When the event fired, monotonic clock; to be asked behind it."""
        ...


class DeviceStep:
    """A kernel that keeps one multiprocessor of the current device busy for about `STEP_S`.

    Args:
        stream: The engine's.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        make_event: Any = torch.cuda.Event
        begin, self.event = make_event(enable_timing=True), make_event(enable_timing=True)
        self._begin = begin
        self._queued_s = time.monotonic()
        with torch.cuda.stream(stream):
            begin.record()
            torch.cuda._sleep(int(STEP_S * _CYCLES_PER_S))
            self.event.record()

    def computed_s(self) -> float:
        """Counted from before the step was queued, so early by some microseconds rather than late."""
        self.event.synchronize()
        elapsed_ms: float = self._begin.elapsed_time(self.event)
        return self._queued_s + elapsed_ms / 1e3


class PretendedStep:
    """The same without a device; also its own event."""

    def __init__(self) -> None:
        self.fires_s = time.monotonic() + STEP_S

    @property
    def event(self) -> DeviceEvent:
        return self

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.fires_s - time.monotonic()))

    def computed_s(self) -> float:
        return self.fires_s
