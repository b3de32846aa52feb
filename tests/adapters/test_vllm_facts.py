"""What is read of vLLM's objects, from objects with the same attributes; record_vllm.py reads the real ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from embedded_engine.model_files import read_model_files
from kvferry.engines.vllm_facts import model_fields, read_facts
from kvferry.engines.vllm_layout import NULL_BLOCK, check, describe
from kvferry.engines.vllm_states import StateFacts
from tests.adapters.vllm_memory import facts_of, recorded
from transfer.errors import ConfigError, LayoutError
from transfer.layout import LayerKind, Shard

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip


def of_class(name: str, **attributes: Any) -> Any:
    """An object whose class has a name of vLLM's."""
    return type(name, (SimpleNamespace,), {})(**attributes)


def attention_spec(kind: str = "FullAttentionSpec", **changes: Any) -> Any:
    plain = {
        "block_size": 32, "num_kv_heads": 2, "head_size": 32, "head_size_v": 32, "dtype": torch.float32, "sliding_window": None,
        "kv_quant_mode": SimpleNamespace(name="NONE"), "num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1,
    }  # fmt: skip
    return of_class(kind, **{**plain, **changes})


def module(**attributes: Any) -> Any:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    return SimpleNamespace(get_attn_backend=lambda: backend, isa="vec", kv_sharing_target_layer_name=None, **attributes)


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def groups(*specs: Any) -> Any:
    """A group for each spec, of one layer each."""
    made = [SimpleNamespace(layer_names=[name_of(layer)], kv_cache_spec=spec) for layer, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=made, num_blocks=9, kv_cache_layout="LBHNC")


def config(*, model: str = "", **changes: Any) -> Any:
    """vLLM's, of a worker."""

    def stages(place: Any) -> tuple[int, int]:
        stage = place.rank // place.tensor_parallel_size
        return 4 * stage // place.pipeline_parallel_size, 4 * (stage + 1) // place.pipeline_parallel_size

    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "dtype": torch.float32, "use_mla": False, "get_total_num_kv_heads": lambda: 2, "runner_type": "generate",
            "model": model, "is_encoder_decoder": False, "architecture": "LlamaForCausalLM",
            "get_layers_start_end_indices": stages, "hf_config": SimpleNamespace(to_dict=lambda: dict(LLAMA)), "hf_overrides": {},
            "hf_text_config": SimpleNamespace(num_hidden_layers=4),
            "quantization": None, "revision": None,
        },
        "parallel_config": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0, "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "compilation_config": {"static_forward_context": {name_of(layer): module() for layer in range(4)}},
        "kv_transfer_config": {"kv_role": "kv_producer"},
        "attention_config": {"resolve_indexer_kv_dtype": lambda default: default},
        "lora_config": {},
        "speculative_config": {
            "use_multi_module_mtp": lambda: False, "parallel_drafting": False,
            "draft_model_config": SimpleNamespace(
                model=model, use_mla=False, get_total_num_kv_heads=lambda: 4, quantization=None
            ),
        },
    }  # fmt: skip
    made = {name: SimpleNamespace(**{**plain, **changes.get(name, {})}) for name, plain in parts.items()}
    for name in ("lora_config", "speculative_config"):
        if name not in changes:
            made[name] = None  # type: ignore[assignment]
    return SimpleNamespace(**made)


def test_facts_of_a_worker() -> None:
    facts = read_facts(config(), groups(*[attention_spec()] * 4))
    assert [layer.name for layer in facts.layers] == [name_of(layer) for layer in range(4)]
    assert [layer.group for layer in facts.layers] == [0, 1, 2, 3]
    first = facts.layers[0]
    assert (first.spec, first.backend, first.isa, first.dtype) == ("FullAttentionSpec", "CPU_ATTN", "vec", "float32")
    assert (first.block_size, first.num_kv_heads, first.k_head_dim, first.v_head_dim) == (32, 2, 32, 32)
    assert (facts.num_blocks, facts.cache_layout, facts.total_num_kv_heads) == (9, "LBHNC", 2)
    assert facts.has_prefix_caching and not facts.is_consumer and not facts.features and not facts.shared_layers
    assert [spec.kind for spec in facts.model_layers] == [LayerKind.ATTENTION] * 4


def test_the_rank_of_this_process() -> None:
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "rank": 7}  # of the second data-parallel replica
    facts = read_facts(config(parallel_config=parallel), groups(attention_spec()))
    assert (facts.tp_rank, facts.pp_rank, facts.stage_layers) == (1, 1, (2, 2))


def test_layers_of_one_group_with_specs_of_their_own() -> None:
    own = {name_of(0): attention_spec(), name_of(1): attention_spec(head_size=64, head_size_v=64)}
    group = SimpleNamespace(
        layer_names=list(own), kv_cache_spec=of_class("UniformTypeKVCacheSpecs", block_size=32, kv_cache_specs=own)
    )
    facts = read_facts(config(), SimpleNamespace(kv_cache_groups=[group], num_blocks=9, kv_cache_layout="LBHNC"))
    assert [(layer.k_head_dim, layer.group, layer.spec) for layer in facts.layers] == [
        (32, 0, "FullAttentionSpec"),
        (64, 0, "FullAttentionSpec"),
    ]


def test_windows_scales_states_and_packings() -> None:
    modules = {name_of(0): module(), name_of(1): module(_k_scale_float=0.5, _v_scale_float=2.0, _k_scale=torch.ones(3))}
    specs = (
        attention_spec("SlidingWindowSpec", sliding_window=64),
        attention_spec(kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"), dtype=torch.uint8),
        of_class(
            "MambaSpec",
            block_size=512,
            shapes=((3, 40), (2, 8, 4)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=SimpleNamespace(name="GDN_ATTN"),
            tp_replicated=False,
            num_speculative_blocks=1,
        ),
        attention_spec("MLAAttentionSpec", head_size=576, head_size_v=0, num_kv_heads=1, cache_role="sparse", model_version=None),
    )
    found = read_facts(config(compilation_config={"static_forward_context": modules}), groups(*specs)).layers
    assert found[0].window_tokens == 64
    assert (found[1].k_scale, found[1].v_scale, found[1].num_scales, found[1].quant_mode) == (0.5, 2.0, 3, "FP8_PER_TENSOR")
    assert (found[2].spec, found[2].block_size, found[2].num_kv_heads) == ("MambaSpec", 512, 0)
    assert found[2].state == StateFacts(
        kind="GDN_ATTN", shapes=((3, 40), (2, 8, 4)), dtypes=("bfloat16", "float32"), num_draft_blocks=1
    )
    assert (found[3].k_head_dim, found[3].v_head_dim, found[3].is_packed_otherwise) == (576, 0, False)
    chunked = attention_spec("ChunkedLocalAttentionSpec", attention_chunk_size=8192)
    assert read_facts(config(), groups(chunked)).layers[0].window_tokens == 8192
    # A merged spec of full attention may name a window: its blocks are kept all the same.
    assert read_facts(config(), groups(attention_spec(sliding_window=64))).layers[0].window_tokens == 0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"head_size": 132, "cache_role": "indexer"}, ("indexer_fp8", 128, 4)),
        ({"head_size": 576, "state_content_bytes": 656, "cache_dtype_str": "fp8_ds_mla"}, ("fp8_ds_mla", 656, 0)),
        ({"head_size": 576, "state_content_bytes": 352, "cache_dtype_str": "nvfp4_ds_mla"}, ("nvfp4_ds_mla", 352, 0)),
        (
            {"head_size_v": 32, "state_content_bytes": 72, "kv_quant_mode": SimpleNamespace(name="FP8_PER_TOKEN_HEAD")},
            ("fp8_per_token_head", 36, 36),
        ),
    ],
)
def test_rows_of_values_and_scales(changes: dict[str, Any], found: tuple[str, int, int]) -> None:
    layer = read_facts(config(), groups(attention_spec(**{"head_size_v": 0, "dtype": torch.uint8, **changes}))).layers[0]
    assert (layer.row_format, layer.k_head_dim, layer.v_head_dim) == found and not layer.is_packed_otherwise


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 68, "head_size_v": 0, "cache_role": "indexer"},
        {"state_content_bytes": 40, "kv_quant_mode": SimpleNamespace(name="INT4_PER_TOKEN_HEAD")},
        {"head_size_v": 64, "state_content_bytes": 104, "kv_quant_mode": SimpleNamespace(name="FP8_PER_TOKEN_HEAD")},
        {"head_size_v": 0, "state_content_bytes": 448, "cache_dtype_str": "fp8_of_tomorrow"},
        {"bounded_replay": True},
        {"num_head_slots": 4}, {"tokens_per_state": 4}, {"model_version": "deepseek_v4"},
    ],
)  # fmt: skip
def test_specs_with_another_packing_are_recognised(changes: dict[str, Any]) -> None:
    assert read_facts(config(), groups(attention_spec(**changes))).layers[0].is_packed_otherwise


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        (
            {"speculative_config": {"method": "dflash"}},
            "speculative decoding",
            "dflash; use eagle, eagle3, mtp, draft_model, ngram, ngram_gpu, suffix, medusa, mlp_speculator",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "parallel_config": {"pipeline_parallel_size": 2}},
            "speculative decoding with pipeline stages",
            "ngram; use pipeline_parallel_size 1",
        ),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "use_multi_module_mtp": lambda: True}},
            "speculative decoding with several MTP modules",
            "mtp; use num_speculative_tokens 1",
        ),
        ({"parallel_config": {"prefill_context_parallel_size": 4}}, "prefill_context_parallel_size", "4"),
        ({"model_config": {"runner_type": "pooling"}}, "runner", "pooling"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder model", "LlamaForCausalLM"),
    ],
)
def test_features_that_change_kv_are_told(changes: dict[str, Any], name: str, value: str) -> None:
    facts = read_facts(config(**changes), groups(attention_spec()))
    assert facts.features == {name: value}
    with pytest.raises(ConfigError, match=name):
        describe(facts)


def test_decode_context_parallelism_divides_tokens() -> None:
    parallel = {"tensor_parallel_size": 4, "rank": 3, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 8}
    facts = read_facts(config(parallel_config=parallel), groups(*[attention_spec(num_kv_heads=1, dcp_sharded=True)] * 4))
    described = describe(facts)
    assert described.shard == Shard(
        tp_size=4, tp_rank=3, page_size=32, dcp_size=2, interleave_tokens=8, order=described.shard.order
    )
    assert described.tables_to_fill([[5]] * 4, 64) == ([5],) * 4, "a block has 32 tokens on each of two ranks"
    assert described.tables_to_fill([[5]] * 4, 65) == ([5, NULL_BLOCK],) * 4
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2; with a store, it must be 1"):
        check(facts, has_store=True)


def test_a_layer_that_keeps_all_tokens_beside_divided_ones_is_refused() -> None:
    """For example the layers of a draft model without decode context parallelism."""
    parallel = {"tensor_parallel_size": 4, "rank": 0, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 1}
    specs = [attention_spec(num_kv_heads=1, dcp_sharded=is_divided) for is_divided in (True, False)]
    facts = read_facts(config(parallel_config=parallel), groups(*specs))
    with pytest.raises(LayoutError, match=rf"layer {name_of(1)} keeps all tokens .* --decode-context-parallel-size 1, not 2"):
        describe(facts)


@pytest.mark.parametrize(
    ("method", "names", "are_draft"),
    [
        ("eagle3", ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"], [False, True]),
        ("mtp", ["model.layers.3.self_attn.attn", "model.layers.4.mtp_block.self_attn.attn"], [False, True]),
        ("mtp", ["model.layers.0.self_attn.attn", "mtp.layers.0.self_attn.attn"], [False, True]),
        ("draft_model", ["model.layers.0.self_attn.attn", "draft_model.model.layers.0.self_attn.attn"], [False, True]),
        ("ngram", ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"], [False, False]),
    ],
)
def test_draft_layers(method: str, names: list[str], are_draft: list[bool]) -> None:
    group = SimpleNamespace(layer_names=names, kv_cache_spec=attention_spec())
    cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=9, kv_cache_layout="LBNHC")
    facts = read_facts(config(speculative_config={"method": method}), cache)
    assert [layer.is_draft for layer in facts.layers] == are_draft
    assert facts.draft_num_kv_heads == (4 if any(are_draft) else 0)


def test_layers_that_use_the_kv_of_others_are_told() -> None:
    modules = {name_of(0): module(), name_of(1): module()}
    modules[name_of(1)].kv_sharing_target_layer_name = name_of(0)
    facts = read_facts(config(compilation_config={"static_forward_context": modules}), groups(attention_spec()))
    assert facts.shared_layers == {name_of(1): name_of(0)}


def test_another_vllm_is_refused() -> None:
    strange = config()
    del strange.cache_config.enable_prefix_caching
    with pytest.raises(ConfigError, match=r"not one that kvferry knows \(0\.32 and 0\.33\): .*enable_prefix_caching"):
        read_facts(strange, groups(attention_spec()))


def test_recorded_facts_have_every_field() -> None:
    """Or the recordings are older than the code, and are to be made again."""
    written = recorded("llama-block32")["rank0"]["facts"]
    facts = facts_of(written)
    assert set(written) == {field.name for field in dataclasses.fields(facts)}
    assert set(written["layers"][0]) == {field.name for field in dataclasses.fields(facts.layers[0])}


def test_model_fields_are_those_of_an_embedded_node(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    plain = model_fields(config(model=str(tmp_path)))
    assert plain == read_model_files(tmp_path).fields
    changed = config(model=str(tmp_path), model_config={"hf_overrides": {"rope_theta": 5.0}, "quantization": "fp8"})
    assert model_fields(changed) == {**plain, "engine.hf_overrides": '{"rope_theta": 5.0}', "engine.quantization": "fp8"}
    lora = {"lora_dtype": torch.bfloat16, "target_modules": ["q_proj", "k_proj"]}
    lora |= {"enable_moe_shared_loras": False, "enable_mixed_moe_lora_format": False}
    settings = '{"dtype": "bfloat16", "mixed_experts": false, "shared_experts": false, "target_modules": ["k_proj", "q_proj"]}'
    assert model_fields(config(model=str(tmp_path), lora_config=lora)) == {**plain, "engine.lora": settings}
    stored = SimpleNamespace(to_dict=dict, quantization_config={"quant_method": "fp8"})
    assert model_fields(config(model=str(tmp_path), model_config={"hf_config": stored, "quantization": "fp8"})) == plain


def test_model_fields_of_a_draft_model(tmp_path: Path) -> None:
    """Drafts depend on the draft model's weights, and tokens do not. So nothing but these fields would notice another one."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for directory, architecture in ((model, "LlamaForCausalLM"), (draft, "LlamaForCausalLMEagle3")):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(LLAMA | {"architectures": [architecture]}), encoding="utf-8")
        save_file({"model.norm.weight": torch.ones(4)}, directory / "model.safetensors")
    plain = model_fields(config(model=str(model)))
    assert model_fields(config(model=str(model), speculative_config={"method": "ngram"})) == plain
    mtp = plain | {"engine.speculative_config": '{"method": "mtp"}'}
    assert model_fields(config(model=str(model), speculative_config={"method": "mtp"})) == mtp
    eagle = {"method": "eagle3", "draft_model_config": SimpleNamespace(model=str(draft), revision=None, quantization="fp8")}
    found = model_fields(config(model=str(model), speculative_config=eagle))
    added = {name: value for name, value in found.items() if plain.get(name) != value}
    assert added.pop("engine.speculative_config") == '{"method": "eagle3", "quantization": "fp8"}'
    assert added.keys() == {"draft.architecture", "draft.config", "draft.weights"}


def test_indexers_that_are_packed_otherwise() -> None:
    """In mxfp4, or in the order of ROCm's kernels."""
    indexer = groups(attention_spec(head_size=132, head_size_v=0, cache_role="indexer"))
    mxfp4 = config(attention_config={"resolve_indexer_kv_dtype": lambda default: "mxfp4"})
    shuffled = config(compilation_config={"static_forward_context": {name_of(0): module(uses_shuffled_layout=True)}})
    for other in (mxfp4, shuffled):
        assert read_facts(other, indexer).layers[0].is_packed_otherwise
