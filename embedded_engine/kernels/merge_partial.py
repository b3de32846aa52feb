"""Merge partial attention results over different tokens of the same requests by their log-sum-exp, in one small launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedded_engine.kernels.arguments import MODEL_DTYPES, check_tensor
from embedded_engine.kernels.launch import IS_INTERPRETED, launch
from transfer.errors import LayoutError


def merge_partial(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial result to a running one, in place; queued on the current stream.

    Agrees with `embedded_engine.kernels.reference.reference_merge_partial`. A row whose part saw no token stays as it is.

    Args:
        total: float32 [B, heads, dim], elements adjacent.
        total_lse: float32 [B, heads], contiguous: the logarithm of the softmax's denominator so far.
        part: [B, heads, dim] in a model's dtype, elements adjacent.
        part_lse: float32 [B, heads], contiguous.

    Raises:
        LayoutError: A tensor has the wrong shape, dtype, stride or device.
    """
    device = total.device
    check_tensor("total", total, (None, None, None), (torch.float32,), device)
    check_tensor("part", part, total.shape, MODEL_DTYPES, device)
    check_tensor("total_lse", total_lse, total.shape[:2], (torch.float32,), device)
    check_tensor("part_lse", part_lse, total.shape[:2], (torch.float32,), device)
    if not (total_lse.is_contiguous() and part_lse.is_contiguous()):
        raise LayoutError("total_lse and part_lse must be contiguous")
    if not IS_INTERPRETED and total.device.type != "cuda":
        raise LayoutError(f"total is on {total.device}; must be on a GPU (elsewhere: reference_merge_partial)")
    num_rows, num_heads, dim = total.shape
    with torch.cuda.device_of(total):
        launch(
            merge_row,
            (num_heads, num_rows),
            total,
            total_lse,
            part,
            part_lse,
            *total.stride()[:2],
            *part.stride()[:2],
            NUM_HEADS=num_heads,
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def merge_row(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    total,
    total_lse,
    part,
    part_lse,
    total_stride,
    total_head_stride,
    part_stride,
    part_head_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row; grid (heads, rows)."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    at_lse = row * NUM_HEADS + head
    old = tl.load(total_lse + at_lse)
    new = tl.load(part_lse + at_lse)
    if new == float("-inf"):
        return
    # An old value of -inf gets weight 0, not the difference of two infinities. NaN stays NaN.
    largest = tl.where(old > new, old, new)
    both = largest + tl.log(tl.exp(old - largest) + tl.exp(new - largest))
    column = tl.arange(0, BLOCK)
    at_total = total + row * total_stride + head * total_head_stride + column
    at_part = part + row * part_stride + head * part_head_stride + column
    kept = tl.load(at_total, mask=column < DIM) * tl.exp(old - both)
    added = tl.load(at_part, mask=column < DIM).to(tl.float32) * tl.exp(new - both)
    tl.store(at_total, kept + added, mask=column < DIM)
    tl.store(total_lse + at_lse, both)
