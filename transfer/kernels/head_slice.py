"""Gather and scatter on a GPU: one Triton kernel for both directions, all token orders, page sizes and dtypes.

A *row* is what is contiguous on both sides: all travelling heads of a token where they lie together in the pool (NHD), otherwise
one head. Wire rows follow each other; a pool row is found by three strides, so NHD, HND and views of an engine's own tensors
are one case. A program moves tiles of rows x words of one buffer. Words are as wide as every address and stride allows (8 bytes,
and 16-byte accesses where rows begin on multiples of that); the page number is loaded once per row, and pool and wire offsets are
64 bits wide. All buffers of a plan with equal tokens and shapes are one launch: a table has their addresses and wire offsets.

With a digest, the words are mixed while they are in registers, and each program adds to the sum once. That needs whole words on
both sides and no conversion; other plans say so (`can_digest`), and their wire is digested in a pass of its own.

Source: row tiles after the prototype in design.md section 7; the digest is `transfer.kernels.words`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from transfer.errors import LayoutError
from transfer.kernels.copier import CopyPlan, Digest, HeadSliceCopier, WireMemory
from transfer.kernels.digest import WORD_BYTES
from transfer.kernels.elements import ELEMENT_TYPES, narrowed, widened
from transfer.kernels.launch import IS_INTERPRETED, Launcher, upload
from transfer.kernels.words import add_to, check_digest, keys_of, mixed, offsets_of
from transfer.kv_pool import PagedKVPool, scale_factor
from transfer.layout import DType, Span, WireBuffer

WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MAX_ROWS = 2**31 - 1  # of a buffer in one launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The sizes that speed depends on; measured on an H200 with ``python -m bench.kernels --sweep``.

    Args:
        copy_words: Words of a tile that is only copied.
        digest_words: Words of a tile that is digested too.
        digest_tiles: Tiles of a program that digests: its sum is made once.
        conversion_elements: Elements of a tile that is converted.
        max_columns: Words of a row that a tile spans at most; wider rows are cut into columns.
        num_warps: Of a program.
    """

    copy_words: int = 512
    digest_words: int = 512
    digest_tiles: int = 4
    conversion_elements: int = 4096
    max_columns: int = 512
    num_warps: int = 4


DEFAULT_TUNING = Tuning()


# Nothing is specialised for values that change from plan to plan: that would compile variants in mid-service.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "table", "factors", "pages", "wire", "digest", "num_pages", "num_rows", "first_slot", "page_stride", "token_stride",
        "head_stride",
    ]
)  # fmt: skip
def copy_rows(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    pages: tl.int64,
    wire: tl.int64,
    digest: tl.int64,
    table: tl.int64,
    factors: tl.int64,
    num_pages: tl.int64,
    num_rows: tl.int32,
    first_slot: tl.int32,
    page_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    ROW: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POOL_TYPE: tl.constexpr,
    WIRE_TYPE: tl.constexpr,
    POOL_ALIGN: tl.constexpr,
    WIRE_ALIGN: tl.constexpr,
    WIRE_BYTES: tl.constexpr,
    IS_CONVERSION: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_NATIVE: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    TARGET_KIND: tl.constexpr,
    IS_GATHER: tl.constexpr,
    HAS_DIGEST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Move TILES tiles of rows of one buffer; grid (groups of tiles, buffers, tiles of columns).

    All pointers are addresses. ``table`` has for each buffer the address of its first pool row and the offset of its wire in
    bytes. ROW is in elements of POOL_TYPE and WIRE_TYPE, which are as many; an align is what row starts are a multiple of, in
    such elements: above 1 it means 16 bytes. Strides are in units of POOL_ALIGN elements. Rows whose page is outside the pool are
    left out.
    """
    buffer = tl.program_id(1)
    entry = table.to(tl.pointer_type(tl.int64)) + 2 * buffer
    pool_base = tl.multiple_of(tl.load(entry).to(tl.pointer_type(POOL_TYPE)), 16 if POOL_ALIGN > 1 else 1)
    first_wire = tl.load(entry + 1) // WIRE_BYTES
    wire_base = tl.multiple_of(wire.to(tl.pointer_type(WIRE_TYPE)), 16 if WIRE_ALIGN > 1 else 1)
    page_table = pages.to(tl.pointer_type(tl.int64))
    column = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    if HAS_DIGEST:
        column_keys = offsets_of(column.to(tl.int64))
        counts = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.uint64)
    for tile in tl.static_range(TILES):
        row = (tl.program_id(0) * TILES + tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = row < num_rows
        slot = first_slot + row // ROWS_PER_TOKEN
        page = tl.load(page_table + slot // PAGE_SIZE, mask=is_row, other=-1)
        is_row = is_row & (page >= 0) & (page < num_pages)
        # In units of what rows begin on: the compiler drops what it is told of a sum when it simplifies the sum.
        pool_row = page * page_stride + (slot % PAGE_SIZE) * token_stride + (row % ROWS_PER_TOKEN) * head_stride
        pool_row = pool_row * POOL_ALIGN
        wire_row = first_wire + row.to(tl.int64) * ROW
        at_pool = pool_base + pool_row[:, None] + column[None, :]
        at_wire = wire_base + tl.multiple_of(wire_row, WIRE_ALIGN)[:, None] + column[None, :]
        mask = is_row[:, None] & (column < ROW)[None, :]
        values = tl.load(at_pool, mask=mask) if IS_GATHER else tl.load(at_wire, mask=mask)
        if HAS_DIGEST:
            keys = keys_of(wire_row)[:, None] + column_keys[None, :]
            counts += tl.where(mask, mixed(values.to(tl.uint64, bitcast=True), keys), 0)
        if IS_CONVERSION:
            numbers = widened(values, SOURCE_KIND, IS_NATIVE)
            if IS_SCALED:
                numbers = numbers * tl.load(factors.to(tl.pointer_type(tl.float32)) + buffer)
            values = narrowed(numbers, TARGET_KIND, IS_NATIVE)
        if IS_GATHER:
            tl.store(at_wire, values, mask=mask)
        else:
            tl.store(at_pool, values, mask=mask)
    if HAS_DIGEST:
        add_to(digest, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGeometry:
    """How the rows of a buffer lie in the pool; sizes in bytes. Buffers that agree in it can share a launch."""

    row_bytes: int
    rows_per_token: int
    page_stride: int
    token_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.page_stride, self.token_stride, self.head_stride


class TritonCopier(HeadSliceCopier):
    """Gather and scatter by `copy_rows`: one launch per token range and shape of buffers.

    Queued on the current stream of the pool's device. With TRITON_INTERPRET=1 it also works on CPU tensors, for tests.

    Args:
        tuning: Other sizes than the measured ones.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        heads: Span,
        wire_dtype: DType,
        scales: Mapping[tuple[int, bool], float] | None = None,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        super().__init__(pool, heads=heads, wire_dtype=wire_dtype, scales=scales)
        self.geometries = {key: _row_geometry(view) for key, view in self.views.items()}
        self.tuning = tuning
        # Every address and stride of the pool is a multiple of it.
        self.pool_common = math.gcd(
            16,
            *(view.data_ptr() for view in self.views.values()),
            *(number for rows in self.geometries.values() for number in (rows.row_bytes, *rows.strides)),
        )

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _TritonPlan(self, buffers)


class _TritonPlan(CopyPlan):
    _copier: TritonCopier

    def __init__(self, copier: TritonCopier, buffers: Sequence[WireBuffer]) -> None:
        super().__init__(copier, buffers)
        groups: dict[tuple[Span, RowGeometry], list[WireBuffer]] = {}
        for buffer in self.buffers:
            groups.setdefault((buffer.tokens, copier.geometries[buffer.layer, buffer.is_v]), []).append(buffer)
        self._launches = [_Launch(copier, found, rows) for (_, rows), found in groups.items()]
        self._streams: set[int] = set()

    def _can_digest(self) -> bool:
        copier: TritonCopier = self._copier
        is_copy = copier.wire_dtype is copier.pool.element
        on_wire = (number for buffer in self.buffers for number in (buffer.offset_bytes, buffer.row_bytes))
        return is_copy and math.gcd(WORD_BYTES, copier.pool_common, *on_wire) == WORD_BYTES

    def _check_digest(self, digest: Digest) -> None:
        check_digest(digest, self._pool.device)

    def _check_address_only(self, wire: WireMemory, name: str) -> None:
        device_index, device = getattr(wire, "device_index", None), self._pool.device
        if device.type != "cuda" or device_index != device.index:
            raise LayoutError(
                f"{name} is a {type(wire).__name__} for kernels of device {device_index}; must be for kernels of {device}"
            )

    def _gather(self, pages: Tensor, out: WireMemory, first_page: int, digest: Digest | None) -> None:
        self._launch_all(pages, out, first_page, digest, is_gather=True)

    def _scatter(self, pages: Tensor, source: WireMemory, first_page: int, digest: Digest | None) -> None:
        self._launch_all(pages, source, first_page, digest, is_gather=False)

    def _launch_all(self, pages: Tensor, wire: WireMemory, first_page: int, digest: Digest | None, *, is_gather: bool) -> None:
        wire_address = wire.data_ptr()
        if digest is not None and wire_address % WORD_BYTES:
            raise LayoutError(f"wire begins at {wire_address:#x}; to be digested on the way it must begin on {WORD_BYTES} bytes")
        if self._pool.device.type == "cuda":
            self._keep_for(torch.cuda.current_stream(self._pool.device))
        digest_address = digest.data_ptr() if isinstance(digest, Tensor) else 0
        pages_address = pages.data_ptr() + 8 * first_page
        for launch in self._launches:
            launch(pages_address, wire_address, digest_address, is_gather=is_gather)

    def _keep_for(self, stream: torch.cuda.Stream) -> None:
        """See to it that the tables' memory is not used anew before what this stream has queued with them has run."""
        if stream.cuda_stream not in self._streams:
            self._streams.add(stream.cuda_stream)
            for launch in self._launches:
                launch.keep_for(stream)


class _Launch:
    """Buffers with equal tokens and shapes, in one launch."""

    def __init__(self, copier: TritonCopier, buffers: Sequence[WireBuffer], rows: RowGeometry) -> None:
        pool = copier.pool
        self._copier = copier
        self._rows = rows
        tokens = buffers[0].tokens
        self._num_rows = len(tokens) * rows.rows_per_token
        if max(self._num_rows, tokens.end) > _MAX_ROWS:
            raise LayoutError(f"buffers have {self._num_rows} rows up to token {tokens.end}; one launch takes {_MAX_ROWS}")
        self._first_slot = tokens.begin
        self._count = len(buffers)
        wire_row_bytes = rows.row_bytes // pool.element.num_bytes * copier.wire_dtype.num_bytes
        self._wire_common = math.gcd(16, wire_row_bytes, *(buffer.offset_bytes for buffer in buffers))
        table = [(copier.view(buffer).data_ptr(), buffer.offset_bytes) for buffer in buffers]
        self._table = upload(torch.tensor(table, dtype=torch.int64), pool.device)
        scales = [copier.scale(buffer) for buffer in buffers]
        self._is_scaled = pool.element.num_bytes != copier.wire_dtype.num_bytes and scales != [1.0] * len(scales)
        self._factors: dict[bool, Tensor] = {}
        if self._is_scaled:
            for is_gather in (True, False):
                sizes = (pool.element.num_bytes, copier.wire_dtype.num_bytes)
                start, end = sizes if is_gather else sizes[::-1]
                factors = [scale_factor(scale, from_bytes=start, to_bytes=end) for scale in scales]
                self._factors[is_gather] = upload(torch.tensor(factors, dtype=torch.float32), pool.device)
        self._variants: dict[tuple[bool, int, bool], tuple[Launcher, tuple[int, int, int], tuple[int, ...]]] = {}

    def __call__(self, pages: int, wire: int, digest: int, *, is_gather: bool) -> None:
        key = (is_gather, math.gcd(self._wire_common, wire), digest != 0)
        found = self._variants.get(key)
        if found is None:
            found = self._variants[key] = self._variant(*key)
        launcher, grid, arguments = found
        launcher(grid, (pages, wire, digest, *arguments))

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        for tensor in (self._table, *self._factors.values()):
            tensor.record_stream(stream)

    def _variant(
        self, is_gather: bool, wire_common: int, has_digest: bool
    ) -> tuple[Launcher, tuple[int, int, int], tuple[int, ...]]:
        copier, rows, tuning = self._copier, self._rows, self._copier.tuning
        pool = copier.pool
        element, wire_element = pool.element, copier.wire_dtype
        is_conversion = element is not wire_element
        if is_conversion:
            pool_bytes, wire_bytes = element.num_bytes, wire_element.num_bytes
            pool_type, wire_type = ELEMENT_TYPES[element], ELEMENT_TYPES[wire_element]
            is_pool_aligned, is_wire_aligned = copier.pool_common == 16, wire_common == 16
        else:
            common = math.gcd(copier.pool_common, wire_common)
            pool_bytes = wire_bytes = min(8, common)
            pool_type = wire_type = WORD_TYPES[pool_bytes]
            is_pool_aligned = is_wire_aligned = common == 16
        row = rows.row_bytes // pool_bytes
        columns = columns_for(row, tuning.max_columns)
        tile = tuning.conversion_elements if is_conversion else tuning.digest_words if has_digest else tuning.copy_words
        # Not fewer for a plan of few rows: each size is a variant to compile, in the middle of serving.
        tile_rows = max(1, tile // columns)
        tiles = tuning.digest_tiles if has_digest else 1
        kinds = (element.value, wire_element.value) if is_gather else (wire_element.value, element.value)
        constants: dict[str, Any] = {
            "ROW": row,
            "ROWS_PER_TOKEN": rows.rows_per_token,
            "PAGE_SIZE": pool.page_size,
            "POOL_TYPE": pool_type,
            "WIRE_TYPE": wire_type,
            "POOL_ALIGN": 16 // pool_bytes if is_pool_aligned else 1,
            "WIRE_ALIGN": 16 // wire_bytes if is_wire_aligned else 1,
            "WIRE_BYTES": wire_bytes,
            "IS_CONVERSION": is_conversion,
            "IS_SCALED": self._is_scaled,
            "IS_NATIVE": _converts_natively(pool.device),
            "SOURCE_KIND": kinds[0],
            "TARGET_KIND": kinds[1],
            "IS_GATHER": is_gather,
            "HAS_DIGEST": has_digest,
            "TILE_ROWS": tile_rows,
            "TILE_COLUMNS": columns,
            "TILES": tiles,
        }
        launcher = _launcher(pool.device, tuning.num_warps, tuple(constants.items()))
        grid = (triton.cdiv(self._num_rows, tile_rows * tiles), self._count, triton.cdiv(row, columns))
        arguments = (
            self._table.data_ptr(),
            self._factors[is_gather].data_ptr() if self._is_scaled else 0,
            pool.num_pages,
            self._num_rows,
            self._first_slot,
            *(stride // (pool_bytes * constants["POOL_ALIGN"]) for stride in rows.strides),
        )
        return launcher, grid, arguments


@cache
def _launcher(device: torch.device, num_warps: int, constants: tuple[tuple[str, Any], ...]) -> Launcher:
    return Launcher(copy_rows, device, dict(constants), num_warps=num_warps)


@cache
def _converts_natively(device: torch.device) -> bool:
    """Whether the device rounds to bfloat16 and float8 as `convert` does; the interpreter and devices before Ada do not."""
    return device.type == "cuda" and not IS_INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


def columns_for(row: int, most: int) -> int:
    """How many words of a row a tile spans: a power of two, as many as leave at most an eighth of the lanes without work.

    At least 16 words, which are a line of the cache, where the row has them.
    """
    columns: int = min(most, triton.next_power_of_2(row))
    while columns > 16 and triton.cdiv(row, columns) * columns * 8 > row * 9:
        columns //= 2
    return columns


def _row_geometry(view: Tensor) -> RowGeometry:
    _, _, heads, dim = view.shape
    element = view.element_size()
    page_stride, token_stride, head_stride, _ = (stride * element for stride in view.stride())
    is_joined = heads == 1 or head_stride == dim * element
    return RowGeometry(
        row_bytes=(heads if is_joined else 1) * dim * element,
        rows_per_token=1 if is_joined else heads,
        page_stride=page_stride,
        token_stride=token_stride,
        head_stride=0 if is_joined else head_stride,
    )
