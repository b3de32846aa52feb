"""From a node's settings to one rank's engine."""

from __future__ import annotations

from pathlib import Path

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from embedded_engine.tensor_parallel import init_distributed
from transfer.config import NodeConfig, PrefillNodeConfig
from transfer.layout import DType, Shard


def load_engine(config: NodeConfig, *, rank: int, rendezvous: Path) -> EmbeddedEngine:
    """Load this rank's share of the model and make its pool.

    Args:
        rank: TP rank of this process.
        rendezvous: Fresh file at which the ranks meet.

    Raises:
        ConfigError: The model directory or a parallel size is wrong.
        EngineError: The weights cannot be loaded, or the ranks did not meet.
    """
    files = read_model_files(config.model)
    tp_size = config.parallel.tp_size
    shard = Shard(
        tp_size=tp_size, tp_rank=rank, page_size=config.pool.page_size, order=config.pool.order, dtype=config.pool.dtype
    )
    files.check_shard(shard)
    device = config.device if config.device == "cpu" else f"{config.device}:{rank}"
    group = init_distributed(rank, tp_size, f"file://{rendezvous}", device=device) if tp_size > 1 else None
    return EmbeddedEngine(
        files,
        shard=shard,
        num_pages=config.pool.num_pages,
        device=device,
        dtype=None if config.dtype is None else DType(config.dtype),
        group=group,
        layers_per_group=(config.chunk.layers_per_group or None) if isinstance(config, PrefillNodeConfig) else None,
        num_threads=config.parallel.threads_per_rank,
    )
