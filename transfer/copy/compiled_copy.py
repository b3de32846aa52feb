"""Gather and scatter for pools in host memory by compiled code: one pass, with the digest in it (`_host_copy.c`).

A call of the compiled code copies a whole plan: the plan's buffers are prepared once as an array, and a page table is an array
already. So the time in Python does not depend on the number of layers, pages or heads. The extension is optional: without it,
`HostCopier` makes the same copies.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from torch import Tensor

from transfer.copy.copier import CopyPlan, Digest, WireMemory, wire_tensor
from transfer.copy.digest import DIGEST_WORDS, DIGEST_XXH3, HostDigest
from transfer.copy.host_copy import HostCopier
from transfer.layout import WireBuffer


def is_current(module: Any, source: Path) -> bool:
    """Return whether the compiled code was built from this source file, or there is none, as in an installed wheel.

    In a checkout, code of another version would be used after an update, with other arguments or another `_BUFFER_FIELDS`.
    """
    if not source.exists():
        return True
    built_from = module.source_hash() if hasattr(module, "source_hash") else ""
    return bool(built_from == hashlib.sha256(source.read_bytes()).hexdigest())


def load_compiled(name: str) -> ModuleType | None:
    """Import a compiled module. Return None if it was not built, or from another version of the source file beside it."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    source = Path(str(module.__file__)).with_name(f"{name.rpartition('.')[2]}.c")
    return module if is_current(module, source) else None


_host_copy: Final = load_compiled("transfer.copy._host_copy")

IS_BUILT: Final = _host_copy is not None
"""Whether this installation has the compiled code, of its own version."""

# Whether the processor's vector instructions are used. A test sets it to False.
HAS_AVX2 = _host_copy is not None and _host_copy.has_avx2()

# Copies from this size on are written past the caches: 64 MiB in 2.7 ms in place of 5.9 (a scatter with digest, EPYC of 2025).
MIN_STREAMED_BYTES = 1 << 20

# XXH3 has another algorithm for shorter inputs, which the compiled code does not have.
_MIN_XXH3_BYTES = 241

_NO_DIGEST: Final = 0
_ALGORITHMS: Final[Mapping[str, int]] = {DIGEST_XXH3: 1, DIGEST_WORDS: 2}

# `Buffer` of _host_copy.c. Strides in bytes; tokens from the first page of a call.
_BUFFER_FIELDS = (
    "pool_address", "wire_offset", "page_stride", "token_stride", "num_pieces", "piece_stride", "piece_bytes", "begin", "end",
)  # fmt: skip


class CompiledCopier(HostCopier):
    """A `HostCopier` whose copies without conversion are compiled code."""

    def plan(self, buffers: Sequence[WireBuffer]) -> CopyPlan:
        return _CompiledPlan(self, buffers) if self.wire_dtype is self.pool.element else super().plan(buffers)


class _CompiledPlan(CopyPlan):
    reads_wire_once = True

    def __init__(self, copier: HostCopier, buffers: Sequence[WireBuffer]) -> None:
        super().__init__(copier, buffers)
        rows = [_described(copier.view(buffer), buffer) for buffer in self.buffers]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, len(_BUFFER_FIELDS))

    def gather(self, pages: Tensor, out: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, out, "out", first_page, digest)
        self._copy(pages, out, first_page, digest, is_gather=True)

    def scatter(self, pages: Tensor, source: WireMemory, *, first_page: int = 0, digest: Digest | None = None) -> None:
        self._check(pages, source, "source", first_page, digest)
        self._copy(pages, source, first_page, digest, is_gather=False)

    def _copy(self, pages: Tensor, wire: WireMemory, first_page: int, digest: Digest | None, *, is_gather: bool) -> None:
        assert _host_copy is not None
        if not self.buffers:
            return
        is_short = self.num_wire_bytes < _MIN_XXH3_BYTES
        if is_short and not is_gather:
            wire = wire_tensor(wire)[: self.num_wire_bytes].clone()  # read once, as `reads_wire_once` promises
        algorithm = _ALGORITHMS[digest.algorithm] if isinstance(digest, HostDigest) and not is_short else _NO_DIGEST
        found = _host_copy.copy_pages(
            self._rows,
            pages[first_page:].numpy(),
            self._pool.page_size,
            wire.data_ptr(),
            self.num_wire_bytes,
            algorithm,
            is_gather,
            self.num_moved_bytes >= MIN_STREAMED_BYTES,
            HAS_AVX2,
        )
        if isinstance(digest, HostDigest):
            if is_short:
                digest.update(wire_tensor(wire)[: self.num_wire_bytes])
            else:
                digest.take(found)


def _described(view: Tensor, buffer: WireBuffer) -> tuple[int, ...]:
    """Return the fields of a buffer.

    Args:
        view: [num_pages, page_size, heads, dim] of the pool; elements of a head are adjacent.
    """
    size = view.element_size()
    page_stride, token_stride, head_stride, _ = (stride * size for stride in view.stride())
    heads, head_bytes = view.shape[2], view.shape[3] * size
    is_joined = heads == 1 or head_stride == head_bytes
    pieces = (1, 0, heads * head_bytes) if is_joined else (heads, head_stride, head_bytes)
    tokens = (buffer.tokens.begin, buffer.tokens.end)
    return (view.data_ptr(), buffer.offset_bytes, page_stride, token_stride, *pieces, *tokens)
