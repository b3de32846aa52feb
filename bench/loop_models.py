"""A model of every family that the memory planner reads, as large as published ones are, for `bench.loop`."""

from __future__ import annotations

from typing import Any, Final

from planner.model_families import READERS
from planner.model_shape import read_model_shape
from transfer.layout import DType, KVLayout

CONTEXT_TOKENS: Final = 131_072

_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _WINDOW = 62, 32, 16, 128, 1024  # Gemma 3 27B; no published model of a family has more

_FIELDS: Final[dict[str, Any]] = {
    "torch_dtype": "bfloat16",
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_size": _HEADS * _HEAD_DIM,
    "intermediate_size": 21_504,
    "vocab_size": 262_208,
    "max_position_embeddings": CONTEXT_TOKENS,
    # Windows, in every family that can have them. Each family has a pattern of its own besides.
    "sliding_window": _WINDOW,
    "use_sliding_window": True,
    "max_window_layers": _LAYERS // 2,
    # Experts
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "num_local_experts": 8,
    "n_routed_experts": 256,
    # Latent attention (DeepSeek)
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    # The first names of GLM-4
    "num_layers": _LAYERS,
    "ffn_hidden_size": 13_696,
    "padded_vocab_size": 151_552,
    "seq_length": CONTEXT_TOKENS,
    "kv_channels": _HEAD_DIM,
    "multi_query_attention": True,
    "multi_query_group_num": _KV_HEADS,
}
"""One configuration for all families: each reads the fields that it has."""


def layouts() -> dict[str, KVLayout]:
    """By the family's architecture. A new family is among them by itself.

    Raises:
        ConfigError: A family needs a field that `_FIELDS` lacks; it is named.
    """
    found = {}
    for model_type in READERS:
        shape = read_model_shape({**_FIELDS, "model_type": model_type}, source=f"bench/loop_models.py ({model_type})")
        found[shape.architecture] = shape.layout(DType.BFLOAT16)
    return found


def llama_3_8b() -> KVLayout:
    return KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
