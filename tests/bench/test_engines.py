"""The load of the engine comparison, against a server that answers like vLLM's."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from bench.engine_load import Load, send_load
from bench.engine_servers import LIVE, Process, Serving, Setup, Used
from bench.engines import cell_of, prompts_of
from bench.mooncake_proxy import application
from bench.sglang_servers import SglangSetup

REFUSED, CUT_OFF, BROKEN = 9, 8, 7
"""Prompts with such a first token get a refusal, too few tokens, or an error in the stream."""
PAUSE_S = 0.02
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def running(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)  # cancel a handler when its client disconnects
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind = body["prompt"][0]
        if kind == REFUSED:
            return web.Response(status=503, text="no room")
        response = web.StreamResponse()
        await response.prepare(request)
        num_tokens = body["max_tokens"] - (kind == CUT_OFF)
        for token in range(kind, kind + num_tokens):
            await asyncio.sleep(PAUSE_S)
            choice = {"text": f"{token} "} | ({"token_ids": [token]} if body.get("return_token_ids") else {})
            content = {"error": "it broke"} if kind == BROKEN else {"choices": [choice]}
            await response.write(f"data: {json.dumps(content)}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": num_tokens}} if body["stream_options"]["include_usage"] else {}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    async with running(app) as url:
        yield url


async def load_of(*first_tokens: int, in_flight: int = 2, has_token_ids: bool = False) -> Load:
    prompts = [[token] * 5 for token in first_tokens]
    async with server() as url:
        return await send_load([url], prompts, in_flight=in_flight, output_tokens=3, salt="a", has_token_ids=has_token_ids)


@pytest.mark.parametrize("has_token_ids", [False, True])
async def test_answers_have_their_tokens_and_times(has_token_ids: bool) -> None:
    load = await load_of(1, 2, has_token_ids=has_token_ids)
    assert [answer.text for answer in load.answers] == ["1 2 3 ", "2 3 4 "]
    assert [answer.token_ids for answer in load.answers] == ([[1, 2, 3], [2, 3, 4]] if has_token_ids else [[], []])
    for answer in load.answers:
        assert answer.ttft_s >= PAUSE_S and len(answer.intervals_s) == 2 and not answer.error
        assert answer.end_to_end_s >= answer.ttft_s + sum(answer.intervals_s)


async def test_one_client_sends_one_request_at_a_time() -> None:
    load = await load_of(1, 2, 3, in_flight=1)
    assert load.duration_s >= sum(answer.end_to_end_s for answer in load.answers) >= 9 * PAUSE_S


async def test_a_client_that_gives_up_closes_the_connection_and_is_counted_apart() -> None:
    async with server() as url:
        prompts = [[token] * 5 for token in (1, 2, BROKEN)]
        load = await send_load([url], prompts, in_flight=1, output_tokens=3, salt="a", patience_s={1: 1.5 * PAUSE_S, 2: 0})
    assert [answer.is_given_up for answer in load.answers] == [False, True, True]
    assert load.answers[1].text == "2 " and not load.answers[2].text
    cell = cell_of("kvferry", [load], [load], in_flight=1, slo_ttft_s=60, slo_tpot_s=60)
    assert (cell.requests, cell.failed, cell.given_up, cell.differing, cell.ttft_s.samples) == (3, 0, 2, 0, 1)


async def test_failed_and_differing_answers_are_counted() -> None:
    reference = await load_of(1, 2, 3, 4, 5)
    load = await load_of(1, REFUSED, CUT_OFF, BROKEN, 6)
    cell = cell_of("kvferry", [load], [reference], in_flight=2, slo_ttft_s=60, slo_tpot_s=60)
    assert (cell.requests, cell.failed, cell.differing) == (5, 3, 1)
    assert cell.errors == ("503: no room", "it broke", "the answer has 2 tokens instead of 3")
    assert cell.ttft_s.samples == 2
    assert cell.requests_per_s == cell.goodput_per_s == pytest.approx(2 / load.duration_s)
    twice = cell_of("kvferry", [load, reference], [reference, reference], in_flight=2, slo_ttft_s=60, slo_tpot_s=60)
    assert (twice.requests, twice.failed, twice.differing, len(twice.ttft_p50_s)) == (10, 3, 1, 2)
    assert twice.requests_per_s == pytest.approx(7 / (load.duration_s + reference.duration_s))
    late = cell_of("kvferry", [load], [reference], in_flight=2, slo_ttft_s=0, slo_tpot_s=60)
    slow = cell_of("kvferry", [load], [reference], in_flight=2, slo_ttft_s=60, slo_tpot_s=0)
    assert late.goodput_per_s == slow.goodput_per_s == 0


_BUSY = """
import sys, time
from node_runtime.loop_thread import LoopThread
loop = LoopThread.shared()
def work():
    ends = time.thread_time() + float(sys.argv[1])
    while time.thread_time() < ends:
        pass
while True:
    loop.call(*((loop.loop.run_in_executor, None, work) if sys.argv[2] == "started" else (work,)))
    time.sleep(0.05)
"""


def test_the_cpu_time_of_kvferrys_threads_is_counted_for_each_server(tmp_path: Path) -> None:
    """Threads that kvferry's loop has started count. Other threads are the engine's."""
    setup = Setup(name="kvferry", serving=Serving(model=Path(), logs=tmp_path))
    with setup:
        for role in ("loop", "started"):
            command = [sys.executable, "-c", _BUSY, "0.02", role]
            path = {"PYTHONPATH": str(ROOT)}
            one = Process.start(f"kvferry-{role}", command, log=tmp_path / role, ready_url="", environment=path)
            setup._processes.append(one)  # noqa: SLF001
        setup._start("other", [sys.executable, "-c", "while True: pass"], ready_url="", environment={})  # noqa: SLF001
        deadline_s = time.monotonic() + 20
        while {server for (server, _), seconds in setup.used().cpu_s.items() if seconds > 0.02} != {"loop", "started"}:
            assert time.monotonic() < deadline_s, (setup.used(), [one.last_lines() for one in setup._processes])  # noqa: SLF001
            time.sleep(0.02)
        begin = setup.used()
        time.sleep(0.2)
        shares = setup.used().since(begin).cpu_shares()
        assert shares.keys() == {"loop", "started"} and all(0 < share < 1 for share in shares.values())


def test_connector_calls_are_part_of_the_time_with_a_step(tmp_path: Path) -> None:
    setup = Setup(name="kvferry+timed_calls", serving=Serving(model=Path(), logs=tmp_path))
    folder = tmp_path / "profiles-kvferry+timed_calls" / "decode"
    folder.mkdir(parents=True)

    def used(*roles: tuple[str, float, float]) -> Used:
        for name, call_s, busy_s in roles:
            (folder / f"{name}.live").write_bytes(LIVE.pack(call_s, busy_s))
        return setup.used()

    first = used(("scheduler-7", 0.5, 10.0), ("worker-7", 1.0, 0.0))
    second = used(("scheduler-7", 1.0, 30.0), ("worker-7", 2.0, 0.0), ("worker-8", 2.0, 0.0)).since(first)
    assert second.call_s == {("decode", 7): 1.5, ("decode", 8): 2.0} and second.busy_s == {"decode": 20.0}
    assert second.call_shares() == {"decode": 0.1}, "of the busiest process"
    assert (second + second).call_shares() == {"decode": 0.1}
    assert Used().call_shares() == {}


def test_setups_get_the_same_prompts_and_cells_different_ones() -> None:
    prompts = prompts_of(100, 8, number=3, seed=1)
    assert prompts == prompts_of(100, 8, number=3, seed=1)
    others = [*prompts_of(100, 1, number=3, seed=1), *prompts_of(100, 8, number=3, seed=2)]
    assert len({tuple(prompt[:16]) for prompt in [*prompts, *others]}) == 9


class SglangServer:
    """Answers `/generate` as SGLang does, and keeps the requests."""

    def __init__(self, *, is_cumulative: bool = True, num_tokens: int = 3) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._is_cumulative = is_cumulative
        self._num_tokens = num_tokens

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        async with running(app) as url:
            yield url

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        tokens = [body["input_ids"][0] + index for index in range(self._num_tokens)]
        for count in range(1, len(tokens) + 1):
            await asyncio.sleep(PAUSE_S)
            found = tokens[:count] if self._is_cumulative else tokens[count - 1 : count]
            content = {"text": "", "output_ids": found, "meta_info": {"completion_tokens": count}}
            await response.write(f"data: {json.dumps(content)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.mark.parametrize("is_cumulative", [True, False])
async def test_both_sglang_engines_get_a_request_and_the_decode_side_answers(is_cumulative: bool) -> None:
    setup = SglangSetup(name="kvferry", serving=Serving(model=Path(), logs=Path()))
    prefill, decode = SglangServer(num_tokens=1), SglangServer(is_cumulative=is_cumulative)
    async with prefill.url() as first, decode.url() as second:
        setup.urls = [first, second]
        load = await setup.send([[1, 1], [5, 5]], in_flight=2, output_tokens=3, salt="a")
    assert [answer.token_ids for answer in load.answers] == [[1, 2, 3], [5, 6, 7]]
    for answer in load.answers:
        assert answer.ttft_s >= PAUSE_S and len(answer.intervals_s) == 2 and not answer.error
    rooms = [body["bootstrap_room"] for body in prefill.bodies]
    assert len(set(rooms)) == 2 and sorted(rooms) == sorted(body["bootstrap_room"] for body in decode.bodies)


async def test_an_sglang_answer_that_is_too_short_is_a_failure() -> None:
    setup = SglangSetup(name="one", serving=Serving(model=Path(), logs=Path()))
    server = SglangServer(num_tokens=2)
    async with server.url() as url:
        setup.urls = [url]
        load = await setup.send([[1]], in_flight=1, output_tokens=3, salt="a")
    assert load.answers[0].error == "the answer has 2 tokens instead of 3"
    assert "bootstrap_room" not in server.bodies[0]


class MooncakeSides:
    """Simulate a MooncakeConnector pair: decode waits for prefill's request with the same transfer id."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._computed: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._query)
        app.router.add_get("/query", self._query)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _query(self, request: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": "engine 7"}})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := await request.json())
        params = body["kv_transfer_params"]
        if params["do_remote_decode"]:
            if body["prompt"][0] == REFUSED:
                return web.Response(status=503)
            self._computed[params["transfer_id"]].set()
            return web.json_response({})
        await self._computed[params["transfer_id"]].wait()
        content = {"choices": [{"text": str(body["prompt"][0])}], "usage": {"completion_tokens": body["max_tokens"]}}
        return web.Response(text=f"data: {json.dumps(content)}\n\ndata: [DONE]\n\n")


async def test_the_mooncake_proxy_sends_one_transfer_id_to_both_servers_at_once() -> None:
    sides = MooncakeSides()
    async with running(sides.app()) as url, running(await application(prefill=url, bootstrap=url, decode=url)) as proxy:
        async with ClientSession() as session, session.get(f"{proxy}/readyz") as ready:
            assert ready.status == 200
        load = await send_load([proxy], [[1], [2]], in_flight=2, output_tokens=3, salt="a")
    assert [(answer.text, answer.error) for answer in load.answers] == [("1", ""), ("2", "")]
    params = [body["kv_transfer_params"] for body in sides.bodies]
    ids = [[one["transfer_id"] for one in params if one["do_remote_decode"] == is_prefill] for is_prefill in (True, False)]
    assert len(set(ids[0])) == 2 and sorted(ids[0]) == sorted(ids[1])
    assert [one["remote_engine_id"] for one in params if one["do_remote_prefill"]] == ["engine 7"] * 2
    assert {body["max_tokens"] for body in sides.bodies if body["kv_transfer_params"]["do_remote_decode"]} == {1}


async def test_a_failed_mooncake_prefill_fails_only_its_request() -> None:
    sides = MooncakeSides()
    async with running(sides.app()) as url, running(await application(prefill=url, bootstrap=url, decode=url)) as proxy:
        load = await send_load([proxy], [[REFUSED], [2]], in_flight=2, output_tokens=3, salt="a")
    assert load.answers[0].error and load.answers[1].text == "2"
