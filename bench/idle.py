"""Measure the CPU time of every rank and leader of an idle cluster, and the cost of reading its metrics.

    python -m bench.idle [--json FILE] [--quick] [--prefill-tp 4] [--decode-tp 2] [--seconds 10] [--scrape] [--model DIR]

A sample is the CPU time, user and system, of all threads of a process in one second: 10 ms are 1 % of one core. An idle cluster
sends heartbeats between ranks (0.5 s), reports to the leaders (0.25 s), and heartbeats of ZeroMQ and gRPC.

With `--scrape`, the cluster first serves a few requests, so that its series exist. Then each node's ``/metrics`` is read once a
second, each time over a new connection, and the report has the times of these reads and the leaders' CPU time with them and
without.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.timing import Report, argument_parser
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.node import ClusterNode
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

TARGET_SHARE = 0.03
SETTLE_S = 3.0
WINDOW_S = 1.0
NUM_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A process of the cluster."""

    name: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU time of its threads so far, to the nanosecond; `stat` counts in steps of 10 ms.

        Raises:
            TransferError: It or one of its threads has ended, and its time is lost. The threads of an idle node stay.
        """
        try:
            tasks = Path(f"/proc/{self.pid}/task").iterdir()
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        except (FileNotFoundError, ProcessLookupError) as error:
            raise TransferError(f"{self.name} (pid {self.pid}), or one of its threads, ended while it was watched") from error


async def watch(processes: list[Watched], *, seconds: float) -> dict[str, list[float]]:
    """Return the CPU seconds per second of each process, by name, with one value per window."""
    samples: dict[str, list[float]] = {process.name: [] for process in processes}
    before, since_s = [process.cpu_s() for process in processes], time.monotonic()
    ends_s = since_s + seconds
    while since_s < ends_s - WINDOW_S / 2:
        await asyncio.sleep(min(WINDOW_S, ends_s - since_s))
        now, now_s = [process.cpu_s() for process in processes], time.monotonic()
        for process, used, earlier in zip(processes, now, before, strict=True):
            samples[process.name].append((used - earlier) / (now_s - since_s))
        before, since_s = now, now_s
    return samples


async def serve_some(cluster: LocalCluster) -> None:
    """Send a few requests, one after another."""
    async with NodeClient(cluster.decode.address) as client:
        for number in range(NUM_REQUESTS):
            ids = [(position * 37 + 11 * number) % 700 + 3 for position in range(256)]
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=8, ignore_eos=True)
            async for _ in client.generate(request, timeout_s=60.0):
                pass


async def scrape(node: ClusterNode, seconds: float) -> tuple[list[float], int]:
    """Read a node's metrics once a second; return the seconds of each read, and the lines of the last page."""
    took_s: list[float] = []
    num_lines, next_s = 0, time.monotonic()
    ends_s = next_s + seconds
    while next_s < ends_s:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        next_s += WINDOW_S
        begun_s = time.perf_counter()
        code, page = await node.http("/metrics")
        took_s.append(time.perf_counter() - begun_s)
        if code != 200:
            raise TransferError(f"GET /metrics of the {node.role} node is answered with {code}")
        num_lines = page.count("\n")
    return took_s, num_lines


async def measure_scrapes(report: Report, cluster: LocalCluster, seconds: float) -> None:
    """Add the times of reading each node's metrics, and the CPU time that this adds to its leader."""
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


async def measure(arguments: argparse.Namespace, *, seconds: float) -> Report:
    """Start a cluster, watch it, and stop it.

    Raises:
        TransferError: It does not start, does not answer, does not stay up, or leaves processes behind.
    """
    directory = await cached_demo_model() if arguments.model is None else arguments.model
    spec = ClusterSpec(
        prefill=TierSpec(model=directory, tp_size=arguments.prefill_tp),
        decode=TierSpec(model=directory, tp_size=arguments.decode_tp, page_size=32),
        heartbeat_s=2.0 if arguments.scrape else None,  # many processes on a small machine
    )
    tiers = f"TP {arguments.prefill_tp} -> {arguments.decode_tp}"
    report = Report(title=f"Idle cluster, {tiers}: CPU time a second (under {TARGET_SHARE * 1e3:g} ms for each rank)")
    cluster = LocalCluster(spec)
    async with cluster:
        if arguments.scrape:
            await serve_some(cluster)
        await asyncio.sleep(SETTLE_S)
        if arguments.scrape:
            report.title = f"/metrics of {tiers}, once a second (under 20 ms, and under 10 ms of the leader's CPU time a second)"
            await measure_scrapes(report, cluster, seconds)
        else:
            processes = [Watched(name=f"{node.role} leader", pid=node.pid) for node in cluster.nodes]
            for node in cluster.nodes:
                processes += (Watched(name=f"{node.role} rank {rank}", pid=pid) for rank, pid in enumerate(node.rank_pids))
            for name, samples_s in (await watch(processes, seconds=seconds)).items():
                report.add(name, "CPU time in a second", samples_s)
    if cluster.stop_report is None or not cluster.stop_report.is_clean:
        raise TransferError(f"the cluster did not stop cleanly: {cluster.stop_report}")
    return report


def main() -> None:
    parser = argument_parser("CPU time of an idle cluster, and the cost of reading its metrics")
    parser.add_argument("--prefill-tp", type=int, default=4)
    parser.add_argument("--decode-tp", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the cluster is watched")
    parser.add_argument("--scrape", action="store_true", help="read the metrics of each node once a second instead")
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model")
    arguments = parser.parse_args()
    seconds = min(3.0, arguments.seconds) if arguments.quick else arguments.seconds
    asyncio.run(measure(arguments, seconds=seconds)).finish(arguments.json)


if __name__ == "__main__":
    main()
