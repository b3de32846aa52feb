"""Features of models and engines, and whether KV is transferred with them. Data, and the tables of docs/support.md.

``tests/adapters/test_support.py`` gives the cases of each cell to the code that accepts or refuses, and checks that the tests
exist. NixlConnector's column is handwritten, from vLLM's documentation and source; it was not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Evidence(StrEnum):
    """The strongest evidence for a cell."""

    GPU = "run on a GPU"
    CPU = "run on CPUs"
    SOURCE = "by source"
    UNTESTED = "not tested"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A feature in one engine.

    Args:
        shown_by: Tests as ``file::name``, records in bench/results, or headings of documents.
        accepts, refuses: Cases of ``tests/adapters/test_support.py`` that the code of the engine accepts or refuses.
        remark: A condition, or a part that differs.
    """

    evidence: Evidence
    shown_by: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nixl:
    """A feature in vLLM's NixlConnector.

    Args:
        verdict: yes, partly, no, or unknown if neither its page nor its source mentions the feature.
        found_in: `PAGE`, or a place in vLLM's source.
    """

    verdict: str
    found_in: str
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    nodes: Cell
    vllm: Cell
    sglang: Cell
    nixl: Nixl


PAGE: Final = "its page"
"""docs/features/nixl_connector_compatibility.md of vllm-project/vllm, commit 0a5110ef."""

_GPU, _CPU, _SOURCE, _UNTESTED, _REFUSED = Evidence

_LAYOUT = "tests/adapters/test_vllm_layout.py::"
_SIDES = "tests/connector/test_vllm_sides.py::"
_STATES = "tests/adapters/test_vllm_states.py::"
_POOLS = "tests/adapters/test_sglang_layout.py::"
_SERVED = "tests/sglang/served.py::"
_FAMILIES = "tests/embedded_engine/test_families.py::test_greedy_tokens_are_those_of_transformers"
_KINDS_GPU = "tests/gpu/test_nodes_gpu.py::test_tokens_agree_for_every_kind_of_layer"
_CUTS_GPU = "tests/gpu/test_nodes_gpu.py::test_tokens_agree_across_gpus"
_CUTS_NODES = "tests/cluster/nodes/test_tokens.py::test_tokens_are_those_of_one_process"
_KINDS_NODES = "tests/cluster/nodes/test_kinds.py::test_tokens_are_those_of_one_process"
_HAND_OVER = "tests/vllm/test_hand_over.py::test_tokens_as_of_one_vllm"
_HITS = "tests/vllm/test_hand_over.py::test_prefix_cache_hits_on_both_sides"
_RECORDED = f"{_LAYOUT}test_bytes_of_a_recorded_vllm"
_GPU_MEMORY = f"{_LAYOUT}test_bytes_of_gpu_backends"
_CASES = "tests/adapters/test_support.py::test_engines_accept_and_refuse_what_the_table_says"
_WHERE = "docs/support.md#where-it-was-run"


def _refused(*cases: str, remark: str = "") -> Cell:
    return Cell(evidence=_REFUSED, refuses=cases, remark=remark)


def _drafts_of_nodes(method: str) -> Cell:
    return _refused(f"decode speculative.method={method}")


_DRAFTS_OF_SGLANG = Cell(
    evidence=_SOURCE,
    shown_by=(f"{_POOLS}test_a_draft_model_is_the_last_layers",),
    accepts=("draft",),
    refuses=("draft with windows", "draft in other pages"),
    remark="equal on both sides",
)

FEATURES: Final = (
    Feature(
        name="full attention (MHA, GQA)",
        nodes=Cell(
            evidence=_GPU, shown_by=(_CUTS_GPU, _CUTS_NODES, _FAMILIES), accepts=("config llama-3-70b", "config qwen3-8b")
        ),
        vllm=Cell(
            evidence=_GPU,
            shown_by=("bench/results/2026-11-28-two-h200-engines.json", _WHERE, _HAND_OVER, _RECORDED),
            accepts=("llama-block32", "llama-block128", "llama-head80-bfloat16", "qwen3-block128"),
            refuses=("backend ROCM_ATTN", "CrossAttentionSpec"),
        ),
        sglang=Cell(
            evidence=_GPU,
            shown_by=(_WHERE, f"{_SERVED}test_twenty_prompts_at_once_over_different_cuts"),
            accepts=("mha", "mha_page1", "mha_uneven", "mha_v64"),
            refuses=("pool of another class",),
        ),
        nixl=Nixl(verdict="yes", found_in=PAGE),
    ),
    Feature(
        name="latents (MLA)",
        nodes=Cell(evidence=_GPU, shown_by=(_KINDS_GPU, _KINDS_NODES, _FAMILIES), accepts=("config deepseek-v3.1",)),
        vllm=Cell(
            evidence=_CPU,
            shown_by=("tests/vllm/test_latents.py::test_tokens_and_bytes", _RECORDED, _GPU_MEMORY),
            accepts=("mla", "mla-tp2"),
        ),
        sglang=Cell(evidence=_SOURCE, shown_by=(f"{_POOLS}test_latents",), accepts=("mla",)),
        nixl=Nixl(verdict="yes", found_in=PAGE),
    ),
    Feature(
        name="sliding windows, hybrid KV cache manager on",
        nodes=Cell(
            evidence=_GPU,
            shown_by=(_KINDS_GPU, _KINDS_NODES, _FAMILIES),
            accepts=("config gpt-oss-20b",),
            remark="the last window",
        ),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_windows.py::test_tokens_and_bytes_of_windows",
                "tests/vllm/test_windows.py::test_block_tables_with_blocks_of_different_sizes",
                "tests/vllm/test_windows.py::test_attention_sinks",
                f"{_LAYOUT}test_windows_with_block_tables_of_their_own",
                f"{_LAYOUT}test_stages_number_block_tables_alike",
            ),
            accepts=("gemma3-groups", "gemma4-groups", "gpt-oss-groups", "mistral-window-groups"),
            refuses=("windows in pipeline stages of an unknown architecture", "windows in pipeline stages and a store"),
            remark="the last window; [pipeline stages](vllm.md#sliding-windows) of known architectures",
        ),
        sglang=Cell(
            evidence=_CPU,
            shown_by=(f"{_SERVED}test_of_a_window_only_its_tokens_travel", f"{_POOLS}test_windows_have_pages_of_their_own"),
            accepts=("swa",),
            refuses=("swa of unknown size", "disaggregation_decode_enable_radix_cache with sliding windows=True"),
            remark="the last window; no prefix cache on decode",
        ),
        nixl=Nixl(verdict="yes", found_in=f"{PAGE}; base_scheduler.py:277", remark="whole blocks"),
    ),
    Feature(
        name="sliding windows, hybrid KV cache manager off",
        nodes=Cell(
            evidence=_CPU,
            shown_by=("tests/vllm/test_windows.py::test_windows_between_vllm_and_our_nodes",),
            accepts=("config gpt-oss-20b",),
            remark="with `window_layers: last_window` in vLLM",
        ),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_LAYOUT}test_windows_of_a_model_with_blocks_for_every_token", f"{_LAYOUT}test_a_window_in_every_layer"),
            accepts=("gemma3", "gemma3-tp2", "mistral-window", "last windows of gemma3"),
            refuses=("last windows of gemma3 with a prefix cache",),
            remark="every token, or the last window",
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_POOLS}test_pages_are_sglangs_own_memory",),
            accepts=("mha",),
            remark="every token",
        ),
        nixl=Nixl(verdict="yes", found_in="metadata.py:198", remark="equal on both sides"),
    ),
    Feature(
        name="chunked local attention (Llama 4)",
        nodes=_refused("architecture Llama4ForCausalLM"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_windows.py::test_chunked_local_attention",
                f"{_LAYOUT}test_chunked_local_attention",
            ),
            accepts=("llama4-groups", "chunked attention, hybrid manager off"),
            refuses=("windows in pipeline stages of an unknown architecture", "chunked attention in a store"),
            remark="the last chunk; hybrid manager off: every token, by source; no pipeline stages",
        ),
        sglang=Cell(evidence=_UNTESTED, accepts=("swa",), remark="in `SWAKVPool`"),
        nixl=Nixl(verdict="unknown", found_in="nixl/"),
    ),
    Feature(
        name="Mamba-2",
        nodes=_refused("architecture GraniteMoeHybridForCausalLM", "architecture Mamba2ForCausalLM"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_states.py::test_tokens_and_bytes_of_states",
                f"{_STATES}test_states_between_recorded_instances",
            ),
            accepts=("granite4", "granite4-tp2", "granite4-tp2 -> granite4"),
            refuses=("states with drafts", "states in pipeline stages", "states in a store"),
            remark="no speculative decoding or pipeline stages",
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_POOLS}test_states_whose_shards_are_unknown_go_to_the_same_ranks_only",),
            accepts=("hybrid_mamba2",),
            refuses=("hybrid_mamba2, TP 2 -> 1", "windows and states"),
            remark="equal TP degrees, no windows",
        ),
        nixl=Nixl(
            verdict="yes",
            found_in=f"{PAGE}; base_worker.py:606; ssm_conv_transfer_utils.py:72",
            remark="`VLLM_SSM_CONV_STATE_LAYOUT=DS`; other TP degrees in progress",
        ),
    ),
    Feature(
        name="gated delta nets (Qwen3-Next)",
        nodes=Cell(evidence=_GPU, shown_by=(_KINDS_GPU, _KINDS_NODES, _FAMILIES), accepts=("config qwen3-next-80b-a3b",)),
        vllm=Cell(
            evidence=_CPU,
            shown_by=("tests/vllm/test_states.py::test_gated_delta_nets", f"{_STATES}test_states_between_recorded_instances"),
            accepts=("qwen3-next", "qwen3-next-tp2", "qwen3-next-tp2 -> qwen3-next"),
            refuses=("unknown state",),
            remark="TP 1 to 1; others by source",
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_POOLS}test_states_of_two_ranks_become_those_of_one",),
            accepts=("hybrid_gdn", "hybrid_gdn, TP 2 -> 1"),
            refuses=("unified states", "windows and states"),
            remark="no windows",
        ),
        nixl=Nixl(verdict="yes", found_in="ssm_conv_transfer_utils.py:127", remark="as Mamba-2"),
    ),
    Feature(
        name="KDA (Kimi Linear)",
        nodes=_refused("architecture KimiLinearForCausalLM"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(_CASES,),
            accepts=("kda",),
            refuses=("kda with recoverssm",),
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_POOLS}test_inputs_of_kdas_convolutions_are_parts_of_their_own",),
            accepts=("hybrid_kda",),
        ),
        nixl=Nixl(verdict="yes", found_in="ssm_conv_transfer_utils.py:127", remark="as Mamba-2"),
    ),
    Feature(
        name="Mamba-1, short convolutions",
        nodes=_refused("architecture MambaForCausalLM", "architecture Lfm2ForCausalLM"),
        vllm=Cell(evidence=_SOURCE, shown_by=(f"{_STATES}test_states_of_other_kinds",), accepts=("mamba-1", "short convolution")),
        sglang=Cell(evidence=_UNTESTED, accepts=("convolutions alone",), remark="in `MambaPool`"),
        nixl=Nixl(verdict="partly", found_in="ssm_conv_transfer_utils.py:132", remark="no short convolutions"),
    ),
    Feature(
        name="cross-layer blocks",
        nodes=_refused("decode pool.order=BLHNC"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(_GPU_MEMORY,),
            accepts=("layout BLHNC", "layout BHLNC"),
            remark="other side: any layout",
        ),
        sglang=_refused("pool of another class"),
        nixl=Nixl(verdict="yes", found_in=f"{PAGE}; base_worker.py:908", remark="equal on both sides"),
    ),
    Feature(
        name="sparse indexers (DeepSeek-V3.2, GLM-5)",
        nodes=_refused("architecture DeepseekV32ForCausalLM"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(
                f"{_LAYOUT}test_bytes_of_sparse_attention",
                "tests/connector/test_vllm_rows.py::test_rows_arrive_where_vllm_reads_them",
            ),
            accepts=("sparse attention",),
            refuses=("divided indexers",),
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_POOLS}test_indexers_move_values_and_scales_with_their_tokens",),
            accepts=("dsa",),
            refuses=("indexers that pool tokens",),
        ),
        nixl=Nixl(verdict="yes", found_in=PAGE),
    ),
    Feature(
        name="latents in rows with scales (`fp8_ds_mla`)",
        nodes=_refused("decode pool.dtype=fp8_ds_mla"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(
                f"{_LAYOUT}test_bytes_of_sparse_attention",
                "tests/connector/test_vllm_rows.py::test_rows_arrive_where_vllm_reads_them",
            ),
            accepts=("fp8_ds_mla", "nvfp4_ds_mla"),
            refuses=("unknown rows",),
            remark="equal on both sides",
        ),
        sglang=Cell(evidence=_SOURCE, shown_by=(f"{_POOLS}test_packed_latents_are_rows_of_bytes",), accepts=("dsa_packed",)),
        nixl=Nixl(verdict="yes", found_in=PAGE, remark="equal on both sides"),
    ),
    Feature(
        name="fp8 KV, one scale per layer",
        nodes=Cell(
            evidence=_SOURCE,
            shown_by=(
                "tests/gpu/test_prefix_loader_gpu.py::test_stored_pages_reach_a_gpu",
                "tests/gpu/test_engine_kernels_gpu.py::test_agrees_with_the_reference",
                "tests/gpu/test_kernels_gpu.py::test_conversions_are_exact_for_every_pattern",
            ),
            accepts=("decode pool.dtype=float8_e4m3fn", "prefill pool.dtype=float8_e4m3fn"),
            remark="e4m3; kernels and stored pages run on a GPU",
        ),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(_RECORDED, f"{_LAYOUT}test_bytes_of_fp8_with_a_scale_for_each_layer"),
            accepts=("llama-fp8",),
            refuses=("fp8_e5m2", "a scale per head"),
            remark="e4m3; layers recorded from vLLM on CPUs",
        ),
        sglang=Cell(
            evidence=_CPU,
            shown_by=(f"{_SERVED}test_eight_bit_floats", f"{_POOLS}test_eight_bit_floats_have_the_scales_of_their_layers"),
            accepts=("mha_float8", "mla_float8"),
            refuses=("mha_float8_e5m2", "mla_float8 with a scale"),
            remark="e4m3, latents without a scale",
        ),
        nixl=Nixl(verdict="yes", found_in=PAGE, remark="equal types, scales of the checkpoint"),
    ),
    Feature(
        name="KV types of both sides differ",
        nodes=Cell(
            evidence=_SOURCE,
            shown_by=("tests/gpu/test_kernels_gpu.py::test_conversions_are_exact_for_every_pattern",),
            accepts=("decode pool.dtype=bfloat16",),
            remark="kernels run on a GPU",
        ),
        vllm=Cell(evidence=_SOURCE, shown_by=(_RECORDED,), accepts=("llama-kv-bfloat16",), remark="equal `--dtype`"),
        sglang=Cell(evidence=_SOURCE, shown_by=(f"{_POOLS}test_pool_in_another_dtype_than_the_model",), accepts=("mha_uneven",)),
        nixl=Nixl(verdict="no", found_in=f"{PAGE}; metadata.py:197"),
    ),
    Feature(
        name="8-bit KV, a scale per token and head",
        nodes=_refused("decode pool.dtype=fp8_per_token_head"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_LAYOUT}test_bytes_of_scales_of_each_token_and_head",),
            accepts=("fp8_per_token_head", "int8_per_token_head"),
            refuses=("fp8_per_token_head in FLASH_ATTN",),
            remark="`TRITON_ATTN`",
        ),
        sglang=_refused("mha_float8 with scales"),
        nixl=Nixl(
            verdict="partly",
            found_in=PAGE,
            remark="scales inside rows only",
        ),
    ),
    Feature(
        name="draft layers: EAGLE",
        nodes=_drafts_of_nodes("eagle"),
        vllm=Cell(evidence=_SOURCE, shown_by=(f"{_LAYOUT}test_draft_layers_follow_the_layers_of_the_model",), accepts=("eagle",)),
        sglang=_DRAFTS_OF_SGLANG,
        nixl=Nixl(verdict="yes", found_in=f"{PAGE}; metadata.py:102"),
    ),
    Feature(
        name="draft layers: EAGLE-3",
        nodes=_drafts_of_nodes("eagle3"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=("tests/vllm/test_drafts.py::test_tokens_drafts_and_bytes", _RECORDED),
            accepts=("llama-eagle3", "eagle3"),
            refuses=("eagle3 with pipeline stages", "dflash"),
            remark="not with pipeline stages",
        ),
        sglang=_DRAFTS_OF_SGLANG,
        nixl=Nixl(verdict="yes", found_in=f"{PAGE}; metadata.py:102"),
    ),
    Feature(
        name="draft layers: MTP",
        nodes=_drafts_of_nodes("mtp"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=("tests/vllm/test_drafts.py::test_tokens_drafts_and_bytes", _RECORDED),
            accepts=("mla-mtp-tp2", "mtp"),
            refuses=("several MTP modules",),
            remark="one module",
        ),
        sglang=_DRAFTS_OF_SGLANG,
        nixl=Nixl(verdict="yes", found_in=f"{PAGE}; base_scheduler.py:379", remark="also several modules"),
    ),
    Feature(
        name="draft model",
        nodes=Cell(
            evidence=_GPU,
            shown_by=(
                "tests/gpu/test_speculative_gpu.py::test_tokens_are_those_of_the_cpu_without_draft_tokens",
                "tests/embedded_engine/test_speculative.py::test_tokens_with_a_draft_model_are_those_without",
            ),
            accepts=("decode speculative.method=draft_model speculative.model=/models/draft",),
            refuses=("speculation of Qwen3NextForCausalLM",),
            remark="no recurrent states",
        ),
        vllm=Cell(
            evidence=_SOURCE, shown_by=(f"{_LAYOUT}test_draft_layers_follow_the_layers_of_the_model",), accepts=("draft_model",)
        ),
        sglang=_DRAFTS_OF_SGLANG,
        nixl=Nixl(verdict="yes", found_in=PAGE, remark="equal on both sides, unchecked"),
    ),
    Feature(
        name="LoRA adapters",
        nodes=_refused("decode lora.adapters=a"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_lora.py::test_adapters_are_moved_with_the_tokens_of_one_vllm",
                f"{_SIDES}test_the_same_tokens_with_another_adapter_are_refused_and_computed",
            ),
            accepts=("lora",),
            remark="name and revision compared",
        ),
        sglang=Cell(evidence=_UNTESTED, accepts=("settings",), remark="not compared"),
        nixl=Nixl(verdict="unknown", found_in="nixl/", remark="not compared"),
    ),
    Feature(
        name="prefix cache of the prefill side",
        nodes=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/cluster/offload/test_prefill_skips.py::test_what_was_stored_is_not_computed_again",
                "tests/gpu/test_prefix_loader_gpu.py::test_stored_pages_reach_a_gpu",
            ),
            accepts=("decode offload.host_memory=1GiB storage.directory=/srv/kv",),
            remark="from the store",
        ),
        vllm=Cell(
            evidence=_GPU,
            shown_by=(
                _WHERE,
                _HITS,
                "tests/vllm/test_windows.py::test_prefix_hits",
                "tests/vllm/test_states.py::test_prompts_that_begin_with_earlier_ones",
                "tests/vllm/test_store.py::test_the_store_connector_works_with_the_transfer_connector",
            ),
            accepts=("prefix cache on prefill",),
        ),
        sglang=Cell(evidence=_CPU, shown_by=(f"{_SERVED}test_one_pair_through_everything",), accepts=("settings",)),
        nixl=Nixl(verdict="yes", found_in=PAGE),
    ),
    Feature(
        name="prefix cache of the decode side",
        nodes=Cell(
            evidence=_CPU,
            shown_by=("tests/cluster/offload/test_prefixes.py::test_host_then_storage_and_nobody_elses",),
            accepts=("decode offload.host_memory=1GiB",),
            remark="with KV offload",
        ),
        vllm=Cell(
            evidence=_GPU,
            shown_by=(
                _WHERE,
                _HITS,
                "tests/vllm/test_windows.py::test_prefix_hits",
                f"{_SIDES}test_what_the_decode_side_has_in_its_prefix_cache_is_not_sent",
            ),
            accepts=("prefix cache on decode",),
            remark="hits are not transferred; received windows are no hits",
        ),
        sglang=Cell(
            evidence=_CPU,
            shown_by=(
                f"{_SERVED}test_one_pair_through_everything",
                "tests/adapters/test_sglang_transfers.py::test_a_prefix_that_decode_has_is_not_sent",
            ),
            accepts=("settings",),
            refuses=("disaggregation_decode_enable_radix_cache with sliding windows=True",),
            remark="no sliding windows",
        ),
        nixl=Nixl(verdict="yes", found_in=PAGE),
    ),
    Feature(
        name="TP degrees differ",
        nodes=Cell(
            evidence=_GPU,
            shown_by=(_CUTS_GPU, _CUTS_NODES),
            accepts=("tp 4 of LlamaForCausalLM",),
            refuses=("tp 2 of GptOssForCausalLM",),
            remark="gpt-oss: TP 1",
        ),
        vllm=Cell(
            evidence=_GPU,
            shown_by=(_WHERE, _HAND_OVER, f"{_LAYOUT}test_between_recorded_instances_that_are_cut_differently"),
            accepts=(
                "llama-tp2-block32 -> llama-block128",
                "llama-block128 -> llama-tp2-block32",
                "mla-tp2 -> mla",
                "gemma3 -> gemma3-tp2",
                "llama-tp2-one-head",
                "llama-tp2-block128",
            ),
            refuses=("heads that do not divide ranks",),
            remark="more ranks than KV heads: a multiple",
        ),
        sglang=Cell(
            evidence=_CPU,
            shown_by=(f"{_SERVED}test_twenty_prompts_at_once_over_different_cuts",),
            accepts=("mha, TP 2 -> 1", "hybrid_gdn, TP 2 -> 1"),
            refuses=("hybrid_mamba2, TP 2 -> 1",),
            remark="not Mamba-2",
        ),
        nixl=Nixl(
            verdict="partly",
            found_in=f"{PAGE}; tp_mapping.py:86",
            remark="integer ratio; heads outside tokens (`LBHNC`)",
        ),
    ),
    Feature(
        name="block sizes differ",
        nodes=Cell(evidence=_CPU, shown_by=(_CUTS_NODES, _KINDS_NODES), accepts=("decode pool.page_size=7",)),
        vllm=Cell(
            evidence=_GPU,
            shown_by=(_WHERE, _HAND_OVER, "tests/vllm/test_windows.py::test_tokens_and_bytes_of_windows"),
            accepts=("llama-tp2-block32 -> llama-block128",),
        ),
        sglang=Cell(
            evidence=_CPU,
            shown_by=(f"{_SERVED}test_twenty_prompts_at_once_over_different_cuts",),
            accepts=("mha -> mha_page1",),
        ),
        nixl=Nixl(
            verdict="partly",
            found_in=f"{PAGE}; base_worker.py:2727",
            remark="decode a multiple; no host buffer",
        ),
    ),
    Feature(
        name="HND and NHD",
        nodes=Cell(evidence=_GPU, shown_by=(_KINDS_GPU, _CUTS_NODES), accepts=("decode pool.order=HND",), remark="may differ"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(_GPU_MEMORY, "tests/gpu/test_connector_gpu.py::test_a_prompt_in_vllms_tensors"),
            accepts=("layout LBNHC", "layout LBHNC"),
            remark="may differ; vLLM's tensors without vLLM on a GPU",
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=(f"{_POOLS}test_pages_with_the_heads_first",),
            accepts=("mha_hnd",),
            refuses=("two orders",),
            remark="may differ",
        ),
        nixl=Nixl(
            verdict="partly",
            found_in=f"{PAGE}; base_worker.py:2495",
            remark="HND to NHD, experimental; no hybrid manager",
        ),
    ),
    Feature(
        name="pipeline stages of prefill",
        nodes=_refused("prefill parallel.pp_size=2"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_windows.py::test_pipeline_stages",
                _RECORDED,
                "tests/cluster/engines/connector/test_two_hosts.py::test_engines_over_two_hosts",
            ),
            accepts=("llama-pp2", "windows in pipeline stages"),
            refuses=(
                "windows in pipeline stages of an unknown architecture",
                "states in pipeline stages",
                "eagle3 with pipeline stages",
            ),
            remark="several block tables: known architectures; no states",
        ),
        sglang=Cell(
            evidence=_CPU,
            shown_by=(f"{_SERVED}test_stages_of_prefill", f"{_POOLS}test_a_stage_knows_the_layers_of_the_others"),
            accepts=("settings", "stage"),
        ),
        nixl=Nixl(verdict="partly", found_in="base_worker.py:760", remark="no states; hybrid manager: push mode only"),
    ),
    Feature(
        name="pipeline stages of decode",
        nodes=_refused("decode parallel.pp_size=2"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_windows.py::test_pipeline_stages",
                _RECORDED,
                "tests/cluster/engines/connector/test_two_hosts.py::test_engines_over_two_hosts",
            ),
            accepts=("llama-pp2", "windows in pipeline stages"),
            refuses=("windows in pipeline stages of an unknown architecture", "states in pipeline stages"),
            remark="as on prefill",
        ),
        sglang=_refused("pp_size on the decode side=2"),
        nixl=Nixl(verdict="no", found_in="base_worker.py:775"),
    ),
    Feature(
        name="data-parallel ranks",
        nodes=_refused("decode parallel.dp_size=2", remark="start more nodes"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_several_hosts.py::test_data_parallel_ranks",
                "tests/adapters/test_engine_settings.py::test_each_data_parallel_rank_of_vllm_has_its_ports",
            ),
            accepts=("data-parallel rank",),
            refuses=("128 data-parallel ranks on adjacent ports",),
            remark="own ports each",
        ),
        sglang=Cell(
            evidence=_SOURCE,
            shown_by=("tests/adapters/test_sglang_bootstrap.py::test_which_replica_has_a_request",),
            accepts=("settings",),
            remark="by SGLang's bootstrap server",
        ),
        nixl=Nixl(verdict="yes", found_in=PAGE),
    ),
    Feature(
        name="decode context parallelism (DCP)",
        nodes=_refused("decode parallel.dcp_size=2"),
        vllm=Cell(
            evidence=_SOURCE,
            shown_by=(
                "tests/connector/test_vllm_dcp.py::test_equal_dcp_sizes",
                "tests/connector/test_vllm_dcp.py::test_different_dcp_sizes",
            ),
            accepts=("DCP",),
            refuses=("DCP with windows", "DCP with a layer that keeps all tokens", "DCP in a store"),
            remark="full attention and MLA; integer ratio, [interleaves](vllm.md#decode-context-parallelism)",
        ),
        sglang=_refused("dcp_size=2"),
        nixl=Nixl(verdict="partly", found_in="tp_mapping.py:81; base_worker.py:2430", remark="MLA; integer ratio"),
    ),
    Feature(
        name="prefill context parallelism (PCP)",
        nodes=_refused("prefill parallel.pcp_size=2"),
        vllm=_refused("prefill_context_parallel_size 4"),
        sglang=_refused("attn_cp_size=2"),
        nixl=Nixl(verdict="partly", found_in="connector.py:109", remark="on prefill; with DCP: TP 1"),
    ),
    Feature(
        name="engine on several hosts",
        nodes=_refused("decode parallel.nnodes=2", remark="ranks share a host"),
        vllm=Cell(
            evidence=_CPU,
            shown_by=(
                "tests/vllm/test_several_hosts.py::test_an_engine_on_two_hosts",
                "tests/cluster/engines/connector/test_two_hosts.py::test_engines_over_two_hosts",
            ),
            accepts=("two hosts",),
            refuses=("two hosts without leader.address",),
            remark="`--nnodes 2` on one machine",
        ),
        sglang=_refused("nnodes=2"),
        nixl=Nixl(verdict="yes", found_in="base_scheduler.py:293"),
    ),
    Feature(
        name="offload to host memory or a store beside",
        nodes=Cell(
            evidence=_GPU,
            shown_by=(
                "tests/gpu/test_nodes_gpu.py::test_tokens_agree_where_triton_cannot_compile",
                "tests/gpu/test_tiered_gpu.py::test_tokens_with_blocks_in_the_store_are_those_of_the_cpu",
                "tests/cluster/offload/test_tokens.py::test_a_prompt_larger_than_the_device_pool",
            ),
            accepts=("decode offload.host_memory=1GiB",),
            remark="not for recurrent states",
        ),
        vllm=Cell(
            evidence=_CPU,
            shown_by=("tests/vllm/test_store.py::test_the_store_connector_works_with_the_transfer_connector",),
            accepts=("llama in a store",),
            refuses=("states in a store",),
            remark="kvferry's store, by `MultiConnector`",
        ),
        sglang=Cell(
            evidence=_UNTESTED,
            accepts=("settings",),
            refuses=("enable_hisparse=True",),
            remark="SGLang's own, without HiSparse",
        ),
        nixl=Nixl(verdict="yes", found_in="v1/multi_connector.py", remark="by `MultiConnector`"),
    ),
    Feature(
        name="preemption",
        nodes=Cell(
            evidence=_SOURCE,
            shown_by=("tests/decode/test_retry.py::test_a_prompt_that_prefill_preempted_is_retried_without_a_limit",),
            accepts=("config llama-3-70b",),
            remark="decode retries prompts that vLLM preempted",
        ),
        vllm=Cell(
            evidence=_GPU,
            shown_by=(
                _WHERE,
                "tests/vllm/test_hand_over.py::test_preempted_requests_go_on",
                f"{_SIDES}test_a_preempted_prompt_is_sent_from_its_new_blocks",
                f"{_SIDES}test_blocks_that_are_lacking_come_from_a_request_that_prefill_has_preempted",
                "tests/connector/test_vllm_windows.py::test_a_preempted_prompt_releases_the_blocks_that_it_keeps",
            ),
            accepts=("llama-block32",),
            remark="on prefill with stand-ins for vLLM's scheduler",
        ),
        sglang=Cell(evidence=_UNTESTED, accepts=("settings",), remark="requests retracted to prefill fail"),
        nixl=Nixl(verdict="yes", found_in="base_scheduler.py:411"),
    ),
)


def matrix() -> str:
    """Return the table of features and engines."""
    lines = [
        "| | kvferry's own nodes | vLLM 0.32 | SGLang 0.5.23 | NixlConnector of vLLM 0.32 |",
        "|---|---|---|---|---|",
    ]
    for one in FEATURES:
        cells = [_with_remark(cell.evidence, cell.remark) for cell in _cells(one)]
        lines.append(f"| {' | '.join([one.name, *cells, _with_remark(one.nixl.verdict, one.nixl.remark)])} |")
    return "\n".join(lines) + "\n"


def _cells(feature: Feature) -> tuple[Cell, Cell, Cell]:
    return feature.nodes, feature.vllm, feature.sglang


def _with_remark(word: str, remark: str) -> str:
    return f"{word}; {remark}" if remark else word
