"""The Triton kernel that moves whole pages: between pool and packed pages, between two pools, and to or from pinned host memory.

A *segment* is a part of a page that is contiguous on both sides, such as the K of one layer. One launch moves all segments of
equal size whose pages are equally far apart. A side is either *packed*, where row i of a call is its page i, or its pages are
looked up in a table.

Programs go from tile to tile in steps of their number. Memory of the device itself is fastest with a program per tile. Over a
host link a few programs keep as many bytes under way as the link takes, and leave the other cores to computation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from transfer.copy.copy_kernel import WORD_TYPES, piece_words
from transfer.copy.launch import Launcher, current_stream, upload

TILE_WORDS: Final = 1024
_MOST_COLUMNS: Final = 512
_NUM_WARPS: Final = 4

LINK_PROGRAMS: Final = 64
"""Programs of a launch that reads or writes host memory: 64 x 8 KiB under way at once, four times what 64 GB/s take in 2 us."""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["source_pages", "target_pages", "table", "num_rows", "count_at", "num_source_pages", "num_target_pages"]
)
def copy_segments(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    source_pages: tl.int64,
    target_pages: tl.int64,
    table: tl.int64,
    num_rows: tl.int64,
    count_at: tl.int64,
    num_source_pages: tl.int64,
    num_target_pages: tl.int64,
    NUM_SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    TARGET_STRIDE: tl.constexpr,
    IS_SOURCE_PACKED: tl.constexpr,
    IS_TARGET_PACKED: tl.constexpr,
    WORD_TYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Move row i of every segment from page source_pages[i] to page target_pages[i]; grid (programs,).

    All pointers are addresses. ``table`` has for each segment its address in page 0 of the source and of the target. Sizes and
    strides are in words. Rows with a page outside either side are left out. Where ``count_at`` is not 0, it is the address of an
    int64: there are as many rows, at most ``num_rows``.
    """
    if count_at != 0:
        num_rows = tl.minimum(num_rows, tl.load(count_at.to(tl.pointer_type(tl.int64))))
    TILES_PER_ROW: tl.constexpr = (SEGMENT + COLUMNS - 1) // COLUMNS
    tiles_per_segment = ((num_rows + ROWS - 1) // ROWS) * TILES_PER_ROW
    first = tl.program_id(0).to(tl.int64)
    for index in range(first, tiles_per_segment * NUM_SEGMENTS, tl.num_programs(0)):
        segment, tile = index // tiles_per_segment, index % tiles_per_segment
        row = (tile // TILES_PER_ROW) * ROWS + tl.arange(0, ROWS)
        column = (tile % TILES_PER_ROW) * COLUMNS + tl.arange(0, COLUMNS)
        is_row = row < num_rows
        source, target = row, row
        if not IS_SOURCE_PACKED:
            source = tl.load(source_pages.to(tl.pointer_type(tl.int64)) + row, mask=is_row, other=-1)
        if not IS_TARGET_PACKED:
            target = tl.load(target_pages.to(tl.pointer_type(tl.int64)) + row, mask=is_row, other=-1)
        is_moved = is_row & (source >= 0) & (source < num_source_pages) & (target >= 0) & (target < num_target_pages)
        entry = table.to(tl.pointer_type(tl.int64)) + 2 * segment
        at_source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(WORD_TYPE)), 16 if IS_ALIGNED else 1)
        at_target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(WORD_TYPE)), 16 if IS_ALIGNED else 1)
        mask = is_moved[:, None]
        if SEGMENT % COLUMNS != 0:
            mask = mask & (column < SEGMENT)[None, :]
        values = tl.load(at_source + (source * SOURCE_STRIDE)[:, None] + column[None, :], mask=mask)
        tl.store(at_target + (target * TARGET_STRIDE)[:, None] + column[None, :], values, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a page that is contiguous on both sides; sizes in bytes.

    Args:
        source, target: Address in page 0 of either side.
        source_stride, target_stride: Distance of two pages.
    """

    source: int
    target: int
    source_stride: int
    target_stride: int
    num_bytes: int

    @property
    def reversed(self) -> Segment:
        """The same segment in the other direction."""
        return Segment(
            source=self.target,
            target=self.source,
            source_stride=self.target_stride,
            target_stride=self.source_stride,
            num_bytes=self.num_bytes,
        )


class SegmentCopier:
    """Moves some segments of any pages, prepared once.

    Queued on the current stream of the device. With TRITON_INTERPRET=1 it also works on CPU memory, for tests.

    Args:
        segments: Moved parts of every page.
        num_source_pages, num_target_pages: Pages of either side.
        is_source_packed, is_target_packed: Page i of that side is row i of a call.
        max_programs: Most programs of a launch; None means one for each tile.
    """

    def __init__(
        self,
        device: torch.device,
        segments: Sequence[Segment],
        *,
        num_source_pages: int,
        num_target_pages: int,
        is_source_packed: bool = False,
        is_target_packed: bool = False,
        max_programs: int | None = None,
    ) -> None:
        self._device = device
        self._num_pages = (num_source_pages, num_target_pages)
        self._max_programs = max_programs
        alike: dict[tuple[int, int, int], list[Segment]] = {}
        for segment in segments:
            alike.setdefault((segment.num_bytes, segment.source_stride, segment.target_stride), []).append(segment)
        self._launches = [_Launch(device, own, is_source_packed, is_target_packed) for own in alike.values()]

    def compile(self) -> None:
        """Compile and load the kernels of calls, without a launch; idempotent."""
        for launch in self._launches:
            launch.launcher.compile((0, 0, launch.table.data_ptr(), 0, 0, *self._num_pages))

    def __call__(self, source_pages: int, target_pages: int, num_rows: int, count_at: int = 0) -> None:
        """Queue the copy of `num_rows` pages.

        Args:
            source_pages, target_pages: Addresses on the device of int64 [num_rows]; 0 for a packed side. The tables must stay
                until the copy has run.
            count_at: Address on the device of an int64, read when the copy runs: the number of rows that exist. 0 means all.
        """
        stream = current_stream(self._device)
        for launch in self._launches:
            tiles = launch.tiles(num_rows)
            programs = tiles if self._max_programs is None else min(tiles, self._max_programs)
            if programs:
                arguments = (source_pages, target_pages, launch.table.data_ptr(), num_rows, count_at, *self._num_pages)
                launch.launcher(stream, (programs, 1, 1), arguments)


class _Launch:
    """Segments of one size, equally far apart from page to page."""

    def __init__(self, device: torch.device, segments: Sequence[Segment], is_source_packed: bool, is_target_packed: bool) -> None:
        first = segments[0]
        common = math.gcd(
            16,
            *(first.num_bytes, first.source_stride, first.target_stride),
            *(address for segment in segments for address in (segment.source, segment.target)),
        )
        word_bytes = min(8, common)
        words = first.num_bytes // word_bytes
        columns = piece_words(words, _MOST_COLUMNS)
        rows = max(1, TILE_WORDS // columns)
        self._count, self._rows = len(segments), rows
        self._tiles_per_row = -(-words // columns)
        self.table = upload(torch.tensor([(one.source, one.target) for one in segments], dtype=torch.int64), device)
        constants: dict[str, Any] = {
            "NUM_SEGMENTS": len(segments),
            "SEGMENT": words,
            "SOURCE_STRIDE": first.source_stride // word_bytes,
            "TARGET_STRIDE": first.target_stride // word_bytes,
            "IS_SOURCE_PACKED": is_source_packed,
            "IS_TARGET_PACKED": is_target_packed,
            "WORD_TYPE": WORD_TYPES[word_bytes],
            "IS_ALIGNED": common == 16,
            "COLUMNS": columns,
            "ROWS": rows,
        }
        self.launcher = _launcher(device, tuple(constants.items()))

    def tiles(self, num_rows: int) -> int:
        return -(-num_rows // self._rows) * self._tiles_per_row * self._count


@cache
def _launcher(device: torch.device, constants: tuple[tuple[str, Any], ...]) -> Launcher:
    return Launcher(copy_segments, device, dict(constants), num_warps=_NUM_WARPS)
