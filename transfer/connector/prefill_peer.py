"""One prefill node, as a decode side sees it: its state, its join, and the calls for a single prompt."""

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
from transfer.registry.prompt_stream import PromptCall, PromptStream
from transfer.registry.status import error_of, readable, tier_error_of
from transfer.sizes import Cut
from transfer.tracing import TRACEPARENT

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import PrefillControlAsyncStub

GIVE_UP_TIMEOUT_S: Final = 2.0

JOIN_TIMEOUT_S: Final = 60.0
"""Limit for the first event of a join. Before it, every rank attaches and probes its links."""

LONG_PROMPT_TOKENS: Final = 8192
"""Prompts of at least this length are encoded one per turn of the loop. 131,072 tokens take 3 ms, and many can start at once.
Each has a call of its own, so that no other prompt waits behind its bytes."""


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillPeer:
    """One address of a prefill node. `state` is "joining", "joined", "draining", "lost" or "alias".

    An alias is another address of a node that is joined already.
    """

    address: str
    channel: PeerChannel
    breaker: Breaker
    vocab_size: int  # ids of first tokens are below it
    breaker_reason: str = ""  # why the breaker opened last; empty once it is closed
    state: str = "joining"
    reason: str = "not tried yet"  # reason of the state
    instance: Instance | None = None  # while it is joined
    links: list[Link] = field(default_factory=list)
    plan: ChunkPlan | None = None  # how long prompts are divided; None while it is not joined
    cut: Cut | None = None  # the plans of its join, see `takes_early_room`
    pieces: dict[ChunkPlan, int] = field(default_factory=dict)  # bytes of the largest piece of each plan
    largest_piece_bytes: int = 0  # of all known plans
    outstanding_tokens: int = 0  # tokens of this decode side's prompts whose calls have not ended
    others_tokens: int | None = None  # tokens of other decode sides' prompts, as last received; None means unknown
    joined: asyncio.Event = field(default_factory=asyncio.Event)  # set while it, or the node that it is an alias of, is joined
    unfit: asyncio.Event = field(default_factory=asyncio.Event)  # set while the node cannot be joined as it is deployed
    broken: asyncio.Future[str] | None = None  # while it is joined: done, with the reason, when a link to it is lost
    over: asyncio.Future[None] | None = None  # while it is joined: done when it no longer is
    log_limiter: LogRateLimiter = field(default_factory=LogRateLimiter)  # limits the log of failed joins since it was joined
    joining: asyncio.Task[None] | None = None  # keeps it joined
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # set to end the pause before the next join
    is_added: bool = False  # named by a request, not by the settings or discovery
    num_users: int = 0  # prompts that wait for it, joined or not
    unnamed_s: float | None = None  # time from which discovery no longer names it
    other: PrefillPeer | None = None  # for an alias, the peer by which its node is joined
    alias_of: int = 0  # life of the node that it was last logged as an alias of
    last_incarnation: int = 0  # life of the node that was last found at this address
    stream: PromptStream | None = None  # carries the prompts of this join
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)  # held for one turn by each call with a long prompt

    @property
    def can_start_late(self) -> bool:
        """Whether the node learns the start token only when it asks for room."""
        return self.instance is not None and "late_start_token" in self.instance.capabilities

    @property
    def takes_room(self) -> bool:
        """Whether the node gets room in the stream of a prompt, and does not call `Reserve`."""
        return self.instance is not None and "room_in_stream" in self.instance.capabilities

    @property
    def takes_early_room(self) -> bool:
        """Whether the node gets room in the stream of a prompt before it asks. If so, `cut` has all of its plans."""
        return self.takes_room and self.instance is not None and "early_room" in self.instance.capabilities

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
        """Return a stub for one call.

        Raises:
            PeerUnreachable: The node cannot be connected to.
        """
        return cast("PrefillControlAsyncStub", pb_grpc.PrefillControlStub(await self.channel.ready()))

    async def join(self, question: pb.JoinRequest, *, heartbeat_s: float) -> AsyncGenerator[pb.JoinEvent, None]:
        """Call `Join`, and yield the events of the node. The caller must close the iterator (`contextlib.aclosing`).

        `broken`, if the caller sets it after the first event, ends the call once it is done.

        Raises:
            TransferError: The call failed, or has ended; the node is silent, or a link to it is lost.
        """
        call = (await self.stub()).Join(question)
        try:
            try:
                async with asyncio.timeout(JOIN_TIMEOUT_S):
                    event: object = await call.read()
            except TimeoutError:
                raise PeerUnreachable(f"{self.address} is silent: nothing for {JOIN_TIMEOUT_S:g} s") from None
            while isinstance(event, pb.JoinEvent):  # otherwise it is grpc.aio.EOF
                yield event
                event = await self._next_event(call, HeartbeatWatch(heartbeat_s))
            raise PeerUnreachable(f"{self.address} ended the join")
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer=self.address) from error
        finally:
            call.cancel()

    async def _next_event(self, call: grpc.aio.UnaryStreamCall[Any, pb.JoinEvent], heartbeats: HeartbeatWatch) -> object:
        """Return the next event. The silence of a node is measured in ticks, because this loop may have been busy meanwhile."""
        reading, broken = asyncio.ensure_future(call.read()), self.broken  # the caller may leave the node meanwhile
        waiting: set[asyncio.Future[Any]] = {reading} if broken is None else {reading, broken}
        try:
            while not (await asyncio.wait(waiting, timeout=heartbeats.tick_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                if heartbeats.tick():
                    raise PeerUnreachable(f"{self.address} is silent: {heartbeats.describe()}")
            if broken is not None and broken.done():
                raise PeerUnreachable(f"{self.address}: {broken.result()}")
            return reading.result()
        finally:
            reading.cancel()

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
        early_room_plan: ChunkPlan | None = None,
    ) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Have the node compute a prompt and send its KV; yield the events that it reports.

        The caller must close the iterator (`contextlib.aclosing`), which gives the request up.

        Args:
            start_token: First token whose KV is sent.
            engine_request: Name of the prompt in the node's engine. Empty means that the node has it computed.
            cache_salt: Stored KV is shared only with requests of the same salt.
            traceparent: Parent span of the call; empty means that it is not traced.
            room: Sent to the node once it is set, in answer to `room_wanted`. None means that the node asks with `Reserve`.
            early_room_plan: How the prompt is divided, if it has room already. The node does not ask for room then.

        Raises:
            TransferError: The call failed; see `transfer.registry.status`.
        """
        if len(token_ids) >= LONG_PROMPT_TOKENS:
            async with self.encoding:
                await asyncio.sleep(0)
        question = pb.PrefillRequest(
            request_id=request_id,
            token_ids=token_ids,
            decode_incarnation=decode_incarnation,
            sampling=sampling_to_proto(sampling),
            start_token=start_token,
            engine_request=engine_request,
            cache_salt=cache_salt,
            early_room_plan=None if early_room_plan is None else chunk_plan_to_proto(early_room_plan),
        )
        stub, metadata = await self.stub(), ((TRACEPARENT, traceparent),) if traceparent else None
        call: PromptCall | grpc.aio.UnaryStreamCall[Any, pb.PrefillEvent] | grpc.aio.StreamStreamCall[Any, pb.PrefillEvent]
        if room is None:
            call = stub.Prefill(question, metadata=metadata)
        elif (stream := self._stream_for(token_ids, stub)) is not None:
            call = stream.begin(question, room, traceparent=traceparent)
        else:
            call = stub.PrefillIntoRoom(_messages(question, room), metadata=metadata)
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
                room.cancel()  # gRPC still waits for the next message of a call that has ended

    def _stream_for(self, token_ids: tuple[int, ...], stub: PrefillControlAsyncStub) -> PromptStream | None:
        """Return the stream for a prompt. None means that the prompt has a call of its own."""
        if self.instance is None or "prompt_stream" not in self.instance.capabilities or len(token_ids) >= LONG_PROMPT_TOKENS:
            return None
        channel = self.channel.current
        if self.stream is None or not self.stream.is_open or self.stream.channel is not channel:
            self.retire_stream()
            self.stream = PromptStream(stub, channel)
        return None if self.stream.is_full else self.stream

    def retire_stream(self) -> None:
        """Send no further prompt on the stream, and end it when its prompts have ended."""
        if self.stream is not None:
            self.stream.retire()
            self.stream = None

    async def give_up(self, engine_request: str, reason: str) -> bool:
        """Tell the node that the prompt of that name is not wanted any more. Return False if the node was not reached."""
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
