"""Load one rank's engine from a node's settings, with a memory plan that sizes its pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import ModelFiles, read_model_files
from embedded_engine.tensor_parallel import TensorParallelGroup, init_distributed
from planner.memory_advice import Phase, advice_for
from planner.model_directory import read_model_directory
from planner.node_plan import DeviceMemory, graph_rows, has_host_pages, node_plan_inputs, sparse_policy
from planner.plan import MemoryPlan, agree_on_free_bytes, compare_with_real, make_plan
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.copy.kernel_choice import Kernels, choose_kernels
from transfer.errors import ConfigError
from transfer.layout import DType, Shard
from transfer.sizes import finest_chunk_plan

log = structlog.get_logger(__name__)

DUMMY_SEED = 0
"""Seed of dummy weights: both tiers have the same model."""


class MemoryPlanner:
    """Plan one rank's memory together with the other ranks of its group.

    The constructor refuses a model that cannot fit, before anything is loaded. A call with the size of the loaded weights returns
    the number of pages.

    Args:
        loaded_bytes: Bytes of the rank's weights if they are on the device already.

    Attributes:
        plan: The newest plan.
        warnings: Estimates of the first plan that were wrong.

    Raises:
        ConfigError: The settings do not fit the model.
        MemoryPlanError: Not one page of KV would fit, or the free memory of the ranks differs too much.
    """

    def __init__(
        self,
        config: NodeConfig,
        files: ModelFiles,
        shard: Shard,
        device: torch.device,
        group: TensorParallelGroup | None,
        *,
        loaded_bytes: int = 0,
    ) -> None:
        self._config = config
        self._shard = shard
        self._device = device
        self._group = group
        model = read_model_directory(config.model, draft=config.draft_model)
        # The dtype in config.json can be wrong or missing; the engine uses that of the weights.
        self._model = replace(model, shape=replace(model.shape, dtype=files.stored_dtype))
        self.warnings: tuple[str, ...] = ()
        self.plan: MemoryPlan = make_plan(node_plan_inputs(config, self._model, shard, self._measure_before(loaded_bytes)))

    def __call__(self, weights_bytes: int) -> tuple[int, ...]:
        """Return the pages of each layer group, the same on every rank, once the weights are loaded."""
        self._of_all_ranks(0)  # a rank that is still loading would have too much free memory
        before = self._measure_before(weights_bytes)
        self.warnings = tuple(compare_with_real(self.plan, {"weights": weights_bytes}))
        for difference in self.warnings:
            log.warning("weights_not_as_estimated", difference=difference)
        inputs = node_plan_inputs(self._config, self._model, self._shard, before, weights_bytes=weights_bytes)
        self.plan = make_plan(inputs)
        # The leader counts one number of pages for all ranks, and their devices may differ by a little.
        least = min(self._of_all_ranks(self.plan.max_total_tokens))
        if least < self.plan.max_total_tokens:
            self.plan = make_plan(replace(inputs, max_total_tokens=least))
        return self.plan.group_pages

    def advise(self, phase: Phase) -> str:
        """Return the settings to change if `phase` finds no memory, with their current values."""
        return advice_for(phase, self._config, plan=self.plan.as_json())

    def _measure_before(self, weights_bytes: int) -> DeviceMemory:
        """Return the memory of this rank's device before the weights, with the least free memory of any rank."""
        if self._device.type != "cuda":
            host = DeviceMemory.of_host(1 if self._group is None else self._group.size)
            part = min(self._of_all_ranks(host.total_bytes))  # of one host, measured at slightly different times
            return DeviceMemory(total_bytes=part + weights_bytes, free_bytes=part + weights_bytes, is_cpu=True)
        free, total = torch.cuda.mem_get_info(self._device)
        agreed = agree_on_free_bytes(dict(enumerate(self._of_all_ranks(free))))
        return DeviceMemory(total_bytes=total, free_bytes=min(total, max(1, agreed) + weights_bytes), is_cpu=False)

    def _of_all_ranks(self, value: int) -> list[int]:
        """Return the value of each rank, in rank order."""
        return [value] if self._group is None else self._group.gather_number(value)


class NodeEngine(EmbeddedEngine):
    """The engine of a node's rank; it can serve either role, one after the other."""

    def switch_role(self, config: NodeConfig) -> NodeEngine:
        """Serve the role of `config` from now on, with the same weights and group; see `PrefillEngine`.

        Raises:
            ConfigError: The settings do not fit the model.
            EngineError: The ranks could not agree, or the engine is broken.
            MemoryPlanError: The other role's plan does not fit the device.
        """
        self.release_pool()
        config = _with_chosen_kernels(config, self._device)
        shard = _shard_of(config, self.shard.tp_rank)
        planner = MemoryPlanner(config, self.files, shard, self._device, self._group, loaded_bytes=self.weights_bytes)
        self.open_pool(planner, shard=shard, advise=planner.advise, **_role_settings(config))
        self.memory_plan, self.memory_warnings = planner.plan, planner.warnings
        return self


def load_engine(config: NodeConfig, *, rank: int, rendezvous: Path) -> NodeEngine:
    """Load this rank's part of the model and allocate its pool.

    Args:
        rank: TP rank of this process.
        rendezvous: Fresh file at which the ranks meet.

    Raises:
        ConfigError: The model directory or a parallel size is wrong, or there are too few GPUs.
        EngineError: The weights cannot be loaded, or the ranks did not meet.
        MemoryPlanError: The model does not fit the device, or the free memory of the ranks differs too much.
    """
    _check_device(config)
    dummy_seed = DUMMY_SEED if config.dummy_weights else None
    files = read_model_files(config.model, dummy_seed=dummy_seed)
    draft = None if config.draft_model is None else read_model_files(config.draft_model, dummy_seed=dummy_seed)
    tp_size = config.parallel.tp_size
    shard = _shard_of(config, rank)
    files.check_shard(shard)
    device = config.device if config.device == "cpu" else f"{config.device}:{config.first_device + rank}"
    config = _with_chosen_kernels(config, torch.device(device))
    group = init_distributed(rank, tp_size, f"file://{rendezvous}", device=device) if tp_size > 1 else None
    planner = MemoryPlanner(config, files, shard, torch.device(device), group)
    engine = NodeEngine(
        files,
        shard=shard,
        num_pages=planner,
        device=device,
        dtype=None if config.dtype is None else DType(config.dtype),
        group=group,
        advise=planner.advise,
        num_threads=config.parallel.threads_per_rank,
        has_decode_kernels=config.device != "cpu" and config.kernels == "triton",
        draft=draft,
        **_role_settings(config),
    )
    engine.memory_plan, engine.memory_warnings = planner.plan, planner.warnings
    return engine


def _shard_of(config: NodeConfig, rank: int) -> Shard:
    pool = config.pool
    return Shard(tp_size=config.parallel.tp_size, tp_rank=rank, page_size=pool.page_size, order=pool.order, dtype=pool.dtype)


def _with_chosen_kernels(config: NodeConfig, device: torch.device) -> NodeConfig:
    """Return the settings with the outcome of `kernels` on a GPU, which the memory plan depends on."""
    kernels = choose_kernels(config.kernels, device)
    return config if kernels is Kernels.NUMPY else config.model_copy(update={"kernels": kernels.value})


def _role_settings(config: NodeConfig) -> dict[str, Any]:
    """Return the arguments of an engine that depend on its role."""
    given: dict[str, Any] = {"max_seq_len": config.limits.max_seq_len}
    if isinstance(config, PrefillNodeConfig):
        given["layers_per_group"] = finest_chunk_plan(config.chunk).layers_per_group or None
        given["sparse_prefill"] = sparse_policy(config)
        given["chunk_tokens"] = config.chunk.chunk_tokens
    if isinstance(config, DecodeNodeConfig):
        given["max_running_requests"] = config.limits.max_running_requests
        given["cuda_graph_batch_sizes"] = () if config.device == "cpu" else graph_rows(config)
        given["has_host_pages"] = has_host_pages(config)
        given["num_speculative_tokens"] = config.speculative.most_draft_tokens
        given["torch_compile_max_bs"] = config.torch_compile_max_bs if config.torch_compile else 0
    return given


def _check_device(config: NodeConfig) -> None:
    """Refuse too few GPUs on every rank: the others would wait for a rank without a GPU."""
    needed = config.first_device + config.parallel.tp_size
    if config.device == "cuda" and torch.cuda.device_count() < needed:
        raise ConfigError(
            f"first_device is {config.first_device} and parallel.tp_size is {config.parallel.tp_size}, which takes {needed} "
            f"GPUs; torch sees {torch.cuda.device_count()}: lower one of them, see CUDA_VISIBLE_DEVICES, or set device to cpu"
        )
