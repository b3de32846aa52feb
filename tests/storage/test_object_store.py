"""An object store as a store, over what obstore has without a network, and over S3's own protocol on loopback."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from tests.storage.stores import Seen
from tests.storage.writer import key_of, page_of
from transfer.breaker import BreakerSettings
from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.object_store import ObjectStore

OK, MISSING, CORRUPT, FOREIGN, FAILED = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN, Outcome.FAILED
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """S3, as moto serves it to whoever speaks its protocol."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """In a bucket of the test's own."""
    for name, value in environment(s3_port).items():
        monkeypatch.setenv(name, value)
    bucket = f"kv-{secrets.token_hex(4)}"
    request = urllib.request.Request(f"http://127.0.0.1:{s3_port}/{bucket}", method="PUT")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    return ObjectStore(f"s3://{bucket}/some/prefix", timeout_s=5.0)


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        opened: ObjectStore = request.getfixturevalue("s3")
        return opened
    return ObjectStore("memory:///" if request.param == "memory" else tmp_path.as_uri(), timeout_s=5.0)


def put(store: ObjectStore, *numbers: int) -> list[Outcome]:
    return store.put([(key_of(number), memoryview(page_of(number, PAGE_BYTES))) for number in numbers])


def get(store: ObjectStore, number: int, num_bytes: int = PAGE_BYTES) -> Outcome:
    view = memoryview(bytearray(num_bytes))
    (outcome,) = store.get([(key_of(number), view)])
    assert outcome is not OK or bytes(view) == page_of(number, num_bytes)
    return outcome


def replace(store: ObjectStore, number: int, change: Any) -> None:
    library: Any = store._obstore
    content = bytearray(library.get(store._store, key_of(number)).bytes())
    library.put(store._store, key_of(number), bytes(change(content)))


def test_what_was_put_is_got(store: ObjectStore) -> None:
    assert put(store, 1, 2) == [OK, OK]
    assert [get(store, number) for number in (1, 2, 3)] == [OK, OK, MISSING]
    assert store.exists([key_of(1), key_of(3)]) == [OK, MISSING]
    assert store.delete([key_of(1), key_of(3)]) == [OK, MISSING]
    assert [get(store, number) for number in (1, 2)] == [MISSING, OK]


def test_what_is_there_is_not_put_again(store: ObjectStore) -> None:
    put(store, 1)
    replace(store, 1, lambda content: bytes(len(content)))
    assert put(store, 1) == [OK]
    assert get(store, 1) is CORRUPT, "it was left as it was"


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content[:100],
        lambda content: b"",
        lambda content: content + b"\0",
        lambda content: content * 3,
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: bytes(len(content)),
    ],
)
def test_a_broken_object_is_a_miss_and_makes_way_for_a_whole_one(store: ObjectStore, change: Any) -> None:
    put(store, 1)
    replace(store, 1, change)
    assert get(store, 1) is CORRUPT
    assert get(store, 1) is MISSING
    assert put(store, 1) == [OK]
    assert get(store, 1) is OK


def test_an_object_of_another_model_is_never_read(store: ObjectStore) -> None:
    put(store, 1)
    library: Any = store._obstore
    content = bytes(library.get(store._store, key_of(1)).bytes())
    other = f"{'f' * 32}/{key_of(1)[33:]}"
    library.put(store._store, other, content)
    assert store.get([(other, memoryview(bytearray(PAGE_BYTES)))]) == [FOREIGN]
    assert store.exists([other]) == [OK], "it may be the page of a node of another version"


def test_what_is_no_key_is_no_path(store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="store key is"):
        store.get([("../outside", memoryview(bytearray(1)))])


def test_two_processes_of_one_bucket_share_it(s3: ObjectStore) -> None:
    other = ObjectStore(s3.name, timeout_s=5.0)
    assert put(s3, 1) == [OK]
    assert get(other, 1) is OK


async def test_a_loop_goes_on_while_a_service_is_asked(s3: ObjectStore) -> None:
    """And the service runs in this process: if obstore kept the interpreter's lock, nobody would ever answer it."""
    breaker = BreakerSettings(failures=3, window_s=60.0, pause_s=1.0, max_pause_s=1.0)
    settings = StoreClientSettings(put_timeout_s=10.0, get_timeout_s=10.0, queue_bytes=1 << 24, threads=4, breaker=breaker)
    client = StoreClient(s3, loop=asyncio.get_running_loop(), settings=settings, observer=Seen())
    pages = [(key_of(number), memoryview(page_of(number, PAGE_BYTES))) for number in range(20)]
    assert await client.put(pages) == [True] * 20
    views = [memoryview(bytearray(PAGE_BYTES)) for _ in pages]
    assert await client.get([(key, view) for (key, _), view in zip(pages, views, strict=True)]) == [True] * 20
    assert views == [view for _, view in pages]
    await client.close()


@pytest.mark.parametrize("url", ["s3://there-is-no-such-bucket/kv", "s3://not..allowed/kv"])
def test_a_bucket_that_is_not_there_is_failures_and_misses(s3_port: int, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name, value in environment(s3_port).items():
        monkeypatch.setenv(name, value)
    store = ObjectStore(url, timeout_s=2.0)
    assert put(store, 1) == [FAILED], "or a mistake in the settings would look like a store that works"
    assert get(store, 1) in (FAILED, MISSING)


@pytest.mark.parametrize("service", ["nobody", "silent"])
def test_a_service_that_does_not_answer_is_failures_in_time(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if service == "nobody":
            listener.close()
        for name, value in environment(port).items():
            monkeypatch.setenv(name, value)
        store = ObjectStore("s3://bucket/kv", timeout_s=0.5)
        begun_s = time.monotonic()
        assert put(store, 1) == [FAILED]
        assert get(store, 1) is FAILED
        assert store.exists([key_of(1)]) == [FAILED]
        assert store.delete([key_of(1)]) == [FAILED]
        assert time.monotonic() - begun_s < 15


def environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }


def test_a_url_that_obstore_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage.url is s3://; obstore cannot use it"):
        ObjectStore("s3://", timeout_s=1.0)
