"""Overlapping decode steps of a node, compared with one step at a time.

    python -m bench.decode_steps [--json FILE] [--quick] [--device cpu|cuda] [--layers N] [--requests N ...] [--rounds N]
    python -m bench.decode_steps --device cpu --step-ms 5

A cluster of one prefill node and one decode node generates the same number of tokens for each of several concurrent requests. For
comparison, the same nodes use an engine without `begin_decode`, which runs one step at a time. The two engines take turns, each
time with new processes. A sample is the mean time of those steps of a round that contain all requests. The tokens of both engines
are compared. In half precision some tokens may differ, because rounding differs between batches.

With `--step-ms`, a step computes nothing. It takes this number of milliseconds on a simulated device, which runs one step after
the other in parallel with the host. So a machine without a GPU shows how much time the host adds to each step.

The model on a GPU has the shape of Llama 3 8B and dummy weights. On a CPU, it is the demo model. All ranks share one GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.llama_engine import llama_config
from bench.timing import Report, argument_parser
from embedded_engine.loading import load_engine
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from transfer.config import NodeConfig
from transfer.engine_types import DecodeItem
from transfer.pb import kvferry_pb2 as pb

ENGINES: Final = {
    "one step at a time": "bench.decode_steps:load_without_begin",
    "begun ahead": "bench.decode_steps:load_with_begin",
}
STEP_MS: Final = "BENCH_STEP_MS"
"""Environment variable that passes the value of `--step-ms` to the ranks."""
PROMPT_TOKENS: Final = 32
VOCAB_SIZE: Final = 700


class WithoutBegin:
    """An engine without `begin_decode`, so that its decode steps do not overlap."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "begin_decode":
            raise AttributeError(name)
        return getattr(self._engine, name)


class Paced:
    """An embedded engine whose decode steps compute nothing and take `step_s` seconds on a simulated device."""

    def __init__(self, engine: Any, step_s: float) -> None:
        self._engine = engine
        self._step_s = step_s
        self._free_s = 0.0  # when the device has finished all steps
        self._chosen: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        return self.begin_decode(items)()

    def begin_decode(self, items: Sequence[DecodeItem]) -> Callable[[], dict[str, int]]:
        newest = {item.request_id: self._chosen[item.request_id] if item.is_unread else item.token_id for item in items}
        tokens = {item.request_id: (newest[item.request_id] * 31 + item.position) % VOCAB_SIZE for item in items}
        over_s = max(time.monotonic(), self._free_s) + self._step_s
        self._chosen, self._free_s = tokens, over_s

        def read() -> dict[str, int]:
            time.sleep(max(0.0, over_s - time.monotonic()))
            return tokens

        return read


def load_with_begin(config: NodeConfig, *, rank: int, rendezvous: Path) -> Any:
    engine, step_ms = load_engine(config, rank=rank, rendezvous=rendezvous), os.environ.get(STEP_MS)
    return engine if step_ms is None else Paced(engine, float(step_ms) / 1e3)


def load_without_begin(config: NodeConfig, *, rank: int, rendezvous: Path) -> WithoutBegin:
    return WithoutBegin(load_with_begin(config, rank=rank, rendezvous=rendezvous))


async def ask(client: NodeClient, salt: int, num_tokens: int) -> tuple[list[int], list[float]]:
    """Return the tokens of one request, and the time of each token."""
    ids = [3 + (salt * 7919 + index * 31) % VOCAB_SIZE for index in range(PROMPT_TOKENS)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=num_tokens, ignore_eos=True)
    tokens, times_s = list[int](), list[float]()
    async with contextlib.aclosing(client.generate(request, timeout_s=600)) as events:
        async for event in events:
            for token in event.tokens.token_ids:
                tokens.append(token)
                times_s.append(time.monotonic())
    return tokens, times_s


async def burst(client: NodeClient, num_requests: int, num_tokens: int) -> tuple[list[list[int]], float]:
    """Return the tokens of all requests, and the mean seconds of the steps that contain all requests."""
    answers = await asyncio.gather(*(ask(client, salt, num_tokens) for salt in range(num_requests)))
    begin_s, end_s = max(times[0] for _, times in answers), min(times[-1] for _, times in answers)
    between = [sum(begin_s <= time_s <= end_s for time_s in times) - 1 for _, times in answers]
    return [tokens for tokens, _ in answers], (end_s - begin_s) / statistics.mean(between)


async def measure(
    device: str,
    model: Path,
    *,
    is_dummy: bool,
    num_requests: tuple[int, ...],
    num_tokens: int,
    num_rounds: int,
    bursts: int,
    step_ms: float | None,
) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    name += "" if step_ms is None else f" with steps of {step_ms:g} ms"
    environment = {} if step_ms is None else {STEP_MS: str(step_ms)}
    report = Report(title=f"Decode steps of a node on {name}, {num_tokens} tokens of each request")
    shared: dict[str, object] = {"device": device, "dummy_weights": is_dummy}
    pool_tokens = (max(num_requests) + 1) * (PROMPT_TOKENS + num_tokens + 32)
    samples_s: dict[tuple[int, str], list[float]] = {(count, way): [] for count in num_requests for way in ENGINES}
    expected: dict[int, list[list[int]]] = {}
    same: dict[int, list[bool]] = {count: [] for count in num_requests}
    for _ in range(num_rounds):
        for way, engine in ENGINES.items():
            settings = shared | {"engine": engine, "limits.max_running_requests": max(num_requests)}
            spec = ClusterSpec(
                prefill=TierSpec(model=model, pool_tokens=pool_tokens, settings=shared),
                decode=TierSpec(model=model, pool_tokens=pool_tokens, settings=settings),
                start_timeout_s=900.0,
            )
            async with LocalCluster(spec, environment=environment) as cluster, NodeClient(cluster.decode.address) as client:
                for count in num_requests:
                    await burst(client, count, num_tokens)  # what the first steps of a size load and compile
                    for _ in range(bursts):
                        tokens, step_s = await burst(client, count, num_tokens)
                        same[count].append(expected.setdefault(count, tokens) == tokens)
                        samples_s[count, way].append(step_s)
    first, ahead = ENGINES
    for count in num_requests:
        alone = report.add(f"{count} requests", first, samples_s[count, first])
        row = report.add(f"{count} requests", ahead, samples_s[count, ahead], against=alone)
        report.facts[f"{count} requests"] = {
            f"steps/s, {first}": 1 / alone.median_s,
            f"steps/s, {ahead}": 1 / row.median_s,
            "rounds with the same tokens": statistics.mean(same[count]),
        }
    return report


def parser() -> argparse.ArgumentParser:
    made = argument_parser("decode steps of a node")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--layers", type=int, default=16, help="layers of the model on a GPU")
    made.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="numbers of concurrent requests")
    made.add_argument("--tokens", type=int, default=256, help="new tokens of each request")
    made.add_argument("--step-ms", type=float, help="duration of each step, which then computes nothing")
    made.add_argument("--rounds", type=int, default=3, help="starts of the nodes for each engine")
    return made


async def run(arguments: argparse.Namespace, folder: Path) -> Report:
    is_gpu, demo = arguments.device == "cuda", await cached_demo_model()
    if is_gpu:
        (folder / "config.json").write_text(json.dumps(llama_config(arguments.layers)))
        shutil.copy(demo / "tokenizer.json", folder)  # a node needs one; its text is not read
    return await measure(
        arguments.device,
        folder if is_gpu else demo,
        is_dummy=is_gpu,
        num_requests=tuple(arguments.requests),
        num_tokens=32 if arguments.quick else arguments.tokens,
        num_rounds=1 if arguments.quick else arguments.rounds,
        bursts=1 if arguments.quick else 3,
        step_ms=arguments.step_ms,
    )


def main() -> None:
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        asyncio.run(run(arguments, Path(folder))).finish(arguments.json)


if __name__ == "__main__":
    main()
