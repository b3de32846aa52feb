"""What the leader asks of the store, and what it has the ranks put there and bring from there.

The leader only asks whether pages are there; the ranks carry the bytes, each its own heads. A page counts as stored, or as
brought, once every rank has done its part. What the store does not answer in time is a miss, and nothing here holds up a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage
from decode_node.rank_messages import BackUpPages, FetchPages
from transfer.storage.client import StoreClient
from transfer.storage.keys import PageHashes

MAX_BACKUPS: Final = 2
"""Jobs of `JOB_PAGES` that the ranks are putting into the store at once."""

JOB_PAGES: Final = 64
LOOKUP_PAGES: Final = 256
"""Pages that the store is asked for at a time: a long prompt of which it has nothing costs one question."""


class StoreLeader:
    """See the module's docstring; owned by the leader's loop.

    Args:
        context: Index, jobs and ranks.
        client: To ask with.
        key_of: From a group's index and a page's hash, the key of rank 0's part.
    """

    def __init__(self, context: TierContext, *, client: StoreClient, key_of: Callable[[int, bytes], str]) -> None:
        self._context = context
        self._tier = context.tier
        self._client = client
        self._key_of = key_of
        self._to_back_up: deque[tuple[int, bytes]] = deque()
        self._num_backups = 0
        self._coming: dict[
            bytes, asyncio.Future[None]
        ] = {}  # by hash of what is being fetched of the layers that keep every token

    @property
    def num_queued(self) -> int:
        """Pages that wait to be put into the store."""
        return len(self._to_back_up)

    # Into the store

    def back_up(self, pages: Sequence[HostPage]) -> None:
        """Have pages, which are ready, put into the store when there is time; those of no hash are their request's alone."""
        self._to_back_up += [(page.group, page.page_hash) for page in pages if page.page_hash is not None and not page.is_stored]
        self._next_backups()

    def _next_backups(self) -> None:
        while self._to_back_up and self._num_backups < MAX_BACKUPS:
            pages = self._held_for_backup()
            if pages:
                self._order_backup(pages)

    def _held_for_backup(self) -> list[HostPage]:
        """The next pages of one group; what has been evicted meanwhile, or cannot be held now, is not stored."""
        group = self._to_back_up[0][0]
        pages: list[HostPage] = []
        while self._to_back_up and self._to_back_up[0][0] == group and len(pages) < JOB_PAGES:
            page = self._tier.find(*self._to_back_up.popleft())
            if page is not None and page.is_ready and not page.is_stored and self._tier.hold(page):
                pages.append(page)
        return pages

    def _order_backup(self, pages: list[HostPage]) -> None:
        self._num_backups += 1

        def done(failed: frozenset[int]) -> None:
            self._num_backups -= 1
            for place, page in enumerate(pages):
                page.is_stored = place not in failed
                self._tier.let_go(page)
            self._context.observer.backed_up(len(pages) - len(failed), len(failed))
            self._next_backups()

        job = self._context.jobs.begin(done)
        self._context.broadcast(
            BackUpPages(job=job, group=pages[0].group, hashes=_hashes(pages), host_pages=tuple(page.number for page in pages))
        )

    # Out of the store

    async def fetch(self, chain: PageHashes, prompt_tokens: int) -> frozenset[bytes]:
        """See `OffloadLeader.fetch`."""
        most = (prompt_tokens - 1) // self._context.rules.page_size
        hashes = chain.hashes[:most]
        known = self._num_known(hashes)
        while known < most and (coming := self._coming.get(hashes[known])) is not None:
            await asyncio.wait([coming])  # for another request of the same beginning
            known = self._num_known(hashes)
        end = known + await self._num_stored(FULL, hashes[known:])
        wanted = {FULL: hashes[known:end]}
        for group in self._context.windows:
            first = self._context.first_window_page(group, prompt_tokens)
            reached = hashes[first:end]
            missing = [page_hash for page_hash in reached if not self._is_ready(group, page_hash)]
            num_stored = await self._num_stored(group, missing)
            if num_stored < len(missing):
                end = first + reached.index(missing[num_stored])
            wanted[group] = missing[:num_stored]
        wanted[FULL] = wanted[FULL][: max(0, end - known)]
        return await self._bring(wanted)

    async def _bring(self, wanted: dict[int, list[bytes]]) -> frozenset[bytes]:
        """Have the ranks fill host pages; as many as there is room for."""
        jobs: list[asyncio.Future[None]] = []
        came: set[bytes] = set()
        for group, hashes in wanted.items():
            pages: list[HostPage] = []
            for page_hash in hashes:
                if self._tier.find(group, page_hash) is None:
                    page = self._tier.take(group, page_hash)
                    if page is None:
                        self._context.observer.host_full()
                        break
                    pages.append(page)
            jobs += [self._order_fetch(pages[at : at + JOB_PAGES], came) for at in range(0, len(pages), JOB_PAGES)]
        if jobs:
            await asyncio.wait(jobs)
        return frozenset(came)

    def _order_fetch(self, pages: list[HostPage], came: set[bytes]) -> asyncio.Future[None]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hashes = _hashes(pages)

        def done(failed: frozenset[int]) -> None:
            for place, page in reversed(list(enumerate(pages))):
                if page.group == FULL:
                    self._coming.pop(hashes[place], None)
                if place in failed:
                    self._tier.discard(page)
                else:
                    page.is_stored = True
                    self._tier.ready(page)
                    if page.group == FULL:
                        came.add(hashes[place])
                self._tier.let_go(page)
            over.set_result(None)

        job = self._context.jobs.begin(done)
        if pages[0].group == FULL:
            self._coming |= dict.fromkeys(hashes, over)
        self._context.broadcast(
            FetchPages(job=job, group=pages[0].group, hashes=hashes, host_pages=tuple(page.number for page in pages))
        )
        return over

    def _is_ready(self, group: int, page_hash: bytes) -> bool:
        page = self._tier.find(group, page_hash)
        return page is not None and page.is_ready

    def _num_known(self, hashes: Sequence[bytes]) -> int:
        return next((place for place, one in enumerate(hashes) if not self._is_ready(FULL, one)), len(hashes))

    async def _num_stored(self, group: int, hashes: Sequence[bytes]) -> int:
        """How many of the first pages the store has, without a gap."""
        found = 0
        while found < len(hashes):
            asked = hashes[found : found + LOOKUP_PAGES]
            answers = await self._client.exists([self._key_of(group, one) for one in asked])
            num_there = next((place for place, is_there in enumerate(answers) if not is_there), len(answers))
            found += num_there
            if num_there < len(asked):
                break
        return found


def _hashes(pages: Sequence[HostPage]) -> tuple[bytes, ...]:
    found = tuple(page.page_hash for page in pages if page.page_hash is not None)
    assert len(found) == len(pages)
    return found
