"""Gather and scatter: head slices of paged KV to contiguous wire bytes, and back.

`head_slice_copier()` picks the implementation for a pool's device; all of them agree bit for bit with
`transfer.kernels.reference`. Triton is imported only for a pool on a GPU.
"""

from __future__ import annotations

from transfer.kernels.copier import HeadSliceCopier
from transfer.kernels.host_copy import HostCopier
from transfer.kv_pool import PagedKVPool
from transfer.layout import DType, Span

__all__ = ["HeadSliceCopier", "head_slice_copier"]


def head_slice_copier(pool: PagedKVPool, *, heads: Span, wire_dtype: DType) -> HeadSliceCopier:
    """The fastest gather and scatter for this pool.

    Args:
        pool: Where the pages are.
        heads: The rank-local heads that travel: a route's `HeadSlice` seen from this side.
        wire_dtype: Element type on the wire, see `transfer.layout.wire_dtype`.

    Raises:
        LayoutError: No layer of the pool has these heads, or the dtypes cannot be converted into each other.
    """
    if pool.device.type == "cpu":
        return HostCopier(pool, heads=heads, wire_dtype=wire_dtype)
    from transfer.kernels.head_slice import TritonCopier

    return TritonCopier(pool, heads=heads, wire_dtype=wire_dtype)
