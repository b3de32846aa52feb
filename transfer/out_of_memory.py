"""Convert out-of-memory errors of torch, CUDA and Python to `OutOfMemory`. No other module does so.

Importing it does not load torch: a rank's process imports it before it knows its engine.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from transfer.errors import ConfigError, EngineError, OutOfMemory
from transfer.host_memory import host_memory, shown

if TYPE_CHECKING:
    import torch

_WORDS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
"""Texts of RuntimeErrors without a type of their own: from CUDA, NCCL and Triton, cuBLAS, cuDNN, and torch on a CPU."""

_ASKED: Final = re.compile(r"[Tt]ried to allocate ([\d.,]+ (?:[KMGT]iB|bytes))")
"""The requested bytes in torch's messages, for a device and for the host. If a message has none, the number is unknown."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an out-of-memory error, or was raised because of one."""
    return _cause_in(error) is not None


def out_of_memory(
    error: BaseException, doing: str, *, device: torch.device | str, advice: str, num_bytes: int | None = None
) -> OutOfMemory:
    """Return an `OutOfMemory` whose one line tells operators what failed. Measures the free memory now.

    Args:
        doing: The work that found no memory, such as "allocating the KV pool".
        device: Device of that work.
        advice: The settings to change, as an imperative.
        num_bytes: Requested bytes; None reads them from the text of the error.
    """
    cause = _cause_in(error) or error
    found = None if num_bytes is not None else _ASKED.search(str(cause))
    asked = shown(num_bytes) if num_bytes is not None else found[1] if found is not None else "an unknown number of bytes"
    is_of_host = not _is_gpu(device) or isinstance(cause, MemoryError | OSError) or "DefaultCPUAllocator" in str(cause)
    if is_of_host:
        free = _host_shown()
    elif _is_of_torch(cause):
        free = _device_shown(device)
    else:  # CUDA raises the same error for pinned host memory
        free = f"{_device_shown(device)}, {_host_shown()}"
    return OutOfMemory(f"out of memory while {doing}: {asked} asked for, {free}; {advice}")


@contextmanager
def allocating(doing: str, *, device: torch.device | str, advice: str, num_bytes: int | None = None) -> Iterator[None]:
    """Raise `OutOfMemory` in place of any out-of-memory error in the block. The arguments are those of `out_of_memory`.

    Memory that the failed work still held is released to the device.
    """
    failure: OutOfMemory | None = None
    try:
        yield
    except Exception as error:
        # An error that an inner block named keeps its name. A broken engine stays broken.
        if isinstance(error, OutOfMemory) or (isinstance(error, EngineError) and error.is_fatal) or not is_out_of_memory(error):
            raise
        failure = out_of_memory(error, doing, device=device, advice=advice, num_bytes=num_bytes)
        drop_frames(error)
        give_back(device)
    if failure is not None:
        raise failure


def drop_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that `error` ended: they hold the tensors of the failed work."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)


def give_back(device: torch.device | str) -> None:
    """Release the memory that torch caches to the device, so that other libraries can allocate it."""
    if _is_gpu(device):
        import torch

        # torch refuses this call after a capture that could not be ended. The memory then stays with torch.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def num_ooms(device: torch.device) -> int:
    """Return how often this process ran out of the device's memory; 0 for host memory.

    For calls into libraries that catch the error and raise another one, which does not mention it.
    """
    if not _is_gpu(device):
        return 0
    import torch

    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def _cause_in(error: BaseException) -> BaseException | None:
    return next((one for one in _chain(error) if _is_cause(one)), None)


def _is_cause(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return _is_of_torch(error) or any(words in str(error) for words in _WORDS)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _is_of_torch(error: BaseException) -> bool:
    """Return whether `error` is torch's error of a device allocator. False if torch is not loaded."""
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(error, loaded.OutOfMemoryError)


def _is_gpu(device: torch.device | str) -> bool:
    return str(device).startswith("cuda")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return the error and its chain of causes and contexts."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _device_shown(device: torch.device | str) -> str:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
    except RuntimeError as error:
        return f"the free memory of {device} is unknown ({type(error).__name__})"
    return f"{device} has {shown(free)} of {shown(total)} free (this process holds {shown(held)})"


def _host_shown() -> str:
    try:
        total, available = host_memory()
    except ConfigError as error:
        return str(error)
    return f"the host has {shown(available)} of {shown(total)} free"
