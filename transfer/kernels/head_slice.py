"""Gather and scatter on a GPU: one Triton kernel for both directions, all token orders, page sizes and dtypes.

A *row* is what is contiguous on both sides: all travelling heads of a token where they lie together in the pool (NHD), otherwise
one head. Wire rows follow each other; a pool row is found by three strides, so NHD, HND and views of an engine's own tensors
are one case. A program moves a tile of rows x words. Words are as wide as every address and stride allows (8 bytes, and
16-byte accesses where rows begin on multiples of that); the page number is loaded once per row, and all address arithmetic is
64 bits wide.

Source: row tiles after the prototype in design.md section 7. On an H200 gather and scatter of 320 MiB reach 0.99 and 0.97 of a
plain device copy (NHD, pages of 16 in random order; HND 0.95); between bfloat16 and float8 it is 0.54 and 0.38.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transfer.kernels.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory, wire_tensor
from transfer.kernels.elements import ELEMENT_TYPES, narrowed, widened
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, Span, WireBuffer

WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
# Measured on an H200 (320 MiB, rows of 512 bytes, 512 to 4096 tried): copies reach 0.99 of a device copy with the smallest tile,
# conversions twice the speed with the largest.
COPY_TILE_WORDS = 512
CONVERSION_TILE_WORDS = 4096
MAX_ROW_WORDS = 512  # wider rows are cut into column blocks


# Only values that change from call to call are kept out of the specialisation: they would compile variants in mid-service.
@triton.jit(do_not_specialize=["first_buffer", "buffer_step", "num_pages", "first_wire", "wire_step", "num_rows", "first_slot"])  # type: ignore[untyped-decorator]
def copy_rows(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    addresses,
    first_buffer,
    buffer_step,
    pages,
    num_pages,
    wire,
    first_wire,
    wire_step,
    num_rows,
    first_slot,
    page_stride,
    token_stride,
    head_stride,
    ROW: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POOL_TYPE: tl.constexpr,
    WIRE_TYPE: tl.constexpr,
    POOL_ALIGN: tl.constexpr,
    WIRE_ALIGN: tl.constexpr,
    IS_CONVERSION: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    IS_GATHER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Move a tile of rows of one buffer; grid (tiles of rows, buffers, tiles of columns).

    Pool of buffer b: ``addresses[first_buffer + b * buffer_step]``, strides in elements of POOL_TYPE. Its wire begins
    ``first_wire + b * wire_step`` elements of WIRE_TYPE behind `wire`. Rows whose page is outside the pool are left out.
    An align is what row starts are a multiple of, in elements: above 1 it means 16 bytes.
    """
    buffer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row = row < num_rows
    slot = first_slot + row // ROWS_PER_TOKEN
    page = tl.load(pages + slot // PAGE_SIZE, mask=is_row, other=-1)
    is_row = is_row & (page >= 0) & (page < num_pages)
    pool_row = page * page_stride + (slot % PAGE_SIZE) * token_stride + (row % ROWS_PER_TOKEN) * head_stride
    wire_row = first_wire + buffer * wire_step + row * ROW
    address = tl.load(addresses + first_buffer + buffer * buffer_step)
    pool_base = tl.multiple_of(address.to(tl.pointer_type(POOL_TYPE)), 16 if POOL_ALIGN > 1 else 1)
    wire_base = tl.multiple_of(wire.to(tl.pointer_type(WIRE_TYPE)), 16 if WIRE_ALIGN > 1 else 1)
    at_pool = pool_base + tl.multiple_of(pool_row, POOL_ALIGN)[:, None] + column[None, :]
    at_wire = wire_base + tl.multiple_of(wire_row, WIRE_ALIGN)[:, None] + column[None, :]
    mask = is_row[:, None] & (column < ROW)[None, :]
    values = tl.load(at_pool, mask=mask) if IS_GATHER else tl.load(at_wire, mask=mask)
    if IS_CONVERSION:
        values = narrowed(widened(values, SOURCE_KIND), TARGET_KIND)
    if IS_GATHER:
        tl.store(at_wire, values, mask=mask)
    else:
        tl.store(at_pool, values, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGeometry:
    """How the rows of a buffer lie in the pool; sizes in bytes. Buffers that agree in it can share a launch."""

    row_bytes: int
    rows_per_token: int
    page_stride: int
    token_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`count` buffers whose addresses lie `buffer_step` apart in the table, and whose wires lie `wire_step` bytes apart."""

    geometry: RowGeometry
    slots: Span
    first_buffer: int
    buffer_step: int
    first_wire: int
    wire_step: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a launch moves at a time: size and Triton type on both sides, and what row starts are multiples of, in words."""

    pool_bytes: int
    wire_bytes: int
    pool_type: Any
    wire_type: Any
    pool_align: int
    wire_align: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyJob:
    """One checked gather or scatter."""

    pages: Tensor
    buffers: Sequence[WireBuffer]
    wire: Tensor

    def slots(self, buffer: WireBuffer) -> Span:
        return buffer.tokens


class _TritonPlan(CopyPlan):
    def __init__(self, copier: TritonCopier, buffers: Sequence[WireBuffer]) -> None:
        super().__init__(copier, buffers)
        self._launch_all = copier.launch_all

    def _gather(self, pages: Tensor, out: WireMemory, first_page: int, digest: Digest | None) -> None:
        self._launch_all(CopyJob(pages=pages[first_page:], buffers=self.buffers, wire=wire_tensor(out)), is_gather=True)

    def _scatter(self, pages: Tensor, source: WireMemory, first_page: int, digest: Digest | None) -> None:
        self._launch_all(CopyJob(pages=pages[first_page:], buffers=self.buffers, wire=wire_tensor(source)), is_gather=False)

    def _can_digest(self) -> bool:
        return False


class TritonCopier(HeadSliceCopier):
    """Gather and scatter by `copy_rows`: one launch per token range and run of equally spaced buffers of equal shape.

    Queued on the current stream of the pool's device. With TRITON_INTERPRET=1 it also works on CPU tensors, for tests.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        heads: Span,
        wire_dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None = None,
    ) -> None:
        super().__init__(pool, heads=heads, wire_dtype=wire_dtype, scales=scales)
        self._index = {key: index for index, key in enumerate(self.views)}
        geometry = {key: _row_geometry(view) for key, view in self.views.items()}
        self._geometries = list(dict.fromkeys(geometry.values()))
        self._geometry_of = {key: self._geometries.index(found) for key, found in geometry.items()}
        addresses = [view.data_ptr() for view in self.views.values()]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=pool.device)
        self._address_alignment = math.gcd(*addresses)

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _TritonPlan(self, buffers)

    def launch_all(self, job: CopyJob, *, is_gather: bool) -> None:
        with torch.cuda.device_of(job.wire):
            for launch in self._launches(job):
                self._launch(job, launch, is_gather=is_gather)

    def _launches(self, job: CopyJob) -> Iterator[Launch]:
        groups: dict[tuple[int, int, int], list[WireBuffer]] = {}  # begin and end token, geometry
        for buffer in job.buffers:
            tokens = buffer.tokens
            if tokens.end > tokens.begin:
                key = (tokens.begin, tokens.end, self._geometry_of[buffer.layer, buffer.is_v])
                groups.setdefault(key, []).append(buffer)
        for (_, _, geometry), buffers in groups.items():
            indices = [self._index[buffer.layer, buffer.is_v] for buffer in buffers]
            offsets = [buffer.offset_bytes for buffer in buffers]
            begin = 0
            while begin < len(buffers):
                end = _end_of_progression(indices, offsets, begin)
                is_single = end - begin == 1
                yield Launch(
                    geometry=self._geometries[geometry],
                    slots=job.slots(buffers[begin]),
                    first_buffer=indices[begin],
                    buffer_step=0 if is_single else indices[begin + 1] - indices[begin],
                    first_wire=offsets[begin],
                    wire_step=0 if is_single else offsets[begin + 1] - offsets[begin],
                    count=end - begin,
                )
                begin = end

    def _words(self, job: CopyJob, launch: Launch) -> Words:
        rows, element, wire_element = launch.geometry, self.pool.element, self.wire_dtype
        wire_row_bytes = rows.row_bytes // element.num_bytes * wire_element.num_bytes
        strides = (rows.row_bytes, rows.page_stride, rows.token_stride, rows.head_stride)
        pool_common = math.gcd(16, self._address_alignment, *strides)
        wire_common = math.gcd(16, job.wire.data_ptr(), launch.first_wire, launch.wire_step, wire_row_bytes)
        if element is not wire_element:
            return Words(
                pool_bytes=element.num_bytes,
                wire_bytes=wire_element.num_bytes,
                pool_type=ELEMENT_TYPES[element],
                wire_type=ELEMENT_TYPES[wire_element],
                pool_align=16 // element.num_bytes if pool_common == 16 else 1,
                wire_align=16 // wire_element.num_bytes if wire_common == 16 else 1,
            )
        common = math.gcd(pool_common, wire_common)
        size, align = min(8, common), 2 if common == 16 else 1
        kind = WORD_TYPES[size]
        return Words(pool_bytes=size, wire_bytes=size, pool_type=kind, wire_type=kind, pool_align=align, wire_align=align)

    def _launch(self, job: CopyJob, launch: Launch, *, is_gather: bool) -> None:
        rows, words = launch.geometry, self._words(job, launch)
        is_conversion = self.pool.element is not self.wire_dtype
        row = rows.row_bytes // words.pool_bytes
        columns = min(MAX_ROW_WORDS, triton.next_power_of_2(row))
        tile_rows = max(1, (CONVERSION_TILE_WORDS if is_conversion else COPY_TILE_WORDS) // columns)
        num_rows = len(launch.slots) * rows.rows_per_token
        grid = (triton.cdiv(num_rows, tile_rows), launch.count, triton.cdiv(row, columns))
        kinds = (self.pool.element.value, self.wire_dtype.value)
        _run(
            grid,
            self._addresses,
            launch.first_buffer,
            launch.buffer_step,
            job.pages,
            self.pool.num_pages,
            job.wire,
            launch.first_wire // words.wire_bytes,
            launch.wire_step // words.wire_bytes,
            num_rows,
            launch.slots.begin,
            rows.page_stride // words.pool_bytes,
            rows.token_stride // words.pool_bytes,
            rows.head_stride // words.pool_bytes,
            ROW=row,
            ROWS_PER_TOKEN=rows.rows_per_token,
            PAGE_SIZE=self.pool.page_size,
            POOL_TYPE=words.pool_type,
            WIRE_TYPE=words.wire_type,
            POOL_ALIGN=words.pool_align,
            WIRE_ALIGN=words.wire_align,
            IS_CONVERSION=is_conversion,
            SOURCE_KIND=kinds[0] if is_gather else kinds[1],
            TARGET_KIND=kinds[1] if is_gather else kinds[0],
            IS_GATHER=is_gather,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=columns,
        )


def _run(grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
    copy_rows[grid](*arguments, **constants)


def _row_geometry(view: Tensor) -> RowGeometry:
    _, _, heads, dim = view.shape
    element = view.element_size()
    page_stride, token_stride, head_stride, _ = (stride * element for stride in view.stride())
    if heads == 1 or head_stride == dim * element:
        return RowGeometry(
            row_bytes=heads * dim * element,
            rows_per_token=1,
            page_stride=page_stride,
            token_stride=token_stride,
            head_stride=0,
        )
    return RowGeometry(
        row_bytes=dim * element,
        rows_per_token=heads,
        page_stride=page_stride,
        token_stride=token_stride,
        head_stride=head_stride,
    )


def _end_of_progression(indices: Sequence[int], offsets: Sequence[int], begin: int) -> int:
    """End of the longest run from `begin` over which indices and offsets both grow by constant steps."""
    end = begin + 1
    while end < len(indices) and (
        end == begin + 1
        or (
            indices[end] - indices[end - 1] == indices[begin + 1] - indices[begin]
            and offsets[end] - offsets[end - 1] == offsets[begin + 1] - offsets[begin]
        )
    ):
        end += 1
    return end
