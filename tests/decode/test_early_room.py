"""Room that a decode leader takes before the prefill node asks: when it is taken, when it is sent, and when it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_node.rank_messages import ExpectRequest
from tests.decode.leader_world import NUM_RANKS, PAGE_SIZE, PLAN, POOL_PAGES, World, turns
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.connector import incoming as incoming_module
from transfer.connector.incoming import EARLY_ROOM_S, EARLY_ROOM_TOKENS
from transfer.errors import PeerUnreachable, TransferAborted
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto

WHOLE = POOL_PAGES * PAGE_SIZE


def early(*, prefill_retries: int = 0) -> World:
    world = World(prefill_retries=prefill_retries)
    for peer in (world.peer, world.other):
        peer.takes_room = peer.takes_early_room = True
    return world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = early()
    yield one
    await one.close()


def expected(world: World) -> list[str]:
    return [message.transfer_id for message in world.sent if isinstance(message, ExpectRequest)]


def room(world: World, name: str) -> asyncio.Future[pb.PrefillRoom]:
    found = next(peer.rooms[name] for peer in (world.peer, world.other) if name in peer.rooms)
    assert found is not None
    return found


def started(world: World, name: str) -> None:
    world.call(name).events.put_nowait(pb.PrefillEvent(started=pb.PrefillStarted()))


async def finish(world: World, name: str) -> None:
    """Have the prefill node and the ranks do everything for an attempt that has room."""
    for rank in range(NUM_RANKS):
        world.expected(rank, name)
    started(world, name)
    await world.finish(name)
    await world.release_all()


async def test_room_is_sent_when_every_rank_expects_the_prompt(world: World) -> None:
    await world.submitted()
    assert expected(world) == ["a"] and world.peer.early_plans == {"a": PLAN}
    world.expected(0, "a")
    await turns()
    assert not room(world, "a").done()
    world.expected(1, "a")
    await turns()
    assert room(world, "a").result() == pb.PrefillRoom()
    await finish(world, "a")
    world.assert_nothing_is_left()


async def test_a_node_that_does_not_take_early_room_asks_for_it(world: World) -> None:
    world.peer.takes_early_room = False
    await world.submitted()
    assert not expected(world) and world.peer.early_plans == {"a": None}


async def test_a_node_with_many_other_tokens_gets_none(world: World) -> None:
    world.other.state = "draining"
    world.peer.others_tokens = EARLY_ROOM_TOKENS
    await world.submitted("a")
    world.peer.others_tokens = EARLY_ROOM_TOKENS + 1
    await world.submitted("b")
    assert expected(world) == ["a"] and world.peer.early_plans == {"a": PLAN, "b": None}


async def test_nobody_gets_early_room_while_another_request_lacks_room(world: World) -> None:
    await world.submitted("large", num_tokens=WHOLE - 1, new=1)
    await world.submitted("second", num_tokens=WHOLE - 1, new=1)
    assert expected(world) == ["large"] and world.waiting == {"second"}
    await world.submitted("third", num_tokens=3, new=1)
    assert expected(world) == ["large"], "and it does not take a place in the order of those that wait"
    assert world.waiting == {"second"}


async def test_a_prompt_that_can_have_no_room_yet_is_asked_for_as_before(world: World) -> None:
    await world.submitted("large", num_tokens=WHOLE - 1, new=1)
    await world.submitted("second", num_tokens=WHOLE - 1, new=1)
    assert [peer.early_plans.get("second") for peer in (world.peer, world.other)] == [None, None]
    await finish(world, "large")
    world.call("second").events.put_nowait(
        pb.PrefillEvent(room_wanted=pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(PLAN)))
    )
    await turns()
    assert expected(world) == ["large", "second"]


@pytest.mark.parametrize("end", ["the call fails", "the client leaves", "a rank cannot receive it", "the node is lost"])
async def test_early_room_is_released_when_the_attempt_ends(world: World, end: str) -> None:
    await world.submitted()
    match end:
        case "the call fails":
            world.call("a").fail(PeerUnreachable("the queue is full"))
        case "the client leaves":
            assert world.transfers.abort("a", TransferAborted("the client left"))
        case "a rank cannot receive it":
            world.expected(1, "a", "no session with it")
        case "the node is lost":
            world.lose(world.peer)
    await turns()
    assert world.cancelled() == ["a"] and not room(world, "a").done()
    assert world.admission.num_running == 1, "until every rank has given the pages back"
    await world.settle()
    world.assert_nothing_is_left()


async def test_the_next_attempt_asks_for_room() -> None:
    world = early(prefill_retries=1)
    await world.submitted()
    world.call("a").fail(PeerUnreachable("it ended"))
    await turns()
    assert expected(world) == ["a"] and world.cancelled() == ["a"]
    await world.settle()
    assert world.other.early_plans == {"a.2": None}, "it asks: its room may be that of the attempt before"
    await world.close()


async def test_a_node_that_asks_for_early_room_breaks_the_protocol(world: World) -> None:
    await world.submitted()
    wanted = pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(PLAN))
    world.call("a").events.put_nowait(pb.PrefillEvent(room_wanted=wanted))
    await turns()
    assert "wants room twice" in str(world.accepted[0].failure)


@pytest.mark.parametrize("is_started", [False, True], ids=["not begun", "begun"])
def test_room_of_a_prompt_that_waits_at_its_node_goes_to_one_that_lacks_room(
    monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world = early()
        await world.submitted("idle", num_tokens=WHOLE - 1, new=1)
        for rank in range(NUM_RANKS):
            world.expected(rank, "idle")
        if is_started:
            started(world, "idle")
        await asyncio.sleep(10 * EARLY_ROOM_S + 0.1)
        assert not world.cancelled(), "nobody else needs its room"
        await world.submitted("ready", num_tokens=WHOLE - 1, new=1)
        await asyncio.sleep(EARLY_ROOM_S)
        if is_started:
            assert not world.cancelled()
        else:
            assert world.cancelled() == ["idle"] and world.num_retries == 0
            await world.release_all()
            assert world.peer.early_plans["idle.2"] is None, "it does not get early room again"
        await world.close()

    run_in_virtual_time(main, monkeypatch, incoming_module)
