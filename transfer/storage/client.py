"""Use a store from an asyncio loop. Every call returns by its deadline, whatever the store does, and never raises.

The store's blocking calls run on a few daemon threads behind a queue that is bounded in bytes. Pages that do not fit are refused
at once. After failures or timeouts the circuit opens, and the store is left alone for a while. Reading, writing and deleting have
separate threads, queues and circuits: background puts do not delay reads, and a full disk can be read and deleted from. A store
that hangs costs only the thread that called it.

**Fault.** A timeout counts against the store if it has answered nothing for `SILENT_FRACTION` of the usual time, although this
call's jobs or others on its side have asked. Otherwise the store works: the call waited behind others, had less time than usual,
or wanted more than fits that time.

**Views.** A call's views are used until it returns or its task is cancelled, and never after. A put copies a page before the
store sees it, and a get fills memory of its own first. Both copies are made under a lock that a deadline takes as well, so a
late thread finds its job given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from transfer.breaker import Breaker, BreakerSettings, BreakerState, Permit, Verdict
from transfer.errors import ConfigError
from transfer.metrics import StoreMetrics
from transfer.storage.base import USED_STEP_NS, Outcome, Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

JOB_BYTES: Final = 4 << 20
"""Most bytes of a job, so that a call can use all threads, and a copy is short."""

JOB_KEYS: Final = 16
KEY_BYTES: Final = 256
"""Size of a key in the queue."""

SILENT_FRACTION: Final = 0.5
"""See the module's docstring. Below 1, because a caller can have a little less than the usual time."""

CLOSE_S: Final = 2.0
"""Longest wait for the store's present calls when the client is closed. Then its threads are abandoned."""

_SEVERITY: Final = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClientSettings:
    """Bounds of a `StoreClient`.

    Args:
        put_timeout_s: Deadline of `put` and `delete`.
        get_timeout_s: Deadline of `get` and `exists`.
        queue_bytes: Most bytes of unanswered reads, and as many of writes. At least one page is accepted.
        threads: Threads that read, and as many that write. One deletes.
        breaker: When the store is left alone, and for how long. Counts calls, not pages.
    """

    put_timeout_s: float
    get_timeout_s: float
    queue_bytes: int
    threads: int
    breaker: BreakerSettings

    def __post_init__(self) -> None:
        for name in ("put_timeout_s", "get_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("queue_bytes", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One page of a call. `view` is None if only the key matters."""

    key: str
    view: memoryview | None = None

    @property
    def num_bytes(self) -> int:
        return KEY_BYTES if self.view is None else self.view.nbytes


class _Job:
    """Part of a call, for one thread. The lock guards the use of the views, and the choice of the outcome."""

    def __init__(self, op: str, items: Sequence[_Item], used_ns: int, loop: asyncio.AbstractEventLoop) -> None:
        self.op = op
        self._used_ns = used_ns
        self.num_items = len(items)
        self.num_bytes = sum(item.num_bytes for item in items)
        self.answer: asyncio.Future[list[Outcome]] = loop.create_future()
        self._items: Sequence[_Item] = items  # empty once it is given up
        self._outcomes: list[Outcome] | None = None  # set by the store's answer or by a deadline
        self._lock = threading.Lock()

    def conclude(self, outcome: Outcome) -> None:
        """On the loop: answer with the store's outcomes, or with `outcome` if there are none. No view is used any more."""
        with self._lock:  # waits for a copy that is being made
            self._items = ()
            if self._outcomes is None:
                self._outcomes = [outcome] * self.num_items
            outcomes = self._outcomes
        if not self.answer.done():
            self.answer.set_result(outcomes)

    def run(self, store: Store) -> None:
        """On a thread: call the store, unless the job was given up meanwhile."""
        with self._lock:
            items = self._items
            copies = [_copied(item) for item in items] if self.op == "put" else []
        if not items:
            return
        match self.op:
            case "put":
                self._settle(store.put(copies, used_ns=self._used_ns))
            case "get":
                pages = [_unfilled(item.num_bytes) for item in items]
                wanted = [(item.key, page.data) for item, page in zip(items, pages, strict=True)]
                self._settle(store.get(wanted, used_ns=self._used_ns), pages)
            case "exists":
                self._settle(store.exists([item.key for item in items]))
            case _:
                self._settle(store.delete([item.key for item in items]))

    def _settle(self, outcomes: list[Outcome], pages: Sequence[NDArray[np.uint8]] = ()) -> None:
        with self._lock:
            if self._outcomes is not None:
                return  # too late
            for item, page, outcome in zip(self._items, pages, outcomes, strict=False):
                if outcome is Outcome.OK and item.view is not None:
                    _bytes_of(item.view)[:] = page
            self._outcomes = outcomes


class _Pulse:
    """The store's present calls, and the time of its last answer. Used by the threads and the loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_s: dict[_Job, float] = {}
        self._heard_s = clock()

    def asked(self, job: _Job) -> None:
        with self._lock:
            self._asked_s[job] = self._clock()

    def heard(self, job: _Job) -> None:
        with self._lock:
            self._heard_s = self._clock()
            del self._asked_s[job]

    def silent_s(self, jobs: Sequence[_Job]) -> float:
        """Return the longest time for which any of these jobs has waited, or the store has answered nothing at all."""
        with self._lock:
            if not self._asked_s:
                return 0.0
            since_s = [max(self._heard_s, min(self._asked_s.values()))]
            since_s += [self._asked_s[job] for job in jobs if job in self._asked_s]
            return self._clock() - min(since_s)


class _Side:
    """Reading, writing or deleting: its breaker and its jobs. Owned by the loop, except `queue` and `pulse`."""

    def __init__(self, settings: StoreClientSettings, clock: Callable[[], float], *, usual_s: float, num_threads: int) -> None:
        self.num_threads = num_threads
        self.breaker = Breaker(settings.breaker, clock)
        self.pulse = _Pulse(clock)
        self.queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.jobs: set[_Job] = set()  # unanswered
        self._queue_bytes = settings.queue_bytes
        self._usual_s = usual_s

    @property
    def num_queued(self) -> int:
        return sum(job.num_items for job in self.jobs)

    def that_fit(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return the first items, as many as have room; at least one if nothing else waits."""
        room = self._queue_bytes - sum(job.num_bytes for job in self.jobs)
        for index, item in enumerate(items):
            room -= item.num_bytes
            if room < 0:
                return items[: max(index, 0 if self.jobs else 1)]
        return items

    def verdict(self, jobs: Sequence[_Job], outcomes: Sequence[Outcome]) -> Verdict:
        """Return the verdict about the store at the end of a call."""
        if all(outcome.is_answer for outcome in outcomes):
            return Verdict.SUCCESS
        if Outcome.REFUSED in outcomes:
            return Verdict.NOTHING  # given up because the client is closed
        is_silent = self.pulse.silent_s(jobs) >= SILENT_FRACTION * self._usual_s
        return Verdict.FAILURE if is_silent or Outcome.FAILED in outcomes else Verdict.NOTHING

    def permit(self) -> Permit | None:
        """Return None while the store is left alone, or another call tries it."""
        is_open_to_all = self.breaker.state is BreakerState.CLOSED
        return self.breaker.begin() if is_open_to_all or self.breaker.wants_trial else None


class StoreClient:
    """See the module's docstring. Owned by one loop, which calls all its methods.

    Args:
        store: Called from this client's threads only.
        observer: Counts the calls, on the loop.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        loop: asyncio.AbstractEventLoop,
        settings: StoreClientSettings,
        observer: StoreMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._loop = loop
        self._settings = settings
        self._observer = observer
        self._clock = clock
        self._reading = _Side(settings, clock, usual_s=settings.get_timeout_s, num_threads=settings.threads)
        self._writing = _Side(settings, clock, usual_s=settings.put_timeout_s, num_threads=settings.threads)
        self._deleting = _Side(settings, clock, usual_s=settings.put_timeout_s, num_threads=1)
        self._sides = {"read": self._reading, "write": self._writing, "delete": self._deleting}
        self._is_closed = False
        self._running_threads = sum(side.num_threads for side in self._sides.values())
        self._all_ended = asyncio.Event()
        for name, side in self._sides.items():
            for index in range(side.num_threads):
                threading.Thread(target=self._serve, args=(side,), name=f"store-{name}-{index}", daemon=True).start()

    @property
    def name(self) -> str:
        """Name of the store, for people."""
        return self._store.name

    @property
    def num_queued(self) -> int:
        """Pages that wait for the store or for its answer."""
        return sum(side.num_queued for side in self._sides.values())

    @property
    def state(self) -> BreakerState:
        """State of the circuit of reads or writes that is worse."""
        return max(self._reading.breaker.state, self._writing.breaker.state, key=_SEVERITY.index)

    async def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[bool]:
        """Store pages. True means that the page is in the store now. If there is no room for all, the first pages are stored.

        Args:
            used_ns: See `Store`. It applies to the whole call, even if several threads share it.
        """
        items = [_Item(key=key, view=memoryview(view).cast("B")) for key, view in pages]
        return await self._call("put", items, self._writing, self._settings.put_timeout_s, used_ns)

    async def get(
        self, pages: Sequence[tuple[str, memoryview]], *, timeout_s: float | None = None, used_ns: int | None = None
    ) -> list[bool]:
        """Fill writable views, each of the page's exact size. False means a miss of any kind; the view is then unchanged.

        Args:
            timeout_s: Deadline, if less than `get_timeout_s`. A timeout counts against a silent store; a cancelled call does not.
            used_ns: As of `put`.
        """
        items = [_Item(key=key, view=memoryview(view).cast("B")) for key, view in pages]
        return await self._call("get", items, self._reading, self._reading_s(timeout_s), used_ns)

    async def exists(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bool]:
        """Return whether the store has the pages, without reading them. `timeout_s` as of `get`."""
        return await self._call("exists", [_Item(key=key) for key in keys], self._reading, self._reading_s(timeout_s))

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        """Delete pages. True means that the page is not there now; perhaps it never was."""
        return await self._call("delete", [_Item(key=key) for key in keys], self._deleting, self._settings.put_timeout_s)

    async def close(self) -> None:
        """Answer everything, and wait a bounded time for the store. Idempotent. Later calls are refused."""
        self._is_closed = True
        for side in self._sides.values():
            for job in side.jobs:
                job.conclude(Outcome.REFUSED)
            for _ in range(side.num_threads):
                side.queue.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), CLOSE_S)

    # A call

    def _reading_s(self, timeout_s: float | None) -> float:
        return self._settings.get_timeout_s if timeout_s is None else min(timeout_s, self._settings.get_timeout_s)

    async def _call(
        self, op: str, items: Sequence[_Item], side: _Side, timeout_s: float, used_ns: int | None = None
    ) -> list[bool]:
        if not items:
            return []
        begun_s = self._clock()
        outcomes = await self._outcomes(op, items, side, timeout_s, time.time_ns() if used_ns is None else used_ns)
        moved = sum(item.num_bytes for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.OK)
        self._observer.operation_finished(
            op, outcomes, num_bytes=moved if op in ("put", "get") else 0, seconds=self._clock() - begun_s
        )
        read, write = (side.breaker.state.value for side in (self._reading, self._writing))
        self._observer.circuits_changed(read=read, write=write)
        good = (Outcome.OK, Outcome.MISSING) if op == "delete" else (Outcome.OK,)
        return [outcome in good for outcome in outcomes]

    async def _outcomes(self, op: str, items: Sequence[_Item], side: _Side, timeout_s: float, used_ns: int) -> list[Outcome]:
        admitted = () if self._is_closed else side.that_fit(items)
        if not admitted:
            return [Outcome.REFUSED] * len(items)
        permit = side.permit()
        if permit is None:
            return [Outcome.CIRCUIT_OPEN] * len(items)
        verdict = Verdict.NOTHING  # of a cancelled call
        try:
            jobs = _jobs(op, admitted, used_ns, self._loop)
            outcomes = await self._answers(side, jobs, timeout_s)
            verdict = side.verdict(jobs, outcomes)
        finally:
            self._end(op, side.breaker, permit, verdict)
        return outcomes + [Outcome.REFUSED] * (len(items) - len(admitted))

    async def _answers(self, side: _Side, jobs: Sequence[_Job], timeout_s: float) -> list[Outcome]:
        """Return the outcomes by the deadline. When this returns or raises, no view is used any more."""
        side.jobs.update(jobs)
        self._observer.queue_changed(self.num_queued)
        for job in jobs:
            side.queue.put(job)
        try:
            await asyncio.wait([job.answer for job in jobs], timeout=timeout_s)
        finally:
            for job in jobs:
                job.conclude(Outcome.TIMEOUT)
            side.jobs.difference_update(jobs)
            self._observer.queue_changed(self.num_queued)
        return [outcome for job in jobs for outcome in job.answer.result()]

    def _end(self, op: str, breaker: Breaker, permit: Permit, verdict: Verdict) -> None:
        was_open, num_openings = breaker.state is not BreakerState.CLOSED, breaker.num_openings
        breaker.end(permit, verdict)
        if breaker.num_openings != num_openings:
            log.warning("store_circuit_opened", store=self.name, op=op, pause_s=round(breaker.pause_left_s, 3))
        elif was_open and breaker.state is BreakerState.CLOSED:
            log.info("store_circuit_closed", store=self.name, op=op)

    # On a thread

    def _serve(self, side: _Side) -> None:
        while (job := side.queue.get()) is not None:
            side.pulse.asked(job)
            try:
                job.run(self._store)
            except Exception as error:  # any exception is the store's fault, and its pages are misses
                log.warning("store_call_failed", store=self.name, op=job.op, error=repr(error))
            side.pulse.heard(job)
            self._post(partial(job.conclude, Outcome.FAILED))
            del job  # so that a waiting thread holds no pages
        self._post(self._thread_ended)

    def _post(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def _thread_ended(self) -> None:
        self._running_threads -= 1
        if not self._running_threads:
            self._all_ended.set()


def _copied(item: _Item) -> tuple[str, memoryview]:
    return item.key, memoryview(b"") if item.view is None else _bytes_of(item.view).copy().data


# numpy copies without the GIL, unlike a memoryview, so other threads run meanwhile. It is imported here, because a leader imports
# this module and never copies.


def _bytes_of(view: memoryview) -> NDArray[np.uint8]:
    """Return the bytes as an array."""
    import numpy as np

    return np.frombuffer(view, np.uint8)


def _unfilled(num_bytes: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.empty(num_bytes, np.uint8)


def _jobs(op: str, items: Sequence[_Item], used_ns: int, loop: asyncio.AbstractEventLoop) -> list[_Job]:
    jobs, first = [], 0
    for part in _parts(items):
        jobs.append(_Job(op, part, used_ns - first * USED_STEP_NS, loop))
        first += len(part)
    return jobs


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield consecutive items: at most `JOB_KEYS`, and at most `JOB_BYTES` or one item."""
    begin, num_bytes = 0, 0
    for index, item in enumerate(items):
        num_bytes += item.num_bytes
        if index > begin and (num_bytes > JOB_BYTES or index - begin == JOB_KEYS):
            yield items[begin:index]
            begin, num_bytes = index, item.num_bytes
    yield items[begin:]
