"""Measure the time to first token of a lone request, with an engine that computes nothing.

    python -m bench.lone_request [--json FILE] [--quick] [--tokens 64] [--requests 100] [--transport auto] [--trace]
    python -m bench.lone_request --against DIR [--turns 3]

One prefill node and one decode node on the loopback device, each with one rank, serve one request every 100 ms. So the time is
that of kvferry's own hand-overs between processes and threads, and of a payload of 16 KiB per token.

With `--trace`, `bench.handover_site` records the calls of some functions in all processes, and a table shows them in order. Each
record takes a few microseconds. With `--against`, this checkout and the one in `DIR` run in turns, each with this file's cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models

from bench.handovers import Row, Window, recording, rows_of
from bench.timing import ROOT, Report, argument_parser
from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

TARGET_S: Final = 6.5e-3
"""Median on two quiet cores, with 64 tokens."""

FIRST_TOKEN: Final = "time to first token"
SITE: Final = Path(__file__).resolve().with_name("handover_site")
PAUSE_S: Final = 0.1
WARMUP_REQUESTS: Final = 5


def cluster_spec(model: Path, transport: str) -> ClusterSpec:
    """Return one node of each tier with the null engine. `model` is an empty folder."""
    (model / "config.json").write_text("{}")
    Tokenizer(models.BPE()).save(str(model / "tokenizer.json"))
    settings = {"engine": "null_engine:load", "limits.max_running_requests": 32}
    return ClusterSpec(
        prefill=TierSpec(model=model, settings=settings | {"limits.max_step_tokens": 4096}),
        decode=TierSpec(model=model, page_size=32, settings=settings),
        transport=transport,
        chunk_tokens=4096,
    )


async def send(client: NodeClient, num_tokens: int, number: int) -> list[Window]:
    """Send requests one at a time, and return the time from each request to its first token, after some warm-up."""
    windows = []
    for index in range(WARMUP_REQUESTS + number):
        await asyncio.sleep(PAUSE_S)
        ids = [(index * 7 + token) % 400 for token in range(num_tokens)]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=1)
        begin_ns, end_ns = time.monotonic_ns(), 0
        async for event in client.generate(request):
            if event.HasField("tokens") and not end_ns:
                end_ns = time.monotonic_ns()
        if not end_ns:
            raise TransferError("a request ended without a token")
        if index >= WARMUP_REQUESTS:
            windows.append(Window(begin_ns=begin_ns, end_ns=end_ns))
    return windows


async def measure(num_tokens: int, number: int, transport: str, *, is_traced: bool) -> tuple[list[Window], list[Row]]:
    """Start a cluster, send requests, and stop it.

    Returns:
        The times of the requests, and the rows of the trace, if any.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-lone-") as name:
        model, records = Path(name) / "model", Path(name) / "records"
        model.mkdir()
        records.mkdir()
        environment = {"PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])}
        if is_traced:
            environment["HANDOVERS"] = recording(records)["HANDOVERS"]
        cluster = LocalCluster(cluster_spec(model, transport), environment=environment)
        async with cluster:
            async with NodeClient(cluster.decode.address) as client:
                windows = await send(client, num_tokens, number)
            for node in cluster.nodes:
                names = {node.pid: f"{node.role} leader"} | {pid: f"{node.role} rank" for pid in node.rank_pids}
                for pid, process in names.items():
                    if (record := records / f"process.{pid}").exists():
                        record.rename(records / f"{process}.{pid}")
            rows = rows_of(records, windows)
        if cluster.stop_report is None or not cluster.stop_report.is_clean:
            raise TransferError(f"the cluster did not stop cleanly: {cluster.stop_report}")
    return windows, rows


def print_trace(rows: Sequence[Row], windows: Sequence[Window], console: Console) -> None:
    """Print each hand-over with its time, and the time since the one before."""
    end_ms = statistics.median((window.end_ns - window.begin_ns) / 1e6 for window in windows)
    table = Table(title=f"Hand-overs of a lone request, medians of {len(windows)}", title_justify="left")
    for name in ("ms", "+ ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("process", "hand-over"):
        table.add_column(name, no_wrap=True)
    before_ms = 0.0
    for row in rows:
        if 2 * row.prompts > len(windows):
            table.add_row(f"{row.first_ms:.2f}", f"{row.first_ms - before_ms:.2f}", row.role, row.label)
            before_ms = row.first_ms
    table.add_row(f"{end_ms:.2f}", f"{end_ms - before_ms:.2f}", "client", "has the first token")
    console.print(table)


def samples_of(checkout: Path, arguments: argparse.Namespace) -> list[float]:
    """Return the seconds to first token of one run with the packages of a checkout."""
    with tempfile.TemporaryDirectory(prefix="kvferry-lone-") as folder:
        file = Path(folder) / "report.json"
        # -P: the packages come from the checkout, not from the folder of this file.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--json", str(file)]
        command += ["--tokens", str(arguments.tokens), "--requests", str(arguments.requests), "--transport", arguments.transport]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        (row,) = json.loads(file.read_text())["rows"]
    samples: list[float] = row["samples_s"]
    return samples


def compare(report: Report, arguments: argparse.Namespace) -> None:
    """Run both checkouts in turns. Add a row for each, with the ratio of the other's time to this one's."""
    samples: dict[Path, list[float]] = {arguments.against: [], ROOT: []}
    for _ in range(arguments.turns):
        for checkout, found in samples.items():
            found += samples_of(checkout, arguments)
    case = f"{arguments.tokens} tokens"
    other = report.add(case, f"{FIRST_TOKEN}, {arguments.against}", samples[arguments.against])
    report.add(case, FIRST_TOKEN, samples[ROOT], against=other)


def main() -> None:
    parser = argument_parser("Time to first token of a lone request, with an engine that computes nothing")
    parser.add_argument("--tokens", type=int, default=64, help="length of the prompts")
    parser.add_argument("--requests", type=int, default=100, help="requests of a run, one every 100 ms")
    parser.add_argument("--transport", default="auto", help="the setting transport.name of both nodes")
    parser.add_argument("--trace", action="store_true", help="record the hand-overs, and print them")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to be run in turns with this one")
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout with --against")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.turns = min(10, arguments.requests), 1
    report = Report(title=f"A lone request (under {TARGET_S * 1e3:g} ms on two quiet cores)")
    load = os.getloadavg()[0]
    trace: list[dict[str, object]] = []
    if arguments.against is not None:
        arguments.against = arguments.against.resolve()
        compare(report, arguments)
    else:
        measured = measure(arguments.tokens, arguments.requests, arguments.transport, is_traced=arguments.trace)
        windows, rows = asyncio.run(measured)
        report.add(f"{arguments.tokens} tokens", FIRST_TOKEN, [(window.end_ns - window.begin_ns) / 1e9 for window in windows])
        if arguments.trace:
            print_trace(rows, windows, Console(width=140))
            trace = [asdict(row) for row in rows]
    report.facts["machine"] = {"load before": load}
    report.print()
    if arguments.json is not None:
        report.facts |= {"trace": {"rows": trace}} if trace else {}
        report.write_json(arguments.json)


if __name__ == "__main__":
    main()
