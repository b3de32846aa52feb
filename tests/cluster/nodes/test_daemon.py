"""The life of a node with real rank processes and a role that does nothing: start, restart, drain, end, and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from node_runtime import exit_codes
from node_runtime.daemon import Daemon, NodeState
from node_runtime.health import Readiness
from node_runtime.rank_process import RankSpec
from node_runtime.rank_report import RankHello
from node_runtime.supervisor import RankSupervisor
from tests.runtime import rank_entries
from tests.runtime.instances import prefill_config, until
from transfer.config import NodeConfig
from transfer.errors import ConfigError, EngineError, PeerUnreachable, TransferError


class QuietRole:
    """A `node_runtime.daemon.Role` that remembers what happened to it."""

    status_page = None

    def __init__(self, config: NodeConfig, entry: Callable[[RankSpec], None]) -> None:
        self.history: list[str] = []
        self.errors: list[str] = []
        self.error_types: list[type[TransferError]] = []
        self.incarnations: list[int] = []
        self.in_flight = 0
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.ranks = RankSupervisor(
            config,
            entry,
            rank_entries.CODEC,
            preload=["tests.runtime.preloaded"],
            on_message=lambda rank, message: None,
            on_lost=lambda reason: self.on_lost(reason),
        )

    async def open(self) -> str:
        self.history.append("open")
        return "127.0.0.1:1234"

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        self.on_lost = on_lost
        return self.ranks

    async def begin_life(self, hellos: tuple[RankHello, ...]) -> None:
        self.history.append("begin")
        self.incarnations.append(hellos[0].instance.incarnation)

    async def end_life(self, error: TransferError) -> None:
        self.history.append("end")
        self.errors.append(str(error))
        self.error_types.append(type(error))
        self.in_flight = 0

    async def drain(self) -> int:
        self.history.append("drain")
        while self.in_flight:
            await asyncio.sleep(0.005)
        return 0

    @property
    def num_in_flight(self) -> int:
        return self.in_flight

    def readiness(self) -> Readiness:
        return Readiness(is_ready=True)

    def render_metrics(self) -> bytes:
        return b"a 1\n"

    async def close(self) -> None:
        self.history.append("close")


class Node:
    """A daemon on its way, in this process."""

    def __init__(self, folder: Path, entry: Callable[[RankSpec], None] = rank_entries.obedient, **settings: Any) -> None:
        self.ready_file = folder / "ready.json"
        quick = {"backoff_s": 0.01, "max_backoff_s": 0.05, "max_restarts": 2}
        values = {"ready_file": self.ready_file, "parallel": {"tp_size": 2}, "restart": quick, "drain_timeout_s": 5.0, **settings}
        self.config = prefill_config(folder, **values)
        self.role = QuietRole(self.config, entry)
        self.daemon = Daemon(self.config, lambda _: self.role)
        self.life = asyncio.ensure_future(self.daemon.run())

    async def until_ready(self) -> None:
        await until(lambda: self.daemon.state is NodeState.READY or self.life.done())
        assert not self.life.done(), self.life.result()

    async def exit_code(self) -> int:
        async with asyncio.timeout(20):
            return await asyncio.shield(self.life)


def has_begun(node: Node, num_lives: int) -> bool:
    return len(node.role.incarnations) == num_lives


@asynccontextmanager
async def node_of(folder: Path, **settings: Any) -> AsyncIterator[Node]:
    node = Node(folder, **settings)
    try:
        yield node
    finally:
        pids = node.role.ranks.pids
        if not node.life.done():
            node.daemon.request_stop()
            node.role.in_flight = 0
        await asyncio.gather(node.life, return_exceptions=True)
        assert not any(rank_entries.is_alive(pid) for pid in pids)
        assert node.role.history[-1:] == ["close"] and not node.ready_file.exists(), "nothing is left behind"


async def test_a_node_tells_when_it_is_ready_and_removes_what_it_told(tmp_path: Path) -> None:
    (tmp_path / "ready.json").write_text("of a process that was killed")
    async with node_of(tmp_path) as node:
        assert node.daemon.readiness() == Readiness(is_ready=False, reason="the node is starting")
        await node.until_ready()
        told = json.loads(node.ready_file.read_text())
        assert told["role"] == "prefill" and told["pid"] == os.getpid() and told["address"] == "127.0.0.1:1234"
        assert told["rank_pids"] == node.role.ranks.pids and told["incarnation"] == f"{node.role.ranks.incarnation:#018x}"
        assert not Path(f"{node.ready_file}.new").exists()
        async with aiohttp.ClientSession() as session, session.get(f"http://{told['http_address']}/readyz") as response:
            assert (response.status, await response.text()) == (200, "ready\n")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await node.exit_code() == exit_codes.OK
        assert node.role.history == ["open", "begin", "drain", "end", "close"]
        assert node.role.errors == ["the node has shut down"]
        assert node.role.error_types == [PeerUnreachable], "what was cut off here can go on elsewhere"


async def test_lost_ranks_are_started_again_under_a_new_incarnation(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        await node.until_ready()
        first = node.role.ranks.pids
        os.kill(first[1], signal.SIGKILL)
        await until(lambda: len(node.role.incarnations) == 2)
        await node.until_ready()
        assert node.role.errors == ["rank 1 died: killed by signal 9"]
        assert node.role.incarnations[0] != node.role.incarnations[1]
        assert node.daemon.num_restarts == 1
        assert not any(rank_entries.is_alive(pid) for pid in first), "rank 0 went with its group"
        assert json.loads(node.ready_file.read_text())["rank_pids"] == node.role.ranks.pids


async def test_ranks_that_die_too_often_end_the_node(tmp_path: Path) -> None:
    restart = {"backoff_s": 0.01, "max_backoff_s": 0.01, "max_restarts": 1}
    async with node_of(tmp_path, restart=restart) as node:
        for life in range(2):
            await until(partial(has_begun, node, life + 1))
            await node.until_ready()
            os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.ENGINE_FAILED
        assert node.role.history == ["open", "begin", "end", "begin", "end", "close"]


async def test_a_restart_that_fails_is_tried_again_and_there_is_no_ready_file_meanwhile(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.later_refused, restart={"backoff_s": 0.3, "max_restarts": 3}) as node:
        await node.until_ready()
        assert node.ready_file.exists()
        os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        await until(lambda: node.role.errors)
        assert not node.ready_file.exists() and node.daemon.state is NodeState.STARTING
        await until(lambda: has_begun(node, 2) or node.life.done())
        await node.until_ready()
        assert node.daemon.num_restarts >= 2, "one of them failed"
        assert node.ready_file.exists()


async def test_restarts_that_fail_too_often_end_the_node(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.later_refused, restart={"backoff_s": 0.01, "max_restarts": 1}) as node:
        await node.until_ready()
        os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.ENGINE_FAILED
        assert node.role.history.count("begin") == 1


async def test_a_restart_that_can_never_succeed_ends_the_node_at_once(tmp_path: Path) -> None:
    (tmp_path / "memory").touch()
    async with node_of(tmp_path, entry=rank_entries.later_refused, restart={"backoff_s": 0.01, "max_restarts": 50}) as node:
        await node.until_ready()
        os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.NO_MEMORY
        assert node.daemon.num_restarts == 1


async def test_a_restart_that_finds_no_memory_yet_is_tried_again(tmp_path: Path) -> None:
    """The device may still belong to the ranks that died."""
    async with node_of(tmp_path, entry=rank_entries.later_hungry, restart={"backoff_s": 0.01, "max_restarts": 3}) as node:
        await node.until_ready()
        os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        await until(lambda: node.role.history.count("begin") == 2)
        assert node.daemon.num_restarts == 2


async def test_a_restart_that_never_finds_memory_ends_with_the_code_that_no_supervisor_restarts(tmp_path: Path) -> None:
    (tmp_path / "for ever").touch()
    async with node_of(tmp_path, entry=rank_entries.later_hungry, restart={"backoff_s": 0.01, "max_restarts": 2}) as node:
        await node.until_ready()
        os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.NO_MEMORY
        assert node.daemon.num_restarts == 2


async def test_a_stop_cuts_the_pause_before_a_restart_short(tmp_path: Path) -> None:
    async with node_of(tmp_path, restart={"backoff_s": 30.0}) as node:
        await node.until_ready()
        os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        await until(lambda: node.role.errors)
        node.daemon.request_stop()
        assert await node.exit_code() == exit_codes.OK


async def test_a_drain_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        await node.until_ready()
        node.role.in_flight = 1
        node.daemon.request_stop()
        await until(lambda: "drain" in node.role.history)
        assert node.daemon.readiness() == Readiness(is_ready=False, reason="the node is draining")
        await asyncio.sleep(0.05)
        assert not node.life.done()
        node.role.in_flight = 0
        assert await node.exit_code() == exit_codes.OK


@pytest.mark.parametrize("cut_short_by", ["the time limit", "a second signal", "a dead rank"])
async def test_what_is_not_drained_is_cut_off_and_said(tmp_path: Path, cut_short_by: str) -> None:
    async with node_of(tmp_path, drain_timeout_s=0.1 if cut_short_by == "the time limit" else 60.0) as node:
        await node.until_ready()
        node.role.in_flight = 1
        node.daemon.request_stop()
        await until(lambda: "drain" in node.role.history)
        if cut_short_by == "a second signal":
            node.daemon.request_stop()
        elif cut_short_by == "a dead rank":
            os.kill(node.role.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.NOT_DRAINED


async def test_a_stop_while_it_starts_ends_it(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.silent) as node:
        await until(lambda: node.role.ranks.pids)
        node.daemon.request_stop()
        assert await node.exit_code() == exit_codes.OK
        assert "begin" not in node.role.history


async def test_a_failed_start_ends_with_the_code_of_its_reason(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.refused) as node:
        assert await node.exit_code() == exit_codes.NO_MEMORY
        assert "begin" not in node.role.history


async def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.unlike) as node:
        with pytest.raises(EngineError, match="ranks 0 and 1 have 8 and 9 pages"):
            await node.exit_code()


async def test_a_taken_http_port_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with node_of(tmp_path, server={"http_port": port}) as node:
            with pytest.raises(ConfigError, match=f"server.http_port is {port}"):
                await node.exit_code()
            assert node.role.ranks.incarnation == 0, "no life was begun"


async def test_a_ready_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path, ready_file=tmp_path / "no" / "folder" / "ready.json")
    with pytest.raises(ConfigError, match=r"ready_file is .*, which cannot be written: No such file"):
        await node.exit_code()
    assert node.role.history[-1] == "close"
