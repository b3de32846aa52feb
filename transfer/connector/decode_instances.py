"""The decode instances that have joined a prefill node, as its leader sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transfer.chunk import ChunkPlan
from transfer.connector.messages import AttachDecode, DecodeAttached, DecodeLost, DetachDecode
from transfer.errors import LayoutError, PeerUnreachable, ResourceExhausted, TransferError
from transfer.instance import Instance, Link
from transfer.messages import clip_reason
from transfer.sizes import Cut

ATTACH_ALL_TIMEOUT_S = 30.0
MAX_JOINS = 256  # a session costs each rank some 14 descriptors and a gRPC channel; clusters have tens of decode nodes


@dataclass(slots=True, kw_only=True, eq=False)
class Join:
    """One decode instance, from the moment it introduced itself until it is lost.

    `number` tells it from other joins of the same instance; `lost` is done with the reason once it can be sent nothing any more.
    `cut` says how its requests are cut, `ring_bytes` how large its smallest ring is; both are known once all ranks are attached.
    """

    number: int
    instance: Instance
    address: str
    links: list[Link] = field(default_factory=list)
    attached: asyncio.Future[None]
    lost: asyncio.Future[TransferError]
    waiting_for: set[int]
    ring_bytes: int = 0
    cut: Cut | None = None
    prefill_address: str = ""  # by which it has reached this node; empty: not said

    @property
    def incarnation(self) -> int:
        return self.instance.incarnation

    @property
    def plan(self) -> ChunkPlan:
        """How its requests are cut; only what has joined is sent requests."""
        assert self.cut is not None
        return self.cut.plan

    @property
    def is_joined(self) -> bool:
        return self.attached.done() and not self.lost.done()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a decode leader says when it is asked for room for a request.

    Args:
        is_reserved: There is room; otherwise "not yet".
        start_token: First token whose KV it needs, where that is no longer what the request said; as told, and not checked.
    """

    is_reserved: bool
    start_token: int | None = None


class DecodeInstances:
    """Keeps the joins, and has the ranks attach and detach.

    Args:
        num_ranks: Ranks of this instance; a decode instance has joined when all of them are attached.
        broadcast: Sends a message to every rank.
        on_lost: Called with a join that was lost and why; its requests cannot go on.
        choose_cut: How the requests of a join are cut, whose links have been measured.
    """

    def __init__(
        self,
        num_ranks: int,
        broadcast: Callable[[object], None],
        on_lost: Callable[[Join, TransferError], None],
        choose_cut: Callable[[Join], Cut],
    ) -> None:
        self._num_ranks = num_ranks
        self._broadcast = broadcast
        self._on_lost = on_lost
        self._choose_cut = choose_cut
        self._joins: dict[int, Join] = {}
        self._num_opened = 0

    def __iter__(self) -> Iterator[Join]:
        return iter(list(self._joins.values()))

    def find(self, incarnation: int) -> Join | None:
        """The join of that life, if it can be sent requests."""
        join = self._joins.get(incarnation)
        return join if join is not None and join.is_joined else None

    def is_held_otherwise(self, incarnation: int, prefill_address: str) -> bool:
        """Whether that life has joined, or is about to, by another address of this node."""
        join = self._joins.get(incarnation)
        return join is not None and bool(join.prefill_address and prefill_address) and join.prefill_address != prefill_address

    async def open(self, instance: Instance, address: str, rank_addresses: tuple[str, ...], *, prefill_address: str = "") -> Join:
        """Have every rank attach; returns when all have.

        Args:
            prefill_address: By which the decode instance has reached this node.

        Raises:
            LayoutError: A rank found that the two do not fit.
            PeerUnreachable: A rank could not attach.
            ResourceExhausted: There are too many of them.
        """
        if instance.incarnation in self._joins:
            # The same life joins again: its old stream died on the way, and so have its sessions.
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
        self._joins[instance.incarnation] = join  # not before: one that the ranks were never told of would stay for ever
        outcomes: list[asyncio.Future[Any]] = [join.attached, join.lost]
        try:
            await asyncio.wait(outcomes, timeout=ATTACH_ALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.leave(join, PeerUnreachable("the decode leader has left"))
            raise
        if join.lost.done():
            raise join.lost.result()
        if not join.attached.done():
            error = PeerUnreachable(f"prefill ranks {sorted(join.waiting_for)} did not attach within {ATTACH_ALL_TIMEOUT_S:g} s")
            self.leave(join, error)
            raise error
        return join

    def on_attached(self, rank: int, message: DecodeAttached) -> None:
        join = self._joins.get(message.incarnation)
        if join is None or join.number != message.join or rank not in join.waiting_for:
            return
        join.waiting_for.discard(rank)
        join.links.extend(message.links)
        if message.ring_bytes:
            join.ring_bytes = min(join.ring_bytes or message.ring_bytes, message.ring_bytes)
        if not join.waiting_for and not join.attached.done():
            join.cut = self._choose_cut(join)
            join.attached.set_result(None)

    def on_rank_lost(self, rank: int, message: DecodeLost) -> None:
        kind = LayoutError if message.is_refused else PeerUnreachable
        join = self._joins.get(message.incarnation)
        if join is not None and join.number == message.join:
            self.leave(join, kind(f"prefill rank {rank}: {message.reason}"))

    def leave(self, join: Join, error: TransferError) -> None:
        """End this join, and not one that the same life has opened since."""
        if self._joins.get(join.incarnation) is join:
            self.close(join.incarnation, error)

    def close(self, incarnation: int, error: TransferError) -> None:
        """The instance is of no more use; the ranks detach from it. Unknown ones are over already."""
        join = self._joins.pop(incarnation, None)
        if join is None:
            return
        join.lost.set_result(error)
        self._broadcast(DetachDecode(incarnation=incarnation, reason=clip_reason(str(error))))
        self._on_lost(join, error)

    def forget_all(self, error: TransferError) -> None:
        """The rank group is gone, and every session with it."""
        for join in list(self._joins.values()):
            del self._joins[join.incarnation]
            join.lost.set_result(error)
            self._on_lost(join, error)
