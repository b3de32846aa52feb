"""An embedded engine whose steps request too much memory for requests with certain seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from embedded_engine.loading import load_engine as load_embedded_engine
from transfer.config import NodeConfig
from transfer.engine_types import DecodeItem, PrefillItem

SEED_OF_PREFILL: Final = 41
SEED_OF_DECODE: Final = 42


def take_too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


class HungryEngine:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, items: Sequence[PrefillItem], *arguments: Any) -> Any:
        if any(item.sampling.seed == SEED_OF_PREFILL for item in items):
            take_too_much()
        return self._engine.prefill(items, *arguments)

    def decode(self, items: Sequence[DecodeItem]) -> Any:
        if any(item.sampling.seed == SEED_OF_DECODE for item in items):
            take_too_much()
        return self._engine.decode(items)

    def begin_decode(self, items: Sequence[DecodeItem]) -> Any:
        if any(item.sampling.seed == SEED_OF_DECODE for item in items):
            take_too_much()
        return self._engine.begin_decode(items)


def load_engine(config: NodeConfig, *, rank: int, rendezvous: Path) -> HungryEngine:
    return HungryEngine(load_embedded_engine(config, rank=rank, rendezvous=rendezvous))


def load_too_much(config: NodeConfig, *, rank: int, rendezvous: Path) -> None:
    take_too_much()
