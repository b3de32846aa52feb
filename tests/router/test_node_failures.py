"""Decode nodes that fail in every way that gRPC has words for: what a router tells its client, and what it tries again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.router.serve import open_router
from kvferry.router.servers import Server
from kvferry.router.settings import RouterSettings
from tests.authority import Authority
from tests.router.conftest import WITHIN_S, Client, until
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.certificates import CertificateFiles
from transfer.registry.security import MutualTls, PlainText, Security
from transfer.registry.server import serve

TOKENS = [pb.GenerateEvent(tokens=pb.GeneratedTokens(token_ids=[n], text=text)) for n, text in ((5, " a"), (6, ""), (7, " b"))]
ACCEPTED = pb.GenerateEvent(accepted=pb.GenerateAccepted(request_id="r1", prompt_tokens=2))
DONE = pb.GenerateEvent(done=pb.GenerateDone(finish_reason="stop", prompt_tokens=2, generated_tokens=3))


@dataclass(eq=False)
class Node(pb_grpc.DecodeControlServicer):
    """Accepts, sends so many tokens, then fails with `code`, hangs, or is done."""

    code: grpc.StatusCode | None = None
    tokens_before: int = 0
    is_hanging: bool = False
    is_ready: bool = True
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    num_cancelled: int = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.requests.append(request)
        try:
            yield ACCEPTED
            for event in TOKENS[: self.tokens_before if self.code or self.is_hanging else None]:
                yield event
            if self.is_hanging:
                await asyncio.sleep(60)
            if self.code is not None:
                await context.abort(self.code, "the reason, in one line")
            yield DONE
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC was sending an event
            self.num_cancelled += 1
            raise

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus(role="decode", state="ready", ready=self.is_ready, not_ready_reason="" if self.is_ready else "tired")


@contextlib.asynccontextmanager
async def routed(
    *nodes: Node, security: Security | None = None, server: Security | None = None, **options: Any
) -> AsyncIterator[Client]:
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for node in nodes:
            served = await (
                serve("127.0.0.1", 0, decode_control=node, security=server)
                if server
                else serve("127.0.0.1", 0, decode_control=node)
            )
            stack.push_async_callback(served.close, grace_s=0)
            addresses.append(f"127.0.0.1:{served.port}")
        options = {"health_interval_s": 0.05, **options}
        settings = RouterSettings(prefill=(), decode=tuple(addresses), are_nodes=True, port=0, **options)
        router = await stack.enter_async_context(open_router(settings, security or PlainText()))
        client = Client(router.address)
        stack.push_async_callback(client.session.close)
        await until(lambda: router.backend.readiness().is_ready, "the router is ready")
        yield client


COMPLETION = {"prompt": "x", "max_tokens": 3}


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
    nodes = [Node(code=code), Node(code=code)]
    async with routed(*nodes, retries=1) as client:
        answer = await client.post("/v1/completions", {**COMPLETION, "stream": is_stream})
        assert answer.status == status and "the reason, in one line" in answer.error
        assert sum(len(node.requests) for node in nodes) == attempts
        assert ("Retry-After" in answer.headers) is (status == 503)


async def test_another_node_is_tried_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Server.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Server.__init__.__kwdefaults__, "clock", lambda: 100.0)  # a breaker never ends its pause
    nodes = [Node(code=grpc.StatusCode.UNAVAILABLE), Node()]
    async with routed(*nodes) as client:
        for number in range(12):
            answer = await client.post("/v1/completions", {**COMPLETION, "stream": number % 2 == 0})
            assert answer.status == 200 and answer.text == " a b"
        assert [len(node.requests) for node in nodes] == [3, 12], "the one that failed three times is left out"


async def test_a_stream_that_fails_after_its_first_token_is_cut_off_with_an_error() -> None:
    node = Node(code=grpc.StatusCode.UNAVAILABLE, tokens_before=2)
    async with routed(node, Node()) as client:
        while not node.requests:
            answer = await client.post("/v1/completions", {**COMPLETION, "stream": True})
        assert answer.status == 200
        first, last = answer.events
        assert json.loads(first)["choices"][0]["text"] == " a"
        assert "the reason, in one line" in json.loads(last)["error"]["message"]
        answer = await client.post("/v1/completions", COMPLETION)
        assert answer.status == 200 and answer.text == " a b", "one that is not streamed has sent nothing yet"


async def test_a_client_that_goes_away_cancels_the_call() -> None:
    node = Node(is_hanging=True, tokens_before=1)
    async with routed(node) as client:
        for number, is_stream in enumerate((False, True), 1):
            asking = asyncio.create_task(client.post("/v1/completions", {**COMPLETION, "stream": is_stream}))
            await until(lambda number=number: len(node.requests) == number, "the node has it")  # type: ignore[misc]
            asking.cancel()
            await until(lambda number=number: node.num_cancelled == number, "the node was told")  # type: ignore[misc]


async def test_a_node_that_stands_still_and_is_not_healthy_is_left() -> None:
    nodes = [Node(is_hanging=True), Node(is_hanging=True)]
    async with routed(*nodes, lost_after_s=0.3) as client:
        asking = asyncio.create_task(client.post("/v1/completions", COMPLETION))
        await until(lambda: any(node.requests for node in nodes), "one has it")
        (frozen,) = [node for node in nodes if node.requests]
        (other,) = [node for node in nodes if node is not frozen]
        other.is_hanging = False
        frozen.is_ready = False
        assert (await asyncio.wait_for(asking, WITHIN_S)).text == " a b"
        ready = (await client.get("/readyz")).body
        assert ready == b"ready\n", "one is left"
        other.is_ready = False
        await until(lambda: _is_not_ready(client), "seen")
        assert b"tired" in (await client.get("/readyz")).body


async def _is_not_ready(client: Client) -> bool:
    return (await client.get("/readyz")).status == 503


async def test_over_tls_as_every_other_client(tmp_path: Path) -> None:
    authority = Authority()
    served = authority.files(tmp_path / "node", "node.example")
    called = authority.files(tmp_path / "client", "client.example")
    server = MutualTls(files=CertificateFiles(served.tls(), is_server=True), peer_names=(), client_names=("client.example",))
    security = MutualTls(files=CertificateFiles(called.tls(), is_server=False), peer_names=("node.example",))
    async with routed(Node(), security=security, server=server) as client:
        assert (await client.post("/v1/completions", COMPLETION)).text == " a b"
