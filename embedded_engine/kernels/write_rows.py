"""Write a decode step's new K and V rows into their slots, in one launch that a CUDA graph can capture.

`PagedKVPool.write` does the same for a prefill chunk; it indexes by tensors, allocates memory, and cannot skip rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedded_engine.kernels.arguments import WriteCall
from embedded_engine.kernels.launch import IS_INTERPRETED, launch
from transfer.copy.elements import narrowed, widened
from transfer.errors import LayoutError

# As integers, because transfer.copy.elements converts them.
_ELEMENTS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def write_rows(call: WriteCall) -> None:
    """Store one new row of K and V per request, converted to the pool's dtype as `transfer.pool.kv_pool.convert` does.

    Queued on the current stream of the tensors' device. A row whose slot is outside the pool is skipped.

    Raises:
        LayoutError: The tensors are not on a GPU.
    """
    k, new_k, new_v, slots = call.k, call.new_k, call.new_v, call.slots
    if not IS_INTERPRETED and k.device.type != "cuda":
        raise LayoutError(f"k is on {k.device}; must be on a GPU (elsewhere: PagedKVPool.write)")
    if not slots.numel():
        return
    k_view, v_view = call.k_view, call.v_view
    num_pages, page_size, num_heads, k_dim = k_view.shape
    rows = [(new_k, k_view), (new_k, k_view) if new_v is None or v_view is None else (new_v, v_view)]
    tensors = [_elements(tensor) for pair in rows for tensor in pair]
    strides = [stride for new, view in rows for stride in (*new.stride()[:2], *view.stride()[:3])]
    v_dim = 0 if v_view is None else v_view.shape[3]
    with torch.cuda.device_of(k):
        launch(
            write_row,
            (slots.numel(), num_heads),
            *tensors,
            slots,
            num_pages * page_size,
            *strides,
            PAGE_SIZE=page_size,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_BLOCK=triton.next_power_of_2(k_dim),
            V_BLOCK=triton.next_power_of_2(max(1, v_dim)),
            K_KIND=_kind(new_k),
            V_KIND=_kind(new_k if new_v is None else new_v),
            POOL_KIND=_kind(k),
            num_warps=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _write_row(source, target, DIM: tl.constexpr, BLOCK: tl.constexpr, SOURCE_KIND: tl.constexpr, TARGET_KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    values = tl.load(source + column, mask=column < DIM)
    if SOURCE_KIND != TARGET_KIND:
        values = narrowed(widened(values, SOURCE_KIND), TARGET_KIND)
    tl.store(target + column, values, mask=column < DIM)


@triton.jit(do_not_specialize=["num_slots"])  # type: ignore[untyped-decorator]
def write_row(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    new_k,
    k,
    new_v,
    v,
    slots,
    num_slots,
    new_k_stride,
    new_k_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    new_v_stride,
    new_v_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    PAGE_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    POOL_KIND: tl.constexpr,
):
    """One head of one new row, K and (where V_DIM is not 0) V; grid (requests, heads)."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request)
    if (slot < 0) | (slot >= num_slots):
        return
    page = (slot // PAGE_SIZE).to(tl.int64)
    offset = (slot % PAGE_SIZE).to(tl.int64)
    source = new_k + request * new_k_stride + head * new_k_head_stride
    target = k + page * k_page_stride + offset * k_token_stride + head * k_head_stride
    _write_row(source, target, K_DIM, K_BLOCK, K_KIND, POOL_KIND)
    if V_DIM > 0:
        source = new_v + request * new_v_stride + head * new_v_head_stride
        target = v + page * v_page_stride + offset * v_token_stride + head * v_head_stride
        _write_row(source, target, V_DIM, V_BLOCK, V_KIND, POOL_KIND)


def _elements(tensor: Tensor) -> Tensor:
    return tensor.view(_ELEMENTS.get(tensor.dtype, tensor.dtype))


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
