"""A prefill rank's sessions: attach to every decode rank that it has a route to, probe the links, and notice their ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from transfer.chunk import ChunkPlan
from transfer.control.session_channel import open_session_client
from transfer.control.zmq_authenticator import new_key_pair
from transfer.errors import PeerUnreachable, ResourceExhausted, TransportError
from transfer.instance import AttachRequest, AttachResponse, Instance, Link, check_compatible, conversion_scales
from transfer.layout import DType, KVLayout, Route, routes, wire_dtype
from transfer.messages import MAX_MESSAGE_BYTES
from transfer.piece import SessionRoute, TransferTerms
from transfer.pool.staging import StagingBuffer
from transfer.rank_context import RankContext
from transfer.registry.client import SessionWatch, TransferControlClient
from transfer.registry.heartbeat_timer import HeartbeatTimer
from transfer.registry.options import limit_of_files, most_sessions
from transfer.send.loop import SenderLoop
from transfer.transport.base import Session
from transfer.transport.probe import ProbePlan, host_copy_bytes_per_s, probe_link

ATTACH_TIMEOUT_S = 10.0
COLLECT_S = 0.1  # the tasks of a session that was closed have ended by then

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Open:
    """One open session."""

    client: TransferControlClient
    watch: SessionWatch
    peer: DecodePeer
    decode_rank: int


@dataclass(slots=True, kw_only=True, eq=False)
class DecodePeer:
    """One decode instance, from one attach to its end.

    Args:
        join: Number of the attach.
        scales: Divisors of values before they are narrowed; see `transfer.instance.conversion_scales`.
        routes: Routes from this rank to its ranks; the same objects for all requests.
        sessions: Decode rank -> session.
        direct_ranks: Decode ranks whose rings the gathers store into.
        ring_bytes: Size of the smallest ring of the sessions; 0 without any.
        slot_bytes: Size of a staging slot; 0 if no session's pieces go through one.
    """

    join: int
    instance: Instance
    layout: KVLayout
    wire_dtype: DType
    digest: str
    scales: Mapping[tuple[int, bool], float] | None
    routes: tuple[Route, ...]
    sessions: dict[int, int] = field(default_factory=dict)
    direct_ranks: set[int] = field(default_factory=set)
    ring_bytes: int = 0
    slot_bytes: int = 0

    @property
    def terms(self) -> TransferTerms:
        """Terms of every request to the instance, once all sessions are open."""
        return TransferTerms(
            layout=self.layout,
            wire_dtype=self.wire_dtype,
            routes=tuple(SessionRoute(route=route, session=self.sessions[route.decode_rank]) for route in self.routes),
            digest=self.digest,
            scales=self.scales,
        )


class DecodeSessions:
    """All decode instances that this rank is attached to.

    Args:
        sender: Takes the sessions over.
        plan: The finest way in which requests are divided.
        on_lost: Called with (join, decode incarnation, reason), once, when an open instance loses a session.
    """

    PASSING = (TransportError, ResourceExhausted)
    """Errors of `open()` after which another attempt can succeed."""

    def __init__(
        self,
        *,
        context: RankContext,
        sender: SenderLoop,
        plan: ChunkPlan,
        on_lost: Callable[[int, int, str], None],
    ) -> None:
        self._context = context
        self._sender = sender
        sender.watch_sessions(self._on_session_closed)
        self._transport = context.transport
        self._own = context.instance
        self._plan = plan
        self._on_lost = on_lost
        self._peers: dict[int, DecodePeer] = {}
        self._open: dict[int, _Open] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._timer = HeartbeatTimer(sender.sessions_in_use)
        self._past_acks = 0
        self._keys = new_key_pair()  # keys of this life, for every session
        scratch = StagingBuffer(context.transport_config.probe_bytes, device=context.device, mem_pool=context.mem_pool)
        self._scratch = context.transport.register(scratch.tensor)
        self._probing = asyncio.Lock()  # links are measured one at a time, or each would see the others' traffic

    @property
    def num_acks(self) -> int:
        """Received watermarks, heartbeats included."""
        return self._past_acks + sum(session.watch.num_acks for session in self._open.values())

    def link_uses(self) -> list[dict[str, Any]]:
        """Return the use of each link by this rank: fields of the wire contract's LinkUse."""
        uses: list[dict[str, Any]] = []
        for number, session in self._open.items():
            use = self._context.metrics.link_use(number)
            uses.append(
                {
                    "peer_incarnation": session.peer.instance.incarnation,
                    "decode_rank": session.decode_rank,
                    "written_bytes": use.num_bytes,
                    "busy_s": use.busy_s,
                    "probe_s": use.probe_s,
                }
            )
        return uses

    def of(self, incarnation: int) -> DecodePeer | None:
        """Return the instance of that life; None if it is not attached."""
        return self._peers.get(incarnation)

    async def open(self, instance: Instance, rank_addresses: tuple[str, ...], *, join: int) -> tuple[Link, ...]:
        """Attach to the instance's ranks, all or none. Return the measured links.

        Args:
            join: Number of this attempt, for `on_lost`.

        Raises:
            LayoutError: The two do not fit; the differences are named.
            ResourceExhausted: More sessions would exceed the process's limit of open files.
            TransportError: A rank cannot be reached, its link is slower than the configured minimum, or the instance was closed
                meanwhile.
        """
        agreement = check_compatible(self._own, instance)
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = most_sessions(open_files)
        every = routes(self._own.layout, self._own.shard, instance.shard)
        own_routes = tuple(route for route in every if route.prefill_rank == self._context.rank)
        mine = {route.decode_rank for route in own_routes}
        self.close(instance.incarnation, "attached again")
        if len(self._open) + len(mine) > most:
            raise ResourceExhausted(
                f"prefill rank {self._context.rank} has {len(self._open)} sessions; {len(mine)} more are above its {most}, "
                f"with {limit_of_files(open_files)}"
            )
        peer = self._peers[instance.incarnation] = DecodePeer(
            join=join,
            instance=instance,
            layout=self._own.layout,
            wire_dtype=wire_dtype(self._own.layout, self._own.shard, instance.shard),
            digest=agreement.digest,
            scales=conversion_scales(self._own, instance),
            routes=own_routes,
        )
        try:
            links = [await self._open_session(peer, rank, rank_addresses[rank]) for rank in sorted(mine)]
            for copier in self._sender.copiers:
                await copier.warm_up(
                    own_routes,
                    self._plan,
                    layout=peer.layout,
                    dtype=peer.wire_dtype,
                    scales=peer.scales,
                    direct_ranks=peer.direct_ranks,
                )
        except BaseException as error:
            self._close(peer, f"attach failed: {error}")
            raise
        return tuple(links)

    async def _open_session(self, peer: DecodePeer, decode_rank: int, address: str) -> Link:
        with contextlib.ExitStack() as undo:
            client = TransferControlClient(address, security=self._context.security)
            undo.callback(self._close_client, client)
            answer, session = await self._attach(client, peer.instance)
            undo.callback(session.close)
            self._check_answer(peer, decode_rank, address, answer)
            number = answer.session_id
            name = f"decode rank {decode_rank}"
            control = open_session_client(
                answer.control_address,
                answer.local_control_address,
                session_id=number,
                keys=self._keys,
                server_key=answer.control_key,
                max_payload_bytes=MAX_MESSAGE_BYTES,
            )
            undo.callback(control.close)
            watch = client.watch(
                number,
                ring_capacity_bytes=answer.ring_capacity_bytes,
                heartbeat_s=answer.heartbeat_s,
                on_watermark=partial(self._sender.on_watermark, number),
                on_lost=lambda reason: self._sender.close_session(number, f"{name} is lost: {reason}"),
                timer=self._timer,
            )
            undo.callback(watch.close)
            self._sender.driver.add(session)
            undo.callback(self._sender.driver.remove, session)
            self._open[number] = _Open(client=client, watch=watch, peer=peer, decode_rank=decode_rank)
            undo.callback(self._open.pop, number, None)
            self._sender.open_session(
                number,
                session,
                control,
                name=name,
                incarnation=peer.instance.incarnation,
                ring_capacity_bytes=answer.ring_capacity_bytes,
            )
            undo.pop_all()  # from now on the end of the session closes all its parts
        if "probe_turns" in answer.decode.capabilities:
            await watch.probe_turn()  # before the lock: links to other decode ranks must not wait for one that is busy
        async with self._probing:
            try:
                probe = await probe_link(
                    self._sender.driver,
                    session,
                    self._scratch,
                    # Other writers may use the ring, so a one-sided probe has a place behind it.
                    plan=ProbePlan.fitting(
                        answer.probe_bytes,
                        target_begin=answer.ring_capacity_bytes if session.is_one_sided else 0,
                        has_bursts=session.is_one_sided or "probe_bursts" in answer.decode.capabilities,
                    ),
                )
            except TransportError:
                self._transport.distrust(session)
                raise
            bandwidth = probe.bandwidth_bytes_per_s
            if self._context.device.type == "cpu":
                with ThreadPoolExecutor(1) as thread:  # the loop's own executor would keep its thread in the next role
                    most = await asyncio.get_running_loop().run_in_executor(thread, host_copy_bytes_per_s)
                bandwidth = min(bandwidth, most)
        link = Link(
            prefill_rank=self._context.rank,
            decode_rank=decode_rank,
            lane=probe.lane,
            latency_s=probe.latency_s,
            bandwidth_bytes_per_s=bandwidth,
            obstacle=session.obstacle,
        )
        floor = self._context.transport_config.min_bandwidth_bytes_per_s
        if link.bandwidth_bytes_per_s < floor:
            raise TransportError(
                f"link to decode rank {decode_rank} over {link.lane} makes {link.bandwidth_bytes_per_s:.3g} bytes/s; "
                f"transport.min_bandwidth_bytes_per_s is {floor:.3g}"
            )
        if number not in self._open:
            raise PeerUnreachable(f"decode rank {decode_rank} at {address} was lost while its link was probed")
        peer.sessions[decode_rank] = number
        peer.ring_bytes = min(peer.ring_bytes or answer.ring_capacity_bytes, answer.ring_capacity_bytes)
        if self._sender.is_direct(number):
            peer.direct_ranks.add(decode_rank)
        else:
            peer.slot_bytes = self._sender.slot_bytes
        self._context.metrics.link_measured(number, link, address)
        watch.report_link(link)
        return link

    def _check_answer(self, peer: DecodePeer, decode_rank: int, address: str, answer: AttachResponse) -> None:
        """Check that the asked rank answered: another process can have the address by now."""
        found, wanted = answer.decode.incarnation, peer.instance.incarnation
        if found != wanted:
            raise PeerUnreachable(f"decode instance {found:#018x} answers at {address}, where {wanted:#018x} was to be attached")
        if answer.decode_rank != decode_rank:
            raise PeerUnreachable(
                f"decode rank {answer.decode_rank} answers at {address}, where {decode_rank} was to be attached"
            )
        if answer.session_id in self._open:
            raise PeerUnreachable(f"decode rank {decode_rank} at {address} gave a session's id for the second time")
        if not self._is_open(peer):
            raise PeerUnreachable(f"the decode instance was closed while decode rank {decode_rank} at {address} attached")

    def _close_client(self, client: TransferControlClient) -> None:
        closing = self._context.loop.create_task(_close_and_collect(client))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _attach(self, client: TransferControlClient, decode: Instance) -> tuple[AttachResponse, Session]:
        offer = self._transport.offer_to(decode.transport_names)
        try:
            request = AttachRequest(
                prefill=self._own,
                prefill_rank=self._context.rank,
                offer=offer.blob,
                chunk_plan=self._plan,
                probe_bytes=self._context.transport_config.probe_bytes,
                control_key=self._keys.public,
            )
            answer = await client.attach(request, timeout_s=ATTACH_TIMEOUT_S)
            check_compatible(self._own, answer.decode)
            return answer, offer.complete(answer.answer)
        except BaseException:
            offer.close()
            raise

    def close(self, incarnation: int, reason: str) -> None:
        """End every session with the instance, including those being opened. No-op for an unknown instance."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            self._close(peer, reason)

    def _is_open(self, peer: DecodePeer) -> bool:
        return self._peers.get(peer.instance.incarnation) is peer

    def _close(self, peer: DecodePeer, reason: str) -> None:
        if self._is_open(peer):
            del self._peers[peer.instance.incarnation]
        for number, session in list(self._open.items()):
            if session.peer is peer:
                self._sender.close_session(number, reason)

    def _on_session_closed(self, number: int, reason: str) -> None:
        """End all sessions with an instance after the sender closed one: the instance is of no use without it."""
        session = self._open.pop(number, None)
        if session is None:
            return
        self._past_acks += session.watch.num_acks
        session.watch.close()
        self._close_client(session.client)
        log.info("session_closed", decode_rank=session.decode_rank, reason=reason)
        peer = session.peer
        if self._is_open(peer):
            self._close(peer, reason)
            self._on_lost(peer.join, peer.instance.incarnation, reason)

    async def close_all(self, reason: str) -> None:
        """End everything and wait for the end."""
        for incarnation in list(self._peers):
            self.close(incarnation, reason)
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=2.0)


async def _close_and_collect(client: TransferControlClient) -> None:
    """Close the client and its connection now.

    After a call was interrupted, gRPC's objects reference each other and the connection until a garbage collection. An idle rank
    may need none for hours. The collection takes a millisecond or two, because objects from before the rank was ready are frozen
    (`node_runtime.process_setup`).
    """
    await client.close()
    await asyncio.sleep(COLLECT_S)
    gc.collect()
