"""A killed or frozen process is noticed within 2 s, at the heartbeat that nodes use: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.links.session_ends import CLOSED, HEARTBEAT_S, attached, rank
from transfer.instance import Link
from transfer.registry.heartbeats import HeartbeatWatch
from transfer.ring import Watermark

WITHIN_S = 2.0
STEP_S = 0.01

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "tests.cluster.links.session_ends")


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
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

        def counted(heartbeats: HeartbeatWatch, idle_s: float = 0.0) -> None:
            self.num_heartbeats += 1
            on_heartbeat(heartbeats, idle_s)

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

    async with rank(lost.put_nowait) as server:
        async with child("writer", server.address) as process:
            for _ in range(3):
                await line(process, "alive")
            assert lost.empty()
            process.send_signal(how)
            reason = await heard.told_in_time(lost)
            if how is signal.SIGSTOP:
                assert "heartbeats of 0.5 s missed" in reason
                # When it goes on, the writer learns that its session is over, and why.
                process.send_signal(signal.SIGCONT)
                assert "heartbeats of 0.5 s missed" in await line(process, "lost")
        await asyncio.sleep(HEARTBEAT_S)
        assert lost.empty()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_decode_rank_is_noticed(how: signal.Signals, heard: Heard) -> None:
    seen: asyncio.Queue[Watermark] = asyncio.Queue()
    lost: asyncio.Queue[str] = asyncio.Queue()
    async with child("rank") as process:
        client, _ = await attached(await line(process, "127.0.0.1:"), seen.put_nowait, lost.put_nowait)
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


async def test_a_writer_that_was_stopped_gets_the_reason_of_the_end() -> None:
    """Its heartbeat is overdue and goes out at once; gRPC refuses it, and would tell of that in place of the reason."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    with subprocess.Popen([*COMMAND, "rank", "1.0"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            client, watch = await attached(process.stdout.readline().strip(), lambda _: None, lost.put_nowait)
            await asyncio.sleep(HEARTBEAT_S / 2)
            assert CLOSED in process.stdout.readline()  # blocks: the loop is away until the session is over
            time.sleep(2 * HEARTBEAT_S)
            watch.report_link(Link(prefill_rank=0, decode_rank=0, lane="ucx/shm", latency_s=1e-5, bandwidth_bytes_per_s=4e9))
            # That heartbeat would go out before the loop looks at anything else.
            assert CLOSED in await asyncio.wait_for(lost.get(), 10)
            await client.close()
        finally:
            process.kill()
