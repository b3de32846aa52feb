"""Small instances, configurations and hellos for tests without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.connector.rank_report import RankMemory, RankReady
from transfer.instance import Instance
from transfer.layout import DType, KVLayout, Shard
from transfer.messages import PROTOCOL_VERSIONS

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=4, head_dim=4, dtype=DType.FLOAT16)


def instance(
    incarnation: int,
    *,
    tp_size: int = 1,
    layout: KVLayout = LAYOUT,
    weights: str = "some",
    capabilities: frozenset[str] = frozenset(),
) -> Instance:
    return Instance(
        incarnation=incarnation,
        layout=layout,
        shard=Shard(tp_size=tp_size),
        model_fields={"architecture": "none", "weights": weights},
        transport="inproc",
        digests=("xxh3-64",),
        protocol_versions=PROTOCOL_VERSIONS,
        capabilities=capabilities,
    )


def hello(
    rank: int,
    *,
    incarnation: int = 1,
    pool_pages: int = 8,
    pid: int = 0,
    weights: str = "some",
    memory: RankMemory | None = None,
) -> RankReady:
    return RankReady(
        rank=rank,
        pid=pid,
        instance=instance(incarnation, weights=weights),
        pool_pages=(pool_pages,),
        max_context_tokens=64,
        vocab_size=100,
        memory=memory or RankMemory(),
    )


_SHARED: Final = {"log": {"level": "error"}, "tls": {"insecure": 1}, "server": {"port": 0, "http_port": 0}}


def prefill_config(folder: Path, **settings: Any) -> PrefillNodeConfig:
    return PrefillNodeConfig.model_validate({"model": folder, **_SHARED, **settings})


def decode_config(folder: Path, **settings: Any) -> DecodeNodeConfig:
    return DecodeNodeConfig.model_validate({"model": folder, **_SHARED, **settings})


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
