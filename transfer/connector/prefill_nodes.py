"""The prefill nodes that a decode side uses: keep each joined, and choose one for a prompt.

**Join.** Each address has a task that joins its node and reads the events of the join. When the node is lost, the task joins
again after a pause. A node is identified by its incarnation. If two addresses reach the same node, one peer is joined and the
other is an *alias*, which waits until that join ends.

**Names.** The settings, discovery (`use`) or a prompt (`add`) name an address. A node that discovery no longer names keeps its
join until nothing is in flight there. It gets prompts only if no named node can take them. The last joined nodes stay until a
named one is joined: a directory that has lost its data must not stop a tier that works.

**Choice.** Each peer has a circuit breaker (`transfer.breaker`), so that prompts go elsewhere for a while after the node was lost
or has failed. Among usable peers, `transfer.connector.prefill_routing` decides.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NoReturn, Protocol

import structlog

from transfer.breaker import Breaker, BreakerState, Permit, Verdict
from transfer.chunk import ChunkPlan
from transfer.config import BreakerConfig, DiscoveryConfig, HeartbeatConfig, TransportConfig
from transfer.connector.messages import ForgetPrefill
from transfer.connector.prefill_peer import PrefillPeer
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
from transfer.registry.convert import chunk_plan_from_proto, instance_from_proto, instance_to_proto, link_from_proto
from transfer.registry.discovery import DiscoveryView
from transfer.registry.discovery.entries import MAX_FOUND
from transfer.registry.options import MAX_PEERS
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import Security
from transfer.sizes import Cut

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 2.0
REASON_GRACE_S = 0.2
"""Wait for a prefill node's own reason for a loss. It is more precise than that of a decode rank, which only sees a link end."""

MAX_ADDED = MAX_PEERS
"""Prefill nodes that prompts have named. Each costs one more join, which is kept or retried forever."""

MAX_KNOWN = 2 * MAX_FOUND
"""Prefill nodes that discovery names or has named. Above it, unnamed nodes that are not joined are removed at once."""

SWEEP_S = 0.5
"""Pause between two checks for peers that are no longer named."""

ALIAS_LOOK_S = 30.0
"""Time after which an alias is joined again, because its address may have become that of another node."""

MAX_KNOWN_PLANS = 64
"""Maximum number of chunk plans of a prefill node whose largest piece is cached. A node has one plan for long prompts, and
one for each power of two of short ones."""

MAX_SHORT_PLANS = 32  # chunks of each power of two
MAX_LINKS = 1 << 14  # of two instances of 128 ranks each

log = structlog.get_logger(__name__)


class _AlreadyJoined(Exception):
    """The node of an address is joined already, or is about to be, by another address."""

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

    @property
    def discovery(self) -> DiscoveryConfig: ...


class PrefillNodes:
    """Keep the prefill nodes joined for one life of the decode ranks. Owned by the leader's loop.

    Args:
        addresses: host:port of each node that is named at first; see `use`.
        security: TLS or plain text of calls to the nodes.
        decode_address: Address at which prefill leaders ask for room.
        metrics: Counts breakers that opened, and joins that an unexpected error has ended.
        on_lost: Called with (peer, reason) after a joined peer is lost and the ranks were notified.
        on_change: Called when the result of `pick` or `can_wait_for_node` may have changed.
        view: Returns the state of discovery; None means that the settings name the nodes.
        prefix_tokens: See `placement.prefix_tokens`.
        clock: Seconds of breakers and grace.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        config: JoinSettings,
        hellos: Sequence[RankReady],
        security: Security,
        decode_address: str,
        metrics: NodeMetrics,
        broadcast: Callable[[object], None],
        on_lost: Callable[[PrefillPeer, str], None],
        on_change: Callable[[], None] = lambda: None,
        view: Callable[[], DiscoveryView] | None = None,
        prefix_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._own = hellos[0].instance
        self._vocab_size = hellos[0].vocab_size
        self._ring_capacity_bytes = min(hello.ring_bytes for hello in hellos)
        self._question = pb.JoinRequest(
            decode=instance_to_proto(self._own),
            decode_address=decode_address,
            rank_addresses=[hello.address for hello in hellos],
            heartbeat_s=config.heartbeat.interval_s,
        )
        self._security = security
        self._metrics = metrics
        self._broadcast = broadcast
        self._on_lost = on_lost
        self._on_change = on_change
        self._view = view
        self._prefix_tokens = prefix_tokens
        self._prefixes = PrefixMemory() if prefix_tokens else None
        self._hashed: tuple[tuple[int, ...], str, tuple[bytes, ...]] = ((), "", ())  # the prompt that was hashed last
        self._clock = clock
        self.peers = [self._peer_at(address) for address in addresses]
        self._is_started = False
        self._sweeping: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # close the channels of peers that are not used any more

    def _peer_at(self, address: str) -> PrefillPeer:
        return PrefillPeer(
            address=address,
            channel=PeerChannel(address, self._security),
            breaker=Breaker(self._config.breaker.settings(), self._clock),
            vocab_size=self._vocab_size,
        )

    def start(self) -> None:
        self._is_started = True
        for peer in self.peers:
            self._begin(peer)

    def _begin(self, peer: PrefillPeer) -> None:
        peer.joining = asyncio.get_running_loop().create_task(self._keep_joined(peer))

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*self._leaving, *map(self._close, self.peers), return_exceptions=True)

    async def _close(self, peer: PrefillPeer) -> None:
        if peer.joining is not None:
            peer.joining.cancel()
            await asyncio.gather(peer.joining, return_exceptions=True)
        await peer.channel.close()

    # Names

    def use(self, addresses: Collection[str]) -> None:
        """Set the addresses that are named now, besides those that prompts have named.

        New nodes are joined. Nodes that are missing leave later; see `_may_go`.
        """
        known = {peer.address: peer for peer in self.peers}
        if addresses and not any(peer.unnamed_s is None and not peer.is_added for peer in self.peers):
            # Discovery named no node until now. The first node that is named again must not end the joins of the others.
            for peer in self.peers:
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
        self._remove_surplus()
        self._sweep()

    def _remove_surplus(self) -> None:
        """Remove idle peers above `MAX_KNOWN`, so that answers that keep changing do not add channels and tasks forever."""
        num_over = sum(not peer.is_added for peer in self.peers) - MAX_KNOWN
        if num_over <= 0:
            return
        idle = [
            (peer.unnamed_s, peer)
            for peer in self.peers
            if peer.unnamed_s is not None and peer.instance is None and not peer.outstanding_tokens and not peer.num_users
        ]
        for _, peer in sorted(idle, key=lambda one: one[0])[:num_over]:
            self._remove(peer, "it is named no longer, and its place is needed")

    def _sweep(self) -> None:
        """Remove peers that may go. Check again soon if other unnamed peers are left."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for peer in [peer for peer in self.peers if self._may_go(peer)]:
            self._remove(peer, "it is named no longer")
        if any(peer.unnamed_s is not None for peer in self.peers):
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _may_go(self, peer: PrefillPeer) -> bool:
        """Return whether the peer is no longer named or needed. The last joined peers stay until a named one is joined."""
        if peer.unnamed_s is None or self._clock() - peer.unnamed_s < self._config.discovery.grace_s:
            return False
        if peer.outstanding_tokens or peer.num_users:
            return False
        if peer.state != "joined":
            return True
        return not self._is_named(peer) and any(self._is_named(other) and other.state == "joined" for other in self.peers)

    def _is_named(self, peer: PrefillPeer) -> bool:
        """Return whether the peer's node is named, by this or another of its addresses."""
        return peer.unnamed_s is None or any(one.other is peer and one.unnamed_s is None for one in self.peers)

    def find(self, address: str) -> PrefillPeer | None:
        """Return the prefill node at that host:port, joined or not."""
        return next((peer.other or peer for peer in self.peers if peer.address == address), None)

    def add(self, address: str) -> PrefillPeer:
        """Use a node that a prompt names. It may be removed for another one while it is not joined and no prompt waits for it.

        Raises:
            ConfigError: Plain text to that address is not allowed.
            ResourceExhausted: There are too many.
        """
        added = [peer for peer in self.peers if peer.is_added]
        if len(added) >= MAX_ADDED:
            idle = next((peer for peer in added if peer.instance is None and not peer.num_users), None)
            if idle is None:
                raise ResourceExhausted(
                    f"requests have named {len(added)} prefill nodes that are in use; there can be {MAX_ADDED}"
                )
            self._remove(idle, "its place is needed")
        peer = self._peer_at(address)
        peer.is_added = True
        self.peers.append(peer)
        self._begin(peer)
        return peer

    def _remove(self, peer: PrefillPeer, reason: str) -> None:
        """Stop using a peer on which nothing is in flight."""
        self.peers.remove(peer)
        log.info("prefill_node_left", address=peer.address, state=peer.state, reason=reason)
        instance = self._unjoin(peer, reason)
        if instance is not None:
            self._tell_lost(peer, instance, reason)
        leaving = asyncio.get_running_loop().create_task(self._close(peer))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        self._on_change()

    # Choice

    def pick(
        self, *, tried: frozenset[int] = frozenset(), token_ids: tuple[int, ...] = (), cache_salt: str = ""
    ) -> PrefillPeer | None:
        """Return the joined peer to send a prompt to; None if there is none.

        Named peers come first. Among them, a peer whose breaker wants a trial gets the next new prompt. A retried prompt is
        sent to such a peer only if no healthy one is left. If all breakers are open, all peers are candidates.

        Args:
            tried: Incarnations that already had the prompt.
            token_ids, cache_salt: Of the prompt.
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
        """Return whether a node that takes no prompts now may take some soon: it is being joined, drains, or is retried.

        A node that does not fit does not count: it has to be deployed differently first.

        Args:
            tried: Peers that do not count, because they were lost with the prompt.
        """
        if self._view is not None and self._view().waiting:
            return True  # discovery is asking a named node whether it serves
        return any(peer.state not in ("joined", "alias") and not peer.unfit.is_set() and peer not in tried for peer in self.peers)

    def unavailable_reason(self) -> str:
        """Return one line on why `pick` finds no peer."""
        view = None if self._view is None else self._view()
        if not self.peers:
            unset = "no prefill node is configured (peers.prefill_nodes)"
            return unset if view is None else f"no prefill node is known: {view}"
        states = [f"{peer.address} is {peer.state}" + (f": {peer.reason}" if peer.reason else "") for peer in self.peers]
        if view is not None and (view.problem or view.waiting):
            states.append(str(view))
        return "no prefill node is joined: " + "; ".join(states)

    def _blocks(self, token_ids: tuple[int, ...], cache_salt: str) -> tuple[bytes, ...]:
        """Return the hashes of a prompt. The last ones are kept, because a prompt is sent right after `pick`."""
        if self._hashed[0] is not token_ids or self._hashed[1] != cache_salt:
            self._hashed = token_ids, cache_salt, block_hashes(token_ids, cache_salt)
        return self._hashed[2]

    def begin(self, peer: PrefillPeer, token_ids: tuple[int, ...] = (), cache_salt: str = "") -> Permit:
        """Record that a prompt is sent to a peer, for the prefix memory and the breaker; `end` must follow."""
        if self._prefixes is not None and peer.instance is not None:
            self._prefixes.sent(self._blocks(token_ids, cache_salt), peer.instance.incarnation)
        permit = peer.breaker.begin()
        if permit.is_trial:
            log.info("breaker_half_open", address=peer.address)
        return permit

    def end(self, peer: PrefillPeer, permit: Permit, verdict: Verdict, reason: str) -> None:
        """Record the outcome of a prompt. `reason` describes a failure."""
        with self._watching_breaker(peer, reason):
            peer.breaker.end(permit, verdict)

    @contextmanager
    def _watching_breaker(self, peer: PrefillPeer, reason: str) -> Iterator[None]:
        """Report if the peer's breaker opens or closes meanwhile."""
        breaker = peer.breaker
        num_openings, was_closed = breaker.num_openings, breaker.state is BreakerState.CLOSED
        yield
        if breaker.num_openings > num_openings:
            peer.breaker_reason = reason
            log.warning("breaker_opened", address=peer.address, pause_s=round(breaker.pause_left_s, 3), reason=reason)
            self._metrics.counter("breaker_openings").inc()
        elif not was_closed and breaker.state is BreakerState.CLOSED:
            peer.breaker_reason = ""
            log.info("breaker_closed", address=peer.address)

    # Chunk plans

    def plan_of(self, question: pb.ReserveRequest | pb.PrefillRoomWanted, incarnation: int) -> ChunkPlan:
        """Return the chunk plan in a question for room. Record it as the prefill instance's, unless its chunks are smaller.

        Args:
            incarnation: Life of the prefill instance.

        Raises:
            ConfigError: The plan is missing.
            ChunkTooLarge: A piece of it can be larger than the ring.
        """
        if not question.HasField("chunk_plan"):
            raise ConfigError("chunk_plan is missing; the prefill side decides how a request is divided into chunks")
        plan = chunk_plan_from_proto(question.chunk_plan)
        for peer in self.peers:
            if peer.instance is not None and peer.instance.incarnation == incarnation and peer.plan != plan:
                self._check_largest_piece(peer, peer.instance, plan)
                peer.largest_piece_bytes = max(peer.pieces.values())
                if peer.plan is None or plan.chunk_tokens >= peer.plan.chunk_tokens:
                    peer.plan = plan
        return plan

    def _check_largest_piece(self, peer: PrefillPeer, prefill: Instance, plan: ChunkPlan) -> int:
        """Return the bytes of the largest piece of `plan`. Raise ChunkTooLarge if the piece is larger than the ring."""
        if plan in peer.pieces:
            return peer.pieces[plan]
        largest = largest_piece_bytes(prefill, self._own, plan)
        if largest > self._ring_capacity_bytes:
            raise ChunkTooLarge(
                f"ring.capacity_bytes is {self._ring_capacity_bytes}; with chunks of {plan} one rank of prefill node "
                f"{peer.address} sends up to {largest} bytes at once: raise it, or lower chunk.piece_bytes or "
                "chunk.chunk_tokens of the prefill node"
            )
        if len(peer.pieces) == MAX_KNOWN_PLANS:
            peer.pieces.clear()
        peer.pieces[plan] = largest
        return largest

    # Joins

    async def _keep_joined(self, peer: PrefillPeer) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            other = self._joined_as(peer.last_incarnation)
            if other is not None:
                await self._be_alias(peer, other)
            peer.state = "joining"
            peer.hurry.clear()
            try:
                await self._join_once_or_report(peer)
            except _AlreadyJoined as already:
                backoff_s = FIRST_BACKOFF_S
                peer.last_incarnation = already.incarnation
                peer.other = self._joined_as(already.incarnation)
            except TransferError as error:
                peer.other = None
                was_joined = peer.instance is not None
                self._lose(peer, error)
                if isinstance(error, LayoutError):  # the node must be deployed differently first, which takes a while
                    peer.unfit.set()
                    backoff_s = MAX_BACKOFF_S
                else:
                    backoff_s = FIRST_BACKOFF_S if was_joined else min(2 * backoff_s, MAX_BACKOFF_S)
                self._on_change()
            if await self._is_cut_short(peer, backoff_s):
                backoff_s = FIRST_BACKOFF_S

    async def _is_cut_short(self, peer: PrefillPeer, pause_s: float) -> bool:
        """Pause before the next join. Return whether `_hurry` has ended the pause."""
        try:
            async with asyncio.timeout(pause_s):
                await peer.hurry.wait()
        except TimeoutError:
            return False
        peer.channel.connect_anew()
        return True

    def _hurry(self, gone: PrefillPeer) -> None:
        """Join all nodes at once that may replace the last one, which takes no prompts any more.

        The node itself is joined again after its first, short pause.
        """
        if not any(peer.state == "joined" for peer in self.peers):
            for peer in self.peers:
                if peer.instance is None and peer is not gone:
                    peer.hurry.set()

    async def _join_once_or_report(self, peer: PrefillPeer) -> NoReturn:
        """Do as `_join_once`. Raise EngineError for a bug, so that it does not prevent the node's next join."""
        try:
            await self._join_once(peer)
        except (TransferError, _AlreadyJoined):
            raise
        except Exception as error:
            self._metrics.counter("join_faults").inc()
            description = f"{type(error).__name__}: {error}"
            if peer.log_limiter.is_due(description):
                log.critical("join_crashed", address=peer.address, error=description, exc_info=error)
            raise EngineError(f"{peer.address}: unexpected {type(error).__name__}; see the log of this node") from error

    async def _join_once(self, peer: PrefillPeer) -> NoReturn:
        """Join the node, and follow the join to its end.

        Raises:
            TransferError: The node is lost, or cannot be joined.
            _AlreadyJoined: The node reports that it is joined by another address.
        """
        question = pb.JoinRequest()
        question.CopyFrom(self._question)
        question.prefill_address = peer.address
        async with aclosing(peer.join(question, heartbeat_s=self._config.heartbeat.interval_s)) as events:
            first = await anext(events)
            if first.HasField("already_joined"):
                raise _AlreadyJoined(first.already_joined.incarnation)
            peer.other = None
            if not first.HasField("joined"):
                raise PeerUnreachable(f"{peer.address}: the first event of a join was {first.WhichOneof('event')}")
            self._on_joined(peer, first.joined)
            async for event in events:
                if event.HasField("draining"):
                    peer.state, peer.reason = "draining", ""
                    self._hurry(peer)
                elif event.HasField("undrained"):
                    peer.state, peer.reason = "joined", ""
                    self._on_change()
                elif event.HasField("beat"):
                    peer.others_tokens = told_tokens(event.beat.others_tokens) if event.beat.HasField("others_tokens") else None
        raise AssertionError("the events of a join end with an error")

    def _on_joined(self, peer: PrefillPeer, joined: pb.Joined) -> None:
        """Check the node, and use it from now on. Raise TransferError if it cannot be used."""
        if len(joined.links) > MAX_LINKS:
            raise RemoteProtocolError(f"links has {len(joined.links)} entries; there can be {MAX_LINKS}")
        links = [link_from_proto(link) for link in joined.links]
        self._check_bandwidth(links)
        prefill = instance_from_proto(joined.prefill)
        check_compatible(prefill, self._own)
        if len(joined.short_chunk_plans) > MAX_SHORT_PLANS:
            raise RemoteProtocolError(
                f"short_chunk_plans has {len(joined.short_chunk_plans)} entries; there can be {MAX_SHORT_PLANS}"
            )
        if any(short.token_layers for short in joined.short_chunk_plans):
            # The size of such a plan takes milliseconds. With `token_layers`, `chunk_plan` is good for short requests too.
            raise RemoteProtocolError("short_chunk_plans has a plan with token_layers; only chunk_plan can have them")
        plan = chunk_plan_from_proto(joined.chunk_plan)
        short_plans = tuple(map(chunk_plan_from_proto, joined.short_chunk_plans))
        largest = max(self._check_largest_piece(peer, prefill, one) for one in (plan, *short_plans))
        peer.plan, peer.largest_piece_bytes = plan, largest
        peer.cut = Cut(plan=plan, largest_piece_bytes=largest, short_plans=short_plans)
        loop = asyncio.get_running_loop()
        peer.instance, peer.links, peer.last_incarnation = prefill, links, prefill.incarnation
        peer.over, peer.broken = loop.create_future(), loop.create_future()
        peer.unfit.clear()
        peer.joined.set()
        peer.state, peer.reason = "joined", ""
        peer.log_limiter.clear()
        log.info(
            "joined_prefill_node",
            address=peer.address,
            links=len(peer.links),
            chunk_tokens=joined.chunk_plan.chunk_tokens,
            layers_per_group=joined.chunk_plan.layers_per_group,
            token_layers=joined.chunk_plan.token_layers,
            largest_piece_bytes=peer.largest_piece_bytes,
        )
        self._on_change()

    def _check_bandwidth(self, links: list[Link]) -> None:
        """Raise TransportError for a slow link. The ranks reject it, too; until they do, the node must not get prompts."""
        floor = self._config.transport.min_bandwidth_bytes_per_s
        for link in links:
            if link.bandwidth_bytes_per_s < floor:
                raise TransportError(
                    f"link from prefill rank {link.prefill_rank} to decode rank {link.decode_rank} makes "
                    f"{link.bandwidth_bytes_per_s:.3g} bytes/s; transport.min_bandwidth_bytes_per_s of the decode node is "
                    f"{floor:.3g}"
                )

    def _joined_as(self, incarnation: int) -> PrefillPeer | None:
        """Return the peer by which that life of a node is joined."""
        for peer in self.peers:
            if peer.instance is not None and peer.instance.incarnation == incarnation:
                return peer
        return None

    async def _be_alias(self, peer: PrefillPeer, other: PrefillPeer) -> None:
        """Wait until the node is no longer joined by its other address.

        A node with the capability `one_join` is asked again from time to time, because the address may have become that of
        another node. Until then the address keeps the node named.
        """
        assert other.over is not None and other.instance is not None
        for_s = ALIAS_LOOK_S if "one_join" in other.instance.capabilities else None
        if peer.alias_of != other.instance.incarnation:  # log it once, although it is asked repeatedly
            peer.alias_of = other.instance.incarnation
            log.info("prefill_node_has_two_addresses", address=peer.address, joined_as=other.address)
        peer.state, peer.reason, peer.other = "alias", f"the node is joined as {other.address}", other
        peer.joined.set()
        try:
            await asyncio.wait({other.over}, timeout=for_s)
        finally:
            peer.state, peer.reason = "joining", "it was another address of a node"
            peer.joined.clear()

    # Losses

    def break_join(self, incarnation: int, *, prefill_rank: int, decode_rank: int, reason: str) -> None:
        """Leave an instance to which a decode rank has lost a link, and join it again.

        Only links of the join count: any process can attach in the name of a rank that does not exist, and go silent. If the
        join ends by itself within `REASON_GRACE_S`, its own reason is reported, because it is more precise.
        """
        for peer in self.peers:
            if peer.instance is None or peer.instance.incarnation != incarnation or peer.broken is None:
                continue
            if any((link.prefill_rank, link.decode_rank) == (prefill_rank, decode_rank) for link in peer.links):
                lost = f"decode rank {decode_rank} has lost prefill rank {prefill_rank}: {reason}"
                asyncio.get_running_loop().call_later(REASON_GRACE_S, _break, peer.broken, lost)

    def _lose(self, peer: PrefillPeer, error: TransferError) -> None:
        is_leaving = peer.state == "draining"
        instance = self._unjoin(peer, str(error))
        if instance is None:
            _log_failed_join(peer, error)
            return
        log.warning("prefill_node_lost", address=peer.address, reason=peer.reason)
        if not is_leaving:  # a node that drained before it left has failed no prompt
            with self._watching_breaker(peer, peer.reason):
                peer.breaker.lose()
        self._hurry(peer)
        self._tell_lost(peer, instance, peer.reason)

    def _unjoin(self, peer: PrefillPeer, reason: str) -> Instance | None:
        """Set the state of a peer that is not joined. Return the instance that it was joined with, if any."""
        instance, peer.instance, peer.broken = peer.instance, None, None
        peer.retire_stream()
        peer.joined.clear()
        peer.state, peer.reason, peer.links = "lost", reason, []
        peer.plan, peer.cut, peer.largest_piece_bytes, peer.others_tokens = None, None, 0, None
        peer.pieces.clear()
        for one in self.peers:
            if one.other is peer:
                one.other = None
        if peer.over is not None and not peer.over.done():
            peer.over.set_result(None)
        return instance

    def _tell_lost(self, peer: PrefillPeer, instance: Instance, reason: str) -> None:
        self._broadcast(ForgetPrefill(incarnation=instance.incarnation, reason=reason))
        self._on_lost(peer, reason)


def _candidate(peer: PrefillPeer) -> Candidate:
    assert peer.instance is not None
    return Candidate(
        incarnation=peer.instance.incarnation,
        outstanding_tokens=peer.outstanding_tokens,
        others_tokens=peer.others_tokens,
        bandwidth_bytes_per_s=min((link.bandwidth_bytes_per_s for link in peer.links), default=0.0),
    )


def _usable(joined: list[PrefillPeer], *, is_retry: bool) -> list[PrefillPeer]:
    """Return the peers whose breakers let a prompt in."""
    on_trial = [peer for peer in joined if peer.breaker.wants_trial]
    healthy = [peer for peer in joined if peer.breaker.state is BreakerState.CLOSED]
    return (healthy or on_trial) if is_retry else (on_trial or healthy)


def _log_failed_join(peer: PrefillPeer, error: TransferError) -> None:
    if peer.log_limiter.is_due(peer.reason):
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
