"""A prompt's call to a prefill node, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.decode.local_nodes import Tier
from transfer.connector.prefill_peer import PrefillPeer
from transfer.engine_types import SamplingParams
from transfer.errors import PeerUnreachable, ResourceExhausted, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.server import serve


class PrefillNode(pb_grpc.PrefillControlServicer):
    """Starts every prompt; refuses some by their ids, and computes the others for ever."""

    def __init__(self) -> None:
        self.is_call_over = asyncio.Event()

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        yield pb.PrefillEvent(started=pb.PrefillStarted(queue_s=0.5))
        if request.request_id == "not let in":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "decode-0 may not call PrefillControl/Prefill")
        if request.request_id == "full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "prefill queue is full")
        try:
            await asyncio.Event().wait()
        finally:
            self.is_call_over.set()


@pytest.fixture
async def node() -> PrefillNode:
    return PrefillNode()  # type: ignore[abstract]  # the other calls are answered UNIMPLEMENTED


@pytest.fixture
async def peer(node: PrefillNode) -> AsyncIterator[PrefillPeer]:
    server = await serve("127.0.0.1", 0, prefill_control=node)
    one = Tier([f"127.0.0.1:{server.port}"])
    yield one.peers.peers[0]
    await one.peers.close()
    await server.close()


async def test_a_call_yields_what_the_node_reports_and_ends_with_the_iterator(node: PrefillNode, peer: PrefillPeer) -> None:
    events = peer.prefill("a", (1, 2), decode_incarnation=7, sampling=SamplingParams())
    assert (await anext(events)).started.queue_s == 0.5
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    async with asyncio.timeout(60):
        await node.is_call_over.wait()


@pytest.mark.parametrize(
    ("request_id", "kind", "reason"),
    [
        ("full", ResourceExhausted, "prefill queue is full"),
        # The node is to blame, and not the request: another node may know this one.
        ("not let in", PeerUnreachable, "decode-0 may not call PrefillControl/Prefill"),
    ],
)
async def test_a_failed_call_is_an_error_of_ours(
    peer: PrefillPeer, request_id: str, kind: type[TransferError], reason: str
) -> None:
    events = peer.prefill(request_id, (1,), decode_incarnation=7, sampling=SamplingParams())
    await anext(events)
    with pytest.raises(kind, match=reason):
        await anext(events)


async def test_a_node_that_does_not_listen_is_unreachable() -> None:
    one = Tier(["127.0.0.1:1"])
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1"):
        await anext(one.peers.peers[0].prefill("a", (1,), decode_incarnation=7, sampling=SamplingParams()))
    await one.peers.close()
