"""The CUDA IPC transport without a GPU: its processes and their ends on a twin of CUDA, its blobs, and what it refuses.

The same scenarios run on real GPUs in tests/gpu/test_cuda_ipc_gpu.py.
"""

from __future__ import annotations

import pytest

from tests.transport.cuda_ipc_ends import Place
from tests.transport.cuda_ipc_scenarios import *  # noqa: F403
from tests.transport.cuda_ipc_scenarios import MiB, Places


@pytest.fixture
def places() -> Places:
    twin = Place(is_gpu=False)
    return Places(
        writer=twin,
        target=Place(is_gpu=False, device=1),
        sizes=(1, 4096, MiB + 1, 4 * MiB),
        long_bytes=16 * MiB,
        long_times=200,
    )
