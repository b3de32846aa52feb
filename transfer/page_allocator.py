"""Pages of a KV pool: reserved by count, bound when data comes, released with their owner.

A reservation promises pages without naming them. Because all of a request's pages are reserved before its first byte is granted,
binding can never fail and pool and ring cannot wait for each other; because they are bound late, a request that still waits
for its data holds a number and no memory.

Invariants, executed by `check_invariants()`: every page is free or bound to exactly one owner; what is free covers what is
reserved; the counters agree with the lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from transfer.errors import ConfigError, LocalProtocolError


@dataclass(slots=True)
class _Holding:
    """What one owner has: pages bound, and how many more it may bind."""

    reserved: int = 0
    pages: list[int] = field(default_factory=list)


class PageAllocator:
    """Which page of a pool belongs to whom.

    Reserving is O(1), binding and releasing O(pages moved). Not thread-safe: it has one owner.

    Args:
        num_pages: Pages of the pool; their numbers are [0, num_pages).

    Raises:
        ConfigError: `num_pages` is below 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}; a pool has at least 1 page")
        self.num_pages = num_pages
        # First in, first out: a page that was just released rests longest, and a fresh pool binds ascending runs, which the
        # copies turn into few large moves.
        self._unbound: deque[int] = deque(range(num_pages))
        self._holdings: dict[str, _Holding] = {}
        self._num_reserved = 0

    @property
    def num_free(self) -> int:
        """Pages that are neither bound nor reserved."""
        return len(self._unbound) - self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Pages promised to owners but not bound yet."""
        return self._num_reserved

    @property
    def num_bound(self) -> int:
        """Pages that hold, or are about to hold, an owner's data."""
        return self.num_pages - len(self._unbound)

    def owners(self) -> tuple[str, ...]:
        """Everyone who has a reservation or pages, in the order of their first reservation."""
        return tuple(self._holdings)

    def pages(self, owner: str) -> Sequence[int]:
        """Pages bound to `owner`, in the order of binding; a snapshot.

        Raises:
            LocalProtocolError: The owner has nothing here.
        """
        return tuple(self._holding(owner).pages)

    def reserved(self, owner: str) -> int:
        """Pages that `owner` may still bind.

        Raises:
            LocalProtocolError: The owner has nothing here.
        """
        return self._holding(owner).reserved

    def reserve(self, owner: str, count: int) -> bool:
        """Promise `count` more pages to `owner`, all or nothing.

        Returns:
            False when there is no room yet (nothing has changed, not even the list of owners); a count above `num_pages` can
            never succeed, and it is the caller's to refuse it.

        Raises:
            LocalProtocolError: `count` is negative.
        """
        if count < 0:
            raise LocalProtocolError(f"count is {count}; a reservation is of 0 pages or more")
        if count > self.num_free:
            return False
        self._holdings.setdefault(owner, _Holding()).reserved += count
        self._num_reserved += count
        return True

    def bind(self, owner: str, count: int) -> list[int]:
        """Turn `count` reserved pages into real ones.

        Returns:
            The pages bound by this call.

        Raises:
            LocalProtocolError: The owner is unknown, or `count` is negative or more than it has reserved.
        """
        holding = self._holding(owner)
        if not 0 <= count <= holding.reserved:
            raise LocalProtocolError(f"owner {owner!r} binds {count} pages; it has reserved {holding.reserved}")
        bound = [self._unbound.popleft() for _ in range(count)]
        holding.reserved -= count
        holding.pages += bound
        self._num_reserved -= count
        return bound

    def release(self, owner: str) -> int:
        """Take back everything that `owner` has, bound and reserved.

        Returns:
            How many pages became free.

        Raises:
            LocalProtocolError: The owner has nothing here; most likely this is its second release.
        """
        holding = self._holding(owner)
        del self._holdings[owner]
        self._unbound.extend(holding.pages)
        self._num_reserved -= holding.reserved
        return len(holding.pages) + holding.reserved

    def check_invariants(self) -> None:
        """Execute what the module's docstring promises; O(num_pages).

        Raises:
            LocalProtocolError: A page is lost, held twice or out of range, or a counter is wrong.
        """
        bound = [page for holding in self._holdings.values() for page in holding.pages]
        if sorted([*bound, *self._unbound]) != list(range(self.num_pages)):
            raise LocalProtocolError(
                f"pages are lost or held twice: {len(bound)} bound, {len(self._unbound)} not, of {self.num_pages}"
            )
        reserved = sum(holding.reserved for holding in self._holdings.values())
        if reserved != self._num_reserved or any(holding.reserved < 0 for holding in self._holdings.values()):
            raise LocalProtocolError(f"reserved count is {self._num_reserved}; the owners' reservations add up to {reserved}")
        if self.num_free < 0:
            raise LocalProtocolError(f"{self._num_reserved} pages are reserved; only {len(self._unbound)} are not bound")

    def _holding(self, owner: str) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise LocalProtocolError(f"owner {owner!r} has no pages and no reservation here; released twice, or never reserved")
        return holding
