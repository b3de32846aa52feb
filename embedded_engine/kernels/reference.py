"""The kernels in plain torch, slow and obviously right, on every device: the definition of correct for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from embedded_engine.kernels.arguments import DecodeCall, WriteCall
from transfer.pool.kv_pool import TORCH_DTYPES, as_words, convert


def reference_decode_attention(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Attention request by request in float32, from elements rounded to the query's dtype.

    Returns:
        The output [B, query heads, v_dim] in the query's dtype, and float32 [B, query heads]: the logarithm of the softmax's
        denominator, the sink's share included; -inf where there is nothing to attend to.
    """
    query = call.query
    out = torch.empty(call.out_shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    for request in range(query.shape[0]):
        slots = _visible_slots(call, request)
        k, v = (_tokens(view, slots).to(query.dtype).float() for view in (call.k_view, call.v_view))
        queries = query[request].float().view(k.shape[1], call.group_heads, -1)  # [KV heads, heads of each, k_dim]
        scores = torch.einsum("hgd,nhd->hgn", queries, k).reshape(query.shape[1], -1) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        logits = scores if call.sinks is None else torch.cat([scores, call.sinks.float()[:, None]], dim=1)
        lse[request] = torch.logsumexp(logits, dim=1)
        weights = torch.exp(scores - lse[request][:, None])  # without scores an empty row, so the product is zeros
        grouped = weights.view(k.shape[1], call.group_heads, -1)
        out[request] = torch.einsum("hgn,nhd->hgd", grouped, v).reshape(query.shape[1], -1).to(query.dtype)
    return out, lse


def reference_write_rows(call: WriteCall) -> None:
    """Write the rows that have a slot in the pool, converted as every write to a pool is."""
    num_slots = call.k_view.shape[0] * call.k_view.shape[1]
    is_written = (call.slots >= 0) & (call.slots < num_slots)
    slots = call.slots[is_written].long()
    for view, new in ((call.k_view, call.new_k), (call.v_view, call.new_v)):
        if view is None or new is None:
            continue
        element = next(dtype for dtype, known in TORCH_DTYPES.items() if known is view.dtype)
        page_size = view.shape[1]
        as_words(view)[slots // page_size, slots % page_size] = as_words(convert(new[is_written], element))


def _visible_slots(call: DecodeCall, request: int) -> Tensor:
    """Return int64 [n], the slots that the request's query attends to."""
    num_rows, num_columns = call.slots.shape
    row, end = int(call.rows[request]), min(int(call.lengths[request]), num_columns)
    if not 0 <= row < num_rows or end <= 0:
        return call.slots.new_empty(0, dtype=torch.int64)
    begin = max(0, end - call.window_tokens) if call.window_tokens else 0
    slots = call.slots[row, begin:end].long()
    return slots[(slots >= 0) & (slots < call.k_view.shape[0] * call.k_view.shape[1])]


def _tokens(view: Tensor, slots: Tensor) -> Tensor:
    """Return [n, KV heads, dim] of the slots, in the pool's dtype."""
    page_size = view.shape[1]
    return as_words(view)[slots // page_size, slots % page_size].view(view.dtype)


def reference_merge_partial(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial result of attention to a running one, in place; see `embedded_engine.kernels.merge_partial`."""
    both = torch.logaddexp(total_lse, part_lse)
    is_nothing = both.isneginf()
    kept, added = (torch.exp(lse - both).masked_fill(is_nothing, 0)[..., None] for lse in (total_lse, part_lse))
    total.copy_(total * kept + part.float() * added)
    total_lse.copy_(both)
