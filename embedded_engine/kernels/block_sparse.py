"""Block-sparse prefill attention in Triton: estimates of key blocks, their selection, and attention to the selected blocks.

All kernels are queued on the current stream, and the host waits for none of their results. Query heads that share a KV head
read it in place: K and V are never expanded. `block_sparse_reference` has the same functions in plain torch.

Source: Xu and others, "XAttention: Block Sparse Attention with Antidiagonal Scoring" (arXiv 2503.16428).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from embedded_engine.kernels.block_sparse_arguments import KeySpan, RunningState, Selection
from embedded_engine.kernels.launch import IS_INTERPRETED, launch
from embedded_engine.kernels.paged_decode import OPERANDS, operand
from planner.workspace import XAttention
from transfer.errors import ConfigError, LayoutError

_LOG2_E = 1 / math.log(2)
_ROWS = 128  # strided query rows of a program that estimates
_COLUMNS = 128  # strided keys of such a program
_TILE = 256  # key blocks that selection reads at a time
_STAGES = (3, 2, 1)
_CUT_BITS = 31  # positive float32 numbers are ordered like their bits


@triton.jit  # type: ignore[untyped-decorator]
def _page_of(pages, token, is_token, PAGE_SIZE: tl.constexpr, HAS_PAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pages of tokens, int64; of a span without a table they are adjacent."""
    page = token // PAGE_SIZE
    if HAS_PAGES:
        page = tl.load(pages + page, mask=is_token, other=0)
    return page.to(tl.int64)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_queries", "num_groups", "num_tokens", "first_block", "num_blocks"],
    do_not_specialize_on_alignment=["pages"],
)
def estimate_kernel(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    query,
    k,
    pages,
    lse,
    scale,
    num_queries,
    num_groups,
    num_tokens,
    first_block,
    num_blocks,
    query_head_stride,
    query_stride,
    page_stride,
    token_stride,
    head_stride,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    IS_OWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    IS_FP8_NATIVE: tl.constexpr,
    OPERAND: tl.constexpr,
    DOT: tl.constexpr,
):
    """Score a tile of strided rows against strided keys; grid (tiles of rows, tiles of keys, query heads).

    Row i stands for the queries of [i * STRIDE, (i + 1) * STRIDE), column j for the keys of such a group: their score is the sum
    over the antidiagonal of their products. Missing tokens of a last group are the last token. Of each key block, the logarithm
    (base 2) of the sum of its weights is stored.
    """
    per_block: tl.constexpr = BLOCK // STRIDE
    row_tile = tl.program_id(0)
    column_tile = tl.program_id(1)
    head = tl.program_id(2)
    if IS_OWN and column_tile * COLUMNS >= (row_tile + 1) * ROWS:
        return  # later than every row; selection does not read these blocks
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at_dim = tl.arange(0, DIM_BLOCK)
    of_head = query + head.to(tl.int64) * query_head_stride
    of_kv_head = k + (head // SHARED).to(tl.int64) * head_stride
    scores = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(STRIDE):
        token = tl.minimum(row * STRIDE + (STRIDE - 1 - step), num_queries - 1)
        at_query = of_head + token.to(tl.int64) * query_stride
        queries = tl.load(at_query[:, None] + at_dim[None, :], mask=(at_dim < DIM)[None, :], other=0.0).to(DOT)
        key = tl.minimum(column * STRIDE + step, num_tokens - 1)
        is_key = key >= 0
        at_key = of_kv_head + _page_of(pages, key, is_key, PAGE_SIZE, HAS_PAGES) * page_stride
        at_key += (key % PAGE_SIZE).to(tl.int64) * token_stride
        keys = operand(
            tl.load(at_key[:, None] + at_dim[None, :], mask=(at_dim < DIM)[None, :], other=0), KIND, IS_FP8_NATIVE, OPERAND
        ).to(DOT)
        scores += tl.dot(queries, tl.trans(keys), input_precision="ieee")
    is_seen = (column * STRIDE < num_tokens)[None, :]
    if IS_OWN:
        is_seen = is_seen & (column[None, :] <= row[:, None])
    scores = tl.where(is_seen, scores * scale, float("-inf"))
    by_block = tl.reshape(scores, [ROWS, COLUMNS // per_block, per_block])
    largest = tl.max(by_block, axis=2)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.sum(tl.exp2(by_block - origin[:, :, None]), axis=2)
    block = column_tile * (COLUMNS // per_block) + tl.arange(0, COLUMNS // per_block)
    at_row = lse + (head * num_groups + row).to(tl.int64) * num_blocks
    mask = (row < num_groups)[:, None] & (block * BLOCK < num_tokens)[None, :]
    tl.store(at_row[:, None] + first_block + block[None, :], largest + tl.log2(weights), mask=mask)


@triton.jit(do_not_specialize=["num_groups", "num_blocks", "own_block"])  # type: ignore[untyped-decorator]
def sum_kernel(lse, sums, num_groups, num_blocks, own_block, GROUPS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the weights of each key block over the rows of a query block; grid (query blocks, query heads)."""
    query_block = tl.program_id(0)
    head = tl.program_id(1)
    num_seen = own_block + query_block + 1
    row = query_block * GROUPS + tl.arange(0, GROUPS)
    is_row = row < num_groups
    at_row = lse + (head * num_groups + row).to(tl.int64) * num_blocks
    largest = tl.full([GROUPS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUPS], dtype=tl.float32)
    for first in range(0, num_seen, TILE):
        block = first + tl.arange(0, TILE)
        mask = is_row[:, None] & (block < num_seen)[None, :]
        values = tl.load(at_row[:, None] + block[None, :], mask=mask, other=float("-inf"))
        new = tl.maximum(largest, tl.max(values, axis=1))
        origin = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(largest - origin) + tl.sum(tl.exp2(values - origin[:, None]), axis=1)
        largest = new
    whole = tl.where(is_row, largest + tl.log2(total), 0.0)
    at_sum = sums + (head * tl.num_programs(0) + query_block).to(tl.int64) * num_blocks
    for first in range(0, num_seen, TILE):
        block = first + tl.arange(0, TILE)
        mask = is_row[:, None] & (block < num_seen)[None, :]
        values = tl.load(at_row[:, None] + block[None, :], mask=mask, other=float("-inf"))
        tl.store(at_sum + block, tl.sum(tl.exp2(values - whole[:, None]), axis=0), mask=block < num_seen)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_from(at_sum, cut, own, num_seen, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of the blocks that are always selected, the first and the rows' own, and of all others of at least `cut`."""
    total = 0.0
    for first in range(0, num_seen, TILE):
        block = first + tl.arange(0, TILE)
        values = tl.load(at_sum + block, mask=block < num_seen, other=0.0)
        total += tl.sum(tl.where((values >= cut) | (block == 0) | (block == own), values, 0.0), axis=0)
    return total


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_blocks", "own_block"], do_not_specialize_on_alignment=["is_used"]
)
def select_kernel(  # type: ignore[no-untyped-def]
    sums,
    blocks,
    counts,
    is_used,
    threshold,
    num_blocks,
    own_block,
    SELECTS_ALL: tl.constexpr,
    CUT_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """List the blocks that a query block attends to, ascending; grid (query blocks, query heads).

    Blocks of at least a cutoff are selected. The cutoff is the largest with which they reach the share `threshold` of the sum. It
    is found by bisection over the bits of a float32, so nothing is sorted and no memory is needed.
    """
    query_block = tl.program_id(0)
    row = tl.program_id(1) * tl.num_programs(0) + query_block
    own = own_block + query_block
    num_seen = own + 1
    at_sum = sums + row.to(tl.int64) * num_blocks
    low = tl.full([], 0, dtype=tl.int32)
    if not SELECTS_ALL:
        high = tl.full([], 0x7F800000, dtype=tl.int32)  # infinity: only the blocks that are always selected
        needed = threshold * _sum_from(at_sum, 0.0, own, num_seen, TILE)
        for _ in range(CUT_BITS):
            middle = low + (high - low + 1) // 2
            reaches = _sum_from(at_sum, middle.to(tl.float32, bitcast=True), own, num_seen, TILE) >= needed
            low = tl.where(reaches, middle, low)
            high = tl.where(reaches, high, middle - 1)
    cut = low.to(tl.float32, bitcast=True)
    count = tl.full([], 0, dtype=tl.int32)
    for first in range(0, num_seen, TILE):
        block = first + tl.arange(0, TILE)
        values = tl.load(at_sum + block, mask=block < num_seen, other=0.0)
        # Not "at least the cut": a sum that is no number, of damaged KV, must reach the output.
        is_taken = (block < num_seen) & ((block == 0) | (block == own) | ~(values < cut))
        place = count + tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
        tl.store(blocks + row.to(tl.int64) * num_blocks + place, block, mask=is_taken)
        tl.store(is_used + block, tl.full([TILE], 1, dtype=tl.int32), mask=is_taken)
        count += tl.sum(is_taken.to(tl.int32), axis=0)
    tl.store(counts + row, count)


@triton.jit
def _first_from(blocks, count, block):  # type: ignore[no-untyped-def]
    """Index of the first entry of an ascending list that is at least `block`."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(blocks + middle) < block
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _attend_block(  # type: ignore[no-untyped-def]
    queries,
    k_of_head,
    v_of_head,
    pages,
    token,
    row,
    num_tokens,
    largest,
    total,
    out,
    scale,
    k_page_stride,
    k_token_stride,
    v_page_stride,
    v_token_stride,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_OWN: tl.constexpr,
    KIND: tl.constexpr,
    IS_FP8_NATIVE: tl.constexpr,
    OPERAND: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend to a key block. IS_WHOLE: every row sees every token of it; else a token has an end, and IS_OWN the diagonal."""
    at_dim = tl.arange(0, DIM_BLOCK)
    at_v = tl.arange(0, V_BLOCK)
    page = _page_of(pages, token, token < num_tokens, PAGE_SIZE, HAS_PAGES)
    offset = (token % PAGE_SIZE).to(tl.int64)
    at_key = (k_of_head + page * k_page_stride + offset * k_token_stride)[:, None] + at_dim[None, :]
    at_value = (v_of_head + page * v_page_stride + offset * v_token_stride)[:, None] + at_v[None, :]
    if IS_WHOLE and DIM == DIM_BLOCK:
        keys = tl.load(at_key)
    else:
        keys = tl.load(at_key, mask=(token < num_tokens)[:, None] & (at_dim < DIM)[None, :], other=0)
    scores = tl.dot(queries, tl.trans(operand(keys, KIND, IS_FP8_NATIVE, OPERAND).to(DOT)), input_precision="ieee") * scale
    if not IS_WHOLE:
        is_seen = (token < num_tokens)[None, :]
        if IS_OWN:
            is_seen = is_seen & (token[None, :] <= row[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, axis=1))
    origin = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - origin[:, None])
    shrink = tl.exp2(largest - origin)
    total = total * shrink + tl.sum(weights, axis=1)
    if IS_WHOLE and V_DIM == V_BLOCK:
        values = tl.load(at_value)
    else:
        values = tl.load(at_value, mask=(token < num_tokens)[:, None] & (at_v < V_DIM)[None, :], other=0)
    values = operand(values, KIND, IS_FP8_NATIVE, OPERAND).to(DOT)
    out = out * shrink[:, None]
    out += tl.dot(weights.to(OPERAND).to(DOT), values, input_precision="ieee")
    return new, total, out


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_queries", "num_tokens", "first_block", "num_blocks"],
    do_not_specialize_on_alignment=["pages", "counts", "bounds"],
)
def attend_kernel(  # type: ignore[no-untyped-def]
    query,
    k,
    v,
    pages,
    blocks,
    counts,
    bounds,
    state_out,
    state_max,
    state_sum,
    scale,
    num_queries,
    num_tokens,
    first_block,
    num_blocks,
    query_head_stride,
    query_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    IS_OWN: tl.constexpr,
    KIND: tl.constexpr,
    IS_FP8_NATIVE: tl.constexpr,
    OPERAND: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend from a query block to those of its selected blocks that are in [bounds[0], bounds[1]); grid (query blocks,
    heads)."""
    log2_e: tl.constexpr = 1.4426950408889634
    # The last query blocks have the most keys; they begin first.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    list_row = head * tl.num_programs(0) + query_block
    own_list = blocks + list_row.to(tl.int64) * num_blocks
    count = tl.load(counts + list_row)
    begin = _first_from(own_list, count, tl.load(bounds))
    end = _first_from(own_list, count, tl.load(bounds + 1))
    if begin >= end:
        return
    row = query_block * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_queries
    at_dim = tl.arange(0, DIM_BLOCK)
    at_v = tl.arange(0, V_BLOCK)
    at_query = query + head.to(tl.int64) * query_head_stride + row.to(tl.int64) * query_stride
    mask = is_row[:, None] & (at_dim < DIM)[None, :]
    queries = tl.load(at_query[:, None] + at_dim[None, :], mask=mask, other=0.0).to(DOT)
    at_state = head.to(tl.int64) * num_queries + row
    out_mask = is_row[:, None] & (at_v < V_DIM)[None, :]
    largest = tl.load(state_max + at_state, mask=is_row, other=0.0) * log2_e
    total = tl.load(state_sum + at_state, mask=is_row, other=0.0)
    out = tl.load(state_out + at_state[:, None] * V_DIM + at_v[None, :], mask=out_mask, other=0.0)
    kv_head = (head // SHARED).to(tl.int64)
    k_of_head = k + kv_head * k_head_stride
    v_of_head = v + kv_head * v_head_stride
    in_block = tl.arange(0, BLOCK)
    for index in range(begin, end - 1):
        token = (tl.load(own_list + index) - first_block) * BLOCK + in_block
        largest, total, out = _attend_block(
            queries, k_of_head, v_of_head, pages, token, row, num_tokens, largest, total, out, scale,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride,
            DIM, DIM_BLOCK, V_DIM, V_BLOCK, PAGE_SIZE, HAS_PAGES, True, IS_OWN, KIND, IS_FP8_NATIVE, OPERAND, DOT,
        )  # fmt: skip
    # Only the last block of a list can be the diagonal, and only the last of a span can end early.
    token = (tl.load(own_list + end - 1) - first_block) * BLOCK + in_block
    largest, total, out = _attend_block(
        queries, k_of_head, v_of_head, pages, token, row, num_tokens, largest, total, out, scale,
        k_page_stride, k_token_stride, v_page_stride, v_token_stride,
        DIM, DIM_BLOCK, V_DIM, V_BLOCK, PAGE_SIZE, HAS_PAGES, False, IS_OWN, KIND, IS_FP8_NATIVE, OPERAND, DOT,
    )  # fmt: skip
    tl.store(state_max + at_state, largest / log2_e, mask=is_row)
    tl.store(state_sum + at_state, total, mask=is_row)
    tl.store(state_out + at_state[:, None] * V_DIM + at_v[None, :], out, mask=out_mask)


def estimate(query: Tensor, span: KeySpan, lse: Tensor, policy: XAttention, scale: float) -> None:
    """Estimate how much a query attends to the blocks of a span; see `block_sparse_reference.estimate`."""
    num_heads, num_queries, dim = query.shape
    num_groups, num_blocks = lse.shape[1:]
    per_block = policy.block_size // policy.stride
    grid = (triton.cdiv(num_groups, _ROWS), triton.cdiv(span.num_blocks(policy.block_size) * per_block, _COLUMNS), num_heads)
    _launch(
        estimate_kernel,
        grid,
        query,
        _stored(span.k),
        lse if span.pages is None else span.pages,
        lse,
        scale * _LOG2_E / policy.stride,
        num_queries,
        num_groups,
        span.num_tokens,
        span.first_block,
        num_blocks,
        *query.stride()[:2],
        *span.k.stride()[:3],
        SHARED=num_heads // span.k.shape[2],
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        STRIDE=policy.stride,
        BLOCK=policy.block_size,
        IS_OWN=span.is_own,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=8,
        stages=_STAGES,
        **_constants(query, span),
    )


def select(lse: Tensor, sums: Tensor, selection: Selection, policy: XAttention) -> None:
    """Select the blocks of each query block; see `block_sparse_reference.select`."""
    num_heads, num_groups, num_blocks = lse.shape
    grid = (selection.counts.shape[1], num_heads)
    groups = policy.block_size // policy.stride
    _launch(sum_kernel, grid, lse, sums, num_groups, num_blocks, selection.own_block, GROUPS=groups, TILE=_TILE)
    _launch(
        select_kernel,
        grid,
        sums,
        selection.blocks,
        selection.counts,
        selection.is_used,
        policy.threshold,
        num_blocks,
        selection.own_block,
        SELECTS_ALL=policy.threshold >= 1,
        CUT_BITS=_CUT_BITS,
        TILE=_TILE,
    )


def attend(
    query: Tensor, span: KeySpan, selection: Selection, bounds: Tensor, state: RunningState, block_size: int, scale: float
) -> None:
    """Attend to the selected blocks of a span; see `block_sparse_reference.attend`."""
    num_heads, num_queries, dim = query.shape
    value_dim = span.v.shape[3]
    _launch(
        attend_kernel,
        (selection.counts.shape[1], num_heads),
        query,
        _stored(span.k),
        _stored(span.v),
        bounds if span.pages is None else span.pages,
        selection.blocks,
        selection.counts,
        bounds,
        state.total,
        state.largest,
        state.sum,
        scale * _LOG2_E,
        num_queries,
        span.num_tokens,
        span.first_block,
        selection.blocks.shape[2],
        *query.stride()[:2],
        *span.k.stride()[:3],
        *span.v.stride()[:3],
        SHARED=num_heads // span.k.shape[2],
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        V_DIM=value_dim,
        V_BLOCK=triton.next_power_of_2(value_dim),
        BLOCK=block_size,
        IS_OWN=span.is_own,
        num_warps=8 if block_size == 128 else 4,
        stages=_STAGES,
        **_constants(query, span),
    )


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, stages: Sequence[int] = (), **constants: Any) -> None:
    """Launch a kernel.

    Args:
        stages: Numbers of tiles in flight to try, most first: how many fit depends on the GPU. Empty for a kernel without tiles.

    Raises:
        LayoutError: A tensor is not on a GPU.
        ConfigError: The tiles do not fit the shared memory of the GPU.
    """
    first = arguments[0]
    if not IS_INTERPRETED and first.device.type != "cuda":
        raise LayoutError(f"a tensor is on {first.device}; must be on a GPU (elsewhere: block_sparse_reference)")
    with torch.cuda.device_of(first):
        if not stages:
            launch(kernel, grid, *arguments, **constants)
            return
        for number in stages:
            try:
                launch(kernel, grid, *arguments, num_stages=number, **constants)
                return
            except OutOfResources as error:  # raised before the launch, and again from Triton's cache
                reason = str(error)
    raise ConfigError(
        f"prefill.sparse_policy is xattention; its tiles of heads of {first.shape[-1]} in {first.dtype} do not fit the GPU "
        f"({reason}): it must be none, or prefill.sparse_block_size smaller"
    )


def _stored(buffer: Tensor) -> Tensor:
    return buffer.view(torch.uint8) if buffer.dtype is torch.float8_e4m3fn else buffer


def _constants(query: Tensor, span: KeySpan) -> dict[str, Any]:
    is_fp8 = span.k.dtype is torch.float8_e4m3fn
    computed = OPERANDS[query.dtype]
    return {
        "PAGE_SIZE": span.k.shape[1],
        "HAS_PAGES": span.pages is not None,
        "KIND": str(span.k.dtype).removeprefix("torch."),
        "IS_FP8_NATIVE": is_fp8 and query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) >= (8, 9),
        "OPERAND": computed,
        # The interpreter multiplies bfloat16 as if it were integers; float32 holds the same numbers.
        "DOT": tl.float32 if IS_INTERPRETED and computed is tl.bfloat16 else computed,
    }
