"""The plain HTTP port under everything that is no scraper: it answers the next one, and takes no more than its share of files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from node_runtime import health
from node_runtime.health import MAX_CONNECTIONS, HealthServer, Readiness
from tests.runtime.instances import until
from transfer.metrics import MetricFamily, MetricSpec

PAGE = MetricFamily(MetricSpec(name="a", kind="gauge", help="b" * 4_000_000), {}, (), [1.0])
"""Far more than the buffers of a connection hold."""

CONNECTIONS = 600
ALIVE_S = 30.0


class Node:
    def __init__(self) -> None:
        self.page = MetricFamily(MetricSpec(name="a", kind="gauge", help="b"), {}, (), [1.0])
        self.server = HealthServer(lambda: Readiness(is_ready=True), lambda: [self.page])
        self.port = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def is_well(self) -> None:
        """Every path is answered, on connections of their own."""
        for path in ("/healthz", "/readyz", "/metrics"):
            url = f"http://127.0.0.1:{self.port}{path}"
            async with asyncio.timeout(ALIVE_S), aiohttp.ClientSession() as session, session.get(url) as response:
                assert response.status == 200 and await response.read()

    @property
    def num_connections(self) -> int:
        return self.server.num_connections


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    one = Node()
    one.port = await one.server.start("127.0.0.1", 0)
    yield one
    await one.server.stop()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that were received before the connection was closed."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(-1), ALIVE_S)
    return b""


GARBAGE = {
    "binary": secrets.token_bytes(4096),
    "endless line": b"GET /" + b"a" * 1_000_000,
    "endless header": b"GET /healthz HTTP/1.1\r\nA: " + b"x" * 1_000_000,
    "huge length": b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n" + bytes(100_000),
    "traversal": b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_answered_or_hung_up_on(node: Node, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    reader, writer = await node.connect()
    with contextlib.suppress(ConnectionError):
        writer.write(GARBAGE[name])
        await asyncio.wait_for(writer.drain(), ALIVE_S)
        writer.write_eof()
    answer = await ended(reader)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4", b"HTTP/1.1 200", b"HTTP/0.9 200")), answer[:80]
    writer.close()
    await node.is_well()
    await until(lambda: node.num_connections == 0)
    said = [record for record in caplog.records if record.name == "aiohttp.server" and record.exc_info is not None]
    assert all(record.levelno == logging.DEBUG for record in said), "strangers fill no log"
    assert len(said) == 1 or b"400 Bad Request" not in answer


async def test_half_requests_are_closed_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a client that sends a byte at a time."""
    monkeypatch.setattr(health, "REQUEST_S", 0.5)
    silent, half, dripping = [await node.connect() for _ in range(3)]
    half[1].write(b"GET /healthz HTTP/1.1\r\nHo")
    began = time.monotonic()

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            dripping[1].write(b"GET /healthz HTTP/1.1\r\nX: ")
            while True:
                dripping[1].write(b"a")
                await dripping[1].drain()
                await asyncio.sleep(0.05)

    dripper = asyncio.ensure_future(drip())
    for reader, _ in (silent, half, dripping):
        assert await ended(reader) == b""
    assert time.monotonic() - began >= 0.4
    dripper.cancel()
    for _, writer in (silent, half, dripping):
        writer.close()
    monkeypatch.undo()
    await node.is_well()


async def test_an_answer_that_nobody_takes_is_given_up_and_holds_no_stop_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.page = PAGE
    readers = [await node.connect() for _ in range(3)]
    for _, writer in readers:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    await until(lambda: node.num_connections == 3)
    await asyncio.sleep(0.2)
    monkeypatch.setattr(health, "IDLE_S", 0.5)
    last = await node.connect()
    last[1].write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    await until(lambda: node.num_connections == 3)  # the last one was given up: the others have their old time
    async with asyncio.timeout(60.0):
        await node.server.stop()  # with a longer time for each answer a stranger would decide when a node ends
    for _, writer in (*readers, last):
        writer.close()


async def test_hundreds_of_connections_take_no_more_than_their_share(node: Node) -> None:
    """The least recently used one is closed, so that the next scraper is served. The number of descriptors stays bounded."""
    before = len(os.listdir("/proc/self/fd"))
    writers: list[asyncio.StreamWriter] = []
    most = 0
    for number in range(CONNECTIONS):
        try:
            _, writer = await asyncio.wait_for(node.connect(), ALIVE_S)
        except ConnectionError:
            continue
        with contextlib.suppress(ConnectionError):
            writer.write((b"", b"GET /he", b"\x00\xff", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")[number % 4])
        writers.append(writer)
        most = max(most, node.num_connections)
        if len(writers) > 300:
            writers.pop(0).close()
        if number % 200 == 199:
            await node.is_well()
    assert most <= MAX_CONNECTIONS + 32, "closed ones go in the next turns of the loop"
    assert len(os.listdir("/proc/self/fd")) - before <= 301 + MAX_CONNECTIONS + 64
    await node.is_well()
    for writer in writers:
        writer.close()
    await until(lambda: node.num_connections == 0)
