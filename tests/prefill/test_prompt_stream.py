"""Many prompts in one `StreamPrompts` call: each is served like a call of `PrefillIntoRoom`, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import grpc
import pytest

from tests.decode.leader_world import turns
from tests.decode.local_nodes import LocalContext
from tests.prefill.conftest import Leader
from transfer.connector import prefill_calls as calls_module
from transfer.errors import PeerUnreachable, RemoteProtocolError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry import prompt_stream as stream_module
from transfer.registry.prompt_stream import serve_prompts

CODE = grpc.StatusCode


def begins(number: int, request_id: str = "", **fields: Any) -> pb.PromptMessage:
    values = {"token_ids": (1, 2), "decode_incarnation": 101} | fields
    request = pb.PrefillRequest(request_id=request_id or f"p{number}", **values)
    return pb.PromptMessage(prompt=number, message=pb.PrefillMessage(request=request))


def room(number: int) -> pb.PromptMessage:
    return pb.PromptMessage(prompt=number, message=pb.PrefillMessage(room=pb.PrefillRoom()))


def cancels(number: int) -> pb.PromptMessage:
    return pb.PromptMessage(prompt=number, cancelled=pb.PromptCancelled())


class Caller:
    """A `StreamPrompts` call. Events are collected as (number, kind or status code)."""

    def __init__(self, events: AsyncIterator[pb.PromptEvent], messages: asyncio.Queue[pb.PromptMessage | None]) -> None:
        self._messages = messages
        self.events: list[tuple[int, str | int]] = []
        self.details = ""
        self.error: Exception | None = None
        self.reading = asyncio.ensure_future(self._read(events))

    @classmethod
    def of(cls, leader: Leader) -> Caller:
        messages: asyncio.Queue[pb.PromptMessage | None] = asyncio.Queue()
        return cls(leader.node.StreamPrompts(sent(messages), cast(Any, LocalContext())), messages)

    async def send(self, *messages: pb.PromptMessage | None) -> None:
        for message in messages:
            self._messages.put_nowait(message)
        await turns(24)

    async def leave(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)

    async def _read(self, events: AsyncIterator[pb.PromptEvent]) -> None:
        try:
            async for event in events:
                if event.HasField("status"):
                    self.events.append((event.prompt, event.status.code))
                    self.details = event.status.details
                else:
                    self.events.append((event.prompt, str(event.event.WhichOneof("event"))))
        except (RemoteProtocolError, grpc.aio.AioRpcError) as error:
            self.error = error


async def sent(messages: asyncio.Queue[pb.PromptMessage | None]) -> AsyncIterator[pb.PromptMessage]:
    while (message := await messages.get()) is not None:
        yield message


async def test_prompts_have_room_and_events_of_their_own(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(begins(1))
    await caller.send(begins(2))
    assert caller.events == [(1, "room_wanted"), (2, "room_wanted")]
    await caller.send(room(2))
    assert caller.events[2:] == [(2, "started")], "the first prompt still waits"
    await caller.send(room(1))
    assert caller.events[3:] == [(1, "started")]
    await caller.leave()
    assert all(view.stage == "ending" for view in leader.requests.views()), "the end of the stream gives its prompts up"


async def test_the_error_of_a_prompt_ends_only_that_prompt(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(begins(1), begins(2, decode_incarnation=7), begins(3, token_ids=()), room(4))
    invalid = CODE.INVALID_ARGUMENT.value[0]
    assert set(caller.events) == {(1, "room_wanted"), (2, CODE.UNAVAILABLE.value[0]), (3, invalid), (4, invalid)}
    assert caller.details == "the first message of PrefillIntoRoom must have request"
    await caller.send(room(1))
    assert caller.events[-1] == (1, "started") and caller.error is None
    await caller.leave()


async def test_a_cancelled_prompt_is_given_up_and_the_others_go_on(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(begins(1), begins(2))
    await caller.send(cancels(1), cancels(1))
    assert leader.requests.request_ids == ("p2",)
    await caller.send(room(1), room(2))
    assert caller.events == [(1, "room_wanted"), (2, "room_wanted"), (2, "started")]
    await caller.leave()


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (room(0), "prompt 0; numbers begin at 1"),
        (cancels(9), "cancels prompt 9, which has not begun"),
        (begins(2, "again"), "begins prompt 2, but numbers must increase, and had 3"),
    ],
    ids=["number 0", "unknown number", "number of an ended prompt"],
)
async def test_a_number_against_the_rules_ends_the_stream_and_no_other(
    leader: Leader, message: pb.PromptMessage, complaint: str
) -> None:
    await leader.joined(1)
    caller, other = Caller.of(leader), Caller.of(leader)
    await other.send(begins(1, "other"))
    await caller.send(begins(1), cancels(1), begins(2), cancels(2), begins(3), message)
    assert complaint in str(caller.error)
    await other.send(room(1))
    assert leader.requests.request_ids == ("other",) and other.events == [(1, "room_wanted"), (1, "started")]
    await other.leave()


async def test_messages_out_of_order_end_a_prompt_as_they_end_a_call(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(begins(1))
    await caller.send(begins(1))
    assert caller.events == [(1, "room_wanted"), (1, CODE.INVALID_ARGUMENT.value[0])]
    await caller.send(begins(2), *[room(2)] * 50)
    assert caller.events[-1] == (2, CODE.INVALID_ARGUMENT.value[0])
    assert "takes one message after the first" in caller.details
    await caller.send(room(2), cancels(2), begins(3))
    assert caller.events[-1] == (3, "room_wanted"), "messages that cross the end of a prompt are ignored"
    await caller.leave()


@pytest.mark.parametrize(
    ("message", "code", "complaint"),
    [
        (begins(1, decode_incarnation=7), CODE.UNAVAILABLE, "decode instance 0x0000000000000007 has not joined"),
        (room(1), CODE.INVALID_ARGUMENT, "the first message of StreamPrompts must have request"),
        (None, CODE.INVALID_ARGUMENT, "the first message of StreamPrompts must have request"),
    ],
    ids=["not joined", "room first", "no message"],
)
async def test_only_a_joined_instance_has_a_stream(
    leader: Leader, message: pb.PromptMessage | None, code: grpc.StatusCode, complaint: str
) -> None:
    """Otherwise a peer holds any number of open calls."""
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(message)
    assert isinstance(caller.error, grpc.aio.AioRpcError) and caller.error.code() is code
    assert complaint in str(caller.error.details())


async def test_an_instance_has_few_streams(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_STREAMS", 1)
    await leader.joined(1)
    first, second = Caller.of(leader), Caller.of(leader)
    await first.send(begins(1))
    await second.send(begins(1, "other"))
    assert isinstance(second.error, grpc.aio.AioRpcError) and second.error.code() is CODE.RESOURCE_EXHAUSTED
    await first.leave()
    third = Caller.of(leader)
    await third.send(begins(1, "other"))
    assert third.events == [(1, "room_wanted")]
    await third.leave()


async def test_a_stream_ends_with_its_join(leader: Leader) -> None:
    join = await leader.joined(1)
    caller, idle = Caller.of(leader), Caller.of(leader)
    await caller.send(begins(1))
    await idle.send(begins(1, "other"), cancels(1))
    leader.joins.leave(join, PeerUnreachable("its links are lost"))
    await turns(24)
    assert caller.events == [(1, "room_wanted"), (1, CODE.UNAVAILABLE.value[0])]
    assert caller.details == "its links are lost"
    assert caller.reading.done() and idle.reading.done() and caller.error is None and idle.error is None


async def test_more_prompts_than_a_stream_can_have_are_refused(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_PROMPTS", 1)
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(begins(1))
    await caller.send(begins(2), cancels(1))
    await caller.send(begins(3))
    assert caller.events == [(1, "room_wanted"), (2, CODE.RESOURCE_EXHAUSTED.value[0]), (3, "room_wanted")]
    assert caller.details == "a stream can have 1 prompts at a time"
    await caller.leave()


async def test_the_caller_that_ends_its_side_gives_all_prompts_up(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller.of(leader)
    await caller.send(begins(1), begins(2))
    assert leader.requests.num_transfers == 2
    await caller.send(None)
    assert caller.reading.done() and caller.error is None and not leader.requests.request_ids


class Method:
    """A `PrefillIntoRoom` without a node."""

    def __init__(self) -> None:
        self.traceparents: list[object] = []
        self.num_over = 0

    async def __call__(self, messages: object, context: Any) -> AsyncGenerator[pb.PrefillEvent, None]:
        self.traceparents.append(context.invocation_metadata())
        try:
            for _ in range(5):
                yield pb.PrefillEvent(started=pb.PrefillStarted())
            raise ValueError("a secret")
        finally:
            self.num_over += 1


async def test_a_prompt_has_its_own_trace_and_its_own_bug(caplog: pytest.LogCaptureFixture) -> None:
    messages: asyncio.Queue[pb.PromptMessage | None] = asyncio.Queue()
    method = Method()
    caller = Caller(serve_prompts(sent(messages), method, over=asyncio.get_running_loop().create_future()), messages)
    await caller.send(pb.PromptMessage(prompt=1, traceparent="00-a-b-01"), begins(2))
    assert method.traceparents == [(("traceparent", "00-a-b-01"),), ()]
    assert {event for event in caller.events if isinstance(event[1], int)} == {(1, 2), (2, 2)}, "UNKNOWN, as for a call"
    assert caller.details == "unexpected ValueError; see the log of the node"
    await caller.leave()


async def test_a_caller_that_does_not_read_holds_prompts_up_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNSENT_EVENTS", 7)
    messages: asyncio.Queue[pb.PromptMessage | None] = asyncio.Queue()
    method = Method()
    events = serve_prompts(sent(messages), method, over=asyncio.get_running_loop().create_future())
    for number in range(1, 9):
        messages.put_nowait(begins(number))
    await anext(events)
    await turns(48)
    assert method.num_over < 8, "events wait for their reader"
    async with asyncio.timeout(60):
        await events.aclose()
    assert method.num_over == 8
