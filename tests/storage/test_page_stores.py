"""What directories and objects have in common: a page is read whole or is a miss, and a key is no path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.stores import BROKEN, PAGE_BYTES, file_of, get, key_of, put
from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.directory import DirectoryStore
from transfer.storage.object_store import ObjectStore
from transfer.storage.page_store import PageStore

OK, MISSING, CORRUPT, FOREIGN = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN

OPENED: dict[str, Callable[[Path], PageStore]] = {
    "directory": DirectoryStore,
    "object files": lambda folder: ObjectStore(folder.as_uri(), timeout_s=5.0),
}


@pytest.fixture(params=OPENED)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def store(kind: str, tmp_path: Path) -> PageStore:
    return OPENED[kind](tmp_path)


@pytest.fixture
def path_of(kind: str, tmp_path: Path) -> Callable[[str], Path]:
    """Return the file of a key."""
    return lambda key: file_of(tmp_path, key) if kind == "directory" else tmp_path / key


def test_another_client_of_the_store_reads_stored_pages(store: PageStore, kind: str, tmp_path: Path) -> None:
    assert put(store, 1, 2) == [OK, OK]
    other = OPENED[kind](tmp_path)
    assert [get(other, number) for number in (1, 2, 3)] == [OK, OK, MISSING]
    assert other.exists([key_of(1), key_of(3)]) == [OK, MISSING]
    assert other.delete([key_of(1), key_of(3)]) == [OK, MISSING]
    assert [get(store, number) for number in (1, 2)] == [MISSING, OK]
    assert store.put([]) == store.get([]) == store.exists([]) == store.delete([]) == []


def test_an_existing_page_is_not_written_again(store: PageStore, path_of: Callable[[str], Path]) -> None:
    put(store, 1)
    path = path_of(key_of(1))
    path.write_bytes(bytes(path.stat().st_size))
    assert put(store, 1) == [OK]
    assert get(store, 1) is CORRUPT, "it was left as it was"


@pytest.mark.parametrize("op", ["get", "put", "exists", "delete"])
def test_an_invalid_key_never_becomes_a_path(store: PageStore, op: str) -> None:
    with pytest.raises(ConfigError, match="store key is"):
        if op in ("get", "put"):
            getattr(store, op)([("../outside", memoryview(bytearray(4)))])
        else:
            getattr(store, op)(["../outside"])


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_page_is_a_miss_and_makes_way_for_a_whole_one(
    store: PageStore, path_of: Callable[[str], Path], how: str
) -> None:
    put(store, 1)
    path = path_of(key_of(1))
    path.write_bytes(BROKEN[how](path.read_bytes()))
    assert [get(store, 1), get(store, 1)] == [CORRUPT, MISSING]
    assert put(store, 1) == [OK] and get(store, 1) is OK


def test_a_page_of_another_model_is_never_read(store: PageStore, path_of: Callable[[str], Path]) -> None:
    """Somebody has copied one store over another: the name says one thing, the header another."""
    put(store, 1)
    other = f"{'f' * 32}/{key_of(1)[33:]}"
    path_of(other).parent.mkdir(parents=True)
    path_of(other).write_bytes(path_of(key_of(1)).read_bytes())
    assert store.get([(other, memoryview(bytearray(PAGE_BYTES)))]) == [FOREIGN]
    assert store.exists([other]) == [OK], "it may be the page of a node of another version"
