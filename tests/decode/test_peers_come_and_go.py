"""Prefill nodes that are named, and no longer named, at run time; and nodes with two addresses, each of which is joined once.

The nodes' joins are the real ones, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.decode.local_nodes import BEAT_S, serve_locally, tier
from tests.prefill.join_server import JoinServer
from tests.runtime.instances import until
from tests.runtime.virtual_time import in_virtual_time
from transfer.connector import prefill_nodes as peers_module
from transfer.connector.prefill_nodes import ALIAS_LOOK_S, SWEEP_S
from transfer.errors import PeerUnreachable
from transfer.instance import Link
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.discovery import DiscoveryView

GRACE_S = 30.0
FIRST, SECOND = "localhost:1", "localhost:2"
ONE_JOIN = frozenset({"one_join"})
NOTHING_FOUND = DiscoveryView(where="the test", addresses=(), waiting={}, problem="", age_s=0.0, failures=0, refused={})


class OldPrefill(JoinServer):
    """An older version: it reports no other nodes, and takes a second address of one life for a new join."""

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncGenerator[pb.JoinEvent, None]:
        request.prefill_address = ""
        async for event in super().Join(request, context):
            if event.HasField("beat"):
                event.beat.ClearField("others_tokens")
            yield event


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, JoinServer]:
    """By address; a test adds them inside its loop."""
    found: dict[str, JoinServer] = {}
    serve_locally(monkeypatch, found)
    return found


def add(nodes: dict[str, JoinServer], *addresses: str) -> list[JoinServer]:
    """One node at each address, of the lives 11, 12 and so on."""
    for life, address in enumerate(addresses, 11):
        nodes[address] = JoinServer(life, capabilities=ONE_JOIN)
    return [nodes[address] for address in addresses]


@in_virtual_time
async def test_a_node_that_is_named_is_joined_and_one_that_is_not_named_is_left_when_idle(nodes: dict[str, JoinServer]) -> None:
    first, _ = add(nodes, FIRST, SECOND)
    async with tier(view=lambda: NOTHING_FOUND) as one:
        assert one.peers.unavailable_reason() == "no prefill node is known: the test: no prefill node is named there"
        one.peers.use([FIRST])
        await one.until(joined=1)
        one.peers.use([FIRST, SECOND])
        await one.until(joined=2)
        busy, other = one.peer(FIRST), one.peer(SECOND)
        busy.outstanding_tokens = 5
        other.outstanding_tokens = 50
        one.peers.use([SECOND])
        assert one.peers.pick() is other, "what is named comes first, whatever it has to do"
        assert one.peers.pick(tried=frozenset({12})) is busy, "where nobody else is left it does"
        await asyncio.sleep(2 * GRACE_S)
        assert busy.state == "joined" and not one.lost and not first.lost, "nothing in flight may fail because of it"
        busy.outstanding_tokens = 0
        await asyncio.sleep(2 * SWEEP_S)
        assert one.states() == {SECOND: "joined"}
        assert one.lost == [(FIRST, 11, "it is named no longer")], "its ranks hear that they need it no more"
        assert first.lost == ["the decode leader has left"]


@in_virtual_time
async def test_the_last_joined_nodes_stay_until_one_that_is_named_takes_their_place(nodes: dict[str, JoinServer]) -> None:
    """An etcd that has lost its data, or a Service whose selector somebody broke, must not take a tier away that works."""
    add(nodes, FIRST, SECOND)
    async with tier(FIRST) as one:
        await one.until(joined=1)
        one.peers.use([])
        await asyncio.sleep(2 * GRACE_S)
        assert one.peers.pick() is one.peer(FIRST)
        one.peers.use([SECOND])
        await asyncio.sleep(2 * GRACE_S)
        assert one.states() == {SECOND: "joined"}
        assert one.lost == [(FIRST, 11, "it is named no longer")]


@in_virtual_time
async def test_one_that_is_gone_is_left_although_nobody_takes_its_place(nodes: dict[str, JoinServer]) -> None:
    (node,) = add(nodes, FIRST)
    async with tier(FIRST, SECOND, view=lambda: NOTHING_FOUND) as one:
        await one.until(joined=1, lost=1)
        one.peers.use([FIRST])
        await asyncio.sleep(2 * SWEEP_S)
        assert one.peer(SECOND).state in ("lost", "joining"), "until the grace is over its breaker is remembered"
        await asyncio.sleep(2 * GRACE_S)
        assert one.states() == {FIRST: "joined"}
        one.peers.use([])
        del nodes[FIRST]
        node.joins.forget_all(PeerUnreachable("the node has ended"))
        await asyncio.sleep(2 * GRACE_S)
        assert len(one.lost) == 1 and not one.peers.peers
        assert one.peers.pick() is None and "no prefill node is known" in one.peers.unavailable_reason()


@pytest.mark.parametrize("attach_s", [0.0, 0.1])
@in_virtual_time
async def test_two_addresses_of_one_node_are_one_join(nodes: dict[str, JoinServer], attach_s: float) -> None:
    (node,) = add(nodes, FIRST)
    nodes[SECOND] = node
    node.attach_s = attach_s
    with capture_logs() as lines:
        async with tier(FIRST, SECOND) as one:  # both are joined at once, before anybody knows whose they are
            await one.until(joined=1, alias=1)
            await asyncio.sleep(ALIAS_LOOK_S / 2)
            await one.until(joined=1, alias=1)
            assert node.num_joins == 1 and not one.lost and not node.lost
            (peer,) = [peer for peer in one.peers.peers if peer.state == "joined"]
            (alias,) = [peer for peer in one.peers.peers if peer.state == "alias"]
            assert alias.reason == f"the node is joined as {peer.address}" and alias.instance is None
            assert one.peers.pick() is peer and one.peers.pick(tried=frozenset({11})) is None
            assert one.peers.find(FIRST) is one.peers.find(SECOND) is peer
            one.peers.use([alias.address])
            await asyncio.sleep(2 * GRACE_S)
            assert one.states()[peer.address] == "joined", "the node is still named, by its other address"
    assert not [line for line in lines if line["log_level"] in ("warning", "error", "critical")]


@in_virtual_time
async def test_answers_that_change_and_change_do_not_have_ever_more_addresses_tried(
    nodes: dict[str, JoinServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_KNOWN", 20)
    add(nodes, FIRST)
    looks = [[f"127.0.0.1:{10 * look + port}" for port in range(1, 11)] for look in range(12)]
    async with tier(FIRST, *looks[0]) as one:
        await one.until(joined=1, lost=10)
        busy, waited = one.peer(looks[0][0]), one.peer(looks[0][1])
        busy.outstanding_tokens = 1
        every = list(one.peers.peers)
        waited.num_users = 1
        for look in looks[1:]:
            await asyncio.sleep(0.01)
            one.peers.use(look)
            every += [peer for peer in one.peers.peers if peer not in every]
            assert len(one.peers.peers) <= 20
        assert set(looks[-1]) <= set(one.states()), "every named node is contacted"
        assert one.states()[FIRST] == "joined" and {busy, waited} <= set(one.peers.peers), "nodes in use stay"
        latest_s = max(peer.unnamed_s or 0.0 for peer in one.peers.peers)
        assert [peer.address for peer in one.peers.peers if peer.unnamed_s == latest_s] == looks[-2][3:], (
            "the latest of the others"
        )
        await asyncio.sleep(BEAT_S)
        going_on = [peer for peer in every if peer.joining is not None and not peer.joining.done()]
        assert set(going_on) == set(one.peers.peers) and len(going_on) == 20
        busy.outstanding_tokens = 0


@in_virtual_time
async def test_an_older_node_with_two_addresses_is_not_fought_over(nodes: dict[str, JoinServer]) -> None:
    old = nodes[FIRST] = nodes[SECOND] = OldPrefill(11)
    async with tier(FIRST) as one:
        await one.until(joined=1)
        one.peers.use([FIRST, SECOND])
        await until(lambda: old.num_joins == 2)
        await one.until(joined=1, alias=1)
        await asyncio.sleep(2 * ALIAS_LOOK_S)
        await one.until(joined=1, alias=1)
        assert old.num_joins == 2, "the second join took the first one's place, once"


@in_virtual_time
async def test_a_prompt_goes_where_its_beginning_was_and_else_where_there_is_least_to_do_and_the_fastest_link(
    nodes: dict[str, JoinServer],
) -> None:
    add(nodes, FIRST, SECOND)
    async with tier(FIRST, SECOND, prefix_tokens=512) as one:
        await one.until(joined=2)
        slow, fast = one.peers.peers
        for peer, bandwidth in ((slow, 1e9), (fast, 2e9)):
            peer.links = [
                Link(prefill_rank=0, decode_rank=rank, lane="x", latency_s=0.0, bandwidth_bytes_per_s=bandwidth * (1 + rank))
                for rank in range(2)
            ]
        asked, longer = tuple(range(600)), tuple(range(900))
        assert one.peers.pick(token_ids=asked) is fast, "of equal work the one whose slowest link is fastest"
        one.peers.begin(slow, asked)
        slow.outstanding_tokens = 500
        assert one.peers.pick(token_ids=longer) is slow, "512 of its tokens were there lately"
        assert one.peers.pick(token_ids=longer, cache_salt="another") is fast
        assert one.peers.pick(token_ids=longer, tried=frozenset({11})) is fast
        slow.outstanding_tokens = 600
        assert one.peers.pick(token_ids=longer) is fast, "that is too much waiting"
        slow.outstanding_tokens = 500
        one.peers.use([SECOND])
        assert one.peers.pick(token_ids=longer) is fast, "what is named comes first"


@in_virtual_time
async def test_what_a_node_tells_of_others_counts_until_it_is_lost(nodes: dict[str, JoinServer]) -> None:
    first, second = add(nodes, FIRST, SECOND)
    async with tier(FIRST, SECOND) as one:
        await one.until(joined=2)
        left, right = one.peers.peers
        first.traffic.tokens, second.traffic.tokens = 100, 50
        await asyncio.sleep(2 * BEAT_S)
        assert (left.others_tokens, right.others_tokens) == (100, 50)
        assert one.peers.pick() is right
        right.outstanding_tokens = 51  # sent since the heartbeat
        assert one.peers.pick() is left
        assert [peer.status().others_tokens for peer in (left, right)] == [100, 50]
        first.traffic.tokens = 1 << 32
        await asyncio.sleep(2 * BEAT_S)
        assert left.others_tokens is None
        assert one.peers.pick() is left, "what cannot be is not told, and then no one's counts"
        assert not left.status().HasField("others_tokens") and left.state == "joined"
        first.traffic.tokens = 100
        await asyncio.sleep(2 * BEAT_S)
        assert left.others_tokens == 100
        first.attach_s = 0.2
        for join in first.joins:
            first.joins.leave(join, PeerUnreachable("for the test"))
        await until(lambda: left.instance is None)
        assert left.others_tokens is None and not left.status().HasField("others_tokens")
        first.traffic.tokens = 3
        await until(lambda: left.others_tokens == 3)


@in_virtual_time
async def test_a_node_of_an_older_release_tells_nothing_and_looks_no_more_idle_for_it(nodes: dict[str, JoinServer]) -> None:
    (new,) = add(nodes, SECOND)
    nodes[FIRST] = OldPrefill(12)
    new.traffic.tokens = 10**6
    async with tier(FIRST, SECOND) as one:
        await one.until(joined=2)
        await asyncio.sleep(2 * BEAT_S)
        old, other = one.peers.peers
        assert (old.others_tokens, other.others_tokens) == (None, 10**6)
        old.outstanding_tokens, other.outstanding_tokens = 2, 1
        assert one.peers.pick() is other
