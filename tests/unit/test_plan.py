"""The memory plan, by hand: the numbers of published models' plans are worked out here beside what `make_plan` says.

A reader needs only the model's config.json (tests/unit/configs) and docs/memory-model.md. Then what must hold of any plan.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.model_shape import ModelShape, read_model_shape
from planner.plan import (
    MemoryPlan,
    PlanInputs,
    Policy,
    Role,
    agree_on_free_bytes,
    compare_with_real,
    make_plan,
)
from planner.workspace import Strategy, XAttention
from transfer.errors import ConfigError, LayoutError, MemoryPlanError
from transfer.layer_groups import GroupKind
from transfer.layout import DType

CONFIGS = Path(__file__).parent / "configs"
MIB, GIB = 1 << 20, 1 << 30
H200 = 143_771 * MIB  # "141 GB", as nvidia-smi counts them


@cache
def model(name: str) -> ModelShape:
    return read_model_shape(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")))


def inputs_of(name: str, **flags: Any) -> PlanInputs:
    settings: dict[str, Any] = {"model": model(name), "role": Role.PREFILL}
    return PlanInputs(**(settings | flags))


def lines_of(plan: MemoryPlan) -> dict[str, int]:
    return {line.name: line.num_bytes for line in plan.lines}


def test_deepseek_v31_tp_8_on_141_gb() -> None:
    plan = make_plan(inputs_of("deepseek-v3.1", tp_size=8, device_bytes=H200))

    # Reserve, in MB: chunks of 8,192 and CUDA graphs up to 512 are the defaults of a device of 90 to 160 GiB with tp 4 or more.
    reserved_mb = 512 + 1.5 * 8192 + 2 * 512 + 1024 * 8 * 1 / 8
    assert reserved_mb == 14_848  # above the floor of 10,240 for devices above 61,440 MB
    assert plan.static_fraction == round((143_771 - 14_848) / 143_771, 3) == 0.897
    reserve = H200 - int(H200 * 0.897)

    # Weights, in fp8: one byte for each weight of a linear layer, two for what is not quantised.
    # Attention: 16 of 128 heads; the projections down to the latents are whole on every rank.
    attention = 7168 * 1536 + 7168 * (512 + 64) + 16 * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * 7168)
    dense, expert = 3 * 7168 * 18432 // 8, 3 * 7168 * 2048 // 8  # an eighth of each matrix
    linears = 61 * attention + 3 * dense + 58 * (256 + 1) * expert  # 256 routed experts and the shared one
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    routers = 58 * (256 * 7168 + 256)
    embeddings, head = 129_280 * 7168, 129_280 * 7168 // 8  # the head is cut, the embeddings are not
    weights = linears + 2 * (norms + routers + embeddings + head)
    assert plan.weights_bytes == weights == 86_741_167_104

    # KV: a latent of 512 and a rotary part of 64, in bfloat16, for 61 layers, the same on all eight ranks.
    assert plan.cell_bytes == (512 + 64) * 61 * 2 == 70_272

    page_tables = (32 + 1) * 163_840 * 4  # 163,840 is a multiple of 32
    pages = (H200 - weights - page_tables - reserve) // (16 * 70_272)
    assert plan.num_pages == pages == 43_104
    assert plan.max_total_tokens == 16 * 43_104 == 689_664
    left = H200 - weights - page_tables - reserve - pages * 16 * 70_272
    assert plan.free_bytes == reserve + left - 2 * 512 * MIB  # without what CUDA graphs take
    assert plan.advice == ("13.5 GiB stay free, more than 10 GB: raise the fraction by 0.01, --static-fraction 0.907",)


def test_gemma_3_27b() -> None:
    """52 layers with a window of 1,024 tokens and 10 that keep every token, each kind in a pool of its own; a vision tower."""
    plan = make_plan(inputs_of("gemma-3-27b", role=Role.DECODE, device_bytes=H200))

    reserved_mb = 512 + 1.5 * 8192 + 2 * 256 + 1024 * 1 * 1 / 8
    assert reserved_mb == 13_440
    size_of_tower = 27 * 1152**2 / (24 * 1024**2)  # in ViT-L/14s
    factor = 0.95 * (1 - 0.1 * (size_of_tower - 1))
    assert plan.static_fraction == round((143_771 - 13_440) / 143_771, 3) * factor
    reserve = H200 - int(H200 * plan.static_fraction)

    # Weights: 32 query and 16 KV heads of 128, four norms a layer and one for queries and one for keys, head tied to embeddings.
    layer = 2 * 32 * 128 * 5376 + 2 * 16 * 128 * 5376 + 3 * 5376 * 21504 + 4 * 5376 + 2 * 128
    tower = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 1152 * 5376
    weights = 2 * (62 * layer + 262_208 * 5376 + 5376 + tower)
    assert plan.weights_bytes == weights == 54_853_219_840

    full, window = plan.groups
    assert (full.kind, full.layers, full.cell_bytes) == (GroupKind.FULL, tuple(range(5, 60, 6)), 16 * 256 * 10 * 2)
    assert (window.kind, len(window.layers), window.cell_bytes) == (GroupKind.WINDOW, 52, 16 * 256 * 52 * 2)

    # A decoding request reaches 1,023 tokens back from the one it computes: 1,024 tokens lie in at most 65 pages of 16.
    assert window.num_pages == 32 * 65 == 2080
    page_tables = 2 * 33 * 131_072 * 4  # one for each kind
    budget = H200 - weights - page_tables - reserve
    assert full.num_pages == (budget - 2080 * 16 * window.cell_bytes) // (16 * full.cell_bytes) == 42_211
    assert plan.max_total_tokens == 16 * 42_211 == 675_376
    assert plan.group_pages == (42_211, 2080)

    # Without windows every token would take all 62 layers: not 675,376 but
    assert budget // (16 * 256 * 62 * 2) == 136_845


GLM = {"device_bytes": 24 * GIB, "max_running_requests": 1}


@pytest.mark.parametrize("strategy", Strategy)
def test_glm_4_9b_with_a_million_tokens_and_sparse_prefill(strategy: Strategy) -> None:
    """Two copies of K and V for all 32 query heads would take 16 GiB of a device of 24 GB; none is made."""
    policy = XAttention(strategy=strategy)
    flags: dict[str, Any] = {**GLM, "chunked_prefill_size": 2048, "offload_bytes": 128 * MIB, "has_host_pages": True}
    plan = make_plan(inputs_of("glm-4-9b-chat-1m", **flags, sparse_prefill=policy))
    blocks = 1_048_576 // 128 + 1
    found = {one.name: one.num_bytes for one in plan.workspaces}
    assert found == {
        "block_lse": 32 * (2048 // 16) * blocks * 4,
        "block_sums": 32 * (2048 // 128) * blocks * 4,
        "block_lists": 32 * (2048 // 128) * blocks * 4,
        "block_counts": (32 * (2048 // 128) + blocks) * 4,
    }
    at_start = strategy is Strategy.CHUNK_BOUNDED
    assert {name: lines_of(plan).get(name, 0) for name in found} == {name: size * at_start for name, size in found.items()}
    assert any("lazy workspaces will take" in line and "which fits" in line for line in plan.advice) == (not at_start)
    assert plan.num_pages > 1000
    assert any("a longer prompt is kept in host memory, which takes 81,920 B a token" in line for line in plan.advice)


def test_lazy_workspaces_that_will_not_fit_are_named() -> None:
    flags: dict[str, Any] = {**GLM, "chunked_prefill_size": 16_384, "static_fraction": 0.95}
    policy = XAttention(strategy=Strategy.LAZY, stride=4, block_size=64)
    plan = make_plan(inputs_of("glm-4-9b-chat-1m", **flags, sparse_prefill=policy))
    assert any("which does NOT fit: use --workspace-strategy chunk_bounded" in line for line in plan.advice)
    at_start = replace(policy, strategy=Strategy.CHUNK_BOUNDED)
    with pytest.raises(MemoryPlanError, match=r"block_lse 8\.0 GiB.*or a larger --sparse-stride"):
        make_plan(inputs_of("glm-4-9b-chat-1m", **flags, sparse_prefill=at_start))


@pytest.mark.parametrize(("model", "kind"), [("deepseek-v3.1", "mla"), ("gemma-3-27b", "sliding_window")])
def test_sparse_prefill_is_refused_for_a_model_without(model: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"--sparse-policy is xattention; \w+ has layers of kind {kind}; .* it must be none"):
        make_plan(inputs_of(model, tp_size=8, device_bytes=H200, sparse_prefill=XAttention()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 32}, "block_size is 32; it must be one of 64, 128"),
        ({"stride": 5}, "stride is 5; it must be one of 4, 8, 16, 32"),
        ({"threshold": 0.0}, "threshold is 0.0; it must be above 0 and at most 1"),
        ({"threshold": float("nan")}, "threshold is nan; it must be above 0"),
    ],
)
def test_policies_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        XAttention(**values)


def test_a_policy_is_named_with_all_that_changes_kv() -> None:
    """The name is part of the keys of stored pages, so it must not change."""
    assert str(XAttention(threshold=0.95)) == "xattention block_size=128 stride=16 threshold=0.95"


def test_buffers_for_pages_in_host_memory_are_taken_from_the_pool() -> None:
    flags: dict[str, Any] = {"tp_size": 8, "device_bytes": H200}
    without, plan = (make_plan(inputs_of("deepseek-v3.1", **flags, offload_bytes=size)) for size in (0, GIB))
    assert lines_of(plan)["offload"] == GIB and "offload" not in lines_of(without)
    assert abs(GIB - (without.pool_bytes - plan.pool_bytes)) <= 16 * plan.cell_bytes, "but for a page"
    with pytest.raises(ConfigError, match="offload_bytes is -1"):
        inputs_of("deepseek-v3.1", **flags, offload_bytes=-1)


def test_recurrent_states_are_one_row_for_each_request() -> None:
    plan = make_plan(inputs_of("qwen3-next-80b-a3b", tp_size=4, device_bytes=80 * GIB, max_running_requests=100))
    full, state = plan.groups
    # Of a rank's 4 key heads: two value heads' states of 128 x 128, and 4 columns of 2 x 128 + 2 x 128 values; in float32.
    assert state.cell_bytes == 4 * (2 * 128 * 128 + 4 * (2 * 128 + 2 * 128)) * 36 * 4
    assert (state.num_pages, state.page_size, state.num_bytes) == (100, 1, 100 * state.cell_bytes)
    assert full.cell_bytes == plan.cell_bytes == 1 * (256 + 256) * 12 * 2  # of 2 KV heads, four ranks share each
    assert plan.page_table_bytes == 101 * 262_144 * 4  # states need none


@pytest.mark.parametrize(
    ("flags", "reserved_mb", "device_mb"),
    [
        ({}, 512 + 1.5 * 2048 + 2 * 24 + 1024 / 8, 24_576),
        ({"tp_size": 2, "pp_size": 3}, 512 + 1.5 * 2048 + 2 * 24 + 1024 * 6 / 8, 24_576),
        ({"chunked_prefill_size": 2048, "cuda_graph_batch_sizes": ()}, 10 * 1024, 61_441),  # the floor, above 60 x 1024
        ({"speculative": "EAGLE3"}, 3760 + 2048, 24_576),
        (
            {"tp_size": 8, "dp_size": 4, "has_dp_attention": True, "cuda_graph_batch_sizes": (301,)},
            512 + 1.5 * 8192 + 2 * 301 + 3 * 301 * 4 + 1.5 * 301 * 4 + 1024,
            81_920,
        ),
    ],
)
def test_static_fraction(flags: dict[str, Any], reserved_mb: float, device_mb: int) -> None:
    plan = make_plan(inputs_of("qwen3-8b", device_bytes=device_mb * MIB, kv_dtype=DType.FLOAT8_E4M3, **flags))
    assert plan.static_fraction == round((device_mb - reserved_mb) / device_mb, 3)
    assert f"= {reserved_mb:,.0f} of {device_mb:,} MB" in next(line.formula for line in plan.lines if line.name == "reserve")


@pytest.mark.parametrize(
    ("flags", "fraction"),
    [
        ({"device_bytes": 80 * GIB, "static_fraction": 0.9}, 0.9),
        ({"free_bytes": 80 * GIB}, 0.88),  # the size is unknown
        ({"device_bytes": 80 * GIB, "is_cpu": True}, 0.88),
    ],
)
def test_a_given_fraction_wins_and_an_unknown_device_has_its_own(flags: dict[str, Any], fraction: float) -> None:
    for name in ("qwen3-8b", "gemma-3-27b"):  # a vision tower reduces only what the heuristic found
        plan = make_plan(inputs_of(name, **flags))
        assert plan.static_fraction == fraction
        assert plan.reserved_bytes == 80 * GIB - int(80 * GIB * fraction)


def test_a_device_smaller_than_its_reserve_is_refused() -> None:
    with pytest.raises(
        MemoryPlanError, match=r"the device has 2,048 MB, and 3,728 MB of it are to stay free \(512 \+ 1\.5 x 2048"
    ):
        make_plan(inputs_of("qwen3-8b", device_bytes=2 * GIB))


def test_page_count_policy() -> None:
    """mini-sglang: (ratio x free - what was allocated) / (2 x head_dim x kv_heads / tp x page_size x element x layers)."""
    flags = {"policy": Policy.PAGE_COUNT, "memory_ratio": 0.9, "device_bytes": 80 * GIB, "free_bytes": 78 * GIB}
    plan = make_plan(inputs_of("qwen3-8b", **flags, tp_size=2, page_size=64, ring_bytes=GIB, staging_bytes=MIB))
    allocated = plan.weights_bytes + plan.page_table_bytes + GIB + MIB
    assert plan.num_pages == (int(0.9 * 78 * GIB) - allocated) // (2 * 128 * (8 // 2) * 64 * 2 * 36)
    assert plan.reserved_bytes == 78 * GIB - int(0.9 * 78 * GIB)
    assert plan.static_fraction == round((80 * GIB - plan.reserved_bytes) / (80 * GIB), 3)
    assert lines_of(plan)["in_use"] == 2 * GIB
    assert plan.advice == ("7.3 GiB stay free, between 5 and 8 GB: good",)  # 7.8 GiB, less 0.5 for CUDA graphs


@pytest.mark.parametrize(
    ("reserve_gib", "advice"),
    [
        (12, "12.0 GiB stay free, more than 10 GB: raise the fraction by 0.01, --memory-ratio 0.86"),
        (9, None),
        (7, "7.0 GiB stay free, between 5 and 8 GB: good"),
        (2.5, "2.5 GiB stay free, less than 3 GB: lower --chunked-prefill-size or --cuda-graph-max-bs if memory runs out"),
        (1.5, "1.5 GiB stay free, less than 2 GB: lower --chunked-prefill-size or --cuda-graph-max-bs, or memory will run out"),
    ],
)
def test_advice_on_what_stays_free(reserve_gib: float, advice: str | None) -> None:
    flags: dict[str, Any] = {"device_bytes": 80 * GIB, "cuda_graph_batch_sizes": ()}
    plan = make_plan(inputs_of("qwen3-8b", policy=Policy.PAGE_COUNT, memory_ratio=1 - reserve_gib / 80, **flags))
    assert plan.advice == (() if advice is None else (advice,))
    assert make_plan(inputs_of("qwen3-8b", static_fraction=1 - reserve_gib / 80, **flags, is_cpu=True)).advice == ()


def test_advice_on_options_that_take_memory_and_on_a_set_limit() -> None:
    flags: dict[str, Any] = {"device_bytes": 80 * GIB, "cuda_graph_batch_sizes": (), "static_fraction": 0.97}
    lower = "2.4 GiB stay free, less than 3 GB: lower --chunked-prefill-size or --cuda-graph-max-bs if memory runs out"
    for option, more in (
        ("--dp-attention", {"has_dp_attention": True, "dp_size": 2, "tp_size": 2}),
        ("--speculative", {"speculative": "ngram"}),
    ):
        says = f"{option} makes each CUDA graph larger: lower --cuda-graph-max-bs first"
        assert make_plan(inputs_of("qwen3-8b", **flags, **more)).advice == (lower, says)
    says = "a vision model needs memory to encode images: lower the fraction by 0.05, --static-fraction 0.920"
    assert says in make_plan(inputs_of("gemma-3-27b", **flags)).advice
    of_pages = flags | {"static_fraction": None, "policy": Policy.PAGE_COUNT, "memory_ratio": 0.97}
    says = says.replace("--static-fraction 0.920", "--memory-ratio 0.92")
    assert says in make_plan(inputs_of("gemma-3-27b", **of_pages)).advice
    limited = make_plan(inputs_of("qwen3-8b", device_bytes=80 * GIB, max_total_tokens=100_000))
    assert limited.advice[0].endswith(" GiB stay free, more than 10 GB: raise or remove --max-total-tokens")


def test_page_tables_are_no_wider_than_the_pool() -> None:
    flags: dict[str, Any] = {"role": Role.DECODE, "device_bytes": 24 * GIB, "cuda_graph_batch_sizes": ()}
    plan = make_plan(inputs_of("qwen3-8b", **flags, max_running_requests=256))
    tokens, context = plan.max_total_tokens, model("qwen3-8b").max_context_tokens
    assert tokens < context and tokens % 32 == 16
    assert plan.page_table_bytes == (256 + 1) * (tokens + 16) * 4
    left, page_bytes = lines_of(plan)["left"], 16 * plan.cell_bytes
    assert 0 <= left < page_bytes, "one page more would not fit"
    # Pages of a running request in host memory: it can be longer than the pool.
    tiered = make_plan(inputs_of("qwen3-8b", **flags, max_running_requests=256, has_host_pages=True))
    assert tiered.page_table_bytes == (256 + 1) * context * 4
    assert plan.num_pages > tiered.num_pages
    assert [line for line in plan.advice if "longer ones are refused; set --max-seq-len" in line]
    assert not [line for line in tiered.advice if "longer ones are refused" in line]
    bounded = make_plan(inputs_of("qwen3-8b", **flags, max_running_requests=256, max_total_tokens=100))
    assert bounded.page_table_bytes == (256 + 1) * 96 * 4, "six whole pages"


def test_measured_weights_win_and_stored_ones_are_scaled_to_the_dtype() -> None:
    flags: dict[str, Any] = {"device_bytes": 80 * GIB, "checkpoint_bytes": 16_381_470_720, "checkpoint_source": "index"}
    assert make_plan(inputs_of("qwen3-8b", weights_bytes=20 * GIB, **flags)).weights_bytes == 20 * GIB
    cut = make_plan(inputs_of("llama-3-70b", **flags | {"checkpoint_bytes": 141_107_412_992}, tp_size=4))
    assert cut.weights_bytes == 36_854_841_344, "a quarter of what is cut, and the whole of embeddings and norms"
    assert make_plan(inputs_of("qwen3-8b", dtype=DType.FLOAT32, **flags)).weights_bytes == 2 * 16_381_470_720
    assert (
        make_plan(inputs_of("gpt-oss-20b", dtype=DType.BFLOAT16, **flags)).weights_bytes == 16_381_470_720
    )  # stored in who knows


def test_stages_have_their_own_groups() -> None:
    """Gemma-3 27B over 62 stages: one layer each, so that a stage has either a window or every token."""
    flags = {"pp_size": 62, "device_bytes": 32 * GIB, "cuda_graph_batch_sizes": (), "max_seq_len": 8192}
    window = make_plan(inputs_of("gemma-3-27b", pp_rank=0, **flags))
    full = make_plan(inputs_of("gemma-3-27b", pp_rank=5, **flags))
    assert [group.num_bytes > 0 for group in window.groups] == [False, True]
    assert [group.num_bytes > 0 for group in full.groups] == [True, False]
    assert window.groups[1].num_pages == 32 * min(8192 // 16, -(-(1023 + 3 * 2048 - 1) // 16) + 1)  # all that requests can need
    assert window.cell_bytes == full.cell_bytes == 16 * 256 * 2
    names = {line.name: line.formula for line in window.lines}
    assert names["pool_full"] == "this stage has none of these layers"
    with pytest.raises(LayoutError, match="pp_rank is 62"):
        make_plan(inputs_of("gemma-3-27b", pp_rank=62, **flags))


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "sliding_window": 100,
    "torch_dtype": "float32",
}  # fmt: skip


def test_a_model_of_windows_alone() -> None:
    """Nothing keeps every token: the pool is no larger than what all requests can hold, and smaller where that does not fit."""
    shape = read_model_shape(MIXTRAL)
    cell = 2 * (16 + 16) * 4 * 4
    flags: dict[str, Any] = {"model": shape, "role": Role.DECODE, "is_cpu": True, "max_running_requests": 10}
    plan = make_plan(PlanInputs(device_bytes=GIB, **flags))
    assert plan.num_pages == 10 * 8  # 100 tokens lie in at most 8 pages of 16
    assert (plan.cell_bytes, plan.max_total_tokens) == (cell, 10 * 8 * 16)
    assert plan.advice == ()
    used = plan.weights_bytes + plan.page_table_bytes
    tight = make_plan(PlanInputs(device_bytes=(used + 33 * 16 * cell) * 100 // 88 + 99, **flags))
    assert tight.num_pages == 33


def test_what_does_not_fit_names_the_largest_terms_and_the_flags() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        make_plan(inputs_of("llama-3-70b", device_bytes=80 * GIB))
    assert str(caught.value) == (
        "no page of KV fits: of 80.0 GiB the largest terms are weights 131.4 GiB, reserve 13.1 GiB; it is 64.5 GiB too little. "
        "What would help: a larger --tp or --pp, or a quantised model; a larger --static-fraction, or a smaller "
        "--chunked-prefill-size or --cuda-graph-max-bs"
    )  # 1 MiB of page tables is no cure
    crowded = {"device_bytes": 80 * GIB, "free_bytes": 20 * GIB, "ring_bytes": 30 * GIB, "staging_bytes": 31 * GIB}
    with pytest.raises(MemoryPlanError, match="end what else runs on the device; a smaller --staging; a smaller --ring"):
        make_plan(inputs_of("qwen3-8b", **crowded))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "device memory is unknown; set --device-memory, or --free-memory"),
        ({"free_bytes": GIB, "page_size": 0}, "--page-size is 0; it must be at least 1"),
        ({"free_bytes": GIB, "page_size": 1 << 63}, f"--page-size is {1 << 63}; it must be at most {(1 << 63) - 1}"),
        (
            {"free_bytes": GIB, "cuda_graph_batch_sizes": (1, 1 << 63)},
            f"--cuda-graph-bs is [1, {1 << 63}]; each must be at most {(1 << 63) - 1}",
        ),
        ({"free_bytes": GIB, "cuda_graph_batch_sizes": (1, 0)}, "--cuda-graph-bs is [1, 0]; each must be at least 1"),
        (
            {"free_bytes": GIB, "torch_compile_max_bs": -1},
            f"--torch-compile-max-bs is -1; it must be from 0 to {(1 << 63) - 1}",
        ),
        ({"free_bytes": GIB, "static_fraction": 1.0}, "--static-fraction is 1.0; it must be between 0 and 1"),
        ({"device_bytes": 1, "free_bytes": 2}, "--free-memory is 2; it must be at most --device-memory, 1"),
        (
            {"free_bytes": GIB, "dp_size": 2},
            "--dp is 2; without --dp-attention it must be 1, because each replica is a separate node",
        ),
        ({"free_bytes": GIB, "dp_size": 2, "has_dp_attention": True, "tp_size": 3}, "--dp is 2; it must divide --tp, 3"),
        ({"free_bytes": GIB, "pp_size": 37}, "--pp is 37; a model of 36 layers has at most as many stages"),
        ({"free_bytes": GIB, "max_total_tokens": 15}, "--max-total-tokens is 15; it must be at least one page, 16"),
        ({"free_bytes": GIB, "max_seq_len": 40_961}, "--max-seq-len is 40961; the model was made for at most 40960 tokens"),
        (
            {"free_bytes": GIB, "speculative": "medusa"},
            "--speculative is 'medusa'; it must be one of eagle, eagle3, nextn, dflash, standalone, ngram",
        ),
        (
            {"free_bytes": GIB, "model": replace(model("qwen3-8b"), dtype=None)},
            "config.json does not contain the dtype of the weights; set --dtype to one of float32, bfloat16, float16",
        ),
        (
            {"free_bytes": GIB, "max_seq_len": 0, "names": {"--max-seq-len": "limits.longest"}},
            "limits.longest is 0; it must be at least 1",
        ),
    ],
)
def test_wrong_inputs_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inputs_of("qwen3-8b", **flags)
    assert str(caught.value) == message


def test_ranks_agree_on_the_least() -> None:
    assert agree_on_free_bytes({0: 79 * GIB, 1: 78 * GIB, 2: 80 * GIB}) == 78 * GIB
    with pytest.raises(MemoryPlanError) as caught:
        agree_on_free_bytes({0: 79 * GIB, 1: 80 * GIB, 2: 78 * GIB - 1, 3: 80 * GIB})
    assert str(caught.value) == (
        "free memory differs by more than 2.0 GiB: rank 2 has 78.0 GiB, rank 1 has 80.0 GiB; another process must have taken the "
        "memory of rank 2's device"
    )
    with pytest.raises(ConfigError, match="free_by_rank is empty"):
        agree_on_free_bytes({})


def test_what_differs_by_more_than_a_twentieth_is_a_warning() -> None:
    plan = make_plan(inputs_of("qwen3-8b", device_bytes=24 * GIB, ring_bytes=64 * MIB))
    ring, pool = 64 * MIB, plan.pool_bytes
    assert compare_with_real(plan, {"ring": ring + ring // 20, "pool": pool, "weights": plan.weights_bytes, "in_use": 0}) == []
    assert compare_with_real(plan, {"ring": ring + ring // 20 + 1, "staging": 3, "free": plan.free_bytes}) == [
        "ring: planned 64.0 MiB (67108864 bytes), real 67.2 MiB (70464308 bytes), +5.0 %",
        "staging: planned 0 B (0 bytes), real 3 B (3 bytes)",
    ]
    assert compare_with_real(plan, {"pool": pool * 9 // 10})[0].endswith(", -10.0 %")
    graphs = plan.planned_bytes("cuda_graphs")
    assert graphs and compare_with_real(plan, {"cuda_graphs": graphs // 8}) == [], "an allowance that was not used up"
    assert len(compare_with_real(plan, {"cuda_graphs": 2 * graphs})) == 1
    with pytest.raises(ConfigError, match="line is 'kv'; must be one of in_use, weights, "):
        compare_with_real(plan, {"kv": 1})


@pytest.mark.parametrize(
    ("flags", "megabytes"),
    [
        ({"cuda_graph_batch_sizes": (1, 8, 64)}, 2 * 32),
        ({"cuda_graph_batch_sizes": (1, 8)}, 2 * 8),
        ({"cuda_graph_batch_sizes": ()}, 0),
        ({"is_cpu": True, "max_running_requests": 20}, 2 * 20),
        ({"cuda_graph_batch_sizes": (200,), "static_fraction": 0.99}, 0),  # the graphs take the whole reserve
    ],
)
def test_compiled_steps_have_an_allowance_in_the_reserve(flags: dict[str, Any], megabytes: int) -> None:
    flags = {"role": Role.DECODE, "device_bytes": 24 * GIB, **flags}
    plain, compiled = (make_plan(inputs_of("qwen3-8b", **flags, torch_compile_max_bs=size)) for size in (0, 32))
    assert compiled.planned_bytes("inductor") == plain.free_bytes - compiled.free_bytes == megabytes * MIB
    assert (compiled.max_total_tokens, compiled.reserved_bytes) == (plain.max_total_tokens, plain.reserved_bytes)
    assert sum(line.num_bytes for line in compiled.lines if line.inside) == compiled.reserved_bytes
    assert "inductor" not in [line.name for line in plain.lines]


def test_json_has_every_key_in_plain_values() -> None:
    plan = make_plan(inputs_of("glm-4-9b-chat-1m", **GLM, sparse_prefill=XAttention(), staging_bytes=2048))
    content = plan.as_json()
    assert json.loads(json.dumps(content)) == content
    assert content["max_total_tokens"] == plan.max_total_tokens and content["page_size"] == 16
    assert {
        "static_fraction", "reserved_bytes", "weights_bytes", "cell_bytes", "max_total_tokens", "num_pages", "page_size",
        "tokens_in_flight",
        "staging_bytes", "ring_bytes", "workspaces", "free_bytes", "advice", "lines", "groups",
    } <= content.keys()  # fmt: skip
    workspaces: Any = content["workspaces"]
    assert {"name", "bytes", "strategy", "allocated"} <= workspaces[0].keys()
    assert {type(value) for value in content.values()} <= {int, str, float, list, dict}
    assert "2.0 KiB" in str(compare_with_real(plan, {"staging": 1}))


NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


@st.composite
def any_inputs(draw: st.DrawFn) -> PlanInputs:
    name = draw(st.sampled_from(NAMES))
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    device_bytes = draw(st.integers(16 * GIB, 800 * GIB))
    dp_size = draw(st.sampled_from([size for size in (1, 2, 4) if tp_size % size == 0]))
    return inputs_of(
        name,
        role=draw(st.sampled_from(Role)),
        device_bytes=device_bytes,
        free_bytes=draw(st.none() | st.integers(device_bytes // 2, device_bytes)),
        is_cpu=draw(st.booleans()),
        tp_size=tp_size,
        pp_size=draw(st.integers(1, 4)),
        dp_size=dp_size,
        has_dp_attention=dp_size > 1,
        dtype=DType.BFLOAT16,
        kv_dtype=draw(st.sampled_from([None, DType.FLOAT8_E4M3, DType.FLOAT32])),
        page_size=draw(st.sampled_from([1, 7, 16, 64])),
        max_running_requests=draw(st.integers(1, 300)),
        policy=draw(st.sampled_from(Policy)),
        max_total_tokens=draw(st.none() | st.integers(64, 10**7)),
        tokens_in_flight=draw(st.none() | st.integers(1, 10_000)),
        staging_bytes=draw(st.integers(0, GIB)),
        ring_bytes=draw(st.integers(0, GIB)),
    )


def planned(inputs: PlanInputs) -> MemoryPlan:
    try:
        return make_plan(inputs)
    except MemoryPlanError:
        assume(False)
        raise


@given(any_inputs())
def test_lines_add_up_and_never_exceed_the_budget(inputs: PlanInputs) -> None:
    plan = planned(inputs)
    assert sum(line.num_bytes for line in plan.lines if not line.inside) == plan.device_bytes
    assert sum(line.num_bytes for line in plan.lines if line.inside == "reserve") == plan.reserved_bytes
    assert all(line.num_bytes >= 0 for line in plan.lines)
    assert plan.pool_bytes == sum(line.num_bytes for line in plan.lines if line.name.startswith("pool_"))
    assert len({line.name for line in plan.lines}) == len(plan.lines)


@given(any_inputs())
def test_one_page_more_does_not_fit(inputs: PlanInputs) -> None:
    inputs = replace(inputs, max_total_tokens=None)
    plan = planned(inputs)
    assume(any(group.kind is GroupKind.FULL and group.layers for group in plan.groups))
    more = {group.name: group.num_pages for group in plan.groups}
    for group in plan.groups:
        grows = group.kind is GroupKind.FULL or (group.kind is GroupKind.WINDOW and group.num_pages == plan.num_pages)
        more[group.name] += grows
    needed = [next(one for one in inputs.groups if one.name == group.name) for group in plan.groups]
    for group, one in zip(plan.groups, needed, strict=True):
        if group.kind is GroupKind.WINDOW:  # a window grows no further than requests can need
            peak = one.peak_pages(
                inputs.sequence_tokens, page_size=inputs.page_size, tokens_in_flight=inputs.most_tokens_in_flight
            )
            more[group.name] = min(more[group.name], inputs.max_running_requests * peak)
    grown = sum(more[group.name] * group.cell_bytes * group.page_size for group in plan.groups)
    assert grown > plan.pool_bytes + lines_of(plan)["left"]


@given(any_inputs(), st.integers(0, 100 * GIB))
def test_more_memory_never_means_fewer_tokens(inputs: PlanInputs, more: int) -> None:
    """With the flags held fast: the default batches, and with them the reserve, grow with the device."""
    inputs = replace(
        inputs, free_bytes=None, chunked_prefill_size=inputs.chunk_tokens, cuda_graph_batch_sizes=(), static_fraction=0.9
    )
    assert inputs.device_bytes is not None
    plan = planned(inputs)
    assert make_plan(replace(inputs, device_bytes=inputs.device_bytes + more)).max_total_tokens >= plan.max_total_tokens


@given(any_inputs(), st.integers(64, 10**7))
def test_max_total_tokens_only_lowers(inputs: PlanInputs, max_total_tokens: int) -> None:
    free = planned(replace(inputs, max_total_tokens=None))
    bounded = make_plan(replace(inputs, max_total_tokens=max_total_tokens))
    page_size = inputs.page_size
    assert bounded.max_total_tokens == min(free.max_total_tokens, max_total_tokens // page_size * page_size)
    assert bounded.pool_bytes <= free.pool_bytes
    assert bounded.free_bytes >= free.free_bytes
