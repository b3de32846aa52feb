"""What can be registered, who the peer is, and what importing and making the UCX transport does to a process."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transfer.errors import ConfigError
from transfer.transport.base import ByteRange
from transfer.transport.nixl import NixlTransport
from transfer.transport.peer import ProcessIdentity, ReadableProof, can_read_memory_of, unpack_blob
from transfer.transport.registered_memory import DeviceBuffer, HostMemory, memory_of
from transfer.transport.ucx import UcxTransport

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("buffer", "num_bytes"),
    [
        (bytearray(10), 10),
        (memoryview(bytearray(10)), 10),
        (mmap.mmap(-1, 4096), 4096),
        (np.zeros((3, 4), dtype=np.float32), 48),
        (torch.zeros(3, 5, dtype=torch.bfloat16), 30),
        (torch.zeros(7, dtype=torch.float8_e4m3fn), 7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_host_buffers(buffer: Any, num_bytes: int) -> None:
    memory = memory_of(buffer)
    assert isinstance(memory, HostMemory)
    assert memory.num_bytes == num_bytes
    memory.part(ByteRange(begin=1, end=3))[:] = 255
    raw = buffer.view(torch.uint8).numpy().tobytes() if isinstance(buffer, torch.Tensor) else bytes(buffer)
    assert raw[:4] == b"\x00\xff\xff\x00"  # shared, not copied


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (b"abc", "read-only"),
        (bytearray(0), "0 bytes"),
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        ([1, 2], "buffer protocol"),
    ],
)
def test_bad_buffers(buffer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        memory_of(buffer)


class _Silent:
    """Says where it lies, and not on which device."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 8),
            "typestr": "<f2",
            "data": (0x1000, False),
            "strides": None,
            "version": 3,
        } | interface


class _Device(_Silent):
    def __init__(self, device_id: int = 0, **interface: Any) -> None:
        super().__init__(**interface)
        self._device_id = device_id

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device_id)


def test_device_buffers_pass_through_by_address() -> None:
    memory = memory_of(_Device())
    assert isinstance(memory, DeviceBuffer)
    assert (memory.num_bytes, memory.is_device) == (64, True)
    part = memory.part(ByteRange(begin=10, end=30)).__cuda_array_interface__
    assert (part["data"], part["shape"], part["typestr"]) == ((0x100A, False), (20,), "|u1")
    assert memory_of(_Device(strides=(16, 2))).num_bytes == 64


def test_the_device_of_a_buffer_that_is_not_torchs() -> None:
    memory = memory_of(_Device(device_id=3))
    assert isinstance(memory, DeviceBuffer)
    assert memory.device_index == 3 and memory.part(ByteRange(begin=0, end=1)).device_index == 3
    with pytest.raises(ConfigError, match=r"_Silent has no device, and .* address 0x1000; register an array"):
        memory_of(_Silent())


def test_claims_in_claims_take_no_memory() -> None:
    """With room made for what each of them claims a blob of 64 KB would take 80 MB."""
    for claim in (b"\xdd\x00\x00\xff\x00", b"\xdf\x00\x00\xff\x00", b"\xdc\x00\x21"):
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match="is not a kvferry offer of transport ucx version 1: not msgpack"):
                unpack_blob(claim * 1000 + bytes(60_000), transport="ucx", version=1, role="offer")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_identity() -> None:
    own = ProcessIdentity.own()
    assert own.pid == os.getpid()
    assert ProcessIdentity.from_wire(own.to_wire()) == own
    assert own.shares_kernel_with(replace(own, pid=1))
    assert not own.shares_kernel_with(replace(own, boot_id="another"))
    assert not own.shares_kernel_with(replace(own, pid_namespace=1))
    for bad in (None, [], ["a", "b", 1], ["a", 2, 3, 4], ["a", "b", True, 4], ["a", "b", 1, "4"]):
        with pytest.raises(ConfigError):
            ProcessIdentity.from_wire(bad)


def test_proof_of_readable_memory() -> None:
    proof = ReadableProof()
    address, secret = proof.to_wire()
    assert can_read_memory_of(os.getpid(), [address, secret])
    assert not can_read_memory_of(os.getpid(), [address, bytes(16)])
    assert not can_read_memory_of(os.getpid(), [4096, secret])
    assert not can_read_memory_of(2**22 + 1, [address, secret])
    for bad in (None, [], [address], [address, secret[:3]], ["x", secret], [-1, secret], [2**70, secret], [address, "x" * 16]):
        assert not can_read_memory_of(os.getpid(), bad)
    assert not can_read_memory_of(-1, [address, secret])


@pytest.mark.parametrize(
    ("made", "settings", "words"),
    [
        (UcxTransport, {"lane": ""}, "use auto, shm or net"),
        (UcxTransport, {"options": {"RNDV_SCHEME": "nonsense"}}, "UCX refused the options"),
        (UcxTransport, {"lane": "net", "options": {"TLS": "cma,self"}}, "leaves nothing without cma"),
        (NixlTransport, {"lane": "fast"}, "lane 'fast' of transport nixl is unknown"),
        (NixlTransport, {"backend": "NOSUCH"}, r"backend NOSUCH of transport nixl is not installed; this NIXL has .*UCX"),
        (NixlTransport, {"backend": "LIBFABRIC", "options": {"TLS": "tcp"}}, "takes no UCX options"),
    ],
)
def test_settings_that_are_refused(made: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**settings)


@pytest.mark.parametrize("made", [UcxTransport, NixlTransport])
def test_lanes_that_contradict_each_other_are_refused(made: Any) -> None:
    target = made(lane="net")
    memory = target.register(bytearray(8))
    with pytest.raises(ConfigError, match=f"lane of transport {target.name} is shm at the writer and net at the target"):
        target.accept(made(lane="shm").offer().blob, memory)


def test_the_environment_and_the_loggers_stay_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    before, handlers = dict(os.environ), list(logging.getLogger().handlers)
    transport = UcxTransport()
    transport.offer().close()
    transport.close()
    assert dict(os.environ) == before and logging.getLogger().handlers == handlers
    assert capfd.readouterr() == ("", "")


def test_without_ucxx_the_error_names_the_package() -> None:
    """In a process that has not loaded it."""
    code = (
        "import sys; sys.modules['ucxx'] = None\n"
        "from transfer.transport.ucx import UcxTransport\n"
        "try: UcxTransport()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError transport ucx needs ucxx") and done.stdout.count("\n") == 1
    assert "pip install 'kvferry[ucx-cu13]' (or kvferry[ucx-cu12]" in done.stdout and not done.stderr
