"""The decode instances that have joined a prefill side: their records, and the streams by which they hold their joins.

A decode leader calls `PrefillControl.Join`. Every rank of this side attaches to the ranks of the instance and measures the links.
Then the instance has joined: it gets heartbeats, and may send prompts. The end of the stream or of one session ends the join.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc
import structlog

from transfer.chunk import ChunkPlan
from transfer.config import MAX_HEARTBEAT_S, MIN_HEARTBEAT_S
from transfer.connector.messages import AttachDecode, DecodeAttached, DecodeLost, DetachDecode
from transfer.connector.side_service import Draining
from transfer.errors import ConfigError, LayoutError, PeerUnreachable, ResourceExhausted, TransferError
from transfer.instance import Instance, Link, check_compatible
from transfer.log_rate_limiter import LogRateLimiter
from transfer.messages import clip_reason
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto, instance_from_proto, instance_to_proto, link_to_proto
from transfer.registry.options import MAX_PEERS
from transfer.registry.security import Security
from transfer.registry.status import end_with
from transfer.sizes import Cut

ATTACH_ALL_TIMEOUT_S = 30.0
MAX_JOINS = MAX_PEERS  # each costs every rank a session or more
MAX_ADDRESS_CHARS: Final = 300  # a DNS name has at most 253

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Join:
    """One decode instance, from its call until it is lost.

    Args:
        number: Distinguishes joins of the same instance.
        address: host:port of the decode leader.
        attached: Done when all ranks are attached.
        lost: Done, with the reason, when nothing can be sent to the instance any more.
        waiting_for: Ranks that are not attached.
        ring_bytes: Size of its smallest ring, known once all ranks are attached.
        slot_bytes: Size of the smallest staging slot for its pieces, known likewise; 0 if none goes through staging memory.
        cut: How its prompts are divided, known once all ranks are attached.
        prefill_address: Address by which it reached this side; empty means unknown.
        num_streams: Its open calls of `StreamPrompts`.
    """

    number: int
    instance: Instance
    address: str
    links: list[Link] = field(default_factory=list)
    attached: asyncio.Future[None]
    lost: asyncio.Future[TransferError]
    waiting_for: set[int]
    ring_bytes: int = 0
    slot_bytes: int = 0
    cut: Cut | None = None
    prefill_address: str = ""
    num_streams: int = 0

    @property
    def incarnation(self) -> int:
        return self.instance.incarnation

    @property
    def plan(self) -> ChunkPlan:
        """Plan for its long prompts, see `plan_of`; only for an instance that has joined."""
        assert self.cut is not None
        return self.cut.plan

    @property
    def short_plans(self) -> tuple[ChunkPlan, ...]:
        """See `Cut`; only for an instance that has joined."""
        assert self.cut is not None
        return self.cut.short_plans

    def plan_of(self, num_tokens: int, start_token: int) -> ChunkPlan:
        """Return the plan for tokens [start_token, num_tokens) of a prompt; only for an instance that has joined."""
        assert self.cut is not None
        return self.cut.plan_of(num_tokens, start_token)

    @property
    def is_joined(self) -> bool:
        return self.attached.done() and not self.lost.done()

    @property
    def largest_piece_bytes(self) -> int:
        """Maximum bytes of a chunk that one rank sends to another; 0 until the links are measured."""
        return 0 if self.cut is None else self.cut.largest_piece_bytes

    def status(self) -> pb.PeerStatus:
        """Return the status for operators."""
        return pb.PeerStatus(
            address=self.address,
            incarnation=self.incarnation,
            state="joined" if self.is_joined else "joining",
            chunk_plan=chunk_plan_to_proto(self.plan) if self.is_joined else None,
            largest_piece_bytes=self.largest_piece_bytes,
        )

    def link_statuses(self) -> list[pb.LinkStatus]:
        return [link_to_proto(link, peer_incarnation=self.incarnation) for link in self.links]


def show_joins(joins: Iterable[Join], metrics: NodeMetrics) -> dict[str, int]:
    """Set the metrics of the given joins; return their number by state."""
    joined = [join for join in joins if join.is_joined]
    metrics.gauge("largest_piece_bytes").set(max((join.largest_piece_bytes for join in joined), default=0))
    return {"joined": len(joined)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Answer of a decode leader to a request for room.

    Args:
        is_reserved: There is room; False means "not yet".
        start_token: First token whose KV it needs, as received and not checked. None means that of the request.
    """

    is_reserved: bool
    start_token: int | None = None


class JoinTraffic(Protocol):
    """The transfers to the joined instances."""

    def is_idle(self, join: Join) -> bool:
        """Return whether nothing of a join is in flight."""
        ...

    def others_tokens(self, join: Join) -> int:
        """Return the prompt tokens of the other instances that are not sent yet."""
        ...


class DecodeInstances:
    """Keep the joins of one life of a prefill side's ranks, and serve their streams. Owned by the leader's loop.

    Args:
        num_ranks: Ranks of this instance. A decode instance has joined when all of them are attached.
        security: TLS or plain text of calls to the decode side.
        draining: Whether this side takes new work; every joined instance is notified.
        traffic: The transfers to the instances.
        on_lost: Called with a join that was lost, and the reason. Its transfers cannot continue.
        choose_cut: Decides how prompts of a join are divided, once its links are measured.
    """

    def __init__(
        self,
        *,
        own: Instance,
        num_ranks: int,
        security: Security,
        draining: Draining,
        traffic: JoinTraffic,
        broadcast: Callable[[object], None],
        on_lost: Callable[[Join, TransferError], None],
        choose_cut: Callable[[Join], Cut],
    ) -> None:
        self._own = own
        self._num_ranks = num_ranks
        self._security = security
        self._draining = draining
        self._traffic = traffic
        self._broadcast = broadcast
        self._on_lost = on_lost
        self._choose_cut = choose_cut
        self._joins: dict[int, Join] = {}
        self._num_opened = 0
        self._refused = LogRateLimiter()

    def __iter__(self) -> Iterator[Join]:
        return iter(list(self._joins.values()))

    def find(self, incarnation: int) -> Join | None:
        """Return the join of that life, if prompts can be sent to it."""
        join = self._joins.get(incarnation)
        return join if join is not None and join.is_joined else None

    # The stream of a join

    async def serve(
        self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.JoinEvent, None]:
        """Yield the events of a `PrefillControl.Join` call. The caller must close the iterator (`contextlib.aclosing`)."""
        if self._is_joined_by_another_address(request):
            yield pb.JoinEvent(already_joined=pb.AlreadyJoined(incarnation=self._own.incarnation))
            return
        try:
            decode = instance_from_proto(request.decode)
            self._check(request, decode)
            join = await self.open(
                decode, request.decode_address, tuple(request.rank_addresses), prefill_address=request.prefill_address
            )
        except TransferError as error:
            fields = {"address": clip_reason(request.decode_address), "reason": clip_reason(str(error))}
            if self._refused.is_due(tuple(fields.values())):
                log.error("join_refused", **fields)
            await end_with(context, error)
        log.info(
            "decode_instance_joined",
            address=join.address,
            links=len(join.links),
            chunk_tokens=join.plan.chunk_tokens,
            layers_per_group=join.plan.layers_per_group,
            token_layers=join.plan.token_layers,
            largest_piece_bytes=join.largest_piece_bytes,
        )
        change: asyncio.Future[Any] | None = None
        try:
            joined = pb.Joined(
                prefill=instance_to_proto(self._own),
                chunk_plan=chunk_plan_to_proto(join.plan),
                links=[link_to_proto(link) for link in join.links],
                short_chunk_plans=[chunk_plan_to_proto(plan) for plan in join.short_plans],
            )
            yield pb.JoinEvent(joined=joined)
            knows_undrain = "undrain" in join.instance.capabilities
            told_draining = False
            change = asyncio.ensure_future(self._draining.until(not told_draining))
            while not join.lost.done():
                if not told_draining and self._draining.is_on:
                    told_draining = True
                    yield pb.JoinEvent(draining=pb.Draining())
                elif told_draining and not self._draining.is_on and knows_undrain:
                    told_draining = False
                    yield pb.JoinEvent(undrained=pb.Undrained())
                elif told_draining and not self._draining.is_on and self._traffic.is_idle(join):
                    self.leave(join, PeerUnreachable("the node drains no more; join again"))
                    break
                else:
                    yield pb.JoinEvent(beat=pb.Beat(others_tokens=self._traffic.others_tokens(join)))
                if change.done():  # even if the change was undone before this look
                    change = asyncio.ensure_future(self._draining.until(not told_draining))
                waiting: set[asyncio.Future[Any]] = {join.lost, change}
                if told_draining and not self._draining.is_on and not knows_undrain:
                    waiting = {join.lost}  # no event reports that nothing is in flight any more; look at each heartbeat
                await asyncio.wait(waiting, timeout=request.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            await end_with(context, join.lost.result())
        finally:
            if change is not None:
                change.cancel()
            # The decode leader is gone, or the join was lost. In both cases, nothing is written to its ranks any more.
            self.leave(join, PeerUnreachable("the decode leader has left"))

    def _is_joined_by_another_address(self, request: pb.JoinRequest) -> bool:
        """Return whether that life has joined, or is about to, by another address of this node."""
        join = self._joins.get(request.decode.incarnation)
        if join is None or not join.prefill_address or not request.prefill_address:
            return False
        return join.prefill_address != request.prefill_address

    def _check(self, request: pb.JoinRequest, decode: Instance) -> None:
        """Raise TransferError if the instance does not fit, or the call has a field that is out of range."""
        if not MIN_HEARTBEAT_S <= request.heartbeat_s <= MAX_HEARTBEAT_S:
            raise ConfigError(f"heartbeat_s is {request.heartbeat_s}; it must be in [{MIN_HEARTBEAT_S:g}, {MAX_HEARTBEAT_S:g}]")
        check_compatible(self._own, decode)
        if len(request.rank_addresses) != decode.shard.num_ranks:
            raise LayoutError(f"rank_addresses has {len(request.rank_addresses)} entries for {decode.shard.num_ranks} ranks")
        if len(request.prefill_address) > MAX_ADDRESS_CHARS:
            raise ConfigError(f"prefill_address has {len(request.prefill_address)} characters; it can have {MAX_ADDRESS_CHARS}")
        for name, address in [
            ("decode_address", request.decode_address),
            *(("rank_addresses", address) for address in request.rank_addresses),
        ]:
            if not 1 <= len(address) <= MAX_ADDRESS_CHARS:
                raise ConfigError(f"{name} has {len(address)} characters; it must have 1 to {MAX_ADDRESS_CHARS}")
            if not address.isascii():
                raise ConfigError(f"{name} is {address!a}; it must be ASCII")
            self._security.check(name, address)

    # Joins and ranks

    async def open(self, instance: Instance, address: str, rank_addresses: tuple[str, ...], *, prefill_address: str = "") -> Join:
        """Have every rank attach, and return the join when all have.

        Raises:
            LayoutError: A rank found that the two do not fit.
            PeerUnreachable: A rank could not attach.
            ResourceExhausted: There are too many joins.
        """
        if instance.incarnation in self._joins:
            # The same life joins again, because its old stream was lost. Its sessions were lost, too.
            self.close(instance.incarnation, PeerUnreachable("the decode instance has joined again"))
        if len(self._joins) >= MAX_JOINS:
            raise ResourceExhausted(f"{len(self._joins)} decode instances have joined this prefill node, as many as it takes")
        loop = asyncio.get_running_loop()
        self._num_opened += 1
        join = Join(
            number=self._num_opened,
            instance=instance,
            address=address,
            attached=loop.create_future(),
            lost=loop.create_future(),
            waiting_for=set(range(self._num_ranks)),
            prefill_address=prefill_address,
        )
        self._broadcast(AttachDecode(join=join.number, instance=instance, rank_addresses=rank_addresses))
        self._joins[instance.incarnation] = join  # only now, because a join that the ranks do not know would never end
        outcomes: list[asyncio.Future[Any]] = [join.attached, join.lost]
        try:
            await asyncio.wait(outcomes, timeout=ATTACH_ALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.leave(join, PeerUnreachable("the decode leader has left"))
            raise
        if not join.attached.done() and not join.lost.done():
            reason = f"prefill ranks {sorted(join.waiting_for)} did not attach within {ATTACH_ALL_TIMEOUT_S:g} s"
            self.leave(join, PeerUnreachable(reason))
        if join.lost.done():
            raise join.lost.result()
        return join

    def on_attached(self, rank: int, message: DecodeAttached) -> None:
        join = self._joins.get(message.incarnation)
        if join is None or join.number != message.join or rank not in join.waiting_for:
            return
        join.waiting_for.discard(rank)
        join.links.extend(message.links)
        if message.ring_bytes:
            join.ring_bytes = min(join.ring_bytes or message.ring_bytes, message.ring_bytes)
        if message.slot_bytes:
            join.slot_bytes = min(join.slot_bytes or message.slot_bytes, message.slot_bytes)
        if not join.waiting_for and not join.attached.done():
            join.cut = self._choose_cut(join)
            join.attached.set_result(None)

    def on_rank_lost(self, rank: int, message: DecodeLost) -> None:
        kind = LayoutError if message.is_refused else PeerUnreachable
        join = self._joins.get(message.incarnation)
        if join is not None and join.number == message.join:
            self.leave(join, kind(f"prefill rank {rank}: {message.reason}"))

    def leave(self, join: Join, error: TransferError) -> None:
        """End this join, but not a later join of the same life."""
        if self._joins.get(join.incarnation) is join:
            self.close(join.incarnation, error)

    def close(self, incarnation: int, error: TransferError) -> None:
        """End the join of that life, if there is one; the ranks detach from it."""
        join = self._joins.pop(incarnation, None)
        if join is not None:
            join.lost.set_result(error)
            self._broadcast(DetachDecode(incarnation=incarnation, reason=clip_reason(str(error))))
            self._on_lost(join, error)

    def forget_all(self, error: TransferError) -> None:
        """End every join without the ranks, which have ended or are about to end."""
        for join in list(self._joins.values()):
            del self._joins[join.incarnation]
            join.lost.set_result(error)
            self._on_lost(join, error)
