"""The CUDA IPC transport in this process: what it refuses, both ends in one process, and a device that breaks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transport.host_cuda import HostCuda, TwinBuffer, TwinStream, remove_files
from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportClosed, WriteFailed
from transfer.transport import cuda_ipc, cuda_ipc_driver
from transfer.transport.base import ByteRange
from transfer.transport.cuda_ipc import CudaIpcTransport
from transfer.transport.cuda_ipc_blob import Answered
from transfer.transport.cuda_ipc_driver import Cuda, CudaError, CudaWords
from transfer.transport.peer import pack_blob, unpack_blob

ROOT = Path(__file__).resolve().parents[2]
SIZE = 1 << 20  # the twin copies 256 KiB at a time


def rng(begin: int, end: int) -> ByteRange:
    return ByteRange(begin=begin, end=end)


class Pair:
    """Both ends in this process, on two devices of one twin."""

    def __init__(self) -> None:
        self.cuda = HostCuda()
        self.writer_transport = CudaIpcTransport(cuda=self.cuda)
        self.target_transport = CudaIpcTransport(cuda=self.cuda)
        self.source: TwinBuffer = self.cuda.allocate(0, SIZE)
        self.ring: TwinBuffer = self.cuda.allocate(1, SIZE)
        self.source.tensor.copy_(torch.arange(SIZE).to(torch.uint8))
        self.source_memory = self.writer_transport.register(self.source)
        self.ring_memory = self.target_transport.register(self.ring)

    def attach(self) -> tuple[Any, Any]:
        offer = self.writer_transport.offer()
        target, answer = self.target_transport.accept(offer.blob, self.ring_memory)
        return offer.complete(answer), target

    def answer(self) -> Answered:
        """An answer that is right but for what the test will change."""
        _, blob = self.target_transport.accept(self.writer_transport.offer().blob, self.ring_memory)
        token = unpack_blob(blob, transport="cuda_ipc", version=1, role="answer")["token"]
        return Answered.from_blob(blob, token=token)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    remove_files(os.getpid())


def drive(session: Any, handle: Any) -> None:
    for _ in range(1000):
        session.progress()
        if handle.poll():
            return
    raise AssertionError("still pending")


def ends_within(session: Any, seconds: float = 60.0) -> bool:
    """A closed session waits for its device on a thread, and a target for its writer."""
    ends_at = time.monotonic() + seconds
    while not session.has_ended and time.monotonic() < ends_at:
        time.sleep(0.001)
    return bool(session.has_ended)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Both ends in one process


def test_one_process_needs_no_mapping(pair: Pair) -> None:
    before = num_descriptors()
    writer, target = pair.attach()
    drive(writer, writer.write(pair.source_memory, rng(10, 30), rng(100, 120), 1))
    assert torch.equal(pair.ring.tensor[100:120], pair.source.tensor[10:30])
    assert int(pair.ring.tensor.sum()) == int(pair.source.tensor[10:30].sum())
    direct = writer.direct(rng(200, 300))
    assert (direct.numel(), direct.data_ptr(), direct.device_index) == (100, pair.ring.address + 200, 0)
    assert pair.cuda.num_mapped == 0
    target.close()
    assert not target.is_over
    writer.close()
    assert writer.is_over and ends_within(writer) and target.is_over
    assert num_descriptors() == before


def test_a_target_that_closed_before_the_writer_completed(pair: Pair) -> None:
    offer = pair.writer_transport.offer()
    target, answer = pair.target_transport.accept(offer.blob, pair.ring_memory)
    target.close()
    with pytest.raises(PeerUnreachable):
        offer.complete(answer)
    offer.close()
    assert target.is_over


# Signals


def test_both_ends_have_the_signals_of_a_session(pair: Pair) -> None:
    writer, target = pair.attach()
    signal = writer.signal_writer.of(4096)
    total = ctypes.c_uint64(5)
    signal.begin(0, ctypes.addressof(total))
    total.value = 12
    signal.end(0, ctypes.addressof(total))
    words = target.signal_reader.words.words
    assert list(words[8:14]) == [1, 4096, 1, 5, 12, 1]
    assert writer.signal_reader is None and target.signal_writer is None
    del signal, words
    target.close()
    writer.close()
    assert ends_within(writer) and target.is_over
    assert writer.signal_writer is None and target.signal_reader is None


@pytest.mark.parametrize("end", ["writer", "target"])
def test_without_memory_operations_a_session_has_no_signals(pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with a peer of an earlier version, which does not know them. Bytes travel all the same."""
    offer = pair.writer_transport.offer()
    pair.cuda.has_words = end == "writer"
    target, answer = pair.target_transport.accept(offer.blob, pair.ring_memory)
    pair.cuda.has_words = False
    writer = offer.complete(answer)
    assert writer.signal_writer is None and (target.signal_reader is None) == (end == "target")
    drive(writer, writer.write(pair.source_memory, rng(0, SIZE), rng(0, SIZE), 1))
    assert torch.equal(pair.ring.tensor, pair.source.tensor)


def test_without_memory_that_can_be_shared_a_session_has_no_signals(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> None:
        raise OSError(errno.EPERM, "memfd_create is not allowed here")

    monkeypatch.setattr(cuda_ipc, "shared_memory", refuse)
    writer, target = pair.attach()
    assert writer.signal_writer is None and target.signal_reader is None


def test_registered_words_are_given_back_also_if_their_address_cannot_be_found() -> None:
    """Otherwise their memory would stay registered with CUDA after it is freed."""
    calls: list[str] = []
    driver = SimpleNamespace(CU_MEMHOSTREGISTER_PORTABLE=1, CU_MEMHOSTREGISTER_DEVICEMAP=2)

    def call(name: str, *arguments: Any) -> int:
        calls.append(name)
        if name == "cuMemHostGetDevicePointer":
            raise CudaError(f"{name} failed")
        return 0

    nothing = contextlib.nullcontext()
    cuda: Any = SimpleNamespace(driver=driver, call=call, on=lambda device: nothing, beside_captures=lambda: nothing)
    with pytest.raises(CudaError):
        CudaWords(cuda, 0, mmap.mmap(-1, 8192), lambda function: function())
    gc.collect()
    assert calls == ["cuMemHostRegister", "cuMemHostGetDevicePointer", "cuMemHostUnregister"]


@pytest.mark.parametrize("library", [lambda name: SimpleNamespace(), lambda name: ctypes.cdll.LoadLibrary("libmissing.so.1")])
def test_without_a_function_of_the_driver_there_are_no_signals(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc_driver, "_stream_functions", cuda_ipc_driver._stream_functions.__wrapped__)  # noqa: SLF001
    monkeypatch.setattr(cuda_ipc_driver.ctypes, "CDLL", library)
    flags = dict.fromkeys(("CU_MEMHOSTREGISTER_PORTABLE", "CU_MEMHOSTREGISTER_DEVICEMAP"), 1)
    attributes = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=1)
    cuda: Any = SimpleNamespace(
        driver=SimpleNamespace(CUdevice_attribute=attributes, **flags),
        call=lambda *_: 1,
        on=lambda _: contextlib.nullcontext(),
        beside_captures=contextlib.nullcontext,
        _device=lambda device: device,
    )
    assert Cuda.open_words(cuda, 0, mmap.mmap(-1, 8192), lambda function: function()) is None


@pytest.mark.parametrize("error", [AttributeError("no such function"), RuntimeError('Function "cuFuncGetParamInfo" not found')])
def test_a_driver_that_does_not_know_the_parameters_of_a_kernel_is_an_error_of_cuda(error: Exception) -> None:
    """Drivers before CUDA 12.4. cuda-bindings raises RuntimeError for a function that the driver does not have."""

    def missing(*_: Any) -> None:
        raise error

    cuda: Any = SimpleNamespace(driver=SimpleNamespace(cuFuncGetParamInfo=missing))
    with pytest.raises(CudaError, match="cuFuncGetParamInfo"):
        Cuda.parameters_of(cuda, 1)


def test_a_peer_without_signals_is_told_nothing_of_them(pair: Pair) -> None:
    """A writer of an earlier version reads no signature from the target's pipe: it would take it for the target's end."""
    offer = pair.writer_transport.offer()
    fields = unpack_blob(offer.blob, transport="cuda_ipc", version=1, role="offer")
    fields.pop("signals")
    blob = pack_blob("cuda_ipc", 1, "offer", {name: fields[name] for name in ("line", "token")})
    target, answer = pair.target_transport.accept(blob, pair.ring_memory)
    assert target.signal_reader is None
    assert not {"signals_fd", "signals_inode"} & unpack_blob(answer, transport="cuda_ipc", version=1, role="answer").keys()
    writer = offer.complete(answer)
    assert writer.signal_writer is None and writer.direct(rng(0, 1)) is not None


def test_memory_of_another_process_is_not_taken_for_signals(pair: Pair) -> None:
    """An answer with signals is signed by the process that it names. Its memory must be as the answer says."""
    offer = pair.writer_transport.offer()
    _, answer = pair.target_transport.accept(offer.blob, pair.ring_memory)
    fields = unpack_blob(answer, transport="cuda_ipc", version=1, role="answer")
    own = ("line", "token", "offset", "num_bytes", "device", "handle", "signals_fd", "signals_inode")
    forged = pack_blob("cuda_ipc", 1, "answer", {name: fields[name] for name in own} | {"signals_fd": 0})
    with pytest.raises(PeerUnreachable, match="did not write the answer that names it"):
        offer.complete(forged)


# The protocol of a session


def test_closing_fails_pending_handles_and_lands_begun_copies(pair: Pair) -> None:
    writer, target = pair.attach()
    handle = writer.write(pair.source_memory, rng(0, SIZE), rng(0, SIZE), 1)
    pair.writer_transport.close()
    with pytest.raises(TransportClosed, match="was closed while key 1 was pending"):
        handle.poll()
    assert torch.equal(pair.ring.tensor, pair.source.tensor)  # the copy could not be taken back, so close() waited for it
    with pytest.raises(TransportClosed):
        writer.decline(2).poll()
    assert writer.direct(rng(0, 1)) is None and writer.progress() is False
    with pytest.raises(TransportClosed):
        pair.writer_transport.offer()
    target.close()
    with pytest.raises(TransportClosed):
        target.decline(1).poll()
    pair.target_transport.deregister(pair.ring_memory)


def test_a_device_that_breaks(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Every write fails with CUDA's word; nothing is said to the target that cannot be shown."""
    writer, target = pair.attach()
    first = writer.write(pair.source_memory, rng(0, SIZE), rng(0, SIZE), 1)
    pair.cuda.broken = "CUDA_ERROR_ILLEGAL_ADDRESS"
    second = writer.write(pair.source_memory, rng(0, 1), rng(0, 1), 2)
    for handle in (first, second, writer.write(pair.source_memory, rng(0, 1), rng(0, 1), 3)):
        with pytest.raises(WriteFailed, match="cuMemcpyAsync failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
            handle.poll()
    assert writer.direct(rng(0, 1)) is None
    with caplog.at_level(logging.WARNING):
        writer.close()
        assert ends_within(writer)
    assert "cannot be shown to have ended: cuStreamSynchronize failed" in caplog.text
    target.close()
    assert not target.is_over


# Closing beside the owner's loop


def test_closing_waits_for_no_kernel_and_the_target_for_all_of_them(pair: Pair) -> None:
    """The device never gets through what it was given: the owner goes on, with other sessions too, and no thread is added."""
    before = set(threading.enumerate())
    pairs = [pair.attach() for _ in range(4)]
    for writer, _ in pairs:
        assert writer.direct(rng(0, 8)) is not None
    pair.cuda.idle.clear()
    for writer, target in pairs:
        writer.close()
        target.close()
    other, other_target = pair.attach()
    drive(other, other.write(pair.source_memory, rng(0, SIZE), rng(0, SIZE), 1))
    assert torch.equal(pair.ring.tensor, pair.source.tensor)
    assert all(writer.is_over and not writer.has_ended and not target.is_over for writer, target in pairs)
    assert sum(thread.name == "cuda_ipc-closing" for thread in set(threading.enumerate()) - before) == 1
    with pytest.raises(LocalProtocolError, match="may still reach it"):
        pair.target_transport.deregister(pair.ring_memory)
    pair.cuda.idle.set()
    assert all(ends_within(target) for _, target in pairs)
    other.close()
    other_target.close()
    assert ends_within(other_target)
    pair.target_transport.deregister(pair.ring_memory)
    pair.writer_transport.deregister(pair.source_memory)


def test_a_source_stays_in_use_until_the_copy_out_of_it_has_ended(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    may_wait, wait = threading.Event(), TwinStream.synchronize
    monkeypatch.setattr(TwinStream, "synchronize", lambda stream: (may_wait.wait(), wait(stream))[1])
    writer, target = pair.attach()
    handle = writer.write(pair.source_memory, rng(0, SIZE), rng(0, SIZE), 1)
    writer.close()
    target.close()
    with pytest.raises(TransportClosed, match="was closed while key 1 was pending"):
        handle.poll()
    with pytest.raises(LocalProtocolError, match="a copy may still reach it"):
        pair.writer_transport.deregister(pair.source_memory)
    assert not target.is_over
    may_wait.set()
    assert ends_within(target) and ends_within(writer)
    assert torch.equal(pair.ring.tensor, pair.source.tensor)
    pair.writer_transport.deregister(pair.source_memory)


def test_a_transport_closes_in_bounded_time_around_a_kernel_that_does_not_end(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    writer, target = pair.attach()
    assert writer.direct(rng(0, 8)) is not None
    pair.cuda.idle.clear()
    pair.writer_transport.close()
    assert f"stores into memory of process {os.getpid()} have not ended" in caplog.text
    target.close()
    assert not target.is_over
    pair.cuda.idle.set()
    assert ends_within(target)


# What is refused


def test_settings_and_memory_that_are_refused(pair: Pair) -> None:
    mode: Any = "fast"
    with pytest.raises(ConfigError, match="mode 'fast' of transport cuda_ipc is unknown; use fused or copy"):
        CudaIpcTransport(mode=mode, cuda=pair.cuda)
    with pytest.raises(ConfigError, match=r"this bytearray is host memory.*choose transport: ucx"):
        pair.writer_transport.register(bytearray(8))
    with pytest.raises(ConfigError, match=r"lies on device 1 .*serves device 0 .*one transport for each device"):
        pair.writer_transport.register(pair.ring)
    with pytest.raises(ConfigError, match="serves device 1"):
        CudaIpcTransport(cuda=pair.cuda, device_index=1).register(pair.source)
    pair.cuda.unshareable = True
    with pytest.raises(ConfigError, match="cannot be shared over CUDA IPC"):
        pair.attach()


def test_devices_without_peer_access_are_named() -> None:
    cuda = HostCuda(apart=[frozenset((0, 1))])
    writer, target = CudaIpcTransport(cuda=cuda, device_index=0), CudaIpcTransport(cuda=cuda)
    ring = target.register(cuda.adopt(torch.zeros(8, dtype=torch.uint8)))
    far = CudaIpcTransport(cuda=cuda, device_index=1)
    offer, good = far.offer(), writer.offer()
    words = "device 00000001-0000.* cannot reach the peer's device 00000000-0000.*no peer access.*choose transport: ucx or nixl"
    with pytest.raises(PeerUnreachable, match=words):
        offer.complete(target.accept(offer.blob, ring)[1])
    good.complete(target.accept(good.blob, ring)[1])


def test_an_answer_completes_only_its_own_offer(pair: Pair) -> None:
    one, other = pair.writer_transport.offer(), pair.writer_transport.offer()
    _, answer = pair.target_transport.accept(one.blob, pair.ring_memory)
    with pytest.raises(ConfigError, match="belongs to another offer"):
        other.complete(answer)
    one.complete(answer)
    with pytest.raises(TransportClosed, match="completed or closed before"):
        one.complete(answer)


def test_without_cuda_bindings_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"^transport cuda_ipc needs cuda-bindings \(.*pip install 'kvferry\[cuda-ipc\]'.*$"):
        CudaIpcTransport()
