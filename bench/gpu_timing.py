"""Timing on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def device_seconds(call: Callable[[], object], *, sleep_cycles: int) -> float:
    """Seconds between two events on the device around a call.

    Args:
        sleep_cycles: How long the device sleeps first: with longer than the host needs to queue the call, it is the device's time
            alone; with 0 the host's is in it.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3)
