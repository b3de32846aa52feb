"""The flags of `kvferry plan`, and the plan that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

from kvferry.plan.device import Device, detect_device, given_device
from planner.model_directory import ModelDirectory
from planner.model_parts import MODEL_DTYPES
from planner.plan import MemoryPlan, PlanInputs, make_plan
from planner.plan_inputs import MB, Policy, Role
from planner.workspace import Strategy, XAttention
from transfer.errors import ConfigError
from transfer.layer_groups import DECODE_STEPS_IN_FLIGHT, PREFILL_STEPS_IN_FLIGHT, GroupKind
from transfer.layout import DType

_LARGEST_GIB: Final = 2048
"""The hint for a size without unit suggests GiB below this number, and MiB, the unit of nvidia-smi, above."""
_TIERS: Final = {
    "chunk_tokens": Role.PREFILL,
    "staging": Role.PREFILL,
    "ring": Role.DECODE,
    "cuda_graph_max_bs": Role.DECODE,
    "cuda_graph_bs": Role.DECODE,
    "enable_torch_compile": Role.DECODE,
}
"""Flags that only one tier has."""

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The values of the flags, by their names with underscores. `inputs_for` checks them."""

    role: str = "decode"
    device_memory: str | None = None
    free_memory: str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_attention: bool = False
    dtype: str | None = None
    kv_dtype: str | None = None
    page_size: int = 16
    chunked_prefill_size: int | None = None
    chunk_tokens: int | None = None
    max_running_requests: int | None = None
    max_seq_len: int | None = None
    cuda_graph_max_bs: int | None = None
    cuda_graph_bs: str | None = None
    enable_torch_compile: bool = False
    torch_compile_max_bs: int = 32
    speculative: str | None = None
    static_fraction: float | None = None
    policy: str = "static-fraction"
    memory_ratio: float = 0.88
    max_total_tokens: int | None = None
    staging: str | None = None
    ring: str | None = None
    weights: str | None = None
    sparse_policy: str = "none"
    sparse_block_size: int = 128
    sparse_stride: int = 16
    workspace_strategy: str = "chunk_bounded"
    kv_offload: bool = False

    def changed(self, text: str) -> PlanOptions:
        """Return these options with changes such as ``"tp=4,page_size=64"``; a flag without a value is ``name=true``."""
        kinds = {field.name: str(field.type) for field in fields(self)}
        changes: dict[str, Any] = {}
        for part in filter(None, (one.strip() for one in text.split(","))):
            name, equals, value = part.partition("=")
            name = name.strip().lstrip("-").replace("-", "_")
            other, colon, size = part.partition(":")
            if not equals and colon and other.strip() in kinds:
                raise ConfigError(f"--compare has {part!r}; did you mean {other.strip()}={size.strip()}?")
            if name not in kinds or not equals:
                raise ConfigError(f"--compare has {part!r}; it must be name=value, with a name of {', '.join(kinds)}")
            changes[name] = _converted(name, value.strip(), kinds[name])
        return replace(self, **changes)


def make_plan_for(options: PlanOptions, directory: ModelDirectory, device: Device) -> MemoryPlan:
    """Return the plan of the pipeline stage with the fewest tokens.

    Stages of windows and states alone hold any number of tokens; they count only if there are no others.
    """
    inputs = inputs_for(options, directory, device)
    plans = [make_plan(replace(inputs, pp_rank=pp_rank)) for pp_rank in range(inputs.pp_size)]
    bounded = [plan for plan in plans if any(group.kind is GroupKind.FULL and group.layers for group in plan.groups)]
    return min(bounded or plans, key=lambda plan: plan.max_total_tokens)


def device_for(options: PlanOptions) -> Device:
    """Return the device that the options name, or else this machine's."""
    given = given_device(_size("device_memory", options.device_memory), _size("free_memory", options.free_memory))
    return given or detect_device(max(1, options.tp * options.pp))


def inputs_for(options: PlanOptions, directory: ModelDirectory, device: Device) -> PlanInputs:
    """Return the inputs of the plan.

    Raises:
        ConfigError: A flag's value is wrong.
    """
    role = _choice("role", options.role, Role)
    sizes = {name: _size(name, getattr(options, name)) for name in ("staging", "ring", "weights")}
    for name, tier in _TIERS.items():
        if role is not tier and sizes.get(name, getattr(options, name)):
            raise ConfigError(f"{_flag(name)} is given and --role is {role}; only a {tier} node has it")
    inputs = PlanInputs(
        model=directory.shape,
        role=role,
        device_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        is_cpu=device.is_cpu,
        tp_size=options.tp,
        pp_size=options.pp,
        dp_size=options.dp,
        has_dp_attention=options.dp_attention,
        dtype=_model_dtype(options.dtype),
        kv_dtype=None if options.kv_dtype is None else _choice("kv_dtype", options.kv_dtype, DType),
        page_size=options.page_size,
        chunked_prefill_size=options.chunked_prefill_size or (1 if role is Role.DECODE else None),  # decode computes no prompts
        max_seq_len=options.max_seq_len,
        cuda_graph_batch_sizes=_batch_sizes(options) if role is Role.DECODE else (),
        torch_compile_max_bs=_torch_compile_max_bs(options),
        has_page_tables=role is Role.DECODE and not device.is_cpu,  # decode steps read them on the device
        speculative=options.speculative,
        static_fraction=options.static_fraction,
        policy=_choice("policy", options.policy, Policy),
        memory_ratio=options.memory_ratio,
        max_total_tokens=options.max_total_tokens,
        staging_bytes=sizes["staging"] or 0,
        ring_bytes=sizes["ring"] or 0,
        weights_bytes=sizes["weights"],
        checkpoint_bytes=directory.checkpoint_bytes,
        checkpoint_source=directory.checkpoint_source,
        has_host_pages=options.kv_offload,
        sparse_prefill=_sparse_policy(options, role),
    )
    return _with_node_defaults(inputs, options)


def _sparse_policy(options: PlanOptions, role: Role) -> XAttention | None:
    if options.sparse_policy not in ("none", "xattention"):
        raise ConfigError(f"--sparse-policy is {options.sparse_policy!r}; it must be none or xattention")
    strategy = _choice("workspace_strategy", options.workspace_strategy, Strategy)
    if options.sparse_policy == "none":
        return None
    if role is not Role.PREFILL:
        raise ConfigError(f"--sparse-policy is xattention and --role is {role}; only a prefill node has it")
    try:
        return XAttention(block_size=options.sparse_block_size, stride=options.sparse_stride, strategy=strategy)
    except ConfigError as error:
        raise ConfigError(f"--sparse-{str(error).replace('_', '-', 1)}") from None


def _with_node_defaults(inputs: PlanInputs, options: PlanOptions) -> PlanInputs:
    """Return the inputs with the values of a node on that device for flags that are not given, and for buffers of offload."""
    from planner.device_defaults import gpu_chunk_tokens, gpu_running_requests
    from transfer.config import ChunkConfig, DecodeLimitsConfig, RingConfig, StagingConfig, TransportConfig
    from transfer.config.storage import HostMemoryConfig, OffloadConfig
    from transfer.sizes import ring_capacity_bytes, staging_slot_bytes

    shard, chunk_tokens, requests = inputs.fullest_shard(), options.chunk_tokens, options.max_running_requests
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ConfigError(f"--chunk-tokens is {chunk_tokens}; it must be at least 1")
    if inputs.role is Role.PREFILL and chunk_tokens is None:
        on_cpu = ChunkConfig().chunk_tokens
        chunk_tokens = on_cpu if inputs.is_cpu else gpu_chunk_tokens(inputs.layout, shard, step_tokens=inputs.chunk_tokens)
    if requests is None and inputs.is_cpu:
        requests = DecodeLimitsConfig().max_running_requests
    elif requests is None:
        requests = gpu_running_requests(inputs.layout, shard, device_bytes=inputs.total_bytes, chunk_tokens=chunk_tokens)
    device, probe_bytes = "cpu" if inputs.is_cpu else "cuda", TransportConfig().probe_bytes
    staging_bytes, ring_bytes = inputs.staging_bytes, inputs.ring_bytes
    if chunk_tokens is not None and options.staging is None:
        chunk, staging = ChunkConfig(chunk_tokens=chunk_tokens), StagingConfig()
        slot_bytes = staging_slot_bytes(chunk, staging, inputs.layout, shard, inputs.total_bytes, device=device)
        staging_bytes = staging.num_slots * slot_bytes + probe_bytes
    elif inputs.role is Role.DECODE and options.ring is None:
        ring_bytes = ring_capacity_bytes(RingConfig(), inputs.total_bytes, device=device) + probe_bytes
    graphs = inputs.cuda_graph_batch_sizes
    if graphs is None and not inputs.is_cpu:
        graphs = (min(inputs.cuda_graph_max_bs, requests),)
    if chunk_tokens is not None:
        offload, in_flight = HostMemoryConfig(host_ratio=1), PREFILL_STEPS_IN_FLIGHT * chunk_tokens
    else:
        offload = on_decode = OffloadConfig(host_ratio=1, device_window=0)
        in_flight = DECODE_STEPS_IN_FLIGHT + (on_decode.window_slack_tokens(inputs.page_size) if options.kv_offload else 0)
    return replace(
        inputs,
        staging_bytes=staging_bytes,
        ring_bytes=ring_bytes,
        max_running_requests=requests,
        tokens_in_flight=in_flight,
        cuda_graph_batch_sizes=graphs,
        offload_bytes=offload.device_bytes if options.kv_offload and not inputs.is_cpu else 0,
    )


def _batch_sizes(options: PlanOptions) -> tuple[int, ...] | None:
    """Return the batch sizes of CUDA graphs: a list, or only the largest; empty for none; None to choose by the device."""
    if options.cuda_graph_bs is not None:
        if options.cuda_graph_max_bs is not None:
            raise ConfigError("--cuda-graph-bs and --cuda-graph-max-bs are both set; set one of them")
        sizes = options.cuda_graph_bs.replace(",", " ").split()
        if not all(size.isdecimal() for size in sizes):
            raise ConfigError(f"--cuda-graph-bs is {options.cuda_graph_bs!r}; it must be batch sizes, for example 1,2,4,8")
        return tuple(int(size) for size in sizes)
    if options.cuda_graph_max_bs is None:
        return None
    if options.cuda_graph_max_bs < 0:
        raise ConfigError(f"--cuda-graph-max-bs is {options.cuda_graph_max_bs}; it must be at least 0")
    return (options.cuda_graph_max_bs,) if options.cuda_graph_max_bs else ()


def _torch_compile_max_bs(options: PlanOptions) -> int:
    if options.torch_compile_max_bs < 1:
        raise ConfigError(f"--torch-compile-max-bs is {options.torch_compile_max_bs}; it must be at least 1")
    return options.torch_compile_max_bs if options.enable_torch_compile else 0


def _model_dtype(name: str | None) -> DType | None:
    if name is not None and name not in MODEL_DTYPES:
        raise ConfigError(f"--dtype is {name!r}; it must be one of {', '.join(MODEL_DTYPES)}")
    return None if name is None else MODEL_DTYPES[name]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _choice(name: str, value: str, choices: type[_Choice]) -> _Choice:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise ConfigError(f"{_flag(name)} is {value!r}; it must be one of {known}") from None


def _size(name: str, value: str | None) -> int | None:
    """Return the bytes of a flag such as ``80GiB``. Refuse a bare number that is too small to be bytes."""
    if value is None:
        return None
    from transfer.config import parse_size

    try:
        size = parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{_flag(name)} is {value!r}; {error}") from None
    assert isinstance(size, int)  # of a text
    if 0 < size < MB and value.strip().isdecimal():
        unit = "GiB" if size < _LARGEST_GIB and name not in ("staging", "ring") else "MiB"
        raise ConfigError(f"{_flag(name)} is {value}, which is {size} bytes; did you mean {size}{unit}? (bytes: {size}B)")
    return size


def _converted(name: str, value: str, kind: str) -> Any:
    """Convert the text of an option to its type."""
    if value.lower() in ("none", "auto") and "None" in kind:
        return None
    if kind == "bool":
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"--compare has {name}={value}; it must be true or false")
        return value.lower() == "true"
    converters: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float}
    convert = converters.get(kind.partition(" ")[0], str)
    try:
        return convert(value)
    except ValueError:
        raise ConfigError(f"--compare has {name}={value}; it must be a number") from None
