"""Real two-tier clusters of processes, sockets and the ucx transport; every process is ended by its id, whatever a test does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from kvferry.demo_model import make_demo_model
from kvferry.local_cluster import ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Reference

Start = Callable[[ClusterSpec], AbstractContextManager[LocalCluster]]

START_TIMEOUT_S = 150.0  # ten seconds on two quiet cores
HEARTBEAT_S = 1.0  # twice the default: a rank that a loaded machine does not run for a second and a half is not dead
POOL_TOKENS = 4096  # one whole context; every page of a pool is touched at the start


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
    """A cluster that has started; killed at the end, and before it its nodes' logs are shown if something failed."""
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
    """A 2 -> 2 cluster that no test may leave in another state than idle and joined; its ranks may have had several lives."""
    settings = {"restart.backoff_s": 0.1, "restart.max_restarts": 10}
    tier = TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=8192, settings=settings)
    spec = ClusterSpec(prefill=tier, decode=tier, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S, log_level="debug")
    with running(spec) as cluster:
        yield cluster
