"""A request whose prefill node is lost before the first token: tried elsewhere, under another id, and with nothing left over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode_node import requests as requests_module
from decode_node.offload.tiers import Prompt, Tiers
from decode_node.rank_messages import ExpectRequest
from tests.decode.leader_moves import play
from tests.decode.leader_world import (
    FIRST_TOKEN,
    OTHER_LIFE,
    POOL_PAGES,
    PREFILL_LIFE,
    Peer,
    World,
    outcome,
    take,
    turns,
)
from tests.runtime.hand_clock import HandClock
from tests.runtime.instances import instance
from transfer.connector import incoming as incoming_module
from transfer.connector.prefill_nodes import REASON_GRACE_S
from transfer.errors import (
    ConfigError,
    EngineError,
    IntegrityError,
    LayoutError,
    PeerUnreachable,
    Preempted,
    ResourceExhausted,
    TransferAborted,
    TransferError,
    TransportClosed,
    TransportTimeout,
)
from transfer.instance import Instance
from transfer.pb import kvferry_pb2 as pb

LOST = "prefill node prefill:1 is lost: it is silent"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = World(prefill_retries=1)
    yield one
    await one.close()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch, requests_module, incoming_module)


async def test_a_request_that_waits_is_tried_elsewhere(world: World) -> None:
    request = await world.submitted()
    world.lose(world.peer)
    await turns()
    assert world.call("a").is_over and sorted(world.other.calls) == ["a.2"]
    assert world.other.calls["a.2"].token_ids == request.token_ids
    assert (world.peer.outstanding_tokens, world.other.outstanding_tokens) == (0, 3)
    assert not world.cancelled(), "no rank had heard of it"
    await world.served("a.2")
    done = outcome(request)
    assert isinstance(done, pb.GenerateDone)
    assert (done.prefill_node, done.retries, done.finish_reason) == ("prefill:2", 1, "length")
    assert request.generated[0] == FIRST_TOKEN + 100 and world.num_retries == 1, "the second life's"
    world.assert_nothing_is_left()
    assert world.outcomes == ["done"]


async def test_a_request_in_mid_transfer_is_tried_elsewhere_and_the_first_try_is_given_back_by_the_ranks(world: World) -> None:
    request = await world.receiving()
    world.call("a").first_token()
    world.complete(0, "a")
    await turns()
    world.lose(world.peer)
    await turns()
    assert world.cancelled() == ["a"] and not take(request)
    assert (world.transfers.num_queued, world.transfers.num_running) == (1, 0), "it is one request"
    assert world.transfers.request_ids == ("a", "a.2")
    await world.give_room("a.2")
    assert world.admission.free_pages.by_group == (POOL_PAGES - 4,), "both hold room, for the ranks still have the first"
    expect = world.sent[-1]
    assert isinstance(expect, ExpectRequest) and expect.prefill_incarnation == OTHER_LIFE
    world.complete(0, "a.2")
    assert not take(request), "what came of the first try does not count"
    await world.finish("a.2")
    for rank in range(2):
        world.release(rank, "a")
    assert world.admission.free_pages.by_group == (POOL_PAGES - 2,)
    assert isinstance(outcome(request), pb.GenerateDone)
    await world.release_all()
    world.assert_nothing_is_left()


async def test_late_events_of_the_first_attempt_do_not_affect_the_second(world: World) -> None:
    request = await world.submitted()
    reserving = world.reserve("a")
    await turns()
    call = world.call("a")
    world.lose(world.peer)
    await turns()
    with pytest.raises(PeerUnreachable, match="it is silent"):
        await reserving
    with pytest.raises(TransportClosed, match="request a does not wait here"):
        await world.reserve("a", prefill=11)
    with pytest.raises(TransportClosed, match=r"request a\.2 was given to an earlier process"):
        await world.reserve("a.2", prefill=11)
    call.first_token()
    call.sent()
    for rank in range(2):
        world.expected(rank, "a")
        world.transfers.on_whole(rank, "a")
        world.broken(rank, "a", is_data_loss=True)
    await turns()
    assert not take(request) and request.current.first_token is None and request.current.stage.name == "WAITING"
    for rank in range(2):
        world.release(rank, "a")
    world.transfers.on_whole(0, "a")
    await world.served("a.2")
    assert isinstance(outcome(request), pb.GenerateDone)
    world.assert_nothing_is_left()


@pytest.mark.parametrize("error", [PeerUnreachable("gone"), TransportTimeout("late"), TransportClosed("over"), None])
@pytest.mark.parametrize("has_room", [True, False])
async def test_what_the_peer_is_to_blame_for_is_tried_again(world: World, error: TransferError | None, has_room: bool) -> None:
    request = await (world.receiving() if has_room else world.submitted())
    if error is not None:
        world.call("a").fail(error)
    else:
        world.call("a").events.put_nowait(None)  # it ends the call without a word
    await turns()
    assert sorted(world.other.calls) == ["a.2"] and not take(request)
    assert world.cancelled() == (["a"] if has_room else [])
    await world.served("a.2")
    assert isinstance(outcome(request), pb.GenerateDone)
    world.assert_nothing_is_left()


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("invalid"),
        LayoutError("the pieces do not fit the ring"),
        ResourceExhausted("the queue is full"),
        TransferAborted("by an operator"),
        EngineError("the engine failed"),
        IntegrityError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_of_the_request_itself_is_not_retried(world: World, error: TransferError) -> None:
    request = await world.receiving()
    world.call("a").fail(error)
    await turns()
    assert outcome(request) is error and not world.other.calls
    await world.release_all()
    world.assert_nothing_is_left()


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_prompt_that_prefill_preempted_is_retried_without_a_limit(world: World, has_room: bool) -> None:
    """Retry on the same prefill engine after it preempts the prompt, without counting a retry."""
    world.other.state = "lost"
    request = world.submit("a")
    for name in ("a", "a.2", "a.3", "a.4"):
        await turns()
        if has_room:
            await world.give_room(name)
        world.call(name).fail(Preempted("its pages are taken back"))
        await turns()
        await world.release_all()
    await world.served("a.5")
    done = outcome(request)
    assert isinstance(done, pb.GenerateDone) and done.retries == world.num_retries == 0
    world.assert_nothing_is_left()


async def test_bytes_that_were_broken_twice_are_not_tried_again(world: World) -> None:
    request = await world.receiving()
    world.broken(0, "a", is_data_loss=True)
    await turns()
    error = outcome(request)
    assert isinstance(error, IntegrityError) and str(error) == "decode rank 0: broke" and not world.other.calls


async def test_a_rank_that_has_lost_a_writer_has_the_request_tried_elsewhere(world: World, clock: HandClock) -> None:
    """Its leader may know nothing: a frozen rank tells nobody."""
    request = await world.receiving()
    for rank in range(2):
        world.broken(rank, "a", is_data_loss=False)
    await turns()
    assert not world.other.calls, "the prefill node may have a better reason, or one that is no fault of its own"
    await clock.advance(REASON_GRACE_S)
    assert sorted(world.other.calls) == ["a.2"] and world.call("a").is_over
    assert world.peer.state == "joined", "that is found out elsewhere; until then it is left out because it was tried"
    await world.served("a.2")
    assert isinstance(outcome(request), pb.GenerateDone)


async def test_without_another_node_it_fails_at_once_with_the_reason(world: World) -> None:
    world.other.state = "draining"
    request = await world.receiving()
    world.lose(world.peer)
    assert str(outcome(request)) == LOST and world.num_retries == 0
    await world.release_all()
    world.assert_nothing_is_left()


@pytest.mark.parametrize(("life", "is_another"), [(11, False), (13, True)])
async def test_another_life_of_the_same_node_is_another_node(world: World, life: int, is_another: bool) -> None:
    world.other.state = "lost"
    request = await world.submitted()
    world.peer.instance = instance(life)  # it has been lost, and joined again, when the end of the call is heard
    world.call("a").fail(PeerUnreachable("the connection broke"))
    await turns()
    if is_another:
        assert sorted(world.peer.calls) == ["a", "a.2"] and not take(request)
        assert request.current.incarnation == life
    else:
        assert str(outcome(request)) == "the connection broke", "a second time to the same life would end the same"


async def test_after_the_first_token_the_prefill_node_is_needed_no_more(world: World) -> None:
    request = await world.receiving()
    world.call("a").first_token()
    world.complete_all("a")
    await turns()
    (first,) = take(request)
    assert isinstance(first, pb.GeneratedTokens)
    world.lose(world.peer)
    await turns()
    while world.step is not None:
        world.finish_step()
    await turns()
    done = outcome(request)
    assert isinstance(done, pb.GenerateDone) and (done.retries, done.prefill_node) == (0, "prefill:1") and not world.other.calls


async def test_an_abort_by_the_first_id_is_heard_after_the_ranks_have_forgotten_it(world: World) -> None:
    request = await world.receiving()
    world.lose(world.peer)
    await turns()
    await world.release_all()
    assert world.transfers.abort("a", TransferAborted("enough"))
    assert isinstance(outcome(request), TransferAborted)
    await turns()
    world.assert_nothing_is_left()


async def test_the_wait_for_room_is_bounded_over_all_tries(clock: HandClock) -> None:
    world = World(prefill_retries=1, queue_timeout_s=100.0)
    request = await world.submitted()
    await clock.advance(99.0)
    world.lose(world.peer)
    await turns()
    assert not world.outcomes
    await clock.advance(1.0)
    assert str(outcome(request)) == "no room within 100 s (limits.queue_timeout_s)" and world.outcomes == ["refused"]
    await turns()
    world.assert_nothing_is_left()
    assert world.num_retries == 1


OFTEN = (
    *("submit", "turn", "reserve", "expected", "complete", "token", "step", "release") * 4,
    *("sent", "lose peer", "rejoin", "drain", "clock", "call fails", "refused", "abort", "broken"),
)


async def test_every_request_ends_once_however_often_its_nodes_are_lost() -> None:
    """As `test_every_request_ends_once_in_any_order_of_answers`, with moves that get requests far before they are cut off."""
    attempts: Counter[int] = Counter()
    for seed in range(40):
        chance = random.Random(seed)
        world = World(prefill_retries=chance.choice((1, 2, 5)), max_running=8, join_timeout_s=chance.choice((0.0, 60.0)))
        try:
            await play(((chance.choice(OFTEN), chance.randrange(1000)) for _ in range(200)), world)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        attempts.update(len(request.attempts) for request in world.accepted)
    assert attempts[1] > 250 and attempts[2] > 120 and attempts[3] > 2, f"histories that try little: {attempts}"


# Breakers

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"


def state(peer: Peer) -> str:
    return peer.breaker.state.value


def back(peer: Peer, life: int) -> None:
    """A node that was lost has joined again."""
    peer.state, peer.instance = "joined", instance(life)


async def test_a_node_that_was_lost_gets_nothing_while_another_is_there_then_one_request_and_then_its_share(world: World) -> None:
    world.lose(world.peer)
    back(world.peer, 13)
    for number in range(4):
        await world.submitted(f"open{number}")
    assert state(world.peer) == OPEN and not world.peer.calls
    world.now_s += 1.0
    for number in range(4):
        await world.submitted(f"half{number}")
    assert state(world.peer) == HALF_OPEN and sorted(world.peer.calls) == ["half0"], "one tries it, the others go elsewhere"
    await world.served("half0")
    assert state(world.peer) == CLOSED
    for number in range(4):
        await world.submitted(f"closed{number}")
    assert sorted(world.peer.calls) == ["closed0", "closed1", "closed2", "closed3", "half0"], "it has the least to do"


async def test_requests_that_fail_by_its_fault_open_a_breaker_and_others_do_not(world: World) -> None:
    world.other.state = "lost"
    for error in (ResourceExhausted("full"), TransferAborted("operator"), ConfigError("no"), LayoutError("no")):
        for number in range(3):
            await world.submitted(f"{type(error).__name__}{number}")
            world.call(f"{type(error).__name__}{number}").fail(error)
            await turns()
    assert state(world.peer) == CLOSED
    for number, fault in enumerate((PeerUnreachable("gone"), EngineError("failed"), IntegrityError("broken"))):
        assert state(world.peer) == CLOSED
        await world.submitted(f"fault{number}")
        world.call(f"fault{number}").fail(fault)
        await turns()
    assert state(world.peer) == OPEN and world.peers.num_openings == 1
    assert world.peer.breaker_reason == "broken"


async def test_an_abort_or_a_failed_step_says_nothing_of_the_prefill_node(world: World) -> None:
    world.other.state = "lost"
    for number in range(3):
        await world.receiving(f"a{number}", new=2)
        world.transfers.abort(f"a{number}", TransferAborted("left"))
        await world.release_all()
    for number in range(3):
        await world.receiving(f"b{number}", new=2)
        world.call(f"b{number}").first_token()
        world.complete_all(f"b{number}")
        await turns()
        world.fail_step()
        await world.release_all()
    assert state(world.peer) == CLOSED and not world.peers.num_openings


async def test_each_try_looks_its_prompt_up_for_the_node_that_it_goes_to(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of other precisions have other KV: what the first try found is of no use to the second."""
    asked: list[int] = []
    look_up = Tiers.look_up

    async def noted(tiers: Tiers, *args: Any, prefill: Instance, may_skip: bool) -> Prompt:
        asked.append(prefill.incarnation)
        return await look_up(tiers, *args, prefill=prefill, may_skip=may_skip)

    monkeypatch.setattr(Tiers, "look_up", noted)
    request = await world.submitted()
    first = request.known
    world.lose(world.peer)
    await turns()
    assert asked == [PREFILL_LIFE, OTHER_LIFE]
    assert first is not None and request.known is not None and request.known is not first
