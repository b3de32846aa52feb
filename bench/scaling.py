"""The simulation against real clusters on this machine: calibrates stage times, loads clusters, and says how far off it is.

    python -m bench.scaling [--json FILE] [--quick] [--plot FILE.png]
    python -m bench.scaling --again RECORD.json       # no cluster: this version's simulation beside what a record measured

A 1+1 cluster of the demo model is asked for one request at a time, of several lengths, and for several at once: from what they
take, and from the processor time of all processes, come the stage times, as a simulation needs them whose nodes share this
machine's cores. Then `kvferry bench serve` loads clusters of several splits, and the simulation gets the same requests at the
same moments. The record holds both, and the error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench.simulation.outcome import Outcome, simulate
from bench.simulation.settings import ClusterSettings, Placement
from bench.simulation.sizing import means_of
from bench.simulation.stage_times import StageTimes
from bench.timing import Environment
from kvferry.bench_serve.options import LoadOptions, shape_of
from kvferry.bench_serve.summary import Objectives
from kvferry.cli.node_client import NodeClient
from kvferry.demo.kinds import cached_demo_model
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.spec import child_environment
from node_runtime.rank_process import REPORT_S
from transfer.pb import kvferry_pb2 as pb

TOPOLOGIES = ((1, 1), (2, 1), (1, 2), (2, 2))
MANY_CORES = 12
MANY_TOPOLOGIES = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
"""Where there are `MANY_CORES`: about two for each node that is busy."""
LOADS = (0.3, 0.55, 0.75)
"""Parts of what the cores, or the tier that is shorter, could do."""
PROMPTS, OUTPUTS = "uniform:64:512", "uniform:8:32"
MEAN_PROMPT, MEAN_OUTPUT = 288, 20
CHUNK_TOKENS = 128
VOCAB_SIZE = 768
SEED = 7
MESSAGE_S = 0.00033
"""Work of a grant or an ack, both ends: CPU of a chunk with one peer, bench/results/2026-11-27-two-cores-control.json."""
_IDLE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request, at the client and as the node tells it."""

    ttft_s: float
    node_ttft_s: float
    transfer_s: float
    exposed_s: float
    tpot_s: float
    num_bytes: int


async def ask(client: NodeClient, prompt_tokens: int, output_tokens: int, *, salt: int) -> Answer:
    """One request with a prompt of its own."""
    ids = [3 + (salt * 7919 + index * 31) % (VOCAB_SIZE - 3) for index in range(prompt_tokens)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=output_tokens, ignore_eos=True)
    began_s, times_s, done = time.monotonic(), [], pb.GenerateDone()
    async with contextlib.aclosing(client.generate(request, timeout_s=60)) as events:
        async for event in events:
            if event.HasField("tokens"):
                times_s.append(time.monotonic())
            elif event.HasField("done"):
                done = event.done
    return Answer(
        ttft_s=times_s[0] - began_s,
        node_ttft_s=done.ttft_s,
        transfer_s=done.stats.transfer_s,
        exposed_s=done.stats.exposed_s,
        tpot_s=(times_s[-1] - times_s[0]) / max(1, len(times_s) - 1),
        num_bytes=done.stats.bytes,
    )


def cpu_seconds(cluster: LocalCluster) -> float:
    """Of all processes of the cluster, and of this one, so far."""
    total = time.process_time()
    for pid in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds that a stage has taken so far, and how often it was."""

    seconds: float = 0.0
    number: int = 0

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.seconds + other.seconds, self.number + other.number)

    def __sub__(self, other: Taken) -> Taken:
        return Taken(self.seconds - other.seconds, self.number - other.number)

    @property
    def mean_s(self) -> float:
        return self.seconds / max(1, self.number)


async def taken(cluster: LocalCluster) -> dict[str, Taken]:
    """What the nodes' metrics say of each stage, and of the "prefill step" and the "decode step"."""
    found: dict[str, Taken] = {}
    for node in cluster.nodes:
        _, text = await node.http("/metrics")
        for family in text_string_to_metric_families(text):
            if family.name not in {"kvferry_stage_seconds", "kvferry_step_seconds"}:
                continue
            for sample in family.samples:
                name = sample.labels.get("stage", f"{node.role} step")
                if sample.name.endswith("_sum"):
                    found[name] = found.get(name, Taken()) + Taken(sample.value, 0)
                elif sample.name.endswith("_count"):
                    found[name] = found.get(name, Taken()) + Taken(0.0, int(sample.value))
    return found


def spec(model: Path, num_prefill: int, num_decode: int) -> ClusterSpec:
    settings = {"dtype": "float32"}
    return ClusterSpec(
        prefill=TierSpec(model=model, page_size=16, pool_tokens=16_384, settings=settings),
        decode=TierSpec(model=model, page_size=32, pool_tokens=32_768, settings=settings),
        num_prefill=num_prefill,
        num_decode=num_decode,
        chunk_tokens=CHUNK_TOKENS,
        start_timeout_s=150.0,
    )


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, none of them negative: those that would be are left out, the most negative first."""
    matrix: NDArray[np.float64] = np.array(rows)
    target: NDArray[np.float64] = np.array(values)
    weights = 1 / target
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept] * weights[:, None], target * weights, rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            result = [0.0] * matrix.shape[1]
            for index, value in zip(kept, found, strict=True):
                result[index] = float(max(0.0, value))
            return result
        del kept[int(found.argmin())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Stage times, and what they come from.

    Args:
        stages: Mean seconds of a piece in each, as the nodes' metrics have them.
        piece_s: Of a piece, all its stages and messages.
        new_token_s: Processor seconds of a new token, several requests at once.
        samples: What was fitted.
    """

    times: StageTimes
    stages: dict[str, float]
    piece_s: float
    new_token_s: float
    samples: list[dict[str, float]]

    def request_cpu_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Processor seconds of a request."""
        times, num_steps = self.times, -(-prompt_tokens // CHUNK_TOKENS)
        prompt_s = times.prompt_seconds(prompt_tokens, CHUNK_TOKENS) + num_steps * self.piece_s
        beside_s = times.reserve_s + times.request_s + times.other_request_s
        return prompt_s + beside_s + self.new_token_s * (output_tokens - 1)


async def idle_cores(cluster: LocalCluster) -> float:
    """Cores that the cluster takes without a request."""
    before, began_s = cpu_seconds(cluster), time.monotonic()
    await asyncio.sleep(_IDLE_S)
    return (cpu_seconds(cluster) - before) / (time.monotonic() - began_s)


SAMPLES = (
    # One at a time
    (32, 1, 1), (128, 1, 1), (256, 1, 1), (512, 1, 1), (1024, 1, 1), (2048, 1, 1), (32, 64, 1), (1024, 64, 1),
    # Several at once: steps of several prompts, and batches
    (32, 1, 16), (128, 1, 16), (256, 1, 16), (512, 1, 8), (32, 64, 4), (32, 64, 16), (256, 64, 8), (512, 64, 4),
)  # fmt: skip
"""Tokens of the prompt and new ones, and requests at once, that `calibrate` asks for."""


async def calibrate(cluster: LocalCluster, *, repetitions: int) -> Calibration:
    """Stage times of a 1+1 cluster that has nothing else to do."""
    samples: list[dict[str, float]] = []
    idle = await idle_cores(cluster)
    async with NodeClient(cluster.decode.address) as client:
        for salt in range(4):
            await asyncio.gather(*(ask(client, 300, 8, salt=900 + salt * 10 + one) for one in range(4)))
        began = await _settled(cluster)
        for prompt_tokens, output_tokens, batch in SAMPLES:
            answers: list[Answer] = []
            before, cpu_before, began_s = await _settled(cluster), cpu_seconds(cluster), time.monotonic()
            for repetition in range(max(1, repetitions // 2) if batch > 1 else repetitions):
                salts = (len(samples) * 1000 + repetition * 50 + one for one in range(batch))
                answers += await asyncio.gather(*(ask(client, prompt_tokens, output_tokens, salt=salt) for salt in salts))
            spent_s = cpu_seconds(cluster) - cpu_before - idle * (time.monotonic() - began_s)
            after = await _settled(cluster)
            steps = {name: after[f"{name} step"] - before[f"{name} step"] for name in ("prefill", "decode")}
            samples.append(
                {
                    "prompt_tokens": prompt_tokens,
                    "output_tokens": output_tokens,
                    "batch": batch,
                    "requests": len(answers),
                    "cpu_s": spent_s / len(answers),
                    "prefill_steps": steps["prefill"].number,
                    "prefill_steps_s": steps["prefill"].seconds,
                    "decode_steps": steps["decode"].number,
                    "decode_steps_s": steps["decode"].seconds,
                    **{
                        name: statistics.fmean(getattr(one, name) for one in answers)
                        for name in ("ttft_s", "node_ttft_s", "transfer_s", "exposed_s", "tpot_s", "num_bytes")
                    },
                }
            )
        ended = await _settled(cluster)
    stages = {name: (one - began.get(name, Taken())).mean_s for name, one in ended.items()}
    return fit(samples, stages, cores=len(os.sched_getaffinity(0)) - idle)


async def _settled(cluster: LocalCluster) -> dict[str, Taken]:
    """`taken`, when the ranks have reported their last steps."""
    await asyncio.sleep(2 * REPORT_S)
    return {"prefill step": Taken(), "decode step": Taken()} | await taken(cluster)


def fit(
    samples: list[dict[str, float]], stages: Mapping[str, float], *, cores: float, message_s: float = MESSAGE_S
) -> Calibration:
    """Stage times of the samples.

    Steps take what the nodes say that they took, alone and in batches. What a lone request took besides is in `request_s` as far
    as a processor worked for it; what worked beside it, such as the client, is in `other_request_s`.

    Args:
        stages: Mean seconds of a piece in each stage, as the nodes' metrics have them.
        cores: That are left for requests.
        message_s: Work of a grant or an ack.
    """
    alone = [one for one in samples if one["output_tokens"] == 1 and one["batch"] == 1]
    generating = [one for one in samples if one["output_tokens"] > 1]
    bytes_per_token = round(statistics.median(one["num_bytes"] / one["prompt_tokens"] for one in alone))
    piece_bytes = CHUNK_TOKENS * bytes_per_token
    gather_s, write_s, scatter_s = (max(stages.get(name, 0.0), 1e-6) for name in ("gather", "write", "scatter"))
    piece_s = gather_s + write_s + scatter_s + 2 * message_s

    rows = [(one["prefill_steps"], *(one["requests"] * part for part in _tokens(one))) for one in samples]
    step_s, token_s, attention_s = least_squares(rows, [one["prefill_steps_s"] for one in samples])

    rows = [
        (one["decode_steps"], one["requests"] * _generated(one), one["requests"] * _generated(one) * _context(one))
        for one in generating
    ]
    decode_step_s, decode_request_s, decode_context_s = least_squares(rows, [one["decode_steps_s"] for one in generating])
    # From one step's end to the next one's begin, through the leader.
    between_s = statistics.median(
        max(0.0, one["tpot_s"] - one["decode_steps_s"] / one["decode_steps"]) for one in generating if one["batch"] == 1
    )

    def steps_s(one: Mapping[str, float]) -> float:
        """Of a request's own: the time that it waits for."""
        tokens, pairs = _tokens(one)
        return step_s * _steps(one) + token_s * tokens + attention_s * pairs

    # Of short prompts, whose steps take least. A processor cannot have worked for longer than it did for all of it.
    lone = [one for one in alone if _steps(one) <= 2]
    own_s = [one["prefill_steps_s"] / one["requests"] for one in lone]
    beside_s = [one["cpu_s"] - seconds - _steps(one) * piece_s for one, seconds in zip(lone, own_s, strict=True)]
    waited_s = [one["ttft_s"] - seconds - piece_s for one, seconds in zip(lone, own_s, strict=True)]
    request_s = max(0.0, statistics.median(map(min, waited_s, beside_s)))

    def decoding_s(one: Mapping[str, float]) -> float:
        """A request's share of its decode steps, for each new token."""
        return one["decode_steps_s"] / (one["requests"] * _generated(one))

    def prompt_cpu_s(one: Mapping[str, float]) -> float:
        return steps_s(one) + _steps(one) * piece_s + request_s + other_request_s

    other_request_s = max(0.0, statistics.median(beside_s) - request_s)
    new_token_cpu_s = [max(0.0, one["cpu_s"] - prompt_cpu_s(one)) / _generated(one) for one in generating]
    times = StageTimes(
        name=f"demo model on {round(cores)} shared cores",
        sources=("bench.scaling: one request at a time, and several, on a 1+1 cluster",),
        bytes_per_token=bytes_per_token,
        prefill_step_s=step_s,
        prefill_token_s=max(token_s, 1e-9),
        prefill_attention_s=attention_s,
        decode_step_s=max(decode_step_s + between_s, 1e-6),
        decode_request_s=decode_request_s,
        decode_context_s=decode_context_s,
        gather_s=0.0,
        gather_bytes_per_s=piece_bytes / gather_s,
        link_latency_s=0.0,
        link_bytes_per_s=piece_bytes / write_s,
        scatter_s=0.0,
        scatter_bytes_per_s=piece_bytes / scatter_s,
        hand_s=0.0,
        grant_s=message_s,
        ack_s=message_s,
        reserve_s=request_s * 0.4,
        request_s=request_s * 0.6,
        cores=cores,
        other_request_s=other_request_s,
        other_token_s=max(
            0.0,
            statistics.median(cpu_s - decoding_s(one) for cpu_s, one in zip(new_token_cpu_s, generating, strict=True)),
        ),
    )
    return Calibration(
        times=times,
        stages=dict(stages),
        piece_s=piece_s,
        new_token_s=statistics.median(cpu_s for cpu_s, one in zip(new_token_cpu_s, generating, strict=True) if one["batch"] > 1),
        samples=samples,
    )


def _generated(one: Mapping[str, float]) -> float:
    return one["output_tokens"] - 1


def _context(one: Mapping[str, float]) -> float:
    """Mean tokens before a new one."""
    return one["prompt_tokens"] + one["output_tokens"] / 2


def _tokens(one: Mapping[str, float]) -> tuple[float, float]:
    """Tokens of a prompt, and pairs of one and one before it."""
    return one["prompt_tokens"], one["prompt_tokens"] ** 2 / 2


def _steps(one: Mapping[str, float]) -> int:
    return -int(-one["prompt_tokens"] // CHUNK_TOKENS)


def busy_seconds() -> float:
    """Of all processors of the machine, so far; without niced work, which gives way."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice - times.nice)


async def loaded(cluster: LocalCluster, rate: float, duration_s: float) -> tuple[dict[str, Any], float, float]:
    """What `kvferry bench serve` measures at that rate, the cores that it and the cluster took, and those that others took."""
    began_s, busy_s, ours_s = time.monotonic(), busy_seconds(), cpu_seconds(cluster) + _children_seconds()
    served = await serve(cluster, (rate,), duration_s)
    ours_s = cpu_seconds(cluster) + _children_seconds() - ours_s
    took_s = time.monotonic() - began_s
    return served["rates"][0], ours_s / took_s, max(0.0, (busy_seconds() - busy_s - ours_s) / took_s)


def _children_seconds() -> float:
    """Of this process's children that have ended; no cluster does meanwhile."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def serve(cluster: LocalCluster, rates: Sequence[float], duration_s: float) -> dict[str, Any]:
    """Run `kvferry bench serve` on the cluster; return its JSON."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        file = Path(folder) / "load.json"
        targets = [part for node in cluster.decode_nodes for part in ("--target", node.address)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvferry", "bench", "serve", *targets, "--insecure"),
            *("--rate", ",".join(f"{rate:.3f}" for rate in rates), "--duration", f"{duration_s:g}", "--warmup", "5"),
            *("--prompt-tokens", PROMPTS, "--output-tokens", OUTPUTS, "--seed", f"{SEED}", "--timeout", "120"),
            *("--max-lateness", "1.0", "--json", str(file)),
            env=child_environment(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        code = await process.wait()
        if not file.is_file() or not (text := file.read_text()):
            raise RuntimeError(f"kvferry bench serve ended with {code}")
        content: dict[str, Any] = json.loads(text)
        return content


def load_of(rate: float, duration_s: float) -> LoadOptions:
    """Return the load that `serve` sends."""
    return LoadOptions(
        targets=["simulated:1"],
        rates=[f"{rate:.3f}"],
        prompt_tokens=PROMPTS,
        output_tokens=OUTPUTS,
        duration_s=duration_s,
        seed=SEED,
    )


def settings_of(topology: tuple[int, int]) -> ClusterSettings:
    """Those of `spec`'s nodes."""
    num_prefill, num_decode = topology
    return ClusterSettings(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_pool_tokens=16_384,
        decode_pool_tokens=32_768,
        ring_bytes=64 << 20,
        chunk_tokens=CHUNK_TOKENS,
        placement=Placement.TOLD,  # as the nodes that it is compared with
    )


def predict(times: StageTimes, topology: tuple[int, int], rate: float, duration_s: float) -> Outcome:
    """Simulate the requests that `serve` sends."""
    return simulate(times, settings_of(topology), load_of(rate, duration_s).runs()[0].planned)


def most_requests(calibration: Calibration, topology: tuple[int, int], cores: float) -> float:
    """Requests a second at which the cores, or one of the tiers, would have nothing left."""
    means = means_of(calibration.times, settings_of(topology), shape_of(PROMPTS, OUTPUTS), Objectives())
    num_prefill, num_decode = topology
    of_cores = cores / calibration.request_cpu_s(MEAN_PROMPT, MEAN_OUTPUT)
    return min(of_cores, num_prefill / means.prefill_s, num_decode / means.decode_s)


def compare(measured: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Both, and the error of the prediction as a part of what was measured."""
    row: dict[str, Any] = {
        "offered_rate": measured["offered_rate"],
        "served": measured["served"],
        "requests": measured["requests"],
        "generator_late_p99_s": max(measured["lateness"]["sends_s"]["p99"], measured["lateness"]["loop_s"]["p99"]),
    }
    times = {f"{name}.{share}": {"measured": measured[name][share]} for name in _COMPARED for share in _SHARES}
    return predicted(row | times, outcome)


_COMPARED, _SHARES = ("ttft_s", "tpot_s", "end_to_end_s"), ("p50", "p90", "mean")


def predicted(row: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """A row of a record with what the simulation says in place of what one said before."""
    times = {}
    for name in _COMPARED:
        for share in _SHARES:
            real, made = row[f"{name}.{share}"]["measured"], getattr(getattr(outcome, name), share)
            times[f"{name}.{share}"] = {"measured": real, "predicted": made, "error": made / real - 1 if real else 0.0}
    return {**row, **times, "busy": dict(outcome.busy), "ring bytes, most": outcome.uses["ring bytes"].most}


async def run(*, is_quick: bool, duration_s: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Calibrate, load every topology, compare.

    Args:
        duration_s: Of each load.
        keep: Called with what there is, after each topology: it takes minutes.
    """
    model = await cached_demo_model()
    load_before = os.getloadavg()[0]
    own = len(os.sched_getaffinity(0))
    topologies: Sequence[tuple[int, int]] = MANY_TOPOLOGIES if own >= MANY_CORES else TOPOLOGIES
    loads: Sequence[float] = LOADS
    if is_quick:
        topologies, duration_s, loads = topologies[:1], 5.0, loads[:1]
    content: dict[str, Any] = {}
    calibration: Calibration | None = None
    rows: list[dict[str, Any]] = []
    for topology in topologies:
        async with LocalCluster(spec(model, *topology)) as cluster:
            if calibration is None:
                calibration = await calibrate(cluster, repetitions=2 if is_quick else 6)
            idle = await idle_cores(cluster)
            most = most_requests(calibration, topology, own - idle)
            for load in loads:
                rate = load * most
                measured, used, others = await loaded(cluster, rate, duration_s)
                times = replace(calibration.times, cores=max(own - idle - others, 0.1))
                compared = compare(measured, predict(times, topology, rate, duration_s))
                rows.append(
                    {"prefill": topology[0], "decode": topology[1], "load": load, "asked_rate": rate}
                    | {"idle_cores": idle, "used_cores": used, "others_cores": others}
                    | compared
                )
                cores = f"took {used:.2f} cores, others {others:.2f}"
                print(f"{topology[0]}+{topology[1]} at {rate:.2f}/s {cores}", file=sys.stderr, flush=True)
        content = {
            "title": "The simulation against real clusters on one machine",
            "environment": Environment.here().to_json(),
            "is_quick": is_quick,
            "load_before": load_before,
            "setting": {
                "prompts": PROMPTS,
                "outputs": OUTPUTS,
                "duration_s": duration_s,
                "seed": SEED,
                "chunk_tokens": CHUNK_TOKENS,
            },
            "stage_times": calibration.times.to_json(),
            "cpu_of_a_request_s": calibration.request_cpu_s(MEAN_PROMPT, MEAN_OUTPUT),
            "stages": calibration.stages,
            "calibration": calibration.samples,
            "rows": rows,
        }
        keep(content)
    return content


def predicted_again(content: Mapping[str, Any]) -> dict[str, Any]:
    """A record with what this version simulates, from the samples and beside the measurements that it has."""
    own, duration_s = content["environment"]["num_cores"], content["setting"]["duration_s"]
    before = content["stage_times"]
    calibration = fit(content["calibration"], content["stages"], cores=before["cores"], message_s=before["grant_s"])
    rows = []
    for row in content["rows"]:
        times = replace(calibration.times, cores=max(own - row["idle_cores"] - row["others_cores"], 0.1))
        outcome = predict(times, (row["prefill"], row["decode"]), row["asked_rate"], duration_s)
        rows.append(predicted(row, outcome))
    return {
        **content,
        "stage_times": calibration.times.to_json(),
        "cpu_of_a_request_s": calibration.request_cpu_s(MEAN_PROMPT, MEAN_OUTPUT),
        "rows": rows,
    }


def print_rows(console: Console, content: Mapping[str, Any]) -> None:
    table = Table(title="measured -> predicted, ms (error)", title_justify="left", box=None)
    for heading in (
        "nodes", "load", "requests/s", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "generator late p99", "others took",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in content["rows"]:
        cells = []
        for name in ("ttft_s.p50", "ttft_s.p90", "tpot_s.p50", "tpot_s.p90"):
            one = row[name]
            cells.append(f"{one['measured'] * 1e3:,.1f} -> {one['predicted'] * 1e3:,.1f} ({one['error']:+.0%})")
        table.add_row(
            f"{row['prefill']}+{row['decode']}", f"{row['load']:.0%}", f"{row['offered_rate']:.2f}", *cells,
            f"{row['generator_late_p99_s'] * 1e3:,.0f}", f"{row.get('others_cores', 0.0):.2f} cores",
        )  # fmt: skip
    console.print(table)


def write_picture(content: Mapping[str, Any], file: Path) -> None:
    """Measured and predicted p50 and p90, each load a point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    names = [f"{row['prefill']}+{row['decode']}\n{row['load']:.0%}" for row in content["rows"]]
    for axes, what, title in zip(
        panels, ("ttft_s", "tpot_s"), ("time to first token, ms", "time per output token, ms"), strict=True
    ):
        for share, colour in (("p50", "#1f6f8b"), ("p90", "#e08e0b")):
            both = [row[f"{what}.{share}"] for row in content["rows"]]
            axes.plot(names, [one["measured"] * 1e3 for one in both], "o", color=colour, label=f"{share}, measured")
            axes.plot(
                names, [one["predicted"] * 1e3 for one in both], "_", color=colour, markersize=16, label=f"{share}, simulated"
            )
        axes.set_ylabel(title)
        axes.set_xlabel("prefill + decode nodes, load as a part of what the cores, or a tier, could do")
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png", metadata={"Software": None})


def main() -> int:
    parser = argparse.ArgumentParser(description="the simulation against real clusters on this machine")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of measured and predicted")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each load")
    parser.add_argument("--quick", action="store_true", help="one topology and little load: to see that it runs")
    parser.add_argument("--again", type=Path, metavar="RECORD.json", help="no cluster: simulate again what a record measured")
    arguments = parser.parse_args()

    def keep(content: dict[str, Any]) -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")

    if arguments.again is not None:
        content = predicted_again(json.loads(arguments.again.read_text()))
        keep(content)
    else:
        content = asyncio.run(run(is_quick=arguments.quick, duration_s=arguments.duration, keep=keep))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)
    print_rows(console, content)
    if arguments.plot is not None:
        write_picture(content, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
