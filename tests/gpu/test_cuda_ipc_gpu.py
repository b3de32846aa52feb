"""The CUDA IPC transport on real GPUs: two processes on one device and on two, killed, frozen, and seeing different devices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.transport.mapped_ends import Place, Remote, attach
from tests.transport.mapped_scenarios import *  # noqa: F403
from tests.transport.mapped_scenarios import Make, MiB, Places
from transfer.pool.staging import StagingBuffer

ROOT = Path(__file__).resolve().parents[2]
CLOCK_HZ = 2_000_000_000  # at most, of an H200's multiprocessors

pytestmark = pytest.mark.timeout(120)

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs: this torch sees fewer")


@pytest.fixture(params=[pytest.param(0, id="one GPU"), pytest.param(1, id="two GPUs", marks=needs_two)])
def places(request: pytest.FixtureRequest) -> Places:
    return Places(
        writer=Place(is_gpu=True, device=0),
        target=Place(is_gpu=True, device=request.param),
        sizes=(1, 4096, MiB + 1, 64 * MiB, 1024 * MiB),
        long_bytes=1024 * MiB,
        long_times=900,  # what one stream queues without blocking: 0.5 s on one H200, 2.5 s over NVLink
    )


@needs_two
@pytest.mark.parametrize(
    ("writer", "target"),
    [
        (Place(is_gpu=True, visible=(0,)), Place(is_gpu=True, visible=(1,))),
        (Place(is_gpu=True, visible=(1,)), Place(is_gpu=True, visible=(0,))),
        (Place(is_gpu=True, device=1), Place(is_gpu=True, visible=(0,))),
        (Place(is_gpu=True, visible=(1,)), Place(is_gpu=True, device=0)),
    ],
    ids=["0 to 1", "1 to 0", "all to 0", "1 to all"],
)
def test_processes_that_see_different_devices(make: Make, writer: Place, target: Place) -> None:
    one, other = make(writer, num_bytes=4 * MiB), make(target, num_bytes=4 * MiB)
    attach(one, other)
    one.do("fill", seed=9)
    one.do("write", begin=0, end=MiB, target_begin=0, key=1)
    assert one.do("wait", key=1, seconds=10) == "done"
    assert one.do("store", begin=MiB, end=2 * MiB, target_begin=MiB)
    assert other.do("holds", begin=0, end=2 * MiB, seed=9, source_begin=0, around=0)


def warm_up(writer: Remote, target: Remote) -> None:
    """Both ends have compiled and loaded what they run below, and the target holds ones."""
    writer.do("fill", seed=3)
    attach(writer, target)
    writer.do("store", begin=0, end=MiB, target_begin=0, sleep_cycles=1)
    writer.do("store", begin=0, end=MiB, target_begin=0)
    assert target.do("holds", begin=0, end=MiB, seed=3, source_begin=0, around=1)
    target.do("stamp", value=1)
    assert target.do("is_stamp", value=1)


def test_nothing_that_a_killed_writer_had_queued_lands_once_it_is_gone(places: Places, make: Make) -> None:
    """A kernel that would store later, behind one that sleeps: without the kill it does land."""
    writer, target = make(places.writer), make(places.target)
    warm_up(writer, target)
    writer.do("store", begin=0, end=MiB, target_begin=0, sleep_cycles=2 * CLOCK_HZ)
    assert target.do("is_stamp", value=1)
    ends_at = time.monotonic() + 20
    while not target.do("holds", begin=0, end=MiB, seed=3, source_begin=0, around=1):
        assert time.monotonic() < ends_at
    target.do("stamp", value=2)
    writer.do("store", begin=0, end=MiB, target_begin=0, sleep_cycles=3 * CLOCK_HZ)
    target.do("close")
    begun = time.monotonic()
    writer.kill()
    assert target.do("is_over_within", seconds=1)
    target.do("stamp", value=4)
    assert time.monotonic() - begun < 2.5  # the GPU would still sleep
    time.sleep(3)
    assert target.do("is_stamp", value=4)


def test_a_writer_whose_device_is_broken_is_over_only_when_it_is_gone(places: Places, make: Make) -> None:
    writer, target = make(places.writer), make(places.target)
    attach(writer, target)
    assert "device-side assert" in writer.do("break_device")
    writer.do("write", begin=0, end=4096, target_begin=0, key=1)
    outcome = writer.do("wait", key=1, seconds=5)
    assert outcome.startswith("WriteFailed: key 1 on session cuda_ipc/fused: cu"), outcome
    writer.do("close")
    target.do("close")
    assert not target.do("is_over_within", seconds=0.2)
    writer.kill()
    assert target.do("is_over_within", seconds=3)  # the driver has an error to tidy up
    other = make(places.writer)
    attach(other, target)
    assert moves_bytes(other, target, MiB)  # noqa: F405


def test_a_ring_is_an_allocation_of_its_own() -> None:
    """What a peer maps is the whole allocation: neither another ring nor a tensor may lie in it."""
    from transfer.transport.cuda_ipc_driver import process_cuda

    num_bytes = 64 * 1024  # torch puts many of these into one allocation
    plain, rings = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0"), []
    for _ in range(2):
        rings.append(StagingBuffer(num_bytes, device="cuda:0"))
        assert not rings[-1].tensor.any()
    later = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    addresses = [memory.data_ptr() for memory in (plain, rings[0].tensor, rings[1].tensor, later)]
    allocations = [address - process_cuda().export(0, address).offset for address in addresses]
    assert len({*allocations[:3]}) == 3 and allocations[3] not in allocations[1:3]
    freed, view = torch.cuda.memory_reserved(0), rings[1].tensor[8:]
    rings.clear()
    assert torch.cuda.memory_reserved(0) < freed  # given back with the buffer; a view that is left keeps its own
    assert not view.any()


def test_a_ring_lies_in_the_pool_of_the_caller() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        other = torch.ones(64 * 1024, dtype=torch.uint8, device="cuda:0")
    ring = StagingBuffer(64 * 1024, device="cuda:0", mem_pool=pool)
    segments = [(one["address"], one["address"] + one["total_size"]) for one in pool.snapshot()]
    assert any(begin <= ring.tensor.data_ptr() and ring.tensor.data_ptr() + ring.num_bytes <= end for begin, end in segments)
    assert not ring.tensor.any() and bool(other.all())
    private = StagingBuffer(64 * 1024, device="cuda:0").tensor
    assert not any(begin <= private.data_ptr() < end for begin, end in segments)


def test_memory_that_cannot_be_exported_names_the_setting() -> None:
    code = (
        "import torch\n"
        "from transfer.transport.cuda_ipc import CudaIpcTransport\n"
        "transport = CudaIpcTransport()\n"
        "memory = transport.register(torch.zeros(1 << 24, dtype=torch.uint8, device='cuda'))\n"
        "try: transport.accept(transport.offer().blob, memory)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("ConfigError the ring's memory cannot be shared over CUDA IPC"), done
    assert "expandable_segments:True" in done.stdout and "PYTORCH_CUDA_ALLOC_CONF" in done.stdout
