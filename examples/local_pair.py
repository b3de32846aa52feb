"""Move the KV of a prompt from four prefill ranks to two decode ranks with larger pages in another order, in one process.

$ .venv/bin/python examples/local_pair.py
"""

import asyncio

import torch

from transfer import DType, KVLayout, Shard, TokenOrder
from transfer.local_pair import LocalPair
from transfer.pool.kv_pool import KVPool

TOKENS, HEADS, LAYERS = 100, 4, 2


async def main() -> None:
    layout = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=8, dtype=DType.FLOAT16)
    prefill, decode = Shard(tp_size=4, page_size=16), Shard(tp_size=2, page_size=32, order=TokenOrder.HND)
    sources = [KVPool(layout=layout, shard=prefill.at(rank), num_pages=8) for rank in range(4)]
    targets = [KVPool(layout=layout, shard=decode.at(rank), num_pages=4) for rank in range(2)]

    k, v = torch.randn(2, TOKENS, HEADS, 8).half()  # [tokens, heads, dim]; each rank holds its own heads
    for rank, pool in enumerate(sources):
        for layer in range(LAYERS):
            pool.write(layer, torch.arange(TOKENS), k[:, rank : rank + 1], v[:, rank : rank + 1])

    async with LocalPair(sources, targets) as pair:  # page tables: [rank][group of layers][page]
        await pair.transfer("a", num_tokens=TOKENS, prefill_tables=[[range(7)]] * 4, decode_tables=[[range(4)]] * 2)

    for rank, pool in enumerate(targets):
        found_k, found_v = pool.read(LAYERS - 1, torch.arange(TOKENS))
        assert torch.equal(found_k, k[:, 2 * rank : 2 * rank + 2]) and torch.equal(found_v, v[:, 2 * rank : 2 * rank + 2])
    print("every decode rank has the KV of its heads, bit for bit")


asyncio.run(main())
