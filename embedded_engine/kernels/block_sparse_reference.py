"""Block-sparse prefill attention in plain torch. It defines correct results for the kernels, and runs on CPUs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

from embedded_engine.kernels.block_sparse_arguments import KeySpan, RunningState, Selection
from planner.workspace import XAttention

_LN_2 = math.log(2)
MAX_SCORES = 1 << 24
"""Most scores of an estimate that are in memory together, in float32; with temporaries 256 MiB."""


def estimate(query: Tensor, span: KeySpan, lse: Tensor, policy: XAttention, scale: float) -> None:
    """Estimate how much the queries of a chunk attend to the blocks of a span.

    `stride` queries and as many keys are scored as one: the sum of the products on their antidiagonal, divided by `stride`.
    Where tokens are missing at the end of a chunk or span, the last one is repeated: a group of one query, as after a stored
    prefix, sees all keys of a group.

    Args:
        query: [query heads, queries, dim].
        lse: float32 [query heads, groups of queries, key blocks of the request]. Written for the blocks of the span: the
            logarithm (base 2) of the sum of a block's weights, -inf where a query sees none of it.
        scale: Factor of the products.
    """
    rows = _grouped(query.float(), policy.stride)
    kv_heads, per_block = span.k.shape[2], policy.block_size // policy.stride
    by_kv_head = rows.flip(2).flatten(2).view(kv_heads, -1, policy.stride * query.shape[2])
    scores_of_a_block = query.shape[0] * rows.shape[1] * per_block
    blocks_at_once = max(1, MAX_SCORES // scores_of_a_block)
    for first in range(0, span.num_blocks(policy.block_size), blocks_at_once):
        end_token = min((first + blocks_at_once) * policy.block_size, span.num_tokens)
        tokens = torch.arange(first * policy.block_size, end_token)
        keys = _tokens(span.k, span, tokens).to(query.device, query.dtype).float()
        columns = _grouped(keys, policy.stride).flatten(2)
        scores = torch.matmul(by_kv_head, columns.transpose(1, 2)).view(query.shape[0], rows.shape[1], -1)
        scores *= scale / policy.stride
        if span.is_own:
            is_later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 - first * per_block)
            scores.masked_fill_(is_later, float("-inf"))
        missing = -scores.shape[2] % per_block
        padded = functional.pad(scores, (0, missing), value=float("-inf")) if missing else scores
        by_block = padded.unflatten(2, (-1, per_block)).logsumexp(dim=3) / _LN_2
        lse[:, :, span.first_block + first : span.first_block + first + by_block.shape[2]] = by_block


def select(lse: Tensor, sums: Tensor, selection: Selection, policy: XAttention) -> None:
    """Select the key blocks of each query block: the largest, until their estimated weights reach the threshold.

    The first block of the request and the query block's own are always selected, and count. Blocks that are as large as the
    smallest selected one are selected, too.

    Args:
        lse: From `estimate`, over all spans.
        sums: float32 [query heads, query blocks, key blocks], written: the sums of weights.
        selection: Written.
    """
    groups = policy.block_size // policy.stride
    num_heads, num_query_blocks = selection.counts.shape
    for query_block in range(num_query_blocks):
        own = selection.own_block + query_block
        seen = lse[:, query_block * groups : (query_block + 1) * groups, : own + 1] * _LN_2
        weights = torch.exp(seen - seen.logsumexp(dim=2, keepdim=True)).sum(dim=1)
        sums[:, query_block, : own + 1] = weights
        is_always = torch.zeros(own + 1, dtype=torch.bool, device=lse.device)
        is_always[0] = is_always[own] = True
        others = weights.masked_fill(is_always, 0).sort(dim=1, descending=True).values
        reached = (weights * is_always).sum(dim=1, keepdim=True) + others.cumsum(dim=1) - others
        is_needed = reached < policy.threshold * weights.sum(dim=1, keepdim=True)
        cut = others.masked_fill(~is_needed, float("inf")).amin(dim=1, keepdim=True)
        # Not "at least the cut": a sum that is no number, of damaged KV, must reach the output.
        is_taken = ~(weights < cut) | is_always if policy.threshold < 1 else torch.ones_like(weights, dtype=torch.bool)
        for head in range(num_heads):
            blocks = is_taken[head].nonzero()[:, 0].int()
            selection.blocks[head, query_block, : len(blocks)] = blocks
            selection.counts[head, query_block] = len(blocks)
            selection.is_used[blocks.long()] = 1


def attend(
    query: Tensor, span: KeySpan, selection: Selection, bounds: Tensor, state: RunningState, block_size: int, scale: float
) -> None:
    """Attend to the selected blocks of a span, and merge with the blocks before.

    Args:
        query: As for `estimate`.
        bounds: int32 [2], first and end number of the key blocks that are in the span.
        state: The queries' state, changed in place.
        scale: Factor of the products.
    """
    first, end = (int(bound) for bound in bounds)
    num_heads, num_queries = state.sum.shape
    for block in range(first, end):
        tokens = torch.arange((block - span.first_block) * block_size, (block - span.first_block + 1) * block_size)
        tokens = tokens[tokens < span.num_tokens]
        k, v = (_tokens(one, span, tokens).to(query.device, query.dtype).float() for one in (span.k, span.v))
        is_taken = torch.stack(
            [
                (selection.blocks[:, row, :] == block).logical_and(_places(selection, row)).any(dim=1)
                for row in range(selection.counts.shape[1])
            ],
            dim=1,
        )
        is_seen = is_taken.repeat_interleave(block_size, dim=1)[:, :num_queries, None].expand(-1, -1, len(tokens))
        if span.is_own:
            is_seen = is_seen & (tokens.to(k.device) <= torch.arange(num_queries, device=k.device)[:, None])
        grouped = query.float().reshape(k.shape[0], -1, query.shape[2])
        scores = torch.matmul(grouped, k.transpose(1, 2)).view(num_heads, num_queries, -1) * scale
        scores.masked_fill_(~is_seen, float("-inf"))
        largest = torch.maximum(state.largest, scores.amax(dim=2))
        origin = largest.masked_fill(largest == float("-inf"), 0)
        weights, shrunk = torch.exp(scores - origin[..., None]), torch.exp(state.largest - origin)
        state.sum.mul_(shrunk).add_(weights.sum(dim=2))
        added = torch.matmul(weights.view(k.shape[0], -1, len(tokens)), v).view(state.total.shape)
        state.total.mul_(shrunk[..., None]).add_(added)
        state.largest.copy_(largest)


def _places(selection: Selection, row: int) -> Tensor:
    """Return [query heads, key blocks]: whether an entry of the row's lists is in use."""
    places = torch.arange(selection.blocks.shape[2], device=selection.blocks.device)
    return places < selection.counts[:, row, None]


def _grouped(tokens: Tensor, stride: int) -> Tensor:
    """Return [heads, groups, stride, dim] of [heads, tokens, dim], filled up with the last token."""
    last = tokens[:, -1:].expand(-1, -tokens.shape[1] % stride, -1)
    return torch.cat((tokens, last), dim=1).view(tokens.shape[0], -1, stride, tokens.shape[2])


def _tokens(buffer: Tensor, span: KeySpan, tokens: Tensor) -> Tensor:
    """Return [KV heads, tokens, dim] of tokens of a span, on the device of the buffer."""
    page_size = buffer.shape[1]
    wanted = tokens.to(buffer.device)
    pages = wanted // page_size
    if span.pages is not None:
        pages = span.pages.to(buffer.device)[pages].long()
    return buffer[pages, wanted % page_size].transpose(0, 1)
