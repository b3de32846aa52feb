"""The stream by which a decode leader holds its join, over real gRPC: beats, drain, and the end of an old one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from node_runtime.daemon import Daemon, NodeState
from prefill_node.cutting import Cut
from prefill_node.joins import Joins
from prefill_node.node import PrefillNode
from prefill_node.rank_messages import AttachDecode, DecodeAttached
from tests.runtime.instances import instance, prefill_config, until
from transfer.chunk import ChunkPlan
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.client import open_channel
from transfer.registry.convert import instance_to_proto

LIFE = 5
BEAT_S = 10.0  # the most that is allowed
AT_ONCE_S = 8.0  # of a loaded machine; what is said with the next beat only comes later
CUT = Cut(plan=ChunkPlan(chunk_tokens=8, layers_per_group=1), largest_piece_bytes=64)


class Served:
    """A prefill leader whose one rank attaches to whatever it is told to."""

    def __init__(self, folder: Path, *, insecure: int = 2) -> None:
        daemon = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None))
        self.node = PrefillNode(daemon, prefill_config(folder, server={"host": "127.0.0.1"}, tls={"insecure": insecure}))
        self.lost: list[str] = []
        self.is_idle = False
        self.others: dict[int, int] = {}  # by join
        self.joins = Joins(1, self._rank, lambda join, error: self.lost.append(str(error)), lambda join: CUT)
        requests = SimpleNamespace(
            is_idle=lambda join: self.is_idle, others_tokens=lambda join: self.others.get(join.incarnation, 0)
        )
        self.node._life = cast(Any, SimpleNamespace(joins=self.joins, instance=instance(3), requests=requests))
        self.channel: grpc.aio.Channel

    def _rank(self, message: object) -> None:
        if isinstance(message, AttachDecode):
            attached = DecodeAttached(join=message.join, incarnation=message.instance.incarnation, links=())
            asyncio.get_running_loop().call_soon(self.joins.on_attached, 0, attached)

    def join(self, **changes: Any) -> Any:
        question = {"decode": instance_to_proto(instance(LIFE)), "decode_address": "decode:1", "rank_addresses": ["rank:1"]}
        return pb_grpc.PrefillControlStub(self.channel).Join(pb.JoinRequest(**{**question, "heartbeat_s": 0.05, **changes}))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served(tmp_path)
    one.channel = open_channel(await one.node.open())
    yield one
    await one.channel.close()
    await one.node.close()


async def kind(call: Any) -> str:
    async with asyncio.timeout(AT_ONCE_S):
        event = await call.read()
    return event.WhichOneof("event") if event is not grpc.aio.EOF else "end"


async def test_a_join_beats_until_the_decode_leader_leaves(served: Served) -> None:
    call = served.join()
    assert [await kind(call) for _ in range(4)] == ["joined", "beat", "beat", "beat"]
    assert served.joins.find(LIFE) is not None
    call.cancel()
    await until(lambda: served.lost)
    assert served.lost == ["the decode leader has left"] and not list(served.joins)


async def test_each_beat_tells_a_decode_instance_what_others_have_given_the_node(served: Served) -> None:
    served.others = {LIFE: 300}
    call = served.join()
    assert await kind(call) == "joined"
    async with asyncio.timeout(5):
        event = await call.read()
        assert event.beat.HasField("others_tokens") and event.beat.others_tokens == 300
        served.others = {}
        while event.beat.others_tokens:
            event = await call.read()
        assert event.beat.HasField("others_tokens"), "none is told, too"
        served.node._draining.begin()
        while not event.HasField("draining"):
            event = await call.read()
        served.others = {LIFE: 7}
        while event.beat.others_tokens != 7:
            event = await call.read()
    call.cancel()


async def test_the_end_of_an_old_stream_does_not_end_the_join_that_replaced_it(served: Served) -> None:
    old = served.join()
    assert await kind(old) == "joined"
    new = served.join()
    assert await kind(new) == "joined"
    with pytest.raises(grpc.aio.AioRpcError, match="joined again"):
        while True:
            await kind(old)
    assert [await kind(new) for _ in range(4)] == ["beat"] * 4
    assert served.joins.find(LIFE) is not None
    new.cancel()


async def test_a_drain_is_said_once_and_at_once_and_the_beats_go_on(served: Served) -> None:
    call = served.join(heartbeat_s=BEAT_S)
    assert [await kind(call) for _ in range(2)] == ["joined", "beat"]
    served.node._draining.begin()
    assert await kind(call) == "draining"
    call.cancel()
    refused = served.join()
    with pytest.raises(grpc.aio.AioRpcError, match="the prefill node is draining"):
        await kind(refused)


def knowing(*capabilities: str) -> pb.InstanceInfo:
    return instance_to_proto(replace(instance(LIFE), capabilities=frozenset(capabilities)))


async def test_the_end_of_a_drain_is_said_once_and_at_once_and_the_join_goes_on(served: Served) -> None:
    call = served.join(heartbeat_s=BEAT_S, decode=knowing("undrain"))
    assert [await kind(call) for _ in range(2)] == ["joined", "beat"]
    for _ in range(2):
        served.node._draining.begin()
        assert await kind(call) == "draining"
        served.node._draining.end()
        assert await kind(call) == "undrained"
    assert served.joins.find(LIFE) is not None and not served.lost
    call.cancel()


async def test_an_older_decode_side_joins_anew_after_a_drain_once_nothing_of_it_is_in_flight(served: Served) -> None:
    call = served.join(decode=knowing())
    assert [await kind(call) for _ in range(2)] == ["joined", "beat"]
    served.node._draining.begin()
    assert await kind(call) == "draining"
    served.node._draining.end()
    assert [await kind(call) for _ in range(4)] == ["beat"] * 4
    served.is_idle = True
    with pytest.raises(grpc.aio.AioRpcError, match="drains no more; join again") as ended:
        while True:
            assert await kind(call) == "beat"
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE and not list(served.joins)


async def test_a_drain_that_ends_before_anybody_looked_is_not_said(served: Served) -> None:
    call = served.join(decode=knowing("undrain"))
    assert [await kind(call) for _ in range(2)] == ["joined", "beat"]
    served.node._draining.begin()
    served.node._draining.end()
    assert [await kind(call) for _ in range(3)] == ["beat"] * 3
    call.cancel()


async def test_a_long_join_keeps_nothing_for_each_beat(served: Served) -> None:
    call = served.join(heartbeat_s=0.05)
    for _ in range(20):
        await kind(call)
    (join,) = served.joins
    assert len(join.lost._callbacks or ()) <= 1
    call.cancel()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"heartbeat_s": 0.0}, "heartbeat_s is 0.0; it must be in [0.05, 10]"),
        ({"heartbeat_s": 0.0499}, "heartbeat_s is 0.0499"),
        ({"heartbeat_s": 10.1}, "heartbeat_s is 10.1"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s is nan"),
        ({"rank_addresses": ["a:1", "b:1"]}, "rank_addresses has 2 entries for 1 ranks"),
        ({"rank_addresses": ["h" * (2 << 20)]}, "rank_addresses has 2097152 characters; it must have 1 to 300"),
        ({"rank_addresses": [""]}, "rank_addresses has 0 characters"),
        ({"decode_address": "h" * 301}, "decode_address has 301 characters"),
        ({"rank_addresses": ["\N{GRINNING FACE}:1"]}, "rank_addresses is '\\U0001f600:1'; it must be ASCII"),
        ({"decode": instance_to_proto(instance(LIFE, weights="other"))}, "model weights"),
        ({"decode": pb.InstanceInfo()}, ""),
    ],
)
async def test_a_bad_join_is_refused_in_one_line(served: Served, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await kind(served.join(**changes))
    assert complaint in (refusal.value.details() or "")
    assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert not list(served.joins)


@pytest.mark.parametrize(
    "changes", [{}, {"decode_address": "127.0.0.1:1"}, {"decode_address": "localhost:1", "rank_addresses": ["10.0.0.1:1"]}]
)
async def test_without_tls_nobody_is_called_beyond_loopback(tmp_path: Path, changes: dict[str, Any]) -> None:
    one = Served(tmp_path, insecure=1)
    one.channel = open_channel(await one.node.open())
    with pytest.raises(grpc.aio.AioRpcError, match="which is no loopback address; without TLS it needs --insecure twice"):
        await kind(one.join(**changes))
    assert not list(one.joins)
    await one.channel.close()
    await one.node.close()


async def test_a_decode_node_that_does_not_fit_is_spoken_of_once_for_each_reason(served: Served) -> None:
    """It asks again every other second."""
    with capture_logs() as lines:
        for heartbeat_s in (0.0, 0.0, 10.1, 0.0):
            with pytest.raises(grpc.aio.AioRpcError):
                await kind(served.join(heartbeat_s=heartbeat_s))
    assert [line["reason"].partition(";")[0] for line in lines] == ["heartbeat_s is 0.0", "heartbeat_s is 10.1"]
    assert all(line["event"] == "join_refused" and line["address"] == "decode:1" for line in lines)
