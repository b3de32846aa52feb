"""Rules R1 to R6 of docs/protocol.md, each with a test that carries its number. tests/unit/test_ring.py has the depth."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError

import pytest

from tests.protocol.memory import WorldError
from tests.protocol.world import World, WorldConfig
from transfer.errors import LocalProtocolError, RemoteProtocolError
from transfer.ring import ALIGNMENT_BYTES, Grant, RingView, StagingAllocator

CELL = ALIGNMENT_BYTES


def random_ring(seed: int) -> tuple[StagingAllocator, list[Grant]]:
    """A ring in the middle of its life, overcommitted, and its live grants."""
    chance = random.Random(seed)
    ring = StagingAllocator(8 * CELL)
    live: list[Grant] = []
    for _ in range(60):
        if live and chance.random() < 0.45:
            ring.release(live.pop(chance.randrange(len(live))))
        else:
            live.append(ring.assign(chance.randint(1, 4 * CELL)))
    return ring, live


def byte_cells(grant: Grant) -> set[int]:
    return {position // CELL % 8 for position in range(grant.begin, grant.end, CELL)}


@pytest.mark.parametrize("seed", range(20))
def test_R1_no_two_unreleased_grants_that_may_both_be_written_share_a_byte(seed: int) -> None:
    ring, live = random_ring(seed)
    writable = [grant for grant in live if ring.is_writable(grant)]
    assert writable
    taken: set[int] = set()
    for grant in writable:
        assert not taken & byte_cells(grant)
        taken |= byte_cells(grant)


@pytest.mark.parametrize("seed", range(20))
def test_R2_the_watermark_never_moves_back(seed: int) -> None:
    chance = random.Random(seed)
    ring, live = random_ring(seed)
    view = RingView(ring.capacity_bytes)
    before = 0
    while live:
        ring.release(live.pop(chance.randrange(len(live))))
        watermark = ring.watermark()
        assert watermark.position >= before
        before = watermark.position
        assert view.update(watermark)
    behind = StagingAllocator(ring.capacity_bytes)
    for _ in range(200):
        behind.watermark()  # newer by its sequence number, and back at position 0
    with pytest.raises(RemoteProtocolError, match="R2"):
        view.update(behind.watermark())


def test_R3_a_grant_is_published_whole_and_never_changes() -> None:
    ring, live = random_ring(3)
    as_published = [(grant.begin, grant.end) for grant in live]
    with pytest.raises(FrozenInstanceError):
        live[0].end = 0  # type: ignore[misc]
    for _ in range(20):
        ring.assign(CELL)
    ring.quarantine(live[0])
    assert [(grant.begin, grant.end) for grant in live] == as_published
    assert all(grant.begin % ring.capacity_bytes + grant.end - grant.begin <= ring.capacity_bytes for grant in live)


def test_R4_a_grant_is_released_exactly_once() -> None:
    ring = StagingAllocator(8 * CELL)
    first, second = ring.assign(CELL), ring.assign(CELL)
    ring.release(second)
    with pytest.raises(LocalProtocolError, match="R4"):
        ring.release(second)
    with pytest.raises(LocalProtocolError, match="R4"):
        ring.release(Grant(first.begin, first.end + CELL))  # not the grant that begins there
    ring.release(first)
    with pytest.raises(LocalProtocolError, match="R4"):
        ring.release(first)
    ring.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_R5_after_the_last_release_the_ring_is_empty(seed: int) -> None:
    ring, live = random_ring(seed)
    random.Random(seed).shuffle(live)
    for grant in live:
        assert ring.position < ring.head
        ring.release(grant)
    assert ring.position == ring.head
    assert ring.live_bytes == ring.num_live_grants == 0
    assert ring.watermark().released == ()


def test_R6_a_remote_write_can_only_land_in_the_ring() -> None:
    """The world's memory has no place outside the ring; a grant that leaves it is refused by the writer and by the memory."""
    view = RingView(4 * CELL)
    assert not view.can_hold(Grant(3 * CELL, 5 * CELL), CELL)
    world = World(WorldConfig(), 0)
    memory = world.receivers[0].ring
    with pytest.raises(WorldError, match="R6"):
        memory.of(Grant(memory.capacity_bytes - CELL, memory.capacity_bytes + CELL), 2 * CELL)
    world.run()  # every write of a history is placed by that function
