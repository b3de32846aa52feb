"""A request that finds no prefill node joined: it waits in the queue for one that may come, in the order of arrival."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.decode.leader_world import OTHER_LIFE, World, outcome, take, turns
from tests.runtime.hand_clock import HandClock
from tests.runtime.instances import instance
from transfer.connector import incoming as incoming_module
from transfer.connector.incoming import PLACE_AFTER_S
from transfer.errors import PeerUnreachable, ResourceExhausted, TransferAborted, TransportClosed
from transfer.pb import kvferry_pb2 as pb

NEVER_S = 60.0
NOBODY = "no prefill node is joined"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    one = alone(World(prefill_retries=1, join_timeout_s=NEVER_S))
    yield one
    await one.close()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch, incoming_module)


def alone(world: World) -> World:
    """No prefill node is joined; both may come."""
    for peer in (world.peer, world.other):
        peer.state, peer.instance = "lost", None
    return world


async def test_it_is_queued_and_sent_when_a_node_is_joined(world: World) -> None:
    request = await world.submitted()
    assert (world.transfers.num_queued, world.transfers.num_running) == (1, 0) and not take(request)
    (view,) = world.transfers.views()
    assert (view.request_id, view.transfer_id, view.stage, view.peer, view.retries) == ("a", "a", "queued", "", 0)
    assert world.transfers.request_ids == ("a",)
    with pytest.raises(TransportClosed, match="request a does not wait here for room"):
        await world.reserve("a", prefill=OTHER_LIFE)
    world.join(world.other, 30)
    assert world.other.outstanding_tokens == 3, "sent at once"
    await turns()
    assert sorted(world.other.calls) == ["a"] and world.transfers.num_queued == 1
    assert world.transfers.views()[0].peer == "prefill:2"
    await world.served("a")
    done = outcome(request)
    assert isinstance(done, pb.GenerateDone) and (done.retries, done.prefill_node) == (0, "prefill:2") and world.num_retries == 0
    world.assert_nothing_is_left()


@pytest.mark.parametrize("why", ["none fits", "an alias is no node", "none is named", "it may not", "the setting is 0"])
async def test_where_none_can_be_waited_for_it_is_refused_at_once(why: str) -> None:
    world = alone(World(join_timeout_s=0.0 if why == "the setting is 0" else NEVER_S))
    match why:
        case "none fits":
            for peer in (world.peer, world.other):
                peer.unfit.set()
        case "an alias is no node":
            world.peer.state = world.other.state = "alias"
        case "none is named":
            world.peers.peers.clear()
    with pytest.raises(PeerUnreachable, match=NOBODY):
        world.submit("a", may_wait=why != "it may not")
    world.assert_nothing_is_left()
    assert not world.outcomes


async def test_the_wait_ends_with_the_reason_that_there_is_then(clock: HandClock) -> None:
    world = alone(World(join_timeout_s=5.0))
    request = await world.submitted()
    await clock.advance(5.0)
    error = outcome(request)
    assert type(error) is PeerUnreachable and str(error) == NOBODY
    assert world.outcomes == ["refused"] and not world.peer.calls
    world.assert_nothing_is_left()


async def test_the_time_in_the_queue_bounds_the_wait_and_the_wait_counts_as_time_in_the_queue(clock: HandClock) -> None:
    world = alone(World(join_timeout_s=NEVER_S, queue_timeout_s=5.0))
    request = await world.submitted()
    await clock.advance(5.0)
    assert str(outcome(request)) == NOBODY
    world.assert_nothing_is_left()

    world = alone(World(join_timeout_s=NEVER_S, queue_timeout_s=50.0))
    request = await world.submitted()
    await clock.advance(49.0)
    world.join(world.peer, 30)
    await turns()
    assert not world.outcomes
    await clock.advance(1.0)
    assert str(outcome(request)) == "no room within 50 s (limits.queue_timeout_s)"
    await turns()
    world.assert_nothing_is_left()


async def test_the_queue_is_bounded_for_those_that_wait_for_a_node_too() -> None:
    world = alone(World(max_queued=2, join_timeout_s=NEVER_S))
    for name in ("a", "b"):
        await world.submitted(name)
    with pytest.raises(ResourceExhausted, match=r"decode queue is full \(2 requests wait; limits.max_queued_requests\)"):
        world.submit("c")
    assert world.transfers.abort("a", TransferAborted("enough"))
    await world.submitted("c")
    await world.close()


# Another try


async def test_another_try_waits_for_a_node_that_the_request_has_not_been_on() -> None:
    world = World(prefill_retries=1, join_timeout_s=NEVER_S)
    world.other.state = "joining"
    request = await world.receiving()
    world.lose(world.peer)
    await turns()
    assert world.cancelled() == ["a"] and not take(request) and world.num_retries == 0
    assert (world.transfers.num_queued, world.transfers.num_running) == (1, 0)
    assert world.transfers.request_ids == ("a", "a.2") and world.transfers.views()[0].retries == 0
    await world.release_all()
    assert world.transfers.request_ids == ("a", "a.2"), "an abort by either id is heard"
    world.join(world.other, 30)
    await turns()
    assert sorted(world.other.calls) == ["a.2"] and world.num_retries == 1
    await world.served("a.2")
    done = outcome(request)
    assert isinstance(done, pb.GenerateDone) and (done.retries, done.prefill_node) == (1, "prefill:2")
    world.assert_nothing_is_left()


async def test_nodes_that_come_together_share_what_waited(world: World, clock: HandClock) -> None:
    """The first of two that are joined within milliseconds is not to have all of it."""
    for name in "abcd":
        await world.submitted(name)
    for peer, life in ((world.peer, 30), (world.other, 31)):
        peer.state, peer.instance = "joined", instance(life)
        world.transfers.peers_changed()
    assert world.peer.outstanding_tokens == world.other.outstanding_tokens == 0, "a moment later"
    await clock.advance(PLACE_AFTER_S)
    assert world.peer.outstanding_tokens == world.other.outstanding_tokens > 0


async def test_long_prompts_are_placed_a_few_at_once(world: World, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose a node for a prompt takes time that grows with it, and everything else on the loop waits meanwhile."""
    monkeypatch.setattr(incoming_module, "PLACED_TOKENS_AT_ONCE", 5)
    for name in "abc":
        await world.submitted(name)  # of three tokens each
    world.join(world.peer, 30)
    assert world.num_without_node == 1
    await clock.advance(PLACE_AFTER_S)
    assert not world.num_without_node


async def test_a_node_that_comes_at_the_very_end_of_the_wait_is_in_time(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is to be given is placed a moment later, and some of it later still; nobody is told that no node is joined."""
    monkeypatch.setattr(incoming_module, "PLACE_AFTER_S", NEVER_S)
    world = alone(World(join_timeout_s=1.0))
    requests = [await world.submitted(name) for name in "abcd"]
    world.peer.state, world.peer.instance = "joined", instance(30)
    world.transfers.peers_changed()
    await clock.advance(1.0)
    assert not world.outcomes and len(world.peer.calls) == len(requests)
    await world.close()


async def test_nobody_who_comes_later_overtakes_those_that_wait(
    world: World, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the moment before they are placed, nor in those between."""
    monkeypatch.setattr(incoming_module, "PLACED_AT_ONCE", 2)
    for name in "abcd":
        await world.submitted(name)
    world.peer.state, world.peer.instance = "joined", instance(30)
    world.transfers.peers_changed()
    await world.submitted("e")
    await clock.advance(PLACE_AFTER_S)
    assert world.num_without_node == 3
    await world.submitted("f")
    await clock.advance(2 * PLACE_AFTER_S, steps=2)
    assert not world.num_without_node
    await world.submitted("g")
    await turns()
    assert list(world.peer.calls) == ["a", "b", "c", "d", "e", "f", "g"]
