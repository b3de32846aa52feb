"""What keeping KV gains, on a cluster of the demo model: restoring prompts against prefilling them; equal prefixes stored once.

    python -m bench.offload_cluster [--json FILE] [--quick] [--requests 1000]

"prefill" is the time to first token of prompts that nobody has seen; "restore" that of the same prompts on a cluster that was
started again, with the directory that the first one has filled. One prefill and one decode process, one request at a time.

The second part sends requests that share nine tenths of their prompts, 32 at a time, and counts the pages in the directory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from bench.timing import Report, argument_parser
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import cached_demo_model
from kvferry.demo.offload import Figures
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

PAGE_SIZE = 16
LENGTHS = (1000, 2000, 3000, 4000)
PREFIX_PAGES = 9  # of ten
AT_ONCE = 32
TIMEOUT_S = 300.0
SETTLE_S = 60.0
VOCABULARY = range(10, 200)  # ids that the demo model has


def spec_of(model: Path, store: Path) -> ClusterSpec:
    settings: dict[str, object] = {"storage.directory": store}
    return ClusterSpec(
        prefill=TierSpec(model=model, page_size=PAGE_SIZE, pool_tokens=32_768, settings=settings),
        decode=TierSpec(model=model, page_size=PAGE_SIZE, pool_tokens=32_768, settings=settings | {"offload.host_ratio": 1}),
        heartbeat_s=1.0,
    )


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice(VOCABULARY) for _ in range(num_tokens)]


async def first_token_s(client: NodeClient, token_ids: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, that token, and how many tokens of the prompt were there already."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), max_new_tokens=2, ignore_eos=True)
    begun_s, found_s, token, cached = time.monotonic(), 0.0, -1, 0
    async for event in client.generate(request, accept_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S):
        match event.WhichOneof("event"):
            case "tokens" if not found_s:
                found_s, token = time.monotonic() - begun_s, event.tokens.token_ids[0]
            case "done":
                cached = event.done.cached_tokens
    return found_s, token, cached


async def settled(cluster: LocalCluster) -> None:
    """Wait until everything is in the store.

    Raises:
        TransferError: It does not get there.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        figures = Figures((await cluster.decode.http("/metrics"))[1])
        if not figures.sum("offload_backup_queue") and not figures.sum("store_queue_depth"):
            return
        await asyncio.sleep(0.2)
    raise TransferError(f"pages still wait for the store after {SETTLE_S:.0f} s")


async def measure_restore(report: Report, model: Path, lengths: tuple[int, ...], prompts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        found: dict[str, dict[int, list[float]]] = {}
        tokens: dict[tuple[int, int], int] = {}
        for what in ("prefill", "restore"):
            async with LocalCluster(spec_of(model, Path(folder) / "kv")) as cluster, NodeClient(cluster.decode.address) as client:
                await first_token_s(client, prompt_of(-1, 500))  # what a first request compiles and connects is nobody's
                for length in lengths:
                    for seed in range(prompts):
                        seconds, token, cached = await first_token_s(client, prompt_of(seed * 10_000 + length, length))
                        if tokens.setdefault((length, seed), token) != token:
                            raise TransferError(f"prompt {seed} of {length} tokens goes on otherwise once it is restored")
                        if (cached > 0.9 * length) != (what == "restore"):
                            raise TransferError(f"{cached} tokens of a prompt of {length} were there already, in {what}")
                        found.setdefault(what, {}).setdefault(length, []).append(seconds)
                await settled(cluster)
    for length in lengths:
        prefill = report.add(f"prompt of {length} tokens", "prefill", found["prefill"][length])
        restore = report.add(f"prompt of {length} tokens", "restore", found["restore"][length], against=prefill)
        report.headline[f"restore_speed_up_{length}"] = restore.ratio or 0.0


async def measure_once(report: Report, model: Path, num_requests: int) -> None:
    prefix = prompt_of(1, PREFIX_PAGES * PAGE_SIZE)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        store = Path(folder) / "kv"
        async with LocalCluster(spec_of(model, store)) as cluster, NodeClient(cluster.decode.address) as client:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> float:
                async with gate:
                    # The token behind the own page is computed by prefill: only whole pages before it are found again.
                    return (await first_token_s(client, [*prefix, *prompt_of(2 + number, PAGE_SIZE + 1)]))[0]

            begun_s = time.monotonic()
            await one(0)
            seconds = await asyncio.gather(*map(one, range(1, num_requests)))
            took_s = time.monotonic() - begun_s
            await settled(cluster)
            figures = Figures((await cluster.decode.http("/metrics"))[1])
        pages = sum(path.is_file() and path.suffix != ".tmp" for path in store.rglob("*-full-*"))
    report.add(f"{num_requests} requests that share 90 %", "time to first token", seconds)
    asked, expected = num_requests * (PREFIX_PAGES + 1), PREFIX_PAGES + num_requests
    report.facts["equal prefixes"] = {
        "pages of all prompts": asked,
        "pages stored": pages,
        "pages if the prefix is stored once": expected,
        "hit tokens": sum(figures.sum("offload_hit_tokens_total", tier=tier) for tier in ("device", "host", "storage")),
        "seconds": took_s,
    }
    report.headline["stored_over_once"] = pages / expected


def parser() -> argparse.ArgumentParser:
    made = argument_parser("what keeping KV gains, on a cluster")
    made.add_argument("--requests", type=int, default=1000, help="requests that share a prefix")
    return made


async def measure(*, requests: int, is_quick: bool) -> Report:
    model = await cached_demo_model()
    report = Report(title="Prompts restored from a directory, and equal prefixes stored once: the demo model, TP 1 -> 1")
    await measure_restore(report, model, LENGTHS[:2] if is_quick else LENGTHS, 2 if is_quick else 5)
    await measure_once(report, model, 40 if is_quick else requests)
    return report


def main() -> None:
    arguments = parser().parse_args()
    asyncio.run(measure(requests=arguments.requests, is_quick=arguments.quick)).finish(arguments.json)


if __name__ == "__main__":
    main()
