"""Keep one rank's host pool: copy pages into it and out of it, and from and into the store, as the leader orders.

The rank's loop owns it. Copies run on two threads, one for each direction of the host link, beside the engine and the transfers.
A save begins when the steps before it are over. No page goes back to the device pool while a copy reads or fills it:
`is_busy` and `copied_from` ensure this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from decode_node.offload.context import FULL
from decode_node.offload.running_blocks import RunningBlocks
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
    StoreBlock,
    StoredKVLost,
    StoreJob,
)
from transfer.copy.page_mover import PageCopy, PageMove, PageMover, movement_of
from transfer.copy.page_segments import IoBackend
from transfer.copy.piece_copier import PieceCopier
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError
from transfer.layer_groups import NO_PAGE, GroupKind
from transfer.layout import Range
from transfer.pool.host_pool import HostPool, mixed_pool
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator, PageEntries
from transfer.rank_context import RankContext
from transfer.storage.client import StoreClient
from transfer.storage.keys import store_fingerprint, store_key, storing_rank
from transfer.worker_thread import WorkerThread

Tables = Sequence[Sequence[int]]


class _OnOver(Protocol):
    """Ends a job, and answers the leader."""

    def __call__(self, failed: tuple[int, ...] = ()) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """Tables of a step. While nothing changes, the next step gets the same objects, which its engine need not read again.

    Args:
        given: Device table that they were made from.
        boundary, stored: Boundary and stored blocks that they were made for.
        device: Device table without the entries that are read elsewhere.
        host: Host pages of those entries that are read in host memory.
    """

    given: PageEntries
    boundary: int
    stored: tuple[int, ...]
    device: PageEntries
    host: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request's pages in host memory and in the store.

    Args:
        host_pages: Host pages of its leading entries, also of those that have moved on to the store.
        boundary: Leading entries that steps read in host memory or in the store.
        num_host_pages: Number of different host pages of a prompt that arrives.
        num_arriving: Leading entries that go on to the store as they arrive.
        num_arrived: Leading entries that have arrived.
        stored: Its blocks in the store, of its first entries.
        is_storing: A block is on its way into the store.
        num_jobs: Copies of its pages in flight.
        copied_from: First entry of each window that a copy reads, by job and group.
        shown: Tables of the last step.
    """

    host_pages: list[int]
    boundary: int
    num_host_pages: int = 0
    num_arriving: int = 0
    num_arrived: int = 0
    stored: tuple[int, ...] = ()
    is_storing: bool = False
    num_jobs: int = 0
    copied_from: dict[int, dict[int, int]] = field(default_factory=dict)
    shown: _Shown | None = None


class OffloadRank:
    """See the module's docstring.

    Args:
        engine_thread: Runs the engine's steps.
        send: Sends a message to the leader.
        on_free: Called with the id of a request that no copy uses any more.
        store: Client of the store; None means that there is no store.
        blocks: Blocks of running requests in the store; None means that running requests do not use the store.
        buffer_bytes: Device memory for the copies of each direction.
        io_backend: How pages cross the host link, see `PageMover`.
        open_thread: Makes the thread of each direction from its name, the loop and `on_crash`.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        pool: KVPool,
        host: HostPool,
        allocator: GroupAllocator,
        engine_thread: WorkerThread,
        send: Callable[[object], None],
        on_free: Callable[[str], None],
        store: StoreClient | None,
        blocks: RunningBlocks | None = None,
        buffer_bytes: int,
        io_backend: IoBackend = "auto",
        open_thread: Callable[[str, asyncio.AbstractEventLoop, Callable[[BaseException], None]], WorkerThread] = WorkerThread,
    ) -> None:
        self._context = context
        self._pool = pool
        self._host = host
        self._allocator = allocator
        self._engine_thread = engine_thread
        self._send = send
        self._on_free = on_free
        self._store = store
        self._blocks = blocks
        self._hold: Callable[[str, Range | None], None] = lambda request_id, tokens: None
        self._fingerprint = store_fingerprint(context.instance)
        self._save_thread = open_thread("save", context.loop, context.on_crash)
        self._load_thread = open_thread("load", context.loop, context.on_crash)
        self._save_mover, self._load_mover = (
            PageMover(
                pool,
                host,
                buffer_bytes=buffer_bytes,
                movement=movement_of(pool, host, buffer_bytes, context.kernels, io_backend),
            )
            for _ in range(2)
        )
        for mover in (self._save_mover, self._load_mover):
            mover.compile()  # on a GPU, the first copies would otherwise wait for the compiler
        self.copier = PieceCopier(mixed_pool(pool, host, FULL), is_source=False, kernels=context.kernels)
        """Prepares the pieces of prompts that arrive in host memory."""
        self._requests: dict[str, _Request] = {}
        self._storing: set[asyncio.Task[None]] = set()

    # Requests

    def listen(self, hold: Callable[[str, Range | None], None]) -> None:
        """Set the function that holds back arrivals, see `ReceiverLoop.hold`."""
        self._hold = hold

    def expect(self, request_id: str, host_pages: tuple[int, ...], num_stored: int = 0) -> None:
        """Expect a request whose leading pages arrive in host memory, see `ExpectRequest`."""
        boundary, size = num_stored + len(host_pages), len(host_pages)
        self._requests[request_id] = _Request(
            host_pages=[host_pages[entry % size] for entry in range(boundary)],
            boundary=boundary,
            num_host_pages=size,
            num_arriving=num_stored,
        )
        if boundary:
            self._allocator.full.pass_before(request_id, boundary)

    def is_busy(self, request_id: str) -> bool:
        """Return whether a copy reads or fills the request's device pages."""
        return self._requests[request_id].num_jobs > 0

    def copied_from(self, request_id: str) -> dict[int, int] | None:
        """Return the first entry of each window that a copy reads, by group; None if no copy reads a window."""
        found: dict[int, int] = {}
        for of_job in self._requests[request_id].copied_from.values():
            for group, entry in of_job.items():
                found[group] = min(entry, found.get(group, entry))
        return found or None

    def forget(self, request_id: str) -> None:
        """Forget a request whose pages are back."""
        request = self._requests.pop(request_id)
        if request.stored and self._blocks is not None:
            self._begin_storing(self._blocks.forget(request.stored))

    def held_tokens(self, request_id: str) -> Range | None:
        """Return the tokens of an arriving prompt for which there are no host pages yet; see `HostArrivals`."""
        request = self._requests[request_id]
        if len(request.stored) * self.stored_block_pages >= request.num_arriving:
            return None
        end, page_size = len(request.stored) * self.stored_block_pages + request.num_host_pages, self._pool.page_size
        return Range(begin=end * page_size, end=request.boundary * page_size)

    def arrived(self, request_id: str, num_tokens: int) -> None:
        """Record that the tokens before `num_tokens` have arrived: whole blocks of them move on to the store."""
        request = self._requests[request_id]
        request.num_arrived = num_tokens // self._pool.page_size
        self._move_on(request_id, request)

    def stop_arriving(self, request_id: str) -> None:
        """Move no more blocks of an arriving prompt on to the store, because its request ended."""
        self._requests[request_id].num_arriving = 0

    def _move_on(self, request_id: str, request: _Request) -> None:
        """Put the next block of an arriving prompt into the store, if it has arrived."""
        begin = len(request.stored) * self.stored_block_pages
        end = begin + self.stored_block_pages
        if request.is_storing or not self.stored_block_pages or end > min(request.num_arrived, request.num_arriving):
            return
        request.is_storing = True
        request.num_jobs += 1
        self._begin_storing(self._store_arrived(request_id, request))

    async def _store_arrived(self, request_id: str, request: _Request) -> None:
        begin = len(request.stored) * self.stored_block_pages
        assert self._blocks is not None
        number = await self._blocks.put(
            request_id, len(request.stored), request.host_pages[begin : begin + self.stored_block_pages]
        )
        request.is_storing = False
        request.num_jobs -= 1
        if number is None:
            request.num_arriving = 0
            self._send(StoredKVLost(request_id=request_id, reason=f"{self._store_name} failed to write KV of its prompt"))
        else:
            request.stored = (*request.stored, number)
            self._hold(request_id, self.held_tokens(request_id))
            self._move_on(request_id, request)
        if not request.num_jobs:
            self._on_free(request_id)

    @property
    def stored_block_pages(self) -> int:
        """Pages of a block of a running request in the store; 0 if running requests do not use the store."""
        return 0 if self._blocks is None else self._blocks.pages_per_block

    @property
    def _store_name(self) -> str:
        return "" if self._store is None else f"the store {self._store.name}"

    def report_lost(self) -> None:
        """Report to the leader the requests for which a step could not read a block. Call it before the step's own report."""
        if self._blocks is not None:
            for request_id, reason in self._blocks.take_lost().items():
                self._send(StoredKVLost(request_id=request_id, reason=reason))

    def arrives_in_host(self, request_id: str, tokens: Range) -> bool:
        """Return whether that part of the prompt goes to host memory.

        Raises:
            LocalProtocolError: Only some of it does. The leader sets a boundary only where a chunk begins.
        """
        request = self._requests[request_id]
        boundary = request.boundary * self._pool.page_size
        if tokens.begin < boundary < tokens.end:
            raise LocalProtocolError(
                f"tokens [{tokens.begin}, {tokens.end}) of request {request_id} arrive on both sides of its boundary, {boundary}"
            )
        return tokens.end <= boundary

    def host_tables(self, request_id: str, tables: Tables) -> Tables:
        """Return the tables for KV that arrives in host memory: host pages replace the device pages."""
        return (self._requests[request_id].host_pages, *tables[1:])

    def step_tables(
        self, request_id: str, tables: tuple[PageEntries, ...]
    ) -> tuple[tuple[PageEntries, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Return a step's device tables, without the entries that are read elsewhere, and its host pages and stored blocks."""
        request = self._requests[request_id]
        if not request.boundary:
            return tables, (), ()
        full, shown, place = tables[FULL], request.shown, (request.boundary, request.stored)
        if shown is None or shown.given is not full or (shown.boundary, shown.stored) != place:
            known = shown.host if shown is not None and (shown.boundary, shown.stored) == place else None
            num_stored = len(request.stored) * self.stored_block_pages
            shown = request.shown = _Shown(
                given=full,
                boundary=request.boundary,
                stored=request.stored,
                device=full.without(request.boundary),
                host=tuple(request.host_pages[num_stored : request.boundary]) if known is None else known,
            )
        return (shown.device, *tables[1:]), (shown.host, *((),) * (len(tables) - 1)), shown.stored

    # The leader's orders

    def on_message(self, message: Any) -> bool:
        """Carry out an order. Return False for any other message."""
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
            case StoreBlock():
                self._begin_storing(self._store_block(message, self._begin_job(message.job, message.request_id)))
            case _:
                return False
        return True

    def _save(self, message: SavePages) -> None:
        moves = self._moves(message.request_id, message.runs)
        on_over = self._begin_job(message.job, message.request_id, read=message.runs)

        def copy(event: DeviceEvent | None) -> None:
            self._submit(self._save_thread, "save", lambda: self._save_mover.save(moves, event), on_over)

        # After the steps that compute the pages: the leader knows that they are over on another rank, not on this one.
        self._engine_thread.submit(self._recorded_event, copy)

    def _load(self, message: LoadPages) -> None:
        for run in message.runs:
            if run.group == FULL and message.grow:
                self._grow(message.request_id, message.grow)
            end = (run.first_entry + len(run.host_pages)) * self._pool.page_size
            self._allocator.cover(message.request_id, end)
        moves = self._moves(message.request_id, message.runs)
        on_over = self._begin_job(message.job, message.request_id)
        self._submit(self._load_thread, "load", lambda: self._load_mover.load(moves), on_over)

    def _grow(self, request_id: str, num_pages: int) -> None:
        """Take device pages for entries that are brought back."""
        if not self._allocator.full.reserve(request_id, num_pages):
            raise LocalProtocolError(f"no room for {num_pages} pages of request {request_id}, which the leader had counted")
        self._allocator.full.bind_before(request_id, num_pages)

    def _copy(self, message: CopyPages) -> None:
        copies: list[PageCopy] = []
        for run in message.runs:
            self._allocator.cover(message.request_id, (run.first_entry + run.count) * self._pool.page_size)
            of_source = self._device_pages(message.source_id, run.group, run.first_entry, run.count)
            of_target = self._device_pages(message.request_id, run.group, run.first_entry, run.count)
            copies.append(PageCopy(group=run.group, source_pages=of_source, target_pages=of_target))
        on_over = self._begin_job(message.job, message.source_id, message.request_id, read=message.runs)

        def copy(event: DeviceEvent | None) -> None:
            self._submit(self._load_thread, "copy", lambda: self._load_mover.copy(copies, event), on_over)

        self._engine_thread.submit(self._recorded_event, copy)  # after the steps that compute the pages, as a save

    def _move_boundary(self, message: MoveBoundary) -> None:
        request = self._requests.get(message.request_id)
        if request is None or (message.job is None and request.boundary < message.boundary):
            raise LocalProtocolError(f"the boundary of request {message.request_id} cannot be moved to {message.boundary}")
        behind, request.boundary = request.boundary, message.boundary
        if message.job is None:
            return
        request.host_pages[behind:] = message.host_pages
        on_over = self._begin_job(message.job, message.request_id)

        def give_back(_: None) -> None:
            self._allocator.full.pass_before(message.request_id, message.boundary)
            self._allocator.full.give_back(message.request_id, message.give_back)
            on_over()

        self._engine_thread.submit(lambda: None, give_back)  # after the steps that read the pages on the device

    async def _store_block(self, message: StoreBlock, on_over: _OnOver) -> None:
        request = self._requests[message.request_id]
        assert self._blocks is not None
        number = await self._blocks.put(message.request_id, message.index, message.host_pages)
        if number is None:
            on_over(failed=(0,))
            return
        request.stored = (*request.stored, number)
        # After the steps that read its host pages. Others read the block, which has the same bytes: the ranks need not agree.
        self._engine_thread.submit(lambda: None, lambda _: on_over())

    def _begin_job(self, job: int, *request_ids: str, read: Sequence[HostPageRun | EntryRun] = ()) -> _OnOver:
        """Count a job that uses device pages of requests.

        Args:
            read: Entries of the first request that the job reads, in ascending order.

        Returns:
            Ends the job, and answers the leader.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        windows = requests[0].copied_from.setdefault(job, {}) if read else {}
        for run in read:
            if self._pool.groups[run.group].kind is GroupKind.WINDOW:
                windows.setdefault(run.group, run.first_entry)
        for request in requests:
            request.num_jobs += 1

        def over(failed: tuple[int, ...] = ()) -> None:
            self._send(JobDone(job=job, failed=failed))
            for request_id, request in zip(request_ids, requests, strict=True):
                request.copied_from.pop(job, None)
                request.num_jobs -= 1
                if not request.num_jobs:
                    self._on_free(request_id)

        return over

    def _submit(self, thread: WorkerThread, direction: str, copy: Callable[[], int], on_over: Callable[[], None]) -> None:
        """Copy on a thread. `copy` returns the number of bytes."""

        def timed() -> tuple[int, float]:
            started_s = time.monotonic()
            return copy(), time.monotonic() - started_s

        def done(result: tuple[int, float]) -> None:
            self._context.metrics.pages_copied(direction, *result)
            on_over()

        thread.submit(timed, done)

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

    def _begin_storing(self, work: Awaitable[JobDone | None]) -> None:
        async def store() -> None:
            if (answer := await work) is not None:
                self._send(answer)

        task = self._context.loop.create_task(store())
        self._storing.add(task)
        task.add_done_callback(self._on_stored)

    def _on_stored(self, task: asyncio.Task[None]) -> None:
        self._storing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.on_crash(error)

    async def _back_up(self, message: BackUpPages) -> JobDone:
        group, shard = self._pool.groups[message.group], self._pool.shard
        if storing_rank(group, layout=self._pool.layout, shard=shard) != shard.tp_rank:
            return JobDone(job=message.job)  # another rank stores the same bytes
        assert self._store is not None
        stored = await self._store.put(self._views(message), used_ns=message.used_ns)
        return JobDone(job=message.job, failed=_where_false(stored))

    async def _fetch(self, message: FetchPages) -> JobDone:
        assert self._store is not None
        found = await self._store.get(self._views(message), used_ns=message.used_ns)
        return JobDone(job=message.job, failed=_where_false(found))

    def _views(self, message: StoreJob) -> list[tuple[str, memoryview]]:
        group, layout, shard = self._pool.groups[message.group], self._pool.layout, self._pool.shard
        return [
            (
                store_key(self._fingerprint, page_hash, group=group, layout=layout, shard=shard),
                self._host.page(message.group, number),
            )
            for page_hash, number in zip(message.hashes, message.host_pages, strict=True)
        ]

    # End

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of the host pool, for each group of layers."""
        return self._host.num_pages

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and nothing is on its way into the store or out of it."""
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


def _where_false(answers: Sequence[bool]) -> tuple[int, ...]:
    return tuple(place for place, is_good in enumerate(answers) if not is_good)
