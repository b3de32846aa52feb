"""kvferry's own nodes behind a router. Tests of both kinds of servers are in test_failures.py."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from tests.authority import Authority
from tests.router.conftest import PROMPT, routing, routing_of, settled, until
from tests.router.node_servers import SAID, DecodeNode, PrefillNode
from transfer.registry.certificates import CertificateFiles
from transfer.registry.security import MutualTls


@pytest.mark.parametrize(
    ("code", "status", "attempts"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, 1),
        (grpc.StatusCode.FAILED_PRECONDITION, 500, 1),
        (grpc.StatusCode.UNAVAILABLE, 503, 2),
        (grpc.StatusCode.INTERNAL, 502, 2),
        (grpc.StatusCode.PERMISSION_DENIED, 502, 2),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_status_before_the_first_token(code: grpc.StatusCode, status: int, attempts: int, is_stream: bool) -> None:
    async with routing_of("nodes", 2, retries=1) as setup:
        for node in setup.decode:
            node.answers.append(code)
        answer = await setup.client.complete(stream=is_stream)
        assert answer.status == status and SAID in answer.error
        assert sum(len(node.requests) for node in setup.decode) == attempts
        assert ("Retry-After" in answer.headers) is (status == 503)


async def test_an_answer_that_is_not_streamed_is_retried_after_its_first_token() -> None:
    async with routing_of("nodes", 2) as setup:
        broken, _ = setup.decode
        broken.break_after = 2
        for _ in range(2):
            answer = await setup.client.complete()
            assert answer.status == 200 and answer.text == f"<{len(PROMPT)}> one two three"
        assert broken.requests


async def test_over_tls_as_every_other_client(tmp_path: Path) -> None:
    authority = Authority()
    served = authority.files(tmp_path / "node", "node.example")
    called = authority.files(tmp_path / "client", "client.example")
    server = MutualTls(files=CertificateFiles(served.tls(), is_server=True), peer_names=(), client_names=("client.example",))
    security = MutualTls(files=CertificateFiles(called.tls(), is_server=False), peer_names=("node.example",))
    async with routing((), [DecodeNode(security=server)], security=security) as setup:
        assert (await setup.client.post("/v1/completions", {"prompt": "x"})).text == "<1> one two three"


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
