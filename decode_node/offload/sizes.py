"""Compute a rank's host pages, and check the bounds of its store. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from transfer.config import StorageConfig
from transfer.config.storage import OffloadConfig
from transfer.errors import ConfigError, MemoryPlanError
from transfer.layer_groups import GroupKind, LayerGroup

MAX_OBJECT_BYTES: Final = 4 << 20
"""Size of one layer of a block in the store. A job of the store's client has as many bytes."""

MIN_BLOCKS_IN_HOST_MEMORY: Final = 16


def host_page_counts(
    config: OffloadConfig,
    groups: Sequence[LayerGroup],
    *,
    page_size: int,
    device_pages: Sequence[int],
    page_bytes: Sequence[int],
    available_bytes: int,
) -> tuple[int, ...]:
    """Return the host pages of each group of layers: the same multiple of each group's device pages.

    Args:
        page_bytes: Size of a page of each group on this rank.
        available_bytes: Host memory that this rank may take.

    Raises:
        ConfigError: No layer keeps every token, or the memory holds less than a stride, or less than a window, without which no
            prefix is found.
        MemoryPlanError: The host has less memory.
    """
    if groups[0].kind is not GroupKind.FULL:
        names = ", ".join(group.name for group in groups)
        raise ConfigError(f"offload is set, and the model has no layers that keep every token ({names}); it must be left out")
    is_kept = [group.kind is not GroupKind.STATE for group in groups]
    device_bytes = sum(count * size for count, size, kept in zip(device_pages, page_bytes, is_kept, strict=True) if kept)
    ratio = config.host_ratio if config.host_ratio is not None else (config.host_memory or 0) / max(1, device_bytes)
    counts = tuple(int(count * ratio) if kept else 0 for count, kept in zip(device_pages, is_kept, strict=True))
    name, value = ("host_ratio", config.host_ratio) if config.host_ratio is not None else ("host_memory", config.host_memory)
    stride = config.stride_pages(page_size)
    if counts[0] < stride:
        raise ConfigError(
            f"offload.{name} is {value}, which gives {counts[0]} host pages; one stride of offload.stride_tokens "
            f"({config.stride_tokens}) takes {stride} pages of {page_size} tokens, {stride * page_bytes[0]:,} bytes of each rank"
        )
    for group, count, on_device in zip(groups, counts, device_pages, strict=True):
        window = min(on_device, -(-group.window_tokens // page_size))  # no prompt reaches further than the device's pages
        if group.kind is GroupKind.WINDOW and count < window:
            raise ConfigError(
                f"offload.{name} is {value}, which gives {count} host pages to {group.name}, of {on_device} on the device; its "
                f"window takes {window} pages of {page_size} tokens: set at least {window / on_device:.3g} times the device pool"
            )
    num_bytes = sum(count * size for count, size in zip(counts, page_bytes, strict=True))
    if num_bytes > available_bytes:
        raise MemoryPlanError(
            f"offload.{name} is {value}, which takes {num_bytes:,} bytes of host memory for each rank; "
            f"{available_bytes:,} are available to each"
        )
    return counts


def stored_block_pages(*, slice_bytes: int, buffer_bytes: int, host_pages: int) -> int:
    """Return the pages of a block that a running request moves on to the store.

    Each layer of a block is one object. It is large enough that the number of calls does not slow a disk or a service, and small
    enough that reading it and attention overlap. A block is also a small part of host memory, where it waits to be written.

    Args:
        slice_bytes: Largest part of a layer in a page on this rank.
        buffer_bytes: Size of the device buffers through which attention reads the block.
        host_pages: Pages in host memory of the layers that keep every token.
    """
    return max(1, min(min(MAX_OBJECT_BYTES, buffer_bytes) // slice_bytes, host_pages // MIN_BLOCKS_IN_HOST_MEMORY))


def check_store_sizes(config: StorageConfig, *, page_bytes: Sequence[int], header_bytes: int, jobs_at_once: int) -> None:
    """Check that the store's bounds hold a rank's pages.

    Args:
        page_bytes: Size of a page of each group that is kept, on this rank.
        header_bytes: Size of a page's header in the store.
        jobs_at_once: Jobs of at least a page that a rank gets in each direction.

    Raises:
        ConfigError: A bound is too small.
    """
    largest = max(page_bytes)
    if config.queue_bytes < jobs_at_once * largest:
        raise ConfigError(
            f"storage.queue_bytes is {config.queue_bytes:,}; it must hold the {jobs_at_once} pages of {largest:,} bytes that are "
            f"on their way at once: set at least {jobs_at_once * largest:,}"
        )
    if config.max_bytes is not None and config.max_bytes < largest + header_bytes:
        raise ConfigError(
            f"storage.max_bytes is {config.max_bytes:,}; it must hold a page, which takes {largest + header_bytes:,} bytes of it"
        )
