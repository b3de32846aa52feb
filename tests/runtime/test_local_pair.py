"""`LocalPair`: both tiers in one process, as a user of the library tries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from transfer.chunk import ChunkPlan
from transfer.errors import ConfigError, LayoutError, TransferAborted
from transfer.layout import DType, KVLayout, Shard, TokenOrder
from transfer.local_pair import LocalPair
from transfer.pool.kv_pool import KVPool

TOKENS, HEADS, LAYERS = 100, 4, 2
LAYOUT = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=8, dtype=DType.FLOAT16)
PREFILL, DECODE = Shard(tp_size=2, page_size=16), Shard(tp_size=4, page_size=8, order=TokenOrder.HND)
WITHIN_S = 60.0


def pools_of(shard: Shard, num_pages: int, layout: KVLayout = LAYOUT) -> list[KVPool]:
    return [KVPool(layout=layout, shard=shard.at(rank), num_pages=num_pages) for rank in range(shard.num_ranks)]


def slots_of(table: Sequence[int], page_size: int, end: int) -> torch.Tensor:
    tokens = torch.arange(end)
    return torch.tensor(table)[tokens // page_size] * page_size + tokens % page_size


class Pair:
    """A pair whose pools have room for two prompts, and the KV of each prompt."""

    def __init__(self) -> None:
        self.sources, self.targets = pools_of(PREFILL, 16), pools_of(DECODE, 32)
        self.pair = LocalPair(self.sources, self.targets, plan=ChunkPlan(chunk_tokens=32, layers_per_group=1))
        self.kv: dict[str, torch.Tensor] = {}  # [K or V, tokens, heads, dim], the same in every layer

    def tables(self, number: int) -> dict[str, Any]:
        source = [*range(7 * number, 7 * number + 7)][::-1]
        target = [*range(13 * number, 13 * number + 13)]
        return {"prefill_tables": [[source]] * PREFILL.num_ranks, "decode_tables": [[target]] * DECODE.num_ranks}

    def compute(self, request_id: str, number: int) -> None:
        k, v = self.kv[request_id] = torch.randn(2, TOKENS, HEADS, 8, generator=torch.Generator().manual_seed(number)).half()
        slots = slots_of(self.tables(number)["prefill_tables"][0][0], PREFILL.page_size, TOKENS)
        for rank, pool in enumerate(self.sources):
            for layer in range(LAYERS):
                pool.write(layer, slots, k[:, 2 * rank : 2 * rank + 2], v[:, 2 * rank : 2 * rank + 2])

    def assert_arrived(self, request_id: str, number: int) -> None:
        k, v = self.kv[request_id]
        slots = slots_of(self.tables(number)["decode_tables"][0][0], DECODE.page_size, TOKENS)
        for rank, pool in enumerate(self.targets):
            for layer in range(LAYERS):
                found_k, found_v = pool.read(layer, slots)
                assert torch.equal(found_k, k[:, rank : rank + 1]) and torch.equal(found_v, v[:, rank : rank + 1])


@pytest.fixture
async def made() -> AsyncIterator[Pair]:
    one = Pair()
    async with asyncio.timeout(WITHIN_S), one.pair:
        yield one


async def test_prompts_arrive_bit_for_bit_while_another_one_is_computed(made: Pair) -> None:
    made.compute("late", 1)
    late = made.pair.begin("late", num_tokens=TOKENS, **made.tables(1))
    late.computed(40)
    made.compute("whole", 0)
    stats = await made.pair.transfer("whole", num_tokens=TOKENS, **made.tables(0))
    made.assert_arrived("whole", 0)
    assert sorted(stats) == [0, 1]
    assert sum(one.num_bytes for one in stats.values()) == made.kv["whole"].numel() * 2 * LAYERS, "every byte travelled once"
    late.computed(TOKENS)
    await late.wait()
    made.assert_arrived("late", 1)


async def test_a_cancelled_transfer_leaves_its_id_and_pages_to_the_next(made: Pair) -> None:
    made.compute("a", 0)
    given_up = made.pair.begin("a", num_tokens=TOKENS, **made.tables(0))
    given_up.computed(50)
    with pytest.raises(ConfigError, match="request_id 'a' is under way already"):
        made.pair.begin("a", num_tokens=TOKENS, **made.tables(0))
    given_up.cancel("the user left")
    with pytest.raises(TransferAborted, match="the user left"):
        await given_up.wait()
    given_up.cancel("again")  # it is over
    await made.pair.transfer("a", num_tokens=TOKENS, **made.tables(0))
    made.assert_arrived("a", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens is 0; it must be at least 1"),
        ({"prefill_tables": [[range(7)]]}, "prefill_tables has tables of 1 ranks; there are 2"),
        ({"prefill_tables": [range(7)] * 2}, r"prefill_tables\[0\] has 7 tables; the model has 1 groups of layers"),
        ({"prefill_tables": [[7], [7]]}, r"prefill_tables\[0\]\[0\] is the number 7; it must be the page table of group"),
        ({"decode_tables": [[range(12)]] * 4}, r"decode_tables\[0\]\[0\] has 12 pages; 100 tokens of group .* need 13"),
        ({"decode_tables": [[range(20, 33)]] * 4}, r"decode_tables\[0\]\[0\] has page 32; the pool's pages are 0 to 31"),
    ],
)
async def test_a_mistake_is_reported_by_the_call_that_makes_it(made: Pair, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_tokens": TOKENS, **made.tables(0), **changes}
    with pytest.raises(LayoutError, match=message):
        made.pair.begin("a", **arguments)
    late = made.pair.begin("a", num_tokens=TOKENS, **made.tables(0))
    late.computed(10)
    for wrong in (9, TOKENS + 1):
        with pytest.raises(LayoutError, match=rf"num_tokens is {wrong}; it must be in \[10, 100\]"):
            late.computed(wrong)


async def test_pools_that_are_no_tier_are_rejected() -> None:
    sources, targets = pools_of(PREFILL, 1), pools_of(DECODE, 1)
    other = KVLayout.uniform(num_layers=LAYERS + 1, num_kv_heads=HEADS, head_dim=8, dtype=DType.FLOAT16)
    for wrong, message in (
        ([], "prefill_pools is empty"),
        (sources[:1], "prefill_pools has 1 pools; it must have the 2 pools of one shard, in rank order"),
        (sources[::-1], "in rank order"),
        (pools_of(PREFILL, 1, other), "the pools have different layouts"),
    ):
        with pytest.raises((ConfigError, LayoutError), match=message):
            LocalPair(wrong, targets)


async def test_tokens_that_ranks_divide() -> None:
    """21 tokens on two ranks with interleaves of 8, of which the second one has 8: they fit one page on each."""
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype=DType.FLOAT16)
    divided = Shard(tp_size=2, dcp_size=2, interleave_tokens=8, page_size=16)
    sources, targets = pools_of(divided, 1, layout), pools_of(Shard(page_size=8), 3, layout)
    k = torch.arange(84).view(21, 1, 4).half()
    for pool, tokens in zip(sources, ([*range(8), *range(16, 21)], [*range(8, 16)]), strict=True):
        pool.write(0, torch.arange(len(tokens)), k[tokens], -k[tokens])
    async with asyncio.timeout(WITHIN_S), LocalPair(sources, targets) as pair:
        await pair.transfer("a", num_tokens=21, prefill_tables=[[[0]]] * 2, decode_tables=[[[2, 0, 1]]])
    found = targets[0].read(0, slots_of([2, 0, 1], 8, 21))
    assert torch.equal(found[0], k) and torch.equal(found[1], -k)
    with pytest.raises(LayoutError, match=r"the tiers do not fit: dcp_size: 2 != 1 \(the interleave of 8 tokens"):
        LocalPair(sources, pools_of(Shard(page_size=16), 2, layout))
    with pytest.raises(LayoutError, match="dcp_size is 2; it can be at most 1: layer 0 has 4 KV heads"):
        LocalPair(pools_of(divided, 1), pools_of(Shard(), 1))
