"""The contract of transfer/transport/base.py, over every transport, both ends in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.contract import (
    KINDS,
    TWO_SIDED,
    UCX,
    Pair,
    open_pair,
    open_sessions,
)
from tests.transport.payload import PATTERN, rng
from transfer.errors import ConfigError, LocalProtocolError, TransportClosed, TransportError, WriteFailed
from transfer.transport.base import Handle
from transfer.transport.inproc import InprocHub, InprocTransport
from transfer.transport.ucx import UcxTransport


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = open_pair(request.param)
    yield pair
    pair.close()


@pytest.fixture(params=TWO_SIDED)
def two_sided(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = open_pair(request.param)
    yield pair
    pair.close()


# Bytes


@pytest.mark.parametrize("num_bytes", [1, 91, 1373, 8193, 300_001, 1 << 20])
def test_exact_bytes_land_in_the_range_and_nowhere_else(pair: Pair, num_bytes: int) -> None:
    begin = min(13, pair.ring.nbytes - num_bytes)
    pair.move(rng(pair.source.nbytes - num_bytes, pair.source.nbytes), rng(begin, begin + num_bytes), key=3)
    assert (pair.ring[begin : begin + num_bytes] == pair.source[pair.source.nbytes - num_bytes :]).all()
    assert (pair.ring[:begin] == PATTERN).all()
    assert (pair.ring[begin + num_bytes :] == PATTERN).all()


@pytest.mark.parametrize("kind", KINDS)
def test_64_mb_in_one_write(kind: str) -> None:
    pair = open_pair(kind, source_bytes=64 << 20, ring_bytes=64 << 20)
    pair.move(rng(0, 64 << 20), rng(0, 64 << 20), key=1)
    assert (pair.ring == pair.source).all()
    pair.close()


def test_a_write_does_not_land_before_it_is_expected(two_sided: Pair) -> None:
    write = two_sided.writer.write(two_sided.source_memory, rng(0, 1 << 20), rng(0, 1 << 20), 1)
    two_sided.turn(200)
    assert (two_sided.ring == PATTERN).all()
    receive = two_sided.target.expect(two_sided.ring_memory, rng(0, 1 << 20), 1)
    assert receive.num_bytes == 0
    two_sided.drive(write, receive)
    assert (two_sided.ring == two_sided.source).all() and receive.num_bytes == 1 << 20


def test_the_target_decides_where_bytes_land(two_sided: Pair) -> None:
    """A writer that names another place than was granted changes nothing."""
    receive = two_sided.target.expect(two_sided.ring_memory, rng(512, 1024), 9)
    write = two_sided.writer.write(two_sided.source_memory, rng(0, 512), rng(0, 512), 9)
    two_sided.drive(receive, write)
    assert (two_sided.ring[512:1024] == two_sided.source[:512]).all()
    assert (two_sided.ring[:512] == PATTERN).all()


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules(kind: str) -> None:
    """Any interleaving of expects, writes, declines and progress ends with exactly the written ranges changed."""
    pair = open_pair(kind, source_bytes=1 << 16, ring_bytes=1 << 16)
    base = [0]

    @settings(max_examples=30)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        pair.ring[:] = PATTERN
        cuts = sorted(data.draw(st.sets(st.integers(0, 1 << 16), min_size=2, max_size=9)))
        ranges = [rng(begin, end) for begin, end in pairwise(cuts)]
        declined = {i for i in range(len(ranges)) if not pair.is_one_sided and data.draw(st.booleans())}
        steps = [("send", i) for i in range(len(ranges))]
        if not pair.is_one_sided:
            steps += [("expect", i) for i in range(len(ranges))]
        handles: list[Handle] = []
        first_key = base[0]
        base[0] += len(ranges)
        # Everything is drawn before anything is done: an example that is given up half way would leave handles behind,
        # to write into the next one's bytes.
        order = data.draw(st.permutations(steps))
        turns = data.draw(st.lists(st.integers(0, 3), min_size=len(steps), max_size=len(steps)))
        for (step, i), num_turns in zip(order, turns, strict=True):
            if step == "expect":
                handles.append(pair.target.expect(pair.ring_memory, ranges[i], first_key + i))
            elif i in declined:
                handles.append(pair.writer.decline(first_key + i))
            else:
                handles.append(pair.writer.write(pair.source_memory, ranges[i], ranges[i], first_key + i))
            pair.turn(num_turns)
        pair.drive(*handles)
        wanted = np.full(1 << 16, PATTERN, dtype=np.uint8)
        for i, place in enumerate(ranges):
            if i not in declined:
                wanted[place.begin : place.end] = pair.source[place.begin : place.end]
        assert (pair.ring == wanted).all()

    try:
        run()
    finally:
        pair.close()


# A peer that breaks the rules


@pytest.mark.parametrize(("sent", "expected"), [(1, 100), (200_000, 100), (100, 200_000)])
def test_wrong_length_fails_the_receive_and_touches_nothing(two_sided: Pair, sent: int, expected: int) -> None:
    receive = two_sided.target.expect(two_sided.ring_memory, rng(10, 10 + expected), 1)
    two_sided.writer.write(two_sided.source_memory, rng(0, sent), rng(0, sent), 1)
    with pytest.raises(WriteFailed, match=f"sent {sent} bytes for key 1; {expected} expected"):
        two_sided.drive(receive)
    assert (two_sided.ring == PATTERN).all()
    two_sided.move(rng(0, 64), rng(0, 64), key=2)  # the session goes on
    assert (two_sided.ring[:64] == two_sided.source[:64]).all()


@pytest.mark.parametrize("kind", UCX)
def test_a_key_sent_twice_ends_the_session(kind: str) -> None:
    pair = open_pair(kind)
    other = pair.target.expect(pair.ring_memory, rng(0, 8), 2)
    for _ in range(2):
        pair.drive(pair.writer.write(pair.source_memory, rng(0, 8), rng(0, 8), 1))
    with pytest.raises(WriteFailed, match="key 1 twice"):
        pair.drive(other)
    with pytest.raises(WriteFailed, match="key 1 twice"):
        pair.target.expect(pair.ring_memory, rng(0, 8), 3).poll()
    assert (pair.ring == PATTERN).all()
    pair.close()


@pytest.mark.parametrize("kind", UCX)
def test_a_flood_of_unexpected_messages_ends_the_session(kind: str) -> None:
    pair = open_pair(kind)
    other = pair.target.expect(pair.ring_memory, rng(0, 8), 2**40)
    with pytest.raises(WriteFailed, match="unexpected messages"):
        for key in range(6000):
            pair.writer.decline(key)
            if key % 64 == 0:
                pair.turn(2)
        pair.drive(other)
    pair.close()


# Local mistakes


def test_ranges_are_checked(pair: Pair) -> None:
    size = pair.source.nbytes
    for source_range, target_range, words in (
        (rng(size - 1, size + 1), rng(0, 2), "source range"),
        (rng(0, 2), rng(size - 1, size + 1), "target range"),
        (rng(0, 2), rng(0, 3), "equally long"),
    ):
        with pytest.raises(LocalProtocolError, match=words):
            pair.writer.write(pair.source_memory, source_range, target_range, 1)
    if not pair.is_one_sided:
        with pytest.raises(LocalProtocolError, match="leaves its memory"):
            pair.target.expect(pair.ring_memory, rng(0, size + 1), 1)
    with pytest.raises(ConfigError, match="empty or negative"):
        rng(4, 4)


def test_keys_are_checked_and_the_largest_works(pair: Pair) -> None:
    for key in (-1, 2**62, 2**64):
        with pytest.raises(LocalProtocolError, match="out of range"):
            pair.writer.write(pair.source_memory, rng(0, 1), rng(0, 1), key)
        with pytest.raises(LocalProtocolError, match="out of range"):
            pair.writer.decline(key)
        if not pair.is_one_sided:
            with pytest.raises(LocalProtocolError, match="out of range"):
                pair.target.expect(pair.ring_memory, rng(0, 1), key)
    pair.move(rng(0, 10), rng(0, 10), key=2**62 - 1)
    assert (pair.ring[:10] == pair.source[:10]).all()


def test_memory_in_use_cannot_be_deregistered(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.target_transport.deregister(pair.ring_memory)
    write = pair.writer.write(pair.source_memory, rng(0, 1 << 20), rng(0, 1 << 20), 1)
    with pytest.raises(LocalProtocolError, match="in use"):
        pair.writer_transport.deregister(pair.source_memory)
    if not pair.is_one_sided:
        pair.drive(pair.target.expect(pair.ring_memory, rng(0, 1 << 20), 1))
    pair.drive(write)
    pair.writer_transport.deregister(pair.source_memory)
    pair.target.close()
    pair.end_writer()
    pair.target_transport.deregister(pair.ring_memory)


# Closing


def test_close_settles_every_pending_handle(two_sided: Pair) -> None:
    receives = [two_sided.target.expect(two_sided.ring_memory, rng(i, i + 1), i) for i in range(3)]
    writes = [two_sided.writer.write(two_sided.source_memory, rng(0, 1 << 20), rng(0, 1 << 20), 10 + i) for i in range(3)]
    two_sided.target.close()
    two_sided.writer.close()
    for handle in receives + writes:
        with pytest.raises(TransportClosed, match="was closed while key"):
            handle.poll()


def test_a_settled_handle_stays_settled_after_close(pair: Pair) -> None:
    write = pair.writer.write(pair.source_memory, rng(0, 9), rng(0, 9), 1)
    handles = [write] if pair.is_one_sided else [write, pair.target.expect(pair.ring_memory, rng(0, 9), 1)]
    pair.drive(*handles)
    pair.writer.close()
    pair.turn()
    assert all(handle.poll() for handle in handles), "what arrived before the peer closed still counts"
    pair.target.close()
    assert all(handle.poll() for handle in handles) and (pair.ring[:9] == pair.source[:9]).all()
    if not pair.is_one_sided:
        assert handles[1].num_bytes == 9


def test_a_closed_session_is_harmless(pair: Pair) -> None:
    pair.writer.close()
    pair.writer.close()
    assert pair.writer.progress() is False
    assert pair.writer.arm() is True
    assert pair.writer.fileno() is None
    with pytest.raises(TransportClosed):
        pair.writer.write(pair.source_memory, rng(0, 1), rng(0, 1), 1).poll()
    with pytest.raises(TransportClosed):
        pair.writer.decline(1).poll()
    if not pair.is_one_sided:
        pair.target.close()
        with pytest.raises(TransportClosed):
            pair.target.expect(pair.ring_memory, rng(0, 1), 1).poll()


def test_no_byte_lands_after_close(pair: Pair) -> None:
    """The proof of death: whatever was under way, the memory is the target's own once close() has returned."""
    size = 1 << 20
    handles: list[Handle] = []
    if not pair.is_one_sided:
        handles.append(pair.target.expect(pair.ring_memory, rng(0, size), 1))
    handles.append(pair.writer.write(pair.source_memory, rng(0, size), rng(0, size), 1))
    pair.turn(2)
    pair.target.close()
    pair.end_writer()
    pair.ring[:] = 0x11
    ends_at = time.monotonic() + 0.2
    while time.monotonic() < ends_at:
        pair.writer.progress()
    assert (pair.ring == 0x11).all()


def test_the_survivor_detects_a_closed_peer(pair: Pair) -> None:
    """These transports all notice; writes and receives then fail, and later ones too."""
    if pair.is_one_sided:
        pair.target.close()
        write = pair.writer.write(pair.source_memory, rng(0, 1), rng(0, 1), 1)
        with pytest.raises(TransportError):
            pair.drive(write)
        return
    pair.move(rng(0, 10), rng(0, 10), key=1)
    receive = pair.target.expect(pair.ring_memory, rng(0, 10), 2)
    pair.writer.close()
    with pytest.raises(WriteFailed):
        pair.drive(receive)
    with pytest.raises(WriteFailed):
        pair.drive(pair.target.write(pair.ring_memory, rng(0, 1), rng(0, 1), 3))


def test_two_sessions_do_not_disturb_each_other(two_sided: Pair) -> None:
    ring = np.full(1 << 20, PATTERN, dtype=np.uint8)
    memory = two_sided.target_transport.register(ring)
    writer, target = open_sessions(two_sided.writer_transport, two_sided.target_transport, memory)
    mine = two_sided.target.expect(two_sided.ring_memory, rng(0, 1000), 1)
    other = target.expect(memory, rng(0, 1000), 1)
    write = writer.write(two_sided.source_memory, rng(5000, 6000), rng(0, 1000), 1)
    ends_at = time.monotonic() + 60
    while not (other.poll() and write.poll()):
        two_sided.turn(1)
        writer.progress()
        target.progress()
        assert time.monotonic() < ends_at
    assert not mine.poll()
    assert (two_sided.ring == PATTERN).all()
    assert (ring[:1000] == two_sided.source[5000:6000]).all()
    writer.close()
    target.close()
    two_sided.drive(two_sided.writer.write(two_sided.source_memory, rng(0, 1000), rng(0, 1000), 1), mine)
    assert (two_sided.ring[:1000] == two_sided.source[:1000]).all()


def test_a_new_session_after_a_torn_one(pair: Pair) -> None:
    if not pair.is_one_sided:
        pair.target.expect(pair.ring_memory, rng(0, 1 << 20), 1)
    pair.writer.write(pair.source_memory, rng(0, 1 << 20), rng(0, 1 << 20), 1)
    pair.turn(1)
    pair.writer.close()
    pair.target.close()
    pair.end_writer()
    pair.ring[:] = PATTERN
    pair.writer, pair.target = open_sessions(pair.writer_transport, pair.target_transport, pair.ring_memory)
    pair.move(rng(0, 2000), rng(50, 2050), key=1)
    assert (pair.ring[50:2050] == pair.source[:2000]).all()
    assert (pair.ring[2050:] == PATTERN).all()


def test_transport_close_closes_sessions(two_sided: Pair) -> None:
    receive = two_sided.target.expect(two_sided.ring_memory, rng(0, 1), 1)
    two_sided.target_transport.close()
    with pytest.raises(TransportClosed):
        receive.poll()
    with pytest.raises(TransportClosed):
        two_sided.target_transport.offer()
    two_sided.target_transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_open_and_close_leak_no_descriptors(kind: str) -> None:
    """Many sessions, each torn down with a write and a receive under way; a leaked worker would keep its descriptor."""
    num_sessions = 5 if kind.startswith("nixl") else 20  # an agent takes up to 0.1 s to make
    pair = open_pair(kind)

    def cycle() -> None:
        pair.writer, pair.target = open_sessions(pair.writer_transport, pair.target_transport, pair.ring_memory)
        if not pair.is_one_sided:
            pair.move(rng(0, 16), rng(0, 16), key=1)
            pair.target.expect(pair.ring_memory, rng(0, 1 << 20), 2)
            pair.writer.write(pair.source_memory, rng(0, 8), rng(0, 8), 3)
        pair.writer.write(pair.source_memory, rng(0, 1 << 20), rng(0, 1 << 20), 4)
        pair.turn(1)
        pair.writer.close()
        pair.target.close()
        pair.end_writer()

    pair.writer.close()
    pair.target.close()
    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(num_sessions):
        cycle()
    assert len(os.listdir("/proc/self/fd")) <= before
    pair.close()


@pytest.mark.parametrize("kind", UCX)
def test_close_with_unexpected_messages_is_silent(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """UCX would complain about each message that was taken from it and not received."""
    pair = open_pair(kind)
    pair.move(rng(0, 1), rng(0, 1), key=1000)  # connected: UCX logs a connection that is refused in the middle of wiring up
    for key in range(20):
        pair.writer.write(pair.source_memory, rng(0, 100 if key % 2 else 1 << 20), rng(0, 100 if key % 2 else 1 << 20), key)
    pair.writer.decline(99)
    pair.turn(50)
    pair.target.close()
    pair.turn(50)
    pair.close()
    assert capfd.readouterr() == ("", "")


# Handshake


def test_wrong_blobs_are_refused_in_one_line(pair: Pair) -> None:
    good = pair.writer_transport.offer()
    other = UcxTransport() if pair.writer_transport.name == "inproc" else InprocTransport(InprocHub())
    foreign = other.offer()
    _, answer = other.accept(foreign.blob, other.register(bytearray(8)))
    bad = {
        b"": "not msgpack",
        b"\x93": "not msgpack",
        b"nonsense" * 10: "not msgpack",
        b"\x93\x01\x02\x03": "another shape",
        b"\xdc" * (64 * 1024 + 1): f"blob of {64 * 1024 + 1} bytes",  # before it is unpacked: it can promise a list of any length
        foreign.blob: f"transport '{other.name}' version 1; this end needs a kvferry offer of transport",
        answer: "answer",
        good.blob[:-3] + bytes([good.blob[-3] ^ 1]) + good.blob[-2:]: "checksum",
    }
    for blob, words in bad.items():
        with pytest.raises(ConfigError, match=words) as caught:
            pair.target_transport.accept(blob, pair.ring_memory)
        assert "\n" not in str(caught.value)
        assert pair.target_transport.name in str(caught.value)
    for blob in (b"", foreign.blob, answer, good.blob, b"\xdc" * (64 * 1024 + 1)):
        with pytest.raises(ConfigError) as caught:
            good.complete(blob)
        assert "\n" not in str(caught.value)
    good.close()
    good.close()
    other.close()


def test_an_offer_that_is_closed_leaves_nothing(pair: Pair) -> None:
    pair.target.close()
    pair.end_writer()  # a connection may still be made in the background
    pair.writer.close()
    pair.writer_transport.offer().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pair.writer_transport.offer().close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_writer_offers_no_memory(pair: Pair) -> None:
    """What it registers it sends from; nothing that it tells a target leads there."""
    offer = pair.writer_transport.offer()
    begin = pair.source.ctypes.data
    offer_of_target = pair.target_transport.offer()  # a target that writes, too: the link probe's way back
    for blob in (offer.blob, offer_of_target.blob):
        told = [int.from_bytes(blob[at : at + 8], order) for at in range(len(blob) - 7) for order in ("big", "little")]
        ring = pair.ring.ctypes.data
        assert not [value for value in told if begin <= value < begin + pair.source.size or ring <= value < ring + pair.ring.size]
    offer.close()
    offer_of_target.close()
