"""An attach and its answer, with a valid value in every field, and a server of the test's services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from transfer.chunk import ChunkPlan
from transfer.instance import AttachRequest, AttachResponse, Instance
from transfer.layout import DType, KVLayout, Shard
from transfer.registry.server import RegistryServer, serve

LLAMA = KVLayout.uniform(num_layers=8, num_kv_heads=12, head_dim=32, dtype=DType.FLOAT32)


def instance(incarnation: int = 5, **changes: Any) -> Instance:
    values: dict[str, Any] = {
        "layout": LLAMA,
        "shard": Shard(tp_size=2, dtype=DType.FLOAT32),
        "transport": "ucx",
        "digests": ("xxh3-64",),
        "protocol_versions": (1,),
    }
    return Instance(incarnation=incarnation, **values | changes)


def attach_request(prefill: Instance | None = None, **changes: Any) -> AttachRequest:
    values: dict[str, Any] = {
        "prefill_rank": 0,
        "offer": b"offer",
        "chunk_plan": ChunkPlan(chunk_tokens=16),
        "probe_bytes": 4096,
        "control_key": bytes(32),
    }
    return AttachRequest(prefill=prefill or instance(), **values | changes)


def attach_response(decode: Instance | None = None, **changes: Any) -> AttachResponse:
    values: dict[str, Any] = {
        "session_id": 77,
        "decode_rank": 1,
        "answer": b"answer",
        "ring_capacity_bytes": 1 << 20,
        "control_address": "tcp://127.0.0.1:1",
        "heartbeat_s": 0.5,
        "protocol_version": 1,
        "probe_bytes": 4096,
        "control_key": bytes(range(32)),
    }
    return AttachResponse(decode=decode or instance(9), **values | changes)


@asynccontextmanager
async def serving(host: str = "127.0.0.1", port: int = 0, **services: Any) -> AsyncIterator[RegistryServer]:
    server = await serve(host, port, **services)
    try:
        yield server
    finally:
        await server.close()
