"""What being watched costs: a node's page of metrics, asked for once a second.

    python -m bench.scrape [--json FILE] [--quick] [--prefill-tp 6] [--decode-tp 4] [--seconds 20] [--model DIR]

A real cluster, by default of 6 prefill ranks, 4 decode ranks and 8 links, which has served a few requests, so that its series
are there. Its pages are read every second, each over a new connection. A sample of the times is one whole GET; one of the CPU
time is what the leader took in a second, with and without anybody who asks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from bench.idle import SETTLE_S, Watched, watch
from bench.timing import Report, argument_parser
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.node import ClusterNode
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.plain_text import ANYWHERE
from transfer.registry.security import PlainText

INTERVAL_S = 1.0
TARGET_S = 0.020
TARGET_SHARE = 0.01
NUM_REQUESTS = 4


async def serve_some(cluster: LocalCluster) -> None:
    """A few requests, one after another."""
    security = cluster.decode.security or PlainText(insecure=ANYWHERE)
    async with NodeClient(cluster.decode.address, security=security) as client:
        for number in range(NUM_REQUESTS):
            ids = [(position * 37 + 11 * number) % 700 + 3 for position in range(256)]
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=8, ignore_eos=True)
            async for _ in client.generate(request, timeout_s=60.0):
                pass


async def scrape(node: ClusterNode, seconds: float) -> tuple[list[float], int]:
    """Seconds of each GET, and the lines of the last page."""
    took_s: list[float] = []
    num_lines, next_s = 0, time.monotonic()
    ends_s = next_s + seconds
    while next_s < ends_s:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        next_s += INTERVAL_S
        begun_s = time.perf_counter()
        code, page = await node.http("/metrics")
        took_s.append(time.perf_counter() - begun_s)
        if code != 200:
            raise TransferError(f"GET /metrics of the {node.role} node is answered with {code}")
        num_lines = page.count("\n")
    return took_s, num_lines


async def measure(arguments: argparse.Namespace, *, seconds: float) -> Report:
    """Start a cluster, let it serve, watch its leaders alone and scraped.

    Raises:
        TransferError: It does not start, does not answer, or leaves something behind.
    """
    directory = await cached_demo_model() if arguments.model is None else arguments.model
    spec = ClusterSpec(
        prefill=TierSpec(model=directory, tp_size=arguments.prefill_tp),
        decode=TierSpec(model=directory, tp_size=arguments.decode_tp, page_size=32),
        heartbeat_s=2.0,  # so many processes on a small machine
    )
    report = Report(
        title=f"/metrics of TP {arguments.prefill_tp} -> {arguments.decode_tp}, once a second (under {TARGET_S * 1e3:g} ms, and "
        f"under {TARGET_SHARE * 1e3:g} ms of the leader's CPU time a second)"
    )
    cluster = LocalCluster(spec)
    async with cluster:
        await serve_some(cluster)
        await asyncio.sleep(SETTLE_S)
        leaders = [Watched(name=node.role, pid=node.pid) for node in cluster.nodes]
        alone = await watch(leaders, seconds=seconds)
        watching = asyncio.ensure_future(watch(leaders, seconds=seconds))
        scraped = await asyncio.gather(*(scrape(node, seconds) for node in cluster.nodes))
        watched = await watching
        for node, (took_s, num_lines) in zip(cluster.nodes, scraped, strict=True):
            report.add(f"{node.role} node", f"GET /metrics, {num_lines} lines", took_s)
            report.add(f"{node.role} leader", "CPU time in a second, scraped", watched[node.role])
            report.add(f"{node.role} leader", "CPU time in a second, not scraped", alone[node.role])
            more_s = statistics.mean(watched[node.role]) - statistics.mean(alone[node.role])
            report.add(f"{node.role} leader", "CPU time in a second that scraping adds", [max(0.0, more_s)])
    if cluster.stop_report is None or not cluster.stop_report.is_clean:
        raise TransferError(f"the cluster did not end well: {cluster.stop_report}")
    return report


def main() -> None:
    parser = argument_parser("What a page of metrics costs")
    parser.add_argument("--prefill-tp", type=int, default=6)
    parser.add_argument("--decode-tp", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the leaders are watched, twice")
    parser.add_argument("--model", type=Path, help="model directory; the demo's by default")
    arguments = parser.parse_args()
    seconds = min(3.0, arguments.seconds) if arguments.quick else arguments.seconds
    asyncio.run(measure(arguments, seconds=seconds)).finish(arguments.json)


if __name__ == "__main__":
    main()
