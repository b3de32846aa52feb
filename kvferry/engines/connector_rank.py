"""The connector of one rank of an engine, on a thread beside the engine's own; see `kvferry.engines.connector_leader`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import structlog

from kvferry.engines.connector import (
    CODEC,
    DECODE,
    PREFILL,
    TO_DECODE,
    ConnectorEngine,
    LifeBegins,
    RankWaiting,
    SideReport,
    Sides,
    security_for,
    wait_for_close,
)
from node_runtime.loop_thread import LoopThread
from node_runtime.process_setup import raise_open_files
from node_runtime.rank_engine import device_bytes
from node_runtime.rank_link import RankLink, rank_socket_address
from node_runtime.rank_messages import RankLogLevel
from node_runtime.rank_setup import open_tracer, open_transport, own_instance
from transfer.config import ConnectorConfig
from transfer.connector.incoming_rank import BoundPages, IncomingRank, Settled
from transfer.connector.incoming_sessions import IncomingSessions
from transfer.connector.outgoing_rank import OfferedPages, TransferEvent
from transfer.connector.outgoing_sessions import OutgoingSessions
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed, process_figures
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError, TransferError
from transfer.instance import Instance
from transfer.logs import configure_engine_logging, set_log_level
from transfer.metrics import RankMetrics
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.attach import RingMemory, open_receiving
from transfer.send.events import SenderSettings
from transfer.send.loop import SenderLoop
from transfer.sizes import finest_chunk_plan, ring_capacity_bytes, staging_slot_bytes
from transfer.tracing import Tracer

PAUSE_TIMEOUT_S: Final = 10.0
REPORT_S: Final = 0.25
SIGN_OF_LIFE_S: Final = 1.0

log = structlog.get_logger(__name__)


class ConnectorRank:
    """One rank's kvferry, on a thread of its own beside the engine's.

    Args:
        config: Settings.
        instance: Name of this life of the instance, the same in all its processes and no other's.
        rank: This rank of it.
        sides: What the instance does.
        engine: What it serves.

    Raises:
        ConfigError: TLS, or plain text, cannot be had as set.
    """

    def __init__(self, config: ConnectorConfig, *, instance: str, rank: int, sides: Sides, engine: ConnectorEngine) -> None:
        configure_engine_logging(config.log)
        self._config = config
        self._rank = rank
        self._sides = sides
        self._engine = engine
        self._security = security_for(config, sides)
        self._news: deque[TransferEvent | Settled] = deque()
        self._source: OfferedPages | None = None
        self._pages: BoundPages | None = None
        self._target: IncomingRank | None = None
        self._metrics: dict[Sides, RankMetrics] = {}
        self._tracers: list[Tracer] = []
        self._life: asyncio.Future[int]
        self._link: RankLink | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_closed = False
        self._thread = LoopThread.shared()
        self._thread.call(self._begin, instance)

    # What the engine calls

    def progress(self, name: str, tables: Sequence[Sequence[int]], num_computed: int, event: DeviceEvent | None = None) -> None:
        """The prompt's first `num_computed` tokens are in the pool, behind `event` (None: already).

        Args:
            tables: Its page table in each group of layers, from token 0 on; a copy is not made.
        """
        self._thread.call(self._progress, name, tables, num_computed, event)

    def finish(self, name: str) -> None:
        """The engine is done with the prompt: no more `progress` of it follows. `Free` does, once the leader is done as well."""
        self._thread.call(self._finish, name)

    def pause(self, names: Iterable[str], reason: str) -> None:
        """The engine takes the prompts' pages back, to compute them again later: returns when nothing reads them any more.

        Raises:
            LocalProtocolError: Something still does after a time in which every copy ends.
        """
        if self._is_closed:
            return  # nothing is read any more
        done = self._thread.start(self._pause(list(names), reason))
        try:
            done.result(PAUSE_TIMEOUT_S)
        except TimeoutError:
            raise LocalProtocolError(
                f"pages of a prompt were still read {PAUSE_TIMEOUT_S:g} s after they were taken back"
            ) from None

    def poll_events(self) -> list[TransferEvent | Settled]:
        """What has happened since the last call.

        Raises:
            LocalProtocolError: Something broke that nobody expected; the engine must not go on.
        """
        self._thread.check()
        news: list[TransferEvent | Settled] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    @property
    def is_idle(self) -> bool:
        """Whether no prompt, transfer or grant is known, and no news waits to be taken."""
        return not self._news and all(part.is_idle for part in (self._source, self._target) if part is not None)

    @property
    def num_transfers(self) -> int:
        """Transfers that this rank takes part in."""
        return sum(part.num_transfers for part in (self._source, self._target) if part is not None)

    def close(self) -> None:
        """End everything; returns when it has, or after some seconds."""
        if self._is_closed or not self._thread.is_own:
            return
        self._is_closed = True
        try:
            wait_for_close(self._thread.start(self._close()))
        finally:
            self._thread.release()

    # On the loop

    def _begin(self, instance: str) -> None:
        raise_open_files()
        loop = self._thread.loop
        self._life = loop.create_future()
        link = self._link = RankLink(rank_socket_address(instance, self._rank), CODEC)
        link.watch(loop, self._on_message)
        self._serving = loop.create_task(self._serve(link))
        self._serving.add_done_callback(self._on_serving_over)

    def _send(self, message: object) -> None:
        if self._link is not None:
            self._link.send(message)

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def _serve(self, link: RankLink) -> None:
        while not self._life.done():  # what was said to the leader of an earlier life of that name is not heard by this one's
            link.send(RankWaiting(rank=self._rank))
            await asyncio.wait({self._life}, timeout=SIGN_OF_LIFE_S)
        incarnation = self._life.result()
        try:
            hello = await self._open(incarnation)
        except Exception as error:
            log.error("rank_start_failed", rank=self._rank, error=str(error))
            is_foreseen = isinstance(error, TransferError)
            reason = str(error) if is_foreseen else f"unexpected {type(error).__name__}: {error}"
            link.send(RankStartFailed(rank=self._rank, reason=reason, exit_code=1))
            if is_foreseen:
                return
            raise
        self._thread.loop.turns.start_counting()
        link.send(hello)
        log.info("rank_ready", rank=self._rank)
        await self._report(link)

    def _on_serving_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._thread.crash(error)  # an invariant that is broken, or a leader that takes nothing more

    async def _open(self, incarnation: int) -> RankReady:
        engine, pool = self._engine, self._engine.pool
        instance, address, ring_bytes = None, "", 0
        if PREFILL in self._sides:
            instance = self._open_prefill(self._context_of(PREFILL, "prefill", incarnation))
        if DECODE in self._sides:
            context = self._context_of(DECODE, "decode", incarnation)
            instance = context.instance
            ring_bytes = ring_capacity_bytes(self._config.ring, device_bytes(pool.device), device=self._config.device)
            address = await self._open_decode(context, ring_bytes)
        assert instance is not None, "an instance has at least one side"
        return RankReady(
            rank=self._rank,
            pid=os.getpid(),
            instance=instance,
            pool_pages=pool.num_pages,
            max_context_tokens=engine.max_context_tokens,
            vocab_size=engine.vocab_size,
            address=address,
            ring_bytes=ring_bytes,
        )

    def _context_of(self, side: Sides, role: str, incarnation: int) -> RankContext:
        """Return the context of one side, with a transport and metrics of its own."""
        config, device = self._config, self._engine.pool.device
        transport = open_transport(config.transport, host=config.server.host, device_index=device.index)
        instance = own_instance(self._engine, transport, incarnation=incarnation, device_type=device.type)
        metrics = self._metrics[side] = RankMetrics(role=role, rank=self._rank)
        tracer = open_tracer(config.tracing, role=role, rank=self._rank)
        if tracer is not None:
            self._tracers.append(tracer)
        metrics.histogram("loop_turn_seconds").follow(self._thread.loop.turns)
        return RankContext(
            loop=self._thread.loop,
            instance=instance,
            rank=self._rank,
            device=device,
            transport=transport,
            transport_config=config.transport,
            security=self._security,
            metrics=metrics,
            on_crash=self._thread.crash,
            tracer=tracer,
        )

    def _open_prefill(self, context: RankContext) -> Instance:
        engine, config = self._engine, self._config
        source = OfferedPages(loop=self._thread.loop, send=self._send, on_news=self._news.append)
        num_slots = config.staging.num_slots
        slot_bytes = staging_slot_bytes(config.chunk, config.staging, engine.layout, engine.shard)
        sender = SenderLoop(
            context=context,
            owner=source.rank,
            pool=engine.pool,
            staging=StagingBuffer(num_bytes=num_slots * slot_bytes, device=engine.pool.device),
            settings=SenderSettings(num_slots=num_slots),
        )
        sessions = OutgoingSessions(context=context, sender=sender, plan=finest_chunk_plan(config.chunk), send=self._send)
        source.rank.begin(sender, sessions)
        self._source = source
        return context.instance

    async def _open_decode(self, context: RankContext, ring_bytes: int) -> str:
        """Open the decode side and return the address to announce to prefill ranks."""
        config, pool = self._config, self._engine.pool
        pages = BoundPages(send=self._send, on_news=self._news.append)
        target = pages.rank
        memory = RingMemory.take(
            ring_bytes=ring_bytes,
            probe_bytes=config.transport.probe_bytes,
            device=pool.device,
            is_one_sided=context.transport.is_one_sided,
        )
        receiving = open_receiving(context=context, owner=target, pool=pool, memory=memory, server=config.server)
        writers = IncomingSessions(
            context=context,
            receiving=receiving,
            server=config.server,
            heartbeat_s=config.heartbeat.interval_s,
            send=self._send,
        )
        target.begin(receiving.loop, writers)
        self._pages, self._target = pages, target
        return await writers.start()

    def _on_message(self, message: Any) -> None:
        if isinstance(message, LifeBegins):
            if not self._life.done():
                self._life.set_result(message.incarnation)
        elif isinstance(message, RankLogLevel):
            set_log_level(message.level)
        elif isinstance(message, TO_DECODE):
            if self._pages is not None:
                self._pages.on_message(message)
        elif self._source is not None:
            self._source.on_message(message)

    def _progress(self, name: str, tables: Sequence[Sequence[int]], num_computed: int, event: DeviceEvent | None) -> None:
        if self._source is not None and not self._is_closed:
            self._source.progress(name, tables, num_computed, event)

    def _finish(self, name: str) -> None:
        if self._source is not None and not self._is_closed:
            self._source.finish(name)

    async def _pause(self, names: list[str], reason: str) -> None:
        if self._source is not None:
            await asyncio.gather(*(self._source.pause(name, reason) for name in names))

    async def _report(self, link: RankLink) -> None:
        """Tell the leader what each side is doing, and prove the invariants of one that does nothing."""
        last: dict[Sides, dict[str, Any]] = {}
        last_s = dict.fromkeys(self._metrics, 0.0)
        num_checks = 0
        while True:
            now_s = self._thread.loop.time()
            for side, part in ((PREFILL, self._source), (DECODE, self._target)):
                if part is None:
                    continue
                status = part.status()
                if status == last.get(side) and now_s - last_s[side] < SIGN_OF_LIFE_S:
                    continue
                last[side], last_s[side] = status, now_s
                num_checks += part.check_idle()
                told = status | process_figures() | {"rank": self._rank, "pid": os.getpid(), "idle_checks": num_checks}
                report = RankReport(rank=self._rank, status=told, metrics=self._metrics[side].snapshot(told))
                link.send(SideReport(side=side.value, report=report))
            await asyncio.sleep(REPORT_S)

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # in reverse, and each whatever becomes of the others
            stack.callback(self._close_link)
            for tracer in self._tracers:
                stack.push_async_callback(asyncio.to_thread, tracer.close)
            for part in (self._target, self._source):
                if part is not None:
                    stack.push_async_callback(part.close)
            if self._serving is not None:
                self._serving.cancel()
                await asyncio.gather(self._serving, return_exceptions=True)
