"""Two-tier clusters of real processes with sockets, over the ucx and shm transports. Fixtures end every process by its id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from kvferry.demo.model import make_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Reference

Start = Callable[[ClusterSpec], AbstractContextManager[LocalCluster]]

START_TIMEOUT_S = 150.0  # ten seconds on two quiet cores
HEARTBEAT_S = 1.0  # twice the default, so that a rank without CPU time for 1.5 s on a loaded machine does not count as dead
POOL_TOKENS = 4096  # one full context; a larger pool costs start time, because the start touches every page


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def reference(model: Path) -> Iterator[Reference]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference(model)
    torch.set_num_threads(before)


@contextmanager
def running(what: ClusterSpec | LocalCluster) -> Iterator[LocalCluster]:
    """Start a cluster; after the block, print the logs of its nodes and kill it. pytest shows the logs of a failed test."""
    cluster = what if isinstance(what, LocalCluster) else LocalCluster(what)
    try:
        asyncio.run(cluster.start())
        yield cluster
    finally:
        for node in cluster.nodes:
            print(f"--- {node.role}-node, exit code {node.exit_code}", *node.log.tail(60), sep="\n")
        cluster.kill()


@pytest.fixture(scope="session")
def start() -> Start:
    return running


@pytest.fixture(scope="session")
def steady(model: Path) -> Iterator[LocalCluster]:
    """Return a shared cluster with two ranks per tier. Each test leaves it idle and joined. Ranks may have been restarted."""
    settings = {"restart.backoff_s": 0.1, "restart.max_restarts": 10}
    tier = TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=8192, settings=settings)
    spec = ClusterSpec(
        prefill=tier,
        decode=tier,
        transport="ucx",  # two-sided, where most other clusters use shm
        heartbeat_s=HEARTBEAT_S,
        start_timeout_s=START_TIMEOUT_S,
        log_level="debug",
    )
    with running(spec) as cluster:
        yield cluster
