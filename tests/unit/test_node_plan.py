"""From a node's settings and its device to the inputs of its memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.model_directory import ModelDirectory
from planner.model_shape import read_model_shape
from planner.node_plan import DeviceMemory, graph_rows, node_plan_inputs
from planner.plan import PlanInputs, Policy, Role, make_plan
from transfer.chunk import largest_wire_bytes
from transfer.config import CPU_POOL_PAGES, DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.errors import ConfigError, MemoryPlanError
from transfer.host_memory import host_memory
from transfer.layout import DType, Shard, TokenOrder, routes
from transfer.sizes import chunk_plan, ring_capacity_bytes, staging_slot_bytes
from transfer.transport.base import REGION_ALIGNMENT_BYTES

GIB = 1 << 30
PROBE_BYTES = 4 << 20
GPU = DeviceMemory(total_bytes=80 * GIB, free_bytes=79 * GIB, is_cpu=False)
CPU = DeviceMemory(total_bytes=6 * GIB, free_bytes=6 * GIB, is_cpu=True)

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MODEL = ModelDirectory(shape=read_model_shape(LLAMA), checkpoint_bytes=400 << 20, checkpoint_source="files")


def prefill(**settings: Any) -> PrefillNodeConfig:
    return PrefillNodeConfig.model_validate({"model": Path("m"), **settings})


def decode(**settings: Any) -> DecodeNodeConfig:
    return DecodeNodeConfig.model_validate({"model": Path("m"), **settings})


def inputs_of(config: NodeConfig, device: DeviceMemory = GPU, tp_size: int = 1, **more: Any) -> PlanInputs:
    shard = Shard(tp_size=tp_size, page_size=config.pool.page_size, dtype=config.pool.dtype, order=TokenOrder.NHD)
    return node_plan_inputs(config, MODEL, shard, device, **more)


def test_a_prefill_rank_counts_its_staging_and_the_steps_that_it_may_have_been_sent() -> None:
    config = prefill(chunk={"chunk_tokens": 256}, staging={"num_slots": 3}, limits={"max_step_tokens": 1024})
    inputs = inputs_of(config)
    slot = 256 * 8 * 2 * 8 * 64 * 2  # tokens x layers x (K and V) x heads x dim x bytes
    assert slot % REGION_ALIGNMENT_BYTES == 0 and inputs.staging_bytes == 3 * slot + PROBE_BYTES
    assert (inputs.role, inputs.ring_bytes, inputs.chunk_tokens) == (Role.PREFILL, 0, 1024)
    assert inputs_of(prefill(chunk={"chunk_tokens": 512}, limits={"max_step_tokens": 256})).chunk_tokens == 512, (
        "one chunk at least"
    )
    assert inputs.most_tokens_in_flight == 3 * 256
    assert inputs.cuda_graph_max_bs == 0
    assert inputs_of(config, tp_size=4).staging_bytes == 3 * slot // 4 + PROBE_BYTES


def test_a_decode_rank_counts_its_ring_and_its_graphs() -> None:
    config = decode(ring={"capacity_bytes": "1GiB"}, limits={"max_running_requests": 20}, pool={"page_size": 64})
    inputs = inputs_of(config)
    assert (inputs.role, inputs.ring_bytes, inputs.staging_bytes) == (Role.DECODE, GIB + PROBE_BYTES, 0)
    assert (inputs.most_tokens_in_flight, inputs.page_size, inputs.max_running_requests) == (2, 64, 20)
    assert inputs.cuda_graph_batch_sizes == (1, 2, 4, 8, 16, 20)
    assert inputs_of(config, CPU).cuda_graph_batch_sizes == ()


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"cuda_graph_max_bs": 9}, (1, 2, 4, 8, 9)),
        ({"cuda_graph_max_bs": 0}, ()),
        ({"cuda_graph_bs": [20, 3, 3]}, (3, 20)),
        ({"cuda_graph_bs": []}, ()),
        ({"cuda_graph_bs": [3], "kernels": "torch"}, ()),
        ({"cuda_graph_max_bs": 9, "kernels": "torch"}, ()),
    ],
)
def test_the_batches_with_a_graph_can_be_chosen(settings: dict[str, Any], batches: tuple[int, ...]) -> None:
    config = decode(limits={"max_running_requests": 20}, **settings)
    inputs = inputs_of(config)
    assert inputs.cuda_graph_batch_sizes == batches
    chosen = "the largest cuda_graph_bs" if "cuda_graph_bs" in settings else "cuda_graph_max_bs"
    assert inputs.in_names("lower --chunked-prefill-size or --cuda-graph-max-bs") == f"lower {chosen}"


def test_compiled_steps_reach_the_plan() -> None:
    assert inputs_of(decode()).torch_compile_max_bs == inputs_of(prefill()).torch_compile_max_bs == 0
    assert inputs_of(decode(torch_compile=True)).torch_compile_max_bs == 32
    inputs = inputs_of(decode(torch_compile=True, torch_compile_max_bs=16, device="cuda", cuda_graph_bs=[8, 32]))
    assert (inputs.torch_compile_max_bs, inputs.in_names("--torch-compile-max-bs")) == (16, "torch_compile_max_bs")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "torch"}, "torch_compile is true, and kernels is torch; compiled steps run in CUDA graphs"),
        ({"cuda_graph_max_bs": 0}, "torch_compile is true, and cuda_graph_max_bs is 0; compiled steps run in CUDA graphs"),
        (
            {"cuda_graph_bs": []},
            r"cuda_graph_bs \(\[\]\) has no size of up to torch_compile_max_bs \(32\)",
        ),
        ({"cuda_graph_bs": [8], "torch_compile_max_bs": 4}, r"cuda_graph_bs \(\[8\]\) has no size .*torch_compile_max_bs \(4\)"),
        ({"torch_compile_max_bs": 0}, "torch_compile_max_bs"),
    ],
)
def test_compiled_sizes_without_a_cuda_graph_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(torch_compile=True, device="cuda", **settings)
    if "torch_compile_max_bs" not in settings:
        decode(torch_compile=True, device="cpu", **settings)  # no graphs on a CPU


def test_invalid_cuda_graph_batches_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"cuda_graph_bs contains 21, which exceeds limits.max_running_requests \(20\)"):
        inputs_of(decode(limits={"max_running_requests": 20}, cuda_graph_bs=[21, 1]))
    with pytest.raises(ValueError, match=r"cuda_graph_bs and cuda_graph_max_bs \(8\) are both set; set one of them"):
        decode(cuda_graph_bs=[1], cuda_graph_max_bs=8)
    with pytest.raises(ValueError, match="cuda_graph_bs"):
        decode(cuda_graph_bs=[0])


def test_draft_tokens_have_rows_in_graphs_and_pages_in_windows() -> None:
    """The plan's reserve counts batches, as SGLang's does, and n-grams add nothing to it."""
    limits = {"max_running_requests": 20}
    plain, config = decode(limits=limits, cuda_graph_bs=[2, 4]), decode(limits=limits, cuda_graph_bs=[2, 4], speculative=NGRAM)
    assert (graph_rows(plain), graph_rows(config)) == ((2, 4), (2, 4, 8, 16))
    assert graph_rows(decode(limits=limits, cuda_graph_bs=[2, 4], speculative=NGRAM, kernels="torch")) == ()
    inputs = inputs_of(config)
    assert (inputs.speculative, inputs.most_tokens_in_flight) == ("ngram", 1 + 3)
    assert make_plan(inputs).max_total_tokens == make_plan(inputs_of(plain)).max_total_tokens
    draft = decode(speculative={"method": "draft_model", "model": "d"})
    assert inputs_of(draft).speculative == "ngram", "the plan has the draft model's weights and KV, so the reserve has not"
    unused = decode(speculative=NGRAM | {"method": None})
    assert (inputs_of(unused).speculative, inputs_of(unused).most_tokens_in_flight) == (None, 2)


def test_page_tables_are_counted_where_there_are_any() -> None:
    config = decode(limits={"max_running_requests": 20, "max_seq_len": 1000})
    assert make_plan(inputs_of(config)).page_table_bytes == 21 * 1024 * 4
    tiered = inputs_of(decode(offload={"host_ratio": 2, "device_window": 64}, pool={"num_pages": 10}))
    kept = inputs_of(decode(offload={"host_ratio": 2}, pool={"num_pages": 10}))
    assert [make_plan(one).page_table_bytes for one in (tiered, kept)] == [33 * 8192 * 4, 33 * 160 * 4]
    in_torch = decode(kernels="torch")
    for without in (inputs_of(config, CPU), inputs_of(in_torch), inputs_of(prefill()), inputs_of(prefill(), CPU)):
        assert make_plan(without).planned_bytes("page_tables") == 0


def test_the_settings_reach_the_plan() -> None:
    config = decode(
        dtype="float16",
        pool={"dtype": "float8_e4m3fn", "page_size": 32, "num_tokens": 1000},
        memory={"device_memory": "40GiB", "policy": "page-count", "memory_ratio": 0.5, "static_fraction": 0.7},
        limits={"max_seq_len": 4096},
    )
    inputs = inputs_of(config)
    assert (inputs.dtype, inputs.kv_dtype, inputs.max_seq_len) == (DType.FLOAT16, DType.FLOAT8_E4M3, 4096)
    assert (inputs.policy, inputs.memory_ratio, inputs.static_fraction) == (Policy.PAGE_COUNT, 0.5, 0.7)
    assert (inputs.device_bytes, inputs.free_bytes) == (40 * GIB, 39 * GIB), "what others hold of the device is theirs still"
    assert inputs.max_total_tokens == 32 * 32
    with pytest.raises(MemoryPlanError, match=r"memory\.device_memory is 40\.0 GiB .*has available is 6\.0 GiB"):
        inputs_of(config, CPU)
    with pytest.raises(MemoryPlanError, match=r"memory\.device_memory is 81\.0 GiB .*the device is 80\.0 GiB"):
        inputs_of(decode(memory={"device_memory": "81GiB"}))
    assert inputs_of(config, weights_bytes=7).weights_bytes == 7
    dummy = inputs_of(decode(dummy_weights=True))
    assert (dummy.checkpoint_bytes, inputs.checkpoint_bytes) == (None, 400 << 20)


def test_a_pool_without_a_size_is_the_plans_on_a_gpu_and_small_on_a_cpu() -> None:
    assert inputs_of(decode(device="cuda")).max_total_tokens is None
    assert inputs_of(decode(), CPU).max_total_tokens == CPU_POOL_PAGES * 16
    assert make_plan(inputs_of(decode(), CPU)).num_pages == CPU_POOL_PAGES
    assert make_plan(inputs_of(decode(device="cuda"))).max_total_tokens > 1_000_000


def test_advice_and_errors_speak_of_settings() -> None:
    small = DeviceMemory(total_bytes=40 << 20, free_bytes=40 << 20, is_cpu=True)
    with pytest.raises(MemoryPlanError) as refused:
        make_plan(inputs_of(decode(), small))
    text = str(refused.value)
    assert "a smaller ring.capacity_bytes" in text and "memory.static_fraction" in text and "--" not in text
    plan = make_plan(inputs_of(decode(pool={"num_pages": 10}), CPU))
    assert any("set limits.max_seq_len to 160 or less" in line for line in plan.advice)
    assert "--" not in " ".join(plan.advice)


def test_a_slot_holds_the_largest_piece_and_says_when_it_cannot() -> None:
    config = prefill(chunk={"chunk_tokens": 100, "layers_per_group": 3})
    layout, shard = MODEL.shape.layout(), Shard(tp_size=2, tp_rank=1)
    mine = [route for route in routes(layout, shard, shard) if route.prefill_rank == 1]
    most = largest_wire_bytes(chunk_plan(config.chunk), layout, mine, DType.BFLOAT16)
    assert most == 100 * 3 * 2 * 4 * 64 * 2

    def slot_of(config: PrefillNodeConfig, device_bytes: int = 0, device: str = "cpu") -> int:
        return staging_slot_bytes(config.chunk, config.staging, layout, shard, device_bytes, device=device)

    slot = slot_of(config)
    assert slot - REGION_ALIGNMENT_BYTES < most <= slot and slot % REGION_ALIGNMENT_BYTES == 0
    small = prefill(chunk={"chunk_tokens": 100, "layers_per_group": 3}, staging={"slot_bytes": most - 1})
    with pytest.raises(
        MemoryPlanError, match=f"staging.slot_bytes is {most - 1}; the smallest piece .100 tokens, 3 layers. has up to {most} b"
    ):
        slot_of(small)
    large = prefill(chunk={"chunk_tokens": 100, "layers_per_group": 3}, staging={"slot_bytes": 5 * most})
    assert slot_of(large) >= 5 * most
    long = prefill(chunk={"chunk_tokens": 100_000}, device="cuda")
    of_layer = 100_000 * 2 * 4 * 64 * 2
    assert slot_of(long) >= 8 * of_layer
    assert slot_of(long, 140 * GIB, "cuda") == 3 * GIB // 8, "the four slots of a large GPU have 1.5 GiB"
    assert slot_of(long, 32 * GIB, "cuda") == GIB // 8, "or a 64th of the device"
    assert slot_of(long, 1 * GIB, "cuda") >= of_layer, "and at least one layer of a chunk each"
    long = prefill(chunk={"chunk_tokens": 100_000}, device="cuda", staging={"slot_bytes": of_layer})
    assert slot_of(long, 80 * GIB, "cuda") >= of_layer


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 1000000000\ntotal_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def limit_group(folder: Path, limit: object, current: int, inactive: int | None, names: tuple[str, str, str] = V2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{current}\n")
    if inactive is not None:
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")


def host(folder: Path, groups: str | None = "0::/\n") -> tuple[int, int]:
    """Of a host of 1,024,000 bytes, 614,400 of them available; `groups` is what /proc/self/cgroup says."""
    meminfo, membership = folder / "meminfo", folder / "membership"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:   100 kB\nMemAvailable:    600 kB\n\nHugePages_Total:       0\n")
    if groups is not None:
        membership.write_text(groups)
    return host_memory(meminfo, folder, membership)


@pytest.mark.parametrize(
    ("limit", "current", "inactive", "expected"),
    [
        ("max", 0, None, (1_024_000, 614_400)),
        ("500000", 100_000, None, (500_000, 400_000)),
        ("500000", 300_000, 200_000, (500_000, 400_000)),
        ("500000", 600_000, 0, (500_000, 0)),
    ],
)
def test_a_container_has_what_its_group_may_still_take(
    tmp_path: Path, limit: str, current: int, inactive: int | None, expected: tuple[int, int]
) -> None:
    limit_group(tmp_path, limit, current, inactive)
    assert host(tmp_path) == expected


def test_without_control_groups_all_memory_counts(tmp_path: Path) -> None:
    for groups in (None, "", "0::/\n", "nothing that is known\n", "0::/a/b\n4:memory:/c\n"):
        assert host(tmp_path, groups) == (1_024_000, 614_400)


def test_a_group_has_what_those_above_it_leave(tmp_path: Path) -> None:
    """A systemd unit in its slice: the least limit is one group's, the least room another's."""
    limit_group(tmp_path / "system.slice/kvferry.service", 300_000, 50_000, 10_000)
    assert host(tmp_path, "0::/system.slice/kvferry.service\n") == (300_000, 260_000)
    limit_group(tmp_path / "system.slice", 400_000, 350_000, 20_000)
    assert host(tmp_path, "0::/system.slice/kvferry.service\n") == (300_000, 70_000)
    limit_group(tmp_path / "system.slice", 200_000, 50_000, 0)
    assert host(tmp_path, "0::/system.slice/kvferry.service\n") == (200_000, 150_000)
    assert host(tmp_path, "0::/user.slice\n") == (1_024_000, 614_400), "another slice's limit is not ours"


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/docker:a/b", "/../other", "//docker"])
def test_a_container_whose_path_is_the_hosts_is_the_root_of_its_mount(tmp_path: Path, path: str) -> None:
    limit_group(tmp_path / "inner", 500_000, 100_000, None)
    assert host(tmp_path / "inner", f"0::{path}\n") == (500_000, 400_000)


def test_version_1_has_other_names(tmp_path: Path) -> None:
    unlimited = 9_223_372_036_854_771_712
    limit_group(tmp_path / "memory", unlimited, 900_000, None, V1)
    lines = "12:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/docker/0123\n1:name=systemd:/\n0::/\n"
    assert host(tmp_path, lines) == (1_024_000, 614_400)
    limit_group(tmp_path / "memory/docker/0123", 500_000, 300_000, 100_000, V1)
    assert host(tmp_path, lines) == (500_000, 300_000)
    limit_group(tmp_path / "memory", 450_000, 440_000, 0, V1)
    assert host(tmp_path, "0::/\n") == (450_000, 10_000), "a container sees the mount begin at its own group"


def test_a_system_that_does_not_say_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory cannot be read from .*none.*set memory.device_memory"):
        host_memory(tmp_path / "none", tmp_path)
    for lines in ("MemTotal: many kB\n", "MemTotal:\n"):
        (tmp_path / "meminfo").write_text(lines)
        with pytest.raises(ConfigError, match="cannot be read"):
            host_memory(tmp_path / "meminfo", tmp_path)


@pytest.mark.parametrize(
    ("settings", "device_bytes", "wanted"),
    [
        ({}, 0, 64 << 20),
        ({"device": "cuda"}, 141 << 30, 2 << 30),
        ({"device": "cuda"}, (24 << 30) + 8191, 768 << 20),  # a multiple of what memory is aligned to
        ({"device": "cuda", "ring": {"capacity_bytes": "1GiB"}}, 24 << 30, 1 << 30),
    ],
)
def test_ring_capacity(settings: dict[str, Any], device_bytes: int, wanted: int) -> None:
    config = decode(**settings)
    assert ring_capacity_bytes(config.ring, device_bytes, device=config.device) == wanted
