"""How long a cluster takes until it can serve: from the first process to the last join, and until its nodes have ended again.

    python -m bench.start [--json FILE] [--quick] [--prefill 2] [--decode 2] [--rounds 5] [--model DIR]

A sample is a cluster of its own, started and ended: model loaded, pools taken, links probed, every decode node joined with every
prefill node. Files are in the page cache from the second round on, and so is the first where the demo's model was just made.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from bench.timing import Report, argument_parser
from kvferry.demo_cache import cached_demo_model
from kvferry.local_cluster import ClusterSpec, LocalCluster, TierSpec
from transfer.errors import TransferError

TARGET_S = 30.0


async def measure(arguments: argparse.Namespace, *, num_rounds: int) -> Report:
    """Start and end clusters.

    Raises:
        TransferError: One does not start, or leaves something behind.
    """
    directory = await cached_demo_model() if arguments.model is None else arguments.model
    tier = TierSpec(model=directory)
    spec = ClusterSpec(prefill=tier, decode=tier, num_prefill=arguments.prefill, num_decode=arguments.decode)
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
            raise TransferError(f"the cluster did not end well: {cluster.stop_report}")
    size = f"{arguments.prefill} prefill and {arguments.decode} decode nodes"
    report = Report(title=f"Start of {size}, TP 1 (ready within {TARGET_S:g} s)")
    report.add(size, "from the first process until every decode node has joined every prefill node", ready_s)
    report.add(size, "from SIGTERM until the last process has ended", ended_s)
    return report


def main() -> None:
    parser = argument_parser("How long a cluster takes until it can serve")
    parser.add_argument("--prefill", type=int, default=2, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=2, help="decode nodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="model directory; the demo's by default")
    arguments = parser.parse_args()
    num_rounds = 1 if arguments.quick else arguments.rounds
    asyncio.run(measure(arguments, num_rounds=num_rounds)).finish(arguments.json)


if __name__ == "__main__":
    main()
