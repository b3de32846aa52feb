"""What a leader asks of the store, and in what portions: with ranks and a store by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from decode_node.offload import store_leader as store_leader_module
from decode_node.offload.context import FULL
from decode_node.offload.host_tier import HostPage
from decode_node.offload.store_leader import ANSWER_S, JOBS_AT_ONCE, RETRY_S, StoreLeader, StoreSettings
from decode_node.offload.suspect_pages import RETRY_S as DELETE_AGAIN_S
from decode_node.rank_messages import StoreJob
from tests.decode.leader_world import turns
from tests.offload.tier_contexts import tier_context
from tests.runtime.hand_clock import HandClock
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout
from transfer.storage.base import USED_STEP_NS
from transfer.storage.client import StoreClient
from transfer.storage.keys import PageHashes

PAGE = 2
NOW_NS = 10**18
"""When requests are asked for."""
GROUPS = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))


class Store:
    """The leader's client: has every key, unless told otherwise, and takes `seconds` for each question."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.deleted: list[str] = []
        self.stuck: set[str] = set()  # and cannot be deleted
        self.seconds = 0.0
        self.num_asked = self.num_answered = self.num_keys = 0

    async def exists(self, keys: Sequence[str], *, timeout_s: float) -> list[bool]:
        self.num_asked += 1
        self.num_keys += len(keys)
        await asyncio.sleep(min(self.seconds, timeout_s))
        self.num_answered += 1
        return [key not in self.missing and self.seconds < timeout_s for key in keys]

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        self.deleted += keys
        return [key not in self.stuck for key in keys]

    async def close(self) -> None:
        pass


class Leader:
    def __init__(self, *, host_pages: int = 100, page_bytes: int = 10, timeout_s: float = 5.0) -> None:
        self.sent: list[StoreJob] = []
        self.store = Store()
        context = tier_context(
            GROUPS,
            device_pages=(8,),
            host_pages=(host_pages,),
            page_size=PAGE,
            broadcast=lambda message: self.sent.append(cast(StoreJob, message)),
        )
        self.tier, self.jobs = context.tier, context.jobs
        self.leader = StoreLeader(
            context,
            client=cast(StoreClient, self.store),
            keys_of=lambda group, page_hash: [f"{page_hash.hex()}-{rank}" for rank in range(2)],
            settings=StoreSettings(fetch_timeout_s=timeout_s, refresh_s=60.0, job_bytes=40, page_bytes=(page_bytes,)),
        )

    def ready(self, chain: PageHashes, count: int) -> list[HostPage]:
        """The chain's first pages, cached in host memory."""
        pages = []
        for depth, page_hash in enumerate(chain.hashes[:count]):
            page = self.tier.take(FULL, page_hash, depth=depth)
            assert page is not None
            self.tier.ready(page)
            pages.append(page)
        for page in reversed(pages):
            self.tier.let_go(page)
        return pages

    def fetch(self, chain: PageHashes, prompt_tokens: int) -> Coroutine[Any, Any, frozenset[bytes]]:
        return self.leader.fetch(chain, prompt_tokens, asked_ns=NOW_NS)

    def back_up(self, pages: Sequence[HostPage], *, asked_ns: int = NOW_NS) -> None:
        self.leader.back_up(pages, asked_ns=asked_ns)

    def answer(self, *, failed: tuple[int, ...] = ()) -> StoreJob:
        message = self.sent.pop(0)
        self.jobs.done(0, message.job, failed)
        return message


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock(monkeypatch, store_leader_module)


def chain_of(num_pages: int) -> PageHashes:
    chain = PageHashes(page_size=PAGE, seed=b"s" * 32)
    chain.extend(range(num_pages * PAGE))
    return chain


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


async def test_jobs_are_as_large_as_the_queue_takes_and_few_at_a_time() -> None:
    one = Leader(page_bytes=10)  # four to a job
    one.back_up(one.ready(chain_of(20), 20))
    assert [len(message.hashes) for message in one.sent] == [4] * JOBS_AT_ONCE
    stored = 0
    while one.sent:
        stored += len(one.answer().hashes)
        assert len(one.sent) <= JOBS_AT_ONCE
    assert stored == 20 and one.leader.num_queued == 0
    one.tier.check_idle()
    large = Leader(page_bytes=1000)
    large.back_up(large.ready(chain_of(2), 2))
    assert [len(message.hashes) for message in large.sent] == [1, 1], "a page larger than a job's bytes is a job"


async def test_failed_pages_are_stored_again(clock: HandClock) -> None:
    one = Leader()
    pages = one.ready(chain_of(2), 2)
    one.back_up(pages)
    one.answer(failed=(1,))
    assert (pages[0].stored_s is not None, pages[1].stored_s, one.sent) == (True, None, [])
    one.back_up(pages)  # it is found again
    one.answer(failed=(0,))
    one.back_up(one.ready(chain_of(9), 9)[:0])
    assert not one.sent and one.leader.num_queued == 1, "a store that takes nothing gets nothing for a while"
    await clock.advance(RETRY_S)
    assert one.answer().hashes == (pages[1].page_hash,)
    assert pages[1].stored_s is not None and not one.sent
    await one.leader.close()


async def test_what_is_found_in_host_memory_counts_as_used_in_the_store_now_and_then(clock: HandClock) -> None:
    one = Leader()
    pages = one.ready(chain_of(2), 2)
    one.back_up(pages)
    one.answer()
    one.back_up(pages)
    assert not one.sent, "they have just been stored"
    await clock.advance(61.0)
    one.back_up(pages)
    assert list(one.answer().hashes) == chain_of(2).hashes[:2]
    one.back_up(pages)
    assert not one.sent


async def test_a_prompt_counts_as_used_when_it_was_asked_for_its_end_a_little_earlier() -> None:
    """In however many jobs it comes, and however long they take."""
    one = Leader()
    chain = chain_of(8)
    fetching = asyncio.ensure_future(one.fetch(chain, 17))
    await until(lambda: len(one.sent) == 2)
    expected = [NOW_NS, NOW_NS - 4 * USED_STEP_NS]
    assert [one.answer().used_ns for _ in range(2)] == expected
    await fetching
    other = Leader()
    pages = other.ready(chain, 8)
    other.back_up(pages[:4])
    other.back_up(pages[4:])
    assert [other.answer().used_ns for _ in range(2)] == expected


async def test_pages_that_turn_out_to_be_damaged_on_their_way_are_found_nowhere() -> None:
    one = Leader()
    chain = chain_of(3)
    fetching = asyncio.ensure_future(one.fetch(chain, 6))
    while not one.sent:
        await asyncio.sleep(0)
    coming = one.tier.find(FULL, chain.hashes[0])
    assert coming is not None
    one.tier.unname(coming)
    one.answer()
    assert await fetching == {chain.hashes[1]}
    one.tier.check_idle()
    one.tier.check_invariants()


def back_up_one_after_the_other(one: Leader, chain: PageHashes, *, most: int) -> None:
    """Back up the pages of a chain, which is longer than host memory."""
    for page_hash in chain.hashes:
        page = one.tier.take(FULL, page_hash)
        assert page is not None
        one.tier.ready(page)
        one.tier.let_go(page)
        one.back_up([page])
        assert one.leader.num_queued <= most


async def test_the_queue_is_bounded_and_its_oldest_go() -> None:
    one = Leader(host_pages=10, page_bytes=40)  # one to a job
    chain = chain_of(30)
    back_up_one_after_the_other(one, chain, most=10)
    stored = []
    while one.sent:
        stored += one.answer().hashes
    assert stored == chain.hashes[:JOBS_AT_ONCE] + chain.hashes[20 + JOBS_AT_ONCE :], "and of them what was not evicted"


async def test_a_prompt_is_fetched_in_order_a_few_jobs_at_a_time() -> None:
    one = Leader()
    chain = chain_of(21)
    fetching = asyncio.ensure_future(one.fetch(chain, 42))
    begin = 0
    while not fetching.done():
        await asyncio.sleep(0)
        assert len(one.sent) <= JOBS_AT_ONCE
        if one.sent:
            message = one.answer()
            assert list(message.hashes) == chain.hashes[begin : begin + 4]
            begin += 4
    assert await fetching == frozenset(chain.hashes[:20]), "one token is left to be computed"
    one.tier.check_idle()


async def test_a_request_waits_for_the_store_so_long_and_no_longer(clock: HandClock) -> None:
    async def fetched(one: Leader) -> tuple[frozenset[bytes], float]:
        """What a fetch brings whose first job is answered, and the time that it takes."""
        begun_s, fetching, is_answered = clock.now_s, asyncio.ensure_future(one.fetch(chain_of(20), 40)), False
        while not fetching.done():
            await turns()
            if one.sent and not is_answered:
                is_answered = bool(one.answer())
            await clock.advance(0.01)
        return await fetching, clock.now_s - begun_s

    one = Leader(timeout_s=3.0)
    one.store.seconds = 60.0
    came, seconds = await fetched(one)
    assert not came and seconds <= 3.0 + ANSWER_S
    assert one.store.num_asked == one.store.num_answered == 1, "the client notes the store's silence, it is not cut off"
    slow = Leader(timeout_s=3.0)
    came, seconds = await fetched(slow)
    assert len(came) == 4, "what has come is of use"
    assert 2.9 < seconds < 3.1
    for _ in range(len(slow.sent)):
        slow.answer()
    slow.tier.check_idle()


async def test_of_a_long_prompt_few_pages_are_asked_for() -> None:
    """An object store answers for one after the other, by tens of milliseconds each."""
    chain = chain_of(300)
    for num_stored in (0, 1, 137, 299, 300):
        one = Leader(host_pages=400)
        one.store.missing = {f"{page_hash.hex()}-0" for page_hash in chain.hashes[num_stored:]}
        fetching = asyncio.ensure_future(one.fetch(chain, 601))
        while not fetching.done():
            await asyncio.sleep(0)
            for _ in range(len(one.sent)):
                one.answer()
        assert await fetching == frozenset(chain.hashes[:num_stored])
        assert one.store.num_keys <= 11, "the first, the last, and by halving"


async def test_what_cannot_be_deleted_is_not_fetched_and_asked_for_again(clock: HandClock) -> None:
    one = Leader()
    chain = chain_of(6)
    one.store.stuck = {f"{chain.hashes[2].hex()}-1"}
    one.leader.delete([(FULL, page_hash) for page_hash in chain.hashes[:5]])
    await turns()
    assert one.store.deleted == [f"{page_hash.hex()}-{rank}" for page_hash in chain.hashes[:5] for rank in range(2)]
    fetching = asyncio.ensure_future(one.fetch(chain, 13))
    await until(lambda: bool(one.sent))
    assert list(one.answer().hashes) == chain.hashes[:2], "neither a damaged page nor what is behind it"
    assert await fetching == frozenset(chain.hashes[:2])
    one.back_up(one.ready(chain, 3)[2:])
    assert not one.sent and not one.leader.num_queued, "the store would take what it has for this page"
    one.store.stuck.clear()
    await clock.advance(DELETE_AGAIN_S)
    page = one.tier.find(FULL, chain.hashes[2])
    assert page is not None
    one.back_up([page])
    assert one.answer().hashes == (chain.hashes[2],)
    await one.leader.close()


async def test_a_page_that_is_stored_during_its_deletion_is_deleted_again() -> None:
    one = Leader()
    (page,) = one.ready(chain_of(1), 1)
    one.back_up([page])
    one.tier.unname(page)
    one.leader.delete([(FULL, chain_of(1).hashes[0])])
    await turns()
    assert len(one.store.deleted) == 2
    again = one.ready(chain_of(1), 1)
    one.back_up(again)
    assert not one.leader.num_queued, "it may be put after that"
    one.answer()
    await turns()
    assert len(one.store.deleted) == 4
    one.back_up(again)
    assert len(one.sent) == 1, "the store has it no longer"
    await one.leader.close()
