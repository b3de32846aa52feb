"""Decode attention over the paged pool: a Triton kernel that reads each KV head once for all the query heads that share it.

Flash decoding: the tokens of a request are cut into splits that attend in parallel, each by an online softmax; a second kernel
merges them. The number of splits, and so the launch, depends on shapes only, so that a step can be captured into a CUDA graph and
replayed while the requests grow. The device computes the tokens of a split from the request's length; splits without tokens
return at once.

The output depends on the number of splits in its last bits, and so on the size of the batch.

Source: Dao and others, "Flash-Decoding for long-context inference" (2023); a tile of grouped query heads as in SGLang's and
vLLM's Triton decode kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from embedded_engine.kernels.arguments import DecodeCall
from embedded_engine.kernels.launch import IS_INTERPRETED, launch
from transfer.copy.elements import widened
from transfer.errors import ConfigError, LayoutError

MIN_SPLIT_TOKENS = 128
"""Least tokens of a split: with fewer, writing and merging its partial result costs more than it saves."""

TARGET_PROGRAMS = 512
"""Programs of a launch that splits aim at: four for each multiprocessor of an H200.

The fastest of 256 to 4096 there, within a tenth (1 to 128 requests of 1,024 and 8,192 tokens, GQA and MLA)."""

MAX_SPLITS = 128

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def paged_decode_attention(call: DecodeCall, *, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Attend with one query token per request to its tokens in the pool, the new one included.

    Queued on the current stream of the tensors' device, without a synchronisation. The result agrees with
    `reference_decode_attention`; float32 is computed as float32 (no TF32).

    Args:
        num_splits: Splits of a request's tokens; None chooses from the shapes.

    Returns:
        The output [B, query heads, v_dim] in the query's dtype, and float32 [B, query heads]: the logarithm of the softmax's
        denominator, -inf if there is nothing to attend to. The latter merges outputs over different tokens of a request, for KV
        in several tiers. It contains the sink: give the sink to only one of the merged calls.

    Raises:
        LayoutError: The tensors are not on a GPU, or the pool has more tokens than an int32 slot can name.
        ConfigError: `num_splits` is less than 1.
    """
    query = call.query
    if num_splits is not None and num_splits < 1:
        raise ConfigError(f"num_splits is {num_splits}; must be at least 1")
    if not IS_INTERPRETED and query.device.type != "cuda":
        raise LayoutError(f"query is on {query.device}; must be on a GPU (elsewhere: reference_decode_attention)")
    if call.k_view.shape[0] * call.k_view.shape[1] > 2**31:
        raise LayoutError(f"k has {call.k_view.shape[0]} pages of {call.k_view.shape[1]} tokens; int32 slots reach 2**31 tokens")
    output = torch.empty(call.out_shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if query.shape[0]:
        with torch.cuda.device_of(query):
            _launch(call, output, lse, num_splits)
    return output, lse


@triton.jit
def _visible_tokens(rows, lengths, request, num_rows, num_columns, window_tokens):  # type: ignore[no-untyped-def]
    """A request's row of the page table, and the tokens [begin, end) that it attends to."""
    row = tl.load(rows + request)
    end = tl.minimum(tl.load(lengths + request), num_columns)
    end = tl.where((row >= 0) & (row < num_rows), tl.maximum(end, 0), 0)
    begin = tl.where(window_tokens > 0, tl.maximum(end - window_tokens, 0), 0)
    return row, begin, end


@triton.jit  # type: ignore[untyped-decorator]
def _split_tokens(num_tokens, NUM_SPLITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, MIN_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens of a split: whole blocks, so that all splits but the last waste nothing."""
    blocks = tl.cdiv(tl.cdiv(num_tokens, NUM_SPLITS), BLOCK_TOKENS)
    return tl.maximum(blocks * BLOCK_TOKENS, MIN_TOKENS)


@triton.jit  # type: ignore[untyped-decorator]
def operand(values, KIND: tl.constexpr, IS_FP8_NATIVE: tl.constexpr, OPERAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of the pool in the type that is computed in; float8 comes as its bytes, for GPUs that do not know it."""
    if KIND == "float8_e4m3fn":
        values = values.to(tl.float8e4nv, bitcast=True) if IS_FP8_NATIVE else widened(values, KIND)
    return values.to(OPERAND)


# Numbers that change with the batch or the layer are kept out of the specialisation: they would compile variants in mid-service.
@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_slots", "window_tokens"])  # type: ignore[untyped-decorator]
def attend_splits(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    query,
    k,
    v,
    slots,
    rows,
    lengths,
    partial_out,
    partial_max,
    partial_sum,
    scale,
    softcap,
    num_rows,
    num_columns,
    num_slots,
    window_tokens,
    query_stride,
    query_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    slots_stride,
    PAGE_SIZE: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_V_K_MAIN: tl.constexpr,
    KIND: tl.constexpr,
    IS_FP8_NATIVE: tl.constexpr,
    OPERAND: tl.constexpr,
    DOT: tl.constexpr,
):
    """One split of one request's tokens for a tile of query heads of one KV head; grid (tiles of heads, splits, requests).

    A row of K is read as K_MAIN elements and a rest of K_REST (0: none), powers of two that cover it closely: 576 = 512 + 64.
    Scores and maxima are in units of log2, sums in float32. The partial output is not divided by the sum yet.
    """
    head_tiles: tl.constexpr = (GROUP_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    log2_e: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    row, begin, end = _visible_tokens(rows, lengths, request, num_rows, num_columns, window_tokens)
    split_tokens = _split_tokens(end - begin, NUM_SPLITS, BLOCK_TOKENS, MIN_TOKENS)
    first = begin + split * split_tokens
    last = tl.minimum(first + split_tokens, end)
    if first >= last:
        return

    kv_head = tile // head_tiles
    head_of_group = (tile % head_tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = head_of_group < GROUP_HEADS
    head = (kv_head * GROUP_HEADS + head_of_group).to(tl.int64)
    at_main = tl.arange(0, K_MAIN)
    at_v = tl.arange(0, V_BLOCK)
    at_query = query + request.to(tl.int64) * query_stride + head * query_head_stride
    main_mask = is_head[:, None] & (at_main < K_DIM)[None, :]
    q_main = tl.load(at_query[:, None] + at_main[None, :], mask=main_mask, other=0.0).to(DOT)
    if K_REST > 0:
        at_rest = K_MAIN + tl.arange(0, K_REST)
        q_rest = tl.load(at_query[:, None] + at_rest[None, :], mask=is_head[:, None] & (at_rest < K_DIM)[None, :], other=0.0)
        q_rest = q_rest.to(DOT)

    running_max = tl.full([BLOCK_HEADS], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    out = tl.zeros([BLOCK_HEADS, V_BLOCK], dtype=tl.float32)
    row_slots = slots + row.to(tl.int64) * slots_stride
    k_of_head = k + kv_head.to(tl.int64) * k_head_stride
    v_of_head = v + kv_head.to(tl.int64) * v_head_stride
    for block in range(first, last, BLOCK_TOKENS):
        token = block + tl.arange(0, BLOCK_TOKENS)
        slot = tl.load(row_slots + token, mask=token < last, other=-1)
        is_token = (slot >= 0) & (slot < num_slots)
        page = (slot // PAGE_SIZE).to(tl.int64)
        offset = (slot % PAGE_SIZE).to(tl.int64)
        at_k = k_of_head + page * k_page_stride + offset * k_token_stride
        mask = is_token[:, None] & (at_main < K_DIM)[None, :]
        k_main = operand(tl.load(at_k[:, None] + at_main[None, :], mask=mask, other=0), KIND, IS_FP8_NATIVE, OPERAND).to(DOT)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if K_REST > 0:
            mask = is_token[:, None] & (at_rest < K_DIM)[None, :]
            k_rest = operand(tl.load(at_k[:, None] + at_rest[None, :], mask=mask, other=0), KIND, IS_FP8_NATIVE, OPERAND)
            scores += tl.dot(q_rest, tl.trans(k_rest.to(DOT)), input_precision="ieee")
        scores = scores * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * log2_e / softcap)) + 1.0))  # tanh
        scores = tl.where(is_token[None, :], scores * log2_e, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # Of nothing but masked scores the maximum is -inf, and -inf - -inf is no number.
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - origin[:, None])
        shrink = tl.exp2(running_max - origin)
        running_sum = running_sum * shrink + tl.sum(weights, axis=1)
        running_max = new_max
        if IS_V_K_MAIN:
            values = k_main
        else:
            at_row = v_of_head + page * v_page_stride + offset * v_token_stride
            mask = is_token[:, None] & (at_v < V_DIM)[None, :]
            values = operand(tl.load(at_row[:, None] + at_v[None, :], mask=mask, other=0), KIND, IS_FP8_NATIVE, OPERAND).to(DOT)
        out = out * shrink[:, None] + tl.dot(weights.to(OPERAND).to(DOT), values, input_precision="ieee")

    partial = (request.to(tl.int64) * (KV_HEADS * GROUP_HEADS) + head) * NUM_SPLITS + split
    tl.store(partial_max + partial, running_max, mask=is_head)
    tl.store(partial_sum + partial, running_sum, mask=is_head)
    tl.store(partial_out + partial[:, None] * V_DIM + at_v[None, :], out, mask=is_head[:, None] & (at_v < V_DIM)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_columns", "window_tokens"])  # type: ignore[untyped-decorator]
def merge_splits(  # type: ignore[no-untyped-def]  # Triton gives the parameters their types
    partial_out,
    partial_max,
    partial_sum,
    rows,
    lengths,
    sinks,
    out,
    lse,
    num_rows,
    num_columns,
    window_tokens,
    out_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits of one request and query head that had tokens, and the head's sink; grid (heads, requests)."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    log2_e: tl.constexpr = 1.4426950408889634
    _, begin, end = _visible_tokens(rows, lengths, request, num_rows, num_columns, window_tokens)
    num_used = tl.cdiv(end - begin, _split_tokens(end - begin, NUM_SPLITS, BLOCK_TOKENS, MIN_TOKENS))
    at_v = tl.arange(0, V_BLOCK)
    total = tl.zeros([V_BLOCK], dtype=tl.float32)
    if HAS_SINKS:
        running_max = tl.load(sinks + head).to(tl.float32) * log2_e
        running_sum = tl.full([], 1.0, dtype=tl.float32)
    else:
        running_max = tl.full([], float("-inf"), dtype=tl.float32)
        running_sum = tl.full([], 0.0, dtype=tl.float32)
    first = (request * NUM_HEADS + head) * NUM_SPLITS
    for split in range(num_used):
        split_max = tl.load(partial_max + first + split)
        new_max = tl.maximum(running_max, split_max)
        origin = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink, weight = tl.exp2(running_max - origin), tl.exp2(split_max - origin)
        values = tl.load(partial_out + (first + split) * V_DIM + at_v, mask=at_v < V_DIM, other=0.0)
        total = total * shrink + values * weight
        running_sum = running_sum * shrink + tl.load(partial_sum + first + split) * weight
        running_max = new_max
    # NaN must stay NaN: the engine finds damaged KV by its logits.
    result = tl.where(running_sum == 0.0, 0.0, total / tl.where(running_sum == 0.0, 1.0, running_sum))
    at_out = out + request * out_stride + head * out_head_stride + at_v
    tl.store(at_out, result.to(out.dtype.element_ty), mask=at_v < V_DIM)
    tl.store(lse + request * NUM_HEADS + head, (running_max + tl.log2(running_sum)) / log2_e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The tiles of a call: heads and tokens of a program, and the blocks that cover a row of K and of V."""

    block_heads: int
    block_tokens: int
    head_tiles: int
    k_main: int
    k_rest: int
    v_block: int


def tiles_of(group_heads: int, k_dim: int, v_dim: int, element_bytes: int) -> Tiles:
    """Return the tiles of a call; a tensor core takes at least 16 rows, so heads beyond the group are padding."""
    k_main = max(16, 1 << (k_dim.bit_length() - 1))
    k_rest = max(16, triton.next_power_of_2(k_dim - k_main)) if k_dim > k_main else 0
    if k_rest > k_main // 2:
        k_main, k_rest = triton.next_power_of_2(k_dim), 0
    v_block = max(16, triton.next_power_of_2(v_dim))
    # A tile of queries and one of K take 32 KiB each at most: with K and V in flight twice they fit the shared memory.
    most = 32768 // (max(k_main, v_block) * element_bytes)
    block_heads = min(max(16, triton.next_power_of_2(group_heads)), max(16, min(64, most)))
    return Tiles(
        block_heads=block_heads,
        block_tokens=max(16, min(64, most)),
        head_tiles=triton.cdiv(group_heads, block_heads),
        k_main=k_main,
        k_rest=k_rest,
        v_block=v_block,
    )


def num_splits_of(num_programs: int, num_columns: int) -> int:
    """Return the number of splits that fills the GPU, from the programs of one split and the longest possible request.

    At least two: on an H200 one split of 64 requests over 8,192 tokens takes 677 us, two take 495, and four as long as two.
    """
    return max(1, min(max(2, -(-TARGET_PROGRAMS // num_programs)), -(-num_columns // MIN_SPLIT_TOKENS), MAX_SPLITS))


def _launch(call: DecodeCall, out: Tensor, lse: Tensor, num_splits: int | None) -> None:
    query, k, v = call.query, call.k_view, call.v_view
    num_requests, num_heads, k_dim = query.shape
    num_pages, page_size, kv_heads, v_dim = v.shape
    num_rows, num_columns = call.slots.shape
    tiles = tiles_of(call.group_heads, k_dim, v_dim, query.element_size())
    splits = num_splits or num_splits_of(num_requests * kv_heads * tiles.head_tiles, num_columns)
    partial_out = torch.empty((num_requests, num_heads, splits, v_dim), dtype=torch.float32, device=query.device)
    partial_max, partial_sum = torch.empty((2, num_requests, num_heads, splits), dtype=torch.float32, device=query.device)
    is_fp8 = k.dtype is torch.float8_e4m3fn
    computed = OPERANDS[query.dtype]
    cut = {"BLOCK_TOKENS": tiles.block_tokens, "NUM_SPLITS": splits, "MIN_TOKENS": MIN_SPLIT_TOKENS}
    launch(
        attend_splits,
        (kv_heads * tiles.head_tiles, splits, num_requests),
        query,
        k.view(torch.uint8) if is_fp8 else k,
        v.view(torch.uint8) if is_fp8 else v,
        call.slots,
        call.rows,
        call.lengths,
        partial_out,
        partial_max,
        partial_sum,
        float(call.scale),
        float(call.softcap or 1.0),
        num_rows,
        num_columns,
        num_pages * page_size,
        call.window_tokens,
        *query.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        call.slots.stride(0),
        PAGE_SIZE=page_size,
        GROUP_HEADS=call.group_heads,
        KV_HEADS=kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_MAIN=tiles.k_main,
        K_REST=tiles.k_rest,
        V_BLOCK=tiles.v_block,
        BLOCK_HEADS=tiles.block_heads,
        HAS_SOFTCAP=call.softcap is not None,
        IS_V_K_MAIN=call.v is None and v_dim == tiles.k_main,
        KIND=str(k.dtype).removeprefix("torch."),
        IS_FP8_NATIVE=is_fp8 and query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) >= (8, 9),
        OPERAND=computed,
        # The interpreter multiplies bfloat16 as if it were integers; float32 holds the same numbers.
        DOT=tl.float32 if IS_INTERPRETED and computed is tl.bfloat16 else computed,
        num_warps=8 if tiles.block_heads * tiles.v_block >= 16384 else 4,
        num_stages=2,
        **cut,
    )
    launch(
        merge_splits,
        (num_heads, num_requests),
        partial_out,
        partial_max,
        partial_sum,
        call.rows,
        call.lengths,
        call.sinks if call.sinks is not None else lse,
        out,
        lse,
        num_rows,
        num_columns,
        call.window_tokens,
        *out.stride()[:2],
        NUM_HEADS=num_heads,
        V_DIM=v_dim,
        V_BLOCK=tiles.v_block,
        HAS_SINKS=call.sinks is not None,
        **cut,
    )
