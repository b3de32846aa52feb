"""Nodes of the running cluster check the certificates of callers, and commands send them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvferry.__main__ import app
from tests.serving.conftest import NAMES, Serving
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb


async def test_a_certificate_without_a_role_is_refused_counted_and_logged_once(serving: Serving) -> None:
    decode = serving.cluster.decode
    files = serving.authority.files(serving.store.parent / "stranger", "stranger.example", NAMES["decode"])
    async with serving.client(files=files) as stranger:
        for _ in range(3):
            with pytest.raises(
                ConfigError,
                match=r"may not call NodeControl/Status: it is not in tls\.peer_names or tls\.client_names of this node",
            ):
                await stranger.status(timeout_s=30)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), max_new_tokens=1)
        with pytest.raises(ConfigError, match=r"may not call DecodeControl/Generate"):
            async for _ in stranger.generate(request, accept_timeout_s=30, timeout_s=30):
                pass
    _, page = await decode.http("/metrics")
    assert 'kvferry_refused_calls_total{method="NodeControl/Status",role="decode"} 3.0' in page
    assert 'kvferry_certificate_stale{role="decode"} 0.0' in page and "kvferry_certificate_expiry_timestamp_seconds" in page
    assert "example" not in page, "a metric contains the name of a certificate"
    logged = [line for line in decode.log.events("call_refused") if line["method"] == "NodeControl/Status"]
    assert len(logged) == 1 and "stranger.example" in logged[0]["caller"]
    for node in serving.cluster.nodes:
        assert (await node.status()).ready
        assert not list(node.log.events("insecure"))


def test_the_commands_call_nodes_with_a_certificate(serving: Serving) -> None:
    target = ["--target", serving.cluster.decode.address, *serving.tls_options()]
    shown = CliRunner().invoke(app, ["status", *target, "--json"])
    assert (shown.exit_code, shown.stderr) == (0, "") and json.loads(shown.stdout)["ready"] is True
    options = ["--token-ids", "1,2,3", "--max-new-tokens", "4", "--ignore-eos", "--json"]
    answer = CliRunner().invoke(app, ["generate", *target, *options])
    assert (answer.exit_code, answer.stderr) == (0, "") and '"finish_reason": "length"' in answer.stdout
