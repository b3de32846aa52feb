"""Advice where memory runs out or is full: settings that the process has, with the values that it uses."""

from __future__ import annotations

from typing import Any

import pytest

from planner.memory_advice import Phase, advice_for, settings_of
from transfer.config import ConnectorConfig, DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.config import settings as settings_in

PLAN = {"static_fraction": 0.87345, "num_pages": 1000, "max_seq_len": 8192, "cuda_graph_max_bs": 24}
ENGINES_SHARE = "the engine's share of the GPU (--gpu-memory-utilization of vLLM, --mem-fraction-static of SGLang)"


def prefill(**settings: Any) -> PrefillNodeConfig:
    return PrefillNodeConfig.model_validate({"model": "m", **settings})


def decode(**settings: Any) -> DecodeNodeConfig:
    return DecodeNodeConfig.model_validate({"model": "m", **settings})


TIERED = {"host_memory": "1GiB", "device_window": 64}


@pytest.mark.parametrize(
    ("phase", "config", "advice"),
    [
        (Phase.START, prefill(memory={"static_fraction": 0.5}), "lower memory.static_fraction (now 0.5)"),
        (
            Phase.WEIGHTS,
            decode(parallel={"tp_size": 2}),
            "raise parallel.tp_size (now 2), or end other processes that use this memory",
        ),
        (Phase.POOL, decode(), "lower memory.static_fraction (now 0.8734) or pool.num_pages (now 1000)"),
        (
            Phase.POOL,
            decode(memory={"policy": "page-count"}, pool={"num_tokens": 320}),
            "lower memory.memory_ratio (now 0.88) or pool.num_pages (now 20)",
        ),
        (
            Phase.WORKSPACES,
            prefill(prefill={"sparse_policy": "xattention"}),
            "lower chunk.chunk_tokens (now 128), limits.max_seq_len (now 8192) or memory.static_fraction (now 0.8734), "
            "or raise prefill.sparse_stride (now 16)",
        ),
        (
            Phase.PAGE_TABLES,
            decode(),
            "lower limits.max_running_requests (now 32), limits.max_seq_len (now 8192) or memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.COMPILE,
            decode(torch_compile_max_bs=8),
            "lower torch_compile_max_bs (now 8) or memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.CUDA_GRAPHS,
            decode(),
            "lower cuda_graph_max_bs (now 24; 0 runs without graphs) or memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.CUDA_GRAPHS,
            decode(speculative={"method": "ngram"}),
            "lower cuda_graph_max_bs (now 24; 0 runs without graphs), speculative.num_speculative_tokens (now 4) or "
            "memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.CUDA_GRAPHS,
            decode(cuda_graph_bs=[4, 20]),
            "lower cuda_graph_bs (now up to 20; [] runs without graphs) or memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.HOST_BLOCKS,
            prefill(offload={"host_ratio": 2}),
            "lower offload.buffer_bytes (now 64.0 MiB) or memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.STAGING,
            prefill(),
            "lower staging.num_slots (now 4), staging.slot_bytes (now 3.0 MiB), chunk.chunk_tokens (now 128) or "
            "memory.static_fraction (now 0.8734)",
        ),
        (
            Phase.STAGING,
            ConnectorConfig(),
            f"lower staging.num_slots (now 4), staging.slot_bytes (now 3.0 MiB), chunk.chunk_tokens (now 128) or {ENGINES_SHARE}",
        ),
        (Phase.RING, decode(), "lower ring.capacity_bytes (now null) or memory.static_fraction (now 0.8734)"),
        (Phase.RING, ConnectorConfig(), f"lower ring.capacity_bytes (now null) or {ENGINES_SHARE}"),
        (Phase.HOST_POOL, decode(offload=TIERED), "lower offload.host_memory (now 1.0 GiB)"),
        (Phase.HOST_POOL, prefill(offload={"host_ratio": 2.5}), "lower offload.host_ratio (now 2.5)"),
        (
            Phase.FULL_POOL,
            decode(offload={"host_memory": "1GiB"}),  # which keeps KV for later requests only
            "raise memory.static_fraction (now 0.8734) or pool.num_pages (now 1000), "
            "or lower limits.max_running_requests (now 32), or add nodes",
        ),
        (
            Phase.FULL_POOL,
            decode(offload=TIERED),
            "raise memory.static_fraction (now 0.8734), pool.num_pages (now 1000) or offload.host_memory (now 1.0 GiB), "
            "or lower limits.max_running_requests (now 32), or add nodes",
        ),
        (
            Phase.FULL_HOST_MEMORY,
            decode(offload=TIERED),
            "raise offload.host_memory (now 1.0 GiB), or lower limits.max_running_requests (now 32), or add nodes",
        ),
    ],
)
def test_settings_and_their_present_values(phase: Phase, config: NodeConfig | ConnectorConfig, advice: str) -> None:
    assert advice_for(phase, config, plan=PLAN, chosen={"staging.slot_bytes": 3 << 20}) == advice


def test_without_a_configuration_there_are_names_alone() -> None:
    step = "lower memory.static_fraction, limits.max_running_requests or speculative.num_speculative_tokens"
    assert advice_for(Phase.DECODE_STEP) == step
    graphs = "lower cuda_graph_max_bs (0 runs without graphs), speculative.num_speculative_tokens or memory.static_fraction"
    assert advice_for(Phase.CUDA_GRAPHS) == graphs


def test_every_setting_exists() -> None:
    known = {name for role in (PrefillNodeConfig, DecodeNodeConfig) for name, _ in settings_in(role)}
    assert {setting for phase in Phase for setting in settings_of(phase)} - known == set()
