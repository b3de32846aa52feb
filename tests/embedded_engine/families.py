"""Tiny models of every family that the embedded engine runs: random weights, scaled so that attention decides what comes next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

COMMON: Mapping[str, Any] = {
    "vocab_size": 240,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}

MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}

DELTA_NET: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 22,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"head_dim": 16, "sliding_window": 19, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("Mistral", {"sliding_window": 20, "head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 18,
            "sliding_window_pattern": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "sliding_window": 17, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", {**MLA, "q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": 20,
            "first_k_dense_replace": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek_v3_moe": ("DeepseekV3", {**MLA, "q_lora_rank": 20, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
    "qwen3_next": ("Qwen3Next", {**DELTA_NET, "num_experts": 4, "decoder_sparse_step": 10}),
    "qwen3_next_moe": ("Qwen3Next", {**DELTA_NET, "num_experts": 4, "mlp_only_layers": [0]}),
}
"""Name -> (stem of its classes in transformers, what its configuration has beside `COMMON`)."""

# Sharp enough for one wrong token in the cache to show, mild enough for two correct orders of summation to agree.
GAINS: Mapping[str, float] = {"q_proj": 1.6, "k_proj": 1.6, "q_b_proj": 1.6, "kv_a_proj_with_mqa": 1.4, "lm_head": 3.0}


def make_family(name: str, directory: Path, seed: int = 7) -> Path:
    """Write the model of a family as a Hugging Face directory."""
    stem, own = FAMILIES[name]
    config_name = f"{stem}TextConfig" if stem == "Gemma3" else f"{stem}Config"
    config = getattr(transformers, config_name)(**{**COMMON, **own})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{stem}ForCausalLM")(config)
    _randomise(model, config)
    model.save_pretrained(directory)
    return directory


def _randomise(model: PreTrainedModel, config: Any) -> None:
    is_transposed = config.model_type == "gpt_oss"  # its experts are [expert, in, out]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[-1] in ("A_log", "dt_bias"):
                # Decays between forgetting at once and keeping everything, or the state of the chunk before would not matter.
                parameter.uniform_(-3.0, -0.5)
            elif parameter.ndim == 1 or parts[-1].endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                fan_in = parameter.shape[-2] if is_transposed and "experts" in name else parameter.shape[-1]
                gain = GAINS.get(parts[-2], 1.0)
                if parts[-2] == "embed_tokens":
                    gain = 0.2 if config.tie_word_embeddings else fan_in**0.5
                parameter.copy_(torch.randn_like(parameter) * gain / math.sqrt(fan_in))
