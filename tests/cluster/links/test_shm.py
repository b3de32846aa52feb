"""The transport over shared memory between processes, also when one of them dies or freezes."""

from __future__ import annotations

import pytest

from tests.transport.mapped_ends import Place, attach
from tests.transport.mapped_scenarios import (
    Make,
    MiB,
    Places,
    make,
    moves_bytes,
    test_a_frozen_writer_keeps_the_quarantine_up,
    test_a_session_that_was_never_completed_ends_with_its_offer,
    test_a_transport_closes_in_bounded_time_around_a_frozen_writer,
    test_many_attaches_leak_nothing,
    test_target_killed_while_it_is_written_into,
    test_writer_killed_while_it_writes,
)

__all__ = [
    "make",
    "test_a_frozen_writer_keeps_the_quarantine_up",
    "test_a_session_that_was_never_completed_ends_with_its_offer",
    "test_a_transport_closes_in_bounded_time_around_a_frozen_writer",
    "test_many_attaches_leak_nothing",
    "test_target_killed_while_it_is_written_into",
    "test_writer_killed_while_it_writes",
]

HOST = Place(is_host=True)


@pytest.fixture
def places() -> Places:
    return Places(writer=HOST, target=HOST, sizes=(1, 4096, MiB + 1, 4 * MiB), long_bytes=16 * MiB, long_times=400)


def test_bytes_land_in_their_range_and_nowhere_else(places: Places, make: Make) -> None:
    size = max(places.sizes) + 64
    writer, target = make(HOST, num_bytes=size), make(HOST, num_bytes=size)
    assert attach(writer, target) == "shm"
    for key, num_bytes in enumerate(places.sizes):
        seed = 5 + key
        writer.do("fill", seed=seed)
        landed = {"begin": 40, "end": 40 + num_bytes, "seed": seed, "source_begin": 8}
        target.do("stamp", value=0xA5)
        writer.do("write", begin=8, end=8 + num_bytes, target_begin=40, key=key)
        assert writer.do("wait", key=key, seconds=60) == "done"
        assert target.do("holds", **landed, around=0xA5), num_bytes
        target.do("stamp", value=0x5A)
        assert writer.do("store", begin=8, end=8 + num_bytes, target_begin=40)
        assert target.do("holds", **landed, around=0x5A), num_bytes


def test_each_session_of_a_pair_has_its_own_mapping(places: Places, make: Make) -> None:
    """As in a re-attach before the old session is closed: the old one's end must not take the new one's mapping away."""
    writer, target = make(HOST), make(HOST)
    attach(writer, target)
    attach(writer, target)
    assert writer.do("count")["mapped"] == 2
    assert moves_bytes(writer, target, MiB)
