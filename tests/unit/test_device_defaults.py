"""Defaults that follow from the memory of a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.device_defaults import MIN_CHUNK_TOKENS, gpu_chunk_tokens, with_gpu_chunks, with_gpu_defaults
from planner.node_plan import graph_batch_sizes
from transfer.config import ChunkConfig, DecodeNodeConfig, PrefillNodeConfig, StagingConfig
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard

GIB = 1 << 30
LLAMA_8B = KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
LLAMA_70B = KVLayout.uniform(num_layers=80, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
LATENTS = KVLayout(
    layers=(LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=576, v_head_dim=0),) * 61, dtype=DType.BFLOAT16
)


@pytest.mark.parametrize(
    ("layout", "shard", "step_tokens", "wanted"),
    [
        (LLAMA_8B, Shard(), 8192, 2048),  # 128 KiB a token: 256 MiB
        (LLAMA_8B, Shard(tp_size=2), 8192, 4096),
        (LLAMA_8B, Shard(tp_size=2), 3000, 3000),  # a step has no more
        (LLAMA_8B, Shard(), 100, 100),
        (LLAMA_70B, Shard(), 8192, 1024),  # 320 KiB
        (LLAMA_70B, Shard(tp_size=4), 8192, 4096),
        (LLAMA_70B, Shard(pp_size=2), 8192, 2048),
        (LATENTS, Shard(), 8192, 4096),  # 69 KiB
        (KVLayout.uniform(num_layers=400, num_kv_heads=8, head_dim=128, dtype=DType.FLOAT32), Shard(), 8192, MIN_CHUNK_TOKENS),
    ],
)
def test_a_chunk_has_256_mib_on_a_rank(layout: KVLayout, shard: Shard, step_tokens: int, wanted: int) -> None:
    assert {gpu_chunk_tokens(layout, shard.at(rank), step_tokens=step_tokens) for rank in range(shard.num_ranks)} == {wanted}


@pytest.mark.parametrize(
    ("layout", "shard", "step_tokens", "wanted"),
    [
        (LLAMA_8B, Shard(), 8192, 8192),  # 4 KiB per token and layer, so 32 MiB per layer
        (LLAMA_8B, Shard(), 16384, 8192),
        (LLAMA_8B, Shard(tp_size=2), 16384, 16384),
        (LLAMA_8B, Shard(), 100, 100),
        (LATENTS, Shard(), 1 << 20, 16384),
    ],
)
def test_with_layers_in_a_step_a_layer_of_a_chunk_has_32_mib(
    layout: KVLayout, shard: Shard, step_tokens: int, wanted: int
) -> None:
    assert gpu_chunk_tokens(layout, shard, step_tokens=step_tokens, by_layer=True) == wanted


@pytest.mark.parametrize(
    ("chunk", "wanted"),
    [
        ({}, 8192),
        ({"layers_per_group": 0}, 2048),  # all layers travel after the step
        ({"layers_per_group": 8}, 2048),
        ({"piece_bytes": 8 << 20}, 2048),  # one layer must fit a piece
        ({"chunk_tokens": 300}, 300),
    ],
    ids=str,
)
def test_settings_that_bound_the_chunks_of_an_engine_with_layers(chunk: dict[str, int], wanted: int) -> None:
    config = with_gpu_chunks(ChunkConfig(**chunk), StagingConfig(), LLAMA_8B, Shard(), step_tokens=8192, by_layer=True)
    assert config.chunk_tokens == wanted


def prefill(**settings: Any) -> PrefillNodeConfig:
    return PrefillNodeConfig.model_validate({"model": Path("m"), "device": "cuda", **settings})


def test_steps_chunks_and_requests_follow_from_the_gpu() -> None:
    config = with_gpu_defaults(prefill(), LLAMA_8B, device_bytes=80 * GIB)
    assert (config.limits.max_step_tokens, config.limits.max_running_requests) == (8192, 64)
    assert config.chunk.chunk_tokens == 2048
    small = with_gpu_defaults(prefill(), LLAMA_8B, device_bytes=24 * GIB)
    assert (small.limits.max_step_tokens, small.limits.max_running_requests) == (2048, 64)
    decode = DecodeNodeConfig.model_validate({"model": Path("m"), "device": "cuda"})
    sizes = (16, 24, 40, 80, 180)
    running = [with_gpu_defaults(decode, LLAMA_8B, device_bytes=size * GIB).limits.max_running_requests for size in sizes]
    assert running == [32, 32, 32, 256, 512]
    graphs = [with_gpu_defaults(decode, LLAMA_8B, device_bytes=size * GIB).cuda_graph_max_bs for size in sizes]
    assert graphs == [8, 24, 32, 256, 512], "as kvferry plan"
    decode = DecodeNodeConfig.model_validate({"model": Path("m"), "device": "cuda", "parallel": {"tp_size": 4}})
    assert with_gpu_defaults(decode, None, device_bytes=80 * GIB).limits.max_running_requests == 512


def test_windows_and_states_of_running_requests_have_an_eighth_of_the_gpu() -> None:
    window = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=8, k_head_dim=128, v_head_dim=128, window_tokens=1024)
    windows = KVLayout(layers=(window,) * 32 + LLAMA_8B.layers, dtype=DType.BFLOAT16)
    decode = DecodeNodeConfig.model_validate({"model": Path("m"), "device": "cuda"})
    running = with_gpu_defaults(decode, windows, device_bytes=80 * GIB).limits.max_running_requests
    assert running == 10 * GIB // (65 * 16 * 128 * 1024) == 78, "65 pages of 16 tokens of 128 KiB each"
    long = replace(window, window_tokens=1 << 20)
    windows = KVLayout(layers=(long,) * 32 + LLAMA_8B.layers, dtype=DType.BFLOAT16)
    assert with_gpu_defaults(decode, windows, device_bytes=80 * GIB).limits.max_running_requests == 32, "the minimum"


def test_settings_that_are_given_stay() -> None:
    given = prefill(chunk={"chunk_tokens": 128}, limits={"max_step_tokens": 512, "max_running_requests": 32})
    assert with_gpu_defaults(given, LLAMA_8B, device_bytes=80 * GIB) == given
    config = with_gpu_defaults(prefill(limits={"max_step_tokens": 1000}), LLAMA_8B, device_bytes=80 * GIB)
    assert config.chunk.chunk_tokens == 1000, "no chunk is larger than a step"
    config = with_gpu_defaults(prefill(pool={"num_pages": 10}), LLAMA_8B, device_bytes=80 * GIB)
    assert config.chunk.chunk_tokens == 160, "nor than the pool"
    assert config.limits.queue_timeout_s == prefill().limits.queue_timeout_s


@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ({"limits": {"max_running_requests": 12}}, (1, 2, 4, 8, 12)),
        ({"limits": {"max_running_requests": 1000}}, (1, 2, 4, *range(8, 257, 8))),
        ({"cuda_graph_max_bs": 2}, (1, 2)),
        ({"cuda_graph_max_bs": 0}, ()),
        ({"cuda_graph_bs": [3]}, (3,)),
    ],
    ids=str,
)
def test_captured_batches(settings: dict[str, Any], captured: tuple[int, ...]) -> None:
    config = DecodeNodeConfig.model_validate({"model": Path("m"), "device": "cuda", **settings})
    assert graph_batch_sizes(with_gpu_defaults(config, LLAMA_8B, device_bytes=80 * GIB)) == captured


def test_one_layer_of_a_chunk_fits_a_given_staging_slot() -> None:
    given = prefill(staging={"slot_bytes": "2MiB"})
    assert with_gpu_defaults(given, LLAMA_8B, device_bytes=80 * GIB).chunk.chunk_tokens == 512, "4 KiB a token and layer"


def test_an_unknown_layout_has_chunks_of_2048_tokens() -> None:
    assert with_gpu_defaults(prefill(), None, device_bytes=80 * GIB).chunk.chunk_tokens == 2048
