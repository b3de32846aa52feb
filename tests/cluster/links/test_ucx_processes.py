"""The UCX transport between two real processes, also when one of them dies or freezes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.transport.payload import PATTERN, noise, rng
from tests.transport.remote_peer import ROOT, RemotePeer
from transfer.errors import ConfigError, PeerUnreachable, TransportClosed, WriteFailed
from transfer.transport.base import Session
from transfer.transport.inproc import InprocHub, InprocTransport
from transfer.transport.ucx import UcxTransport

LANES = ["shm", "net"]
SIZE = 64 << 20
SEED = 3


class Ends:
    """This process's end of a session, and the other one."""

    def __init__(self, lane: str, here: str, num_bytes: int, environment: dict[str, str] | None = None) -> None:
        self.transport = UcxTransport(lane=lane)  # type: ignore[arg-type]
        self.array = np.full(num_bytes, PATTERN, dtype=np.uint8)
        self.memory = self.transport.register(self.array)
        self.peer = RemotePeer(lane, "target" if here == "writer" else "writer", num_bytes, environment)
        self.session: Session
        if here == "writer":
            offer = self.transport.offer()
            self.session = offer.complete(bytes.fromhex(self.peer.do("accept", offer=offer.blob.hex())))
        else:
            self.session, answer = self.transport.accept(bytes.fromhex(self.peer.do("offer")), self.memory)
            self.peer.do("complete", answer=answer.hex())

    def drive(self, *handles: Any, deadline_s: float = 20.0) -> None:
        ends_at = time.monotonic() + deadline_s
        while not all([handle.poll() for handle in handles]):
            self.session.progress()
            assert time.monotonic() < ends_at, "still pending"

    def progress_for(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            self.session.progress()

    def receive(self, begin: int, end: int, key: int) -> None:
        """A whole transfer from the peer."""
        handle = self.session.expect(self.memory, rng(begin, end), key)
        self.peer.do("write", begin=begin, end=end, target_begin=begin, key=key)
        self.drive(handle)

    def send(self, begin: int, end: int, key: int) -> None:
        """A whole transfer to the peer."""
        self.peer.do("expect", begin=begin, end=end, key=key)
        self.drive(self.session.write(self.memory, rng(begin, end), rng(begin, end), key))

    def close(self) -> tuple[int, str]:
        self.transport.close()
        return self.peer.end()


@pytest.fixture(params=LANES)
def target(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param, "target", SIZE)
    ends.peer.do("fill", seed=SEED)
    yield ends
    ends.close()


@pytest.fixture(params=LANES)
def writer(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param, "writer", SIZE)
    ends.array[:] = noise(SIZE, SEED)
    yield ends
    ends.close()


def test_64_mb_both_ways_and_nothing_is_printed(target: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    target.receive(0, SIZE, key=1)
    assert (target.array == noise(SIZE, SEED)).all()
    target.peer.do("expect", begin=100, end=30_100, key=2)
    target.drive(target.session.write(target.memory, rng(0, 30_000), rng(0, 30_000), 2))
    assert target.peer.do("wait", keys=[2], deadline_s=5) == [30_000]
    assert target.peer.do("is_noise", begin=100, end=30_100, seed=SEED, seed_begin=0)
    target.peer.do("close")
    status, printed = target.close()
    assert (status, printed) == (0, "")
    assert capfd.readouterr() == ("", "")


def test_many_in_flight_and_declines(target: Ends) -> None:
    size, wanted = 50_000, noise(SIZE, SEED)
    keys = [int(key) for key in np.random.default_rng(1).permutation(40)]
    handles = {key: target.session.expect(target.memory, rng(key * size, (key + 1) * size), key) for key in keys[:20]}
    for key in range(40):
        if key % 3:
            target.peer.do("write", begin=key * size, end=(key + 1) * size, target_begin=0, key=key)
        else:
            target.peer.do("decline", key=key)
    target.progress_for(0.02)
    handles |= {key: target.session.expect(target.memory, rng(key * size, (key + 1) * size), key) for key in keys[20:]}
    target.drive(*handles.values())
    for key in range(40):
        got = target.array[key * size : (key + 1) * size]
        assert handles[key].num_bytes == (size if key % 3 else 0)
        assert (got == (wanted[key * size : (key + 1) * size] if key % 3 else PATTERN)).all(), key
    assert target.peer.do("wait", keys=list(range(40)), deadline_s=5) == [size if key % 3 else 0 for key in range(40)]


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.004, 0.02])
def test_writer_killed_in_mid_transfer(target: Ends, delay_s: float) -> None:
    """The survivor lives, hears of it, and can prove that nothing lands any more. (UCX without error handling would abort it.)"""
    target.receive(0, 4096, key=0)
    quarter = SIZE // 4
    handles = [target.session.expect(target.memory, rng(i * quarter, (i + 1) * quarter), 1 + i) for i in range(4)]
    for i in range(4):
        target.peer.start("write", begin=i * quarter, end=(i + 1) * quarter, target_begin=0, key=1 + i)
    target.progress_for(delay_s)
    target.peer.process.kill()
    target.peer.process.wait()
    ends_at = time.monotonic() + 5
    for i, handle in enumerate(handles):
        place = slice(i * quarter, (i + 1) * quarter)
        if _settles(target, handle, ends_at):
            # No lane here completes without an error what did not arrive; the contract alone would allow it.
            assert (target.array[place] == noise(SIZE, SEED)[place]).all()
    with pytest.raises(WriteFailed):
        target.drive(target.session.expect(target.memory, rng(0, 1), 99), deadline_s=5)
    _assert_nothing_lands_after_close(target)


def _settles(ends: Ends, handle: Any, ends_at: float) -> bool:
    """True when it settles well, False when it fails; within the time."""
    while time.monotonic() < ends_at:
        ends.session.progress()
        try:
            if handle.poll():
                return True
        except WriteFailed:
            return False
    raise AssertionError("a handle is pending although the peer is dead")


def _assert_nothing_lands_after_close(ends: Ends) -> None:
    fd = ends.session.fileno()
    begun = time.monotonic()
    ends.session.close()
    assert time.monotonic() - begun < 1.0
    assert fd is not None and not os.path.exists(f"/proc/self/fd/{fd}")
    ends.array[:] = 0x33
    time.sleep(0.2)
    assert (ends.array == 0x33).all()


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.02])
def test_target_killed_in_mid_transfer(writer: Ends, delay_s: float) -> None:
    writer.send(0, 4096, key=0)
    quarter = SIZE // 4
    for i in range(2):
        writer.peer.do("expect", begin=i * quarter, end=(i + 1) * quarter, key=1 + i)
    places = [rng(i * quarter, (i + 1) * quarter) for i in range(4)]
    handles = [writer.session.write(writer.memory, place, place, 1 + i) for i, place in enumerate(places)]
    writer.progress_for(delay_s)
    writer.peer.process.kill()
    writer.peer.process.wait()
    ends_at = time.monotonic() + 5
    settled = [_settles(writer, handle, ends_at) for handle in handles]
    assert settled[2:] == [False, False]  # nobody expected these
    fd = writer.session.fileno()
    writer.session.close()
    assert fd is not None and not os.path.exists(f"/proc/self/fd/{fd}")


def test_a_frozen_writer_cannot_write_after_close(target: Ends) -> None:
    target.receive(0, 4096, key=0)
    target.session.expect(target.memory, rng(0, SIZE), 1)
    target.peer.start("write", begin=0, end=SIZE, target_begin=0, key=1)
    time.sleep(0.003)
    target.peer.process.send_signal(signal.SIGSTOP)
    target.progress_for(0.05)
    target.session.close()
    target.array[:] = 0x44
    target.peer.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (target.array == 0x44).all()
    target.peer._hear()  # "write" had been carried out, and its process lives and sees the session's end or its success
    (outcome,) = target.peer.do("wait", keys=[1], deadline_s=5)
    assert outcome in (SIZE, "WriteFailed")
    status, _ = target.close()
    assert status == 0


def test_a_frozen_target_does_not_hold_the_writer(writer: Ends) -> None:
    writer.send(0, 4096, key=0)
    writer.peer.do("expect", begin=0, end=SIZE, key=1)
    writer.peer.process.send_signal(signal.SIGSTOP)
    handle = writer.session.write(writer.memory, rng(0, SIZE), rng(0, SIZE), 1)
    writer.progress_for(0.1)
    assert not handle.poll()
    begun = time.monotonic()
    writer.session.close()
    assert time.monotonic() - begun < 1.0
    with pytest.raises(TransportClosed):
        handle.poll()
    writer.peer.process.send_signal(signal.SIGCONT)
    # It wakes and may read what the source range holds by then: its own bytes are spoilt, which the digest tells; it lives.
    (outcome,) = writer.peer.do("wait", keys=[1], deadline_s=5)
    assert outcome in (SIZE, "WriteFailed")
    assert writer.close()[0] == 0


def test_a_new_session_with_the_same_peer(target: Ends) -> None:
    target.receive(0, 100_000, key=1)
    target.peer.do("close")
    target.session.close()
    target.peer.end()
    again = Ends(target.session.lane.removeprefix("ucx/"), "target", 1 << 20)
    again.peer.do("fill", seed=SEED)
    again.receive(0, 1 << 20, key=1)
    assert (again.array == noise(1 << 20, SEED)).all()
    again.close()


@pytest.mark.parametrize(("lane", "word"), [("shm", "cma/memory"), ("net", "tcp/")])
def test_the_lane_is_what_ucx_uses(lane: str, word: str) -> None:
    """UCX itself prints what it chose for bulk tag sends."""
    ends = Ends(lane, "target", 1 << 20, {"UCX_PROTO_INFO": "y"})
    assert ends.session.lane == f"ucx/{lane}" and not ends.session.obstacle, "what is asked for is no falling back"
    ends.receive(0, 1 << 20, key=1)
    _, printed = ends.close()
    lines = printed.splitlines()
    begin = next(i for i, line in enumerate(lines) if "tagged message by ucp_tag_send* from host memory" in line)
    bulk = next(line for line in lines[begin:] if "..inf" in line)
    assert word in bulk
    assert ("zero-copy read from remote" in bulk) == (lane == "shm")
    assert lane == "shm" or "cma" not in printed


def test_auto_takes_shared_memory_where_it_works() -> None:
    ends = Ends("auto", "target", 4096)
    assert ends.session.lane == "ucx/shm" and not ends.session.obstacle
    ends.close()


def test_ucx_tls_without_cma_is_respected() -> None:
    ends = Ends("auto", "target", 1 << 20, {"UCX_TLS": "tcp,self"})
    assert ends.session.lane == "ucx/net" and ends.session.obstacle == "UCX_TLS of one end leaves out cma"
    ends.peer.do("fill", seed=SEED)
    ends.receive(0, 1 << 20, key=1)
    assert (ends.array == noise(1 << 20, SEED)).all()
    ends.close()


def test_lanes_that_contradict_each_other_are_refused() -> None:
    memory = (target := UcxTransport(lane="net")).register(bytearray(8))
    with pytest.raises(ConfigError, match="lane of transport ucx is shm at the writer and net at the target"):
        target.accept(UcxTransport(lane="shm").offer().blob, memory)


def test_shm_is_refused_where_it_cannot_be() -> None:
    peer = RemotePeer("shm", "writer", 64, {"UCX_TLS": "tcp,self"})
    transport = UcxTransport()
    memory = transport.register(bytearray(64))
    with pytest.raises(PeerUnreachable, match=r"lane shm of transport ucx is not possible: UCX_TLS of one end leaves out cma"):
        transport.accept(bytes.fromhex(peer.do("offer")), memory)
    peer.end()


def test_inproc_across_processes_is_refused_in_one_line() -> None:
    script = "from transfer.transport.inproc import *; print(InprocTransport(InprocHub()).offer().blob.hex())"
    child = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=30)
    transport = InprocTransport(InprocHub())
    with pytest.raises(ConfigError) as caught:
        transport.accept(bytes.fromhex(out.strip()), transport.register(bytearray(8)))
    host = os.uname().nodename
    assert str(caught.value) == (
        f"transport inproc joins two ends of one process; writer runs in pid {child.pid} on host {host}, "
        f"target in pid {os.getpid()}: choose transport: ucx"
    )
