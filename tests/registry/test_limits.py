"""Messages and calls above their limits, over a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry import options, server
from transfer.registry.server import serve


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


async def code_of(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> grpc.StatusCode:
    call = pb_grpc.DecodeControlStub(channel).Generate(request, timeout=20)
    async for _ in call:
        pass
    return await call.code()


async def test_a_message_above_the_limit_is_refused_by_grpc() -> None:
    node = Counts()
    node.gate.set()
    served = await serve("127.0.0.1", 0, decode_control=node)
    try:
        async with grpc.aio.insecure_channel(served.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            below = pb.GenerateRequest(prompt="x" * (options.MAX_MESSAGE_BYTES - 16))
            assert await code_of(channel, below) is grpc.StatusCode.OK
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await code_of(channel, pb.GenerateRequest(prompt="x" * options.MAX_MESSAGE_BYTES))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await served.close()
    assert node.sizes == [options.MAX_MESSAGE_BYTES - 16]


async def test_calls_above_the_limit_are_refused_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_CALLS", 3)
    node = Counts()
    served = await serve("127.0.0.1", 0, decode_control=node)
    try:
        async with grpc.aio.insecure_channel(served.address) as channel:
            held = [asyncio.ensure_future(code_of(channel, pb.GenerateRequest(prompt="x"))) for _ in range(3)]
            async with asyncio.timeout(20):
                while len(node.sizes) < 3:
                    await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await code_of(channel, pb.GenerateRequest(prompt="x"))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            node.gate.set()
            assert await asyncio.gather(*held) == [grpc.StatusCode.OK] * 3
    finally:
        await served.close()
    assert len(node.sizes) == 3
