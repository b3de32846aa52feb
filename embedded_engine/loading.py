"""From a node's settings to one rank's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.memory import MemoryPlanner
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import init_distributed
from planner.node_plan import graph_batch_sizes
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.errors import ConfigError
from transfer.layout import DType, Shard
from transfer.sizes import finest_chunk_plan

DUMMY_SEED = 0
"""Of dummy weights: the same model on both tiers."""


class NodeEngine(EmbeddedEngine):
    """The engine of a node's rank; it can serve either role, one after the other."""

    def switch_role(self, config: NodeConfig) -> NodeEngine:
        """Serve the role of `config` from now on, with the weights and the group that there are; see `PrefillEngine`.

        Raises:
            ConfigError: The settings do not go together with the model.
            EngineError: The ranks could not agree, or the engine is of no more use.
            MemoryPlanError: The other role's plan does not fit the device.
        """
        self.release_pool()
        shard = _shard_of(config, self.shard.tp_rank)
        planner = MemoryPlanner(config, self.files, shard, self._device, self._group, loaded_bytes=self.weights_bytes)
        self.open_pool(planner, shard=shard, **_role_settings(config))
        self.memory_plan, self.memory_warnings = planner.plan, tuple(planner.warnings)
        return self


def load_engine(config: NodeConfig, *, rank: int, rendezvous: Path) -> NodeEngine:
    """Load this rank's share of the model and make its pool.

    Args:
        rank: TP rank of this process.
        rendezvous: Fresh file at which the ranks meet.

    Raises:
        ConfigError: The model directory or a parallel size is wrong, or there are too few GPUs.
        EngineError: The weights cannot be loaded, or the ranks did not meet.
        MemoryPlanError: The model does not fit the device, or the ranks' devices differ by too much.
    """
    _check_device(config)
    files = read_model_files(config.model, dummy_seed=DUMMY_SEED if config.dummy_weights else None)
    tp_size = config.parallel.tp_size
    shard = _shard_of(config, rank)
    files.check_shard(shard)
    device = config.device if config.device == "cpu" else f"{config.device}:{config.first_device + rank}"
    group = init_distributed(rank, tp_size, f"file://{rendezvous}", device=device) if tp_size > 1 else None
    planner = MemoryPlanner(config, files, shard, torch.device(device), group)
    engine = NodeEngine(
        files,
        shard=shard,
        num_pages=planner,
        device=device,
        dtype=None if config.dtype is None else DType(config.dtype),
        group=group,
        num_threads=config.parallel.threads_per_rank,
        **_role_settings(config),
    )
    engine.memory_plan, engine.memory_warnings = planner.plan, tuple(planner.warnings)
    return engine


def _shard_of(config: NodeConfig, rank: int) -> Shard:
    pool = config.pool
    return Shard(tp_size=config.parallel.tp_size, tp_rank=rank, page_size=pool.page_size, order=pool.order, dtype=pool.dtype)


def _role_settings(config: NodeConfig) -> dict[str, Any]:
    """What an engine is told of its role."""
    given: dict[str, Any] = {"max_seq_len": config.limits.max_seq_len}
    if isinstance(config, PrefillNodeConfig):
        given["layers_per_group"] = finest_chunk_plan(config.chunk).layers_per_group or None
    if isinstance(config, DecodeNodeConfig):
        given["max_running_requests"] = config.limits.max_running_requests
        given["cuda_graph_batch_sizes"] = () if config.device == "cpu" else graph_batch_sizes(config)
    return given


def _check_device(config: NodeConfig) -> None:
    """Of all ranks: they would wait for one that has no GPU."""
    needed = config.first_device + config.parallel.tp_size
    if config.device == "cuda" and torch.cuda.device_count() < needed:
        raise ConfigError(
            f"first_device is {config.first_device} and parallel.tp_size is {config.parallel.tp_size}, which takes {needed} "
            f"GPUs; torch sees {torch.cuda.device_count()}: lower one of them, see CUDA_VISIBLE_DEVICES, or set device to cpu"
        )
