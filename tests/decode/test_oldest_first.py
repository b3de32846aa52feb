"""Room on the decode node goes to the oldest request that waits, until that request starts or ends, however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.decode.leader_world import World, has_room, turns
from tests.decode.test_retry import give_room, release_all, waiting
from transfer.errors import PeerUnreachable, TransferAborted


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World(prefill_retries=1)
    yield one
    await one.close()


async def has_room_now(world: World, name: str) -> bool:
    """As its prefill node asks."""
    reserving = world.reserve(name)
    await turns()
    if reserving.done():
        return has_room(reserving)
    for rank in range(2):
        world.expected(rank, name)
    await turns()
    return has_room(reserving)


async def with_a_long_request_that_waits(world: World) -> None:
    """Two of eight pages are free; "long" waits for six, and "short", which is younger, needs two."""
    await waiting(world, "first", num_tokens=20, new=4)
    await give_room(world, "first")
    await waiting(world, "long", num_tokens=20, new=4)
    await waiting(world, "short")
    assert not await has_room_now(world, "long")
    assert not await has_room_now(world, "short")


async def test_a_younger_request_waits_until_the_oldest_has_started(world: World) -> None:
    await with_a_long_request_that_waits(world)
    assert world.leader.abort("first", TransferAborted("enough"))
    await release_all(world)
    assert await has_room_now(world, "short"), "eight pages are free, and the oldest needs six"
    await waiting(world, "shorter")
    assert not await has_room_now(world, "shorter")
    assert await has_room_now(world, "long")


@pytest.mark.parametrize("how", ["an operator", "its caller", "its last prefill node"])
async def test_nothing_is_set_aside_for_a_request_that_has_ended(world: World, how: str) -> None:
    await with_a_long_request_that_waits(world)
    (request,) = (one for one in world.accepted if one.request_id == "long")
    match how:
        case "an operator":
            world.leader.abort("long", TransferAborted("enough"))
        case "its caller":
            world.leader.give_up(request, TransferAborted("gone"))
        case _:
            for name in ("long", "long.2"):
                world.call(name).fail(PeerUnreachable("the connection broke"))
                await turns()
    assert request.is_over
    assert await has_room_now(world, "short")


async def test_another_try_has_the_place_of_the_first(world: World) -> None:
    await with_a_long_request_that_waits(world)
    world.call("long").fail(PeerUnreachable("the connection broke"))
    await turns()
    assert not await has_room_now(world, "long.2")
    assert not await has_room_now(world, "short"), "the request is still older"
    assert world.leader.abort("first", TransferAborted("enough"))
    await release_all(world)
    assert await has_room_now(world, "long.2")
