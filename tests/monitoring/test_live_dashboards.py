"""Every line of every chart has data: a real Prometheus scrapes a real cluster that offloads, stores and restores under load."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import pytest
import yaml

from deploy.monitoring import DASHBOARDS, FOLDER
from deploy.monitoring.promql import VARIABLES
from kvferry.local_cluster import LocalCluster
from tests.cluster.calls import Caller, prompt
from tests.cluster.conftest import Start
from tests.monitoring.prometheus import JOB, Prometheus, program, prometheus
from tests.offload.clusters import EARLY, spec

pytestmark = pytest.mark.timeout(180)

LOAD_S = 45.0
"""Most seconds of load; it ends as soon as everything has been seen."""

RATE_INTERVAL = "5s"
HOST_RATIO = 4
"""Host memory for few of the prompts of `load`: others go into the store and come back from there."""

AT_REST: Final = {
    "Pressure: host memory full, steps missed",
    "Circuits that are not closed",
    "Pages that wait",
}
"""Charts whose lines are there at zero, and need not leave it while nothing is wrong. All others have to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A line of a chart, as Grafana asks for it with every variable at "All".

    Args:
        name: Where it is.
        expr: Without variables.
        must_move: Whether it is above zero at some time under load.
    """

    name: str
    expr: str
    must_move: bool


def watched() -> Iterator[Watched]:
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for chart in row.charts:
                for line in chart.lines:
                    expr = line.expr.replace("$__rate_interval", RATE_INTERVAL)
                    for name in VARIABLES:
                        expr = expr.replace(f"${name}", ".*")
                    assert "$" not in expr, f"{expr} has a variable that nobody sets"
                    yield Watched(
                        name=f"{dashboard.name}: {chart.title}: {line.legend}", expr=expr, must_move=chart.title not in AT_REST
                    )


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Iterator[LocalCluster]:
    program("prometheus")  # before a cluster is started that nobody would look at
    storage = {"storage.directory": tmp_path_factory.mktemp("store")}
    with start(spec(model, {**EARLY, "offload.host_ratio": HOST_RATIO, **storage}, prefill=storage)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = [node.http_address for node in cluster.nodes]
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets, environment=cluster.environment) as server:
        yield server


async def load(caller: Caller) -> None:
    """One request that grows past its share of the device while others come and go, of more prompts than host memory holds."""
    while True:
        _, growing = caller.begin(prompt(100, 2), 150)
        for variant in range(3, 12):
            answers = await asyncio.gather(*(caller.ask(prompt(90, variant), 6) for _ in range(2)))
            assert all(answer.code is grpc.StatusCode.OK for answer in answers), answers
        assert (await growing).code is grpc.StatusCode.OK


@asynccontextmanager
async def under_load(cluster: LocalCluster) -> AsyncIterator[asyncio.Task[None]]:
    async with Caller(cluster.decode.address) as caller:
        task = asyncio.ensure_future(load(caller))
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def missing(server: Prometheus, lines: list[Watched], begun_s: float) -> dict[str, str]:
    """Lines that have not shown yet what they must, and what they have shown since then."""
    found: dict[str, str] = {}
    for line in lines:
        values = [value for series in server.over(line.expr, begun_s, time.time()) for value in series.values]
        finite = [value for value in values if math.isfinite(value)]
        if not finite or (line.must_move and max(finite) <= 0):
            found[line.name] = f"{line.expr}: {f'never above {max(finite)}' if finite else 'no data'}"
    return found


async def test_every_line_of_every_chart_has_data(cluster: LocalCluster, server: Prometheus) -> None:
    begun_s = time.time()
    left, lacking = list(watched()), dict[str, str]()
    async with under_load(cluster) as task:
        while left and time.time() < begun_s + LOAD_S and not task.done():
            await asyncio.sleep(1.0)
            lacking = await asyncio.to_thread(missing, server, left, begun_s)
            left = [line for line in left if line.name in lacking]
        if task.done():
            await task  # raises what ended it
    assert not left, "\n".join(f"{name}: {what}" for name, what in lacking.items())


def test_variables_find_every_node(cluster: LocalCluster, server: Prometheus) -> None:
    """What `label_values` of the variables asks for."""
    series = server.over("kvferry_build_info", time.time() - 10, time.time())
    labels = {(one.labels["job"], one.labels["role"], one.labels["instance"]) for one in series}
    assert labels == {(JOB, node.role, node.http_address) for node in cluster.nodes}


def test_prometheus_takes_the_configuration_of_the_page_for_operators(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    configs = [block for block in blocks if "scrape_configs" in yaml.safe_load(block)]
    assert configs
    for config in configs:
        file = tmp_path / "prometheus.yml"
        file.write_text(config, encoding="utf-8")
        checked = subprocess.run([program("promtool"), "check", "config", file], capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stdout + checked.stderr
