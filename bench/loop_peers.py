"""The other side of `bench.loop`'s cases with 256 peers, in a process of its own: writers of a decode rank, or prefill nodes.

python -m bench.loop_peers writers ADDRESS NUMBER       attach to that decode rank, and keep the sessions
python -m bench.loop_peers prefill-nodes NUMBER         print their ports; let anybody join, and send heartbeats
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from transfer.chunk import ChunkPlan
from transfer.instance import AttachRequest, Instance, Link
from transfer.layout import DType, KVLayout, Shard
from transfer.messages import PROTOCOL_VERSIONS
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.client import TransferControlClient
from transfer.registry.convert import chunk_plan_to_proto, instance_to_proto, link_to_proto

HEARTBEAT_S = 0.5
NUM_RANKS = 8  # of each prefill node
PLAN = ChunkPlan(chunk_tokens=128)
LAYOUT = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)


def instance(incarnation: int, *, tp_size: int = NUM_RANKS) -> Instance:
    return Instance(
        incarnation=incarnation,
        layout=LAYOUT,
        shard=Shard(tp_size=tp_size),
        transport="ucx",
        digests=("xxh3-64",),
        protocol_versions=PROTOCOL_VERSIONS,
    )


async def write(address: str, number: int) -> None:
    """Be so many writers until the decode rank ends. Each has a connection of its own."""
    clients = []
    for writer in range(number):
        client = TransferControlClient(address)
        request = AttachRequest(
            prefill=instance(1000 + writer // NUM_RANKS),
            prefill_rank=writer % NUM_RANKS,
            offer=b"offer",
            chunk_plan=PLAN,
            probe_bytes=4096,
            control_key=bytes(32),
        )
        answer = await client.attach(request, timeout_s=30.0)
        client.watch(
            answer.session_id,
            ring_capacity_bytes=answer.ring_capacity_bytes,
            heartbeat_s=answer.heartbeat_s,
            on_watermark=lambda watermark: None,
            on_lost=lambda reason: None,
        )
        clients.append(client)
    print("ready", flush=True)
    await asyncio.Event().wait()


class _PrefillNodes(pb_grpc.PrefillControlServicer):
    """Serve joins; each address belongs to another node."""

    def __init__(self) -> None:
        self._incarnations: dict[str, int] = {}

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncIterator[pb.JoinEvent]:
        incarnation = self._incarnations.setdefault(request.prefill_address, 1000 + len(self._incarnations))
        links = [
            Link(prefill_rank=rank, decode_rank=0, lane="ucx/net", latency_s=1e-5, bandwidth_bytes_per_s=1e10)
            for rank in range(NUM_RANKS)
        ]
        joined = pb.Joined(
            prefill=instance_to_proto(instance(incarnation)),
            chunk_plan=chunk_plan_to_proto(PLAN),
            links=[link_to_proto(link) for link in links],
        )
        yield pb.JoinEvent(joined=joined)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            yield pb.JoinEvent(beat=pb.Beat(others_tokens=7))


async def be_prefill_nodes(number: int) -> None:
    """Serve on so many ports until killed."""
    server = grpc.aio.server()
    pb_grpc.add_PrefillControlServicer_to_server(_PrefillNodes(), server)  # type: ignore[abstract]  # nothing else is called
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(number)]
    await server.start()
    print(*ports, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(write(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "writers" else be_prefill_nodes(int(sys.argv[2])))
