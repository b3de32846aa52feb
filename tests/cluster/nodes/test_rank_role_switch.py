"""A change of role, with real rank processes and roles that do nothing: who lives on, who is told, what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node_runtime import exit_codes
from node_runtime.daemon import Daemon, NodeState, OtherRole
from node_runtime.health import Readiness
from node_runtime.rank_process import RankSpec
from node_runtime.rank_report import RankHello
from node_runtime.supervisor import RankSide, RankStartError, RankSupervisor
from tests.runtime import rank_entries
from tests.runtime.instances import decode_config, prefill_config, until
from tests.runtime.rank_entries import Echo, Order, is_alive
from transfer.config import NodeConfig
from transfer.errors import PeerUnreachable, TransferError


class OneOfTwo:
    """A `node_runtime.daemon.SwitchableRole` that remembers what happened to it."""

    def __init__(self, config: NodeConfig, other: NodeConfig, entry: Callable[[RankSpec], None]) -> None:
        self.history: list[str] = []
        self.said: list[Any] = []
        self.status_page = None
        self.supervised: RankSupervisor | None = None
        self._other = other
        self._ranks = RankSide(
            config=config, entry=entry, codec=rank_entries.CODEC, on_message=lambda rank, message: self.said.append(message)
        )

    @property
    def ranks(self) -> RankSide:
        return self._ranks

    def take_over(self, before: Any) -> None:
        self.history.append("take over")
        self.supervised = before.supervised

    async def open(self) -> str:
        return "127.0.0.1:1234"

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        side = self._ranks
        self.supervised = RankSupervisor(
            side.config,
            side.entry,
            side.codec,
            preload=["tests.runtime.preloaded"],
            on_message=side.on_message,
            on_lost=on_lost,
            other_config=self._other,
        )
        return self.supervised

    async def begin_life(self, hellos: tuple[RankHello, ...]) -> None:
        self.history.append("begin")

    async def end_life(self, error: TransferError) -> None:
        self.history.append("end")

    async def drain(self) -> int:
        return 0

    @property
    def num_in_flight(self) -> int:
        return 0

    def readiness(self) -> Readiness:
        return Readiness(is_ready=True)

    def render_metrics(self) -> bytes:
        return self._ranks.config.role.encode()

    async def close(self) -> None:
        self.history.append("close")


class Node:
    """A daemon of two roles on its way, in this process."""

    def __init__(self, folder: Path, entry: Callable[[RankSpec], None]) -> None:
        self.ready_file = folder / "ready.json"
        quick = {"backoff_s": 0.01, "max_backoff_s": 0.05, "max_restarts": 2}
        shared: dict[str, Any] = {"ready_file": self.ready_file, "parallel": {"tp_size": 2}, "restart": quick}
        first, second = prefill_config(folder, **shared), decode_config(folder, **shared)
        self.prefill, self.decode = OneOfTwo(first, second, entry), OneOfTwo(second, first, entry)
        self.daemon = Daemon(first, lambda _: self.prefill, other=OtherRole(config=second, make_role=lambda _: self.decode))
        self.life = asyncio.ensure_future(self.daemon.run())

    @property
    def ranks(self) -> RankSupervisor:
        found = self.prefill.supervised or self.decode.supervised
        assert found is not None
        return found

    def told(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    async def until_ready(self) -> None:
        await until(lambda: self.daemon.state is NodeState.READY or self.life.done())
        assert not self.life.done(), self.life.result()

    async def exit_code(self) -> int:
        async with asyncio.timeout(20):
            return await asyncio.shield(self.life)


@asynccontextmanager
async def node_of(folder: Path, entry: Callable[[RankSpec], None] = rank_entries.switching) -> AsyncIterator[Node]:
    node = Node(folder, entry)
    try:
        await node.until_ready()
        yield node
    finally:
        node.daemon.request_stop()
        await asyncio.wait({node.life}, timeout=20)
        node.life.cancel()


async def test_a_change_is_a_new_life_of_the_same_processes(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        pids, lives = node.ranks.pids, [node.ranks.incarnation]
        for role, now, before in (("decode", node.decode, node.prefill), ("prefill", node.prefill, node.decode)):
            await node.daemon.switch_role()
            assert node.ranks.pids == pids and all(map(is_alive, pids))
            assert node.ranks.incarnation not in lives
            lives.append(node.ranks.incarnation)
            assert (node.told()["role"], node.told()["rank_pids"]) == (role, pids)
            assert int(node.told()["incarnation"], 16) == node.daemon.incarnation == node.ranks.incarnation
            assert (node.daemon.config.role, node.daemon.state, node.daemon.num_restarts) == (role, NodeState.READY, 0)
            assert before.history[-1] == "end" and now.history[-2:] == ["take over", "begin"]
            # The ranks are this role's: their leader hears them, and only what they say in this life.
            before.said.clear()
            node.ranks.broadcast(Order(what="echo"))
            await until(lambda now=now: len(now.said) == 2)
            assert {(type(echo), echo.pid, echo.incarnation) for echo in now.said} == {(Echo, pid, lives[-1]) for pid in pids}
            assert not before.said and all(echo.num_spared for echo in now.said), "what lives in it is spared the collector again"
            now.said.clear()
        assert node.prefill.history == ["begin", "end", "take over", "begin"]
    assert node.life.result() == exit_codes.OK
    assert node.prefill.history[-1] == node.decode.history[-1] == "close" and not any(map(is_alive, pids))


async def test_the_first_rank_that_cannot_change_says_why(tmp_path: Path) -> None:
    """Later refusals are consequences of the first."""
    async with node_of(tmp_path, rank_entries.hungry_in_the_other) as node:
        with pytest.raises(RankStartError, match="out of memory while starting rank 1: ") as caught:
            await node.daemon.switch_role()
        assert caught.value.exit_code == exit_codes.NO_MEMORY
        assert node.daemon.state is NodeState.READY and node.daemon.config.role == "prefill"


async def test_ranks_that_cannot_change_go_back(tmp_path: Path) -> None:
    async with node_of(tmp_path, rank_entries.refuses_the_other) as node:
        pids, life = node.ranks.pids, node.ranks.incarnation
        with pytest.raises(RankStartError, match="the pool of 9 GiB does not fit") as caught:
            await node.daemon.switch_role()
        assert caught.value.exit_code == exit_codes.NO_MEMORY
        assert node.daemon.state is NodeState.READY and node.told()["role"] == node.daemon.config.role == "prefill"
        assert node.ranks.pids == pids and node.ranks.incarnation != life and node.daemon.num_restarts == 0
        node.ranks.broadcast(Order(what="echo"))
        await until(lambda: len(node.prefill.said) == 2)
        with pytest.raises(RankStartError):  # and it can be tried again
            await node.daemon.switch_role()
        assert node.ranks.pids == pids


@pytest.mark.parametrize("entry", [rank_entries.dies_in_the_other, rank_entries.refuses_both])
async def test_ranks_that_can_do_neither_are_started_anew_in_the_role_that_the_node_had(
    tmp_path: Path, entry: Callable[[RankSpec], None]
) -> None:
    async with node_of(tmp_path, entry) as node:
        pids = node.ranks.pids
        with pytest.raises(RankStartError):
            await node.daemon.switch_role()
        (tmp_path / "switched").unlink(missing_ok=True)
        await until(lambda: node.daemon.num_restarts >= 1)
        await node.until_ready()
        assert node.told()["role"] == node.daemon.config.role == "prefill"
        assert not set(node.ranks.pids) & set(pids) and not any(map(is_alive, pids))


async def test_a_rank_that_dies_after_a_change_is_started_anew_in_the_new_role(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        await node.daemon.switch_role()
        pids = node.ranks.pids
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: node.daemon.num_restarts == 1 and node.daemon.state is NodeState.READY)
        assert node.told()["role"] == "decode" and not set(node.ranks.pids) & set(pids)
        await node.daemon.switch_role()
        assert node.told()["role"] == "prefill"


async def test_a_stop_in_mid_change_ends_the_node(tmp_path: Path) -> None:
    async with node_of(tmp_path, rank_entries.hangs_in_the_other) as node:
        changing = asyncio.ensure_future(node.daemon.switch_role())
        await until(lambda: "take over" in node.decode.history)
        with pytest.raises(PeerUnreachable, match="the node is starting"):
            await node.daemon.switch_role()
        pids = node.ranks.pids
        node.daemon.request_stop()
        assert await node.exit_code() == exit_codes.OK
        with pytest.raises(PeerUnreachable, match="the node has shut down"):
            await changing
        assert not any(map(is_alive, pids)) and not node.ready_file.exists()
