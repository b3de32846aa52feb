"""The support matrix agrees with the code: each case of a cell is accepted or refused by the code of its engine.

vLLM's cases are recordings by name, pairs of recordings, or objects like those of vLLM's source. SGLang's are recorded pools,
with changes, or settings. Cases of kvferry's own nodes are ``config NAME``, ``architecture NAME``, or settings of a tier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from docs import support_matrix
from docs.support_matrix import FEATURES, Cell, Evidence
from embedded_engine.architectures import check_can_speculate, check_cut
from embedded_engine.model_files import read_model_files
from kvferry.engines.sglang_layout import read_pool
from kvferry.engines.sglang_settings import SUPPORTED, check_supported
from kvferry.engines.vllm_facts import VllmFacts, read_facts
from kvferry.engines.vllm_layout import WindowLayers, check, describe, layer_index
from kvferry.engines.vllm_settings import settings_of_replica, vllm_settings
from kvferry.engines.vllm_states import StateFacts
from tests.adapters.test_engine_settings import parallel
from tests.adapters.test_sglang_layout import RECORDED as POOLS
from tests.adapters.test_sglang_layout import cut, part_of, pool_of
from tests.adapters.test_vllm_facts import attention_spec, config, groups
from tests.adapters.test_vllm_layout import gpu_layers, gpu_rank, pool_with, sparse_rank, with_layer
from tests.adapters.test_vllm_states import STATES
from tests.adapters.vllm_memory import RECORDED, Memory, facts_of, ranks, recorded
from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.errors import LayoutError, TransferError
from transfer.layer_groups import GroupKind
from transfer.layout import KVLayout
from transfer.load_config import load_config

ROOT: Final = Path(__file__).resolve().parents[2]

Case = Callable[[], object]


def facts(case: str, **changes: Any) -> VllmFacts:
    return facts_of(recorded(case)["rank0"]["facts"], **changes)


def accept_same(one: KVLayout, other: KVLayout) -> None:
    """As at attach."""
    if differences := one.differences(other):
        raise LayoutError(differences[0])


# vLLM


def accept_recording(case: str) -> None:
    for written in ranks(recorded(case)):
        describe(facts_of(written["facts"])).pool(Memory.of(written).caches)


def accept_pair(case: str) -> None:
    one, other = case.split(" -> ")
    accept_same(*(describe(facts(name)).layout for name in (one, other)))


def accept_config(*specs: Any, **changes: Any) -> None:
    """What vLLM passes to a connector: its configuration, and a group for each spec."""
    describe(read_facts(config(**changes), groups(*(specs or (attention_spec(),)))))


def accept_drafts(method: str, **more: Any) -> None:
    speculative = {"method": method, **more}
    accept_config(*[attention_spec(num_kv_heads=4)] * 4, speculative_config=speculative)


def accept_state(**changes: Any) -> None:
    """A Qwen3-Next whose layers keep another state."""
    written = facts("qwen3-next")
    layers = [one if one.state is None else replace(one, state=replace(one.state, **changes)) for one in written.layers]
    describe(replace(written, layers=tuple(layers)))


def accept_kind(state: StateFacts) -> None:
    accept_state(kind=state.kind, shapes=state.shapes, dtypes=state.dtypes)


def accept_gpu(backend: str, order: str = "LBNHC", *, k_dim: int = 128, v_dim: int = 128, **more: Any) -> None:
    rows = more.get("row_format")
    changes = {"dtype": "uint8", "cache_dtype": rows} if rows else {}
    rank = gpu_rank(gpu_layers(backend, k_dim, v_dim, block_size=16, **more), order, **changes)
    rank.described.pool(rank.memory.caches)


def accept_sparse(row_format: str = "", **changes: Any) -> None:
    rank = sparse_rank(row_format, **changes)
    rank.described.pool(rank.memory.caches)


def accept_per_token_head(row_format: str, backend: str = "TRITON_ATTN") -> None:
    accept_gpu(backend, k_dim=68, v_dim=68, dtype="uint8", quant_mode=row_format.upper(), row_format=row_format)


def stage_of(case: str) -> VllmFacts:
    """The first of two pipeline stages of a recorded model."""
    whole = facts(case)
    half = len(whole.layers) // 2
    layers = [layer for layer in whole.layers if layer_index(layer.name) < half]
    return replace(whole, pp_size=2, stage_layers=(half, half), stage_tables=tuple(whole.tables.values()), layers=tuple(layers))


KDA: Final = {"shapes": ((3, 3 * 2 * 8), (2, 8, 8)), "dtypes": ("bfloat16", "float32")}
"""Two heads of 8 elements. Source: MambaStateShapeCalculator.kda_state_shape in vllm's mamba_utils.py (0.32.0)."""

DCP: Final = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 1}

FLOAT8: Final = facts("llama-fp8")

VLLM: Final[Mapping[str, Case]] = {
    "backend ROCM_ATTN": lambda: pool_with(backend="ROCM_ATTN"),
    "CrossAttentionSpec": lambda: accept_config(attention_spec("CrossAttentionSpec")),
    "chunked attention in a store": lambda: check(facts("llama4-groups"), has_store=True),
    "chunked attention, hybrid manager off": lambda: accept_config(attention_spec(attention_chunk_size=8192)),
    "windows in pipeline stages": lambda: describe(stage_of("gemma3-groups")),
    "windows in pipeline stages and a store": lambda: check(stage_of("gemma3-groups"), has_store=True),
    "windows in pipeline stages of an unknown architecture": lambda: describe(stage_of("gemma4-groups")),
    "last windows of gemma3": lambda: describe(facts("gemma3", has_prefix_caching=False), windows=WindowLayers.LAST_WINDOW),
    "last windows of gemma3 with a prefix cache": lambda: describe(
        facts("gemma3", has_prefix_caching=True, is_consumer=True), windows=WindowLayers.LAST_WINDOW
    ),
    "states in pipeline stages": lambda: describe(facts("granite4", pp_size=2, stage_layers=(2, 2))),
    "states with drafts": lambda: accept_state(num_draft_blocks=2),
    "states in a store": lambda: check(facts("qwen3-next"), has_store=True),
    "llama in a store": lambda: check(facts("llama-block32"), has_store=True),
    "unknown state": lambda: accept_state(kind="TOMORROW"),
    "kda": lambda: accept_state(**KDA),
    "kda with recoverssm": lambda: accept_state(shapes=(*KDA["shapes"], (2, 3, 8), (2, 3, 16)), dtypes=("float32",) * 4),
    "mamba-1": lambda: accept_kind(STATES["Mamba"][0]),
    "short convolution": lambda: accept_kind(STATES["short convolution"][0]),
    **{f"layout {order}": lambda order=order: accept_gpu("FLASH_ATTN", order) for order in ("LBNHC", "LBHNC", "BLHNC", "BHLNC")},
    "sparse attention": accept_sparse,
    "divided indexers": lambda: accept_sparse(block_size=128, tensors_of=64),
    "fp8_ds_mla": lambda: accept_sparse("fp8_ds_mla"),
    "nvfp4_ds_mla": lambda: accept_sparse("nvfp4_ds_mla"),
    "unknown rows": lambda: describe(with_layer(facts("mla"), is_packed_otherwise=True)),
    "fp8_e5m2": lambda: describe(replace(FLOAT8, cache_dtype="fp8_e5m2")),
    "a scale per head": lambda: describe(with_layer(FLOAT8, num_scales=4)),
    "fp8_per_token_head": lambda: accept_per_token_head("fp8_per_token_head"),
    "int8_per_token_head": lambda: accept_per_token_head("int8_per_token_head"),
    "fp8_per_token_head in FLASH_ATTN": lambda: accept_per_token_head("fp8_per_token_head", "FLASH_ATTN"),
    **{method: lambda method=method: accept_drafts(method) for method in ("eagle", "eagle3", "mtp", "draft_model", "dflash")},
    "several MTP modules": lambda: accept_drafts("mtp", use_multi_module_mtp=lambda: True),
    "eagle3 with pipeline stages": lambda: accept_config(
        speculative_config={"method": "eagle3"}, parallel_config={"pipeline_parallel_size": 2}
    ),
    "lora": lambda: accept_config(lora_config={"max_loras": 2}),
    "prefix cache on prefill": lambda: describe(facts("llama-block32", has_prefix_caching=True, is_consumer=False)),
    "prefix cache on decode": lambda: describe(facts("gemma3-groups", has_prefix_caching=True, is_consumer=True)),
    "heads that do not divide ranks": lambda: describe(
        with_layer(facts("llama-block32", tp_size=4, model_layers=(), total_num_kv_heads=3), num_kv_heads=1)
    ),
    "data-parallel rank": lambda: settings_of_replica(vllm_settings({"server.port": 7100}, device="cpu"), parallel(3, size=4)),
    "128 data-parallel ranks on adjacent ports": lambda: settings_of_replica(
        vllm_settings({"server.port": 7100, "server.http_port": 7180}, device="cpu"), parallel(0, size=128)
    ),
    "DCP": lambda: accept_config(attention_spec(num_kv_heads=1, dcp_sharded=True), parallel_config=DCP),
    "DCP with windows": lambda: accept_config(
        attention_spec("SlidingWindowSpec", num_kv_heads=1, dcp_sharded=True, sliding_window=64), parallel_config=DCP
    ),
    "DCP with a layer that keeps all tokens": lambda: accept_config(
        *(attention_spec(num_kv_heads=1, dcp_sharded=is_divided) for is_divided in (True, False)), parallel_config=DCP
    ),
    "DCP in a store": lambda: check(facts("llama-tp2-one-head", dcp_size=2), has_store=True),
    "prefill_context_parallel_size 4": lambda: accept_config(parallel_config={"prefill_context_parallel_size": 4}),
    "two hosts": lambda: settings_of_replica(vllm_settings({"leader.address": "10.0.0.1:7300"}, device="cpu"), parallel(hosts=2)),
    "two hosts without leader.address": lambda: settings_of_replica(vllm_settings({}, device="cpu"), parallel(hosts=2)),
}


def vllm(case: str) -> None:
    if case in VLLM:
        VLLM[case]()
    elif " -> " in case:
        accept_pair(case)
    else:
        accept_recording(case)


# SGLang


CUTS: Final[Mapping[str, dict[str, Any]]] = {
    "swa": {"window_tokens": 40},
    "mla": {"dtype": "bfloat16"},
    "mla_float8": {"dtype": "bfloat16"},
    "mha_float8": {"dtype": "bfloat16"},
    "dsa": {"dtype": "bfloat16"},
    "dsa_packed": {"dtype": "bfloat16"},
}
"""How SGLang shards the recorded model, where it is not `cut()`."""

UNIFIED: Final = part_of("hybrid_gdn", "mamba_pool", **{"class": "UnifiedMambaPool"})


def layout_of(name: str, tp_size: int = 1, **changes: Any) -> KVLayout:
    pool = pool_of(name)
    return read_pool(pool, cut(**CUTS.get(name, {}), tp_size=tp_size, tp_rank=0, **changes)).view.layout


def accept_ranks(one: str, other: str, **changes: Any) -> None:
    """Two ranks to one."""
    accept_same(layout_of(one, 2, **changes), layout_of(other))


def accept_draft_pool(name: str, num_heads: int = 4) -> None:
    read_pool(pool_of("mha"), cut(draft_kv_heads=num_heads), draft_pool=pool_of(name))


def accept_stage() -> None:
    read_pool(pool_of("mha_stage"), cut(num_layers=8, pp_size=2, pp_rank=1), gather_stages=lambda own: [own, own])


def convolutions_alone() -> None:
    """As of an LFM2: SGLang then has a recurrence without elements."""
    pool = pool_of("hybrid_gdn")
    states = pool.mamba_pool
    states.mamba_cache.temporal = states.mamba_cache.temporal[..., :0]
    states.get_contiguous_buf_infos = lambda: ([0] * len(states.mamba_layer_ids), [], [])
    read_pool(pool, cut())


SGLANG: Final[Mapping[str, Case]] = {
    "settings": lambda: check_supported(SUPPORTED),
    "pool of another class": lambda: read_pool(pool_of("mha", **{"class": "PageInterleaveMHATokenToKVPool"}), cut()),
    "swa of unknown size": lambda: read_pool(pool_of("swa"), cut(window_tokens=0)),
    "hybrid_mamba2, TP 2 -> 1": lambda: accept_ranks("hybrid_mamba2", "hybrid_mamba2", num_kv_heads=8),
    "hybrid_gdn, TP 2 -> 1": lambda: accept_ranks("hybrid_tp2_gdn", "hybrid_gdn"),
    "mha, TP 2 -> 1": lambda: accept_ranks("mha_tp2", "mha"),
    "mha -> mha_page1": lambda: accept_same(layout_of("mha"), layout_of("mha_page1")),
    "hybrid_kda": lambda: layout_of("hybrid_kda", 2, num_kv_heads=8),
    "windows and states": lambda: read_pool(pool_of("swa"), cut(window_tokens=40), kinds={GroupKind.WINDOW, GroupKind.STATE}),
    "unified states": lambda: read_pool(pool_of("hybrid_gdn", **UNIFIED), cut()),
    "convolutions alone": convolutions_alone,
    "indexers that pool tokens": lambda: read_pool(pool_of("dsa", index_kpool=2), cut(dtype="bfloat16")),
    "mha_float8 with scales": lambda: read_pool(pool_of("mha_float8", is_quantized_kv_cache=True), cut(dtype="bfloat16")),
    "mla_float8 with a scale": lambda: read_pool(pool_of("mla_float8"), cut(dtype="bfloat16", scales={2: (0.5, 0.5)})),
    "draft": lambda: accept_draft_pool("draft", 2),
    "draft with windows": lambda: accept_draft_pool("swa"),
    "draft in other pages": lambda: accept_draft_pool("mha_hnd"),
    "two orders": lambda: read_pool(
        pool_of("swa", **part_of("swa", "swa_kv_pool", kv_cache_layout="hnd")), cut(window_tokens=40)
    ),
    "stage": accept_stage,
}


def sglang(case: str) -> None:
    name, _, value = case.rpartition("=")
    if case in SGLANG:
        SGLANG[case]()
    elif name in SUPPORTED:
        check_supported({name: json.loads(value.lower())})
    else:
        assert case in POOLS
        layout_of(case)


# kvferry's own nodes


TIERS: Final = {"prefill": PrefillNodeConfig, "decode": DecodeNodeConfig}


def nodes(case: str, directory: Path) -> None:
    kind, _, value = case.partition(" ")
    if kind == "config":
        written = (ROOT / "tests" / "unit" / "configs" / f"{value}.json").read_text(encoding="utf-8")
    elif kind == "architecture":
        written = json.dumps({"architectures": [value]})
    elif kind in TIERS:
        given = dict(one.split("=") for one in value.split(" "))
        load_config(TIERS[kind], given={"the matrix": {"model": "/models/one", "tls.insecure": 1, **given}})
        return
    else:
        accept_engine(kind, value)
        return
    (directory / "config.json").write_text(written, encoding="utf-8")
    read_model_files(directory, dummy_seed=0)


def accept_engine(kind: str, value: str) -> None:
    """``tp SIZE of ARCHITECTURE`` or ``speculation of ARCHITECTURE``."""
    *_, architecture = value.split(" ")
    if kind == "speculation":
        check_can_speculate(architecture)
    else:
        assert kind == "tp"
        check_cut(architecture, int(value.split(" ")[0]), {})


def test_engines_accept_and_refuse_what_the_table_says(tmp_path: Path) -> None:
    wrong = []
    for feature in FEATURES:
        engines = (
            ("nodes", feature.nodes, lambda case: nodes(case, tmp_path)),
            ("vllm", feature.vllm, vllm),
            ("sglang", feature.sglang, sglang),
        )
        for engine, cell, give in engines:
            for is_accepted, cases in ((True, cell.accepts), (False, cell.refuses)):
                for case in cases:
                    reason = ""
                    try:
                        give(case)
                    except TransferError as error:
                        reason = str(error)
                    if is_accepted == bool(reason):
                        wrong.append(f"{feature.name}, {engine}, {case}: {reason or 'accepted'}")
    assert wrong == []


def cells() -> list[tuple[str, Cell]]:
    return [
        (f"{feature.name}, {engine}", getattr(feature, engine)) for feature in FEATURES for engine in ("nodes", "vllm", "sglang")
    ]


PLACES: Final = {
    Evidence.GPU: ("tests/gpu/", "bench/results/", "docs/support.md#where-it-was-run"),
    Evidence.CPU: ("tests/vllm/", "tests/sglang/served.py", "tests/cluster/"),
    Evidence.SOURCE: ("tests/",),
}
"""A test of real engines runs them; other tests give recorded or made objects to kvferry's code."""


@pytest.mark.parametrize(("name", "cell"), cells(), ids=[name for name, _ in cells()])
def test_evidence_is_what_its_word_says(name: str, cell: Cell) -> None:
    assert bool(cell.accepts) == (cell.evidence is not Evidence.REFUSED), "a case that is accepted, unless all are refused"
    assert cell.accepts or cell.refuses
    places = PLACES.get(cell.evidence, ())
    assert not places or any(shown.startswith(places) for shown in cell.shown_by)
    for shown in cell.shown_by:
        path, _, found = shown.replace("#", "::").partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            assert re.search(rf"^(async )?def {found}\(", text, re.M), shown


def test_every_case_and_recording_is_in_the_table() -> None:
    """A new recording is a family that users ask for."""
    used = {case for _, cell in cells() for case in (*cell.accepts, *cell.refuses)}
    parts = {name for case in used for name in case.split(" -> ")}
    assert {*VLLM, *SGLANG} - used == set()
    assert set(RECORDED) - parts == set()
    assert set(POOLS) - parts <= {"mha_tp2", "mha_stage", "hybrid_tp2_gdn"}, "used by the cases of two ranks"


def test_cells_are_short() -> None:
    for line in support_matrix.matrix().splitlines():
        assert all(len(cell) <= 200 for cell in line.split("|")), line
