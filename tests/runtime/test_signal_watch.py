"""Signals at the target: what a writer's stream reports, the scatters that are queued behind it, and the limit of their waits."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from tests.transport.host_cuda import HostDriver, HostWords
from transfer.copy.piece_copier import ScatterLaunch
from transfer.loop_turns import run_measured
from transfer.receive import signal_watch
from transfer.receive.signal_watch import Gathered, Scattered, SignalWatch
from transfer.transport.shared_memory import shared_memory
from transfer.transport.signals import NUM_BYTES, NUM_ENTRIES, GatherSignal, SignalReader, SignalWriter

pytest.importorskip("transfer.receive._signals", reason="make setup builds it")
_LIMIT_S = 0.05
_LATE_S = 1.0
_STREAM = 7


class Ends:
    """Writers of some sessions, and the watch of their target. The writers' streams run their work at once."""

    def __init__(self, num_sessions: int = 1) -> None:
        self.driver = HostDriver()
        memories = [shared_memory(NUM_BYTES) for _ in range(num_sessions)]
        self.writers = [SignalWriter(HostWords(memory)) for memory in memories]
        self.readers = [SignalReader(HostWords(memory, self.driver)) for memory in memories]
        self.words = [HostWords(memory).words for memory in memories]
        self.totals = [ctypes.c_uint64(2**64 - 3) for _ in memories]  # the next sum wraps around
        self.watch = SignalWatch(asyncio.get_running_loop(), self._on_report)
        assert self.watch.open(self.readers[0])
        self.scattered: asyncio.Queue[Scattered] = asyncio.Queue()
        self.gathered: asyncio.Queue[Gathered] = asyncio.Queue()
        self.given_back: list[int] = []

    def begin(self, grant: int, *, session: int = 0, has_halves: bool = False) -> GatherSignal:
        signal = self.writers[session].of(grant)
        signal.begin(0, ctypes.addressof(self.totals[session]), has_halves=has_halves)
        return signal

    def end(self, signal: GatherSignal, digest: int, *, session: int = 0) -> None:
        self.totals[session].value += digest
        signal.end(0, ctypes.addressof(self.totals[session]))

    def gather(self, grant: int, digest: int, *, session: int = 0) -> bool:
        signal = self.begin(grant, session=session)
        self.end(signal, digest, session=session)
        return signal.is_sent

    def arm(
        self,
        grant: int,
        digest: int,
        *,
        session: int = 0,
        scatter: Callable[[], None] = lambda: None,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Arm a scatter that finds bytes with this digest. `first` scatters the first half."""
        total, cell = ctypes.c_uint64(), (ctypes.c_uint64 * 2)()

        def kernel() -> None:
            scatter()
            total.value = digest

        launch = ScatterLaunch(
            stream=_STREAM,
            sum_address=ctypes.addressof(total),
            cell_address=ctypes.addressof(cell),
            kernels=tuple((self.driver.kernel(one), 1, 1, 32, 0, b"") for one in (first, kernel) if one is not None),
            num_first=int(first is not None),
            keeps=(total, cell),
            give_back=lambda: self.given_back.append(grant),
        )
        self.watch.arm(session, grant, launch)

    async def until_queued(self) -> None:
        """Wait until a scatter is queued and waits for its gather."""
        async with asyncio.timeout(20):
            while self.driver.is_idle(_STREAM):
                await asyncio.sleep(0.001)

    async def next_scattered(self) -> Scattered:
        return await asyncio.wait_for(self.scattered.get(), 20)

    async def next_gathered(self) -> Gathered:
        return await asyncio.wait_for(self.gathered.get(), 20)

    def _on_report(self) -> None:
        with self.watch.gate:
            self.watch.take_queued()
            scattered, gathered = self.watch.take_ended()
        for one in scattered:
            self.scattered.put_nowait(one)
        for other in gathered:
            self.gathered.put_nowait(other)


async def looks_since(ends: Ends) -> None:
    """Wait until the watch has looked at everything that was written before."""
    session = len(ends.writers) - 1
    ends.watch.begin(session, ends.readers[session])
    assert ends.gather(2**40, 0, session=session)
    assert (await ends.next_gathered()).grant == 2**40


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", _LIMIT_S)
    return Ends(3)


@pytest.fixture
async def patient(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Nothing is given up."""
    monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", 60.0)
    return Ends(3)


async def test_gathers_without_an_armed_scatter_are_reported_at_their_end_with_their_own_digests(patient: Ends) -> None:
    patient.watch.begin(0, patient.readers[0])
    running = patient.begin(4096)
    await looks_since(patient)
    assert patient.gathered.empty()
    patient.end(running, 7)
    assert await patient.next_gathered() == Gathered(session=0, grant=4096, digest=7)
    for grant, digest in ((64, 0), (2**63, 2**64 - 1)):
        assert patient.gather(grant, digest)
        assert await patient.next_gathered() == Gathered(session=0, grant=grant, digest=digest)
    patient.watch.close(is_idle=True)


async def test_only_watched_sessions_are_looked_at(patient: Ends) -> None:
    watch, readers = patient.watch, patient.readers
    for _ in range(2):
        watch.begin(0, readers[0])
    watch.end(0)  # one of two
    patient.gather(20, 1, session=1)  # not watched yet
    patient.gather(10, 1)
    assert await patient.next_gathered() == Gathered(session=0, grant=10, digest=1)
    watch.begin(1, readers[1])  # while the thread waits for the other
    assert await patient.next_gathered() == Gathered(session=1, grant=20, digest=1)
    watch.end(0)
    patient.gather(11, 1)
    await looks_since(patient)
    assert patient.gathered.empty()
    watch.begin(0, readers[0])
    assert await patient.next_gathered() == Gathered(session=0, grant=11, digest=1)
    watch.remove(1)
    patient.gather(21, 1, session=1)
    await looks_since(patient)
    assert patient.gathered.empty()
    watch.close(is_idle=True)


async def test_an_armed_scatter_is_queued_while_its_gather_runs_and_runs_after_it(patient: Ends) -> None:
    patient.watch.begin(0, patient.readers[0])
    for grant, wrong in ((8, 0), (16, 1)):
        ran: list[int] = []
        patient.arm(grant, 5 + wrong, scatter=lambda ran=ran: ran.append(1))  # type: ignore[misc]
        signal = patient.begin(grant)
        await patient.until_queued()
        await looks_since(patient)
        assert not ran and patient.scattered.empty()
        patient.end(signal, 5)
        found = await patient.next_scattered()
        assert ran and (found.grant, found.is_intact) == (grant, not wrong) and 0 <= found.seconds < 10
    assert patient.given_back == [8, 16] and patient.watch.is_idle
    patient.watch.close(is_idle=True)


@pytest.mark.parametrize("has_halves", [True, False])
async def test_the_first_half_of_a_scatter_waits_only_for_that_half_of_the_gather(patient: Ends, has_halves: bool) -> None:
    """If the writer reports no halves, all of the scatter waits for the end."""
    patient.watch.begin(0, patient.readers[0])
    for grant in (8, 16):
        ran: list[str] = []
        patient.arm(grant, 5, first=lambda ran=ran: ran.append("first"), scatter=lambda ran=ran: ran.append("second"))  # type: ignore[misc]
        signal = patient.begin(grant, has_halves=has_halves)
        await patient.until_queued()
        await looks_since(patient)
        assert not ran
        signal.end_half(0)
        async with asyncio.timeout(20):
            while has_halves and not ran:
                await asyncio.sleep(0.001)
        await looks_since(patient)
        assert ran == ["first"] * has_halves and patient.scattered.empty()
        patient.end(signal, 5)
        found = await patient.next_scattered()
        assert ran == ["first", "second"] and found.is_intact
    patient.watch.close(is_idle=True)


@pytest.mark.parametrize("is_half_reported", [True, False])
async def test_halves_that_do_not_end_are_given_up(ends: Ends, is_half_reported: bool) -> None:
    """A writer that reports the end without the first half keeps no stream waiting either."""
    ends.watch.begin(0, ends.readers[0])
    ends.arm(8, 5, first=lambda: None)
    signal = ends.begin(8, has_halves=True)
    if is_half_reported:
        signal.end_half(0)
    else:
        ends.end(signal, 5)
    assert (await ends.next_scattered()).is_intact is None
    assert ends.words[0][1] and ends.driver.is_idle(_STREAM)
    ends.watch.close(is_idle=True)


def test_a_measured_loop_looks_itself_while_it_waits_for_messages_and_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sleeps wakes up late. The loop's thread queues most scatters, and nothing else waits for them."""
    monkeypatch.setattr(signal_watch, "SIGNAL_LIMIT_S", 60.0)

    async def main() -> list[int]:
        ends, queued_by, loop = Ends(1), list[int](), asyncio.get_running_loop()
        ends.driver.on_wait = lambda: queued_by.append(threading.get_ident())
        ends.watch.begin(0, ends.readers[0])
        for grant in range(1, 61):  # many, because on a busy machine the other thread is first at times
            ends.arm(grant, 5)
            signal = ends.writers[0].of(grant)
            ends.words[0][8 * grant] = grant  # the gather is queued behind its engine, so the loop looks from now on
            asked: asyncio.Future[None] = loop.create_future()
            asking = threading.Thread(target=loop.call_soon_threadsafe, args=(asked.set_result, None))
            loop.call_later(0.004, asking.start)
            await asyncio.wait_for(asked, 20)
            asking.join()
            beginning = threading.Timer(0.002, signal.begin, (0, ctypes.addressof(ends.totals[0])))  # while the loop waits
            beginning.start()
            await ends.until_queued()
            beginning.join()
            ends.end(signal, 5)
            assert (await ends.next_scattered()).is_intact
        ends.watch.close(is_idle=True)
        assert not any(ends.driver.contexts.values()), "each thread has its own context again"
        return queued_by

    queued_by = run_measured(main())
    assert len(queued_by) == 60 and queued_by.count(threading.get_ident()) > 30


def test_threads_that_start_after_a_poll_sleep_as_long_as_others() -> None:
    """A thread inherits the timer slack of the thread that starts it. Without slack, loops of short sleeps take more CPU time."""
    timer_slack = partial(ctypes.CDLL(None).prctl, 30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK

    async def main() -> None:
        before, ends, loop = timer_slack(), Ends(1), asyncio.get_running_loop()
        ends.watch.begin(0, ends.readers[0])
        ends.words[0][8] = 1
        await asyncio.sleep(0.01)
        assert timer_slack() == before == await loop.run_in_executor(None, timer_slack)
        ends.watch.close(is_idle=True)

    run_measured(main())


async def test_a_queued_gather_that_does_not_begin_is_near_for_a_second_only(patient: Ends) -> None:
    """Its writer can hang for minutes. A loop that polled meanwhile would take half of a core."""
    waiting, hanging, fd = patient, Ends(1), os.eventfd(0)

    def is_near(ends: Ends) -> bool:
        return any([ends.watch.wait(fd, 0.001) for _ in range(5)])  # it returns False if the thread looks at this moment

    for ends in (waiting, hanging):
        ends.watch.begin(0, ends.readers[0])
    hanging.words[0][8] = 1
    assert is_near(hanging)
    await asyncio.sleep(1.2)
    hanging.watch.begin(0, hanging.readers[0])
    await asyncio.sleep(0.01)
    assert not is_near(hanging) and not is_near(waiting)
    waiting.words[0][8] = 1  # its grant has waited as long
    assert is_near(waiting)
    assert hanging.gather(8, 5)
    assert await hanging.next_gathered() == Gathered(session=0, grant=8, digest=5)
    os.close(fd)
    for ends in (waiting, hanging):
        ends.watch.close(is_idle=True)


async def test_inside_the_gate_no_scatter_is_queued_and_a_disarmed_one_never(patient: Ends) -> None:
    watch = patient.watch
    watch.begin(0, patient.readers[0])
    for grant in (8, 16):
        patient.arm(grant, 5)
    with watch.gate:
        signals = [patient.begin(grant) for grant in (8, 16)]
        time.sleep(0.05)
        assert watch.take_queued() == [] and patient.driver.is_idle(_STREAM)
        watch.disarm_unless(lambda session, grant: (session, grant) == (0, 16))
        assert patient.given_back == [8] and list(watch.armed) == [16]
    for signal in signals:
        patient.end(signal, 5)
    assert (await patient.next_scattered()).grant == 16
    assert (await patient.next_gathered()).grant == 8
    watch.close(is_idle=True)


async def test_more_gathers_than_entries_all_come(patient: Ends) -> None:
    patient.watch.begin(0, patient.readers[0])
    for begin in range(0, 5 * NUM_ENTRIES, NUM_ENTRIES):
        grants = range(begin, begin + NUM_ENTRIES)
        assert all(patient.gather(grant, grant) for grant in grants)
        assert [(await patient.next_gathered()).digest for _ in grants] == [*grants]
    patient.watch.close(is_idle=True)


async def test_without_a_free_entry_no_signal_is_sent_and_later_ones_are(patient: Ends) -> None:
    """Entries are closed in any order. An entry is reused only when all earlier entries are closed."""
    patient.watch.begin(0, patient.readers[0])
    first = patient.begin(0)
    for grant in range(1, NUM_ENTRIES):
        assert patient.gather(grant, grant)
    assert not patient.gather(1000, 5)
    assert [(await patient.next_gathered()).grant for _ in range(1, NUM_ENTRIES)] == [*range(1, NUM_ENTRIES)]
    assert not patient.gather(1001, 5)
    patient.end(first, 0)
    assert (await patient.next_gathered()).grant == 0
    assert patient.gather(1002, 9)
    assert (await patient.next_gathered()).digest == 9
    patient.watch.close(is_idle=True)


async def test_a_stopped_session_continues_in_order_after_the_pause(patient: Ends) -> None:
    """Signals that were sent before the stop are included."""
    watch = patient.watch
    watch.begin(0, patient.readers[0])
    await looks_since(patient)
    assert watch.stop(0) and not watch.stop(0)
    assert not patient.gather(2, 2)
    await looks_since(patient)
    assert patient.gathered.empty()
    watch.resume(0)
    assert patient.gather(3, 9)
    assert await patient.next_gathered() == Gathered(session=0, grant=3, digest=9)
    watch.close(is_idle=True)


@pytest.mark.parametrize("written", [{8: 5}, {8: 1, 10: 5}, dict.fromkeys(range(8, NUM_BYTES // 8), 2**64 - 1)])
async def test_a_writer_that_skips_an_entry_is_not_followed(patient: Ends, written: dict[int, int]) -> None:
    """Otherwise, the thread would look again without a pause."""
    patient.watch.begin(0, patient.readers[0])
    for word, number in written.items():
        patient.words[0][word] = number
    async with asyncio.timeout(20):
        while not patient.words[0][1]:
            await asyncio.sleep(0.001)
    patient.watch.resume(0)
    assert patient.words[0][1] and patient.gathered.empty()
    await looks_since(patient)  # other sessions are still watched
    patient.watch.close(is_idle=True)


async def test_a_gather_that_does_not_end_is_given_up(ends: Ends) -> None:
    """Its writer then sends messages. Otherwise, the message of a slow gather would follow only after `repeat_after_s`."""
    ends.watch.begin(0, ends.readers[0])
    ends.arm(8, 5)
    signal = ends.begin(8)
    begun_s = time.monotonic()
    assert (await ends.next_scattered()).is_intact is None
    assert time.monotonic() - begun_s >= _LIMIT_S
    assert not signal.is_sent and ends.driver.is_idle(_STREAM)
    ends.watch.close(is_idle=True)


async def test_a_launch_that_waits_for_the_stream_returns_after_the_limit(ends: Ends) -> None:
    """The first launch of a kernel waits for the whole device. The thread that looks at the words is in the launch."""
    ends.driver.is_blocking = True
    ends.watch.begin(0, ends.readers[0])
    ends.arm(8, 5)
    ends.begin(8)
    assert (await ends.next_scattered()).is_intact is None
    ends.watch.close(is_idle=True)


async def test_a_call_that_holds_the_gil_does_not_keep_a_stream_waiting(ends: Ends) -> None:
    ends.watch.begin(0, ends.readers[0])
    ends.arm(8, 5)
    ends.begin(8)
    await ends.until_queued()
    ctypes.PyDLL(None).usleep(int(10 * _LIMIT_S * 1e6))
    assert ends.words[0][8 + 5] == 1
    assert (await ends.next_scattered()).is_intact is None
    ends.watch.close(is_idle=True)


async def test_a_writer_that_sets_the_word_back_does_not_keep_a_stream_waiting(ends: Ends) -> None:
    """The host accepts the number as the end. For the device, which compares cyclically, the number is lower."""
    ends.watch.begin(0, ends.readers[0])
    ends.arm(8, 5)
    ends.begin(8)
    ends.words[0][8 + 5] = 1 + 2**63
    assert (await ends.next_scattered()).is_intact is None
    ends.watch.close(is_idle=True)


async def test_a_scatter_under_way_ends_and_is_reported_after_its_session_is_removed(ends: Ends) -> None:
    ends.watch.begin(0, ends.readers[0])
    ends.arm(8, 5)
    ends.begin(8)
    await ends.until_queued()
    ends.watch.remove(0)
    assert (await ends.next_scattered()).is_intact is None
    ends.watch.close(is_idle=True)


async def test_no_stream_waits_after_the_thread_has_ended(patient: Ends) -> None:
    """Nothing keeps the limit of the wait from then on. At the end of a process, a wait for the device would never return."""
    patient.watch.begin(0, patient.readers[0])
    patient.arm(8, 5)
    patient.begin(8)
    await patient.until_queued()
    patient.watch.end_thread()
    async with asyncio.timeout(20):
        while not patient.driver.is_idle(_STREAM):
            await asyncio.sleep(0.001)


async def test_the_words_of_a_removed_session_are_not_looked_at_when_they_are_unmapped(patient: Ends) -> None:
    """The watch can hold the last reference, because a session whose writer is gone drops its own."""
    watch, known = patient.watch, list[bool]()
    watch.begin(0, patient.readers[0])
    weakref.finalize(patient.readers[0], lambda: known.append(watch.stop(0)))
    patient.readers.clear()
    assert not known
    watch.remove(0)
    assert known == [False]
    watch.close(is_idle=True)


async def test_a_forked_process_can_close_the_watch_and_open_another(patient: Ends) -> None:
    """The child process does not have its parent's threads."""
    patient.watch.begin(0, patient.readers[0])
    child = os.fork()
    if not child:
        patient.watch.end_thread()
        other = signal_watch._signals.Watch(patient.driver.functions, 1.0)  # type: ignore[union-attr]  # noqa: SLF001
        other.close()
        os._exit(0)
    deadline_s = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    assert ended[1] == 0
    patient.gather(8, 5)
    assert (await patient.next_gathered()).digest == 5
    patient.watch.close(is_idle=True)


def test_a_process_can_end_while_a_stream_waits() -> None:
    """The words are unmapped before the process has ended."""
    code = """
import atexit, ctypes, mmap, time
words, total, cell = mmap.mmap(-1, 8192), ctypes.c_uint64(), (ctypes.c_uint64 * 2)()
address = ctypes.addressof(ctypes.c_char.from_buffer(words))
def end():
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), 8192)
    time.sleep(0.5)
atexit.register(end)  # runs after what is registered later
import asyncio
from tests.transport.host_cuda import HostWords
from transfer.copy.piece_copier import ScatterLaunch
from transfer.receive.signal_watch import SignalWatch
from transfer.transport.signals import SignalReader, SignalWriter
target = HostWords(words)
target.functions = (ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value,) * 6  # each returns 0
watch = SignalWatch(asyncio.new_event_loop(), lambda: None)
watch.open(SignalReader(target))
watch.begin(0, SignalReader(target))
places = {"sum_address": ctypes.addressof(total), "cell_address": ctypes.addressof(cell)}
watch.arm(0, 8, ScatterLaunch(stream=1, kernels=(), num_first=0, keeps=None, give_back=lambda: None, **places))
SignalWriter(HostWords(words)).of(8).begin(0, ctypes.addressof(total))
is_queued = False
while not is_queued:
    with watch.gate:
        is_queued = bool(watch.take_queued())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_loop_does_not_poll_at_the_end_of_the_process() -> None:
    """The loop's thread is a daemon in an engine, so it still runs when the words are unmapped."""
    code = """
import atexit, ctypes, mmap, threading, time
words = mmap.mmap(-1, 8192)
address = ctypes.addressof(ctypes.c_char.from_buffer(words))
def end():
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), 8192)
    loop.call_soon_threadsafe(lambda: None)
    time.sleep(0.5)
atexit.register(end)  # runs after what is registered later
from tests.transport.host_cuda import HostWords
from transfer.loop_turns import MeasuredLoop
from transfer.receive.signal_watch import SignalWatch
from transfer.transport.signals import SignalReader
target = HostWords(words)
loop = MeasuredLoop()
watch = SignalWatch(loop, lambda: None)
watch.open(SignalReader(target))
watch.begin(0, SignalReader(target))
target.words[8] = 1  # a gather is queued, so the loop polls
threading.Thread(target=loop.run_forever, daemon=True).start()
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_the_end_of_the_process_can_end_a_watch_that_its_loop_uses() -> None:
    """The loop's thread is a daemon in an engine, so it still runs."""
    code = """
import ctypes, mmap, threading
from transfer.receive import _signals
words = mmap.mmap(-1, 8192)
address = ctypes.addressof(ctypes.c_char.from_buffer(words))
function = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
for _ in range(10):
    watch, is_used, is_closed = _signals.Watch((function,) * 6, 1.0), threading.Event(), threading.Event()
    watch.add(0, address, address, 0)
    for grant in range(20000):
        watch.arm(0, grant, 1, address, address, (), 0)
    def use():
        is_used.set()
        while not is_closed.is_set():
            watch.take_queued()
    user = threading.Thread(target=use)
    user.start()
    is_used.wait()
    watch.close()
    is_closed.set()
    user.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
