"""Measure the tokens per second of a decode leader, with an engine that computes nothing.

    python -m bench.decode_leader [--json FILE] [--quick] [--streams 128] [--tokens 512]

One prefill node and one decode node on the loopback device, each with one rank, generate tokens for many streams of one client.
The leader, the ranks and the client share the cores, so the table shows the tokens that arrived, and the CPU time of the leader
for each of them. Its reciprocal is the number of tokens per second of a leader that has a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.lone_request import SITE, cluster_spec
from bench.timing import Report, argument_parser
from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import LocalCluster
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

TARGET_TOKENS_PER_S: Final = 25_000
TOKENS_PER_S: Final = "tokens per second"
LEADER_CPU: Final = "CPU time of the leader per token"
PROMPT_TOKENS: Final = 32
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


async def generate(client: NodeClient, number: int, num_tokens: int) -> int:
    """Generate tokens for one prompt, and return how many arrived."""
    ids = [(number * 7 + token) % 400 for token in range(PROMPT_TOKENS)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=num_tokens)
    return sum([len(event.tokens.token_ids) async for event in client.generate(request) if event.HasField("tokens")])


async def measure(arguments: argparse.Namespace, report: Report) -> None:
    """Generate with all streams at once, and add the rows.

    Raises:
        TransferError: Tokens are missing.
    """
    streams: int = arguments.streams
    with tempfile.TemporaryDirectory(prefix="kvferry-leader-") as name:
        model = Path(name) / "model"
        model.mkdir()
        environment = {"PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])}
        spec = cluster_spec(model, "auto")
        pool_tokens = streams * (PROMPT_TOKENS + arguments.tokens + 2 * spec.decode.page_size)
        settings = dict(spec.decode.settings) | {"limits.max_running_requests": streams}
        spec = replace(spec, decode=replace(spec.decode, pool_tokens=pool_tokens, settings=settings))
        async with LocalCluster(spec, environment=environment) as cluster, NodeClient(cluster.decode.address) as client:
            await asyncio.gather(*(generate(client, number, 8) for number in range(streams)))
            pids = {"leader": cluster.decode.pid, "rank": cluster.decode.rank_pids[0], "client": os.getpid()}
            token_s: list[float] = []
            used_s: dict[str, list[float]] = {name: [] for name in pids}
            for number in range(1, arguments.rounds + 1):
                before = {name: cpu_s(pid) for name, pid in pids.items()}
                begun_s = time.monotonic()
                work = (generate(client, number * streams + stream, arguments.tokens) for stream in range(streams))
                tokens = sum(await asyncio.gather(*work))
                if tokens != streams * arguments.tokens:
                    raise TransferError(f"{tokens} of {streams * arguments.tokens} tokens arrived")
                token_s.append((time.monotonic() - begun_s) / tokens)
                for name, pid in pids.items():
                    used_s[name].append((cpu_s(pid) - before[name]) / tokens)
    case = f"{streams} streams"
    report.add(case, "time per token", token_s)
    for name, samples in used_s.items():
        report.add(case, LEADER_CPU if name == "leader" else f"CPU time of the {name} per token", samples)
    report.facts[case] = {TOKENS_PER_S: 1 / statistics.median(token_s)}


def main() -> None:
    parser = argument_parser("Tokens per second of a decode leader, with an engine that computes nothing")
    parser.add_argument("--streams", type=int, default=128, help="requests that generate at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="number of samples")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each request")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.rounds = min(64, arguments.tokens), 1
    report = Report(title=f"Token streams of a decode leader (target: {TARGET_TOKENS_PER_S:,} tokens/s on a core of its own)")
    asyncio.run(measure(arguments, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
