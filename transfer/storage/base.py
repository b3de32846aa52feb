"""What a store is: pages by key, in batches, blocking. `transfer.storage.client` keeps whoever must not wait away from it.

What becomes of a page is a value, for no page is ever certain: it can have been evicted, cut short, or written by somebody else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

USED_STEP_NS: Final = 1000
"""By how much each page of a call counts as used before the one ahead of it. A store with a size limit lets the end of a chain go
before its beginning, without which the rest could not be found."""


class Outcome(StrEnum):
    """What became of one page in one operation; the values are labels of metrics. Everything but `OK` is a miss."""

    OK = "ok"
    MISSING = "missing"  # the store does not have it
    CORRUPT = "corrupt"  # cut short, or with other bytes than were stored
    FOREIGN = "foreign"  # whole, but of another model, cut, format or key
    FAILED = "failed"  # the store could not: an error of the disk or of the service
    # These are said by `StoreClient`, of operations that the store was not asked for, or has not answered in time.
    TIMEOUT = "timeout"
    REFUSED = "refused"  # more is waiting than may wait
    CIRCUIT_OPEN = "circuit_open"  # the store is left alone for a while

    @property
    def is_answer(self) -> bool:
        """Whether the store has answered, be it with nothing: it works."""
        return self in (Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN)


def used_times(used_ns: int) -> Iterator[int]:
    """When the pages of a call count as used, one after the other; see `Store`."""
    return itertools.count(used_ns, -USED_STEP_NS)


class Store(Protocol):
    """Pages by key, see `transfer.storage.keys`. Every method blocks, is called from several threads at once, and answers each
    page by itself, in order; an exception says that the whole call came to nothing.

    A page is stored whole or not at all, whatever happens to the process that stores it, and is read only if it is what was
    stored. Equal keys mean equal pages: what is there is not written again.

    `used_ns` is when the first page of a call counts as used, in nanoseconds since the epoch; each further one does so
    `USED_STEP_NS` before. None: now. It matters where the least recently used pages make room.
    """

    @property
    def name(self) -> str:
        """For people: where it is, without secrets."""
        ...

    def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        """Store pages; `OK` also for one that is there already."""
        ...

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        """Fill each writable view, which has the page's exact size; what a view holds is undefined unless it is `OK`."""
        ...

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        """`OK` or `MISSING` by name alone: only `get` knows whether a page can be read."""
        ...

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        """Take pages out; `MISSING` for what is not there."""
        ...


class StoreObserver(Protocol):
    """Told of everything that a `StoreClient` does, on its loop; `transfer.metrics.StoreMetrics` is one."""

    def operation_finished(self, op: str, outcomes: Sequence[Outcome], *, num_bytes: int, seconds: float) -> None:
        """A call is answered.

        Args:
            op: "put", "get", "exists" or "delete".
            outcomes: Of each of its pages.
            num_bytes: Of the pages that were put or got.
            seconds: From the call to its answer.
        """
        ...

    def queue_changed(self, num_pages: int) -> None:
        """So many pages wait for the store, or for its answer."""
        ...

    def circuits_changed(self, *, read: str, write: str) -> None:
        """States of the circuit breakers: "closed", "open" or "half-open"."""
        ...
