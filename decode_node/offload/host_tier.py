"""Index the contents of the ranks' host pools. Pure; owned by the leader.

All ranks have equally many host pages and one numbering: page 7 of every rank holds the same tokens, each rank its own heads.
A page is known by the hash of its tokens and of all before them (`transfer.storage.keys`), so equal prefixes are kept once.

A page is *free*, *cached* or *held*. Nothing uses the content of a cached page, so it can be evicted. Users hold a page: requests
that read it, and jobs that fill or read it. Room can be *promised* to a request for pages that it may still have to move off the
device.

Invariant, executed by `check_invariants()`: free and cached pages cover the promised ones, so every promise can be kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transfer.errors import LocalProtocolError


@dataclass(slots=True, kw_only=True, eq=False)
class HostPage:
    """One page of every rank's host pool.

    Args:
        number: Its number in the ranks' host pools.
        page_hash: Hash of its present or future content. None if another page has that hash, or if no lookup may find it.
        depth: Pages before it in every prompt that it is part of.
        is_ready: Every rank has filled it.
        stored_s: Last monotonic time at which every rank's part was known to be in the store; None means never.
        users: Number of requests and jobs that use it.
    """

    group: int
    number: int
    page_hash: bytes | None
    depth: int = 0
    is_ready: bool = False
    stored_s: float | None = None
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPageCounts:
    """Pages of one group by state. The promised pages are among the free and the cached."""

    free: int
    cached: int
    held: int
    promised: int


class _Group:
    """The host pages of one group of layers."""

    def __init__(self, index: int, num_pages: int) -> None:
        self.index = index
        self.num_pages = num_pages
        self.free: deque[int] = deque(range(num_pages))
        self.by_hash: OrderedDict[bytes, HostPage] = OrderedDict()  # the longest unused first
        self.cached: set[HostPage] = set()
        self.held: set[HostPage] = set()
        self.promised: dict[str, int] = {}
        self.num_promised = 0

    @property
    def num_spare(self) -> int:
        """Pages that can be taken without breaking a promise."""
        return len(self.free) + len(self.cached) - self.num_promised


class HostTier:
    """See the module's docstring.

    Args:
        num_pages: Host pages of each group of layers.
    """

    def __init__(self, num_pages: Sequence[int]) -> None:
        self._groups = tuple(_Group(index, count) for index, count in enumerate(num_pages))

    def num_pages(self, group: int) -> int:
        return self._groups[group].num_pages

    def counts(self, group: int) -> HostPageCounts:
        found = self._groups[group]
        return HostPageCounts(free=len(found.free), cached=len(found.cached), held=len(found.held), promised=found.num_promised)

    def spare(self, group: int) -> int:
        """Return the number of pages that can be taken without breaking a promise."""
        return self._groups[group].num_spare

    def find(self, group: int, page_hash: bytes) -> HostPage | None:
        """Return the page of that hash, ready or still being filled."""
        return self._groups[group].by_hash.get(page_hash)

    def ready_beginning(self, group: int, page_hashes: Iterable[bytes]) -> list[HostPage]:
        """Return the pages of these hashes, up to the first that is missing or not ready."""
        by_hash, found = self._groups[group].by_hash, list[HostPage]()
        for page_hash in page_hashes:
            page = by_hash.get(page_hash)
            if page is None or not page.is_ready:
                break
            found.append(page)
        return found

    def promise(self, owner: str, group: int, count: int) -> bool:
        """Set `count` more pages aside for `owner`. Return False if there is no room for all of them yet."""
        found = self._groups[group]
        if count < 0:
            raise LocalProtocolError(f"owner {owner!r} is promised {count} host pages; it must be 0 or more")
        if count > found.num_spare:
            return False
        if count:
            found.promised[owner] = found.promised.get(owner, 0) + count
            found.num_promised += count
        return True

    def take(self, group: int, page_hash: bytes | None, *, owner: str | None = None, depth: int = 0) -> HostPage | None:
        """Return a page to fill, with the caller as its user. If none is free, evict the least recently used cached page.

        Args:
            page_hash: Hash of its future content. With None, or a hash that another page has, the page is never found.
            owner: Take one of the pages promised to this owner.

        Returns:
            None if there is no room; never for a promised page.

        Raises:
            LocalProtocolError: Nothing is promised to the owner.
        """
        found = self._groups[group]
        if owner is None and found.num_spare < 1:
            return None
        if owner is not None:
            self._redeem(found, owner)
        number = found.free.popleft() if found.free else self._evict(found)
        if page_hash is not None and page_hash in found.by_hash:
            page_hash = None
        page = HostPage(group=group, number=number, page_hash=page_hash, depth=depth, users=1)
        found.held.add(page)
        if page_hash is not None:
            found.by_hash[page_hash] = page
        return page

    def hold(self, page: HostPage, *, owner: str | None = None) -> bool:
        """Add a user to a page. Return False if that would break a promise.

        Args:
            owner: This page replaces one of those promised to this owner.
        """
        found = self._groups[page.group]
        if owner is None and page in found.cached and found.num_spare < 1:
            return False
        if owner is not None:
            self._redeem(found, owner)
        if page in found.cached:
            found.cached.remove(page)
            found.held.add(page)
        page.users += 1
        return True

    def ready(self, page: HostPage) -> None:
        """Record that every rank has filled the page."""
        page.is_ready = True

    def let_go(self, page: HostPage, *, was_used: bool = True) -> None:
        """Remove a user. After the last one the page is cached, or free if it cannot be found.

        Args:
            was_used: A request used it, so it is evicted last. Otherwise it keeps its turn.

        Raises:
            LocalProtocolError: It has no user.
        """
        if page.users < 1:
            raise LocalProtocolError(f"host page {page.number} of group {page.group} has no user to let it go")
        page.users -= 1
        if was_used:
            self.touch(page)
        if page.users:
            return
        found = self._groups[page.group]
        found.held.discard(page)
        if page.is_ready and page.page_hash is not None:
            found.cached.add(page)
        else:
            self._free(found, page)

    def discard(self, page: HostPage) -> None:
        """Drop the content of a page, which becomes free after its last user."""
        page.is_ready = False
        self.unname(page)

    def unname(self, page: HostPage) -> None:
        """Remove the page from all lookups. It becomes free now, or after its last user."""
        found = self._groups[page.group]
        if page.page_hash is not None:
            del found.by_hash[page.page_hash]
            page.page_hash = None
        if page in found.cached:
            found.cached.remove(page)
            found.free.append(page.number)

    def touch(self, page: HostPage) -> None:
        """Make the page the last to be evicted."""
        if page.page_hash is not None:
            self._groups[page.group].by_hash.move_to_end(page.page_hash)

    def forget(self, owner: str) -> None:
        """Take back the promised pages that `owner` has not taken."""
        for found in self._groups:
            found.num_promised -= found.promised.pop(owner, 0)

    def check_invariants(self) -> None:
        """Raise LocalProtocolError if an invariant of the module's docstring is broken; O(pages)."""
        for found in self._groups:
            numbers = [*found.free, *(page.number for page in (*found.cached, *found.held))]
            if sorted(numbers) != list(range(found.num_pages)):
                raise LocalProtocolError(
                    f"host pages of group {found.index} are lost or known twice: {len(numbers)} of {found.num_pages}"
                )
            if found.num_promised != sum(found.promised.values()) or found.num_spare < 0:
                raise LocalProtocolError(
                    f"{found.num_promised} host pages of group {found.index} are promised; "
                    f"{len(found.free)} are free and {len(found.cached)} cached"
                )
            if any(page.users or not page.is_ready for page in found.cached) or any(page.users < 1 for page in found.held):
                raise LocalProtocolError(f"a host page of group {found.index} is held without a user, or cached with one")
            if any(page.page_hash != known for known, page in found.by_hash.items()):
                raise LocalProtocolError(f"a host page of group {found.index} is found by a hash that it does not have")

    def check_idle(self) -> None:
        """Raise LocalProtocolError if pages are held or promised. Call it when no request and no job is left."""
        for found in self._groups:
            if found.held or found.num_promised:
                raise LocalProtocolError(
                    f"nothing is in flight, and of the host pages of group {found.index} {len(found.held)} are still held and "
                    f"{found.num_promised} promised"
                )

    def _redeem(self, found: _Group, owner: str) -> None:
        left = found.promised.get(owner, 0)
        if not left:
            raise LocalProtocolError(f"owner {owner!r} takes a host page of group {found.index}; nothing is promised to it")
        found.num_promised -= 1
        if left == 1:
            del found.promised[owner]
        else:
            found.promised[owner] = left - 1

    def _evict(self, found: _Group) -> int:
        page_hash, page = next(iter(found.by_hash.items()))
        while page not in found.cached:  # a page in use becomes the most recent one; a cached one exists
            found.by_hash.move_to_end(page_hash)
            page_hash, page = next(iter(found.by_hash.items()))
        found.cached.remove(page)
        del found.by_hash[page_hash]
        return page.number

    def _free(self, found: _Group, page: HostPage) -> None:
        if page.page_hash is not None:
            del found.by_hash[page.page_hash]
        found.free.append(page.number)
