"""An object store over the back ends of obstore that need no network; tests/cluster/links/test_store_on_s3.py has S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.stores import BROKEN, PAGE_BYTES, get, key_of, put
from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.object_store import ObjectStore

OK, MISSING, CORRUPT, FOREIGN = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN


@pytest.fixture
def files(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path.as_uri(), timeout_s=5.0)


@pytest.mark.parametrize("back_end", ["memory", "file"])
def test_what_was_put_is_got(tmp_path: Path, back_end: str) -> None:
    store = ObjectStore("memory:///" if back_end == "memory" else tmp_path.as_uri(), timeout_s=5.0)
    assert put(store, 1, 2) == [OK, OK]
    assert [get(store, number) for number in (1, 2, 3)] == [OK, OK, MISSING]
    assert store.exists([key_of(1), key_of(3)]) == [OK, MISSING]
    assert store.delete([key_of(1), key_of(3)]) == [OK, MISSING]
    assert [get(store, number) for number in (1, 2)] == [MISSING, OK]


def test_what_is_there_is_not_put_again(files: ObjectStore, tmp_path: Path) -> None:
    put(files, 1)
    path = tmp_path / key_of(1)
    path.write_bytes(bytes(path.stat().st_size))
    assert put(files, 1) == [OK]
    assert get(files, 1) is CORRUPT, "it was left as it was"


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_object_is_a_miss_and_makes_way_for_a_whole_one(files: ObjectStore, tmp_path: Path, how: str) -> None:
    put(files, 1)
    path = tmp_path / key_of(1)
    path.write_bytes(BROKEN[how](path.read_bytes()))
    assert [get(files, 1), get(files, 1)] == [CORRUPT, MISSING]
    assert put(files, 1) == [OK] and get(files, 1) is OK


def test_an_object_of_another_model_is_never_read(files: ObjectStore, tmp_path: Path) -> None:
    put(files, 1)
    other = f"{'f' * 32}/{key_of(1)[33:]}"
    (tmp_path / other).parent.mkdir()
    (tmp_path / other).write_bytes((tmp_path / key_of(1)).read_bytes())
    assert files.get([(other, memoryview(bytearray(PAGE_BYTES)))]) == [FOREIGN]
    assert files.exists([other]) == [OK], "it may be the page of a node of another version"


def test_what_is_no_key_is_no_path(files: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="store key is"):
        files.get([("../outside", memoryview(bytearray(1)))])


def test_a_url_that_obstore_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage.url is s3://; obstore cannot use it"):
        ObjectStore("s3://", timeout_s=1.0)
