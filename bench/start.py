"""Measure how long a node and a cluster take to become ready, and how long both take to end.

    python -m bench.start [--json FILE] [--quick] [--against DIR] [--rounds 7] [--prefill 2] [--decode 2] [--model DIR]

A sample of a node is the time from the start of its process until its ready file exists. By then, the node has checked its
settings, loaded its model, allocated its pool and opened its ports. A sample of a cluster ends when every decode node has joined
every prefill node.

With `--against`, samples of the source in that directory and of this source alternate, on the same model. The ratio is the time
of the other source divided by the time of this source.

From the second round on, files are in the page cache. In the first round, they are there only if the demo model was just made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.timing import ROOT, Report, argument_parser
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import LocalCluster
from kvferry.local_cluster.spec import ROLES, ClusterSpec, Role, TierSpec, child_environment
from transfer.errors import TransferError

TARGET_S: Final = 30.0
"""Target for a cluster of two prefill and two decode nodes, until all nodes have joined."""
WAIT_S: Final = 300.0
_POLL_S: Final = 0.002


def start_node(role: Role, model: Path, source: Path) -> tuple[float, float]:
    """Start and end one node; return the seconds until its ready file existed, and the seconds from SIGTERM until its end.

    Args:
        source: Directory with the packages of the node.

    Raises:
        TransferError: The node ended without SIGTERM, was not ready in time, or did not exit with 0. The message has its log.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-start-") as folder:
        ready_file, log_path = Path(folder) / "ready", Path(folder) / "log"
        command = [sys.executable, "-m", f"{role}_node", "serve", "--insecure", "--model", str(model)]
        command += ["--ready-file", str(ready_file), "--set", "server.port=0", "--set", "server.http_port=0"]
        environment = child_environment() | {"PYTHONPATH": str(source), "TMPDIR": folder}
        with log_path.open("wb") as log:
            begun_s = time.monotonic()
            node = subprocess.Popen(command, cwd=source, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not ready_file.exists():
                if node.poll() is not None or time.monotonic() - begun_s > WAIT_S:
                    raise TransferError(f"the {role} node of {source} is not ready:\n{log_path.read_text()}")
                time.sleep(_POLL_S)
            ready_s = time.monotonic()
            node.terminate()
            if node.wait(WAIT_S) != os.EX_OK:
                raise TransferError(f"the {role} node of {source} did not exit with 0:\n{log_path.read_text()}")
        finally:
            if node.poll() is None:
                node.kill()
                node.wait()
    return ready_s - begun_s, time.monotonic() - ready_s


def measure_nodes(report: Report, model: Path, *, num_rounds: int, against: Path | None) -> None:
    """Add the start and the end of single nodes; samples of this source and of the other one alternate.

    Raises:
        TransferError: A node does not become ready, or does not exit with 0.
    """
    for role in ROLES:
        sources = [source for source in (against, ROOT) if source is not None]
        samples: dict[Path, list[tuple[float, float]]] = {source: [] for source in sources}
        for _ in range(num_rounds):
            for source in sources:
                samples[source].append(start_node(role, model, source))
        case, before = f"{role} node, TP 1", None
        for source in sources:
            ready_s, ended_s = ([pair[index] for pair in samples[source]] for index in range(2))
            name = "from the process until its ready file" + (f", {source.name}" if source == against else "")
            before = report.add(case, name, ready_s, against=before)
            report.add(case, name.replace("the process until its ready file", "SIGTERM until it has ended"), ended_s)
        if against is not None:
            old, new = (statistics.median(pair[0] for pair in samples[source]) for source in sources)
            report.headline[f"{role}_node_start_relative"] = round(new / old, 3)


async def measure_cluster(report: Report, model: Path, *, num_prefill: int, num_decode: int, num_rounds: int) -> None:
    """Add the start and the end of clusters.

    Raises:
        TransferError: A cluster does not start, or does not end with all processes gone and exit code 0.
    """
    tier = TierSpec(model=model)
    spec = ClusterSpec(prefill=tier, decode=tier, num_prefill=num_prefill, num_decode=num_decode)
    ready_s: list[float] = []
    ended_s: list[float] = []
    for _ in range(num_rounds):
        cluster = LocalCluster(spec)
        begun_s = time.monotonic()
        async with cluster:
            ready_s.append(time.monotonic() - begun_s)
            begun_s = time.monotonic()
        ended_s.append(time.monotonic() - begun_s)
        if cluster.stop_report is None or not cluster.stop_report.is_clean:
            raise TransferError(f"the cluster did not stop cleanly: {cluster.stop_report}")
    size = f"{num_prefill} prefill and {num_decode} decode nodes"
    report.add(size, f"from the first process until all have joined (within {TARGET_S:g} s)", ready_s)
    report.add(size, "from SIGTERM until the last process has ended", ended_s)


async def measure(arguments: argparse.Namespace) -> Report:
    """Measure single nodes, then clusters if both tiers have nodes."""
    model = await cached_demo_model() if arguments.model is None else arguments.model
    num_rounds = 1 if arguments.quick else arguments.rounds
    report = Report(title="Start of nodes and clusters, TP 1")
    measure_nodes(report, model, num_rounds=num_rounds, against=arguments.against)
    if arguments.prefill and arguments.decode:
        await measure_cluster(report, model, num_prefill=arguments.prefill, num_decode=arguments.decode, num_rounds=num_rounds)
    return report


def main() -> None:
    parser = argument_parser("Measure how long a node and a cluster take to become ready and to end")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to compare with; samples alternate")
    parser.add_argument("--prefill", type=int, default=2, help="number of prefill nodes of the cluster; 0 skips the cluster")
    parser.add_argument("--decode", type=int, default=2, help="number of decode nodes of the cluster; 0 skips the cluster")
    parser.add_argument("--rounds", type=int, default=7, help="number of samples of each node and of the cluster")
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    arguments = parser.parse_args()
    if arguments.against is not None:
        arguments.against = arguments.against.resolve()
    asyncio.run(measure(arguments)).finish(arguments.json)


if __name__ == "__main__":
    main()
