"""Gather and scatter on a GPU: plans of the Triton kernel `transfer.copy.copy_kernel`.

All buffers of a plan with equal tokens and shapes are one launch: a table has their addresses and wire offsets. Values that
differ between plans are no constants of the kernel, so the chunks of all requests share a few compiled variants.

With a digest, the kernel sums up the wire's words during the copy. For that, rows and offsets of the wire must be whole words. A
copy without conversion needs the same of the pool. Otherwise `can_digest` is False, and the wire is digested in a separate pass.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, KernelLaunch, WireMemory, check_device_digest
from transfer.copy.copy_kernel import MAX_PIECES, WORD_TYPES, copy_pieces, piece_words
from transfer.copy.digest import WORD_BYTES
from transfer.copy.elements import ELEMENT_TYPES
from transfer.copy.launch import IS_INTERPRETED, Launcher, Stream, current_stream, upload
from transfer.errors import LayoutError
from transfer.layout import DType, Range, WireBuffer
from transfer.pool.kv_pool import PagedKVPool, scale_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Parameters that change only the speed. ``python -m bench.kernels --sweep`` compares them on a GPU.

    Chosen on an H200 (torch 2.11, Triton 3.6) with Llama-3-70B P2->D4 gather, its P4->D2 scatter, both in pages of 16, and
    Qwen3-8B P4->D1 scatter in pages of 1. Shares of a device copy, in that order:

    - Copies: 256 words by 2 warps 0.97, 0.96, 0.95; 512 by 4 0.95, 0.96, 0.95; 1024 by 8 0.94, 0.94, 0.94.
    - With digest: 2048 words by 16 warps 0.95, 0.95, 0.94; 1024 by 4 0.95, 0.93, 0.93; 512 by 4 0.81, 0.76, 0.77.

    Rejected there with 512 and 1024 words: a bound on registers and other cache hints gained nothing. Programs side by side that
    move the same tokens of several buffers lost (0.90 to 0.93). Conversions were not compared. Compiled for an H100, one from
    bfloat16 to float8 with digest has 39 registers and no exchange between threads before its sum.

    Args:
        copy_words, copy_warps: Words of a tile that is only copied, and warps of its program.
        digest_words, digest_warps: The same for a tile that is digested too. If it is converted, its words on the wire: each
            program adds to the same sum, so small tiles cost the same whatever the elements are.
        conversion_elements, conversion_warps: Elements and warps of a tile that is only converted.
        max_columns: Most words of a row in a piece.
        halved_bytes: Least bytes of a plan that `can_halve`. With halves, the scatter of the first one runs beside the gather of
            the second. Two more launches take 0.01 ms. A scatter of half of these bytes takes 0.05 ms.
        peer_programs: Most programs of a gather into memory with an address only, which is a peer's. The link bounds such a
            gather. More programs only keep the engine's kernels waiting (docs/adr/0087). 0 means one for each tile.
        peer_words, peer_warps: Words of a tile of such a gather, and warps of its program, if it is not converted. A few programs
            with small tiles have too few bytes under way for the link.
    """

    copy_words: int = 256
    copy_warps: int = 2
    digest_words: int = 2048
    digest_warps: int = 16
    conversion_elements: int = 4096
    conversion_warps: int = 4
    max_columns: int = 512
    halved_bytes: int = 128 << 20
    peer_programs: int = 64
    peer_words: int = 8192
    peer_warps: int = 32


DEFAULT_TUNING = Tuning()

Launch = tuple[Launcher, tuple[int, int, int], tuple[int, ...]]
"""A variant of the kernel, its grid, and its arguments. A prepared launch lacks the first three: pages, wire and digest."""


_Key = tuple[bool, int, bool, bool]
"""Key of prepared launches: is a gather, common divisor of 16 and the wire's address, has a digest, has a limit of programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGeometry:
    """Place of the rows of a buffer in the pool; sizes in bytes. Buffers with equal geometry can share a launch."""

    row_bytes: int
    rows_per_token: int
    page_stride: int
    token_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.page_stride, self.token_stride, self.head_stride


class TritonCopier(HeadSliceCopier):
    """Gather and scatter by `copy_pieces`: one launch for each token range and shape of buffers.

    Queued on the current stream of the pool's device. With TRITON_INTERPRET=1 it also works on CPU tensors, for tests.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        heads: Range,
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

    def wire_row_bytes(self, rows: RowGeometry) -> int:
        """Return the bytes of a row on the wire."""
        return rows.row_bytes // self.pool.element.num_bytes * self.wire_dtype.num_bytes


class _TritonPlan(CopyPlan):
    """One launch for all buffers that have equal tokens and rows.

    Everything of a launch besides pages and wire is prepared once for each direction, alignment of the wire, choice of digest and
    limit of programs: the compiled variant, the grid, and the addresses of the plan's uploaded tables.
    """

    _copier: TritonCopier

    def __init__(self, copier: TritonCopier, buffers: Sequence[WireBuffer]) -> None:
        super().__init__(copier, buffers)
        groups: dict[tuple[Range, RowGeometry], list[WireBuffer]] = {}
        for buffer in self.buffers:
            groups.setdefault((buffer.tokens, copier.geometries[buffer.layer, buffer.is_v]), []).append(buffer)
        self._groups = [(tokens, rows, found) for (tokens, rows), found in groups.items()]
        for tokens, rows, _ in self._groups:
            most = tokens.end * rows.rows_per_token * -(-rows.row_bytes // 16)
            if most > MAX_PIECES:
                raise LayoutError(f"a copy up to token {tokens.end} has {most} units of 16 bytes; one launch takes {MAX_PIECES}")
        self.can_halve = len(self._groups) == 1 and len(self.buffers) > 1 and self.num_moved_bytes >= copier.tuning.halved_bytes
        self._tables: dict[tuple[int, str], Tensor] = {}  # by group
        self._launches: dict[_Key, list[Launch]] = {}
        self._streams: set[int] = set()
        self._lock = threading.Lock()

    def _can_digest(self) -> bool:
        copier: TritonCopier = self._copier
        on_wire = [number for buffer in self.buffers for number in (buffer.offset_bytes, buffer.row_bytes)]
        if copier.wire_dtype is copier.pool.element:
            return math.gcd(WORD_BYTES, copier.pool_common, *on_wire) == WORD_BYTES
        rows = [copier.wire_row_bytes(copier.geometries[buffer.layer, buffer.is_v]) for buffer in self.buffers]
        return math.gcd(WORD_BYTES, *on_wire, *rows) == WORD_BYTES

    def _check_digest(self, digest: Digest) -> None:
        check_device_digest(digest, self._pool.device)

    def _check_address_only(self, wire: WireMemory, name: str) -> None:
        device_index, device = getattr(wire, "device_index", None), self._pool.device
        if device.type != "cuda" or device_index != device.index:
            raise LayoutError(
                f"{name} is a {type(wire).__name__} for kernels of device {device_index}; must be for kernels of {device}"
            )

    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, out, "out", first_page, digest)
        self._launch_all(pages, out, first_page, digest, is_gather=True)

    def gather_half(self, half: int, pages: Tensor, out: WireMemory, *, first_page: int, digest: Digest) -> None:
        self._check(pages, out, "out", first_page, digest)
        stream = current_stream(self._pool.device)
        launcher, grid, arguments = _halves(self._calls(stream, pages, out, first_page, digest, is_gather=True)[0])[half]
        launcher(stream, grid, arguments)

    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, source, "source", first_page, digest)
        self._launch_all(pages, source, first_page, digest, is_gather=False)

    def scatter_kernels(
        self, pages: Tensor, source: WireMemory, *, first_page: int, digest: Tensor
    ) -> Sequence[KernelLaunch] | None:
        self._check(pages, source, "source", first_page, digest)
        stream = current_stream(self._pool.device)
        calls = self._calls(stream, pages, source, first_page, digest, is_gather=False)
        if self.can_halve:
            calls = _halves(calls[0])
        found = [launcher.launch_of(grid, arguments) for launcher, grid, arguments in calls]
        launches = [launch for launch in found if launch is not None]
        return launches if len(launches) == len(found) else None

    def is_compiled(self, wire_address: int, *, has_digest: bool, is_gather: bool, is_direct: bool = False) -> bool:
        found = self._launches.get(self._key(is_gather, wire_address, has_digest, is_direct))
        return found is not None and all(launcher.is_compiled for launcher, _, _ in found)

    def compile(self, wire_address: int, *, has_digest: bool, is_gather: bool, is_direct: bool = False) -> None:
        for launcher, _, arguments in self._prepared(self._key(is_gather, wire_address, has_digest, is_direct)):
            launcher.compile((0, wire_address, 0, *arguments))

    def _key(self, is_gather: bool, wire_address: int, has_digest: bool, is_direct: bool) -> _Key:
        is_capped = is_gather and is_direct and self._copier.tuning.peer_programs > 0
        return is_gather, math.gcd(16, wire_address), has_digest, is_capped

    def _launch_all(self, pages: Tensor, wire: WireMemory, first_page: int, digest: Digest | None, *, is_gather: bool) -> None:
        stream = current_stream(self._pool.device)
        for launcher, grid, arguments in self._calls(stream, pages, wire, first_page, digest, is_gather=is_gather):
            launcher(stream, grid, arguments)

    def _calls(
        self, stream: Stream, pages: Tensor, wire: WireMemory, first_page: int, digest: Digest | None, *, is_gather: bool
    ) -> list[Launch]:
        """Return the launches for the current stream, which is `stream`, with all arguments. Make the stream able to read the
        tables."""
        wire_address = wire.data_ptr()
        if digest is not None and wire_address % WORD_BYTES:
            raise LayoutError(f"wire begins at {wire_address:#x}; to be digested on the way it must begin on {WORD_BYTES} bytes")
        digest_address = digest.data_ptr() if isinstance(digest, Tensor) else 0
        key = self._key(is_gather, wire_address, digest is not None, is_direct=not isinstance(wire, Tensor))
        launches = self._prepared(key)
        if stream.handle not in self._streams:
            self._keep_for(stream)
        pages_address = pages.data_ptr() + 8 * first_page
        places = (pages_address, wire_address, digest_address)
        return [(launcher, grid, (*places, *arguments)) for launcher, grid, arguments in launches]

    def _prepared(self, key: _Key) -> list[Launch]:
        """Upload tables here, once: a plan that is never used needs none."""
        found = self._launches.get(key)
        if found is None:
            with self._lock:
                found = self._launches.get(key)
                if found is None:
                    found = self._launches[key] = [self._prepare(group, *key) for group in range(len(self._groups))]
        return found

    def _keep_for(self, stream: Stream) -> None:
        """Keep the tables' memory until the work that this stream has queued with them has run."""
        with self._lock:
            self._streams.add(stream.handle)
            for tensor in self._tables.values():
                stream.keep(tensor)

    def _table(self, group: int, name: str, values: Tensor) -> int:
        """Return the address on the device. Streams must be told of a new table."""
        found = self._tables.get((group, name))
        if found is None:
            found = self._tables[group, name] = upload(values, self._pool.device)
            self._streams.clear()
        return found.data_ptr()

    def _factors(self, group: int, *, is_gather: bool) -> int:
        """Return the address of float32 [buffers]; 0 if nothing is scaled."""
        copier = self._copier
        scales = [copier.scale(buffer) for buffer in self._groups[group][2]]
        sizes = (copier.pool.element.num_bytes, copier.wire_dtype.num_bytes)
        if sizes[0] == sizes[1] or scales == [1.0] * len(scales):
            return 0
        start, end = sizes if is_gather else sizes[::-1]
        factors = [scale_factor(scale, from_bytes=start, to_bytes=end) for scale in scales]
        return self._table(group, "to wire" if is_gather else "to pool", torch.tensor(factors, dtype=torch.float32))

    def _prepare(self, group: int, is_gather: bool, wire_common: int, has_digest: bool, is_capped: bool) -> Launch:
        copier, tuning = self._copier, self._copier.tuning
        tokens, rows, buffers = self._groups[group]
        pool = copier.pool
        element, wire_element = pool.element, copier.wire_dtype
        wire_common = math.gcd(wire_common, copier.wire_row_bytes(rows), *(buffer.offset_bytes for buffer in buffers))
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
        piece = piece_words(row, tuning.max_columns)
        if is_capped and not is_conversion:
            words, num_warps = tuning.peer_words, tuning.peer_warps
        elif has_digest:
            words, num_warps = tuning.digest_words * (WORD_BYTES // wire_bytes), tuning.digest_warps
        elif is_conversion:
            words, num_warps = tuning.conversion_elements, tuning.conversion_warps
        else:
            words, num_warps = tuning.copy_words, tuning.copy_warps
        # Not fewer for a plan of few rows: each size is a variant to compile, in the middle of serving.
        tile_pieces = max(1, words // piece)
        pieces_per_token = rows.rows_per_token * -(-row // piece)
        first, end = tokens.begin * pieces_per_token, tokens.end * pieces_per_token
        num_tiles = -(-end // tile_pieces) - first // tile_pieces
        strides = [stride // pool_bytes for stride in rows.strides]
        reach = (pool.page_size - 1) * strides[1] + (rows.rows_per_token - 1) * strides[2] + row + piece
        kinds = (element.value, wire_element.value) if is_gather else (wire_element.value, element.value)
        factors = self._factors(group, is_gather=is_gather)
        constants: dict[str, Any] = {
            **({} if is_capped else {"num_buffers": None}),
            "ROW": row,
            "HEADS": rows.rows_per_token,
            "PIECE": piece,
            "PAGE_SIZE": pool.page_size,
            "PAGE_STRIDE": strides[0],
            "TOKEN_STRIDE": strides[1],
            "HEAD_STRIDE": strides[2],
            "OFFSET_TYPE": tl.int32 if reach < 2**31 else tl.int64,
            "POOL_TYPE": pool_type,
            "WIRE_TYPE": wire_type,
            "POOL_ALIGN": 16 // pool_bytes if is_pool_aligned else 1,
            "WIRE_ALIGN": 16 // wire_bytes if is_wire_aligned else 1,
            "WIRE_BYTES": wire_bytes,
            "IS_CONVERSION": is_conversion,
            "IS_SCALED": factors != 0,
            "IS_NATIVE": _converts_natively(pool.device),
            "SOURCE_KIND": kinds[0],
            "TARGET_KIND": kinds[1],
            "IS_GATHER": is_gather,
            "HAS_DIGEST": has_digest,
            "TILE_PIECES": tile_pieces,
        }
        places = [(copier.view(buffer).data_ptr(), buffer.offset_bytes) for buffer in buffers]
        table = self._table(group, "places", torch.tensor(places, dtype=torch.int64))
        launcher = _launcher(pool.device, num_warps, tuple(constants.items()))
        arguments = (table, factors, pool.num_pages, first, end)
        if is_capped:
            return launcher, (min(tuning.peer_programs, num_tiles * len(buffers)), 1, 1), (*arguments, len(buffers))
        return launcher, (num_tiles, len(buffers), 1), arguments


def _halves(launch: Launch) -> list[Launch]:
    """Return the launch of the first half of its buffers, and that of the others. The arguments are those of `copy_pieces`."""
    launcher, grid, (pages, wire, digest, table, factors, num_pages, first, end, *counted) = launch
    num_buffers = counted[0] if counted else grid[1]
    half = num_buffers // 2
    found: list[Launch] = []
    for begin, count in ((0, half), (half, num_buffers - half)):
        own = (pages, wire, digest, table + 16 * begin, factors and factors + 4 * begin, num_pages, first, end)
        found.append((launcher, grid, (*own, count)) if counted else (launcher, (grid[0], count, 1), own))
    return found


@cache
def _launcher(device: torch.device, num_warps: int, constants: tuple[tuple[str, Any], ...]) -> Launcher:
    return Launcher(copy_pieces, device, dict(constants), num_warps=num_warps)


@cache
def _converts_natively(device: torch.device) -> bool:
    """Return whether the device rounds to bfloat16 and float8 as `convert` does. The interpreter
    and devices before Ada do not."""
    return device.type == "cuda" and not IS_INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


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
