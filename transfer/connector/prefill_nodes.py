"""The prefill nodes that a decode node uses: joins each, keeps the join alive, and picks one for a request.

Each has a circuit breaker (`transfer.breaker`), which has requests go elsewhere for a while when the node was lost or failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

import grpc
import structlog

from transfer.breaker import Breaker, BreakerSettings, BreakerState, Permit, Verdict
from transfer.chunk import ChunkPlan
from transfer.config import BreakerConfig, HeartbeatConfig, TransportConfig
from transfer.connector.messages import ForgetPrefill
from transfer.connector.prefill_peer import ANY_TOKEN, PrefillPeer, first_event, next_event
from transfer.connector.prefill_routing import Candidate, PrefixMemory, block_hashes, place, told_tokens
from transfer.connector.rank_report import RankReady
from transfer.errors import (
    ChunkTooLarge,
    ConfigError,
    EngineError,
    LayoutError,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    TransferError,
    TransportError,
    TransportTimeout,
)
from transfer.instance import Instance, Link, check_compatible
from transfer.metrics import NodeMetrics
from transfer.pb import kvferry_pb2 as pb
from transfer.piece_size import largest_piece_bytes
from transfer.registry.convert import (
    chunk_plan_from_proto,
    instance_from_proto,
    instance_to_proto,
    link_from_proto,
)
from transfer.registry.discovery import DiscoveryView
from transfer.registry.discovery.entries import MAX_FOUND
from transfer.registry.heartbeats import HeartbeatWatch
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import PlainText, Security
from transfer.registry.status import error_of

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 2.0
REASON_GRACE_S = 0.2
"""How long the prefill node's own reason for a loss is waited for before a decode rank's is taken, which only sees a link end."""

MAX_ADDED = 256
"""Prefill nodes that requests have named. Each is one more join that is kept up, or tried again for ever."""

MAX_KNOWN = 2 * MAX_FOUND
"""Prefill nodes that discovery names or has named; above it, those that it no longer names go at once unless they are joined."""

SWEEP_S = 0.5
"""Between looks at peers that are named no longer."""

ALIAS_LOOK_S = 30.0
"""After which another address of a joined node is asked again whose it is."""

MAX_LINKS = 1 << 14  # of two instances of 128 ranks each

log = structlog.get_logger(__name__)


class _AlreadyJoined(Exception):
    """The node of an address is joined already, or is about to be, by another one."""

    def __init__(self, incarnation: int) -> None:
        super().__init__(f"{incarnation:#018x}")
        self.incarnation = incarnation


class JoinSettings(Protocol):
    """The settings of an instance that its joins depend on."""

    @property
    def heartbeat(self) -> HeartbeatConfig: ...

    @property
    def transport(self) -> TransportConfig: ...

    @property
    def breaker(self) -> BreakerConfig: ...


class PrefillNodes:
    """Joins all prefill nodes that there are for one life of the decode ranks, and joins again whenever one was lost.

    A node is known by its incarnation: by whatever addresses it can be reached, it is joined once.

    Args:
        addresses: host:port of each that is named at the beginning; `use()` says it again.
        own: This decode instance.
        security: How they are spoken to; None: in plain text on loopback addresses.
        decode_address: Where prefill leaders ask for reservations.
        rank_addresses: The decode ranks' TransferControl, in rank order.
        heartbeat_s: Seconds between heartbeats of a join.
        ring_capacity_bytes: Size of the smallest ring of the decode ranks.
        min_bandwidth_bytes_per_s: A node with a slower link to any rank is not joined.
        vocab_size: Tokens that the model has; a node's first token must be one of them.
        breaker: When a node is left out while there are others, and for how long.
        on_lost: (peer, incarnation, reason) when a joined peer is lost.
        on_breaker_opened: A breaker has opened, or begun its pause anew.
        on_fault: A join has ended in an error that nobody expected; it was logged, and the node will be joined again.
        on_change: What `pick` or `can_wait_for_node` say may have changed.
        grace_s: See `discovery.grace_s`.
        view: What discovery has found; None where the settings name the nodes.
        prefix_tokens: See `placement.prefix_tokens`.
        clock: Seconds of breakers and grace.
    """

    def __init__(
        self,
        addresses: list[str],
        *,
        own: Instance,
        security: Security | None = None,
        decode_address: str,
        rank_addresses: tuple[str, ...],
        heartbeat_s: float,
        ring_capacity_bytes: int,
        min_bandwidth_bytes_per_s: float = 0.0,
        vocab_size: int = ANY_TOKEN,
        breaker: BreakerSettings,
        on_lost: Callable[[PrefillPeer, int, str], None],
        on_breaker_opened: Callable[[], None],
        on_fault: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        grace_s: float = 30.0,
        view: Callable[[], DiscoveryView] | None = None,
        prefix_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._question = pb.JoinRequest(
            decode=instance_to_proto(own),
            decode_address=decode_address,
            rank_addresses=rank_addresses,
            heartbeat_s=heartbeat_s,
        )
        self._heartbeat_s = heartbeat_s
        self._ring_capacity_bytes = ring_capacity_bytes
        self._min_bandwidth_bytes_per_s = min_bandwidth_bytes_per_s
        self._on_lost = on_lost
        self._on_breaker_opened = on_breaker_opened
        self._on_fault = on_fault
        self._on_change = on_change
        self._security = PlainText() if security is None else security
        self._breaker = breaker
        self._clock = clock
        self._vocab_size = vocab_size
        self._grace_s = grace_s
        self._view = view
        self._prefix_tokens = prefix_tokens
        self._prefixes = PrefixMemory() if prefix_tokens else None
        self._hashed: tuple[tuple[int, ...], str, tuple[bytes, ...]] = ((), "", ())  # the prompt that was hashed last
        self.peers = [self._peer_at(address) for address in addresses]
        self._is_started = False
        self._sweeping: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # channels of peers that are not used any more

    @classmethod
    def of(
        cls,
        config: JoinSettings,
        hellos: tuple[RankReady, ...],
        addresses: list[str],
        *,
        security: Security,
        decode_address: str,
        metrics: NodeMetrics,
        broadcast: Callable[[object], None],
        on_lost: Callable[[PrefillPeer, str], None],
        on_change: Callable[[], None] = lambda: None,
        grace_s: float = 30.0,
        view: Callable[[], DiscoveryView] | None = None,
        prefix_tokens: int = 0,
    ) -> PrefillNodes:
        """Return the prefill nodes of an instance whose ranks are ready.

        Args:
            config: Settings of the instance.
            hellos: Ready reports of its ranks.
            broadcast: Sends a message to every rank, so that the ranks forget a lost instance.
            on_lost: Called with (peer, reason) after a joined peer is lost and the ranks were notified.

        The other arguments are those of the constructor.
        """

        def on_instance_lost(peer: PrefillPeer, incarnation: int, reason: str) -> None:
            broadcast(ForgetPrefill(incarnation=incarnation, reason=reason))
            on_lost(peer, reason)

        return cls(
            addresses,
            own=hellos[0].instance,
            security=security,
            decode_address=decode_address,
            rank_addresses=tuple(hello.address for hello in hellos),
            heartbeat_s=config.heartbeat.interval_s,
            ring_capacity_bytes=min(hello.ring_bytes for hello in hellos),
            min_bandwidth_bytes_per_s=config.transport.min_bandwidth_bytes_per_s,
            vocab_size=hellos[0].vocab_size,
            breaker=config.breaker.settings(),
            on_lost=on_instance_lost,
            on_breaker_opened=metrics.counter("breaker_openings").inc,
            on_fault=metrics.counter("join_faults").inc,
            on_change=on_change,
            grace_s=grace_s,
            view=view,
            prefix_tokens=prefix_tokens,
        )

    def _peer_at(self, address: str) -> PrefillPeer:
        return PrefillPeer(
            address=address,
            channel=PeerChannel(address, self._security),
            breaker=Breaker(self._breaker, self._clock),
            vocab_size=self._vocab_size,
        )

    def start(self) -> None:
        self._is_started = True
        for peer in self.peers:
            self._begin(peer)

    def use(self, addresses: Collection[str]) -> None:
        """These are the addresses that there are now, besides those that requests have named.

        New ones are joined. One that is missing is left later, for what is in flight there goes on, and its node may be well: it
        gets requests only where no other one can take them (`pick`), and goes when `_may_go` says so, or there are too many.
        """
        known = {peer.address: peer for peer in self.peers}
        if addresses and not any(peer.unnamed_s is None and not peer.is_added for peer in self.peers):
            for peer in self.peers:  # whoever named them was away; the first that comes back must not cost the others their joins
                peer.unnamed_s = None
        for address in addresses:
            if address not in known:
                self.peers.append(self._peer_at(address))
                if self._is_started:
                    self._begin(self.peers[-1])
            else:
                known[address].unnamed_s, known[address].is_added = None, False
        for peer in self.peers:
            if peer.address not in addresses and not peer.is_added and peer.unnamed_s is None:
                peer.unnamed_s = self._clock()
        self._let_go_of_too_many()
        self._sweep()

    def _let_go_of_too_many(self) -> None:
        """Answers that change and change must not have ever more addresses tried: each is a channel and a task."""
        num_over = sum(not peer.is_added for peer in self.peers) - MAX_KNOWN
        if num_over <= 0:
            return
        idle = [
            (peer.unnamed_s, peer)
            for peer in self.peers
            if peer.unnamed_s is not None and peer.instance is None and not peer.outstanding_tokens and not peer.num_users
        ]
        for _, peer in sorted(idle, key=lambda one: one[0])[:num_over]:
            self._let_go(peer, "it is named no longer, and its place is needed")

    def _sweep(self) -> None:
        """Leave those that may go, and look again soon where there are others left."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for peer in [peer for peer in self.peers if self._may_go(peer)]:
            self._let_go(peer, "it is named no longer")
        if any(peer.unnamed_s is not None for peer in self.peers):
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _may_go(self, peer: PrefillPeer) -> bool:
        """Whether nobody names or needs a peer any more; the last ones that are joined stay until one that is named is."""
        if peer.unnamed_s is None or self._clock() - peer.unnamed_s < self._grace_s:
            return False
        if peer.outstanding_tokens or peer.num_users or (peer.state == "joined" and self._is_named(peer)):
            return False
        return peer.state != "joined" or any(self._is_named(other) and other.state == "joined" for other in self.peers)

    def _is_named(self, peer: PrefillPeer) -> bool:
        """Whether discovery, the settings or a request name the peer's node, by this or another of its addresses."""
        return peer.unnamed_s is None or any(one.other is peer and one.unnamed_s is None for one in self.peers)

    def _begin(self, peer: PrefillPeer) -> None:
        peer.joining = asyncio.get_running_loop().create_task(self._keep_joined(peer))

    def find(self, address: str) -> PrefillPeer | None:
        """The prefill node of that host:port, joined or not."""
        return next((peer.other or peer for peer in self.peers if peer.address == address), None)

    def add(self, address: str) -> PrefillPeer:
        """Use one more prefill node, until its place is needed for another one and nobody would miss it.

        Raises:
            ConfigError: It may not be spoken to in plain text.
            ResourceExhausted: There are too many.
        """
        added = [peer for peer in self.peers if peer.is_added]
        if len(added) >= MAX_ADDED:
            idle = next((peer for peer in added if peer.instance is None and not peer.num_users), None)
            if idle is None:
                raise ResourceExhausted(
                    f"requests have named {len(added)} prefill nodes that are in use; there can be {MAX_ADDED}"
                )
            self._let_go(idle, "its place is needed")
        peer = self._peer_at(address)
        peer.is_added = True
        self.peers.append(peer)
        self._begin(peer)
        return peer

    @contextmanager
    def used(self, peer: PrefillPeer) -> Iterator[None]:
        """Somebody waits for it meanwhile."""
        peer.num_users += 1
        try:
            yield
        finally:
            peer.num_users -= 1

    def _let_go(self, peer: PrefillPeer, reason: str) -> None:
        """Use a peer no more. Nothing is in flight there."""
        self.peers.remove(peer)
        log.info("prefill_node_left", address=peer.address, state=peer.state, reason=reason)
        instance = self._unjoin(peer, reason)
        if instance is not None:
            self._on_lost(peer, instance.incarnation, reason)
        leaving = asyncio.get_running_loop().create_task(self._leave(peer))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        self._on_change()

    async def _leave(self, peer: PrefillPeer) -> None:
        if peer.joining is not None:
            peer.joining.cancel()
            await asyncio.gather(peer.joining, return_exceptions=True)
        await peer.channel.close()

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*self._leaving, *map(self._leave, self.peers), return_exceptions=True)

    def pick(
        self, *, tried: frozenset[int] = frozenset(), token_ids: tuple[int, ...] = (), cache_salt: str = ""
    ) -> PrefillPeer | None:
        """The joined peer to send a request to; None when there is none.

        One that has to be tried gets the next new request; what was cut off once is no stake, and is only sent there where no
        healthy one is left. Else `transfer.connector.prefill_routing` decides: of those whose breakers are closed, or of all
        where none is. Those that are named come before those that no longer are.

        Args:
            tried: Incarnations that are left out, because the request was there before.
            token_ids, cache_salt: Of its prompt.
        """
        joined = [
            peer
            for peer in self.peers
            if peer.state == "joined" and peer.instance is not None and peer.instance.incarnation not in tried
        ]
        named: list[PrefillPeer] = []
        unnamed: list[PrefillPeer] = []
        for peer in joined:
            (named if self._is_named(peer) else unnamed).append(peer)
        choices = _usable(named, is_retry=bool(tried)) or _usable(unnamed, is_retry=bool(tried)) or named or unnamed
        if len(choices) < 2:
            return choices[0] if choices else None
        held = {} if self._prefixes is None else self._prefixes.held(self._blocks(token_ids, cache_salt))
        candidates = [_candidate(peer) for peer in choices]
        chooser = self._own.incarnation
        return choices[place(candidates, chooser=chooser, held_tokens=held, prefix_tokens=self._prefix_tokens)]

    def can_wait_for_node(self, *, tried: Collection[PrefillPeer] = ()) -> bool:
        """Whether one that takes no requests now may soon: it is being joined, drains, or is tried again after a pause.

        Not one that does not fit, before somebody has deployed something.

        Args:
            tried: Those are left out, because they were lost with the request.
        """
        if self._view is not None and self._view().waiting:
            return True  # named, and asked whether it serves: soon one of these
        return any(peer.state not in ("joined", "alias") and not peer.unfit.is_set() and peer not in tried for peer in self.peers)

    def sent(self, peer: PrefillPeer, token_ids: tuple[int, ...], cache_salt: str) -> None:
        """A prompt is sent there."""
        if self._prefixes is not None and peer.instance is not None:
            self._prefixes.sent(self._blocks(token_ids, cache_salt), peer.instance.incarnation)

    def _blocks(self, token_ids: tuple[int, ...], cache_salt: str) -> tuple[bytes, ...]:
        """Of a prompt; it is picked for, and then sent."""
        if self._hashed[0] is not token_ids or self._hashed[1] != cache_salt:
            self._hashed = token_ids, cache_salt, block_hashes(token_ids, cache_salt)
        return self._hashed[2]

    def begin(self, peer: PrefillPeer) -> Permit:
        """A request is sent there; `end` must follow."""
        permit = peer.breaker.begin()
        if permit.is_trial:
            log.info("breaker_half_open", address=peer.address)
        return permit

    def end(self, peer: PrefillPeer, permit: Permit, verdict: Verdict, reason: str) -> None:
        """That is what came of it; `reason`: of a failure."""
        with self._watching(peer, reason):
            peer.breaker.end(permit, verdict)

    @contextmanager
    def _watching(self, peer: PrefillPeer, reason: str) -> Iterator[None]:
        """Tell of what happens to the peer's breaker meanwhile."""
        breaker = peer.breaker
        num_openings, was_closed = breaker.num_openings, breaker.state is BreakerState.CLOSED
        yield
        if breaker.num_openings > num_openings:
            peer.breaker_reason = reason
            log.warning("breaker_opened", address=peer.address, pause_s=round(breaker.pause_left_s, 3), reason=reason)
            self._on_breaker_opened()
        elif not was_closed and breaker.state is BreakerState.CLOSED:
            peer.breaker_reason = ""
            log.info("breaker_closed", address=peer.address)

    def unavailable_reason(self) -> str:
        """One line on why `pick()` finds nothing."""
        view = None if self._view is None else self._view()
        if not self.peers:
            unset = "no prefill node is configured (peers.prefill_nodes)"
            return unset if view is None else f"no prefill node is known: {view}"
        states = [f"{peer.address} is {peer.state}: {peer.reason}" for peer in self.peers]
        if view is not None and (view.problem or view.waiting):
            states.append(str(view))
        return "no prefill node is joined: " + "; ".join(states)

    def plan_of(self, question: pb.ReserveRequest | pb.PrefillRoomWanted, incarnation: int) -> ChunkPlan:
        """Return the chunk plan in a question for room, and record it as the current plan of the prefill instance that asks.

        Args:
            incarnation: Life of the prefill instance.

        Raises:
            ConfigError: The plan is missing.
            ChunkTooLarge: A piece of it can be larger than the ring.
        """
        if not question.HasField("chunk_plan"):
            raise ConfigError("chunk_plan is missing; the prefill side decides how a request is cut")
        plan = chunk_plan_from_proto(question.chunk_plan)
        for peer in self.peers:
            if peer.instance is not None and peer.instance.incarnation == incarnation and peer.plan != plan:
                self._set_plan(peer, peer.instance, plan)
        return plan

    def _set_plan(self, peer: PrefillPeer, prefill: Instance, plan: ChunkPlan) -> None:
        largest = largest_piece_bytes(prefill, self._own, plan)
        if largest > self._ring_capacity_bytes:
            raise ChunkTooLarge(
                f"ring.capacity_bytes is {self._ring_capacity_bytes}; with chunks of {plan.chunk_tokens} tokens and "
                f"{plan.layers_per_group or 'all'} layers one rank of prefill node {peer.address} sends up to {largest} bytes at "
                "once: raise it, or lower chunk.piece_bytes or chunk.chunk_tokens of the prefill node"
            )
        peer.plan, peer.largest_piece_bytes = plan, largest

    def break_join(self, incarnation: int, *, prefill_rank: int, decode_rank: int, reason: str) -> None:
        """A decode rank has lost its link with that prefill rank: leave the instance, and join again.

        Only a link that the join has counts: anybody can attach in the name of a rank that does not exist, and go silent. Where
        the join ends by itself within `REASON_GRACE_S`, its own reason is the better one.
        """
        for peer in self.peers:
            if peer.instance is None or peer.instance.incarnation != incarnation or peer.broken is None:
                continue
            if any((link.prefill_rank, link.decode_rank) == (prefill_rank, decode_rank) for link in peer.links):
                lost = f"decode rank {decode_rank} has lost prefill rank {prefill_rank}: {reason}"
                asyncio.get_running_loop().call_later(REASON_GRACE_S, _break, peer.broken, lost)

    async def _keep_joined(self, peer: PrefillPeer) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            other = self._joined_as(peer.last_incarnation)
            if other is not None:
                await self._be_alias(peer, other)
            peer.state = "joining"
            peer.hurry.clear()
            try:
                await self._join_once_or_say_why(peer)
            except _AlreadyJoined as already:
                backoff_s = FIRST_BACKOFF_S
                peer.last_incarnation = already.incarnation
                peer.other = self._joined_as(already.incarnation)
            except TransferError as error:
                peer.other = None
                was_joined = peer.instance is not None
                self._lose(peer, error)
                # A peer that does not fit will not fit in a moment either; somebody has to deploy something.
                if isinstance(error, LayoutError):
                    peer.unfit.set()
                    backoff_s = MAX_BACKOFF_S
                else:
                    backoff_s = FIRST_BACKOFF_S if was_joined else min(2 * backoff_s, MAX_BACKOFF_S)
                self._on_change()
            if await self._is_cut_short(peer, backoff_s):
                backoff_s = FIRST_BACKOFF_S

    async def _is_cut_short(self, peer: PrefillPeer, pause_s: float) -> bool:
        """The pause before the next join, which `_hurry` cuts short."""
        try:
            async with asyncio.timeout(pause_s):
                await peer.hurry.wait()
        except TimeoutError:
            return False
        peer.channel.connect_anew()
        return True

    def _hurry(self, gone: PrefillPeer) -> None:
        """That node takes requests no longer. Where it was the last one, all that may take its place are joined at once, and so
        once for each that goes. It is joined again itself after the first, short pause."""
        if not any(peer.state == "joined" for peer in self.peers):
            for peer in self.peers:
                if peer.instance is None and peer is not gone:
                    peer.hurry.set()

    async def _join_once_or_say_why(self, peer: PrefillPeer) -> NoReturn:
        """As `_join_once`. A bug, perhaps in reading what one node says, must not keep that node from ever being joined again."""
        try:
            await self._join_once(peer)
        except (TransferError, _AlreadyJoined):
            raise
        except Exception as error:
            self._on_fault()
            news = f"{type(error).__name__}: {error}"
            if peer.log_limiter.is_due(news):
                log.critical("join_broke", address=peer.address, error=news, exc_info=error)
            raise EngineError(f"{peer.address}: unexpected {type(error).__name__}; see the log of this node") from error

    async def _join_once(self, peer: PrefillPeer) -> NoReturn:
        """Stay joined for as long as it lasts; always raises in the end.

        Raises:
            TransferError: It is lost, or cannot be joined.
            _AlreadyJoined: It says that it is joined by another address.
        """
        question = pb.JoinRequest()
        question.CopyFrom(self._question)
        question.prefill_address = peer.address
        call = (await peer.stub()).Join(question)
        try:
            event = await first_event(call, peer.address)
            if event.HasField("already_joined"):
                raise _AlreadyJoined(event.already_joined.incarnation)
            peer.other = None
            if not event.HasField("joined"):
                raise PeerUnreachable(f"{peer.address}: the first event of a join was {event.WhichOneof('event')}")
            if len(event.joined.links) > MAX_LINKS:
                raise RemoteProtocolError(f"links has {len(event.joined.links)} entries; there can be {MAX_LINKS}")
            links = [link_from_proto(link) for link in event.joined.links]
            self._check_bandwidth(links)
            prefill = instance_from_proto(event.joined.prefill)
            check_compatible(prefill, self._own)
            self._set_plan(peer, prefill, chunk_plan_from_proto(event.joined.chunk_plan))
            peer.instance, peer.links = prefill, links
            peer.last_incarnation = prefill.incarnation
            peer.over = asyncio.get_running_loop().create_future()
            peer.unfit.clear()
            peer.joined.set()
            peer.state, peer.reason = "joined", ""
            peer.log_limiter.clear()
            broken = peer.broken = asyncio.get_running_loop().create_future()
            log.info(
                "joined_prefill_node",
                address=peer.address,
                links=len(peer.links),
                chunk_tokens=event.joined.chunk_plan.chunk_tokens,
                layers_per_group=event.joined.chunk_plan.layers_per_group,
                largest_piece_bytes=peer.largest_piece_bytes,
            )
            self._on_change()
            while True:
                event = await next_event(call, peer.address, heartbeats=HeartbeatWatch(self._heartbeat_s), broken=broken)
                if event.HasField("draining"):
                    peer.state, peer.reason = "draining", "it drains"
                    self._hurry(peer)
                elif event.HasField("undrained"):
                    peer.state, peer.reason = "joined", ""
                    self._on_change()
                elif event.HasField("beat"):
                    peer.others_tokens = told_tokens(event.beat.others_tokens) if event.beat.HasField("others_tokens") else None
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer=peer.address) from error
        finally:
            call.cancel()

    def _joined_as(self, incarnation: int) -> PrefillPeer | None:
        """The peer by which that life of a node is joined."""
        for peer in self.peers:
            if peer.instance is not None and peer.instance.incarnation == incarnation:
                return peer
        return None

    async def _be_alias(self, peer: PrefillPeer, other: PrefillPeer) -> None:
        """Stand aside until the node is no longer joined by its other address.

        A node that takes no harm from it is asked again now and then: meanwhile the address may have become another one's. Until
        it has answered, it counts as the same node: that one is named as long as this address is.
        """
        assert other.over is not None and other.instance is not None
        for_s = ALIAS_LOOK_S if "one_join" in other.instance.capabilities else None
        if peer.alias_of != other.instance.incarnation:  # once: it is asked again and again
            peer.alias_of = other.instance.incarnation
            log.info("prefill_node_has_two_addresses", address=peer.address, joined_as=other.address)
        peer.state, peer.reason, peer.other = "alias", f"the node is joined as {other.address}", other
        peer.joined.set()
        try:
            await asyncio.wait({other.over}, timeout=for_s)
        finally:
            peer.state, peer.reason = "joining", "it was another address of a node"
            peer.joined.clear()

    def _check_bandwidth(self, links: list[Link]) -> None:
        """The ranks refuse a slow link themselves; here it keeps the node from being given requests until they have."""
        for link in links:
            if link.bandwidth_bytes_per_s < self._min_bandwidth_bytes_per_s:
                raise TransportError(
                    f"link from prefill rank {link.prefill_rank} to decode rank {link.decode_rank} makes "
                    f"{link.bandwidth_bytes_per_s:.3g} bytes/s; transport.min_bandwidth_bytes_per_s of the decode node is "
                    f"{self._min_bandwidth_bytes_per_s:.3g}"
                )

    def _lose(self, peer: PrefillPeer, error: TransferError) -> None:
        is_leaving = peer.state == "draining"
        instance = self._unjoin(peer, str(error))
        if instance is not None:
            log.warning("prefill_node_lost", address=peer.address, reason=peer.reason)
            if not is_leaving:  # one that said so before it went has not failed anybody
                with self._watching(peer, peer.reason):
                    peer.breaker.lose()
            self._hurry(peer)
            self._on_lost(peer, instance.incarnation, peer.reason)
        else:
            _log_failed_join(peer, error)

    def _unjoin(self, peer: PrefillPeer, reason: str) -> Instance | None:
        """What a peer is while it is not joined; returns what it was joined with."""
        instance, peer.instance, peer.broken = peer.instance, None, None
        peer.joined.clear()
        peer.state, peer.reason, peer.links = "lost", reason, []
        peer.plan, peer.largest_piece_bytes, peer.others_tokens = None, 0, None
        for one in self.peers:
            if one.other is peer:
                one.other = None
        if peer.over is not None and not peer.over.done():
            peer.over.set_result(None)
        return instance


def _candidate(peer: PrefillPeer) -> Candidate:
    assert peer.instance is not None
    return Candidate(
        incarnation=peer.instance.incarnation,
        outstanding_tokens=peer.outstanding_tokens,
        others_tokens=peer.others_tokens,
        bandwidth_bytes_per_s=min((link.bandwidth_bytes_per_s for link in peer.links), default=0.0),
    )


def _usable(joined: list[PrefillPeer], *, is_retry: bool) -> list[PrefillPeer]:
    """Those whose breakers let a request in."""
    to_attempt = [peer for peer in joined if peer.breaker.wants_trial]
    healthy = [peer for peer in joined if peer.breaker.state is BreakerState.CLOSED]
    return (healthy or to_attempt) if is_retry else (to_attempt or healthy)


def _log_failed_join(peer: PrefillPeer, error: TransferError) -> None:
    if not peer.log_limiter.is_due(peer.reason):
        return
    if isinstance(error, PeerUnreachable | TransportTimeout):
        log.warning("prefill_node_unreachable", address=peer.address, reason=peer.reason)
    else:
        log.warning("prefill_node_refuses", address=peer.address, reason=peer.reason)


def _break(broken: asyncio.Future[str], reason: str) -> None:
    if not broken.done():
        broken.set_result(reason)


def show_peers(peers: Sequence[PrefillPeer], metrics: NodeMetrics) -> dict[str, int]:
    """Set the metrics of the given prefill nodes; return their number by state."""
    metrics.gauge("largest_piece_bytes").set(max((peer.largest_piece_bytes for peer in peers), default=0))
    metrics.breakers(Counter(peer.breaker.state.value for peer in peers))
    return Counter(peer.state for peer in peers)
