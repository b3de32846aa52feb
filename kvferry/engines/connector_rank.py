"""The connector in a rank of an engine; see `kvferry.engines.connector_leader`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
    close_on,
    security_for,
)
from node_runtime.loop_thread import LoopThread
from node_runtime.process_setup import raise_open_files
from node_runtime.rank_engine import device_bytes
from node_runtime.rank_link import RankLink, rank_socket_address
from node_runtime.rank_messages import RankLogLevel
from node_runtime.rank_port_service import meet_leader, security_among_hosts
from node_runtime.rank_setup import open_tracer, open_transport, own_instance
from planner.device_defaults import with_gpu_chunks
from planner.memory_advice import Phase, advice_for
from transfer.config import ConnectorConfig
from transfer.connector.incoming_rank import BoundPages, IncomingRank, Settled
from transfer.connector.outgoing_rank import OfferedPages, TransferEvent
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed, process_figures
from transfer.copy.kernel_choice import Kernels, choose_kernels
from transfer.engine_types import DeviceEvent
from transfer.errors import LocalProtocolError, PeerUnreachable, TransferError, TransportTimeout
from transfer.instance import Instance
from transfer.log_rate_limiter import LogRateLimiter
from transfer.logs import configure_engine_logging, set_log_level
from transfer.metrics import RankMetrics
from transfer.out_of_memory import allocating
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.attach import PrefillSessions, RingMemory, open_receiving
from transfer.send.attach import DecodeSessions
from transfer.send.events import SenderSettings
from transfer.send.loop import SenderLoop
from transfer.sizes import finest_chunk_plan, ring_capacity_bytes, staging_slot_bytes
from transfer.tracing import Tracer

LEADER_LATE_S: Final = 20.0
"""Time after which a rank logs why it has not met its leader yet."""
MIN_LAYER_GROUPS: Final = 4
"""Minimum number of layer groups of a chunk, if the engine reports layers. All but the last can be sent within the step."""
PAUSE_TIMEOUT_S: Final = 10.0
REPORT_S: Final = 0.25
SIGN_OF_LIFE_S: Final = 1.0

log = structlog.get_logger(__name__)


class ConnectorRank:
    """The kvferry of one rank. It runs on its own thread, beside the engine's.

    Args:
        instance: Name of this life of the instance, the same in all its processes and different from all others.

    Raises:
        ConfigError: The TLS or plain text settings cannot be used.
    """

    def __init__(self, config: ConnectorConfig, *, instance: str, rank: int, sides: Sides, engine: ConnectorEngine) -> None:
        configure_engine_logging(config.log)
        self._config = config
        self._rank = rank
        self._sides = sides
        self._engine = engine
        self._security = security_for(config, sides)
        self._instance = instance
        self._news: deque[TransferEvent | Settled] = deque()
        self._outgoing: OfferedPages | None = None
        self._incoming: BoundPages | None = None
        self._parts: dict[Sides, OfferedPages | IncomingRank] = {}  # open sides
        self._metrics: dict[Sides, RankMetrics] = {}
        self._tracers: list[Tracer] = []
        self._life: asyncio.Future[int]
        self._link: RankLink | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_closed = False
        self._thread = LoopThread.shared()
        self._thread.call(self._begin)

    # Called by the engine

    def progress(
        self,
        name: str,
        tables: Sequence[Sequence[int]],
        num_computed: int,
        event: DeviceEvent | None = None,
        *,
        end_layer: int | None = None,
    ) -> None:
        """Report that the first `num_computed` tokens of a prompt are in the pool after `event`.

        Args:
            tables: Page table in each group of layers, from token 0 on. No copy is made.
            event: None means that the tokens are in the pool already.
            end_layer: Only layers below it are in the pool, because a step is running; None means all layers. See `layer_ends`.
        """
        self.progress_all([(name, tables, num_computed)], event, end_layer=end_layer)

    def progress_all(
        self,
        prompts: Sequence[tuple[str, Sequence[Sequence[int]], int]],
        event: DeviceEvent | None = None,
        *,
        end_layer: int | None = None,
    ) -> None:
        """Report progress as `progress` does, for several prompts of one step.

        Args:
            prompts: Name, page tables and number of computed tokens of each prompt.
        """

        def report(outgoing: OfferedPages) -> None:
            for name, tables, num_computed in prompts:
                outgoing.progress(name, tables, num_computed, event, end_layer=end_layer)

        self._call(report)

    def layer_ends(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ends of the layer groups of those of the prompts that are being sent. Any thread may call it."""
        ends = {} if self._outgoing is None else self._outgoing.layer_ends
        return frozenset().union(*(ends.get(name, ()) for name in names))

    @property
    def num_ends_changes(self) -> int:
        """Number of changes of `layer_ends` so far. Any thread may read it."""
        return 0 if self._outgoing is None else self._outgoing.num_ends_changes

    def finish(self, name: str) -> None:
        """Report the last `progress` of a prompt. `Free` follows once the leader has finished the prompt, too."""
        self._call(lambda outgoing: outgoing.finish(name))

    def _call(self, function: Callable[[OfferedPages], object]) -> None:
        """Call a function of the prefill side on the loop. No-op if this rank is closed or has no such side."""

        def call() -> None:
            if self._outgoing is not None and not self._is_closed:
                function(self._outgoing)

        self._thread.call(call)

    def pause(self, names: Iterable[str], reason: str) -> None:
        """Stop reading the pages of prompts that the engine will compute again; wait until nothing reads them.

        Raises:
            LocalProtocolError: The pages were still read after `PAUSE_TIMEOUT_S`, in which every copy ends.
        """
        if self._is_closed:
            return
        done = self._thread.start(self._pause(list(names), reason))
        try:
            done.result(PAUSE_TIMEOUT_S)
        except TimeoutError:
            raise LocalProtocolError(
                f"pages of a prompt were still read {PAUSE_TIMEOUT_S:g} s after they were taken back"
            ) from None

    def poll_events(self) -> list[TransferEvent | Settled]:
        """Return the events since the last call.

        Raises:
            LocalProtocolError: An unexpected error occurred. The engine must stop.
        """
        self._thread.check()
        news: list[TransferEvent | Settled] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    @property
    def is_idle(self) -> bool:
        """Whether no prompt, transfer or grant is known, and no event waits for `poll_events`."""
        return not self._news and all(part.is_idle for part in tuple(self._parts.values()))  # the loop may add one

    @property
    def num_transfers(self) -> int:
        """Number of transfers of this rank."""
        return sum(part.num_transfers for part in tuple(self._parts.values()))

    def close(self) -> None:
        """End everything, and wait for that at most `CLOSE_TIMEOUT_S`."""
        if not self._is_closed and self._thread.is_own:
            self._is_closed = True
            close_on(self._thread, self._close())

    # On the loop

    def _begin(self) -> None:
        raise_open_files()
        loop = self._thread.loop
        self._life = loop.create_future()
        self._serving = loop.create_task(self._serve())
        self._serving.add_done_callback(self._on_serving_over)

    def _send(self, message: object) -> None:
        if self._link is not None:
            self._link.send(message)

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def _find_leader(self) -> RankLink:
        """Return the link to the leader, which may start later."""
        leader = self._config.leader
        if leader.address is None:
            return RankLink(rank_socket_address(self._instance, self._rank), CODEC)
        security = security_among_hosts(self._security, leader.peer_names)
        reasons, began_s = LogRateLimiter(), self._thread.loop.time()
        while True:
            try:
                return await meet_leader(leader.address, security=security, instance=self._instance, rank=self._rank, codec=CODEC)
            except (PeerUnreachable, TransportTimeout) as error:
                # vLLM starts its scheduler, and so the leader, after the ranks.
                if self._thread.loop.time() - began_s >= LEADER_LATE_S and reasons.is_due(str(error)):
                    log.warning("leader_call_failed", rank=self._rank, address=leader.address, reason=str(error))
            await asyncio.sleep(SIGN_OF_LIFE_S)

    async def _serve(self) -> None:
        try:
            link = self._link = await self._find_leader()
        except TransferError as error:
            log.error("rank_start_failed", rank=self._rank, error=str(error))
            return
        link.watch(self._thread.loop, self._on_message)
        while not self._life.done():  # a message to the leader of an earlier life of that name does not reach this one
            link.send(RankWaiting(rank=self._rank))
            await asyncio.wait({self._life}, timeout=SIGN_OF_LIFE_S)
        incarnation = self._life.result()
        try:
            hello = await self._open(incarnation)
        except Exception as error:
            log.error("rank_start_failed", rank=self._rank, error=str(error))
            is_expected = isinstance(error, TransferError)
            reason = str(error) if is_expected else f"unexpected {type(error).__name__}: {error}"
            link.send(RankStartFailed(rank=self._rank, reason=reason, exit_code=1))
            if is_expected:
                return
            raise
        self._thread.loop.turns.start_counting()
        link.send(hello)
        log.info("rank_ready", rank=self._rank)
        await self._report(link)

    def _on_serving_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._thread.crash(error)  # an invariant is broken, or the leader takes no messages

    async def _open(self, incarnation: int) -> RankReady:
        engine, pool = self._engine, self._engine.pool
        if pool.device.type == "cuda":
            config = self._config
            chunk = with_gpu_chunks(
                config.chunk,
                config.staging,
                engine.layout,
                engine.shard,
                step_tokens=engine.step_tokens,
                by_layer=engine.reports_layers,
            )
            self._config = config.model_copy(update={"chunk": chunk})
        kernels = await asyncio.to_thread(choose_kernels, self._config.kernels, pool.device)
        instance, address, ring_bytes = None, "", 0
        if PREFILL in self._sides:
            instance = self._open_prefill(self._context_of(PREFILL, "prefill", incarnation, kernels))
        if DECODE in self._sides:
            context = self._context_of(DECODE, "decode", incarnation, kernels)
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
            chunk_tokens=self._config.chunk.chunk_tokens if PREFILL in self._sides else 0,
            min_layer_groups=MIN_LAYER_GROUPS if engine.reports_layers and pool.device.type == "cuda" else 1,
        )

    def _context_of(self, side: Sides, role: str, incarnation: int, kernels: Kernels) -> RankContext:
        """Return the context of one side, with a transport and metrics of its own."""
        config, device = self._config, self._engine.pool.device
        transport = open_transport(config.transport, host=config.server.host, device_index=device.index, kernels=kernels)
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
            mem_pool=self._engine.mem_pool,
            kernels=kernels,
        )

    def _open_prefill(self, context: RankContext) -> Instance:
        engine, config = self._engine, self._config
        pages = OfferedPages(send=self._send, on_news=self._news.append)
        num_slots, device = config.staging.num_slots, engine.pool.device
        slot_bytes = staging_slot_bytes(
            config.chunk, config.staging, engine.layout, engine.shard, device_bytes(device), device=config.device
        )
        advice = advice_for(Phase.STAGING, config, chosen={"staging.slot_bytes": slot_bytes})
        with allocating("allocating the staging slots", device=device, advice=advice, num_bytes=num_slots * slot_bytes):
            staging = StagingBuffer(num_slots * slot_bytes, device=device, mem_pool=engine.mem_pool)
        log.info("staging_memory", num_bytes=staging.num_bytes, chunk_tokens=config.chunk.chunk_tokens)
        sender = SenderLoop(
            context=context,
            owner=pages.rank,
            pool=engine.pool,
            staging=staging,
            settings=SenderSettings(num_slots=num_slots, slot_bytes=slot_bytes),
        )
        sessions = DecodeSessions(
            context=context,
            sender=sender,
            plan=finest_chunk_plan(config.chunk),
            on_lost=pages.rank.on_session_lost,
        )
        pages.rank.begin(sender, sessions)
        self._outgoing = self._parts[PREFILL] = pages
        return context.instance

    async def _open_decode(self, context: RankContext, ring_bytes: int) -> str:
        """Open the decode side and return the address to announce to prefill ranks."""
        config, pool = self._config, self._engine.pool
        pages = BoundPages(send=self._send, on_news=self._news.append)
        probe_bytes = config.transport.probe_bytes
        memory = RingMemory.take(
            context.transport,
            ring_bytes=ring_bytes,
            probe_bytes=probe_bytes,
            device=pool.device,
            advice=advice_for(Phase.RING, config, chosen={"ring.capacity_bytes": ring_bytes}),
            mem_pool=self._engine.mem_pool,
        )
        log.info("ring_memory", num_bytes=ring_bytes + probe_bytes)
        receiving = open_receiving(context=context, owner=pages.rank, pool=pool, memory=memory, server=config.server)
        writers = PrefillSessions(
            context=context,
            receiving=receiving,
            server=config.server,
            heartbeat_s=config.heartbeat.interval_s,
            on_writer_lost=pages.rank.on_writer_lost,
            on_link_probed=pages.rank.on_link_probed,
        )
        pages.rank.begin(receiving.loop, writers)
        self._incoming, self._parts[DECODE] = pages, pages.rank
        return await writers.start()

    def _on_message(self, message: Any) -> None:
        if isinstance(message, LifeBegins):
            if not self._life.done():
                self._life.set_result(message.incarnation)
        elif isinstance(message, RankLogLevel):
            set_log_level(message.level)
        elif isinstance(message, TO_DECODE):
            if self._incoming is not None:
                self._incoming.on_message(message)
        elif self._outgoing is not None:
            self._outgoing.on_message(message)

    async def _pause(self, names: list[str], reason: str) -> None:
        if self._outgoing is not None:
            await asyncio.gather(*(self._outgoing.pause(name, reason) for name in names))

    async def _report(self, link: RankLink) -> None:
        """Report the state of each side to the leader, and check the invariants of idle sides."""
        last: dict[Sides, dict[str, Any]] = {}
        last_s = dict.fromkeys(self._metrics, 0.0)
        num_checks = 0
        while True:
            now_s = self._thread.loop.time()
            for side, part in self._parts.items():
                status = part.status()
                if status == last.get(side) and now_s - last_s[side] < SIGN_OF_LIFE_S:
                    continue
                last[side], last_s[side] = status, now_s
                num_checks += part.check_idle()
                shown = status | process_figures() | {"rank": self._rank, "pid": os.getpid(), "idle_checks": num_checks}
                report = RankReport(rank=self._rank, status=shown, metrics=self._metrics[side].snapshot(shown))
                link.send(SideReport(side=side.value, report=report))
            await asyncio.sleep(REPORT_S)

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # in reverse; an error of one does not keep the others from closing
            stack.callback(self._close_link)
            for tracer in self._tracers:
                stack.push_async_callback(asyncio.to_thread, tracer.close)
            for part in reversed(self._parts.values()):
                stack.push_async_callback(part.close)
            if self._serving is not None:
                self._serving.cancel()
                await asyncio.gather(self._serving, return_exceptions=True)
