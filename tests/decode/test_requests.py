"""A decode leader's requests: each ends exactly once, in whatever order prefill and ranks answer, and nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node import requests as requests_module
from decode_node.offload.tiers import Prompt, Tiers
from decode_node.rank_messages import ExpectRequest, FinishRequest
from tests.decode.leader_moves import MOVES, drained, play
from tests.decode.leader_world import FIRST_TOKEN, PAGE_SIZE, PLAN, POOL_PAGES, World, take, turns
from tests.runtime.hand_clock import HandClock
from transfer import chunk as chunk_module
from transfer.chunk import ChunkPlan
from transfer.connector import incoming as incoming_module
from transfer.connector.messages import CancelIncoming
from transfer.errors import (
    EngineError,
    LayoutError,
    OutOfMemory,
    PeerUnreachable,
    ResourceExhausted,
    StoreFailed,
    TransferAborted,
    TransportClosed,
)
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.status import status_of


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World()
    yield one
    await one.close()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch, requests_module, incoming_module)


async def test_a_request_waits_receives_generates_and_leaves(world: World) -> None:
    request = await world.submitted("a", new=3)
    assert (world.transfers.num_queued, world.transfers.num_running, world.admission.num_running) == (1, 0, 0), "it pins nothing"
    assert world.peer.outstanding_tokens == 3
    reserving = world.reserve("a")
    await turns()
    (expect,) = world.sent
    assert isinstance(expect, ExpectRequest)
    assert (expect.num_tokens, expect.pages, expect.prefill_incarnation) == (3, (2,), 11)
    assert (world.transfers.num_queued, world.transfers.num_running, world.admission.free_pages.by_group) == (0, 1, (6,))
    world.expected(0, "a")
    await turns()
    assert not reserving.done(), "rank 1 may refuse yet"
    world.expected(1, "a")
    assert await reserving == 0  # the first token
    world.complete(0, "a")
    await world.first_token("a")
    assert world.step is None and not take(request), "rank 1 has not everything"
    world.complete(1, "a")
    assert world.step is not None
    assert (world.step.parts[0].token_id, world.step.parts[0].position) == (FIRST_TOKEN, 3)
    world.finish_step(token=8)
    assert (world.step.parts[0].token_id, world.step.parts[0].position) == (8, 4)
    world.finish_step(token=9)
    assert isinstance(world.sent[-1], FinishRequest) and world.step is None
    assert world.outcomes == ["done"] and len(world.first_tokens) == 1
    joined = pb.GeneratedTokens(token_ids=(FIRST_TOKEN, 8, 9), text=f"<{FIRST_TOKEN}><8><9>")
    assert take(request) == [joined], "nobody took the tokens of the first steps"
    world.call("a").sent()
    await turns()
    (done,) = take(request)
    assert isinstance(done, pb.GenerateDone)
    assert (done.finish_reason, done.stats.bytes, done.prefill_node) == ("length", 99, "prefill:1")
    for rank in range(2):
        assert world.transfers.num_running == 1
        world.release(rank, "a")
    world.assert_nothing_is_left()


async def test_an_end_token_ends_generation(world: World) -> None:
    request = world.submit("a", new=5, end_ids=frozenset({8}))
    await turns()
    world.reserve("a")
    world.call("a").first_token()
    world.call("a").sent()
    await turns()
    for rank in range(2):
        world.expected(rank, "a")
        world.complete(rank, "a")
    await turns()
    world.finish_step(token=8)
    done = take(request)[-1]
    assert isinstance(done, pb.GenerateDone) and done.finish_reason == "stop"
    await drained(world)


async def test_only_requests_that_get_tokens_count_as_generating(world: World) -> None:
    await world.received("a", new=2)
    await world.first_token("a")
    await world.submitted("b")
    await world.receiving("c")
    assert world.leader.num_generating == 1
    world.finish_step()
    assert world.leader.num_generating == 0
    await drained(world)


async def test_requests_join_and_leave_the_running_batch(world: World) -> None:
    for name, new in (("a", 3), ("b", 4)):
        await world.received(name, new=new)
        await world.first_token(name)
    assert world.step is not None and [part.request_id for part in world.step.parts] == ["a"]
    world.finish_step()
    assert [part.request_id for part in world.step.parts] == ["a", "b"]
    world.finish_step()
    assert [part.request_id for part in world.step.parts] == ["b"], "a has its three tokens"
    await drained(world)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "complaint"),
    [
        ("x", 11, 22, "request x does not wait here for room"),
        ("a", 11, 23, "request a does not wait here for room"),
        ("a", 13, 22, "given to an earlier process of the prefill node"),
    ],
)
async def test_room_is_only_for_who_waits_here(world: World, name: str, prefill: int, decode: int, complaint: str) -> None:
    await world.submitted()
    with pytest.raises(TransportClosed, match=complaint):
        await world.reserve(name, prefill=prefill, decode=decode)
    assert world.reserve("a") is not None
    await turns()
    with pytest.raises(TransportClosed, match="does not wait here"):
        await world.transfers.reserve("a", 11, 22, PLAN)
    await drained(world)


async def test_a_plan_of_too_many_pieces_is_refused_before_a_rank_hears_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank keeps every piece until the request is over, and its peer chooses the plan."""
    monkeypatch.setattr(chunk_module, "MAX_PIECES", 8)
    await world.submitted("a", num_tokens=3)
    with pytest.raises(
        LayoutError,
        match=r"3 tokens .* 1 layers are 6 chunks; a request on 2 routes can have 4",
    ):
        await world.reserve("a", plan=ChunkPlan(chunk_tokens=1, layers_per_group=1))
    assert not any(isinstance(message, ExpectRequest) for message in world.sent)
    world.reserve("a")
    await turns()
    assert any(isinstance(message, ExpectRequest) for message in world.sent), "one that is right is taken"
    await drained(world)


async def test_a_reason_of_any_length_reaches_the_ranks_as_one_line(world: World) -> None:
    world.submit("a", 3, new=3)
    await turns()
    world.reserve("a")
    await turns()
    assert world.transfers.abort("a", TransferAborted("why\n" * (1 << 20)))
    (cancel,) = [message for message in world.sent if isinstance(message, CancelIncoming)]
    assert len(cancel.reason) <= 512 and "\n" not in cancel.reason


async def test_the_prefill_nodes_reason_comes_before_a_ranks(world: World) -> None:
    request = await world.submitted()
    world.reserve("a")
    await turns()
    world.broken(0, "a", is_data_loss=False)
    world.call("a").fail(EngineError("prefill:1: the engine failed"))
    await turns()
    assert [str(error) for error in take(request)] == ["prefill:1: the engine failed"]


@pytest.mark.parametrize("spares_kv", [False, True])
async def test_kept_kv_is_forgotten_with_the_request_that_is_named_and_not_with_a_whole_step(
    world: World, monkeypatch: pytest.MonkeyPatch, spares_kv: bool
) -> None:
    forgotten: list[Prompt] = []
    monkeypatch.setattr(Tiers, "damaged", lambda _, prompt: forgotten.append(prompt))
    request = await world.submitted()
    world.call("a").fail(EngineError("prefill:1: the engine failed", spares_kv=spares_kv))
    await turns()
    assert isinstance(take(request)[-1], EngineError)
    assert len(forgotten) == (0 if spares_kv else 1)


@pytest.mark.parametrize("how", ["without a word", "without a start"])
async def test_a_call_that_ends_early_fails_the_request(world: World, how: str) -> None:
    request = await world.submitted()
    if how == "without a start":
        world.call("a").first_token()
        world.call("a").sent()
    else:
        world.call("a").events.put_nowait(None)
    await turns()
    assert [str(error) for error in take(request)] == ["prefill:1 ended the call early"]
    assert world.peer.outstanding_tokens == 0


async def test_a_bug_on_the_way_fails_the_request_and_is_no_secret(world: World) -> None:
    request = await world.submitted()
    world.call("a").fail(ZeroDivisionError("a bug"))
    await turns()
    (error,) = take(request)
    assert isinstance(error, EngineError) and "unexpected ZeroDivisionError" in str(error)
    assert world.peer.outstanding_tokens == 0


@pytest.mark.parametrize(
    ("is_out_of_memory", "code"), [(False, grpc.StatusCode.INTERNAL), (True, grpc.StatusCode.RESOURCE_EXHAUSTED)]
)
async def test_a_failed_step_fails_its_requests(world: World, is_out_of_memory: bool, code: grpc.StatusCode) -> None:
    request = await world.received()
    await world.first_token("a")
    world.fail_step(is_out_of_memory=is_out_of_memory)
    error = take(request)[-1]
    assert isinstance(error, OutOfMemory if is_out_of_memory else EngineError) and status_of(error) is code
    await drained(world)


async def test_steps_that_read_the_store_leave_as_much_time_to_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tiers, "reads_store", lambda _, request_id: request_id == "a")
    for name in ("a", "b"):
        await world.received(name, new=6)
        await world.first_token(name)
    requests_of_steps = []
    for compute_s in (2.0, 1.0, 1.5, 4.0, 1.0, 1.0, 1.0, 1.0):
        assert world.step is not None
        requests_of_steps.append([part.request_id for part in world.step.parts])
        world.finish_step(compute_s=compute_s)
    assert requests_of_steps == [["a"], ["b"], ["b"], ["a", "b"], ["b"], ["b"], ["a"], ["a"]], "b is done after five"
    await drained(world)


async def test_a_request_whose_kv_the_store_has_lost_ends_with_that_reason(world: World) -> None:
    request = await world.received()
    await world.first_token("a")
    world.leader.on_kv_lost("b", "nobody has heard of it")
    world.leader.on_kv_lost("a", "rank 1: the store is gone")
    error = take(request)[-1]
    assert isinstance(error, StoreFailed) and str(error) == "rank 1: the store is gone"
    assert status_of(error) is grpc.StatusCode.UNAVAILABLE
    world.finish_step()
    await drained(world)


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_fault_of_a_step_that_read_the_store_waits_for_the_reason_of_another_rank(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    monkeypatch.setattr(Tiers, "reads_store", lambda _, request_id: True)
    forgotten: list[Prompt] = []
    monkeypatch.setattr(Tiers, "damaged", lambda _, prompt: forgotten.append(prompt))
    world = World()
    request = await world.received()
    await world.first_token("a")
    world.finish_step(faults=["a"])
    assert world.step is None and not any(isinstance(one, Exception) for one in take(request))
    if is_reported:
        world.leader.on_kv_lost("a", "rank 1: the store is gone")
    await clock.advance(1.0)
    (error,) = take(request)
    assert isinstance(error, StoreFailed if is_reported else EngineError)
    assert len(forgotten) == (0 if is_reported else 1)
    await drained(world)
    await world.close()


async def test_an_engine_that_hangs_is_given_up_and_a_slow_one_is_not(clock: HandClock) -> None:
    world = World(step_timeout_s=2.0)
    await world.received(new=4)
    await world.first_token("a")
    for _ in range(2):
        await clock.advance(1.5, steps=15)
        assert world.step is not None
        world.finish_step()
    assert not world.hung
    await clock.advance(2.1, steps=21)
    assert world.hung == ["no step of the engine has ended for 2 s (limits.step_timeout_s)"]
    await world.leader.close(PeerUnreachable("the life was given up"))


async def test_what_cannot_be_taken_is_refused_at_once(world: World) -> None:
    with pytest.raises(ResourceExhausted, match=r"prompt and new tokens \(33\) need 9 pages"):
        world.submit("a", POOL_PAGES * PAGE_SIZE, new=1)
    for peer in (world.peer, world.other):
        peer.state = "lost"
    with pytest.raises(PeerUnreachable, match="no prefill node is joined"):
        world.submit("b")
    full = World(max_queued=1)
    full.submit("a")
    with pytest.raises(ResourceExhausted, match=r"decode queue is full \(1 requests wait"):
        full.submit("b")
    await full.close()


async def test_a_request_that_waits_too_long_is_refused(clock: HandClock) -> None:
    world = World(queue_timeout_s=5.0)
    request = await world.submitted()
    await clock.advance(5.0)
    assert [str(item) for item in take(request)] == ["no room within 5 s (limits.queue_timeout_s)"]
    assert world.outcomes == ["refused"]
    assert world.queue_seconds == [5.0], "also who found none has waited"
    await world.close()
    await turns()
    assert world.peer.outstanding_tokens == 0


async def test_the_end_of_a_life_ends_every_request_once() -> None:
    world = World()
    await world.received("running", new=4)
    await world.first_token("running")
    await world.received("done", new=1)
    await world.first_token("done")
    await world.submitted("waiting")
    await world.submitted("reserving")
    reserving = world.reserve("reserving")
    await world.submitted("new")
    await world.leader.close(PeerUnreachable("rank 0 died"))
    await turns()
    with pytest.raises(PeerUnreachable, match="rank 0 died"):
        await reserving
    last = [take(request)[-1] for request in world.accepted]
    assert [type(item) for item in last] == [PeerUnreachable, pb.GenerateDone, *[PeerUnreachable] * 3]
    assert sorted(world.outcomes) == ["done", *["failed"] * 4]
    assert world.peer.outstanding_tokens == world.other.outstanding_tokens == 0


@settings(max_examples=100)
@given(
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 1_000)), max_size=80),
    retries=st.integers(0, 3),
    join_timeout_s=st.sampled_from([0.0, 60.0]),
    can_overlap=st.booleans(),
)
def test_every_request_ends_once_in_any_order_of_answers(
    moves: list[tuple[str, int]], retries: int, join_timeout_s: float, can_overlap: bool
) -> None:
    asyncio.run(play(moves, World(prefill_retries=retries, join_timeout_s=join_timeout_s, can_overlap=can_overlap)))
