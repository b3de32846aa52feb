"""Simulated links of the protocol tests: a control network that misbehaves, and a data plane with both habits of real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.protocol.memory import RingMemory, Tag, require
from transfer.ring import Grant

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
    """A write or a decline on its way."""

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
    is_open_at_sender: bool = True
    is_open_at_receiver: bool = True
    posts: dict[int, Post] = field(default_factory=dict)
    shipments: dict[int, Shipment] = field(default_factory=dict)
    sent_keys: set[int] = field(default_factory=set)
    posted_keys: set[int] = field(default_factory=set)
    last_delivery: dict[str, int] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        return self.is_open_at_sender and self.is_open_at_receiver

    # Data plane

    def write(self, shipment: Shipment) -> None:
        require(shipment.key not in self.sent_keys, f"key {shipment.key} is sent twice on session {self.number}")
        self.sent_keys.add(shipment.key)
        self.shipments[shipment.key] = shipment
        if not self.is_open_at_receiver:
            if shipment.slot is not None and self.world.chance(50):
                self.world.after(20, lambda: self.world.write_failed(self, shipment))
            return  # otherwise nobody notices, until the session is closed
        if self.world.config.is_one_sided:
            if shipment.grant is None:
                del self.shipments[shipment.key]  # there is nobody to tell
            else:
                self._land(shipment, shipment.grant, shipment.num_bytes)
            return
        if shipment.slot is not None and self.world.chance(20):
            self.world.after(5, lambda: self.world.write_finished(self, shipment))  # eager: buffered by the transport
        self._match(shipment.key)

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
        self.world.after(30, lambda: self._landed(shipment, grant, num_bytes))

    def _landed(self, shipment: Shipment, grant: Grant, num_bytes: int) -> None:
        if not self.is_open_at_receiver:
            return
        assert shipment.tag is not None
        # A sender that closed and reuses its slot may spoil what is still being read from it.
        is_broken = not self.is_open_at_sender or self.world.corrupts(shipment.tag)
        self.ring.end_landing(shipment.number, grant, num_bytes, shipment.tag, is_broken=is_broken)
        if self.world.config.is_one_sided:
            self.shipments.pop(shipment.key, None)
            self.world.write_finished(self, shipment)
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
            self.world.after(10, lambda: self.world.write_finished(self, shipment))

    def close_at_receiver(self) -> None:
        """Proof of death: nothing lands any more."""
        self.is_open_at_receiver = False
        for shipment in self.shipments.values():
            if shipment.is_landing:
                self.ring.stop_landing(shipment.number)
        for post in self.posts.values():
            self.ring.settle(post.grant, post.num_bytes)
        self.posts.clear()

    def close_at_sender(self) -> None:
        self.is_open_at_sender = False
        for key in [key for key, shipment in self.shipments.items() if not shipment.is_landing]:
            del self.shipments[key]

    # Control network

    def delivery_times(self, direction: str) -> list[int]:
        """When copies of a message arrive: none, one or two."""
        world, faults = self.world, self.world.faults
        if world.chance(faults.loss):
            return []
        copies = 2 if world.chance(faults.duplicate) else 1
        times = []
        for _ in range(copies):
            delay = world.random.randint(1, 8)
            if faults.reorder and world.chance(20):
                delay = world.random.randint(1, 250)
            at = world.now + delay
            if not faults.reorder:
                at = max(at, self.last_delivery.get(direction, 0))
                self.last_delivery[direction] = at
            times.append(at)
        return times
