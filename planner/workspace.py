"""Workspaces: buffers that block-sparse prefill needs besides weights and KV, declared once for the plan and for the engine.

The engine allocates exactly what is declared here. No buffer copies K or V, or expands heads: the policy that these buffers
replace once allocated two copies of 8 GiB for a context of a million tokens, which nothing read when KV was offloaded.

Source: that policy is nano-vllm's XAttention (``alloc_policy_metadata``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transfer.errors import ConfigError
from transfer.layout import KVLayout, LayerKind

BLOCK_SIZES = (64, 128)
STRIDES = (4, 8, 16, 32)
_ITEM_BYTES = 4  # float32 and int32


class Strategy(StrEnum):
    """When the workspaces are allocated; each is for the tokens of one chunk, and for the longest sequence."""

    CHUNK_BOUNDED = "chunk_bounded"  # at start
    LAZY = "lazy"  # on first use: at start it is only checked that they will fit


@dataclass(frozen=True, slots=True, kw_only=True)
class XAttention:
    """Block-sparse prefill: key blocks are estimated by antidiagonals, and the largest are attended to.

    Source: Xu and others, "XAttention: Block Sparse Attention with Antidiagonal Scoring" (arXiv 2503.16428).

    Args:
        block_size: Tokens of a query block and of a key block.
        stride: Queries, and keys, that are scored as one, by the sum of the products on their antidiagonal.
        threshold: Share of a query block's estimated weights that its selected key blocks must have; 1 selects all blocks.
        strategy: When the workspaces are allocated.

    Raises:
        ConfigError: A value is out of range.
    """

    block_size: int = 128
    stride: int = 16
    threshold: float = 0.9
    strategy: Strategy = Strategy.CHUNK_BOUNDED

    def __post_init__(self) -> None:
        for name, value, allowed in (("block_size", self.block_size, BLOCK_SIZES), ("stride", self.stride, STRIDES)):
            if value not in allowed:
                raise ConfigError(f"{name} is {value}; it must be one of {', '.join(map(str, allowed))}")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; it must be above 0 and at most 1")

    def __str__(self) -> str:
        return f"xattention block_size={self.block_size} stride={self.stride} threshold={self.threshold!r}"

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_groups(self, num_tokens: int) -> int:
        """Return the groups of `stride` tokens."""
        return -(-num_tokens // self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One buffer.

    Args:
        num_bytes: Its size.
        strategy: When it is allocated.
        reason: How the size came about.
    """

    name: str
    num_bytes: int
    strategy: Strategy
    reason: str

    @property
    def is_allocated(self) -> bool:
        """Whether it is allocated at start."""
        return self.strategy is Strategy.CHUNK_BOUNDED


def check_has_sparse_prefill(layout: KVLayout) -> None:
    """Refuse a model with layers that block-sparse prefill does not support; recurrent layers have no attention.

    Raises:
        ConfigError: The message begins with "has ...".
    """
    kinds = {layer.kind for layer in layout.layers}
    wrong = sorted(kinds - {LayerKind.ATTENTION, LayerKind.RECURRENT_STATE})
    if wrong or LayerKind.ATTENTION not in kinds:
        found = f"layers of kind {', '.join(wrong)}" if wrong else "no layers of kind attention"
        raise ConfigError(f"has {found}; block-sparse prefill needs full attention with KV heads: it must be none for this model")


def sparse_prefill_workspaces(
    policy: XAttention, *, num_heads: int, chunk_tokens: int, max_seq_len: int
) -> tuple[Workspace, ...]:
    """Return the buffers of block-sparse prefill on one rank.

    Args:
        num_heads: Query heads of the rank.
        chunk_tokens: Most tokens of a request in a prefill step.
        max_seq_len: Tokens of the longest sequence.
    """
    rows = min(chunk_tokens, max_seq_len)
    groups, query_blocks = policy.num_groups(rows), policy.num_blocks(rows)
    key_blocks = policy.num_blocks(max_seq_len) + 1  # the tokens before a step and its own are cut separately
    sizes = f"{num_heads} heads, chunks of {rows:,} tokens, sequences of {max_seq_len:,}"
    shapes = (
        ("block_lse", num_heads * groups * key_blocks, "(heads, groups of queries, key blocks) of float32"),
        ("block_sums", num_heads * query_blocks * key_blocks, "(heads, query blocks, key blocks) of float32"),
        ("block_lists", num_heads * query_blocks * key_blocks, "(heads, query blocks, key blocks) of int32"),
        ("block_counts", num_heads * query_blocks + key_blocks, "(heads, query blocks) and (key blocks) of int32"),
    )
    return tuple(
        Workspace(name=name, num_bytes=items * _ITEM_BYTES, strategy=policy.strategy, reason=f"{shape}: {sizes}")
        for name, items, shape in shapes
    )
