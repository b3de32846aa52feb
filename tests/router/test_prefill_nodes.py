"""A router in front of vLLM decode servers and kvferry's own prefill nodes, which only the decode servers ask for prompts."""

from __future__ import annotations

import json

from tests.router.conftest import routing, settled, until
from tests.router.node_servers import PrefillNode


def address_of(node: PrefillNode) -> str:
    return node.url.removeprefix("grpc://")


async def test_decode_is_told_which_node_computes_the_prompt() -> None:
    async with routing([PrefillNode(), PrefillNode()]) as setup:
        await until(lambda: all(server.state == "healthy" for server in setup.backend.prefill.servers), "both nodes are healthy")
        for _ in range(4):
            assert (await setup.client.complete(max_tokens=3)).status == 200
        streamed = await setup.client.chat(stream=True)
        assert streamed.status == 200 and streamed.events[-1] == "[DONE]"
        told = [
            {"do_remote_prefill": True, "do_remote_decode": False, "remote_address": address_of(node)} for node in setup.prefill
        ]
        assert setup.decode[0].params == [*told, *told, told[0]]  # the one that was asked the longest ago
        assert await setup.client.metric("flows_total", flow="fetched") == 5
        assert await setup.client.metric("servers", tier="prefill", state="healthy") == 2
        assert json.loads((await setup.client.get("/v1/models")).body)["data"][0]["id"] == "tiny"
        await settled(setup)
        # What cannot be handed over is computed by decode alone.
        assert (await setup.client.complete(n=2)).status == 200
        assert setup.decode[0].params[-1] is None


async def test_a_node_that_drains_or_is_none_is_left_out() -> None:
    wrong, node = PrefillNode(role="decode"), PrefillNode(problem="the node is draining")
    async with routing([wrong, node]) as setup:
        await until(lambda: "it is a decode node" in setup.backend.prefill.servers[0].problem, "the other was looked at")
        for _ in range(3):
            await setup.client.complete()
        assert {params["remote_address"] for params in setup.decode[0].params} == {address_of(node)}
        node.health = 503
        await until(lambda: not setup.backend.readiness().is_ready, "the router has seen it")
        answer = await setup.client.get("/readyz")
        assert answer.status == 503
        assert b"--prefill takes prefill nodes" in answer.body and b"the node is draining" in answer.body
