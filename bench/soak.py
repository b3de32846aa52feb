"""Both tiers under traffic while their processes are killed and frozen: nothing wrong, nothing lost, nothing left over.

    python -m bench.soak [--minutes 10] [--json FILE] [--quick] [--seed N] [--clients 6] [--fault-every-s 15]

Prompts of mixed lengths are asked for; of the requests some leave, run out of time or are aborted by an operator, at random
moments. Every token that arrives is compared with what a single process generates. A request may fail only for what was done to
it, and UNAVAILABLE only while a fault was going on. Every `--look-every-s` seconds the traffic pauses, and then nothing may be
held by any node; memory and open files of every process are noted. The exit code is 0 only if nothing of this was broken. A run
is repeated by its seed as far as chance in clients and faults goes; what the machine's timing makes of it differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.soak_faults import Faults
from bench.soak_traffic import MAX_NEW_TOKENS, Prompt, Traffic, make_texts
from bench.timing import Report, argument_parser
from kvferry.demo.kinds import cached_demo_model
from kvferry.demo.reference import ReferenceRun
from kvferry.demo.report import find_leaks
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec

IDLE_WITHIN_S = 10.0
NUM_PROMPTS, FEW_PROMPTS = 40, 6
GROWN_BYTES_PER_MINUTE = 1 << 20
"""What a process may grow by from its second look on. A few KiB of each request are above it, an allocator's drift below."""
GROWN_AT_LEAST_BYTES = 16 << 20
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One process at a moment without requests."""

    at_s: float
    rss_bytes: int
    num_open_files: int


@dataclass(slots=True, kw_only=True)
class Watched:
    """What pauses found.

    Attributes:
        looks: By process: its name with its process id, for a new life is another process.
    """

    num_pauses: int = 0
    leaks: list[str] = field(default_factory=list)
    looks: dict[str, list[Look]] = field(default_factory=lambda: defaultdict(list))

    def growth(self) -> dict[str, float]:
        """Bytes a minute of each process that was seen three times: from its second look, when it is warm, to its last."""
        found = {}
        for name, looks in self.looks.items():
            if len(looks) >= 3:
                first, last = looks[1], looks[-1]
                found[name] = (last.rss_bytes - first.rss_bytes) / (last.at_s - first.at_s) * 60
        return found

    def grown(self) -> list[str]:
        """Processes that grew too much, one line each."""
        return [
            f"{name} grew by {rate / 2**20:.1f} MiB a minute"
            for name, rate in self.growth().items()
            if rate > GROWN_BYTES_PER_MINUTE
            and self.looks[name][-1].rss_bytes - self.looks[name][1].rss_bytes > GROWN_AT_LEAST_BYTES
        ]


def _note(cluster: LocalCluster, watched: Watched) -> None:
    for node in cluster.nodes:
        for name, pid in [
            (f"{node.role} leader", node.pid),
            *((f"{node.role} rank {n}", p) for n, p in enumerate(node.rank_pids)),
        ]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                look = Look(at_s=time.monotonic(), rss_bytes=process.memory_info().rss, num_open_files=process.num_fds())
                watched.looks[f"{name} ({pid})"].append(look)


async def _look(cluster: LocalCluster, watched: Watched) -> None:
    """Nobody asks for anything: wait until nothing is held, then note what each process takes."""
    deadline_s = time.monotonic() + IDLE_WITHIN_S
    while True:
        leaks = [line for node in cluster.nodes for line in find_leaks(await node.status())]
        if not leaks or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_POLL_S)
    watched.num_pauses += 1
    watched.leaks += [f"pause {watched.num_pauses}: {line}" for line in leaks]
    _note(cluster, watched)


async def _reference(model: Path, texts: list[str], cluster: LocalCluster) -> list[Prompt]:
    with ReferenceRun(model, texts, MAX_NEW_TOKENS, cluster.environment) as run:
        results = await run.results()
    return [
        Prompt(text=text, num_tokens=result.prompt_tokens, expected=result.token_ids)
        for text, result in zip(texts, results, strict=True)
        if result is not None
    ]


def _spec(model: Path) -> ClusterSpec:
    settings = {"restart.backoff_s": 0.1, "restart.max_backoff_s": 1.0, "restart.max_restarts": 100_000, "dtype": "float32"}
    return ClusterSpec(
        prefill=TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=8192, settings=settings),
        decode=TierSpec(model=model, tp_size=1, page_size=32, pool_tokens=16_384, settings=settings),
        heartbeat_s=0.5,
        start_timeout_s=150.0,
    )


async def soak(
    *, minutes: float, seed: int, num_prompts: int, num_clients: int, fault_every_s: float, look_every_s: float, report: Report
) -> list[str]:
    """Run it, fill the report.

    Returns:
        What must not have happened and did, one line each.

    Raises:
        TransferError: The cluster does not start, or did not come back after a fault.
    """
    model = await cached_demo_model()
    chance, cluster, watched = random.Random(seed), LocalCluster(_spec(model)), Watched()
    async with cluster:
        prompts = await _reference(model, make_texts(num_prompts, seed), cluster)
        faults = Faults(cluster, seed=seed + 1)
        traffic = Traffic(
            cluster.decode.address, prompts, num_clients=num_clients, seed=seed + 2, may_be_unreachable=faults.explains
        )
        began_s = time.monotonic()
        ends_s = began_s + minutes * 60
        await _look(cluster, watched)
        while time.monotonic() < ends_s:
            traffic.start()
            pause_s = min(ends_s, time.monotonic() + look_every_s)
            while (left_s := pause_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, chance.expovariate(1 / fault_every_s)))
                if time.monotonic() < pause_s:
                    fault = await faults.inject()
                    print(f"{time.monotonic() - began_s:7.1f} s  {fault.what}, healed in {fault.healed_s:.1f} s", file=sys.stderr)
            await traffic.stop()
            await _look(cluster, watched)
            print(f"{time.monotonic() - began_s:7.1f} s  {traffic.tally.num_requests} requests", file=sys.stderr, flush=True)
        took_s = time.monotonic() - began_s
    stopped = cluster.stop_report
    assert stopped is not None
    tally = traffic.tally
    broken = [*tally.violations, *watched.leaks, *watched.grown()]
    if tally.num_violations > len(tally.violations):
        broken.append(f"and {tally.num_violations - len(tally.violations)} more requests with a wrong end")
    if not stopped.is_clean:
        broken.append(f"the nodes did not end well: exit codes {dict(stopped.exit_codes)}, left {stopped.survivors}")
    if tally.served_s:
        report.add("2 -> 1 ranks, pages 16 -> 32", "a request that was served, asked to last token", tally.served_s)
    for what in sorted({fault.what for fault in faults.all}):
        report.add(what, "fault to joined again", [fault.healed_s for fault in faults.all if fault.what == what])
    report.facts["requests"] = dict(sorted(tally.ends.items()))
    report.facts["faults"] = dict(sorted(Counter(fault.what for fault in faults.all).items()))
    growth = watched.growth()
    report.facts["memory"] = {
        "processes": len(watched.looks),
        "seen three times or more": len(growth),
        "median growth, MiB a minute": statistics.median(growth.values()) / 2**20 if growth else 0.0,
        "largest growth, MiB a minute": max(growth.values()) / 2**20 if growth else 0.0,
        "most open files": max(look.num_open_files for looks in watched.looks.values() for look in looks),
    }
    report.facts["verdict"] = {"pauses": watched.num_pauses, "broken": "; ".join(broken) or "nothing"}
    report.headline |= {
        "minutes": took_s / 60,
        "requests": tally.num_requests,
        "tokens_verified": tally.num_tokens_verified,
        "faults": len(faults.all),
        "violations": tally.num_violations,
        "leaks": len(watched.leaks),
        "seed": seed,
    }
    return broken


def main() -> int:
    parser = argument_parser("traffic, aborts, and processes that are killed and frozen")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6, help="requests in flight")
    parser.add_argument("--fault-every-s", type=float, default=15.0, help="mean time from one fault's end to the next one")
    parser.add_argument("--look-every-s", type=float, default=60.0, help="time between pauses in which nothing may be held")
    arguments = parser.parse_args()
    report = Report(title="Soak: traffic with aborts, while processes are killed and frozen")
    broken = asyncio.run(
        soak(
            minutes=min(0.2, arguments.minutes) if arguments.quick else arguments.minutes,
            seed=arguments.seed,
            num_prompts=FEW_PROMPTS if arguments.quick else NUM_PROMPTS,
            num_clients=arguments.clients,
            fault_every_s=2.0 if arguments.quick else arguments.fault_every_s,
            look_every_s=arguments.look_every_s,
            report=report,
        )
    )
    report.finish(arguments.json)
    for line in broken:
        print(f"BROKEN: {line}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
