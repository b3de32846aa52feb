"""Requests to a vLLM's own API for a decode node, and the errors of that node's client if the API rejects them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.engines.vllm_compute import ComputeByApi
from tests.cluster.calls import until
from tests.router.vllm_server import Kv, VllmServer
from transfer.connector.outgoing import Transfer
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError, EngineError, PeerUnreachable, TransferError

SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=2**63 - 1)


def transfer(cache_salt: str = "") -> Transfer:
    fields = {"token_ids": (5, 6, 7), "engine_request": "t-1", "sampling": SAMPLING, "cache_salt": cache_salt}
    return cast(Transfer, SimpleNamespace(**fields))


@pytest.fixture
async def api() -> AsyncIterator[VllmServer]:
    server = VllmServer(kv=Kv())
    await server.start()
    yield server
    await server.stop()


async def test_the_question(api: VllmServer) -> None:
    """Nothing of how the first token is chosen is left to the defaults of the model's directory."""
    await ComputeByApi(api.url + "/", "secret", headers={"X-data-parallel-rank": "1"})(transfer())
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1", "is_whole_prompt": True}
    assert api.requests == [
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 1,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": 2**63 - 1,
            "repetition_penalty": 1.0,
            "min_p": 0.0,
            "kv_transfer_params": params,
        }
    ]
    assert [(one["Authorization"], one["X-data-parallel-rank"]) for one in api.headers] == [("Bearer secret", "1")]


async def test_a_salt_is_told_and_an_empty_one_is_none(api: VllmServer) -> None:
    """vLLM has a prefix cache of its own, and refuses an empty salt."""
    for salt in ("tenant", ""):
        await ComputeByApi(api.url, None)(transfer(salt))
    assert [question.get("cache_salt") for question in api.requests] == ["tenant", None]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ConfigError),
        (503, PeerUnreachable),
        (500, EngineError),
    ],
)
async def test_refusals(api: VllmServer, status: int, kind: type[TransferError]) -> None:
    """A prompt that it cannot take is the client's affair, a busy server's another prefill node can take."""
    api.answers.append(status)
    with pytest.raises(kind, match=rf"refuses \({status}\): told to answer {status}$"):
        await ComputeByApi(api.url, None)(transfer())


async def test_an_api_that_nobody_serves_is_unreachable(api: VllmServer) -> None:
    with pytest.raises(PeerUnreachable, match=r"http://127\.0\.0\.1:9 does not answer"):
        await ComputeByApi("http://127.0.0.1:9", None)(transfer())


async def test_a_question_that_is_given_up_is_given_up_there(api: VllmServer) -> None:
    api.gate.clear()
    asking = asyncio.create_task(ComputeByApi(api.url, None)(transfer()))
    await until(lambda: len(api.requests) == 1, "the question is there")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: api.disconnected == 1, "the API sees that nobody listens any more")
