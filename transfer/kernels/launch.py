"""Launching a Triton kernel at little cost to the host, and bringing small tables to its device.

``kernel[grid](...)`` looks at every argument of every call to find the variant that was compiled for it: some 30 us for twenty
arguments. A `Launcher` does that once and keeps the compiled kernel, whose call is a few microseconds. So its arguments are plain
integers (addresses too) of a fixed type that nothing is specialised for; what the kernel may assume of them is in its constants.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor

IS_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs its kernels on the CPU; fixed when it is imported."""


class Launcher:
    """One variant of a kernel on one device.

    Args:
        kernel: A function of ``triton.jit`` whose parameters that are not constants all have a type and are in
            ``do_not_specialize``; constants come last.
        device: Where it runs.
        constants: Its constants, in their order.
        num_warps: Of a program.
    """

    def __init__(self, kernel: Any, device: torch.device, constants: dict[str, Any], *, num_warps: int) -> None:
        self._kernel = kernel
        self._device = device
        self._constants = constants
        self._values = tuple(constants.values())
        self._num_warps = num_warps
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[int, ...]) -> None:
        """Queue it on the current stream of its device."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self._launch(grid, arguments)
        else:
            self._launch(grid, arguments)

    def _launch(self, grid: tuple[int, int, int], arguments: tuple[int, ...]) -> None:
        if self._compiled is None:
            # None again under the interpreter, which compiles nothing.
            self._compiled = self._kernel[grid](*arguments, **self._constants, num_warps=self._num_warps)
            return
        self._compiled[grid](*arguments, *self._values)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A table in host memory as one on `device`, there when this returns.

    On a stream of its own: it waits for its copy, and for nothing that has been queued elsewhere.
    """
    if device.type == "cpu":
        return values
    stream = _upload_stream(device)
    with torch.cuda.stream(stream):
        found = values.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return found


@cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
