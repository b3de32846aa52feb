"""Workspaces: buffers that a block-sparse prefill policy needs besides weights and KV, declared so that the plan counts them.

They once stopped a server. For a context of a million tokens each of two copies of expanded heads takes 8 GiB, and both were
allocated at start even where KV is offloaded and nothing reads them.

Source: the buffers of nano-vllm's XAttention (``alloc_policy_metadata``) and its report of that failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_CHUNK_TOKENS: Final = 16_384  # tokens that the policy looks at in one go
_BLOCK: Final = 128  # tokens of a block of its masks
_STRIDE: Final = 16  # queries for each row of statistics
_KV_CHUNK: Final = 4096  # tokens of a chunk of keys, for the statistics


class Strategy(StrEnum):
    """When a workspace is allocated, and how much of it."""

    EAGER = "eager"  # whole, at start
    LAZY = "lazy"  # whole, on first use: at start it is only checked that it will fit
    CHUNK_BOUNDED = "chunk_bounded"  # at start, for the tokens of one chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One buffer.

    Args:
        num_bytes: Its size; 0 if nothing needs it.
        is_allocated: Whether it is allocated at start.
        reason: How the size came about, or why the buffer is not needed.
    """

    name: str
    num_bytes: int
    strategy: Strategy
    is_allocated: bool
    reason: str


def sparse_prefill_workspaces(
    strategy: Strategy,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
    max_seq_len: int,
    has_kv_offload: bool,
) -> tuple[Workspace, ...]:
    """Return the buffers of the block-sparse prefill policy on one rank.

    Args:
        strategy: Strategy of the two expanded copies of K and V; the other buffers are eager.
        element_bytes: Bytes of an element in the model's dtype.
        has_kv_offload: Whether prefill goes chunk by chunk through host memory, which never expands heads.
    """
    num_tokens = min(max_seq_len, _CHUNK_TOKENS) if strategy is Strategy.CHUNK_BOUNDED else max_seq_len
    expanded_bytes = 0
    if has_kv_offload:
        reason = "not needed: with KV offload prefill goes chunk by chunk and never expands heads"
    elif num_heads == num_kv_heads:
        reason = "not needed: every query head has a KV head of its own"
    else:
        expanded_bytes = num_heads * num_tokens * head_dim * element_bytes
        reason = f"(1, num_heads, tokens, head_dim), {num_heads} heads, {num_tokens:,} tokens"
    is_allocated = strategy is not Strategy.LAZY and expanded_bytes > 0
    blocks = num_heads * (_CHUNK_TOKENS // _BLOCK) * -(-max_seq_len // _BLOCK)
    statistics = (max_seq_len // _KV_CHUNK + 1) * num_heads * (_CHUNK_TOKENS // _STRIDE) * 4
    others = (
        ("prefill_mask", blocks, "(1, num_heads, query blocks, key blocks) of 1 byte"),
        ("m_partial", statistics, "(key chunks + 1, 1, num_heads, query rows) of 4 bytes"),
        ("l_partial", statistics, "(key chunks + 1, 1, num_heads, query rows) of 4 bytes"),
        ("block_sums", blocks * element_bytes, "(1, num_heads, query blocks, key blocks)"),
    )
    return (
        *(
            Workspace(name=name, num_bytes=expanded_bytes, strategy=strategy, is_allocated=is_allocated, reason=reason)
            for name in ("k_expanded", "v_expanded")
        ),
        *(
            Workspace(
                name=name,
                num_bytes=num_bytes,
                strategy=Strategy.EAGER,
                is_allocated=True,
                reason=f"{shape}, {num_heads} heads, {max_seq_len:,} tokens",
            )
            for name, num_bytes, shape in others
        ),
    )
