"""Decode over pages on the device and in host memory: the same tokens as with everything on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.host_tier import cut_into_blocks
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import Directory, PageBook, Prompts, make_engine, prefill_all
from tests.embedded_engine.tiers import (
    ALL_BUT_NEWEST,
    HALF,
    NOTHING,
    HostEnd,
    StoredPages,
    Tiers,
    full_group,
    host_pool_of,
    largest_slice,
)
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem, RequestFault
from transfer.errors import ConfigError, EngineError
from transfer.layer_groups import NO_PAGE, GroupKind
from transfer.layout import Shard, TokenOrder
from transfer.pool.host_pool import HostPool

LENGTHS = {"a": 64, "b": 5, "c": 33, "d": 17}
NUM_TOKENS = 12
ENDS: dict[str, HostEnd] = {"a": ALL_BUT_NEWEST, "b": HALF, "d": NOTHING}  # and c, which knows of no host memory
WITHOUT_FULL_ATTENTION = ("mistral", "mixtral", "qwen3_moe")
WITH_FULL_ATTENTION = [name for name in FAMILIES if name not in WITHOUT_FULL_ATTENTION]
OF_EACH_KIND = ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_next")  # a cap, sinks, latents, states; windows in the first two
SHARDS = {
    "pages of 4": Shard(page_size=4),
    "pages of 16, HND": Shard(page_size=16, order=TokenOrder.HND),
    "pages of 1": Shard(page_size=1),
}

FAMILIES_AND_SHARDS = [
    pytest.param(family, shard, id=f"{family}, {name}")
    for family in WITH_FULL_ATTENTION
    for name, shard in SHARDS.items()
    if family in OF_EACH_KIND or shard.page_size == 4
]


def set_up(
    engine: EmbeddedEngine,
    prompts: Prompts,
    ends: dict[str, HostEnd],
    *,
    pages_per_block: int = 3,
    num_tokens: int = NUM_TOKENS,
    stored_pages: int = 0,
) -> tuple[Tiers, dict[str, int]]:
    """All requests after a prefill on the device, and the first token of each.

    Args:
        stored_pages: Pages of a block that moves on to the store; 0 if nothing does.
    """
    book = PageBook.of(engine, {name: length + num_tokens for name, length in LENGTHS.items()})
    host, group = host_pool_of(engine, 200 // engine.pool.page_size + 8), full_group(engine.pool.groups)
    stored = StoredPages(host, group, pages_per_block=stored_pages) if stored_pages else None
    engine.use_host_pool(host, block_bytes=pages_per_block * largest_slice(host, group), stored=stored)
    first = prefill_all(engine, {name: prompts[length] for name, length in LENGTHS.items()}, book)
    return Tiers(engine, host, book, ends, stored), first


def tiered_tokens(
    engine: EmbeddedEngine, prompts: Prompts, ends: dict[str, HostEnd], *, num_tokens: int = NUM_TOKENS, **how: int
) -> dict[str, list[int]]:
    """Of all requests at once."""
    tiers, first = set_up(engine, prompts, ends, num_tokens=num_tokens, **how)
    return tiers.decode(first, LENGTHS, num_tokens)


@pytest.mark.parametrize(("family", "shard"), FAMILIES_AND_SHARDS)
def test_tokens_are_those_of_the_device_alone(
    family_dir: Directory, prompts: Prompts, generate: Generate, family: str, shard: Shard
) -> None:
    directory = family_dir(family)
    found = tiered_tokens(make_engine(directory, shard), prompts, ENDS)
    assert found == {name: generate(directory, prompts[length], NUM_TOKENS) for name, length in LENGTHS.items()}


@pytest.mark.parametrize(
    "ends",
    [{}, {"a": NOTHING}, {"a": HALF}, dict.fromkeys(LENGTHS, ALL_BUT_NEWEST)],
    ids=["none", "nothing of one", "half of one", "all but the newest of all"],
)
def test_any_share_may_be_in_host_memory(demo_dir: Path, prompts: Prompts, generate: Generate, ends: dict[str, HostEnd]) -> None:
    for pages_per_block in (1, 1000):
        found = tiered_tokens(make_engine(demo_dir, Shard(page_size=4)), prompts, ends, pages_per_block=pages_per_block)
        assert found == {name: generate(demo_dir, prompts[length], NUM_TOKENS) for name, length in LENGTHS.items()}


@pytest.mark.parametrize("shard", [Shard(page_size=4), Shard(page_size=4, order=TokenOrder.HND)], ids=["NHD", "HND"])
@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_tokens_are_those_of_the_device_alone_with_pages_in_the_store(
    family_dir: Directory, prompts: Prompts, generate: Generate, family: str, shard: Shard
) -> None:
    """Of two requests, most pages; read ahead into three buffers, whose other bytes are no numbers."""
    directory = family_dir(family)
    tiers, first = set_up(make_engine(directory, shard), prompts, {"a": ALL_BUT_NEWEST, "c": ALL_BUT_NEWEST}, stored_pages=2)
    found = tiers.decode(first, LENGTHS, NUM_TOKENS)
    assert found == {name: generate(directory, prompts[length], NUM_TOKENS) for name, length in LENGTHS.items()}
    assert [len(tiers.blocks[name]) for name in ("a", "c")] == [8, 4]
    assert tiers.stored is not None and tiers.stored.most_ahead == 3


def test_a_request_whose_block_the_store_does_not_give_fails_alone(demo_dir: Path, prompts: Prompts, generate: Generate) -> None:
    engine = make_engine(demo_dir, Shard(page_size=4))
    tiers, first = set_up(engine, prompts, {"a": ALL_BUT_NEWEST, "c": ALL_BUT_NEWEST}, stored_pages=2)
    items = [tiers.item(name, token, LENGTHS[name]) for name, token in first.items()]
    assert tiers.stored is not None
    tiers.stored.missing.add(tiers.blocks["a"][3])
    with pytest.raises(RequestFault) as raised:
        engine.decode(items)
    assert raised.value.request_ids == ("a",)
    expected = {name: generate(demo_dir, prompts[LENGTHS[name]], 2)[1] for name in ("b", "c", "d")}
    assert raised.value.tokens == expected
    others = [tiers.item(name, token, LENGTHS[name] + 1) for name, token in expected.items()]
    assert engine.decode(others) == {name: generate(demo_dir, prompts[LENGTHS[name]], 3)[2] for name in expected}


@pytest.mark.parametrize("family", ["glm", "deepseek_v2"])
def test_a_request_longer_than_the_device_pool(family_dir: Directory, prompts: Prompts, generate: Generate, family: str) -> None:
    """Six pages on the device, a prompt of 32 and more: the tokens of one process with a large pool."""
    directory, page_size, num_device_pages, length, num_tokens = family_dir(family), 4, 6, 128, 30
    large, small = (make_engine(directory, Shard(page_size=page_size), num_tokens=size) for size in (640, num_device_pages * 4))
    book = PageBook.of(large, {"a": length})
    first = prefill_all(large, {"a": prompts[length]}, book)["a"]
    hosts = [host_pool_of(engine, 48) for engine in (large, small)]
    num_pages = length // page_size
    moves = [PageMove(group=0, device_pages=book.at("a", length)[0], host_pages=range(num_pages))]
    PageMover(large.pool, hosts[0], buffer_bytes=2 * hosts[0].page_bytes[0]).save(moves)
    for page in range(num_pages):
        hosts[1].page(0, page)[:] = hosts[0].page(0, page)
    small.use_host_pool(hosts[1], block_bytes=1 << 14)
    mover = PageMover(small.pool, hosts[1], buffer_bytes=2 * hosts[1].page_bytes[0])
    host_table, pages, free = list(range(num_pages)), [NO_PAGE] * num_pages, list(range(num_device_pages))
    tokens = [first]
    for position in range(length, length + num_tokens - 1):
        if position // page_size == len(pages):
            if not free:  # the oldest pages that are on the device leave it for others
                oldest = [len(host_table), len(host_table) + 1]
                released = [pages[entry] for entry in oldest]
                mover.save([PageMove(group=0, device_pages=released, host_pages=oldest)])
                host_table += oldest
                pages[oldest[0] : oldest[-1] + 1] = [NO_PAGE] * len(oldest)
                free += released
            pages.append(free.pop())
        item = DecodeItem(
            request_id="a", token_id=tokens[-1], position=position, page_tables=(pages,), host_tables=(tuple(host_table),)
        )
        tokens.append(small.decode([item])["a"])
    assert len(host_table) > num_pages and len(pages) > num_device_pages
    assert tokens == generate(directory, prompts[length], num_tokens)


@pytest.mark.parametrize("family", WITHOUT_FULL_ATTENTION)
def test_a_model_without_full_attention_takes_none(family_dir: Directory, family: str) -> None:
    engine = make_engine(family_dir(family), Shard(page_size=4))
    assert [group.kind for group in engine.pool.groups] == [GroupKind.WINDOW]
    with pytest.raises(ConfigError, match=r"the model has no full attention \(window_\d+\)"):
        engine.use_host_pool(HostPool(engine.pool, num_pages=[2]), block_bytes=1 << 20)


def host_item(**changes: Any) -> DecodeItem:
    """Ten tokens in pages of 4, of which the first is in host memory."""
    fields: dict[str, Any] = {"page_tables": ((NO_PAGE, 1, 2),), "host_tables": ((3,),), "position": 9}
    return DecodeItem(request_id="a", token_id=5, **fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_tables": ((4,),)}, r"has host pages 4 to 4; the host pool's are in \[0, 4\)"),
        ({"host_tables": ((0, 1),)}, "has 2 host pages; so many entries of its page table must begin it as -1"),
        ({"host_tables": ((0, 1, 2),)}, "has 3 host pages; position 9 is written on the device, so at most 2"),
    ],
)
def test_items_whose_tables_do_not_fit_are_refused(demo_dir: Path, changes: dict[str, Any], message: str) -> None:
    engine = make_engine(demo_dir, Shard(page_size=4))
    with pytest.raises(EngineError, match=r"the engine has no host pool \(use_host_pool\)"):
        engine.decode_batch([host_item()])
    engine.use_host_pool(host_pool_of(engine, 4), block_bytes=1 << 20)
    with pytest.raises(EngineError, match=message):
        engine.decode_batch([host_item(**changes)])
    (kept,) = engine.decode_batch([host_item()]).decode_rows
    assert kept.page_tables == ((NO_PAGE, 1, 2),) and kept.host_tables == ((3,),)


def test_blocks_in_the_store_that_do_not_fit_are_refused(demo_dir: Path) -> None:
    engine = make_engine(demo_dir, Shard(page_size=4))
    host = host_pool_of(engine, 8)
    stored = StoredPages(host, 0, pages_per_block=2)
    size = largest_slice(host, 0)
    with pytest.raises(ConfigError, match=f"block_bytes is {size}; a block of 2 pages in the store needs at least {2 * size}"):
        engine.use_host_pool(host, block_bytes=size, stored=stored)
    engine.use_host_pool(host, block_bytes=2 * size)
    item = host_item(page_tables=((NO_PAGE, NO_PAGE, 2),), host_tables=(), stored_blocks=(0,))
    with pytest.raises(EngineError, match="has 1 blocks in the store; the engine cannot read any"):
        engine.decode_batch([item])
    engine = make_engine(demo_dir, Shard(page_size=4))
    engine.use_host_pool(host_pool_of(engine, 8), block_bytes=2 * size, stored=stored)
    assert engine.decode_batch([item]).decode_rows == (replace(item, host_tables=((),)),)
    with pytest.raises(EngineError, match=r"has 3 pages in the store and in host memory; position 9 is .*, so at most 2"):
        engine.decode_batch([replace(item, host_tables=((1,),))])


def test_draft_tokens_of_a_request_with_host_pages_are_refused(demo_dir: Path) -> None:
    engine = make_engine(demo_dir, Shard(page_size=4), num_speculative_tokens=1)
    engine.use_host_pool(host_pool_of(engine, 4), block_bytes=1 << 20)
    with pytest.raises(EngineError, match="'a' has 1 draft tokens, and pages in host memory or in the store"):
        engine.verify([host_item(draft_token_ids=(7,))])


@settings(max_examples=50)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    pages_per_block=st.integers(1, 9),
    page_size=st.sampled_from([1, 4]),
)
def test_blocks_hold_every_page_once_and_say_whose_it_is(counts: list[int], pages_per_block: int, page_size: int) -> None:
    tables = [tuple(100 * row + index for index in range(count)) for row, count in enumerate(counts)]
    cut = cut_into_blocks(tables, pages_per_block=pages_per_block, page_size=page_size)
    found: list[list[int]] = [[] for _ in tables]
    for block in cut.blocks:
        assert block.num_pages == pages_per_block or block is cut.blocks[-1]
        assert counts[block.first_row] and counts[block.end_row - 1], "no row without pages at either end"
        assert block.first_part % 4 == 0, "where the compiled kernel takes 16 bytes at a time"
        pages = cut.pages[block.begin : block.end].tolist()
        parts = range(block.first_part, block.end_part)
        for row, part in zip(range(block.first_row, block.end_row), parts, strict=True):
            first, count = int(cut.first_tokens[part]), int(cut.num_tokens[part])
            assert first % page_size == count % page_size == 0
            found[row] += pages[first // page_size : (first + count) // page_size]
    assert found == [list(table) for table in tables]
    assert [block.begin for block in cut.blocks] == [0, *(block.end for block in cut.blocks[:-1])]
