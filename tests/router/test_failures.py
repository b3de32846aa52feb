"""Servers that fail, clients that go away, and what each is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import grpc
import pytest

from kvferry.router import app
from kvferry.router.servers import Server
from kvferry.router.settings import FlowKind
from tests.router.conftest import KINDS, PROMPT, SEQUENTIAL, WITHIN_S, Setup, routing, routing_of, settled, until
from tests.router.vllm_server import SHAPES, Kv, VllmServer

EXPECTED = f"<{len(PROMPT)}> one two three"


FAULT: dict[str, Any] = {"vllm": 500, "nodes": grpc.StatusCode.INTERNAL}


def sent(servers: list[Any]) -> int:
    return sum(len(one.requests) for one in servers)


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_a_server_that_fails_is_left_for_another(flow: str, tier: str) -> None:
    async with routing(2, 2, learnt=True, **({"flow": SEQUENTIAL} if flow == "sequential" else {})) as setup:
        servers = setup.prefill if tier == "prefill" else setup.decode
        for server in servers:
            server.answers.append(500)
        answers = [await setup.client.complete() for _ in range(2)]
        assert [answer.text for answer in answers] == [EXPECTED] * 2
        assert all(not server.answers for server in servers), "each has failed once"
        ids = [params["transfer_id"] for server in setup.prefill for params in server.params]
        assert len(ids) == len(set(ids)), "each try has a transfer_id of its own"
        assert await setup.client.metric("retries_total") == sent(servers) - 2
        await settled(setup)


async def test_a_failed_prefill_cancels_its_decode_at_once() -> None:
    async with routing(learnt=True, retries=0) as setup:
        setup.prefill[0].gate.clear()
        asking = asyncio.create_task(setup.client.complete(stream=True))
        await until(lambda: setup.decode[0].running == 1, "decode waits for the KV")
        setup.prefill[0].answers.append(500)
        setup.prefill[0].gate.set()
        answer = await asking
        assert answer.status == 502 and "prefill server" in answer.error and "told to answer 500" in answer.error
        await until(lambda: setup.decode[0].disconnected == 1, "decode was told")
        await settled(setup)


async def test_a_failed_decode_cancels_its_prefill_at_once() -> None:
    """And decode is asked again with what prefill itself says, whatever --retries: what it was told may have been wrong."""
    async with routing(learnt=True, retries=0) as setup:
        setup.prefill[0].gate.clear()
        setup.decode[0].answers.append(500)
        asking = asyncio.create_task(setup.client.complete())
        await until(lambda: setup.prefill[0].disconnected == 1, "prefill was told")
        await until(lambda: setup.prefill[0].running == 1, "it is asked again")
        setup.prefill[0].gate.set()
        assert (await asking).text == EXPECTED
        assert await setup.client.metric("server_failures_total", tier="decode", reason="stale") == 1
        assert setup.backend.decode.servers[0].breaker.num_openings == 0
        setup.decode[0].answers += [500] * 2
        answer = await setup.client.complete()
        assert answer.status == 502 and "decode server" in answer.error and len(setup.decode[0].requests) == 4
        await settled(setup)


async def test_a_prefill_that_hangs_after_decode_is_done_is_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.attempt.PREFILL_GRACE_S", 0.3)

    def alone(_: list[VllmServer], decode: list[VllmServer]) -> None:
        decode[0].ignores_kv = True

    async with routing(learnt=True, change=alone) as setup:
        setup.prefill[0].gate.clear()
        assert (await setup.client.complete()).text == EXPECTED
        assert setup.prefill[0].running == 1
        await until(lambda: setup.prefill[0].disconnected == 1, "it was ended")
        await settled(setup)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_error_as_the_first_event_of_a_stream_is_tried_again(is_chat: bool) -> None:
    """vLLM says 200 before it knows whether the KV came, and a chat's role before its first token."""
    async with routing(1, 2, learnt=True) as setup:
        for server in setup.decode:
            server.fail_in_stream.append(500)
        answer = await (setup.client.chat if is_chat else setup.client.complete)(stream=True)
        assert answer.status == 200 and answer.text == EXPECTED
        assert "Internal server error" not in answer.body.decode()


async def test_an_error_right_after_an_empty_text_is_tried_again() -> None:
    async with routing(1, 2, learnt=True) as setup:
        for server in setup.decode:
            server.is_rust = True
            server.fail_in_stream.append(500)
        answer = await setup.client.complete(stream=True)
        assert answer.status == 200 and answer.text == EXPECTED
        assert "Internal server error" not in answer.body.decode()


@pytest.mark.parametrize("kind", KINDS)
async def test_retries_are_bounded_and_the_last_failure_is_reported(kind: str) -> None:
    async with routing_of(kind, 2, retries=3, flow=SEQUENTIAL) as setup:
        for server in setup.decode:
            server.answers += [FAULT[kind]] * 10
        answer = await setup.client.complete()
        assert answer.status == 502 and "the last of 4 tries" in answer.error
        assert [len(one.requests) for one in setup.decode] == [2, 2], "in turns, where there is no other left"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_fails_three_requests_is_left_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Server.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Server.__init__.__kwdefaults__, "clock", lambda: 100.0)  # a breaker never ends its pause
    async with routing_of(kind, 2, flow=SEQUENTIAL) as setup:
        setup.decode[0].answers += [FAULT[kind]] * 12
        for number in range(12):
            answer = await setup.client.complete(stream=number % 2 == 0)
            assert answer.status == 200 and answer.text == EXPECTED
        assert [len(server.requests) for server in setup.decode] == [3, 12]


@pytest.mark.parametrize(
    ("kind", "fault", "status"), [("vllm", 429, 429), ("vllm", 503, 503), ("nodes", grpc.StatusCode.RESOURCE_EXHAUSTED, 503)]
)
async def test_full_servers_are_reported_as_full(kind: str, fault: object, status: int) -> None:
    async with routing_of(kind, retries=1, flow=SEQUENTIAL) as setup:
        setup.decode[0].answers += [fault] * 2
        answer = await setup.client.complete()
        assert (answer.status, answer.headers["Retry-After"]) == (status, "1")


@pytest.mark.parametrize("flow", ["concurrent", "sequential"])
@pytest.mark.parametrize(
    ("body", "shape"), [({"model": "nope", "prompt": "x"}, "no_such_model"), ({"prompt": "y" * 5000, "stream": True}, "too_long")]
)
async def test_a_clients_error_is_passed_on_unchanged_and_not_tried_again(flow: str, body: dict[str, object], shape: str) -> None:
    async with routing(2, 2, learnt=True, **({"flow": SEQUENTIAL} if flow == "sequential" else {})) as setup:
        answer = await setup.client.post("/v1/completions", body)
        assert (answer.status, answer.body.decode()) == (SHAPES[shape]["status"], SHAPES[shape]["body"])
        assert sent(setup.prefill) <= 1 and sent(setup.decode) <= 1
        assert await setup.client.metric("requests_total", endpoint="completions", outcome="client_error") == 1
        await settled(setup)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("kind", "flow"), [("vllm", FlowKind.CONCURRENT), ("vllm", SEQUENTIAL), ("nodes", FlowKind.CONCURRENT)])
async def test_a_client_that_goes_away_ends_all_requests(is_stream: bool, kind: str, flow: FlowKind) -> None:
    async with routing_of(kind, flow=flow) as setup:
        everybody = (*setup.prefill, *setup.decode)
        everybody[0].gate.clear()
        asking = asyncio.create_task(setup.client.complete(stream=is_stream))
        number = 2 if (kind, flow) == ("vllm", FlowKind.CONCURRENT) else 1
        await until(lambda: sum(one.running for one in everybody) == number, "the servers have it")
        asking.cancel()
        await until(lambda: sum(one.disconnected for one in everybody) == number, "all of them were told")
        await settled(setup)
        assert await setup.client.metric("requests_total", endpoint="completions", outcome="disconnected") == 1
        assert await setup.client.metric("running_requests") == 0


async def test_a_client_that_goes_away_as_its_answer_begins_is_no_error_of_the_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def closed(self: app.Reply, part: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(app.Reply, "write", closed)
    async with routing(learnt=True) as setup:
        await setup.client.complete(stream=True)
        assert await setup.client.metric("requests_total", endpoint="completions", outcome="disconnected") == 1
        await settled(setup)
    assert "Error handling request" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_goes_away_in_mid_stream_ends_decode(kind: str) -> None:
    async with routing_of(kind) as setup:
        (await _stream_of_slow_words(setup, 1000)).close()
        await until(lambda: setup.decode[0].disconnected == 1, "decode was told")
        await settled(setup)


@pytest.mark.parametrize(("kind", "is_chat"), [("vllm", False), ("vllm", True), ("nodes", False)])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(kind: str, is_chat: bool) -> None:
    async with routing_of(kind) as setup:
        setup.decode[0].break_after = 4 if kind == "nodes" else 3  # one token of a node spells nothing
        answer = await (setup.client.chat if is_chat else setup.client.complete)(stream=True)
        *events, last = answer.events
        assert answer.status == 200 and len(events) == 3 and "[DONE]" not in answer.events
        error = json.loads(last)["error"]
        assert error["code"] == 502 and "cut off" in error["message"] and setup.decode[0].url in error["message"]
        assert sent(setup.decode) == 1, "what has begun is not tried again"
        endpoint = "chat" if is_chat else "completions"
        assert await setup.client.metric("requests_total", endpoint=endpoint, outcome="failed") == 1


@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_a_server_that_is_gone_is_left_out_and_taken_back(tier: str) -> None:
    async with routing(2, 2, learnt=True) as setup:
        gone = (setup.prefill if tier == "prefill" else setup.decode)[0]
        await gone.stop()
        for _ in range(4):
            assert (await setup.client.complete()).text == EXPECTED
        assert not gone.requests
        (known,) = [one for one in (*setup.backend.prefill.servers, *setup.backend.decode.servers) if one.url == gone.url]
        await until(lambda: known.state != "healthy", "the router has seen it")
        await gone.restart("engine-2")
        await until(lambda: known.state == "healthy", "the router has seen it again")
        for _ in range(4):
            assert (await setup.client.complete()).text == EXPECTED
        assert gone.requests
        if tier == "prefill":
            assert {params["remote_engine_id"] for server in setup.decode for params in server.params[-4:]} >= {"engine-2"}


async def test_no_server_at_all_is_said_by_name_and_the_last_choice_is_still_asked() -> None:
    async with routing() as setup:
        await setup.decode[0].stop()
        answer = await setup.client.complete()
        assert answer.status == 503 and answer.headers["Retry-After"] == "1"
        assert f"decode server {setup.decode[0].url}: " in answer.error and "Connect call failed" not in answer.error
        await until(lambda: not setup.backend.readiness().is_ready, "seen")
        ready = await setup.client.get("/readyz")
        assert ready.status == 503 and setup.decode[0].url.encode() in ready.body and b"no decode server is healthy" in ready.body
        assert (await setup.client.get("/health")).status == 200, "the router itself lives"
        assert (await setup.client.get("/v1/models")).status == 503
        # Nobody is shut out: a server that has come back answers before a health check has seen it.
        setup.router.watching.cancel()
        await setup.decode[0].restart("engine-1")
        assert (await setup.client.complete()).text == EXPECTED


@pytest.mark.parametrize(("kind", "problem"), [("vllm", b"is answered with 500"), ("nodes", b"tired")])
async def test_requests_that_wait_for_a_server_that_stands_still_give_it_up(kind: str, problem: bytes) -> None:
    async with routing_of(kind, 2, lost_after_s=0.3) as setup:
        for server in setup.decode:
            server.gate.clear()
        asking = asyncio.create_task(setup.client.complete())
        await until(lambda: sum(one.running for one in setup.decode) == 1, "decode has it")
        await asyncio.sleep(0.5)
        assert not asking.done(), "one that is healthy may take its time"
        (frozen,) = [one for one in setup.decode if one.running]
        (other,) = [one for one in setup.decode if one is not frozen]
        other.gate.set()
        frozen.health = 500
        assert (await asyncio.wait_for(asking, WITHIN_S)).text == EXPECTED
        await until(lambda: frozen.disconnected == 1, "it was told")
        assert await setup.client.metric("server_failures_total", tier="decode", reason="lost") == 1
        assert (await setup.client.get("/readyz")).body == b"ready\n", "one is left"
        other.health = 500
        await until(lambda: not setup.backend.readiness().is_ready, "the router has seen it")
        assert problem in (await setup.client.get("/readyz")).body


async def test_sides_with_nothing_in_common_are_not_ready_and_say_why() -> None:
    kv = Kv()
    async with routing([VllmServer(kv=kv, model="huge")], [VllmServer(kv=kv)], is_ready=False) as setup:
        (server,) = setup.backend.prefill.servers
        await until(lambda: bool(server.misfit), "both sides were looked at")
        for _ in range(10):  # looks
            assert not setup.backend.readiness().is_ready
            answer = await setup.client.get("/readyz")
            assert answer.status == 503 and b"it serves huge" in answer.body and b"serves tiny" in answer.body
            await asyncio.sleep(0.05)
        for answer in (await setup.client.get("/v1/models"), await setup.client.complete()):
            assert answer.status == 503 and "it serves huge" in answer.error and "serves tiny" in answer.error


async def _stream_of_slow_words(setup: Setup, number: int) -> aiohttp.ClientResponse:
    """Start an answer of this number of words, whose first part has come."""
    setup.decode[0].words, setup.decode[0].word_delay_s = (" x",) * number, 0.05
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": number}
    answer = await setup.client.session.post(f"{setup.client.url}/v1/completions", json=body)
    assert answer.status == 200
    await answer.content.readany()
    return answer


@pytest.mark.parametrize("kind", KINDS)
async def test_draining_finishes_running_requests_and_rejects_new_ones(kind: str) -> None:
    async with routing_of(kind) as setup:
        answer = await _stream_of_slow_words(setup, 10)
        draining = asyncio.create_task(setup.router.app.drain(30, asyncio.Event()))
        await asyncio.sleep(0)
        refused = await setup.client.complete()
        assert refused.status == 503 and "shutting down" in refused.error and refused.headers["Retry-After"] == "1"
        assert (await setup.client.get("/readyz")).body == b"the router is draining\n"
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await draining == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_hurried", [False, True])
async def test_an_answer_that_is_cut_off_at_the_end_reports_it(kind: str, is_hurried: bool) -> None:
    async with routing_of(kind) as setup:
        answer = await _stream_of_slow_words(setup, 1000)
        whole = asyncio.create_task(setup.client.complete(max_tokens=1000))
        setup.decode[0].gate.clear()
        await until(lambda: setup.router.app.num_running == 2, "both run")
        hurry = asyncio.Event()
        draining = asyncio.create_task(setup.router.app.drain(30 if is_hurried else 0.2, hurry))
        if is_hurried:
            await asyncio.sleep(0.1)
            hurry.set()
        assert await asyncio.wait_for(draining, WITHIN_S) == 2
        last = (await answer.read()).decode().rstrip().rpartition("\n\n")[2]
        assert "the router has shut down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert (await whole).status == 503
        await settled(setup)
