"""Messages and calls above their limits, over a real server."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from tests.registry.attaches import serving
from tests.runtime.instances import until
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry import options, server


class Counts(pb_grpc.DecodeControlServicer):
    """Counts the prompts that reach it; holds each for as long as it is told to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        self.sizes.append(len(request.prompt))
        await self.gate.wait()
        yield pb.GenerateEvent(done=pb.GenerateDone())

    async def Reserve(self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ReserveResponse:
        return pb.ReserveResponse(reserved=True)


@contextlib.asynccontextmanager
async def called(node: Counts, **options: int) -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
    """Serve `node`. Return a channel to it, with gRPC's `options`, and its address."""
    grpc_options = [(f"grpc.{name}", value) for name, value in options.items()]
    async with serving(decode_control=node) as served, grpc.aio.insecure_channel(served.address, options=grpc_options) as channel:
        yield channel, served.address


async def code_of(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> grpc.StatusCode:
    call = pb_grpc.DecodeControlStub(channel).Generate(request, timeout=60)
    async for _ in call:
        pass
    return await call.code()


async def test_a_message_above_the_limit_is_refused_by_grpc() -> None:
    node = Counts()
    node.gate.set()
    async with called(node, max_send_message_length=-1) as (channel, _):
        below = pb.GenerateRequest(prompt="x" * (options.MAX_MESSAGE_BYTES - 16))
        assert await code_of(channel, below) is grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await code_of(channel, pb.GenerateRequest(prompt="x" * options.MAX_MESSAGE_BYTES))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert node.sizes == [options.MAX_MESSAGE_BYTES - 16]


async def test_calls_above_the_limit_are_refused_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 3)
    node = Counts()
    async with called(node) as (channel, _):
        held = [asyncio.ensure_future(code_of(channel, pb.GenerateRequest(prompt="x"))) for _ in range(3)]
        await until(lambda: len(node.sizes) == 3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await code_of(channel, pb.GenerateRequest(prompt="x"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        node.gate.set()
        assert await asyncio.gather(*held) == [grpc.StatusCode.OK] * 3
    assert len(node.sizes) == 3


async def test_clients_calls_leave_room_for_the_other_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that holds all the calls it can get, answers unread, must not keep the two tiers apart."""
    monkeypatch.setattr(server, "MAX_CLIENT_CALLS", 3)
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 5)
    node = Counts()
    async with called(node) as (channel, _):
        watches = [health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        held = asyncio.ensure_future(code_of(channel, pb.GenerateRequest(prompt="x")))
        await until(lambda: node.sizes)
        with pytest.raises(grpc.aio.AioRpcError, match="3 calls of clients are in progress here") as refused:
            await code_of(channel, pb.GenerateRequest(prompt="y"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reserve = pb_grpc.DecodeControlStub(channel).Reserve
        assert (await reserve(pb.ReserveRequest(request_id="a"), timeout=60)).reserved
        watches[0].cancel()
        node.gate.set()
        assert await held is grpc.StatusCode.OK
        assert await code_of(channel, pb.GenerateRequest(prompt="z")) is grpc.StatusCode.OK
        watches[1].cancel()
    assert node.sizes == [1, 1]


@contextlib.asynccontextmanager
async def silent_connections(address: str, number: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many connections that say nothing, as tasks that end when the server hangs up."""
    host, port = address.split(":")

    async def open_and_wait() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass  # what a server says before it hangs up
        writer.close()

    tasks = [asyncio.create_task(open_and_wait()) for _ in range(number)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_connections_above_the_limit_are_closed_and_those_that_stand_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda open_files: 12)
    node = Counts()
    node.gate.set()
    async with called(node) as (channel, address):
        assert await code_of(channel, pb.GenerateRequest(prompt="x")) is grpc.StatusCode.OK
        async with silent_connections(address, 60) as tasks:
            await until(lambda: sum(task.done() for task in tasks) >= 49)
            assert await code_of(channel, pb.GenerateRequest(prompt="x")) is grpc.StatusCode.OK


async def test_a_connection_that_says_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = dict(server.SERVER_OPTIONS)
    assert patient["grpc.server_handshake_timeout_ms"] == options.HANDSHAKE_MS
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple((patient | {"grpc.server_handshake_timeout_ms": 500}).items()))
    async with serving(decode_control=Counts()) as served, silent_connections(served.address, 30) as tasks:
        await until(lambda: all(task.done() for task in tasks))


@pytest.mark.parametrize(
    ("open_files", "limit"),
    [
        (1024, "its limit of 1024 open files; 1024 sessions need 23808 (ulimit -n)"),
        (23807, "its limit of 23807 open files; 1024 sessions need 23808 (ulimit -n)"),
        (23808, "any limit of open files"),
        (resource.RLIM_INFINITY, "any limit of open files"),
    ],
)
def test_the_limit_of_sessions_blames_open_files_only_if_more_would_help(open_files: int, limit: str) -> None:
    assert options.limit_of_files(open_files) == limit
