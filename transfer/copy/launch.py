"""Launch a Triton kernel at little cost to the host, and upload small tables.

``kernel[grid](...)`` looks at every argument of every call to find the compiled variant: some 30 us for twenty arguments. A
`Launcher` does that once and keeps the compiled kernel, whose call takes a few microseconds. So its arguments are plain integers
(addresses too) of a fixed type without specialisation. Everything that the kernel may assume of them is in its constants.
"""

from __future__ import annotations

import logging
import threading
from functools import cache, cached_property
from typing import Any, Final

import torch
import triton
from torch import Tensor

from transfer.copy.copier import KernelLaunch
from transfer.errors import TransferError
from transfer.transport.cuda_ipc_driver import process_cuda

log = logging.getLogger(__name__)

_PARAMETER_BYTES: Final = {"i32": 4, "i64": 8}

IS_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs its kernels on the CPU. Fixed at its import."""


class Stream:
    """A stream for kernels, by its handle."""

    __slots__ = ("device", "handle")

    def __init__(self, device: torch.device, handle: int) -> None:
        self.device = device
        self.handle = handle

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory until the work that this stream, the current one, has queued has run."""
        if self.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(self.device))


_HOST: Final = Stream(torch.device("cpu"), 0)


def current_stream(device: torch.device) -> Stream:
    """Return the calling thread's stream on `device`; the interpreter has only one."""
    if device.type == "cpu":
        return _HOST
    # As Triton finds it itself: torch.cuda.current_stream makes an object of more than we need.
    return Stream(device, triton.runtime.driver.active.get_current_stream(device.index))


class Launcher:
    """One variant of a kernel on one device. Threads may share it.

    Args:
        kernel: A function of ``triton.jit``. All parameters that are not constants have a type and are in ``do_not_specialize``.
            Constants come last.
        constants: Its constants, in their order. The first ones can be parameters without a type, whose value None makes them
            constants of this variant.
        num_warps: Warps of a program.
    """

    def __init__(self, kernel: Any, device: torch.device, constants: dict[str, Any], *, num_warps: int) -> None:
        self._kernel = kernel
        self._device = device
        self._constants = constants
        self._values = tuple(constants.values())
        self._num_warps = num_warps
        self._lock = threading.Lock()
        self._run: Any = None
        self._handles: tuple[Any, ...] = ()
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether a call only queues."""
        return IS_INTERPRETED or self._run is not None

    def compile(self, arguments: tuple[int, ...]) -> None:
        """Compile the variant and load it onto its device, without a launch; idempotent. `arguments` are those of any call."""
        with self._lock:
            if self.is_compiled:
                return
            with torch.cuda.device(self._device):
                compiled = self._kernel.warmup(*arguments, **self._constants, num_warps=self._num_warps, grid=(1, 1, 1))
                run = compiled.run  # loads it
            # No hooks: Triton's profiler would have its own made from Python for each launch.
            self._handles = (compiled.function, compiled.packed_metadata, None, None, None)
            self._compiled = compiled
            self._run = run

    def __call__(self, stream: Stream, grid: tuple[int, int, int], arguments: tuple[int, ...]) -> None:
        """Queue the kernel on a stream of its device."""
        if IS_INTERPRETED:
            self._kernel[grid](*arguments, **self._constants, num_warps=self._num_warps)
            return
        if self._run is None:
            self.compile(arguments)
        if torch.cuda.current_device() == self._device.index:
            self._run(*grid, stream.handle, *self._handles, *arguments, *self._values)
            return
        with torch.cuda.device(self._device):
            self._run(*grid, stream.handle, *self._handles, *arguments, *self._values)

    def launch_of(self, grid: tuple[int, int, int], arguments: tuple[int, ...]) -> KernelLaunch | None:
        """Return the driver's arguments of a launch. None: the kernel is not compiled, or only Triton can launch it."""
        if IS_INTERPRETED or self._run is None or grid[2] != 1 or (parameters := self._parameters) is None:
            return None
        packed = bytearray(parameters[-1][0] + parameters[-1][1])
        for (offset, size), value in zip(parameters, arguments, strict=False):  # those behind the arguments are null
            packed[offset : offset + size] = value.to_bytes(size, "little")
        return self._compiled.function, grid[0], grid[1], 32 * self._num_warps, self._compiled.metadata.shared, bytes(packed)

    @cached_property
    def _parameters(self) -> tuple[tuple[int, int], ...] | None:
        """Offset and size of each parameter of the kernel, which is compiled. None means that only Triton can launch it.

        Behind the arguments, Triton adds pointers to scratch memory, which are null for a kernel that needs none.
        """
        metadata = self._compiled.metadata
        is_plain = metadata.num_ctas == 1 and not any(
            getattr(metadata, name, 0)
            for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        )
        types = [kind for kind in self._compiled.src.signature.values() if kind != "constexpr"]
        sizes = [_PARAMETER_BYTES.get(kind) for kind in types]
        try:
            found = process_cuda().parameters_of(self._compiled.function)
        except TransferError as error:
            log.info("scatters are launched after their gathers: %s", error)
            return None
        is_known = [size for _, size in found] == sizes + [8] * (len(found) - len(sizes))
        return found if is_plain and is_known and found else None


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a table in host memory as one on `device`. The copy has ended when this returns.

    Uses a separate stream: it waits for its copy, and for nothing that has been queued elsewhere.
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
