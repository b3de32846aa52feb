"""A killed or frozen process is noticed within 2 s, at the heartbeat that nodes use: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from transfer.chunk import ChunkPlan
from transfer.instance import AttachRequest, AttachResponse, Instance, Link
from transfer.layout import DType, KVLayout, Shard
from transfer.registry.client import TransferControlClient
from transfer.registry.heartbeats import HeartbeatWatch
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
                            probe_bytes=4096, control_key=bytes(32))
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
    if len(sys.argv) > 1:
        asyncio.get_running_loop().call_later(float(sys.argv[1]), lambda: servicer.close_session(77, "closed on purpose"))
    return AttachResponse(session_id=77, decode=instance(9), decode_rank=0, answer=b"", ring_capacity_bytes=4096,
                          control_address="tcp://x:1", heartbeat_s=0.5, protocol_version=1, probe_bytes=4096,
                          control_key=bytes(32))

async def main():
    global servicer
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


ATTACH = AttachRequest(
    prefill=instance(5),
    prefill_rank=0,
    offer=b"",
    chunk_plan=ChunkPlan(chunk_tokens=8),
    probe_bytes=4096,
    control_key=bytes(32),
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


class Heard:
    """Counts the heartbeats that this process hears of its peer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_heartbeats = 0
        on_heartbeat = HeartbeatWatch.on_heartbeat

        def counted(heartbeats: HeartbeatWatch) -> None:
            self.num_heartbeats += 1
            on_heartbeat(heartbeats)

        monkeypatch.setattr(HeartbeatWatch, "on_heartbeat", counted)

    async def told_in_time(self, lost: asyncio.Queue[str]) -> str:
        """Wait `WITHIN_S` for the loss, and return its reason.

        Counted in steps as `HeartbeatWatch` counts: time in which this process was not run is none. A heartbeat that was
        under way when the peer died, and that a busy machine hands over late, is a sign of life; there can be one, for the next
        would be due later than the loss.
        """
        num_steps, num_heartbeats, is_late = 0, self.num_heartbeats, False
        while lost.empty():
            assert num_steps < round(WITHIN_S / STEP_S), f"nothing noticed within {WITHIN_S} s"
            await asyncio.sleep(STEP_S)
            num_steps += 1
            if self.num_heartbeats > num_heartbeats and not is_late:
                num_steps, is_late = 0, True
        return lost.get_nowait()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return Heard(monkeypatch)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_writer_is_noticed(how: signal.Signals, heard: Heard) -> None:
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
            control_key=bytes(32),
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
            assert lost.empty()
            process.send_signal(how)
            reason = await heard.told_in_time(lost)
            if how is signal.SIGSTOP:
                assert "heartbeats of 0.5 s missed" in reason
                # Woken, the writer finds that its session is over, and that it was told so.
                process.send_signal(signal.SIGCONT)
                assert "heartbeats of 0.5 s missed" in await line(process, "lost")
        await asyncio.sleep(HEARTBEAT_S)
        assert lost.empty()
    finally:
        await server.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_decode_rank_is_noticed(how: signal.Signals, heard: Heard) -> None:
    seen: asyncio.Queue[Watermark] = asyncio.Queue()
    lost: asyncio.Queue[str] = asyncio.Queue()
    async with child(SERVER) as process:
        client = TransferControlClient(await line(process, "127.0.0.1:"))
        answer = await client.attach(ATTACH, timeout_s=20)
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
        await heard.told_in_time(lost)
        if how is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            await line(process, "lost")
        await asyncio.sleep(HEARTBEAT_S)
        assert lost.empty()
        await client.close()


async def test_a_writer_that_was_away_hears_why_its_session_ended() -> None:
    """Its heartbeat is overdue and goes out at once; gRPC refuses it, and would tell of that in place of the reason."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    with subprocess.Popen([sys.executable, "-c", SERVER, "1.0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            client = TransferControlClient(process.stdout.readline().strip())
            answer = await client.attach(ATTACH, timeout_s=20)
            watch = client.watch(
                answer.session_id,
                ring_capacity_bytes=answer.ring_capacity_bytes,
                heartbeat_s=HEARTBEAT_S,
                on_watermark=lambda _: None,
                on_lost=lost.put_nowait,
            )
            await asyncio.sleep(HEARTBEAT_S / 2)
            assert "closed on purpose" in process.stdout.readline()  # blocks: the loop is away until the session is over
            time.sleep(2 * HEARTBEAT_S)
            watch.report_link(Link(prefill_rank=0, decode_rank=0, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=4e9))
            # That heartbeat would go out before the loop looks at anything else.
            assert "closed on purpose" in await asyncio.wait_for(lost.get(), 10)
            await client.close()
        finally:
            process.kill()
