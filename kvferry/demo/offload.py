"""Settings and reports of `kvferry demo` with KV in host memory and in a store.

With `--offload`, the device pool of the decode tier is smaller than the longest request, so older tokens have to leave it while
their request still runs. Older KV moves to host memory and to a directory, in which a second run finds the prompts.

With `--prefill-offload`, the device pool of the prefill tier is smaller than the longest prompt.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from kvferry.demo.kinds import ModelKind
from kvferry.local_cluster.cluster import LocalCluster

POOL_TOKENS: Final = 512
"""Size of each decode rank's device pool; the longest of the demo's prompts has about 600."""

PREFILL_POOL_TOKENS: Final = 32
PREFILL_WINDOW_POOL_TOKENS: Final = 192
"""Tokens of each prefill rank's device pool. Models with sliding windows need the larger pool, because windows stay there."""
PREFILL_CHUNK_TOKENS: Final = 32
PREFILL_HOST_TOKENS: Final = 4096

DEVICE_WINDOW: Final = 64
STRIDE_TOKENS: Final = 64
HOST_RATIO: Final = 12
GET_TIMEOUT_S: Final = 20.0  # on a busy laptop, lookups took longer than the default of 2 s, and nothing was found
_SETTLE_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """KV outside of the device. Field names are those of ``--json``.

    Args:
        device_tokens: Tokens that fit each decode rank's device pool.
        longest_request_tokens: Prompt and generated tokens of the longest request.
        host_tokens: Tokens that fit each decode rank's host memory.
        hit_tokens_device, hit_tokens_host, hit_tokens_storage: Tokens of prompts that prefill did not send, by tier.
        skipped_tokens: Tokens of prompts that prefill ranks loaded from the store and did not compute.
        saved_bytes: Bytes copied from the device into host memory, over all ranks.
        loaded_bytes: Bytes copied from host memory to the device.
        stored_bytes: Bytes put into the store.
        fetched_bytes: Bytes loaded from the store, by both tiers.
        released_pages: Device pages that were released before their request ended.
        restored_pages: Pages that were loaded again while their request ran.
        unstored_pages: Pages that could not be stored.
    """

    device_tokens: int
    longest_request_tokens: int
    host_tokens: int
    hit_tokens_device: int
    hit_tokens_host: int
    hit_tokens_storage: int
    skipped_tokens: int
    saved_bytes: int
    loaded_bytes: int
    stored_bytes: int
    fetched_bytes: int
    released_pages: int
    restored_pages: int
    unstored_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOffloadReport:
    """Report on KV in the host memory of the prefill tier. ``--json`` has the same field names.

    Args:
        device_tokens: Tokens that fit each prefill rank's device pool.
        host_tokens: Tokens that fit each prefill rank's host memory.
        longest_prompt_tokens: Tokens of the longest prompt.
        saved_bytes: Bytes that steps wrote into host memory, over all ranks.
        loaded_bytes: Bytes that steps read from host memory.
    """

    device_tokens: int
    host_tokens: int
    longest_prompt_tokens: int
    saved_bytes: int
    loaded_bytes: int


def prefill_pool_tokens(kind: ModelKind) -> int:
    """Return the size of each prefill rank's device pool."""
    return PREFILL_WINDOW_POOL_TOKENS if kind is ModelKind.SLIDING else PREFILL_POOL_TOKENS


async def prefill_offload_report(
    cluster: LocalCluster, *, device_tokens: int, longest_prompt_tokens: int
) -> PrefillOffloadReport:
    """Make the report from the prefill node's metrics. Arguments are fields of the report."""
    prefill = Figures((await cluster.prefill.http("/metrics"))[1])
    return PrefillOffloadReport(
        device_tokens=device_tokens,
        host_tokens=PREFILL_HOST_TOKENS,
        longest_prompt_tokens=longest_prompt_tokens,
        saved_bytes=prefill.sum("offload_copied_bytes_total", direction="save"),
        loaded_bytes=prefill.sum("offload_copied_bytes_total", direction="load"),
    )


def offload_settings(directory: Path) -> dict[str, object]:
    """Return the settings of the decode tier, by path."""
    return {
        "offload.host_ratio": HOST_RATIO,
        "offload.device_window": DEVICE_WINDOW,
        "offload.stride_tokens": STRIDE_TOKENS,
    } | store_settings(directory)


def store_settings(directory: Path) -> dict[str, object]:
    """Return the settings that both tiers share, by path."""
    return {"storage.directory": directory.absolute(), "storage.get_timeout_s": GET_TIMEOUT_S}


class Figures:
    """The metrics page of a node, summed over its ranks."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> int:
        """Return the sum of all samples with that name and these labels."""
        return round(
            sum(
                sample.value
                for sample in self._samples
                if sample.name == f"kvferry_{name}" and all(sample.labels.get(key) == value for key, value in labels.items())
            )
        )


async def offload_report(cluster: LocalCluster, *, longest_request_tokens: int, page_size: int) -> OffloadReport:
    """Return the report from the nodes' metrics, once no page waits for the store.

    Args:
        page_size: Page size of the decode tier.
    """
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        decode = Figures((await cluster.decode.http("/metrics"))[1])
        is_busy = decode.sum("offload_backup_queue") or decode.sum("store_queue_depth")
        if not is_busy or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_POLL_S)
    prefill = Figures((await cluster.prefill.http("/metrics"))[1])
    ranks = len((await cluster.decode.status()).ranks)
    return OffloadReport(
        device_tokens=decode.sum("pool_pages", group="full") // ranks * page_size,
        longest_request_tokens=longest_request_tokens,
        host_tokens=decode.sum("host_pages", group="full") * page_size,
        hit_tokens_device=decode.sum("offload_hit_tokens_total", tier="device"),
        hit_tokens_host=decode.sum("offload_hit_tokens_total", tier="host"),
        hit_tokens_storage=decode.sum("offload_hit_tokens_total", tier="storage"),
        skipped_tokens=prefill.sum("loaded_prompt_tokens_total"),
        saved_bytes=decode.sum("offload_copied_bytes_total", direction="save"),
        loaded_bytes=decode.sum("offload_copied_bytes_total", direction="load"),
        stored_bytes=decode.sum("store_bytes_total", op="put"),
        fetched_bytes=decode.sum("store_bytes_total", op="get") + prefill.sum("store_bytes_total", op="get"),
        released_pages=decode.sum("offload_released_pages_total"),
        restored_pages=decode.sum("offload_restored_pages_total"),
        unstored_pages=decode.sum("offload_backups_total", outcome="failed"),
    )
