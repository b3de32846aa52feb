"""Serve a store page by page, for files and objects alike."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog

from transfer.storage.base import USED_STEP_NS, Outcome

log = structlog.get_logger(__name__)


class PageStore(ABC):
    """A `Store` whose subclass has the operations of one page. A fault of one page does not affect the others of its call.

    `_get`, `_exists` and `_delete` raise one of `_missing` if the page is not there. Each operation raises one of `_faults` if
    the disk or the service fails, and ConfigError for a text that is no key.
    """

    _missing: tuple[type[Exception], ...] = (FileNotFoundError,)
    _faults: tuple[type[Exception], ...] = (OSError,)

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        return [self._guarded(self._put, *page, missing=Outcome.FAILED) for page in _with_times(pages, used_ns)]

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        outcomes = []
        for key, page, at_ns in _with_times(pages, used_ns):
            outcomes.append(self._guarded(self._get, key, page, at_ns))
            if outcomes[-1] is Outcome.CORRUPT:
                # Otherwise a put would keep it as the page. A foreign one may be a whole page of another owner.
                self._guarded(self._delete, key)
        return outcomes

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._guarded(self._exists, key) for key in keys]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._guarded(self._delete, key) for key in keys]

    def _guarded(self, action: Callable[..., Outcome], key: str, *arguments: Any, missing: Outcome = Outcome.MISSING) -> Outcome:
        try:
            return action(key, *arguments)
        except (*self._missing, *self._faults) as error:
            if isinstance(error, self._missing) and missing is not Outcome.FAILED:
                return missing
            log.warning("stored_page_failed", action=action.__name__.strip("_"), key=key, error=self._text_of(error))
            return Outcome.FAILED

    def _text_of(self, error: BaseException) -> str:
        """Return the text of a fault for the log."""
        return str(error)

    @abstractmethod
    def _put(self, key: str, page: memoryview, used_ns: int) -> Outcome: ...
    @abstractmethod
    def _get(self, key: str, page: memoryview, used_ns: int) -> Outcome: ...
    @abstractmethod
    def _exists(self, key: str) -> Outcome: ...
    @abstractmethod
    def _delete(self, key: str) -> Outcome: ...


def _with_times(pages: Sequence[tuple[str, memoryview]], used_ns: int | None) -> Iterator[tuple[str, memoryview, int]]:
    """Yield each page with the time at which it counts as used, see `Store`."""
    times = itertools.count(time.time_ns() if used_ns is None else used_ns, -USED_STEP_NS)
    return ((key, page, at_ns) for (key, page), at_ns in zip(pages, times, strict=False))
