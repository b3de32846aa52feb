"""An engine that computes nothing, so that only kvferry's own time is left: part of `bench.lone_request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prefill_node.engine import OnLayersWritten
from transfer.config import NodeConfig
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.layout import DType, KVLayout, Shard
from transfer.pool.kv_pool import KVPool

DEFAULT_TOKENS = 16_384


class NullEngine:
    """One rank; both a `PrefillEngine` and a `DecodeEngine`. The KV of a token has 16 KiB."""

    def __init__(self, shard: Shard, num_pages: int) -> None:
        self.layout = KVLayout.uniform(num_layers=8, num_kv_heads=8, head_dim=64, dtype=DType.FLOAT16)
        self.shard = shard
        self.pool = KVPool(layout=self.layout, shard=shard, num_pages=num_pages)
        self.model_fields: Mapping[str, str] = {"architecture": "null"}
        self.max_context_tokens = 16_384
        self.vocab_size = 500
        self.eos_token_ids: Sequence[int] = ()

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> dict[str, int]:
        if on_layers_written is not None:
            on_layers_written(self.layout.num_layers, None)
        return {item.request_id: 7 for item in items if item.is_last} if self.shard.rank == 0 else {}

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        return {item.request_id: 8 for item in items} if self.shard.rank == 0 else {}

    def close(self) -> None:
        return


def load(config: NodeConfig, *, rank: int, rendezvous: Path) -> NullEngine:
    """Return the engine of a rank; see `node_runtime.engine`."""
    pool = config.pool
    shard = Shard(tp_size=config.parallel.tp_size, tp_rank=rank, page_size=pool.page_size, order=pool.order, dtype=pool.dtype)
    return NullEngine(shard, (pool.num_tokens or DEFAULT_TOKENS) // pool.page_size)
