"""However a local cluster ends, nothing of it is left; and what a node refuses, it says in one line."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster import process_guard
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, NodeFailed, TierSpec
from kvferry.local_cluster.spec import child_environment
from node_runtime.fork_server import can_share
from transfer.errors import ConfigError, TransferError
from transfer.pb import kvferry_pb2 as pb

GONE_S = 15.0


def wait_gone(token: str, folder: Path | None = None) -> None:
    """Until no process of the cluster lives, and no file of it is left."""
    deadline_s = time.monotonic() + GONE_S
    while time.monotonic() < deadline_s:
        if not process_guard.processes_of(token) and (folder is None or not folder.exists()):
            return
        time.sleep(0.05)
    left = process_guard.processes_of(token)
    process_guard.kill_all(token)
    raise AssertionError(f"left over: {left}, folder {folder} exists: {folder is not None and folder.exists()}")


STUBBORN = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('up', flush=True); time.sleep(60)"


def start_marked(token: str) -> subprocess.Popen[bytes]:
    """A process of the cluster that ignores every signal that can be ignored."""
    environment = dict(os.environ) | {process_guard.MARK: token}
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], env=environment, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def until_ignored(process: subprocess.Popen[bytes], *signals: signal.Signals) -> None:
    """Wait until the process ignores the signals: before, they end it by default."""
    wanted = sum(1 << (number - 1) for number in signals)
    deadline_s = time.monotonic() + 60
    while True:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1], 16)
        if ignored & wanted == wanted:
            return
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.01)


def test_guard_kills_what_ignores_signals_and_stopped_ones_and_nobody_else(tmp_path: Path) -> None:
    token, other = secrets.token_hex(8), secrets.token_hex(8)
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "file").touch()
    processes = [start_marked(token), start_marked(token), start_marked(other)]
    try:
        processes[1].send_signal(signal.SIGSTOP)
        guard = subprocess.Popen([sys.executable, "-I", "-S", process_guard.__file__, token, str(folder)], stdin=subprocess.PIPE)
        until_ignored(guard, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        guard.send_signal(signal.SIGTERM)  # meant for the starter
        time.sleep(0.1)
        assert guard.poll() is None and set(process_guard.processes_of(token)) == {processes[0].pid, processes[1].pid}
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(60) == 0
        assert [process.wait(60) for process in processes[:2]] == [-9, -9]
        assert processes[2].poll() is None and not folder.exists()
    finally:
        for process in processes:
            process.kill()
            process.wait()


OWNER = """
import asyncio, sys
from pathlib import Path
from kvferry.local_cluster import process_guard
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec

async def main():
    tier = TierSpec(model=Path(sys.argv[1]), tp_size=1, pool_tokens=2048)
    cluster = LocalCluster(ClusterSpec(prefill=tier, decode=tier))
    print(cluster.environment[process_guard.MARK], flush=True)
    starting = asyncio.create_task(cluster.start())
    while len(cluster.processes()) < int(sys.argv[2]):
        await asyncio.sleep(0.02)
    print(cluster.environment["TMPDIR"], flush=True)
    await starting
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_owner_is_killed(model: Path) -> None:
    """In the middle of the start, with leaders, fork servers and ranks there."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model), "7"], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert owner.stdout is not None
    token = owner.stdout.readline().strip()
    try:
        folder = Path(owner.stdout.readline().strip())
        # Seven were there at one time, of which some live for a moment only (a tool that a library calls).
        assert folder.exists() and len(process_guard.processes_of(token)) >= 4
        owner.kill()
        assert owner.wait(GONE_S) == -9
        wait_gone(token, folder)
    finally:
        owner.kill()
        owner.wait()
        process_guard.kill_all(token)


async def test_a_local_cluster_from_start_to_end(model: Path) -> None:
    spec = ClusterSpec(
        prefill=TierSpec(model=model, page_size=16, pool_tokens=2048),
        decode=TierSpec(model=model, page_size=8, order="HND", pool_tokens=2048, settings={"limits.max_running_requests": 4}),
        chunk_tokens=64,
        layers_per_group=4,
        ring_bytes=8 << 20,
        staging_slots=3,
        heartbeat_s=0.25,
    )
    cluster = LocalCluster(spec)
    async with cluster:
        status = await cluster.decode.status()
        assert status.instance.shard.order == "HND" and status.instance.shard.page_size == 8
        assert [rank.ring_capacity for rank in status.ranks] == [8 << 20]
        assert [rank.staging_slots for rank in (await cluster.prefill.status()).ranks] == [3]
        assert (await cluster.decode.http("/healthz"))[0] == 200
        assert "kvferry_" in (await cluster.prefill.http("/metrics"))[1]
        assert set(cluster.decode.rank_pids) | {cluster.decode.pid} <= set(cluster.processes())
        async with NodeClient(cluster.decode.address) as client:
            request = pb.GenerateRequest(prompt="The captain counts the crates.", max_new_tokens=4, ignore_eos=True)
            events = [event async for event in client.generate(request)]
        assert events[-1].done.generated_tokens == 4 and events[-1].done.stats.writes > 0
        folder = Path(cluster.environment["TMPDIR"])
        with pytest.raises(TransferError, match="started before"):
            await cluster.start()
    assert cluster.stop_report is not None and cluster.stop_report.is_clean, cluster.stop_report
    assert cluster.stop_report.exit_codes == {"prefill": 0, "decode": 0}
    assert cluster.processes() == {} and not folder.exists()


async def test_a_leader_that_dies_is_told_from_one_that_refuses(model: Path) -> None:
    tier = TierSpec(model=model)
    cluster = LocalCluster(ClusterSpec(prefill=tier, decode=tier))
    starting = asyncio.create_task(cluster.start())
    while len(cluster.processes()) < 3:
        await asyncio.sleep(0.02)
    os.kill(cluster.decode.pid, signal.SIGKILL)
    with pytest.raises(NodeFailed, match="decode-node: killed by SIGKILL") as caught:
        await starting
    assert (caught.value.role, caught.value.exit_code) == ("decode", -9)
    assert cluster.processes() == {}


@pytest.mark.skipif(not can_share(), reason="this Python cannot share a fork server")
async def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    tier = TierSpec(model=tmp_path)
    cluster = LocalCluster(ClusterSpec(prefill=tier, decode=tier))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="AF_UNIX path too long; set TMPDIR to a shorter path"):
        await cluster.start()
    assert os.listdir("/proc/self/fd") == before
    assert cluster.processes() == {} and list(deep.iterdir()) == []


async def test_what_a_node_refuses_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    tier = TierSpec(model=tmp_path / "missing")
    cluster = LocalCluster(ClusterSpec(prefill=tier, decode=tier))
    with pytest.raises(NodeFailed, match="missing") as caught:
        await cluster.start()
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert cluster.processes() == {}
