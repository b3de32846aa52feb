"""A prompt in the stream of its join, over gRPC: its caller gets what it would get from a call of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from tests.decode.local_nodes import Tier
from tests.runtime.instances import instance, until
from transfer.connector import prefill_peer as peer_module
from transfer.connector.prefill_peer import PrefillPeer
from transfer.errors import EngineError, OutOfMemory, PeerUnreachable, ResourceExhausted, TransferError, TransportError
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry import prompt_stream as stream_module
from transfer.registry.prompt_stream import serve_prompts
from transfer.registry.server import serve
from transfer.registry.status import end_with

BOTH = frozenset({"room_in_stream", "prompt_stream"})
CALLS = frozenset({"room_in_stream"})
STARTED = pb.PrefillEvent(started=pb.PrefillStarted(queue_s=0.5))


class PrefillNode(pb_grpc.PrefillControlServicer):
    """Starts each prompt once it has room, and then does what its id says.

    Attributes:
        streams, calls: Numbers of streams and of calls.
        raw: If not empty, a stream sends only these events.
    """

    def __init__(self) -> None:
        self.streams = self.calls = self.num_open = 0
        self.raw: list[pb.PromptEvent] = []
        self.over: list[str] = []
        self.metadata: list[object] = []
        self.ends = asyncio.Event()
        self.join_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _serve(self, messages: AsyncIterator[pb.PrefillMessage], context: Any) -> AsyncGenerator[pb.PrefillEvent, None]:
        self.metadata += [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
        name = (await anext(messages)).request.request_id
        try:
            yield pb.PrefillEvent(room_wanted=pb.PrefillRoomWanted())
            assert (await anext(messages)).room.start_token == 3
            yield STARTED
            if name == "full":
                await end_with(context, ResourceExhausted("prefill queue is full"))
            if name == "no memory":
                await end_with(context, OutOfMemory("a step found no memory"))
            if name == "step failed":
                await end_with(context, EngineError("a step failed", spares_kv=True))
            if name == "not let in":
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "decode-0 may not call")
            if name == "sent":
                yield pb.PrefillEvent(sent=pb.PrefillSent())
                return
            await asyncio.Event().wait()
        finally:
            self.over.append(name)

    async def PrefillIntoRoom(
        self, request_iterator: AsyncIterator[pb.PrefillMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        self.calls += 1
        async with aclosing(self._serve(request_iterator, context)) as events:
            async for event in events:
                yield event

    async def StreamPrompts(
        self, request_iterator: AsyncIterator[pb.PromptMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PromptEvent]:
        self.streams += 1
        self.num_open += 1
        try:
            if self.raw:
                await anext(request_iterator)
                for event in self.raw:
                    yield event
                await self.ends.wait()
                return
            async with aclosing(serve_prompts(request_iterator, self._serve, over=self.join_lost)) as events:
                async for event in events:
                    yield event
        finally:
            self.num_open -= 1


@pytest.fixture
async def node() -> PrefillNode:
    return PrefillNode()  # type: ignore[abstract]  # the other calls are answered UNIMPLEMENTED


@pytest.fixture
async def tier(node: PrefillNode) -> AsyncIterator[Tier]:
    server = await serve("127.0.0.1", 0, prefill_control=node)
    one = Tier([f"127.0.0.1:{server.port}"])
    one.peers.peers[0].instance = instance(5, capabilities=BOTH)
    yield one
    await one.peers.close()
    await server.close()


@pytest.fixture
async def peer(tier: Tier) -> PrefillPeer:
    return tier.peers.peers[0]


class Prompt:
    """A prompt that gives room at once when it is asked. `events` are the kinds of its events."""

    def __init__(self, peer: PrefillPeer, name: str, *, tokens: int = 2, traceparent: str = "") -> None:
        self.events: list[str | None] = []
        self._room: asyncio.Future[pb.PrefillRoom] = asyncio.get_running_loop().create_future()
        self._call = peer.prefill(name, (1,) * tokens, decode_incarnation=7, room=self._room, traceparent=traceparent)
        self.following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self._call):
            async for event in self._call:
                self.events.append(event.WhichOneof("event"))
                if event.HasField("room_wanted"):
                    self._room.set_result(pb.PrefillRoom(start_token=3))

    async def started(self) -> Prompt:
        await until(lambda: "started" in self.events, within_s=60.0)
        return self

    async def outcome(self) -> BaseException | None:
        async with asyncio.timeout(60):
            (outcome,) = await asyncio.gather(self.following, return_exceptions=True)
        return outcome

    async def leave(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)


async def test_prompts_of_a_join_share_one_stream(node: PrefillNode, peer: PrefillPeer) -> None:
    one = Prompt(peer, "a", traceparent="00-a-b-01")
    two = Prompt(peer, "sent")
    assert await two.outcome() is None and two.events == ["room_wanted", "started", "sent"]
    await one.started()
    assert (node.streams, node.calls) == (1, 0) and node.metadata == ["00-a-b-01"]
    await one.leave()
    await until(lambda: "a" in node.over, within_s=60.0)
    assert node.num_open == 1, "the stream stays open for the next prompt"
    assert await Prompt(peer, "sent").outcome() is None and node.streams == 1


@pytest.mark.parametrize("capabilities", [BOTH, CALLS], ids=["stream", "calls"])
@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("full", ResourceExhausted, "prefill queue is full"),
        ("no memory", OutOfMemory, "a step found no memory"),
        ("step failed", EngineError, "a step failed"),
        ("not let in", PeerUnreachable, "decode-0 may not call"),
    ],
)
async def test_the_error_of_a_prompt_is_that_of_its_call(
    node: PrefillNode, peer: PrefillPeer, capabilities: frozenset[str], name: str, kind: type[TransferError], reason: str
) -> None:
    peer.instance = instance(5, capabilities=capabilities)
    other = await Prompt(peer, "other").started()
    error = await Prompt(peer, name).outcome()
    assert type(error) is kind and str(error) == f"{peer.address}: {reason}"
    assert not isinstance(error, EngineError) or error.spares_kv
    assert not other.following.done(), "only its prompt has failed"
    assert (node.streams, node.calls) == ((1, 0) if capabilities is BOTH else (0, 2))
    await other.leave()


async def test_a_stream_that_ends_fails_its_prompts_and_the_next_prompt_opens_another(
    node: PrefillNode, peer: PrefillPeer
) -> None:
    node.raw = [pb.PromptEvent(prompt=1, event=STARTED)]
    first = await Prompt(peer, "a").started()
    node.ends.set()
    error = await first.outcome()
    assert type(error) is PeerUnreachable and "the stream of prompts has ended" in str(error)
    node.raw = []
    assert await Prompt(peer, "sent").outcome() is None and node.streams == 2


@pytest.mark.parametrize("number", [0, 2])
async def test_an_event_of_a_prompt_that_was_not_sent_ends_the_stream(node: PrefillNode, peer: PrefillPeer, number: int) -> None:
    node.raw = [pb.PromptEvent(prompt=number, event=STARTED)]
    error = await Prompt(peer, "a").outcome()
    assert type(error) is TransportError and f"an event of prompt {number}, which was not sent" in str(error)
    await until(lambda: node.num_open == 0, within_s=60.0)


async def test_a_status_that_is_unknown_is_an_error(node: PrefillNode, peer: PrefillPeer) -> None:
    node.raw = [pb.PromptEvent(prompt=1, status=pb.PromptStatus(code=4_000_000, details="new"))]
    error = await Prompt(peer, "a").outcome()
    assert type(error) is TransportError and str(error) == f"{peer.address}: new"


async def test_events_without_end_fail_only_their_prompt(
    node: PrefillNode, peer: PrefillPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is slow must not stop the stream, so events wait in memory, which is bounded."""
    monkeypatch.setattr(stream_module, "MAX_EVENTS", 1)
    node.raw = [pb.PromptEvent(prompt=number, event=STARTED) for number in (1, 1, 1, 1, 2)]
    slow = peer.prefill("slow", (1,), decode_incarnation=7, room=asyncio.get_running_loop().create_future())
    assert await anext(slow) == STARTED
    other = await Prompt(peer, "other").started()
    with pytest.raises(TransportError, match="too many events of one prompt"):
        async for _ in slow:
            pass
    assert not other.following.done() and node.streams == 1
    await other.leave()


async def test_a_prompt_without_a_place_in_the_stream_has_a_call_of_its_own(
    node: PrefillNode, peer: PrefillPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_PROMPTS", 1)
    first = await Prompt(peer, "a").started()
    assert await Prompt(peer, "sent").outcome() is None
    assert (node.streams, node.calls) == (1, 1), "the stream is full"
    await first.leave()
    monkeypatch.setattr(peer_module, "LONG_PROMPT_TOKENS", 5)
    assert await Prompt(peer, "sent", tokens=5).outcome() is None
    assert (node.streams, node.calls) == (1, 2), "its bytes would hold other prompts up"


async def test_a_stream_ends_with_its_join_and_not_before_its_prompts(node: PrefillNode, peer: PrefillPeer) -> None:
    one, two = await Prompt(peer, "a").started(), await Prompt(peer, "b").started()
    peer.retire_stream()
    await one.leave()
    await until(lambda: "a" in node.over, within_s=60.0)
    assert not two.following.done() and node.num_open == 1
    await two.leave()
    await until(lambda: node.num_open == 0, within_s=60.0)
    assert node.over == ["a", "b"]
    assert await Prompt(peer, "sent").outcome() is None and node.streams == 2
    peer.retire_stream()
    await until(lambda: node.num_open == 0, within_s=60.0)
