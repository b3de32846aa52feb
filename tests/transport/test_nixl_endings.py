"""When a session may be called over: threads of a writer, addresses that are taken away, a device that hangs or has failed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.transport.contract import Pair, open_pair
from tests.transport.payload import ring_of, rng
from transfer.errors import LocalProtocolError, TransportClosed
from transfer.transport import sessions
from transfer.transport.nixl import NixlTransport
from transfer.transport.nixl_metadata import Region
from transfer.transport.nixl_revocation import CopyWatch, SharedAlias
from transfer.transport.nixl_session import NixlSession
from transfer.transport.registered_memory import HostMemory, memory_of
from transfer.transport.ucx_library import transports_without
from transfer.transport.waiting_thread import WaitingThread

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
    watch = CopyWatch(PID, proc=thread.proc, copy_ns=100)
    for cpu_ns, is_over in ((1_000, False), (1_500, False), (1_599, False), (1_600, True)):
        thread.shows("running", cpu_ns)
        assert watch.is_over is is_over, cpu_ns


@pytest.mark.parametrize(("call", "is_over"), [("310 0x1 0x2", False), ("0 0x1", True), ("-1 0x1", True)])
def test_a_thread_asleep(thread: Thread, call: str, is_over: bool) -> None:
    """310 is process_vm_writev of x86-64."""
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


def on_a_device(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """From now on host memory counts as a device's, which is waited for by `wait`."""
    monkeypatch.setattr(sessions, "wait_for_devices", wait)
    monkeypatch.setattr(HostMemory, "is_device", property(lambda _: True))


@pytest.mark.parametrize("kind", ["nixl-net", "ucx-net"])
def test_a_failed_device_ends_no_quarantine(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Copies that were queued on it cannot be waited for: handles still end, and the session is never called over."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pair = open_pair(kind)
    if pair.is_one_sided:
        handle: Any = pair.writer.write(pair.source_memory, WHOLE, WHOLE, 1)
    else:
        handle = pair.target.expect(pair.ring_memory, WHOLE, 1)
    on_a_device(monkeypatch, fail)
    pair.writer.close()
    pair.target.close()
    with pytest.raises(TransportClosed):
        handle.poll()
    if pair.is_one_sided:
        assert pair.writer_transport.waits.join(30) and pair.target_transport.waits.join(30)
    pair.target.close()
    assert not pair.target.is_over
    assert "illegal memory access" in caplog.text
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.target_transport.deregister(pair.ring_memory)
    pair.close()


def test_a_device_that_hangs_does_not_hold_the_owner(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is over behind the device, also when the transport has been closed before."""
    quiet = threading.Event()
    on_a_device(monkeypatch, quiet.wait)
    pair.writer.close()
    pair.target.close()
    assert not pair.target.is_over
    with pytest.raises(LocalProtocolError, match="wait until it is over"):
        pair.target_transport.deregister(pair.ring_memory)
    pair.writer_transport.close()
    quiet.set()
    assert pair.writer_transport.waits.join(30) and pair.target_transport.waits.join(30)
    assert pair.target.is_over and pair.writer.is_over
    pair.target_transport.deregister(pair.ring_memory)
    pair.close()


class FakeAgent:
    """In the place of a writer's NIXL agent, whose copies are queued on a device."""

    is_closed = False

    def register(self, memory: object, address: int) -> None:
        pass

    def start(self, source: object, target: object, *, source_on_device: bool, target_on_device: bool) -> object:
        return object()

    def is_done(self, request: object) -> bool:
        return True

    def release(self, request: object) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def test_the_agent_of_a_writer_outlives_its_copies_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX crashes if a worker is destroyed while copies of device memory are under way."""
    quiet, waits, agent, memory = threading.Event(), WaitingThread("copies"), FakeAgent(), memory_of(ring_of(4096))
    on_a_device(monkeypatch, quiet.wait)
    owner: Any = SimpleNamespace(own=lambda memory: memory, is_one_sided=True)
    peer = Region(address=1 << 40, num_bytes=4096, device_index=0, is_device=True)
    session = NixlSession(owner, waits, cast(Any, agent), "ipc", peer=peer)
    write = session.write(memory, rng(0, 4096), rng(0, 4096), 1)
    session.close()
    with pytest.raises(TransportClosed):
        write.poll()
    assert not agent.is_closed and not session.is_over
    quiet.set()
    assert waits.join(30)
    assert agent.is_closed and session.is_over


def test_only_the_target_of_a_session_has_a_progress_thread() -> None:
    """A writer's thread would use UCX's CUDA events beside the owner (docs/adr/0041-nixl-progress-thread.md)."""

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    writer, target = NixlTransport(lane="net"), NixlTransport(lane="net")
    memory = target.register(ring_of(4096))
    offer = writer.offer()
    _, answer = target.accept(offer.blob, memory)
    offer.complete(answer)  # UCX's own thread has started, which all sessions share
    offer, before = writer.offer(), threads()
    _, answer = target.accept(offer.blob, memory)
    accepted = threads()
    offer.complete(answer)
    assert (len(accepted - before), len(threads() - accepted)) == (1, 0)
    writer.close()
    target.close()


def test_a_wait_that_fails_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    waits, ran = WaitingThread("waits-that-fail"), threading.Event()
    waits.submit(fail)
    waits.submit(ran.set)
    assert ran.wait(5) and waits.join(5)
    assert "the device is gone" in caplog.text


@contextlib.contextmanager
def no_further_mapping() -> Iterator[None]:
    """As for a process that may map nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def shared_alias() -> tuple[HostMemory, SharedAlias]:
    memory = memory_of(ring_of(1 << 20))
    assert isinstance(memory, HostMemory)
    alias = SharedAlias.of(memory)
    assert alias is not None
    return memory, alias


def _write_to(address: int) -> int:
    """As a late writer: through the kernel; returns its error."""

    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]

    byte = ctypes.create_string_buffer(b"\x77", 1)
    here, there = Part(ctypes.addressof(byte), 1), Part(address, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.process_vm_writev(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return 0 if done == 1 else ctypes.get_errno()


def test_addresses_are_taken_away_and_stay_reserved_where_nothing_can_be_mapped() -> None:
    memory, alias = shared_alias()
    address = alias.address
    assert _write_to(address) == 0 and memory.view[0] == 0x77
    with no_further_mapping():
        alias.revoke()
    memory.view[0] = 1
    assert _write_to(address) == errno.EFAULT and memory.view[0] == 1
    assert _is_mapped(address)
    alias.release()
    assert not _is_mapped(address)


def test_addresses_that_cannot_be_revoked_are_reported() -> None:
    _, alias = shared_alias()
    ctypes.CDLL(None).munmap(ctypes.c_void_p(alias.address), ctypes.c_size_t(1 << 20))
    with no_further_mapping(), pytest.raises(OSError, match="1048576 bytes of shared memory cannot be taken away"):
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
def test_the_network_lane_excludes_transports_that_write_without_the_target(tls: str, left: str) -> None:
    assert transports_without(tls, ("cma", "cuda_ipc", "knem", "xpmem")) == left
