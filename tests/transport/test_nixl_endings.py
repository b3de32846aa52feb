"""When a session may be called over: threads of a writer, addresses that are taken away, a device that hangs or has failed."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.transport.contract import Pair, open_pair
from tests.transport.payload import ring_of, rng
from transfer.errors import LocalProtocolError, TransportClosed, WriteFailed
from transfer.transport import nixl_revocation, nixl_session, ucx_session
from transfer.transport.memory import HostMemory, memory_of
from transfer.transport.nixl import _UNREVOCABLE
from transfer.transport.nixl_library import transports_without
from transfer.transport.nixl_revocation import _COPY_NS, _WRITE_CALLS, CopyWatch, SharedAlias

PID = 4242
WHOLE = rng(0, 1 << 20)


class Thread:
    """What /proc shows of the one thread of process 4242."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.place = proc / f"{PID}/task/{PID}"
        self.place.mkdir(parents=True)
        self.shows("running", 1_000)

    def shows(self, call: str, cpu_ns: int) -> None:
        (self.place / "syscall").write_text(f"{call}\n")
        (self.place / "schedstat").write_text(f"{cpu_ns} 5 6\n")


@pytest.fixture
def thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Thread:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return Thread(tmp_path)


def test_a_running_thread_is_counted_from_the_first_count_behind_the_revocation(thread: Thread) -> None:
    """The first count is as old as the last tick of its core: how much of it was before the revocation nobody knows."""
    watch = CopyWatch(PID, proc=thread.proc)
    assert not watch.is_over
    thread.shows("running", 1_000 + 5 * _COPY_NS)
    assert not watch.is_over
    thread.shows("running", 1_000 + 6 * _COPY_NS - 1)
    assert not watch.is_over
    thread.shows("running", 1_000 + 6 * _COPY_NS)
    assert watch.is_over


@pytest.mark.parametrize(("call", "is_over"), [(f"{_WRITE_CALLS['x86_64']} 0x1 0x2", False), ("0 0x1", True), ("-1 0x1", True)])
def test_a_thread_asleep(thread: Thread, call: str, is_over: bool) -> None:
    watch = CopyWatch(PID, proc=thread.proc)
    thread.shows(call, 1_000)
    assert watch.is_over is is_over


def test_threads_that_cannot_be_counted_are_not_watched(thread: Thread) -> None:
    assert CopyWatch.is_possible(PID, proc=thread.proc)
    (thread.place / "schedstat").unlink()  # a kernel without CONFIG_SCHED_INFO
    assert not CopyWatch.is_possible(PID, proc=thread.proc)


@pytest.fixture
def pair() -> Pair:
    return open_pair("nixl-net")


def test_a_failed_device_ends_no_quarantine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies that NIXL had queued on it cannot be waited for: handles still end, and the session is never called over."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    write = pair.writer.write(pair.source_memory, WHOLE, WHOLE, 1)
    monkeypatch.setattr(nixl_session, "wait_for_devices", fail)
    monkeypatch.setattr(nixl_session.NixlSession, "_touches_device", lambda _: True)
    pair.writer.close()
    with pytest.raises(TransportClosed):
        write.poll()
    pair.target.close()
    assert pair.writer_transport.waits.join(5) and pair.target_transport.waits.join(5)
    assert not pair.target.is_over
    assert "illegal memory access" in caplog.text
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.target_transport.deregister(pair.ring_memory)
    pair.close()


def test_a_device_that_hangs_does_not_hold_the_owner(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is over behind the device, also when the transport has been closed before."""
    quiet = threading.Event()
    monkeypatch.setattr(nixl_session, "wait_for_devices", quiet.wait)
    monkeypatch.setattr(nixl_session.NixlSession, "_touches_device", lambda _: True)
    begun = time.monotonic()
    pair.writer.close()
    pair.target.close()
    assert time.monotonic() - begun < 0.5
    assert not pair.target.is_over and not pair.writer.is_over
    with pytest.raises(LocalProtocolError, match="wait until it is over"):
        pair.target_transport.deregister(pair.ring_memory)
    begun = time.monotonic()
    pair.writer_transport.close()
    assert 0.9 < time.monotonic() - begun < 3
    quiet.set()
    assert pair.writer_transport.waits.join(5) and pair.target_transport.waits.join(5)
    assert pair.target.is_over and pair.writer.is_over
    pair.target_transport.deregister(pair.ring_memory)
    pair.close()


def test_the_agent_of_a_writer_outlives_its_copies_on_a_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX crashes if a worker is destroyed while copies of device memory are under way."""
    quiet, destroyed = threading.Event(), []
    monkeypatch.setattr(nixl_session, "wait_for_devices", quiet.wait)
    monkeypatch.setattr(nixl_session.NixlSession, "_touches_device", lambda _: True)
    monkeypatch.setattr(pair.writer, "_lane", "ipc")
    destroy = nixl_session.Agent.close
    monkeypatch.setattr(nixl_session.Agent, "close", lambda agent: (destroyed.append(agent), destroy(agent)))
    write = pair.writer.write(pair.source_memory, WHOLE, WHOLE, 1)
    pair.writer.close()
    with pytest.raises(TransportClosed):
        write.poll()
    assert not destroyed and not pair.writer.is_over
    quiet.set()
    assert pair.writer_transport.waits.join(5)
    assert len(destroyed) == 1 and pair.writer.is_over
    pair.close()


def test_a_two_sided_session_is_not_over_on_a_failed_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pair = open_pair("ucx-net")
    receive = pair.target.expect(pair.ring_memory, WHOLE, 1)
    monkeypatch.setattr(ucx_session, "wait_for_devices", fail)
    monkeypatch.setattr(HostMemory, "is_device", property(lambda _: True))
    pair.target.close()
    with pytest.raises(TransportClosed):
        receive.poll()
    pair.target.close()
    assert not pair.target.is_over
    assert "illegal memory access" in caplog.text
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.target_transport.deregister(pair.ring_memory)
    pair.writer.close()  # nothing of it touched a device
    assert pair.writer.is_over
    pair.close()


class _Nowhere:
    """Device memory that no driver knows."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (4096,), "typestr": "|u1", "data": (0x7000_0000_0000, False), "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_a_source_that_cannot_be_registered_is_no_fault_of_the_peer(pair: Pair) -> None:
    """Its write fails with the reason; the peer is there, and other writes arrive."""
    source = pair.writer_transport.register(_Nowhere())
    handle = pair.writer.write(source, rng(0, 4096), rng(0, 4096), 1)
    with pytest.raises(WriteFailed, match="key 1 on session nixl/net: NIXL cannot register 4096 bytes on device 0") as raised:
        handle.poll()
    assert "peer" not in str(raised.value)
    pair.move(WHOLE, WHOLE, key=1)
    pair.writer_transport.deregister(source)
    pair.close()


class _OutOfMappings:
    """The C library of a process that may map nothing more."""

    def __init__(self, *, refuses_mprotect: bool) -> None:
        self._libc = nixl_revocation._libc
        self.mmap = lambda *_: nixl_revocation._FAILED
        if refuses_mprotect:
            self.mprotect = lambda *_: -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libc, name)


def _write_to(address: int) -> int:
    """As a late writer: through the kernel; returns its error."""

    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]

    byte = ctypes.create_string_buffer(b"\x77", 1)
    here, there = Part(ctypes.addressof(byte), 1), Part(address, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.process_vm_writev(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return 0 if done == 1 else ctypes.get_errno()


def test_addresses_are_taken_away_and_stay_reserved_where_nothing_can_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(ring_of(1 << 20))
    assert isinstance(memory, HostMemory)
    alias = SharedAlias.of(memory)
    assert alias is not None
    address = alias.address
    assert _write_to(address) == 0 and memory.view[0] == 0x77
    monkeypatch.setattr(nixl_revocation, "_libc", _OutOfMappings(refuses_mprotect=False))
    alias.revoke()
    memory.view[0] = 1
    assert _write_to(address) == errno.EFAULT and memory.view[0] == 1
    assert _is_mapped(address)
    alias.release()
    assert not _is_mapped(address)


def test_addresses_that_cannot_be_taken_away_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(ring_of(1 << 20))
    assert isinstance(memory, HostMemory)
    alias = SharedAlias.of(memory)
    assert alias is not None
    monkeypatch.setattr(nixl_revocation, "_libc", _OutOfMappings(refuses_mprotect=True))
    with pytest.raises(OSError, match="1048576 bytes of shared memory cannot be taken away"):
        alias.revoke()
    alias.release()


def _is_mapped(address: int) -> bool:
    ranges = (line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


@pytest.mark.parametrize(
    ("tls", "left"),
    [
        ("all", "^cma,cuda_ipc,knem,xpmem"),
        ("^ib", "^ib,cma,cuda_ipc,knem,xpmem"),
        ("tcp,sm,cuda,self", "tcp,self"),
        ("rc,tcp,cuda_copy,cma,xpmem,knem", "rc,tcp,cuda_copy"),
    ],
)
def test_the_network_lane_leaves_out_what_writes_without_the_target(tls: str, left: str) -> None:
    assert transports_without(tls, _UNREVOCABLE) == left
