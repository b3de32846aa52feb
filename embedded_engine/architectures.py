"""The model families that the embedded engine runs.

Model code, tokenizers and weights stay with transformers. The engine replaces only the place of a layer's cache; `Hook` names the
ways to do so. Plain Python: a node reads this table before it starts any rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from planner.model_families import MODEL_TYPES
from transfer.errors import ConfigError
from transfer.layout import MAX_RANKS

_EXPERT_SIZES: Final = ("moe_intermediate_size", "shared_expert_intermediate_size")
_CUT_SIZES: Final = (
    "num_key_value_heads", "num_attention_heads", "intermediate_size", "vocab_size", "linear_num_key_heads", *_EXPERT_SIZES,
)  # fmt: skip
"""Names in config.json of the sizes that tensor parallelism divides among the ranks, if a family has them."""


class Hook(StrEnum):
    """Way of a family's layers to the pool."""

    ATTENTION = "attention"  # K and V, through the attention function: `paged_attention`
    LATENT = "latent"  # MLA latents: `latent_attention`
    GATED_DELTA_NET = "gated_delta_net"  # recurrent state in some layers, K and V in the others: `recurrent_state`


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family.

    Args:
        config_class: Name of its configuration class in transformers.
        tp_styles: Styles of tensor parallelism that transformers' plan lacks or has wrong: module -> style.
        is_cut: Whether tensor parallelism is possible.
    """

    config_class: str
    hook: Hook = Hook.ATTENTION
    tp_styles: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = True


# transformers gathers the joined gate and up projections on every rank; with both halves sharded, no rank needs another's part.
_JOINED_MLP: Final = {
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
# Query heads are sharded; the latent that all of them read is the same on every rank.
_LATENT: Final = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
# The rows of both input projections lie key head by key head; `recurrent_state` shards the small tensors that do not.
_GATED_DELTA_NET: Final = {
    "model.layers.*.linear_attn.in_proj_qkvz": "colwise",
    "model.layers.*.linear_attn.in_proj_ba": "colwise",
    "model.layers.*.linear_attn.out_proj": "rowwise",
}

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": Architecture(config_class="LlamaConfig"),
    "MistralForCausalLM": Architecture(config_class="MistralConfig"),
    "Qwen2ForCausalLM": Architecture(config_class="Qwen2Config"),
    "Qwen3ForCausalLM": Architecture(config_class="Qwen3Config"),
    "Qwen3MoeForCausalLM": Architecture(config_class="Qwen3MoeConfig"),
    "MixtralForCausalLM": Architecture(config_class="MixtralConfig"),
    "Gemma2ForCausalLM": Architecture(config_class="Gemma2Config"),
    "Gemma3ForCausalLM": Architecture(config_class="Gemma3TextConfig"),
    "GlmForCausalLM": Architecture(config_class="GlmConfig", tp_styles=_JOINED_MLP),
    "Glm4ForCausalLM": Architecture(config_class="Glm4Config", tp_styles=_JOINED_MLP),
    "GptOssForCausalLM": Architecture(config_class="GptOssConfig", is_cut=False),
    "DeepseekV2ForCausalLM": Architecture(config_class="DeepseekV2Config", hook=Hook.LATENT, tp_styles=_LATENT),
    "DeepseekV3ForCausalLM": Architecture(config_class="DeepseekV3Config", hook=Hook.LATENT, tp_styles=_LATENT),
    "Qwen3NextForCausalLM": Architecture(
        config_class="Qwen3NextConfig",
        hook=Hook.GATED_DELTA_NET,
        tp_styles=_GATED_DELTA_NET,
    ),
}
"""Name in `architectures` of config.json -> family."""


def model_module(name: str) -> str:
    """Return the module of transformers with the model classes of an architecture."""
    model = MODEL_TYPES[name].removesuffix("_text")
    return f"transformers.models.{model}.modeling_{model}"


def check_cut(name: str, tp_size: int, config: Mapping[str, Any]) -> None:
    """Refuse a TP size that does not fit a model; sizes that config.json leaves to its class are not checked.

    Raises:
        ConfigError: The message names the size that is not divisible, and the TP sizes that fit.
    """
    architecture = ARCHITECTURES[name]
    if tp_size == 1:
        return
    if not architecture.is_cut:
        raise ConfigError(f"parallel.tp_size (--tp) is {tp_size}; it must be 1: the embedded engine does not shard {name}")
    unused = () if _has_experts(architecture, config) else _EXPERT_SIZES
    names = (name for name in _CUT_SIZES if name not in unused)
    sizes = {name: config[name] for name in names if type(config.get(name)) is int and config[name] > 0}
    for size_name, value in sizes.items():
        if value % tp_size:
            fitting = [tp for tp in range(1, min(MAX_RANKS, *sizes.values()) + 1) if all(v % tp == 0 for v in sizes.values())]
            raise ConfigError(
                f"parallel.tp_size (--tp) is {tp_size}, which does not divide {size_name} ({value}) of the model's config.json; "
                f"it must be one of {', '.join(map(str, fitting))}"
            )


def check_can_speculate(name: str) -> None:
    """Refuse speculative decoding of a model whose layers keep a state: a rejected draft token cannot be taken back out of it.

    Raises:
        ConfigError: The architecture has recurrent layers.
    """
    if ARCHITECTURES[name].hook is Hook.GATED_DELTA_NET:
        raise ConfigError(
            f"speculative.method is set, and a {name} has recurrent layers, whose state cannot drop a rejected draft token; "
            "remove it"
        )


def _has_experts(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    """Return whether a layer is known to have experts: a configuration has their sizes even if all layers are dense."""
    num_layers = config.get("num_hidden_layers")
    if type(num_layers) is not int:
        return False
    if architecture.hook is Hook.LATENT:
        num_dense = config.get("first_k_dense_replace")
        return type(num_dense) is int and num_dense < num_layers
    step, dense, num_experts = (config.get(name) for name in ("decoder_sparse_step", "mlp_only_layers", "num_experts"))
    step = step if type(step) is int and step > 0 else 1
    dense = dense if isinstance(dense, list) else []
    return num_experts != 0 and any(layer not in dense for layer in range(step - 1, num_layers, step))
