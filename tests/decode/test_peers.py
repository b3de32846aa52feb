"""Joining prefill nodes that refuse, go silent, end, drain and come back, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.decode.local_nodes import BEAT_S, Tier, serve_locally, tier
from tests.runtime.instances import instance, until
from tests.runtime.virtual_time import VirtualTimeLoop, in_virtual_time
from transfer.breaker import BreakerState, Verdict
from transfer.chunk import ChunkPlan
from transfer.connector import prefill_nodes as peers_module
from transfer.connector.prefill_nodes import REASON_GRACE_S
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import ChunkTooLarge, ConfigError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto, instance_to_proto

FLOOR_BYTES_PER_S = 1e9
PLAN = ChunkPlan(chunk_tokens=4)
SHORT_PLAN = ChunkPlan(chunk_tokens=2)
PIECE_BYTES = 4 * 2 * 2 * 4 * 4 * 2  # of tokens x layers x K/V x heads x dims in float16: one rank to one rank
RING_BYTES = 2 * PIECE_BYTES - 1
FIRST, SECOND, THIRD = "localhost:1", "localhost:2", "localhost:3"


class PrefillNode:
    """Does in a join what `mood` says; a "joined" one sends heartbeats until the mood changes."""

    def __init__(self, mood: str = "joined", first_life: int = 100) -> None:
        self.mood = mood
        self.first_life = first_life
        self.num_joins = 0
        self.questions: list[pb.JoinRequest] = []

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncGenerator[pb.JoinEvent, None]:
        self.num_joins += 1
        self.questions.append(request)
        match self.mood:
            case "refuses":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the instances do not fit: layers: 2 != 3")
            case "busy":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the prefill node is starting")
            case "heartbeat first":
                yield pb.JoinEvent(beat=pb.Beat())
                return
            case "garbage":
                yield pb.JoinEvent(joined=pb.Joined())
                return
        joined = pb.Joined(prefill=instance_to_proto(instance(self.first_life + self.num_joins)))
        joined.chunk_plan.CopyFrom(chunk_plan_to_proto(ChunkPlan(chunk_tokens=8) if self.mood == "large pieces" else PLAN))
        short = replace(SHORT_PLAN, token_layers=64) if self.mood == "costly plans" else SHORT_PLAN
        joined.short_chunk_plans.extend([chunk_plan_to_proto(short)] * (33 if self.mood == "many plans" else 1))
        for prefill_rank in range(2):
            is_slow = prefill_rank == 1 and self.mood == "slow link"
            bandwidth = FLOOR_BYTES_PER_S / 2 if is_slow else FLOOR_BYTES_PER_S
            joined.links.append(pb.LinkStatus(prefill_rank=prefill_rank, bandwidth_bytes_per_s=bandwidth))
        yield pb.JoinEvent(joined=joined)
        has_drained = False
        while self.mood in ("joined", "drains"):
            if self.mood == "drains" and not has_drained:
                has_drained = True
                yield pb.JoinEvent(draining=pb.Draining())
            yield pb.JoinEvent(beat=pb.Beat())
            await asyncio.sleep(BEAT_S / 4)
        if self.mood == "silent":
            await asyncio.sleep(60)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> PrefillNode:
    """The node at `FIRST`; nobody listens elsewhere."""
    one = PrefillNode()
    serve_locally(monkeypatch, {FIRST: one})
    return one


def joining(*addresses: str) -> AbstractAsyncContextManager[Tier]:
    return tier(*(addresses or (FIRST,)), ring_bytes=RING_BYTES, min_bandwidth_bytes_per_s=FLOOR_BYTES_PER_S)


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        (
            "slow link",
            "link from prefill rank 1 to decode rank 0 makes 5e+08 bytes/s; "
            "transport.min_bandwidth_bytes_per_s of the decode node is 1e+09",
        ),
        ("many plans", "short_chunk_plans has 33 entries; there can be 32"),
        ("costly plans", "short_chunk_plans has a plan with token_layers; only chunk_plan can have them"),
        (
            "large pieces",
            f"ring.capacity_bytes is {RING_BYTES}; with chunks of 8 tokens and all layers one rank of prefill node "
            f"{FIRST} sends up to {2 * PIECE_BYTES} bytes at once: raise it, or lower chunk.piece_bytes",
        ),
        ("refuses", "the instances do not fit: layers: 2 != 3"),
        ("heartbeat first", "the first event of a join was beat"),
        ("garbage", ""),
    ],
)
@in_virtual_time
async def test_a_join_that_fails_says_why_and_is_tried_again(node: PrefillNode, mood: str, reason: str) -> None:
    node.mood = mood
    async with joining() as one:
        await until(lambda: node.num_joins >= 3)
        assert not one.lost, "what was never joined cannot be lost"
        await one.until(lost=1)
        assert one.peers.pick() is None and one.peer(FIRST).plan is None
        assert reason in one.peers.unavailable_reason() and FIRST in one.peers.unavailable_reason()
        node.mood = "joined"
        await one.until(joined=1)
        peer = one.peer(FIRST)
        assert len(peer.links) == 2 and peer.plan == PLAN and peer.largest_piece_bytes == PIECE_BYTES
        assert peer.cut is not None and [peer.cut.plan_of(tokens) for tokens in (2, 3)] == [SHORT_PLAN, PLAN]


def reservation(incarnation: int, plan: ChunkPlan) -> pb.ReserveRequest:
    return pb.ReserveRequest(prefill_incarnation=incarnation, chunk_plan=chunk_plan_to_proto(plan))


@in_virtual_time
async def test_every_requests_plan_must_fit_the_ring(node: PrefillNode) -> None:
    async with joining() as one:
        await one.until(joined=1)
        peer = one.peer(FIRST)
        assert peer.instance is not None
        life = peer.instance.incarnation
        with pytest.raises(ChunkTooLarge, match=f"ring.capacity_bytes is {RING_BYTES}"):
            one.peers.plan_of(reservation(life, ChunkPlan(chunk_tokens=8)), life)
        with pytest.raises(ConfigError, match="chunk_plan is missing"):
            one.peers.plan_of(pb.ReserveRequest(), life)
        assert peer.plan == PLAN
        finer = ChunkPlan(chunk_tokens=8, layers_per_group=1)
        assert one.peers.plan_of(reservation(life, finer), life) == finer
        assert peer.plan == finer and peer.largest_piece_bytes == PIECE_BYTES
        short = ChunkPlan(chunk_tokens=4)
        assert one.peers.plan_of(reservation(life, short), life) == short
        assert peer.plan == finer, "the plan of a short prompt is not recorded"
        one.peers.plan_of(
            reservation(life + 1, ChunkPlan(chunk_tokens=1 << 20)), life + 1
        )  # not joined, so its requests are rejected


@in_virtual_time
async def test_a_joined_node_is_picked_and_stays_joined_while_it_beats(node: PrefillNode) -> None:
    async with joining(FIRST, SECOND) as one:
        assert one.peers.pick() is None
        await one.until(joined=1, lost=1)
        await asyncio.sleep(40 * BEAT_S)
        peer, other = one.peers.peers
        assert one.peers.pick() is peer and node.num_joins == 1
        assert peer.instance is not None and peer.instance.incarnation == 101
        (question,) = node.questions
        assert (question.decode_address, list(question.rank_addresses)) == ("127.0.0.1:1", ["127.0.0.1:2"])
        assert question.decode.incarnation == 7 and question.heartbeat_s == pytest.approx(BEAT_S)
        assert other.state in ("lost", "joining") and SECOND in other.reason


@pytest.mark.parametrize(
    ("mood", "reason"),
    [("silent", "is silent: 3 heartbeats of 0.1 s missed"), ("ends", "ended the join"), ("refuses", "ended the join")],
)
@in_virtual_time
async def test_a_node_that_goes_away_is_lost_once_and_joined_again(node: PrefillNode, mood: str, reason: str) -> None:
    async with joining() as one:
        await one.until(joined=1)
        node.mood = mood
        await until(lambda: one.lost)
        assert one.peers.pick() is None and one.peer(FIRST).instance is None
        node.mood = "joined"
        await one.until(joined=1)
        ((address, incarnation, said),) = one.lost
        assert (address, incarnation) == (FIRST, 101) and reason in said
        peer = one.peer(FIRST)
        assert peer.instance is not None and peer.instance.incarnation > 101, "another join"


@in_virtual_time
async def test_a_node_that_beats_on_while_a_link_to_it_is_lost_is_left_and_joined_again(node: PrefillNode) -> None:
    """Its leader may know nothing: a frozen rank tells nobody. Until it is joined again, it is given no requests."""
    async with joining() as one:
        await one.until(joined=1)
        one.peers.break_join(999, prefill_rank=1, decode_rank=0, reason="another life's link")
        one.peers.break_join(101, prefill_rank=7, decode_rank=0, reason="a stranger's, in the name of a rank that is none")
        await asyncio.sleep(10 * REASON_GRACE_S)
        assert one.peer(FIRST).state == "joined" and not one.lost
        one.peers.break_join(101, prefill_rank=1, decode_rank=0, reason="silent")
        one.peers.break_join(101, prefill_rank=0, decode_rank=0, reason="silent, too")
        await until(lambda: one.lost)
        assert one.peers.pick() is None
        assert one.lost == [(FIRST, 101, f"{FIRST}: decode rank 0 has lost prefill rank 1: silent")]
        await one.until(joined=1)
        assert node.num_joins == 2


class StalledCall:
    """A join of which every heartbeat lies unread while the leader's loop is busy with something else for many heartbeats."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.num_read = 0
        self._loop = loop

    async def read(self) -> pb.JoinEvent:
        self.num_read += 1
        if self.num_read == 1:
            return pb.JoinEvent(joined=pb.Joined(prefill=instance_to_proto(instance(101)), chunk_plan=chunk_plan_to_proto(PLAN)))
        await asyncio.sleep(BEAT_S / 4)
        if self.num_read == 3:
            self._loop.now_s += 8 * BEAT_S
            await asyncio.sleep(0.01)  # only now does the library look at what has come
        return pb.JoinEvent(beat=pb.Beat())

    def cancel(self) -> None:
        pass


@in_virtual_time
async def test_a_stall_of_this_side_is_not_taken_for_the_other_side_s_death(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    call = StalledCall(loop)

    async def stub(peer: PrefillPeer) -> SimpleNamespace:
        return SimpleNamespace(Join=lambda question: call)

    monkeypatch.setattr(PrefillPeer, "stub", stub)
    async with joining() as one:
        await until(lambda: call.num_read >= 6 or one.lost)
        assert not one.lost and one.peer(FIRST).state == "joined"


@in_virtual_time
async def test_a_draining_node_gets_no_new_work_and_keeps_what_it_has(node: PrefillNode) -> None:
    """One that drained before it went has failed nobody."""
    async with joining() as one:
        await one.until(joined=1)
        node.mood = "drains"
        await one.until(draining=1)
        await asyncio.sleep(40 * BEAT_S)
        assert one.peers.pick() is None and one.peers.unavailable_reason().endswith("is draining")
        assert not one.lost and node.num_joins == 1
        node.mood = "ends"
        await until(lambda: one.lost)
        assert one.peer(FIRST).breaker.state is BreakerState.CLOSED and not one.num_openings


@in_virtual_time
async def test_the_loss_of_a_node_opens_its_breaker_and_a_success_closes_it(node: PrefillNode) -> None:
    """A node that flaps is tried once at a time; while it is the only one it is used all the same."""
    node.mood = "busy"
    with capture_logs() as lines:
        async with joining() as one:
            peer = one.peer(FIRST)
            await until(lambda: node.num_joins >= 2)
            assert peer.breaker.state is BreakerState.CLOSED, "what was never joined has failed nobody"
            for pause_s in (1.0, 2.0, 4.0):
                node.mood = "joined"
                await one.until(joined=1)
                node.mood = "ends"
                await until(lambda: peer.state != "joined")
                assert peer.breaker.state is BreakerState.OPEN
                assert peer.breaker.pause_left_s == pytest.approx(pause_s, abs=0.01)
                assert "ended the join" in peer.breaker_reason
                node.mood = "joined"
                await one.until(joined=1)
                assert one.peers.pick() is peer and not peer.breaker.wants_trial
                await asyncio.sleep(pause_s)
                assert one.peers.pick() is peer and peer.breaker.wants_trial
                permit = one.peers.begin(peer)
                assert permit.is_trial and not peer.breaker.wants_trial
                one.peers.end(peer, permit, Verdict.SUCCESS, "")
                assert (peer.breaker.state, peer.breaker_reason) == (BreakerState.CLOSED, "")
    events = [line["event"] for line in lines if line["event"].startswith("breaker_")]
    assert events == ["breaker_opened", "breaker_half_open", "breaker_closed"] * 3 and one.num_openings == 3
    assert [line["pause_s"] for line in lines if line["event"] == "breaker_opened"] == [1.0, 2.0, 4.0]


@in_virtual_time
async def test_a_bug_that_ends_a_join_is_said_and_counted_and_the_node_is_joined_again(
    node: PrefillNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError("nobody expected this")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(peers_module, "largest_piece_bytes", broken)
        async with joining() as one:
            await until(lambda: one.num_faults >= 3)
            assert one.peer(FIRST).reason.endswith("unexpected ZeroDivisionError; see the log of this node")
            patched.undo()
            await one.until(joined=1)
            assert not one.lost, "it had not been joined"
            patched.setattr(PrefillPeer, "_next_event", broken)  # and of one that has: its requests hear that it is lost
            await until(lambda: bool(one.lost))
            patched.undo()
            await one.until(joined=1)
    said = [line for line in logs if line["event"] == "join_crashed"]
    assert len(said) == 2 and all(isinstance(line["exc_info"], ZeroDivisionError) for line in said), "once, then once a minute"


@in_virtual_time
async def test_a_link_that_is_lost_just_before_its_node_is_left_is_no_bug(node: PrefillNode) -> None:
    async with joining() as one:
        await one.until(joined=1)
        peer = one.peer(FIRST)
        assert peer.broken is not None
        peer.broken.set_result("a link is lost")
        peer.broken = None  # as for a node that is named no longer
        await until(lambda: bool(one.lost))
        assert one.lost[0][2].endswith("a link is lost") and not one.num_faults


# The last joined node goes, while others are tried again after long pauses

LONG_PAUSE_S = 120.0
SOON_S = 1.0


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[PrefillNode]:
    monkeypatch.setattr(peers_module, "FIRST_BACKOFF_S", LONG_PAUSE_S)
    monkeypatch.setattr(peers_module, "MAX_BACKOFF_S", LONG_PAUSE_S)
    three = [PrefillNode("joined", 100), PrefillNode("busy", 200), PrefillNode("joined", 300)]
    serve_locally(monkeypatch, dict(zip((FIRST, SECOND, THIRD), three, strict=True)))
    return three


@pytest.mark.parametrize("mood", ["drains", "ends"])
@in_virtual_time
async def test_when_the_last_node_goes_the_others_are_joined_at_once(nodes: list[PrefillNode], mood: str) -> None:
    first, other, _ = nodes
    async with joining(FIRST, SECOND) as one:
        await one.until(joined=1, lost=1)
        other.mood = "joined"
        first.mood = mood
        await asyncio.sleep(SOON_S)
        assert one.peers.pick() is one.peer(SECOND) and other.num_joins == 2
        assert SECOND in one.changes, "waiting requests are notified"


@in_virtual_time
async def test_which_nodes_may_come(nodes: list[PrefillNode]) -> None:
    nodes[2].mood = "refuses"
    async with joining(FIRST, SECOND, THIRD) as one:
        await one.until(joined=1, lost=2)
        peers = one.peers.peers
        assert one.peers.can_wait_for_node() and not one.peers.can_wait_for_node(tried=peers[:2]), "what refuses does not fit"
        assert not one.peers.can_wait_for_node(tried=peers[1:]), "who is joined is there already"
        nodes[0].mood = "drains"
        await asyncio.sleep(SOON_S)
        assert one.peers.can_wait_for_node(tried=peers[1:]) and FIRST in one.changes
