"""`kvferry node drain` as a process, against a node with prepared answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from kvferry.local_cluster.spec import child_environment
from node_runtime import exit_codes
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.server import serve


class Drained(pb_grpc.PrefillControlServicer):
    """Answer a drain, and report the prepared status."""

    def __init__(self, state: str) -> None:
        self.state = state

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        return pb.DrainResponse(remaining=0)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus(role="prefill", state=self.state)


async def node_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``kvferry node ...`` in a process of its own."""
    command = [sys.executable, "-m", "kvferry", "node", *arguments]
    run = partial(subprocess.run, command, env=child_environment(), capture_output=True, text=True, timeout=60)
    return await asyncio.to_thread(run)


@pytest.mark.parametrize(("state", "exit_code"), [("draining", exit_codes.OK), ("ready", exit_codes.FAILED)])
async def test_a_node_is_said_to_be_drained_only_if_it_takes_no_requests(state: str, exit_code: int) -> None:
    """An engine's side only waits; and a drain can be undone at the last moment."""
    server = await serve("127.0.0.1", 0, prefill_control=Drained(state))
    try:
        result = await node_command("drain", "--insecure", "--target", f"127.0.0.1:{server.port}", "--timeout", "5")
    finally:
        await server.close(grace_s=0)
    assert result.returncode == exit_code, result.stderr
    assert ("is drained" in result.stdout) is (exit_code == exit_codes.OK)
    assert ("takes requests" in result.stderr) is (exit_code != exit_codes.OK)
