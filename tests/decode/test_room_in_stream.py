"""A prefill node that asks for room in its call gets one answer there, as soon as there is room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_node.rank_messages import ExpectRequest, FinishRequest
from decode_node.requests import GenerationAttempt
from tests.decode.leader_world import PAGE_SIZE, PLAN, POOL_PAGES, World, turns
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.chunk import ChunkPlan
from transfer.connector import incoming as incoming_module
from transfer.connector.messages import CancelIncoming
from transfer.connector.room_waits import ASK_AGAIN_S, ASKED_AT_ONCE, MOST_ASKED
from transfer.errors import PeerUnreachable, TransferAborted
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto

HALF = POOL_PAGES * PAGE_SIZE // 2


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = streaming()
    yield one
    await one.close()


def streaming(*, max_queued: int = 100) -> World:
    world = World(max_queued=max_queued)
    for peer in (world.peer, world.other):
        peer.takes_room = True
    return world


def want_room(world: World, name: str) -> None:
    """Have the prefill node report that it could begin."""
    wanted = pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(PLAN))
    world.call(name).events.put_nowait(pb.PrefillEvent(room_wanted=wanted))


def room(world: World, name: str) -> asyncio.Future[pb.PrefillRoom]:
    found = next(peer.rooms[name] for peer in (world.peer, world.other) if name in peer.rooms)
    assert found is not None
    return found


async def asked(world: World, *names: str, num_tokens: int) -> None:
    """Submit prompts, each with a new token, whose prefill node wants room."""
    for name in names:
        world.submit(name, num_tokens - 1, new=1)
        await turns()
        want_room(world, name)
        await turns()


def expected(world: World) -> list[str]:
    return [message.transfer_id for message in world.sent if isinstance(message, ExpectRequest)]


async def test_room_is_given_when_every_rank_expects_the_prompt(world: World) -> None:
    await asked(world, "a", num_tokens=4)
    assert expected(world) == ["a"] and not room(world, "a").done()
    world.expected(0, "a")
    await turns()
    assert not room(world, "a").done()
    world.expected(1, "a")
    await turns()
    assert room(world, "a").result() == pb.PrefillRoom(), "no start token: it is that of the request"


async def test_a_prompt_without_room_gets_it_when_another_one_leaves_and_the_oldest_is_first(world: World) -> None:
    await asked(world, "a", "old", "young", num_tokens=2 * HALF)
    assert expected(world) == ["a"]
    assert world.waiting == {"old", "young"}
    for rank in range(2):
        world.expected(rank, "a")
        world.complete(rank, "a")
    await world.first_token("a")
    assert FinishRequest(request_id="a") in world.sent and expected(world) == ["a"]
    for rank in range(2):
        world.release(rank, "a")
    await turns()
    assert expected(world) == ["a", "old"] and world.waiting == {"young"}


async def test_a_prompt_that_is_given_up_while_it_waits_leaves_its_place(world: World) -> None:
    await asked(world, "a", num_tokens=HALF)
    await asked(world, "large", num_tokens=2 * HALF)
    await asked(world, "small", num_tokens=HALF)
    assert expected(world) == ["a"], "room is set aside for the large one"
    assert world.transfers.abort("large", TransferAborted("the client left"))
    await turns()
    assert expected(world) == ["a", "small"]


async def test_a_rank_that_cannot_receive_fails_the_attempt(world: World) -> None:
    await asked(world, "a", num_tokens=4)
    world.expected(1, "a", "no session with it")
    await turns()
    assert isinstance(world.accepted[0].failure, PeerUnreachable)
    assert any(isinstance(message, CancelIncoming) for message in world.sent) and not room(world, "a").done()


async def test_a_second_question_fails_the_attempt(world: World) -> None:
    await asked(world, "a", num_tokens=4)
    want_room(world, "a")
    await turns()
    assert "wants room twice" in str(world.accepted[0].failure)


async def test_a_question_without_a_plan_is_an_error_of_the_attempt(world: World) -> None:
    await world.submitted()
    world.call("a").events.put_nowait(pb.PrefillEvent(room_wanted=pb.PrefillRoomWanted()))
    await turns()
    assert "chunk_plan is missing" in str(world.accepted[0].failure)


def test_the_scheduler_is_asked_again_at_intervals_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a request keeps its place, which it has for `decode_node.admission.WAITS_S` after the last question."""

    async def main(loop: VirtualTimeLoop) -> None:
        world = streaming()
        await asked(world, "a", "b", num_tokens=2 * HALF)
        place, num_questions = world.leader.room, 0

        async def counted(*question: object) -> object:
            nonlocal num_questions
            num_questions += 1
            return await place(*question)  # type: ignore[arg-type]

        monkeypatch.setattr(world.leader, "room", counted)
        await asyncio.sleep(10 * ASK_AGAIN_S + 0.1)
        assert num_questions == 10
        await world.close()

    run_in_virtual_time(main, monkeypatch, incoming_module)


def test_of_thousands_only_the_oldest_are_asked_for_at_intervals_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        names = [f"r{number}" for number in range(MOST_ASKED + 40)]
        world = streaming(max_queued=len(names))
        await asked(world, "holder", *names, num_tokens=2 * HALF)
        place = world.leader.room
        questions: dict[float, list[str]] = {}

        async def noted(attempt: GenerationAttempt, plan: ChunkPlan) -> object:
            questions.setdefault(loop.now_s, []).append(attempt.transfer_id)
            return await place(attempt, plan)

        monkeypatch.setattr(world.leader, "room", noted)
        await asyncio.sleep(ASK_AGAIN_S + 0.01)
        questions.clear()
        await asyncio.sleep(ASK_AGAIN_S)
        assert sorted(name for some in questions.values() for name in some) == sorted(names[:MOST_ASKED])
        assert {len(some) for some in questions.values()} == {ASKED_AT_ONCE}
        await world.close()

    run_in_virtual_time(main, monkeypatch, incoming_module)
