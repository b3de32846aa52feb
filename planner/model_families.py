"""Read the sizes and layers of each family of models from its ``config.json``.

`READERS` has one entry for each configuration class of transformers. A test compares every entry with the class and with the
tensors of the model. An absent field has the default of the class; the sizes that decide everything must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from planner.config_fields import MAX_COUNT, REQUIRED, ConfigFields
from planner.model_parts import LayerShape, ModelShape, Part, Weights
from transfer.layout import MAX_KV_HEADS, MAX_LAYERS, DType, LayerKind, LayerSpec

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_LINEAR: Final = "linear_attention"

_Mixer = tuple[LayerSpec, tuple[Weights, ...]]
"""Attention or a delta net of one layer: its KV and its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes that every family has, under any name."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int


def _sizes(fields: ConfigFields, absent: Mapping[str, int] | None = None) -> _Sizes:
    """Read the sizes; `absent` has the defaults of fields that published configurations leave out."""
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
    """Attention with KV heads: its sizes, and the weights of its projections besides a plain matrix."""

    sizes: _Sizes
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    query_factor: int = 1  # 2 if a gate of the output is projected along with the queries

    def mixer(self, window_tokens: int = 0) -> _Mixer:
        kv = LayerSpec(
            kind=LayerKind.SLIDING_WINDOW if window_tokens else LayerKind.ATTENTION,
            num_kv_heads=self.num_kv_heads,
            k_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            window_tokens=window_tokens,
        )
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
        return kv, tuple(held)


_FLOOR: Final = 0
"""Default head size of families that divide the hidden size by the heads and drop the rest."""


def _attention(
    fields: ConfigFields,
    sizes: _Sizes,
    *,
    kv_heads: int | None = None,
    kv_heads_may_be_null: bool = True,
    head_dim: int | None = None,
    bias: bool | None = False,
    has_qkv_bias: bool = False,
    is_output_biased: bool = True,
    has_qk_norm: bool = False,
    has_sinks: bool = False,
) -> _Attention:
    """Read attention as most families describe it.

    Args:
        kv_heads: Default of ``num_key_value_heads``; None means as many as query heads.
        head_dim: Default of ``head_dim``; None means an even share of the hidden size.
        bias: Default of ``attention_bias``; None if the family has no such field.
        has_qkv_bias: Whether queries, keys and values have a bias whatever that field says.
        is_output_biased: Whether ``attention_bias`` also applies to the output projection.
    """
    num_kv_heads = fields.count(
        "num_key_value_heads",
        absent=sizes.num_heads if kv_heads is None else kv_heads,
        null=sizes.num_heads if kv_heads_may_be_null else REQUIRED,
    )
    if sizes.num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {sizes.num_heads}")
    share, rest = divmod(sizes.hidden_size, sizes.num_heads)
    if head_dim is None:
        size = fields.count("head_dim", absent=0, null=0)
        if not size and rest:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads, {sizes.num_heads}, or head_dim given")
        size = size or share
    else:
        size = fields.count("head_dim", absent=head_dim or share)
        if not size:
            raise fields.wrong("hidden_size", f"at least num_attention_heads, {sizes.num_heads}, or head_dim given")
    has_bias = bias is not None and fields.flag("attention_bias", absent=bias)
    return _Attention(
        sizes=sizes,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        has_qkv_bias=has_bias or has_qkv_bias,
        has_output_bias=has_bias and is_output_biased,
        has_qk_norm=has_qk_norm,
        has_sinks=has_sinks,
    )


def _mlp(hidden_size: int, intermediate_size: int, *, has_bias: bool = False) -> tuple[Weights, ...]:
    """Return a gated MLP: three matrices, sharded along its width."""
    gated = Weights(part=Part.MLP, units=intermediate_size, unit_params=3 * hidden_size + 2 * has_bias)
    return (gated, Weights(part=Part.OTHER, unit_params=hidden_size)) if has_bias else (gated,)


def _experts(hidden_size: int, num_experts: int, intermediate_size: int) -> tuple[Weights, ...]:
    """Return routed experts, each sharded along its width, and the router."""
    return (
        Weights(part=Part.EXPERTS, units=intermediate_size, unit_params=3 * hidden_size * num_experts),
        Weights(part=Part.OTHER, unit_params=hidden_size * num_experts),
    )


def _shape(
    fields: ConfigFields,
    sizes: _Sizes,
    mixers: Iterable[_Mixer],
    mlps: Iterable[tuple[Weights, ...]],
    *,
    num_norms: int = 2,
    is_tied: bool = False,
) -> ModelShape:
    """Put the layers between embeddings and head.

    Args:
        mixers, mlps: Those of each layer.
        num_norms: Norms of a layer.
        is_tied: Default of ``tie_word_embeddings``.
    """
    norms = Weights(part=Part.OTHER, unit_params=num_norms * sizes.hidden_size)
    embeddings = Weights(part=Part.OTHER, unit_params=sizes.vocab_size * sizes.hidden_size)
    head = Weights(part=Part.OTHER, units=sizes.vocab_size, unit_params=sizes.hidden_size)
    last_norm = Weights(part=Part.OTHER, unit_params=sizes.hidden_size)
    return ModelShape(
        architecture="",
        dtype=None,
        hidden_size=sizes.hidden_size,
        num_query_heads=sizes.num_heads,
        max_context_tokens=sizes.max_context_tokens,
        layers=tuple(LayerShape(kv=kv, weights=(*weights, *mlp, norms)) for (kv, weights), mlp in zip(mixers, mlps, strict=True)),
        first_stage=(embeddings,),
        last_stage=(last_norm,) if fields.flag("tie_word_embeddings", absent=is_tied) else (last_norm, head),
    )


_Windows = Callable[[ConfigFields, int], Sequence[int]]
"""(fields, number of layers) -> window of each layer in tokens, 0 for full attention."""


def _no_windows(fields: ConfigFields, num_layers: int) -> Sequence[int]:
    return (0,) * num_layers


def _one_window(fields: ConfigFields, num_layers: int, *, absent: int) -> Sequence[int]:
    return (fields.count("sliding_window", absent=absent, null=0),) * num_layers


def _used_window(fields: ConfigFields) -> int:
    """Return ``sliding_window``, which some Qwen models use only if ``use_sliding_window`` is set."""
    is_used = fields.flag("use_sliding_window", absent=False)
    return fields.count("sliding_window", absent=4096, null=0) if is_used else 0


def _qwen_moe_windows(fields: ConfigFields, num_layers: int) -> Sequence[int]:
    return (_used_window(fields),) * num_layers


def _qwen_windows(fields: ConfigFields, num_layers: int) -> Sequence[int]:
    """Without ``layer_types`` the window applies from ``max_window_layers`` on."""
    window = _used_window(fields)
    types = fields.layer_types(num_layers, (_FULL, _SLIDING))
    if types is None:
        first = fields.count("max_window_layers", absent=28, least=0) if window else num_layers
        types = tuple(_SLIDING if layer >= first else _FULL for layer in range(num_layers))
    return _windows_of(fields, types, window)


def _alternating_windows(fields: ConfigFields, num_layers: int, *, absent: int) -> Sequence[int]:
    types = fields.layer_types(num_layers, (_FULL, _SLIDING)) or _every(2, num_layers, _FULL, _SLIDING)
    return _windows_of(fields, types, fields.count("sliding_window", absent=absent, null=0))


def _gemma3_windows(fields: ConfigFields, num_layers: int) -> Sequence[int]:
    pattern = fields.count("sliding_window_pattern", absent=6)
    types = fields.layer_types(num_layers, (_FULL, _SLIDING)) or _every(pattern, num_layers, _FULL, _SLIDING)
    window = fields.count("sliding_window", absent=4096, null=0)
    if window and fields.flag("use_bidirectional_attention", absent=False):
        window = window // 2 + 1
    return _windows_of(fields, types, window)


def _windows_of(fields: ConfigFields, types: Sequence[str], window_tokens: int) -> Sequence[int]:
    if not window_tokens and _SLIDING in types:
        raise fields.wrong("sliding_window", "a positive integer where layer_types has sliding_attention")
    return [window_tokens if one == _SLIDING else 0 for one in types]


def _every(step: int, num_layers: int, nth: str, other: str) -> tuple[str, ...]:
    """Return `nth` for every `step`-th layer, beginning with layer `step` - 1, and `other` for the rest."""
    return tuple(other if (layer + 1) % step else nth for layer in range(num_layers))


_Mlps = Callable[[ConfigFields, _Sizes], Sequence[tuple[Weights, ...]]]
"""(fields, sizes) -> weights of each layer's MLP or experts."""


def _dense_mlps(fields: ConfigFields, sizes: _Sizes) -> Sequence[tuple[Weights, ...]]:
    return (_mlp(sizes.hidden_size, sizes.intermediate_size),) * sizes.num_layers


def _llama_mlps(fields: ConfigFields, sizes: _Sizes) -> Sequence[tuple[Weights, ...]]:
    has_bias = fields.flag("mlp_bias", absent=False)
    return (_mlp(sizes.hidden_size, sizes.intermediate_size, has_bias=has_bias),) * sizes.num_layers


def _mixtral_mlps(fields: ConfigFields, sizes: _Sizes) -> Sequence[tuple[Weights, ...]]:
    num_experts = fields.count("num_local_experts", absent=8)
    return (_experts(sizes.hidden_size, num_experts, sizes.intermediate_size),) * sizes.num_layers


def _gpt_oss_mlps(fields: ConfigFields, sizes: _Sizes) -> Sequence[tuple[Weights, ...]]:
    hidden, num_experts = sizes.hidden_size, _num_experts(fields, "num_local_experts", "num_experts", absent=128)
    biases = (
        Weights(part=Part.OTHER, units=sizes.intermediate_size, unit_params=2 * num_experts),
        Weights(part=Part.OTHER, unit_params=hidden * num_experts + num_experts),
    )
    return ((*_experts(hidden, num_experts, sizes.intermediate_size), *biases),) * sizes.num_layers


def _num_experts(fields: ConfigFields, name: str, other_name: str, *, absent: int, least: int = 1) -> int:
    """Return the number of experts, for which the class has two names."""
    return fields.count(name if name in fields.values else other_name, absent=absent, least=least)


def _qwen3_moe_mlps(fields: ConfigFields, sizes: _Sizes) -> Sequence[tuple[Weights, ...]]:
    num_experts = _num_experts(fields, "num_experts", "num_local_experts", absent=128, least=0)
    experts = _experts(sizes.hidden_size, num_experts, fields.count("moe_intermediate_size"))
    return _sparse_mlps(fields, sizes, num_experts, experts)


def _qwen3_next_mlps(fields: ConfigFields, sizes: _Sizes) -> Sequence[tuple[Weights, ...]]:
    hidden, num_experts = sizes.hidden_size, fields.count("num_experts", absent=512, least=0)
    experts = _experts(hidden, num_experts, fields.count("moe_intermediate_size", absent=512))
    shared = _mlp(hidden, fields.count("shared_expert_intermediate_size", absent=512))
    gate = Weights(part=Part.OTHER, unit_params=hidden)
    return _sparse_mlps(fields, sizes, num_experts, (*experts, *shared, gate))


def _sparse_mlps(
    fields: ConfigFields, sizes: _Sizes, num_experts: int, experts: tuple[Weights, ...]
) -> Sequence[tuple[Weights, ...]]:
    """Give every ``decoder_sparse_step``-th layer experts, if there are any, except those that ``mlp_only_layers`` names."""
    step = fields.count("decoder_sparse_step", absent=1)
    plain = fields.layer_numbers("mlp_only_layers")
    mlp = _mlp(sizes.hidden_size, sizes.intermediate_size)
    return [
        experts if num_experts and layer not in plain and (layer + 1) % step == 0 else mlp for layer in range(sizes.num_layers)
    ]


def _read(
    fields: ConfigFields,
    *,
    sizes_absent: Mapping[str, int] | None = None,
    attention: Callable[[ConfigFields, _Sizes], _Attention] = _attention,
    windows: _Windows = _no_windows,
    mlps: _Mlps = _dense_mlps,
    num_norms: int = 2,
    is_tied: bool = False,
) -> ModelShape:
    """Read a model in which every layer has the same attention, except for its window."""
    sizes = _sizes(fields, sizes_absent)
    own = attention(fields, sizes)
    mixers = map(own.mixer, windows(fields, sizes.num_layers))
    return _shape(fields, sizes, mixers, mlps(fields, sizes), num_norms=num_norms, is_tied=is_tied)


def _chatglm(fields: ConfigFields) -> ModelShape:
    """Read GLM-4-9B under the names of its first release. Source: its configuration_chatglm.py."""
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
    mlp = _mlp(sizes.hidden_size, sizes.intermediate_size, has_bias=has_bias)
    return _shape(fields, sizes, [attention.mixer()] * sizes.num_layers, [mlp] * sizes.num_layers)


def _mla(fields: ConfigFields, *, num_shared_absent: int, has_router_bias: bool) -> ModelShape:
    """Read DeepSeek-V2 or V3. A token's KV is one latent and one rotary part, whatever the number of heads."""
    sizes = _sizes(fields)
    hidden = sizes.hidden_size
    kv_rank, rope_dim = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope_dim, v_dim = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query_rank = fields.count("q_lora_rank", absent=1536, null=0)
    has_bias = fields.flag("attention_bias", absent=False)
    latents = hidden * (kv_rank + rope_dim) + has_bias * (kv_rank + rope_dim)
    latents += (hidden * query_rank + has_bias * query_rank) if query_rank else 0
    per_head = (query_rank or hidden) * (nope_dim + rope_dim) + kv_rank * (nope_dim + v_dim) + v_dim * hidden
    attention = (
        Weights(part=Part.ATTENTION, unit_params=latents),
        Weights(part=Part.ATTENTION, units=sizes.num_heads, unit_params=per_head),
        Weights(part=Part.OTHER, unit_params=kv_rank + query_rank + has_bias * hidden),
    )
    num_dense = fields.count("first_k_dense_replace", absent=3 if has_router_bias else 0, null=0, least=0)
    num_experts = fields.count("n_routed_experts", absent=256 if has_router_bias else 64)
    expert_size = fields.count("moe_intermediate_size")
    shared = fields.count("n_shared_experts", absent=num_shared_absent) * expert_size
    sparse, dense = (*_experts(hidden, num_experts, expert_size), *_mlp(hidden, shared)), _mlp(hidden, sizes.intermediate_size)
    if has_router_bias:
        sparse += (Weights(part=Part.OTHER, unit_params=num_experts),)
    kv = LayerSpec(kind=LayerKind.MLA, num_kv_heads=1, k_head_dim=kv_rank + rope_dim, v_head_dim=0)
    mlps = [dense if layer < num_dense else sparse for layer in range(sizes.num_layers)]
    shape = _shape(fields, sizes, [(kv, attention)] * sizes.num_layers, mlps)
    num_draft = fields.count("num_nextn_predict_layers", absent=0, null=0, least=0, most=MAX_LAYERS)
    draft = (*shape.layers[-1].weights, Weights(part=Part.OTHER, unit_params=2 * hidden**2 + 3 * hidden))
    copies = 2 * Weights(part=Part.OTHER, unit_params=sizes.vocab_size * hidden).num_params
    return replace(
        shape,
        draft=draft * num_draft,
        draft_copies=(Weights(part=Part.OTHER, unit_params=copies),) * num_draft,
    )


def _qwen3_next(fields: ConfigFields) -> ModelShape:
    sizes = _sizes(fields)
    attention = _attention(fields, sizes, kv_heads=2, kv_heads_may_be_null=False, head_dim=256, has_qk_norm=True)
    interval = fields.count("full_attention_interval", absent=4)
    types = fields.layer_types(sizes.num_layers, (_FULL, _LINEAR)) or _every(interval, sizes.num_layers, _FULL, _LINEAR)
    mixers = {_FULL: replace(attention, query_factor=2).mixer(), _LINEAR: _delta_net(fields, sizes.hidden_size)}
    return _shape(fields, sizes, [mixers[kind] for kind in types], _qwen3_next_mlps(fields, sizes))


def _delta_net(fields: ConfigFields, hidden_size: int) -> _Mixer:
    """Read a gated delta net, by key head with the value heads that share it.

    transformers keeps, per request, the recurrent state ``[value head, key dim, value dim]`` and the last
    ``linear_conv_kernel_dim`` columns of the convolution's input. The former is always in float32, so both are.
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
    # Inputs: queries, keys, values, gates z, b and a. Output: the values.
    matrices = hidden_size * (convolved + 2 * shared_by * value_dim + 2 * shared_by)
    weights = (
        Weights(part=Part.ATTENTION, units=num_keys, unit_params=matrices),
        Weights(part=Part.OTHER, units=num_keys, unit_params=convolved * window + 2 * shared_by),
        Weights(part=Part.OTHER, unit_params=value_dim),
    )
    return state, weights


_GEMMA3_SIZES: Final = {
    "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "intermediate_size": 9216, "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}  # fmt: skip
_QWEN2: Final = partial(_attention, kv_heads=32, head_dim=_FLOOR, bias=None, has_qkv_bias=True)
_QWEN3: Final = partial(_attention, kv_heads=32, head_dim=128, has_qk_norm=True)
_QWEN3_MOE: Final = partial(_attention, kv_heads=4, kv_heads_may_be_null=False, head_dim=_FLOOR, has_qk_norm=True)
_MISTRAL: Final = partial(_attention, kv_heads=8, bias=None)
_GEMMA: Final = partial(_attention, kv_heads=4, kv_heads_may_be_null=False, head_dim=256)
_GLM: Final = partial(_attention, kv_heads=2, head_dim=128, bias=True, is_output_biased=False)
_GPT_OSS: Final = partial(_attention, kv_heads=8, head_dim=64, bias=True, has_sinks=True)
_read_gemma: Final = partial(_read, num_norms=4, is_tied=True)

READERS: Final[Mapping[str, Callable[[ConfigFields], ModelShape]]] = {
    "llama": partial(_read, mlps=_llama_mlps),
    "qwen2": partial(_read, attention=_QWEN2, windows=_qwen_windows),
    "qwen3": partial(_read, attention=_QWEN3, windows=_qwen_windows),
    "qwen3_moe": partial(_read, attention=_QWEN3_MOE, windows=_qwen_moe_windows, mlps=_qwen3_moe_mlps),
    "qwen3_next": _qwen3_next,
    "mistral": partial(_read, attention=_MISTRAL, windows=partial(_one_window, absent=4096)),
    "mixtral": partial(_read, attention=_MISTRAL, windows=partial(_one_window, absent=0), mlps=_mixtral_mlps),
    "gemma2": partial(_read_gemma, attention=_GEMMA, windows=partial(_alternating_windows, absent=4096)),
    "gemma3_text": partial(
        _read_gemma, attention=partial(_GEMMA, has_qk_norm=True), windows=_gemma3_windows, sizes_absent=_GEMMA3_SIZES
    ),
    "glm": partial(_read, attention=_GLM),
    "glm4": partial(_read, attention=partial(_GLM, kv_heads_may_be_null=False), num_norms=4),
    "chatglm": _chatglm,
    "gpt_oss": partial(_read, attention=_GPT_OSS, windows=partial(_alternating_windows, absent=128), mlps=_gpt_oss_mlps),
    "deepseek_v2": partial(_mla, num_shared_absent=2, has_router_bias=False),
    "deepseek_v3": partial(_mla, num_shared_absent=1, has_router_bias=True),
}
"""Model type -> function that makes the shape, except for the fields that `read_model_shape` adds for all families."""

MODEL_TYPES: Final = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "ChatGLMModel": "chatglm",
    "ChatGLMForConditionalGeneration": "chatglm",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Architecture -> model type, which is the only name in some nested configurations."""
