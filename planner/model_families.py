"""How each family of models writes its sizes into ``config.json``, and what its layers are made of.

One function for each configuration class of transformers; a test compares every one with the class and with the tensors of the
model. Where a field is absent, the default is that of the class; the sizes that decide everything must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from planner.config_fields import MAX_COUNT, REQUIRED, ConfigFields
from planner.model_parts import LayerShape, ModelShape, Part, Weights
from transfer.layout import MAX_KV_HEADS, MAX_LAYERS, DType, LayerKind, LayerSpec

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LINEAR: Final = "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one configuration class.

    Args:
        architecture: Name of its model class.
        model_types: Names of the configuration class, which is all that some nested configurations have.
        aliases: Other names of model classes with the same configuration.
        read: Makes the shape, but for what all families have in common.
    """

    architecture: str
    model_types: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    read: Callable[[ConfigFields], ModelShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes that every family has, under whichever names."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int


def _sizes(fields: ConfigFields, absent: Mapping[str, int] | None = None) -> _Sizes:
    """`absent` holds the defaults of a family of which published configurations leave such fields out."""
    defaults = absent or {}

    def count(name: str, most: int = MAX_COUNT) -> int:
        return fields.count(name, absent=defaults.get(name, REQUIRED), most=most)

    return _Sizes(
        num_layers=count("num_hidden_layers", MAX_LAYERS),
        hidden_size=count("hidden_size"),
        num_heads=count("num_attention_heads", MAX_KV_HEADS),
        intermediate_size=count("intermediate_size"),
        vocab_size=count("vocab_size"),
        max_context_tokens=count("max_position_embeddings"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Attention with KV heads: sizes, and which of its projections have more than a plain matrix."""

    sizes: _Sizes
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    query_factor: int = 1  # 2 where a gate of the output is projected along with the queries

    def kv(self, *, window_tokens: int = 0) -> LayerSpec:
        return LayerSpec(
            kind=LayerKind.SLIDING_WINDOW if window_tokens else LayerKind.ATTENTION,
            num_kv_heads=self.num_kv_heads,
            k_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            window_tokens=window_tokens,
        )

    def weights(self) -> list[Weights]:
        hidden = self.sizes.hidden_size
        into = self.head_dim * (hidden + self.has_qkv_bias)
        query_head = self.query_factor * into + self.head_dim * hidden
        held = [
            Weights(part=Part.ATTENTION, units=self.sizes.num_heads, unit_params=query_head),
            Weights(part=Part.ATTENTION, units=self.num_kv_heads, unit_params=2 * into),
        ]
        if self.has_output_bias:
            held.append(Weights(part=Part.OTHER, unit_params=hidden))
        if self.has_qk_norm:
            held.append(Weights(part=Part.OTHER, unit_params=2 * self.head_dim))
        if self.has_sinks:
            held.append(Weights(part=Part.OTHER, units=self.sizes.num_heads, unit_params=1))
        return held


def _attention(
    fields: ConfigFields,
    sizes: _Sizes,
    *,
    kv_heads_absent: int = REQUIRED,
    kv_heads_may_be_null: bool = True,
    head_dim_absent: int | None = None,
    bias: bool | None = False,
    has_qk_norm: bool = False,
) -> _Attention:
    """Attention as most families describe it.

    Args:
        kv_heads_absent: KV heads where ``num_key_value_heads`` is absent.
        head_dim_absent: Head size where ``head_dim`` is absent; None divides the hidden size among the heads.
        bias: Default of ``attention_bias``, which goes for all four projections; None where the family has no such field.
    """
    num_kv_heads = fields.count(
        "num_key_value_heads", absent=kv_heads_absent, null=sizes.num_heads if kv_heads_may_be_null else REQUIRED
    )
    if sizes.num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {sizes.num_heads}")
    if head_dim_absent is not None:
        head_dim = fields.count("head_dim", absent=head_dim_absent)
        if not head_dim:
            raise fields.wrong("hidden_size", f"at least num_attention_heads, {sizes.num_heads}, or head_dim given")
    else:
        head_dim = fields.count("head_dim", absent=0, null=0)
        if not head_dim and sizes.hidden_size % sizes.num_heads:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads, {sizes.num_heads}, or head_dim given")
        head_dim = head_dim or sizes.hidden_size // sizes.num_heads
    has_bias = bias is not None and fields.flag("attention_bias", absent=bias)
    return _Attention(
        sizes=sizes,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=has_qk_norm,
    )


def _mlp(hidden_size: int, intermediate_size: int, *, has_bias: bool = False) -> list[Weights]:
    """A gated MLP: three matrices, cut along its width."""
    held = [Weights(part=Part.MLP, units=intermediate_size, unit_params=3 * hidden_size + 2 * has_bias)]
    if has_bias:
        held.append(Weights(part=Part.OTHER, unit_params=hidden_size))
    return held


def _experts(hidden_size: int, num_experts: int, intermediate_size: int) -> list[Weights]:
    """Routed experts, each cut along its width, and the router."""
    return [
        Weights(part=Part.EXPERTS, units=intermediate_size, unit_params=3 * hidden_size * num_experts),
        Weights(part=Part.OTHER, unit_params=hidden_size * num_experts),
    ]


def _norms(hidden_size: int, count: int) -> list[Weights]:
    return [Weights(part=Part.OTHER, unit_params=count * hidden_size)]


def _shape(fields: ConfigFields, sizes: _Sizes, layers: Iterable[LayerShape], *, is_tied: bool = False) -> ModelShape:
    """The layers between embeddings and head. `is_tied` is the family's default."""
    embeddings = Weights(part=Part.OTHER, unit_params=sizes.vocab_size * sizes.hidden_size)
    head = Weights(part=Part.OTHER, units=sizes.vocab_size, unit_params=sizes.hidden_size)
    is_tied = fields.flag("tie_word_embeddings", absent=is_tied)
    return ModelShape(
        architecture="",
        dtype=None,
        hidden_size=sizes.hidden_size,
        num_query_heads=sizes.num_heads,
        max_context_tokens=sizes.max_context_tokens,
        layers=tuple(layers),
        first_stage=(embeddings,),
        last_stage=(*_norms(sizes.hidden_size, 1), *(() if is_tied else (head,))),
    )


def _dense(
    fields: ConfigFields,
    attention: _Attention,
    windows: Iterable[int],
    *,
    num_norms: int = 2,
    is_tied: bool = False,
    has_mlp_bias: bool = False,
) -> ModelShape:
    """A model whose layers differ in nothing but their window (0: none)."""
    sizes = attention.sizes
    weights = (
        *attention.weights(),
        *_mlp(sizes.hidden_size, sizes.intermediate_size, has_bias=has_mlp_bias),
        *_norms(sizes.hidden_size, num_norms),
    )
    layers = (LayerShape(kv=attention.kv(window_tokens=window), weights=weights) for window in windows)
    return _shape(fields, sizes, layers, is_tied=is_tied)


def _windows(fields: ConfigFields, types: Iterable[str], window_tokens: int) -> list[int]:
    """Each layer's window, 0 for full attention."""
    windows = [window_tokens if one == SLIDING else 0 for one in types]
    if not window_tokens and SLIDING in set(types):
        raise fields.wrong("sliding_window", "a positive integer where layer_types has sliding_attention")
    return windows


def _llama(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(fields, sizes, kv_heads_absent=sizes.num_heads)
    return _dense(fields, attention, [0] * sizes.num_layers, has_mlp_bias=fields.flag("mlp_bias", absent=False))


def _qwen_windows(fields: ConfigFields, num_layers: int) -> list[int]:
    """Qwen2 and Qwen3: `sliding_window` counts only where `use_sliding_window` says so, from `max_window_layers` on."""
    is_used = fields.flag("use_sliding_window", absent=False)
    window = fields.count("sliding_window", absent=4096, null=0) if is_used else 0
    types = fields.layer_types(num_layers, (FULL, SLIDING))
    if types is None:
        first = fields.count("max_window_layers", absent=28, least=0) if window else num_layers
        types = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return _windows(fields, types, window)


def _qwen2(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    divided = sizes.hidden_size // sizes.num_heads
    attention = _attention(fields, sizes, kv_heads_absent=32, head_dim_absent=divided, bias=None)
    attention = replace(attention, has_qkv_bias=True)
    return _dense(fields, attention, _qwen_windows(fields, sizes.num_layers))


def _qwen3(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(fields, sizes, kv_heads_absent=32, head_dim_absent=128, has_qk_norm=True)
    return _dense(fields, attention, _qwen_windows(fields, sizes.num_layers))


def _has_experts(fields: ConfigFields, num_layers: int, num_experts: int) -> list[bool]:
    """Qwen's rule: every `decoder_sparse_step`-th layer has experts, if there are any, except what `mlp_only_layers` names."""
    step = fields.count("decoder_sparse_step", absent=1)
    plain = fields.layer_numbers("mlp_only_layers")
    return [num_experts > 0 and layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers)]


def _num_experts(fields: ConfigFields, name: str, other_name: str, *, absent: int, least: int = 1) -> int:
    """The number of experts, for which the class has two names."""
    return fields.count(name if name in fields.values else other_name, absent=absent, least=least)


def _qwen3_moe(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    hidden = sizes.hidden_size
    divided = hidden // sizes.num_heads
    attention = _attention(
        fields, sizes, kv_heads_absent=4, kv_heads_may_be_null=False, head_dim_absent=divided, has_qk_norm=True
    )
    is_used = fields.flag("use_sliding_window", absent=False)
    window = fields.count("sliding_window", absent=4096, null=0) if is_used else 0
    num_experts = _num_experts(fields, "num_experts", "num_local_experts", absent=128, least=0)
    experts = _experts(hidden, num_experts, fields.count("moe_intermediate_size"))
    common = (*attention.weights(), *_norms(hidden, 2))
    mlps = {True: tuple(experts), False: tuple(_mlp(hidden, sizes.intermediate_size))}
    kv = attention.kv(window_tokens=window)
    has_experts = _has_experts(fields, sizes.num_layers, num_experts)
    layers = (LayerShape(kv=kv, weights=(*common, *mlps[is_moe])) for is_moe in has_experts)
    return _shape(fields, sizes, layers)


def _mistral(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(fields, sizes, kv_heads_absent=8, bias=None)
    window = fields.count("sliding_window", absent=4096, null=0)
    return _dense(fields, attention, [window] * sizes.num_layers)


def _mixtral(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(fields, sizes, kv_heads_absent=8, bias=None)
    window = fields.count("sliding_window", absent=0, null=0)
    experts = _experts(sizes.hidden_size, fields.count("num_local_experts", absent=8), sizes.intermediate_size)
    weights = (*attention.weights(), *experts, *_norms(sizes.hidden_size, 2))
    layer = LayerShape(kv=attention.kv(window_tokens=window), weights=weights)
    return _shape(fields, sizes, [layer] * sizes.num_layers)


def _gemma2(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(fields, sizes, kv_heads_absent=4, kv_heads_may_be_null=False, head_dim_absent=256)
    types = fields.layer_types(sizes.num_layers, (FULL, SLIDING)) or _every(2, sizes.num_layers, FULL, SLIDING)
    windows = _windows(fields, types, fields.count("sliding_window", absent=4096, null=0))
    return _dense(fields, attention, windows, num_norms=4, is_tied=True)


_GEMMA3_ABSENT: Final = {
    "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "intermediate_size": 9216, "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}  # fmt: skip


def _gemma3(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields, _GEMMA3_ABSENT)
    attention = _attention(fields, sizes, kv_heads_absent=4, kv_heads_may_be_null=False, head_dim_absent=256, has_qk_norm=True)
    pattern = fields.count("sliding_window_pattern", absent=6)
    types = fields.layer_types(sizes.num_layers, (FULL, SLIDING)) or _every(pattern, sizes.num_layers, FULL, SLIDING)
    window = fields.count("sliding_window", absent=4096, null=0)
    if window and fields.flag("use_bidirectional_attention", absent=False):
        window = window // 2 + 1
    return _dense(fields, attention, _windows(fields, types, window), num_norms=4, is_tied=True)


def _every(step: int, num_layers: int, nth: str, other: str) -> tuple[str, ...]:
    """Every `step`-th layer is `nth`, beginning with layer `step` - 1."""
    return tuple(other if (layer + 1) % step else nth for layer in range(num_layers))


def _glm(fields: ConfigFields, *, num_norms: int = 2, kv_heads_may_be_null: bool = True) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(
        fields, sizes, kv_heads_absent=2, kv_heads_may_be_null=kv_heads_may_be_null, head_dim_absent=128, bias=True
    )
    return _dense(fields, replace(attention, has_output_bias=False), [0] * sizes.num_layers, num_norms=num_norms)


def _glm4(fields: ConfigFields) -> ModelShape:
    return _glm(fields, num_norms=4, kv_heads_may_be_null=False)


def _chatglm(fields: ConfigFields) -> ModelShape:
    """GLM-4-9B under the names of its first release. Source: its configuration_chatglm.py."""
    sizes = _Sizes(
        num_layers=fields.count("num_layers", most=MAX_LAYERS),
        hidden_size=fields.count("hidden_size"),
        num_heads=fields.count("num_attention_heads", most=MAX_KV_HEADS),
        intermediate_size=fields.count("ffn_hidden_size"),
        vocab_size=fields.count("padded_vocab_size"),
        max_context_tokens=fields.count("seq_length"),
    )
    has_groups = fields.flag("multi_query_attention", absent=False)
    num_kv_heads = fields.count("multi_query_group_num") if has_groups else sizes.num_heads
    if sizes.num_heads % num_kv_heads:
        raise fields.wrong("multi_query_group_num", f"a divisor of num_attention_heads, {sizes.num_heads}")
    has_bias = fields.flag("add_bias_linear", absent=False)
    attention = _Attention(
        sizes=sizes,
        num_kv_heads=num_kv_heads,
        head_dim=fields.count("kv_channels"),
        has_qkv_bias=has_bias or fields.flag("add_qkv_bias", absent=False),
        has_output_bias=has_bias,
    )
    return _dense(fields, attention, [0] * sizes.num_layers, has_mlp_bias=has_bias)


def _gpt_oss(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    hidden = sizes.hidden_size
    attention = replace(_attention(fields, sizes, kv_heads_absent=8, head_dim_absent=64, bias=True), has_sinks=True)
    types = fields.layer_types(sizes.num_layers, (FULL, SLIDING)) or _every(2, sizes.num_layers, FULL, SLIDING)
    windows = _windows(fields, types, fields.count("sliding_window", absent=128, null=0))
    num_experts = _num_experts(fields, "num_local_experts", "num_experts", absent=128)
    experts = _experts(hidden, num_experts, sizes.intermediate_size)
    biases = [
        Weights(part=Part.OTHER, units=sizes.intermediate_size, unit_params=2 * num_experts),
        Weights(part=Part.OTHER, unit_params=hidden * num_experts + num_experts),
    ]
    weights = (*attention.weights(), *experts, *biases, *_norms(hidden, 2))
    layers = (LayerShape(kv=attention.kv(window_tokens=window), weights=weights) for window in windows)
    return _shape(fields, sizes, layers)


def _mla(fields: ConfigFields, *, num_shared_absent: int, has_router_bias: bool) -> ModelShape:
    """DeepSeek-V2 and V3. What a token leaves behind is one latent and one rotary part, whatever the number of heads."""
    sizes = _sizes(fields)
    hidden, heads = sizes.hidden_size, sizes.num_heads
    kv_rank, rope_dim = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope_dim, v_dim = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query_rank = fields.count("q_lora_rank", absent=1536, null=0)
    has_bias = fields.flag("attention_bias", absent=False)
    latents = hidden * (kv_rank + rope_dim) + has_bias * (kv_rank + rope_dim)
    latents += (hidden * query_rank + has_bias * query_rank) if query_rank else 0
    per_head = (query_rank or hidden) * (nope_dim + rope_dim) + kv_rank * (nope_dim + v_dim) + v_dim * hidden
    attention = (
        Weights(part=Part.ATTENTION, unit_params=latents),
        Weights(part=Part.ATTENTION, units=heads, unit_params=per_head),
        *_norms(hidden, 2),
        Weights(part=Part.OTHER, unit_params=kv_rank + query_rank + has_bias * hidden),
    )
    num_dense = fields.count("first_k_dense_replace", absent=3 if has_router_bias else 0, null=0, least=0)
    num_experts = fields.count("n_routed_experts", absent=256 if has_router_bias else 64)
    expert_size = fields.count("moe_intermediate_size")
    shared = fields.count("n_shared_experts", absent=num_shared_absent) * expert_size
    mlps = {
        True: (*_experts(hidden, num_experts, expert_size), *_mlp(hidden, shared)),
        False: tuple(_mlp(hidden, sizes.intermediate_size)),
    }
    if has_router_bias:
        mlps[True] += (Weights(part=Part.OTHER, unit_params=num_experts),)
    kv = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=kv_rank + rope_dim, v_head_dim=0)
    layers = [LayerShape(kv=kv, weights=(*attention, *mlps[layer >= num_dense])) for layer in range(sizes.num_layers)]
    shape = _shape(fields, sizes, layers)
    num_draft = fields.count("num_nextn_predict_layers", absent=0, null=0, least=0, most=MAX_LAYERS)
    draft = (*layers[-1].weights, Weights(part=Part.OTHER, unit_params=2 * hidden**2 + 3 * hidden))
    copies = 2 * Weights(part=Part.OTHER, unit_params=sizes.vocab_size * hidden).num_params
    return replace(
        shape,
        draft=draft * num_draft,
        draft_copies=(Weights(part=Part.OTHER, unit_params=copies),) * num_draft,
    )


def _deepseek_v2(fields: ConfigFields) -> ModelShape:
    return _mla(fields, num_shared_absent=2, has_router_bias=False)


def _deepseek_v3(fields: ConfigFields) -> ModelShape:
    return _mla(fields, num_shared_absent=1, has_router_bias=True)


def _qwen3_next(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    hidden = sizes.hidden_size
    attention = _attention(fields, sizes, kv_heads_absent=2, kv_heads_may_be_null=False, head_dim_absent=256, has_qk_norm=True)
    attention = replace(attention, query_factor=2)
    interval = fields.count("full_attention_interval", absent=4)
    types = fields.layer_types(sizes.num_layers, (FULL, LINEAR)) or _every(interval, sizes.num_layers, FULL, LINEAR)
    state, delta_net = _delta_net(fields, hidden)
    mixers = {FULL: (attention.kv(), tuple(attention.weights())), LINEAR: (state, delta_net)}
    num_experts = fields.count("num_experts", absent=512, least=0)
    experts = _experts(hidden, num_experts, fields.count("moe_intermediate_size", absent=512))
    shared = fields.count("shared_expert_intermediate_size", absent=512)
    gate = Weights(part=Part.OTHER, unit_params=hidden)
    mlps = {
        True: (*experts, *_mlp(hidden, shared), gate),
        False: tuple(_mlp(hidden, sizes.intermediate_size)),
    }
    norms = _norms(hidden, 2)
    layers = []
    for kind, is_moe in zip(types, _has_experts(fields, sizes.num_layers, num_experts), strict=True):
        kv, weights = mixers[kind]
        layers.append(LayerShape(kv=kv, weights=(*weights, *mlps[is_moe], *norms)))
    return _shape(fields, sizes, layers)


def _delta_net(fields: ConfigFields, hidden_size: int) -> tuple[LayerSpec, tuple[Weights, ...]]:
    """State and weights of a gated delta net, by key head with the value heads that share it.

    transformers keeps, per request, the recurrent state ``[value head, key dim, value dim]`` and the last
    `linear_conv_kernel_dim` columns of the convolution's input; the former always in float32, so the two together are.
    """
    key_dim, value_dim = fields.count("linear_key_head_dim", absent=128), fields.count("linear_value_head_dim", absent=128)
    num_keys = fields.count("linear_num_key_heads", absent=16, most=MAX_KV_HEADS)
    num_values = fields.count("linear_num_value_heads", absent=32)
    if num_values % num_keys:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {num_keys}")
    window = fields.count("linear_conv_kernel_dim", absent=4)
    shared_by = num_values // num_keys
    convolved = 2 * key_dim + shared_by * value_dim
    state = LayerSpec(
        kind=LayerKind.RECURRENT_STATE,
        num_kv_heads=num_keys,
        k_head_dim=shared_by * key_dim * value_dim + convolved * window,
        v_head_dim=0,
        dtype=DType.FLOAT32,
    )
    # Into it queries, keys, values, gates z, b and a; out of it the values.
    matrices = hidden_size * (convolved + 2 * shared_by * value_dim + 2 * shared_by)
    weights = (
        Weights(part=Part.ATTENTION, units=num_keys, unit_params=matrices),
        Weights(part=Part.OTHER, units=num_keys, unit_params=convolved * window + 2 * shared_by),
        Weights(part=Part.OTHER, unit_params=value_dim),
    )
    return state, weights


FAMILIES: Final = (
    Family(architecture="LlamaForCausalLM", model_types=("llama",), read=_llama),
    Family(architecture="Qwen2ForCausalLM", model_types=("qwen2",), read=_qwen2),
    Family(architecture="Qwen3ForCausalLM", model_types=("qwen3",), read=_qwen3),
    Family(architecture="Qwen3MoeForCausalLM", model_types=("qwen3_moe",), read=_qwen3_moe),
    Family(architecture="Qwen3NextForCausalLM", model_types=("qwen3_next",), read=_qwen3_next),
    Family(architecture="MistralForCausalLM", model_types=("mistral",), read=_mistral),
    Family(architecture="MixtralForCausalLM", model_types=("mixtral",), read=_mixtral),
    Family(architecture="Gemma2ForCausalLM", model_types=("gemma2",), read=_gemma2),
    Family(architecture="Gemma3ForCausalLM", model_types=("gemma3_text",), read=_gemma3),
    Family(architecture="GlmForCausalLM", model_types=("glm",), read=_glm),
    Family(architecture="Glm4ForCausalLM", model_types=("glm4",), read=_glm4),
    Family(
        architecture="ChatGLMModel",
        model_types=("chatglm",),
        aliases=("ChatGLMForConditionalGeneration",),
        read=_chatglm,
    ),
    Family(architecture="GptOssForCausalLM", model_types=("gpt_oss",), read=_gpt_oss),
    Family(architecture="DeepseekV2ForCausalLM", model_types=("deepseek_v2",), read=_deepseek_v2),
    Family(architecture="DeepseekV3ForCausalLM", model_types=("deepseek_v3",), read=_deepseek_v3),
)
