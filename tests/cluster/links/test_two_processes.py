"""UCX and NIXL between two real processes on every lane, also when one of them dies, freezes, or writes on after its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.transport.ends import SEED, Ends, exchange
from tests.transport.payload import PATTERN, noise, ring_of, rng
from tests.transport.remote_peer import RemotePeer
from transfer.errors import LocalProtocolError, PeerUnreachable, TransportClosed, TransportError, WriteFailed
from transfer.transport.nixl import NixlTransport
from transfer.transport.ucx import UcxTransport

NIXL = ["nixl-shm", "nixl-net"]
KINDS = ["ucx-shm", "ucx-net", *NIXL]
SIZE = 32 << 20
QUARTER = SIZE // 4
QUARTERS = [rng(index * QUARTER, (index + 1) * QUARTER) for index in range(4)]


def whole(keys: range) -> list[list[int]]:
    """Places of the peer's `write_many`: all of its memory, once for each key."""
    return [[0, SIZE, key] for key in keys]


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """This process has the target's end."""
    ends = Ends(request.param, "target", SIZE)
    yield ends
    ends.close()


@pytest.fixture(params=KINDS)
def writer(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param, "writer", SIZE)
    yield ends
    ends.close()


only_nixl = {"argvalues": NIXL, "indirect": True}


def test_every_lane_exchanges_bytes_without_output(target: Ends, capfd: pytest.CaptureFixture[str]) -> None:
    assert not target.session.obstacle, "what is asked for is no falling back"
    exchange(target)
    target.peer.do("close")
    target.session.close()
    assert target.close() == (0, "")
    assert capfd.readouterr() == ("", "")


def assert_nothing_lands(ends: Ends) -> None:
    """The proof of death: once the session is over, the memory is the target's own."""
    fd = ends.session.fileno()
    ends.session.close()
    assert ends.is_over()
    assert fd is None or not os.path.exists(f"/proc/self/fd/{fd}")
    ends.array[:] = 0x33
    time.sleep(0.2)
    assert (ends.array == 0x33).all()


@pytest.mark.parametrize("delay_s", [0.0, 0.004])
def test_writer_killed_in_mid_transfer(target: Ends, delay_s: float) -> None:
    """The survivor lives, hears of it, and can prove that nothing lands any more. (UCX without error handling would abort it.)"""
    target.receive(0, 4096, key=0)
    handles = [handle for key, place in enumerate(QUARTERS, 1) for handle in target.expect(place.begin, place.end, key)]
    target.peer.start("write_many", places=[[place.begin, place.end, key] for key, place in enumerate(QUARTERS, 1)])
    target.progress_for(delay_s)
    target.peer.process.kill()
    target.peer.process.wait()
    for place, handle in zip(QUARTERS, handles, strict=False):
        if target.settles(handle):
            # No lane here completes without an error what did not arrive; the contract alone would allow it.
            assert (target.array[place.begin : place.end] == noise(SIZE, SEED)[place.begin : place.end]).all()
    if not target.is_one_sided:
        with pytest.raises(WriteFailed):
            target.drive(*target.expect(0, 1, key=99))
    assert_nothing_lands(target)


@pytest.mark.parametrize("delay_s", [0.0, 0.004])
def test_target_killed_in_mid_transfer(writer: Ends, delay_s: float) -> None:
    """The survivor lives, every handle ends, and so does every later one."""
    writer.send(0, 4096, key=0)
    if not writer.is_one_sided:
        for key, place in enumerate(QUARTERS[:2], 1):
            writer.peer.do("expect", begin=place.begin, end=place.end, key=key)
    handles = [writer.session.write(writer.memory, place, place, key) for key, place in enumerate(QUARTERS, 1)]
    writer.progress_for(delay_s)
    writer.peer.process.kill()
    writer.peer.process.wait()
    settled = [writer.settles(handle) for handle in handles]
    assert writer.is_one_sided or settled[2:] == [False, False], "nobody expected these"
    later = [writer.session.write(writer.memory, rng(0, SIZE), rng(0, SIZE), 90 + number) for number in range(3)]
    assert [writer.settles(handle) for handle in later] == [False] * 3
    with pytest.raises(WriteFailed, match="key 99 on session"):
        writer.drive(writer.session.decline(99))
    if writer.session.lane == "nixl/net" and not settled[0]:
        # TCP may still send out of memory of a write that had begun. A later one may not have been: NIXL refuses it once it has
        # noticed the end.
        with pytest.raises(LocalProtocolError, match="is in use by nixl/net"):
            writer.transport.deregister(writer.memory)
    fd = writer.session.fileno()
    writer.session.close()
    assert writer.session.is_over
    assert fd is None or not os.path.exists(f"/proc/self/fd/{fd}")
    writer.transport.deregister(writer.memory)


def test_a_frozen_writer_cannot_write_after_close(target: Ends) -> None:
    target.receive(0, 4096, key=0)
    keys = range(1, 129) if target.is_one_sided else range(1, 2)  # more than can be written in the time until SIGSTOP
    target.expect(0, SIZE, key=1)
    target.peer.start("write_many", places=whole(keys))
    time.sleep(0.004)
    target.peer.process.send_signal(signal.SIGSTOP)
    target.progress_for(0.05)
    target.session.close()
    assert target.is_over()
    target.array[:] = 0x44
    target.peer.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (target.array == 0x44).all()
    target.peer.hear()  # its writes were carried out, and its process lives and sees the session's end or its success
    outcomes = target.peer.do("wait", keys=list(keys), deadline_s=60)
    assert set(outcomes) <= {SIZE, "WriteFailed"} and (not target.is_one_sided or outcomes[-1] == "WriteFailed")
    assert target.close()[0] == 0


def test_a_frozen_target_does_not_hold_the_writer(writer: Ends) -> None:
    """A write stays pending until the owner closes, but for NIXL's over shared memory, which needs nothing of the target."""
    writer.send(0, 4096, key=0)
    if not writer.is_one_sided:
        writer.peer.do("expect", begin=0, end=SIZE, key=1)
    writer.peer.process.send_signal(signal.SIGSTOP)
    handle = writer.session.write(writer.memory, rng(0, SIZE), rng(0, SIZE), 1)
    if writer.session.lane == "nixl/shm":
        writer.drive(handle)
        writer.session.close()
    else:
        writer.progress_for(0.5)
        assert not handle.poll()
        writer.session.close()
        with pytest.raises(TransportClosed, match="was closed while key 1"):
            handle.poll()
    writer.peer.process.send_signal(signal.SIGCONT)
    if not writer.is_one_sided:
        # It wakes and may read what the source range holds by then: its own bytes are spoilt, which the digest tells; it lives.
        (outcome,) = writer.peer.do("wait", keys=[1], deadline_s=60)
        assert outcome in (SIZE, "WriteFailed")
    assert writer.close()[0] == 0


@pytest.mark.parametrize("target", **only_nixl)
@pytest.mark.parametrize("delay_s", [0.002, 0.02])
def test_a_busy_writer_cannot_write_after_close(target: Ends, delay_s: float) -> None:
    target.receive(0, 4096, key=0)
    target.peer.do("write_many", places=whole(range(1, 129)))
    time.sleep(delay_s)
    assert_nothing_lands(target)
    assert target.peer.do("wait", keys=[128], deadline_s=60) == ["WriteFailed"]


@pytest.mark.parametrize("target", ["nixl-shm"], indirect=True)
def test_a_hostile_writer_cannot_write_after_close(target: Ends) -> None:
    """It never looks whether it may, and writes to the address that it was once given."""
    target.peer.start("hammer", seconds=5.0)
    target.until(lambda: target.array[-1] != PATTERN)  # it has begun: whole rounds land
    assert_nothing_lands(target)
    # A mapping of the same size would be put where the revoked one was, were that place not kept.
    again = [ring_of(SIZE) for _ in range(3)]
    time.sleep(0.2)
    assert all((other == PATTERN).all() for other in again)
    assert target.peer.hear() == "Bad address"


@pytest.mark.parametrize("target", **only_nixl)
def test_an_idle_target_sleeps_and_still_serves(target: Ends) -> None:
    """Its progress thread waits on UCX's descriptor: NIXL's own default would poll, a whole core for each session."""
    target.receive(0, 1 << 20, key=1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert target.peer.do("cpu_s", seconds=0.5) < 0.1
    target.peer.do("write", begin=0, end=SIZE, target_begin=0, key=2)
    assert target.peer.do("wait", keys=[2], deadline_s=60) == [SIZE]  # nobody here calls progress()
    assert (target.array == noise(SIZE, SEED)).all()


@pytest.mark.parametrize("target", **only_nixl)
def test_attaching_again_and_again(target: Ends) -> None:
    """Each session offers the same memory again, and keeps no mapping of an earlier session."""
    before = _num_mappings_of(SIZE)
    for key in range(1, 6):
        target.receive(0, 100_000, key=key)
        target.open_again()
    assert _num_mappings_of(SIZE) <= before


def _num_mappings_of(num_bytes: int) -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        ends = [line.split(maxsplit=1)[0].split("-") for line in maps]
    return sum(1 for begin, end in ends if int(end, 16) - int(begin, 16) == num_bytes)


def test_a_target_that_is_gone_before_the_answer_arrives() -> None:
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
        ends_at = time.monotonic() + 60
        while not handle.poll() and time.monotonic() < ends_at:
            session.progress()
    offer.close()
    transport.close()


@pytest.mark.parametrize(
    ("kind", "begins", "words"),
    [
        ("ucx-shm", "tagged message by ucp_tag_send* from host memory", ["cma/memory"]),
        ("ucx-net", "tagged message by ucp_tag_send* from host memory", ["tcp/"]),
        ("nixl-shm", "remote memory write by ucp_put*", ["cma/memory"]),
        ("nixl-net", "remote memory write by ucp_put*", ["tcp/", "sysv"]),
    ],
)
def test_the_lane_is_what_ucx_uses(kind: str, begins: str, words: list[str]) -> None:
    """UCX itself prints what it chose for bulk messages to another process."""
    ends = Ends(kind, "target", 1 << 20, {"UCX_PROTO_INFO": "y", "UCX_NET_DEVICES": "lo"})
    assert ends.session.lane == kind.replace("-", "/")
    ends.receive(0, 1 << 20, key=1)
    _, printed = ends.close()
    lines = printed.splitlines()
    chosen = [i for i, line in enumerate(lines) if begins in line and (not ends.is_one_sided or "intra-node" in lines[i - 1])]
    assert chosen, printed
    bulk = next(line for line in lines[chosen[-1 if ends.is_one_sided else 0] :] if "..inf" in line)
    assert any(word in bulk for word in words), bulk
    assert ("zero-copy read from remote" in bulk) == (kind == "ucx-shm")
    assert kind.endswith("shm") or "cma" not in printed


def test_ucx_tls_without_cma_is_respected() -> None:
    ends = Ends("ucx-auto", "target", 1 << 20, {"UCX_TLS": "tcp,self"})
    assert ends.session.lane == "ucx/net" and ends.session.obstacle == "UCX_TLS of one end leaves out cma"
    ends.receive(0, 1 << 20, key=1)
    assert (ends.array == noise(1 << 20, SEED)).all()
    ends.close()


def test_auto_takes_shared_memory_only_for_memory_that_it_can_take_away() -> None:
    peer = RemotePeer("nixl-auto", "writer", 1 << 20)
    transport = NixlTransport()
    private, shared = np.zeros(1 << 20, dtype=np.uint8), ring_of(1 << 20)
    found = []
    for array in (private, shared):
        session, answer = transport.accept(bytes.fromhex(peer.do("offer")), transport.register(array))
        found.append((session.lane, session.obstacle))
        assert peer.do("complete", answer=answer.hex()) == session.lane
        peer.do("fill", seed=SEED)
        peer.do("write", begin=0, end=1 << 20, target_begin=0, key=1)
        assert peer.do("wait", keys=[1], deadline_s=60) == [1 << 20]
        assert (array == noise(1 << 20, SEED)).all()
        peer.do("close")
        session.close()
        peer.do("new_offer")
    assert found == [("nixl/net", "the target's memory is not one shared mapping"), ("nixl/shm", "")]
    transport.close()
    peer.end()


def test_shm_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, Any, dict[str, str], str]] = [
        ("shm", UcxTransport, {"UCX_TLS": "tcp,self"}, "ucx is not possible: UCX_TLS of one end leaves out cma"),
        ("nixl-shm", NixlTransport, {}, "nixl is not possible: the target's memory is not one shared"),
    ]
    for lane, made, environment, words in cases:
        peer, transport = RemotePeer(lane, "writer", 64, environment), made()
        with pytest.raises(PeerUnreachable, match=f"lane shm of transport {words}"):
            transport.accept(bytes.fromhex(peer.do("offer")), transport.register(np.zeros(64, dtype=np.uint8)))
        if made is NixlTransport:
            monkeypatch.setenv("UCX_TLS", "tcp,self")
            with pytest.raises(PeerUnreachable, match=r"UCX_TLS=tcp,self leaves out cma"):
                transport.accept(bytes.fromhex(peer.do("offer")), transport.register(ring_of(8)))
        transport.close()
        peer.end()
