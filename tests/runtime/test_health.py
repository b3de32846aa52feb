"""The plain HTTP port, asked over real HTTP."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from node_runtime.health import HealthServer, Readiness
from transfer.errors import ConfigError
from transfer.metrics import MetricFamily, MetricSpec

METRICS = MetricFamily(MetricSpec(name="a", kind="counter", help="b"), {}, (), [1.0])
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""Sent by Prometheus 3."""


class Asked:
    """A health server with a readiness that can be changed."""

    def __init__(self) -> None:
        self.readiness = Readiness(is_ready=False, reason="no prefill node is joined")
        self.server = HealthServer(lambda: self.readiness, lambda: [METRICS])
        self.port = 0


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    one = Asked()
    one.port = await one.server.start("127.0.0.1", 0)
    yield one
    await one.server.stop()


async def answer(asked: Asked, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    url, headers = f"http://127.0.0.1:{asked.port}{path}", {"Accept": accept}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.text(), response.headers["Content-Type"]


async def test_alive_is_not_ready(asked: Asked) -> None:
    assert (await answer(asked, "/healthz"))[:2] == (200, "ok\n")
    assert (await answer(asked, "/readyz"))[:2] == (503, "no prefill node is joined\n")
    asked.readiness = Readiness(is_ready=True)
    assert (await answer(asked, "/readyz"))[:2] == (200, "ready\n")


async def test_metrics_are_what_prometheus_reads(asked: Asked) -> None:
    status, text, kind = await answer(asked, "/metrics")
    assert (status, text) == (200, "# HELP a_total b\n# TYPE a_total counter\na_total 1.0\n")
    assert kind.startswith("text/plain; version=")
    status, text, kind = await answer(asked, "/metrics", PROMETHEUS_ACCEPTS)
    assert (status, text) == (200, "# HELP a b\n# TYPE a counter\na_total 1.0\n# EOF\n")
    assert kind.startswith("application/openmetrics-text; version=")
    assert (await answer(asked, "/other"))[0] == 404


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HealthServer(lambda: Readiness(is_ready=True), lambda: ())
        with pytest.raises(ConfigError, match=f"server.http_port is {port}: 127.0.0.1:{port} cannot be bound: Address already"):
            await server.start("127.0.0.1", port)
        await server.stop()
