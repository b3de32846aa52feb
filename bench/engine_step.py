"""A step of an engine on a GPU, as the sender sees it: an event that fires when the KV is computed.

An engine on a GPU queues the kernels of a step, and reports the chunk as computed behind an event. Gathers are queued while the
device still runs the step (`embedded_engine.engine` does so, layer by layer).
"""

from __future__ import annotations

import time
from typing import Any

import torch

STEP_S = 0.01
"""Time by which the host is ahead of the device. A step of a thousand tokens of a large model takes longer."""

_LEAD_S = 0.0005  # before the step, so that the host sees its start

_CYCLES_PER_S = 1.98e9  # of an H200; only the length of the step depends on it, and the length is measured


class DeviceStep:
    """A kernel that keeps one multiprocessor of the current device busy for about `STEP_S`.

    Args:
        stream: The engine's stream, on which the step is queued.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        make_event: Any = torch.cuda.Event
        begin, self.event = make_event(enable_timing=True), make_event(enable_timing=True)
        self._begin = begin
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(_LEAD_S * _CYCLES_PER_S))
            begin.record()
            torch.cuda._sleep(int(STEP_S * _CYCLES_PER_S))
            self.event.record()
        self._begun_s = looked_s = time.monotonic()
        while not begin.query():
            self._begun_s, looked_s = looked_s, time.monotonic()

    def computed_s(self) -> float:
        """Return the end of the step on the host's monotonic clock, after waiting for it.

        It is counted from the last look at the device before the step began, so it is some microseconds early, never late. It is
        not counted from the time of queuing: after a pause, the device begins up to 0.2 ms later.
        """
        self.event.synchronize()
        elapsed_ms: float = self._begin.elapsed_time(self.event)
        return self._begun_s + elapsed_ms / 1e3
