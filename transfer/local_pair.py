"""Both tiers of a transfer in one process: to try the library, and as the shortest complete use of its two loops.

    async with LocalPair(prefill_pools, decode_pools) as pair:
        await pair.transfer("a prompt", num_tokens=100, prefill_tables=..., decode_tables=...)

A `SenderLoop` for each prefill rank and a `ReceiverLoop` for each decode rank are joined over in-process channels. Between
processes, `Attach` and the transports of `transfer.transport` take the place of these channels: see docs/integration.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Final, Self

from transfer.chunk import ChunkPlan, largest_wire_bytes, split_into_chunks
from transfer.control.inproc_channel import InprocControlServer
from transfer.copy.digest import DIGEST_XXH3
from transfer.errors import ConfigError, LayoutError, TransferAborted, TransferError
from transfer.instance import Instance
from transfer.layer_groups import GroupKind
from transfer.layout import Route, Shard, dcp_differences, routes, wire_dtype
from transfer.messages import PROTOCOL_VERSIONS
from transfer.metrics import RankMetrics
from transfer.piece import RankRequest, SessionRoute, TransferTerms
from transfer.pool.kv_pool import KVPool
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.loop import ReceiverLoop
from transfer.ring import Watermark
from transfer.send.events import SenderSettings, SentStats
from transfer.send.loop import SenderLoop
from transfer.transport.base import REGION_ALIGNMENT_BYTES, Transport
from transfer.transport.inproc import InprocHub, InprocTransport

Tables = Sequence[Sequence[Sequence[int]]]
"""[rank][group of layers][entry] -> page. Token t of a group that keeps all tokens lies in the page of entry t // page_size."""

_PREFILL_LIFE: Final = 1
_DECODE_LIFE: Final = 2
_RING_PIECES: Final = 8  # of each prefill rank that writes into the ring


class LocalTransfer:
    """One request on its way. Created by `LocalPair.begin`."""

    def __init__(
        self, pair: LocalPair, request_id: str, transfer_id: str, num_tokens: int, prefill: Tables, decode: Tables
    ) -> None:
        self.request_id = request_id
        self.transfer_id = transfer_id
        """Its name in messages. A rank can know a cancelled transfer longer than its caller waits."""
        self.num_tokens = num_tokens
        self.prefill_tables = prefill
        self.decode_tables = decode
        self.stats: dict[int, SentStats] = {}
        """Statistics of each prefill rank that has sent all of its part, by its rank."""
        self._pair = pair
        self._open = {("prefill", rank) for rank in range(len(prefill))} | {("decode", rank) for rank in range(len(decode))}
        self._failure: TransferError | None = None
        self._num_computed = 0
        self._next_chunk = 0
        self._chunks = split_into_chunks(pair.plan, num_tokens=num_tokens, num_layers=pair.layout.num_layers)
        self._result: asyncio.Future[TransferError | None] = asyncio.get_running_loop().create_future()

    def computed(self, num_tokens: int) -> None:
        """Report that the KV of the first `num_tokens` tokens is in the prefill pools. Complete chunks begin to travel.

        Raises:
            LayoutError: It is more than the request has, or less than was reported before.
        """
        if not self._num_computed <= num_tokens <= self.num_tokens:
            raise LayoutError(f"num_tokens is {num_tokens}; it must be in [{self._num_computed}, {self.num_tokens}]")
        self._num_computed = num_tokens
        while self._next_chunk < len(self._chunks) and self._chunks[self._next_chunk].tokens.end <= num_tokens:
            self._pair.chunk_computed(self.transfer_id, self._next_chunk)
            self._next_chunk += 1

    async def wait(self) -> None:
        """Return when all KV is in the decode pools, and the prefill pools are no longer read.

        Raises:
            TransferError: The transfer failed, or was cancelled. Nothing reads or writes its pages any more.
        """
        failure = await asyncio.shield(self._result)
        if failure is not None:
            raise failure

    def cancel(self, reason: str) -> None:
        """Give the request up. `wait` then raises `TransferAborted`."""
        self._pair.cancel(self.transfer_id, reason)

    # What the ranks report

    def crash(self, error: BaseException) -> None:
        """End the wait with an unexpected error."""
        if not self._result.done():
            self._result.set_exception(error)

    def rank_failed(self, error: TransferError) -> None:
        """Record a failure. Only the first one counts."""
        self._failure = self._failure or error

    def rank_over(self, role: str, rank: int) -> bool:
        """Record that a rank has ended its part. Return whether all have."""
        self._open.discard((role, rank))
        if not self._open and not self._result.done():
            self._result.set_result(self._failure)
        return not self._open


class _Sender:
    """A prefill rank: a `SenderOwner`."""

    def __init__(self, pair: LocalPair, pool: KVPool, hub: InprocHub, slot_bytes: int, num_slots: int) -> None:
        self.rank = pool.shard.rank
        self.transport = InprocTransport(hub)
        self.sessions: dict[int, int] = {}  # by decode rank
        self._pair = pair
        self.loop = SenderLoop(
            context=inproc_context(pool, self.transport, role="prefill", incarnation=_PREFILL_LIFE, on_crash=pair.crash),
            owner=self,
            pool=pool,
            staging=StagingBuffer(num_slots * slot_bytes),
            settings=SenderSettings(num_slots=num_slots, slot_bytes=slot_bytes),
        )

    def tables_of(self, request_id: str) -> Sequence[Sequence[int]]:
        return self._pair.transfer_of(request_id).prefill_tables[self.rank]

    def on_source_released(self, request_id: str) -> None:
        return

    def on_sent(self, request_id: str, stats: SentStats) -> None:
        self._pair.transfer_of(request_id).stats[self.rank] = stats
        self._pair.rank_over(request_id, "prefill", self.rank)

    def on_failed(self, request_id: str, reason: str) -> None:
        self._pair.cancel(request_id, reason)
        self._pair.rank_over(request_id, "prefill", self.rank)


class _Receiver:
    """A decode rank: a `ReceiverOwner`."""

    def __init__(self, pair: LocalPair, pool: KVPool, hub: InprocHub, ring_bytes: int) -> None:
        self.rank = pool.shard.rank
        self.transport = InprocTransport(hub)
        self.control = InprocControlServer()
        self._pair = pair
        self._writers: dict[int, _Sender] = {}  # by session
        self.loop = ReceiverLoop(
            context=inproc_context(pool, self.transport, role="decode", incarnation=_DECODE_LIFE, on_crash=pair.crash),
            owner=self,
            pool=pool,
            ring_memory=StagingBuffer(ring_bytes),
            control=self.control,
        )
        self.loop.watch_sessions(lambda session, reason: None, self._publish)

    def attach(self, sender: _Sender, session: int) -> None:
        """Open a session with a prefill rank, as `Attach` does between processes."""
        offer = sender.transport.offer()
        target, answer = self.transport.accept(offer.blob, self.loop.memory)
        self.loop.driver.add(target)
        self.loop.open_session(session, target, incarnation=_PREFILL_LIFE)
        writer = offer.complete(answer)
        sender.loop.driver.add(writer)
        sender.loop.open_session(
            session,
            writer,
            self.control.connect(session),
            name=f"decode rank {self.rank}",
            incarnation=_DECODE_LIFE,
            ring_capacity_bytes=self.loop.ring.capacity_bytes,
        )
        self._writers[session] = sender
        sender.sessions[self.rank] = session
        sender.loop.on_watermark(session, self.loop.ring.watermark())

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        return self._pair.transfer_of(request_id).decode_tables[self.rank]

    def on_complete(self, request_id: str) -> None:
        self._pair.rank_over(request_id, "decode", self.rank)

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        self._pair.cancel(request_id, f"decode rank {self.rank}: {reason}")

    def on_drained(self, request_id: str) -> None:
        self._pair.rank_over(request_id, "decode", self.rank)

    def _publish(self, watermark: Watermark, sessions: frozenset[int] | None) -> None:
        for session, sender in self._writers.items():
            asyncio.get_running_loop().call_soon(sender.loop.on_watermark, session, watermark)


def inproc_context(
    pool: KVPool, transport: Transport, *, role: str, incarnation: int, on_crash: Callable[[BaseException], None]
) -> RankContext:
    """Return the context of the rank that has this pool, for ranks that share a process."""
    instance = Instance(
        incarnation=incarnation,
        layout=pool.layout,
        shard=pool.shard,
        transport=transport.name,
        digests=(DIGEST_XXH3,),
        protocol_versions=PROTOCOL_VERSIONS,
    )
    return RankContext(
        loop=asyncio.get_running_loop(),
        instance=instance,
        rank=pool.shard.rank,
        device=pool.device,
        transport=transport,
        metrics=RankMetrics(role=role, rank=pool.shard.rank),
        on_crash=on_crash,
    )


class LocalPair:
    """The prefill and the decode ranks of one model in this process, on the running event loop.

    Args:
        prefill_pools: Pool of each prefill rank, in rank order, in host memory.
        decode_pools: Pool of each decode rank, likewise. Shards may differ from those of the prefill ranks.
        plan: How requests are divided. One piece of it sizes the staging memory and the rings.

    Raises:
        ConfigError: A pool is on a device, or the pools of a tier are not those of all ranks of one shard.
        LayoutError: The tiers have different layouts, or shards between which KV cannot travel.
    """

    def __init__(
        self,
        prefill_pools: Sequence[KVPool],
        decode_pools: Sequence[KVPool],
        *,
        plan: ChunkPlan | None = None,
        num_slots: int = 4,
    ) -> None:
        prefill, decode = _shard_of("prefill_pools", prefill_pools), _shard_of("decode_pools", decode_pools)
        self.layout = prefill_pools[0].layout
        """The KV of the whole model."""
        for pool in (*prefill_pools, *decode_pools):
            if pool.layout != self.layout:
                raise LayoutError("the pools have different layouts; both tiers must hold the KV of the same model")
        self.plan = ChunkPlan(chunk_tokens=128) if plan is None else plan
        """How requests are divided."""
        for shard in (prefill, decode):
            shard.check_dcp(self.layout)
        if differences := dcp_differences(prefill, decode):
            raise LayoutError(f"the tiers do not fit: {'; '.join(differences)}")
        self._routes = routes(self.layout, prefill, decode)
        self._dtype = wire_dtype(self.layout, prefill, decode)
        self._pools = {"prefill": tuple(prefill_pools), "decode": tuple(decode_pools)}
        self._num_slots = num_slots
        self._senders: list[_Sender] = []
        self._receivers: list[_Receiver] = []
        self._transfers: dict[str, LocalTransfer] = {}  # by transfer id
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        hub, most = InprocHub(), self._largest_piece
        slot_bytes = -(-most // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
        self._senders = [_Sender(self, pool, hub, slot_bytes, self._num_slots) for pool in self._pools["prefill"]]
        ring_bytes = _RING_PIECES * len(self._senders) * slot_bytes
        self._receivers = [_Receiver(self, pool, hub, ring_bytes) for pool in self._pools["decode"]]
        for session, (source, target) in enumerate(sorted({(r.prefill_rank, r.decode_rank) for r in self._routes}), 1):
            self._receivers[target].attach(self._senders[source], session)
        return self

    async def __aexit__(self, *_: object) -> None:
        for sender in self._senders:
            sender.loop.close()
        for receiver in self._receivers:
            receiver.loop.close()

    @property
    def _largest_piece(self) -> int:
        return largest_wire_bytes(self.plan, self.layout, self._routes, self._dtype)

    async def transfer(
        self, request_id: str, *, num_tokens: int, prefill_tables: Tables, decode_tables: Tables
    ) -> dict[int, SentStats]:
        """Move the KV of a prompt that is complete in the prefill pools. Return the statistics of each prefill rank, by rank.

        See `begin` for arguments and errors, and `LocalTransfer.wait` for further errors.
        """
        moving = self.begin(request_id, num_tokens=num_tokens, prefill_tables=prefill_tables, decode_tables=decode_tables)
        moving.computed(num_tokens)
        await moving.wait()
        return moving.stats

    def begin(self, request_id: str, *, num_tokens: int, prefill_tables: Tables, decode_tables: Tables) -> LocalTransfer:
        """Start the transfer of a prompt whose KV is not computed yet.

        Args:
            request_id: Unique among the transfers under way.
            num_tokens: Tokens of the prompt, at least 1.
            prefill_tables: Page tables of each prefill rank, from token 0 on, for the whole prompt.
            decode_tables: Page tables of each decode rank, likewise. Their pages must not hold anything else.

        Raises:
            LayoutError: A table is missing or too short, or names a page that its pool does not have.
            ConfigError: The request is under way already.
        """
        if any(moving.request_id == request_id for moving in self._transfers.values()):
            raise ConfigError(f"request_id {request_id!r} is under way already; ids must be unique")
        if num_tokens < 1:
            raise LayoutError(f"num_tokens is {num_tokens}; it must be at least 1")
        _check_tables("prefill_tables", prefill_tables, self._pools["prefill"], num_tokens)
        _check_tables("decode_tables", decode_tables, self._pools["decode"], num_tokens)
        transfer_id = f"{request_id}-{next(self._numbers)}"
        moving = LocalTransfer(self, request_id, transfer_id, num_tokens, prefill_tables, decode_tables)
        self._transfers[transfer_id] = moving
        for receiver in self._receivers:
            mine = [(route, self._senders[route.prefill_rank]) for route in self._routes if route.decode_rank == receiver.rank]
            receiver.loop.expect_request(
                self._request(moving, [(route, sender.sessions[receiver.rank]) for route, sender in mine])
            )
        for sender in self._senders:
            sender.loop.start_request(
                self._request(
                    moving,
                    [(r, sender.sessions[r.decode_rank]) for r in self._routes if r.prefill_rank == sender.rank],
                )
            )
        return moving

    def _request(self, moving: LocalTransfer, mine: Sequence[tuple[Route, int]]) -> RankRequest:
        terms = TransferTerms(
            layout=self.layout,
            wire_dtype=self._dtype,
            routes=tuple(SessionRoute(route=route, session=session) for route, session in mine),
            digest=DIGEST_XXH3,
        )
        return terms.request(moving.transfer_id, plan=self.plan, num_tokens=moving.num_tokens, start_token=0)

    # What the ranks and the transfers call

    def transfer_of(self, transfer_id: str) -> LocalTransfer:
        return self._transfers[transfer_id]

    def chunk_computed(self, transfer_id: str, chunk: int) -> None:
        for sender in self._senders:
            sender.loop.chunk_computed(transfer_id, chunk, None)

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Give up a transfer on all ranks. Ignore one that is over."""
        moving = self._transfers.get(transfer_id)
        if moving is not None:
            moving.rank_failed(TransferAborted(reason))
            for sender in self._senders:
                sender.loop.abort_request(transfer_id, reason)
            for receiver in self._receivers:
                receiver.loop.cancel_request(transfer_id, reason)

    def rank_over(self, transfer_id: str, role: str, rank: int) -> None:
        if self._transfers[transfer_id].rank_over(role, rank):
            del self._transfers[transfer_id]

    def crash(self, error: BaseException) -> None:
        """End all transfers after an unexpected error, for example of a kernel."""
        for moving in self._transfers.values():
            moving.crash(error)


def _shard_of(name: str, pools: Sequence[KVPool]) -> Shard:
    """Return the shard of a tier's first rank. Raise ConfigError if the pools are not those of all ranks."""
    if not pools:
        raise ConfigError(f"{name} is empty; it must have the pool of each rank")
    shard = pools[0].shard.at(0)
    if len(pools) != shard.num_ranks or any(pool.shard != shard.at(rank) for rank, pool in enumerate(pools)):
        raise ConfigError(f"{name} has {len(pools)} pools; it must have the {shard.num_ranks} pools of one shard, in rank order")
    for pool in pools:
        if pool.device.type != "cpu":
            raise ConfigError(f"{name} has a pool on {pool.device}; the ranks of one process share host memory only")
    return shard


def _check_tables(name: str, tables: Tables, pools: Sequence[KVPool], num_tokens: int) -> None:
    if len(tables) != len(pools):
        raise LayoutError(f"{name} has tables of {len(tables)} ranks; there are {len(pools)}")
    for rank, (of_rank, pool) in enumerate(zip(tables, pools, strict=True)):
        if len(of_rank) != len(pool.groups):
            raise LayoutError(f"{name}[{rank}] has {len(of_rank)} tables; the model has {len(pool.groups)} groups of layers")
        for index, (group, table, num_pages) in enumerate(zip(pool.groups, of_rank, pool.num_pages, strict=True)):
            where = f"{name}[{rank}][{index}]"
            if isinstance(table, int):
                raise LayoutError(f"{where} is the number {table}; it must be the page table of group {group.name}")
            needed = 1 if group.kind is GroupKind.STATE else -(-num_tokens // (pool.page_size * pool.shard.dcp_size))
            if len(table) < needed:
                raise LayoutError(f"{where} has {len(table)} pages; {num_tokens} tokens of group {group.name} need {needed}")
            if (wrong := next((page for page in table[:needed] if not 0 <= page < num_pages), None)) is not None:
                raise LayoutError(f"{where} has page {wrong}; the pool's pages are 0 to {num_pages - 1}")
