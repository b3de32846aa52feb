"""Timing on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_CACHE_BYTES = 256 << 20  # more than the last-level cache of any GPU so far


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


def host_seconds(call: Callable[[], object], *, sleep_cycles: int = 0) -> float:
    """Seconds that a call keeps the host; what it queued is waited for afterwards.

    Args:
        sleep_cycles: How long the device sleeps meanwhile: the call finds it at work; with 0 idle.
    """
    torch.cuda.synchronize()
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
    begun_s = time.perf_counter()
    call()
    taken_s = time.perf_counter() - begun_s
    torch.cuda.synchronize()
    return taken_s


def whole_seconds(call: Callable[[], object]) -> float:
    """Seconds from a call on an idle device until all that it queued is done."""
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun_s


def cache_filler() -> Callable[[], object]:
    """What drives everything out of the device's caches, so that small copies are not measured inside them."""
    scratch: Tensor = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    return scratch.zero_
