"""Small clusters whose decode node keeps KV outside of its devices, and what their pages of metrics say of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S

PAGE = 8
CHUNK = 32
DEVICE_TOKENS = 192
HOST_TOKENS = 1536
EARLY: Mapping[str, object] = {
    "offload.host_ratio": HOST_TOKENS // DEVICE_TOKENS,
    "offload.device_window": 16,
    "offload.stride_tokens": 16,
}
"""Pages leave the device early: of each request nine or so stay there, of 24."""

PATIENT: Mapping[str, object] = {"storage.get_timeout_s": 15}
"""What the store has is waited for, however slow the machine: for tests of what is found there."""

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
    restart = {"restart.backoff_s": 0.1, "restart.max_backoff_s": 0.1, "restart.max_restarts": 50}  # many lives, each at once
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


async def metrics_page(node: ClusterNode) -> str:
    """What a node says of itself at one time; of its ranks what they said last, which can be a second ago."""
    code, page = await node.http("/metrics")
    assert code == 200, page
    return page


async def number(node: ClusterNode, name: str, **labels: str) -> float:
    """Sum of the metric's samples that have these labels."""
    return number_on(await metrics_page(node), name, **labels)


async def hits(node: ClusterNode, tier: str) -> float:
    """Tokens of prompts that were found in "device", "host" or "storage"."""
    return await number(node, "kvferry_offload_hit_tokens_total", tier=tier)


async def until_all_is_back(*nodes: ClusterNode, within_s: float = 30.0) -> None:
    """Wait until no request is left on the nodes, and their decode node holds and promises no host page; names what is."""
    await until_idle(*nodes, within_s=within_s)
    for decode in (node for node in nodes if node.role == "decode"):
        await until(
            lambda decode=decode: _holds_nothing(decode),
            "no host page is held, and nothing waits for the store",
            within_s=within_s,
        )


async def _holds_nothing(decode: ClusterNode) -> bool:
    page = await metrics_page(decode)  # one of both: what waits is held the next moment
    return not number_on(page, "kvferry_host_pages", state="held") and not number_on(page, "kvferry_offload_backup_queue")


async def num_stored(decode: ClusterNode) -> float:
    """Pages that have come into the store on every rank since the decode node's start."""
    return await number(decode, "kvferry_offload_backups_total", outcome="stored")


async def until_stored(decode: ClusterNode, num_pages: int, *, since: float) -> None:
    """Wait until so many pages, at least, have come into the store since `num_stored` said so."""

    async def are_stored() -> bool:
        return await num_stored(decode) >= since + num_pages

    await until(are_stored, f"{num_pages} pages in the store", within_s=60)
    await until_all_is_back(decode)


async def another_life(cluster: LocalCluster) -> None:
    """The decode ranks, and with them all host memory, are lost to a kill; others take their place."""
    node = cluster.decode
    incarnation = node.incarnation
    os.kill(node.rank_pids[-1], signal.SIGKILL)
    await until(lambda: node.lives_anew(incarnation), "another life", within_s=60)
    await cluster.wait_joined()


def stored_files(directory: Path) -> list[Path]:
    """Files of whole pages, in no order."""
    return [path for path in directory.glob("*/*/*") if path.is_file() and not path.name.startswith(".")]


def unfinished_files(directory: Path) -> list[Path]:
    """Files that somebody is writing, or has left half-written."""
    return list(directory.rglob(".writing-*"))


def number_on(page: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric page that have these labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no sample of {name} with {labels}"
    return sum(found)
