"""The stream by which a decode leader holds its join: heartbeats, drain, and the end of an old one. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tests.decode.local_nodes import LocalCall, LocalContext
from tests.prefill.join_server import JoinServer
from tests.runtime.instances import instance
from tests.runtime.virtual_time import in_virtual_time
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import instance_to_proto
from transfer.registry.security import PlainText

LIFE = 5
BEAT_S = 10.0


class Stream:
    """A decode leader's call, and the time of its last event."""

    def __init__(self, server: JoinServer, **changes: Any) -> None:
        question = {"decode": instance_to_proto(instance(LIFE)), "decode_address": "decode:1", "rank_addresses": ["rank:1"]}
        request = pb.JoinRequest(**{**question, "heartbeat_s": BEAT_S, **changes})
        self.call = LocalCall(server.Join(request, LocalContext()))
        self.read_s = 0.0

    async def event(self) -> pb.JoinEvent:
        event: pb.JoinEvent = await self.call.read()
        self.read_s = asyncio.get_running_loop().time()
        return event

    async def kinds(self, count: int) -> list[str | None]:
        return [(await self.event()).WhichOneof("event") for _ in range(count)]


def new_server(*, insecure: int = 2) -> JoinServer:
    return JoinServer(3, security=PlainText(insecure=insecure))


@in_virtual_time
async def test_a_join_beats_until_the_decode_leader_leaves() -> None:
    server = new_server()
    stream = Stream(server)
    assert await stream.kinds(4) == ["joined", "beat", "beat", "beat"]
    assert stream.read_s == 2 * BEAT_S and server.joins.find(LIFE) is not None
    stream.call.cancel()
    await asyncio.sleep(0.1)
    assert server.lost == ["the decode leader has left"] and not list(server.joins)


@in_virtual_time
async def test_the_end_of_an_old_stream_does_not_end_the_join_that_replaced_it() -> None:
    server = new_server()
    old = Stream(server)
    assert await old.kinds(2) == ["joined", "beat"]
    new = Stream(server)
    assert await new.kinds(1) == ["joined"]
    with pytest.raises(grpc.aio.AioRpcError, match="joined again"):
        await old.event()
    assert await new.kinds(4) == ["beat"] * 4
    assert server.joins.find(LIFE) is not None


def knowing(*capabilities: str) -> pb.InstanceInfo:
    return instance_to_proto(replace(instance(LIFE), capabilities=frozenset(capabilities)))


@in_virtual_time
async def test_the_end_of_a_drain_is_said_once_and_at_once_and_the_join_goes_on() -> None:
    server = new_server()
    stream = Stream(server, decode=knowing("undrain"))
    assert await stream.kinds(2) == ["joined", "beat"]
    for _ in range(2):
        server.draining.begin()
        assert await stream.kinds(1) == ["draining"]
        server.draining.end()
        assert await stream.kinds(1) == ["undrained"]
    assert stream.read_s == 0.0 and server.joins.find(LIFE) is not None and not server.lost


@in_virtual_time
async def test_an_older_decode_side_joins_anew_after_a_drain_once_nothing_of_it_is_in_flight() -> None:
    server = new_server()
    server.traffic.idle = False
    stream = Stream(server, decode=knowing())
    assert await stream.kinds(2) == ["joined", "beat"]
    server.draining.begin()
    assert await stream.kinds(1) == ["draining"]
    server.draining.end()
    assert await stream.kinds(4) == ["beat"] * 4
    server.traffic.idle = True
    with pytest.raises(grpc.aio.AioRpcError, match="drains no more; join again") as ended:
        await stream.event()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE and not list(server.joins)


class CountingFuture(asyncio.Future[Any]):
    """Counts its callbacks."""

    num_callbacks = 0

    def add_done_callback(self, callback: Callable[..., Any], **context: Any) -> None:  # type: ignore[override]
        self.num_callbacks += 1
        super().add_done_callback(callback, **context)

    def remove_done_callback(self, callback: Callable[..., Any]) -> int:
        num_removed = super().remove_done_callback(callback)
        self.num_callbacks -= num_removed
        return num_removed


@in_virtual_time
async def test_a_long_join_keeps_nothing_per_heartbeat() -> None:
    server = new_server()
    stream = Stream(server)
    await stream.kinds(1)
    (join,) = server.joins
    join.lost = CountingFuture()
    await stream.kinds(20)
    assert join.lost.num_callbacks <= 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"heartbeat_s": 0.0}, "heartbeat_s is 0.0; it must be in [0.05, 10]"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s is nan"),
        ({"rank_addresses": ["a:1", "b:1"]}, "rank_addresses has 2 entries for 1 ranks"),
        ({"rank_addresses": ["h" * (2 << 20)]}, "rank_addresses has 2097152 characters; it must have 1 to 300"),
        ({"rank_addresses": ["\N{GRINNING FACE}:1"]}, "rank_addresses is '\\U0001f600:1'; it must be ASCII"),
        ({"decode": instance_to_proto(instance(LIFE, weights="other"))}, "model weights"),
        ({"decode": pb.InstanceInfo()}, ""),
    ],
)
@in_virtual_time
async def test_a_bad_join_is_refused_in_one_line(changes: dict[str, Any], complaint: str) -> None:
    server = new_server()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await Stream(server, **changes).event()
    assert complaint in (refusal.value.details() or "")
    assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert not list(server.joins)


@pytest.mark.parametrize(
    "changes", [{}, {"decode_address": "127.0.0.1:1"}, {"decode_address": "localhost:1", "rank_addresses": ["10.0.0.1:1"]}]
)
@in_virtual_time
async def test_without_tls_nobody_is_called_beyond_loopback(changes: dict[str, Any]) -> None:
    server = new_server(insecure=1)
    with pytest.raises(grpc.aio.AioRpcError, match="which is not a loopback address; without TLS it needs --insecure-anywhere"):
        await Stream(server, **changes).event()
    assert not list(server.joins)
