"""An object store over S3's own protocol: moto serves it in this process, on loopback."""

from __future__ import annotations

import asyncio
import secrets
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from tests.storage.stores import PAGE_BYTES, Seen, get, key_of, page_of, put
from transfer.breaker import BreakerSettings
from transfer.storage.base import Outcome
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.object_store import ObjectStore

OK, MISSING, CORRUPT, FOREIGN, FAILED = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN, Outcome.FAILED


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def store(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store in a bucket of one test."""
    point_at(s3_port, monkeypatch)
    name = f"kv-{secrets.token_hex(4)}"
    request = urllib.request.Request(f"http://127.0.0.1:{s3_port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    return ObjectStore(f"s3://{name}/some/prefix", timeout_s=30.0)


def point_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a port of loopback the S3 service of this process."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def test_pages_are_shared_by_all_stores_of_a_bucket(store: ObjectStore) -> None:
    other = ObjectStore(store.name, timeout_s=30.0)
    assert put(store, 1, 2) == [OK, OK]
    assert [get(other, number) for number in (1, 2, 3)] == [OK, OK, MISSING]
    assert other.exists([key_of(1), key_of(3)]) == [OK, MISSING]
    assert other.delete([key_of(1), key_of(3)]) == [OK, MISSING]
    assert [get(store, number) for number in (1, 2)] == [MISSING, OK]


async def test_a_loop_goes_on_while_a_service_is_asked(store: ObjectStore) -> None:
    """The service runs in this process: if obstore kept the interpreter's lock, nothing would ever answer."""
    breaker = BreakerSettings(failures=3, window_s=60.0, pause_s=1.0, max_pause_s=1.0)
    settings = StoreClientSettings(put_timeout_s=60.0, get_timeout_s=60.0, queue_bytes=1 << 24, threads=4, breaker=breaker)
    client = StoreClient(store, loop=asyncio.get_running_loop(), settings=settings, observer=Seen())
    pages = [(key_of(number), memoryview(page_of(number, PAGE_BYTES))) for number in range(20)]
    assert await client.put(pages) == [True] * 20
    views = [memoryview(bytearray(PAGE_BYTES)) for _ in pages]
    assert await client.get([(key, view) for (key, _), view in zip(pages, views, strict=True)]) == [True] * 20
    assert views == [view for _, view in pages]
    await client.close()


@pytest.mark.parametrize("url", ["s3://there-is-no-such-bucket/kv", "s3://not..allowed/kv"])
def test_a_missing_bucket_is_failures_and_misses(s3_port: int, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    point_at(s3_port, monkeypatch)
    store = ObjectStore(url, timeout_s=2.0)
    assert put(store, 1) == [FAILED], "or a mistake in the settings would look like a store that works"
    assert get(store, 1) in (FAILED, MISSING)


@pytest.mark.parametrize("is_listening", [False, True])
def test_a_service_that_does_not_answer_is_failures(monkeypatch: pytest.MonkeyPatch, is_listening: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        point_at(listener.getsockname()[1], monkeypatch)
        if not is_listening:
            listener.close()
        store = ObjectStore("s3://bucket/kv", timeout_s=0.5)
        assert put(store, 1) == [FAILED] and get(store, 1) is FAILED
        assert store.exists([key_of(1)]) == store.delete([key_of(1)]) == [FAILED]
