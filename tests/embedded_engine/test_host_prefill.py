"""Prefill of prompts whose KV of full attention lies in host memory gives the same tokens as prefill on the device."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.host_prefill import HostStep
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.steps import Directory, PageBook, Prompts, decode_all, make_engine
from tests.embedded_engine.test_tiered_decode import FAMILIES_AND_SHARDS
from tests.embedded_engine.tiers import full_group, host_pool_of, largest_slice
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import PrefillItem
from transfer.errors import EngineError
from transfer.layer_groups import NO_PAGE
from transfer.layout import Shard
from transfer.pool.host_pool import HostPool

LENGTHS = {"a": 64, "b": 5, "c": 33, "d": 17}
HOSTED = ("a", "c", "d")
NUM_TOKENS = 12


class Hosted:
    """An engine, its host pool, and the host pages of some requests, in random order."""

    def __init__(self, engine: EmbeddedEngine, lengths: Mapping[str, int], *, pages_per_block: int) -> None:
        self.engine = engine
        self.page_size = engine.pool.page_size
        self.group = full_group(engine.pool.groups)
        counts = {name: -(-length // self.page_size) for name, length in lengths.items()}
        self.host = host_pool_of(engine, sum(counts.values()))
        engine.use_host_pool(self.host, block_bytes=pages_per_block * largest_slice(self.host, self.group))
        free = list(range(sum(counts.values())))
        random.Random(3).shuffle(free)
        self.tables = {name: [free.pop() for _ in range(count)] for name, count in counts.items()}

    def prefill(self, prompts: Mapping[str, tuple[int, ...]], book: PageBook, *, chunk_tokens: int) -> dict[str, int]:
        """Return the first tokens. All requests advance together."""
        first: dict[str, int] = {}
        for begin in range(0, max(map(len, prompts.values())), chunk_tokens):
            items = [
                self.item(name, tokens[begin : begin + chunk_tokens], begin, book, is_last=begin + chunk_tokens >= len(tokens))
                for name, tokens in prompts.items()
                if begin < len(tokens)
            ]
            first |= self.engine.prefill(items)
        return first

    def item(self, name: str, tokens: tuple[int, ...], begin: int, book: PageBook, *, is_last: bool) -> PrefillItem:
        tables = list(book.at(name, begin))
        hosts: tuple[tuple[int, ...], ...] = ()
        if name in self.tables:
            num_pages = -(-(begin + len(tokens)) // self.page_size)
            hosts = tuple(tuple(self.tables[name][:num_pages]) if index == self.group else () for index in range(len(tables)))
            tables[self.group] = [NO_PAGE] * num_pages
        return PrefillItem(
            request_id=name,
            token_ids=tokens,
            first_token=begin,
            page_tables=tuple(tables),
            is_last=is_last,
            host_tables=hosts,
        )


def load(engine: EmbeddedEngine, host: HostPool, tables: Mapping[str, list[int]], book: PageBook, names: Collection[str]) -> None:
    """Load the pages of requests into the device pool, for decode steps."""
    group = full_group(engine.pool.groups)
    mover = PageMover(engine.pool, host, buffer_bytes=2 * host.page_bytes[group])
    for name in names:
        device = book.at(name, 0)[group][: len(tables[name])]
        mover.load([PageMove(group=group, device_pages=device, host_pages=tables[name])])


@pytest.mark.parametrize(("family", "shard"), FAMILIES_AND_SHARDS)
def test_tokens_are_those_of_the_device_alone(
    family_dir: Directory, prompts: Prompts, generate: Generate, family: str, shard: Shard
) -> None:
    """A request on the device shares the steps, and chunks end within pages."""
    directory = family_dir(family)
    engine = make_engine(directory, shard)
    book = PageBook.of(engine, {name: length + NUM_TOKENS for name, length in LENGTHS.items()})
    hosted = Hosted(engine, {name: LENGTHS[name] for name in HOSTED}, pages_per_block=3)
    first = hosted.prefill({name: prompts[length] for name, length in LENGTHS.items()}, book, chunk_tokens=15)
    load(engine, hosted.host, hosted.tables, book, HOSTED)
    found = decode_all(engine, first, LENGTHS, book, NUM_TOKENS)
    assert found == {name: generate(directory, prompts[length], NUM_TOKENS) for name, length in LENGTHS.items()}


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next"])
def test_every_layer_is_reported_behind_the_writes_to_host_pages(
    family_dir: Directory, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """This includes layers of windows and states: a chunk has layers of both kinds, and another stream writes host pages."""
    engine = make_engine(family_dir(family), Shard(page_size=4), layers_per_group=1)
    book = PageBook.of(engine, {"a": 33})
    hosted = Hosted(engine, {"a": 33}, pages_per_block=3)
    behind, reported = [], []

    @contextmanager
    def on_write_stream(self: HostStep) -> Iterator[None]:
        behind.append(True)
        yield
        behind.pop()

    def on_layers_written(layers_done: int, event: object) -> None:
        assert behind, f"layer {layers_done - 1}"
        reported.append(layers_done)

    monkeypatch.setattr(HostStep, "on_write_stream", on_write_stream)
    engine.prefill([hosted.item("a", prompts[33], 0, book, is_last=True)], on_layers_written)
    assert reported == list(range(1, engine.layout.num_layers + 1))


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_a_prompt_of_sixty_four_times_the_device_pool(
    family_dir: Directory, prompts: Prompts, generate: Generate, family: str
) -> None:
    directory, length = family_dir(family), 257
    large, small = (make_engine(directory, Shard(page_size=4), num_tokens=size) for size in (640, 4))
    hosted = Hosted(small, {"a": length}, pages_per_block=5)
    book = PageBook(small.pool.groups, small.pool.num_pages, 4, {"a": 1})
    first = hosted.prefill({"a": prompts[length]}, book, chunk_tokens=24)
    host = host_pool_of(large, len(hosted.tables["a"]))
    for page in hosted.tables["a"]:
        host.page(hosted.group, page)[:] = hosted.host.page(hosted.group, page)
    book = PageBook.of(large, {"a": length + NUM_TOKENS})
    load(large, host, hosted.tables, book, "a")
    assert decode_all(large, first, {"a": length}, book, NUM_TOKENS) == {"a": generate(directory, prompts[length], NUM_TOKENS)}


def test_host_tables_that_do_not_fit_are_refused(demo_dir: Path, prompts: Prompts) -> None:
    engine = make_engine(demo_dir, Shard(page_size=4))
    book = PageBook.of(engine, {"a": 20})
    tokens = prompts[17]

    def refused(*hosts: tuple[int, ...], reason: str) -> None:
        item = PrefillItem(
            request_id="a", token_ids=tokens, first_token=0, page_tables=book.at("a", 0), is_last=True, host_tables=hosts
        )
        with pytest.raises(EngineError, match=reason):
            engine.prefill([item])

    refused((0, 1, 2, 3, 4), reason=r"the engine has no host pool \(use_host_pool\)")
    engine.use_host_pool(host_pool_of(engine, 5), block_bytes=1 << 20)
    refused((0, 1, 2, 3), reason="has 4 host pages; 17 tokens need 5")
    refused((0, 1, 2, 3, 5), reason=r"has host pages 0 to 5; the host pool's are in \[0, 5\)")
    refused((), (0,), reason="has 2 host tables")
    assert engine.prefill(
        [PrefillItem(request_id="a", token_ids=tokens, first_token=0, page_tables=book.at("a", 0), is_last=True)]
    ), "the engine goes on"
