"""Pages of a KV pool: reserved by count, bound when data is about to arrive, released with their owner.

A reservation promises pages without naming them. All pages of a request are reserved before its first byte is granted, so binding
never fails, and pool and ring cannot wait for each other. Pages are bound late, so a request that waits for its data holds a
number and no memory.

`PageAllocator` has the pages of one group of layers. `GroupAllocator` has those of all groups of a model, and counts in tokens:
it knows the pages of a request, and releases those that a sliding window has passed.

Invariants, checked by `check_invariants()`: every page is free or bound to exactly one owner, free pages cover the reservations,
and the counters agree with the lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, final, overload

from transfer.engine_types import DecodeItem, PrefillItem
from transfer.errors import ConfigError, LocalProtocolError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup, PageCounts, PageNeeds


@final
class PageEntries(Sequence[int]):
    """A snapshot of a page table: entry i is the page of the i-th page of tokens, or `NO_PAGE`.

    The time to create a snapshot does not depend on the length of the table. A step of a decode rank creates one for each request
    with a new page. The snapshot shares its owner's list, whose entries are appended and never changed.

    Args:
        entries: The owner's list.
        num_passed: Entries at the front that are `NO_PAGE`, whatever the list contains there.
    """

    __slots__ = ("_as_tuple", "_entries", "_num_entries", "_num_passed")

    def __init__(self, entries: list[int], num_passed: int) -> None:
        self._entries = entries
        self._num_entries = len(entries)
        self._num_passed = num_passed
        self._as_tuple: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self._num_entries

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, int):
            place = range(self._num_entries)[index]
            return NO_PAGE if place < self._num_passed else self._entries[place]
        begin, end, step = index.indices(self._num_entries)
        if step != 1:
            return self.as_tuple()[index]
        first = min(max(begin, self._num_passed), max(begin, end))
        return (*(NO_PAGE,) * (first - begin), *self._entries[first:end])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.as_tuple() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return f"PageEntries{self.as_tuple()}"

    def as_tuple(self) -> tuple[int, ...]:
        """Return the entries, as the same object each time. Thread-safe."""
        if self._as_tuple is None:
            self._as_tuple = self[:]
        return self._as_tuple

    def without(self, count: int) -> PageEntries:
        """Return the table with at least its first `count` entries set to `NO_PAGE`."""
        found = PageEntries(self._entries, max(count, self._num_passed))
        found._num_entries = self._num_entries
        return found


_Item = TypeVar("_Item", PrefillItem, DecodeItem)


def with_tuples(item: _Item) -> _Item:
    """Return the item with its page tables as tuples, which are the same objects while the tables do not change.

    Call it on the engine's thread: for a long table, it takes a millisecond.
    """

    def tuples(tables: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        return tuple(table.as_tuple() if isinstance(table, PageEntries) else table for table in tables)

    return replace(item, page_tables=tuples(item.page_tables), host_tables=tuples(item.host_tables))


@dataclass(slots=True)
class _Holding:
    """Pages of one owner: bound pages, and pages that it may still bind."""

    reserved: int = 0
    num_passed: int = 0  # entries at the front of its table without a page
    entries: list[int] = field(default_factory=list)  # including passed entries; appended to, never changed
    table: PageEntries | None = None  # last result of `pages()`; None after a change

    @property
    def bound(self) -> list[int]:
        return self.entries[self.num_passed :]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccounts:
    """Everything that a `PageAllocator` records about its pages, at one moment.

    Args:
        unbound: Pages that no owner has.
        bound: Pages of all owners.
        reserved: Pages that each owner may still bind.
        num_reserved: Their sum, counted with each call.
    """

    num_pages: int
    unbound: Sequence[int]
    bound: Sequence[int]
    reserved: Sequence[int]
    num_reserved: int

    def check(self) -> None:
        """Raise LocalProtocolError if a page is lost, held twice or out of range, or if a counter is wrong."""
        if sorted([*self.bound, *self.unbound]) != list(range(self.num_pages)):
            raise LocalProtocolError(
                f"pages are lost or held twice: {len(self.bound)} bound, {len(self.unbound)} not, of {self.num_pages}"
            )
        reserved = sum(self.reserved)
        if reserved != self.num_reserved or any(count < 0 for count in self.reserved):
            raise LocalProtocolError(f"reserved count is {self.num_reserved}; the owners' reservations add up to {reserved}")
        if self.num_reserved > len(self.unbound):
            raise LocalProtocolError(f"{self.num_reserved} pages are reserved; only {len(self.unbound)} are not bound")


class PageAllocator:
    """The owner of each page of a pool.

    Reserving is O(1), binding and releasing O(pages moved). Not thread-safe. Methods raise LocalProtocolError for an owner that
    has nothing here, and for a count that is negative or larger than the owner's reservation.

    Args:
        num_pages: Pages of the pool, with numbers [0, num_pages); at least 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages}; a pool has at least 1 page")
        self.num_pages = num_pages
        # First in, first out: a fresh pool binds ascending runs, which copies turn into few large moves.
        self._unbound: deque[int] = deque(range(num_pages))
        self._holdings: dict[str, _Holding] = {}
        self._num_reserved = 0

    @property
    def num_free(self) -> int:
        """Pages that are neither bound nor reserved."""
        return len(self._unbound) - self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Pages promised to owners and not bound yet."""
        return self._num_reserved

    @property
    def num_bound(self) -> int:
        """Pages that hold, or are about to hold, an owner's data."""
        return self.num_pages - len(self._unbound)

    def owners(self) -> tuple[str, ...]:
        """Return all owners, in the order of their first reservation."""
        return tuple(self._holdings)

    def pages(self, owner: str) -> PageEntries:
        """Return the page table of `owner`, a snapshot: `NO_PAGE` for each passed entry, then its
        pages in the order of binding."""
        holding = self._holding(owner)
        if holding.table is None:
            holding.table = PageEntries(holding.entries, holding.num_passed)
        return holding.table

    def reserved(self, owner: str) -> int:
        """Return the number of pages that `owner` may still bind."""
        return self._holding(owner).reserved

    def reserve(self, owner: str, count: int) -> bool:
        """Promise `count` more pages to `owner`, all or nothing.

        Return False if there is no room yet; nothing has changed then. A count above `num_pages` can never succeed, and the
        caller must reject it.
        """
        if count < 0:
            raise LocalProtocolError(f"count is {count}; a reservation is of 0 pages or more")
        if count > self.num_free:
            return False
        self._holdings.setdefault(owner, _Holding()).reserved += count
        self._num_reserved += count
        return True

    def bind(self, owner: str, count: int) -> list[int]:
        """Bind `count` reserved pages, and return them."""
        holding = self._holding(owner)
        if not 0 <= count <= holding.reserved:
            raise LocalProtocolError(f"owner {owner!r} binds {count} pages; it has reserved {holding.reserved}")
        bound = [self._unbound.popleft() for _ in range(count)]
        holding.reserved -= count
        holding.entries += bound
        holding.table = None
        self._num_reserved -= count
        return bound

    def give_back(self, owner: str, count: int) -> None:
        """Release `count` of the owner's reserved pages."""
        holding = self._holding(owner)
        if not 0 <= count <= holding.reserved:
            raise LocalProtocolError(f"owner {owner!r} gives {count} pages back, but reserved {holding.reserved}")
        holding.reserved -= count
        self._num_reserved -= count

    def bind_before(self, owner: str, count: int) -> list[int]:
        """Bind reserved pages to the last `count` passed entries, and return them in order: the reverse of `pass_before`."""
        holding = self._holding(owner)
        if count > holding.num_passed:
            raise LocalProtocolError(f"owner {owner!r} binds {count} pages in front; {holding.num_passed} entries were passed")
        front, behind = holding.entries[: holding.num_passed - count], holding.bound
        bound = self.bind(owner, count)
        holding.entries = front + bound + behind  # a new list, so that tables that were returned do not change
        holding.num_passed -= count
        holding.table = None
        return bound

    def pass_before(self, owner: str, entry: int) -> int:
        """Release the pages of the entries of `owner`'s table below `entry`, which nobody reads or writes any more.

        The owner may bind as many others, so its share stays equally large. Entries that are not bound yet are skipped: the next
        page bound is that of `entry`. Return the number of released pages.
        """
        holding = self._holding(owner)
        if entry <= holding.num_passed:
            return 0
        passed = holding.entries[holding.num_passed : entry]
        holding.entries += [NO_PAGE] * (entry - len(holding.entries))
        holding.num_passed = entry
        holding.table = None
        self._unbound.extend(passed)
        holding.reserved += len(passed)
        self._num_reserved += len(passed)
        return len(passed)

    def release(self, owner: str) -> int:
        """Release everything that `owner` has, bound and reserved. Return the number of pages that became free."""
        holding = self._holding(owner)
        del self._holdings[owner]
        bound = holding.bound
        self._unbound.extend(bound)
        self._num_reserved -= holding.reserved
        return len(bound) + holding.reserved

    def accounts(self) -> PageAccounts:
        """Return a copy of the present state; O(num_pages)."""
        return PageAccounts(
            num_pages=self.num_pages,
            unbound=tuple(self._unbound),
            bound=tuple(page for holding in self._holdings.values() for page in holding.bound),
            reserved=tuple(holding.reserved for holding in self._holdings.values()),
            num_reserved=self._num_reserved,
        )

    def check_invariants(self) -> None:
        """Check the module's invariants; O(num_pages). See `PageAccounts.check`."""
        self.accounts().check()

    def _holding(self, owner: str) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise LocalProtocolError(f"owner {owner!r} has no pages and no reservation here; released twice, or never reserved")
        return holding


class GroupAllocator:
    """The pages of all groups of layers of one rank's pool, counted in tokens.

    Not thread-safe. Methods raise LocalProtocolError for an owner that has nothing here.

    Args:
        needs: The pages that requests need.
        num_pages: Pages of each group, each at least 1.
    """

    def __init__(self, needs: PageNeeds, num_pages: Sequence[int]) -> None:
        if len(num_pages) != len(needs.groups):
            raise ConfigError(
                f"num_pages is {tuple(num_pages)}; there are {len(needs.groups)} groups of layers: one number for each"
            )
        self.needs = needs
        self._page_size = needs.page_size
        self._allocators = tuple(PageAllocator(count) for count in num_pages)

    @property
    def by_group(self) -> tuple[tuple[LayerGroup, PageAllocator], ...]:
        """Each group with the allocator of its pages. Read only."""
        return tuple(zip(self.needs.groups, self._allocators, strict=True))

    @property
    def full(self) -> PageAllocator:
        """Pages of the layers that keep every token. Raises LocalProtocolError if the model has none."""
        for group, allocator in self.by_group:
            if group.kind is GroupKind.FULL:
                return allocator
        raise LocalProtocolError("the model has no layers that keep every token")

    def reserve(self, owner: str, num_tokens: int) -> bool:
        """Promise all pages that a request of `num_tokens` tokens ever holds at once, in all groups or in none.

        Return False if there is no room yet; nothing has changed then.
        """
        return self.reserve_pages(owner, self.needs.peak(num_tokens))

    def reserve_pages(self, owner: str, pages: PageCounts) -> bool:
        """As `reserve`, with counted pages: a request that lies partly elsewhere needs fewer."""
        counts = pages.by_group
        if any(count > allocator.num_free for count, allocator in zip(counts, self._allocators, strict=True)):
            return False
        for count, allocator in zip(counts, self._allocators, strict=True):
            allocator.reserve(owner, count)
        return True

    def cover(self, owner: str, end_token: int) -> tuple[PageEntries, ...]:
        """Bind missing pages so that the tokens up to `end_token` have pages, within the
        reservation. Return the owner's tables."""
        for group, allocator in self.by_group:
            missing = group.num_pages(end_token, self._page_size) - len(allocator.pages(owner))
            if missing > 0:
                allocator.bind(owner, missing)
        return self.tables(owner)

    def advance(
        self, owner: str, next_token: int, *, kept_from: int | None = None, copied_from: Mapping[int, int] | None = None
    ) -> None:
        """Every step before `next_token` is over, and none will compute a token before it: let the windows move on.

        Args:
            kept_from: Number of tokens of a prompt whose last window must still be gathered. None means no such prompt.
            copied_from: First entry that a copy is still reading, by the index of a group. None means no copy.
        """
        for index, (group, allocator) in enumerate(self.by_group):
            first = group.first_needed_token(next_token)
            if kept_from is not None:
                first = min(first, group.first_travelling_token(kept_from))
            entry = first // self._page_size
            if copied_from is not None:
                entry = min(entry, copied_from.get(index, entry))
            if first:
                allocator.pass_before(owner, entry)

    def begin_at(self, owner: str, num_tokens: int) -> None:
        """Skip window pages of tokens that do not travel, for a prompt of `num_tokens` tokens that is about to arrive."""
        for group, allocator in self.by_group:
            if first := group.first_travelling_token(num_tokens):
                allocator.pass_before(owner, first // self._page_size)

    def tables(self, owner: str) -> tuple[PageEntries, ...]:
        """Return the owner's page table in each group; token ``t`` lies in ``table[t // page_size]``.

        A state's table has one entry. Entries that a window has passed are `NO_PAGE`.
        """
        return tuple(allocator.pages(owner) for allocator in self._allocators)

    def release(self, owner: str) -> None:
        """Release everything that `owner` has."""
        for allocator in self._allocators:
            allocator.release(owner)

    def check_idle(self) -> None:
        """Raise LocalProtocolError if a page is not free, although no owner is left; O(1)."""
        for group, allocator in self.by_group:
            if allocator.num_bound or allocator.num_reserved:
                raise LocalProtocolError(
                    f"no request is left, and of the {group.name} pages {allocator.num_bound} are still bound and "
                    f"{allocator.num_reserved} reserved"
                )

    def check_invariants(self) -> None:
        """See `PageAllocator.check_invariants`."""
        for allocator in self._allocators:
            allocator.check_invariants()
