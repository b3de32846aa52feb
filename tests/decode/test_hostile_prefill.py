"""A prefill node that answers anything: the join fails with a reason and is tried again, and no rank hears of what cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from decode_node.peers import PrefillPeers
from decode_node.prefill_peer import PrefillPeer
from tests.registry.hostile_messages import hostile_messages
from tests.runtime.instances import instance
from transfer.breaker import BreakerSettings
from transfer.chunk import ChunkPlan
from transfer.engine_types import SamplingParams
from transfer.errors import TransferError, TransportError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto, instance_to_proto, layout_from_proto

PLAN = ChunkPlan(chunk_tokens=4)
VOCABULARY = 100


class HostileNode:
    """A server whose answers are bytes."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.server = grpc.aio.server()
        service = pb.DESCRIPTOR.services_by_name["PrefillControl"]
        handlers = {one.name: grpc.unary_stream_rpc_method_handler(self._answer) for one in service.methods}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.lost: list[str] = []
        self.peers = PrefillPeers(
            [f"127.0.0.1:{port}"],
            own=instance(7),
            decode_address="decode:1",
            rank_addresses=("rank:1",),
            heartbeat_s=1.0,
            ring_capacity_bytes=1 << 16,
            vocab_size=VOCABULARY,
            breaker=BreakerSettings(failures=3, window_s=10.0, pause_s=1.0, max_pause_s=4.0),
            on_lost=lambda peer, incarnation, reason: self.lost.append(reason),
            on_breaker_opened=lambda: None,
        )

    async def _answer(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        for answer in self.answers:
            yield answer

    @property
    def peer(self) -> PrefillPeer:
        return self.peers.peers[0]


@pytest.fixture
async def node() -> AsyncIterator[HostileNode]:
    one = HostileNode()
    await one.server.start()
    yield one
    await one.peers.close()
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
    """Whatever it is: an error of ours, with one line. Anything else would end the task that joins."""
    for hostile in hostile_messages(joined(), retell):
        node.answers = [hostile.payload]
        with pytest.raises(TransferError) as caught:
            await asyncio.wait_for(node.peers._join_once(node.peer), 20)
        assert len(str(caught.value).splitlines()) == 1, f"{hostile}: {caught.value}"
        node.peers._lose(node.peer, caught.value)
        assert node.peer.state == "lost" and node.peer.instance is None
    node.answers = [joined().SerializeToString()]
    with pytest.raises(TransferError, match="ended the join"):
        await node.peers._join_once(node.peer)
    assert node.peer.instance is not None, "an honest one is joined until it ends"


async def test_every_field_of_a_beat(node: HostileNode) -> None:
    """The join goes on, and what it tells is nothing or can be; bytes that are no event end it with a reason."""
    told: set[int | None] = set()
    for hostile in hostile_messages(pb.JoinEvent(beat=pb.Beat(others_tokens=600))):
        node.answers = [joined().SerializeToString(), hostile.payload]
        with pytest.raises(TransferError) as caught:
            await asyncio.wait_for(node.peers._join_once(node.peer), 20)
        assert len(str(caught.value).splitlines()) == 1, f"{hostile}: {caught.value}"
        told.add(node.peer.others_tokens)
        node.peers._lose(node.peer, caught.value)
        assert node.peer.others_tokens is None
    assert told == {None, 0}


async def test_more_links_than_there_can_be_are_not_read(node: HostileNode) -> None:
    event = joined()
    event.joined.links.extend([event.joined.links[0]] * 100_000)
    node.answers = [event.SerializeToString()]
    with pytest.raises(TransferError, match="links has 100001 entries; there can be 16384"):
        await node.peers._join_once(node.peer)


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
            await asyncio.wait_for(read(node), 20)
        except TransferError as error:
            assert len(str(error).splitlines()) == 1, f"{hostile}: {error}"
