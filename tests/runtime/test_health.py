"""The plain HTTP port, asked over real HTTP."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from node_runtime.health import HealthServer, Readiness
from transfer.errors import ConfigError


class Asked:
    """A health server with a readiness that can be changed."""

    def __init__(self) -> None:
        self.readiness = Readiness(is_ready=False, reason="no prefill node is joined")
        self.server = HealthServer(lambda: self.readiness, lambda: b"# TYPE a gauge\na 1\n")
        self.port = 0


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    one = Asked()
    one.port = await one.server.start("127.0.0.1", 0)
    yield one
    await one.server.stop()


async def answer(asked: Asked, path: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{asked.port}{path}") as response:
        return response.status, await response.text(), response.headers["Content-Type"]


async def test_alive_is_not_ready(asked: Asked) -> None:
    assert (await answer(asked, "/healthz"))[:2] == (200, "ok\n")
    assert (await answer(asked, "/readyz"))[:2] == (503, "no prefill node is joined\n")
    asked.readiness = Readiness(is_ready=True)
    assert (await answer(asked, "/readyz"))[:2] == (200, "ready\n")


async def test_metrics_are_what_prometheus_reads(asked: Asked) -> None:
    status, text, kind = await answer(asked, "/metrics")
    assert (status, text) == (200, "# TYPE a gauge\na 1\n")
    assert kind.startswith("text/plain; version=")
    assert (await answer(asked, "/other"))[0] == 404


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HealthServer(lambda: Readiness(is_ready=True), lambda: b"")
        with pytest.raises(ConfigError, match=f"server.http_port is {port}: 127.0.0.1:{port} cannot be bound: Address already"):
            await server.start("127.0.0.1", port)
        await server.stop()
