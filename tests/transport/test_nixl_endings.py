"""When a NIXL session may be called over: the counts of a writer's threads, and a device of our own that has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transport.contract import Pair, open_pair
from tests.transport.payload import rng
from transfer.errors import LocalProtocolError, TransportClosed
from transfer.transport import nixl_session
from transfer.transport.nixl import _UNREVOCABLE
from transfer.transport.nixl_library import transports_without
from transfer.transport.nixl_revocation import _COPY_NS, _WRITE_CALLS, CopyWatch

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
    assert not pair.target.is_over
    assert "illegal memory access" in caplog.text
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.target_transport.deregister(pair.ring_memory)
    pair.close()


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
