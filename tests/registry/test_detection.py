"""A killed or frozen process is noticed within 2 s, at the heartbeat that nodes use: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from transfer.chunk import ChunkPlan
from transfer.instance import AttachRequest, AttachResponse, Instance
from transfer.layout import DType, KVLayout, Shard
from transfer.registry.client import TransferControlClient
from transfer.registry.server import TransferControlServicer, serve
from transfer.ring import Watermark

HEARTBEAT_S = 0.5
WITHIN_S = 2.0
STEP_S = 0.01

COMMON = """
import asyncio, sys
from transfer.chunk import ChunkPlan
from transfer.instance import AttachRequest, AttachResponse, Instance
from transfer.layout import DType, KVLayout, Shard
from transfer.registry.client import TransferControlClient
from transfer.registry.server import TransferControlServicer, serve
from transfer.ring import Watermark

def instance(incarnation):
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype=DType.FLOAT32)
    cut = dict(layout=layout, shard=Shard())
    return Instance(incarnation=incarnation, **cut, transport="ucx", digests=("d",), protocol_versions=(1,))

def say(text):
    print(text, flush=True)
"""

WRITER = (
    COMMON
    + """
async def main():
    client = TransferControlClient(sys.argv[1])
    request = AttachRequest(prefill=instance(5), prefill_rank=0, offer=b"", chunk_plan=ChunkPlan(chunk_tokens=8),
                            probe_bytes=4096)
    answer = await client.attach(request, timeout_s=10)
    client.watch(answer.session_id, ring_capacity_bytes=4096, heartbeat_s=0.5,
                 on_watermark=lambda _: say("alive"), on_lost=lambda reason: say("lost " + reason))
    await asyncio.sleep(60)
asyncio.run(main())
"""
)

SERVER = (
    COMMON
    + """
async def attach(request):
    return AttachResponse(session_id=77, decode=instance(9), decode_rank=0, answer=b"", ring_capacity_bytes=4096,
                          control_address="tcp://x:1", heartbeat_s=0.5, protocol_version=1, probe_bytes=4096)

async def main():
    servicer = TransferControlServicer(watermark=Watermark(incarnation=9, sequence=1, position=0), ring_capacity_bytes=4096,
        heartbeat_s=0.5, on_attach=attach, on_session_lost=lambda session_id, reason: say("lost " + reason))
    server = await serve("127.0.0.1", 0, transfer_control=servicer)
    say(server.address)
    await asyncio.sleep(60)
asyncio.run(main())
"""
)


def instance(incarnation: int) -> Instance:
    layout = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype=DType.FLOAT32)
    return Instance(
        incarnation=incarnation,
        layout=layout,
        shard=Shard(dtype=DType.FLOAT32),
        transport="ucx",
        digests=("d",),
        protocol_versions=(1,),
    )


@asynccontextmanager
async def child(code: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process, begins: str = "") -> str:
    """The next line of the child that begins so."""
    assert process.stdout is not None
    while True:
        text = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
        assert text, "the child ended"
        if text.startswith(begins):
            return text


async def told_in_time(lost: asyncio.Queue[str]) -> None:
    """Wait `WITHIN_S` for the loss, counted in steps as `BeatWatch` counts: time in which this process was not run is none."""
    for _ in range(round(WITHIN_S / STEP_S)):
        if not lost.empty():
            lost.get_nowait()
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError(f"nothing noticed within {WITHIN_S} s")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_writer_is_noticed(how: signal.Signals) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()

    async def attach(_: AttachRequest) -> AttachResponse:
        return AttachResponse(
            session_id=77,
            decode=instance(9),
            decode_rank=0,
            answer=b"",
            ring_capacity_bytes=4096,
            control_address="tcp://x:1",
            heartbeat_s=HEARTBEAT_S,
            protocol_version=1,
            probe_bytes=4096,
        )

    servicer = TransferControlServicer(
        watermark=Watermark(incarnation=9, sequence=1, position=0),
        ring_capacity_bytes=4096,
        heartbeat_s=HEARTBEAT_S,
        on_attach=attach,
        on_session_lost=lambda _, reason: lost.put_nowait(reason),
    )
    server = await serve("127.0.0.1", 0, transfer_control=servicer)
    try:
        async with child(WRITER, server.address) as process:
            for _ in range(3):
                await line(process, "alive")
            process.send_signal(how)
            await told_in_time(lost)
            if how is signal.SIGSTOP:
                # Woken, the writer finds that its session is over, and that it was told so.
                process.send_signal(signal.SIGCONT)
                assert "beats of 0.5 s missed" in await line(process, "lost")
        await asyncio.sleep(HEARTBEAT_S)
        assert lost.empty()
    finally:
        await server.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_decode_rank_is_noticed(how: signal.Signals) -> None:
    seen: asyncio.Queue[Watermark] = asyncio.Queue()
    lost: asyncio.Queue[str] = asyncio.Queue()
    async with child(SERVER) as process:
        client = TransferControlClient(await line(process, "127.0.0.1:"))
        request = AttachRequest(
            prefill=instance(5), prefill_rank=0, offer=b"", chunk_plan=ChunkPlan(chunk_tokens=8), probe_bytes=4096
        )
        answer = await client.attach(request, timeout_s=20)
        client.watch(
            answer.session_id,
            ring_capacity_bytes=4096,
            heartbeat_s=HEARTBEAT_S,
            on_watermark=seen.put_nowait,
            on_lost=lost.put_nowait,
        )
        for _ in range(3):
            await asyncio.wait_for(seen.get(), 5)
        process.send_signal(how)
        await told_in_time(lost)
        if how is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            await line(process, "lost")
        await asyncio.sleep(HEARTBEAT_S)
        assert lost.empty()
        await client.close()
