"""Simulated links of the protocol tests: a control network that misbehaves, and a data plane with the habits of real ones.

A data plane is two-sided or one-sided; a one-sided one may be *unrevocable*: the receiver's close stops nothing, only the
writer's does, and the receiver hears of it later. A *direct* link is unrevocable, and gathers are its writes: the writer's close
begins none any more, and those under way land until they end, or their process does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.protocol.memory import RingMemory, Tag, require
from transfer.ring import Grant, grant_key

if TYPE_CHECKING:
    from tests.protocol.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong while the world is not healed; rates in percent of the chances."""

    loss: int = 0
    duplicate: int = 0
    reorder: bool = False
    corrupt: int = 0
    cancel: int = 0  # of requests, by the decode side
    abort: int = 0  # of requests, by the prefill side
    link_deaths: int = 0  # number
    sender_restarts: int = 0
    receiver_restarts: int = 0


@dataclass(slots=True, kw_only=True)
class Post:
    grant: Grant
    num_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Shipment:
    """A write, a gather into the peer's ring, or a decline on its way."""

    number: int
    key: int
    grant: Grant | None  # None: a decline
    num_bytes: int = 0
    tag: Tag | None = None
    slot: int | None = None
    is_landing: bool = False
    is_over: bool = False  # the sender was told, or will never be


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """One session between a prefill and a decode rank, seen from above; each end opens and closes by itself."""

    world: World
    number: int
    prefill_rank: int
    decode_rank: int
    sender_incarnation: int
    receiver_incarnation: int
    ring: RingMemory
    is_direct: bool
    is_revocable: bool
    is_open_at_sender: bool = True
    is_open_at_receiver: bool = True
    can_land: bool = True  # the writer's access has not ended; of a link that is not revocable
    num_late: int = 0  # landings that ended after the receiver's close
    posts: dict[int, Post] = field(default_factory=dict)
    shipments: dict[int, Shipment] = field(default_factory=dict)
    sent_keys: set[int] = field(default_factory=set)
    posted_keys: set[int] = field(default_factory=set)
    last_delivery: dict[str, int] = field(default_factory=dict)
    ended_stores: set[int] = field(default_factory=set)  # where the grants of ended gathers begin

    @property
    def is_live(self) -> bool:
        return self.is_open_at_sender and self.is_open_at_receiver

    # Data plane

    def write(self, shipment: Shipment) -> None:
        self._send(shipment)
        if not self.is_open_at_receiver and (self.is_revocable or shipment.grant is None):
            if shipment.slot is not None and self.world.chance(50):
                self.world.after(20, lambda: self.world.write_ended(self, shipment, "peer reset"))
            return  # otherwise nobody notices, until the session is closed
        if self.world.config.is_one_sided:
            if shipment.grant is None:
                del self.shipments[shipment.key]  # there is nobody to tell
            else:
                self._land(shipment, shipment.grant, shipment.num_bytes)
            return
        if shipment.slot is not None and self.world.chance(20):
            self.world.after(5, lambda: self.world.write_ended(self, shipment))  # eager: buffered by the transport
        self._match(shipment.key)

    def _send(self, shipment: Shipment) -> None:
        require(shipment.key not in self.sent_keys, f"key {shipment.key} is sent twice on session {self.number}")
        self.sent_keys.add(shipment.key)
        self.shipments[shipment.key] = shipment

    def begin_store(self, number: int, grant: Grant, num_bytes: int, tag: Tag) -> Shipment:
        """A gather begins to store into the grant."""
        attempt = int(grant_key(grant.begin, 0) in self.sent_keys)
        key = grant_key(grant.begin, attempt)
        shipment = Shipment(number=number, key=key, grant=grant, num_bytes=num_bytes, tag=tag, is_landing=True)
        self._send(shipment)
        self.ring.begin_landing(number, grant, num_bytes, self.world.dead_at(self))
        return shipment

    def end_store(self, shipment: Shipment) -> None:
        """The gather is done, if its process did not end first."""
        if self.shipments.pop(shipment.key, None) is None:
            return
        assert shipment.grant is not None and shipment.tag is not None
        self.num_late += not self.is_open_at_receiver
        is_broken = self.world.corrupts(shipment.tag)
        self.ring.end_landing(shipment.number, shipment.grant, shipment.num_bytes, shipment.tag, is_broken=is_broken)
        self.ended_stores.add(shipment.grant.begin)
        self._end_access()

    def expect(self, key: int, post: Post) -> None:
        require(not self.world.config.is_one_sided, "a receive is posted on a one-sided transport")
        require(key not in self.posted_keys, f"key {key} is expected twice on session {self.number}")
        self.posted_keys.add(key)
        self.ring.post(post.grant, post.num_bytes, self.world.dead_at(self))
        self.posts[key] = post
        self._match(key)

    def _match(self, key: int) -> None:
        post, shipment = self.posts.get(key), self.shipments.get(key)
        if post is None or shipment is None or shipment.is_landing:
            return
        if shipment.grant is None:
            shipment.is_landing = True
            self.world.after(10, lambda: self._settle(shipment, post, 0))
            return
        require(shipment.grant == post.grant, f"key {key} names {shipment.grant} here and {post.grant} there")
        require(shipment.num_bytes == post.num_bytes, f"key {key}: {shipment.num_bytes} bytes for {post.num_bytes}")
        self._land(shipment, post.grant, post.num_bytes)

    def _land(self, shipment: Shipment, grant: Grant, num_bytes: int) -> None:
        shipment.is_landing = True
        self.ring.begin_landing(shipment.number, grant, num_bytes, self.world.dead_at(self))
        longest = 30 if self.is_revocable else 150  # where it matters that a write outlives a close
        self.world.after(longest, lambda: self._landed(shipment, grant, num_bytes))

    def _landed(self, shipment: Shipment, grant: Grant, num_bytes: int) -> None:
        if self.shipments.get(shipment.key) is not shipment or (self.is_revocable and not self.is_open_at_receiver):
            return  # stopped by a close
        self.num_late += not self.is_open_at_receiver
        assert shipment.tag is not None
        # A sender that closed and reuses its slot may spoil what is still being read from it.
        is_broken = not self.is_open_at_sender or self.world.corrupts(shipment.tag)
        self.ring.end_landing(shipment.number, grant, num_bytes, shipment.tag, is_broken=is_broken)
        if self.world.config.is_one_sided:
            self.shipments.pop(shipment.key, None)
            self.world.write_ended(self, shipment)
        else:
            post = self.posts[shipment.key]
            self.world.after(10, lambda: self._settle(shipment, post, num_bytes))

    def _settle(self, shipment: Shipment, post: Post, num_bytes: int) -> None:
        if not self.is_open_at_receiver:
            return
        del self.posts[shipment.key]
        self.shipments.pop(shipment.key, None)
        self.ring.settle(post.grant, post.num_bytes)
        self.world.receive_settled(self, post.grant, num_bytes)
        if shipment.slot is not None:
            self.world.after(10, lambda: self.world.write_ended(self, shipment))

    def close_at_receiver(self) -> None:
        """Proof of death, where the link is revocable: nothing lands any more."""
        self.is_open_at_receiver = False
        for shipment in self.shipments.values():
            if shipment.is_landing and self.is_revocable:
                self.ring.stop_landing(shipment.number)
        for post in self.posts.values():
            self.ring.settle(post.grant, post.num_bytes)
        self.posts.clear()

    def close_at_sender(self, *, is_dead: bool) -> None:
        """The writer closes, or its process is gone."""
        self.is_open_at_sender = False
        for key, shipment in list(self.shipments.items()):
            if not shipment.is_landing:
                del self.shipments[key]
            elif not self.is_revocable and (is_dead or not self.is_direct):
                self.ring.stop_landing(shipment.number)
                del self.shipments[key]
        self._end_access()

    def _end_access(self) -> None:
        """A writer that has closed gives up its access with the last gather that was under way."""
        if not self.is_revocable and not self.is_open_at_sender and not self.shipments and self.can_land:
            self.can_land = False
            self.world.access_ended(self)

    # Control network

    def delivery_times(self, direction: str) -> list[int]:
        """When copies of a message arrive: none, one or two."""
        world, faults = self.world, self.world.faults
        if world.chance(faults.loss):
            world.happened["loss"] += 1
            return []
        copies = 2 if world.chance(faults.duplicate) else 1
        world.happened["duplicate"] += copies - 1
        times = []
        for _ in range(copies):
            delay = world.random.randint(1, 8)
            if faults.reorder and world.chance(20):
                world.happened["reorder"] += 1
                delay = world.random.randint(1, 250)
            at = world.now + delay
            if not faults.reorder:
                at = max(at, self.last_delivery.get(direction, 0))
                self.last_delivery[direction] = at
            times.append(at)
        return times
