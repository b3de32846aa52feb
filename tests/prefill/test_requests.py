"""A prefill leader's requests: each ends exactly once, in whatever order the ranks answer, and nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_runtime.rank_messages import StepDone
from prefill_node import requests as requests_module
from prefill_node.rank_messages import RunPrefillStep, StartRequest
from prefill_node.scheduler import STEPS_AHEAD
from tests.decode.leader_world import take, turns
from tests.prefill.leader_world import CHUNK, NUM_RANKS, PAGE_SIZE, POOL_PAGES, World, kind_of, new_join
from tests.runtime.hand_clock import HandClock
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.chunk import ChunkPlan
from transfer.connector import outgoing as outgoing_module
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import CancelOutgoing
from transfer.errors import (
    EngineError,
    LocalProtocolError,
    OutOfMemory,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    TransferAborted,
)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World()
    yield one
    await one.close()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch, requests_module, outgoing_module)


async def test_a_request_is_started_computed_in_cells_sent_and_forgotten(world: World) -> None:
    request = world.submit("a", 2 * CHUNK + 3)
    await turns()
    start, *steps = world.sent
    assert isinstance(start, StartRequest) and start.num_tokens == 19 and start.decode_incarnation == 5
    assert [len(step.parts[0].token_ids) for step in steps if isinstance(step, RunPrefillStep)] == [8, 8], "two steps ahead"
    world.finish_step()
    assert len(world.steps) == 2, "the third step is sent in the same turn: no computing rank waits for the loop"
    world.settle()
    events: list[Any] = take(request)
    assert [kind_of(event) for event in events] == ["started", "first_token", "sent"]
    assert events[1].first_token.token_id == 7
    stats = events[2].sent.stats
    assert (stats.bytes, stats.writes, stats.transfer_s) == (20, 2, 1.5), "bytes add up, and the slowest rank counts"
    assert world.outcomes == ["sent"]
    assert world.leader.num_transfers == 0


async def test_pages_that_are_back_do_not_end_what_still_travels(world: World) -> None:
    world.submit("a", 3)
    await turns()
    world.finish_step()
    for rank in range(2):
        world.release(rank, "a")
    assert world.scheduler.num_running == 0
    assert world.leader.num_transfers == world.leader.num_running == 1, "a drain must wait for its last bytes"
    world.settle()
    world.assert_nothing_is_left()


async def test_a_decode_instance_is_told_of_the_tokens_of_others_until_they_are_sent(world: World) -> None:
    mine, other, again = new_join(5), new_join(6), new_join(6)

    def others() -> list[int]:
        return [world.leader.others_tokens(join) for join in (mine, other, again, new_join(9))]

    assert others() == [0, 0, 0, 0]
    world.answers["b"] = False
    world.submit("a", 2 * CHUNK, join=mine)
    waiting = world.submit("b", 3, join=other)
    assert others() == [3, 16, 16, 19], "what is queued; a life that joins again knows its own"
    await turns()
    assert others() == [3, 16, 16, 19], "what is computed"
    world.settle()
    assert others() == [3, 0, 0, 3], "not what is sent"
    world.leader.fail(waiting, TransferAborted("given up"))
    assert others() == [0, 0, 0, 0]
    world.assert_nothing_is_left()


async def test_a_silent_decode_node_delays_only_its_own_request(world: World) -> None:
    silent: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    world.answers["a"] = silent
    world.submit("a", 3, join=new_join(6))
    for name in ("b", "c"):
        world.submit(name, 2 * CHUNK)
        await turns()
        world.settle()
        assert world.outcomes[-1] == "sent"
    assert world.asked.count("a") == 1, "one question at a time"
    silent.set_result(True)
    await turns()
    world.settle()
    world.assert_nothing_is_left()


async def test_room_for_a_request_that_was_given_up_meanwhile_starts_nothing(world: World) -> None:
    late: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    world.answers["a"] = late
    world.submit("a", 3)
    await turns()
    assert world.leader.abort("a", TransferAborted("gone"))
    again = world.submit("a", 3)
    late.set_result(True)
    del world.answers["a"]
    await turns()
    assert [type(message) for message in world.sent] == [StartRequest, RunPrefillStep], "only the second one of that id"
    world.settle()
    assert kind_of(take(again)[-1]) == "sent"


def test_not_yet_for_a_request_that_was_given_up_meanwhile_is_not_for_the_next_one_of_that_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world, late = World(), loop.create_future()
        world.answers["a"] = False
        world.submit("a", 3)
        await turns()
        assert world.leader.abort("a", TransferAborted("gone"))
        world.answers["a"] = late
        again = world.submit("a", 3)
        await asyncio.sleep(MOST_S)
        assert world.asked == ["a", "a"], "the second request is asked about once, and has no answer yet"
        late.set_result(True)
        await turns()
        world.settle()
        assert kind_of(take(again)[-1]) == "sent"
        world.assert_nothing_is_left()
        await world.close()

    run_in_virtual_time(main, monkeypatch, requests_module, outgoing_module)


@pytest.mark.parametrize("where", ["the loop", "an answer"])
async def test_scheduling_that_breaks_is_said_and_not_silent(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    reason = "payload has 2000000 bytes"
    world = World(breaks=reason if where == "an answer" else "")

    def breaks() -> list[str]:
        raise LocalProtocolError(reason)

    if where == "the loop":
        monkeypatch.setattr(world.scheduler, "next_to_ask", breaks)
    world.submit("a", 3)
    await turns()
    assert reason in world.broken[0]
    await world.close()


async def test_an_engine_that_hangs_is_given_up_and_a_slow_one_is_not(clock: HandClock) -> None:
    world = World(step_timeout_s=2.0)
    world.submit("a", 8)
    world.submit("b", 8)
    world.submit("c", 8)
    for _ in range(3):  # 4.5 s in all, but never 2 s without the end of a step
        await turns()
        assert world.steps
        await clock.advance(1.5, steps=15)
        world.finish_step()
    await clock.advance(3.0, steps=30)
    assert not world.broken, "nothing is under way"
    world.submit("d", 8)
    await turns()
    await clock.advance(2.1, steps=21)
    assert world.broken == ["no step of the engine has ended for 2 s (limits.step_timeout_s)"]
    await world.leader.close(PeerUnreachable("the life was given up"))


@pytest.mark.parametrize(("is_out_of_memory", "kind"), [(False, EngineError), (True, OutOfMemory)])
async def test_a_failed_step_fails_its_requests_and_the_others_go_on(
    world: World, is_out_of_memory: bool, kind: type[EngineError]
) -> None:
    failed = world.submit("a", 3)
    await turns()
    world.submit("b", 3)
    await turns()
    world.fail_step(is_out_of_memory=is_out_of_memory)
    error = take(failed)[-1]
    assert type(error) is kind and error.spares_kv, "nobody knows whose fault it was"
    world.settle()
    assert sorted(world.outcomes) == ["failed", "sent"]
    assert world.leader.num_transfers == 0


async def test_a_request_that_a_step_names_fails_alone_and_its_kv_is_blamed(world: World) -> None:
    request = world.submit("a", 3)
    await turns()
    step = world.steps.pop(min(world.steps))
    for rank in range(NUM_RANKS):
        world.leader.on_step_done(rank, StepDone(step=step.step, tokens={}, compute_s=0.0, faults={"a": "not finite"}))
    (_, error) = take(request)
    assert isinstance(error, EngineError) and not error.spares_kv
    world.settle()
    assert world.outcomes == ["failed"]


async def test_a_lost_session_fails_the_request_once_and_has_all_ranks_give_it_up(world: World) -> None:
    request = world.submit("a", 3)
    await turns()
    world.finish_step()
    world.fail_part(0, "a")
    world.fail_part(1, "a")
    assert [kind_of(item) for item in take(request)] == ["started", "first_token", "PeerUnreachable"]
    assert sum(isinstance(message, CancelOutgoing) for message in world.sent) == 1
    world.settle()
    assert world.outcomes == ["failed"] and world.leader.num_transfers == 0


async def test_an_id_is_free_again_only_when_no_rank_knows_it(world: World) -> None:
    world.submit("a", 3)
    await turns()
    world.leader.abort("a", TransferAborted("gone"))
    world.finish_step()
    for rank in range(2):
        world.release(rank, "a")
    with pytest.raises(TransferAborted, match="request_id a is in flight already"):
        world.submit("a", 3)
    world.fail_part(0, "a")
    with pytest.raises(TransferAborted, match="in flight already"):
        world.submit("a", 3)
    world.fail_part(1, "a")
    world.submit("a", 3)
    await turns()
    world.settle()
    world.assert_nothing_is_left()


async def test_only_the_lost_instances_requests_end(world: World) -> None:
    other = new_join(9)
    world.submit("a", 3)
    world.submit("b", 3, join=other)
    await turns()
    world.leader.abort_join(other, PeerUnreachable("gone"))
    world.settle()
    world.assert_nothing_is_left()
    assert sorted(world.outcomes) == ["failed", "sent"]


async def test_a_queue_that_is_full_or_a_pool_that_is_too_small_refuses_at_once() -> None:
    world = World(max_queued=1)
    world.answers["a"] = False
    world.submit("a", 3)
    with pytest.raises(ResourceExhausted, match=r"prefill queue is full \(1 requests wait"):
        world.submit("b", 3)
    with pytest.raises(ResourceExhausted, match="needs 9 pages"):
        world.submit("b", POOL_PAGES * PAGE_SIZE + 1)
    await world.close()
    assert world.outcomes == ["failed"]


async def test_a_request_that_waits_too_long_is_refused(clock: HandClock) -> None:
    world = World(queue_timeout_s=5.0)
    world.answers["a"] = False
    request = world.submit("a", 3)
    await turns()
    await clock.advance(5.0)
    assert [str(item) for item in take(request)] == ["no room within 5 s (limits.queue_timeout_s)"]
    assert world.outcomes == ["refused"]
    await world.close()


async def test_the_end_of_a_life_ends_every_request_once() -> None:
    world = World(max_running=1)
    for name in "abc":
        world.submit(name, 3)
    await turns()
    world.leader.abort("b", TransferAborted("before"))
    await world.leader.close(PeerUnreachable("rank 1 died"))
    assert sorted(world.outcomes) == ["aborted", "failed", "failed"]
    for request in world.accepted:
        world.assert_told_once(request)
    assert world.leader.num_transfers == 0


MOVES = ("submit", "turn", "step", "fail step", "send", "fail", "release", "abort", "refuse", "later", "lose join")


@settings(max_examples=100)
@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 1_000)), max_size=60))
def test_every_request_ends_once_in_any_order_of_answers(moves: list[tuple[str, int]]) -> None:
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[str, int]]) -> None:
    world = World()
    for move, pick in moves:
        rank = pick % 2
        match move:
            case "submit":
                world.submit(f"r{len(world.accepted)}", 1 + pick % 30)
            case "turn":
                await turns()
            case "step" | "fail step" if world.steps:
                world.finish_step() if move == "step" else world.fail_step()
            case "send" if names := sorted((world.ranks[rank].unsent & world.ranks[rank].computed) - world.ranks[rank].aborted):
                world.send_part(rank, names[pick % len(names)])
            case "fail" if names := sorted(world.ranks[rank].unsent):
                world.fail_part(rank, names[pick % len(names)])
            case "release" if names := sorted(
                world.ranks[rank].holding & (world.ranks[rank].computed | world.ranks[rank].aborted)
            ):
                world.release(rank, names[pick % len(names)])
            case "abort" if world.accepted:
                world.leader.abort(world.accepted[pick % len(world.accepted)].transfer_id, TransferAborted("gone"))
            case "refuse" | "later":
                world.answers[f"r{len(world.accepted)}"] = PeerUnreachable("no") if move == "refuse" else False
            case "lose join" if pick % 10 == 0:
                world.leader.abort_join(world.join, PeerUnreachable("decode is gone"))
    world.answers.clear()
    async with asyncio.timeout(60):
        while world.leader.num_transfers:
            world.settle()
            await asyncio.sleep(0)
    world.assert_nothing_is_left()
    await world.close()


@pytest.mark.parametrize("start_token", [4, 12])
async def test_what_the_decode_side_says_late_is_where_the_ranks_begin(world: World, start_token: int) -> None:
    world.answers["a"] = start_token
    world.submit("a", 2 * CHUNK, start_token=4)
    await turns()
    (start,) = [message for message in world.sent if isinstance(message, StartRequest)]
    assert start.start_token == start_token
    world.settle()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("start_token", [3, 2 * CHUNK, 2**32 - 1])
async def test_a_late_start_that_cannot_be_fails_its_request(world: World, start_token: int) -> None:
    world.answers["a"] = start_token
    request = world.submit("a", 2 * CHUNK, start_token=4)
    await turns()
    (failure,) = take(request)
    assert isinstance(failure, RemoteProtocolError) and "at least the request's 4 and below the prompt's 16" in str(failure)
    assert not [message for message in world.sent if isinstance(message, StartRequest)]
    world.assert_nothing_is_left()


async def test_a_step_is_under_way_until_the_slowest_rank_has_ended_it(world: World) -> None:
    """On GPUs rank 0 does not wait for a launched step. Slower ranks would get more tokens than their windows have pages for."""
    world.submit("a", 4 * CHUNK)
    await turns()
    sent = [message for message in world.sent if isinstance(message, RunPrefillStep)]
    assert len(sent) == STEPS_AHEAD
    world.leader.on_step_done(0, StepDone(step=sent[0].step, tokens={}, compute_s=0.0))
    assert [message for message in world.sent if isinstance(message, RunPrefillStep)] == sent
    world.leader.on_step_done(1, StepDone(step=sent[0].step, tokens={}, compute_s=0.0))
    assert len([message for message in world.sent if isinstance(message, RunPrefillStep)]) == STEPS_AHEAD + 1
    del world.steps[sent[0].step]
    world.settle()
    world.assert_nothing_is_left()


# After a "not yet" the leader pauses, whatever else wakes it meanwhile

PAUSE_S, ROUNDED_UP_S, ANSWER_S = 0.05, 0.01, 0.002
MOST_S = PAUSE_S + ROUNDED_UP_S + ANSWER_S + 1e-9
FULL, IDLE = 6, 7  # decode instances


class TimedWorld(World):
    """Notes when each request is asked about; the decode instance `FULL` answers "not yet", the others reserve."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self.asked_s: dict[str, list[float]] = {}
        super().__init__()

    async def _reserve(self, join: Join, request_id: str, plan: ChunkPlan) -> Reservation:
        self.asked_s.setdefault(request_id, []).append(self._loop.now_s)
        await asyncio.sleep(ANSWER_S)
        return Reservation(is_reserved=join.incarnation != FULL)


def test_a_request_is_asked_about_twenty_times_a_second_at_most_whatever_wakes_the_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        world, full, idle = TimedWorld(loop), new_join(FULL), new_join(IDLE)
        for name in ("old", "young"):
            world.submit(name, 3, join=full)
        for number in range(200):
            world.submit(f"busy-{number}", 3, join=idle)
            await asyncio.sleep(0.005)
            world.settle()
        assert world.outcomes == ["sent"] * 200
        for name in ("old", "young"):
            pauses_s = [later - earlier for earlier, later in pairwise(world.asked_s[name])]
            assert len(pauses_s) > 15 and all(ANSWER_S + PAUSE_S <= pause_s <= MOST_S for pause_s in pauses_s)
        await world.close()

    run_in_virtual_time(main, monkeypatch, requests_module, outgoing_module)
