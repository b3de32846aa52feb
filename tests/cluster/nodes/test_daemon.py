"""The life of a node with real rank processes and a role that does nothing: start, restart, drain, end, and its exit code."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from node_runtime import exit_codes
from node_runtime.daemon import NodeState
from node_runtime.health import Readiness
from node_runtime.rank_worker import RankSpec
from tests.runtime import rank_entries
from tests.runtime.daemons import Node, node_of
from tests.runtime.instances import until


def has_begun(node: Node, num_lives: int) -> bool:
    return len(node.role.incarnations) == num_lives


async def test_ranks_that_die_too_often_end_the_node(tmp_path: Path) -> None:
    restart = {"backoff_s": 0.01, "max_backoff_s": 0.01, "max_restarts": 1}
    async with node_of(tmp_path, restart=restart) as node:
        for life in range(2):
            await until(partial(has_begun, node, life + 1))
            await node.until_ready()
            os.kill(node.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.ENGINE_FAILED
        assert node.role.history == ["open", "begin", "end", "begin", "end", "close"]


async def test_a_restart_that_fails_is_tried_again_and_there_is_no_ready_file_meanwhile(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.later_refused, restart={"backoff_s": 0.3, "max_restarts": 3}) as node:
        await node.until_ready()
        assert node.ready_file.exists()
        os.kill(node.ranks.pids[0], signal.SIGKILL)
        await until(lambda: node.role.errors)
        assert not node.ready_file.exists() and node.daemon.state is NodeState.STARTING
        await until(lambda: has_begun(node, 2) or node.life.done())
        await node.until_ready()
        assert node.daemon.num_restarts >= 2, "one of them failed"
        assert node.ready_file.exists()


@pytest.mark.parametrize(
    ("file", "entry", "max_restarts", "exit_code", "num_restarts"),
    [
        ("", rank_entries.later_refused, 1, exit_codes.ENGINE_FAILED, 1),
        ("memory", rank_entries.later_refused, 50, exit_codes.DOES_NOT_FIT, 1),
        ("for ever", rank_entries.later_hungry, 2, exit_codes.DOES_NOT_FIT, 2),
    ],
    ids=["fails too often", "can never succeed", "never finds memory"],
)
async def test_restarts_that_end_the_node(
    tmp_path: Path, file: str, entry: Callable[[RankSpec], None], max_restarts: int, exit_code: int, num_restarts: int
) -> None:
    """Settings that do not fit memory end it at once; memory that others hold may come back, so that is tried again."""
    if file:
        (tmp_path / file).touch()
    async with node_of(tmp_path, entry=entry, restart={"backoff_s": 0.01, "max_restarts": max_restarts}) as node:
        await node.until_ready()
        os.kill(node.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_code
        assert node.role.history.count("begin") == 1 and node.daemon.num_restarts == num_restarts


async def test_a_restart_that_finds_no_memory_yet_is_tried_again(tmp_path: Path) -> None:
    """The device may still belong to the ranks that died."""
    async with node_of(tmp_path, entry=rank_entries.later_hungry, restart={"backoff_s": 0.01, "max_restarts": 3}) as node:
        await node.until_ready()
        os.kill(node.ranks.pids[0], signal.SIGKILL)
        await until(lambda: node.role.history.count("begin") == 2)
        assert node.daemon.num_restarts == 2


async def test_a_stop_cuts_the_pause_before_a_restart_short(tmp_path: Path) -> None:
    async with node_of(tmp_path, restart={"backoff_s": 30.0}) as node:
        await node.until_ready()
        os.kill(node.ranks.pids[0], signal.SIGKILL)
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
            os.kill(node.ranks.pids[0], signal.SIGKILL)
        assert await node.exit_code() == exit_codes.ABORTED


async def test_a_stop_while_it_starts_ends_it(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.silent) as node:
        await until(lambda: node.role.supervised is not None and node.ranks.pids)
        node.daemon.request_stop()
        assert await node.exit_code() == exit_codes.OK
        assert "begin" not in node.role.history


async def test_a_failed_start_ends_with_the_code_of_its_reason(tmp_path: Path) -> None:
    async with node_of(tmp_path, entry=rank_entries.refused) as node:
        assert await node.exit_code() == exit_codes.DOES_NOT_FIT
        assert "begin" not in node.role.history
