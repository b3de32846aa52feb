"""Stored pages into a pool on a GPU: the bits are those that a pool in host memory gets, and a chunk may be gathered at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.prefill.stored_pages import Prompt, cut
from tests.prefill.test_prefix_loader import LATENT, MIXED, NUM_TOKENS, PLAIN, SCALES, rank_of, shard
from transfer.layout import DType, KVLayout, Shard, TokenOrder
from transfer.storage.directory import DirectoryStore

EIGHT_BITS = {"kv_scales": SCALES}


@pytest.mark.parametrize(
    ("layout", "own", "own_fields", "decode", "decode_fields"),
    [
        (PLAIN, shard(page_size=16), {}, shard(tp_size=2, page_size=4, order=TokenOrder.HND), {}),
        (MIXED, shard(page_size=2, order=TokenOrder.HND), {}, shard(page_size=8, dtype=DType.BFLOAT16), {}),
        (LATENT, shard(), {}, shard(page_size=8), {}),
        (PLAIN, shard(dtype=DType.FLOAT8_E4M3), EIGHT_BITS, shard(), {}),
        (PLAIN, shard(dtype=DType.BFLOAT16), {}, shard(dtype=DType.FLOAT8_E4M3), EIGHT_BITS),
        (PLAIN, shard(dtype=DType.FLOAT8_E4M3), EIGHT_BITS, shard(dtype=DType.FLOAT8_E4M3, tp_size=4), EIGHT_BITS),
    ],
)
async def test_stored_pages_reach_a_gpu(
    tmp_path: Path, layout: KVLayout, own: Shard, own_fields: dict[str, Any], decode: Shard, decode_fields: dict[str, Any]
) -> None:
    prompt, reader, writer = Prompt(layout, NUM_TOKENS), cut(layout, own, **own_fields), cut(layout, decode, **decode_fields)
    store = DirectoryStore(tmp_path)
    prefix = prompt.store(store, writer)
    whole = (NUM_TOKENS - 1) // decode.page_size * decode.page_size
    async with rank_of(reader, store, batch_bytes=2000, device="cuda") as rank:
        assert await rank.load(prefix) == whole
        prompt.check(rank.pool, reader, writer, rank.allocator.tables("a"), whole)
