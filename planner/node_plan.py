"""From a daemon's settings and a rank's device to the inputs of its memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from planner.model_directory import ModelDirectory, read_model_directory
from planner.plan import PlanInputs, Policy, Role, make_plan
from planner.workspace import Strategy, XAttention
from transfer.chunk import ChunkPlan, largest_wire_bytes
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.errors import ConfigError, MemoryPlanError
from transfer.host_memory import host_memory, shown
from transfer.layer_groups import PREFILL_STEPS_IN_FLIGHT
from transfer.layout import DType, KVLayout, Shard, routes
from transfer.sizes import ring_capacity_bytes, staging_slot_bytes

_SETTINGS: Final = {
    "a larger --tp or --pp, or a quantised model": "a larger parallel.tp_size",  # the embedded engine has neither of the others
    "--tp": "parallel.tp_size",
    "--chunk-tokens": "chunk.chunk_tokens",
    "--page-size": "pool.page_size",
    "--dtype": "dtype",
    "--staging": "staging.num_slots or chunk.chunk_tokens",
    "--ring": "ring.capacity_bytes",
    "--max-seq-len": "limits.max_seq_len",
    "--max-running-requests": "limits.max_running_requests",
    "--static-fraction": "memory.static_fraction",
    "--memory-ratio": "memory.memory_ratio",
    "--max-total-tokens": "pool.num_tokens",
    "--device-memory": "memory.device_memory",
}
_SETTINGS_OF_ROLE: Final = {
    "prefill": {
        "--chunked-prefill-size or --cuda-graph-max-bs": "limits.max_step_tokens or chunk.chunk_tokens",
        "--chunked-prefill-size": "limits.max_step_tokens",
        "--sparse-policy": "prefill.sparse_policy",
        "--sparse-stride": "prefill.sparse_stride",
        "--workspace-strategy": "prefill.workspace_strategy",
    },
    "decode": {
        "--chunked-prefill-size or --cuda-graph-max-bs": "cuda_graph_max_bs",
        "--cuda-graph-max-bs": "cuda_graph_max_bs",
        "--torch-compile-max-bs": "torch_compile_max_bs",
    },
}


def settings_for_flags(config: NodeConfig) -> dict[str, str]:
    """Return flag of `kvferry plan` -> name of the same setting of a node."""
    names = _SETTINGS | _SETTINGS_OF_ROLE[config.role]
    if isinstance(config, DecodeNodeConfig) and config.cuda_graph_bs is not None:
        names |= {flag: "the largest cuda_graph_bs" for flag in names if "--cuda-graph-max-bs" in flag}
    if config.memory.device_memory is not None:
        names["What would help: "] = "What would help: a larger memory.device_memory; "
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a rank's device: a GPU, or this rank's part of a host's available memory."""

    total_bytes: int
    free_bytes: int
    is_cpu: bool

    def __post_init__(self) -> None:
        if not 0 < self.free_bytes <= self.total_bytes:
            raise ConfigError(f"free_bytes is {self.free_bytes} of {self.total_bytes}; it must be above 0 and at most all")

    @classmethod
    def of_host(cls, num_ranks: int) -> DeviceMemory:
        """Return a rank's part of this host's available memory.

        Raises:
            ConfigError: The system does not report its memory.
        """
        _, available = host_memory()
        part = max(1, available // num_ranks)
        return cls(total_bytes=part, free_bytes=part, is_cpu=True)

    def limited_to(self, num_bytes: int | None) -> DeviceMemory:
        """Return a device of `num_bytes` with as much memory in use; None means this device.

        Raises:
            MemoryPlanError: The device is smaller.
        """
        if num_bytes is None:
            return self
        if num_bytes > self.total_bytes:
            what = "a rank's part of the memory that this host has available" if self.is_cpu else "the device"
            raise MemoryPlanError(
                f"memory.device_memory is {shown(num_bytes)} ({num_bytes} bytes); {what} is {shown(self.total_bytes)}: "
                "it must not be larger"
            )
        in_use = self.total_bytes - self.free_bytes
        return DeviceMemory(total_bytes=num_bytes, free_bytes=max(1, num_bytes - in_use), is_cpu=self.is_cpu)


def graph_batch_sizes(config: DecodeNodeConfig) -> tuple[int, ...]:
    """Return the decode batch sizes with a CUDA graph: cuda_graph_bs if set, or 1, 2, 4 and every eighth size up to the maximum.

    Steps in plain torch have none.

    Raises:
        ConfigError: A size in cuda_graph_bs exceeds limits.max_running_requests.
    """
    running, asked = config.limits.max_running_requests, config.cuda_graph_max_bs
    if config.cuda_graph_bs is not None:
        if (most := max(config.cuda_graph_bs, default=0)) > running:
            raise ConfigError(f"cuda_graph_bs contains {most}, which exceeds limits.max_running_requests ({running})")
        sizes = config.cuda_graph_bs
    else:
        most = running if asked is None else min(asked, running)
        sizes = (1, 2, 4, *range(8, most, 8), most)
    return () if config.kernels == "torch" else tuple(sorted({size for size in sizes if 0 < size <= most}))


def graph_rows(config: DecodeNodeConfig) -> tuple[int, ...]:
    """Return the rows of decode steps with a CUDA graph: those of `graph_batch_sizes`, with and without draft tokens."""
    sizes, rows_each = graph_batch_sizes(config), 1 + config.speculative.most_draft_tokens
    return tuple(sorted({*sizes, *(size * rows_each for size in sizes)}))


def node_plan_inputs(
    config: NodeConfig, model: ModelDirectory, shard: Shard, device: DeviceMemory, *, weights_bytes: int | None = None
) -> PlanInputs:
    """Return the inputs of one rank's plan.

    Args:
        device: Memory before the weights are loaded.
        weights_bytes: This rank's weights, if they are loaded.

    Raises:
        ConfigError: The settings do not fit the model.
        MemoryPlanError: `staging.slot_bytes` is too small.
    """
    dtype = None if config.dtype is None else DType(config.dtype)
    counted = device.limited_to(config.memory.device_memory)
    staging_bytes = ring_bytes = 0
    step_tokens = 1
    graphs: tuple[int, ...] = ()
    has_page_tables = False
    torch_compile_max_bs = 0
    speculative = None
    if isinstance(config, PrefillNodeConfig):
        staging_bytes = config.staging.num_slots * staging_slot_bytes(
            config.chunk, config.staging, model.shape.layout(dtype), shard, counted.total_bytes, device=config.device
        )
        staging_bytes += config.transport.probe_bytes  # the buffers of probes are on the same device
        step_tokens = max(config.limits.max_step_tokens, config.chunk.chunk_tokens)  # a step has at least one chunk
    elif isinstance(config, DecodeNodeConfig):
        ring_bytes = ring_capacity_bytes(config.ring, counted.total_bytes, device=config.device) + config.transport.probe_bytes
        graphs = () if device.is_cpu else graph_batch_sizes(config)
        torch_compile_max_bs = config.torch_compile_max_bs if config.torch_compile else 0
        has_page_tables = not device.is_cpu and config.kernels != "torch"
        # The plan has the weights and the KV of a draft model, so the reserve need not have them.
        speculative = "ngram" if config.speculative.is_on else None
    most_pages = config.most_pages
    return PlanInputs(
        model=model.shape,
        role=Role(config.role),
        device_bytes=counted.total_bytes,
        free_bytes=counted.free_bytes,
        is_cpu=device.is_cpu,
        tp_size=shard.tp_size,
        pp_size=shard.pp_size,
        pp_rank=shard.pp_rank,
        dtype=dtype,
        kv_dtype=shard.dtype,
        page_size=shard.page_size,
        chunked_prefill_size=step_tokens,
        tokens_in_flight=_tokens_in_flight(config),
        max_running_requests=config.limits.max_running_requests,
        max_seq_len=config.limits.max_seq_len,
        has_page_tables=has_page_tables,
        cuda_graph_batch_sizes=graphs,
        torch_compile_max_bs=torch_compile_max_bs,
        speculative=speculative,
        static_fraction=config.memory.static_fraction,
        policy=Policy(config.memory.policy),
        memory_ratio=config.memory.memory_ratio,
        max_total_tokens=None if most_pages is None else most_pages * shard.page_size,
        staging_bytes=staging_bytes,
        ring_bytes=ring_bytes,
        offload_bytes=_offload_bytes(config),
        has_host_pages=has_host_pages(config),
        sparse_prefill=sparse_policy(config),
        weights_bytes=weights_bytes,
        checkpoint_bytes=None if config.dummy_weights else model.checkpoint_bytes,
        checkpoint_source=model.checkpoint_source,
        names=settings_for_flags(config),
    )


def has_host_pages(config: NodeConfig) -> bool:
    """Return whether pages of a running request can lie in host memory."""
    if isinstance(config, DecodeNodeConfig):
        return config.offload.device_window is not None
    return isinstance(config, PrefillNodeConfig) and config.offload.is_on


def sparse_policy(config: NodeConfig) -> XAttention | None:
    """Return the policy of block-sparse prefill; None for full attention."""
    if not isinstance(config, PrefillNodeConfig) or config.prefill.sparse_policy == "none":
        return None
    return XAttention(
        block_size=config.prefill.sparse_block_size,
        stride=config.prefill.sparse_stride,
        threshold=config.prefill.sparse_threshold,
        strategy=Strategy(config.prefill.workspace_strategy),
    )


def _offload_bytes(config: NodeConfig) -> int:
    """Return the bytes of device memory for copies and for blocks of host pages."""
    assert isinstance(config, PrefillNodeConfig | DecodeNodeConfig)
    return config.offload.device_bytes if config.device != "cpu" else 0


def _tokens_in_flight(config: NodeConfig) -> int:
    """See `LayerGroup.peak_pages`."""
    if isinstance(config, PrefillNodeConfig):
        return PREFILL_STEPS_IN_FLIGHT * config.chunk.chunk_tokens
    assert isinstance(config, DecodeNodeConfig)
    return 1 + config.window_slack_tokens


def check_fits(config: NodeConfig) -> None:
    """Refuse a model that cannot fit, before any rank is started; on a GPU only if a setting gives its size.

    Raises:
        ConfigError: The model directory is damaged, its model is unknown or does not fit the settings, or the ring is too small.
        LayoutError: The model cannot be sharded like that.
        MemoryPlanError: Not one page of KV fits.
    """
    model = read_model_directory(config.model, draft=config.draft_model)
    if model.shape.dtype is None and config.dtype is None:
        return  # only the weights have the dtype
    tp_size, size = config.parallel.tp_size, config.memory.device_memory
    shard = Shard(tp_size=tp_size, page_size=config.pool.page_size, order=config.pool.order, dtype=config.pool.dtype)
    if isinstance(config, DecodeNodeConfig) and config.ring.capacity_bytes is not None:
        _check_ring(config.ring.capacity_bytes, model.shape.layout(None if config.dtype is None else DType(config.dtype)), shard)
    if config.device == "cpu":
        device = DeviceMemory.of_host(tp_size)
    elif size is not None:
        device = DeviceMemory(total_bytes=size, free_bytes=size, is_cpu=False)
    else:
        return  # the ranks ask their devices
    make_plan(node_plan_inputs(config, model, shard, device))


def _check_ring(ring_bytes: int, layout: KVLayout, shard: Shard) -> None:
    """Refuse a ring that no prefill node of the same TP size could use, whatever its chunks are."""
    smallest = ChunkPlan(chunk_tokens=1, layers_per_group=1)
    piece_bytes = largest_wire_bytes(smallest, layout, routes(layout, shard, shard), shard.pool_dtype(layout))
    if ring_bytes < piece_bytes:
        raise ConfigError(
            f"ring.capacity_bytes is {ring_bytes}; one layer of one token of this model has {piece_bytes} bytes on a rank, and "
            "the ring must hold one layer of a chunk: it must be larger, for example 64MiB"
        )
