"""Store pages as objects, by obstore: S3 and compatible services, Google Cloud Storage, Azure Blob Storage.

Putting an object is atomic everywhere. There is no size limit here: the bucket's own rules expire old objects.
obstore takes the service and its credentials from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...) or from the
machine's role.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.envelope import HEADER_BYTES, check, header_of
from transfer.storage.keys import fingerprint_of
from transfer.storage.page_store import PageStore

SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
MAX_RETRIES: Final = 2
CONNECT_TIMEOUT_S: Final = 5.0


class ObjectStore(PageStore):
    """See the module's docstring, and `transfer.storage.base.Store`.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path`` or ``memory:///``.
        timeout_s: Longest time of one request to the service, retries included.

    Raises:
        ConfigError: obstore is not installed, or cannot use the URL or the environment.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._obstore = _library()
        exceptions = self._obstore.exceptions
        self._missing = (exceptions.NotFoundError, FileNotFoundError)
        self._faults = (exceptions.BaseError, OSError)
        parts = urlsplit(url)
        self.name: str = _without_secrets(url)
        if parts.scheme not in SCHEMES:
            choices = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ConfigError(f"storage.url is {self.name}; it must begin with one of {choices}")
        options: dict[str, Any] = {}
        if parts.scheme not in ("file", "memory"):
            timeout, connect_timeout = (timedelta(seconds=seconds) for seconds in (timeout_s, min(timeout_s, CONNECT_TIMEOUT_S)))
            # obstore itself looks there only if it gets no options.
            is_http_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
            options["client_options"] = {
                "timeout": timeout,
                "connect_timeout": connect_timeout,
                "allow_http": is_http_allowed,
            }
            options["retry_config"] = {"max_retries": MAX_RETRIES, "retry_timeout": timeout}
        try:
            self._store = self._obstore.store.from_url(url, **options)
        except (*self._faults, ValueError) as error:
            reason = self._text_of(error).replace(url, self.name)
            raise ConfigError(f"storage.url is {self.name}; obstore cannot use it: {reason}") from None

    def _text_of(self, error: BaseException) -> str:
        """Return obstore's text for people. Its text for developers can have the whole URL in it, and much more."""
        return " ".join(str(error).partition("Debug source")[0].split())[:500]

    def _head(self, key: str) -> Any:
        fingerprint_of(key)
        return self._obstore.head(self._store, key)

    def _put(self, key: str, page: memoryview, used_ns: int) -> Outcome:
        with contextlib.suppress(*self._missing):  # most pages that are put are missing
            if self._head(key)["size"] == HEADER_BYTES + page.nbytes:
                return Outcome.OK
        try:
            self._obstore.put(self._store, key, b"".join((header_of(key, page), page)), use_multipart=False)
        except self._missing as error:
            raise OSError(f"the bucket does not exist: {self._text_of(error)}") from error
        return Outcome.OK

    def _get(self, key: str, page: memoryview, used_ns: int) -> Outcome:
        fingerprint_of(key)
        found = self._obstore.get(self._store, key)
        num_bytes = found.meta["size"]
        # Of an object that is far too long, only the header is read.
        is_whole = num_bytes <= HEADER_BYTES + page.nbytes
        stored = memoryview(found.bytes() if is_whole else self._obstore.get_range(self._store, key, start=0, end=HEADER_BYTES))
        page[: max(0, stored.nbytes - HEADER_BYTES)] = stored[HEADER_BYTES : HEADER_BYTES + page.nbytes]
        return check(key, bytes(stored[:HEADER_BYTES]), page, num_bytes=num_bytes)

    def _exists(self, key: str) -> Outcome:
        self._head(key)
        return Outcome.OK

    def _delete(self, key: str) -> Outcome:
        self._head(key)  # S3 does not report a missing object
        self._obstore.delete(self._store, key)
        return Outcome.OK


def _library() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(f"storage.url needs obstore ({error}): pip install 'kvferry[s3]', or set storage.directory") from error
    return obstore


def _without_secrets(url: str) -> str:
    """Leave out the password of a host and the signature of a query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
