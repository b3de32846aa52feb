"""A node of two roles serves both roles' services: each call goes to the leader of the role that it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from node_runtime.role_service import RoleServices
from tests.runtime.instances import decode_config, prefill_config
from transfer.config import NodeConfig
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.server import serve


class Leader:
    """Answers every call with its role."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.ended = asyncio.Event()

    async def Status(self, request: Any, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus(role=self.config.role)

    async def Drain(self, request: Any, context: Any) -> pb.DrainResponse:
        return pb.DrainResponse(remaining=7)

    async def Abort(self, request: Any, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(found=True)

    async def Reserve(self, request: Any, context: Any) -> pb.ReserveResponse:
        return pb.ReserveResponse(reserved=True)

    async def Join(self, request: Any, context: Any) -> AsyncIterator[pb.JoinEvent]:
        try:
            while True:
                yield pb.JoinEvent(beat=pb.Beat())
        finally:
            self.ended.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(accepted=pb.GenerateAccepted(request_id=self.config.role))


async def test_calls_go_to_the_role_that_the_node_has(tmp_path: Path) -> None:
    prefill, decode = Leader(prefill_config(tmp_path)), Leader(decode_config(tmp_path))
    services = RoleServices(prefill)
    server = await serve(
        "127.0.0.1", 0, prefill_control=services.prefill_control, decode_control=services.decode_control,
        node_control=services.node_control,
    )  # fmt: skip
    channel = grpc.aio.insecure_channel(server.address)
    as_prefill: Any = pb_grpc.PrefillControlStub(channel)
    as_decode: Any = pb_grpc.DecodeControlStub(channel)
    as_node: Any = pb_grpc.NodeControlStub(channel)

    async def code_and_text(call: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if hasattr(call, "read"):
                await call.read()
            else:
                await call
        return caught.value.code(), caught.value.details() or ""

    try:
        async with asyncio.timeout(60):
            join = as_prefill.Join(pb.JoinRequest())
            assert (await join.read()).HasField("beat")
            for call in (as_decode.Generate(pb.GenerateRequest()), as_decode.Reserve(pb.ReserveRequest())):
                assert await code_and_text(call) == (
                    grpc.StatusCode.UNAVAILABLE,
                    "this node is a prefill node now, and serves no DecodeControl",
                )
            # An operator's methods answer under each name, whatever the node is: tools of version 0.1 try one after the other.
            for stub in (as_prefill, as_decode, as_node):
                assert (await stub.Status(pb.StatusRequest())).role == "prefill"
                assert (await stub.Drain(pb.DrainRequest())).remaining == 7
            # With this one a decode node takes back what it asked this prefill node for.
            assert (await as_prefill.Abort(pb.AbortRequest(request_id="a"))).found
            services.leader = decode
            assert (await as_node.Status(pb.StatusRequest())).role == "decode"
            assert (await as_decode.Reserve(pb.ReserveRequest())).reserved
            assert (await as_decode.Generate(pb.GenerateRequest()).read()).accepted.request_id == "decode"
            assert await code_and_text(as_prefill.Join(pb.JoinRequest())) == (
                grpc.StatusCode.UNAVAILABLE,
                "this node is a decode node now, and serves no PrefillControl",
            )
            assert await code_and_text(as_prefill.Abort(pb.AbortRequest(request_id="a"))) == (
                grpc.StatusCode.UNAVAILABLE,
                "this node is a decode node now, and serves no PrefillControl",
            ), "a peer may call it, and what this node has now are clients' requests"
            for stub in (as_decode, as_node):
                assert (await stub.Abort(pb.AbortRequest(request_id="a"))).found
            # A stream that began stays with the leader that it began with, which hears of its end.
            assert (await join.read()).HasField("beat")
            join.cancel()
            await prefill.ended.wait()
    finally:
        await channel.close()
        await server.close()
