"""A plain copy into another process's GPU memory, mapped with CUDA IPC: what the link between two GPUs can do at most."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bench.link_plan import Samples, Step
from bench.pair import bytes_on, synchronize
from transfer.transport.cuda_ipc_blob import HANDLE_BYTES


class MappedMemory:
    """Memory of another process, mapped for the current device.

    Args:
        blob: From `export` in the other process.
    """

    def __init__(self, blob: tuple[bytes, int]) -> None:
        self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        handle = self._runtime.cudaIpcMemHandle_t()
        handle_bytes, offset = blob
        # By address: the field with the bytes has no name in every cuda-bindings (none in 13.5).
        ctypes.memmove(handle.getPtr(), handle_bytes, HANDLE_BYTES)
        torch.cuda.current_stream().synchronize()  # a context on this device, the one that the mapping is for
        self._base = _checked(
            self._runtime.cudaIpcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle"
        )
        self.address = int(self._base) + offset

    def copy_from(self, source: Tensor) -> None:
        """Copy all of `source` there; returns when it is done."""
        queue_copy(self.address, source)
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        _checked(self._runtime.cudaIpcCloseMemHandle(self._base), "cudaIpcCloseMemHandle")


def queue_copy(address: int, source: Tensor) -> None:
    """Copy all of `source` to an address that this device may write, on the current stream."""
    runtime: Any = importlib.import_module("cuda.bindings.runtime")
    kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, torch.cuda.current_stream().cuda_stream
    _checked(runtime.cudaMemcpyAsync(address, source.data_ptr(), source.numel(), kind, stream), "cudaMemcpyAsync")


def export(memory: Tensor) -> tuple[bytes, int]:
    """Handle of the allocation that `memory` lies in, and its place there."""
    runtime: Any = importlib.import_module("cuda.bindings.runtime")
    driver: Any = importlib.import_module("cuda.bindings.driver")
    error, base, _ = driver.cuMemGetAddressRange(memory.data_ptr())
    if int(error):
        raise RuntimeError(f"cuMemGetAddressRange failed: {error}")
    handle = _checked(runtime.cudaIpcGetMemHandle(int(base)), "cudaIpcGetMemHandle")
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES), memory.data_ptr() - int(base)


def _checked(answer: tuple[Any, ...], name: str) -> Any:
    error, *value = answer
    if int(error):
        raise RuntimeError(f"{name} failed: {error}")
    return value[0] if value else None


def write(pipe: Connection, device: str, plan: Sequence[Step]) -> dict[str, Samples]:
    """The writer: seconds of each copy, by step, until its device is done."""
    memory = bytes_on(device, max(step.num_bytes for step in plan))
    target = MappedMemory(pipe.recv())
    synchronize(device)
    copies = {step: memory[: step.num_bytes] for step in plan}
    found = {step.name: step.sample(partial(target.copy_from, source)) for step, source in copies.items()}
    target.close()
    pipe.send("done")
    return found


def serve(pipe: Connection, device: str, plan: Sequence[Step]) -> None:
    memory = bytes_on(device, max(step.num_bytes for step in plan))
    synchronize(device)
    pipe.send(export(memory))
    pipe.recv()
