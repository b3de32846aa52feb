"""A prompt whose caller gives room in the stream of the call: one question, one answer, and no `Reserve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from prefill_node.rank_messages import StartRequest
from tests.decode.leader_world import turns
from tests.decode.local_nodes import LocalContext
from tests.prefill.conftest import Leader
from tests.prefill.leader_world import World, kind_of
from transfer.connector import prefill_calls as calls_module
from transfer.connector.decode_instances import Reservation
from transfer.errors import RemoteProtocolError, TransferAborted
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto

REQUEST = pb.PrefillMessage(request=pb.PrefillRequest(request_id="a", token_ids=(1, 2), decode_incarnation=101))
ROOM = pb.PrefillMessage(room=pb.PrefillRoom())


class Caller:
    """A `PrefillIntoRoom` call. The test sends the messages, and events are collected."""

    def __init__(self, leader: Leader) -> None:
        self._messages: asyncio.Queue[pb.PrefillMessage | None] = asyncio.Queue()
        self.events: list[str | None] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._call = leader.node.PrefillIntoRoom(self._sent(), cast(Any, LocalContext()))
        self._reading = asyncio.ensure_future(self._read())

    async def send(self, *messages: pb.PrefillMessage | None) -> None:
        for message in messages:
            self._messages.put_nowait(message)
        await turns()

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _sent(self) -> AsyncIterator[pb.PrefillMessage]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def _read(self) -> None:
        try:
            async for event in self._call:
                self.events.append(event.WhichOneof("event"))
        except grpc.aio.AioRpcError as error:
            self.error = error


async def test_a_prompt_starts_once_its_caller_has_given_room() -> None:
    world, room = World(), asyncio.get_running_loop().create_future()
    request = world.submit("a", 3, room=room)
    await turns()
    wanted = pb.PrefillRoomWanted(chunk_plan=chunk_plan_to_proto(request.join.plan))
    assert request.progress.get_nowait() == pb.PrefillEvent(room_wanted=wanted)
    assert not world.sent and not world.asked, "nothing is asked for over the other channel"
    room.set_result(Reservation(is_reserved=True, start_token=2))
    await turns()
    assert kind_of(request.progress.get_nowait()) == "started"
    (start,) = [message for message in world.sent if isinstance(message, StartRequest)]
    assert start.start_token == 2
    world.settle()
    await world.close()


async def test_a_start_token_that_breaks_the_rules_fails_the_prompt() -> None:
    world, room = World(), asyncio.get_running_loop().create_future()
    request = world.submit("a", 3, room=room)
    await turns()
    room.set_result(Reservation(is_reserved=True, start_token=3))
    await turns()
    assert kind_of(request.progress.get_nowait()) == "room_wanted"
    assert isinstance(request.progress.get_nowait(), RemoteProtocolError) and not world.sent
    await world.close()


async def test_a_prompt_that_is_given_up_stops_waiting_for_room() -> None:
    world, room = World(), asyncio.get_running_loop().create_future()
    world.submit("a", 3, room=room)
    await turns()
    assert world.leader.abort("a", TransferAborted("the client left"))
    await turns()
    assert room.cancelled() and not world.leader.num_transfers and not world.broken
    world.submit("b", 3)
    await turns()
    assert world.asked == ["b"], "others go on"
    await world.close()


async def test_a_call_asks_for_room_and_takes_it(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller(leader)
    await caller.send(REQUEST)
    assert caller.events == ["room_wanted"]
    await caller.send(ROOM)
    assert caller.events == ["room_wanted", "started"]
    await caller.leave()
    assert not leader.requests.request_ids or leader.requests.views()[0].stage == "ending"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ((None,), "the first message of PrefillIntoRoom must have request"),
        ((ROOM,), "the first message of PrefillIntoRoom must have request"),
        ((REQUEST, REQUEST), "takes one message after the first: room, once room_wanted was sent"),
        ((REQUEST, ROOM, ROOM), "takes one message after the first"),
        ((REQUEST, pb.PrefillMessage()), "takes one message after the first"),
    ],
    ids=["no message", "room first", "another request", "room twice", "nothing in it"],
)
async def test_messages_out_of_order_end_the_call(
    leader: Leader, messages: tuple[pb.PrefillMessage | None, ...], complaint: str
) -> None:
    await leader.joined(1)
    caller = Caller(leader)
    for message in messages:
        await caller.send(message)
    assert caller.error is not None and caller.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in str(caller.error.details())


async def test_a_call_without_a_first_message_is_refused(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a peer holds any number of open calls."""
    monkeypatch.setattr(calls_module, "FIRST_MESSAGE_S", 0.0)
    caller = Caller(leader)
    await turns()
    assert caller.error is not None and caller.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "within 0 s" in str(caller.error.details())


async def test_room_before_it_is_wanted_ends_the_call(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    await leader.joined(1)
    monkeypatch.setattr(leader.requests, "_ask_for_room", lambda: None)
    caller = Caller(leader)
    await caller.send(REQUEST, ROOM)
    assert caller.events == [] and caller.error is not None
    assert caller.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_early_room_starts_the_prompt_without_a_question(leader: Leader) -> None:
    join = await leader.joined(1)
    caller = Caller(leader)
    early = pb.PrefillMessage()
    early.CopyFrom(REQUEST)
    early.request.early_room_plan.CopyFrom(chunk_plan_to_proto(join.plan_of(2, 0)))
    await caller.send(early)
    assert caller.events == [] and caller.error is None, "the decode side's ranks do not expect the KV yet"
    await caller.send(ROOM)
    assert caller.events == ["started"]
    await caller.leave()


async def test_early_room_for_another_plan_is_refused(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller(leader)
    early = pb.PrefillMessage()
    early.CopyFrom(REQUEST)
    early.request.early_room_plan.chunk_tokens = 7
    await caller.send(early)
    assert caller.error is not None and caller.error.code() is grpc.StatusCode.UNAVAILABLE, "the next attempt asks for room"
    assert "early_room_plan has chunk_tokens 7, layers_per_group 0 and token_layers 0" in str(caller.error.details())
    assert not leader.requests.request_ids


async def test_a_caller_that_ends_its_side_without_room_gives_its_prompt_up(leader: Leader) -> None:
    await leader.joined(1)
    caller = Caller(leader)
    await caller.send(REQUEST, None)
    assert caller.error is not None and caller.error.code() is grpc.StatusCode.ABORTED
    assert not leader.requests.request_ids
