"""The front of a store: whatever the store does, callers get an answer by the deadline, and their memory back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.storage.stores import MemoryStore, Seen, file_of, key_of, page_of
from transfer.breaker import BreakerSettings, BreakerState
from transfer.storage.base import USED_STEP_NS, Outcome, Store
from transfer.storage.client import CLOSE_S, JOB_BYTES, JOB_KEYS, SILENT_FRACTION, StoreClient, StoreClientSettings
from transfer.storage.directory import DirectoryStore

BREAKER = BreakerSettings(failures=3, window_s=600.0, pause_s=5.0, max_pause_s=20.0)
AT_ONCE = BreakerSettings(failures=1, window_s=600.0, pause_s=60.0, max_pause_s=60.0)
NEVER = BreakerSettings(failures=1 << 30, window_s=60.0, pause_s=1.0, max_pause_s=1.0)
TIMEOUT_S = 60.0

SETTINGS: dict[str, Any] = {
    "put_timeout_s": TIMEOUT_S,
    "get_timeout_s": TIMEOUT_S,
    "queue_bytes": 1 << 20,
    "threads": 2,
    "breaker": BREAKER,
}


class Clock:
    """Time of the client and of its loop, which passes only when a test changes it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def run_out(self, call: Coroutine[Any, Any, list[bool]], time_s: float = TIMEOUT_S) -> list[bool]:
        """Begin a call, let that time pass, and return its answer."""
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        self.now_s += time_s
        return await task


@asynccontextmanager
async def opened(store: Store, **changed: Any) -> AsyncIterator[tuple[StoreClient, Seen, Clock]]:
    """A client of that store, which is closed at the end."""
    loop, seen, clock = asyncio.get_running_loop(), Seen(), Clock()
    loop.time = clock  # type: ignore[method-assign]
    client = StoreClient(store, loop=loop, settings=StoreClientSettings(**SETTINGS | changed), observer=seen, clock=clock)
    try:
        yield client, seen, clock
    finally:
        if isinstance(store, MemoryStore):
            store.gate.set()
        await client.close()


async def asked(store: MemoryStore) -> None:
    """Wait until a thread has called the store."""
    assert await asyncio.to_thread(store.entered.acquire, timeout=60)


def page(*numbers: int) -> memoryview:
    return memoryview(bytearray(numbers))


async def test_stored_pages_are_read_back() -> None:
    async with opened(MemoryStore()) as (client, seen, _):
        assert await client.put([("a", page(1, 2)), ("b", page(3, 4, 5))]) == [True, True]
        views = [page(0, 0), page(9, 9), page(0, 0, 0)]
        assert await client.get(list(zip("acb", views, strict=True))) == [True, False, True]
        assert [bytes(view) for view in views] == [b"\1\2", b"\t\t", b"\3\4\5"]  # that of the miss is untouched
        assert await client.exists("abc") == [True, True, False]
        assert await client.delete("ac") == [True, True], "that of a key that is not there is no failure"
        assert await client.exists("abc") == [False, True, False]
        assert (client.num_queued, client.state, client.name) == (0, BreakerState.CLOSED, "memory")
        ok, missing = Outcome.OK, Outcome.MISSING
        assert seen.operations[:3] == [("put", (ok, ok)), ("get", (ok, missing, ok)), ("exists", (ok, ok, missing))]
        assert seen.num_bytes == 10  # five put, five got; keys are none
        assert seen.depths[-1] == 0 and max(seen.depths) == 3


async def test_a_large_call_is_spread_over_the_threads() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=3, queue_bytes=1 << 30) as (client, _, _):
        pages = [(str(index), memoryview(bytes(JOB_BYTES // 2))) for index in range(6)]
        call = asyncio.create_task(client.put(pages))
        for _ in range(3):
            await asked(store)
        store.gate.set()
        assert await call == [True] * 6
        assert store.num_calls == 3
        assert await client.exists([str(index) for index in range(JOB_KEYS + 1)]) == [True] * 6 + [False] * (JOB_KEYS - 5)
        assert store.num_calls == 5


OPERATIONS: dict[str, Callable[[StoreClient, memoryview], Coroutine[Any, Any, list[bool]]]] = {
    "put": lambda client, view: client.put([("a", view)]),
    "get": lambda client, view: client.get([("a", view)]),
    "exists": lambda client, view: client.exists(["a"]),
    "delete": lambda client, view: client.delete(["a"]),
}


@pytest.mark.parametrize("op", OPERATIONS)
async def test_a_store_that_hangs_is_not_waited_for(op: str) -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store) as (client, seen, clock):
        assert await clock.run_out(OPERATIONS[op](client, page(1))) == [False]
        assert seen.operations == [(op, (Outcome.TIMEOUT,))]
        assert client.num_queued == 0


@pytest.mark.parametrize("left_s", [0.05, 0.0, -1.0])
async def test_a_store_that_hangs_is_blamed_by_callers_that_have_little_time_too(left_s: float) -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=1) as (client, seen, clock):
        stuck = asyncio.create_task(client.get([("a", page(1))]))
        await asked(store)
        for _ in range(BREAKER.failures):
            assert await clock.run_out(client.get([("a", page(1))], timeout_s=left_s), 0.05) == [False]
        assert client.state is BreakerState.CLOSED, "so little time is the call's own affair"
        clock.now_s += SILENT_FRACTION * TIMEOUT_S
        for _ in range(BREAKER.failures):
            assert client.state is BreakerState.CLOSED
            assert await clock.run_out(client.get([("a", page(1))], timeout_s=left_s), 0.05) == [False]
        assert client.state is BreakerState.OPEN
        assert await client.exists(["a"], timeout_s=60.0) == [False]
        assert seen.operations[0] == ("get", (Outcome.TIMEOUT,))
        store.gate.set()
        assert await stuck == [False]


async def test_a_store_that_answers_others_meanwhile_is_not_blamed() -> None:
    """Calls wait behind each other, and the store answers one after the other."""
    store = MemoryStore()
    store.pages = {"a": b"\7"}
    store.gate.clear()
    async with opened(store, threads=1, breaker=AT_ONCE) as (client, _, clock):
        first, second = (asyncio.create_task(client.get([("a", page(0))])) for _ in range(2))
        await asked(store)
        clock.now_s += 0.4 * TIMEOUT_S
        store.hang_after = 0
        store.gate.set()
        assert await first == [True]
        await asked(store)
        assert await clock.run_out(client.get([("a", page(0))], timeout_s=1.0), 0.4 * TIMEOUT_S) == [False]
        assert client.state is BreakerState.CLOSED, "it was never silent for half of the usual time"
        assert await clock.run_out(client.get([("a", page(0))], timeout_s=1.0), 0.1 * TIMEOUT_S) == [False]
        assert client.state is BreakerState.OPEN
        store.gate.set()
        assert await second == [True]


async def test_a_view_is_untouched_after_the_deadline() -> None:
    """The thread that hangs in `get` returns with bytes after the caller has reused the view."""
    store = MemoryStore()
    store.pages["a"] = b"\7\7"
    store.gate.clear()
    async with opened(store) as (client, _, clock):
        view = page(0, 0)
        call = asyncio.create_task(client.get([("a", view)]))
        await asked(store)
        clock.now_s += TIMEOUT_S
        assert await call == [False]
        store.gate.set()
        await client.close()  # the threads have ended, so the late one is through
        assert bytes(view) == b"\0\0"


async def test_a_put_past_its_deadline_stores_what_it_was_given() -> None:
    """What its caller writes into the page after the deadline must not get into the store."""
    store = MemoryStore()
    store.gate.clear()
    async with opened(store) as (client, _, clock):
        view = page(1, 2)
        call = asyncio.create_task(client.put([("a", view)]))
        await asked(store)
        clock.now_s += TIMEOUT_S
        assert await call == [False]
        view[:] = b"\xff\xff"
        store.gate.set()
        await client.close()
        assert store.pages == {"a": b"\1\2"}


async def test_a_call_that_still_waits_at_its_deadline_is_never_begun() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=1) as (client, _, clock):
        first = asyncio.create_task(client.put([("a", page(1))]))
        await asked(store)
        assert await clock.run_out(client.put([("b", page(1))])) == [False]
        assert await first == [False]
        store.gate.set()
        await client.close()
        assert set(store.pages) == {"a"}


async def test_a_caller_that_is_cancelled_gets_its_views_back_at_once() -> None:
    store = MemoryStore()
    store.pages["a"] = b"\7"
    store.gate.clear()
    async with opened(store) as (client, seen, _):
        view = page(0)
        call = asyncio.create_task(client.get([("a", view)]))
        await asked(store)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.num_queued == 0 and client.state is BreakerState.CLOSED
        store.gate.set()
        await client.close()
        assert bytes(view) == b"\0"
        assert not seen.operations


async def test_deadlines_race_with_answers_and_each_view_is_whole_or_untouched() -> None:
    """In real time, with deadlines that fall anywhere into the answers."""
    loop, store, size = asyncio.get_running_loop(), MemoryStore(), 1 << 16
    store.pages = {str(index): bytes([index + 1]) * size for index in range(8)}
    settings = StoreClientSettings(**SETTINGS | {"threads": 4, "queue_bytes": 1 << 30, "breaker": NEVER})
    client = StoreClient(store, loop=loop, settings=settings, observer=Seen())
    for number in range(101):
        views = [memoryview(bytearray(size)) for _ in range(8)]
        pages = [(str(index), view) for index, view in enumerate(views)]
        answers = await client.get(pages, timeout_s=2e-4 * (number % 10) if number < 100 else None)
        returned = [bytes(view) for view in views]
        await asyncio.sleep(0.001)
        assert returned == [bytes(view) for view in views]
        assert returned == [bytes([index + 1 if answer else 0]) * size for index, answer in enumerate(answers)]
    assert all(answers), "without a deadline"
    await client.close()


async def test_an_error_of_the_store_is_a_miss_of_every_page() -> None:
    store = MemoryStore()
    store.error = OSError(28, "No space left on device")
    async with opened(store) as (client, seen, _):
        for op, call in OPERATIONS.items():
            assert await call(client, page(1)) == [False]
            assert seen.operations[-1] == (op, (Outcome.FAILED,))
        store.error = ValueError("a bug of the store")
        assert await client.exists(["a"]) == [False]


@pytest.mark.parametrize("used_ns", [None, 10**18])
async def test_the_beginning_of_a_call_is_its_newest_part_whichever_threads_share_it(tmp_path: Path, used_ns: int | None) -> None:
    numbers = range(3 * JOB_KEYS)
    async with opened(DirectoryStore(tmp_path), threads=4) as (client, _, _):
        for call in (client.put, client.get):
            pages = [(key_of(number), memoryview(bytearray(page_of(number, 64)))) for number in numbers]
            assert await call(pages, used_ns=used_ns) == [True] * len(numbers)
            times = [file_of(tmp_path, key).stat().st_mtime_ns for key, _ in pages]
            assert times == [times[0] - index * USED_STEP_NS for index in numbers]
            assert used_ns in (None, times[0])


async def test_pages_that_do_not_fit_the_queue_are_refused_and_the_first_pages_go_first() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, queue_bytes=10) as (client, seen, _):
        first = asyncio.create_task(client.put([(key, page(1, 2, 3, 4)) for key in "abc"]))
        await asked(store)
        assert client.num_queued == 2
        assert await client.put([("d", page(1, 2, 3))]) == [False]
        assert seen.operations == [("put", (Outcome.REFUSED,))]
        store.gate.set()
        assert await first == [True, True, False]
        assert await client.put([("d", page(1, 2, 3))]) == [True]  # there is room again
        assert set(store.pages) == {"a", "b", "d"}


async def test_a_page_larger_than_the_queue_is_let_in_alone() -> None:
    async with opened(MemoryStore(), queue_bytes=2) as (client, _, _):
        assert await client.put([("a", page(1, 2, 3)), ("b", page(1))]) == [True, False]
        assert await client.exists(["a"]) == [True]
        for _ in range(2 * BREAKER.failures):
            assert await client.exists(["a", "c"]) == [True, False]
        assert client.state is BreakerState.CLOSED, "refusals and misses do not open the circuit"


async def test_the_circuit_opens_and_closes_again() -> None:
    store = MemoryStore()
    store.error = OSError("gone")
    async with opened(store) as (client, seen, clock):
        for _ in range(BREAKER.failures):
            assert client.state is BreakerState.CLOSED
            await client.get([("a", page(0))])
        assert client.state is BreakerState.OPEN
        store.error, calls = None, store.num_calls
        assert await client.get([("a", page(0))]) == [False]
        assert await client.exists(["a"]) == [False]
        assert store.num_calls == calls  # it is left alone
        assert seen.operations[-1] == ("exists", (Outcome.CIRCUIT_OPEN,))
        assert seen.circuits[-1] == ("open", "closed")

        clock.now_s += BREAKER.pause_s
        assert client.state is BreakerState.HALF_OPEN
        assert await client.get([("a", page(0))]) == [False]  # a miss, and an answer
        assert seen.operations[-1] == ("get", (Outcome.MISSING,))
        assert client.state is BreakerState.CLOSED
        assert seen.circuits[-1] == ("closed", "closed")


async def test_a_store_that_cannot_be_written_can_be_read_and_deleted_from() -> None:
    """A full disk: the pages that are there are as good as ever, and damaged ones have to go."""
    store = MemoryStore()
    store.pages["a"] = b"\5"
    store.failing = {"b"}
    async with opened(store) as (client, seen, _):
        for _ in range(BREAKER.failures):
            assert await client.put([("b", page(1))]) == [False]
        assert client.state is BreakerState.OPEN
        assert await client.put([("c", page(1))]) == [False]
        assert seen.operations[-1] == ("put", (Outcome.CIRCUIT_OPEN,))
        assert await client.get([("a", page(0))]) == [True]
        assert seen.circuits[-1] == ("closed", "open")
        assert await client.delete(["a"]) == [True] and not store.pages


async def test_pages_that_cannot_be_put_block_neither_reads_nor_deletes() -> None:
    """Neither their threads nor their room in the queue are those of others."""
    store = MemoryStore()
    store.pages["a"], store.gated = b"\5", {"put"}
    async with opened(store, queue_bytes=4, threads=1) as (client, _, _):
        store.gate.clear()
        puts = [asyncio.create_task(client.put([(key, page(1, 2, 3, 4))])) for key in "xy"]
        await asked(store)
        assert client.num_queued == 1, "the second was refused"
        for _ in range(4):
            assert await client.get([("a", page(0))]) == [True]
        assert await client.delete(["a"]) == [True]
        store.gate.set()
        assert await asyncio.gather(*puts) == [[True], [False]]


async def test_close_answers_everything_and_does_not_wait_for_a_store_that_hangs() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store) as (client, seen, clock):
        call = asyncio.create_task(client.exists(["a"]))
        await asked(store)
        closing = asyncio.create_task(client.close())
        assert await call == [False]
        clock.now_s += CLOSE_S
        await closing
        assert await client.put([("a", page(1))]) == [False]
        assert {outcomes for _, outcomes in seen.operations} == {(Outcome.REFUSED,)}
        assert client.state is BreakerState.CLOSED


async def test_close_waits_for_the_store_and_ends_the_threads() -> None:
    before = set(threading.enumerate())  # others' may end meanwhile, and are none of ours
    async with opened(MemoryStore(), threads=3) as (client, _, _):
        ours = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("store-")]
        assert len(ours) == 2 * 3 + 1, "to read, to write and to delete"
        await client.put([("a", page(1))])
    await client.close()
    for thread in ours:
        await asyncio.to_thread(thread.join, 60)
    assert not any(thread.is_alive() for thread in ours)


async def test_an_idle_thread_keeps_no_page_alive() -> None:
    class Page(bytearray):
        pass

    async with opened(MemoryStore(), threads=1) as (client, _, _):
        memory = Page(1024)
        alive = weakref.ref(memory)
        assert await client.put([("a", memoryview(memory))]) == [True]
        del memory
        while alive() is not None:  # the thread returns from its call at any moment; pytest ends a wait that never ends
            gc.collect()
            await asyncio.to_thread(threading.Event().wait, 0.01)
