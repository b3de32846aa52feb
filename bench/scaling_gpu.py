"""The simulation against a real cluster of two GPUs: Llama 3 8B's shape, one GPU for each tier, KV over NVLink.

    python -m bench.scaling_gpu [--json FILE] [--plot FILE.png] [--quick] [--times FILE]

Nothing is calibrated here: the stage times are those that other benchmarks have measured (bench/simulation/h200-llama-3-8b.yaml),
with NVLink between the nodes. Weights are made up, and the vocabulary is the demo tokenizer's. `kvferry bench serve` and the
simulation get the same requests at the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.gpu_decode import CONFIG
from bench.gpu_stages import NUM_LAYERS, TINY
from bench.scaling import SEED, VOCAB_SIZE, compare, print_rows, same_requests, serve, write_picture
from bench.simulate import stage_times
from bench.simulation.outcome import simulate
from bench.simulation.settings import ClusterSettings
from bench.simulation.stage_times import StageTimes
from bench.timing import Environment
from kvferry.bench_serve.options import shape_of
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec

NVLINK_BYTES_PER_S: Final = 3.61e11
"""The gather that stores into another GPU's ring, which is the write: bench/results/2026-11-22-two-h200.json."""
PROMPTS, OUTPUTS = "lognormal:1024:0.8:8192", "lognormal:96:0.6:512"
RATES: Final = (2.0, 4.0, 6.0, 7.5)
CHUNK_TOKENS, STEP_TOKENS, CONTEXT = 2048, 4096, 16_384
PREFILL_POOL, DECODE_POOL, RUNNING = 131_072, 524_288, 64


def settings_of_simulation() -> ClusterSettings:
    """As the nodes are set. Pieces of direct sessions take no staging slot."""
    return ClusterSettings(
        prefill_pool_tokens=PREFILL_POOL,
        decode_pool_tokens=DECODE_POOL,
        chunk_tokens=CHUNK_TOKENS,
        max_step_tokens=STEP_TOKENS,
        prefill_running=RUNNING,
        decode_running=RUNNING,
        staging_slots=10_000,
    )


def spec(model: Path, *, is_rehearsal: bool) -> ClusterSpec:
    shared: dict[str, object] = {"dummy_weights": True, "limits.max_running_requests": RUNNING}
    if not is_rehearsal:
        shared |= {"device": "cuda", "limits.max_seq_len": CONTEXT}
    return ClusterSpec(
        prefill=TierSpec(model=model, pool_tokens=PREFILL_POOL, settings=shared | {"limits.max_step_tokens": STEP_TOKENS}),
        decode=TierSpec(model=model, pool_tokens=DECODE_POOL, settings=shared | ({} if is_rehearsal else {"first_device": 1})),
        transport="ucx" if is_rehearsal else "cuda_ipc",
        chunk_tokens=CHUNK_TOKENS,
        start_timeout_s=280.0,
    )


async def make_model(folder: Path, *, is_rehearsal: bool) -> Path:
    """A directory with a configuration and a tokenizer, and no weights."""
    config = CONFIG | {"num_hidden_layers": 2 if is_rehearsal else NUM_LAYERS, "max_position_embeddings": CONTEXT}
    config |= (TINY if is_rehearsal else {}) | {"vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy((await cached_demo_model()) / name, folder / name)
    return folder


async def run(times: StageTimes, *, is_quick: bool, is_rehearsal: bool) -> dict[str, Any]:
    """Load the cluster at each rate, and compare."""
    rates, duration_s = (RATES[:1], 5.0) if is_quick else (RATES, 40.0)
    times = replace(times, link_bytes_per_s=NVLINK_BYTES_PER_S, gather_bytes_per_s=0.0)
    drawn = shape_of(PROMPTS, OUTPUTS, shared_prefix=0.0, num_prefixes=1)
    rows, load_before = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        model = await make_model(Path(folder), is_rehearsal=is_rehearsal)
        async with LocalCluster(spec(model, is_rehearsal=is_rehearsal)) as cluster:
            await serve(cluster, rates[:1], 3.0 if is_quick else 15.0, prompts=PROMPTS, outputs=OUTPUTS)  # kernels are compiled
            served = await serve(cluster, rates, duration_s, prompts=PROMPTS, outputs=OUTPUTS)
            plans = [peer.chunk_plan.layers_per_group for peer in (await cluster.decode.status()).peers]
    for rate, measured in zip(rates, served["rates"], strict=True):
        outcome = simulate(times, settings_of_simulation(), same_requests(drawn, rate, duration_s))
        rows.append({"prefill": 1, "decode": 1, "load": outcome.busy["prefill steps"], **compare(measured, outcome)})
    return {
        "title": "The simulation against a real cluster of two GPUs",
        "environment": Environment.here().to_json(),
        "is_quick": is_quick,
        "load_before": load_before,
        "setting": {"prompts": PROMPTS, "outputs": OUTPUTS, "duration_s": duration_s, "seed": SEED, "layers_per_group": plans},
        "stage_times": times.to_json(),
        "measured": served["rates"],
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="the simulation against a real cluster of two GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of measured and predicted")
    parser.add_argument("--times", default="h200-llama-3-8b", metavar="FILE", help="stage times")
    parser.add_argument("--quick", action="store_true", help="one rate and few requests: to see that it runs")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPUs")
    given = parser.parse_args()
    content = asyncio.run(run(stage_times(given.times), is_quick=given.quick, is_rehearsal=given.rehearse))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)
    if given.json is not None:
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    print_rows(console, content)
    if given.plot is not None:
        write_picture(content, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
