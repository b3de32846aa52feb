"""How many host pages a rank has. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from transfer.config.offload import OffloadConfig
from transfer.errors import ConfigError, MemoryPlanError
from transfer.layer_groups import GroupKind, LayerGroup


def host_page_counts(
    config: OffloadConfig,
    groups: Sequence[LayerGroup],
    *,
    page_size: int,
    device_pages: Sequence[int],
    page_bytes: Sequence[int],
    available_bytes: int,
) -> tuple[int, ...]:
    """Host pages of each group of layers: the same multiple of each one's device pages.

    Args:
        page_size: Tokens of a page.
        device_pages: Pages of each group's device pool.
        page_bytes: Bytes of a page of each group on this rank.
        available_bytes: Host memory that this rank may take.

    Raises:
        ConfigError: The model has no layers that keep every token, or the memory does not hold one stride.
        MemoryPlanError: The host has not that much memory.
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
    num_bytes = sum(count * size for count, size in zip(counts, page_bytes, strict=True))
    if num_bytes > available_bytes:
        raise MemoryPlanError(
            f"offload.{name} is {value}, which takes {num_bytes:,} bytes of host memory for each rank; "
            f"{available_bytes:,} are available to each"
        )
    return counts
