"""The example of the sizing guide in deploy/README.md holds with the settings that the component gpu sets."""

from __future__ import annotations

from typing import Any

import yaml

from bench.simulate import stage_times
from bench.simulation.node_settings import differing
from bench.simulation.outcome import Outcome, simulate
from bench.simulation.settings import ClusterSettings
from bench.simulation.sizing import load_of
from kvferry.bench_serve.options import shape_of
from kvferry.bench_serve.summary import Objectives
from tests.deploy.manifests.kustomize import KUBERNETES

SIMULATED = {
    ("prefill", "KVFERRY_CHUNK__CHUNK_TOKENS"): "chunk_tokens",
    ("prefill", "KVFERRY_LIMITS__MAX_STEP_TOKENS"): "max_step_tokens",
    ("prefill", "KVFERRY_LIMITS__MAX_RUNNING_REQUESTS"): "prefill_running",
    ("decode", "KVFERRY_LIMITS__MAX_RUNNING_REQUESTS"): "decode_running",
}


def of_gpu(role: str) -> dict[str, int]:
    page = yaml.safe_load((KUBERNETES / "components" / "gpu" / f"{role}.yaml").read_text(encoding="utf-8"))
    (container,) = page["spec"]["template"]["spec"]["containers"]
    return {SIMULATED[role, one["name"]]: int(one["value"]) for one in container["env"]}


def simulated_8b(**given: Any) -> Outcome:
    """Run the guide's cluster for 8B with these settings, and ring and staging as nodes on a GPU make them."""
    pools = {"prefill_pool_tokens": 800_000, "decode_pool_tokens": 800_000}
    settings = ClusterSettings(num_prefill=4, num_decode=3, layer_groups=2, **pools, **given)
    assert not {one.name for one in differing(settings)} & {"ring.capacity_bytes", "staging.num_slots"}
    load = load_of(shape_of("4096", "512", shared_prefix=0.0, num_prefixes=1), rate=20, number=1500, seed=0)
    return simulate(stage_times("h200-llama-3-8b"), settings, load, objectives=Objectives(ttft_s=1.0, tpot_s=0.025))


def test_the_nodes_for_8b_hold_with_the_settings_of_gpus_and_not_with_the_defaults() -> None:
    held = simulated_8b(**of_gpu("prefill"), **of_gpu("decode"))
    assert held.attainment > 0.9 and held.served == held.requests and 0.85 < held.busy["prefill steps"] < 1
    assert simulated_8b().attainment < 0.1
