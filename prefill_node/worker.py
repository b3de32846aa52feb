"""One prefill rank: its engine, its pool, and its sessions with decode ranks.

The rank's loop owns everything but the running step: it binds pages and runs the sender. The engine's thread reports each layer
group of a step that is in the pool. The leader decides which tokens a step computes; all ranks run the same steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from node_runtime.rank_engine import RankEngine, device_bytes, rank_advice, rank_memory, run_step
from node_runtime.rank_link import RankLink
from node_runtime.rank_messages import StepDone, StepFailed
from node_runtime.rank_setup import open_tracer, open_transport, own_instance
from node_runtime.rank_worker import RankSpec
from planner.memory_advice import Phase
from prefill_node.engine import PrefillEngine
from prefill_node.host_kv import HostKv, open_host_kv
from prefill_node.prefix_loader import BATCH_BYTES, PrefixLoader
from prefill_node.rank_messages import LoadPrefix, PrefixLoaded, RunPrefillStep, StartRequest
from prefill_node.scheduler import page_needs
from prefill_node.stored_prefix import StoredPrefix
from transfer.config import PrefillNodeConfig
from transfer.connector.messages import CancelOutgoing, PagesReleased
from transfer.connector.outgoing_rank import OutgoingRank
from transfer.connector.rank_report import RankReady, pool_status
from transfer.copy.kernel_choice import Kernels, choose_kernels
from transfer.engine_types import DeviceEvent, PrefillCounts, PrefillItem, SamplingParams
from transfer.errors import LocalProtocolError
from transfer.instance import Instance
from transfer.layer_groups import PageCounts
from transfer.loop_turns import turns_of
from transfer.metrics import RankMetrics
from transfer.out_of_memory import allocating
from transfer.pool.page_allocator import GroupAllocator, with_tuples
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.registry.security import security_of
from transfer.send.attach import DecodeSessions
from transfer.send.events import SenderSettings
from transfer.send.loop import SenderLoop
from transfer.sizes import finest_chunk_plan, staging_slot_bytes
from transfer.storage.client import StoreClient
from transfer.storage.open import open_store_client
from transfer.tracing import Tracer

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request from `StartRequest` until its pages are released."""

    num_tokens: int
    sampling: SamplingParams
    steps_under_way: int = 0  # the load of its prefix counts as one
    num_prepared: int = 0  # tokens that have pages because they are to be loaded
    is_begun: bool = False  # its first step was sent
    is_computed: bool = False  # its last step is done, or the leader will send no more steps


class PrefillWorker:
    """The `node_runtime.rank_worker.Worker` of a prefill rank; see the module's docstring."""

    def __init__(self, spec: RankSpec, link: RankLink, loop: asyncio.AbstractEventLoop, engine: RankEngine) -> None:
        self._spec = spec
        assert isinstance(spec.config, PrefillNodeConfig)
        self._config = spec.config
        self._link = link
        self._loop = loop
        self._metrics = RankMetrics(role="prefill", rank=spec.rank)
        self._metrics.histogram("loop_turn_seconds").follow(turns_of(loop))
        self._rank_engine = engine
        self._engine_thread = engine.thread
        self._requests: dict[str, _Request] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self.outgoing = OutgoingRank(engine=self, send=link.send)
        """The part of the rank that sends."""
        self._engine: PrefillEngine
        self._step_advice: str
        self._allocator: GroupAllocator
        self._sessions: DecodeSessions
        self._store: StoreClient | None = None
        self._loader: PrefixLoader | None = None
        self._host: HostKv | None = None
        self._tracer: Tracer | None = None

    async def start(self) -> RankReady:
        """Load the engine; see `Worker.start`."""
        engine = await self._rank_engine.open(self._config, rank=self._spec.rank, rendezvous=self._spec.rendezvous)
        self._engine = engine
        kernels = await self._engine_thread.call(lambda: choose_kernels(self._config.kernels, engine.pool.device))
        with contextlib.ExitStack() as undo:
            self._tracer = open_tracer(self._config.tracing, role=self._config.role, rank=self._spec.rank)
            if self._tracer is not None:
                undo.callback(self._tracer.close)
            allocator = self._open_allocator()
            host = await open_host_kv(
                self._config, engine, allocator=allocator, engine_thread=self._engine_thread, kernels=kernels
            )
            if host is not None:
                undo.callback(host.close)
            hello = self._open(undo, allocator, host, kernels)
            undo.pop_all()
        return hello

    def _open_allocator(self) -> GroupAllocator:
        pool = self._engine.pool
        needs = page_needs(pool.groups, pool.page_size, chunk_tokens=self._config.chunk.chunk_tokens)
        return GroupAllocator(needs, pool.num_pages)

    def _open(self, undo: contextlib.ExitStack, allocator: GroupAllocator, host: HostKv | None, kernels: Kernels) -> RankReady:
        """Open everything but the engine and its host memory; if this fails, the caller runs `undo`."""
        engine = self._engine
        transport = open_transport(
            self._config.transport, host=self._config.server.host, device_index=engine.pool.device.index, kernels=kernels
        )
        opening = undo.enter_context(contextlib.ExitStack())
        opening.callback(transport.close)
        instance = own_instance(engine, transport, incarnation=self._spec.incarnation, device_type=engine.pool.device.type)
        pool = engine.pool
        num_slots = self._config.staging.num_slots
        slot_bytes = staging_slot_bytes(
            self._config.chunk,
            self._config.staging,
            engine.layout,
            engine.shard,
            self._config.memory.device_memory or device_bytes(pool.device),
            device=self._config.device,
        )
        num_bytes = num_slots * slot_bytes
        advice = rank_advice(Phase.STAGING, self._config, engine, {"staging.slot_bytes": slot_bytes})
        with allocating("allocating the staging slots", device=pool.device, advice=advice, num_bytes=num_bytes):
            staging = StagingBuffer(num_bytes=num_bytes, device=pool.device)
        memory = rank_memory(engine, {"staging": staging.num_bytes + self._config.transport.probe_bytes})
        self._metrics.memory(memory.planned, memory.real)
        context = RankContext(
            loop=self._loop,
            instance=instance,
            rank=self._spec.rank,
            device=pool.device,
            transport=transport,
            transport_config=self._config.transport,
            security=security_of(self._config),
            metrics=self._metrics,
            on_crash=self._rank_engine.crash,
            tracer=self._tracer,
            kernels=kernels,
        )
        sender = SenderLoop(
            context=context,
            owner=self.outgoing,
            pool=pool,
            staging=staging,
            settings=SenderSettings(num_slots=num_slots, slot_bytes=slot_bytes),
            host=host,
        )
        opening.pop_all()  # the sender closes it
        undo.callback(sender.close)
        sessions = DecodeSessions(
            context=context,
            sender=sender,
            plan=finest_chunk_plan(self._config.chunk),
            on_lost=self.outgoing.on_session_lost,
        )
        loader = self._open_store(instance)
        self.use(engine=engine, allocator=allocator, sender=sender, sessions=sessions, loader=loader, host=host)
        return RankReady(
            rank=self._spec.rank,
            pid=os.getpid(),
            instance=instance,
            pool_pages=pool.num_pages,
            max_context_tokens=engine.max_context_tokens,
            vocab_size=engine.vocab_size,
            memory=memory,
            host_pages=() if host is None else host.num_pages,
            can_switch=self._rank_engine.can_switch,
        )

    def _open_store(self, own: Instance) -> PrefixLoader | None:
        storage = self._config.storage
        self._store = open_store_client(storage, loop=self._loop, observer=self._metrics.store)
        if self._store is None:
            return None
        return PrefixLoader(
            self._store,
            pool=self._engine.pool,
            own=own,
            thread=self._engine_thread,
            timeout_s=storage.get_timeout_s,
            batch_bytes=min(BATCH_BYTES, storage.queue_bytes),
        )

    def use(
        self,
        *,
        engine: PrefillEngine,
        allocator: GroupAllocator,
        sender: SenderLoop,
        sessions: DecodeSessions,
        loader: PrefixLoader | None,
        host: HostKv | None = None,
    ) -> None:
        """Serve requests with these parts, as `start` does with those that it opens.

        Args:
            loader: None without a store.
            host: None without host memory.
        """
        self._engine = engine
        self._step_advice = rank_advice(Phase.PREFILL_STEP, self._config, engine)
        self._host = host
        self._allocator = allocator
        self._sessions = sessions
        self.outgoing.begin(sender, sessions)
        self._loader = loader

    # The leader's messages

    def on_message(self, message: Any) -> None:
        match message:
            case StartRequest():
                self._start_request(message)
            case LoadPrefix():
                self._load_prefix(message)
            case RunPrefillStep():
                self._run_step(message)
            case CancelOutgoing():
                self._cancel(message)
            case _:
                if not self.outgoing.on_message(message):
                    raise LocalProtocolError(f"a prefill rank cannot serve {type(message).__name__}")

    def _on_load_over(self, task: asyncio.Task[None]) -> None:
        self._loads.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._rank_engine.crash(error)  # otherwise the leader would wait for an answer that never comes

    def _start_request(self, message: StartRequest) -> None:
        if message.is_in_host:
            self._reserve_in_host(message.transfer_id, message.num_tokens)
        else:
            self._reserve(message.transfer_id, message.num_tokens)
        self._requests[message.transfer_id] = _Request(num_tokens=message.num_tokens, sampling=message.sampling)
        self.outgoing.start(message)

    def _reserve(self, request_id: str, num_tokens: int) -> None:
        if not self._allocator.reserve(request_id, num_tokens):
            raise LocalProtocolError(f"no room for {num_tokens} tokens of request {request_id}, which the leader had counted")

    def _reserve_in_host(self, request_id: str, num_tokens: int) -> None:
        assert self._host is not None, "the leader counted host pages, but this rank has none"
        full, *others = self._allocator.needs.peak(num_tokens).by_group
        has_room = self._allocator.reserve_pages(request_id, PageCounts((0, *others)))
        if not has_room or not self._host.reserve(request_id, num_tokens):
            raise LocalProtocolError(f"no room for {full} host pages of request {request_id}, which the leader had counted")

    def _load_prefix(self, message: LoadPrefix) -> None:
        request, peer = self._requests.get(message.request_id), self._sessions.of(message.decode_incarnation)
        if request is None:
            return  # the request was given up
        if peer is None or self._loader is None:
            self._link.send(PrefixLoaded(request_id=message.request_id, num_tokens=0))
            return
        prefix = StoredPrefix(decode=peer.instance, hashes=message.hashes)
        request.num_prepared = prefix.num_pages * prefix.page_size
        request.steps_under_way += 1
        self._allocator.advance(message.request_id, request.num_prepared)
        tables = self._allocator.cover(message.request_id, request.num_prepared)
        load = self._loop.create_task(self._load(message.request_id, request, self._loader.load(prefix, tables)))
        self._loads.add(load)
        load.add_done_callback(self._on_load_over)

    async def _load(self, request_id: str, request: _Request, loading: Coroutine[Any, Any, int]) -> None:
        num_tokens = await loading
        request.steps_under_way -= 1
        self._link.send(PrefixLoaded(request_id=request_id, num_tokens=num_tokens))
        self._release_if_over(request_id, request)

    def _begin_computing(self, request_id: str, request: _Request, first_token: int) -> None:
        """Send the chunks before the request's first step: every rank has loaded them."""
        request.is_begun = True
        if request.num_prepared and not first_token:
            # Nothing was loaded. Windows have no pages for these tokens, and now need them, so the request starts again.
            self._allocator.release(request_id)
            self._reserve(request_id, request.num_tokens)
        self.outgoing.progress(request_id, first_token)

    def _run_step(self, message: RunPrefillStep) -> None:
        items: list[PrefillItem] = []
        for part in message.parts:
            request = self._requests[part.request_id]
            if not request.is_begun:
                self._begin_computing(part.request_id, request, part.first_token)
            end = part.first_token + len(part.token_ids)
            request.steps_under_way += 1
            items.append(
                PrefillItem(
                    request_id=part.request_id,
                    token_ids=part.token_ids,
                    first_token=part.first_token,
                    page_tables=self._allocator.cover(part.request_id, end),
                    host_tables=self._host_tables(part.request_id, end),
                    sampling=request.sampling,
                    is_last=part.is_last,
                )
            )

        def work() -> StepDone | StepFailed:
            return run_step(
                lambda: self._engine.prefill(
                    [with_tuples(item) for item in items],
                    lambda layers_done, event: self._engine_thread.post(self._on_layers_written, message, layers_done, event),
                ),
                f"computing a prefill step of {sum(item.num_tokens for item in items)} tokens",
                step=message.step,
                request_ids=tuple(part.request_id for part in message.parts),
                device=self._engine.pool.device,
                advice=self._step_advice,
                num_ranks=self._engine.shard.num_ranks,
            )

        self._engine_thread.submit(work, lambda outcome: self._on_step_over(message, outcome))

    def _count_sparse(self, counts: PrefillCounts) -> None:
        """Report what block-sparse prefill did so far."""
        self._metrics.counter("prefill_blocks", state="selected").reach(counts.selected_blocks)
        self._metrics.counter("prefill_blocks", state="skipped").reach(counts.skipped_blocks)
        if self._host is not None:
            self._metrics.counter("offload_copied_bytes", direction="load").reach(counts.loaded_bytes)

    def _host_tables(self, request_id: str, end_token: int) -> tuple[Sequence[int], ...]:
        if self._host is None or not self._host.is_in_host(request_id):
            return ()
        return self._host.cover(request_id, end_token)

    def _on_layers_written(self, step: RunPrefillStep, layers_done: int, event: DeviceEvent | None) -> None:
        """Send the chunks that are complete now that the first `layers_done` layers of this rank have the step's KV."""
        layout = self._engine.layout
        mine = self._engine.shard.layers(layout)  # other pipeline stages compute the rest of a chunk's layers
        end_layer = None if layers_done == len(mine) else mine.begin + layers_done
        for part in step.parts:
            self.outgoing.progress(part.request_id, part.first_token + len(part.token_ids), event, end_layer=end_layer)

    def _on_step_over(self, step: RunPrefillStep, outcome: StepDone | StepFailed) -> None:
        # Before any page is released: after that, another request may use the id, and must not get this token.
        self._link.send(outcome)
        if isinstance(outcome, StepDone):
            self._metrics.histogram("step_seconds").observe(outcome.compute_s)
        counts: PrefillCounts | None = getattr(self._engine, "prefill_counts", None)
        if counts is not None:
            self._count_sparse(counts)
        for part in step.parts:
            request = self._requests[part.request_id]
            request.steps_under_way -= 1
            request.is_computed = request.is_computed or part.is_last
            if self._host is not None and self._host.is_in_host(part.request_id) and isinstance(outcome, StepDone):
                # Each step reads all earlier tokens of its requests once.
                self._metrics.counter("offload_copied_bytes", direction="save").inc(self._host.num_bytes(len(part.token_ids)))
                if counts is None:
                    self._metrics.counter("offload_copied_bytes", direction="load").inc(self._host.num_bytes(part.first_token))
            if isinstance(outcome, StepFailed):
                # The leader knows of the failure, or this life of the ranks ends. Another attempt can succeed elsewhere.
                self.outgoing.cancel(part.request_id, outcome.reason, is_passing=True)
            self._release_if_over(part.request_id, request)
            if part.request_id in self._requests:
                # The next step reads nothing below its window; the last window of the prompt must still be gathered.
                end = part.first_token + len(part.token_ids)
                kept_from = request.num_tokens if self.outgoing.is_reading(part.request_id) else None
                self._allocator.advance(part.request_id, end, kept_from=kept_from)

    def _cancel(self, message: CancelOutgoing) -> None:
        request = self._requests.get(message.transfer_id)
        if request is not None:
            request.is_computed = True  # the leader sends no more steps
        self.outgoing.cancel(message.transfer_id, message.reason)
        if request is not None:
            self._release_if_over(message.transfer_id, request)

    # Implementation of `OutgoingEngine`

    def tables_of(self, transfer_id: str) -> Sequence[Sequence[int]]:
        if self._host is not None and self._host.is_in_host(transfer_id):
            return self._host.tables(transfer_id)
        return self._allocator.tables(transfer_id)

    def on_released(self, transfer_id: str) -> None:
        """See `OutgoingEngine.on_released`."""
        self._release_if_over(transfer_id, self._requests[transfer_id])

    def _release_if_over(self, request_id: str, request: _Request) -> None:
        """Release the pages of a request once, when no gather and no step can read them any more."""
        if self._requests.get(request_id) is not request:
            return  # the sender released the source at once, and so the pages
        if not self.outgoing.is_reading(request_id) and request.is_computed and not request.steps_under_way:
            del self._requests[request_id]
            self._allocator.release(request_id)
            if self._host is not None:
                self._host.release(request_id)
            if not self._requests:
                self._check_pages_idle()
            self._link.send(PagesReleased(transfer_id=request_id))

    # Reports and end

    def status(self) -> dict[str, Any]:
        outgoing = self.outgoing.status()
        return {
            "rank": self._spec.rank,
            "pid": os.getpid(),
            **self._pool_status(),
            **outgoing,
            "requests": len(self._requests) + outgoing["requests"],
        }

    def _pool_status(self) -> dict[str, Any]:
        status = pool_status(self._allocator)
        if self._host is not None:
            status["pools"].append(self._host.status())
        return status

    def check_idle(self) -> bool:
        if self._requests or not self.outgoing.check_idle():
            return False
        self._check_pages_idle()
        return True

    def _check_pages_idle(self) -> None:
        self._allocator.check_idle()
        if self._host is not None:
            self._host.check_idle()

    def metrics(self, status: Mapping[str, Any]) -> Any:
        return self._metrics.snapshot(status)

    async def close(self) -> None:
        for load in list(self._loads):
            load.cancel()
        await self.outgoing.close()
        if self._store is not None:
            await self._store.close()
        await self._rank_engine.rest()
        if self._host is not None:
            await self._engine_thread.call(self._host.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
