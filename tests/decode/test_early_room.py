"""Room that a decode leader takes before the prefill node asks: when it is taken, when it is sent, and when it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from decode_node.offload.tiers import PlaceRequest
from decode_node.rank_messages import ExpectRequest
from tests.decode.leader_world import NUM_RANKS, PAGE_SIZE, PLAN, POOL_PAGES, World, turns
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.connector import incoming as incoming_module
from transfer.connector.incoming import EARLY_ROOM_S, EARLY_ROOM_TOKENS
from transfer.errors import PeerUnreachable, ResourceExhausted, TransferAborted
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto

WHOLE = POOL_PAGES * PAGE_SIZE


def early(**limits: Any) -> World:
    world = World(**limits)
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


@pytest.mark.parametrize("end", ["the node is closed", "the KV is there before the node has reported its begin"])
def test_early_room_is_not_looked_at_after_the_end(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world, looks = early(), list[str]()
        release = world.transfers._release_early_room  # noqa: SLF001

        def look(attempt: Any) -> None:
            looks.append(attempt.transfer_id)
            release(attempt)

        monkeypatch.setattr(world.transfers, "_release_early_room", look)
        await world.submitted()
        for rank in range(NUM_RANKS):
            world.expected(rank, "a")
        await turns()
        if end == "the node is closed":
            await world.close()
        else:
            await world.finish("a")
        await asyncio.sleep(5 * EARLY_ROOM_S)
        assert looks == ["a"]
        await world.close()

    run_in_virtual_time(main, monkeypatch, incoming_module)


def test_queue_timeout_also_ends_a_prompt_with_early_room_that_its_node_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world = early(queue_timeout_s=5.0)
        await world.submitted("idle")
        await world.submitted("begun")
        for name in ("idle", "begun"):
            for rank in range(NUM_RANKS):
                world.expected(rank, name)
        await asyncio.sleep(3.0)
        started(world, "begun")
        await asyncio.sleep(3.0)
        idle, begun = world.accepted
        assert isinstance(idle.failure, ResourceExhausted) and begun.failure is None
        assert str(idle.failure) == "its prefill node has not begun it within 5 s (limits.queue_timeout_s)"
        assert begun.queue_left_s == 2.0, "the wait with early room is a part of the time in the queue"
        await world.close()

    run_in_virtual_time(main, monkeypatch, incoming_module)


@pytest.mark.parametrize("is_other_joined", [False, True])
def test_a_prompt_that_only_a_draining_node_has_keeps_its_early_room(
    monkeypatch: pytest.MonkeyPatch, is_other_joined: bool
) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world = early()
        await world.submitted("idle", num_tokens=WHOLE - 1, new=1)
        for rank in range(NUM_RANKS):
            world.expected(rank, "idle")
        await world.submitted("second", num_tokens=WHOLE - 1, new=1)
        wanted = pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(PLAN))
        world.call("second").events.put_nowait(pb.PrefillEvent(room_wanted=wanted))
        await turns()
        world.peer.state = "draining"
        world.other.state = "joined" if is_other_joined else "draining"
        await asyncio.sleep(3 * EARLY_ROOM_S)
        assert world.cancelled() == (["idle"] if is_other_joined else []) and world.accepted[0].failure is None
        await world.close()

    run_in_virtual_time(main, monkeypatch, incoming_module)


async def test_the_request_has_the_start_token_by_which_its_plan_was_chosen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached prefix moves the start when room is taken. The prefill node learns it with the room, as without early room."""
    tiers = world.tiers
    place = tiers.place

    def placed(wanted: PlaceRequest) -> Any:
        found = place(wanted)
        return found and replace(found, start_token=2)

    monkeypatch.setattr(tiers, "place", placed)
    await world.submitted("a", num_tokens=4, new=1)
    for rank in range(NUM_RANKS):
        world.expected(rank, "a")
    await turns()
    assert world.peer.start_tokens == {"a": 0} and room(world, "a").result() == pb.PrefillRoom(start_token=2)
    await finish(world, "a")
