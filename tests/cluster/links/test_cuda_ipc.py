"""The CUDA IPC transport without a GPU: its processes and their ends on a twin of CUDA.

The same scenarios run on real GPUs in tests/gpu/test_cuda_ipc_gpu.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transport.host_cuda import remove_files
from tests.transport.mapped_ends import Place, Remote, attach
from tests.transport.mapped_scenarios import *  # noqa: F403
from tests.transport.mapped_scenarios import Make, MiB, Places
from tests.transport.test_cuda_ipc_transport import SIZE, Pair, ends_within, num_descriptors
from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.cuda_ipc_blob import NAME, Answered
from transfer.transport.mapped_blob import Offered

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    remove_files(os.getpid())


@pytest.fixture
def target(make: Make) -> Remote:
    return make(Place(is_gpu=False, device=1), num_bytes=SIZE)


def test_a_handle_that_cannot_be_mapped(pair: Pair, target: Remote) -> None:
    before = num_descriptors()
    offer = pair.writer_transport.offer()
    token = Offered.from_blob(offer.blob, transport=NAME).token
    good = Answered.from_blob(target.do("accept", blob=offer.blob), token=token)
    unsigned = replace(good, signals=None)  # the signature is read only of an answer with signals
    with pytest.raises(
        PeerUnreachable, match=r"cannot map memory of the peer's device .*CUDA_ERROR_INVALID_VALUE.*docker --ipc=host"
    ):
        offer.complete(replace(unsigned, handle=bytes(64)).to_blob())
    with pytest.raises(ConfigError, match=f"offers bytes .* of an allocation that has {3 * 4096 + SIZE}"):
        offer.complete(replace(unsigned, place=replace(good.place, num_bytes=SIZE + 1)).to_blob())
    assert pair.cuda.num_mapped == 0
    session = offer.complete(good.to_blob())
    assert pair.cuda.num_mapped == 1
    session.close()
    assert ends_within(session)
    assert pair.cuda.num_mapped == 0
    assert num_descriptors() == before


def test_an_offer_of_a_process_that_is_gone(pair: Pair, make: Make) -> None:
    writer = make(Place(is_gpu=False), num_bytes=SIZE)
    blob = writer.do("offer")
    writer.kill()
    before = num_descriptors()
    with pytest.raises(PeerUnreachable, match="is gone"):
        pair.target_transport.accept(blob, pair.ring_memory)
    assert num_descriptors() == before
    pair.target_transport.deregister(pair.ring_memory)


@pytest.mark.parametrize(("writer_sees", "target_sees"), [((0,), (1,)), ((1,), (0,)), ((0, 1), (1,)), ((0,), (0, 1))])
def test_processes_that_see_different_devices(make: Make, writer_sees: tuple[int, ...], target_sees: tuple[int, ...]) -> None:
    writer = make(Place(is_gpu=False, visible=writer_sees), num_bytes=SIZE)
    target = make(Place(is_gpu=False, visible=target_sees, device=len(target_sees) - 1), num_bytes=SIZE)
    attach(writer, target)
    writer.do("fill", seed=4)
    writer.do("write", begin=0, end=SIZE, target_begin=0, key=1)
    assert writer.do("wait", key=1, seconds=60) == "done"
    assert target.do("holds", begin=0, end=SIZE, seed=4, source_begin=0, around=0)


def test_a_machine_without_a_device_is_refused() -> None:
    code = (
        "from transfer.transport.cuda_ipc import CudaIpcTransport\n"
        "try: CudaIpcTransport()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("ConfigError transport cuda_ipc needs an NVIDIA GPU") and done.stdout.count("\n") == 1
