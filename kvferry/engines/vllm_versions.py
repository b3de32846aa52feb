"""Compare the interfaces of an installed vLLM with those that kvferry's connectors were written for:

    python -m kvferry.engines.vllm_versions            # list the differences; exit status 1 if there are any
    python -m kvferry.engines.vllm_versions --write    # record those of the installed vLLM

Run it where vLLM is installed, for example in the environment of `make test-vllm`. A difference is not always an error: a new
method of a base class can be one that a connector should implement, and kvferry refuses layers of a new class of KV cache specs.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

RECORDED: Final = Path(__file__).with_name("vllm_interface.json")

ALL: Final = ("*",)
"""All fields, members and methods that a class defines itself. Other names can follow."""

_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector"
_SCHEDULER: Final = "vllm.v1.core.sched"
_SPECS: Final = "vllm.v1.kv_cache_interface"
_OFFLOAD: Final = "vllm.v1.kv_offload"
_LAYERS: Final = "vllm.model_executor.layers.attention"

USED: Final[dict[str, tuple[str, ...]]] = {
    # Base classes and messages of the transfer connector
    f"{_CONNECTOR}.v1.base:KVConnectorBase_V1": (*ALL, "_vllm_config", "_kv_transfer_config", "_kv_cache_config"),
    f"{_CONNECTOR}.v1.base:SupportsHMA": ALL,
    f"{_CONNECTOR}.v1.base:KVConnectorTransferResults": ALL,
    f"{_CONNECTOR}.v1.base:KVConnectorMetadata": ALL,
    f"{_CONNECTOR}.v1.base:KVConnectorHandshakeMetadata": ALL,
    f"{_CONNECTOR}.v1.base:KVConnectorRole": ALL,
    f"{_CONNECTOR}.factory:KVConnectorFactory": ("_registry", "register_connector"),
    "vllm.v1.outputs:KVConnectorOutput": ALL,
    # Requests and steps
    "vllm.v1.request:Request": (
        "request_id", "prompt_token_ids", "output_token_ids", "num_computed_tokens", "kv_transfer_params", "mm_features",
        "prompt_embeds", "status", "sampling_params", "max_tokens", "use_structured_output", "resumable", "lora_request",
        "skip_reading_prefix_cache", "trace_headers", "client_index", "stop_reason", "get_finished_reason", "record_event",
        "take_events", "take_prefill_stats", "_all_token_ids", "num_prompt_tokens",
    ),
    "vllm.v1.request:RequestStatus": ALL,
    "vllm.lora.request:LoRARequest": ALL,
    f"{_SCHEDULER}.output:SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
    ),
    f"{_SCHEDULER}.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    f"{_SCHEDULER}.output:CachedRequestData": ("req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids"),
    # FirstTokenScheduler and the blocks of windows
    f"{_SCHEDULER}.scheduler:Scheduler": (
        "__init__", "update_from_output", "finish_requests", "_update_from_kv_xfer_finished", "_update_request_with_output",
        "connector", "requests", "kv_cache_manager", "log_stats", "num_spec_tokens", "use_v2_model_runner", "scheduler_config",
        "parallel_config", "return_sampling_mask", "aux_output_connector",
    ),
    f"{_SCHEDULER}.async_scheduler:AsyncScheduler": ALL,
    "vllm.v1.engine:EngineCoreOutput": ALL,
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine:EngineCoreEventType": ALL,
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "allocate_slots", "cache_blocks", "get_blocks", "estimate_cached_tokens", "coordinator", "block_pool",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": ("num_cached_block",),
    "vllm.v1.core.block_pool:BlockPool": ("touch", "free_blocks"),
    # Configuration
    "vllm.config:VllmConfig": (
        "model_config", "parallel_config", "cache_config", "scheduler_config", "compilation_config", "kv_transfer_config",
        "lora_config", "speculative_config", "attention_config", "num_speculative_tokens", "use_v2_model_runner", "__post_init__",
    ),
    "vllm.config:ModelConfig": (
        "model", "dtype", "use_mla", "get_total_num_kv_heads", "get_layers_start_end_indices", "get_vocab_size", "max_model_len",
        "hf_config", "hf_text_config",
        "hf_overrides", "quantization", "revision", "runner_type", "is_encoder_decoder", "architecture",
    ),
    "vllm.config:ParallelConfig": (
        "tensor_parallel_size", "pipeline_parallel_size", "rank", "decode_context_parallel_size",
        "prefill_context_parallel_size", "cp_kv_cache_interleave_size", "distributed_executor_backend", "nnodes_within_dp",
        "world_size", "use_ubatching",
        "data_parallel_size", "data_parallel_index", "data_parallel_rank_local", "local_engines_only",
    ),
    "vllm.config:CacheConfig": ("cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
    "vllm.config:SchedulerConfig": ("max_num_batched_tokens", "async_scheduling", "scheduler_cls"),
    "vllm.config:CompilationConfig": ("static_forward_context",),
    "vllm.config:KVTransferConfig": (
        "kv_role", "engine_id", "kv_connector_extra_config", "kv_load_failure_policy", "kv_connector", "kv_connector_module_path",
        "is_kv_consumer", "__post_init__",
    ),
    "vllm.config:LoRAConfig": ALL,
    "vllm.config:SpeculativeConfig": ("method", "draft_model_config", "parallel_drafting", "use_multi_module_mtp"),
    "vllm.config.attention:AttentionConfig": ("resolve_indexer_kv_dtype",),
    # The KV cache; the other classes of specs are found in their module
    f"{_SPECS}:AttentionSpec": (
        "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "num_head_slots",
        "state_content_bytes", "tokens_per_state",
    ),
    f"{_SPECS}:SlidingWindowSpec": ("sliding_window",),
    f"{_SPECS}:MLAAttentionSpec": ("model_version", "cache_role", "cache_dtype_str"),
    f"{_SPECS}:SlidingWindowMLASpec": ("model_version", "cache_dtype_str", "bounded_replay"),
    "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache": ("get_attn_backend", "uses_shuffled_layout"),
    f"{_SPECS}:UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    f"{_SPECS}:KVCacheConfig": ALL,
    f"{_SPECS}:KVCacheGroupSpec": ALL,
    f"{_SPECS}:KVCacheTensor": ALL,
    f"{_SPECS}:KVQuantMode": ALL,
    "vllm.v1.attention.backends.registry:MambaAttentionBackendEnum": ALL,
    f"{_LAYERS}.attention:Attention": (
        "get_attn_backend", "kv_sharing_target_layer_name", "_k_scale", "_k_scale_float", "_v_scale_float",
    ),
    f"{_LAYERS}.mla_attention:MLAAttention": ("get_attn_backend",),
    # The store below vLLM's offloading
    f"{_CONNECTOR}.v1.offloading_connector:OffloadingConnector": (*ALL, "connector_scheduler", "connector_worker"),
    f"{_CONNECTOR}.v1.offloading.metrics:OffloadingConnectorStats": (
        "increase_counter", "observe_histogram", "set_gauge", "is_empty",
    ),
    f"{_OFFLOAD}.base:OffloadingWorker": ALL,
    f"{_OFFLOAD}.base:ReqContext": ALL,
    f"{_OFFLOAD}.base:LookupResult": ALL,
    f"{_OFFLOAD}.base:Medium": ALL,
    f"{_OFFLOAD}.base:TransferResult": ALL,
    f"{_OFFLOAD}.base:RequestOffloadingContext": ALL,
    f"{_OFFLOAD}.base:OffloadingMetricMetadata": ALL,
    f"{_OFFLOAD}.base:OffloadingCounterMetadata": ALL,
    f"{_OFFLOAD}.base:OffloadingGaugeMetadata": ALL,
    f"{_OFFLOAD}.base:OffloadingHistogramMetadata": ALL,
    f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion": (
        "__init__", "create_next_canonical_view", "create_next_worker_view", "create_kv_memoryview", "cleanup", "mmap_path",
        "_creator",
    ),
    f"{_OFFLOAD}.tiering.base:SecondaryTierManager": ALL,
    f"{_OFFLOAD}.tiering.base:TransferJob": ALL,
    f"{_OFFLOAD}.tiering.base:JobResult": ALL,
    f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager": ("secondary_tiers",),
    f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec": ("__init__", "get_worker", "_validate_canonical_refs", "_worker"),
    "vllm.platforms:current_platform": ("is_cpu", "is_cuda_alike"),
}  # fmt: skip
"""The names of vLLM that the connectors import, override, call or read. Private names are included."""


def installed_interface() -> dict[str, str]:
    """Return the interface of the installed vLLM, as name -> kind and signature. Names that it lacks are absent."""
    found: dict[str, str] = {}
    for path, names in USED.items():
        found |= _described(path, names)
    specs = pkgutil.resolve_name(_SPECS)
    for name, value in vars(specs).items():
        if inspect.isclass(value) and issubclass(value, specs.KVCacheSpec) and value.__module__ == _SPECS:
            found |= {f"{_SPECS}:{name}": "class"} | {f"{_SPECS}:{name}.{one}": text for one, text in _fields_of(value).items()}
    return dict(sorted(found.items()))


def differences(recorded: Mapping[str, str], installed: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each name that was removed, added or changed."""
    for name in sorted(recorded.keys() | installed.keys()):
        before, now = recorded.get(name), installed.get(name)
        if now is None:
            yield f"- {name}: {before}"
        elif before is None:
            yield f"+ {name}: {now}"
        elif before != now:
            yield f"~ {name}: {before} -> {now}"


def _described(path: str, names: tuple[str, ...]) -> dict[str, str]:
    try:
        value = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return {}
    kind: Any = value if inspect.isclass(value) else type(value)
    found = {path: "class" if kind is value else "object"}
    members = {name: text for name in names if name not in ALL and (text := _member(kind, name))}
    if names[: len(ALL)] == ALL:
        members |= _fields_of(kind) | {name: text for name in vars(kind) if (text := _method(kind, name))}
    return found | {f"{path}.{name}": text for name, text in members.items()}


def _fields_of(kind: Any) -> dict[str, str]:
    """Return the fields of a dataclass or struct, or the members of an enumeration."""
    if issubclass(kind, enum.Enum):
        return {name: "member" for name in kind.__members__}
    names = (*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "__struct_fields__", ()), *getattr(kind, "_fields", ()))
    return dict.fromkeys(names, "field")


def _member(kind: Any, name: str) -> str:
    """Describe a field, a method, or an attribute that the class's module sets; empty if there is none."""
    if name in _fields_of(kind):
        return "field"
    if text := _method(kind, name):
        return text
    if hasattr(kind, name) or any(name in getattr(one, "__annotations__", {}) for one in kind.__mro__):
        return "attribute"
    modules = {one.__module__ for one in kind.__mro__ if one.__module__.startswith("vllm.")}
    sources = (inspect.getsource(pkgutil.resolve_name(module)) for module in modules)
    setting = re.compile(rf"\w\.{name}\b[^=\n]*=[^=]|register_buffer\(.{name}\b")
    return "attribute" if any(setting.search(source) for source in sources) else ""


def _method(kind: Any, name: str) -> str:
    """Return the parameters of a method that a caller or an override must know; empty if it is none."""
    value = inspect.getattr_static(kind, name, None)
    if isinstance(value, property):
        return "property"
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    is_dunder = name.startswith("__") and name != "__init__"
    if not inspect.isfunction(function) or is_dunder:
        return ""
    parameters = inspect.signature(function).parameters.values()
    plain = [one.replace(annotation=one.empty, default=one.default if one.default is one.empty else ...) for one in parameters]
    return f"method{inspect.Signature(plain)}".replace("=Ellipsis", "=...")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare an installed vLLM with the one that kvferry was written for.")
    parser.add_argument("--write", action="store_true", help="record the interface of the installed vLLM")
    options = parser.parse_args(arguments)
    from vllm import __version__

    installed = installed_interface()
    if options.write:
        RECORDED.write_text(json.dumps({"vllm": __version__, "interface": installed}, indent=1) + "\n", encoding="utf-8")
        return 0
    recorded = read_recorded()
    lines = list(differences(recorded["interface"], installed))
    print("\n".join([*lines, f"vLLM {__version__}: {len(lines)} differences from {recorded['vllm']}"]))
    return int(bool(lines))


def read_recorded() -> dict[str, Any]:
    """Return the version of vLLM that was recorded, and its interface."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
