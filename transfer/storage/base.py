"""The interface of a store: pages by key, in batches, blocking. `transfer.storage.client` serves callers that must not wait.

The outcome of a page is a value, because no page is certain: it can be evicted, cut short, or written by another program.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

USED_STEP_NS: Final = 1000
"""Difference between the times of use of two pages of a call.

So a store with a size limit evicts the end of a chain before its beginning, without which the rest cannot be found.
"""


class Outcome(StrEnum):
    """Outcome of one page in one operation. The values are labels of metrics. All but `OK` are misses."""

    OK = "ok"
    MISSING = "missing"  # the store does not have it
    CORRUPT = "corrupt"  # cut short, or other bytes than were stored
    FOREIGN = "foreign"  # whole, but of another model, shard, format or key
    FAILED = "failed"  # an error of the disk or of the service
    # Reported by `StoreClient` for operations that the store was not asked for, or did not answer in time.
    TIMEOUT = "timeout"
    REFUSED = "refused"  # too much is waiting
    CIRCUIT_OPEN = "circuit_open"  # the store is left alone for a while

    @property
    def is_answer(self) -> bool:
        """Whether the store has answered, which means that it works."""
        return self in (Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN)


class Store(Protocol):
    """Pages by key, see `transfer.storage.keys`.

    Every method blocks, may be called by several threads at once, and returns the outcome of each page in order. An exception
    means that the whole call failed.

    A page is stored whole or not at all, even if its writer dies, and is read only if it is what was stored.
    Equal keys mean equal pages, so a stored page is not written again.

    `used_ns` is the time at which the first page of a call counts as used, in nanoseconds since the epoch. None means now.
    Each further page counts as used `USED_STEP_NS` before. It matters if the least recently used pages are evicted.
    """

    @property
    def name(self) -> str:
        """Where the store is, for people, without secrets."""
        ...

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        """Store pages. A page that is stored already is `OK`, too."""
        ...

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        """Fill writable views, each of the page's exact size. The content of a view is undefined unless it is `OK`."""
        ...

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        """Return `OK` or `MISSING` by name alone. Only `get` knows whether a page can be read."""
        ...

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        """Delete pages."""
        ...
