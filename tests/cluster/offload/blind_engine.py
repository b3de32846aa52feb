"""The embedded engine, without what it takes to read KV in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embedded_engine.loading import load_engine as load_embedded_engine
from transfer.config import NodeConfig


class BlindEngine:
    """Everything that the engine has, but for `use_host_pool`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "use_host_pool":
            raise AttributeError(name)
        return getattr(self._engine, name)


def load_engine(config: NodeConfig, *, rank: int, rendezvous: Path) -> BlindEngine:
    return BlindEngine(load_embedded_engine(config, rank=rank, rendezvous=rendezvous))
