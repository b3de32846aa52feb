"""What a client may send, how much of it, and how many at once."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

from prometheus_client.parser import text_string_to_metric_families

from kvferry.router.metrics import ROUTER_METRICS
from tests.router.conftest import routing, settled, until

BAD_BODIES = [
    (b"[1]", "must be an object", None),
    (b'{"prompt": "\xff"}', "not valid JSON", None),
    (b'{"prompt": "x", "temperature": NaN}', "NaN is no JSON number", None),
    (b'{"prompt": "x", "kv_transfer_params": null}', "kv_transfer_params is set by the router", "kv_transfer_params"),
    (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply; it must have at most 100", None),
    (b'{"prompt": "x\\ud800y"}', '"prompt" has "\\ud800", half of a surrogate pair', "prompt"),
    (
        b'{"prompt": "x", "n": 2, "vllm_xargs": {"kv_transfer_params": "x"}}',
        "vllm_xargs has kv_transfer_params",
        "vllm_xargs",
    ),
]


async def test_bad_bodies_are_refused_by_name() -> None:
    async with routing() as setup:
        for body, said, param in BAD_BODIES:
            answer = await setup.client.post("/v1/completions", body)
            assert answer.status == 400 and said in answer.error, answer.body
            assert answer.json["error"]["param"] == param and answer.json["error"]["type"] == "BadRequestError"
        assert not setup.prefill[0].requests


async def test_bodies_as_deep_as_allowed_and_whole_pairs_are_taken() -> None:
    async with routing() as setup:
        body = b'{"model": "tiny", "prompt": "\\ud83d\\ude00\\\\ud800", "metadata": ' + b"[" * 99 + b"]" * 99 + b"}"
        assert (await setup.client.post("/v1/completions", body)).status == 200
        assert setup.decode[0].requests[0]["prompt"] == "\U0001f600\\ud800"


async def test_bodies_have_a_largest_size() -> None:
    async with routing(max_body_bytes=2048) as setup:
        answer = await setup.client.complete("x" * 3000)
        assert answer.status == 413 and "2048" in answer.error
        assert (await setup.client.complete("x" * 1000)).status == 200


async def test_a_body_of_unknown_length_has_it_too() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 1000

    async with (
        routing(max_body_bytes=2048) as setup,
        setup.client.session.post(setup.client.url + "/v1/completions", data=parts()) as answer,
    ):
        assert answer.status == 413 and "--max-body" in await answer.text()


async def test_compressed_bodies_are_refused() -> None:
    async with routing() as setup:
        bomb = gzip.compress(b'{"prompt": "' + b" " * 1_000_000 + b'"}')
        answer = await setup.client.post("/v1/completions", bomb, headers={"Content-Encoding": "gzip"})
        assert answer.status == 415 and "Content-Encoding is 'gzip'" in answer.error


async def test_bodies_at_once_have_a_largest_size_together() -> None:
    async with routing(learnt=True, max_body_bytes=4096, max_body_total_bytes=8192) as setup:
        setup.prefill[0].gate.clear()
        running = [asyncio.create_task(setup.client.complete("x" * 3000)) for _ in range(2)]
        await until(lambda: setup.prefill[0].running == 2, "two run")
        answer = await setup.client.complete("x" * 3000)
        assert answer.status == 503 and answer.headers["Retry-After"] == "1" and "--max-body-total" in answer.error
        assert await setup.client.metric("requests_total", endpoint="completions", outcome="refused") == 1
        running.append(asyncio.create_task(setup.client.complete("x" * 1000)))
        await until(lambda: setup.prefill[0].running == 3, "a smaller one has room")
        setup.prefill[0].gate.set()
        assert [one.status for one in await asyncio.gather(*running)] == [200, 200, 200]
        for _ in range(3):
            assert (await setup.client.complete("x" * 3000)).status == 200
        await settled(setup)


async def test_unknown_paths_and_methods_are_json_errors() -> None:
    async with routing() as setup:
        answer = await setup.client.post("/v1/embeddings", {})
        assert answer.status == 404 and "/v1/embeddings" in answer.error
        answer = await setup.client.get("/v1/completions")
        assert answer.status == 405 and answer.headers["Allow"] == "POST"


async def test_requests_at_once_are_bounded() -> None:
    async with routing(learnt=True, max_requests=2) as setup:
        setup.prefill[0].gate.clear()
        running = [asyncio.create_task(setup.client.complete()) for _ in range(2)]
        await until(lambda: setup.prefill[0].running == 2, "two run")
        answer = await setup.client.complete()
        assert answer.status == 503 and answer.headers["Retry-After"] == "1" and "--max-requests" in answer.error
        assert (await setup.client.get("/metrics")).status == 200, "anyone who looks after it still can"
        setup.prefill[0].gate.set()
        assert [one.status for one in await asyncio.gather(*running)] == [200, 200]
        assert (await setup.client.complete()).status == 200
        assert await setup.client.metric("requests_total", endpoint="completions", outcome="refused") == 1
        await settled(setup)


async def test_the_metrics_page_has_what_is_declared_and_nothing_else() -> None:
    async with routing() as setup:
        setup.decode[0].answers.append(500)
        assert (await setup.client.complete()).status == 200
        assert (await setup.client.chat(n=2)).status == 200
        page = (await setup.client.get("/metrics")).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert set(families) == {spec.name for spec in ROUTER_METRICS}
    for spec in ROUTER_METRICS:
        family = families[spec.name]
        assert family.documentation == spec.help and spec.name.startswith("kvferry_router_")
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels)
    assert "127.0.0.1" not in page and "_created" not in page


async def test_many_at_once() -> None:
    async with routing(2, 2) as setup:
        asked = []
        for number in range(100):
            ask = setup.client.chat if number % 2 else setup.client.complete
            asked.append(ask(f"{number:04}" * (number + 1), stream=number % 3 == 0))
        for number, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.text.startswith(f"<{4 * (number + 1)}>"), json.dumps(answer.body.decode())
        await settled(setup)
