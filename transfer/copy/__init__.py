"""Gather and scatter: head slices of paged KV to contiguous wire bytes, and back.

There are implementations in C, NumPy, Triton and plain torch (`kernel_choice`). All of them agree bit for bit with
`transfer.copy.torch_copy`. Triton is imported only where it is used. `piece_copier.PieceCopier` applies them to the pieces of
requests. A copy queue runs the copies beside the owner's loop.

On an H200 (torch 2.11, Triton 3.6; `bench.kernels`), without conversion, as shares of a device copy of the same bytes: gather
0.95 to 0.99, scatter 0.94 to 0.98; with digest 0.93 to 0.97 and 0.92 to 0.95. A strided torch copy of the same rows in order
reaches 0.95 to 0.99: half-used rows cost the memory itself that much. A call keeps the host for 11 to 18 us.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transfer.copy import torch_copy
from transfer.copy.compiled_copy import CompiledCopier
from transfer.copy.copier import CopyPlan, Digest, HeadSliceCopier, KernelLaunch, WireMemory
from transfer.copy.digest import HostDigest
from transfer.copy.host_copy import HostCopier
from transfer.copy.kernel_choice import Kernels, choose_kernels
from transfer.copy.strided_copy import StridedCopier
from transfer.copy.torch_copy import TorchCopier
from transfer.errors import LayoutError
from transfer.layout import DType, Range
from transfer.pool.kv_pool import PagedKVPool

__all__ = [
    "CopyPlan",
    "Digest",
    "HeadSliceCopier",
    "KernelLaunch",
    "Kernels",
    "WireMemory",
    "add_digest",
    "choose_kernels",
    "compile_add_digest",
    "head_slice_copier",
    "is_add_digest_compiled",
]


def head_slice_copier(
    pool: PagedKVPool,
    *,
    heads: Range,
    wire_dtype: DType,
    scales: Mapping[tuple[int, bool], float] | None = None,
    kernels: Kernels | None = None,
) -> HeadSliceCopier:
    """Return the gather and scatter for this pool.

    Args:
        heads: The moved heads, rank-local: a route's `HeadSlice` seen from this side.
        wire_dtype: Element type on the wire, see `transfer.layout.wire_dtype`.
        scales: See `HeadSliceCopier`.
        kernels: The implementation. None means the fastest for the pool's device.

    Raises:
        LayoutError: No layer of the pool has these heads, or the dtypes cannot be converted into each other.
    """
    kind: type[HeadSliceCopier]
    match kernels or Kernels.fastest(pool.device):
        case Kernels.TORCH:
            kind = TorchCopier
        case Kernels.COMPILED:
            kind = CompiledCopier if pool.has_adjacent_elements else StridedCopier
        case Kernels.NUMPY:
            kind = HostCopier if pool.has_adjacent_elements else StridedCopier
        case Kernels.TRITON:
            from transfer.copy.head_slice import TritonCopier

            kind = TritonCopier
    return kind(pool, heads=heads, wire_dtype=wire_dtype, scales=scales)


def add_digest(digest: Digest, wire: WireMemory, num_bytes: int, kernels: Kernels | None = None) -> None:
    """Add the digest of the first `num_bytes` bytes of a wire, for pieces whose plans cannot digest during the copy.

    On a GPU it is one more pass over the bytes, queued on the current stream. `digest` is a `HostDigest` for a wire in host
    memory (a uint8 tensor), otherwise int64 [1] on the device. `kernels` is that of the plans; None means Triton on a GPU. Raise
    LayoutError if the wire is elsewhere, or too short.
    """
    if num_bytes > wire.numel():
        raise LayoutError(f"num_bytes is {num_bytes}; wire has {wire.numel()}")
    if isinstance(digest, HostDigest):
        if not isinstance(wire, Tensor) or wire.device.type != "cpu":
            raise LayoutError(f"wire is a {type(wire).__name__} outside host memory; a HostDigest needs host memory")
        digest.update(wire[:num_bytes])
    elif kernels is Kernels.TORCH:
        torch_copy.add_words(digest, wire, num_bytes)
    else:
        from transfer.copy.words import add_words

        add_words(digest, wire, num_bytes)


def is_add_digest_compiled(device: torch.device, wire_address: int, num_bytes: int, kernels: Kernels) -> bool:
    """Return whether `add_digest` for a wire at that address only queues work; see `CopyPlan.is_compiled`."""
    if kernels is not Kernels.TRITON:
        return True
    from transfer.copy.words import is_pass_compiled

    return is_pass_compiled(device, wire_address, num_bytes)


def compile_add_digest(device: torch.device, wire_address: int, num_bytes: int, kernels: Kernels) -> None:
    """Do the missing work for `is_add_digest_compiled`, see `CopyPlan.compile`."""
    if kernels is Kernels.TRITON:
        from transfer.copy.words import compile_pass

        compile_pass(device, wire_address, num_bytes)
