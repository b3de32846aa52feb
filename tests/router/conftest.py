"""A router in this process, its servers beside it, and a client."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp

from kvferry.router.http_server import HttpServer
from kvferry.router.serve import OpenRouter, open_router
from kvferry.router.settings import FlowKind, RouterSettings
from tests.router.node_servers import DecodeNode, PrefillNode
from tests.router.vllm_server import Kv, VllmServer
from tests.samples import sample
from transfer.registry.security import PlainText, Security

PROMPT = "The harbour was quiet."
WITHIN_S = 60.0
"""Only ends a wait that would never end."""


async def until(is_true: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Wait until something holds; fail with `what` when it never does."""
    ends_s = time.monotonic() + WITHIN_S
    while True:
        outcome = is_true()
        if await outcome if inspect.isawaitable(outcome) else outcome:
            return
        assert time.monotonic() < ends_s, what
        await asyncio.sleep(0.01)


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """What the events of a stream carry."""
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]

    @property
    def text(self) -> str:
        """Of the first choice, streamed or not, completion or chat."""
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            return _said(self.json)
        assert self.events[-1] == "[DONE]", self.events
        return "".join(_said(json.loads(event)) for event in self.events[:-1])

    @property
    def error(self) -> str:
        return str(self.json["error"]["message"])


def _said(content: Any) -> str:
    if not content["choices"]:
        return ""
    choice = content["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta")).get("content") or "")


class Client:
    """Asks a router."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))

    async def complete(self, prompt: object = PROMPT, *, headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **body}, headers=headers)

    async def chat(self, content: object = PROMPT, **body: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **body})

    async def post(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=content, headers=headers) as answer:
            return Answer(answer.status, answer.headers.copy(), await answer.read())

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.url + path) as answer:
            return Answer(answer.status, answer.headers.copy(), await answer.read())

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric of the router."""
        return sample((await self.get("/metrics")).body.decode(), "kvferry_router_" + name, **labels)


AnyServer: TypeAlias = VllmServer | PrefillNode | DecodeNode


class Setup:
    """A router between servers."""

    def __init__(self, router: OpenRouter, client: Client, prefill: list[Any], decode: list[Any]) -> None:
        self.router = router
        self.backend = router.backend
        self.client = client
        self.prefill = prefill
        self.decode = decode

    async def ready(self) -> None:
        await until(lambda: self.backend.readiness().is_ready, "the router is ready")


@asynccontextmanager
async def routing(
    prefill: int | Sequence[AnyServer] = 1,
    decode: int | Sequence[AnyServer] = 1,
    *,
    learnt: bool = False,
    is_ready: bool = True,
    change: Callable[[list[Any], list[Any]], None] | None = None,
    security: Security | None = None,
    **options: Any,
) -> AsyncIterator[Setup]:
    """Run a router with this number of vLLM servers on each side, or with the given servers.

    Args:
        learnt: Each prefill server has answered once, and requests go concurrently from now on.
        is_ready: Wait until the router is ready.
        change: Called with the servers before they start.
        security: TLS or plain text of calls to nodes.
        options: Settings of the router.
    """
    kv = Kv()
    before: list[Any] = [VllmServer(kv=kv) for _ in range(prefill)] if isinstance(prefill, int) else list(prefill)
    after: list[Any] = [VllmServer(kv=kv) for _ in range(decode)] if isinstance(decode, int) else list(decode)
    if change is not None:
        change(before, after)
    options = {"health_interval_s": 0.05, **options}
    async with running(*before, *after):
        settings = RouterSettings(
            prefill=tuple(one.url for one in before),
            decode=tuple(one.url for one in after),
            port=0,
            **options,
        )
        async with open_router(settings, security or PlainText()) as router:
            client = Client(router.address)
            setup = Setup(router, client, before, after)
            try:
                if is_ready:
                    await setup.ready()
                if learnt:
                    for _ in before:
                        assert (await client.complete()).status == 200
                    known = setup.backend.prefill.servers
                    assert all(isinstance(one, HttpServer) and one.learnt.source is not None for one in known)
                    for one in (*before, *after):
                        one.requests.clear()
                yield setup
            finally:
                await client.session.close()


KINDS = ("vllm", "nodes")


def routing_of(kind: str, number: int = 1, **options: Any) -> AbstractAsyncContextManager[Setup]:
    """Run a router with decode servers of one kind: vLLM's, behind known prefill servers, or kvferry's own nodes."""
    if kind == "nodes":
        return routing((), [DecodeNode() for _ in range(number)], model_name="tiny", **options)
    return routing(number, number, learnt=True, **options)


@asynccontextmanager
async def running(*servers: AnyServer) -> AsyncIterator[None]:
    """The servers, for as long as this lasts."""
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            await server.stop()


SEQUENTIAL = FlowKind.SEQUENTIAL


async def settled(setup: Setup) -> None:
    """Nothing is under way at any server."""
    await until(lambda: not any(one.running for one in (*setup.prefill, *setup.decode)), "the servers are idle")
    assert all(one.outstanding == 0 for tier in (setup.backend.prefill, setup.backend.decode) for one in tier.servers)
    await asyncio.sleep(0)
