"""From settings to a store."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.storage.stores import Seen, key_of, page_of
from transfer.config import StorageConfig
from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.directory import DirectoryStore
from transfer.storage.object_store import ObjectStore
from transfer.storage.open import check_store, open_store, open_store_client


def test_nothing_is_opened_where_nothing_is_set() -> None:
    assert not StorageConfig().is_set
    assert open_store(StorageConfig()) is None


def test_a_directory_or_a_url(tmp_path: Path) -> None:
    directory, url = StorageConfig(directory=tmp_path / "kv", max_bytes="2KiB"), StorageConfig(url="memory:///")
    assert directory.is_set and url.is_set
    opened = open_store(directory)
    assert isinstance(opened, DirectoryStore) and isinstance(open_store(url), ObjectStore)
    pages = [(key_of(number), memoryview(page_of(number, num_bytes))) for number, num_bytes in ((1, 4096), (2, 64))]
    assert opened.put(pages) == [Outcome.FAILED, Outcome.OK], "the first is larger than the limit"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"directory": "/a", "url": "s3://b"}, "directory is /a and url is set, too; set one of them"),
        ({"url": "s3://b", "max_bytes": 1}, r"max_bytes is 1; it is only for a store in storage.directory"),
        ({"salt": "x" * 129}, "at most 128 characters"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        StorageConfig.model_validate(given)


async def test_a_client_of_what_is_set(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    assert open_store_client(StorageConfig(), loop=loop, observer=Seen()) is None
    client = open_store_client(StorageConfig(directory=tmp_path), loop=loop, observer=Seen())
    assert client is not None
    assert await client.put([(key_of(1), memoryview(page_of(1, 64)))]) == [True]
    view = memoryview(bytearray(64))
    assert await client.get([(key_of(1), view)]) == [True]
    assert bytes(view) == page_of(1, 64)
    assert await client.get([("no key", view)]) == [False]
    await client.close()


def test_a_store_is_checked_without_being_opened(tmp_path: Path) -> None:
    check_store(StorageConfig())
    check_store(StorageConfig(url="memory:///"))
    check_store(StorageConfig(directory=tmp_path / "kv"))
    assert not list((tmp_path / "kv").iterdir())
    (tmp_path / "file").touch()
    for bad in (StorageConfig(directory=tmp_path / "file"), StorageConfig(url="ftp://host")):
        with pytest.raises(ConfigError, match=r"storage\.(directory|url) is "):
            check_store(bad)


@pytest.mark.parametrize("url", ["ftp://user:secret@host/x", "bucket", "s3:/bucket?signature=secret"])
def test_a_url_of_another_kind_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match=r"storage.url is ") as refused:
        open_store(StorageConfig(url=url))
    assert "secret" not in str(refused.value)


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"storage.url needs obstore .*: pip install 'kvferry\[s3\]', or set storage.directory"):
        open_store(StorageConfig(url="s3://bucket/kv"))
