"""Run one decode rank: its engine, its pool, and its part of each request.

The rank's loop owns everything but the running step: it reserves and binds pages, runs the receiver, and serves its writers
(`transfer.receive.attach`). The leader admits requests and chooses those that a step advances. All ranks run the same steps.

The leader may send a step while the previous one runs. If a request ends while steps of it are in flight, its pages are released
after the last of these steps has ended on this rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from decode_node.admission import page_needs
from decode_node.engine import DecodeEngine
from decode_node.offload.open_rank import open_offload_rank
from decode_node.offload.rank import OffloadRank
from decode_node.rank_messages import DecodeStepPart, ExpectRequest, FinishRequest, RunDecodeStep
from decode_node.steps_ahead import StepsAhead
from node_runtime.rank_engine import RankEngine, device_bytes, rank_advice, rank_memory, run_step
from node_runtime.rank_link import RankLink
from node_runtime.rank_messages import StepDone, StepFailed
from node_runtime.rank_setup import open_tracer, open_transport, own_instance
from node_runtime.rank_worker import RankSpec
from planner.memory_advice import Phase
from transfer.config import DecodeNodeConfig
from transfer.connector.incoming_rank import IncomingRank
from transfer.connector.messages import CancelIncoming, PagesReleased
from transfer.connector.rank_report import RankReady, pool_status
from transfer.copy.kernel_choice import choose_kernels
from transfer.engine_types import DecodeItem, SamplingParams
from transfer.errors import ConfigError, LocalProtocolError
from transfer.layer_groups import PageCounts
from transfer.loop_turns import turns_of
from transfer.metrics import RankMetrics
from transfer.pool.page_allocator import GroupAllocator, with_tuples
from transfer.rank_context import RankContext
from transfer.receive.attach import PrefillSessions, RingMemory, open_receiving
from transfer.receive.loop import ReceiverLoop
from transfer.registry.security import security_of
from transfer.sizes import ring_capacity_bytes
from transfer.tracing import Tracer
from transfer.worker_thread import WorkerThread

LET_GO_S: Final = 1.0
"""Longest wait for writers to unmap the ring. If one does not, the transport keeps the memory for the life of the process."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request from `ExpectRequest` until its pages are back."""

    sampling: SamplingParams
    is_leaving: bool = False  # its pages go back as soon as nothing uses them
    steps_under_way: int = 0


class DecodeWorker:
    """See the module's docstring. Implements `node_runtime.rank_worker.Worker` and `IncomingEngine`."""

    def __init__(self, spec: RankSpec, link: RankLink, loop: asyncio.AbstractEventLoop, engine: RankEngine) -> None:
        self._spec = spec
        assert isinstance(spec.config, DecodeNodeConfig)
        self._config = spec.config
        self._link = link
        self._loop = loop
        self._metrics = RankMetrics(role="decode", rank=spec.rank)
        self._metrics.histogram("loop_turn_seconds").follow(turns_of(loop))
        self._tracer: Tracer | None = None
        self._rank_engine = engine
        self._engine_thread = engine.thread
        self._requests: dict[str, _Request] = {}
        self.incoming = IncomingRank(engine=self, send=link.send)
        self._engine: DecodeEngine
        self._step_advice: str
        self._allocator: GroupAllocator
        self._offload: OffloadRank | None = None
        self._ahead: StepsAhead | None = None
        self._receiver: ReceiverLoop
        self._sessions: PrefillSessions

    async def start(self) -> RankReady:
        """Load the engine, make the ring, serve; see `Worker.start`."""
        self._engine = await self._rank_engine.open(self._config, rank=self._spec.rank, rendezvous=self._spec.rendezvous)
        async with contextlib.AsyncExitStack() as undo:
            self._tracer = open_tracer(self._config.tracing, role=self._config.role, rank=self._spec.rank)
            if self._tracer is not None:
                undo.callback(self._tracer.close)
            hello = await self._open(undo)
            undo.pop_all()
        return hello

    async def _open(self, undo: contextlib.AsyncExitStack) -> RankReady:
        """Open everything but the engine. If that fails, the caller runs `undo`."""
        config, engine = self._config, self._engine
        if config.speculative.is_on and not hasattr(engine, "verify"):
            raise ConfigError(
                f"speculative.method is {config.speculative.method}, and the engine {config.engine} cannot verify draft tokens "
                "(it has no verify); leave it out"
            )
        kernels = await self._engine_thread.call(lambda: choose_kernels(config.kernels, engine.pool.device))
        transport = open_transport(
            config.transport, host=config.server.host, device_index=engine.pool.device.index, kernels=kernels
        )
        opening = undo.enter_context(contextlib.ExitStack())
        opening.callback(transport.close)
        instance = own_instance(engine, transport, incarnation=self._spec.incarnation, device_type=engine.pool.device.type)
        pool = engine.pool
        probe_bytes = config.transport.probe_bytes
        ring_bytes = ring_capacity_bytes(
            config.ring, config.memory.device_memory or device_bytes(pool.device), device=config.device
        )
        num_bytes = ring_bytes + probe_bytes
        ring_memory = RingMemory.take(
            transport,
            ring_bytes=ring_bytes,
            probe_bytes=probe_bytes,
            device=pool.device,
            advice=rank_advice(Phase.RING, config, engine, {"ring.capacity_bytes": ring_bytes}),
        )
        needs = page_needs(pool.groups, pool.page_size, slack_tokens=config.window_slack_tokens)
        allocator = GroupAllocator(needs, pool.num_pages)
        context = RankContext(
            loop=self._loop,
            instance=instance,
            rank=self._spec.rank,
            device=pool.device,
            transport=transport,
            transport_config=config.transport,
            security=security_of(config),
            metrics=self._metrics,
            on_crash=self._crash,
            tracer=self._tracer,
            kernels=kernels,
        )
        offload = await open_offload_rank(
            config,
            context,
            engine,
            allocator=allocator,
            engine_thread=self._engine_thread,
            send=self._link.send,
            on_free=self.on_copies_over,
        )
        if offload is not None:
            undo.push_async_callback(offload.close)
        memory = rank_memory(engine, {"ring": num_bytes})
        self._metrics.memory(memory.planned, memory.real)
        receiving = open_receiving(
            context=context, owner=self.incoming, pool=pool, memory=ring_memory, server=config.server, host_arrivals=offload
        )
        opening.pop_all()  # the receiver closes it
        undo.callback(receiving.loop.close)
        sessions = PrefillSessions(
            context=context,
            receiving=receiving,
            server=config.server,
            heartbeat_s=config.heartbeat.interval_s,
            on_writer_lost=self.incoming.on_writer_lost,
            on_link_probed=self.incoming.on_link_probed,
        )
        reader = None
        if self._can_overlap:
            reader = WorkerThread("tokens", self._loop, self._crash)
            undo.callback(reader.finish)
        self.use(engine=engine, allocator=allocator, receiver=receiving.loop, sessions=sessions, offload=offload, reader=reader)
        address = await sessions.start()
        return RankReady(
            rank=self._spec.rank,
            pid=os.getpid(),
            instance=instance,
            pool_pages=pool.num_pages,
            max_context_tokens=engine.max_context_tokens,
            vocab_size=engine.vocab_size,
            eos_token_ids=tuple(engine.eos_token_ids),
            address=address,
            ring_bytes=receiving.loop.ring.capacity_bytes,
            memory=memory,
            host_pages=() if offload is None else offload.num_pages,
            stored_block_pages=0 if offload is None else offload.stored_block_pages,
            can_switch=self._rank_engine.can_switch,
            can_overlap=reader is not None,
        )

    @property
    def _can_overlap(self) -> bool:
        """Whether a step can begin before the host has the tokens of the previous step.

        Draft tokens depend on the newest token. With early release, the leader counts a request's pages up to the newest token.
        """
        config = self._config
        is_plain = not config.speculative.is_on and config.offload.device_window is None
        return is_plain and hasattr(self._engine, "begin_decode")

    def use(
        self,
        *,
        engine: DecodeEngine,
        allocator: GroupAllocator,
        receiver: ReceiverLoop,
        sessions: PrefillSessions,
        offload: OffloadRank | None,
        reader: WorkerThread | None,
    ) -> None:
        """Serve requests with these parts. `start` calls it with the parts that it opens.

        Args:
            reader: Reads the tokens of steps. None means that the leader sends one step at a time.
        """
        self._engine = engine
        self._step_advice = rank_advice(Phase.DECODE_STEP, self._config, engine)
        if reader is not None:
            self._ahead = StepsAhead(engine, engine_thread=self._engine_thread, reader=reader, advice=self._step_advice)
        self._allocator = allocator
        self._receiver = receiver
        self._sessions = sessions
        self.incoming.begin(receiver, sessions)
        self._offload = offload
        if offload is not None:
            offload.listen(hold=receiver.hold)

    def _crash(self, error: BaseException) -> None:
        self._loop.call_exception_handler({"message": "a worker thread failed", "exception": error})

    # The leader's messages

    def on_message(self, message: Any) -> None:
        match message:
            case ExpectRequest():
                self._expect(message)
            case CancelIncoming():
                self._cancel(message)
            case RunDecodeStep():
                self._run_step(message)
            case FinishRequest():
                self._leave(message.request_id)
            case _:
                if not self.incoming.on_message(message) and (self._offload is None or not self._offload.on_message(message)):
                    raise LocalProtocolError(f"a decode rank cannot serve {type(message).__name__}")

    def _expect(self, message: ExpectRequest) -> None:
        if not self._allocator.reserve_pages(message.transfer_id, PageCounts(message.pages)):
            raise LocalProtocolError(f"no room for request {message.transfer_id}, which the leader had counted")
        self._allocator.begin_at(message.transfer_id, message.num_tokens)
        if self._offload is not None:
            self._offload.expect(message.transfer_id, message.host_pages, message.num_stored)
        self._requests[message.transfer_id] = _Request(sampling=message.sampling)
        self.incoming.expect(message)

    def _cancel(self, message: CancelIncoming) -> None:
        request = self._requests.get(message.transfer_id)
        if request is not None:
            request.is_leaving = True
            if self._offload is not None:
                self._offload.stop_arriving(message.transfer_id)
            self.incoming.cancel(message.transfer_id, message.reason)

    def on_over(self, transfer_id: str, *, is_whole: bool) -> None:
        """See `IncomingEngine.on_over`."""
        self.on_copies_over(transfer_id)

    def on_copies_over(self, request_id: str) -> None:
        """Release the pages of a request that no copy uses any more, if it is leaving."""
        request = self._requests.get(request_id)
        if request is not None and request.is_leaving:
            self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.is_leaving = True
        is_copied = self._offload is not None and self._offload.is_busy(request_id)
        if not self.incoming.is_receiving(request_id) and not request.steps_under_way and not is_copied:
            del self._requests[request_id]
            if self._offload is not None:
                self._offload.forget(request_id)
            self._allocator.release(request_id)
            if not self._requests:
                self._allocator.check_idle()
            self._link.send(PagesReleased(transfer_id=request_id))

    def _run_step(self, message: RunDecodeStep) -> None:
        items: list[DecodeItem] = []
        for part in message.parts:
            request = self._requests[part.request_id]
            request.steps_under_way += 1
            items.append(self._item_of(part, request))

        doing = f"computing a decode step of {len(items)} requests"

        def run(compute: Any, begun_s: float | None = None) -> StepDone | StepFailed:
            return run_step(
                compute,
                doing,
                step=message.step,
                request_ids=tuple(part.request_id for part in message.parts),
                device=self._engine.pool.device,
                advice=self._step_advice,
                num_ranks=self._engine.shard.num_ranks,
                begun_s=begun_s,
            )

        def on_over(outcome: StepDone | StepFailed) -> None:
            self._on_step_over(message, outcome)

        if self._ahead is not None:
            self._ahead.submit(items, doing, run, on_over)
            return
        has_drafts = any(part.num_drafts for part in message.parts)
        compute: Any = self._engine.verify if has_drafts else self._engine.decode  # type: ignore[attr-defined]  # optional
        self._engine_thread.submit(lambda: run(lambda: compute([with_tuples(item) for item in items])), on_over)

    def _item_of(self, part: DecodeStepPart, request: _Request) -> DecodeItem:
        offload, is_unread = self._offload, part.token_id is None
        copied_from = None if offload is None else offload.copied_from(part.request_id)
        # The step that chooses an unread token may still read the window before its own position.
        begun = part.position - 1 if is_unread else part.position
        self._allocator.advance(part.request_id, begun, copied_from=copied_from)
        tables = self._allocator.cover(part.request_id, part.position + 1 + part.num_drafts)
        in_host: tuple[tuple[int, ...], ...] = ()
        stored: tuple[int, ...] = ()
        if offload is not None:
            tables, in_host, stored = offload.step_tables(part.request_id, tables)
        return DecodeItem(
            request_id=part.request_id,
            token_id=0 if part.token_id is None else part.token_id,
            position=part.position,
            page_tables=tables,
            host_tables=in_host,
            stored_blocks=stored,
            sampling=request.sampling,
            draft_token_ids=part.draft_token_ids,
            num_draft_tokens=part.num_draft_tokens,
            is_unread=is_unread,
        )

    def _on_step_over(self, step: RunDecodeStep, outcome: StepDone | StepFailed) -> None:
        if isinstance(outcome, StepDone):
            self._metrics.histogram("step_seconds").observe(outcome.compute_s)
        if self._offload is not None:
            self._offload.report_lost()
        for part in step.parts:
            request = self._requests[part.request_id]
            request.steps_under_way -= 1
            if request.is_leaving:
                self._leave(part.request_id)
        if self._spec.rank == 0 or isinstance(outcome, StepFailed):
            self._link.send(outcome)

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        """Return the request's tables up to `num_tokens`. Bind pages only now, when their data may be written."""
        return self._allocator.cover(request_id, num_tokens)

    # Reports and end

    def status(self) -> dict[str, Any]:
        return {
            "rank": self._spec.rank,
            "pid": os.getpid(),
            **pool_status(self._allocator),
            **self._sessions.status(),
            "requests": len(self._requests) + self._receiver.num_requests,
        }

    def check_idle(self) -> bool:
        if self._requests or (self._offload is not None and not self._offload.is_idle) or not self.incoming.check_idle():
            return False
        self._allocator.check_idle()
        return True

    def metrics(self, status: Mapping[str, Any]) -> Any:
        self._metrics.strangers_dropped(self._sessions.num_strangers)
        return self._metrics.snapshot(status)

    async def close(self) -> None:
        await self._sessions.close("the decode node shuts down")
        ends_s = self._loop.time() + LET_GO_S
        while self._receiver.num_ending and self._loop.time() < ends_s:
            await asyncio.sleep(LET_GO_S / 20)
        self._receiver.close()
        await self._rank_engine.rest()
        if self._ahead is not None:
            await self._ahead.close()
        if self._offload is not None:
            await self._offload.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
