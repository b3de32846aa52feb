"""Arguments of the kernels of block-sparse prefill attention and of their references."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySpan:
    """Adjacent tokens of a request with their K and V; divided into key blocks from the span's first token on.

    Args:
        k, v: [pages, page_size, KV heads, dim].
        pages: int32, page of each `page_size` tokens of the span; None if page i has the tokens of [i * page_size, ...).
        num_tokens: Tokens of the span.
        first_block: Number of its first key block among those of the request.
        is_own: Whether these are the tokens of the queries themselves: token i is seen from query i on. Else all queries see all.
    """

    k: Tensor
    v: Tensor
    pages: Tensor | None
    num_tokens: int
    first_block: int
    is_own: bool

    def num_blocks(self, block_size: int) -> int:
        return -(-self.num_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The key blocks to which the query blocks of a chunk attend.

    Args:
        blocks: int32 [query heads, query blocks, key blocks]: the first `counts` entries of each row are numbers of key blocks,
            ascending. The first block of the request and the query block's own are always among them.
        counts: int32 [query heads, query blocks].
        is_used: int32 [key blocks], 1 if any query block attends to it.
        own_block: Number of the key block of the first query block.
    """

    blocks: Tensor
    counts: Tensor
    is_used: Tensor
    own_block: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningState:
    """State of an online softmax, changed in place, float32 and contiguous.

    Args:
        total: [query heads, queries, value dim], the sum of weighted values.
        largest: [query heads, queries], the largest score, natural.
        sum: [query heads, queries], the sum of weights.
    """

    total: Tensor
    largest: Tensor
    sum: Tensor
