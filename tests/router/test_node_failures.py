"""Decode nodes that fail with every status of gRPC. Tests of both kinds of servers are in test_failures.py."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.authority import Authority
from tests.router.conftest import PROMPT, routing, routing_of
from tests.router.node_servers import SAID, DecodeNode
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
