"""The part of a prompt that can be stored, and the part that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prefill_node.prefix_loads import MAX_KEYS, MAX_STEPS, num_stored_pages
from prefill_node.stored_prefix import StoredPrefix, needed_pages, num_storable_tokens, page_sources
from tests.prefill.stored_pages import cut, prefix_of, store_client
from tests.storage.stores import MemoryStore, Seen
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Range, Shard

FULL = LayerSpec(num_kv_heads=4, k_head_dim=4, v_head_dim=2)
WINDOW = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=4, v_head_dim=4, window_tokens=10)
STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=2, k_head_dim=9, v_head_dim=0)
PLAIN = KVLayout(layers=(FULL,) * 2, dtype=DType.FLOAT32)
MIXED = KVLayout(layers=(FULL, WINDOW), dtype=DType.FLOAT32)
SLIDING = KVLayout(layers=(WINDOW,), dtype=DType.FLOAT32)


def stored(layout: KVLayout, num_tokens: int = 45, **shard: Any) -> StoredPrefix:
    return prefix_of(range(num_tokens), cut(layout, Shard(**({"page_size": 4} | shard))))


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (45, 11)])
def test_at_least_one_token_is_computed(num_tokens: int, num_pages: int) -> None:
    assert stored(PLAIN, num_tokens).num_pages == num_pages
    assert num_storable_tokens(num_tokens, cut(PLAIN, Shard(page_size=4))) == 4 * num_pages


def test_no_more_pages_are_looked_for_than_one_order_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_node.stored_prefix.MAX_PAGES", 3)
    assert stored(PLAIN, 45).num_pages == 3 and stored(PLAIN, 9).num_pages == 2


def test_a_model_with_states_skips_nothing() -> None:
    assert num_storable_tokens(45, cut(KVLayout(layers=(FULL, STATE), dtype=DType.FLOAT32), Shard(page_size=4))) == 0


def test_keys_are_those_of_every_decode_rank_each_once() -> None:
    groups = layer_groups(PLAIN)
    assert len(stored(PLAIN, tp_size=2).keys(groups, [0, 3])) == 4
    assert len(stored(PLAIN, tp_size=8).keys(groups, [0])) == 4, "two ranks to a head"
    staged = stored(MIXED, pp_size=2).keys(layer_groups(MIXED), [0])
    assert len(staged) == 2, "one stage has the full layer, the other the window"


def test_a_window_needs_what_it_reaches_and_full_attention_all() -> None:
    full, window = layer_groups(MIXED)
    assert needed_pages(full, 11, 4) == range(11)
    assert needed_pages(window, 11, 4) == range(8, 11)  # token 44 reaches back to 35
    assert needed_pages(window, 1, 4) == range(1)


@pytest.mark.parametrize("own_tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8])
def test_every_head_of_every_layer_has_exactly_one_source(own_tp: int, decode_tp: int) -> None:
    layout = KVLayout(layers=(FULL, WINDOW, FULL, WINDOW), dtype=DType.FLOAT32)
    decode = Shard(tp_size=decode_tp, pp_size=2, page_size=4)
    for rank in range(own_tp):
        own = Shard(tp_size=own_tp, tp_rank=rank)
        found: list[tuple[int, bool, int]] = []
        for source in page_sources(layout, own, decode):
            assert source.page_bytes == source.group.page_bytes(layout, source.shard)
            for part, heads in source.parts:
                held = source.shard.heads(layout.layers[part.layer].num_kv_heads)
                wanted = own.heads(layout.layers[part.layer].num_kv_heads)
                assert heads.source_start + heads.count <= len(held)
                assert held.begin + heads.source_start == wanted.begin + heads.target_start
                found += [(part.layer, part.is_v, wanted.begin + heads.target_start + one) for one in range(heads.count)]
        spans: dict[int, Range] = {layer: own.heads(spec.num_kv_heads) for layer, spec in enumerate(layout.layers)}
        expected = [
            (layer, is_v, head) for layer, span in spans.items() for is_v in (False, True) for head in range(span.begin, span.end)
        ]
        assert sorted(found) == sorted(expected)


class Lookup:
    """A store, and how many of its pages a prompt of 45 tokens could begin behind."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.seen = Seen()
        self.client = store_client(self.store, self.seen)

    def put(self, prefix: StoredPrefix, group: int, *pages: int) -> None:
        self.store.pages |= dict.fromkeys(prefix.keys([layer_groups(prefix.decode.layout)[group]], pages), b"")

    async def num_pages(self, prefix: StoredPrefix) -> int:
        return await num_stored_pages(prefix, self.client, deadline_s=asyncio.get_running_loop().time() + 120.0)


@pytest.fixture
async def lookup() -> AsyncIterator[Lookup]:
    one = Lookup()
    yield one
    await one.client.close()


@pytest.mark.parametrize("num_pages", range(12))
async def test_the_stored_pages_are_counted(lookup: Lookup, num_pages: int) -> None:
    prefix = stored(PLAIN, tp_size=2)
    lookup.put(prefix, 0, *range(num_pages))
    assert await lookup.num_pages(prefix) == num_pages
    assert len(lookup.seen.operations) <= (1 if not num_pages else 2 if num_pages == 11 else 6)


async def test_a_page_counts_only_with_the_parts_of_all_ranks(lookup: Lookup) -> None:
    prefix = stored(PLAIN, tp_size=2)
    lookup.put(prefix, 0, *range(11))
    del lookup.store.pages[prefix.keys(layer_groups(PLAIN), [10])[1]]
    assert await lookup.num_pages(prefix) == 10


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (range(11), 11),
        (range(8, 11), 11),
        (range(0), 0),
        (range(10), 10),
        (range(5), 5),
        ([*range(3), *range(8, 10)], 3),  # behind page 10 a window would need page 7 as well
        ([*range(3), *range(7, 10)], 10),
    ],
)
async def test_windows_say_where_it_can_begin(lookup: Lookup, windows: range | list[int], expected: int) -> None:
    prefix = stored(MIXED)
    lookup.put(prefix, 0, *range(11))
    lookup.put(prefix, 1, *windows)
    assert await lookup.num_pages(prefix) == expected


def long_prefix(num_pages: int, **shard: Any) -> StoredPrefix:
    return StoredPrefix(
        decode=cut(MIXED, Shard(**({"page_size": 4} | shard))), hashes=tuple(index.to_bytes(32) for index in range(num_pages))
    )


@pytest.mark.parametrize("gap", [0, 1, 2, 500, 5000])
async def test_no_more_of_a_window_is_asked_for_than_it_takes(lookup: Lookup, gap: int) -> None:
    """Of a long prompt: behind a gap, about as many pages as the gap has."""
    prefix = long_prefix(16384, tp_size=2)
    lookup.put(prefix, 0, *range(16384))
    last = 16384 - gap
    lookup.put(prefix, 1, *range(last - 3, last))
    assert await lookup.num_pages(prefix) == last
    asked = [len(outcomes) for _, outcomes in lookup.seen.operations][2:]  # the others are of full attention
    assert max(asked) <= MAX_KEYS
    assert sum(asked) <= 2 * (3 * gap + 3), "two ranks"


async def test_windows_that_nobody_has_stored_are_given_up(lookup: Lookup) -> None:
    prefix = long_prefix(65536)
    lookup.put(prefix, 0, *range(65536))
    assert await lookup.num_pages(prefix) == 0
    assert len(lookup.seen.operations) <= 2 + MAX_STEPS


async def test_a_model_of_windows_alone_needs_only_their_pages(lookup: Lookup) -> None:
    prefix = stored(SLIDING)
    lookup.put(prefix, 0, 8, 9, 10)
    assert await lookup.num_pages(prefix) == 11
