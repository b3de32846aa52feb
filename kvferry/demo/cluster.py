"""`kvferry demo-cluster`: run several nodes of each tier under load, with Prometheus, and print a summary."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from kvferry.bench_serve.command import put_load
from kvferry.bench_serve.options import LoadOptions
from kvferry.bench_serve.report import LoadReport, print_report
from kvferry.bench_serve.summary import Spread
from kvferry.cli.json_report import is_standard_output, write_report
from kvferry.cli.text_bars import text_table
from kvferry.demo.command import wait_idle
from kvferry.demo.kinds import cached_demo_model
from kvferry.demo.options import DemoClusterOptions
from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.prometheus import HOW_TO_GET_IT, Prometheus, find_prometheus, prometheus
from node_runtime import exit_codes
from node_runtime.view_cells import Row, bandwidth, latency, table_of
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

POOL_TOKENS: Final = 8192
PROMPT_TOKENS: Final = "lognormal:200:0.6:1500"
OUTPUT_TOKENS: Final = "uniform:8:24"
SLO_TTFT_S: Final = 2.0
SLO_TPOT_S: Final = 0.2
STATUS_S: Final = 0.5
RULES: Final = Path(__file__).parents[2] / "deploy" / "monitoring" / "rules" / "kvferry.yaml"
"""It exists in a checkout only, not in an installed package."""


@dataclass(slots=True, kw_only=True)
class ClusterSummary:
    """Outcome of a run.

    Args:
        ready_s: Seconds from the start of the nodes until every decode node had joined every prefill node.
        page_ms: Milliseconds of each read of a node's `/metrics` under load.
        page_bytes: Size of the largest page.
        ring_peaks: Highest occupancy of each decode node's ring, from 0 to 1, by name.
        links: The measured links, by the names of both ends.
        alerts: Names of pending or firing alerts; None without Prometheus.
        leftovers: Resources that nodes still held afterwards, and problems of the shutdown.
        has_ended: The nodes were stopped.
    """

    ready_s: float
    load: LoadReport
    page_ms: list[float]
    page_bytes: int
    ring_peaks: dict[str, float]
    links: dict[str, pb.LinkStatus]
    alerts: list[str] | None
    leftovers: list[str] = field(default_factory=list)
    has_ended: bool = False

    @property
    def is_success(self) -> bool:
        served_all = all(one.served == one.requests > 0 and one.failed_warm_up == 0 for one in self.load.summaries)
        return not self.leftovers and served_all

    def to_json(self) -> dict[str, Any]:
        return {
            "ready_s": self.ready_s,
            "load": self.load.to_json(),
            "metrics_page": {
                "median_ms": Spread.of(self.page_ms).p50,
                "most_ms": Spread.of(self.page_ms).most,
                "bytes": self.page_bytes,
            },
            "ring_peaks": self.ring_peaks,
            "links": {
                name: {"lane": link.lane, "latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
                for name, link in self.links.items()
            },
            "alerts": self.alerts,
            "leftovers": self.leftovers,
            "is_success": self.is_success,
        }


async def run_demo_cluster(options: DemoClusterOptions) -> int:
    """Run the nodes under load, print a summary, and return the exit code. However it ends, no process of it is left.

    Raises:
        TransferError: It could not be run, or its summary could not be written.
    """
    console = Console(highlight=False, soft_wrap=True, stderr=is_standard_output(options.json_file))
    model = await cached_demo_model()
    tier = TierSpec(model=model, pool_tokens=POOL_TOKENS)
    cluster = LocalCluster(ClusterSpec(prefill=tier, decode=tier, num_prefill=options.num_prefill, num_decode=options.num_decode))
    console.print(f"starting {options.num_prefill} prefill and {options.num_decode} decode nodes")
    begun_s = time.monotonic()
    async with cluster:
        ready_s = time.monotonic() - begun_s
        console.print(f"ready after {ready_s:.1f} s; every decode node has joined every prefill node")
        with _watched(cluster, console) as server:
            _say_where(cluster, server, console)
            summary = await _under_load(options, cluster, server, console, ready_s=ready_s)
            if options.is_kept:  # the summary comes now, because a signal ends the command here
                try:
                    _publish(summary, options, console)
                except TransferError as error:  # the kept cluster is worth more than its report
                    console.print(f"kvferry demo-cluster: {error}")
                console.print("still running; Ctrl-C ends it")
                await asyncio.Event().wait()
        stopped = await cluster.stop()
    summary.leftovers += stopped.complaints
    summary.has_ended = True
    _publish(summary, options, console)
    return exit_codes.OK if summary.is_success else exit_codes.FAILED


def _publish(summary: ClusterSummary, options: DemoClusterOptions, console: Console) -> None:
    print_summary(summary, console)
    write_report(summary.to_json(), options.json_file)


@contextlib.contextmanager
def _watched(cluster: LocalCluster, console: Console) -> Iterator[Prometheus | None]:
    """Run a Prometheus that scrapes every node, if it is installed."""
    if find_prometheus() is None:
        console.print(f"no Prometheus here, so nobody keeps what /metrics says; {HOW_TO_GET_IT}")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-prometheus-") as folder:
        targets = [node.http_address for node in cluster.nodes]
        rules = RULES if RULES.is_file() else None
        with prometheus(Path(folder), targets, environment=cluster.environment, rules=rules) as server:
            yield server


def _say_where(cluster: LocalCluster, server: Prometheus | None, console: Console) -> None:
    for node in cluster.nodes:
        console.print(f"  {node.name:<10} page http://{node.http_address}/   gRPC {node.address}")
    if server is not None:
        console.print(f"  prometheus {server.url}/graph")
    console.print(f"  in a terminal: kvferry top --insecure {cluster.decode.address}")


async def _under_load(
    options: DemoClusterOptions, cluster: LocalCluster, server: Prometheus | None, console: Console, *, ready_s: float
) -> ClusterSummary:
    console.print(f"{options.rate:g} requests a second for {options.seconds:g} s, at random moments")
    load = LoadOptions(
        targets=[node.address for node in cluster.decode_nodes],
        rates=[str(options.rate)],
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        duration_s=options.seconds,
        num_warm_up=len(cluster.nodes),
        slo_ttft_s=SLO_TTFT_S,
        slo_tpot_s=SLO_TPOT_S,
    )
    page_ms: list[float] = []
    sizes: list[int] = []
    peaks: dict[str, float] = {}
    watching = asyncio.create_task(_watch(cluster.nodes, page_ms, sizes, peaks))
    try:
        report = await put_load(load)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    statuses = {node.name: await node.status() for node in cluster.nodes}
    return ClusterSummary(
        ready_s=ready_s,
        load=report,
        page_ms=page_ms,
        page_bytes=max(sizes, default=0),
        ring_peaks=peaks,
        links=_links(cluster, statuses),
        alerts=await asyncio.to_thread(_alerts, server) if server is not None else None,
        leftovers=await wait_idle(cluster),
    )


async def _watch(nodes: Sequence[ClusterNode], page_ms: list[float], sizes: list[int], peaks: dict[str, float]) -> None:
    """Read the metrics of every node as a scraper does, and the peaks of its rings. A node that does not answer is skipped."""
    while True:
        for node in nodes:
            begun_s = time.monotonic()
            code, text = await node.http("/metrics")
            if code == 200:
                page_ms.append((time.monotonic() - begun_s) * 1e3)
                sizes.append(len(text))
            with contextlib.suppress(TransferError):
                for rank in (await node.status()).ranks:
                    if rank.ring_capacity:
                        peaks[node.name] = max(peaks.get(node.name, 0.0), rank.ring_peak_bytes / rank.ring_capacity)
        await asyncio.sleep(STATUS_S)


def _links(cluster: LocalCluster, statuses: dict[str, pb.NodeStatus]) -> dict[str, pb.LinkStatus]:
    """Return the links of the decode nodes, by the names of both ends."""
    names = {status.instance.incarnation: name for name, status in statuses.items()}
    return {
        f"{names.get(link.peer_incarnation, '?')} -> {node.name}": link
        for node in cluster.decode_nodes
        for link in statuses[node.name].links
    }


def _alerts(server: Prometheus) -> list[str]:
    """Return the names of the pending and firing alerts."""
    return sorted({alert["labels"]["alertname"] for alert in server.asked("alerts")["alerts"]})


def print_summary(summary: ClusterSummary, console: Console) -> None:
    """Print tables of the load and of the links, and a line for everything else."""
    print_report(summary.load, console)
    headings = ("link", "lane", ">latency", ">bandwidth")
    rows = (
        Row(cells=(name, link.lane, latency(link.latency_s), bandwidth(link.bandwidth_bytes_per_s)))
        for name, link in summary.links.items()
    )
    console.print(text_table(table_of("links, as probed at attach", headings, rows)))
    console.print(f"ready after {summary.ready_s:.1f} s")
    rings = ", ".join(f"{name} {peak:.0%}" for name, peak in summary.ring_peaks.items())
    console.print(f"rings at their fullest: {rings}")
    page_ms = Spread.of(summary.page_ms)
    times = f"{page_ms.p50:.1f} ms in the median, {page_ms.most:.1f} ms at most"
    console.print(f"/metrics: {times}, of {len(summary.page_ms)} readings under load; {summary.page_bytes / 1024:.0f} KiB")
    if summary.alerts is not None:
        console.print(f"alerts pending or firing: {', '.join(summary.alerts) or 'none'}")
    for line in summary.leftovers:
        console.print(f"left over: {escape(line)}", style="red")
    if summary.is_success:
        ended = "every node drained and ended with exit code 0, " if summary.has_ended else ""
        console.print(f"every request was answered, {ended}nothing is left", style="green")
    else:
        console.print("not everything went well; see above", style="red")
