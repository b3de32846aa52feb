"""Both flows against servers that answer as vLLM's: who is sent what, and when."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog

from kvferry.router.api import COMPLETIONS, Call
from tests.router.conftest import PROMPT, SEQUENTIAL, WITHIN_S, routing, settled, until
from tests.router.vllm_server import Kv, VllmServer

EXPECTED = f"<{len(PROMPT)}> one two three"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("is_sequential", [False, True])
async def test_an_answer_is_the_decode_servers_own(is_stream: bool, is_chat: bool, is_sequential: bool) -> None:
    async with routing(**({"flow": SEQUENTIAL} if is_sequential else {})) as setup:
        for _ in range(3):
            answer = await (setup.client.chat if is_chat else setup.client.complete)(stream=is_stream, max_tokens=16)
            assert answer.status == 200 and answer.text == EXPECTED
        (decode,) = setup.decode
        assert len(decode.requests) == len(setup.prefill[0].requests) == 3
        keys = ["do_remote_decode", "do_remote_prefill", "remote_address", "remote_engine_id", "transfer_id"]
        others = [*keys, "use_first_token"]  # from the second request on, the router knows the connector
        assert [sorted(params) for params in decode.params] == [keys, others, others]
        sent = decode.requests[0]
        assert sent.pop("kv_transfer_params") and sent["stream"] is is_stream and sent["max_tokens"] == 16
        await settled(setup)


async def test_prefill_is_asked_for_one_token_and_nothing_else() -> None:
    async with routing(flow=SEQUENTIAL) as setup:
        fields = {
            "max_tokens": 50,
            "max_completion_tokens": 40,
            "min_tokens": 9,
            "stop": ["END"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 3,
            "temperature": 0.5,
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
        assert (await setup.client.chat(**fields)).status == 200
        (sent,) = setup.prefill[0].requests
        params = sent.pop("kv_transfer_params")
        assert sent == {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "n": 1,
            "temperature": 0.5,
            "tools": fields["tools"],
        }
        assert params.pop("transfer_id")
        assert params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert {name: setup.decode[0].requests[0][name] for name in fields} == fields


@pytest.mark.parametrize(("asked", "sent"), [({}, 0), ({"min_tokens": 0}, 0), ({"min_tokens": 9}, 1)])
@pytest.mark.parametrize("options", [{}, {"flow": SEQUENTIAL}])
async def test_min_tokens_is_forced_only_if_the_first_token_is_not_used(
    asked: dict[str, Any], sent: int, options: dict[str, Any]
) -> None:
    async with routing(**options) as setup:
        for _ in range(2):
            assert (await setup.client.chat(**asked)).status == 200
        first, second = setup.prefill[0].requests
        assert (first["min_tokens"], second["min_tokens"]) == (1, sent)
        assert [params.get("use_first_token", False) for params in setup.decode[0].params] == [False, True]


async def test_both_servers_are_told_the_same_of_a_first_token_if_another_request_fails_meanwhile() -> None:
    async with routing(learnt=True) as setup:
        body = await setup.backend.read(COMPLETIONS, json.dumps({"model": "tiny", "prompt": PROMPT}).encode())
        (server,) = setup.backend.prefill.servers
        asyncio.get_running_loop().call_soon(server.forget)  # runs once the source is chosen, before prefill is called
        async with setup.backend.answer(Call(path=COMPLETIONS, body=body, request_id="r")):
            pass
        assert setup.prefill[0].requests[-1]["min_tokens"] == 0
        assert setup.decode[0].params[-1]["use_first_token"]


@pytest.mark.parametrize("connector", ["other", None])
async def test_a_prefill_server_that_comes_back_with_another_connector(connector: str | None) -> None:
    async with routing(flow=SEQUENTIAL) as setup:
        for _ in range(2):
            assert (await setup.client.complete()).text == EXPECTED
        setup.prefill[0].connector = connector
        for _ in range(2):
            assert (await setup.client.complete()).text == EXPECTED
        assert [sent["min_tokens"] for sent in setup.prefill[0].requests] == [1, 0, 0, 1]
        assert [(params or {}).get("use_first_token", False) for params in setup.decode[0].params] == [False, True, False, False]


async def test_sequentially_decode_is_asked_once_prefill_has_answered() -> None:
    async with routing(flow=SEQUENTIAL) as setup:
        setup.prefill[0].gate.clear()
        asking = asyncio.create_task(setup.client.complete())
        await until(lambda: setup.prefill[0].running == 1, "prefill has the prompt")
        await asyncio.sleep(0.1)
        assert not setup.decode[0].requests
        setup.prefill[0].gate.set()
        assert (await asking).text == EXPECTED


async def test_concurrently_both_are_asked_at_once_from_the_second_request_on() -> None:
    async with routing() as setup:
        assert (await setup.client.complete()).status == 200
        setup.prefill[0].gate.clear()
        asking = asyncio.create_task(setup.client.complete())
        await until(lambda: setup.prefill[0].running == setup.decode[0].running == 1, "both have the request")
        assert not asking.done()
        setup.prefill[0].gate.set()
        assert (await asking).text == EXPECTED
        assert setup.decode[0].params[1]["remote_address"] == setup.prefill[0].address
        flows = [await setup.client.metric("flows_total", flow=flow) for flow in ("sequential", "concurrent")]
        assert flows == [1, 1]
        assert "remote_block_ids" not in setup.prefill[0].params[1], "a connector that is known needs no other's keys"


async def test_another_connector_goes_sequentially_with_its_own_parameters() -> None:
    kv = Kv()
    async with routing([VllmServer(kv=kv, connector="other")]) as setup:
        for _ in range(3):
            assert (await setup.client.complete()).text == EXPECTED
        assert setup.decode[0].params[2] == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "other_id": "x",
            "remote_engine_id": "engine-1",
        }
        assert [sent["min_tokens"] for sent in setup.prefill[0].requests] == [1, 1, 1]
        assert await setup.client.metric("flows_total", flow="sequential") == 3


async def test_a_prefill_server_without_a_connector_is_told_of_once_and_served_around() -> None:
    with structlog.testing.capture_logs() as logs:
        async with routing([VllmServer(kv=Kv(), connector=None)]) as setup:
            for _ in range(3):
                assert (await setup.client.complete(stream=True)).text == EXPECTED
            assert setup.decode[0].params == [None] * 3
            assert await setup.client.metric("prefills_without_kv_total") == 3
    (warning,) = [line for line in logs if line["event"] == "prefill_without_kv"]
    assert warning["log_level"] == "warning" and "--kv-transfer-config" in warning["reason"] and warning["url"].startswith("http")


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_changed_engine_id_is_noticed_and_learnt(is_waiting: bool) -> None:
    async with routing(learnt=True, retries=0) as setup:
        setup.decode[0].waits_for_strangers = is_waiting
        setup.prefill[0].move("engine-2")
        answer = await asyncio.wait_for(setup.client.complete(), WITHIN_S)
        # Decode was told of the old engine: it failed, or was stopped when prefill's answer told of the new one.
        assert answer.status == 200 and answer.text == EXPECTED, answer.body
        assert setup.decode[0].disconnected == is_waiting
        assert setup.decode[0].params[-1]["remote_engine_id"] == "engine-2"
        setup.prefill[0].requests.clear()
        assert (await setup.client.complete()).text == EXPECTED
        assert "remote_block_ids" not in setup.prefill[0].params[0], "concurrent again"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["one", "two"]}, "several_prompts"),
        ({"n": 2}, "several_choices"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_handed_over_is_left_to_decode(body: dict[str, object], reason: str) -> None:
    async with routing(learnt=True) as setup:
        assert (await setup.client.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, **body})).status == 200
        assert not setup.prefill[0].requests
        assert setup.decode[0].requests == [{"model": "tiny", "prompt": PROMPT, **body}]
        assert await setup.client.metric("decode_alone_total", reason=reason) == 1


@pytest.mark.parametrize("prompt", [["only one"], [[1, 2, 3]], [1, 2, 3]])
async def test_one_prompt_in_a_list_is_handed_over(prompt: list[object]) -> None:
    async with routing() as setup:
        assert (await setup.client.complete(prompt)).status == 200
        assert setup.prefill[0].requests[0]["prompt"] == setup.decode[0].requests[0]["prompt"] == prompt


async def test_headers_that_go_on_and_those_that_do_not() -> None:
    async with routing() as setup:
        headers = {"Authorization": "Bearer secret", "traceparent": "00-1-2-01", "X-Request-Id": "mine-7", "Cookie": "no"}
        answer = await setup.client.complete(headers=headers)
        assert answer.headers["X-Request-Id"] == "mine-7"
        for server in (*setup.prefill, *setup.decode):
            (got,) = server.headers
            assert {name: got.get(name) for name in headers} == {**headers, "Cookie": None}
        answer = await setup.client.complete(headers={"X-Request-Id": "not one word"})
        assert answer.headers["X-Request-Id"] not in ("not one word", "")
