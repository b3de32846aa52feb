"""A prefill leader's own affairs: what it keeps open towards decode leaders, and whose request the end of a call gives up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest

from node_runtime.daemon import Daemon, NodeState
from prefill_node.joins import Join
from prefill_node.node import PrefillNode, _Life
from prefill_node.rank_messages import CODEC, DecodeAttached, RunStep, StepFailed, StepPart, check_step_fits
from tests.prefill.leader_world import turns
from tests.runtime.instances import hello, instance, prefill_config
from transfer import chunk as chunk_module
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError, EngineError, LayoutError, PeerUnreachable, TransferAborted
from transfer.pb import kvferry_pb2 as pb

DAEMON = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None))
NOWHERE = "127.0.0.1:1"
REFUSED = re.compile(r'kvferry_requests_total\{outcome="refused",role="prefill"\} 2(\.0)?\n')


class Leader:
    def __init__(self, folder: Path) -> None:
        self.node = PrefillNode(DAEMON, prefill_config(folder))
        self.life = self.node._life = _Life(self.node, (hello(0),))

    async def joined(self, number: int, address: str = NOWHERE) -> Join:
        opening = asyncio.ensure_future(self.life.joins.open(instance(100 + number), address, ("rank:1",)))
        await turns()
        self.life.joins.on_attached(0, DecodeAttached(join=number, incarnation=100 + number, links=()))
        return await opening


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    one = Leader(tmp_path)
    yield one
    await one.node.end_life(PeerUnreachable("the test is over"))


async def test_the_channel_to_a_decode_leader_ends_with_its_last_join(leader: Leader) -> None:
    joins = [await leader.joined(1), await leader.joined(2)]
    with pytest.raises(PeerUnreachable):
        await leader.node.reserve(joins[0], "a")
    channel = leader.node.reserving._channels[NOWHERE]
    leader.life.joins.leave(joins[0], PeerUnreachable("it left"))
    await turns()
    assert leader.node.reserving._channels == {NOWHERE: channel}, "the other join has that address as well"
    leader.life.joins.leave(joins[1], PeerUnreachable("it left"))
    await asyncio.gather(*leader.node.reserving._closing)
    assert leader.node.reserving._channels == {} and channel.current.get_state() is grpc.ChannelConnectivity.SHUTDOWN


class Context:
    """The end of a call, at which a request of the same id comes."""

    def __init__(self, leader: Leader, join: Join) -> None:
        self.leader = leader
        self.join = join
        self.next: Any = None

    async def abort(self, *details: Any, **values: Any) -> None:
        self.next = self.leader.life.requests.submit("a", (1, 2), 0, SamplingParams(), self.join)
        raise RuntimeError("the call is over")


async def test_the_end_of_a_call_gives_up_its_own_request_and_not_the_next_of_that_id(leader: Leader) -> None:
    join = await leader.joined(1)
    context = Context(leader, join)
    question = pb.PrefillRequest(request_id="a", token_ids=(1, 2), decode_incarnation=101)
    question.sampling.temperature = 0.0
    call = leader.node.Prefill(question, cast(Any, context))
    reading = asyncio.ensure_future(anext(aiter(call)))
    await turns()
    assert leader.life.requests.request_ids == ("a",)
    assert leader.life.requests.abort("a", TransferAborted("by an operator"))
    await asyncio.gather(reading, return_exceptions=True)
    assert context.next is not None and not context.next.is_over
    assert leader.life.requests.request_ids == ("a",)


async def test_a_call_that_its_caller_leaves_gives_its_request_up(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    await leader.joined(1)
    waits: list[float] = []
    monkeypatch.setattr(leader.node.metrics, "queue_seconds", waits.append)
    question = pb.PrefillRequest(request_id="a", token_ids=(1, 2), decode_incarnation=101)
    reading = asyncio.ensure_future(anext(aiter(leader.node.Prefill(question, cast(Any, None)))))
    await turns()
    assert leader.life.requests.request_ids == ("a",)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert leader.life.requests.num_in_flight == 0
    assert len(waits) == 1, "it has waited, and found no room"


async def test_a_prompt_of_too_many_pieces_is_refused_before_it_is_queued(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leader.joined(1)
    monkeypatch.setattr(chunk_module, "MAX_PIECES", 0)
    question = pb.PrefillRequest(request_id="a", token_ids=(1, 2), decode_incarnation=101)
    with pytest.raises(
        LayoutError,
        match=r"2 tokens .* layers are 2 chunks; a request on 1 routes can have 0",
    ):
        leader.node._submit(leader.life, question)
    assert leader.life.requests.num_in_flight == 0


async def test_a_prompt_that_is_not_queued_counts_as_refused(leader: Leader) -> None:
    await leader.joined(1)
    context = SimpleNamespace(abort=AsyncMock(side_effect=RuntimeError("the call is over")))
    for token_ids, incarnation in (((1, 2), 999), ((), 101)):  # nobody has joined as that; nothing to compute
        question = pb.PrefillRequest(request_id="a", token_ids=token_ids, decode_incarnation=incarnation)
        with pytest.raises(RuntimeError, match="the call is over"):
            await anext(aiter(leader.node.Prefill(question, cast(Any, context))))
    assert REFUSED.search(leader.node.metrics.render([]).decode())


@pytest.mark.parametrize("is_fatal", [True, False])
async def test_a_group_that_broke_ends_its_requests_as_unreachable_and_one_failed_step_its_own(
    leader: Leader, is_fatal: bool
) -> None:
    lost: list[str] = []
    leader.node._supervisor = cast(Any, SimpleNamespace(lose_soon=lost.append, broadcast=lambda message: None))
    request = leader.life.requests.submit("a", (1, 2), 0, SamplingParams(), await leader.joined(1))
    failed = StepFailed(step=1, request_ids=("a",), reason="connection closed by peer", is_fatal=is_fatal)
    leader.node._on_rank_message(0, failed)
    assert lost == (["rank 0: connection closed by peer"] if is_fatal else [])
    assert request.is_over is not is_fatal
    await leader.node.end_life(PeerUnreachable("rank 1 died"))
    error = request.progress.get_nowait()
    assert isinstance(error, PeerUnreachable if is_fatal else EngineError)


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": {"max_step_tokens": 300_000}},
        {"chunk": {"chunk_tokens": 300_000}, "pool": {"num_pages": 400_000}},
        {"limits": {"max_running_requests": 2000, "max_step_tokens": 4000}},
    ],
)
def test_a_step_larger_than_a_message_is_refused_before_anything_starts(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = prefill_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"limits.max_step_tokens is \d+, .* takes 1048576; lower them"):
        PrefillNode(DAEMON, config)


def test_the_largest_step_that_is_allowed_fits_its_message(tmp_path: Path) -> None:
    limits = {"max_running_requests": 1000, "max_step_tokens": 81_000}
    check_step_fits(prefill_config(tmp_path, limits=limits))
    parts = tuple(
        StepPart(request_id=f"{part:\U0001f600>128}", token_ids=(2**32 - 1,) * 81, first_token=2**31, is_last=False)
        for part in range(1000)
    )
    assert len(CODEC.encode(RunStep(step=2**62, parts=parts))) <= MAX_PAYLOAD_BYTES


async def test_a_salt_goes_with_its_request_unless_it_is_too_long(leader: Leader) -> None:
    await leader.joined(1)
    question = pb.PrefillRequest(request_id="a", token_ids=(1, 2), decode_incarnation=101, cache_salt="é" * 128)
    question.sampling.temperature = 0.0
    assert leader.node._submit(leader.life, question).cache_salt == "é" * 128
    question.request_id, question.cache_salt = "b", "t" * 129
    with pytest.raises(ConfigError, match="cache_salt has 129 characters; it can have at most 128"):
        leader.node._submit(leader.life, question)


async def test_a_node_that_registers_itself_shows_how_often_it_beats(tmp_path: Path) -> None:
    daemon = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None, num_restarts=0))
    etcd = {"kind": "etcd", "etcd_endpoints": ["http://127.0.0.1:1"], "lease_s": 9}
    node = PrefillNode(daemon, prefill_config(tmp_path, discovery=etcd))
    assert shown_of_discovery(node) == (0.0, 0.0), "it loads: nobody is to find it"
    assert node.registration is not None
    node.registration.want(True)
    assert shown_of_discovery(node) == (3.0, -1.0)
    node.registration.want(False)
    assert shown_of_discovery(node) == (0.0, 0.0), "drained before it was registered"


def shown_of_discovery(node: PrefillNode) -> tuple[float, float]:
    """Seconds between two beats, and since the last one, as the node's metrics have them."""
    lines = dict(line.rsplit(" ", 1) for line in node.render_metrics().decode().splitlines() if not line.startswith("#"))
    interval, age = (lines[f'kvferry_discovery_{name}_seconds{{role="prefill"}}'] for name in ("interval", "age"))
    return float(interval), float(age)
