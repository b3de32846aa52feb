"""Move whole pages between two pools in host memory: one strided copy for each run of pages, for all layers, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transfer.copy.page_segments import (
    Direction,
    PageNumbers,
    PagePairs,
    PageSegment,
    WorkBefore,
    page_runs,
    page_segments,
)
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool, as_words

Array = npt.NDArray[Any]
"""[segments, pages] of opaque elements, each one segment of a page, which NumPy moves by one memmove each."""


class HostPageMovement:
    """See `PageMovement`. K and V of evenly spaced layers are one array, so a page is a copy or two."""

    def __init__(self, pool: KVPool, host: HostPool) -> None:
        self._stacks: list[list[tuple[Array, Array]]] = []
        for group, (count, size) in enumerate(zip(pool.num_pages, host.page_bytes, strict=True)):
            stacks = _stacks(page_segments(pool, group)) if count and size else []
            self._stacks.append([(_on_pool(stack), _on_host(stack, host.pages(group))) for stack in stacks])

    def compile(self) -> None:
        """Nothing to do on a host."""

    def move(self, direction: Direction, moves: Sequence[PagePairs], after: WorkBefore | None) -> None:
        if after is not None:
            after.synchronize()
        for move in moves:
            for on_pool, on_host in self._stacks[move.group]:
                source = on_host if direction is Direction.LOAD else on_pool
                target = on_host if direction is Direction.SAVE else on_pool
                _copy_runs(source, move.source_pages, target, move.target_pages)


def _copy_runs(source: Array, source_pages: PageNumbers, target: Array, target_pages: PageNumbers) -> None:
    """Copy pages. Pages that follow each other on both sides are one copy."""
    for begin, end in page_runs(source_pages, target_pages):
        first_source, first_target, count = int(source_pages[begin]), int(target_pages[begin]), end - begin
        np.copyto(target[:, first_target : first_target + count], source[:, first_source : first_source + count])


def _stacks(segments: Sequence[PageSegment]) -> list[list[PageSegment]]:
    """Return segments of one size and allocation, in runs that are evenly spaced both in the pool and in a host page."""
    alike: dict[tuple[int, int, int], list[PageSegment]] = {}
    for segment in segments:
        memory = segment.buffer.untyped_storage().data_ptr()
        alike.setdefault((memory, segment.num_bytes, segment.page_stride), []).append(segment)
    found: list[list[PageSegment]] = []
    for own in alike.values():
        stack = [own[0]]
        for segment in own[1:]:
            if len(stack) > 1 and _distances(stack[-1], segment) != _distances(stack[-2], stack[-1]):
                found.append(stack)
                stack = []
            stack.append(segment)
        found.append(stack)
    return found


def _distances(first: PageSegment, second: PageSegment) -> tuple[int, int]:
    """Return the distance of two segments in the pool and in a host page, in bytes."""
    return second.buffer.data_ptr() - first.buffer.data_ptr(), second.offset_bytes - first.offset_bytes


def _on_pool(stack: Sequence[PageSegment]) -> Array:
    first = stack[0]
    distance = _distances(first, stack[1])[0] if len(stack) > 1 else 0
    return _opaque(as_words(first.buffer).flatten(1).view(torch.uint8), len(stack), distance)


def _on_host(stack: Sequence[PageSegment], pages: Tensor) -> Array:
    first = stack[0]
    distance = _distances(first, stack[1])[1] if len(stack) > 1 else 0
    return _opaque(pages[:, first.offset_bytes : first.offset_bytes + first.num_bytes], len(stack), distance)


def _opaque(first_of_stack: Tensor, num_segments: int, distance: int) -> Array:
    """Return the segments of a stack, `distance` bytes apart, from those of its first: uint8 [pages, bytes]."""
    num_pages, num_bytes = first_of_stack.shape
    first = first_of_stack.numpy().view(np.dtype((np.void, num_bytes)))[:, 0]
    return np.lib.stride_tricks.as_strided(first, (num_segments, num_pages), (distance, first.strides[0]))
