"""Staging memory: contiguous bytes that gather fills and the transport sends, or that the transport fills and scatter reads."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from transfer.errors import ConfigError, MemoryPlanError
from transfer.transport.base import REGION_ALIGNMENT_BYTES
from transfer.transport.shared_memory import shared_memory

_PART_BYTES: Final = 32 << 20
"""The least that a thread touches: for less, one is not worth its start."""
_MOST_THREADS: Final = 4


def zeroed_bytes(num_bytes: int, device: torch.device | str = "cpu", *, is_shared: bool = False) -> Tensor:
    """Return zeroed uint8 [num_bytes] on a multiple of `REGION_ALIGNMENT_BYTES`.

    On CPU every page is touched, so that no first transfer pays for page faults. Huge pages are requested, because they cause
    fewer TLB misses when pages are copied in no order. Shared memory has a Linux switch of its own,
    /sys/kernel/mm/transparent_hugepage/shmem_enabled, that is mostly "never". Raise MemoryPlanError if the system lacks the
    address space (CPU).
    """
    if torch.device(device).type != "cpu":
        memory = torch.zeros(num_bytes + REGION_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % REGION_ALIGNMENT_BYTES
        return memory[start : start + num_bytes]
    # Zero, page-aligned, given back with the last tensor that views it.
    try:
        region = shared_memory(num_bytes) if is_shared else mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryPlanError(f"the system refused {num_bytes} bytes of host memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice only: kernels built without transparent huge pages refuse it
            region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    _touch(memory)
    return memory


def _touch(memory: Tensor) -> None:
    """Write to every page. Most of the time goes to page faults, which several cores handle at the same time."""
    num_bytes = memory.numel()
    num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), num_bytes // _PART_BYTES)
    if num_threads < 2:
        memory.zero_()
        return
    part = -(-num_bytes // num_threads)
    part += -part % REGION_ALIGNMENT_BYTES
    with ThreadPoolExecutor(num_threads) as threads:  # not torch's own threads: it keeps them
        for begin in range(0, num_bytes, part):
            threads.submit(ctypes.memset, memory.data_ptr() + begin, 0, min(part, num_bytes - begin))


class StagingBuffer:
    """Registered-once device memory.

    On a GPU it is an allocation of its own by default: a peer that maps it over CUDA IPC maps the whole allocation, and torch
    would put other tensors into the rest of it. The allocation returns to the device with the buffer. If a view of the tensor is
    left, it returns when torch next empties its cache.

    Args:
        num_bytes: Size, at least 1.
        mem_pool: Pool of the caller to allocate from, on a GPU only, for example one whose allocator makes memory that a network
            card or other hosts can map. A peer that maps the buffer over CUDA IPC then also maps what else the pool keeps in the
            same allocation. None means a private pool.
        is_shared: Host memory only: memory that other processes can map (`transfer.transport.shared_memory`). The one-sided
            transports need it. It costs huge pages.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        device: torch.device | str = "cpu",
        is_shared: bool = False,
        mem_pool: torch.cuda.MemPool | None = None,
    ) -> None:
        if num_bytes < 1:
            raise ConfigError(f"staging num_bytes is {num_bytes}; it must be at least 1")
        is_gpu = torch.device(device).type == "cuda"
        if mem_pool is not None and not is_gpu:
            raise ConfigError(f"staging mem_pool is a pool of GPU memory, and device is {device}: leave it out")
        with contextlib.ExitStack() as stack:
            # The other backend, cudaMallocAsync, has no pools, and CUDA IPC refuses its memory (`CudaIpcTransport.accept`).
            if is_gpu and (mem_pool is not None or torch.cuda.get_allocator_backend() == "native"):
                torch.cuda.init()  # a pool does not do so itself
                torch.cuda.empty_cache()  # torch does not do so itself for a pool, even where the device's memory is used up
                stack.enter_context(torch.cuda.device(device))
                mem_pool = torch.cuda.MemPool() if mem_pool is None else mem_pool
                stack.enter_context(torch.cuda.use_mem_pool(mem_pool))
            self.tensor: Tensor = zeroed_bytes(num_bytes, device, is_shared=is_shared)
            """uint8 [num_bytes]; also what `Transport.register` takes."""
        self._mem_pool = mem_pool  # behind the tensor, so that it is given up after it

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel()
