"""Real rank processes under a supervisor and a daemon, where all goes well; tests/cluster/nodes has their faults."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from node_runtime import exit_codes, supervisor
from node_runtime.health import Readiness
from tests.runtime import rank_entries
from tests.runtime.daemons import node_of, ranks_of
from tests.runtime.instances import until
from tests.runtime.rank_entries import Echo, Order
from transfer.errors import PeerUnreachable


async def test_ranks_start_speak_report_and_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 90.0)
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        hellos = await ranks.supervisor.start()
        assert [one.rank for one in hellos] == [0, 1]
        assert [one.pid for one in hellos] == ranks.supervisor.pids
        assert {one.instance.incarnation for one in hellos} == {ranks.supervisor.incarnation}
        ranks.supervisor.broadcast(Order(what="echo"))
        ranks.supervisor.send(1, Order(what="echo"))
        await until(lambda: len(ranks.heard) == 3)
        assert sorted(rank for rank, _ in ranks.heard) == [0, 1, 1]
        # A full collection over torch would stop a rank for a tenth of a second.
        assert all(isinstance(message, Echo) and message.is_spared for _, message in ranks.heard)
        await until(lambda: len(ranks.supervisor.reports) == 2)
        status = ranks.supervisor.reports[1].status
        assert (status["rank"], status["pid"]) == (1, hellos[1].pid)
        assert status["idle_checks"] >= 1 and status["open_files"] >= 3 and status["threads"] >= 1
        assert status["resident_bytes"] > 1 << 20
        async with asyncio.timeout(30):  # before anyone kills them
            await ranks.supervisor.stop(is_graceful=True)
        assert not ranks.lost, "an end on request is no loss"
        assert not ranks.supervisor.reports, "nothing is shown of a life that is over"


async def test_a_node_tells_when_it_is_ready_and_removes_what_it_told(tmp_path: Path) -> None:
    (tmp_path / "ready.json").write_text("of a process that was killed")
    async with node_of(tmp_path) as node:
        assert node.daemon.readiness() == Readiness(is_ready=False, reason="the node is starting")
        await node.until_ready()
        told = node.written()
        assert told["role"] == "prefill" and told["pid"] == os.getpid() and told["address"] == "127.0.0.1:1234"
        assert told["rank_pids"] == node.ranks.pids and told["incarnation"] == f"{node.ranks.incarnation:#018x}"
        assert not Path(f"{node.ready_file}.new").exists()
        async with aiohttp.ClientSession() as session, session.get(f"http://{told['http_address']}/readyz") as response:
            assert (response.status, await response.text()) == (200, "ready\n")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await node.exit_code() == exit_codes.OK
        assert node.role.history == ["open", "begin", "drain", "end", "close"]
        (error,) = node.role.errors
        assert isinstance(error, PeerUnreachable) and str(error) == "the node has shut down", "it can go on elsewhere"


async def test_lost_ranks_are_started_again_under_a_new_incarnation(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        await node.until_ready()
        first = node.ranks.pids
        os.kill(first[1], signal.SIGKILL)
        await until(lambda: len(node.role.incarnations) == 2)
        await node.until_ready()
        assert [str(error) for error in node.role.errors] == ["rank 1 died: killed by signal 9"]
        assert node.role.incarnations[0] != node.role.incarnations[1]
        assert node.daemon.num_restarts == 1
        assert not any(rank_entries.is_alive(pid) for pid in first), "rank 0 went with its group"
        assert node.written()["rank_pids"] == node.ranks.pids
