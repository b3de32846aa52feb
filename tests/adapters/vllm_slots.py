"""Where vLLM keeps a request's tokens with decode context parallelism."""

from __future__ import annotations

from transfer.layout import Shard


def kept_tokens(shard: Shard, num_tokens: int, block_size: int) -> dict[int, int]:
    """Token -> its place in the blocks of the rank's block table, as `_compute_slot_mappings_kernel` of vLLM 0.32 computes it."""
    kept = {}
    for token in range(num_tokens):
        block, offset = divmod(token, block_size * shard.dcp_size)
        if offset // shard.interleave_tokens % shard.dcp_size == shard.tp_rank % shard.dcp_size:
            rounds, rest = offset // (shard.interleave_tokens * shard.dcp_size), offset % shard.interleave_tokens
            kept[token] = block * block_size + rounds * shard.interleave_tokens + rest
    return kept
