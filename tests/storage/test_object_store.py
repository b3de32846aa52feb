"""An object store in memory, and its URL. test_page_stores.py has files, and tests/cluster/links/test_store_on_s3.py has S3."""

from __future__ import annotations

import pytest

from tests.storage.stores import get, key_of, put
from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.object_store import ObjectStore

OK, MISSING = Outcome.OK, Outcome.MISSING


def test_stored_pages_are_read_back() -> None:
    store = ObjectStore("memory:///", timeout_s=5.0)
    assert put(store, 1, 2) == [OK, OK]
    assert [get(store, number) for number in (1, 2, 3)] == [OK, OK, MISSING]
    assert store.exists([key_of(1), key_of(3)]) == [OK, MISSING]
    assert store.delete([key_of(1), key_of(3)]) == [OK, MISSING]


def test_a_url_that_obstore_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage.url is s3://; obstore cannot use it"):
        ObjectStore("s3://", timeout_s=1.0)
