"""The NIXL transport between two real processes, also when one of them dies, freezes, or writes on after it was closed out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.transport.payload import PATTERN, noise, ring_of, rng
from tests.transport.remote_peer import RemotePeer
from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportClosed, TransportError, WriteFailed
from transfer.transport.base import Session
from transfer.transport.nixl import NixlTransport

LANES = ["shm", "net"]
SIZE = 32 << 20
SEED = 3


class Ends:
    """This process's end of a session, and the other one."""

    def __init__(self, lane: str, here: str, num_bytes: int, environment: dict[str, str] | None = None) -> None:
        self.transport = NixlTransport(lane=lane)  # type: ignore[arg-type]
        self.array = ring_of(num_bytes)
        self.memory = self.transport.register(self.array)
        self.here = here
        self.peer = RemotePeer(f"nixl-{lane}", "target" if here == "writer" else "writer", num_bytes, environment)
        self.session: Session = self.open()

    def open(self) -> Session:
        if self.here == "writer":
            offer = self.transport.offer()
            return offer.complete(bytes.fromhex(self.peer.do("accept", offer=offer.blob.hex())))
        session, answer = self.transport.accept(bytes.fromhex(self.peer.do("offer")), self.memory)
        self.peer.do("complete", answer=answer.hex())
        return session

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
        """A whole write of the peer's."""
        self.peer.do("write", begin=begin, end=end, target_begin=begin, key=key)
        assert self.peer.do("wait", keys=[key], deadline_s=20) == [end - begin]

    def is_over_within(self, seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while not self.session.is_over and time.monotonic() < ends_at:
            time.sleep(0.001)
        return self.session.is_over

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


def outcome_of(ends: Ends, handle: Any, deadline_s: float = 10.0) -> str:
    """done, failed, or pending when the time is over."""
    ends_at = time.monotonic() + deadline_s
    while time.monotonic() < ends_at:
        ends.session.progress()
        try:
            if handle.poll():
                return "done"
        except WriteFailed:
            return "failed"
    return "pending"


def test_32_mb_and_nothing_is_printed(target: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    assert target.session.lane == f"nixl/{target.transport.wanted_lane}"
    target.receive(0, SIZE, key=1)
    assert (target.array == noise(SIZE, SEED)).all()
    target.peer.do("close")
    target.session.close()
    assert target.session.is_over
    assert target.close() == (0, "")
    assert capfd.readouterr() == ("", "")


def test_many_in_flight_in_any_order(writer: Ends) -> None:
    size = 100_000
    keys = [int(key) for key in np.random.default_rng(1).permutation(40)]
    places = [rng(key * size, (key + 1) * size) for key in keys]
    writer.drive(*(writer.session.write(writer.memory, place, place, key) for place, key in zip(places, keys, strict=True)))
    assert writer.peer.do("is_noise", begin=0, end=40 * size, seed=SEED, seed_begin=0)


def test_an_idle_target_sleeps_and_still_serves(target: Ends) -> None:
    """Its progress thread waits on UCX's descriptor: NIXL's own default would poll, a whole core for each session."""
    target.receive(0, 1 << 20, key=1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02
    assert target.peer.do("cpu_s", seconds=0.5) < 0.02
    target.receive(0, SIZE, key=2)  # nobody here calls progress()
    assert (target.array == noise(SIZE, SEED)).all()


def test_only_the_target_of_a_session_has_a_progress_thread() -> None:
    """At a writer it would look at UCX's CUDA events beside the owner (docs/adr/0041-nixl-progress-thread.md)."""

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    writer, target = NixlTransport(lane="net"), NixlTransport(lane="net")
    memory = target.register(ring_of(4096))
    offer = writer.offer()
    _, answer = target.accept(offer.blob, memory)
    offer.complete(answer)  # UCX's own thread has started: all sessions share it
    offer, before = writer.offer(), threads()
    _, answer = target.accept(offer.blob, memory)
    behind_accept = threads()
    offer.complete(answer)
    assert (len(behind_accept - before), len(threads() - behind_accept)) == (1, 0)
    writer.close()
    target.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
def test_target_killed_in_mid_write(writer: Ends, delay_s: float) -> None:
    """The survivor lives, every handle ends, and so does every later one."""
    writer.drive(writer.session.write(writer.memory, rng(0, 4096), rng(0, 4096), 0))
    quarter = SIZE // 4
    places = [rng(i * quarter, (i + 1) * quarter) for i in range(4)]
    handles = [writer.session.write(writer.memory, place, place, 1 + i) for i, place in enumerate(places)]
    writer.progress_for(delay_s)
    writer.peer.process.kill()
    writer.peer.process.wait()
    outcomes = [outcome_of(writer, handle) for handle in handles]
    assert set(outcomes) <= {"done", "failed"}
    later = [writer.session.write(writer.memory, rng(0, SIZE), rng(0, SIZE), 90 + i) for i in range(3)]
    assert [outcome_of(writer, handle) for handle in later] == ["failed"] * 3
    with pytest.raises(WriteFailed, match="key 99 on session"):
        writer.session.decline(99).poll()
    # TCP may still send out of memory of a write that had begun, as the first had. A later one may not have been: NIXL refuses
    # it once it has noticed the end.
    if outcomes[0] == "failed" and writer.session.lane == "nixl/net":
        assert writer.session.uses(writer.memory)
    if writer.session.uses(writer.memory):
        with pytest.raises(LocalProtocolError, match="in use by a session"):
            writer.transport.deregister(writer.memory)
    writer.session.close()
    assert writer.session.is_over
    writer.transport.deregister(writer.memory)


def test_a_frozen_target_does_not_hold_the_writer(writer: Ends) -> None:
    """Over TCP the write stays pending until the owner closes; over shared memory it needs nothing of the target."""
    writer.drive(writer.session.write(writer.memory, rng(0, 4096), rng(0, 4096), 0))
    writer.peer.process.send_signal(signal.SIGSTOP)
    handle = writer.session.write(writer.memory, rng(0, SIZE), rng(0, SIZE), 1)
    wanted = "done" if writer.session.lane == "nixl/shm" else "pending"
    assert outcome_of(writer, handle, deadline_s=0.5) == wanted
    begun = time.monotonic()
    writer.session.close()
    assert time.monotonic() - begun < 1.0
    if wanted == "pending":
        with pytest.raises(TransportClosed, match="was closed while key 1"):
            handle.poll()
    writer.peer.process.send_signal(signal.SIGCONT)
    assert writer.close()[0] == 0


def test_a_frozen_writer_cannot_write_after_close(target: Ends) -> None:
    target.receive(0, 4096, key=0)
    keys = list(range(1, 9))
    target.peer.do("write_whole", keys=keys)
    time.sleep(0.004)
    target.peer.process.send_signal(signal.SIGSTOP)
    time.sleep(0.02)
    begun = time.monotonic()
    target.session.close()
    assert time.monotonic() - begun < 1.0
    assert target.is_over_within(1.0)
    target.array[:] = 0x44
    target.peer.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (target.array == 0x44).all()
    outcomes = target.peer.do("wait", keys=keys, deadline_s=10)
    assert set(outcomes) <= {SIZE, "WriteFailed"} and outcomes[-1] == "WriteFailed"
    assert target.close()[0] == 0


@pytest.mark.parametrize("delay_s", [0.002, 0.02])
def test_a_busy_writer_cannot_write_after_close(target: Ends, delay_s: float) -> None:
    target.receive(0, 4096, key=0)
    target.peer.do("write_whole", keys=list(range(1, 33)))
    time.sleep(delay_s)
    target.session.close()
    assert target.is_over_within(1.0)
    target.array[:] = 0x55
    time.sleep(0.1)
    assert (target.array == 0x55).all()
    assert target.peer.do("wait", keys=[32], deadline_s=10) == ["WriteFailed"]


def test_a_hostile_writer_cannot_write_after_close() -> None:
    """It never looks whether it may, and writes to the address that it was once given."""
    ends = Ends("shm", "target", SIZE)
    ends.peer.do("fill", seed=SEED)
    ends.peer.start("hammer", seconds=1.0)
    ends_at = time.monotonic() + 10
    while (ends.array[-1] == PATTERN) and time.monotonic() < ends_at:
        time.sleep(0.001)  # it has begun: whole rounds land
    ends.session.close()
    assert ends.is_over_within(1.0)
    ends.array[:] = 0x66
    # A mapping of the same size would be put where the revoked one was, were that place not kept.
    again = [ring_of(SIZE) for _ in range(3)]
    time.sleep(0.2)
    assert (ends.array == 0x66).all()
    assert all((other == PATTERN).all() for other in again)
    assert ends.peer._hear() == "Bad address"
    ends.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.004])
def test_writer_killed_in_mid_write(target: Ends, delay_s: float) -> None:
    target.receive(0, 4096, key=0)
    target.peer.do("write_whole", keys=[1, 2, 3, 4])
    time.sleep(delay_s)
    target.peer.process.kill()
    target.peer.process.wait()
    target.session.close()
    assert target.is_over_within(1.0)
    target.array[:] = 0x33
    time.sleep(0.1)
    assert (target.array == 0x33).all()


def test_attaching_again_and_again(target: Ends) -> None:
    """The same memory, offered anew each time; no mapping of a session before is kept."""
    before = _num_mappings_of(SIZE)
    for key in range(1, 6):
        target.receive(0, 100_000, key=key)
        target.peer.do("close")
        target.session.close()
        assert target.session.is_over
        target.array[:] = PATTERN
        target.peer.do("new_offer")
        target.session = target.open()
    target.receive(0, SIZE, key=9)
    assert (target.array == noise(SIZE, SEED)).all()
    assert _num_mappings_of(SIZE) <= before


def _num_mappings_of(num_bytes: int) -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ends = [line.split(maxsplit=1)[0].split("-") for line in maps]
    return sum(1 for begin, end in ends if int(end, 16) - int(begin, 16) == num_bytes)


def test_deregistered_memory_is_refused_and_can_be_registered_again(writer: Ends) -> None:
    place = rng(0, 1 << 20)
    writer.drive(writer.session.write(writer.memory, place, place, 1))
    writer.transport.deregister(writer.memory)
    with pytest.raises(LocalProtocolError, match="not registered"):
        writer.session.write(writer.memory, place, place, 2)
    writer.memory = writer.transport.register(writer.array)
    writer.drive(writer.session.write(writer.memory, place, rng(1 << 20, 2 << 20), 3))
    assert writer.peer.do("is_noise", begin=1 << 20, end=2 << 20, seed=SEED, seed_begin=0)


def test_a_target_that_is_gone_before_the_answer_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    peer = RemotePeer("nixl-net", "target", 1 << 20)
    transport = NixlTransport(lane="net")
    memory = transport.register(bytearray(64))
    offer = transport.offer()
    answer = bytes.fromhex(peer.do("accept", offer=offer.blob.hex()))
    peer.process.kill()
    peer.process.wait()
    with pytest.raises(TransportError):
        session = offer.complete(answer)
        handle = session.write(memory, rng(0, 64), rng(0, 64), 1)
        ends_at = time.monotonic() + 20
        while not handle.poll() and time.monotonic() < ends_at:
            session.progress()
    offer.close()
    transport.close()


@pytest.mark.parametrize(("lane", "word"), [("shm", "cma/memory"), ("net", "tcp/")])
def test_the_lane_is_what_ucx_uses(lane: str, word: str) -> None:
    """UCX itself prints what it chose for puts to another process."""
    ends = Ends(lane, "target", 1 << 20, {"UCX_PROTO_INFO": "y", "UCX_NET_DEVICES": "lo"})
    ends.receive(0, 1 << 20, key=1)
    _, printed = ends.close()
    lines = printed.splitlines()
    puts = [i for i, line in enumerate(lines) if "remote memory write by ucp_put*" in line and "intra-node" in lines[i - 1]]
    assert puts, printed
    bulk = next(line for line in lines[puts[-1] :] if "..inf" in line)
    assert word in bulk or (lane == "net" and "sysv" in bulk)
    assert lane == "shm" or "cma" not in printed


def test_auto_takes_shared_memory_only_for_memory_that_it_can_take_away() -> None:
    peer = RemotePeer("nixl-auto", "writer", 1 << 20)
    transport = NixlTransport()
    private, shared = np.zeros(1 << 20, dtype=np.uint8), ring_of(1 << 20)
    lanes, obstacles = [], []
    for array in (private, shared):
        session, answer = transport.accept(bytes.fromhex(peer.do("offer")), transport.register(array))
        lanes.append(session.lane)
        obstacles.append(session.obstacle)
        assert peer.do("complete", answer=answer.hex()) == session.lane
        peer.do("fill", seed=SEED)
        peer.do("write", begin=0, end=1 << 20, target_begin=0, key=1)
        assert peer.do("wait", keys=[1], deadline_s=20) == [1 << 20]
        assert (array == noise(1 << 20, SEED)).all()
        peer.do("close")
        session.close()
        peer.do("new_offer")
    assert lanes == ["nixl/net", "nixl/shm"]
    assert obstacles == ["the target's memory is not one shared mapping", ""]
    transport.close()
    peer.end()


def test_shm_is_refused_where_it_cannot_be() -> None:
    peer = RemotePeer("nixl-shm", "writer", 64)
    transport = NixlTransport()
    with pytest.raises(
        PeerUnreachable, match=r"lane shm of transport nixl is not possible: the target's memory is not one shared"
    ):
        transport.accept(bytes.fromhex(peer.do("offer")), transport.register(np.zeros(8, dtype=np.uint8)))
    os.environ["UCX_TLS"] = "tcp,self"
    try:
        with pytest.raises(PeerUnreachable, match=r"UCX_TLS=tcp,self leaves out cma"):
            transport.accept(bytes.fromhex(peer.do("offer")), transport.register(ring_of(8)))
    finally:
        del os.environ["UCX_TLS"]
    transport.close()
    peer.end()


def test_lanes_and_backends_that_contradict_each_other_are_refused() -> None:
    target = NixlTransport(lane="net")
    memory = target.register(bytearray(8))
    with pytest.raises(ConfigError, match="lane of transport nixl is shm at the writer and net at the target"):
        target.accept(NixlTransport(lane="shm").offer().blob, memory)
    with pytest.raises(ConfigError, match=r"backend NOSUCH of transport nixl is not installed; this NIXL has .*UCX"):
        NixlTransport(backend="NOSUCH")
    with pytest.raises(ConfigError, match="takes no UCX options"):
        NixlTransport(backend="LIBFABRIC", options={"TLS": "tcp"})
    with pytest.raises(ConfigError, match="lane 'fast' of transport nixl is unknown"):
        NixlTransport(lane="fast")  # type: ignore[arg-type]
