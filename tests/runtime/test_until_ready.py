"""Waiting for a node that was just started: the real health server, ready files as nodes write them, and a process that ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from node_runtime.health import HealthServer, Readiness
from node_runtime.until_ready import main, until_ready

LONG_S = 60.0


def written(folder: Path, address: str) -> Path:
    """Write a ready file with the only fields that are read."""
    file = folder / "ready.json"
    file.write_text(json.dumps({"role": "decode", "http_address": address}))
    return file


async def test_it_waits_for_the_file_and_then_for_readyz(tmp_path: Path) -> None:
    said = Readiness(is_ready=False, reason="no prefill node is joined")
    server = HealthServer(lambda: said, lambda: ())
    port = await server.start("127.0.0.1", 0)
    try:
        file = tmp_path / "ready.json"
        assert await asyncio.to_thread(until_ready, file, os.getpid(), 0.0) == "its ranks are starting"
        waiting = asyncio.create_task(asyncio.to_thread(until_ready, file, os.getpid(), LONG_S))
        # A name that nobody here knows: others may.
        written(tmp_path, f"node.invalid:{port}")
        assert "no prefill node is joined" in await asyncio.to_thread(until_ready, file, os.getpid(), 0.0)
        assert not waiting.done()
        said = Readiness(is_ready=True)
        async with asyncio.timeout(LONG_S):
            assert await waiting == ""
        written(tmp_path, f"127.0.0.1:{port}")
        assert await asyncio.to_thread(main, [str(file), str(os.getpid()), "0"]) == 0
    finally:
        await server.stop()


def test_a_node_that_has_ended_is_waited_for_no_longer(tmp_path: Path) -> None:
    node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    # As systemd runs it, and reaps the node.
    command = [sys.executable, "-m", "node_runtime.until_ready", str(tmp_path / "ready.json"), str(node.pid), str(LONG_S)]
    began_s = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        node.wait()
        _, complaint = waiting.communicate(timeout=LONG_S)
    assert (waiting.returncode, complaint) == (1, "the node is not ready: it has ended\n")
    assert time.monotonic() - began_s < LONG_S / 2


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    file = written(tmp_path, "127.0.0.1:1")
    assert "127.0.0.1:1 does not answer" in until_ready(file, os.getpid(), 0.6)
