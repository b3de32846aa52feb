"""One decode rank: its engine, its pool, its ring, and the sessions of its writers.

The rank's loop owns everything but the running step: it reserves and binds pages, runs the receiver, and serves attach and
watermarks. The leader decides what is admitted, and which requests a step advances; all ranks run the same steps.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from decode_node.admission import page_needs
from decode_node.engine import DecodeEngine
from decode_node.rank_messages import (
    CancelRequest,
    ExpectRequest,
    FinishRequest,
    ForgetPrefill,
    LinkProbed,
    PagesReleased,
    RequestExpected,
    RunStep,
    StepDone,
    StepFailed,
    TransferComplete,
    TransferFailed,
    WriterLost,
)
from decode_node.receiver_events import IncomingRequest, IncomingRoute
from decode_node.receiver_loop import ReceiverLoop
from node_runtime.lane import Lane
from node_runtime.rank_link import RankLink
from node_runtime.rank_memory import device_bytes, rank_memory
from node_runtime.rank_process import RankSpec
from node_runtime.rank_report import RankHello, pool_status
from node_runtime.rank_setup import engine_loader, open_transport, own_instance
from node_runtime.refusals import say_refused
from node_runtime.reminders import Reminders
from node_runtime.warm_up import warm_up
from transfer.chunk import largest_wire_bytes
from transfer.config import DecodeNodeConfig
from transfer.control.zmq_channel import ZmqControlServer
from transfer.control.zmq_doorkeeper import new_key_pair
from transfer.engine_types import DecodeItem, RequestFault, SamplingParams
from transfer.errors import ChunkTooLarge, EngineError, LocalProtocolError, StagingError, TransferError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link, check_compatible, conversion_scales
from transfer.layout import DType, Route, routes, wire_dtype
from transfer.memory.node_plan import ring_capacity_bytes
from transfer.messages import MAX_MESSAGE_BYTES, clip_reason
from transfer.metrics import RankMetrics
from transfer.page_allocator import GroupAllocator
from transfer.registry.guard import Refusal
from transfer.registry.options import MAX_SESSIONS
from transfer.registry.security import security_of
from transfer.registry.server import RegistryServer, TransferControlServicer, host_port, serve
from transfer.ring import Watermark
from transfer.staging import StagingBuffer
from transfer.transport.base import LocalMemory, Session, Transport
from transfer.transport.probe import ProbePlan, serve_probe

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Writer:
    """An attached prefill rank."""

    instance: Instance
    rank: int
    routes: tuple[Route, ...]  # from all ranks of its instance to this rank
    lane: str
    digest: str  # algorithm of payload digests
    scales: Mapping[tuple[int, bool], float] | None
    is_measured: bool = False


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request from `ExpectRequest` until its pages are back."""

    sampling: SamplingParams
    is_receiving: bool = True
    is_leaving: bool = False  # its pages go back as soon as nothing uses them
    steps_under_way: int = 0


class DecodeWorker:
    """See the module's docstring; a `node_runtime.rank_process.Worker`."""

    def __init__(self, spec: RankSpec, link: RankLink, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        assert isinstance(spec.config, DecodeNodeConfig)
        self._config = spec.config
        self._link = link
        self._loop = loop
        self._metrics = RankMetrics(role="decode", rank=spec.rank)
        self._engine_lane = Lane("engine", loop, self._crash)
        self._requests: dict[str, _Request] = {}
        self._writers: dict[int, _Writer] = {}  # by session
        self._refused = Reminders()  # of callers whose certificates do not allow what they asked for
        self._attaching: set[asyncio.Task[None]] = set()  # probes, and kernels being compiled
        self._engine: DecodeEngine
        self._instance: Instance
        self._allocator: GroupAllocator
        self._transport: Transport
        self._scratch: LocalMemory  # of two-sided probes
        self._receiver: ReceiverLoop
        self._control: ZmqControlServer
        self._servicer: TransferControlServicer
        self._server: RegistryServer

    async def start(self) -> RankHello:
        """Load the engine, make the ring, serve; see `Worker.start`."""
        config = self._config
        engine = self._engine = await self._engine_lane.call(
            lambda: engine_loader(config)(config, rank=self._spec.rank, rendezvous=self._spec.rendezvous)
        )
        self._transport = open_transport(config.transport, host=config.server.host, device_index=engine.pool.device.index)
        self._instance = own_instance(
            engine, self._transport, incarnation=self._spec.incarnation, device_type=engine.pool.device.type
        )
        pool = engine.pool
        # A one-sided probe writes behind the ring, a two-sided one where it is told to.
        probe_bytes = config.transport.probe_bytes
        tail_bytes = probe_bytes if self._transport.is_one_sided else 0
        ring_bytes = ring_capacity_bytes(config, config.memory.device_memory or device_bytes(pool.device))
        ring_memory = StagingBuffer(num_bytes=ring_bytes + tail_bytes, device=pool.device, is_shared=self._transport.is_one_sided)
        if not self._transport.is_one_sided:
            self._scratch = self._transport.register(StagingBuffer(num_bytes=probe_bytes, device=pool.device).tensor)
        memory = rank_memory(engine, {"ring": ring_bytes + probe_bytes})
        self._metrics.memory(memory.planned, memory.real)
        self._allocator = GroupAllocator(page_needs(pool.groups, pool.page_size), pool.num_pages)
        host, advertised = config.server.host, config.server.advertised_host
        self._control = ZmqControlServer(
            f"tcp://{host_port(host, 0)}",
            keys=new_key_pair(),  # of this life
            advertise_host=advertised,
            max_payload_bytes=MAX_MESSAGE_BYTES,
        )
        self._receiver = ReceiverLoop(
            loop=self._loop,
            owner=self,
            pool=pool,
            transport=self._transport,
            ring_memory=ring_memory,
            control=self._control,
            incarnation=self._spec.incarnation,
            metrics=self._metrics,
            on_crash=self._crash,
            probe_bytes=tail_bytes,
        )
        ring = self._receiver.ring
        self._servicer = TransferControlServicer(
            watermark=ring.watermark(),
            ring_capacity_bytes=ring.capacity_bytes,
            heartbeat_s=config.heartbeat.interval_s,
            on_attach=self._on_attach,
            on_session_lost=self._receiver.close_session,
            on_link=self._on_link,
        )
        self._server = await serve(
            host, 0, transfer_control=self._servicer, security=security_of(config), on_refused=self._on_refused
        )
        await self._server.set_serving(True)
        return RankHello(
            rank=self._spec.rank,
            pid=os.getpid(),
            instance=self._instance,
            pool_pages=pool.num_pages,
            max_context_tokens=engine.max_context_tokens,
            vocab_size=engine.vocab_size,
            eos_token_ids=tuple(engine.eos_token_ids),
            address=host_port(advertised, self._server.port),
            ring_bytes=ring.capacity_bytes,
            memory=memory,
        )

    def _crash(self, error: BaseException) -> None:
        self._loop.call_exception_handler({"message": "a lane failed", "exception": error})

    def _on_refused(self, refusal: Refusal) -> None:
        self._metrics.call_refused(refusal.method)
        say_refused(refusal, self._refused)

    # Sessions

    async def _on_attach(self, request: AttachRequest) -> AttachResponse:
        agreement = check_compatible(request.prefill, self._instance)
        mine = self._routes_from(request.prefill)
        ring = self._receiver.ring
        most = largest_wire_bytes(
            request.chunk_plan,
            self._instance.layout,
            [route for route in mine if route.prefill_rank == request.prefill_rank],
            self._wire(request.prefill),
        )
        if most > ring.capacity_bytes:
            raise ChunkTooLarge(
                f"ring.capacity_bytes is {ring.capacity_bytes} on decode rank {self._spec.rank}; a chunk of "
                f"{request.chunk_plan.chunk_tokens} tokens and {request.chunk_plan.layers_per_group or 'all'} layers has {most} "
                "bytes: raise it, or lower chunk.chunk_tokens or chunk.layers_per_group of the prefill node"
            )
        if self._receiver.num_ending >= MAX_SESSIONS:
            # Those that are open have a limit of their own, which a writer that comes, goes and lets go of nothing never meets.
            raise StagingError(
                f"{self._receiver.num_ending} sessions of decode rank {self._spec.rank} are closed, and their writers may still "
                f"write; there can be {MAX_SESSIONS}: end the processes of those prefill ranks"
            )
        session, answer = self._transport.accept(request.offer, self._receiver.memory)
        number = secrets.randbits(62) + 1
        writer = self._writers[number] = _Writer(
            instance=request.prefill,
            rank=request.prefill_rank,
            routes=mine,
            lane=session.lane,
            digest=agreement.digest,
            scales=conversion_scales(self._instance, request.prefill),
        )
        self._receiver.driver.add(session)
        self._receiver.open_session(number, session, incarnation=request.prefill.incarnation, control_key=request.control_key)
        probe_bytes = min(request.probe_bytes, self._config.transport.probe_bytes)
        if not self._transport.is_one_sided:
            probe_bytes = min(probe_bytes, ring.capacity_bytes)  # what a write names as its target must lie in what is offered
            self._keep(self._serve_probe(number, session, probe_bytes))
        self._keep(self._warm_up(writer, request))
        log.info("session_opened", prefill_rank=request.prefill_rank, lane=session.lane)
        return AttachResponse(
            session_id=number,
            decode=self._instance,
            decode_rank=self._spec.rank,
            answer=answer,
            ring_capacity_bytes=ring.capacity_bytes,
            control_address=self._control.address,
            control_key=self._control.public_key,
            heartbeat_s=self._config.heartbeat.interval_s,
            protocol_version=agreement.protocol_version,
            probe_bytes=probe_bytes,
        )

    def _routes_from(self, prefill: Instance) -> tuple[Route, ...]:
        """From all ranks of the instance to this one; computed once per attach, for every request needs them."""
        every = routes(self._instance.layout, prefill.shard, self._instance.shard)
        return tuple(route for route in every if route.decode_rank == self._spec.rank)

    def _wire(self, prefill: Instance) -> DType:
        return wire_dtype(self._instance.layout, prefill.shard, self._instance.shard)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _warm_up(self, writer: _Writer, request: AttachRequest) -> None:
        try:
            await warm_up(
                self._receiver.copier,
                [route for route in writer.routes if route.prefill_rank == writer.rank],
                request.chunk_plan,
                device=self._engine.pool.device,
                layout=self._instance.layout,
                dtype=self._wire(request.prefill),
                scales=writer.scales,
                is_gather=False,
            )
        except Exception as error:  # whatever a compiler says; what needs the kernels would meet it again
            self._crash(error)

    async def _serve_probe(self, number: int, session: Session, probe_bytes: int) -> None:
        try:
            await serve_probe(self._receiver.driver, session, self._scratch, plan=ProbePlan.fitting(probe_bytes))
        except TransferError as error:
            self._servicer.close_session(number, f"the link's probe failed: {error}")

    def _on_link(self, number: int, reported: Link) -> None:
        writer = self._writers.get(number)
        if writer is None or writer.is_measured:
            return  # the session was closed meanwhile; or said it before: a link is measured once, when it is attached
        writer.is_measured = True
        # Only the numbers are the writer's to tell: who it is and what carries its bytes is known here.
        link = Link(
            prefill_rank=writer.rank,
            decode_rank=self._spec.rank,
            lane=writer.lane,
            latency_s=reported.latency_s,
            bandwidth_bytes_per_s=reported.bandwidth_bytes_per_s,
        )
        floor = self._config.transport.min_bandwidth_bytes_per_s
        if link.bandwidth_bytes_per_s < floor:
            reason = (
                f"link from prefill rank {link.prefill_rank} over {link.lane} makes {link.bandwidth_bytes_per_s:.3g} bytes/s; "
                f"transport.min_bandwidth_bytes_per_s of the decode node is {floor:.3g}"
            )
            log.warning("link_refused", reason=reason)
            self._receiver.close_session(number, reason)
            return
        self._metrics.link_measured(number, link)
        self._link.send(LinkProbed(link=link))

    def on_session_closed(self, session: int, reason: str) -> None:
        writer = self._writers.pop(session, None)
        self._metrics.link_closed(session)
        self._servicer.close_session(session, reason)
        if writer is not None:
            log.info("session_closed", prefill_rank=writer.rank, reason=reason)
            name = (writer.instance.incarnation, writer.rank)
            if all((other.instance.incarnation, other.rank) != name for other in self._writers.values()):
                self._link.send(WriterLost(incarnation=name[0], prefill_rank=name[1], reason=clip_reason(reason)))

    def publish(self, watermark: Watermark, sessions: frozenset[int] | None) -> None:
        self._servicer.publish(watermark, sessions)

    # The leader's messages

    def on_message(self, message: Any) -> None:
        match message:
            case ExpectRequest():
                self._expect(message)
            case CancelRequest():
                self._cancel(message)
            case RunStep():
                self._run_step(message)
            case FinishRequest():
                self._leave(message.request_id)
            case ForgetPrefill():
                for number, writer in list(self._writers.items()):
                    if writer.instance.incarnation == message.incarnation:
                        self._receiver.close_session(number, message.reason)
            case _:
                raise LocalProtocolError(f"a decode rank cannot serve {type(message).__name__}")

    def _expect(self, message: ExpectRequest) -> None:
        writers = {
            writer.rank: (number, writer)
            for number, writer in self._writers.items()
            if writer.instance.incarnation == message.prefill_incarnation
        }
        if not self._allocator.reserve(message.request_id, message.reserved_tokens):
            raise LocalProtocolError(f"no room for request {message.request_id}, which the leader had counted")
        self._allocator.begin_at(message.request_id, message.num_tokens)
        self._requests[message.request_id] = _Request(sampling=message.sampling)
        if self._receiver.is_known(message.request_id):
            self._requests[message.request_id].is_receiving = False
            reason = "an earlier request of the same id is still draining"
            self._link.send(RequestExpected(request_id=message.request_id, reason=reason))
            return
        if not writers:
            self._requests[message.request_id].is_receiving = False
            self._link.send(RequestExpected(request_id=message.request_id, reason="no rank of the prefill instance is attached"))
            return
        _, some = next(iter(writers.values()))
        prefill = some.instance
        mine = some.routes
        absent = sorted({route.prefill_rank for route in mine} - writers.keys())
        if absent:
            self._requests[message.request_id].is_receiving = False
            self._link.send(RequestExpected(request_id=message.request_id, reason=f"prefill rank {absent[0]} is not attached"))
            return
        self._link.send(RequestExpected(request_id=message.request_id))
        self._receiver.expect_request(
            IncomingRequest(
                request_id=message.request_id,
                layout=self._instance.layout,
                plan=message.plan,
                wire_dtype=self._wire(prefill),
                num_tokens=message.num_tokens,
                start_token=message.start_token,
                routes=tuple(IncomingRoute(route=route, session=writers[route.prefill_rank][0]) for route in mine),
                digest=some.digest,
                scales=some.scales,
            )
        )

    def _cancel(self, message: CancelRequest) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            return
        request.is_leaving = True  # before the receiver hears of it: with nothing under way, on_drained comes at once
        if request.is_receiving and self._receiver.cancel_request(message.request_id, message.reason):
            return  # on_drained releases it
        self._leave(message.request_id)

    def _leave(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.is_leaving = True
        if not request.is_receiving and not request.steps_under_way:
            del self._requests[request_id]
            self._allocator.release(request_id)
            if not self._requests:
                self._allocator.check_idle()
            self._link.send(PagesReleased(request_id=request_id))

    def _run_step(self, message: RunStep) -> None:
        items: list[DecodeItem] = []
        for part in message.parts:
            request = self._requests[part.request_id]
            request.steps_under_way += 1
            # The steps before are over: the leader sends one at a time.
            self._allocator.advance(part.request_id, part.position)
            items.append(
                DecodeItem(
                    request_id=part.request_id,
                    token_id=part.token_id,
                    position=part.position,
                    page_tables=self._allocator.cover(part.request_id, part.position + 1),
                    sampling=request.sampling,
                )
            )

        def work() -> StepDone | StepFailed:
            started = time.monotonic()
            try:
                tokens = self._engine.decode(items)
            except RequestFault as fault:
                faults = {request_id: str(fault) for request_id in fault.request_ids}
                return StepDone(step=message.step, tokens=fault.tokens, compute_s=time.monotonic() - started, faults=faults)
            except EngineError as error:
                names = tuple(part.request_id for part in message.parts)
                is_fatal = error.is_fatal or self._engine.shard.num_ranks > 1
                return StepFailed(step=message.step, request_ids=names, reason=str(error), is_fatal=is_fatal)
            return StepDone(step=message.step, tokens=tokens, compute_s=time.monotonic() - started)

        self._engine_lane.submit(work, lambda outcome: self._on_step_over(message, outcome))

    def _on_step_over(self, step: RunStep, outcome: StepDone | StepFailed) -> None:
        for part in step.parts:
            request = self._requests[part.request_id]
            request.steps_under_way -= 1
            if request.is_leaving:
                self._leave(part.request_id)
        if self._spec.rank == 0 or isinstance(outcome, StepFailed):
            self._link.send(outcome)

    # What the receiver says

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        """The request's tables up to `num_tokens`; pages are bound only now, when their data may be written."""
        return self._allocator.cover(request_id, num_tokens)

    def on_complete(self, request_id: str) -> None:
        self._requests[request_id].is_receiving = False
        self._link.send(TransferComplete(request_id=request_id))

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        self._link.send(TransferFailed(request_id=request_id, reason=reason, is_data_loss=is_data_loss))

    def on_drained(self, request_id: str) -> None:
        request = self._requests[request_id]
        request.is_receiving = False
        if request.is_leaving:
            self._leave(request_id)

    # Reports and end

    def status(self) -> dict[str, Any]:
        ring = self._receiver.ring
        return {
            "rank": self._spec.rank,
            "pid": os.getpid(),
            **pool_status(self._allocator),
            "ring_capacity": ring.capacity_bytes,
            "ring_live_bytes": ring.live_bytes,
            "ring_peak_bytes": self._receiver.ring_peak_bytes,
            "ring_quarantined_bytes": ring.quarantined_bytes,
            "ring_live_grants": ring.num_live_grants,
            "watermark_position": ring.position,
            "requests": len(self._requests) + self._receiver.num_requests,
            "sessions": self._receiver.num_sessions,
            "ending_sessions": self._receiver.num_ending,
            "pending_transfers": self._receiver.driver.num_watches,
            "watermark_acks": self._servicer.num_acks,
            # Strangers' messages are dropped by the channel itself, before anybody has to look at them.
            "dropped_messages": self._receiver.num_dropped + self._control.num_dropped,
            "refused_connections": self._control.num_refused,
        }

    def check_idle(self) -> bool:
        if self._requests or not self._receiver.is_idle:
            return False
        self._receiver.check_idle()
        self._allocator.check_idle()
        return True

    def metrics(self, status: Mapping[str, Any]) -> Any:
        self._metrics.strangers_dropped(self._control.num_dropped)
        return self._metrics.snapshot(status)

    async def close(self) -> None:
        self._servicer.close("the decode node shuts down")
        await self._server.close()
        for task in list(self._attaching):
            task.cancel()
        self._receiver.close()
        await self._engine_lane.call(self._engine.close)
        self._engine_lane.close(timeout_s=5.0)
