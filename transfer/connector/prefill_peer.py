"""One prefill node, as a decode node sees it: what is known of it, and the calls that concern a single prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from transfer.breaker import Breaker
from transfer.chunk import ChunkPlan
from transfer.engine_types import GREEDY, SamplingParams
from transfer.errors import PeerUnreachable, RemoteProtocolError, TransferError, TransportError
from transfer.instance import Instance, Link
from transfer.log_rate_limiter import LogRateLimiter
from transfer.messages import clip_reason
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.convert import chunk_plan_to_proto, link_to_proto, sampling_to_proto
from transfer.registry.heartbeats import HeartbeatWatch
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.status import readable, tier_error_of
from transfer.tracing import TRACEPARENT

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import PrefillControlAsyncStub

GIVE_UP_TIMEOUT_S: Final = 2.0
ANY_TOKEN: Final = 1 << 32

JOIN_TIMEOUT_S: Final = 60.0
"""Until the first event: every rank attaches and probes its links before."""

JoinCall = grpc.aio.UnaryStreamCall[Any, pb.JoinEvent]

LONG_PROMPT_TOKENS: Final = 8192
"""Tokens from which a prompt is encoded alone in a turn of the loop: 131,072 tokens take 3 ms, and many can start at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillPeer:
    """One address of a prefill node. `state` is "joining", "joined", "draining", "lost" or "alias".

    An alias is one more address of a node that is joined already.
    """

    address: str
    channel: PeerChannel
    breaker: Breaker
    breaker_reason: str = ""  # why it opened last; empty once it is closed
    state: str = "joining"
    reason: str = "not tried yet"
    instance: Instance | None = None
    links: list[Link] = field(default_factory=list)
    plan: ChunkPlan | None = None  # while it is joined: how requests are cut, as far as it has said
    largest_piece_bytes: int = 0  # of that plan: most bytes of a chunk that one rank sends to another
    outstanding_tokens: int = 0  # of this node's own prompts
    others_tokens: int | None = None  # while it is joined: of other decode nodes' prompts, as it told last
    joined: asyncio.Event = field(default_factory=asyncio.Event)  # set while it has an instance
    unfit: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # set while it is another model's, or cannot be joined as it is set
    broken: asyncio.Future[str] | None = None  # while it is joined: set to the reason when a link to it is found lost
    vocab_size: int = ANY_TOKEN
    log_limiter: LogRateLimiter = field(default_factory=LogRateLimiter)  # of why joins failed since it was joined
    joining: asyncio.Task[None] | None = None  # for as long as it is one of those that are used
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # set: its pause before the next join is over
    is_added: bool = False  # by a request, not by the settings
    num_users: int = 0  # who would miss it, joined or not
    unnamed_s: float | None = None  # since when discovery has not named it
    other: PrefillPeer | None = None  # of an alias: by whom its node is joined
    last_incarnation: int = 0  # of whom it was the address last
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)  # held for one turn by each call with a long prompt
    alias_of: int = 0  # the life of which it was last told to be one more address
    over: asyncio.Future[None] | None = None  # while it is joined: done when it no longer is

    @property
    def can_start_late(self) -> bool:
        """Whether it learns only when it asks for room which token the KV is needed from."""
        return self.instance is not None and "late_start_token" in self.instance.capabilities

    @property
    def takes_room(self) -> bool:
        """Whether the node gets room in the stream of a prompt, and does not call `Reserve`."""
        return self.instance is not None and "room_in_stream" in self.instance.capabilities

    def status(self) -> pb.PeerStatus:
        """Return the status for operators."""
        return pb.PeerStatus(
            address=self.address,
            incarnation=self.instance.incarnation if self.instance is not None else 0,
            state=self.state,
            reason=self.reason,
            chunk_plan=chunk_plan_to_proto(self.plan) if self.plan is not None else None,
            largest_piece_bytes=self.largest_piece_bytes,
            breaker=self.breaker.state.value,
            breaker_reason=self.breaker_reason,
            breaker_pause_s=self.breaker.pause_left_s,
            outstanding_tokens=self.outstanding_tokens,
            is_unnamed=self.unnamed_s is not None,
            others_tokens=self.others_tokens,
        )

    def link_statuses(self) -> list[pb.LinkStatus]:
        if self.instance is None:
            return []
        return [link_to_proto(link, peer_incarnation=self.instance.incarnation) for link in self.links]

    async def stub(self) -> PrefillControlAsyncStub:
        """For a call at once.

        Raises:
            PeerUnreachable: The node cannot be connected to.
        """
        return cast("PrefillControlAsyncStub", pb_grpc.PrefillControlStub(await self.channel.ready()))

    async def prefill(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        *,
        decode_incarnation: int,
        sampling: SamplingParams = GREEDY,
        start_token: int = 0,
        engine_request: str = "",
        cache_salt: str = "",
        traceparent: str = "",
        room: asyncio.Future[pb.PrefillRoom] | None = None,
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Have the node compute a prompt and send its KV; yield the events that it reports.

        The caller must close the iterator (`contextlib.aclosing`), which gives the request up.

        Args:
            start_token: First token whose KV is sent.
            engine_request: Name of the prompt in the node's engine. Empty means that the node has it computed.
            cache_salt: Stored KV is shared with requests of the same one only.
            traceparent: Parent span of the call; empty means that it is not traced.
            room: Sent to the node once it is set, in answer to `room_wanted`. None means that the node asks with `Reserve`.

        Raises:
            TransferError: The call failed; see `transfer.registry.status`.
        """
        if len(token_ids) >= LONG_PROMPT_TOKENS:
            async with self.asking:
                await asyncio.sleep(0)
        question = pb.PrefillRequest(
            request_id=request_id,
            token_ids=token_ids,
            decode_incarnation=decode_incarnation,
            sampling=sampling_to_proto(sampling),
            start_token=start_token,
            engine_request=engine_request,
            cache_salt=cache_salt,
        )
        stub, metadata = await self.stub(), ((TRACEPARENT, traceparent),) if traceparent else None
        call = (
            stub.Prefill(question, metadata=metadata)
            if room is None
            else stub.PrefillIntoRoom(_messages(question, room), metadata=metadata)
        )
        try:
            async for answer in call:
                event = readable(answer, method="Prefill")
                if event.HasField("first_token") and event.first_token.token_id >= self.vocab_size:
                    raise TransportError(
                        f"{self.address}: first_token.token_id is {event.first_token.token_id}; ids are below the vocabulary's "
                        f"{self.vocab_size}"  # the engine would refuse the step of every request, and end all ranks
                    )
                yield event
        except grpc.aio.AioRpcError as error:
            raise tier_error_of(error, peer=self.address) from error
        except RemoteProtocolError as error:
            raise TransportError(f"{self.address}: {error}") from error  # another node may do better
        finally:
            call.cancel()
            if room is not None:
                room.cancel()  # gRPC goes on to wait for the next message of a call that has ended

    async def give_up(self, engine_request: str, reason: str) -> bool:
        """Tell the node that nobody will ask for the prompt of that name: it need not keep its KV; False: it was not reached."""
        question = pb.AbortRequest(request_id=engine_request, reason=clip_reason(reason))
        try:
            await (await self.stub()).Abort(question, timeout=GIVE_UP_TIMEOUT_S)
        except (TransferError, grpc.aio.AioRpcError):
            return False
        return True


async def _messages(request: pb.PrefillRequest, room: asyncio.Future[pb.PrefillRoom]) -> AsyncIterator[pb.PrefillMessage]:
    """Yield the messages of a call. The stream ends when `room` is cancelled."""
    yield pb.PrefillMessage(request=request)
    await asyncio.wait((room,))
    if not room.cancelled():
        yield pb.PrefillMessage(room=room.result())


async def first_event(call: JoinCall, address: str) -> pb.JoinEvent:
    """What the node says to a join; it attaches every rank and probes their links first.

    Raises:
        PeerUnreachable: It has said nothing for too long, or ended the call.
    """
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            return _event_of(await call.read(), address)
    except TimeoutError:
        raise PeerUnreachable(f"{address} is silent: nothing for {JOIN_TIMEOUT_S:g} s") from None


async def next_event(call: JoinCall, address: str, *, heartbeats: HeartbeatWatch, broken: asyncio.Future[str]) -> pb.JoinEvent:
    """What a joined node says next. Ticks, not seconds, tell a silent one: this loop may have been busy meanwhile.

    Args:
        heartbeats: Counts ticks since it said something.
        broken: Set to why, where the join is over for another reason.

    Raises:
        PeerUnreachable: It is silent, has ended the call, or `broken` is set.
    """
    reading = asyncio.ensure_future(call.read())
    waiting: set[asyncio.Future[Any]] = {reading, broken}
    try:
        while not (await asyncio.wait(waiting, timeout=heartbeats.tick_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if heartbeats.tick():
                raise PeerUnreachable(f"{address} is silent: {heartbeats.describe()}")
        if broken.done():
            raise PeerUnreachable(f"{address}: {broken.result()}")
        return _event_of(reading.result(), address)
    finally:
        reading.cancel()


def _event_of(read: object, address: str) -> pb.JoinEvent:
    if not isinstance(read, pb.JoinEvent):  # grpc.aio.EOF
        raise PeerUnreachable(f"{address} ended the join")
    return read
