"""The values that movements of whole pages work on: pairs of pages, and the segments of a page in both pools."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from transfer.pool.kv_pool import KVPool

PageNumbers = NDArray[np.int64]

IoBackend = Literal["auto", "kernel", "copies"]
"""How pages cross the host link of a GPU: a kernel reads or writes host memory, or a copy moves each run of host pages.

`auto` chooses by the lengths of the runs.
"""


class WorkBefore(Protocol):
    """A point in a device's work; for a pool on a GPU a recorded `torch.cuda.Event`."""

    def synchronize(self) -> None: ...


class Direction(Enum):
    """Pools of the source and the target pages of a move."""

    SAVE = auto()  # device to host
    LOAD = auto()  # host to device
    COPY = auto()  # device to device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagePairs:
    """A checked `PageMove` or `PageCopy`, in ascending order of its host or target pages; never empty."""

    group: int
    source_pages: PageNumbers
    target_pages: PageNumbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageSegment:
    """K or V of one layer.

    Args:
        buffer: The layer's pages in the pool, each contiguous.
        offset_bytes: Begin of the segment in a host page.
        page_stride: Bytes from one page of the buffer to the next.
    """

    buffer: Tensor
    offset_bytes: int
    num_bytes: int
    page_stride: int


def page_segments(pool: KVPool, group: int) -> list[PageSegment]:
    """Return the segments of a group's page, in the order of the host page; none if the rank has none of its layers."""
    found: list[PageSegment] = []
    offset = 0
    for layer in pool.groups[group].layers_of(pool.layout, pool.shard):
        for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]:
            buffer = pool.buffer(layer, is_v=is_v)
            size = buffer[0].numel() * buffer.element_size()
            stride = buffer.stride(0) * buffer.element_size()
            found.append(PageSegment(buffer=buffer, offset_bytes=offset, num_bytes=size, page_stride=stride))
            offset += size
    return found


def page_runs(*sides: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return [begin, end) of the entries whose pages follow each other on all sides, int64 [n] each; n is at least 1."""
    is_break = np.logical_or.reduce([np.diff(pages) != 1 for pages in sides])
    begins = [0, *(np.flatnonzero(is_break) + 1).tolist()]
    return list(zip(begins, [*begins[1:], len(sides[0])], strict=True))
