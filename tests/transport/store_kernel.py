"""A kernel that stores bytes to a place known by address only, as a gather into a peer's ring does."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from transfer.transport.base import DirectMemory


@triton.jit(do_not_specialize=["target", "num_bytes"])  # type: ignore[untyped-decorator]
def _store(target, source, num_bytes, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = places < num_bytes
    tl.store(target.to(tl.pointer_type(tl.uint8)) + places, tl.load(source + places, mask=mask), mask=mask)


def store(target: DirectMemory, source: Tensor) -> None:
    """Queue it on the current stream of the source's device, which must be the current one."""
    block = 4096
    _store[(triton.cdiv(source.numel(), block),)](target.data_ptr(), source, source.numel(), block=block)
