"""Ask the store for pages, and order the ranks to put pages there and fetch them.

The leader only asks whether pages are stored. The ranks carry the bytes, each its own heads. A page counts as stored or fetched
once every rank has done its part. A late answer of the store is a miss, and nothing here delays a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage
from decode_node.offload.suspect_pages import DistrustedPages, PageName
from decode_node.rank_messages import BackUpPages, FetchPages, StoreJob
from transfer.config.storage import ANSWER_S
from transfer.storage.base import USED_STEP_NS
from transfer.storage.client import StoreClient
from transfer.storage.halving import first_false
from transfer.storage.keys import PageHashes

JOBS_AT_ONCE: Final = 2
"""Backups in flight, and fetches in flight. The store has the next job when it has finished one."""

MOST_JOB_PAGES: Final = 64
LOOKUP_FRACTION: Final = 1 / 3
"""Fraction of a fetch's time for asking the store which pages it has. The rest is for their bytes."""

PAGES_A_TURN: Final = 1024
"""Pages of a prompt that one turn of the loop looks up."""

RETRY_S: Final = 5.0
"""Pause of backups after a job of which the store stored nothing, because it is full or unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Args:
    fetch_timeout_s: Longest wait of a request for the pages of its prompt in the store.
    refresh_s: Age after which a stored page that is found in host memory is put into the store again. It then counts as used
        there: a store with a limit does not see the use of host memory, and would evict pages that are used all the time.
    job_bytes: Maximum bytes of a rank in one job.
    page_bytes: Size of a page of each group on the rank that has the largest.
    """

    fetch_timeout_s: float
    refresh_s: float
    job_bytes: int
    page_bytes: tuple[int, ...]

    def job_pages(self, group: int) -> int:
        """Return the most pages of a job."""
        return max(1, min(MOST_JOB_PAGES, self.job_bytes // max(1, self.page_bytes[group])))


@dataclass(slots=True, kw_only=True)
class _Came:
    """Progress of a fetch.

    Args:
        hashes: Fetched pages of the layers that keep every token.
        has_gap: One of those pages was not fetched.
        is_cut: There was no room for the rest.
    """

    hashes: set[bytes] = field(default_factory=set)
    has_gap: bool = False
    is_cut: bool = False


@dataclass(slots=True, kw_only=True)
class _LookupTime:
    """Deadlines of the questions about a prompt, on the loop's clock.

    The first question has all the time that the request waits, so that the client notes the silence of a store that does not
    answer. The others leave most of that time to the pages that they find.
    """

    deadline_s: float
    asks_until_s: float
    has_asked: bool = False

    def left_s(self) -> float:
        """Return the time for the question that is asked now."""
        until_s = self.asks_until_s if self.has_asked else self.deadline_s
        self.has_asked = True
        return until_s - asyncio.get_running_loop().time()


class StoreLeader:
    """See the module's docstring. Owned by the leader's loop.

    Args:
        keys_of: Returns the key of each rank's part, rank 0's first, from a group's index and a page's hash.
    """

    def __init__(
        self,
        context: TierContext,
        *,
        client: StoreClient,
        keys_of: Callable[[int, bytes], Sequence[str]],
        settings: StoreSettings,
    ) -> None:
        self._context = context
        self._tier = context.tier
        self._client = client
        self._keys_of = keys_of
        self._settings = settings
        self._most_queued = max(1, sum(self._tier.num_pages(group) for group in range(len(context.groups))))
        self._to_back_up: dict[PageName, int] = {}  # when each page's request was asked for; the oldest page first
        self._under_way: set[PageName] = set()
        self._num_backups = 0
        self._retry: asyncio.TimerHandle | None = None  # set while backups pause
        self._fetches = asyncio.Semaphore(JOBS_AT_ONCE)
        self._coming: dict[bytes, asyncio.Future[None]] = {}  # by hash, of the layers that keep every token
        self._distrusted = DistrustedPages(client, keys_of=keys_of, being_put=self._under_way)

    @property
    def num_queued(self) -> int:
        """Pages that wait to be put into the store."""
        return len(self._to_back_up)

    async def close(self) -> None:
        """Order nothing more, and close the client in bounded time."""
        self._to_back_up.clear()
        self._distrusted.close()
        if self._retry is not None:
            self._retry.cancel()
        await self._client.close()

    def _order(
        self,
        kind: type[StoreJob],
        pages: Sequence[HostPage],
        hashes: tuple[bytes, ...],
        asked_ns: int,
        done: Callable[[frozenset[int]], None],
    ) -> None:
        """Order a job with pages of one group and request. `done` gets the places of the pages that failed.

        A page counts as used when its request was asked for, and a little earlier for each page before it. So the end of a long
        prompt, which has many jobs, is evicted from the store before the beginning, without which it is useless.
        """
        order = kind(
            job=self._context.jobs.begin(done),
            group=pages[0].group,
            hashes=hashes,
            host_pages=tuple(page.number for page in pages),
            used_ns=asked_ns - pages[0].depth * USED_STEP_NS,
        )
        self._context.broadcast(order)

    # Into the store

    def back_up(self, pages: Sequence[HostPage], *, asked_ns: int) -> None:
        """Queue ready pages for the store, except those without a hash, which belong to their request alone.

        If more wait than host memory has pages, the oldest leave the queue: most of them are evicted by then.

        Args:
            asked_ns: When their request was asked for, since the epoch.
        """
        for page in pages:
            if page.page_hash is not None and self._is_to_be_stored(page) and (page.group, page.page_hash) not in self._under_way:
                self._to_back_up[page.group, page.page_hash] = asked_ns
        while len(self._to_back_up) > self._most_queued:
            self._next_name()
        self._next_backups()

    def _is_to_be_stored(self, page: HostPage) -> bool:
        if page.page_hash is None or (page.group, page.page_hash) in self._distrusted:
            return False
        return page.stored_s is None or time.monotonic() - page.stored_s > self._settings.refresh_s

    def _next_name(self) -> PageName:
        name = next(iter(self._to_back_up))
        del self._to_back_up[name]
        return name

    def _next_backups(self) -> None:
        while self._to_back_up and self._num_backups < JOBS_AT_ONCE and self._retry is None:
            (group, _), asked_ns = next(iter(self._to_back_up.items()))
            pages = self._held_for_backup(group, asked_ns)
            if pages:
                self._order_backup(pages, asked_ns)

    def _held_for_backup(self, group: int, asked_ns: int) -> list[HostPage]:
        """Hold the next pages of one group and request. Leave out pages that were evicted or cannot be held."""
        most, pages = self._settings.job_pages(group), list[HostPage]()
        while self._to_back_up and len(pages) < most:
            (next_group, _), next_asked_ns = next(iter(self._to_back_up.items()))
            if (next_group, next_asked_ns) != (group, asked_ns):
                break
            page = self._tier.find(*self._next_name())
            if page is not None and page.is_ready and self._is_to_be_stored(page) and self._tier.hold(page):
                pages.append(page)
        return pages

    def _order_backup(self, pages: list[HostPage], asked_ns: int) -> None:
        self._num_backups += 1
        hashes = _hashes(pages)
        names = [(page.group, page_hash) for page, page_hash in zip(pages, hashes, strict=True)]
        new = frozenset(place for place, page in enumerate(pages) if page.stored_s is None)  # the other pages are refreshed
        self._under_way.update(names)

        def done(failed: frozenset[int]) -> None:
            self._num_backups -= 1
            self._under_way.difference_update(names)
            left: list[PageName] = []
            damaged: list[PageName] = []
            for place, page in enumerate(pages):
                if page.page_hash is None:
                    damaged.append(names[place])  # found to be damaged meanwhile
                    page.stored_s = None
                elif place not in failed:
                    page.stored_s = time.monotonic()
                elif place in new:
                    left.append(names[place])
                self._tier.let_go(page, was_used=False)
            for outcome, places in (("stored", new - failed), ("failed", new & failed)):
                self._context.metrics.counter("offload_backups", outcome=outcome).inc(len(places))
            self.delete(damaged)
            if len(failed) == len(pages):
                self._wait_and_retry(dict.fromkeys(left, asked_ns))
            self._next_backups()

        self._order(BackUpPages, pages, hashes, asked_ns, done)

    def _wait_and_retry(self, names: dict[PageName, int]) -> None:
        """Pause backups, then begin with these. (Other pages that failed are retried when they are found again.)"""

        def resume() -> None:
            self._retry = None
            self._next_backups()

        self._to_back_up = names | self._to_back_up
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, resume)

    def delete(self, pages: Sequence[PageName]) -> None:
        """Delete damaged pages from the store.

        Until that succeeds they are not fetched, nor put again, because the store would keep the page that it has.
        """
        self._distrusted.add(pages)

    # Out of the store

    async def fetch(self, chain: PageHashes, prompt_tokens: int, *, asked_ns: int) -> frozenset[bytes]:
        """Fetch pages of a prompt that only the store has into host memory, in bounded time.

        Args:
            asked_ns: When the request was asked for, since the epoch.

        Returns:
            Hashes of the fetched pages.
        """
        came = _Came()
        hashes = chain.hashes[: (prompt_tokens - 1) // self._context.rules.page_size]
        deadline_s = asyncio.get_running_loop().time() + self._settings.fetch_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s + ANSWER_S):
                wanted = await self._wanted(hashes, prompt_tokens, deadline_s)
            async with asyncio.timeout_at(deadline_s):
                await self._bring(wanted, hashes, came, asked_ns)
        return frozenset(came.hashes)

    async def _wanted(self, hashes: Sequence[bytes], prompt_tokens: int, deadline_s: float) -> dict[int, Sequence[int]]:
        """Return, by group, the places of missing pages that are stored and extend the known beginning of the prompt.

        Args:
            hashes: Hashes of the prompt's usable pages.
        """
        known = await self._num_known(hashes)
        while known < len(hashes) and (coming := self._coming.get(hashes[known])) is not None:
            await asyncio.wait([coming])  # another request with the same beginning fetches it
            known = await self._num_known(hashes)
        asks_until_s = asyncio.get_running_loop().time() + LOOKUP_FRACTION * self._settings.fetch_timeout_s
        lookup = _LookupTime(deadline_s=deadline_s, asks_until_s=min(deadline_s, asks_until_s))
        end = known + await self._num_stored(FULL, range(known, len(hashes)), hashes, lookup)
        wanted: dict[int, Sequence[int]] = {}
        for group in self._context.windows:
            first = self._context.first_window_page(group, prompt_tokens)
            missing = [place for place in range(first, end) if not self._is_ready(group, hashes[place])]
            num_stored = await self._num_stored(group, missing, hashes, lookup)
            if num_stored < len(missing):
                end = missing[num_stored]
            wanted[group] = missing[:num_stored]
        known = await self._num_known(hashes)
        for group in (*self._context.windows, FULL):  # the known pages are evicted after those that make room for the rest
            for place in reversed(range(known)):
                if (page := self._tier.find(group, hashes[place])) is not None:
                    self._tier.touch(page)
                if not place % PAGES_A_TURN:
                    await asyncio.sleep(0)
        room = max(0, self._tier.spare(FULL) - known)
        return {FULL: range(known, max(known, min(end, known + room))), **wanted}

    async def _bring(self, wanted: dict[int, Sequence[int]], hashes: Sequence[bytes], came: _Came, asked_ns: int) -> None:
        """Order fetches, the first pages first and few jobs at once, until there is a gap or no room."""
        orders: list[asyncio.Future[None]] = []
        for group, of_group in wanted.items():
            size = self._settings.job_pages(group)
            for begin in range(0, len(of_group), size):
                await self._fetches.acquire()
                pages = None if came.has_gap else self._taken(group, of_group[begin : begin + size], hashes, came)
                if pages:
                    orders.append(self._order_fetch(pages, came, asked_ns))
                    continue
                self._fetches.release()
                if pages is None:
                    break
        if orders:
            await asyncio.wait(orders)

    def _taken(self, group: int, wanted: Sequence[int], hashes: Sequence[bytes], came: _Came) -> list[HostPage] | None:
        """Take host pages for missing pages, until there is no room or a damaged page. None means that not even one was taken."""
        pages: list[HostPage] = []
        for place in wanted:
            if (group, hashes[place]) in self._distrusted:
                return pages or None
            if self._tier.find(group, hashes[place]) is None:
                page = self._tier.take(group, hashes[place], depth=place)
                if page is None:
                    if not came.is_cut:
                        came.is_cut = True
                        self._context.count_host_full()
                    return pages or None
                pages.append(page)
        return pages

    def _order_fetch(self, pages: list[HostPage], came: _Came, asked_ns: int) -> asyncio.Future[None]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hashes = _hashes(pages)

        def done(failed: frozenset[int]) -> None:
            self._fetches.release()
            for place, page in reversed(list(enumerate(pages))):
                if page.group == FULL:
                    self._coming.pop(hashes[place], None)
                if place in failed or page.page_hash is None:  # no hash: found to be damaged meanwhile
                    self._tier.discard(page)
                    came.has_gap = came.has_gap or page.group == FULL
                else:
                    page.stored_s = time.monotonic()
                    self._tier.ready(page)
                    if page.group == FULL:
                        came.hashes.add(hashes[place])
                self._tier.let_go(page)
            over.set_result(None)

        if pages[0].group == FULL:
            self._coming |= dict.fromkeys(hashes, over)
        self._order(FetchPages, pages, hashes, asked_ns, done)
        return over

    def _is_ready(self, group: int, page_hash: bytes) -> bool:
        page = self._tier.find(group, page_hash)
        return page is not None and page.is_ready

    async def _num_known(self, hashes: Sequence[bytes]) -> int:
        return await _first(lambda place: not self._is_ready(FULL, hashes[place]), len(hashes))

    async def _num_stored(self, group: int, places: Sequence[int], hashes: Sequence[bytes], lookup: _LookupTime) -> int:
        """Return how many leading pages the store has, by rank 0's part.

        Search by halving: the pages before a stored page are nearly always stored, and otherwise the ranks notice.
        """

        async def has(number: int) -> bool:
            key, left_s = self._keys_of(group, hashes[places[number]])[0], lookup.left_s()
            return left_s > 0 and (await self._client.exists([key], timeout_s=left_s))[0]

        num_trusted = len(places)
        if len(self._distrusted):
            num_trusted = await _first(lambda number: (group, hashes[places[number]]) in self._distrusted, len(places))
        return await first_false(has, num_trusted)


async def _first(is_it: Callable[[int], bool], end: int) -> int:
    """Return the first number below `end` for which the test is true, or `end`. Long prompts take several turns of the loop."""
    for begin in range(0, end, PAGES_A_TURN):
        if begin:
            await asyncio.sleep(0)
        found = next(filter(is_it, range(begin, min(end, begin + PAGES_A_TURN))), None)
        if found is not None:
            return found
    return end


def _hashes(pages: Sequence[HostPage]) -> tuple[bytes, ...]:
    found = tuple(page.page_hash for page in pages if page.page_hash is not None)
    assert len(found) == len(pages)
    return found
