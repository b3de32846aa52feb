"""Small clusters whose decode node keeps KV outside of its devices, and what their pages of metrics say of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvferry.local_cluster import ClusterNode, ClusterSpec, TierSpec
from tests.cluster.calls import until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S

PAGE = 8
CHUNK = 32
DEVICE_TOKENS = 192
HOST_TOKENS = 1536
MAX_TOKENS = DEVICE_TOKENS + HOST_TOKENS
EARLY: Mapping[str, object] = {
    "offload.host_ratio": HOST_TOKENS // DEVICE_TOKENS,
    "offload.device_window": 16,
    "offload.stride_tokens": 16,
}
"""Pages leave the device early: of each request nine or so stay there, of 24."""

KEPT: Mapping[str, object] = {"offload.host_ratio": 4, "offload.stride_tokens": 16}
"""Pages are kept for later requests only."""


def spec(
    model: Path,
    decode: Mapping[str, object],
    *,
    prefill: Mapping[str, object] | None = None,
    tp_size: int = 1,
    prefill_tp_size: int = 1,
    page_size: int = PAGE,
    order: str = "NHD",
    pool_tokens: int = DEVICE_TOKENS,
    log_level: str = "info",
) -> ClusterSpec:
    """Both tiers of one model; the prefill side's pages are of another size."""
    restart = {"restart.backoff_s": 0.1, "restart.max_restarts": 20}
    return ClusterSpec(
        prefill=TierSpec(
            model=model, tp_size=prefill_tp_size, page_size=16, pool_tokens=2048, settings=restart | dict(prefill or {})
        ),
        decode=TierSpec(
            model=model,
            tp_size=tp_size,
            page_size=page_size,
            order=order,
            pool_tokens=pool_tokens,
            settings=restart | dict(decode),
        ),
        chunk_tokens=CHUNK,
        heartbeat_s=HEARTBEAT_S,
        start_timeout_s=START_TIMEOUT_S,
        log_level=log_level,
    )


async def number(node: ClusterNode, name: str, **labels: str) -> float:
    """Sum of the metric's samples that have these labels."""
    code, page = await node.http("/metrics")
    assert code == 200, page
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no sample of {name} with {labels}"
    return sum(found)


async def hits(node: ClusterNode, tier: str) -> float:
    """Tokens of prompts that were found in "device", "host" or "storage"."""
    return await number(node, "kvferry_offload_hit_tokens_total", tier=tier)


async def until_all_is_back(*nodes: ClusterNode, within_s: float = 10.0) -> None:
    """Wait until no request is left on the nodes, and their decode node holds and promises no host page; names what is."""
    await until_idle(*nodes, within_s=within_s)
    for decode in (node for node in nodes if node.role == "decode"):
        await until(lambda decode=decode: _holds_nothing(decode), "no host page is held, and nothing waits for the store")


async def _holds_nothing(decode: ClusterNode) -> bool:
    held = await number(decode, "kvferry_host_pages", state="held")
    return not held and not await number(decode, "kvferry_offload_backup_queue")


async def until_stored(decode: ClusterNode, num_pages: int) -> None:
    """Wait until so many pages, at least, are in the store on every rank since the decode node's start."""

    async def are_stored() -> bool:
        return await number(decode, "kvferry_offload_backups_total", outcome="stored") >= num_pages

    await until(are_stored, f"{num_pages} pages in the store")
    await until_all_is_back(decode)


def stored_files(directory: Path) -> list[Path]:
    """Files of whole pages, in no order."""
    return [path for path in directory.glob("*/*/*") if path.is_file() and not path.name.startswith(".")]


def unfinished_files(directory: Path) -> list[Path]:
    """Files that somebody is writing, or has left half-written."""
    return list(directory.rglob(".writing-*"))
