"""A decode node that answers anything, as the prefill side hears it: an error of ours in one line, and no rank that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvferry.cli.node_client import NodeClient
from tests.registry.attaches import attach_request, attach_response
from tests.registry.hostile_messages import hostile_messages
from tests.registry.loop_errors import record_loop_errors
from tests.registry.test_hostile_fields import PLAN, retell, told
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.reserve_client import ReserveClient
from transfer.errors import RemoteProtocolError, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.client import TransferControlClient
from transfer.registry.convert import attach_response_to_proto, watermark_to_proto
from transfer.registry.security import PlainText
from transfer.ring import Grant, Watermark

RING_BYTES = 1 << 16
WITHIN_S = 60.0


class HostileNode:
    """A server whose answers are bytes."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.complaints = record_loop_errors()
        self.server = grpc.aio.server()
        for service in ("DecodeControl", "TransferControl"):
            found = pb.DESCRIPTOR.services_by_name[service]
            handlers = {one.name: self._handler(one) for one in found.methods}
            self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(found.full_name, handlers),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def _handler(self, method: Any) -> Any:
        async def one(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            return self.answers[0]

        async def several(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            for answer in self.answers:
                yield answer

        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(several)
        return (
            grpc.unary_stream_rpc_method_handler(several) if method.server_streaming else grpc.unary_unary_rpc_method_handler(one)
        )


@pytest.fixture
async def node() -> AsyncIterator[HostileNode]:
    one = HostileNode()
    await one.server.start()
    yield one
    await one.server.stop(0)
    assert one.complaints == []


ATTACH = attach_request(told(44), chunk_plan=PLAN)
ANSWER = attach_response_to_proto(attach_response(told(5, tp_size=2), ring_capacity_bytes=RING_BYTES))


async def test_every_field_of_an_attachs_answer(node: HostileNode) -> None:
    client = TransferControlClient(node.address)
    for hostile in hostile_messages(ANSWER, retell):
        node.answers = [hostile.payload]
        try:
            found = await client.attach(ATTACH, timeout_s=WITHIN_S)
        except TransferError as error:
            assert len(str(error).splitlines()) == 1, f"{hostile}: {error}"
        else:
            assert found.probe_bytes <= 4096 and 0 < found.heartbeat_s <= 10, str(hostile)
    node.answers = [ANSWER.SerializeToString()]
    assert (await client.attach(ATTACH, timeout_s=WITHIN_S)).session_id == 77
    await client.close()


async def test_every_field_of_a_watermark(node: HostileNode) -> None:
    """Taken in, or the end of the session with a reason."""
    mark = Watermark(incarnation=5, sequence=3, position=RING_BYTES + 256, released=(Grant(RING_BYTES + 512, RING_BYTES + 768),))
    honest = watermark_to_proto(mark, ring_capacity_bytes=RING_BYTES)
    client = TransferControlClient(node.address)
    heard: list[Watermark] = []
    for hostile in hostile_messages(honest):
        node.answers = [hostile.payload]
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watch = client.watch(
            7, ring_capacity_bytes=RING_BYTES, heartbeat_s=5.0, on_watermark=heard.append, on_lost=lost.set_result
        )
        reason = await asyncio.wait_for(lost, WITHIN_S)
        assert reason and len(reason.splitlines()) == 1, f"{hostile}: {reason}"
        assert "watching the session failed" not in reason, f"{hostile}: {reason}"
        watch.close()
        await watch.wait_closed()
    assert heard and all(0 <= one.position < 2**63 and len(one.released) <= 64 for one in heard)
    await client.close()


@pytest.mark.parametrize("payload", [b"\xff" * 9, b"", b"\x08\x02", b"\x0a\x00", b"\x08\x01\x10\x03"])
async def test_unreadable_and_valid_answers_of_reserve(node: HostileNode, payload: bytes) -> None:
    """An answer that cannot be read fails its request; as an error of another kind it would end the ranks."""
    client = ReserveClient(PlainText())
    join = cast(Join, SimpleNamespace(address=node.address, incarnation=5, plan=PLAN))
    node.answers = [payload]
    if payload[:1] == b"\xff":
        with pytest.raises(RemoteProtocolError, match="an answer of Reserve cannot be read"):
            await client.reserve(join, "a", join.plan, prefill_incarnation=1)
    else:
        told = {b"\x08\x02": Reservation(is_reserved=True), b"\x08\x01\x10\x03": Reservation(is_reserved=True, start_token=3)}
        answer = await client.reserve(join, "a", join.plan, prefill_incarnation=1)
        assert answer == told.get(payload, Reservation(is_reserved=False))
    await client.close()


CALLS: dict[str, Callable[[NodeClient], Any]] = {
    "status": lambda client: client.status(timeout_s=WITHIN_S),
    "abort": lambda client: client.abort("a", timeout_s=WITHIN_S),
}


@pytest.mark.parametrize("call", CALLS)
async def test_an_operators_client(node: HostileNode, call: str) -> None:
    node.answers = [b"\xff" * 9]
    async with NodeClient(node.address) as client:
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            await CALLS[call](client)
