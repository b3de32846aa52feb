"""What the connector takes of vLLM's own threads: a recorded profile of its calls, held against the steps that they are made in.

With OVERHEAD_JSON=FILE in the environment the profile is written there, as it stands in bench/results.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.timing import Environment
from tests.vllm.answers import Answer, answers
from tests.vllm.commands import MAX_TP
from tests.vllm.instances import assert_nothing_is_left, connector
from tests.vllm.servers import Server

ROUNDS = 4
MAX_SHARE = 0.03
STEPS = ["--no-enable-prefix-caching", "--max-num-batched-tokens", "512"]  # every round computes, and moves, every prompt


def timed(role: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    return connector(role, settings) | {
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "bench.timed_connector",
    }


async def test_calls_take_less_than_three_percent_of_the_steps(
    vllm_server: Callable[..., Server],
    route: Callable[..., Server],
    model: Path,
    prompts: Mapping[int, str],
    reference: Mapping[int, Answer],
    tmp_path: Path,
) -> None:
    folders = {name: tmp_path / name for name in ("prefill", "decode")}
    for folder in folders.values():
        folder.mkdir()
    prefill = vllm_server(
        model,
        tp=MAX_TP,
        kv_transfer_config=timed("kv_producer"),
        name="prefill-timed",
        args=STEPS,
        environment={"CONNECTOR_PROFILE_DIR": str(folders["prefill"])},
    )
    decode = vllm_server(
        model,
        kv_transfer_config=timed("kv_consumer", {"join_on_request": True}),
        name="decode-timed",
        in_core=True,
        args=STEPS,
        environment={"CONNECTOR_PROFILE_DIR": str(folders["decode"])},
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode]).wait_ready()
    for _ in range(ROUNDS):
        found = await answers(router.url, prompts.values())
        assert dict(zip(prompts, found, strict=True)) == reference
    assert_nothing_is_left(prefill, decode)
    await asyncio.sleep(1.5)  # each process writes its profile once a second
    for server in (prefill, decode):
        assert server.stop() == {}, f"{server.name} left processes behind"
    shares: dict[str, float] = {}
    record: dict[str, Any] = {"environment": Environment.here().to_json(), "rounds": ROUNDS, "instances": {}}
    for name, folder in folders.items():
        profiles = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
        (scheduler,) = (profile for role, profile in profiles.items() if role.startswith("scheduler"))
        workers = [profile["call_s"] for role, profile in profiles.items() if role.startswith("worker")]
        # All calls, also those of steps that compute nothing, of which there are a thousand a second.
        shares[f"{name}, workers"] = sum(workers) / len(workers) / scheduler["busy_s"]
        shares[f"{name}, scheduler"] = scheduler["call_s"] / scheduler["busy_s"]
        record["instances"][name] = profiles
    record["shares"] = shares
    print(json.dumps(shares, indent=2))
    if file := os.environ.get("OVERHEAD_JSON"):
        Path(file).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for what, share in shares.items():
        assert share < MAX_SHARE, f"{what}: {share:.1%} of the steps' time"
