"""A change of role, with real rank processes and roles that do nothing: processes that stay, reports, and failures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from node_runtime import exit_codes
from node_runtime.daemon import NodeState
from node_runtime.rank_worker import RankSpec
from node_runtime.supervisor import RankStartError
from tests.runtime import daemons, rank_entries
from tests.runtime.daemons import Node
from tests.runtime.instances import until
from tests.runtime.rank_entries import Echo, Order, is_alive
from transfer.errors import PeerUnreachable


@asynccontextmanager
async def node_of(folder: Path, entry: Callable[[RankSpec], None] = rank_entries.obedient) -> AsyncIterator[Node]:
    async with daemons.node_of(folder, entry, has_two_roles=True) as node:
        await node.until_ready()
        yield node


async def test_a_change_is_a_new_life_of_the_same_processes(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        pids, lives = node.ranks.pids, [node.ranks.incarnation]
        for role, now, before in (("decode", node.decode, node.role), ("prefill", node.role, node.decode)):
            await node.daemon.switch_role()
            assert node.ranks.pids == pids and all(map(is_alive, pids))
            assert node.ranks.incarnation not in lives
            lives.append(node.ranks.incarnation)
            assert (node.written()["role"], node.written()["rank_pids"]) == (role, pids)
            assert int(node.written()["incarnation"], 16) == node.daemon.incarnation == node.ranks.incarnation
            assert (node.daemon.config.role, node.daemon.state, node.daemon.num_restarts) == (role, NodeState.READY, 0)
            assert before.history[-1] == "end" and now.history[-2:] == ["take over", "begin"]
            # The ranks are this role's: their leader hears them, and only what they say in this life.
            before.heard.clear()
            node.ranks.broadcast(Order(what="echo"))
            await until(lambda now=now: len(now.heard) == 2)
            assert {(type(echo), echo.pid, echo.incarnation) for echo in now.heard} == {(Echo, pid, lives[-1]) for pid in pids}
            assert not before.heard and all(echo.is_spared for echo in now.heard), "the collector spares the new worker"
            now.heard.clear()
        assert node.role.history == ["open", "begin", "end", "take over", "begin"]
    assert node.life.result() == exit_codes.OK
    assert node.role.history[-1] == node.decode.history[-1] == "close" and not any(map(is_alive, pids))


async def test_ranks_that_cannot_change_go_back(tmp_path: Path) -> None:
    async with node_of(tmp_path, rank_entries.refuses_the_other) as node:
        pids, life = node.ranks.pids, node.ranks.incarnation
        with pytest.raises(RankStartError, match="the pool of 9 GiB does not fit") as caught:
            await node.daemon.switch_role()
        assert caught.value.exit_code == exit_codes.DOES_NOT_FIT
        assert node.daemon.state is NodeState.READY and node.written()["role"] == node.daemon.config.role == "prefill"
        assert node.ranks.pids == pids and node.ranks.incarnation != life and node.daemon.num_restarts == 0
        node.ranks.broadcast(Order(what="echo"))
        await until(lambda: len(node.role.heard) == 2)
        with pytest.raises(RankStartError):  # and it can be tried again
            await node.daemon.switch_role()
        assert node.ranks.pids == pids


@pytest.mark.parametrize("entry", [rank_entries.dies_in_the_other, rank_entries.refuses_both])
async def test_ranks_that_fail_in_both_roles_restart_in_the_old_role(tmp_path: Path, entry: Callable[[RankSpec], None]) -> None:
    async with node_of(tmp_path, entry) as node:
        pids = node.ranks.pids
        with pytest.raises(RankStartError):
            await node.daemon.switch_role()
        (tmp_path / "switched").unlink(missing_ok=True)
        await until(lambda: node.daemon.num_restarts >= 1)
        await node.until_ready()
        assert node.written()["role"] == node.daemon.config.role == "prefill"
        assert not set(node.ranks.pids) & set(pids) and not any(map(is_alive, pids))


async def test_a_rank_that_dies_after_a_role_switch_restarts_in_the_new_role(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        await node.daemon.switch_role()
        pids = node.ranks.pids
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: node.daemon.num_restarts == 1 and node.daemon.state is NodeState.READY)
        assert node.written()["role"] == "decode" and not set(node.ranks.pids) & set(pids)
        await node.daemon.switch_role()
        assert node.written()["role"] == "prefill"


async def test_a_stop_in_mid_change_ends_the_node(tmp_path: Path) -> None:
    async with node_of(tmp_path, rank_entries.hangs_in_the_other) as node:
        pids = node.ranks.pids
        changing = asyncio.ensure_future(node.daemon.switch_role())
        await until(lambda: "take over" in node.decode.history)
        with pytest.raises(PeerUnreachable, match="the node is starting"):
            await node.daemon.switch_role()
        node.daemon.request_stop()
        assert await node.exit_code() == exit_codes.OK
        with pytest.raises(PeerUnreachable, match="the node has shut down"):
            await changing
        assert not any(map(is_alive, pids))
