"""An embedded engine whose process may allocate only a part of its GPU, unknown to its memory plan."""

from __future__ import annotations

from pathlib import Path

import torch

from embedded_engine.loading import NodeEngine
from embedded_engine.loading import load_engine as load_embedded_engine
from transfer.config import NodeConfig

FRACTION = 0.05


def load_engine(config: NodeConfig, *, rank: int, rendezvous: Path) -> NodeEngine:
    torch.cuda.set_per_process_memory_fraction(FRACTION, config.first_device + rank)
    return load_embedded_engine(config, rank=rank, rendezvous=rendezvous)
