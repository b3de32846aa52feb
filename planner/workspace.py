"""Workspaces: memory that a mode of an engine needs besides weights and KV, declared so that the plan knows of it.

Each says how large it is, which modes need it, and when it is allocated. The set for a block-sparse prefill policy is here
because it killed a server: its buffers for expanded heads take 8 GiB each for a model with a context of a million tokens, and
they were allocated at start even where KV is offloaded and nothing ever reads them.

Source: the policy's buffers are those of nano-vllm's XAttention (``alloc_policy_metadata``) and its account of that failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SPARSE_CHUNK_TOKENS: Final = 16_384
"""Tokens that the block-sparse policy looks at in one go."""
_BLOCK: Final = 128  # tokens of a block of its masks
_STRIDE: Final = 16  # it keeps one row of statistics for so many queries
_KV_CHUNK: Final = 4096  # tokens of a chunk of keys, for the statistics


class Mode(StrEnum):
    """Where the KV of a request being prefilled lies."""

    DEVICE = "device"
    OFFLOAD = "offload"  # in host memory, brought in chunk by chunk


class Strategy(StrEnum):
    """When a workspace is allocated, and how much of it."""

    EAGER = "eager"  # whole, at start
    LAZY = "lazy"  # whole, when it is first used: at start it must only be known that it will fit
    CHUNK_BOUNDED = "chunk_bounded"  # at start, for the tokens of one chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSizes:
    """The flags that the size of a workspace depends on.

    Args:
        num_tokens: Tokens that it holds: a whole sequence, or a chunk.
        max_seq_len: Tokens of the longest sequence, whatever it holds.
        num_heads, num_kv_heads: Heads of this rank.
        head_dim: Elements of a head.
        element_bytes: Bytes of an element of what the model computes in.
    """

    num_tokens: int
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One buffer.

    Args:
        name: Names it in the plan.
        shape: How its size comes about, for people.
        num_bytes: Its size; 0 where the flags leave nothing to hold.
        modes: The modes that need it.
        strategy: When it is allocated.
        why_skipped: Why the other modes do not need it.
    """

    name: str
    shape: str
    num_bytes: Callable[[WorkspaceSizes], int]
    modes: frozenset[Mode] = frozenset(Mode)
    strategy: Strategy = Strategy.EAGER
    why_skipped: str = ""


def sparse_prefill_workspaces(strategy: Strategy = Strategy.CHUNK_BOUNDED) -> tuple[Workspace, ...]:
    """What the block-sparse prefill policy allocates. `strategy` is that of its two expanded copies of K and V."""
    expanded = [
        Workspace(
            name=name,
            shape="(1, num_heads, tokens, head_dim)",
            num_bytes=_expanded_bytes,
            modes=frozenset({Mode.DEVICE}),
            strategy=strategy,
            why_skipped="with KV offload prefill goes chunk by chunk and never expands heads",
        )
        for name in ("k_expanded", "v_expanded")
    ]
    return (
        *expanded,
        Workspace(name="prefill_mask", shape="(1, num_heads, query blocks, key blocks) of 1 byte", num_bytes=_blocks),
        Workspace(name="m_partial", shape="(key chunks + 1, 1, num_heads, query rows) of 4 bytes", num_bytes=_statistics_bytes),
        Workspace(name="l_partial", shape="(key chunks + 1, 1, num_heads, query rows) of 4 bytes", num_bytes=_statistics_bytes),
        Workspace(
            name="block_sums",
            shape="(1, num_heads, query blocks, key blocks)",
            num_bytes=lambda sizes: _blocks(sizes) * sizes.element_bytes,
        ),
    )


def _expanded_bytes(sizes: WorkspaceSizes) -> int:
    if sizes.num_heads == sizes.num_kv_heads:
        return 0  # every query head has a KV head of its own
    return sizes.num_heads * sizes.num_tokens * sizes.head_dim * sizes.element_bytes


def _blocks(sizes: WorkspaceSizes) -> int:
    return sizes.num_heads * (SPARSE_CHUNK_TOKENS // _BLOCK) * -(-sizes.max_seq_len // _BLOCK)


def _statistics_bytes(sizes: WorkspaceSizes) -> int:
    return (sizes.max_seq_len // _KV_CHUNK + 1) * sizes.num_heads * (SPARSE_CHUNK_TOKENS // _STRIDE) * 4
