"""`kvferry top`, live, while an operator drains a node and while nodes stop and start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.local_cluster import ClusterSpec, LocalCluster, TierSpec
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S, Start
from tests.serving.test_top import log_of, open_top, rows_of, select, shows


@pytest.fixture(scope="module")
def cluster(model: Path, start: Start) -> Iterator[LocalCluster]:
    tier = TierSpec(model=model, pool_tokens=4096)
    spec = ClusterSpec(prefill=tier, decode=tier, num_prefill=2, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S)
    with start(spec) as cluster:
        yield cluster


async def test_top_drains_a_node_and_lets_it_accept_requests_again(cluster: LocalCluster) -> None:
    address = cluster.prefill_nodes[1].address
    async with open_top(cluster.decode.address) as (app, pilot):
        await shows(pilot, lambda: select(app, "nodes", address), "the node")
        await pilot.press("d")
        await pilot.press("y")
        await shows(pilot, lambda: f"{address} has drained" in log_of(app), "it has drained")
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "draining", "the state draining")
        await shows(pilot, lambda: f"prefill node {address} is draining" in log_of(app), "the alert")
        await pilot.press("d")
        await pilot.press("y")
        await shows(pilot, lambda: f"{address} takes requests again" in log_of(app), "it drains no more")
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "ready", "the state ready")
        await shows(pilot, lambda: f"over: prefill node {address} is draining" in log_of(app), "the end of the alert")


async def test_top_goes_on_while_nodes_stop_and_start(cluster: LocalCluster) -> None:
    node, decode = cluster.prefill_nodes[1], cluster.decode.address
    address = node.address
    async with open_top(decode) as (app, pilot):
        await shows(pilot, lambda: rows_of(app, "nodes").get(address, [""] * 3)[2] == "ready", "the node")
        node.terminate()
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "unreachable", "that it has ended")
        await shows(pilot, lambda: f"{decode} has lost {address}" in log_of(app), "the alert")
        assert len(rows_of(app, "links")) == 1
        await asyncio.to_thread(node.reap, 60.0)
        assert cluster.launch("prefill", 1).name == node.name
        await cluster.wait_joined()
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "ready", "that it runs again")
        await shows(pilot, lambda: len(rows_of(app, "links")) == 2, "its link")
        await shows(pilot, lambda: f"over: {decode} has lost {address}" in log_of(app), "the end of the alert")
