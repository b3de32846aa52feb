"""The asyncio driver: nobody waits for ever, nobody is called twice, nothing is polled while nothing happens."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.transport.contract import NIXL, TWO_SIDED, Pair, open_pair, open_sessions
from tests.transport.payload import rng
from transfer.errors import TransferError, TransportClosed, TransportTimeout, WriteFailed
from transfer.transport.driver import SessionDriver


@pytest.fixture(params=TWO_SIDED)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = open_pair(request.param)
    yield pair
    pair.close()


def driver_of(pair: Pair) -> SessionDriver:
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(pair.writer)
    driver.add(pair.target)
    return driver


def remove_all(driver: SessionDriver, pair: Pair) -> None:
    driver.remove(pair.writer)
    driver.remove(pair.target)


@pytest.fixture
async def driver(pair: Pair) -> AsyncIterator[SessionDriver]:
    """Drives both ends of `pair`; afterwards those that `pair` has by then."""
    driver = driver_of(pair)
    yield driver
    remove_all(driver, pair)


async def arrives_while_asleep(driver: SessionDriver, pair: Pair, key: int) -> None:
    """The peer writes while this end sleeps on its descriptor."""
    receive = pair.target.expect(pair.ring_memory, rng(0, 1 << 20), key)
    waiting = asyncio.ensure_future(driver.wait(pair.target, receive, deadline_s=60))
    await asyncio.sleep(0.03)
    write = pair.writer.write(pair.source_memory, rng(0, 1 << 20), rng(0, 1 << 20), key)
    await driver.wait(pair.writer, write, deadline_s=60)
    await waiting


async def test_a_wake_up_after_idling(driver: SessionDriver, pair: Pair) -> None:
    for key in range(5):
        await arrives_while_asleep(driver, pair, key)


async def test_a_callback_may_start_the_next_operation(driver: SessionDriver, pair: Pair) -> None:
    """Chains of operations that start in callbacks must not lose the wake-up between them."""
    finished = asyncio.Event()
    left = [100]

    def received(_: Any, error: TransferError | None) -> None:
        assert error is None
        left[0] -= 1
        if left[0] == 0:
            finished.set()
            return
        start(left[0])

    def start(key: int) -> None:
        driver.watch(pair.target, pair.target.expect(pair.ring_memory, rng(0, 3000), key), received)
        driver.watch(pair.writer, pair.writer.write(pair.source_memory, rng(0, 3000), rng(0, 3000), key), lambda *_: None)

    start(100)
    await asyncio.wait_for(finished.wait(), 60)


async def test_deadline(driver: SessionDriver, pair: Pair) -> None:
    receive = pair.target.expect(pair.ring_memory, rng(0, 8), 1)
    with pytest.raises(TransportTimeout, match=r"0\.05 s"):
        await driver.wait(pair.target, receive, deadline_s=0.05)
    # The handle stays usable.
    waiting = asyncio.ensure_future(driver.wait(pair.target, receive, deadline_s=60))
    write = pair.writer.write(pair.source_memory, rng(0, 8), rng(0, 8), 1)
    driver.watch(pair.writer, write, lambda *_: None)
    await waiting


async def test_remove_settles_the_waiting_exactly_once(driver: SessionDriver, pair: Pair) -> None:
    heard: list[TransferError | None] = []
    receive = pair.target.expect(pair.ring_memory, rng(0, 8), 1)
    driver.watch(pair.target, receive, lambda _, error: heard.append(error))
    cancelled = driver.watch(pair.target, receive, lambda _, error: heard.append(error))
    cancelled.cancel()
    await asyncio.sleep(0.01)
    assert driver.num_watches >= 1
    driver.remove(pair.target)
    assert driver.num_watches == 0
    driver.remove(pair.target)
    pair.target.close()
    await asyncio.sleep(0.01)
    assert [type(error) for error in heard] == [TransportClosed]


async def test_close_without_remove_ends_a_wait(driver: SessionDriver, pair: Pair) -> None:
    receive = pair.target.expect(pair.ring_memory, rng(0, 8), 1)
    waiting = asyncio.ensure_future(driver.wait(pair.target, receive, deadline_s=60))
    await asyncio.sleep(0.01)
    pair.target.close()
    driver.watch(pair.target, receive, lambda *_: None)  # whatever is asked of it next
    with pytest.raises(TransportClosed):
        await waiting


async def test_a_dead_peer_is_detected_while_sleeping(driver: SessionDriver, pair: Pair) -> None:
    await arrives_while_asleep(driver, pair, 1)
    receive = pair.target.expect(pair.ring_memory, rng(0, 8), 2)
    waiting = asyncio.ensure_future(driver.wait(pair.target, receive, deadline_s=60))
    await asyncio.sleep(0.05)
    driver.remove(pair.writer)
    pair.writer.close()
    with pytest.raises(WriteFailed):
        await waiting


async def test_a_failing_callback_reaches_the_loop_and_not_the_others(driver: SessionDriver, pair: Pair) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    receive = pair.target.expect(pair.ring_memory, rng(0, 8), 1)
    failure = RuntimeError("of the callback")

    def fail(*_: Any) -> None:
        raise failure

    heard = asyncio.Event()
    driver.watch(pair.target, receive, fail)
    driver.watch(pair.target, receive, lambda *_: heard.set())
    await driver.wait(pair.writer, pair.writer.write(pair.source_memory, rng(0, 8), rng(0, 8), 1), deadline_s=60)
    await asyncio.wait_for(heard.wait(), 60)
    assert [context["exception"] for context in reported] == [failure]


async def test_a_reused_descriptor_number_wakes_its_new_session(driver: SessionDriver, pair: Pair) -> None:
    """A session that is closed first and removed later must not take its number's successor with it."""
    await asyncio.sleep(0.01)
    old_writer, old_target = pair.writer, pair.target
    old_writer.close()
    old_target.close()
    pair.writer, pair.target = open_sessions(pair.writer_transport, pair.target_transport, pair.ring_memory)
    driver.add(pair.writer)
    driver.add(pair.target)
    driver.remove(old_writer)
    driver.remove(old_target)
    for key in range(3):
        await arrives_while_asleep(driver, pair, key)


async def test_idle_costs_nothing(driver: SessionDriver, pair: Pair) -> None:
    """Armed sessions with a receive pending; inproc has no descriptor and is looked at."""
    receive = pair.target.expect(pair.ring_memory, rng(0, 8), 1)
    driver.watch(pair.target, receive, lambda *_: None)
    await asyncio.sleep(0.05)
    before = time.thread_time()
    await asyncio.sleep(0.4)
    assert time.thread_time() - before < 0.1, "a quarter of what a loop without a pause takes"


@pytest.mark.parametrize("kind", NIXL)
async def test_one_sided_writes_settle_in_turns_with_the_loop(kind: str) -> None:
    """A bulk write is not one long step of the loop."""
    pair = open_pair(kind, source_bytes=64 << 20, ring_bytes=64 << 20)
    driver = driver_of(pair)
    await driver.wait(pair.writer, pair.writer.write(pair.source_memory, rng(0, 1), rng(0, 1), 0), deadline_s=60)  # connects
    running, ticks = True, 0

    async def tick() -> None:
        nonlocal ticks
        while running:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    place = rng(0, 64 << 20)
    for key in range(1, 5):
        await driver.wait(pair.writer, pair.writer.write(pair.source_memory, place, place, key), deadline_s=60)
    running = False
    await ticking
    assert ticks >= 16
    assert (pair.ring == pair.source).all()
    remove_all(driver, pair)
    pair.close()


async def test_a_busy_session_does_not_starve_the_loop() -> None:
    pair = open_pair("inproc-two-sided")
    driver = driver_of(pair)
    keys = iter(range(10**9))
    running = [True]

    def again(*_: Any) -> None:
        if running[0]:
            key = next(keys)
            driver.watch(pair.target, pair.target.expect(pair.ring_memory, rng(0, 8), key), again)
            pair.writer.write(pair.source_memory, rng(0, 8), rng(0, 8), key)

    again()
    for _ in range(1000):
        await asyncio.sleep(0)
    running[0] = False
    assert next(keys) > 50
    remove_all(driver, pair)
    pair.close()


class _ArmedLate:
    """A session whose event slips in between `progress()` and `arm()`: no descriptor will tell of it."""

    lane = "fake"

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.has_event = False
        self.is_done = False
        self.arms = 0

    def fileno(self) -> int:
        return self.read_end

    def progress(self) -> bool:
        moved, self.has_event = self.has_event, False
        self.is_done |= moved
        return moved

    needs_polling = False

    def arm(self) -> bool:
        self.arms += 1
        if self.arms == 1:
            self.has_event = True
            return False
        return True

    def poll(self) -> bool:
        return self.is_done


async def test_an_event_between_progress_and_arm_is_not_lost() -> None:
    session: Any = _ArmedLate()
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(session)
    await driver.wait(session, session, deadline_s=60)
    assert session.arms >= 1
    driver.remove(session)
    os.close(session.read_end)
    os.close(session.write_end)


class _PolledForAWhile(_ArmedLate):
    """A session like `ucx` during copies of 0.1 s between GPUs: its descriptor is readable, and armed only afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.arms = 1
        self.num_looks = 0
        self.ends_s: float | None = None
        self.is_armed_early = False

    @property
    def needs_polling(self) -> bool:  # type: ignore[override]
        return self.ends_s is not None

    def begin(self) -> None:
        self.ends_s, self.is_done = time.monotonic() + 0.1, False
        os.write(self.write_end, b"arrived")

    def progress(self) -> bool:
        self.num_looks += 1
        if self.ends_s is not None and time.monotonic() >= self.ends_s:
            self.ends_s, self.is_done = None, True
        return False

    def arm(self) -> bool:
        self.is_armed_early |= self.ends_s is not None
        if select.select([self.read_end], [], [], 0)[0]:
            os.read(self.read_end, 100)
        return super().arm()


async def test_a_session_that_needs_polling_is_not_armed_and_then_sleeps_again() -> None:
    session: Any = _PolledForAWhile()
    driver = SessionDriver(asyncio.get_running_loop())
    driver.add(session)
    for _ in range(2):
        num_arms, session.is_done = session.arms, False
        waiting = asyncio.ensure_future(driver.wait(session, session, deadline_s=60))
        while session.arms == num_arms:
            await asyncio.sleep(0)
        session.begin()  # the descriptor wakes the loop
        await waiting
    assert not session.is_armed_early
    assert session.num_looks < 2000, "some hundred looks with pauses; without pauses they are ten thousand"
    driver.remove(session)
    os.close(session.read_end)
    os.close(session.write_end)


async def test_a_callback_may_close_a_session_that_needs_polling() -> None:
    """By then, another part of the process can have its descriptor's number."""
    loop, reported, heard = asyncio.get_running_loop(), list[dict[str, Any]](), list[bytes]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    session: Any = _PolledForAWhile()
    driver = SessionDriver(loop)
    driver.add(session)
    number, ends = session.read_end, list[int]()

    def close(*_: Any) -> None:
        session.fileno = lambda: None
        os.close(number)
        ends[:] = os.pipe()
        assert ends[0] == number
        loop.add_reader(number, lambda: heard.append(os.read(number, 100)))

    driver.watch(session, session, close)
    await asyncio.sleep(0.01)
    session.begin()
    while not ends:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    driver.remove(session)
    os.write(ends[1], b"for the other part")
    await asyncio.sleep(0.01)
    assert heard == [b"for the other part"] and not reported
    loop.remove_reader(number)
    for end in (*ends, session.write_end):
        os.close(end)
