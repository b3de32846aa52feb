"""Pictures of the dashboards, from a real Prometheus that scrapes a real cluster of two and two nodes under load that changes.

    python -m bench.watched --out docs/images [--sick] [--device cuda]

The load: one client, then two with prompts of up to 1,000 tokens, then one. ``--sick``: small rings, and one client, then eight
with prompts of up to 1,500 tokens, then four while a prefill node is killed and started again, then one. It draws only
`SICK_ROW`, as `SICK_PICTURE`. Nothing is drawn but what the panels' own expressions give. Needs Prometheus (Debian and Ubuntu:
apt-get install prometheus).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from deploy.monitoring import RULES, pictures
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.prometheus import HOW_TO_GET_IT, find_prometheus, prometheus
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

TARGETS = "targets.json"
RATE_INTERVAL = "8s"  # ranks tell their leader their numbers once a second
TIMEOUT_S = 120.0
VOCABULARY = range(10, 200)  # ids that the demo model has
MOST_RESTART_S = 60.0
SICK_ROW, SICK_PICTURE = "dashboard-overview-bottleneck.png", "dashboard-sick.png"
RING_BYTES, SICK_RING_BYTES = 64 << 20, 4 << 20


def spec_of(model: Path, *, device: str, is_sick: bool) -> ClusterSpec:
    """Return a cluster whose nodes use the GPUs in turn.

    A sick cluster has small rings, so that chunks wait for credit when many are under way.
    """
    settings = {"device": device}
    num_gpus = max(1, torch.cuda.device_count())
    prefill_gpus, decode_gpus = ([node % num_gpus for node in nodes] for nodes in ((0, 1), (2, 3)))
    return ClusterSpec(
        prefill=TierSpec(model=model, page_size=16, pool_tokens=16_384, settings=settings, first_devices=prefill_gpus),
        decode=TierSpec(model=model, page_size=32, pool_tokens=16_384, settings=settings, first_devices=decode_gpus),
        num_prefill=len(prefill_gpus),
        num_decode=len(decode_gpus),
        chunk_tokens=256,
        ring_bytes=SICK_RING_BYTES if is_sick else RING_BYTES,
        heartbeat_s=1.0,
    )


def name_targets(cluster: LocalCluster, folder: Path) -> None:
    """Tell Prometheus where the nodes are now, by names that stay when a node is started again at another port."""
    names = (*cluster.spec.names("prefill"), *cluster.spec.names("decode"))
    named = dict(zip(names, (*cluster.prefill_nodes, *cluster.decode_nodes), strict=True))
    targets = [{"targets": [node.http_address], "labels": {"instance": name}} for name, node in named.items()]
    new = folder / f"new-{TARGETS}"
    new.write_text(json.dumps(targets), encoding="utf-8")
    new.replace(folder / TARGETS)


async def ask_on(cluster: LocalCluster, seed: int, num_tokens: int) -> None:
    """One client: a request after the other, on decode nodes by turns, until it is cancelled."""
    chance = random.Random(seed)
    async with NodeClient(cluster.decode_nodes[seed % len(cluster.decode_nodes)].address) as client:
        while True:
            prompt = [chance.choice(VOCABULARY) for _ in range(chance.randint(num_tokens // 2, num_tokens))]
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_new_tokens=24, ignore_eos=True)
            with suppress(TransferError):  # of a prefill node that was killed; counted by the nodes
                async for _ in client.generate(request, accept_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S):
                    pass


async def load(cluster: LocalCluster, *, clients: int, num_tokens: int, seconds: float) -> None:
    tasks = [asyncio.ensure_future(ask_on(cluster, seed, num_tokens)) for seed in range(clients)]
    await asyncio.sleep(seconds)
    for task in tasks:
        if task.done():
            await task  # raises what ended it
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def lose_one(cluster: LocalCluster, folder: Path, after_s: float) -> None:
    """Kill the second prefill node, and start it again."""
    await asyncio.sleep(after_s)
    os.kill(cluster.prefill_nodes[1].pid, signal.SIGKILL)
    while cluster.prefill_nodes[1].exit_code is None:
        await asyncio.sleep(0.1)
    cluster.launch("prefill", 1)
    await cluster.wait_joined(MOST_RESTART_S)
    name_targets(cluster, folder)


async def healthy_phases(cluster: LocalCluster, phase_s: float) -> None:
    for clients in (1, 2, 1):
        await load(cluster, clients=clients, num_tokens=1000, seconds=phase_s)


async def sick_phases(cluster: LocalCluster, folder: Path, phase_s: float) -> None:
    await load(cluster, clients=1, num_tokens=1000, seconds=phase_s)
    await load(cluster, clients=8, num_tokens=1500, seconds=1.5 * phase_s)
    lost = asyncio.ensure_future(lose_one(cluster, folder, phase_s / 4))
    await load(cluster, clients=4, num_tokens=1000, seconds=1.5 * phase_s)
    await lost
    await load(cluster, clients=1, num_tokens=1000, seconds=phase_s / 2)


async def watch(out: Path, phase_s: float, folder: Path, *, device: str, is_sick: bool) -> int:
    async with LocalCluster(spec_of(await cached_demo_model(), device=device, is_sick=is_sick)) as cluster:
        name_targets(cluster, folder)
        with prometheus(folder, folder / TARGETS, environment=cluster.environment, rules=RULES) as server:
            begun_s = time.time()
            await (sick_phases(cluster, folder, phase_s) if is_sick else healthy_phases(cluster, phase_s))
            drawn = ["--prometheus", server.url, "--out", str(folder if is_sick else out), "--rate-interval", RATE_INTERVAL]
            code = await asyncio.to_thread(pictures.main, [*drawn, "--last", str(time.time() - begun_s)])
    if is_sick and not code:
        shutil.copyfile(folder / SICK_ROW, out / SICK_PICTURE)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.watched", description=__doc__)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the pictures go")
    parser.add_argument("--phase", metavar="SECONDS", type=float, default=40.0, help="of the first phase (default: %(default)g)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: nodes use the visible GPUs in turn")
    parser.add_argument("--sick", action="store_true", help="a cluster with faults, for the runbooks")
    given = parser.parse_args()
    if find_prometheus() is None:
        print(f"bench.watched needs prometheus; {HOW_TO_GET_IT}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvferry-watched-") as folder:
        return asyncio.run(watch(given.out, given.phase, Path(folder), device=given.device, is_sick=given.sick))


if __name__ == "__main__":
    sys.exit(main())
