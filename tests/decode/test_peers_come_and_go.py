"""Prefill nodes that are named, and no longer named, at run time; and nodes with two addresses, each of which is joined once.

The prefill side is the real leader, whose one rank attaches to whatever it is told to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from decode_node import peers as peers_module
from decode_node.peers import PrefillPeers
from decode_node.prefill_peer import PrefillPeer, peer_status
from node_runtime.daemon import Daemon, NodeState
from prefill_node.cutting import Cut
from prefill_node.joins import Joins
from prefill_node.node import PrefillNode
from prefill_node.rank_messages import AttachDecode, DecodeAttached
from tests.runtime.instances import instance, prefill_config, until
from transfer.breaker import BreakerSettings
from transfer.chunk import ChunkPlan
from transfer.errors import PeerUnreachable
from transfer.instance import Link
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.discovery import DiscoveryView

GRACE_S = 30.0
CUT = Cut(plan=ChunkPlan(chunk_tokens=4), largest_piece_bytes=64)


class Prefill:
    """A prefill node: `attach_s` after it was asked its rank is attached."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        self.attach_s = 0.0
        self.num_joins = 0
        self.lost: list[str] = []
        self.others_tokens = 0
        daemon = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None))
        self.node = PrefillNode(daemon, prefill_config(folder))
        self.joins = Joins(1, self._rank, lambda join, error: self.lost.append(str(error)), lambda join: CUT)
        life = SimpleNamespace(
            joins=self.joins,
            instance=instance(incarnation, capabilities=frozenset({"one_join"})),
            requests=SimpleNamespace(is_idle=lambda join: True, others_tokens=lambda join: self.others_tokens),
        )
        self.node._life = cast(Any, life)

    def _rank(self, message: object) -> None:
        if isinstance(message, AttachDecode):
            self.num_joins += 1
            attached = DecodeAttached(join=message.join, incarnation=message.instance.incarnation, links=())
            asyncio.get_running_loop().call_later(self.attach_s, self.joins.on_attached, 0, attached)

    async def open(self) -> tuple[str, str]:
        """Two addresses of it."""
        address = await self.node.open()
        return address, f"localhost:{address.rpartition(':')[2]}"


class Tier:
    """The decode side's view of them."""

    def __init__(self, *addresses: str, prefix_tokens: int = 0) -> None:
        self.lost: list[tuple[str, int, str]] = []
        self.now_s = 0.0
        self.view = DiscoveryView(where="the test", addresses=(), waiting={}, problem="", age_s=0.0, failures=0, refused={})
        self.peers = PrefillPeers(
            list(addresses),
            own=instance(7),
            decode_address="127.0.0.1:1",
            rank_addresses=("127.0.0.1:2",),
            heartbeat_s=0.1,
            ring_capacity_bytes=1 << 20,
            breaker=BreakerSettings(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=8.0),
            on_lost=lambda peer, incarnation, reason: self.lost.append((peer.address, incarnation, reason)),
            on_breaker_opened=lambda: None,
            grace_s=GRACE_S,
            view=lambda: self.view,
            prefix_tokens=prefix_tokens,
            clock=lambda: self.now_s,
        )

    def peer(self, address: str) -> PrefillPeer:
        (peer,) = [peer for peer in self.peers.peers if peer.address == address]
        return peer

    def states(self) -> dict[str, str]:
        return {peer.address: peer.state for peer in self.peers.peers}

    async def until(self, **states: int) -> None:
        """Until so many peers are in each of these states, and no others are there."""
        await until(lambda: Counter(self.states().values()) == Counter(states))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(peers_module, "MAX_BACKOFF_S", 0.1)
    monkeypatch.setattr(peers_module, "SWEEP_S", 0.01)


@asynccontextmanager
async def prefill(folder: Path, *incarnations: int) -> AsyncIterator[list[Prefill]]:
    nodes = [Prefill(folder, incarnation) for incarnation in incarnations]
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.node.close()


@asynccontextmanager
async def tier(*addresses: str, prefix_tokens: int = 0) -> AsyncIterator[Tier]:
    one = Tier(*addresses, prefix_tokens=prefix_tokens)
    one.peers.start()
    try:
        yield one
    finally:
        await one.peers.close()


async def test_a_node_that_is_named_is_joined_and_one_that_is_not_named_is_left_when_idle(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11, 12) as nodes, tier() as one:
        (first, _), (second, _) = [await node.open() for node in nodes]
        assert one.peers.why_none() == "no prefill node is known: the test: no prefill node is named there"
        one.peers.use([first])
        await one.until(joined=1)
        one.peers.use([first, second])
        await one.until(joined=2)
        busy, other = one.peer(first), one.peer(second)
        busy.outstanding_tokens = 5
        other.outstanding_tokens = 50
        one.peers.use([second])
        assert one.peers.pick() is other, "what is named comes first, whatever it has to do"
        assert one.peers.pick(tried=frozenset({12})) is busy, "where nobody else is left it does"
        one.now_s += 2 * GRACE_S
        await asyncio.sleep(0.05)
        assert busy.state == "joined" and not one.lost and not nodes[0].lost, "nothing in flight may fail because of it"
        busy.outstanding_tokens = 0
        await until(lambda: one.states() == {second: "joined"})
        assert one.lost == [(first, 11, "it is named no longer")], "its ranks hear that they need it no more"
        await until(lambda: nodes[0].lost == ["the decode leader has left"])


async def test_one_that_is_named_and_not_asked_yet_may_come() -> None:
    """A request waits for it, also where the last one that was there is gone."""
    async with tier() as decode:
        assert not decode.peers.may_come()
        decode.view = replace(decode.view, waiting={"10.0.0.1:7100": "it is asked whether it serves"})
        assert decode.peers.may_come()


async def test_one_that_is_named_again_in_time_was_never_away(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11, 12) as nodes, tier() as one:
        addresses = [(await node.open())[0] for node in nodes]
        one.peers.use(addresses)
        await one.until(joined=2)
        one.peers.use(addresses[1:])
        one.now_s += GRACE_S - 1
        await asyncio.sleep(0.03)
        one.peers.use(addresses)
        one.now_s += 2 * GRACE_S
        await asyncio.sleep(0.03)
        await one.until(joined=2)
        assert [node.num_joins for node in nodes] == [1, 1] and not one.lost


async def test_the_last_joined_nodes_stay_until_one_that_is_named_takes_their_place(tmp_path: Path) -> None:
    """An etcd that has lost its data, or a Service whose selector somebody broke, must not take a tier away that works."""
    async with prefill(tmp_path, 11, 12) as nodes, tier() as one:
        (old, _), (new, _) = [await node.open() for node in nodes]
        one.peers.use([old])
        await one.until(joined=1)
        one.peers.use([])
        one.now_s += 2 * GRACE_S
        await asyncio.sleep(0.05)
        assert one.peers.pick() is one.peer(old)
        one.peers.use([new])
        await one.until(joined=2)
        one.now_s += 2 * GRACE_S
        await until(lambda: one.states() == {new: "joined"})
        assert one.lost == [(old, 11, "it is named no longer")]


async def test_the_first_that_is_named_again_does_not_cost_the_others_their_joins(tmp_path: Path) -> None:
    """Prefill nodes that did not reach etcd for longer than the grace register anew one after the other."""
    async with prefill(tmp_path, 11, 12, 13) as nodes, tier() as one:
        addresses = [(await node.open())[0] for node in nodes]
        one.peers.use(addresses)
        await one.until(joined=3)
        one.peers.use([])
        one.now_s += 2 * GRACE_S
        await asyncio.sleep(0.05)
        one.peers.use(addresses[:1])
        one.now_s += GRACE_S - 1
        await asyncio.sleep(0.05)
        one.peers.use(addresses[:2])
        await asyncio.sleep(0.05)
        await one.until(joined=3)
        one.now_s += 2  # the third does not come back: its grace began with the first that did
        await until(lambda: one.states() == dict.fromkeys(addresses[:2], "joined"))
        assert [node.num_joins for node in nodes] == [1, 1, 1] and [lost[0] for lost in one.lost] == addresses[2:]


async def test_one_that_is_gone_is_left_although_nobody_takes_its_place(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11) as (node,), tier() as one:
        (address, _) = await node.open()
        one.peers.use([address, "127.0.0.1:1"])
        await one.until(joined=1, lost=1)
        one.peers.use([address])
        await asyncio.sleep(0.03)
        assert one.peer("127.0.0.1:1").state in ("lost", "joining"), "until the grace is over its breaker is remembered"
        one.now_s += 2 * GRACE_S
        await until(lambda: one.states() == {address: "joined"})
        one.peers.use([])
        await node.node.close()
        await until(lambda: len(one.lost) == 1)
        one.now_s += 2 * GRACE_S
        await until(lambda: not one.peers.peers)
        assert one.peers.pick() is None and "no prefill node is known" in one.peers.why_none()


@pytest.mark.parametrize("attach_s", [0.0, 0.1])
async def test_two_addresses_of_one_node_are_one_join(tmp_path: Path, attach_s: float) -> None:
    with capture_logs() as lines:
        async with prefill(tmp_path, 11) as (node,), tier() as one:
            node.attach_s = attach_s
            both = await node.open()
            one.peers.use(both)  # both are joined at once, before anybody knows whose they are
            await one.until(joined=1, alias=1)
            await asyncio.sleep(0.2)
            await one.until(joined=1, alias=1)
            assert node.num_joins == 1 and not one.lost and not node.lost
            (peer,) = [peer for peer in one.peers.peers if peer.state == "joined"]
            (alias,) = [peer for peer in one.peers.peers if peer.state == "alias"]
            assert alias.reason == f"the node is joined as {peer.address}" and alias.instance is None
            assert one.peers.pick() is peer and one.peers.pick(tried=frozenset({11})) is None
            assert all(one.peers.find(address) is peer for address in both)
            one.peers.use([alias.address])
            one.now_s += 2 * GRACE_S
            await asyncio.sleep(0.05)
            assert one.states()[peer.address] == "joined", "the node is still named, by its other address"
    assert not [line for line in lines if line["log_level"] in ("warning", "error", "critical")]


async def test_when_one_address_of_a_node_no_longer_reaches_it_the_other_is_used(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11) as (node,), tier() as one:
        one.peers.use(await node.open())
        await one.until(joined=1, alias=1)
        (peer,) = [peer for peer in one.peers.peers if peer.state == "joined"]
        assert peer.broken is not None
        peer.broken.set_result("the link is cut")
        await until(lambda: one.lost)
        await one.until(joined=1, alias=1)
        assert node.num_joins == 2 and len(one.lost) == 1


async def test_another_life_at_the_same_address_is_another_node(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11) as (node,), tier() as one:
        (address, _) = await node.open()
        one.peers.use([address])
        await one.until(joined=1)
        node.joins.forget_all(PeerUnreachable("the ranks have died"))
        assert node.node._life is not None
        node.node._life.instance = instance(12)
        await until(lambda: one.peer(address).instance and one.peer(address).instance.incarnation == 12)
        assert [loss[1] for loss in one.lost] == [11]


class SlowPrefill(PrefillNode):
    """It takes `answer_s` before it says whose an address is."""

    answer_s = 0.1
    num_asked = 0

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        self.num_asked += 1
        await asyncio.sleep(self.answer_s)
        async for event in super().Join(request, context):
            yield event


async def test_a_node_stays_named_by_its_other_address_while_that_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "ALIAS_LOOK_S", 0.02)
    async with prefill(tmp_path, 11, 12) as (both, third), tier() as one:
        both.node.__class__ = SlowPrefill
        slow = cast(SlowPrefill, both.node)
        first, second = await both.open()
        another, _ = await third.open()
        one.peers.use([first, another])
        await one.until(joined=2)
        one.peers.use([first, second, another])
        await until(lambda: one.states()[second] == "alias")
        one.peers.use([second, another])
        one.now_s += 2 * GRACE_S
        asked = slow.num_asked
        await until(lambda: slow.num_asked >= asked + 3)
        assert one.states()[first] == "joined" and not one.lost
        assert one.peers.find(second) is one.peer(first), "while it is asked, too"
        one.peers.use([another])
        one.now_s += 2 * GRACE_S
        await until(lambda: one.states() == {another: "joined"})


async def test_answers_that_change_and_change_do_not_have_ever_more_addresses_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_KNOWN", 20)
    async with prefill(tmp_path, 11) as (node,), tier() as one:
        (address, _) = await node.open()
        looks = [[f"127.0.0.1:{10 * look + port}" for port in range(1, 11)] for look in range(12)]
        one.peers.use([address, *looks[0]])
        await one.until(joined=1, lost=10)
        busy, waited = one.peer(looks[0][0]), one.peer(looks[0][1])
        busy.outstanding_tokens = 1
        with one.peers.used(waited):
            for look in looks[1:]:
                one.now_s += 1
                one.peers.use(look)
                assert len(one.peers.peers) <= 20
            assert set(looks[-1]) <= set(one.states()), "whoever is named is tried"
            assert one.states()[address] == "joined" and {busy, waited} <= set(one.peers.peers), "whoever is needed stays"
            assert [peer.address for peer in one.peers.peers if peer.unnamed_s == one.now_s] == looks[-2][3:], (
                "the latest of the others"
            )
        await until(lambda: not one.peers._leaving)
        tasks = [task for task in asyncio.all_tasks() if "_keep_joined" in repr(task)]
        assert len(tasks) == 20
        busy.outstanding_tokens = 0


class OldPrefill(PrefillNode):
    """Of a version that cannot tell two addresses of one life from a join that begins anew."""

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        request.prefill_address = ""
        async for event in super().Join(request, context):
            if event.HasField("joined"):
                event.joined.prefill.capabilities.remove("one_join")
            yield event


async def test_an_older_node_with_two_addresses_is_not_fought_over(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11) as (node,), tier() as one:
        node.node.__class__ = OldPrefill
        first, second = await node.open()
        life = node.node._life
        assert life is not None
        life.instance = instance(11, capabilities=frozenset({"one_join"}))
        one.peers.use([first])
        await one.until(joined=1)
        one.peers.use([first, second])
        await until(lambda: node.num_joins == 2)
        await one.until(joined=1, alias=1)
        await asyncio.sleep(0.3)
        await one.until(joined=1, alias=1)
        assert node.num_joins == 2, "the second join took the first one's place, once"


async def test_an_address_that_was_an_alias_and_becomes_another_nodes_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "ALIAS_LOOK_S", 0.05)
    with capture_logs() as lines:
        async with prefill(tmp_path, 11, 12) as (first, second), tier() as one:
            (address, _), (other, _) = await first.open(), await second.open()
            own_life, second.node._life = second.node._life, first.node._life  # two ports of one node
            one.peers.use([address])
            await one.until(joined=1)
            one.peers.use([address, other])
            await one.until(joined=1, alias=1)
            await asyncio.sleep(0.3)
            assert first.num_joins == 1 and not one.lost
            second.node._life = own_life
            await one.until(joined=2)
            assert {peer.instance.incarnation for peer in one.peers.peers if peer.instance} == {11, 12}
    assert [line["event"] for line in lines].count("prefill_node_has_two_addresses") == 1, "not each time that it was asked"


async def test_a_prompt_goes_where_its_beginning_was_and_else_where_there_is_least_to_do_and_the_fastest_link(
    tmp_path: Path,
) -> None:
    async with prefill(tmp_path, 11, 12) as nodes, tier(prefix_tokens=512) as one:
        (slow, _), (fast, _) = [await node.open() for node in nodes]
        one.peers.use([slow, fast])
        await one.until(joined=2)
        for address, bandwidth in ((slow, 1e9), (fast, 2e9)):
            links = [Link(prefill_rank=0, decode_rank=rank, lane="x", latency_s=0.0, bandwidth_bytes_per_s=bandwidth * (1 + rank))
                     for rank in range(2)]  # fmt: skip
            one.peer(address).links = links
        asked, longer = tuple(range(600)), tuple(range(900))
        assert one.peers.pick(token_ids=asked) is one.peer(fast), "of equal work the one whose slowest link is fastest"
        one.peers.sent(one.peer(slow), asked, "")
        one.peer(slow).outstanding_tokens = 500
        assert one.peers.pick(token_ids=longer) is one.peer(slow), "512 of its tokens were there lately"
        assert one.peers.pick(token_ids=longer, cache_salt="another") is one.peer(fast)
        assert one.peers.pick(token_ids=longer, tried=frozenset({11})) is one.peer(fast)
        one.peer(slow).outstanding_tokens = 600
        assert one.peers.pick(token_ids=longer) is one.peer(fast), "that is too much waiting"
        one.peer(slow).outstanding_tokens = 500
        one.peers.use([fast])
        assert one.peers.pick(token_ids=longer) is one.peer(fast), "what is named comes first"


async def test_what_a_node_tells_of_others_counts_until_it_is_lost(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11, 12) as nodes, tier() as one:
        (first, _), (second, _) = [await node.open() for node in nodes]
        one.peers.use([first, second])
        await one.until(joined=2)
        left, right = one.peer(first), one.peer(second)
        nodes[0].others_tokens, nodes[1].others_tokens = 100, 50
        await until(lambda: (left.others_tokens, right.others_tokens) == (100, 50))
        assert one.peers.pick() is right
        right.outstanding_tokens = 51  # sent since the beat
        assert one.peers.pick() is left
        assert [peer_status(peer).others_tokens for peer in (left, right)] == [100, 50]
        nodes[0].others_tokens = 1 << 32
        await until(lambda: left.others_tokens is None)
        assert one.peers.pick() is left, "what cannot be is not told, and then no one's counts"
        assert not peer_status(left).HasField("others_tokens") and left.state == "joined"
        nodes[0].others_tokens = 100
        await until(lambda: left.others_tokens == 100)

        nodes[0].attach_s = 0.2
        for join in nodes[0].joins:
            nodes[0].joins.leave(join, PeerUnreachable("for the test"))
        await until(lambda: left.instance is None)
        assert left.others_tokens is None and not peer_status(left).HasField("others_tokens")
        nodes[0].others_tokens = 3
        await until(lambda: left.others_tokens == 3)
        right.outstanding_tokens = 0


async def test_a_node_of_an_older_release_tells_nothing_and_looks_no_more_idle_for_it(tmp_path: Path) -> None:
    async with prefill(tmp_path, 11, 12) as nodes, tier() as one:
        (old, _), (new, _) = [await node.open() for node in nodes]

        async def older(*arguments: Any, **named: Any) -> AsyncIterator[pb.JoinEvent]:
            async for event in events(*arguments, **named):
                if event.HasField("beat"):
                    event.beat.ClearField("others_tokens")
                yield event

        events = nodes[0].node._join_service.events
        nodes[0].node._join_service = cast(Any, SimpleNamespace(events=older))
        nodes[1].others_tokens = 10**6
        one.peers.use([old, new])
        await one.until(joined=2)
        await until(lambda: one.peer(new).others_tokens == 10**6)
        one.peer(old).outstanding_tokens = 2
        one.peer(new).outstanding_tokens = 1
        assert one.peers.pick() is one.peer(new) and one.peer(old).others_tokens is None
        one.peer(old).outstanding_tokens = one.peer(new).outstanding_tokens = 0
