"""Calls whose callers leave without a word, over a real server: nothing of it is an error of this side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.registry.attaches import serving
from tests.runtime.instances import until
from transfer.errors import EngineError, OutOfMemory
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.status import end_with, error_of

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0))
DEADLINE_S = 60.0


class Talks(pb_grpc.DecodeControlServicer):
    """Says `num_events` of 8,000 bytes each, then fails."""

    def __init__(self, num_events: int) -> None:
        self.num_events = num_events
        self.num_said = 0
        self.is_over = asyncio.Event()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        try:
            for number in range(self.num_events):
                self.num_said = number + 1
                yield pb.GenerateEvent(tokens=pb.GeneratedTokens(text="x" * 8000))
            await end_with(context, EngineError("the step failed"))
        finally:
            self.is_over.set()


class Fails(pb_grpc.DecodeControlServicer):
    """With that error, at once."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        await end_with(context, self.error)
        yield pb.GenerateEvent()


async def test_a_caller_that_reads_nothing_and_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Talks(num_events=100)  # type: ignore[abstract]  # the other calls are answered UNIMPLEMENTED
    async with (
        serving(decode_control=servicer) as server,
        grpc.aio.insecure_channel(server.address, options=SMALL_WINDOW) as channel,
    ):
        stub: Any = pb_grpc.DecodeControlStub(channel)
        call = stub.Generate(pb.GenerateRequest())
        await until(lambda: servicer.num_said > 0)
        await asyncio.sleep(0.2)
        assert servicer.num_said < 20, "it is stuck behind what the caller does not read"
        call.cancel()
        await asyncio.wait_for(servicer.is_over.wait(), DEADLINE_S)
        await asyncio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("error", "spares_kv"),
    [
        (EngineError("not finite"), False),
        (EngineError("x", spares_kv=True), True),
        (OutOfMemory("x"), True),
        (KeyError("a bug"), True),
    ],
)
async def test_whether_an_engine_blames_a_requests_kv_crosses_the_wire(error: Exception, spares_kv: bool) -> None:
    servicer = Fails(error)  # type: ignore[abstract]
    async with serving(decode_control=servicer) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = pb_grpc.DecodeControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(pb.GenerateRequest())))
    heard = error_of(caught.value, peer="p")
    assert isinstance(heard, EngineError) and heard.spares_kv == spares_kv
    assert isinstance(heard, OutOfMemory) is isinstance(error, OutOfMemory)
