"""The two ends of the pool-to-pool benchmark: everything that a rank of either role has, but for its engine.

Pools hold random bits, page tables name pages in random order, and what arrived is compared by a path of its own: each end reads
its pages with `KVPool.read`, in the order of the tokens, and digests them; gather and scatter have no part in that.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import xxhash

from decode_node.receiver_events import IncomingRequest, IncomingRoute
from decode_node.receiver_loop import ReceiverLoop
from prefill_node.attach import DecodeSessions
from prefill_node.sender_events import OutgoingRequest, OutgoingRoute, SenderSettings, SentStats
from prefill_node.sender_loop import SenderLoop
from transfer.chunk import ChunkPlan, largest_wire_bytes, split_into_chunks
from transfer.config import PrefillNodeConfig
from transfer.control.zmq_channel import ZmqControlServer
from transfer.errors import TransferError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link
from transfer.kernels.digest import DIGEST_XXH3
from transfer.kv_pool import KVPool, as_words
from transfer.layout import DType, KVLayout, Route, Shard, Span, TokenOrder, routes, wire_bytes
from transfer.messages import PROTOCOL_VERSIONS
from transfer.metrics import RankMetrics
from transfer.registry.server import RegistryServer, TransferControlServicer, serve
from transfer.ring import Watermark
from transfer.staging import StagingBuffer
from transfer.transport.base import REGION_ALIGNMENT_BYTES
from transfer.transport.probe import ProbePlan, serve_probe
from transfer.transport.ucx import Lane, UcxTransport

NUM_LAYERS = 32
LAYOUT = KVLayout.uniform(num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=128, dtype=DType.FLOAT16)  # Llama 3 8B: 128 KiB a token
SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both processes have to know. The transfer is that of prefill rank 0 to decode rank 0.

    Args:
        request_bytes: KV of one request on that route, rounded to whole tokens.
        in_flight: Requests at a time.
        prefill_tp, decode_tp: TP degrees; prefill rank 0 must have a route to decode rank 0 only.
        prefill_page_size, decode_page_size: Tokens per page.
        decode_order: How a page of the decode pool lies in memory; that of the prefill pool is NHD.
        chunk_tokens, layers_per_group: See `ChunkPlan`.
        num_slots: Staging slots.
        ring_bytes: Size of the ring.
        lane: Lane of the transport.
    """

    request_bytes: int = 64 << 20
    in_flight: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_page_size: int = 16
    decode_page_size: int = 32
    decode_order: str = "NHD"
    chunk_tokens: int
    layers_per_group: int
    num_slots: int
    ring_bytes: int
    lane: Lane = "auto"

    def __post_init__(self) -> None:
        ranks = [
            route.decode_rank for route in routes(self.layout, self.prefill_shard, self.decode_shard) if not route.prefill_rank
        ]
        if ranks != [0]:
            raise ValueError(
                f"TP {self.prefill_tp} -> {self.decode_tp}: prefill rank 0 writes to decode ranks {ranks}; it must be [0], "
                "so prefill's TP at least decode's and a multiple of it"
            )

    @property
    def layout(self) -> KVLayout:
        return LAYOUT

    @property
    def prefill_shard(self) -> Shard:
        return Shard(tp_size=self.prefill_tp, page_size=self.prefill_page_size)

    @property
    def decode_shard(self) -> Shard:
        return Shard(tp_size=self.decode_tp, page_size=self.decode_page_size, order=TokenOrder(self.decode_order))

    @property
    def route(self) -> Route:
        return _route(self.prefill_shard, self.decode_shard)

    @property
    def plan(self) -> ChunkPlan:
        return ChunkPlan(chunk_tokens=self.chunk_tokens, layers_per_group=self.layers_per_group)

    @property
    def num_tokens(self) -> int:
        return max(1, round(self.request_bytes / _wire_bytes(self.route, 1)))

    @property
    def moved_bytes(self) -> int:
        """Payload of one request."""
        return _wire_bytes(self.route, self.num_tokens)

    @property
    def num_chunks(self) -> int:
        return len(split_into_chunks(self.plan, num_tokens=self.num_tokens, num_layers=NUM_LAYERS))

    def slot_bytes(self) -> int:
        """Room for the largest chunk."""
        most = largest_wire_bytes(self.plan, self.layout, [self.route], self.layout.dtype)
        return -(-most // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


@cache
def _wire_bytes(route: Route, num_tokens: int) -> int:
    tokens, layers = Span(begin=0, end=num_tokens), Span(begin=0, end=NUM_LAYERS)
    return wire_bytes(LAYOUT, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=LAYOUT.dtype)


@cache
def _route(prefill: Shard, decode: Shard) -> Route:
    return next(route for route in routes(LAYOUT, prefill, decode) if not route.prefill_rank)


class PagePicker:
    """A pool, and pages of it in random order for every request of a round."""

    def __init__(self, setting: Setting, shard: Shard, *, seed: int) -> None:
        self._pages_each = -(-setting.num_tokens // shard.page_size)
        num_pages = (setting.in_flight + 1) * self._pages_each
        self.pool = KVPool(layout=setting.layout, shard=shard, num_pages=num_pages)
        self._random = random.Random(seed)
        self.pages: dict[str, list[int]] = {}

    def fill(self, seed: int) -> None:
        """Random bits everywhere."""
        generator = torch.Generator().manual_seed(seed)
        for layer in range(NUM_LAYERS):
            for is_v in (False, True):
                as_words(self.pool.buffer(layer, is_v=is_v)).random_(-(2**15), 2**15, generator=generator)

    def pick(self, request_ids: Sequence[str]) -> None:
        """Forget the last round's pages, and choose others."""
        pages = list(range(self.pool.num_pages[0]))
        self._random.shuffle(pages)
        self.pages = {name: pages[i * self._pages_each : (i + 1) * self._pages_each] for i, name in enumerate(request_ids)}

    def digest(self, request_id: str, heads: Span, num_tokens: int) -> str:
        """Of these heads of all tokens of a request, in their order, in every layer."""
        size = self.pool.page_size
        pages = torch.tensor(self.pages[request_id])
        slots = (pages[:, None] * size + torch.arange(size)).view(-1)[:num_tokens]
        state = xxhash.xxh3_64()
        for layer in range(NUM_LAYERS):
            for part in self.pool.read(layer, slots):
                state.update(as_words(part[:, heads.begin : heads.end].contiguous()).numpy().data)
        return state.hexdigest()


def own_instance(setting: Setting, shard: Shard, transport: UcxTransport) -> Instance:
    return Instance(
        incarnation=secrets.randbits(63) + 1,
        layout=setting.layout,
        shard=shard,
        transport=transport.name,
        digests=(DIGEST_XXH3,),
        protocol_versions=PROTOCOL_VERSIONS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """What the metrics say of a stage up to now."""

    count: float = 0.0
    seconds: float = 0.0


def stage_times(metrics: RankMetrics) -> dict[str, StageTime]:
    """Of every stage of a rank, from the histograms that it exports."""
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in metrics.snapshot({})["families"]["kvferry_stage_seconds"]:
        found.setdefault(labels["stage"], {})[name.rpartition("_")[2]] = value
    return {stage: StageTime(count=parts["count"], seconds=parts["sum"]) for stage, parts in found.items()}


class PrefillEnd:
    """Prefill rank 0; a `prefill_node.sender_loop.SenderOwner`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, setting: Setting) -> None:
        self._loop = loop
        self._setting = setting
        self.picker = PagePicker(setting, setting.prefill_shard, seed=SEED)
        self.picker.fill(SEED)
        self.metrics = RankMetrics(role="prefill", rank=0)
        self._sent: dict[str, asyncio.Future[SentStats]] = {}
        self._transport = UcxTransport(lane=setting.lane)
        self._instance = own_instance(setting, setting.prefill_shard, self._transport)
        self._sender = SenderLoop(
            loop=loop,
            owner=self,
            pool=self.picker.pool,
            transport=self._transport,
            staging=StagingBuffer(num_bytes=setting.num_slots * setting.slot_bytes()),
            settings=SenderSettings(num_slots=setting.num_slots),
            incarnation=self._instance.incarnation,
            metrics=self.metrics,
            on_crash=self._crash,
        )
        self._sessions = DecodeSessions(
            loop=loop,
            sender=self._sender,
            transport=self._transport,
            own=self._instance,
            rank=0,
            plan=setting.plan,
            config=PrefillNodeConfig(model=Path("none")),
            on_lost=lambda join, incarnation, reason: self._give_up(reason),
        )
        self._session = 0

    async def attach(self, decode: Instance, address: str) -> Link:
        (link,) = await self._sessions.open(decode, (address,), join=1)
        _, by_rank = self._sessions.of(decode.incarnation)
        self._session = by_rank[0]
        return link

    async def send(self, request_ids: Sequence[str]) -> tuple[list[float], list[SentStats]]:
        """Send requests whose chunks are all computed; returns when each was started (monotonic clock), and their statistics."""
        self.picker.pick(request_ids)
        setting, started_s = self._setting, []
        for request_id in request_ids:
            self._sent[request_id] = self._loop.create_future()
            started_s.append(time.monotonic())
            self._sender.start_request(
                OutgoingRequest(
                    request_id=request_id,
                    layout=setting.layout,
                    plan=setting.plan,
                    wire_dtype=setting.layout.dtype,
                    num_tokens=setting.num_tokens,
                    start_token=0,
                    routes=(OutgoingRoute(route=setting.route, session=self._session),),
                )
            )
            for chunk in range(setting.num_chunks):
                self._sender.chunk_computed(request_id, chunk, None)
        stats = [await self._sent[request_id] for request_id in request_ids]
        self._sent.clear()
        return started_s, stats

    def digest(self, request_id: str) -> str:
        heads = self._setting.route.heads
        span = Span(begin=heads.source_start, end=heads.source_start + heads.count)
        return self.picker.digest(request_id, span, self._setting.num_tokens)

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

    def on_session_closed(self, session: int, reason: str) -> None:
        self._sessions.on_session_closed(session, reason)

    def _crash(self, error: BaseException) -> None:
        self._give_up(repr(error))

    def _give_up(self, reason: str) -> None:
        for sent in self._sent.values():
            if not sent.done():
                sent.set_exception(TransferError(reason))


class DecodeEnd:
    """Decode rank 0; a `decode_node.receiver_loop.ReceiverOwner`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, setting: Setting) -> None:
        self._loop = loop
        self._setting = setting
        self.picker = PagePicker(setting, setting.decode_shard, seed=SEED + 1)
        self.metrics = RankMetrics(role="decode", rank=0)
        self._complete: dict[str, asyncio.Future[float]] = {}
        self._transport = UcxTransport(lane=setting.lane)
        self.instance = own_instance(setting, setting.decode_shard, self._transport)
        self._control = ZmqControlServer("tcp://127.0.0.1:0")
        self._receiver = ReceiverLoop(
            loop=loop,
            owner=self,
            pool=self.picker.pool,
            transport=self._transport,
            ring_memory=StagingBuffer(num_bytes=setting.ring_bytes),
            control=self._control,
            incarnation=self.instance.incarnation,
            metrics=self.metrics,
            on_crash=lambda error: self._give_up(repr(error)),
        )
        self._servicer = TransferControlServicer(
            watermark=self._receiver.ring.watermark(),
            ring_capacity_bytes=setting.ring_bytes,
            on_attach=self._on_attach,
            on_session_lost=self._receiver.close_session,
        )
        self._probe: asyncio.Task[None] | None = None
        self._session = 0
        self._server: RegistryServer | None = None

    async def serve(self) -> str:
        """Begin to serve attach and watermarks; the address."""
        self._server = await serve("127.0.0.1", 0, transfer_control=self._servicer)
        return self._server.address

    async def _on_attach(self, request: AttachRequest) -> AttachResponse:
        session, answer = self._transport.accept(request.offer, self._receiver.memory)
        self._session = secrets.randbits(62) + 1
        self._receiver.driver.add(session)
        self._receiver.open_session(self._session, session, incarnation=request.prefill.incarnation)
        scratch = self._transport.register(StagingBuffer(num_bytes=request.probe_bytes).tensor)
        plan = ProbePlan.fitting(request.probe_bytes)
        self._probe = self._loop.create_task(serve_probe(self._receiver.driver, session, scratch, plan=plan))
        return AttachResponse(
            session_id=self._session,
            decode=self.instance,
            decode_rank=0,
            answer=answer,
            ring_capacity_bytes=self._setting.ring_bytes,
            control_address=self._control.address,
            heartbeat_s=self._servicer.heartbeat_s,
            protocol_version=PROTOCOL_VERSIONS[-1],
            probe_bytes=request.probe_bytes,
        )

    def expect(self, request_ids: Sequence[str]) -> None:
        """Reserve pages, and expect the requests."""
        self.picker.pick(request_ids)
        setting = self._setting
        for request_id in request_ids:
            self._complete[request_id] = self._loop.create_future()
            self._receiver.expect_request(
                IncomingRequest(
                    request_id=request_id,
                    layout=setting.layout,
                    plan=setting.plan,
                    wire_dtype=setting.layout.dtype,
                    num_tokens=setting.num_tokens,
                    start_token=0,
                    routes=(IncomingRoute(route=setting.route, session=self._session),),
                )
            )

    async def wait_complete(self, request_ids: Sequence[str], *, deadline_s: float) -> list[float]:
        """When each request was whole in the pool (monotonic clock)."""
        async with asyncio.timeout(deadline_s):
            complete_s = [await self._complete[request_id] for request_id in request_ids]
        self._complete.clear()
        return complete_s

    def digest(self, request_id: str) -> str:
        heads = self._setting.route.heads
        span = Span(begin=heads.target_start, end=heads.target_start + heads.count)
        return self.picker.digest(request_id, span, self._setting.num_tokens)

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

    def on_session_closed(self, session: int, reason: str) -> None:
        self._servicer.close_session(session, reason)
        self._give_up(f"the session was lost: {reason}")

    def publish(self, watermark: Watermark) -> None:
        self._servicer.publish(watermark)

    def _give_up(self, reason: str) -> None:
        for complete in self._complete.values():
            if not complete.done():
                complete.set_exception(TransferError(reason))
