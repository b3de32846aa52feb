"""Driving an engine the way a node does: pages bound at random, prompts cut into chunks, tokens fed back."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from transfer.engine_types import GREEDY, DecodeItem, PrefillItem, SamplingParams
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup, layer_groups
from transfer.layout import Shard
from transfer.pool.kv_pool import KVPool

Directory = Callable[[str], Path]
"""Name of a family -> directory of its model."""
Prompts = dict[int, tuple[int, ...]]
"""Prompts by length."""


def make_engine(
    directory: Path,
    shard: Shard,
    *,
    num_tokens: int = 640,
    num_states: int = 8,
    dummy_seed: int | None = None,
    draft: Path | None = None,
    **settings: Any,
) -> EmbeddedEngine:
    """Return an engine whose pool has room for `num_tokens` in each group of layers with pages."""
    files = read_model_files(directory, dummy_seed=dummy_seed)
    layout = files.layout()
    if draft is not None:
        settings["draft"] = read_model_files(draft, dummy_seed=dummy_seed)
        layout = replace(layout, layers=layout.layers + settings["draft"].layout().layers)
    num_pages = pages_for(layer_groups(layout), num_tokens // shard.page_size, num_states)
    return EmbeddedEngine(files, shard=shard, num_pages=num_pages, **settings)


def bind_pages(num_pages: int, page_size: int, lengths: Mapping[str, int], seed: int = 0) -> dict[str, list[int]]:
    """A page table for each request, out of a pool's pages in random order."""
    pages = list(range(num_pages))
    random.Random(seed).shuffle(pages)
    tables: dict[str, list[int]] = {}
    for request_id, length in lengths.items():
        count = -(-length // page_size)
        tables[request_id], pages = pages[:count], pages[count:]
        assert len(tables[request_id]) == count, "the test's pool is too small"
    return tables


class PageBook:
    """The page tables of some requests in every group of layers, as they change while windows move on.

    Args:
        groups: The pool's groups.
        num_pages: Pages of each.
        page_size: Tokens per page.
        lengths: Tokens of each request in the end.
        seed: Of the order of pages.
        pool: Filled with numbers that are none wherever a window has passed; None leaves that out.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_pages: Sequence[int],
        page_size: int,
        lengths: Mapping[str, int],
        *,
        seed: int = 0,
        pool: KVPool | None = None,
    ) -> None:
        self.groups = groups
        self.page_size = page_size
        self.pool = pool
        self._tables: list[dict[str, list[int]]] = []
        for group, count in zip(groups, num_pages, strict=True):
            size = group.page_size(page_size)
            wanted = {name: group.num_pages(length, size) * size for name, length in lengths.items()}
            self._tables.append(bind_pages(count, size, wanted, seed))

    @classmethod
    def of(cls, engine: Any, lengths: Mapping[str, int], *, seed: int = 0) -> PageBook:
        """Over an engine's own pool, which is filled with numbers that are none before anything is written."""
        pool: KVPool = engine.pool
        fill_with_nan(pool)
        return cls(pool.groups, pool.num_pages, pool.page_size, lengths, seed=seed, pool=pool)

    def give(self, former: str, latter: str) -> None:
        """The pages of a request that is over go to another that needs no more of them, with what is in them."""
        for tables in self._tables:
            given = [page for page in tables[former] if page != NO_PAGE][: len(tables[latter])]
            tables[latter][: len(given)] = given

    def at(self, request_id: str, next_token: int) -> tuple[list[int], ...]:
        """The tables for a step whose first token is `next_token`."""
        for index, group in enumerate(self.groups):
            if group.kind is GroupKind.WINDOW:
                table = self._tables[index][request_id]
                for entry in range(group.first_needed_token(next_token) // self.page_size):
                    if table[entry] != NO_PAGE and self.pool is not None:
                        fill_with_nan(self.pool, group.layers, table[entry])
                    table[entry] = NO_PAGE
        return tuple(list(tables[request_id]) for tables in self._tables)


def copy_kv(source: KVPool, source_tables: Any, target: KVPool, tables: Any, num_tokens: int) -> None:
    """Copy the KV that a transfer moves: the last tokens of a window, a recurrent layer's state after the last token."""
    for layer in range(source.layout.num_layers):
        index = source.group_of(layer)
        group = source.groups[index]
        tokens = range(1) if group.kind is GroupKind.STATE else range(group.first_travelling_token(num_tokens), num_tokens)
        slots = [
            slots_of(table, tokens, pool.part_of(layer).page_size)
            for pool, table in ((source, source_tables[index]), (target, tables[index]))
        ]
        target.write(layer, slots[1], *source.read(layer, slots[0]))


def slots_of(table: Sequence[int], tokens: Sequence[int], page_size: int) -> torch.Tensor:
    return torch.tensor([table[token // page_size] * page_size + token % page_size for token in tokens])


def fill_with_nan(pool: KVPool, layers: Sequence[int] | None = None, page: int | None = None) -> None:
    """Whatever is read of it before it is written again poisons what is computed."""
    for layer in range(pool.layout.num_layers) if layers is None else layers:
        for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]:
            buffer = pool.buffer(layer, is_v=is_v)
            (buffer if page is None else buffer[page]).fill_(torch.nan)


def pages_for(groups: Sequence[LayerGroup], num_pages: int, num_states: int = 8) -> tuple[int, ...]:
    """Pages of each group: enough for a test, and states for few requests, so that their rows are used again."""
    return tuple(num_states if group.kind is GroupKind.STATE else num_pages for group in groups)


Tables = Mapping[str, Sequence[int]] | PageBook


def _tables_at(tables: Tables, request_id: str, next_token: int) -> tuple[Sequence[int], ...]:
    return tables.at(request_id, next_token) if isinstance(tables, PageBook) else (tables[request_id],)


def prefill_all(
    engine: Any,
    prompts: Mapping[str, tuple[int, ...]],
    tables: Tables,
    *,
    chunk_tokens: int = 1_000_000,
    sampling: SamplingParams = GREEDY,
) -> dict[str, int]:
    """First tokens; all requests advance together by `chunk_tokens` a step."""
    first: dict[str, int] = {}
    longest = max(map(len, prompts.values()))
    for begin in range(0, longest, chunk_tokens):
        items = [
            PrefillItem(
                request_id=request_id,
                token_ids=tokens[begin : begin + chunk_tokens],
                first_token=begin,
                page_tables=_tables_at(tables, request_id, begin),
                sampling=sampling,
                is_last=begin + chunk_tokens >= len(tokens),
            )
            for request_id, tokens in prompts.items()
            if begin < len(tokens)
        ]
        first |= engine.prefill(items)
    return first


def decode_all(
    engine: Any,
    first: Mapping[str, int],
    lengths: Mapping[str, int],
    tables: Tables,
    num_tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
) -> dict[str, list[int]]:
    """`num_tokens` tokens of every request, the first included."""
    tokens = {request_id: [token] for request_id, token in first.items()}
    for step in range(num_tokens - 1):
        found = engine.decode(
            [
                DecodeItem(
                    request_id=request_id,
                    token_id=own[-1],
                    position=lengths[request_id] + step,
                    page_tables=_tables_at(tables, request_id, lengths[request_id] + step),
                    sampling=sampling,
                )
                for request_id, own in tokens.items()
            ]
        )
        for request_id, own in tokens.items():
            own.append(found[request_id])
    return tokens


def decode_ahead(
    engine: Any,
    first: Mapping[str, int],
    lengths: Mapping[str, int],
    tables: Tables,
    num_tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
) -> dict[str, list[int]]:
    """As `decode_all`, but each step is queued before the tokens of the previous step are read."""
    tokens = {request_id: [token] for request_id, token in first.items()}
    reads: list[Callable[[], dict[str, int]]] = []
    for step in range(num_tokens):
        if step < num_tokens - 1:
            items = [
                DecodeItem(
                    request_id=request_id,
                    token_id=0 if step else first[request_id],
                    position=lengths[request_id] + step,
                    page_tables=_tables_at(tables, request_id, lengths[request_id] + step),
                    sampling=sampling,
                    is_unread=step > 0,
                )
                for request_id in list(first)[:: 1 if step % 2 else -1]
            ]
            reads.append(engine.begin_decode(items))
        if step:
            for request_id, token in reads.pop(0)().items():
                tokens[request_id].append(token)
    return tokens


def generate_all(
    engine: Any,
    prompts: Mapping[str, tuple[int, ...]],
    num_tokens: int,
    *,
    chunk_tokens: int = 1_000_000,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
) -> dict[str, list[int]]:
    lengths = {request_id: len(tokens) for request_id, tokens in prompts.items()}
    totals = {request_id: length + num_tokens for request_id, length in lengths.items()}
    tables = bind_pages(engine.pool.num_pages[0], engine.pool.page_size, totals, seed)
    first = prefill_all(engine, prompts, tables, chunk_tokens=chunk_tokens, sampling=sampling)
    return decode_all(engine, first, lengths, tables, num_tokens, sampling=sampling)
