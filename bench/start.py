"""Measure how long a cluster takes to become ready, and how long it takes to end.

    python -m bench.start [--json FILE] [--quick] [--rounds 7] [--prefill 2] [--decode 2] [--model DIR]

A sample ends when every decode node has joined every prefill node. By then, each node has checked its settings, loaded its model,
allocated its pool and opened its ports.

From the second round on, files are in the page cache. In the first round, they are there only if the demo model was just made.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Final

from bench.timing import Report, argument_parser
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from transfer.errors import TransferError

TARGET_S: Final = 13.0
"""Target for a cluster of two prefill and two decode nodes, until all nodes have joined."""


async def measure(arguments: argparse.Namespace) -> Report:
    """Measure the start and the end of clusters.

    Raises:
        TransferError: A cluster does not start, or does not end with all processes gone and exit code 0.
    """
    tier = TierSpec(model=await cached_demo_model() if arguments.model is None else arguments.model)
    spec = ClusterSpec(prefill=tier, decode=tier, num_prefill=arguments.prefill, num_decode=arguments.decode)
    ready_s: list[float] = []
    ended_s: list[float] = []
    for _ in range(1 if arguments.quick else arguments.rounds):
        cluster = LocalCluster(spec)
        begun_s = time.monotonic()
        async with cluster:
            ready_s.append(time.monotonic() - begun_s)
            begun_s = time.monotonic()
        ended_s.append(time.monotonic() - begun_s)
        if cluster.stop_report is None or not cluster.stop_report.is_clean:
            raise TransferError(f"the cluster did not stop cleanly: {cluster.stop_report}")
    report = Report(title="Start of clusters, TP 1")
    size = f"{arguments.prefill} prefill and {arguments.decode} decode nodes"
    report.add(size, f"from the first process until all have joined (within {TARGET_S:g} s)", ready_s)
    report.add(size, "from SIGTERM until the last process has ended", ended_s)
    return report


def main() -> None:
    parser = argument_parser("Measure how long a cluster takes to become ready and to end")
    parser.add_argument("--prefill", type=int, default=2, help="number of prefill nodes")
    parser.add_argument("--decode", type=int, default=2, help="number of decode nodes")
    parser.add_argument("--rounds", type=int, default=7, help="number of samples")
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments)).finish(arguments.json)


if __name__ == "__main__":
    main()
