"""Joining prefill nodes that refuse, go silent, end, drain and come back: a real gRPC server that misbehaves."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from decode_node import peers as peers_module
from decode_node import prefill_peer as prefill_peer_module
from decode_node.peers import PrefillPeers
from decode_node.prefill_peer import PrefillPeer
from node_runtime import reminders
from tests.runtime.instances import instance, until
from transfer.breaker import BreakerSettings, BreakerState, Verdict
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.errors import ChunkTooLarge, PeerUnreachable, StagingError
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import chunk_plan_to_proto, instance_to_proto
from transfer.registry.server import serve

BEAT_S = 0.1
FLOOR_BYTES_PER_S = 1e9
PLAN = ChunkPlan(chunk_tokens=4)
PIECE_BYTES = 4 * 2 * 2 * 4 * 4 * 2  # of tokens x layers x K/V x heads x dims in float16: one rank to one rank
RING_BYTES = 2 * PIECE_BYTES - 1
NOBODY: dict[str, Any] = {
    "decode_address": "",
    "rank_addresses": (),
    "heartbeat_s": 1.0,
    "ring_capacity_bytes": RING_BYTES,
    "breaker": BreakerSettings(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=8.0),
    "on_lost": lambda *loss: None,
    "on_breaker_opened": lambda: None,
}


class PrefillNode(pb_grpc.PrefillControlServicer):
    """Does in a join what `mood` says; a "joined" one beats until the mood changes."""

    def __init__(self) -> None:
        self.mood = "joined"
        self.num_joins = 0
        self.joined_s: list[float] = []
        self.questions: list[pb.JoinRequest] = []
        self.is_call_over = asyncio.Event()

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        self.num_joins += 1
        self.joined_s.append(time.monotonic())
        self.questions.append(request)
        match self.mood:
            case "refuses":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the instances do not fit: layers: 2 != 3")
            case "busy":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the prefill node is starting")
            case "beats first":
                yield pb.JoinEvent(beat=pb.Beat())
                return
            case "garbage":
                yield pb.JoinEvent(joined=pb.Joined())
                return
        weights = "others" if self.mood == "another model" else "some"
        joined = pb.Joined(prefill=instance_to_proto(instance(100 + self.num_joins, weights=weights)))
        joined.chunk_plan.CopyFrom(chunk_plan_to_proto(ChunkPlan(chunk_tokens=8) if self.mood == "large pieces" else PLAN))
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

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        yield pb.PrefillEvent(started=pb.PrefillStarted(queue_s=0.5))
        if request.request_id == "not let in":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "decode-0 may not call PrefillControl/Prefill")
        if request.request_id == "full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "prefill queue is full")
        try:
            await asyncio.sleep(60)
        finally:
            self.is_call_over.set()


class Tier:
    """Two prefill nodes, one of which is really there, and the decode side's view of them."""

    def __init__(self, addresses: list[str], node: PrefillNode) -> None:
        self.node = node
        self.lost: list[tuple[str, int, str]] = []
        self.now_s = 0.0  # of the breakers
        self.num_openings = self.num_faults = 0
        self.peers = PrefillPeers(
            addresses,
            own=instance(7),
            decode_address="decode:1",
            rank_addresses=("rank:1",),
            heartbeat_s=BEAT_S,
            ring_capacity_bytes=RING_BYTES,
            min_bandwidth_bytes_per_s=FLOOR_BYTES_PER_S,
            breaker=NOBODY["breaker"],
            on_lost=lambda peer, incarnation, reason: self.lost.append((peer.address, incarnation, reason)),
            on_breaker_opened=self._count,
            on_fault=self._count_fault,
            clock=lambda: self.now_s,
        )

    def _count(self) -> None:
        self.num_openings += 1

    def _count_fault(self) -> None:
        self.num_faults += 1

    @property
    def peer(self) -> PrefillPeer:
        return self.peers.peers[0]

    async def until(self, state: str) -> None:
        await until(lambda: self.peer.state == state)


@asynccontextmanager
async def tier(mood: str = "joined", *others: str) -> AsyncIterator[Tier]:
    node = PrefillNode()  # type: ignore[abstract]  # the other calls are answered UNIMPLEMENTED
    node.mood = mood
    server = await serve("127.0.0.1", 0, prefill_control=node)
    one = Tier([f"127.0.0.1:{server.port}", *others], node)
    one.peers.start()
    try:
        yield one
    finally:
        await one.peers.close()
        await server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(peers_module, "MAX_BACKOFF_S", 0.1)


async def test_a_node_with_a_slow_link_is_never_joined() -> None:
    async with tier("slow link") as one:
        await until(lambda: one.node.num_joins >= 2)
        assert one.peers.pick() is None and not one.lost, "it was not joined, so it cannot have been lost"
        assert (
            "link from prefill rank 1 to decode rank 0 makes 5e+08 bytes/s; "
            "transport.min_bandwidth_bytes_per_s of the decode node is 1e+09"
        ) in one.peers.why_none()
        one.node.mood = "joined"
        await one.until("joined")
        assert len(one.peer.links) == 2


async def test_a_node_whose_pieces_do_not_fit_the_ring_is_never_joined() -> None:
    async with tier("large pieces") as one:
        await until(lambda: one.node.num_joins >= 2)
        assert one.peers.pick() is None and one.peer.plan is None
        assert (
            f"ring.capacity_bytes is {RING_BYTES}; with chunks of 8 tokens and all layers one rank of prefill node "
            f"{one.peer.address} sends up to {2 * PIECE_BYTES} bytes at once: raise it, or lower chunk.piece_bytes"
        ) in one.peers.why_none()
        one.node.mood = "joined"
        await one.until("joined")
        assert one.peer.plan == PLAN and one.peer.largest_piece_bytes == PIECE_BYTES


async def test_every_requests_plan_must_fit_the_ring() -> None:
    async with tier() as one:
        await one.until("joined")
        assert one.peer.instance is not None
        life = one.peer.instance.incarnation
        with pytest.raises(ChunkTooLarge, match=f"ring.capacity_bytes is {RING_BYTES}"):
            one.peers.check_plan(life, ChunkPlan(chunk_tokens=8))
        assert one.peer.plan == PLAN
        finer = ChunkPlan(chunk_tokens=8, layers_per_group=1)
        one.peers.check_plan(life, finer)
        assert one.peer.plan == finer and one.peer.largest_piece_bytes == PIECE_BYTES
        one.peers.check_plan(life + 1, ChunkPlan(chunk_tokens=1 << 20))  # not joined: its requests are refused for that


async def test_a_node_that_does_not_fit_is_never_joined() -> None:
    async with tier("another model") as one:
        await until(lambda: one.node.num_joins >= 2)
        assert one.peers.pick() is None and "model weights: others != some" in one.peers.why_none()


async def test_a_joined_node_is_picked_and_stays_joined_while_it_beats() -> None:
    async with tier("joined", "127.0.0.1:1") as one:
        assert one.peers.pick() is None
        await one.until("joined")
        await asyncio.sleep(4 * BEAT_S)
        assert one.peers.pick() is one.peer and one.node.num_joins == 1
        assert one.peer.instance is not None and one.peer.instance.incarnation == 101
        (question,) = one.node.questions
        assert (question.decode_address, list(question.rank_addresses)) == ("decode:1", ["rank:1"])
        assert question.decode.incarnation == 7 and question.heartbeat_s == pytest.approx(BEAT_S)
        other = one.peers.peers[1]
        await until(lambda: other.state != "joining")
        assert other.state == "lost" and "127.0.0.1:1" in other.reason


@pytest.mark.parametrize(
    ("mood", "reason"),
    [("silent", "is silent: 3 beats of 0.1 s missed"), ("ends", "ended the join"), ("refuses", "ended the join")],
)
async def test_a_node_that_goes_away_is_lost_once_and_joined_again(mood: str, reason: str) -> None:
    async with tier() as one:
        await one.until("joined")
        one.node.mood = mood
        await until(lambda: one.lost)
        assert one.peers.pick() is None and one.peer.instance is None
        one.node.mood = "joined"
        await one.until("joined")
        (loss,) = one.lost
        assert loss[:2] == (one.peer.address, 101) and reason in loss[2]
        assert one.peer.instance is not None and one.peer.instance.incarnation > 101, "another join"


async def test_the_nodes_own_reason_comes_before_that_of_a_lost_link(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[Any, ...]] = []
    async with tier() as one:
        await one.until("joined")
        with monkeypatch.context() as patched:  # the timer goes off when the node is joined again, and not before
            patched.setattr(asyncio.get_running_loop(), "call_later", lambda *timer: timers.append(timer))
            one.peers.break_join(101, prefill_rank=1, decode_rank=0, reason="endpoint error")
        one.node.mood = "ends"
        await until(lambda: one.lost)
        one.node.mood = "joined"
        await one.until("joined")
        ((after_s, tell, *told),) = timers
        assert after_s == peers_module.REASON_GRACE_S
        tell(*told)
        await asyncio.sleep(0.3)
        assert one.peer.state == "joined" and "ended the join" in one.lost[0][2]
        assert not any("endpoint error" in reason for _, _, reason in one.lost), "the next join is not broken by it"


async def test_a_node_that_beats_on_while_a_link_to_it_is_lost_is_left_and_joined_again() -> None:
    """Its leader may know nothing: a frozen rank tells nobody. Until it is joined again, it is given no requests."""
    async with tier() as one:
        await one.until("joined")
        one.peers.break_join(999, prefill_rank=1, decode_rank=0, reason="another life's link")
        one.peers.break_join(101, prefill_rank=7, decode_rank=0, reason="a stranger's, in the name of a rank that is none")
        await asyncio.sleep(4 * BEAT_S)
        assert one.peer.state == "joined" and not one.lost
        one.peers.break_join(101, prefill_rank=1, decode_rank=0, reason="silent")
        one.peers.break_join(101, prefill_rank=0, decode_rank=0, reason="silent, too")
        await until(lambda: one.lost)
        assert one.peers.pick() is None
        assert one.lost == [(one.peer.address, 101, f"{one.peer.address}: decode rank 0 has lost prefill rank 1: silent")]
        await one.until("joined")
        assert one.node.num_joins == 2


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("refuses", "the instances do not fit: layers: 2 != 3"),
        ("busy", "the prefill node is starting"),
        ("beats first", "the first event of a join was beat"),
        ("garbage", ""),
    ],
)
async def test_a_join_that_fails_says_why_and_is_tried_again(mood: str, reason: str) -> None:
    async with tier(mood) as one:
        await until(lambda: one.node.num_joins >= 3)
        assert not one.lost, "what was never joined cannot be lost"
        await until(lambda: one.peer.state == "lost")
        assert reason in one.peers.why_none() and one.peer.address in one.peers.why_none()
        one.node.mood = "joined"
        await one.until("joined")


async def test_a_node_that_does_not_fit_is_asked_rarely() -> None:
    async with tier("refuses") as one:
        await until(lambda: one.node.num_joins >= 5)
        pauses_s = [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(one.node.joined_s)]
        assert min(pauses_s) >= 0.099, "every 0.1 s, the longest pause, from the first refusal on"


@pytest.mark.parametrize(("mood", "event"), [("refuses", "prefill_node_refuses"), ("busy", "prefill_node_unreachable")])
async def test_a_node_that_was_never_joined_is_spoken_of_once_for_each_reason_and_then_now_and_then(
    mood: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as lines:
        async with tier(mood) as one:
            await until(lambda: one.node.num_joins >= 6)
            assert [line["event"] for line in lines] == [event]
            assert lines[0]["address"] == one.peer.address and lines[0]["reason"] == one.peer.reason
            one.node.mood = "beats first"
            await until(lambda: len(lines) > 1)
            one.node.mood = mood
            joins = one.node.num_joins
            await until(lambda: one.node.num_joins >= joins + 3)
            assert [line["event"] for line in lines] == [event, "prefill_node_unreachable"], "that reason is known"
            monkeypatch.setattr(reminders, "REMINDER_S", 0.0)
            await until(lambda: len(lines) > 3)
            assert lines[-1]["reason"] == lines[0]["reason"]


async def test_a_node_that_was_joined_is_lost_and_its_absence_is_news_again() -> None:
    with capture_logs() as lines:
        async with tier("busy") as one:
            await until(lambda: lines)
            one.node.mood = "joined"
            await one.until("joined")
            one.node.mood = "busy"
            await until(lambda: len(lines) >= 5)
    events = [
        "prefill_node_unreachable",
        "joined_prefill_node",
        "prefill_node_lost",
        "breaker_opened",
        "prefill_node_unreachable",
    ]
    assert [line["event"] for line in lines] == events
    assert lines[0]["reason"] == lines[4]["reason"] and lines[2]["reason"] == lines[3]["reason"]


class StalledCall:
    """A join of which every beat lies unread while the leader's loop is busy with something else for many beats."""

    def __init__(self) -> None:
        self.num_read = 0

    async def read(self) -> pb.JoinEvent:
        self.num_read += 1
        if self.num_read == 1:
            return pb.JoinEvent(joined=pb.Joined(prefill=instance_to_proto(instance(101)), chunk_plan=chunk_plan_to_proto(PLAN)))
        await asyncio.sleep(BEAT_S / 4)
        if self.num_read == 3:
            time.sleep(8 * BEAT_S)
            await asyncio.sleep(0.01)  # only now does the library look at what has come
        return pb.JoinEvent(beat=pb.Beat())

    def cancel(self) -> None:
        pass


async def test_a_stall_of_this_side_is_not_taken_for_the_other_side_s_death(monkeypatch: pytest.MonkeyPatch) -> None:
    call = StalledCall()

    async def stub(peer: PrefillPeer) -> SimpleNamespace:
        return SimpleNamespace(Join=lambda question: call)

    monkeypatch.setattr(PrefillPeer, "stub", stub)
    one = Tier(["127.0.0.1:1"], cast(PrefillNode, None))
    one.peers.start()
    await until(lambda: call.num_read >= 6 or one.lost)
    await one.peers.close()
    assert not one.lost and one.peer.state == "joined"


async def test_a_draining_node_gets_no_new_work_and_keeps_what_it_has() -> None:
    async with tier() as one:
        await one.until("joined")
        one.node.mood = "drains"
        await one.until("draining")
        await asyncio.sleep(4 * BEAT_S)
        assert one.peers.pick() is None and "is draining: it drains" in one.peers.why_none()
        assert not one.lost and one.node.num_joins == 1


async def test_the_loss_of_a_node_opens_its_breaker_and_a_success_closes_it() -> None:
    """A node that flaps is tried once at a time; while it is the only one it is used all the same."""
    with capture_logs() as lines:
        async with tier("busy") as one:
            await until(lambda: one.node.num_joins >= 2)
            assert one.peer.breaker.state is BreakerState.CLOSED, "what was never joined has failed nobody"
            for pause_s in (1.0, 2.0, 4.0):
                one.node.mood = "joined"
                await one.until("joined")
                one.node.mood = "ends"
                await until(lambda: one.peer.state != "joined")
                assert (one.peer.breaker.state, one.peer.breaker.pause_left_s) == (BreakerState.OPEN, pause_s)
                assert "ended the join" in one.peer.breaker_reason
                one.node.mood = "joined"
                await one.until("joined")
                assert one.peers.pick() is one.peer and not one.peer.breaker.wants_trial
                one.now_s += pause_s
                assert one.peers.pick() is one.peer and one.peer.breaker.wants_trial
                permit = one.peers.begin(one.peer)
                assert permit.is_trial and not one.peer.breaker.wants_trial
                one.peers.end(one.peer, permit, Verdict.SUCCESS, "")
                assert (one.peer.breaker.state, one.peer.breaker_reason) == (BreakerState.CLOSED, "")
    events = [line["event"] for line in lines if line["event"].startswith("breaker_")]
    assert events == ["breaker_opened", "breaker_half_open", "breaker_closed"] * 3 and one.num_openings == 3
    assert [line["pause_s"] for line in lines if line["event"] == "breaker_opened"] == [1.0, 2.0, 4.0]


async def test_a_node_that_drained_before_it_went_has_failed_nobody() -> None:
    async with tier() as one:
        await one.until("joined")
        one.node.mood = "drains"
        await one.until("draining")
        one.node.mood = "ends"
        await until(lambda: one.lost)
        assert one.peer.breaker.state is BreakerState.CLOSED and not one.num_openings


async def test_without_any_node_it_says_so() -> None:
    peers = PrefillPeers([], own=instance(7), **NOBODY)
    assert peers.pick() is None
    assert peers.why_none() == "no prefill node is configured (peers.prefill_nodes)"
    await peers.close()


async def test_a_call_yields_what_the_node_reports_and_ends_with_the_iterator() -> None:
    async with tier() as one:
        events = one.peer.prefill("a", (1, 2), decode_incarnation=7, sampling=SamplingParams())
        assert (await anext(events)).started.queue_s == 0.5
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(5):
            await one.node.is_call_over.wait()


async def test_a_failed_call_is_an_error_of_ours() -> None:
    async with tier() as one:
        events = one.peer.prefill("full", (1,), decode_incarnation=7, sampling=SamplingParams())
        await anext(events)
        with pytest.raises(StagingError, match="prefill queue is full"):
            await anext(events)
    gone = PrefillPeers(["127.0.0.1:1"], own=instance(7), **NOBODY)
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1"):
        await anext(gone.peers[0].prefill("a", (1,), decode_incarnation=7, sampling=SamplingParams()))
    await gone.close()


async def test_a_bug_that_ends_a_join_is_said_and_counted_and_the_node_is_joined_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError("nobody expected this")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(peers_module, "largest_piece_bytes", broken)
        async with tier() as one:
            await until(lambda: one.num_faults >= 3)
            assert one.peer.reason.endswith("unexpected ZeroDivisionError; see the log of this node")
            patched.undo()
            await one.until("joined")
            assert not one.lost, "it had not been joined"
            patched.setattr(peers_module, "next_event", broken)  # and of one that has: its requests hear that it is lost
            await until(lambda: bool(one.lost))
            patched.undo()
            await one.until("joined")
    said = [line for line in logs if line["event"] == "join_broke"]
    assert len(said) == 2 and all(isinstance(line["exc_info"], ZeroDivisionError) for line in said), "once, then once a minute"


async def test_a_node_that_lets_nobody_prefill_is_to_blame_and_not_the_request() -> None:
    """INVALID_ARGUMENT is for what the client can mend; another node may know this one."""
    async with tier() as one:
        await one.until("joined")
        with pytest.raises(PeerUnreachable, match="decode-0 may not call PrefillControl/Prefill"):
            async for _ in one.peer.prefill("not let in", (1,), decode_incarnation=7, sampling=SamplingParams()):
                pass


async def test_long_prompts_are_sent_one_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """To put a long prompt into a message takes milliseconds; many can begin at once, when a node comes or is lost."""
    monkeypatch.setattr(prefill_peer_module, "LONG_PROMPT_TOKENS", 100)
    turn, turns_of_questions = 0, []
    question = pb.PrefillRequest

    def asked(**fields: Any) -> pb.PrefillRequest:
        turns_of_questions.append(turn)
        return question(**fields)

    async with tier() as one:
        await one.until("joined")
        monkeypatch.setattr(pb, "PrefillRequest", asked)

        async def prefill(num_tokens: int) -> None:
            async for _ in one.peer.prefill("r", tuple(range(num_tokens)), decode_incarnation=1):
                return

        calls = [asyncio.ensure_future(prefill(num_tokens)) for num_tokens in (100, 5, 100, 100, 5)]
        while len(turns_of_questions) < len(calls):
            turn += 1
            await asyncio.sleep(0)
        short, long = turns_of_questions[:2], turns_of_questions[2:]
        assert len(set(short)) == 1 and len(set(long)) == 3
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
