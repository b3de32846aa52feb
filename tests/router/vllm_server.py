"""A server that answers as vLLM's does (vllm_shapes.json), where vLLM itself is not installed: SSE, hand-off, delays, failures.

Its hand-off is the real one in small: a decode server that is told of KV waits until that prefill server has computed the prompt,
and fails where nobody knows of it. So an answer is right only if the router has brought the right two together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

SHAPES: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_shapes.json").read_text())


def recorded(name: str) -> Any:
    """The body of a recorded answer, as JSON."""
    return json.loads(SHAPES[name]["body"])


def recorded_events(name: str) -> list[Any]:
    """What the events of a recorded stream carry, [DONE] left out."""
    parts = [part.removeprefix("data: ") for part in SHAPES[name]["body"].split("\n\n")]
    return [json.loads(part) for part in parts if part and part != "[DONE]"]


class Kv:
    """Which prompts have been computed where: what the connectors of the real servers tell each other."""

    def __init__(self) -> None:
        self.servers: dict[tuple[str, str], VllmServer] = {}
        self._computed: dict[tuple[str, str, str], asyncio.Event] = {}

    def computed(self, address: str, engine_id: str, transfer_id: str) -> asyncio.Event:
        return self._computed.setdefault((address, engine_id, transfer_id), asyncio.Event())


@dataclass(eq=False)
class VllmServer:
    """One server; prefill and decode are the same program.

    Args:
        kv: Shared by the servers that can hand KV over.
        connector: "kvferry"; "other": one whose answers name no remote_address; None: it has none.
        words: What it generates, before the prompt's length.
        word_delay_s: Between two of them.
        gate: Nothing is computed before this is set.
        answers: Statuses to fail the next requests with, one each, whatever they are.
        fail_in_stream: Statuses to fail the next streams with, in their first event.
        is_rust: A failing stream of a completion begins with an empty text, as from vLLM's Rust frontend.
        break_after: A stream breaks off after so many events; None: it does not.
        ignores_kv: It computes every prompt itself.
        waits_for_strangers: It waits, instead of failing, for the KV of a server that nobody knows.
    """

    kv: Kv
    connector: str | None = "kvferry"
    model: str = "tiny"
    words: tuple[str, ...] = (" one", " two", " three")
    word_delay_s: float = 0.0
    engine_id: str = "engine-1"
    health: int = 200
    key: str | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[int] = field(default_factory=list)
    fail_in_stream: list[int] = field(default_factory=list)
    is_rust: bool = False
    break_after: int | None = None
    ignores_kv: bool = False
    waits_for_strangers: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    running: int = 0
    disconnected: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.kv.servers[self.address, self.engine_id] = self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self.kv.servers.pop((self.address, self.engine_id), None)

    async def restart(self, engine_id: str) -> None:
        """Come back as another engine at the same address."""
        await self.stop()
        self.engine_id = engine_id
        await self.start(int(self.url.rpartition(":")[2]))

    def move(self, engine_id: str) -> None:
        """Be another engine from now on, without having been away."""
        self.kv.servers.pop((self.address, self.engine_id))
        self.engine_id = engine_id
        self.kv.servers[self.address, self.engine_id] = self

    @property
    def address(self) -> str:
        """Where its KV is to be had; a name only."""
        return f"kv-of-{self.url.rpartition(':')[2]}"

    @property
    def params(self) -> list[Any]:
        """kv_transfer_params of the requests that came."""
        return [request.get("kv_transfer_params") for request in self.requests]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        card = recorded("models")["data"][0]
        adapter = {**card, "id": "adapter", "parent": self.model}
        return web.json_response({"object": "list", "data": [{**card, "id": self.model}, adapter]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers.copy())
        self.running += 1
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.disconnected += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.gate.wait()
        if self.answers:
            status = self.answers.pop(0)
            return web.json_response(_error(status, f"told\n to answer {status}"), status=status)
        if body.get("model", self.model) not in (self.model, "adapter"):
            return web.Response(body=SHAPES["no_such_model"]["body"], status=404, content_type="application/json")
        is_chat = "messages" in body
        text = "".join(str(one["content"]) for one in body["messages"]) if is_chat else str(body["prompt"])
        if len(text) > 4000:
            return web.Response(body=SHAPES["too_long"]["body"], status=400, content_type="application/json")
        params = body.get("kv_transfer_params") or {}
        has_kv = True
        if params.get("do_remote_prefill") and not self.ignores_kv:
            has_kv = await self._receive(params)
        if body.get("stream"):
            return await self._stream(request, body, text, is_chat, has_kv)
        if not has_kv:
            return web.Response(body=SHAPES["load_fails"]["body"], status=500, content_type="application/json")
        whole = recorded("chat_decode" if is_chat else "completion_decode")
        words = self._words(text, body)
        said = "".join(words)
        choice = whole["choices"][0]
        if is_chat:
            choice["message"]["content"] = said
        else:
            choice["text"] = said
        whole["kv_transfer_params"] = self._hand_over(params)
        return web.json_response(whole)

    def _words(self, text: str, body: dict[str, Any]) -> list[str]:
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        return [f"<{len(text)}>", *self.words][:limit]

    async def _receive(self, params: dict[str, Any]) -> bool:
        if "other_id" in params or "transfer_id" not in params:  # the KV is another connector's, or a prefill node's
            return True
        source = (params["remote_address"], params["remote_engine_id"])
        if source not in self.kv.servers and not self.waits_for_strangers:
            return False
        await self.kv.computed(*source, params["transfer_id"]).wait()
        return True

    def _hand_over(self, params: dict[str, Any]) -> dict[str, Any] | None:
        if self.connector is None or not params.get("do_remote_decode"):
            return None
        if self.connector == "other":
            return {"do_remote_prefill": True, "do_remote_decode": False, "other_id": "x", "remote_engine_id": self.engine_id}
        transfer_id = params["transfer_id"]
        self.kv.computed(self.address, self.engine_id, transfer_id).set()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_address": self.address,
            "remote_engine_id": self.engine_id,
        }

    async def _stream(
        self, request: web.Request, body: dict[str, Any], text: str, is_chat: bool, has_kv: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        recorded_ones = recorded_events("chat_decode_stream" if is_chat else "completion_decode_stream")
        events = []
        if is_chat:
            events.append(recorded_ones[0])
        error = self.fail_in_stream.pop(0) if self.fail_in_stream else None if has_kv else 500
        if error is not None and self.is_rust:
            chunk, end = {"choices": [{"index": 0, "text": ""}]}, _error(error, "Internal server error")
            await response.write(f"data: {json.dumps(chunk)}\n\ndata: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
            return response
        if error is not None:
            events.append(_error(error, "Internal server error"))
        else:
            for word in self._words(text, body):
                event = json.loads(json.dumps(recorded_ones[1 if is_chat else 0]))
                if is_chat:
                    event["choices"][0]["delta"]["content"] = word
                else:
                    event["choices"][0]["text"] = word
                events.append(event)
        for number, event in enumerate(events):
            if number == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(self.word_delay_s)
        await response.write(b"data: [DONE]\n\n")
        return response


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}}
