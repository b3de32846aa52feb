"""One rank's host pool: pages copied into it and out of it, from and into the store, as the leader orders.

The rank's loop owns it. Copies run on two threads, one for each direction of the host link, beside the engine and the transfers.
A save begins when the steps before it are over, and no page goes back to the device pool while a copy reads or fills it: that is
what `is_busy` and `copied_from` are for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from decode_node.rank_messages import (
    BackUpPages,
    CopyPages,
    EntryRun,
    FetchPages,
    HostPageRun,
    JobDone,
    LoadPages,
    MoveBoundary,
    SavePages,
    StoreJob,
)
from transfer.copy.page_mover import PageCopy, PageMove, PageMover
from transfer.copy.piece_copier import PieceCopier
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.layer_groups import NO_PAGE, GroupKind
from transfer.layout import Range
from transfer.metrics import RankMetrics
from transfer.pool.host_pool import HostPool, mixed_pool
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator, PageEntries
from transfer.storage.client import StoreClient
from transfer.storage.keys import store_key, storing_rank
from transfer.worker_thread import WorkerThread

FULL = 0
"""Index of the group of layers that keep every token, which comes first."""

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Tables as a step was given them; the same objects again while nothing has changed, which are not looked at twice.

    Args:
        given: The device table that it was made of.
        boundary: The boundary that it was made for.
        device: The device table without what is read in host memory.
        host: Host pages of that.
    """

    given: PageEntries
    boundary: int
    device: PageEntries
    host: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Request:
    """What of a request lies in host memory.

    Args:
        host_pages: Of its leading entries, as far as the leader has said.
        boundary: Leading entries that steps read there.
        num_jobs: Copies of its pages under way.
        copied_from: First entry of each window that a copy reads, by job and group.
        shown: What the last step was given.
    """

    host_pages: list[int]
    boundary: int
    num_jobs: int = 0
    copied_from: dict[int, dict[int, int]] = field(default_factory=dict)
    shown: _Shown | None = None


class OffloadRank:
    """See the module's docstring.

    Args:
        pool: The device pool.
        host: The host pool.
        allocator: Device pages.
        engine_thread: What runs the engine's steps.
        loop: The rank's loop.
        metrics: Where durations and counts go.
        send: To the leader.
        on_free: Called with the id of a request that no copy uses any more.
        on_crash: Called with an error that must end the rank.
        store: The rank's end of the store; None where there is none.
        fingerprint: Of the store's pages.
        buffer_bytes: Device memory of each direction's copies.
        open_thread: Returns the thread of each direction's copies, from its name, the loop and `on_crash`.
    """

    def __init__(
        self,
        *,
        pool: KVPool,
        host: HostPool,
        allocator: GroupAllocator,
        engine_thread: WorkerThread,
        loop: asyncio.AbstractEventLoop,
        metrics: RankMetrics,
        send: Callable[[object], None],
        on_free: Callable[[str], None],
        on_crash: Callable[[BaseException], None],
        store: StoreClient | None,
        fingerprint: str,
        buffer_bytes: int,
        open_thread: Callable[[str, asyncio.AbstractEventLoop, Callable[[BaseException], None]], WorkerThread] = WorkerThread,
    ) -> None:
        self._pool = pool
        self._host = host
        self._allocator = allocator
        self._engine_thread = engine_thread
        self._loop = loop
        self._metrics = metrics
        self._send = send
        self._on_free = on_free
        self._on_crash = on_crash
        self._store = store
        self._fingerprint = fingerprint
        self._save_thread = open_thread("save", loop, on_crash)
        self._load_thread = open_thread("load", loop, on_crash)
        self._save_mover = PageMover(pool, host, buffer_bytes=buffer_bytes)
        self._load_mover = PageMover(pool, host, buffer_bytes=buffer_bytes)
        for mover in (self._save_mover, self._load_mover):
            mover.compile()  # on a GPU; otherwise the first copies would wait for that
        self.copier = PieceCopier(mixed_pool(pool, host, FULL), is_source=False)
        """Prepares the pieces of prompts that arrive in host memory."""
        self._requests: dict[str, _Request] = {}
        self._storing: set[asyncio.Task[None]] = set()

    # Requests

    def expect(self, request_id: str, host_pages: tuple[int, ...]) -> None:
        """A request is about to arrive, its leading pages in these host pages."""
        self._requests[request_id] = _Request(host_pages=list(host_pages), boundary=len(host_pages))
        if host_pages:
            self._allocator.full.pass_before(request_id, len(host_pages))

    def is_busy(self, request_id: str) -> bool:
        """Whether a copy reads or fills the request's device pages."""
        return self._requests[request_id].num_jobs > 0

    def copied_from(self, request_id: str) -> dict[int, int] | None:
        """First entry of each window that a copy reads, by group; None where there is none."""
        found: dict[int, int] = {}
        for of_job in self._requests[request_id].copied_from.values():
            for group, entry in of_job.items():
                found[group] = min(entry, found.get(group, entry))
        return found or None

    def forget(self, request_id: str) -> None:
        """The request's pages are back."""
        del self._requests[request_id]

    def arrives_in_host(self, request_id: str, tokens: Range) -> bool:
        """Whether that part of the prompt goes to host memory.

        Raises:
            LocalProtocolError: Part of it does; the leader lets a boundary be only where chunks begin.
        """
        request = self._requests[request_id]
        boundary = request.boundary * self._pool.page_size
        if tokens.begin < boundary < tokens.end:
            raise LocalProtocolError(
                f"tokens [{tokens.begin}, {tokens.end}) of request {request_id} arrive on both sides of its boundary, {boundary}"
            )
        return tokens.end <= boundary

    def host_tables(self, request_id: str, tables: Tables) -> Tables:
        """Tables for what arrives in host memory: host pages in place of the device's."""
        return (self._requests[request_id].host_pages, *tables[1:])

    def step_tables(
        self, request_id: str, tables: tuple[PageEntries, ...]
    ) -> tuple[tuple[PageEntries, ...], tuple[tuple[int, ...], ...]]:
        """What a step is given: device tables without the entries that are read in host memory, and the host pages of those."""
        request = self._requests[request_id]
        if not request.boundary:
            return tables, ()
        full, shown = tables[FULL], request.shown
        if shown is None or shown.given is not full or shown.boundary != request.boundary:
            known = shown.host if shown is not None and shown.boundary == request.boundary else None
            shown = request.shown = _Shown(
                given=full,
                boundary=request.boundary,
                device=full.without(request.boundary),
                host=tuple(request.host_pages[: request.boundary]) if known is None else known,
            )
        return (shown.device, *tables[1:]), (shown.host, *((),) * (len(tables) - 1))

    # The leader's orders

    def on_message(self, message: Any) -> bool:
        """Carry out an order; False when it is none."""
        match message:
            case SavePages():
                self._save(message)
            case LoadPages():
                self._load(message)
            case CopyPages():
                self._copy(message)
            case MoveBoundary():
                self._move_boundary(message)
            case BackUpPages():
                self._begin_storing(self._back_up(message))
            case FetchPages():
                self._begin_storing(self._fetch(message))
            case _:
                return False
        return True

    def _save(self, message: SavePages) -> None:
        request = self._requests[message.request_id]
        moves = self._moves(message.request_id, message.runs)
        request.copied_from[message.job] = self._window_entries(message.runs)
        request.num_jobs += 1

        def done(result: tuple[int, float]) -> None:
            self._metrics.pages_copied("save", *result)
            request.copied_from.pop(message.job, None)
            self._job_over(message.request_id, request, message.job)

        def copy(event: DeviceEvent | None) -> None:
            self._save_thread.submit(lambda: _timed(lambda: self._save_mover.save(moves, event)), done)

        # Behind the steps that compute the pages. Of another rank's step the leader knows that it is over, not of this rank's.
        self._engine_thread.submit(self._recorded_event, copy)

    def _load(self, message: LoadPages) -> None:
        request = self._requests[message.request_id]
        for run in message.runs:
            if run.group == FULL and message.grow:
                self._grow(message.request_id, message.grow)
            end = (run.first_entry + len(run.host_pages)) * self._pool.page_size
            self._allocator.cover(message.request_id, end)
        moves = self._moves(message.request_id, message.runs)
        request.num_jobs += 1

        def done(result: tuple[int, float]) -> None:
            self._metrics.pages_copied("load", *result)
            self._job_over(message.request_id, request, message.job)

        self._load_thread.submit(lambda: _timed(lambda: self._load_mover.load(moves)), done)

    def _grow(self, request_id: str, num_pages: int) -> None:
        """Take device pages for what is brought back."""
        if not self._allocator.full.reserve(request_id, num_pages):
            raise LocalProtocolError(f"no room for {num_pages} pages of request {request_id}, which the leader had counted")
        self._allocator.full.bind_before(request_id, num_pages)

    def _copy(self, message: CopyPages) -> None:
        source, request = self._requests[message.source_id], self._requests[message.request_id]
        copies: list[PageCopy] = []
        for run in message.runs:
            self._allocator.cover(message.request_id, (run.first_entry + run.count) * self._pool.page_size)
            of_source = self._device_pages(message.source_id, run.group, run.first_entry, run.count)
            of_target = self._device_pages(message.request_id, run.group, run.first_entry, run.count)
            copies.append(PageCopy(group=run.group, source_pages=of_source, target_pages=of_target))
        source.copied_from[message.job] = self._window_entries(message.runs)
        source.num_jobs += 1
        request.num_jobs += 1

        def done(result: tuple[int, float]) -> None:
            self._metrics.pages_copied("copy", *result)
            source.copied_from.pop(message.job, None)
            self._send(JobDone(job=message.job))
            self._copied(message.source_id, source)
            self._copied(message.request_id, request)

        def copy(event: DeviceEvent | None) -> None:
            self._load_thread.submit(lambda: _timed(lambda: self._load_mover.copy(copies, event)), done)

        self._engine_thread.submit(self._recorded_event, copy)  # behind the steps that compute the pages, as a save

    def _move_boundary(self, message: MoveBoundary) -> None:
        request = self._requests.get(message.request_id)
        if request is None or (message.job is None and request.boundary < message.boundary):
            raise LocalProtocolError(f"the boundary of request {message.request_id} cannot be moved to {message.boundary}")
        behind, request.boundary = request.boundary, message.boundary
        if message.job is None:
            return
        request.host_pages[behind:] = message.host_pages
        job = message.job
        request.num_jobs += 1

        def over(_: None) -> None:
            self._allocator.full.pass_before(message.request_id, message.boundary)
            self._allocator.full.give_back(message.request_id, message.give_back)
            self._job_over(message.request_id, request, job)

        self._engine_thread.submit(lambda: None, over)  # behind the steps that read the pages on the device

    def _job_over(self, request_id: str, request: _Request, job: int) -> None:
        self._send(JobDone(job=job))
        self._copied(request_id, request)

    def _copied(self, request_id: str, request: _Request) -> None:
        """One job less uses the request's pages."""
        request.num_jobs -= 1
        if not request.num_jobs:
            self._on_free(request_id)

    def _window_entries(self, runs: Sequence[HostPageRun | EntryRun]) -> dict[int, int]:
        """First entry of each window, of runs that ascend."""
        found: dict[int, int] = {}
        for run in runs:
            if self._pool.groups[run.group].kind is GroupKind.WINDOW:
                found.setdefault(run.group, run.first_entry)
        return found

    def _moves(self, request_id: str, runs: Sequence[HostPageRun]) -> list[PageMove]:
        moves: list[PageMove] = []
        for run in runs:
            device_pages = self._device_pages(request_id, run.group, run.first_entry, len(run.host_pages))
            moves.append(PageMove(group=run.group, device_pages=device_pages, host_pages=run.host_pages))
        return moves

    def _device_pages(self, request_id: str, group: int, first_entry: int, count: int) -> tuple[int, ...]:
        found = self._allocator.tables(request_id)[group][first_entry : first_entry + count]
        if len(found) != count or NO_PAGE in found:
            entries = f"[{first_entry}, {first_entry + count})"
            raise LocalProtocolError(f"entries {entries} of request {request_id}, group {group}, are not all on the device")
        return found

    def _recorded_event(self) -> DeviceEvent | None:
        if self._pool.device.type != "cuda":
            return None
        event: DeviceEvent = torch.cuda.current_stream(self._pool.device).record_event()
        return event

    # The store

    def _begin_storing(self, work: Awaitable[JobDone]) -> None:
        async def store() -> None:
            self._send(await work)

        task = self._loop.create_task(store())
        self._storing.add(task)
        task.add_done_callback(self._on_stored)

    def _on_stored(self, task: asyncio.Task[None]) -> None:
        self._storing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)

    async def _back_up(self, message: BackUpPages) -> JobDone:
        group, shard = self._pool.groups[message.group], self._pool.shard
        if storing_rank(group, layout=self._pool.layout, shard=shard) != shard.tp_rank:
            return JobDone(job=message.job)  # another rank has the very same bytes, and stores them
        assert self._store is not None
        stored = await self._store.put(self._views(message), used_ns=message.used_ns)
        return JobDone(job=message.job, failed=_where_false(stored))

    async def _fetch(self, message: FetchPages) -> JobDone:
        assert self._store is not None
        found = await self._store.get(self._views(message), used_ns=message.used_ns)
        return JobDone(job=message.job, failed=_where_false(found))

    def _views(self, message: StoreJob) -> list[tuple[str, memoryview]]:
        return [
            (self._key(message.group, page_hash), self._host.page(message.group, number))
            for page_hash, number in zip(message.hashes, message.host_pages, strict=True)
        ]

    def _key(self, group: int, page_hash: bytes) -> str:
        pool = self._pool
        return store_key(self._fingerprint, page_hash, group=pool.groups[group], layout=pool.layout, shard=pool.shard)

    # End

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of the host pool, for each group of layers."""
        return self._host.num_pages

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, and nothing on its way into the store or out of it."""
        return not self._requests and not self._storing

    async def close(self) -> None:
        """End the threads, the store and the host pool, in bounded time."""
        for task in list(self._storing):
            task.cancel()
        if self._store is not None:
            await self._store.close()
        is_over = [thread.close(timeout_s=5.0) for thread in (self._save_thread, self._load_thread)]
        if all(is_over):  # otherwise a copy may still use the memory, which goes with the process
            self._host.close()


def _timed(copy: Callable[[], int]) -> tuple[int, float]:
    """Bytes moved, and seconds."""
    started_s = time.monotonic()
    return copy(), time.monotonic() - started_s


def _where_false(answers: Sequence[bool]) -> tuple[int, ...]:
    return tuple(place for place, is_good in enumerate(answers) if not is_good)
