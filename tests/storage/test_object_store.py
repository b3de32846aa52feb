"""An object store as a store, over what obstore has without a network, and over S3's own protocol on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.storage.writer import key_of, page_of
from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.object_store import ObjectStore

OK, MISSING, CORRUPT, FOREIGN, FAILED = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN, Outcome.FAILED
PAGE_BYTES = 4096


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
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
    assert store.exists([other]) == [MISSING]


def test_what_is_no_key_is_no_path(store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="store key is"):
        store.get([("../outside", memoryview(bytearray(1)))])


def test_a_service_that_nobody_reaches_is_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket/kv", timeout_s=0.5)
    assert put(store, 1) == [FAILED]
    assert get(store, 1) is FAILED
    assert store.exists([key_of(1)]) == [FAILED]
    assert store.delete([key_of(1)]) == [FAILED]


NOWHERE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_REGION": "us-east-1",
}


def test_a_url_that_obstore_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage.url is s3://; obstore cannot use it"):
        ObjectStore("s3://", timeout_s=1.0)
