"""What an idle cluster costs: CPU time of every rank and leader of a joined two-tier cluster that nobody asks for anything.

    python -m bench.idle [--json FILE] [--quick] [--prefill-tp 4] [--decode-tp 2] [--seconds 10] [--model DIR]

A sample is the CPU time, user and system and of all threads, that a process took in one second: 10 ms are 1 % of one core.
What the nodes do then: heartbeats between the ranks (0.5 s), reports to the leaders (0.25 s), heartbeats of ZeroMQ and gRPC.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from bench.timing import Report, argument_parser
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from transfer.errors import TransferError

TARGET_SHARE = 0.03
SETTLE_S = 3.0
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One process of the cluster."""

    name: str
    pid: int

    def cpu_s(self) -> float:
        """CPU time of its threads so far, to the nanosecond; `stat` counts in steps of 10 ms, too coarse for an idle process.

        Raises:
            TransferError: It has ended, or one of its threads has, whose time is then lost: an idle node's threads stay.
        """
        try:
            tasks = Path(f"/proc/{self.pid}/task").iterdir()
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        except (FileNotFoundError, ProcessLookupError) as error:
            raise TransferError(f"{self.name} (pid {self.pid}), or one of its threads, ended while it was watched") from error


def processes_of(cluster: LocalCluster) -> list[Watched]:
    """Leaders first, then the ranks."""
    leaders = [Watched(name=f"{node.role} leader", pid=node.pid) for node in cluster.nodes]
    ranks = [
        Watched(name=f"{node.role} rank {rank}", pid=pid) for node in cluster.nodes for rank, pid in enumerate(node.rank_pids)
    ]
    return leaders + ranks


async def watch(processes: list[Watched], *, seconds: float) -> dict[str, list[float]]:
    """CPU seconds per second of each process, by name, one value per window."""
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


async def measure(*, prefill_tp: int, decode_tp: int, seconds: float, model: Path | None) -> Report:
    """Start a cluster, leave it alone, watch it, stop it.

    Raises:
        TransferError: It does not start, does not stay up, or leaves something behind.
    """
    directory = await cached_demo_model() if model is None else model
    spec = ClusterSpec(
        prefill=TierSpec(model=directory, tp_size=prefill_tp),
        decode=TierSpec(model=directory, tp_size=decode_tp, page_size=32),
    )
    report = Report(
        title=f"Idle cluster, TP {prefill_tp} -> {decode_tp}: CPU time a second (under {TARGET_SHARE * 1e3:g} ms for each rank)"
    )
    cluster = LocalCluster(spec)
    async with cluster:
        await asyncio.sleep(SETTLE_S)
        for name, samples_s in (await watch(processes_of(cluster), seconds=seconds)).items():
            report.add(name, "CPU time in a second", samples_s)
    if cluster.stop_report is None or not cluster.stop_report.is_clean:
        raise TransferError(f"the cluster did not end well: {cluster.stop_report}")
    return report


def main() -> None:
    parser = argument_parser("CPU time of an idle cluster")
    parser.add_argument("--prefill-tp", type=int, default=4)
    parser.add_argument("--decode-tp", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the cluster is watched")
    parser.add_argument("--model", type=Path, help="model directory; the demo's by default")
    arguments = parser.parse_args()
    seconds = min(3.0, arguments.seconds) if arguments.quick else arguments.seconds
    tiers = {"prefill_tp": arguments.prefill_tp, "decode_tp": arguments.decode_tp}
    asyncio.run(measure(**tiers, seconds=seconds, model=arguments.model)).finish(arguments.json)


if __name__ == "__main__":
    main()
