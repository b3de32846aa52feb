"""What two processes must do whose writer maps the target's memory, also when one of them dies or freezes.

They run over CUDA IPC on GPUs and on their twin, and over shared memory.

A module of tests imports the tests from here and gives the fixture `places`. Every end is a process of its own, so a GPU that was
left in a bad state would be seen and would harm no other test.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.transport.mapped_ends import Place, Refused, Remote, attach, remotes
from transfer.transport.cuda_ipc import Mode

Make = Callable[..., Remote]
MiB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the writer and the target live, and how much they move.

    Attributes:
        sizes: Bytes of single writes.
        long_bytes: Of a memory that is written `long_times` in a row: long enough to be killed in the middle.
    """

    writer: Place
    target: Place
    sizes: tuple[int, ...]
    long_bytes: int
    long_times: int


@pytest.fixture
def make() -> Iterator[Make]:
    with remotes() as made:
        yield made


def long_writes(places: Places, make: Make) -> tuple[Remote, Remote]:
    """A writer in the middle of many large writes."""
    writer, target = make(places.writer, num_bytes=places.long_bytes), make(places.target, num_bytes=places.long_bytes)
    writer.do("fill", seed=1)
    attach(writer, target)
    writer.do("write_all", times=places.long_times)
    assert writer.do("wait", key=places.long_times - 1, seconds=0) == "pending"
    return writer, target


def moves_bytes(writer: Remote, target: Remote, num_bytes: int) -> bool:
    """A whole transfer over a session that is open."""
    writer.do("fill", seed=77)
    target.do("stamp", value=3)
    writer.do("write", begin=0, end=num_bytes, target_begin=0, key=2**40)
    assert writer.do("wait", key=2**40, seconds=60) == "done"
    return bool(target.do("holds", begin=0, end=num_bytes, seed=77, source_begin=0, around=3))


@pytest.mark.parametrize("mode", ["fused", "copy"])
def test_bytes_land_in_their_range_and_nowhere_else(places: Places, make: Make, mode: Mode) -> None:
    size = max(places.sizes) + 64
    writer, target = make(places.writer, mode=mode, num_bytes=size), make(places.target, mode=mode, num_bytes=size)
    assert attach(writer, target) == f"cuda_ipc/{mode}"
    for key, num_bytes in enumerate(places.sizes):
        source, place = (0, 0) if num_bytes == size else (8, 40)
        seed = 5 + key
        writer.do("fill", seed=seed)
        target.do("stamp", value=0xA5)
        writer.do("write", begin=source, end=source + num_bytes, target_begin=place, key=key)
        assert writer.do("wait", key=key, seconds=60) == "done"
        assert target.do("holds", begin=place, end=place + num_bytes, seed=seed, source_begin=source, around=0xA5), num_bytes
        target.do("stamp", value=0x5A)
        is_direct = writer.do("store", begin=source, end=source + num_bytes, target_begin=place)
        assert is_direct is (mode == "fused")
        if is_direct:
            assert target.do("holds", begin=place, end=place + num_bytes, seed=seed, source_begin=source, around=0x5A), num_bytes
    writer.do("close")
    target.do("close")
    assert target.do("is_over_within", seconds=60)


def test_target_killed_while_it_is_written_into(places: Places, make: Make) -> None:
    """The writer hears of it, its device stays in order, and it serves the next target."""
    writer, target = long_writes(places, make)
    target.kill()
    outcome = writer.do("wait", key=places.long_times - 1, seconds=60)
    assert outcome == "done" or outcome.startswith("WriteFailed: key")  # a GPU may be through before the process has ended
    writer.do("write", begin=0, end=4096, target_begin=0, key=2**50)
    assert writer.do("wait", key=2**50, seconds=60).startswith("WriteFailed: key")
    assert writer.do("store", begin=0, end=4096, target_begin=0) is False
    writer.do("close")
    assert writer.do("has_ended_within", seconds=60)  # behind the copies that the device is at
    assert writer.do("count")["mapped"] == 0
    other = make(places.target, num_bytes=places.long_bytes)
    attach(writer, other)
    assert moves_bytes(writer, other, places.long_bytes)


def test_writer_killed_while_it_writes(places: Places, make: Make) -> None:
    """From the proof of its death on, the ring is the target's own."""
    writer, target = long_writes(places, make)
    target.do("close")
    assert not target.do("is_over")
    writer.kill()
    assert target.do("is_over_within", seconds=60)
    target.do("stamp", value=0x11)
    time.sleep(0.3)
    assert target.do("is_stamp", value=0x11)
    other = make(places.writer, num_bytes=places.long_bytes)
    attach(other, target)
    assert moves_bytes(other, target, places.long_bytes)


def test_a_frozen_writer_keeps_the_quarantine_up(places: Places, make: Make) -> None:
    writer, target = make(places.writer), make(places.target)
    attach(writer, target)
    assert moves_bytes(writer, target, MiB)
    writer.signal(signal.SIGSTOP)
    target.do("close")
    assert not target.do("is_over_within", seconds=0.5)
    with pytest.raises(Refused, match="may still reach it; close the session and wait until it is over"):
        target.do("deregister")
    writer.signal(signal.SIGCONT)
    assert not target.do("is_over_within", seconds=0.1)
    writer.do("close")
    assert target.do("is_over_within", seconds=60)
    target.do("deregister")


def test_a_transport_closes_in_bounded_time_around_a_frozen_writer(places: Places, make: Make) -> None:
    writer, target = make(places.writer), make(places.target)
    attach(writer, target)
    writer.signal(signal.SIGSTOP)
    target.do("close_transport")
    assert not target.do("is_over")
    writer.signal(signal.SIGCONT)
    writer.do("close")
    assert target.do("is_over_within", seconds=60)


def test_a_session_that_was_never_completed_ends_with_its_offer(places: Places, make: Make) -> None:
    writer, target = make(places.writer), make(places.target)
    target.do("accept", blob=writer.do("offer"))
    target.do("close")
    assert not target.do("is_over")
    writer.do("close_offer")
    assert target.do("is_over_within", seconds=60)


def test_many_attaches_leak_nothing(places: Places, make: Make) -> None:
    writer, target = make(places.writer), make(places.target)

    def cycle() -> None:
        attach(writer, target)
        writer.do("write", begin=0, end=4096, target_begin=0, key=1)
        writer.do("store", begin=0, end=4096, target_begin=0)
        writer.do("close")
        target.do("close")
        assert target.do("is_over_within", seconds=60)

    cycle()
    before = writer.do("count"), target.do("count")
    for _ in range(100):
        cycle()
    for now, then in zip((writer.do("count"), target.do("count")), before, strict=True):
        assert now["mapped"] == 0
        assert now["fds"] < then["fds"] + 5  # the driver may open one or two for itself
    attach(writer, target)
    assert moves_bytes(writer, target, MiB)


def test_two_sessions_of_one_pair_share_a_mapping(places: Places, make: Make) -> None:
    """As in a re-attach before the old session is closed: the old one's end must not take the new one's mapping away."""
    writer, target = make(places.writer), make(places.target)
    attach(writer, target)
    attach(writer, target)
    assert writer.do("count")["mapped"] == 1
    assert moves_bytes(writer, target, MiB)
    writer.do("close")
    assert writer.do("has_ended_within", seconds=60)
    assert writer.do("count")["mapped"] == 1
    target.do("close")
    assert target.do("is_over_within", seconds=60)
