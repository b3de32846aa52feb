"""A decode rank's side of its writers: the ring they write into, and their sessions from attach to end.

The counterpart of `transfer.send.attach`. The owner decides which requests arrive, and in which pages.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch

from transfer.chunk import largest_wire_bytes
from transfer.config import ServerConfig
from transfer.control.session_channel import SessionControlServer
from transfer.control.zmq_authenticator import new_key_pair
from transfer.errors import ChunkTooLarge, ResourceExhausted, TransferError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link, check_compatible, conversion_scales
from transfer.layout import DType, Route, routes, wire_dtype
from transfer.log_rate_limiter import LogRateLimiter
from transfer.messages import MAX_MESSAGE_BYTES, clip_reason
from transfer.out_of_memory import allocating
from transfer.piece import SessionRoute, TransferTerms
from transfer.pool.kv_pool import KVPool
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.receive.loop import HostArrivals, ReceiverLoop, ReceiverOwner
from transfer.refusals import log_refusal
from transfer.registry.guard import Refusal
from transfer.registry.options import MAX_SESSIONS
from transfer.registry.server import RegistryServer, TransferControlServicer, host_port, serve
from transfer.transport.base import LocalMemory, Session, Transport
from transfer.transport.probe import ProbePlan, serve_probe

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMemory:
    """Memory that a rank allocates for its writers.

    Args:
        ring: The ring's bytes, and `tail_bytes` more behind them.
        tail_bytes: Where one-sided probes write; 0 without one-sided sessions.
        scratch: Where two-sided probes write; None without two-sided sessions.
    """

    ring: StagingBuffer
    tail_bytes: int
    scratch: StagingBuffer | None

    @classmethod
    def take(
        cls,
        transport: Transport,
        *,
        ring_bytes: int,
        probe_bytes: int,
        device: torch.device | str,
        advice: str,
        mem_pool: torch.cuda.MemPool | None = None,
    ) -> RingMemory:
        """Allocate `ring_bytes` of ring on the pool's device, and `probe_bytes` for the probes of each kind of session.

        `mem_pool` is a pool of the caller to allocate from, see `StagingBuffer`.

        Raises:
            OutOfMemory: The device has too little free memory. The message names the needed and the free memory, and `advice`.
        """
        tail_bytes = probe_bytes if transport.has_one_sided else 0
        with allocating("allocating the ring", device=device, advice=advice, num_bytes=ring_bytes + probe_bytes):
            allocate = partial(StagingBuffer, device=device, mem_pool=mem_pool)
            return cls(
                ring=allocate(ring_bytes + tail_bytes, is_shared=transport.has_one_sided),
                tail_bytes=tail_bytes,
                scratch=allocate(probe_bytes) if transport.has_two_sided else None,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """A rank's open receiving end, for `PrefillSessions`.

    Args:
        loop: Runs the receiver.
        control: Its channel of control messages.
        scratch: Where two-sided probes write; None without two-sided sessions.
    """

    loop: ReceiverLoop
    control: SessionControlServer
    scratch: LocalMemory | None


def open_receiving(
    *,
    context: RankContext,
    owner: ReceiverOwner,
    pool: KVPool,
    memory: RingMemory,
    server: ServerConfig,
    host_arrivals: HostArrivals | None = None,
) -> Receiving:
    """Open the control channel and the receiver of a rank. `server` names the addresses; for the others see `ReceiverLoop`."""
    scratch = None if memory.scratch is None else context.transport.register(memory.scratch.tensor)
    control = SessionControlServer(
        f"tcp://{host_port(server.host, 0)}",
        keys=new_key_pair(),  # keys of this life
        advertise_host=server.advertised_host,
        max_payload_bytes=MAX_MESSAGE_BYTES,
    )
    receiver = ReceiverLoop(
        context=context,
        owner=owner,
        pool=pool,
        ring_memory=memory.ring,
        control=control,
        probe_bytes=memory.tail_bytes,
        host_arrivals=host_arrivals,
    )
    return Receiving(loop=receiver, control=control, scratch=scratch)


@dataclass(slots=True, kw_only=True)
class Writer:
    """An attached prefill rank."""

    instance: Instance
    rank: int
    routes: tuple[Route, ...]  # routes from all ranks of its instance to this rank
    lane: str
    obstacle: str
    digest: str  # algorithm of payload digests
    scales: Mapping[tuple[int, bool], float] | None
    serve_probe: Callable[[], Coroutine[Any, Any, None]] | None = None  # two-sided: this end's half, which has not begun
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattached:
    """Why no request of a prefill instance can be received here."""

    reason: str


class PrefillSessions:
    """The sessions of all prefill ranks that are attached to this rank.

    Args:
        receiving: Takes the sessions over. The owner closes it after these.
        server: Addresses of the rank.
        heartbeat_s: Seconds between heartbeats, in both directions.
        on_writer_lost: Called with (prefill incarnation, prefill rank, reason) when the last session with a prefill rank is
            closed.
        on_link_probed: Called with the link that a writer has measured.
    """

    def __init__(
        self,
        *,
        context: RankContext,
        receiving: Receiving,
        server: ServerConfig,
        heartbeat_s: float,
        on_writer_lost: Callable[[int, int, str], None],
        on_link_probed: Callable[[Link], None],
    ) -> None:
        self._context = context
        self._receiver = receiving.loop
        self._control = receiving.control
        self._scratch = receiving.scratch
        self._transport = context.transport
        self._own = context.instance
        self._address = server
        self._heartbeat_s = heartbeat_s
        self._metrics = context.metrics
        self._on_writer_lost = on_writer_lost
        self._on_link_probed = on_link_probed
        self._writers: dict[int, Writer] = {}  # by session
        self._of_instance: dict[int, dict[int, Writer]] = {}  # the same by incarnation and session; no instance has none
        self._refused = LogRateLimiter()  # calls that the caller's certificate does not allow
        self._attaching: set[asyncio.Task[None]] = set()  # probes, and kernels being compiled
        ring = self._receiver.ring
        self._servicer = TransferControlServicer(
            watermark=ring.watermark(),
            ring_capacity_bytes=ring.capacity_bytes,
            heartbeat_s=heartbeat_s,
            on_attach=self.on_attach,
            on_session_lost=self._receiver.close_session,
            on_link=self.on_link,
            on_probe_turn=self._on_probe_turn,
            sessions_in_use=self._receiver.sessions_in_use,
        )
        self._receiver.watch_sessions(self._on_session_closed, self._servicer.publish)
        self._server: RegistryServer | None = None

    async def start(self) -> str:
        """Serve attach and watermarks. Return the address for prefill ranks."""
        self._server = await serve(
            self._address.host, 0, transfer_control=self._servicer, security=self._context.security, on_refused=self._on_refused
        )
        await self._server.set_serving(True)
        return host_port(self._address.advertised_host, self._server.port)

    async def close(self, reason: str) -> None:
        """End every session and refuse new ones."""
        self._servicer.close(reason)
        if self._server is not None:
            await self._server.close()
        for task in list(self._attaching):
            task.cancel()

    def _on_refused(self, refusal: Refusal) -> None:
        self._metrics.counter("rank_refused_calls", method=refusal.method).inc()
        log_refusal(refusal, self._refused)

    # Called by the owner

    def writers_of(self, prefill_incarnation: int) -> TransferTerms | Unattached:
        """Return the terms of all requests of that prefill instance, or why none can arrive whole."""
        writers = {writer.rank: (number, writer) for number, writer in self._of_instance.get(prefill_incarnation, {}).items()}
        if not writers:
            return Unattached(reason="no rank of the prefill instance is attached")
        _, some = next(iter(writers.values()))
        absent = sorted({route.prefill_rank for route in some.routes} - writers.keys())
        if absent:
            return Unattached(reason=f"prefill rank {absent[0]} is not attached")
        return TransferTerms(
            layout=self._own.layout,
            wire_dtype=self._wire(some.instance),
            routes=tuple(SessionRoute(route=route, session=writers[route.prefill_rank][0]) for route in some.routes),
            digest=some.digest,
            scales=some.scales,
        )

    def forget_prefill(self, incarnation: int, reason: str) -> None:
        """End the sessions of a prefill instance that is gone."""
        for number in tuple(self._of_instance.get(incarnation, ())):
            self._receiver.close_session(number, reason)

    def _on_session_closed(self, session: int, reason: str) -> None:
        writer = self._writers.pop(session, None)
        self._metrics.link_closed(session)
        self._servicer.close_session(session, reason)
        if writer is not None:
            log.info("session_closed", prefill_rank=writer.rank, reason=reason)
            incarnation = writer.instance.incarnation
            others = self._of_instance[incarnation]
            del others[session]
            if not others:
                del self._of_instance[incarnation]
            if all(other.rank != writer.rank for other in others.values()):
                self._on_writer_lost(incarnation, writer.rank, clip_reason(reason))

    @property
    def num_strangers(self) -> int:
        """Number of messages that the control channel itself dropped."""
        return self._control.num_dropped

    def status(self) -> dict[str, Any]:
        """Return fields of the wire contract's RankStatus about ring and sessions."""
        ring = self._receiver.ring
        return {
            "ring_capacity": ring.capacity_bytes,
            "ring_live_bytes": ring.live_bytes,
            "ring_peak_bytes": self._receiver.ring_peak_bytes,
            "ring_quarantined_bytes": ring.quarantined_bytes,
            "ring_live_grants": ring.num_live_grants,
            "watermark_position": ring.position,
            "ring_oldest_open": ring.oldest_open,
            "sessions": self._receiver.num_sessions,
            "ending_sessions": self._receiver.num_ending,
            "pending_transfers": self._receiver.driver.num_watches,
            "watermark_acks": self._servicer.num_acks,
            "dropped_messages": self._receiver.num_dropped + self.num_strangers,
            "refused_connections": self._control.num_refused,
        }

    # Attach

    async def on_attach(self, request: AttachRequest) -> AttachResponse:
        """Open a session with a prefill rank; see `TransferControlServicer`."""
        agreement = check_compatible(request.prefill, self._own)
        mine = self._routes_from(request.prefill)
        ring = self._receiver.ring
        most = largest_wire_bytes(
            request.chunk_plan,
            self._own.layout,
            [route for route in mine if route.prefill_rank == request.prefill_rank],
            self._wire(request.prefill),
        )
        if most > ring.capacity_bytes:
            raise ChunkTooLarge(
                f"ring.capacity_bytes is {ring.capacity_bytes} on decode rank {self._context.rank}; a chunk of "
                f"{request.chunk_plan} has {most} bytes: raise it, or lower chunk.chunk_tokens or "
                "chunk.layers_per_group of the prefill node"
            )
        if self._receiver.num_ending >= MAX_SESSIONS:
            # The limit of open sessions does not stop a writer that opens and closes sessions and keeps its access.
            raise ResourceExhausted(
                f"{self._receiver.num_ending} sessions of decode rank {self._context.rank} are closed, and their writers may "
                f"still write; there can be {MAX_SESSIONS}: end the processes of those prefill ranks"
            )
        session, answer = self._transport.accept(request.offer, self._receiver.memory)
        number = secrets.randbits(62) + 1
        writer = self._writers[number] = Writer(
            instance=request.prefill,
            rank=request.prefill_rank,
            routes=mine,
            lane=session.lane,
            obstacle=session.obstacle,
            digest=agreement.digest,
            scales=conversion_scales(self._own, request.prefill),
        )
        self._of_instance.setdefault(request.prefill.incarnation, {})[number] = writer
        self._receiver.driver.add(session)
        self._receiver.open_session(number, session, incarnation=request.prefill.incarnation, control_key=request.control_key)
        probe_bytes = min(request.probe_bytes, self._context.transport_config.probe_bytes)
        if self._scratch is not None and not session.is_one_sided:
            probe_bytes = min(probe_bytes, ring.capacity_bytes)  # a write's target must lie in the offered memory
            plan = ProbePlan.fitting(probe_bytes, has_bursts="probe_bursts" in request.prefill.capabilities)
            writer.serve_probe = partial(self._serve_probe, number, session, self._scratch, plan)
            if "probe_turns" not in request.prefill.capabilities:
                self._on_probe_turn(number)
        self._keep(self._warm_up(writer, request))
        log.info("session_opened", prefill_rank=request.prefill_rank, lane=session.lane)
        if session.obstacle:
            self._metrics.link_fell_back(number)
            log.warning("transport_fell_back", prefill_rank=request.prefill_rank, lane=session.lane, obstacle=session.obstacle)
        return AttachResponse(
            session_id=number,
            decode=self._own,
            decode_rank=self._context.rank,
            answer=answer,
            ring_capacity_bytes=ring.capacity_bytes,
            control_address=self._control.address,
            control_key=self._control.public_key,
            local_control_address=self._control.local_address,
            heartbeat_s=self._heartbeat_s,
            protocol_version=agreement.protocol_version,
            probe_bytes=probe_bytes,
        )

    def _routes_from(self, prefill: Instance) -> tuple[Route, ...]:
        """Return the routes from all ranks of the instance to this one. Computed once for each attach."""
        every = routes(self._own.layout, prefill.shard, self._own.shard)
        return tuple(route for route in every if route.decode_rank == self._context.rank)

    def _wire(self, prefill: Instance) -> DType:
        return wire_dtype(self._own.layout, prefill.shard, self._own.shard)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._context.loop.create_task(work)
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _warm_up(self, writer: Writer, request: AttachRequest) -> None:
        try:
            await self._receiver.copier.warm_up(
                [route for route in writer.routes if route.prefill_rank == writer.rank],
                request.chunk_plan,
                layout=self._own.layout,
                dtype=self._wire(request.prefill),
                scales=writer.scales,
            )
        except Exception as error:  # any error of a compiler; requests that need the kernels would fail again
            self._context.on_crash(error)

    def _on_probe_turn(self, number: int) -> None:
        writer = self._writers.get(number)
        if writer is not None and writer.serve_probe is not None:
            self._keep(writer.serve_probe())
            writer.serve_probe = None

    async def _serve_probe(self, number: int, session: Session, scratch: LocalMemory, plan: ProbePlan) -> None:
        try:
            await serve_probe(self._receiver.driver, session, scratch, plan=plan)
        except TransferError as error:
            self._servicer.close_session(number, f"the link's probe failed: {error}")

    def on_link(self, number: int, reported: Link) -> None:
        """Take in the link that a writer has measured; see `TransferControlServicer`."""
        writer = self._writers.get(number)
        if writer is None or writer.is_measured:
            return  # the session was closed, or its link is known: a link is measured once, at attach
        writer.is_measured = True
        # Only the numbers are the writer's. Its rank and its lane are known here.
        link = Link(
            prefill_rank=writer.rank,
            decode_rank=self._context.rank,
            lane=writer.lane,
            latency_s=reported.latency_s,
            bandwidth_bytes_per_s=reported.bandwidth_bytes_per_s,
            obstacle=writer.obstacle,
        )
        floor = self._context.transport_config.min_bandwidth_bytes_per_s
        if link.bandwidth_bytes_per_s < floor:
            reason = (
                f"link from prefill rank {link.prefill_rank} over {link.lane} makes {link.bandwidth_bytes_per_s:.3g} bytes/s; "
                f"transport.min_bandwidth_bytes_per_s of the decode node is {floor:.3g}"
            )
            log.warning("link_refused", reason=reason)
            self._receiver.close_session(number, reason)
            return
        self._metrics.link_measured(number, link)
        self._on_link_probed(link)
