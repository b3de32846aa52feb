"""Serves the stream by which a decode leader holds its join: `PrefillControl.Join`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import grpc
import structlog

from transfer.config import MAX_HEARTBEAT_S, MIN_HEARTBEAT_S
from transfer.connector.decode_instances import DecodeInstances, Join
from transfer.connector.side_service import Draining
from transfer.errors import ConfigError, LayoutError, PeerUnreachable, TransferError
from transfer.instance import Instance, check_compatible
from transfer.log_rate_limiter import LogRateLimiter
from transfer.messages import clip_reason
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto, instance_from_proto, instance_to_proto, link_to_proto
from transfer.registry.security import Security
from transfer.registry.status import end_with

MAX_ADDRESS_CHARS = 300  # a DNS name has at most 253

log = structlog.get_logger(__name__)


class JoinService:
    """See the module's docstring.

    Args:
        security: How the decode instance's leader and ranks are going to be spoken to.
        draining: Whether the node takes new work; told to all that have joined.
    """

    def __init__(self, *, security: Security, draining: Draining) -> None:
        self._security = security
        self._draining = draining
        self._refused = LogRateLimiter()

    async def events(
        self,
        request: pb.JoinRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        own: Instance,
        joins: DecodeInstances,
        is_idle: Callable[[Join], bool],
        others_tokens: Callable[[Join], int],
    ) -> AsyncGenerator[pb.JoinEvent, None]:
        """The stream's events, from the join to its end; the caller closes the iterator (`contextlib.aclosing`).

        Args:
            own: The prefill instance.
            joins: Its joins.
            is_idle: Whether nothing of a join is in flight.
            others_tokens: Prompt tokens of the other decode instances that are not sent yet; told with each heartbeat.
        """
        if joins.is_held_otherwise(request.decode.incarnation, request.prefill_address):
            yield pb.JoinEvent(already_joined=pb.AlreadyJoined(incarnation=own.incarnation))
            return
        try:
            join = await self._open(request, own, joins)
        except TransferError as error:
            news = {"address": clip_reason(request.decode_address), "reason": clip_reason(str(error))}
            if self._refused.is_due(tuple(news.values())):
                log.error("join_refused", **news)
            await end_with(context, error)
        log.info(
            "decode_instance_joined",
            address=join.address,
            links=len(join.links),
            chunk_tokens=join.plan.chunk_tokens,
            layers_per_group=join.plan.layers_per_group,
            largest_piece_bytes=largest_piece_bytes(join),
        )
        change: asyncio.Future[Any] | None = None
        try:
            joined = pb.Joined(
                prefill=instance_to_proto(own),
                chunk_plan=chunk_plan_to_proto(join.plan),
                links=[link_to_proto(link) for link in join.links],
            )
            yield pb.JoinEvent(joined=joined)
            knows_undrain = "undrain" in join.instance.capabilities
            told_draining = False
            change = asyncio.ensure_future(self._draining.until(not told_draining))
            while not join.lost.done():
                if self._draining.is_on == told_draining:
                    yield pb.JoinEvent(beat=pb.Beat(others_tokens=others_tokens(join)))
                elif not told_draining:
                    told_draining = True
                    yield pb.JoinEvent(draining=pb.Draining())
                elif knows_undrain:
                    told_draining = False
                    yield pb.JoinEvent(undrained=pb.Undrained())
                elif is_idle(join):
                    joins.leave(join, PeerUnreachable("the node drains no more; join again"))
                    break
                else:
                    yield pb.JoinEvent(beat=pb.Beat(others_tokens=others_tokens(join)))
                if change.done():  # also where it was undone before anybody looked
                    change = asyncio.ensure_future(self._draining.until(not told_draining))
                waiting: set[asyncio.Future[Any]] = {join.lost, change}
                if told_draining and not self._draining.is_on and not knows_undrain:
                    waiting = {join.lost}  # only the time can tell when nothing is in flight
                await asyncio.wait(waiting, timeout=request.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            await end_with(context, join.lost.result())
        finally:
            if change is not None:
                change.cancel()
            # The decode leader went away, or the join was lost: either way its ranks are written to no more.
            joins.leave(join, PeerUnreachable("the decode leader has left"))

    async def _open(self, request: pb.JoinRequest, own: Instance, joins: DecodeInstances) -> Join:
        if not MIN_HEARTBEAT_S <= request.heartbeat_s <= MAX_HEARTBEAT_S:
            raise ConfigError(f"heartbeat_s is {request.heartbeat_s}; it must be in [{MIN_HEARTBEAT_S:g}, {MAX_HEARTBEAT_S:g}]")
        decode = instance_from_proto(request.decode)
        check_compatible(own, decode)
        _check_addresses(request, num_ranks=decode.shard.num_ranks, security=self._security)
        rank_addresses = tuple(request.rank_addresses)
        return await joins.open(decode, request.decode_address, rank_addresses, prefill_address=request.prefill_address)


def peer_status(join: Join) -> pb.PeerStatus:
    """What a node's status says of a join."""
    return pb.PeerStatus(
        address=join.address,
        incarnation=join.incarnation,
        state="joined" if join.is_joined else "joining",
        chunk_plan=chunk_plan_to_proto(join.plan) if join.is_joined else None,
        largest_piece_bytes=largest_piece_bytes(join),
    )


def links_of(joins: Iterable[Join]) -> list[pb.LinkStatus]:
    """Return the links of the joins for a node's status."""
    return [link_to_proto(link, peer_incarnation=join.incarnation) for join in joins for link in join.links]


def show_joins(joins: Iterable[Join], metrics: NodeMetrics) -> dict[str, int]:
    """Set the metrics of the given joins; return their number by state."""
    joined = [join for join in joins if join.is_joined]
    metrics.gauge("largest_piece_bytes").set(max(map(largest_piece_bytes, joined), default=0))
    return {"joined": len(joined)}


def largest_piece_bytes(join: Join) -> int:
    """Most bytes of a chunk that one rank sends to another; 0 until the links have been measured."""
    return 0 if join.cut is None else join.cut.largest_piece_bytes


def _check_addresses(request: pb.JoinRequest, *, num_ranks: int, security: Security) -> None:
    if len(request.rank_addresses) != num_ranks:
        raise LayoutError(f"rank_addresses has {len(request.rank_addresses)} entries for {num_ranks} ranks")
    if len(request.prefill_address) > MAX_ADDRESS_CHARS:
        raise ConfigError(f"prefill_address has {len(request.prefill_address)} characters; it can have {MAX_ADDRESS_CHARS}")
    named = [("decode_address", request.decode_address), *(("rank_addresses", address) for address in request.rank_addresses)]
    for name, address in named:
        if not 1 <= len(address) <= MAX_ADDRESS_CHARS:
            raise ConfigError(f"{name} has {len(address)} characters; it must have 1 to {MAX_ADDRESS_CHARS}")
        if not address.isascii():
            raise ConfigError(f"{name} is {address!a}; it must be ASCII")
        security.check(name, address)
