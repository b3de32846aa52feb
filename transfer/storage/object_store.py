"""An object store (S3 and what speaks it, Google Cloud Storage, Azure Blob Storage) as a store, by obstore: pages are objects.

Putting an object is atomic everywhere, and there is no limit here: what is old goes by the bucket's own rules. Where the service
is and who calls it obstore takes from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...) or the machine's role.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from transfer.errors import ConfigError
from transfer.storage.base import Outcome
from transfer.storage.envelope import HEADER_BYTES, check, header_of
from transfer.storage.keys import fingerprint_of

SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
MAX_RETRIES: Final = 2
CONNECT_TIMEOUT_S: Final = 5.0

log = structlog.get_logger(__name__)


class ObjectStore:
    """See the module's docstring, and `transfer.storage.base.Store`.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path`` or ``memory:///``.
        timeout_s: Of one request to the service, its retries among it.

    Raises:
        ConfigError: obstore is not installed, or can make nothing of the URL or of the environment.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._obstore = _library()
        parts = urlsplit(url)
        self.name: str = _without_secrets(url)
        if parts.scheme not in SCHEMES:
            choices = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ConfigError(f"storage.url is {self.name}; it must begin with one of {choices}")
        options: dict[str, Any] = {}
        if parts.scheme not in ("file", "memory"):
            timeout, connect_timeout = (timedelta(seconds=seconds) for seconds in (timeout_s, min(timeout_s, CONNECT_TIMEOUT_S)))
            # obstore itself looks there only while it is given no options of its own.
            is_http_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
            options["client_options"] = {
                "timeout": timeout,
                "connect_timeout": connect_timeout,
                "allow_http": is_http_allowed,
            }
            options["retry_config"] = {"max_retries": MAX_RETRIES, "retry_timeout": timeout}
        try:
            self._store = self._obstore.store.from_url(url, **options)
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            reason = _in_a_line(error).replace(url, self.name)
            raise ConfigError(f"storage.url is {self.name}; obstore cannot use it: {reason}") from None

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        return [self._guarded(self._put, key, page) for key, page in pages]

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        return [self._guarded(self._get, key, page) for key, page in pages]

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._guarded(self._exists, key) for key in keys]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._guarded(self._delete, key) for key in keys]

    def _guarded(self, action: Callable[..., Outcome], key: str, *arguments: memoryview) -> Outcome:
        """What the service cannot do for one page is that page's affair. Raises ConfigError when it is no key."""
        fingerprint_of(key)
        exceptions = self._obstore.exceptions
        try:
            return action(key, *arguments)
        except (exceptions.NotFoundError, FileNotFoundError):
            return Outcome.MISSING
        except (exceptions.BaseError, OSError) as error:
            log.warning("stored_page_failed", action=action.__name__.strip("_"), key=key, error=_in_a_line(error))
            return Outcome.FAILED

    def _put(self, key: str, page: memoryview) -> Outcome:
        try:
            if self._obstore.head(self._store, key)["size"] == HEADER_BYTES + page.nbytes:
                return Outcome.OK
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
            pass  # what most puts find
        try:
            self._obstore.put(self._store, key, b"".join((header_of(key, page), page)), use_multipart=False)
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError) as error:
            raise OSError(f"there is no such bucket: {_in_a_line(error)}") from error
        return Outcome.OK

    def _get(self, key: str, page: memoryview) -> Outcome:
        found = self._obstore.get(self._store, key)
        num_bytes = found.meta["size"]
        # One that is far too long is not read as a whole: its header is enough to say what it is.
        stored = memoryview(found.bytes()) if num_bytes <= HEADER_BYTES + page.nbytes else self._beginning(key)
        page[: max(0, stored.nbytes - HEADER_BYTES)] = stored[HEADER_BYTES : HEADER_BYTES + page.nbytes]
        outcome = check(key, bytes(stored[:HEADER_BYTES]), page, num_bytes=num_bytes)
        if outcome is Outcome.CORRUPT:
            # Else a put would take it for the page. A foreign one may be somebody else's page, and whole.
            self._obstore.delete(self._store, key)
        return outcome

    def _beginning(self, key: str) -> memoryview:
        return memoryview(self._obstore.get_range(self._store, key, start=0, end=HEADER_BYTES))

    def _exists(self, key: str) -> Outcome:
        self._obstore.head(self._store, key)
        return Outcome.OK

    def _delete(self, key: str) -> Outcome:
        self._obstore.head(self._store, key)  # S3 says nothing of what was not there
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
    """A URL may have a password in its host, or a signature in its query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _in_a_line(error: BaseException) -> str:
    """What obstore says to people; what it says to its authors can have the whole URL in it, and much more."""
    return " ".join(str(error).partition("Debug source")[0].split())[:500]
