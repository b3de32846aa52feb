"""The config.json of a model: what the memory plan and the geometry are made of."""

from __future__ import annotations

import json
from typing import Any

from fuzz.target import Target, require, scratch_folder
from fuzz.trees import tree_mutator
from planner.model_directory import INDEX_NAME, read_model_directory
from transfer.errors import ConfigError, LayoutError
from transfer.layout import MAX_LAYERS, DType

_FOLDER = scratch_folder()

_SMALL: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "seq_length": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
_MODELS: tuple[dict[str, Any], ...] = (
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "torch_dtype": "bfloat16"},
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
    }
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 32, "num_hidden_layers": 2}}
    | {"text_config": _SMALL | {"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}},
    {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "quantization_config": {"quant_method": "fp8"}},
    {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_key_value_heads": 2, "head_dim": 16}
    | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 32, "full_attention_interval": 4},
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
    }
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"quantization_config": {"quant_method": "mxfp4"}},
    {"architectures": ["ChatGLMModel"], "num_layers": 4, "ffn_hidden_size": 128, "kv_channels": 16, "multi_query_attention": True}
    | {"multi_query_group_num": 2, "padded_vocab_size": 100},
)


def check(data: bytes) -> None:
    """config.json, and behind a byte 0 the index of its weights."""
    config, _, index = data.partition(b"\x00")
    (_FOLDER / "config.json").write_bytes(config)
    if index:
        (_FOLDER / INDEX_NAME).write_bytes(index)
    else:
        (_FOLDER / INDEX_NAME).unlink(missing_ok=True)
    found = read_model_directory(_FOLDER)
    require(found.checkpoint_bytes is None or 0 < found.checkpoint_bytes <= 1 << 60, "weights of a size that cannot be")
    layout = found.shape.layout(DType.BFLOAT16)
    require(1 <= layout.num_layers <= MAX_LAYERS, "a model without a bound")
    require(found.shape.num_params >= 0, "a negative number of weights")


def _decode(data: bytes) -> Any:
    config, _, index = data.partition(b"\x00")
    return [json.loads(config), json.loads(index) if index else None]


def _encode(tree: Any) -> bytes:
    config, index = tree
    return json.dumps(config).encode() + (b"" if index is None else b"\x00" + json.dumps(index).encode())


TARGET = Target(
    name="model_config",
    about="config.json of a model (JSON)",
    modules=("planner", "transfer.layout"),
    check=check,
    refuses=(ConfigError, LayoutError),
    mutate=tree_mutator(_decode, _encode),
    seeds=lambda: [
        *(_encode([_SMALL | model, None]) for model in _MODELS),
        _encode(
            [_SMALL | _MODELS[0], {"metadata": {"total_size": 123456}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}]
        ),
    ],
)
