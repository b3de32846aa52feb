"""Read vLLM's description of its KV cache as plain values, on the scheduler or on a worker.

This file reads attributes of the objects that vLLM passes to a connector, and imports nothing of vLLM. Names are those of vLLM
0.32 and 0.33. `kvferry.engines.vllm_layout` interprets the facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvferry.engines.vllm_states import STATE_SPEC, StateFacts
from planner.model_shape import read_model_shape
from transfer.errors import ConfigError
from transfer.layout import DType, LayerSpec

_METHODS_WITH_LAYERS: Final = ("eagle", "eagle3", "mtp", "draft_model")
_METHODS_WITHOUT_LAYERS: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding whose draft model keeps KV, and methods without such layers."""

INDEXER_ROWS: Final = "indexer_fp8"
"""Format of an indexer's rows: 128 values of 8 bits, and their scale. A block has the values of all tokens before the scales."""

ROW_FORMATS: Final = ("fp8_ds_mla", "nvfp4_ds_mla", "fp8_per_token_head", "int8_per_token_head", INDEXER_ROWS)

_INDEXER_BYTES: Final = (128, 4)
_SCALE_BYTES: Final = 4
_PER_HEAD_MODES: Final = ("FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD")

CHUNKED_SPEC: Final = "ChunkedLocalAttentionSpec"

_WINDOW_FIELDS: Final = {
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    CHUNKED_SPEC: "attention_chunk_size",
}
_DRAFT_MODULES: Final = frozenset({"draft_model", "mtp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer that keeps KV, on one rank.

    Args:
        name: Name of the attention module, for example ``model.layers.3.self_attn.attn``.
        group: Index of the layer's block table among those of a request.
        spec: Class name of the KV cache spec.
        block_size: Tokens of a block.
        num_kv_heads: KV heads of this rank; 0 for a layer without attention, such as a recurrent state.
        k_head_dim, v_head_dim: Elements per token and head; for a latent, all its elements and 0. Bytes if `row_format` is set.
        dtype: torch's name of the element type; ``uint8`` is possible for 8-bit floats.
        window_tokens: Window or chunk of a spec that drops earlier blocks; otherwise 0.
        quant_mode: vLLM's name of the quantisation; ``NONE`` if there is none.
        row_format: Name of the format of rows that have values and their scales; empty for elements of one type.
        is_packed_otherwise: Whether a block holds anything besides K and V, or such rows, of its tokens and heads.
        backend: vLLM's name of the attention backend; empty on the scheduler, which does not know it.
        isa: For attention on a CPU, the instruction set for which blocks are packed; otherwise empty.
        k_scale, v_scale: A stored 8-bit float times the scale is the value that the model computed.
        num_scales: Scales of K; more than 1 if each head has its own.
        is_draft: Whether the layer is one of the draft model of speculative decoding.
        is_dcp_sharded: Whether decode context parallelism, if it is on, divides the layer's tokens.
        state: Its recurrent state; None for attention.
    """

    name: str
    group: int
    spec: str
    block_size: int
    num_kv_heads: int = 0
    k_head_dim: int = 0
    v_head_dim: int = 0
    dtype: str = ""
    window_tokens: int = 0
    quant_mode: str = "NONE"
    row_format: str = ""
    is_packed_otherwise: bool = False
    backend: str = ""
    isa: str = ""
    k_scale: float = 1.0
    v_scale: float = 1.0
    num_scales: int = 1
    is_draft: bool = False
    is_dcp_sharded: bool = True
    state: StateFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """One of vLLM's KV cache groups, whose layers share a block table. All pipeline stages have all of them.

    Args:
        spec, block_size, window_tokens: As of `LayerFacts`.
    """

    spec: str
    block_size: int
    window_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """One rank of a vLLM instance; on the scheduler, the first rank.

    Args:
        stage_layers: Number of layers in each pipeline stage.
        model_dtype: Element type in which the model computes.
        cache_dtype: The setting ``--kv-cache-dtype``.
        cache_layout: vLLM's name of the order of layers, blocks, heads and tokens in memory, for example ``LBHNC``.
        total_num_kv_heads: KV heads of the whole model; 1 if it keeps latents.
        draft_num_kv_heads: The same of the draft model; 0 if no draft model keeps KV.
        num_blocks: Blocks of the cache, including the null block.
        has_prefix_caching: Whether blocks are kept for later prompts.
        is_consumer: Whether the instance receives KV: ``kv_role`` is not ``kv_producer``.
        features: Features in use that change the meaning or the place of KV, as name -> value.
        layers: Layers of this rank that keep KV, in the order of the groups.
        stage_tables: With pipeline stages, all block tables of a request: this stage can lack layers of some. Otherwise empty.
        shared_layers: Layers that use the KV of another one, as name -> name.
        model_layers: All layers by the model's configuration; empty if kvferry does not know its architecture.
        num_state_groups: Groups of B and C of Mamba-2 in the whole model; 0 if config.json has none.
        dcp_size: Decode context parallel degree; 1 if ranks keep all tokens of their heads.
        interleave_tokens: The setting ``--cp-kv-cache-interleave-size``. A worker's is final.
    """

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    stage_layers: tuple[int, ...]
    model_dtype: str
    cache_dtype: str
    cache_layout: str
    total_num_kv_heads: int
    num_blocks: int
    has_prefix_caching: bool
    is_consumer: bool
    features: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[LayerFacts, ...]
    stage_tables: tuple[TableFacts, ...] = ()
    shared_layers: Mapping[str, str] = field(default_factory=dict)
    draft_num_kv_heads: int = 0
    model_layers: tuple[LayerSpec, ...] = ()
    num_state_groups: int = 0
    dcp_size: int = 1
    interleave_tokens: int = 1

    @property
    def tables(self) -> dict[int, TableFacts]:
        """Block tables of a request by their index among vLLM's KV cache groups."""
        if self.stage_tables:
            return dict(enumerate(self.stage_tables))
        return {
            layer.group: TableFacts(spec=layer.spec, block_size=layer.block_size, window_tokens=layer.window_tokens)
            for layer in sorted(self.layers, key=lambda layer: layer.group)
        }


def read_facts(vllm_config: Any, kv_cache_config: Any) -> VllmFacts:
    """Return the facts of this process's rank.

    On a worker, call it in ``register_kv_caches``: backends, packing and scales are known once weights are loaded and caches
    allocated. On the scheduler they stay empty.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.

    Raises:
        ConfigError: The objects lack an attribute, because this vLLM has another version.
    """
    try:
        return _read(vllm_config, kv_cache_config)
    except AttributeError as error:
        raise ConfigError(f"this vLLM is not one that kvferry knows (0.32 and 0.33): {error}") from error


def _read(vllm_config: Any, kv_cache_config: Any) -> VllmFacts:
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    modules = vllm_config.compilation_config.static_forward_context
    tp_size, pp_size = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    rank, dcp_size = int(parallel.rank), int(parallel.decode_context_parallel_size)
    transfer = vllm_config.kv_transfer_config
    dtype = torch_name(model.dtype)
    draft = _draft_model(vllm_config)
    return VllmFacts(
        tp_size=tp_size,
        tp_rank=rank % tp_size,
        pp_size=pp_size,
        pp_rank=rank // tp_size % pp_size,
        stage_layers=tuple(_stage_layers(model, tp_size, pp_size)),
        model_dtype=dtype,
        cache_dtype=str(cache.cache_dtype),
        cache_layout=str(kv_cache_config.kv_cache_layout or ""),
        total_num_kv_heads=_num_kv_heads(model),
        num_blocks=int(kv_cache_config.num_blocks),
        has_prefix_caching=bool(cache.enable_prefix_caching),
        is_consumer=transfer is None or transfer.kv_role != "kv_producer",
        features=dict(_features(vllm_config)),
        layers=tuple(
            _layer(name, group, spec, modules.get(name), vllm_config, is_draft=draft is not None and _is_draft(name, model))
            for group, of in enumerate(kv_cache_config.kv_cache_groups)
            for name, spec in _specs(of)
        ),
        stage_tables=tuple(_table(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups) if pp_size > 1 else (),
        shared_layers={
            name: target for name, module in modules.items() if (target := getattr(module, "kv_sharing_target_layer_name", None))
        },
        draft_num_kv_heads=0 if draft is None else _num_kv_heads(draft),
        model_layers=_model_layers(model, dtype),
        num_state_groups=_num_state_groups(model),
        dcp_size=dcp_size,
        interleave_tokens=int(parallel.cp_kv_cache_interleave_size) if dcp_size > 1 else 1,
    )


def model_fields(vllm_config: Any) -> dict[str, str]:
    """Return the fields of the model that must be equal on both sides; see `kvferry.engines.model_identity`.

    They equal an embedded node's of the same directory, unless vLLM's settings change the model. Such settings are
    ``--hf-overrides``, a quantisation that config.json does not name, and ``--enable-lora``.

    Raises:
        ConfigError: The model's directory is missing or damaged.
    """
    from kvferry.engines import model_identity  # imports transformers

    model = vllm_config.model_config
    is_stored_quantised = getattr(model.hf_config, "quantization_config", None) is not None
    changes = {
        "hf_overrides": model.hf_overrides if callable(model.hf_overrides) else json.dumps(model.hf_overrides, sort_keys=True),
        "quantization": None if is_stored_quantised else model.quantization,
        "revision": None if Path(model.model).is_dir() else model.revision,
        "lora": _lora_settings(vllm_config.lora_config),
    }
    fields = model_identity.model_fields(str(model.model), changes=changes | _draft_settings(vllm_config))
    draft = _draft_model(vllm_config)
    if draft is not None and draft.model != model.model:  # MTP layers are part of the model's own weights
        own = model_identity.model_fields(str(draft.model), revision=draft.revision)
        fields |= {f"draft.{name}": value for name, value in own.items()}
    return fields


def _draft_model(vllm_config: Any) -> Any:
    """Return the configuration of the draft model whose layers keep KV; None if there is none."""
    speculative = vllm_config.speculative_config
    return speculative.draft_model_config if speculative is not None and speculative.method in _METHODS_WITH_LAYERS else None


def _draft_settings(vllm_config: Any) -> dict[str, object]:
    """Return the settings of speculative decoding that determine the KV of draft layers; none if no such layers exist."""
    draft, speculative = _draft_model(vllm_config), vllm_config.speculative_config
    if draft is None:
        return {}
    settings = {
        "method": speculative.method,
        "parallel_drafting": speculative.parallel_drafting,
        "quantization": draft.quantization,
    }
    return {"speculative_config": json.dumps({name: value for name, value in settings.items() if value}, sort_keys=True)}


def _is_draft(name: str, model: Any) -> bool:
    """Return whether a layer belongs to the draft model. vLLM names it after other modules, or numbers it behind the model's."""
    parts = name.split(".")
    num_layers = int(model.hf_text_config.num_hidden_layers)
    return not _DRAFT_MODULES.isdisjoint(parts) or any(part.isdecimal() and int(part) >= num_layers for part in parts)


def _num_kv_heads(model: Any) -> int:
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def _lora_settings(lora: Any) -> str | None:
    """Return the settings that determine the KV of a prompt with an adapter; None means that adapters are off.

    An instance without adapters, and each one of an earlier release, does not compare adapters. So it differs in this field.
    """
    if lora is None:
        return None
    settings = {
        "dtype": torch_name(lora.lora_dtype),
        "target_modules": None if lora.target_modules is None else sorted(lora.target_modules),
        "shared_experts": bool(lora.enable_moe_shared_loras),
        "mixed_experts": bool(lora.enable_mixed_moe_lora_format),
    }
    return json.dumps(settings, sort_keys=True)


def torch_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _stage_layers(model: Any, tp_size: int, pp_size: int) -> Iterator[int]:
    for stage in range(pp_size):
        place = SimpleNamespace(rank=stage * tp_size, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
        begin, end = model.get_layers_start_end_indices(place)
        yield int(end) - int(begin)


def _specs(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield each layer of a group with its spec. Most groups have one spec for all layers."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    for name in group.layer_names:
        yield str(name), own.get(name, group.kv_cache_spec)


def _table(spec: Any) -> TableFacts:
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    return TableFacts(spec=type(spec).__name__, block_size=int(spec.block_size), window_tokens=_window_tokens(spec))


def _window_tokens(spec: Any) -> int:
    field_name = _WINDOW_FIELDS.get(type(spec).__name__)
    return 0 if field_name is None else int(getattr(spec, field_name))


def _layer(name: str, group: int, spec: Any, module: Any, vllm_config: Any, *, is_draft: bool) -> LayerFacts:
    kind = type(spec).__name__
    if not hasattr(spec, "head_size"):
        state = _state(spec) if kind == STATE_SPEC else None  # others are rejected by their class
        return LayerFacts(
            name=name,
            group=group,
            spec=kind,
            block_size=int(spec.block_size),
            is_draft=is_draft,
            is_dcp_sharded=bool(getattr(spec, "dcp_sharded", False)),
            state=state,
        )
    row_format, k_dim, v_dim = _rows(spec, vllm_config)
    is_known = row_format or (spec.state_content_bytes is None and getattr(spec, "cache_role", "sparse") == "sparse")
    packings = (spec.num_head_slots, getattr(spec, "model_version", None))
    return LayerFacts(
        name=name,
        group=group,
        spec=kind,
        block_size=int(spec.block_size),
        num_kv_heads=int(spec.num_kv_heads),
        k_head_dim=k_dim,
        v_head_dim=v_dim,
        dtype=torch_name(spec.dtype),
        window_tokens=_window_tokens(spec),
        quant_mode=str(spec.kv_quant_mode.name),
        row_format=row_format,
        is_packed_otherwise=not is_known
        or any(value is not None for value in packings)
        or spec.tokens_per_state != 1
        or bool(getattr(spec, "bounded_replay", False))
        or bool(getattr(module, "uses_shuffled_layout", False)),
        backend="" if module is None else str(module.get_attn_backend().get_name()),
        isa=str(getattr(module, "isa", "")),
        k_scale=float(getattr(module, "_k_scale_float", 1.0)),
        v_scale=float(getattr(module, "_v_scale_float", 1.0)),
        num_scales=int(module._k_scale.numel()) if hasattr(module, "_k_scale") else 1,
        is_draft=is_draft,
        is_dcp_sharded=bool(getattr(spec, "dcp_sharded", False)),
    )


def _rows(spec: Any, vllm_config: Any) -> tuple[str, int, int]:
    """Return the format of the rows, empty if they are elements of one type, and their `k_head_dim` and `v_head_dim`."""
    k_dim, v_dim = int(spec.head_size), int(spec.head_size_v)
    content = spec.state_content_bytes
    if getattr(spec, "cache_role", "sparse") == "indexer":
        if k_dim == sum(_INDEXER_BYTES) and vllm_config.attention_config.resolve_indexer_kv_dtype("fp8") == "fp8":
            return INDEXER_ROWS, *_INDEXER_BYTES
    elif content is not None and getattr(spec, "cache_dtype_str", None) in ROW_FORMATS:
        return str(spec.cache_dtype_str), int(content), 0
    elif spec.kv_quant_mode.name in _PER_HEAD_MODES and k_dim == v_dim and content == 2 * (k_dim + _SCALE_BYTES):
        return spec.kv_quant_mode.name.lower(), content // 2, content // 2
    return "", k_dim, v_dim


def _state(spec: Any) -> StateFacts:
    return StateFacts(
        kind=str(spec.mamba_type.name),
        shapes=tuple(tuple(int(size) for size in shape) for shape in spec.shapes),
        dtypes=tuple(torch_name(dtype) for dtype in spec.dtypes),
        is_replicated=bool(spec.tp_replicated),
        num_draft_blocks=int(spec.num_speculative_blocks),
    )


def _num_state_groups(model: Any) -> int:
    """Read the groups of B and C from the configuration, because a spec has those of one rank."""
    config = model.hf_text_config
    names = ("mamba_n_groups", "mamba_ngroups", "n_groups")  # Bamba, Granite 4, Falcon-H1; Zamba2; Nemotron-H
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def _features(vllm_config: Any) -> Iterator[tuple[str, str]]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if (speculative := vllm_config.speculative_config) is not None:
        yield from _speculative_features(speculative, int(parallel.pipeline_parallel_size))
    if (size := int(parallel.prefill_context_parallel_size)) != 1:
        yield "prefill_context_parallel_size", str(size)
    if model.runner_type != "generate":
        yield "runner", str(model.runner_type)
    if model.is_encoder_decoder:
        yield "encoder-decoder model", str(model.architecture)


def _speculative_features(speculative: Any, pp_size: int) -> Iterator[tuple[str, str]]:
    method = str(speculative.method)
    if method not in (*_METHODS_WITH_LAYERS, *_METHODS_WITHOUT_LAYERS):
        known = ", ".join((*_METHODS_WITH_LAYERS, *_METHODS_WITHOUT_LAYERS))
        yield "speculative decoding", f"{method}; use {known}"
    elif pp_size > 1:  # on the first stages, model runner V1 does not call the connector's wait_for_save
        yield "speculative decoding with pipeline stages", f"{method}; use pipeline_parallel_size 1"
    elif speculative.use_multi_module_mtp():  # a module's KV of the prompt's last tokens depends on tokens that were not verified
        yield "speculative decoding with several MTP modules", f"{method}; use num_speculative_tokens 1"


def _model_layers(model: Any, dtype: str) -> tuple[LayerSpec, ...]:
    """Read the layers from the configuration, because a stage does not see the others and a merged spec has no windows."""
    try:
        config = model.hf_config.to_dict()
        config.pop("quantization_config", None)  # changes the weights, not the KV
        return read_model_shape(config).layout(DType(dtype)).layers
    except (ConfigError, ValueError):
        return ()
