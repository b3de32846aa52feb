"""What a vLLM's own API is asked for a decode node, and what its refusals are for that node's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from kvferry.engines.vllm_compute import ComputeByApi
from tests.cluster.calls import until
from transfer.connector.outgoing import Transfer
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError, EngineError, PeerUnreachable, TransferError

SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=2**63 - 1)


def transfer(cache_salt: str = "") -> Transfer:
    fields = {"token_ids": (5, 6, 7), "engine_request": "t-1", "sampling": SAMPLING, "cache_salt": cache_salt}
    return cast(Transfer, SimpleNamespace(**fields))


class Api:
    """OpenAI's, as far as it is asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Any] = []
        self.keys: list[str | None] = []
        self.num_gone = 0
        self.answer: Callable[[], web.Response] | None = lambda: web.json_response({"choices": []})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def completions(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        try:
            if self.answer is None:
                await asyncio.sleep(60)
            assert self.answer is not None
            return self.answer()
        except asyncio.CancelledError:
            self.num_gone += 1
            raise


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api()
    app = web.Application()
    app.add_routes([web.get("/v1/models", made.models), web.post("/v1/completions", made.completions)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_the_question(api: Api) -> None:
    """Nothing of how the first token is chosen is left to the defaults of the model's directory."""
    await ComputeByApi(api.url + "/", "secret")(transfer())
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}
    assert api.asked == [
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
    assert api.keys == ["Bearer secret"]


async def test_a_salt_is_told_and_an_empty_one_is_none(api: Api) -> None:
    """vLLM has a prefix cache of its own, and refuses an empty salt."""
    for salt in ("tenant", ""):
        await ComputeByApi(api.url, None)(transfer(salt))
    assert [question.get("cache_salt") for question in api.asked] == ["tenant", None]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ConfigError),
        (503, PeerUnreachable),
        (500, EngineError),
    ],
)
async def test_refusals(api: Api, status: int, kind: type[TransferError]) -> None:
    """A prompt that it cannot take is the client's affair, a busy server's another prefill node can take."""
    api.answer = lambda: web.json_response({"error": {"message": "no,\n and why"}}, status=status)
    with pytest.raises(kind, match=rf"refuses \({status}\): no, and why$"):
        await ComputeByApi(api.url, None)(transfer())


async def test_nobody_listens(api: Api) -> None:
    with pytest.raises(PeerUnreachable, match=r"http://127\.0\.0\.1:9 does not answer"):
        await ComputeByApi("http://127.0.0.1:9", None)(transfer())


async def test_a_question_that_is_given_up_is_given_up_there(api: Api) -> None:
    api.answer = None
    asking = asyncio.create_task(ComputeByApi(api.url, None)(transfer()))
    await until(lambda: len(api.asked) == 1, "the question is there")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: api.num_gone == 1, "the API sees that nobody listens any more")
