"""A prefill node that answers anything: the join fails with a reason and is tried again, and no rank hears of what cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from tests.decode.local_nodes import Tier
from tests.registry.hostile_messages import hostile_messages
from tests.runtime.instances import instance, until
from transfer.chunk import ChunkPlan
from transfer.connector import prefill_nodes as peers_module
from transfer.engine_types import SamplingParams
from transfer.errors import TransferError, TransportError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto, instance_to_proto, layout_from_proto

PLAN = ChunkPlan(chunk_tokens=4)
VOCABULARY = 100


class HostileNode:
    """A server whose answers are bytes: of each call to `Join` the next of `joins`, of each other one those of `answers`."""

    def __init__(self) -> None:
        self.joins: list[list[bytes]] = []
        self.answers: list[bytes] = []
        self.reasons: list[str] = []  # of joins that ended
        self.server = grpc.aio.server()
        service = pb.DESCRIPTOR.services_by_name["PrefillControl"]
        handlers = {
            "Join": grpc.unary_stream_rpc_method_handler(self._join),
            "Prefill": grpc.unary_stream_rpc_method_handler(self._prefill),
            "StreamPrompts": grpc.stream_stream_rpc_method_handler(self._stream_prompts),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.tier = Tier(
            [f"127.0.0.1:{port}"], heartbeat_s=10.0, ring_bytes=1 << 16, vocab_size=VOCABULARY, on_change=self._on_change
        )
        (self.peer,) = self.tier.peers.peers

    async def _join(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        if not self.joins:
            await asyncio.Event().wait()
        for answer in self.joins.pop(0):
            yield answer

    async def _prefill(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        for answer in self.answers:
            yield answer

    async def _stream_prompts(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        await anext(requests)
        for answer in self.answers:
            yield answer

    def _on_change(self) -> None:
        if self.peer.state == "lost":
            assert self.peer.instance is None and self.peer.others_tokens is None
            self.reasons.append(self.peer.reason)

    async def join_all(self) -> list[str]:
        """Join until every answer was heard; returns why each join ended."""
        num_joins = len(self.joins)
        self.tier.peers.start()
        await until(lambda: len(self.reasons) == num_joins, within_s=60.0)
        assert not self.tier.num_faults, "only errors of ours: a bug in reading would have ended the task that joins"
        assert all(len(reason.splitlines()) == 1 for reason in self.reasons)
        return self.reasons


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HostileNode]:
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(peers_module, name, 0.0)
    one = HostileNode()
    await one.server.start()
    yield one
    await one.tier.peers.close()
    await one.server.stop(0)


def joined() -> pb.JoinEvent:
    told = instance_to_proto(instance(5))
    told.capabilities.append("layer_groups")
    told.version = "1"
    link = pb.LinkStatus(prefill_rank=0, decode_rank=0, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    return pb.JoinEvent(joined=pb.Joined(prefill=told, chunk_plan=chunk_plan_to_proto(PLAN), links=[link]))


def retell(event: pb.JoinEvent) -> None:
    info = event.joined.prefill
    try:
        info.layout_fingerprint = layout_from_proto(info.layout).fingerprint()
    except TransferError:
        return


async def test_every_field_of_a_join_as_no_honest_node_has_it(node: HostileNode) -> None:
    """Whatever it is, the join ends with a reason. An honest answer after it joins the node until the call ends."""
    node.joins = [[hostile.payload] for hostile in hostile_messages(joined(), retell)]
    node.joins.append([joined().SerializeToString()])
    reasons = await node.join_all()
    assert "ended the join" in reasons[-1]
    assert node.tier.lost[-1][2] == reasons[-1], "it was joined"


async def test_every_field_of_a_beat(node: HostileNode) -> None:
    """The join goes on, or bytes that are no event end it with a reason."""
    heartbeats = hostile_messages(pb.JoinEvent(beat=pb.Beat(others_tokens=600)))
    node.joins = [[joined().SerializeToString(), hostile.payload] for hostile in heartbeats]
    await node.join_all()


async def test_more_links_than_there_can_be_are_not_read(node: HostileNode) -> None:
    event = joined()
    event.joined.links.extend([event.joined.links[0]] * 100_000)
    node.joins = [[event.SerializeToString()]]
    (reason,) = await node.join_all()
    assert "links has 100001 entries; there can be 16384" in reason


async def read(node: HostileNode) -> list[pb.PrefillEvent]:
    call = node.peer.prefill("a", (1, 2), decode_incarnation=7, sampling=SamplingParams())
    return [event async for event in call]


@pytest.mark.parametrize("token", [VOCABULARY, 2**31, 2**32 - 1])
async def test_a_first_token_that_the_model_does_not_have_fails_its_request(node: HostileNode, token: int) -> None:
    """Handed on, it would fail the step of every request, and with it the ranks."""
    node.answers = [pb.PrefillEvent(first_token=pb.FirstToken(token_id=token)).SerializeToString()]
    with pytest.raises(TransportError, match=f"first_token.token_id is {token}; ids are below the vocabulary's {VOCABULARY}"):
        await read(node)
    node.answers = [pb.PrefillEvent(first_token=pb.FirstToken(token_id=VOCABULARY - 1)).SerializeToString()]
    assert len(await read(node)) == 1


EVENTS: tuple[Callable[[], pb.PrefillEvent], ...] = (
    lambda: pb.PrefillEvent(started=pb.PrefillStarted(queue_s=1.0)),
    lambda: pb.PrefillEvent(first_token=pb.FirstToken(token_id=5, compute_s=1.0)),
    lambda: pb.PrefillEvent(sent=pb.PrefillSent(stats=pb.TransferStats(bytes=1, writes=1, transfer_s=1.0, resends=1))),
)


@pytest.mark.parametrize("event", EVENTS)
async def test_every_field_of_what_becomes_of_a_prompt(node: HostileNode, event: Callable[[], pb.PrefillEvent]) -> None:
    for hostile in hostile_messages(event()):
        node.answers = [hostile.payload]
        try:
            await asyncio.wait_for(read(node), 60)
        except TransferError as error:
            assert len(str(error).splitlines()) == 1, f"{hostile}: {error}"


@pytest.mark.parametrize(
    "event",
    [
        pb.PromptEvent(prompt=1, event=pb.PrefillEvent(started=pb.PrefillStarted(queue_s=1.0))),
        pb.PromptEvent(prompt=1, status=pb.PromptStatus(code=14, details="a reason", spares_kv=True)),
    ],
    ids=["event", "status"],
)
async def test_every_field_of_an_event_in_a_stream(node: HostileNode, event: pb.PromptEvent) -> None:
    """The prompt ends, and the next one gets the next answer."""
    node.peer.instance = instance(5, capabilities=frozenset({"room_in_stream", "prompt_stream"}))
    for hostile in hostile_messages(event):
        node.answers = [hostile.payload]
        room: asyncio.Future[pb.PrefillRoom] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(60):
                async for _ in node.peer.prefill("a", (1, 2), decode_incarnation=7, room=room):
                    pass
        except TransferError as error:
            assert len(str(error).splitlines()) == 1, f"{hostile}: {error}"
