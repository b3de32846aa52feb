"""The two ends of the pool-to-pool benchmark: everything that a rank of either role has, but for its engine."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.engine_step import DeviceStep
from bench.link_ends import open_transport
from bench.pool_setting import SEED, Case, PagePicker, Setting
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.control.session_channel import SessionControlServer
from transfer.control.zmq_authenticator import new_key_pair
from transfer.copy import head_slice_copier
from transfer.copy.digest import digests_for
from transfer.errors import TransferError
from transfer.instance import CAPABILITIES, AttachRequest, AttachResponse, Instance, Link, check_compatible
from transfer.layout import Range, Shard, wire_buffers
from transfer.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSIONS
from transfer.metrics import RankMetrics
from transfer.metrics.series import Histogram
from transfer.piece import RankRequest, SessionRoute
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.loop import ReceiverLoop
from transfer.registry.server import RegistryServer, TransferControlServicer, serve
from transfer.send.attach import DecodeSessions
from transfer.send.events import SenderSettings, SentStats
from transfer.send.loop import SenderLoop
from transfer.sizes import choose_cut, finest_chunk_plan, staging_slot_bytes
from transfer.transport.base import Transport
from transfer.transport.probe import ProbePlan, serve_probe

GRANT_LEAD_S = 0.05
"""From a request's start, when its grants are asked for, to its KV: a prefill step takes longer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A stage of one chunk.

    Args:
        seconds: That it took.
        told_s: When the rank's loop heard of its end, monotonic clock.
    """

    seconds: float
    told_s: float


Stages = dict[str, list[Sample]]
"""By stage, in the order of their ends."""


class StageRecorder(RankMetrics):
    """A rank's metrics that keep every sample of a stage besides."""

    def __init__(self, *, role: str) -> None:
        super().__init__(role=role, rank=0)
        self._samples: Stages = {}

    def take(self) -> Stages:
        """What was kept since this was called last."""
        taken, self._samples = self._samples, {}
        return taken

    def _keep(self, stage: str, seconds: float) -> None:
        self._samples.setdefault(stage, []).append(Sample(seconds, time.monotonic()))

    def histogram(self, name: str, **labels: str) -> Histogram:
        found = super().histogram(name, **labels)
        return RecordedHistogram(found, functools.partial(self._keep, labels["stage"])) if name == "stage_seconds" else found


class RecordedHistogram(Histogram):
    """Passes values on to a histogram, and to `keep`."""

    def __init__(self, histogram: Histogram, keep: Callable[[float], None]) -> None:
        self._histogram = histogram
        self._keep = keep

    def observe(self, value: float) -> None:
        self._histogram.observe(value)
        self._keep(value)


def own_instance(setting: Setting, shard: Shard, transport: Transport) -> Instance:
    return Instance(
        incarnation=secrets.randbits(63) + 1,
        layout=setting.layout,
        shard=shard,
        transport=transport.name,
        digests=digests_for(setting.config.device),
        protocol_versions=PROTOCOL_VERSIONS,
        capabilities=CAPABILITIES,
    )


def _source_heads(setting: Setting) -> Range:
    heads = setting.route.heads
    return Range(begin=heads.source_start, end=heads.source_start + heads.count)


def _target_heads(setting: Setting) -> Range:
    heads = setting.route.heads
    return Range(begin=heads.target_start, end=heads.target_start + heads.count)


def compile_kernels(picker: PagePicker, setting: Setting, heads: Range) -> None:
    """One gather and one scatter of a piece on a GPU's pool, before anybody counts heartbeats: compiling takes seconds."""
    pool, layout, num_tokens = picker.pool, setting.layout, setting.cases[0].num_tokens
    spans = {"tokens": Range(begin=0, end=num_tokens), "layers": Range(begin=0, end=layout.num_layers)}
    buffers = wire_buffers(layout, setting.route, **spans, num_tokens=num_tokens, dtype=layout.dtype)
    plan = head_slice_copier(pool.part_of(0), heads=heads, wire_dtype=layout.dtype).plan(buffers)
    wire = torch.zeros(plan.num_wire_bytes, dtype=torch.uint8, device=pool.device)
    pages = torch.arange(pool.num_pages[0], device=pool.device)
    total = torch.zeros(1, dtype=torch.int64, device=pool.device)
    plan.gather(pages, wire, digest=total)
    plan.compile(wire.data_ptr(), has_digest=True, is_gather=True, is_direct=True)
    plan.scatter(pages, wire, digest=total)
    torch.cuda.synchronize(pool.device)


class PrefillEnd:
    """Prefill rank 0; a `transfer.send.loop.SenderOwner`.

    Args:
        device: Where pool and staging memory lie.
        lane: See `bench.link_ends.open_transport`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, setting: Setting, device: str, lane: str) -> None:
        self._loop = loop
        self._setting = setting
        self.picker = PagePicker(setting, setting.prefill_shard, device, seed=SEED)
        self.picker.fill(SEED)
        self._computed: Any = None
        if setting.devices.is_cuda:
            compile_kernels(self.picker, setting, _source_heads(setting))
            self._engine_stream = torch.cuda.Stream()
            self._computed = torch.cuda.Event()
            self._computed.record()
        self.metrics = StageRecorder(role="prefill")
        self._sent: dict[str, asyncio.Future[SentStats]] = {}
        self._transport = open_transport(lane, device)
        self._instance = own_instance(setting, setting.prefill_shard, self._transport)
        config = setting.config
        gpu_bytes = torch.cuda.mem_get_info(device)[1] if setting.devices.is_cuda else 0
        slot_bytes = staging_slot_bytes(
            config.chunk, config.staging, setting.layout, setting.prefill_shard, gpu_bytes, device=config.device
        )
        context = RankContext(
            loop=loop,
            instance=self._instance,
            rank=0,
            device=torch.device(device),
            transport=self._transport,
            transport_config=setting.config.transport,
            metrics=self.metrics,
            on_crash=self._crash,
        )
        self._sender = SenderLoop(
            context=context,
            owner=self,
            pool=self.picker.pool,
            staging=StagingBuffer(num_bytes=setting.num_slots * slot_bytes, device=device),
            settings=SenderSettings(num_slots=setting.num_slots, slot_bytes=slot_bytes),
        )
        self._sessions = DecodeSessions(
            context=context,
            sender=self._sender,
            plan=finest_chunk_plan(setting.config.chunk),
            on_lost=lambda join, incarnation, reason: self._give_up(reason),
        )
        self._session = 0
        self._digest = ""
        self._plans: dict[Case, ChunkPlan] = {}

    async def attach(self, decode: Instance, address: str) -> tuple[Link, dict[Case, ChunkPlan]]:
        """Returns the measured link, and how the requests of each case are cut for it."""
        (link,) = await self._sessions.open(decode, (address,), join=1)
        peer = self._sessions.of(decode.incarnation)
        assert peer is not None
        self._session, self._digest = peer.sessions[0], peer.digest
        for case in self._setting.cases:
            config = self._setting.config_of(case)
            self._plans[case] = choose_cut(
                config.chunk,
                self._instance,
                decode,
                [link],
                ring_bytes=self._setting.ring_bytes,
                slot_bytes=peer.slot_bytes,
                device=config.device,
            ).plan
        return link, self._plans

    async def send(self, request_ids: Sequence[str], case: Case) -> tuple[list[float], list[SentStats]]:
        """Send requests; returns when the KV of each was computed (monotonic clock), and their statistics."""
        self.picker.pick(request_ids, case.num_tokens)
        layout = self._setting.layout
        chunks = split_into_chunks(self._plans[case], num_tokens=case.num_tokens, num_layers=layout.num_layers)
        started_s = []
        for request_id in request_ids:
            self._sent[request_id] = self._loop.create_future()
            if self._setting.asks_ahead:
                self._start(request_id, case)
        step: DeviceStep | None = None
        if self._setting.asks_ahead:
            await asyncio.sleep(GRANT_LEAD_S)
            step = DeviceStep(self._engine_stream) if self._setting.devices.is_cuda else None
        for request_id in request_ids:
            started_s.append(time.monotonic())
            if not self._setting.asks_ahead:
                self._start(request_id, case)
            for chunk in chunks:
                self._sender.chunk_computed(request_id, chunk.index, self._computed if step is None else step.event)
        stats = [await self._sent[request_id] for request_id in request_ids]
        self._sent.clear()
        return started_s if step is None else [step.computed_s()] * len(started_s), stats

    def _start(self, request_id: str, case: Case) -> None:
        setting = self._setting
        self._sender.start_request(
            RankRequest(
                request_id=request_id,
                layout=setting.layout,
                plan=self._plans[case],
                wire_dtype=setting.layout.dtype,
                num_tokens=case.num_tokens,
                start_token=0,
                routes=(SessionRoute(route=setting.route, session=self._session),),
                digest=self._digest,
            )
        )

    def digest(self, request_id: str, case: Case) -> str:
        return self.picker.digest(request_id, _source_heads(self._setting), case.num_tokens)

    async def close(self) -> None:
        await self._sessions.close_all("the benchmark is over")
        self._sender.close()

    def tables_of(self, request_id: str) -> Sequence[Sequence[int]]:
        return (self.picker.pages[request_id],)

    def on_source_released(self, request_id: str) -> None:
        return  # the next round takes other pages anyway

    def on_sent(self, request_id: str, stats: SentStats) -> None:
        self._sent[request_id].set_result(stats)

    def on_failed(self, request_id: str, reason: str) -> None:
        self._give_up(f"request {request_id}: {reason}")

    def _crash(self, error: BaseException) -> None:
        self._give_up(repr(error))

    def _give_up(self, reason: str) -> None:
        for sent in self._sent.values():
            if not sent.done():
                sent.set_exception(TransferError(reason))


class DecodeEnd:
    """Decode rank 0; a `transfer.receive.loop.ReceiverOwner`. Arguments as for `PrefillEnd`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, setting: Setting, device: str, lane: str) -> None:
        self._loop = loop
        self._setting = setting
        self._device = device
        self.picker = PagePicker(setting, setting.decode_shard, device, seed=SEED + 1)
        if setting.devices.is_cuda:
            compile_kernels(self.picker, setting, _target_heads(setting))
        self.metrics = StageRecorder(role="decode")
        self._complete: dict[str, asyncio.Future[float]] = {}
        self._transport = open_transport(lane, device)
        self.instance = own_instance(setting, setting.decode_shard, self._transport)
        self._control = SessionControlServer("tcp://127.0.0.1:0", keys=new_key_pair(), max_payload_bytes=MAX_MESSAGE_BYTES)
        # A one-sided probe writes behind the ring.
        probe_bytes = setting.config.transport.probe_bytes if self._transport.has_one_sided else 0
        context = RankContext(
            loop=loop,
            instance=self.instance,
            rank=0,
            device=torch.device(device),
            transport=self._transport,
            metrics=self.metrics,
            on_crash=lambda error: self._give_up(repr(error)),
        )
        self._receiver = ReceiverLoop(
            context=context,
            owner=self,
            pool=self.picker.pool,
            ring_memory=StagingBuffer(
                num_bytes=setting.ring_bytes + probe_bytes, device=device, is_shared=self._transport.has_one_sided
            ),
            control=self._control,
            probe_bytes=probe_bytes,
        )
        self._servicer = TransferControlServicer(
            watermark=self._receiver.ring.watermark(),
            ring_capacity_bytes=setting.ring_bytes,
            on_attach=self._on_attach,
            on_session_lost=self._receiver.close_session,
            heartbeat_s=5.0,  # a busy machine can stop a process for seconds, and no benchmark measures lost peers
        )
        self._receiver.watch_sessions(self._on_session_closed, self._servicer.publish)
        self._probe: asyncio.Task[None] | None = None
        self._session = 0
        self._digest = ""
        self._server: RegistryServer | None = None
        self.plans: dict[Case, ChunkPlan] = {}
        """Of each case's requests; the prefill end says them once it is attached."""

    async def serve(self) -> str:
        """Begin to serve attach and watermarks; the address."""
        self._server = await serve("127.0.0.1", 0, transfer_control=self._servicer)
        return self._server.address

    async def _on_attach(self, request: AttachRequest) -> AttachResponse:
        self._digest = check_compatible(request.prefill, self.instance).digest
        session, answer = self._transport.accept(request.offer, self._receiver.memory)
        self._session = secrets.randbits(62) + 1
        self._receiver.driver.add(session)
        self._receiver.open_session(
            self._session, session, incarnation=request.prefill.incarnation, control_key=request.control_key
        )
        if not self._transport.has_one_sided:
            scratch = self._transport.register(StagingBuffer(num_bytes=request.probe_bytes, device=self._device).tensor)
            plan = ProbePlan.fitting(request.probe_bytes)
            self._probe = self._loop.create_task(serve_probe(self._receiver.driver, session, scratch, plan=plan))
        return AttachResponse(
            session_id=self._session,
            decode=self.instance,
            decode_rank=0,
            answer=answer,
            ring_capacity_bytes=self._setting.ring_bytes,
            control_address=self._control.address,
            control_key=self._control.public_key,
            local_control_address=self._control.local_address,
            heartbeat_s=self._servicer.heartbeat_s,
            protocol_version=PROTOCOL_VERSIONS[-1],
            probe_bytes=request.probe_bytes,
        )

    def expect(self, request_ids: Sequence[str], case: Case) -> None:
        """Reserve pages, and expect the requests."""
        self.picker.pick(request_ids, case.num_tokens)
        setting = self._setting
        for request_id in request_ids:
            self._complete[request_id] = self._loop.create_future()
            self._receiver.expect_request(
                RankRequest(
                    request_id=request_id,
                    layout=setting.layout,
                    plan=self.plans[case],
                    wire_dtype=setting.layout.dtype,
                    num_tokens=case.num_tokens,
                    start_token=0,
                    routes=(SessionRoute(route=setting.route, session=self._session),),
                    digest=self._digest,
                )
            )

    async def wait_complete(self, request_ids: Sequence[str], *, deadline_s: float) -> list[float]:
        """When each request was whole in the pool (monotonic clock)."""
        async with asyncio.timeout(deadline_s):
            complete_s = [await self._complete[request_id] for request_id in request_ids]
        self._complete.clear()
        return complete_s

    def digest(self, request_id: str, case: Case) -> str:
        return self.picker.digest(request_id, _target_heads(self._setting), case.num_tokens)

    @property
    def num_acks(self) -> int:
        return self._servicer.num_acks

    @property
    def ring_peak_bytes(self) -> int:
        return self._receiver.ring_peak_bytes

    async def close(self) -> None:
        self._servicer.close("the benchmark is over")
        if self._server is not None:
            await self._server.close()
        if self._probe is not None:
            self._probe.cancel()
        self._receiver.check_idle()
        self._receiver.close()

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        return (self.picker.pages[request_id],)

    def on_complete(self, request_id: str) -> None:
        self._complete[request_id].set_result(time.monotonic())

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        self._give_up(f"request {request_id}: {reason}")

    def on_drained(self, request_id: str) -> None:
        return  # on_failed has ended the run

    def _on_session_closed(self, session: int, reason: str) -> None:
        self._servicer.close_session(session, reason)
        self._give_up(f"the session was lost: {reason}")

    def _give_up(self, reason: str) -> None:
        for complete in self._complete.values():
            if not complete.done():
                complete.set_exception(TransferError(reason))
