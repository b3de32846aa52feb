from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from transfer.errors import ConfigError
from transfer.pool.staging import StagingBuffer
from transfer.transport.base import REGION_ALIGNMENT_BYTES
from transfer.transport.nixl_revocation import SharedAlias
from transfer.transport.registered_memory import HostMemory, memory_of


def test_a_buffer_is_aligned_zero_and_really_there() -> None:
    def resident_bytes(address: int, num_bytes: int) -> int:
        """Of that memory alone: what the rest of the process takes and gives back meanwhile does not count."""
        pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE

    untouched = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE)
    assert resident_bytes(ctypes.addressof(ctypes.c_char.from_buffer(untouched)), 64 << 20) == 0
    buffer = StagingBuffer(64 << 20)
    assert resident_bytes(buffer.tensor.data_ptr(), 64 << 20) >= 60 << 20  # a machine short of memory may take some
    assert buffer.tensor.data_ptr() % REGION_ALIGNMENT_BYTES == 0 and buffer.num_bytes == 64 << 20
    assert not buffer.tensor.any() and buffer.tensor.device == torch.device("cpu")


def test_shared_memory_can_be_mapped_a_second_time_and_private_memory_cannot() -> None:
    for is_shared in (True, False):
        memory = memory_of(StagingBuffer(1 << 20, is_shared=is_shared).tensor)
        assert isinstance(memory, HostMemory) and not memory.view.any()
        alias = SharedAlias.of(memory)
        assert (alias is not None) is is_shared
        if alias is not None:
            ctypes.memset(alias.address + 7, 5, 1)
            assert memory.view[7] == 5
            alias.revoke()
            alias.release()
            assert memory.view[7] == 5


def test_host_memory_comes_from_no_pool_of_a_gpu() -> None:
    with pytest.raises(ConfigError, match="staging mem_pool is a pool of GPU memory, and device is cpu: leave it out"):
        StagingBuffer(64, mem_pool=object())  # type: ignore[arg-type]
