"""A router in front of vLLM decode servers and kvferry's own prefill nodes, which only the decode servers ask for prompts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvferry.router.backend import Backend
from kvferry.router.serve import open_router
from kvferry.router.settings import RouterSettings
from tests.router.conftest import Client, until
from tests.router.vllm_server import Kv, VllmServer, running
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.security import PlainText
from transfer.registry.server import serve


class PrefillNode(pb_grpc.PrefillControlServicer):
    """Says that it is one."""

    def __init__(self) -> None:
        self.status = pb.NodeStatus(role="prefill", state="ready", ready=True)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        return self.status


@asynccontextmanager
async def serving(node: PrefillNode) -> AsyncIterator[str]:
    """host:port of the node."""
    server = await serve("127.0.0.1", 0, prefill_control=node)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close()


@asynccontextmanager
async def routing(decode: VllmServer, *nodes: str) -> AsyncIterator[tuple[Backend, Client]]:
    async with running(decode):
        settings = RouterSettings(
            prefill=nodes, decode=(decode.url,), are_nodes=False, are_prefill_nodes=True, port=0, health_interval_s=0.05
        )
        async with open_router(settings, PlainText()) as router:
            client = Client(router.address)
            try:
                yield router.backend, client
            finally:
                await client.session.close()


async def test_decode_is_told_which_node_computes_the_prompt() -> None:
    decode = VllmServer(kv=Kv())
    async with serving(PrefillNode()) as one, serving(PrefillNode()) as other, routing(decode, one, other) as (backend, client):
        await until(lambda: all(server.state == "healthy" for server in backend.prefill.servers), "both nodes are healthy")
        await until(lambda: backend.readiness().is_ready, "the router is ready")
        for _ in range(4):
            assert (await client.complete(max_tokens=3)).status == 200
        streamed = await client.chat(stream=True)
        assert streamed.status == 200 and streamed.events[-1] == "[DONE]"
        told = [{"do_remote_prefill": True, "do_remote_decode": False, "remote_address": address} for address in (one, other)]
        assert decode.params == [*told, *told, told[0]]  # the one that was asked the longest ago
        assert await client.metric("flows_total", flow="fetched") == 5
        assert await client.metric("servers", tier="prefill", state="healthy") == 2
        assert json.loads((await client.get("/v1/models")).body)["data"][0]["id"] == "tiny"
        assert all(server.outstanding == 0 for server in (*backend.prefill.servers, *backend.decode.servers))
        # What cannot be handed over is computed by decode alone.
        assert (await client.complete(n=2)).status == 200
        assert decode.params[-1] is None


async def test_a_node_that_drains_or_is_none_is_left_out() -> None:
    decode, node, wrong = VllmServer(kv=Kv()), PrefillNode(), PrefillNode()
    wrong.status.role = "decode"
    async with serving(node) as good, serving(wrong) as bad, routing(decode, bad, good) as (backend, client):
        await until(lambda: backend.readiness().is_ready, "the router is ready")
        await until(lambda: "it is a decode node" in backend.prefill.servers[0].problem, "the other was looked at")
        for _ in range(3):
            await client.complete()
        assert {params["remote_address"] for params in decode.params} == {good}
        node.status.ready, node.status.not_ready_reason = False, "the node is draining"
        await until(lambda: not backend.readiness().is_ready, "the router has seen it")
        answer = await client.get("/readyz")
        assert answer.status == 503
        assert b"--prefill takes prefill nodes" in answer.body and b"the node is draining" in answer.body
