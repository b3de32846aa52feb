"""The figures of the sizing guide in deploy/README.md, worked out again from the plan, the geometry and the records."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bench.simulate import stage_times
from bench.simulation.node_settings import differing
from bench.simulation.outcome import Outcome, simulate
from bench.simulation.settings import ClusterSettings
from bench.simulation.sizing import load_of
from kvferry.__main__ import app
from kvferry.bench_serve.options import shape_of
from kvferry.bench_serve.summary import Objectives
from transfer.config import ChunkConfig, DecodeLimitsConfig, PrefillLimitsConfig, StagingConfig
from transfer.instance import Link
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.piece_size import piece_bytes_for

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
PROMPT, ANSWER, RATE = 4096, 512, 20
LLAMA = KVLayout.uniform(num_layers=80, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)


@pytest.fixture(scope="module")
def guide() -> str:
    (found,) = re.findall(r"<!-- sizing:.*?-->\n(.*?)<!-- end of sizing -->", README, re.S)
    return " ".join(found.split())


def plan(folder: Path, *arguments: str) -> dict[str, Any]:
    model = folder / "llama-3-70b"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text((ROOT / "tests" / "unit" / "configs" / "llama-3-70b.json").read_text(encoding="utf-8"))
    result = CliRunner().invoke(app, ["plan", "--model", str(model), *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_a_token_weighs_what_the_guide_says(guide: str) -> None:
    whole = 80 * 8 * (128 + 128) * 2
    assert f"**{whole:,} B**" in guide and f"**{whole * PROMPT / 1e9:.2f} GB**" in guide
    assert f"{whole // 4:,} B of a token on each of four, {whole // 2:,} B on each of two" in guide


def test_as_many_tokens_fit_as_the_guide_says(guide: str, tmp_path: Path) -> None:
    commands = [line.split("llama-3-70b ")[1].split() for line in re.findall(r"\$ kvferry plan (.+)", README)]
    prefill, decode = (plan(tmp_path, *arguments)["max_total_tokens"] for arguments in commands)
    assert f"**{prefill:,}** tokens and a decode node for **{decode:,}**" in guide
    at_once = decode // (PROMPT + ANSWER)
    assert f"{decode:,} / (4,096 + 512) = **{at_once}**" in guide
    given = of_gpu("decode")["KVFERRY_LIMITS__MAX_RUNNING_REQUESTS"]
    assert at_once <= given
    assert f"it is {DecodeLimitsConfig().max_running_requests} by default, and {given} by the component [gpu]" in guide


def of_gpu(role: str) -> dict[str, int]:
    """Settings of numbers that the component gpu gives a tier alone."""
    page = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "components" / "gpu" / f"{role}.yaml").read_text(encoding="utf-8"))
    (container,) = page["spec"]["template"]["spec"]["containers"]
    return {one["name"]: int(one["value"]) for one in container["env"]}


def test_the_guide_counts_with_the_settings_that_gpus_are_given(guide: str) -> None:
    prefill, decode = of_gpu("prefill"), of_gpu("decode")
    chunk, step = prefill["KVFERRY_CHUNK__CHUNK_TOKENS"], prefill["KVFERRY_LIMITS__MAX_STEP_TOKENS"]
    assert f"chunks of {chunk:,} tokens and steps of {step:,}" in guide
    own = f"the defaults, {ChunkConfig().chunk_tokens} and {PrefillLimitsConfig().max_step_tokens}, are made for CPUs"
    assert own in guide
    for_prefill, for_decode = re.findall(r"\$ kvferry plan (.+)", README)
    running = prefill["KVFERRY_LIMITS__MAX_RUNNING_REQUESTS"]
    assert f"--chunk-tokens {chunk} --chunked-prefill-size {step} --max-running-requests {running}" in for_prefill
    assert f"--max-running-requests {decode['KVFERRY_LIMITS__MAX_RUNNING_REQUESTS']}" in for_decode
    slots_bytes = StagingConfig().num_slots * chunk * 327_680 // 4
    assert f"--staging {slots_bytes >> 20}MiB" in for_prefill and slots_bytes % (1 << 20) == 0


def simulated_8b(prefill: dict[str, int], decode: dict[str, int]) -> Outcome:
    """The guide's cluster for 8B with these settings, and ring and staging as nodes on a GPU make them."""
    changed = {
        "chunk_tokens": prefill.get("KVFERRY_CHUNK__CHUNK_TOKENS"),
        "max_step_tokens": prefill.get("KVFERRY_LIMITS__MAX_STEP_TOKENS"),
        "prefill_running": prefill.get("KVFERRY_LIMITS__MAX_RUNNING_REQUESTS"),
        "decode_running": decode.get("KVFERRY_LIMITS__MAX_RUNNING_REQUESTS"),
    }
    given: dict[str, Any] = {name: value for name, value in changed.items() if value is not None}
    settings = ClusterSettings(
        num_prefill=4, num_decode=3, prefill_pool_tokens=800_000, decode_pool_tokens=800_000, layer_groups=2, **given
    )
    assert not {one.name for one in differing(settings)} & {"ring.capacity_bytes", "staging.num_slots"}
    shape = shape_of(str(PROMPT), str(ANSWER), shared_prefix=0.0, num_prefixes=1)
    load = load_of(shape, rate=RATE, number=1500, seed=0)
    return simulate(stage_times("h200-llama-3-8b"), settings, load, objectives=Objectives(ttft_s=1.0, tpot_s=0.025))


def test_the_nodes_for_8b_hold_with_the_settings_that_gpus_are_given_and_not_with_the_defaults() -> None:
    held = simulated_8b(of_gpu("prefill"), of_gpu("decode"))
    assert held.attainment > 0.9 and held.served == held.requests and 0.85 < held.busy["prefill steps"] < 1
    assert simulated_8b({}, {}).attainment < 0.1


def test_nodes_and_network_are_what_the_formulas_give(guide: str) -> None:
    prefill, decode = RATE * PROMPT / 8000, RATE * ANSWER * 0.040 / 87
    assert f"= {prefill:.1f}, so **{math.ceil(prefill)}**" in guide and f"= {decode:.1f}, so **{math.ceil(decode)}**" in guide
    prompt_bytes = PROMPT * 327_680
    into = RATE / math.ceil(decode) * prompt_bytes
    assert f"= **{into / 1e9:.1f} GB/s**, {into * 8 / 1e9:.0f} Gbit/s" in guide
    assert f"**{RATE / math.ceil(prefill) * prompt_bytes / 1e9:.1f} GB/s**" in guide
    assert 2 * into < 12.5e9  # a link of 100 Gbit/s is twice what is needed
    assert f"1.34 / 12.5 = **{prompt_bytes / 12.5e9 * 1e3:.0f} ms**" in guide


def test_nodes_for_8b_are_what_the_steps_that_were_measured_give(guide: str) -> None:
    rows = json.loads((ROOT / "bench" / "results" / "2026-11-23-h200-stages.json").read_text(encoding="utf-8"))["rows"]
    step_s = {row["case"]: row["median_s"] for row in rows if row["what"] == "step"}
    prefill_s, decode_s = step_s["prefill of 4096 tokens behind 0"], step_s["decode of 64 requests of 4096 tokens"]
    assert f"4,096 tokens in {prefill_s * 1e3:.0f} ms, 64 requests of 4,096 in {decode_s * 1e3:.1f} ms a token" in guide
    prefill, decode = RATE * prefill_s, RATE * ANSWER * decode_s / 64
    assert f"{RATE} x {prefill_s:.3f} = {prefill:.1f}, so **{math.ceil(prefill)}** prefill nodes" in guide
    assert f"{RATE} x {ANSWER} x {decode_s:.4f} / 64 = {decode:.1f}, so **{math.ceil(decode)}** decode nodes" in guide
    nodes = f"--prefill {math.ceil(prefill)} --decode {math.ceil(decode)}"
    assert f"{nodes} --rate {RATE} --prompt-tokens {PROMPT} --output-tokens {ANSWER}`" in guide


def test_what_was_measured_is_what_the_records_say(guide: str) -> None:
    rows = json.loads((ROOT / "bench" / "results" / "2026-11-22-two-h200.json").read_text(encoding="utf-8"))["rows"]
    measured = [
        next(row["note"] for row in rows if row["what"] == f"pool to pool, {name}, 320 MiB, 16 in flight").split()[0]
        for name in ("cuda_ipc/fused", "nixl", "ucx")
    ]
    fused, nixl, ucx = (round(float(one)) for one in measured)
    assert f"{fused} GB/s over `cuda_ipc`, {nixl} over `nixl`, {ucx} over `ucx`" in guide
    assert f"{fused} GB/s were reached with 16 pieces of {320 * 1024**2 / 1e6:.0f} MB" in guide
    rows = json.loads((ROOT / "bench" / "results" / "2026-11-21-two-cores.json").read_text(encoding="utf-8"))["rows"]
    (answer,) = [row for row in rows if row["what"] == "grant, ready, ack: p50"]
    assert answer["unit"] == "ms" and f"grant, ready and ack take {answer['measured']:.1f} ms" in guide


def test_ring_and_staging_are_what_the_formulas_give(guide: str) -> None:
    found = list(routes(LLAMA, Shard(tp_size=4, page_size=16), Shard(tp_size=2, page_size=64)))
    writers = [route for route in found if route.decode_rank == 0]
    assert len(writers) == 2  # of each prefill node
    chunk = of_gpu("prefill")["KVFERRY_CHUNK__CHUNK_TOKENS"] * 327_680 // 4
    assert f"2,048 tokens x 81,920 B = **{chunk / 1e6:.0f} MB**" in guide
    link = Link(prefill_rank=0, decode_rank=0, lane="ucx/net", latency_s=0.0, bandwidth_bytes_per_s=12.5e9)
    most = piece_bytes_for([link], device_type="cuda", ring_bytes=2 << 30)
    layers = 80 // math.ceil(chunk / most)
    piece = chunk // 80 * layers
    assert piece <= most < piece * (layers + 20 / 3) / layers and layers == 20  # 80 layers are cut by four, and not by three
    assert f"no more than {most / 1e6:.0f} MB" in guide
    assert f"four pieces of **{piece / 1e6:.1f} MB**, which take {piece / 12.5e9 * 1e3:.2f} ms each" in guide
    residence_s = round(piece / 12.5e9 * 1e3 + 0.8 + 0.1, 1) / 1e3
    assert f"12.5 GB/s x {residence_s * 1e3:.1f} ms x 2 = **{12.5e9 * residence_s * 2 / 1e6:.0f} MB**" in guide
    room = 2 * len(writers) * 11 * piece
    assert f"2 x {len(writers) * 11} x {piece / 1e6:.1f} MB = **{room / 1e6:.0f} MB**" in guide
    assert room <= 2 << 30 < room / 11 * 13  # "for hardly more nodes"
    slots = StagingConfig().num_slots
    assert f"default of four takes **{slots * chunk / 1e6:.0f} MB**" in guide and slots == 4
    assert f"so **{math.ceil(12.5e9 * residence_s / piece + 1)}** would do" in guide
