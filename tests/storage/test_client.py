"""The front of a store: whatever the store does, callers get an answer by the deadline, and their memory back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.storage.stores import MemoryStore, Seen, key_of, page_of
from transfer.breaker import BreakerSettings, BreakerState
from transfer.errors import ConfigError
from transfer.storage.base import USED_STEP_NS, Outcome, Store
from transfer.storage.client import CLOSE_S, JOB_BYTES, JOB_KEYS, KEY_BYTES, SILENT_FRACTION, StoreClient, StoreClientSettings
from transfer.storage.directory import DirectoryStore

BREAKER = BreakerSettings(failures=3, window_s=60.0, pause_s=5.0, max_pause_s=20.0)

SETTINGS: dict[str, Any] = {
    "put_timeout_s": 5.0,
    "get_timeout_s": 5.0,
    "queue_bytes": 1 << 20,
    "threads": 2,
    "breaker": BREAKER,
}


class Clock:
    """Real time, or what is given for it, but for what is added to it."""

    def __init__(self, real: Callable[[], float] = time.monotonic) -> None:
        self.real = real
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self.real() + self.ahead_s


@asynccontextmanager
async def opened(store: Store, *, clock: Clock | None = None, **changed: Any) -> AsyncIterator[tuple[StoreClient, Seen, Clock]]:
    """A client of that store, which is let go of at the end."""
    settings = SETTINGS | changed
    seen, clock = Seen(), clock or Clock()
    client = StoreClient(
        store,
        loop=asyncio.get_running_loop(),
        settings=StoreClientSettings(**settings),
        observer=seen,
        clock=clock,
    )
    try:
        yield client, seen, clock
    finally:
        if isinstance(store, MemoryStore):
            store.gate.set()
        await client.close()


def page(*numbers: int) -> memoryview:
    return memoryview(bytearray(numbers))


async def test_what_was_put_is_got() -> None:
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


async def test_nothing_asked_is_nothing_done() -> None:
    store = MemoryStore()
    async with opened(store) as (client, seen, _):
        assert await client.put([]) == await client.get([]) == await client.exists([]) == await client.delete([]) == []
        assert not seen.operations and not store.num_calls


async def test_views_of_any_shape_and_format_are_bytes() -> None:
    async with opened(MemoryStore()) as (client, _, _):
        floats = memoryview(bytearray(16)).cast("f", shape=[2, 2])
        floats[1, 1] = 1.5
        assert await client.put([("a", floats)]) == [True]
        back = memoryview(bytearray(16)).cast("f")
        assert await client.get([("a", back)]) == [True]
        assert list(back) == [0, 0, 0, 1.5]


async def test_a_large_call_is_spread_over_the_threads() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=3, queue_bytes=1 << 30) as (client, _, _):
        pages = [(str(index), memoryview(bytes(JOB_BYTES // 2))) for index in range(6)]
        call = asyncio.create_task(client.put(pages))
        for _ in range(3):
            assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        store.gate.set()
        assert await call == [True] * 6
        assert store.num_calls == 3
        assert await client.exists([str(index) for index in range(JOB_KEYS + 1)]) == [True] * 6 + [False] * (JOB_KEYS - 5)
        assert store.num_calls == 5


OPERATIONS: dict[str, Callable[[StoreClient, memoryview], Awaitable[list[bool]]]] = {
    "put": lambda client, view: client.put([("a", view)]),
    "get": lambda client, view: client.get([("a", view)]),
    "exists": lambda client, view: client.exists(["a"]),
    "delete": lambda client, view: client.delete(["a"]),
}


@pytest.mark.parametrize("op", OPERATIONS)
async def test_a_store_that_hangs_is_not_waited_for(op: str) -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, put_timeout_s=0.05, get_timeout_s=0.05) as (client, seen, _):
        begun_s = time.monotonic()
        assert await OPERATIONS[op](client, page(1)) == [False]
        assert time.monotonic() - begun_s < 2
        assert seen.operations == [(op, (Outcome.TIMEOUT,))]
        assert client.num_queued == 0


@pytest.mark.parametrize("left_s", [0.05, 0.0, -1.0])
async def test_a_store_that_hangs_is_blamed_by_callers_that_have_little_time_too(left_s: float) -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=1) as (client, seen, clock):
        begun_s = time.monotonic()
        for _ in range(BREAKER.failures):
            assert await client.get([("a", page(1))], timeout_s=0.05) == [False]
        assert client.state is BreakerState.CLOSED, "so little time is the call's own affair"
        clock.ahead_s += SILENT_FRACTION * SETTINGS["get_timeout_s"]
        for _ in range(BREAKER.failures):
            assert client.state is BreakerState.CLOSED
            assert await client.get([("a", page(1))], timeout_s=left_s) == [False]
        assert client.state is BreakerState.OPEN
        assert await client.exists(["a"], timeout_s=60.0) == [False]
        assert time.monotonic() - begun_s < 2
        assert seen.operations[0] == ("get", (Outcome.TIMEOUT,))


class SteadyStore(MemoryStore):
    """Answers every call after the same time; one that has the key "stuck" only when the gate is opened."""

    call_s = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.gated = set()
        self.spent_s = 0.0  # by all calls that were answered
        self._spending = threading.Lock()

    def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[Outcome]:
        if any(key == "stuck" for key, _ in pages):
            self.entered.release()
            self.gate.wait()
        time.sleep(self.call_s)
        outcomes = super().get(pages, used_ns=used_ns)
        with self._spending:
            self.spent_s += self.call_s
        return outcomes


async def test_more_than_a_store_can_answer_in_time_does_not_open_its_circuit() -> None:
    """Calls that wait for each other: 640 pages in 10 calls at once, of which half can be had in time."""
    store = SteadyStore()
    store.pages = {str(index): b"\7" for index in range(640)}
    clock = Clock(lambda: store.spent_s)  # the store is not silent while the machine stands still
    async with opened(store, clock=clock, threads=2, get_timeout_s=0.5, breaker=opens_at_once()) as (client, seen, _):
        calls = [[(str(index), page(0)) for index in range(first, first + 64)] for first in range(0, 640, 64)]
        for _ in range(10):
            answers = await asyncio.gather(*(client.get(call) for call in calls))
            assert client.state is BreakerState.CLOSED
            if any(map(any, answers)):
                break
        else:
            raise AssertionError("nobody was ever answered")
        told = [outcomes for _, outcomes in seen.operations]
        assert any(set(outcomes) == {Outcome.TIMEOUT} for outcomes in told), "some were not even begun"


async def test_a_call_that_hangs_opens_the_circuit_though_others_are_answered() -> None:
    store = SteadyStore()
    store.pages = {"a": b"\7"}
    store.call_s = 0.0
    async with opened(store, get_timeout_s=30.0, breaker=opens_at_once()) as (client, _, clock):
        store.gate.clear()
        stuck = asyncio.create_task(client.get([("stuck", page(0))], timeout_s=0.3))
        assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        clock.ahead_s += SILENT_FRACTION * 30.0
        while not stuck.done():
            assert client.state is BreakerState.CLOSED
            assert await client.get([("a", page(0))]) == [True]
            await asyncio.sleep(0.001)
        assert await stuck == [False]
        assert client.state is BreakerState.OPEN


def opens_at_once() -> BreakerSettings:
    return BreakerSettings(failures=1, window_s=60.0, pause_s=60.0, max_pause_s=60.0)


async def test_nobody_touches_a_view_after_the_deadline() -> None:
    """The thread that hangs in `get` comes back with bytes that nobody waits for; the view is somebody else's by then."""
    store = MemoryStore()
    store.pages["a"] = b"\7\7"
    store.gate.clear()
    async with opened(store) as (client, _, _):
        view = page(0, 0)
        assert await client.get([("a", view)], timeout_s=0.05) == [False]
        store.gate.set()
        assert await client.exists(["a"]) == [True]
        await client.close()  # both threads have ended, so the late one is through
        assert bytes(view) == b"\0\0"


async def test_a_put_that_was_given_up_stores_what_it_was_given() -> None:
    """It has hung since before the deadline; what its caller writes into the page now must not get into the store."""
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, put_timeout_s=0.5) as (client, _, _):
        view = page(1, 2)
        assert await client.put([("a", view)]) == [False]
        view[:] = b"\xff\xff"
        store.gate.set()
        await client.close()
        assert store.pages == {"a": b"\1\2"}


async def test_what_still_waits_at_its_deadline_is_never_begun() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=1, put_timeout_s=0.5) as (client, _, _):
        assert await asyncio.gather(*(client.put([(key, page(1))]) for key in "ab")) == [[False], [False]]
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
        assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.num_queued == 0 and client.state is BreakerState.CLOSED
        store.gate.set()
        await client.close()
        assert bytes(view) == b"\0"
        assert not seen.operations


async def test_deadlines_race_with_answers_and_each_view_is_whole_or_untouched() -> None:
    """Deadlines that fall anywhere into the answers; what was said to be there is there, and what was not is as it was."""
    store = MemoryStore()
    size = 1 << 16
    for index in range(8):
        store.pages[str(index)] = bytes([index + 1]) * size
    num_true = 0
    async with opened(store, threads=4, get_timeout_s=0.0005, queue_bytes=1 << 30, breaker=never_opens()) as (client, _, _):
        for _ in range(200):
            views = [memoryview(bytearray(size)) for _ in range(8)]
            answers = await client.get([(str(index), view) for index, view in enumerate(views)])
            told = [bytes(view) for view in views]
            await asyncio.sleep(0.001)
            assert told == [bytes(view) for view in views]
            assert told == [bytes([index + 1 if answer else 0]) * size for index, answer in enumerate(answers)]
            num_true += sum(answers)
    assert num_true  # else nothing was raced with


def never_opens() -> BreakerSettings:
    return BreakerSettings(failures=1 << 30, window_s=60.0, pause_s=1.0, max_pause_s=1.0)


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
    store = DirectoryStore(tmp_path)
    numbers = range(3 * JOB_KEYS)
    async with opened(store, threads=4) as (client, _, _):
        for call in (client.put, client.get):
            pages = [(key_of(number), memoryview(bytearray(page_of(number, 64)))) for number in numbers]
            assert await call(pages, used_ns=used_ns) == [True] * len(numbers)
            times = [store._path(key).stat().st_mtime_ns for key, _ in pages]
            assert times == [times[0] - index * USED_STEP_NS for index in numbers]
            assert used_ns in (None, times[0])


async def test_what_does_not_fit_the_queue_is_refused_and_the_first_pages_go_first() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, queue_bytes=10) as (client, seen, _):
        first = asyncio.create_task(client.put([(key, page(1, 2, 3, 4)) for key in "abc"]))
        assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        assert client.num_queued == 2
        assert await client.put([("d", page(1, 2, 3))]) == [False]
        assert seen.operations == [("put", (Outcome.REFUSED,))]
        store.gate.set()
        assert await first == [True, True, False]
        assert await client.put([("d", page(1, 2, 3))]) == [True]  # there is room again
        assert set(store.pages) == {"a", "b", "d"}


async def test_a_page_larger_than_the_queue_is_let_in_alone() -> None:
    store = MemoryStore()
    async with opened(store, queue_bytes=2) as (client, _, _):
        assert await client.put([("a", page(1, 2, 3)), ("b", page(1))]) == [True, False]
        assert await client.exists(["a"]) == [True]
    assert KEY_BYTES > 2


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

        clock.ahead_s += BREAKER.pause_s
        assert client.state is BreakerState.HALF_OPEN
        assert await client.get([("a", page(0))]) == [False]  # a miss, and an answer
        assert seen.operations[-1] == ("get", (Outcome.MISSING,))
        assert client.state is BreakerState.CLOSED
        assert seen.circuits[-1] == ("closed", "closed")


async def test_one_call_tries_a_store_and_the_pause_doubles_when_it_fails() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, threads=8, get_timeout_s=0.5) as (client, seen, clock):
        await asyncio.gather(*(client.exists(["a"]) for _ in range(BREAKER.failures)))
        assert client.state is BreakerState.OPEN
        clock.ahead_s += BREAKER.pause_s
        await asyncio.gather(*(client.exists(["a"]) for _ in range(4)))
        told = sorted(outcomes[0] for _, outcomes in seen.operations[-4:])
        assert told == [*[Outcome.CIRCUIT_OPEN] * 3, Outcome.TIMEOUT]
        clock.ahead_s += BREAKER.pause_s
        assert client.state is BreakerState.OPEN
        clock.ahead_s += BREAKER.pause_s
        assert client.state is BreakerState.HALF_OPEN


async def test_a_store_that_cannot_be_written_can_be_read() -> None:
    """A full disk: the pages that are there are as good as ever."""
    store = MemoryStore()
    store.pages["a"] = b"\5"
    store.failing = {"b"}
    async with opened(store) as (client, seen, _):
        for _ in range(BREAKER.failures):
            assert await client.put([("b", page(1))]) == [False]
        assert client.state is BreakerState.OPEN
        assert await client.put([("c", page(1))]) == [False]
        assert seen.operations[-1] == ("put", (Outcome.CIRCUIT_OPEN,))
        view = page(0)
        assert await client.get([("a", view)]) == [True]
        assert seen.circuits[-1] == ("closed", "open")


async def test_pages_that_cannot_be_put_keep_nobody_from_reading() -> None:
    """Neither their threads nor their room in the queue are the readers'."""
    store = MemoryStore()
    store.pages["a"], store.gated = b"\5", {"put"}
    async with opened(store, queue_bytes=4, threads=1) as (client, _, _):
        store.gate.clear()
        puts = [asyncio.create_task(client.put([(key, page(1, 2, 3, 4))])) for key in "xy"]
        assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        assert client.num_queued == 1, "the second was refused"
        for _ in range(4):
            assert await client.get([("a", page(0))]) == [True]
        store.gate.set()
        assert await asyncio.gather(*puts) == [[True], [False]]


async def test_a_full_store_is_deleted_from() -> None:
    """What is damaged has to go, also while nothing can be put, and does not wait behind what is."""
    store = MemoryStore()
    async with opened(store, put_timeout_s=0.5, queue_bytes=1) as (client, seen, _):
        assert await client.put([("a", page(1))]) == [True]
        store.gated = {"put"}
        store.gate.clear()
        for _ in range(BREAKER.failures):
            assert await client.put([("b", page(2))]) == [False]
        assert seen.circuits[-1] == ("closed", "open")
        assert await client.delete(["a"]) == [True] and not store.pages


async def test_misses_and_refusals_do_not_open_the_circuit() -> None:
    store = MemoryStore()
    async with opened(store, queue_bytes=1) as (client, _, _):
        for _ in range(2 * BREAKER.failures):
            await client.exists(["a", "b"])
        assert client.state is BreakerState.CLOSED


async def test_the_loop_goes_on_while_the_store_hangs() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store, get_timeout_s=60.0) as (client, _, _):
        call = asyncio.create_task(client.get([("a", memoryview(bytearray(1 << 20)))]))
        assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert not call.done()
        store.gate.set()
        assert await call == [False]


async def test_close_answers_everything_and_does_not_wait_for_a_store_that_hangs() -> None:
    store = MemoryStore()
    store.gate.clear()
    async with opened(store) as (client, seen, _):
        call = asyncio.create_task(client.exists(["a"]))
        assert await asyncio.to_thread(store.entered.acquire, timeout=5)
        begun_s = time.monotonic()
        await client.close()
        assert time.monotonic() - begun_s < CLOSE_S + 1
        assert await call == [False]
        assert await client.put([("a", page(1))]) == [False]
        assert {outcomes for _, outcomes in seen.operations} == {(Outcome.REFUSED,)}
        assert client.state is BreakerState.CLOSED


async def test_close_waits_for_what_the_store_is_doing_and_ends_the_threads() -> None:
    before = set(threading.enumerate())  # others' may end meanwhile, and are none of ours
    async with opened(MemoryStore(), threads=3) as (client, _, _):
        ours = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("store-")]
        assert len(ours) == 2 * 3 + 1, "to read, to write and to delete"
        await client.put([("a", page(1))])
    await client.close()
    for thread in ours:
        await asyncio.to_thread(thread.join, 5)
    assert not any(thread.is_alive() for thread in ours)


def test_a_thread_that_comes_late_finds_the_loop_closed_and_says_nothing() -> None:
    store = MemoryStore()
    store.gate.clear()
    noticed: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, noticed.append  # type: ignore[assignment]
    before = set(threading.enumerate())

    async def call() -> None:
        settings = StoreClientSettings(put_timeout_s=0.05, get_timeout_s=0.05, queue_bytes=1, threads=1, breaker=BREAKER)
        client = StoreClient(store, loop=asyncio.get_running_loop(), settings=settings, observer=Seen())
        assert await client.exists(["a"]) == [False]

    try:
        asyncio.run(call())
        store.gate.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(0.2)  # it now waits for work that never comes, being a daemon
        assert not noticed
    finally:
        threading.excepthook = hook


async def test_an_idle_thread_keeps_no_page_alive() -> None:
    class Page(bytearray):
        pass

    async with opened(MemoryStore(), threads=1) as (client, _, _):
        memory = Page(1024)
        alive = weakref.ref(memory)
        assert await client.put([("a", memoryview(memory))]) == [True]
        del memory
        for _ in range(100):
            gc.collect()
            if alive() is None:
                break
            await asyncio.sleep(0.01)
        assert alive() is None


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("put_timeout_s", 0.0, "above 0"),
        ("get_timeout_s", float("nan"), "above 0"),
        ("queue_bytes", 0, "at least 1"),
        ("threads", 0, "at least 1"),
    ],
)
def test_settings_are_checked(name: str, value: float, right: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be {right}"):
        StoreClientSettings(**(SETTINGS | {name: value}))
