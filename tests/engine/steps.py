"""Driving an engine the way a node does: pages bound at random, prompts cut into chunks, tokens fed back."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from transfer.engine_types import GREEDY, DecodeItem, PrefillItem, SamplingParams


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


def prefill_all(
    engine: Any,
    prompts: Mapping[str, tuple[int, ...]],
    tables: Mapping[str, Sequence[int]],
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
                page_tables=(tables[request_id],),
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
    tables: Mapping[str, Sequence[int]],
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
                    page_tables=(tables[request_id],),
                    sampling=sampling,
                )
                for request_id, own in tokens.items()
            ]
        )
        for request_id, own in tokens.items():
            own.append(found[request_id])
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
